//! Nsight Systems SQLite exports. Times are nanoseconds.
//!
//! Tables are written when they are first needed, and columns differ between releases: whatever is
//! missing is taken as unknown, and only `start` and `end` are required of a table.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OpenFlags, Statement};

use crate::timing::InputError;

use super::event::{Call, GpuEvent, HostEvent, MarkKind, Profile, Work};
use super::gather::{Gather, Source};

const KERNEL: &str = "CUPTI_ACTIVITY_KIND_KERNEL";
const COPY: &str = "CUPTI_ACTIVITY_KIND_MEMCPY";
const SET: &str = "CUPTI_ACTIVITY_KIND_MEMSET";
const REPLAY: &str = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
const RUNTIME: &str = "CUPTI_ACTIVITY_KIND_RUNTIME";
const SYNCHRONISATION: &str = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION";
const NVTX: &str = "NVTX_EVENTS";
const STRINGS: &str = "StringIds";
const COPY_KINDS: &str = "ENUM_CUDA_MEMCPY_OPER";
/// Tables of GPU work, and what they hold.
const GPU_TABLES: [(&str, Work); 4] = [
    (KERNEL, Work::Kernel),
    (COPY, Work::Copy),
    (SET, Work::Set),
    (REPLAY, Work::GraphReplay),
];
const WANTED: [&str; 7] = [KERNEL, COPY, SET, REPLAY, RUNTIME, SYNCHRONISATION, NVTX];
/// `eventType` of NVTX ranges: push and pop on one thread, start and end on any.
const NVTX_RANGES: [i64; 2] = [59, 60];
/// `syncType` of a stream that waits for an event: nobody is blocked.
const STREAM_WAITS_EVENT: i64 = 2;
/// Bytes 18 and 19 of a database's header where it is written through a log (WAL).
const WRITTEN_THROUGH_A_LOG: u8 = 2;
/// `streamId` of a synchronisation with no particular stream.
const NO_STREAM: u64 = u32::MAX as u64;

/// Reads every process of an export.
///
/// # Errors
/// The database is damaged, or no table of an export is in it.
pub(super) fn read(file: &Path, sha256: &str) -> Result<Vec<Profile>, InputError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // Looked for before SQLite makes one.
    let log_is_missing = lacks_its_log(file);
    let database = Connection::open_with_flags(file, flags)
        .map_err(|error| damaged(file, "the database", &error))?;
    let export = Export::open(file, database, log_is_missing)?;
    let mut processes = Processes::new();
    for (table, work) in GPU_TABLES {
        export.gpu_work(table, work, &mut processes)?;
    }
    export.calls(&mut processes)?;
    export.synchronisations(&mut processes)?;
    export.ranges(&mut processes)?;
    if processes.is_empty() {
        // Tables without rows: a profile that says it is empty.
        processes.insert(None, Gather::default());
    }
    Ok(processes
        .into_iter()
        .map(|(process, gather)| {
            gather.finish(Source {
                file: file.display().to_string(),
                sha256: sha256.to_owned(),
                process,
                ..Source::default()
            })
        })
        .collect())
}

/// By process; `None`: rows that name no process, in an export of several.
type Processes = BTreeMap<Option<u64>, Gather>;

fn damaged(file: &Path, what: &str, error: &rusqlite::Error) -> InputError {
    if matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    ) {
        return InputError::new(
            file,
            format!("cannot read {what}: another program has the database open and locked"),
            "close that program, or copy the file and read the copy",
        );
    }
    InputError::new(
        file,
        format!("cannot read {what}: {error}"),
        "the file is damaged or of an unknown release: export it again with `nsys export --type \
         sqlite`",
    )
}

/// Whether the header says that the database is written through a log, and the log is not beside it.
fn lacks_its_log(file: &Path) -> bool {
    let mut header = [0; 20];
    let read = File::open(file).and_then(|mut opened| opened.read_exact(&mut header));
    let mut log = file.as_os_str().to_owned();
    log.push("-wal");
    read.is_ok() && header[18..] == [WRITTEN_THROUGH_A_LOG; 2] && !Path::new(&log).exists()
}

/// An export, open for reading.
struct Export<'a> {
    file: &'a Path,
    database: Connection,
    tables: BTreeSet<String>,
    strings: HashMap<i64, String>,
    /// The process of rows that name none, where the export has a single one.
    only_process: Option<u64>,
}

/// A row of a table, by the position of the columns that were asked for.
struct Fields<'a>(&'a rusqlite::Row<'a>);

impl Fields<'_> {
    fn int(&self, column: usize) -> Option<i64> {
        match self.0.get_ref(column) {
            Ok(ValueRef::Integer(number)) => Some(number),
            _ => None,
        }
    }

    fn id(&self, column: usize) -> Option<u64> {
        self.int(column).and_then(|number| number.try_into().ok())
    }

    fn text(&self, column: usize) -> Option<&str> {
        match self.0.get_ref(column) {
            Ok(ValueRef::Text(text)) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }
}

/// The operating system's number in a `globalPid` or `globalTid`.
fn process_of(global: i64) -> u64 {
    (global >> 24).cast_unsigned() & 0xFF_FFFF
}

/// The operating system's thread in a `globalTid`; 0: unknown.
fn thread_of(global: Option<i64>) -> u64 {
    global.map_or(0, |global| global.cast_unsigned() & 0xFF_FFFF)
}

impl<'a> Export<'a> {
    fn open(
        file: &'a Path,
        database: Connection,
        log_is_missing: bool,
    ) -> Result<Self, InputError> {
        let mut export = Self {
            file,
            database,
            tables: BTreeSet::new(),
            strings: HashMap::new(),
            only_process: None,
        };
        let mut tables = BTreeSet::new();
        export.rows(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')",
            "the list of tables",
            |row| tables.extend(row.text(0).map(str::to_owned)),
        )?;
        if !WANTED.iter().any(|wanted| tables.contains(*wanted)) {
            if tables.is_empty() && log_is_missing {
                return Err(InputError::new(
                    file,
                    "has no tables, and its -wal file, where they may be, is missing",
                    "copy the .sqlite-wal file beside it, or export it again with `nsys export \
                     --type sqlite`",
                ));
            }
            let found: Vec<&str> = tables.iter().map(String::as_str).take(20).collect();
            let found = match found.as_slice() {
                [] => "none".to_owned(),
                found => found.join(", "),
            };
            return Err(InputError::new(
                file,
                format!("is no Nsight Systems export: its tables are: {found}"),
                format!("an export holds at least one of {}", WANTED.join(", ")),
            ));
        }
        export.tables = tables;
        let mut strings = HashMap::new();
        export.select(STRINGS, &["id", "value"], &[], |row| {
            if let (Some(id), Some(text)) = (row.int(0), row.text(1)) {
                strings.insert(id, text.to_owned());
            }
        })?;
        export.strings = strings;
        export.only_process = export.find_only_process()?;
        Ok(export)
    }

    /// The process, where all rows that name one name the same.
    fn find_only_process(&self) -> Result<Option<u64>, InputError> {
        let mut found = BTreeSet::new();
        for table in WANTED {
            if !self.tables.contains(table) {
                continue;
            }
            let columns = self.columns(table)?;
            for column in ["globalPid", "globalTid"] {
                if columns.contains(column) {
                    self.rows(
                        &format!("SELECT DISTINCT \"{column}\" >> 24 FROM \"{table}\""),
                        table,
                        |row| found.extend(row.int(0).map(|id| id & 0xFF_FFFF)),
                    )?;
                }
            }
        }
        Ok(match Vec::from_iter(found).as_slice() {
            [only] => Some(only.cast_unsigned()),
            _ => None,
        })
    }

    fn rows(
        &self,
        query: &str,
        what: &str,
        mut each: impl FnMut(&Fields<'_>),
    ) -> Result<(), InputError> {
        let fault = |error| damaged(self.file, what, &error);
        let mut statement: Statement<'_> = self.database.prepare(query).map_err(fault)?;
        let mut rows = statement.query([]).map_err(fault)?;
        while let Some(row) = rows.next().map_err(fault)? {
            each(&Fields(row));
        }
        Ok(())
    }

    fn columns(&self, table: &str) -> Result<BTreeSet<String>, InputError> {
        let mut columns = BTreeSet::new();
        self.rows(&format!("PRAGMA table_info(\"{table}\")"), table, |row| {
            columns.extend(row.text(1).map(str::to_owned));
        })?;
        Ok(columns)
    }

    fn gpu_work(
        &self,
        table: &str,
        work: Work,
        processes: &mut Processes,
    ) -> Result<(), InputError> {
        let optional = [
            "deviceId",
            "streamId",
            "correlationId",
            "globalPid",
            "demangledName",
            "shortName",
            "graphNodeId",
            "copyKind",
            "graphId",
        ];
        let copies = match work {
            Work::Copy => self.copy_kinds()?,
            _ => HashMap::new(),
        };
        self.select(table, &["start", "end"], &optional, |row| {
            let gather = processes.entry(self.process(row.int(5))).or_default();
            let (Some(start_ns), Some(end_ns)) = (row.int(0), row.int(1)) else {
                gather.count(&format!("rows of {table} without a time: left out"));
                return;
            };
            if (start_ns, end_ns) == (0, 0) {
                gather.count(match work {
                    Work::GraphReplay => {
                        "graph replays without a time stamp: left out, so BUSY IS TOO LOW"
                    }
                    _ => "GPU events without a time stamp: left out",
                });
                return;
            }
            let Some(span) = gather.span(start_ns, end_ns) else {
                return;
            };
            let device = row.id(2).and_then(|id| u32::try_from(id).ok());
            if device.is_none() {
                gather.count(&format!(
                    "rows of {table} without a device: taken as device 0"
                ));
            }
            let named = |id: Option<i64>| self.strings.get(&id?).map(String::as_str);
            let name = match work {
                Work::Kernel => named(row.int(6))
                    .or_else(|| named(row.int(7)))
                    .unwrap_or("kernel without a name"),
                Work::Copy => row
                    .int(9)
                    .and_then(|kind| copies.get(&kind))
                    .map_or("Memcpy", String::as_str),
                Work::Set => "Memset",
                Work::GraphReplay => &row
                    .int(10)
                    .map_or("graph".to_owned(), |id| format!("graph {id}")),
            };
            let name = gather.names.id(name);
            gather.gpu.push(GpuEvent {
                span,
                work,
                device: device.unwrap_or(0),
                stream: row.id(3).unwrap_or(0),
                correlation: row.id(4),
                in_graph: work == Work::GraphReplay || row.int(8).is_some_and(|node| node != 0),
                name,
            });
        })
    }

    fn copy_kinds(&self) -> Result<HashMap<i64, String>, InputError> {
        let mut kinds = HashMap::new();
        self.select(COPY_KINDS, &["id"], &["label", "name"], |row| {
            if let (Some(id), Some(text)) = (row.int(0), row.text(1).or_else(|| row.text(2))) {
                kinds.insert(id, format!("Memcpy {text}"));
            }
        })?;
        Ok(kinds)
    }

    fn calls(&self, processes: &mut Processes) -> Result<(), InputError> {
        let optional = ["correlationId", "nameId", "globalTid"];
        self.select(RUNTIME, &["start", "end"], &optional, |row| {
            let gather = processes.entry(self.process(row.int(4))).or_default();
            let (Some(start_ns), Some(end_ns)) = (row.int(0), row.int(1)) else {
                gather.count("calls without an end: left out");
                return;
            };
            let Some(span) = gather.span(start_ns, end_ns) else {
                return;
            };
            let name = row.int(3).and_then(|id| self.strings.get(&id));
            if name.is_none() {
                gather.count("calls without a name: what they do is unknown");
            }
            let name = name.map_or("call without a name", String::as_str);
            gather.host_call(span, thread_of(row.int(4)), row.id(2), name);
        })
    }

    /// The synchronisation table says more of a call: that it blocks, and on which stream. A row
    /// without its call is a call of an unknown thread.
    fn synchronisations(&self, processes: &mut Processes) -> Result<(), InputError> {
        let mut calls = HashMap::new();
        for (process, gather) in processes.iter() {
            for (at, event) in gather.host.iter().enumerate() {
                if let Some(id) = event.correlation {
                    calls.insert((*process, id), at);
                }
            }
        }
        let optional = ["correlationId", "globalPid", "syncType", "streamId"];
        self.select(SYNCHRONISATION, &["start", "end"], &optional, |row| {
            let process = self.process(row.int(3));
            let gather = processes.entry(process).or_default();
            let kind = row.int(4);
            let stream = row.id(5).filter(|stream| *stream != NO_STREAM);
            let known = row
                .id(2)
                .and_then(|id| calls.get(&(process, id)))
                .and_then(|at| gather.host.get_mut(*at));
            if let Some(event) = known {
                event.stream = event.stream.or(stream);
                if kind != Some(STREAM_WAITS_EVENT) {
                    event.call = Call::Synchronise;
                }
                return;
            }
            if kind == Some(STREAM_WAITS_EVENT) {
                return;
            }
            let times = row.int(0).zip(row.int(1)).filter(|times| *times != (0, 0));
            let Some((start_ns, end_ns)) = times else {
                gather.count("synchronisations without a time stamp: left out");
                return;
            };
            let Some(span) = gather.span(start_ns, end_ns) else {
                return;
            };
            let name = gather.names.id("synchronisation");
            gather.host.push(HostEvent {
                span,
                call: Call::Synchronise,
                thread: thread_of(None),
                correlation: row.id(2),
                stream,
                name,
            });
        })
    }

    fn ranges(&self, processes: &mut Processes) -> Result<(), InputError> {
        let optional = ["end", "text", "textId", "globalTid", "eventType"];
        self.select(NVTX, &["start"], &optional, |row| {
            let is_range = row.int(5).is_none_or(|kind| NVTX_RANGES.contains(&kind));
            // Marks, categories and ranges that were open at the end have no end.
            let (Some(start_ns), Some(end_ns), true) = (row.int(0), row.int(1), is_range) else {
                return;
            };
            let text = row
                .text(2)
                .or_else(|| self.strings.get(&row.int(3)?).map(String::as_str));
            let Some(text) = text else { return };
            let gather = processes.entry(self.process(row.int(4))).or_default();
            if let Some(span) = gather.span(start_ns, end_ns) {
                let name = gather.names.id(text);
                gather.mark(span, MarkKind::Annotation, thread_of(row.int(4)), name);
            }
        })
    }

    fn process(&self, global: Option<i64>) -> Option<u64> {
        global.map(process_of).or(self.only_process)
    }

    /// Each row's `required` columns and then the `optional` ones, null where the table lacks them;
    /// no row of a table that is missing.
    fn select(
        &self,
        table: &str,
        required: &[&str],
        optional: &[&str],
        each: impl FnMut(&Fields<'_>),
    ) -> Result<(), InputError> {
        if !self.tables.contains(table) {
            return Ok(());
        }
        let there = self.columns(table)?;
        if let Some(lacking) = required.iter().find(|column| !there.contains(**column)) {
            return Err(InputError::new(
                self.file,
                format!("table {table} has no column `{lacking}`"),
                "export the report again with a newer `nsys export --type sqlite`",
            )
            .field(*lacking));
        }
        let asked: Vec<String> = required
            .iter()
            .chain(optional)
            .map(|column| match there.contains(*column) {
                true => format!("\"{column}\""),
                false => "NULL".to_owned(),
            })
            .collect();
        let query = format!("SELECT {} FROM \"{table}\"", asked.join(", "));
        self.rows(&query, table, each)
    }
}
