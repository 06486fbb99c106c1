//! `stepgate ablation`: errors with a mechanism and without it, by group.

use std::collections::BTreeMap;
use std::io::Write;

use serde_json::json;

use crate::case::CaseFile;
use crate::gate::{Points, error_pct};
use crate::model::{BackendName, MoeDtype, Scenario};
use crate::perfdb::MoeKernel;
use crate::replay::Outcome;
use crate::timing::{InputError, Policy};

use super::args::Mechanism;
use super::run::Stop;
use super::select::{Selected, on_every_core, select};
use super::text::{Table, bold};

/// Signed errors of one point, in percent: (TTFT, TPOT).
type Errors = (f64, f64);

struct Pair {
    group: String,
    with: Errors,
    /// `None`: no row answers without the mechanism.
    without: Option<Errors>,
}

impl Mechanism {
    fn titles(self) -> [&'static str; 2] {
        match self {
            Self::Kernels => ["recipe's kernel", "framework's default"],
            Self::Waits => ["waits on", "waits off"],
        }
    }

    /// The scenario without the mechanism; `None` where it has no part in it.
    fn without(self, scenario: &Scenario) -> Option<Scenario> {
        let mut changed = scenario.clone();
        match self {
            Self::Kernels => {
                let deployment = &mut changed.deployment;
                let dtype = deployment.precision.moe?;
                deployment.kernels.moe = Some(default_kernel(deployment.backend.name, dtype));
            }
            Self::Waits => {
                changed.serving.batch_wait = None;
                changed.serving.attention_dp_balance = None;
                changed.serving.scheduler_recv_interval = 1;
            }
        }
        (changed != *scenario).then_some(changed)
    }
}

/// The kernel that a framework's own tables hold for the experts when no backend is asked for.
fn default_kernel(backend: BackendName, dtype: MoeDtype) -> MoeKernel {
    match (backend, dtype) {
        (BackendName::Sglang, _) => MoeKernel::Triton,
        (_, MoeDtype::W4a16Mxfp4 | MoeDtype::W4a8Mxfp4Mxfp8) => MoeKernel::Triton,
        (_, MoeDtype::Fp8Block) => MoeKernel::Deepgemm,
        _ => MoeKernel::Cutlass,
    }
}

pub fn run(
    points: &Points,
    mechanism: Mechanism,
    cases: &[String],
    json: bool,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let mut pairs = Vec::new();
    on_every_core(
        select(points, cases)?,
        |one: Selected| pair(points, mechanism, one),
        |pair| {
            pairs.extend(pair);
            Ok(())
        },
    )?;
    let mut groups: BTreeMap<&str, Vec<&Pair>> = BTreeMap::new();
    for pair in &pairs {
        groups.entry("all").or_default().push(pair);
        groups.entry(&pair.group).or_default().push(pair);
    }
    let [with, without] = mechanism.titles();
    let mut table = Table::new(&[
        "estimate, mean absolute error, %",
        "points",
        &format!("TTFT {with}"),
        without,
        &format!("TPOT {with}"),
        without,
        "no row",
    ]);
    for (name, members) in &groups {
        let both: Vec<(Errors, Errors)> = members
            .iter()
            .filter_map(|pair| Some((pair.with, pair.without?)))
            .collect();
        let mean = |of: fn(&(Errors, Errors)) -> f64| {
            both.iter().map(|pair| of(pair).abs()).sum::<f64>() / both.len() as f64
        };
        let means = [
            mean(|(with, _)| with.0),
            mean(|(_, without)| without.0),
            mean(|(with, _)| with.1),
            mean(|(_, without)| without.1),
        ];
        let refused = members.len() - both.len();
        if json {
            let line = json!({
                "group": name,
                "points": both.len(),
                "refused_without": refused,
                "ttft_mape_pct": { "with": means[0], "without": means[1] },
                "tpot_mape_pct": { "with": means[2], "without": means[3] },
            });
            writeln!(out, "{line}")?;
            continue;
        }
        let mut cells = vec![(*name).to_owned(), both.len().to_string()];
        cells.extend(means.map(|mean| {
            if both.is_empty() {
                String::new()
            } else {
                format!("{mean:.1}")
            }
        }));
        cells.push(refused.to_string());
        table.row(cells);
    }
    if !json {
        writeln!(out, "{}", bold(&format!("{with}, and {without}")))?;
        table.write(out, 2)?;
    }
    Ok(())
}

fn pair(points: &Points, mechanism: Mechanism, one: Selected) -> Result<Option<Pair>, InputError> {
    let CaseFile::Serving(case) = one.case else {
        return Ok(None);
    };
    let scenario = case.scenario();
    let (Some(silicon), Some(changed)) = (&case.silicon, mechanism.without(&scenario)) else {
        return Ok(None);
    };
    let errors = |scenario: &Scenario| -> Result<Option<Errors>, InputError> {
        let outcome = points.replayer().predict(scenario, Policy::Estimate)?;
        Ok(match outcome {
            Outcome::Predicted(prediction) => Some((
                error_pct(prediction.ttft.mean_ms, silicon.ttft_ms),
                error_pct(prediction.tpot.mean_ms, silicon.tpot_ms),
            )),
            Outcome::Refused(_) => None,
        })
    };
    let deployment = &scenario.deployment;
    Ok(errors(&scenario)?.map(|with| Pair {
        group: format!(
            "{} {} {}",
            deployment.model, deployment.system, deployment.backend.name
        ),
        with,
        without: errors(&changed).ok().flatten(),
    }))
}
