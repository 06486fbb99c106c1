//! The hosts and GPU streams that a scheduler drives, and the tree of paths their times hang on.

use crate::compose::{Composer, LaneStart, Part, Paths, Stamp};
use crate::model::RankLoad;
use crate::perfdb::LookupId;
use crate::timing::Execution;

pub(super) struct Lanes<'a> {
    pub composer: &'a mut Composer,
    pub paths: Paths,
    pub host: Vec<Stamp>,
    pub gpu: Vec<Stamp>,
}

impl<'a> Lanes<'a> {
    pub fn new(composer: &'a mut Composer) -> Self {
        let paths = Paths::new();
        let origin = paths.origin();
        let lanes = composer.lanes();
        Self {
            composer,
            paths,
            host: vec![origin; lanes],
            gpu: vec![origin; lanes],
        }
    }

    /// `from` later by one occurrence of each lookup given.
    pub fn after(&mut self, from: Stamp, steps: &[(Part, Option<LookupId>)]) -> Stamp {
        self.paths.after(from, self.composer.pricer(), steps)
    }

    /// When the last host is there: ranks that exchange requests go on together.
    pub fn all_hosts(&self) -> Stamp {
        latest(&self.host)
    }

    /// Each host prepares and dispatches a step from its own time on.
    pub fn dispatch(&mut self, execution: Execution, loads: &[RankLoad]) {
        let starts = self.host.clone();
        let lanes = starts.len();
        for (lane, start) in starts.iter().enumerate() {
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
                .unwrap_or(starts[0]);
            let end = self.paths.reach(
                begin.node,
                begin.ms + replay.ms,
                &replay.terms,
                Some(replay.shared),
            );
            self.gpu.fill(end);
        } else {
            let from = LaneStart {
                host_ms: starts.iter().map(|stamp| stamp.ms).collect(),
                gpu_ms: self.gpu.iter().map(|stamp| stamp.ms).collect(),
            };
            let times = self.composer.step(loads, execution, &from);
            let before = self.gpu.clone();
            for lane in 0..lanes {
                let path = &times.gpu_path[lane];
                let parent = path.parent(&starts, &before);
                self.gpu[lane] =
                    self.paths
                        .reach(parent.node, times.gpu_ms[lane], &path.terms, None);
            }
        }
    }

    /// Each host waits for its GPU's end of a step, then finishes the step.
    pub fn finish(&mut self, gpu: &[Stamp], execution: Execution) {
        for (lane, end) in gpu.iter().enumerate() {
            let synced = end.latest(self.host[lane]);
            let finish = self.composer.finish(execution, lane);
            self.host[lane] = self.after(synced, &[(Part::HostFinish, finish)]);
        }
    }

    /// When the client has what the server responds at `respond`.
    pub fn egress(&mut self, respond: Stamp) -> Stamp {
        let egress = self.composer.request_times().egress;
        self.after(respond, &[(Part::Egress, egress)])
    }
}

fn latest(stamps: &[Stamp]) -> Stamp {
    let mut late = stamps[0];
    for stamp in &stamps[1..] {
        late = late.latest(*stamp);
    }
    late
}
