//! The timing contract: what a measured time is, where it came from and what it may be used for.

mod execution;
mod fault;

pub use execution::{Boundary, CaptureOutcome, Execution, Observer};
pub use fault::{InputError, Place};
