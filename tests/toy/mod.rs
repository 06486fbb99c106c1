//! A toy model with toy tables, written through the real file formats, so that a test can say
//! "every kernel takes 1 ms, the all-reduce 0.5 ms, rank 1 needs 60 ms to dispatch a forward" and
//! work its answer out by hand.
//!
//! The toy (hidden 64, 4 heads, 2 KV heads of 24, MLP 160 or 2 experts with top 2, vocabulary 1024)
//! gives every GEMM a shape of its own. Memory bandwidth is so large that ops without a table take
//! no time that a tolerance of 1e-9 ms could see.
//!
//! Launches the host submits, per forward:
//!
//! | ops, in order | TP 1 | TP 2 |
//! |---|---:|---:|
//! | embedding, (all-gather), norm | 2 | 3 |
//! | dense layer: qkv, context attention 2 and generation attention 2 where they run, o, reduce (the all-reduce, with the norm fused to it), gate_up, activation, down, reduce | 7 + 2 + 2 | 7 + 2 + 2 |
//! | gather, lm_head, (all-gather), sampling 2 | 4 | 5 |

#![allow(dead_code, reason = "each test target uses its own share")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stepgate::compose::{Composer, Method};
use stepgate::model::{
    Backend, BackendName, Capacity, CudaGraph, Deployment, GemmDtype, Kernels, KvCacheDtype,
    MixedExecution, Precision, RankLoad, Scenario, Serving, Workload,
};
use stepgate::replay::{Outcome, Prediction, Replayer};
use stepgate::timing::{Column, OpTable, Policy, Topology};
use tempfile::TempDir;

pub const MODEL: &str = "toy";
pub const SYSTEM: &str = "toy_sxm";
pub const VERSION: &str = "1.3.0rc20";
pub const CPU: &str = "Toy CPU";
pub const WINDOW: u32 = 4;
pub const METHODS: [Method; 2] = [Method::OpByOp, Method::Segments];

/// Time of each op in milliseconds, whatever its tokens. Attention: of full layers, of layers with
/// a window.
#[derive(Debug, Clone)]
pub struct Times {
    pub qkv: f64,
    pub context: [f64; 2],
    pub generation: [f64; 2],
    pub o: f64,
    pub gate_up: f64,
    pub down: f64,
    pub router: f64,
    pub experts: f64,
    pub lm_head: f64,
    pub all_reduce: f64,
    pub all_gather: f64,
    pub all_to_all: f64,
}

impl Times {
    /// Every kernel takes `kernel` ms, every collective `transfer` ms.
    pub fn all(kernel: f64, transfer: f64) -> Self {
        Self {
            qkv: kernel,
            context: [kernel; 2],
            generation: [kernel; 2],
            o: kernel,
            gate_up: kernel,
            down: kernel,
            router: kernel,
            experts: kernel,
            lm_head: kernel,
            all_reduce: transfer,
            all_gather: transfer,
            all_to_all: transfer,
        }
    }
}

/// One host or boundary row.
#[derive(Debug, Clone)]
pub struct HostRow {
    pub boundary: &'static str,
    /// As the file spells it, for example `eager` or `{ full_graph: { captured_batch: 1 } }`.
    pub execution: String,
    pub rank: Option<u32>,
    pub ms: f64,
    /// Further lines of the row, for example `shape: { isl: 8 }`.
    pub more: String,
    pub observer: &'static str,
    pub derived: bool,
}

impl HostRow {
    pub fn rank(mut self, rank: u32) -> Self {
        self.rank = Some(rank);
        self
    }

    pub fn observer(mut self, observer: &'static str) -> Self {
        self.observer = observer;
        self
    }

    pub fn derived(mut self) -> Self {
        self.derived = true;
        self
    }

    pub fn more(mut self, more: &str) -> Self {
        more.clone_into(&mut self.more);
        self
    }
}

pub fn eager(boundary: &'static str, ms: f64) -> HostRow {
    host(boundary, "eager", ms)
}

pub fn graph(boundary: &'static str, ms: f64) -> HostRow {
    host(boundary, "{ full_graph: { captured_batch: 1 } }", ms)
}

/// A boundary of a request: ingress, egress or client transport.
pub fn request(boundary: &'static str, ms: f64) -> HostRow {
    host(boundary, "unknown", ms)
}

pub fn host(boundary: &'static str, execution: &str, ms: f64) -> HostRow {
    HostRow {
        boundary,
        execution: execution.to_owned(),
        rank: None,
        ms,
        more: String::new(),
        observer: "plain",
        derived: false,
    }
}

/// What the rows of one host file say of where they were measured.
#[derive(Debug, Clone)]
pub struct ToyScope {
    pub runtime: &'static str,
    pub version: &'static str,
    pub system: &'static str,
    pub model: &'static str,
    pub topology: Topology,
    pub cpu: &'static str,
}

impl ToyScope {
    pub fn of(topology: Topology) -> Self {
        Self {
            runtime: "trtllm",
            version: VERSION,
            system: SYSTEM,
            model: MODEL,
            topology,
            cpu: CPU,
        }
    }
}

/// Dense models split the MLP over TP; expert models hold one expert per DP rank.
pub fn topology(tp: u32, dp: u32) -> Topology {
    Topology {
        tp,
        dp,
        moe_tp: tp,
        moe_ep: dp,
    }
}

/// A data folder that vanishes with this value.
#[derive(Debug)]
pub struct Toy {
    dir: TempDir,
    topology: Topology,
}

impl Toy {
    /// A dense model with one layer per entry of `windows` (0: full attention).
    pub fn dense(windows: &[u32], topology: Topology, times: &Times) -> Self {
        Self::new(windows, false, topology, times)
    }

    /// The same with two experts, both chosen for every token, so that the experts' weight traffic
    /// is the tables' own.
    pub fn experts(windows: &[u32], topology: Topology, times: &Times) -> Self {
        Self::new(windows, true, topology, times)
    }

    fn new(windows: &[u32], experts: bool, topology: Topology, times: &Times) -> Self {
        let toy = Self::bare(windows, experts, topology);
        toy.gemm(&toy_gemms(topology, experts, times));
        toy.attention(true, &attention_rows(times.context));
        toy.attention(false, &attention_rows(times.generation));
        if topology.tp > 1 {
            let (gpus, ms) = (topology.tp, times.all_reduce);
            toy.all_reduce(&[(gpus, 1, ms), (gpus, FAR, ms)]);
        }
        let mut nccl = Vec::new();
        for message in [1, FAR] {
            if topology.tp > 1 {
                nccl.push(("all_gather", "half", topology.tp, message, times.all_gather));
            }
            if topology.dp > 1 {
                for dtype in ["int8", "half"] {
                    nccl.push(("alltoall", dtype, topology.dp, message, times.all_to_all));
                }
            }
        }
        if !nccl.is_empty() {
            toy.nccl(&nccl);
        }
        if experts {
            let source = "moe_torch_flow_cutlass";
            let rows = [1, FAR].map(|tokens| (tokens, topology, times.experts));
            toy.moe("trtllm", source, &rows);
        }
        toy
    }

    /// The folder with the model and the system's figures only.
    pub fn bare(windows: &[u32], experts: bool, topology: Topology) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let toy = Self { dir, topology };
        let kinds: Vec<&str> = windows
            .iter()
            .map(|window| match *window {
                0 => "full_attention",
                WINDOW => "sliding_attention",
                other => panic!("the toy has no window of {other}"),
            })
            .collect();
        let mut config = serde_json::json!({
            "num_hidden_layers": windows.len(),
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 160,
            "vocab_size": 1024,
            "sliding_window": WINDOW,
            "layer_types": kinds,
        });
        if experts {
            config["num_local_experts"] = 2.into();
            config["num_experts_per_tok"] = 2.into();
        }
        toy.write(&format!("models/{MODEL}.json"), &config.to_string());
        toy.write(
            &format!("systems/{SYSTEM}.yaml"),
            "gpu:\n  mem_bw: 1.0e30\n",
        );
        toy
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn write(&self, inside: &str, text: &str) {
        let file = self.path().join(inside);
        let folder = file.parent().expect("a folder");
        std::fs::create_dir_all(folder).expect("make the folder");
        std::fs::write(file, text).expect("write the file");
    }

    /// Writes the rows as one host file of the toy's own scope.
    pub fn with_host(self, rows: &[HostRow]) -> Self {
        let scope = ToyScope::of(self.topology);
        if !rows.is_empty() {
            self.host("toy", &scope, rows);
        }
        self
    }

    /// Writes one host file; row ids are its name and a number.
    pub fn host(&self, name: &str, scope: &ToyScope, rows: &[HostRow]) {
        let Topology {
            tp,
            dp,
            moe_tp,
            moe_ep,
        } = scope.topology;
        let mut text = format!(
            "scope:\n  runtime: {}\n  version: {}\n  system: {}\n  model: {}\n  topology: \
             {{ tp: {tp}, dp: {dp}, moe_tp: {moe_tp}, moe_ep: {moe_ep} }}\n  cpu: {}\nrows:\n",
            scope.runtime, scope.version, scope.system, scope.model, scope.cpu
        );
        for (number, row) in rows.iter().enumerate() {
            let cell = "{ table: t, row: r, column: c }";
            let provenance = if row.derived {
                format!("{{ derived: {{ rule: toy difference, plus: [{cell}], minus: [] }} }}")
            } else {
                format!("{{ measured: {{ source: {cell} }} }}")
            };
            writeln!(
                text,
                "  - id: {name}-{number}\n    boundary: {}\n    execution: {}\n    module: toy\n    \
                 phase: toy\n    samples: {{ mean_ms: {:?}, observer: {} }}\n    provenance: \
                 {provenance}",
                row.boundary, row.execution, row.ms, row.observer
            )
            .expect("write to a string");
            if let Some(rank) = row.rank {
                writeln!(text, "    rank: {rank}").expect("write to a string");
            }
            if !row.more.is_empty() {
                writeln!(text, "    {}", row.more).expect("write to a string");
            }
        }
        self.write(&format!("host/{name}.yaml"), &text);
    }

    pub fn replayer(&self) -> Replayer {
        Replayer::open(self.path(), None).expect("the toy folder opens")
    }

    pub fn deployment(&self) -> Deployment {
        Deployment {
            model: MODEL.to_owned(),
            system: SYSTEM.to_owned(),
            backend: Backend {
                name: BackendName::Trtllm,
                version: VERSION.to_owned(),
            },
            parallel: self.topology,
            precision: Precision {
                gemm: GemmDtype::Bfloat16,
                qkv_proj: None,
                moe: None,
                kv_cache: KvCacheDtype::Bfloat16,
                attention: None,
            },
            kernels: Kernels::default(),
            host_cpu: Some(CPU.to_owned()),
        }
    }

    /// A closed loop of equal requests: prompts of 8 tokens, `osl` tokens out, no graphs.
    pub fn scenario(&self, concurrency: u32, requests: u32, osl: u32) -> Scenario {
        Scenario {
            deployment: self.deployment(),
            workload: Workload {
                isl: 8,
                osl,
                concurrency,
                requests,
                length_ratio: 1.0,
                seed: 0,
                chat_template: false,
            },
            serving: Serving {
                max_batch_size: 64,
                max_num_tokens: 1000,
                max_seq_len: None,
                overlap: true,
                cuda_graph: None,
                piecewise: None,
                mixed_execution: MixedExecution::Eager,
                batch_wait: None,
                attention_dp_balance: None,
                capacity: Capacity::GuaranteedNoEvict,
                memory_fraction: None,
                block_reuse: false,
                stream_interval: 1,
                chunked_prefill: false,
                max_prefill_tokens: None,
                chunked_prefill_size: None,
                scheduler_recv_interval: 1,
            },
        }
    }

    /// The composer of the toy deployment.
    pub fn composer(&self, method: Method, policy: Policy) -> Composer {
        let composer = self.replayer().composer(&self.scenario(1, 1, 2), policy);
        let mut composer = composer
            .expect("the toy folder is well formed")
            .expect("the toy tables anchor every op");
        composer.set_method(method);
        composer
    }

    /// The strict prediction.
    pub fn predict(&self, scenario: &Scenario) -> Prediction {
        predicted(self.replayer().predict(scenario, Policy::Strict))
    }

    fn table_path(&self, family: &str, backend: &str, version: &str, table: &str) -> PathBuf {
        self.path().join(format!(
            "systems/data/{SYSTEM}/{family}/{backend}/{version}/{table}.parquet"
        ))
    }

    pub fn gemm_path(&self) -> PathBuf {
        self.table_path("gemm", "trtllm", VERSION, "gemm_perf")
    }

    pub fn attention_path(&self, context: bool) -> PathBuf {
        let table = if context {
            "context_attention_perf"
        } else {
            "generation_attention_perf"
        };
        self.table_path("attention", "trtllm", VERSION, table)
    }

    /// Rows of (n, k, m, ms).
    pub fn gemm(&self, rows: &[(i64, i64, i64, f64)]) {
        table(
            rows,
            &[("kernel_source", "torch_flow"), ("gemm_dtype", "bfloat16")],
            &[("n", &|r| r.0), ("k", &|r| r.1), ("m", &|r| r.2)],
            &|r| r.3,
        )
        .write(&self.gemm_path())
        .expect("write the GEMM table");
    }

    /// Rows of (window, isl, step, batch, ms).
    pub fn attention(&self, context: bool, rows: &[(u32, i64, i64, i64, f64)]) {
        let heads = i64::from(4 / self.topology.tp);
        let kv_heads = i64::from((2 / self.topology.tp).max(1));
        table(
            rows,
            &[
                ("kernel_source", "torch_flow"),
                ("attn_dtype", "bfloat16"),
                ("kv_cache_dtype", "bfloat16"),
            ],
            &[
                ("num_heads", &|_| heads),
                ("num_key_value_heads", &|_| kv_heads),
                ("head_dim", &|_| 24),
                ("window_size", &|r| i64::from(r.0)),
                ("isl", &|r| r.1),
                ("step", &|r| r.2),
                ("batch_size", &|r| r.3),
            ],
            &|r| r.4,
        )
        .write(&self.attention_path(context))
        .expect("write the attention table");
    }

    /// Rows of (gpus, elements, ms).
    pub fn all_reduce(&self, rows: &[(u32, i64, f64)]) {
        table(
            rows,
            &[("kernel_source", "TRTLLM"), ("allreduce_dtype", "bfloat16")],
            &[
                ("num_gpus", &|r| i64::from(r.0)),
                ("message_size", &|r| r.1),
            ],
            &|r| r.2,
        )
        .write(&self.table_path("comm", "trtllm", VERSION, "custom_allreduce_perf"))
        .expect("write the all-reduce table");
    }

    /// Rows of (op name, dtype, gpus, elements, ms).
    pub fn nccl(&self, rows: &[(&str, &str, u32, i64, f64)]) {
        let mut columns = table(
            rows,
            &[("kernel_source", "NCCL")],
            &[
                ("num_gpus", &|r| i64::from(r.2)),
                ("message_size", &|r| r.3),
            ],
            &|r| r.4,
        );
        for (name, of) in [
            ("op_name", rows.iter().map(|r| r.0).collect::<Vec<_>>()),
            ("nccl_dtype", rows.iter().map(|r| r.1).collect()),
        ] {
            columns.names.push(name.to_owned());
            let values = of.into_iter().map(Arc::from).collect();
            columns.columns.push(Column::Text(values));
        }
        columns
            .write(&self.table_path("comm", "nccl", "2.29.2", "nccl_perf"))
            .expect("write the NCCL table");
    }

    /// Rows of (tokens, topology, ms), balanced, in the table of `backend`.
    pub fn moe(&self, backend: &str, kernel_source: &str, rows: &[(i64, Topology, f64)]) {
        let version = if backend == "sglang" {
            "0.5.14"
        } else {
            VERSION
        };
        table(
            rows,
            &[
                ("kernel_source", kernel_source),
                ("moe_dtype", "bfloat16"),
                ("distribution", "balanced"),
            ],
            &[
                ("num_tokens", &|r| r.0),
                ("hidden_size", &|_| 64),
                ("inter_size", &|_| 160),
                ("topk", &|_| 2),
                ("num_experts", &|_| 2),
                ("moe_tp_size", &|r| i64::from(r.1.moe_tp)),
                ("moe_ep_size", &|r| i64::from(r.1.moe_ep)),
            ],
            &|r| r.2,
        )
        .write(&self.table_path("moe", backend, version, "moe_perf"))
        .expect("write the MoE table");
    }
}

/// Beyond anything a toy step asks for: a row at 1 and an equal one here make a constant.
pub const FAR: i64 = 1 << 30;

/// (n, k) of the toy's GEMMs, each with rows of equal time at both ends.
pub fn toy_gemms(topology: Topology, experts: bool, times: &Times) -> Vec<(i64, i64, i64, f64)> {
    let tp = i64::from(topology.tp);
    let kv_heads = (2 / tp).max(1);
    let mut shapes = vec![
        ((4 / tp + 2 * kv_heads) * 24, 64, times.qkv),
        (64, 4 / tp * 24, times.o),
        (1024 / tp, 64, times.lm_head),
    ];
    if experts {
        shapes.push((2, 64, times.router));
    } else {
        shapes.push((2 * 160 / tp, 64, times.gate_up));
        shapes.push((64, 160 / tp, times.down));
    }
    shapes
        .into_iter()
        .flat_map(|(n, k, ms)| [(n, k, 1, ms), (n, k, FAR, ms)])
        .collect()
}

/// Constant rows for full layers and layers with a window.
fn attention_rows(ms: [f64; 2]) -> Vec<(u32, i64, i64, i64, f64)> {
    let mut rows = Vec::new();
    for (window, ms) in [0, WINDOW].into_iter().zip(ms) {
        for length in [1, FAR] {
            for batch in [1, FAR] {
                rows.push((window, length, 0, batch, ms));
            }
        }
    }
    rows
}

/// An integer column: its name and its value in a row.
type IntColumn<'a, R> = (&'a str, &'a dyn Fn(&R) -> i64);

/// A table in memory: constant text columns, integer columns and `latency`.
pub fn table<R>(
    rows: &[R],
    texts: &[(&str, &str)],
    ints: &[IntColumn<'_, R>],
    latency: &dyn Fn(&R) -> f64,
) -> OpTable {
    let mut names = Vec::new();
    let mut columns = Vec::new();
    for (name, value) in texts {
        names.push((*name).to_owned());
        columns.push(Column::Text(vec![Arc::from(*value); rows.len()]));
    }
    for (name, of) in ints {
        names.push((*name).to_owned());
        columns.push(Column::Int(rows.iter().map(of).collect()));
    }
    names.push("latency".to_owned());
    columns.push(Column::Float(rows.iter().map(latency).collect()));
    OpTable {
        file: PathBuf::from("toy.parquet"),
        label: String::new(),
        names,
        columns: columns.into(),
        rows: rows.len(),
    }
}

pub fn predicted(outcome: Result<Outcome, stepgate::timing::InputError>) -> Prediction {
    match outcome.expect("the toy folder is well formed") {
        Outcome::Predicted(prediction) => *prediction,
        Outcome::Refused(refusal) => panic!("{refusal}"),
    }
}

/// A step of context requests only.
pub fn prefill(prompts: &[u32]) -> RankLoad {
    RankLoad {
        prompts: prompts.to_vec(),
        ..RankLoad::default()
    }
}

/// A step of `batch` generation requests with 8 KV tokens each.
pub fn decode(batch: u32) -> RankLoad {
    RankLoad {
        generation: batch,
        padded: batch,
        kv_sum: 8 * u64::from(batch),
        ..RankLoad::default()
    }
}

/// Decode graphs of the given sizes.
pub fn graphs(sizes: &[u32], padding: bool) -> CudaGraph {
    CudaGraph {
        padding,
        max_batch: *sizes.last().expect("a captured size"),
        batch_sizes: Some(sizes.to_vec()),
    }
}

/// Equal within `tolerance` milliseconds, absolute.
#[track_caller]
pub fn close(found: f64, wanted: f64, tolerance: f64, what: &str) {
    assert!(
        (found - wanted).abs() <= tolerance,
        "{what}: {found} where {wanted} was worked out"
    );
}

/// Equal within 1e-9 milliseconds.
#[track_caller]
pub fn exact(found: f64, wanted: f64, what: &str) {
    close(found, wanted, 1e-9, what);
}
