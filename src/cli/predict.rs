//! `stepgate predict`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};

use crate::case::Silicon;
use crate::compose::{Part, Receipt};
use crate::gate::{Points, Predicted, checks_of, differs, error_pct, own_ms, render};
use crate::replay::{Metric, Outcome, Prediction, RequestWay};
use crate::timing::{Evaluation, RowId};

use super::run::Stop;
use super::select::{predict_all, select};
use super::text::{Table, bold};

#[derive(Debug, Clone, Copy)]
pub struct Style {
    pub explain: bool,
    pub receipt: bool,
    pub json: bool,
}

/// Rows named per part by `--explain`.
const ROWS_NAMED: usize = 4;

pub fn run(
    points: &Points,
    cases: &[String],
    style: Style,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let selected = select(points, cases)?;
    predict_all(points, selected, |name, predicted| {
        let Predicted::Serving {
            case,
            strict,
            estimate,
        } = &predicted
        else {
            // Ops and steps read best as their goldens.
            if style.json {
                return writeln!(
                    out,
                    "{}",
                    json!({ "case": name, "text": render(&predicted) })
                );
            }
            return writeln!(out, "{}\n{}", bold(&name), render(&predicted));
        };
        let silicon = case.silicon.as_ref();
        if style.json {
            return writeln!(out, "{}", case_json(&name, strict, estimate, silicon));
        }
        writeln!(out, "{}", bold(&name))?;
        let checks = match checks_of(&points.root().join("data"), &case.scenario()) {
            Ok(checks) => checks,
            Err(error) => return writeln!(out, "  no check values: {error}"),
        };
        headline(out, strict, estimate, silicon)?;
        parts(out, strict, estimate)?;
        for (policy, outcome) in [("strict", strict), ("estimate", estimate)] {
            let Outcome::Predicted(prediction) = outcome.as_ref() else {
                continue;
            };
            if policy == "estimate" && !differs(strict, estimate) {
                break;
            }
            if style.explain {
                explain(out, policy, prediction)?;
                write_checks(out, &checks, prediction)?;
            }
            if style.receipt {
                receipt(out, policy, "TTFT", &prediction.ttft_receipt, prediction)?;
                receipt(out, policy, "TPOT", &prediction.tpot_receipt, prediction)?;
            }
        }
        writeln!(out)
    })
}

fn headline(
    out: &mut dyn Write,
    strict: &Outcome,
    estimate: &Outcome,
    silicon: Option<&Silicon>,
) -> io::Result<()> {
    let (Outcome::Predicted(floor), Outcome::Predicted(likely)) = (strict, estimate) else {
        for (policy, outcome) in [("strict", strict), ("estimate", estimate)] {
            if let Outcome::Refused(refusal) = outcome {
                writeln!(out, "  {policy} refused: {refusal}")?;
            }
        }
        return Ok(());
    };
    let mut line = |name: &str, floor: f64, likely: f64, measured: Option<f64>, digits: usize| {
        let sign = if floor_is_floor(strict) { ">=" } else { "=" };
        write!(
            out,
            "  {name} {sign} {floor:.digits$} ms strict; estimate {likely:.digits$} ms"
        )?;
        if let Some(measured) = measured {
            write!(
                out,
                "; measured {measured:.digits$} ms ({:+.1} % and {:+.1} %)",
                error_pct(floor, measured),
                error_pct(likely, measured)
            )?;
        }
        writeln!(out)
    };
    line(
        "TTFT",
        floor.ttft.mean_ms,
        likely.ttft.mean_ms,
        silicon.map(|s| s.ttft_ms),
        2,
    )?;
    line(
        "TPOT",
        floor.tpot.mean_ms,
        likely.tpot.mean_ms,
        silicon.map(|s| s.tpot_ms),
        3,
    )?;
    let list = |values: Vec<String>| {
        if values.is_empty() {
            "none".to_owned()
        } else {
            values.join(", ")
        }
    };
    writeln!(
        out,
        "  host time of eager steps: {} (strict), {} (estimate)",
        floor.coverage.host.name(),
        likely.coverage.host.name()
    )?;
    writeln!(
        out,
        "  missing under strict: {}",
        list(floor.coverage.missing.iter().cloned().collect())
    )?;
    writeln!(
        out,
        "  missing under estimate: {}",
        list(likely.coverage.missing.iter().cloned().collect())
    )?;
    if likely.coverage.derived.is_empty() {
        writeln!(out, "  derived under estimate: none")?;
    } else {
        writeln!(out, "  derived under estimate:")?;
        for (name, rule) in &likely.coverage.derived {
            writeln!(out, "    {name} = {rule}")?;
        }
    }
    let other_kernels: Vec<String> = floor
        .coverage
        .gpu
        .iter()
        .filter_map(|(op, flags)| {
            let kernel = flags
                .iter()
                .find_map(|flag| flag.strip_prefix("ANOTHER KERNEL "))?;
            Some(format!("{op} ({kernel})"))
        })
        .collect();
    if !other_kernels.is_empty() {
        let list = other_kernels.join(", ");
        writeln!(out, "  rows of another kernel than the served one: {list}")?;
    }
    Ok(())
}

/// Whether strict left anything out.
fn floor_is_floor(strict: &Outcome) -> bool {
    match strict {
        Outcome::Predicted(prediction) => !prediction.coverage.missing.is_empty(),
        Outcome::Refused(_) => false,
    }
}

fn parts(out: &mut dyn Write, strict: &Outcome, estimate: &Outcome) -> io::Result<()> {
    let (Outcome::Predicted(strict), Outcome::Predicted(estimate)) = (strict, estimate) else {
        return Ok(());
    };
    let mut table = Table::new(&[
        "part, ms of the mean",
        "TTFT strict",
        "estimate",
        "TPOT strict",
        "estimate",
    ]);
    for part in Part::ALL {
        let values = [
            strict.ttft_receipt.part_ms(part),
            estimate.ttft_receipt.part_ms(part),
            strict.tpot_receipt.part_ms(part),
            estimate.tpot_receipt.part_ms(part),
        ];
        if values.iter().all(|ms| *ms == 0.0) {
            continue;
        }
        table.row(vec![
            part.name().to_owned(),
            format!("{:.3}", values[0]),
            format!("{:.3}", values[1]),
            format!("{:.4}", values[2]),
            format!("{:.4}", values[3]),
        ]);
    }
    table.row(vec![
        "sum".to_owned(),
        format!("{:.3}", strict.ttft_receipt.total_ms()),
        format!("{:.3}", estimate.ttft_receipt.total_ms()),
        format!("{:.4}", strict.tpot_receipt.total_ms()),
        format!("{:.4}", estimate.tpot_receipt.total_ms()),
    ]);
    table.write(out, 2)
}

fn explain(out: &mut dyn Write, policy: &str, prediction: &Prediction) -> io::Result<()> {
    writeln!(out, "\n  {} explained", bold(policy))?;
    let quantiles = |metric: &Metric| {
        format!(
            "p50 {:.3} (request {}), p90 {:.3} (request {}), p99 {:.3} (request {})",
            metric.p50.ms,
            metric.p50.request,
            metric.p90.ms,
            metric.p90.request,
            metric.p99.ms,
            metric.p99.request
        )
    };
    writeln!(out, "    TTFT ms: {}", quantiles(&prediction.ttft))?;
    writeln!(out, "    TPOT ms: {}", quantiles(&prediction.tpot))?;
    writeln!(
        out,
        "    throughput: {:.2} requests/s, {:.0} output tokens/s",
        prediction.requests_per_s, prediction.output_tokens_per_s
    )?;
    let steps: Vec<String> = prediction
        .steps
        .iter()
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    writeln!(out, "    steps: {}", steps.join(", "))?;
    if let Some(tokens) = prediction.kv_tokens {
        writeln!(out, "    KV cache: at most {tokens} tokens per rank group")?;
    }
    for (name, way) in ["typical (p50)", "slowest"].iter().zip(&prediction.ways) {
        write_way(out, name, way, prediction)?;
    }
    for (name, receipt) in [
        ("TTFT", &prediction.ttft_receipt),
        ("TPOT", &prediction.tpot_receipt),
    ] {
        writeln!(out, "    rows behind each part of {name}, ms of the mean:")?;
        for part in Part::ALL {
            let mut rows: BTreeMap<RowId, f64> = BTreeMap::new();
            for line in receipt.lines.iter().filter(|line| line.part == part) {
                *rows.entry(line.row).or_insert(0.0) +=
                    line.coefficient * prediction.rows.ms(line.row);
            }
            if rows.is_empty() {
                continue;
            }
            let mut sorted: Vec<(RowId, f64)> = rows.into_iter().collect();
            sorted.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()).then(a.0.cmp(&b.0)));
            let named: Vec<String> = sorted
                .iter()
                .take(ROWS_NAMED)
                .map(|(row, ms)| format!("{ms:.4} {}", prediction.rows.describe(*row)))
                .collect();
            let more = sorted.len().saturating_sub(ROWS_NAMED);
            let more = if more > 0 {
                format!(", {more} more rows")
            } else {
                String::new()
            };
            writeln!(out, "      {}: {}{more}", part.name(), named.join(", "))?;
        }
    }
    writeln!(out, "    GPU rows:")?;
    for (op, flags) in &prediction.coverage.gpu {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        writeln!(out, "      {op}: {}", flags.join("; "))?;
    }
    Ok(())
}

/// Boundaries that runs of this workload showed, beside the prediction's.
fn write_checks(
    out: &mut dyn Write,
    checks: &[Evaluation],
    prediction: &Prediction,
) -> io::Result<()> {
    if checks.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "    check values (outcomes of real runs, never inputs):"
    )?;
    let mut table = Table::new(&["boundary, ms", "predicted", "run", "observer"]);
    for check in checks {
        table.row(vec![
            check.name.clone(),
            own_ms(&check.name, prediction).map_or("-".to_owned(), |ms| format!("{ms:.3}")),
            format!("{:.3}", check.value_ms),
            check.observer.to_string(),
        ]);
    }
    table.write(out, 6)
}

/// The critical path of one first token, part by part, with the row that holds most of each.
fn write_way(
    out: &mut dyn Write,
    name: &str,
    way: &RequestWay,
    prediction: &Prediction,
) -> io::Result<()> {
    let request = &prediction.log.requests[way.request as usize];
    writeln!(
        out,
        "    {name} first token: request {} (prompt {} tokens), {:.3} ms = {:.3} to the executor + \
         {:.3} in its queue +",
        way.request,
        request.prompt,
        request.ttft_ms(),
        way.arrival_ms,
        way.queue_ms
    )?;
    let mut parts: Vec<(Part, f64, RowId, f64)> = Vec::new();
    for (part, row, ms) in &way.path {
        match parts.iter_mut().find(|(known, ..)| known == part) {
            Some((_, sum, most, most_ms)) => {
                *sum += ms;
                if ms > most_ms {
                    (*most, *most_ms) = (*row, *ms);
                }
            }
            None => parts.push((*part, *ms, *row, *ms)),
        }
    }
    for (part, ms, row, _) in parts {
        writeln!(
            out,
            "      {ms:9.3} {}, mostly {}",
            part.name(),
            prediction.rows.describe(row)
        )?;
    }
    Ok(())
}

fn receipt(
    out: &mut dyn Write,
    policy: &str,
    metric: &str,
    receipt: &Receipt,
    prediction: &Prediction,
) -> io::Result<()> {
    writeln!(
        out,
        "\n  {} receipt of mean {metric}: coefficient x row ms = ms",
        bold(policy)
    )?;
    let mut table = Table::new(&["part and row", "coefficient", "row ms", "ms"]);
    for line in &receipt.lines {
        let row_ms = prediction.rows.ms(line.row);
        table.row(vec![
            format!(
                "{} {}",
                line.part.name(),
                prediction.rows.describe(line.row)
            ),
            format!("{:.9e}", line.coefficient),
            format!("{row_ms:.9e}"),
            format!("{:.6}", line.coefficient * row_ms),
        ]);
    }
    table.row(vec![
        "sum".to_owned(),
        String::new(),
        String::new(),
        format!("{:.6}", receipt.total_ms()),
    ]);
    table.write(out, 4)
}

fn case_json(name: &str, strict: &Outcome, estimate: &Outcome, silicon: Option<&Silicon>) -> Value {
    let mut object = match outcome_json(strict, silicon) {
        Value::Object(object) => object,
        _ => serde_json::Map::new(),
    };
    object.insert("case".to_owned(), json!(name));
    let estimate = if differs(strict, estimate) {
        outcome_json(estimate, silicon)
    } else {
        Value::Null
    };
    object.insert("estimate".to_owned(), estimate);
    Value::Object(object)
}

fn outcome_json(outcome: &Outcome, silicon: Option<&Silicon>) -> Value {
    let prediction = match outcome {
        Outcome::Refused(refusal) => return json!({ "refused": refusal.missing }),
        Outcome::Predicted(prediction) => prediction,
    };
    let metric = |metric: &Metric| {
        json!({
            "mean": metric.mean_ms,
            "p50": metric.p50.ms,
            "p90": metric.p90.ms,
            "p99": metric.p99.ms,
        })
    };
    let parts = |receipt: &Receipt| {
        let parts: serde_json::Map<String, Value> = Part::ALL
            .iter()
            .map(|part| (part.name().to_owned(), json!(receipt.part_ms(*part))))
            .collect();
        Value::Object(parts)
    };
    json!({
        "policy": prediction.policy.name(),
        "ttft_ms": metric(&prediction.ttft),
        "tpot_ms": metric(&prediction.tpot),
        "ttft_parts_ms": parts(&prediction.ttft_receipt),
        "tpot_parts_ms": parts(&prediction.tpot_receipt),
        "requests_per_s": prediction.requests_per_s,
        "output_tokens_per_s": prediction.output_tokens_per_s,
        "steps": prediction.steps,
        "coverage": prediction.coverage,
        "kv_tokens": prediction.kv_tokens,
        "silicon": silicon.map(|silicon| json!({
            "ttft_ms": silicon.ttft_ms,
            "tpot_ms": silicon.tpot_ms,
            "ttft_err_pct": error_pct(prediction.ttft.mean_ms, silicon.ttft_ms),
            "tpot_err_pct": error_pct(prediction.tpot.mean_ms, silicon.tpot_ms),
        })),
    })
}
