//! What one forward step launches: op graphs per architecture, and the scenario they are built for.

mod config;
mod plan;
mod scenario;

pub use config::ModelConfig;
pub use plan::{Launch, Module, Op, OpIndex, Plan, RankLoad, Units};
pub use scenario::{
    Backend, BackendName, Balance, BatchWait, Capacity, CudaGraph, Kernels, Piecewise, Precision,
    Scenario, Serving, Workload,
};
