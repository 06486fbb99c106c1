//! Paired replay: the steps of real runs, rebuilt on the lanes from their own host times, kernels
//! and dependencies, and composed.
//!
//! Durations and order come from the profile, start times come out. [`super::links`] says what
//! follows what. A collective whose ranks are all there starts when the last of them arrives and
//! lasts as long as the shortest of its durations; of a rank alone it lasts as long as it did, the
//! wait for the absent ranks inside.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::compose::{After, Deadlock, Ran, Schedule, WorkId};
use crate::timing::InputError;

use super::collective::{Member, align, collective_kind, in_common_order};
use super::event::{Call, GpuEvent, Profile, Work};
use super::interval::sum_ns;
use super::iteration::Windows;
use super::launch::Launches;
use super::links::{CallLink, Links, ReplayRows, WorkLink};
use super::summary::{members, refuse_twins};

/// Where the time on a step's critical path goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplayPart {
    /// Calls and the host's time between them.
    HostDispatch,
    GraphLaunch,
    /// From a call's begin or return to its work's start.
    LaunchLatency,
    /// Kernels, copies and sets.
    Kernel,
    /// Collectives once all ranks are there; of a rank alone, its wait inside.
    Transfer,
    /// Time of graphs that the profile shows no work for.
    UntracedInGraph,
    /// Between two works of a stream.
    TurnAround,
    /// From the end of awaited work to the return of the call that waits.
    SyncReturn,
    /// Work that was launched before the profile begins, and the time between it: the state that
    /// streams start from.
    Inherited,
}

impl ReplayPart {
    pub fn name(self) -> &'static str {
        match self {
            Self::HostDispatch => "host_dispatch",
            Self::GraphLaunch => "graph_launch",
            Self::LaunchLatency => "launch_latency",
            Self::Kernel => "kernel",
            Self::Transfer => "transfer",
            Self::UntracedInGraph => "untraced_in_graph",
            Self::TurnAround => "turn_around",
            Self::SyncReturn => "sync_return",
            Self::Inherited => "inherited",
        }
    }
}

/// A traced step of one rank, and the same composed. Times in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StepReplay {
    pub name: String,
    /// GPU work that the step launched.
    pub works: usize,
    /// First start to last end.
    pub traced_ns: i64,
    pub composed_ns: i64,
    /// Along the composed path to the last end, back to the first start: their sum is
    /// `composed_ns`.
    pub parts_ns: BTreeMap<ReplayPart, i64>,
    /// Beside the path: time that calls waited for the GPU, composed.
    pub host_wait_ns: i64,
    /// Beside the path: time inside collectives until the last rank was there, composed. Zero for
    /// a rank alone.
    pub peer_wait_ns: i64,
    /// Durations of graphs that the profile shows no work for: of all the step's work, on its path
    /// or not.
    pub untraced_ns: i64,
}

impl StepReplay {
    /// Composed over traced, less one.
    pub fn error(&self) -> f64 {
        (self.composed_ns - self.traced_ns) as f64 / self.traced_ns.max(1) as f64
    }
}

/// A rank's replay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankReplay {
    pub rank: String,
    pub file: String,
    pub rows: ReplayRows,
    pub steps: Vec<StepReplay>,
    /// Work without a launch call in the profile: the state that its streams start from.
    pub without_launch: usize,
    pub collectives: usize,
    /// Those that met the other ranks'; in the others the wait for peers is inside the duration.
    pub matched_collectives: usize,
}

/// What replaying profiles comes to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Replay {
    pub ranks: Vec<RankReplay>,
    /// What could not be matched, in words.
    pub notes: Vec<String>,
}

impl Replay {
    /// The lower median of the steps' absolute errors; `None`: no step.
    pub fn median_error(&self) -> Option<f64> {
        let steps = self.ranks.iter().flat_map(|rank| &rank.steps);
        let mut errors: Vec<f64> = steps.map(|step| step.error().abs()).collect();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len().saturating_sub(1) / 2).copied()
    }
}

/// Profiles composed. The lanes of profile `p` are its threads and streams.
pub struct Composed<'a> {
    pub report: Replay,
    pub(super) profiles: &'a [Profile],
    pub(super) lanes: Vec<Lanes>,
    pub(super) ran: Vec<Ran>,
    /// What was taken off each profile's clock.
    pub(super) offsets_ns: Vec<i64>,
}

/// A profile's work on the schedule.
pub(super) struct Lanes {
    pub links: Links,
    /// Per call: its own time, and where it waits for the GPU.
    pub calls: Vec<(WorkId, Option<WorkId>)>,
    /// Per piece of work: what the profile does not show before it, and itself.
    pub works: Vec<(Option<WorkId>, WorkId)>,
    /// Step of each piece of work.
    pub steps: Vec<Option<usize>>,
}

impl Lanes {
    /// Whether a piece of work is a collective.
    pub fn is_collective(&self, profile: &Profile, work: usize) -> bool {
        is_collective(profile, &profile.gpu[self.links.works[work].gpu])
    }

    /// When a call is over.
    fn done(&self, call: usize) -> WorkId {
        let (own, wait) = self.calls[call];
        wait.unwrap_or(own)
    }
}

/// What a work of the schedule stands for.
#[derive(Clone, Copy)]
enum Stands {
    Call(Call),
    /// A call's wait for the GPU.
    Wait,
    Untraced,
    /// Launched before the profile begins.
    Inherited,
    Work {
        collective: bool,
    },
}

/// Replays `profiles`, one per rank of one run. `picked` takes the names of the marks that stand for
/// steps; without marks the whole profile is one step.
///
/// # Errors
/// Two profiles are of one rank, or ranks run their collectives in different orders.
pub fn replay<'a>(
    profiles: &'a [Profile],
    picked: Option<&dyn Fn(&str) -> bool>,
) -> Result<Composed<'a>, InputError> {
    refuse_twins(profiles)?;
    let ranks = members(profiles);
    let alignment = align(&ranks);
    let mut offsets_ns = vec![0; profiles.len()];
    let mut notes = Vec::new();
    if let Some(alignment) = &alignment {
        for (member, aligned) in ranks.iter().zip(&alignment.ranks) {
            offsets_ns[index_of(profiles, member)] = aligned.clock_offset_ns;
        }
        let unmatched = alignment.unmatched.iter();
        notes.extend(unmatched.map(|what| format!("collectives not matched: {what}")));
    }
    let mut builder = Builder::default();
    let mut lanes = Vec::new();
    let mut names = Vec::new();
    for (profile, offset_ns) in profiles.iter().zip(&offsets_ns) {
        let windows = Windows::of(profile, picked);
        let mut steps: Vec<String> = windows.names().map(str::to_owned).collect();
        let whole = steps.is_empty() && picked.is_none();
        if whole {
            steps.push("whole trace".to_owned());
        }
        lanes.push(builder.lanes(profile, (!whole).then_some(&windows), *offset_ns));
        names.push(steps);
    }
    let met = builder.meet(profiles, &ranks, &lanes);
    let ran = builder.schedule.run().map_err(|Deadlock { works }| {
        InputError::new(
            &profiles[0].file,
            format!("{works} works wait for one another: the ranks run their collectives in different orders"),
            "give files of one run, cut at the same steps",
        )
    })?;
    let mut reported = Vec::new();
    for member in &ranks {
        let at = index_of(profiles, member);
        let reporter = Reporter {
            member,
            lanes: &lanes[at],
            ran: &ran,
            stands: &builder.stands,
        };
        reported.push(reporter.rank(&names[at], met));
    }
    Ok(Composed {
        report: Replay {
            ranks: reported,
            notes,
        },
        profiles,
        lanes,
        ran,
        offsets_ns,
    })
}

fn index_of(profiles: &[Profile], member: &Member<'_>) -> usize {
    let same = |profile: &Profile| std::ptr::eq(profile, member.profile);
    profiles.iter().position(same).unwrap_or(0)
}

#[derive(Default)]
struct Builder {
    schedule: Schedule,
    stands: Vec<Stands>,
}

impl Builder {
    fn add(&mut self, ns: i64, stands: Stands) -> WorkId {
        self.stands.push(stands);
        self.schedule.add(ns)
    }

    /// Lays a profile out: first all work, then what it comes after. Without `windows` all work is
    /// of one step.
    fn lanes(&mut self, profile: &Profile, windows: Option<&Windows>, offset_ns: i64) -> Lanes {
        let launches = Launches::of(profile);
        let links = Links::of(profile);
        let sync_ns = links.rows.sync_return_ns;
        let mut calls = Vec::with_capacity(links.calls.len());
        for link in &links.calls {
            let host = &profile.host[link.host];
            // A call that waited shows no more of its own work than its return.
            let own_ns = if link.waited {
                host.span.ns().min(sync_ns)
            } else {
                host.span.ns()
            };
            let own = self.add(own_ns, Stands::Call(host.call));
            let waits = !link.awaited.is_empty();
            calls.push((own, waits.then(|| self.add(0, Stands::Wait))));
        }
        let mut works = Vec::with_capacity(links.works.len());
        for link in &links.works {
            let event = &profile.gpu[link.gpu];
            let untraced = link.untraced_ns;
            let hidden = (untraced > 0).then(|| self.add(untraced, Stands::Untraced));
            let stands = match link.launch {
                Some(_) => Stands::Work {
                    collective: is_collective(profile, event),
                },
                None => Stands::Inherited,
            };
            works.push((hidden, self.add(event.span.ns(), stands)));
        }
        let step_of = |link: &WorkLink| {
            let event = &profile.gpu[link.gpu];
            match windows {
                Some(windows) => windows
                    .of_work(event, &launches)
                    .filter(|_| link.launch.is_some()),
                None => Some(0),
            }
        };
        let steps = links.works.iter().map(step_of).collect();
        let lanes = Lanes {
            links,
            calls,
            works,
            steps,
        };
        for (at, link) in lanes.links.calls.iter().enumerate() {
            self.bind_call(profile, &lanes, at, link, offset_ns);
        }
        for (at, link) in lanes.links.works.iter().enumerate() {
            self.bind_work(profile, &lanes, at, link, offset_ns);
        }
        lanes
    }

    fn bind_call(
        &mut self,
        profile: &Profile,
        lanes: &Lanes,
        at: usize,
        link: &CallLink,
        offset_ns: i64,
    ) {
        let host = &profile.host[link.host];
        let (own, wait) = lanes.calls[at];
        let mut bound = |after| self.schedule.bound(own, after);
        match link.before {
            Some(before) => {
                let gap_ns =
                    host.span.start_ns - profile.host[lanes.links.calls[before].host].span.end_ns;
                bound(After::End(lanes.done(before), gap_ns));
            }
            None => bound(After::Time(host.span.start_ns.saturating_sub(offset_ns))),
        }
        if let Some(before) = link.own_before.filter(|own| Some(*own) != link.before) {
            bound(After::End(lanes.done(before), 0));
        }
        if let Some(wait) = wait {
            self.schedule.bound(wait, After::End(own, 0));
            for work in &link.awaited {
                let return_ns = lanes.links.rows.sync_return_ns;
                self.schedule
                    .bound(wait, After::End(lanes.works[*work].1, return_ns));
            }
        }
    }

    fn bind_work(
        &mut self,
        profile: &Profile,
        lanes: &Lanes,
        at: usize,
        link: &WorkLink,
        offset_ns: i64,
    ) {
        let event = &profile.gpu[link.gpu];
        let rows = &lanes.links.rows;
        let (hidden, work) = lanes.works[at];
        if let Some(hidden) = hidden {
            self.schedule.bound(work, After::End(hidden, 0));
        }
        let first = hidden.unwrap_or(work);
        let mut bound = |after| self.schedule.bound(first, after);
        let before = link.before.map(|before| lanes.works[before].1);
        let Some(call) = link.launch else {
            // What the profile's begin found on the streams: its own distances are all there is.
            match (before, link.before) {
                (Some(before), Some(at)) => {
                    let last = &profile.gpu[lanes.links.works[at].gpu];
                    bound(After::End(before, event.span.start_ns - last.span.end_ns));
                }
                _ => bound(After::Time(event.span.start_ns.saturating_sub(offset_ns))),
            }
            return;
        };
        let caller = &lanes.links.calls[call];
        let kind = profile.host[caller.host].call;
        bound(After::Begin(lanes.calls[call].0, rows.launch(kind)));
        if let (false, Some(lag_ns)) = (caller.waited, rows.launch_return(kind)) {
            bound(After::End(lanes.calls[call].0, lag_ns));
        }
        if let Some(before) = before {
            bound(After::End(before, rows.turn_around_ns));
        }
        for other in &link.waits {
            bound(After::End(lanes.works[*other].1, 0));
        }
    }

    /// Lets the k-th collective of each kind meet on all ranks, where all have equally many; how
    /// many of each rank's.
    fn meet(&mut self, profiles: &[Profile], ranks: &[Member<'_>], lanes: &[Lanes]) -> usize {
        if ranks.len() < 2 {
            return 0;
        }
        let all = in_common_order(ranks, |member, gpu| {
            let lanes = &lanes[index_of(profiles, member)];
            let at = lanes
                .links
                .works
                .binary_search_by_key(&gpu, |link| link.gpu);
            Some(lanes.works[at.ok()?].1)
        });
        let mut met = 0;
        for (kind, first) in &all[0] {
            let others: Option<Vec<&Vec<WorkId>>> = (all.iter())
                .map(|kinds| kinds.get(kind).filter(|works| works.len() == first.len()))
                .collect();
            for at in 0..others.as_ref().map_or(0, |_| first.len()) {
                let together = others.iter().flatten().map(|works| works[at]);
                self.schedule.meet(together.collect());
                met += 1;
            }
        }
        met
    }
}

fn is_collective(profile: &Profile, event: &GpuEvent) -> bool {
    event.work == Work::Kernel && collective_kind(profile.names.text(event.name)).is_some()
}

/// Reads one rank's steps off what ran.
struct Reporter<'a> {
    member: &'a Member<'a>,
    lanes: &'a Lanes,
    ran: &'a [Ran],
    stands: &'a [Stands],
}

impl Reporter<'_> {
    fn rank(&self, names: &[String], matched_collectives: usize) -> RankReplay {
        let works = || {
            let own = |work: &usize| self.event(*work).device == self.member.device;
            (0..self.lanes.works.len()).filter(own)
        };
        let step = |(number, name): (usize, &String)| {
            let of_step = works().filter(|work| self.lanes.steps[*work] == Some(number));
            self.step(name, &of_step.collect::<Vec<usize>>())
        };
        let launch = |work: &usize| self.lanes.links.works[*work].launch;
        let collective = |work: &usize| self.lanes.is_collective(self.member.profile, *work);
        RankReplay {
            rank: self.member.label.clone(),
            file: self.member.profile.file.clone(),
            rows: self.lanes.links.rows.clone(),
            steps: names.iter().enumerate().filter_map(step).collect(),
            without_launch: works().filter(|work| launch(work).is_none()).count(),
            collectives: works().filter(collective).count(),
            matched_collectives,
        }
    }

    fn event(&self, work: usize) -> &GpuEvent {
        &self.member.profile.gpu[self.lanes.links.works[work].gpu]
    }

    /// `None`: the step launched nothing on this device.
    fn step(&self, name: &str, works: &[usize]) -> Option<StepReplay> {
        let traced = || works.iter().map(|work| self.event(*work).span);
        let composed = || works.iter().map(|work| self.lanes.works[*work].1);
        let first_ns = composed().map(|id| self.ran[id.0].begin_ns).min()?;
        let last = composed().max_by_key(|id| (self.ran[id.0].end_ns, std::cmp::Reverse(*id)))?;
        let mut calls: Vec<usize> = (works.iter())
            .filter_map(|work| self.lanes.links.works[*work].launch)
            .collect();
        calls.dedup();
        let span_of_calls = calls.first().zip(calls.last());
        let host_wait = |(first, last): (&usize, &usize)| {
            let waits = self.lanes.calls[*first..=*last].iter();
            sum_ns(waits.filter_map(|(own, wait)| {
                let wait = wait.as_ref()?;
                Some(self.ran[wait.0].begin_ns - self.ran[own.0].end_ns)
            }))
        };
        Some(StepReplay {
            name: name.to_owned(),
            works: works.len(),
            traced_ns: traced().map(|span| span.end_ns).max()?
                - traced().map(|span| span.start_ns).min()?,
            composed_ns: self.ran[last.0].end_ns - first_ns,
            parts_ns: self.parts(last, first_ns),
            host_wait_ns: span_of_calls.map_or(0, host_wait),
            peer_wait_ns: sum_ns(composed().map(|id| self.ran[id.0].wait_ns())),
            untraced_ns: sum_ns(
                (works.iter()).map(|work| self.lanes.links.works[*work].untraced_ns),
            ),
        })
    }

    /// The path to the end of `last`, back to `from_ns`, by part.
    fn parts(&self, last: WorkId, from_ns: i64) -> BTreeMap<ReplayPart, i64> {
        let mut parts = BTreeMap::new();
        let mut at_ns = self.ran[last.0].end_ns;
        // The path down to `to_ns` belongs to `part`.
        let mut pass = |part: ReplayPart, to_ns: i64| {
            let to_ns = to_ns.clamp(from_ns, at_ns.max(from_ns));
            if at_ns > to_ns {
                *parts.entry(part).or_insert(0) += at_ns - to_ns;
                at_ns = to_ns;
            }
            at_ns > from_ns
        };
        let mut work = last;
        let mut own = true;
        loop {
            let run = self.ran[work.0];
            if own && !pass(self.own_part(work), run.begin_ns) {
                return parts;
            }
            let held = run.begun_by;
            let (before, reached_ns) = match run.held_by {
                After::End(before, _) => (before, self.ran[before.0].end_ns),
                After::Begin(before, _) => (before, self.ran[before.0].begin_ns),
                After::Time(ns) => {
                    // Nothing came before: what is left is the state that the lanes start from.
                    pass(self.own_part(held), ns.min(from_ns));
                    return parts;
                }
            };
            if !pass(self.lag_part(held, before), reached_ns) {
                return parts;
            }
            own = matches!(run.held_by, After::End(..));
            work = before;
        }
    }

    fn own_part(&self, work: WorkId) -> ReplayPart {
        match self.stands[work.0] {
            Stands::Call(Call::GraphLaunch) => ReplayPart::GraphLaunch,
            Stands::Call(_) => ReplayPart::HostDispatch,
            Stands::Wait => ReplayPart::SyncReturn,
            Stands::Untraced => ReplayPart::UntracedInGraph,
            Stands::Inherited => ReplayPart::Inherited,
            Stands::Work { collective: true } => ReplayPart::Transfer,
            Stands::Work { collective: false } => ReplayPart::Kernel,
        }
    }

    /// The part of the time between a work and the one it came after.
    fn lag_part(&self, work: WorkId, before: WorkId) -> ReplayPart {
        match (self.stands[work.0], self.stands[before.0]) {
            (Stands::Call(_), _) => ReplayPart::HostDispatch,
            (Stands::Wait, _) => ReplayPart::SyncReturn,
            (Stands::Inherited, _) => ReplayPart::Inherited,
            (_, Stands::Call(_) | Stands::Wait) => ReplayPart::LaunchLatency,
            _ => ReplayPart::TurnAround,
        }
    }
}
