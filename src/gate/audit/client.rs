//! The client and what both schedulers share: posts, arrivals, responses, the order of requests.

use std::collections::VecDeque;

use crate::compose::Part;
use crate::replay::IterationRecord;
use crate::timing::Execution;

use super::auditor::Auditor;
use super::fault::{Check, SUM_REL, TIE_REL, close};
use super::moment::Moment;
use super::step::Load;

/// A request, as far as it has come.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    pub(super) post: Option<Moment>,
    pub(super) arrival: Option<Moment>,
    pub(super) scheduled: Option<Moment>,
    pub(super) first: Option<Moment>,
    pub(super) last: Option<Moment>,
    /// Where its prompt ran first.
    pub(super) rank: u32,
    pub(super) iteration: u32,
    /// Tokens it had when its KV was last freed: it computes them again.
    pub(super) again: u32,
}

/// A request that generates.
#[derive(Debug, Clone, Copy)]
pub(super) struct Runner {
    pub(super) request: u32,
    /// KV length at the next step that it is part of.
    pub(super) kv: u32,
    /// Tokens that launched steps make, of so many.
    pub(super) made: u32,
    pub(super) output: u32,
}

/// A dispatched step whose responses are still to come.
pub(super) struct InFlight {
    pub(super) streams: Vec<Moment>,
    pub(super) mode: usize,
    pub(super) first: Vec<u32>,
    pub(super) last: Vec<u32>,
}

/// Requests held back since a moment, for a reason.
pub(super) type Held = Option<(Part, u32, Moment)>;

impl Auditor<'_> {
    pub(super) fn post(&mut self, at: &Moment, on_way: &mut Vec<u32>) {
        if self.posted == self.requests.len() {
            return;
        }
        let arrival = at.after(&self.transport).after(&self.ingress);
        let weight = 1.0 / self.requests.len() as f64;
        self.service.add(weight, at, &arrival);
        let request = &mut self.requests[self.posted];
        request.post = Some(at.clone());
        request.arrival = Some(arrival);
        on_way.push(self.posted as u32);
        self.posted += 1;
    }

    fn arrival_ms(&self, request: u32) -> f64 {
        self.requests
            .get(request as usize)
            .and_then(|request| request.arrival.as_ref())
            .map_or(f64::INFINITY, |arrival| arrival.ms)
    }

    /// The request that arrives first.
    pub(super) fn soonest(&self, on_way: &[u32]) -> Option<u32> {
        let by_time = |a: &&u32, b: &&u32| {
            let times = self.arrival_ms(**a).total_cmp(&self.arrival_ms(**b));
            times.then(a.cmp(b))
        };
        on_way.iter().min_by(by_time).copied()
    }

    /// Tokens of a request's context: its prompt, and what it has to compute again.
    pub(super) fn context(&self, request: u32) -> u32 {
        self.prediction.log.requests[request as usize].prompt
            + self.requests[request as usize].again
    }

    /// Those of `requests` that have never run.
    pub(super) fn unscheduled(&self, requests: &VecDeque<u32>) -> u32 {
        let never = |request: &&u32| self.requests[**request as usize].again == 0;
        requests.iter().filter(never).count() as u32
    }

    /// Books an iteration's start: what was held until now, and what it takes from the queue.
    pub(super) fn begin(
        &mut self,
        index: usize,
        iteration: &IterationRecord,
        start: &Moment,
        held: &mut Held,
        on_way: &mut Vec<u32>,
    ) {
        if !close(start.ms, iteration.start_ms, SUM_REL) {
            let what = format!(
                "iteration {index} starts at {} ms, logged {} ms",
                start.ms, iteration.start_ms
            );
            self.fault(Check::Times, what);
        }
        let weight = 1.0 / self.requests.len().max(1) as f64;
        if let Some((part, count, from)) = held.take() {
            let sum = self.queues.entry(part).or_default();
            sum.add(weight * f64::from(count), &from, start);
        }
        for request in &iteration.fetched {
            if let Some(arrival) = &self.requests[*request as usize].arrival {
                let sum = self.queues.entry(Part::QueueIteration).or_default();
                sum.add(weight, arrival, start);
            }
        }
        if !iteration.fetched.is_empty() {
            on_way.retain(|request| !iteration.fetched.contains(request));
        }
    }

    /// Waits for a step on every lane, sends its responses and lets the client go on.
    pub(super) fn respond(&mut self, done: &InFlight, host: &mut [Moment], on_way: &mut Vec<u32>) {
        for (lane, host) in host.iter_mut().enumerate() {
            let synced = self.later(&done.streams[lane], host);
            *host = synced.after(&self.hosts[done.mode][lane].finish);
        }
        if done.first.is_empty() && done.last.is_empty() {
            return;
        }
        // Attention-DP ranks hand their responses to rank 0.
        let sent = if self.scenario.deployment.parallel.dp > 1 {
            self.latest(host)
        } else {
            host[0].clone()
        };
        let received = sent.after(&self.egress);
        let log = &self.prediction.log;
        let weight = 1.0 / log.requests.len() as f64;
        for &request in &done.first {
            let progress = &mut self.requests[request as usize];
            progress.first = Some(received.clone());
            if let Some(scheduled) = &progress.scheduled {
                self.service.add(weight, scheduled, &received);
            }
        }
        for &request in &done.last {
            let output = log.requests[request as usize].output;
            let progress = &mut self.requests[request as usize];
            progress.last = Some(received.clone());
            if let Some(first) = progress.first.as_ref().filter(|_| output > 1) {
                let weight = 1.0 / self.streaming as f64 / f64::from(output - 1);
                self.tpot.add(weight, first, &received);
            }
            self.post(&received, on_way);
        }
    }

    pub(super) fn mode(&mut self, execution: Execution, loads: &[Load]) -> Option<usize> {
        let prompts = loads.iter().any(|load| !load.prompts.is_empty());
        match execution {
            Execution::Eager if prompts => Some(0),
            Execution::Eager => Some(3),
            Execution::FullGraph { .. } => Some(1),
            Execution::Piecewise { .. } => Some(2),
            Execution::Unknown => {
                let what = "a step runs in no known mode".to_owned();
                self.fault(Check::Decisions, what);
                None
            }
        }
    }

    pub(super) fn check_lengths(&mut self) {
        let workload = &self.scenario.workload;
        let requests = &self.prediction.log.requests;
        if requests.len() != workload.requests as usize {
            self.fault(
                Check::Decisions,
                format!("{} requests of {}", requests.len(), workload.requests),
            );
        }
        let drawn = |longest: u32, length: u32| {
            let shortest = (f64::from(longest) * workload.length_ratio) as u32;
            (shortest..=longest).contains(&length)
        };
        for (index, request) in requests.iter().enumerate() {
            if !drawn(workload.isl, request.prompt) || !drawn(workload.osl, request.output) {
                let what = format!(
                    "request {index} has {} and {} tokens",
                    request.prompt, request.output
                );
                self.fault(Check::Decisions, what);
            }
        }
    }

    /// Whether the requests fetched are those that have arrived when the scheduler is `ready_ms`,
    /// in order; `alone`: one that waited for the first of them takes it alone. False: there is no
    /// going on.
    pub(super) fn fetch_is_due(
        &mut self,
        index: usize,
        iteration: &IterationRecord,
        alone: bool,
        ready_ms: f64,
        on_way: &[u32],
    ) -> bool {
        let soonest = on_way
            .iter()
            .map(|request| self.arrival_ms(*request))
            .fold(f64::INFINITY, f64::min);
        let unknown = |request: &&u32| !on_way.contains(request);
        if let Some(request) = iteration.fetched.iter().find(unknown) {
            let what = format!("iteration {index} fetches request {request}, not on its way");
            self.fault(Check::Decisions, what);
            return false;
        }
        let blocks = alone && (index == 0 || soonest > ready_ms);
        let right = if blocks {
            iteration.fetched.len() == 1
                && close(self.arrival_ms(iteration.fetched[0]), soonest, TIE_REL)
        } else {
            let limit = ready_ms * (1.0 + TIE_REL);
            let surely = ready_ms * (1.0 - TIE_REL);
            let fetched = |request: &u32| iteration.fetched.contains(request);
            let in_time = |request: &u32| self.arrival_ms(*request) <= limit;
            let due = |request: &u32| self.arrival_ms(*request) < surely;
            iteration.fetched.iter().all(in_time)
                && on_way.iter().filter(|one| due(one)).all(fetched)
        };
        let in_order = iteration.fetched.windows(2).all(|pair| {
            let (a, b) = (self.arrival_ms(pair[0]), self.arrival_ms(pair[1]));
            if close(a, b, TIE_REL) {
                a != b || pair[0] < pair[1]
            } else {
                a < b
            }
        });
        if !right || !in_order {
            let what = format!(
                "iteration {index} at {ready_ms} ms fetches {:?} of {on_way:?}",
                iteration.fetched
            );
            self.fault(Check::Decisions, what);
        }
        true
    }

    /// Whether as many requests are held as wait, for a reason that the scenario has.
    pub(super) fn check_held(&mut self, index: usize, iteration: &IterationRecord, left: u32) {
        let logged = iteration.held.map_or(0, |(_, count)| count);
        if logged != left {
            let what = format!("iteration {index} holds {logged} requests, recounted {left}");
            self.fault(Check::Decisions, what);
        }
        let serving = &self.scenario.serving;
        let groups = self.scenario.deployment.parallel.dp;
        let possible = match iteration.held {
            None | Some((Part::QueueCapacity, _)) => true,
            Some((Part::QueueBatchWait, _)) => serving.batch_wait.is_some() && groups == 1,
            Some((Part::QueueBalance, _)) => serving.attention_dp_balance.is_some() && groups > 1,
            Some(_) => false,
        };
        if !possible {
            let what = format!("iteration {index} holds requests for {:?}", iteration.held);
            self.fault(Check::Decisions, what);
        }
    }
}
