//! Steps on the lanes: dependencies, waits, critical path, parts, receipt.

mod composer;
mod explicit;
mod fast;
mod fault;
mod lanes;
mod path;
mod resolve;

pub use composer::{Composer, Gap, Method, RequestTimes};
pub use explicit::{After, Deadlock, Ran, Schedule, WorkId};
#[doc(hidden)]
pub use fault::Fault;
pub use lanes::{LaneStart, OpRun, PathStart, StepPath, StepTimes};
pub use path::{Node, NodeId, Part, PathTerm, Paths, Receipt, ReceiptLine, Stamp, Stretch};
