//! Timing rows out of profiles.
//!
//! A profiler slows down what it watches, so these rows are diagnostic: they stand apart in the
//! host file, and no prediction is composed of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use crate::timing::{
    Boundary, CaptureOutcome, Diagnostic, Execution, HostFile, InputError, IterationCounts,
    Observer, ProfileCapture, Provenance, Row, Samples, Scope, SourceCell,
};

use super::collective::{align, collective_kind};
use super::event::{Call, GpuEvent, Profile, Span, Work};
use super::idle::Blocked;
use super::iteration::{Iteration, Windows, iterations};
use super::launch::Launches;
use super::spread::Spread;
use super::summary::{Counted, members, refuse_twins};

/// Times of one kind, by the mode of the iterations they were taken in and by what was timed.
type Times = BTreeMap<(Boundary, &'static str, String), Vec<i64>>;

/// Turns the profiles of one run, a rank each, into the rows of a host file. The ids of rows begin
/// with `name`; `picked` chooses the marks that stand for iterations.
///
/// # Errors
/// A profile holds no GPU work or does not fit the scope's topology, two have the same rank, or
/// there is nothing to make a row of.
pub fn import(
    profiles: &[Profile],
    scope: Scope,
    name: &str,
    picked: Option<&dyn Fn(&str) -> bool>,
) -> Result<HostFile, InputError> {
    refuse_twins(profiles)?;
    let ranks = scope.topology.ranks();
    let mut diagnostic = Diagnostic {
        profiles: Vec::new(),
        rows: Vec::new(),
    };
    for profile in profiles {
        check(profile, ranks)?;
        let timed = Timed::of(profile, picked);
        diagnostic.profiles.push(timed.capture());
        let whose = match (profile.rank, profile.process) {
            (Some(rank), _) => format!("rank{rank}"),
            (None, Some(process)) => format!("process{process}"),
            (None, None) => "unknown-rank".to_owned(),
        };
        for ((boundary, mode, module), times_ns) in timed.times() {
            let row = Timing {
                boundary,
                mode,
                module,
                times_ns,
            };
            let number = diagnostic.rows.len() + 1;
            let id = format!("{name}-{number}-{whose}-{boundary}-{mode}");
            diagnostic.rows.extend(row.into_row(id, profile));
        }
    }
    diagnostic.rows.extend(transfers(profiles, ranks, name));
    if diagnostic.rows.is_empty() {
        let file = profiles.first().map_or("", |profile| profile.file.as_str());
        return Err(InputError::new(
            file,
            "the profile holds nothing that a timing row could be made of",
            "record it with CUDA activities, and name the iterations with --iteration",
        ));
    }
    Ok(HostFile {
        scope,
        rows: Vec::new(),
        diagnostic: Some(diagnostic),
    })
}

fn check(profile: &Profile, ranks: u32) -> Result<(), InputError> {
    let refused = |what: String, help: &str| Err(InputError::new(&profile.file, what, help));
    if profile.gpu.is_empty() {
        return refused(
            "the profile holds no GPU work".to_owned(),
            "record it with CUDA activities",
        );
    }
    match (profile.rank, profile.world) {
        (_, Some(world)) if world != ranks => refused(
            format!("the profile is of a run with {world} ranks, the topology has {ranks}"),
            "give the topology that the run had",
        ),
        (Some(rank), _) if rank >= ranks => refused(
            format!("the profile is of rank {rank}, the topology has {ranks} ranks"),
            "give the topology that the run had",
        ),
        _ => Ok(()),
    }
}

/// A profile with its iterations.
struct Timed<'a> {
    profile: &'a Profile,
    launches: Launches<'a>,
    windows: Windows,
    iterations: Vec<Iteration>,
    modes: Vec<&'static str>,
}

impl<'a> Timed<'a> {
    fn of(profile: &'a Profile, picked: Option<&dyn Fn(&str) -> bool>) -> Self {
        let launches = Launches::of(profile);
        let windows = Windows::of(profile, picked);
        let iterations = iterations(profile, &windows, &launches, &Blocked::of(profile));
        let modes = iterations.iter().map(mode).collect();
        Self {
            profile,
            launches,
            windows,
            iterations,
            modes,
        }
    }

    fn mode(&self, window: Option<usize>) -> &'static str {
        window.map_or(UNKNOWN, |window| self.modes[window])
    }

    fn capture(&self) -> ProfileCapture {
        let of_mode = |mode: &str| self.modes.iter().filter(|one| **one == mode).count();
        let graph_launches: Vec<Option<u64>> = self
            .profile
            .host
            .iter()
            .filter(|event| event.call == Call::GraphLaunch)
            .map(|event| event.correlation)
            .collect();
        let with_work: BTreeSet<u64> = self
            .profile
            .gpu
            .iter()
            .filter(|event| event.in_graph)
            .filter_map(|event| event.correlation)
            .collect();
        let without_launch = |event: &&GpuEvent| self.launches.launch(event).is_none();
        ProfileCapture {
            file: file_name(self.profile),
            sha256: self.profile.sha256.clone(),
            rank: self.profile.rank,
            gpu_events: self.profile.gpu.len(),
            gpu_events_without_launch: self.profile.gpu.iter().filter(without_launch).count(),
            graph_trace: self.profile.graph_trace.name().to_owned(),
            graph_launches: graph_launches.len(),
            graph_launches_with_work: graph_launches
                .iter()
                .filter(|id| id.is_some_and(|id| with_work.contains(&id)))
                .count(),
            iterations: IterationCounts {
                eager: of_mode(EAGER),
                full_graph: of_mode(FULL_GRAPH),
                unknown: of_mode(UNKNOWN),
            },
        }
    }

    fn times(&self) -> Times {
        let mut times = Times::new();
        let mut add = |boundary, mode, module: &str, ns| {
            times
                .entry((boundary, mode, module.to_owned()))
                .or_default()
                .push(ns);
        };
        for (iteration, mode) in self.iterations.iter().zip(&self.modes) {
            if let Some(ns) = iteration.dispatch_ns {
                add(Boundary::HostDispatch, mode, "iteration", ns);
            }
        }
        for event in &self.profile.host {
            if event.call == Call::GraphLaunch {
                let mode = self.mode(self.windows.at(event.span.start_ns));
                add(Boundary::GraphLaunch, mode, "graph", event.span.ns());
            }
        }
        let counted = Counted::of(self.profile);
        let mut replays: HashMap<(u32, u64), (&'static str, Span)> = HashMap::new();
        for event in self.profile.gpu.iter().filter(|event| counted.once(event)) {
            let mode = self.mode(self.windows.of_work(event, &self.launches));
            if event.work == Work::GraphReplay {
                add(Boundary::GraphReplay, mode, "graph", event.span.ns());
                continue;
            }
            if let Some(id) = event.correlation.filter(|_| event.in_graph) {
                let (_, span) = replays
                    .entry((event.device, id))
                    .or_insert((mode, event.span));
                span.end_ns = span.end_ns.max(event.span.end_ns);
            }
            let name = self.profile.names.text(event.name);
            if event.work == Work::Kernel && collective_kind(name).is_none() {
                add(Boundary::GpuKernel, mode, name, event.span.ns());
            }
        }
        for (mode, span) in replays.into_values() {
            add(Boundary::GraphReplay, mode, "graph", span.ns());
        }
        times
    }
}

const EAGER: &str = "eager";
const FULL_GRAPH: &str = "full_graph";
const UNKNOWN: &str = "unknown";

/// How an iteration was executed, where its calls say so: with single launches and no graph it was
/// eager; with one graph launch whose work fills most of its busy time the forward was one graph.
/// Several graphs may be pieces or several forwards.
fn mode(iteration: &Iteration) -> &'static str {
    let busy_ns: i64 = iteration.devices.iter().map(|one| one.busy_ns).sum();
    let of_graph_ns: i64 = iteration.devices.iter().map(|one| one.graph_busy_ns).sum();
    match (iteration.launches, iteration.graph_launches) {
        (1.., 0) => EAGER,
        (_, 1) if of_graph_ns > busy_ns - of_graph_ns => FULL_GRAPH,
        _ => UNKNOWN,
    }
}

fn execution(mode: &str) -> Execution {
    match mode {
        EAGER => Execution::Eager,
        // The size of the captured batch is not in a profile.
        FULL_GRAPH => Execution::FullGraph { captured_batch: 0 },
        _ => Execution::Unknown,
    }
}

/// Samples on their way to a row.
struct Timing {
    boundary: Boundary,
    mode: &'static str,
    module: String,
    times_ns: Vec<i64>,
}

impl Timing {
    /// `None`: the times are all zero, below the clock's resolution.
    fn into_row(self, id: String, profile: &Profile) -> Option<Row> {
        let spread = Spread::of(self.times_ns)?;
        let source = SourceCell {
            table: file_name(profile),
            row: format!("{} iterations", self.mode),
            column: format!("{} mean", self.boundary),
        };
        row(
            id,
            self.boundary,
            execution(self.mode),
            self.module,
            &spread,
            source,
        )
        .map(|row| Row {
            rank: profile.rank,
            samples: Samples {
                artefact_sha256: Some(profile.sha256.clone()),
                ..row.samples
            },
            ..row
        })
    }
}

fn row(
    id: String,
    boundary: Boundary,
    execution: Execution,
    module: String,
    spread: &Spread,
    source: SourceCell,
) -> Option<Row> {
    let ms = |ns: i64| ns as f64 / 1e6;
    (spread.sum_ns > 0).then(|| Row {
        id,
        boundary,
        execution,
        capture: CaptureOutcome::Succeeded,
        module,
        phase: UNKNOWN.to_owned(),
        rank: None,
        includes: Vec::new(),
        shape: BTreeMap::new(),
        samples: Samples {
            mean_ms: ms(spread.sum_ns) / spread.count as f64,
            count: Some(spread.count as u64),
            p50_ms: Some(ms(spread.p50_ns)),
            min_ms: Some(ms(spread.min_ns)),
            max_ms: Some(ms(spread.max_ns)),
            observer: Observer::Profiler,
            artefact_sha256: None,
        },
        provenance: Provenance::Measured { source },
        scope: None,
    })
}

/// Transfer times of collectives, which only all ranks together tell: what one rank spends in a
/// collective holds its wait.
fn transfers(profiles: &[Profile], ranks: u32, name: &str) -> Vec<Row> {
    let members = members(profiles);
    let complete = members.len() == ranks as usize && members.len() == profiles.len();
    let Some(alignment) = complete.then(|| align(&members)).flatten() else {
        return Vec::new();
    };
    let files: Vec<String> = profiles.iter().map(file_name).collect();
    alignment
        .kinds
        .iter()
        .filter_map(|matched| {
            let source = SourceCell {
                table: files.join(", "),
                row: format!("{}: shortest of all ranks", matched.kind),
                column: "collective_transfer mean".to_owned(),
            };
            row(
                format!("{name}-collective_transfer-{}", matched.kind),
                Boundary::CollectiveTransfer,
                Execution::Unknown,
                matched.kind.to_owned(),
                &matched.transfer,
                source,
            )
        })
        .collect()
}

fn file_name(profile: &Profile) -> String {
    let path = Path::new(&profile.file);
    path.file_name()
        .map_or_else(|| profile.file.clone(), |name| name.display().to_string())
}
