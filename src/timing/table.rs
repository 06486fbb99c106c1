//! An op table in memory: columns of one benchmark table, latency in milliseconds.

use std::fmt;
use std::ops::Index;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// The values of one column, one per row.
#[derive(Debug, Clone, PartialEq)]
pub enum Column {
    /// Equal values share one allocation.
    Text(Vec<Arc<str>>),
    Int(Vec<i64>),
    Float(Vec<f64>),
    /// A column that cannot be read, holds a null (at `row`, from one), is nested or has a type that
    /// op tables do not use. It only becomes an error when somebody asks for it.
    Unusable {
        row: Option<u64>,
        why: String,
    },
}

/// Decodes the column at a position.
pub type ReadColumn = dyn Fn(usize) -> Column + Send + Sync;

/// The columns of a table. Those of a file are decoded when they are first looked at: a lookup
/// needs about half of them.
#[derive(Clone)]
pub struct Columns {
    known: Vec<OnceLock<Column>>,
    read: Option<Arc<ReadColumn>>,
}

impl Columns {
    /// `count` columns that `read` decodes.
    pub fn on_demand(count: usize, read: Arc<ReadColumn>) -> Self {
        Self {
            known: (0..count).map(|_| OnceLock::new()).collect(),
            read: Some(read),
        }
    }

    pub fn len(&self) -> usize {
        self.known.len()
    }

    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Column> {
        (0..self.len()).map(|at| &self[at])
    }

    pub fn push(&mut self, column: Column) {
        self.known.push(column.into());
    }
}

impl Index<usize> for Columns {
    type Output = Column;

    fn index(&self, at: usize) -> &Column {
        self.known[at].get_or_init(|| match &self.read {
            Some(read) => read(at),
            None => unreachable!("only columns of a file are decoded later"),
        })
    }
}

impl<'a> IntoIterator for &'a mut Columns {
    type Item = &'a mut Column;
    type IntoIter = Box<dyn Iterator<Item = &'a mut Column> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter().count();
        Box::new(self.known.iter_mut().filter_map(OnceLock::get_mut))
    }
}

impl From<Vec<Column>> for Columns {
    fn from(columns: Vec<Column>) -> Self {
        columns.into_iter().collect()
    }
}

impl FromIterator<Column> for Columns {
    fn from_iter<T: IntoIterator<Item = Column>>(columns: T) -> Self {
        Self {
            known: columns.into_iter().map(OnceLock::from).collect(),
            read: None,
        }
    }
}

impl PartialEq for Columns {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl fmt::Debug for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.known).finish()
    }
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
    pub columns: Columns,
    pub rows: usize,
}
