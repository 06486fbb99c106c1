//! Faults that the tests of the gate plant in a composer, to see each of them caught.

use crate::model::Units;
use crate::timing::HostMode;

use super::composer::{Composer, Method, PricedStep};
use super::lanes::{self, Counts, LaneStart, PathStart, StepTimes};

/// A mistake in composing. Times and paths stay consistent wherever a real mistake would leave
/// them so.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Collectives do not wait for the last rank.
    PeerWaitDropped,
    /// What a rank waited for others is added to its step once more.
    WaitsInTransfer,
    /// Host and GPU one after the other, where the later of the two counts.
    SumForMax,
    /// Host rows of graph steps serve eager steps.
    GraphRowAsEager,
    /// A request is in the queue as soon as it reaches the server.
    IngressSkipped,
    /// Attention of prompts is priced from generation's tables and the other way round.
    PhasesSwapped,
}

impl Composer {
    /// Plants a fault. Steps go op by op from here on: the fast path knows no faults.
    #[doc(hidden)]
    pub fn plant(&mut self, fault: Fault) {
        self.set_method(Method::OpByOp);
        self.fault = Some(fault);
        match fault {
            Fault::GraphRowAsEager => {
                self.host[HostMode::Eager as usize] =
                    self.host[HostMode::FullGraph as usize].clone();
            }
            Fault::IngressSkipped => self.request.ingress = None,
            Fault::PhasesSwapped => {
                let of = |units| {
                    let ops = self.plan.ops.iter().enumerate();
                    ops.filter(move |(_, op)| op.units == units)
                        .map(|(at, _)| at)
                };
                let pairs: Vec<_> = of(Units::Prompts).zip(of(Units::Decode)).collect();
                for (prompts, decode) in pairs {
                    for ids in &mut self.op_ids {
                        ids.swap(prompts, decode);
                    }
                }
            }
            Fault::PeerWaitDropped | Fault::WaitsInTransfer | Fault::SumForMax => {}
        }
    }
}

impl Fault {
    /// The reference with this fault.
    pub(super) fn run(self, step: &PricedStep<'_>, start: &LaneStart) -> StepTimes {
        match self {
            Self::PeerWaitDropped => each_lane(start, |lane| alone(step, start, lane)),
            Self::SumForMax => each_lane(start, |lane| in_series(step, start, lane)),
            Self::WaitsInTransfer => {
                let mut times = lanes::run(step, start, None);
                for (ms, wait) in times.gpu_ms.iter_mut().zip(&times.wait_ms) {
                    *ms += wait;
                }
                times
            }
            _ => lanes::run(step, start, None),
        }
    }
}

/// A step whose lanes do not meet.
fn each_lane(start: &LaneStart, of_lane: impl Fn(usize) -> StepTimes) -> StepTimes {
    let lanes = (0..start.host_ms.len()).map(of_lane);
    let join = |mut all: StepTimes, lane: StepTimes| {
        all.host_ms.extend(lane.host_ms);
        all.gpu_ms.extend(lane.gpu_ms);
        all.gpu_path.extend(lane.gpu_path);
        all.begin_ms.extend(lane.begin_ms);
        all.wait_ms.extend(lane.wait_ms);
        all
    };
    lanes.reduce(join).expect("a step has a lane")
}

fn alone(step: &PricedStep<'_>, start: &LaneStart, lane: usize) -> StepTimes {
    let alone = PricedStep {
        lane_load: &step.lane_load[lane..=lane],
        host: &step.host[lane..=lane],
        ..*step
    };
    let start = LaneStart {
        host_ms: vec![start.host_ms[lane]],
        gpu_ms: vec![start.gpu_ms[lane]],
    };
    let mut times = lanes::run(&alone, &start, None);
    for path in &mut times.gpu_path {
        path.from = match path.from {
            PathStart::Host(_) => PathStart::Host(lane),
            PathStart::Gpu(_) => PathStart::Gpu(lane),
        };
    }
    times
}

fn in_series(step: &PricedStep<'_>, start: &LaneStart, lane: usize) -> StepTimes {
    let (host_ms, gpu_ms) = (start.host_ms[lane], start.gpu_ms[lane]);
    let (from, begin_ms) = if gpu_ms > host_ms {
        (PathStart::Gpu(lane), gpu_ms)
    } else {
        (PathStart::Host(lane), host_ms)
    };
    let host = step.host[lane];
    let submit_ms = host.before_first_ms + step.dispatch_ms(lane, step.launches);
    let mut end_ms = begin_ms + submit_ms;
    let mut counts = Counts::new(step);
    for op in step.plan.sequence().filter(|op| step.runs(*op)) {
        counts.add(lane, op, 1.0);
        end_ms += step.ms(lane, op);
    }
    let mut path = counts.path(PathStart::Gpu(lane), None);
    host.terms(step.share(step.launches), &mut path.terms);
    path.from = from;
    StepTimes {
        host_ms: vec![host_ms + submit_ms],
        gpu_ms: vec![end_ms],
        gpu_path: vec![path],
        begin_ms: vec![begin_ms + submit_ms],
        wait_ms: vec![0.0],
    }
}
