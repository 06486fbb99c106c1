//! The client, the schedulers and their controls: from a scenario to TTFT and TPOT.

mod capacity;
mod client;
mod evidence;
mod lanes;
mod lengths;
mod log;
mod metrics;
mod predict;
mod record;
mod sglang;
mod trtllm;

pub use capacity::{KvCapacity, token_bytes, weight_bytes};
pub use evidence::{Iteration, OpPrediction, OpShare, StepPrediction};
pub use lengths::draw as draw_lengths;
pub use log::{IterationRecord, RankRecord, RankRecords, RequestRecord, StepKind, StepLog};
pub use metrics::{Metric, Quantile};
pub use predict::{Outcome, Prediction, Replayer, RequestWay};
pub use record::{Detail, Doing, On, Slice, SliceId};
