//! Evaluation measurements: what a serving run showed. Composing cannot take them.

use serde::{Deserialize, Serialize};

use super::{Observer, SourceCell};

/// An outcome of a real run: client TTFT and TPOT, queue time, schedule to first token, a step's
/// device interval. It is compared with a prediction and is never an input of one: nothing in
/// `perfdb`, `compose` or `replay` accepts this type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    pub name: String,
    pub value_ms: f64,
    pub observer: Observer,
    pub source: SourceCell,
}
