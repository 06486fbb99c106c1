//! Paired replay, worked out by hand on small profiles: integer nanoseconds, so every span is exact.
//!
//! In all of them a launch call takes 4000 ns and its work starts 5000 ns after the call begins
//! unless something holds it up.

mod profiles;
mod toy;

use std::collections::HashMap;
use std::process::{Command, Output};

use rstest::rstest;
use serde_json::{Value, json};
use stepgate::compose::{After, LaneStart, Method, Schedule, WorkId};
use stepgate::timing::{Execution, HostMode, Policy};
use stepgate::trace::{
    Call, GpuEvent, GraphTrace, HostEvent, Names, Profile, Replay, ReplayPart, Span, Work, align,
    members, replay,
};

use profiles::{call, kernel, mark, only, real_trace, trace, write};
use toy::{Times, Toy, eager, prefill, topology};

const LAUNCH: i64 = 4000;
const LATENCY: i64 = 5000;

/// A profile in the making.
struct Sketch(Profile);

impl Sketch {
    fn new(rank: u32) -> Self {
        Self(Profile {
            file: format!("rank{rank}.json"),
            sha256: String::new(),
            rank: Some(rank),
            world: None,
            process: None,
            names: Names::default(),
            gpu: Vec::new(),
            host: Vec::new(),
            marks: Vec::new(),
            graph_trace: GraphTrace::None,
            warnings: Vec::new(),
        })
    }

    fn call(&mut self, thread: u64, call: Call, start_ns: i64, end_ns: i64) -> u64 {
        let correlation = self.0.host.len() as u64;
        let name = self.0.names.id("cudaStreamSynchronize");
        self.0.host.push(HostEvent {
            span: Span { start_ns, end_ns },
            call,
            thread,
            correlation: Some(correlation),
            stream: None,
            name,
        });
        correlation
    }

    fn work(&mut self, stream: u64, (start_ns, end_ns): (i64, i64), of: u64, name: &str) {
        let in_graph = self.0.host[of as usize].call == Call::GraphLaunch;
        let name = self.0.names.id(name);
        self.0.gpu.push(GpuEvent {
            span: Span { start_ns, end_ns },
            work: Work::Kernel,
            device: 0,
            stream,
            correlation: Some(of),
            in_graph,
            name,
        });
    }

    /// A launch on a thread at `at_ns` whose kernel runs from `start_ns` on.
    fn launch(&mut self, thread: u64, at_ns: i64, stream: u64, start_ns: i64, ns: i64) {
        let of = self.call(thread, Call::Launch, at_ns, at_ns + LAUNCH);
        self.work(stream, (start_ns, start_ns + ns), of, "gemm");
    }

    fn shifted(mut self, ns: i64) -> Profile {
        let spans = self.0.gpu.iter_mut().map(|event| &mut event.span);
        for span in spans.chain(self.0.host.iter_mut().map(|event| &mut event.span)) {
            span.start_ns += ns;
            span.end_ns += ns;
        }
        self.0
            .gpu
            .sort_by_key(|event| (event.span.start_ns, event.span.end_ns));
        self.0
    }
}

fn composed(profiles: &[Profile]) -> Replay {
    replay(profiles, None).expect("one profile per rank").report
}

fn parts(replay: &Replay, rank: usize) -> Vec<(ReplayPart, i64)> {
    let step = &replay.ranks[rank].steps[0];
    assert_eq!(
        step.parts_ns.values().sum::<i64>(),
        step.composed_ns,
        "parts and span"
    );
    step.parts_ns.clone().into_iter().collect()
}

/// Four launches, one each `pace` ns. Where the host sets the pace the span is three paces and the
/// last kernel; where the GPU does, four kernels and three times the 1000 ns between them.
#[rstest]
#[case::host_bound(10_000, 3_000, 33_000)]
#[case::halved_kernels(10_000, 1_500, 31_500)]
#[case::doubled_submits(20_000, 3_000, 63_000)]
#[case::gpu_bound(4_000, 20_000, 83_000)]
#[case::gpu_bound_halved_kernels(4_000, 10_000, 43_000)]
#[case::gpu_bound_doubled_submits(8_000, 20_000, 83_000)]
fn a_span_follows_host_and_kernels(#[case] pace: i64, #[case] kernel: i64, #[case] span: i64) {
    let mut sketch = Sketch::new(0);
    let mut free = i64::MIN;
    for at in (0..4).map(|launch| launch * pace) {
        let start = (at + LATENCY).max(free);
        sketch.launch(1, at, 7, start, kernel);
        free = start + kernel + 1_000;
    }
    let step = composed(&[sketch.shifted(0)])
        .ranks
        .remove(0)
        .steps
        .remove(0);
    assert_eq!((step.traced_ns, step.composed_ns), (span, span));
}

/// The third and the fourth kernel start 2000 and 4000 ns late for no reason that the profile
/// shows. Nothing that goes into the composition knows.
#[test]
fn a_traced_start_is_not_copied() {
    let mut sketch = Sketch::new(0);
    for (at, late) in [(0, 0), (10_000, 0), (20_000, 2_000), (30_000, 4_000)] {
        sketch.launch(1, at, 7, at + LATENCY + late, 3_000);
    }
    let step = composed(&[sketch.shifted(0)])
        .ranks
        .remove(0)
        .steps
        .remove(0);
    assert_eq!((step.traced_ns, step.composed_ns), (37_000, 33_000));
}

/// A rank launches a kernel at 0, an all-reduce at 10000 + `delay` and a kernel 4000 ns later.
fn rank(rank: u32, delay: i64, last_delay: i64) -> Sketch {
    let mut sketch = Sketch::new(rank);
    sketch.launch(1, 0, 7, LATENCY, 6_000);
    let at = 10_000 + delay;
    let of = sketch.call(1, Call::Launch, at, at + LAUNCH);
    let end = 10_000 + last_delay + LATENCY + 2_000;
    sketch.work(
        7,
        (at + LATENCY, end),
        of,
        "ncclDevKernel_AllReduce_Sum_f32",
    );
    let at = at + LAUNCH;
    sketch.launch(1, at, 7, (at + LATENCY).max(end + 1_000), 3_000);
    sketch
}

/// Both ranks in step: all-reduce 15000 to 17000, the last kernel at 14000 + 5000, so 5000 to 22000.
///
/// Rank 1 30000 ns late: it arrives at 45000, the all-reduce ends at 47000 for both. Rank 0 arrived
/// at 15000 and waits 30000; its last kernel was submitted long before and follows 1000 ns behind,
/// 48000 to 51000. Rank 1's last launch at 44000 lets it start at 49000. The path of rank 0 hops to
/// rank 1's host: 40000 to 5000.
#[rstest]
#[case::in_step(0, [17_000, 17_000], 0)]
#[case::rank_1_late(30_000, [46_000, 47_000], 30_000)]
fn a_late_rank_is_waited_for_and_no_duration(
    #[case] delay: i64,
    #[case] spans: [i64; 2],
    #[case] wait: i64,
) {
    // Clocks of ranks need not agree.
    let ranks = [
        rank(0, 0, delay).shifted(0),
        rank(1, delay, delay).shifted(1_000_000),
    ];
    let replay = composed(&ranks);
    for (rank, span) in replay.ranks.iter().zip(spans) {
        assert_eq!((rank.collectives, rank.matched_collectives), (1, 1));
        let step = &rank.steps[0];
        assert_eq!(
            (step.traced_ns, step.composed_ns),
            (span, span),
            "{}",
            rank.rank
        );
    }
    assert_eq!(replay.ranks[0].steps[0].peer_wait_ns, wait);
    assert_eq!(replay.ranks[1].steps[0].peer_wait_ns, 0);
    if delay > 0 {
        let path = [
            (ReplayPart::HostDispatch, 35_000),
            (ReplayPart::LaunchLatency, 5_000),
            (ReplayPart::Kernel, 3_000),
            (ReplayPart::Transfer, 2_000),
            (ReplayPart::TurnAround, 1_000),
        ];
        assert_eq!(parts(&replay, 0), path);
    }
}

/// Alone, rank 0 holds its all-reduce for 32000 ns, and says so.
#[test]
fn a_rank_alone_has_its_peer_wait_inside() {
    let replay = composed(&[rank(0, 0, 30_000).shifted(0)]);
    let alone = &replay.ranks[0];
    assert_eq!((alone.collectives, alone.matched_collectives), (1, 0));
    assert_eq!(alone.steps[0].composed_ns, 46_000);
    assert!(parts(&replay, 0).contains(&(ReplayPart::Transfer, 32_000)));
}

/// A kernel of `ns` from 5000 on, a synchronisation that returns 2000 ns after it, 3000 ns of host
/// time, then a launch on the same or on another thread: the second kernel starts at
/// 5000 + ns + 2000 + 3000 + 5000.
#[rstest]
fn a_synchronisation_ends_when_the_gpu_is_done(
    #[values(1, 2)] thread: u64,
    #[values(20_000, 10_000)] ns: i64,
) {
    let mut sketch = Sketch::new(0);
    sketch.launch(1, 0, 7, LATENCY, ns);
    let returned = LATENCY + ns + 2_000;
    sketch.call(1, Call::Synchronise, 6_000, returned);
    sketch.launch(thread, returned + 3_000, 7, returned + 8_000, 1_000);
    let replay = composed(&[sketch.shifted(0)]);
    assert_eq!(replay.ranks[0].steps[0].composed_ns, ns + 11_000);
    let path = [
        (ReplayPart::HostDispatch, 3_000),
        (ReplayPart::LaunchLatency, 5_000),
        (ReplayPart::Kernel, ns + 1_000),
        (ReplayPart::SyncReturn, 2_000),
    ];
    assert_eq!(parts(&replay, 0), path);
}

/// The second stream is told to wait for the first one's kernel, 5000 to 45000; without the call
/// its own kernel, launched at 8000, would start at 13000 and the span end with the first kernel.
#[rstest]
#[case::told_to_wait(true, 43_000)]
#[case::not_told(false, 40_000)]
fn a_stream_waits_where_it_is_told_to(#[case] told: bool, #[case] span: i64) {
    let mut sketch = Sketch::new(0);
    sketch.launch(1, 0, 7, LATENCY, 40_000);
    let call = if told { Call::StreamWait } else { Call::Other };
    sketch.call(1, call, 6_000, 7_000);
    sketch.launch(1, 8_000, 9, 45_000, 3_000);
    assert_eq!(
        composed(&[sketch.shifted(0)]).ranks[0].steps[0].composed_ns,
        span
    );
}

/// The profile shows three nodes of a graph and nothing for 1000 ns behind the first and 20000 ns
/// behind the second: durations of the graph.
#[test]
fn time_inside_a_graph_without_a_node_is_a_duration() {
    let mut sketch = Sketch::new(0);
    let of = sketch.call(1, Call::GraphLaunch, 0, 6_000);
    for span in [(5_000, 7_000), (8_000, 10_000), (30_000, 31_000)] {
        sketch.work(7, span, of, "node");
    }
    let replay = composed(&[sketch.shifted(0)]);
    assert_eq!(replay.ranks[0].steps[0].untraced_ns, 21_000);
    let path = [
        (ReplayPart::Kernel, 5_000),
        (ReplayPart::UntracedInGraph, 21_000),
    ];
    assert_eq!(parts(&replay, 0), path);
}

/// The toy's eager step on two lanes, rank 1 starting 2 ms late, by the reference and with every
/// dependency written out.
#[test]
fn written_out_dependencies_give_the_reference_its_times() {
    let rows = [0, 1].map(|rank| eager("host_dispatch", 26.0).rank(rank));
    let toy = Toy::dense(&[0, 0], topology(2, 1), &Times::all(0.1, 0.05)).with_host(&rows);
    let mut composer = toy.composer(Method::OpByOp, Policy::Strict);
    let start = LaneStart {
        host_ms: vec![0.0, 2.0],
        gpu_ms: vec![0.0, 0.0],
    };
    let (_, runs) = composer.step_ops(HostMode::Eager, &[prefill(&[8])], Execution::Eager, &start);
    let ns = |ms: f64| (ms * 1e6).round() as i64;
    let mut schedule = Schedule::default();
    let mut hosts: HashMap<usize, WorkId> = HashMap::new();
    let mut streams: HashMap<usize, WorkId> = HashMap::new();
    let mut works = Vec::new();
    for step in runs.chunks(2) {
        let op = composer.plan().op(step[0].op);
        for run in step {
            let submit = schedule.add(i64::from(op.launches) * 1_000_000);
            let begin = After::Time(ns(start.host_ms[run.lane]));
            let after = hosts
                .insert(run.lane, submit)
                .map(|host| After::End(host, 0));
            schedule.bound(submit, after.unwrap_or(begin));
            let work = schedule.add(ns(run.end_ms - run.begin_ms));
            schedule.bound(work, After::End(submit, 0));
            if let Some(stream) = streams.insert(run.lane, work) {
                schedule.bound(work, After::End(stream, 0));
            }
            works.push(work);
        }
        if op.key.is_collective() {
            schedule.meet(works[works.len() - 2..].to_vec());
        }
    }
    let ran = schedule.run().expect("no deadlock");
    for (run, work) in runs.iter().zip(&works) {
        let found = ran[work.0];
        let wanted = [run.arrival_ms, run.begin_ms, run.end_ms].map(ns);
        assert_eq!(
            [found.arrival_ns, found.begin_ns, found.end_ns],
            wanted,
            "{run:?}"
        );
    }
    let waits: i64 = works.iter().map(|work| ran[work.0].wait_ns()).sum();
    assert_eq!(waits, 12_000_000, "six collectives, 2 ms each");
}

/// Two communicators, a stream each; rank 0 launches the first all-reduce at 4000 and the second at
/// 8000. On rank 1 a kernel holds the first stream up, so that the first starts after the second.
/// Where both ranks use the same streams, the order of the launches may differ, too.
#[rstest]
#[case::other_streams([17, 18], [LAUNCH, 2 * LAUNCH])]
#[case::the_same_streams([7, 8], [LAUNCH, 2 * LAUNCH])]
#[case::launched_the_other_way_round([7, 8], [2 * LAUNCH, LAUNCH])]
fn collectives_are_matched_as_they_were_launched(
    #[case] streams: [u64; 2],
    #[case] launched: [i64; 2],
) {
    let rank = |rank: u32, streams: [u64; 2], launched: [i64; 2], held_ns: i64| {
        let mut sketch = Sketch::new(rank);
        sketch.launch(1, 0, streams[0], LATENCY, 1_000 + held_ns);
        let mut collectives = [
            (launched[0], streams[0], (13_000 + held_ns, 40_000)),
            (launched[1], streams[1], (14_000, 30_000)),
        ];
        collectives.sort_unstable();
        for (at, stream, span) in collectives {
            let of = sketch.call(1, Call::Launch, at, at + LAUNCH);
            sketch.work(stream, span, of, "ncclDevKernel_AllReduce_Sum_f32");
        }
        sketch.shifted(0)
    };
    let ranks = [
        rank(0, [7, 8], [LAUNCH, 2 * LAUNCH], 0),
        rank(1, streams, launched, 10_000),
    ];
    let aligned = align(&members(&ranks)).expect("two ranks");
    assert_eq!(aligned.ranks[1].clock_offset_ns, 0);
    assert_eq!(aligned.ranks[1].misfit_ns, 0);
    assert_eq!(composed(&ranks).ranks[1].matched_collectives, 2);
}

/// Two ranks that enter two collectives in different orders never get on.
#[test]
fn crossed_meetings_are_an_error() {
    let mut schedule = Schedule::default();
    let works: Vec<WorkId> = (0..4).map(|_| schedule.add(1)).collect();
    schedule.bound(works[1], After::End(works[0], 0));
    schedule.bound(works[3], After::End(works[2], 0));
    schedule.meet(vec![works[0], works[3]]);
    schedule.meet(vec![works[1], works[2]]);
    assert_eq!(schedule.run().map_err(|deadlock| deadlock.works), Err(4));
}

/// The largest times that a profile may hold: spans saturate, and nothing overflows.
#[test]
fn times_at_the_end_of_their_range_are_no_panic() {
    let far = 1 << 61;
    let mut sketch = Sketch::new(0);
    for _ in 0..3 {
        let of = sketch.call(1, Call::Launch, -far, far);
        sketch.work(7, (-far, far), of, "gemm");
        sketch.call(1, Call::Synchronise, -far, far);
    }
    let profiles = [sketch.shifted(0)];
    let replayed = replay(&profiles, None).expect("one profile");
    assert!(replayed.report.ranks[0].steps[0].composed_ns > far);
    let mut json = Vec::new();
    replayed
        .timeline()
        .write_chrome(&mut json)
        .expect("written to memory");
}

fn stepgate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stepgate"))
        .args(arguments)
        .output()
        .expect("the binary runs")
}

/// Two launches 10 us apart with kernels of 3 us, in a step of their own each.
#[test]
fn the_command_reports_each_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut events = Vec::new();
    for step in 0..2 {
        let at = 1_000 * step;
        events.push(mark(
            "user_annotation",
            &format!("ProfilerStep#{step}"),
            at,
            900,
        ));
        for launch in 0..2 {
            let (at, id) = (at + 10 + 10 * launch, 2 * step + launch + 1);
            events.push(call("cudaLaunchKernel", at, 4, id));
            events.push(kernel("gemm", at + 5, 3, 7, id));
        }
    }
    let text = trace(&events, 0, 1);
    let file = write(&folder, "run.json", &text);
    let file = file.to_str().expect("a name");
    let output = stepgate(&["trace", "replay", file, "--json"]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let steps = report["ranks"][0]["steps"].as_array().expect("steps");
    assert_eq!(steps.len(), 2);
    for step in steps {
        assert_eq!(
            (&step["traced_ns"], &step["composed_ns"]),
            (&json!(13_000), &json!(13_000))
        );
        let parts = json!({ "host_dispatch": 5_000, "launch_latency": 5_000, "kernel": 3_000 });
        assert_eq!(step["parts_ns"], parts);
    }

    let output = stepgate(&["trace", "replay", file, "--timeline", "-"]);
    let timeline: Value = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
    for process in ["rank 0, traced", "rank 0, composed"] {
        let events = timeline["traceEvents"].as_array().expect("events");
        let named = |event: &&Value| event["args"]["name"] == process;
        let pid = &events.iter().find(named).expect(process)["pid"];
        let slices = events
            .iter()
            .filter(|event| event["ph"] == "X" && event["pid"] == *pid);
        assert_eq!(slices.count(), 8, "{process}: four calls, four kernels");
    }

    let none = stepgate(&["trace", "replay", file, "--iteration", "forward*"]);
    assert_eq!(none.status.code(), Some(2));
    let cut = write(&folder, "cut.json", &text[..text.len() / 2]);
    let cut = stepgate(&["trace", "replay", cut.to_str().expect("a name")]);
    assert_eq!(cut.status.code(), Some(5));
    let twins = stepgate(&["trace", "replay", file, file]);
    assert_eq!(twins.status.code(), Some(5));
}

/// Composed against traced spans of real runs (`tests/profiles/mod.rs` says where they are looked
/// for): the median error of a step is at most 5 %.
#[rstest]
#[case("kineto_nccl_rank0.json.gz", 3)]
#[case("kineto_graph_launches.json.gz", 5)]
#[case("kineto_simple_add.json.gz", 1)]
fn real_steps_are_composed_within_five_percent(#[case] name: &str, #[case] steps: usize) {
    let Some(file) = real_trace(name) else {
        return;
    };
    let replay = composed(&[only(&file)]);
    let rank = &replay.ranks[0];
    assert_eq!(rank.steps.len(), steps);
    for step in &rank.steps {
        assert_eq!(
            step.parts_ns.values().sum::<i64>(),
            step.composed_ns,
            "{}",
            step.name
        );
    }
    let error = replay.median_error().expect("a step");
    assert!(error <= 0.05, "{name}: {error}");
}
