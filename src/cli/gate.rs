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
    match &asked.out {
        None => out.write_all(written(&analysis, asked.format)?.as_bytes())?,
        Some(file) => {
            let report = written(&analysis, asked.format)?;
            write_whole(file, report.as_bytes(), true, &|_| Ok(()))?;
            out.write_all(written(&analysis, Format::Terminal)?.as_bytes())?;
        }
    }
    Ok(analysis.exit_code())
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
