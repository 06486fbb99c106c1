//! `stepgate gate`.

use std::io::Write;
use std::path::Path;

use crate::gate::{Analysis, Question, analyse, write_whole};
use crate::timing::InputError;

use super::args::{Format, GateArguments};
use super::run::Stop;
use super::{gate_junit, gate_report, today};

/// Judges the working tree, reports, and returns the exit code.
pub fn run(root: &Path, asked: &GateArguments, out: &mut dyn Write) -> Result<u8, Stop> {
    let analysis = analyse(&Question {
        root,
        rev: &asked.base,
        cases: &asked.cases,
        results: &asked.results,
        today: today::today(asked.today)?,
        proofs: true,
    })?;
    for file in &asked.out {
        let report = written(&analysis, format_of(file, asked.format))?;
        write_whole(file, report.as_bytes(), true, &|_| Ok(()))?;
    }
    let shown = match asked.out[..] {
        [] => asked.format,
        _ => Format::Terminal,
    };
    out.write_all(written(&analysis, shown)?.as_bytes())?;
    Ok(analysis.exit_code())
}

/// The format that a file's name asks for.
fn format_of(file: &Path, otherwise: Format) -> Format {
    match file.extension().and_then(|ending| ending.to_str()) {
        Some("md") => Format::Markdown,
        Some("json") => Format::Json,
        Some("xml") => Format::Junit,
        _ => otherwise,
    }
}

fn written(analysis: &Analysis, format: Format) -> Result<String, InputError> {
    match format {
        Format::Terminal => Ok(gate_report::terminal(analysis)),
        Format::Markdown => Ok(gate_report::markdown(analysis)),
        Format::Junit => Ok(gate_junit::junit(analysis)),
        Format::Json => gate_report::json(analysis).map_err(|error| {
            InputError::new(
                "report",
                format!("cannot write JSON: {error}"),
                "report this",
            )
        }),
    }
}
