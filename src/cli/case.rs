//! `stepgate case import`.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::case::{ImportRequest, NoteKind, import as import_case};
use crate::gate::Points;
use crate::timing::InputError;

use super::output::write_file;
use super::run::Stop;

/// Where the case goes.
pub struct Target {
    /// `None`: standard output.
    pub file: Option<PathBuf>,
    /// Replace a file that is there.
    pub force: bool,
}

pub fn import(
    source: &Path,
    request: &ImportRequest,
    points: Option<&Points>,
    target: &Target,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let imported = import_case(source, request)?;
    if let Some(points) = points {
        check(&imported.text, source, points)?;
    }
    match &target.file {
        None => out.write_all(imported.text.as_bytes())?,
        Some(file) => write_file(file, imported.text.as_bytes(), "the case", target.force)?,
    }
    for note in imported.notes {
        let kind = match note.kind {
            NoteKind::Unknown => "NOT IN THE CASE (not understood or not modelled)",
            NoteKind::NoEffect => "no effect",
            NoteKind::Default => "not set",
        };
        eprintln!("{}: {kind}: {note}", source.display());
    }
    Ok(())
}

/// A case that the model or the topology does not allow is not written.
fn check(text: &str, source: &Path, points: &Points) -> Result<(), InputError> {
    let unwritable = |error: std::io::Error| {
        InputError::new(
            source,
            format!("cannot check the case: {error}"),
            "check the folder for temporary files",
        )
    };
    let mut file = tempfile::Builder::new()
        .suffix(".yaml")
        .tempfile()
        .map_err(unwritable)?;
    file.write_all(text.as_bytes()).map_err(unwritable)?;
    points.load(file.path()).map(drop).map_err(|mut error| {
        error.place.file = source.to_path_buf();
        (error.place.line, error.place.column) = (None, None);
        error.what = format!("no valid case comes of these settings: {}", error.what);
        error
    })
}
