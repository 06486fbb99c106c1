//! From a scenario to a prediction under one policy.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use crate::compose::{Composer, Fault, Method, Part, Paths, Receipt, Stamp};
use crate::model::{BackendName, ModelConfig, Scenario};
use crate::perfdb::{Database, Pricer, Refusal};
use crate::timing::{Coverage, HostMode, InputError, Origin, Policy, RowId, Rows};

use super::capacity::KvCapacity;
use super::client::Replayed;
use super::lengths;
use super::log::{IterationRecord, Keep, StepLog};
use super::metrics::Metric;
use super::record::{Detail, Recorder};
use super::{sglang, trtllm};

/// A predicted serving point. Times in milliseconds.
#[derive(Debug, Clone)]
pub struct Prediction {
    pub policy: Policy,
    pub ttft: Metric,
    pub tpot: Metric,
    pub ttft_receipt: Receipt,
    pub tpot_receipt: Receipt,
    /// Requests per second over the whole run.
    pub requests_per_s: f64,
    /// Output tokens per second over the whole run.
    pub output_tokens_per_s: f64,
    /// Steps by kind and execution mode, for example `decode full_graph`.
    pub steps: BTreeMap<String, u64>,
    pub coverage: Coverage,
    /// Tokens of KV cache per rank group; `None`: the system's memory is not known.
    pub kv_tokens: Option<u64>,
    pub log: StepLog,
    /// Ways to a typical first token and to the slowest one.
    pub ways: Vec<RequestWay>,
    /// The rows that the receipts' coefficients multiply.
    pub rows: Rows,
}

/// One request's way to its first token. Times in milliseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestWay {
    pub request: u32,
    /// POST until the executor has it.
    pub arrival_ms: f64,
    /// In the executor's queue.
    pub queue_ms: f64,
    /// From its schedule to the client's first chunk, along the critical path, in order of time:
    /// part, row and milliseconds. Equal neighbours are summed.
    pub path: Vec<(Part, RowId, f64)>,
}

impl RequestWay {
    fn of(request: u32, stamps: &[[Stamp; 4]], paths: &Paths, pricer: &Pricer) -> Self {
        let [post, arrival, scheduled, first] = stamps[request as usize];
        let mut path: Vec<(Part, RowId, f64)> = Vec::new();
        for term in paths.between(scheduled, first) {
            for row in pricer.terms(term.lookup) {
                let ms = term.times * row.coefficient() * pricer.rows().ms(row.row);
                match path
                    .iter_mut()
                    .find(|(part, id, _)| *part == term.part && *id == row.row)
                {
                    Some((_, _, sum)) => *sum += ms,
                    None => path.push((term.part, row.row, ms)),
                }
            }
        }
        Self {
            request,
            arrival_ms: arrival.ms - post.ms,
            queue_ms: scheduled.ms - arrival.ms,
            path,
        }
    }
}

/// What a scenario comes to.
#[derive(Debug, Clone)]
pub enum Outcome {
    Predicted(Box<Prediction>),
    /// Nothing anchors some op: an expected refusal, naming the missing row.
    Refused(Refusal),
}

/// Replays scenarios over one database.
#[derive(Debug)]
pub struct Replayer {
    database: Database,
    models: PathBuf,
    fault: Option<Fault>,
}

impl Replayer {
    /// Opens a data folder (`systems/`, `host/`, `models/`), with the op tables of `systems_dir`
    /// where one is given.
    pub fn open(data: &Path, systems_dir: Option<&Path>) -> Result<Self, InputError> {
        Ok(Self {
            database: Database::open(data, systems_dir)?,
            models: data.join("models"),
            fault: None,
        })
    }

    /// Plants a fault in every composer from here on: what a test of the gate does.
    #[doc(hidden)]
    pub fn plant(&mut self, fault: Fault) {
        self.fault = Some(fault);
    }

    pub fn database(&self) -> &Database {
        &self.database
    }

    pub fn models(&self) -> &Path {
        &self.models
    }

    /// Resolves the ops and host rows of a scenario.
    pub fn composer(
        &self,
        scenario: &Scenario,
        policy: Policy,
    ) -> Result<Result<Composer, Refusal>, InputError> {
        Composer::new(
            &self.database,
            &self.models,
            &scenario.deployment,
            scenario.workload.isl,
            policy,
        )
    }

    /// Predicts a scenario.
    pub fn predict(&self, scenario: &Scenario, policy: Policy) -> Result<Outcome, InputError> {
        self.predict_with(scenario, policy, None, |_| {})
    }

    /// Predicts with every row that `pick` selects multiplied by `factor`, on the schedule of
    /// `recorded` where one is given: the null and homogeneity proofs and planted faults.
    pub fn predict_scaled(
        &self,
        scenario: &Scenario,
        policy: Policy,
        factor: f64,
        pick: impl Fn(&Origin) -> bool,
        recorded: Option<&StepLog>,
    ) -> Result<Outcome, InputError> {
        self.predict_with(scenario, policy, recorded, |composer| {
            composer.scale_rows(factor, pick);
        })
    }

    /// Predicts the times of requests alone, with every row multiplied by a factor, on a recorded
    /// schedule where one is given: iterations, receipts and ways stay empty.
    pub fn times<'a>(
        &self,
        scenario: &'a Scenario,
        policy: Policy,
    ) -> Result<impl Fn(f64, Option<&StepLog>) -> Outcome + use<'a>, InputError> {
        let composer = self.planted_composer(scenario, policy)?;
        let capacity = self.kv_capacity(scenario)?;
        Ok(move |factor: f64, recorded: Option<&StepLog>| {
            let mut composer = match &composer {
                Ok(composer) => composer.clone(),
                Err(refusal) => return Outcome::Refused(refusal.clone()),
            };
            composer.scale_rows(factor, |_| true);
            let recorded = (recorded, Keep::Times);
            Self::replay(composer, scenario, capacity, policy, recorded)
        })
    }

    /// Predicts by a method of choice: the reference that the fast path is held to.
    pub fn predict_by(
        &self,
        scenario: &Scenario,
        policy: Policy,
        method: Method,
    ) -> Result<Outcome, InputError> {
        self.predict_with(scenario, policy, None, |composer| {
            composer.set_method(method);
        })
    }

    fn predict_with(
        &self,
        scenario: &Scenario,
        policy: Policy,
        recorded: Option<&StepLog>,
        prepare: impl FnOnce(&mut Composer),
    ) -> Result<Outcome, InputError> {
        let mut composer = match self.planted_composer(scenario, policy)? {
            Ok(composer) => composer,
            Err(refusal) => return Ok(Outcome::Refused(refusal)),
        };
        prepare(&mut composer);
        let capacity = self.kv_capacity(scenario)?;
        let recorded = (recorded, Keep::All);
        Ok(Self::replay(composer, scenario, capacity, policy, recorded))
    }

    fn planted_composer(
        &self,
        scenario: &Scenario,
        policy: Policy,
    ) -> Result<Result<Composer, Refusal>, InputError> {
        let mut composer = self.composer(scenario, policy)?;
        if let (Ok(composer), Some(fault)) = (&mut composer, self.fault) {
            composer.plant(fault);
        }
        Ok(composer)
    }

    /// KV cache of a rank group; `None` where nothing limits it or its size is not known.
    pub fn kv_capacity(&self, scenario: &Scenario) -> Result<Option<KvCapacity>, InputError> {
        let deployment = &scenario.deployment;
        let config = ModelConfig::load(&self.models, &deployment.model)?;
        let memory = self.database.gpu_memory(&deployment.system)?;
        let fraction = scenario.serving.memory_fraction;
        Ok(KvCapacity::of(
            &config,
            deployment,
            memory.as_ref(),
            fraction,
        ))
    }

    /// Replays a predicted scenario again, op by op on the schedule of its `log`, and keeps the
    /// `chosen` iterations in detail.
    pub fn detail(
        &self,
        scenario: &Scenario,
        policy: Policy,
        log: &StepLog,
        chosen: RangeInclusive<usize>,
    ) -> Result<Result<Detail, Refusal>, InputError> {
        let mut composer = match self.composer(scenario, policy)? {
            Ok(composer) => composer,
            Err(refusal) => return Ok(Err(refusal)),
        };
        composer.set_method(Method::OpByOp);
        let capacity = self.kv_capacity(scenario)?;
        let lengths = lengths::draw(&scenario.workload);
        let recorder = Recorder::new(chosen, composer.lanes());
        let (run, made) = (&mut composer, &lengths);
        let recorded = (Some(log), Keep::All);
        let replayed = Self::execute(scenario, run, made, capacity, recorded, Some(recorder));
        Ok(replayed.and_then(|replayed| {
            replayed.detail.ok_or_else(|| Refusal {
                missing: "the replay kept no iteration".to_owned(),
            })
        }))
    }

    fn execute(
        scenario: &Scenario,
        composer: &mut Composer,
        lengths: &[(u32, u32)],
        capacity: Option<KvCapacity>,
        (recorded, keep): (Option<&StepLog>, Keep),
        recorder: Option<Recorder>,
    ) -> Result<Replayed, Refusal> {
        match scenario.deployment.backend.name {
            BackendName::Trtllm => {
                trtllm::Executor::new(scenario, composer, lengths, capacity, recorded, keep)
                    .recording(recorder)
                    .run()
            }
            BackendName::Sglang => {
                sglang::Executor::new(scenario, composer, lengths, capacity, recorded, keep)?
                    .recording(recorder)
                    .run()
            }
        }
    }

    fn replay(
        composer: Composer,
        scenario: &Scenario,
        capacity: Option<KvCapacity>,
        policy: Policy,
        recorded: (Option<&StepLog>, Keep),
    ) -> Outcome {
        match Self::prediction(composer, scenario, capacity, policy, recorded) {
            Ok(prediction) => Outcome::Predicted(Box::new(prediction)),
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    fn prediction(
        mut composer: Composer,
        scenario: &Scenario,
        capacity: Option<KvCapacity>,
        policy: Policy,
        recorded: (Option<&StepLog>, Keep),
    ) -> Result<Prediction, Refusal> {
        let lengths = lengths::draw(&scenario.workload);
        let longest = lengths.iter().map(|(prompt, output)| prompt + output).max();
        if let (Some(capacity), Some(longest)) = (capacity, longest)
            && capacity.tokens < u64::from(longest)
        {
            return Err(Refusal {
                missing: if capacity.tokens == 0 {
                    "the weights leave no memory for a KV cache".to_owned()
                } else {
                    format!(
                        "the KV cache holds {} tokens, a request needs {longest}",
                        capacity.tokens
                    )
                },
            });
        }
        let (run, made) = (&mut composer, &lengths);
        let Replayed {
            log, paths, stamps, ..
        } = Self::execute(scenario, run, made, capacity, recorded, None)?;
        let times = |of: &dyn Fn(&super::RequestRecord) -> Option<f64>| {
            log.requests
                .iter()
                .enumerate()
                .filter_map(|(index, request)| Some((index as u32, of(request)?)))
                .collect::<Vec<_>>()
        };
        let nothing = || Refusal {
            missing: "no request has more than one output token: there is no TPOT".to_owned(),
        };
        let ttft = Metric::of(times(&|request| Some(request.ttft_ms()))).ok_or_else(nothing)?;
        let tpot = Metric::of(times(&|request| request.tpot_ms())).ok_or_else(nothing)?;
        let end_ms = log
            .requests
            .iter()
            .map(|request| request.last_token_ms)
            .fold(0.0, f64::max);
        let tokens: u64 = lengths.iter().map(|(_, output)| u64::from(*output)).sum();
        // Most steps are like the one before.
        let mut stretches: Vec<(_, &IterationRecord, u64)> = Vec::new();
        for iteration in &log.iterations {
            let Some((execution, _)) = &iteration.step else {
                continue;
            };
            let like = (iteration.kind(), *execution, iteration.decode_graph);
            match stretches.last_mut() {
                Some((before, _, count)) if *before == like => *count += 1,
                _ => stretches.push((like, iteration, 1)),
            }
        }
        let (mut counts, mut modes) = (BTreeMap::new(), BTreeSet::new());
        for (_, iteration, count) in stretches {
            if let (Some(kind), Some(mode)) = (iteration.kind(), iteration.mode()) {
                *counts.entry((kind, mode)).or_insert(0) += count;
                modes.extend(iteration.host_modes().map(HostMode::name));
            }
        }
        let steps = counts
            .into_iter()
            .map(|((kind, mode), count)| (format!("{} {mode}", kind.name()), count))
            .collect();
        let slowest = log
            .requests
            .iter()
            .enumerate()
            .max_by(|a, b| a.1.ttft_ms().total_cmp(&b.1.ttft_ms()).then(b.0.cmp(&a.0)))
            .map_or(0, |(index, _)| index as u32);
        let ways = [ttft.p50.request, slowest]
            .map(|request| RequestWay::of(request, &stamps, &paths, composer.pricer()))
            .into();
        let (ttft_receipt, tpot_receipt) = paths.receipts(composer.pricer());
        Ok(Prediction {
            ways,
            policy,
            ttft,
            tpot,
            ttft_receipt,
            tpot_receipt,
            requests_per_s: lengths.len() as f64 / end_ms * 1e3,
            output_tokens_per_s: tokens as f64 / end_ms * 1e3,
            steps,
            coverage: composer.coverage(&modes, true),
            kv_tokens: capacity.map(|capacity| capacity.tokens),
            rows: composer.into_rows(),
            log,
        })
    }
}
