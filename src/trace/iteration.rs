//! Iterations of a run: which marks stand for them, and what each launched.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::blocking::without_numbers;
use super::event::{Call, GpuEvent, MarkKind, Profile, Span};
use super::idle::Blocked;
use super::interval::{covered_ns, total_ns, uncovered, union};
use super::launch::Launches;

/// One iteration. GPU work belongs to the iteration whose mark its launch call begins in; work
/// without a known launch to the one it starts in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Iteration {
    /// Name of the mark.
    pub name: String,
    /// Length of the mark on the host.
    pub host_ns: i64,
    /// Calls that begin inside the mark, on any thread.
    pub launches: usize,
    pub graph_launches: usize,
    /// From the beginning of the first launch, copy or set call to the end of the last, less the time
    /// in which one of their threads was blocked and no other one was submitting; `None`: there is
    /// no such call.
    pub dispatch_ns: Option<i64>,
    pub devices: Vec<IterationOnDevice>,
}

/// What an iteration put on one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IterationOnDevice {
    pub device: u32,
    pub events: usize,
    /// From the start of the first work to the end of the last.
    pub span_ns: i64,
    pub busy_ns: i64,
    /// Busy with work of graphs.
    pub graph_busy_ns: i64,
}

/// The marks that stand for iterations: in order, none overlapping another.
pub(super) struct Windows(Vec<(Span, String)>);

impl Windows {
    /// The window that a time lies in.
    pub fn at(&self, at_ns: i64) -> Option<usize> {
        let next = self.0.partition_point(|(span, _)| span.start_ns <= at_ns);
        let last = next.checked_sub(1)?;
        (at_ns < self.0[last].0.end_ns).then_some(last)
    }

    /// Name of each window, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(_, name)| name.as_str())
    }

    /// The window that `event` belongs to.
    pub fn of_work(&self, event: &GpuEvent, launches: &Launches<'_>) -> Option<usize> {
        let launched = launches.launch(event).map_or(event.span, |call| call.span);
        self.at(launched.start_ns)
    }

    /// Marks that `picked` takes, else PyTorch's profiler steps, else the numbered annotations with
    /// `step` or `iter` in their names that are most frequent. Of marks that overlap the first
    /// counts.
    pub fn of(profile: &Profile, picked: Option<&dyn Fn(&str) -> bool>) -> Self {
        Self(windows(profile, picked))
    }
}

fn windows(profile: &Profile, picked: Option<&dyn Fn(&str) -> bool>) -> Vec<(Span, String)> {
    let named = |wanted: &dyn Fn(&str) -> bool| {
        let mut windows: Vec<(Span, String)> = Vec::new();
        for mark in &profile.marks {
            let name = profile.names.text(mark.name);
            let free = windows
                .last()
                .is_none_or(|(last, _)| last.end_ns <= mark.span.start_ns);
            if free && wanted(name) {
                windows.push((mark.span, name.to_owned()));
            }
        }
        windows
    };
    if let Some(picked) = picked {
        return named(picked);
    }
    let steps = named(&|name| name.starts_with("ProfilerStep#"));
    if !steps.is_empty() {
        return steps;
    }
    let mut frequent: BTreeMap<String, usize> = BTreeMap::new();
    for mark in &profile.marks {
        let name = profile.names.text(mark.name);
        let family = without_numbers(name);
        let lower = family.to_lowercase();
        let speaks = lower.contains("step") || lower.contains("iter");
        if mark.kind == MarkKind::Annotation && family != name && speaks {
            *frequent.entry(family).or_default() += 1;
        }
    }
    let most = frequent
        .into_iter()
        .filter(|(_, count)| *count > 1)
        .max_by_key(|(family, count)| (*count, std::cmp::Reverse(family.clone())));
    match most {
        Some((family, _)) => named(&|name| without_numbers(name) == family),
        None => Vec::new(),
    }
}

/// What each window launched and ran.
pub(super) fn iterations(
    profile: &Profile,
    windows: &Windows,
    launches: &Launches<'_>,
    blocked: &Blocked,
) -> Vec<Iteration> {
    let mut calls: Vec<Calls> = vec![Calls::default(); windows.0.len()];
    for event in &profile.host {
        if let Some(window) = windows.at(event.span.start_ns)
            && event.call.submits()
        {
            calls[window].add(event.call, event.thread, event.span);
        }
    }
    let mut work: Vec<BTreeMap<u32, Vec<&GpuEvent>>> = vec![BTreeMap::new(); windows.0.len()];
    for event in &profile.gpu {
        if let Some(window) = windows.of_work(event, launches) {
            work[window].entry(event.device).or_default().push(event);
        }
    }
    windows
        .0
        .iter()
        .zip(calls)
        .zip(work)
        .map(|(((span, name), calls), work)| Iteration {
            name: name.clone(),
            host_ns: span.ns(),
            launches: calls.launches,
            graph_launches: calls.graph_launches,
            dispatch_ns: calls.dispatch_ns(blocked),
            devices: work
                .into_iter()
                .map(|(device, events)| IterationOnDevice::of(device, &events))
                .collect(),
        })
        .collect()
}

/// The submitting calls of one iteration.
#[derive(Clone, Default)]
struct Calls {
    launches: usize,
    graph_launches: usize,
    /// First to last submitting call, by thread.
    threads: HashMap<u64, Span>,
}

impl Calls {
    fn add(&mut self, call: Call, thread: u64, span: Span) {
        match call {
            Call::Launch => self.launches += 1,
            Call::GraphLaunch => self.graph_launches += 1,
            _ => {}
        }
        let known = self.threads.entry(thread).or_insert(span);
        known.end_ns = known.end_ns.max(span.end_ns);
    }

    fn dispatch_ns(&self, blocked: &Blocked) -> Option<i64> {
        let start_ns = self.threads.values().map(|span| span.start_ns).min()?;
        let end_ns = self.threads.values().map(|span| span.end_ns).max()?;
        let whole = Span { start_ns, end_ns };
        let (mut active, mut waiting) = (Vec::new(), Vec::new());
        for (thread, span) in &self.threads {
            let own = blocked.of_thread(*thread);
            active.extend(uncovered(own, *span));
            waiting.extend(uncovered(&uncovered(own, whole), whole));
        }
        let sorted_union = |mut spans: Vec<Span>| {
            spans.sort_unstable();
            union(spans)
        };
        let active = sorted_union(active);
        let waiting_alone_ns: i64 = sorted_union(waiting)
            .iter()
            .map(|span| span.ns() - covered_ns(&active, *span))
            .sum();
        Some(whole.ns() - waiting_alone_ns)
    }
}

impl IterationOnDevice {
    fn of(device: u32, events: &[&GpuEvent]) -> Self {
        let busy = union(events.iter().map(|event| event.span));
        let of_graphs = events.iter().filter(|event| event.in_graph);
        let span_ns = match busy.as_slice() {
            [] => 0,
            [first, .., last] => last.end_ns - first.start_ns,
            [only] => only.ns(),
        };
        Self {
            device,
            events: events.len(),
            span_ns,
            busy_ns: total_ns(&busy),
            graph_busy_ns: total_ns(&union(of_graphs.map(|event| event.span))),
        }
    }
}
