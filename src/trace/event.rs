//! What a profile holds, whatever wrote it: GPU work, host calls and annotations, in integer
//! nanoseconds.

use std::collections::HashMap;

/// A name of a [`Names`] table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameId(pub u32);

/// Every distinct name of a profile, once.
#[derive(Debug, Clone, Default)]
pub struct Names {
    texts: Vec<String>,
    ids: HashMap<String, NameId>,
}

impl Names {
    /// The id of `text`, new or known.
    pub fn id(&mut self, text: &str) -> NameId {
        if let Some(id) = self.ids.get(text) {
            return *id;
        }
        let id = NameId(self.texts.len() as u32);
        self.texts.push(text.to_owned());
        self.ids.insert(text.to_owned(), id);
        id
    }

    pub fn text(&self, id: NameId) -> &str {
        &self.texts[id.0 as usize]
    }
}

/// From `start_ns` to `end_ns`, both since the profile's own zero; never negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    pub start_ns: i64,
    pub end_ns: i64,
}

impl Span {
    pub fn ns(self) -> i64 {
        self.end_ns - self.start_ns
    }
}

/// What keeps a GPU busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    Kernel,
    Copy,
    Set,
    /// A whole graph replay that the profile holds as one interval.
    GraphReplay,
}

/// One piece of GPU work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuEvent {
    pub span: Span,
    pub work: Work,
    pub device: u32,
    pub stream: u64,
    /// Ties the work to the host call that launched it.
    pub correlation: Option<u64>,
    /// Launched by a graph launch rather than by a call of its own.
    pub in_graph: bool,
    pub name: NameId,
}

/// What a host call does to the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Call {
    Launch,
    GraphLaunch,
    /// Asks for a copy or a set.
    Transfer,
    /// Blocks the thread until GPU work is done: stream, event or device synchronisation, and
    /// copies that block.
    Synchronise,
    /// Records an event in a stream.
    EventRecord,
    /// Makes a stream wait for an event.
    StreamWait,
    Other,
}

/// One call of the CUDA runtime or driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostEvent {
    pub span: Span,
    pub call: Call,
    pub thread: u64,
    pub correlation: Option<u64>,
    /// Stream the call names, where the profile says.
    pub stream: Option<u64>,
    pub name: NameId,
}

/// A range that a program or framework marked on a host thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    pub span: Span,
    pub kind: MarkKind,
    pub thread: u64,
    pub name: NameId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MarkKind {
    /// NVTX or a user annotation, profiler steps among them.
    Annotation,
    /// An op of the framework.
    FrameworkOp,
}

/// How graph replays were traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphTrace {
    /// The profile has no graph launch.
    None,
    /// One interval a replay.
    Whole,
    /// Every node as a kernel of its own.
    Nodes,
    /// Some of both.
    Both,
    /// Graph launches, but neither intervals nor nodes: replays are missing.
    Missing,
}

/// The profile of one process: a rank.
#[derive(Debug, Clone)]
pub struct Profile {
    /// File it was read from.
    pub file: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Rank and world size, where the profile says.
    pub rank: Option<u32>,
    pub world: Option<u32>,
    /// Operating-system process, where the profile says.
    pub process: Option<u64>,
    pub names: Names,
    /// Sorted by start, then end.
    pub gpu: Vec<GpuEvent>,
    /// Sorted by start, then end.
    pub host: Vec<HostEvent>,
    /// Sorted by start; longest first where starts are equal.
    pub marks: Vec<Mark>,
    pub graph_trace: GraphTrace,
    /// What was left out or looked odd, in words, each with a count.
    pub warnings: Vec<String>,
}
