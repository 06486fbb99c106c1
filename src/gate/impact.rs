//! What a change can have moved: fingerprints, and the cases that must run.

use std::collections::BTreeSet;
use std::path::Path;

use walkdir::WalkDir;

use crate::case::CaseFile;
use crate::timing::InputError;

use super::analysis::{About, COMPILER, Finding, Kind, NoVerdict, Question, found};
use super::base::Base;
use super::fingerprint::{DATA, Files, code_of, fingerprint};
use super::ledger::LEDGER;
use super::points::Points;

/// The two fingerprints.
pub(super) struct Prints {
    pub before: Option<String>,
    pub after: String,
    pub data_differs: bool,
}

impl Prints {
    pub fn take(root: &Path, base: &Base) -> Result<Self, InputError> {
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

    pub fn differ(&self) -> bool {
        self.before.as_ref() != Some(&self.after)
    }
}

/// What judges a change and is no part of the fingerprint: the gate, the tests' harness and CI.
const JUDGES: [&str; 8] = [
    "src/gate",
    "src/cli",
    "src/main.rs",
    "harness",
    "ci",
    ".config",
    "build.rs",
    "Cargo.toml",
];

/// Files that judge and are not the base's, in order.
pub(super) fn changed_judges(root: &Path, base: &Base) -> Vec<String> {
    let here = JUDGES
        .iter()
        .flat_map(|inner| WalkDir::new(root.join(inner)));
    let here = here.filter_map(Result::ok).filter_map(|entry| {
        let inner = entry.path().strip_prefix(root).ok()?;
        let is_folder = entry.file_type().is_dir();
        (!is_folder).then(|| inner.to_string_lossy().replace('\\', "/"))
    });
    let there = JUDGES.iter().flat_map(|inner| base.under(inner, ""));
    let all: BTreeSet<String> = here.chain(there.map(str::to_owned)).collect();
    all.into_iter().filter(|path| !base.holds(path)).collect()
}

/// The cases that run.
pub(super) struct Wanted {
    pub cases: BTreeSet<String>,
    /// Changed cases that the question leaves out.
    pub left_out: BTreeSet<String>,
}

/// Names of cases and goldens on both sides.
pub(super) struct Tree {
    pub head: Vec<String>,
    pub goldens: BTreeSet<String>,
    pub base: BTreeSet<String>,
}

impl Tree {
    pub fn list(points: &Points, base: &Base) -> Result<Self, InputError> {
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

    pub fn has(&self, name: &str) -> bool {
        self.head
            .binary_search_by(|known| known.as_str().cmp(name))
            .is_ok()
    }

    pub fn findings(&self) -> Vec<Finding> {
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
            .map(|what| found(Kind::Unrecorded, what).about(About::Case))
            .collect()
    }

    /// The cases that must run: all of them, or those whose files changed.
    pub fn wanted(
        &self,
        question: &Question<'_>,
        base: &Base,
        prints: &Prints,
    ) -> Result<Wanted, NoVerdict> {
        let all = || self.head.iter().chain(&self.base);
        if prints.differ() {
            if !question.cases.is_empty() {
                return Err(NoVerdict::Usage(
                    "the timing fingerprint differs from the base's, so every case must run: \
                     leave the case names out"
                        .to_owned(),
                ));
            }
            return Ok(Wanted {
                cases: all().cloned().collect(),
                left_out: BTreeSet::new(),
            });
        }
        let changed = |name: &&String| {
            !base.holds(&format!("cases/{name}.yaml"))
                || !base.holds(&format!("goldens/{name}.snap"))
        };
        let changed: BTreeSet<String> = all().filter(changed).cloned().collect();
        if question.cases.is_empty() {
            return Ok(Wanted {
                cases: changed,
                left_out: BTreeSet::new(),
            });
        }
        let asked = |name: &String| {
            question.cases.iter().any(|asked| {
                let rest = name.strip_prefix(asked.trim_end_matches('/'));
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        };
        if !all().any(asked) {
            return Err(NoVerdict::Usage(
                "no case has one of these names".to_owned(),
            ));
        }
        let (cases, left_out): (BTreeSet<String>, BTreeSet<String>) =
            changed.into_iter().partition(asked);
        Ok(Wanted { cases, left_out })
    }

    /// Op and step cases, whose measured values name their cells.
    pub fn evidence_cases(&self, points: &Points) -> Vec<CaseFile> {
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
