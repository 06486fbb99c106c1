//! The binary from outside: exit codes, located messages, and that bad input touches no file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rstest::rstest;
use tempfile::TempDir;

const CASE: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4";
const MOE: &str = "data/systems/data/b200_sxm/moe/sglang/0.5.14/moe_perf.parquet";
const HOST: &str = "data/host/gpt-oss-120b-trtllm-1.3.0rc14-b200-tp2.yaml";

/// A copy of the project's data with one case and its golden.
struct Project {
    folder: TempDir,
}

impl Project {
    fn new() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        for tree in [
            "data",
            "cases/gpt-oss-120b/b200-trtllm/tp2",
            "goldens/gpt-oss-120b",
        ] {
            for entry in walkdir::WalkDir::new(source.join(tree)) {
                let entry = entry.expect("walk");
                let inner = entry.path().strip_prefix(source).expect("inside");
                let to = folder.path().join(inner);
                if entry.file_type().is_dir() {
                    fs::create_dir_all(&to).expect("folder");
                } else {
                    fs::copy(entry.path(), &to).expect("copy");
                }
            }
        }
        Self { folder }
    }

    fn path(&self, inner: &str) -> PathBuf {
        self.folder.path().join(inner)
    }

    fn case(&self) -> PathBuf {
        self.path(&format!("cases/{CASE}.yaml"))
    }

    fn edit(&self, inner: &str, from: &str, to: &str) {
        let file = self.path(inner);
        let text = fs::read_to_string(&file).expect("text");
        assert!(text.contains(from), "{inner} holds {from:?}");
        fs::write(&file, text.replacen(from, to, 1)).expect("write");
    }

    fn edit_case(&self, from: &str, to: &str) {
        self.edit(&format!("cases/{CASE}.yaml"), from, to);
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_stepgate"))
            .arg("--root")
            .arg(self.folder.path())
            .args(arguments)
            .output()
            .expect("the binary runs")
    }

    /// Every file with its content.
    fn snapshot(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut files: Vec<_> = walkdir::WalkDir::new(self.folder.path())
            .into_iter()
            .map(|entry| entry.expect("walk"))
            .filter(|entry| entry.file_type().is_file())
            .map(|entry| {
                let content = fs::read(entry.path()).expect("read");
                (entry.path().to_path_buf(), content)
            })
            .collect();
        files.sort();
        files
    }

    /// Bad input: exit code 5, a message with each of `parts`, and no file touched.
    fn refuses(&self, arguments: &[&str], parts: &[&str]) {
        let before = self.snapshot();
        let output = self.run(arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(5), "{message}");
        for part in parts {
            assert!(message.contains(part), "{message:?} says {part:?}");
        }
        assert!(!message.contains("panicked"), "{message}");
        assert_eq!(self.snapshot(), before, "a file was touched");
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn predict_prints_the_headline_and_parts() {
    let output = Project::new().run(&["predict", CASE]);
    assert_eq!(output.status.code(), Some(0));
    let text = text(&output);
    for part in [
        "TTFT >= ",
        "estimate",
        "missing under strict",
        "host_dispatch",
        "sum",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn predict_json_holds_the_promised_fields() {
    let output = Project::new().run(&["predict", CASE, "--json"]);
    let value: serde_json::Value = serde_json::from_str(&text(&output)).expect("one JSON object");
    assert_eq!(value["case"], CASE);
    for metric in ["ttft_ms", "tpot_ms"] {
        for at in ["mean", "p50", "p90", "p99"] {
            assert!(value[metric][at].is_f64(), "{metric}.{at}");
            assert!(
                value["estimate"][metric][at].is_f64(),
                "estimate.{metric}.{at}"
            );
        }
    }
    for field in ["ttft_parts_ms", "tpot_parts_ms", "steps", "coverage"] {
        assert!(value[field].is_object(), "{field}");
    }
    for field in ["ttft_ms", "tpot_ms", "ttft_err_pct", "tpot_err_pct"] {
        assert!(value["silicon"][field].is_f64(), "silicon.{field}");
    }
}

#[test]
fn a_case_file_outside_the_project_predicts() {
    let project = Project::new();
    let elsewhere = TempDir::new().expect("a temporary folder");
    let file = elsewhere.path().join("mine.yaml");
    fs::copy(project.case(), &file).expect("copy");
    let output = project.run(&["predict", file.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn drift_is_listed_and_a_left_golden_exits_1() {
    let project = Project::new();
    let golden = format!("goldens/{CASE}.snap");
    let output = project.run(&["drift", CASE]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output).contains("1 same"));
    // Within the band of 0.2 %: tolerated, listed.
    project.edit(
        &golden,
        "ttft_ms: { mean: 38.5947",
        "ttft_ms: { mean: 38.5400",
    );
    let output = project.run(&["drift", CASE]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output).contains("strict.ttft_ms.mean 38.54 -> 38.5947"));
    // Outside it.
    project.edit(
        &golden,
        "ttft_ms: { mean: 38.5400",
        "ttft_ms: { mean: 37.0000",
    );
    let output = project.run(&["drift", CASE]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("strict.ttft_ms.mean: 37 -> 38.5947"));
}

#[test]
fn usage_errors_exit_2() {
    assert_eq!(Project::new().run(&["predict"]).status.code(), Some(2));
    assert_eq!(Project::new().run(&["nonsense"]).status.code(), Some(2));
}

#[rstest]
#[case::unknown_key("point: 28", "points: 28", &[":", "points"])]
#[case::wrong_type("point: 28", "point: many", &["c4.yaml:"])]
#[case::tp_does_not_divide_heads("{ tp: 2, moe_tp: 2 }", "{ tp: 3, moe_tp: 3 }", &["c4.yaml:", "64"])]
#[case::quoted_number("concurrency: 4", "concurrency: \"4\"", &["c4.yaml:9:48", "without quotes"])]
#[case::nan_tolerance("point: 28", "point: 28\ntolerance: { ttft_rel: .nan, reason: x, expires: 2030-01-01 }", &["c4.yaml:"])]
#[case::negative_tolerance("point: 28", "point: 28\ntolerance: { ttft_rel: -0.1, reason: x, expires: 2030-01-01 }", &["c4.yaml:"])]
#[case::tolerance_without_reason("point: 28", "point: 28\ntolerance: { ttft_rel: 0.1, expires: 2030-01-01 }", &["c4.yaml:", "reason"])]
#[case::duplicate_key("point: 28", "point: 28\npoint: 29", &["c4.yaml:"])]
fn a_bad_case_is_refused(#[case] from: &str, #[case] to: &str, #[case] parts: &[&str]) {
    let project = Project::new();
    project.edit_case(from, to);
    project.refuses(&["predict", CASE], parts);
}

#[test]
fn a_case_name_that_leaves_the_folder_is_refused() {
    Project::new().refuses(&["predict", "../../../etc/passwd"], &["passwd"]);
}

#[test]
fn an_empty_cases_folder_is_refused() {
    let project = Project::new();
    fs::remove_dir_all(project.path("cases")).expect("remove");
    fs::create_dir(project.path("cases")).expect("create");
    project.refuses(&["accuracy"], &["cases"]);
}

#[test]
fn a_case_of_50_mb_is_refused() {
    let project = Project::new();
    fs::write(project.case(), vec![b'#'; 50 << 20]).expect("write");
    project.refuses(&["predict", CASE], &["c4.yaml", "larger"]);
}

#[test]
fn an_alias_bomb_is_refused() {
    let project = Project::new();
    let mut bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for (name, before) in "bcdefghi".chars().zip("abcdefgh".chars()) {
        bomb.push_str(&format!(
            "{name}: &{name} [{}]\n",
            vec![format!("*{before}"); 9].join(", ")
        ));
    }
    fs::write(project.case(), bomb).expect("write");
    project.refuses(&["predict", CASE], &["c4.yaml:"]);
}

#[test]
fn a_missing_table_is_an_expected_refusal_that_names_it() {
    let project = Project::new();
    fs::remove_file(project.path(MOE)).expect("remove");
    let output = project.run(&["predict", CASE]);
    assert_eq!(output.status.code(), Some(0));
    let text = text(&output);
    assert!(
        text.contains("strict refused: no row anchors moe trtllm_gen"),
        "{text}"
    );
    assert!(text.contains("no table b200_sxm/moe/sglang"), "{text}");
}

#[test]
fn a_truncated_table_is_refused() {
    let project = Project::new();
    let whole = fs::read(project.path(MOE)).expect("read");
    fs::write(project.path(MOE), &whole[..whole.len() / 2]).expect("write");
    project.refuses(&["predict", CASE], &["moe_perf.parquet"]);
}

#[test]
fn a_host_row_of_a_diagnostic_observer_is_refused() {
    let project = Project::new();
    project.edit(HOST, "observer: plain", "observer: profiler");
    project.refuses(
        &["predict", CASE],
        &["gpt-oss-tp2-forward-rank0", "profiler"],
    );
}

#[test]
fn evaluation_data_is_no_timing_row() {
    let project = Project::new();
    project.edit(
        HOST,
        "boundary: host_dispatch",
        "boundary: schedule_to_first_token",
    );
    project.refuses(
        &["predict", CASE],
        &["b200-tp2.yaml:", "schedule_to_first_token"],
    );
}

#[rstest]
#[case::nan("mean_ms: .nan")]
#[case::zero("mean_ms: 0.0")]
#[case::negative("mean_ms: -3.0")]
#[case::infinite("mean_ms: .inf")]
fn a_host_row_without_a_positive_time_is_refused(#[case] to: &str) {
    let project = Project::new();
    project.edit(HOST, "mean_ms: 30.041", to);
    project.refuses(&["predict", CASE], &["b200-tp2.yaml"]);
}

#[test]
fn duplicate_ids_in_a_hand_written_file_are_refused() {
    let project = Project::new();
    project.edit(
        HOST,
        "id: gpt-oss-tp2-forward-rank1",
        "id: gpt-oss-tp2-forward-rank0",
    );
    project.refuses(&["predict", CASE], &["gpt-oss-tp2-forward-rank0", "twice"]);
}

#[test]
fn duplicate_keys_in_a_hand_written_file_are_refused() {
    let project = Project::new();
    project.edit(
        HOST,
        "  runtime: trtllm",
        "  runtime: trtllm\n  runtime: trtllm",
    );
    project.refuses(&["predict", CASE], &["b200-tp2.yaml:"]);
}

#[test]
fn a_host_topology_of_zero_is_refused() {
    let project = Project::new();
    project.edit(HOST, "tp: 2, dp: 1", "tp: 0, dp: 1");
    project.refuses(&["predict", CASE], &["b200-tp2.yaml", "topology"]);
}

#[test]
fn a_rank_outside_the_scope_is_refused() {
    let project = Project::new();
    project.edit(HOST, "rank: 1", "rank: 99");
    project.refuses(&["predict", CASE], &["b200-tp2.yaml", "rank"]);
}

#[test]
fn rows_that_answer_alike_in_two_files_are_refused() {
    let project = Project::new();
    let text = fs::read_to_string(project.path(HOST)).expect("text");
    let twin = text.replace("id: gpt", "id: twin-gpt");
    fs::write(project.path("data/host/aaa.yaml"), twin).expect("write");
    project.refuses(&["predict", CASE], &["data/host", "answer the same lookup"]);
}

#[test]
fn a_folder_in_place_of_a_table_is_refused() {
    let project = Project::new();
    fs::remove_file(project.path(MOE)).expect("remove");
    fs::create_dir(project.path(MOE)).expect("create");
    project.refuses(&["predict", CASE], &["moe_perf.parquet"]);
}

#[test]
fn a_replay_beyond_its_bound_is_refused() {
    let project = Project::new();
    project.edit_case("concurrency: 4", "concurrency: 4096");
    project.edit_case("max_batch_size: 512", "max_batch_size: 1");
    project.refuses(&["predict", CASE], &["c4.yaml:", "decode steps"]);
}

#[test]
fn a_config_with_experts_per_token_of_no_experts_is_refused() {
    let project = Project::new();
    let config = "data/models/gpt-oss-120b.json";
    project.edit(config, "num_local_experts", "n_experts");
    project.refuses(&["predict", CASE], &["gpt-oss-120b.json", "experts"]);
}

#[test]
fn a_wheel_that_is_none_is_refused() {
    let project = Project::new();
    let out = project.path("out");
    let output = project.run(&[
        "tables",
        "import",
        "data/host",
        "--models",
        "gpt-oss-120b",
        "--systems",
        "b200_sxm",
        "--out",
        out.to_str().expect("UTF-8"),
    ]);
    assert_eq!(output.status.code(), Some(5));
    assert!(!out.exists());
}

#[test]
fn the_schema_is_the_published_one() {
    let output = Project::new().run(&["schema"]);
    let published =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/case.schema.json"))
            .expect("schema");
    assert_eq!(text(&output).trim(), published.trim());
}

#[test]
fn compare_shows_what_a_changed_key_does_as_two_files_would() {
    let project = Project::new();
    let other = project.path("other.yaml");
    let case = fs::read_to_string(project.case()).expect("the case");
    let changed = case.replace("max_num_tokens: 20000", "max_num_tokens: 1100");
    assert_ne!(changed, case);
    fs::write(&other, changed).expect("write");
    let other = other.to_str().expect("UTF-8");
    let json = |arguments: &[&str]| -> serde_json::Value {
        let output = project.run(arguments);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        serde_json::from_str(&text(&output)).expect("one JSON object")
    };
    let set = "serving.max_num_tokens=1100";
    let by_key = json(&["compare", CASE, "--set", set, "--json"]);
    let by_file = json(&["compare", CASE, other, "--json"]);
    assert_eq!(by_key["b"], format!("{CASE} with {set}"));
    assert_eq!(by_key["estimate"], by_file["estimate"]);
    assert_eq!(by_key["strict"], by_file["strict"]);
    let predicted = json(&["predict", other, "--json"]);
    let mean = &by_key["strict"]["TTFT, ms"]["mean"];
    assert_eq!(mean["b"], predicted["ttft_ms"]["mean"]);
    assert_eq!(
        by_key["strict"]["throughput"]["requests/s"]["b"],
        predicted["requests_per_s"]
    );
    let [a, b] = ["a", "b"].map(|side| mean[side].as_f64().expect("a time"));
    assert!(b > a, "fewer tokens an iteration, longer queues: {mean}");
    assert_eq!(mean["ratio"].as_f64(), Some(b / a));
    assert_eq!(mean["difference"].as_f64(), Some(b - a));
    // Steps that one side alone has stand beside a zero.
    let shown = text(&project.run(&["compare", CASE, "--set", set]));
    for part in [
        "requests/s",
        "p99",
        "queue_capacity",
        "decode full_graph",
        "B / A",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
}

#[test]
fn compare_takes_a_key_out_with_null() {
    let project = Project::new();
    let set = ["--set", "serving.cuda_graph=null"];
    let shown = text(&project.run(&["compare", CASE, set[0], set[1]]));
    assert!(shown.contains("decode eager"), "{shown}");
}

#[rstest]
#[case::unknown("serving.max_tokens=1", &["unknown key `max_tokens`", "with serving.max_tokens=1"])]
#[case::wrong_type("serving.max_num_tokens=many", &["with serving.max_num_tokens=many"])]
#[case::no_block("model.size=3", &["`model` holds no keys", "model.size"])]
#[case::no_graphs("serving.mixed_execution=piecewise", &["serving.mixed_execution", "no piecewise graphs"])]
#[case::model("model=nowhere", &["nowhere"])]
fn a_set_key_that_makes_no_case_is_refused_by_its_name(#[case] set: &str, #[case] parts: &[&str]) {
    Project::new().refuses(&["compare", CASE, "--set", set], parts);
}

#[test]
fn compare_needs_something_to_compare_with() {
    let project = Project::new();
    for arguments in [
        &["compare", CASE][..],
        &["compare", CASE, CASE, "--set", "serving.overlap=false"],
        &["compare", CASE, "--set", "serving.overlap"],
        &["compare", "gpt-oss-120b", CASE],
    ] {
        let output = project.run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn completions_are_printed() {
    let output = Project::new().run(&["completions", "bash"]);
    assert!(text(&output).contains("stepgate"));
}
