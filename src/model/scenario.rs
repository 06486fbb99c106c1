//! Everything a prediction may see of a case. By construction it holds no measured value, no case
//! path and no point number.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::perfdb::MoeKernel;
use crate::timing::Topology;

/// One serving configuration under one workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scenario {
    pub model: String,
    pub system: String,
    pub backend: Backend,
    pub topology: Topology,
    pub precision: Precision,
    pub kernels: Kernels,
    /// Host CPU, where the case records one.
    pub host_cpu: Option<String>,
    pub workload: Workload,
    pub serving: Serving,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Backend {
    pub name: BackendName,
    pub version: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BackendName {
    Trtllm,
    Sglang,
}

impl BackendName {
    pub fn name(self) -> &'static str {
        match self {
            Self::Trtllm => "trtllm",
            Self::Sglang => "sglang",
        }
    }
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Precisions by their name in the op tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Precision {
    pub gemm: String,
    pub moe: String,
    pub kv_cache: String,
    pub attention: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Kernels {
    pub moe: MoeKernel,
    /// All-reduce, residual add and norm in one kernel.
    pub allreduce_fusion: bool,
}

/// Closed loop: `concurrency` requests at once, a new one at each completion.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Workload {
    pub isl: u32,
    pub osl: u32,
    pub concurrency: u32,
    pub requests: u32,
    /// Lengths are drawn from `[int(L * ratio), L]`.
    pub length_ratio: f64,
    pub seed: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Serving {
    /// Requests in flight per attention rank group.
    pub max_batch_size: u32,
    /// Context plus generation tokens of one iteration.
    pub max_num_tokens: u32,
    pub overlap: bool,
    pub cuda_graph: Option<CudaGraph>,
    pub piecewise: Option<Piecewise>,
    pub batch_wait: Option<BatchWait>,
    pub balance: Option<Balance>,
    pub capacity: Capacity,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CudaGraph {
    pub padding: bool,
    /// Captured batch sizes, ascending.
    pub batch_sizes: Vec<u32>,
}

impl CudaGraph {
    /// The captured batch that serves `batch` generation requests, if one does.
    pub fn captured(&self, batch: u32) -> Option<u32> {
        let at = self.batch_sizes.partition_point(|size| *size < batch);
        let size = *self.batch_sizes.get(at)?;
        (size == batch || self.padding).then_some(size)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Piecewise {
    /// Captured token counts, ascending.
    pub token_counts: Vec<u32>,
}

impl Piecewise {
    /// The captured token count that serves `tokens`, padding up.
    pub fn captured(&self, tokens: u32) -> Option<u32> {
        let at = self.token_counts.partition_point(|count| *count < tokens);
        self.token_counts.get(at).copied()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BatchWait {
    pub timeout_iters: u32,
    pub max_tokens_ratio: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Balance {
    pub batching_wait_iters: u32,
    pub timeout_iters: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Capacity {
    GuaranteedNoEvict,
    MaxUtilization,
}
