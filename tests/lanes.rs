//! Steps on the lanes, worked out by hand and held to 1e-9 ms under both ways of composing.
//!
//! Launch numbers of the dense TP 2 toy with two layers, prefill only (`toy/mod.rs` has the table):
//!
//! | op | layer 1 | layer 2 |
//! |---|---:|---:|
//! | embedding, all-gather, norm | 1, 2, 3 | |
//! | qkv | 4 | 13 |
//! | context attention (two launches) | 6 | 15 |
//! | o | 7 | 16 |
//! | all-reduce (norm fused) | 8 | 17 |
//! | gate_up, activation, down | 9, 10, 11 | 18, 19, 20 |
//! | all-reduce | 12 | 21 |
//! | gather, lm_head, all-gather, sampling (two) | | 22, 23, 24, 26 |
//!
//! An op is submitted when its last launch is. With 26 ms of dispatch launch n is submitted at n ms.

mod toy;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rstest::rstest;
use stepgate::compose::{Composer, LaneStart, Method, Part, PathStart, StepPath, StepTimes};
use stepgate::gate::Points;
use stepgate::model::{RankLoad, Scenario};
use stepgate::perfdb::{HostKey, HostRows};
use stepgate::replay::Outcome;
use stepgate::timing::{Boundary, Execution, HostClass, HostMode, Policy, Topology};

use toy::{
    CPU, HostRow, METHODS, MODEL, SYSTEM, Times, Toy, ToyScope, VERSION, decode, eager, exact,
    graph, graphs, host, predicted, prefill, request, topology,
};

/// Dispatch rows of one rank each.
fn dispatch(ms: &[f64]) -> Vec<HostRow> {
    let rank = |(rank, ms): (usize, &f64)| eager("host_dispatch", *ms).rank(rank as u32);
    ms.iter().enumerate().map(rank).collect()
}

fn tp2(times: &Times, rows: &[HostRow]) -> Toy {
    Toy::dense(&[0, 0], topology(2, 1), times).with_host(rows)
}

fn start(host_ms: &[f64], gpu_ms: &[f64]) -> LaneStart {
    LaneStart {
        host_ms: host_ms.to_vec(),
        gpu_ms: gpu_ms.to_vec(),
    }
}

/// One step from the given lane state, by both methods.
fn by_both(
    toy: &Toy,
    loads: &[RankLoad],
    execution: Execution,
    from: &LaneStart,
    check: impl Fn(Method, &Composer, &StepTimes),
) {
    for method in METHODS {
        let mut composer = toy.composer(method, Policy::Strict);
        assert_eq!(composer.lanes(), from.host_ms.len(), "lanes");
        let times = composer.step(loads, execution, from);
        check(method, &composer, &times);
        for (lane, path) in times.gpu_path.iter().enumerate() {
            let begin = match path.from {
                PathStart::Host(at) => from.host_ms[at],
                PathStart::Gpu(at) => from.gpu_ms[at],
            };
            let sum: f64 = parts(&composer, path).values().sum();
            exact(begin + sum, times.gpu_ms[lane], "a path's terms");
        }
    }
}

fn parts(composer: &Composer, path: &StepPath) -> BTreeMap<Part, f64> {
    let mut parts = BTreeMap::new();
    for term in &path.terms {
        *parts.entry(term.part).or_insert(0.0) += term.times * composer.pricer().ms(term.lookup);
    }
    parts
}

/// The parts of a path, all of them; ops without a table are below the tolerance.
#[track_caller]
fn has_parts(composer: &Composer, path: &StepPath, wanted: &[(Part, f64)]) {
    let found = parts(composer, path);
    for part in Part::ALL {
        let wanted = wanted.iter().find(|(name, _)| *name == part);
        exact(
            found.get(&part).copied().unwrap_or(0.0),
            wanted.map_or(0.0, |(_, ms)| *ms),
            part.name(),
        );
    }
}

/// Both ranks submit a launch per millisecond, rank 1 starts 2 ms later; kernels 0.1, transfers
/// 0.05 ms. Everything is host-bound, so rank 0 reaches each of the six collectives (launches 2, 8,
/// 12, 17, 21, 24) 2 ms before rank 1:
///
///     waits on rank 0   6 x 2 = 12, on rank 1 none
///     rank 1            2 + 26 (sampling submitted)       = 28
///     rank 0            rank 1's logits all-gather at 2 + 24, + 0.05 = 26.05
///
/// The 12 ms of waiting are more than the 2 ms of lag, and appear in no end.
#[test]
fn a_host_that_lags_holds_every_collective_and_is_paid_once() {
    let toy = tp2(&Times::all(0.1, 0.05), &dispatch(&[26.0, 26.0]));
    let from = start(&[0.0, 2.0], &[0.0, 0.0]);
    by_both(
        &toy,
        &[prefill(&[8])],
        Execution::Eager,
        &from,
        |method, composer, times| {
            exact(times.host_ms[0], 26.0, "host of rank 0");
            exact(times.host_ms[1], 28.0, "host of rank 1");
            exact(times.gpu_ms[1], 28.0, "end of rank 1");
            exact(times.gpu_ms[0], 26.05, "end of rank 0");
            let slow = &times.gpu_path[1];
            assert_eq!(slow.from, PathStart::Host(1));
            has_parts(composer, slow, &[(Part::HostDispatch, 26.0)]);
            // Rank 0's path hops to the late rank: 24 launches of rank 1, then the transfer.
            let fast = &times.gpu_path[0];
            assert_eq!(fast.from, PathStart::Host(1));
            has_parts(
                composer,
                fast,
                &[(Part::HostDispatch, 24.0), (Part::Transfer, 0.05)],
            );
            if method == Method::OpByOp {
                exact(times.wait_ms[0], 12.0, "waits of rank 0");
                exact(times.wait_ms[1], 0.0, "waits of rank 1");
            }
        },
    );
}

/// The slower host dispatches its forward in 60 ms, the faster in 40: 1.5 times as long per launch.
/// Rank 0 reaches the collective of launch n at 40/26 n, rank 1 at 60/26 n. With kernels of 0.1 and
/// transfers of 0.05 ms rank 0's stream never holds it up where the gap between two collectives on
/// rank 0 is longer than what rank 1 has fallen behind (20/26 n); from launch 8 on it is not, and
/// rank 0 arrives when the collective before has ended and its kernels between have run:
///
///     launch  2: 3.0769 against  4.6154                                  wait 20/26 * 2 = 1.5385
///     launch  8: 12.3077 against 18.4615                                 wait 20/26 * 8 = 6.1538
///     launch 12: 18.4615 + 0.05 + 0.2 = 18.7115 against 27.6923          wait 8.9808
///     launch 17: 27.6923 + 0.05 + 0.3 = 28.0423 against 39.2308          wait 11.1885
///     launch 21: 39.2308 + 0.05 + 0.2 = 39.4808 against 48.4615          wait 8.9808
///     launch 24: 48.4615 + 0.05 + 0.1 = 48.6115 against 55.3846          wait 6.7731
///     rank 1 ends at 60 with its sampling, rank 0 at 55.3846 + 0.05
#[test]
fn a_host_that_falls_behind_sets_the_span() {
    let toy = tp2(&Times::all(0.1, 0.05), &dispatch(&[40.0, 60.0]));
    let from = start(&[0.0, 0.0], &[0.0, 0.0]);
    let late = |launch: f64| 60.0 / 26.0 * launch;
    let behind = |launch: f64| 20.0 / 26.0 * launch;
    let wait = behind(2.0)
        + behind(8.0)
        + (late(12.0) - late(8.0) - 0.25)
        + (late(17.0) - late(12.0) - 0.35)
        + (late(21.0) - late(17.0) - 0.25)
        + (late(24.0) - late(21.0) - 0.15);
    by_both(
        &toy,
        &[prefill(&[8])],
        Execution::Eager,
        &from,
        |method, composer, times| {
            exact(times.host_ms[0], 40.0, "host of rank 0");
            exact(times.host_ms[1], 60.0, "host of rank 1");
            exact(times.gpu_ms[1], 60.0, "end of rank 1");
            exact(times.gpu_ms[0], late(24.0) + 0.05, "end of rank 0");
            has_parts(composer, &times.gpu_path[1], &[(Part::HostDispatch, 60.0)]);
            if method == Method::OpByOp {
                exact(times.wait_ms[0], wait, "waits of rank 0");
                exact(times.wait_ms[1], 0.0, "waits of rank 1");
                exact(times.begin_ms[0], 40.0 / 26.0, "first op of rank 0");
                exact(times.begin_ms[1], 60.0 / 26.0, "first op of rank 1");
            }
        },
    );
}

/// Rank 1's stream is busy until 10 ms; hosts need 0.01 ms per launch; kernels 1, transfers 0.5 ms.
/// Only the first collective (launch 2) waits: 10 - 0.02 on rank 0. Then both run in step:
///
///     10 + 0.5 + 2 layers x (5 kernels + 2 x 0.5) + lm_head 1 + 0.5 = 24
///
/// over a path that begins on rank 1's stream: 11 kernels, 6 transfers.
#[test]
fn one_late_stream_holds_one_collective() {
    let toy = tp2(&Times::all(1.0, 0.5), &dispatch(&[0.26, 0.26]));
    let from = start(&[0.0, 0.0], &[0.0, 10.0]);
    by_both(
        &toy,
        &[prefill(&[8])],
        Execution::Eager,
        &from,
        |method, composer, times| {
            for lane in 0..2 {
                exact(times.host_ms[lane], 0.26, "host");
                exact(times.gpu_ms[lane], 24.0, "end");
                let path = &times.gpu_path[lane];
                assert_eq!(path.from, PathStart::Gpu(1));
                has_parts(
                    composer,
                    path,
                    &[(Part::Kernel, 11.0), (Part::Transfer, 3.0)],
                );
            }
            if method == Method::OpByOp {
                exact(times.wait_ms[0], 9.98, "waits of rank 0");
                exact(times.wait_ms[1], 0.0, "waits of rank 1");
            }
        },
    );
}

/// The same step with 0.01 ms per launch: the first all-gather is submitted at 0.02, and from there
/// the streams never run dry: 0.02 + 11 kernels + 6 x 0.5 = 14.02.
#[test]
fn a_gpu_bound_step_is_a_launch_and_all_kernels() {
    let toy = tp2(&Times::all(1.0, 0.5), &dispatch(&[0.26, 0.26]));
    let from = start(&[0.0, 0.0], &[0.0, 0.0]);
    by_both(
        &toy,
        &[prefill(&[8])],
        Execution::Eager,
        &from,
        |_, composer, times| {
            exact(times.gpu_ms[0], 14.02, "end");
            exact(times.host_ms[0], 0.26, "host");
            // Equal ranks: the lowest one carries the path.
            assert_eq!(times.gpu_path[0].from, PathStart::Host(0));
            let wanted = [
                (Part::HostDispatch, 0.02),
                (Part::Kernel, 11.0),
                (Part::Transfer, 3.0),
            ];
            has_parts(composer, &times.gpu_path[0], &wanted);
        },
    );
}

/// With 100 ms per launch and an lm_head of 500 ms: lm_head is submitted at 2300 and ends at 2800,
/// the all-gather takes 0.5, and sampling was submitted long before (2600): 2800.5. The other ten
/// kernels and five transfers lie under the dispatch.
#[test]
fn a_host_bound_step_is_the_dispatch_and_the_tail_kernels() {
    let mut times = Times::all(1.0, 0.5);
    times.lm_head = 500.0;
    let toy = tp2(&times, &dispatch(&[2600.0, 2600.0]));
    let from = start(&[0.0, 0.0], &[0.0, 0.0]);
    by_both(
        &toy,
        &[prefill(&[8])],
        Execution::Eager,
        &from,
        |_, composer, times| {
            exact(times.gpu_ms[0], 2800.5, "end");
            exact(times.host_ms[0], 2600.0, "host");
            let wanted = [
                (Part::HostDispatch, 2300.0),
                (Part::Kernel, 500.0),
                (Part::Transfer, 0.5),
            ];
            has_parts(composer, &times.gpu_path[0], &wanted);
        },
    );
}

/// A launch per ms, kernels 0.1, transfers 0.05 ms, but layer 2's attention takes 20 ms: submitted
/// with launch 15 it ends at 35, behind everything submitted (26). The path begins on the host at
/// that op: 15 of dispatch, 20 + o, gate_up, down, lm_head 0.1 each, and three transfers: 35.55.
#[test]
fn a_step_that_turns_gpu_bound_begins_on_the_host_in_the_middle() {
    let mut times = Times::all(0.1, 0.05);
    times.context = [20.0, 0.1];
    let toy =
        Toy::dense(&[toy::WINDOW, 0], topology(2, 1), &times).with_host(&dispatch(&[26.0, 26.0]));
    let from = start(&[0.0, 0.0], &[0.0, 0.0]);
    by_both(
        &toy,
        &[prefill(&[8])],
        Execution::Eager,
        &from,
        |_, composer, times| {
            exact(times.gpu_ms[0], 35.55, "end");
            exact(times.host_ms[0], 26.0, "host");
            let path = &times.gpu_path[0];
            let wanted = [
                (Part::HostDispatch, 15.0),
                (Part::Kernel, 20.4),
                (Part::Transfer, 0.15),
            ];
            has_parts(composer, path, &wanted);
            let share = path
                .terms
                .iter()
                .find(|term| term.part == Part::HostDispatch);
            exact(
                share.expect("dispatch is on the path").times,
                15.0 / 26.0,
                "share",
            );
        },
    );
}

/// A decode graph: prepare 0.2 and launch 0.3, then 11 kernels and 6 transfers in order: 0.5 + 14.
/// The host is free at 0.5. The eager dispatch row of the same data plays no part.
#[test]
fn nothing_of_a_full_graph_is_dispatched_op_by_op() {
    let mut rows = dispatch(&[2600.0, 2600.0]);
    rows.push(graph("host_prepare", 0.2));
    rows.push(graph("graph_launch", 0.3));
    let toy = tp2(&Times::all(1.0, 0.5), &rows);
    let from = start(&[0.0, 0.0], &[0.0, 0.0]);
    let execution = Execution::FullGraph { captured_batch: 4 };
    by_both(
        &toy,
        &[decode(4)],
        execution,
        &from,
        |_, composer, times| {
            exact(times.host_ms[0], 0.5, "host");
            exact(times.gpu_ms[0], 14.5, "end");
            let wanted = [
                (Part::HostPrepare, 0.2),
                (Part::GraphLaunch, 0.3),
                (Part::Kernel, 11.0),
                (Part::Transfer, 3.0),
            ];
            has_parts(composer, &times.gpu_path[0], &wanted);
            let covered = composer.coverage(&BTreeSet::from(["full_graph"]), false);
            assert_eq!(covered.host, HostClass::NotNeeded);
            let missing = BTreeSet::from(["host_finish (full_graph)".to_owned()]);
            assert_eq!(covered.missing, missing);
        },
    );
}

/// With attention DP a step may give a context request to one rank only; its peer still takes part
/// in every collective, and each rank submits the launches it makes. The dispatch of a forward is
/// the row, whichever rank has the prompt.
///
/// Two expert layers, TP 1: launches 2 + per layer (qkv 1, context attention 2, generation attention
/// 2, o 1, norm 1, router 1, dispatch 1, experts 6, combine 1, norm 1 = 17) + 4 = 40. A launch per
/// ms: sampling is submitted at 40 on both ranks.
#[rstest]
#[case(0)]
#[case(1)]
fn a_prompt_on_one_rank_only_leaves_the_dispatch_whole(#[case] owner: usize) {
    let toy = Toy::experts(&[0, 0], topology(1, 2), &Times::all(0.1, 0.05))
        .with_host(&dispatch(&[40.0, 40.0]));
    let mut loads = [decode(1), decode(1)];
    loads[owner].prompts = vec![8];
    let from = start(&[0.0, 0.0], &[0.0, 0.0]);
    by_both(
        &toy,
        &loads,
        Execution::Eager,
        &from,
        |_, composer, times| {
            for lane in 0..2 {
                exact(times.host_ms[lane], 40.0, "host");
                exact(times.gpu_ms[lane], 40.0, "end");
                let path = &times.gpu_path[lane];
                has_parts(composer, path, &[(Part::HostDispatch, 40.0)]);
            }
        },
    );
}

/// Without an eager row the ranks share a lane and the host costs nothing: 11 kernels and 6
/// transfers. What is left out is named, and the class says that the prediction is a floor.
#[rstest]
#[case::no_rows(&[])]
// A graph's launch and prepare times are there; they are no eager times.
#[case::graph_rows_only(&[graph("host_prepare", 5.0), graph("host_dispatch", 7.0)])]
fn a_missing_eager_row_stays_visible(#[case] rows: &[HostRow]) {
    let toy = tp2(&Times::all(1.0, 0.5), rows);
    let from = start(&[0.0], &[0.0]);
    by_both(
        &toy,
        &[prefill(&[8])],
        Execution::Eager,
        &from,
        |_, composer, times| {
            exact(times.gpu_ms[0], 14.0, "end");
            exact(times.host_ms[0], 0.0, "host");
            let covered = composer.coverage(&BTreeSet::from(["eager"]), true);
            assert_eq!(covered.host, HostClass::Missing);
            let missing = [
                "client_transport",
                "egress",
                "host_dispatch (eager)",
                "host_finish (eager)",
                "host_prepare (eager)",
                "ingress",
            ];
            assert_eq!(covered.missing, missing.map(String::from).into());
            assert!(covered.derived.is_empty());
        },
    );
    // Estimate has nothing to derive it from either.
    let composer = toy.composer(Method::OpByOp, Policy::Estimate);
    let covered = composer.coverage(&BTreeSet::from(["eager"]), false);
    assert!(covered.missing.contains("host_dispatch (eager)"));
}

/// Loads one host file; `Ok` only if the loader takes it.
fn rows_of(rows: &[HostRow]) -> Result<HostRows, stepgate::timing::InputError> {
    let toy = Toy::bare(&[0], false, topology(2, 1)).with_host(rows);
    HostRows::load(&toy.path().join("host"))
}

fn key(boundary: Boundary, execution: Option<Execution>) -> HostKey<'static> {
    HostKey {
        boundary,
        execution,
        runtime: "trtllm",
        version: VERSION,
        system: SYSTEM,
        model: MODEL,
        topology: topology(2, 1),
        cpu: Some(CPU),
        isl: 8,
    }
}

const FULL: Execution = Execution::FullGraph { captured_batch: 8 };
const PIECEWISE: Execution = Execution::Piecewise {
    captured_tokens: 64,
};

#[rstest]
#[case::eager("eager", Some(Execution::Eager))]
#[case::full_graph("{ full_graph: { captured_batch: 8 } }", Some(FULL))]
#[case::piecewise("{ piecewise: { captured_tokens: 64 } }", Some(PIECEWISE))]
fn a_host_row_serves_its_own_mode_only(#[case] written: &str, #[case] mode: Option<Execution>) {
    let rows = rows_of(&[host("host_prepare", written, 1.0)]).expect("a good host file");
    for policy in Policy::ALL {
        for asked in [Execution::Eager, FULL, PIECEWISE, Execution::Unknown] {
            let found = rows.find(&key(Boundary::HostPrepare, Some(asked)), policy);
            let own = mode == Some(asked);
            assert_eq!(found.is_some(), own, "{written} for {asked:?}, {policy:?}");
        }
    }
}

/// A row taken while capture fell back ran eagerly: it is no time of a graph.
#[test]
fn a_graph_row_whose_capture_fell_back_serves_no_graph() {
    let row = graph("graph_launch", 1.0).more("capture: { fell_back: { why: no memory } }");
    let rows = rows_of(&[row]).expect("a good host file");
    for policy in Policy::ALL {
        for asked in [Execution::Eager, FULL] {
            let found = rows.find(&key(Boundary::GraphLaunch, Some(asked)), policy);
            assert!(found.is_none(), "{asked:?}, {policy:?}");
        }
    }
}

#[rstest]
#[case("host_prepare")]
#[case("host_dispatch")]
#[case("graph_launch")]
#[case("host_finish")]
fn a_host_row_of_unknown_execution_is_refused(#[case] boundary: &'static str) {
    let error = rows_of(&[host(boundary, "unknown", 1.0)]).expect_err("unknown execution");
    assert!(error.place.file.ends_with("host/toy.yaml"), "{error}");
    assert_eq!(error.place.field.as_deref(), Some("execution"));
    assert!(error.what.contains("toy-0"), "{error}");
    // Boundaries of a request have no execution mode.
    assert!(rows_of(&[request("ingress", 1.0)]).is_ok());
}

#[rstest]
#[case("module_timing")]
#[case("profiler")]
fn diagnostic_observers_are_refused(#[case] observer: &'static str) {
    let rows = [
        eager("host_prepare", 1.0),
        eager("host_dispatch", 1.0).observer(observer),
    ];
    let error = rows_of(&rows).expect_err("a diagnostic row");
    assert!(error.place.file.ends_with("host/toy.yaml"), "{error}");
    assert_eq!(error.place.field.as_deref(), Some("samples.observer"));
    assert!(error.what.contains("toy-1"), "{error}");
    assert!(error.what.contains(observer), "{error}");
}

/// Two observers saw the same boundary: their mean would be nobody's measurement.
#[test]
fn rows_of_different_observers_are_never_averaged() {
    let rows = [
        eager("host_dispatch", 1.0),
        eager("host_dispatch", 3.0).observer("native_metrics"),
    ];
    let rows = rows_of(&rows).expect("a good host file");
    for policy in Policy::ALL {
        let asked = key(Boundary::HostDispatch, Some(Execution::Eager));
        let found = rows.find(&asked, policy).expect("a row");
        let times: Vec<Vec<f64>> = found
            .per_rank
            .iter()
            .map(|rank| rank.iter().map(|row| row.samples.mean_ms).collect())
            .collect();
        assert_eq!(times, [[1.0]]);
    }
}

/// Two rows that no lookup tells apart are refused, not averaged; other ranks, modes and shapes
/// are other rows.
#[test]
fn two_rows_for_one_lookup_are_refused() {
    let twice = [
        eager("host_dispatch", 1.0).rank(1),
        eager("host_dispatch", 3.0).rank(1),
    ];
    let error = rows_of(&twice).expect_err("two rows of rank 1");
    assert!(error.place.file.ends_with("host/toy.yaml"), "{error}");
    assert!(error.what.contains("`toy-0` and `toy-1`"), "{error}");
    let apart = [
        eager("host_dispatch", 1.0).rank(0),
        eager("host_dispatch", 1.0).rank(1),
        eager("host_prepare", 1.0),
        graph("host_prepare", 1.0),
        request("ingress", 1.0).more("shape: { isl: 8 }"),
        request("ingress", 1.0).more("shape: { isl: 16 }"),
    ];
    assert!(rows_of(&apart).is_ok());
}

/// A derived row of the same scope does not displace or dilute a measured one.
#[test]
fn a_measured_row_comes_before_a_derived_one() {
    let rows = [
        eager("host_prepare", 9.0).derived(),
        eager("host_prepare", 1.0),
    ];
    let rows = rows_of(&rows).expect("a good host file");
    for policy in Policy::ALL {
        let asked = key(Boundary::HostPrepare, Some(Execution::Eager));
        let found = rows.find(&asked, policy).expect("a row");
        assert_eq!(found.class, HostClass::Measured);
        let times: Vec<f64> = found.per_rank[0]
            .iter()
            .map(|row| row.samples.mean_ms)
            .collect();
        assert_eq!(times, [1.0]);
    }
}

/// Rows of the case's own scope are found whatever other files lie beside them, before or after.
#[rstest]
#[case("a-other")]
#[case("z-other")]
fn the_exact_scope_is_found_among_other_files(#[case] other: &str) {
    let toy = Toy::bare(&[0], false, topology(2, 1)).with_host(&dispatch(&[40.0, 60.0]));
    let scope = ToyScope::of(topology(4, 1));
    toy.host(other, &scope, &dispatch(&[1.0, 2.0, 3.0, 4.0]));
    let rows = HostRows::load(&toy.path().join("host")).expect("good host files");
    for policy in Policy::ALL {
        let asked = key(Boundary::HostDispatch, Some(Execution::Eager));
        let found = rows.find(&asked, policy).expect("a row");
        assert_eq!(found.class, HostClass::Measured, "{policy:?}");
        let times: Vec<f64> = found
            .per_rank
            .iter()
            .map(|r| r[0].samples.mean_ms)
            .collect();
        assert_eq!(times, [40.0, 60.0], "{policy:?}");
    }
}

/// Measured on TP 2 only. Elsewhere strict has nothing; estimate has the mean of both ranks, says
/// that it is derived, and names what differs.
#[rstest]
#[case::version(|key: &mut HostKey<'static>| key.version = "1.3.0rc14", "version (1.3.0rc20)")]
#[case::system(|key: &mut HostKey<'static>| key.system = "h200_sxm", "system (toy_sxm)")]
#[case::model(|key: &mut HostKey<'static>| key.model = "other", "model (toy)")]
#[case::runtime(|key: &mut HostKey<'static>| key.runtime = "sglang", "runtime (trtllm)")]
#[case::cpu(|key: &mut HostKey<'static>| key.cpu = Some("Other CPU"), "host CPU (Toy CPU)")]
#[case::topology(
    |key: &mut HostKey<'static>| key.topology = Topology { tp: 1, dp: 1, moe_tp: 1, moe_ep: 1 },
    "topology (tp2 moe_tp2 moe_ep1)"
)]
#[case::expert_topology(
    |key: &mut HostKey<'static>| key.topology = Topology { moe_tp: 1, moe_ep: 2, ..topology(2, 1) },
    "topology (tp2 moe_tp2 moe_ep1)"
)]
fn another_scope_is_derived_and_named(
    #[case] change: fn(&mut HostKey<'static>),
    #[case] differs: &str,
) {
    let rows = rows_of(&dispatch(&[40.0, 60.0])).expect("a good host file");
    let mut asked = key(Boundary::HostDispatch, Some(Execution::Eager));
    change(&mut asked);
    assert!(rows.find(&asked, Policy::Strict).is_none());
    let found = rows.find(&asked, Policy::Estimate).expect("a derived row");
    assert_eq!(found.class, HostClass::Derived);
    assert_eq!(
        found.rule.as_deref(),
        Some(&*format!(
            "toy-0 + toy-1 carried over from another {differs}"
        ))
    );
    assert_eq!(found.per_rank.len(), 1);
    let times: Vec<f64> = found.per_rank[0]
        .iter()
        .map(|row| row.samples.mean_ms)
        .collect();
    assert_eq!(times, [40.0, 60.0]);
}

/// The scope itself is measured; a case that does not say its host CPU is a class of its own.
#[test]
fn the_own_scope_is_measured_per_rank() {
    let rows = rows_of(&dispatch(&[40.0, 60.0])).expect("a good host file");
    let mut asked = key(Boundary::HostDispatch, Some(Execution::Eager));
    for policy in Policy::ALL {
        let found = rows.find(&asked, policy).expect("a row");
        assert_eq!(
            (found.class, found.per_rank.len()),
            (HostClass::Measured, 2)
        );
        assert_eq!(found.rule, None);
    }
    asked.cpu = None;
    let found = rows.find(&asked, Policy::Strict).expect("a row");
    assert_eq!(found.class, HostClass::MeasuredHostUnrecorded);
}

/// A time measured at one prompt length is derived at another.
#[test]
fn another_prompt_length_is_derived() {
    let row = request("ingress", 1.0).more("shape: { isl: 1024 }");
    let rows = rows_of(&[row]).expect("a good host file");
    let mut asked = key(Boundary::Ingress, None);
    assert!(rows.find(&asked, Policy::Strict).is_none());
    let found = rows.find(&asked, Policy::Estimate).expect("a derived row");
    let rule = found.rule.expect("a rule");
    assert!(rule.ends_with("another prompt length (1024)"), "{rule}");
    asked.isl = 1024;
    let found = rows.find(&asked, Policy::Strict).expect("a row");
    assert_eq!(found.class, HostClass::Measured);
}

/// Where each prompt length has a row of its own, a case takes the one of its length.
#[test]
fn each_prompt_length_takes_its_own_row() {
    let at = |isl: u32, ms| request("ingress", ms).more(&format!("shape: {{ isl: {isl} }}"));
    let rows = rows_of(&[at(1024, 1.0), at(8192, 3.0)]).expect("a good host file");
    for (isl, wanted) in [(1024, 1.0), (8192, 3.0)] {
        let asked = HostKey {
            isl,
            ..key(Boundary::Ingress, None)
        };
        for policy in Policy::ALL {
            let found = rows.find(&asked, policy).expect("a row");
            assert_eq!(found.class, HostClass::Measured, "{isl} {policy:?}");
            let times: Vec<f64> = found.per_rank[0]
                .iter()
                .map(|row| row.samples.mean_ms)
                .collect();
            assert_eq!(times, [wanted], "{isl} {policy:?}");
        }
    }
}

/// One lane's dispatch carried to TP 1 is the mean of the ranks', by launch counts: the mixed
/// forward of the two-layer toy has 28 launches on one GPU and 30 on two. (40 + 60) / 2 * 28 / 30.
#[test]
fn a_carried_dispatch_is_scaled_by_launches() {
    let toy = Toy::dense(&[0, 0], topology(1, 1), &Times::all(1.0, 0.5));
    toy.host(
        "tp2",
        &ToyScope::of(topology(2, 1)),
        &dispatch(&[40.0, 60.0]),
    );
    let strict = toy.composer(Method::OpByOp, Policy::Strict);
    assert_eq!(strict.submission(HostMode::Eager, 0).0, 0.0);
    let estimate = toy.composer(Method::OpByOp, Policy::Estimate);
    exact(
        estimate.submission(HostMode::Eager, 0).0,
        50.0 * 28.0 / 30.0,
        "dispatch carried over",
    );
    let covered = estimate.coverage(&BTreeSet::from(["eager"]), false);
    assert_eq!(covered.host, HostClass::Derived);
    assert_eq!(
        covered.derived["host_dispatch (eager)"],
        "tp2-0 + tp2-1 carried over from another topology (tp2 moe_tp2 moe_ep1), by launch counts"
    );
}

/// Rows per rank count as ranks whichever boundary has them: the graph launch of the slow rank is
/// the one that the collectives wait for, also where no eager row tells the ranks apart.
#[test]
fn ranks_told_apart_by_a_graph_row_only_are_lanes_too() {
    let rows = [
        graph("graph_launch", 1.0).rank(0),
        graph("graph_launch", 4.0).rank(1),
    ];
    let toy = tp2(&Times::all(1.0, 0.5), &rows);
    let from = start(&[0.0, 0.0], &[0.0, 0.0]);
    let execution = Execution::FullGraph { captured_batch: 1 };
    by_both(
        &toy,
        &[decode(1)],
        execution,
        &from,
        |_, composer, times| {
            exact(times.gpu_ms[0], 4.0 + 14.0, "end");
            exact(times.host_ms[0], 1.0, "host of rank 0");
            exact(times.host_ms[1], 4.0, "host of rank 1");
            let parts = [
                (Part::GraphLaunch, 4.0),
                (Part::Kernel, 11.0),
                (Part::Transfer, 3.0),
            ];
            has_parts(composer, &times.gpu_path[0], &parts);
        },
    );
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The checked-in C4 point, whose host rows are its own.
fn c4() -> (Points, Scenario) {
    let points = Points::open(root(), None).expect("the project folder");
    let case = points
        .case("gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4")
        .expect("the C4 case");
    let stepgate::case::CaseFile::Serving(case) = case else {
        panic!("the C4 case is a serving case");
    };
    let scenario = case.scenario();
    (points, scenario)
}

/// The real TP 2 rows are of 1.3.0rc14 on a Xeon: at another version, or on another CPU, strict
/// leaves the dispatch out and says so; estimate derives it and says from what.
#[rstest]
#[case::version(|scenario: &mut Scenario| scenario.deployment.backend.version = "1.3.0rc20".to_owned(), "version (1.3.0rc14)")]
#[case::cpu(|scenario: &mut Scenario| scenario.deployment.host_cpu = Some("EPYC 9655".to_owned()), "host CPU (Xeon Platinum 8568Y+)")]
fn real_rows_do_not_leave_their_scope(#[case] change: fn(&mut Scenario), #[case] differs: &str) {
    let (points, mut scenario) = c4();
    let own = predicted(points.replayer().predict(&scenario, Policy::Strict));
    assert_eq!(own.coverage.host, HostClass::MeasuredHostUnrecorded);
    assert!(!own.coverage.missing.contains("host_dispatch (eager)"));
    change(&mut scenario);
    let strict = predicted(points.replayer().predict(&scenario, Policy::Strict));
    assert_eq!(strict.coverage.host, HostClass::Missing);
    assert!(strict.coverage.missing.contains("host_dispatch (eager)"));
    assert_eq!(strict.ttft_receipt.part_ms(Part::HostDispatch), 0.0);
    assert!(strict.coverage.derived.is_empty());
    assert!(strict.ttft.mean_ms < own.ttft.mean_ms);
    let estimate = predicted(points.replayer().predict(&scenario, Policy::Estimate));
    assert_eq!(estimate.coverage.host, HostClass::Derived);
    assert!(!estimate.coverage.missing.contains("host_dispatch (eager)"));
    let rule = &estimate.coverage.derived["host_dispatch (eager)"];
    assert_eq!(
        *rule,
        format!(
            "gpt-oss-tp2-forward-rank0 + gpt-oss-tp2-forward-rank1 carried over from another \
             {differs}"
        )
    );
    assert!(estimate.ttft_receipt.part_ms(Part::HostDispatch) > 0.0);
    assert!(estimate.ttft.mean_ms > strict.ttft.mean_ms);
}

/// No table of the H200 is checked in, so only the host rows are asked; a whole prediction is
/// refused or faulted, never answered from the B200.
#[test]
fn real_rows_do_not_leave_their_system() {
    let (points, mut scenario) = c4();
    let asked = HostKey {
        boundary: Boundary::HostDispatch,
        execution: Some(Execution::Eager),
        runtime: "trtllm",
        version: "1.3.0rc14",
        system: "h200_sxm",
        model: "gpt-oss-120b",
        topology: scenario.deployment.parallel,
        cpu: None,
        isl: 1024,
    };
    let rows = points.replayer().database().host();
    assert!(rows.find(&asked, Policy::Strict).is_none());
    let found = rows.find(&asked, Policy::Estimate).expect("a derived row");
    assert_eq!(found.class, HostClass::Derived);
    let rule = found.rule.expect("a rule");
    assert!(rule.ends_with("another system (b200_sxm)"), "{rule}");
    scenario.deployment.system = "h200_sxm".to_owned();
    let outcome = points.replayer().predict(&scenario, Policy::Estimate);
    assert!(!matches!(outcome, Ok(Outcome::Predicted(_))), "{outcome:?}");
}

/// Graph sizes beyond the host rows' own captured batch are still full graphs.
#[test]
fn captured_sizes_share_the_host_rows_of_their_mode() {
    let toy = tp2(&Times::all(1.0, 0.5), &[graph("graph_launch", 0.3)]);
    let mut scenario = toy.scenario(3, 6, 4);
    scenario.serving.cuda_graph = Some(graphs(&[1, 2, 4], true));
    let prediction = toy.predict(&scenario);
    assert!(
        !prediction
            .coverage
            .missing
            .contains("graph_launch (full_graph)")
    );
}
