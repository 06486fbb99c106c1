//! What a lookup asks for, and which table rows may answer it: kernel family first, framework and
//! version second.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::import::VERSIONS;

/// Family of the experts' kernel, from the recipe's MoE backend.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum MoeKernel {
    /// trtllm-gen (recipe: `TRTLLM`).
    TrtllmGen,
    /// CUTLASS.
    Cutlass,
    /// DeepGEMM.
    Deepgemm,
    /// TensorRT-LLM's Triton path.
    Triton,
    /// TensorRT-LLM's CuTe DSL path; no table holds it.
    Cutedsl,
}

impl MoeKernel {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TrtllmGen => "trtllm_gen",
            Self::Cutlass => "cutlass",
            Self::Deepgemm => "deepgemm",
            Self::Triton => "triton",
            Self::Cutedsl => "cutedsl",
        }
    }
}

/// A collective of the NCCL tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Collective {
    AllGather,
    AllToAll,
    ReduceScatter,
}

impl Collective {
    pub fn op_name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::AllToAll => "alltoall",
            Self::ReduceScatter => "reduce_scatter",
        }
    }
}

/// The static shape of one op: everything a table is asked for except the quantities that change
/// from step to step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OpKey {
    /// `[m, k] x [k, n]`; quantity: m (rows).
    Gemm { n: u32, k: u32, dtype: String },
    /// Routed experts of one layer, all of it; quantity: tokens over all ranks.
    Moe {
        kernel: MoeKernel,
        dtype: String,
        hidden: u32,
        inter: u32,
        topk: u32,
        experts: u32,
        moe_tp: u32,
        moe_ep: u32,
        distribution: &'static str,
    },
    /// Prefill attention, causal; quantity: one length per prompt.
    ContextAttention(AttentionKey),
    /// Decode attention; quantities: batch and mean KV length.
    GenerationAttention(AttentionKey),
    /// Prefill latent attention; quantity: one length per prompt.
    ContextLatent { heads: u32, kv_dtype: String },
    /// Decode latent attention; quantities: batch and mean KV length.
    GenerationLatent { heads: u32, kv_dtype: String },
    /// Batched GEMM that folds the key or value projection into decode latent attention;
    /// quantity: tokens.
    LatentBmm {
        heads: u32,
        dtype: String,
        pre: bool,
    },
    /// One kernel of gated deltanet: convolution or delta rule. Context: one length per prompt;
    /// generation: batch.
    Deltanet {
        part: DeltanetPart,
        hidden: u32,
        conv: u32,
        k_heads: u32,
        v_heads: u32,
        k_dim: u32,
        v_dim: u32,
    },
    /// Custom all-reduce; quantity: elements.
    AllReduce { gpus: u32 },
    /// NCCL collective; quantity: elements as the table counts them.
    Nccl {
        collective: Collective,
        dtype: &'static str,
        gpus: u32,
    },
    /// An op no table holds, at the system's memory bandwidth; quantity: bytes moved.
    Memory,
}

/// The kernels of a gated-deltanet layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeltanetPart {
    ContextConv,
    ContextRule,
    GenerationConv,
    GenerationRule,
}

impl DeltanetPart {
    fn kernels(self) -> &'static [&'static str] {
        match self {
            Self::ContextConv => &["causal_conv1d_fn"],
            Self::ContextRule => &["chunk_gated_delta_rule"],
            Self::GenerationConv => &["causal_conv1d_update"],
            Self::GenerationRule => &[
                "fused_recurrent_gated_delta_rule_packed_decode",
                "fused_sigmoid_gating_delta_rule_update",
                "fused_recurrent_gated_delta_rule",
            ],
        }
    }

    fn is_context(self) -> bool {
        matches!(self, Self::ContextConv | Self::ContextRule)
    }
}

/// Heads of one rank, the sliding window (0: none) and the precisions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AttentionKey {
    /// The kernel that the case names, where its framework has several.
    pub kernel: Option<&'static str>,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub window: u32,
    pub attn_dtype: String,
    pub kv_dtype: String,
}

impl OpKey {
    /// Axes of the grid, outermost first.
    pub(super) fn axes(&self) -> &'static [&'static str] {
        match self {
            Self::Gemm { .. } => &["n", "k", "m"],
            Self::Moe { .. } => &["num_tokens"],
            Self::ContextAttention(_) | Self::ContextLatent { .. } => &["isl", "batch_size"],
            Self::GenerationAttention(_) | Self::GenerationLatent { .. } => &["kv", "batch_size"],
            Self::LatentBmm { .. } => &["num_tokens"],
            Self::Deltanet { part, .. } if part.is_context() => &["seq_len", "batch_size"],
            Self::Deltanet { .. } => &["batch_size"],
            Self::AllReduce { .. } | Self::Nccl { .. } => &["message_size"],
            Self::Memory => &["bytes"],
        }
    }

    /// Work at the given axis values, up to a factor that cancels in a ratio: FLOPs of a GEMM, of
    /// the experts and of causal prefill attention; KV bytes of decode attention; bytes of a
    /// collective or a memory-bound op.
    pub(super) fn work(&self, at: &[f64]) -> f64 {
        match self {
            Self::Gemm { .. } => at[0] * at[1] * at[2],
            Self::Moe { .. }
            | Self::LatentBmm { .. }
            | Self::AllReduce { .. }
            | Self::Nccl { .. }
            | Self::Memory => at[0],
            Self::ContextLatent { .. } => at[1] * at[0] * at[0],
            Self::GenerationLatent { .. } => at[1] * at[0],
            // Linear in the tokens.
            Self::Deltanet { part, .. } if part.is_context() => at[1] * at[0],
            Self::Deltanet { .. } => at[0],
            Self::ContextAttention(key) => at[1] * at[0] * key.visible(at[0]),
            Self::GenerationAttention(key) => at[1] * key.visible(at[0]),
        }
    }

    /// Ratio of work that scales a row at `line` before it is blended into the answer at `wanted`,
    /// where the row and the served step differ in more than the grid's axes. `None`: they do not.
    ///
    /// The experts' balanced rows give each token the least used experts, so that few tokens read
    /// as many experts' weights as they can, equally many on each expert-parallel rank. Served
    /// tokens are routed independently: some meet at the same expert, and fewer weights are read,
    /// but one rank reads more than another, and the layer ends with the rank that reads most. The
    /// ratio is that of weight bytes on that rank.
    pub(super) fn row_ratio(&self, wanted: &[f64], line: &[f64]) -> Option<f64> {
        match self {
            Self::Moe {
                topk,
                experts,
                moe_ep,
                distribution: "balanced",
                ..
            } => {
                let (all, topk) = (f64::from(*experts), f64::from(*topk));
                let missed = power(1.0 - topk / all, wanted[0]);
                let most = expected_most(*experts / *moe_ep, 1.0 - missed, *moe_ep);
                let balanced = all.min(line[0] * topk) / f64::from(*moe_ep);
                Some(most / balanced)
            }
            _ => None,
        }
    }

    /// Length of a prompt by itself that asks for as much work as `length` tokens behind `prefix`
    /// others: as many query-key pairs, where the op's work is in such pairs.
    pub(super) fn length_alone(&self, length: f64, prefix: f64) -> f64 {
        let window = match self {
            Self::ContextAttention(key) => f64::from(key.window),
            Self::ContextLatent { .. } => 0.0,
            _ => return length,
        };
        let pairs = twice_pairs(prefix + length, window) - twice_pairs(prefix, window);
        if window == 0.0 || pairs <= window * window {
            pairs.sqrt()
        } else {
            window + (pairs - window * window) / (2.0 * window)
        }
    }

    /// Whether the op is a collective: it ends for all ranks together.
    pub fn is_collective(&self) -> bool {
        matches!(self, Self::AllReduce { .. } | Self::Nccl { .. })
    }
}

/// `base` to a whole power by repeated squaring: the same bits on every platform.
fn power(base: f64, exponent: f64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    let mut left = exponent as u64;
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

/// Expected largest of `ranks` independent counts of successes in `trials`, each with probability
/// `p`: the sum over `count` of the probability that some rank has more than `count`.
fn expected_most(trials: u32, p: f64, ranks: u32) -> f64 {
    if ranks == 1 {
        return f64::from(trials) * p;
    }
    // From the likelier end, where the first probability cannot vanish.
    let from_failures = p > 0.5;
    let (start, odds) = if from_failures {
        (p, (1.0 - p) / p)
    } else {
        (1.0 - p, p / (1.0 - p))
    };
    let mut probability = power(start, f64::from(trials));
    let mut probabilities = vec![probability];
    for count in 0..trials {
        probability *= f64::from(trials - count) / f64::from(count + 1) * odds;
        probabilities.push(probability);
    }
    if from_failures {
        probabilities.reverse();
    }
    let (mut at_most, mut expected) = (0.0_f64, 0.0);
    for probability in &probabilities[..trials as usize] {
        at_most += probability;
        expected += 1.0 - power(at_most.min(1.0), f64::from(ranks));
    }
    expected
}

/// Twice the query-key pairs of causal attention over a prompt, with a window (0: none).
fn twice_pairs(length: f64, window: f64) -> f64 {
    let visible = if window == 0.0 {
        length
    } else {
        length.min(window)
    };
    visible * visible + 2.0 * (length - visible) * visible
}

impl AttentionKey {
    fn visible(&self, length: f64) -> f64 {
        if self.window == 0 {
            length
        } else {
            length.min(f64::from(self.window))
        }
    }
}

impl fmt::Display for OpKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gemm { n, k, dtype } => write!(f, "gemm {dtype} n={n} k={k}"),
            Self::Moe {
                kernel,
                dtype,
                hidden,
                inter,
                topk,
                experts,
                moe_tp,
                moe_ep,
                distribution,
            } => write!(
                f,
                "moe {} {dtype} hidden={hidden} inter={inter} topk={topk} \
                 experts={experts} moe_tp={moe_tp} moe_ep={moe_ep} {distribution}",
                kernel.as_str()
            ),
            Self::ContextAttention(k) => write!(f, "context attention {k}"),
            Self::GenerationAttention(k) => write!(f, "generation attention {k}"),
            Self::ContextLatent { heads, kv_dtype } => {
                write!(f, "context latent attention heads={heads} kv {kv_dtype}")
            }
            Self::GenerationLatent { heads, kv_dtype } => {
                write!(f, "generation latent attention heads={heads} kv {kv_dtype}")
            }
            Self::LatentBmm { heads, dtype, pre } => {
                let side = if *pre { "before" } else { "after" };
                write!(f, "latent bmm {dtype} heads={heads} {side} attention")
            }
            Self::Deltanet {
                part,
                hidden,
                k_heads,
                v_heads,
                ..
            } => write!(
                f,
                "gated deltanet {part:?} hidden={hidden} k_heads={k_heads} v_heads={v_heads}"
            ),
            Self::AllReduce { gpus } => write!(f, "all-reduce over {gpus} GPUs"),
            Self::Nccl {
                collective,
                dtype,
                gpus,
            } => write!(f, "nccl {} {dtype} over {gpus} GPUs", collective.op_name()),
            Self::Memory => write!(f, "memory-bound op"),
        }
    }
}

impl fmt::Display for AttentionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "heads={} kv_heads={} head_dim={} window={} {} kv {}",
            self.heads, self.kv_heads, self.head_dim, self.window, self.attn_dtype, self.kv_dtype
        )
    }
}

/// A table that may answer a lookup, and what using it must flag.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub family: &'static str,
    pub backend: &'static str,
    pub version: &'static str,
    pub table: &'static str,
    /// Kernels of this table that are the wanted one; empty: the table holds one kernel.
    pub kernel_sources: &'static [&'static str],
    /// Another kernel than the one served: a louder flag.
    pub other_kernel: bool,
}

/// Versions of the op tables in use. Releases without tables of their own fall back to these,
/// flagged as a version transfer.
const TRTLLM: &str = VERSIONS[0].1;
const SGLANG: &str = VERSIONS[1].1;
const NCCL: &str = VERSIONS[2].1;

/// Attention kernels of SGLang that the tables hold, in the order in which one stands in for
/// another.
const SGLANG_ATTENTION: [&[&str]; 4] = [&["trtllm_mha"], &["flashinfer"], &["fa3"], &["triton"]];

impl OpKey {
    /// Tables that may answer a case served by `framework`, best first: the served kernel in the
    /// framework's own tables, the same kernel under another framework, then another kernel.
    pub(super) fn candidates(&self, framework: &str) -> Vec<Candidate> {
        let trtllm = |family, table, kernel_sources| Candidate {
            family,
            backend: "trtllm",
            version: TRTLLM,
            table,
            kernel_sources,
            other_kernel: false,
        };
        let sglang = |family, table, kernel_sources| Candidate {
            backend: "sglang",
            version: SGLANG,
            ..trtllm(family, table, kernel_sources)
        };
        let other = |candidate| Candidate {
            other_kernel: true,
            ..candidate
        };
        let on_sglang = framework == "sglang";
        let own_first = |trtllm, sglang| {
            if on_sglang {
                vec![sglang, trtllm]
            } else {
                vec![trtllm, sglang]
            }
        };
        match self {
            Self::Gemm { .. } if on_sglang => vec![
                sglang(
                    "gemm",
                    "gemm_perf",
                    &[
                        "sglang_torch_linear",
                        "sglang_sgl_kernel_fp8_scaled_mm",
                        "sglang_deepgemm_gemm_nt_f8f8bf16",
                    ],
                ),
                trtllm("gemm", "gemm_perf", &["torch_flow", "deepgemm"]),
                other(sglang(
                    "gemm",
                    "gemm_perf",
                    &["sglang_flashinfer_cutedsl_nvfp4"],
                )),
            ],
            Self::Gemm { .. } => vec![trtllm("gemm", "gemm_perf", &["torch_flow", "deepgemm"])],
            Self::Moe { kernel, .. } => {
                let table = "moe_perf";
                let trtllm = |kernels| trtllm("moe", table, kernels);
                let sglang = |kernels| sglang("moe", table, kernels);
                match kernel {
                    MoeKernel::TrtllmGen => vec![
                        trtllm(&["moe_torch_flow_min_latency"]),
                        sglang(&["sglang_flashinfer_trtllm_moe"]),
                        other(trtllm(&["moe_torch_flow_cutlass", "deepgemm"])),
                    ],
                    // CuTe DSL has no rows: the other grouped GEMM over permuted tokens.
                    MoeKernel::Cutedsl => vec![other(trtllm(&["moe_torch_flow_cutlass"]))],
                    MoeKernel::Cutlass => vec![
                        trtllm(&["moe_torch_flow_cutlass"]),
                        sglang(&["sglang_flashinfer_cutlass_moe"]),
                        other(sglang(&["sglang_flashinfer_trtllm_moe"])),
                    ],
                    MoeKernel::Deepgemm => vec![
                        trtllm(&["deepgemm"]),
                        other(trtllm(&["moe_torch_flow_cutlass"])),
                    ],
                    MoeKernel::Triton if on_sglang => vec![
                        sglang(&["sglang_fused_moe_triton"]),
                        other(trtllm(&["moe_torch_flow"])),
                    ],
                    MoeKernel::Triton => vec![
                        trtllm(&["moe_torch_flow"]),
                        other(sglang(&["sglang_fused_moe_triton"])),
                    ],
                }
            }
            Self::ContextAttention(_) | Self::GenerationAttention(_) => {
                let table = match self {
                    Self::ContextAttention(_) => "context_attention_perf",
                    _ => "generation_attention_perf",
                };
                let sglang = |kernels| sglang("attention", table, kernels);
                let trtllm = trtllm("attention", table, &["torch_flow"]);
                if on_sglang {
                    let key = match self {
                        Self::ContextAttention(key) | Self::GenerationAttention(key) => key,
                        _ => return Vec::new(),
                    };
                    // Without a name in the case, any kernel may be the runtime's own choice.
                    let (mut served, others): (Vec<_>, Vec<_>) = SGLANG_ATTENTION
                        .into_iter()
                        .partition(|kernels| key.kernel.is_none_or(|name| kernels[0] == name));
                    let mut tables: Vec<Candidate> = served.drain(..).map(sglang).collect();
                    tables.extend(others.into_iter().map(|kernels| other(sglang(kernels))));
                    tables.push(other(trtllm));
                    tables
                } else {
                    vec![trtllm]
                }
            }
            Self::ContextLatent { .. } | Self::GenerationLatent { .. } => {
                let table = match self {
                    Self::ContextLatent { .. } => "context_mla_perf",
                    _ => "generation_mla_perf",
                };
                own_first(trtllm("mla", table, &[]), sglang("mla", table, &[]))
            }
            Self::LatentBmm { .. } => own_first(
                trtllm("mla_bmm", "mla_bmm_perf", &[]),
                sglang("mla_bmm", "mla_bmm_perf", &[]),
            ),
            Self::Deltanet { part, .. } => {
                let kernels = part.kernels();
                let sglang = sglang("linear_attention", "gdn_perf", kernels);
                let trtllm = trtllm("linear_attention", "gdn_perf", kernels);
                own_first(trtllm, sglang)
            }
            Self::AllReduce { .. } if on_sglang => vec![
                // The eager rows are bound by the host of their benchmark: no transfer time.
                sglang(
                    "comm",
                    "custom_allreduce_perf",
                    &["SGLang_CustomAllReduce_graph"],
                ),
                trtllm("comm", "custom_allreduce_perf", &["TRTLLM"]),
            ],
            Self::AllReduce { .. } => {
                vec![trtllm("comm", "custom_allreduce_perf", &["TRTLLM"])]
            }
            Self::Nccl { .. } => vec![Candidate {
                backend: "nccl",
                version: NCCL,
                ..trtllm("comm", "nccl_perf", &["NCCL"])
            }],
            Self::Memory => Vec::new(),
        }
    }

    /// Column values a row must have. Text columns compare as text, integer columns as integers.
    pub(super) fn filter(&self) -> Vec<(&'static str, Want)> {
        let int = |v: u32| Want::Int(i64::from(v));
        let text = |v: &str| Want::Text(v.to_owned());
        let attention = |k: &AttentionKey| {
            vec![
                ("num_heads", int(k.heads)),
                ("num_key_value_heads", int(k.kv_heads)),
                ("head_dim", int(k.head_dim)),
                ("window_size", int(k.window)),
                ("attn_dtype", text(&k.attn_dtype)),
                ("kv_cache_dtype", text(&k.kv_dtype)),
            ]
        };
        match self {
            Self::Gemm { n, k, dtype } => vec![
                ("gemm_dtype", text(dtype)),
                ("n", Want::Bracket(i64::from(*n))),
                ("k", Want::Bracket(i64::from(*k))),
            ],
            Self::Moe {
                dtype,
                hidden,
                inter,
                topk,
                experts,
                moe_tp,
                moe_ep,
                distribution,
                ..
            } => vec![
                ("moe_dtype", text(dtype)),
                ("hidden_size", int(*hidden)),
                ("inter_size", int(*inter)),
                ("topk", int(*topk)),
                ("num_experts", int(*experts)),
                ("moe_tp_size", int(*moe_tp)),
                ("moe_ep_size", int(*moe_ep)),
                ("distribution", text(distribution)),
            ],
            Self::ContextAttention(k) | Self::GenerationAttention(k) => attention(k),
            Self::ContextLatent { heads, kv_dtype }
            | Self::GenerationLatent { heads, kv_dtype } => {
                vec![
                    ("num_heads", int(*heads)),
                    ("mla_dtype", text("bfloat16")),
                    ("kv_cache_dtype", text(kv_dtype)),
                ]
            }
            Self::LatentBmm { heads, dtype, pre } => vec![
                ("num_heads", int(*heads)),
                ("bmm_dtype", text(dtype)),
                (
                    "op_name",
                    text(if *pre { "mla_gen_pre" } else { "mla_gen_post" }),
                ),
            ],
            Self::Deltanet {
                hidden,
                conv,
                k_heads,
                v_heads,
                k_dim,
                v_dim,
                ..
            } => vec![
                ("d_model", int(*hidden)),
                ("d_conv", int(*conv)),
                ("num_k_heads", int(*k_heads)),
                ("num_v_heads", int(*v_heads)),
                ("head_k_dim", int(*k_dim)),
                ("head_v_dim", int(*v_dim)),
            ],
            Self::AllReduce { gpus } => vec![
                ("num_gpus", int(*gpus)),
                ("allreduce_dtype", text("bfloat16")),
            ],
            Self::Nccl {
                collective,
                dtype,
                gpus,
            } => vec![
                ("op_name", text(collective.op_name())),
                ("nccl_dtype", text(dtype)),
                ("num_gpus", int(*gpus)),
            ],
            Self::Memory => Vec::new(),
        }
    }
}

/// What a row's column must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Want {
    Int(i64),
    Text(String),
    /// The exact value, or the nearest ones below and above.
    Bracket(i64),
}

/// Why there is no prediction: the row that is missing, or what the deployment cannot serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub missing: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.missing)
    }
}

#[cfg(test)]
mod tests {
    use super::{AttentionKey, OpKey, expected_most};

    #[test]
    fn a_piece_behind_others_is_as_long_as_a_prompt_of_equal_work() {
        let attention = |window| {
            OpKey::ContextAttention(AttentionKey {
                kernel: None,
                heads: 1,
                kv_heads: 1,
                head_dim: 1,
                window,
                attn_dtype: String::new(),
                kv_dtype: String::new(),
            })
        };
        assert_eq!(attention(0).length_alone(64.0, 0.0), 64.0);
        // (3 + 4)^2 - 3^2 = 40; a square of 4 behind 3 is 5^2 - 3^2.
        assert_eq!(attention(0).length_alone(2.0, 3.0), 4.0);
        // 64 tokens behind 64 in a window of 64: each sees 64, as the last 64 of 128 do, and the
        // first 32 behind a full window more are 64 * 64 pairs.
        assert_eq!(attention(64).length_alone(64.0, 64.0), 96.0);
        // One token behind many is a short prompt, not a long one scaled up.
        assert!(attention(0).length_alone(1.0, 16384.0) < 182.0);
    }

    #[test]
    fn the_largest_count_is_expected_by_hand() {
        // One trial on each of two ranks: 1 unless both fail.
        assert_eq!(expected_most(1, 0.5, 2), 0.75);
        // Two trials each: counts 0, 1, 2 with 1/4, 1/2, 1/4; largest 0: 1/16, 1: 8/16, 2: 7/16.
        assert!((expected_most(2, 0.5, 2) - 22.0 / 16.0).abs() < 1e-15);
        // Certain success and none.
        assert_eq!(expected_most(64, 1.0, 4), 64.0);
        assert_eq!(expected_most(64, 0.0, 4), 0.0);
        // Both ends of the recursion agree: at least one failure each.
        let few = expected_most(64, 1e-9, 8);
        assert!((few - 8.0 * 64.0 * 1e-9).abs() < 1e-12);
        // One rank: the mean.
        assert_eq!(expected_most(10, 0.3, 1), 3.0);
    }
}
