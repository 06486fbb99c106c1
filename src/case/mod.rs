//! The YAML case: schema, defaults, and validation with line and column.

mod date;
mod load;
mod scenario;
mod schema;
mod tree;
mod validate;

pub use date::Date;
pub use load::{Case, CaseFile, FILE_BYTES_MAX, OpCase, Silicon, StepCase, Tolerance};
pub use scenario::{
    AttentionDpBalance, AttentionDtype, AttentionKernel, Backend, BackendName, BatchWait, Capacity,
    Cell, Count, CudaGraph, Deployment, GemmDtype, Generation, Kernels, KvCacheDtype, MoeDtype,
    MoeKernel, OpKind, OpMeasured, OpScenario, Outcome, Parallel, Piecewise, Precision, Scenario,
    Serving, StepExecution, StepMeasured, StepScenario, Workload,
};
pub use schema::json_schema;
pub use tree::Tree;
pub use validate::ModelDims;
