//! `stepgate ledger`.

use std::cmp::Ordering;
use std::io::Write;
use std::path::Path;

use crate::gate::{
    Analysis, Blessing, COMPILER, CaseReport, Class, Finding, Kind, LedgerRow, Question, RowNames,
    analyse, compiler_file, error_pct, matches, read_ledger, write_ledger, write_whole,
};

use super::args::LedgerCommand;
use super::run::Stop;
use super::today;

/// Runs a subcommand and returns its exit code.
pub fn run(root: &Path, command: LedgerCommand, out: &mut dyn Write) -> Result<u8, Stop> {
    match command {
        LedgerCommand::Verify => verify(root, out),
        LedgerCommand::Show { of, json } => show(root, &of, json, out),
        LedgerCommand::Record {
            reason,
            case,
            mechanism,
            rows,
            base,
            today: given,
        } => {
            if reason.trim().is_empty() {
                return Err(Stop::Usage("the reason says nothing".to_owned()));
            }
            let names = RowNames::read(root, &base)?;
            if let Some(row) = rows.iter().find(|row| !names.has(row)) {
                let what = format!(
                    "no row is called `{row}`, here or in the base; `stepgate predict CASE \
                     --explain` names them"
                );
                return Err(Stop::Usage(what));
            }
            let date = today::today(given)?;
            let analysis = analyse(&Question {
                root,
                rev: &base,
                cases: &[],
                results: &[],
                today: date,
                proofs: false,
            })?;
            let blessing = Blessing {
                date,
                reason,
                mechanism,
                rows,
                fingerprint: analysis.fingerprint_after.clone(),
            };
            record(
                root,
                &analysis,
                &blessing,
                case.as_deref().unwrap_or("*"),
                out,
            )
        }
    }
}

fn verify(root: &Path, out: &mut dyn Write) -> Result<u8, Stop> {
    let ledger = read_ledger(root)?;
    let rows: usize = ledger.iter().map(|file| file.rows.len()).sum();
    writeln!(
        out,
        "{rows} rows in {} files, all well-formed",
        ledger.len()
    )?;
    Ok(0)
}

fn show(root: &Path, of: &str, json: bool, out: &mut dyn Write) -> Result<u8, Stop> {
    let mut shown = 0;
    for file in read_ledger(root)? {
        for (line, row) in file.text.lines().zip(&file.rows) {
            if row.case != of && row.point.map(|point| point.to_string()).as_deref() != Some(of) {
                continue;
            }
            shown += 1;
            if json {
                writeln!(out, "{line}")?;
            } else {
                writeln!(out, "{}", in_words(row))?;
            }
        }
    }
    if shown == 0 && !json {
        writeln!(out, "nothing is recorded of {of}")?;
    }
    Ok(0)
}

fn in_words(row: &LedgerRow) -> String {
    let ms = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| ms.to_string());
    let error = |pct: Option<f64>| pct.map_or("-".to_owned(), |pct| format!("{pct:+.2} %"));
    let mut text = format!(
        "{} {} {} {} {}: {} -> {} ms, error {} -> {}",
        row.date,
        row.class.name(),
        row.case,
        row.policy,
        row.metric,
        ms(row.before_ms),
        ms(row.after_ms),
        error(row.error_before_pct),
        error(row.error_after_pct)
    );
    if let (Some(code), Some(rows), Some(schedule)) = (
        row.code_effect_ms,
        row.row_effect_ms,
        row.schedule_effect_ms,
    ) {
        text += &format!("; code {code:+.4}, rows {rows:+.4}, schedule {schedule:+.4} ms");
    }
    text += &format!("\n  {}", row.reason);
    if let Some(mechanism) = &row.mechanism {
        text += &format!("\n  mechanism: {mechanism}; rows: {}", row.rows.join(", "));
    }
    text
}

/// Writes what is not recorded yet; nothing where a golden is not what is predicted.
fn record(
    root: &Path,
    analysis: &Analysis,
    blessing: &Blessing,
    glob: &str,
    out: &mut dyn Write,
) -> Result<u8, Stop> {
    let selected = || {
        analysis
            .cases
            .iter()
            .filter(|case| matches(glob, &case.case))
    };
    let mut stale = 0;
    for case in selected() {
        if let Some(what) = &case.not_reproduced {
            writeln!(out, "{}: the golden is not reproduced: {what}", case.case)?;
            stale += 1;
        }
    }
    let shut = |one: &&Finding| matches!(one.kind, Kind::BadInput | Kind::Proof);
    let shut: Vec<&Finding> = analysis.findings.iter().filter(shut).collect();
    for finding in &shut {
        writeln!(out, "{}", finding.what)?;
    }
    if stale > 0 || !shut.is_empty() {
        writeln!(
            out,
            "nothing is recorded; review the goldens first: `cargo insta review`"
        )?;
        let worst = shut.iter().map(|one| one.kind).min();
        return Ok(worst.unwrap_or(Kind::Unrecorded).exit_code());
    }
    let mut rows: Vec<LedgerRow> = selected()
        .flat_map(|case| rows_of(case, blessing))
        .collect();
    rows.retain_mut(|row| continue_from(row, &analysis.new_rows));
    if !rows.is_empty() {
        let file = write_ledger(root, blessing.date, &rows, &|_| Ok(()))?;
        let shown = file.strip_prefix(root).unwrap_or(&file).display();
        writeln!(out, "{shown}: {} rows", rows.len())?;
        for row in &rows {
            let words = in_words(row);
            writeln!(out, "  {}", words.lines().next().unwrap_or(""))?;
        }
    } else {
        writeln!(
            out,
            "nothing to record: no golden left its band, or the ledger has it"
        )?;
    }
    let compiler = format!("{COMPILER}\n");
    let file = compiler_file(root);
    if std::fs::read_to_string(&file).ok().as_deref() != Some(&compiler) {
        write_whole(&file, compiler.as_bytes(), true, &|_| Ok(()))?;
        writeln!(out, "goldens/compiler.txt: {COMPILER}")?;
    }
    Ok(0)
}

fn rows_of(case: &CaseReport, blessing: &Blessing) -> Vec<LedgerRow> {
    let moved = case
        .metrics
        .iter()
        .filter(|one| one.recorded.is_none() && one.classified.change.class.wants_record());
    let moved = moved.map(|one| {
        blessing.row(
            &case.case,
            case.point,
            &one.classified,
            one.effects.as_ref(),
        )
    });
    let evidence = case.evidence.iter().filter(|one| one.recorded.is_none());
    let evidence = evidence.map(|one| {
        let value = (one.name.as_str(), one.before_ms, one.after_ms);
        blessing.evidence(&case.case, case.point, value)
    });
    moved.chain(evidence).collect()
}

/// Where this change has a row for the metric already, a second one goes on from its end.
/// `false`: nothing is left to say.
fn continue_from(row: &mut LedgerRow, known: &[LedgerRow]) -> bool {
    let is_it = |old: &&LedgerRow| old.is_of(&row.case, &row.policy, &row.metric);
    let Some(last) = known.iter().rev().find(is_it) else {
        return true;
    };
    let (from_ms, before_ms) = (last.after_ms, row.before_ms);
    if from_ms == before_ms {
        return true;
    }
    row.before_ms = from_ms;
    let silicon_ms = row.silicon_ms;
    row.error_before_pct = from_ms
        .zip(silicon_ms)
        .map(|(ms, silicon)| error_pct(ms, silicon));
    match (from_ms, before_ms, row.code_effect_ms) {
        (Some(from_ms), Some(before_ms), Some(ms)) => {
            row.code_effect_ms = Some(ms + before_ms - from_ms);
        }
        _ => {
            row.code_effect_ms = None;
            row.row_effect_ms = None;
            row.schedule_effect_ms = None;
        }
    }
    row.class = class_from(row);
    from_ms != row.after_ms
}

/// The class of a row whose beginning was moved.
fn class_from(row: &LedgerRow) -> Class {
    let errors = row.error_before_pct.zip(row.error_after_pct);
    match (row.class, row.before_ms, row.after_ms) {
        (Class::Evidence | Class::Removed, ..) => row.class,
        (_, Some(_), None) => Class::Refused,
        (_, None, Some(_)) => Class::Restored,
        (Class::CoverageLost | Class::CoverageGained, ..) => row.class,
        _ => match errors.map(|(before, after)| before.abs().total_cmp(&after.abs())) {
            Some(Ordering::Less) => Class::Regression,
            Some(Ordering::Greater) => Class::Improvement,
            _ => Class::Moved,
        },
    }
}
