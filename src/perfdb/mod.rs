//! Op tables and host rows: lookup and blending.

pub mod import;
pub mod table;
