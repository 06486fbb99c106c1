//! The auditor: what it holds while it plays a prediction again.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::compose::Part;
use crate::model::{BackendName, ModelConfig, Scenario};
use crate::replay::Prediction;
use crate::timing::{Boundary, NumberMap, Row};

use super::client::Progress;
use super::fault::{AuditFault, AuditReport, Check, FAULTS_MAX};
use super::forward::{Task, forward};
use super::lookup::{Field, Share, field};
use super::moment::{Amounts, Cost, Lot, Slot, Sum};
use super::sources::{Known, Sources};
use super::step::{Order, Repeated, Scratch};

/// Recomputes `prediction` and compares. `configs` holds the configs of the scenario's model and of
/// every model that host rows were measured with, by model id.
///
/// # Errors
/// Everything that could not be confirmed, up to a limit.
pub fn audit(
    scenario: &Scenario,
    configs: &BTreeMap<String, ModelConfig>,
    prediction: &Prediction,
) -> Result<AuditReport, Vec<AuditFault>> {
    let mut auditor = Auditor::new(scenario, configs, prediction)?;
    auditor.check_lengths();
    auditor.check_missing();
    match scenario.deployment.backend.name {
        BackendName::Trtllm => auditor.replay_trtllm(),
        BackendName::Sglang => auditor.replay_sglang(),
    }
    let report = auditor.compare();
    if auditor.faults.is_empty() {
        Ok(report)
    } else {
        Err(auditor.faults)
    }
}

/// The parts of a split step, among the modes.
pub(super) const SPLIT_GENERATION: usize = 4;
pub(super) const SPLIT_CONTEXT: usize = 5;

/// Host times of a lane in one mode, each with its path.
#[derive(Debug, Clone, Default)]
pub(super) struct HostLane {
    /// Up to where the forward's dispatch begins.
    pub(super) before: Cost,
    pub(super) dispatch: Cost,
    pub(super) finish: Cost,
}

pub(super) struct Auditor<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) config: &'a ModelConfig,
    pub(super) configs: &'a BTreeMap<String, ModelConfig>,
    pub(super) prediction: &'a Prediction,
    pub(super) faults: Vec<AuditFault>,
    pub(super) sources: Sources,
    /// By part, then source; empty: none of the part yet.
    slots: Vec<Vec<Option<Slot>>>,
    pub(super) lots: Vec<Lot>,
    /// Kernel rows of decode attention.
    pub(super) kernels: Vec<(Known, Arc<Row>)>,
    /// Distinct tasks, and the forward as positions in them with launches.
    pub(super) tasks: Vec<Task>,
    pub(super) fields: Vec<Option<Field>>,
    pub(super) forward: Vec<(usize, u32)>,
    /// The same for steps with prompts (1), generation (2) or both (3).
    pub(super) orders: [Option<Rc<Order>>; 4],
    /// Graph replays by their padded batch.
    pub(super) repeated: NumberMap<u32, Rc<Repeated>>,
    pub(super) priced: Vec<NumberMap<u64, Rc<Cost>>>,
    /// Those of the lookup at hand.
    pub(super) shares: Vec<Share>,
    pub(super) scratch: Scratch,
    pub(super) lookups: usize,
    pub(super) ties: usize,
    /// By mode (eager, full graph, piecewise, eager without prompts, and the generation and the
    /// context part of a split step) and lane.
    pub(super) hosts: [Vec<HostLane>; 6],
    pub(super) transport: Cost,
    pub(super) ingress: Cost,
    pub(super) egress: Cost,
    // The replay's state.
    pub(super) requests: Vec<Progress>,
    pub(super) posted: usize,
    /// Requests of more than one token.
    pub(super) streaming: usize,
    pub(super) service: Sum,
    pub(super) queues: BTreeMap<Part, Sum>,
    pub(super) tpot: Sum,
}

impl<'a> Auditor<'a> {
    fn new(
        scenario: &'a Scenario,
        configs: &'a BTreeMap<String, ModelConfig>,
        prediction: &'a Prediction,
    ) -> Result<Self, Vec<AuditFault>> {
        let deployment = &scenario.deployment;
        let Some(config) = configs.get(&deployment.model) else {
            return Err(vec![AuditFault {
                check: Check::Rows,
                what: format!("no config of {}", deployment.model),
            }]);
        };
        let mut faults = Vec::new();
        let sources = Sources::new(&prediction.rows, &mut faults);
        let mut tasks: Vec<Task> = Vec::new();
        let mut order = Vec::new();
        for (task, kernels) in forward(config, deployment, deployment.parallel) {
            let at = tasks.iter().position(|known| *known == task);
            let at = at.unwrap_or_else(|| {
                tasks.push(task);
                tasks.len() - 1
            });
            order.push((at, kernels));
        }
        let mut fields = Vec::new();
        for task in &tasks {
            fields.push(match task {
                Task::Move { .. } => None,
                _ => match field(*task, config, deployment, &sources) {
                    Ok(field) => Some(field),
                    Err(fault) => {
                        faults.push(fault);
                        None
                    }
                },
            });
        }
        if !faults.is_empty() {
            faults.truncate(FAULTS_MAX);
            return Err(faults);
        }
        let kernel_rows = sources.hosts.iter();
        let kernels = kernel_rows
            .filter(|(_, row)| row.boundary == Boundary::GpuKernel)
            .cloned()
            .collect();
        let mut auditor = Self {
            scenario,
            config,
            configs,
            prediction,
            faults,
            sources,
            slots: vec![Vec::new(); Part::ALL.len()],
            lots: Vec::new(),
            kernels,
            repeated: NumberMap::default(),
            priced: vec![NumberMap::default(); tasks.len()],
            tasks,
            fields,
            forward: order,
            orders: [None, None, None, None],
            shares: Vec::new(),
            scratch: Scratch::default(),
            lookups: 0,
            ties: 0,
            hosts: std::array::from_fn(|_| Vec::new()),
            transport: Cost::default(),
            ingress: Cost::default(),
            egress: Cost::default(),
            requests: vec![Progress::default(); prediction.log.requests.len()],
            posted: 0,
            streaming: prediction
                .log
                .requests
                .iter()
                .filter(|one| one.output > 1)
                .count(),
            service: Sum::default(),
            queues: BTreeMap::new(),
            tpot: Sum::default(),
        };
        auditor.host_times();
        Ok(auditor)
    }

    pub(super) fn fault(&mut self, check: Check, what: String) {
        if self.faults.len() < FAULTS_MAX {
            self.faults.push(AuditFault { check, what });
        }
    }

    /// What a source is called.
    pub(super) fn name(&self, known: Known) -> String {
        self.prediction.rows.describe(self.sources.ids[known])
    }

    fn slot(&mut self, part: Part, known: Known) -> Slot {
        let slots = &mut self.slots[part as usize];
        slots.resize(self.sources.ms.len(), None);
        *slots[known].get_or_insert_with(|| {
            self.lots.push(Lot::Row(part, known));
            self.lots.len() - 1
        })
    }

    /// Costs that always occur together, so many of each, as one.
    pub(super) fn bundle(&mut self, costs: &[(Rc<Cost>, u32)]) -> Rc<Cost> {
        let mut ms = 0.0;
        let mut of = Amounts::new();
        for (cost, times) in costs {
            let times = f64::from(*times);
            ms += times * cost.ms;
            of.extend(cost.of.iter().map(|(slot, one)| (*slot, times * one)));
        }
        self.lots.push(Lot::Bundle(of));
        Rc::new(Cost {
            ms,
            of: Amounts::from_slice(&[(self.lots.len() - 1, 1.0)]),
        })
    }

    pub(super) fn cost(&mut self, part: Part, shares: &[Share]) -> Cost {
        self.lookups += 1;
        let mut cost = Cost {
            ms: 0.0,
            of: Amounts::new(),
        };
        for share in shares {
            let times = share.weight * share.work;
            cost.ms += times * self.sources.ms[share.known];
            let slot = self.slot(part, share.known);
            cost.of.push((slot, times));
        }
        cost
    }
}
