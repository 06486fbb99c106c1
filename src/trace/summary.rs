//! What a profile says of its devices and calls: the figures behind `stepgate trace summary`.
//!
//! Serialised, these types are the output of `trace summary --json`. Times are integer nanoseconds.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::Serialize;

use crate::timing::InputError;

use super::blocking::{Blocking, blocking};
use super::collective::{Alignment, CollectiveKernels, Member, align, kernels};
use super::event::{Call, GpuEvent, GraphTrace, Profile, Work};
use super::idle::{Blocked, Idle, split};
use super::interval::{sum_ns, total_ns, union};
use super::iteration::{Iteration, Windows, iterations};
use super::launch::Launches;
use super::spread::Spread;

/// Everything about a set of profiles.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub profiles: Vec<ProfileSummary>,
    /// Collectives of several ranks laid over one another; `None`: a single rank, or no collective.
    pub collectives: Option<Alignment>,
    /// Ranks that the profiles' world has and the files do not, where it is known.
    pub ranks_missing: Option<u32>,
}

/// One process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProfileSummary {
    pub file: String,
    pub sha256: String,
    pub rank: Option<u32>,
    pub world: Option<u32>,
    pub process: Option<u64>,
    pub devices: Vec<DeviceSummary>,
    pub calls: Calls,
    pub graphs: Graphs,
    /// Time that calls blocked, by call and caller.
    pub blocking: Vec<Blocking>,
    pub iterations: Vec<Iteration>,
    pub warnings: Vec<String>,
}

/// One GPU of a process. `busy_ns` and the parts of `idle` add up to `span_ns`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceSummary {
    pub device: u32,
    /// From the start of the first work to the end of the last.
    pub span_ns: i64,
    /// Length of the union of all kernels, copies, sets and graph replays.
    pub busy_ns: i64,
    pub idle: Idle,
    /// Sum of durations: more than `busy_ns` where work overlaps.
    pub sum_ns: i64,
    pub work: Vec<WorkSummary>,
    /// From the begin of a launch call to the start of the first work it launched.
    pub delay: Option<Delay>,
    pub collectives: Vec<CollectiveKernels>,
}

/// Work of one kind. A graph replay that the profile also holds node by node counts as its nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WorkSummary {
    pub kind: &'static str,
    pub count: usize,
    pub sum_ns: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Delay {
    pub spread: Spread,
    /// Work that starts before its launch call begins: clocks disagree.
    pub before_call: usize,
    /// Work that starts before its launch call returns.
    pub before_return: usize,
    /// Work whose launch call the profile does not show.
    pub without_launch: usize,
}

/// Host calls by what they do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Calls {
    pub total: usize,
    pub launches: usize,
    pub graph_launches: usize,
    pub transfers: usize,
    pub synchronisations: usize,
    pub event_records: usize,
    pub stream_waits: usize,
    /// Sum of the blocking calls' durations.
    pub blocked_ns: i64,
}

/// How graph replays were traced, and the work that graphs own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Graphs {
    /// `none`, `whole`, `nodes`, `both` or `missing`.
    pub trace: &'static str,
    /// Pieces of work: nodes, or whole replays where there are no nodes.
    pub events: usize,
    pub sum_ns: i64,
}

impl GraphTrace {
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Whole => "whole",
            Self::Nodes => "nodes",
            Self::Both => "both",
            Self::Missing => "missing",
        }
    }
}

impl Work {
    const ALL: [Self; 4] = [Self::Kernel, Self::Copy, Self::Set, Self::GraphReplay];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernels",
            Self::Copy => "copies",
            Self::Set => "sets",
            Self::GraphReplay => "graph replays",
        }
    }
}

/// Summarises `profiles`. `iteration` picks the marks that stand for iterations by their names.
///
/// # Errors
/// Two profiles have the same rank.
pub fn summarise(
    profiles: &[Profile],
    iteration: Option<&dyn Fn(&str) -> bool>,
) -> Result<Summary, InputError> {
    refuse_twins(profiles)?;
    let world = profiles.iter().filter_map(|profile| profile.world).max();
    let ranks = profiles.iter().filter(|profile| profile.rank.is_some());
    let ranks = u32::try_from(ranks.count()).unwrap_or(u32::MAX);
    Ok(Summary {
        profiles: profiles
            .iter()
            .map(|profile| of_profile(profile, iteration))
            .collect(),
        collectives: align(&members(profiles)),
        ranks_missing: world.map(|world| world.saturating_sub(ranks)),
    })
}

/// Two files of one rank would be laid over one another as if they were two.
///
/// # Errors
/// Two profiles have the same rank.
pub fn refuse_twins(profiles: &[Profile]) -> Result<(), InputError> {
    let mut seen: BTreeMap<u32, &Profile> = BTreeMap::new();
    for profile in profiles {
        let Some(rank) = profile.rank else { continue };
        if let Some(twin) = seen.insert(rank, profile) {
            return Err(InputError::new(
                &profile.file,
                format!("is of rank {rank}, and so is {}", twin.file),
                "give one file per rank of one run",
            ));
        }
    }
    Ok(())
}

/// The devices of all profiles, each a rank.
pub fn members(profiles: &[Profile]) -> Vec<Member<'_>> {
    let mut members = Vec::new();
    for (at, profile) in profiles.iter().enumerate() {
        let devices = devices(profile);
        for device in &devices {
            let mut label = match (profile.rank, profile.process) {
                (Some(rank), _) => format!("rank {rank}"),
                (None, Some(process)) => format!("process {process}"),
                (None, None) => format!("profile {}", at + 1),
            };
            if devices.len() > 1 {
                label = format!("{label}, device {device}");
            }
            members.push(Member {
                label,
                profile,
                device: *device,
            });
        }
    }
    members
}

fn devices(profile: &Profile) -> BTreeSet<u32> {
    profile.gpu.iter().map(|event| event.device).collect()
}

fn of_profile(profile: &Profile, picked: Option<&dyn Fn(&str) -> bool>) -> ProfileSummary {
    let launches = Launches::of(profile);
    let blocked = Blocked::of(profile);
    let counted = Counted::of(profile);
    let devices = devices(profile)
        .into_iter()
        .map(|device| {
            let events: Vec<&GpuEvent> = profile
                .gpu
                .iter()
                .filter(|event| event.device == device)
                .collect();
            of_device(profile, device, &events, &launches, &blocked, &counted)
        })
        .collect();
    let of_graphs: Vec<i64> = profile
        .gpu
        .iter()
        .filter(|event| event.in_graph && counted.once(event))
        .map(|event| event.span.ns())
        .collect();
    let windows = Windows::of(profile, picked);
    ProfileSummary {
        file: profile.file.clone(),
        sha256: profile.sha256.clone(),
        rank: profile.rank,
        world: profile.world,
        process: profile.process,
        devices,
        calls: Calls::of(profile),
        graphs: Graphs {
            trace: profile.graph_trace.name(),
            events: of_graphs.len(),
            sum_ns: sum_ns(of_graphs),
        },
        blocking: blocking(profile),
        iterations: iterations(profile, &windows, &launches, &blocked),
        warnings: profile.warnings.clone(),
    }
}

fn of_device(
    profile: &Profile,
    device: u32,
    events: &[&GpuEvent],
    launches: &Launches<'_>,
    blocked: &Blocked,
    counted: &Counted,
) -> DeviceSummary {
    let busy = union(events.iter().map(|event| event.span));
    let first_ns = busy.first().map_or(0, |span| span.start_ns);
    let last_ns = busy.last().map_or(0, |span| span.end_ns);
    let work = Work::ALL
        .into_iter()
        .filter_map(|kind| {
            let times_ns: Vec<i64> = events
                .iter()
                .filter(|event| event.work == kind && counted.once(event))
                .map(|event| event.span.ns())
                .collect();
            (!times_ns.is_empty()).then(|| WorkSummary {
                kind: kind.name(),
                count: times_ns.len(),
                sum_ns: sum_ns(times_ns),
            })
        })
        .collect::<Vec<_>>();
    DeviceSummary {
        device,
        span_ns: last_ns - first_ns,
        busy_ns: total_ns(&busy),
        idle: split(events.iter().copied(), launches, blocked),
        sum_ns: sum_ns(work.iter().map(|work| work.sum_ns)),
        work,
        delay: Delay::of(events, launches),
        collectives: kernels(profile, device),
    }
}

/// Which work counts where a replay may stand in the profile whole and node by node.
pub(super) struct Counted {
    with_nodes: HashSet<(u32, u64)>,
}

impl Counted {
    pub fn of(profile: &Profile) -> Self {
        Self {
            with_nodes: profile
                .gpu
                .iter()
                .filter(|event| event.in_graph && event.work != Work::GraphReplay)
                .filter_map(|event| Some((event.device, event.correlation?)))
                .collect(),
        }
    }

    /// False for a replay whose nodes are counted.
    pub fn once(&self, event: &GpuEvent) -> bool {
        event.work != Work::GraphReplay
            || event
                .correlation
                .is_none_or(|id| !self.with_nodes.contains(&(event.device, id)))
    }
}

impl Calls {
    fn of(profile: &Profile) -> Self {
        let mut calls = Self::default();
        for event in &profile.host {
            calls.total += 1;
            match event.call {
                Call::Launch => calls.launches += 1,
                Call::GraphLaunch => calls.graph_launches += 1,
                Call::Transfer => calls.transfers += 1,
                Call::Synchronise => {
                    calls.synchronisations += 1;
                    calls.blocked_ns = calls.blocked_ns.saturating_add(event.span.ns());
                }
                Call::EventRecord => calls.event_records += 1,
                Call::StreamWait => calls.stream_waits += 1,
                Call::Other => {}
            }
        }
        calls
    }
}

impl Delay {
    /// `None`: no work with a known launch. Of the work of one call the first counts: the nodes of
    /// a graph wait for each other.
    fn of(events: &[&GpuEvent], launches: &Launches<'_>) -> Option<Self> {
        let mut first: HashMap<u64, (i64, i64)> = HashMap::new();
        let mut without_launch = 0;
        for event in events {
            let Some((id, call)) = event.correlation.zip(launches.launch(event)) else {
                without_launch += 1;
                continue;
            };
            let after_call_ns = event.span.start_ns - call.span.start_ns;
            let after_return_ns = event.span.start_ns - call.span.end_ns;
            // Sorted by start.
            first.entry(id).or_insert((after_call_ns, after_return_ns));
        }
        let before =
            |of: fn(&(i64, i64)) -> i64| first.values().filter(|times| of(times) < 0).count();
        Some(Self {
            spread: Spread::of(first.values().map(|times| times.0).collect())?,
            before_call: before(|times| times.0),
            before_return: before(|times| times.1),
            without_launch,
        })
    }
}
