//! One step: its lookups, and its kernels on the lanes one by one.

use std::rc::Rc;

use crate::compose::Part;

use super::auditor::Auditor;
use super::fault::{Check, TIE_REL, check_weights, close};
use super::forward::{Feed, Phase, Task, behind, reached_ranks};
use super::lookup::Share;
use super::moment::{Cost, Moment, Slot};
use super::sources::Known;

/// What one rank group works on.
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    /// Pieces of prompts: tokens computed before and now.
    pub(super) prompts: Vec<(u32, u32)>,
    pub(super) padded: u32,
    pub(super) kv_sum: u64,
    /// Tokens that captured segments are padded to.
    pub(super) at_least: u32,
}

impl Load {
    pub(super) fn prompt_tokens(&self) -> u32 {
        self.prompts.iter().map(|(_, tokens)| tokens).sum()
    }

    fn tokens(&self) -> u32 {
        u32::max(self.prompt_tokens() + self.padded, self.at_least)
    }

    fn sequences(&self) -> u32 {
        self.prompts.len() as u32 + self.padded
    }

    fn of(&self, feed: Feed) -> u32 {
        match feed {
            Feed::Tokens => self.tokens(),
            Feed::Sequences => self.sequences(),
            Feed::Only(Phase::Prompts) => self.prompt_tokens(),
            Feed::Only(Phase::Generation) => self.padded,
        }
    }

    fn has(&self, phase: Phase) -> bool {
        match phase {
            Phase::Prompts => !self.prompts.is_empty(),
            Phase::Generation => self.padded > 0,
        }
    }
}

/// Where the path through a step came from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Entry {
    /// The stream of a lane, as the step before left it.
    Stream(usize),
    /// The host of a lane, once it had submitted this share of the forward.
    Host(usize, f64),
    /// The last collective, which left all lanes at one time.
    Joined,
}

/// A lane on its way through a step; times from the step's start.
#[derive(Debug, Clone)]
struct Lane {
    ms: f64,
    entry: Entry,
    /// Kernels since the entry: positions among the costs.
    since: Vec<usize>,
}

/// The path that all lanes share behind a collective.
struct Joined {
    entry: Entry,
    counts: Vec<u32>,
}

impl Joined {
    /// The lane whose path goes on for all.
    fn join(&mut self, late: &Lane) {
        if late.entry != Entry::Joined {
            self.entry = late.entry;
            self.counts.fill(0);
        }
        for at in &late.since {
            self.counts[*at] += 1;
        }
    }
}

impl Auditor<'_> {
    /// Prices a kernel at `wanted`, each row times a ratio of `work`.
    fn look_up(&mut self, task: usize, wanted: [f64; 3], of_total: f64, work: f64) -> Cost {
        let part = if self.tasks[task].joins_ranks() {
            Part::Transfer
        } else {
            Part::Kernel
        };
        let shares = match &self.fields[task] {
            Some(field) => field.around(wanted),
            // At the published bandwidth: the row is the time of one byte.
            None => self
                .sources
                .roofline
                .map(|known| Share {
                    known,
                    weight: 1.0,
                    work: wanted[0],
                })
                .into_iter()
                .collect(),
        };
        if let Err(what) = check_weights(shares.iter().map(|share| share.weight)) {
            let what = format!("{:?} at {wanted:?}: {what}", self.tasks[task]);
            self.fault(Check::Lookup, what);
            return Cost::default();
        }
        if shares.iter().any(|share| share.known == Known::MAX) {
            let what = format!(
                "{:?} at {wanted:?} lies beside a row that the prediction was not given",
                self.tasks[task]
            );
            self.fault(Check::Lookup, what);
            return Cost::default();
        }
        let shares: Vec<Share> = shares
            .into_iter()
            .map(|share| Share {
                weight: share.weight * of_total,
                work: share.work * work,
                ..share
            })
            .collect();
        self.cost(part, &shares)
    }

    fn counted(&mut self, task: usize, count: f64) -> Rc<Cost> {
        if let Some(known) = self.priced[task].get(&count.to_bits()) {
            return Rc::clone(known);
        }
        let wanted = match self.tasks[task] {
            Task::Multiply { n, k, .. } => [f64::from(n), f64::from(k), count],
            _ => [count, 0.0, 0.0],
        };
        let cost = Rc::new(self.look_up(task, wanted, 1.0, 1.0));
        self.priced[task].insert(count.to_bits(), Rc::clone(&cost));
        cost
    }

    /// Prices a kernel for one rank group's load.
    fn price(&mut self, task: usize, load: &Load, loads: &[Load]) -> Rc<Cost> {
        let kind = self.tasks[task];
        // A group without a prompt, or without generation, has nothing to do there.
        if kind.needs().is_some_and(|phase| !load.has(phase)) {
            return Rc::new(Cost::default());
        }
        let largest = |feed| f64::from(loads.iter().map(|load| load.of(feed)).max().unwrap_or(0));
        let count = match kind {
            Task::Attend {
                phase: Phase::Prompts,
                ..
            }
            | Task::AttendLatent(Phase::Prompts)
            | Task::Convolve(Phase::Prompts)
            | Task::DeltaRule(Phase::Prompts) => {
                let batch = load.prompts.len() as f64;
                let mut mean = Cost::default();
                for &(before, tokens) in &load.prompts {
                    let work = behind(kind, before, tokens);
                    let one =
                        self.look_up(task, [f64::from(tokens), batch, 0.0], 1.0 / batch, work);
                    mean.ms += one.ms;
                    mean.of.extend(one.of);
                }
                return Rc::new(mean);
            }
            Task::Attend { .. } | Task::AttendLatent(_) => {
                let batch = f64::from(load.padded);
                let mean_kv = load.kv_sum as f64 / batch;
                return Rc::new(self.look_up(task, [mean_kv, batch, 0.0], 1.0, 1.0));
            }
            // Their state has one size: only the batch counts.
            Task::Convolve(_) | Task::DeltaRule(_) | Task::FoldLatent { .. } => {
                f64::from(load.padded)
            }
            Task::Experts => f64::from(loads.iter().map(Load::tokens).sum::<u32>()),
            Task::Reduce { width } => f64::from(width) * largest(Feed::Tokens),
            Task::Gather { width, feed } => f64::from(width) * largest(feed),
            Task::Exchange { .. } => {
                let (count, topk) = self
                    .config
                    .experts
                    .map_or((1, 1), |experts| (experts.count, experts.topk));
                let ranks = self.scenario.deployment.parallel.moe_ep;
                reached_ranks(count, topk, ranks)
                    * f64::from(self.config.hidden)
                    * largest(Feed::Tokens)
            }
            Task::Multiply { feed, .. } => f64::from(load.of(feed)),
            Task::Move { bytes, feed } => f64::from(bytes) * f64::from(load.of(feed)),
        };
        self.counted(task, count)
    }

    /// Plays one step forward, kernel by kernel. The host of each lane begins at its moment of
    /// `starts`; returns when each lane's stream is free.
    pub(super) fn step(
        &mut self,
        loads: &[Load],
        mode: usize,
        starts: &[Moment],
        streams: &[Moment],
    ) -> Vec<Moment> {
        let lanes = streams.len();
        let kinds = self.tasks.len();
        let prompts = loads.iter().any(|load| load.has(Phase::Prompts));
        let generation = loads.iter().any(|load| load.has(Phase::Generation));
        let mut costs: Vec<Rc<Cost>> = Vec::with_capacity(loads.len() * kinds);
        let nothing = Rc::new(Cost::default());
        for load in loads {
            for task in 0..kinds {
                costs.push(if self.tasks[task].runs(prompts, generation) {
                    self.price(task, load, loads)
                } else {
                    Rc::clone(&nothing)
                });
            }
        }
        // Lanes of one rank group do the same work.
        let group = |lane: usize| if loads.len() > 1 { lane } else { 0 };
        let in_order: Vec<(usize, u32)> = self
            .order
            .iter()
            .filter(|(task, _)| self.tasks[*task].runs(prompts, generation))
            .copied()
            .collect();
        let all: u32 = in_order.iter().map(|(_, kernels)| kernels).sum();
        let hosts = &self.hosts[mode];
        let zero = starts[0].ms;
        let mut states: Vec<Lane> = (0..lanes)
            .map(|lane| Lane {
                ms: streams[lane].ms - zero,
                entry: Entry::Stream(lane),
                since: Vec::new(),
            })
            .collect();
        let begun: Vec<f64> = (0..lanes)
            .map(|lane| (starts[lane].ms - zero) + hosts[lane].before.ms)
            .collect();
        let mut joined = Joined {
            entry: Entry::Joined,
            counts: vec![0; costs.len()],
        };
        let mut submitted = 0;
        let mut ties = 0;
        let near = TIE_REL * zero.abs();
        for (task, kernels) in in_order {
            submitted += kernels;
            let share = f64::from(submitted) / f64::from(all);
            for (lane, state) in states.iter_mut().enumerate() {
                let ready = begun[lane] + hosts[lane].dispatch.ms * share;
                if (ready - state.ms).abs() <= near {
                    ties += 1;
                }
                if ready > state.ms {
                    state.ms = ready;
                    state.entry = Entry::Host(lane, share);
                    state.since.clear();
                }
            }
            if self.tasks[task].joins_ranks() && lanes > 1 {
                let mut late = 0;
                for lane in 1..lanes {
                    let (a, b) = (&states[late], &states[lane]);
                    if (b.ms - a.ms).abs() <= near
                        && (a.entry, &a.since) != (b.entry, &b.since)
                    {
                        ties += 1;
                    }
                    if b.ms > a.ms {
                        late = lane;
                    }
                }
                let at = group(late) * kinds + task;
                states[late].since.push(at);
                joined.join(&states[late]);
                let ms = states[late].ms + costs[at].ms;
                for state in &mut states {
                    state.ms = ms;
                    state.entry = Entry::Joined;
                    state.since.clear();
                }
            } else {
                for (lane, state) in states.iter_mut().enumerate() {
                    let at = group(lane) * kinds + task;
                    state.ms += costs[at].ms;
                    state.since.push(at);
                }
            }
        }
        self.ties += ties;
        let hosts = &self.hosts[mode];
        let way = |entry: Entry, counts: &[u32]| {
            let mut of: Vec<(Slot, f64)> = Vec::new();
            let from = match entry {
                Entry::Host(lane, share) => {
                    of.extend(&hosts[lane].before.of);
                    let dispatched = hosts[lane].dispatch.of.iter();
                    of.extend(dispatched.map(|(slot, times)| (*slot, times * share)));
                    &starts[lane]
                }
                Entry::Stream(lane) => &streams[lane],
                Entry::Joined => &streams[0],
            };
            for (cost, count) in costs.iter().zip(counts) {
                if *count > 0 {
                    let times = f64::from(*count);
                    of.extend(cost.of.iter().map(|(slot, one)| (*slot, times * one)));
                }
            }
            (from, of)
        };
        let shared = (joined.entry != Entry::Joined).then(|| {
            let (from, of) = way(joined.entry, &joined.counts);
            from.reach(from.ms, of)
        });
        states
            .iter()
            .map(|state| {
                let mut counts = vec![0; costs.len()];
                for at in &state.since {
                    counts[*at] += 1;
                }
                let (from, of) = way(state.entry, &counts);
                let from = match (state.entry, &shared) {
                    (Entry::Joined, Some(shared)) => shared,
                    _ => from,
                };
                from.reach(zero + state.ms, of)
            })
            .collect()
    }

    /// The later of two moments; of equals the first.
    pub(super) fn later(&mut self, first: &Moment, second: &Moment) -> Moment {
        if close(first.ms, second.ms, TIE_REL) && !first.same_way(second) {
            self.ties += 1;
        }
        if second.ms > first.ms {
            second.clone()
        } else {
            first.clone()
        }
    }

    pub(super) fn latest(&mut self, moments: &[Moment]) -> Moment {
        let mut late = moments[0].clone();
        for moment in &moments[1..] {
            late = self.later(&late, moment);
        }
        late
    }
}
