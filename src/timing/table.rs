//! An op table in memory: columns of one benchmark table, latency in milliseconds.

use std::path::PathBuf;
use std::sync::Arc;

/// The values of one column, one per row.
#[derive(Debug, Clone, PartialEq)]
pub enum Column {
    /// Equal values share one allocation.
    Text(Vec<Arc<str>>),
    Int(Vec<i64>),
    Float(Vec<f64>),
    /// A column that holds a null (at `row`, from one), is nested or has a type that op tables do
    /// not use. It only becomes an error when somebody asks for it.
    Unusable {
        row: Option<u64>,
        why: String,
    },
}

/// A table in memory. Every column has `rows` values; `names` and `columns` run in parallel.
#[derive(Debug, Clone, PartialEq)]
pub struct OpTable {
    /// Where it was read from: the name that errors give.
    pub file: PathBuf,
    /// `system/family/backend/version/table`, the name that receipts use; empty until the database
    /// that holds the table names it.
    pub label: String,
    pub names: Vec<String>,
    pub columns: Vec<Column>,
    pub rows: usize,
}
