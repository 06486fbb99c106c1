//! PyTorch profiler traces: exact times, whatever order and form the file has, and damaged files.

mod profiles;

use std::io::Write as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use profiles::{call, event, kernel, mark, only, trace, write};
use proptest::prelude::*;
use rstest::rstest;
use stepgate::trace::{Call, GraphTrace, Profile, Work, read, read_partial};
use tempfile::TempDir;

fn folder() -> TempDir {
    TempDir::new().expect("a folder")
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).expect("memory");
    encoder.finish().expect("memory")
}

fn profile_of(text: &str) -> Profile {
    only(&write(&folder(), "trace.json", text))
}

fn partial(file: &Path) -> (Profile, String) {
    let mut reading = read_partial(file, &mut |_| {}).expect("something was read");
    let fault = reading.ended_by.expect("a fault").to_string();
    (reading.profiles.remove(0), fault)
}

#[test]
fn times_are_exact_nanoseconds() {
    let at = [
        ("4458676522690.655", "156.777"),
        ("\"4458676522691.5\"", "2"),
        ("4.4586765226925e12", "1e-3"),
        ("4458676522693", "0.0006"),
    ];
    let events = at.map(|at| event("kernel", "k", at, 7, r#""device": 0, "stream": 7"#));
    let profile = profile_of(&trace(&events, 0, 1));
    let spans: Vec<(i64, i64)> = profile
        .gpu
        .iter()
        .map(|event| (event.span.start_ns, event.span.ns()))
        .collect();
    let expected = [
        (4_458_676_522_690_655, 156_777),
        (4_458_676_522_691_500, 2000),
        (4_458_676_522_692_500, 1),
        (4_458_676_522_693_000, 1),
    ];
    assert_eq!(spans, expected);
    assert_eq!(
        profile.warnings,
        ["1 times finer than a nanosecond: rounded to the nearest"]
    );
}

#[test]
fn categories_become_work_calls_and_marks() {
    let events = [
        kernel("gemm", 100, 5, 7, 1),
        event(
            "gpu_memcpy",
            "Memcpy HtoD",
            ("110", "5"),
            7,
            r#""device": 1, "stream": 9"#,
        ),
        event(
            "Memset",
            "Memset (Device)",
            ("120", "5"),
            7,
            r#""device": 1, "stream": "9""#,
        ),
        // The same range as the GPU saw it: no work.
        event(
            "gpu_user_annotation",
            "## forward ##",
            ("100", "900"),
            7,
            r#""device": 0"#,
        ),
        call("cudaLaunchKernel", 90, 5, 1),
        event(
            "cuda_driver",
            "cuLaunchKernelEx",
            ("95", "2"),
            1,
            r#""correlation": 2"#,
        ),
        event(
            "cuda_sync",
            "Stream Sync",
            ("130", "8"),
            7,
            r#""correlation": 3, "stream": 7"#,
        ),
        call("cudaStreamSynchronize", 125, 20, 3),
        mark("user_annotation", "ProfilerStep#4", 80, 100),
        mark("cpu_op", "aten::mm", 85, 20),
        mark("python_function", "forward", 85, 20),
        r#"{"ph": "i", "name": "Iteration Start", "ts": 1}"#.to_owned(),
        r#"{"ph": "s", "id": 1, "cat": "ac2g", "ts": 1}"#.to_owned(),
    ];
    let profile = profile_of(&trace(&events, 3, 8));
    let gpu: Vec<(Work, u32, u64)> = profile
        .gpu
        .iter()
        .map(|event| (event.work, event.device, event.stream))
        .collect();
    assert_eq!(
        gpu,
        [(Work::Kernel, 0, 7), (Work::Copy, 1, 9), (Work::Set, 1, 9)]
    );
    let host: Vec<(Call, Option<u64>)> = profile
        .host
        .iter()
        .map(|event| (event.call, event.stream))
        .collect();
    let expected = [
        (Call::Launch, None),
        (Call::Launch, None),
        (Call::Synchronise, Some(7)),
    ];
    assert_eq!(host, expected);
    assert_eq!(profile.marks.len(), 2);
    assert_eq!(
        (profile.rank, profile.world, profile.process),
        (Some(3), Some(8), Some(9))
    );
    assert!(profile.warnings.is_empty(), "{:?}", profile.warnings);
}

#[test]
fn kernels_of_a_graph_launch_are_the_graphs() {
    let events = [
        kernel("a", 100, 5, 7, 1),
        kernel("b", 106, 5, 7, 1),
        kernel("c", 120, 5, 7, 2),
        // Behind its kernels, as a file may have it.
        call("cudaGraphLaunch", 90, 5, 1),
        call("cudaLaunchKernel", 96, 5, 2),
    ];
    let profile = profile_of(&trace(&events, 0, 1));
    let owned: Vec<bool> = profile.gpu.iter().map(|event| event.in_graph).collect();
    assert_eq!(owned, [true, true, false]);
    assert_eq!(profile.graph_trace, GraphTrace::Nodes);
}

#[rstest]
#[case::rank_and_base_before_the_events(
    r#"{"distributedInfo": {"rank": 1, "world_size": 2}, "baseTimeNanoseconds": 1000, "traceEvents": [K]}"#,
    Some(1),
    1000
)]
#[case::rank_and_base_behind_the_events(
    r#"{"traceEvents": [K], "baseTimeNanoseconds": 1000, "distributedInfo": {"rank": 1}}"#,
    Some(1),
    1000
)]
#[case::the_bare_list(" [K] ", None, 0)]
#[case::a_byte_order_mark("\u{feff}{\"traceEvents\": [K]}", None, 0)]
#[case::a_base_beyond_all_clocks(
    r#"{"traceEvents": [K], "baseTimeNanoseconds": 9223372036854775807}"#,
    None,
    0
)]
#[case::a_rank_of_no_use(
    r#"{"traceEvents": [K], "distributedInfo": {"rank": "first"}, "schemaVersion": 1}"#,
    None,
    0
)]
fn what_stands_around_the_events(
    #[case] form: &str,
    #[case] rank: Option<u32>,
    #[case] base_ns: i64,
) {
    let profile = profile_of(&form.replace('K', &kernel("k", 5, 2, 7, 1)));
    assert_eq!(profile.gpu[0].span.start_ns, 5000 + base_ns);
    assert_eq!(profile.rank, rank);
}

#[test]
fn events_of_another_form_are_left_out_and_counted() {
    let times = |ts: &str, dur: &str| event("kernel", "k", (ts, dur), 7, r#""device": 0"#);
    let events = [
        times("1", "-1"),
        times("null", "1"),
        times("1e99", "1"),
        times("4000000000000000", "1"),
        r#"{"ph": "X", "cat": "kernel", "name": {"no": "text"}, "ts": 1, "dur": 1}"#.to_owned(),
        r#"{"ph": "X", "cat": "kernel", "args": "a text with } in it", "ts": 1, "dur": 1}"#
            .to_owned(),
        r#"{"ph": "X", "cat": "kernel", "pid": "GPU", "ts": 1, "dur": 1}"#.to_owned(),
        "17".to_owned(),
        kernel("k", 1, 1, 7, 1),
    ];
    let profile = profile_of(&trace(&events, 0, 1));
    assert_eq!(profile.gpu.len(), 1);
    let expected = [
        "1 events end before they start: left out",
        "2 events without a time: left out",
        "1 events at an impossible time: left out",
        "2 events of an unknown form: left out",
        "1 GPU events without a device: left out",
        "1 events that are no objects: left out",
    ];
    assert_eq!(profile.warnings, expected);
}

#[test]
fn clocks_that_disagree_are_said() {
    let events = [
        call("cudaLaunchKernel", 200, 5, 1),
        kernel("k", 190, 5, 7, 1),
        call("cudaLaunchKernel", 300, 5, 2),
        kernel("k", 302, 5, 7, 2),
    ];
    let profile = profile_of(&trace(&events, 0, 1));
    assert!(profile.warnings[0].contains("1 pieces of GPU work start before"));
    assert!(
        profile.warnings[0].contains("by up to 10000 ns"),
        "{:?}",
        profile.warnings
    );
}

/// Values that lie across the ends of the reading window, which is 1 MiB at first, and one that is
/// longer than it.
#[test]
fn a_file_longer_than_the_window_reads_the_same() {
    let mut events = Vec::new();
    for id in 0..20_000_u64 {
        events.push(kernel(
            &format!("k\\u00e9 \\\"{}\\\" é {{[", id % 7),
            id * 10,
            9,
            7,
            id,
        ));
    }
    let stack = "frame; ".repeat(400_000);
    events.insert(9000, mark("cpu_op", &stack, 5, 5));
    let text = trace(&events, 0, 1);
    assert!(text.len() > 5 << 20, "{}", text.len());
    let profile = profile_of(&text);
    assert_eq!(profile.gpu.len(), 20_000);
    assert_eq!(profile.names.text(profile.gpu[5].name), "ké \"5\" é {[");
    assert_eq!(profile.names.text(profile.marks[0].name), stack);
    let sum_ns: i64 = profile.gpu.iter().map(|event| event.span.ns()).sum();
    assert_eq!(sum_ns, 20_000 * 9000);
}

#[test]
fn gzip_of_one_and_of_several_members() {
    let text = trace(&[kernel("k", 1, 1, 7, 1)], 0, 1);
    let folder = folder();
    let (head, tail) = text.as_bytes().split_at(text.len() / 2);
    let several = [gzip(head), gzip(tail)].concat();
    for (name, bytes) in [
        ("one.json.gz", gzip(text.as_bytes())),
        ("several.json.gz", several),
    ] {
        let profile = only(&write(&folder, name, &bytes));
        assert_eq!(profile.gpu.len(), 1);
        // The digest is of the file, not of the text in it.
        let digest: String = sha2_of(&bytes);
        assert_eq!(profile.sha256, digest);
    }
}

fn sha2_of(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Some events that fill several lines.
fn lines() -> String {
    let events: Vec<String> = (0..100).map(|id| kernel("k", id * 10, 5, 7, id)).collect();
    trace(&events, 0, 1)
}

#[test]
fn json_that_breaks_in_the_middle_gives_what_comes_before_and_the_place() {
    let text = lines();
    let at = text.match_indices('\n').nth(40).expect("a line").0 + 1;
    let broken = format!("{}?{}", &text[..at], &text[at..]);
    let folder = folder();
    let file = write(&folder, "trace.json", &broken);
    let (profile, fault) = partial(&file);
    assert_eq!(profile.gpu.len(), 40);
    assert!(fault.contains("trace.json:42:1: broken JSON"), "{fault}");
    assert!(fault.contains(&format!("at byte {at}")), "{fault}");
    // Who cannot use a part is given none.
    assert_eq!(read(&file).expect_err("damaged").to_string(), fault);
}

#[test]
fn json_that_is_cut_off_says_where() {
    let text = lines();
    let folder = folder();
    let at = text.match_indices('\n').nth(40).expect("a line").0 + 20;
    let file = write(&folder, "trace.json", &text[..at]);
    let (profile, fault) = partial(&file);
    assert_eq!(profile.gpu.len(), 40);
    assert!(
        fault.contains("trace.json:42:20: broken JSON: the JSON text ends"),
        "{fault}"
    );
}

#[test]
fn gzip_that_is_cut_off_gives_what_comes_before() {
    let events: Vec<String> = (0..50_000)
        .map(|id| kernel("k", id * 10, 5, 7, id))
        .collect();
    let bytes = gzip(trace(&events, 0, 1).as_bytes());
    let folder = folder();
    let file = write(&folder, "trace.json.gz", &bytes[..bytes.len() / 2]);
    let (profile, fault) = partial(&file);
    assert!(
        (1000..49_000).contains(&profile.gpu.len()),
        "{}",
        profile.gpu.len()
    );
    assert!(fault.contains("cannot read on after byte"), "{fault}");
    // Damaged, not cut off.
    let mut damaged = bytes.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0xff);
    let (profile, _) = partial(&write(&folder, "damaged.json.gz", damaged));
    assert!(profile.gpu.len() < 50_000);
}

#[rstest]
#[case::an_empty_file("", "the file is empty")]
#[case::blanks(" \n", "the file is empty")]
#[case::another_format("version https://git-lfs", "is neither")]
#[case::no_events(r#"{"schemaVersion": 1}"#, "has no `traceEvents` array")]
#[case::events_that_are_no_list(r#"{"traceEvents": null}"#, "has no `traceEvents` array")]
#[case::broken_at_once(r#"{"traceEvents": [}"#, "broken JSON")]
#[case::more_behind_the_end("[] []", "more text after the end")]
#[case::a_number_cut_off(r#"{"schemaVersion": 1"#, "ends in the middle")]
fn a_file_without_a_trace_is_refused(#[case] text: &str, #[case] says: &str) {
    let folder = folder();
    for (name, bytes) in [
        ("x.json", text.as_bytes().to_vec()),
        ("x.json.gz", gzip(text.as_bytes())),
    ] {
        let error = read(&write(&folder, name, bytes))
            .expect_err("no trace")
            .to_string();
        // Inside gzip what is no JSON is seen as such.
        let inside = name.ends_with("gz") && error.contains("broken JSON");
        assert!(inside || error.contains(says), "{name}: {error}");
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn no_file_and_a_folder_are_refused() {
    let folder = folder();
    let error = read(folder.path()).expect_err("a folder").to_string();
    assert!(error.contains("is not a regular file"), "{error}");
    let error = read(&folder.path().join("none.json"))
        .expect_err("no file")
        .to_string();
    assert!(
        error.contains("none.json: cannot read the profile"),
        "{error}"
    );
    let empty = write(&folder, "x.json.gz", []);
    let error = read(&empty).expect_err("empty").to_string();
    assert!(error.contains("the file is empty"), "{error}");
}

#[test]
fn a_trace_without_gpu_events_says_so() {
    let profile = profile_of(&trace(&[mark("cpu_op", "aten::mm", 1, 2)], 0, 1));
    assert_eq!(profile.warnings, ["the profile holds no GPU work"]);
}

proptest! {
    /// Any damage to a trace gives an error or what comes before it, and no panic.
    #[test]
    fn damage_never_panics(at in 0..8000_usize, byte in any::<u8>(), cut in any::<bool>(), zipped in any::<bool>()) {
        let text = lines();
        let mut bytes = if zipped { gzip(text.as_bytes()) } else { text.into_bytes() };
        let at = at % bytes.len();
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] = byte;
        }
        let folder = folder();
        let file = write(&folder, "trace.json", bytes);
        if let Ok(reading) = read_partial(&file, &mut |_| {}) {
            prop_assert!(reading.profiles[0].gpu.len() <= 100);
            let _ = stepgate::trace::summarise(&reading.profiles, None);
        }
    }
}
