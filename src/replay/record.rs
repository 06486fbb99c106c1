//! Chosen iterations of a replay in detail: what each host and stream did, and what each stretch
//! of it waited for.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use crate::compose::{Composer, LaneStart, OpRun, Part, StepTimes};
use crate::model::{OpIndex, RankLoad};
use crate::timing::{Execution, HostMode};

use super::log::StepLog;

/// A slice of a [`Detail`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceId(pub usize);

/// Where a slice lies on its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum On {
    Host,
    Stream,
    /// The stream too, inside a collective.
    Collectives,
}

/// What a slice is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Work of a part.
    Work(Part),
    /// Inside a collective until the last lane is there: in no sum.
    PeerWait,
    /// The host waits for the GPU to finish a step: in no sum.
    GpuWait,
}

/// A stretch of one lane's host or stream. Times in milliseconds since the first POST.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slice {
    pub lane: usize,
    pub on: On,
    pub doing: Doing,
    /// Op that ran or was submitted.
    pub op: Option<OpIndex>,
    pub iteration: usize,
    pub begin_ms: f64,
    pub end_ms: f64,
    /// The slice that ended last before this one could begin. `None`: what held it back is not in
    /// the detail, such as a request's arrival.
    pub after: Option<SliceId>,
}

/// Tokens that left the server.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Response {
    client_ms: f64,
    /// When they left, and the slice that ended then.
    left: Reached,
}

/// A lane's time and the slice that ended there, where it is in the detail.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reached {
    ms: f64,
    by: Option<SliceId>,
}

/// Iterations in detail, with the log of the run they were taken from.
#[derive(Debug, Clone)]
pub struct Detail {
    /// In the order they were composed; each begins at the end of the slice it came after.
    pub slices: Vec<Slice>,
    pub lanes: usize,
    /// Name of each op of the plan.
    pub ops: Vec<String>,
    /// The run's log: that of the prediction, to rounding.
    pub log: StepLog,
    /// Client to server, of every request.
    pub client_transport_ms: f64,
    responses: Vec<Response>,
    /// When the hosts had finished the step of an iteration.
    finished: BTreeMap<usize, Reached>,
}

impl Detail {
    /// The critical path to a request's first token, back to `from_ms` at most: what ended last,
    /// what it came after, and so on, in order of time. Empty where the detail does not hold it.
    pub fn path_to_first_token(&self, request: u32, from_ms: f64) -> Vec<SliceId> {
        let first = self.log.requests[request as usize].first_token_ms;
        let response = (self.responses.iter()).find(|response| response.client_ms == first);
        self.path(response.and_then(|response| response.left.by), from_ms)
    }

    /// When a request's first token left the server.
    pub fn left_ms(&self, request: u32) -> Option<f64> {
        let first = self.log.requests[request as usize].first_token_ms;
        let response = (self.responses.iter()).find(|response| response.client_ms == first)?;
        Some(response.left.ms)
    }

    /// The critical path to the end of an iteration's step on the last host, and that end.
    pub fn path_to_finish(&self, iteration: usize, from_ms: f64) -> Option<(Vec<SliceId>, f64)> {
        let finished = self.finished.get(&iteration)?;
        Some((self.path(finished.by, from_ms), finished.ms))
    }

    fn path(&self, end: Option<SliceId>, from_ms: f64) -> Vec<SliceId> {
        let mut path = Vec::new();
        let mut at = end;
        while let Some(id) = at {
            let slice = &self.slices[id.0];
            if slice.end_ms <= from_ms {
                break;
            }
            path.push(id);
            at = slice.after;
        }
        path.reverse();
        path
    }
}

/// Writes a [`Detail`] while a scheduler drives the lanes.
#[derive(Debug)]
pub(super) struct Recorder {
    chosen: RangeInclusive<usize>,
    /// The scheduler's running iteration.
    pub iteration: usize,
    slices: Vec<Slice>,
    hosts: Vec<Reached>,
    streams: Vec<Reached>,
    /// Dispatched steps that are not finished: iteration and the ends on the GPU.
    dispatched: VecDeque<(usize, Vec<Reached>)>,
    responses: Vec<Response>,
    finished: BTreeMap<usize, Reached>,
}

impl Recorder {
    pub fn new(chosen: RangeInclusive<usize>, lanes: usize) -> Self {
        let origin = Reached { ms: 0.0, by: None };
        Self {
            chosen,
            iteration: 0,
            slices: Vec::new(),
            hosts: vec![origin; lanes],
            streams: vec![origin; lanes],
            dispatched: VecDeque::new(),
            responses: Vec::new(),
            finished: BTreeMap::new(),
        }
    }

    /// Composes a step that the hosts begin at `start` and have submitted at `submitted_ms`.
    pub fn step(
        &mut self,
        composer: &mut Composer,
        loads: &[RankLoad],
        (execution, mode): (Execution, HostMode),
        start: &LaneStart,
        submitted_ms: &[f64],
    ) -> StepTimes {
        let times = if self.records() {
            let (times, runs) = composer.step_ops(mode, loads, execution, start);
            let launched = self.hosts(composer, mode, &runs, start, submitted_ms);
            self.streams(composer, &runs, &launched);
            times
        } else {
            let times = composer.step_in(mode, loads, execution, start);
            let unknown = |ms: &f64| Reached { ms: *ms, by: None };
            self.hosts = submitted_ms.iter().map(unknown).collect();
            self.streams = times.gpu_ms.iter().map(unknown).collect();
            times
        };
        // A second forward of the same step ends it.
        match self.dispatched.back_mut() {
            Some((iteration, ends)) if *iteration == self.iteration => {
                ends.clone_from(&self.streams);
            }
            _ => (self.dispatched).push_back((self.iteration, self.streams.clone())),
        }
        times
    }

    fn records(&self) -> bool {
        self.chosen.contains(&self.iteration)
    }

    /// The hosts' work of a step, and for each op that ran when it was submitted.
    fn hosts(
        &mut self,
        composer: &Composer,
        mode: HostMode,
        runs: &[OpRun],
        start: &LaneStart,
        submitted_ms: &[f64],
    ) -> Vec<Reached> {
        let begun: Vec<Reached> = (start.host_ms.iter()).map(|ms| self.host_at(*ms)).collect();
        for (lane, begun) in begun.into_iter().enumerate() {
            let mut at = begun;
            let mut passed_ms = 0.0;
            for (part, ms) in composer.before_first(mode, lane) {
                passed_ms += ms;
                at = self.work(lane, part, None, at, begun.ms + passed_ms);
            }
            self.hosts[lane] = at;
        }
        let mut launched = Vec::with_capacity(runs.len());
        for run in runs {
            let end_ms = run.submitted_ms.min(submitted_ms[run.lane]);
            let at = self.hosts[run.lane];
            let part = Part::HostDispatch;
            self.hosts[run.lane] = self.work(run.lane, part, Some(run.op), at, end_ms);
            launched.push(self.hosts[run.lane]);
        }
        for (host, ms) in self.hosts.iter_mut().zip(submitted_ms) {
            host.ms = *ms;
        }
        launched
    }

    /// What the streams made of the launches.
    fn streams(&mut self, composer: &Composer, runs: &[OpRun], launched: &[Reached]) {
        let lanes = self.hosts.len();
        for (runs, launched) in runs.chunks(lanes).zip(launched.chunks(lanes)) {
            let arrivals: Vec<Reached> = (self.streams.iter().zip(launched))
                .map(|(stream, host)| if stream.ms >= host.ms { *stream } else { *host })
                .collect();
            let collective = composer.plan().op(runs[0].op).key.is_collective();
            for (run, arrival) in runs.iter().zip(&arrivals) {
                let (on, part) = if collective {
                    (On::Collectives, Part::Transfer)
                } else {
                    (On::Stream, Part::Kernel)
                };
                if run.begin_ms > run.arrival_ms {
                    self.slice(Slice {
                        lane: run.lane,
                        on,
                        doing: Doing::PeerWait,
                        op: Some(run.op),
                        iteration: self.iteration,
                        begin_ms: run.arrival_ms,
                        end_ms: run.begin_ms,
                        after: arrival.by,
                    });
                }
                let begin = Reached {
                    ms: run.begin_ms,
                    by: arrivals[run.started_by].by,
                };
                self.streams[run.lane] = self.stretch(
                    run.lane,
                    on,
                    Doing::Work(part),
                    Some(run.op),
                    begin,
                    run.end_ms,
                );
            }
            if collective {
                // All end together; the path goes on with the lane that came last.
                let last = self.streams[runs[0].started_by];
                self.streams.fill(last);
            }
        }
    }

    /// Each host waits for its GPU's end of the oldest step, then works `finish_ms`.
    pub fn finish(&mut self, finish_ms: impl Iterator<Item = f64>) {
        let Some((iteration, ends)) = self.dispatched.pop_front() else {
            return;
        };
        for ((lane, end), ms) in ends.into_iter().enumerate().zip(finish_ms) {
            let host = self.hosts[lane];
            let mut at = host;
            if end.ms > host.ms {
                self.stretch(lane, On::Host, Doing::GpuWait, None, host, end.ms);
                at = end;
            }
            self.hosts[lane] = self.work(lane, Part::HostFinish, None, at, at.ms + ms);
        }
        let mut last = self.hosts[0];
        for host in &self.hosts[1..] {
            if host.ms > last.ms {
                last = *host;
            }
        }
        self.finished.insert(iteration, last);
    }

    /// Tokens leave at `respond_ms`, when some host is done, and are at the client at `client_ms`.
    pub fn respond(&mut self, respond_ms: f64, client_ms: f64) {
        let left = self.host_at(respond_ms);
        self.responses.push(Response { client_ms, left });
    }

    /// What the first host that is at `ms` was doing until then.
    fn host_at(&self, ms: f64) -> Reached {
        let at = |host: &&Reached| host.ms == ms;
        let by = self.hosts.iter().find(at).and_then(|host| host.by);
        Reached { ms, by }
    }

    fn work(
        &mut self,
        lane: usize,
        part: Part,
        op: Option<OpIndex>,
        from: Reached,
        end_ms: f64,
    ) -> Reached {
        self.stretch(lane, On::Host, Doing::Work(part), op, from, end_ms)
    }

    /// A slice from where `from` ended to `end_ms`; none of no length.
    fn stretch(
        &mut self,
        lane: usize,
        on: On,
        doing: Doing,
        op: Option<OpIndex>,
        from: Reached,
        end_ms: f64,
    ) -> Reached {
        if end_ms <= from.ms {
            return from;
        }
        let by = self.slice(Slice {
            lane,
            on,
            doing,
            op,
            iteration: self.iteration,
            begin_ms: from.ms,
            end_ms,
            after: from.by,
        });
        Reached { ms: end_ms, by }
    }

    /// Keeps a slice if its iteration is chosen.
    fn slice(&mut self, slice: Slice) -> Option<SliceId> {
        self.records().then(|| {
            self.slices.push(slice);
            SliceId(self.slices.len() - 1)
        })
    }

    /// Closes the books on a run with this log.
    pub fn close(self, composer: &Composer, log: StepLog) -> Detail {
        let transport = composer.request_times().client_transport;
        Detail {
            slices: self.slices,
            lanes: self.hosts.len(),
            ops: (composer.plan().ops.iter())
                .map(|op| op.name.clone())
                .collect(),
            log,
            client_transport_ms: transport.map_or(0.0, |id| composer.pricer().ms(id)),
            responses: self.responses,
            finished: self.finished,
        }
    }
}
