//! `stepgate accuracy`: errors against silicon, beside the peer's.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::compose::{Part, Receipt};
use crate::gate::{Points, Predicted, error_pct};
use crate::replay::{Outcome, Prediction};
use crate::timing::{HostClass, InputError, read_text};

use super::run::Stop;
use super::select::{predict_all, select};
use super::text::{Table, bold};

/// `data/points/peer.yaml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerFile {
    latest: Vec<PeerGroup>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerGroup {
    model: String,
    system: String,
    backend: String,
    points: u32,
    ttft_mape_pct: f64,
    tpot_mape_pct: f64,
}

impl PeerGroup {
    fn name(&self) -> String {
        format!("{} {} {}", self.model, self.system, self.backend)
    }
}

/// Signed errors of one point, in percent; `None` where it was refused.
struct PointError {
    case: String,
    point: Option<u32>,
    group: String,
    /// Per policy: (TTFT, TPOT, host class).
    strict: Option<(f64, f64, &'static str)>,
    estimate: Option<(f64, f64, &'static str)>,
    peer_first: Option<(f64, f64)>,
    /// What most likely explains the errors of the estimate: (TTFT, TPOT).
    suspects: Option<(String, String)>,
}

/// Points that the list of the worst holds.
const WORST: usize = 10;

/// What most likely explains an error. Too short: the boundaries that no row covers, else the host
/// time that was carried over, else what the largest part rests on. Too long: what the largest part
/// rests on.
fn suspect(prediction: &Prediction, receipt: &Receipt, error_pct: f64) -> String {
    let coverage = &prediction.coverage;
    let total = receipt.total_ms();
    let largest = Part::ALL
        .into_iter()
        .max_by(|a, b| receipt.part_ms(*a).total_cmp(&receipt.part_ms(*b)))
        .unwrap_or(Part::Kernel);
    let mut suspects = vec![format!(
        "{} is {:.0} % of it",
        largest.name(),
        receipt.part_ms(largest) / total * 100.0
    )];
    if error_pct < 0.0 {
        if !coverage.missing.is_empty() {
            // Nothing has a row around graphs: said once, so that what differs stands out.
            let (graphs, others): (Vec<&str>, Vec<&str>) = coverage
                .missing
                .iter()
                .map(String::as_str)
                .partition(|name| name.ends_with("graph)") || name.ends_with("(piecewise)"));
            if !others.is_empty() {
                suspects.push(format!("no row for {}", others.join(", ")));
            }
            if !graphs.is_empty() {
                suspects.push("no host row around graphs".to_owned());
            }
        }
        if coverage.host == HostClass::Derived {
            suspects.push("host time of another deployment".to_owned());
        }
    }
    let other: Vec<&str> = coverage
        .gpu
        .iter()
        .filter(|(_, flags)| flags.iter().any(|flag| flag.starts_with("ANOTHER KERNEL")))
        .map(|(op, _)| op.as_str())
        .collect();
    if !other.is_empty() {
        suspects.push(format!("another kernel stands in for {}", other.join(", ")));
    }
    suspects.join("; ")
}

pub fn run(points: &Points, cases: &[String], json: bool, out: &mut dyn Write) -> Result<(), Stop> {
    let folder = points.root().join("data/points");
    let peer_first = read_peer_first(&folder.join("points.csv"))?;
    let peer_latest = read_peer_latest(&folder.join("peer.yaml"))?;
    let selected = select(points, cases)?;
    let mut errors = Vec::new();
    predict_all(points, selected, |name, predicted| {
        let Predicted::Serving {
            case,
            strict,
            estimate,
        } = &predicted
        else {
            return Ok(());
        };
        let Some(silicon) = &case.silicon else {
            return Ok(());
        };
        let of = |outcome: &Outcome| match outcome {
            Outcome::Predicted(prediction) => Some((
                error_pct(prediction.ttft.mean_ms, silicon.ttft_ms),
                error_pct(prediction.tpot.mean_ms, silicon.tpot_ms),
                prediction.coverage.host.name(),
            )),
            Outcome::Refused(_) => None,
        };
        let scenario = case.scenario();
        let deployment = &scenario.deployment;
        errors.push(PointError {
            case: name,
            point: case.point,
            group: format!(
                "{} {} {}",
                deployment.model, deployment.system, deployment.backend.name
            ),
            strict: of(strict),
            estimate: of(estimate),
            suspects: match estimate.as_ref() {
                Outcome::Predicted(prediction) => {
                    let ttft = error_pct(prediction.ttft.mean_ms, silicon.ttft_ms);
                    let tpot = error_pct(prediction.tpot.mean_ms, silicon.tpot_ms);
                    Some((
                        suspect(prediction, &prediction.ttft_receipt, ttft),
                        suspect(prediction, &prediction.tpot_receipt, tpot),
                    ))
                }
                Outcome::Refused(_) => None,
            },
            peer_first: case
                .point
                .and_then(|point| peer_first.get(&point))
                .map(|(ttft, tpot)| {
                    (
                        error_pct(*ttft, silicon.ttft_ms),
                        error_pct(*tpot, silicon.tpot_ms),
                    )
                }),
        });
        Ok(())
    })?;
    if json {
        write_json(out, &errors, &peer_latest)
    } else {
        write_text(out, &errors, &peer_latest)
    }
}

/// Count, mean absolute, median absolute and 95th percentile of absolute errors.
#[derive(Debug, Clone, Copy)]
struct Spread {
    count: usize,
    mean: f64,
    median: f64,
    p95: f64,
}

impl Spread {
    fn of(errors: impl Iterator<Item = f64>) -> Option<Self> {
        let mut absolute: Vec<f64> = errors.map(f64::abs).collect();
        if absolute.is_empty() {
            return None;
        }
        absolute.sort_by(f64::total_cmp);
        let count = absolute.len();
        let at = |percent: usize| absolute[(count * percent).div_ceil(100).max(1) - 1];
        Some(Self {
            count,
            mean: absolute.iter().sum::<f64>() / count as f64,
            median: at(50),
            p95: at(95),
        })
    }

    fn json(self) -> Value {
        json!({
            "count": self.count,
            "mape_pct": self.mean,
            "median_pct": self.median,
            "p95_pct": self.p95,
        })
    }
}

const POLICIES: [&str; 2] = ["strict", "estimate"];

impl PointError {
    fn policy(&self, policy: &str) -> Option<(f64, f64, &'static str)> {
        if policy == "strict" {
            self.strict
        } else {
            self.estimate
        }
    }

    /// Errors that count: a refusal counts as the peer's error.
    fn counted(&self, policy: &str) -> Option<(f64, f64)> {
        self.policy(policy)
            .map(|(ttft, tpot, _)| (ttft, tpot))
            .or(self.peer_first)
    }
}

/// Groups of points: all of them, each model/system/backend, each host class.
fn groups<'a>(errors: &'a [PointError], policy: &str) -> Vec<(String, Vec<&'a PointError>)> {
    let mut named: BTreeMap<String, Vec<&PointError>> = BTreeMap::new();
    let mut classes: BTreeMap<String, Vec<&PointError>> = BTreeMap::new();
    for error in errors {
        named.entry(error.group.clone()).or_default().push(error);
        let class = error.policy(policy).map_or("refused", |(.., class)| class);
        classes
            .entry(format!("host time {class}"))
            .or_default()
            .push(error);
    }
    let mut all = vec![("all".to_owned(), errors.iter().collect())];
    all.extend(named);
    all.extend(classes);
    all
}

fn write_text(out: &mut dyn Write, errors: &[PointError], peer: &[PeerGroup]) -> Result<(), Stop> {
    let mut table = Table::new(&[
        "signed error, %",
        "point",
        "TTFT strict",
        "estimate",
        "peer first",
        "TPOT strict",
        "estimate",
        "peer first",
    ]);
    let cell = |value: Option<f64>| value.map_or("refused".to_owned(), |v| format!("{v:+.1}"));
    for error in errors {
        table.row(vec![
            error.case.clone(),
            error.point.map_or(String::new(), |point| point.to_string()),
            cell(error.strict.map(|e| e.0)),
            cell(error.estimate.map(|e| e.0)),
            cell(error.peer_first.map(|e| e.0)),
            cell(error.strict.map(|e| e.1)),
            cell(error.estimate.map(|e| e.1)),
            cell(error.peer_first.map(|e| e.1)),
        ]);
    }
    table.write(out, 0)?;
    for policy in POLICIES {
        let mut table = Table::new(&[
            "absolute error, %",
            "points",
            "TTFT mean",
            "median",
            "p95",
            "peer latest",
            "TPOT mean",
            "median",
            "p95",
            "peer latest",
        ]);
        for (name, members) in groups(errors, policy) {
            let spreads = (
                Spread::of(members.iter().filter_map(|e| Some(e.counted(policy)?.0))),
                Spread::of(members.iter().filter_map(|e| Some(e.counted(policy)?.1))),
            );
            if let (Some(ttft), Some(tpot)) = spreads {
                let peer = peer.iter().find(|group| group.name() == name);
                let peer_cell = |of: fn(&PeerGroup) -> f64| {
                    peer.map_or(String::new(), |group| format!("{:.1}", of(group)))
                };
                table.row(vec![
                    name.clone(),
                    ttft.count.to_string(),
                    format!("{:.1}", ttft.mean),
                    format!("{:.1}", ttft.median),
                    format!("{:.1}", ttft.p95),
                    peer_cell(|group| group.ttft_mape_pct),
                    format!("{:.1}", tpot.mean),
                    format!("{:.1}", tpot.median),
                    format!("{:.1}", tpot.p95),
                    peer_cell(|group| group.tpot_mape_pct),
                ]);
            }
        }
        writeln!(out, "\n{}", bold(policy))?;
        table.write(out, 2)?;
    }
    for (metric, of, why) in METRICS {
        writeln!(out, "\n{}", bold(&format!("worst {metric} (estimate)")))?;
        for error in worst(errors, of) {
            let suspect = error.suspects.as_ref().map_or("refused", |both| why(both));
            let signed = error.estimate.map_or(f64::NAN, of);
            writeln!(out, "  {signed:+.1} %  {}: {suspect}", error.case)?;
        }
    }
    for (metric, of, _) in METRICS {
        let above: Vec<&PointError> = errors
            .iter()
            .filter(|error| error.strict.is_some_and(|e| of(e) > 0.0))
            .collect();
        let count = above.len();
        writeln!(
            out,
            "\n{}",
            bold(&format!(
                "{metric} above silicon under strict: {count} of {}",
                errors.len()
            ))
        )?;
        for (name, members) in by_group(&above) {
            let largest = members
                .iter()
                .filter_map(|error| error.strict.map(of))
                .fold(0.0, f64::max);
            let count = members.len();
            writeln!(out, "  {name}: {count} points, at most {largest:+.1} %")?;
        }
    }
    writeln!(out, "\n{}", bold("peer (AISimulate)"))?;
    let mut table = Table::new(&["absolute error, %", "points", "TTFT mean", "TPOT mean"]);
    let first = (
        Spread::of(errors.iter().filter_map(|e| Some(e.peer_first?.0))),
        Spread::of(errors.iter().filter_map(|e| Some(e.peer_first?.1))),
    );
    if let (Some(ttft), Some(tpot)) = first {
        table.row(vec![
            "these points, first published".to_owned(),
            ttft.count.to_string(),
            format!("{:.1}", ttft.mean),
            format!("{:.1}", tpot.mean),
        ]);
    }
    table.write(out, 2)?;
    Ok(())
}

/// Of an error or a pair of texts: TTFT, then TPOT.
type Errors = (f64, f64, &'static str);
type Of = fn(Errors) -> f64;
type Why = fn(&(String, String)) -> &str;
const METRICS: [(&str, Of, Why); 2] = [
    ("TTFT", |e| e.0, |both| &both.0),
    ("TPOT", |e| e.1, |both| &both.1),
];

/// The points with the largest absolute errors of the estimate; refused ones first.
fn worst(errors: &[PointError], of: Of) -> Vec<&PointError> {
    let size = |error: &PointError| error.estimate.map_or(f64::INFINITY, |e| of(e).abs());
    let mut ranked: Vec<&PointError> = errors.iter().collect();
    ranked.sort_by(|a, b| size(b).total_cmp(&size(a)).then(a.case.cmp(&b.case)));
    ranked.truncate(WORST);
    ranked
}

fn by_group<'a>(errors: &[&'a PointError]) -> BTreeMap<&'a str, Vec<&'a PointError>> {
    let mut groups: BTreeMap<&str, Vec<&PointError>> = BTreeMap::new();
    for error in errors {
        groups.entry(&error.group).or_default().push(error);
    }
    groups
}

/// The peer's groups that hold some of these points.
fn peer_of<'a>(
    errors: &'a [PointError],
    peer: &'a [PeerGroup],
) -> impl Iterator<Item = &'a PeerGroup> {
    peer.iter().filter(|group| {
        let name = group.name();
        errors.iter().any(|error| error.group == name)
    })
}

fn write_json(out: &mut dyn Write, errors: &[PointError], peer: &[PeerGroup]) -> Result<(), Stop> {
    let policy_json = |error: Option<(f64, f64, &str)>| {
        error.map(|(ttft, tpot, host)| {
            json!({ "ttft_err_pct": ttft, "tpot_err_pct": tpot, "host": host })
        })
    };
    let points: Vec<Value> = errors
        .iter()
        .map(|error| {
            json!({
                "suspects": error.suspects.as_ref().map(|(ttft, tpot)| {
                    json!({ "ttft": ttft, "tpot": tpot })
                }),
                "case": error.case,
                "point": error.point,
                "group": error.group,
                "strict": policy_json(error.strict),
                "estimate": policy_json(error.estimate),
                "peer_first": error.peer_first.map(|(ttft, tpot)| {
                    json!({ "ttft_err_pct": ttft, "tpot_err_pct": tpot })
                }),
            })
        })
        .collect();
    let mut summary = serde_json::Map::new();
    for policy in POLICIES {
        let groups: Vec<Value> = groups(errors, policy)
            .into_iter()
            .map(|(name, members)| {
                let spread = |of: &dyn Fn(&PointError) -> Option<f64>| {
                    Spread::of(members.iter().filter_map(|error| of(error))).map(Spread::json)
                };
                json!({
                    "group": name,
                    "ttft": spread(&|error| Some(error.counted(policy)?.0)),
                    "tpot": spread(&|error| Some(error.counted(policy)?.1)),
                    "peer_first_ttft": spread(&|error| Some(error.peer_first?.0)),
                    "peer_first_tpot": spread(&|error| Some(error.peer_first?.1)),
                    "refused": members.iter().filter(|e| e.policy(policy).is_none()).count(),
                })
            })
            .collect();
        summary.insert(policy.to_owned(), Value::Array(groups));
    }
    let latest: Vec<Value> = peer_of(errors, peer)
        .map(|group| {
            json!({
                "group": group.name(),
                "points": group.points,
                "ttft_mape_pct": group.ttft_mape_pct,
                "tpot_mape_pct": group.tpot_mape_pct,
            })
        })
        .collect();
    writeln!(
        out,
        "{}",
        json!({ "points": points, "summary": summary, "peer_latest": latest })
    )?;
    Ok(())
}

/// First published prediction of the peer per point: (TTFT ms, TPOT ms).
fn read_peer_first(file: &Path) -> Result<BTreeMap<u32, (f64, f64)>, InputError> {
    let text = read_text(file, "the points")?;
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let column = |name: &str| {
        head.iter()
            .position(|column| *column == name)
            .ok_or_else(|| {
                InputError::new(
                    file,
                    format!("no column `{name}`"),
                    "restore the file from git",
                )
                .row(1)
            })
    };
    let columns = [
        column("index")?,
        column("peer_original_ttft_ms")?,
        column("peer_original_tpot_ms")?,
    ];
    let mut first = BTreeMap::new();
    for (number, line) in lines.enumerate() {
        let fields: Vec<&str> = line.split(',').collect();
        let value = |at: usize| {
            let value = fields.get(at)?.parse::<f64>().ok()?;
            (value.is_finite() && value > 0.0).then_some(value)
        };
        let index = fields
            .get(columns[0])
            .and_then(|text| text.parse::<u32>().ok());
        let parsed = (index, value(columns[1]), value(columns[2]));
        let (Some(index), Some(ttft), Some(tpot)) = parsed else {
            return Err(InputError::new(
                file,
                "index and the peer's predictions must be numbers greater than zero",
                "restore the file from git",
            )
            .row(number as u64 + 2));
        };
        if first.insert(index, (ttft, tpot)).is_some() {
            return Err(InputError::new(
                file,
                format!("point {index} stands twice"),
                "restore the file from git",
            )
            .row(number as u64 + 2));
        }
    }
    Ok(first)
}

fn read_peer_latest(file: &Path) -> Result<Vec<PeerGroup>, InputError> {
    let text = read_text(file, "the peer's figures")?;
    let peer: PeerFile = serde_yaml::from_str(&text).map_err(|error| {
        let fault = InputError::new(file, error.to_string(), "restore the file from git");
        match error.location() {
            Some(at) => fault.at(at.line(), at.column()),
            None => fault,
        }
    })?;
    Ok(peer.latest)
}
