//! How many tokens of KV cache a rank group can hold.
//!
//! Per GPU: memory, less what the system's figures say is taken (`misc.other_mem`, `nccl_mem`),
//! less the weights, times the runtime's fraction, over the bytes of one token. The activation peak
//! that a runtime measures before it sizes its cache is in no table: it is left out, so a capacity
//! is an upper bound. Windowed layers count in full: TensorRT-LLM does not reuse their blocks by
//! default.

use crate::model::{BackendName, Deployment, GemmDtype, KvCacheDtype, ModelConfig, MoeDtype, Plan};
use crate::perfdb::{GpuMemory, OpKey};

/// Share of the free memory that TensorRT-LLM gives to the cache unless told otherwise
/// (`free_gpu_memory_fraction`).
const TRTLLM_FRACTION: f64 = 0.9;

/// SGLang chooses its fraction by a formula of its own unless told otherwise
/// (`--mem-fraction-static`): all of the memory is the bound that always holds.
const SGLANG_FRACTION: f64 = 1.0;

/// Tokens of KV cache that one rank group holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCapacity {
    pub tokens: u64,
}

impl KvCapacity {
    /// Capacity of a deployment whose cache gets `fraction` of the memory. `None`, and so no
    /// limit, where the system's file gives no memory size.
    pub fn of(
        config: &ModelConfig,
        deployment: &Deployment,
        memory: Option<&GpuMemory>,
        fraction: Option<f64>,
    ) -> Option<Self> {
        let memory = memory?;
        let free = memory.bytes_free(deployment.parallel.ranks()) as f64;
        let weights = weight_bytes(config, deployment) as f64;
        let cache = match deployment.backend.name {
            BackendName::Trtllm => (free - weights) * fraction.unwrap_or(TRTLLM_FRACTION),
            // A share of what is free before the weights are loaded holds both.
            BackendName::Sglang => free * fraction.unwrap_or(SGLANG_FRACTION) - weights,
        };
        let tokens = cache.max(0.0) / token_bytes(config, deployment) as f64;
        Some(Self {
            tokens: tokens as u64,
        })
    }
}

/// Bytes of one token's keys and values on one GPU, over all layers.
pub fn token_bytes(config: &ModelConfig, deployment: &Deployment) -> u64 {
    let kv_heads = u64::from((config.kv_heads / deployment.parallel.tp).max(1));
    let bytes = match deployment.precision.kv_cache {
        KvCacheDtype::Bfloat16 => 2,
        KvCacheDtype::Int8 | KvCacheDtype::Fp8 => 1,
    };
    if let Some(latent) = config.latent {
        // One latent vector and one rotary key per token, a copy on every rank.
        return u64::from(config.layers) * u64::from(latent.kv_rank + latent.rope_dim) * bytes;
    }
    // Gated-deltanet layers keep a state of fixed size instead.
    let without = config.deltanet.as_ref().map_or(0, |net| {
        net.layers.iter().filter(|linear| **linear).count() as u64
    });
    (u64::from(config.layers) - without) * 2 * kv_heads * u64::from(config.head_dim) * bytes
}

/// Bytes of the weights on one GPU: those of every GEMM and expert of the forward, each at its
/// precision, and the embedding in bfloat16. Norms, biases, convolutions and the scales of FP8 are
/// left out (below a thousandth); a head tied to the embedding is counted twice.
pub fn weight_bytes(config: &ModelConfig, deployment: &Deployment) -> u64 {
    let plan = Plan::new(config, deployment);
    let embedding = u64::from(config.vocab) * u64::from(config.hidden)
        / u64::from(deployment.parallel.tp)
        * BFLOAT16;
    let precision = &deployment.precision;
    let weights: u64 = plan
        .sequence()
        .map(|index| match &plan.op(index).key {
            OpKey::Gemm { n, k, dtype } => {
                let dtype = if *dtype == precision.qkv_proj().as_str() {
                    precision.qkv_proj()
                } else if *dtype == precision.gemm.as_str() {
                    precision.gemm
                } else {
                    GemmDtype::Bfloat16
                };
                u64::from(*n) * u64::from(*k) * gemm_width(dtype)
            }
            OpKey::Moe {
                hidden,
                inter,
                experts,
                moe_tp,
                moe_ep,
                ..
            } => {
                let width = precision.moe.map_or(BFLOAT16, moe_width);
                [*experts, 3, *hidden, *inter]
                    .map(u64::from)
                    .iter()
                    .product::<u64>()
                    / (u64::from(*moe_tp) * u64::from(*moe_ep))
                    * width
            }
            _ => 0,
        })
        .sum();
    (weights + embedding) / QUARTER_BITS_PER_BYTE
}

/// Widths of a weight are counted in quarters of a bit, so that a scale shared by 32 or by 16
/// weights counts in whole numbers.
const QUARTER_BITS_PER_BYTE: u64 = 32;
const BFLOAT16: u64 = 64;

fn gemm_width(dtype: GemmDtype) -> u64 {
    match dtype {
        GemmDtype::Bfloat16 => BFLOAT16,
        GemmDtype::Fp8 | GemmDtype::Fp8Static | GemmDtype::Fp8Block | GemmDtype::Int8Wo => 32,
        // Half a byte, and a byte of scale for 16 weights.
        GemmDtype::Nvfp4 => 18,
        GemmDtype::Int4Wo => 16,
    }
}

fn moe_width(dtype: MoeDtype) -> u64 {
    match dtype {
        MoeDtype::Bfloat16 => BFLOAT16,
        MoeDtype::Fp8 | MoeDtype::Fp8Block => 32,
        MoeDtype::Nvfp4 => 18,
        // Half a byte, and a byte of scale for 32 weights.
        MoeDtype::W4a16Mxfp4 | MoeDtype::W4a8Mxfp4Mxfp8 => 17,
        MoeDtype::Int4Wo | MoeDtype::W4afp8 => 16,
    }
}
