//! `stepgate predict --timeline`: a prediction in time.
//!
//! Iterations and requests are shown over the whole run, hosts, streams and collectives op by op
//! for the chosen iterations and one on either side.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Value, json};

use crate::case::CaseFile;
use crate::compose::Part;
use crate::gate::Points;
use crate::replay::{
    Detail, Doing, IterationRecord, On, Outcome, RequestRecord, Slice as Run, SliceId, StepKind,
    StepLog,
};
use crate::timing::Policy;
use crate::trace::{Instant, Kind, Slice, SliceIndex, Span, Timeline, TrackId, draw};

use super::args::{StepPick, StepRange, TimelineArguments};
use super::output::write_file;
use super::run::Stop;
use super::select::select;

/// Iterations that one timeline shows op by op, at most.
const ITERATIONS_MAX: usize = 256;
/// Slices of hosts and GPUs in one timeline, at most: about 70 MB of JSON.
const SLICES_MAX: usize = 400_000;

/// Writes the timeline that was asked for, if any.
pub fn run(
    points: &Points,
    cases: &[String],
    asked: &TimelineArguments,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let Some(file) = &asked.timeline else {
        return Ok(());
    };
    let mut selected = select(points, cases)?;
    let (Some(one), true) = (selected.pop(), selected.is_empty()) else {
        return Err(usage("a timeline shows one case: name a single one"));
    };
    let CaseFile::Serving(case) = one.case else {
        return Err(usage(
            "a timeline shows a serving case, not a single op or step",
        ));
    };
    let scenario = case.scenario();
    let prediction = match points.replayer().predict(&scenario, Policy::Estimate)? {
        Outcome::Predicted(prediction) => prediction,
        Outcome::Refused(refusal) => {
            return Err(usage(format!(
                "nothing to show: the case is refused: {refusal}"
            )));
        }
    };
    let log = &prediction.log;
    let shown = Shown::of(asked, log)?;
    let around = around(&shown.iterations, log);
    if around.clone().count() > ITERATIONS_MAX {
        return Err(usage(format!(
            "{} iterations would be shown op by op (the chosen ones and their neighbours), more \
             than {ITERATIONS_MAX}: choose fewer",
            around.count()
        )));
    }
    let detail = match (points.replayer()).detail(&scenario, Policy::Estimate, log, around)? {
        Ok(detail) => detail,
        Err(refusal) => return Err(usage(refusal.to_string())),
    };
    if detail.slices.len() > SLICES_MAX {
        return Err(usage(format!(
            "{} slices, more than {SLICES_MAX}: choose fewer iterations",
            detail.slices.len()
        )));
    }
    let ranks = scenario.deployment.parallel.ranks() as usize;
    let (timeline, window) = Builder::new(&detail, &shown, ranks).build();
    let mut content = Vec::new();
    if file.extension().is_some_and(|end| end == "svg") {
        let title = format!("{}, {}, estimate", one.name, shown.title(&detail.log));
        content.extend(draw(&timeline, window, &title).bytes());
    } else {
        timeline.write_chrome(&mut content)?;
    }
    if file == Path::new("-") {
        out.write_all(&content)?;
        return Ok(());
    }
    write_file(file, &content, "the timeline", true)?;
    eprintln!(
        "wrote {}: {}, {} slices, {:.1} MB",
        file.display(),
        shown.title(&detail.log),
        timeline.slices().len(),
        content.len() as f64 / 1e6
    );
    Ok(())
}

fn usage(what: impl Into<String>) -> Stop {
    Stop::Usage(what.into())
}

/// What a timeline shows op by op.
struct Shown {
    iterations: RangeInclusive<usize>,
    /// The request whose first token the critical path leads to.
    request: Option<u32>,
}

impl Shown {
    fn of(asked: &TimelineArguments, log: &StepLog) -> Result<Self, Stop> {
        if let Some(request) = asked.request {
            let Some(record) = log.requests.get(request as usize) else {
                let count = log.requests.len();
                return Err(usage(format!(
                    "there is no request {request}, only 0 to {}",
                    count - 1
                )));
            };
            let meanwhile = |(_, iteration): &(usize, &IterationRecord)| {
                (record.scheduled_ms..record.first_token_ms).contains(&iteration.start_ms)
            };
            let mut numbers = (log.iterations.iter().enumerate())
                .filter(meanwhile)
                .map(|(number, _)| number);
            let scheduled = record.iteration as usize;
            let first = numbers.next().unwrap_or(scheduled);
            return Ok(Self {
                iterations: first..=numbers.next_back().unwrap_or(first),
                request: Some(request),
            });
        }
        if let Some(StepRange { first, last }) = asked.steps {
            return if last < log.iterations.len() {
                Ok(Self {
                    iterations: first..=last,
                    request: None,
                })
            } else {
                Err(no_iteration(last, log))
            };
        }
        let number = match asked.step {
            Some(StepPick::Number(number)) if number < log.iterations.len() => number,
            Some(StepPick::Number(number)) => return Err(no_iteration(number, log)),
            Some(StepPick::Slowest(kind)) => slowest(log, kind).ok_or_else(|| {
                usage(match kind {
                    Some(kind) => format!("the prediction has no {} step", kind.name()),
                    None => "the prediction has no step".to_owned(),
                })
            })?,
            None => slowest(log, Some(StepKind::Mixed))
                .or_else(|| slowest(log, None))
                .ok_or_else(|| usage("the prediction has no step"))?,
        };
        let request = (0..).zip(&log.requests);
        let request = request
            .filter(|(_, record)| record.iteration as usize == number)
            .map(|(request, _)| request);
        Ok(Self {
            iterations: number..=number,
            request: request.min(),
        })
    }

    fn title(&self, log: &StepLog) -> String {
        let (first, last) = (*self.iterations.start(), *self.iterations.end());
        let what = if first == last {
            format!(
                "iteration {first} ({})",
                step_name(&log.iterations[first], log)
            )
        } else {
            format!("iterations {first} to {last}")
        };
        match self.request {
            Some(request) => format!("{what}, first token of request {request}"),
            None => what,
        }
    }
}

/// The iterations with one before, whose work may still hold the GPU, and one behind, in which
/// results leave.
fn around(iterations: &RangeInclusive<usize>, log: &StepLog) -> RangeInclusive<usize> {
    let last = log.iterations.len() - 1;
    iterations.start().saturating_sub(1)..=(iterations.end() + 1).min(last)
}

fn no_iteration(number: usize, log: &StepLog) -> Stop {
    let last = log.iterations.len() - 1;
    usage(format!("there is no iteration {number}, only 0 to {last}"))
}

/// The iteration that takes longest, among those of a kind where one is named; the first of equals.
fn slowest(log: &StepLog, kind: Option<StepKind>) -> Option<usize> {
    let mut slowest: Option<(usize, f64)> = None;
    for (number, iteration) in log.iterations.iter().enumerate() {
        let wanted = kind.map_or(iteration.step.is_some(), |kind| {
            iteration.kind() == Some(kind)
        });
        let ms = end_ms(log, number) - iteration.start_ms;
        if wanted && slowest.is_none_or(|(_, longest)| ms > longest) {
            slowest = Some((number, ms));
        }
    }
    slowest.map(|(number, _)| number)
}

/// When an iteration gives way to the next one.
fn end_ms(log: &StepLog, number: usize) -> f64 {
    let last = || (log.requests.iter()).map(|request| request.last_token_ms);
    match log.iterations.get(number + 1) {
        Some(next) => next.start_ms,
        None => last().fold(log.iterations[number].start_ms, f64::max),
    }
}

/// What an iteration's step holds, for example `mixed 886 + 3`.
fn step_name(iteration: &IterationRecord, log: &StepLog) -> String {
    let Some(kind) = iteration.kind() else {
        return "no step".to_owned();
    };
    let (context, generation) = tokens(iteration, log);
    match kind {
        StepKind::Prefill => format!("prefill {context}"),
        StepKind::Mixed => format!("mixed {context} + {generation}"),
        StepKind::Decode => format!("decode {generation}"),
    }
}

/// Context tokens and generation requests of all rank groups. A request that was paused computes
/// more than its prompt; the log does not say how much.
fn tokens(iteration: &IterationRecord, log: &StepLog) -> (u64, u64) {
    let (mut context, mut generation) = (0, 0);
    for rank in iteration.step.iter().flat_map(|(_, ranks)| ranks) {
        generation += u64::from(rank.generation);
        context += if rank.chunks.is_empty() {
            let prompts = rank.context.iter();
            prompts
                .map(|request| u64::from(log.requests[*request as usize].prompt))
                .sum::<u64>()
        } else {
            rank.chunks.iter().map(|(_, now)| u64::from(*now)).sum()
        };
    }
    (context, generation)
}

struct Builder<'a> {
    detail: &'a Detail,
    shown: &'a Shown,
    timeline: Timeline,
    /// Ranks of the deployment.
    ranks: usize,
}

impl<'a> Builder<'a> {
    fn new(detail: &'a Detail, shown: &'a Shown, ranks: usize) -> Self {
        Self {
            detail,
            shown,
            timeline: Timeline::default(),
            ranks,
        }
    }

    /// The timeline, and the stretch of it that the picture shows.
    fn build(mut self) -> (Timeline, Span) {
        let to = match self.shown.request {
            Some(request) => format!("request {request}"),
            None => "last step".to_owned(),
        };
        let path_track = self.timeline.track("critical path", &to);
        self.iterations();
        self.requests();
        let drawn = self.lanes();
        let path = self.critical_path(path_track, &drawn);
        let log = &self.detail.log;
        let iterations = &self.shown.iterations;
        let chosen = span(
            log.iterations[*iterations.start()].start_ms,
            end_ms(log, *iterations.end()),
        );
        let start_ns = path.start_ns.min(chosen.start_ns);
        let window = Span {
            start_ns,
            end_ns: path.end_ns.max(chosen.end_ns).max(start_ns + 1),
        };
        (self.timeline, window)
    }

    fn iterations(&mut self) {
        let track = self.timeline.track("scheduler", "iterations");
        let log = &self.detail.log;
        for (number, iteration) in log.iterations.iter().enumerate() {
            let (context, generation) = tokens(iteration, log);
            let mut args = vec![("iteration", json!(number))];
            if let Some((execution, _)) = &iteration.step {
                args.push(("execution", json!(execution.mode())));
                args.push(("context_tokens", json!(context)));
                args.push(("generation_requests", json!(generation)));
            }
            if let Some((why, count)) = iteration.held {
                args.push(("held", json!(format!("{count} by {}", why.name()))));
            }
            self.timeline.slice(Slice {
                track,
                kind: Kind::Iteration,
                name: step_name(iteration, log),
                span: span(iteration.start_ms, end_ms(log, number)),
                args,
            });
        }
    }

    /// Requests on as many tracks as are ever in flight.
    fn requests(&mut self) {
        let log = &self.detail.log;
        let mut slots: Vec<(TrackId, f64)> = Vec::new();
        let mut order: Vec<usize> = (0..log.requests.len()).collect();
        order.sort_by(|a, b| {
            log.requests[*a]
                .post_ms
                .total_cmp(&log.requests[*b].post_ms)
        });
        for number in order {
            let request = &log.requests[number];
            let free = slots
                .iter()
                .position(|(_, until)| *until <= request.post_ms);
            let at = free.unwrap_or_else(|| {
                let name = format!("slot {}", slots.len());
                slots.push((self.timeline.track("requests", &name), 0.0));
                slots.len() - 1
            });
            slots[at].1 = request.last_token_ms;
            let track = slots[at].0;
            let args = vec![
                ("request", json!(number)),
                ("prompt_tokens", json!(request.prompt)),
                ("output_tokens", json!(request.output)),
                ("ttft_ms", json!(request.ttft_ms())),
            ];
            let to_executor = (
                Kind::Part(Part::Ingress),
                request.post_ms,
                request.arrival_ms,
            );
            let queue = queue(log, request);
            let queue = queue.map(|(part, from, to)| (Kind::Part(part), from, to));
            let first = request.first_token_ms;
            let rest = [
                (Kind::Prefill, request.scheduled_ms, first),
                (Kind::Decode, first, request.last_token_ms),
            ];
            for (kind, from, to) in [to_executor].into_iter().chain(queue).chain(rest) {
                self.add(
                    track,
                    kind,
                    format!("{} {number}", kind.name()),
                    from,
                    to,
                    &args,
                );
            }
            self.timeline.instant(Instant {
                track,
                name: format!("first token {number}"),
                at_ns: ns(first),
            });
        }
    }

    /// Hosts, streams and collectives; the timeline's slice of each slice of the detail.
    fn lanes(&mut self) -> Vec<Option<SliceIndex>> {
        let mut tracks = BTreeMap::new();
        for lane in 0..self.detail.lanes {
            let process = match (self.detail.lanes, self.ranks) {
                (lanes, ranks) if lanes == ranks => format!("rank {lane}"),
                (1, ranks) => format!("ranks 0 to {}, alike", ranks - 1),
                _ => format!("lane {lane}"),
            };
            for (on, name) in [
                (On::Host, "host"),
                (On::Stream, "stream"),
                (On::Collectives, "collectives"),
            ] {
                tracks.insert((lane, on), self.timeline.track(&process, name));
            }
        }
        let slices = self.detail.slices.iter();
        slices
            .map(|slice| {
                let kind = match slice.doing {
                    Doing::Work(part) => Kind::Part(part),
                    Doing::PeerWait => Kind::PeerWait,
                    Doing::GpuWait => Kind::GpuWait,
                };
                let name = match (slice.doing, slice.op) {
                    (Doing::PeerWait, _) => "wait".to_owned(),
                    (Doing::GpuWait, _) => "wait for the GPU".to_owned(),
                    (_, Some(op)) => self.detail.ops[usize::from(op.0)].clone(),
                    (_, None) => kind.name().replace('_', " "),
                };
                let args = [("iteration", json!(slice.iteration))];
                let track = tracks[&(slice.lane, slice.on)];
                self.add(track, kind, name, slice.begin_ms, slice.end_ms, &args)
            })
            .collect()
    }

    /// The critical path: on a track of its own, piece after piece from the start of what is shown,
    /// and as arrows through the lanes. Its pieces follow one another without a gap.
    fn critical_path(&mut self, track: TrackId, drawn: &[Option<SliceIndex>]) -> Span {
        let log = &self.detail.log;
        let request = self.shown.request;
        let last = *self.shown.iterations.end();
        let (path, from_ms, end_ms) = match request.map(|id| (id, log.requests[id as usize])) {
            Some((id, record)) => {
                let path = self.detail.path_to_first_token(id, record.scheduled_ms);
                let left = self.detail.left_ms(id).unwrap_or(record.first_token_ms);
                self.before_schedule(track, &record);
                (path, record.scheduled_ms, left)
            }
            None => {
                let from = log.iterations[*self.shown.iterations.start()].start_ms;
                let (path, end) = (self.detail.path_to_finish(last, from)).unwrap_or_default();
                (path, from, end)
            }
        };
        let mut at = from_ms;
        let mut arrows = Vec::new();
        let leg_of = |id: &SliceId| {
            let slice: &Run = &self.detail.slices[id.0];
            (
                slice.lane,
                slice.on,
                slice.doing == Doing::Work(Part::HostDispatch),
            )
        };
        for leg in path.chunk_by(|a, b| leg_of(a) == leg_of(b)) {
            let (first, last) = (leg[0], leg[leg.len() - 1]);
            arrows.extend(drawn[first.0]);
            arrows.extend(drawn[last.0].filter(|_| last != first));
            // Pieces of one part are one slice here.
            let part_of = |id: &SliceId| self.detail.slices[id.0].doing;
            for piece in leg.chunk_by(|a, b| part_of(a) == part_of(b)) {
                let slice = self.detail.slices[piece[piece.len() - 1].0];
                if let Doing::Work(part) = slice.doing {
                    let args = [("lane", json!(slice.lane))];
                    let name = part.name().replace('_', " ");
                    self.add(track, Kind::Part(part), name, at, slice.end_ms, &args);
                    at = slice.end_ms;
                }
            }
        }
        self.timeline.path(arrows);
        let begin = request.map_or(from_ms, |id| log.requests[id as usize].post_ms);
        let mut end = end_ms;
        if let Some(id) = request {
            end = log.requests[id as usize].first_token_ms;
            self.add(
                track,
                Kind::Part(Part::Egress),
                "egress".to_owned(),
                at,
                end,
                &[],
            );
        }
        span(begin, end)
    }

    /// A request's own way until it is scheduled.
    fn before_schedule(&mut self, track: TrackId, request: &RequestRecord) {
        let log = &self.detail.log;
        let sent = request.post_ms + self.detail.client_transport_ms;
        let way = [
            (Part::ClientTransport, request.post_ms, sent),
            (Part::Ingress, sent, request.arrival_ms),
        ];
        for (part, from, to) in way.into_iter().chain(queue(log, request)) {
            let name = part.name().replace('_', " ");
            self.add(track, Kind::Part(part), name, from, to, &[]);
        }
    }

    /// A slice of some length; one of none is not drawn.
    fn add(
        &mut self,
        track: TrackId,
        kind: Kind,
        name: String,
        from_ms: f64,
        to_ms: f64,
        args: &[(&'static str, Value)],
    ) -> Option<SliceIndex> {
        let span = span(from_ms, to_ms);
        (span.ns() > 0).then(|| {
            self.timeline.slice(Slice {
                track,
                kind,
                name,
                span,
                args: args.to_vec(),
            })
        })
    }
}

/// A request's time between its arrival and its schedule, by what kept it.
fn queue(log: &StepLog, request: &RequestRecord) -> impl Iterator<Item = (Part, f64, f64)> {
    let mut pieces: Vec<(Part, f64, f64)> = Vec::new();
    let (from, to) = (request.arrival_ms, request.scheduled_ms);
    let begun = (log.iterations).partition_point(|iteration| iteration.start_ms < from);
    let mut at = from;
    let mut why = Part::QueueIteration;
    for iteration in &log.iterations[begun..] {
        let end = iteration.start_ms.min(to);
        match pieces.last_mut() {
            Some((part, _, until)) if *part == why => *until = end,
            _ => pieces.push((why, at, end)),
        }
        at = end;
        if at >= to {
            break;
        }
        why = iteration.held.map_or(Part::QueueCapacity, |(part, _)| part);
    }
    pieces.into_iter()
}

fn span(from_ms: f64, to_ms: f64) -> Span {
    Span {
        start_ns: ns(from_ms),
        end_ns: ns(to_ms),
    }
}

fn ns(ms: f64) -> i64 {
    (ms * 1e6).round() as i64
}
