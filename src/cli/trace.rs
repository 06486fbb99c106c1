//! `stepgate trace summary` and `stepgate trace import`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::gate::matches;
use crate::perfdb::HostRows;
use crate::timing::{InputError, Scope};
use crate::trace::{
    Alignment, DeviceSummary, Idle, Iteration, Profile, ProfileSummary, Spread, Summary,
    import as import_rows, read_partial, summarise,
};

use super::output::write_file;
use super::progress::Progress;
use super::run::Stop;
use super::text::{Table, bold};

/// Prints the accounting of the profiles in `files`. A file that is cut off or damaged is summarised
/// as far as it goes, with a warning, and then is the error that the command ends with.
pub fn summary(
    files: &[PathBuf],
    iteration: Option<&str>,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let (mut profiles, mut faults) = (Vec::new(), Vec::new());
    for file in files {
        let (read, fault) = read_shown(file)?;
        profiles.extend(read);
        faults.extend(fault);
    }
    let picked = iteration.map(|pattern| move |name: &str| matches(pattern, name));
    let picked = picked
        .as_ref()
        .map(|picked| picked as &dyn Fn(&str) -> bool);
    let summary = summarise(&profiles, picked)?;
    drop(profiles);
    if let Some(pattern) = iteration
        && summary.profiles.iter().all(|one| one.iterations.is_empty())
    {
        let what = format!("no annotation or op is named `{pattern}`");
        return Err(Stop::Usage(what));
    }
    if json {
        serde_json::to_writer(&mut *out, &summary).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        print(&summary, out)?;
    }
    match faults.into_iter().next() {
        Some(fault) => Err(fault.into()),
        None => Ok(()),
    }
}

/// What `trace import` is told of a run, and where its rows go.
pub struct Import<'a> {
    pub files: &'a [PathBuf],
    pub scope: Scope,
    pub iteration: Option<&'a str>,
    pub out: &'a Path,
    pub force: bool,
}

/// Writes the timing rows of profiles as a host file. A file that is cut off or damaged is refused,
/// and so is a result that the project's own loader would refuse.
pub fn import(asked: Import<'_>, out: &mut dyn Write) -> Result<(), Stop> {
    let stem = asked.out.file_stem().and_then(|stem| stem.to_str());
    let (Some(stem), Some("yaml")) = (stem, asked.out.extension().and_then(|end| end.to_str()))
    else {
        return Err(Stop::Usage(
            "the name given to --out ends in .yaml".to_owned(),
        ));
    };
    let mut profiles = Vec::new();
    for file in asked.files {
        match read_shown(file)? {
            (_, Some(fault)) => return Err(fault.into()),
            (read, None) => profiles.extend(read),
        }
    }
    let rows = with_picked(asked.iteration, |picked| {
        import_rows(&profiles, asked.scope, stem, picked)
    })?;
    let yaml = serde_yaml::to_string(&rows).map_err(|error| {
        InputError::new(asked.out, format!("cannot write the rows: {error}"), "")
    })?;
    let text = format!(
        "# Written by `stepgate trace import`. A profiler slows down what it watches: these rows are\n\
         # diagnostic, and no prediction is composed of them.\n{yaml}"
    );
    loads(&text, asked.out)?;
    write_file(asked.out, text.as_bytes(), "the rows", asked.force)?;
    let diagnostic = rows.diagnostic.as_ref();
    let written = diagnostic.map_or(0, |diagnostic| diagnostic.rows.len());
    writeln!(out, "{}: {written} diagnostic rows", asked.out.display())?;
    for profile in &profiles {
        for warning in &profile.warnings {
            eprintln!("{}: warning: {warning}", profile.file);
        }
    }
    Ok(())
}

/// What the project's loader refuses is not written.
fn loads(text: &str, file: &Path) -> Result<(), InputError> {
    let unwritable = |error: io::Error| {
        InputError::new(
            file,
            format!("cannot check the rows: {error}"),
            "check the folder for temporary files",
        )
    };
    let folder = tempfile::tempdir().map_err(unwritable)?;
    std::fs::write(folder.path().join("rows.yaml"), text).map_err(unwritable)?;
    HostRows::load(folder.path())
        .map(drop)
        .map_err(|mut error| {
            error.place.file = file.to_path_buf();
            (error.place.line, error.place.column) = (None, None);
            error.what = format!("no valid host file comes of this: {}", error.what);
            error
        })
}

/// Calls `each` with the test that a name pattern stands for.
pub(super) fn with_picked<T>(
    pattern: Option<&str>,
    each: impl FnOnce(Option<&dyn Fn(&str) -> bool>) -> T,
) -> T {
    match pattern {
        Some(pattern) => each(Some(&|name| matches(pattern, name))),
        None => each(None),
    }
}

/// Reads a file and shows how far it is.
pub(super) fn read_shown(file: &Path) -> Result<(Vec<Profile>, Option<InputError>), InputError> {
    let size = file.metadata().map_or(0, |meta| meta.len());
    let mut progress = Progress::new();
    let reading = read_partial(file, &mut |read| {
        progress.show(|| {
            let percent = read.saturating_mul(100) / size.max(1);
            format!("{}: {percent} % read", file.display())
        });
    });
    progress.clear();
    let mut reading = reading?;
    if let Some(fault) = &reading.ended_by {
        for profile in &mut reading.profiles {
            let warning = format!(
                "PARTIAL: only what comes before the fault is counted ({})",
                fault.what
            );
            profile.warnings.insert(0, warning);
        }
    }
    Ok((reading.profiles, reading.ended_by))
}

fn print(summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    for (at, profile) in summary.profiles.iter().enumerate() {
        if at > 0 {
            writeln!(out)?;
        }
        print_profile(profile, out)?;
    }
    if let Some(alignment) = &summary.collectives {
        print_alignment(alignment, summary.ranks_missing, out)?;
    }
    Ok(())
}

fn print_profile(profile: &ProfileSummary, out: &mut dyn Write) -> io::Result<()> {
    let mut whose = Vec::new();
    match (profile.rank, profile.world) {
        (Some(rank), Some(world)) => whose.push(format!("rank {rank} of {world}")),
        (Some(rank), None) => whose.push(format!("rank {rank}")),
        (None, _) => {}
    }
    whose.extend(profile.process.map(|process| format!("process {process}")));
    let head = match whose.join(", ") {
        whose if whose.is_empty() => profile.file.clone(),
        whose => format!("{}: {whose}", profile.file),
    };
    writeln!(out, "{}", bold(&head))?;
    for warning in &profile.warnings {
        writeln!(out, "  warning: {warning}")?;
    }
    for device in &profile.devices {
        print_device(device, out)?;
    }
    let calls = &profile.calls;
    writeln!(
        out,
        "  runtime calls {}: {} launches, {} graph launches, {} copies and sets, {} \
         synchronisations, {} event records, {} stream waits",
        calls.total,
        calls.launches,
        calls.graph_launches,
        calls.transfers,
        calls.synchronisations,
        calls.event_records,
        calls.stream_waits
    )?;
    let graphs = &profile.graphs;
    match graphs.trace {
        "none" => writeln!(out, "  graphs: none")?,
        trace => writeln!(
            out,
            "  graphs: traced as {trace}; they own {} GPU events of {} us",
            graphs.events,
            us(graphs.sum_ns)
        )?,
    }
    if !profile.blocking.is_empty() {
        writeln!(
            out,
            "  blocked in synchronisations: {} us",
            us(calls.blocked_ns)
        )?;
        let mut table = Table::new(&["call", "count", "us", "longest us", "called from"]);
        for row in &profile.blocking {
            table.row(vec![
                row.call.clone(),
                row.count.to_string(),
                us(row.total_ns),
                us(row.longest_ns),
                row.caller.as_deref().unwrap_or("(no mark)").to_owned(),
            ]);
        }
        table.write(out, 4)?;
    }
    print_iterations(&profile.iterations, out)
}

fn print_device(device: &DeviceSummary, out: &mut dyn Write) -> io::Result<()> {
    let share = |ns: i64| format!("{:.1} %", ns as f64 / device.span_ns.max(1) as f64 * 100.0);
    let head = format!("device {}", device.device);
    let mut table = Table::new(&[&head, "us", "of span"]);
    let mut row = |name: &str, ns: i64| {
        table.row(vec![name.to_owned(), us(ns), share(ns)]);
    };
    let Idle {
        host_bound_ns,
        sync_bound_ns,
        tail_ns,
        unattributed_ns,
    } = device.idle;
    row("span", device.span_ns);
    row("busy", device.busy_ns);
    row("idle", device.idle.total_ns());
    row("  host-bound", host_bound_ns);
    row("  sync-bound", sync_bound_ns);
    row("  tail", tail_ns);
    if unattributed_ns > 0 {
        row("  unattributed", unattributed_ns);
    }
    row("sum of durations", device.sum_ns);
    table.write(out, 2)?;

    let mut table = Table::new(&["work", "count", "us"]);
    let total = device.work.iter().map(|work| work.count).sum::<usize>();
    for work in &device.work {
        table.row(vec![
            work.kind.to_owned(),
            work.count.to_string(),
            us(work.sum_ns),
        ]);
    }
    table.row(vec!["all".to_owned(), total.to_string(), us(device.sum_ns)]);
    table.write(out, 2)?;

    let mut spreads = Vec::new();
    if let Some(delay) = &device.delay {
        spreads.push(("launch to start".to_owned(), delay.spread));
    }
    for kernels in &device.collectives {
        let name = format!("{}, stream {}", kernels.kind, kernels.stream);
        spreads.push((name, kernels.duration));
    }
    print_spreads(&spreads, out)?;
    if let Some(delay) = &device.delay {
        writeln!(
            out,
            "  {} start before their launch call returns, {} before it begins; {} pieces of work \
             without a launch call",
            delay.before_return, delay.before_call, delay.without_launch
        )?;
    }
    Ok(())
}

fn print_iterations(iterations: &[Iteration], out: &mut dyn Write) -> io::Result<()> {
    if iterations.is_empty() {
        return writeln!(
            out,
            "  no iterations found: name their marks with --iteration"
        );
    }
    let mut table = Table::new(&[
        "iteration, us",
        "host",
        "dispatch",
        "device",
        "GPU span",
        "busy",
        "GPU events",
        "launches",
        "graph launches",
    ]);
    for iteration in iterations {
        let mut cells = vec![
            iteration.name.clone(),
            us(iteration.host_ns),
            iteration.dispatch_ns.map_or("-".to_owned(), us),
        ];
        let counts = [
            iteration.launches.to_string(),
            iteration.graph_launches.to_string(),
        ];
        if iteration.devices.is_empty() {
            cells.extend(["-"; 4].map(str::to_owned));
            cells.extend(counts);
            table.row(cells);
            continue;
        }
        for device in &iteration.devices {
            let mut cells = cells.clone();
            cells.extend([
                device.device.to_string(),
                us(device.span_ns),
                us(device.busy_ns),
                device.events.to_string(),
            ]);
            cells.extend(counts.clone());
            table.row(cells);
        }
    }
    table.write(out, 2)
}

fn print_alignment(
    alignment: &Alignment,
    missing: Option<u32>,
    out: &mut dyn Write,
) -> io::Result<()> {
    writeln!(
        out,
        "\n{}",
        bold("collectives of all ranks, clocks aligned on their ends")
    )?;
    if let Some(missing) = missing.filter(|missing| *missing > 0) {
        writeln!(
            out,
            "  warning: {missing} ranks are not among the files: waits are too short and transfers \
             too long where one of them came last"
        )?;
    }
    for kind in &alignment.unmatched {
        writeln!(
            out,
            "  warning: not matched, ranks ran it unequally often: {kind}"
        )?;
    }
    let mut spreads = Vec::new();
    for kind in &alignment.kinds {
        spreads.push((format!("{}: transfer", kind.kind), kind.transfer));
    }
    for rank in &alignment.ranks {
        spreads.push((format!("{}: lateness", rank.rank), rank.lateness));
        spreads.push((format!("{}: wait", rank.rank), rank.wait));
    }
    print_spreads(&spreads, out)?;
    for rank in &alignment.ranks {
        writeln!(
            out,
            "  {}: clock moved by {} us, ends meet within {} us",
            rank.rank,
            us(rank.clock_offset_ns),
            us(rank.misfit_ns)
        )?;
    }
    Ok(())
}

fn print_spreads(spreads: &[(String, Spread)], out: &mut dyn Write) -> io::Result<()> {
    if spreads.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&["times, us", "count", "min", "p50", "p90", "max", "sum"]);
    for (name, spread) in spreads {
        table.row(vec![
            name.clone(),
            spread.count.to_string(),
            us(spread.min_ns),
            us(spread.p50_ns),
            us(spread.p90_ns),
            us(spread.max_ns),
            us(spread.sum_ns),
        ]);
    }
    table.write(out, 2)
}

/// Nanoseconds as exact microseconds.
pub(super) fn us(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    let size = ns.unsigned_abs();
    format!("{sign}{}.{:03}", size / 1000, size % 1000)
}
