//! The ops of one forward step, in submission order, for every family of models.
//!
//! Launch counts follow TensorRT-LLM's PyTorch modules (`modeling_gpt_oss.py`, `attention.py`, the
//! fused MoE backends): they share the measured host time of a forward among its ops and carry it
//! to another topology; no time is attached to a launch itself.

use crate::perfdb::{AttentionKey, Collective, DeltanetPart, MoeKernel, OpKey};

use super::config::{ModelConfig, QkNorm};
use super::scenario::{AttentionDtype, BackendName, Deployment, GemmDtype, MoeDtype};

/// Position of an op in [`Plan::ops`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpIndex(pub u16);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Module {
    Embedding,
    Attention,
    Experts,
    Mlp,
    Reduce,
    Logits,
}

/// When an op is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    Always,
    /// Only in steps with context requests.
    WithContext,
    /// Only in steps with generation requests.
    WithGeneration,
}

/// What of a step feeds an op, per unit of which `Op::per_unit` counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Units {
    /// Tokens of this rank.
    Tokens,
    /// Tokens of all attention ranks together.
    AllTokens,
    /// Tokens of this rank's prompts.
    ContextTokens,
    /// Generation requests of this rank, padding included.
    GenerationTokens,
    /// Sequences of this rank: one logits row each.
    Sequences,
    /// Prompt lengths of the context requests.
    Prompts,
    /// Generation batch and mean KV length.
    Decode,
}

/// One op of the forward.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    pub name: String,
    pub module: Module,
    pub key: OpKey,
    pub launch: Launch,
    pub units: Units,
    /// Table quantity per unit: elements, bytes or rows.
    pub per_unit: f64,
    /// Kernels the host submits in eager execution; 0 where another op's kernel does the work.
    pub launches: u32,
}

impl Op {
    /// Whether its time depends on the KV lengths of the generation requests. A gated-deltanet
    /// layer keeps a state of fixed size instead.
    pub fn follows_kv(&self) -> bool {
        self.units == Units::Decode && !matches!(self.key, OpKey::Deltanet { .. })
    }
}

/// What one rank works on in a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankLoad {
    /// Prompt tokens of each context request that this step computes.
    pub prompts: Vec<u32>,
    /// Tokens of each prompt that earlier steps have computed; empty: none of any. Attention sees
    /// them, and nothing else does: a lookup takes the row at the piece's own length times the
    /// ratio of attended pairs.
    pub prefixes: Vec<u32>,
    /// Generation requests.
    pub generation: u32,
    /// Generation requests including graph padding.
    pub padded: u32,
    /// Sum of the KV lengths of the generation requests, padding included.
    pub kv_sum: u64,
}

impl RankLoad {
    /// Tokens the kernels work on, padding included.
    pub fn tokens(&self) -> u32 {
        self.prompts.iter().sum::<u32>() + self.padded
    }

    /// The generation requests alone.
    pub fn decode_part(&self) -> Self {
        Self {
            prompts: Vec::new(),
            prefixes: Vec::new(),
            ..*self
        }
    }

    /// The context requests alone.
    pub fn context_part(&self) -> Self {
        Self {
            prompts: self.prompts.clone(),
            prefixes: self.prefixes.clone(),
            ..Self::default()
        }
    }

    /// Sequences that sample a token, padding included.
    pub fn sequences(&self) -> u32 {
        self.prompts.len() as u32 + self.padded
    }
}

/// The forward step of one deployment: its distinct ops and their order.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub ops: Vec<Op>,
    pub prologue: Vec<OpIndex>,
    /// Ops of each kind of layer.
    pub layer_kinds: Vec<Vec<OpIndex>>,
    /// Kind of each layer, in order.
    pub layers: Vec<u16>,
    pub epilogue: Vec<OpIndex>,
}

const BF16_BYTES: u32 = 2;
const FP32_BYTES: u32 = 4;

impl Plan {
    /// Builds the forward of `config` as `deployment` runs it.
    pub fn new(config: &ModelConfig, deployment: &Deployment) -> Self {
        let mut builder = Builder {
            config,
            deployment,
            ops: Vec::new(),
        };
        let prologue = builder.prologue();
        let kind_of = |layer: usize| LayerKind {
            window: config.windows[layer],
            deltanet: config
                .deltanet
                .as_ref()
                .is_some_and(|deltanet| deltanet.layers[layer]),
            dense: layer < config.dense_layers as usize,
        };
        let of_layers: Vec<LayerKind> = (0..config.windows.len()).map(kind_of).collect();
        let mut kinds = of_layers.clone();
        kinds.sort_unstable();
        kinds.dedup();
        let layer_kinds = kinds.iter().map(|kind| builder.layer(*kind)).collect();
        let layers = of_layers
            .iter()
            .map(|kind| kinds.partition_point(|known| known < kind) as u16)
            .collect();
        let epilogue = builder.epilogue();
        Self {
            ops: builder.ops,
            prologue,
            layer_kinds,
            layers,
            epilogue,
        }
    }

    pub fn op(&self, index: OpIndex) -> &Op {
        &self.ops[usize::from(index.0)]
    }

    /// All ops of one forward in submission order.
    pub fn sequence(&self) -> impl Iterator<Item = OpIndex> + '_ {
        let layers = self
            .layers
            .iter()
            .flat_map(|kind| &self.layer_kinds[usize::from(*kind)]);
        self.prologue
            .iter()
            .chain(layers)
            .chain(&self.epilogue)
            .copied()
    }

    /// Whether a step with this load launches the op.
    pub fn runs(&self, index: OpIndex, load: &RankLoad) -> bool {
        match self.op(index).launch {
            Launch::Always => true,
            Launch::WithContext => !load.prompts.is_empty(),
            Launch::WithGeneration => load.padded > 0,
        }
    }

    /// Kernels the host submits in one eager forward with this load.
    pub fn launches(&self, load: &RankLoad) -> u32 {
        self.sequence()
            .filter(|index| self.runs(*index, load))
            .map(|index| self.op(index).launches)
            .sum()
    }
}

/// What tells layers apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct LayerKind {
    window: u32,
    deltanet: bool,
    /// Dense MLP in a model with experts.
    dense: bool,
}

struct Builder<'a> {
    config: &'a ModelConfig,
    deployment: &'a Deployment,
    ops: Vec<Op>,
}

impl Builder<'_> {
    fn add(&mut self, op: Op) -> OpIndex {
        if let Some(known) = self.ops.iter().position(|known| *known == op) {
            return OpIndex(known as u16);
        }
        self.ops.push(op);
        OpIndex(self.ops.len() as u16 - 1)
    }

    fn gemm(&mut self, name: &str, module: Module, units: Units, n: u32, k: u32) -> OpIndex {
        let dtype = self.deployment.precision.gemm;
        self.gemm_in(dtype, name, module, units, n, k)
    }

    fn gemm_in(
        &mut self,
        dtype: GemmDtype,
        name: &str,
        module: Module,
        units: Units,
        n: u32,
        k: u32,
    ) -> OpIndex {
        self.add(Op {
            name: name.to_owned(),
            module,
            key: OpKey::Gemm {
                n,
                k,
                dtype: dtype.as_str().to_owned(),
            },
            launch: Launch::Always,
            units,
            per_unit: 1.0,
            launches: 1,
        })
    }

    /// A projection into attention: quantised checkpoints may leave these out.
    fn qkv_gemm(&mut self, name: &str, n: u32, k: u32) -> OpIndex {
        let dtype = self.deployment.precision.qkv_proj();
        self.gemm_in(dtype, name, Module::Attention, Units::Tokens, n, k)
    }

    /// A GEMM that quantised checkpoints leave in bfloat16: router, logits head, narrow gates.
    fn bfloat16_gemm(
        &mut self,
        name: &str,
        module: Module,
        units: Units,
        n: u32,
        k: u32,
    ) -> OpIndex {
        self.gemm_in(GemmDtype::Bfloat16, name, module, units, n, k)
    }

    /// A memory-bound op that moves `bytes` per unit.
    fn moved(
        &mut self,
        name: &str,
        module: Module,
        units: Units,
        bytes: u32,
        launches: u32,
    ) -> OpIndex {
        self.add(Op {
            name: name.to_owned(),
            module,
            key: OpKey::Memory,
            launch: Launch::Always,
            units,
            per_unit: f64::from(bytes),
            launches,
        })
    }

    fn collective(
        &mut self,
        name: &str,
        module: Module,
        key: OpKey,
        units: Units,
        elements: f64,
    ) -> OpIndex {
        self.add(Op {
            name: name.to_owned(),
            module,
            key,
            launch: Launch::Always,
            units,
            per_unit: elements,
            launches: 1,
        })
    }

    /// Embedding (columns split over tensor-parallel ranks, then gathered) and the first norm.
    fn prologue(&mut self) -> Vec<OpIndex> {
        let hidden = self.config.hidden;
        let tp = self.deployment.parallel.tp;
        let mut ops = vec![self.moved(
            "embedding",
            Module::Embedding,
            Units::Tokens,
            2 * BF16_BYTES * hidden / tp,
            1,
        )];
        if tp > 1 {
            ops.push(self.collective(
                "embedding all-gather",
                Module::Embedding,
                OpKey::Nccl {
                    collective: Collective::AllGather,
                    dtype: "half",
                    gpus: tp,
                },
                Units::Tokens,
                f64::from(hidden),
            ));
        }
        ops.push(self.moved(
            "input norm",
            Module::Embedding,
            Units::Tokens,
            2 * BF16_BYTES * hidden,
            1,
        ));
        ops
    }

    fn layer(&mut self, kind: LayerKind) -> Vec<OpIndex> {
        let tp = self.deployment.parallel.tp;
        let mut ops = if kind.deltanet {
            self.deltanet()
        } else if self.config.latent.is_some() {
            self.latent_attention()
        } else {
            self.attention(kind.window)
        };
        ops.extend(self.reduce_and_norm("attention", tp));
        if kind.dense {
            ops.extend(self.dense_mlp(self.config.dense_ffn, "mlp"));
        } else {
            ops.extend(self.mlp());
        }
        ops
    }

    /// An op of the context or of the generation requests alone.
    fn per_phase(&mut self, name: &str, key: OpKey, context: bool, launches: u32) -> OpIndex {
        self.add(Op {
            name: name.to_owned(),
            module: Module::Attention,
            key,
            launch: if context {
                Launch::WithContext
            } else {
                Launch::WithGeneration
            },
            units: if context {
                Units::Prompts
            } else {
                Units::Decode
            },
            per_unit: 1.0,
            launches,
        })
    }

    /// Grouped-query attention.
    fn attention(&mut self, window: u32) -> Vec<OpIndex> {
        let config = self.config;
        let tp = self.deployment.parallel.tp;
        let heads = config.heads / tp;
        // Ranks beyond the KV heads hold a copy each.
        let kv_heads = (config.kv_heads / tp).max(1);
        let query_heads = if config.gated_attention {
            2 * heads
        } else {
            heads
        };
        let mut ops = vec![self.qkv_gemm(
            "qkv_proj",
            (query_heads + 2 * kv_heads) * config.head_dim,
            config.hidden,
        )];
        if let Some(norm) = config.qk_norm {
            ops.extend(self.qk_norm(norm, heads, kv_heads));
        }
        let key = AttentionKey {
            kernel: match self.deployment.backend.name {
                BackendName::Trtllm => None,
                BackendName::Sglang => self.deployment.kernels.attention.map(|name| name.as_str()),
            },
            heads,
            kv_heads,
            head_dim: config.head_dim,
            window,
            attn_dtype: self
                .deployment
                .precision
                .attention
                .map_or("bfloat16", AttentionDtype::as_str)
                .to_owned(),
            kv_dtype: self.deployment.precision.kv_cache.as_str().to_owned(),
        };
        let span = if window == 0 { "full" } else { "window" };
        // The attention rows time the whole op: rotary embedding and KV write, then attention.
        ops.push(self.per_phase(
            &format!("context attention ({span})"),
            OpKey::ContextAttention(key.clone()),
            true,
            2,
        ));
        ops.push(self.per_phase(
            &format!("generation attention ({span})"),
            OpKey::GenerationAttention(AttentionKey {
                // The decode tables hold one query precision.
                attn_dtype: "bfloat16".to_owned(),
                ..key
            }),
            false,
            2,
        ));
        if config.gated_attention {
            // Reads the gate and the output, writes the output.
            ops.push(self.moved(
                "attention gate",
                Module::Attention,
                Units::Tokens,
                3 * BF16_BYTES * heads * config.head_dim,
                1,
            ));
        }
        ops.push(self.gemm(
            "o_proj",
            Module::Attention,
            Units::Tokens,
            config.hidden,
            heads * config.head_dim,
        ));
        ops
    }

    /// Norm of queries and keys, two kernels. One over all heads of the layer needs what the other
    /// ranks hold: TensorRT-LLM gathers queries and keys and norms them whole on every rank
    /// (`modeling_minimaxm2.py`), SGLang sums the two variances.
    fn qk_norm(&mut self, norm: QkNorm, heads: u32, kv_heads: u32) -> Vec<OpIndex> {
        let config = self.config;
        let tp = self.deployment.parallel.tp;
        let attention = Module::Attention;
        let mut ops = Vec::new();
        let mut normed = (heads + kv_heads) * config.head_dim;
        if norm == QkNorm::PerLayer && tp > 1 {
            match self.deployment.backend.name {
                BackendName::Trtllm => {
                    normed = (config.heads + config.kv_heads) * config.head_dim;
                    for (name, heads) in [
                        ("query all-gather", config.heads),
                        ("key all-gather", config.kv_heads),
                    ] {
                        let key = OpKey::Nccl {
                            collective: Collective::AllGather,
                            dtype: "half",
                            gpus: tp,
                        };
                        let elements = f64::from(heads * config.head_dim);
                        ops.push(self.collective(name, attention, key, Units::Tokens, elements));
                    }
                }
                BackendName::Sglang => ops.push(self.collective(
                    "qk variance all-reduce",
                    attention,
                    OpKey::AllReduce { gpus: tp },
                    Units::Tokens,
                    2.0,
                )),
            }
        }
        ops.push(self.moved(
            "qk norm",
            attention,
            Units::Tokens,
            2 * BF16_BYTES * normed,
            2,
        ));
        ops
    }

    /// Multi-head latent attention: low-rank projections on every rank, heads split; prefill
    /// expands keys and values, decode folds the expansion into two batched GEMMs.
    fn latent_attention(&mut self) -> Vec<OpIndex> {
        let config = self.config;
        let Some(latent) = config.latent else {
            return Vec::new();
        };
        let heads = config.heads / self.deployment.parallel.tp;
        let kv_dtype = self.deployment.precision.kv_cache.as_str().to_owned();
        // The tables' fp8 rows are those of FP8 block checkpoints.
        let folded = match self.deployment.precision.qkv_proj() {
            GemmDtype::Fp8Block => "fp8",
            _ => "bfloat16",
        };
        let bmm = |pre| OpKey::LatentBmm {
            heads,
            dtype: folded.to_owned(),
            pre,
        };
        let ranks = latent.q_rank + latent.kv_rank;
        let attention = Module::Attention;
        vec![
            self.qkv_gemm("latent down_proj", ranks + latent.rope_dim, config.hidden),
            self.moved(
                "latent norm",
                attention,
                Units::Tokens,
                2 * BF16_BYTES * ranks,
                2,
            ),
            self.qkv_gemm(
                "query up_proj",
                heads * (latent.nope_dim + latent.rope_dim),
                latent.q_rank,
            ),
            self.context_gemm(
                "key-value up_proj",
                heads * (latent.nope_dim + latent.v_dim),
                latent.kv_rank,
            ),
            self.per_phase(
                "context latent attention",
                OpKey::ContextLatent {
                    heads,
                    kv_dtype: kv_dtype.clone(),
                },
                true,
                2,
            ),
            self.generation_tokens("latent bmm before", bmm(true)),
            self.per_phase(
                "generation latent attention",
                OpKey::GenerationLatent { heads, kv_dtype },
                false,
                2,
            ),
            self.generation_tokens("latent bmm after", bmm(false)),
            self.gemm(
                "o_proj",
                attention,
                Units::Tokens,
                config.hidden,
                heads * latent.v_dim,
            ),
        ]
    }

    /// A GEMM over the context tokens alone.
    fn context_gemm(&mut self, name: &str, n: u32, k: u32) -> OpIndex {
        let dtype = self.deployment.precision.qkv_proj().as_str().to_owned();
        self.add(Op {
            name: name.to_owned(),
            module: Module::Attention,
            key: OpKey::Gemm { n, k, dtype },
            launch: Launch::WithContext,
            units: Units::ContextTokens,
            per_unit: 1.0,
            launches: 1,
        })
    }

    /// An op over the generation requests, one token each.
    fn generation_tokens(&mut self, name: &str, key: OpKey) -> OpIndex {
        self.add(Op {
            name: name.to_owned(),
            module: Module::Attention,
            key,
            launch: Launch::WithGeneration,
            units: Units::GenerationTokens,
            per_unit: 1.0,
            launches: 1,
        })
    }

    /// A gated-deltanet layer: projections, convolution, delta rule, gated norm.
    fn deltanet(&mut self) -> Vec<OpIndex> {
        let config = self.config;
        let Some(net) = config.deltanet.as_ref() else {
            return Vec::new();
        };
        let tp = self.deployment.parallel.tp;
        let (k_heads, v_heads) = (net.k_heads / tp, net.v_heads / tp);
        let (keys, values) = (k_heads * net.k_dim, v_heads * net.v_dim);
        let key = |part| OpKey::Deltanet {
            part,
            hidden: config.hidden,
            conv: net.conv,
            k_heads,
            v_heads,
            k_dim: net.k_dim,
            v_dim: net.v_dim,
        };
        let attention = Module::Attention;
        vec![
            self.qkv_gemm("deltanet qkvz_proj", 2 * keys + 2 * values, config.hidden),
            self.bfloat16_gemm(
                "deltanet ba_proj",
                attention,
                Units::Tokens,
                2 * v_heads,
                config.hidden,
            ),
            self.per_phase(
                "context convolution",
                key(DeltanetPart::ContextConv),
                true,
                1,
            ),
            self.per_phase(
                "context delta rule",
                key(DeltanetPart::ContextRule),
                true,
                1,
            ),
            self.per_phase(
                "generation convolution",
                key(DeltanetPart::GenerationConv),
                false,
                1,
            ),
            self.per_phase(
                "generation delta rule",
                key(DeltanetPart::GenerationRule),
                false,
                1,
            ),
            self.moved(
                "gated norm",
                attention,
                Units::Tokens,
                3 * BF16_BYTES * values,
                1,
            ),
            self.gemm(
                "deltanet out_proj",
                attention,
                Units::Tokens,
                config.hidden,
                values,
            ),
        ]
    }

    /// Residual add and norm, fused behind the all-reduce where ranks must sum.
    fn reduce_and_norm(&mut self, what: &str, gpus: u32) -> Vec<OpIndex> {
        let hidden = self.config.hidden;
        // Reads the sum and the residual, writes the residual and the normed hidden state.
        let bytes = 4 * BF16_BYTES * hidden;
        if gpus == 1 {
            return vec![self.moved(
                &format!("{what} residual+norm"),
                Module::Reduce,
                Units::Tokens,
                bytes,
                1,
            )];
        }
        let fused = self.deployment.kernels.allreduce_fusion.unwrap_or(true);
        vec![
            self.collective(
                &format!("{what} all-reduce"),
                Module::Reduce,
                OpKey::AllReduce { gpus },
                Units::Tokens,
                f64::from(hidden),
            ),
            self.moved(
                &format!("{what} residual+norm"),
                Module::Reduce,
                Units::Tokens,
                bytes,
                u32::from(!fused),
            ),
        ]
    }

    /// The case's kernel family, or the runtime's documented default backend.
    fn moe_kernel(&self) -> MoeKernel {
        let default = match self.deployment.backend.name {
            BackendName::Trtllm => MoeKernel::Cutlass,
            BackendName::Sglang => MoeKernel::Triton,
        };
        self.deployment.kernels.moe.unwrap_or(default)
    }

    /// A dense MLP, split over the tensor-parallel ranks, and the reduction behind it.
    fn dense_mlp(&mut self, ffn: u32, what: &str) -> Vec<OpIndex> {
        let tp = self.deployment.parallel.tp;
        let mut ops = self.dense_gemms(ffn / tp, what);
        ops.extend(self.reduce_and_norm("mlp", tp));
        ops
    }

    fn dense_gemms(&mut self, ffn: u32, what: &str) -> Vec<OpIndex> {
        let hidden = self.config.hidden;
        vec![
            self.gemm(
                &format!("{what} gate_up_proj"),
                Module::Mlp,
                Units::Tokens,
                2 * ffn,
                hidden,
            ),
            self.moved(
                &format!("{what} activation"),
                Module::Mlp,
                Units::Tokens,
                3 * BF16_BYTES * ffn,
                1,
            ),
            self.gemm(
                &format!("{what} down_proj"),
                Module::Mlp,
                Units::Tokens,
                hidden,
                ffn,
            ),
        ]
    }

    fn mlp(&mut self) -> Vec<OpIndex> {
        let config = self.config;
        let topology = self.deployment.parallel;
        let Some(experts) = config.experts else {
            return self.dense_mlp(config.ffn, "mlp");
        };
        let mut ops = vec![self.bfloat16_gemm(
            "router",
            Module::Experts,
            Units::Tokens,
            experts.count,
            config.hidden,
        )];
        let moe = Op {
            name: "experts".to_owned(),
            module: Module::Experts,
            key: OpKey::Moe {
                kernel: self.moe_kernel(),
                dtype: self
                    .deployment
                    .precision
                    .moe
                    .map_or("bfloat16", MoeDtype::as_str)
                    .to_owned(),
                hidden: config.hidden,
                inter: config.ffn,
                topk: experts.topk,
                experts: experts.count,
                moe_tp: topology.moe_tp,
                moe_ep: topology.moe_ep,
                // Random-token prompts route evenly: the traced expert sums say so.
                distribution: "balanced",
            },
            launch: Launch::Always,
            units: Units::AllTokens,
            per_unit: 1.0,
            // Quantise, route, two grouped GEMMs with the activation between, finalise.
            launches: 6,
        };
        if topology.dp > 1 {
            // Each token goes to every rank that holds one of its experts, and comes back.
            let copies = expected_ranks(experts.count, experts.topk, topology.moe_ep);
            let exchange = |dtype| OpKey::Nccl {
                collective: Collective::AllToAll,
                dtype,
                gpus: topology.dp,
            };
            let elements = copies * f64::from(config.hidden);
            ops.push(self.collective(
                "dispatch all-to-all",
                Module::Experts,
                exchange("int8"),
                Units::Tokens,
                elements,
            ));
            ops.push(self.add(moe));
            if config.shared_ffn > 0 {
                ops.extend(self.dense_gemms(config.shared_ffn, "shared expert"));
            }
            ops.push(self.collective(
                "combine all-to-all",
                Module::Experts,
                exchange("half"),
                Units::Tokens,
                elements,
            ));
            ops.extend(self.reduce_and_norm("experts", 1));
        } else {
            ops.push(self.add(moe));
            if config.shared_ffn > 0 {
                ops.extend(self.dense_gemms(config.shared_ffn / topology.tp, "shared expert"));
            }
            ops.extend(self.reduce_and_norm("experts", topology.tp));
        }
        ops
    }

    /// Logits on the last token of each sequence, and greedy sampling.
    fn epilogue(&mut self) -> Vec<OpIndex> {
        let config = self.config;
        let tp = self.deployment.parallel.tp;
        let mut ops = vec![
            self.moved(
                "last-token gather",
                Module::Logits,
                Units::Sequences,
                2 * BF16_BYTES * config.hidden,
                1,
            ),
            self.bfloat16_gemm(
                "lm_head",
                Module::Logits,
                Units::Sequences,
                config.vocab / tp,
                config.hidden,
            ),
        ];
        if tp > 1 {
            ops.push(self.collective(
                "logits all-gather",
                Module::Logits,
                OpKey::Nccl {
                    collective: Collective::AllGather,
                    dtype: "half",
                    gpus: tp,
                },
                Units::Sequences,
                f64::from(config.vocab),
            ));
        }
        // Widened to fp32, then the largest one is picked.
        ops.push(self.moved(
            "sampling",
            Module::Logits,
            Units::Sequences,
            (BF16_BYTES + 2 * FP32_BYTES) * config.vocab,
            2,
        ));
        ops
    }
}

/// Expected number of expert-parallel ranks among a token's `topk` experts under even routing:
/// each rank is missed with the probability that all experts come from the others.
fn expected_ranks(experts: u32, topk: u32, ranks: u32) -> f64 {
    let elsewhere = experts - experts / ranks;
    let missed: f64 = (0..topk)
        .map(|drawn| f64::from(elsewhere.saturating_sub(drawn)) / f64::from(experts - drawn))
        .product();
    f64::from(ranks) * (1.0 - missed)
}

#[cfg(test)]
mod tests {
    use super::expected_ranks;

    #[test]
    fn every_rank_is_reached_when_experts_outnumber_the_others() {
        // 2 experts, both drawn, one on each rank.
        assert_eq!(expected_ranks(2, 2, 2), 2.0);
        // 4 experts on 4 ranks, one drawn: one rank.
        assert_eq!(expected_ranks(4, 1, 4), 1.0);
        // 4 experts on 2 ranks, two drawn: 1 - (2/4 * 1/3) = 5/6 of each rank.
        assert!((expected_ranks(4, 2, 2) - 5.0 / 3.0).abs() < 1e-15);
    }
}
