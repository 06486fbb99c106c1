//! Files that commands write.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use crate::timing::InputError;

/// Writes `what`, beside the target and renamed: a reader sees the old file or the new one. Through
/// a link the file that it names is replaced. A device, pipe or socket is no content to replace:
/// it is written to as it stands, with or without `force`.
///
/// # Errors
/// The file is there and may not be replaced, or it cannot be written.
pub fn write_file(file: &Path, content: &[u8], what: &str, force: bool) -> Result<(), InputError> {
    let refused = |what: String, help: &str| InputError::new(file, what, help);
    let taken = || {
        refused(
            "the file is there already".to_owned(),
            "choose another name, or replace it with --force",
        )
    };
    let unwritable = |error: io::Error| {
        refused(
            format!("cannot write {what}: {error}"),
            "check the folder and its permissions",
        )
    };
    let named = fs::metadata(file);
    if let Ok(named) = &named
        && !named.is_file()
        && !named.is_dir()
    {
        return write_through(file, content).map_err(unwritable);
    }
    let is_link = match file.symlink_metadata() {
        Ok(_) if !force => return Err(taken()),
        Ok(own) => own.is_symlink(),
        Err(_) => false,
    };
    if is_link && named.is_err() {
        // The link names a file that is not there yet: opening makes it.
        return write_through(file, content).map_err(unwritable);
    }
    let target = if is_link {
        &file.canonicalize().map_err(unwritable)?
    } else {
        file
    };
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".stepgate-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any new file: the user's mask takes away what it does.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut beside = builder.tempfile_in(folder).map_err(unwritable)?;
    beside
        .write_all(content)
        .and_then(|()| beside.as_file().sync_all())
        .map_err(unwritable)?;
    if force {
        beside
            .persist(target)
            .map_err(|error| unwritable(error.error))?;
    } else {
        // A file may have appeared since the look.
        beside
            .persist_noclobber(target)
            .map_err(|error| match error.error.kind() {
                io::ErrorKind::AlreadyExists => taken(),
                _ => unwritable(error.error),
            })?;
    }
    Ok(())
}

fn write_through(file: &Path, content: &[u8]) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(file)?
        .write_all(content)
}
