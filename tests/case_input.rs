//! Case files from outside: every bad one is refused with a place and a way out, none panics, and
//! the checked-in ones say what their sources say.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rstest::rstest;
use sha2::{Digest, Sha256};
use stepgate::case::{Case, CaseFile, FILE_BYTES_MAX, ModelDims, Outcome, Tree, json_schema};
use stepgate::model::{Count, OpKind, StepExecution};
use stepgate::timing::InputError;

/// A valid case that uses every block.
const VALID: &str = "\
point: 28
model: gpt-oss-120b
system: b200_sxm
backend: { name: trtllm, version: 1.3.0rc14 }
parallel: { tp: 2, moe_tp: 2 }
precision: { moe: w4a8_mxfp4_mxfp8, kv_cache: fp8 }
kernels: { moe: trtllm_gen, allreduce_fusion: true }
host: { cpu: Xeon }
workload: { isl: 1024, osl: 1024, concurrency: 4 }
serving:
  max_batch_size: 512
  max_num_tokens: 20000
  overlap: true
  cuda_graph: { padding: true, batch_sizes: [1, 2, 4] }
  piecewise: { max_tokens: 2048 }
  batch_wait: { timeout_iters: 50, max_tokens_ratio: 0.45 }
silicon: { ttft_ms: 48.3, tpot_ms: 2.8, run: r1, date: 2026-05-18 }
tolerance: { ttft_rel: 0.01, reason: one-off stall, expires: 2027-03-01 }
";

const OP: &str = "\
kind: op
model: gpt-oss-120b
system: b200_sxm
backend: { name: trtllm, version: 1.3.0rc14 }
parallel: { tp: 2 }
op: moe
tokens: 889
measured:
  - { label: rank 0, ms: 7.492, source: { table: t, row: r, column: c } }
";

const STEP: &str = "\
kind: step
model: gpt-oss-120b
system: b200_sxm
backend: { name: trtllm, version: 1.3.0rc14 }
parallel: { tp: 2 }
step: { context: [886], generation: { requests: 3, mean_kv: 1386 } }
execution: eager
measured:
  - { label: rank 0, what: gpu_span, ms: 50.5, source: { table: t, row: r, column: c } }
";

const GPT_OSS: ModelDims = ModelDims {
    heads: 64,
    kv_heads: 8,
    experts: Some(128),
};

fn read(text: &str) -> Result<CaseFile, InputError> {
    CaseFile::from_bytes("c.yaml", text.as_bytes().to_vec())
}

fn serving(text: &str) -> Case {
    match read(text) {
        Ok(CaseFile::Serving(case)) => case,
        other => panic!("expected a serving case, got {other:?}"),
    }
}

fn edited(base: &str, from: &str, to: &str) -> String {
    assert_eq!(base.matches(from).count(), 1, "`{from}` must occur once");
    base.replacen(from, to, 1)
}

#[track_caller]
fn assert_fault(fault: &InputError, file: &str, line: u64, column: u64, part: &str) {
    let place = &fault.place;
    assert_eq!(place.file, Path::new(file), "{fault}");
    assert_eq!(
        (place.line, place.column),
        (Some(line), Some(column)),
        "{fault}"
    );
    assert!(
        fault.to_string().contains(part),
        "`{part}` is not in: {fault}"
    );
    assert!(
        !fault.what.is_empty() && !fault.help.is_empty(),
        "{fault:?}"
    );
}

#[rstest]
// Keys and types.
#[case::unknown_key("overlap: true", "overlapp: true", 13, 3, "unknown key `overlapp`")]
#[case::unknown_top_key("host: { cpu: Xeon }", "hosts: 1", 8, 1, "unknown key `hosts`")]
#[case::duplicate_key("point: 28\n", "point: 28\npoint: 29\n", 2, 1, "duplicate key `point`")]
#[case::duplicate_inner_key("isl: 1024,", "isl: 1024, isl: 8,", 9, 24, "duplicate key `isl`")]
#[case::missing_key("system: b200_sxm\n", "", 17, 1, "missing key `system`")]
#[case::word_for_number("isl: 1024", "isl: many", 9, 18, "expected a whole number")]
#[case::fraction_for_count("isl: 1024", "isl: 10.5", 9, 18, "expected a whole number")]
#[case::negative_count("isl: 1024", "isl: -1", 9, 18, "expected a whole number")]
#[case::count_overflow("isl: 1024", "isl: 99999999999", 9, 18, "expected a whole number")]
#[case::quoted_number("isl: 1024", "isl: '1024'", 9, 18, "without quotes")]
#[case::quoted_nan("ttft_rel: 0.01", "ttft_rel: '.nan'", 18, 24, "without quotes")]
#[case::quoted_bool("overlap: true", "overlap: 'true'", 13, 12, "without quotes")]
#[case::list_for_number("isl: 1024", "isl: [1]", 9, 13, "wrong type: sequence")]
#[case::number_for_block(
    "{ isl: 1024, osl: 1024, concurrency: 4 }",
    "7",
    9,
    11,
    "expected a mapping"
)]
#[case::word_for_bool("overlap: true", "overlap: maybe", 13, 12, "expected true or false")]
#[case::loose_bool("overlap: true", "overlap: yes", 13, 12, "expected true or false")]
#[case::unknown_backend(
    "name: trtllm",
    "name: vllm",
    4,
    18,
    "expected one of `trtllm`, `sglang`"
)]
#[case::unknown_kind("point: 28", "kind: train", 1, 7, "unknown kind `train`")]
#[case::unknown_precision("moe: w4a8_mxfp4_mxfp8", "moe: w4a8", 6, 19, "unknown value `w4a8`")]
// Names and text.
#[case::model_leaves_folder("gpt-oss-120b", "../secret", 2, 8, "is no name")]
#[case::blank_version("1.3.0rc14", "''", 4, 35, "is no name")]
#[case::blank_run("run: r1", "run: ' '", 17, 46, "the text is blank")]
// Zero sizes and bounds.
#[case::zero_isl("isl: 1024", "isl: 0", 9, 18, "0 is out of range")]
#[case::zero_concurrency("concurrency: 4", "concurrency: 0", 9, 48, "0 is out of range")]
#[case::zero_tp("{ tp: 2", "{ tp: 0", 5, 17, "0 is out of range")]
#[case::zero_batch(
    "max_batch_size: 512",
    "max_batch_size: 0",
    11,
    19,
    "0 is out of range"
)]
#[case::huge_isl("isl: 1024", "isl: 1048577", 9, 18, "expected 1 to 1048576")]
#[case::huge_osl("osl: 1024", "osl: 4000000000", 9, 29, "expected 1 to 1048576")]
#[case::huge_concurrency("concurrency: 4", "concurrency: 65537", 9, 48, "expected 1 to 65536")]
#[case::huge_requests(
    "concurrency: 4",
    "concurrency: 4, requests: 1000001",
    9,
    61,
    "expected 4 to 1000000"
)]
#[case::few_requests(
    "concurrency: 4",
    "concurrency: 4, requests: 3",
    9,
    61,
    "expected 4 to 1000000"
)]
#[case::endless_replay(
    "concurrency: 4",
    "concurrency: 4, requests: 900000",
    9,
    61,
    "decode steps"
)]
#[case::one_token_output("osl: 1024", "osl: 2", 9, 29, "no TPOT")]
#[case::empty_prompt("isl: 1024", "isl: 1", 9, 18, "no token")]
#[case::zero_ratio(
    "concurrency: 4",
    "concurrency: 4, length_ratio: 0",
    9,
    65,
    "out of range"
)]
// Topology.
#[case::too_many_gpus(
    "{ tp: 2, moe_tp: 2 }",
    "{ tp: 4, dp: 4, moe_tp: 4, moe_ep: 4 }",
    5,
    11,
    "is 16 GPUs"
)]
#[case::moe_degrees(
    "{ tp: 2, moe_tp: 2 }",
    "{ tp: 2, moe_tp: 2, moe_ep: 2 }",
    5,
    11,
    "moe_tp 2 * moe_ep 2 is not tp 2 * dp 1"
)]
#[case::moe_remainder(
    "{ tp: 2, moe_tp: 2 }",
    "{ tp: 2, moe_ep: 3 }",
    5,
    11,
    "is not tp 2 * dp 1"
)]
#[case::wait_with_dp(
    "{ tp: 2, moe_tp: 2 }",
    "{ tp: 1, dp: 2, moe_ep: 2 }",
    16,
    15,
    "batch_wait has no effect"
)]
#[case::balance_without_dp(
    "  overlap: true",
    "  attention_dp_balance: { batching_wait_iters: 1, timeout_iters: 1 }",
    13,
    25,
    "without attention DP"
)]
// Serving controls.
#[case::prompt_does_not_fit(
    "max_num_tokens: 20000",
    "max_num_tokens: 1023",
    12,
    19,
    "1023 tokens cannot hold the longest prompt, 1024"
)]
#[case::no_token_budget("  max_num_tokens: 20000\n", "", 11, 3, "missing key `max_num_tokens`")]
#[case::quoted_template(
    "concurrency: 4",
    "concurrency: 4, chat_template: 'no'",
    9,
    66,
    "expected true or false"
)]
#[case::quoted_reuse("overlap: true", "block_reuse: 1", 13, 16, "expected true or false")]
#[case::unknown_gemm_kernel("moe: trtllm_gen", "gemm: cublas", 7, 18, "unknown value `cublas`")]
#[case::sequence_does_not_fit(
    "overlap: true",
    "max_seq_len: 2047",
    13,
    16,
    "expected isl + osl, 2048"
)]
#[case::graphs_not_ascending(
    "[1, 2, 4]",
    "[1, 4, 2]",
    14,
    52,
    "2 follows 4: the list is not ascending"
)]
#[case::graphs_repeat("[1, 2, 4]", "[1, 2, 2]", 14, 52, "not ascending")]
#[case::graph_of_zero("[1, 2, 4]", "[0, 2, 4]", 14, 46, "0 is out of range")]
#[case::no_graphs("[1, 2, 4]", "[]", 14, 45, "the list is empty")]
#[case::graph_maximum(
    "padding: true,",
    "padding: true, max_batch: 8,",
    14,
    43,
    "8 is not the last entry of the list, 4"
)]
#[case::graph_sizes_missing(
    "padding: true, batch_sizes: [1, 2, 4]",
    "padding: true",
    14,
    15,
    "give `max_batch` or `batch_sizes`"
)]
#[case::piecewise_missing(
    "{ max_tokens: 2048 }",
    "{}",
    15,
    14,
    "give `max_tokens` or `capture_tokens`"
)]
#[case::wait_ratio(
    "max_tokens_ratio: 0.45",
    "max_tokens_ratio: 1.5",
    16,
    54,
    "1.5 is out of range"
)]
// Silicon and tolerance.
#[case::zero_silicon("ttft_ms: 48.3", "ttft_ms: 0", 17, 21, "0 is no measured time")]
#[case::negative_silicon("tpot_ms: 2.8", "tpot_ms: -2.8", 17, 36, "-2.8 is no measured time")]
#[case::nan_silicon("tpot_ms: 2.8", "tpot_ms: .nan", 17, 36, "finite")]
#[case::negative_tolerance("ttft_rel: 0.01", "ttft_rel: -0.01", 18, 24, "-0.01 is out of range")]
#[case::zero_tolerance("ttft_rel: 0.01", "ttft_rel: 0", 18, 24, "0 is out of range")]
#[case::nan_tolerance("ttft_rel: 0.01", "ttft_rel: .nan", 18, 24, "finite")]
#[case::nan_word_tolerance("ttft_rel: 0.01", "ttft_rel: NaN", 18, 24, "expected")]
#[case::infinite_tolerance("ttft_rel: 0.01", "ttft_rel: .inf", 18, 24, "finite")]
#[case::overflowing_tolerance("ttft_rel: 0.01", "ttft_rel: 1e999", 18, 24, "not a finite number")]
#[case::no_reason(" reason: one-off stall,", "", 18, 12, "a tolerance without a reason")]
#[case::blank_reason("reason: one-off stall", "reason: ''", 18, 38, "the text is blank")]
#[case::no_end(", expires: 2027-03-01", "", 18, 12, "a tolerance without an end")]
#[case::no_band("ttft_rel: 0.01, ", "", 18, 12, "widens no band")]
#[case::date_shape("2027-03-01", "2027-3-1", 18, 62, "expected YYYY-MM-DD")]
#[case::date_of_no_calendar("2027-03-01", "2027-02-29", 18, 62, "no such day")]
#[case::silicon_date("2026-05-18", "18.05.2026", 17, 56, "is no date")]
// Attacks on the parser.
#[case::anchor("gpt-oss-120b", "&a gpt-oss-120b", 2, 11, "anchor")]
#[case::merge_key(
    "{ tp: 2, moe_tp: 2 }",
    "{ <<: { tp: 2 } }",
    5,
    13,
    "merge keys are refused"
)]
#[case::eager_beside_pieces(
    "  piecewise: { max_tokens: 2048 }",
    "  piecewise: { max_tokens: 2048 }\n  mixed_execution: eager",
    16,
    20,
    "the case captures piecewise graphs"
)]
#[case::no_pieces(
    "  piecewise: { max_tokens: 2048 }",
    "  mixed_execution: piecewise",
    15,
    20,
    "no piecewise graphs are captured"
)]
#[case::nothing_to_split_off(
    "  cuda_graph: { padding: true, batch_sizes: [1, 2, 4] }\n  piecewise: { max_tokens: 2048 }",
    "  mixed_execution: split",
    14,
    20,
    "there is no decode graph"
)]
#[case::cut_beside_batch_wait(
    "  overlap: true",
    "  chunked_prefill: true",
    13,
    20,
    "not modelled beside batch_wait"
)]
#[case::no_room_for_a_piece(
    "  max_num_tokens: 20000\n  overlap: true\n  cuda_graph: { padding: true, batch_sizes: [1, 2, 4] }\n  piecewise: { max_tokens: 2048 }\n  batch_wait: { timeout_iters: 50, max_tokens_ratio: 0.45 }",
    "  max_num_tokens: 31\n  chunked_prefill: true",
    12,
    19,
    "31 tokens hold no piece of a prompt"
)]
#[case::second_document("point: 28\n", "point: 28\n---\n", 3, 1, "only single YAML document")]
#[case::unclosed("{ tp: 2, moe_tp: 2 }", "{ tp: 2, moe_tp: 2", 6, 10, "invalid YAML")]
fn a_bad_serving_case_is_refused_with_its_place(
    #[case] from: &str,
    #[case] to: &str,
    #[case] line: u64,
    #[case] column: u64,
    #[case] part: &str,
) {
    let fault = read(&edited(VALID, from, to)).expect_err("the case must be refused");
    assert_fault(&fault, "c.yaml", line, column, part);
}

#[rstest]
#[case::unknown_op(OP, "op: moe", "op: gemm", 6, 5, "unknown value `gemm`")]
#[case::op_holds_silicon(OP, "tokens: 889", "silicon: 1", 7, 1, "unknown key `silicon`")]
#[case::no_tokens(OP, "tokens: 889", "tokens: 0", 7, 9, "0 is out of range")]
#[case::generation_beyond_tokens(
    OP,
    "op: moe",
    "op: moe\ngeneration: 890",
    7,
    13,
    "expected 0 to 889"
)]
#[case::no_measured_time(OP, "ms: 7.492", "ms: 0", 9, 26, "0 is no measured time")]
#[case::no_cell(
    OP,
    ", source: { table: t, row: r, column: c }",
    "",
    9,
    22,
    "missing key `source`"
)]
#[case::no_request(
    STEP,
    "context: [886], generation: { requests: 3, mean_kv: 1386 }",
    "context: []",
    6,
    7,
    "the step holds no request"
)]
#[case::prefix_of_nothing(
    STEP,
    "context: [886], ",
    "context: [886], prefix: [1, 2], ",
    6,
    33,
    "2 prefixes of 1 prompts"
)]
#[case::graphed_context(
    STEP,
    "execution: eager",
    "execution: full_graph",
    7,
    12,
    "a full graph serves generation requests only"
)]
#[case::unknown_execution(
    STEP,
    "execution: eager",
    "execution: piecewise",
    7,
    12,
    "unknown value `piecewise`"
)]
#[case::unknown_outcome(STEP, "what: gpu_span", "what: ttft", 9, 28, "unknown value `ttft`")]
#[case::nothing_measured(
    STEP,
    "\n  - { label: rank 0, what: gpu_span, ms: 50.5, source: { table: t, row: r, column: c } }",
    " []",
    8,
    11,
    "the list is empty"
)]
fn a_bad_op_or_step_case_is_refused_with_its_place(
    #[case] base: &str,
    #[case] from: &str,
    #[case] to: &str,
    #[case] line: u64,
    #[case] column: u64,
    #[case] part: &str,
) {
    let fault = read(&edited(base, from, to)).expect_err("the case must be refused");
    assert_fault(&fault, "c.yaml", line, column, part);
}

#[rstest]
#[case::heads("{ tp: 8, moe_tp: 8 }", ModelDims { heads: 60, ..GPT_OSS }, 17, "tp 8 does not divide the 60 attention heads")]
#[case::kv_heads("{ tp: 8, moe_tp: 8 }", ModelDims { kv_heads: 6, ..GPT_OSS }, 17, "tp 8 does not fit the 6 KV heads")]
#[case::experts("{ tp: 1, dp: 8, moe_ep: 8 }", ModelDims { experts: Some(12), ..GPT_OSS }, 35, "moe_ep 8 does not divide the 12 experts")]
#[case::no_experts("{ tp: 2, moe_ep: 2 }", ModelDims { experts: None, ..GPT_OSS }, 28, "a model without experts")]
#[case::empty_model("{ tp: 2, moe_tp: 2 }", ModelDims { heads: 0, ..GPT_OSS }, 17, "the 0 attention heads")]
fn a_topology_that_does_not_fit_the_model_is_refused(
    #[case] parallel: &str,
    #[case] dims: ModelDims,
    #[case] column: u64,
    #[case] part: &str,
) {
    let text = edited(VALID, "{ tp: 2, moe_tp: 2 }", parallel).replace(
        "  batch_wait: { timeout_iters: 50, max_tokens_ratio: 0.45 }\n",
        "",
    );
    let case = read(&text).expect("valid without the model");
    assert!(
        case.validate(&ModelDims {
            heads: 64,
            kv_heads: 8,
            experts: Some(128)
        })
        .is_ok()
    );
    let fault = case.validate(&dims).expect_err("must be refused");
    assert_fault(&fault, "c.yaml", 5, column, part);
}

#[test]
fn kv_heads_may_be_fewer_than_ranks() {
    let text = edited(VALID, "{ tp: 2, moe_tp: 2 }", "{ tp: 8 }");
    let dims = ModelDims {
        kv_heads: 2,
        ..GPT_OSS
    };
    assert_eq!(read(&text).expect("valid").validate(&dims), Ok(()));
}

#[test]
fn experts_need_a_precision() {
    let text = edited(VALID, "moe: w4a8_mxfp4_mxfp8, ", "");
    let case = read(&text).expect("valid without the model");
    let fault = case.validate(&GPT_OSS).expect_err("must be refused");
    assert_fault(&fault, "c.yaml", 2, 8, "their precision is not given");
    let dense = ModelDims {
        experts: None,
        ..GPT_OSS
    };
    assert_eq!(case.validate(&dense), Ok(()));
}

#[test]
fn what_is_left_out_takes_the_stated_default() {
    let text = "\
model: m
system: s
backend: { name: sglang, version: 0.5.12 }
parallel: { tp: 1, dp: 4, moe_ep: 2 }
workload: { isl: 10, osl: 10, concurrency: 3 }
serving: {}
";
    let case = serving(text);
    assert_eq!(case.point, None);
    assert_eq!((case.silicon.clone(), case.tolerance.clone()), (None, None));
    let scenario = serde_json::to_value(case.scenario()).expect("plain data");
    let expected = serde_json::json!({
        "deployment": {
            "model": "m",
            "system": "s",
            "backend": { "name": "sglang", "version": "0.5.12" },
            "parallel": { "tp": 1, "dp": 4, "moe_tp": 2, "moe_ep": 2 },
            "precision": {
                "gemm": "bfloat16", "qkv_proj": null, "moe": null, "kv_cache": "bfloat16",
                "attention": null
            },
            "kernels": {
                "moe": null, "gemm": null, "attention": null, "allreduce_fusion": null
            },
            "host_cpu": null,
        },
        "workload": {
            "isl": 10, "osl": 10, "concurrency": 3, "requests": 30,
            "length_ratio": 0.8, "seed": 0, "chat_template": false,
        },
        "serving": {
            "max_batch_size": 2048, "max_num_tokens": 16384, "max_seq_len": null, "overlap": true,
            "cuda_graph": null, "piecewise": null, "batch_wait": null,
            "attention_dp_balance": null, "capacity": "guaranteed_no_evict",
            "memory_fraction": null, "stream_interval": 1,
            "mixed_execution": "eager", "chunked_prefill": false,
            "max_prefill_tokens": null, "chunked_prefill_size": null,
            "scheduler_recv_interval": 1, "block_reuse": false,
        },
    });
    assert_eq!(scenario, expected);
}

#[test]
fn a_scenario_is_blind_to_silicon_point_path_and_tolerance() {
    let seen = serving(VALID).scenario();
    let mut other = VALID.to_owned();
    for (from, to) in [
        ("point: 28", "point: 99"),
        (
            "ttft_ms: 48.3, tpot_ms: 2.8",
            "ttft_ms: 1234.5, tpot_ms: 67.8",
        ),
        ("run: r1, date: 2026-05-18", "run: other, date: 2020-02-29"),
        (
            "ttft_rel: 0.01, reason: one-off stall",
            "parts_rel: 0.77, reason: other",
        ),
    ] {
        other = edited(&other, from, to);
    }
    let Ok(CaseFile::Serving(other)) = CaseFile::from_bytes("elsewhere.yaml", other.into()) else {
        panic!("the edited case must be valid");
    };
    assert_ne!(other.silicon, serving(VALID).silicon);
    assert_eq!(other.scenario(), seen);
    let text = serde_json::to_string(&seen).expect("plain data");
    for hidden in ["48.3", "point", "yaml", "stall", "2026", "silicon", "rel"] {
        assert!(
            !text.contains(hidden),
            "the scenario holds `{hidden}`: {text}"
        );
    }
}

// Whole files.

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn put(root: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = root.join(name);
    fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    fs::write(&path, content).expect("a file");
    path
}

#[rstest]
#[case::empty(b"".to_vec(), 1, 1, "the case is empty")]
#[case::comments_only(b"# nothing\n---\n\n".to_vec(), 1, 1, "the case is empty")]
#[case::garbage(b"model: a\n  \x9f\x00\xff\xfe".to_vec(), 2, 3, "not text: invalid UTF-8")]
#[case::zero_bytes(b"model: \0\0\0".to_vec(), 1, 8, "not text: a zero byte")]
#[case::scalar(b"hello".to_vec(), 1, 1, "expected a mapping")]
#[case::sequence(b"- a\n- b\n".to_vec(), 1, 1, "expected a mapping")]
#[case::null(b"~".to_vec(), 1, 1, "expected a mapping")]
#[case::deep_flow([b"model: ".to_vec(), b"[".repeat(100_000)].concat(), 1, 24, "recursion limit exceeded")]
#[case::deep_map([b"model: ".to_vec(), b"{a: ".repeat(100_000)].concat(), 1, 68, "nested too deep")]
#[case::deep_block((0..2_000).flat_map(|depth| format!("{}a:\n", " ".repeat(depth % 400)).into_bytes()).collect(), 17, 17, "nested too deep")]
#[case::many_nodes([b"model: [".to_vec(), b"1,".repeat(100_000), b"]".to_vec()].concat(), 1, 39999, "the YAML holds too much")]
#[case::billion_laughs(
    (0..9).fold(b"a0: &a0 [lol]\n".to_vec(), |text, n| {
        let alias = format!("*a{n},").repeat(9);
        [text, format!("a{}: &a{} [{alias}]\n", n + 1, n + 1).into_bytes()].concat()
    }),
    1, 9, "anchor"
)]
fn a_hostile_file_is_refused_with_its_place(
    #[case] bytes: Vec<u8>,
    #[case] line: u64,
    #[case] column: u64,
    #[case] part: &str,
) {
    let folder = folder();
    let path = put(folder.path(), "bad.yaml", &bytes);
    let fault = CaseFile::load(&path).expect_err("must be refused");
    assert_fault(&fault, path.to_str().expect("UTF-8"), line, column, part);
}

#[test]
fn a_50_mb_yaml_is_refused_by_its_size() {
    let folder = folder();
    let path = put(folder.path(), "big.yaml", "a: 1\n".repeat(10_000_000));
    let fault = CaseFile::load(&path).expect_err("must be refused");
    assert_fault(
        &fault,
        path.to_str().expect("UTF-8"),
        1,
        1,
        "larger than 1048576 bytes",
    );
}

#[test]
fn the_size_limit_is_exact() {
    let folder = folder();
    let padded = |bytes: u64| {
        let fill = usize::try_from(bytes).expect("fits") - VALID.len() - 2;
        format!("{VALID}#{}\n", "x".repeat(fill))
    };
    let most = put(folder.path(), "most.yaml", padded(FILE_BYTES_MAX));
    assert!(CaseFile::load(most).is_ok());
    let more = put(folder.path(), "more.yaml", padded(FILE_BYTES_MAX + 1));
    assert!(CaseFile::load(more).is_err());
}

#[test]
fn a_missing_file_and_a_folder_are_refused() {
    let folder = folder();
    let missing = folder.path().join("none.yaml");
    let fault = CaseFile::load(&missing).expect_err("must be refused");
    assert_eq!(fault.place.file, missing);
    assert!(fault.what.contains("cannot read the case"), "{fault}");
    let fault = CaseFile::load(folder.path()).expect_err("must be refused");
    assert!(fault.what.contains("not a file"), "{fault}");
}

// The tree.

#[test]
fn names_are_sorted_and_need_no_readable_case() {
    let folder = folder();
    for name in ["b/2.yaml", "b/10.yaml", "a/x.y.yaml", "c.yaml"] {
        put(folder.path(), name, b"\xff not a case");
    }
    let tree = Tree::open(folder.path()).expect("a folder");
    let names = tree.names().expect("names");
    assert_eq!(names, ["a/x.y", "b/10", "b/2", "c"]);
    for name in names {
        let path = tree.path_of(&name).expect("a case");
        assert_eq!(path, folder.path().join(format!("{name}.yaml")));
    }
}

#[test]
fn an_empty_cases_folder_is_refused() {
    let folder = folder();
    fs::create_dir(folder.path().join("gpt")).expect("a folder");
    let fault = Tree::open(folder.path()).and_then(|tree| tree.names());
    let fault = fault.expect_err("must be refused");
    assert_eq!(fault.place.file, folder.path());
    assert!(fault.what.contains("the cases folder is empty"), "{fault}");
}

#[test]
fn a_missing_cases_folder_is_refused() {
    let folder = folder();
    let root = folder.path().join("none");
    let fault = Tree::open(&root).expect_err("must be refused");
    assert_eq!(fault.place.file, root);
    let file = put(folder.path(), "file.yaml", VALID);
    let fault = Tree::open(&file).expect_err("must be refused");
    assert!(fault.what.contains("not a folder"), "{fault}");
}

#[rstest]
#[case::readme("README.md", "does not end in .yaml")]
#[case::short_ending("a/b.yml", "does not end in .yaml")]
#[case::hidden("a/.b.yaml.swp", "does not end in .yaml")]
#[case::space("a/b c.yaml", "characters that a case name may not")]
#[case::newline("a/b\nc.yaml", "characters that a case name may not")]
fn other_files_among_the_cases_are_refused(#[case] name: &str, #[case] part: &str) {
    let folder = folder();
    put(folder.path(), "ok.yaml", VALID);
    let path = put(folder.path(), name, VALID);
    let tree = Tree::open(folder.path()).expect("a folder");
    let fault = tree.names().expect_err("must be refused");
    assert_eq!(fault.place.file, path);
    assert!(fault.to_string().contains(part), "{fault}");
}

#[rstest]
#[case::parent("../outside", "leaves the cases folder")]
#[case::inner_parent("a/../../outside", "leaves the cases folder")]
#[case::absolute("/etc/hosts", "an absolute path")]
#[case::empty("", "empty")]
#[case::doubled("a//b", "leaves the cases folder")]
#[case::backslash("..\\outside", "characters that a case name may not")]
#[case::missing("a/none", "no case `a/none`")]
#[case::with_ending("ok.yaml", "no case `ok.yaml`")]
fn a_case_path_outside_the_folder_is_refused(#[case] name: &str, #[case] part: &str) {
    let parent = folder();
    put(parent.path(), "outside.yaml", VALID);
    let root = parent.path().join("cases");
    put(&root, "ok.yaml", VALID);
    let tree = Tree::open(&root).expect("a folder");
    assert!(tree.path_of("ok").is_ok());
    let fault = tree.path_of(name).expect_err("must be refused");
    assert!(fault.to_string().contains(part), "{fault}");
    assert!(
        fault.help.contains("its path in the cases folder"),
        "{fault}"
    );
}

#[cfg(unix)]
#[test]
fn a_link_that_leaves_the_folder_is_refused() {
    use std::os::unix::fs::symlink;
    let parent = folder();
    let outside = put(parent.path(), "outside.yaml", VALID);
    let root = parent.path().join("cases");
    put(&root, "ok.yaml", VALID);
    symlink(&outside, root.join("link.yaml")).expect("a link");
    symlink(root.join("ok.yaml"), root.join("again.yaml")).expect("a link");
    let tree = Tree::open(&root).expect("a folder");
    let fault = tree.path_of("link").expect_err("must be refused");
    assert!(fault.what.contains("leaves the cases folder"), "{fault}");
    let fault = tree.path_of("again").expect_err("must be refused");
    assert!(fault.what.contains("a link among the cases"), "{fault}");
    let fault = tree.names().expect_err("must be refused");
    assert!(fault.what.contains("a link among the cases"), "{fault}");
    // The folder itself may be reached through a link.
    let real = parent.path().join("real");
    put(&real, "a/ok.yaml", VALID);
    let linked = parent.path().join("linked");
    symlink(&real, &linked).expect("a link");
    let tree = Tree::open(&linked).expect("a folder");
    assert_eq!(tree.names().expect("names"), ["a/ok"]);
    assert_eq!(tree.path_of("a/ok"), Ok(linked.join("a/ok.yaml")));
}

#[test]
fn a_duplicated_point_names_both_files() {
    let cases: Vec<Case> = [("a.yaml", 28), ("b.yaml", 29), ("c.yaml", 28)]
        .into_iter()
        .map(|(file, point)| {
            let text = edited(VALID, "point: 28", &format!("# moved\npoint: {point}"));
            match CaseFile::from_bytes(file, text.into_bytes()) {
                Ok(CaseFile::Serving(case)) => case,
                other => panic!("expected a serving case, got {other:?}"),
            }
        })
        .collect();
    assert_eq!(Tree::check_points(&cases[..2]), Ok(()));
    let fault = Tree::check_points(&cases).expect_err("must be refused");
    assert_fault(
        &fault,
        "c.yaml",
        2,
        8,
        "point 28 is also the point of a.yaml",
    );
}

// The checked-in cases.

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn all_cases() -> BTreeMap<String, CaseFile> {
    let tree = Tree::open(repository("cases")).expect("cases/");
    let names = tree.names().expect("names");
    names
        .into_iter()
        .map(|name| {
            let path = tree.path_of(&name).expect("a case");
            let case = CaseFile::load(path).unwrap_or_else(|fault| panic!("{fault}"));
            (name, case)
        })
        .collect()
}

#[test]
fn every_checked_in_case_is_valid_and_points_are_unique() {
    let cases = all_cases();
    for case in cases.values() {
        case.validate(&dims(&case.deployment().model))
            .unwrap_or_else(|fault| panic!("{fault}"));
    }
    let serving = cases.values().filter_map(|case| match case {
        CaseFile::Serving(case) => Some(case),
        _ => None,
    });
    Tree::check_points(serving).unwrap_or_else(|fault| panic!("{fault}"));
}

/// Straight from the checked-in config: what a model needs to be planned is no matter of its cases.
fn dims(model: &str) -> ModelDims {
    let path = repository(&format!("data/models/{model}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|fault| panic!("{path:?}: {fault}"));
    let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let config = config.get("text_config").unwrap_or(&config);
    let count = |key: &str| {
        config
            .get(key)
            .and_then(serde_json::Value::as_u64)
            .map(|count| u32::try_from(count).expect("small"))
    };
    ModelDims {
        heads: count("num_attention_heads").expect("heads"),
        kv_heads: count("num_key_value_heads").expect("KV heads"),
        experts: ["num_local_experts", "num_experts", "n_routed_experts"]
            .into_iter()
            .find_map(count),
    }
}

#[rstest]
#[case("gpt-oss-120b", 64, 8, Some(128))]
#[case("minimax-m2.5", 48, 8, Some(256))]
#[case("deepseek-r1-0528", 128, 128, Some(256))]
#[case("qwen3.5-397b-a17b", 32, 2, Some(512))]
#[case("llama-3.1-70b", 64, 8, None)]
#[case("qwen3-30b-a3b", 32, 4, Some(128))]
fn a_checked_in_config_is_the_models(
    #[case] model: &str,
    #[case] heads: u32,
    #[case] kv_heads: u32,
    #[case] experts: Option<u32>,
) {
    let expected = ModelDims {
        heads,
        kv_heads,
        experts,
    };
    assert_eq!(dims(model), expected);
    // Its bytes are the ones its provenance names.
    let text = fs::read_to_string(repository("data/models/PROVENANCE.yaml")).expect("provenance");
    let provenance: BTreeMap<String, BTreeMap<String, String>> =
        serde_yaml::from_str(&text).expect("provenance");
    let bytes = fs::read(repository(&format!("data/models/{model}.json"))).expect("a config");
    let digest: String = Sha256::digest(&bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(provenance[model]["sha256"], digest);
}

#[test]
fn the_31_points_can_be_picked_by_their_name() {
    let cases = all_cases();
    let picked = |name: &&String| name.contains("gpt-oss-120b/b200");
    assert_eq!(cases.keys().filter(picked).count(), 31);
}

#[test]
fn op_and_step_cases_hold_the_profiled_values() {
    let mut cases = all_cases();
    cases.retain(|_, case| !matches!(case, CaseFile::Serving(_)));
    let mut ops = BTreeMap::new();
    let mut steps = BTreeMap::new();
    let mut small = BTreeMap::new();
    for (name, case) in cases {
        match case {
            CaseFile::Op(case) => {
                let scenario = case.scenario();
                assert_eq!(scenario.count, Count::PerLayer, "{name}");
                let times: Vec<f64> = case.measured.iter().map(|one| one.ms).collect();
                ops.insert((scenario.op, scenario.tokens, scenario.generation), times);
            }
            CaseFile::Step(case) if name.contains("qwen3.5-0.8b") => {
                let scenario = case.scenario();
                let generation = scenario.generation.expect("every step decodes");
                // Derived: prompts of 19,000 tokens and half of an output of 3,100.
                assert_eq!(generation.mean_kv, 19_000 + 3_100 / 2);
                for (piece, before) in scenario.context.iter().zip(&scenario.prefix) {
                    let last = piece + before == 19_000;
                    assert!(last || (*piece, *before) == (7808, 7808 / 2), "{name}");
                }
                let times: Vec<f64> = case.measured.iter().map(|one| one.ms).collect();
                let tokens = scenario.context.first().copied();
                small.insert((tokens.unwrap_or(0), generation.requests), times);
            }
            CaseFile::Step(case) => {
                let scenario = case.scenario();
                let generation = scenario.generation.expect("every step decodes");
                // Derived: mean prompt 926.7 and half of the mean output, 917.725.
                assert_eq!(
                    generation.mean_kv,
                    (926.7_f64 + 917.725 / 2.0).round() as u32
                );
                let times: Vec<(Outcome, f64)> =
                    case.measured.iter().map(|one| (one.what, one.ms)).collect();
                let key = (scenario.context, generation.requests, scenario.execution);
                steps.insert(key, times);
            }
            CaseFile::Serving(_) => unreachable!("filtered above"),
        }
    }
    assert_eq!(
        small,
        BTreeMap::from([
            ((0, 384), vec![22.2]),
            ((212, 383), vec![43.0]),
            ((1546, 383), vec![45.0]),
            ((3319, 383), vec![48.0]),
            ((5815, 383), vec![55.0]),
            ((7808, 383), vec![68.0, 74.0]),
        ])
    );
    assert_eq!(
        ops,
        BTreeMap::from([
            ((OpKind::Moe, 889, 3), vec![7.492, 7.483]),
            ((OpKind::Moe, 1017, 3), vec![8.040, 8.062]),
            ((OpKind::AllreduceNorm, 889, 3), vec![1.601]),
            ((OpKind::AllreduceNorm, 1017, 3), vec![1.772]),
        ])
    );
    let mixed = |first, second, wait| {
        vec![
            (Outcome::GpuSpan, first),
            (Outcome::GpuSpan, second),
            (Outcome::RankWait, wait),
        ]
    };
    assert_eq!(
        steps,
        BTreeMap::from([
            (
                (vec![886], 3, StepExecution::Eager),
                mixed(50.529, 50.597, 21.946)
            ),
            (
                (vec![1014], 3, StepExecution::Eager),
                mixed(41.100, 41.128, 23.098)
            ),
            (
                (vec![], 4, StepExecution::FullGraph),
                vec![(Outcome::GpuSpan, 2.893), (Outcome::GpuSpan, 2.890)],
            ),
        ])
    );
}

#[test]
fn the_checked_in_schema_is_current() {
    let fresh = serde_json::to_string_pretty(&json_schema()).expect("plain data") + "\n";
    let checked_in = repository("schema/case.schema.json");
    if fs::read_to_string(&checked_in).ok().as_deref() != Some(fresh.as_str()) {
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("case.schema.json");
        fs::write(&copy, fresh).expect("the fresh schema");
        panic!(
            "{} is out of date: copy {} over it",
            checked_in.display(),
            copy.display()
        );
    }
}

// No input panics.

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        let _ = CaseFile::from_bytes("c.yaml", bytes);
    }

    #[test]
    fn random_yaml_like_text_never_panics(text in "[-a-z0-9:{}\\[\\],&*#!|>'\"%@~? \n\t.]{0,256}") {
        let _ = read(&text);
    }

    #[test]
    fn mutated_cases_never_panic_and_faults_have_a_place(
        base in prop_oneof![Just(VALID), Just(OP), Just(STEP)],
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..6),
    ) {
        let mut bytes = base.as_bytes().to_vec();
        for (index, byte, edit) in edits {
            let at = index.index(bytes.len());
            match edit {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => { bytes.remove(at); }
            }
        }
        match CaseFile::from_bytes("c.yaml", bytes) {
            Ok(case) => { let _ = case.validate(&GPT_OSS); }
            Err(fault) => {
                prop_assert!(fault.place.line.is_some_and(|line| line >= 1), "{fault}");
                prop_assert!(fault.place.column.is_some_and(|column| column >= 1), "{fault}");
            }
        }
    }

    #[test]
    fn any_numbers_never_panic(
        tp in any::<u32>(), dp in any::<u32>(), moe_ep in any::<u32>(),
        isl in any::<u32>(), osl in any::<u32>(), concurrency in any::<u32>(),
        ratio in any::<f64>(), heads in any::<u32>(),
    ) {
        let text = VALID
            .replace("{ tp: 2, moe_tp: 2 }", &format!("{{ tp: {tp}, dp: {dp}, moe_ep: {moe_ep} }}"))
            .replace(
                "isl: 1024, osl: 1024, concurrency: 4",
                &format!("isl: {isl}, osl: {osl}, concurrency: {concurrency}, length_ratio: {ratio:?}"),
            );
        if let Ok(case) = read(&text) {
            let _ = case.validate(&ModelDims { heads, kv_heads: heads, experts: Some(heads) });
        }
    }

    #[test]
    fn any_case_name_stays_in_the_folder(name in "[./a-z\\\\ ]{0,24}") {
        let root = repository("cases");
        let tree = Tree::open(&root).expect("cases/");
        if let Ok(path) = tree.path_of(&name) {
            prop_assert!(path.starts_with(&root));
        }
    }
}
