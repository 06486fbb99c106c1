//! `stepgate trace replay`.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::trace::{RankReplay, Replay, ReplayPart, replay};

use super::output::write_file;
use super::run::Stop;
use super::text::{Table, bold};
use super::trace::{read_shown, us, with_picked};

/// Slices in one timeline, at most: about 300 MB of JSON.
const SLICES_MAX: usize = 2_000_000;

/// Replays the profiles in `files` and prints composed beside traced spans. A file that is cut off
/// or damaged is refused: half a step has no span.
pub fn run(
    files: &[PathBuf],
    iteration: Option<&str>,
    timeline: Option<&Path>,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let mut profiles = Vec::new();
    for file in files {
        match read_shown(file)? {
            (_, Some(fault)) => return Err(fault.into()),
            (read, None) => profiles.extend(read),
        }
    }
    let composed = with_picked(iteration, |picked| replay(&profiles, picked))?;
    let report = &composed.report;
    if let Some(pattern) = iteration
        && report.ranks.iter().all(|rank| rank.steps.is_empty())
    {
        let what = format!("no annotation or op that launches work is named `{pattern}`");
        return Err(Stop::Usage(what));
    }
    if let Some(file) = timeline {
        let shown = composed.timeline();
        let slices = shown.slices().len();
        if slices > SLICES_MAX {
            return Err(Stop::Usage(format!(
                "the timeline would have {slices} slices, more than {SLICES_MAX}: give a profile of \
                 fewer steps"
            )));
        }
        let mut content = Vec::new();
        shown.write_chrome(&mut content)?;
        if file == Path::new("-") {
            out.write_all(&content)?;
            return Ok(());
        }
        write_file(file, &content, "the timeline", true)?;
        eprintln!(
            "wrote {}: {:.1} MB",
            file.display(),
            content.len() as f64 / 1e6
        );
    }
    if json {
        serde_json::to_writer(&mut *out, report).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        print(report, out)?;
    }
    Ok(())
}

fn print(report: &Replay, out: &mut dyn Write) -> io::Result<()> {
    for rank in &report.ranks {
        print_rank(rank, out)?;
    }
    for note in &report.notes {
        writeln!(out, "{note}")?;
    }
    if let Some(error) = report.median_error() {
        writeln!(out, "median error of a step: {:.3} %", error * 100.0)?;
    }
    Ok(())
}

fn print_rank(rank: &RankReplay, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", bold(&format!("{}: {}", rank.file, rank.rank)))?;
    let rows = &rank.rows;
    for (call, ns) in &rows.launch_ns {
        let returned = rows.launch_return_ns.get(call);
        let returned = returned.map_or(String::new(), |ns| {
            format!(", from its return {} us", us(*ns))
        });
        writeln!(out, "  {call} to start, least: {} us{returned}", us(*ns))?;
    }
    writeln!(
        out,
        "  from work to the next on its stream, median: {} us; from awaited work to the return, \
         least: {} us",
        us(rows.turn_around_ns),
        us(rows.sync_return_ns)
    )?;
    if rank.without_launch > 0 {
        writeln!(
            out,
            "  {} pieces of work were launched before the profile begins: streams start from them",
            rank.without_launch
        )?;
    }
    let alone = rank.collectives.saturating_sub(rank.matched_collectives);
    if alone > 0 {
        writeln!(
            out,
            "  {alone} collectives without the other ranks' files: peer wait inside their durations"
        )?;
    }
    let mut table = Table::new(&["step, us", "traced", "composed", "error", "GPU works"]);
    for step in &rank.steps {
        table.row(vec![
            step.name.clone(),
            us(step.traced_ns),
            us(step.composed_ns),
            format!("{:+.3} %", step.error() * 100.0),
            step.works.to_string(),
        ]);
    }
    table.write(out, 2)?;
    let used: BTreeSet<ReplayPart> = (rank.steps.iter())
        .flat_map(|step| step.parts_ns.keys().copied())
        .collect();
    let mut head = vec!["composed path, us"];
    head.extend(used.iter().map(|part| part.name()));
    head.extend(["| host wait", "peer wait", "untraced"]);
    let mut table = Table::new(&head);
    for step in &rank.steps {
        let part = |part: &ReplayPart| us(step.parts_ns.get(part).copied().unwrap_or(0));
        let mut row = vec![step.name.clone()];
        row.extend(used.iter().map(part));
        row.extend([step.host_wait_ns, step.peer_wait_ns, step.untraced_ns].map(us));
        table.row(row);
    }
    table.write(out, 2)
}
