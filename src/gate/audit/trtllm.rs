//! TensorRT-LLM's executor, played from the log's decisions.

use std::collections::VecDeque;

use crate::compose::Part;
use crate::model::Capacity;
use crate::replay::RankRecord;
use crate::timing::Execution;

use super::auditor::Auditor;
use super::captured::{graph_size, piece_tokens};
use super::client::{Held, InFlight, Runner};
use super::fault::{Check, FAULTS_MAX};
use super::moment::Moment;
use super::step::Load;

impl Auditor<'_> {
    pub(super) fn replay_trtllm(&mut self) {
        let log = &self.prediction.log;
        let lanes = self.hosts[0].len();
        let groups = self.scenario.deployment.parallel.dp as usize;
        let mut host = vec![Moment::zero(); lanes];
        let mut stream = vec![Moment::zero(); lanes];
        let mut on_way: Vec<u32> = Vec::new();
        let mut waiting: VecDeque<u32> = VecDeque::new();
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
                    let loads = self.loads(index, ranks, &mut waiting);
                    self.check_step(index, *execution, ranks, &running, &loads);
                    if self.faults.len() >= FAULTS_MAX || ranks.len() != groups {
                        return;
                    }
                    let Some(mode) = self.mode(*execution, &loads) else {
                        return;
                    };
                    for (lane, host) in host.iter_mut().enumerate() {
                        let times = &self.hosts[mode][lane];
                        *host = start.after(&times.before).after(&times.dispatch);
                    }
                    stream = self.step(&loads, mode, &vec![start.clone(); lanes], &stream);
                    let (first, last) = self.book(index, ranks, &mut running, &start);
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
    ) -> Vec<Load> {
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
        let mut loads: Vec<Load> = ranks.iter().map(of).collect();
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
        execution: Execution,
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
        let captured = match &serving.cuda_graph {
            Some(graph) if !prompts => {
                graph_size(&self.scenario.deployment.backend, graph, batch.unwrap_or(0))
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
            let tokens = loads[rank].prompt_tokens() + count;
            let sequences = record.context.len() as u32 + count;
            if tokens > serving.max_num_tokens || sequences > serving.max_batch_size {
                wrong.push(format!("rank {rank} is over the scenario's limits"));
            }
        }
        let recounted = match (captured, loads.first().map_or(0, |load| load.at_least)) {
            (Some(captured_batch), _) => Execution::FullGraph { captured_batch },
            (None, 0) => Execution::Eager,
            (None, captured_tokens) => Execution::Piecewise { captured_tokens },
        };
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
                let progress = &mut self.requests[request as usize];
                if progress.again == 0 {
                    progress.scheduled = Some(start.clone());
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
