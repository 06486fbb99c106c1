//! Resolves a deployment's ops and host rows once, then composes its steps.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::model::{Deployment, ModelConfig, Module, Op, OpIndex, Plan, RankLoad, Units};
use crate::perfdb::{Database, LookupId, OpId, Pricer, Quantity, Refusal};
use crate::timing::{
    Boundary, Coverage, Execution, HostClass, HostMode, InputError, NumberMap, Origin, Policy,
    Provenance, Rows,
};

use super::fast::{Course, Segments, Walk};
use super::fault::Fault;
use super::lanes::{self, LaneStart, OpRun, PathStart, StepTimes};
use super::path::{Part, PathTerm, Paths, TermRange};
use super::resolve::Sought;

/// How steps are composed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Op by op: the reference.
    OpByOp,
    /// By segments between collectives, with repeated layers in closed form.
    Segments,
}

/// Host times of one lane in one execution mode. `None`: no row, left out and reported.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct HostCosts {
    pub prepare: Option<LookupId>,
    pub launch: Option<LookupId>,
    pub dispatch: Option<LookupId>,
    pub finish: Option<LookupId>,
    /// Prepare plus launch.
    pub before_first_ms: f64,
    pub dispatch_ms: f64,
}

/// Times of a request outside the executor. `None`: no row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RequestTimes {
    pub client_transport: Option<LookupId>,
    pub ingress: Option<LookupId>,
    pub egress: Option<LookupId>,
}

/// A boundary without a row, and where it is missing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gap {
    pub boundary: Boundary,
    /// Mode of the steps it is missing for; `None` for request boundaries.
    pub mode: Option<&'static str>,
}

/// A step with its ops priced.
pub(super) struct PricedStep<'a> {
    pub plan: &'a Plan,
    /// Lookup of each op per load, `NOT_RUN` where the step does not launch it, and its time.
    pub lookups: &'a [LookupId],
    pub times_ms: &'a [f64],
    pub lane_load: &'a [usize],
    pub host: &'a [HostCosts],
    /// Kernels the host submits op by op; 0 where a graph holds them.
    pub launches: u32,
}

const NOT_RUN: LookupId = LookupId(u32::MAX);

impl PricedStep<'_> {
    pub fn lookup(&self, lane: usize, op: OpIndex) -> LookupId {
        self.lookups[self.lane_load[lane] * self.plan.ops.len() + usize::from(op.0)]
    }

    pub fn runs(&self, op: OpIndex) -> bool {
        self.lookup(0, op) != NOT_RUN
    }

    pub fn ms(&self, lane: usize, op: OpIndex) -> f64 {
        self.times_ms[self.lane_load[lane] * self.plan.ops.len() + usize::from(op.0)]
    }

    pub fn part(&self, op: OpIndex) -> Part {
        if self.plan.op(op).key.is_collective() {
            Part::Transfer
        } else {
            Part::Kernel
        }
    }

    /// Share of the forward's dispatch that has passed once `launches` kernels are submitted.
    pub fn share(&self, launches: u32) -> f64 {
        if self.launches == 0 {
            0.0
        } else {
            f64::from(launches) / f64::from(self.launches)
        }
    }

    pub fn dispatch_ms(&self, lane: usize, launches: u32) -> f64 {
        self.host[lane].dispatch_ms * self.share(launches)
    }
}

/// Composes the steps of one deployment under one policy.
#[derive(Debug, Clone)]
pub struct Composer {
    pub(super) plan: Plan,
    pub(super) pricer: Pricer,
    /// Each op by mode of the step: decode attention may have rows of a known mode.
    pub(super) op_ids: [Vec<OpId>; HostMode::COUNT],
    /// How often each op stands in the sequence.
    pub(super) occurrences: Vec<f64>,
    segments: Segments,
    /// Load that each lane works on.
    pub(super) lane_load: Vec<usize>,
    /// Host costs per mode and lane.
    pub(super) host: [Vec<HostCosts>; HostMode::COUNT],
    pub(super) request: RequestTimes,
    pub(super) host_class: HostClass,
    /// The same for eager steps without prompts.
    pub(super) decode_class: HostClass,
    pub(super) gaps: BTreeSet<Gap>,
    pub(super) derived: BTreeMap<String, String>,
    method: Method,
    /// Steps by segments come with the paths to their ends.
    keeps_paths: bool,
    /// Only ever set by tests of the gate.
    pub(super) fault: Option<Fault>,
    lookups: Vec<LookupId>,
    times_ms: Vec<f64>,
    walk: Walk,
    decode_bases: NumberMap<u32, DecodeBase>,
    decode_steps: NumberMap<(HostMode, u32), DecodeSteps>,
}

/// Everything of a decode replay that does not depend on KV lengths.
#[derive(Debug, Clone)]
struct DecodeBase {
    ms: f64,
    terms: TermRange,
    /// The ops that do, with how often each stands in the forward.
    decode: Vec<(OpIndex, f64)>,
}

/// A decode replay whose lanes all do the same work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replay {
    pub ms: f64,
    pub terms: TermRange,
    /// The lookup that counted terms are counted from.
    pub first: LookupId,
}

/// Replays of one captured batch on lanes that attend to different lengths: what stays from step
/// to step.
#[derive(Debug, Clone)]
struct DecodeSteps {
    /// The ops that depend on KV lengths.
    decode: Vec<usize>,
    lookups: Vec<LookupId>,
    times_ms: Vec<f64>,
    walk: Walk,
    /// Paths to the ends of the lanes, by their course. In a graph the host submits everything at
    /// once, so a course says it all.
    paths: NumberMap<Course, Vec<(PathStart, TermRange)>>,
    /// The course of the step before, which the next one mostly takes too, and its paths.
    last: Option<(Course, Vec<(PathStart, TermRange)>)>,
}

/// Where a lane's stream ends and how it got there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaneEnd {
    pub ms: f64,
    pub from: PathStart,
    pub terms: TermRange,
    /// The lookup that counted terms are counted from.
    pub first: LookupId,
}

impl Composer {
    /// Resolves what `deployment` needs, under prompts of up to `isl` tokens. The inner error is an
    /// expected refusal: a GPU op that no row anchors.
    pub fn new(
        database: &Database,
        models: &Path,
        deployment: &Deployment,
        isl: u32,
        policy: Policy,
    ) -> Result<Result<Self, Refusal>, InputError> {
        let config = ModelConfig::load(models, &deployment.model)?;
        let plan = Plan::new(&config, deployment);
        let mut pricer = Pricer::new();
        let mut op_ids = Vec::new();
        let framework = deployment.backend.name.as_str();
        for op in &plan.ops {
            let id = pricer.resolve(
                database,
                &deployment.system,
                framework,
                &deployment.backend.version,
                &op.name,
                &op.key,
            )?;
            match id {
                Ok(id) => op_ids.push(id),
                Err(refusal) => return Ok(Err(refusal)),
            }
        }
        let mut occurrences = vec![0.0; plan.ops.len()];
        for op in plan.sequence() {
            occurrences[usize::from(op.0)] += 1.0;
        }
        let mut composer = Self {
            segments: Segments::default(),
            lane_load: Vec::new(),
            host: std::array::from_fn(|_| Vec::new()),
            request: RequestTimes::default(),
            host_class: HostClass::Missing,
            decode_class: HostClass::Missing,
            gaps: BTreeSet::new(),
            derived: BTreeMap::new(),
            method: Method::Segments,
            keeps_paths: true,
            fault: None,
            lookups: Vec::new(),
            times_ms: Vec::new(),
            walk: Walk::default(),
            decode_bases: NumberMap::default(),
            decode_steps: NumberMap::default(),
            plan,
            pricer,
            op_ids: std::array::from_fn(|_| op_ids.clone()),
            occurrences,
        };
        let sought = Sought {
            database,
            models,
            deployment,
            isl,
            policy,
        };
        composer.resolve_kernels(&sought)?;
        composer.resolve_host(&sought)?;
        composer.segments = Segments::new(&composer.plan, composer.lane_load.len());
        Ok(Ok(composer))
    }

    /// Host costs in milliseconds from their lookups.
    pub(super) fn reprice_host(&mut self) {
        let pricer = &self.pricer;
        let ms = |lookup: Option<LookupId>| lookup.map_or(0.0, |lookup| pricer.ms(lookup));
        for costs in self.host.iter_mut().flatten() {
            costs.before_first_ms = ms(costs.prepare) + ms(costs.launch);
            costs.dispatch_ms = ms(costs.dispatch);
        }
    }

    /// Chooses how steps are composed; [`Method::Segments`] unless told otherwise.
    pub fn set_method(&mut self, method: Method) {
        self.method = method;
    }

    /// Leaves out the paths to the ends of steps by segments: for times alone.
    pub fn keep_paths(&mut self, kept: bool) {
        self.keeps_paths = kept;
    }

    /// Makes room for so many decode steps.
    pub fn expect(&mut self, steps: usize) {
        let follow = self.plan.ops.iter().filter(|op| op.units == Units::Decode);
        let loads = 1 + self.lane_load.iter().max().unwrap_or(&0);
        self.pricer.expect(steps * follow.count() * loads);
    }

    /// Multiplies the rows that `pick` selects: null, homogeneity, what-if and planted faults. To
    /// be called before the first step.
    pub fn scale_rows(&mut self, factor: f64, pick: impl Fn(&Origin) -> bool) {
        self.pricer.scale_rows(factor, pick);
        self.reprice_host();
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn pricer(&self) -> &Pricer {
        &self.pricer
    }

    /// The rows, once everything is composed.
    pub fn into_rows(self) -> Rows {
        self.pricer.into_rows()
    }

    pub fn lanes(&self) -> usize {
        self.lane_load.len()
    }

    pub fn request_times(&self) -> RequestTimes {
        self.request
    }

    pub fn finish(&self, mode: HostMode, lane: usize) -> Option<LookupId> {
        self.host[mode as usize][lane].finish
    }

    /// Host terms and time of a whole submission on `lane`: prepare, launch and dispatch.
    pub fn submission(&self, mode: HostMode, lane: usize) -> (f64, Vec<PathTerm>) {
        let costs = self.host[mode as usize][lane];
        let mut terms = Vec::new();
        costs.terms(1.0, &mut terms);
        (costs.before_first_ms + costs.dispatch_ms, terms)
    }

    /// Host work of a step on `lane` before its first launch: prepare and graph launch, in
    /// milliseconds, where they have a row.
    pub fn before_first(
        &self,
        mode: HostMode,
        lane: usize,
    ) -> impl Iterator<Item = (Part, f64)> + use<'_> {
        let costs = self.host[mode as usize][lane];
        [
            (Part::HostPrepare, costs.prepare),
            (Part::GraphLaunch, costs.launch),
        ]
        .into_iter()
        .filter_map(|(part, lookup)| Some((part, self.pricer.ms(lookup?))))
    }

    /// Ops of a module with how often each stands in the forward.
    pub fn ops_of(&self, module: Module) -> Vec<(OpIndex, f64)> {
        self.plan
            .ops
            .iter()
            .zip(&self.occurrences)
            .enumerate()
            .filter(|(_, (op, _))| op.module == module)
            .map(|(index, (_, times))| (OpIndex(index as u16), *times))
            .collect()
    }

    /// Prices one op of a step that every rank group shares alike.
    pub fn price_alone(&mut self, op: OpIndex, load: &RankLoad) -> LookupId {
        self.replay_term(op, load).lookup
    }

    /// Composes one step. `loads` holds one entry per attention rank group.
    pub fn step(
        &mut self,
        loads: &[RankLoad],
        execution: Execution,
        start: &LaneStart,
    ) -> StepTimes {
        let prompts = loads.iter().any(|load| !load.prompts.is_empty());
        self.step_in(execution.host_mode(prompts), loads, execution, start)
    }

    /// The same with the host's work of a mode: a part of a split step has another one than its
    /// execution says.
    pub fn step_in(
        &mut self,
        mode: HostMode,
        loads: &[RankLoad],
        execution: Execution,
        start: &LaneStart,
    ) -> StepTimes {
        self.compose(mode, loads, execution, start, None)
    }

    /// The same op by op, with how each op ran, in the order of the forward.
    pub fn step_ops(
        &mut self,
        mode: HostMode,
        loads: &[RankLoad],
        execution: Execution,
        start: &LaneStart,
    ) -> (StepTimes, Vec<OpRun>) {
        let mut runs = Vec::new();
        let times = self.compose(mode, loads, execution, start, Some(&mut runs));
        (times, runs)
    }

    fn compose(
        &mut self,
        mode: HostMode,
        loads: &[RankLoad],
        execution: Execution,
        start: &LaneStart,
        runs: Option<&mut Vec<OpRun>>,
    ) -> StepTimes {
        let any = self.price_step(mode, loads, execution);
        let cut = self.segments.of(&any);
        let priced = PricedStep {
            plan: &self.plan,
            lookups: &self.lookups,
            times_ms: &self.times_ms,
            lane_load: &self.lane_load,
            host: &self.host[mode as usize],
            launches: match execution {
                Execution::FullGraph { .. } => 0,
                _ => cut.launches,
            },
        };
        if self.method == Method::OpByOp || runs.is_some() {
            return match self.fault {
                None => lanes::run(&priced, start, runs),
                Some(fault) => fault.run(&priced, start),
            };
        }
        let walk = &mut self.walk;
        let times = walk.times(&priced, cut, start, self.keeps_paths);
        if let (Execution::FullGraph { .. }, Some(batch)) = (execution, decode_batch(loads)) {
            let decodes = |op: &usize| self.plan.ops[*op].units == Units::Decode;
            let steps = DecodeSteps {
                decode: (0..self.plan.ops.len()).filter(decodes).collect(),
                lookups: self.lookups.clone(),
                times_ms: self.times_ms.clone(),
                walk: walk.clone(),
                paths: NumberMap::default(),
                last: None,
            };
            self.decode_steps.insert((mode, batch), steps);
        }
        times
    }

    /// A decode replay in closed form, where every lane does the same work: all lanes wait for the
    /// last one at the first collective, then run in step. `None` where the method or the lanes
    /// ask for the general way.
    pub fn decode_replay(&mut self, load: &RankLoad, paths: &mut Paths) -> Option<Replay> {
        let one_load = self.lane_load.iter().all(|load| *load == 0);
        if self.method == Method::OpByOp || !one_load || !load.prompts.is_empty() {
            return None;
        }
        if !self.decode_bases.contains_key(&load.padded) {
            let base = self.decode_base(load, paths);
            self.decode_bases.insert(load.padded, base);
        }
        let base = &self.decode_bases[&load.padded];
        let first = self.pricer.next();
        let mut ms = base.ms;
        for (op, times) in &base.decode {
            let id = self.op_ids[HostMode::FullGraph as usize][usize::from(op.0)];
            let lookup = price_decode(&mut self.pricer, id, load);
            ms += times * self.pricer.ms(lookup);
        }
        Some(Replay {
            ms,
            terms: base.terms,
            first,
        })
    }

    fn decode_base(&mut self, load: &RankLoad, paths: &mut Paths) -> DecodeBase {
        let mut ms = 0.0;
        let mut fixed = Vec::new();
        let mut decode = Vec::new();
        for index in 0..self.plan.ops.len() {
            let op = OpIndex(index as u16);
            if self.plan.op(op).units == Units::Decode {
                decode.push((op, self.occurrences[index]));
            } else if self.plan.runs(op, load) {
                let term = self.replay_term(op, load);
                ms += term.times * self.pricer.ms(term.lookup);
                fixed.push(term);
            }
        }
        let first = self.pricer.next();
        let counted = decode
            .iter()
            .zip(first.0..)
            .map(|((_, times), lookup)| PathTerm {
                part: Part::Kernel,
                lookup: LookupId(lookup),
                times: *times,
            });
        let terms: Vec<PathTerm> = counted.chain(fixed).collect();
        DecodeBase {
            ms,
            terms: paths.store_counted(&terms, first),
            decode,
        }
    }

    /// A decode replay on lanes that attend to different lengths, from the second step of its
    /// captured batch on: only what depends on these lengths is priced and measured again. `None`
    /// asks for the general way.
    pub fn decode_step<'a>(
        &'a mut self,
        mode: HostMode,
        loads: &[RankLoad],
        start: &LaneStart,
        paths: &mut Paths,
    ) -> Option<impl Iterator<Item = LaneEnd> + use<'a>> {
        let batch = decode_batch(loads)?;
        let steps = self.decode_steps.get_mut(&(mode, batch))?;
        let first = self.pricer.next();
        for (load, row) in loads.iter().zip(0..) {
            for op in &steps.decode {
                let at = row * self.plan.ops.len() + op;
                let lookup = price_decode(&mut self.pricer, self.op_ids[mode as usize][*op], load);
                steps.lookups[at] = lookup;
                steps.times_ms[at] = self.pricer.ms(lookup);
            }
        }
        let cut = self.segments.of(&loads[0]);
        let priced = PricedStep {
            plan: &self.plan,
            lookups: &steps.lookups,
            times_ms: &steps.times_ms,
            lane_load: &self.lane_load,
            host: &self.host[mode as usize],
            launches: 0,
        };
        let walk = &mut steps.walk;
        walk.measure_decode(&priced, cut);
        walk.run(&priced, cut, start);
        let last = match steps.last.take() {
            Some(last) if last.0 == walk.course => last,
            _ => {
                let lanes = self.lane_load.len();
                let known = steps.paths.entry(walk.course.clone());
                let of_lanes = known.or_insert_with(|| {
                    let of_lane = |lane| {
                        let path = walk.path(&priced, cut, lane);
                        (path.from, paths.store_counted(&path.terms, first))
                    };
                    (0..lanes).map(of_lane).collect()
                });
                (walk.course.clone(), of_lanes.clone())
            }
        };
        let ends = walk.gpu_ms.iter().zip(&steps.last.insert(last).1);
        Some(ends.map(move |(ms, (from, terms))| LaneEnd {
            ms: *ms,
            from: *from,
            terms: *terms,
            first,
        }))
    }

    fn replay_term(&mut self, op: OpIndex, load: &RankLoad) -> PathTerm {
        let info = self.plan.op(op);
        PathTerm {
            part: if info.key.is_collective() {
                Part::Transfer
            } else {
                Part::Kernel
            },
            times: self.occurrences[usize::from(op.0)],
            lookup: price_op(
                &mut self.pricer,
                self.op_ids[HostMode::FullGraph as usize][usize::from(op.0)],
                info,
                load,
                std::slice::from_ref(load),
                Execution::FullGraph {
                    captured_batch: load.padded,
                },
            ),
        }
    }

    /// Prices the ops of a step and returns what all ranks together launch.
    fn price_step(&mut self, mode: HostMode, loads: &[RankLoad], execution: Execution) -> RankLoad {
        self.lookups.clear();
        self.times_ms.clear();
        // A step launches an op on every lane or on none: collectives need them all.
        let any = RankLoad {
            prompts: (loads.iter().flat_map(|load| &load.prompts))
                .copied()
                .collect(),
            padded: loads.iter().map(|load| load.padded).sum(),
            ..RankLoad::default()
        };
        for load in loads {
            for (index, op) in self.plan.ops.iter().enumerate() {
                let (lookup, ms) = if self.plan.runs(OpIndex(index as u16), &any) {
                    let id = self.op_ids[mode as usize][index];
                    let lookup = price_op(&mut self.pricer, id, op, load, loads, execution);
                    (lookup, self.pricer.ms(lookup))
                } else {
                    (NOT_RUN, f64::NAN)
                };
                self.lookups.push(lookup);
                self.times_ms.push(ms);
            }
        }
        any
    }

    /// What the prediction rests on so far. `modes` are the execution modes of its steps;
    /// `requests` says whether the boundaries of requests are part of it.
    pub fn coverage(&self, modes: &BTreeSet<&'static str>, requests: bool) -> Coverage {
        let mut coverage = Coverage {
            host: if modes.contains(HostMode::EagerDecode.name()) {
                self.decode_class
            } else if modes.contains(HostMode::Eager.name()) {
                self.host_class
            } else {
                HostClass::NotNeeded
            },
            missing: BTreeSet::new(),
            derived: BTreeMap::new(),
            gpu: self.pricer.anchors(),
            kernel_mode_unknown: 0,
            duplicate_rows: 0,
            observers: BTreeSet::new(),
        };
        for gap in &self.gaps {
            match gap.mode {
                Some(mode) if modes.contains(mode) => {
                    coverage
                        .missing
                        .insert(format!("{} ({mode})", gap.boundary));
                }
                None if requests => {
                    coverage.missing.insert(gap.boundary.to_string());
                }
                _ => {}
            }
        }
        for (name, rule) in &self.derived {
            let of_mode = HostMode::WHOLE
                .map(HostMode::name)
                .into_iter()
                .find(|mode| name.contains(&format!("({mode})")));
            if of_mode.map_or(requests, |mode| modes.contains(mode)) {
                coverage.derived.insert(name.clone(), rule.clone());
            }
        }
        let rows = self.pricer.rows();
        for id in self.pricer.used_rows() {
            match rows.origin(id) {
                Origin::Op { duplicates, .. } => {
                    coverage.kernel_mode_unknown += 1;
                    coverage.duplicate_rows += u64::from(duplicates.is_some());
                    coverage.observers.insert("op_benchmark".to_owned());
                }
                Origin::Host(row) => {
                    coverage.observers.insert(row.samples.observer.to_string());
                    if let Provenance::Derived { .. } = row.provenance {
                        coverage
                            .observers
                            .insert("difference of observers".to_owned());
                    }
                }
                Origin::Roofline { .. } => {
                    coverage.observers.insert("datasheet".to_owned());
                }
            }
        }
        coverage
    }
}

/// Padded batch of a step in which every rank group decodes as many.
fn decode_batch(loads: &[RankLoad]) -> Option<u32> {
    let batch = loads[0].padded;
    let alike = |load: &RankLoad| load.prompts.is_empty() && load.padded == batch;
    loads.iter().all(alike).then_some(batch)
}

fn price_decode(pricer: &mut Pricer, id: OpId, load: &RankLoad) -> LookupId {
    // A rank group without such requests has nothing to attend to.
    if load.padded == 0 {
        return pricer.nothing();
    }
    let batch = f64::from(load.padded);
    let mean_kv = load.kv_sum as f64 / batch;
    pricer.price(id, Quantity::Decode { batch, mean_kv })
}

fn price_op(
    pricer: &mut Pricer,
    id: OpId,
    op: &Op,
    load: &RankLoad,
    loads: &[RankLoad],
    execution: Execution,
) -> LookupId {
    // Piecewise capture pads the tokens of the captured segments; attention between them has its
    // own lengths. A full graph's load is padded already.
    let tokens = |load: &RankLoad| match execution {
        Execution::Piecewise { captured_tokens } => load.tokens().max(captured_tokens),
        _ => load.tokens(),
    };
    let count = match op.units {
        Units::Prompts | Units::ContextTokens if load.prompts.is_empty() => {
            return pricer.nothing();
        }
        Units::GenerationTokens if load.padded == 0 => return pricer.nothing(),
        Units::Prompts => {
            let pieces = Quantity::Pieces {
                lengths: &load.prompts,
                prefixes: &load.prefixes,
            };
            return pricer.price(id, pieces);
        }
        Units::Decode => return price_decode(pricer, id, load),
        // A collective moves what its largest rank holds.
        Units::Tokens if op.key.is_collective() => most(loads, tokens),
        Units::Sequences if op.key.is_collective() => most(loads, RankLoad::sequences),
        Units::Tokens => tokens(load),
        Units::ContextTokens => load.prompts.iter().sum(),
        Units::GenerationTokens => load.padded,
        Units::AllTokens => loads.iter().map(tokens).sum(),
        Units::Sequences => load.sequences(),
    };
    pricer.price(id, Quantity::Count(op.per_unit * f64::from(count)))
}

fn most(loads: &[RankLoad], of: impl Fn(&RankLoad) -> u32) -> u32 {
    loads.iter().map(of).max().unwrap_or(0)
}
