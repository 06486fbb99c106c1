//! The fast path against the reference: whole predictions of every kind of serving case, and random
//! steps.

mod toy;

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use rstest::rstest;
use stepgate::case::CaseFile;
use stepgate::compose::{Composer, LaneStart, Method, Part, PathStart, StepTimes};
use stepgate::gate::Points;
use stepgate::model::{BackendName, RankLoad, Scenario};
use stepgate::replay::{Outcome, Prediction, Replayer};
use stepgate::timing::{Execution, Policy, Topology};

use toy::{Times, Toy, WINDOW, eager, graph, host, topology};

const RELATIVE: f64 = 1e-9;

/// `Err` names what differs by more than 1e-9 of its size.
fn near(what: impl FnOnce() -> String, reference: f64, fast: f64) -> Result<(), String> {
    let size = reference.abs().max(fast.abs());
    if (reference - fast).abs() <= RELATIVE * size {
        Ok(())
    } else {
        Err(format!(
            "{}: {reference} op by op, {fast} by segments",
            what()
        ))
    }
}

fn by(replayer: &Replayer, scenario: &Scenario, policy: Policy, method: Method) -> Prediction {
    toy::predicted(replayer.predict_by(scenario, policy, method))
}

/// Every time and decision of two predictions. Parts are compared by the size of the total: a part
/// that is a small difference of large sums carries their rounding.
fn same(reference: &Prediction, fast: &Prediction) -> Result<(), String> {
    let (slow, quick) = (&reference.log, &fast.log);
    if slow.iterations.len() != quick.iterations.len() {
        return Err("the number of iterations".to_owned());
    }
    for (index, (a, b)) in slow.iterations.iter().zip(&quick.iterations).enumerate() {
        if !a.decides_as(b) {
            return Err(format!("decisions of iteration {index}"));
        }
        near(
            || format!("start of iteration {index}"),
            a.start_ms,
            b.start_ms,
        )?;
    }
    for (index, (a, b)) in slow.requests.iter().zip(&quick.requests).enumerate() {
        near(
            || format!("TTFT of request {index}"),
            a.ttft_ms(),
            b.ttft_ms(),
        )?;
        let (a, b) = (a.tpot_ms().unwrap_or(0.0), b.tpot_ms().unwrap_or(0.0));
        near(|| format!("TPOT of request {index}"), a, b)?;
    }
    near(
        || "mean TTFT".to_owned(),
        reference.ttft.mean_ms,
        fast.ttft.mean_ms,
    )?;
    near(
        || "mean TPOT".to_owned(),
        reference.tpot.mean_ms,
        fast.tpot.mean_ms,
    )?;
    for (name, total, a, b) in [
        (
            "TTFT",
            reference.ttft.mean_ms,
            &reference.ttft_receipt,
            &fast.ttft_receipt,
        ),
        (
            "TPOT",
            reference.tpot.mean_ms,
            &reference.tpot_receipt,
            &fast.tpot_receipt,
        ),
    ] {
        for part in Part::ALL {
            let differ = (a.part_ms(part) - b.part_ms(part)).abs();
            if differ > RELATIVE * total {
                return Err(format!("{} of {name}: {differ} ms", part.name()));
            }
        }
        near(|| format!("receipt of {name}"), total, a.total_ms())?;
        near(|| format!("fast receipt of {name}"), total, b.total_ms())?;
    }
    if (&reference.steps, &reference.coverage) != (&fast.steps, &fast.coverage) {
        return Err("steps or coverage".to_owned());
    }
    Ok(())
}

/// What whole predictions are compared by: model, system, backend, topology, and the kinds and
/// modes of the steps.
type Group = (String, String, String, Topology, Vec<String>);

/// Walking every step of every case op by op takes minutes, and most cases differ in lengths and
/// batch sizes alone. So the fast path predicts every case, which sorts them into groups that
/// launch the same ops in the same modes; of each group the case with the fewest requests is
/// replayed by both methods under both policies, for the two opening rounds of its clients, or as a
/// whole where that is too short to show every kind of step. Random steps and replays are below.
fn representatives(points: &Points, backend: BackendName) -> Vec<(String, Scenario)> {
    let mut least: BTreeMap<Group, (u32, String, Scenario)> = BTreeMap::new();
    for name in points.names().expect("the case names") {
        let CaseFile::Serving(case) = points.case(&name).expect("a case that loads") else {
            continue;
        };
        let scenario = case.scenario();
        let deployment = &scenario.deployment;
        if deployment.backend.name != backend {
            continue;
        }
        let Some(kinds) = kinds(points.replayer(), &scenario) else {
            continue;
        };
        let group = (
            deployment.model.clone(),
            deployment.system.clone(),
            deployment.backend.version.clone(),
            deployment.parallel,
            kinds,
        );
        let requests = scenario.workload.requests;
        if least.get(&group).is_none_or(|known| requests < known.0) {
            least.insert(group, (requests, name, scenario));
        }
    }
    let shortened = |(group, (_, name, scenario)): (Group, (u32, String, Scenario))| {
        let mut short = scenario.clone();
        short.workload.requests = 2 * scenario.workload.concurrency;
        let shows_all = kinds(points.replayer(), &short).as_ref() == Some(&group.4);
        (name, if shows_all { short } else { scenario })
    };
    least.into_iter().map(shortened).collect()
}

/// Kinds and modes of the steps, by the fast path. `None` for a refusal, which comes before any
/// step: there is nothing to compose.
fn kinds(replayer: &Replayer, scenario: &Scenario) -> Option<Vec<String>> {
    match replayer.predict(scenario, Policy::Strict) {
        Ok(Outcome::Predicted(prediction)) => Some(prediction.steps.into_keys().collect()),
        Ok(Outcome::Refused(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

#[rstest]
#[case(BackendName::Trtllm)]
#[case(BackendName::Sglang)]
fn whole_predictions_of_every_kind_of_case_agree(#[case] backend: BackendName) {
    let points = Points::open(Path::new(env!("CARGO_MANIFEST_DIR")), None).expect("the project");
    let replayer = points.replayer();
    let chosen = representatives(&points, backend);
    let mut failures = Vec::new();
    for (name, scenario) in &chosen {
        for policy in Policy::ALL {
            let reference = by(replayer, scenario, policy, Method::OpByOp);
            let fast = by(replayer, scenario, policy, Method::Segments);
            if let Err(what) = same(&reference, &fast) {
                failures.push(format!("{name}, {}: {what}", policy.name()));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    println!("{} cases were compared", chosen.len());
    assert!(
        chosen.len() >= 6,
        "only {} cases were compared",
        chosen.len()
    );
}

/// A random step: a toy with its times and host rows, and the lanes it starts from.
#[derive(Debug, Clone)]
struct Case {
    windows: Vec<u32>,
    /// Attention ranks of the expert toy; the dense toy shares its layers over TP instead.
    data_parallel: bool,
    lanes: u32,
    times: Times,
    /// Milliseconds per lane: prepare, launch, dispatch.
    host_ms: Vec<(f64, f64, f64)>,
    loads: Vec<RankLoad>,
    execution: Execution,
    start: LaneStart,
}

/// From nothing to speak of to far longer than any host time, in many sizes between.
fn duration() -> impl Strategy<Value = f64> {
    (-3.0..1.5_f64).prop_map(|exponent| 10_f64.powf(exponent))
}

fn times() -> impl Strategy<Value = Times> {
    prop::collection::vec(duration(), 14).prop_map(|ms| Times {
        qkv: ms[0],
        context: [ms[1], ms[2]],
        generation: [ms[3], ms[4]],
        o: ms[5],
        gate_up: ms[6],
        down: ms[7],
        router: ms[8],
        experts: ms[9],
        lm_head: ms[10],
        all_reduce: ms[11],
        all_gather: ms[12],
        all_to_all: ms[13],
    })
}

fn load() -> impl Strategy<Value = RankLoad> {
    (prop::collection::vec(1..40_u32, 0..3), 0..5_u32, 1..30_u64).prop_map(
        |(prompts, generation, mean_kv)| RankLoad {
            // Nothing to do is a dummy token.
            padded: if prompts.is_empty() {
                generation.max(1)
            } else {
                generation
            },
            kv_sum: mean_kv * u64::from(generation.max(1)),
            prompts,
            generation,
            ..RankLoad::default()
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (
        prop::collection::vec(prop::sample::select(vec![0, WINDOW]), 1..=6),
        any::<bool>(),
        prop::sample::select(vec![1_u32, 2, 4]),
        0..3_usize,
    );
    (shape, times()).prop_flat_map(|((windows, data_parallel, lanes, mode), times)| {
        let many = lanes as usize;
        let host = prop::collection::vec((duration(), duration(), dispatch()), many);
        let start = prop::collection::vec((0.0..30.0, 0.0..60.0), many);
        let loads = prop::collection::vec(load(), if data_parallel { many } else { 1 });
        (host, start, loads).prop_map(move |(host_ms, start, mut loads)| {
            let execution = match mode {
                0 => Execution::Eager,
                1 => Execution::Piecewise {
                    captured_tokens: 64,
                },
                _ => {
                    for load in &mut loads {
                        load.prompts.clear();
                        load.padded = 8;
                    }
                    Execution::FullGraph { captured_batch: 8 }
                }
            };
            Case {
                windows: windows.clone(),
                data_parallel,
                lanes,
                times: times.clone(),
                host_ms,
                loads,
                execution,
                start: LaneStart {
                    host_ms: start.iter().map(|at| at.0).collect(),
                    gpu_ms: start.iter().map(|at| at.1).collect(),
                },
            }
        })
    })
}

/// A forward's dispatch: from far below its kernels to far above them.
fn dispatch() -> impl Strategy<Value = f64> {
    (-1.0..3.0_f64).prop_map(|exponent| 10_f64.powf(exponent))
}

impl Case {
    /// Writes the data folder, its kernels a little different with every batch and length, so that
    /// attention ranks with other loads take other times.
    fn toy(&self) -> Toy {
        let (topology, times) = if self.data_parallel {
            (topology(1, self.lanes), &self.times)
        } else {
            (topology(self.lanes, 1), &self.times)
        };
        let toy = if self.data_parallel {
            Toy::experts(&self.windows, topology, times)
        } else {
            Toy::dense(&self.windows, topology, times)
        };
        let mut gemms = toy::toy_gemms(topology, self.data_parallel, times);
        for row in &mut gemms {
            if row.2 > 1 {
                row.2 = 64;
                row.3 *= 2.0;
            }
        }
        toy.gemm(&gemms);
        let mut rows = Vec::new();
        for (rank, (prepare, launch, dispatch)) in (0..).zip(&self.host_ms) {
            let piecewise = "{ piecewise: { captured_tokens: 64 } }";
            rows.extend(
                [
                    eager("host_prepare", *prepare),
                    eager("host_dispatch", *dispatch),
                    graph("host_prepare", *prepare),
                    graph("graph_launch", *launch),
                    host("host_prepare", piecewise, *prepare),
                    host("graph_launch", piecewise, *launch),
                    host("host_dispatch", piecewise, *dispatch),
                ]
                .map(|row| row.rank(rank)),
            );
        }
        toy.with_host(&rows)
    }
}

/// Each lane's path from where it begins: its terms by part.
fn path_sum(composer: &Composer, start: &LaneStart, times: &StepTimes, lane: usize) -> f64 {
    let path = &times.gpu_path[lane];
    let begin = match path.from {
        PathStart::Host(at) => start.host_ms[at],
        PathStart::Gpu(at) => start.gpu_ms[at],
    };
    let terms = path.terms.iter();
    begin
        + terms
            .map(|term| term.times * composer.pricer().ms(term.lookup))
            .sum::<f64>()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_steps_agree(case in case()) {
        let toy = case.toy();
        let mut ends = BTreeMap::new();
        for method in toy::METHODS {
            let mut composer = toy.composer(method, Policy::Strict);
            prop_assert_eq!(composer.lanes(), case.lanes as usize);
            let times = composer.step(&case.loads, case.execution, &case.start);
            for lane in 0..composer.lanes() {
                let sum = path_sum(&composer, &case.start, &times, lane);
                let check = near(|| format!("path of lane {lane}, {method:?}"), times.gpu_ms[lane], sum);
                prop_assert!(check.is_ok(), "{:?}", check);
                for term in &times.gpu_path[lane].terms {
                    prop_assert!(term.times > 0.0, "{:?}", term);
                }
            }
            ends.insert(format!("{method:?}"), times);
        }
        let (reference, fast) = (&ends["OpByOp"], &ends["Segments"]);
        for lane in 0..case.lanes as usize {
            for (what, a, b) in [
                ("host", reference.host_ms[lane], fast.host_ms[lane]),
                ("gpu", reference.gpu_ms[lane], fast.gpu_ms[lane]),
            ] {
                let check = near(|| format!("{what} of lane {lane}"), a, b);
                prop_assert!(check.is_ok(), "{:?}", check);
            }
        }
        // What must hold of any step: no lane ends before its host's last submission or its own
        // kernels, waits are never negative, and nobody waits alone.
        for lane in 0..case.lanes as usize {
            prop_assert!(reference.gpu_ms[lane] >= reference.host_ms[lane]);
            prop_assert!(reference.wait_ms[lane] >= 0.0);
        }
        if case.lanes == 1 {
            prop_assert_eq!(reference.wait_ms[0], 0.0);
        }
    }

    /// Whole replays of random toys agree too: lane state carries over, decode replays take the
    /// closed form, and paths run through many steps.
    #[test]
    fn random_replays_agree(case in case(), concurrency in 1..6_u32, osl in 4..9_u32, padding: bool) {
        let toy = case.toy();
        let mut scenario = toy.scenario(concurrency, 2 * concurrency, osl);
        scenario.workload.length_ratio = 0.5;
        scenario.serving.cuda_graph = Some(toy::graphs(&[1, 2, 4], padding));
        scenario.serving.overlap = case.host_ms[0].0 > 0.1;
        let replayer = toy.replayer();
        let [reference, fast] = toy::METHODS.map(|method| by(&replayer, &scenario, Policy::Strict, method));
        let check = same(&reference, &fast);
        prop_assert!(check.is_ok(), "{:?}", check);
    }
}
