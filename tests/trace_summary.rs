//! The accounting of a profile, worked out by hand, and on real traces.

mod profiles;

use profiles::{call, event, kernel, mark, only, real_trace, summary, trace, write};
use rstest::rstest;
use stepgate::trace::{
    Blocking, Delay, DeviceSummary, Idle, Profile, ProfileSummary, Spread, WorkSummary,
    collective_kind, summarise,
};
use tempfile::TempDir;

fn of(events: &[String]) -> ProfileSummary {
    let folder = TempDir::new().expect("a folder");
    let profile = only(&write(&folder, "trace.json", trace(events, 0, 1)));
    summary(&[profile]).profiles.remove(0)
}

fn rank(rank: u32, world: u32, events: &[String]) -> Profile {
    let folder = TempDir::new().expect("a folder");
    only(&write(
        &folder,
        &format!("rank{rank}.json"),
        trace(events, rank, world),
    ))
}

/// Times in microseconds. A gap of 70 before kernel 2: the host is blocked for 20 of it and submits
/// for 20, then the kernel takes 30 to start. A gap of 10 before work that nobody launched. A gap of
/// 20 before kernel 4, whose launch call returns only after it has started.
fn three_gaps() -> Vec<String> {
    vec![
        call("cudaLaunchKernel", 0, 10, 1),
        kernel("first", 20, 30, 7, 1),
        mark("user_annotation", "ProfilerStep#3", 35, 200),
        mark("cpu_op", "aten::item", 38, 40),
        call("cudaStreamSynchronize", 40, 30, 100),
        call("cudaLaunchKernel", 80, 10, 2),
        kernel("second", 120, 30, 7, 2),
        kernel("unlaunched", 160, 10, 7, 3),
        call("cudaLaunchKernel", 165, 35, 4),
        kernel("fourth", 190, 20, 7, 4),
        // Beside it on another stream, and not yet done when it ends.
        kernel("fifth", 200, 25, 8, 5),
        call("cudaLaunchKernel", 201, 1, 5),
    ]
}

#[test]
fn idle_time_is_split_by_cause() {
    let summary = of(&three_gaps());
    let device = &summary.devices[0];
    let expected = Idle {
        host_bound_ns: (20 + 20) * 1000,
        sync_bound_ns: 20 * 1000,
        tail_ns: 30 * 1000,
        unattributed_ns: 10 * 1000,
    };
    assert_eq!(device.idle, expected);
    assert_eq!((device.span_ns, device.busy_ns), (205_000, 105_000));
    assert_eq!(device.idle.total_ns(), device.span_ns - device.busy_ns);
    assert_eq!(device.sum_ns, 115_000);
    let kernels = WorkSummary {
        kind: "kernels",
        count: 5,
        sum_ns: 115_000,
    };
    assert_eq!(device.work, [kernels]);
}

#[test]
fn a_synchronisation_of_another_thread_does_not_bind() {
    let mut events = three_gaps();
    let own = events.iter().position(|one| one.contains("Synchronize"));
    events[own.expect("there")] = event(
        "cuda_runtime",
        "cudaStreamSynchronize",
        ("40", "30"),
        2,
        r#""correlation": 100"#,
    );
    let idle = of(&events).devices[0].idle;
    assert_eq!((idle.sync_bound_ns, idle.host_bound_ns), (0, 60_000));
}

#[test]
fn delays_run_from_the_begin_of_the_call_to_the_first_work_of_it() {
    let mut events = three_gaps();
    // Nodes of one graph launch: the first one counts.
    events.push(call("cudaGraphLaunch", 300, 10, 6));
    events.push(kernel("node", 360, 1, 7, 6));
    events.push(kernel("node", 340, 1, 7, 6));
    let delay = of(&events).devices[0].delay.expect("launches are known");
    let expected = Delay {
        spread: Spread {
            count: 5,
            sum_ns: (20 + 40 + 25 - 1 + 40) * 1000,
            min_ns: -1000,
            p50_ns: 25_000,
            p90_ns: 40_000,
            max_ns: 40_000,
        },
        before_call: 1,
        before_return: 2,
        without_launch: 1,
    };
    assert_eq!(delay, expected);
}

#[test]
fn blocking_calls_name_the_innermost_mark_around_them() {
    let expected = Blocking {
        call: "cudaStreamSynchronize".to_owned(),
        caller: Some("aten::item".to_owned()),
        count: 1,
        total_ns: 30_000,
        longest_ns: 30_000,
    };
    assert_eq!(of(&three_gaps()).blocking, [expected]);
}

#[test]
fn steps_own_the_work_that_they_launched() {
    let events = [
        mark("user_annotation", "ProfilerStep#1", 0, 100),
        call("cudaLaunchKernel", 10, 5, 1),
        call("cudaStreamSynchronize", 20, 30, 100),
        call("cudaGraphLaunch", 60, 10, 2),
        call("cudaMemcpyAsync", 80, 10, 3),
        mark("user_annotation", "ProfilerStep#2", 100, 100),
        // The GPU is behind: this is work of the first step.
        kernel("first", 110, 20, 7, 1),
        kernel("node", 130, 10, 7, 2),
        kernel("node", 150, 20, 7, 2),
        call("cudaLaunchKernel", 140, 5, 4),
        kernel("second", 260, 5, 7, 4),
    ];
    let iterations = of(&events).iterations;
    assert_eq!(iterations.len(), 2);
    let first = &iterations[0];
    assert_eq!(
        (first.name.as_str(), first.host_ns),
        ("ProfilerStep#1", 100_000)
    );
    assert_eq!((first.launches, first.graph_launches), (1, 1));
    // From 10 to 90, less 30 blocked.
    assert_eq!(first.dispatch_ns, Some(50_000));
    let on_device = &first.devices[0];
    assert_eq!((on_device.events, on_device.span_ns), (3, 60_000));
    assert_eq!(
        (on_device.busy_ns, on_device.graph_busy_ns),
        (50_000, 30_000)
    );
    assert_eq!(iterations[1].dispatch_ns, Some(5000));
    assert_eq!(iterations[1].devices[0].busy_ns, 5000);
}

/// One thread hands over to another, which is blocked later while nobody submits.
#[test]
fn dispatch_over_two_threads_leaves_out_what_only_waits() {
    let on = |thread, name, ts: &str, dur: &str, id: u64| {
        let args = format!(r#""correlation": {id}"#);
        event("cuda_runtime", name, (ts, dur), thread, &args)
    };
    let events = [
        mark("user_annotation", "ProfilerStep#1", 0, 200),
        on(1, "cudaLaunchKernel", "10", "5", 1),
        // While thread 2 submits: no time is lost.
        on(1, "cudaStreamSynchronize", "20", "30", 2),
        on(2, "cudaLaunchKernel", "15", "5", 3),
        on(2, "cudaLaunchKernel", "60", "5", 4),
        // While nobody does.
        on(2, "cudaStreamSynchronize", "70", "20", 5),
        on(2, "cudaLaunchKernel", "100", "10", 6),
        kernel("k", 120, 5, 7, 6),
    ];
    assert_eq!(
        of(&events).iterations[0].dispatch_ns,
        Some((110 - 10 - 20) * 1000)
    );
}

#[rstest]
#[case::profiler_steps_first(&["ProfilerStep#1", "step 1", "step 2"], None, &["ProfilerStep#1"])]
#[case::numbered_annotations(&["warm-up", "_step 1: 3 reqs", "_step 2: 12 reqs"], None,
    &["_step 1: 3 reqs", "_step 2: 12 reqs"])]
#[case::none(&["forward", "backward", "step"], None, &[])]
#[case::a_pattern(&["ProfilerStep#1", "forward 1", "forward 2"], Some("forward*"),
    &["forward 1", "forward 2"])]
fn iterations_are_found_by_their_names(
    #[case] names: &[&str],
    #[case] prefix: Option<&str>,
    #[case] found: &[&str],
) {
    let mut events = vec![kernel("k", 1, 1, 7, 1)];
    for (at, name) in names.iter().enumerate() {
        events.push(mark("user_annotation", name, at as u64 * 100, 50));
    }
    let folder = TempDir::new().expect("a folder");
    let profile = only(&write(&folder, "trace.json", trace(&events, 0, 1)));
    let picked = prefix.map(|prefix| {
        let start = prefix.trim_end_matches('*').to_owned();
        move |name: &str| name.starts_with(&start)
    });
    let picked = picked
        .as_ref()
        .map(|picked| picked as &dyn Fn(&str) -> bool);
    let summary = summarise(&[profile], picked).expect("one profile");
    let named: Vec<&str> = summary.profiles[0]
        .iterations
        .iter()
        .map(|iteration| iteration.name.as_str())
        .collect();
    assert_eq!(named, found);
}

const ALL_REDUCE: &str =
    "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)";

/// Three all-reduces on two ranks. Rank 1's clock is 1000 ahead. Rank 0 is early by 40, 0 and then
/// late by 25; transfers take 10, 12 and 11.
fn two_ranks() -> [Profile; 2] {
    let early = [(100, 50), (200, 12), (325, 11)];
    let late = [(1140, 10), (1200, 12), (1300, 36)];
    let events = |times: [(u64, u64); 3]| {
        let collective = |(id, (ts, dur)): (u64, (u64, u64))| kernel(ALL_REDUCE, ts, dur, 40, id);
        let mut events: Vec<String> = (0..).zip(times).map(collective).collect();
        events.push(kernel("gemm", times[2].0 + 50, 5, 7, 9));
        events
    };
    [rank(0, 2, &events(early)), rank(1, 2, &events(late))]
}

#[test]
fn collectives_of_two_ranks_fall_into_wait_and_transfer() {
    let summary = summary(&two_ranks());
    assert_eq!(summary.ranks_missing, Some(0));
    let alignment = summary.collectives.expect("both ran them");
    assert!(alignment.unmatched.is_empty());
    let transfer = alignment.kinds[0].transfer;
    assert_eq!(alignment.kinds[0].kind, "all_reduce");
    assert_eq!((transfer.count, transfer.sum_ns), (3, 33_000));
    let [first, second] = alignment.ranks.as_slice() else {
        panic!("two ranks: {:?}", alignment.ranks)
    };
    assert_eq!(
        (first.rank.as_str(), second.rank.as_str()),
        ("rank 0", "rank 1")
    );
    assert_eq!(
        (first.clock_offset_ns, second.clock_offset_ns),
        (0, 1_000_000)
    );
    assert_eq!((first.misfit_ns, second.misfit_ns), (0, 0));
    let of = |spread: Spread| (spread.sum_ns, spread.max_ns);
    assert_eq!(
        (of(first.wait), of(second.wait)),
        ((40_000, 40_000), (25_000, 25_000))
    );
    assert_eq!(
        (of(first.lateness), of(second.lateness)),
        ((25_000, 25_000), (40_000, 40_000))
    );
}

#[test]
fn ranks_that_differ_in_their_collectives_are_not_matched() {
    let [first, _] = two_ranks();
    let second = rank(1, 4, &[kernel(ALL_REDUCE, 1, 1, 40, 1)]);
    let summary = summary(&[first, second]);
    assert_eq!(summary.ranks_missing, Some(2));
    let alignment = summary.collectives.expect("what is not matched is said");
    assert!(alignment.ranks.is_empty());
    assert_eq!(alignment.unmatched, ["all_reduce: [3, 1] on 2 ranks"]);
}

#[test]
fn two_files_of_one_rank_are_refused_by_name() {
    let [first, _] = two_ranks();
    let mut second = first.clone();
    second.file = "elsewhere/other.json".to_owned();
    let error = summarise(&[first, second], None)
        .expect_err("the same rank")
        .to_string();
    for part in ["rank 0", "rank0.json", "elsewhere/other.json"] {
        assert!(error.contains(part), "{error}");
    }
}

#[rstest]
#[case(
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
    Some("all_reduce")
)]
#[case("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", Some("reduce_scatter"))]
#[case(
    "ncclKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)",
    Some("send_recv")
)]
#[case("ncclDevKernel_Broadcast_RING_LL", Some("broadcast"))]
#[case(
    "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<0>",
    Some("all_reduce")
)]
#[case(
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>",
    Some("all_reduce")
)]
#[case("void at::native::reduce_kernel<512, 1>", None)]
#[case("void at::native::broadcast_add", None)]
fn collectives_are_told_by_their_kernels(#[case] kernel: &str, #[case] kind: Option<&str>) {
    assert_eq!(collective_kind(kernel), kind);
}

/// Figures of the folder's README, in microseconds as it writes them; sums in nanoseconds.
struct Figures {
    events: usize,
    kernels: usize,
    busy_ns: i64,
    span_ns: i64,
    sum_ns: i64,
    calls: usize,
    graph_launches: usize,
    graph_events: usize,
}

#[rstest]
#[case("kineto_nccl_rank0.json.gz", Figures {
    events: 3774, kernels: 2700, busy_ns: 157_500_014, span_ns: 660_551_005,
    sum_ns: 165_185_838, calls: 8740, graph_launches: 0, graph_events: 0,
})]
#[case("kineto_graph_launches.json.gz", Figures {
    events: 7747, kernels: 6080, busy_ns: 438_424_000, span_ns: 1_231_461_000,
    sum_ns: 449_763_000, calls: 33924, graph_launches: 70, graph_events: 345,
})]
#[case("kineto_simple_add.json.gz", Figures {
    events: 98, kernels: 79, busy_ns: 49_758_000, span_ns: 16_025_575_000,
    sum_ns: 49_816_000, calls: 331, graph_launches: 0, graph_events: 0,
})]
fn real_traces_read_as_they_were_counted(#[case] name: &str, #[case] figures: Figures) {
    let Some(file) = real_trace(name) else { return };
    let summary = summary(&[only(&file)]);
    let profile = &summary.profiles[0];
    let [device] = profile.devices.as_slice() else {
        panic!("one device: {:?}", profile.devices)
    };
    let count = |kind| {
        let of_kind = device
            .work
            .iter()
            .filter(|work| kind == "all" || work.kind == kind);
        of_kind.map(|work| work.count).sum::<usize>()
    };
    assert_eq!(
        (count("all"), count("kernels")),
        (figures.events, figures.kernels)
    );
    let DeviceSummary {
        span_ns,
        busy_ns,
        sum_ns,
        idle,
        ..
    } = device;
    assert_eq!(
        (*busy_ns, *span_ns, *sum_ns),
        (figures.busy_ns, figures.span_ns, figures.sum_ns)
    );
    assert_eq!(idle.total_ns(), span_ns - busy_ns);
    assert_eq!(profile.calls.total, figures.calls);
    assert_eq!(profile.calls.graph_launches, figures.graph_launches);
    assert_eq!(profile.graphs.events, figures.graph_events);
    assert!(profile.warnings.is_empty(), "{:?}", profile.warnings);
}

#[test]
fn the_real_traces_collectives_stand_on_their_stream() {
    let Some(file) = real_trace("kineto_nccl_rank0.json.gz") else {
        return;
    };
    let summary = summary(&[only(&file)]);
    let device = &summary.profiles[0].devices[0];
    let on_stream: Vec<(u64, usize, i64)> = device
        .collectives
        .iter()
        .map(|kernels| {
            (
                kernels.stream,
                kernels.duration.count,
                kernels.duration.sum_ns,
            )
        })
        .collect();
    assert!(
        on_stream.iter().all(|(stream, ..)| *stream == 40),
        "{on_stream:?}"
    );
    let total = on_stream
        .iter()
        .fold((0, 0), |sum, one| (sum.0 + one.1, sum.1 + one.2));
    assert_eq!(total, (21, 46_876_493));
    assert_eq!(device.delay.expect("launches are known").before_call, 0);
    assert_eq!(summary.ranks_missing, Some(1));
}
