//! The base revision, read from git's objects: no checkout, and the working tree stays as it is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use git2::{ErrorCode, ObjectType, Oid, Repository, TreeWalkMode, TreeWalkResult};

use super::fingerprint::{CODE, DATA, Files, fingerprint};
use crate::timing::InputError;

/// The file that names the compiler that last reproduced the goldens.
pub const COMPILER_FILE: &str = "goldens/compiler.txt";

/// One revision of a project folder.
pub struct Base {
    repository: Repository,
    root: PathBuf,
    /// As the caller named it.
    rev: String,
    /// The commit's id, in short.
    commit: String,
    /// Every file of the project folder by its path from there.
    files: BTreeMap<String, Oid>,
}

impl Base {
    /// Opens the repository around `root` and lists the files that `rev` has there.
    ///
    /// # Errors
    /// No repository, an unknown revision, or one that a shallow clone lacks.
    pub fn open(root: &Path, rev: &str) -> Result<Self, InputError> {
        let repository = Repository::discover(root).map_err(|error| no_repository(root, &error))?;
        let prefix = prefix_of(&repository, root)?;
        let missing = |error: &git2::Error| unknown_revision(root, rev, &repository, error);
        let commit = repository
            .revparse_single(rev)
            .and_then(|object| object.peel_to_commit())
            .map_err(|error| missing(&error))?;
        let id = commit.id();
        let files = list(&repository, id, &prefix).map_err(|error| missing(&error))?;
        drop(commit);
        if files.is_empty() {
            return Err(InputError::new(
                root,
                format!("`{rev}` has no file in this folder"),
                "give a revision that holds the project, or `--base` an earlier commit",
            ));
        }
        Ok(Self {
            repository,
            root: root.to_path_buf(),
            rev: rev.to_owned(),
            commit: id.to_string()[..12].to_owned(),
            files,
        })
    }

    pub fn rev(&self) -> &str {
        &self.rev
    }

    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// Paths of the files below `folder` that end in `ending`.
    pub fn under<'a>(
        &'a self,
        folder: &'a str,
        ending: &'a str,
    ) -> impl Iterator<Item = &'a str> + 'a {
        self.files
            .keys()
            .map(String::as_str)
            .filter(move |path| is_under(path, folder) && path.ends_with(ending))
    }

    /// How messages name a file of this revision.
    pub fn shown(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("{}:{path}", self.rev))
    }

    /// The content of a file; `None` where the revision has none of that name.
    pub fn bytes(&self, path: &str) -> Result<Option<Vec<u8>>, InputError> {
        let Some(id) = self.files.get(path) else {
            return Ok(None);
        };
        let blob = self
            .repository
            .find_blob(*id)
            .map_err(|error| unknown_revision(&self.root, &self.rev, &self.repository, &error))?;
        Ok(Some(blob.content().to_vec()))
    }

    /// The text of a file; `None` where the revision has none of that name.
    pub fn text(&self, path: &str) -> Result<Option<String>, InputError> {
        let Some(bytes) = self.bytes(path)? else {
            return Ok(None);
        };
        String::from_utf8(bytes).map(Some).map_err(|_| {
            let help = "choose a base whose files are UTF-8 text";
            InputError::new(self.shown(path), "the file is not UTF-8", help)
        })
    }

    /// Whether a file of the working tree, or its absence, is the revision's.
    pub fn holds(&self, path: &str) -> bool {
        let known = self.files.get(path);
        let place = self.root.join(path);
        // Reading a pipe would wait for a writer.
        if place.exists() && !place.is_file() {
            return false;
        }
        match fs::read(place) {
            Ok(bytes) => {
                let id = Oid::hash_object(ObjectType::Blob, &bytes).ok();
                id.is_some() && id.as_ref() == known
            }
            Err(_) => known.is_none(),
        }
    }

    /// The revision's timing fingerprint; `None` where it does not name its compiler.
    pub fn fingerprint(&self) -> Result<Option<String>, InputError> {
        let Some(compiler) = self.text(COMPILER_FILE)? else {
            return Ok(None);
        };
        let code = self.digest(&CODE)?;
        let data = self.digest(&[DATA])?;
        Ok(Some(fingerprint(&code, &data, &compiler)))
    }

    /// Digest of the files below some paths.
    pub fn digest(&self, inside: &[&str]) -> Result<String, InputError> {
        let mut files = Files::default();
        for path in self.files.keys() {
            if inside.iter().any(|folder| is_under(path, folder))
                && let Some(bytes) = self.bytes(path)?
            {
                files.add(path, &bytes);
            }
        }
        Ok(files.digest())
    }

    /// Writes the files below `folder` into another folder, at the same paths.
    pub fn extract(&self, folder: &str, into: &Path) -> Result<(), InputError> {
        for path in self.under(folder, "") {
            let to = into.join(path);
            let bytes = self.bytes(path)?.unwrap_or_default();
            let written = match to.parent() {
                Some(parent) => fs::create_dir_all(parent).and_then(|()| fs::write(&to, bytes)),
                None => Ok(()),
            };
            written.map_err(|error| {
                let what = format!("cannot write the base's data: {error}");
                InputError::new(
                    &to,
                    what,
                    "free some space, or set TMPDIR to another folder",
                )
            })?;
        }
        Ok(())
    }
}

fn is_under(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The project folder's path inside the repository.
fn prefix_of(repository: &Repository, root: &Path) -> Result<PathBuf, InputError> {
    let outside = || {
        InputError::new(
            root,
            "the project folder is not in the repository's working tree",
            "run the gate in a clone with a working tree",
        )
    };
    let workdir = repository.workdir().ok_or_else(outside)?;
    let real = |path: &Path| path.canonicalize().map_err(|_| outside());
    let root = real(root)?;
    let inner = root.strip_prefix(real(workdir)?).map_err(|_| outside())?;
    Ok(inner.to_path_buf())
}

fn list(
    repository: &Repository,
    commit: Oid,
    prefix: &Path,
) -> Result<BTreeMap<String, Oid>, git2::Error> {
    let mut tree = repository.find_commit(commit)?.tree()?;
    if prefix.components().next().is_some() {
        let entry = match tree.get_path(prefix) {
            Err(error) if error.code() == ErrorCode::NotFound => return Ok(BTreeMap::new()),
            other => other?,
        };
        tree = repository.find_tree(entry.id())?;
    }
    let mut files = BTreeMap::new();
    tree.walk(TreeWalkMode::PreOrder, |folder, entry| {
        if entry.kind() == Some(ObjectType::Blob)
            && let Ok(name) = entry.name()
        {
            files.insert(format!("{folder}{name}"), entry.id());
        }
        TreeWalkResult::Ok
    })?;
    Ok(files)
}

fn no_repository(root: &Path, error: &git2::Error) -> InputError {
    let (what, help) = match error.code() {
        ErrorCode::NotFound => (
            "no git repository holds this folder".to_owned(),
            "the gate compares with a revision: run it in a clone",
        ),
        ErrorCode::Owner => (
            "the repository belongs to another user".to_owned(),
            "`git config --global --add safe.directory FOLDER` says that you trust it",
        ),
        _ => (
            format!("cannot open the git repository: {}", error.message()),
            "check it with `git status`",
        ),
    };
    InputError::new(root, what, help)
}

fn unknown_revision(
    root: &Path,
    rev: &str,
    repository: &Repository,
    error: &git2::Error,
) -> InputError {
    if repository.is_shallow() {
        return InputError::new(
            root,
            format!("this shallow clone does not hold `{rev}`"),
            format!(
                "fetch it with `git fetch --depth=1 origin {rev}` or everything with `git fetch \
                 --unshallow`; in GitHub's checkout set `fetch-depth: 0`"
            ),
        );
    }
    InputError::new(
        root,
        format!("cannot read the revision `{rev}`: {}", error.message()),
        format!("give a commit, branch or tag that this clone holds, or `git fetch origin {rev}`"),
    )
}
