//! The gate: the working tree against a base revision.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::case::Date;
use crate::timing::InputError;

use super::base::{Base, COMPILER_FILE};
use super::checks::{
    base_ledger, ledger_findings, new_rows, point_findings, row_findings, shard_findings,
    shift_findings,
};
use super::classify::{Class, Classified};
use super::cores::on_every_core;
use super::effects::Effects;
use super::impact::{Prints, Tree, Wanted, changed_judges};
use super::judge::{Job, JudgedCase, Work, base_points};
use super::ledger::{LedgerRow, read_ledger};
use super::named::RowNames;
use super::open::open_regressions;
use super::points::Points;
use super::prove::{Held, prove_data};
use super::shards::Shards;
use super::wider::{WiderBand, wider_bands};

/// The compiler this binary was built with.
pub const COMPILER: &str = env!("STEPGATE_COMPILER");

/// What the gate is asked.
#[derive(Debug)]
pub struct Question<'a> {
    pub root: &'a Path,
    /// The base revision.
    pub rev: &'a str,
    /// Names or folders of cases; empty: all that must run.
    pub cases: &'a [String],
    /// JUnit files of test shards.
    pub results: &'a [PathBuf],
    pub today: Date,
    pub proofs: bool,
}

/// Why there is no verdict.
#[derive(Debug)]
pub enum NoVerdict {
    Input(InputError),
    /// A question that the gate does not take, and why.
    Usage(String),
}

impl From<InputError> for NoVerdict {
    fn from(error: InputError) -> Self {
        Self::Input(error)
    }
}

/// What a finding makes of the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    BadInput,
    Proof,
    CoverageLost,
    Unrecorded,
}

impl Finding {
    pub(super) fn about(self, about: About) -> Self {
        Self { about, ..self }
    }
}

impl Kind {
    pub fn exit_code(self) -> u8 {
        match self {
            Self::BadInput => 5,
            Self::Proof => 4,
            Self::CoverageLost => 3,
            Self::Unrecorded => 1,
        }
    }
}

/// What a finding is about: how a page orders and gathers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum About {
    Project,
    Case,
    /// A metric that is not recorded: it stands among the moves, too.
    Metric,
}

/// One thing that keeps the gate shut.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    pub kind: Kind,
    pub about: About,
    pub what: String,
}

/// What became of one metric, why, and whether the ledger knows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MetricReport {
    #[serde(flatten)]
    pub classified: Classified,
    pub effects: Option<Effects>,
    /// The reason that the ledger gives.
    pub recorded: Option<String>,
}

/// A measured value that changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvidenceReport {
    pub name: String,
    pub before_ms: Option<f64>,
    pub after_ms: Option<f64>,
    pub recorded: Option<String>,
}

/// One case that was judged.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseReport {
    pub case: String,
    pub point: Option<u32>,
    /// Model, system and backend.
    pub group: String,
    pub metrics: Vec<MetricReport>,
    pub evidence: Vec<EvidenceReport>,
    /// The measured run that the case is of, where it was another in the base: before and now.
    pub renamed: Option<(String, String)>,
    /// Why the working tree's golden is not what the prediction says.
    pub not_reproduced: Option<String>,
}

/// A regression that was recorded and is not back.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpenRegression {
    pub case: String,
    pub policy: String,
    pub metric: String,
    pub since: String,
    pub error_before_pct: f64,
    pub error_now_pct: Option<f64>,
    pub reason: String,
}

/// What the proofs found.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ProofReport {
    /// Cases proved.
    pub cases: usize,
    pub failures: Vec<String>,
}

/// The gate's answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Analysis {
    pub base: String,
    pub commit: String,
    /// `None`: the base does not name its compiler.
    pub fingerprint_before: Option<String>,
    pub fingerprint_after: String,
    /// Files that judge (the gate, the tests' harness, CI) and are not the base's: a verdict of
    /// theirs is worth as much as they are.
    pub changed_judges: Vec<String>,
    /// Cases that had to run.
    pub expected: usize,
    pub executed: usize,
    pub untouched: usize,
    /// Changed cases that the names given leave out.
    pub left_out: usize,
    pub counts: BTreeMap<String, usize>,
    pub findings: Vec<Finding>,
    pub cases: Vec<CaseReport>,
    pub open: Vec<OpenRegression>,
    pub wider_bands: Vec<WiderBand>,
    pub proofs: ProofReport,
    pub shards: Option<Shards>,
    /// Ledger rows that the base does not have.
    #[serde(skip)]
    pub new_rows: Vec<LedgerRow>,
}

impl Analysis {
    /// 0 pass, else the code of the worst finding: 5, 4, 3, 1.
    pub fn exit_code(&self) -> u8 {
        let worst = self.findings.iter().map(|finding| finding.kind).min();
        worst.map_or(0, Kind::exit_code)
    }

    /// Everything that needs a row in the ledger, worst class first, then the largest move.
    pub fn outside(&self) -> Vec<(&CaseReport, &MetricReport)> {
        let mut outside: Vec<_> = self
            .cases
            .iter()
            .flat_map(|case| case.metrics.iter().map(move |metric| (case, metric)))
            .filter(|(_, metric)| metric.classified.change.class.wants_record())
            .collect();
        let move_of = |metric: &MetricReport| {
            let change = &metric.classified.change;
            let times = change.before_ms.zip(change.after_ms);
            times.map_or(0.0, |(before, after)| (after / before - 1.0).abs())
        };
        outside.sort_by(|(_, a), (_, b)| {
            let class = a.classified.change.class.cmp(&b.classified.change.class);
            class.then(move_of(b).total_cmp(&move_of(a)))
        });
        outside
    }
}

/// Compares the working tree with the base.
///
/// # Errors
/// No repository or revision, sources that this binary was not built from, data or a ledger that
/// cannot be read; a filter where everything must run.
pub fn analyse(question: &Question<'_>) -> Result<Analysis, NoVerdict> {
    analyse_by(question, &Points::open(question.root, None)?)
}

/// The same by the predictor of `points`: what a test of the gate asks.
///
/// # Errors
/// As [`analyse`].
#[doc(hidden)]
pub fn analyse_by(question: &Question<'_>, points: &Points) -> Result<Analysis, NoVerdict> {
    let base = Base::open(question.root, question.rev)?;
    let prints = Prints::take(question.root, &base)?;
    let ledger = read_ledger(question.root)?;
    let tree = Tree::list(points, &base)?;
    let mut findings = tree.findings();
    let Wanted {
        cases: wanted,
        left_out,
    } = tree.wanted(question, &base, &prints)?;
    let before_ledger = base_ledger(&base)?;
    findings.extend(ledger_findings(question.root, &before_ledger));
    let new_rows = new_rows(&before_ledger, &ledger);

    let work = Work {
        points,
        on_base: base_points(&base, prints.data_differs)?,
        same_data: !prints.data_differs,
        held: match question.proofs {
            true => Some(Held::read(points)?),
            false => None,
        },
    };
    let mut jobs: Vec<Job> = wanted
        .iter()
        .map(|name| Job::new(name, &tree, &base))
        .collect();
    // The largest first: none is left for one core while the others have nothing to do.
    jobs.sort_by_key(|job| Reverse(job.steps()));
    let mut judged = on_every_core(jobs, |job| work.judge(job));
    judged.sort_by(|a, b| a.name.cmp(&b.name));

    let mut proofs = ProofReport::default();
    let mut failures = Vec::new();
    let mut cases = Vec::new();
    for one in &mut judged {
        findings.append(&mut one.findings);
        failures.append(&mut one.failures);
        proofs.cases += usize::from(one.proved);
        if let Some(mut report) = one.report.take() {
            report.look_up(&new_rows, &one.bands);
            findings.extend(report.findings());
            cases.push(report);
        }
    }
    if question.proofs && (prints.differ() || !wanted.is_empty()) {
        failures.extend(prove_data(points, &tree.evidence_cases(points)));
    }
    findings.extend(failures.iter().map(|failure| found(Kind::Proof, failure)));
    proofs.failures = failures.iter().map(ToString::to_string).collect();
    if !wanted.is_empty() {
        findings.extend(point_findings(points, &tree.head));
    }
    findings.extend(each_once(&wanted, &judged));
    findings.extend(row_findings(&cases, &new_rows));
    findings.extend(RowNames::of(question.root, &base)?.findings(&new_rows));
    findings.extend(shift_findings(&cases, &new_rows));
    let (wider_bands, wrong) = wider_bands(&tree, points, &base, &cases, question.today);
    findings.extend(wrong);
    let shards = match question.results {
        [] => None,
        files => Some(Shards::read(files, &tree.head)?),
    };
    findings.extend(shards.iter().flat_map(shard_findings));
    findings.sort();
    findings.dedup();
    let open = open_regressions(&ledger, &cases, points);
    Ok(Analysis {
        base: base.rev().to_owned(),
        commit: base.commit().to_owned(),
        changed_judges: changed_judges(question.root, &base),
        expected: wanted.len(),
        executed: judged.len(),
        untouched: tree
            .head
            .iter()
            .filter(|name| !wanted.contains(*name) && !left_out.contains(*name))
            .count(),
        left_out: left_out.len(),
        fingerprint_before: prints.before,
        fingerprint_after: prints.after,
        counts: counts(&cases),
        findings,
        cases,
        open,
        wider_bands,
        proofs,
        shards,
        new_rows: new_rows.into_iter().cloned().collect(),
    })
}

pub(super) fn found(kind: Kind, what: impl ToString) -> Finding {
    Finding {
        kind,
        about: About::Project,
        what: what.to_string(),
    }
}

/// Every case that had to run did, once.
fn each_once(wanted: &BTreeSet<String>, judged: &[JudgedCase]) -> Vec<Finding> {
    let mut runs: BTreeMap<&str, usize> = BTreeMap::new();
    for one in judged {
        *runs.entry(&one.name).or_insert(0) += 1;
    }
    let wrong = wanted
        .iter()
        .filter(|name| runs.get(name.as_str()) != Some(&1));
    wrong
        .map(|name| found(Kind::Unrecorded, format!("{name} was not run exactly once")))
        .collect()
}

fn counts(cases: &[CaseReport]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let mut count = |class: Class| *counts.entry(class.name().to_owned()).or_insert(0) += 1;
    for case in cases {
        case.metrics
            .iter()
            .for_each(|one| count(one.classified.change.class));
        case.evidence.iter().for_each(|_| count(Class::Evidence));
    }
    counts
}

/// The file that names the compiler, below a project folder.
pub fn compiler_file(root: &Path) -> PathBuf {
    root.join(COMPILER_FILE)
}
