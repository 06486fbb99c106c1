//! `stepgate drift`: fresh predictions against the goldens.

use std::io::Write;

use serde_json::json;

use crate::gate::{Points, bands_of, compare, failure_message, render};

use super::run::Stop;
use super::select::{predict_all, select};

/// Prints what drifted and what left its band; `true` if anything left it.
pub fn run(
    points: &Points,
    cases: &[String],
    json: bool,
    out: &mut dyn Write,
) -> Result<bool, Stop> {
    let selected = select(points, cases)?;
    let bands: Vec<_> = selected.iter().map(|one| bands_of(&one.case)).collect();
    let goldens = selected
        .iter()
        .map(|one| points.golden(&one.name))
        .collect::<Result<Vec<_>, _>>()?;
    let total = selected.len();
    let mut held = bands.iter().zip(goldens);
    let (mut same, mut tolerated, mut left, mut unknown) = (0, 0, 0, 0);
    predict_all(points, selected, |name, predicted| {
        let Some((bands, golden)) = held.next() else {
            return Ok(());
        };
        let fresh = render(&predicted);
        let Some(golden) = golden else {
            unknown += 1;
            return if json {
                writeln!(out, "{}", json!({ "case": name, "golden": null }))
            } else {
                writeln!(out, "{name}: no golden")
            };
        };
        let comparison = compare(&golden, &fresh, bands);
        if !comparison.holds() {
            left += 1;
        } else if comparison.drift.is_empty() {
            same += 1;
        } else {
            tolerated += 1;
        }
        if json {
            let moved = |path: &str, before: &str, after: &str| json!({ "path": path, "before": before, "after": after });
            return writeln!(
                out,
                "{}",
                json!({
                    "case": name,
                    "left": comparison.breaches.iter()
                        .map(|b| moved(&b.path, &b.before, &b.after)).collect::<Vec<_>>(),
                    "drift": comparison.drift.iter()
                        .map(|d| moved(&d.path, &d.before.to_string(), &d.after.to_string()))
                        .collect::<Vec<_>>(),
                })
            );
        }
        if !comparison.holds() {
            writeln!(
                out,
                "{}",
                failure_message(&name, &golden, &fresh, &comparison)
            )?;
        }
        for drift in &comparison.drift {
            writeln!(
                out,
                "{name}: {} {} -> {} ({:+.3} %, inside its band)",
                drift.path,
                drift.before,
                drift.after,
                (drift.after / drift.before - 1.0) * 100.0
            )?;
        }
        Ok(())
    })?;
    if !json {
        writeln!(
            out,
            "{total} cases: {same} same, {tolerated} drifted inside their bands, {left} left their \
             goldens, {unknown} without a golden"
        )?;
    }
    Ok(left + unknown > 0)
}
