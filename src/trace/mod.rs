//! Profiles of real runs: Nsight Systems exports and PyTorch (Kineto) traces in, the accounting of
//! what their devices and hosts did, their replay on the lanes, and timelines out.

mod blocking;
mod calls;
mod collective;
mod decimal;
mod event;
mod gather;
mod idle;
mod import;
mod interval;
mod iteration;
mod json_stream;
mod kineto;
mod launch;
mod links;
mod nsys;
mod paired;
mod picture;
mod read;
mod replay;
mod spread;
mod summary;
mod timeline;

pub use blocking::Blocking;
pub use collective::{
    Alignment, CollectiveKernels, MatchedKind, Member, RankInCollectives, align, collective_kind,
};
pub use event::{
    Call, GpuEvent, GraphTrace, HostEvent, Mark, MarkKind, NameId, Names, Profile, Span, Work,
};
pub use idle::Idle;
pub use import::import;
pub use iteration::{Iteration, IterationOnDevice};
pub use links::ReplayRows;
pub use picture::draw;
pub use read::{Reading, read, read_partial};
pub use replay::{Composed, RankReplay, Replay, ReplayPart, StepReplay, replay};
pub use spread::Spread;
pub use summary::{
    Calls, Delay, DeviceSummary, Graphs, ProfileSummary, Summary, WorkSummary, members,
    refuse_twins, summarise,
};
pub use timeline::{Instant, Kind, Slice, SliceIndex, Timeline, TrackId};
