//! The client, the schedulers and their controls: from a scenario to TTFT and TPOT.

mod evidence;
mod lengths;
mod log;
mod metrics;
mod predict;
mod trtllm;

pub use evidence::{OpPrediction, OpShare, StepPrediction};
pub use lengths::draw as draw_lengths;
pub use log::{IterationRecord, RankRecord, RequestRecord, StepKind, StepLog};
pub use metrics::{Metric, Quantile};
pub use predict::{Outcome, Prediction, Replayer, RequestWay};
