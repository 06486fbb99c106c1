//! The fast path: a step by segments between collectives, repeated layers in closed form.
//!
//! Behind a collective every lane's stream is free at the same time S. Up to the next one a lane
//! needs K milliseconds of kernels, or is bound by its host: it arrives at max(S + K, h + M), where
//! h is the host's time at the segment's start and M the worst of (submission of an op + kernels
//! from it on). The next S is the latest arrival plus the transfer. A run of equal periods is then
//! a max-plus power: the host's part grows linearly, so its maximum over the periods lies at the
//! first or the last.

use crate::model::{OpIndex, Plan};

use super::composer::PricedStep;
use super::lanes::{Counts, LaneStart, PathStart, StepPath, StepTimes};

/// A stretch of ops that ends in a collective, or, with a single lane, at a layer's end.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    ops: Vec<OpIndex>,
    collective: Option<OpIndex>,
}

/// `repeat` times the segments of a period.
#[derive(Debug, Clone)]
struct Run {
    period: Vec<Segment>,
    repeat: u32,
}

/// A plan cut into runs of segments, with the ops behind the last collective.
#[derive(Debug, Clone, Default)]
pub(super) struct Segments {
    runs: Vec<Run>,
    tail: Vec<OpIndex>,
}

impl Segments {
    pub(super) fn new(plan: &Plan, lanes: usize) -> Self {
        let mut cut = Vec::new();
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
                cut.push(Segment {
                    ops: std::mem::take(&mut ops),
                    collective: None,
                });
            }
            for op in block {
                if plan.op(*op).key.is_collective() {
                    cut.push(Segment {
                        ops: std::mem::take(&mut ops),
                        collective: Some(*op),
                    });
                } else {
                    ops.push(*op);
                }
            }
        }
        Self {
            runs: fold(&cut),
            tail: ops,
        }
    }
}

/// Finds the longest stretch of a repeating period and folds it into one run.
fn fold(cut: &[Segment]) -> Vec<Run> {
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
    let single = |segment: &Segment| Run {
        period: vec![segment.clone()],
        repeat: 1,
    };
    let mut runs: Vec<Run> = cut[..first].iter().map(single).collect();
    runs.push(Run {
        period: cut[first..first + period].to_vec(),
        repeat: repeat as u32,
    });
    runs.extend(cut[first + period * repeat..].iter().map(single));
    runs.retain(|run| !run.period.is_empty());
    runs
}

/// One lane's way through a segment, without the host's start and S.
#[derive(Clone, Copy)]
struct LaneSegment {
    /// Kernels of the segment.
    kernels_ms: f64,
    /// Worst submission plus kernels from there on, relative to the host's time at its start.
    bound_ms: f64,
    /// Position of that op; `ops.len()` for the collective itself.
    bound_at: usize,
}

/// What held a run's end back.
#[derive(Clone, Copy)]
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

struct Ran<'a> {
    run: &'a Run,
    lanes: Vec<Vec<LaneSegment>>,
    /// Lane with the most kernels, per segment.
    slowest: Vec<usize>,
    /// Lane whose stream got to the run's first collective last.
    entry: usize,
    held: Held,
    /// Launches before the run and per period.
    launches: (u32, u32),
}

pub(super) fn run(step: &PricedStep<'_>, cut: &Segments, start: &LaneStart) -> StepTimes {
    let lanes = start.host_ms.len();
    let ready: Vec<f64> = (0..lanes)
        .map(|lane| start.host_ms[lane] + step.host[lane].before_first_ms)
        .collect();
    let mut done = Vec::with_capacity(cut.runs.len());
    let mut launches = 0;
    // Before the first collective lanes differ; behind it they agree on one value.
    let mut free: Vec<f64> = start.gpu_ms.clone();
    for run in &cut.runs {
        let (ran, end) = advance(step, run, launches, &ready, &free);
        launches += ran.launches.1 * run.repeat;
        free.fill(end);
        done.push(ran);
    }
    let mut gpu_ms = vec![0.0; lanes];
    let mut gpu_path = Vec::with_capacity(lanes);
    for lane in 0..lanes {
        let segment = measure(step, &cut.tail, None, lane);
        let streamed = free[lane] + segment.kernels_ms;
        let hosted = ready[lane] + step.dispatch_ms(lane, launches) + segment.bound_ms;
        let mut counts = Counts::new(step);
        if streamed >= hosted || cut.tail.is_empty() {
            gpu_ms[lane] = streamed;
            count_ops(step, &mut counts, lane, &cut.tail, 1.0);
            gpu_path.push(walk_back(step, &done, counts, lane));
        } else {
            gpu_ms[lane] = hosted;
            count_ops(step, &mut counts, lane, &cut.tail[segment.bound_at..], 1.0);
            let before = launched(step, &cut.tail[..=segment.bound_at]);
            gpu_path.push(counts.path(PathStart::Host(lane), Some(launches + before)));
        }
    }
    let host_ms = (0..lanes)
        .map(|lane| ready[lane] + step.dispatch_ms(lane, step.launches))
        .collect();
    StepTimes {
        host_ms,
        gpu_ms,
        gpu_path,
        begin_ms: Vec::new(),
        wait_ms: Vec::new(),
    }
}

/// Runs one run of periods from streams free at `free`; returns it and the common end.
fn advance<'a>(
    step: &PricedStep<'_>,
    run: &'a Run,
    launched_before: u32,
    ready: &[f64],
    free: &[f64],
) -> (Ran<'a>, f64) {
    let lanes = ready.len();
    let measured: Vec<Vec<LaneSegment>> = run
        .period
        .iter()
        .map(|segment| {
            (0..lanes)
                .map(|lane| measure(step, &segment.ops, segment.collective, lane))
                .collect()
        })
        .collect();
    let slowest: Vec<usize> = measured
        .iter()
        .map(|lanes| {
            let mut slow = 0;
            for (lane, segment) in lanes.iter().enumerate() {
                if segment.kernels_ms > lanes[slow].kernels_ms {
                    slow = lane;
                }
            }
            slow
        })
        .collect();
    let transfer = |segment: &Segment| segment.collective.map_or(0.0, |op| step.ms(0, op));
    // Streams differ only before the first collective.
    let mut streamed = f64::NEG_INFINITY;
    let mut entry = 0;
    for lane in 0..lanes {
        let end = free[lane] + measured[0][lane].kernels_ms;
        if end > streamed {
            streamed = end;
            entry = lane;
        }
    }
    let mut period_ms = 0.0;
    let mut period_launches = 0;
    for (segment, (lanes, slow)) in run.period.iter().zip(measured.iter().zip(&slowest)) {
        period_ms += lanes[*slow].kernels_ms + transfer(segment);
        period_launches += segment_launches(step, segment);
    }
    streamed += period_ms - measured[0][slowest[0]].kernels_ms;
    streamed += period_ms * f64::from(run.repeat - 1);
    let mut end = streamed;
    let mut held = Held::Stream;
    for lane in 0..lanes {
        let mut before = launched_before;
        for (index, segment) in run.period.iter().enumerate() {
            // From this segment's arrival to the period's end.
            let mut rest = transfer(segment);
            for (later, (lanes, slow)) in run.period[index + 1..]
                .iter()
                .zip(measured[index + 1..].iter().zip(&slowest[index + 1..]))
            {
                rest += lanes[*slow].kernels_ms + transfer(later);
            }
            let bound = measured[index][lane].bound_ms + rest;
            let later = f64::from(run.repeat - 1);
            let ends = [
                (
                    false,
                    ready[lane] + step.dispatch_ms(lane, before) + bound + later * period_ms,
                ),
                (
                    true,
                    ready[lane]
                        + step.dispatch_ms(lane, before + period_launches * (run.repeat - 1))
                        + bound,
                ),
            ];
            for (last, candidate) in ends {
                if candidate > end {
                    end = candidate;
                    held = Held::Host {
                        lane,
                        segment: index,
                        last,
                    };
                }
            }
            before += segment_launches(step, segment);
        }
    }
    (
        Ran {
            run,
            lanes: measured,
            slowest,
            entry,
            held,
            launches: (launched_before, period_launches),
        },
        end,
    )
}

fn runs_launches(step: &PricedStep<'_>, op: OpIndex) -> u32 {
    if step.runs(op) {
        step.plan.op(op).launches
    } else {
        0
    }
}

fn launched(step: &PricedStep<'_>, ops: &[OpIndex]) -> u32 {
    ops.iter().map(|op| runs_launches(step, *op)).sum()
}

fn segment_launches(step: &PricedStep<'_>, segment: &Segment) -> u32 {
    launched(step, &segment.ops) + segment.collective.map_or(0, |op| runs_launches(step, op))
}

/// One lane's kernels and host bound over a stretch of ops and the collective behind it.
fn measure(
    step: &PricedStep<'_>,
    ops: &[OpIndex],
    collective: Option<OpIndex>,
    lane: usize,
) -> LaneSegment {
    let mut before = 0;
    let mut kernels_ms = 0.0;
    // Largest submission minus kernels before it; plus all kernels, that is the bound.
    let mut worst = f64::NEG_INFINITY;
    let mut bound_at = 0;
    for (at, op) in ops.iter().enumerate() {
        if !step.runs(*op) {
            continue;
        }
        before += step.plan.op(*op).launches;
        let lead = step.dispatch_ms(lane, before) - kernels_ms;
        if lead > worst {
            worst = lead;
            bound_at = at;
        }
        kernels_ms += step.ms(lane, *op);
    }
    if let Some(op) = collective {
        before += runs_launches(step, op);
        let lead = step.dispatch_ms(lane, before) - kernels_ms;
        if lead > worst {
            worst = lead;
            bound_at = ops.len();
        }
    }
    LaneSegment {
        kernels_ms,
        bound_ms: worst + kernels_ms,
        bound_at,
    }
}

fn count_ops(
    step: &PricedStep<'_>,
    counts: &mut Counts<'_>,
    lane: usize,
    ops: &[OpIndex],
    times: f64,
) {
    for op in ops {
        if step.runs(*op) {
            counts.add(lane, *op, times);
        }
    }
}

/// Follows the runs backwards from the last one's end to where the path began.
fn walk_back(
    step: &PricedStep<'_>,
    done: &[Ran<'_>],
    mut counts: Counts<'_>,
    lane: usize,
) -> StepPath {
    for ran in done.iter().rev() {
        let period = &ran.run.period;
        let whole = |counts: &mut Counts<'_>, from: usize, times: f64| {
            for (segment, slow) in period.iter().zip(&ran.slowest).skip(from) {
                count_ops(step, counts, *slow, &segment.ops, times);
                if let Some(op) = segment.collective {
                    counts.add(0, op, times);
                }
            }
        };
        let repeat = f64::from(ran.run.repeat);
        match ran.held {
            Held::Stream => {
                whole(&mut counts, 0, repeat);
                if ran.entry != ran.slowest[0] {
                    count_ops(step, &mut counts, ran.slowest[0], &period[0].ops, -1.0);
                    count_ops(step, &mut counts, ran.entry, &period[0].ops, 1.0);
                }
            }
            Held::Host {
                lane,
                segment,
                last,
            } => {
                if !last {
                    whole(&mut counts, 0, repeat - 1.0);
                }
                whole(&mut counts, segment + 1, 1.0);
                let part = &period[segment];
                let at = ran.lanes[segment][lane].bound_at;
                count_ops(
                    step,
                    &mut counts,
                    lane,
                    &part.ops[at.min(part.ops.len())..],
                    1.0,
                );
                if let Some(op) = part.collective {
                    counts.add(0, op, 1.0);
                }
                let mut launches = ran.launches.0;
                if last {
                    launches += ran.launches.1 * (ran.run.repeat - 1);
                }
                for earlier in &period[..segment] {
                    launches += segment_launches(step, earlier);
                }
                launches += launched(step, &part.ops[..(at + 1).min(part.ops.len())]);
                if at == part.ops.len() {
                    launches += part.collective.map_or(0, |op| runs_launches(step, op));
                }
                return counts.path(PathStart::Host(lane), Some(launches));
            }
        }
    }
    let from = done.first().map_or(lane, |first| first.entry);
    counts.path(PathStart::Gpu(from), None)
}
