//! What one forward step launches: op graphs per architecture, and the scenario they are built for.

mod config;
mod plan;
mod scenario;

pub use config::{Deltanet, Latent, ModelConfig, QkNorm};
pub use plan::{Launch, Module, Op, OpIndex, Plan, RankLoad, Units};
pub use scenario::{
    AttentionDpBalance, AttentionDtype, AttentionKernel, Backend, BackendName, BatchWait, Capacity,
    Count, CudaGraph, Deployment, GemmDtype, GemmKernel, Generation, KV_BLOCK, Kernels,
    KvCacheDtype, MixedExecution, MoeDtype, OpKind, OpScenario, Piecewise, Precision, Scenario,
    Serving, StepExecution, StepScenario, Workload, captured,
};
