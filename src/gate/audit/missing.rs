//! What no row covers: a prediction lists it, or a boundary was left out unseen.

use std::collections::BTreeSet;

use crate::timing::{Boundary, Execution, Policy};

use super::auditor::Auditor;
use super::fault::Check;

const OF_REQUESTS: [Boundary; 3] = [
    Boundary::ClientTransport,
    Boundary::Ingress,
    Boundary::Egress,
];

/// Host boundaries of a step in a mode, in the order of their time.
fn of_steps(mode: &str) -> &'static [Boundary] {
    use Boundary::{GraphLaunch, HostDispatch, HostFinish, HostPrepare};
    match mode {
        "eager" => &[HostPrepare, HostDispatch, HostFinish],
        "full_graph" => &[HostPrepare, GraphLaunch, HostFinish],
        _ => &[HostPrepare, GraphLaunch, HostDispatch, HostFinish],
    }
}

impl Auditor<'_> {
    /// Every boundary that steps and requests pass has a row, lies inside another one's, or is
    /// listed as missing.
    pub(super) fn check_missing(&mut self) {
        let mut unseen = Vec::new();
        for boundary in OF_REQUESTS {
            if !self.has_row(boundary, None, true) {
                unseen.push(boundary.to_string());
            }
        }
        // Mode, and whether the step has prompts where that matters.
        let mut kinds: BTreeSet<(&str, bool)> = BTreeSet::new();
        for iteration in &self.prediction.log.iterations {
            if let Some((execution, ranks)) = &iteration.step {
                let prompts = ranks.iter().any(|rank| !rank.context.is_empty());
                let eager = *execution == Execution::Eager;
                kinds.insert((execution.mode(), prompts || !eager));
            }
        }
        for (mode, prompts) in kinds {
            let name = if prompts { mode } else { "eager decode" };
            for boundary in of_steps(mode) {
                if !self.has_row(*boundary, Some(mode), prompts) {
                    unseen.push(format!("{boundary} ({name})"));
                }
            }
        }
        unseen.retain(|name| !self.prediction.coverage.missing.contains(name));
        for name in unseen {
            let what = format!("{name} has no row and is not listed as missing");
            self.fault(Check::Rows, what);
        }
    }

    fn has_row(&self, boundary: Boundary, mode: Option<&str>, prompts: bool) -> bool {
        let strict = self.prediction.policy == Policy::Strict;
        self.sources.hosts.iter().any(|(_, row)| {
            (row.boundary == boundary || row.includes.contains(&boundary))
                && mode.is_none_or(|mode| row.execution.mode() == mode)
                // Strict takes no rows of steps with prompts for others.
                && (prompts || !strict || row.phase != "prefill_or_mixed")
        })
    }
}
