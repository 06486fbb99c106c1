//! Host rows: what a lane's host and a request spend outside the GPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::compose::Part;
use crate::timing::{Boundary, Policy, Provenance, Row, Scope};

use super::auditor::{Auditor, HostLane, SPLIT_CONTEXT, SPLIT_GENERATION};
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
            if row.samples.observer.is_diagnostic() && boundary != Boundary::GpuKernel {
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

    /// Rows for a step of a mode. Rows of steps with prompts stand in for others only as derived.
    fn step_rows(
        &mut self,
        boundary: Boundary,
        mode: &str,
        without_prompts: bool,
    ) -> Vec<Vec<(Known, Arc<Row>)>> {
        let rows = self.host_rows(boundary, Some(mode));
        let strict = self.prediction.policy == Policy::Strict;
        if strict && without_prompts && of_steps_with_prompts(&rows) {
            Vec::new()
        } else {
            rows
        }
    }

    /// The kernel row of decode attention in a step of `mode`: how much of it `requests` requests
    /// with `kv_sum` tokens take in each of the layers of `task` that it was summed over.
    pub(super) fn measured_attention(
        &mut self,
        mode: usize,
        task: usize,
        window: u32,
        (requests, kv_sum): (u32, u64),
    ) -> Option<Share> {
        let graphed = mode == 1 || mode == SPLIT_GENERATION;
        let without_prompts = graphed || mode == 3;
        let name = match window {
            0 => "generation attention (full)",
            _ => "generation attention (window)",
        };
        let mut kernels = self.kernels.iter().filter(|(_, row)| {
            row.module == name
                && row.execution.mode() == if graphed { "full_graph" } else { "eager" }
                && !(without_prompts && row.phase == "prefill_or_mixed")
        });
        let (known, row) = kernels.next()?.clone();
        let layers = self.forward.iter().filter(|(of, _)| *of == task).count();
        let mut wrong = Vec::new();
        let deployment = &self.scenario.deployment;
        let home = row.scope.as_ref().is_some_and(|scope| {
            scope.runtime == deployment.backend.name.as_str()
                && scope.version == deployment.backend.version
                && scope.system == deployment.system
                && scope.model == deployment.model
                && scope.topology == deployment.parallel
        });
        if !home {
            wrong.push("was measured elsewhere");
        }
        let measured = matches!(row.provenance, Provenance::Measured { .. });
        if self.prediction.policy == Policy::Strict && !measured {
            wrong.push("is derived");
        }
        let of = |key: &str| row.shape.get(key).copied().unwrap_or(0);
        if of("layers") != layers as u64 {
            wrong.push("sums over other layers");
        }
        for what in wrong {
            self.fault(Check::Rows, format!("host/{} {what}", row.id));
        }
        // Bytes of keys and values, which a window ends.
        let seen = |requests: f64, mean: f64| match window {
            0 => requests * mean,
            _ => requests * mean.min(f64::from(window)),
        };
        let there = seen(of("requests") as f64, of("mean_kv") as f64) * layers as f64;
        let here = seen(f64::from(requests), kv_sum as f64 / f64::from(requests));
        Some(Share {
            known,
            weight: 1.0,
            work: here / there,
        })
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
        let mut graph_launches = Vec::new();
        let modes = ["eager", "full_graph", "piecewise", "eager"];
        for (index, mode) in modes.into_iter().enumerate() {
            let without_prompts = index == 3;
            let prepare = self.step_rows(Boundary::HostPrepare, mode, without_prompts);
            let finish = self.step_rows(Boundary::HostFinish, mode, without_prompts);
            let launch = match mode {
                "eager" => Vec::new(),
                _ => self.host_rows(Boundary::GraphLaunch, Some(mode)),
            };
            let dispatch = match mode {
                "full_graph" => Vec::new(),
                _ => self.step_rows(Boundary::HostDispatch, mode, without_prompts),
            };
            let mut work = self.launches_here_over_there(&dispatch);
            if without_prompts && of_steps_with_prompts(&dispatch) {
                let deployment = &self.scenario.deployment;
                let tasks = forward(self.config, deployment, deployment.parallel);
                let all = launches(&tasks);
                let kept: Vec<_> = tasks
                    .into_iter()
                    .filter(|(task, _)| task.runs(false, true))
                    .collect();
                work *= f64::from(launches(&kept)) / f64::from(all);
            }
            for lane in 0..lanes {
                let mut before = self.host_cost(Part::HostPrepare, &prepare, lane, 1.0);
                let launch = self.host_cost(Part::GraphLaunch, &launch, lane, 1.0);
                if mode == "full_graph" {
                    graph_launches.push(launch.clone());
                }
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
        // A split step is prepared and ended once, as an eager one is, with a graph launch between.
        for (eager, launch) in self.hosts[0].clone().into_iter().zip(graph_launches) {
            let mut before = eager.before;
            before.ms += launch.ms;
            before.of.extend(launch.of);
            self.hosts[SPLIT_GENERATION].push(HostLane {
                before,
                ..HostLane::default()
            });
            self.hosts[SPLIT_CONTEXT].push(HostLane {
                before: Cost::default(),
                ..eager
            });
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

fn of_steps_with_prompts(groups: &[Vec<(Known, Arc<Row>)>]) -> bool {
    groups
        .iter()
        .flatten()
        .any(|(_, row)| row.phase == "prefill_or_mixed")
}
