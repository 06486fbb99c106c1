//! The audit: a second reckoning of a prediction, with code of its own.
//!
//! From the scenario, the model config, the step log's decisions and the rows it recounts every
//! launch, looks every row up again, plays the clock forward and must arrive at the receipt.
//!
//! The composer hangs nodes on a tree and sweeps weights back from the metrics; here every moment
//! carries its whole path, the times each (part, row) lies on it, and a metric is a difference of
//! two such moments. Nothing of `perfdb`, of the plan or of the composer is used: only the timing
//! contract, the plain types of the scenario, the log, and the receipt that is under audit.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use crate::compose::{Part, Receipt};
use crate::model::{BackendName, CudaGraph, Deployment, ModelConfig, Piecewise, Scenario};
use crate::replay::{IterationRecord, Metric, Prediction, Quantile, RankRecord};
use crate::timing::{
    Boundary, Column, Execution, OpTable, Origin, Policy, Provenance, Row, RowId, Rows, Scope,
    Topology,
};

/// How far the two reckonings may lie apart, relative: both round each of some ten thousand steps.
const SUM_REL: f64 = 1e-9;
/// Two paths this close, relative, are equally long; and what moves a mean by less than this is
/// rounding.
const TIE_REL: f64 = 1e-12;
/// Most faults that one audit lists.
const FAULTS_MAX: usize = 20;

/// What an audit looked at when it found a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Check {
    /// A row's value is not what its origin says, or the policy forbids it.
    Rows,
    /// A lookup's weights are negative or do not sum to one, or nothing answers it.
    Lookup,
    /// A decision of the step log contradicts the lengths or the scenario.
    Decisions,
    /// A time is not what the rows and decisions give.
    Times,
    /// A receipt line does not have the recounted coefficient.
    Receipt,
    /// A mean, a percentile or a receipt's sum is not that of the recomputed times.
    Totals,
}

/// One thing that the second reckoning does not confirm.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditFault {
    pub check: Check,
    pub what: String,
}

impl fmt::Display for AuditFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.check, self.what)
    }
}

/// A confirmed prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditReport {
    pub ttft_mean_ms: f64,
    pub tpot_mean_ms: f64,
    pub iterations: usize,
    /// Lookups made again.
    pub lookups: usize,
    /// Receipt lines confirmed, rows that stand for the same table row taken together.
    pub lines: usize,
    /// Lines that differ because another of two equally long paths was taken.
    pub tied_lines: usize,
}

/// Recomputes `prediction` and compares.
///
/// # Errors
/// Everything that could not be confirmed, up to a limit.
pub fn audit(
    scenario: &Scenario,
    config: &ModelConfig,
    prediction: &Prediction,
) -> Result<AuditReport, Vec<AuditFault>> {
    let mut auditor = Auditor::new(scenario, config, prediction)?;
    auditor.replay();
    let report = auditor.compare();
    if auditor.faults.is_empty() {
        Ok(report)
    } else {
        Err(auditor.faults)
    }
}

/// The rule of every lookup: weights are not negative and sum to one.
pub fn check_weights(weights: impl IntoIterator<Item = f64>) -> Result<(), String> {
    let mut sum = 0.0;
    for weight in weights {
        if weight.is_nan() || weight < 0.0 {
            return Err(format!("a weight of {weight}"));
        }
        sum += weight;
    }
    if (sum - 1.0).abs() <= 1e-12 {
        Ok(())
    } else {
        Err(format!("weights sum to {sum}"))
    }
}

// ---------------------------------------------------------------------------------------------
// Rows: what the prediction was given, one entry per source whatever its number of row ids.

type Known = usize;

/// The rows of a prediction by what they are, not by the order in which they were resolved.
struct Sources {
    ms: Vec<f64>,
    names: Vec<String>,
    of_id: Vec<Known>,
    of_table: HashMap<(*const OpTable, u32), Known>,
    tables: Vec<Arc<OpTable>>,
    hosts: Vec<(Known, Arc<Row>)>,
    roofline: Option<Known>,
}

impl Sources {
    fn new(rows: &Rows, faults: &mut Vec<AuditFault>) -> Self {
        let mut sources = Self {
            ms: Vec::new(),
            names: Vec::new(),
            of_id: Vec::new(),
            of_table: HashMap::new(),
            tables: Vec::new(),
            hosts: Vec::new(),
            roofline: None,
        };
        for id in rows.ids() {
            let ms = rows.ms(id);
            let next = sources.ms.len();
            let known = match rows.origin(id) {
                Origin::Op { table, index, .. } => {
                    let address = Arc::as_ptr(table);
                    let seen = |table: &Arc<OpTable>| Arc::as_ptr(table) == address;
                    if !sources.tables.last().is_some_and(seen) && !sources.tables.iter().any(seen)
                    {
                        sources.tables.push(Arc::clone(table));
                    }
                    *sources.of_table.entry((address, *index)).or_insert(next)
                }
                Origin::Host(row) => {
                    let seen = sources.hosts.iter().find(|(_, known)| known.id == row.id);
                    match seen {
                        Some((known, _)) => *known,
                        None => {
                            if ms != row.samples.mean_ms {
                                faults.push(AuditFault {
                                    check: Check::Rows,
                                    what: format!(
                                        "host/{} is {ms} ms here and {} ms in its file",
                                        row.id, row.samples.mean_ms
                                    ),
                                });
                            }
                            sources.hosts.push((next, Arc::clone(row)));
                            next
                        }
                    }
                }
                Origin::Roofline { .. } => *sources.roofline.get_or_insert(next),
            };
            if known == next {
                sources.ms.push(ms);
                sources.names.push(rows.describe(id));
            } else if sources.ms[known] != ms {
                faults.push(AuditFault {
                    check: Check::Rows,
                    what: format!(
                        "{} has two values, {} ms and {ms} ms",
                        sources.names[known], sources.ms[known]
                    ),
                });
            }
            sources.of_id.push(known);
        }
        sources
    }
}

fn integers<'a>(table: &'a OpTable, name: &str) -> Option<&'a [i64]> {
    let at = table.names.iter().position(|known| known == name)?;
    match &table.columns[at] {
        Column::Int(values) => Some(values),
        _ => None,
    }
}

fn texts<'a>(table: &'a OpTable, name: &str) -> Option<&'a [Arc<str>]> {
    let at = table.names.iter().position(|known| known == name)?;
    match &table.columns[at] {
        Column::Text(values) => Some(values),
        _ => None,
    }
}

fn floats<'a>(table: &'a OpTable, name: &str) -> Option<&'a [f64]> {
    let at = table.names.iter().position(|known| known == name)?;
    match &table.columns[at] {
        Column::Float(values) => Some(values),
        _ => None,
    }
}

// ---------------------------------------------------------------------------------------------
// The forward: what a step launches, written down a second time.

/// What a kernel does; sizes are those of one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Task {
    /// Rows times a `k` by `n` weight.
    Multiply {
        n: u32,
        k: u32,
        feed: Feed,
    },
    /// The experts of a layer, over the tokens of all ranks.
    Experts,
    Prefill {
        window: u32,
    },
    Decode {
        window: u32,
    },
    /// All-reduce of the hidden state.
    Reduce,
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
enum Feed {
    Tokens,
    Sequences,
}

impl Task {
    fn joins_ranks(self) -> bool {
        matches!(
            self,
            Self::Reduce | Self::Gather { .. } | Self::Exchange { .. }
        )
    }

    /// Whether a step with prompts, or with generation, launches it.
    fn runs(self, prompts: bool, generation: bool) -> bool {
        match self {
            Self::Prefill { .. } => prompts,
            Self::Decode { .. } => generation,
            _ => true,
        }
    }
}

/// Tasks of one forward in submission order, each with the kernels the host submits for it.
fn forward(config: &ModelConfig, deployment: &Deployment, on: Topology) -> Vec<(Task, u32)> {
    const BF16: u32 = 2;
    const F32: u32 = 4;
    let (hidden, vocab, head) = (config.hidden, config.vocab, config.head_dim);
    let split = on.tp > 1;
    let tokens = |bytes| Task::Move {
        bytes,
        feed: Feed::Tokens,
    };
    let multiply = |n, k| Task::Multiply {
        n,
        k,
        feed: Feed::Tokens,
    };
    // Residual in and out, sum in, normed state out; a kernel of its own unless fused with the sum.
    let norm = tokens(4 * BF16 * hidden);
    let fused = deployment.kernels.allreduce_fusion != Some(false);
    let norm_after = |tasks: &mut Vec<(Task, u32)>, reduce: bool| {
        if reduce {
            tasks.push((Task::Reduce, 1));
            tasks.push((norm, if fused { 0 } else { 1 }));
        } else {
            tasks.push((norm, 1));
        }
    };
    // A row of the table in, the rank's columns of it out.
    let mut tasks = vec![(tokens(2 * BF16 * hidden / on.tp), 1)];
    if split {
        let gather = Task::Gather {
            width: hidden,
            feed: Feed::Tokens,
        };
        tasks.push((gather, 1));
    }
    tasks.push((tokens(2 * BF16 * hidden), 1));
    let heads = config.heads / on.tp;
    let kv_heads = u32::max(1, config.kv_heads / on.tp);
    for &window in &config.windows {
        tasks.push((multiply((heads + kv_heads + kv_heads) * head, hidden), 1));
        // Rotary embedding with the KV write, then attention.
        tasks.push((Task::Prefill { window }, 2));
        tasks.push((Task::Decode { window }, 2));
        tasks.push((multiply(hidden, heads * head), 1));
        norm_after(&mut tasks, split);
        if let Some(experts) = config.experts {
            tasks.push((multiply(experts.count, hidden), 1));
            if on.dp > 1 {
                tasks.push((Task::Exchange { dtype: "int8" }, 1));
            }
            // Quantise, route, multiply, activate, multiply, finalise.
            tasks.push((Task::Experts, 6));
            if on.dp > 1 {
                tasks.push((Task::Exchange { dtype: "half" }, 1));
            }
            norm_after(&mut tasks, split && on.dp == 1);
        } else {
            let width = config.ffn / on.tp;
            tasks.push((multiply(width + width, hidden), 1));
            // Gate and up in, their product out.
            tasks.push((tokens(3 * BF16 * width), 1));
            tasks.push((multiply(hidden, width), 1));
            norm_after(&mut tasks, split);
        }
    }
    let sequences = |bytes| Task::Move {
        bytes,
        feed: Feed::Sequences,
    };
    tasks.push((sequences(2 * BF16 * hidden), 1));
    let head_rows = Task::Multiply {
        n: vocab / on.tp,
        k: hidden,
        feed: Feed::Sequences,
    };
    tasks.push((head_rows, 1));
    if split {
        let gather = Task::Gather {
            width: vocab,
            feed: Feed::Sequences,
        };
        tasks.push((gather, 1));
    }
    // Logits in as bf16, out as fp32, in again for the largest.
    tasks.push((sequences((BF16 + F32 + F32) * vocab), 2));
    tasks
}

/// Kernels that the host submits in a step with prompts and generation.
fn launches(tasks: &[(Task, u32)], prompts: bool, generation: bool) -> u32 {
    tasks
        .iter()
        .filter(|(task, _)| task.runs(prompts, generation))
        .map(|(_, kernels)| kernels)
        .sum()
}

/// Ranks among which a token's experts are expected to lie, routed evenly: ranks times one less
/// the share of draws that leave a rank out, C(others, k) / C(all, k).
fn reached_ranks(experts: u32, topk: u32, ranks: u32) -> f64 {
    let others = experts - experts / ranks;
    let (mut left_out, mut all) = (1.0, 1.0);
    for drawn in 0..topk {
        left_out *= f64::from(others) - f64::from(drawn.min(others));
        all *= f64::from(experts) - f64::from(drawn);
    }
    f64::from(ranks) - f64::from(ranks) * left_out / all
}

/// Distinct experts that `tokens` tokens are expected to meet, routed independently and evenly.
fn experts_met(experts: f64, topk: f64, tokens: f64) -> f64 {
    experts * (1.0 - (1.0 - topk / experts).powf(tokens))
}

// ---------------------------------------------------------------------------------------------
// Lookups.

/// A table row, or several that share their coordinates and were averaged.
#[derive(Debug, Clone, Copy)]
struct Point {
    at: [f64; 3],
    known: Known,
}

/// The rows that answer one kernel, in the order of their coordinates.
struct Field {
    points: Vec<Point>,
    axes: usize,
    task: Task,
    experts: Option<(f64, f64)>,
}

/// One row's part in an answer.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Share {
    known: Known,
    weight: f64,
    work: f64,
}

impl Field {
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
            (Task::Prefill { window }, 0) => value * seen(window),
            // One token attends to the cache.
            (Task::Decode { window }, 0) => seen(window),
            _ => value,
        }
    }

    /// The rows around `wanted`, axis by axis: the line itself, the two around it by distance,
    /// the first one as it is, or the last one by its work.
    fn around(&self, wanted: [f64; 3]) -> Vec<Share> {
        let mut slices: Vec<(&[Point], f64, f64)> = vec![(&self.points, 1.0, 1.0)];
        for (axis, &want) in wanted.iter().enumerate().take(self.axes) {
            let mut narrower = Vec::with_capacity(2 * slices.len());
            for (slice, weight, work) in slices {
                let line = |value: f64| {
                    let from = slice.partition_point(|point| point.at[axis] < value);
                    let to = slice.partition_point(|point| point.at[axis] <= value);
                    &slice[from..to]
                };
                let next = slice.partition_point(|point| point.at[axis] < want);
                let low = next.checked_sub(1).map(|below| slice[below].at[axis]);
                let high = slice.get(next).map(|above| above.at[axis]);
                match (low, high) {
                    (_, Some(high)) if high == want => narrower.push((line(high), weight, work)),
                    (Some(low), Some(high)) => {
                        let up = (want - low) / (high - low);
                        narrower.push((line(low), weight * (1.0 - up), work));
                        narrower.push((line(high), weight * up, work));
                    }
                    (None, Some(high)) => narrower.push((line(high), weight, work)),
                    (Some(low), None) => {
                        let grown = self.work(axis, want) / self.work(axis, low);
                        narrower.push((line(low), weight, work * grown));
                    }
                    (None, None) => {}
                }
            }
            slices = narrower;
        }
        slices
            .into_iter()
            .filter_map(|(slice, weight, work)| Some((slice.first()?, weight, work)))
            .map(|(point, weight, mut work)| {
                if let Some((experts, topk)) = self.experts {
                    // Balanced rows give each token the least used experts.
                    let read = experts.min(point.at[0] * topk);
                    work *= experts_met(experts, topk, wanted[0]) / read;
                }
                Share {
                    known: point.known,
                    weight,
                    work,
                }
            })
            .collect()
    }
}

/// Which rows of a table a kernel asks for.
struct Ask {
    /// Family, framework, table and kernel, best first.
    tables: Vec<[&'static str; 4]>,
    int: Vec<(&'static str, u32)>,
    text: Vec<(&'static str, &'static str)>,
    axes: &'static [&'static str],
}

fn ask(task: Task, config: &ModelConfig, deployment: &Deployment) -> Option<Ask> {
    let on = deployment.parallel;
    let precision = deployment.precision;
    let (tables, int, text, axes): (Vec<_>, Vec<_>, Vec<_>, &[_]) = match task {
        Task::Multiply { .. } => (
            vec![["gemm", "trtllm", "gemm_perf", "torch_flow"]],
            vec![],
            vec![("gemm_dtype", precision.gemm.as_str())],
            &["n", "k", "m"],
        ),
        Task::Experts => {
            let of_runtime = match deployment.backend.name {
                BackendName::Trtllm => "cutlass",
                BackendName::Sglang => "triton",
            };
            let trtllm = |kernel| ["moe", "trtllm", "moe_perf", kernel];
            let sglang = |kernel| ["moe", "sglang", "moe_perf", kernel];
            let tables = match deployment
                .kernels
                .moe
                .map_or(of_runtime, |moe| moe.as_str())
            {
                "trtllm_gen" => vec![
                    trtllm("moe_torch_flow_min_latency"),
                    sglang("sglang_flashinfer_trtllm_moe"),
                ],
                "cutlass" => vec![trtllm("moe_torch_flow_cutlass")],
                "deepgemm" => vec![trtllm("deepgemm")],
                "triton" => vec![trtllm("moe_torch_flow"), sglang("sglang_fused_moe_triton")],
                _ => return None,
            };
            let experts = config.experts?;
            (
                tables,
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
        Task::Prefill { window } | Task::Decode { window } => {
            let prefill = matches!(task, Task::Prefill { .. });
            let compute = match precision.attention {
                Some(dtype) if prefill => dtype.as_str(),
                _ => "bfloat16",
            };
            let table = if prefill {
                "context_attention_perf"
            } else {
                "generation_attention_perf"
            };
            (
                vec![["attention", "trtllm", table, "torch_flow"]],
                vec![
                    ("num_heads", config.heads / on.tp),
                    ("num_key_value_heads", u32::max(1, config.kv_heads / on.tp)),
                    ("head_dim", config.head_dim),
                    ("window_size", window),
                ],
                vec![
                    ("attn_dtype", compute),
                    ("kv_cache_dtype", precision.kv_cache.as_str()),
                ],
                if prefill {
                    &["isl", "batch_size"]
                } else {
                    &["isl + step", "batch_size"]
                },
            )
        }
        Task::Reduce => (
            vec![["comm", "trtllm", "custom_allreduce_perf", "TRTLLM"]],
            vec![("num_gpus", on.tp)],
            vec![("allreduce_dtype", "bfloat16")],
            &["message_size"],
        ),
        Task::Gather { .. } => (
            vec![["comm", "nccl", "nccl_perf", "NCCL"]],
            vec![("num_gpus", on.tp)],
            vec![("op_name", "all_gather"), ("nccl_dtype", "half")],
            &["message_size"],
        ),
        Task::Exchange { dtype } => (
            vec![["comm", "nccl", "nccl_perf", "NCCL"]],
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

/// Collects the rows that answer `task` from whole tables, not from what the composer kept.
fn field(
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
    for [family, framework, name, kernel] in asked.tables {
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
        for (name, value) in asked.int.iter() {
            let values = column(name)?;
            kept.retain(|row| values[*row] == i64::from(*value));
        }
        for (name, value) in asked.text.iter().chain([&("kernel_source", kernel)]) {
            let values = words(name)?;
            kept.retain(|row| *values[*row] == **value);
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
                        "{} is {} ms here and {mean} ms in its table",
                        sources.names[known], sources.ms[known]
                    ),
                });
            }
            points.push(Point {
                at: same[0].0,
                known,
            });
        }
        let experts = config.experts.filter(|_| task == Task::Experts);
        return Ok(Field {
            points,
            axes: asked.axes.len(),
            task,
            experts: experts.map(|experts| (f64::from(experts.count), f64::from(experts.topk))),
        });
    }
    Err(wrong(
        "no row of the prediction's tables answers".to_owned(),
    ))
}

fn close(a: f64, b: f64, rel: f64) -> bool {
    (a - b).abs() <= rel * a.abs().max(b.abs())
}

// ---------------------------------------------------------------------------------------------
// Moments.

/// Position of a (part, row) in a path.
type Slot = usize;

/// A priced occurrence: its time and how much of which rows it is.
#[derive(Debug, Clone, Default)]
struct Cost {
    ms: f64,
    of: Vec<(Slot, f64)>,
}

/// A point in time and the whole path to it: how much of each (part, row) lies before it.
#[derive(Debug, Clone)]
struct Moment {
    ms: f64,
    path: Rc<Vec<f64>>,
}

impl Moment {
    fn zero() -> Self {
        Self {
            ms: 0.0,
            path: Rc::new(Vec::new()),
        }
    }

    fn after(&self, cost: &Cost) -> Self {
        self.reach(self.ms + cost.ms, cost.of.iter().copied())
    }

    fn reach(&self, ms: f64, of: impl IntoIterator<Item = (Slot, f64)>) -> Self {
        let mut of = of.into_iter().peekable();
        if of.peek().is_none() {
            return Self {
                ms,
                path: Rc::clone(&self.path),
            };
        }
        let mut path = Vec::clone(&self.path);
        for (slot, times) in of {
            if path.len() <= slot {
                path.resize(slot + 1, 0.0);
            }
            path[slot] += times;
        }
        Self {
            ms,
            path: Rc::new(path),
        }
    }
}

/// A sum of differences of paths.
#[derive(Debug, Clone, Default)]
struct Sum(Vec<f64>);

impl Sum {
    fn add(&mut self, weight: f64, from: &Moment, to: &Moment) {
        let longest = from.path.len().max(to.path.len());
        if self.0.len() < longest {
            self.0.resize(longest, 0.0);
        }
        let shared = from.path.len().min(to.path.len());
        for ((sum, to), from) in self.0.iter_mut().zip(&*to.path).zip(&*from.path) {
            *sum += weight * (to - from);
        }
        for (sum, to) in self.0.iter_mut().zip(&*to.path).skip(shared) {
            *sum += weight * to;
        }
        for (sum, from) in self.0.iter_mut().zip(&*from.path).skip(shared) {
            *sum -= weight * from;
        }
    }
}

/// Host times of a lane in one mode, each with its path.
#[derive(Debug, Clone, Default)]
struct HostLane {
    /// Up to where the forward's dispatch begins.
    before: Cost,
    dispatch: Cost,
    finish: Cost,
}

/// What one rank group works on.
struct Load {
    prompts: Vec<u32>,
    padded: u32,
    kv_sum: u64,
}

impl Load {
    fn tokens(&self) -> u32 {
        self.prompts.iter().sum::<u32>() + self.padded
    }

    fn sequences(&self) -> u32 {
        self.prompts.len() as u32 + self.padded
    }
}

/// Where the path through a step came from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Entry {
    /// The stream of a lane, as the step before left it.
    Stream(usize),
    /// The host of a lane, once it had submitted this share of the forward.
    Host(usize, f64),
}

/// A lane on its way through a step; times from the step's start.
#[derive(Debug, Clone)]
struct Lane {
    ms: f64,
    entry: Entry,
    /// Kernels on the path: count by lane and kernel.
    counts: Vec<u32>,
}

/// A dispatched step whose responses are still to come.
struct InFlight {
    streams: Vec<Moment>,
    mode: usize,
    first: Vec<u32>,
    last: Vec<u32>,
}

/// A request, as far as it has come.
#[derive(Debug, Clone, Default)]
struct Progress {
    post: Option<Moment>,
    arrival: Option<Moment>,
    fetched: bool,
    scheduled: Option<Moment>,
    first: Option<Moment>,
    last: Option<Moment>,
}

/// Requests that one rank group generates for.
#[derive(Debug, Default)]
struct Generating {
    count: u32,
    /// Sum of prompt minus step of the prompt: plus `count * step` that is the KV lengths' sum.
    offset: i64,
    ends: BTreeMap<i64, Vec<u32>>,
}

struct Auditor<'a> {
    scenario: &'a Scenario,
    config: &'a ModelConfig,
    prediction: &'a Prediction,
    faults: Vec<AuditFault>,
    sources: Sources,
    slots: HashMap<(Part, Known), Slot>,
    slot_list: Vec<(Part, Known)>,
    /// Distinct tasks, and the forward as positions in them with launches.
    tasks: Vec<Task>,
    fields: Vec<Option<Field>>,
    order: Vec<(usize, u32)>,
    priced: Vec<HashMap<u64, Rc<Cost>>>,
    lookups: usize,
    ties: usize,
    /// By mode (eager, full graph, piecewise) and lane.
    hosts: [Vec<HostLane>; 3],
    transport: Cost,
    ingress: Cost,
    egress: Cost,
    // The replay's state.
    requests: Vec<Progress>,
    posted: usize,
    service: Sum,
    queues: BTreeMap<Part, Sum>,
    tpot: Sum,
}

impl<'a> Auditor<'a> {
    fn new(
        scenario: &'a Scenario,
        config: &'a ModelConfig,
        prediction: &'a Prediction,
    ) -> Result<Self, Vec<AuditFault>> {
        let deployment = &scenario.deployment;
        if deployment.backend.name != BackendName::Trtllm {
            return Err(vec![AuditFault {
                check: Check::Decisions,
                what: format!("no audit of the {} scheduler", deployment.backend.name),
            }]);
        }
        let mut faults = Vec::new();
        let sources = Sources::new(&prediction.rows, &mut faults);
        let mut tasks: Vec<Task> = Vec::new();
        let mut order = Vec::new();
        for (task, kernels) in forward(config, deployment, deployment.parallel) {
            let at = tasks.iter().position(|known| *known == task);
            let at = at.unwrap_or_else(|| {
                tasks.push(task);
                tasks.len() - 1
            });
            order.push((at, kernels));
        }
        let mut fields = Vec::new();
        for task in &tasks {
            fields.push(match task {
                Task::Move { .. } => None,
                _ => match field(*task, config, deployment, &sources) {
                    Ok(field) => Some(field),
                    Err(fault) => {
                        faults.push(fault);
                        None
                    }
                },
            });
        }
        if !faults.is_empty() {
            faults.truncate(FAULTS_MAX);
            return Err(faults);
        }
        let mut auditor = Self {
            scenario,
            config,
            prediction,
            faults,
            sources,
            slots: HashMap::new(),
            slot_list: Vec::new(),
            priced: vec![HashMap::new(); tasks.len()],
            tasks,
            fields,
            order,
            lookups: 0,
            ties: 0,
            hosts: [Vec::new(), Vec::new(), Vec::new()],
            transport: Cost::default(),
            ingress: Cost::default(),
            egress: Cost::default(),
            requests: vec![Progress::default(); prediction.log.requests.len()],
            posted: 0,
            service: Sum::default(),
            queues: BTreeMap::new(),
            tpot: Sum::default(),
        };
        auditor.host_times();
        Ok(auditor)
    }

    fn fault(&mut self, check: Check, what: String) {
        if self.faults.len() < FAULTS_MAX {
            self.faults.push(AuditFault { check, what });
        }
    }

    fn slot(&mut self, part: Part, known: Known) -> Slot {
        let next = self.slot_list.len();
        let slot = *self.slots.entry((part, known)).or_insert(next);
        if slot == next {
            self.slot_list.push((part, known));
        }
        slot
    }

    fn cost(&mut self, part: Part, shares: &[Share]) -> Cost {
        self.lookups += 1;
        let mut cost = Cost::default();
        for share in shares {
            let times = share.weight * share.work;
            cost.ms += times * self.sources.ms[share.known];
            let slot = self.slot(part, share.known);
            cost.of.push((slot, times));
        }
        cost
    }

    // ---- host rows

    /// Rows of a boundary, grouped by rank where they were measured where the case runs, else all
    /// together.
    fn host_rows(&mut self, boundary: Boundary, mode: Option<&str>) -> Vec<Vec<(Known, Arc<Row>)>> {
        let rows: Vec<(Known, Arc<Row>)> = self
            .sources
            .hosts
            .iter()
            .filter(|(_, row)| row.boundary == boundary)
            .filter(|(_, row)| mode.is_none_or(|mode| row.execution.mode() == mode))
            .cloned()
            .collect();
        let mut at_home = true;
        for (_, row) in &rows {
            let home = row
                .scope
                .as_ref()
                .is_some_and(|scope| self.measured_here(scope, row));
            at_home &= home;
            let measured = matches!(row.provenance, Provenance::Measured { .. });
            if self.prediction.policy == Policy::Strict && !(home && measured) {
                self.fault(
                    Check::Rows,
                    format!("strict rests on host/{}, which is derived here", row.id),
                );
            }
            if row.samples.observer.is_diagnostic() {
                self.fault(Check::Rows, format!("host/{} is a diagnostic row", row.id));
            }
        }
        let mut groups: BTreeMap<Option<u32>, Vec<(Known, Arc<Row>)>> = BTreeMap::new();
        for (known, row) in rows {
            let group = if at_home { row.rank } else { None };
            groups.entry(group).or_default().push((known, row));
        }
        groups.into_values().collect()
    }

    fn measured_here(&self, scope: &Scope, row: &Row) -> bool {
        let deployment = &self.scenario.deployment;
        let cpu = deployment.host_cpu.as_ref();
        let isl = row.shape.get("isl");
        scope.runtime == deployment.backend.name.as_str()
            && scope.version == deployment.backend.version
            && scope.system == deployment.system
            && scope.model == deployment.model
            && scope.topology == deployment.parallel
            && cpu.is_none_or(|cpu| *cpu == scope.cpu)
            && isl.is_none_or(|isl| *isl == u64::from(self.scenario.workload.isl))
    }

    /// The mean of the rows of one rank, or of all where ranks have no rows of their own.
    fn host_cost(
        &mut self,
        part: Part,
        groups: &[Vec<(Known, Arc<Row>)>],
        lane: usize,
        work: f64,
    ) -> Cost {
        let Some(rows) = groups.get(lane).or(groups.last()) else {
            return Cost::default();
        };
        let shares: Vec<Share> = rows
            .iter()
            .map(|(known, _)| Share {
                known: *known,
                weight: 1.0 / rows.len() as f64,
                work,
            })
            .collect();
        if let Err(what) = check_weights(shares.iter().map(|share| share.weight)) {
            self.fault(Check::Lookup, format!("{}: {what}", part.name()));
        }
        self.cost(part, &shares)
    }

    fn host_times(&mut self) {
        let on = self.scenario.deployment.parallel;
        let forward_rows = self.host_rows(Boundary::HostDispatch, Some("eager"));
        let lanes = if on.dp > 1 {
            on.dp as usize
        } else {
            forward_rows.len().clamp(1, on.ranks() as usize)
        };
        for (index, mode) in ["eager", "full_graph", "piecewise"].into_iter().enumerate() {
            let prepare = self.host_rows(Boundary::HostPrepare, Some(mode));
            let finish = self.host_rows(Boundary::HostFinish, Some(mode));
            let launch = match mode {
                "eager" => Vec::new(),
                _ => self.host_rows(Boundary::GraphLaunch, Some(mode)),
            };
            let dispatch = match mode {
                "full_graph" => Vec::new(),
                _ => self.host_rows(Boundary::HostDispatch, Some(mode)),
            };
            let work = self.launches_here_over_there(&dispatch);
            for lane in 0..lanes {
                let mut before = self.host_cost(Part::HostPrepare, &prepare, lane, 1.0);
                let launch = self.host_cost(Part::GraphLaunch, &launch, lane, 1.0);
                before.ms += launch.ms;
                before.of.extend(launch.of);
                let lane = HostLane {
                    before,
                    dispatch: self.host_cost(Part::HostDispatch, &dispatch, lane, work),
                    finish: self.host_cost(Part::HostFinish, &finish, lane, 1.0),
                };
                self.hosts[index].push(lane);
            }
        }
        let transport = self.host_rows(Boundary::ClientTransport, None);
        self.transport = self.host_cost(Part::ClientTransport, &transport, 0, 1.0);
        let ingress = self.host_rows(Boundary::Ingress, None);
        self.ingress = self.host_cost(Part::Ingress, &ingress, 0, 1.0);
        let egress = self.host_rows(Boundary::Egress, None);
        self.egress = self.host_cost(Part::Egress, &egress, 0, 1.0);
    }

    /// Kernels submitted in a mixed step here over those where the rows were measured.
    fn launches_here_over_there(&mut self, groups: &[Vec<(Known, Arc<Row>)>]) -> f64 {
        let deployment = &self.scenario.deployment;
        let scope = groups
            .first()
            .and_then(|rows| rows.first()?.1.scope.clone());
        let Some(scope) = scope else { return 1.0 };
        if scope.model != deployment.model {
            self.fault(
                Check::Rows,
                format!("no config of {} to recount its launches from", scope.model),
            );
            return 1.0;
        }
        let count = |on| f64::from(launches(&forward(self.config, deployment, on), true, true));
        count(deployment.parallel) / count(scope.topology)
    }

    // ---- lookups

    /// Prices a kernel at `wanted`; equal questions are answered once.
    fn look_up(&mut self, task: usize, wanted: [f64; 3], of_total: f64) -> Cost {
        let part = if self.tasks[task].joins_ranks() {
            Part::Transfer
        } else {
            Part::Kernel
        };
        let shares = match &self.fields[task] {
            Some(field) => field.around(wanted),
            // At the published bandwidth: the row is the time of one byte.
            None => self
                .sources
                .roofline
                .map(|known| Share {
                    known,
                    weight: 1.0,
                    work: wanted[0],
                })
                .into_iter()
                .collect(),
        };
        if let Err(what) = check_weights(shares.iter().map(|share| share.weight)) {
            let what = format!("{:?} at {wanted:?}: {what}", self.tasks[task]);
            self.fault(Check::Lookup, what);
            return Cost::default();
        }
        if shares.iter().any(|share| share.known == Known::MAX) {
            let what = format!(
                "{:?} at {wanted:?} lies beside a row that the prediction was not given",
                self.tasks[task]
            );
            self.fault(Check::Lookup, what);
            return Cost::default();
        }
        let shares: Vec<Share> = shares
            .into_iter()
            .map(|share| Share {
                weight: share.weight * of_total,
                ..share
            })
            .collect();
        self.cost(part, &shares)
    }

    fn counted(&mut self, task: usize, count: f64) -> Rc<Cost> {
        if let Some(known) = self.priced[task].get(&count.to_bits()) {
            return Rc::clone(known);
        }
        let wanted = match self.tasks[task] {
            Task::Multiply { n, k, .. } => [f64::from(n), f64::from(k), count],
            _ => [count, 0.0, 0.0],
        };
        let cost = Rc::new(self.look_up(task, wanted, 1.0));
        self.priced[task].insert(count.to_bits(), Rc::clone(&cost));
        cost
    }

    /// Prices a kernel for one rank group's load.
    fn price(&mut self, task: usize, load: &Load, loads: &[Load]) -> Rc<Cost> {
        let largest = |of: fn(&Load) -> u32| loads.iter().map(of).max().unwrap_or(0);
        let count = match self.tasks[task] {
            Task::Prefill { .. } => {
                let batch = load.prompts.len() as f64;
                // A group without a prompt has nothing to attend to.
                let mut mean = Cost::default();
                for prompt in &load.prompts {
                    let one = self.look_up(task, [f64::from(*prompt), batch, 0.0], 1.0 / batch);
                    mean.ms += one.ms;
                    mean.of.extend(one.of);
                }
                return Rc::new(mean);
            }
            Task::Decode { .. } if load.padded == 0 => return Rc::new(Cost::default()),
            Task::Decode { .. } => {
                let batch = f64::from(load.padded);
                let mean_kv = load.kv_sum as f64 / batch;
                return Rc::new(self.look_up(task, [mean_kv, batch, 0.0], 1.0));
            }
            Task::Experts => f64::from(loads.iter().map(Load::tokens).sum::<u32>()),
            Task::Reduce => f64::from(self.config.hidden) * f64::from(largest(Load::tokens)),
            Task::Gather { width, feed } => {
                let of = match feed {
                    Feed::Tokens => Load::tokens,
                    Feed::Sequences => Load::sequences,
                };
                f64::from(width) * f64::from(largest(of))
            }
            Task::Exchange { .. } => {
                let (count, topk) = self
                    .config
                    .experts
                    .map_or((1, 1), |experts| (experts.count, experts.topk));
                let ranks = self.scenario.deployment.parallel.moe_ep;
                reached_ranks(count, topk, ranks)
                    * f64::from(self.config.hidden)
                    * f64::from(largest(Load::tokens))
            }
            Task::Multiply { feed, .. } => f64::from(match feed {
                Feed::Tokens => load.tokens(),
                Feed::Sequences => load.sequences(),
            }),
            Task::Move { bytes, feed } => {
                f64::from(bytes)
                    * f64::from(match feed {
                        Feed::Tokens => load.tokens(),
                        Feed::Sequences => load.sequences(),
                    })
            }
        };
        self.counted(task, count)
    }

    // ---- steps

    /// Plays one step forward, kernel by kernel, and returns when each lane's stream is free.
    fn step(
        &mut self,
        loads: &[Load],
        mode: usize,
        start: &Moment,
        streams: &[Moment],
    ) -> Vec<Moment> {
        let lanes = streams.len();
        let kinds = self.tasks.len();
        let prompts = loads.iter().any(|load| !load.prompts.is_empty());
        let generation = loads.iter().any(|load| load.padded > 0);
        let mut costs: Vec<Rc<Cost>> = Vec::with_capacity(lanes * kinds);
        let nothing = Rc::new(Cost::default());
        for load in loads {
            for task in 0..kinds {
                costs.push(if self.tasks[task].runs(prompts, generation) {
                    self.price(task, load, loads)
                } else {
                    Rc::clone(&nothing)
                });
            }
        }
        // Lanes of one rank group do the same work.
        let group = |lane: usize| if loads.len() > 1 { lane } else { 0 };
        let in_order: Vec<(usize, u32)> = self
            .order
            .iter()
            .filter(|(task, _)| self.tasks[*task].runs(prompts, generation))
            .copied()
            .collect();
        let all: u32 = in_order.iter().map(|(_, kernels)| kernels).sum();
        let hosts = &self.hosts[mode];
        let mut states: Vec<Lane> = (0..lanes)
            .map(|lane| Lane {
                ms: streams[lane].ms - start.ms,
                entry: Entry::Stream(lane),
                counts: vec![0; lanes * kinds],
            })
            .collect();
        let mut submitted = 0;
        let mut ties = 0;
        let length = start.ms.abs();
        for (task, kernels) in in_order {
            submitted += kernels;
            let share = f64::from(submitted) / f64::from(all);
            for (lane, state) in states.iter_mut().enumerate() {
                let host = &hosts[lane];
                let ready = host.before.ms + host.dispatch.ms * share;
                if (ready - state.ms).abs() <= TIE_REL * length {
                    ties += 1;
                }
                if ready > state.ms {
                    state.ms = ready;
                    state.entry = Entry::Host(lane, share);
                    state.counts.fill(0);
                }
            }
            if self.tasks[task].joins_ranks() && lanes > 1 {
                let mut late = 0;
                for lane in 1..lanes {
                    let (a, b) = (&states[late], &states[lane]);
                    if (b.ms - a.ms).abs() <= TIE_REL * length && a.counts != b.counts {
                        ties += 1;
                    }
                    if b.ms > a.ms {
                        late = lane;
                    }
                }
                let at = group(late) * kinds + task;
                let state = &mut states[late];
                state.ms += costs[at].ms;
                state.counts[at] += 1;
                let (before, rest) = states.split_at_mut(late);
                if let Some((state, after)) = rest.split_first_mut() {
                    for other in before.iter_mut().chain(after) {
                        other.clone_from(state);
                    }
                }
            } else {
                for (lane, state) in states.iter_mut().enumerate() {
                    let at = group(lane) * kinds + task;
                    state.ms += costs[at].ms;
                    state.counts[at] += 1;
                }
            }
        }
        self.ties += ties;
        states
            .iter()
            .map(|state| {
                let mut of: Vec<(Slot, f64)> = Vec::new();
                let from = match state.entry {
                    Entry::Stream(lane) => &streams[lane],
                    Entry::Host(lane, share) => {
                        let host = &self.hosts[mode][lane];
                        of.extend(&host.before.of);
                        let dispatched = host.dispatch.of.iter();
                        of.extend(dispatched.map(|(slot, times)| (*slot, times * share)));
                        start
                    }
                };
                for (cost, count) in costs.iter().zip(&state.counts) {
                    if *count > 0 {
                        let times = f64::from(*count);
                        of.extend(cost.of.iter().map(|(slot, one)| (*slot, times * one)));
                    }
                }
                from.reach(start.ms + state.ms, of)
            })
            .collect()
    }

    /// The later of two moments; of equals the first.
    fn later(&mut self, first: &Moment, second: &Moment) -> Moment {
        if close(first.ms, second.ms, TIE_REL)
            && !Rc::ptr_eq(&first.path, &second.path)
            && first.path != second.path
        {
            self.ties += 1;
        }
        if second.ms > first.ms {
            second.clone()
        } else {
            first.clone()
        }
    }

    fn latest(&mut self, moments: &[Moment]) -> Moment {
        let mut late = moments[0].clone();
        for moment in &moments[1..] {
            late = self.later(&late, moment);
        }
        late
    }

    // ---- the run

    fn post(&mut self, at: &Moment, on_way: &mut Vec<u32>) {
        if self.posted == self.requests.len() {
            return;
        }
        let arrival = at.after(&self.transport).after(&self.ingress);
        let weight = 1.0 / self.requests.len() as f64;
        self.service.add(weight, at, &arrival);
        let request = &mut self.requests[self.posted];
        request.post = Some(at.clone());
        request.arrival = Some(arrival);
        on_way.push(self.posted as u32);
        self.posted += 1;
    }

    fn arrival_ms(&self, request: u32) -> f64 {
        self.requests
            .get(request as usize)
            .and_then(|request| request.arrival.as_ref())
            .map_or(f64::INFINITY, |arrival| arrival.ms)
    }

    fn replay(&mut self) {
        let log = &self.prediction.log;
        self.check_lengths();
        let lanes = self.hosts[0].len();
        let groups = self.scenario.deployment.parallel.dp as usize;
        let weight = 1.0 / log.requests.len().max(1) as f64;
        let mut host = vec![Moment::zero(); lanes];
        let mut stream = vec![Moment::zero(); lanes];
        let mut on_way: Vec<u32> = Vec::new();
        let mut waiting: VecDeque<u32> = VecDeque::new();
        let mut inside = 0_usize;
        let mut held: Option<(Part, u32, Moment)> = None;
        let mut in_flight: Option<InFlight> = None;
        let mut generating: Vec<Generating> = (0..groups).map(|_| Generating::default()).collect();
        let mut step = 0_i64;
        for _ in 0..self.scenario.workload.concurrency {
            self.post(&Moment::zero(), &mut on_way);
        }
        for (index, iteration) in log.iterations.iter().enumerate() {
            let mut start = self.latest(&host);
            let idle = inside == 0;
            if !self.fetch_is_due(index, iteration, idle, start.ms, &on_way) {
                return;
            }
            if idle {
                for request in &iteration.fetched {
                    let arrival = self.requests[*request as usize].arrival.clone();
                    if let Some(arrival) = arrival {
                        start = self.later(&start, &arrival);
                    }
                }
            }
            if !close(start.ms, iteration.start_ms, SUM_REL) {
                self.fault(
                    Check::Times,
                    format!(
                        "iteration {index} starts at {} ms, logged {} ms",
                        start.ms, iteration.start_ms
                    ),
                );
            }
            if let Some((part, count, from)) = held.take() {
                let sum = self.queues.entry(part).or_default();
                sum.add(weight * f64::from(count), &from, &start);
            }
            for request in &iteration.fetched {
                let progress = &mut self.requests[*request as usize];
                progress.fetched = true;
                if let Some(arrival) = &progress.arrival {
                    let sum = self.queues.entry(Part::QueueIteration).or_default();
                    sum.add(weight, arrival, &start);
                }
            }
            on_way.retain(|request| !iteration.fetched.contains(request));
            waiting.extend(&iteration.fetched);
            inside += iteration.fetched.len();
            let now = match &iteration.step {
                Some((execution, ranks)) => {
                    self.check_step(index, *execution, ranks, &generating, step, &mut waiting);
                    if self.faults.len() >= FAULTS_MAX {
                        return;
                    }
                    let Some(mode) = self.mode(*execution) else {
                        return;
                    };
                    for (lane, host) in host.iter_mut().enumerate() {
                        let times = &self.hosts[mode][lane];
                        *host = start.after(&times.before).after(&times.dispatch);
                    }
                    let loads: Vec<Load> = ranks.iter().map(|rank| self.load(rank)).collect();
                    stream = self.step(&loads, mode, &start, &stream);
                    let mut first = Vec::new();
                    let mut last = Vec::new();
                    for (rank, group) in ranks.iter().zip(&mut generating) {
                        for request in group.ends.remove(&step).unwrap_or_default() {
                            let record = &log.requests[request as usize];
                            group.count -= 1;
                            group.offset -=
                                i64::from(record.prompt) - (step + 1 - i64::from(record.output));
                            last.push(request);
                        }
                        for &request in &rank.context {
                            let record = &log.requests[request as usize];
                            self.requests[request as usize].scheduled = Some(start.clone());
                            first.push(request);
                            if record.output > 1 {
                                group.count += 1;
                                group.offset += i64::from(record.prompt) - step;
                                let end = step + i64::from(record.output) - 1;
                                group.ends.entry(end).or_default().push(request);
                            } else {
                                last.push(request);
                            }
                        }
                    }
                    step += 1;
                    first.sort_unstable();
                    last.sort_unstable();
                    Some(InFlight {
                        streams: stream.clone(),
                        mode,
                        first,
                        last,
                    })
                }
                None => {
                    host.fill(start.clone());
                    None
                }
            };
            let left = waiting.len() as u32;
            self.check_held(index, iteration, left);
            held = match iteration.held {
                Some((part, _)) if left > 0 => Some((part, left, start)),
                _ => None,
            };
            let done = if self.scenario.serving.overlap {
                std::mem::replace(&mut in_flight, now)
            } else {
                now
            };
            if let Some(done) = done {
                inside -= done.last.len();
                self.respond(&done, &mut host, &mut on_way);
            }
        }
    }

    /// Waits for a step on every lane, sends its responses and lets the client go on.
    fn respond(&mut self, done: &InFlight, host: &mut [Moment], on_way: &mut Vec<u32>) {
        for (lane, host) in host.iter_mut().enumerate() {
            let synced = self.later(&done.streams[lane], host);
            *host = synced.after(&self.hosts[done.mode][lane].finish);
        }
        if done.first.is_empty() && done.last.is_empty() {
            return;
        }
        // Attention-DP ranks hand their responses to rank 0.
        let sent = if self.scenario.deployment.parallel.dp > 1 {
            self.latest(host)
        } else {
            host[0].clone()
        };
        let received = sent.after(&self.egress);
        let log = &self.prediction.log;
        let streaming = log.requests.iter().filter(|one| one.output > 1).count();
        let weight = 1.0 / log.requests.len() as f64;
        for &request in &done.first {
            let progress = &mut self.requests[request as usize];
            progress.first = Some(received.clone());
            if let Some(scheduled) = &progress.scheduled {
                self.service.add(weight, scheduled, &received);
            }
        }
        for &request in &done.last {
            let output = log.requests[request as usize].output;
            let progress = &mut self.requests[request as usize];
            progress.last = Some(received.clone());
            if let Some(first) = progress.first.as_ref().filter(|_| output > 1) {
                let weight = 1.0 / streaming as f64 / f64::from(output - 1);
                self.tpot.add(weight, first, &received);
            }
            self.post(&received, on_way);
        }
    }

    fn load(&self, rank: &RankRecord) -> Load {
        let requests = &self.prediction.log.requests;
        Load {
            prompts: rank
                .context
                .iter()
                .map(|request| requests[*request as usize].prompt)
                .collect(),
            padded: rank.padded,
            kv_sum: rank.kv_sum,
        }
    }

    fn mode(&mut self, execution: Execution) -> Option<usize> {
        match execution {
            Execution::Eager => Some(0),
            Execution::FullGraph { .. } => Some(1),
            Execution::Piecewise { .. } | Execution::Unknown => {
                let what = format!("{} steps have no audit", execution.mode());
                self.fault(Check::Decisions, what);
                None
            }
        }
    }

    // ---- decisions

    fn check_lengths(&mut self) {
        let workload = &self.scenario.workload;
        let requests = &self.prediction.log.requests;
        if requests.len() != workload.requests as usize {
            self.fault(
                Check::Decisions,
                format!("{} requests of {}", requests.len(), workload.requests),
            );
        }
        let drawn = |longest: u32, length: u32| {
            let shortest = (f64::from(longest) * workload.length_ratio) as u32;
            (shortest..=longest).contains(&length)
        };
        for (index, request) in requests.iter().enumerate() {
            if !drawn(workload.isl, request.prompt) || !drawn(workload.osl, request.output) {
                let what = format!(
                    "request {index} has {} and {} tokens",
                    request.prompt, request.output
                );
                self.fault(Check::Decisions, what);
            }
        }
    }

    /// Whether the requests fetched are those that have arrived, in order. An executor with
    /// nothing to do blocks, and takes the first arrival alone.
    fn fetch_is_due(
        &mut self,
        index: usize,
        iteration: &IterationRecord,
        idle: bool,
        ready_ms: f64,
        on_way: &[u32],
    ) -> bool {
        let soonest = on_way
            .iter()
            .map(|request| self.arrival_ms(*request))
            .fold(f64::INFINITY, f64::min);
        let unknown = |request: &&u32| !on_way.contains(request);
        if let Some(request) = iteration.fetched.iter().find(unknown) {
            let what = format!("iteration {index} fetches request {request}, not on its way");
            self.fault(Check::Decisions, what);
            return false;
        }
        let blocks = idle && (index == 0 || soonest > ready_ms);
        let right = if blocks {
            iteration.fetched.len() == 1
                && close(self.arrival_ms(iteration.fetched[0]), soonest, TIE_REL)
        } else {
            let limit = ready_ms * (1.0 + TIE_REL);
            let surely = ready_ms * (1.0 - TIE_REL);
            let fetched = |request: &u32| iteration.fetched.contains(request);
            let in_time = |request: &u32| self.arrival_ms(*request) <= limit;
            let due = |request: &u32| self.arrival_ms(*request) < surely;
            iteration.fetched.iter().all(in_time)
                && on_way.iter().filter(|one| due(one)).all(fetched)
        };
        let in_order = iteration.fetched.windows(2).all(|pair| {
            let (a, b) = (self.arrival_ms(pair[0]), self.arrival_ms(pair[1]));
            if close(a, b, TIE_REL) {
                a != b || pair[0] < pair[1]
            } else {
                a < b
            }
        });
        if !right || !in_order {
            let what = format!(
                "iteration {index} at {ready_ms} ms fetches {:?} of {on_way:?}",
                iteration.fetched
            );
            self.fault(Check::Decisions, what);
        }
        true
    }

    fn check_held(&mut self, index: usize, iteration: &IterationRecord, left: u32) {
        let logged = iteration.held.map_or(0, |(_, count)| count);
        if logged != left {
            let what = format!("iteration {index} holds {logged} requests, recounted {left}");
            self.fault(Check::Decisions, what);
        }
        let serving = &self.scenario.serving;
        let groups = self.scenario.deployment.parallel.dp;
        let possible = match iteration.held {
            None | Some((Part::QueueCapacity, _)) => true,
            Some((Part::QueueBatchWait, _)) => serving.batch_wait.is_some() && groups == 1,
            Some((Part::QueueBalance, _)) => serving.attention_dp_balance.is_some() && groups > 1,
            Some(_) => false,
        };
        if !possible {
            let what = format!("iteration {index} holds requests for {:?}", iteration.held);
            self.fault(Check::Decisions, what);
        }
    }

    /// Recounts a step's share of each rank group from the lengths and the steps before.
    fn check_step(
        &mut self,
        index: usize,
        execution: Execution,
        ranks: &[RankRecord],
        generating: &[Generating],
        step: i64,
        waiting: &mut VecDeque<u32>,
    ) {
        let mut wrong = Vec::new();
        if ranks.len() != generating.len() {
            wrong.push(format!("{} rank groups", ranks.len()));
        }
        let log = &self.prediction.log;
        let serving = &self.scenario.serving;
        for (rank, record) in ranks.iter().enumerate() {
            for &request in &record.context {
                let at = if ranks.len() == 1 {
                    // First come, first served.
                    waiting
                        .front()
                        .filter(|first| **first == request)
                        .map(|_| 0)
                } else {
                    waiting.iter().position(|known| *known == request)
                };
                match at {
                    Some(at) => {
                        waiting.remove(at);
                    }
                    None => wrong.push(format!("runs request {request} out of turn")),
                }
                let logged = log.requests.get(request as usize);
                let agrees = logged.is_some_and(|logged| {
                    logged.rank as usize == rank && logged.iteration as usize == index
                });
                if !agrees {
                    wrong.push(format!("request {request} is logged elsewhere"));
                }
            }
        }
        let prompts = ranks.iter().any(|rank| !rank.context.is_empty());
        let batch = ranks.iter().map(|rank| rank.generation).max().unwrap_or(0);
        let captured = match &serving.cuda_graph {
            Some(graph) if !prompts => graph_size(graph, batch),
            _ => None,
        };
        let mut most = 0;
        for (rank, (record, group)) in ranks.iter().zip(generating).enumerate() {
            let lengths = group.offset + i64::from(group.count) * step;
            let mut padded = group.count;
            let mut kv_sum = lengths as u64;
            if let Some(size) = captured {
                // Padding attends to one token.
                padded = size;
                kv_sum += u64::from(size - group.count);
            } else if record.context.is_empty() && group.count == 0 {
                // A dummy token, so that collectives have every rank.
                padded = 1;
                kv_sum = 1;
            }
            if (record.generation, record.padded, record.kv_sum) != (group.count, padded, kv_sum) {
                wrong.push(format!(
                    "rank {rank} generates for {} ({} padded, {} KV), recounted {} ({padded}, \
                     {kv_sum})",
                    record.generation, record.padded, record.kv_sum, group.count
                ));
            }
            let context: u32 = self.load(record).prompts.iter().sum();
            let sequences = record.context.len() as u32 + record.generation;
            if context + record.generation > serving.max_num_tokens
                || sequences > serving.max_batch_size
            {
                wrong.push(format!("rank {rank} is over the scenario's limits"));
            }
            most = most.max(context + padded);
        }
        let piece = match &serving.piecewise {
            Some(piecewise) if prompts => piece_tokens(piecewise, most),
            _ => None,
        };
        let recounted = match (captured, piece) {
            (Some(captured_batch), _) => Execution::FullGraph { captured_batch },
            (None, Some(captured_tokens)) => Execution::Piecewise { captured_tokens },
            (None, None) => Execution::Eager,
        };
        if recounted != execution {
            wrong.push(format!("runs as {execution:?}, recounted {recounted:?}"));
        }
        for what in wrong {
            self.fault(Check::Decisions, format!("iteration {index} {what}"));
        }
    }

    // ---- the verdict

    fn compare(&mut self) -> AuditReport {
        let log = &self.prediction.log;
        let mut ttft = Vec::new();
        let mut tpot = Vec::new();
        for index in 0..self.requests.len() {
            let progress = self.requests[index].clone();
            let record = log.requests[index];
            let (Some(post), Some(first), Some(last)) =
                (progress.post, progress.first, progress.last)
            else {
                self.fault(Check::Times, format!("request {index} is never answered"));
                continue;
            };
            // Clock values are sums over all steps before; their rounding is theirs, not the
            // request's.
            let clock = TIE_REL * last.ms.abs();
            let ttft_ms = first.ms - post.ms;
            if (ttft_ms - record.ttft_ms()).abs() > SUM_REL * ttft_ms.abs() + clock {
                let what = format!(
                    "request {index} has a TTFT of {} ms, recomputed {ttft_ms} ms",
                    record.ttft_ms()
                );
                self.fault(Check::Times, what);
            }
            ttft.push(ttft_ms);
            if record.output > 1 {
                let tpot_ms = (last.ms - first.ms) / f64::from(record.output - 1);
                let logged = record.tpot_ms().unwrap_or(f64::NAN);
                let apart = (tpot_ms - logged).abs();
                if apart.is_nan() || apart > SUM_REL * tpot_ms.abs() + clock {
                    let what = format!(
                        "request {index} has a TPOT of {logged} ms, recomputed {tpot_ms} ms"
                    );
                    self.fault(Check::Times, what);
                }
                tpot.push(tpot_ms);
            }
        }
        let prediction = self.prediction;
        let queues = std::mem::take(&mut self.queues);
        let service = std::mem::take(&mut self.service);
        let steps = std::mem::take(&mut self.tpot);
        let mut ttft_form = self.form(&service);
        for (part, sum) in queues {
            for ((_, known), times) in self.form(&sum) {
                *ttft_form.entry((part, known)).or_default() += times;
            }
        }
        let tpot_form = self.form(&steps);
        let ttft_mean_ms = self.totals("TTFT", &ttft, &prediction.ttft, &prediction.ttft_receipt);
        let tpot_mean_ms = self.totals("TPOT", &tpot, &prediction.tpot, &prediction.tpot_receipt);
        let mut lines = 0;
        let mut tied_lines = 0;
        for (name, form, receipt, mean_ms) in [
            ("TTFT", ttft_form, &prediction.ttft_receipt, ttft_mean_ms),
            ("TPOT", tpot_form, &prediction.tpot_receipt, tpot_mean_ms),
        ] {
            let (confirmed, tied) = self.receipt(name, &form, receipt, mean_ms);
            lines += confirmed;
            tied_lines += tied;
        }
        AuditReport {
            ttft_mean_ms,
            tpot_mean_ms,
            iterations: log.iterations.len(),
            lookups: self.lookups,
            lines,
            tied_lines,
        }
    }

    fn form(&self, sum: &Sum) -> BTreeMap<(Part, Known), f64> {
        let mut form = BTreeMap::new();
        for (slot, times) in self.slot_list.iter().zip(&sum.0) {
            *form.entry(*slot).or_insert(0.0) += times;
        }
        form
    }

    /// Holds mean, percentiles and the receipt's sums to the recomputed times; returns the mean.
    fn totals(&mut self, name: &str, times: &[f64], metric: &Metric, receipt: &Receipt) -> f64 {
        let mean_ms = times.iter().sum::<f64>() / times.len().max(1) as f64;
        let parts_ms: f64 = receipt.parts_ms.iter().sum();
        let rows_ms: f64 = receipt
            .lines
            .iter()
            .map(|line| line.coefficient * self.prediction.rows.ms(line.row))
            .sum();
        for (what, ms) in [
            ("mean", metric.mean_ms),
            ("receipt's parts", parts_ms),
            ("receipt's rows", rows_ms),
        ] {
            if !close(ms, mean_ms, SUM_REL) {
                let what = format!("the {what} of {name}: {ms} ms, recomputed {mean_ms} ms");
                self.fault(Check::Totals, what);
            }
        }
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        for (percent, quantile) in [(50, metric.p50), (90, metric.p90), (99, metric.p99)] {
            let Quantile { ms, request } = quantile;
            let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
            let recomputed = sorted.get(at).copied().unwrap_or(f64::NAN);
            let record = self.prediction.log.requests.get(request as usize);
            let cited = record.and_then(|record| match name {
                "TTFT" => Some(record.ttft_ms()),
                _ => record.tpot_ms(),
            });
            if !close(ms, recomputed, SUM_REL) || cited != Some(ms) {
                let what = format!(
                    "p{percent} of {name}: {ms} ms of request {request} ({cited:?}), recomputed \
                     {recomputed} ms"
                );
                self.fault(Check::Totals, what);
            }
        }
        mean_ms
    }

    /// Holds a receipt to the recounted form; returns how many lines agree and how many are ties.
    ///
    /// Coefficients are counts times weights: they agree to 1e-9 relative, or absolute below one.
    /// A line whose difference moves the mean by no more than 1e-12 of itself is rounding: a
    /// roofline's coefficient is bytes, 1e9 and more, and what two paths cancel of it is not zero.
    fn receipt(
        &mut self,
        name: &str,
        form: &BTreeMap<(Part, Known), f64>,
        receipt: &Receipt,
        mean_ms: f64,
    ) -> (usize, usize) {
        let mut pairs: BTreeMap<(Part, Known), (f64, f64)> = BTreeMap::new();
        for (key, times) in form {
            pairs.entry(*key).or_default().0 = *times;
        }
        for line in &receipt.lines {
            let RowId(id) = line.row;
            let Some(known) = self.sources.of_id.get(id as usize) else {
                self.fault(
                    Check::Receipt,
                    format!("{name} names row {id}, of which there is none"),
                );
                continue;
            };
            pairs.entry((line.part, *known)).or_default().1 += line.coefficient;
        }
        let mut agree = 0;
        let mut apart = Vec::new();
        let mut apart_ms = 0.0;
        let mut part_ms: BTreeMap<Part, f64> = BTreeMap::new();
        for ((part, known), (mine, theirs)) in &pairs {
            let row_ms = self.sources.ms[*known];
            *part_ms.entry(*part).or_default() += mine * row_ms;
            let difference = theirs - mine;
            let rounding = SUM_REL * mine.abs().max(1.0);
            if difference.abs() <= rounding || (difference * row_ms).abs() <= TIE_REL * mean_ms {
                agree += usize::from(*mine != 0.0 || *theirs != 0.0);
            } else {
                apart_ms += difference * row_ms;
                apart.push(format!(
                    "{name} has {theirs} x {} in {}, recounted {mine}",
                    self.sources.names[*known],
                    part.name()
                ));
            }
        }
        // Two equally long paths explain a difference only where this clock saw such a pair.
        if !apart.is_empty() && self.ties > 0 && apart_ms.abs() <= TIE_REL * mean_ms {
            return (agree, apart.len());
        }
        for what in apart {
            self.fault(Check::Receipt, what);
        }
        for (index, ms) in receipt.parts_ms.iter().enumerate() {
            let recounted = part_ms.get(&Part::ALL[index]).copied().unwrap_or(0.0);
            if (ms - recounted).abs() > SUM_REL * mean_ms.abs() {
                let what = format!(
                    "{name} has {ms} ms of {}, recounted {recounted} ms",
                    Part::ALL[index].name()
                );
                self.fault(Check::Receipt, what);
            }
        }
        (agree, 0)
    }
}

// ---------------------------------------------------------------------------------------------
// Captured sizes.

/// The graph that serves a decode batch: TensorRT-LLM captures 1, 2, 4, then every 8 to 128, then
/// powers of two, and the largest.
fn graph_size(graph: &CudaGraph, batch: u32) -> Option<u32> {
    let size = match &graph.batch_sizes {
        Some(sizes) => *sizes.iter().filter(|size| **size >= batch).min()?,
        None if batch > graph.max_batch => return None,
        None if batch <= 4 => batch.max(1).next_power_of_two().min(graph.max_batch),
        None if batch <= 128 => batch.next_multiple_of(8).min(graph.max_batch),
        None => batch.next_power_of_two().min(graph.max_batch),
    };
    (graph.padding || size == batch).then_some(size)
}

/// The captured token count that serves a step: powers of two to 128, every 256, and the largest.
fn piece_tokens(piecewise: &Piecewise, tokens: u32) -> Option<u32> {
    if let Some(counts) = &piecewise.capture_tokens {
        return counts
            .iter()
            .copied()
            .filter(|count| *count >= tokens)
            .min();
    }
    if tokens > piecewise.max_tokens {
        return None;
    }
    let next = if tokens <= 128 {
        tokens.max(1).next_power_of_two()
    } else {
        tokens.next_multiple_of(256)
    };
    Some(next.min(piecewise.max_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_must_share_out_one() {
        assert!(check_weights([0.25, 0.75]).is_ok());
        assert!(check_weights([1.0]).is_ok());
        assert!(check_weights([0.25, 0.76]).is_err());
        assert!(check_weights([-0.25, 1.25]).is_err());
        assert!(check_weights([f64::NAN, 1.0]).is_err());
        assert!(check_weights([]).is_err());
    }

    fn line(task: Task, rows: &[(f64, f64)]) -> Field {
        Field {
            points: rows
                .iter()
                .enumerate()
                .map(|(known, (a, b))| Point {
                    at: [*a, *b, 0.0],
                    known,
                })
                .collect(),
            axes: 2,
            task,
            experts: None,
        }
    }

    #[test]
    fn lookups_blend_hold_and_grow() {
        let field = line(
            Task::Prefill { window: 128 },
            &[(64.0, 1.0), (64.0, 2.0), (256.0, 1.0)],
        );
        let share = |known, weight, work| Share {
            known,
            weight,
            work,
        };
        assert_eq!(field.around([64.0, 2.0, 0.0]), [share(1, 1.0, 1.0)]);
        // Below the first line: held.
        assert_eq!(field.around([8.0, 1.0, 0.0]), [share(0, 1.0, 1.0)]);
        // Halfway: each line is searched for the batch by itself; 256 has batch 1 only.
        assert_eq!(
            field.around([160.0, 2.0, 0.0]),
            [share(1, 0.5, 1.0), share(2, 0.5, 2.0)]
        );
        // Beyond the last line: by causal work, which the window bounds.
        assert_eq!(field.around([512.0, 1.0, 0.0]), [share(2, 1.0, 2.0)]);
    }

    #[test]
    fn all_to_all_payload_counts_ranks() {
        assert_eq!(reached_ranks(2, 2, 2), 2.0);
        assert_eq!(reached_ranks(4, 1, 4), 1.0);
        assert!((reached_ranks(4, 2, 2) - 5.0 / 3.0).abs() < 1e-15);
    }

    #[test]
    fn captured_sizes_by_arithmetic() {
        let graph = CudaGraph {
            padding: true,
            max_batch: 300,
            batch_sizes: None,
        };
        for (batch, size) in [(1, 1), (3, 4), (5, 8), (121, 128), (129, 256), (257, 300)] {
            assert_eq!(graph_size(&graph, batch), Some(size), "{batch}");
        }
        assert_eq!(graph_size(&graph, 301), None);
    }
}
