//! Mixed iterations: what bounds them, cut prompts, split iterations, and kernel rows of a known
//! execution mode. The toy as in `schedule.rs`: one GPU, two full-attention layers, every kernel
//! 1 ms; a prefill or a decode step takes 11 ms, a mixed step 13 ms.

mod toy;

use std::collections::BTreeMap;
use std::path::Path;

use rstest::rstest;
use stepgate::case::CaseFile;
use stepgate::compose::{Method, Part};
use stepgate::gate::{Points, audit, homogeneity, null, sums};
use stepgate::model::{MixedExecution, ModelConfig, Piecewise, Scenario, StepScenario};
use stepgate::replay::{Outcome, Prediction, Replayer, StepPrediction};
use stepgate::timing::{Execution, Policy};

use toy::{MODEL, Times, Toy, close, eager, exact, graph, graphs, topology};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const SMALL: &str = "steps/h100-trtllm/qwen3.5-0.8b-tp1";
const EXAMPLE: &str = "docs/qwen3.5-0.8b-h100-c384.yaml";

fn project() -> Points {
    Points::open(Path::new(ROOT), None).expect("the project opens")
}

fn step(points: &Points, name: &str, policy: Policy) -> StepPrediction {
    let scenario: StepScenario = match points.case(name).expect("the case loads") {
        CaseFile::Step(case) => case.scenario(),
        other => panic!("{} is no step case", other.file().display()),
    };
    let step = points.replayer().step(&scenario, policy);
    step.expect("the data is sound").expect("every op has rows")
}

fn part(step: &StepPrediction, part: Part) -> f64 {
    step.parts_ms.get(&part).copied().unwrap_or(0.0)
}

/// Two ranks of a large model, host-bound; one GPU and a small model, bound by its kernels.
#[test]
fn one_composer_says_host_bound_and_gpu_bound() {
    let points = project();
    for name in ["mixed-886-3", "mixed-1014-3"] {
        let name = format!("steps/b200-trtllm/gpt-oss-120b-tp2/{name}");
        let step = step(&points, &name, Policy::Strict);
        assert_eq!(step.bound_by(), Some(Part::HostDispatch), "{name}");
        assert_eq!(step.iteration.bound_by(), Some(Part::HostDispatch));
        // Rank 0 waits for rank 1 inside the collectives, and no part holds that wait.
        let [first, second] = step.rank_wait_ms[..] else {
            panic!("two ranks");
        };
        assert!(first > 8.0 && second == 0.0, "{:?}", step.rank_wait_ms);
        assert!(part(&step, Part::Transfer) < 0.1, "{:?}", step.parts_ms);
        close(
            step.end_ms(),
            step.gpu_span_ms[0],
            0.2,
            "the sum of the parts",
        );
    }
    for tokens in [212, 1546, 3319, 5815, 7808] {
        let name = format!("{SMALL}/mixed-{tokens}-383");
        for policy in Policy::ALL {
            let step = step(&points, &name, policy);
            assert_eq!(step.bound_by(), Some(Part::Kernel), "{name}");
        }
    }
    // While the step repeats, the host's work lies behind the GPU's: it is on no path. In the
    // smallest chunk the kernels that have rows take less than the host's 25 ms.
    for tokens in [1546, 3319, 5815, 7808] {
        let name = format!("{SMALL}/mixed-{tokens}-383");
        let iteration = step(&points, &name, Policy::Estimate).iteration;
        assert_eq!(iteration.bound_by(), Some(Part::Kernel), "{name}");
        assert_eq!(iteration.parts_ms.len(), 1, "{:?}", iteration.parts_ms);
        close(iteration.host_ms, 25.0, 1e-9, "the host's work");
        assert!(iteration.host_ms < iteration.ms, "{name}");
    }
}

fn plain() -> Toy {
    Toy::dense(&[0, 0], topology(1, 1), &Times::all(1.0, 0.5))
}

/// Two prompts of 72 tokens at 40 tokens an iteration.
fn cut(toy: &Toy) -> Scenario {
    let mut scenario = toy.scenario(2, 2, 3);
    scenario.workload.isl = 72;
    scenario.serving.max_num_tokens = 40;
    scenario.serving.chunked_prefill = true;
    scenario
}

/// Pieces of prompts: request, tokens before, tokens now.
type Pieces = Vec<(u32, u32, u32)>;

/// What the context of each iteration computes, and the generation requests beside it.
fn pieces(prediction: &Prediction) -> Vec<(Pieces, u32)> {
    let iterations = prediction.log.iterations.iter();
    let steps = iterations.filter_map(|iteration| iteration.step.as_ref());
    steps
        .map(|(_, ranks)| {
            let rank = &ranks[0];
            let whole = |request: &u32| (0, prediction.log.requests[*request as usize].prompt);
            let chunks: Vec<(u32, u32)> = if rank.chunks.is_empty() {
                rank.context.iter().map(whole).collect()
            } else {
                rank.chunks.clone()
            };
            let of = |(request, (before, now)): (&u32, &(u32, u32))| (*request, *before, *now);
            let pieces = rank.context.iter().zip(&chunks).map(of).collect();
            (pieces, rank.generation)
        })
        .collect()
}

#[test]
fn a_prompt_is_cut_in_whole_blocks_beside_what_generates() {
    let toy = plain();
    let prediction = toy.predict(&cut(&toy));
    assert_eq!(
        pieces(&prediction),
        [
            // The idle executor takes request 0 alone: 40 tokens hold one block of it.
            (vec![(0, 0, 32)], 0),
            // Its rest fills the budget, so request 1 waits.
            (vec![(0, 32, 40)], 0),
            // 39 tokens are left beside a generation request: one block.
            (vec![(1, 0, 32)], 1),
            (vec![(1, 32, 32)], 1),
            // Request 0 is done, and the last 8 tokens end the prompt.
            (vec![(1, 64, 8)], 0),
            (vec![], 1),
            (vec![], 1),
        ]
    );
    // Contexts of 11 ms, then mixed steps of 13 ms; responses leave when the next step is out.
    exact(prediction.log.requests[0].first_token_ms, 22.0, "request 0");
    exact(prediction.log.requests[0].last_token_ms, 48.0, "request 0");
    // Scheduled when its first piece runs, finished with its last.
    let second = &prediction.log.requests[1];
    assert_eq!(second.iteration, 4);
    exact(second.scheduled_ms, 11.0, "the first piece of request 1");
    exact(second.first_token_ms, 59.0, "request 1");
}

/// Request 1 arrives while request 0 runs: one mixed iteration. Only then is overlap off, so that
/// each iteration can be added up by itself.
fn split_in_two(overlap: bool) -> (Toy, Scenario) {
    let toy = plain().with_host(&[
        eager("host_prepare", 2.0),
        eager("host_dispatch", 3.0),
        eager("host_finish", 0.25),
        graph("host_prepare", 7.0),
        graph("graph_launch", 0.5),
        graph("host_finish", 0.125),
    ]);
    let mut scenario = toy.scenario(2, 2, 3);
    scenario.serving.overlap = overlap;
    scenario.serving.cuda_graph = Some(graphs(&[1, 2], true));
    scenario.serving.mixed_execution = MixedExecution::Split;
    (toy, scenario)
}

#[rstest]
#[case::by_op(Method::OpByOp)]
#[case::fast(Method::Segments)]
fn a_split_iteration_prepares_once_launches_and_then_submits(#[case] method: Method) {
    let (toy, scenario) = split_in_two(false);
    let outcome = toy.replayer().predict_by(&scenario, Policy::Strict, method);
    let prediction = toy::predicted(outcome);
    let modes: Vec<_> = (prediction.log.iterations.iter())
        .map(|iteration| (iteration.mode(), iteration.decode_graph))
        .collect();
    assert_eq!(
        modes,
        [
            (Some("eager"), None),
            (Some("split"), Some(1)),
            (Some("full_graph"), None),
            (Some("full_graph"), None),
        ]
    );
    let (execution, _) = prediction.log.iterations[1].step.as_ref().expect("a step");
    assert_eq!(*execution, Execution::Eager);
    assert_eq!(prediction.steps["mixed split"], 1);
    assert!(
        prediction
            .coverage
            .missing
            .iter()
            .all(|gap| !gap.contains('('))
    );
    // Prepared at 2, qkv is the third of 24 submissions in 3 ms: the stream ends 11 kernels later.
    let first = 2.0 + 3.0 * 3.0 / 24.0 + 11.0 + 0.25;
    exact(
        prediction.log.requests[0].first_token_ms,
        first,
        "request 0",
    );
    // The graph begins behind prepare and launch; the context is submitted meanwhile.
    let mixed = first + 2.0 + 0.5 + 11.0 + 11.0 + 0.25;
    exact(
        prediction.log.requests[1].first_token_ms,
        mixed,
        "request 1",
    );
    // Both decode: a whole graph step with its own rows.
    let decode = mixed + 7.0 + 0.5 + 11.0 + 0.125;
    exact(prediction.log.requests[0].last_token_ms, decode, "its end");
}

#[test]
fn without_a_captured_batch_a_mixed_iteration_stays_whole() {
    let (toy, mut scenario) = split_in_two(false);
    scenario.serving.cuda_graph = Some(graphs(&[2], false));
    let prediction = toy.predict(&scenario);
    assert_eq!(prediction.steps["mixed eager"], 1);
    assert!(!prediction.steps.contains_key("mixed split"));
}

fn config_of(replayer: &Replayer, model: &str) -> BTreeMap<String, ModelConfig> {
    let config = ModelConfig::load(replayer.models(), model).expect("the config loads");
    BTreeMap::from([(model.to_owned(), config)])
}

#[track_caller]
fn proved(
    replayer: &Replayer,
    scenario: &Scenario,
    policy: Policy,
    configs: &BTreeMap<String, ModelConfig>,
) -> Prediction {
    let prediction = toy::predicted(replayer.predict(scenario, policy));
    let scaled = |factor, recorded: Option<&_>| -> Result<Outcome, _> {
        replayer.predict_scaled(scenario, policy, factor, |_| true, recorded)
    };
    null("null", scaled).expect("no time without rows");
    homogeneity("homogeneity", scaled).expect("time in proportion to rows");
    sums("sums", &prediction).expect("parts and receipt sum up");
    if let Err(faults) = audit(scenario, configs, &prediction) {
        let lines: Vec<String> = faults.iter().map(ToString::to_string).collect();
        panic!("{}", lines.join("\n"));
    }
    prediction
}

#[rstest]
#[case::eager(MixedExecution::Eager)]
#[case::piecewise(MixedExecution::Piecewise)]
#[case::split(MixedExecution::Split)]
fn the_proofs_hold_for_cut_prompts_in_every_mixed_execution(
    #[case] mixed: MixedExecution,
    #[values(true, false)] overlap: bool,
) {
    let (toy, mut scenario) = split_in_two(overlap);
    let cut = cut(&toy);
    scenario.workload = cut.workload;
    scenario.workload.requests = 6;
    scenario.workload.concurrency = 3;
    scenario.serving.max_num_tokens = cut.serving.max_num_tokens;
    scenario.serving.chunked_prefill = true;
    scenario.serving.mixed_execution = mixed;
    scenario.serving.piecewise = (mixed == MixedExecution::Piecewise).then_some(Piecewise {
        max_tokens: 40,
        capture_tokens: None,
    });
    let replayer = toy.replayer();
    let configs = config_of(&replayer, MODEL);
    let prediction = proved(&replayer, &scenario, Policy::Strict, &configs);
    let counted = format!(
        "mixed {}",
        if mixed == MixedExecution::Split {
            "split"
        } else {
            mixed.as_str()
        }
    );
    assert!(prediction.steps[&counted] > 0, "{:?}", prediction.steps);
}

/// Two ranks, the second slower on its host.
#[test]
fn the_fast_path_is_the_reference_and_the_proofs_hold_on_two_ranks() {
    let toy = Toy::dense(&[0, 0], topology(2, 1), &Times::all(1.0, 0.5)).with_host(&[
        eager("host_prepare", 2.0),
        eager("host_dispatch", 3.0).rank(0),
        eager("host_dispatch", 40.0).rank(1),
        graph("graph_launch", 0.5),
    ]);
    let mut scenario = cut(&toy);
    scenario.workload.requests = 8;
    scenario.workload.concurrency = 4;
    scenario.serving.cuda_graph = Some(graphs(&[1, 2, 4], true));
    scenario.serving.mixed_execution = MixedExecution::Split;
    let replayer = toy.replayer();
    let configs = config_of(&replayer, MODEL);
    let fast = proved(&replayer, &scenario, Policy::Strict, &configs);
    assert!(fast.steps["mixed split"] > 1, "{:?}", fast.steps);
    let reference = replayer.predict_by(&scenario, Policy::Strict, Method::OpByOp);
    let reference = toy::predicted(reference);
    for (fast, reference) in fast.log.requests.iter().zip(&reference.log.requests) {
        close(
            fast.first_token_ms,
            reference.first_token_ms,
            1e-9,
            "first token",
        );
        close(
            fast.last_token_ms,
            reference.last_token_ms,
            1e-9,
            "last token",
        );
    }
}

/// The audit takes no decision on trust: another cut, another split.
#[test]
fn false_decisions_of_cut_and_split_iterations_are_caught_by_the_audit() {
    let (toy, mut scenario) = split_in_two(true);
    scenario.workload = cut(&toy).workload;
    scenario.serving.max_num_tokens = 40;
    scenario.serving.chunked_prefill = true;
    let replayer = toy.replayer();
    let configs = config_of(&replayer, MODEL);
    let honest = proved(&replayer, &scenario, Policy::Strict, &configs);
    let caught = |spoil: &dyn Fn(&mut Prediction)| {
        let mut faulty = honest.clone();
        spoil(&mut faulty);
        audit(&scenario, &configs, &faulty).is_err()
    };
    assert!(!caught(&|_| {}));
    assert!(caught(&|one| {
        let (_, ranks) = one.log.iterations[0].step.as_mut().expect("a step");
        ranks[0].chunks[0].1 = 31;
    }));
    let split = honest.log.iterations.iter();
    let split = split.clone().position(|one| one.decode_graph.is_some());
    let split = split.expect("a split iteration");
    assert!(caught(&|one| one.log.iterations[split].decode_graph = None));
    assert!(caught(
        &|one| one.log.iterations[split].decode_graph = Some(2)
    ));
}

/// Decode attention of two layers took 6 ms eagerly, for 2 requests of 10 tokens each.
fn with_kernel_row(toy: &Toy, execution: &str, ms: f64, layers: u32) {
    toy.write(
        &format!("host/kernel-{ms}.yaml"),
        &format!(
            "scope:\n  runtime: trtllm\n  version: {}\n  system: {}\n  model: {MODEL}\n  \
             topology: {{ tp: 1, dp: 1, moe_tp: 1, moe_ep: 1 }}\n  cpu: not recorded\nrows:\n  \
             - id: kernel-{ms}\n    boundary: gpu_kernel\n    execution: {execution}\n    module: \
             generation attention (full)\n    phase: decode\n    shape: {{ requests: 2, mean_kv: 10, \
             layers: {layers} }}\n    samples: {{ mean_ms: {ms:?}, observer: profiler }}\n    \
             provenance: {{ measured: {{ source: {{ table: t, row: r, column: c }} }} }}\n",
            toy::VERSION,
            toy::SYSTEM
        ),
    );
}

#[test]
fn a_kernel_row_of_its_mode_goes_before_the_tables_scaled_by_kv_bytes() {
    let toy = plain();
    with_kernel_row(&toy, "eager", 6.0, 2);
    with_kernel_row(&toy, "{ full_graph: { captured_batch: 2 } }", 1.0, 2);
    let mut scenario = toy.scenario(1, 1, 3);
    scenario.serving.overlap = false;
    let replayer = toy.replayer();
    let configs = config_of(&replayer, MODEL);
    let step = |prediction: &Prediction| {
        let [second, third] = [1, 2].map(|at| prediction.log.iterations[at].start_ms);
        third - second
    };
    // One request of 9 tokens: 9 of the 20 that the row attends to. Eight other kernels and lm_head.
    let eager = proved(&replayer, &scenario, Policy::Strict, &configs);
    exact(step(&eager), 9.0 + 6.0 * 9.0 / 20.0, "an eager decode step");
    assert!(eager.coverage.observers.contains("profiler"));
    let flags = &eager.coverage.gpu["generation attention (full)"];
    assert!(
        flags.contains("measured (eager)") && flags.contains("scaled"),
        "{flags:?}"
    );
    scenario.serving.cuda_graph = Some(graphs(&[1], true));
    let graphed = proved(&replayer, &scenario, Policy::Strict, &configs);
    exact(step(&graphed), 9.0 + 9.0 / 20.0, "a decode graph");
    // Another model, version or system: the tables answer.
    scenario.serving.cuda_graph = None;
    scenario.deployment.backend.version = "9".to_owned();
    let elsewhere = toy.predict(&scenario);
    exact(step(&elsewhere), 11.0, "an eager decode step elsewhere");
}

#[test]
fn a_kernel_row_that_fits_no_op_is_refused() {
    let toy = plain();
    with_kernel_row(&toy, "eager", 6.0, 3);
    let scenario = toy.scenario(1, 1, 3);
    let error = toy.replayer().predict(&scenario, Policy::Strict);
    let error = error.expect_err("three layers of two");
    assert!(
        error.to_string().contains("sums over 3 layers of 2"),
        "{error}"
    );
}

/// The example under each execution, shortened so that the audit stays quick.
#[test]
fn the_proofs_hold_for_the_example() {
    let points = project();
    let example = points.load(&Path::new(ROOT).join(EXAMPLE));
    let CaseFile::Serving(case) = example.expect("the example loads") else {
        panic!("a serving case");
    };
    let mut scenario = case.scenario();
    scenario.workload.osl = 40;
    scenario.workload.requests = 450;
    let replayer = points.replayer();
    let mut configs = config_of(replayer, "qwen3.5-0.8b");
    configs.extend(config_of(replayer, "gpt-oss-120b"));
    let mut mean_ms = Vec::new();
    for mixed in [MixedExecution::Eager, MixedExecution::Split] {
        scenario.serving.mixed_execution = mixed;
        let prediction = proved(replayer, &scenario, Policy::Estimate, &configs);
        mean_ms.push(prediction.tpot.mean_ms);
    }
    assert_ne!(mean_ms[0], mean_ms[1]);
}
