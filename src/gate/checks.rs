//! What keeps the gate shut beside the classes: the ledger, uniform shifts, points, shards.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::case::{self, CaseFile};
use crate::timing::{InputError, Policy};

use super::analysis::{About, CaseReport, EvidenceReport, Finding, Kind, MetricReport, found};
use super::band::Bands;
use super::base::Base;
use super::classify::{Classified, band_of};
use super::ledger::{EVIDENCE, LEDGER, LedgerFile, LedgerRow};
use super::parsed::Judged;
use super::points::Points;
use super::shards::Shards;
use super::uniform::{Move, uniform};

impl CaseReport {
    /// Fills in what the ledger's new rows say of this case.
    pub(super) fn look_up(&mut self, rows: &[&LedgerRow], bands: &Bands) {
        for one in &mut self.metrics {
            let Classified {
                policy,
                metric,
                change,
            } = &one.classified;
            let ours = rows
                .iter()
                .filter(|row| row.is_of(&self.case, policy.name(), metric.name()));
            let ours: Vec<&LedgerRow> = ours.copied().collect();
            let agree = |a: Option<f64>, b: Option<f64>| match (a, b) {
                (Some(a), Some(b)) => band_of(*metric, bands).holds(a, b),
                (a, b) => a == b,
            };
            one.recorded = covers(&ours, change.before_ms, change.after_ms, agree);
        }
        for one in &mut self.evidence {
            let name = format!("{EVIDENCE}{}", one.name);
            let ours = rows.iter().filter(|row| row.is_of(&self.case, "-", &name));
            let ours: Vec<&LedgerRow> = ours.copied().collect();
            one.recorded = covers(&ours, one.before_ms, one.after_ms, |a, b| a == b);
        }
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let name = &self.case;
        if let Some(what) = &self.not_reproduced {
            let what = format!("{name}: the golden is not reproduced: {what}");
            findings.push(found(Kind::Unrecorded, what).about(About::Case));
        }
        for one in self.metrics.iter().filter(|one| one.recorded.is_none()) {
            let Classified {
                policy,
                metric,
                change,
            } = &one.classified;
            let class = change.class;
            if !class.wants_record() {
                continue;
            }
            let kind = if class.loses_coverage() {
                Kind::CoverageLost
            } else {
                Kind::Unrecorded
            };
            let (class, policy, metric) = (class.name(), policy.name(), metric.name());
            let what =
                format!("{name}: {class} of {policy} {metric} is not recorded in the ledger");
            findings.push(found(kind, what).about(About::Metric));
        }
        for one in self.evidence.iter().filter(|one| one.recorded.is_none()) {
            let value = |ms: Option<f64>| ms.map_or("nothing".to_owned(), |ms| ms.to_string());
            let (before, after) = (value(one.before_ms), value(one.after_ms));
            let what = format!(
                "{name}: the measured value `{}` changed from {before} to {after} and is not \
                 recorded in the ledger",
                one.name
            );
            findings.push(found(Kind::Unrecorded, what).about(About::Case));
        }
        findings
    }
}

/// New rows that are not what the gate would write: of nothing that this change moves, of another
/// class, point or measured value. A row nobody asked for could close an open regression.
pub(super) fn row_findings(cases: &[CaseReport], rows: &[&LedgerRow]) -> Vec<Finding> {
    let mut groups: BTreeMap<(&str, &str, &str), Vec<&LedgerRow>> = BTreeMap::new();
    for row in rows {
        let key = (&*row.case, &*row.policy, &*row.metric);
        groups.entry(key).or_default().push(row);
    }
    let fault = |((name, policy, metric), rows): (_, Vec<&LedgerRow>)| {
        let case = cases.iter().find(|case| case.case == name);
        let what = unasked(case, &rows)?;
        let what = format!("{name}: new ledger rows of {policy} {metric}: {what}");
        Some(found(Kind::Unrecorded, what))
    };
    groups.into_iter().filter_map(fault).collect()
}

/// What is wrong with the new rows of one metric or measured value.
fn unasked(case: Option<&CaseReport>, rows: &[&LedgerRow]) -> Option<String> {
    const NO_MOVE: &str = "they do not lead from the base to what is predicted; delete them";
    let row = rows.last()?;
    let Some(case) = case else {
        return Some("no such case is judged; delete them".to_owned());
    };
    if row.point != case.point {
        return Some("their point is not that of the case".to_owned());
    }
    if let Some(name) = row.metric.strip_prefix(EVIDENCE) {
        let known = |one: &EvidenceReport| one.name == name && one.recorded.is_some();
        let holds = case.evidence.iter().any(known);
        return (!holds).then(|| NO_MOVE.to_owned());
    }
    let of_row = |one: &&MetricReport| {
        let classified = &one.classified;
        row.is_of(
            &case.case,
            classified.policy.name(),
            classified.metric.name(),
        )
    };
    let Some(report) = case.metrics.iter().find(of_row) else {
        return Some(NO_MOVE.to_owned());
    };
    let change = &report.classified.change;
    if report.recorded.is_none() {
        // Where a record is wanted, its absence is reported already.
        return (!change.class.wants_record()).then(|| NO_MOVE.to_owned());
    }
    if row.silicon_ms != change.silicon_ms {
        return Some("their measured value is not that of the case".to_owned());
    }
    let (says, is) = (row.class, change.class);
    let alone = rows.len() == 1 && says != is;
    alone.then(|| {
        format!(
            "their class is `{}`, this change is `{}`",
            says.name(),
            is.name()
        )
    })
}

/// The reason of the rows that lead from `before` to `after`, one after another.
fn covers(
    rows: &[&LedgerRow],
    before: Option<f64>,
    after: Option<f64>,
    agree: impl Fn(Option<f64>, Option<f64>) -> bool,
) -> Option<String> {
    let (first, last) = (rows.first()?, rows.last()?);
    let linked = rows
        .windows(2)
        .all(|pair| agree(pair[0].after_ms, pair[1].before_ms));
    let holds = linked && agree(before, first.before_ms) && agree(last.after_ms, after);
    holds.then(|| last.reason.clone())
}

pub(super) fn base_ledger(base: &Base) -> Result<Vec<LedgerFile>, InputError> {
    let paths: Vec<String> = base.under(LEDGER, ".jsonl").map(str::to_owned).collect();
    let mut files = Vec::new();
    for path in paths {
        if let Some(text) = base.text(&path)? {
            files.push(LedgerFile::parse(&path, text, &base.shown(&path))?);
        }
    }
    Ok(files)
}

/// Lines of the base's ledger that the working tree does not have as they were.
pub(super) fn ledger_findings(root: &Path, before: &[LedgerFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in before {
        let path = &file.path;
        let what = match fs::read_to_string(root.join(path)) {
            Err(_) => format!("{path}:1: a ledger file of the base is gone; restore it"),
            Ok(now) => match file.first_changed_line(&now) {
                Some(line) => {
                    format!("{path}:{line}: a ledger line of the base was changed or deleted")
                }
                None => continue,
            },
        };
        findings.push(found(Kind::Unrecorded, what));
    }
    findings
}

/// Rows that this change adds.
pub(super) fn new_rows<'a>(before: &[LedgerFile], now: &'a [LedgerFile]) -> Vec<&'a LedgerRow> {
    now.iter()
        .flat_map(|file| {
            let known = before.iter().find(|old| old.path == file.path);
            file.rows.iter().skip(known.map_or(0, |old| old.rows.len()))
        })
        .collect()
}

/// Groups whose moves agree, without rows that name the mechanism.
pub(super) fn shift_findings(cases: &[CaseReport], rows: &[&LedgerRow]) -> Vec<Finding> {
    let mut groups: BTreeMap<(&str, Policy, Judged), Vec<Move>> = BTreeMap::new();
    for case in cases {
        for one in &case.metrics {
            let Classified {
                policy,
                metric,
                change,
            } = &one.classified;
            if let (true, Some(before_ms), Some(after_ms)) = (
                change.class.wants_record(),
                change.before_ms,
                change.after_ms,
            ) {
                groups
                    .entry((&case.group, *policy, *metric))
                    .or_default()
                    .push(Move {
                        case: case.case.clone(),
                        before_ms,
                        after_ms,
                    });
            }
        }
    }
    let mut findings = Vec::new();
    for ((group, policy, metric), moves) in groups {
        let Some(shift) = uniform(&moves) else {
            continue;
        };
        let (policy, metric) = (policy.name(), metric.name());
        let named = |case: &String| {
            rows.iter()
                .any(|row| row.is_of(case, policy, metric) && row.names_mechanism())
        };
        if shift.cases.iter().all(named) {
            continue;
        }
        findings.push(found(
            Kind::Unrecorded,
            format!(
                "{group}: uniform shift of {policy} {metric} in {} points, {}: record it with \
                 --mechanism and --rows, or find the offset",
                shift.cases.len(),
                shift.by
            ),
        ));
    }
    findings
}

/// No two cases are of one point. Cases that cannot be read are reported where they are judged.
pub(super) fn point_findings(points: &Points, names: &[String]) -> Option<Finding> {
    let serving = names.iter().filter_map(|name| {
        let file = points.root().join(format!("cases/{name}.yaml"));
        match CaseFile::load(&file) {
            Ok(CaseFile::Serving(case)) => Some(case),
            _ => None,
        }
    });
    let cases: Vec<_> = serving.collect();
    let error = case::Tree::check_points(&cases).err()?;
    Some(found(Kind::BadInput, error).about(About::Case))
}

pub(super) fn shard_findings(shards: &Shards) -> Vec<Finding> {
    let lists = [
        ("was run by no shard", &shards.missing),
        ("was run more than once", &shards.twice),
        ("was run and is no case", &shards.unknown),
        ("failed in its shard", &shards.failed),
    ];
    lists
        .into_iter()
        .flat_map(|(what, names)| {
            let say = move |name: &String| found(Kind::Unrecorded, format!("{name} {what}"));
            names.iter().map(say)
        })
        .collect()
}
