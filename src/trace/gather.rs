//! Collects the events of one process, whatever reader they come from, into a [`Profile`].

use std::collections::{HashMap, HashSet};

use super::event::{
    Call, GpuEvent, GraphTrace, HostEvent, Mark, MarkKind, NameId, Names, Profile, Span, Work,
};

/// Latest time that is taken for one, and earliest with a minus: some 73 years. What epoch clocks
/// give fits, and differences of two times fit an `i64`.
const TIME_MAX_NS: i64 = 1 << 61;

fn fits(time_ns: i64) -> bool {
    (-TIME_MAX_NS..=TIME_MAX_NS).contains(&time_ns)
}

/// Where a profile came from and whom it belongs to.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub file: String,
    pub sha256: String,
    pub rank: Option<u32>,
    pub world: Option<u32>,
    pub process: Option<u64>,
}

/// The events of one process while its file is read.
#[derive(Debug, Default)]
pub(super) struct Gather {
    pub names: Names,
    pub gpu: Vec<GpuEvent>,
    pub host: Vec<HostEvent>,
    pub marks: Vec<Mark>,
    left_out: Vec<(String, u64)>,
}

impl Gather {
    /// From `start_ns` to `end_ns`; `None`, counted, where that runs backwards.
    pub fn span(&mut self, start_ns: i64, end_ns: i64) -> Option<Span> {
        if !fits(start_ns) || !fits(end_ns) {
            self.count("events at an impossible time: left out");
            return None;
        }
        if end_ns < start_ns {
            self.count("events end before they start: left out");
            return None;
        }
        Some(Span { start_ns, end_ns })
    }

    /// Counts something odd, in words that follow a number.
    pub fn count(&mut self, what: &str) {
        self.count_many(what, 1);
    }

    pub fn count_many(&mut self, what: &str, times: u64) {
        match self.left_out.iter_mut().find(|(known, _)| known == what) {
            Some((_, count)) => *count += times,
            None => self.left_out.push((what.to_owned(), times)),
        }
    }

    pub fn host_call(&mut self, span: Span, thread: u64, correlation: Option<u64>, name: &str) {
        self.host.push(HostEvent {
            span,
            call: Call::of(name),
            thread,
            correlation,
            stream: None,
            name: self.names.id(name),
        });
    }

    pub fn mark(&mut self, span: Span, kind: MarkKind, thread: u64, name: NameId) {
        self.marks.push(Mark {
            span,
            kind,
            thread,
            name,
        });
    }

    /// Moves every event by `by_ns`; not at all, counted, where the clock would overflow.
    pub fn shift(&mut self, by_ns: i64) {
        let spans = || {
            let gpu = self.gpu.iter().map(|event| event.span);
            let host = self.host.iter().map(|event| event.span);
            gpu.chain(host)
                .chain(self.marks.iter().map(|mark| mark.span))
        };
        let stays = |time_ns: i64| time_ns.checked_add(by_ns).is_some_and(fits);
        if !spans().all(|span| stays(span.start_ns) && stays(span.end_ns)) {
            self.count("base time that does not fit: times are relative to it");
            return;
        }
        let moved = |span: &mut Span| {
            span.start_ns += by_ns;
            span.end_ns += by_ns;
        };
        self.gpu.iter_mut().for_each(|event| moved(&mut event.span));
        self.host
            .iter_mut()
            .for_each(|event| moved(&mut event.span));
        self.marks.iter_mut().for_each(|mark| moved(&mut mark.span));
    }

    /// Sorts the events, finds which work graphs own, and says what is odd.
    pub fn finish(mut self, source: Source) -> Profile {
        self.gpu
            .sort_by_key(|event| (event.span, event.device, event.stream));
        self.host.sort_by_key(|event| (event.span, event.thread));
        self.marks
            .sort_by_key(|mark| (mark.span.start_ns, -mark.span.end_ns));
        let mut warnings: Vec<String> = self
            .left_out
            .iter()
            .map(|(what, count)| format!("{count} {what}"))
            .collect();
        let graph_trace = self.graphs(&mut warnings);
        if self.gpu.is_empty() {
            warnings.push("the profile holds no GPU work".to_owned());
        }
        self.compare_clocks(&mut warnings);
        Profile {
            file: source.file,
            sha256: source.sha256,
            rank: source.rank,
            world: source.world,
            process: source.process,
            names: self.names,
            gpu: self.gpu,
            host: self.host,
            marks: self.marks,
            graph_trace,
            warnings,
        }
    }

    /// Work that shares the correlation of a graph launch is the graph's.
    fn graphs(&mut self, warnings: &mut Vec<String>) -> GraphTrace {
        let launches: Vec<Option<u64>> = self
            .host
            .iter()
            .filter(|event| event.call == Call::GraphLaunch)
            .map(|event| event.correlation)
            .collect();
        let launched: HashSet<u64> = launches.iter().copied().flatten().collect();
        let (mut whole, mut nodes) = (0, 0);
        let mut seen = HashSet::new();
        for event in &mut self.gpu {
            let of_a_launch = event.correlation.filter(|id| launched.contains(id));
            event.in_graph |= of_a_launch.is_some();
            seen.extend(of_a_launch);
            if event.work == Work::GraphReplay {
                whole += 1;
            } else if event.in_graph {
                nodes += 1;
            }
        }
        let unseen = launches
            .iter()
            .filter(|id| id.is_none_or(|id| !seen.contains(&id)))
            .count();
        match (launches.len(), whole, nodes) {
            (0, 0, 0) => GraphTrace::None,
            (_, 0, 0) => {
                warnings.push(format!(
                    "BUSY IS TOO LOW: {} graph launches, but the profile holds neither their \
                     replays nor their nodes",
                    launches.len()
                ));
                GraphTrace::Missing
            }
            (_, whole, nodes) => {
                if unseen > 0 && seen.is_empty() {
                    warnings.push(format!(
                        "none of the {unseen} graph launches can be tied to its replay: \
                         correlation ids do not meet"
                    ));
                } else if unseen > 0 {
                    warnings.push(format!(
                        "busy may be too low: {unseen} of {} graph launches have neither a replay \
                         nor nodes in the profile",
                        launches.len()
                    ));
                }
                match (whole, nodes) {
                    (_, 0) => GraphTrace::Whole,
                    (0, _) => GraphTrace::Nodes,
                    _ => {
                        warnings.push(format!(
                            "the profile holds {whole} whole graph replays and {nodes} nodes of \
                             graphs: a replay with nodes is counted by its nodes"
                        ));
                        GraphTrace::Both
                    }
                }
            }
        }
    }

    /// Work cannot start before the call that launches it begins: if it does, the clocks disagree.
    fn compare_clocks(&self, warnings: &mut Vec<String>) {
        let begun: HashMap<u64, i64> = self
            .host
            .iter()
            .filter(|event| event.call.submits())
            .filter_map(|event| Some((event.correlation?, event.span.start_ns)))
            .collect();
        let early: Vec<i64> = self
            .gpu
            .iter()
            .filter_map(|event| {
                let begun_ns = begun.get(&event.correlation?)?;
                Some(begun_ns - event.span.start_ns).filter(|early_ns| *early_ns > 0)
            })
            .collect();
        if let Some(most_ns) = early.iter().max() {
            warnings.push(format!(
                "{} pieces of GPU work start before their launch call begins, by up to {most_ns} \
                 ns: the clocks of host and GPU disagree",
                early.len()
            ));
        }
    }
}
