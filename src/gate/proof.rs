//! The proofs that no offset can hide, beside the audit: null, homogeneity, sums, blindness and
//! no leak.
//!
//! A proof takes what it judges as an argument (a predictor, a prediction, a data folder), so that
//! the tests can hand it planted faults.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use walkdir::WalkDir;

use crate::case::{Case, CaseFile, OpCase, StepCase};
use crate::compose::Receipt;
use crate::perfdb::HostRows;
use crate::replay::{Metric, Outcome, Prediction, Quantile, RequestRecord, StepLog};
use crate::timing::{InputError, Provenance, SourceCell};

/// Relative tolerance of sums, and of a scaled prediction whose rounding differs.
const SUM_REL: f64 = 1e-9;
/// Differences that a prediction may show only in lines that begin with these.
const EVALUATION_LINES: [&str; 2] = ["silicon:", "error_pct:"];
/// Keys that a scenario must not have at any depth.
const BLIND_KEYS: [&str; 8] = [
    "silicon",
    "point",
    "file",
    "path",
    "tolerance",
    "measured",
    "places",
    "run",
];
/// Outcomes of a run, by source table and row; `None`: every row of the table. They judge a
/// prediction and are no rows of it.
const OUTCOMES: [(&str, Option<&str>); 15] = [
    ("request_boundaries", Some("executor queue")),
    ("request_boundaries", Some("schedule to first token")),
    ("request_boundaries", Some("client ttft")),
    ("request_boundaries", Some("client minus server")),
    ("per_repeat", Some("schedule to first token")),
    ("per_repeat", Some("executor queue")),
    ("per_repeat", Some("prefill device interval")),
    ("per_repeat", Some("prefill host interval")),
    ("profiled_steps", None),
    ("decode_graph", None),
    ("counts", None),
    ("observer_effect", None),
    ("mixed_iterations", None),
    ("decode_replay", None),
    ("serving", None),
];
/// The one outcome that already is a difference of two measurements.
const DIFFERENCE: (&str, &str) = ("request_boundaries", "client minus server");

/// A proof's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Proof {
    /// Every time is a finite number.
    Finite,
    Null,
    Homogeneity,
    Audit,
    Sums,
    Blindness,
    NoLeak,
}

impl Proof {
    pub fn name(self) -> &'static str {
        match self {
            Self::Finite => "finite",
            Self::Null => "null",
            Self::Homogeneity => "homogeneity",
            Self::Audit => "audit",
            Self::Sums => "sums",
            Self::Blindness => "blindness",
            Self::NoLeak => "no leak",
        }
    }
}

/// A proof that does not hold.
#[derive(Debug, Clone, PartialEq)]
pub struct ProofFailure {
    pub proof: Proof,
    /// The case's name, or the row's or file's.
    pub case: String,
    /// What is wrong: a lowercase fragment.
    pub what: String,
}

impl ProofFailure {
    pub fn new(proof: Proof, case: &str, what: impl Into<String>) -> Self {
        Self {
            proof,
            case: case.to_owned(),
            what: what.into(),
        }
    }
}

impl fmt::Display for ProofFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} fails for {}: {}",
            self.proof.name(),
            self.case,
            self.what
        )
    }
}

impl std::error::Error for ProofFailure {}

/// Null: without rows there is no time. Every TTFT and TPOT is exactly 0.
///
/// `predict` multiplies every row by a factor and follows a recorded schedule where one is given.
pub fn null(
    case: &str,
    predict: impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError>,
) -> Result<(), ProofFailure> {
    let failed = |what: String| ProofFailure::new(Proof::Null, case, what);
    let Some(zero) = predicted(predict(0.0, None), &failed)? else {
        return Ok(());
    };
    for (name, metric) in [("TTFT", zero.ttft), ("TPOT", zero.tpot)] {
        if metric.mean_ms != 0.0 {
            return Err(failed(format!("mean {name} is {} ms", metric.mean_ms)));
        }
        for quantile in [metric.p50, metric.p90, metric.p99] {
            if quantile.ms != 0.0 {
                return Err(failed(format!(
                    "a percentile of {name} is {} ms",
                    quantile.ms
                )));
            }
        }
    }
    for (index, request) in zero.log.requests.iter().enumerate() {
        let (ttft_ms, tpot_ms) = (request.ttft_ms(), request.tpot_ms().unwrap_or(0.0));
        if ttft_ms != 0.0 || tpot_ms != 0.0 {
            return Err(failed(format!(
                "request {index} takes {ttft_ms} ms and {tpot_ms} ms per token"
            )));
        }
    }
    Ok(())
}

/// Homogeneity: rows times 2 or 0.5 give every time times 2 or 0.5, bit for bit, and the same
/// receipts; rows times 3.7 on the recorded schedule give it within 1e-9.
pub fn homogeneity(
    case: &str,
    predict: impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError>,
) -> Result<(), ProofFailure> {
    let failed = |what: String| ProofFailure::new(Proof::Homogeneity, case, what);
    let Some(base) = predicted(predict(1.0, None), &failed)? else {
        return Ok(());
    };
    for factor in [2.0, 0.5] {
        let scaled = exact(&base, factor, &predict, &failed)?;
        let coefficients = |receipt: &Receipt| {
            let bits = receipt.lines.iter().map(|line| line.coefficient.to_bits());
            bits.collect::<Vec<_>>()
        };
        for (name, from, to) in [
            ("TTFT", &base.ttft_receipt, &scaled.ttft_receipt),
            ("TPOT", &base.tpot_receipt, &scaled.tpot_receipt),
        ] {
            if coefficients(from) != coefficients(to) {
                let what = format!("rows times {factor}: the receipt of {name} changes");
                return Err(failed(what));
            }
        }
    }
    near(&base, 3.7, &predict, &failed)
}

/// Homogeneity of the times of a prediction that is there: `base` is what `predict` gives at a
/// factor of 1. A power of two shows every addend and every bound that takes hold at the rows as
/// they are; with more, bounds show that would take hold at other rows.
pub(super) fn homogeneous_times(
    case: &str,
    base: &Prediction,
    predict: impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError>,
) -> Result<(), ProofFailure> {
    let failed = |what: String| ProofFailure::new(Proof::Homogeneity, case, what);
    exact(base, 2.0, &predict, &failed)?;
    near(base, 3.7, &predict, &failed)
}

/// What `predict` gives with rows times a power of two: every time as much, bit for bit.
fn exact(
    base: &Prediction,
    factor: f64,
    predict: &impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError>,
    failed: &impl Fn(String) -> ProofFailure,
) -> Result<Box<Prediction>, ProofFailure> {
    let same = |from: f64, to: f64| to.to_bits() == (from * factor).to_bits();
    times(base, (factor, None), predict, same, failed)
}

/// The same on the recorded schedule with any factor, within 1e-9.
fn near(
    base: &Prediction,
    factor: f64,
    predict: &impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError>,
    failed: &impl Fn(String) -> ProofFailure,
) -> Result<(), ProofFailure> {
    let same = |from: f64, to: f64| (to - from * factor).abs() <= SUM_REL * (from * factor).abs();
    times(base, (factor, Some(&base.log)), predict, same, failed).map(drop)
}

fn times(
    base: &Prediction,
    (factor, recorded): (f64, Option<&StepLog>),
    predict: &impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError>,
    same: impl Fn(f64, f64) -> bool,
    failed: &impl Fn(String) -> ProofFailure,
) -> Result<Box<Prediction>, ProofFailure> {
    let Some(scaled) = predicted(predict(factor, recorded), failed)? else {
        return Err(failed(format!("refused with rows times {factor}")));
    };
    match scales(base, &scaled, same) {
        Ok(()) => Ok(scaled),
        Err(what) => Err(failed(format!("rows times {factor}: {what}"))),
    }
}

/// Unwraps a prediction; `None` for a refusal, which has no time to hide in.
fn predicted(
    outcome: Result<Outcome, InputError>,
    failed: &impl Fn(String) -> ProofFailure,
) -> Result<Option<Box<Prediction>>, ProofFailure> {
    match outcome {
        Ok(Outcome::Predicted(prediction)) => Ok(Some(prediction)),
        Ok(Outcome::Refused(_)) => Ok(None),
        Err(error) => Err(failed(error.to_string())),
    }
}

fn scales(
    base: &Prediction,
    scaled: &Prediction,
    same: impl Fn(f64, f64) -> bool,
) -> Result<(), String> {
    let held = |name: String, from: f64, to: f64| {
        if same(from, to) {
            Ok(())
        } else {
            Err(format!("{name} goes from {from} ms to {to} ms"))
        }
    };
    for (name, from, to) in [
        ("TTFT", base.ttft, scaled.ttft),
        ("TPOT", base.tpot, scaled.tpot),
    ] {
        for (what, from, to) in figures(from)
            .into_iter()
            .zip(figures(to))
            .map(|((what, from), (_, to))| (what, from, to))
        {
            held(format!("{what} {name}"), from, to)?;
        }
    }
    if base.log.requests.len() != scaled.log.requests.len() {
        return Err("the number of requests changes".to_owned());
    }
    let times = |request: &RequestRecord| {
        [
            ("TTFT", request.ttft_ms()),
            ("TPOT", request.tpot_ms().unwrap_or(0.0)),
            ("post", request.post_ms),
            ("arrival", request.arrival_ms),
            ("schedule", request.scheduled_ms),
            ("first token", request.first_token_ms),
            ("last token", request.last_token_ms),
        ]
    };
    for (index, (from, to)) in base
        .log
        .requests
        .iter()
        .zip(&scaled.log.requests)
        .enumerate()
    {
        for ((name, from), (_, to)) in times(from).into_iter().zip(times(to)) {
            held(format!("{name} of request {index}"), from, to)?;
        }
    }
    Ok(())
}

fn figures(metric: Metric) -> [(&'static str, f64); 4] {
    let ms = |quantile: Quantile| quantile.ms;
    [
        ("mean", metric.mean_ms),
        ("p50", ms(metric.p50)),
        ("p90", ms(metric.p90)),
        ("p99", ms(metric.p99)),
    ]
}

/// Sums: requests, receipt and parts all come to the mean, within 1e-9.
pub fn sums(case: &str, prediction: &Prediction) -> Result<(), ProofFailure> {
    let requests = &prediction.log.requests;
    let ttft: Vec<f64> = requests.iter().map(RequestRecord::ttft_ms).collect();
    let tpot: Vec<f64> = requests.iter().filter_map(RequestRecord::tpot_ms).collect();
    for (name, times, metric, receipt) in [
        ("TTFT", ttft, prediction.ttft, &prediction.ttft_receipt),
        ("TPOT", tpot, prediction.tpot, &prediction.tpot_receipt),
    ] {
        let rows = |part: Option<usize>| -> f64 {
            receipt
                .lines
                .iter()
                .filter(|line| part.is_none_or(|part| line.part as usize == part))
                .map(|line| line.coefficient * prediction.rows.ms(line.row))
                .sum()
        };
        let mut comes_to = vec![
            (
                "its requests".to_owned(),
                times.iter().sum::<f64>() / times.len() as f64,
            ),
            ("its receipt".to_owned(), rows(None)),
            ("its parts".to_owned(), receipt.parts_ms.iter().sum()),
        ];
        let mean_ms = metric.mean_ms;
        for (part, ms) in receipt.parts_ms.iter().enumerate() {
            // Each part, put in place of its rows.
            comes_to.push((format!("part {part}"), mean_ms + ms - rows(Some(part))));
        }
        for (what, ms) in comes_to {
            let apart = (ms - mean_ms).abs();
            if apart.is_nan() || apart > SUM_REL * mean_ms.abs() {
                return Err(ProofFailure::new(
                    Proof::Sums,
                    case,
                    format!("mean {name} is {mean_ms} ms, {what} come to {ms} ms"),
                ));
            }
        }
    }
    Ok(())
}

/// Blindness: the same case with other silicon values, another point, another tolerance and
/// another path is predicted alike, byte for byte, outside the lines that compare with silicon.
pub fn blindness(
    name: &str,
    case: &Case,
    predict: impl Fn(&Case) -> String,
) -> Result<(), ProofFailure> {
    let failed = |what: String| ProofFailure::new(Proof::Blindness, name, what);
    sees_no_answer(name, &case.scenario())?;
    let disguised = disguised(name, case)?;
    let (open, blind) = (predict(case), predict(&disguised));
    let (open, blind) = (without_evaluation(&open), without_evaluation(&blind));
    for (a, b) in open.iter().zip(&blind) {
        if a != b {
            return Err(failed(format!("`{}` becomes `{}`", a.trim(), b.trim())));
        }
    }
    if open.len() != blind.len() {
        let what = format!("{} lines become {}", open.len(), blind.len());
        return Err(failed(what));
    }
    Ok(())
}

/// The same case with other silicon values, another point, another tolerance and another path.
pub(super) fn disguised(name: &str, case: &Case) -> Result<Case, ProofFailure> {
    let failed = |what: String| ProofFailure::new(Proof::Blindness, name, what);
    let text = std::fs::read_to_string(&case.file).map_err(|error| failed(error.to_string()))?;
    let folder = tempfile::tempdir().map_err(|error| failed(error.to_string()))?;
    let file = folder.path().join("elsewhere.yaml");
    let disguised = CaseFile::from_bytes(&file, disguise(&text).into_bytes());
    let disguised = match disguised {
        Ok(CaseFile::Serving(case)) => case,
        Ok(_) => return Err(failed("no serving case once disguised".to_owned())),
        Err(error) => return Err(failed(error.to_string())),
    };
    if disguised.point == case.point || disguised.silicon == case.silicon {
        return Err(failed("the disguise changed nothing".to_owned()));
    }
    Ok(disguised)
}

/// A scenario has no key that could hold an answer.
pub fn sees_no_answer(name: &str, scenario: &impl Serialize) -> Result<(), ProofFailure> {
    let failed = |what: String| ProofFailure::new(Proof::Blindness, name, what);
    let value = serde_json::to_value(scenario).map_err(|error| failed(error.to_string()))?;
    let mut keys = BTreeSet::new();
    collect_keys(&value, &mut keys);
    match BLIND_KEYS.iter().find(|key| keys.contains(**key)) {
        Some(key) => Err(failed(format!("its scenario has a key `{key}`"))),
        None => Ok(()),
    }
}

fn collect_keys(value: &Value, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                keys.insert(key.clone());
                collect_keys(value, keys);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect_keys(value, keys)),
        _ => {}
    }
}

/// The case's text with another point, other silicon values and a tolerance.
fn disguise(text: &str) -> String {
    let mut kept = String::new();
    let mut dropping = false;
    for line in text.lines() {
        let nested = line.starts_with([' ', '\t', '#']) || line.is_empty();
        if !nested {
            let key = line.split(':').next().unwrap_or("");
            dropping = ["point", "silicon", "tolerance"].contains(&key);
        }
        if !dropping {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept.push_str(
        "point: 900001\n\
         silicon: { ttft_ms: 4321.5, tpot_ms: 87.25, run: elsewhere, date: 2020-02-29 }\n\
         tolerance: { ttft_rel: 0.5, reason: a disguise, expires: 2099-01-01 }\n",
    );
    kept
}

fn without_evaluation(text: &str) -> Vec<&str> {
    let evaluation = |line: &&str| {
        let line = line.trim_start();
        !EVALUATION_LINES.iter().any(|start| line.starts_with(start))
    };
    text.lines().filter(evaluation).collect()
}

/// A value of a source table, as its CSV file has it.
#[derive(Debug, Clone, PartialEq)]
struct CsvCell {
    cell: SourceCell,
    text: String,
    observer: String,
}

/// No leak: every measured host row is the cell it names, every derived one the difference of
/// its cells, and none is an outcome of a run or a diagnostic figure. Returns the number of rows.
pub fn no_leak(data: &Path) -> Result<usize, Vec<ProofFailure>> {
    let cells = source_cells(data).map_err(|failure| vec![failure])?;
    let folder = data.join("host");
    let rows = HostRows::load(&folder).map_err(|error| {
        let shown = folder.display().to_string();
        vec![ProofFailure::new(Proof::NoLeak, &shown, error.to_string())]
    })?;
    let mut failures = Vec::new();
    for row in rows.all() {
        let mut failed = |what: String| {
            failures.push(ProofFailure::new(Proof::NoLeak, &row.id, what));
        };
        let mean_ms = row.samples.mean_ms;
        if !row.composes() {
            failed(format!("observed by {}", row.samples.observer));
        }
        match &row.provenance {
            Provenance::Measured { source } => match find(&cells, source) {
                Ok(cell) => {
                    if cell.text.parse() != Ok(mean_ms) {
                        failed(format!("{mean_ms} ms, but {source} says {}", cell.text));
                    }
                    let observer = row.samples.observer.to_string();
                    if cell.observer != observer {
                        failed(format!(
                            "by {observer}, but {source} is by {}",
                            cell.observer
                        ));
                    }
                    if is_outcome(source) {
                        failed(format!("{source} is an outcome of a run"));
                    }
                }
                Err(what) => failed(what),
            },
            Provenance::Derived { plus, minus, .. } => {
                let mean = |named: &[SourceCell]| -> Result<f64, String> {
                    let mut sum = 0.0;
                    for source in named {
                        let cell = find(&cells, source)?;
                        let value: f64 = cell
                            .text
                            .parse()
                            .map_err(|_| format!("{source} says {}", cell.text))?;
                        sum += value;
                    }
                    Ok(sum / named.len().max(1) as f64)
                };
                match (mean(plus), mean(minus)) {
                    (Ok(plus_ms), Ok(minus_ms)) => {
                        let ms = plus_ms - minus_ms;
                        if (mean_ms - ms).abs() > SUM_REL * ms.abs() {
                            failed(format!("{mean_ms} ms, but its cells come to {ms} ms"));
                        }
                    }
                    (Err(what), _) | (_, Err(what)) => failed(what),
                }
                // An outcome may be a term of a difference; alone it would be the answer itself.
                let alone = |cell: &&SourceCell| {
                    is_outcome(cell) && (cell.table.as_str(), cell.row.as_str()) != DIFFERENCE
                };
                if minus.is_empty()
                    && let Some(cell) = plus.iter().find(alone)
                {
                    failed(format!("{cell} is an outcome of a run"));
                }
            }
            Provenance::Roofline { .. } => {
                failed("a host row cannot be counted work over a peak".to_owned());
            }
        }
    }
    if failures.is_empty() {
        Ok(rows.all().len())
    } else {
        Err(failures)
    }
}

/// The measured values of op and step cases are the cells they name, less the cell they subtract.
/// Returns the number of values.
pub fn measured_cells<'a>(
    data: &Path,
    cases: impl IntoIterator<Item = &'a CaseFile>,
) -> Result<usize, Vec<ProofFailure>> {
    let cells = source_cells(data).map_err(|failure| vec![failure])?;
    let mut failures = Vec::new();
    let mut values = 0;
    for case in cases {
        let measured: Vec<(f64, &SourceCell, Option<&SourceCell>)> = match case {
            CaseFile::Serving(_) => continue,
            CaseFile::Op(OpCase { measured, .. }) => {
                let each = measured.iter().map(|one| (one.ms, &one.source, None));
                each.collect()
            }
            CaseFile::Step(StepCase { measured, .. }) => {
                let each = measured.iter();
                each.map(|one| (one.ms, &one.source, one.minus.as_ref()))
                    .collect()
            }
        };
        for (ms, source, minus) in measured {
            values += 1;
            let read = |source: &SourceCell| -> Result<f64, String> {
                let cell = find(&cells, source)?;
                let parsed = cell.text.parse();
                parsed.map_err(|_| format!("{source} says {}", cell.text))
            };
            let holds = match minus {
                None => read(source).map(|cell_ms| (cell_ms, ms == cell_ms)),
                Some(minus) => read(source).and_then(|cell_ms| {
                    let difference = cell_ms - read(minus)?;
                    Ok((
                        difference,
                        (ms - difference).abs() <= SUM_REL * cell_ms.abs(),
                    ))
                }),
            };
            let what = match holds {
                Ok((_, true)) => continue,
                Ok((cell_ms, false)) => format!("measured {ms} ms, but {source} gives {cell_ms}"),
                Err(what) => what,
            };
            let shown = case.file().display().to_string();
            failures.push(ProofFailure::new(Proof::NoLeak, &shown, what));
        }
    }
    if failures.is_empty() {
        Ok(values)
    } else {
        Err(failures)
    }
}

fn is_outcome(cell: &SourceCell) -> bool {
    OUTCOMES
        .iter()
        .any(|(table, row)| cell.table == *table && row.is_none_or(|row| cell.row == row))
}

/// The one cell of that name.
fn find<'a>(cells: &'a [CsvCell], wanted: &SourceCell) -> Result<&'a CsvCell, String> {
    let mut named = cells.iter().filter(|known| known.cell == *wanted);
    match (named.next(), named.count()) {
        (Some(cell), 0) => Ok(cell),
        (Some(_), more) => Err(format!("{wanted} stands {} times", more + 1)),
        (None, _) => Err(format!("{wanted} is in no source table")),
    }
}

/// Every cell of `host/sources/*.csv`, read anew.
fn source_cells(data: &Path) -> Result<Vec<CsvCell>, ProofFailure> {
    let folder = data.join("host").join("sources");
    let mut cells = Vec::new();
    for entry in WalkDir::new(&folder).sort_by_file_name() {
        let failed =
            |what: String| ProofFailure::new(Proof::NoLeak, &folder.display().to_string(), what);
        let entry = entry.map_err(|error| failed(error.to_string()))?;
        if entry
            .path()
            .extension()
            .is_none_or(|ending| ending != "csv")
        {
            continue;
        }
        let text = std::fs::read_to_string(entry.path()).map_err(|e| failed(e.to_string()))?;
        for line in text.lines().skip(1) {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let [table, row, column, value, _, observer] = fields[..] else {
                return Err(failed(format!("`{line}` has not six fields")));
            };
            cells.push(CsvCell {
                cell: SourceCell {
                    table: table.to_owned(),
                    row: row.to_owned(),
                    column: column.to_owned(),
                },
                text: value.to_owned(),
                observer: observer.to_owned(),
            });
        }
    }
    Ok(cells)
}
