//! Cases from the runtimes' own settings: exact text, everything else listed, bad input located.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use proptest::prelude::*;
use rstest::rstest;
use stepgate::case::{CaseFile, ImportRequest, Imported, NoteKind, import_bytes};
use stepgate::model::{BackendName, GemmDtype, MoeDtype};
use stepgate::timing::InputError;

/// As an InferenceX launch script writes it.
const TRTLLM: &str = "\
# extra-llm-api-config.yml
cuda_graph_config:
    enable_padding: true
    max_batch_size: 64
enable_attention_dp: false
print_iter_log: true
kv_cache_config:
    dtype: fp8
    free_gpu_memory_fraction: 0.8
    enable_block_reuse: false
stream_interval: 10
moe_config:
    backend: TRTLLM
    use_low_precision_moe_combine: true
num_postprocess_workers: 4
max_num_tokens: 8192
max_seq_len: 8192
tensor_parallel_size: 8
moe_expert_parallel_size: 1
batch_wait_timeout_iters: 40
batch_wait_max_tokens_ratio: 0.8
enable_chunked_prefill: false
disable_overlap_scheduler: false
scheduler_config:
    capacity_scheduler_policy: MAX_UTILIZATION
    context_chunking_policy: FIRST_COME_FIRST_SERVED
torch_compile_config:
    capture_num_tokens: [1, 2, 4, 8192, 256]
    enable_piecewise_cuda_graph: true
speculative_config: null
";

const SGLANG: &str = "\
#!/bin/sh
NCCL_NVLS_ENABLE=1 python3 -m sglang.launch_server --model-path Qwen/Qwen3.5-397B-A17B-FP8 \\
  --host 0.0.0.0 --port=8888 --trust-remote-code \\
  --tensor-parallel-size 8 --ep-size 8 --quantization fp8 \\
  --mem-fraction-static 0.8 --cuda-graph-max-bs 64 --chunked-prefill-size 16384 \\
  --max-prefill-tokens 16384 --scheduler-recv-interval 30 --max-running-requests 128 \\
  --kv-cache-dtype fp8_e4m3 --moe-runner-backend flashinfer_trtllm \\
  --attention-backend trtllm_mha --disable-radix-cache --stream-interval 50 \\
  --context-length 2068 --enable-flashinfer-allreduce-fusion \\
  --api-key s3cret > server.log
";

fn request(runtime: BackendName) -> ImportRequest {
    ImportRequest {
        runtime,
        version: match runtime {
            BackendName::Trtllm => "1.3.0rc14",
            BackendName::Sglang => "0.5.12",
        }
        .to_owned(),
        model: "deepseek-r1-0528".to_owned(),
        system: "b200_sxm".to_owned(),
        isl: 1024,
        osl: 1024,
        concurrency: 64,
        tp: None,
        ep: None,
        dp: None,
        gemm: Some(GemmDtype::Fp8Block),
        qkv_proj: None,
        max_batch_size: None,
        max_num_tokens: None,
        max_seq_len: None,
        moe: Some(MoeDtype::Fp8Block),
    }
}

fn import(text: &str, request: &ImportRequest) -> Result<Imported, InputError> {
    import_bytes("settings", text.as_bytes().to_vec(), request)
}

fn trtllm(text: &str) -> Result<Imported, InputError> {
    import(text, &request(BackendName::Trtllm))
}

fn sglang(text: &str) -> Result<Imported, InputError> {
    import(text, &request(BackendName::Sglang))
}

fn notes(imported: &Imported, kind: NoteKind) -> Vec<String> {
    imported
        .notes
        .iter()
        .filter(|note| note.kind == kind)
        .map(ToString::to_string)
        .collect()
}

#[test]
fn trtllm_options_become_a_case() {
    let imported = trtllm(TRTLLM).expect("a case");
    let expected = "\
# Imported by `stepgate case import` from settings.
# Not understood, so not in the case:
#   line 14: moe_config.use_low_precision_moe_combine: true
#   line 30: speculative_config: null
# Without effect on the prediction:
#   line 6: print_iter_log: true
#   line 15: num_postprocess_workers: 4
#   line 22: enable_chunked_prefill: false
#   line 26: scheduler_config.context_chunking_policy: FIRST_COME_FIRST_SERVED
# Not set:
#   max_batch_size: the case has the default, 2048
model: deepseek-r1-0528
system: b200_sxm
backend: { name: trtllm, version: 1.3.0rc14 }
parallel: { tp: 8, moe_tp: 8 }
precision: { gemm: fp8_block, moe: fp8_block, kv_cache: fp8 }
kernels: { moe: trtllm_gen }
workload: { isl: 1024, osl: 1024, concurrency: 64 }
serving:
  max_num_tokens: 8192
  max_seq_len: 8192
  overlap: true
  cuda_graph: { padding: true, max_batch: 64 }
  piecewise: { capture_tokens: [1, 2, 4, 256, 8192] }
  batch_wait: { timeout_iters: 40, max_tokens_ratio: 0.8 }
  capacity: max_utilization
  memory_fraction: 0.8
  stream_interval: 10
  block_reuse: false
";
    assert_eq!(imported.text, expected);
}

#[test]
fn sglang_arguments_become_a_case() {
    let imported = sglang(SGLANG).expect("a case");
    let expected = "\
# Imported by `stepgate case import` from settings.
# Not understood, so not in the case:
#   line 2: NCCL_NVLS_ENABLE=1
#   line 4: --quantization fp8
#   line 10: --api-key ***
# Without effect on the prediction:
#   line 2: --model-path Qwen/Qwen3.5-397B-A17B-FP8
#   line 3: --host 0.0.0.0
#   line 3: --port 8888
#   line 3: --trust-remote-code
model: deepseek-r1-0528
system: b200_sxm
backend: { name: sglang, version: 0.5.12 }
parallel: { tp: 8, moe_tp: 1, moe_ep: 8 }
precision: { gemm: fp8_block, moe: fp8_block, kv_cache: fp8 }
kernels: { moe: trtllm_gen, attention: trtllm_mha, allreduce_fusion: true }
workload: { isl: 1024, osl: 1024, concurrency: 64 }
serving:
  max_batch_size: 128
  max_seq_len: 2068
  cuda_graph: { padding: true, max_batch: 64 }
  memory_fraction: 0.8
  stream_interval: 50
  max_prefill_tokens: 16384
  chunked_prefill_size: 16384
  scheduler_recv_interval: 30
  block_reuse: false
";
    assert_eq!(imported.text, expected);
}

/// The recipes' settings, as a launch script writes them, give the checked-in case's scenario.
#[test]
fn the_recipe_of_a_point_gives_its_case() {
    let text = TRTLLM
        .replace("MAX_UTILIZATION", "GUARANTEED_NO_EVICT")
        .replace("    capture_num_tokens: [1, 2, 4, 8192, 256]\n", &{
            let counts = (0..8)
                .map(|power| 1 << power)
                .chain((1..=32).map(|n| n * 256));
            let counts: Vec<String> = counts.map(|count: u32| count.to_string()).collect();
            format!("    capture_num_tokens: [{}]\n", counts.join(", "))
        });
    let imported = trtllm(&text).expect("a case");
    let Ok(CaseFile::Serving(made)) = CaseFile::from_bytes("made", imported.text.into_bytes())
    else {
        panic!("a serving case");
    };
    let checked_in = "cases/deepseek-r1-0528/b200-trtllm-fp8/tp8/1024-1024-c64.yaml";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(checked_in);
    let Ok(CaseFile::Serving(case)) = CaseFile::load(path) else {
        panic!("a serving case");
    };
    let (mut made, mut case) = (made.scenario(), case.scenario());
    // Neither is in the options file.
    made.deployment.kernels = case.deployment.kernels;
    // One lists what the other has as the default list.
    for scenario in [&mut made, &mut case] {
        let piecewise = scenario.serving.piecewise.as_mut().expect("piecewise");
        piecewise.capture_tokens = Some(piecewise.token_counts());
    }
    assert_eq!(made, case);
}

#[test]
fn attention_dp_spreads_the_gpus_and_has_its_own_wait() {
    let text = TRTLLM
        .replace("enable_attention_dp: false", "enable_attention_dp: true")
        .replace(
            "stream_interval: 10\n",
            "attention_dp_config: { enable_balance: true, timeout_iters: 60 }\n",
        )
        .replace("moe_expert_parallel_size: 1", "moe_expert_parallel_size: 8");
    let imported = trtllm(&text).expect("a case");
    for line in [
        "parallel: { tp: 1, dp: 8, moe_tp: 1, moe_ep: 8 }\n",
        "  attention_dp_balance: { batching_wait_iters: 10, timeout_iters: 60 }\n",
        "#   line 20: batch_wait_timeout_iters: 40 (not with attention DP)\n",
        "#   line 21: batch_wait_max_tokens_ratio: 0.8 (not with attention DP)\n",
        "#   attention_dp_config.batching_wait_iters: the case has the default, 10\n",
    ] {
        assert!(imported.text.contains(line), "{line}{}", imported.text);
    }
    assert!(
        !imported.text.contains("batch_wait: {"),
        "{}",
        imported.text
    );
}

#[test]
fn options_of_the_command_line_stand_behind_the_file() {
    let mut flags = request(BackendName::Trtllm);
    flags.max_num_tokens = Some(4096);
    flags.max_batch_size = Some(32);
    let imported = import("max_batch_size: 64\ncuda_graph_config: null\n", &flags).expect("a case");
    assert!(imported.text.contains("  max_batch_size: 64\n"));
    assert!(imported.text.contains("  max_num_tokens: 4096\n"));
    assert_eq!(
        notes(&imported, NoteKind::NoEffect),
        ["--max-batch-size 32: the file sets it too, and goes first"]
    );
    let imported = trtllm("max_batch_size: 64\ncuda_graph_config: null\n").expect("a case");
    assert!(imported.text.contains("  max_num_tokens: 8192\n"));
    let said = "max_num_tokens: the case has trtllm-serve's default, 8192";
    assert!(notes(&imported, NoteKind::Default).contains(&said.to_owned()));
}

#[test]
fn what_is_not_set_is_said() {
    let mut bare = request(BackendName::Trtllm);
    (bare.gemm, bare.moe) = (None, None);
    let text = "cuda_graph_config: { batch_sizes: [4, 1, 2, 2] }\nmax_num_tokens: 8192\n";
    let imported = import(text, &bare).expect("a case");
    assert_eq!(
        notes(&imported, NoteKind::Default),
        [
            "cuda_graph_config.enable_padding: the case has false",
            "kv_cache_config.enable_block_reuse: the case has true",
            "max_batch_size: the case has the default, 2048",
            "--gemm: the case has the default, bfloat16",
            "--moe: a model with experts needs their precision",
            "precision of the KV cache: the case has the default, bfloat16; a quantised checkpoint \
             may choose fp8",
        ]
    );
    let graph = "  cuda_graph: { padding: false, batch_sizes: [1, 2, 4] }\n";
    assert!(imported.text.contains(graph), "{}", imported.text);

    let imported = sglang("--disable-cuda-graph --cuda-graph-max-bs 8 --tp 2").expect("a case");
    assert!(!imported.text.contains("cuda_graph:"), "{}", imported.text);
    assert_eq!(
        notes(&imported, NoteKind::NoEffect),
        ["line 1: --cuda-graph-max-bs 8 (graphs are disabled)"]
    );
    assert_eq!(
        notes(&imported, NoteKind::Default)[..4],
        [
            "--disable-radix-cache: the case has block_reuse true",
            "--chunked-prefill-size: its default depends on the GPU; in the case prompts are never \
             cut",
            "--mem-fraction-static: the KV cache is bounded by all of the memory",
            "--max-running-requests: the case has the default, 2048",
        ]
    );
}

#[test]
fn names_that_no_case_has_are_listed() {
    let text = TRTLLM
        .replace("backend: TRTLLM", "backend: WIDEEP")
        .replace("dtype: fp8", "dtype: auto")
        .replace("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS");
    let imported = trtllm(&text).expect("a case");
    let unknown = notes(&imported, NoteKind::Unknown);
    assert!(unknown.contains(&"line 13: moe_config.backend: WIDEEP".to_owned()));
    let policy = "line 26: scheduler_config.context_chunking_policy: EQUAL_PROGRESS";
    assert!(unknown.contains(&policy.to_owned()));
    let auto = "line 8: kv_cache_config.dtype: auto (the runtime's choice, not recorded)";
    assert!(notes(&imported, NoteKind::NoEffect).contains(&auto.to_owned()));
    assert!(!imported.text.contains("kernels:"), "{}", imported.text);
}

#[test]
fn a_setting_cannot_break_out_of_its_comment() {
    let text = format!("{TRTLLM}evil: \"x\\nmodel: other\"\n\"k\\n y\": 1\n");
    let imported = trtllm(&text).expect("a case");
    assert!(
        imported
            .text
            .contains("#   line 31: evil: x model: other\n")
    );
    assert!(imported.text.contains("#   line 32: k  y: 1\n"));
}

#[track_caller]
fn assert_fault(found: Result<Imported, InputError>, place: Option<(u64, u64)>, part: &str) {
    let fault = found.expect_err("must be refused");
    assert!(fault.to_string().contains(part), "{fault}");
    let found = fault.place.line.zip(fault.place.column);
    assert_eq!(found, place, "{fault}");
    assert!(!fault.help.is_empty(), "{fault}");
}

#[rstest]
#[case::word("max_num_tokens: 8192", "max_num_tokens: many", Some((16, 17)), "expected a whole number")]
#[case::negative("stream_interval: 10", "stream_interval: -1", Some((11, 18)), "expected a whole number")]
#[case::huge("stream_interval: 10", "stream_interval: 99999999999", Some((11, 18)), "expected a whole number")]
#[case::flag("enable_attention_dp: false", "enable_attention_dp: 1", Some((5, 22)), "expected true or false")]
#[case::list("[1, 2, 4, 8192, 256]", "8192", Some((28, 25)), "expected a list")]
#[case::entry("[1, 2, 4, 8192, 256]", "[1, x]", Some((28, 29)), "expected a whole number")]
#[case::ratio("free_gpu_memory_fraction: 0.8", "free_gpu_memory_fraction: 1.8", Some((9, 31)), "1.8 is out of range")]
#[case::zero("max_batch_size: 64", "max_batch_size: 0", Some((4, 21)), "0 is out of range")]
#[case::tokens("max_num_tokens: 8192", "max_num_tokens: 512", Some((16, 17)), "cannot hold the longest prompt")]
#[case::sequence("max_seq_len: 8192", "max_seq_len: 100", Some((17, 14)), "cannot hold the longest request")]
#[case::gpus("tensor_parallel_size: 8", "tensor_parallel_size: 16", Some((18, 23)), "16 is out of range")]
#[case::experts("moe_expert_parallel_size: 1", "moe_expert_parallel_size: 3", Some((19, 27)), "does not divide 8 GPUs")]
#[case::sizes("    max_batch_size: 64\n", "", Some((3, 5)), "the captured batch sizes are not given")]
#[case::counts("    capture_num_tokens: [1, 2, 4, 8192, 256]\n", "", Some((28, 34)), "the captured token counts are not given")]
#[case::twice("stream_interval: 10", "stream_interval: 10\nstream_interval: 20", Some((12, 1)), "duplicate key")]
#[case::anchor("stream_interval: 10", "stream_interval: &a 10", Some((11, 21)), "anchor")]
fn bad_options_are_located(
    #[case] from: &str,
    #[case] to: &str,
    #[case] place: Option<(u64, u64)>,
    #[case] part: &str,
) {
    assert_eq!(TRTLLM.matches(from).count(), 1, "{from}");
    assert_fault(trtllm(&TRTLLM.replacen(from, to, 1)), place, part);
}

#[rstest]
#[case::no_graphs("max_num_tokens: 8192", None, "the decode graphs are not given")]
#[case::list("- a", Some((1, 1)), "no mapping")]
#[case::empty("# nothing", Some((1, 1)), "the settings file is empty")]
#[case::invalid("a: [", Some((1, 4)), "invalid YAML")]
fn a_file_that_is_no_options_file_is_located(
    #[case] text: &str,
    #[case] place: Option<(u64, u64)>,
    #[case] part: &str,
) {
    assert_fault(trtllm(text), place, part);
}

#[rstest]
#[case::word("--tp eight", Some((1, 6)), "expected a whole number")]
#[case::inline("--cuda-graph-max-bs 4\n  --tp=x", Some((2, 8)), "expected a whole number")]
#[case::missing("--tp --cuda-graph-max-bs 4", Some((1, 1)), "the flag needs a value")]
#[case::valued_flag("--disable-radix-cache=1", Some((1, 23)), "the flag takes no value")]
#[case::twice("--tp 8 --tp-size 4", Some((1, 18)), "given twice")]
#[case::no_graphs("--tp 8", None, "the captured batch sizes are not given")]
#[case::replicas("--cuda-graph-max-bs 4 --tp 2 --dp 2", Some((1, 35)), "runs replicas")]
#[case::uneven(
    "--cuda-graph-max-bs 4 --tp 4 --dp 3 --enable-dp-attention",
    Some((1, 35)),
    "does not divide 4 GPUs"
)]
#[case::quote("--tp 8 --host 'a", Some((1, 15)), "never closed")]
#[case::range("--cuda-graph-max-bs 0", Some((1, 21)), "0 is out of range")]
#[case::fraction("--cuda-graph-max-bs 4 --mem-fraction-static 2", Some((1, 45)), "2 is out of range")]
fn bad_arguments_are_located(
    #[case] text: &str,
    #[case] place: Option<(u64, u64)>,
    #[case] part: &str,
) {
    assert_fault(sglang(text), place, part);
}

#[test]
fn arguments_of_the_command_fill_in_and_must_agree() {
    let text = "--cuda-graph-bs 1 2 4";
    let mut wide = request(BackendName::Sglang);
    (wide.tp, wide.ep, wide.dp) = (Some(8), Some(4), Some(2));
    let imported = import(text, &wide).expect("a case");
    let parallel = "parallel: { tp: 4, dp: 2, moe_tp: 2, moe_ep: 4 }\n";
    assert!(imported.text.contains(parallel), "{}", imported.text);
    let fault = import(&format!("{text} --tp 4"), &wide);
    assert_fault(
        fault,
        Some((1, 28)),
        "4 in the file, --tp 8 on the command line",
    );

    wide.isl = 0;
    let fault = import(text, &wide).expect_err("must be refused");
    assert_eq!(fault.place.file, Path::new("--isl"), "{fault}");
    wide.isl = 1024;
    wide.model = "../secret".to_owned();
    let fault = import(text, &wide).expect_err("must be refused");
    assert_eq!(fault.place.file, Path::new("--model"), "{fault}");
}

// The binary.

fn stepgate(folder: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stepgate"))
        .current_dir(folder)
        .args(["case", "import", "extra.yml", "--runtime", "trtllm"])
        .args(["--version", "1.3.0rc14", "--model", "deepseek-r1-0528"])
        .args(["--system", "b200_sxm", "--isl", "1024", "--osl", "1024"])
        .args([
            "--concurrency",
            "64",
            "--gemm",
            "fp8_block",
            "--moe",
            "fp8_block",
        ])
        .args(more)
        .output()
        .expect("the binary runs")
}

fn options() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("extra.yml"), TRTLLM).expect("write");
    let out = folder.path().join("case.yaml");
    (folder, out)
}

#[test]
fn the_binary_prints_the_case_and_lists_the_rest_on_stderr() {
    let (folder, _) = options();
    let output = stepgate(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(0));
    let expected = trtllm(TRTLLM).expect("a case").text;
    let expected = expected.replacen("settings.", "extra.yml.", 1);
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "\
extra.yml: NOT IN THE CASE (not understood or not modelled): line 14: moe_config.use_low_precision_moe_combine: true
extra.yml: NOT IN THE CASE (not understood or not modelled): line 30: speculative_config: null
extra.yml: no effect: line 6: print_iter_log: true
extra.yml: no effect: line 15: num_postprocess_workers: 4
extra.yml: no effect: line 22: enable_chunked_prefill: false
extra.yml: no effect: line 26: scheduler_config.context_chunking_policy: FIRST_COME_FIRST_SERVED
extra.yml: not set: max_batch_size: the case has the default, 2048
"
    );
}

#[test]
fn the_binary_writes_a_file_and_replaces_it_only_when_told() {
    let (folder, out) = options();
    let output = stepgate(folder.path(), &["--out", "case.yaml"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout.is_empty());
    assert!(CaseFile::load(&out).is_ok());

    fs::write(&out, "mine").expect("write");
    let output = stepgate(folder.path(), &["--out", "case.yaml"]);
    assert_eq!(output.status.code(), Some(5));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.contains("case.yaml: the file is there already"),
        "{message}"
    );
    assert_eq!(fs::read_to_string(&out).expect("text"), "mine");

    let output = stepgate(folder.path(), &["--out", "case.yaml", "--force"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(CaseFile::load(&out).is_ok());
    let left: Vec<_> = fs::read_dir(folder.path()).expect("list").collect();
    assert_eq!(left.len(), 2, "nothing else stays behind: {left:?}");
}

#[test]
fn the_binary_refuses_bad_input_and_leaves_no_file() {
    let (folder, out) = options();
    let bad = TRTLLM.replace("stream_interval: 10", "stream_interval: x");
    fs::write(folder.path().join("extra.yml"), bad).expect("write");
    let output = stepgate(folder.path(), &["--out", "case.yaml"]);
    assert_eq!(output.status.code(), Some(5));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.contains("extra.yml:11:18 `stream_interval`"),
        "{message}"
    );
    assert!(!out.exists());
    let output = stepgate(folder.path(), &["--out", "none/case.yaml"]);
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(stepgate(folder.path(), &["--force"]).status.code(), Some(2));
}

proptest! {
    #[test]
    fn no_options_panic(text in "[-a-z0-9_:{}\\[\\],#'\"~? \n\t.]{0,200}") {
        let _ = trtllm(&text);
    }

    #[test]
    fn no_arguments_panic(text in "[-a-z0-9=\\\\'\"# \n\t.]{0,120}", at in any::<prop::sample::Index>()) {
        let _ = sglang(&text);
        let cut = at.index(SGLANG.len());
        let _ = sglang(&format!("{}{text}{}", &SGLANG[..cut], &SGLANG[cut..]));
    }
}
