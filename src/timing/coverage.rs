//! Coverage: what a prediction rests on, and what it lacks.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Which rows a prediction may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Measured rows, GPU rows and rooflines. Missing host time is left out: a floor.
    Strict,
    /// Derived host and boundary rows too, each flagged.
    Estimate,
}

impl Policy {
    pub const ALL: [Self; 2] = [Self::Strict, Self::Estimate];

    pub fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Estimate => "estimate",
        }
    }
}

/// How well the host time of eager steps is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostClass {
    /// Rows of the same runtime, version, model, topology and host CPU.
    Measured,
    /// The same, but the case does not record its host CPU.
    MeasuredHostUnrecorded,
    /// From another topology, version, model, system or CPU.
    Derived,
    /// No row: the prediction is a floor.
    Missing,
    /// No step runs eagerly.
    NotNeeded,
}

impl HostClass {
    pub fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::MeasuredHostUnrecorded => "measured, host unrecorded",
            Self::Derived => "derived",
            Self::Missing => "missing",
            Self::NotNeeded => "no eager step",
        }
    }
}

/// What the rows of one prediction cover. Everything is ordered, so text made of it is stable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Coverage {
    pub host: HostClass,
    /// Boundaries that no row covers, with the step kind they are missing for.
    pub missing: BTreeSet<String>,
    /// Derived host and boundary rows in use, with their rule.
    pub derived: BTreeMap<String, String>,
    /// Per GPU op: how its lookups were anchored (`hit`, `blended`, `extended`, transfers).
    pub gpu: BTreeMap<String, BTreeSet<String>>,
    /// GPU rows of unknown execution mode in use.
    pub kernel_mode_unknown: u64,
    /// Merged duplicate rows in use.
    pub duplicate_rows: u64,
    /// Every observer the prediction rests on.
    pub observers: BTreeSet<String>,
}
