//! Speed of a step, of the points in one process, and of a process that needs a single case.

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use stepgate::case::CaseFile;
use stepgate::compose::{LaneStart, Method};
use stepgate::gate::Points;
use stepgate::model::{RankLoad, Scenario};
use stepgate::replay::Outcome;
use stepgate::timing::{Execution, Policy};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const C4: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4";
const SGLANG: &str = "qwen3.5-397b-a17b/b200-sglang-bf16/tp8/1024-1024-c4";

fn points() -> Points {
    Points::open(Path::new(ROOT), None).expect("the project opens")
}

fn scenario(points: &Points, name: &str) -> Scenario {
    match points.case(name).expect("the case is valid") {
        CaseFile::Serving(case) => case.scenario(),
        _ => panic!("{name} is no serving case"),
    }
}

/// One eager mixed step (886 prompt tokens, 3 generation requests) on two rank lanes.
fn mixed_step(c: &mut Criterion) {
    let points = points();
    let scenario = scenario(&points, C4);
    let mut group = c.benchmark_group("eager mixed step, 2 ranks");
    for (name, method) in [("op by op", Method::OpByOp), ("segments", Method::Segments)] {
        let mut composer = points
            .replayer()
            .composer(&scenario, Policy::Strict)
            .expect("data")
            .expect("rows");
        composer.set_method(method);
        let loads = [RankLoad {
            prompts: vec![886],
            generation: 3,
            padded: 3,
            kv_sum: 4158,
            ..RankLoad::default()
        }];
        let start = LaneStart {
            host_ms: vec![0.0; composer.lanes()],
            gpu_ms: vec![0.0; composer.lanes()],
        };
        group.bench_function(name, |b| {
            b.iter(|| composer.step(black_box(&loads), Execution::Eager, &start));
        });
    }
    group.finish();
}

/// Every serving case in this process, on one core, tables loaded.
fn all_points(c: &mut Criterion) {
    let points = points();
    let scenarios: Vec<Scenario> = points
        .names()
        .expect("names")
        .iter()
        .filter_map(|name| match points.case(name).expect("valid") {
            CaseFile::Serving(case) => Some(case.scenario()),
            _ => None,
        })
        .collect();
    let mut group = c.benchmark_group(format!("{} points in process", scenarios.len()));
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(10));
    for policy in Policy::ALL {
        group.bench_function(policy.name(), |b| {
            b.iter(|| {
                for scenario in &scenarios {
                    black_box(points.replayer().predict(scenario, policy).expect("data"));
                }
            });
        });
    }
    group.finish();
}

/// Time per iteration of the scheduler with 1, 4 and 16 times the requests: it must not grow.
fn scaling(c: &mut Criterion) {
    let points = points();
    let mut group = c.benchmark_group("iterations");
    group.sample_size(10);
    for (backend, name) in [("trtllm", C4), ("sglang", SGLANG)] {
        for times in [1, 4, 16] {
            let mut scenario = scenario(&points, name);
            scenario.workload.requests *= times;
            let predict = || match points.replayer().predict(&scenario, Policy::Strict) {
                Ok(Outcome::Predicted(prediction)) => prediction.log.iterations.len() as u64,
                other => panic!("{name} is predicted: {other:?}"),
            };
            group.throughput(Throughput::Elements(predict()));
            group.bench_function(format!("{backend}, {times}x requests"), |b| b.iter(predict));
        }
    }
    group.finish();
}

/// A process that needs one case: start, read the case and its tables, predict, compare.
fn one_case_process(c: &mut Criterion) {
    let mut group = c.benchmark_group("process of one case");
    group.sample_size(20);
    group.bench_function("drift c4", |b| {
        b.iter(|| {
            let output = Command::new(env!("CARGO_BIN_EXE_stepgate"))
                .args(["--root", ROOT, "drift", C4])
                .output()
                .expect("the binary runs");
            assert!(output.status.success());
        });
    });
    group.finish();
}

criterion_group!(speed, mixed_step, scaling, all_points, one_case_process);
criterion_main!(speed);
