//! Op tables and host rows: lookup and blending.

mod database;
mod grid;
mod host;
pub mod import;
pub mod keeps;
mod kernel;
mod pricer;
pub mod table;

pub use database::{Database, GpuMemory};
pub use grid::{Anchor, Term};
pub use host::{HostKey, HostRows, HostTime, kernel_shape, read_source_cells};
pub use kernel::{AttentionKey, Collective, DeltanetPart, MoeKernel, OpKey, Refusal};
pub use pricer::{Lookup, LookupId, OpId, Pricer, Quantity};
