//! Recorded regressions that are not back.

use std::collections::BTreeMap;

use crate::timing::Policy;

use super::analysis::{CaseReport, MetricReport, OpenRegression};
use super::classify::Class;
use super::golden::error_pct;
use super::ledger::{LedgerFile, LedgerRow};
use super::parsed::{Golden, Judged};
use super::points::Points;

/// How far |error| may stay above its value before a regression and count as back.
const BACK_PCT: f64 = 0.1;

/// Recorded regressions whose |error| is not back.
pub(super) fn open_regressions(
    ledger: &[LedgerFile],
    cases: &[CaseReport],
    points: &Points,
) -> Vec<OpenRegression> {
    let mut open: BTreeMap<(&str, &str, &str), &LedgerRow> = BTreeMap::new();
    for row in ledger.iter().flat_map(|file| &file.rows) {
        let key = (row.case.as_str(), row.policy.as_str(), row.metric.as_str());
        let since = open.get(&key).copied();
        if since.is_some_and(|since| is_back(since, row.error_after_pct)) {
            open.remove(&key);
        } else if row.class == Class::Regression && since.is_none() {
            open.insert(key, row);
        }
    }
    let mut found = Vec::new();
    for (_, row) in open {
        let now = error_now(row, cases, points);
        if is_back(row, now) {
            continue;
        }
        found.push(OpenRegression {
            case: row.case.clone(),
            policy: row.policy.clone(),
            metric: row.metric.clone(),
            since: row.date.clone(),
            error_before_pct: row.error_before_pct.unwrap_or(0.0),
            error_now_pct: now,
            reason: row.reason.clone(),
        });
    }
    found
}

fn is_back(since: &LedgerRow, error_pct: Option<f64>) -> bool {
    let was = since.error_before_pct.map_or(0.0, f64::abs);
    error_pct.is_some_and(|now| now.abs() <= was + BACK_PCT)
}

/// The error as predicted now, or as the golden of an untouched case says.
fn error_now(row: &LedgerRow, cases: &[CaseReport], points: &Points) -> Option<f64> {
    let policy = Policy::ALL
        .into_iter()
        .find(|one| one.name() == row.policy)?;
    let metric = Judged::of_name(&row.metric)?;
    if let Some(case) = cases.iter().find(|case| case.case == row.case) {
        let is_it = |one: &&MetricReport| {
            one.classified.policy == policy && one.classified.metric == metric
        };
        return case
            .metrics
            .iter()
            .find(is_it)?
            .classified
            .change
            .error_after_pct;
    }
    let file = points.golden_path(&row.case);
    let text = std::fs::read_to_string(&file).ok()?;
    let golden = Golden::of_snapshot(&text, &file).ok()?;
    let (ms, silicon_ms) = (golden.ms(policy, metric)?, golden.silicon_ms(metric)?);
    Some(error_pct(ms, silicon_ms))
}
