//! Small profiles for tests: Nsight Systems exports as SQLite, PyTorch traces as JSON.
#![allow(dead_code, reason = "each test target uses a part")]

use std::fs;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, params};
use stepgate::trace::{Profile, Summary, read, summarise};
use tempfile::TempDir;

/// Where the real traces are: `STEPGATE_TRACES`, else `shared/traces` beside the project. `None`:
/// they are not at hand, and the test that wants them has nothing to say.
pub fn real_trace(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("STEPGATE_TRACES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/traces"),
        PathBuf::from,
    );
    let file = folder.join(name);
    file.is_file().then_some(file)
}

pub fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let file = folder.path().join(name);
    fs::write(&file, content).expect("the file is written");
    file
}

/// The only profile of a file.
pub fn only(file: &Path) -> Profile {
    let mut profiles = read(file).expect("the profile reads");
    assert_eq!(profiles.len(), 1);
    profiles.remove(0)
}

pub fn summary(profiles: &[Profile]) -> Summary {
    summarise(profiles, None).expect("profiles of different ranks")
}

/// A complete event of a PyTorch trace; times in microseconds, as they shall be written.
pub fn event(category: &str, name: &str, at: (&str, &str), tid: u64, args: &str) -> String {
    let (ts, dur) = at;
    format!(
        r#"{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 9, "tid": {tid}, "ts": {ts}, "dur": {dur}, "args": {{{args}}}}}"#
    )
}

pub fn kernel(name: &str, ts: u64, dur: u64, stream: u64, correlation: u64) -> String {
    let args = format!(r#""device": 0, "stream": {stream}, "correlation": {correlation}"#);
    event(
        "kernel",
        name,
        (&ts.to_string(), &dur.to_string()),
        stream,
        &args,
    )
}

pub fn call(name: &str, ts: u64, dur: u64, correlation: u64) -> String {
    let args = format!(r#""correlation": {correlation}"#);
    event(
        "cuda_runtime",
        name,
        (&ts.to_string(), &dur.to_string()),
        1,
        &args,
    )
}

pub fn mark(category: &str, name: &str, ts: u64, dur: u64) -> String {
    event(category, name, (&ts.to_string(), &dur.to_string()), 1, "")
}

/// A trace of `events`, with `rank` of `world` behind them.
pub fn trace(events: &[String], rank: u32, world: u32) -> String {
    format!(
        "{{\"schemaVersion\": 1, \"traceEvents\": [\n{}\n], \"distributedInfo\": {{\"backend\": \
         \"nccl\", \"rank\": {rank}, \"world_size\": {world}}}}}\n",
        events.join(",\n")
    )
}

/// The process that an export's events are of.
pub const PROCESS: i64 = 4242;
const THREAD: i64 = 4243;

/// An Nsight Systems export in the making. Times in nanoseconds.
pub struct Export {
    pub file: PathBuf,
    database: Connection,
}

impl Export {
    /// No table at all.
    pub fn bare(folder: &TempDir, name: &str) -> Self {
        let file = folder.path().join(name);
        let database = Connection::open(&file).expect("the file is made");
        let export = Self { file, database };
        // A test has no crash to survive: rows need not reach the disk one by one.
        export.sql("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY;");
        export
    }

    /// The tables of a usual report, empty.
    pub fn new(folder: &TempDir, name: &str) -> Self {
        let export = Self::bare(folder, name);
        export.sql(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT,
               streamId INT, correlationId INT, globalPid INT, demangledName INT, shortName INT,
               graphNodeId INT);
             CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, eventClass INT,
               globalTid INT, correlationId INT, nameId INT);
             CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT,
               textId INT, globalTid INT);",
        );
        export
    }

    pub fn sql(&self, text: &str) {
        self.database.execute_batch(text).expect("good SQL");
    }

    pub fn string(&self, text: &str) -> i64 {
        let known =
            self.database
                .query_row("SELECT id FROM StringIds WHERE value = ?1", [text], |row| {
                    row.get(0)
                });
        known.unwrap_or_else(|_| {
            self.database
                .execute("INSERT INTO StringIds (value) VALUES (?1)", [text])
                .expect("a row");
            self.database.last_insert_rowid()
        })
    }

    pub fn kernel(&self, start: i64, end: i64, correlation: i64, node: Option<i64>) {
        self.kernel_of(PROCESS, 0, (start, end), correlation, node);
    }

    pub fn kernel_of(
        &self,
        process: i64,
        device: i64,
        (start, end): (i64, i64),
        correlation: i64,
        node: Option<i64>,
    ) {
        let name = self.string("void gemm<float>(float*)");
        let short = self.string("gemm");
        self.database
            .execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?1, ?2, ?3, 7, ?4, ?5, ?6, ?7, ?8)",
                params![
                    start,
                    end,
                    device,
                    correlation,
                    process << 24,
                    name,
                    short,
                    node
                ],
            )
            .expect("a row");
    }

    pub fn call(&self, name: &str, start: i64, end: i64, correlation: i64) {
        self.call_of(PROCESS, name, (start, end), correlation);
    }

    pub fn call_of(&self, process: i64, name: &str, (start, end): (i64, i64), correlation: i64) {
        let name = self.string(name);
        let thread = (process << 24) + THREAD;
        self.database
            .execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?1, ?2, 0, ?3, ?4, ?5)",
                params![start, end, thread, correlation, name],
            )
            .expect("a row");
    }

    pub fn range(&self, text: &str, start: i64, end: i64) {
        self.database
            .execute(
                "INSERT INTO NVTX_EVENTS VALUES (?1, ?2, 59, ?3, NULL, ?4)",
                params![start, end, text, (PROCESS << 24) + THREAD],
            )
            .expect("a row");
    }

    /// Whole replays, as they are traced at graph granularity.
    pub fn replay(&self, start: i64, end: i64, correlation: i64) {
        self.sql(
            "CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT,
               deviceId INT, graphId INT, graphExecId INT, streamId INT, correlationId INT,
               globalPid INT)",
        );
        self.database
            .execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?1, ?2, 0, 3, 4, 7, ?3, ?4)",
                params![start, end, correlation, PROCESS << 24],
            )
            .expect("a row");
    }

    pub fn close(self) -> PathBuf {
        self.database.close().expect("the file closes");
        self.file
    }
}
