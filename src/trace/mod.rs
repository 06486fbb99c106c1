//! Profiles of real runs: readers of Nsight Systems and PyTorch (Kineto) traces.

mod calls;
mod decimal;
mod event;
mod gather;
mod json_stream;
mod kineto;
mod nsys;
mod read;

pub use event::{
    Call, GpuEvent, GraphTrace, HostEvent, Mark, MarkKind, NameId, Names, Profile, Span, Work,
};
pub use read::{Reading, read, read_partial};
