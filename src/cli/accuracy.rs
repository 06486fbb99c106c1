//! `stepgate accuracy`: errors against silicon, beside the peer's.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::gate::{Points, Predicted, error_pct};
use crate::replay::Outcome;
use crate::timing::{InputError, read_text};

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

/// Signed errors of one point, in percent; `None` where it was refused.
struct PointError {
    case: String,
    point: Option<u32>,
    group: String,
    /// Per policy: (TTFT, TPOT, host class).
    strict: Option<(f64, f64, &'static str)>,
    estimate: Option<(f64, f64, &'static str)>,
    peer_first: Option<(f64, f64)>,
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
        "peer",
        "TPOT strict",
        "estimate",
        "peer",
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
            "TPOT mean",
            "median",
            "p95",
        ]);
        for (name, members) in groups(errors, policy) {
            let spreads = (
                Spread::of(members.iter().filter_map(|e| Some(e.counted(policy)?.0))),
                Spread::of(members.iter().filter_map(|e| Some(e.counted(policy)?.1))),
            );
            if let (Some(ttft), Some(tpot)) = spreads {
                table.row(vec![
                    name,
                    ttft.count.to_string(),
                    format!("{:.1}", ttft.mean),
                    format!("{:.1}", ttft.median),
                    format!("{:.1}", ttft.p95),
                    format!("{:.1}", tpot.mean),
                    format!("{:.1}", tpot.median),
                    format!("{:.1}", tpot.p95),
                ]);
            }
        }
        writeln!(out, "\n{}", bold(policy))?;
        table.write(out, 2)?;
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
    for group in peer_of(errors, peer) {
        table.row(vec![
            format!("{} {} {}, latest", group.model, group.system, group.backend),
            group.points.to_string(),
            format!("{:.1}", group.ttft_mape_pct),
            format!("{:.1}", group.tpot_mape_pct),
        ]);
    }
    table.write(out, 2)?;
    Ok(())
}

/// The peer's groups that hold some of these points.
fn peer_of<'a>(
    errors: &'a [PointError],
    peer: &'a [PeerGroup],
) -> impl Iterator<Item = &'a PeerGroup> {
    peer.iter().filter(|group| {
        let name = format!("{} {} {}", group.model, group.system, group.backend);
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
                "group": format!("{} {} {}", group.model, group.system, group.backend),
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
