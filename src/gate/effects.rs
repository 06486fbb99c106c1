//! Why a mean moved: the code, the rows, or a decision that flipped.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::compose::Receipt;
use crate::replay::{IterationRecord, Prediction, StepLog};
use crate::timing::{Column, Origin, RowId, Rows};

use super::parsed::Judged;

/// Rows named per move.
const ROWS_NAMED: usize = 5;

/// A move in three terms that add up to it. Times in milliseconds of the mean.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Effects {
    /// This code on the base's data, less the base's golden.
    pub code_ms: f64,
    /// That run's coefficients times the change of row values.
    pub row_ms: f64,
    /// What remains: a decision flipped.
    pub schedule_ms: f64,
    /// Rows with the largest effect: name and milliseconds.
    pub rows: Vec<(String, f64)>,
    /// The first iteration where the decisions part.
    pub parts_at: Option<String>,
}

impl Effects {
    /// Splits the move from `before_ms` to `after_ms`; `on_base_ms` is this code on the base's
    /// data.
    pub fn of(before_ms: f64, on_base_ms: f64, after_ms: f64) -> Self {
        let code_ms = on_base_ms - before_ms;
        Self {
            code_ms,
            row_ms: 0.0,
            schedule_ms: after_ms - before_ms - code_ms,
            rows: Vec::new(),
            parts_at: None,
        }
    }

    /// Takes the rows' share out of what remains.
    pub fn with_rows(mut self, metric: Judged, on_base: &Prediction, fresh: &Prediction) -> Self {
        let receipt = match metric {
            Judged::Tpot => &on_base.tpot_receipt,
            _ => &on_base.ttft_receipt,
        };
        let rows = row_effects(receipt, &on_base.rows, &fresh.rows);
        self.row_ms = rows.iter().map(|(_, ms)| ms).sum();
        self.schedule_ms -= self.row_ms;
        self.rows = rows.into_iter().take(ROWS_NAMED).collect();
        self.parts_at = parting(&on_base.log, &fresh.log);
        self
    }
}

/// Each changed row's coefficient times its change, the largest first.
fn row_effects(receipt: &Receipt, before: &Rows, after: &Rows) -> Vec<(String, f64)> {
    let mut by_row: BTreeMap<RowId, f64> = BTreeMap::new();
    for line in &receipt.lines {
        *by_row.entry(line.row).or_insert(0.0) += line.coefficient;
    }
    let fresh: BTreeMap<String, f64> = after
        .ids()
        .map(|id| (key_of(after.origin(id)), after.ms(id)))
        .collect();
    let mut effects: Vec<(String, f64)> = by_row
        .into_iter()
        .filter_map(|(id, coefficient)| {
            // A row that is gone, or is no longer asked for, is left to what remains.
            let now_ms = fresh.get(&key_of(before.origin(id)))?;
            let ms = coefficient * (now_ms - before.ms(id));
            (ms != 0.0).then(|| (before.describe(id), ms))
        })
        .collect();
    effects.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()).then(a.0.cmp(&b.0)));
    effects
}

/// What a row is, whatever its value and its place in the file: a table's label and key columns,
/// or an id.
fn key_of(origin: &Origin) -> String {
    match origin {
        Origin::Host(row) => format!("host/{}", row.id),
        Origin::Roofline { system, peak } => format!("{system}/{peak}"),
        Origin::Op { table, index, .. } => {
            let at = *index as usize;
            let mut key = table.label.clone();
            for (column, name) in table.names.iter().enumerate() {
                let value = match &table.columns[column] {
                    Column::Text(values) => values.get(at).map(ToString::to_string),
                    Column::Int(values) => values.get(at).map(ToString::to_string),
                    Column::Float(_) | Column::Unusable { .. } => None,
                };
                if let Some(value) = value {
                    key.push_str(&format!("|{name}={value}"));
                }
            }
            key
        }
    }
}

/// The first iteration that decides differently, in words.
fn parting(before: &StepLog, after: &StepLog) -> Option<String> {
    let (old, new) = (&before.iterations, &after.iterations);
    let alike = |(a, b): (&IterationRecord, &IterationRecord)| {
        a.fetched == b.fetched && a.held == b.held && a.paused == b.paused && a.step == b.step
    };
    let at = (0..old.len().max(new.len())).find(|at| {
        let both = old.get(*at).zip(new.get(*at));
        !both.is_some_and(alike)
    })?;
    let said = |iteration: Option<&IterationRecord>| {
        let Some(iteration) = iteration else {
            return "ended".to_owned();
        };
        let kind = iteration.kind().map_or("idle", |kind| kind.name());
        let ranks = iteration.step.iter().flat_map(|(_, ranks)| ranks);
        let (mut context, mut generation) = (0, 0);
        for rank in ranks {
            context += rank.context.len();
            generation += rank.generation;
        }
        let fetched = iteration.fetched.len();
        format!("{kind} of {context} + {generation} requests, {fetched} fetched")
    };
    Some(format!(
        "iteration {at}: {}; now {}",
        said(old.get(at)),
        said(new.get(at))
    ))
}
