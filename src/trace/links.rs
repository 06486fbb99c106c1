//! Who waits for whom in a profile, told by order and durations alone.
//!
//! - A call follows the call that ended last before it on any thread of the process that launches
//!   or waits: threads hand over to one another. The time in between is host time.
//! - GPU work follows its launch and the work before it on its stream.
//! - Files do not say which event a stream waits for. A stream wait counts for everything submitted
//!   to other streams before it, unless the trace shows that the waiting work began earlier. Where
//!   the file does not name the waiting stream it is that of the thread's next launch.
//! - A synchronisation awaits what was submitted before to the stream it names, else to that of the
//!   thread's last launch; one of a device awaits every stream. A copy awaits itself if it was done
//!   when its call returned. Work that ended after the return was not awaited.
//! - A graph may hold nodes that the profiler does not show. Time between a graph's nodes, before
//!   its first and behind its last one, that no dependency explains is a duration of the graph.
//!   Within a graph and at its edges it is kept as such.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;

use super::event::{Call, GpuEvent, Profile, Work};
use super::launch::Launches;
use super::summary::Counted;

/// What a profile's launches, streams and synchronisations cost at least. Nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ReplayRows {
    /// From the begin of a call to the start of its work, where nothing held the work up: the
    /// shortest, by what the call does.
    pub launch_ns: BTreeMap<&'static str, i64>,
    /// From the return of such a call; negative where work starts before.
    pub launch_return_ns: BTreeMap<&'static str, i64>,
    /// From the end of work to the start of the next on its stream, where that was long submitted:
    /// the median. Negative where kernels overlap their predecessors.
    pub turn_around_ns: i64,
    /// From the end of the awaited work to the return of the waiting call: the shortest.
    pub sync_return_ns: i64,
}

/// A call of a thread that launches or waits.
pub(super) struct CallLink {
    /// Place among the profile's host calls.
    pub host: usize,
    /// The call that ended last before it.
    pub before: Option<usize>,
    /// The one before it on its own thread.
    pub own_before: Option<usize>,
    /// Work it waits for, done when it returned.
    pub awaited: Vec<usize>,
    /// Whether some of that was still running when it began.
    pub waited: bool,
}

/// A piece of GPU work.
pub(super) struct WorkLink {
    /// Place among the profile's GPU work.
    pub gpu: usize,
    /// The call that launched it.
    pub launch: Option<usize>,
    /// The work before it on its stream.
    pub before: Option<usize>,
    /// Work of other streams that its stream waits for.
    pub waits: Vec<usize>,
    /// Time of a graph's own that the profile shows no work for.
    pub untraced_ns: i64,
}

/// Calls in order of their begin, work in order of its start.
pub(super) struct Links {
    pub calls: Vec<CallLink>,
    pub works: Vec<WorkLink>,
    pub rows: ReplayRows,
}

type Stream = (u32, u64);

impl Links {
    pub fn of(profile: &Profile) -> Self {
        let launches = Launches::of(profile);
        let counted = Counted::of(profile);
        let (calls, place) = calls(profile);
        let mut last: HashMap<Stream, usize> = HashMap::new();
        let mut works: Vec<WorkLink> = Vec::new();
        for (gpu, event) in profile.gpu.iter().enumerate() {
            if !counted.once(event) {
                continue;
            }
            let launch = launches.index(event);
            works.push(WorkLink {
                gpu,
                launch: launch.and_then(|host| place.get(&host).copied()),
                before: last.insert(stream_of(event), works.len()),
                waits: Vec::new(),
                untraced_ns: 0,
            });
        }
        let mut links = Self {
            calls,
            works,
            rows: ReplayRows::default(),
        };
        links.follow(profile);
        links.rows = links.measure(profile);
        for at in 0..links.works.len() {
            links.works[at].untraced_ns = links.untraced_ns(profile, at);
        }
        links
    }

    /// Finds what calls await and what streams wait for, in the order of submission.
    fn follow(&mut self, profile: &Profile) {
        let mut launched: Vec<Vec<usize>> = vec![Vec::new(); self.calls.len()];
        let mut inherited: Vec<usize> = Vec::new();
        for (at, work) in self.works.iter().enumerate() {
            match work.launch {
                Some(call) => launched[call].push(at),
                None => inherited.push(at),
            }
        }
        let event_of = |works: &[WorkLink], at: usize| profile.gpu[works[at].gpu];
        let mut inherited = inherited.into_iter().peekable();
        // Work submitted last, by stream.
        let mut latest: BTreeMap<Stream, usize> = BTreeMap::new();
        let mut current: HashMap<u64, Stream> = HashMap::new();
        // Work that the next launch has to wait for, by thread or, where it is named, by stream.
        let mut by_thread: HashMap<u64, Vec<usize>> = HashMap::new();
        let mut by_stream: HashMap<u64, Vec<usize>> = HashMap::new();
        for (at, launched) in launched.iter().enumerate() {
            let host = profile.host[self.calls[at].host];
            while let Some(work) = inherited
                .next_if(|work| event_of(&self.works, *work).span.start_ns < host.span.start_ns)
            {
                latest.insert(stream_of(&event_of(&self.works, work)), work);
            }
            if host.call == Call::StreamWait {
                let waiting = match host.stream {
                    Some(stream) => by_stream.entry(stream).or_default(),
                    None => by_thread.entry(host.thread).or_default(),
                };
                waiting.extend(latest.values());
            }
            for work in launched {
                let event = event_of(&self.works, *work);
                let mut waits = by_thread.remove(&host.thread).unwrap_or_default();
                waits.extend(by_stream.remove(&event.stream).unwrap_or_default());
                waits.retain(|other| {
                    let other = event_of(&self.works, *other);
                    stream_of(&other) != stream_of(&event)
                        && other.span.end_ns <= event.span.start_ns
                });
                waits.sort_unstable();
                waits.dedup();
                self.works[*work].waits = waits;
                latest.insert(stream_of(&event), *work);
                current.insert(host.thread, stream_of(&event));
            }
            let mut awaited: Vec<usize> = match host.call {
                Call::Synchronise if !launched.is_empty() => launched.clone(),
                Call::Synchronise if of_device(profile.names.text(host.name)) => {
                    latest.values().copied().collect()
                }
                Call::Synchronise => match host.stream {
                    Some(named) => (latest.iter())
                        .filter(|((_, stream), _)| *stream == named)
                        .map(|(_, work)| *work)
                        .collect(),
                    None => (current.get(&host.thread))
                        .and_then(|stream| latest.get(stream).copied())
                        .into_iter()
                        .collect(),
                },
                Call::Transfer => launched.clone(),
                _ => Vec::new(),
            };
            awaited.retain(|work| event_of(&self.works, *work).span.end_ns <= host.span.end_ns);
            let running =
                |work: &usize| event_of(&self.works, *work).span.end_ns > host.span.start_ns;
            self.calls[at].waited = awaited.iter().any(running);
            self.calls[at].awaited = awaited;
        }
    }

    fn measure(&self, profile: &Profile) -> ReplayRows {
        let mut rows = ReplayRows::default();
        let least = |row: &mut BTreeMap<&'static str, i64>, call: Call, ns: i64| {
            let known = row.entry(kind_of(call)).or_insert(ns);
            *known = ns.min(*known);
        };
        let mut gaps = Vec::new();
        for work in &self.works {
            let event = &profile.gpu[work.gpu];
            let Some(call) = work.launch.map(|call| &self.calls[call]) else {
                continue;
            };
            let host = &profile.host[call.host];
            let before = work
                .before
                .map(|before| &profile.gpu[self.works[before].gpu]);
            if before.is_none_or(|before| before.span.end_ns < host.span.start_ns)
                && work.waits.is_empty()
            {
                let (begin, end) = (host.span.start_ns, host.span.end_ns);
                least(&mut rows.launch_ns, host.call, event.span.start_ns - begin);
                if !call.waited {
                    least(
                        &mut rows.launch_return_ns,
                        host.call,
                        event.span.start_ns - end,
                    );
                }
            } else if let Some(before) = before
                && before.span.end_ns > host.span.end_ns
                && work.waits.is_empty()
                && !event.in_graph
                && !before.in_graph
            {
                gaps.push(event.span.start_ns - before.span.end_ns);
            }
        }
        gaps.sort_unstable();
        rows.turn_around_ns = gaps.get(gaps.len() / 2).copied().unwrap_or(0);
        let returns = self
            .calls
            .iter()
            .filter(|call| call.waited)
            .filter_map(|call| {
                let ends = call.awaited.iter();
                let done = ends.map(|work| profile.gpu[self.works[*work].gpu].span.end_ns);
                Some(profile.host[call.host].span.end_ns - done.max()?)
            });
        rows.sync_return_ns = returns.min().unwrap_or(0);
        rows
    }

    /// The part of a graph's time before a piece of work that nothing in the profile explains.
    fn untraced_ns(&self, profile: &Profile, at: usize) -> i64 {
        let work = &self.works[at];
        let event = &profile.gpu[work.gpu];
        let before = work
            .before
            .map(|before| &profile.gpu[self.works[before].gpu]);
        let of_graph = |event: &GpuEvent| event.in_graph || event.work == Work::GraphReplay;
        let Some(call) = work.launch else { return 0 };
        if !of_graph(event) && !before.is_some_and(of_graph) {
            return 0;
        }
        let call = &self.calls[call];
        let host = &profile.host[call.host];
        let mut ready = host.span.start_ns + self.rows.launch(host.call);
        if let (false, Some(lag)) = (call.waited, self.rows.launch_return(host.call)) {
            ready = ready.max(host.span.end_ns + lag);
        }
        if let Some(before) = before {
            ready = ready.max(before.span.end_ns + self.rows.turn_around_ns);
        }
        for other in &work.waits {
            ready = ready.max(profile.gpu[self.works[*other].gpu].span.end_ns);
        }
        event.span.start_ns.saturating_sub(ready).max(0)
    }
}

impl ReplayRows {
    /// The row of a call; of one that was never seen with idle streams, the shortest of the others.
    pub(super) fn launch(&self, call: Call) -> i64 {
        let own = self.launch_ns.get(kind_of(call));
        own.or_else(|| self.launch_ns.values().min())
            .copied()
            .unwrap_or(0)
    }

    pub(super) fn launch_return(&self, call: Call) -> Option<i64> {
        self.launch_return_ns.get(kind_of(call)).copied()
    }
}

fn kind_of(call: Call) -> &'static str {
    match call {
        Call::GraphLaunch => "graph_launch",
        Call::Transfer | Call::Synchronise => "copy",
        _ => "launch",
    }
}

pub(super) fn stream_of(event: &GpuEvent) -> Stream {
    (event.device, event.stream)
}

/// Whether a synchronisation of this name awaits every stream.
fn of_device(name: &str) -> bool {
    ["Device", "Ctx", "Thread"]
        .iter()
        .any(|word| name.contains(&format!("{word}Synchronize")))
}

/// The calls that count, and the place among them of each host call. A call inside another one of
/// its thread, as a driver call in a runtime call, is part of that.
fn calls(profile: &Profile) -> (Vec<CallLink>, HashMap<usize, usize>) {
    let acts = |call: Call| call.submits() || call == Call::Synchronise;
    let active: BTreeSet<u64> = (profile.host.iter())
        .filter(|event| acts(event.call))
        .map(|event| event.thread)
        .collect();
    let mut calls: Vec<CallLink> = Vec::new();
    let mut place = HashMap::new();
    let mut own: HashMap<u64, usize> = HashMap::new();
    let mut open: Vec<usize> = Vec::new();
    let mut ended: Option<usize> = None;
    let end_of = |call: &CallLink| profile.host[call.host].span.end_ns;
    for (host, event) in profile.host.iter().enumerate() {
        if !active.contains(&event.thread) {
            continue;
        }
        let own_before = own.get(&event.thread).copied();
        if let Some(outer) = own_before
            && end_of(&calls[outer]) > event.span.start_ns
        {
            place.insert(host, outer);
            continue;
        }
        open.retain(|call| {
            let end = end_of(&calls[*call]);
            let over = end <= event.span.start_ns;
            if over && ended.is_none_or(|last| end >= end_of(&calls[last])) {
                ended = Some(*call);
            }
            !over
        });
        let at = calls.len();
        calls.push(CallLink {
            host,
            before: ended,
            own_before,
            awaited: Vec::new(),
            waited: false,
        });
        place.insert(host, at);
        own.insert(event.thread, at);
        open.push(at);
    }
    (calls, place)
}
