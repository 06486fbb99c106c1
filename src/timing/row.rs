//! Timing rows: boundary + execution identity + where and what + shape + samples + provenance.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Boundary, CaptureOutcome, Execution, NumberMap, Observer, OpTable};

/// A cell of a source table: the measured value a row was copied from.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceCell {
    pub table: String,
    pub row: String,
    pub column: String,
}

impl fmt::Display for SourceCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}, {}]", self.table, self.row, self.column)
    }
}

/// Why a row's value is what it is. There is no `assumed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Provenance {
    /// Copied from one cell of a source table.
    Measured { source: SourceCell },
    /// Mean of some source cells minus the mean of others: a difference of two measurements.
    Derived {
        rule: String,
        plus: Vec<SourceCell>,
        minus: Vec<SourceCell>,
    },
    /// Counted work over a system's published peak, without an efficiency factor.
    Roofline { peak: String },
}

/// Samples behind a row. Times in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Samples {
    pub mean_ms: f64,
    /// Number of samples; absent where the source does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_ms: Option<f64>,
    pub observer: Observer,
    /// SHA-256 of the raw artefact, where it is at hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artefact_sha256: Option<String>,
}

/// How the GPUs share the model: sizes of attention tensor and data parallelism and of the
/// experts' tensor and expert parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    pub tp: u32,
    pub dp: u32,
    pub moe_tp: u32,
    pub moe_ep: u32,
}

impl Topology {
    /// GPUs in use.
    pub fn ranks(self) -> u32 {
        self.tp * self.dp
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp{}", self.tp)?;
        if self.dp > 1 {
            write!(f, " dp{}", self.dp)?;
        }
        write!(f, " moe_tp{} moe_ep{}", self.moe_tp, self.moe_ep)
    }
}

/// Where a host or boundary row was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    pub runtime: String,
    /// Exact version: a row of another version is another row.
    pub version: String,
    pub system: String,
    pub model: String,
    pub topology: Topology,
    /// Host CPU model.
    pub cpu: String,
    /// Logical CPUs the process was allowed to run on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_cpus: Option<u32>,
}

/// One host or boundary timing row, or a kernel row of a known execution mode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub id: String,
    pub boundary: Boundary,
    pub execution: Execution,
    #[serde(default = "succeeded")]
    pub capture: CaptureOutcome,
    /// Module that was timed, for example `forward`; of a kernel row, the op's name in the plan.
    pub module: String,
    /// Step phase the samples cover; `prefill_or_mixed`: steps with prompts only.
    pub phase: String,
    /// Rank the row belongs to; absent where it holds for the server as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Further boundaries whose time is inside this row, where the source cannot tell them apart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub includes: Vec<Boundary>,
    /// Shape the samples were taken at, for example `isl: 1024`. A host row with `requests` holds
    /// for its own deployment only. A kernel row of decode attention needs `requests`, `mean_kv`
    /// and `layers`, the layers that it sums over.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shape: BTreeMap<String, u64>,
    pub samples: Samples,
    pub provenance: Provenance,
    /// Filled in by the loader from the file's head.
    #[serde(skip)]
    pub scope: Option<Arc<Scope>>,
}

impl Row {
    /// Whether the samples cover steps without prompts.
    pub fn covers_decode(&self) -> bool {
        self.phase != "prefill_or_mixed"
    }

    /// Whether predictions may take the row. A diagnostic observer slows the host that it watches;
    /// the GPU's own clock around a kernel does not run differently for it.
    pub fn composes(&self) -> bool {
        self.boundary == Boundary::GpuKernel || !self.samples.observer.is_diagnostic()
    }
}

fn succeeded() -> CaptureOutcome {
    CaptureOutcome::Succeeded
}

/// Identity of a row within one [`Rows`] store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(pub u32);

/// Where the value of a stored row comes from.
#[derive(Debug, Clone)]
pub enum Origin {
    /// A row of an op table. Duplicate keys were merged: `duplicates` holds count, min and max.
    Op {
        table: Arc<OpTable>,
        index: u32,
        duplicates: Option<Duplicates>,
    },
    /// A host or boundary row.
    Host(Arc<Row>),
    /// Time per byte at the system's published memory bandwidth.
    Roofline {
        system: Arc<str>,
        peak: &'static str,
    },
}

/// Rows of an imported table that shared one key and became one row: the mean is its value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Duplicates {
    pub count: u32,
    pub min_ms: f64,
    pub max_ms: f64,
}

/// Every row that one prediction may rest on. The only place a time enters a prediction.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    ms: Vec<f64>,
    origins: Vec<Origin>,
    /// Rows of op tables by the table's address and position: a row stands here once, whoever uses it.
    of_tables: NumberMap<(usize, u32), RowId>,
}

impl Rows {
    pub fn push(&mut self, ms: f64, origin: Origin) -> RowId {
        let id = RowId(self.ms.len() as u32);
        self.ms.push(ms);
        self.origins.push(origin);
        id
    }

    /// A row of an op table; the same id each time it is asked for.
    pub fn op_row(
        &mut self,
        table: &Arc<OpTable>,
        index: u32,
        ms: f64,
        duplicates: Option<Duplicates>,
    ) -> RowId {
        let key = (Arc::as_ptr(table).addr(), index);
        if let Some(known) = self.of_tables.get(&key) {
            return *known;
        }
        let id = self.push(
            ms,
            Origin::Op {
                table: Arc::clone(table),
                index,
                duplicates,
            },
        );
        self.of_tables.insert(key, id);
        id
    }

    pub fn ms(&self, id: RowId) -> f64 {
        self.ms[id.0 as usize]
    }

    pub fn origin(&self, id: RowId) -> &Origin {
        &self.origins[id.0 as usize]
    }

    pub fn len(&self) -> usize {
        self.ms.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ms.is_empty()
    }

    pub fn ids(&self) -> impl Iterator<Item = RowId> + use<> {
        (0..self.ms.len() as u32).map(RowId)
    }

    /// Multiplies the rows that `pick` selects: the null and homogeneity proofs, what-if studies
    /// and planted faults.
    pub fn scale(&mut self, factor: f64, pick: impl Fn(&Origin) -> bool) {
        for (ms, origin) in self.ms.iter_mut().zip(&self.origins) {
            if pick(origin) {
                *ms *= factor;
            }
        }
    }

    /// A name that a reader can find the row by.
    pub fn describe(&self, id: RowId) -> String {
        match self.origin(id) {
            Origin::Op { table, index, .. } => {
                format!("{}#{}", table.label, index + 1)
            }
            Origin::Host(row) => format!("host/{}", row.id),
            Origin::Roofline { system, peak } => format!("{system}/{peak}"),
        }
    }
}
