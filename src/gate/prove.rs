//! The proofs over a case that was predicted: its prediction serves each of them.

use std::collections::BTreeMap;

use walkdir::WalkDir;

use crate::case::{Case, CaseFile};
use crate::model::ModelConfig;
use crate::replay::{Outcome, Prediction};
use crate::timing::{InputError, Policy};

use super::audit::audit;
use super::filed::{FiledRows, as_filed, tables_as_imported};
use super::points::{Points, Predicted};
use super::proof::{
    Proof, ProofFailure, blindness, disguised, homogeneous_times, null, sees_no_answer, sums,
};

/// What the proofs hold predictions to, read once.
pub(super) struct Held {
    /// Configs of every model of the project, by id: host rows may come from any of them.
    configs: BTreeMap<String, ModelConfig>,
    host_rows: FiledRows,
}

impl Held {
    pub fn read(points: &Points) -> Result<Self, InputError> {
        Ok(Self {
            configs: configs_of(points)?,
            host_rows: FiledRows::read(&points.root().join("data")),
        })
    }
}

fn configs_of(points: &Points) -> Result<BTreeMap<String, ModelConfig>, InputError> {
    let models = points.replayer().models();
    let mut configs = BTreeMap::new();
    for entry in WalkDir::new(models).max_depth(1).into_iter().flatten() {
        let path = entry.path();
        if let (Some("json"), Some(id)) = (
            path.extension().and_then(|ending| ending.to_str()),
            path.file_stem().and_then(|stem| stem.to_str()),
        ) {
            configs.insert(id.to_owned(), ModelConfig::load(models, id)?);
        }
    }
    Ok(configs)
}

/// Proves the estimate of a case, and that strict adds up.
pub(super) fn prove(
    points: &Points,
    held: &Held,
    name: &str,
    predicted: &Predicted,
) -> Vec<ProofFailure> {
    let failures = match predicted {
        Predicted::Serving {
            case,
            strict,
            estimate,
        } => match estimate.as_ref() {
            Outcome::Predicted(prediction) => {
                let mut failures = prove_serving(points, held, name, case, prediction);
                if let Outcome::Predicted(strict) = strict.as_ref() {
                    let of_strict = sums(&format!("{name} (strict)"), strict);
                    failures.extend(of_strict.err());
                }
                return failures;
            }
            Outcome::Refused(_) => sees_no_answer(name, &case.scenario()),
        },
        Predicted::Op { case, .. } => sees_no_answer(name, &case.scenario()),
        Predicted::Step { case, .. } => sees_no_answer(name, &case.scenario()),
    };
    failures.err().into_iter().collect()
}

fn prove_serving(
    points: &Points,
    held: &Held,
    name: &str,
    case: &Case,
    prediction: &Prediction,
) -> Vec<ProofFailure> {
    let policy = Policy::Estimate;
    let disguised = disguised(name, case);
    // The disguised case stands in for the case: one prediction proves two things.
    let other = disguised.as_ref().unwrap_or(case);
    let seen = |other: &Case| {
        if std::ptr::eq(other, case) {
            return figures(prediction);
        }
        match points.outcome(other, policy) {
            Ok(Outcome::Predicted(blind)) => figures(&blind),
            Ok(Outcome::Refused(refusal)) => refusal.to_string(),
            Err(error) => error.to_string(),
        }
    };
    let unconfirmed = |what: String| Err(ProofFailure::new(Proof::Audit, name, what));
    let audited = match audit(&case.scenario(), &held.configs, prediction) {
        Ok(report) if report.tied_lines == 0 => Ok(()),
        // Two equally long paths look like this, and so do two errors that cancel.
        Ok(report) => unconfirmed(format!(
            "{} lines of a receipt differ by an equally long path",
            report.tied_lines
        )),
        Err(faults) => {
            let first = faults.first().map_or(String::new(), ToString::to_string);
            let more = faults.len().saturating_sub(1);
            unconfirmed(format!("{first} (and {more} more)"))
        }
    };
    let (homogeneous, nothing) = points.with_times(other, policy, |times| {
        (
            homogeneous_times(name, prediction, times),
            null(name, times),
        )
    });
    let blind = match (&disguised, &homogeneous) {
        // The disguised case gave twice the times of the case, bit for bit. The audit, which does
        // not see silicon, recounts the receipts that go with them.
        (Ok(_), Ok(())) => sees_no_answer(name, &case.scenario()),
        _ => blindness(name, case, seen),
    };
    let proofs = [
        sums(name, prediction),
        audited,
        as_filed(name, &prediction.rows, &held.host_rows),
        nothing,
        homogeneous,
        blind,
    ];
    proofs.into_iter().filter_map(Result::err).collect()
}

/// Every exact figure of a prediction, one per line.
fn figures(prediction: &Prediction) -> String {
    let mut text = format!(
        "{:?}\n{:?}\n{:?}\n{:?}\n{:?}\n",
        prediction.ttft,
        prediction.tpot,
        prediction.ttft_receipt,
        prediction.tpot_receipt,
        prediction.coverage
    );
    for request in &prediction.log.requests {
        text += &format!("{request:?}\n");
    }
    text
}

/// The proofs over the data itself: host rows and measured values are the cells they name, tables
/// the files that were imported.
pub(super) fn prove_data(points: &Points, cases: &[CaseFile]) -> Vec<ProofFailure> {
    let data = points.root().join("data");
    let rows = super::proof::no_leak(&data).err();
    let values = super::proof::measured_cells(&data, cases).err();
    let mut failures = tables_as_imported(&data);
    failures.extend(rows.into_iter().chain(values).flatten());
    failures
}
