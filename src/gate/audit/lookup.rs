//! Lookups: which rows answer a kernel, and how much of each.

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use crate::model::{BackendName, Deployment, ModelConfig};

use super::fault::{AuditFault, Check, close};
use super::forward::{Phase, Task, most_experts_read};
use super::sources::{Known, Sources, floats, integers, texts};

/// A table row, or several that share their coordinates and were averaged.
#[derive(Debug, Clone, Copy)]
struct Point {
    at: [f64; 3],
    known: Known,
}

/// Points that agree in their coordinates up to and with this one.
#[derive(Debug)]
struct Line {
    value: f64,
    /// The first of these points.
    first: Point,
    /// Their lines on the next axis.
    inner: Range<usize>,
}

/// The rows that answer one kernel, in the order of their coordinates.
pub(super) struct Field {
    /// Per axis, in the order of the points.
    lines: Vec<Vec<Line>>,
    task: Task,
    /// Of the experts' rows: experts, those of one token, and the ranks that share them.
    experts: Option<(u32, u32, u32)>,
}

/// One row's part in an answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Share {
    pub(super) known: Known,
    pub(super) weight: f64,
    pub(super) work: f64,
}

impl Field {
    /// `points` in the order of their coordinates on the first `axes` axes.
    fn new(points: &[Point], axes: usize, task: Task, experts: Option<(u32, u32, u32)>) -> Self {
        let mut lines: Vec<Vec<Line>> = (0..axes).map(|_| Vec::new()).collect();
        for (index, point) in points.iter().enumerate() {
            let before = index.checked_sub(1).map(|before| points[before].at);
            let same = before.map_or(0, |before| {
                let shared = before.iter().zip(&point.at).take(axes);
                shared.take_while(|(a, b)| a == b).count()
            });
            for axis in same..axes {
                let inner = lines.get(axis + 1).map_or(0, Vec::len);
                lines[axis].push(Line {
                    value: point.at[axis],
                    first: *point,
                    inner: inner..inner,
                });
            }
            for axis in 1..axes {
                let end = lines[axis].len();
                if let Some(outer) = lines[axis - 1].last_mut() {
                    outer.inner.end = end;
                }
            }
        }
        Self {
            lines,
            task,
            experts,
        }
    }

    /// Work of this kernel along one axis, the others held still.
    fn work(&self, axis: usize, value: f64) -> f64 {
        let seen = |window: u32| {
            if window == 0 {
                value
            } else {
                value.min(f64::from(window))
            }
        };
        match (self.task, axis) {
            // Every token of a prompt attends to those before it, as far as the window reaches.
            (
                Task::Attend {
                    phase: Phase::Prompts,
                    window,
                },
                0,
            ) => value * seen(window),
            (Task::AttendLatent(Phase::Prompts), 0) => value * value,
            // One token attends to the cache.
            (
                Task::Attend {
                    phase: Phase::Generation,
                    window,
                },
                0,
            ) => seen(window),
            _ => value,
        }
    }

    /// The rows around `wanted`, axis by axis: the line itself, the two around it by distance,
    /// the first one as it is, or the last one by its work. Replaces what `shares` holds.
    pub(super) fn around(&self, wanted: [f64; 3], shares: &mut Vec<Share>) {
        shares.clear();
        let Some(lines) = self.lines.first() else {
            return;
        };
        let work = self.experts.map_or(1.0, |(experts, topk, ranks)| {
            most_experts_read(experts, topk, ranks, wanted[0]) * f64::from(ranks)
        });
        self.narrow(0, 0..lines.len(), wanted, (1.0, work), shares);
    }

    fn narrow(
        &self,
        axis: usize,
        range: Range<usize>,
        wanted: [f64; 3],
        (weight, work): (f64, f64),
        shares: &mut Vec<Share>,
    ) {
        let want = wanted[axis];
        let lines = &self.lines[axis][range];
        let mut take = |line: &Line, weight: f64, work: f64| {
            if axis + 1 < self.lines.len() {
                let inner = line.inner.clone();
                self.narrow(axis + 1, inner, wanted, (weight, work), shares);
            } else {
                shares.push(self.share(line.first, weight, work));
            }
        };
        let next = lines.partition_point(|line| line.value < want);
        let low = next.checked_sub(1).map(|below| &lines[below]);
        match (low, lines.get(next)) {
            (_, Some(high)) if high.value == want => take(high, weight, work),
            (Some(low), Some(high)) => {
                let up = (want - low.value) / (high.value - low.value);
                take(low, weight * (1.0 - up), work);
                take(high, weight * up, work);
            }
            (None, Some(high)) => take(high, weight, work),
            (Some(low), None) => {
                let grown = self.work(axis, want) / self.work(axis, low.value);
                take(low, weight, work * grown);
            }
            (None, None) => {}
        }
    }

    fn share(&self, point: Point, weight: f64, mut work: f64) -> Share {
        if let Some((experts, topk, _)) = self.experts {
            // Balanced rows give each token the least used experts, alike on every rank.
            work /= f64::from(experts).min(point.at[0] * f64::from(topk));
        }
        Share {
            known: point.known,
            weight,
            work,
        }
    }
}

/// A table and which of its kernels count; none named: it holds one.
type Table = (&'static str, &'static str, &'static str, Kernels);
type Kernels = &'static [&'static str];

/// Which rows a kernel asks for.
struct Ask {
    /// Family, framework, table and kernels, best first.
    tables: Vec<Table>,
    int: Vec<(&'static str, u32)>,
    text: Vec<(&'static str, &'static str)>,
    /// Outermost first.
    axes: &'static [&'static str],
}

const TRTLLM: &str = "trtllm";
const SGLANG: &str = "sglang";

/// The framework's own table, then the other one's, of the same name.
fn own_first(runtime: BackendName, family: &'static str, table: &'static str) -> Vec<Table> {
    own_first_of(runtime, family, table, &[])
}

fn own_first_of(
    runtime: BackendName,
    family: &'static str,
    table: &'static str,
    kernels: Kernels,
) -> Vec<Table> {
    let order = match runtime {
        BackendName::Trtllm => [TRTLLM, SGLANG],
        BackendName::Sglang => [SGLANG, TRTLLM],
    };
    let of = |framework| (family, framework, table, kernels);
    order.map(of).into()
}

/// Experts: the recipe's kernel, the same one under the other framework, then another one.
fn expert_tables(runtime: BackendName, kernel: Option<&str>) -> Vec<Table> {
    let trtllm = |kernels: Kernels| ("moe", TRTLLM, "moe_perf", kernels);
    let sglang = |kernels: Kernels| ("moe", SGLANG, "moe_perf", kernels);
    let cutlass: Table = trtllm(&["moe_torch_flow_cutlass"]);
    let trtllm_gen: Table = sglang(&["sglang_flashinfer_trtllm_moe"]);
    let triton = [
        trtllm(&["moe_torch_flow"]),
        sglang(&["sglang_fused_moe_triton"]),
    ];
    match (kernel, runtime) {
        (Some("trtllm_gen"), _) => vec![
            trtllm(&["moe_torch_flow_min_latency"]),
            trtllm_gen,
            trtllm(&["moe_torch_flow_cutlass", "deepgemm"]),
        ],
        (Some("cutedsl"), _) => vec![cutlass],
        (Some("deepgemm"), _) => vec![trtllm(&["deepgemm"]), cutlass],
        (Some("triton"), BackendName::Trtllm) => triton.into(),
        (Some("triton"), BackendName::Sglang) | (None, BackendName::Sglang) => {
            triton.into_iter().rev().collect()
        }
        (Some("cutlass"), _) | (None, BackendName::Trtllm) => vec![
            cutlass,
            sglang(&["sglang_flashinfer_cutlass_moe"]),
            trtllm_gen,
        ],
        (Some(_), _) => Vec::new(),
    }
}

fn ask(task: Task, config: &ModelConfig, deployment: &Deployment) -> Option<Ask> {
    let on = deployment.parallel;
    let precision = deployment.precision;
    let runtime = deployment.backend.name;
    let heads = config.heads / on.tp;
    let kv = ("kv_cache_dtype", precision.kv_cache.as_str());
    let lengths = |phase| -> &'static [&'static str] {
        match phase {
            Phase::Prompts => &["isl", "batch_size"],
            Phase::Generation => &["isl + step", "batch_size"],
        }
    };
    let nccl: Vec<Table> = vec![("comm", "nccl", "nccl_perf", &["NCCL"])];
    let (tables, int, text, axes): (Vec<Table>, Vec<_>, Vec<_>, &[_]) = match task {
        Task::Multiply { dtype, .. } => {
            // One kernel per dtype; DeepGEMM multiplies FP8 blocks.
            let trtllm: Kernels = match dtype {
                "fp8_block" => &["torch_flow", "deepgemm"],
                _ => &["torch_flow"],
            };
            let own: Kernels = match dtype {
                "bfloat16" => &["sglang_torch_linear"],
                "fp8" => &["sglang_sgl_kernel_fp8_scaled_mm"],
                "fp8_block" => &["sglang_deepgemm_gemm_nt_f8f8bf16"],
                _ => &["sglang_flashinfer_cutedsl_nvfp4"],
            };
            let (own, trtllm) = (
                ("gemm", SGLANG, "gemm_perf", own),
                ("gemm", TRTLLM, "gemm_perf", trtllm),
            );
            (
                match (runtime, dtype) {
                    (BackendName::Trtllm, _) => vec![trtllm],
                    // CuTe DSL is another kernel than the one served.
                    (BackendName::Sglang, "nvfp4") => vec![trtllm, own],
                    (BackendName::Sglang, _) => vec![own, trtllm],
                },
                vec![],
                vec![("gemm_dtype", dtype)],
                &["n", "k", "m"],
            )
        }
        Task::Experts => {
            let experts = config.experts?;
            let kernel = deployment.kernels.moe.map(|kernel| kernel.as_str());
            (
                expert_tables(runtime, kernel),
                vec![
                    ("hidden_size", config.hidden),
                    ("inter_size", config.ffn),
                    ("topk", experts.topk),
                    ("num_experts", experts.count),
                    ("moe_tp_size", on.moe_tp),
                    ("moe_ep_size", on.moe_ep),
                ],
                vec![
                    (
                        "moe_dtype",
                        precision.moe.map_or("bfloat16", |moe| moe.as_str()),
                    ),
                    ("distribution", "balanced"),
                ],
                &["num_tokens"],
            )
        }
        Task::Attend { phase, window } => {
            let (table, compute) = match phase {
                Phase::Prompts => (
                    "context_attention_perf",
                    precision
                        .attention
                        .map_or("bfloat16", |dtype| dtype.as_str()),
                ),
                Phase::Generation => ("generation_attention_perf", "bfloat16"),
            };
            let of = |framework, kernels: Kernels| ("attention", framework, table, kernels);
            let torch: Table = of(TRTLLM, &["torch_flow"]);
            let tables = match runtime {
                BackendName::Trtllm => vec![torch],
                BackendName::Sglang => {
                    // The named kernel first; the sort keeps the order of the others.
                    let mut kernels: [Kernels; 4] =
                        [&["trtllm_mha"], &["flashinfer"], &["fa3"], &["triton"]];
                    let named = deployment.kernels.attention.map(|kernel| kernel.as_str());
                    kernels.sort_by_key(|kernel| Some(kernel[0]) != named);
                    let mut tables = kernels.map(|kernel| of(SGLANG, kernel)).to_vec();
                    tables.push(torch);
                    tables
                }
            };
            (
                tables,
                vec![
                    ("num_heads", heads),
                    ("num_key_value_heads", u32::max(1, config.kv_heads / on.tp)),
                    ("head_dim", config.head_dim),
                    ("window_size", window),
                ],
                vec![("attn_dtype", compute), kv],
                lengths(phase),
            )
        }
        Task::AttendLatent(phase) => {
            let table = match phase {
                Phase::Prompts => "context_mla_perf",
                Phase::Generation => "generation_mla_perf",
            };
            (
                own_first(runtime, "mla", table),
                vec![("num_heads", heads)],
                vec![("mla_dtype", "bfloat16"), kv],
                lengths(phase),
            )
        }
        Task::FoldLatent { before } => {
            let into = precision.qkv_proj.unwrap_or(precision.gemm).as_str();
            let dtype = match into {
                "fp8_block" => "fp8",
                _ => "bfloat16",
            };
            let side = if before {
                "mla_gen_pre"
            } else {
                "mla_gen_post"
            };
            (
                own_first(runtime, "mla_bmm", "mla_bmm_perf"),
                vec![("num_heads", heads)],
                vec![("bmm_dtype", dtype), ("op_name", side)],
                &["num_tokens"],
            )
        }
        Task::Convolve(phase) | Task::DeltaRule(phase) => {
            let net = config.deltanet.as_ref()?;
            let kernels: Kernels = match (task, phase) {
                (Task::Convolve(_), Phase::Prompts) => &["causal_conv1d_fn"],
                (Task::Convolve(_), Phase::Generation) => &["causal_conv1d_update"],
                (_, Phase::Prompts) => &["chunk_gated_delta_rule"],
                // One recurrent step, under whatever name a release fuses it.
                (_, Phase::Generation) => &[
                    "fused_recurrent_gated_delta_rule",
                    "fused_recurrent_gated_delta_rule_packed_decode",
                    "fused_sigmoid_gating_delta_rule_update",
                ],
            };
            (
                own_first_of(runtime, "linear_attention", "gdn_perf", kernels),
                vec![
                    ("d_model", config.hidden),
                    ("d_conv", net.conv),
                    ("num_k_heads", net.k_heads / on.tp),
                    ("num_v_heads", net.v_heads / on.tp),
                    ("head_k_dim", net.k_dim),
                    ("head_v_dim", net.v_dim),
                ],
                vec![],
                match phase {
                    Phase::Prompts => &["seq_len", "batch_size"],
                    Phase::Generation => &["batch_size"],
                },
            )
        }
        Task::Reduce { .. } => {
            let of =
                |framework, kernels: Kernels| ("comm", framework, "custom_allreduce_perf", kernels);
            let custom: Table = of(TRTLLM, &["TRTLLM"]);
            let tables = match runtime {
                BackendName::Trtllm => vec![custom],
                BackendName::Sglang => vec![of(SGLANG, &["SGLang_CustomAllReduce_graph"]), custom],
            };
            let text = vec![("allreduce_dtype", "bfloat16")];
            (tables, vec![("num_gpus", on.tp)], text, &["message_size"])
        }
        Task::Gather { .. } => (
            nccl,
            vec![("num_gpus", on.tp)],
            vec![("op_name", "all_gather"), ("nccl_dtype", "half")],
            &["message_size"],
        ),
        Task::Exchange { dtype } => (
            nccl,
            vec![("num_gpus", on.dp)],
            vec![("op_name", "alltoall"), ("nccl_dtype", dtype)],
            &["message_size"],
        ),
        Task::Move { .. } => return None,
    };
    Some(Ask {
        tables,
        int,
        text,
        axes,
    })
}

/// Rows whose word is one of `wanted`. Runs of one word are compared once.
fn retain(rows: &mut Vec<usize>, words: &[Arc<str>], wanted: &[&str]) {
    let mut last: Option<(&Arc<str>, bool)> = None;
    rows.retain(|row| {
        let word = &words[*row];
        let answer = match last {
            Some((seen, answer)) if Arc::ptr_eq(seen, word) => answer,
            _ => wanted.contains(&&**word),
        };
        last = Some((word, answer));
        answer
    });
}

/// Collects the rows that answer `task` from whole tables, not from what the composer kept.
pub(super) fn field(
    task: Task,
    config: &ModelConfig,
    deployment: &Deployment,
    sources: &Sources,
) -> Result<Field, AuditFault> {
    let wrong = |what: String| AuditFault {
        check: Check::Lookup,
        what: format!("{task:?}: {what}"),
    };
    let asked = ask(task, config, deployment).ok_or_else(|| wrong("no table known".to_owned()))?;
    for (family, framework, name, kernels) in asked.tables {
        let table = sources.tables.iter().find(|table| {
            let parts: Vec<&str> = table.label.split('/').collect();
            matches!(parts[..], [system, a, b, _, c]
                if [system, a, b, c] == [deployment.system.as_str(), family, framework, name])
        });
        let Some(table) = table else { continue };
        let column = |name: &str| {
            integers(table, name).ok_or_else(|| wrong(format!("{} has no {name}", table.label)))
        };
        let words = |name: &str| {
            texts(table, name).ok_or_else(|| wrong(format!("{} has no {name}", table.label)))
        };
        let latency = floats(table, "latency")
            .ok_or_else(|| wrong(format!("{} has no latency", table.label)))?;
        let mut kept: Vec<usize> = (0..table.rows).collect();
        for (name, value) in &asked.int {
            let values = column(name)?;
            kept.retain(|row| values[*row] == i64::from(*value));
        }
        for (name, value) in &asked.text {
            retain(&mut kept, words(name)?, &[*value]);
        }
        if !kernels.is_empty() {
            retain(&mut kept, words("kernel_source")?, kernels);
        }
        let mut axes: Vec<Vec<&[i64]>> = Vec::new();
        for axis in asked.axes {
            axes.push(axis.split(" + ").map(column).collect::<Result<_, _>>()?);
        }
        let coordinate =
            |axis: usize, row: usize| axes[axis].iter().map(|values| values[row]).sum::<i64>();
        if let Task::Multiply { n, .. } = task {
            // Only the lines around n can answer.
            let n = i64::from(n);
            let below = kept.iter().map(|row| coordinate(0, *row));
            let below = below.filter(|line| *line <= n).max();
            let above = kept.iter().map(|row| coordinate(0, *row));
            let above = above.filter(|line| *line >= n).min();
            kept.retain(|row| {
                let line = Some(coordinate(0, *row));
                line == below || line == above
            });
        }
        if kept.is_empty() {
            continue;
        }
        let mut found: Vec<([f64; 3], usize)> = kept
            .into_iter()
            .map(|row| {
                let mut at = [0.0; 3];
                for (axis, slot) in at.iter_mut().enumerate().take(axes.len()) {
                    *slot = coordinate(axis, row) as f64;
                }
                (at, row)
            })
            .collect();
        found.sort_by(|a, b| {
            let by_axis = (0..3).map(|axis| a.0[axis].total_cmp(&b.0[axis]));
            by_axis
                .fold(Ordering::Equal, Ordering::then)
                .then(a.1.cmp(&b.1))
        });
        let mut points = Vec::with_capacity(found.len());
        for same in found.chunk_by(|a, b| a.0 == b.0) {
            let first = same[0].1;
            let sum: f64 = same.iter().map(|(_, row)| latency[*row]).sum();
            let mean = sum / same.len() as f64;
            let address = (Arc::as_ptr(table), first as u32);
            // A row that the prediction was not given cannot be on its path: a fault once a search
            // ends there.
            let Some(&known) = sources.of_table.get(&address) else {
                points.push(Point {
                    at: same[0].0,
                    known: Known::MAX,
                });
                continue;
            };
            if !close(sources.ms[known], mean, 1e-14) {
                return Err(AuditFault {
                    check: Check::Rows,
                    what: format!(
                        "{}#{} is {} ms here and {mean} ms in its table",
                        table.label,
                        first + 1,
                        sources.ms[known]
                    ),
                });
            }
            points.push(Point {
                at: same[0].0,
                known,
            });
        }
        let experts = config.experts.filter(|_| task == Task::Experts);
        let experts =
            experts.map(|experts| (experts.count, experts.topk, deployment.parallel.moe_ep));
        return Ok(Field::new(&points, asked.axes.len(), task, experts));
    }
    Err(wrong(
        "no row of the prediction's tables answers".to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(task: Task, rows: &[(f64, f64)]) -> Field {
        let points: Vec<Point> = rows
            .iter()
            .enumerate()
            .map(|(known, (a, b))| Point {
                at: [*a, *b, 0.0],
                known,
            })
            .collect();
        Field::new(&points, 2, task, None)
    }

    #[test]
    fn lookups_blend_hold_and_grow() {
        let field = line(
            Task::Attend {
                phase: Phase::Prompts,
                window: 128,
            },
            &[(64.0, 1.0), (64.0, 2.0), (256.0, 1.0)],
        );
        let around = |wanted| {
            let mut shares = Vec::new();
            field.around(wanted, &mut shares);
            shares
        };
        let share = |known, weight, work| Share {
            known,
            weight,
            work,
        };
        assert_eq!(around([64.0, 2.0, 0.0]), [share(1, 1.0, 1.0)]);
        // Below the first line: held.
        assert_eq!(around([8.0, 1.0, 0.0]), [share(0, 1.0, 1.0)]);
        // Halfway: each line is searched for the batch by itself; 256 has batch 1 only.
        assert_eq!(
            around([160.0, 2.0, 0.0]),
            [share(1, 0.5, 1.0), share(2, 0.5, 2.0)]
        );
        // Beyond the last line: by causal work, which the window bounds.
        assert_eq!(around([512.0, 1.0, 0.0]), [share(2, 1.0, 2.0)]);
    }
}
