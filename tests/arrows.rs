//! The arrows between modules point down, and the auditor stands apart.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use walkdir::WalkDir;

/// What each module may import of the others.
const ARROWS: [(&str, &[&str]); 9] = [
    ("timing", &[]),
    ("perfdb", &["timing"]),
    ("model", &["perfdb", "timing"]),
    ("compose", &["model", "perfdb", "timing"]),
    ("replay", &["compose", "model", "perfdb", "timing"]),
    ("case", &["model", "perfdb", "timing"]),
    ("trace", &["compose", "timing"]),
    (
        "gate",
        &[
            "case", "replay", "trace", "compose", "model", "perfdb", "timing",
        ],
    ),
    (
        "cli",
        &[
            "gate", "case", "replay", "trace", "compose", "model", "perfdb", "timing",
        ],
    ),
];

const AUDITOR: &str = "gate/audit/";

/// What the auditor may import: the timing contract, the model's config and plain scenario types,
/// the log, and what is under audit. `timing` as a whole.
const AUDITOR_MAY: [&str; 21] = [
    "compose::Part",
    "compose::Receipt",
    "compose::ReceiptLine",
    "model::Backend",
    "model::BackendName",
    "model::Capacity",
    "model::CudaGraph",
    "model::Deployment",
    "model::MixedExecution",
    "model::ModelConfig",
    "model::Piecewise",
    "model::QkNorm",
    "model::Scenario",
    "replay::IterationRecord",
    "replay::Metric",
    "replay::Prediction",
    "replay::Quantile",
    "replay::RankRecord",
    "replay::RequestRecord",
    "replay::StepKind",
    "replay::StepLog",
];

/// Code of others that the auditor could reach through the values it is given.
const AUDITOR_CALLS_NOT: [&str; 9] = [
    ".sizes(",
    ".token_counts(",
    ".int(",
    ".text(",
    ".float(",
    ".part_ms(",
    ".total_ms(",
    ".kind(",
    "Metric::of",
];

/// A path below `crate::`, and the line it stands on.
#[derive(Debug, PartialEq)]
struct Import {
    line: usize,
    path: String,
}

/// Every path that begins with `crate::`, in `use` trees and elsewhere, comments left out.
fn imports(text: &str) -> Vec<Import> {
    let code = without_comments(text);
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let part_of_a_name = code[..at]
            .chars()
            .next_back()
            .is_some_and(|before| before.is_alphanumeric() || before == '_');
        if part_of_a_name {
            continue;
        }
        let line = code[..at].lines().count().max(1);
        let mut paths = Vec::new();
        tree(&code[at + "crate::".len()..], "", &mut paths);
        found.extend(paths.into_iter().map(|path| Import { line, path }));
    }
    found
}

/// Reads one `use` tree and returns what follows it.
fn tree<'a>(code: &'a str, prefix: &str, paths: &mut Vec<String>) -> &'a str {
    let mut rest = code.trim_start();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner.trim_start();
        while !rest.is_empty() && !rest.starts_with('}') {
            let before = rest.len();
            rest = tree(rest, prefix, paths).trim_start();
            rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
            if rest.len() == before {
                // Nothing that a tree holds: leave it to the compiler.
                return rest;
            }
        }
        return rest.strip_prefix('}').unwrap_or(rest);
    }
    let end = rest
        .find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '*'))
        .unwrap_or(rest.len());
    let (name, after) = rest.split_at(end);
    let path = if prefix.is_empty() {
        name.to_owned()
    } else {
        format!("{prefix}::{name}")
    };
    if let Some(after) = after.strip_prefix("::") {
        return tree(after, &path, paths);
    }
    paths.push(path);
    // A rename names nothing new.
    match after.trim_start().strip_prefix("as ") {
        Some(renamed) => {
            let end = renamed.find([',', '}', ';']).unwrap_or(renamed.len());
            &renamed[end..]
        }
        None => after,
    }
}

/// Comments become blanks, so that lines keep their numbers.
fn without_comments(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    for line in text.lines() {
        let end = line.find("//").unwrap_or(line.len());
        code.push_str(&line[..end]);
        code.push('\n');
    }
    code
}

/// Faults of one file: `file` is its path below `src/`.
fn faults(file: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let Some((module, _)) = file.split_once('/') else {
        return faults;
    };
    let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == module) else {
        return vec![format!("src/{file}:1: module `{module}` has no arrows yet")];
    };
    for Import { line, path } in imports(text) {
        let to = path.split("::").next().unwrap_or("");
        if to != module && !allowed.contains(&to) {
            faults.push(format!(
                "src/{file}:{line}: `crate::{path}` points up from {module}"
            ));
        }
        let named = |may: &&str| path == *may || path.starts_with(&format!("{may}::"));
        if file.starts_with(AUDITOR) && to != "timing" && !AUDITOR_MAY.iter().any(named) {
            faults.push(format!(
                "src/{file}:{line}: the auditor imports `crate::{path}`"
            ));
        }
    }
    // `super` may not leave the module either: it would be an arrow without a name.
    let depth = file.split('/').count() - usize::from(file.ends_with("/mod.rs"));
    let out = "super::".repeat(depth);
    for (index, line) in without_comments(text).lines().enumerate() {
        let number = index + 1;
        if line.contains(&out) {
            faults.push(format!("src/{file}:{number}: `{out}` leaves {module}"));
        }
        if file.starts_with(AUDITOR) {
            // Its own modules may lean on each other, its contents page on nothing.
            let outside = if file.ends_with("/mod.rs") {
                "super::"
            } else {
                "super::super::"
            };
            if line.contains(outside) {
                faults.push(format!("src/{file}:{number}: the auditor leans on gate"));
            }
            for call in AUDITOR_CALLS_NOT {
                if line.contains(call) {
                    faults.push(format!("src/{file}:{number}: the auditor calls `{call}`"));
                }
            }
        }
    }
    if file.ends_with("/mod.rs") {
        faults.extend(more_than_a_contents_page(file, text));
    }
    faults
}

/// A `mod.rs` holds docs, modules and re-exports.
fn more_than_a_contents_page(file: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut inside_use = false;
    for (index, line) in without_comments(text).lines().enumerate() {
        let code = line.trim();
        let begins_use = ["use ", "pub use ", "pub(crate) use ", "pub(super) use "]
            .iter()
            .any(|start| code.starts_with(start));
        let module = ["mod ", "pub mod ", "pub(crate) mod ", "pub(super) mod "]
            .iter()
            .any(|start| code.starts_with(start))
            && code.ends_with(';');
        let plain = code.is_empty() || code.starts_with("#[") || code.starts_with("#![");
        if !(plain || module || begins_use || inside_use) {
            faults.push(format!(
                "src/{file}:{}: code in a mod.rs: `{code}`",
                index + 1
            ));
        }
        inside_use = (begins_use || inside_use) && !code.ends_with(';');
    }
    faults
}

#[test]
fn arrows_point_down() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    let mut modules = BTreeSet::new();
    for entry in WalkDir::new(&src).sort_by_file_name() {
        let entry = entry.expect("src lists");
        if entry.path().extension().is_none_or(|ending| ending != "rs") {
            continue;
        }
        let file = entry.path().strip_prefix(&src).expect("below src");
        let file = file.to_string_lossy().replace('\\', "/");
        if let Some((module, _)) = file.split_once('/') {
            modules.insert(module.to_owned());
        }
        let text = fs::read_to_string(entry.path()).expect("a source file reads");
        found.extend(faults(&file, &text));
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
    assert!(modules.len() >= 7, "only {modules:?}");
    assert!(src.join(AUDITOR).is_dir(), "the auditor has moved");
}

#[test]
fn use_trees_are_read_to_their_leaves() {
    let text = "\
use std::fmt;
// use crate::gate::Points;
use crate::timing::{
    Row, Rows as All,
    deep::{Nested, *},
};
/// See crate::cli::main.
fn f(x: crate::perfdb::Grid) { mycrate::gate::g(); $crate::model::h() }
pub(crate) use crate::{case, replay::Metric};
";
    let paths: Vec<(usize, String)> = imports(text)
        .into_iter()
        .map(|import| (import.line, import.path))
        .collect();
    let expected = [
        (3, "timing::Row"),
        (3, "timing::Rows"),
        (3, "timing::deep::Nested"),
        (3, "timing::deep::*"),
        (8, "perfdb::Grid"),
        (8, "model::h"),
        (9, "case"),
        (9, "replay::Metric"),
    ];
    let expected: Vec<(usize, String)> = expected
        .into_iter()
        .map(|(line, path)| (line, path.to_owned()))
        .collect();
    assert_eq!(paths, expected);
}

#[test]
fn planted_imports_are_caught() {
    for (file, text, says) in [
        (
            "replay/trtllm.rs",
            "use std::fmt;\nuse crate::case::Case;\n",
            "src/replay/trtllm.rs:2: `crate::case::Case` points up from replay",
        ),
        (
            "timing/row.rs",
            "fn f() { crate::perfdb::table::read() }\n",
            "src/timing/row.rs:1: `crate::perfdb::table::read` points up from timing",
        ),
        (
            "compose/path.rs",
            "use crate::{\n    timing::Row,\n    replay::Metric,\n};\n",
            "src/compose/path.rs:1: `crate::replay::Metric` points up from compose",
        ),
        (
            "model/plan.rs",
            "use super::super::gate;\n",
            "src/model/plan.rs:1: `super::super::` leaves model",
        ),
        (
            "gate/audit/step.rs",
            "use crate::model::Plan;\n",
            "src/gate/audit/step.rs:1: the auditor imports `crate::model::Plan`",
        ),
        (
            "gate/audit/step.rs",
            "use crate::compose::*;\n",
            "src/gate/audit/step.rs:1: the auditor imports `crate::compose::*`",
        ),
        (
            "gate/audit/step.rs",
            "let sizes = graph.sizes(backend);\n",
            "src/gate/audit/step.rs:1: the auditor calls `.sizes(`",
        ),
        (
            "gate/audit/step.rs",
            "use super::super::golden::render;\n",
            "src/gate/audit/step.rs:1: the auditor leans on gate",
        ),
        (
            "gate/mod.rs",
            "//! Docs.\n\nmod audit;\n\npub use audit::{\n    A, B,\n};\nfn f() {}\n",
            "src/gate/mod.rs:8: code in a mod.rs: `fn f() {}`",
        ),
        (
            "helpers/x.rs",
            "",
            "src/helpers/x.rs:1: module `helpers` has no arrows yet",
        ),
    ] {
        assert_eq!(faults(file, text), [says], "{file}");
    }
    assert_eq!(
        faults("replay/log.rs", "use crate::compose::Part;\n"),
        [""; 0]
    );
    assert_eq!(
        faults("gate/audit/step.rs", "use crate::timing::Rows;\n"),
        [""; 0]
    );
}
