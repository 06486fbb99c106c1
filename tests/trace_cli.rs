//! `stepgate trace` from outside: exit codes, JSON, and host files that load and are not composed.

mod profiles;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use profiles::{call, kernel, mark, trace, write};
use rstest::rstest;
use serde_json::Value;
use stepgate::perfdb::{HostKey, HostRows};
use stepgate::timing::{
    Boundary, CaptureOutcome, Execution, HostFile, IterationCounts, Observer, Policy, Row, Topology,
};
use tempfile::TempDir;

const ALL_REDUCE: &str = "ncclDevKernel_AllReduce_Sum_f16_RING_LL";

/// Step 1 is eager, step 2 one graph with a kernel before it, step 3 two graphs; `late_us` holds
/// this rank back in the collective of step 1.
fn run(rank: u32, world: u32, late_us: u64) -> String {
    trace(
        &[
            mark("user_annotation", "ProfilerStep#1", 0, 1000),
            call("cudaLaunchKernel", 10, 5, 1),
            call("cudaStreamSynchronize", 20, 40, 100),
            call("cudaLaunchKernel", 90, 10, 2),
            kernel("gemm", 30, 20, 7, 1),
            kernel(ALL_REDUCE, 100 + late_us, 50 - late_us, 40, 2),
            mark("user_annotation", "ProfilerStep#2", 1000, 1000),
            call("cudaLaunchKernel", 1010, 6, 3),
            call("cudaGraphLaunch", 1020, 8, 4),
            kernel("gemm", 1030, 5, 7, 3),
            kernel("attention", 1040, 30, 7, 4),
            kernel("gemm", 1070, 20, 7, 4),
            mark("user_annotation", "ProfilerStep#3", 2000, 1000),
            call("cudaGraphLaunch", 2010, 10, 5),
            call("cudaGraphLaunch", 2030, 12, 6),
            kernel("attention", 2040, 30, 7, 5),
            kernel("attention", 2080, 30, 7, 6),
        ],
        rank,
        world,
    )
}

struct Run {
    folder: TempDir,
    files: Vec<PathBuf>,
}

impl Run {
    fn of(late_us: &[u64]) -> Self {
        let folder = TempDir::new().expect("a folder");
        let world = u32::try_from(late_us.len()).expect("few ranks");
        let files = (0..world)
            .zip(late_us)
            .map(|(rank, late_us)| {
                let text = run(rank, world, *late_us);
                write(&folder, &format!("rank{rank}.json"), text)
            })
            .collect();
        Self { folder, files }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("host/toy.yaml")
    }

    fn import(&self, tp: &str, more: &[&str]) -> Output {
        fs::create_dir_all(self.folder.path().join("host")).expect("a folder");
        let out = self.out();
        let mut command = stepgate();
        command.args(["trace", "import"]).args(&self.files);
        command.args(["--runtime", "trtllm", "--version", "1.3.0rc14"]);
        command.args([
            "--system",
            "b200_sxm",
            "--model",
            "gpt-oss-120b",
            "--tp",
            tp,
        ]);
        command
            .args(["--cpu", "Xeon Platinum 8568Y+", "--out"])
            .arg(out);
        command.args(more).output().expect("the binary runs")
    }
}

fn stepgate() -> Command {
    Command::new(env!("CARGO_BIN_EXE_stepgate"))
}

fn summary(file: &Path, more: &[&str]) -> Output {
    let mut command = stepgate();
    command.args(["trace", "summary"]).arg(file).args(more);
    command.output().expect("the binary runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_summary_as_text_and_as_json() {
    let run = Run::of(&[0]);
    let output = summary(&run.files[0], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for part in [
        "rank 0 of 1",
        "host-bound",
        "sync-bound",
        "tail",
        "ProfilerStep#2",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Not a terminal: no colour.
    assert!(!text.contains('\x1b'), "{text}");
    let output = summary(&run.files[0], &["--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let device = &json["profiles"][0]["devices"][0];
    let ns = |key: &str| device[key].as_i64().expect("whole nanoseconds");
    let idle = device["idle"].as_object().expect("the parts");
    let idle_ns: i64 = idle.values().filter_map(Value::as_i64).sum();
    assert_eq!(ns("span_ns"), 2_080_000);
    assert_eq!(ns("busy_ns") + idle_ns, ns("span_ns"));
}

#[test]
fn a_pattern_that_fits_nothing_is_a_usage_error() {
    let run = Run::of(&[0]);
    let output = summary(&run.files[0], &["--iteration", "ProfilerStep#[12]"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let output = summary(&run.files[0], &["--iteration", "*#2", "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let iterations = json["profiles"][0]["iterations"]
        .as_array()
        .expect("a list");
    assert_eq!(iterations.len(), 1);
}

#[test]
fn a_damaged_file_is_summarised_as_far_as_it_goes_and_ends_with_5() {
    let run = Run::of(&[0]);
    let text = fs::read_to_string(&run.files[0]).expect("text");
    let cut = write(&run.folder, "cut.json", &text[..text.len() / 2]);
    let output = summary(&cut, &[]);
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stdout(&output).contains("warning: PARTIAL"),
        "{}",
        stdout(&output)
    );
    assert!(stderr(&output).contains("cut.json:"), "{}", stderr(&output));
    // Rows are not made of a part.
    let run = Run {
        files: vec![cut],
        ..run
    };
    let output = run.import("1", &[]);
    assert_eq!(output.status.code(), Some(5));
    assert!(!run.out().exists());
}

#[test]
fn two_files_of_one_rank_end_with_5() {
    let run = Run::of(&[0]);
    let copy = run.folder.path().join("copy.json");
    fs::copy(&run.files[0], &copy).expect("a copy");
    let mut command = stepgate();
    command
        .args(["trace", "summary"])
        .arg(&run.files[0])
        .arg(&copy);
    let output = command.output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stderr(&output).contains("rank 0, and so is"),
        "{}",
        stderr(&output)
    );
}

fn imported(run: &Run, tp: &str) -> Vec<Row> {
    let output = run.import(tp, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows = HostRows::load(&run.folder.path().join("host")).expect("the rows load");
    assert!(rows.all().is_empty(), "nothing that could be composed");
    rows.diagnostic()
        .iter()
        .map(|row| (**row).clone())
        .collect()
}

/// A row's samples in microseconds: count, sum, min, p50, max.
fn samples(row: &Row) -> (u64, i64, i64, i64, i64) {
    let us = |ms: Option<f64>| (ms.expect("given") * 1000.0).round() as i64;
    let of = &row.samples;
    let count = of.count.expect("given");
    let sum = us(Some(of.mean_ms * count as f64));
    (count, sum, us(of.min_ms), us(of.p50_ms), us(of.max_ms))
}

#[test]
fn rows_by_boundary_and_mode() {
    let run = Run::of(&[0]);
    let rows = imported(&run, "1");
    let full_graph = Execution::FullGraph { captured_batch: 0 };
    let found: Vec<_> = rows
        .iter()
        .map(|row| {
            (
                row.boundary,
                row.execution,
                row.module.as_str(),
                samples(row),
            )
        })
        .collect();
    let expected = [
        // From 10 to 100, less 40 blocked.
        (
            Boundary::HostDispatch,
            Execution::Eager,
            "iteration",
            (1, 50, 50, 50, 50),
        ),
        (
            Boundary::HostDispatch,
            full_graph,
            "iteration",
            (1, 18, 18, 18, 18),
        ),
        (
            Boundary::HostDispatch,
            Execution::Unknown,
            "iteration",
            (1, 32, 32, 32, 32),
        ),
        (Boundary::GraphLaunch, full_graph, "graph", (1, 8, 8, 8, 8)),
        (
            Boundary::GraphLaunch,
            Execution::Unknown,
            "graph",
            (2, 22, 10, 10, 12),
        ),
        (
            Boundary::GpuKernel,
            Execution::Eager,
            "gemm",
            (1, 20, 20, 20, 20),
        ),
        (
            Boundary::GpuKernel,
            full_graph,
            "attention",
            (1, 30, 30, 30, 30),
        ),
        (Boundary::GpuKernel, full_graph, "gemm", (2, 25, 5, 5, 20)),
        (
            Boundary::GpuKernel,
            Execution::Unknown,
            "attention",
            (2, 60, 30, 30, 30),
        ),
        (
            Boundary::GraphReplay,
            full_graph,
            "graph",
            (1, 50, 50, 50, 50),
        ),
        (
            Boundary::GraphReplay,
            Execution::Unknown,
            "graph",
            (2, 60, 30, 30, 30),
        ),
    ];
    assert_eq!(found, expected);
    for row in &rows {
        assert_eq!(row.samples.observer, Observer::Profiler);
        assert_eq!(row.capture, CaptureOutcome::Succeeded);
        assert_eq!(row.rank, Some(0));
        let sha256 = row.samples.artefact_sha256.as_deref().expect("a digest");
        assert_eq!(sha256.len(), 64);
    }
}

#[test]
fn the_file_says_what_the_profile_captured() {
    let run = Run::of(&[0]);
    imported(&run, "1");
    let text = fs::read_to_string(run.out()).expect("text");
    let file: HostFile = serde_yaml::from_str(&text).expect("a host file");
    let capture = &file.diagnostic.expect("diagnostic rows").profiles[0];
    assert_eq!(capture.file, "rank0.json");
    assert_eq!(capture.graph_trace, "nodes");
    assert_eq!(
        (capture.graph_launches, capture.graph_launches_with_work),
        (3, 3)
    );
    assert_eq!(
        (capture.gpu_events, capture.gpu_events_without_launch),
        (7, 0)
    );
    let iterations = IterationCounts {
        eager: 1,
        full_graph: 1,
        unknown: 1,
    };
    assert_eq!(capture.iterations, iterations);
    assert_eq!(file.scope.topology, topology(1));
}

fn topology(tp: u32) -> Topology {
    Topology {
        tp,
        dp: 1,
        moe_tp: tp,
        moe_ep: 1,
    }
}

/// A rank's own time in a collective holds its wait: only all ranks together tell the transfer.
#[test]
fn transfers_are_rows_only_where_every_rank_is_there() {
    let transfers = |rows: Vec<Row>| -> Vec<_> {
        let of = rows
            .iter()
            .filter(|row| row.boundary == Boundary::CollectiveTransfer);
        of.map(|row| (row.module.clone(), row.rank, samples(row).1))
            .collect()
    };
    let both = Run::of(&[0, 35]);
    assert_eq!(
        transfers(imported(&both, "2")),
        [("all_reduce".to_owned(), None, 15)]
    );
    let one = Run {
        files: vec![both.files[0].clone()],
        folder: TempDir::new().expect("a folder"),
    };
    assert!(transfers(imported(&one, "2")).is_empty());
}

#[test]
fn no_lookup_finds_a_profilers_row() {
    let run = Run::of(&[0]);
    let rows = imported(&run, "1");
    assert!(
        rows.iter()
            .any(|row| row.boundary == Boundary::HostDispatch)
    );
    let loaded = HostRows::load(&run.folder.path().join("host")).expect("the rows load");
    for policy in Policy::ALL {
        for row in &rows {
            let key = HostKey {
                boundary: row.boundary,
                execution: Some(row.execution),
                runtime: "trtllm",
                version: "1.3.0rc14",
                system: "b200_sxm",
                model: "gpt-oss-120b",
                topology: topology(1),
                cpu: Some("Xeon Platinum 8568Y+"),
                isl: 1024,
            };
            assert!(loaded.find(&key, policy).is_none(), "{}", row.id);
        }
    }
}

#[test]
fn rows_stay_in_the_list_they_belong_to() {
    let run = Run::of(&[0]);
    imported(&run, "1");
    let text = fs::read_to_string(run.out()).expect("text");
    let refused = |change: &dyn Fn(&mut HostFile)| {
        let mut file: HostFile = serde_yaml::from_str(&text).expect("a host file");
        change(&mut file);
        let changed = serde_yaml::to_string(&file).expect("YAML");
        fs::write(run.out(), changed).expect("written");
        let error = HostRows::load(&run.folder.path().join("host")).expect_err("refused");
        error.to_string()
    };
    let error = refused(&|file| {
        file.rows = file.diagnostic.take().expect("there").rows;
    });
    assert!(error.contains("inflates what it times"), "{error}");
    let error = refused(&|file| {
        let diagnostic = file.diagnostic.as_mut().expect("there");
        diagnostic.rows[0].samples.observer = Observer::Plain;
    });
    assert!(error.contains("move the row to `rows`"), "{error}");
}

#[test]
fn a_file_that_is_there_is_replaced_only_on_request() {
    let run = Run::of(&[0]);
    imported(&run, "1");
    fs::write(run.out(), "mine").expect("written");
    let output = run.import("1", &[]);
    assert_eq!(output.status.code(), Some(5));
    assert!(stderr(&output).contains("--force"), "{}", stderr(&output));
    assert_eq!(fs::read_to_string(run.out()).expect("text"), "mine");
    let output = run.import("1", &["--force"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        fs::read_to_string(run.out())
            .expect("text")
            .contains("diagnostic")
    );
}

#[cfg(unix)]
#[test]
fn a_link_keeps_and_its_file_is_replaced() {
    let run = Run::of(&[0]);
    imported(&run, "1");
    let real = run.folder.path().join("toy.yaml");
    fs::write(&real, "mine").expect("written");
    fs::remove_file(run.out()).expect("removed");
    std::os::unix::fs::symlink("../toy.yaml", run.out()).expect("a link");
    assert_eq!(run.import("1", &[]).status.code(), Some(5));
    assert_eq!(fs::read_to_string(&real).expect("text"), "mine");
    let output = run.import("1", &["--force"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(run.out().is_symlink());
    let text = fs::read_to_string(&real).expect("text");
    assert!(text.contains("diagnostic"), "{text}");
}

#[cfg(unix)]
#[test]
fn a_pipe_is_written_to_and_stays_a_pipe() {
    use std::os::unix::fs::FileTypeExt;
    let run = Run::of(&[0]);
    imported(&run, "1");
    let expected = fs::read_to_string(run.out()).expect("text");
    fs::remove_file(run.out()).expect("removed");
    let made = Command::new("mkfifo").arg(run.out()).status();
    assert!(made.expect("mkfifo runs").success());
    let pipe = run.out();
    let reader = std::thread::spawn(move || fs::read_to_string(pipe));
    let output = run.import("1", &["--force"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let kind = fs::metadata(run.out()).expect("there").file_type();
    assert!(kind.is_fifo());
    let text = reader.join().expect("no panic").expect("text");
    assert_eq!(text, expected);
}

#[rstest]
#[case::another_world("4", "of a run with 1 ranks, the topology has 4")]
#[case::beyond_a_node("9", "9 is not in 1..=8")]
fn a_topology_that_the_run_did_not_have_is_refused(#[case] tp: &str, #[case] says: &str) {
    let run = Run::of(&[0]);
    let output = run.import(tp, &[]);
    assert_ne!(output.status.code(), Some(0));
    assert!(stderr(&output).contains(says), "{}", stderr(&output));
    assert!(!run.out().exists());
}

#[test]
fn a_profile_without_gpu_work_makes_no_rows() {
    let folder = TempDir::new().expect("a folder");
    let text = trace(&[mark("cpu_op", "aten::mm", 0, 5)], 0, 1);
    let files = vec![write(&folder, "cpu.json", text)];
    let run = Run { folder, files };
    let output = run.import("1", &[]);
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stderr(&output).contains("holds no GPU work"),
        "{}",
        stderr(&output)
    );
}
