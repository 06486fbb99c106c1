//! The TensorRT-LLM PyTorch executor and its closed-loop client.
//!
//! One iteration: fetch what has arrived (an idle executor blocks and takes the first arrival
//! alone), schedule, prepare and dispatch the step, then, with the overlap scheduler, wait for the
//! step before, update its requests and send its responses. Decisions depend on order and counts
//! only.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use crate::compose::{Composer, LaneStart, Part, Paths, Stamp};
use crate::model::{RankLoad, Scenario, captured};
use crate::timing::Execution;

use super::log::{IterationRecord, RankRecord, RequestRecord, StepLog};

/// A point in time that orders: by time, then request.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Due {
    ms: f64,
    request: u32,
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.ms
            .total_cmp(&other.ms)
            .then(self.request.cmp(&other.request))
    }
}

#[derive(Debug, Clone, Copy)]
struct Request {
    prompt: u32,
    output: u32,
    rank: u32,
    iteration: u32,
    post: Stamp,
    arrival: Stamp,
    scheduled: Stamp,
    first: Stamp,
    last: Stamp,
}

/// One attention rank group.
#[derive(Debug, Default)]
struct RankState {
    /// Admitted requests whose prompt has not run, first come first served.
    context: VecDeque<u32>,
    generating: u32,
    /// KV lengths of the generating requests at the next step.
    kv_sum: u64,
    /// Step number to the requests whose last token it makes.
    ends: BTreeMap<u64, Vec<u32>>,
    /// Admitted requests whose responses are not all out, and their prompt tokens.
    active: u32,
    active_tokens: u64,
}

/// A dispatched step whose results are not out yet.
struct Pending {
    gpu: Vec<Stamp>,
    execution: Execution,
    first: Vec<u32>,
    finished: Vec<u32>,
}

/// A finished replay.
pub(super) struct Replayed {
    pub log: StepLog,
    pub paths: Paths,
    /// POST, arrival, schedule and first token of each request.
    pub stamps: Vec<[Stamp; 4]>,
}

pub(super) struct Executor<'a> {
    scenario: &'a Scenario,
    composer: &'a mut Composer,
    /// Fetches to repeat, where a recorded schedule is given.
    recorded: Option<&'a StepLog>,
    /// Captured batch sizes of the decode graphs, ascending.
    graph_sizes: Vec<u32>,
    /// Captured token counts of the piecewise graphs, ascending.
    piecewise_tokens: Vec<u32>,
    paths: Paths,
    requests: Vec<Request>,
    posted: usize,
    arrivals: BinaryHeap<Reverse<Due>>,
    waiting: VecDeque<u32>,
    ranks: Vec<RankState>,
    host: Vec<Stamp>,
    gpu: Vec<Stamp>,
    previous: Option<Pending>,
    steps: u64,
    batch_waited: u32,
    balance_waited: u32,
    balance_filled: u32,
    log: Vec<IterationRecord>,
    /// Requests held at the last iteration, with its start.
    held: Option<(Part, u32, Stamp)>,
    ttft_weight: f64,
    tpot_weight: f64,
}

impl<'a> Executor<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        composer: &'a mut Composer,
        lengths: &[(u32, u32)],
        recorded: Option<&'a StepLog>,
    ) -> Self {
        let backend = scenario.deployment.backend.name;
        let paths = Paths::new();
        let origin = paths.origin();
        let requests = lengths
            .iter()
            .map(|&(prompt, output)| Request {
                prompt,
                output,
                rank: 0,
                iteration: 0,
                post: origin,
                arrival: origin,
                scheduled: origin,
                first: origin,
                last: origin,
            })
            .collect();
        let lanes = composer.lanes();
        let streaming = lengths.iter().filter(|(_, output)| *output > 1).count();
        Self {
            scenario,
            recorded,
            graph_sizes: (scenario.serving.cuda_graph.as_ref())
                .map_or_else(Vec::new, |graph| graph.sizes(backend)),
            piecewise_tokens: (scenario.serving.piecewise.as_ref())
                .map_or_else(Vec::new, |piecewise| piecewise.token_counts()),
            paths,
            requests,
            posted: 0,
            arrivals: BinaryHeap::new(),
            waiting: VecDeque::new(),
            ranks: (0..scenario.deployment.parallel.dp)
                .map(|_| RankState::default())
                .collect(),
            host: vec![origin; lanes],
            gpu: vec![origin; lanes],
            previous: None,
            steps: 0,
            batch_waited: 0,
            balance_waited: 0,
            balance_filled: 0,
            log: Vec::new(),
            held: None,
            ttft_weight: 1.0 / lengths.len() as f64,
            tpot_weight: 1.0 / streaming.max(1) as f64,
            composer,
        }
    }

    /// Runs every request to its last token.
    pub(super) fn run(mut self) -> Replayed {
        let origin = self.paths.origin();
        for _ in 0..self.scenario.workload.concurrency {
            self.post(origin);
        }
        while self.iterate() {}
        let requests = self
            .requests
            .iter()
            .map(|request| RequestRecord {
                prompt: request.prompt,
                output: request.output,
                rank: request.rank,
                post_ms: request.post.ms,
                arrival_ms: request.arrival.ms,
                scheduled_ms: request.scheduled.ms,
                iteration: request.iteration,
                first_token_ms: request.first.ms,
                last_token_ms: request.last.ms,
            })
            .collect();
        let log = StepLog {
            iterations: self.log,
            requests,
        };
        Replayed {
            log,
            paths: self.paths,
            stamps: self
                .requests
                .iter()
                .map(|request| {
                    [
                        request.post,
                        request.arrival,
                        request.scheduled,
                        request.first,
                    ]
                })
                .collect(),
        }
    }

    /// The client posts its next request, if it has one left.
    fn post(&mut self, at: Stamp) {
        let Some(request) = self.requests.get_mut(self.posted) else {
            return;
        };
        let times = self.composer.request_times();
        let arrival = self.paths.after(
            at,
            self.composer.pricer(),
            &[
                (Part::ClientTransport, times.client_transport),
                (Part::Ingress, times.ingress),
            ],
        );
        request.post = at;
        request.arrival = arrival;
        self.paths.weigh_ttft(at, arrival, None, self.ttft_weight);
        self.arrivals.push(Reverse(Due {
            ms: arrival.ms,
            request: self.posted as u32,
        }));
        self.posted += 1;
    }

    /// One iteration; `false` when nothing is left to do.
    fn iterate(&mut self) -> bool {
        // Ranks fetch together: the iteration starts when the last host is there.
        let ready = latest(&self.host);
        let Some((start, fetched)) = self.fetch(ready) else {
            return false;
        };
        self.weigh_held(start);
        for &request in &fetched {
            let arrival = self.requests[request as usize].arrival;
            self.paths
                .weigh_ttft(arrival, start, Some(Part::QueueIteration), self.ttft_weight);
        }
        self.waiting.extend(&fetched);
        self.admit();
        let (chosen, held) = self.choose();
        let step = self.form_step(&chosen);
        if let Some(part) = held.0 {
            self.held = Some((part, held.1, start));
        }
        let dispatched = match &step {
            Some((execution, ranks)) => Some(self.dispatch(start, *execution, ranks, &chosen)),
            None => {
                self.host.fill(start);
                None
            }
        };
        self.log.push(IterationRecord {
            start_ms: start.ms,
            fetched,
            held: held.0.map(|part| (part, held.1)),
            step,
        });
        if self.scenario.serving.overlap {
            if let Some(previous) = self.previous.take() {
                self.finish(previous);
            }
            self.previous = dispatched;
        } else if let Some(dispatched) = dispatched {
            self.finish(dispatched);
        }
        true
    }

    /// Takes requests from the queue. A busy executor takes what has arrived; an idle one blocks
    /// and takes the first arrival alone. `None`: nothing runs and nothing will arrive.
    fn fetch(&mut self, ready: Stamp) -> Option<(Stamp, Vec<u32>)> {
        let idle = self.ranks.iter().all(|rank| rank.active == 0) && self.waiting.is_empty();
        if let Some(recorded) = self.recorded {
            let fetched = recorded.iterations.get(self.log.len())?.fetched.clone();
            let mut start = ready;
            for &request in &fetched {
                let arrival = self.requests[request as usize].arrival;
                if idle {
                    start = start.latest(arrival);
                }
                self.arrivals.retain(|Reverse(due)| due.request != request);
            }
            return Some((start, fetched));
        }
        let mut fetched = Vec::new();
        let mut start = ready;
        if idle {
            let Reverse(first) = *self.arrivals.peek()?;
            // Before the first request the executor has long been blocked on its empty queue.
            if first.ms > ready.ms || self.log.is_empty() {
                self.arrivals.pop();
                start = ready.latest(self.requests[first.request as usize].arrival);
                return Some((start, vec![first.request]));
            }
        }
        while let Some(Reverse(due)) = self.arrivals.peek() {
            if due.ms > start.ms {
                break;
            }
            fetched.push(due.request);
            self.arrivals.pop();
        }
        Some((start, fetched))
    }

    fn weigh_held(&mut self, start: Stamp) {
        if let Some((part, count, from)) = self.held.take() {
            let weight = self.ttft_weight * f64::from(count);
            self.paths.weigh_ttft(from, start, Some(part), weight);
        }
    }

    /// Admits waiting requests to rank groups while they have room. With attention DP the longest
    /// prompts go first, each to the group with the fewest active prompt tokens among those below
    /// the even share of requests.
    fn admit(&mut self) {
        let groups = self.ranks.len() as u32;
        let room = groups * self.scenario.serving.max_batch_size
            - self.ranks.iter().map(|rank| rank.active).sum::<u32>();
        let count = self.waiting.len().min(room as usize);
        let mut admitted: Vec<u32> = self.waiting.drain(..count).collect();
        if groups > 1 {
            admitted.sort_by_key(|request| Reverse(self.requests[*request as usize].prompt));
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
            let prompt = self.requests[request as usize].prompt;
            self.requests[request as usize].rank = to as u32;
            let rank = &mut self.ranks[to];
            rank.context.push_back(request);
            rank.active += 1;
            rank.active_tokens += u64::from(prompt);
        }
    }

    /// How many context requests each rank group runs, and why the others are held.
    fn choose(&mut self) -> (Vec<usize>, (Option<Part>, u32)) {
        let serving = &self.scenario.serving;
        let fits: Vec<usize> = self
            .ranks
            .iter()
            .map(|rank| {
                let mut tokens = rank.generating;
                let mut batch = rank.generating;
                rank.context
                    .iter()
                    .take_while(|request| {
                        tokens += self.requests[**request as usize].prompt;
                        batch += 1;
                        tokens <= serving.max_num_tokens && batch <= serving.max_batch_size
                    })
                    .count()
            })
            .collect();
        let there: u32 = self
            .ranks
            .iter()
            .map(|rank| rank.context.len() as u32)
            .sum::<u32>()
            + self.waiting.len() as u32;
        let mut chosen = fits.clone();
        let mut reason = Part::QueueCapacity;
        if self.ranks.len() == 1 {
            if let Some(wait) = serving.batch_wait
                && fits[0] > 0
                && self.ranks[0].generating > 0
            {
                let rank = &self.ranks[0];
                let tokens: u32 = rank
                    .context
                    .iter()
                    .take(fits[0])
                    .map(|request| self.requests[*request as usize].prompt)
                    .sum::<u32>()
                    + rank.generating;
                let enough = wait.max_tokens_ratio * f64::from(serving.max_num_tokens);
                if self.batch_waited < wait.timeout_iters && f64::from(tokens) < enough {
                    self.batch_waited += 1;
                    chosen[0] = 0;
                    reason = Part::QueueBatchWait;
                } else {
                    self.batch_waited = 0;
                }
            }
        } else if let Some(balance) = serving.attention_dp_balance {
            let all = |test: &dyn Fn(usize) -> bool| (0..fits.len()).all(test);
            let have_context = all(&|rank| fits[rank] > 0);
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
                chosen.fill(0);
                reason = Part::QueueBalance;
            }
        }
        let running: usize = chosen.iter().sum();
        let left = there - running as u32;
        ((chosen), ((left > 0).then_some(reason), left))
    }

    /// The step's execution and each rank group's share; `None` if nothing is scheduled.
    fn form_step(&self, chosen: &[usize]) -> Option<(Execution, Vec<RankRecord>)> {
        let mut ranks: Vec<RankRecord> = self
            .ranks
            .iter()
            .zip(chosen)
            .map(|(rank, count)| RankRecord {
                context: rank.context.iter().take(*count).copied().collect(),
                generation: rank.generating,
                padded: rank.generating,
                kv_sum: rank.kv_sum,
            })
            .collect();
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
        let graph = if with_context {
            None
        } else {
            captured(&self.graph_sizes, batch, padding)
        };
        let execution = if let Some(captured_batch) = graph {
            // Every rank replays the graph of the same batch; padding attends to one token.
            for rank in &mut ranks {
                rank.kv_sum += u64::from(captured_batch - rank.generation);
                rank.padded = captured_batch;
            }
            Execution::FullGraph { captured_batch }
        } else {
            // A rank group without work runs one dummy token, so that collectives have all ranks.
            for rank in &mut ranks {
                if rank.context.is_empty() && rank.generation == 0 {
                    rank.padded = 1;
                    rank.kv_sum = 1;
                }
            }
            let tokens = |rank: &RankRecord| {
                let prompts: u32 = rank
                    .context
                    .iter()
                    .map(|request| self.requests[*request as usize].prompt)
                    .sum();
                prompts + rank.padded
            };
            let most = ranks.iter().map(tokens).max().unwrap_or(0);
            match with_context
                .then(|| captured(&self.piecewise_tokens, most, true))
                .flatten()
            {
                Some(captured_tokens) => Execution::Piecewise { captured_tokens },
                None => Execution::Eager,
            }
        };
        Some((execution, ranks))
    }

    /// Prepares and dispatches a step from `start`, and books what it makes.
    fn dispatch(
        &mut self,
        start: Stamp,
        execution: Execution,
        ranks: &[RankRecord],
        chosen: &[usize],
    ) -> Pending {
        let loads: Vec<RankLoad> = ranks
            .iter()
            .map(|rank| RankLoad {
                prompts: rank
                    .context
                    .iter()
                    .map(|request| self.requests[*request as usize].prompt)
                    .collect(),
                generation: rank.generation,
                padded: rank.padded,
                kv_sum: rank.kv_sum,
            })
            .collect();
        let lanes = self.host.len();
        for lane in 0..lanes {
            let (ms, terms) = self.composer.submission(execution, lane);
            self.host[lane] = self.paths.reach(start.node, start.ms + ms, &terms, None);
        }
        let graph = matches!(execution, Execution::FullGraph { .. });
        let paths = &mut self.paths;
        let replay = graph
            .then(|| {
                self.composer
                    .decode_replay(&loads[0], &mut |terms| paths.share(terms))
            })
            .flatten();
        if let Some(replay) = replay {
            let begin = (0..lanes)
                .map(|lane| self.gpu[lane].latest(self.host[lane]))
                .reduce(Stamp::latest)
                .unwrap_or(start);
            let end = self.paths.reach(
                begin.node,
                begin.ms + replay.ms,
                &replay.terms,
                Some(replay.shared),
            );
            self.gpu.fill(end);
        } else {
            let from = LaneStart {
                host_ms: vec![start.ms; lanes],
                gpu_ms: self.gpu.iter().map(|stamp| stamp.ms).collect(),
            };
            let times = self.composer.step(&loads, execution, &from);
            let before = self.gpu.clone();
            for lane in 0..lanes {
                let path = &times.gpu_path[lane];
                let parent = path.parent(start, &before);
                self.gpu[lane] =
                    self.paths
                        .reach(parent.node, times.gpu_ms[lane], &path.terms, None);
            }
        }
        self.book(start, execution, chosen)
    }

    /// Moves requests on by the step that was just dispatched.
    fn book(&mut self, start: Stamp, execution: Execution, chosen: &[usize]) -> Pending {
        let step = self.steps;
        self.steps += 1;
        let mut first = Vec::new();
        let mut finished = Vec::new();
        for (rank, count) in self.ranks.iter_mut().zip(chosen) {
            rank.kv_sum += u64::from(rank.generating);
            for request in rank.ends.remove(&step).unwrap_or_default() {
                let done = &self.requests[request as usize];
                rank.generating -= 1;
                rank.kv_sum -= u64::from(done.prompt) + u64::from(done.output);
                finished.push(request);
            }
            for request in rank.context.drain(..*count) {
                let begun = &mut self.requests[request as usize];
                begun.scheduled = start;
                begun.iteration = self.log.len() as u32;
                if begun.output > 1 {
                    rank.generating += 1;
                    rank.kv_sum += u64::from(begun.prompt) + 1;
                    rank.ends
                        .entry(step + u64::from(begun.output) - 1)
                        .or_default()
                        .push(request);
                } else {
                    finished.push(request);
                }
                first.push(request);
            }
        }
        first.sort_unstable();
        finished.sort_unstable();
        Pending {
            gpu: self.gpu.clone(),
            execution,
            first,
            finished,
        }
    }

    /// Waits for a step, updates its requests and sends their responses.
    fn finish(&mut self, step: Pending) {
        for lane in 0..self.host.len() {
            let synced = step.gpu[lane].latest(self.host[lane]);
            let finish = self.composer.finish(step.execution, lane);
            self.host[lane] = self.paths.after(
                synced,
                self.composer.pricer(),
                &[(Part::HostFinish, finish)],
            );
        }
        // Rank 0 responds; with attention DP it gathers the others' responses first.
        let respond = if self.ranks.len() > 1 {
            latest(&self.host)
        } else {
            self.host[0]
        };
        if step.first.is_empty() && step.finished.is_empty() {
            return;
        }
        let egress = self.composer.request_times().egress;
        let at_client =
            self.paths
                .after(respond, self.composer.pricer(), &[(Part::Egress, egress)]);
        for request in step.first {
            let request = &mut self.requests[request as usize];
            request.first = at_client;
            self.paths
                .weigh_ttft(request.scheduled, at_client, None, self.ttft_weight);
        }
        for index in step.finished {
            let request = &mut self.requests[index as usize];
            request.last = at_client;
            if request.output > 1 {
                let weight = self.tpot_weight / f64::from(request.output - 1);
                self.paths.weigh_tpot(request.first, at_client, weight);
            }
            let rank = &mut self.ranks[request.rank as usize];
            rank.active -= 1;
            rank.active_tokens -= u64::from(request.prompt);
            self.post(at_client);
        }
    }
}

fn latest(stamps: &[Stamp]) -> Stamp {
    let mut late = stamps[0];
    for stamp in &stamps[1..] {
        late = late.latest(*stamp);
    }
    late
}
