//! The folder of case files: names without reading, one file without walking.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use super::load::Case;
use crate::timing::InputError;

const ENDING: &str = ".yaml";
const DEPTH_MAX: usize = 16;
const CASES_MAX: usize = 100_000;
const NAME_BYTES_MAX: usize = 1_024;

/// A folder of cases. A case's name is its path in the folder, without `.yaml`.
#[derive(Debug, Clone)]
pub struct Tree {
    root: PathBuf,
    /// The folder with its own links resolved.
    real: PathBuf,
}

impl Tree {
    pub fn open(root: impl AsRef<Path>) -> Result<Self, InputError> {
        let root = root.as_ref().to_path_buf();
        let refused =
            |what: String| InputError::new(&root, what, "give the folder that holds the cases");
        let real = root
            .canonicalize()
            .map_err(|error| refused(format!("cannot open the cases folder: {error}")))?;
        if !real.is_dir() {
            return Err(refused("the cases folder is not a folder".to_owned()));
        }
        Ok(Self { root, real })
    }

    /// The names of all cases, sorted. Reads no file; an empty folder is an error.
    pub fn names(&self) -> Result<Vec<String>, InputError> {
        let mut names = Vec::new();
        for entry in WalkDir::new(&self.real).max_depth(DEPTH_MAX + 1) {
            let entry = entry.map_err(|error| {
                let place = error.path().unwrap_or(&self.root).to_path_buf();
                InputError::new(
                    place,
                    format!("cannot list the cases: {error}"),
                    "check the folder and its permissions",
                )
            })?;
            if entry.depth() == 0 {
                continue;
            }
            let inside = entry
                .path()
                .strip_prefix(&self.real)
                .unwrap_or(entry.path());
            let shown = self.root.join(inside);
            let refused =
                |what: &str, help: &str| Err(InputError::new(&shown, what, help.to_owned()));
            let kind = entry.file_type();
            if kind.is_symlink() {
                return refused("a link among the cases", "put the file itself there");
            }
            if entry.depth() > DEPTH_MAX {
                return refused("the cases are nested too deep", "move it further up");
            }
            if kind.is_dir() {
                continue;
            }
            let mut parts = Vec::new();
            for part in inside {
                match part.to_str() {
                    Some(part) => parts.push(part),
                    None => return refused("a file name that is not UTF-8", "rename it"),
                }
            }
            let path = parts.join("/");
            let Some(name) = path.strip_suffix(ENDING).filter(|_| kind.is_file()) else {
                return refused(
                    "not a case: its name does not end in .yaml",
                    "keep only cases in this folder, each a .yaml file",
                );
            };
            if let Err(reason) = plain_name(name) {
                return refused(reason, "use letters, digits, `.`, `_`, `-` and `+`");
            }
            if names.len() == CASES_MAX {
                return refused("too many cases", "split the folder");
            }
            names.push(name.to_owned());
        }
        if names.is_empty() {
            return Err(InputError::new(
                &self.root,
                "the cases folder is empty",
                "add a case, or give the folder that holds them",
            ));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The file of one case. Looks at that file alone; it must lie in the folder.
    pub fn path_of(&self, name: &str) -> Result<PathBuf, InputError> {
        let shown: String = name.chars().take(NAME_BYTES_MAX).collect();
        let outside = |what: String| {
            InputError::new(
                self.root.join(&shown),
                what,
                "a case's name is its path in the cases folder, without `.yaml`",
            )
        };
        plain_name(name).map_err(|reason| {
            outside(format!(
                "`{}` is no case name: {reason}",
                shown.escape_debug()
            ))
        })?;
        let inside = format!("{name}{ENDING}");
        let path = self.root.join(&inside);
        let real = path
            .canonicalize()
            .map_err(|error| outside(format!("no case `{name}`: {error}")))?;
        if !real.starts_with(&self.real) {
            return Err(outside(format!(
                "`{name}` is a link that leaves the cases folder"
            )));
        }
        if real != self.real.join(&inside) {
            return Err(outside(format!("`{name}` is a link among the cases")));
        }
        Ok(path)
    }

    /// No two cases share a point number.
    pub fn check_points<'a>(cases: impl IntoIterator<Item = &'a Case>) -> Result<(), InputError> {
        let mut seen: BTreeMap<u32, &Case> = BTreeMap::new();
        for case in cases {
            let Some(point) = case.point else { continue };
            if let Some(first) = seen.insert(point, case) {
                let (line, column) = case.point_at.unwrap_or((1, 1));
                return Err(InputError::new(
                    &case.file,
                    format!(
                        "point {point} is also the point of {}",
                        first.file.display()
                    ),
                    "number each point once, or delete one of the two",
                )
                .at(line, column)
                .field("point"));
            }
        }
        Ok(())
    }
}

fn plain_name(name: &str) -> Result<(), &'static str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '/');
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err("it is empty or too long");
    }
    if name.starts_with('/') {
        return Err("it is an absolute path");
    }
    if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err("it leaves the cases folder or has an empty part");
    }
    if !name.chars().all(plain) {
        return Err("it holds characters that a case name may not");
    }
    Ok(())
}
