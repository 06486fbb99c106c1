//! The SGLang scheduler on the toy, against schedules worked out by hand.
//!
//! One GPU, two full-attention layers, every kernel 1 ms: a prefill or a decode step takes 11 ms.
//! Prompts have 8 tokens. Without host rows the host costs nothing, so a pass starts when the
//! result of the batch before the last one is there.

mod toy;

use rstest::rstest;
use stepgate::model::{BackendName, CudaGraph, Scenario};
use stepgate::replay::{Outcome, Prediction, StepKind};
use stepgate::timing::{Execution, Policy};

use toy::{Times, Toy, close, exact, graphs, topology};

fn plain() -> Toy {
    Toy::dense(&[0, 0], topology(1, 1), &Times::all(1.0, 0.5))
}

fn served(toy: &Toy, concurrency: u32, requests: u32, osl: u32) -> Scenario {
    let mut scenario = toy.scenario(concurrency, requests, osl);
    scenario.deployment.backend.name = BackendName::Sglang;
    scenario.deployment.backend.version = "0.5.14".to_owned();
    scenario
}

/// Start and decision of each pass: fetched requests, then pieces of prompts or running requests
/// with padding and KV lengths.
fn passes(prediction: &Prediction) -> Vec<String> {
    (prediction.log.iterations.iter())
        .map(|pass| {
            let fetched = &pass.fetched;
            let what = match &pass.step {
                None => "idle".to_owned(),
                Some((_, ranks)) if ranks[0].context.is_empty() => format!(
                    "gen {}/{} kv {}",
                    ranks[0].generation, ranks[0].padded, ranks[0].kv_sum
                ),
                Some((_, ranks)) => format!("ctx {:?} {:?}", ranks[0].context, ranks[0].chunks),
            };
            format!("{:.0} {fetched:?} {what}", pass.start_ms)
        })
        .collect()
}

#[track_caller]
fn receipts_hold(prediction: &Prediction) {
    let ttft = prediction.ttft_receipt.total_ms();
    close(ttft, prediction.ttft.mean_ms, 1e-8, "TTFT receipt");
    let tpot = prediction.tpot_receipt.total_ms();
    close(tpot, prediction.tpot.mean_ms, 1e-8, "TPOT receipt");
}

/// With 8 tokens a prefill batch, the second prompt runs before request 0 decodes: GPU ends 11, 22,
/// then decode steps at 33, 44, 55. The first token of 0 is out at 11, after the prefill of 1 has
/// been launched at 0; that of 1 at 22. Both third tokens come with the step that ends at 44; the
/// step launched at 33 still holds both requests, and its tokens are thrown away.
#[test]
fn prefill_goes_first_and_a_last_token_costs_one_slot_more() {
    let toy = plain();
    let mut scenario = served(&toy, 2, 2, 3);
    scenario.serving.max_prefill_tokens = Some(8);
    let prediction = toy.predict(&scenario);
    assert_eq!(
        passes(&prediction),
        [
            "0 [0, 1] ctx [0] []",
            "0 [] ctx [1] []",
            "11 [] gen 2/2 kv 18",
            "22 [] gen 2/2 kv 20",
            "33 [] gen 2/2 kv 22",
            "44 [] idle",
        ]
    );
    let [a, b] = &prediction.log.requests[..] else {
        panic!("two requests")
    };
    exact(a.first_token_ms, 11.0, "first token of 0");
    exact(b.first_token_ms, 22.0, "first token of 1");
    exact(a.last_token_ms, 44.0, "last token of 0");
    exact(b.last_token_ms, 44.0, "last token of 1");
    receipts_hold(&prediction);
}

/// Without overlap a result is processed before the next batch: no extra slot.
#[test]
fn without_overlap_nothing_is_thrown_away() {
    let toy = plain();
    let mut scenario = served(&toy, 1, 1, 3);
    scenario.serving.overlap = false;
    let prediction = toy.predict(&scenario);
    assert_eq!(
        passes(&prediction)[..3],
        [
            "0 [0] ctx [0] []",
            "11 [] gen 1/1 kv 9",
            "22 [] gen 1/1 kv 10"
        ]
    );
    let decodes = prediction.steps.get("decode eager");
    assert_eq!(decodes, Some(&2));
    exact(prediction.log.requests[0].last_token_ms, 33.0, "last token");
}

/// Two prompts of 8 tokens join while the batch has fewer than the limit: at 8 the first fills it,
/// at 9 the second still joins.
#[rstest]
#[case(8, 1)]
#[case(9, 2)]
#[case(16, 2)]
fn prompts_join_below_the_limit(#[case] limit: u32, #[case] together: usize) {
    let toy = plain();
    let mut scenario = served(&toy, 2, 2, 3);
    scenario.serving.max_prefill_tokens = Some(limit);
    let prediction = toy.predict(&scenario);
    let (_, ranks) = prediction.log.iterations[0].step.as_ref().expect("a batch");
    assert_eq!(ranks[0].context.len(), together);
}

/// Chunks of 8: a prompt each. Chunks of 7: 7 of request 0; its last one and 6 of request 1; the
/// last 2. Of 16: both in one.
///
/// A piece is as long as a prompt of equal work: the last token of 0 behind 7 as sqrt(15) tokens, the
/// last two of 1 behind 6 as sqrt(28). The toy's only row, 1 ms at 8 tokens, is held for shorter
/// ones: every batch takes 11 ms, and first tokens leave at 22 and at 33.
#[test]
fn prompts_are_cut_at_the_chunk() {
    let toy = plain();
    let mut scenario = served(&toy, 2, 2, 3);
    scenario.serving.chunked_prefill_size = Some(8);
    let prediction = toy.predict(&scenario);
    assert_eq!(
        passes(&prediction)[..3],
        [
            "0 [0, 1] ctx [0] []",
            "0 [] ctx [1] []",
            "11 [] gen 2/2 kv 18"
        ]
    );
    scenario.serving.chunked_prefill_size = Some(16);
    let prediction = toy.predict(&scenario);
    assert_eq!(passes(&prediction)[0], "0 [0, 1] ctx [0, 1] []");

    scenario.serving.chunked_prefill_size = Some(7);
    let prediction = toy.predict(&scenario);
    assert_eq!(
        passes(&prediction)[..4],
        [
            "0 [0, 1] ctx [0] [(0, 7)]",
            "0 [] ctx [0, 1] [(7, 1), (0, 6)]",
            "11 [] ctx [1] [(6, 2)]",
            "22 [] gen 2/2 kv 18",
        ]
    );
    exact(
        prediction.log.requests[0].first_token_ms,
        22.0,
        "first of 0",
    );
    exact(
        prediction.log.requests[1].first_token_ms,
        33.0,
        "first of 1",
    );
    receipts_hold(&prediction);
}

/// Request 0 has its last token at 33, while an extra decode step runs to 44; request 1 is there at
/// 33. Looking in every pass finds it at once. The prefill (weight 1000) has let the pass behind it
/// look, and the counter starts over; the pass at 33 counts the third decode step. That fills an
/// interval of 3, but not one of 1000: then only the pass at 44, when nothing runs, finds it.
#[rstest]
#[case(1, 33.0)]
#[case(3, 33.0)]
#[case(1000, 44.0)]
fn an_idle_server_looks_at_once(#[case] interval: u32, #[case] scheduled: f64) {
    let toy = plain();
    let mut scenario = served(&toy, 1, 2, 3);
    scenario.serving.scheduler_recv_interval = interval;
    let prediction = toy.predict(&scenario);
    exact(prediction.log.requests[0].last_token_ms, 33.0, "last of 0");
    exact(
        prediction.log.requests[1].scheduled_ms,
        scheduled,
        "schedule of 1",
    );
    receipts_hold(&prediction);
}

/// The counter, run again over the log: 1 for a decode or nothing, 1000 for a prefill; requests
/// are taken when it reaches the interval, or when nothing is there, and then it starts over.
#[test]
fn requests_wait_for_the_interval() {
    let toy = plain();
    let mut scenario = served(&toy, 4, 16, 40);
    scenario.workload.length_ratio = 0.5;
    scenario.serving.scheduler_recv_interval = 7;
    let prediction = toy.predict(&scenario);
    let mut counter = 0;
    let mut before = None;
    let mut waited = 0;
    for (index, pass) in prediction.log.iterations.iter().enumerate() {
        counter += match before {
            Some(StepKind::Prefill) => 1000,
            _ => 1,
        };
        let there =
            |request: &&u32| prediction.log.requests[**request as usize].arrival_ms < pass.start_ms;
        if counter >= 7 {
            counter = 0;
            waited += pass.fetched.iter().filter(there).count();
        } else if index > 0 && before.is_some() {
            assert!(pass.fetched.is_empty(), "pass {index} looked at {counter}");
        }
        before = pass.kind();
    }
    assert!(waited > 5, "{waited} of 12 requests waited");
    receipts_hold(&prediction);
}

/// SGLang's own list up to 24: 1, 2, 4, 8, 12, 16, 24. Five requests replay the graph of 8, three
/// padding tokens attend to one token each: 5 * 9 + 3 = 48.
#[test]
fn decode_pads_to_the_next_captured_size() {
    let graph = CudaGraph {
        padding: true,
        max_batch: 24,
        batch_sizes: None,
    };
    let toy = plain();
    let mut scenario = served(&toy, 5, 5, 3);
    let sizes = graph.sizes(&scenario.deployment.backend);
    assert_eq!(sizes, [1, 2, 4, 8, 12, 16, 24]);
    scenario.serving.cuda_graph = Some(graph);
    let prediction = toy.predict(&scenario);
    assert_eq!(passes(&prediction)[1], "0 [] gen 5/8 kv 48");
    let (execution, _) = prediction.log.iterations[1].step.as_ref().expect("a step");
    assert_eq!(*execution, Execution::FullGraph { captured_batch: 8 });
    // Beyond the largest size decode runs eagerly.
    scenario.serving.cuda_graph = Some(graphs(&[4], true));
    let prediction = toy.predict(&scenario);
    assert_eq!(passes(&prediction)[1], "0 [] gen 5/5 kv 45");
}

/// Room for so many tokens of KV: 458,752 bytes of weights (see `capacity.rs`), a token takes 384.
fn holds(toy: &Toy, tokens: u64) {
    let bytes = 458_752 + 384 * tokens;
    toy.write(
        "systems/toy_sxm.yaml",
        &format!("gpu:\n  mem_bw: 1.0e30\n  mem_capacity: {bytes}\n"),
    );
}

/// Two prompts of 8 with 30 tokens to come both enter if 79 - 16 - 2 * 30 = 3 tokens, more than one
/// each, stay free at the end; with 78 the second waits. The last token of 0 is out at 330, the pass
/// at 330 drops it, and its extra step runs to 341, when request 1 enters.
#[rstest]
#[case(79, 0.0)]
#[case(78, 341.0)]
fn a_prompt_enters_if_all_can_reach_their_end(#[case] tokens: u64, #[case] scheduled: f64) {
    let toy = plain();
    holds(&toy, tokens);
    let mut scenario = served(&toy, 2, 2, 30);
    scenario.serving.memory_fraction = Some(1.0);
    let prediction = toy.predict(&scenario);
    exact(
        prediction.log.requests[1].scheduled_ms,
        scheduled,
        "schedule of 1",
    );
    receipts_hold(&prediction);
}

/// Prompts of 4 with outputs of 29, 14 and 11. Beside the outputs of the first two in its batch the
/// third's prompt finds 55 - 8 - 43 = 4 tokens free; of 54 it finds 3, and waits. By their ends alone
/// it would enter: when the third ends, 42 of the 54 are free and all three have taken 3 * 11, then
/// 46 against 2 * 14, then 50 against 29.
#[rstest]
#[case(55, 3)]
#[case(54, 2)]
fn outputs_that_a_batch_will_make_are_kept_free(#[case] tokens: u64, #[case] together: usize) {
    let toy = plain();
    holds(&toy, tokens);
    let mut scenario = served(&toy, 3, 3, 30);
    scenario.workload.length_ratio = 0.25;
    scenario.workload.seed = 119;
    scenario.serving.memory_fraction = Some(1.0);
    let prediction = toy.predict(&scenario);
    let lengths = prediction.log.requests.iter();
    let lengths: Vec<(u32, u32)> = lengths.map(|one| (one.prompt, one.output)).collect();
    assert_eq!(lengths, [(4, 29), (4, 14), (4, 11)]);
    let (_, ranks) = prediction.log.iterations[0].step.as_ref().expect("a batch");
    assert_eq!(ranks[0].context.len(), together);
}

/// Rows times 2: every time times 2, bit for bit, on the same schedule.
#[test]
fn twice_the_rows_take_twice_the_time() {
    let toy = plain();
    let mut scenario = served(&toy, 4, 16, 40);
    scenario.workload.length_ratio = 0.5;
    scenario.serving.scheduler_recv_interval = 5;
    scenario.serving.chunked_prefill_size = Some(11);
    let once = toy.predict(&scenario);
    let replayer = toy.replayer();
    let twice = replayer.predict_scaled(&scenario, Policy::Strict, 2.0, |_| true, None);
    let twice = toy::predicted(twice);
    assert_eq!(twice.ttft.mean_ms, 2.0 * once.ttft.mean_ms);
    assert_eq!(twice.tpot.mean_ms, 2.0 * once.tpot.mean_ms);
    let again = replayer.predict_scaled(&scenario, Policy::Strict, 1.0, |_| true, Some(&once.log));
    assert_eq!(toy::predicted(again).log, once.log);
}

#[test]
fn attention_dp_is_refused() {
    let toy = Toy::experts(&[0, 0], topology(1, 2), &Times::all(1.0, 0.5));
    let mut scenario = served(&toy, 2, 2, 3);
    scenario.deployment.kernels.moe = Some(stepgate::perfdb::MoeKernel::Cutlass);
    match toy.replayer().predict(&scenario, Policy::Strict) {
        Ok(Outcome::Refused(refusal)) => {
            assert!(refusal.missing.contains("attention DP of sglang"))
        }
        other => panic!("{other:?}"),
    }
}
