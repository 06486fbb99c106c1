//! Goldens mirror cases: no case without one, none without a case, nothing pending.

use std::collections::BTreeSet;
use std::path::Path;

use stepgate::gate::Points;
use walkdir::WalkDir;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn goldens() -> BTreeSet<String> {
    let folder = Path::new(ROOT).join("goldens");
    WalkDir::new(&folder)
        .into_iter()
        .map(|entry| entry.expect("goldens can be walked"))
        .filter(|entry| entry.file_type().is_file())
        .filter(|entry| !entry.path().starts_with(folder.join("ledger")))
        .filter(|entry| entry.path() != folder.join("compiler.txt"))
        .map(|entry| {
            let inner = entry.path().strip_prefix(&folder).expect("inside");
            inner.to_string_lossy().into_owned()
        })
        .collect()
}

#[test]
fn every_case_has_a_golden_and_every_golden_a_case() {
    let points = Points::open(Path::new(ROOT), None).expect("the project opens");
    let wanted: BTreeSet<String> = points
        .names()
        .expect("cases are listed")
        .into_iter()
        .map(|name| format!("{name}.snap"))
        .collect();
    let found = goldens();
    let missing: Vec<_> = wanted.difference(&found).collect();
    let stale: Vec<_> = found.difference(&wanted).collect();
    assert!(missing.is_empty(), "cases without a golden: {missing:?}");
    assert!(
        stale.is_empty(),
        "goldens without a case, or pending snapshots: {stale:?}"
    );
}

#[test]
fn no_two_cases_share_a_point() {
    let points = Points::open(Path::new(ROOT), None).expect("the project opens");
    let cases: Vec<_> = points
        .names()
        .expect("cases are listed")
        .iter()
        .filter_map(|name| match points.case(name).expect("the case is valid") {
            stepgate::case::CaseFile::Serving(case) => Some(case),
            _ => None,
        })
        .collect();
    stepgate::case::Tree::check_points(&cases).expect("points are unique");
}
