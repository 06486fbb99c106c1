//! The timing contract: what a measured time is, where it came from and what it may be used for.

mod coverage;
mod evaluation;
mod execution;
mod fault;
mod file;
mod hash;
mod host_file;
mod row;
mod table;

pub use coverage::{Coverage, HostClass, Policy};
pub use evaluation::Evaluation;
pub use execution::{Boundary, CaptureOutcome, Execution, HostMode, Observer};
pub use fault::{InputError, Place};
pub use file::read_text;
pub use hash::NumberMap;
pub use host_file::{Diagnostic, HostFile, IterationCounts, ProfileCapture};
pub use row::{
    Duplicates, Origin, Provenance, Row, RowId, Rows, Samples, Scope, SourceCell, Topology,
};
pub use table::{Column, Columns, OpTable, ReadColumn};
