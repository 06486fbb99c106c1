//! Reading small text files: regular files only, bounded in size.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use super::InputError;

/// Hand-written data, configs and goldens are pages of text; the largest has a few hundred KB.
const BYTES_MAX: u64 = 16 << 20;

/// Reads a text file that `what` names, for example `the host rows`.
///
/// # Errors
/// The file is missing, not a regular file, larger than 16 MiB or not UTF-8.
pub fn read_text(file: &Path, what: &str) -> Result<String, InputError> {
    let fault = |why: String| {
        InputError::new(
            file,
            format!("cannot read {what}: {why}"),
            "check the path and its permissions, or restore the file from git",
        )
    };
    // Looked at before it is opened: opening a pipe would wait for its writer.
    let meta = fs::metadata(file).map_err(|error| fault(error.to_string()))?;
    if !meta.is_file() {
        return Err(fault("it is not a regular file".to_owned()));
    }
    if meta.len() > BYTES_MAX {
        return Err(fault(format!("it is larger than {BYTES_MAX} bytes")));
    }
    let mut text = String::new();
    File::open(file)
        .and_then(|file| file.take(BYTES_MAX).read_to_string(&mut text))
        .map_err(|error| fault(error.to_string()))?;
    Ok(text)
}
