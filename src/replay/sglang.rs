//! The SGLang scheduler with its overlap loop.
//!
//! One pass: receive requests, form the next batch, launch it, then process the result of the batch
//! before it (with nothing to launch, at once); without overlap, of the batch just launched. So a
//! first token leaves only after the next batch has been launched. Decisions depend on order and
//! counts only. The rules follow `scheduler.py`, `schedule_policy.py` (`PrefillAdder`) and
//! `scheduler_recv_skipper.py` as published:
//!
//! - **Receiving.** Every pass adds a weight to a counter, by the batch of the pass before: 1 for a
//!   decode or for none, [`PREFILL_WEIGHT`] for a prefill. Requests are received, and the counter
//!   starts over, when it reaches `scheduler_recv_interval`. An idle server passes in no time that
//!   a row holds: it receives at once. Receiving joins the ranks (rank 0 broadcasts); in a pass
//!   that does not receive, each rank goes on by itself.
//! - **Prefill first.** While requests wait and there is room, a batch of prompts runs eagerly and
//!   decode pauses. First come, first served, until the batch has `max_prefill_tokens` (the prompt
//!   that reaches the limit still joins). With `chunked_prefill_size` a batch holds at most so many
//!   tokens: the prompt that does not fit is cut, and goes on first in the next prefill batch.
//! - **Decode** otherwise, as a full graph where a captured size holds the batch, else eagerly.
//! - **Finishing** is only known once a result is processed. With overlap the next batch is out by
//!   then: a decode that follows the last token still holds the request, and its extra token is
//!   thrown away. A finished request keeps its place among `max_batch_size` until the next decode.
//! - **KV.** The runs ignore end-of-sequence tokens and have no prefix cache, so a prompt enters
//!   when every running request could reach its full length ([`Executor::fits`]). When a decode
//!   step does not fit, the requests with the fewest tokens out are retracted, the longer prompt
//!   first: they go to the end of the queue and compute everything again. (With every output at its
//!   full length, as here, admission leaves no occasion for that.) Pages hold one token.

use std::collections::{BTreeMap, VecDeque};

use smallvec::smallvec;

use crate::compose::{Composer, Part, Stamp};
use crate::model::{RankLoad, Scenario, captured};
use crate::perfdb::Refusal;
use crate::timing::{Execution, HostMode};

use super::capacity::KvCapacity;
use super::client::{Client, Replayed, Turn};
use super::lanes::Lanes;
use super::lengths;
use super::log::{IterationRecord, Iterations, Keep, RankRecord, RankRecords, StepLog};
use super::record::Recorder;

/// The runtime's weight of a prefill batch against `scheduler_recv_interval`.
const PREFILL_WEIGHT: u32 = 1000;
/// The runtime's default of `max_prefill_tokens`.
const MAX_PREFILL_TOKENS: u32 = 16384;
/// Longest output that admission reckons with, in tokens.
const OUTPUT_CLIP: u32 = 4096;
/// The share of the outstanding output that admission keeps free: where it starts, where it ends,
/// and over how many decode steps it falls; decode steps that a retraction makes room for.
const RATIO_START: f64 = 0.7;
const RATIO_END: f64 = RATIO_START * 0.14;
const RATIO_STEPS: f64 = 600.0;
const RETRACT_STEPS: u32 = 20;

/// A piece of a prompt in a prefill batch.
#[derive(Debug, Clone, Copy)]
struct Piece {
    request: u32,
    tokens: u32,
    prefix: u32,
    ends: bool,
}

/// A launched batch whose result has not been processed.
struct Pending {
    gpu: Vec<Stamp>,
    mode: HostMode,
    /// Requests whose prompt ended in it; empty for a decode.
    prefilled: Vec<u32>,
    /// Requests that it gives their last token.
    finished: Vec<u32>,
    decode: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    Nothing,
    Prefill,
    Decode,
}

pub(super) struct Executor<'a> {
    scenario: &'a Scenario,
    recorded: Option<&'a StepLog>,
    graph_sizes: Vec<u32>,
    lanes: Lanes<'a>,
    client: Client,
    waiting: VecDeque<u32>,
    /// The prompt that was cut, with the tokens computed so far.
    cut: Option<(u32, u32)>,
    /// Requests that decode; finished ones stay until the next decode step.
    running: Vec<u32>,
    /// Requests of the last prefill batch that join `running` at the next pass.
    joining: Vec<u32>,
    done: Vec<bool>,
    /// Requests in `running`.
    runs: Vec<bool>,
    /// Requests in `waiting` that wait for their first schedule.
    unscheduled: u32,
    /// Finished requests in `running`.
    stale: usize,
    /// KV lengths of `running` at the next decode step.
    kv_sum: u64,
    /// Decode step to the requests whose last token it makes.
    ends: BTreeMap<u64, Vec<u32>>,
    /// Decode steps launched.
    decodes: u64,
    last: Last,
    pending: Option<Pending>,
    /// Of a batch that is done, for the next one.
    spare: Vec<Stamp>,
    skipped: u32,
    /// No prefill is tried until a request leaves.
    full: bool,
    /// Passes in a row in which nothing happened.
    spins: u32,
    kv: Option<Pool>,
    log: Iterations,
    held: Option<((Part, u32), Stamp)>,
}

/// The pool of KV tokens.
struct Pool {
    tokens: u64,
    used: u64,
    /// Prompts and outputs of the requests that hold KV, and how many these are.
    promised: u64,
    members: u64,
    /// Share of the outstanding output that admission keeps free.
    ratio: f64,
}

impl<'a> Executor<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        composer: &'a mut Composer,
        requests: &[(u32, u32)],
        capacity: Option<KvCapacity>,
        recorded: Option<&'a StepLog>,
        keep: Keep,
    ) -> Result<Self, Refusal> {
        if scenario.deployment.parallel.dp > 1 {
            return Err(Refusal {
                missing: "attention DP of sglang is not modelled".to_owned(),
            });
        }
        let backend = &scenario.deployment.backend;
        let steps = lengths::steps(requests, scenario.workload.concurrency);
        let mut lanes = Lanes::new(composer, keep, steps);
        Ok(Self {
            scenario,
            recorded,
            graph_sizes: (scenario.serving.cuda_graph.as_ref())
                .map_or_else(Vec::new, |graph| graph.sizes(backend)),
            client: Client::open(requests, scenario.workload.concurrency, &mut lanes),
            lanes,
            waiting: VecDeque::new(),
            cut: None,
            running: Vec::new(),
            joining: Vec::new(),
            done: vec![false; requests.len()],
            runs: vec![false; requests.len()],
            unscheduled: 0,
            stale: 0,
            kv_sum: 0,
            ends: BTreeMap::new(),
            decodes: 0,
            last: Last::Nothing,
            pending: None,
            spare: Vec::new(),
            skipped: 0,
            full: false,
            spins: 0,
            kv: capacity.map(|capacity| Pool {
                tokens: capacity.tokens,
                used: 0,
                promised: 0,
                members: 0,
                ratio: RATIO_START,
            }),
            log: Iterations::new(keep, steps),
            held: None,
        })
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
            match self.pass() {
                Turn::Ran => {}
                Turn::Done => return Ok(self.client.close(self.lanes, self.log.close())),
                Turn::Stuck => return Err(Turn::refusal()),
            }
        }
    }

    /// One pass of the event loop.
    fn pass(&mut self) -> Turn {
        let Some(fetched) = self.receive() else {
            return Turn::Done;
        };
        // Requests are in rank 0's queue.
        let start = self.lanes.host[0];
        self.lanes.iteration(self.log.count());
        if let Some((held, from)) = self.held.take() {
            self.client.weigh_held(&mut self.lanes, held, from, start);
        }
        self.client.weigh_fetched(&mut self.lanes, &fetched, start);
        self.waiting.extend(&fetched);
        self.unscheduled += fetched.len() as u32;
        self.join();
        let mut paused = Vec::new();
        let pieces = self.form_prefill();
        let launched = if pieces.is_empty() {
            self.drop_finished();
            paused = self.retract(start);
            (!self.running.is_empty()).then(|| self.decode())
        } else {
            Some(self.prefill(&pieces, start))
        };
        // A pass or two may do no more than drop finished requests.
        let spins = launched.is_none() && self.pending.is_none() && fetched.is_empty();
        self.spins = if spins { self.spins + 1 } else { 0 };
        if self.spins > 2 {
            return Turn::Stuck;
        }
        let held = (self.unscheduled > 0).then_some((Part::QueueCapacity, self.unscheduled));
        self.held = held.map(|held| (held, start));
        let (step, pending) = match launched {
            Some((step, pending)) => (Some(step), Some(pending)),
            None => (None, None),
        };
        self.log.add(|| IterationRecord {
            start_ms: start.ms,
            fetched,
            held,
            paused,
            step,
            decode_graph: None,
        });
        self.last = match &pending {
            None => Last::Nothing,
            Some(pending) if pending.decode => Last::Decode,
            Some(_) => Last::Prefill,
        };
        if self.scenario.serving.overlap {
            if let Some(previous) = std::mem::replace(&mut self.pending, pending) {
                self.process(previous);
            }
        } else if let Some(pending) = pending {
            self.process(pending);
        }
        Turn::Ran
    }

    /// Looks for requests if it is time to. `None`: nothing runs and nothing will arrive.
    fn receive(&mut self) -> Option<Vec<u32>> {
        let idle = self.last == Last::Nothing
            && self.running.len() == self.stale
            && self.cut.is_none()
            && self.waiting.is_empty();
        self.skipped += match self.last {
            Last::Prefill => PREFILL_WEIGHT,
            Last::Decode | Last::Nothing => 1,
        };
        let due = self.skipped >= self.scenario.serving.scheduler_recv_interval;
        if let Some(pool) = &mut self.kv
            && idle
        {
            pool.ratio = RATIO_START;
        }
        let fetched = if let Some(recorded) = self.recorded {
            let fetched = recorded.iterations.get(self.log.count())?.fetched.clone();
            if due || idle {
                let ready = self.lanes.all_hosts();
                let start = self.client.take_recorded(&fetched, idle, ready);
                self.lanes.host.fill(start);
            }
            fetched
        } else if due || idle {
            let mut start = self.lanes.all_hosts();
            if idle {
                let first = self.client.next_arrival()?;
                // Before the first request the server has long been idle.
                start = if self.log.count() == 0 {
                    first
                } else {
                    start.latest(first)
                };
            }
            self.lanes.host.fill(start);
            self.client.take_arrived(start)
        } else {
            Vec::new()
        };
        if due || idle {
            self.skipped = 0;
        }
        Some(fetched)
    }

    /// The last prefill batch joins the running requests; without overlap those it finished have
    /// been filtered out.
    fn join(&mut self) {
        for request in std::mem::take(&mut self.joining) {
            if self.done[request as usize] {
                self.full = false;
                continue;
            }
            let entry = &mut self.client.requests[request as usize];
            entry.joined = self.decodes;
            self.kv_sum += u64::from(entry.context()) + 1;
            // The prefill made the first of the tokens that are left.
            let left = entry.output - entry.recompute;
            if left > 1 {
                let end = self.decodes + u64::from(left) - 2;
                self.ends.entry(end).or_default().push(request);
            }
            self.running.push(request);
            self.runs[request as usize] = true;
        }
    }

    /// Takes prompts, or pieces of them, for a prefill batch.
    fn form_prefill(&mut self) -> Vec<Piece> {
        let serving = &self.scenario.serving;
        let mut pieces: Vec<Piece> = Vec::new();
        let room = (serving.max_batch_size as usize).saturating_sub(self.running.len());
        if self.cut.is_none() && (self.full || self.waiting.is_empty()) {
            return pieces;
        }
        if self.cut.is_none() && room == 0 {
            self.full = true;
            return pieces;
        }
        let most = serving.max_prefill_tokens.unwrap_or(MAX_PREFILL_TOKENS);
        let mut input_left = i64::from(most);
        let mut chunk_left = serving.chunked_prefill_size;
        if let Some((request, prefix)) = self.cut.take() {
            let rest = self.client.requests[request as usize].context() - prefix;
            let tokens = rest.min(chunk_left.unwrap_or(rest));
            pieces.push(Piece {
                request,
                tokens,
                prefix,
                ends: tokens == rest,
            });
            input_left -= i64::from(tokens);
            chunk_left = chunk_left.map(|left| left - tokens);
        }
        let mut states: Option<Vec<(u32, u32)>> = None;
        while let Some(&request) = self.waiting.front() {
            if pieces.len() >= room {
                self.full = true;
                break;
            }
            let context = self.client.requests[request as usize].context();
            if !self.fits(request, &pieces, &mut states) {
                self.full = true;
                break;
            }
            let tokens = context.min(chunk_left.unwrap_or(context));
            if tokens == 0 {
                break;
            }
            self.waiting.pop_front();
            self.unscheduled -= u32::from(self.client.requests[request as usize].recompute == 0);
            pieces.push(Piece {
                request,
                tokens,
                prefix: 0,
                ends: tokens == context,
            });
            input_left -= i64::from(tokens);
            chunk_left = chunk_left.map(|left| left - tokens);
            if input_left <= 0 || chunk_left == Some(0) {
                break;
            }
        }
        pieces
    }

    /// Whether a request's KV fits beside everything that runs and the prompts taken so far.
    ///
    /// Outputs run to their full length, so their ends are known: when the request with the fewest
    /// tokens left ends, all others have grown by as much, and its own KV is free. At each of these
    /// ends more than one token per request must be free. Besides, the outputs outstanding count
    /// with a share that falls while decode goes well and rises when a request is retracted.
    fn fits(&self, request: u32, pieces: &[Piece], states: &mut Option<Vec<(u32, u32)>>) -> bool {
        let Some(pool) = &self.kv else {
            return true;
        };
        let entry = &self.client.requests[request as usize];
        // Pieces taken before this one are not in the pool's books yet.
        let pieces_need = |piece: &Piece| {
            let entry = &self.client.requests[piece.request as usize];
            u64::from(entry.prompt + entry.output)
        };
        let need = pool.promised
            + u64::from(entry.prompt + entry.output)
            + pieces.iter().map(pieces_need).sum::<u64>();
        if need + 2 * (pool.members + pieces.len() as u64 + 1) < pool.tokens {
            return true;
        }
        let left_and_held = |request: u32| {
            let entry = &self.client.requests[request as usize];
            let out = self.tokens_out(request);
            (entry.output - out, entry.prompt + out)
        };
        let running = || {
            self.running
                .iter()
                .filter(|other| !self.done[**other as usize])
        };
        let taken: u64 = pieces.iter().map(|piece| u64::from(piece.tokens)).sum();
        let free = pool.tokens as i64 - pool.used as i64 - taken as i64;
        let context = i64::from(self.client.requests[request as usize].context());
        let clip = |tokens: u32| f64::from(tokens.min(OUTPUT_CLIP));
        let mut outstanding: f64 = running()
            .map(|other| clip(left_and_held(*other).0) * pool.ratio)
            .sum();
        for piece in pieces.iter().filter(|piece| piece.ends) {
            outstanding += clip(self.client.requests[piece.request as usize].output);
        }
        let unpromised = free as f64 - outstanding;
        if context > free || context as f64 > unpromised || unpromised <= 0.0 {
            return false;
        }
        let states = states.get_or_insert_with(|| {
            let others = running().copied();
            let taken = pieces.iter().map(|piece| piece.request);
            let mut states: Vec<_> = others.chain(taken).map(left_and_held).collect();
            states.sort_unstable();
            states
        });
        let own = left_and_held(request);
        states.insert(states.partition_point(|state| *state < own), own);
        let mut free = free - context;
        for (index, (left, held)) in states.iter().enumerate() {
            let count = (states.len() - index) as i64;
            if free - i64::from(*left) * count <= count {
                return false;
            }
            free += i64::from(*held);
        }
        true
    }

    /// Tokens of a request whose results have been processed.
    fn tokens_out(&self, request: u32) -> u32 {
        let entry = &self.client.requests[request as usize];
        if !self.runs[request as usize] {
            return entry.recompute;
        }
        let launched = entry.recompute + 1 + (self.decodes - entry.joined) as u32;
        let unprocessed = self
            .pending
            .as_ref()
            .is_some_and(|pending| pending.decode || pending.prefilled.contains(&request));
        launched - u32::from(unprocessed)
    }

    /// Launches a prefill batch.
    fn prefill(&mut self, pieces: &[Piece], start: Stamp) -> ((Execution, RankRecords), Pending) {
        let load = RankLoad {
            prompts: pieces.iter().map(|piece| piece.tokens).collect(),
            prefixes: pieces.iter().map(|piece| piece.prefix).collect(),
            ..RankLoad::default()
        };
        let mut prefilled = Vec::new();
        let mut finished = Vec::new();
        for piece in pieces {
            let entry = &mut self.client.requests[piece.request as usize];
            if piece.prefix == 0 && entry.recompute == 0 {
                entry.scheduled = start;
            }
            if piece.ends {
                if entry.recompute == 0 {
                    entry.iteration = self.log.count() as u32;
                }
                prefilled.push(piece.request);
                self.joining.push(piece.request);
                if entry.output - entry.recompute == 1 {
                    finished.push(piece.request);
                }
            } else {
                self.cut = Some((piece.request, piece.prefix + piece.tokens));
            }
            if let Some(pool) = &mut self.kv {
                pool.used += u64::from(piece.tokens);
                if piece.prefix == 0 {
                    pool.promised += u64::from(entry.prompt + entry.output);
                    pool.members += 1;
                }
            }
        }
        let record = RankRecord {
            context: pieces.iter().map(|piece| piece.request).collect(),
            chunks: if pieces.iter().all(|piece| piece.ends && piece.prefix == 0) {
                Vec::new()
            } else {
                load.prefixes
                    .iter()
                    .copied()
                    .zip(load.prompts.iter().copied())
                    .collect()
            },
            ..RankRecord::default()
        };
        let execution = Execution::Eager;
        let mode = self.lanes.dispatch(execution, &[load]);
        let pending = Pending {
            gpu: self.streams(),
            mode,
            prefilled,
            finished,
            decode: false,
        };
        ((execution, smallvec![record]), pending)
    }

    /// Finished requests leave the running ones.
    fn drop_finished(&mut self) {
        if self.stale == 0 {
            return;
        }
        let (done, requests, decodes) = (&self.done, &self.client.requests, self.decodes);
        let (kv_sum, runs) = (&mut self.kv_sum, &mut self.runs);
        self.running.retain(|request| {
            if done[*request as usize] {
                runs[*request as usize] = false;
                let entry = &requests[*request as usize];
                *kv_sum -= u64::from(entry.context()) + 1 + (decodes - entry.joined);
            }
            !done[*request as usize]
        });
        self.stale = 0;
        self.full = false;
    }

    /// Retracts requests until the next decode step fits.
    fn retract(&mut self, start: Stamp) -> Vec<u32> {
        let mut paused = Vec::new();
        let Some(pool) = &self.kv else {
            return paused;
        };
        let (mut used, mut promised, tokens) = (pool.used, pool.promised, pool.tokens);
        let mut ranked: Vec<(u32, u32, u32)> = Vec::new();
        while used + (self.running.len() as u64) > tokens && self.running.len() > 1 {
            if ranked.is_empty() {
                // Most tokens out first, then the shorter prompt; equals in running order.
                ranked = (self.running.iter())
                    .map(|request| {
                        let prompt = self.client.requests[*request as usize].prompt;
                        (self.tokens_out(*request), prompt, *request)
                    })
                    .collect();
                ranked.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
            }
            let Some((out, _, request)) = ranked.pop() else {
                break;
            };
            used -= self.held_by(request);
            let entry = &mut self.client.requests[request as usize];
            let left = u64::from(entry.output - entry.recompute);
            self.kv_sum -= u64::from(entry.context()) + 1 + (self.decodes - entry.joined);
            if left > 1
                && let Some(ending) = self.ends.get_mut(&(entry.joined + left - 2))
            {
                ending.retain(|other| *other != request);
            }
            entry.recompute = out;
            let (need, scheduled) = (entry.prompt + entry.output, entry.scheduled);
            if out == 0 {
                // Its first token was still out: it waits for its first schedule again.
                let lost = (Part::QueueCapacity, 1);
                self.client
                    .weigh_held(&mut self.lanes, lost, scheduled, start);
            }
            promised -= u64::from(need);
            self.running.retain(|other| *other != request);
            self.runs[request as usize] = false;
            // The token that is still out is thrown away.
            if let Some(pending) = &mut self.pending {
                pending.prefilled.retain(|other| *other != request);
                pending.finished.retain(|other| *other != request);
            }
            self.waiting.push_back(request);
            self.unscheduled += u32::from(out == 0);
            paused.push(request);
        }
        let mut ratio = (pool.ratio - (RATIO_START - RATIO_END) / RATIO_STEPS).max(RATIO_END);
        if !paused.is_empty() {
            self.full = false;
            let (mut out, mut most) = (0, 1);
            for request in &self.running {
                out += self.tokens_out(*request) + RETRACT_STEPS;
                most += self.client.requests[*request as usize].output;
            }
            ratio = (f64::from(out) / f64::from(most)).min(1.0);
        }
        if let Some(pool) = &mut self.kv {
            pool.used = used;
            pool.promised = promised;
            pool.members -= paused.len() as u64;
            if !self.running.is_empty() {
                pool.ratio = ratio;
            }
        }
        paused
    }

    /// KV tokens of a request that has joined the running ones.
    fn held_by(&self, request: u32) -> u64 {
        let entry = &self.client.requests[request as usize];
        u64::from(entry.context()) + self.decodes - entry.joined
    }

    /// Launches a decode step of everything that runs.
    fn decode(&mut self) -> ((Execution, RankRecords), Pending) {
        let batch = self.running.len() as u32;
        let graph = self.scenario.serving.cuda_graph.as_ref();
        let padding = graph.is_some_and(|graph| graph.padding);
        let (execution, padded) = match captured(&self.graph_sizes, batch, padding) {
            Some(captured_batch) => (Execution::FullGraph { captured_batch }, captured_batch),
            None => (Execution::Eager, batch),
        };
        // Padding attends to one token.
        let record = RankRecord {
            generation: batch,
            padded,
            kv_sum: self.kv_sum + u64::from(padded - batch),
            ..RankRecord::default()
        };
        let load = RankLoad {
            generation: record.generation,
            padded: record.padded,
            kv_sum: record.kv_sum,
            ..RankLoad::default()
        };
        let mode = self.lanes.dispatch(execution, &[load]);
        let mut finished = self.ends.remove(&self.decodes).unwrap_or_default();
        finished.sort_unstable();
        self.decodes += 1;
        self.kv_sum += u64::from(batch);
        if let Some(pool) = &mut self.kv {
            pool.used += u64::from(batch);
        }
        let pending = Pending {
            gpu: self.streams(),
            mode,
            prefilled: Vec::new(),
            finished,
            decode: true,
        };
        ((execution, smallvec![record]), pending)
    }

    /// When each stream is done with what was launched.
    fn streams(&mut self) -> Vec<Stamp> {
        let mut streams = std::mem::take(&mut self.spare);
        streams.clone_from(&self.lanes.gpu);
        streams
    }

    /// Waits for a batch, updates its requests and sends their tokens.
    fn process(&mut self, batch: Pending) {
        self.lanes.finish(&batch.gpu, batch.mode);
        self.spare = batch.gpu;
        let first = |request: &&u32| self.client.requests[**request as usize].recompute == 0;
        let first: Vec<u32> = batch.prefilled.iter().filter(first).copied().collect();
        if first.is_empty() && batch.finished.is_empty() {
            return;
        }
        // Rank 0 responds.
        let at_client = self.lanes.egress(self.lanes.host[0]);
        for request in first {
            self.client.first_token(&mut self.lanes, request, at_client);
        }
        for request in batch.finished {
            self.done[request as usize] = true;
            let runs = self.runs[request as usize];
            self.stale += usize::from(runs);
            let held = if runs {
                self.held_by(request)
            } else {
                u64::from(self.client.requests[request as usize].context())
            };
            if let Some(pool) = &mut self.kv {
                let entry = &self.client.requests[request as usize];
                pool.used -= held;
                pool.promised -= u64::from(entry.prompt + entry.output);
                pool.members -= 1;
            }
            self.client.last_token(&mut self.lanes, request, at_client);
        }
    }
}
