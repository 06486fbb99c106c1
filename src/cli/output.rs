//! Files that commands write.

use std::io::Write;
use std::path::Path;

use crate::timing::InputError;

/// Writes `what`, beside the target and renamed: a reader sees the old file or the new one.
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
    if !force && file.symlink_metadata().is_ok() {
        return Err(taken());
    }
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let unwritable = |error: std::io::Error| {
        refused(
            format!("cannot write {what}: {error}"),
            "check the folder and its permissions",
        )
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
