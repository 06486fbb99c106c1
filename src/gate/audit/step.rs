//! One step: its lookups, and its kernels on the lanes one by one.

use std::rc::Rc;

use smallvec::SmallVec;

use crate::compose::Part;

use super::auditor::Auditor;
use super::fault::{Check, TIE_REL, check_weights, close};
use super::forward::{Feed, Phase, Task, alone, reached_ranks};
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
    /// Its generation requests alone.
    pub(super) fn generation(&self) -> Self {
        Self {
            prompts: Vec::new(),
            ..*self
        }
    }

    /// Its prompts alone.
    pub(super) fn context(&self) -> Self {
        Self {
            prompts: self.prompts.clone(),
            ..Self::default()
        }
    }

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
#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum Entry {
    /// The stream of a lane, as the step before left it.
    Stream(usize),
    /// The host of a lane, once it had submitted this share of the forward.
    Host(usize, f64),
    /// The last collective, which left all lanes at one time.
    #[default]
    Joined,
}

/// A lane on its way through a step; times from the step's start.
#[derive(Debug, Clone, Default)]
struct Lane {
    ms: f64,
    entry: Entry,
    /// Kernels since the entry: positions among the costs, and how often.
    since: Vec<(usize, u32)>,
}

/// The forward as steps of one kind launch it.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Tasks in order, with the kernels submitted up to and with each.
    tasks: Vec<(usize, u32)>,
    /// All kernels.
    kernels: u32,
    /// Tasks up to and with the first collective.
    head: Vec<usize>,
    /// Tasks up to and with each further collective, and how often that stretch stands there.
    stretches: Vec<(Vec<usize>, u32)>,
    /// Tasks behind the last collective, and how often each stands there.
    tail: Vec<(usize, u32)>,
}

impl Order {
    /// `joins`: whether a task joins the lanes there are.
    fn new(tasks: impl IntoIterator<Item = (usize, u32)>, joins: impl Fn(usize) -> bool) -> Self {
        let mut order = Self::default();
        let mut stretch = Vec::new();
        for (task, kernels) in tasks {
            order.kernels += kernels;
            order.tasks.push((task, order.kernels));
            stretch.push(task);
            if !joins(task) {
                continue;
            }
            let done = std::mem::take(&mut stretch);
            if order.head.is_empty() {
                order.head = done;
                continue;
            }
            match order.stretches.iter_mut().find(|(known, _)| *known == done) {
                Some((_, times)) => *times += 1,
                None => order.stretches.push((done, 1)),
            }
        }
        for task in stretch {
            match order.tail.iter_mut().find(|(known, _)| *known == task) {
                Some((_, times)) => *times += 1,
                None => order.tail.push((task, 1)),
            }
        }
        order
    }
}

/// Graph replays of one padded batch. What does not follow the KV lengths is the same in all of
/// them and on all lanes: it is priced once, and between two collectives added up.
#[derive(Debug)]
pub(super) struct Repeated {
    /// Tasks that follow the KV lengths.
    follow: Vec<usize>,
    /// All else.
    fixed: Vec<Rc<Cost>>,
    /// The stretches, over positions in `follow` and, behind them, `fixed`.
    order: Order,
}

impl Repeated {
    fn fix(&mut self, cost: Rc<Cost>) -> usize {
        self.fixed.push(cost);
        self.follow.len() + self.fixed.len() - 1
    }
}

/// What a step needs for itself, from step to step.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    costs: Vec<Rc<Cost>>,
    lanes: Vec<Lane>,
    counts: Vec<u32>,
}

/// The lanes of a step under way.
struct Walk<'a> {
    costs: &'a [Rc<Cost>],
    kinds: usize,
    /// Each lane has a load of its own; else all have the same.
    apart: bool,
    streams: &'a [Moment],
    lanes: Vec<Lane>,
    /// The path that all lanes share behind a collective.
    joined: Entry,
    counts: Vec<u32>,
    near: f64,
    ties: usize,
}

impl Walk<'_> {
    fn at(&self, lane: usize, task: usize) -> usize {
        if self.apart {
            lane * self.kinds + task
        } else {
            task
        }
    }

    /// The host of a lane has submitted a share of the forward: nothing behind starts earlier.
    fn submitted(&mut self, lane: usize, ready: f64, share: f64) {
        let state = &mut self.lanes[lane];
        if (ready - state.ms).abs() <= self.near {
            self.ties += 1;
        }
        if ready > state.ms {
            state.ms = ready;
            state.entry = Entry::Host(lane, share);
            state.since.clear();
        }
    }

    fn run(&mut self, task: usize, times: u32) {
        for lane in 0..self.lanes.len() {
            let at = self.at(lane, task);
            let state = &mut self.lanes[lane];
            state.ms += f64::from(times) * self.costs[at].ms;
            state.since.push((at, times));
        }
    }

    fn same_way(&self, a: &Lane, b: &Lane) -> bool {
        let entries = match (a.entry, b.entry) {
            (Entry::Stream(a), Entry::Stream(b)) => self.streams[a].same_way(&self.streams[b]),
            (a, b) => a == b,
        };
        entries && a.since == b.since
    }

    /// The lane that comes last; the lowest of equals.
    fn late(&mut self) -> usize {
        let mut late = 0;
        let mut ties = 0;
        for lane in 1..self.lanes.len() {
            let (a, b) = (&self.lanes[late], &self.lanes[lane]);
            if (b.ms - a.ms).abs() <= self.near && !self.same_way(a, b) {
                ties += 1;
            }
            if b.ms > a.ms {
                late = lane;
            }
        }
        self.ties += ties;
        late
    }

    /// A collective starts for all when the last lane is there.
    fn join(&mut self, task: usize) {
        let late = self.late();
        let at = self.at(late, task);
        let state = &self.lanes[late];
        if state.entry != Entry::Joined {
            self.joined = state.entry;
            self.counts.fill(0);
        }
        for (at, times) in &state.since {
            self.counts[*at] += times;
        }
        self.counts[at] += 1;
        let ms = state.ms + self.costs[at].ms;
        self.level(ms);
    }

    fn level(&mut self, ms: f64) {
        for state in &mut self.lanes {
            state.ms = ms;
            state.entry = Entry::Joined;
            state.since.clear();
        }
    }

    /// From one collective to behind the next, `times` over: lanes begin together, and no host
    /// holds them, so each time is like the first.
    fn stretch(&mut self, tasks: &[usize], times: u32) {
        let Some((collective, before)) = tasks.split_last() else {
            return;
        };
        let from = self.lanes[0].ms;
        for task in before {
            self.run(*task, 1);
        }
        let late = self.late();
        let at = self.at(late, *collective);
        for (at, once) in &self.lanes[late].since {
            self.counts[*at] += once * times;
        }
        self.counts[at] += times;
        let once = self.lanes[late].ms - from + self.costs[at].ms;
        self.level(from + f64::from(times) * once);
    }
}

/// Whether all rank groups generate for the same padded batch, and do nothing else.
fn repeats(loads: &[Load]) -> bool {
    let padded = loads[0].padded;
    let alike =
        |load: &Load| load.prompts.is_empty() && load.padded == padded && load.at_least == 0;
    padded > 0 && loads.iter().all(alike)
}

impl Auditor<'_> {
    /// Prices a kernel at `wanted`, as a share of the whole.
    fn look_up(&mut self, task: usize, wanted: [f64; 3], of_total: f64) -> Cost {
        let mut shares = std::mem::take(&mut self.shares);
        match &self.fields[task] {
            Some(field) => field.around(wanted, &mut shares),
            // At the published bandwidth: the row is the time of one byte.
            None => {
                shares.clear();
                shares.extend(self.sources.roofline.map(|known| Share {
                    known,
                    weight: 1.0,
                    work: wanted[0],
                }));
            }
        }
        let cost = self.share_out(task, wanted, &mut shares, of_total);
        self.shares = shares;
        cost
    }

    fn share_out(
        &mut self,
        task: usize,
        wanted: [f64; 3],
        shares: &mut [Share],
        of_total: f64,
    ) -> Cost {
        let part = if self.tasks[task].joins_ranks() {
            Part::Transfer
        } else {
            Part::Kernel
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
        for share in &mut *shares {
            share.weight *= of_total;
        }
        self.cost(part, shares)
    }

    fn counted(&mut self, task: usize, count: f64) -> Rc<Cost> {
        if let Some(known) = self.priced[task].get(&count.to_bits()) {
            return Rc::clone(known);
        }
        let wanted = match self.tasks[task] {
            Task::Multiply { n, k, .. } => [f64::from(n), f64::from(k), count],
            _ => [count, 0.0, 0.0],
        };
        let cost = Rc::new(self.look_up(task, wanted, 1.0));
        self.priced[task].insert(count.to_bits(), Rc::clone(&cost));
        cost
    }

    /// Prices a kernel for one rank group's load.
    fn price(&mut self, task: usize, load: &Load, loads: &[Load], mode: usize) -> Rc<Cost> {
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
                    let length = alone(kind, before, tokens);
                    let one = self.look_up(task, [length, batch, 0.0], 1.0 / batch);
                    mean.ms += one.ms;
                    mean.of.extend(one.of);
                }
                return Rc::new(mean);
            }
            Task::Attend { .. } | Task::AttendLatent(_) => {
                if let Task::Attend { window, .. } = kind {
                    let work = (load.padded, load.kv_sum);
                    if let Some(share) = self.measured_attention(mode, task, window, work) {
                        return Rc::new(self.cost(Part::Kernel, &[share]));
                    }
                }
                let batch = f64::from(load.padded);
                let mean_kv = load.kv_sum as f64 / batch;
                return Rc::new(self.look_up(task, [mean_kv, batch, 0.0], 1.0));
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
        // Without dispatch times everything is submitted at once.
        let at_once = self.hosts[mode]
            .iter()
            .all(|host| host.dispatch.of.is_empty());
        let mut scratch = std::mem::take(&mut self.scratch);
        let costs = &mut scratch.costs;
        costs.clear();
        let whole;
        let repeated;
        let order = if at_once && repeats(loads) {
            repeated = self.repeated(loads, mode);
            for load in loads {
                for task in &repeated.follow {
                    costs.push(self.price(*task, load, loads, mode));
                }
                costs.extend(repeated.fixed.iter().cloned());
            }
            &repeated.order
        } else {
            let prompts = loads.iter().any(|load| load.has(Phase::Prompts));
            let generation = loads.iter().any(|load| load.has(Phase::Generation));
            let nothing = Rc::new(Cost::default());
            for load in loads {
                for task in 0..self.tasks.len() {
                    costs.push(if self.tasks[task].runs(prompts, generation) {
                        self.price(task, load, loads, mode)
                    } else {
                        Rc::clone(&nothing)
                    });
                }
            }
            whole = self.order(prompts, generation);
            &*whole
        };
        let hosts = &self.hosts[mode];
        let zero = starts[0].ms;
        let costs = &*costs;
        let mut states = std::mem::take(&mut scratch.lanes);
        states.resize_with(lanes, Lane::default);
        for (lane, state) in states.iter_mut().enumerate() {
            state.ms = streams[lane].ms - zero;
            state.entry = Entry::Stream(lane);
            state.since.clear();
        }
        let mut counts = std::mem::take(&mut scratch.counts);
        counts.clear();
        counts.resize(costs.len(), 0);
        let mut walk = Walk {
            costs,
            kinds: costs.len() / loads.len(),
            apart: loads.len() > 1,
            streams,
            lanes: states,
            joined: Entry::Joined,
            counts,
            near: TIE_REL * zero.abs(),
            ties: 0,
        };
        let begun: Vec<f64> = (0..lanes)
            .map(|lane| (starts[lane].ms - zero) + hosts[lane].before.ms)
            .collect();
        if at_once {
            // Behind its first kernel no lane waits for its host.
            for (lane, ready) in begun.iter().enumerate() {
                walk.submitted(lane, *ready, 1.0);
            }
            if let Some((collective, before)) = order.head.split_last() {
                for task in before {
                    walk.run(*task, 1);
                }
                walk.join(*collective);
            }
            for (tasks, times) in &order.stretches {
                walk.stretch(tasks, *times);
            }
            for (task, times) in &order.tail {
                walk.run(*task, *times);
            }
        } else {
            for (task, submitted) in &order.tasks {
                let share = f64::from(*submitted) / f64::from(order.kernels);
                for (lane, ready) in begun.iter().enumerate() {
                    let ready = ready + hosts[lane].dispatch.ms * share;
                    walk.submitted(lane, ready, share);
                }
                if lanes > 1 && self.tasks[*task].joins_ranks() {
                    walk.join(*task);
                } else {
                    walk.run(*task, 1);
                }
            }
        }
        let Walk {
            lanes: states,
            joined,
            counts,
            ties,
            ..
        } = walk;
        self.ties += ties;
        let hosts = &self.hosts[mode];
        let way = |entry: Entry, counts: &mut dyn Iterator<Item = (usize, u32)>| {
            let mut of: SmallVec<[(Slot, f64); 16]> = SmallVec::new();
            let from = match entry {
                Entry::Host(lane, share) => {
                    of.extend_from_slice(&hosts[lane].before.of);
                    let dispatched = hosts[lane].dispatch.of.iter();
                    of.extend(dispatched.map(|(slot, times)| (*slot, times * share)));
                    &starts[lane]
                }
                Entry::Stream(lane) => &streams[lane],
                Entry::Joined => &streams[0],
            };
            for (at, count) in counts {
                let times = f64::from(count);
                let one = costs[at].of.iter();
                of.extend(one.map(|(slot, one)| (*slot, times * one)));
            }
            (from, of)
        };
        let shared = (joined != Entry::Joined).then(|| {
            let counts = counts.iter().copied().enumerate();
            let (from, of) = way(joined, &mut counts.filter(|(_, count)| *count > 0));
            from.reach(from.ms, of)
        });
        let ends = states
            .iter()
            .map(|state| {
                let (from, of) = way(state.entry, &mut state.since.iter().copied());
                let from = match (state.entry, &shared) {
                    (Entry::Joined, Some(shared)) => shared,
                    _ => from,
                };
                from.reach(zero + state.ms, of)
            })
            .collect();
        scratch.lanes = states;
        scratch.counts = counts;
        self.scratch = scratch;
        ends
    }

    /// What replays of this padded batch have in common.
    fn repeated(&mut self, loads: &[Load], mode: usize) -> Rc<Repeated> {
        if let Some(known) = self.repeated.get(&loads[0].padded) {
            return Rc::clone(known);
        }
        let order = self.order(false, true);
        let runs = |task: &usize| self.tasks[*task].runs(false, true);
        let follows = |task: &usize| self.tasks[*task].follows_kv();
        let mut made = Repeated {
            follow: (0..self.tasks.len())
                .filter(|task| runs(task) && follows(task))
                .collect(),
            fixed: Vec::new(),
            order: Order::default(),
        };
        let head = order.head.as_slice();
        made.order.head = self.repeated_stretch(head, loads, mode, &mut made);
        for (tasks, times) in &order.stretches {
            let stretch = self.repeated_stretch(tasks, loads, mode, &mut made);
            made.order.stretches.push((stretch, *times));
        }
        made.order.tail = self.regroup(&order.tail, loads, mode, &mut made);
        let made = Rc::new(made);
        self.repeated.insert(loads[0].padded, Rc::clone(&made));
        made
    }

    /// A stretch up to and with its collective.
    fn repeated_stretch(
        &mut self,
        tasks: &[usize],
        loads: &[Load],
        mode: usize,
        made: &mut Repeated,
    ) -> Vec<usize> {
        let Some((collective, before)) = tasks.split_last() else {
            return Vec::new();
        };
        let before: Vec<(usize, u32)> = before.iter().map(|task| (*task, 1)).collect();
        let grouped = self.regroup(&before, loads, mode, made).into_iter();
        let mut stretch: Vec<usize> = grouped
            .flat_map(|(at, times)| (0..times).map(move |_| at))
            .collect();
        stretch.push(made.fix(self.price(*collective, &loads[0], loads, mode)));
        stretch
    }

    /// Tasks with no collective between: one bundle, and those that follow the KV lengths.
    fn regroup(
        &mut self,
        tasks: &[(usize, u32)],
        loads: &[Load],
        mode: usize,
        made: &mut Repeated,
    ) -> Vec<(usize, u32)> {
        let mut grouped = Vec::new();
        let mut fixed = Vec::new();
        for (task, times) in tasks {
            match made.follow.iter().position(|follow| follow == task) {
                Some(at) => grouped.push((at, *times)),
                None => fixed.push((self.price(*task, &loads[0], loads, mode), *times)),
            }
        }
        if !fixed.is_empty() {
            grouped.push((made.fix(self.bundle(&fixed)), 1));
        }
        grouped
    }

    /// The forward of steps with prompts or generation or both.
    fn order(&mut self, prompts: bool, generation: bool) -> Rc<Order> {
        let kind = usize::from(prompts) + 2 * usize::from(generation);
        if let Some(known) = &self.orders[kind] {
            return Rc::clone(known);
        }
        let tasks = &self.tasks;
        let runs = |(task, _): &(usize, u32)| tasks[*task].runs(prompts, generation);
        let several = self.hosts[0].len() > 1;
        let joins = |task: usize| several && tasks[task].joins_ranks();
        let order = Rc::new(Order::new(self.forward.iter().copied().filter(runs), joins));
        self.orders[kind] = Some(Rc::clone(&order));
        order
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
