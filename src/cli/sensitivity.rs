//! `stepgate sensitivity`: the rows that carry the most of TTFT and TPOT over a set of cases.

use std::collections::BTreeMap;
use std::io::Write;

use serde_json::json;

use crate::compose::Receipt;
use crate::gate::{Points, Predicted};
use crate::model::Deployment;
use crate::replay::{Outcome, Prediction};
use crate::timing::{OpTable, Origin, Policy, Provenance, RowId};

use super::run::Stop;
use super::select::{predict_all, select};
use super::text::{Table, bold};

/// What a row's value is worth to the case that uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// Of the case's own runtime and version, or measured on its own server.
    Measured,
    /// A GPU row of another version or framework.
    Transferred,
    /// Bytes over the published bandwidth.
    Roofline,
    /// A host or boundary row of another deployment, or a difference of two measurements.
    Derived,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Transferred => "transferred",
            Self::Roofline => "roofline",
            Self::Derived => "derived",
        }
    }

    fn of(origin: &Origin, deployment: &Deployment) -> Self {
        match origin {
            Origin::Roofline { .. } => Self::Roofline,
            Origin::Op { table, .. } => {
                // <system>/<family>/<backend>/<version>/<table>
                let mut parts = table.label.split('/').skip(2);
                let backend = parts.next() == Some(deployment.backend.name.as_str());
                let version = parts.next() == Some(&deployment.backend.version);
                if backend && version {
                    Self::Measured
                } else {
                    Self::Transferred
                }
            }
            Origin::Host(row) => {
                let own = row.scope.as_ref().is_some_and(|scope| {
                    scope.runtime == deployment.backend.name.as_str()
                        && scope.version == deployment.backend.version
                        && scope.system == deployment.system
                        && scope.model == deployment.model
                        && scope.topology == deployment.parallel
                });
                match row.provenance {
                    Provenance::Measured { .. } if own => Self::Measured,
                    _ => Self::Derived,
                }
            }
        }
    }
}

/// One row over the cases that use it.
#[derive(Debug, Default)]
struct Weight {
    shape: String,
    /// Sums of the shares by class: (TTFT, TPOT).
    classes: BTreeMap<Class, (f64, f64)>,
    /// Sums over the cases of the row's share, in percent of the mean.
    ttft_pct: f64,
    tpot_pct: f64,
    ttft_cases: u32,
    tpot_cases: u32,
}

pub fn run(
    points: &Points,
    cases: &[String],
    policy: Policy,
    top: usize,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let mut rows: BTreeMap<String, Weight> = BTreeMap::new();
    let mut predicted_cases = 0_u32;
    predict_all(points, select(points, cases)?, |_, predicted| {
        let Predicted::Serving {
            case,
            strict,
            estimate,
        } = &predicted
        else {
            return Ok(());
        };
        let outcome = match policy {
            Policy::Strict => strict,
            Policy::Estimate => estimate,
        };
        if let Outcome::Predicted(prediction) = outcome.as_ref() {
            predicted_cases += 1;
            add(&mut rows, prediction, &case.scenario().deployment);
        }
        Ok(())
    })?;
    let cases = f64::from(predicted_cases.max(1));
    let mut ranked: Vec<(String, Weight)> = rows.into_iter().collect();
    for (_, weight) in &mut ranked {
        weight.ttft_pct /= cases;
        weight.tpot_pct /= cases;
    }
    if json {
        for (row, weight) in &ranked {
            let classes: Vec<&str> = weight.classes.keys().map(|class| class.name()).collect();
            let line = json!({
                "row": row,
                "shape": weight.shape,
                "classes": classes,
                "ttft_pct": weight.ttft_pct,
                "tpot_pct": weight.tpot_pct,
                "ttft_cases": weight.ttft_cases,
                "tpot_cases": weight.tpot_cases,
            });
            writeln!(out, "{line}")?;
        }
        return Ok(());
    }
    writeln!(
        out,
        "{predicted_cases} cases under {}; a row's share of the mean, averaged over the cases",
        policy.name()
    )?;
    type Share = fn(&Weight) -> f64;
    type Cases = fn(&Weight) -> u32;
    type OfClass = fn(&(f64, f64)) -> f64;
    let metrics: [(&str, Share, Cases, OfClass); 2] = [
        ("TTFT", |w| w.ttft_pct, |w| w.ttft_cases, |sums| sums.0),
        ("TPOT", |w| w.tpot_pct, |w| w.tpot_cases, |sums| sums.1),
    ];
    for (metric, share, used, of_class) in metrics {
        let mut by_class: BTreeMap<Class, f64> = BTreeMap::new();
        for (_, weight) in &ranked {
            for (class, sums) in &weight.classes {
                *by_class.entry(*class).or_default() += of_class(sums) / cases;
            }
        }
        let classes: Vec<String> = by_class
            .iter()
            .map(|(class, pct)| format!("{} {pct:.1} %", class.name()))
            .collect();
        writeln!(out, "\n{}: {}", bold(metric), classes.join(", "))?;
        ranked.sort_by(|a, b| share(&b.1).total_cmp(&share(&a.1)).then(a.0.cmp(&b.0)));
        let mut table = Table::new(&["row", "% of mean", "cases", "class"]);
        for (row, weight) in ranked.iter().take(top) {
            let classes: Vec<&str> = weight.classes.keys().map(|class| class.name()).collect();
            table.row(vec![
                format!("{row}  {}", weight.shape),
                format!("{:.2}", share(weight)),
                used(weight).to_string(),
                classes.join(", "),
            ]);
        }
        table.write(out, 2)?;
    }
    Ok(())
}

fn add(rows: &mut BTreeMap<String, Weight>, prediction: &Prediction, deployment: &Deployment) {
    let ttft = shares(&prediction.ttft_receipt, prediction);
    let tpot = shares(&prediction.tpot_receipt, prediction);
    let mut used: Vec<RowId> = ttft.keys().chain(tpot.keys()).copied().collect();
    used.sort_unstable();
    used.dedup();
    for row in used {
        let origin = prediction.rows.origin(row);
        let weight = rows.entry(prediction.rows.describe(row)).or_default();
        if weight.shape.is_empty() {
            weight.shape = shape(origin);
        }
        let class = weight
            .classes
            .entry(Class::of(origin, deployment))
            .or_default();
        if let Some(pct) = ttft.get(&row) {
            class.0 += pct;
            weight.ttft_pct += pct;
            weight.ttft_cases += 1;
        }
        if let Some(pct) = tpot.get(&row) {
            class.1 += pct;
            weight.tpot_pct += pct;
            weight.tpot_cases += 1;
        }
    }
}

/// Share of each row in a receipt's total, in percent.
fn shares(receipt: &Receipt, prediction: &Prediction) -> BTreeMap<RowId, f64> {
    let total = receipt.total_ms();
    let mut shares = BTreeMap::new();
    for line in &receipt.lines {
        let ms = line.coefficient * prediction.rows.ms(line.row);
        *shares.entry(line.row).or_default() += ms / total * 100.0;
    }
    shares
}

/// Columns that the row's name says, and the measurement itself.
const NOT_KEY: [&str; 7] = [
    "framework",
    "version",
    "device",
    "op_name",
    "latency",
    "power",
    "throttle",
];

fn key(table: &OpTable, row: usize) -> String {
    let names = table.names.iter().map(String::as_str);
    let cells = names
        .filter(|name| !NOT_KEY.contains(name))
        .filter_map(|name| {
            let text = || table.text(name).ok().map(|values| values[row].to_string());
            let int = || {
                table
                    .int(name)
                    .ok()
                    .map(|values| format!("{name}={}", values[row]))
            };
            int().or_else(text)
        });
    cells.collect::<Vec<_>>().join(" ")
}

/// What was measured: a table row's key columns, or a host row's boundary.
fn shape(origin: &Origin) -> String {
    match origin {
        Origin::Op { table, index, .. } => key(table, *index as usize),
        Origin::Host(row) => format!("{} {}", row.module, row.phase),
        Origin::Roofline { .. } => "bytes moved".to_owned(),
    }
}
