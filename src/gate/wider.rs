//! Cases that widen their own bands: what that lets through, and until when.

use std::fs;

use serde::Serialize;

use crate::case::{Case, CaseFile, Date, Tolerance};

use super::analysis::{CaseReport, Finding, Kind, found};
use super::band::Bands;
use super::base::Base;
use super::classify::{Class, band_of};
use super::impact::Tree;
use super::points::Points;

/// A case with wider bands than the others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WiderBand {
    pub case: String,
    /// Shares of the golden: of TTFT's mean, of TPOT's mean, of percentiles and parts.
    pub ttft_rel: Option<f64>,
    pub tpot_rel: Option<f64>,
    pub parts_rel: Option<f64>,
    /// Last day.
    pub expires: String,
    pub reason: String,
    /// The base does not have it, or has another. It counts from the next change on.
    pub is_new: bool,
    /// Means that this change moves farther than the usual band allows.
    pub lets_through: Vec<String>,
}

/// The wider bands of the working tree, and what is wrong with them: a day that is past, a case
/// that cannot be read.
pub(super) fn wider_bands(
    tree: &Tree,
    points: &Points,
    base: &Base,
    cases: &[CaseReport],
    today: Date,
) -> (Vec<WiderBand>, Vec<Finding>) {
    let (mut bands, mut findings) = (Vec::new(), Vec::new());
    for name in &tree.head {
        let inner = format!("cases/{name}.yaml");
        // Few cases have one; the others need no reading.
        let text = fs::read_to_string(points.root().join(&inner)).unwrap_or_default();
        if !text.contains("tolerance") {
            continue;
        }
        let case = match points.case(name) {
            Ok(CaseFile::Serving(case)) => case,
            Ok(_) => continue,
            Err(error) => {
                findings.push(found(Kind::BadInput, error));
                continue;
            }
        };
        let Some(tolerance) = &case.tolerance else {
            continue;
        };
        if tolerance.expires < today {
            let what = format!(
                "{inner}: its wider band expired on {}; delete `tolerance`, or give a new reason \
                 and date",
                tolerance.expires
            );
            findings.push(found(Kind::Unrecorded, what));
        }
        let report = cases.iter().find(|report| report.case == *name);
        bands.push(WiderBand {
            case: name.clone(),
            ttft_rel: tolerance.ttft_rel,
            tpot_rel: tolerance.tpot_rel,
            parts_rel: tolerance.parts_rel,
            expires: tolerance.expires.to_string(),
            reason: tolerance.reason.clone(),
            is_new: tolerance_of(base, &inner).as_ref() != Some(tolerance),
            lets_through: report.map_or_else(Vec::new, lets_through),
        });
    }
    (bands, findings)
}

/// The tolerance that the base's case has.
fn tolerance_of(base: &Base, path: &str) -> Option<Tolerance> {
    let bytes = base.bytes(path).ok().flatten()?;
    match CaseFile::from_bytes(base.shown(path), bytes) {
        Ok(CaseFile::Serving(Case { tolerance, .. })) => tolerance,
        _ => None,
    }
}

fn lets_through(report: &CaseReport) -> Vec<String> {
    let usual = Bands::default();
    let moved = report.metrics.iter().filter_map(|one| {
        let classified = &one.classified;
        let (metric, change) = (classified.metric, &classified.change);
        let (before_ms, after_ms) = change.before_ms.zip(change.after_ms)?;
        let wide =
            change.class == Class::Tolerated && !band_of(metric, &usual).holds(before_ms, after_ms);
        let digits = metric.digits();
        wide.then(|| {
            let (policy, metric) = (classified.policy.name(), metric.name());
            format!("{policy} {metric} {before_ms:.digits$} -> {after_ms:.digits$} ms")
        })
    });
    moved.collect()
}
