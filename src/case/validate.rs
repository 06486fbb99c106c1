//! Bounds, defaults and what keys demand of each other.

use std::path::Path;

use super::date::Date;
use super::load::{Case, OpCase, Silicon, StepCase, Tolerance};
use super::measured::{OpMeasured, StepMeasured};
use super::schema::{
    At, BATCH_DEFAULT, BATCH_MAX, BackendKeys, CellKeys, CudaGraphKeys, DECODE_STEPS_MAX, Flag,
    GPUS_MAX, HostKeys, ITERATIONS_MAX, KernelsKeys, LIST_MAX, MS_MAX, OpFile, PREFILL_PIECES_MAX,
    PREFILL_TOKENS_DEFAULT, ParallelKeys, PiecewiseKeys, PrecisionKeys, REQUESTS_MAX, Real,
    ServingFile, ServingKeys, SiliconKeys, StepFile, TEXT_MAX, TOKENS_MAX, ToleranceKeys, Whole,
    WorkloadKeys,
};
use crate::model::{
    AttentionDpBalance, Backend, BackendName, BatchWait, Capacity, Count, CudaGraph, Deployment,
    GemmDtype, Generation, KV_BLOCK, Kernels, KvCacheDtype, MixedExecution, OpScenario, Piecewise,
    Precision, Scenario, Serving, StepExecution, StepScenario, Workload,
};
use crate::timing::{InputError, SourceCell, Topology};

/// What a topology must fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelDims {
    /// Attention heads.
    pub heads: u32,
    /// KV heads; the number of heads where attention shares one latent (MLA).
    pub kv_heads: u32,
    /// `None` in a model without experts.
    pub experts: Option<u32>,
}

/// Line and column.
#[derive(Debug, Clone, Copy)]
struct Place(u64, u64);

impl<T> From<&At<T>> for Place {
    fn from(at: &At<T>) -> Self {
        Self(at.line, at.column)
    }
}

/// Where the keys stand that are checked against the model later.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    model: Place,
    tp: Place,
    moe_ep: Place,
}

pub(super) fn serving(path: &Path, file: &ServingFile) -> Result<Case, InputError> {
    let check = Check { path };
    let (deployment, places) = check.deployment(DeploymentKeys {
        model: &file.model,
        system: &file.system,
        backend: &file.backend,
        parallel: &file.parallel,
        precision: file.precision.as_ref(),
        kernels: file.kernels.as_ref(),
        host: file.host.as_ref(),
    })?;
    let workload = check.workload(&file.workload)?;
    let serving = check.serving(&file.serving, &workload, &deployment)?;
    let in_flight = u64::from(serving.max_batch_size) * u64::from(deployment.parallel.dp);
    let in_flight = in_flight.min(u64::from(workload.concurrency));
    let decode_steps = u64::from(workload.requests) * u64::from(workload.osl) / in_flight;
    if decode_steps > DECODE_STEPS_MAX {
        let keys = &file.workload;
        let place = keys.requests.as_ref().unwrap_or(&keys.osl);
        return Err(check.fault(
            place,
            "workload",
            format!(
                "requests * osl over {in_flight} requests in flight is {decode_steps} decode steps"
            ),
            format!("expected up to {DECODE_STEPS_MAX}"),
        ));
    }
    // The smallest pieces come while all the others generate.
    let cut = serving.chunked_prefill.then(|| {
        let generating = serving.max_batch_size.min(workload.concurrency);
        let left = serving.max_num_tokens.saturating_sub(generating);
        (left / KV_BLOCK * KV_BLOCK).max(KV_BLOCK)
    });
    if let Some(chunk) = serving.chunked_prefill_size.or(cut) {
        let pieces = u64::from(workload.requests) * u64::from(workload.isl.div_ceil(chunk));
        if pieces > PREFILL_PIECES_MAX {
            return Err(check.fault(
                &file.workload.isl,
                "workload",
                format!("requests * isl in chunks of {chunk} is {pieces} pieces of prompts"),
                format!("expected up to {PREFILL_PIECES_MAX}"),
            ));
        }
    }
    let silicon = file.silicon.as_ref().map(|keys| check.silicon(keys));
    let tolerance = file.tolerance.as_ref().map(|keys| check.tolerance(keys));
    Ok(Case {
        file: path.to_path_buf(),
        point: file.point.as_ref().map(|point| point.value.0),
        point_at: file.point.as_ref().map(|point| (point.line, point.column)),
        silicon: silicon.transpose()?,
        tolerance: tolerance.transpose()?,
        scenario: Scenario {
            deployment,
            workload,
            serving,
        },
        places,
    })
}

pub(super) fn op(path: &Path, file: &OpFile) -> Result<OpCase, InputError> {
    let check = Check { path };
    let (deployment, places) = check.deployment(DeploymentKeys {
        model: &file.model,
        system: &file.system,
        backend: &file.backend,
        parallel: &file.parallel,
        precision: file.precision.as_ref(),
        kernels: file.kernels.as_ref(),
        host: file.host.as_ref(),
    })?;
    let tokens = check.count(&file.tokens, "tokens", 1, TOKENS_MAX)?;
    let generation = match &file.generation {
        Some(at) => check.count(at, "generation", 0, tokens)?,
        None => 0,
    };
    let measured = &file.measured;
    check.list_len(measured, "measured", measured.value.len())?;
    let measured = measured
        .value
        .iter()
        .map(|keys| {
            Ok(OpMeasured {
                label: check.text(&keys.label, "measured.label")?,
                ms: check.ms(&keys.ms, "measured.ms")?,
                source: check.cell(&keys.source)?,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(OpCase {
        file: path.to_path_buf(),
        measured,
        scenario: OpScenario {
            deployment,
            op: file.op.value,
            tokens,
            generation,
            count: file.count.as_ref().map_or(Count::Once, |at| at.value),
        },
        places,
    })
}

pub(super) fn step(path: &Path, file: &StepFile) -> Result<StepCase, InputError> {
    let check = Check { path };
    let (deployment, places) = check.deployment(DeploymentKeys {
        model: &file.model,
        system: &file.system,
        backend: &file.backend,
        parallel: &file.parallel,
        precision: file.precision.as_ref(),
        kernels: file.kernels.as_ref(),
        host: file.host.as_ref(),
    })?;
    let keys = &file.step.value;
    let context = match &keys.context {
        Some(list) if list.value.len() > LIST_MAX => {
            return Err(check.too_long(list, "step.context"));
        }
        Some(list) => list
            .value
            .iter()
            .map(|tokens| check.count(tokens, "step.context", 1, TOKENS_MAX))
            .collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    let tokens: u64 = context.iter().map(|tokens| u64::from(*tokens)).sum();
    if let Some(list) = keys
        .context
        .as_ref()
        .filter(|_| tokens > u64::from(TOKENS_MAX))
    {
        return Err(check.fault(
            list,
            "step.context",
            format!("the prompts hold {tokens} tokens together"),
            format!("expected up to {TOKENS_MAX}"),
        ));
    }
    let prefix: Vec<u32> = match &keys.prefix {
        Some(list) if list.value.len() != context.len() => {
            return Err(check.fault(
                list,
                "step.prefix",
                format!("{} prefixes of {} prompts", list.value.len(), context.len()),
                "give one for each entry of `step.context`",
            ));
        }
        Some(list) => list
            .value
            .iter()
            .map(|tokens| check.count(tokens, "step.prefix", 0, TOKENS_MAX))
            .collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    let generation = match &keys.generation {
        Some(keys) => Some(Generation {
            requests: check.count(&keys.requests, "step.generation.requests", 1, BATCH_MAX)?,
            mean_kv: check.count(&keys.mean_kv, "step.generation.mean_kv", 1, TOKENS_MAX)?,
        }),
        None => None,
    };
    if context.is_empty() && generation.is_none() {
        return Err(check.fault(
            &file.step,
            "step",
            "the step holds no request",
            "give `context`, `generation` or both",
        ));
    }
    let graphed = file.execution.value == StepExecution::FullGraph;
    if graphed && !context.is_empty() {
        return Err(check.fault(
            &file.execution,
            "execution",
            "a full graph serves generation requests only",
            "write `eager`, or leave out `step.context`",
        ));
    }
    let measured = &file.measured;
    check.list_len(measured, "measured", measured.value.len())?;
    let measured = measured
        .value
        .iter()
        .map(|keys| {
            Ok(StepMeasured {
                label: check.text(&keys.label, "measured.label")?,
                what: keys.what.value,
                ms: check.ms(&keys.ms, "measured.ms")?,
                source: check.cell(&keys.source)?,
                minus: keys
                    .minus
                    .as_ref()
                    .map(|cell| check.cell(cell))
                    .transpose()?,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(StepCase {
        file: path.to_path_buf(),
        measured,
        scenario: StepScenario {
            deployment,
            context,
            prefix,
            generation,
            execution: file.execution.value,
        },
        places,
    })
}

pub(super) fn against_model(
    path: &Path,
    deployment: &Deployment,
    places: &Places,
    dims: &ModelDims,
) -> Result<(), InputError> {
    let fault = |place: Place, field: &str, what: String, help: &str| {
        Err(InputError::new(path, what, help)
            .at(place.0, place.1)
            .field(field))
    };
    let Topology { tp, moe_ep, .. } = deployment.parallel;
    if dims.heads == 0 || !dims.heads.is_multiple_of(tp) {
        let what = format!("tp {tp} does not divide the {} attention heads", dims.heads);
        return fault(
            places.tp,
            "parallel.tp",
            what,
            "choose a divisor, or use dp",
        );
    }
    // With fewer KV heads than ranks each head is held by several ranks.
    if dims.kv_heads == 0
        || (!dims.kv_heads.is_multiple_of(tp) && !tp.is_multiple_of(dims.kv_heads))
    {
        let what = format!("tp {tp} does not fit the {} KV heads", dims.kv_heads);
        return fault(
            places.tp,
            "parallel.tp",
            what,
            "choose a divisor or a multiple of the KV heads",
        );
    }
    match dims.experts {
        None if moe_ep != 1 => fault(
            places.moe_ep,
            "parallel.moe_ep",
            format!("moe_ep {moe_ep} in a model without experts"),
            "leave out moe_ep",
        ),
        Some(experts) if experts == 0 || !experts.is_multiple_of(moe_ep) => fault(
            places.moe_ep,
            "parallel.moe_ep",
            format!("moe_ep {moe_ep} does not divide the {experts} experts"),
            "choose a divisor",
        ),
        Some(_) if deployment.precision.moe.is_none() => fault(
            places.model,
            "precision.moe",
            format!(
                "`{}` has experts, and their precision is not given",
                deployment.model
            ),
            "add `precision: { moe: ... }`",
        ),
        _ => Ok(()),
    }
}

/// The keys that the three kinds share.
struct DeploymentKeys<'a> {
    model: &'a At<String>,
    system: &'a At<String>,
    backend: &'a BackendKeys,
    parallel: &'a At<ParallelKeys>,
    precision: Option<&'a PrecisionKeys>,
    kernels: Option<&'a KernelsKeys>,
    host: Option<&'a HostKeys>,
}

/// Captured sizes, ascending, ending in `max`; without a list the framework makes its own.
struct Captured {
    sizes: Option<Vec<u32>>,
    max: u32,
}

struct Check<'a> {
    path: &'a Path,
}

impl Check<'_> {
    fn fault(
        &self,
        place: impl Into<Place>,
        field: &str,
        what: impl Into<String>,
        help: impl Into<String>,
    ) -> InputError {
        let Place(line, column) = place.into();
        InputError::new(self.path, what, help)
            .at(line, column)
            .field(field)
    }

    fn count(&self, at: &At<Whole>, field: &str, min: u32, max: u32) -> Result<u32, InputError> {
        let Whole(value) = at.value;
        if (min..=max).contains(&value) {
            return Ok(value);
        }
        Err(self.fault(
            at,
            field,
            format!("{value} is out of range"),
            format!("expected {min} to {max}"),
        ))
    }

    /// A share in (0, 1].
    fn share(&self, at: &At<Real>, field: &str) -> Result<f64, InputError> {
        let Real(value) = at.value;
        if value > 0.0 && value <= 1.0 {
            return Ok(value);
        }
        Err(self.fault(
            at,
            field,
            format!("{value} is out of range"),
            "expected a share above 0 and up to 1",
        ))
    }

    fn ms(&self, at: &At<Real>, field: &str) -> Result<f64, InputError> {
        let Real(value) = at.value;
        if value > 0.0 && value <= MS_MAX {
            return Ok(value);
        }
        Err(self.fault(
            at,
            field,
            format!("{value} is no measured time"),
            format!("expected milliseconds above 0 and up to {MS_MAX}"),
        ))
    }

    /// Text for people: one line, not blank.
    fn text(&self, at: &At<String>, field: &str) -> Result<String, InputError> {
        let text = at.value.trim();
        if text.is_empty() {
            return Err(self.fault(at, field, "the text is blank", "write what it says"));
        }
        if text.len() > TEXT_MAX || text.chars().any(char::is_control) {
            return Err(self.fault(
                at,
                field,
                "the text is too long or holds control characters",
                format!("expected one line of up to {TEXT_MAX} bytes"),
            ));
        }
        Ok(text.to_owned())
    }

    /// A name that becomes part of a path in data/, so it must not be able to leave a folder.
    fn name(&self, at: &At<String>, field: &str) -> Result<String, InputError> {
        let name = &at.value;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+');
        let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts_well && name.len() <= TEXT_MAX && name.chars().all(plain) {
            return Ok(name.clone());
        }
        Err(self.fault(
            at,
            field,
            format!(
                "`{}` is no name",
                name.chars()
                    .take(TEXT_MAX)
                    .collect::<String>()
                    .escape_debug()
            ),
            "expected letters, digits, `.`, `_`, `-` and `+`, with a letter or digit first",
        ))
    }

    fn date(&self, at: &At<String>, field: &str) -> Result<Date, InputError> {
        at.value.parse().map_err(|reason: &str| {
            let shown: String = at.value.chars().take(TEXT_MAX).collect();
            self.fault(
                at,
                field,
                format!("`{}` is no date: {reason}", shown.escape_debug()),
                "write a date such as 2027-03-01",
            )
        })
    }

    fn too_long<T>(&self, at: &At<T>, field: &str) -> InputError {
        self.fault(
            at,
            field,
            "the list is too long",
            format!("expected up to {LIST_MAX} entries"),
        )
    }

    fn list_len<T>(&self, at: &At<T>, field: &str, len: usize) -> Result<(), InputError> {
        if len == 0 {
            return Err(self.fault(at, field, "the list is empty", "add an entry"));
        }
        if len > LIST_MAX {
            return Err(self.too_long(at, field));
        }
        Ok(())
    }

    /// A list of captured sizes and its maximum, either of which may be left out.
    fn captured(
        &self,
        (list, list_field): (Option<&At<Vec<At<Whole>>>>, &str),
        (max, max_field): (Option<&At<Whole>>, &str),
        size_max: u32,
    ) -> Result<Option<Captured>, InputError> {
        let max_given = max
            .map(|at| self.count(at, max_field, 1, size_max))
            .transpose()?;
        let Some(list) = list else {
            return Ok(max_given.map(|max| Captured { sizes: None, max }));
        };
        self.list_len(list, list_field, list.value.len())?;
        let mut sizes: Vec<u32> = Vec::with_capacity(list.value.len());
        for at in &list.value {
            let size = self.count(at, list_field, 1, size_max)?;
            if let Some(before) = sizes.last().filter(|before| **before >= size) {
                return Err(self.fault(
                    at,
                    list_field,
                    format!("{size} follows {before}: the list is not ascending"),
                    "sort the list and drop repeats",
                ));
            }
            sizes.push(size);
        }
        let last = sizes.last().copied().unwrap_or_default();
        match max.zip(max_given) {
            Some((at, given)) if given != last => Err(self.fault(
                at,
                max_field,
                format!("{given} is not the last entry of the list, {last}"),
                "leave out the maximum, or make the two agree",
            )),
            _ => Ok(Some(Captured {
                sizes: Some(sizes),
                max: last,
            })),
        }
    }

    fn cell(&self, keys: &CellKeys) -> Result<SourceCell, InputError> {
        Ok(SourceCell {
            table: self.text(&keys.table, "source.table")?,
            row: self.text(&keys.row, "source.row")?,
            column: self.text(&keys.column, "source.column")?,
        })
    }

    fn deployment(&self, keys: DeploymentKeys<'_>) -> Result<(Deployment, Places), InputError> {
        let parallel = self.parallel(keys.parallel)?;
        let shape = &keys.parallel.value;
        let places = Places {
            model: keys.model.into(),
            tp: (&shape.tp).into(),
            moe_ep: shape
                .moe_ep
                .as_ref()
                .map_or_else(|| keys.parallel.into(), Place::from),
        };
        let deployment = Deployment {
            model: self.name(keys.model, "model")?,
            system: self.name(keys.system, "system")?,
            backend: Backend {
                name: keys.backend.name.value,
                version: self.name(&keys.backend.version, "backend.version")?,
            },
            parallel,
            precision: precision(keys.precision),
            kernels: kernels(keys.kernels),
            host_cpu: keys
                .host
                .map(|host| self.text(&host.cpu, "host.cpu"))
                .transpose()?,
        };
        Ok((deployment, places))
    }

    fn parallel(&self, at: &At<ParallelKeys>) -> Result<Topology, InputError> {
        let keys = &at.value;
        let degree = |key: Option<&At<Whole>>, field: &str| {
            key.map(|at| self.count(at, field, 1, GPUS_MAX)).transpose()
        };
        let tp = self.count(&keys.tp, "parallel.tp", 1, GPUS_MAX)?;
        let dp = degree(keys.dp.as_ref(), "parallel.dp")?.unwrap_or(1);
        let moe_ep = degree(keys.moe_ep.as_ref(), "parallel.moe_ep")?.unwrap_or(1);
        let gpus = tp * dp;
        let moe_tp = degree(keys.moe_tp.as_ref(), "parallel.moe_tp")?.unwrap_or(gpus / moe_ep);
        if gpus > GPUS_MAX {
            return Err(self.fault(
                at,
                "parallel",
                format!("tp {tp} * dp {dp} is {gpus} GPUs"),
                format!("a node has up to {GPUS_MAX}"),
            ));
        }
        if moe_tp * moe_ep != gpus {
            return Err(self.fault(
                at,
                "parallel",
                format!("moe_tp {moe_tp} * moe_ep {moe_ep} is not tp {tp} * dp {dp}"),
                format!("attention and experts share the GPUs: expected a product of {gpus}"),
            ));
        }
        Ok(Topology {
            tp,
            dp,
            moe_tp,
            moe_ep,
        })
    }

    fn workload(&self, keys: &WorkloadKeys) -> Result<Workload, InputError> {
        let isl = self.count(&keys.isl, "workload.isl", 1, TOKENS_MAX)?;
        let osl = self.count(&keys.osl, "workload.osl", 1, TOKENS_MAX)?;
        let concurrency = self.count(&keys.concurrency, "workload.concurrency", 1, BATCH_MAX)?;
        let length_ratio = match &keys.length_ratio {
            Some(at) => self.share(at, "workload.length_ratio")?,
            None => 0.8,
        };
        // Truncation as in the client: int(len * ratio).
        let shortest = |longest: u32| (f64::from(longest) * length_ratio) as u32;
        if shortest(isl) < 1 {
            return Err(self.fault(
                &keys.isl,
                "workload.isl",
                "the shortest prompt would have no token",
                "raise isl or length_ratio",
            ));
        }
        if shortest(osl) < 2 {
            return Err(self.fault(
                &keys.osl,
                "workload.osl",
                "the shortest output would have less than two tokens, and no TPOT",
                "raise osl or length_ratio",
            ));
        }
        let requests = match &keys.requests {
            Some(at) => self.count(at, "workload.requests", concurrency, REQUESTS_MAX)?,
            None => concurrency * 10,
        };
        Ok(Workload {
            isl,
            osl,
            concurrency,
            requests,
            length_ratio,
            seed: keys.seed.as_ref().map_or(0, |at| at.value.0),
            chat_template: keys.chat_template.as_ref().is_some_and(|at| at.value.0),
        })
    }

    /// Refuses settings that the case's runtime does not have: they would change nothing.
    fn settings_of_the_other(
        &self,
        keys: &ServingKeys,
        backend: BackendName,
    ) -> Result<(), InputError> {
        let place = |at: (u64, u64)| At {
            value: (),
            line: at.0,
            column: at.1,
        };
        macro_rules! at {
            ($key:ident) => {
                (
                    concat!("serving.", stringify!($key)),
                    keys.$key.as_ref().map(|at| (at.line, at.column)),
                )
            };
        }
        let foreign = match backend {
            BackendName::Trtllm => vec![
                at!(max_prefill_tokens),
                at!(chunked_prefill_size),
                at!(scheduler_recv_interval),
            ],
            BackendName::Sglang => vec![
                at!(batch_wait),
                at!(attention_dp_balance),
                at!(piecewise),
                at!(mixed_execution),
                at!(chunked_prefill),
                at!(capacity),
            ],
        };
        for (field, found) in foreign {
            if let Some(found) = found {
                return Err(self.fault(
                    &place(found),
                    field,
                    format!("{backend} has no such setting"),
                    "take it out: it belongs to the other runtime",
                ));
            }
        }
        Ok(())
    }

    fn serving(
        &self,
        at: &At<ServingKeys>,
        workload: &Workload,
        deployment: &Deployment,
    ) -> Result<Serving, InputError> {
        let keys = &at.value;
        let parallel = deployment.parallel;
        self.settings_of_the_other(keys, deployment.backend.name)?;
        let max_prefill_tokens = (keys.max_prefill_tokens.as_ref())
            .map(|at| self.count(at, "serving.max_prefill_tokens", 1, TOKENS_MAX))
            .transpose()?;
        let chunked = keys.chunked_prefill.as_ref().filter(|at| at.value.0);
        if let Some(at) = chunked {
            self.chunked_prefill(at, keys, parallel)?;
        }
        let chunked = chunked.is_some();
        let field = "serving.max_num_tokens";
        let max_num_tokens = match &keys.max_num_tokens {
            Some(at) if at.value.0 < workload.isl && !chunked => {
                let tokens = self.count(at, field, 1, TOKENS_MAX)?;
                return Err(self.fault(
                    at,
                    field,
                    format!(
                        "{tokens} tokens cannot hold the longest prompt, {}",
                        workload.isl
                    ),
                    "without chunked prefill a prompt is never split: raise it to isl or more",
                ));
            }
            Some(at) => self.count(at, field, 1, TOKENS_MAX)?,
            None if deployment.backend.name == BackendName::Sglang => {
                max_prefill_tokens.unwrap_or(PREFILL_TOKENS_DEFAULT)
            }
            None => {
                return Err(self.fault(
                    at,
                    field,
                    "missing key `max_num_tokens`",
                    "add it: with trtllm it bounds what one iteration takes in",
                ));
            }
        };
        let field = "serving.max_seq_len";
        let sequence = workload.isl + workload.osl;
        let max_seq_len = match &keys.max_seq_len {
            Some(at) if at.value.0 < sequence => {
                return Err(self.fault(
                    at,
                    field,
                    format!("{} tokens cannot hold the longest request", at.value.0),
                    format!("expected isl + osl, {sequence}, or more"),
                ));
            }
            Some(at) => Some(self.count(at, field, 1, TOKENS_MAX * 2)?),
            None => None,
        };
        if let Some(wait) = keys.batch_wait.as_ref().filter(|_| parallel.dp > 1) {
            return Err(self.fault(
                wait,
                "serving.batch_wait",
                "batch_wait has no effect with attention DP",
                "leave it out, or set dp to 1",
            ));
        }
        let balance = keys.attention_dp_balance.as_ref();
        if let Some(balance) = balance.filter(|_| parallel.dp == 1) {
            return Err(self.fault(
                balance,
                "serving.attention_dp_balance",
                "attention_dp_balance without attention DP",
                "leave it out, or set dp above 1",
            ));
        }
        let balance = balance.map(|at| {
            let iterations = |at, field| self.count(at, field, 0, ITERATIONS_MAX);
            Ok(AttentionDpBalance {
                batching_wait_iters: iterations(
                    &at.value.batching_wait_iters,
                    "serving.attention_dp_balance.batching_wait_iters",
                )?,
                timeout_iters: iterations(
                    &at.value.timeout_iters,
                    "serving.attention_dp_balance.timeout_iters",
                )?,
            })
        });
        let wait = keys.batch_wait.as_ref().map(|at| {
            Ok(BatchWait {
                timeout_iters: self.count(
                    &at.value.timeout_iters,
                    "serving.batch_wait.timeout_iters",
                    1,
                    ITERATIONS_MAX,
                )?,
                max_tokens_ratio: self.share(
                    &at.value.max_tokens_ratio,
                    "serving.batch_wait.max_tokens_ratio",
                )?,
            })
        });
        let graph = keys.cuda_graph.as_ref().map(|at| self.cuda_graph(at));
        let piecewise = keys.piecewise.as_ref().map(|at| self.piecewise(at));
        let fraction = keys.memory_fraction.as_ref();
        Ok(Serving {
            max_batch_size: match &keys.max_batch_size {
                Some(at) => self.count(at, "serving.max_batch_size", 1, BATCH_MAX)?,
                None => BATCH_DEFAULT,
            },
            max_num_tokens,
            max_seq_len,
            overlap: keys.overlap.as_ref().is_none_or(|at| at.value.0),
            cuda_graph: graph.transpose()?,
            piecewise: piecewise.transpose()?,
            mixed_execution: self.mixed_execution(keys, parallel)?,
            batch_wait: wait.transpose()?,
            attention_dp_balance: balance.transpose()?,
            capacity: keys
                .capacity
                .as_ref()
                .map_or(Capacity::GuaranteedNoEvict, |at| at.value),
            memory_fraction: fraction
                .map(|at| self.share(at, "serving.memory_fraction"))
                .transpose()?,
            stream_interval: match &keys.stream_interval {
                Some(at) => self.count(at, "serving.stream_interval", 1, ITERATIONS_MAX)?,
                None => 1,
            },
            chunked_prefill: chunked,
            max_prefill_tokens,
            chunked_prefill_size: (keys.chunked_prefill_size.as_ref())
                .map(|at| self.count(at, "serving.chunked_prefill_size", 1, TOKENS_MAX))
                .transpose()?,
            scheduler_recv_interval: match &keys.scheduler_recv_interval {
                Some(at) => self.count(at, "serving.scheduler_recv_interval", 1, ITERATIONS_MAX)?,
                None => 1,
            },
            block_reuse: keys.block_reuse.as_ref().is_some_and(|at| at.value.0),
        })
    }

    /// What chunked prefill is replayed with.
    fn chunked_prefill(
        &self,
        at: &At<Flag>,
        keys: &ServingKeys,
        parallel: Topology,
    ) -> Result<(), InputError> {
        let greedy = keys.capacity.as_ref().map(|at| at.value) == Some(Capacity::MaxUtilization);
        let beside = [
            (parallel.dp > 1, "attention DP"),
            (keys.batch_wait.is_some(), "batch_wait"),
            (greedy, "capacity: max_utilization"),
        ];
        if let Some((_, beside)) = beside.iter().find(|(there, _)| *there) {
            return Err(self.fault(
                at,
                "serving.chunked_prefill",
                format!("chunked prefill is not modelled beside {beside}"),
                "leave one of them out",
            ));
        }
        match &keys.max_num_tokens {
            Some(tokens) if tokens.value.0 < KV_BLOCK => Err(self.fault(
                tokens,
                "serving.max_num_tokens",
                format!("{} tokens hold no piece of a prompt", tokens.value.0),
                format!("expected a KV block, {KV_BLOCK} tokens, or more"),
            )),
            _ => Ok(()),
        }
    }

    /// How mixed iterations run, held to the graphs that the case captures.
    fn mixed_execution(
        &self,
        keys: &ServingKeys,
        parallel: Topology,
    ) -> Result<MixedExecution, InputError> {
        let pieces = keys.piecewise.is_some();
        let Some(at) = &keys.mixed_execution else {
            return Ok(if pieces {
                MixedExecution::Piecewise
            } else {
                MixedExecution::Eager
            });
        };
        let (what, help) = match at.value {
            MixedExecution::Piecewise if !pieces => (
                "no piecewise graphs are captured",
                "add `piecewise: { max_tokens: ... }`",
            ),
            MixedExecution::Eager | MixedExecution::Split if pieces => (
                "the case captures piecewise graphs",
                "leave out `piecewise`, or write `mixed_execution: piecewise`",
            ),
            MixedExecution::Split if keys.cuda_graph.is_none() => (
                "there is no decode graph that the generation requests could keep",
                "add `cuda_graph`",
            ),
            MixedExecution::Split if parallel.dp > 1 => (
                "split iterations are not modelled with attention DP",
                "set dp to 1, or leave it out",
            ),
            value => return Ok(value),
        };
        Err(self.fault(at, "serving.mixed_execution", what, help))
    }

    fn cuda_graph(&self, at: &At<CudaGraphKeys>) -> Result<CudaGraph, InputError> {
        let keys = &at.value;
        let captured = self.captured(
            (keys.batch_sizes.as_ref(), "serving.cuda_graph.batch_sizes"),
            (keys.max_batch.as_ref(), "serving.cuda_graph.max_batch"),
            BATCH_MAX,
        )?;
        let Some(captured) = captured else {
            return Err(self.fault(
                at,
                "serving.cuda_graph",
                "the captured batch sizes are not given",
                "give `max_batch` or `batch_sizes`",
            ));
        };
        Ok(CudaGraph {
            padding: keys.padding.value.0,
            max_batch: captured.max,
            batch_sizes: captured.sizes,
        })
    }

    fn piecewise(&self, at: &At<PiecewiseKeys>) -> Result<Piecewise, InputError> {
        let keys = &at.value;
        let captured = self.captured(
            (
                keys.capture_tokens.as_ref(),
                "serving.piecewise.capture_tokens",
            ),
            (keys.max_tokens.as_ref(), "serving.piecewise.max_tokens"),
            TOKENS_MAX,
        )?;
        let Some(captured) = captured else {
            return Err(self.fault(
                at,
                "serving.piecewise",
                "the captured token counts are not given",
                "give `max_tokens` or `capture_tokens`",
            ));
        };
        Ok(Piecewise {
            max_tokens: captured.max,
            capture_tokens: captured.sizes,
        })
    }

    fn silicon(&self, keys: &SiliconKeys) -> Result<Silicon, InputError> {
        Ok(Silicon {
            ttft_ms: self.ms(&keys.ttft_ms, "silicon.ttft_ms")?,
            tpot_ms: self.ms(&keys.tpot_ms, "silicon.tpot_ms")?,
            run: self.text(&keys.run, "silicon.run")?,
            date: self.date(&keys.date, "silicon.date")?,
        })
    }

    fn tolerance(&self, at: &At<ToleranceKeys>) -> Result<Tolerance, InputError> {
        let keys = &at.value;
        let share = |key: &Option<At<Real>>, field: &str| {
            key.as_ref().map(|at| self.share(at, field)).transpose()
        };
        let ttft_rel = share(&keys.ttft_rel, "tolerance.ttft_rel")?;
        let tpot_rel = share(&keys.tpot_rel, "tolerance.tpot_rel")?;
        let parts_rel = share(&keys.parts_rel, "tolerance.parts_rel")?;
        if ttft_rel.or(tpot_rel).or(parts_rel).is_none() {
            return Err(self.fault(
                at,
                "tolerance",
                "the tolerance widens no band",
                "give `ttft_rel`, `tpot_rel` or `parts_rel`",
            ));
        }
        let Some(reason) = &keys.reason else {
            return Err(self.fault(
                at,
                "tolerance.reason",
                "a tolerance without a reason",
                "say why this case needs a wider band",
            ));
        };
        let Some(expires) = &keys.expires else {
            return Err(self.fault(
                at,
                "tolerance.expires",
                "a tolerance without an end",
                "give the last day it holds, such as `expires: 2027-03-01`",
            ));
        };
        Ok(Tolerance {
            ttft_rel,
            tpot_rel,
            parts_rel,
            reason: self.text(reason, "tolerance.reason")?,
            expires: self.date(expires, "tolerance.expires")?,
        })
    }
}

fn precision(keys: Option<&PrecisionKeys>) -> Precision {
    Precision {
        gemm: keys
            .and_then(|keys| keys.gemm.as_ref())
            .map_or(GemmDtype::Bfloat16, |at| at.value),
        qkv_proj: keys
            .and_then(|keys| keys.qkv_proj.as_ref())
            .map(|at| at.value),
        moe: keys.and_then(|keys| keys.moe.as_ref()).map(|at| at.value),
        kv_cache: keys
            .and_then(|keys| keys.kv_cache.as_ref())
            .map_or(KvCacheDtype::Bfloat16, |at| at.value),
        attention: keys
            .and_then(|keys| keys.attention.as_ref())
            .map(|at| at.value),
    }
}

fn kernels(keys: Option<&KernelsKeys>) -> Kernels {
    let Some(keys) = keys else {
        return Kernels::default();
    };
    Kernels {
        moe: keys.moe.as_ref().map(|at| at.value),
        gemm: keys.gemm.as_ref().map(|at| at.value),
        attention: keys.attention.as_ref().map(|at| at.value),
        allreduce_fusion: keys.allreduce_fusion.as_ref().map(|at| at.value.0),
    }
}
