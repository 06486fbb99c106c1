//! `stepgate tables import`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use crate::perfdb::import::{ImportRequest, default_versions, import as import_tables};

use super::run::Stop;
use super::text::Table;

pub fn import(
    source: PathBuf,
    models: Vec<String>,
    systems: Vec<String>,
    folder: PathBuf,
    package_version: Option<String>,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let versions: BTreeMap<String, String> = default_versions();
    let request = ImportRequest {
        source,
        package_version,
        systems,
        models,
        keep: Vec::new(),
        versions,
        out: folder,
    };
    let report = import_tables(&request, &mut |step| eprintln!("{step}"))?;
    let mut table = Table::new(&["table", "rows in source", "rows kept", "duplicate keys"]);
    for imported in &report.tables {
        let Some(file) = &imported.file else { continue };
        table.row(vec![
            file.clone(),
            imported.source_rows.to_string(),
            imported.kept_rows.to_string(),
            imported.duplicate_keys.to_string(),
        ]);
    }
    table.write(out, 0)?;
    for absent in &report.absent {
        writeln!(out, "absent: {absent}")?;
    }
    writeln!(out, "{} bytes written", report.bytes)?;
    Ok(())
}
