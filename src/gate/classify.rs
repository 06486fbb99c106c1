//! What became of each metric: the base's golden against a fresh prediction.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::timing::Policy;

use super::band::{Band, Bands, Breach};
use super::golden::error_pct;
use super::parsed::{Golden, GoldenCoverage, Judged};

/// What a change is, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Predicted before, refused now.
    Refused,
    /// A host class fell, a boundary went missing, or a farther kernel stands in.
    CoverageLost,
    /// Outside the band, and the error against silicon grew.
    Regression,
    /// Outside the band without silicon, or in something else than the mean alone.
    Moved,
    /// A measured value itself changed.
    Evidence,
    /// Outside the band, and the error against silicon shrank.
    Improvement,
    CoverageGained,
    /// Refused before, predicted now.
    Restored,
    /// Inside the band, with a golden taken anew: unrecorded, its band would wander.
    Reblessed,
    New,
    Removed,
    /// Inside the band, with another value.
    Tolerated,
    Same,
}

impl Class {
    pub const ALL: [Self; 13] = [
        Self::Refused,
        Self::CoverageLost,
        Self::Regression,
        Self::Moved,
        Self::Evidence,
        Self::Improvement,
        Self::CoverageGained,
        Self::Restored,
        Self::Reblessed,
        Self::New,
        Self::Removed,
        Self::Tolerated,
        Self::Same,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::CoverageLost => "coverage_lost",
            Self::Regression => "regression",
            Self::Moved => "moved",
            Self::Evidence => "evidence",
            Self::Improvement => "improvement",
            Self::CoverageGained => "coverage_gained",
            Self::Restored => "restored",
            Self::Reblessed => "reblessed",
            Self::New => "new",
            Self::Removed => "removed",
            Self::Tolerated => "tolerated",
            Self::Same => "same",
        }
    }

    /// Whether it passes only with a row in the ledger. A new case has its reviewed golden.
    pub fn wants_record(self) -> bool {
        !matches!(self, Self::New | Self::Tolerated | Self::Same)
    }

    /// Whether something that was predicted or known is so no more.
    pub fn loses_coverage(self) -> bool {
        matches!(self, Self::Refused | Self::CoverageLost)
    }
}

/// One thing that left its band: a time, a part, a count, a flag.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Left {
    /// Place in the golden below its policy, for example `ttft_parts_ms.kernel`.
    pub path: String,
    pub before: String,
    pub after: String,
}

/// What became of one metric of one case under one policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    pub class: Class,
    /// `None`: there was none, or it was refused.
    pub before_ms: Option<f64>,
    pub after_ms: Option<f64>,
    pub silicon_ms: Option<f64>,
    /// Signed, against the silicon value of the head.
    pub error_before_pct: Option<f64>,
    pub error_after_pct: Option<f64>,
    /// What left its band.
    pub left: Vec<Left>,
}

/// A change by the metric it is of.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Classified {
    pub policy: Policy,
    pub metric: Judged,
    #[serde(flatten)]
    pub change: Change,
}

/// Classifies every metric of a case. `before`: the base's golden; `after`: the fresh prediction.
pub fn classify(before: Option<&Golden>, after: Option<&Golden>, bands: &Bands) -> Vec<Classified> {
    let metrics: BTreeSet<Judged> = [before, after]
        .into_iter()
        .flatten()
        .flat_map(Golden::judged)
        .collect();
    let breaches = match (before, after) {
        (Some(before), Some(after)) => before.compare(after, bands).breaches,
        _ => Vec::new(),
    };
    let mut found = Vec::new();
    for policy in Policy::ALL {
        let coverage = match (before, after) {
            (Some(before), Some(after)) => {
                Some(turn(&before.coverage(policy), &after.coverage(policy)))
            }
            _ => None,
        };
        for metric in &metrics {
            let change = change(before, after, policy, *metric, coverage, &breaches);
            found.push(Classified {
                policy,
                metric: *metric,
                change,
            });
        }
    }
    found
}

/// Marks metrics inside their band whose golden is not the base's any more.
pub fn mark_reblessed(classified: &mut [Classified], before: &Golden, golden: &Golden) {
    let differ = before.compare(golden, &Bands::EXACT).breaches;
    for one in classified {
        let (policy, metric) = (one.policy, one.metric);
        let class = &mut one.change.class;
        let is_of = |breach: &Breach| of_metric(breach, policy, metric).is_some();
        if matches!(class, Class::Tolerated | Class::Same) && differ.iter().any(is_of) {
            *class = Class::Reblessed;
        }
    }
}

fn change(
    before: Option<&Golden>,
    after: Option<&Golden>,
    policy: Policy,
    metric: Judged,
    coverage: Option<Turn>,
    breaches: &[Breach],
) -> Change {
    let ms = |golden: Option<&Golden>| golden.and_then(|golden| golden.ms(policy, metric));
    let (before_ms, after_ms) = (ms(before), ms(after));
    let silicon_ms = after
        .or(before)
        .and_then(|golden| golden.silicon_ms(metric));
    let error = |ms: Option<f64>| Some(error_pct(ms?, silicon_ms?));
    let (error_before_pct, error_after_pct) = (error(before_ms), error(after_ms));
    let left: Vec<Left> = breaches
        .iter()
        .filter_map(|breach| of_metric(breach, policy, metric))
        .collect();
    let class = match (before, after) {
        (None, _) => Class::New,
        (_, None) => Class::Removed,
        _ => match (before_ms, after_ms) {
            (Some(_), None) => Class::Refused,
            (None, Some(_)) => Class::Restored,
            (None, None) if left.is_empty() => Class::Same,
            (None, None) => Class::Moved,
            (Some(old), Some(new)) => {
                let errors = error_before_pct.zip(error_after_pct);
                both_predicted(coverage, &left, errors, old == new)
            }
        },
    };
    Change {
        class,
        before_ms,
        after_ms,
        silicon_ms,
        error_before_pct,
        error_after_pct,
        left,
    }
}

fn both_predicted(
    coverage: Option<Turn>,
    left: &[Left],
    errors: Option<(f64, f64)>,
    equal: bool,
) -> Class {
    let of_coverage = |left: &&Left| left.path.starts_with("coverage.");
    let only_coverage = left.iter().filter(of_coverage).count() == left.len();
    let class = match errors {
        _ if left.is_empty() && equal => Class::Same,
        _ if left.is_empty() => Class::Tolerated,
        _ if only_coverage => Class::Moved,
        Some((before, after)) if after.abs() > before.abs() => Class::Regression,
        Some((before, after)) if after.abs() < before.abs() => Class::Improvement,
        _ => Class::Moved,
    };
    match coverage {
        Some(Turn::Lost) => Class::CoverageLost,
        Some(Turn::Gained) if only_coverage => Class::CoverageGained,
        _ => class,
    }
}

/// The breach as one of this metric; step counts and coverage are of all of them.
fn of_metric(breach: &Breach, policy: Policy, metric: Judged) -> Option<Left> {
    let inner = breach
        .path
        .strip_prefix(policy.name())
        .and_then(|rest| rest.strip_prefix('.'))?;
    let block = inner.split('.').next().unwrap_or(inner);
    let is_of = match block {
        // Follows from the mean, and stands or falls with silicon.
        "error_pct" => false,
        "ttft_ms" | "ttft_parts_ms" => metric == Judged::Ttft,
        "tpot_ms" | "tpot_parts_ms" => metric == Judged::Tpot,
        _ => true,
    };
    is_of.then(|| Left {
        path: inner.to_owned(),
        before: breach.before.clone(),
        after: breach.after.clone(),
    })
}

/// Whether coverage went down or up. What does both went down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Lost,
    Gained,
    Neither,
}

fn turn(before: &GoldenCoverage, after: &GoldenCoverage) -> Turn {
    let rank = |coverage: &GoldenCoverage| match coverage.host.as_str() {
        "measured" => 0,
        "measured, host unrecorded" => 1,
        "derived" => 2,
        "missing" => 3,
        // No eager step, or an op case.
        _ => -1,
    };
    let (old, new) = (rank(before), rank(after));
    let known = old >= 0 && new >= 0;
    // A boundary that was measured and is derived now.
    let derived = |from: &GoldenCoverage, to: &GoldenCoverage| {
        let mut fresh = to.derived.difference(&from.derived);
        fresh.any(|name| !from.missing.contains(name))
    };
    let farther = |from: &GoldenCoverage, to: &GoldenCoverage| {
        to.gpu.iter().any(|(op, flags)| {
            let old = from.gpu.get(op).map(distance);
            let new = distance(flags);
            new > 0 && old.is_some_and(|old| new > old)
        })
    };
    let worse = |from: &GoldenCoverage, to: &GoldenCoverage| {
        to.missing.difference(&from.missing).next().is_some()
            || derived(from, to) && to.missing.is_superset(&from.missing)
            || farther(from, to)
    };
    if known && new > old || worse(before, after) {
        Turn::Lost
    } else if known && new < old || worse(after, before) {
        Turn::Gained
    } else {
        Turn::Neither
    }
}

/// How far the rows of an op are from its own kernel.
fn distance(flags: &BTreeSet<String>) -> u8 {
    let of_flag = |flag: &String| {
        if flag.starts_with("roofline") {
            3
        } else if flag.contains("ANOTHER KERNEL") {
            2
        } else {
            u8::from(flag.starts_with("transferred: framework"))
        }
    };
    flags.iter().map(of_flag).max().unwrap_or(0)
}

/// The band of a metric's mean.
pub fn band_of(metric: Judged, bands: &Bands) -> Band {
    match metric {
        Judged::Ttft => bands.ttft_mean,
        Judged::Tpot => bands.tpot_mean,
        Judged::Op | Judged::Step => bands.ttft_rest,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const BODY: &str = "silicon: { ttft_ms: 50.0, tpot_ms: 3.0 }\nstrict:\n  \
                        ttft_ms: { mean: 40.0 }\n  tpot_ms: { mean: 2.5 }\n  ttft_parts_ms:\n    \
                        kernel: 10.0\n    host_dispatch: 30.0\n  steps:\n    decode: 9\n  \
                        coverage:\n    host: \"measured\"\n    missing: [\"egress\"]\n    \
                        derived:\n      ingress: \"x\"\n    gpu:\n      moe: [\"extended\"]\n";

    fn classes(edits: &[(&str, &str)]) -> (Class, Class) {
        let read = |text: &str| Golden::of_text(text, Path::new("g")).expect("a golden");
        let mut text = BODY.to_owned();
        for (from, to) in edits {
            assert!(text.contains(from), "{from}");
            text = text.replacen(from, to, 1);
        }
        let found = classify(Some(&read(BODY)), Some(&read(&text)), &Bands::default());
        (found[0].change.class, found[1].change.class)
    }

    #[test]
    fn classes_follow_the_band_the_error_and_the_coverage() {
        use Class::*;
        assert_eq!(classes(&[]), (Same, Same));
        let cases = [
            ("mean: 40.0", "mean: 40.01", Tolerated, Same),
            ("mean: 40.0", "mean: 39.0", Regression, Same),
            ("mean: 40.0", "mean: 41.0", Improvement, Same),
            ("mean: 2.5", "mean: 4.0", Same, Regression),
            ("decode: 9", "decode: 10", Moved, Moved),
            ("[\"egress\"]", "[]", CoverageGained, CoverageGained),
            (
                "[\"egress\"]",
                "[\"egress\", \"ingress\"]",
                CoverageLost,
                CoverageLost,
            ),
            ("\"measured\"", "\"derived\"", CoverageLost, CoverageLost),
            (
                "\"extended\"",
                "\"ANOTHER KERNEL x\"",
                CoverageLost,
                CoverageLost,
            ),
            ("\"extended\"", "\"transferred: version 2\"", Moved, Moved),
        ];
        for (from, to, ttft, tpot) in cases {
            assert_eq!(classes(&[(from, to)]), (ttft, tpot), "{to}");
        }
    }

    #[test]
    fn parts_that_cancel_in_the_total_are_a_move() {
        let edits = [
            ("kernel: 10.0", "kernel: 12.0"),
            ("dispatch: 30.0", "dispatch: 28.0"),
        ];
        assert_eq!(classes(&edits), (Class::Moved, Class::Same));
    }

    #[test]
    fn what_was_refused_or_is_refused_now_is_said_so() {
        let read = |text: &str| Golden::of_text(text, Path::new("g")).expect("a golden");
        let (whole, refused) = (read(BODY), read("strict:\n  refused: \"no row\"\n"));
        let class = |before: Option<&Golden>, after: Option<&Golden>| {
            classify(before, after, &Bands::default())[0].change.class
        };
        assert_eq!(class(Some(&whole), Some(&refused)), Class::Refused);
        assert_eq!(class(Some(&refused), Some(&whole)), Class::Restored);
        assert_eq!(class(Some(&refused), Some(&refused)), Class::Same);
        assert_eq!(class(None, Some(&whole)), Class::New);
        assert_eq!(class(Some(&whole), None), Class::Removed);
    }
}
