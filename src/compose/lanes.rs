//! The reference: one step, op by op, on the lanes of every rank.

use crate::model::OpIndex;
use crate::perfdb::LookupId;

use super::composer::{HostCosts, PricedStep};
use super::path::{Part, PathTerm, Stamp};

/// Lane state a step starts from, in milliseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct LaneStart {
    /// When the host of each lane starts the iteration.
    pub host_ms: Vec<f64>,
    /// When the GPU stream of each lane is free.
    pub gpu_ms: Vec<f64>,
}

/// Where a path through a step begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathStart {
    /// At the start of this lane's host.
    Host(usize),
    /// When this lane's GPU stream was free.
    Gpu(usize),
}

impl PathStart {
    /// The stamp there.
    pub fn stamp(self, host: &[Stamp], gpu: &[Stamp]) -> Stamp {
        match self {
            Self::Host(lane) => host[lane],
            Self::Gpu(lane) => gpu[lane],
        }
    }
}

/// A critical path through a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPath {
    pub from: PathStart,
    pub terms: Vec<PathTerm>,
}

/// Lane state after a step, in milliseconds, with the path to each end.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// When the host of each lane has submitted everything.
    pub host_ms: Vec<f64>,
    /// When the GPU stream of each lane has finished.
    pub gpu_ms: Vec<f64>,
    /// Empty where a composer keeps no paths.
    pub gpu_path: Vec<StepPath>,
    /// When the first op of each lane started. Filled in by the reference only.
    pub begin_ms: Vec<f64>,
    /// Time each lane spent inside collectives waiting for others: an outcome, in no sum. Filled
    /// in by the reference only.
    pub wait_ms: Vec<f64>,
}

/// One op on one lane of a step, as it ran. Times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpRun {
    pub op: OpIndex,
    pub lane: usize,
    /// When the host had submitted it.
    pub submitted_ms: f64,
    /// When host and stream let it start.
    pub arrival_ms: f64,
    /// When it started: a collective starts when the last lane is there.
    pub begin_ms: f64,
    pub end_ms: f64,
    /// Lane whose arrival it started on: its own, or the last one at a collective.
    pub started_by: usize,
}

/// A link of a path, in the order ops started.
#[derive(Clone, Copy)]
struct Link {
    before: Before,
    lane: u16,
    op: OpIndex,
}

#[derive(Clone, Copy)]
enum Before {
    Stream(usize),
    /// The host submitted the op: launches submitted until then.
    Host {
        lane: usize,
        launches: u32,
    },
    Link(u32),
}

/// Runs a step op by op, and adds what each op did to `runs` where that is asked for.
pub(super) fn run(
    step: &PricedStep<'_>,
    start: &LaneStart,
    mut runs: Option<&mut Vec<OpRun>>,
) -> StepTimes {
    let lanes = start.host_ms.len();
    let mut links: Vec<Link> = Vec::new();
    let mut launches = vec![0_u32; lanes];
    let mut gpu_ms = start.gpu_ms.clone();
    let mut last: Vec<Before> = (0..lanes).map(Before::Stream).collect();
    let mut wait_ms = vec![0.0; lanes];
    let mut begin_ms = vec![f64::NAN; lanes];
    let mut arrival = vec![(0.0_f64, Before::Stream(0)); lanes];
    let ready: Vec<f64> = (0..lanes)
        .map(|lane| start.host_ms[lane] + step.host[lane].before_first_ms)
        .collect();
    for op in step.plan.sequence() {
        if !step.runs(op) {
            continue;
        }
        let info = step.plan.op(op);
        for lane in 0..lanes {
            launches[lane] += info.launches;
            let submitted = ready[lane] + step.dispatch_ms(lane, launches[lane]);
            arrival[lane] = if gpu_ms[lane] >= submitted {
                (gpu_ms[lane], last[lane])
            } else {
                (
                    submitted,
                    Before::Host {
                        lane,
                        launches: launches[lane],
                    },
                )
            };
        }
        for (begin, (ms, _)) in begin_ms.iter_mut().zip(&arrival) {
            if begin.is_nan() {
                *begin = *ms;
            }
        }
        let collective = info.key.is_collective();
        if collective {
            let late = latest(&arrival);
            let (begin, before) = arrival[late];
            links.push(Link {
                before,
                lane: late as u16,
                op,
            });
            let end = begin + step.ms(late, op);
            for lane in 0..lanes {
                wait_ms[lane] += begin - arrival[lane].0;
                gpu_ms[lane] = end;
                last[lane] = Before::Link(links.len() as u32 - 1);
            }
        } else {
            for lane in 0..lanes {
                let (begin, before) = arrival[lane];
                links.push(Link {
                    before,
                    lane: lane as u16,
                    op,
                });
                gpu_ms[lane] = begin + step.ms(lane, op);
                last[lane] = Before::Link(links.len() as u32 - 1);
            }
        }
        if let Some(runs) = runs.as_deref_mut() {
            runs.extend((0..lanes).map(|lane| {
                let started_by = if collective { latest(&arrival) } else { lane };
                OpRun {
                    op,
                    lane,
                    submitted_ms: ready[lane] + step.dispatch_ms(lane, launches[lane]),
                    arrival_ms: arrival[lane].0,
                    begin_ms: arrival[started_by].0,
                    end_ms: gpu_ms[lane],
                    started_by,
                }
            }));
        }
    }
    let host_ms = (0..lanes)
        .map(|lane| ready[lane] + step.dispatch_ms(lane, step.launches))
        .collect();
    let gpu_path = last
        .iter()
        .map(|end| walk_back(step, &links, *end))
        .collect();
    StepTimes {
        host_ms,
        gpu_ms,
        gpu_path,
        begin_ms,
        wait_ms,
    }
}

/// The lane that arrives last; the lowest of equals.
fn latest(arrival: &[(f64, Before)]) -> usize {
    let mut late = 0;
    for (lane, (ms, _)) in arrival.iter().enumerate() {
        if *ms > arrival[late].0 {
            late = lane;
        }
    }
    late
}

fn walk_back(step: &PricedStep<'_>, links: &[Link], mut at: Before) -> StepPath {
    let mut counts = Counts::new(step);
    loop {
        match at {
            Before::Link(index) => {
                let link = links[index as usize];
                counts.add(usize::from(link.lane), link.op, 1.0);
                at = link.before;
            }
            Before::Stream(lane) => return counts.path(PathStart::Gpu(lane), None),
            Before::Host { lane, launches } => {
                return counts.path(PathStart::Host(lane), Some(launches));
            }
        }
    }
}

/// How often each op of each lane lies on a path.
pub(super) struct Counts<'a> {
    step: &'a PricedStep<'a>,
    times: Vec<f64>,
}

impl<'a> Counts<'a> {
    pub(super) fn new(step: &'a PricedStep<'a>) -> Self {
        Self {
            step,
            times: vec![0.0; step.plan.ops.len() * step.host.len()],
        }
    }

    pub(super) fn add(&mut self, lane: usize, op: OpIndex, times: f64) {
        self.times[lane * self.step.plan.ops.len() + usize::from(op.0)] += times;
    }

    /// Finishes the path. One that begins on the host holds the host's work up to the submission
    /// of its first op: `launches` so far.
    pub(super) fn path(self, from: PathStart, launches: Option<u32>) -> StepPath {
        let there = self.times.iter().filter(|times| **times != 0.0).count();
        // And prepare, launch and dispatch.
        let mut terms = Vec::with_capacity(there + 3);
        if let (PathStart::Host(lane), Some(launches)) = (from, launches) {
            self.step.host[lane].terms(self.step.share(launches), &mut terms);
        }
        let ops = self.step.plan.ops.len();
        for (index, times) in self.times.iter().enumerate() {
            if *times != 0.0 {
                let op = OpIndex((index % ops) as u16);
                terms.push(PathTerm {
                    part: self.step.part(op),
                    lookup: self.step.lookup(index / ops, op),
                    times: *times,
                });
            }
        }
        StepPath { from, terms }
    }
}

impl HostCosts {
    /// Host terms up to a share of the dispatch.
    pub(super) fn terms(&self, share: f64, terms: &mut Vec<PathTerm>) {
        let mut add = |part, lookup: Option<LookupId>, times: f64| {
            if let Some(lookup) = lookup
                && times != 0.0
            {
                terms.push(PathTerm {
                    part,
                    lookup,
                    times,
                });
            }
        };
        add(Part::HostPrepare, self.prepare, 1.0);
        add(Part::GraphLaunch, self.launch, 1.0);
        add(Part::HostDispatch, self.dispatch, share);
    }
}
