//! The shape of a case file: keys, types and bounds, for the loader and for editors.
//!
//! Every value keeps its line and column. `serde(flatten)` and untagged enums would lose them, so
//! the keys that the three kinds share are written out in each.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Visitor;
use serde::{Deserialize, Deserializer};

use super::measured::Outcome;
use crate::model::{
    AttentionDtype, AttentionKernel, BackendName, Capacity, Count, GemmDtype, GemmKernel,
    KvCacheDtype, MixedExecution, MoeDtype, OpKind, StepExecution,
};
use crate::perfdb::MoeKernel;

/// Longest prompt, output, sequence or token budget.
pub(super) const TOKENS_MAX: u32 = 1_048_576;
/// Most requests in flight, in a batch or in a step.
pub(super) const BATCH_MAX: u32 = 65_536;
pub(super) const REQUESTS_MAX: u32 = 1_000_000;
/// A bound on the replay of one case: `requests * osl` over the requests in flight.
pub(super) const DECODE_STEPS_MAX: u64 = 1_000_000;
/// Pieces of prompts of one case: a bound on its run time.
pub(super) const PREFILL_PIECES_MAX: u64 = 200_000;
/// GPUs in one node.
pub(super) const GPUS_MAX: u32 = 8;
pub(super) const ITERATIONS_MAX: u32 = 1_000_000;
pub(super) const LIST_MAX: usize = 4_096;
pub(super) const TEXT_MAX: usize = 256;
/// `max_batch_size` where it is left out.
pub(super) const BATCH_DEFAULT: u32 = 2_048;
/// SGLang's documented default of `max_prefill_tokens`.
pub(super) const PREFILL_TOKENS_DEFAULT: u32 = 16_384;
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

/// To an editor the wrapper is the type it holds.
macro_rules! schema_of {
    ($($wrapper:ty = $inner:ty),+) => {
        $(impl JsonSchema for $wrapper {
            fn inline_schema() -> bool {
                <$inner>::inline_schema()
            }

            fn schema_name() -> Cow<'static, str> {
                <$inner>::schema_name()
            }

            fn json_schema(generator: &mut SchemaGenerator) -> Schema {
                <$inner>::json_schema(generator)
            }
        })+
    };
}

schema_of!(Whole = u32, Real = f64, Flag = bool);

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

/// A scalar by its YAML type. Asked for a plain `u32`, the parser would also read quoted text.
enum Scalar {
    Flag(bool),
    Whole(u64),
    Real(f64),
    Text,
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ByType;

        impl Visitor<'_> for ByType {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, true or false")
            }

            fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
                Ok(Scalar::Flag(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
                Ok(Scalar::Whole(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
                Ok(u64::try_from(value).map_or(Scalar::Real(value as f64), Scalar::Whole))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
                Ok(Scalar::Real(value))
            }

            fn visit_str<E>(self, _: &str) -> Result<Scalar, E> {
                Ok(Scalar::Text)
            }
        }

        deserializer.deserialize_any(ByType)
    }
}

/// An unquoted whole number.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "Scalar")]
pub(super) struct Whole(pub u32);

impl TryFrom<Scalar> for Whole {
    type Error = &'static str;

    fn try_from(scalar: Scalar) -> Result<Self, Self::Error> {
        match scalar {
            Scalar::Whole(value) => u32::try_from(value).ok(),
            _ => None,
        }
        .map(Self)
        .ok_or("expected a whole number from 0 to 4294967295, without quotes")
    }
}

/// An unquoted finite number.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "Scalar")]
pub(super) struct Real(pub f64);

impl TryFrom<Scalar> for Real {
    type Error = &'static str;

    fn try_from(scalar: Scalar) -> Result<Self, Self::Error> {
        match scalar {
            Scalar::Whole(value) => Some(value as f64),
            Scalar::Real(value) => Some(value),
            _ => None,
        }
        .filter(|value| value.is_finite())
        .map(Self)
        .ok_or("expected a finite number, without quotes")
    }
}

/// An unquoted `true` or `false`.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "Scalar")]
pub(super) struct Flag(pub bool);

impl TryFrom<Scalar> for Flag {
    type Error = &'static str;

    fn try_from(scalar: Scalar) -> Result<Self, Self::Error> {
        match scalar {
            Scalar::Flag(value) => Ok(Self(value)),
            _ => Err("expected true or false, without quotes"),
        }
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
    pub tp: At<Whole>,
    /// Attention data parallelism. Default 1.
    #[schemars(range(min = 1, max = GPUS_MAX))]
    pub dp: Option<At<Whole>>,
    /// Tensor parallelism of the experts. Default: tp * dp / moe_ep.
    #[schemars(range(min = 1, max = GPUS_MAX))]
    pub moe_tp: Option<At<Whole>>,
    /// Expert parallelism. Default 1.
    #[schemars(range(min = 1, max = GPUS_MAX))]
    pub moe_ep: Option<At<Whole>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Precision")]
pub(super) struct PrecisionKeys {
    /// Default bfloat16.
    pub gemm: Option<At<GemmDtype>>,
    /// Projections into attention (q, k, v, latent, gated deltanet), where the checkpoint leaves
    /// them out of its quantisation. Default: that of `gemm`. Router and logits head are bfloat16.
    pub qkv_proj: Option<At<GemmDtype>>,
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
    pub gemm: Option<At<GemmKernel>>,
    pub attention: Option<At<AttentionKernel>>,
    pub allreduce_fusion: Option<At<Flag>>,
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
    pub isl: At<Whole>,
    /// Longest output, in tokens.
    #[schemars(range(min = 2, max = TOKENS_MAX))]
    pub osl: At<Whole>,
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub concurrency: At<Whole>,
    /// Default: 10 * concurrency.
    #[schemars(range(min = 1, max = REQUESTS_MAX))]
    pub requests: Option<At<Whole>>,
    /// Lengths are drawn from [int(len * length_ratio), len]. Default 0.8.
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub length_ratio: Option<At<Real>>,
    /// Seed of NumPy's legacy global generator. Default 0.
    pub seed: Option<At<Whole>>,
    /// The client wrapped its prompts in the model's chat template. Recorded, not modelled. Default
    /// false.
    pub chat_template: Option<At<Flag>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CudaGraph")]
pub(super) struct CudaGraphKeys {
    /// Pad a batch to the next captured size.
    pub padding: At<Flag>,
    /// Largest captured batch. Default: the last of batch_sizes.
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub max_batch: Option<At<Whole>>,
    /// Captured batch sizes, ascending. Default: the framework's own list up to max_batch.
    pub batch_sizes: Option<At<Vec<At<Whole>>>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Piecewise")]
pub(super) struct PiecewiseKeys {
    /// Largest captured token count. Default: the last of capture_tokens.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub max_tokens: Option<At<Whole>>,
    /// Captured token counts, ascending. Default: the framework's own list up to max_tokens.
    pub capture_tokens: Option<At<Vec<At<Whole>>>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "BatchWait")]
pub(super) struct BatchWaitKeys {
    #[schemars(range(min = 1, max = ITERATIONS_MAX))]
    pub timeout_iters: At<Whole>,
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub max_tokens_ratio: At<Real>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "AttentionDpBalance")]
pub(super) struct AttentionDpBalanceKeys {
    #[schemars(range(max = ITERATIONS_MAX))]
    pub batching_wait_iters: At<Whole>,
    #[schemars(range(max = ITERATIONS_MAX))]
    pub timeout_iters: At<Whole>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Serving")]
pub(super) struct ServingKeys {
    /// Requests per rank in one iteration (SGLang: max running requests). Default 2048:
    /// TensorRT-LLM's documented default, and the least that SGLang takes on its own.
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub max_batch_size: Option<At<Whole>>,
    /// Tokens per rank in one iteration; without chunked prefill at least the longest prompt.
    /// Required with trtllm; SGLang has no such limit.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub max_num_tokens: Option<At<Whole>>,
    /// At least isl + osl.
    #[schemars(range(min = 1, max = TOKENS_MAX * 2))]
    pub max_seq_len: Option<At<Whole>>,
    /// Overlap scheduler. Default true.
    pub overlap: Option<At<Flag>>,
    /// Decode graphs. Default: none, decode runs eagerly.
    pub cuda_graph: Option<At<CudaGraphKeys>>,
    /// Piecewise graphs of mixed and prefill iterations. Default: none.
    pub piecewise: Option<At<PiecewiseKeys>>,
    /// TensorRT-LLM: how an iteration with context and generation requests runs. Default: piecewise
    /// where `piecewise` is given, else eager. `split` runs the generation requests as their decode
    /// graph and the context in an eager forward behind it.
    pub mixed_execution: Option<At<MixedExecution>>,
    /// Not with attention DP.
    pub batch_wait: Option<At<BatchWaitKeys>>,
    /// Only with attention DP.
    pub attention_dp_balance: Option<At<AttentionDpBalanceKeys>>,
    /// Default guaranteed_no_evict.
    pub capacity: Option<At<Capacity>>,
    /// Share of free GPU memory given to the KV cache.
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub memory_fraction: Option<At<Real>>,
    /// Default 1.
    #[schemars(range(min = 1, max = ITERATIONS_MAX))]
    pub stream_interval: Option<At<Whole>>,
    /// TensorRT-LLM's enable_chunked_prefill: a prompt that does not fit max_num_tokens beside the
    /// generation requests is cut, in whole KV blocks of 32 tokens. Default false.
    pub chunked_prefill: Option<At<Flag>>,
    /// SGLang: prompt tokens of one prefill batch. Default 16384.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub max_prefill_tokens: Option<At<Whole>>,
    /// SGLang: prompts are cut at this many tokens. Default: never.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub chunked_prefill_size: Option<At<Whole>>,
    /// SGLang: while decoding, new requests are looked for every so many iterations. Default 1.
    #[schemars(range(min = 1, max = ITERATIONS_MAX))]
    pub scheduler_recv_interval: Option<At<Whole>>,
    /// KV blocks of finished prompts are kept for prompts with the same beginning. Default false.
    pub block_reuse: Option<At<Flag>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Silicon")]
pub(super) struct SiliconKeys {
    /// Measured mean time to first token.
    #[schemars(range(max = MS_MAX), extend("exclusiveMinimum" = 0))]
    pub ttft_ms: At<Real>,
    /// Measured mean time per output token.
    #[schemars(range(max = MS_MAX), extend("exclusiveMinimum" = 0))]
    pub tpot_ms: At<Real>,
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
    pub ttft_rel: Option<At<Real>>,
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub tpot_rel: Option<At<Real>>,
    #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0))]
    pub parts_rel: Option<At<Real>>,
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
    pub point: Option<At<Whole>>,
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
    pub serving: At<ServingKeys>,
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
    pub ms: At<Real>,
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
    pub tokens: At<Whole>,
    /// How many of the tokens belong to generation requests. Default 0.
    #[schemars(range(max = TOKENS_MAX))]
    pub generation: Option<At<Whole>>,
    /// Sum over one launch or over all layers. Default once.
    pub count: Option<At<Count>>,
    pub measured: At<Vec<OpMeasuredKeys>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Generation")]
pub(super) struct GenerationKeys {
    #[schemars(range(min = 1, max = BATCH_MAX))]
    pub requests: At<Whole>,
    /// Mean KV length per request, in tokens.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub mean_kv: At<Whole>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Step")]
pub(super) struct StepKeys {
    /// Prompt tokens of each context request. Default: none.
    pub context: Option<At<Vec<At<Whole>>>>,
    /// Tokens of each of these prompts that earlier steps have computed. Default: none.
    pub prefix: Option<At<Vec<At<Whole>>>>,
    pub generation: Option<GenerationKeys>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "StepMeasured")]
pub(super) struct StepMeasuredKeys {
    /// Names the rank, or the end of a range.
    pub label: At<String>,
    pub what: At<Outcome>,
    #[schemars(range(max = MS_MAX), extend("exclusiveMinimum" = 0))]
    pub ms: At<Real>,
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
    Serving(Box<ServingFile>),
    Op(Box<OpFile>),
    Step(Box<StepFile>),
}

/// JSON Schema of a case file, as checked in at `schema/case.schema.json`.
pub fn json_schema() -> serde_json::Value {
    schemars::schema_for!(AnyFile).to_value()
}
