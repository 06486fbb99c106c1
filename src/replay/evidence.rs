//! Ops and steps by themselves: predictions that no scheduler can blur.

use std::collections::{BTreeMap, BTreeSet};

use crate::compose::{Composer, LaneStart, Method, Part, PathTerm, Stamp};
use crate::model::{Count, Module, OpKind, OpScenario, RankLoad, StepExecution, StepScenario};
use crate::perfdb::Refusal;
use crate::timing::{Coverage, Execution, HostMode, InputError, Policy};

use super::lanes::Lanes;
use super::log::Keep;
use super::predict::Replayer;

/// One op's share of an op case.
#[derive(Debug, Clone, PartialEq)]
pub struct OpShare {
    pub name: String,
    /// Occurrences counted.
    pub times: f64,
    /// Time of one occurrence.
    pub ms: f64,
    /// Rows it rests on: name, weight, work ratio and time in milliseconds.
    pub rows: Vec<(String, f64, f64, f64)>,
}

/// GPU time of an op.
#[derive(Debug, Clone, PartialEq)]
pub struct OpPrediction {
    pub ms: f64,
    pub shares: Vec<OpShare>,
    pub coverage: Coverage,
}

/// One composed step, by rank lane. Times in milliseconds from the start of the host's iteration.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPrediction {
    /// First GPU op's start to the last one's end.
    pub gpu_span_ms: Vec<f64>,
    /// When the host has submitted everything.
    pub host_ms: Vec<f64>,
    /// Waiting for peers inside collectives: an outcome, in no sum.
    pub rank_wait_ms: Vec<f64>,
    /// Parts along the path to the end of the last rank.
    pub parts_ms: BTreeMap<Part, f64>,
    /// Terms of that path, with the time of each.
    pub path: Vec<(PathTerm, f64)>,
    /// Kernels the host submits.
    pub launches: u32,
    /// The step as one of many alike.
    pub iteration: Iteration,
    pub coverage: Coverage,
}

/// An iteration while its step repeats under the overlap scheduler, in milliseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Iteration {
    /// From its start to the start of the next.
    pub ms: f64,
    /// Work of the first rank's host: what of it is not on the path below is hidden behind the GPU.
    pub host_ms: f64,
    /// Parts along the path from one start to the next.
    pub parts_ms: BTreeMap<Part, f64>,
}

impl Iteration {
    /// The part that holds most of the iteration.
    pub fn bound_by(&self) -> Option<Part> {
        largest(&self.parts_ms)
    }

    /// Repeats a step until each iteration is like the one before.
    fn of(composer: &mut Composer, execution: Execution, loads: &[RankLoad]) -> Self {
        let mut lanes = Lanes::new(composer, Keep::All, REPEATS);
        let mut pending: Option<(Vec<Stamp>, HostMode)> = None;
        let mut starts = [lanes.paths.origin(); 2];
        for _ in 0..REPEATS {
            let start = lanes.all_hosts();
            starts = [starts[1], start];
            lanes.host.fill(start);
            let mode = lanes.dispatch(execution, loads);
            if let Some((gpu, mode)) = pending.take() {
                lanes.finish(&gpu, mode);
            }
            pending = Some((lanes.gpu.clone(), mode));
        }
        let [from, to] = starts;
        let way = lanes.paths.between(from, to);
        let prompts = loads.iter().any(|load| !load.prompts.is_empty());
        let mode = execution.host_mode(prompts);
        let finish = composer.finish(mode, 0);
        let host_ms =
            composer.submission(mode, 0).0 + finish.map_or(0.0, |one| composer.pricer().ms(one));
        let mut parts_ms = BTreeMap::new();
        for term in way {
            let ms = term.times * composer.pricer().ms(term.lookup);
            *parts_ms.entry(term.part).or_insert(0.0) += ms;
        }
        // What the ways to both starts have in common cancels up to its rounding.
        parts_ms.retain(|_, ms: &mut f64| ms.abs() > ROUNDING_REL * to.ms);
        Self {
            ms: to.ms - from.ms,
            host_ms,
            parts_ms,
        }
    }
}

/// Steps until an iteration is like the one before: from idle lanes, host and GPU are in step after
/// two.
const REPEATS: usize = 8;
const ROUNDING_REL: f64 = 1e-12;

fn largest(parts_ms: &BTreeMap<Part, f64>) -> Option<Part> {
    let largest = parts_ms.iter().max_by(|a, b| a.1.total_cmp(b.1));
    largest.map(|(part, _)| *part)
}

impl StepPrediction {
    /// The part that holds most of the path.
    pub fn bound_by(&self) -> Option<Part> {
        largest(&self.parts_ms)
    }

    pub fn end_ms(&self) -> f64 {
        self.parts_ms.values().sum()
    }
}

impl Replayer {
    /// Predicts an op case.
    pub fn op(&self, scenario: &OpScenario) -> Result<Result<OpPrediction, Refusal>, InputError> {
        let composer = Composer::new(
            self.database(),
            self.models(),
            &scenario.deployment,
            scenario.tokens,
            Policy::Strict,
        )?;
        let mut composer = match composer {
            Ok(composer) => composer,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let module = match scenario.op {
            OpKind::Moe => Module::Experts,
            OpKind::AllreduceNorm => Module::Reduce,
        };
        let context = scenario.tokens - scenario.generation;
        let load = RankLoad {
            prompts: if context > 0 { vec![context] } else { vec![] },
            generation: scenario.generation,
            padded: scenario.generation,
            kv_sum: u64::from(scenario.generation),
            ..RankLoad::default()
        };
        let mut shares = Vec::new();
        let mut ms = 0.0;
        for (op, occurrences) in composer.ops_of(module) {
            if module == Module::Experts && composer.plan().op(op).name != "experts" {
                continue;
            }
            let times = match scenario.count {
                Count::Once => 1.0,
                Count::PerLayer => occurrences,
            };
            let lookup = composer.price_alone(op, &load);
            let pricer = composer.pricer();
            let one = pricer.ms(lookup);
            ms += times * one;
            let rows = pricer.rows();
            shares.push(OpShare {
                name: composer.plan().op(op).name.clone(),
                times,
                ms: one,
                rows: pricer
                    .terms(lookup)
                    .iter()
                    .map(|term| {
                        (
                            rows.describe(term.row),
                            term.weight,
                            term.work_ratio,
                            rows.ms(term.row),
                        )
                    })
                    .collect(),
            });
        }
        Ok(Ok(OpPrediction {
            ms,
            shares,
            coverage: composer.coverage(&BTreeSet::new(), false),
        }))
    }

    /// Predicts a step case from idle lanes, op by op.
    pub fn step(
        &self,
        scenario: &StepScenario,
        policy: Policy,
    ) -> Result<Result<StepPrediction, Refusal>, InputError> {
        let generation = scenario.generation;
        let (requests, mean_kv) = generation.map_or((0, 0), |generation| {
            (generation.requests, generation.mean_kv)
        });
        let isl = scenario.context.iter().copied().max().unwrap_or(mean_kv);
        let composer = Composer::new(
            self.database(),
            self.models(),
            &scenario.deployment,
            isl,
            policy,
        )?;
        let mut composer = match composer {
            Ok(composer) => composer,
            Err(refusal) => return Ok(Err(refusal)),
        };
        composer.set_method(Method::OpByOp);
        let load = RankLoad {
            prompts: scenario.context.clone(),
            prefixes: scenario.prefix.clone(),
            generation: requests,
            padded: requests,
            kv_sum: u64::from(requests) * u64::from(mean_kv),
        };
        let execution = match scenario.execution {
            StepExecution::Eager => Execution::Eager,
            StepExecution::FullGraph => Execution::FullGraph {
                captured_batch: requests,
            },
        };
        let loads = vec![load; scenario.deployment.parallel.dp as usize];
        let lanes = composer.lanes();
        let start = LaneStart {
            host_ms: vec![0.0; lanes],
            gpu_ms: vec![0.0; lanes],
        };
        let times = composer.step(&loads, execution, &start);
        let mut last = 0;
        for lane in 0..lanes {
            if times.gpu_ms[lane] > times.gpu_ms[last] {
                last = lane;
            }
        }
        let pricer = composer.pricer();
        let mut parts_ms = BTreeMap::new();
        let mut path = Vec::new();
        for term in &times.gpu_path[last].terms {
            let ms = term.times * pricer.ms(term.lookup);
            *parts_ms.entry(term.part).or_insert(0.0) += ms;
            path.push((*term, ms));
        }
        let iteration = Iteration::of(&mut composer, execution, &loads);
        Ok(Ok(StepPrediction {
            iteration,
            gpu_span_ms: (0..lanes)
                .map(|lane| times.gpu_ms[lane] - times.begin_ms[lane])
                .collect(),
            host_ms: times.host_ms,
            rank_wait_ms: times.wait_ms,
            parts_ms,
            path,
            launches: composer.plan().launches(&loads[0]),
            coverage: composer.coverage(
                &BTreeSet::from([execution.host_mode(!scenario.context.is_empty()).name()]),
                false,
            ),
        }))
    }
}
