//! Located input errors: what is wrong, where, and what to do about it.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where in the input a fault lies. Lines, columns and rows count from one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    pub file: PathBuf,
    pub line: Option<u64>,
    pub column: Option<u64>,
    /// Row of a table (Parquet, CSV, JSON Lines).
    pub row: Option<u64>,
    /// Field or column name.
    pub field: Option<String>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
            if let Some(column) = self.column {
                write!(f, ":{column}")?;
            }
        }
        if let Some(row) = self.row {
            write!(f, " row {row}")?;
        }
        if let Some(field) = &self.field {
            write!(f, " `{field}`")?;
        }
        Ok(())
    }
}

/// Bad input. The binary maps it to exit code 5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputError {
    /// Boxed: results that carry an error stay small.
    pub place: Box<Place>,
    /// What is wrong: a lowercase fragment.
    pub what: String,
    /// What the reader can do about it: a lowercase fragment.
    pub help: String,
}

impl InputError {
    pub fn new(file: impl AsRef<Path>, what: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            place: Box::new(Place {
                file: file.as_ref().to_path_buf(),
                ..Place::default()
            }),
            what: what.into(),
            help: help.into(),
        }
    }

    pub fn at(mut self, line: u64, column: u64) -> Self {
        self.place.line = Some(line);
        self.place.column = Some(column);
        self
    }

    pub fn row(mut self, row: u64) -> Self {
        self.place.row = Some(row);
        self
    }

    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.place.field = Some(field.into());
        self
    }
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)?;
        if !self.help.is_empty() {
            write!(f, "; {}", self.help)?;
        }
        Ok(())
    }
}

impl std::error::Error for InputError {}
