//! The 263 points: one case each, under its name, saying what its row in the source says.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use stepgate::case::{Case, CaseFile, Tree};
use stepgate::model::{BackendName, GemmDtype, KvCacheDtype, MoeDtype};
use stepgate::perfdb::MoeKernel;

const POINTS: usize = 263;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn points_csv() -> String {
    fs::read_to_string(repository("data/points/points.csv")).expect("the points")
}

type Row<'a> = BTreeMap<&'a str, &'a str>;

/// Rows of a CSV without quotes, by column name.
fn csv(text: &str) -> Vec<Row<'_>> {
    assert!(
        !text.contains('"'),
        "the reader of this test knows no quotes"
    );
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().expect("a header").split(',').collect();
    lines
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            assert_eq!(cells.len(), header.len(), "{line}");
            header.iter().copied().zip(cells).collect()
        })
        .collect()
}

fn optional(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// What a row says, spelled as [`as_row`] spells a case.
fn normal(row: &Row<'_>, column: &str) -> String {
    let value = row[column];
    let spelled = match (column, value) {
        // Undecided in the source; the case says so in a comment.
        ("backend_version", "0.5.12|0.5.14") => "0.5.14",
        // The default of the case, and TensorRT-LLM's.
        ("max_batch_size", "") => "2048",
        ("kv_cache_dtype", "fp8_e4m3") => "fp8",
        ("kv_cache_dtype", "bf16") => "bfloat16",
        // The same kernels under two runtimes' names.
        ("moe_backend", "TRTLLM" | "flashinfer_trtllm") => "trtllm_gen",
        ("moe_backend", "TRITON") => "triton",
        ("moe_backend", "CUTLASS") => "cutlass",
        ("moe_backend", "CUTEDSL") => "cutedsl",
        ("moe_backend", "default") => "",
        ("piecewise_graph", "") => "false",
        ("adp_balance", "") => "false",
        _ => value,
    };
    spelled.to_owned()
}

/// A case's fields under the CSV's column names; what a case leaves out is not in it.
fn as_row(case: &Case) -> BTreeMap<&'static str, String> {
    let scenario = case.scenario();
    let (deployment, workload, serving) =
        (&scenario.deployment, &scenario.workload, &scenario.serving);
    let parallel = deployment.parallel;
    let silicon = case.silicon.as_ref().expect("a point is measured");
    let graph = serving.cuda_graph.as_ref().expect("every point has graphs");
    let list = graph.batch_sizes.as_ref().map(|sizes| {
        let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
        sizes.join(" ")
    });
    let balance = serving.attention_dp_balance;
    let piecewise = serving.piecewise.as_ref();
    let trtllm = deployment.backend.name == BackendName::Trtllm;
    let precision = deployment.precision;
    let weights = match (precision.gemm, precision.moe) {
        (
            GemmDtype::Bfloat16,
            Some(MoeDtype::W4a8Mxfp4Mxfp8 | MoeDtype::W4a16Mxfp4 | MoeDtype::Nvfp4),
        )
        | (GemmDtype::Nvfp4, Some(MoeDtype::Nvfp4)) => "fp4",
        (GemmDtype::Fp8Block, Some(MoeDtype::Fp8Block)) => "fp8",
        (GemmDtype::Bfloat16, Some(MoeDtype::Bfloat16)) => "bf16",
        other => panic!("no column text for {other:?}"),
    };
    let of_runtime = |this: bool, text: String| if this { text } else { String::new() };
    let mut row = BTreeMap::from([
        ("index", optional(case.point)),
        ("model", deployment.model.clone()),
        ("system", deployment.system.clone()),
        ("backend", deployment.backend.name.to_string()),
        ("backend_version", deployment.backend.version.clone()),
        ("precision", weights.to_owned()),
        ("gpus", parallel.ranks().to_string()),
        ("launch_tp", parallel.ranks().to_string()),
        ("launch_ep", parallel.moe_ep.to_string()),
        ("attention_dp", (parallel.dp > 1).to_string()),
        ("tp", parallel.tp.to_string()),
        ("dp", parallel.dp.to_string()),
        ("moe_tp", parallel.moe_tp.to_string()),
        ("moe_ep", parallel.moe_ep.to_string()),
        ("isl", workload.isl.to_string()),
        ("osl", workload.osl.to_string()),
        ("concurrency", workload.concurrency.to_string()),
        ("requests", workload.requests.to_string()),
        ("warmups", (workload.concurrency * 2).to_string()),
        ("chat_template", workload.chat_template.to_string()),
        ("measured_ttft_ms", silicon.ttft_ms.to_string()),
        ("measured_tpot_ms", silicon.tpot_ms.to_string()),
        ("max_batch_size", serving.max_batch_size.to_string()),
        (
            "max_num_tokens",
            of_runtime(trtllm, serving.max_num_tokens.to_string()),
        ),
        ("max_seq_len", optional(serving.max_seq_len)),
        ("graph_max_batch", graph.max_batch.to_string()),
        ("graph_batch_list", optional(list)),
        ("piecewise_graph", piecewise.is_some().to_string()),
        (
            "piecewise_max_tokens",
            optional(piecewise.map(|piecewise| piecewise.max_tokens)),
        ),
        (
            "batch_wait_timeout_iters",
            optional(serving.batch_wait.map(|wait| wait.timeout_iters)),
        ),
        (
            "batch_wait_max_tokens_ratio",
            optional(serving.batch_wait.map(|wait| wait.max_tokens_ratio)),
        ),
        ("adp_balance", balance.is_some().to_string()),
        (
            "adp_batching_wait_iters",
            optional(balance.map(|balance| balance.batching_wait_iters)),
        ),
        (
            "adp_timeout_iters",
            optional(balance.map(|balance| balance.timeout_iters)),
        ),
        (
            "capacity_policy",
            of_runtime(trtllm, serving.capacity.to_string()),
        ),
        (
            "scheduler_recv_interval",
            of_runtime(!trtllm, serving.scheduler_recv_interval.to_string()),
        ),
        ("max_prefill_tokens", optional(serving.max_prefill_tokens)),
        (
            "chunked_prefill_size",
            optional(serving.chunked_prefill_size),
        ),
        ("stream_interval", serving.stream_interval.to_string()),
        ("kv_cache_dtype", precision.kv_cache.to_string()),
        ("memory_fraction", optional(serving.memory_fraction)),
        (
            "moe_backend",
            optional(deployment.kernels.moe.map(MoeKernel::as_str)),
        ),
        ("gemm_backend", optional(deployment.kernels.gemm)),
        (
            "allreduce_fusion",
            optional(deployment.kernels.allreduce_fusion),
        ),
    ]);
    // The first 31 cases do not say it.
    if let Some(kernel) = deployment.kernels.attention {
        row.insert("attention_backend", kernel.to_string());
    }
    row
}

/// The name a row's case must have. Where a model, system and runtime were measured in several
/// precisions, the folder says which.
fn name_of(row: &Row<'_>, rows: &[Row<'_>]) -> String {
    let several = rows.iter().any(|other| {
        ["model", "system", "backend"]
            .iter()
            .all(|key| other[key] == row[key])
            && other["precision"] != row["precision"]
    });
    let system = row["system"].trim_end_matches("_sxm");
    let mut folder = format!("{system}-{}", row["backend"]);
    if several {
        folder += &format!("-{}", row["precision"]);
    }
    let topology = match (row["attention_dp"], row["moe_ep"]) {
        ("true", ep) => format!("dp{}-ep{ep}", row["dp"]),
        (_, "1") => format!("tp{}", row["tp"]),
        (_, ep) => format!("tp{}-ep{ep}", row["tp"]),
    };
    format!(
        "{}/{folder}/{topology}/{}-{}-c{}",
        row["model"], row["isl"], row["osl"], row["concurrency"]
    )
}

/// Everything in which a folder of cases and the table of points differ.
fn faults(cases: &Path, table: &str) -> Vec<String> {
    let rows = csv(table);
    let tree = Tree::open(cases).expect("a folder of cases");
    let mut faults = Vec::new();
    let mut points: BTreeMap<u32, (String, Case)> = BTreeMap::new();
    for name in tree.names().expect("names") {
        let path = tree.path_of(&name).expect("a case");
        let case = match CaseFile::load(path).unwrap_or_else(|fault| panic!("{fault}")) {
            CaseFile::Serving(case) => case,
            CaseFile::Op(_) | CaseFile::Step(_) => continue,
        };
        match case.point {
            None => faults.push(format!("{name} has no point")),
            Some(point) => {
                if let Some((first, _)) = points.insert(point, (name.clone(), case)) {
                    faults.push(format!("point {point} is doubled: {first} and {name}"));
                }
            }
        }
    }
    for index in 0..POINTS {
        if rows.get(index).map(|row| row["index"]) != Some(index.to_string().as_str()) {
            faults.push(format!("row {index} of the table is not point {index}"));
        }
    }
    if rows.len() != POINTS {
        faults.push(format!("the table has {} rows", rows.len()));
    }
    for row in &rows {
        let index: u32 = row["index"].parse().expect("an index");
        let Some((name, case)) = points.remove(&index) else {
            faults.push(format!("point {index} has no case"));
            continue;
        };
        let expected = name_of(row, &rows);
        if name != expected {
            faults.push(format!("point {index} is {name}, not {expected}"));
        }
        for (column, value) in as_row(&case) {
            let source = normal(row, column);
            if value != source {
                faults.push(format!(
                    "{name}: {column} is {value}, the row says {source}"
                ));
            }
        }
    }
    for (point, (name, _)) in points {
        faults.push(format!("point {point} of {name} is not in the table"));
    }
    faults
}

#[test]
fn every_point_has_one_case_that_agrees_with_its_row() {
    let found = faults(&repository("cases"), &points_csv());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Columns that a case does not hold under one name or another.
#[test]
fn every_column_is_carried_over_or_named_here() {
    const NOT_IN_A_CASE: [&str; 5] = [
        "checkpoint",
        "config_id",
        "peer_original_tpot_ms",
        "peer_original_ttft_ms",
        "recipe_confidence",
    ];
    let table = points_csv();
    let case = "cases/gpt-oss-120b/h200-trtllm/tp1/1024-1024-c4.yaml";
    let Ok(CaseFile::Serving(case)) = CaseFile::load(repository(case)) else {
        panic!("a serving case");
    };
    let held = as_row(&case);
    let left: Vec<&str> = csv(&table)[0]
        .keys()
        .copied()
        .filter(|column| !held.contains_key(column))
        .collect();
    assert_eq!(left, NOT_IN_A_CASE);
}

/// FACTS of the recipes that no column holds.
#[test]
fn what_only_the_recipes_say_is_in_the_cases() {
    let tree = Tree::open(repository("cases")).expect("cases/");
    let (mut reuse, mut undecided, mut lists) = (0, 0, 0);
    for name in tree.names().expect("names") {
        let path = tree.path_of(&name).expect("a case");
        let text = fs::read_to_string(&path).expect("text");
        let Ok(CaseFile::Serving(case)) = CaseFile::load(&path) else {
            continue;
        };
        assert!(
            text.starts_with(&format!("# cases/{name}.yaml\n")),
            "{name}"
        );
        let scenario = case.scenario();
        let (deployment, serving) = (&scenario.deployment, &scenario.serving);
        let on_h200 = name.starts_with("gpt-oss-120b/h200");
        assert_eq!(serving.block_reuse, on_h200, "{name}");
        reuse += usize::from(on_h200);
        undecided += usize::from(text.contains("# undecided in the source: 0.5.12 or 0.5.14\n"));
        assert!(serving.overlap, "{name}");
        let graph = serving.cuda_graph.as_ref().expect("graphs");
        assert!(graph.padding, "{name}");
        if deployment.precision.kv_cache == KvCacheDtype::Int8 {
            panic!("{name}: no recipe has it");
        }
        if let Some(piecewise) = &serving.piecewise {
            let counts = piecewise.token_counts();
            let workload = &scenario.workload;
            if deployment.model == "minimax-m2.5" {
                // Its recipe's list, worked out again.
                let last = (workload.concurrency * workload.isl).min(16_384);
                let steps = [
                    1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768,
                ]
                .into_iter()
                .chain((1_024..2_048).step_by(128))
                .chain((2_048..4_096).step_by(256))
                .chain((4_096..=last).step_by(512));
                assert_eq!(counts, steps.collect::<Vec<u32>>(), "{name}");
                lists += 1;
            } else {
                assert_eq!(counts.last(), Some(&serving.max_num_tokens), "{name}");
            }
        }
    }
    assert_eq!((reuse, undecided, lists), (33, 51, 42));
}

/// A copy of the cases with one change, and what the check says of it.
fn faults_after(change: impl FnOnce(&Path)) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = repository("cases");
    for entry in walkdir::WalkDir::new(&source) {
        let entry = entry.expect("walk");
        let to = folder
            .path()
            .join(entry.path().strip_prefix(&source).expect("inside"));
        if entry.file_type().is_dir() {
            fs::create_dir_all(&to).expect("folder");
        } else {
            fs::copy(entry.path(), &to).expect("copy");
        }
    }
    change(folder.path());
    faults(folder.path(), &points_csv())
}

const CASE: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4";

fn edit(folder: &Path, from: &str, to: &str) {
    let file = folder.join(format!("{CASE}.yaml"));
    let text = fs::read_to_string(&file).expect("text");
    assert_eq!(text.matches(from).count(), 1, "{from}");
    fs::write(&file, text.replacen(from, to, 1)).expect("write");
}

#[test]
fn a_copy_without_a_change_has_no_fault() {
    assert_eq!(faults_after(|_| {}), Vec::<String>::new());
}

#[test]
fn a_removed_case_is_found() {
    let found = faults_after(|folder| {
        fs::remove_file(folder.join(format!("{CASE}.yaml"))).expect("remove");
    });
    assert_eq!(found, ["point 28 has no case"]);
}

#[test]
fn a_doubled_case_is_found() {
    let found = faults_after(|folder| {
        let from = folder.join(format!("{CASE}.yaml"));
        fs::copy(from, folder.join("zz.yaml")).expect("copy");
    });
    assert_eq!(
        found,
        [
            format!("point 28 is doubled: {CASE} and zz"),
            format!("point 28 is zz, not {CASE}"),
        ]
    );
}

#[test]
fn a_renumbered_case_is_found() {
    let found = faults_after(|folder| edit(folder, "point: 28", "point: 263"));
    assert_eq!(
        found,
        [
            "point 28 has no case".to_owned(),
            format!("point 263 of {CASE} is not in the table"),
        ]
    );
}

#[test]
fn a_case_without_its_number_is_found() {
    let found = faults_after(|folder| edit(folder, "point: 28\n", ""));
    assert_eq!(
        found,
        [
            format!("{CASE} has no point"),
            "point 28 has no case".to_owned(),
        ]
    );
}

#[test]
fn a_moved_or_changed_case_is_found() {
    let moved = faults_after(|folder| {
        let from = folder.join(format!("{CASE}.yaml"));
        fs::rename(from, folder.join("moved.yaml")).expect("rename");
    });
    assert_eq!(moved, [format!("point 28 is moved, not {CASE}")]);
    let changed = faults_after(|folder| edit(folder, "tpot_ms: 2.8212", "tpot_ms: 2.8"));
    assert_eq!(
        changed,
        [format!(
            "{CASE}: measured_tpot_ms is 2.8, the row says 2.8212"
        )]
    );
}
