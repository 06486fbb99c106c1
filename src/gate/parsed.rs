//! A golden read back: the figures and coverage that its text holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use serde_yaml::NonFiniteFloatPolicy;

use crate::timing::{InputError, Policy};

use super::band::{Bands, Comparison, compare_values};
use super::golden;

/// What a case is judged by. Op and step cases have one metric each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Judged {
    Ttft,
    Tpot,
    Op,
    Step,
}

impl Judged {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::Op => "op",
            Self::Step => "step",
        }
    }

    pub fn of_name(name: &str) -> Option<Self> {
        let all = [Self::Ttft, Self::Tpot, Self::Op, Self::Step];
        all.into_iter().find(|metric| metric.name() == name)
    }

    /// Decimals of the metric in a golden.
    pub fn digits(self) -> usize {
        match self {
            Self::Tpot => 5,
            _ => 4,
        }
    }
}

/// A golden, its estimate written out even where its text leaves it to strict.
#[derive(Debug, Clone, PartialEq)]
pub struct Golden {
    value: Value,
}

/// What a prediction of one policy rests on, as its golden says.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GoldenCoverage {
    pub host: String,
    pub missing: BTreeSet<String>,
    pub derived: BTreeSet<String>,
    /// Flags per GPU op.
    pub gpu: BTreeMap<String, BTreeSet<String>>,
}

impl Golden {
    /// Reads a snapshot file's text; `file` is for messages.
    ///
    /// # Errors
    /// No header, text that is no golden, a number that is not finite: with file and line.
    pub fn of_snapshot(snapshot: &str, file: &Path) -> Result<Self, InputError> {
        let body = golden::body(snapshot, file)?;
        let before = snapshot.find(&body).unwrap_or(0);
        let lines = snapshot[..before].matches('\n').count();
        Self::of_body(&body, lines, file)
    }

    /// Reads what [`golden::render`] wrote.
    pub fn of_text(text: &str, file: &Path) -> Result<Self, InputError> {
        Self::of_body(text, 0, file)
    }

    fn of_body(body: &str, lines_before: usize, file: &Path) -> Result<Self, InputError> {
        let help = "restore the golden from git, or accept a fresh one with `cargo insta review`";
        let options = serde_yaml::options! {
            non_finite_float_policy: NonFiniteFloatPolicy::Reject,
            with_snippet: false,
        };
        let value: Value = serde_yaml::from_str_with_options(body, options).map_err(|error| {
            let at = error.location();
            let message = error.without_snippet().to_string();
            let what = format!("this is no golden: {message}");
            let fault = InputError::new(file, what, help);
            match at {
                Some(at) => fault.at(at.line() + lines_before as u64, at.column()),
                None => fault,
            }
        })?;
        let mut golden = Self { value };
        golden.check().map_err(|(key, what)| {
            let line = body.lines().position(|line| line.trim().starts_with(&key));
            let line = line.unwrap_or(0) + lines_before + 1;
            InputError::new(file, what, help).at(line as u64, 1)
        })?;
        golden.write_out_estimate();
        Ok(golden)
    }

    /// Says where the text is no golden: a line's beginning and what is wrong there.
    fn check(&self) -> Result<(), (String, String)> {
        let fault = |key: &str, what: String| Err((key.to_owned(), what));
        if self.value.get("strict").is_none() {
            return fault("", "a golden without `strict`".to_owned());
        }
        for policy in Policy::ALL {
            let Some(block) = self.value.get(policy.name()) else {
                continue;
            };
            let has = |key: &str| block.get(key).is_some();
            if has("refused") {
                continue;
            }
            if !(has("op_ms") || has("step_ms") || has("ttft_ms") && has("tpot_ms")) {
                let what = format!("no times under `{}`", policy.name());
                return fault(policy.name(), what);
            }
            let Some(block) = block.as_object() else {
                return fault(policy.name(), "not a mapping".to_owned());
            };
            for (key, times) in block.iter().filter(|(key, _)| key.ends_with("_ms")) {
                let finite = times.as_object().is_some_and(|times| {
                    times
                        .values()
                        .all(|ms| ms.as_f64().is_some_and(f64::is_finite))
                });
                if !finite {
                    return fault(key, format!("`{key}` holds no finite number"));
                }
            }
            self.check_errors(policy, block)?;
        }
        Ok(())
    }

    /// The errors that a block states are those of its times.
    fn check_errors(
        &self,
        policy: Policy,
        block: &serde_json::Map<String, Value>,
    ) -> Result<(), (String, String)> {
        let Some(stated_errors) = block.get("error_pct").and_then(Value::as_object) else {
            return Ok(());
        };
        let line = |stated: &serde_json::Map<String, Value>| {
            let pct = |name: &str| stated.get(name).and_then(Value::as_f64);
            match (pct("ttft"), pct("tpot")) {
                (Some(ttft), Some(tpot)) => {
                    format!("error_pct: {{ ttft: {ttft:+.1}, tpot: {tpot:+.1} }}")
                }
                _ => "error_pct".to_owned(),
            }
        };
        for (name, metric) in [("ttft", Judged::Ttft), ("tpot", Judged::Tpot)] {
            let Some(stated) = stated_errors.get(name) else {
                continue;
            };
            let is = self.ms(policy, metric).zip(self.silicon_ms(metric));
            let is = is.map(|(ms, silicon_ms)| golden::error_pct(ms, silicon_ms));
            // Of one decimal.
            let close = |is: f64| stated.as_f64().is_some_and(|pct| (pct - is).abs() < 0.06);
            if !is.is_some_and(close) {
                let is = is.map_or("none".to_owned(), |is| format!("{is:+.1}"));
                let what = format!("says an error of {stated} % of {name}, its times give {is}");
                return Err((line(stated_errors), what));
            }
        }
        Ok(())
    }

    fn write_out_estimate(&mut self) {
        let Some(whole) = self.value.as_object_mut() else {
            return;
        };
        let strict = whole.get("strict").cloned().unwrap_or_default();
        let estimate = whole.entry("estimate").or_insert_with(|| strict.clone());
        let gpu = strict
            .get("coverage")
            .and_then(|coverage| coverage.get("gpu"));
        if let (Some(gpu), Some(coverage)) = (
            gpu,
            estimate.get_mut("coverage").and_then(Value::as_object_mut),
        ) {
            coverage.entry("gpu").or_insert_with(|| gpu.clone());
        }
    }

    /// Compares with a fresh one, both policies written out.
    pub fn compare(&self, fresh: &Self, bands: &Bands) -> Comparison {
        compare_values(&self.value, &fresh.value, bands)
    }

    fn policy(&self, policy: Policy) -> &Value {
        self.value.get(policy.name()).unwrap_or(&Value::Null)
    }

    /// The missing row of a refusal.
    pub fn refused(&self, policy: Policy) -> Option<&str> {
        self.policy(policy).get("refused")?.as_str()
    }

    /// The metrics of this kind of case.
    pub fn judged(&self) -> Vec<Judged> {
        let has = |key: &str| {
            let mut blocks = Policy::ALL.into_iter().map(|policy| self.policy(policy));
            blocks.any(|block| block.get(key).is_some())
        };
        if has("op_ms") {
            vec![Judged::Op]
        } else if has("step_ms") {
            vec![Judged::Step]
        } else {
            vec![Judged::Ttft, Judged::Tpot]
        }
    }

    /// Steps of the replay that its estimate is of: none for a refusal, an op or a step.
    pub fn steps(&self) -> u64 {
        let steps = self.policy(Policy::Estimate).get("steps");
        let counts = steps.and_then(Value::as_object).into_iter().flatten();
        counts.filter_map(|(_, count)| count.as_u64()).sum()
    }

    /// The metric's time; `None` for a refusal.
    pub fn ms(&self, policy: Policy, metric: Judged) -> Option<f64> {
        let block = self.policy(policy);
        match metric {
            Judged::Ttft => block.get("ttft_ms")?.get("mean")?.as_f64(),
            Judged::Tpot => block.get("tpot_ms")?.get("mean")?.as_f64(),
            Judged::Op => block.get("op_ms")?.get("total")?.as_f64(),
            Judged::Step => largest(block.get("step_ms")?, "gpu_span"),
        }
    }

    /// What silicon measured of the metric.
    pub fn silicon_ms(&self, metric: Judged) -> Option<f64> {
        let silicon = |key: &str| self.value.get("silicon")?.get(key)?.as_f64();
        match metric {
            Judged::Ttft => silicon("ttft_ms"),
            Judged::Tpot => silicon("tpot_ms"),
            Judged::Op => {
                let measured = self.value.get("measured")?.as_object()?;
                let all: Vec<f64> = measured.values().filter_map(Value::as_f64).collect();
                (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
            }
            Judged::Step => largest(self.value.get("measured")?, "gpu_span"),
        }
    }

    /// Every measured value by its name.
    pub fn evidence(&self) -> BTreeMap<String, f64> {
        let mut found = BTreeMap::new();
        for block in ["silicon", "measured"] {
            let values = self.value.get(block).and_then(Value::as_object);
            for (key, value) in values.into_iter().flatten() {
                if let Some(ms) = value.as_f64() {
                    found.insert(format!("{block} {key}"), ms);
                }
            }
        }
        found
    }

    pub fn coverage(&self, policy: Policy) -> GoldenCoverage {
        let coverage = self.policy(policy).get("coverage");
        let at = |key: &str| coverage.and_then(|coverage| coverage.get(key));
        let texts = |value: Option<&Value>| -> BTreeSet<String> {
            let items = value.and_then(Value::as_array).into_iter().flatten();
            items
                .filter_map(|item| item.as_str().map(str::to_owned))
                .collect()
        };
        let keyed = |value: Option<&Value>| value.and_then(Value::as_object).cloned();
        let derived = keyed(at("derived")).unwrap_or_default();
        // An op case lists its ops straight under coverage.
        let ops = keyed(at("gpu")).or_else(|| match at("host") {
            None => keyed(coverage),
            Some(_) => None,
        });
        let flags = |(op, flags): (String, Value)| (op, texts(Some(&flags)));
        GoldenCoverage {
            host: at("host").and_then(Value::as_str).unwrap_or("").to_owned(),
            missing: texts(at("missing")),
            derived: derived.into_iter().map(|(name, _)| name).collect(),
            gpu: ops.unwrap_or_default().into_iter().map(flags).collect(),
        }
    }
}

fn largest(times: &Value, beginning: &str) -> Option<f64> {
    let of_name = times
        .as_object()?
        .iter()
        .filter(|(name, _)| name.starts_with(beginning));
    of_name.filter_map(|(_, ms)| ms.as_f64()).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str = "silicon: { ttft_ms: 48.3, tpot_ms: 2.8 }\nstrict:\n  \
                        ttft_ms: { mean: 38.5, p50: 35.6 }\n  tpot_ms: { mean: 2.7, p50: 2.7 }\n  \
                        coverage:\n    host: \"measured\"\n    missing: [\"egress\"]\n    gpu:\n      \
                        norm: [\"roofline\"]\n";

    fn read(body: &str) -> Result<Golden, InputError> {
        let snapshot = format!("---\nsource: harness/main.rs\ninput_file: x\n---\n{body}");
        Golden::of_snapshot(&snapshot, Path::new("goldens/a.snap"))
    }

    #[test]
    fn figures_and_coverage_are_read_back() {
        let golden = read(BODY).expect("a golden");
        assert_eq!(golden.ms(Policy::Estimate, Judged::Ttft), Some(38.5));
        assert_eq!(golden.silicon_ms(Judged::Tpot), Some(2.8));
        let coverage = golden.coverage(Policy::Estimate);
        assert!(coverage.missing.contains("egress"));
        assert!(coverage.gpu["norm"].contains("roofline"));
    }

    #[test]
    fn a_stated_error_is_that_of_the_times() {
        let with = |pct: &str| {
            let errors = format!("  error_pct: {{ {pct} }}\n  tpot_ms");
            read(&BODY.replacen("  tpot_ms", &errors, 1))
        };
        with("ttft: -20.3, tpot: -3.6").expect("38.5 of 48.3 and 2.7 of 2.8");
        let error = with("ttft: -2.3, tpot: -3.6").expect_err("of other times");
        let error = error.to_string();
        assert!(error.contains("a.snap:8"), "{error}");
        let what = "says an error of -2.3 % of ttft, its times give -20.3";
        assert!(error.contains(what), "{error}");
        let error = with("ttft: -20.3, tpot: +3.6").expect_err("of other times");
        assert!(error.to_string().contains("of tpot"), "{error}");
    }

    #[test]
    fn faults_carry_the_line_of_the_file() {
        for (from, to, line) in [
            ("mean: 38.5", "mean: .nan", "a.snap:7"),
            ("mean: 38.5", "mean: .inf", "a.snap:7"),
            ("mean: 2.7", "mean: x", "a.snap:8"),
            ("silicon: {", "silicon: [", "a.snap:5"),
            ("strict:", "lenient:", "a.snap:"),
        ] {
            let error = read(&BODY.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(line), "{error}");
        }
    }
}
