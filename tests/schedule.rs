//! The TensorRT-LLM executor on the toy, against schedules worked out by hand.
//!
//! Unless a test says otherwise: one GPU, two full-attention layers, every kernel 1 ms. On the GPU
//! a prefill or a decode step takes 11 ms (2 x 5 kernels and lm_head), a mixed step 13 ms (both
//! attentions in each layer). Prompts have 8 tokens. A data folder without host rows costs the host
//! nothing.

mod toy;

use rstest::rstest;
use stepgate::compose::{LaneStart, Method, Part};
use stepgate::model::{AttentionDpBalance, BatchWait, Piecewise, Scenario};
use stepgate::replay::{IterationRecord, Prediction};
use stepgate::timing::{Execution, Policy};

use toy::{METHODS, Times, Toy, eager, exact, graph, graphs, prefill, request, topology};

/// One GPU, every kernel 1 ms.
fn plain() -> Toy {
    Toy::dense(&[0, 0], topology(1, 1), &Times::all(1.0, 0.5))
}

/// Two attention ranks, one expert each.
fn data_parallel() -> Toy {
    Toy::experts(&[0, 0], topology(1, 2), &Times::all(1.0, 0.5))
}

/// What one iteration decided, as a line: `fetch` the requests taken from the queue, `hold` how
/// many and why, then the execution with each rank's prompts, generation requests / the same with
/// padding and dummies, and the sum of their KV lengths.
fn line(iteration: &IterationRecord) -> String {
    let numbers = |of: &[u32]| {
        of.iter()
            .map(|number| format!(" {number}"))
            .collect::<String>()
    };
    let mut parts = Vec::new();
    if !iteration.fetched.is_empty() {
        parts.push(format!("fetch{}", numbers(&iteration.fetched)));
    }
    if let Some((part, count)) = iteration.held {
        parts.push(format!("hold {count} {}", part.name()));
    }
    parts.push(match &iteration.step {
        None => "idle".to_owned(),
        Some((execution, ranks)) => {
            let name = match execution {
                Execution::Eager => "eager".to_owned(),
                Execution::FullGraph { captured_batch } => format!("graph {captured_batch}"),
                Execution::Piecewise { captured_tokens } => format!("piecewise {captured_tokens}"),
                Execution::Unknown => panic!("a step of unknown execution"),
            };
            let ranks: Vec<String> = ranks
                .iter()
                .map(|rank| {
                    let context = if rank.context.is_empty() {
                        String::new()
                    } else {
                        format!("ctx{} ", numbers(&rank.context))
                    };
                    format!(
                        "{{{context}gen {}/{} kv {}}}",
                        rank.generation, rank.padded, rank.kv_sum
                    )
                })
                .collect();
            format!("{name} {}", ranks.join(" "))
        }
    });
    parts.join(" | ")
}

#[track_caller]
fn decided(prediction: &Prediction, wanted: &[&str]) {
    let found: Vec<String> = prediction.log.iterations.iter().map(line).collect();
    assert_eq!(found, wanted);
}

/// The first iterations only.
#[track_caller]
fn begins(prediction: &Prediction, wanted: &[&str]) {
    let found: Vec<String> = prediction.log.iterations.iter().map(line).collect();
    assert_eq!(found[..wanted.len()], *wanted);
}

#[track_caller]
fn starts(prediction: &Prediction, wanted: &[f64]) {
    let found: Vec<f64> = prediction
        .log
        .iterations
        .iter()
        .map(|iteration| iteration.start_ms)
        .collect();
    assert_eq!(found.len(), wanted.len(), "{found:?}");
    for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        exact(*found, *wanted, &format!("start of iteration {index}"));
    }
}

#[track_caller]
fn tokens_at(prediction: &Prediction, request: usize, first: f64, last: f64) {
    let record = &prediction.log.requests[request];
    exact(
        record.first_token_ms,
        first,
        &format!("first token of {request}"),
    );
    exact(
        record.last_token_ms,
        last,
        &format!("last token of {request}"),
    );
}

/// One request of five tokens; a forward takes 1.68 ms to dispatch (0.07 per launch of a prefill),
/// a decode graph `prepare` + 0.5, and every iteration 0.25 to finish.
fn one_request(prepare: f64, overlap: bool) -> Prediction {
    let toy = plain().with_host(&[
        eager("host_dispatch", 1.68),
        eager("host_finish", 0.25),
        graph("host_prepare", prepare),
        graph("graph_launch", 0.5),
        graph("host_finish", 0.25),
    ]);
    let mut scenario = toy.scenario(1, 1, 5);
    scenario.serving.cuda_graph = Some(graphs(&[1], true));
    scenario.serving.overlap = overlap;
    toy.predict(&scenario)
}

/// GPU-bound decode, host 1.75 per step:
///
/// | iteration | host starts | submitted | GPU begins, ends | waits for the step before, finishes |
/// |---|---:|---:|---:|---:|
/// | 0 prefill | 0     | 1.68  | 0.21 (launch 3), 11.21 | |
/// | 1 decode  | 1.68  | 3.18  | 11.21, 22.21 | 11.21 + 0.25 = 11.46: first token |
/// | 2         | 11.46 | 12.96 | 22.21, 33.21 | 22.46 |
/// | 3         | 22.46 | 23.96 | 33.21, 44.21 | 33.46 |
/// | 4         | 33.46 | 34.96 | 44.21, 55.21 | 44.46 |
/// | 5 nothing | 44.46 |       |              | 55.46: last token |
///
/// (55.46 - 11.46) / 4 = 11: the GPU's time, the host is hidden.
#[test]
fn overlap_hides_the_host_behind_the_gpu() {
    let prediction = one_request(1.0, true);
    starts(&prediction, &[0.0, 1.68, 11.46, 22.46, 33.46, 44.46]);
    tokens_at(&prediction, 0, 11.46, 55.46);
    exact(prediction.ttft.mean_ms, 11.46, "TTFT");
    exact(prediction.tpot.mean_ms, 11.0, "TPOT");
    exact(
        prediction.tpot_receipt.part_ms(Part::Kernel),
        11.0,
        "kernels in TPOT",
    );
}

/// Without overlap the host waits for each step before the next: 1.5 + 11 + 0.25 = 12.75 a token,
/// and no iteration is needed to send the last one.
#[test]
fn without_overlap_host_and_gpu_add_up() {
    let prediction = one_request(1.0, false);
    starts(&prediction, &[0.0, 11.46, 24.21, 36.96, 49.71]);
    tokens_at(&prediction, 0, 11.46, 62.46);
    exact(prediction.tpot.mean_ms, 12.75, "TPOT");
    exact(
        prediction.tpot_receipt.part_ms(Part::HostPrepare),
        1.0,
        "prepare",
    );
    exact(
        prediction.tpot_receipt.part_ms(Part::GraphLaunch),
        0.5,
        "launch",
    );
    exact(
        prediction.tpot_receipt.part_ms(Part::Kernel),
        11.0,
        "kernels",
    );
    exact(
        prediction.tpot_receipt.part_ms(Part::HostFinish),
        0.25,
        "finish",
    );
}

/// Host-bound decode, 20.5 to submit and 0.25 to finish: a step each 20.75, and the GPU idles.
///
/// | iteration | host starts | submitted | GPU ends | waits, finishes |
/// |---|---:|---:|---:|---:|
/// | 0 prefill | 0     | 1.68  | 11.21 | |
/// | 1 decode  | 1.68  | 22.18 | 33.18 | max(11.21, 22.18) + 0.25 = 22.43: first token |
/// | 2         | 22.43 | 42.93 | 53.93 | 43.18 |
/// | 3         | 43.18 | 63.68 | 74.68 | 63.93 |
/// | 4         | 63.93 | 84.43 | 95.43 | 84.68 |
/// | 5 nothing | 84.68 |       |       | 95.68: last token |
#[test]
fn a_host_slower_than_the_gpu_sets_the_period() {
    let prediction = one_request(20.0, true);
    starts(&prediction, &[0.0, 1.68, 22.43, 43.18, 63.93, 84.68]);
    tokens_at(&prediction, 0, 22.43, 95.68);
    exact(prediction.tpot.mean_ms, 18.3125, "TPOT");
}

/// Two requests of two tokens; ingress 2, egress 3; 168 ms to dispatch a forward, so that the GPU
/// (7 or 6 ms between launches, 1 ms kernels) ends with the dispatch; 10 ms to prepare a graph.
///
/// | iteration | host starts | submitted | GPU ends | sends |
/// |---|---:|---:|---:|---|
/// | 0 prefill of 0 | 2   | 170 | 170 | |
/// | 1 mixed: 1, 0  | 170 | 338 | 338 | 0's first, at 338: 341 |
/// | 2 decode of 1  | 338 | 348 | 359 | 0's last and 1's first, at 348: 351 |
/// | 3 nothing      | 348 |     |     | 1's last, at 359: 362 |
///
/// Request 0's token is on the GPU at 170 and leaves at 338, behind the dispatch of the next step.
#[test]
fn a_response_leaves_after_the_next_dispatch() {
    let toy = plain().with_host(&[
        eager("host_dispatch", 168.0),
        graph("host_prepare", 10.0),
        request("ingress", 2.0),
        request("egress", 3.0),
    ]);
    let mut scenario = toy.scenario(2, 2, 2);
    scenario.serving.cuda_graph = Some(graphs(&[1, 2], true));
    let prediction = toy.predict(&scenario);
    decided(
        &prediction,
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
            "fetch 1 | eager {ctx 1 gen 1/1 kv 9}",
            "graph 1 {gen 1/1 kv 9}",
            "idle",
        ],
    );
    starts(&prediction, &[2.0, 170.0, 338.0, 348.0]);
    tokens_at(&prediction, 0, 341.0, 351.0);
    tokens_at(&prediction, 1, 351.0, 362.0);
    // Both posted at 0. Request 1 arrived at 2 and was looked for at 170.
    exact(prediction.ttft.mean_ms, (341.0 + 351.0) / 2.0, "TTFT");
    let queued = prediction.ttft_receipt.part_ms(Part::QueueIteration);
    exact(queued, 168.0 / 2.0, "queue");
}

/// One client, three requests of 1, 2 and 2 tokens (seed 2 draws prompts 4, 4, 7 and outputs 1, 2, 1
/// from [4, 8] and [1, 2]; the last output is 1 again). Egress 3, dispatch 168, graph prepare 10.
///
///     0: dispatched by 168 and done on the GPU; nothing follows, so it leaves then: 171, its only
///        token. The client posts 1 at once.
///     1: prefill 171 to 339; its decode is submitted by 349, only then does the first token leave:
///        352; the GPU is done at 360: last token 363
///     2: prefill 363 to 531, nothing follows: 534
#[test]
fn a_response_that_nothing_follows_leaves_when_the_gpu_is_done() {
    let toy = plain().with_host(&[
        eager("host_dispatch", 168.0),
        graph("host_prepare", 10.0),
        request("egress", 3.0),
    ]);
    let mut scenario = toy.scenario(1, 3, 2);
    scenario.workload.length_ratio = 0.6;
    scenario.workload.seed = 2;
    scenario.serving.cuda_graph = Some(graphs(&[1], true));
    let prediction = toy.predict(&scenario);
    let lengths: Vec<(u32, u32)> = prediction
        .log
        .requests
        .iter()
        .map(|request| (request.prompt, request.output))
        .collect();
    assert_eq!(lengths, [(4, 1), (4, 2), (7, 1)]);
    tokens_at(&prediction, 0, 171.0, 171.0);
    tokens_at(&prediction, 1, 352.0, 363.0);
    tokens_at(&prediction, 2, 534.0, 534.0);
    assert_eq!(prediction.log.requests[0].tpot_ms(), None);
    exact(prediction.tpot.mean_ms, 11.0, "TPOT, of request 1 alone");
}

/// The burst of three: an idle executor wakes for the first arrival and takes it alone; the others
/// are there when it looks again.
#[test]
fn an_idle_executor_takes_the_first_arrival_alone() {
    let prediction = plain().predict(&plain().scenario(3, 3, 2));
    decided(
        &prediction,
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
            "fetch 1 2 | eager {ctx 1 2 gen 1/1 kv 9}",
            // 0 has its two tokens; 1 and 2 get their second.
            "eager {gen 2/2 kv 18}",
            "idle",
        ],
    );
}

/// Three requests of four tokens; request 0 is a step ahead of 1 and 2. KV lengths at a decode
/// step are prompt + tokens so far, the one being fed included: 9 at the first.
///
/// The largest captured batch is 2: three decode eagerly, two by graph, and a mixed step is eager
/// although its single generation request would fit.
#[test]
fn beyond_the_largest_captured_batch_decode_is_eager() {
    let toy = plain();
    let mut scenario = toy.scenario(3, 3, 4);
    scenario.serving.cuda_graph = Some(graphs(&[1, 2], true));
    let prediction = toy.predict(&scenario);
    decided(
        &prediction,
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
            "fetch 1 2 | eager {ctx 1 2 gen 1/1 kv 9}",
            "eager {gen 3/3 kv 28}",
            "eager {gen 3/3 kv 31}",
            "graph 2 {gen 2/2 kv 22}",
            "idle",
        ],
    );
    let steps: Vec<(&str, u64)> = prediction
        .steps
        .iter()
        .map(|(name, count)| (name.as_str(), *count))
        .collect();
    let wanted = [
        ("decode eager", 2),
        ("decode full_graph", 1),
        ("mixed eager", 1),
        ("prefill eager", 1),
    ];
    assert_eq!(steps, wanted);
}

/// The same with 1, 2 and 4 captured: three are padded to four, whose fourth attends to one token.
/// Without padding three have no graph.
#[rstest]
#[case(true, "graph 4 {gen 3/4 kv 29}", "graph 4 {gen 3/4 kv 32}")]
#[case(false, "eager {gen 3/3 kv 28}", "eager {gen 3/3 kv 31}")]
fn a_batch_between_captured_sizes_is_padded(
    #[case] padding: bool,
    #[case] third: &str,
    #[case] fourth: &str,
) {
    let toy = plain();
    let mut scenario = toy.scenario(3, 3, 4);
    scenario.serving.cuda_graph = Some(graphs(&[1, 2, 4], padding));
    decided(
        &toy.predict(&scenario),
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
            "fetch 1 2 | eager {ctx 1 2 gen 1/1 kv 9}",
            third,
            fourth,
            "graph 2 {gen 2/2 kv 22}",
            "idle",
        ],
    );
}

/// Piecewise capture serves steps with context requests up to its largest token count: 8 tokens by
/// 16, 2 x 8 + 1 = 17 by 32 where that is captured. Decode is none of its business.
#[rstest]
#[case(&[16, 32], "piecewise 32")]
#[case(&[16], "eager")]
fn piecewise_capture_serves_steps_with_prompts(#[case] counts: &[u32], #[case] mixed: &str) {
    let toy = plain();
    let mut scenario = toy.scenario(3, 3, 2);
    scenario.serving.piecewise = Some(Piecewise {
        max_tokens: counts[counts.len() - 1],
        capture_tokens: Some(counts.to_vec()),
    });
    decided(
        &toy.predict(&scenario),
        &[
            "fetch 0 | piecewise 16 {ctx 0 gen 0/0 kv 0}",
            &format!("fetch 1 2 | {mixed} {{ctx 1 2 gen 1/1 kv 9}}"),
            "eager {gen 2/2 kv 18}",
            "idle",
        ],
    );
}

/// A piecewise step works on the captured token count: with GEMMs of m / 1000 ms and 8 tokens
/// padded to 16 the four GEMMs of each layer take 0.016 each; lm_head has one row per sequence,
/// 0.001; attention has its own 8 tokens, 1 ms. 2 x (4 x 0.016 + 1) + 0.001. Eager works on 8.
#[rstest]
#[case(Execution::Piecewise { captured_tokens: 16 }, 2.129)]
#[case(Execution::Eager, 2.065)]
fn a_piecewise_step_is_padded_to_its_captured_tokens(
    #[case] execution: Execution,
    #[case] wanted: f64,
) {
    let toy = plain();
    let rows: Vec<_> = toy::toy_gemms(topology(1, 1), false, &Times::all(1.0, 0.5))
        .into_iter()
        .map(|(n, k, m, _)| (n, k, m, m as f64 / 1000.0))
        .collect();
    toy.gemm(&rows);
    for method in METHODS {
        let mut composer = toy.composer(method, Policy::Strict);
        let start = LaneStart {
            host_ms: vec![0.0],
            gpu_ms: vec![0.0],
        };
        let times = composer.step(&[prefill(&[8])], execution, &start);
        exact(times.gpu_ms[0], wanted, "end");
    }
}

/// At most 16 tokens an iteration: one prompt of 8 beside up to 8 generation requests. Four
/// requests of three tokens enter one by one; three, two, then one are held, each an iteration:
///
/// | iteration | host starts | GPU ends |
/// |---|---:|---:|
/// | 0 prefill | 0  | 11 |
/// | 1 mixed   | 0  | 24 |
/// | 2 mixed   | 11 | 37 |
/// | 3 mixed   | 24 | 50 |
///
/// Two wait from 0 to 11, one on to 24: (2 x 11 + 13) / 4 = 8.75 of the mean TTFT
/// (11 + 24 + 37 + 50) / 4 = 30.5.
#[test]
fn the_token_budget_holds_requests_back() {
    let toy = plain();
    let mut scenario = toy.scenario(4, 4, 3);
    scenario.serving.max_num_tokens = 16;
    let prediction = toy.predict(&scenario);
    decided(
        &prediction,
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
            "fetch 1 2 3 | hold 2 queue_capacity | eager {ctx 1 gen 1/1 kv 9}",
            "hold 1 queue_capacity | eager {ctx 2 gen 2/2 kv 19}",
            "eager {ctx 3 gen 2/2 kv 19}",
            "eager {gen 2/2 kv 19}",
            "eager {gen 1/1 kv 10}",
            "idle",
        ],
    );
    exact(prediction.ttft.mean_ms, 30.5, "TTFT");
    let receipt = &prediction.ttft_receipt;
    exact(receipt.part_ms(Part::QueueCapacity), 8.75, "capacity");
    exact(receipt.part_ms(Part::QueueIteration), 0.0, "iteration");
    exact(receipt.total_ms(), 30.5, "receipt");
}

/// Two slots for three requests of three tokens. With overlap, request 0's last token is made in
/// iteration 2 and its response leaves in iteration 3, behind that one's dispatch: request 2 has
/// its slot in iteration 4. Without overlap the slot is free an iteration earlier.
#[rstest]
#[case(true, &[
    "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
    "fetch 1 2 | hold 1 queue_capacity | eager {ctx 1 gen 1/1 kv 9}",
    "hold 1 queue_capacity | eager {gen 2/2 kv 19}",
    "hold 1 queue_capacity | eager {gen 1/1 kv 10}",
    "eager {ctx 2 gen 0/0 kv 0}",
    "eager {gen 1/1 kv 9}",
    "eager {gen 1/1 kv 10}",
    "idle",
])]
#[case(false, &[
    "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
    "fetch 1 2 | hold 1 queue_capacity | eager {ctx 1 gen 1/1 kv 9}",
    "hold 1 queue_capacity | eager {gen 2/2 kv 19}",
    "eager {ctx 2 gen 1/1 kv 10}",
    "eager {gen 1/1 kv 9}",
    "eager {gen 1/1 kv 10}",
])]
fn the_batch_size_holds_requests_back(#[case] overlap: bool, #[case] wanted: &[&str]) {
    let toy = plain();
    let mut scenario = toy.scenario(3, 3, 3);
    scenario.serving.max_batch_size = 2;
    scenario.serving.overlap = overlap;
    decided(&toy.predict(&scenario), wanted);
}

/// Outputs of one and of two tokens: a request of one has no time per token, and the receipt of
/// TPOT is the mean over the others.
#[test]
fn requests_of_one_token_have_no_part_in_tpot() {
    let toy = plain();
    let mut scenario = toy.scenario(2, 8, 2);
    scenario.workload.length_ratio = 0.5;
    let prediction = toy.predict(&scenario);
    let of = |output: u32| {
        let requests = prediction.log.requests.iter();
        requests.filter(move |request| request.output == output)
    };
    assert!(of(1).count() > 0 && of(2).count() > 0);
    assert!(of(1).all(|request| request.tpot_ms().is_none()));
    let sum_ms: f64 = of(2).filter_map(|request| request.tpot_ms()).sum();
    let mean_ms = sum_ms / of(2).count() as f64;
    exact(prediction.tpot.mean_ms, mean_ms, "mean");
    exact(prediction.tpot_receipt.total_ms(), mean_ms, "receipt");
}

fn batch_wait(scenario: &mut Scenario, timeout_iters: u32, tokens: u32) {
    scenario.serving.batch_wait = Some(BatchWait {
        timeout_iters,
        max_tokens_ratio: 0.25,
    });
    scenario.serving.max_num_tokens = 4 * tokens;
}

/// Two iterations of waiting at most, for more tokens (50) than ever come; two clients, three
/// requests of twelve tokens, no overlap. Request 1 is held in iterations 1 and 2 and runs in 3.
/// Request 0 has its twelve tokens in iteration 11; request 2 then waits two iterations of its own:
/// the counter began again with the release.
#[test]
fn batch_wait_ends_at_its_timeout_and_starts_again() {
    let toy = plain();
    let mut scenario = toy.scenario(2, 3, 12);
    scenario.serving.overlap = false;
    batch_wait(&mut scenario, 2, 50);
    let prediction = toy.predict(&scenario);
    begins(
        &prediction,
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
            "fetch 1 | hold 1 queue_batch_wait | eager {gen 1/1 kv 9}",
            "hold 1 queue_batch_wait | eager {gen 1/1 kv 10}",
            "eager {ctx 1 gen 1/1 kv 11}",
            "eager {gen 2/2 kv 21}",
            "eager {gen 2/2 kv 23}",
            "eager {gen 2/2 kv 25}",
            "eager {gen 2/2 kv 27}",
            "eager {gen 2/2 kv 29}",
            "eager {gen 2/2 kv 31}",
            "eager {gen 2/2 kv 33}",
            "eager {gen 2/2 kv 35}",
            "fetch 2 | hold 1 queue_batch_wait | eager {gen 1/1 kv 17}",
            "hold 1 queue_batch_wait | eager {gen 1/1 kv 18}",
            "eager {ctx 2 gen 1/1 kv 19}",
            "eager {gen 1/1 kv 9}",
        ],
    );
    // Request 1 waits from the end of the prefill (11) over two decode steps (22 more), request 2
    // over two decode steps: (22 + 22) / 3.
    let waited = prediction.ttft_receipt.part_ms(Part::QueueBatchWait);
    exact(waited, 44.0 / 3.0, "batch wait");
}

/// The burst leaves two prompts beside one generation request: 8 + 8 + 1 = 17 tokens. They run at
/// once where 17 are enough, and wait where 18 are asked for.
#[rstest]
#[case(17, "fetch 1 2 | eager {ctx 1 2 gen 1/1 kv 9}")]
#[case(18, "fetch 1 2 | hold 2 queue_batch_wait | eager {gen 1/1 kv 9}")]
fn batch_wait_counts_context_and_generation(#[case] tokens: u32, #[case] second: &str) {
    let toy = plain();
    let mut scenario = toy.scenario(3, 3, 12);
    batch_wait(&mut scenario, 50, tokens);
    let first = "fetch 0 | eager {ctx 0 gen 0/0 kv 0}";
    begins(&toy.predict(&scenario), &[first, second]);
}

/// Only prompts that would run count: of two, 16 tokens beside a generation request hold one, and
/// that comes to 9. It runs where 9 are enough, and waits where 10 are asked for.
#[rstest]
#[case(9.0 / 16.0, "fetch 1 2 | hold 1 queue_capacity | eager {ctx 1 gen 1/1 kv 9}")]
#[case(10.0 / 16.0, "fetch 1 2 | hold 2 queue_batch_wait | eager {gen 1/1 kv 9}")]
fn batch_wait_counts_no_prompt_that_does_not_fit(#[case] ratio: f64, #[case] second: &str) {
    let toy = plain();
    let mut scenario = toy.scenario(3, 3, 12);
    scenario.serving.max_num_tokens = 16;
    scenario.serving.batch_wait = Some(BatchWait {
        timeout_iters: 50,
        max_tokens_ratio: ratio,
    });
    let first = "fetch 0 | eager {ctx 0 gen 0/0 kv 0}";
    begins(&toy.predict(&scenario), &[first, second]);
}

/// Held, then released by its tokens. Seed 5 draws (8, 10) (7, 11) (8, 10) (8, 10) (7, 12) (7, 10)
/// from [7, 8] and [10, 12]; 16 tokens are enough; no overlap.
///
///     iteration  1   prompts 7 + 8 beside one request: 16, at once
///     iteration  9   request 0 has its ten tokens; request 3 (8) is posted
///     iteration 10   8 + two generating = 10: held; request 2 ends, request 4 (7) is posted
///     iteration 11   8 + 7 + one generating = 16: released
#[test]
fn batch_wait_ends_when_enough_tokens_are_there() {
    let toy = plain();
    let mut scenario = toy.scenario(3, 6, 12);
    scenario.workload.length_ratio = 0.9;
    scenario.workload.seed = 5;
    scenario.serving.overlap = false;
    batch_wait(&mut scenario, 50, 16);
    begins(
        &toy.predict(&scenario),
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0}",
            "fetch 1 2 | eager {ctx 1 2 gen 1/1 kv 9}",
            // KV of requests 0, 1 and 2: 10 + 8 + 9, one more each per step.
            "eager {gen 3/3 kv 27}",
            "eager {gen 3/3 kv 30}",
            "eager {gen 3/3 kv 33}",
            "eager {gen 3/3 kv 36}",
            "eager {gen 3/3 kv 39}",
            "eager {gen 3/3 kv 42}",
            "eager {gen 3/3 kv 45}",
            "eager {gen 3/3 kv 48}",
            "fetch 3 | hold 1 queue_batch_wait | eager {gen 2/2 kv 33}",
            "fetch 4 | eager {ctx 3 4 gen 1/1 kv 17}",
        ],
    );
}

/// Equal prompts over two attention ranks. Alone, request 0 goes to rank 0, and rank 1 runs a dummy
/// token so that the collectives have it. Then 1 goes to the empty rank, 2 to rank 0 (equal tokens
/// and requests: the lower), and 3 to rank 1 (rank 0 has its half of the four).
#[test]
fn attention_ranks_share_requests_evenly() {
    let toy = data_parallel();
    let prediction = toy.predict(&toy.scenario(4, 4, 3));
    decided(
        &prediction,
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0} {gen 0/1 kv 1}",
            "fetch 1 2 3 | eager {ctx 2 gen 1/1 kv 9} {ctx 1 3 gen 0/0 kv 0}",
            "eager {gen 2/2 kv 19} {gen 2/2 kv 18}",
            "eager {gen 1/1 kv 10} {gen 2/2 kv 20}",
            "idle",
        ],
    );
}

/// Longest prompts first, each to the rank with the fewest tokens that has room in its share of
/// three. Seed 0 draws prompts 13, 8, 11, 11, 15, 11 from [8, 16]:
///
///     0 (13) alone to rank 0                      13 |  0
///     4 (15) to rank 1                            13 | 15
///     2 (11) to rank 0                            24 | 15
///     3 (11) to rank 1                            24 | 26
///     5 (11) to rank 0, which has its three now   35 | 26
///     1  (8) to rank 1                            35 | 34
#[test]
fn the_rank_with_the_fewest_tokens_takes_the_longest_prompt() {
    let toy = data_parallel();
    let mut scenario = toy.scenario(6, 6, 6);
    scenario.workload.isl = 16;
    scenario.workload.length_ratio = 0.5;
    let prediction = toy.predict(&scenario);
    let prompts: Vec<u32> = prediction.log.requests.iter().map(|r| r.prompt).collect();
    assert_eq!(prompts, [13, 8, 11, 11, 15, 11]);
    let ranks: Vec<u32> = prediction.log.requests.iter().map(|r| r.rank).collect();
    assert_eq!(ranks, [0, 1, 0, 1, 1, 0]);
    begins(
        &prediction,
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0} {gen 0/1 kv 1}",
            "fetch 1 2 3 4 5 | eager {ctx 2 5 gen 1/1 kv 14} {ctx 4 3 1 gen 0/0 kv 0}",
        ],
    );
}

/// A graph is replayed at one batch on every rank: the empty one pads all of it, a token each.
#[test]
fn an_empty_rank_replays_the_graph_of_its_peer() {
    let toy = data_parallel();
    let mut scenario = toy.scenario(1, 1, 3);
    scenario.serving.cuda_graph = Some(graphs(&[2], true));
    decided(
        &toy.predict(&scenario),
        &[
            "fetch 0 | eager {ctx 0 gen 0/0 kv 0} {gen 0/1 kv 1}",
            "graph 2 {gen 1/2 kv 10} {gen 0/2 kv 2}",
            "graph 2 {gen 1/2 kv 11} {gen 0/2 kv 2}",
            "idle",
        ],
    );
}

/// Four clients on two ranks, no overlap. Seed 1 draws (7, 10) (8, 11) (4, 17) (5, 16) (7, 19)
/// (4, 12) from [4, 8] and [10, 20].
///
///     iteration  0   request 0 to rank 0; no rank generates: no hold
///     iteration  1   1 (8) to rank 1, 3 (5) to rank 0, 2 (4) to rank 1; rank 1 generates nothing:
///                    no hold
///     iteration  9   request 0 has its ten tokens; 4 is posted
///     iteration 10   4 to rank 0, rank 1 has no prompt
///     iteration 11   request 1 has its eleven tokens; 5 is posted
///     iteration 12   5 to rank 1
fn balanced(batching_wait_iters: u32, timeout_iters: u32) -> Prediction {
    let toy = data_parallel();
    let mut scenario = toy.scenario(4, 6, 20);
    scenario.workload.length_ratio = 0.5;
    scenario.workload.seed = 1;
    scenario.serving.overlap = false;
    scenario.serving.attention_dp_balance = Some(AttentionDpBalance {
        batching_wait_iters,
        timeout_iters,
    });
    toy.predict(&scenario)
}

const BALANCED: [&str; 10] = [
    "fetch 0 | eager {ctx 0 gen 0/0 kv 0} {gen 0/1 kv 1}",
    "fetch 1 2 3 | eager {ctx 3 gen 1/1 kv 8} {ctx 1 2 gen 0/0 kv 0}",
    // Rank 0: requests 0 (9) and 3 (6); rank 1: 1 (9) and 2 (5).
    "eager {gen 2/2 kv 15} {gen 2/2 kv 14}",
    "eager {gen 2/2 kv 17} {gen 2/2 kv 16}",
    "eager {gen 2/2 kv 19} {gen 2/2 kv 18}",
    "eager {gen 2/2 kv 21} {gen 2/2 kv 20}",
    "eager {gen 2/2 kv 23} {gen 2/2 kv 22}",
    "eager {gen 2/2 kv 25} {gen 2/2 kv 24}",
    "eager {gen 2/2 kv 27} {gen 2/2 kv 26}",
    "eager {gen 2/2 kv 29} {gen 2/2 kv 28}",
];

/// Request 4 is held until rank 1 has a prompt too (iteration 12), then both another two iterations
/// to fill up, and run together in iteration 14. Both waits, from 10 and from 12 to 14, are the
/// balance's.
#[test]
fn balance_waits_for_every_rank_and_then_to_fill_up() {
    let prediction = balanced(2, 50);
    let mut wanted = BALANCED.to_vec();
    wanted.extend([
        "fetch 4 | hold 1 queue_balance | eager {gen 1/1 kv 14} {gen 2/2 kv 30}",
        "hold 1 queue_balance | eager {gen 1/1 kv 15} {gen 2/2 kv 32}",
        "fetch 5 | hold 2 queue_balance | eager {gen 1/1 kv 16} {gen 1/1 kv 15}",
        "hold 2 queue_balance | eager {gen 1/1 kv 17} {gen 1/1 kv 16}",
        "eager {ctx 4 gen 1/1 kv 18} {ctx 5 gen 1/1 kv 17}",
    ]);
    begins(&prediction, &wanted);
    let start = |iteration: usize| prediction.log.iterations[iteration].start_ms;
    let waited = (start(14) - start(10)) + (start(14) - start(12));
    let balance = prediction.ttft_receipt.part_ms(Part::QueueBalance);
    exact(balance, waited / 6.0, "balance");
}

/// The counter counts iterations that are not balanced, also those without any prompt, and begins
/// again whenever it reaches the timeout of five: 1 to 5 in iterations 2 to 6, 1 to 3 in 7 to 9,
/// 4 in iteration 10, where request 4 is held, 5 in iteration 11, where it runs.
#[test]
fn balance_ends_at_its_timeout() {
    let mut wanted = BALANCED.to_vec();
    wanted.extend([
        "fetch 4 | hold 1 queue_balance | eager {gen 1/1 kv 14} {gen 2/2 kv 30}",
        "eager {ctx 4 gen 1/1 kv 15} {gen 2/2 kv 32}",
    ]);
    begins(&balanced(2, 5), &wanted);
}

/// Decisions and times do not depend on how steps are composed.
#[test]
fn both_methods_replay_the_same_schedule() {
    let toy = plain().with_host(&[eager("host_dispatch", 16.8), graph("graph_launch", 0.5)]);
    let mut scenario = toy.scenario(3, 9, 6);
    scenario.workload.length_ratio = 0.5;
    scenario.serving.cuda_graph = Some(graphs(&[1, 2], true));
    let by = |method| toy::predicted(toy.replayer().predict_by(&scenario, Policy::Strict, method));
    let (reference, fast) = (by(Method::OpByOp), by(Method::Segments));
    for (a, b) in reference.log.iterations.iter().zip(&fast.log.iterations) {
        assert_eq!(line(a), line(b));
        exact(a.start_ms, b.start_ms, "start");
    }
}
