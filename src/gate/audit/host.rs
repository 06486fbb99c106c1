//! Host rows: what a lane's host and a request spend outside the GPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::compose::Part;
use crate::timing::{Boundary, Policy, Provenance, Row, Scope};

use super::auditor::{Auditor, HostLane};
use super::fault::{Check, check_weights};
use super::forward::{forward, launches};
use super::lookup::Share;
use super::moment::Cost;
use super::sources::Known;

impl Auditor<'_> {
    /// Rows of a boundary, grouped by rank where they were measured where the case runs, else all
    /// together.
    fn host_rows(&mut self, boundary: Boundary, mode: Option<&str>) -> Vec<Vec<(Known, Arc<Row>)>> {
        let rows: Vec<(Known, Arc<Row>)> = self
            .sources
            .hosts
            .iter()
            .filter(|(_, row)| row.boundary == boundary)
            .filter(|(_, row)| mode.is_none_or(|mode| row.execution.mode() == mode))
            .cloned()
            .collect();
        let mut at_home = true;
        for (_, row) in &rows {
            let home = row
                .scope
                .as_ref()
                .is_some_and(|scope| self.measured_here(scope, row));
            at_home &= home;
            let measured = matches!(row.provenance, Provenance::Measured { .. });
            if self.prediction.policy == Policy::Strict && !(home && measured) {
                self.fault(
                    Check::Rows,
                    format!("strict rests on host/{}, which is derived here", row.id),
                );
            }
            if row.samples.observer.is_diagnostic() {
                self.fault(Check::Rows, format!("host/{} is a diagnostic row", row.id));
            }
        }
        let mut groups: BTreeMap<Option<u32>, Vec<(Known, Arc<Row>)>> = BTreeMap::new();
        for (known, row) in rows {
            let group = if at_home { row.rank } else { None };
            groups.entry(group).or_default().push((known, row));
        }
        groups.into_values().collect()
    }

    fn measured_here(&self, scope: &Scope, row: &Row) -> bool {
        let deployment = &self.scenario.deployment;
        let cpu = deployment.host_cpu.as_ref();
        let isl = row.shape.get("isl");
        scope.runtime == deployment.backend.name.as_str()
            && scope.version == deployment.backend.version
            && scope.system == deployment.system
            && scope.model == deployment.model
            && scope.topology == deployment.parallel
            && cpu.is_none_or(|cpu| *cpu == scope.cpu)
            && isl.is_none_or(|isl| *isl == u64::from(self.scenario.workload.isl))
    }

    /// The mean of the rows of one rank, or of all where ranks have no rows of their own.
    fn host_cost(
        &mut self,
        part: Part,
        groups: &[Vec<(Known, Arc<Row>)>],
        lane: usize,
        work: f64,
    ) -> Cost {
        let Some(rows) = groups.get(lane).or(groups.last()) else {
            return Cost::default();
        };
        let shares: Vec<Share> = rows
            .iter()
            .map(|(known, _)| Share {
                known: *known,
                weight: 1.0 / rows.len() as f64,
                work,
            })
            .collect();
        if let Err(what) = check_weights(shares.iter().map(|share| share.weight)) {
            self.fault(Check::Lookup, format!("{}: {what}", part.name()));
        }
        self.cost(part, &shares)
    }

    pub(super) fn host_times(&mut self) {
        let on = self.scenario.deployment.parallel;
        let forward_rows = self.host_rows(Boundary::HostDispatch, Some("eager"));
        let lanes = if on.dp > 1 {
            on.dp as usize
        } else {
            forward_rows.len().clamp(1, on.ranks() as usize)
        };
        for (index, mode) in ["eager", "full_graph", "piecewise"].into_iter().enumerate() {
            let prepare = self.host_rows(Boundary::HostPrepare, Some(mode));
            let finish = self.host_rows(Boundary::HostFinish, Some(mode));
            let launch = match mode {
                "eager" => Vec::new(),
                _ => self.host_rows(Boundary::GraphLaunch, Some(mode)),
            };
            let dispatch = match mode {
                "full_graph" => Vec::new(),
                _ => self.host_rows(Boundary::HostDispatch, Some(mode)),
            };
            let work = self.launches_here_over_there(&dispatch);
            for lane in 0..lanes {
                let mut before = self.host_cost(Part::HostPrepare, &prepare, lane, 1.0);
                let launch = self.host_cost(Part::GraphLaunch, &launch, lane, 1.0);
                before.ms += launch.ms;
                before.of.extend(launch.of);
                let lane = HostLane {
                    before,
                    dispatch: self.host_cost(Part::HostDispatch, &dispatch, lane, work),
                    finish: self.host_cost(Part::HostFinish, &finish, lane, 1.0),
                };
                self.hosts[index].push(lane);
            }
        }
        let transport = self.host_rows(Boundary::ClientTransport, None);
        self.transport = self.host_cost(Part::ClientTransport, &transport, 0, 1.0);
        let ingress = self.host_rows(Boundary::Ingress, None);
        self.ingress = self.host_cost(Part::Ingress, &ingress, 0, 1.0);
        let egress = self.host_rows(Boundary::Egress, None);
        self.egress = self.host_cost(Part::Egress, &egress, 0, 1.0);
    }

    /// Kernels submitted in a mixed step here over those where the rows were measured.
    fn launches_here_over_there(&mut self, groups: &[Vec<(Known, Arc<Row>)>]) -> f64 {
        let deployment = &self.scenario.deployment;
        let scope = groups
            .first()
            .and_then(|rows| rows.first()?.1.scope.clone());
        let Some(scope) = scope else { return 1.0 };
        let Some(there) = self.configs.get(&scope.model) else {
            let what = format!("no config of {} to recount its launches from", scope.model);
            self.fault(Check::Rows, what);
            return 1.0;
        };
        let count = |config, on| f64::from(launches(&forward(config, deployment, on)));
        count(self.config, deployment.parallel) / count(there, scope.topology)
    }
}
