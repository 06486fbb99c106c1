//! Timelines agree with the predictions they show.

mod toy;

use std::collections::BTreeMap;
use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;
use stepgate::model::Scenario;
use stepgate::replay::{Detail, Doing, On, Slice, SliceId};
use stepgate::timing::Policy;

use toy::{HostRow, Times, Toy, eager, exact, graph, graphs, request, topology};

const CASE: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4";

fn rows() -> Vec<HostRow> {
    let dispatch = [26.0, 28.0];
    let ranks = [0, 1].map(|rank| eager("host_dispatch", dispatch[rank as usize]).rank(rank));
    let mut rows: Vec<HostRow> = ranks.into();
    rows.extend([
        eager("host_prepare", 0.7),
        eager("host_finish", 0.3),
        graph("graph_launch", 0.02),
        request("client_transport", 1.1),
        request("ingress", 0.9),
        request("egress", 0.4),
    ]);
    rows
}

/// Hosts that hold the GPU back, and a GPU that holds the hosts back; ranks of one group and rank
/// groups of their own.
fn toys() -> [(&'static str, Toy); 3] {
    let host_bound = Toy::dense(&[0, 0], topology(2, 1), &Times::all(0.1, 0.05));
    let gpu_bound = Toy::dense(&[0, 0], topology(2, 1), &Times::all(3.0, 0.5));
    let groups = Toy::dense(&[0, 0], topology(1, 2), &Times::all(1.5, 0.25));
    [
        ("host-bound", host_bound.with_host(&rows())),
        ("GPU-bound", gpu_bound.with_host(&rows())),
        ("rank groups", groups.with_host(&rows())),
    ]
}

fn scenario(toy: &Toy, overlap: bool) -> Scenario {
    let mut scenario = toy.scenario(3, 7, 5);
    scenario.serving.overlap = overlap;
    scenario.serving.cuda_graph = Some(graphs(&[1, 2, 4], true));
    scenario
}

/// Everything in detail, and the prediction's log times hold in it.
fn detail(toy: &Toy, scenario: &Scenario) -> Detail {
    let prediction = toy.predict(scenario);
    let last = prediction.log.iterations.len() - 1;
    let replayer = toy.replayer();
    let detail = replayer
        .detail(scenario, Policy::Strict, &prediction.log, 0..=last)
        .expect("the toy folder is well formed")
        .expect("the scenario was predicted");
    assert_eq!(detail.log.iterations.len(), prediction.log.iterations.len());
    for (found, wanted) in detail.log.iterations.iter().zip(&prediction.log.iterations) {
        exact(found.start_ms, wanted.start_ms, "an iteration's start");
    }
    for (found, wanted) in detail.log.requests.iter().zip(&prediction.log.requests) {
        exact(found.first_token_ms, wanted.first_token_ms, "a first token");
        exact(found.last_token_ms, wanted.last_token_ms, "a last token");
    }
    detail
}

#[rstest]
fn slices_follow_one_another(#[values(true, false)] overlap: bool) {
    for (name, toy) in toys() {
        let detail = detail(&toy, &scenario(&toy, overlap));
        let mut rows: BTreeMap<(usize, bool), Vec<&Slice>> = BTreeMap::new();
        for slice in &detail.slices {
            assert!(
                slice.end_ms > slice.begin_ms,
                "{name}: a slice has a length"
            );
            if let Some(SliceId(after)) = slice.after {
                exact(
                    slice.begin_ms,
                    detail.slices[after].end_ms,
                    "what came before",
                );
            }
            rows.entry((slice.lane, slice.on == On::Host))
                .or_default()
                .push(slice);
        }
        assert_eq!(
            rows.len(),
            2 * detail.lanes,
            "{name}: a host and a stream per lane"
        );
        for row in rows.values_mut() {
            row.sort_by(|a, b| a.begin_ms.total_cmp(&b.begin_ms));
            for pair in row.windows(2) {
                assert!(
                    pair[0].end_ms <= pair[1].begin_ms + 1e-9,
                    "{name}: {pair:?}"
                );
            }
        }
    }
}

/// From its schedule to the moment it leaves the server, a first token's path is a chain of work
/// without a gap and without a wait.
#[rstest]
fn a_path_covers_the_way_to_a_first_token(#[values(true, false)] overlap: bool) {
    for (name, toy) in toys() {
        let detail = detail(&toy, &scenario(&toy, overlap));
        for (number, record) in (0..).zip(&detail.log.requests) {
            let path = detail.path_to_first_token(number, record.scheduled_ms);
            let slices: Vec<&Slice> = path.iter().map(|id| &detail.slices[id.0]).collect();
            let (Some(first), Some(last)) = (slices.first(), slices.last()) else {
                panic!("{name}: request {number} has no path");
            };
            assert!(
                first.begin_ms <= record.scheduled_ms + 1e-9,
                "{name}: its start"
            );
            exact(
                last.end_ms,
                detail.left_ms(number).expect("it left"),
                "its end",
            );
            exact(last.end_ms + 0.4, record.first_token_ms, "egress");
            for pair in slices.windows(2) {
                exact(pair[1].begin_ms, pair[0].end_ms, "a link of the path");
            }
            let works = |slice: &&&Slice| matches!(slice.doing, Doing::Work(_));
            assert_eq!(
                slices.iter().filter(works).count(),
                slices.len(),
                "{name}: no wait"
            );
        }
    }
}

/// Ranks wait for rank 1, whose host is slower; the wait is beside the path.
#[test]
fn peer_waits_are_slices_of_their_own() {
    let [(_, toy), ..] = toys();
    let detail = detail(&toy, &scenario(&toy, true));
    let waits = |lane| {
        let of_lane = move |slice: &&Slice| slice.lane == lane && slice.doing == Doing::PeerWait;
        detail.slices.iter().filter(of_lane).count()
    };
    assert!(waits(0) > 0);
    assert!(
        detail
            .slices
            .iter()
            .any(|slice| slice.doing == Doing::GpuWait)
    );
    let collectives = detail
        .slices
        .iter()
        .filter(|slice| slice.doing == Doing::PeerWait);
    assert!(
        collectives
            .into_iter()
            .all(|slice| slice.on == On::Collectives)
    );
}

fn stepgate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stepgate"))
        .args(["--root", env!("CARGO_MANIFEST_DIR")])
        .args(arguments)
        .output()
        .expect("the binary runs")
}

fn chrome(arguments: &[&str]) -> Vec<Value> {
    let mut all = vec!["predict", CASE, "--timeline", "-"];
    all.extend(arguments);
    let output = stepgate(&all);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut whole: Value = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
    match whole["traceEvents"].take() {
        Value::Array(events) => events,
        other => panic!("{other}"),
    }
}

fn ns(event: &Value, key: &str) -> i64 {
    (event[key].as_f64().expect("a number") * 1e3).round() as i64
}

/// Complete events by track: begin, end and the event.
fn tracks(events: &[Value]) -> BTreeMap<u64, Vec<(i64, i64, &Value)>> {
    let mut tracks: BTreeMap<u64, Vec<(i64, i64, &Value)>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let begin = ns(event, "ts");
        let slice = (begin, begin + ns(event, "dur"), event);
        tracks
            .entry(event["tid"].as_u64().expect("an id"))
            .or_default()
            .push(slice);
    }
    for track in tracks.values_mut() {
        track.sort_by_key(|(begin, end, _)| (*begin, *end));
    }
    tracks
}

#[rstest]
#[case::the_slowest_mixed_step(&[], true)]
#[case::a_decode_step(&["--step", "slowest-decode"], false)]
#[case::a_number(&["--step", "1712"], true)]
#[case::several(&["--steps", "1711..1713"], false)]
#[case::a_request(&["--request", "2"], true)]
fn chrome_json_is_well_formed(#[case] arguments: &[&str], #[case] to_first_token: bool) {
    let events = chrome(arguments);
    let tracks = tracks(&events);
    for track in tracks.values() {
        for pair in track.windows(2) {
            assert!(
                pair[0].1 <= pair[1].0,
                "{:?} and {:?} overlap",
                pair[0],
                pair[1]
            );
        }
    }
    let named = |kind: &str, name: &str| {
        events
            .iter()
            .any(|event| event["name"] == kind && event["args"]["name"] == name)
    };
    for process in ["critical path", "scheduler", "requests", "rank 0", "rank 1"] {
        assert!(named("process_name", process), "{process}");
    }
    for thread in ["iterations", "slot 3", "host", "stream", "collectives"] {
        assert!(named("thread_name", thread), "{thread}");
    }
    let phases = |phase: &'static str| events.iter().filter(move |event| event["ph"] == phase);
    assert_eq!(
        (phases("s").count(), phases("f").count()),
        (1, 1),
        "one path"
    );
    let flow: Vec<&Value> = (events.iter())
        .filter(|event| ["s", "t", "f"].iter().any(|phase| event["ph"] == *phase))
        .collect();
    assert!(
        flow.is_sorted_by_key(|event| ns(event, "ts")),
        "arrows go forward"
    );
    for event in &flow {
        let (at, track) = (ns(event, "ts"), event["tid"].as_u64().expect("an id"));
        let inside = |(begin, end, _): &(i64, i64, &Value)| *begin <= at && at < *end;
        assert!(
            tracks[&track].iter().any(inside),
            "{event} binds to a slice"
        );
        assert_eq!(event["id"], flow[0]["id"]);
    }
    // The path's own track: one piece after another.
    let path = &tracks[&0];
    for pair in path.windows(2) {
        assert_eq!(pair[0].1, pair[1].0, "no gap in the path");
    }
    if to_first_token {
        let (begin, end) = (path[0].0, path[path.len() - 1].1);
        let of_path = |event: &&Value| event["name"] == "thread_name" && event["tid"] == 0;
        let named = events
            .iter()
            .find(of_path)
            .expect("the path's track has a name");
        let name = named["args"]["name"].as_str().expect("text");
        let shown = |event: &Value| {
            let number = &event["args"]["request"];
            event["args"]["ttft_ms"].is_f64() && name == format!("request {number}")
        };
        let request = (tracks.values().flatten())
            .find(|(from, _, event)| *from == begin && shown(event))
            .expect("the request whose POST the path begins with");
        let ttft = request.2["args"]["ttft_ms"].as_f64().expect("a number");
        assert!(
            ((end - begin) as f64 / 1e6 - ttft).abs() < 2e-6,
            "{ttft} ms is the path"
        );
    }
}

#[test]
fn a_picture_is_well_formed_and_says_what_it_shows() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("step.svg");
    let output = stepgate(&[
        "predict",
        CASE,
        "--timeline",
        file.to_str().expect("a name"),
    ]);
    assert!(output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("iteration 1712 (mixed 840 + 3)"), "{said}");
    let text = std::fs::read_to_string(&file).expect("the picture");
    let mut reader = quick_xml::Reader::from_str(&text);
    while reader.read_event().expect("XML") != quick_xml::events::Event::Eof {}
    for word in [
        "rank 1 · collectives",
        "peer wait",
        "critical path",
        "host prepare",
    ] {
        assert!(text.contains(word), "{word}");
    }
}

#[rstest]
#[case(&["predict", CASE, "--timeline", "-", "--step", "99999"], "there is no iteration 99999")]
#[case(&["predict", CASE, "--timeline", "-", "--request", "40"], "there is no request 40")]
#[case(&["predict", CASE, "--timeline", "-", "--step", "fast"], "slowest-mixed")]
#[case(&["predict", CASE, "--timeline", "-", "--steps", "9..3"], "two numbers in order")]
#[case(&["predict", CASE, "--timeline", "-", "--steps", "0..5000"], "more than 256")]
#[case(&["predict", CASE, "--timeline", "-", "--steps", "0..255"], "257 iterations would be shown op by op (the chosen ones and their neighbours)")]
#[case(&["predict", "gpt-oss-120b/b200-trtllm/tp2", "--timeline", "-"], "one case")]
#[case(&["predict", CASE, "--step", "3"], "--timeline")]
fn what_cannot_be_shown_is_a_usage_error(#[case] arguments: &[&str], #[case] said: &str) {
    let output = stepgate(arguments);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains(said), "{error}");
}
