//! The proofs over a case that was predicted: its prediction serves each of them.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use walkdir::WalkDir;

use crate::case::{Case, CaseFile};
use crate::model::ModelConfig;
use crate::replay::{Outcome, Prediction};
use crate::timing::{InputError, Policy};

use super::audit::audit;
use super::points::{Points, Predicted};
use super::proof::{Proof, ProofFailure, blindness, homogeneity_of, null, sees_no_answer, sums};

/// Configs of every model of a project, by id: host rows may come from any of them.
pub(super) fn configs_of(points: &Points) -> Result<BTreeMap<String, ModelConfig>, InputError> {
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

/// Proves the estimate of a case.
pub(super) fn prove(
    points: &Points,
    configs: &BTreeMap<String, ModelConfig>,
    name: &str,
    predicted: &Predicted,
) -> Vec<ProofFailure> {
    let failures = match predicted {
        Predicted::Serving { case, estimate, .. } => match estimate.as_ref() {
            Outcome::Predicted(prediction) => {
                return prove_serving(points, configs, name, case, prediction);
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
    configs: &BTreeMap<String, ModelConfig>,
    name: &str,
    case: &Case,
    prediction: &Prediction,
) -> Vec<ProofFailure> {
    let replayer = points.replayer();
    let scenario = case.scenario();
    let scaled = |factor: f64, recorded: Option<&_>| {
        replayer.predict_scaled(&scenario, Policy::Estimate, factor, |_| true, recorded)
    };
    let own = OnceCell::new();
    let seen = |other: &Case| {
        // A predictor takes nothing but a scenario: the same one gives the same figures.
        if std::ptr::eq(other, case) || same_scenario(other, case) {
            return own.get_or_init(|| figures(prediction)).clone();
        }
        match replayer.predict(&other.scenario(), Policy::Estimate) {
            Ok(Outcome::Predicted(blind)) => figures(&blind),
            Ok(Outcome::Refused(refusal)) => refusal.to_string(),
            Err(error) => error.to_string(),
        }
    };
    let audited = audit(&scenario, configs, prediction)
        .map(|_| ())
        .map_err(|faults| {
            let first = faults.first().map_or(String::new(), ToString::to_string);
            let more = faults.len().saturating_sub(1);
            ProofFailure::new(Proof::Audit, name, format!("{first} (and {more} more)"))
        });
    let proofs = [
        sums(name, prediction),
        audited,
        null(name, scaled),
        homogeneity_of(name, prediction, scaled),
        blindness(name, case, seen),
    ];
    proofs.into_iter().filter_map(Result::err).collect()
}

fn same_scenario(a: &Case, b: &Case) -> bool {
    let text = |case: &Case| serde_json::to_string(&case.scenario()).ok();
    text(a).is_some_and(|ours| Some(ours) == text(b))
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

/// The proofs over the data itself: host rows and measured values are the cells they name.
pub(super) fn prove_data(points: &Points, cases: &[CaseFile]) -> Vec<ProofFailure> {
    let data = points.root().join("data");
    let rows = super::proof::no_leak(&data).err();
    let values = super::proof::measured_cells(&data, cases).err();
    rows.into_iter().chain(values).flatten().collect()
}
