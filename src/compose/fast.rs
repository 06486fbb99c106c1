//! The fast path: a step by segments between collectives, repeated layers in closed form.
//!
//! Behind a collective every lane's stream is free at the same time S. Up to the next one a lane
//! needs K milliseconds of kernels, or is bound by its host: it arrives at max(S + K, h + M), where
//! h is the host's time at the segment's start and M the worst of (submission of an op + kernels
//! from it on). The next S is the latest arrival plus the transfer. A run of equal periods is then
//! a max-plus power: the host's part grows linearly, so its maximum over the periods lies at the
//! first or the last.

use crate::model::{OpIndex, Plan, RankLoad};

use super::composer::PricedStep;
use super::lanes::{Counts, LaneStart, PathStart, StepPath, StepTimes};

/// A stretch of ops that ends in a collective, or, with a single lane, at a layer's end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Segment {
    ops: Vec<OpIndex>,
    collective: Option<OpIndex>,
    /// Launches up to and with each op.
    launched: Vec<u32>,
    /// Launches of the segment.
    launches: u32,
    /// Its kernels depend on KV lengths.
    decodes: bool,
}

/// `repeat` times a period of segments.
#[derive(Debug, Clone, Copy)]
struct Run {
    first: usize,
    end: usize,
    repeat: u32,
}

/// A step's ops cut into runs of segments; the ops behind the last collective are the last segment,
/// the tail, which is in no run.
#[derive(Debug, Clone, Default)]
pub(super) struct Cut {
    segments: Vec<Segment>,
    runs: Vec<Run>,
    /// Launches of the whole step.
    pub launches: u32,
}

/// A plan's cuts: without and with context, without and with generation requests.
#[derive(Debug, Clone, Default)]
pub(super) struct Segments([Cut; 4]);

impl Segments {
    pub(super) fn new(plan: &Plan, lanes: usize) -> Self {
        let (segments, runs) = cut(plan, lanes);
        Self(
            [(false, false), (false, true), (true, false), (true, true)].map(
                |(context, generation)| {
                    let load = RankLoad {
                        prompts: vec![1; usize::from(context)],
                        padded: u32::from(generation),
                        ..RankLoad::default()
                    };
                    let segments = segments
                        .iter()
                        .map(|(ops, collective)| Segment::of(plan, ops, *collective, &load))
                        .collect();
                    Cut {
                        segments,
                        runs: runs.clone(),
                        launches: plan.launches(&load),
                    }
                },
            ),
        )
    }

    /// The cut of a step whose ranks together have this load.
    pub(super) fn of(&self, any: &RankLoad) -> &Cut {
        let (context, generation) = (!any.prompts.is_empty(), any.padded > 0);
        &self.0[2 * usize::from(context) + usize::from(generation)]
    }
}

impl Segment {
    /// The ops of the stretch that a step with this load launches.
    fn of(plan: &Plan, ops: &[OpIndex], collective: Option<OpIndex>, load: &RankLoad) -> Self {
        let runs = |op: &OpIndex| plan.runs(*op, load);
        let ops: Vec<OpIndex> = ops.iter().copied().filter(runs).collect();
        let collective = collective.filter(runs);
        let mut launches = 0;
        let launched = ops
            .iter()
            .map(|op| {
                launches += plan.op(*op).launches;
                launches
            })
            .collect();
        launches += collective.map_or(0, |op| plan.op(op).launches);
        let decodes = ops.iter().any(|op| plan.op(*op).follows_kv());
        Self {
            ops,
            collective,
            launched,
            launches,
            decodes,
        }
    }
}

type Stretch = (Vec<OpIndex>, Option<OpIndex>);

/// Cuts a plan at its collectives and folds what repeats.
fn cut(plan: &Plan, lanes: usize) -> (Vec<Stretch>, Vec<Run>) {
    let mut known: Vec<Stretch> = Vec::new();
    let mut order = Vec::new();
    let mut push = |stretch: Stretch| {
        let at = known.iter().position(|other| *other == stretch);
        order.push(at.unwrap_or_else(|| {
            known.push(stretch);
            known.len() - 1
        }));
    };
    let mut ops = Vec::new();
    let blocks = std::iter::once(&plan.prologue)
        .chain(
            plan.layers
                .iter()
                .map(|kind| &plan.layer_kinds[usize::from(*kind)]),
        )
        .chain(std::iter::once(&plan.epilogue));
    for block in blocks {
        if lanes == 1 && !ops.is_empty() {
            push((std::mem::take(&mut ops), None));
        }
        for op in block {
            if plan.op(*op).key.is_collective() {
                push((std::mem::take(&mut ops), Some(*op)));
            } else {
                ops.push(*op);
            }
        }
    }
    let mut segments = Vec::new();
    let mut runs = Vec::new();
    for (period, repeat) in fold(&order) {
        let first = segments.len();
        segments.extend(period.iter().map(|at| known[*at].clone()));
        runs.push(Run {
            first,
            end: segments.len(),
            repeat,
        });
    }
    segments.push((ops, None));
    (segments, runs)
}

/// Finds the longest stretch of a repeating period and folds it into one run.
fn fold(cut: &[usize]) -> Vec<(&[usize], u32)> {
    let mut best = (0, 0, 1);
    for period in 1..=8.min(cut.len() / 2) {
        for first in 0..cut.len() - period {
            let equal = cut[first..]
                .iter()
                .zip(&cut[first + period..])
                .take_while(|(a, b)| a == b)
                .count();
            let repeat = equal / period + 1;
            if repeat > 1 && (repeat - 1) * period > (best.2 - 1) * best.1 {
                best = (first, period, repeat);
            }
        }
    }
    let (first, period, repeat) = best;
    let mut runs: Vec<(&[usize], u32)> = cut[..first].chunks(1).map(|one| (one, 1)).collect();
    runs.push((&cut[first..first + period], repeat as u32));
    runs.extend(cut[first + period * repeat..].chunks(1).map(|one| (one, 1)));
    runs.retain(|(period, _)| !period.is_empty());
    runs
}

/// One lane's way through a segment, without the host's start and S.
#[derive(Debug, Clone, Copy, Default)]
struct LaneSegment {
    /// Kernels of the segment.
    kernels_ms: f64,
    /// Worst submission plus kernels from there on, relative to the host's time at its start.
    bound_ms: f64,
    /// Position of that op; `ops.len()` for the collective itself.
    bound_at: usize,
}

/// What held a run's end back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Held {
    /// The stream, from the run's start.
    Stream,
    /// The host of a lane, at a segment of the first or the last period.
    Host {
        lane: usize,
        segment: usize,
        last: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Ran {
    /// Lane whose stream got to the run's first collective last.
    entry: usize,
    held: Held,
}

/// What decides where a step's critical paths run.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Course {
    ran: Vec<Ran>,
    /// Lane with the most kernels, per segment.
    slowest: Vec<usize>,
    /// Whether a lane's tail follows on its stream, or is bound by its host.
    streamed: Vec<bool>,
}

/// A step on its way: what its segments take and what held it back. Reused from step to step.
#[derive(Debug, Clone, Default)]
pub(super) struct Walk {
    /// By segment, then lane.
    measured: Vec<LaneSegment>,
    /// Transfer of each segment's collective.
    transfer_ms: Vec<f64>,
    rest_ms: Vec<f64>,
    /// When each host has prepared.
    ready_ms: Vec<f64>,
    /// When each stream is free; in the end, when it has finished.
    pub gpu_ms: Vec<f64>,
    pub course: Course,
}

impl Walk {
    /// Composes a step, with the paths to its ends where they are `kept`.
    pub(super) fn times(
        &mut self,
        step: &PricedStep<'_>,
        cut: &Cut,
        start: &LaneStart,
        kept: bool,
    ) -> StepTimes {
        self.measure(step, cut);
        self.run(step, cut, start);
        let lanes = 0..self.gpu_ms.len();
        StepTimes {
            host_ms: (lanes.clone())
                .map(|lane| self.ready_ms[lane] + step.dispatch_ms(lane, step.launches))
                .collect(),
            gpu_ms: self.gpu_ms.clone(),
            gpu_path: lanes
                .filter(|_| kept)
                .map(|lane| self.path(step, cut, lane))
                .collect(),
            begin_ms: Vec::new(),
            wait_ms: Vec::new(),
        }
    }

    /// Measures every segment.
    fn measure(&mut self, step: &PricedStep<'_>, cut: &Cut) {
        let lanes = step.host.len();
        self.measured.clear();
        self.transfer_ms.clear();
        for segment in &cut.segments {
            let transfer = segment.collective.map_or(0.0, |op| step.ms(0, op));
            self.transfer_ms.push(transfer);
            self.measured
                .extend((0..lanes).map(|lane| measure(step, segment, lane)));
        }
    }

    /// Measures the segments that depend on KV lengths again.
    pub(super) fn measure_decode(&mut self, step: &PricedStep<'_>, cut: &Cut) {
        let lanes = step.host.len();
        for (segment, measured) in cut.segments.iter().zip(self.measured.chunks_mut(lanes)) {
            if segment.decodes {
                for (lane, measured) in measured.iter_mut().enumerate() {
                    *measured = measure(step, segment, lane);
                }
            }
        }
    }

    /// Runs what was measured from the start of its lanes.
    pub(super) fn run(&mut self, step: &PricedStep<'_>, cut: &Cut, start: &LaneStart) {
        let lanes = step.host.len();
        self.ready_ms.clear();
        self.ready_ms.extend(
            (start.host_ms.iter().zip(step.host)).map(|(host, costs)| host + costs.before_first_ms),
        );
        // Before the first collective lanes differ; behind it they agree on one value.
        self.gpu_ms.clone_from(&start.gpu_ms);
        self.course.ran.clear();
        self.course.slowest.clear();
        self.course.streamed.clear();
        let mut launches = 0;
        for run in &cut.runs {
            let end = self.advance(step, cut, run, launches);
            let period = &cut.segments[run.first..run.end];
            launches += period.iter().map(|segment| segment.launches).sum::<u32>() * run.repeat;
            self.gpu_ms.fill(end);
        }
        let tail = &self.measured[self.measured.len() - lanes..];
        for (lane, segment) in tail.iter().enumerate() {
            let streamed = self.gpu_ms[lane] + segment.kernels_ms;
            let hosted = self.ready_ms[lane] + step.dispatch_ms(lane, launches) + segment.bound_ms;
            let follows = streamed >= hosted;
            self.gpu_ms[lane] = if follows { streamed } else { hosted };
            self.course.streamed.push(follows);
        }
    }

    /// Runs one run of periods; returns the common end.
    fn advance(
        &mut self,
        step: &PricedStep<'_>,
        cut: &Cut,
        run: &Run,
        launched_before: u32,
    ) -> f64 {
        let lanes = self.ready_ms.len();
        let period = &cut.segments[run.first..run.end];
        let measured = &self.measured[run.first * lanes..run.end * lanes];
        let transfer_ms = &self.transfer_ms[run.first..run.end];
        for lanes in measured.chunks(lanes) {
            let mut slow = 0;
            for (lane, segment) in lanes.iter().enumerate() {
                if segment.kernels_ms > lanes[slow].kernels_ms {
                    slow = lane;
                }
            }
            self.course.slowest.push(slow);
        }
        let slowest = &self.course.slowest[run.first..run.end];
        // Longest kernels and transfer of a segment.
        let longest = |segment: usize| {
            measured[segment * lanes + slowest[segment]].kernels_ms + transfer_ms[segment]
        };
        // Streams differ only before the first collective.
        let mut streamed = f64::NEG_INFINITY;
        let mut entry = 0;
        for (lane, (free, segment)) in self.gpu_ms.iter().zip(measured).enumerate() {
            let end = free + segment.kernels_ms;
            if end > streamed {
                streamed = end;
                entry = lane;
            }
        }
        let mut period_ms = 0.0;
        let mut period_launches = 0;
        for (index, segment) in period.iter().enumerate() {
            period_ms += longest(index);
            period_launches += segment.launches;
        }
        streamed += period_ms - measured[slowest[0]].kernels_ms;
        streamed += period_ms * f64::from(run.repeat - 1);
        let mut end = streamed;
        let mut held = Held::Stream;
        let later_ms = f64::from(run.repeat - 1) * period_ms;
        // Submitted at once, nothing is held back behind the first segment.
        let bound_segments = match step.launches {
            0 => 1,
            _ => period.len(),
        };
        // From each segment's arrival to the period's end.
        self.rest_ms.clear();
        self.rest_ms.extend((0..bound_segments).map(|index| {
            (index + 1..period.len()).fold(transfer_ms[index], |rest, later| rest + longest(later))
        }));
        for lane in 0..lanes {
            let ready = self.ready_ms[lane];
            let mut before = launched_before;
            for (index, segment) in period[..bound_segments].iter().enumerate() {
                let bound = measured[index * lanes + lane].bound_ms + self.rest_ms[index];
                let last = before + period_launches * (run.repeat - 1);
                let ends = [
                    ready + step.dispatch_ms(lane, before) + bound + later_ms,
                    ready + step.dispatch_ms(lane, last) + bound,
                ];
                for (last, candidate) in [false, true].into_iter().zip(ends) {
                    if candidate > end {
                        end = candidate;
                        held = Held::Host {
                            lane,
                            segment: index,
                            last,
                        };
                    }
                }
                before += segment.launches;
            }
        }
        self.course.ran.push(Ran { entry, held });
        end
    }

    /// The critical path to a lane's end.
    pub(super) fn path(&self, step: &PricedStep<'_>, cut: &Cut, lane: usize) -> StepPath {
        let lanes = step.host.len();
        let mut counts = Counts::new(step);
        let mut add = |lane: usize, ops: &[OpIndex], times: f64| {
            for op in ops {
                counts.add(lane, *op, times);
            }
        };
        let launched = |runs: &[Run]| -> u32 {
            let of = |run: &Run| {
                let period = &cut.segments[run.first..run.end];
                period.iter().map(|segment| segment.launches).sum::<u32>() * run.repeat
            };
            runs.iter().map(of).sum()
        };
        let tail = &cut.segments[cut.segments.len() - 1];
        if !self.course.streamed[lane] {
            let at = self.measured[self.measured.len() - lanes + lane].bound_at;
            add(lane, &tail.ops[at..], 1.0);
            let launches = launched(&cut.runs) + tail.launched[at];
            return counts.path(PathStart::Host(lane), Some(launches));
        }
        add(lane, &tail.ops, 1.0);
        // Follows the runs backwards to where the path began.
        for (index, (run, ran)) in cut.runs.iter().zip(&self.course.ran).enumerate().rev() {
            let period = &cut.segments[run.first..run.end];
            let slowest = &self.course.slowest[run.first..run.end];
            let mut whole = |from: usize, times: f64| {
                for (segment, slow) in period.iter().zip(slowest).skip(from) {
                    add(*slow, &segment.ops, times);
                    add(0, segment.collective.as_slice(), times);
                }
            };
            let repeat = f64::from(run.repeat);
            match ran.held {
                Held::Stream => {
                    whole(0, repeat);
                    if ran.entry != slowest[0] {
                        add(slowest[0], &period[0].ops, -1.0);
                        add(ran.entry, &period[0].ops, 1.0);
                    }
                }
                Held::Host {
                    lane,
                    segment,
                    last,
                } => {
                    if !last {
                        whole(0, repeat - 1.0);
                    }
                    whole(segment + 1, 1.0);
                    let part = &period[segment];
                    let at = self.measured[(run.first + segment) * lanes + lane].bound_at;
                    add(lane, &part.ops[at..], 1.0);
                    add(0, part.collective.as_slice(), 1.0);
                    let each = |segments: &[Segment]| -> u32 {
                        segments.iter().map(|segment| segment.launches).sum()
                    };
                    let mut launches = launched(&cut.runs[..index]) + each(&period[..segment]);
                    if last {
                        launches += each(period) * (run.repeat - 1);
                    }
                    launches += part.launched.get(at).copied().unwrap_or(part.launches);
                    return counts.path(PathStart::Host(lane), Some(launches));
                }
            }
        }
        let from = self.course.ran.first().map_or(lane, |first| first.entry);
        counts.path(PathStart::Gpu(from), None)
    }
}

/// One lane's kernels and host bound over a segment and the collective behind it.
fn measure(step: &PricedStep<'_>, segment: &Segment, lane: usize) -> LaneSegment {
    if step.launches == 0 && !segment.ops.is_empty() {
        // Everything is submitted at once: nothing is held back longer than the first op.
        let ops = segment.ops.iter();
        let kernels_ms = ops.fold(0.0, |sum, op| sum + step.ms(lane, *op));
        return LaneSegment {
            kernels_ms,
            bound_ms: kernels_ms,
            bound_at: 0,
        };
    }
    let mut kernels_ms = 0.0;
    // Largest submission minus kernels before it; plus all kernels, that is the bound.
    let mut worst = f64::NEG_INFINITY;
    let mut bound_at = 0;
    for (at, (op, launched)) in segment.ops.iter().zip(&segment.launched).enumerate() {
        let lead = step.dispatch_ms(lane, *launched) - kernels_ms;
        if lead > worst {
            worst = lead;
            bound_at = at;
        }
        kernels_ms += step.ms(lane, *op);
    }
    if segment.collective.is_some() {
        let lead = step.dispatch_ms(lane, segment.launches) - kernels_ms;
        if lead > worst {
            worst = lead;
            bound_at = segment.ops.len();
        }
    }
    LaneSegment {
        kernels_ms,
        bound_ms: worst + kernels_ms,
        bound_at,
    }
}
