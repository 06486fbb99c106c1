//! Steps on the lanes: dependencies, waits, critical path, parts, receipt.

mod composer;
mod fast;
mod fault;
mod lanes;
mod path;

pub use composer::{Composer, Gap, Method, RequestTimes};
#[doc(hidden)]
pub use fault::Fault;
pub use lanes::{LaneStart, PathStart, StepPath, StepTimes};
pub use path::{Node, NodeId, Part, PathTerm, Paths, Receipt, ReceiptLine, Stamp, Stretch};
