//! `stepgate coverage`: what predictions rest on.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use serde_json::json;

use crate::gate::{Points, Predicted};
use crate::replay::Outcome;
use crate::timing::Coverage;

use super::run::Stop;
use super::select::{predict_all, select};
use super::text::{Table, bold};

pub fn run(points: &Points, cases: &[String], json: bool, out: &mut dyn Write) -> Result<(), Stop> {
    let selected = select(points, cases)?;
    let total = selected.len();
    let mut summary: BTreeMap<&'static str, Summary> = BTreeMap::new();
    let mut refused = Vec::new();
    predict_all(points, selected, |name, predicted| {
        let Predicted::Serving {
            strict, estimate, ..
        } = &predicted
        else {
            return Ok(());
        };
        for (policy, outcome) in [("strict", strict), ("estimate", estimate)] {
            match outcome.as_ref() {
                Outcome::Predicted(prediction) => {
                    if json {
                        let line = json!({
                            "case": name,
                            "policy": policy,
                            "coverage": prediction.coverage,
                        });
                        writeln!(out, "{line}")?;
                    }
                    summary.entry(policy).or_default().add(&prediction.coverage);
                }
                Outcome::Refused(refusal) => refused.push(format!("{name} ({policy}): {refusal}")),
            }
        }
        Ok(())
    })?;
    if json {
        return Ok(());
    }
    writeln!(out, "{total} cases")?;
    for (policy, summary) in &summary {
        writeln!(out, "\n{}", bold(policy))?;
        for (title, counts) in [
            ("host time of eager steps", &summary.host),
            ("missing boundaries", &summary.missing),
            ("derived boundaries", &summary.derived),
            ("observers", &summary.observers),
        ] {
            let mut table = Table::new(&[title, "cases"]);
            for (name, count) in counts {
                table.row(vec![name.clone(), count.to_string()]);
            }
            table.write(out, 2)?;
        }
        let mut table = Table::new(&["op", "rows"]);
        for (op, flags) in &summary.gpu {
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            table.row(vec![op.clone(), flags.join("; ")]);
        }
        table.write(out, 2)?;
        writeln!(
            out,
            "  op rows in use, of unknown execution mode: {}; of merged duplicates: {}",
            summary.unknown, summary.duplicates
        )?;
    }
    for refusal in refused {
        writeln!(out, "refused: {refusal}")?;
    }
    Ok(())
}

#[derive(Default)]
struct Summary {
    host: BTreeMap<String, u64>,
    missing: BTreeMap<String, u64>,
    derived: BTreeMap<String, u64>,
    observers: BTreeMap<String, u64>,
    gpu: BTreeMap<String, BTreeSet<String>>,
    unknown: u64,
    duplicates: u64,
}

impl Summary {
    fn add(&mut self, coverage: &Coverage) {
        *self
            .host
            .entry(coverage.host.name().to_owned())
            .or_insert(0) += 1;
        for name in &coverage.missing {
            *self.missing.entry(name.clone()).or_insert(0) += 1;
        }
        for (name, rule) in &coverage.derived {
            *self.derived.entry(format!("{name}: {rule}")).or_insert(0) += 1;
        }
        for name in &coverage.observers {
            *self.observers.entry(name.clone()).or_insert(0) += 1;
        }
        for (op, flags) in &coverage.gpu {
            self.gpu
                .entry(op.clone())
                .or_default()
                .extend(flags.iter().cloned());
        }
        self.unknown += coverage.kernel_mode_unknown;
        self.duplicates += coverage.duplicate_rows;
    }
}
