//! `stepgate case import`.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::case::{ImportRequest, NoteKind, import as import_case};
use crate::gate::Points;
use crate::timing::InputError;

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
        Some(file) => write(file, &imported.text, target.force)?,
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

/// Written beside the target and renamed: a reader sees the old file or the new one.
fn write(file: &Path, text: &str, force: bool) -> Result<(), InputError> {
    let refused = |what: String, help: &str| InputError::new(file, what, help);
    let taken = || {
        refused(
            "the file is there already".to_owned(),
            "choose another name, or replace it with --force",
        )
    };
    if !force && file.symlink_metadata().is_ok() {
        return Err(taken());
    }
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let unwritable = |error: std::io::Error| {
        refused(
            format!("cannot write the case: {error}"),
            "check the folder and its permissions",
        )
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".case-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any new file: the user's mask takes away what it does.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut beside = builder.tempfile_in(folder).map_err(unwritable)?;
    beside
        .write_all(text.as_bytes())
        .and_then(|()| beside.as_file().sync_all())
        .map_err(unwritable)?;
    if force {
        beside
            .persist(file)
            .map_err(|error| unwritable(error.error))?;
    } else {
        // A file may have appeared since the look.
        beside
            .persist_noclobber(file)
            .map_err(|error| match error.error.kind() {
                std::io::ErrorKind::AlreadyExists => taken(),
                _ => unwritable(error.error),
            })?;
    }
    Ok(())
}
