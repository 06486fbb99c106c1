//! The shape of a case file: keys, types and bounds, for the loader and for editors.
//!
//! Every value keeps its line and column. `serde(flatten)` and untagged enums would lose them, so
//! the keys that the three kinds share are written out in each.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer};

use super::scenario::{
    AttentionDtype, AttentionKernel, BackendName, Capacity, Count, GemmDtype, KvCacheDtype,
    MoeDtype, MoeKernel, OpKind, Outcome, StepExecution,
};

/// Longest prompt, output, sequence or token budget.
pub(super) const TOKENS_MAX: u32 = 1_048_576;
/// Most requests in flight, in a batch or in a step.
pub(super) const BATCH_MAX: u32 = 65_536;
pub(super) const REQUESTS_MAX: u32 = 10_000_000;
/// A bound on the replay of one case: `requests * osl / concurrency`.
pub(super) const DECODE_STEPS_MAX: u64 = 10_000_000;
/// GPUs in one node.
pub(super) const GPUS_MAX: u32 = 8;
pub(super) const ITERATIONS_MAX: u32 = 1_000_000;
pub(super) const LIST_MAX: usize = 4_096;
pub(super) const TEXT_MAX: usize = 256;
/// Longest measured time: one day, in ms.
pub(super) const MS_MAX: f64 = 86_400_000.0;

/// A value and where it stands in the file; line and column count from one.
#[derive(Debug, Clone, Copy)]
pub(super) struct At<T> {
    pub value: T,
    pub line: u64,
    pub column: u64,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for At<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = serde_yaml::Spanned::<T>::deserialize(deserializer)?;
        Ok(Self {
            line: spanned.referenced.line(),
            column: spanned.referenced.column(),
            value: spanned.value,
        })
    }
}

/// The location is no part of the format.
impl<T: JsonSchema> JsonSchema for At<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        T::schema_id()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

/// Finds out which kind a file is.
#[derive(Deserialize)]
pub(super) struct KindProbe {
    pub kind: Option<At<String>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Backend")]
pub(super) struct BackendKeys {
    pub name: At<BackendName>,
    /// Exact version of the runtime.
    pub version: At<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Parallel")]
pub(super) struct ParallelKeys {
    /// Tensor parallelism of attention.
    #[schemars(range(min = 1, max = GPUS_MAX))]
    pub tp: At<u32>,
    /// Attention data parallelism. Default 1.
    #[schemars(range(min = 1, max = GPUS_MAX))]
    pub dp: Option<At<u32>>,
    /// Tensor parallelism of the experts. Default: tp * dp / moe_ep.
    #[schemars(range(min = 1, max = GPUS_MAX))]
    pub moe_tp: Option<At<u32>>,
    /// Expert parallelism. Default 1.
    #[schemars(range(min = 1, max = GPUS_MAX))]
    pub moe_ep: Option<At<u32>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Precision")]
pub(super) struct PrecisionKeys {
    /// Default bfloat16.
    pub gemm: Option<At<GemmDtype>>,
    /// Required by a model with experts.
    pub moe: Option<At<MoeDtype>>,
    /// Default bfloat16.
    pub kv_cache: Option<At<KvCacheDtype>>,
    pub attention: Option<At<AttentionDtype>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Kernels")]
pub(super) struct KernelsKeys {
    pub moe: Option<At<MoeKernel>>,
    pub attention: Option<At<AttentionKernel>>,
    pub allreduce_fusion: Option<At<bool>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Host")]
pub(super) struct HostKeys {
    /// CPU model of the host, as the source names it.
    pub cpu: At<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Workload")]
pub(super) struct WorkloadKeys {
    /// Longest prompt, in tokens.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub isl: At<u32>,
    /// Longest output, in tokens.
    #[schemars(range(min = 2, max = TOKENS_MAX))]
    pub osl: At<u32>,
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub concurrency: At<u32>,
    /// Default: 10 * concurrency.
    #[schemars(range(min = 1, max = REQUESTS_MAX))]
    pub requests: Option<At<u32>>,
    /// Lengths are drawn from [int(len * length_ratio), len]. Default 0.8.
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub length_ratio: Option<At<f64>>,
    /// Seed of NumPy's legacy global generator. Default 0.
    pub seed: Option<At<u32>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CudaGraph")]
pub(super) struct CudaGraphKeys {
    /// Pad a batch to the next captured size.
    pub padding: At<bool>,
    /// Largest captured batch. Default: the last of batch_sizes.
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub max_batch: Option<At<u32>>,
    /// Captured batch sizes, ascending. Default: the framework's own list up to max_batch.
    pub batch_sizes: Option<At<Vec<At<u32>>>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Piecewise")]
pub(super) struct PiecewiseKeys {
    /// Largest captured token count. Default: the last of capture_tokens.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub max_tokens: Option<At<u32>>,
    /// Captured token counts, ascending. Default: the framework's own list up to max_tokens.
    pub capture_tokens: Option<At<Vec<At<u32>>>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "BatchWait")]
pub(super) struct BatchWaitKeys {
    #[schemars(range(min = 1, max = ITERATIONS_MAX))]
    pub timeout_iters: At<u32>,
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub max_tokens_ratio: At<f64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "AttentionDpBalance")]
pub(super) struct AttentionDpBalanceKeys {
    #[schemars(range(max = ITERATIONS_MAX))]
    pub batching_wait_iters: At<u32>,
    #[schemars(range(max = ITERATIONS_MAX))]
    pub timeout_iters: At<u32>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Serving")]
pub(super) struct ServingKeys {
    /// Requests per rank in one iteration.
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub max_batch_size: At<u32>,
    /// Tokens per rank in one iteration; at least the longest prompt.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub max_num_tokens: At<u32>,
    /// At least isl + osl.
    #[schemars(range(min = 1, max = TOKENS_MAX * 2))]
    pub max_seq_len: Option<At<u32>>,
    /// Overlap scheduler. Default true.
    pub overlap: Option<At<bool>>,
    /// Decode graphs. Default: none, decode runs eagerly.
    pub cuda_graph: Option<At<CudaGraphKeys>>,
    /// Piecewise graphs of mixed and prefill iterations. Default: none.
    pub piecewise: Option<At<PiecewiseKeys>>,
    /// Not with attention DP.
    pub batch_wait: Option<At<BatchWaitKeys>>,
    /// Only with attention DP.
    pub attention_dp_balance: Option<At<AttentionDpBalanceKeys>>,
    /// Default guaranteed_no_evict.
    pub capacity: Option<At<Capacity>>,
    /// Share of free GPU memory given to the KV cache.
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub memory_fraction: Option<At<f64>>,
    /// Default 1.
    #[schemars(range(min = 1, max = ITERATIONS_MAX))]
    pub stream_interval: Option<At<u32>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Silicon")]
pub(super) struct SiliconKeys {
    /// Measured mean time to first token.
    #[schemars(range(max = MS_MAX), extend("exclusiveMinimum" = 0))]
    pub ttft_ms: At<f64>,
    /// Measured mean time per output token.
    #[schemars(range(max = MS_MAX), extend("exclusiveMinimum" = 0))]
    pub tpot_ms: At<f64>,
    /// Names the run the values come from.
    pub run: At<String>,
    #[schemars(regex(pattern = r"^\d{4}-\d{2}-\d{2}$"))]
    pub date: At<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Tolerance")]
pub(super) struct ToleranceKeys {
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub ttft_rel: Option<At<f64>>,
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub tpot_rel: Option<At<f64>>,
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub parts_rel: Option<At<f64>>,
    /// Why this case needs a wider band. Required.
    #[schemars(required, length(min = 1, max = TEXT_MAX))]
    pub reason: Option<At<String>>,
    /// Last day of the wider band. Required.
    #[schemars(required, regex(pattern = r"^\d{4}-\d{2}-\d{2}$"))]
    pub expires: Option<At<String>>,
}

/// A serving case: a closed loop against one deployment.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ServingCase")]
pub(super) struct ServingFile {
    /// Number of the point in its source; no two cases share one.
    pub point: Option<At<u32>>,
    /// File stem in data/models/.
    pub model: At<String>,
    /// System name of the op tables, such as b200_sxm.
    pub system: At<String>,
    pub backend: BackendKeys,
    pub parallel: At<ParallelKeys>,
    pub precision: Option<PrecisionKeys>,
    pub kernels: Option<KernelsKeys>,
    pub host: Option<HostKeys>,
    pub workload: WorkloadKeys,
    pub serving: ServingKeys,
    /// What was measured. A prediction never sees it.
    pub silicon: Option<SiliconKeys>,
    /// Widens the bands of this case.
    pub tolerance: Option<At<ToleranceKeys>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(inline)]
pub(super) enum OpTag {
    #[serde(rename = "op")]
    Op,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(inline)]
pub(super) enum StepTag {
    #[serde(rename = "step")]
    Step,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Cell")]
pub(super) struct CellKeys {
    pub table: At<String>,
    pub row: At<String>,
    pub column: At<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "OpMeasured")]
pub(super) struct OpMeasuredKeys {
    /// Names the rank.
    pub label: At<String>,
    #[schemars(range(max = MS_MAX), extend("exclusiveMinimum" = 0))]
    pub ms: At<f64>,
    /// The source-table cell that holds the value.
    pub source: CellKeys,
}

/// An op case: the GPU time of one op in one step.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "OpCase")]
pub(super) struct OpFile {
    #[serde(rename = "kind")]
    #[expect(dead_code, reason = "the loader has dispatched on it")]
    pub tag: OpTag,
    pub model: At<String>,
    pub system: At<String>,
    pub backend: BackendKeys,
    pub parallel: At<ParallelKeys>,
    pub precision: Option<PrecisionKeys>,
    pub kernels: Option<KernelsKeys>,
    pub host: Option<HostKeys>,
    pub op: At<OpKind>,
    /// Tokens of the step, context and generation together.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub tokens: At<u32>,
    /// How many of the tokens belong to generation requests. Default 0.
    #[schemars(range(max = TOKENS_MAX))]
    pub generation: Option<At<u32>>,
    /// Sum over one launch or over all layers. Default once.
    pub count: Option<At<Count>>,
    pub measured: At<Vec<OpMeasuredKeys>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Generation")]
pub(super) struct GenerationKeys {
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub requests: At<u32>,
    /// Mean KV length per request, in tokens.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub mean_kv: At<u32>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Step")]
pub(super) struct StepKeys {
    /// Prompt tokens of each context request. Default: none.
    pub context: Option<At<Vec<At<u32>>>>,
    pub generation: Option<GenerationKeys>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "StepMeasured")]
pub(super) struct StepMeasuredKeys {
    /// Names the rank.
    pub label: At<String>,
    pub what: At<Outcome>,
    #[schemars(range(max = MS_MAX), extend("exclusiveMinimum" = 0))]
    pub ms: At<f64>,
    /// The source-table cell that holds the value.
    pub source: CellKeys,
    /// Where set, ms is the value of source less the value of this cell.
    pub minus: Option<CellKeys>,
}

/// A step case: outcomes of one forward step.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "StepCase")]
pub(super) struct StepFile {
    #[serde(rename = "kind")]
    #[expect(dead_code, reason = "the loader has dispatched on it")]
    pub tag: StepTag,
    pub model: At<String>,
    pub system: At<String>,
    pub backend: BackendKeys,
    pub parallel: At<ParallelKeys>,
    pub precision: Option<PrecisionKeys>,
    pub kernels: Option<KernelsKeys>,
    pub host: Option<HostKeys>,
    pub step: At<StepKeys>,
    pub execution: At<StepExecution>,
    pub measured: At<Vec<StepMeasuredKeys>>,
}

/// One case file.
#[derive(JsonSchema)]
#[schemars(untagged, rename = "stepgate case")]
#[expect(dead_code, reason = "a shape for the schema only")]
enum AnyFile {
    Serving(ServingFile),
    Op(OpFile),
    Step(StepFile),
}

/// JSON Schema of a case file, as checked in at `schema/case.schema.json`.
pub fn json_schema() -> serde_json::Value {
    schemars::schema_for!(AnyFile).to_value()
}
