//! Judging one case: predicted anew, compared with the base, its moves explained and its proofs made.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::case::CaseFile;
use crate::replay::Outcome;
use crate::timing::{InputError, Policy, read_text};

use super::analysis::{CaseReport, EvidenceReport, Finding, Kind, MetricReport, found};
use super::band::Bands;
use super::base::Base;
use super::classify::{Classified, classify, mark_reblessed};
use super::effects::{Effects, Pair};
use super::fingerprint::DATA;
use super::golden::render;
use super::impact::Tree;
use super::parsed::Golden;
use super::points::{Points, Predicted, bands_of};
use super::proof::{Proof, ProofFailure};
use super::prove::{Held, prove};

/// This code's view of the base's data.
pub(super) enum OnBase {
    Same,
    Points(
        Box<Points>,
        #[expect(dead_code, reason = "the folder lives as long")] TempDir,
    ),
    /// The base's data cannot be read by this code.
    Unreadable,
}

pub(super) fn base_points(base: &Base, differs: bool) -> Result<OnBase, InputError> {
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

/// What the base has of a case.
struct Before {
    golden: Golden,
    /// A band that this change widens counts from the next change on.
    bands: Bands,
    label: Option<String>,
}

/// One case to judge.
pub(super) struct Job {
    name: String,
    in_head: bool,
    /// What the base has; `None`: a new case.
    before: Result<Option<Before>, InputError>,
}

impl Job {
    pub fn new(name: &str, tree: &Tree, base: &Base) -> Self {
        Self {
            name: name.to_owned(),
            in_head: tree.has(name),
            before: Self::before(name, base),
        }
    }

    /// How large it is: the steps that the base's golden counts. Of a new case nothing is known.
    pub fn steps(&self) -> u64 {
        match &self.before {
            Ok(Some(before)) => before.golden.steps(),
            Ok(None) => u64::MAX,
            Err(_) => 0,
        }
    }

    fn before(name: &str, base: &Base) -> Result<Option<Before>, InputError> {
        let path = format!("goldens/{name}.snap");
        let Some(text) = base.text(&path)? else {
            return Ok(None);
        };
        let golden = Golden::of_snapshot(&text, &base.shown(&path))?;
        let path = format!("cases/{name}.yaml");
        let case = match base.bytes(&path)? {
            Some(bytes) => CaseFile::from_bytes(base.shown(&path), bytes).ok(),
            None => None,
        };
        Ok(Some(Before {
            golden,
            bands: case.as_ref().map_or_else(Bands::default, bands_of),
            label: case.as_ref().and_then(label_of),
        }))
    }
}

/// The working tree's golden of a case; `None`, reported elsewhere, where there is none.
fn golden_of(file: &Path) -> Result<Option<Golden>, InputError> {
    if !file.is_file() {
        return Ok(None);
    }
    Golden::of_snapshot(&read_text(file, "the golden")?, file).map(Some)
}

/// What the working tree's golden has that a fresh prediction has not.
fn not_reproduced(golden: &Golden, fresh: &Golden, bands: &Bands) -> Option<String> {
    let breaches = golden.compare(fresh, bands).breaches;
    breaches.first().map(|first| {
        let more = breaches.len() - 1;
        let (path, before, after) = (&first.path, &first.before, &first.after);
        format!("{path} says {before}, predicted is {after} (and {more} more)")
    })
}

/// What judging one case came to.
pub(super) struct JudgedCase {
    pub name: String,
    pub report: Option<CaseReport>,
    pub bands: Bands,
    pub findings: Vec<Finding>,
    pub failures: Vec<ProofFailure>,
    pub proved: bool,
}

/// What every job needs.
pub(super) struct Work<'a> {
    pub points: &'a Points,
    pub on_base: OnBase,
    pub same_data: bool,
    /// `None`: nothing is proved.
    pub held: Option<Held>,
}

impl Work<'_> {
    pub fn judge(&self, job: Job) -> JudgedCase {
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
        let label = before.as_ref().and_then(|before| before.label.clone());
        let (before, bands) = before.map_or((None, Bands::default()), |before| {
            (Some(before.golden), before.bands)
        });
        judged.bands = bands;
        if !job.in_head {
            judged.report = Some(removed(&job.name, before.as_ref(), &bands));
            return Ok(());
        }
        let case = self.points.case(&job.name)?;
        let group = group_of(&case);
        let point = point_of(&case);
        let now = label_of(&case);
        let renamed = label.zip(now).filter(|(before, now)| before != now);
        let predicted = self.points.predict(case)?;
        if let Some(held) = &self.held {
            judged.failures = prove(self.points, held, &job.name, &predicted);
            judged.proved = true;
        }
        let place = self.points.golden_path(&job.name);
        let fresh = match Golden::of_text(&render(&predicted), &place) {
            Ok(fresh) => fresh,
            Err(error) => {
                // A NaN or an infinity has no golden and is in no band.
                let failure = ProofFailure::new(Proof::Finite, &job.name, error.what);
                judged.failures.push(failure);
                return Ok(());
            }
        };
        let golden = golden_of(&place)?;
        let mut classified = classify(before.as_ref(), Some(&fresh), &bands);
        if let (Some(before), Some(golden)) = (&before, &golden) {
            mark_reblessed(&mut classified, before, golden);
        }
        // A golden that was taken anew is the prediction, or it was written by hand.
        let golden_bands = match before == golden {
            true => bands,
            false => Bands::EXACT,
        };
        let unlike = |golden: &Golden| not_reproduced(golden, &fresh, &golden_bands);
        judged.report = Some(CaseReport {
            not_reproduced: golden.as_ref().and_then(unlike),
            evidence: evidence(before.as_ref(), &fresh),
            metrics: self.with_effects(classified, &predicted)?,
            case: job.name,
            point,
            group,
            renamed,
        });
        Ok(())
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
        let pairs = Policy::ALL.map(|policy| {
            let needed = |one: &Classified| one.policy == policy && moved(one);
            let on_base = on_base.as_ref().filter(|_| classified.iter().any(needed))?;
            match (outcome(on_base, policy)?, outcome(predicted, policy)?) {
                (Outcome::Predicted(old), Outcome::Predicted(new)) => Some(Pair::new(old, new)),
                _ => None,
            }
        });
        let report = |classified: Classified| {
            let effects = moved(&classified).then(|| {
                let pair = pairs[classified.policy as usize].as_ref();
                self.effects(&classified, on_base_golden.as_ref(), pair)
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
        on_base: Option<&Golden>,
        pair: Option<&Pair<'_>>,
    ) -> Option<Effects> {
        let (policy, metric) = (classified.policy, classified.metric);
        let before_ms = classified.change.before_ms?;
        let after_ms = classified.change.after_ms?;
        if self.same_data {
            return Some(Effects::of(before_ms, after_ms, after_ms));
        }
        let effects = Effects::of(before_ms, on_base?.ms(policy, metric)?, after_ms);
        Some(match pair {
            Some(pair) => effects.with_rows(metric, pair),
            // Ops and steps have no scheduler: what the code did not do, the rows did.
            None => Effects {
                row_ms: effects.schedule_ms,
                schedule_ms: 0.0,
                ..effects
            },
        })
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

/// Which measured run a serving case is of.
fn label_of(case: &CaseFile) -> Option<String> {
    let CaseFile::Serving(case) = case else {
        return None;
    };
    let point = case
        .point
        .map_or("no point".to_owned(), |point| format!("point {point}"));
    Some(match &case.silicon {
        Some(silicon) => format!("{point}, {} of {}", silicon.run, silicon.date),
        None => point,
    })
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
        renamed: None,
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
