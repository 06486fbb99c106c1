//! The timing fingerprint: a digest of everything that decides a prediction.
//!
//! The build script compiles this file too, so it stands on the standard library and `sha2` alone.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};

/// Sources and the lock file: what is compiled into the binary.
pub const CODE: [&str; 7] = [
    "src/timing",
    "src/perfdb",
    "src/model",
    "src/compose",
    "src/replay",
    "src/case",
    "Cargo.lock",
];
/// Rows and model configs: what the binary reads when it predicts.
pub const DATA: &str = "data";

/// Digests of files by their path from the project folder, with `/` between its parts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files(BTreeMap<String, String>);

impl Files {
    pub fn add(&mut self, path: &str, content: &[u8]) {
        self.0.insert(path.to_owned(), hex(content));
    }

    /// Adds a file, or every file of a folder; one that is not there adds nothing.
    pub fn walk(&mut self, root: &Path, inner: &str) -> io::Result<()> {
        let place = root.join(inner);
        if !place.exists() {
            return Ok(());
        }
        if place.is_file() {
            self.add(inner, &fs::read(&place)?);
            return Ok(());
        }
        if !place.is_dir() {
            // Reading a pipe would wait for a writer.
            let what = format!("{inner} is neither a file nor a folder");
            return Err(io::Error::other(what));
        }
        for entry in fs::read_dir(&place)? {
            let name = entry?.file_name();
            self.walk(root, &format!("{inner}/{}", name.to_string_lossy()))?;
        }
        Ok(())
    }

    /// One digest over all paths and contents, in the order of the paths.
    pub fn digest(&self) -> String {
        let lines: String = self
            .0
            .iter()
            .map(|(path, content)| format!("{content} {path}\n"))
            .collect();
        hex(lines.as_bytes())
    }
}

/// Digest of the sources and the lock file of a project folder.
pub fn code_of(root: &Path) -> io::Result<String> {
    let mut files = Files::default();
    for inner in CODE {
        files.walk(root, inner)?;
    }
    Ok(files.digest())
}

/// The fingerprint of sources, data and the compiler that builds them.
pub fn fingerprint(code: &str, data: &str, compiler: &str) -> String {
    let whole = hex(format!("{code}\n{data}\n{}\n", compiler.trim()).as_bytes());
    whole[..16].to_owned()
}

fn hex(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
