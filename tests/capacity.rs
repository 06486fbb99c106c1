//! KV capacity by hand, and what the TensorRT-LLM executor does when it runs out.

mod toy;

use std::path::Path;

use stepgate::model::{
    Backend, BackendName, Capacity, Deployment, GemmDtype, Kernels, KvCacheDtype, ModelConfig,
    MoeDtype, Precision, Scenario,
};
use stepgate::perfdb::Database;
use stepgate::replay::{KvCapacity, Prediction, token_bytes, weight_bytes};

use toy::{Times, Toy, exact, topology};

fn gpt_oss() -> (ModelConfig, Deployment, Database) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let config = ModelConfig::load(&data.join("models"), "gpt-oss-120b").expect("the config");
    let deployment = Deployment {
        model: "gpt-oss-120b".to_owned(),
        system: "b200_sxm".to_owned(),
        backend: Backend {
            name: BackendName::Trtllm,
            version: "1.3.0rc14".to_owned(),
        },
        parallel: topology(2, 1),
        precision: Precision {
            gemm: GemmDtype::Bfloat16,
            qkv_proj: None,
            moe: Some(MoeDtype::W4a8Mxfp4Mxfp8),
            kv_cache: KvCacheDtype::Fp8,
            attention: None,
        },
        kernels: Kernels::default(),
        host_cpu: None,
    };
    (
        config,
        deployment,
        Database::open(&data, None).expect("the tables"),
    )
}

/// GPT-OSS-120B on two B200, per GPU:
///
/// - attention: qkv (32 + 2 * 4) * 64 * 2880 = 7,372,800 and o 32 * 64 * 2880 = 5,898,240 weights
///   of 2 bytes: 26,542,080 a layer;
/// - experts: 128 * 3 * 2880 * 2880 / 2 = 1,592,524,800 weights of 17/32 byte: 846,028,800 a layer;
/// - router: 128 * 2880 * 2 = 737,280 a layer; 36 layers: 31,439,093,760;
/// - embedding and head: 2 * 201,088 * 2880 / 2 * 2 = 1,158,266,880.
///
/// A token takes 36 * 2 * 4 * 64 * 1 = 18,432 bytes. Free before the weights: 193,273,528,320 -
/// 3,758,096,384 - 358,612,992 = 189,156,818,944.
#[test]
fn gpt_oss_on_two_b200() {
    let (config, mut deployment, database) = gpt_oss();
    let weights = 31_439_093_760 + 1_158_266_880;
    assert_eq!(weight_bytes(&config, &deployment), weights);
    assert_eq!(token_bytes(&config, &deployment), 18_432);
    let memory = database.gpu_memory("b200_sxm").expect("the figures");
    let memory = memory.expect("a memory size");
    assert_eq!(memory.bytes_free(2), 189_156_818_944);
    let tokens = |deployment: &Deployment, fraction| {
        KvCapacity::of(&config, deployment, Some(&memory), fraction).map(|kv| kv.tokens)
    };
    // (189,156,818,944 - 32,597,360,640) * 0.9 / 18,432 = 7,644,502.6...; 0.9 is the default.
    assert_eq!(tokens(&deployment, None), tokens(&deployment, Some(0.9)));
    assert_eq!(tokens(&deployment, None), Some(140_903_512_473 / 18_432));
    deployment.backend.name = BackendName::Sglang;
    // (189,156,818,944 * 0.5 - 32,597,360,640) / 18,432.
    assert_eq!(
        tokens(&deployment, Some(0.5)),
        Some((94_578_409_472 - weights) / 18_432)
    );
    // Not recorded: all of the memory is the bound.
    assert_eq!(tokens(&deployment, None), tokens(&deployment, Some(1.0)));
    assert_eq!(KvCapacity::of(&config, &deployment, None, Some(0.5)), None);
}

/// One GPU, two layers, every kernel 1 ms (a prefill or decode step 11 ms, a mixed one 13), with
/// room for `tokens` tokens of KV. A token takes 2 * 2 * 2 * 24 * 2 = 384 bytes. Weights, 2 bytes
/// each: a layer (4 + 2 * 2) * 24 * 64 + 4 * 24 * 64 + 3 * 64 * 160 = 49,152; two layers and
/// 2 * 1024 * 64 for both ends: 229,376, so 458,752 bytes.
fn roomy(tokens: u64) -> Toy {
    let toy = Toy::dense(&[0, 0], topology(1, 1), &Times::all(1.0, 0.5));
    let bytes = 458_752 + 384 * tokens;
    toy.write(
        "systems/toy_sxm.yaml",
        &format!("gpu:\n  mem_bw: 1.0e30\n  mem_capacity: {bytes}\n"),
    );
    toy
}

fn limited(toy: &Toy, capacity: Capacity, concurrency: u32, osl: u32) -> Scenario {
    let mut scenario = toy.scenario(concurrency, concurrency, osl);
    scenario.serving.memory_fraction = Some(1.0);
    scenario.serving.capacity = capacity;
    scenario
}

#[track_caller]
fn decided(prediction: &Prediction, wanted: &[&str]) {
    let found: Vec<String> = (prediction.log.iterations.iter())
        .map(|iteration| {
            let mut line = format!("p{:?} ", iteration.paused);
            if let Some((_, ranks)) = &iteration.step {
                let rank = &ranks[0];
                line += &format!("c{:?} g{} kv{}", rank.context, rank.generation, rank.kv_sum);
            }
            line
        })
        .collect();
    assert_eq!(found, wanted);
    let sum = prediction.ttft_receipt.total_ms();
    exact(sum, prediction.ttft.mean_ms, "TTFT receipt");
    exact(
        prediction.tpot_receipt.total_ms(),
        prediction.tpot.mean_ms,
        "TPOT receipt",
    );
}

/// Prompts of 8 and outputs of 30 need 38 tokens: two blocks of 32 each; three blocks hold one
/// request whole. The second enters after the first's last token is out (iteration 30 dispatches
/// nothing and sends it); it then fetches no one, and iterates alone.
#[test]
fn whole_needs_run_one_after_the_other() {
    let toy = roomy(96);
    let scenario = limited(&toy, Capacity::GuaranteedNoEvict, 2, 30);
    assert_eq!(
        toy.replayer().kv_capacity(&scenario).expect("figures"),
        Some(KvCapacity { tokens: 96 })
    );
    let prediction = toy.predict(&scenario);
    let records = &prediction.log.requests;
    // One prefill and 29 decode steps of 11 ms each.
    exact(records[0].last_token_ms, 330.0, "last token of 0");
    exact(records[1].scheduled_ms, 330.0, "schedule of 1");
    exact(records[1].first_token_ms, 341.0, "first token of 1");
    assert!(
        prediction
            .log
            .iterations
            .iter()
            .all(|i| i.paused.is_empty())
    );
}

/// The same greedily, with two blocks: each prompt takes one. Iteration 0 takes request 0 alone
/// (an idle executor takes the first), iteration 1 both. In iteration 1 request 0 has 9 tokens; in
/// iteration 25 it would have 33 and open a second block, so request 1, which started last, is
/// paused: it has made 24 tokens (its prompt's step 1 to step 24). Request 0 ends with iteration
/// 29, and its blocks are free once its last token is out, in iteration 30. Request 1 then computes
/// 8 + 24 tokens again, and has 6 more to make, the first of them in iteration 31.
#[test]
fn the_last_one_started_is_paused_and_computes_again() {
    let toy = roomy(64);
    let prediction = toy.predict(&limited(&toy, Capacity::MaxUtilization, 2, 30));
    let mut wanted = vec!["p[] c[0] g0 kv0".to_owned(), "p[] c[1] g1 kv9".to_owned()];
    wanted.extend((2..25).map(|i| format!("p[] c[] g2 kv{}", 8 + i + 7 + i)));
    wanted.push("p[1] c[] g1 kv33".to_owned());
    wanted.extend((26..30).map(|i| format!("p[] c[] g1 kv{}", 8 + i)));
    wanted.push("p[] ".to_owned());
    wanted.push("p[] c[1] g0 kv0".to_owned());
    // 33 tokens with the first step behind the context, 37 with the fifth and last.
    wanted.extend((32..37).map(|i| format!("p[] c[] g1 kv{}", i + 1)));
    wanted.push("p[] ".to_owned());
    decided(
        &prediction,
        &wanted.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let records = &prediction.log.requests;
    // 11 for iteration 0, 13 for the mixed one, 11 each for 2 to 29.
    exact(records[0].last_token_ms, 332.0, "last token of 0");
    exact(records[1].first_token_ms, 24.0, "first token of 1");
    // Six more steps of 11 from 332.
    exact(records[1].last_token_ms, 398.0, "last token of 1");
}

/// A request that no empty cache can hold is refused, and the reason names the numbers.
#[test]
fn a_request_beyond_the_cache_is_refused() {
    let toy = roomy(32);
    let outcome = toy.replayer().predict(
        &limited(&toy, Capacity::MaxUtilization, 1, 30),
        stepgate::timing::Policy::Strict,
    );
    match outcome.expect("well formed") {
        stepgate::replay::Outcome::Refused(refusal) => {
            assert!(
                refusal
                    .missing
                    .contains("holds 32 tokens, a request needs 38")
            );
        }
        stepgate::replay::Outcome::Predicted(_) => panic!("predicted"),
    }
}
