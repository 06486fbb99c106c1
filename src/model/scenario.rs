//! The scenario: what a predictor may see of a case.
//!
//! Invariant (blindness): nothing here holds a silicon value, a point number, a path or a
//! tolerance. Measured values of op and step cases are types of their own, outside the scenarios.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::perfdb::MoeKernel;
use crate::timing::Topology;

/// Declares an enum whose YAML spelling, JSON Schema, `as_str` and `Display` are one name.
macro_rules! names {
    ($(#[$outer:meta])* $name:ident { $($(#[$inner:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$outer])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[derive(Serialize, Deserialize, JsonSchema)]
        #[schemars(inline)]
        pub enum $name {
            $($(#[$inner])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

names! {
    /// The serving runtime.
    BackendName {
        Trtllm = "trtllm",
        Sglang = "sglang",
    }
}

names! {
    /// GEMM precision, as the op tables name it.
    GemmDtype {
        Bfloat16 = "bfloat16",
        Fp8 = "fp8",
        Fp8Static = "fp8_static",
        Fp8Block = "fp8_block",
        Nvfp4 = "nvfp4",
        Int8Wo = "int8_wo",
        Int4Wo = "int4_wo",
    }
}

names! {
    /// Precision of the expert GEMMs (weights, then activations), as the op tables name it.
    MoeDtype {
        Bfloat16 = "bfloat16",
        Fp8 = "fp8",
        Fp8Block = "fp8_block",
        Nvfp4 = "nvfp4",
        Int4Wo = "int4_wo",
        W4afp8 = "w4afp8",
        W4a16Mxfp4 = "w4a16_mxfp4",
        W4a8Mxfp4Mxfp8 = "w4a8_mxfp4_mxfp8",
    }
}

names! {
    /// Precision of the KV cache, as the op tables name it.
    KvCacheDtype {
        Bfloat16 = "bfloat16",
        Int8 = "int8",
        Fp8 = "fp8",
    }
}

names! {
    /// Compute precision of attention, as the op tables name it.
    AttentionDtype {
        Bfloat16 = "bfloat16",
        Float16 = "float16",
        Fp8 = "fp8",
        Fp8Block = "fp8_block",
    }
}

names! {
    /// Kernel family of attention.
    AttentionKernel {
        Trtllm = "trtllm",
        TrtllmMha = "trtllm_mha",
        Flashinfer = "flashinfer",
    }
}

names! {
    /// Kernel family of the dense GEMMs.
    GemmKernel {
        /// FlashInfer's CUTLASS kernels.
        FlashinferCutlass = "flashinfer_cutlass",
    }
}

names! {
    /// How requests are admitted against the KV cache.
    Capacity {
        /// A request enters only when its whole KV need fits.
        GuaranteedNoEvict = "guaranteed_no_evict",
        /// Requests enter greedily and may be paused.
        MaxUtilization = "max_utilization",
    }
}

names! {
    /// The op whose GPU time an op case asks for.
    OpKind {
        Moe = "moe",
        /// Tensor-parallel all-reduce with the norm fused to it.
        AllreduceNorm = "allreduce_norm",
    }
}

names! {
    /// What an op case sums over.
    Count {
        /// One launch.
        Once = "once",
        /// Every launch of one forward pass, over all layers.
        PerLayer = "per_layer",
    }
}

names! {
    /// How the step of a step case runs.
    StepExecution {
        Eager = "eager",
        FullGraph = "full_graph",
    }
}

names! {
    /// How an iteration with context and generation requests runs.
    MixedExecution {
        /// One eager forward.
        Eager = "eager",
        /// One forward of captured segments, where a token count is captured.
        Piecewise = "piecewise",
        /// Two forwards: the generation requests as their captured graph, then the context eagerly.
        Split = "split",
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Backend {
    pub name: BackendName,
    /// Exact version.
    pub version: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Precision {
    pub gemm: GemmDtype,
    /// Projections into attention, where the checkpoint leaves them at another precision.
    pub qkv_proj: Option<GemmDtype>,
    /// `None` in a model without experts.
    pub moe: Option<MoeDtype>,
    pub kv_cache: KvCacheDtype,
    /// `None`: the runtime's choice, not recorded.
    pub attention: Option<AttentionDtype>,
}

impl Precision {
    /// Precision of the projections into attention.
    pub fn qkv_proj(&self) -> GemmDtype {
        self.qkv_proj.unwrap_or(self.gemm)
    }
}

/// Kernel choices; `None`: the runtime's choice, not recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Kernels {
    pub moe: Option<MoeKernel>,
    pub gemm: Option<GemmKernel>,
    pub attention: Option<AttentionKernel>,
    pub allreduce_fusion: Option<bool>,
}

/// Tokens of a block of TensorRT-LLM's paged KV cache, its default; prompts are cut in whole ones.
pub const KV_BLOCK: u32 = 32;

/// What runs where: shared by serving, op and step cases.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Deployment {
    /// File stem in `data/models/`.
    pub model: String,
    /// Folder name in the op tables.
    pub system: String,
    pub backend: Backend,
    pub parallel: Topology,
    pub precision: Precision,
    pub kernels: Kernels,
    /// CPU model of the host; `None` where the run did not record it.
    pub host_cpu: Option<String>,
}

/// A closed loop of `concurrency` clients.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Workload {
    /// Longest prompt, in tokens.
    pub isl: u32,
    /// Longest output, in tokens.
    pub osl: u32,
    pub concurrency: u32,
    pub requests: u32,
    /// Lengths are drawn from `[int(len * length_ratio), len]`.
    pub length_ratio: f64,
    /// Seed of NumPy's legacy global generator.
    pub seed: u32,
    /// The client wrapped its prompts in the model's chat template. Not modelled: the template's
    /// length is not known here.
    pub chat_template: bool,
}

/// Decode graphs. Their absence from a case means that decode runs eagerly.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CudaGraph {
    /// Pad a batch to the next captured size.
    pub padding: bool,
    pub max_batch: u32,
    /// Captured sizes, ascending, ending in `max_batch`; `None`: the framework's own list.
    pub batch_sizes: Option<Vec<u32>>,
}

/// Piecewise graphs of mixed and prefill iterations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Piecewise {
    pub max_tokens: u32,
    /// Captured token counts, ascending, ending in `max_tokens`; `None`: the framework's own list.
    pub capture_tokens: Option<Vec<u32>>,
}

impl CudaGraph {
    /// Captured batch sizes, ascending: the case's list, or the framework's own up to `max_batch`.
    pub fn sizes(&self, backend: &Backend) -> Vec<u32> {
        let max = self.max_batch;
        if let Some(sizes) = &self.batch_sizes {
            return sizes.clone();
        }
        let eights = [1, 2, 4].into_iter().chain((8..=128).step_by(8));
        let doubled = std::iter::successors(Some(256_u32), |size| size.checked_mul(2))
            .take_while(|size| *size < max);
        let mut sizes: Vec<u32> = match (backend.name, self.padding) {
            (BackendName::Trtllm, true) if captures_every_64(&backend.version) => {
                eights.chain((192..max).step_by(64)).collect()
            }
            (BackendName::Trtllm, true) => eights.chain(doubled).collect(),
            (BackendName::Trtllm, false) => (1..=32).chain([64, 128]).chain(doubled).collect(),
            // 1, 2, 4, 8, 12, 16 to 256 by 8, 272 to 511 by 16, from 512 by 32.
            (BackendName::Sglang, true) => [1, 2, 4, 8, 12]
                .into_iter()
                .chain((16..=256).step_by(8))
                .chain((272..512).step_by(16))
                .chain((512..max).step_by(32))
                .collect(),
            (BackendName::Sglang, false) => (1..max).collect(),
        };
        sizes.retain(|size| *size < max);
        sizes.push(max);
        sizes
    }
}

/// Whether this TensorRT-LLM captures every 64th batch beyond 128, or powers of two as older ones
/// do. Pull request 12895 was merged on 2026-04-24; of the packages, 1.3.0rc12 is from 17 April,
/// 1.3.0rc13 from 29 April (not known to hold it) and 1.3.0rc14 from 7 May.
fn captures_every_64(version: &str) -> bool {
    release(version).is_none_or(|release| release >= [1, 3, 0, 14])
}

/// Major, minor, patch and release candidate, which is the last one where there is none.
fn release(version: &str) -> Option<[u32; 4]> {
    let version = version.split(".post").next()?;
    let (numbers, candidate) = match version.split_once("rc") {
        Some((numbers, candidate)) => (numbers, candidate.parse().ok()?),
        None => (version, u32::MAX),
    };
    let numbers: Vec<u32> = numbers
        .split('.')
        .map(|number| number.parse().ok())
        .collect::<Option<_>>()?;
    let [major, minor, patch] = numbers[..] else {
        return None;
    };
    Some([major, minor, patch, candidate])
}

impl Piecewise {
    /// Captured token counts, ascending: the case's list, or powers of two to 128 and every 256
    /// from there, up to `max_tokens`.
    pub fn token_counts(&self) -> Vec<u32> {
        let max = self.max_tokens;
        if let Some(counts) = &self.capture_tokens {
            return counts.clone();
        }
        let mut counts: Vec<u32> = (0..=7)
            .map(|power| 1 << power)
            .chain((256..max.max(256)).step_by(256))
            .take_while(|count| *count < max)
            .collect();
        counts.push(max);
        counts
    }
}

/// The captured size that serves `wanted`, from an ascending list; padding goes to the next one.
pub fn captured(sizes: &[u32], wanted: u32, padding: bool) -> Option<u32> {
    let at = sizes.partition_point(|size| *size < wanted);
    let size = *sizes.get(at)?;
    (size == wanted || padding).then_some(size)
}

/// Holds context requests back to gather more of them (not with attention DP).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BatchWait {
    pub timeout_iters: u32,
    pub max_tokens_ratio: f64,
}

/// Holds context requests until every attention-DP rank has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AttentionDpBalance {
    pub batching_wait_iters: u32,
    pub timeout_iters: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Serving {
    /// Requests per rank in one iteration.
    pub max_batch_size: u32,
    /// TensorRT-LLM: tokens per rank in one iteration. SGLang has no such limit: without one in the
    /// case, the tokens of one prefill batch.
    pub max_num_tokens: u32,
    pub max_seq_len: Option<u32>,
    pub overlap: bool,
    pub cuda_graph: Option<CudaGraph>,
    pub piecewise: Option<Piecewise>,
    pub mixed_execution: MixedExecution,
    pub batch_wait: Option<BatchWait>,
    pub attention_dp_balance: Option<AttentionDpBalance>,
    pub capacity: Capacity,
    /// Share of free GPU memory given to the KV cache, in (0, 1].
    pub memory_fraction: Option<f64>,
    pub stream_interval: u32,
    /// TensorRT-LLM: a prompt that does not fit an iteration's tokens is cut.
    pub chunked_prefill: bool,
    /// SGLang: prompt tokens of one prefill batch; `None`: 16384, the runtime's default.
    pub max_prefill_tokens: Option<u32>,
    /// SGLang: prompts are cut at this many tokens; `None`: never.
    pub chunked_prefill_size: Option<u32>,
    /// SGLang: while decoding, new requests are looked for every so many iterations.
    pub scheduler_recv_interval: u32,
    /// KV blocks of finished prompts are kept for prompts with the same beginning.
    pub block_reuse: bool,
}

/// Everything the prediction of a serving case rests on, besides data/.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scenario {
    pub deployment: Deployment,
    pub workload: Workload,
    pub serving: Serving,
}

/// Everything the prediction of an op case rests on, besides data/.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpScenario {
    pub deployment: Deployment,
    pub op: OpKind,
    /// Tokens of the step, context and generation together.
    pub tokens: u32,
    /// How many of `tokens` belong to generation requests.
    pub generation: u32,
    pub count: Count,
}

/// The generation requests of a step, one token each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Generation {
    pub requests: u32,
    /// Mean KV length per request, in tokens.
    pub mean_kv: u32,
}

/// Everything the prediction of a step case rests on, besides data/.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepScenario {
    pub deployment: Deployment,
    /// Prompt tokens of each context request.
    pub context: Vec<u32>,
    /// Tokens of each prompt that earlier steps have computed; empty: none of any.
    pub prefix: Vec<u32>,
    pub generation: Option<Generation>,
    pub execution: StepExecution,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(name: BackendName, version: &str, padding: bool, max_batch: u32) -> Vec<u32> {
        let graph = CudaGraph {
            padding,
            max_batch,
            batch_sizes: None,
        };
        graph.sizes(&Backend {
            name,
            version: version.to_owned(),
        })
    }

    #[test]
    fn the_frameworks_lists_of_captured_batches() {
        let trtllm = |version, max| sizes(BackendName::Trtllm, version, true, max);
        let new = trtllm("1.3.0rc14", 600);
        assert_eq!(new[..6], [1, 2, 4, 8, 16, 24]);
        assert_eq!(new[18..], [128, 192, 256, 320, 384, 448, 512, 576, 600]);
        assert_eq!(trtllm("1.3.0rc14", 192)[18..], [128, 192]);
        assert_eq!(trtllm("1.3.0rc14", 12), [1, 2, 4, 8, 12]);
        assert_eq!(trtllm("1.3.0rc14", 1), [1]);
        for older in ["1.2.1", "1.3.0rc5.post2", "1.3.0rc13", "0.21.0"] {
            assert_eq!(trtllm(older, 600)[18..], [128, 256, 512, 600], "{older}");
        }
        for newer in ["1.3.0rc14.post1", "1.3.0", "1.4.0rc0", "main"] {
            assert_eq!(trtllm(newer, 600)[18..], new[18..], "{newer}");
        }
        let unpadded = sizes(BackendName::Trtllm, "1.3.0rc14", false, 600);
        assert_eq!(unpadded[..32], (1..=32).collect::<Vec<_>>());
        assert_eq!(unpadded[32..], [64, 128, 256, 512, 600]);
        let unpadded = sizes(BackendName::Sglang, "0.5.14", false, 5);
        assert_eq!(unpadded, [1, 2, 3, 4, 5]);
        let sglang = sizes(BackendName::Sglang, "0.5.14", true, 600);
        assert_eq!(sglang[..7], [1, 2, 4, 8, 12, 16, 24]);
        let at_256 = sglang.iter().position(|size| *size == 256);
        let at_256 = at_256.expect("256 is captured");
        assert_eq!(sglang[at_256..at_256 + 3], [256, 272, 288]);
        assert_eq!(sglang[sglang.len() - 5..], [496, 512, 544, 576, 600]);
    }

    #[test]
    fn the_piecewise_list_and_padding_into_it() {
        let piecewise = Piecewise {
            max_tokens: 1000,
            capture_tokens: None,
        };
        let counts = piecewise.token_counts();
        assert_eq!(counts, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1000]);
        assert_eq!(captured(&counts, 129, true), Some(256));
        assert_eq!(captured(&counts, 129, false), None);
        assert_eq!(captured(&counts, 256, false), Some(256));
        assert_eq!(captured(&counts, 1001, true), None);
    }
}
