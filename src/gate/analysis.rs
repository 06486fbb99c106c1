//! The gate: the working tree against a base revision.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::TempDir;
use walkdir::WalkDir;

use crate::case::{CaseFile, Date};
use crate::replay::Outcome;
use crate::timing::{InputError, Policy};

use super::band::Bands;
use super::base::{Base, COMPILER_FILE};
use super::classify::{Class, Classified, band_of, classify};
use super::cores::on_every_core;
use super::effects::Effects;
use super::fingerprint::{DATA, Files, code_of, fingerprint};
use super::golden::render;
use super::ledger::{EVIDENCE, LEDGER, LedgerFile, LedgerRow, read_ledger};
use super::parsed::{Golden, Judged};
use super::points::{Points, Predicted, bands_of};
use super::proof::ProofFailure;
use super::prove::{prove, prove_data};
use super::shards::Shards;
use super::uniform::{Move, uniform};

/// How far |error| may stay above its value before a regression and count as back.
const BACK_PCT: f64 = 0.1;

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

/// One thing that keeps the gate shut.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    pub kind: Kind,
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
    /// Cases that had to run.
    pub expected: usize,
    pub executed: usize,
    pub untouched: usize,
    pub counts: BTreeMap<String, usize>,
    pub findings: Vec<Finding>,
    pub cases: Vec<CaseReport>,
    pub open: Vec<OpenRegression>,
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

    /// Everything that needs a row in the ledger, worst class first.
    pub fn outside(&self) -> Vec<(&CaseReport, &MetricReport)> {
        let mut outside: Vec<_> = self
            .cases
            .iter()
            .flat_map(|case| case.metrics.iter().map(move |metric| (case, metric)))
            .filter(|(_, metric)| metric.classified.change.class.wants_record())
            .collect();
        outside.sort_by_key(|(_, metric)| metric.classified.change.class);
        outside
    }
}

/// Compares the working tree with the base.
///
/// # Errors
/// No repository or revision, sources that this binary was not built from, data or a ledger that
/// cannot be read; a filter where everything must run.
pub fn analyse(question: &Question<'_>) -> Result<Analysis, NoVerdict> {
    let base = Base::open(question.root, question.rev)?;
    let points = Points::open(question.root, None)?;
    let prints = Prints::take(question.root, &base)?;
    let ledger = read_ledger(question.root)?;
    let tree = Tree::list(&points, &base)?;
    let mut findings = tree.findings();
    let wanted = tree.wanted(question, &base, &prints)?;
    let before_ledger = base_ledger(&base)?;
    findings.extend(ledger_findings(question.root, &before_ledger));
    let new_rows = new_rows(&before_ledger, &ledger);

    let work = Work {
        points: &points,
        on_base: base_points(&base, prints.data_differs)?,
        same_data: !prints.data_differs,
        proofs: question.proofs,
    };
    let jobs = wanted
        .iter()
        .map(|name| Job::new(name, &tree, &base))
        .collect();
    let mut judged = on_every_core(jobs, |job| work.judge(job));

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
        failures.extend(prove_data(&points, &tree.evidence_cases(&points)));
    }
    findings.extend(failures.iter().map(|failure| found(Kind::Proof, failure)));
    proofs.failures = failures.iter().map(ToString::to_string).collect();
    findings.extend(each_once(&wanted, &judged));
    findings.extend(shift_findings(&cases, &new_rows));
    findings.extend(expired(&tree, &points, question.today));
    let shards = match question.results {
        [] => None,
        files => Some(Shards::read(files, &tree.head)?),
    };
    findings.extend(shards.iter().flat_map(shard_findings));
    findings.sort();
    findings.dedup();
    let open = open_regressions(&ledger, &cases, &points);
    Ok(Analysis {
        base: base.rev().to_owned(),
        commit: base.commit().to_owned(),
        expected: wanted.len(),
        executed: judged.len(),
        untouched: tree
            .head
            .iter()
            .filter(|name| !wanted.contains(*name))
            .count(),
        fingerprint_before: prints.before,
        fingerprint_after: prints.after,
        counts: counts(&cases),
        findings,
        cases,
        open,
        proofs,
        shards,
        new_rows: new_rows.into_iter().cloned().collect(),
    })
}

fn found(kind: Kind, what: impl ToString) -> Finding {
    Finding {
        kind,
        what: what.to_string(),
    }
}

/// The two fingerprints.
struct Prints {
    before: Option<String>,
    after: String,
    data_differs: bool,
}

impl Prints {
    fn take(root: &Path, base: &Base) -> Result<Self, InputError> {
        let unreadable = |error: std::io::Error| {
            let what = format!("cannot read the sources and data: {error}");
            InputError::new(root, what, "check the folder and its permissions")
        };
        let code = code_of(root).map_err(unreadable)?;
        if code != env!("STEPGATE_CODE") {
            return Err(InputError::new(
                root,
                "this binary was built from other sources than the folder holds now",
                "rebuild it: `cargo run --release -- gate ...`",
            ));
        }
        let mut files = Files::default();
        files.walk(root, DATA).map_err(unreadable)?;
        let data = files.digest();
        Ok(Self {
            before: base.fingerprint()?,
            after: fingerprint(&code, &data, COMPILER),
            data_differs: base.digest(&[DATA])? != data,
        })
    }

    fn differ(&self) -> bool {
        self.before.as_ref() != Some(&self.after)
    }
}

/// Names of cases and goldens on both sides.
struct Tree {
    head: Vec<String>,
    goldens: BTreeSet<String>,
    base: BTreeSet<String>,
}

impl Tree {
    fn list(points: &Points, base: &Base) -> Result<Self, InputError> {
        let bare = |path: &str, folder: &str, ending: &str| {
            let inner = path.strip_prefix(folder)?.strip_suffix(ending)?;
            Some(inner.to_owned())
        };
        let cases = base.under("cases", ".yaml");
        Ok(Self {
            head: points.names()?,
            goldens: goldens_of(points.root()),
            base: cases
                .filter_map(|path| bare(path, "cases/", ".yaml"))
                .collect(),
        })
    }

    fn has(&self, name: &str) -> bool {
        self.head
            .binary_search_by(|known| known.as_str().cmp(name))
            .is_ok()
    }

    fn findings(&self) -> Vec<Finding> {
        let stale = self
            .goldens
            .iter()
            .filter(|name| !self.has(name))
            .map(|name| {
                format!(
                    "goldens/{name}.snap: a golden without a case; delete it, or restore the case"
                )
            });
        let bare = self.head.iter().filter(|name| !self.goldens.contains(*name)).map(|name| {
            format!("cases/{name}.yaml: a case without a golden; accept one with `cargo insta review`")
        });
        stale
            .chain(bare)
            .map(|what| found(Kind::Unrecorded, what))
            .collect()
    }

    /// The cases that must run: all of them, or those whose files changed.
    fn wanted(
        &self,
        question: &Question<'_>,
        base: &Base,
        prints: &Prints,
    ) -> Result<BTreeSet<String>, NoVerdict> {
        let all = || self.head.iter().chain(&self.base);
        if prints.differ() {
            if !question.cases.is_empty() {
                return Err(NoVerdict::Usage(
                    "the timing fingerprint differs from the base's, so every case must run: \
                     leave the case names out"
                        .to_owned(),
                ));
            }
            return Ok(all().cloned().collect());
        }
        let changed = |name: &&String| {
            !base.holds(&format!("cases/{name}.yaml"))
                || !base.holds(&format!("goldens/{name}.snap"))
        };
        let changed = all().filter(changed);
        if question.cases.is_empty() {
            return Ok(changed.cloned().collect());
        }
        let asked = |name: &&String| {
            question.cases.iter().any(|asked| {
                let rest = name.strip_prefix(asked.trim_end_matches('/'));
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        };
        if !all().any(|name| asked(&name)) {
            return Err(NoVerdict::Usage(
                "no case has one of these names".to_owned(),
            ));
        }
        Ok(changed.filter(asked).cloned().collect())
    }

    /// Op and step cases, whose measured values name their cells.
    fn evidence_cases(&self, points: &Points) -> Vec<CaseFile> {
        let named = self
            .head
            .iter()
            .filter(|name| name.starts_with("ops/") || name.starts_with("steps/"));
        named.filter_map(|name| points.case(name).ok()).collect()
    }
}

fn goldens_of(root: &Path) -> BTreeSet<String> {
    let folder = root.join("goldens");
    let ledger = root.join(LEDGER);
    WalkDir::new(&folder)
        .into_iter()
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_file() && !entry.path().starts_with(&ledger))
        .filter_map(|entry| {
            let inner = entry.path().strip_prefix(&folder).ok()?;
            let inner = inner.to_string_lossy().replace('\\', "/");
            Some(inner.strip_suffix(".snap")?.to_owned())
        })
        .collect()
}

/// This code's view of the base's data.
enum OnBase {
    Same,
    Points(
        Box<Points>,
        #[expect(dead_code, reason = "the folder lives as long")] TempDir,
    ),
    /// The base's data cannot be read by this code.
    Unreadable,
}

fn base_points(base: &Base, differs: bool) -> Result<OnBase, InputError> {
    if !differs {
        return Ok(OnBase::Same);
    }
    let folder = TempDir::new().map_err(|error| {
        let what = format!("cannot make a temporary folder: {error}");
        InputError::new(std::env::temp_dir(), what, "set TMPDIR to another folder")
    })?;
    base.extract(DATA, folder.path())?;
    // Points wants a folder of cases; none is read from it.
    let made = fs::create_dir_all(folder.path().join("cases"));
    let opened = made
        .ok()
        .and_then(|()| Points::open(folder.path(), None).ok());
    Ok(opened.map_or(OnBase::Unreadable, |points| {
        OnBase::Points(Box::new(points), folder)
    }))
}

/// One case to judge.
struct Job {
    name: String,
    in_head: bool,
    /// Golden and bands of the base; `None`: a new case.
    before: Result<Option<(Golden, Bands)>, InputError>,
}

impl Job {
    fn new(name: &str, tree: &Tree, base: &Base) -> Self {
        Self {
            name: name.to_owned(),
            in_head: tree.has(name),
            before: Self::before(name, base),
        }
    }

    fn before(name: &str, base: &Base) -> Result<Option<(Golden, Bands)>, InputError> {
        let path = format!("goldens/{name}.snap");
        let Some(text) = base.text(&path)? else {
            return Ok(None);
        };
        let golden = Golden::of_snapshot(&text, &base.shown(&path))?;
        // A band that this change widens counts from the next change on.
        let path = format!("cases/{name}.yaml");
        let bands = match base.bytes(&path)? {
            Some(bytes) => CaseFile::from_bytes(base.shown(&path), bytes).ok(),
            None => None,
        };
        Ok(Some((
            golden,
            bands.map_or_else(Bands::default, |case| bands_of(&case)),
        )))
    }
}

/// What judging one case came to.
struct JudgedCase {
    name: String,
    report: Option<CaseReport>,
    bands: Bands,
    findings: Vec<Finding>,
    failures: Vec<ProofFailure>,
    proved: bool,
}

/// What every job needs.
struct Work<'a> {
    points: &'a Points,
    on_base: OnBase,
    same_data: bool,
    proofs: bool,
}

impl Work<'_> {
    fn judge(&self, job: Job) -> JudgedCase {
        let mut judged = JudgedCase {
            name: job.name.clone(),
            report: None,
            bands: Bands::default(),
            findings: Vec::new(),
            failures: Vec::new(),
            proved: false,
        };
        if let Err(error) = self.try_judge(job, &mut judged) {
            judged.findings.push(found(Kind::BadInput, error));
        }
        judged
    }

    fn try_judge(&self, job: Job, judged: &mut JudgedCase) -> Result<(), InputError> {
        let before = job.before?;
        let (before, bands) = before.map_or((None, Bands::default()), |(golden, bands)| {
            (Some(golden), bands)
        });
        judged.bands = bands;
        if !job.in_head {
            judged.report = Some(removed(&job.name, before.as_ref(), &bands));
            return Ok(());
        }
        let case = self.points.case(&job.name)?;
        let group = group_of(&case);
        let point = point_of(&case);
        let own_bands = bands_of(&case);
        let predicted = self.points.predict(case)?;
        let place = self.points.golden_path(&job.name);
        let fresh = Golden::of_text(&render(&predicted), &place)?;
        let classified = classify(before.as_ref(), Some(&fresh), &bands);
        judged.report = Some(CaseReport {
            not_reproduced: self.not_reproduced(&place, &fresh, &own_bands)?,
            evidence: evidence(before.as_ref(), &fresh),
            metrics: self.with_effects(classified, &predicted)?,
            case: job.name,
            point,
            group,
        });
        if self.proofs {
            judged.failures = prove(self.points, &judged.name, &predicted)?;
            judged.proved = true;
        }
        Ok(())
    }

    /// What the working tree's golden has that a fresh prediction has not.
    fn not_reproduced(
        &self,
        file: &Path,
        fresh: &Golden,
        bands: &Bands,
    ) -> Result<Option<String>, InputError> {
        let Ok(text) = fs::read_to_string(file) else {
            // Reported as a case without a golden.
            return Ok(None);
        };
        let golden = Golden::of_snapshot(&text, file)?;
        let breaches = golden.compare(fresh, bands).breaches;
        Ok(breaches.first().map(|first| {
            let more = breaches.len() - 1;
            let (path, before, after) = (&first.path, &first.before, &first.after);
            format!("{path} says {before}, predicted is {after} (and {more} more)")
        }))
    }

    fn with_effects(
        &self,
        classified: Vec<Classified>,
        predicted: &Predicted,
    ) -> Result<Vec<MetricReport>, InputError> {
        let moved = |one: &Classified| {
            let change = &one.change;
            change.class.wants_record() && change.before_ms.is_some() && change.after_ms.is_some()
        };
        let on_base = match &self.on_base {
            OnBase::Points(points, _) if classified.iter().any(moved) => {
                points.predict(case_of(predicted)).ok()
            }
            _ => None,
        };
        let read = |one: &Predicted| Golden::of_text(&render(one), Path::new("the base's data"));
        let on_base_golden = on_base.as_ref().map(read).transpose()?;
        let report = |classified: Classified| {
            let effects = moved(&classified).then(|| {
                self.effects(
                    &classified,
                    predicted,
                    on_base.as_ref(),
                    on_base_golden.as_ref(),
                )
            });
            MetricReport {
                effects: effects.flatten(),
                recorded: None,
                classified,
            }
        };
        Ok(classified.into_iter().map(report).collect())
    }

    fn effects(
        &self,
        classified: &Classified,
        fresh: &Predicted,
        on_base: Option<&Predicted>,
        on_base_golden: Option<&Golden>,
    ) -> Option<Effects> {
        let (policy, metric) = (classified.policy, classified.metric);
        let before_ms = classified.change.before_ms?;
        let after_ms = classified.change.after_ms?;
        if self.same_data {
            return Some(Effects::of(before_ms, after_ms, after_ms));
        }
        let on_base_ms = on_base_golden?.ms(policy, metric)?;
        let effects = Effects::of(before_ms, on_base_ms, after_ms);
        match (outcome(on_base?, policy), outcome(fresh, policy)) {
            (Some(Outcome::Predicted(old)), Some(Outcome::Predicted(new))) => {
                Some(effects.with_rows(metric, old, new))
            }
            // Ops and steps have no scheduler: what the code did not do, the rows did.
            _ => Some(Effects {
                row_ms: effects.schedule_ms,
                schedule_ms: 0.0,
                ..effects
            }),
        }
    }
}

fn outcome(predicted: &Predicted, policy: Policy) -> Option<&Outcome> {
    match (predicted, policy) {
        (Predicted::Serving { strict, .. }, Policy::Strict) => Some(strict),
        (Predicted::Serving { estimate, .. }, Policy::Estimate) => Some(estimate),
        _ => None,
    }
}

fn case_of(predicted: &Predicted) -> CaseFile {
    match predicted {
        Predicted::Serving { case, .. } => CaseFile::Serving((**case).clone()),
        Predicted::Op { case, .. } => CaseFile::Op((**case).clone()),
        Predicted::Step { case, .. } => CaseFile::Step((**case).clone()),
    }
}

fn group_of(case: &CaseFile) -> String {
    let deployment = case.deployment();
    let backend = deployment.backend.name.as_str();
    format!("{}/{}/{backend}", deployment.model, deployment.system)
}

fn point_of(case: &CaseFile) -> Option<u32> {
    match case {
        CaseFile::Serving(case) => case.point,
        CaseFile::Op(_) | CaseFile::Step(_) => None,
    }
}

fn removed(name: &str, before: Option<&Golden>, bands: &Bands) -> CaseReport {
    let metrics = classify(before, None, bands).into_iter();
    CaseReport {
        case: name.to_owned(),
        point: None,
        group: String::new(),
        metrics: metrics
            .map(|classified| MetricReport {
                classified,
                effects: None,
                recorded: None,
            })
            .collect(),
        evidence: Vec::new(),
        not_reproduced: None,
    }
}

/// Measured values that are not the base's.
fn evidence(before: Option<&Golden>, after: &Golden) -> Vec<EvidenceReport> {
    let Some(before) = before else {
        return Vec::new();
    };
    let (old, new) = (before.evidence(), after.evidence());
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    names
        .into_iter()
        .filter(|name| old.get(*name) != new.get(*name))
        .map(|name| EvidenceReport {
            name: name.clone(),
            before_ms: old.get(name).copied(),
            after_ms: new.get(name).copied(),
            recorded: None,
        })
        .collect()
}

impl CaseReport {
    /// Fills in what the ledger's new rows say of this case.
    fn look_up(&mut self, rows: &[&LedgerRow], bands: &Bands) {
        for one in &mut self.metrics {
            let Classified {
                policy,
                metric,
                change,
            } = &one.classified;
            let ours = rows
                .iter()
                .filter(|row| row.is_of(&self.case, policy.name(), metric.name()));
            let ours: Vec<&LedgerRow> = ours.copied().collect();
            let agree = |a: Option<f64>, b: Option<f64>| match (a, b) {
                (Some(a), Some(b)) => band_of(*metric, bands).holds(a, b),
                (a, b) => a == b,
            };
            one.recorded = covers(&ours, change.before_ms, change.after_ms, agree);
        }
        for one in &mut self.evidence {
            let name = format!("{EVIDENCE}{}", one.name);
            let ours = rows.iter().filter(|row| row.is_of(&self.case, "-", &name));
            let ours: Vec<&LedgerRow> = ours.copied().collect();
            one.recorded = covers(&ours, one.before_ms, one.after_ms, |a, b| a == b);
        }
    }

    fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let name = &self.case;
        if let Some(what) = &self.not_reproduced {
            let what = format!("{name}: the golden is not reproduced: {what}");
            findings.push(found(Kind::Unrecorded, what));
        }
        for one in self.metrics.iter().filter(|one| one.recorded.is_none()) {
            let Classified {
                policy,
                metric,
                change,
            } = &one.classified;
            let class = change.class;
            if !class.wants_record() {
                continue;
            }
            let kind = if class.loses_coverage() {
                Kind::CoverageLost
            } else {
                Kind::Unrecorded
            };
            let (class, policy, metric) = (class.name(), policy.name(), metric.name());
            let what =
                format!("{name}: {class} of {policy} {metric} is not recorded in the ledger");
            findings.push(found(kind, what));
        }
        for one in self.evidence.iter().filter(|one| one.recorded.is_none()) {
            let value = |ms: Option<f64>| ms.map_or("nothing".to_owned(), |ms| ms.to_string());
            let (before, after) = (value(one.before_ms), value(one.after_ms));
            let what = format!(
                "{name}: the measured value `{}` changed from {before} to {after} and is not \
                 recorded in the ledger",
                one.name
            );
            findings.push(found(Kind::Unrecorded, what));
        }
        findings
    }
}

/// The reason of the rows that lead from `before` to `after`, one after another.
fn covers(
    rows: &[&LedgerRow],
    before: Option<f64>,
    after: Option<f64>,
    agree: impl Fn(Option<f64>, Option<f64>) -> bool,
) -> Option<String> {
    let (first, last) = (rows.first()?, rows.last()?);
    let linked = rows
        .windows(2)
        .all(|pair| agree(pair[0].after_ms, pair[1].before_ms));
    let holds = linked && agree(before, first.before_ms) && agree(last.after_ms, after);
    holds.then(|| last.reason.clone())
}

fn base_ledger(base: &Base) -> Result<Vec<LedgerFile>, InputError> {
    let paths: Vec<String> = base.under(LEDGER, ".jsonl").map(str::to_owned).collect();
    let mut files = Vec::new();
    for path in paths {
        if let Some(text) = base.text(&path)? {
            files.push(LedgerFile::parse(&path, text, &base.shown(&path))?);
        }
    }
    Ok(files)
}

/// Lines of the base's ledger that the working tree does not have as they were.
fn ledger_findings(root: &Path, before: &[LedgerFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in before {
        let path = &file.path;
        let what = match fs::read_to_string(root.join(path)) {
            Err(_) => format!("{path}:1: a ledger file of the base is gone; restore it"),
            Ok(now) => match file.first_changed_line(&now) {
                Some(line) => {
                    format!("{path}:{line}: a ledger line of the base was changed or deleted")
                }
                None => continue,
            },
        };
        findings.push(found(Kind::Unrecorded, what));
    }
    findings
}

/// Rows that this change adds.
fn new_rows<'a>(before: &[LedgerFile], now: &'a [LedgerFile]) -> Vec<&'a LedgerRow> {
    now.iter()
        .flat_map(|file| {
            let known = before.iter().find(|old| old.path == file.path);
            file.rows.iter().skip(known.map_or(0, |old| old.rows.len()))
        })
        .collect()
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

/// Groups whose moves agree, without rows that name the mechanism.
fn shift_findings(cases: &[CaseReport], rows: &[&LedgerRow]) -> Vec<Finding> {
    let mut groups: BTreeMap<(&str, Policy, Judged), Vec<Move>> = BTreeMap::new();
    for case in cases {
        for one in &case.metrics {
            let Classified {
                policy,
                metric,
                change,
            } = &one.classified;
            if let (true, Some(before_ms), Some(after_ms)) = (
                change.class.wants_record(),
                change.before_ms,
                change.after_ms,
            ) {
                groups
                    .entry((&case.group, *policy, *metric))
                    .or_default()
                    .push(Move {
                        case: case.case.clone(),
                        before_ms,
                        after_ms,
                    });
            }
        }
    }
    let mut findings = Vec::new();
    for ((group, policy, metric), moves) in groups {
        let Some(shift) = uniform(&moves) else {
            continue;
        };
        let (policy, metric) = (policy.name(), metric.name());
        let named = |case: &String| {
            rows.iter()
                .any(|row| row.is_of(case, policy, metric) && row.names_mechanism())
        };
        if shift.cases.iter().all(named) {
            continue;
        }
        findings.push(found(
            Kind::Unrecorded,
            format!(
                "{group}: uniform shift of {policy} {metric} in {} points, {}: record it with \
                 --mechanism and --rows, or find the offset",
                shift.cases.len(),
                shift.by
            ),
        ));
    }
    findings
}

/// Tolerances past their date.
fn expired(tree: &Tree, points: &Points, today: Date) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in &tree.head {
        let inner = format!("cases/{name}.yaml");
        // Few cases have one; the others need no reading.
        let text = fs::read_to_string(points.root().join(&inner)).unwrap_or_default();
        if !text.contains("tolerance") {
            continue;
        }
        match points.case(name) {
            Ok(CaseFile::Serving(case)) => {
                let tolerance = case.tolerance.iter().filter(|one| one.expires < today);
                findings.extend(tolerance.map(|one| {
                    let what = format!(
                        "{inner}: its wider band expired on {}; delete `tolerance`, or give a new \
                         reason and date",
                        one.expires
                    );
                    found(Kind::Unrecorded, what)
                }));
            }
            Ok(_) => {}
            Err(error) => findings.push(found(Kind::BadInput, error)),
        }
    }
    findings
}

fn shard_findings(shards: &Shards) -> Vec<Finding> {
    let lists = [
        ("was run by no shard", &shards.missing),
        ("was run more than once", &shards.twice),
        ("was run and is no case", &shards.unknown),
        ("failed in its shard", &shards.failed),
    ];
    lists
        .into_iter()
        .flat_map(|(what, names)| {
            let say = move |name: &String| found(Kind::Unrecorded, format!("{name} {what}"));
            names.iter().map(say)
        })
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

/// Recorded regressions whose |error| is not back.
fn open_regressions(
    ledger: &[LedgerFile],
    cases: &[CaseReport],
    points: &Points,
) -> Vec<OpenRegression> {
    let mut open: BTreeMap<(&str, &str, &str), &LedgerRow> = BTreeMap::new();
    for row in ledger.iter().flat_map(|file| &file.rows) {
        let key = (row.case.as_str(), row.policy.as_str(), row.metric.as_str());
        let since = open.get(&key).copied();
        if since.is_some_and(|since| is_back(since, row.error_after_pct)) {
            open.remove(&key);
        } else if row.class == Class::Regression && since.is_none() {
            open.insert(key, row);
        }
    }
    let mut found = Vec::new();
    for (_, row) in open {
        let now = error_now(row, cases, points);
        if is_back(row, now) {
            continue;
        }
        found.push(OpenRegression {
            case: row.case.clone(),
            policy: row.policy.clone(),
            metric: row.metric.clone(),
            since: row.date.clone(),
            error_before_pct: row.error_before_pct.unwrap_or(0.0),
            error_now_pct: now,
            reason: row.reason.clone(),
        });
    }
    found
}

fn is_back(since: &LedgerRow, error_pct: Option<f64>) -> bool {
    let was = since.error_before_pct.map_or(0.0, f64::abs);
    error_pct.is_some_and(|now| now.abs() <= was + BACK_PCT)
}

/// The error as predicted now, or as the golden of an untouched case says.
fn error_now(row: &LedgerRow, cases: &[CaseReport], points: &Points) -> Option<f64> {
    let policy = Policy::ALL
        .into_iter()
        .find(|one| one.name() == row.policy)?;
    let metric = Judged::of_name(&row.metric)?;
    if let Some(case) = cases.iter().find(|case| case.case == row.case) {
        let is_it = |one: &&MetricReport| {
            one.classified.policy == policy && one.classified.metric == metric
        };
        return case
            .metrics
            .iter()
            .find(is_it)?
            .classified
            .change
            .error_after_pct;
    }
    let file = points.golden_path(&row.case);
    let text = fs::read_to_string(&file).ok()?;
    let golden = Golden::of_snapshot(&text, &file).ok()?;
    let (ms, silicon_ms) = (golden.ms(policy, metric)?, golden.silicon_ms(metric)?);
    Some(super::golden::error_pct(ms, silicon_ms))
}

/// The file that names the compiler, below a project folder.
pub fn compiler_file(root: &Path) -> PathBuf {
    root.join(COMPILER_FILE)
}
