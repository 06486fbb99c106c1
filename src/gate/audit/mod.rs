//! The audit: a second reckoning of a prediction, with code of its own.
//!
//! From the scenario, the model config, the step log's decisions and the rows it recounts every
//! launch, looks every row up again, plays the clock forward and must arrive at the receipt.
//!
//! The composer hangs nodes on a tree and sweeps weights back from the metrics; here every moment
//! carries its whole path, the times each (part, row) lies on it, and a metric is a difference of
//! two such moments. Nothing of `perfdb`, of the plan or of the composer is used: only the timing
//! contract, the plain types of the scenario, the log, and the receipt that is under audit.
//!
//! Decisions are taken from the log and held to the lengths, the order of requests and the
//! scenario's limits. One is taken as it stands: that the KV cache had, or had not, room. Its size
//! is in no row and in no config.

mod auditor;
mod captured;
mod client;
mod fault;
mod forward;
mod host;
mod lookup;
mod missing;
mod moment;
mod sglang;
mod sources;
mod step;
mod trtllm;
mod verdict;

pub use auditor::audit;
pub use fault::{AuditFault, AuditReport, Check, check_weights};
