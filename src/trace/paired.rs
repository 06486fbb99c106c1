//! A paired replay in time: each rank as it was traced and as it was composed.

use std::collections::BTreeMap;

use serde_json::json;

use crate::compose::{Part, WorkId};

use super::event::{Call, Profile, Span};
use super::links::stream_of;
use super::replay::{Composed, Lanes};
use super::timeline::{Kind, Slice, Timeline, TrackId};

impl Composed<'_> {
    /// Calls and GPU work of all ranks, traced and composed side by side, on the first rank's
    /// clock. Calls that are no launch, copy, set or synchronisation are left out.
    pub fn timeline(&self) -> Timeline {
        let mut timeline = Timeline::default();
        for (at, profile) in self.profiles.iter().enumerate() {
            let name = profile.rank.map_or_else(
                || format!("profile {}", at + 1),
                |rank| format!("rank {rank}"),
            );
            let shown = Shown {
                profile,
                lanes: &self.lanes[at],
            };
            let offset_ns = self.offsets_ns[at];
            let traced = |span: Span| Span {
                start_ns: span.start_ns.saturating_sub(offset_ns),
                end_ns: span.end_ns.saturating_sub(offset_ns),
            };
            let call_traced = |call: usize| {
                let host = &profile.host[self.lanes[at].links.calls[call].host];
                traced(host.span)
            };
            let work_traced = |work: usize| {
                let event = &profile.gpu[self.lanes[at].links.works[work].gpu];
                let span = traced(event.span);
                (span.start_ns, span)
            };
            shown.draw(
                &mut timeline,
                &format!("{name}, traced"),
                call_traced,
                work_traced,
            );
            let ran = |id: WorkId| self.ran[id.0];
            let call_composed = |call: usize| {
                let (own, wait) = self.lanes[at].calls[call];
                Span {
                    start_ns: ran(own).begin_ns,
                    end_ns: ran(wait.unwrap_or(own)).end_ns,
                }
            };
            let work_composed = |work: usize| {
                let run = ran(self.lanes[at].works[work].1);
                let span = Span {
                    start_ns: run.begin_ns,
                    end_ns: run.end_ns,
                };
                (run.arrival_ns, span)
            };
            shown.draw(
                &mut timeline,
                &format!("{name}, composed"),
                call_composed,
                work_composed,
            );
        }
        timeline
    }
}

/// One profile as it is to be shown.
struct Shown<'a> {
    profile: &'a Profile,
    lanes: &'a Lanes,
}

impl Shown<'_> {
    /// Draws calls and work at the times that `call` and `work` give; of work also when it arrived.
    fn draw(
        &self,
        timeline: &mut Timeline,
        process: &str,
        call: impl Fn(usize) -> Span,
        work: impl Fn(usize) -> (i64, Span),
    ) {
        let mut threads: BTreeMap<u64, TrackId> = BTreeMap::new();
        let mut ends: BTreeMap<TrackId, i64> = BTreeMap::new();
        for (at, link) in self.lanes.links.calls.iter().enumerate() {
            let host = &self.profile.host[link.host];
            let kind = match host.call {
                Call::GraphLaunch => Kind::Part(Part::GraphLaunch),
                Call::Launch | Call::Transfer => Kind::Part(Part::HostDispatch),
                Call::Synchronise => Kind::GpuWait,
                _ => continue,
            };
            let track = *(threads.entry(host.thread))
                .or_insert_with(|| timeline.track(process, &format!("thread {}", host.thread)));
            let name = self.profile.names.text(host.name);
            add(timeline, &mut ends, track, kind, name, call(at), None);
        }
        let mut streams: BTreeMap<(u32, u64), TrackId> = BTreeMap::new();
        for (at, link) in self.lanes.links.works.iter().enumerate() {
            let event = &self.profile.gpu[link.gpu];
            let stream = stream_of(event);
            let track = *streams.entry(stream).or_insert_with(|| {
                timeline.track(process, &format!("device {} stream {}", stream.0, stream.1))
            });
            let (arrival_ns, span) = work(at);
            let wait = Span {
                start_ns: arrival_ns,
                end_ns: span.start_ns,
            };
            add(
                timeline,
                &mut ends,
                track,
                Kind::PeerWait,
                "wait",
                wait,
                None,
            );
            let name = self.profile.names.text(event.name);
            let kind = if self.lanes.is_collective(self.profile, at) {
                Kind::Part(Part::Transfer)
            } else {
                Kind::Part(Part::Kernel)
            };
            add(
                timeline,
                &mut ends,
                track,
                kind,
                name,
                span,
                event.correlation,
            );
        }
    }
}

/// Adds a slice of some length. Kernels of one stream may overlap, slices of one track may not: the
/// later one is cut.
fn add(
    timeline: &mut Timeline,
    ends: &mut BTreeMap<TrackId, i64>,
    track: TrackId,
    kind: Kind,
    name: &str,
    span: Span,
    correlation: Option<u64>,
) {
    let end = ends.entry(track).or_insert(i64::MIN);
    let span = Span {
        start_ns: span.start_ns.max(*end),
        end_ns: span.end_ns,
    };
    if span.ns() <= 0 {
        return;
    }
    *end = span.end_ns;
    timeline.slice(Slice {
        track,
        kind,
        name: name.to_owned(),
        span,
        args: (correlation.into_iter())
            .map(|id| ("correlation", json!(id)))
            .collect(),
    });
}
