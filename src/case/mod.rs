//! The YAML case: schema, defaults, and validation with line and column.

mod date;
mod import;
mod load;
mod measured;
mod schema;
mod tree;
mod validate;

pub use date::Date;
pub use import::{ImportRequest, Imported, Note, NoteKind, import, import_bytes};
pub use load::{Case, CaseFile, FILE_BYTES_MAX, OpCase, Silicon, StepCase, Tolerance};
pub use measured::{OpMeasured, Outcome, StepMeasured};
pub use schema::json_schema;
pub use tree::Tree;
pub use validate::ModelDims;
