//! Nsight Systems exports: graph replays at each granularity, and whatever an export may lack.

mod profiles;

use profiles::{Export, PROCESS, only, summary};
use rstest::rstest;
use stepgate::trace::{GraphTrace, Profile, ProfileSummary, read};
use tempfile::TempDir;

/// How the replays of a decode loop were traced.
#[derive(Clone, Copy, PartialEq)]
enum Traced {
    Whole,
    Nodes,
    Both,
    Neither,
    /// At graph granularity, but without time stamps.
    Unstamped,
}

const ITERATIONS: i64 = 20;
const NODES: i64 = 10;
const ITERATION_NS: i64 = 10_000_000;
/// Kernels of single launches, 35 % of an iteration.
const SINGLE_NS: i64 = 3_500_000;
/// The replay, 51.5 % of an iteration.
const REPLAY_NS: i64 = 5_150_000;

/// An eager part, a gap and a graph replay per iteration. The replay's nodes stand back to back.
fn decode_loop(folder: &TempDir, traced: Traced) -> Profile {
    let export = Export::new(folder, "report.sqlite");
    for iteration in 0..ITERATIONS {
        let begin = 1_000_000 + iteration * ITERATION_NS;
        let (single, graph) = (iteration * 2 + 1, iteration * 2 + 2);
        export.range(
            &format!("step {iteration}"),
            begin - 5000,
            begin + ITERATION_NS - 5000,
        );
        export.call("cudaLaunchKernel_v7000", begin - 4000, begin - 1000, single);
        export.kernel(begin, begin + SINGLE_NS, single, None);
        let end = begin + ITERATION_NS;
        let replay = end - REPLAY_NS;
        export.call(
            "cudaGraphLaunch_v10000",
            replay - 400_000,
            replay - 100_000,
            graph,
        );
        match traced {
            Traced::Whole | Traced::Both => export.replay(replay, end, graph),
            Traced::Unstamped => export.replay(0, 0, graph),
            Traced::Nodes | Traced::Neither => {}
        }
        if matches!(traced, Traced::Nodes | Traced::Both) {
            let node_ns = REPLAY_NS / NODES;
            for node in 0..NODES {
                let start = replay + node * node_ns;
                export.kernel(start, start + node_ns, graph, Some(node + 1));
            }
        }
    }
    only(&export.close())
}

fn of_one(profile: &Profile) -> ProfileSummary {
    let mut summary = summary(std::slice::from_ref(profile));
    summary.profiles.remove(0)
}

#[rstest]
#[case::graph_granularity(Traced::Whole, GraphTrace::Whole, ITERATIONS)]
#[case::node_granularity(Traced::Nodes, GraphTrace::Nodes, ITERATIONS * NODES)]
#[case::both_at_once(Traced::Both, GraphTrace::Both, ITERATIONS * NODES)]
fn replays_keep_the_device_busy_however_they_were_traced(
    #[case] traced: Traced,
    #[case] graph_trace: GraphTrace,
    #[case] owned: i64,
) {
    let folder = TempDir::new().expect("a folder");
    let profile = decode_loop(&folder, traced);
    assert_eq!(profile.graph_trace, graph_trace);
    let says_both = profile
        .warnings
        .iter()
        .any(|text| text.contains("counted by its nodes"));
    assert_eq!(says_both, traced == Traced::Both, "{:?}", profile.warnings);

    let summary = of_one(&profile);
    let device = &summary.devices[0];
    assert_eq!(device.span_ns, ITERATIONS * ITERATION_NS);
    // 86.5 %: kernels alone would read 35 %.
    assert_eq!(device.busy_ns * 1000, device.span_ns * 865);
    assert_eq!(device.idle.total_ns(), device.span_ns - device.busy_ns);
    // Work is counted once, whoever shows it.
    assert_eq!(device.sum_ns, device.busy_ns);
    assert_eq!(summary.graphs.events as i64, owned);
    assert_eq!(summary.graphs.sum_ns, ITERATIONS * REPLAY_NS);
    assert_eq!(summary.calls.graph_launches as i64, ITERATIONS);
    assert_eq!(summary.iterations.len() as i64, ITERATIONS);
    let on_device = &summary.iterations[3].devices[0];
    assert_eq!(on_device.busy_ns, SINGLE_NS + REPLAY_NS);
    assert_eq!(on_device.graph_busy_ns, REPLAY_NS);
}

#[rstest]
#[case::not_traced(Traced::Neither, 0)]
#[case::without_time_stamps(Traced::Unstamped, ITERATIONS)]
fn replays_that_are_missing_are_said_aloud(#[case] traced: Traced, #[case] left_out: i64) {
    let folder = TempDir::new().expect("a folder");
    let profile = decode_loop(&folder, traced);
    assert_eq!(profile.graph_trace, GraphTrace::Missing);
    let says = |text: &str| {
        profile
            .warnings
            .iter()
            .any(|warning| warning.contains(text))
    };
    assert!(
        says("BUSY IS TOO LOW: 20 graph launches"),
        "{:?}",
        profile.warnings
    );
    let counted = format!("{left_out} graph replays without a time stamp");
    assert_eq!(says(&counted), left_out > 0, "{:?}", profile.warnings);
    let device = of_one(&profile).devices.remove(0);
    assert_eq!(device.busy_ns, ITERATIONS * SINGLE_NS);
}

#[test]
fn replays_of_which_some_are_missing_are_counted() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    for id in 0..3 {
        export.call("cudaGraphLaunch", id * 100, id * 100 + 10, id);
    }
    export.replay(20, 90, 0);
    let profile = only(&export.close());
    assert_eq!(profile.graph_trace, GraphTrace::Whole);
    assert!(
        profile.warnings[0].contains("2 of 3 graph launches have neither"),
        "{:?}",
        profile.warnings
    );
}

/// Tables are made when they are first needed: any one may stand alone.
#[rstest]
#[case::kernels("CUPTI_ACTIVITY_KIND_KERNEL", 1, 0, 0)]
#[case::copies("CUPTI_ACTIVITY_KIND_MEMCPY", 1, 0, 0)]
#[case::sets("CUPTI_ACTIVITY_KIND_MEMSET", 1, 0, 0)]
#[case::replays("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 1, 0, 0)]
#[case::calls("CUPTI_ACTIVITY_KIND_RUNTIME", 0, 1, 0)]
#[case::synchronisations("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", 0, 1, 0)]
fn a_table_alone_with_only_its_times(
    #[case] table: &str,
    #[case] gpu: usize,
    #[case] host: usize,
    #[case] marks: usize,
) {
    let folder = TempDir::new().expect("a folder");
    let export = Export::bare(&folder, "report.sqlite");
    export.sql(&format!(
        "CREATE TABLE {table} (start INT, end INT); INSERT INTO {table} VALUES (5, 25);"
    ));
    let profile = only(&export.close());
    assert_eq!(
        (profile.gpu.len(), profile.host.len(), profile.marks.len()),
        (gpu, host, marks)
    );
    assert_eq!(profile.process, None);
    if let Some(event) = profile.gpu.first() {
        assert_eq!(
            (event.span.ns(), event.device, event.correlation),
            (20, 0, None)
        );
        assert!(
            profile.warnings[0].contains("without a device"),
            "{:?}",
            profile.warnings
        );
    } else {
        assert!(
            profile
                .warnings
                .iter()
                .any(|text| text.contains("holds no GPU work"))
        );
    }
}

#[test]
fn ranges_take_their_text_from_either_column_and_marks_are_none() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    let id = export.string("from the table");
    export.sql(&format!(
        "INSERT INTO NVTX_EVENTS VALUES (1, 9, 59, 'in place', NULL, 0);
         INSERT INTO NVTX_EVENTS VALUES (2, 8, 60, NULL, {id}, 0);
         INSERT INTO NVTX_EVENTS VALUES (3, 7, 60, NULL, 99, 0);
         INSERT INTO NVTX_EVENTS VALUES (3, NULL, 34, 'a mark', NULL, 0);
         INSERT INTO NVTX_EVENTS VALUES (3, NULL, 59, 'still open', NULL, 0);
         INSERT INTO NVTX_EVENTS VALUES (3, 4, 75, 'a domain', NULL, 0);"
    ));
    let profile = only(&export.close());
    let names: Vec<&str> = profile
        .marks
        .iter()
        .map(|mark| profile.names.text(mark.name))
        .collect();
    assert_eq!(names, ["in place", "from the table"]);
}

#[rstest]
#[case::demangled("demangledName", "void gemm<float>(float*)")]
#[case::short("shortName", "gemm")]
#[case::neither("other", "kernel without a name")]
fn kernels_take_the_best_name_there_is(#[case] column: &str, #[case] name: &str) {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    let id = export.string(name);
    export.sql(&format!(
        "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL;
         CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, {column} INT);
         INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 10, 1, {id});"
    ));
    let profile = only(&export.close());
    assert_eq!(profile.names.text(profile.gpu[0].name), name);
    assert_eq!(profile.gpu[0].device, 1);
}

#[test]
fn what_has_no_time_is_left_out_and_counted() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    export.kernel(100, 90, 1, None);
    export.kernel(0, 0, 2, None);
    export.kernel(i64::MAX - 1, i64::MAX, 3, None);
    export.kernel(10, 10, 4, None);
    export.sql("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end) VALUES ('noon', NULL)");
    let profile = only(&export.close());
    assert_eq!(profile.gpu.len(), 1);
    let expected = [
        "1 events end before they start: left out",
        "1 GPU events without a time stamp: left out",
        "1 events at an impossible time: left out",
        "1 rows of CUPTI_ACTIVITY_KIND_KERNEL without a time: left out",
    ];
    assert_eq!(profile.warnings, expected);
}

#[test]
fn each_process_is_a_profile_and_each_device_is_told_apart() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    export.kernel_of(PROCESS, 0, (100, 150), 1, None);
    export.kernel_of(PROCESS, 1, (120, 180), 2, None);
    export.kernel_of(77, 0, (100, 400), 1, None);
    export.call_of(77, "cuLaunchKernel", (10, 60), 1);
    let profiles = read(&export.close()).expect("two processes");
    let processes: Vec<Option<u64>> = profiles.iter().map(|one| one.process).collect();
    assert_eq!(processes, [Some(77), Some(PROCESS.cast_unsigned())]);
    let summary = summary(&profiles);
    let busy: Vec<Vec<(u32, i64)>> = summary
        .profiles
        .iter()
        .map(|one| {
            one.devices
                .iter()
                .map(|device| (device.device, device.busy_ns))
                .collect()
        })
        .collect();
    assert_eq!(busy, [vec![(0, 300)], vec![(0, 50), (1, 60)]]);
    // A correlation belongs to its process.
    let with_launch: Vec<bool> = summary
        .profiles
        .iter()
        .map(|one| one.devices[0].delay.is_some())
        .collect();
    assert_eq!(with_launch, [true, false]);
}

#[test]
fn rows_without_a_process_belong_to_the_only_one() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    export.call("cudaMemcpyAsync", 10, 20, 5);
    export.sql(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, correlationId INT,
           copyKind INT);
         INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (30, 70, 5, 1);
         CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INT, name TEXT, label TEXT);
         INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'CUDA_MEMCPY_KIND_HTOD', 'Host-to-Device');",
    );
    let profile = only(&export.close());
    assert_eq!(profile.process, Some(PROCESS.cast_unsigned()));
    assert_eq!(
        profile.names.text(profile.gpu[0].name),
        "Memcpy Host-to-Device"
    );
    let delay = of_one(&profile).devices[0]
        .delay
        .expect("the launch is known");
    assert_eq!(delay.spread.p50_ns, 20);
}

#[test]
fn the_synchronisation_table_says_which_calls_block() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    export.range("update requests", 0, 500);
    export.call("cudaEventSynchronize", 100, 300, 1);
    export.call("cudaStreamWaitEvent", 310, 320, 2);
    export.call("cudaFree", 330, 400, 3);
    export.sql(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INT, end INT, correlationId INT,
           globalPid INT, syncType INT, streamId INT);
         INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (100, 290, 1, NULL, 1, 4294967295);
         INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (310, 312, 2, NULL, 2, 13);
         INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (331, 399, 3, NULL, 4, 7);
         INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (600, 650, 9, NULL, 4, 7);",
    );
    let profile = only(&export.close());
    let streams: Vec<Option<u64>> = profile.host.iter().map(|event| event.stream).collect();
    assert_eq!(streams, [None, Some(13), Some(7), Some(7)]);
    let summary = of_one(&profile);
    assert_eq!(summary.calls.blocked_ns, 200 + 70 + 50);
    let callers: Vec<(&str, Option<&str>, i64)> = summary
        .blocking
        .iter()
        .map(|row| (row.call.as_str(), row.caller.as_deref(), row.total_ns))
        .collect();
    let expected = [
        ("cudaEventSynchronize", Some("update requests"), 200),
        ("cudaFree", Some("update requests"), 70),
        ("synchronisation", None, 50),
    ];
    assert_eq!(callers, expected);
}

#[test]
fn a_database_that_is_no_export_is_refused_with_its_tables() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::bare(&folder, "other.sqlite");
    export.sql("CREATE TABLE customers (id INT); CREATE TABLE orders (id INT);");
    let error = read(&export.close()).expect_err("no export").to_string();
    for part in [
        "other.sqlite",
        "customers, orders",
        "CUPTI_ACTIVITY_KIND_KERNEL",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_database_that_another_program_holds_is_said_to_be_open() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    export.sql("BEGIN EXCLUSIVE;");
    let error = read(&folder.path().join("report.sqlite")).expect_err("locked");
    assert!(error.what.contains("another program has"), "{error}");
    assert!(error.to_string().contains("copy the file"), "{error}");
    export.sql("COMMIT;");
    only(&export.close());
}

/// What a copy of an open export holds whose tables are still in the log.
#[test]
fn a_database_without_its_log_is_told_apart() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::bare(&folder, "other.sqlite");
    export.sql("PRAGMA journal_mode = WAL; CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT);");
    let copy = folder.path().join("copy.sqlite");
    std::fs::copy(folder.path().join("other.sqlite"), &copy).expect("copied");
    let error = read(&copy).expect_err("no tables").to_string();
    assert!(error.contains("its -wal file"), "{error}");
    drop(export);
}

#[test]
fn an_export_without_rows_says_so() {
    let folder = TempDir::new().expect("a folder");
    let profile = only(&Export::new(&folder, "report.sqlite").close());
    assert_eq!(profile.warnings, ["the profile holds no GPU work"]);
}

#[test]
fn a_table_without_times_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::bare(&folder, "report.sqlite");
    export.sql("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, deviceId INT);");
    let error = read(&export.close()).expect_err("no end");
    assert_eq!(error.place.field.as_deref(), Some("end"));
    assert!(error.what.contains("CUPTI_ACTIVITY_KIND_KERNEL"), "{error}");
}

#[test]
fn a_database_that_is_cut_off_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let export = Export::new(&folder, "report.sqlite");
    for id in 0..2000 {
        export.kernel(id * 10, id * 10 + 5, id, None);
    }
    let file = export.close();
    let whole = std::fs::read(&file).expect("bytes");
    for length in [16, 100, 5000, whole.len() / 2] {
        std::fs::write(&file, &whole[..length]).expect("written");
        let error = read(&file).expect_err("cut off");
        assert!(error.to_string().contains("report.sqlite"), "{error}");
    }
}
