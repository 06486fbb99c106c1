//! Why a device was idle between the first and the last of its work.

use std::collections::HashMap;

use serde::Serialize;

use super::event::{Call, GpuEvent, Profile, Span};
use super::interval::{covered_ns, union};
use super::launch::Launches;

/// A device's idle time by cause; the parts add up to it exactly.
///
/// A gap ends with the work that comes next. Until the call that launches that work has returned,
/// or until the work starts if that is sooner, the device waits for the host: the time that the
/// launching thread spends in blocking synchronisations is sync-bound, the rest host-bound. From
/// then on the work is launched and the device waits for something else: that is the tail.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Idle {
    pub host_bound_ns: i64,
    pub sync_bound_ns: i64,
    /// Launched and not started: launch latency, waits for other streams, gaps inside a graph.
    pub tail_ns: i64,
    /// Before work whose launch call the profile does not show.
    pub unattributed_ns: i64,
}

impl Idle {
    pub fn total_ns(self) -> i64 {
        self.host_bound_ns + self.sync_bound_ns + self.tail_ns + self.unattributed_ns
    }
}

/// Blocking synchronisations of each thread: disjoint, in order.
pub(super) struct Blocked(HashMap<u64, Vec<Span>>);

impl Blocked {
    pub fn of(profile: &Profile) -> Self {
        let mut spans: HashMap<u64, Vec<Span>> = HashMap::new();
        for event in &profile.host {
            if event.call == Call::Synchronise {
                spans.entry(event.thread).or_default().push(event.span);
            }
        }
        Self(
            spans
                .into_iter()
                .map(|(thread, spans)| (thread, union(spans)))
                .collect(),
        )
    }

    pub fn of_thread(&self, thread: u64) -> &[Span] {
        self.0.get(&thread).map_or(&[], Vec::as_slice)
    }

    /// How long `thread` was blocked within `window`.
    pub fn ns(&self, thread: u64, window: Span) -> i64 {
        covered_ns(self.of_thread(thread), window)
    }
}

/// Splits the idle time between `events` of one device, sorted by start.
pub(super) fn split<'a>(
    events: impl IntoIterator<Item = &'a GpuEvent>,
    launches: &Launches<'_>,
    blocked: &Blocked,
) -> Idle {
    let mut idle = Idle::default();
    let mut busy_until: Option<i64> = None;
    for event in events {
        let start_ns = event.span.start_ns;
        if let Some(end_ns) = busy_until.filter(|end_ns| *end_ns < start_ns) {
            let gap = Span {
                start_ns: end_ns,
                end_ns: start_ns,
            };
            idle.add(gap, event, launches, blocked);
        }
        busy_until = busy_until.max(Some(event.span.end_ns));
    }
    idle
}

impl Idle {
    fn add(&mut self, gap: Span, next: &GpuEvent, launches: &Launches<'_>, blocked: &Blocked) {
        let Some(launch) = launches.launch(next) else {
            self.unattributed_ns += gap.ns();
            return;
        };
        let launched = Span {
            start_ns: gap.start_ns,
            end_ns: launch.span.end_ns.clamp(gap.start_ns, gap.end_ns),
        };
        let sync_bound_ns = blocked.ns(launch.thread, launched);
        self.sync_bound_ns += sync_bound_ns;
        self.host_bound_ns += launched.ns() - sync_bound_ns;
        self.tail_ns += gap.end_ns - launched.end_ns;
    }
}
