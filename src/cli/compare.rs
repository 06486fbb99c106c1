//! `stepgate compare`: two serving cases, or one with some of its keys changed, side by side.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use crate::case::{Case, CaseFile};
use crate::compose::Part;
use crate::gate::Points;
use crate::replay::{Metric, Outcome, Prediction};
use crate::timing::{InputError, Policy, read_text};

use super::run::Stop;
use super::select::select;
use super::text::{Table, bold};

/// A key of a case and the value that `--set` gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// From the top of the file, as in `serving.mixed_execution`.
    path: Vec<String>,
    /// `null` takes the key out.
    value: Value,
    shown: String,
}

impl Setting {
    /// Parses `key=value`; the value is YAML.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Some((path, value)) = text.split_once('=') else {
            return Err("expected KEY=VALUE, for example serving.max_num_tokens=8192".to_owned());
        };
        let path: Vec<String> = path.split('.').map(|key| key.trim().to_owned()).collect();
        if path.iter().any(String::is_empty) {
            return Err(format!("`{text}` has a key without a name"));
        }
        let value = serde_yaml::from_str(value).map_err(|error| error.to_string())?;
        Ok(Self {
            path,
            value,
            shown: text.to_owned(),
        })
    }

    fn apply(&self, root: &mut Value) -> Result<(), String> {
        let (last, blocks) = self.path.split_last().ok_or("a key is empty")?;
        let mut at = root;
        let mut inside = String::new();
        for key in blocks {
            inside = format!("{inside}{key}.");
            let block = at.as_object_mut().ok_or_else(|| no_block(&inside))?;
            at = block.entry(key).or_insert_with(|| json!({}));
        }
        let block = at.as_object_mut().ok_or_else(|| no_block(&inside))?;
        if self.value.is_null() {
            block.remove(last);
        } else {
            block.insert(last.clone(), self.value.clone());
        }
        Ok(())
    }
}

fn no_block(inside: &str) -> String {
    format!("`{}` holds no keys", inside.trim_end_matches('.'))
}

/// One side of the comparison.
struct Side {
    name: String,
    case: Case,
}

/// A figure of both sides; the unit stands in its name.
struct Figure {
    name: String,
    values: [f64; 2],
    digits: usize,
}

pub fn run(
    points: &Points,
    a: &str,
    b: Option<&str>,
    settings: &[Setting],
    json: bool,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let first = side(points, a)?;
    let second = match b {
        Some(b) => side(points, b)?,
        None => changed(points, &first, settings)?,
    };
    let sides = [first, second];
    let mut object = Map::new();
    if json {
        object.insert("a".to_owned(), json!(sides[0].name));
        object.insert("b".to_owned(), json!(sides[1].name));
    } else {
        writeln!(
            out,
            "A  {}\nB  {}",
            bold(&sides[0].name),
            bold(&sides[1].name)
        )?;
    }
    for policy in Policy::ALL {
        let mut outcomes = Vec::new();
        for side in &sides {
            let scenario = side.case.scenario();
            outcomes.push(points.replayer().predict(&scenario, policy)?);
        }
        let [Outcome::Predicted(a), Outcome::Predicted(b)] = &outcomes[..] else {
            let refused: Vec<Option<&str>> = outcomes.iter().map(refusal).collect();
            if json {
                let refused = json!({ "refused": { "a": refused[0], "b": refused[1] } });
                object.insert(policy.name().to_owned(), refused);
            } else {
                for (side, refused) in ["A", "B"].iter().zip(refused) {
                    let refused = refused.unwrap_or("not refused");
                    writeln!(out, "\n{}: {side} refused: {refused}", policy.name())?;
                }
            }
            continue;
        };
        let sections = figures(a, b);
        if json {
            object.insert(policy.name().to_owned(), policy_json(&sections, a, b));
        } else {
            write_policy(out, policy, &sections, a, b)?;
        }
    }
    if json {
        writeln!(out, "{}", Value::Object(object))?;
    }
    Ok(())
}

fn refusal(outcome: &Outcome) -> Option<&str> {
    match outcome {
        Outcome::Refused(refusal) => Some(&refusal.missing),
        Outcome::Predicted(_) => None,
    }
}

/// The one serving case of a name or path.
fn side(points: &Points, name: &str) -> Result<Side, Stop> {
    let mut selected = select(points, &[name.to_owned()])?;
    let one = match (selected.pop(), selected.len()) {
        (Some(one), 0) => one,
        _ => return Err(Stop::Usage(format!("`{name}` is not one case"))),
    };
    match one.case {
        CaseFile::Serving(case) => Ok(Side {
            name: one.name,
            case,
        }),
        _ => {
            let what = format!("`{name}` is no serving case: only these have a throughput");
            Err(Stop::Usage(what))
        }
    }
}

/// A case with some of its keys changed, checked like any other.
fn changed(points: &Points, from: &Side, settings: &[Setting]) -> Result<Side, Stop> {
    let shown: Vec<&str> = settings.iter().map(|one| one.shown.as_str()).collect();
    let name = format!("{} with {}", from.name, shown.join(", "));
    let file = PathBuf::from(&name);
    // Lines of the changed text are nobody's lines: an error names the key.
    let unplaced = |mut error: InputError| {
        error.place.line = None;
        error.place.column = None;
        error
    };
    let text = read_text(&from.case.file, "the case")?;
    let mut root: Value = serde_yaml::from_str(&text)
        .map_err(|error| InputError::new(&from.case.file, error.to_string(), ""))?;
    for setting in settings {
        setting.apply(&mut root).map_err(|what| {
            InputError::new(
                &file,
                what,
                "name a key of a block, as the case file has it",
            )
            .field(setting.path.join("."))
        })?;
    }
    let text = serde_yaml::to_string(&root)
        .map_err(|error| InputError::new(&file, error.to_string(), "give a plain value"))?;
    let case = CaseFile::from_bytes(&file, text.into_bytes()).map_err(unplaced)?;
    match points.check(case).map_err(unplaced)? {
        CaseFile::Serving(case) => Ok(Side { name, case }),
        _ => Err(Stop::Usage(
            "--set turns the case into another kind".to_owned(),
        )),
    }
}

fn figures(a: &Prediction, b: &Prediction) -> Vec<(&'static str, Vec<Figure>)> {
    let figure = |name: &str, of: &dyn Fn(&Prediction) -> f64, digits| Figure {
        name: name.to_owned(),
        values: [of(a), of(b)],
        digits,
    };
    let metric = |of: &dyn Fn(&Prediction) -> Metric, digits| {
        vec![
            figure("mean", &|one| of(one).mean_ms, digits),
            figure("p50", &|one| of(one).p50.ms, digits),
            figure("p99", &|one| of(one).p99.ms, digits),
        ]
    };
    let parts = |of: &dyn Fn(&Prediction, Part) -> f64, digits| {
        let all = Part::ALL.map(|part| figure(part.name(), &|one| of(one, part), digits));
        let lies = |one: &Figure| one.values != [0.0, 0.0];
        all.into_iter().filter(lies).collect()
    };
    let kinds: BTreeSet<&String> = a.steps.keys().chain(b.steps.keys()).collect();
    let steps = kinds.into_iter().map(|kind| {
        let count = |one: &Prediction| one.steps.get(kind).copied().unwrap_or(0) as f64;
        figure(kind, &count, 0)
    });
    vec![
        (
            "throughput",
            vec![
                figure("requests/s", &|one| one.requests_per_s, 3),
                figure("output tokens/s", &|one| one.output_tokens_per_s, 1),
            ],
        ),
        ("TTFT, ms", metric(&|one| one.ttft, 2)),
        ("TPOT, ms", metric(&|one| one.tpot, 3)),
        (
            "parts of mean TTFT, ms",
            parts(&|one, part| one.ttft_receipt.part_ms(part), 2),
        ),
        (
            "parts of mean TPOT, ms",
            parts(&|one, part| one.tpot_receipt.part_ms(part), 3),
        ),
        ("steps", steps.collect()),
    ]
}

impl Figure {
    /// B over A; `None` where there is nothing to divide by.
    fn ratio(&self) -> Option<f64> {
        (self.values[0] != 0.0).then(|| self.values[1] / self.values[0])
    }
}

fn policy_json(sections: &[(&'static str, Vec<Figure>)], a: &Prediction, b: &Prediction) -> Value {
    let mut object = Map::new();
    for (section, figures) in sections {
        let figures: Map<String, Value> = figures
            .iter()
            .map(|one| {
                let [a, b] = one.values;
                let value = json!({ "a": a, "b": b, "difference": b - a, "ratio": one.ratio() });
                (one.name.clone(), value)
            })
            .collect();
        object.insert((*section).to_owned(), Value::Object(figures));
    }
    let missing = json!({ "a": a.coverage.missing, "b": b.coverage.missing });
    object.insert("missing".to_owned(), missing);
    Value::Object(object)
}

fn write_policy(
    out: &mut dyn Write,
    policy: Policy,
    sections: &[(&'static str, Vec<Figure>)],
    a: &Prediction,
    b: &Prediction,
) -> io::Result<()> {
    writeln!(out)?;
    let mut table = Table::new(&[policy.name(), "A", "B", "B - A", "B / A"]);
    for (section, figures) in sections {
        table.row(vec![(*section).to_owned()]);
        for one in figures {
            let [a, b] = one.values;
            let digits = one.digits;
            table.row(vec![
                format!("  {}", one.name),
                format!("{a:.digits$}"),
                format!("{b:.digits$}"),
                format!("{:+.digits$}", b - a),
                one.ratio()
                    .map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
            ]);
        }
    }
    table.write(out, 0)?;
    for (side, prediction) in [("A", a), ("B", b)] {
        let missing: Vec<&str> = prediction
            .coverage
            .missing
            .iter()
            .map(String::as_str)
            .collect();
        let missing = if missing.is_empty() {
            "none".to_owned()
        } else {
            missing.join(", ")
        };
        writeln!(out, "missing in {side}: {missing}")?;
    }
    Ok(())
}
