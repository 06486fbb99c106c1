//! Why a mean moved: the code, the rows, or a decision that flipped.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::replay::{IterationRecord, Prediction, StepLog};
use crate::timing::{Column, Origin, RowId};

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
    pub fn with_rows(mut self, metric: Judged, pair: &Pair<'_>) -> Self {
        let rows = pair.row_effects(metric);
        self.row_ms = rows.iter().map(|(_, ms)| ms).sum();
        self.schedule_ms -= self.row_ms;
        self.rows = rows.into_iter().take(ROWS_NAMED).collect();
        self.parts_at.clone_from(&pair.parts_at);
        self
    }
}

/// Two predictions of a case under one policy by this code: on the base's data, and as it is now.
pub struct Pair<'a> {
    on_base: &'a Prediction,
    /// By row of `on_base`; `None` for one that is gone, or is no longer asked for.
    now_ms: Vec<Option<f64>>,
    /// The first iteration where the decisions part.
    parts_at: Option<String>,
}

impl<'a> Pair<'a> {
    pub fn new(on_base: &'a Prediction, fresh: &Prediction) -> Self {
        let rows = &fresh.rows;
        let by_key: HashMap<Key<'_>, f64> = rows
            .ids()
            .map(|id| (Key::of(rows.origin(id)), rows.ms(id)))
            .collect();
        let before = &on_base.rows;
        Self {
            on_base,
            now_ms: before
                .ids()
                .map(|id| by_key.get(&Key::of(before.origin(id))).copied())
                .collect(),
            parts_at: parting(&on_base.log, &fresh.log),
        }
    }

    /// Each changed row's coefficient times its change, the largest first. Rows without a value
    /// now are left to what remains.
    fn row_effects(&self, metric: Judged) -> Vec<(String, f64)> {
        let receipt = match metric {
            Judged::Tpot => &self.on_base.tpot_receipt,
            _ => &self.on_base.ttft_receipt,
        };
        let mut by_row: BTreeMap<RowId, f64> = BTreeMap::new();
        for line in &receipt.lines {
            *by_row.entry(line.row).or_insert(0.0) += line.coefficient;
        }
        let before = &self.on_base.rows;
        let mut effects: Vec<(String, f64)> = by_row
            .into_iter()
            .filter_map(|(id, coefficient)| {
                let now_ms = self.now_ms[id.0 as usize]?;
                let ms = coefficient * (now_ms - before.ms(id));
                (ms != 0.0).then(|| (before.describe(id), ms))
            })
            .collect();
        effects.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()).then(a.0.cmp(&b.0)));
        effects
    }
}

/// What a row is, whatever its value and its place in the file.
#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    /// By id.
    Host(&'a str),
    /// System and peak.
    Roofline(&'a str, &'a str),
    /// A table's label, and the names and values of the key columns.
    Op(&'a str, Vec<(&'a str, Cell<'a>)>),
}

#[derive(PartialEq, Eq, Hash)]
enum Cell<'a> {
    Text(&'a str),
    Int(i64),
}

impl<'a> Key<'a> {
    fn of(origin: &'a Origin) -> Self {
        let (table, at) = match origin {
            Origin::Host(row) => return Self::Host(&row.id),
            Origin::Roofline { system, peak } => return Self::Roofline(system, peak),
            Origin::Op { table, index, .. } => (table, *index as usize),
        };
        let columns = table.names.iter().enumerate();
        let cells = columns.filter_map(|(column, name)| {
            let cell = match &table.columns[column] {
                Column::Text(values) => Cell::Text(values.get(at)?),
                Column::Int(values) => Cell::Int(*values.get(at)?),
                Column::Float(_) | Column::Unusable { .. } => return None,
            };
            Some((name.as_str(), cell))
        });
        Self::Op(&table.label, cells.collect())
    }
}

/// The first iteration that decides differently, in words.
fn parting(before: &StepLog, after: &StepLog) -> Option<String> {
    let (old, new) = (&before.iterations, &after.iterations);
    let at = (0..old.len().max(new.len())).find(|at| {
        let both = old.get(*at).zip(new.get(*at));
        !both.is_some_and(|(old, new)| old.decides_as(new))
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
