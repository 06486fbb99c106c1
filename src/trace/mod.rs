//! Profiles in, timelines out.

mod event;
mod picture;
mod timeline;

pub use event::{
    Call, GpuEvent, GraphTrace, HostEvent, Mark, MarkKind, NameId, Names, Profile, Span, Work,
};
pub use picture::draw;
pub use timeline::{Instant, Kind, Slice, SliceIndex, Timeline, TrackId};
