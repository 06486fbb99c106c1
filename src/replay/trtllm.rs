//! The TensorRT-LLM PyTorch executor and its closed-loop client.
//!
//! One iteration: fetch what has arrived (an idle executor blocks and takes the first arrival
//! alone), schedule, prepare and dispatch the step, then, with the overlap scheduler, wait for the
//! step before, update its requests and send its responses. Decisions depend on order and counts
//! only.
//!
//! KV blocks: by default a request enters only when its whole need fits beside the whole needs of
//! those that have entered. Under `max_utilization` it enters when its context fits now, and the
//! most recently started request is paused when a decode step does not fit.
//!
//! Chunked prefill (`microBatchScheduler.cpp`, first come first served): when the waiting contexts
//! do not fit beside the generation requests, each gets what is left of the token budget, whole KV
//! blocks only unless it ends the prompt. So at most the last one is cut. (There, a prompt shorter
//! than a block may follow a cut one; here it waits.)
//!
//! A split iteration runs two forwards, its generation requests as their captured graph and its
//! context eagerly behind them; what it makes leaves when both are done.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use crate::compose::{Composer, Part, Stamp};
use crate::model::{Capacity, KV_BLOCK, MixedExecution, RankLoad, Scenario, captured};
use crate::perfdb::Refusal;
use crate::timing::{Execution, HostMode};

use super::capacity::KvCapacity;
use super::client::{Client, Replayed, Request, Turn};
use super::lanes::Lanes;
use super::lengths;
use super::log::{IterationRecord, Iterations, Keep, RankRecord, StepLog};
use super::record::Recorder;

const BLOCK: u32 = KV_BLOCK;

fn blocks(tokens: u32) -> u64 {
    u64::from(tokens.div_ceil(BLOCK))
}

/// One attention rank group.
#[derive(Debug, Default)]
struct RankState {
    /// Admitted requests whose prompt has not run to its end, first come first served.
    context: VecDeque<u32>,
    /// Tokens of the first of them that earlier steps have computed.
    computed: u32,
    generating: u32,
    /// KV lengths of the generating requests at the next step.
    kv_sum: u64,
    /// Step number to the requests whose last token it makes.
    ends: BTreeMap<u64, Vec<u32>>,
    /// Admitted requests whose responses are not all out, and their prompt tokens.
    active: u32,
    active_tokens: u64,
    /// KV blocks in use, or, where a request enters with its whole need, reserved.
    held_blocks: u64,
    /// Greedy capacity only: generating requests in the order they started, how many of them open
    /// a block at the step whose number has this remainder, and paused requests in `context`.
    started: Vec<u32>,
    phases: [u32; BLOCK as usize],
    paused: u32,
}

impl RankState {
    /// Remainder of the steps at which a request opens a KV block, if its context of this length
    /// ran in step `joined`. In step `joined + n` its KV has `context + n` tokens.
    fn phase(context: u32, joined: u64) -> usize {
        let block = u64::from(BLOCK);
        // context + (step - joined) = 1 modulo the block.
        ((joined + 1 + block - u64::from(context % BLOCK)) % block) as usize
    }

    /// Blocks that the generating requests open in `step`.
    fn opening(&self, step: u64) -> u64 {
        u64::from(self.phases[(step % u64::from(BLOCK)) as usize])
    }
}

/// What of a rank group's context requests runs in a step.
#[derive(Debug, Clone, Copy, Default)]
struct Chosen {
    /// Requests whose context ends in the step.
    whole: usize,
    /// Tokens of the one behind them, whose context goes on later; 0: none.
    piece: u32,
}

impl Chosen {
    fn requests(self) -> usize {
        self.whole + usize::from(self.piece > 0)
    }
}

/// A step as it is formed: how it runs. What it holds is [`Executor::formed`].
#[derive(Debug, Clone, Copy)]
struct Formed {
    /// Of the context, where the step is split.
    execution: Execution,
    /// Captured batch of a split step's generation part.
    decode_graph: Option<u32>,
}

/// A dispatched step whose results are not out yet.
struct Pending {
    gpu: Vec<Stamp>,
    mode: HostMode,
    first: Vec<u32>,
    finished: Vec<u32>,
}

pub(super) struct Executor<'a> {
    scenario: &'a Scenario,
    /// Fetches to repeat, where a recorded schedule is given.
    recorded: Option<&'a StepLog>,
    /// Captured batch sizes of the decode graphs, ascending.
    graph_sizes: Vec<u32>,
    /// Captured token counts of the piecewise graphs, ascending.
    piecewise_tokens: Vec<u32>,
    /// KV blocks of each rank group.
    blocks: u64,
    /// KV is given out block by block, and requests are paused when it runs out.
    greedy: bool,
    lanes: Lanes<'a>,
    client: Client,
    waiting: VecDeque<u32>,
    ranks: Vec<RankState>,
    /// What of its context requests each rank group runs in the step at hand.
    chosen: Vec<Chosen>,
    /// The step at hand.
    formed: Vec<RankRecord>,
    /// What each rank group works on in it.
    loads: Vec<RankLoad>,
    previous: Option<Pending>,
    /// Of a step that is done, for the next one.
    spare: Vec<Stamp>,
    steps: u64,
    batch_waited: u32,
    balance_waited: u32,
    balance_filled: u32,
    log: Iterations,
    /// Requests held at the last iteration, with its start.
    held: Option<((Part, u32), Stamp)>,
}

impl<'a> Executor<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        composer: &'a mut Composer,
        requests: &[(u32, u32)],
        capacity: Option<KvCapacity>,
        recorded: Option<&'a StepLog>,
        keep: Keep,
    ) -> Self {
        let backend = &scenario.deployment.backend;
        let steps = lengths::steps(requests, scenario.workload.concurrency);
        let mut lanes = Lanes::new(composer, keep, steps);
        Self {
            scenario,
            recorded,
            graph_sizes: (scenario.serving.cuda_graph.as_ref())
                .map_or_else(Vec::new, |graph| graph.sizes(backend)),
            piecewise_tokens: (scenario.serving.piecewise.as_ref())
                .map_or_else(Vec::new, |piecewise| piecewise.token_counts()),
            blocks: capacity.map_or(u64::MAX, |kv| kv.tokens / u64::from(BLOCK)),
            greedy: capacity.is_some() && scenario.serving.capacity == Capacity::MaxUtilization,
            client: Client::open(requests, scenario.workload.concurrency, &mut lanes),
            lanes,
            waiting: VecDeque::new(),
            ranks: (0..scenario.deployment.parallel.dp)
                .map(|_| RankState::default())
                .collect(),
            chosen: vec![Chosen::default(); scenario.deployment.parallel.dp as usize],
            formed: vec![RankRecord::default(); scenario.deployment.parallel.dp as usize],
            loads: vec![RankLoad::default(); scenario.deployment.parallel.dp as usize],
            previous: None,
            spare: Vec::new(),
            steps: 0,
            batch_waited: 0,
            balance_waited: 0,
            balance_filled: 0,
            log: Iterations::new(keep, steps),
            held: None,
        }
    }

    /// Keeps iterations in detail.
    pub(super) fn recording(mut self, recorder: Option<Recorder>) -> Self {
        if let Some(recorder) = recorder {
            self.lanes.record(recorder);
        }
        self
    }

    /// Runs every request to its last token.
    pub(super) fn run(mut self) -> Result<Replayed, Refusal> {
        loop {
            match self.iterate() {
                Turn::Ran => {}
                Turn::Done => return Ok(self.client.close(self.lanes, self.log.close())),
                Turn::Stuck => return Err(Turn::refusal()),
            }
        }
    }

    fn iterate(&mut self) -> Turn {
        // Ranks fetch together: the iteration starts when the last host is there.
        let ready = self.lanes.all_hosts();
        let Some((start, fetched)) = self.fetch(ready) else {
            return Turn::Done;
        };
        if let Some((held, from)) = self.held.take() {
            self.client.weigh_held(&mut self.lanes, held, from, start);
        }
        self.client.weigh_fetched(&mut self.lanes, &fetched, start);
        self.waiting.extend(&fetched);
        self.admit();
        let paused = if self.greedy { self.pause() } else { vec![] };
        let held = self.choose();
        let step = self.form_step();
        if step.is_none() && self.previous.is_none() && fetched.is_empty() {
            return Turn::Stuck;
        }
        let held = held.0.map(|part| (part, held.1));
        self.held = held.map(|held| (held, start));
        self.lanes.host.fill(start);
        self.lanes.iteration(self.log.count());
        let dispatched = step.map(|formed| self.dispatch(start, formed));
        self.log.add(|| IterationRecord {
            start_ms: start.ms,
            fetched,
            held,
            paused,
            decode_graph: step.and_then(|formed| formed.decode_graph),
            step: step.map(|formed| (formed.execution, self.formed.iter().cloned().collect())),
        });
        if self.scenario.serving.overlap {
            if let Some(previous) = self.previous.take() {
                self.finish(previous);
            }
            self.previous = dispatched;
        } else if let Some(dispatched) = dispatched {
            self.finish(dispatched);
        }
        Turn::Ran
    }

    /// Takes requests from the queue. A busy executor takes what has arrived; an idle one blocks
    /// and takes the first arrival alone. `None`: nothing runs and nothing will arrive.
    fn fetch(&mut self, ready: Stamp) -> Option<(Stamp, Vec<u32>)> {
        let idle = self.ranks.iter().all(|rank| rank.active == 0) && self.waiting.is_empty();
        if let Some(recorded) = self.recorded {
            let fetched = recorded.iterations.get(self.log.count())?.fetched.clone();
            let start = self.client.take_recorded(&fetched, idle, ready);
            return Some((start, fetched));
        }
        if idle {
            let first = self.client.next_arrival()?;
            // Before the first request the executor has long been blocked on its empty queue.
            if first.ms > ready.ms || self.log.count() == 0 {
                let taken = self.client.take_first().into_iter().collect();
                return Some((ready.latest(first), taken));
            }
        }
        Some((ready, self.client.take_arrived(ready)))
    }

    /// Pauses the most recently started requests of a rank group until its next decode step fits:
    /// their KV is freed, and they wait in front of the others to compute their prompt and what
    /// they have generated again.
    fn pause(&mut self) -> Vec<u32> {
        let step = self.steps;
        let mut paused = Vec::new();
        for rank in &mut self.ranks {
            while rank.held_blocks + rank.opening(step) > self.blocks {
                let Some(request) = rank.started.pop() else {
                    break;
                };
                let entry = &mut self.client.requests[request as usize];
                let end = entry.joined + u64::from(entry.output - entry.recompute) - 1;
                if let Some(ending) = rank.ends.get_mut(&end) {
                    ending.retain(|other| *other != request);
                }
                let made = (step - entry.joined) as u32;
                rank.held_blocks -= blocks(entry.context() + made - 1);
                rank.phases[RankState::phase(entry.context(), entry.joined)] -= 1;
                rank.generating -= 1;
                entry.recompute += made;
                rank.kv_sum -= u64::from(entry.context());
                rank.context.push_front(request);
                rank.paused += 1;
                paused.push(request);
            }
        }
        paused
    }

    /// Admits waiting requests to rank groups while they have room. With attention DP the longest
    /// prompts go first, each to the group with the fewest active prompt tokens among those below
    /// the even share of requests.
    fn admit(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let groups = self.ranks.len() as u32;
        let room = groups * self.scenario.serving.max_batch_size
            - self.ranks.iter().map(|rank| rank.active).sum::<u32>();
        let count = self.waiting.len().min(room as usize);
        let mut admitted: Vec<u32> = self.waiting.drain(..count).collect();
        if groups > 1 {
            admitted.sort_by_key(|request| Reverse(self.client.requests[*request as usize].prompt));
        }
        let active: u32 = self.ranks.iter().map(|rank| rank.active).sum();
        let most = self.ranks.iter().map(|rank| rank.active).max().unwrap_or(0);
        let share = (active + admitted.len() as u32).div_ceil(groups).max(most);
        for request in admitted {
            let to = self
                .ranks
                .iter()
                .enumerate()
                .filter(|(_, rank)| groups == 1 || rank.active < share)
                .min_by_key(|(index, rank)| (rank.active_tokens, rank.active, *index))
                .map_or(0, |(index, _)| index);
            let prompt = self.client.requests[request as usize].prompt;
            self.client.requests[request as usize].rank = to as u32;
            let rank = &mut self.ranks[to];
            rank.context.push_back(request);
            rank.active += 1;
            rank.active_tokens += u64::from(prompt);
        }
    }

    /// KV blocks that a request takes when its context runs: those of its whole need, or, greedily,
    /// of its context.
    fn entry_blocks(&self, request: &Request) -> u64 {
        if self.greedy {
            blocks(request.context())
        } else {
            blocks(request.prompt + request.output)
        }
    }

    /// The context requests, first come first served, that fit a rank group's next step.
    fn fitting(&self, rank: &RankState) -> Chosen {
        let serving = &self.scenario.serving;
        let mut left = serving.max_num_tokens.saturating_sub(rank.generating);
        let mut batch = rank.generating;
        let mut kv = rank.held_blocks + rank.opening(self.steps);
        let mut chosen = Chosen::default();
        let mut computed = rank.computed;
        for request in &rank.context {
            let request = &self.client.requests[*request as usize];
            batch += 1;
            if computed == 0 {
                kv += self.entry_blocks(request);
            }
            if batch > serving.max_batch_size || kv > self.blocks {
                break;
            }
            let rest = request.context() - std::mem::take(&mut computed);
            if rest > left {
                if serving.chunked_prefill {
                    chosen.piece = left / BLOCK * BLOCK;
                }
                break;
            }
            left -= rest;
            chosen.whole += 1;
        }
        chosen
    }

    /// Which context requests each rank group runs, and why the others are held.
    fn choose(&mut self) -> (Option<Part>, u32) {
        let serving = &self.scenario.serving;
        let mut chosen = std::mem::take(&mut self.chosen);
        for (chosen, rank) in chosen.iter_mut().zip(&self.ranks) {
            *chosen = self.fitting(rank);
        }
        let there: u32 = self
            .ranks
            .iter()
            .map(|rank| rank.context.len() as u32)
            .sum::<u32>()
            + self.waiting.len() as u32;
        let mut reason = Part::QueueCapacity;
        if self.ranks.len() == 1 {
            if let Some(wait) = serving.batch_wait
                && chosen[0].whole > 0
                && self.ranks[0].generating > 0
            {
                let rank = &self.ranks[0];
                let tokens: u32 = rank
                    .context
                    .iter()
                    .take(chosen[0].whole)
                    .map(|request| self.client.requests[*request as usize].context())
                    .sum::<u32>()
                    + rank.generating;
                let enough = wait.max_tokens_ratio * f64::from(serving.max_num_tokens);
                if self.batch_waited < wait.timeout_iters && f64::from(tokens) < enough {
                    self.batch_waited += 1;
                    chosen[0] = Chosen::default();
                    reason = Part::QueueBatchWait;
                } else {
                    self.batch_waited = 0;
                }
            }
        } else if let Some(balance) = serving.attention_dp_balance {
            let all = |test: &dyn Fn(usize) -> bool| (0..chosen.len()).all(test);
            let have_context = all(&|rank| chosen[rank].whole > 0);
            let have_slots = all(&|rank| self.ranks[rank].generating < serving.max_batch_size);
            let have_generation = all(&|rank| self.ranks[rank].generating > 0);
            let mut hold = false;
            if have_context && have_slots {
                self.balance_waited = 0;
                if have_generation {
                    if self.balance_filled < balance.batching_wait_iters {
                        self.balance_filled += 1;
                        hold = true;
                    } else {
                        self.balance_filled = 0;
                    }
                }
            } else {
                self.balance_waited += 1;
                hold = self.balance_waited < balance.timeout_iters && have_generation;
                if !hold {
                    self.balance_waited = 0;
                }
            }
            if hold {
                chosen.fill(Chosen::default());
                reason = Part::QueueBalance;
            }
        }
        let mut left = there;
        for (rank, chosen) in self.ranks.iter().zip(&chosen) {
            let running = chosen.requests() as u32;
            // Paused requests, and one whose prompt is half done, wait too, but no longer for their
            // first schedule.
            let started = rank.paused + u32::from(rank.computed > 0);
            left -= running + started.saturating_sub(running);
        }
        self.chosen = chosen;
        ((left > 0).then_some(reason), left)
    }

    /// Forms the step: each rank group's share, and how it runs; `None` if nothing is scheduled.
    fn form_step(&mut self) -> Option<Formed> {
        let mut ranks = std::mem::take(&mut self.formed);
        for ((formed, rank), chosen) in ranks.iter_mut().zip(&self.ranks).zip(&self.chosen) {
            let running = rank.context.iter().take(chosen.requests());
            formed.context.clear();
            formed.context.extend(running);
            formed.chunks = self.chunks(rank, *chosen);
            formed.generation = rank.generating;
            formed.padded = rank.generating;
            formed.kv_sum = rank.kv_sum;
        }
        let step = self.execution_of(&mut ranks);
        self.formed = ranks;
        step
    }

    /// How a step runs. A captured one is padded.
    fn execution_of(&self, ranks: &mut [RankRecord]) -> Option<Formed> {
        let with_context = ranks.iter().any(|rank| !rank.context.is_empty());
        let batch = ranks.iter().map(|rank| rank.generation).max().unwrap_or(0);
        if !with_context && batch == 0 {
            return None;
        }
        let serving = &self.scenario.serving;
        let padding = serving
            .cuda_graph
            .as_ref()
            .is_some_and(|graph| graph.padding);
        let mixed = with_context && batch > 0;
        let split = mixed && serving.mixed_execution == MixedExecution::Split;
        let graph = if with_context && !split {
            None
        } else {
            captured(&self.graph_sizes, batch, padding)
        };
        let execution = if let Some(captured_batch) = graph {
            // Every rank replays the graph of the same batch; padding attends to one token.
            for rank in &mut *ranks {
                rank.kv_sum += u64::from(captured_batch - rank.generation);
                rank.padded = captured_batch;
            }
            if split {
                Execution::Eager
            } else {
                Execution::FullGraph { captured_batch }
            }
        } else {
            // A rank group without work runs one dummy token, so that collectives have all ranks.
            for rank in &mut *ranks {
                if rank.context.is_empty() && rank.generation == 0 {
                    rank.padded = 1;
                    rank.kv_sum = 1;
                }
            }
            let tokens = |rank: &RankRecord| self.pieces(rank).map(|(_, now)| now).sum::<u32>();
            let tokens = |rank: &RankRecord| tokens(rank) + rank.padded;
            let most = ranks.iter().map(tokens).max().unwrap_or(0);
            match with_context
                .then(|| captured(&self.piecewise_tokens, most, true))
                .flatten()
            {
                Some(captured_tokens) => Execution::Piecewise { captured_tokens },
                None => Execution::Eager,
            }
        };
        Some(Formed {
            execution,
            decode_graph: graph.filter(|_| split),
        })
    }

    /// Tokens computed before and in the step for each context request; empty where every prompt
    /// runs as a whole.
    fn chunks(&self, rank: &RankState, chosen: Chosen) -> Vec<(u32, u32)> {
        if rank.computed == 0 && chosen.piece == 0 {
            return Vec::new();
        }
        let running = rank.context.iter().take(chosen.requests()).enumerate();
        running
            .map(|(position, request)| {
                let before = if position == 0 { rank.computed } else { 0 };
                let rest = self.client.requests[*request as usize].context() - before;
                let whole = position < chosen.whole;
                (before, if whole { rest } else { chosen.piece })
            })
            .collect()
    }

    /// Tokens computed before and in the step, per context request.
    fn pieces<'r>(&'r self, rank: &'r RankRecord) -> impl Iterator<Item = (u32, u32)> + 'r {
        let whole = |request: &u32| (0, self.client.requests[*request as usize].context());
        let all = rank.chunks.is_empty().then_some(&rank.context);
        let all = all.into_iter().flatten().map(whole);
        rank.chunks.iter().copied().chain(all)
    }

    /// Prepares and dispatches a step from `start`, and books what it makes.
    fn dispatch(&mut self, start: Stamp, formed: Formed) -> Pending {
        let mut loads = std::mem::take(&mut self.loads);
        for (load, rank) in loads.iter_mut().zip(&self.formed) {
            load.prompts.clear();
            load.prefixes.clear();
            load.prompts.extend(self.pieces(rank).map(|(_, now)| now));
            load.prefixes
                .extend(rank.chunks.iter().map(|(before, _)| before));
            load.generation = rank.generation;
            load.padded = rank.padded;
            load.kv_sum = rank.kv_sum;
        }
        let mode = match formed.decode_graph {
            Some(captured_batch) => {
                let graph = Execution::FullGraph { captured_batch };
                let decode: Vec<RankLoad> = loads.iter().map(RankLoad::decode_part).collect();
                let context: Vec<RankLoad> = loads.iter().map(RankLoad::context_part).collect();
                self.lanes
                    .dispatch_in(HostMode::SplitDecode, graph, &decode);
                self.lanes
                    .dispatch_in(HostMode::SplitContext, formed.execution, &context)
            }
            None => self.lanes.dispatch(formed.execution, &loads),
        };
        self.loads = loads;
        self.book(start, mode)
    }

    /// Moves requests on by the step that was just dispatched.
    fn book(&mut self, start: Stamp, mode: HostMode) -> Pending {
        let step = self.steps;
        self.steps += 1;
        let mut first = Vec::new();
        let mut finished = Vec::new();
        for (rank, chosen) in self.ranks.iter_mut().zip(&self.chosen) {
            rank.kv_sum += u64::from(rank.generating);
            rank.held_blocks += rank.opening(step);
            for request in rank.ends.remove(&step).unwrap_or_default() {
                let done = &self.client.requests[request as usize];
                rank.generating -= 1;
                rank.kv_sum -= u64::from(done.prompt) + u64::from(done.output);
                if self.greedy {
                    rank.started.retain(|other| *other != request);
                    rank.phases[RankState::phase(done.context(), done.joined)] -= 1;
                }
                finished.push(request);
            }
            for request in rank.context.drain(..chosen.whole) {
                let begun = &mut self.client.requests[request as usize];
                let goes_on = std::mem::take(&mut rank.computed) > 0;
                begun.joined = step;
                if begun.recompute > 0 {
                    rank.paused -= 1;
                } else {
                    begun.iteration = self.log.count() as u32;
                    first.push(request);
                    if !goes_on {
                        begun.scheduled = start;
                    }
                }
                if !goes_on {
                    rank.held_blocks += if self.greedy {
                        blocks(begun.context())
                    } else {
                        blocks(begun.prompt + begun.output)
                    };
                }
                let left = begun.output - begun.recompute;
                if left > 1 {
                    rank.generating += 1;
                    rank.kv_sum += u64::from(begun.context()) + 1;
                    let end = step + u64::from(left) - 1;
                    rank.ends.entry(end).or_default().push(request);
                    if self.greedy {
                        rank.started.push(request);
                        rank.phases[RankState::phase(begun.context(), step)] += 1;
                    }
                } else {
                    finished.push(request);
                }
            }
            if let Some(request) = rank.context.front().filter(|_| chosen.piece > 0) {
                let cut = &mut self.client.requests[*request as usize];
                if rank.computed == 0 {
                    cut.scheduled = start;
                    rank.held_blocks += blocks(cut.prompt + cut.output);
                }
                rank.computed += chosen.piece;
            }
        }
        first.sort_unstable();
        finished.sort_unstable();
        let mut gpu = std::mem::take(&mut self.spare);
        gpu.clone_from(&self.lanes.gpu);
        Pending {
            gpu,
            mode,
            first,
            finished,
        }
    }

    /// Waits for a step, updates its requests and sends their responses.
    fn finish(&mut self, step: Pending) {
        self.lanes.finish(&step.gpu, step.mode);
        self.spare = step.gpu;
        // Rank 0 responds; with attention DP it gathers the others' responses first.
        let respond = if self.ranks.len() > 1 {
            self.lanes.all_hosts()
        } else {
            self.lanes.host[0]
        };
        if step.first.is_empty() && step.finished.is_empty() {
            return;
        }
        let at_client = self.lanes.egress(respond);
        for request in step.first {
            self.client.first_token(&mut self.lanes, request, at_client);
        }
        for index in step.finished {
            let request = &self.client.requests[index as usize];
            let rank = &mut self.ranks[request.rank as usize];
            rank.active -= 1;
            rank.active_tokens -= u64::from(request.prompt);
            rank.held_blocks -= if self.greedy {
                // The last token is never stored.
                blocks(request.prompt + request.output - 1)
            } else {
                blocks(request.prompt + request.output)
            };
            self.client.last_token(&mut self.lanes, index, at_client);
        }
    }
}
