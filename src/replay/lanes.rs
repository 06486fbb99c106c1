//! The hosts and GPU streams that a scheduler drives, and the tree of paths their times hang on.

use crate::compose::{Composer, LaneStart, Part, Paths, Stamp, Stretch};
use crate::model::RankLoad;
use crate::perfdb::LookupId;
use crate::timing::{Execution, HostMode};

use super::log::{Keep, StepLog};
use super::record::{Detail, Recorder};

pub(super) struct Lanes<'a> {
    composer: &'a mut Composer,
    pub paths: Paths,
    pub host: Vec<Stamp>,
    pub gpu: Vec<Stamp>,
    /// What is the same in every step, by execution mode and lane.
    fixed: [Vec<Fixed>; HostMode::COUNT],
    client_transport: Stretch,
    ingress: Stretch,
    egress: Stretch,
    starts: LaneStart,
    before: [Vec<Stamp>; 2],
    /// Keeps chosen steps in detail; its composer goes op by op.
    recorder: Option<Recorder>,
}

/// A lane's host work of a step.
struct Fixed {
    submission: Stretch,
    finish: Stretch,
}

impl<'a> Lanes<'a> {
    /// Lanes for about so many steps.
    pub fn new(composer: &'a mut Composer, keep: Keep, steps: usize) -> Self {
        let mut paths = match keep {
            Keep::All => Paths::new(),
            Keep::Times => Paths::not_kept(),
        };
        composer.keep_paths(paths.kept());
        let origin = paths.origin();
        let lanes = composer.lanes();
        composer.expect(steps);
        // Streams end, and hosts finish.
        paths.expect(2 * lanes * steps);
        let pricer = composer.pricer();
        let fixed = HostMode::ALL.map(|mode| {
            (0..lanes)
                .map(|lane| {
                    let (ms, terms) = composer.submission(mode, lane);
                    let terms = paths.store(&terms);
                    let finish = composer.finish(mode, lane);
                    Fixed {
                        submission: Stretch { ms, terms },
                        finish: paths.stretch(Part::HostFinish, finish, pricer),
                    }
                })
                .collect()
        });
        let times = composer.request_times();
        let client_transport = paths.stretch(Part::ClientTransport, times.client_transport, pricer);
        let ingress = paths.stretch(Part::Ingress, times.ingress, pricer);
        let egress = paths.stretch(Part::Egress, times.egress, pricer);
        Self {
            composer,
            paths,
            host: vec![origin; lanes],
            gpu: vec![origin; lanes],
            fixed,
            client_transport,
            ingress,
            egress,
            starts: LaneStart {
                host_ms: vec![0.0; lanes],
                gpu_ms: vec![0.0; lanes],
            },
            before: [vec![origin; lanes], vec![origin; lanes]],
            recorder: None,
        }
    }

    /// Keeps chosen iterations in detail from here on.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Says which iteration the scheduler is in.
    pub fn iteration(&mut self, iteration: usize) {
        if let Some(recorder) = &mut self.recorder {
            recorder.iteration = iteration;
        }
    }

    /// What was kept in detail, of a run with this log.
    pub fn detail(&mut self, log: &StepLog) -> Option<Detail> {
        let recorder = self.recorder.take()?;
        Some(recorder.close(self.composer, log.clone()))
    }

    /// When a request that the client posts at `post` is in the server's queue.
    pub fn arrival(&mut self, post: Stamp) -> Stamp {
        let sent = self.paths.after(post, self.client_transport);
        self.paths.after(sent, self.ingress)
    }

    /// When the last host is there: ranks that exchange requests go on together.
    pub fn all_hosts(&self) -> Stamp {
        latest(&self.host)
    }

    /// Each host prepares and dispatches a step from its own time on. What it does when the step is
    /// done depends on the mode returned.
    pub fn dispatch(&mut self, execution: Execution, loads: &[RankLoad]) -> HostMode {
        let prompts = loads.iter().any(|load| !load.prompts.is_empty());
        self.dispatch_in(execution.host_mode(prompts), execution, loads)
    }

    /// The same for a step, or a part of one, that asks the host for the work of `mode`.
    pub fn dispatch_in(
        &mut self,
        mode: HostMode,
        execution: Execution,
        loads: &[RankLoad],
    ) -> HostMode {
        let [starts, before] = &mut self.before;
        starts.clone_from(&self.host);
        before.clone_from(&self.gpu);
        let fixed = &self.fixed[mode as usize];
        for (host, fixed) in self.host.iter_mut().zip(fixed) {
            *host = self.paths.after(*host, fixed.submission);
        }
        let graph = matches!(execution, Execution::FullGraph { .. });
        let paths = &mut self.paths;
        if graph && let Some(replay) = self.composer.decode_replay(&loads[0], paths) {
            let begin = (self.gpu.iter().zip(&self.host))
                .map(|(gpu, host)| gpu.latest(*host))
                .reduce(Stamp::latest)
                .unwrap_or(starts[0]);
            let end = paths.reach(begin.node, begin.ms + replay.ms, replay.terms, replay.first);
            self.gpu.fill(end);
            return mode;
        }
        let from = &mut self.starts;
        for (lane, (host, gpu)) in starts.iter().zip(before.iter()).enumerate() {
            from.host_ms[lane] = host.ms;
            from.gpu_ms[lane] = gpu.ms;
        }
        if graph && let Some(ends) = self.composer.decode_step(mode, loads, from, paths) {
            for (gpu, end) in self.gpu.iter_mut().zip(ends) {
                let parent = end.from.stamp(starts, before);
                *gpu = paths.reach(parent.node, end.ms, end.terms, end.first);
            }
            return mode;
        }
        let times = match &mut self.recorder {
            Some(recorder) => {
                let submitted_ms: Vec<f64> = self.host.iter().map(|host| host.ms).collect();
                let how = (execution, mode);
                recorder.step(self.composer, loads, how, from, &submitted_ms)
            }
            None => self.composer.step_in(mode, loads, execution, from),
        };
        for (gpu, ms) in self.gpu.iter_mut().zip(&times.gpu_ms) {
            gpu.ms = *ms;
        }
        for (gpu, path) in self.gpu.iter_mut().zip(&times.gpu_path) {
            let parent = path.from.stamp(starts, before);
            let terms = paths.store(&path.terms);
            *gpu = paths.reach(parent.node, gpu.ms, terms, LookupId(0));
        }
        mode
    }

    /// Each host waits for its GPU's end of a step, then finishes the step.
    pub fn finish(&mut self, gpu: &[Stamp], mode: HostMode) {
        let fixed = &self.fixed[mode as usize];
        for ((host, end), fixed) in self.host.iter_mut().zip(gpu).zip(fixed) {
            *host = self.paths.after(end.latest(*host), fixed.finish);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.finish(fixed.iter().map(|fixed| fixed.finish.ms));
        }
    }

    /// When the client has what the server responds at `respond`.
    pub fn egress(&mut self, respond: Stamp) -> Stamp {
        let at_client = self.paths.after(respond, self.egress);
        if let Some(recorder) = &mut self.recorder {
            recorder.respond(respond.ms, at_client.ms);
        }
        at_client
    }
}

fn latest(stamps: &[Stamp]) -> Stamp {
    let mut late = stamps[0];
    for stamp in &stamps[1..] {
        late = late.latest(*stamp);
    }
    late
}
