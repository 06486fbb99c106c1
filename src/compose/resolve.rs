//! Finds the host rows and measured kernel rows that a deployment's steps rest on.

use std::collections::BTreeSet;
use std::path::Path;

use crate::model::{Deployment, ModelConfig, Plan, RankLoad};
use crate::perfdb::{Database, HostKey, HostTime, LookupId, OpKey, kernel_shape};
use crate::timing::{Boundary, Execution, HostClass, HostMode, InputError, Policy};

use super::composer::{Composer, Gap, HostCosts, RequestTimes};

/// Host boundaries of a step, in their order on the host.
const HOST_BOUNDARIES: [Boundary; 4] = [
    Boundary::HostPrepare,
    Boundary::GraphLaunch,
    Boundary::HostDispatch,
    Boundary::HostFinish,
];

/// What host and kernel rows are looked for.
pub(super) struct Sought<'a> {
    pub database: &'a Database,
    /// Folder of model configs.
    pub models: &'a Path,
    pub deployment: &'a Deployment,
    /// Longest prompt, in tokens.
    pub isl: u32,
    pub policy: Policy,
}

impl Sought<'_> {
    fn key(&self, boundary: Boundary, execution: Option<Execution>) -> HostKey<'_> {
        let deployment = self.deployment;
        HostKey {
            boundary,
            execution,
            runtime: deployment.backend.name.as_str(),
            version: &deployment.backend.version,
            system: &deployment.system,
            model: &deployment.model,
            topology: deployment.parallel,
            cpu: deployment.host_cpu.as_deref(),
            isl: self.isl,
        }
    }

    fn find(&self, boundary: Boundary, execution: Option<Execution>) -> Option<HostTime> {
        let key = self.key(boundary, execution);
        self.database.host().find(&key, self.policy)
    }

    fn of_mode(&self, boundary: Boundary, mode: HostMode) -> Option<HostTime> {
        self.find(boundary, Some(mode.execution()))
    }
}

impl Composer {
    /// Puts kernel rows of a known execution mode before those of the tables.
    pub(super) fn resolve_kernels(&mut self, sought: &Sought<'_>) -> Result<(), InputError> {
        let key = HostKey {
            isl: 0,
            ..sought.key(Boundary::GpuKernel, None)
        };
        for row in sought.database.host().kernels(&key, sought.policy) {
            let unknown = |what: String| {
                let help = "name an op of decode attention as `stepgate predict --explain` does, \
                            and the number of its layers";
                InputError::new(format!("host row {}", row.id), what, help)
            };
            let at = self.plan.ops.iter().position(|op| {
                op.name == row.module && matches!(op.key, OpKey::GenerationAttention(_))
            });
            let (Some(at), Some(shape)) = (at, kernel_shape(&row)) else {
                return Err(unknown(format!("`{}` is no such op", row.module)));
            };
            let [_, _, layers] = shape;
            if layers != self.occurrences[at] {
                let there = self.occurrences[at];
                return Err(unknown(format!("sums over {layers} layers of {there}")));
            }
            let op = &self.plan.ops[at];
            let id = self.pricer.resolve_measured(&op.name, &op.key, &row, shape);
            for mode in HostMode::ALL {
                let (execution, prompts) = mode.attention();
                if row.execution.serves_host(execution) && (prompts || row.covers_decode()) {
                    self.op_ids[mode as usize][at] = id;
                }
            }
        }
        Ok(())
    }

    /// Host rows by mode and lane, and those of requests.
    pub(super) fn resolve_host(&mut self, sought: &Sought<'_>) -> Result<(), InputError> {
        if let Some(found) = sought.of_mode(Boundary::HostDispatch, HostMode::Eager) {
            self.host_class = found.class;
        }
        self.decode_class = self.host_class;
        let topology = sought.deployment.parallel;
        let entries = HostMode::WHOLE
            .into_iter()
            .flat_map(|mode| HOST_BOUNDARIES.map(|boundary| sought.of_mode(boundary, mode)))
            .flatten()
            .map(|found| found.per_rank.len())
            .max()
            .unwrap_or(1);
        // Ranks that do the same work from the same rows share a lane.
        self.lane_load = if topology.dp > 1 {
            (0..topology.dp as usize).collect()
        } else {
            vec![0; entries.min(topology.ranks() as usize)]
        };
        for mode in HostMode::WHOLE {
            self.resolve_mode(mode, sought)?;
        }
        self.split_costs();
        self.request = RequestTimes {
            client_transport: self.resolve_request(Boundary::ClientTransport, sought),
            ingress: self.resolve_request(Boundary::Ingress, sought),
            egress: self.resolve_request(Boundary::Egress, sought),
        };
        self.reprice_host();
        Ok(())
    }

    /// Host costs of every lane in one mode.
    fn resolve_mode(&mut self, mode: HostMode, sought: &Sought<'_>) -> Result<(), InputError> {
        let mut covered: BTreeSet<Boundary> = BTreeSet::new();
        let mut lane_costs = vec![HostCosts::default(); self.lane_load.len()];
        for boundary in HOST_BOUNDARIES {
            let applies = match boundary {
                Boundary::GraphLaunch => !matches!(mode, HostMode::Eager | HostMode::EagerDecode),
                Boundary::HostDispatch => mode != HostMode::FullGraph,
                _ => true,
            };
            // What lies inside another row's time is not added to it.
            if !applies || covered.contains(&boundary) {
                continue;
            }
            let found = sought.of_mode(boundary, mode);
            let rows = found.iter();
            let mut rows = rows.flat_map(|found| found.per_rank.iter().flatten());
            let of_other_steps =
                mode == HostMode::EagerDecode && !rows.all(|row| row.covers_decode());
            let found = if of_other_steps {
                self.decode_class = match sought.policy {
                    Policy::Strict => HostClass::Missing,
                    Policy::Estimate => HostClass::Derived,
                };
                let derived = found.filter(|_| sought.policy == Policy::Estimate);
                derived.map(of_steps_with_prompts)
            } else {
                found
            };
            let Some(found) = found else {
                self.gaps.insert(Gap {
                    boundary,
                    mode: Some(mode.name()),
                });
                continue;
            };
            for row in found.per_rank.iter().flatten() {
                covered.extend(row.includes.iter().copied());
            }
            let mut ratio = match boundary {
                Boundary::HostDispatch => {
                    launch_ratio(&found, &self.plan, sought.models, sought.deployment)?
                }
                _ => 1.0,
            };
            if of_other_steps && boundary == Boundary::HostDispatch {
                let launches = |load| f64::from(self.plan.launches(load));
                ratio *= launches(&generation()) / launches(&mixed());
            }
            self.note_derived(boundary, Some(mode.name()), &found, ratio);
            for (lane, costs) in lane_costs.iter_mut().enumerate() {
                let entry = &found.per_rank[lane.min(found.per_rank.len() - 1)];
                let lookup = Some(self.pricer.host(entry, ratio));
                match boundary {
                    Boundary::HostPrepare => costs.prepare = lookup,
                    Boundary::GraphLaunch => costs.launch = lookup,
                    Boundary::HostDispatch => costs.dispatch = lookup,
                    _ => costs.finish = lookup,
                }
            }
        }
        self.gaps
            .retain(|gap| gap.mode != Some(mode.name()) || !covered.contains(&gap.boundary));
        self.host[mode as usize] = lane_costs;
        Ok(())
    }

    /// A boundary of requests. `None`: it has no row.
    fn resolve_request(&mut self, boundary: Boundary, sought: &Sought<'_>) -> Option<LookupId> {
        let Some(found) = sought.find(boundary, None) else {
            self.gaps.insert(Gap {
                boundary,
                mode: None,
            });
            return None;
        };
        self.note_derived(boundary, None, &found, 1.0);
        Some(self.pricer.host(&found.per_rank[0], 1.0))
    }

    /// A split step prepares and ends once, like an eager one: it launches the graph of its
    /// generation part, then submits its context part.
    fn split_costs(&mut self) {
        let lanes = self.lane_load.len();
        let eager = &self.host[HostMode::Eager as usize];
        let graph = &self.host[HostMode::FullGraph as usize];
        let decode = (0..lanes).map(|lane| HostCosts {
            prepare: eager[lane].prepare,
            launch: graph[lane].launch,
            ..HostCosts::default()
        });
        let decode = decode.collect();
        let context = (0..lanes).map(|lane| HostCosts {
            dispatch: eager[lane].dispatch,
            finish: eager[lane].finish,
            ..HostCosts::default()
        });
        let launched = graph.iter().all(|costs| costs.launch.is_some());
        self.host[HostMode::SplitContext as usize] = context.collect();
        self.host[HostMode::SplitDecode as usize] = decode;
        // A graph's row may hold its launch inside another time, which a split step does not take.
        if !launched {
            self.gaps.insert(Gap {
                boundary: Boundary::GraphLaunch,
                mode: Some(HostMode::SplitDecode.name()),
            });
        }
    }

    fn note_derived(
        &mut self,
        boundary: Boundary,
        mode: Option<&'static str>,
        found: &HostTime,
        ratio: f64,
    ) {
        if let Some(rule) = &found.rule {
            let name = match mode {
                Some(mode) => format!("{boundary} ({mode})"),
                None => boundary.to_string(),
            };
            let scaled = if ratio == 1.0 {
                rule.clone()
            } else {
                format!("{rule}, by launch counts")
            };
            self.derived.insert(name, scaled);
        }
    }
}

/// Rows of steps with prompts, as they stand in for others.
fn of_steps_with_prompts(mut found: HostTime) -> HostTime {
    found.rule = Some(match &found.rule {
        Some(known) => format!("{known}, of steps with prompts"),
        None => {
            let rows = found.per_rank.iter().flatten();
            let ids: Vec<&str> = rows.map(|row| row.id.as_str()).collect();
            format!("{} of steps with prompts", ids.join(" + "))
        }
    });
    found
}

/// Launches of the deployment's mixed step over those of the step a host row was measured on.
fn launch_ratio(
    found: &HostTime,
    plan: &Plan,
    models: &Path,
    deployment: &Deployment,
) -> Result<f64, InputError> {
    let Some(scope) = found.per_rank[0][0].scope.as_ref() else {
        return Ok(1.0);
    };
    if scope.topology == deployment.parallel && scope.model == deployment.model {
        return Ok(1.0);
    }
    let mut measured = deployment.clone();
    measured.parallel = scope.topology;
    let config = ModelConfig::load(models, &scope.model)?;
    let measured = Plan::new(&config, &measured);
    Ok(f64::from(plan.launches(&mixed())) / f64::from(measured.launches(&mixed())))
}

/// A step of one prompt and one generation request: which ops run, not how large they are.
fn mixed() -> RankLoad {
    RankLoad {
        prompts: vec![1],
        ..generation()
    }
}

/// A step of one generation request.
fn generation() -> RankLoad {
    RankLoad {
        generation: 1,
        padded: 1,
        kv_sum: 1,
        ..RankLoad::default()
    }
}
