//! The gate's own test: what a wrong predictor, or a wrong hand in the files, may try. Each is
//! caught, and named by the check that is meant for it; so it is with goldens accepted and every
//! move recorded in the ledger, unless the table in ARCHITECTURE.md says otherwise.
//!
//! A wrong predictor is planted through `Points::mutate` and judged by the same function, with the
//! same exit code, as the binary's `gate`; files are edited, and judged by the binary.

mod project;
mod spoil;

use std::fs;
use std::path::PathBuf;

use rstest::rstest;
use sha2::{Digest, Sha256};
use stepgate::case::Case;
use stepgate::compose::{Fault, Part};
use stepgate::gate::{
    Analysis, Blessing, Mutation, Points, Predicted, Question, analyse_by, write_ledger,
};
use stepgate::replay::{Outcome, Prediction};
use stepgate::timing::{Column, OpTable, Origin};

use project::{CELLS, HOST, OTHER_CODE, Project, golden};
use spoil::{ttft_of, with_addend, with_factor_throughout};

/// Host rows of its own in two lanes, ingress, eager steps and graphs.
const EAGER: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4";
const EAGER_8: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c8";
const EAGER_16: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c16";
const BATCH_WAIT: &str = "qwen3.5-397b-a17b/b200-trtllm/tp4/1024-1024-c8";
const SGLANG: &str = "qwen3.5-397b-a17b/b200-sglang-fp8/tp4-ep4/1024-1024-c16";
/// Two attention-DP ranks with loads of their own.
const ATTENTION_DP: &str = "gpt-oss-120b/b200-trtllm/dp2-ep2/1024-1024-c256";
const CASES: [&str; 6] = [EAGER, EAGER_8, EAGER_16, BATCH_WAIT, ATTENTION_DP, SGLANG];
/// Where the table of mutations stands.
const TABLE: &str = include_str!("../ARCHITECTURE.md");
const TODAY: &str = "2027-01-31";
/// Records what moved, with all that can be said for it.
const RECORD: [&str; 8] = [
    "ledger",
    "record",
    "--reason",
    "so it is",
    "--mechanism",
    "a mechanism",
    "--rows",
    "host/gpt-oss-tp2-ingress",
];

/// Host rows of graph steps, which the project has none of, and their source cells.
const GRAPH_ROWS: &str = "rows:
  - id: graph-prepare
    boundary: host_prepare
    execution: { full_graph: { captured_batch: 4 } }
    module: iteration
    phase: decode
    samples: { mean_ms: 0.25, observer: plain }
    provenance:
      measured: { source: { table: graph_steps, row: prepare, column: mean } }
  - id: graph-launch
    boundary: graph_launch
    execution: { full_graph: { captured_batch: 4 } }
    module: launch
    phase: decode
    samples: { mean_ms: 0.125, observer: plain }
    provenance:
      measured: { source: { table: graph_steps, row: launch, column: mean } }
";
const GRAPH_CELLS: &str = "graph_steps,prepare,mean,0.25,ms,plain
graph_steps,launch,mean,0.125,ms,plain
";

/// Six short cases, committed.
fn small_project() -> Project {
    let project = Project::without_cases();
    for name in CASES {
        let file = format!("cases/{name}.yaml");
        project::copy(&file, project.folder.path());
        project.edit(&file, "osl: 1024", "osl: 24, requests: 20");
        let text = project.read(&file);
        project.write(&file, &text.replace("concurrency: 256", "concurrency: 8"));
    }
    project.edit(HOST, "rows:\n", GRAPH_ROWS);
    let cells = project.read(CELLS);
    project.write(CELLS, &(cells.trim_end().to_owned() + "\n" + GRAPH_CELLS));
    project.begin();
    project
}

fn ask(project: &Project, points: &Points) -> Analysis {
    let question = Question {
        root: project.folder.path(),
        rev: "HEAD",
        cases: &[],
        results: &[],
        today: TODAY.parse().expect("a day"),
        proofs: true,
    };
    analyse_by(&question, points).expect("a verdict")
}

/// Records every move as `ledger record` does, with all that it can be asked to say.
fn record(project: &Project, analysis: &Analysis) {
    let blessing = Blessing {
        date: TODAY.parse().expect("a day"),
        reason: "so it is".to_owned(),
        mechanism: Some("a mechanism".to_owned()),
        rows: vec!["host/gpt-oss-tp2-ingress".to_owned()],
        fingerprint: analysis.fingerprint_after.clone(),
    };
    let moves = analysis.outside();
    let rows = moves.iter().map(|(case, metric)| {
        blessing.row(
            &case.case,
            case.point,
            &metric.classified,
            metric.effects.as_ref(),
        )
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        write_ledger(project.folder.path(), blessing.date, &rows, &|_| Ok(())).expect("written");
    }
}

#[track_caller]
fn assert_says(analysis: &Analysis, parts: &[&str]) {
    let said = analysis.findings.iter().map(|finding| &finding.what);
    let said: Vec<&String> = said.collect();
    for part in parts {
        let is_said = said.iter().any(|what| what.contains(part));
        assert!(is_said, "{part:?} is said in {said:#?}");
    }
}

/// Holds the table in ARCHITECTURE.md to what was seen.
#[track_caller]
fn assert_listed(mutation: &str, unrecorded: i32, recorded: &str, by: &str) {
    let line = format!("| {mutation} | {unrecorded} | {recorded} | {by} |");
    println!("{line}");
    assert!(
        TABLE.contains(&line),
        "ARCHITECTURE.md does not have the line\n{line}"
    );
}

const fn composed(fault: Fault) -> Mutation {
    Mutation {
        fault: Some(fault),
        ..Mutation::NONE
    }
}

const fn predicted(prediction: fn(&Case, &mut Prediction)) -> Mutation {
    Mutation {
        prediction,
        ..Mutation::NONE
    }
}

fn add_5_ms(_: &Case, prediction: &mut Prediction) {
    *prediction = with_addend(prediction.clone(), 5.0);
}

/// The times and nothing else: no part, no row.
fn multiply_in_total(_: &Case, prediction: &mut Prediction) {
    for request in &mut prediction.log.requests {
        let more_ms = 0.03 * request.ttft_ms();
        request.first_token_ms += more_ms;
        request.last_token_ms += more_ms;
    }
    prediction.ttft = ttft_of(prediction);
}

fn multiply_every_part(_: &Case, prediction: &mut Prediction) {
    *prediction = with_factor_throughout(prediction.clone(), 1.03);
}

/// As much of every time and part as makes the error zero.
fn clamp_to_silicon(case: &Case, prediction: &mut Prediction) {
    if let Some(silicon) = &case.silicon
        && prediction.ttft.mean_ms > 0.0
    {
        let factor = silicon.ttft_ms / prediction.ttft.mean_ms;
        *prediction = with_factor_throughout(prediction.clone(), factor);
    }
}

/// A millisecond of every first token too many in one part and too few in another.
fn cancel(_: &Case, prediction: &mut Prediction) {
    let receipt = &mut prediction.ttft_receipt;
    for (part, by_ms) in [(Part::Kernel, 1.0), (Part::Transfer, -1.0)] {
        let lines = receipt.lines.iter_mut();
        let line = lines.filter(|line| line.part == part).max_by(|a, b| {
            let ms = |row| prediction.rows.ms(row);
            ms(a.row).total_cmp(&ms(b.row))
        });
        // Rows at zero leave no lines, and the first case waits for its host alone.
        let Some(line) = line else { return };
        line.coefficient += by_ms / prediction.rows.ms(line.row);
        receipt.parts_ms[part as usize] += by_ms;
    }
}

fn not_a_number(_: &Case, prediction: &mut Prediction) {
    prediction.log.requests[3].first_token_ms = f64::NAN;
    prediction.ttft = ttft_of(prediction);
}

#[rstest]
#[case::drop_the_peer_wait(
    "drop the peer wait", composed(Fault::PeerWaitDropped), "audit",
    &[ATTENTION_DP], &["dp2-ep2/1024-1024-c256: regression of strict tpot is not recorded"],
)]
#[case::add_waits_to_transfer(
    "add waits to transfer", composed(Fault::WaitsInTransfer), "sums, audit",
    &[EAGER], &["ttft is not recorded"],
)]
#[case::sum_instead_of_max(
    "sum instead of max", composed(Fault::SumForMax), "audit",
    &CASES, &["ttft is not recorded"],
)]
#[case::serve_a_graph_row_as_eager(
    "serve a graph row as eager", composed(Fault::GraphRowAsEager), "audit",
    &[EAGER, EAGER_8, EAGER_16], &["ttft is not recorded"],
)]
#[case::add_5_ms_to_every_ttft(
    "add 5 ms to every TTFT", predicted(add_5_ms), "null, homogeneity, sums, audit",
    &CASES, &["uniform shift of estimate ttft in 4 points, +5.0000 ms"],
)]
#[case::multiply_ttft_in_total(
    "multiply TTFT by 1.03 in total", predicted(multiply_in_total), "sums, audit",
    &CASES, &["uniform shift of estimate ttft in 4 points, times 1.0300"],
)]
#[case::multiply_every_part(
    "multiply TTFT by 1.03 in every part alike", predicted(multiply_every_part), "audit",
    &CASES, &["uniform shift of estimate ttft in 4 points, times 1.0300"],
)]
#[case::clamp_errors_to_silicon(
    "clamp errors to the silicon value", predicted(clamp_to_silicon),
    "blindness, homogeneity, audit",
    &CASES, &["improvement of estimate ttft is not recorded"],
)]
#[case::skip_ingress(
    "skip ingress", composed(Fault::IngressSkipped), "audit",
    &CASES, &["ttft is not recorded"],
)]
#[case::ignore_batch_wait(
    "ignore batch wait",
    Mutation { scenario: |scenario| scenario.serving.batch_wait = None, ..Mutation::NONE },
    "audit", &[BATCH_WAIT], &["ttft is not recorded"],
)]
#[case::swap_prefill_and_decode_tables(
    "swap prefill and decode tables", composed(Fault::PhasesSwapped), "audit",
    &CASES, &["ttft is not recorded"],
)]
#[case::two_cancelling_errors(
    "two cancelling errors", predicted(cancel), "audit",
    &CASES[1..], &["moved of estimate ttft is not recorded"],
)]
#[case::a_nan("a NaN", predicted(not_a_number), "finite, null, sums, audit", &CASES, &[])]
fn a_wrong_predictor_fails_the_proof_meant_for_it(
    #[case] mutation: &str,
    #[case] planted: Mutation,
    #[case] proofs: &str,
    #[case] cases: &[&str],
    #[case] unrecorded: &[&str],
) {
    let project = small_project();
    // A base of other sources: every case is judged.
    project.commit_with(&[OTHER_CODE]);
    let mut points = Points::open(project.folder.path(), None).expect("the project opens");
    points.mutate(planted);
    let seen = ask(&project, &points);
    assert_says(&seen, unrecorded);
    project.accept_by(&points);
    record(&project, &seen);
    let recorded = ask(&project, &points);
    for analysis in [&seen, &recorded] {
        for case in cases {
            let named = proofs.split(", ");
            let named: Vec<String> = named.map(|one| format!("{one} fails for {case}")).collect();
            assert_says(
                analysis,
                &named.iter().map(String::as_str).collect::<Vec<_>>(),
            );
        }
    }
    let (unrecorded, recorded) = (seen.exit_code(), recorded.exit_code());
    assert_eq!((unrecorded, recorded), (4, 4));
    assert_listed(mutation, unrecorded.into(), &recorded.to_string(), proofs);
}

/// Rows that were eager when they were read, in files that say `unknown`: what a loader would hold
/// that relabels them.
#[test]
fn relabel_unknown_as_eager() {
    let project = small_project();
    project.commit_with(&[OTHER_CODE]);
    let points = Points::open(project.folder.path(), None).expect("the project opens");
    for _ in 0..2 {
        let (from, to) = (
            "execution: eager\n    module: forward",
            "execution: unknown\n    module: forward",
        );
        project.edit(HOST, from, to);
    }
    let seen = ask(&project, &points);
    record(&project, &seen);
    let recorded = ask(&project, &points);
    let named = format!(
        "no leak fails for {EAGER}: host/gpt-oss-tp2-forward-rank0: taken as `execution: \"eager\"`"
    );
    for analysis in [&seen, &recorded] {
        assert_says(analysis, &[&named]);
        assert_eq!(analysis.exit_code(), 4);
    }
    // The loader that there is refuses them.
    project.gate(5, &["is a host time of unknown execution mode"]);
    assert_listed("relabel unknown as eager", 4, "4", "no leak");
}

/// The op table and the row in it that most of a first token's GPU time rests on.
fn heaviest_cell(points: &Points) -> (PathBuf, usize) {
    let case = points.case(EAGER).expect("a valid case");
    let Ok(Predicted::Serving { estimate, .. }) = points.predict(case) else {
        panic!("{EAGER} is no serving case");
    };
    let Outcome::Predicted(prediction) = *estimate else {
        panic!("{EAGER} is refused");
    };
    let lines = prediction.tpot_receipt.lines.iter();
    let of_tables = lines.filter_map(|line| match prediction.rows.origin(line.row) {
        Origin::Op { table, index, .. } => {
            let ms = line.coefficient * prediction.rows.ms(line.row);
            Some((ms, (table.file.clone(), *index as usize)))
        }
        _ => None,
    });
    let heaviest = of_tables.max_by(|a, b| a.0.total_cmp(&b.0));
    heaviest.expect("the GPU takes time").1
}

fn hex(file: &PathBuf) -> String {
    let digest = Sha256::digest(fs::read(file).expect("a table"));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn one_table_cell_times_1_1() {
    let project = small_project();
    let points = Points::open(project.folder.path(), None).expect("the project opens");
    let (file, row) = heaviest_cell(&points);
    let mut table = OpTable::read(&file).expect("a table");
    let latency = table.names.iter().position(|name| name == "latency");
    let column = (&mut table.columns)
        .into_iter()
        .nth(latency.expect("a latency"));
    match column {
        Some(Column::Float(ms)) => ms[row] *= 1.1,
        other => panic!("{other:?} holds no latencies"),
    }
    let before = hex(&file);
    table.write(&file).expect("written");
    let named = [
        "no leak fails for data/b200_sxm/",
        "it is not the table that",
    ];
    let unrecorded = [&named[..], &["tpot is not recorded"]].concat();
    project.gate(4, &unrecorded);
    project.accept();
    project.says(&RECORD, 0, &["rows"]);
    project.gate(4, &named);
    // With a digest that vouches for it, it is another import: recorded, it passes.
    project.edit("data/systems/PROVENANCE.yaml", &before, &hex(&file));
    project.gate(0, &["so it is"]);
    let recorded = "4; 0 as another import, with its digest in `PROVENANCE.yaml`";
    assert_listed("one table cell x1.1", 4, recorded, "no leak");
}

#[test]
fn lose_a_case() {
    let project = small_project();
    fs::remove_file(project.path(&format!("cases/{EAGER}.yaml"))).expect("removed");
    let orphan = format!("{}: a golden without a case", golden(EAGER));
    let removed = format!("{EAGER}: removed of strict ttft is not recorded");
    project.gate(1, &[&orphan, &removed]);
    project.says(&RECORD, 0, &["removed"]);
    project.gate(1, &[&orphan]);
    fs::remove_file(project.path(&golden(EAGER))).expect("removed");
    project.gate(0, &["4 removed", "so it is"]);
    let recorded = "1; 0 without its golden, listed as `removed`";
    assert_listed(
        "lose a case",
        1,
        recorded,
        "pairs of case and golden, class `removed`",
    );
}

#[test]
fn lose_a_golden() {
    let project = small_project();
    fs::remove_file(project.path(&golden(EAGER))).expect("removed");
    let named = [format!("cases/{EAGER}.yaml: a case without a golden")];
    let named = named.each_ref().map(String::as_str);
    project.gate(1, &named);
    project.says(&RECORD, 0, &["nothing to record"]);
    project.gate(1, &named);
    assert_listed("lose a golden", 1, "1", "pairs of case and golden");
}

#[test]
fn nudge_a_golden_inside_its_band() {
    let project = small_project();
    project.edit(&golden(EAGER), "mean: 52.9994", "mean: 53.0000");
    let unlike = format!(
        "{EAGER}: the golden is not reproduced: strict.ttft_ms.mean says 53, predicted is 52.9994"
    );
    let named = format!("{EAGER}: reblessed of strict ttft is not recorded");
    project.gate(1, &[&unlike, &named]);
    project.says(&RECORD, 1, &[&unlike, "nothing is recorded"]);
    project.gate(1, &[&unlike, &named]);
    assert_listed(
        "nudge a golden inside its band",
        1,
        "1",
        "golden as predicted, class `reblessed`",
    );
}

const SILICON: (&str, &str) = ("ttft_ms: 48.3129", "ttft_ms: 40.0");

#[test]
fn change_a_silicon_value() {
    let project = small_project();
    project.edit(&format!("cases/{EAGER}.yaml"), SILICON.0, SILICON.1);
    let named = "the measured value `silicon ttft_ms` changed from 48.3129 to 40";
    project.gate(1, &[named]);
    project.accept();
    project.gate(1, &[named]);
    project.says(&RECORD, 0, &["evidence"]);
    project.gate(0, &["1 evidence"]);
    let recorded = "0, listed as `evidence`";
    assert_listed("change a silicon value", 1, recorded, "class `evidence`");
}

#[test]
fn edit_a_ledger_line() {
    let project = small_project();
    project.edit(&format!("cases/{EAGER}.yaml"), SILICON.0, SILICON.1);
    project.accept();
    project.says(&RECORD, 0, &["evidence"]);
    project.commit();
    let file = project.ledger_files().remove(0);
    let text = fs::read_to_string(&file).expect("a ledger file");
    fs::write(&file, text.replace("so it is", "so it was")).expect("written");
    let named = ["jsonl:1: a ledger line of the base was changed or deleted"];
    project.gate(1, &named);
    project.says(&RECORD, 0, &["nothing to record"]);
    project.gate(1, &named);
    assert_listed("edit a ledger line", 1, "1", "append-only ledger");
}

/// A case's text with a band of its own.
fn widen(project: &Project, tolerance: &str) {
    let with = format!("point: 28\ntolerance: {{ {tolerance} }}");
    project.edit(&format!("cases/{EAGER}.yaml"), "point: 28", &with);
}

#[test]
fn widen_a_band_without_reason() {
    let project = small_project();
    widen(&project, "ttft_rel: 0.5, expires: 2099-01-01");
    let named = [&*format!("{EAGER}.yaml:3:"), "reason"];
    project.gate(5, &named);
    project.says(&RECORD, 5, &named);
    project.gate(5, &named);
    let by = "the case's schema, with file and line";
    assert_listed("widen a band without reason", 5, "5", by);
}

#[test]
fn leave_a_widened_band_past_its_date() {
    let project = small_project();
    widen(
        &project,
        "ttft_rel: 0.5, reason: a test, expires: 2027-03-01",
    );
    project.commit();
    let gate = |day| ["gate", "--base", "HEAD", "--today", day];
    project.says(&gate("2027-03-01"), 0, &["pass"]);
    let named = ["its wider band expired on 2027-03-01"];
    project.says(&gate("2027-03-02"), 1, &named);
    project.says(&RECORD, 0, &["nothing to record"]);
    project.says(&gate("2027-03-02"), 1, &named);
    assert_listed(
        "leave a widened band past its date",
        1,
        "1",
        "end of tolerances",
    );
}

#[test]
fn a_case_run_twice_and_another_not_at_all() {
    let project = small_project();
    // As many runs as there are cases.
    let one = project.shard("1.xml", &CASES[..3]);
    let two = project.shard("2.xml", &[CASES[2], CASES[3], CASES[4]]);
    let named = [
        "6 point tests expected, 6 executed",
        &format!("{EAGER_16} was run more than once"),
        &format!("{SGLANG} was run by no shard"),
    ];
    let gate = ["gate", "--base", "HEAD", "--results", &one, &two];
    project.says(&gate, 1, &named);
    project.says(&RECORD, 0, &["nothing to record"]);
    project.says(&gate, 1, &named);
    let mutation = "a case run twice and another not at all";
    assert_listed(mutation, 1, "1", "union of the shards");
}
