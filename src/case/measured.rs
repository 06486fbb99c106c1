//! Measured values of op and step cases: evaluation data, no part of any scenario.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::timing::SourceCell;

/// An outcome of a step that a step case compares. Never an input of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Outcome {
    /// Start of the first GPU interval to the end of the last one, on one rank.
    GpuSpan,
    /// From the start of an iteration to the start of the next, while this step repeats.
    Iteration,
    /// Time one rank sits in collectives until its peer arrives.
    RankWait,
}

impl Outcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GpuSpan => "gpu_span",
            Self::Iteration => "iteration",
            Self::RankWait => "rank_wait",
        }
    }
}

/// A measured op time: evaluation data.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpMeasured {
    /// Names the rank.
    pub label: String,
    pub ms: f64,
    pub source: SourceCell,
}

/// A measured outcome of a step: evaluation data.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepMeasured {
    /// Names the rank.
    pub label: String,
    pub what: Outcome,
    pub ms: f64,
    pub source: SourceCell,
    /// Where set, `ms` is the value of `source` less the value of this cell.
    pub minus: Option<SourceCell>,
}
