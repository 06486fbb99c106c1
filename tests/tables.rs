//! Lookups on toy tables, worked out by hand, and what happens when a table is missing or damaged.

mod toy;

use std::collections::HashSet;
use std::path::Path;

use rstest::rstest;
use stepgate::compose::LaneStart;
use stepgate::gate::Points;
use stepgate::model::{GemmDtype, RankLoad};
use stepgate::perfdb::{AttentionKey, Collective, MoeKernel, OpKey, Pricer, Quantity};
use stepgate::replay::Outcome;
use stepgate::timing::{Column, InputError, OpTable, Origin, Policy};

use toy::{SYSTEM, Times, Toy, VERSION, WINDOW, exact, topology};

/// A one-GPU folder with the model and no tables.
fn bare() -> Toy {
    Toy::bare(&[0], false, topology(1, 1))
}

/// A lookup: its time, its terms as (row's time, weight, work ratio), and its anchors.
struct Answer {
    ms: f64,
    terms: Vec<(f64, f64, f64)>,
    anchors: Vec<String>,
    duplicates: Vec<Option<(u32, f64, f64)>>,
    labels: Vec<String>,
}

/// Asks for `key` as TensorRT-LLM at `version` does; `Err` is the refusal.
fn ask_at(toy: &Toy, version: &str, key: &OpKey, quantity: Quantity<'_>) -> Result<Answer, String> {
    let replayer = toy.replayer();
    let mut pricer = Pricer::new();
    let id = pricer
        .resolve(replayer.database(), SYSTEM, "trtllm", version, "op", key)
        .expect("the toy tables are well formed")
        .map_err(|refusal| refusal.missing)?;
    let lookup = pricer.price(id, quantity);
    let (terms, rows) = (pricer.terms(lookup), pricer.rows());
    let sum: f64 = terms.iter().map(|term| term.weight).sum();
    assert!((sum - 1.0).abs() <= 1e-12, "weights sum to {sum}");
    Ok(Answer {
        ms: pricer.ms(lookup),
        terms: terms
            .iter()
            .map(|term| (rows.ms(term.row), term.weight, term.work_ratio))
            .collect(),
        anchors: pricer.anchors()["op"].iter().cloned().collect(),
        duplicates: terms
            .iter()
            .map(|term| match rows.origin(term.row) {
                Origin::Op { duplicates, .. } => duplicates.map(|d| (d.count, d.min_ms, d.max_ms)),
                _ => None,
            })
            .collect(),
        labels: terms.iter().map(|term| rows.describe(term.row)).collect(),
    })
}

fn ask(toy: &Toy, key: &OpKey, quantity: Quantity<'_>) -> Answer {
    ask_at(toy, VERSION, key, quantity).expect("the toy tables anchor the op")
}

fn gemm(n: u32, k: u32) -> OpKey {
    OpKey::Gemm {
        n,
        k,
        dtype: "bfloat16".to_owned(),
    }
}

fn attention(window: u32) -> AttentionKey {
    AttentionKey {
        kernel: None,
        heads: 4,
        kv_heads: 2,
        head_dim: 24,
        window,
        attn_dtype: "bfloat16".to_owned(),
        kv_dtype: "bfloat16".to_owned(),
    }
}

fn moe(kernel: MoeKernel) -> OpKey {
    OpKey::Moe {
        kernel,
        dtype: "bfloat16".to_owned(),
        hidden: 64,
        inter: 160,
        topk: 2,
        experts: 2,
        moe_tp: 1,
        moe_ep: 1,
        distribution: "balanced",
    }
}

/// One GEMM shape at m = 8 and 16.
fn two_rows() -> Toy {
    let toy = bare();
    toy.gemm(&[(192, 64, 8, 0.7), (192, 64, 16, 1.3)]);
    toy
}

#[test]
fn a_row_of_the_table_is_taken_verbatim() {
    for (m, ms) in [(8.0, 0.7_f64), (16.0, 1.3)] {
        let answer = ask(&two_rows(), &gemm(192, 64), Quantity::Count(m));
        assert_eq!(answer.ms.to_bits(), ms.to_bits());
        assert_eq!(answer.terms, [(ms, 1.0, 1.0)]);
        assert_eq!(answer.anchors, ["hit"]);
    }
}

/// 10 lies a quarter of the way from 8 to 16: 0.75 x 0.7 + 0.25 x 1.3 = 0.85.
#[test]
fn between_two_rows_the_answer_is_their_linear_blend() {
    let answer = ask(&two_rows(), &gemm(192, 64), Quantity::Count(10.0));
    assert_eq!(answer.terms, [(0.7, 0.75, 1.0), (1.3, 0.25, 1.0)]);
    exact(answer.ms, 0.85, "blend");
    assert_eq!(answer.anchors, ["blended"]);
}

/// Below the first row a floor of latency holds it.
#[test]
fn below_the_first_row_it_is_held() {
    let answer = ask(&two_rows(), &gemm(192, 64), Quantity::Count(2.0));
    assert_eq!(answer.terms, [(0.7, 1.0, 1.0)]);
    assert_eq!(answer.anchors, ["held"]);
}

/// FLOPs grow with m: 40 rows are 2.5 times 16.
#[test]
fn a_gemm_beyond_its_last_row_grows_with_its_flops() {
    let answer = ask(&two_rows(), &gemm(192, 64), Quantity::Count(40.0));
    assert_eq!(answer.terms, [(1.3, 1.0, 2.5)]);
    exact(answer.ms, 3.25, "extended");
    assert_eq!(answer.anchors, ["extended"]);
}

/// n = 96 between 64 and 128, k = 50 between 40 and 60, m = 20, where each line has its own points:
///
///     n 64 (1/2)   k 40 (1/4)  m 1: 1.0, 100: 10.9   20 is 19/99 of the way       0.25 x 2.9
///                  k 60 (1/4)  m 10: 2.0             beyond, twice the FLOPs      0.25 x 4.0
///     n 128 (1/2)  k 40        beyond, 50/40 of the FLOPs
///                              m 8: 3.0, 32: 6.0     half way                     0.5 x 1.25 x 4.5
///     0.725 + 1.0 + 2.8125 = 4.5375
#[test]
fn a_ragged_grid_blends_what_each_line_has() {
    let toy = bare();
    toy.gemm(&[
        (64, 40, 1, 1.0),
        (64, 40, 100, 10.9),
        (64, 60, 10, 2.0),
        (128, 40, 8, 3.0),
        (128, 40, 32, 6.0),
        // Farther sites have no say.
        (32, 40, 20, 1000.0),
        (256, 50, 20, 1000.0),
        (64, 20, 20, 1000.0),
    ]);
    let answer = ask(&toy, &gemm(96, 50), Quantity::Count(20.0));
    exact(answer.ms, 4.5375, "ragged");
    let wanted = [
        (1.0, 0.25 * 80.0 / 99.0, 1.0),
        (10.9, 0.25 * 19.0 / 99.0, 1.0),
        (2.0, 0.25, 2.0),
        (3.0, 0.25, 1.25),
        (6.0, 0.25, 1.25),
    ];
    assert_eq!(answer.terms.len(), wanted.len());
    for (found, wanted) in answer.terms.iter().zip(&wanted) {
        exact(found.0, wanted.0, "row");
        exact(found.1, wanted.1, "weight");
        exact(found.2, wanted.2, "work ratio");
    }
    assert_eq!(
        answer.anchors,
        ["blended", "extended", "transferred: shape"]
    );
}

/// The last row is at KV 16 (isl 10 + step 6), batch 8, 2 ms. Decode attention reads the KV of the
/// whole batch, of a window at most the window (4).
#[rstest]
#[case::hit(0, 8.0, 16.0, 1.0)]
#[case::larger_batch(0, 24.0, 16.0, 3.0)]
#[case::longer(0, 8.0, 40.0, 2.5)]
#[case::both(0, 24.0, 40.0, 7.5)]
#[case::larger_batch_of_a_window(WINDOW, 24.0, 16.0, 3.0)]
#[case::longer_than_the_window(WINDOW, 8.0, 40.0, 1.0)]
fn decode_attention_beyond_the_table_grows_with_kv_bytes(
    #[case] window: u32,
    #[case] batch: f64,
    #[case] mean_kv: f64,
    #[case] ratio: f64,
) {
    let toy = bare();
    toy.attention(
        false,
        &[
            (0, 1, 0, 1, 0.5),
            (0, 10, 6, 8, 2.0),
            (WINDOW, 1, 0, 1, 0.5),
            (WINDOW, 10, 6, 8, 2.0),
        ],
    );
    let key = OpKey::GenerationAttention(attention(window));
    let answer = ask(&toy, &key, Quantity::Decode { batch, mean_kv });
    assert_eq!(answer.terms, [(2.0, 1.0, ratio)]);
    exact(answer.ms, 2.0 * ratio, "extended");
}

/// Causal prefill attention: FLOPs grow with the square of a prompt, linearly behind a window.
#[rstest]
#[case(0, 4.0)]
#[case(WINDOW, 2.0)]
fn prefill_attention_beyond_the_table_grows_with_its_flops(
    #[case] window: u32,
    #[case] ratio: f64,
) {
    let toy = bare();
    toy.attention(true, &[(0, 100, 0, 1, 2.0), (WINDOW, 100, 0, 1, 2.0)]);
    let key = OpKey::ContextAttention(attention(window));
    let answer = ask(&toy, &key, Quantity::Prompts(&[200]));
    assert_eq!(answer.terms, [(2.0, 1.0, ratio)]);
}

/// Two prompts of 10 and 30 tokens: half of each of the rows for two prompts of that length,
/// (1 + 5) / 2.
#[test]
fn prompts_of_different_lengths_take_the_mean_of_their_rows() {
    let toy = bare();
    let rows = [
        (0, 10, 0, 1, 0.6),
        (0, 10, 0, 2, 1.0),
        (0, 30, 0, 1, 3.0),
        (0, 30, 0, 2, 5.0),
    ];
    toy.attention(true, &rows);
    let key = OpKey::ContextAttention(attention(0));
    let answer = ask(&toy, &key, Quantity::Prompts(&[10, 30]));
    assert_eq!(answer.terms, [(1.0, 0.5, 1.0), (5.0, 0.5, 1.0)]);
    exact(answer.ms, 3.0, "mean");
}

/// Tokens for the experts, elements for collectives.
#[test]
fn experts_and_collectives_beyond_the_table_grow_with_what_they_move() {
    let toy = Toy::bare(&[0], true, topology(2, 1));
    let source = "moe_torch_flow_cutlass";
    toy.moe(
        "trtllm",
        source,
        &[(4, topology(1, 1), 1.0), (64, topology(1, 1), 2.0)],
    );
    let answer = ask(&toy, &moe(MoeKernel::Cutlass), Quantity::Count(160.0));
    assert_eq!(answer.terms, [(2.0, 1.0, 2.5)]);
    toy.all_reduce(&[(2, 1024, 0.25), (4, 1 << 20, 9.0)]);
    let answer = ask(&toy, &OpKey::AllReduce { gpus: 2 }, Quantity::Count(4096.0));
    assert_eq!(answer.terms, [(0.25, 1.0, 4.0)]);
    toy.nccl(&[
        ("all_gather", "half", 2, 512, 0.5),
        ("alltoall", "half", 2, 1024, 9.0),
    ]);
    let key = OpKey::Nccl {
        collective: Collective::AllGather,
        dtype: "half",
        gpus: 2,
    };
    let answer = ask(&toy, &key, Quantity::Count(1024.0));
    assert_eq!(answer.terms, [(0.5, 1.0, 2.0)]);
    assert_eq!(answer.anchors, ["extended", "transferred: nccl 2.29.2"]);
}

/// Balanced rows read as many experts as they can: 2 tokens of top 1 meet 2 of 4. Served tokens are
/// routed independently and meet 4 - 4 x (3/4)^2 = 1.75 of them: 1.75 / 2 of the weights.
#[test]
fn experts_that_few_tokens_do_not_meet_are_not_read() {
    let toy = Toy::bare(&[0], true, topology(1, 1));
    let table = toy::table(
        &[(2_i64, 1.0)],
        &[
            ("kernel_source", "moe_torch_flow_cutlass"),
            ("moe_dtype", "bfloat16"),
            ("distribution", "balanced"),
        ],
        &[
            ("num_tokens", &|r| r.0),
            ("hidden_size", &|_| 64),
            ("inter_size", &|_| 160),
            ("topk", &|_| 1),
            ("num_experts", &|_| 4),
            ("moe_tp_size", &|_| 1),
            ("moe_ep_size", &|_| 1),
        ],
        &|r| r.1,
    );
    let file = format!("systems/data/{SYSTEM}/moe/trtllm/{VERSION}/moe_perf.parquet");
    table
        .write(&toy.path().join(file))
        .expect("write the table");
    let key = OpKey::Moe {
        kernel: MoeKernel::Cutlass,
        dtype: "bfloat16".to_owned(),
        hidden: 64,
        inter: 160,
        topk: 1,
        experts: 4,
        moe_tp: 1,
        moe_ep: 1,
        distribution: "balanced",
    };
    let answer = ask(&toy, &key, Quantity::Count(2.0));
    assert_eq!(answer.terms, [(1.0, 1.0, 0.875)]);
}

/// Rows of one key become one row: the mean, with how many they are and how far they lie apart.
#[test]
fn duplicate_rows_become_one_with_their_spread() {
    let toy = bare();
    toy.gemm(&[
        (192, 64, 8, 0.5),
        (192, 64, 16, 1.0),
        (192, 64, 8, 0.75),
        (192, 64, 8, 1.0),
    ]);
    let answer = ask(&toy, &gemm(192, 64), Quantity::Count(12.0));
    assert_eq!(answer.terms, [(0.75, 0.5, 1.0), (1.0, 0.5, 1.0)]);
    assert_eq!(answer.duplicates, [Some((3, 0.5, 1.0)), None]);
}

/// The kernel decides, then the framework: trtllm-gen rows of the SGLang table come before another
/// kernel's rows of TensorRT-LLM's own table, flagged; its own trtllm-gen rows come before both.
#[test]
fn the_kernel_family_comes_before_the_framework() {
    let toy = Toy::bare(&[0], true, topology(1, 1));
    let own = topology(1, 1);
    toy.moe(
        "trtllm",
        "moe_torch_flow_cutlass",
        &[(1, own, 9.0), (64, own, 9.0)],
    );
    toy.moe(
        "sglang",
        "sglang_flashinfer_trtllm_moe",
        &[(1, own, 2.0), (64, own, 2.0)],
    );
    let answer = ask(&toy, &moe(MoeKernel::TrtllmGen), Quantity::Count(64.0));
    exact(answer.ms, 2.0, "trtllm-gen");
    assert_eq!(
        answer.anchors,
        [
            "hit",
            "transferred: framework sglang 0.5.14 kernel sglang_flashinfer_trtllm_moe"
        ]
    );
    assert_eq!(answer.labels, ["toy_sxm/moe/sglang/0.5.14/moe_perf#2"]);
    let answer = ask(&toy, &moe(MoeKernel::Cutlass), Quantity::Count(64.0));
    exact(answer.ms, 9.0, "cutlass");
    assert_eq!(answer.anchors, ["hit"]);
    toy.moe("trtllm", "moe_torch_flow_min_latency", &[(64, own, 3.0)]);
    let answer = ask(&toy, &moe(MoeKernel::TrtllmGen), Quantity::Count(64.0));
    exact(answer.ms, 3.0, "own trtllm-gen");
    assert_eq!(answer.anchors, ["hit"]);
}

#[test]
fn another_kernel_is_flagged_louder() {
    let toy = Toy::bare(&[0], true, topology(1, 1));
    toy.moe(
        "sglang",
        "sglang_fused_moe_triton",
        &[(64, topology(1, 1), 2.0)],
    );
    let answer = ask(&toy, &moe(MoeKernel::Triton), Quantity::Count(64.0));
    assert_eq!(
        answer.anchors,
        [
            "ANOTHER KERNEL sglang_fused_moe_triton",
            "hit",
            "transferred: framework sglang 0.5.14 kernel sglang_fused_moe_triton"
        ]
    );
}

#[test]
fn another_version_is_flagged() {
    let key = gemm(192, 64);
    let answer = ask_at(&two_rows(), "1.3.0rc14", &key, Quantity::Count(8.0)).expect("a row");
    assert_eq!(answer.anchors, ["hit", "transferred: version 1.3.0rc20"]);
}

/// What no row anchors is named: the op, its shape and the system; and the table, if it is not
/// there at all.
#[test]
fn a_query_that_nothing_anchors_is_refused_by_name() {
    let toy = two_rows();
    let other_dtype = OpKey::Gemm {
        n: 192,
        k: 64,
        dtype: "fp8".to_owned(),
    };
    for (key, missing) in [
        (other_dtype, "gemm fp8 n=192 k=64 on toy_sxm"),
        (
            OpKey::AllReduce { gpus: 2 },
            "all-reduce over 2 GPUs on toy_sxm (no table \
             toy_sxm/comm/trtllm/1.3.0rc20/custom_allreduce_perf)",
        ),
    ] {
        let refused = ask_at(&toy, VERSION, &key, Quantity::Count(8.0));
        assert_eq!(refused.err().as_deref(), Some(missing));
    }
}

/// Whole toys: a prediction is refused by the first op that nothing anchors.
#[test]
fn a_prediction_without_its_rows_is_refused() {
    let toy = Toy::dense(&[0, 0], topology(2, 1), &Times::all(1.0, 0.5));
    let mut scenario = toy.scenario(1, 1, 2);
    let refusal = |outcome| match outcome {
        Ok(Outcome::Refused(refusal)) => refusal.to_string(),
        other => panic!("{other:?}"),
    };
    let replayer = toy.replayer();
    scenario.deployment.precision.gemm = GemmDtype::Nvfp4;
    assert_eq!(
        refusal(replayer.predict(&scenario, Policy::Strict)),
        "no row anchors gemm nvfp4 n=96 k=64 on toy_sxm"
    );
    scenario.deployment.precision.gemm = GemmDtype::Bfloat16;
    std::fs::remove_file(toy.attention_path(true)).expect("remove the table");
    assert_eq!(
        refusal(replayer.predict(&scenario, Policy::Strict)),
        "no row anchors context attention heads=2 kv_heads=1 head_dim=24 window=0 bfloat16 kv \
         bfloat16 on toy_sxm (no table \
         toy_sxm/attention/trtllm/1.3.0rc20/context_attention_perf)"
    );
}

/// What a prediction says about a toy whose GEMM table was damaged by `damage`.
fn fault(damage: impl FnOnce(&Path)) -> InputError {
    let toy = Toy::dense(&[0, 0], topology(2, 1), &Times::all(1.0, 0.5));
    let file = toy.gemm_path();
    damage(&file);
    let error = match toy
        .replayer()
        .predict(&toy.scenario(1, 1, 2), Policy::Strict)
    {
        Err(error) => error,
        Ok(outcome) => panic!("{outcome:?}"),
    };
    assert_eq!(error.place.file, file, "{error}");
    error
}

fn rewrite(file: &Path, change: impl FnOnce(&mut OpTable)) {
    let mut table = OpTable::read(file).expect("the toy's table");
    change(&mut table);
    table.write(file).expect("write the table");
}

#[rstest]
#[case(f64::NAN, "latency is NaN")]
#[case(f64::INFINITY, "latency is inf")]
#[case(-0.25, "latency is -0.25")]
#[case(0.0, "latency is 0")]
fn a_latency_that_is_no_time_is_located(#[case] latency: f64, #[case] what: &str) {
    let error = fault(|file| {
        rewrite(file, |table| {
            for column in &mut table.columns {
                if let Column::Float(values) = column {
                    values[3] = latency;
                }
            }
        });
    });
    assert_eq!(error.place.row, Some(4), "{error}");
    assert_eq!(error.place.field.as_deref(), Some("latency"), "{error}");
    assert!(error.what.starts_with(what), "{error}");
    assert!(!error.help.is_empty());
}

#[rstest]
#[case("kernel_source")]
#[case("gemm_dtype")]
#[case("n")]
#[case("k")]
#[case("m")]
#[case("latency")]
fn a_renamed_column_is_located(#[case] column: &str) {
    let error = fault(|file| {
        rewrite(file, |table| {
            let at = table.names.iter().position(|name| name == column);
            table.names[at.expect("a column of the table")] = "renamed".to_owned();
        });
    });
    assert_eq!(error.place.field.as_deref(), Some(column), "{error}");
    assert!(error.what.contains("renamed"), "{error}");
}

#[test]
fn a_truncated_table_is_located() {
    let whole =
        std::fs::metadata(Toy::dense(&[0], topology(2, 1), &Times::all(1.0, 0.5)).gemm_path())
            .expect("the toy's table")
            .len() as usize;
    for kept in [0, 1, whole / 2, whole - 1] {
        let error = fault(|file| {
            let bytes = std::fs::read(file).expect("the toy's table");
            std::fs::write(file, &bytes[..kept]).expect("truncate it");
        });
        assert!(error.to_string().contains("gemm_perf.parquet"), "{error}");
    }
}

#[test]
fn a_system_without_figures_is_located() {
    let toy = Toy::dense(&[0], topology(1, 1), &Times::all(1.0, 0.5));
    for (text, what) in [
        ("gpu:\n  mem_bw: 0\n", "memory bandwidth is 0"),
        ("gpu:\n  mem_bw: -1.0\n", "memory bandwidth is -1"),
        ("gpu:\n  bandwidth: 1.0\n", "mem_bw"),
    ] {
        toy.write(&format!("systems/{SYSTEM}.yaml"), text);
        let error = match toy
            .replayer()
            .predict(&toy.scenario(1, 1, 2), Policy::Strict)
        {
            Err(error) => error,
            Ok(outcome) => panic!("{outcome:?}"),
        };
        assert!(
            error.place.file.ends_with("systems/toy_sxm.yaml"),
            "{error}"
        );
        assert!(error.what.contains(what), "{error}");
    }
}

/// Every lookup of whole cases: weights not negative, summing to one; ratios positive. Each step of
/// the replay is priced again, mixed and eager ones included.
#[rstest]
#[case("gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4")]
#[case("gpt-oss-120b/b200-trtllm/tp1/8192-1024-c16")]
#[case("gpt-oss-120b/b200-trtllm/dp4-ep4/1024-1024-c64")]
fn weights_of_a_real_case_sum_to_one(#[case] name: &str) {
    let points = Points::open(Path::new(env!("CARGO_MANIFEST_DIR")), None).expect("the project");
    let case = points.case(name).expect("the case");
    let stepgate::case::CaseFile::Serving(case) = case else {
        panic!("{name} is a serving case");
    };
    let scenario = case.scenario();
    let replayer = points.replayer();
    let log = toy::predicted(replayer.predict(&scenario, Policy::Estimate)).log;
    let composer = replayer.composer(&scenario, Policy::Estimate);
    let mut composer = composer.expect("good data").expect("rows for every op");
    let lanes = composer.lanes();
    let start = LaneStart {
        host_ms: vec![0.0; lanes],
        gpu_ms: vec![0.0; lanes],
    };
    let mut seen = HashSet::new();
    for iteration in &log.iterations {
        let Some((execution, ranks)) = &iteration.step else {
            continue;
        };
        let loads: Vec<RankLoad> = ranks
            .iter()
            .map(|rank| RankLoad {
                prompts: (rank.context.iter())
                    .map(|request| log.requests[*request as usize].prompt)
                    .collect(),
                generation: rank.generation,
                padded: rank.padded,
                kv_sum: rank.kv_sum,
                ..RankLoad::default()
            })
            .collect();
        let shape: Vec<_> = (loads.iter())
            .map(|load| (load.prompts.clone(), load.padded, load.kv_sum))
            .collect();
        if seen.insert(shape) {
            composer.step(&loads, *execution, &start);
        }
    }
    let pricer = composer.pricer();
    assert!(pricer.lookup_count() > 1000, "{}", pricer.lookup_count());
    for index in 0..pricer.lookup_count() as u32 {
        let terms = pricer.terms(stepgate::perfdb::LookupId(index));
        // Work that a rank does not have rests on nothing and takes no time.
        if terms.is_empty() {
            assert_eq!(pricer.ms(stepgate::perfdb::LookupId(index)), 0.0);
            continue;
        }
        let sum: f64 = terms.iter().map(|term| term.weight).sum();
        assert!(
            (sum - 1.0).abs() <= 1e-12,
            "weights of {index} sum to {sum}"
        );
        for term in terms {
            assert!(term.weight >= 0.0, "{term:?}");
            assert!(
                term.work_ratio > 0.0 && term.work_ratio.is_finite(),
                "{term:?}"
            );
        }
        let ms: f64 = terms
            .iter()
            .map(|term| term.weight * term.work_ratio * pricer.rows().ms(term.row))
            .sum();
        exact(pricer.ms(stepgate::perfdb::LookupId(index)), ms, "lookup");
    }
}
