//! Tolerance bands: golden against fresh text, structure exactly and numbers within their band.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::case::Tolerance;

/// How far a number may move from its golden before the case fails, in both directions:
/// `max(abs, rel * |golden|)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Band {
    pub abs: f64,
    pub rel: f64,
}

impl Band {
    fn allows(self, golden: f64) -> f64 {
        self.abs.max(self.rel * golden.abs())
    }

    /// Whether `fresh` is as near to `golden` as the band asks. A NaN is within no band.
    pub fn holds(self, golden: f64, fresh: f64) -> bool {
        (fresh - golden).abs() <= self.allows(golden)
    }
}

/// The bands of one case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bands {
    pub ttft_mean: Band,
    pub tpot_mean: Band,
    /// Percentiles and parts of TTFT; times of ops and steps.
    pub ttft_rest: Band,
    /// Percentiles and parts of TPOT.
    pub tpot_rest: Band,
}

impl Default for Bands {
    fn default() -> Self {
        Self {
            ttft_mean: Band {
                abs: 0.02,
                rel: 0.002,
            },
            tpot_mean: Band {
                abs: 0.002,
                rel: 0.002,
            },
            ttft_rest: Band {
                abs: 0.05,
                rel: 0.01,
            },
            // A tenth of TTFT's floor, as for the means: 0.05 ms is wider than most parts of a
            // TPOT.
            tpot_rest: Band {
                abs: 0.005,
                rel: 0.01,
            },
        }
    }
}

impl Bands {
    /// No number may move.
    pub const EXACT: Self = {
        let exact = Band { abs: 0.0, rel: 0.0 };
        Self {
            ttft_mean: exact,
            tpot_mean: exact,
            ttft_rest: exact,
            tpot_rest: exact,
        }
    };

    /// The default bands, widened by a case's own tolerance.
    pub fn of_case(tolerance: Option<&Tolerance>) -> Self {
        let mut bands = Self::default();
        let Some(tolerance) = tolerance else {
            return bands;
        };
        let widen = |band: &mut Band, rel: Option<f64>| {
            band.rel = band.rel.max(rel.unwrap_or(band.rel));
        };
        widen(&mut bands.ttft_mean, tolerance.ttft_rel);
        widen(&mut bands.tpot_mean, tolerance.tpot_rel);
        widen(&mut bands.ttft_rest, tolerance.parts_rel);
        widen(&mut bands.tpot_rest, tolerance.parts_rel);
        bands
    }

    /// The band of a number by its place in the golden; `None`: it must be equal.
    fn of(&self, path: &str) -> Option<Band> {
        if path.ends_with(".row_ms") {
            // Rows are single kernels: no floor.
            return Some(Band {
                abs: 0.0,
                ..self.ttft_rest
            });
        }
        let mut steps = path.split('.').skip(1);
        match (steps.next()?, steps.next()) {
            ("ttft_ms", Some("mean")) => Some(self.ttft_mean),
            ("tpot_ms", Some("mean")) => Some(self.tpot_mean),
            (
                "ttft_ms" | "ttft_parts_ms" | "step_ms" | "path_ms" | "op_ms" | "rank_wait_ms"
                | "iteration_ms" | "iteration_path_ms",
                _,
            ) => Some(self.ttft_rest),
            ("tpot_ms" | "tpot_parts_ms", _) => Some(self.tpot_rest),
            // An error follows from its mean, which has a band of its own.
            ("error_pct", _) => Some(Band {
                abs: f64::INFINITY,
                rel: 0.0,
            }),
            _ => None,
        }
    }
}

/// A number that left its band, or structure that changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Breach {
    /// Place in the golden, for example `strict.ttft_parts_ms.kernel`.
    pub path: String,
    pub before: String,
    pub after: String,
    /// What the band allows, in the number's unit; `None`: it must be equal.
    pub allowed: Option<f64>,
}

/// A number that moved inside its band: the golden's text stays.
#[derive(Debug, Clone, PartialEq)]
pub struct Drift {
    pub path: String,
    pub before: f64,
    pub after: f64,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Comparison {
    pub breaches: Vec<Breach>,
    pub drift: Vec<Drift>,
}

impl Comparison {
    pub fn holds(&self) -> bool {
        self.breaches.is_empty()
    }
}

/// Compares a golden with fresh text. A golden that does not parse breaches as a whole.
pub fn compare(golden: &str, fresh: &str, bands: &Bands) -> Comparison {
    let read = |text: &str| serde_yaml::from_str::<Value>(text).ok();
    match (read(golden), read(fresh)) {
        (Some(golden), Some(fresh)) => compare_values(&golden, &fresh, bands),
        _ => Comparison {
            breaches: vec![Breach {
                path: "the whole golden".to_owned(),
                before: "text that does not parse".to_owned(),
                after: "nothing".to_owned(),
                allowed: None,
            }],
            drift: Vec::new(),
        },
    }
}

/// Compares two goldens that were parsed, leaf by leaf.
pub(super) fn compare_values(golden: &Value, fresh: &Value, bands: &Bands) -> Comparison {
    let mut breaches = Vec::new();
    let mut drift = Vec::new();
    let breach = |path: &str, before: String, after: String, allowed| Breach {
        path: path.to_owned(),
        before,
        after,
        allowed,
    };
    let (before, after) = (leaves(golden), leaves(fresh));
    let nothing = || "nothing".to_owned();
    for (path, old) in &before {
        let Some(new) = after.get(path) else {
            breaches.push(breach(path, old.to_string(), nothing(), None));
            continue;
        };
        match (bands.of(path), old.as_f64(), new.as_f64()) {
            (Some(band), Some(old), Some(new)) => {
                let allowed = band.allows(old);
                // A NaN is not within any band.
                let within = (new - old).abs() <= allowed;
                if !within {
                    let (old, new) = (old.to_string(), new.to_string());
                    breaches.push(breach(path, old, new, Some(allowed)));
                } else if new != old && allowed.is_finite() {
                    drift.push(Drift {
                        path: path.clone(),
                        before: old,
                        after: new,
                    });
                }
            }
            _ if old != new => {
                breaches.push(breach(path, old.to_string(), new.to_string(), None));
            }
            _ => {}
        }
    }
    for (path, new) in &after {
        if !before.contains_key(path) {
            breaches.push(breach(path, nothing(), new.to_string(), None));
        }
    }
    Comparison { breaches, drift }
}

/// Every leaf of a golden by its dotted path.
fn leaves(value: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    walk(value, String::new(), &mut found);
    found
}

fn walk(value: &Value, path: String, found: &mut BTreeMap<String, Value>) {
    let join = |key: &str| {
        if path.is_empty() {
            key.to_owned()
        } else {
            format!("{path}.{key}")
        }
    };
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, inner) in map {
                walk(inner, join(key), found);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, inner) in items.iter().enumerate() {
                walk(inner, join(&index.to_string()), found);
            }
        }
        leaf => {
            found.insert(path, leaf.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = "strict:\n  ttft_ms: { mean: 40.0, p50: 38.0 }\n  \
                          ttft_parts_ms: { kernel: 10.0, host_dispatch: 30.0 }\n  \
                          steps: { decode full_graph: 90 }\n";

    fn with(from: &str, to: &str) -> Comparison {
        compare(GOLDEN, &GOLDEN.replace(from, to), &Bands::default())
    }

    #[test]
    fn inside_the_band_is_drift() {
        let comparison = with("mean: 40.0", "mean: 40.07");
        assert!(comparison.holds());
        assert_eq!(comparison.drift.len(), 1);
    }

    #[test]
    fn outside_the_band_is_a_breach_in_both_directions() {
        assert!(!with("mean: 40.0", "mean: 40.09").holds());
        assert!(!with("mean: 40.0", "mean: 39.91").holds());
    }

    #[test]
    fn two_errors_that_cancel_in_the_total_fail_through_the_parts() {
        let comparison = with(
            "kernel: 10.0, host_dispatch: 30.0",
            "kernel: 11.0, host_dispatch: 29.0",
        );
        let paths: Vec<&str> = comparison
            .breaches
            .iter()
            .map(|breach| breach.path.as_str())
            .collect();
        assert_eq!(
            paths,
            [
                "strict.ttft_parts_ms.host_dispatch",
                "strict.ttft_parts_ms.kernel"
            ]
        );
    }

    #[test]
    fn counts_and_structure_are_exact() {
        assert!(!with("decode full_graph: 90", "decode full_graph: 91").holds());
        assert!(!with("p50: 38.0", "p90: 38.0").holds());
    }

    #[test]
    fn a_nan_is_a_breach() {
        assert!(!with("mean: 40.0", "mean: .nan").holds());
    }
}
