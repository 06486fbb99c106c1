//! PyTorch profiler (Kineto) traces: Chrome-trace JSON, plain or gzip, read as a stream.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::timing::InputError;

use super::decimal::{nanoseconds, unquoted};
use super::event::{GpuEvent, MarkKind, NameId, Work};
use super::gather::{Gather, Source};
use super::json_stream::{JsonStream, parse};

/// One element of `traceEvents`. Numbers stay text: times are exact decimals, and ids may be
/// quoted.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    ph: Cow<'a, str>,
    #[serde(borrow, default)]
    cat: Cow<'a, str>,
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    pid: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tid: Option<&'a RawValue>,
    #[serde(borrow, default)]
    ts: Option<&'a RawValue>,
    #[serde(borrow, default)]
    dur: Option<&'a RawValue>,
    #[serde(borrow, default)]
    args: Option<Arguments<'a>>,
}

#[derive(Deserialize, Default)]
struct Arguments<'a> {
    #[serde(borrow, default)]
    correlation: Option<&'a RawValue>,
    #[serde(borrow, default)]
    device: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
struct Distributed {
    rank: Option<u32>,
    world_size: Option<u32>,
}

/// What an event's category makes of it. Names of both styles, as PyTorch wrote them before and
/// after version 1.12.
enum Kind {
    Gpu(Work),
    Call,
    Mark(MarkKind),
    /// A synchronisation as the GPU's side shows it: it tells the stream of the call.
    Synchronisation,
}

impl Kind {
    fn of(category: &str) -> Option<Self> {
        Some(match category {
            "kernel" | "Kernel" => Self::Gpu(Work::Kernel),
            "gpu_memcpy" | "Memcpy" => Self::Gpu(Work::Copy),
            "gpu_memset" | "Memset" => Self::Gpu(Work::Set),
            "cuda_runtime" | "cuda_driver" | "Runtime" => Self::Call,
            "user_annotation" => Self::Mark(MarkKind::Annotation),
            "cpu_op" | "Operator" => Self::Mark(MarkKind::FrameworkOp),
            "cuda_sync" => Self::Synchronisation,
            _ => return None,
        })
    }
}

/// What is known of a trace while it is read.
#[derive(Default)]
struct Trace {
    gather: Gather,
    distributed: Distributed,
    base_ns: Option<i64>,
    process: Option<u64>,
    /// Streams of synchronising calls, by correlation.
    stream_of: HashMap<u64, u64>,
    /// Threads that have a name instead of a number.
    thread_names: HashMap<NameId, u64>,
}

/// A trace, and what cut it short.
pub(super) struct KinetoTrace {
    gather: Gather,
    source: Source,
    pub ended_by: Option<InputError>,
}

impl KinetoTrace {
    /// Sorts the events into a profile once the digest of the file is known.
    pub fn into_profile(self, sha256: String) -> super::Profile {
        self.gather.finish(Source {
            sha256,
            ..self.source
        })
    }
}

/// Reads a trace from `source`, the JSON text of `file`. A fault in it ends the trace there.
pub(super) fn read(file: &Path, source: impl Read) -> KinetoTrace {
    let mut json = JsonStream::new(file, source);
    let mut trace = Trace::default();
    let ended_by = trace.document(file, &mut json).err();
    let (gather, source) = trace.finish(file);
    KinetoTrace {
        gather,
        source,
        ended_by,
    }
}

impl Trace {
    /// An object with `traceEvents`, or the bare list of events.
    fn document<R: Read>(
        &mut self,
        file: &Path,
        json: &mut JsonStream<R>,
    ) -> Result<(), InputError> {
        json.skip_byte_order_mark()?;
        if json.peek()? == Some(b'[') {
            self.events(json)?;
            return json.done();
        }
        json.expect(b'{')?;
        let mut has_events = false;
        let mut more = !json.skip(b'}')?;
        while more {
            let key: Option<String> = json.value()?;
            json.expect(b':')?;
            match key.as_deref() {
                Some("traceEvents") if json.peek()? == Some(b'[') => {
                    has_events = true;
                    self.events(json)?;
                }
                Some("distributedInfo") => {
                    self.distributed = json.value()?.unwrap_or_default();
                }
                Some("baseTimeNanoseconds") => self.base_ns = json.value()?,
                _ => drop(json.value::<IgnoredAny>()?),
            }
            more = json.another(b'}')?;
        }
        json.done()?;
        if !has_events {
            return Err(InputError::new(
                file,
                "has no `traceEvents` array: it is JSON, but no trace",
                "give what PyTorch's `export_chrome_trace` wrote",
            ));
        }
        Ok(())
    }

    fn events<R: Read>(&mut self, json: &mut JsonStream<R>) -> Result<(), InputError> {
        json.expect(b'[')?;
        let mut more = !json.skip(b']')?;
        while more {
            if json.peek()? == Some(b'{') {
                let fits = json.object(|bytes| {
                    let (event, length) = parse::<Event<'_>>(bytes)?;
                    self.event(&event);
                    Ok(length)
                })?;
                if !fits {
                    self.gather.count("events of an unknown form: left out");
                }
            } else {
                json.value::<IgnoredAny>()?;
                self.gather.count("events that are no objects: left out");
            }
            more = json.another(b']')?;
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) {
        if event.ph != "X" {
            return;
        }
        let Some(kind) = Kind::of(&event.cat) else {
            return;
        };
        let arguments = event.args.as_ref();
        let argument = |pick: fn(&Arguments<'_>) -> Option<u64>| arguments.and_then(pick);
        let correlation = argument(|args| number(args.correlation));
        let (Some(start), Some(length)) = (time(event.ts), time(event.dur)) else {
            self.gather.count("events without a time: left out");
            return;
        };
        if start.rounded || length.rounded {
            self.gather
                .count("times finer than a nanosecond: rounded to the nearest");
        }
        let Some(end_ns) = start.ns.checked_add(length.ns) else {
            self.gather.count("events without a time: left out");
            return;
        };
        let Some(span) = self.gather.span(start.ns, end_ns) else {
            return;
        };
        match kind {
            Kind::Gpu(work) => {
                let device = argument(|args| number(args.device)).or_else(|| number(event.pid));
                let Some(device) = device.and_then(|device| u32::try_from(device).ok()) else {
                    self.gather.count("GPU events without a device: left out");
                    return;
                };
                let stream = argument(|args| number(args.stream)).or_else(|| number(event.tid));
                let name = self.gather.names.id(&event.name);
                self.gather.gpu.push(GpuEvent {
                    span,
                    work,
                    device,
                    stream: stream.unwrap_or(0),
                    correlation,
                    in_graph: false,
                    name,
                });
            }
            Kind::Call => {
                self.process = self.process.or_else(|| number(event.pid));
                let thread = self.thread(event.tid);
                self.gather
                    .host_call(span, thread, correlation, &event.name);
            }
            Kind::Mark(kind) => {
                let thread = self.thread(event.tid);
                let name = self.gather.names.id(&event.name);
                self.gather.mark(span, kind, thread, name);
            }
            Kind::Synchronisation => {
                let stream = argument(|args| number(args.stream));
                self.stream_of.extend(correlation.zip(stream));
            }
        }
    }

    /// The thread's number; threads with a name are numbered from the top.
    fn thread(&mut self, tid: Option<&RawValue>) -> u64 {
        let text = tid.map_or("", |tid| unquoted(tid.get()));
        if let Ok(number) = text.parse::<i64>() {
            // Some releases write ids that overflowed as negative numbers.
            return number.cast_unsigned();
        }
        let name = self.gather.names.id(text);
        let next = u64::MAX - self.thread_names.len() as u64;
        *self.thread_names.entry(name).or_insert(next)
    }

    fn finish(mut self, file: &Path) -> (Gather, Source) {
        for event in &mut self.gather.host {
            if let Some(stream) = event.correlation.and_then(|id| self.stream_of.get(&id)) {
                event.stream = Some(*stream);
            }
        }
        if let Some(base_ns) = self.base_ns {
            self.gather.shift(base_ns);
        }
        let source = Source {
            file: file.display().to_string(),
            rank: self.distributed.rank,
            world: self.distributed.world_size,
            process: self.process,
            ..Source::default()
        };
        (self.gather, source)
    }
}

fn time(raw: Option<&RawValue>) -> Option<super::decimal::Nanoseconds> {
    nanoseconds(raw?.get())
}

/// A whole number, plain or quoted.
fn number(raw: Option<&RawValue>) -> Option<u64> {
    unquoted(raw?.get()).parse().ok()
}
