//! TensorRT-LLM's executor, played from the log's decisions.

use std::collections::VecDeque;

use smallvec::{SmallVec, smallvec};

use crate::compose::Part;
use crate::model::{Capacity, MixedExecution};
use crate::replay::RankRecord;
use crate::timing::Execution;

use super::auditor::{Auditor, SPLIT_CONTEXT, SPLIT_GENERATION};
use super::captured::{graph_size, piece_tokens};
use super::client::{Held, InFlight, Runner};
use super::fault::{Check, FAULTS_MAX};
use super::moment::Moment;
use super::step::Load;

/// Prompts are cut in whole KV blocks of so many tokens.
const BLOCK: u32 = 32;

/// A prompt that was cut, and its tokens computed so far.
type Cut = Option<(u32, u32)>;

impl Auditor<'_> {
    pub(super) fn replay_trtllm(&mut self) {
        let log = &self.prediction.log;
        let lanes = self.hosts[0].len();
        let groups = self.scenario.deployment.parallel.dp as usize;
        let mut host = vec![Moment::zero(); lanes];
        let mut stream = vec![Moment::zero(); lanes];
        let mut on_way: Vec<u32> = Vec::new();
        let mut waiting: VecDeque<u32> = VecDeque::new();
        let mut cut: Cut = None;
        let mut inside = 0_usize;
        let mut held: Held = None;
        let mut in_flight: Option<InFlight> = None;
        let mut running: Vec<Vec<Runner>> = vec![Vec::new(); groups];
        let mut batch_waited = 0;
        for _ in 0..self.scenario.workload.concurrency {
            self.post(&Moment::zero(), &mut on_way);
        }
        for (index, iteration) in log.iterations.iter().enumerate() {
            let mut start = self.latest(&host);
            let idle = inside == 0;
            if !self.fetch_is_due(index, iteration, idle, start.ms, &on_way) {
                return;
            }
            if idle {
                for request in &iteration.fetched {
                    let arrival = self.requests[*request as usize].arrival.clone();
                    if let Some(arrival) = arrival {
                        start = self.later(&start, &arrival);
                    }
                }
            }
            self.begin(index, iteration, &start, &mut held, &mut on_way);
            waiting.extend(&iteration.fetched);
            inside += iteration.fetched.len();
            self.pause(index, &iteration.paused, &mut running, &mut waiting);
            self.check_batch_wait(index, &running, &waiting, &mut batch_waited);
            let now = match &iteration.step {
                Some((execution, ranks)) => {
                    let generating = running.first().map_or(0, Vec::len) as u32;
                    let loads = self.loads(index, ranks, &mut waiting, &mut cut, generating);
                    let step = (*execution, iteration.decode_graph);
                    self.check_step(index, step, ranks, &running, &loads);
                    if self.faults.len() >= FAULTS_MAX || ranks.len() != groups {
                        return;
                    }
                    let Some(mode) = self.mode(*execution, &loads) else {
                        return;
                    };
                    let parts: SmallVec<[_; 2]> = match iteration.decode_graph {
                        // Generation first; the context goes on where the host and the GPU are.
                        Some(_) => smallvec![
                            (
                                SPLIT_GENERATION,
                                loads.iter().map(Load::generation).collect(),
                            ),
                            (SPLIT_CONTEXT, loads.iter().map(Load::context).collect()),
                        ],
                        None => smallvec![(mode, loads)],
                    };
                    let mode = parts.last().map_or(mode, |(mode, _)| *mode);
                    host.fill(start.clone());
                    for (mode, loads) in parts {
                        let begun = host.clone();
                        for (lane, host) in host.iter_mut().enumerate() {
                            let times = &self.hosts[mode][lane];
                            *host = host.after(&times.before).after(&times.dispatch);
                        }
                        stream = self.step(&loads, mode, &begun, &stream);
                    }
                    let (first, last) = self.book(index, ranks, &mut running, &start, cut);
                    Some(InFlight {
                        streams: stream.clone(),
                        mode,
                        first,
                        last,
                    })
                }
                None => {
                    host.fill(start.clone());
                    None
                }
            };
            let left = self.unscheduled(&waiting);
            self.check_held(index, iteration, left);
            held = match iteration.held {
                Some((part, _)) if left > 0 => Some((part, left, start)),
                _ => None,
            };
            let done = if self.scenario.serving.overlap {
                std::mem::replace(&mut in_flight, now)
            } else {
                now
            };
            if let Some(done) = done {
                inside -= done.last.len();
                self.respond(&done, &mut host, &mut on_way);
            }
        }
    }

    /// Requests whose KV is freed go to the front of the queue: the last that started goes first.
    fn pause(
        &mut self,
        index: usize,
        paused: &[u32],
        running: &mut [Vec<Runner>],
        waiting: &mut VecDeque<u32>,
    ) {
        if !paused.is_empty() && self.scenario.serving.capacity != Capacity::MaxUtilization {
            let what = format!("iteration {index} pauses {paused:?}, which enter whole");
            self.fault(Check::Decisions, what);
        }
        for &request in paused {
            let newest = running
                .iter_mut()
                .find(|group| group.last().is_some_and(|last| last.request == request));
            let Some(runner) = newest.and_then(Vec::pop) else {
                let what = format!("iteration {index} pauses request {request} out of turn");
                self.fault(Check::Decisions, what);
                continue;
            };
            self.requests[request as usize].again = runner.made;
            waiting.push_front(request);
        }
    }

    /// Batch wait: beside generation, prompts are held until enough tokens are there or they have
    /// been held for the timeout. Of the requests held, the first could have run.
    fn check_batch_wait(
        &mut self,
        index: usize,
        running: &[Vec<Runner>],
        waiting: &VecDeque<u32>,
        waited: &mut u32,
    ) {
        let (Some(wait), [group]) = (self.scenario.serving.batch_wait, running) else {
            return;
        };
        let iteration = &self.prediction.log.iterations[index];
        let Some((_, ranks)) = iteration.step.as_ref().filter(|_| !group.is_empty()) else {
            return;
        };
        let runs: &[u32] = ranks.first().map_or(&[], |rank| &rank.context);
        let held = matches!(iteration.held, Some((Part::QueueBatchWait, _)));
        let first: Vec<u32> = waiting.iter().take(1).copied().collect();
        let requests = if held { &first[..] } else { runs };
        if requests.is_empty() {
            return;
        }
        let prompts: u32 = requests.iter().map(|request| self.context(*request)).sum();
        let tokens = f64::from(prompts + group.len() as u32);
        let enough = wait.max_tokens_ratio * f64::from(self.scenario.serving.max_num_tokens);
        let holds = *waited < wait.timeout_iters && tokens < enough;
        if held != holds {
            let does = if held { "holds" } else { "runs" };
            let what = format!(
                "iteration {index} {does} prompts beside {} requests, {tokens} tokens of {enough} \
                 after {waited} iterations of waiting",
                group.len()
            );
            self.fault(Check::Decisions, what);
        }
        *waited = if held { *waited + 1 } else { 0 };
    }

    /// What each rank group works on; the requests whose context runs leave the queue.
    fn loads(
        &mut self,
        index: usize,
        ranks: &[RankRecord],
        waiting: &mut VecDeque<u32>,
        cut: &mut Cut,
        generating: u32,
    ) -> Vec<Load> {
        if self.scenario.serving.chunked_prefill {
            return self.cut_loads(index, ranks, waiting, cut, generating);
        }
        for record in ranks {
            for &request in &record.context {
                let at = if ranks.len() == 1 {
                    // First come, first served.
                    waiting
                        .front()
                        .filter(|first| **first == request)
                        .map(|_| 0)
                } else {
                    waiting.iter().position(|known| *known == request)
                };
                match at {
                    Some(at) => {
                        waiting.remove(at);
                    }
                    None => {
                        let what = format!("iteration {index} runs request {request} out of turn");
                        self.fault(Check::Decisions, what);
                    }
                }
            }
            if !record.chunks.is_empty() {
                let what = format!("iteration {index} cuts prompts");
                self.fault(Check::Decisions, what);
            }
        }
        let of = |record: &RankRecord| Load {
            prompts: record
                .context
                .iter()
                .map(|request| (0, self.context(*request)))
                .collect(),
            padded: record.padded,
            kv_sum: record.kv_sum,
            at_least: 0,
        };
        let loads: Vec<Load> = ranks.iter().map(of).collect();
        self.pad(loads)
    }

    /// The same where prompts may be cut, on the one rank group that there is then: first the prompt
    /// that was cut, then the queue in order, as far as the tokens of the iteration go.
    fn cut_loads(
        &mut self,
        index: usize,
        ranks: &[RankRecord],
        waiting: &mut VecDeque<u32>,
        cut: &mut Cut,
        generating: u32,
    ) -> Vec<Load> {
        let [record] = ranks else {
            let what = format!("iteration {index} cuts prompts on {} groups", ranks.len());
            self.fault(Check::Decisions, what);
            return Vec::new();
        };
        let mut wrong = Vec::new();
        let mut load = Load {
            padded: record.padded,
            kv_sum: record.kv_sum,
            ..Load::default()
        };
        let mut left = (self.scenario.serving.max_num_tokens).saturating_sub(generating);
        let whole = record.chunks.is_empty();
        if !whole && record.chunks.len() != record.context.len() {
            wrong.push("has pieces of no prompt".to_owned());
        }
        for (position, &request) in record.context.iter().enumerate() {
            let (due, before) = match cut.take() {
                Some((due, before)) if position == 0 => (Some(due), before),
                _ => (waiting.pop_front(), 0),
            };
            if due != Some(request) {
                wrong.push(format!("runs request {request} out of turn"));
                break;
            }
            let rest = self.context(request) - before;
            let tokens = if rest <= left {
                rest
            } else {
                left - left % BLOCK
            };
            let logged = if whole {
                (0, rest)
            } else {
                record.chunks.get(position).copied().unwrap_or_default()
            };
            if logged != (before, tokens) || tokens == 0 {
                wrong.push(format!(
                    "runs tokens {logged:?} of request {request}, recounted {:?}",
                    (before, tokens)
                ));
            }
            left -= tokens;
            load.prompts.push((before, tokens));
            if tokens < rest {
                *cut = Some((request, before + tokens));
                // Nothing fits behind a prompt that is cut.
                left = 0;
            }
        }
        for what in wrong {
            self.fault(Check::Decisions, format!("iteration {index} {what}"));
        }
        self.pad(vec![load])
    }

    fn pad(&self, mut loads: Vec<Load>) -> Vec<Load> {
        // Captured segments hold the tokens of the largest group, and what pads them.
        let serving = &self.scenario.serving;
        let prompts = loads.iter().any(|load| !load.prompts.is_empty());
        let most = loads.iter().map(|load| load.prompt_tokens() + load.padded);
        let piece = match &serving.piecewise {
            Some(piecewise) if prompts => piece_tokens(piecewise, most.max().unwrap_or(0)),
            _ => None,
        };
        for load in &mut loads {
            load.at_least = piece.unwrap_or(0);
        }
        loads
    }

    /// Recounts a step's share of each rank group from the lengths and the steps before.
    fn check_step(
        &mut self,
        index: usize,
        (execution, decode_graph): (Execution, Option<u32>),
        ranks: &[RankRecord],
        running: &[Vec<Runner>],
        loads: &[Load],
    ) {
        let mut wrong = Vec::new();
        if ranks.len() != running.len() {
            wrong.push(format!("{} rank groups", ranks.len()));
        }
        let serving = &self.scenario.serving;
        let prompts = ranks.iter().any(|rank| !rank.context.is_empty());
        let batch = running.iter().map(|group| group.len() as u32).max();
        let batch = batch.unwrap_or(0);
        let split = prompts && batch > 0 && serving.mixed_execution == MixedExecution::Split;
        let captured = match &serving.cuda_graph {
            Some(graph) if !prompts || split => {
                graph_size(&self.scenario.deployment.backend, graph, batch)
            }
            _ => None,
        };
        for (rank, (record, group)) in ranks.iter().zip(running).enumerate() {
            let count = group.len() as u32;
            let mut padded = count;
            let mut kv_sum: u64 = group.iter().map(|runner| u64::from(runner.kv)).sum();
            if let Some(size) = captured {
                // Padding attends to one token.
                padded = size;
                kv_sum += u64::from(size - count);
            } else if record.context.is_empty() && count == 0 {
                // A dummy token, so that collectives have every rank.
                padded = 1;
                kv_sum = 1;
            }
            if (record.generation, record.padded, record.kv_sum) != (count, padded, kv_sum) {
                wrong.push(format!(
                    "rank {rank} generates for {} ({} padded, {} KV), recounted {count} ({padded}, \
                     {kv_sum})",
                    record.generation, record.padded, record.kv_sum
                ));
            }
            let tokens = loads.get(rank).map_or(0, Load::prompt_tokens) + count;
            let sequences = record.context.len() as u32 + count;
            if tokens > serving.max_num_tokens || sequences > serving.max_batch_size {
                wrong.push(format!("rank {rank} is over the scenario's limits"));
            }
        }
        let recounted = match (captured, loads.first().map_or(0, |load| load.at_least)) {
            (Some(captured_batch), _) if !split => Execution::FullGraph { captured_batch },
            (Some(_), _) => Execution::Eager,
            (None, 0) => Execution::Eager,
            (None, captured_tokens) => Execution::Piecewise { captured_tokens },
        };
        if decode_graph != captured.filter(|_| split) {
            wrong.push(format!("splits off a graph of {decode_graph:?} requests"));
        }
        if recounted != execution {
            wrong.push(format!("runs as {execution:?}, recounted {recounted:?}"));
        }
        for what in wrong {
            self.fault(Check::Decisions, format!("iteration {index} {what}"));
        }
    }

    /// Moves requests on by a step; returns those it gives a first and a last token.
    fn book(
        &mut self,
        index: usize,
        ranks: &[RankRecord],
        running: &mut [Vec<Runner>],
        start: &Moment,
        cut: Cut,
    ) -> (Vec<u32>, Vec<u32>) {
        let mut first = Vec::new();
        let mut last = Vec::new();
        for (rank, (record, group)) in ranks.iter().zip(running).enumerate() {
            let ended = last.len();
            for runner in group.iter_mut() {
                runner.made += 1;
                runner.kv += 1;
                if runner.made == runner.output {
                    last.push(runner.request);
                }
            }
            if last.len() > ended {
                group.retain(|runner| runner.made < runner.output);
            }
            for &request in &record.context {
                let context = self.context(request);
                let goes_on = cut.is_some_and(|(cut, _)| cut == request);
                let progress = &mut self.requests[request as usize];
                if progress.again == 0 && progress.scheduled.is_none() {
                    progress.scheduled = Some(start.clone());
                }
                if goes_on {
                    continue;
                }
                if progress.again == 0 {
                    progress.iteration = index as u32;
                    progress.rank = rank as u32;
                    first.push(request);
                }
                let made = progress.again + 1;
                let output = self.prediction.log.requests[request as usize].output;
                if made == output {
                    last.push(request);
                } else {
                    group.push(Runner {
                        request,
                        kv: context + 1,
                        made,
                        output,
                    });
                }
            }
        }
        first.sort_unstable();
        last.sort_unstable();
        (first, last)
    }
}
