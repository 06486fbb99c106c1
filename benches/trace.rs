//! Speed and memory of the profile readers: generates a PyTorch trace and an Nsight Systems export of
//! 200 MB each, reads them and prints MB/s and the peak of resident memory.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use rusqlite::{Connection, params};
use stepgate::trace::{read, summarise};

const BYTES: u64 = 200_000_000;

fn main() {
    // `cargo test --benches` runs this too, and wants no minutes of it.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let json = folder.path().join("trace.json");
    kineto(&json);
    measure("Kineto JSON", &json);
    let sqlite = folder.path().join("report.sqlite");
    nsys(&sqlite);
    measure("nsys SQLite", &sqlite);
}

fn measure(name: &str, file: &Path) {
    let bytes = fs::metadata(file).expect("the file is there").len();
    // Starts the peak anew.
    let _ = fs::write("/proc/self/clear_refs", "5");
    let begun = Instant::now();
    let profiles = read(file).expect("the profile reads");
    let seconds = begun.elapsed().as_secs_f64();
    let peak = peak();
    let events: usize = profiles
        .iter()
        .map(|profile| profile.gpu.len() + profile.host.len() + profile.marks.len())
        .sum();
    let begun = Instant::now();
    let summary = summarise(&profiles, None).expect("a summary");
    let busy_ns: i64 = summary.profiles[0]
        .devices
        .iter()
        .map(|one| one.busy_ns)
        .sum();
    println!(
        "{name}: {:.1} MB, {events} events kept: read in {seconds:.2} s, {:.0} MB/s, peak {peak}; \
         summarised in {:.2} s, busy {busy_ns} ns",
        bytes as f64 / 1e6,
        bytes as f64 / 1e6 / seconds,
        begun.elapsed().as_secs_f64(),
    );
}

fn peak() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .map_or("unknown", str::trim)
        .to_owned()
}

/// Events as PyTorch 2.3 writes them: an op, its launch, the flow between them, its kernel.
fn kineto(file: &Path) {
    let mut out = BufWriter::new(File::create(file).expect("the file is made"));
    let mut written = 0;
    let mut put = |text: String| {
        written += text.len() as u64;
        out.write_all(text.as_bytes()).expect("the disk has room");
        written
    };
    put(
        "{\n  \"schemaVersion\": 1,\n  \"distributedInfo\": {\"rank\": 0, \"world_size\": 1},\n  \
         \"traceEvents\": [\n"
            .to_owned(),
    );
    for id in 0_u64.. {
        let us = 4_458_676_522_690 + id * 12;
        let kernel = id % 60;
        let length = put(format!(
            r#"  {{
    "ph": "X", "cat": "cpu_op", "name": "aten::op_{kernel}", "pid": 2910249, "tid": 2919752,
    "ts": {us}.655, "dur": 9.777,
    "args": {{
      "External id": {id},"Record function id": 0, "Concrete Inputs": ["", "", "1"], "Input type": ["float", "float", "Scalar"], "Input Strides": [[4096, 1], [4096, 1], []], "Input Dims": [[889, 4096], [889, 4096], []], "Ev Idx": {id}
    }}
  }},
  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 2910249, "tid": 2919752,
    "ts": {us}.755, "dur": 4.123,
    "args": {{
      "External id": {id}, "cbid": 211, "correlation": {id}
    }}
  }},
  {{
    "ph": "s", "id": {id}, "pid": 2910249, "tid": 2919752, "ts": {us}.755,
    "cat": "ac2g", "name": "ac2g"
  }},
  {{
    "ph": "X", "cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4, at::native::functor_{kernel}<float>, at::detail::Array<char*, 3> >(int, at::native::functor<float>, at::detail::Array<char*, 3>)", "pid": 0, "tid": 7,
    "ts": {us}.905, "dur": 10.407,
    "args": {{
      "External id": {id}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {id}, "registers per thread": 40, "shared memory": 0, "blocks per SM": 7.407407, "warps per SM": 29.62963, "grid": [800, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 46
    }}
  }},
  {{
    "ph": "f", "id": {id}, "pid": 0, "tid": 7, "ts": {us}.905,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  }},
"#
        ));
        if length > BYTES {
            break;
        }
    }
    put(
        "  {\"ph\": \"i\", \"name\": \"end\", \"ts\": 0}\n  ],\n  \"baseTimeNanoseconds\": 0\n}\n"
            .to_owned(),
    );
    out.flush().expect("the disk has room");
}

/// Kernels, their launches and ranges around them, until the file has its size.
fn nsys(file: &Path) {
    let mut database = Connection::open(file).expect("the file is made");
    database
        .execute_batch(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT,
               contextId INT, greenContextId INT, streamId INT, correlationId INT, globalPid INT,
               demangledName INT, shortName INT, mangledName INT, launchType INT,
               cacheConfig INT, registersPerThread INT, gridX INT, gridY INT, gridZ INT,
               blockX INT, blockY INT, blockZ INT, graphNodeId INT);
             CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, eventClass INT,
               globalTid INT, correlationId INT, nameId INT, returnValue INT, callchainId INT);
             CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, rangeId INT,
               category INT, color INT, text TEXT, globalTid INT, textId INT);",
        )
        .expect("tables");
    let pid: i64 = 4242 << 24;
    let mut id: i64 = 0;
    loop {
        let change = database.transaction().expect("a transaction");
        {
            let insert = |sql: &str| change.prepare(sql).expect("a statement");
            let mut kernel = insert(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?1, ?2, 0, 1, NULL, 7, ?3, ?4, ?5,
                 ?5, ?5, 1, 0, 40, 800, 1, 1, 128, 1, 1, NULL)",
            );
            let mut call = insert(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?1, ?2, 0, ?3, ?4, 1, 0, NULL)",
            );
            let mut range =
                insert("INSERT INTO NVTX_EVENTS VALUES (?1, ?2, 59, 0, NULL, NULL, NULL, ?3, ?4)");
            for _ in 0..100_000 {
                let start = 4_458_676_522_690_655 + id * 12_000;
                kernel
                    .execute(params![start + 250, start + 10_657, id, pid, 2 + id % 60])
                    .expect("a row");
                call.execute(params![start, start + 4_123, pid + 4243, id])
                    .expect("a row");
                range
                    .execute(params![start - 100, start + 9_000, pid + 4243, 2 + id % 60])
                    .expect("a row");
                id += 1;
            }
        }
        change.commit().expect("the disk has room");
        if fs::metadata(file).expect("the file is there").len() > BYTES {
            break;
        }
    }
    let mut name = database
        .prepare("INSERT INTO StringIds VALUES (?1, ?2)")
        .expect("a statement");
    name.execute(params![1, "cudaLaunchKernel_v7000"])
        .expect("a row");
    for kernel in 0..60 {
        name.execute(params![
            2 + kernel,
            format!("void kernel_{kernel}<float>(float*)")
        ])
        .expect("a row");
    }
}
