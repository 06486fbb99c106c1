//! A timeline that knows neither predictions nor profiles, and its Chrome-trace JSON, which
//! Perfetto (ui.perfetto.dev) and chrome://tracing open.

use std::io::{self, Write};

use serde_json::{Map, Value, json};

use crate::compose::Part;

use super::event::Span;

/// A row of a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrackId(usize);

/// A slice of a [`Timeline`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceIndex(usize);

/// What a slice shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Time of a part.
    Part(Part),
    /// Inside a collective until the last rank is there: in no sum.
    PeerWait,
    /// A host until the GPU has finished: in no sum.
    GpuWait,
    /// An iteration of a scheduler.
    Iteration,
    /// A request from its schedule to its first token.
    Prefill,
    /// A request's tokens after the first.
    Decode,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Part(part) => part.name(),
            Self::PeerWait => "peer_wait",
            Self::GpuWait => "gpu_wait",
            Self::Iteration => "iteration",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// Whether the slice is waiting, not work.
    pub fn waits(self) -> bool {
        matches!(self, Self::PeerWait | Self::GpuWait)
    }
}

/// A stretch of a track.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    pub track: TrackId,
    pub kind: Kind,
    pub name: String,
    pub span: Span,
    /// What a viewer shows of it when asked.
    pub args: Vec<(&'static str, Value)>,
}

/// A moment on a track.
#[derive(Debug, Clone, PartialEq)]
pub struct Instant {
    pub track: TrackId,
    pub name: String,
    pub at_ns: i64,
}

#[derive(Debug, Clone, PartialEq)]
struct Track {
    process: usize,
    name: String,
}

/// Slices on tracks, tracks in processes, and paths through the slices. Integer nanoseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timeline {
    processes: Vec<String>,
    tracks: Vec<Track>,
    slices: Vec<Slice>,
    instants: Vec<Instant>,
    paths: Vec<Vec<SliceIndex>>,
}

impl Timeline {
    /// A new track at the end of a process, which is new where its name is.
    pub fn track(&mut self, process: &str, name: &str) -> TrackId {
        let process = match self.processes.iter().position(|known| known == process) {
            Some(at) => at,
            None => {
                self.processes.push(process.to_owned());
                self.processes.len() - 1
            }
        };
        self.tracks.push(Track {
            process,
            name: name.to_owned(),
        });
        TrackId(self.tracks.len() - 1)
    }

    /// Adds a slice. Slices of one track must not overlap.
    pub fn slice(&mut self, slice: Slice) -> SliceIndex {
        self.slices.push(slice);
        SliceIndex(self.slices.len() - 1)
    }

    pub fn instant(&mut self, instant: Instant) {
        self.instants.push(instant);
    }

    /// A path through slices in order of time, drawn as arrows.
    pub fn path(&mut self, slices: Vec<SliceIndex>) {
        self.paths.push(slices);
    }

    /// Tracks in order, each with its process and name.
    pub fn tracks(&self) -> impl Iterator<Item = (TrackId, &str, &str)> {
        (self.tracks.iter().enumerate()).map(|(at, track)| {
            let process = self.processes[track.process].as_str();
            (TrackId(at), process, track.name.as_str())
        })
    }

    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    pub fn get(&self, slice: SliceIndex) -> &Slice {
        &self.slices[slice.0]
    }

    pub fn paths(&self) -> &[Vec<SliceIndex>] {
        &self.paths
    }

    /// Writes Chrome-trace JSON, one event a line.
    pub fn write_chrome(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        let mut first = true;
        let mut event = |value: Value| -> io::Result<()> {
            let comma = if std::mem::take(&mut first) { "" } else { "," };
            write!(out, "{comma}\n{value}")
        };
        for (pid, process) in self.processes.iter().enumerate() {
            let named = json!({ "name": process });
            event(json!({ "ph": "M", "name": "process_name", "pid": pid, "args": named }))?;
            let order = json!({ "sort_index": pid });
            event(json!({ "ph": "M", "name": "process_sort_index", "pid": pid, "args": order }))?;
        }
        for (tid, track) in self.tracks.iter().enumerate() {
            for (name, args) in [
                ("thread_name", json!({ "name": track.name })),
                ("thread_sort_index", json!({ "sort_index": tid })),
            ] {
                event(json!({
                    "ph": "M", "name": name, "pid": track.process, "tid": tid, "args": args
                }))?;
            }
        }
        for slice in &self.slices {
            let mut object = self.at(slice.track, slice.span.start_ns);
            object.insert("ph".to_owned(), json!("X"));
            object.insert("name".to_owned(), json!(slice.name));
            object.insert("cat".to_owned(), json!(slice.kind.name()));
            object.insert("dur".to_owned(), micros(slice.span.ns()));
            if !slice.args.is_empty() {
                let args: Map<String, Value> = (slice.args.iter())
                    .map(|(key, value)| ((*key).to_owned(), value.clone()))
                    .collect();
                object.insert("args".to_owned(), Value::Object(args));
            }
            event(Value::Object(object))?;
        }
        for instant in &self.instants {
            let mut object = self.at(instant.track, instant.at_ns);
            object.insert("ph".to_owned(), json!("i"));
            object.insert("s".to_owned(), json!("t"));
            object.insert("name".to_owned(), json!(instant.name));
            event(Value::Object(object))?;
        }
        for (id, path) in self.paths.iter().enumerate() {
            for (at, slice) in path.iter().enumerate() {
                let slice = self.get(*slice);
                // Inside the slice, so that a viewer binds the arrow to it and to no neighbour.
                let inside = slice.span.start_ns + slice.span.ns() / 2;
                let mut object = self.at(slice.track, inside);
                let phase = match at {
                    0 => "s",
                    at if at + 1 == path.len() => "f",
                    _ => "t",
                };
                object.insert("ph".to_owned(), json!(phase));
                object.insert("id".to_owned(), json!(id));
                object.insert("bp".to_owned(), json!("e"));
                object.insert("name".to_owned(), json!("critical path"));
                object.insert("cat".to_owned(), json!("critical_path"));
                event(Value::Object(object))?;
            }
        }
        writeln!(out, "\n]}}")
    }

    fn at(&self, track: TrackId, ns: i64) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("pid".to_owned(), json!(self.tracks[track.0].process));
        object.insert("tid".to_owned(), json!(track.0));
        object.insert("ts".to_owned(), micros(ns));
        object
    }
}

/// Nanoseconds as microseconds with three decimals, as far as a double holds them exactly enough
/// to be read back.
fn micros(ns: i64) -> Value {
    json!(ns as f64 / 1e3)
}
