//! SGLang's scheduler, played from the log's decisions.

use std::collections::VecDeque;

use crate::compose::Part;
use crate::replay::{IterationRecord, RankRecord};
use crate::timing::Execution;

use super::auditor::Auditor;
use super::captured::graph_size;
use super::client::{Held, InFlight, Runner};
use super::fault::{Check, FAULTS_MAX};
use super::moment::Moment;
use super::step::Load;

/// What a prefill counts against the interval at which requests are looked for.
const PREFILL_COUNTS: u32 = 1000;
/// Prompt tokens of a prefill batch, where the case gives none.
const PREFILL_TOKENS: u32 = 16384;

/// The scheduler between two passes.
#[derive(Default)]
struct Passes {
    waiting: VecDeque<u32>,
    /// A prompt that was cut, and its tokens computed so far.
    cut: Option<(u32, u32)>,
    /// Requests whose prompt ended in the last batch.
    joining: Vec<Runner>,
    running: Vec<Runner>,
    /// Some of these may have ended since.
    stale: bool,
    /// What the last pass launched: `Some(true)` for a prefill.
    last: Option<bool>,
    counted: u32,
    in_flight: Option<InFlight>,
}

impl Auditor<'_> {
    pub(super) fn replay_sglang(&mut self) {
        let log = &self.prediction.log;
        let lanes = self.hosts[0].len();
        let mut host = vec![Moment::zero(); lanes];
        let mut stream = vec![Moment::zero(); lanes];
        let mut on_way: Vec<u32> = Vec::new();
        let mut held: Held = None;
        let mut passes = Passes::default();
        for _ in 0..self.scenario.workload.concurrency {
            self.post(&Moment::zero(), &mut on_way);
        }
        for (index, iteration) in log.iterations.iter().enumerate() {
            if !self.receive(index, iteration, &mut passes, &mut host, &on_way) {
                return;
            }
            // Requests are in rank 0's queue.
            let start = host[0].clone();
            self.begin(index, iteration, &start, &mut held, &mut on_way);
            passes.waiting.extend(&iteration.fetched);
            let joining = std::mem::take(&mut passes.joining);
            passes.running.extend(joining);
            let prefill = match &iteration.step {
                Some((_, ranks)) => ranks.iter().any(|rank| !rank.context.is_empty()),
                None => false,
            };
            if !prefill {
                // The next decode drops what has ended.
                if std::mem::take(&mut passes.stale) {
                    let requests = &self.requests;
                    let goes_on = |one: &Runner| requests[one.request as usize].last.is_none();
                    passes.running.retain(goes_on);
                }
                self.retract(index, &iteration.paused, &mut passes, &start);
            }
            let mut now = None;
            if let Some((execution, ranks)) = &iteration.step {
                let [record] = &ranks[..] else {
                    let what = format!("iteration {index} has {} rank groups", ranks.len());
                    self.fault(Check::Decisions, what);
                    return;
                };
                let (first, last, load) = if prefill {
                    self.prefill(index, *execution, record, &mut passes, &start)
                } else {
                    self.decode(index, *execution, record, &mut passes)
                };
                let Some(mode) = self.mode(*execution, std::slice::from_ref(&load)) else {
                    return;
                };
                if self.faults.len() >= FAULTS_MAX {
                    return;
                }
                let starts = host.clone();
                for (lane, host) in host.iter_mut().enumerate() {
                    let times = &self.hosts[mode][lane];
                    *host = host.after(&times.before).after(&times.dispatch);
                }
                stream = self.step(&[load], mode, &starts, &stream);
                let streams = stream.clone();
                now = Some(InFlight {
                    streams,
                    mode,
                    first,
                    last,
                });
            } else if !passes.running.is_empty() {
                let what = format!("iteration {index} launches nothing");
                self.fault(Check::Decisions, what);
            }
            passes.last = now.as_ref().map(|_| prefill);
            let left = self.unscheduled(&passes.waiting);
            self.check_held(index, iteration, left);
            held = (left > 0).then_some((Part::QueueCapacity, left, start));
            let done = if self.scenario.serving.overlap {
                std::mem::replace(&mut passes.in_flight, now)
            } else {
                now
            };
            if let Some(done) = done {
                self.respond(&done, &mut host, &mut on_way);
                passes.stale |= !done.last.is_empty();
                let requests = &self.requests;
                let goes_on = |one: &Runner| requests[one.request as usize].last.is_none();
                passes.joining.retain(goes_on);
            }
        }
    }

    /// Looks for requests when it is time to, which joins the hosts. False: there is no going on.
    fn receive(
        &mut self,
        index: usize,
        iteration: &IterationRecord,
        passes: &mut Passes,
        host: &mut [Moment],
        on_way: &[u32],
    ) -> bool {
        let ended = |one: &Runner| self.requests[one.request as usize].last.is_some();
        let idle = passes.last.is_none()
            && passes.running.iter().all(ended)
            && passes.cut.is_none()
            && passes.waiting.is_empty();
        passes.counted += match passes.last {
            Some(true) => PREFILL_COUNTS,
            _ => 1,
        };
        if !idle && passes.counted < self.scenario.serving.scheduler_recv_interval {
            if !iteration.fetched.is_empty() {
                let what = format!("iteration {index} looks for requests before its time");
                self.fault(Check::Decisions, what);
            }
            return iteration.fetched.is_empty();
        }
        passes.counted = 0;
        let mut start = self.latest(host);
        if idle {
            let first = self.soonest(on_way);
            let first = first.and_then(|first| self.requests[first as usize].arrival.clone());
            if let Some(first) = first {
                start = self.later(&start, &first);
            }
        }
        host.fill(start.clone());
        self.fetch_is_due(index, iteration, false, start.ms, on_way)
    }

    /// Requests whose KV is freed go to the end of the queue.
    fn retract(&mut self, index: usize, paused: &[u32], passes: &mut Passes, start: &Moment) {
        for &request in paused {
            let at = passes.running.iter().position(|one| one.request == request);
            let Some(at) = at else {
                let what = format!("iteration {index} retracts request {request} out of turn");
                self.fault(Check::Decisions, what);
                continue;
            };
            let runner = passes.running.remove(at);
            // The token that is still out is thrown away.
            let mut out = runner.made;
            if let Some(flying) = &mut passes.in_flight {
                let decodes = passes.last == Some(false);
                out -= u32::from(decodes || flying.first.contains(&request));
                flying.first.retain(|other| *other != request);
                flying.last.retain(|other| *other != request);
            }
            let progress = &mut self.requests[request as usize];
            progress.again = out;
            if let Some(scheduled) = progress.scheduled.as_ref().filter(|_| out == 0) {
                // Its first token was lost: it waits for its first schedule again.
                let weight = 1.0 / self.prediction.log.requests.len() as f64;
                let sum = self.queues.entry(Part::QueueCapacity).or_default();
                sum.add(weight, scheduled, start);
            }
            passes.waiting.push_back(request);
        }
    }

    /// A batch of prompts: the one that was cut, then the queue in order, as the limits allow.
    fn prefill(
        &mut self,
        index: usize,
        execution: Execution,
        record: &RankRecord,
        passes: &mut Passes,
        start: &Moment,
    ) -> (Vec<u32>, Vec<u32>, Load) {
        let log = &self.prediction.log;
        let serving = &self.scenario.serving;
        let mut wrong = Vec::new();
        let mut load = Load::default();
        let (mut first, mut last) = (Vec::new(), Vec::new());
        let whole = record.chunks.is_empty();
        if !whole && record.chunks.len() != record.context.len() {
            wrong.push("has pieces of no prompt".to_owned());
        }
        if execution != Execution::Eager {
            wrong.push(format!("prefills as {execution:?}"));
        }
        if (record.generation, record.padded, record.kv_sum) != (0, 0, 0) {
            wrong.push("mixes prompts and generation".to_owned());
        }
        let room = (serving.max_batch_size as usize).saturating_sub(passes.running.len());
        let goes_on = usize::from(passes.cut.is_some());
        if record.context.len() > room.max(goes_on) {
            wrong.push(format!("takes {} prompts for {room}", record.context.len()));
        }
        let most = serving.max_prefill_tokens.unwrap_or(PREFILL_TOKENS);
        let mut left = serving.chunked_prefill_size;
        let mut taken = 0;
        for (position, &request) in record.context.iter().enumerate() {
            let (due, before) = match passes.cut.take() {
                Some((cut, before)) => (Some(cut), before),
                None => (passes.waiting.pop_front(), 0),
            };
            if due != Some(request) {
                wrong.push(format!("runs request {request} out of turn"));
                break;
            }
            if taken >= most {
                wrong.push(format!("goes on behind {taken} tokens"));
            }
            let rest = self.context(request) - before;
            let tokens = left.map_or(rest, |left| rest.min(left));
            let logged = if whole {
                (0, rest)
            } else {
                record.chunks.get(position).copied().unwrap_or_default()
            };
            if logged != (before, tokens) || tokens == 0 {
                let what = format!(
                    "runs tokens {logged:?} of request {request}, recounted {:?}",
                    (before, tokens)
                );
                wrong.push(what);
            }
            taken += tokens;
            left = left.map(|left| left - tokens);
            load.prompts.push((before, tokens));
            let kv = self.context(request) + 1;
            let progress = &mut self.requests[request as usize];
            if before == 0 && progress.again == 0 {
                progress.scheduled = Some(start.clone());
            }
            if tokens < rest {
                passes.cut = Some((request, before + tokens));
                continue;
            }
            let made = progress.again + 1;
            if progress.again == 0 {
                progress.iteration = index as u32;
                first.push(request);
            }
            let output = log.requests[request as usize].output;
            if made == output {
                last.push(request);
            }
            passes.joining.push(Runner {
                request,
                kv,
                made,
                output,
            });
        }
        for what in wrong {
            self.fault(Check::Decisions, format!("iteration {index} {what}"));
        }
        (first, last, load)
    }

    /// A decode of everything that runs, and of what has ended without anybody knowing.
    fn decode(
        &mut self,
        index: usize,
        execution: Execution,
        record: &RankRecord,
        passes: &mut Passes,
    ) -> (Vec<u32>, Vec<u32>, Load) {
        let serving = &self.scenario.serving;
        let batch = passes.running.len() as u32;
        let size = serving
            .cuda_graph
            .as_ref()
            .and_then(|graph| graph_size(&self.scenario.deployment.backend, graph, batch));
        let (recounted, padded) = match size {
            Some(captured_batch) => (Execution::FullGraph { captured_batch }, captured_batch),
            None => (Execution::Eager, batch),
        };
        let lengths = passes.running.iter().map(|one| u64::from(one.kv));
        // Padding attends to one token.
        let kv_sum = lengths.sum::<u64>() + u64::from(padded - batch);
        if (record.generation, record.padded, record.kv_sum) != (batch, padded, kv_sum)
            || execution != recounted
        {
            let what = format!(
                "iteration {index} generates for {} ({} padded, {} KV) as {execution:?}, \
                 recounted {batch} ({padded}, {kv_sum}) as {recounted:?}",
                record.generation, record.padded, record.kv_sum
            );
            self.fault(Check::Decisions, what);
        }
        let mut last = Vec::new();
        for runner in &mut passes.running {
            runner.made += 1;
            runner.kv += 1;
            if runner.made == runner.output {
                last.push(runner.request);
            }
        }
        last.sort_unstable();
        let load = Load {
            padded,
            kv_sum,
            ..Load::default()
        };
        (Vec::new(), last, load)
    }
}
