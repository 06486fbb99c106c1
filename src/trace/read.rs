//! Opens a profile, whatever its format, by what it begins with.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};

use crate::timing::InputError;

use super::event::Profile;
use super::json_stream::BYTE_ORDER_MARK;
use super::{kineto, nsys};

const SQLITE: &[u8] = b"SQLite format 3\0";
const GZIP: &[u8] = &[0x1f, 0x8b];
/// Bytes read from disk at once.
const CHUNK: usize = 1 << 18;

/// What a file holds.
#[derive(Debug)]
pub struct Reading {
    /// One per process.
    pub profiles: Vec<Profile>,
    /// Why the file was not read to its end: the profiles hold what came before.
    pub ended_by: Option<InputError>,
}

/// Reads a whole profile: an Nsight Systems SQLite export (one profile per process) or a PyTorch
/// profiler trace in JSON, plain or gzip (one profile).
///
/// # Errors
/// The file is missing, empty or no regular file, has another format, or is cut off or damaged.
pub fn read(file: &Path) -> Result<Vec<Profile>, InputError> {
    let reading = read_partial(file, &mut |_| {})?;
    match reading.ended_by {
        None => Ok(reading.profiles),
        Some(fault) => Err(fault),
    }
}

/// Reads a profile as [`read`] does, and of one that is cut off or damaged what comes before the
/// fault. `progress` is told how many bytes of the file have been read.
///
/// # Errors
/// Nothing could be read.
pub fn read_partial(file: &Path, progress: &mut dyn FnMut(u64)) -> Result<Reading, InputError> {
    let fault = |error: io::Error| {
        InputError::new(
            file,
            format!("cannot read the profile: {error}"),
            "check the path and its permissions",
        )
    };
    // Looked at before it is opened: opening a pipe would wait for its writer.
    if !fs::metadata(file).map_err(fault)?.is_file() {
        return Err(InputError::new(
            file,
            "is not a regular file",
            "name the profiler's output: a .sqlite export, a .json or a .json.gz",
        ));
    }
    let mut opened = File::open(file).map_err(fault)?;
    let mut head = Vec::new();
    (&mut opened)
        .take(SQLITE.len() as u64)
        .read_to_end(&mut head)
        .map_err(fault)?;
    opened.rewind().map_err(fault)?;
    let text = (head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&head).iter())
        .find(|byte| !byte.is_ascii_whitespace());
    if head.starts_with(SQLITE) {
        let sha256 = digest(opened, progress).map_err(fault)?;
        return Ok(Reading {
            profiles: nsys::read(file, &sha256)?,
            ended_by: None,
        });
    }
    let gzip = head.starts_with(GZIP);
    if !gzip && !matches!(text, Some(b'{' | b'[')) {
        return Err(if text.is_none() {
            InputError::new(file, "the file is empty", "record the profile again")
        } else {
            InputError::new(
                file,
                "is neither an SQLite export of Nsight Systems nor a trace in JSON",
                "export an .nsys-rep with `nsys export --type sqlite`; PyTorch's \
                 `export_chrome_trace` writes .json or .json.gz",
            )
        });
    }
    let mut raw = BufReader::with_capacity(CHUNK, Digesting::new(opened, progress));
    let trace = if gzip {
        kineto::read(file, MultiGzDecoder::new(&mut raw))
    } else {
        kineto::read(file, &mut raw)
    };
    // What the reader left, behind a fault, belongs to the digest too.
    io::copy(&mut raw, &mut io::sink()).map_err(fault)?;
    let ended_by = trace.ended_by.clone();
    let profile = trace.into_profile(raw.into_inner().sha256());
    if let Some(error) = ended_by.as_ref().filter(|_| nothing_in(&profile)) {
        return Err(error.clone());
    }
    Ok(Reading {
        profiles: vec![profile],
        ended_by,
    })
}

fn nothing_in(profile: &Profile) -> bool {
    profile.gpu.is_empty() && profile.host.is_empty() && profile.marks.is_empty()
}

fn digest(opened: File, progress: &mut dyn FnMut(u64)) -> io::Result<String> {
    let mut raw = BufReader::with_capacity(CHUNK, Digesting::new(opened, progress));
    io::copy(&mut raw, &mut io::sink())?;
    Ok(raw.into_inner().sha256())
}

/// Passes bytes on and digests them.
struct Digesting<'a, R> {
    source: R,
    digest: Sha256,
    read: u64,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a, R: Read> Digesting<'a, R> {
    fn new(source: R, progress: &'a mut dyn FnMut(u64)) -> Self {
        Self {
            source,
            digest: Sha256::new(),
            read: 0,
            progress,
        }
    }

    fn sha256(self) -> String {
        self.digest
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

impl<R: Read> Read for Digesting<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(bytes)?;
        self.digest.update(&bytes[..read]);
        self.read += read as u64;
        (self.progress)(self.read);
        Ok(read)
    }
}
