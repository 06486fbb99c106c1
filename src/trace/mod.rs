//! Profiles of real runs: readers of Nsight Systems and PyTorch (Kineto) traces. Timelines out.

mod calls;
mod decimal;
mod event;
mod gather;
mod json_stream;
mod kineto;
mod nsys;
mod picture;
mod read;
mod timeline;

pub use event::{
    Call, GpuEvent, GraphTrace, HostEvent, Mark, MarkKind, NameId, Names, Profile, Span, Work,
};
pub use picture::draw;
pub use read::{Reading, read, read_partial};
pub use timeline::{Instant, Kind, Slice, SliceIndex, Timeline, TrackId};
