//! What a file of `data/host` holds.

use serde::{Deserialize, Serialize};

use super::{Row, Scope};

/// A `data/host/*.yaml` file: one scope and its rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFile {
    pub scope: Scope,
    /// Rows that predictions may be composed of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<Row>,
    /// Rows of diagnostic observers, apart from the others: no lookup finds them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnostic: Option<Diagnostic>,
}

/// Rows out of profiles, and what the profiles captured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diagnostic {
    pub profiles: Vec<ProfileCapture>,
    pub rows: Vec<Row>,
}

/// How much of a run a profile shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileCapture {
    /// File name, without its folder.
    pub file: String,
    pub sha256: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    pub gpu_events: usize,
    /// Of them, work without a launch call in the profile.
    pub gpu_events_without_launch: usize,
    /// How graph replays were traced: `none`, `whole`, `nodes`, `both` or `missing`.
    pub graph_trace: String,
    pub graph_launches: usize,
    /// Of them, launches with their replay or its nodes in the profile.
    pub graph_launches_with_work: usize,
    pub iterations: IterationCounts,
}

/// Iterations by execution mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IterationCounts {
    pub eager: usize,
    pub full_graph: usize,
    pub unknown: usize,
}
