//! The text of a golden: YAML that a reviewer reads top down.

use std::fmt::{self, Write};
use std::path::Path;

use crate::case::{Outcome as MeasuredOutcome, StepCase, StepMeasured};
use crate::compose::{Part, Receipt};
use crate::perfdb::Refusal;
use crate::replay::{Iteration, Metric, OpPrediction, Outcome, Prediction, StepPrediction};
use crate::timing::{Coverage, InputError};

use super::points::Predicted;

/// The text of a predicted case.
pub fn render(predicted: &Predicted) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = write_case(&mut text, predicted);
    text
}

/// What follows insta's header in a snapshot file.
pub(super) fn body(text: &str, file: &Path) -> Result<String, InputError> {
    let rest = text
        .strip_prefix("---\n")
        .and_then(|text| text.split_once("\n---\n"));
    let Some((_, body)) = rest else {
        return Err(InputError::new(
            file,
            "a snapshot begins with a header between two lines of `---`",
            "restore the golden from git, or accept a fresh one with `cargo insta review`",
        )
        .at(1, 1));
    };
    Ok(body.trim_end().to_owned())
}

/// Signed error of a prediction against what was measured, in percent.
pub fn error_pct(predicted_ms: f64, measured_ms: f64) -> f64 {
    (predicted_ms / measured_ms - 1.0) * 100.0
}

fn write_case(out: &mut String, predicted: &Predicted) -> fmt::Result {
    match predicted {
        Predicted::Serving {
            case,
            strict,
            estimate,
        } => {
            let silicon = case.silicon.as_ref().map(|s| (s.ttft_ms, s.tpot_ms));
            if let Some((ttft_ms, tpot_ms)) = silicon {
                writeln!(out, "silicon: {{ ttft_ms: {ttft_ms}, tpot_ms: {tpot_ms} }}")?;
            }
            write_outcome(out, "strict", strict, silicon, None)?;
            if differs(strict, estimate) {
                write_outcome(out, "estimate", estimate, silicon, Some(strict))?;
            }
        }
        Predicted::Op { case, prediction } => {
            writeln!(out, "measured:")?;
            for measured in &case.measured {
                writeln!(out, "  {}: {}", measured.label, measured.ms)?;
            }
            match prediction.as_ref() {
                Ok(prediction) => {
                    write_op(out, prediction)?;
                    writeln!(out, "  error_pct:")?;
                    for measured in &case.measured {
                        let error = error_pct(prediction.ms, measured.ms);
                        writeln!(out, "    {}: {error:+.1}", measured.label)?;
                    }
                }
                Err(refusal) => write_refusal(out, "strict", refusal)?,
            }
        }
        Predicted::Step {
            case,
            strict,
            estimate,
        } => {
            writeln!(out, "measured:")?;
            for measured in &case.measured {
                writeln!(
                    out,
                    "  {} {}: {}",
                    measured.what.as_str(),
                    measured.label,
                    measured.ms
                )?;
            }
            let mut write = |name, step: &Result<StepPrediction, Refusal>, unlike| match step {
                Ok(step) => write_step(out, name, case, step, unlike),
                Err(refusal) => write_refusal(out, name, refusal),
            };
            write("strict", strict, None)?;
            if strict != estimate {
                let strict = strict.as_ref().as_ref().ok();
                write("estimate", estimate, strict.map(|strict| &strict.coverage))?;
            }
        }
    }
    Ok(())
}

/// Whether the estimate policy changed anything.
pub fn differs(strict: &Outcome, estimate: &Outcome) -> bool {
    match (strict, estimate) {
        (Outcome::Predicted(strict), Outcome::Predicted(estimate)) => {
            strict.ttft != estimate.ttft
                || strict.tpot != estimate.tpot
                || strict.coverage != estimate.coverage
        }
        (Outcome::Refused(strict), Outcome::Refused(estimate)) => strict != estimate,
        _ => true,
    }
}

fn write_refusal(out: &mut String, policy: &str, refusal: &Refusal) -> fmt::Result {
    writeln!(out, "{policy}:")?;
    writeln!(out, "  refused: {:?}", refusal.to_string())
}

fn write_outcome(
    out: &mut String,
    policy: &str,
    outcome: &Outcome,
    silicon: Option<(f64, f64)>,
    unlike: Option<&Outcome>,
) -> fmt::Result {
    let unlike = match unlike {
        Some(Outcome::Predicted(other)) => Some(&other.coverage),
        _ => None,
    };
    match outcome {
        Outcome::Refused(refusal) => write_refusal(out, policy, refusal),
        Outcome::Predicted(prediction) => {
            write_prediction(out, policy, prediction, silicon, unlike)
        }
    }
}

fn write_prediction(
    out: &mut String,
    policy: &str,
    prediction: &Prediction,
    silicon: Option<(f64, f64)>,
    unlike: Option<&Coverage>,
) -> fmt::Result {
    writeln!(out, "{policy}:")?;
    let metric = |out: &mut String, name: &str, metric: &Metric, digits: usize| {
        writeln!(
            out,
            "  {name}: {{ mean: {:.digits$}, p50: {:.digits$}, p99: {:.digits$} }}",
            metric.mean_ms, metric.p50.ms, metric.p99.ms,
        )
    };
    metric(out, "ttft_ms", &prediction.ttft, 4)?;
    metric(out, "tpot_ms", &prediction.tpot, 5)?;
    if let Some((ttft_ms, tpot_ms)) = silicon {
        writeln!(
            out,
            "  error_pct: {{ ttft: {:+.1}, tpot: {:+.1} }}",
            error_pct(prediction.ttft.mean_ms, ttft_ms),
            error_pct(prediction.tpot.mean_ms, tpot_ms)
        )?;
    }
    write_parts(out, "ttft_parts_ms", &prediction.ttft_receipt, 4)?;
    write_parts(out, "tpot_parts_ms", &prediction.tpot_receipt, 5)?;
    writeln!(out, "  steps:")?;
    for (kind, count) in &prediction.steps {
        writeln!(out, "    {kind}: {count}")?;
    }
    write_coverage(out, &prediction.coverage, unlike)
}

fn write_parts(out: &mut String, name: &str, receipt: &Receipt, digits: usize) -> fmt::Result {
    writeln!(out, "  {name}:")?;
    for part in Part::ALL {
        let ms = receipt.part_ms(part);
        let holds_rows = receipt.lines.iter().any(|line| line.part == part);
        if holds_rows {
            writeln!(out, "    {}: {ms:.digits$}", part.name())?;
        }
    }
    Ok(())
}

/// The flags of each GPU op that last: whether a lookup falls on a grid line or beside it hangs on
/// single decode steps.
fn lasting(coverage: &Coverage) -> Vec<(&String, Vec<&String>)> {
    coverage
        .gpu
        .iter()
        .map(|(op, flags)| {
            let lasting = flags.iter();
            let lasting = lasting.filter(|flag| *flag != "hit" && *flag != "blended");
            (op, lasting.collect())
        })
        .collect()
}

/// Writes coverage; the GPU ops only where they are unlike those of the policy before.
fn write_coverage(out: &mut String, coverage: &Coverage, unlike: Option<&Coverage>) -> fmt::Result {
    writeln!(out, "  coverage:")?;
    writeln!(out, "    host: {:?}", coverage.host.name())?;
    let list = |values: &mut dyn Iterator<Item = &String>| {
        values
            .map(|value| format!("{value:?}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    writeln!(out, "    missing: [{}]", list(&mut coverage.missing.iter()))?;
    if !coverage.derived.is_empty() {
        writeln!(out, "    derived:")?;
        for (name, rule) in &coverage.derived {
            writeln!(out, "      {name}: {rule:?}")?;
        }
    }
    writeln!(
        out,
        "    observers: [{}]",
        list(&mut coverage.observers.iter())
    )?;
    let gpu = lasting(coverage);
    if unlike.is_some_and(|other| lasting(other) == gpu) {
        return Ok(());
    }
    writeln!(out, "    gpu:")?;
    for (op, flags) in gpu {
        writeln!(out, "      {op}: [{}]", list(&mut flags.into_iter()))?;
    }
    Ok(())
}

fn write_op(out: &mut String, op: &OpPrediction) -> fmt::Result {
    writeln!(out, "strict:")?;
    writeln!(out, "  op_ms:")?;
    writeln!(out, "    total: {:.4}", op.ms)?;
    for share in &op.shares {
        writeln!(out, "    {}: {:.4}", share.name, share.times * share.ms)?;
    }
    writeln!(out, "  rows:")?;
    for share in &op.shares {
        for (row, weight, ratio, ms) in &share.rows {
            writeln!(
                out,
                "    - {{ op: {:?}, times: {}, row: {row:?}, weight: {weight:.4}, work: {ratio:.6}, \
                 row_ms: {ms:.6e} }}",
                share.name, share.times
            )?;
        }
    }
    write_coverage_gpu(out, &op.coverage)
}

fn write_coverage_gpu(out: &mut String, coverage: &Coverage) -> fmt::Result {
    writeln!(out, "  coverage:")?;
    for (op, flags) in &coverage.gpu {
        let flags: Vec<String> = flags.iter().map(|flag| format!("{flag:?}")).collect();
        writeln!(out, "    {op}: [{}]", flags.join(", "))?;
    }
    Ok(())
}

fn write_step(
    out: &mut String,
    policy: &str,
    case: &StepCase,
    step: &StepPrediction,
    unlike: Option<&Coverage>,
) -> fmt::Result {
    writeln!(out, "{policy}:")?;
    writeln!(out, "  step_ms:")?;
    for (rank, ms) in step.gpu_span_ms.iter().enumerate() {
        writeln!(out, "    gpu_span rank {rank}: {ms:.4}")?;
    }
    for (rank, ms) in step.host_ms.iter().enumerate() {
        writeln!(out, "    host submitted rank {rank}: {ms:.4}")?;
    }
    writeln!(out, "  rank_wait_ms:")?;
    for (rank, ms) in step.rank_wait_ms.iter().enumerate() {
        writeln!(out, "    rank {rank}: {ms:.4}")?;
    }
    writeln!(out, "  path_ms:")?;
    for (part, ms) in &step.parts_ms {
        writeln!(out, "    {}: {ms:.4}", part.name())?;
    }
    let bound = step.bound_by().map_or("nothing", Part::name);
    writeln!(out, "  bound_by: {bound}")?;
    writeln!(out, "  launches: {}", step.launches)?;
    let of_iteration = |one: &&StepMeasured| one.what == MeasuredOutcome::Iteration;
    let measured: Vec<&StepMeasured> = case.measured.iter().filter(of_iteration).collect();
    if !measured.is_empty() {
        write_iteration(out, &step.iteration, &measured)?;
    }
    write_coverage(out, &step.coverage, unlike)
}

/// The step as one of many alike, beside the iterations that were measured.
fn write_iteration(
    out: &mut String,
    iteration: &Iteration,
    measured: &[&StepMeasured],
) -> fmt::Result {
    writeln!(out, "  iteration_ms:")?;
    writeln!(out, "    interval: {:.4}", iteration.ms)?;
    writeln!(out, "    host: {:.4}", iteration.host_ms)?;
    writeln!(out, "  iteration_path_ms:")?;
    for (part, ms) in &iteration.parts_ms {
        writeln!(out, "    {}: {ms:.4}", part.name())?;
    }
    let bound = iteration.bound_by().map_or("nothing", Part::name);
    writeln!(out, "  iteration_bound_by: {bound}")?;
    writeln!(out, "  error_pct:")?;
    for one in measured {
        let error = error_pct(iteration.ms, one.ms);
        writeln!(out, "    iteration {}: {error:+.1}", one.label)?;
    }
    Ok(())
}
