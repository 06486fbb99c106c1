//! No leak, for what stands behind the rows: a host row is of the mode that its file gives, and an
//! op table is the file that its provenance describes. Both are read here again, as plain trees, by
//! nothing that predictions go through.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};
use walkdir::WalkDir;

use crate::timing::{Origin, Rows};

use super::proof::{Proof, ProofFailure};

/// What a host row is of, beside its value. `capture` and `includes` may be left out of a file.
const IDENTITY: [&str; 6] = [
    "boundary",
    "execution",
    "capture",
    "phase",
    "rank",
    "includes",
];
/// Where the digests of op tables stand, from `data/`.
const PROVENANCE: &str = "systems/PROVENANCE.yaml";

/// Host rows by id, as the files of `data/host` have them.
#[derive(Debug, Default)]
pub struct FiledRows(BTreeMap<String, Value>);

impl FiledRows {
    /// Reads every `*.yaml` of `data/host`; what cannot be read has no rows, and whoever rests on
    /// one of them fails.
    pub fn read(data: &Path) -> Self {
        let mut rows = BTreeMap::new();
        let files = WalkDir::new(data.join("host")).max_depth(1).into_iter();
        for entry in files.flatten() {
            let is_yaml = entry.path().extension().is_some_and(|end| end == "yaml");
            let tree = is_yaml.then(|| tree(entry.path()).ok()).flatten();
            let filed = tree.as_ref().and_then(|tree| tree.get("rows")?.as_array());
            for row in filed.into_iter().flatten() {
                if let Some(id) = row.get("id").and_then(Value::as_str) {
                    rows.insert(id.to_owned(), row.clone());
                }
            }
        }
        Self(rows)
    }
}

/// No leak: the host rows that a prediction was given are those of the files, in mode, boundary,
/// phase and rank.
pub fn as_filed(case: &str, rows: &Rows, filed: &FiledRows) -> Result<(), ProofFailure> {
    for id in rows.ids() {
        let Origin::Host(row) = rows.origin(id) else {
            continue;
        };
        let failed = |what: String| {
            let what = format!("host/{}: {what}", row.id);
            ProofFailure::new(Proof::NoLeak, case, what)
        };
        let Some(in_file) = filed.0.get(&row.id) else {
            return Err(failed("no file of data/host has this row".to_owned()));
        };
        let taken = serde_json::to_value(&**row).map_err(|error| failed(error.to_string()))?;
        for key in IDENTITY {
            let (Some(says), taken) = (in_file.get(key), &taken[key]) else {
                continue;
            };
            if says != taken {
                return Err(failed(format!(
                    "taken as `{key}: {taken}`, its file says {says}"
                )));
            }
        }
    }
    Ok(())
}

/// No leak: every op table below `data/systems` has the digest that its provenance gives.
pub fn tables_as_imported(data: &Path) -> Vec<ProofFailure> {
    let mut failures = Vec::new();
    let mut failed = |file: &str, what: String| {
        failures.push(ProofFailure::new(Proof::NoLeak, file, what));
    };
    let provenance = match tree(&data.join(PROVENANCE)) {
        Ok(provenance) => provenance,
        Err(what) => {
            failed(PROVENANCE, what);
            return failures;
        }
    };
    let named = provenance.get("tables").and_then(Value::as_array);
    let digests: BTreeMap<&str, &str> = (named.into_iter().flatten())
        .filter_map(|one| Some((one.get("file")?.as_str()?, one.get("sha256")?.as_str()?)))
        .collect();
    let systems = data.join("systems");
    for entry in WalkDir::new(&systems).sort_by_file_name() {
        let Ok(entry) = entry else { continue };
        let path = entry.path();
        if path.extension().is_none_or(|end| end != "parquet") {
            continue;
        }
        let inner = path.strip_prefix(&systems).unwrap_or(path);
        let inner = inner.to_string_lossy().replace('\\', "/");
        let wrong = match (fs::read(path), digests.get(&*inner)) {
            (Err(error), _) => error.to_string(),
            (Ok(_), None) => format!("{PROVENANCE} does not say where it comes from"),
            (Ok(bytes), Some(said)) if hex(&bytes) != **said => {
                format!("it is not the table that {PROVENANCE} describes: import it again")
            }
            _ => continue,
        };
        failed(&inner, wrong);
    }
    failures
}

fn tree(file: &Path) -> Result<Value, String> {
    let text = fs::read_to_string(file).map_err(|error| error.to_string())?;
    serde_yaml::from_str(&text).map_err(|error| error.to_string())
}

fn hex(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
