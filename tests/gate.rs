//! The gate and the ledger from outside: a small copy of the project in a git repository of its
//! own, one change after another, each with its exit code and message.

mod project;

use std::fs;

use git2::Repository;
use rstest::rstest;
use serde_json::Value;
use stepgate::gate::error_pct;
use stepgate::timing::{Column, OpTable};
use tempfile::TempDir;

use project::{CASE, HOST, MOE, OP, OTHER_CODE, Project, SERVING, STEP, TIMING, copy, golden};

/// An edit of a golden's strict mean by some milliseconds, and of the error it states.
fn shifted(project: &Project, name: &str, metric: &str, ms: f64) -> (String, String, String) {
    shifted_by(project, name, &[(metric, ms)])
}

/// The same of several means.
fn shifted_by(project: &Project, name: &str, by: &[(&str, f64)]) -> (String, String, String) {
    let text = project.read(&golden(name));
    let number = |text: &str, key: &str| -> (String, f64) {
        let at = text.find(key).expect("a number") + key.len();
        let shown = text[at..].split([',', ' ', '\n']).next().expect("a number");
        (shown.to_owned(), shown.parse().expect("a number"))
    };
    let begin = text.find("ttft_ms: { mean: ").expect("a mean");
    let errors = begin + text[begin..].find("error_pct").expect("errors");
    let end = errors + text[errors..].find('\n').expect("a line");
    let mut to = text[begin..end].to_owned();
    for (metric, ms) in by {
        let short = metric.strip_suffix("_ms").expect("a time");
        let (_, silicon_ms) = number(&text, &format!("{metric}: "));
        let (mean, mean_ms) = number(&to, &format!("{metric}: {{ mean: "));
        let error = to.find("error_pct").expect("errors");
        let (error, _) = number(&to[error..], &format!("{short}: "));
        let is = error_pct(mean_ms + ms, silicon_ms);
        to = to.replacen(
            &format!("{metric}: {{ mean: {mean}"),
            &format!("{metric}: {{ mean: {:.4}", mean_ms + ms),
            1,
        );
        to = to.replacen(
            &format!("{short}: {error}"),
            &format!("{short}: {is:+.1}"),
            1,
        );
    }
    (golden(name), text[begin..end].to_owned(), to)
}

fn borrowed(edits: &[(String, String, String)]) -> Vec<(&str, &str, &str)> {
    edits
        .iter()
        .map(|(file, from, to)| (file.as_str(), from.as_str(), to.as_str()))
        .collect()
}

#[test]
fn nothing_changed_passes_and_nothing_runs() {
    let project = Project::new();
    project.gate(
        0,
        &[
            "gate: pass, exit code 0",
            "0 cases expected, 0 executed, 6 untouched",
        ],
    );
}

#[test]
fn another_code_runs_everything_and_proves_it() {
    let project = Project::new();
    project.commit_with(&[OTHER_CODE]);
    project.gate(
        0,
        &[
            "every case runs",
            "6 cases expected, 6 executed, 0 untouched",
            "hold over 6 cases",
            "20 same",
        ],
    );
    project.says(
        &["gate", "--base", "HEAD", CASE],
        2,
        &["fingerprint differs", "leave the case names out"],
    );
}

/// The gate's own code is in no fingerprint, so the page names what changed of it.
#[test]
fn a_change_of_what_judges_is_named() {
    let project = Project::new();
    project.write("src/gate/band.rs", "// wider\n");
    project.write("ci/gate", "exit 0\n");
    let named = "changed, too, is what judges: ci/gate, src/gate/band.rs; review it as such";
    project.gate(0, &["0 cases expected", named]);
    let report = project.json(0);
    let judges = &report["report"]["changed_judges"];
    assert_eq!(*judges, serde_json::json!(["ci/gate", "src/gate/band.rs"]));
}

#[test]
fn another_compiler_runs_everything() {
    let project = Project::new();
    project.commit_with(&[("goldens/compiler.txt", "rustc", "rustc 1.2.3 before rustc")]);
    project.gate(0, &["6 cases expected, 6 executed"]);
    fs::remove_file(project.path("goldens/compiler.txt")).expect("removed");
    project.commit();
    project.gate(0, &["timing fingerprint unknown ->", "6 executed"]);
    project.record(0, &["nothing to record", "goldens/compiler.txt: rustc"]);
    project.commit();
    project.gate(0, &["0 cases expected"]);
}

#[test]
fn only_changed_cases_run_where_the_fingerprint_is_equal() {
    let project = Project::new();
    let case = format!("cases/{CASE}.yaml");
    project.edit(&case, "point: 28", "# a comment\npoint: 28");
    project.gate(0, &["1 cases expected, 1 executed, 5 untouched", "4 same"]);
    project.says(
        &["gate", "--base", "HEAD", SERVING[1]],
        0,
        &[
            "0 cases expected, 0 executed, 5 untouched",
            "1 changed cases are left out by the names given",
        ],
    );
    project.says(
        &["gate", "--base", "HEAD", "gpt-4"],
        2,
        &["no case has one of these names"],
    );
}

#[test]
fn a_change_of_the_code_is_told_apart_and_passes_once_it_is_recorded() {
    let project = Project::new();
    let edits = [shifted_by(
        &project,
        CASE,
        &[("ttft_ms", 3.0), ("tpot_ms", -0.2)],
    )];
    let mut all = borrowed(&edits);
    all.push(OTHER_CODE);
    project.commit_with(&all);
    let text = project.gate(
        1,
        &[
            "unrecorded change",
            "regression of strict ttft is not recorded",
            "code / row / schedule -3.0000 / 0 / 0",
        ],
    );
    // TPOT rises towards its silicon value.
    assert!(
        text.contains("improvement of strict tpot is not recorded"),
        "{text}"
    );
    project.record(0, &["-1.jsonl: 2 rows", "regression"]);
    project.gate(
        0,
        &[
            "pass",
            "recorded: yes",
            "open regressions",
            "a reviewed change",
        ],
    );
    // Recorded means these values: another golden of the base is another move.
    project.commit();
    project.gate(0, &["open regressions, recorded and not back", CASE]);
    project.says(&["ledger", "verify"], 0, &["2 rows in 1 files"]);
    project.says(
        &["ledger", "show", "28"],
        0,
        &["regression", "code -3.0000"],
    );
    project.says(&["ledger", "show", SERVING[2]], 0, &["nothing is recorded"]);
}

#[test]
fn a_regression_is_open_until_the_error_is_back() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 3.0);
    project.commit_with(&[(&file, &from, &to), OTHER_CODE]);
    project.record(0, &["regression"]);
    project.commit();
    // The golden of an untouched case goes back to where it was.
    project.edit(&file, &from, &to);
    project.commit();
    let text = project.gate(0, &["0 cases expected"]);
    assert!(!text.contains("open regressions"), "{text}");
}

#[test]
fn a_row_measured_anew_is_a_row_effect() {
    let project = Project::new();
    project.measure("2.6915", "4.6915");
    project.gate(
        1,
        &[
            "is not reproduced",
            "not recorded",
            "rows: host/gpt-oss-tp2-ingress",
        ],
    );
    project.record(1, &["nothing is recorded", "cargo insta review"]);
    assert!(project.ledger_files().is_empty());
    project.accept();
    let report = project.json(1);
    let metrics = report["report"]["cases"].as_array().expect("cases").iter();
    let (mut moved, mut by_row) = (0, 0.0);
    for one in metrics.flat_map(|case| case["metrics"].as_array().expect("metrics")) {
        if one["effects"].is_null() {
            continue;
        }
        moved += 1;
        let effect = |key: &str| one["effects"][key].as_f64().expect("a number");
        let (before, after) = (one["before_ms"].as_f64(), one["after_ms"].as_f64());
        let by = after.expect("ms") - before.expect("ms");
        let sum = effect("code_ms") + effect("row_ms") + effect("schedule_ms");
        assert!((sum - by).abs() < 1e-9, "{one}");
        assert!(effect("code_ms").abs() < 1e-9, "{one}");
        // Where the host looks for requests once an iteration, a later one waits that much less.
        if one["metric"] == "ttft" {
            by_row += effect("row_ms");
        }
    }
    assert!(moved >= 4 && by_row > 0.2, "{moved} moves, {by_row} ms");
    project.record_for(
        "every request enters once",
        "host/gpt-oss-tp2-ingress",
        &["rows"],
    );
    project.gate(0, &["pass", "measured anew"]);
}

#[test]
fn a_row_that_is_not_its_cell_fails_a_proof() {
    let project = Project::new();
    project.edit(HOST, "mean_ms: 2.6915", "mean_ms: 2.6916");
    project.gate(
        4,
        &["a proof failed", "no leak fails for gpt-oss-tp2-ingress"],
    );
}

#[test]
fn a_uniform_shift_needs_a_mechanism() {
    let project = Project::new();
    let edits = SERVING.map(|name| shifted(&project, name, "ttft_ms", -5.0));
    let mut all = borrowed(&edits);
    all.push(OTHER_CODE);
    project.commit_with(&all);
    project.record(0, &["-1.jsonl: 4 rows"]);
    project.gate(
        1,
        &[
            "gpt-oss-120b/b200_sxm/trtllm: uniform shift of strict ttft in 4 points, +5.0000 ms",
            "--mechanism",
        ],
    );
    for file in project.ledger_files() {
        fs::remove_file(file).expect("removed");
    }
    project.record_for(
        "every first token leaves once",
        "host/gpt-oss-tp2-egress",
        &["-1.jsonl: 4 rows"],
    );
    project.gate(0, &["pass"]);
    project.says(
        &["ledger", "record", "--reason", "x", "--mechanism", "y"],
        2,
        &["--rows"],
    );
    let unknown = [
        "ledger",
        "record",
        "--reason",
        "x",
        "--mechanism",
        "y",
        "--rows",
        "host/no-such-row",
    ];
    project.says(&unknown, 2, &["no row is called `host/no-such-row`"]);
    // Nor by hand.
    let ledger = project.ledger_files().remove(0);
    let text = fs::read_to_string(&ledger).expect("the ledger");
    let forged = text.replace("host/gpt-oss-tp2-egress", "host/no-such-row");
    fs::write(&ledger, forged).expect("forged");
    project.gate(1, &["name `host/no-such-row`: no row is called so"]);
}

#[test]
fn two_errors_that_cancel_in_the_total_do_not_pass() {
    let project = Project::new();
    let text = project.read(&golden(CASE));
    let line = |key: &str| {
        let line = text
            .lines()
            .find(|line| line.trim().starts_with(key))
            .expect("a part");
        let value: f64 = line
            .rsplit(' ')
            .next()
            .expect("a number")
            .parse()
            .expect("a number");
        (line.to_owned(), value)
    };
    let (from_in, ingress) = line("ingress:");
    let (from_out, egress) = line("egress:");
    let to_in = format!("    ingress: {:.4}", ingress + 1.0);
    let to_out = format!("    egress: {:.4}", egress - 1.0);
    let file = golden(CASE);
    project.commit_with(&[
        (&file, &from_in, &to_in),
        (&file, &from_out, &to_out),
        OTHER_CODE,
    ]);
    project.gate(
        1,
        &[
            "moved of strict ttft",
            "ttft_parts_ms.egress",
            "ttft_parts_ms.ingress",
        ],
    );
}

#[test]
fn coverage_that_is_lost_exits_3_and_passes_once_it_is_recorded() {
    let project = Project::new();
    let text = project.read(HOST);
    let from = text.find("  - id: gpt-oss-tp2-ingress").expect("the row");
    let to = text
        .find("  - id: gpt-oss-tp2-egress")
        .expect("the next row");
    project.write(HOST, &format!("{}{}", &text[..from], &text[to..]));
    project.accept();
    project.gate(
        3,
        &[
            "coverage lost",
            "coverage_lost: gpt-oss-120b",
            "coverage.missing",
        ],
    );
    project.record_for("no ingress", "host/gpt-oss-tp2-ingress", &["coverage_lost"]);
    project.gate(0, &["pass"]);
}

#[test]
fn a_point_that_is_refused_exits_3() {
    let project = Project::new();
    fs::remove_file(project.path(MOE)).expect("removed");
    project.accept();
    project.gate(3, &["refused: gpt-oss-120b", "not recorded"]);
    project.record(0, &["refused"]);
    project.gate(0, &["pass"]);
    project.commit();
    // And back again.
    copy(MOE, project.folder.path());
    project.accept();
    project.gate(1, &["restored: gpt-oss-120b"]);
}

#[test]
fn goldens_and_cases_come_in_pairs() {
    let project = Project::new();
    fs::rename(
        project.path(&golden(CASE)),
        project.path("goldens/stray.snap"),
    )
    .expect("moved");
    let cases = format!("cases/{CASE}.yaml: a case without a golden");
    project.gate(1, &["goldens/stray.snap: a golden without a case", &cases]);
}

#[test]
fn a_removed_case_is_recorded_and_a_new_one_has_its_golden() {
    let project = Project::new();
    for file in [format!("cases/{CASE}.yaml"), golden(CASE)] {
        fs::remove_file(project.path(&file)).expect("removed");
    }
    project.gate(1, &["removed of strict ttft is not recorded"]);
    project.record(0, &["removed"]);
    project.gate(0, &["4 removed"]);
    project.commit();
    copy(&format!("cases/{CASE}.yaml"), project.folder.path());
    project.accept();
    project.gate(0, &["1 cases expected, 1 executed", "4 new"]);
}

#[test]
fn a_golden_that_is_not_reproduced_keeps_the_gate_shut() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 3.0);
    project.edit(&file, &from, &to);
    project.gate(
        1,
        &["the golden is not reproduced: strict.ttft_ms.mean says"],
    );
    // By hand not even within the band: the next band would be about another number.
    project.edit(&file, &to, &from);
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 0.01);
    project.edit(&file, &from, &to);
    let says = [
        "1 cases expected, 1 executed",
        "the golden is not reproduced: strict.ttft_ms.mean says",
        "reblessed of strict ttft is not recorded",
    ];
    project.gate(1, &says);
    project.edit(&file, &to, &from);
    project.edit(&file, "p50: 35.6147", "p50: 35.6148");
    project.gate(
        1,
        &["strict.ttft_ms.p50 says 35.6148, predicted is 35.6147"],
    );
}

#[test]
fn a_change_inside_the_band_is_tolerated_and_counted() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 0.01);
    project.edit(&file, &from, &to);
    project.commit_with(&[OTHER_CODE]);
    project.gate(0, &["1 tolerated"]);
    project.record(0, &["nothing to record"]);
}

#[test]
fn a_golden_taken_anew_inside_its_band_is_recorded() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 0.01);
    project.commit_with(&[(&file, &from, &to)]);
    let says = [
        "1 reblessed, 3 same",
        "reblessed of strict ttft is not recorded in the ledger",
    ];
    project.gate(1, &says);
    project.record(0, &["reblessed", "38.6047 -> 38.5947 ms", "code -0.0100"]);
    project.gate(0, &["recorded: yes"]);
    project.commit();
    project.gate(0, &["none judged"]);
}

#[cfg(unix)]
#[rstest]
#[case::golden(&golden(CASE), 1, "a case without a golden")]
#[case::case(&format!("cases/{CASE}.yaml"), 5, "not a case")]
#[case::ledger("goldens/ledger/2027-01-31-1.jsonl", 5, "no folder, link or pipe")]
#[case::host("data/host/pipe.yaml", 5, "pipe.yaml: cannot read the host rows")]
#[case::tables(
    "data/systems/pipe",
    5,
    "data/systems/pipe is neither a file nor a folder"
)]
#[case::code(
    "src/compose/pipe",
    5,
    "src/compose/pipe is neither a file nor a folder"
)]
fn a_pipe_in_place_of_a_file_is_not_waited_for(
    #[case] inner: &str,
    #[case] code: i32,
    #[case] says: &str,
) {
    let project = Project::new();
    let place = project.path(inner);
    fs::create_dir_all(place.parent().expect("a folder")).expect("made");
    let _ = fs::remove_file(&place);
    let made = std::process::Command::new("mkfifo").arg(&place).status();
    assert!(made.expect("mkfifo runs").success());
    project.gate(code, &[says]);
}

#[cfg(unix)]
#[test]
fn a_ledger_file_that_is_a_link_is_refused() {
    let project = Project::new();
    let elsewhere = project.path("elsewhere");
    fs::write(&elsewhere, "").expect("written");
    let place = project.path("goldens/ledger/2027-01-31-1.jsonl");
    fs::create_dir_all(place.parent().expect("a folder")).expect("made");
    std::os::unix::fs::symlink(elsewhere, place).expect("linked");
    project.gate(5, &["2027-01-31-1.jsonl", "no folder, link or pipe"]);
}

#[test]
fn a_point_is_of_one_case() {
    let project = Project::new();
    let again = format!("{CASE}-again");
    project.write(
        &format!("cases/{again}.yaml"),
        &project.read(&format!("cases/{CASE}.yaml")),
    );
    project.accept();
    let says = ["c4-again.yaml:2:", "point 28 is also the point of"];
    project.gate(5, &says);
}

#[test]
fn a_case_of_another_measured_run_is_named() {
    let project = Project::new();
    project.edit(&format!("cases/{CASE}.yaml"), "point: 28", "point: 300");
    let says = [
        "changed, too, is which measured run a case is of: gpt-oss",
        "point 28, inferencex 26016885799 of 2026-05-18 -> point 300, inferencex",
        "4 same",
    ];
    project.gate(0, &says);
}

#[test]
fn a_measured_value_does_not_change_unseen() {
    let project = Project::new();
    project.edit(
        &format!("cases/{CASE}.yaml"),
        "ttft_ms: 48.3129",
        "ttft_ms: 40.0",
    );
    project.accept();
    project.gate(
        1,
        &["the measured value `silicon ttft_ms` changed from 48.3129 to 40"],
    );
    project.record(0, &["evidence"]);
    project.gate(0, &["pass"]);
}

#[test]
fn what_only_a_wider_band_lets_through_is_named() {
    let project = Project::new();
    project.edit(
        &format!("cases/{CASE}.yaml"),
        "point: 28",
        "point: 28\ntolerance: { ttft_rel: 0.1, parts_rel: 0.1, reason: a test, expires: 2027-03-01 }",
    );
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 1.0);
    project.edit(&file, &from, &to);
    project.commit_with(&[OTHER_CODE]);
    let band = "ttft 10 %, percentiles and parts 10 %, until 2027-03-01: a test; lets through \
                strict ttft 39.5947 -> 38.5947 ms";
    project.gate(0, &["1 tolerated", band]);
    let markdown = ["gate", "--base", "HEAD", "--format", "markdown"];
    project.says(&markdown, 0, &["### Wider bands in force"]);
}

#[test]
fn a_tolerance_ends_on_its_day() {
    let project = Project::new();
    project.edit(
        &format!("cases/{CASE}.yaml"),
        "point: 28",
        "point: 28\ntolerance: { ttft_rel: 0.1, reason: a test, expires: 2027-03-01 }",
    );
    let band = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4: new, from the next change on; ttft 10 %, \
                until 2027-03-01: a test";
    project.gate(0, &["wider bands in force:", band]);
    project.commit();
    let on = |day: &'static str| ["gate", "--base", "HEAD", "--today", day];
    let band = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4: ttft 10 %, until 2027-03-01: a test";
    project.gate(0, &[band]);
    project.says(&on("2027-03-01"), 0, &["pass"]);
    project.says(
        &on("2027-03-02"),
        1,
        &["its wider band expired on 2027-03-01"],
    );
}

#[test]
fn new_ledger_rows_are_those_that_the_gate_would_write() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 3.0);
    project.commit_with(&[(&file, &from, &to), OTHER_CODE]);
    project.record(0, &["regression"]);
    let ledger = project.ledger_files().remove(0);
    let honest = fs::read_to_string(&ledger).expect("the ledger");
    project.gate(0, &["pass"]);
    let elsewhere = honest.replace("c4\"", "c8\"").replace(":28,", ":30,");
    for (forged, says) in [
        (
            honest.replace("\"regression\"", "\"coverage_gained\""),
            "their class is `coverage_gained`, this change is `regression`",
        ),
        (honest.replace(":28,", ":7,"), "their point is not"),
        (honest.clone() + &elsewhere, "do not lead from the base"),
        (
            honest.clone() + &honest.replace(CASE, "no/such-case"),
            "no such case",
        ),
    ] {
        fs::write(&ledger, forged).expect("forged");
        project.gate(1, &[says]);
    }
}

#[test]
fn a_golden_is_held_to_the_prediction_whatever_else_changes() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 9.0);
    let case = format!("cases/{CASE}.yaml");
    let widened = "point: 28\ntolerance: { ttft_rel: 0.5, reason: a test, expires: 2099-03-01 }";
    project.edit(&case, "point: 28", widened);
    project.edit(&file, &from, &to);
    project.gate(1, &["the golden is not reproduced"]);
    // Another error than that of its times, and no text at all.
    project.edit(&file, &to, &from);
    project.edit(&file, "error_pct: { ttft: -20.1", "error_pct: { ttft: -0.1");
    project.gate(
        5,
        &["1024-1024-c4.snap:9", "says an error of -0.1 % of ttft"],
    );
    fs::write(project.path(&file), b"\xff\xfe").expect("written");
    project.gate(5, &["1024-1024-c4.snap", "UTF-8"]);
}

#[test]
fn a_band_that_this_change_widens_does_not_count_yet() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 1.0);
    project.commit_with(&[(&file, &from, &to), OTHER_CODE]);
    project.edit(
        &format!("cases/{CASE}.yaml"),
        "point: 28",
        "point: 28\ntolerance: { ttft_rel: 0.5, reason: a test, expires: 2099-03-01 }",
    );
    project.gate(1, &["regression of strict ttft"]);
}

#[test]
fn the_ledger_is_append_only() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 3.0);
    project.commit_with(&[(&file, &from, &to), OTHER_CODE]);
    project.record(0, &["regression"]);
    project.commit();
    let ledger = project.ledger_files().remove(0);
    let text = fs::read_to_string(&ledger).expect("text");
    fs::write(&ledger, text.replace("a reviewed change", "another reason")).expect("written");
    project.gate(
        1,
        &[".jsonl:1: a ledger line of the base was changed or deleted"],
    );
    fs::remove_file(&ledger).expect("removed");
    project.gate(1, &[".jsonl:1: a ledger file of the base is gone"]);
    fs::write(&ledger, format!("{text}{{\"date\": ")).expect("written");
    project.gate(5, &[".jsonl:2:", "no ledger row"]);
    project.says(&["ledger", "verify"], 5, &[".jsonl:2:", "no ledger row"]);
}

#[test]
fn a_recorded_row_of_other_values_does_not_cover_a_move() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 3.0);
    project.commit_with(&[(&file, &from, &to), OTHER_CODE]);
    project.record(0, &["regression"]);
    let ledger = project.ledger_files().remove(0);
    let mut row: Value =
        serde_json::from_str(fs::read_to_string(&ledger).expect("text").trim()).expect("a row");
    let silicon = row["silicon_ms"].as_f64().expect("ms");
    let after = row["after_ms"].as_f64().expect("ms") - 5.0;
    row["after_ms"] = after.into();
    row["error_after_pct"] = ((after / silicon - 1.0) * 100.0).into();
    row["code_effect_ms"] = (after - row["before_ms"].as_f64().expect("ms")).into();
    fs::write(&ledger, format!("{row}\n")).expect("written");
    project.says(&["ledger", "verify"], 0, &["1 rows"]);
    project.gate(1, &["regression of strict ttft is not recorded"]);
    // A second row goes on from where the first one ends.
    project.record(0, &["improvement"]);
    project.gate(0, &["pass"]);
}

#[test]
fn a_base_that_cannot_be_read_is_bad_input() {
    let project = Project::new();
    let gate = |rev: &'static str| ["gate", "--base", rev];
    project.says(
        &gate("nowhere"),
        5,
        &["cannot read the revision `nowhere`", "git fetch"],
    );
    let head = project
        .repository
        .head()
        .expect("a head")
        .target()
        .expect("a commit");
    fs::write(
        project.repository.path().join("shallow"),
        format!("{head}\n"),
    )
    .expect("written");
    project.says(
        &gate("HEAD~1"),
        5,
        &["shallow clone does not hold `HEAD~1`", "fetch-depth: 0"],
    );
    fs::remove_dir_all(project.path(".git")).expect("removed");
    project.says(&gate("HEAD"), 5, &["no git repository holds this folder"]);
}

#[test]
fn a_binary_of_other_sources_is_told_to_be_rebuilt() {
    let project = Project::new();
    project.edit(TIMING, "//!", "//! Now");
    project.gate(5, &["built from other sources", "rebuild"]);
}

#[rstest]
#[case::nan("mean: ", "mean: .nan # ")]
#[case::infinite("mean: ", "mean: .inf # ")]
#[case::text("strict:", "strict: [")]
fn a_golden_of_the_base_that_is_none_is_bad_input(#[case] from: &str, #[case] to: &str) {
    let project = Project::new();
    let file = golden(CASE);
    project.commit_with(&[(&file, from, to), OTHER_CODE]);
    project.gate(5, &[&format!("HEAD:{file}:")]);
}

#[test]
fn reports_are_written_in_four_formats() {
    let project = Project::new();
    let (file, from, to) = shifted(&project, CASE, "ttft_ms", 3.0);
    project.commit_with(&[(&file, &from, &to), OTHER_CODE]);
    let report = project.json(1);
    assert_eq!(report["verdict"], "unrecorded change");
    assert_eq!(report["report"]["expected"], 6);
    let out = TempDir::new().expect("a folder");
    let file = |name: &str| out.path().join(name).to_str().expect("UTF-8").to_owned();
    let (markdown, junit) = (file("gate.md"), file("gate.xml"));
    let (json, text) = (file("gate.json"), file("gate"));
    let mut arguments = vec!["gate", "--base", "HEAD", "--format", "markdown"];
    for file in [&markdown, &junit, &json, &text] {
        arguments.extend(["--out", file]);
    }
    project.says(&arguments, 1, &["gate: unrecorded change"]);
    let read = |file: &str| fs::read_to_string(file).expect("a report");
    let (markdown, junit) = (read(&markdown), read(&junit));
    for part in [
        "<!-- stepgate gate -->",
        "## stepgate: unrecorded change (exit code 1)",
        "| case |",
    ] {
        assert!(markdown.contains(part), "{markdown}");
    }
    assert_eq!(read(&text), markdown);
    assert!(read(&json).starts_with('{'));
    assert!(junit.contains("tests=\"7\" failures=\"1\""), "{junit}");
    assert!(junit.contains("regression of strict ttft"), "{junit}");
    let mut reader = quick_xml::Reader::from_str(&junit);
    while reader.read_event().expect("well-formed") != quick_xml::events::Event::Eof {}
}

#[test]
fn shards_run_every_point_once() {
    let project = Project::new();
    let (one, two) = (
        project.shard("1.xml", &SERVING[..3]),
        project.shard("2.xml", &[SERVING[3], OP, STEP]),
    );
    let gate = |files: &[&str], code: i32, parts: &[&str]| {
        let mut arguments = vec!["gate", "--base", "HEAD", "--results"];
        arguments.extend(files);
        project.says(&arguments, code, parts);
    };
    gate(
        &[&one, &two],
        0,
        &["6 point tests expected, 6 executed in 2 files"],
    );
    gate(&[&one], 1, &[&format!("{STEP} was run by no shard")]);
    gate(
        &[&one, &two, &one],
        1,
        &[&format!("{CASE} was run more than once")],
    );
}

#[test]
fn a_project_in_a_folder_of_a_larger_repository_is_judged_and_recorded() {
    let alone = Project::new();
    let whole = TempDir::new().expect("a temporary folder");
    let services = whole.path().join("services");
    fs::create_dir(&services).expect("made");
    let folder = TempDir::new_in(&services).expect("a folder inside");
    for entry in fs::read_dir(alone.folder.path()).expect("the project") {
        let entry = entry.expect("an entry");
        if entry.file_name() != ".git" {
            fs::rename(entry.path(), folder.path().join(entry.file_name())).expect("moved");
        }
    }
    fs::write(whole.path().join("README.md"), "Other people's files.\n").expect("written");
    let repository = Repository::init(whole.path()).expect("a repository");
    let project = Project { folder, repository };
    project.commit();
    project.gate(0, &["0 cases expected, 0 executed, 6 untouched"]);
    // What others do beside it concerns nobody here.
    fs::write(whole.path().join("README.md"), "Changed.\n").expect("written");
    project.gate(0, &["0 cases expected, 0 executed, 6 untouched"]);

    let edits = [shifted(&project, CASE, "ttft_ms", -5.0)];
    let mut all = borrowed(&edits);
    all.push(OTHER_CODE);
    project.commit_with(&all);
    project.gate(1, &["strict ttft is not recorded in the ledger"]);
    project.record(0, &["-1.jsonl: 1 row"]);
    project.gate(0, &["pass"]);
    project.says(&["ledger", "verify"], 0, &[]);
    // The row stands in the project's own folder, and is append-only from the next base on.
    project.commit();
    for file in project.ledger_files() {
        assert!(file.starts_with(&services), "{}", file.display());
        fs::remove_file(file).expect("removed");
    }
    project.gate(1, &["-1.jsonl:1: a ledger file of the base is gone"]);
}

/// Points whose strict times rest on tables and bandwidth alone: no host row is theirs.
const OF_TABLES: [&str; 3] = [
    "gpt-oss-120b/b200-trtllm/tp4/1024-1024-c4",
    "gpt-oss-120b/b200-trtllm/tp4/8192-1024-c4",
    "gpt-oss-120b/b200-trtllm/tp4/8192-1024-c8",
];

/// Divides every latency of every op table by a factor, and the bandwidth's time with them.
fn divide_tables(project: &Project, factor: f64) {
    for entry in walkdir::WalkDir::new(project.path("data/systems/data")) {
        let entry = entry.expect("walk");
        let file = entry.path();
        if file.extension().is_none_or(|ending| ending != "parquet") {
            continue;
        }
        let mut table = OpTable::read(file).expect("a table");
        let latency = table.names.iter().position(|name| name == "latency");
        let column = (&mut table.columns)
            .into_iter()
            .nth(latency.expect("a latency"));
        let Some(Column::Float(values_ms)) = column else {
            panic!("{} has no latencies", file.display());
        };
        values_ms.iter_mut().for_each(|ms| *ms /= factor);
        table.write(file).expect("written");
    }
    let bandwidth = 7_700_000_000_000.0 * factor;
    let (from, to) = ("mem_bw: 7700000000000 ", format!("mem_bw: {bandwidth:.0} "));
    project.edit("data/systems/b200_sxm.yaml", from, &to);
}

#[test]
fn all_tables_times_1_03_need_a_mechanism() {
    let project = Project::new();
    fs::remove_dir_all(project.path("cases/gpt-oss-120b")).expect("removed");
    fs::remove_dir_all(project.path("goldens/gpt-oss-120b")).expect("removed");
    for name in OF_TABLES {
        copy(&format!("cases/{name}.yaml"), project.folder.path());
    }
    // The base's tables are faster, so that the working tree's are those that there are.
    divide_tables(&project, 1.03);
    project.accept();
    project.commit();
    copy("data/systems/b200_sxm.yaml", project.folder.path());
    copy("data/systems/data/b200_sxm", project.folder.path());
    project.accept();
    let unnamed = [
        "gpt-oss-120b/b200_sxm/trtllm: uniform shift of strict ttft in 3 points, times 1.0300",
        "gpt-oss-120b/b200_sxm/trtllm: uniform shift of strict tpot in 3 points, times 1.0300",
        "--mechanism",
    ];
    project.gate(1, &unnamed);
    project.record(0, &["-1.jsonl: "]);
    project.gate(1, &unnamed);
    for file in project.ledger_files() {
        fs::remove_file(file).expect("removed");
    }
    project.record_for(
        "another power limit: every kernel is slower by as much",
        "b200_sxm/*",
        &["-1.jsonl: "],
    );
    project.gate(0, &["pass"]);
}
