//! The forward: what a step launches, written down a second time.

use crate::model::{BackendName, Deployment, ModelConfig, QkNorm};
use crate::timing::Topology;

/// What a kernel does; sizes are those of one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Task {
    /// Rows times a `k` by `n` weight.
    Multiply {
        n: u32,
        k: u32,
        dtype: &'static str,
        feed: Feed,
    },
    /// The experts of a layer, over the tokens of all ranks.
    Experts,
    /// Grouped-query attention with rotary embedding and KV write.
    Attend {
        phase: Phase,
        window: u32,
    },
    AttendLatent(Phase),
    /// The key or value projection, folded into generation by a batched multiplication.
    FoldLatent {
        before: bool,
    },
    Convolve(Phase),
    DeltaRule(Phase),
    /// All-reduce of `width` elements per token.
    Reduce {
        width: u32,
    },
    /// All-gather of `width` elements per token or sequence.
    Gather {
        width: u32,
        feed: Feed,
    },
    /// All-to-all of tokens between ranks and their experts.
    Exchange {
        dtype: &'static str,
    },
    /// Bytes through memory, per token or sequence.
    Move {
        bytes: u32,
        feed: Feed,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Prompts,
    Generation,
}

/// What a kernel works on, of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Feed {
    Tokens,
    /// One row per sequence.
    Sequences,
    /// Tokens of one phase alone.
    Only(Phase),
}

impl Task {
    pub(super) fn joins_ranks(self) -> bool {
        matches!(
            self,
            Self::Reduce { .. } | Self::Gather { .. } | Self::Exchange { .. }
        )
    }

    /// The phase without which a step does not launch it.
    pub(super) fn needs(self) -> Option<Phase> {
        match self {
            Self::Attend { phase, .. }
            | Self::AttendLatent(phase)
            | Self::Convolve(phase)
            | Self::DeltaRule(phase)
            | Self::Multiply {
                feed: Feed::Only(phase),
                ..
            } => Some(phase),
            Self::FoldLatent { .. } => Some(Phase::Generation),
            _ => None,
        }
    }

    /// Whether its time depends on the lengths of what is in the KV cache.
    pub(super) fn follows_kv(self) -> bool {
        matches!(
            self,
            Self::Attend {
                phase: Phase::Generation,
                ..
            } | Self::AttendLatent(Phase::Generation)
        )
    }

    /// Whether a step with prompts, or with generation, launches it.
    pub(super) fn runs(self, prompts: bool, generation: bool) -> bool {
        match self.needs() {
            Some(Phase::Prompts) => prompts,
            Some(Phase::Generation) => generation,
            None => true,
        }
    }
}

const BF16: u32 = 2;
const F32: u32 = 4;
/// Precision of what quantised checkpoints leave alone.
const PLAIN: &str = "bfloat16";

/// Tasks in submission order, each with the kernels the host submits for it.
type Tasks = Vec<(Task, u32)>;

/// A model as a deployment runs it on `on`: the sizes and dtypes its tasks are made of.
struct Model<'a> {
    config: &'a ModelConfig,
    on: Topology,
    runtime: BackendName,
    /// The norm behind a sum over ranks is part of that kernel.
    fused: bool,
    /// Of the projections into attention, and of the other quantised weights.
    into: &'static str,
    dtype: &'static str,
}

/// Tasks of one forward.
pub(super) fn forward(config: &ModelConfig, deployment: &Deployment, on: Topology) -> Tasks {
    let precision = deployment.precision;
    let model = Model {
        config,
        on,
        runtime: deployment.backend.name,
        fused: deployment.kernels.allreduce_fusion != Some(false),
        into: precision.qkv_proj.unwrap_or(precision.gemm).as_str(),
        dtype: precision.gemm.as_str(),
    };
    let mut tasks = model.entry();
    for (layer, &window) in config.windows.iter().enumerate() {
        let linear = config
            .deltanet
            .as_ref()
            .is_some_and(|net| net.layers[layer]);
        tasks.extend(match config.latent {
            _ if linear => model.linear_attention(),
            Some(_) => model.latent_attention(),
            None => model.grouped_attention(window),
        });
        tasks.extend(model.norm_after(on.tp > 1));
        let routed = config.experts.is_some() && layer >= config.dense_layers as usize;
        if routed {
            tasks.extend(model.routed());
        } else if config.experts.is_some() {
            tasks.extend(model.dense(config.dense_ffn / on.tp));
            tasks.extend(model.norm_after(on.tp > 1));
        } else {
            tasks.extend(model.dense(config.ffn / on.tp));
            tasks.extend(model.norm_after(on.tp > 1));
        }
    }
    tasks.extend(model.exit());
    tasks
}

fn multiply(dtype: &'static str, n: u32, k: u32) -> (Task, u32) {
    let feed = Feed::Tokens;
    (Task::Multiply { n, k, dtype, feed }, 1)
}

/// Elements of two bytes moved per token.
fn moved(elements: u32, kernels: u32) -> (Task, u32) {
    let (bytes, feed) = (BF16 * elements, Feed::Tokens);
    (Task::Move { bytes, feed }, kernels)
}

fn gather(width: u32, feed: Feed) -> (Task, u32) {
    (Task::Gather { width, feed }, 1)
}

impl Model<'_> {
    /// A row of the embedding in, the rank's columns of it out, gathered where ranks have some
    /// each; the first norm.
    fn entry(&self) -> Tasks {
        let (hidden, tp) = (self.config.hidden, self.on.tp);
        let mut tasks = vec![moved(2 * hidden / tp, 1)];
        if tp > 1 {
            tasks.push(gather(hidden, Feed::Tokens));
        }
        tasks.push(moved(2 * hidden, 1));
        tasks
    }

    /// Residual in and out, sum in, normed state out.
    fn norm_after(&self, sum: bool) -> Tasks {
        let hidden = self.config.hidden;
        let alone = u32::from(!(sum && self.fused));
        let norm = moved(4 * hidden, alone);
        if sum {
            vec![(Task::Reduce { width: hidden }, 1), norm]
        } else {
            vec![norm]
        }
    }

    fn grouped_attention(&self, window: u32) -> Tasks {
        let (config, tp) = (self.config, self.on.tp);
        let (hidden, dim) = (config.hidden, config.head_dim);
        let heads = config.heads / tp;
        let kv_heads = u32::max(1, config.kv_heads / tp);
        // A gate for every query element comes out of the same projection.
        let gate = if config.gated_attention { heads } else { 0 };
        let mut tasks = vec![multiply(
            self.into,
            (heads + gate + kv_heads + kv_heads) * dim,
            hidden,
        )];
        let across = tp > 1 && config.qk_norm == Some(QkNorm::PerLayer);
        match (across, self.runtime) {
            // Queries and keys of all ranks on every rank, normed there.
            (true, BackendName::Trtllm) => tasks.extend([
                gather(config.heads * dim, Feed::Tokens),
                gather(config.kv_heads * dim, Feed::Tokens),
                moved(2 * (config.heads + config.kv_heads) * dim, 2),
            ]),
            // Two variances per token summed; each rank norms its own.
            (true, BackendName::Sglang) => tasks.extend([
                (Task::Reduce { width: 2 }, 1),
                moved(2 * (heads + kv_heads) * dim, 2),
            ]),
            (false, _) if config.qk_norm.is_some() => {
                tasks.push(moved(2 * (heads + kv_heads) * dim, 2));
            }
            (false, _) => {}
        }
        for phase in [Phase::Prompts, Phase::Generation] {
            tasks.push((Task::Attend { phase, window }, 2));
        }
        if config.gated_attention {
            // Gate and output in, their product out.
            tasks.push(moved(3 * heads * dim, 1));
        }
        tasks.push(multiply(self.dtype, hidden, heads * dim));
        tasks
    }

    /// Ranks of the projections whole on every GPU, heads split.
    fn latent_attention(&self) -> Tasks {
        let Some(latent) = self.config.latent else {
            return Vec::new();
        };
        let hidden = self.config.hidden;
        let heads = self.config.heads / self.on.tp;
        let queries = heads * (latent.nope_dim + latent.rope_dim);
        let down = latent.q_rank + latent.kv_rank + latent.rope_dim;
        let expand = Task::Multiply {
            n: heads * (latent.nope_dim + latent.v_dim),
            k: latent.kv_rank,
            dtype: self.into,
            feed: Feed::Only(Phase::Prompts),
        };
        vec![
            multiply(self.into, down, hidden),
            moved(2 * (latent.q_rank + latent.kv_rank), 2),
            multiply(self.into, queries, latent.q_rank),
            (expand, 1),
            (Task::AttendLatent(Phase::Prompts), 2),
            (Task::FoldLatent { before: true }, 1),
            (Task::AttendLatent(Phase::Generation), 2),
            (Task::FoldLatent { before: false }, 1),
            multiply(self.dtype, hidden, heads * latent.v_dim),
        ]
    }

    fn linear_attention(&self) -> Tasks {
        let Some(net) = &self.config.deltanet else {
            return Vec::new();
        };
        let hidden = self.config.hidden;
        let v_heads = net.v_heads / self.on.tp;
        let keys = net.k_heads / self.on.tp * net.k_dim;
        let values = v_heads * net.v_dim;
        vec![
            // Queries as wide as keys, the gate as wide as values.
            multiply(self.into, keys + keys + values + values, hidden),
            // Two scalars per value head.
            multiply(PLAIN, v_heads + v_heads, hidden),
            (Task::Convolve(Phase::Prompts), 1),
            (Task::DeltaRule(Phase::Prompts), 1),
            (Task::Convolve(Phase::Generation), 1),
            (Task::DeltaRule(Phase::Generation), 1),
            // Gate and output in, the normed product out.
            moved(3 * values, 1),
            multiply(self.dtype, hidden, values),
        ]
    }

    /// Gate and up, their product, down.
    fn dense(&self, width: u32) -> Tasks {
        let hidden = self.config.hidden;
        vec![
            multiply(self.dtype, width + width, hidden),
            moved(3 * width, 1),
            multiply(self.dtype, hidden, width),
        ]
    }

    /// Router, routed experts and shared ones. With attention data parallelism tokens travel to
    /// their experts and back, and every rank has the shared experts whole.
    fn routed(&self) -> Tasks {
        let (config, on) = (self.config, self.on);
        let count = config.experts.map_or(0, |experts| experts.count);
        let mut tasks = vec![multiply(PLAIN, count, config.hidden)];
        let travels = on.dp > 1;
        if travels {
            tasks.push((Task::Exchange { dtype: "int8" }, 1));
        }
        // Quantise, route, multiply, activate, multiply, finalise.
        tasks.push((Task::Experts, 6));
        if config.shared_ffn > 0 {
            let over = if travels { 1 } else { on.tp };
            tasks.extend(self.dense(config.shared_ffn / over));
        }
        if travels {
            tasks.push((Task::Exchange { dtype: "half" }, 1));
        }
        tasks.extend(self.norm_after(on.tp > 1 && !travels));
        tasks
    }

    /// The last token of each sequence, its logits, the largest of them.
    fn exit(&self) -> Tasks {
        let (hidden, vocab, tp) = (self.config.hidden, self.config.vocab, self.on.tp);
        let sequences = |bytes| Task::Move {
            bytes,
            feed: Feed::Sequences,
        };
        let head = Task::Multiply {
            n: vocab / tp,
            k: hidden,
            dtype: PLAIN,
            feed: Feed::Sequences,
        };
        let mut tasks = vec![(sequences(2 * BF16 * hidden), 1), (head, 1)];
        if tp > 1 {
            tasks.push(gather(vocab, Feed::Sequences));
        }
        // Logits in as bf16, out as fp32, in again for the largest.
        tasks.push((sequences((BF16 + F32 + F32) * vocab), 2));
        tasks
    }
}

/// Kernels that the host submits in a step with prompts and generation.
pub(super) fn launches(tasks: &[(Task, u32)]) -> u32 {
    tasks.iter().map(|(_, kernels)| kernels).sum()
}

/// Ranks among which a token's experts are expected to lie, routed evenly: ranks times one less
/// the share of draws that leave a rank out, C(others, k) / C(all, k).
pub(super) fn reached_ranks(experts: u32, topk: u32, ranks: u32) -> f64 {
    let others = experts - experts / ranks;
    let (mut left_out, mut all) = (1.0, 1.0);
    for drawn in 0..topk {
        left_out *= f64::from(others) - f64::from(drawn.min(others));
        all *= f64::from(experts) - f64::from(drawn);
    }
    f64::from(ranks) - f64::from(ranks) * left_out / all
}

/// Distinct experts that the busiest of `ranks` ranks is expected to read for `tokens` tokens,
/// routed independently and evenly.
///
/// A rank reads each of its experts with the same probability: so many of them follow a binomial
/// law, the most of all ranks the product of theirs. Its mean is the sum of the chances to exceed
/// 0, 1, 2 and so on.
pub(super) fn most_experts_read(experts: u32, topk: u32, ranks: u32, tokens: f64) -> f64 {
    let own = experts / ranks;
    let left_out = (1.0 - f64::from(topk) / f64::from(experts)).powf(tokens);
    if left_out == 0.0 {
        return f64::from(own);
    }
    let (no, yes) = (left_out.ln(), (1.0 - left_out).ln());
    let (mut ways, mut at_most, mut mean) = (0.0, 0.0_f64, 0.0);
    for read in 0..own {
        at_most += (ways + f64::from(read) * yes + f64::from(own - read) * no).exp();
        mean += 1.0 - at_most.min(1.0).powf(f64::from(ranks));
        ways += f64::from(own - read).ln() - f64::from(read + 1).ln();
    }
    mean
}

/// Pairs of query and key in causal attention over tokens `from` to `to` of a prompt, each seeing
/// what lies before it as far as a window reaches; 0: all of it.
fn pairs(from: f64, to: f64, window: u32) -> f64 {
    let up_to = |end: f64| {
        let growing = if window == 0 {
            end
        } else {
            end.min(f64::from(window))
        };
        growing * growing / 2.0 + (end - growing) * growing
    };
    up_to(to) - up_to(from)
}

/// How long a prompt by itself would be that attends to as many pairs as a piece behind others.
pub(super) fn alone(task: Task, before: u32, length: u32) -> f64 {
    let window = match task {
        Task::Attend { window, .. } => window,
        Task::AttendLatent(_) => 0,
        // Work in proportion to the tokens, whatever lies before.
        _ => return f64::from(length),
    };
    if before == 0 {
        return f64::from(length);
    }
    let (before, length) = (f64::from(before), f64::from(length));
    let wanted = pairs(before, before + length, window);
    let growing = f64::from(window) * f64::from(window) / 2.0;
    if window > 0 && wanted > growing {
        // A full window, and the rest at one window a token.
        f64::from(window) + (wanted - growing) / f64::from(window)
    } else {
        (2.0 * wanted).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_to_all_payload_counts_ranks() {
        assert_eq!(reached_ranks(2, 2, 2), 2.0);
        assert_eq!(reached_ranks(4, 1, 4), 1.0);
        assert!((reached_ranks(4, 2, 2) - 5.0 / 3.0).abs() < 1e-15);
    }

    #[test]
    fn the_busiest_rank_reads_most() {
        // One token, one expert of two, a rank each: one of them reads one, 3/4 by independence.
        assert!((most_experts_read(2, 1, 2, 1.0) - 0.75).abs() < 1e-12);
        // One rank: the mean, 4 (1 - (1/2)^2).
        assert!((most_experts_read(4, 2, 1, 2.0) - 3.0).abs() < 1e-12);
        // So many tokens that everything is read.
        assert_eq!(most_experts_read(64, 8, 4, 1e5), 16.0);
    }

    #[test]
    fn a_piece_attends_to_what_lies_before_it() {
        let full = Task::Attend {
            phase: Phase::Prompts,
            window: 0,
        };
        assert_eq!(alone(full, 0, 64), 64.0);
        // 2 tokens behind 3: 4 and 5 keys less the halves on the diagonal are 8 pairs, as of 4.
        assert_eq!(alone(full, 3, 2), 4.0);
        assert_eq!(alone(Task::AttendLatent(Phase::Prompts), 3, 2), 4.0);
        assert_eq!(alone(Task::Convolve(Phase::Prompts), 64, 64), 64.0);
        // Every token sees the whole window: half of that is what a first window holds.
        let window = Task::Attend {
            phase: Phase::Prompts,
            window: 64,
        };
        assert_eq!(alone(window, 64, 64), 96.0);
    }
}
