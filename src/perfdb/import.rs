//! Copies the op-table rows that the wanted models need out of an aiconfigurator-core package.
//!
//! The package has 12.6 million rows in 86 MB; one model on one system needs a few thousand. What is
//! written keeps the package's layout, columns and values, so that a row can be found again in its
//! source: `PROVENANCE.yaml` names each source table with its digest and the filter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use walkdir::WalkDir;
use zip::ZipArchive;

use super::keeps::{Keep, keeps_for_model};
use super::table::replace_file;
use crate::timing::{Column, InputError, OpTable, read_text};

/// The one place that says which version of each backend's tables is imported. The measured runs
/// used trtllm 1.3.0rc14 and rc18, for which the package has no tables; rc20 is the nearest.
pub const VERSIONS: [(&str, &str); 3] = [
    ("trtllm", "1.3.0rc20"),
    ("sglang", "0.5.14"),
    ("nccl", "2.29.2"),
];

const LICENCE: &str = "Apache-2.0";
const COPYRIGHT: &str =
    "Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.";

/// The largest file of the package that is read has 4 MB.
const ENTRY_BYTES_MAX: u64 = 256 << 20;

/// What to import, from where and to where.
#[derive(Debug, Clone)]
pub struct ImportRequest {
    /// The wheel, or an unpacked `systems` directory.
    pub source: PathBuf,
    /// Package version for the provenance, where the source is a directory and cannot say.
    pub package_version: Option<String>,
    /// System names such as `b200_sxm`.
    pub systems: Vec<String>,
    /// Model names such as `gpt-oss-120b`: the part of a config's file name after the owner, in
    /// any case. Each adds the rows of [`keeps_for_model`] and has its config copied; as
    /// `<id>=<name>`, under another name than the package's. A model that the package lacks is
    /// `<id>=<file>.json`: its config stays where it is. With `@<system>` or `@<system>/<backend>`
    /// behind, only tables of that system and backend get its rows. The order counts: a table has
    /// the rows of the first model first, so that a model added at the end moves no other row.
    pub models: Vec<String>,
    /// Further rows, beyond those of the models.
    pub keep: Vec<Keep>,
    /// Backend to version: [`default_versions`] unless others are wanted.
    pub versions: BTreeMap<String, String>,
    /// The tables go to this directory, the model configs to `models` beside it.
    pub out: PathBuf,
}

/// [`VERSIONS`] as a request holds them.
pub fn default_versions() -> BTreeMap<String, String> {
    VERSIONS
        .iter()
        .map(|(backend, version)| (backend.to_string(), version.to_string()))
        .collect()
}

/// The rows of one model, and the only system and backend (where one is named) that give them.
struct Group {
    keeps: Vec<Keep>,
    on: Option<(String, String)>,
}

impl Group {
    fn counts(&self, system: &str, backend: &str) -> bool {
        self.on
            .as_ref()
            .is_none_or(|on| on.0 == system && (on.1.is_empty() || on.1 == backend))
    }
}

/// What an import did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ImportReport {
    pub tables: Vec<ImportedTable>,
    /// Tables that were wanted and that the source lacks, as `<system>: <table>`.
    pub absent: Vec<String>,
    /// Bytes of all files written below `out`.
    #[serde(skip)]
    pub bytes: u64,
}

/// One source table and what was kept of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ImportedTable {
    /// Below the output directory, with `/`. None where no row was kept, so none was written.
    pub file: Option<String>,
    pub sha256: Option<String>,
    /// Within the package, with `/`.
    pub source: String,
    pub source_sha256: String,
    pub source_rows: u64,
    pub kept_rows: u64,
    /// Keys (all columns but `latency`) with more than one kept row. The rows stay separate.
    pub duplicate_keys: u64,
    /// Those of the table's filters that no row matched.
    pub matched_nothing: Vec<String>,
}

#[derive(Serialize)]
struct Provenance<'a> {
    package: &'a str,
    version: &'a str,
    wheel_sha256: Option<&'a str>,
    licence: &'static str,
    copyright: &'static str,
    notes: Vec<String>,
    systems: &'a [String],
    models: &'a [String],
    versions: &'a BTreeMap<String, String>,
    /// Of each table, on every system and from every backend: what was kept.
    filters: BTreeMap<&'a str, Vec<String>>,
    #[serde(flatten)]
    report: &'a ImportReport,
    copies: Vec<Copied>,
}

#[derive(Serialize, Clone)]
struct Copied {
    file: String,
    source: String,
    sha256: String,
}

/// Imports the rows that `request` wants. `progress` gets one line per table.
///
/// Everything is read, filtered and encoded before the first file is written, and each file is
/// written beside its place and renamed.
///
/// # Errors
/// The source is unreadable or damaged; a system or model is not in it; a table lacks a column that
/// a keep names; the output directory holds tables that this import would not write.
pub fn import(
    request: &ImportRequest,
    progress: &mut dyn FnMut(&str),
) -> Result<ImportReport, InputError> {
    let mut source = Source::open(request)?;
    // One group per model and one for the rest, in the order of their rows in the tables.
    let mut groups: Vec<Group> = Vec::new();
    let mut configs = Vec::new();
    for asked in &request.models {
        let (asked, on) = match asked.split_once('@') {
            Some((asked, on)) => (asked, Some(on)),
            None => (asked.as_str(), None),
        };
        let (id, model) = asked.split_once('=').unwrap_or((asked, asked));
        let on = on.map(|on| on.split_once('/').unwrap_or((on, "")));
        let on = on.map(|(system, backend)| (system.to_owned(), backend.to_owned()));
        if let Some((system, _)) = on.as_ref().filter(|on| !request.systems.contains(&on.0)) {
            return Err(InputError::new(
                &request.source,
                format!("`{id}` wants rows of `{system}`, which is not imported"),
                "name the system in --systems too",
            ));
        }
        if !is_plain(id) || id.contains('/') {
            return Err(InputError::new(
                &request.source,
                format!("`{id}` cannot be the name of a file"),
                "give --models as NAME or as ID=NAME, an ID without `/`",
            ));
        }
        let own = model.ends_with(".json");
        let (bytes, shown) = if own {
            let text = read_text(Path::new(model), "the model config")?;
            (text.into_bytes(), PathBuf::from(model))
        } else {
            let name = source.config_of(model)?;
            let read = (source.read(&name)?, source.shown(&name));
            configs.push((id.to_lowercase(), name, read.0.clone()));
            read
        };
        let config = serde_json::from_slice(&bytes).map_err(|e| {
            InputError::new(
                &shown,
                format!("not a JSON model config: {e}"),
                "use an undamaged copy of the package",
            )
            .at(e.line() as u64, e.column() as u64)
        })?;
        let keeps = keeps_for_model(&config).map_err(|mut e| {
            e.place.file = shown;
            e
        })?;
        groups.push(Group { keeps, on });
    }
    groups.push(Group {
        keeps: request.keep.clone(),
        on: None,
    });

    // Paths below `out`, in the order they are written.
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut copies = Vec::new();
    let mut report = ImportReport {
        tables: Vec::new(),
        absent: Vec::new(),
        bytes: 0,
    };
    for system in &request.systems {
        let yaml = format!("systems/{system}.yaml");
        if !source.names.contains_key(&yaml) {
            return Err(InputError::new(
                &request.source,
                format!("the source has no system `{system}`"),
                format!("use one of {}", source.systems().join(", ")),
            ));
        }
        copy(&mut source, &yaml, &mut files, &mut copies)?;
        import_system(
            &mut source,
            request,
            system,
            &groups,
            &mut files,
            &mut copies,
            &mut report,
            progress,
        )?;
    }
    if report.tables.iter().all(|t| t.kept_rows == 0) {
        return Err(InputError::new(
            &request.source,
            "no row of the source matches",
            "check the systems, the models and the versions",
        ));
    }

    let provenance = Provenance {
        package: &source.package,
        version: &source.version,
        wheel_sha256: source.wheel_sha256.as_deref(),
        licence: LICENCE,
        copyright: COPYRIGHT,
        notes: notes(request),
        systems: &request.systems,
        models: &request.models,
        versions: &request.versions,
        filters: filters(&groups),
        report: &report,
        copies,
    };
    let text = to_yaml(&request.out.join("PROVENANCE.yaml"), &provenance)?;
    refuse_strangers(&request.out, &files)?;
    let models = model_files(request, &source, configs)?;

    for (name, bytes) in &files {
        replace_file(&request.out.join(name), bytes)?;
        report.bytes += bytes.len() as u64;
    }
    for (path, bytes) in &models {
        replace_file(path, bytes)?;
    }
    // Last, so that a provenance never names a file that is not there yet.
    replace_file(&request.out.join("PROVENANCE.yaml"), text.as_bytes())?;
    report.bytes += text.len() as u64;
    Ok(report)
}

#[expect(
    clippy::too_many_arguments,
    reason = "one step of `import`, split for reading"
)]
fn import_system(
    source: &mut Source,
    request: &ImportRequest,
    system: &str,
    groups: &[Group],
    files: &mut BTreeMap<String, Vec<u8>>,
    copies: &mut Vec<Copied>,
    report: &mut ImportReport,
    progress: &mut dyn FnMut(&str),
) -> Result<(), InputError> {
    let prefix = format!("systems/data/{system}/");
    let keeps = groups.iter().flat_map(|group| &group.keeps);
    let wanted: BTreeSet<&str> = keeps.map(|keep| keep.table.as_str()).collect();
    let mut found = BTreeSet::new();
    let names: Vec<String> = source.names.keys().cloned().collect();
    for name in &names {
        let Some(rest) = name.strip_prefix(&prefix) else {
            continue;
        };
        let [_family, backend, version, file] = rest.split('/').collect::<Vec<_>>()[..] else {
            continue;
        };
        let Some(stem) = file.strip_suffix(".parquet") else {
            continue;
        };
        if request.versions.get(backend).is_none_or(|v| v != version) {
            continue;
        }
        let Some(&table) = wanted.get(stem) else {
            continue;
        };
        found.insert(table);
        let here: Vec<&Group> = groups
            .iter()
            .filter(|group| group.counts(system, backend))
            .collect();
        let (kept, mut row) = filter_table(source, name, stem, &here)?;
        progress(&format!(
            "{rest}: {} of {} rows",
            row.kept_rows, row.source_rows
        ));
        if row.kept_rows > 0 {
            let bytes = kept.encode()?;
            let file = format!("data/{system}/{rest}");
            row.sha256 = Some(sha256(&bytes));
            row.file = Some(file.clone());
            files.insert(file, bytes);
            let meta = format!(
                "{}collection_meta.yaml",
                name.strip_suffix(file_name(name)).unwrap_or_default()
            );
            if source.names.contains_key(&meta) && !files.contains_key(below_systems(&meta)) {
                copy(source, &meta, files, copies)?;
            }
        }
        report.tables.push(row);
    }
    for table in wanted.difference(&found) {
        report.absent.push(format!("{system}: {table}"));
    }
    Ok(())
}

fn file_name(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

fn below_systems(name: &str) -> &str {
    name.strip_prefix("systems/").unwrap_or(name)
}

fn copy(
    source: &mut Source,
    name: &str,
    files: &mut BTreeMap<String, Vec<u8>>,
    copies: &mut Vec<Copied>,
) -> Result<(), InputError> {
    let bytes = source.read(name)?;
    let file = below_systems(name).to_string();
    copies.push(Copied {
        file: file.clone(),
        source: source.names[name].clone(),
        sha256: sha256(&bytes),
    });
    files.insert(file, bytes);
    Ok(())
}

fn filter_table(
    source: &mut Source,
    name: &str,
    stem: &str,
    groups: &[&Group],
) -> Result<(OpTable, ImportedTable), InputError> {
    let bytes = source.read(name)?;
    let shown = source.shown(name);
    let fail = |e: std::io::Error| {
        InputError::new(
            &shown,
            format!("cannot unpack the table: {e}"),
            "check the space in the temporary directory",
        )
    };
    let mut unpacked = tempfile::tempfile().map_err(fail)?;
    unpacked.write_all(&bytes).map_err(fail)?;
    unpacked.rewind().map_err(fail)?;
    let table = OpTable::read_from(unpacked, &shown)?;

    let mut taken = vec![false; table.rows];
    let mut rows = Vec::new();
    let mut matched_nothing = Vec::new();
    for group in groups {
        let mut wanted = vec![false; table.rows];
        for keep in group.keeps.iter().filter(|keep| keep.table == stem) {
            let matching = keep.matching_rows(&table)?;
            if !matching.contains(&true) {
                push_new(&mut matched_nothing, keep.to_string());
            }
            for (wanted, matching) in wanted.iter_mut().zip(matching) {
                *wanted |= matching;
            }
        }
        rows.extend((0..table.rows).filter(|&row| wanted[row] && !taken[row]));
        for (taken, wanted) in taken.iter_mut().zip(wanted) {
            *taken |= wanted;
        }
    }
    let filtered = table.take(&rows);
    let imported = ImportedTable {
        file: None,
        sha256: None,
        source: source.names[name].clone(),
        source_sha256: sha256(&bytes),
        source_rows: table.rows as u64,
        kept_rows: filtered.rows as u64,
        duplicate_keys: duplicate_keys(&filtered),
        matched_nothing,
    };
    Ok((filtered, imported))
}

/// What is kept of each table, each filter once though several models have it.
fn filters(groups: &[Group]) -> BTreeMap<&str, Vec<String>> {
    let mut filters: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for group in groups {
        for keep in &group.keeps {
            let texts = filters.entry(keep.table.as_str()).or_default();
            let text = keep.to_string();
            match &group.on {
                Some(_) if texts.contains(&text) => {}
                Some((system, backend)) if backend.is_empty() => {
                    push_new(texts, format!("{text}, on {system} only"));
                }
                Some((system, backend)) => {
                    push_new(texts, format!("{text}, on {system} from {backend} only"));
                }
                None => push_new(texts, text),
            }
        }
    }
    filters
}

fn push_new(texts: &mut Vec<String>, text: String) {
    if !texts.contains(&text) {
        texts.push(text);
    }
}

fn duplicate_keys(table: &OpTable) -> u64 {
    let mut rows_of: HashMap<String, u64> = HashMap::new();
    for row in 0..table.rows {
        let mut key = String::new();
        for (name, column) in table.names.iter().zip(table.columns.iter()) {
            match column {
                _ if name == "latency" => {}
                Column::Text(v) => key.push_str(&v[row]),
                Column::Int(v) => key.push_str(&v[row].to_string()),
                Column::Float(v) => key.push_str(&v[row].to_bits().to_string()),
                Column::Unusable { .. } => {}
            }
            key.push('\u{1f}');
        }
        *rows_of.entry(key).or_default() += 1;
    }
    rows_of.values().filter(|&&rows| rows > 1).count() as u64
}

fn notes(request: &ImportRequest) -> Vec<String> {
    let mut notes = vec![
        "Rows are filtered; columns and values are unchanged and the files encoded again. \
         Yaml and json files are verbatim copies."
            .to_string(),
        "Latencies are in milliseconds.".to_string(),
        "A table has the rows of the first model first, then those that the next one adds; within \
         a model, rows are in the order of their source."
            .to_string(),
        "systems/silicon_sample.csv of the package is evaluation data and deliberately not imported."
            .to_string(),
    ];
    if request
        .versions
        .get("trtllm")
        .is_some_and(|v| v == "1.3.0rc20")
    {
        notes.push(
            "The package has no tables for trtllm 1.3.0rc14 and 1.3.0rc18; those of 1.3.0rc20 \
             stand in for them."
                .to_string(),
        );
    }
    notes
}

/// Refuses to leave tables in `out` that the new PROVENANCE.yaml would not name.
fn refuse_strangers(out: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<(), InputError> {
    for entry in WalkDir::new(out.join("data")).sort_by_file_name() {
        let Ok(entry) = entry else {
            // Mostly: the directory does not exist yet. Anything else fails again on writing.
            continue;
        };
        let path = entry.path();
        let name = path.strip_prefix(out).unwrap_or(path);
        let name = name.to_string_lossy().replace('\\', "/");
        if name.ends_with(".parquet") && !files.contains_key(&name) {
            return Err(InputError::new(
                path,
                "the output directory holds a table that this import does not write",
                "import all systems and models in one call, or remove the table first",
            ));
        }
    }
    Ok(())
}

/// The model configs and their provenance, as paths and contents. Entries of models that this import
/// does not touch stay as they are.
fn model_files(
    request: &ImportRequest,
    source: &Source,
    configs: Vec<(String, String, Vec<u8>)>,
) -> Result<Vec<(PathBuf, Vec<u8>)>, InputError> {
    if configs.is_empty() {
        return Ok(Vec::new());
    }
    let directory = request.out.parent().unwrap_or(Path::new("")).join("models");
    let provenance = directory.join("PROVENANCE.yaml");
    let mut known: BTreeMap<String, serde_json::Value> = match std::fs::read_to_string(&provenance)
    {
        Ok(text) => serde_yaml::from_str(&text).map_err(|e| {
            InputError::new(
                &provenance,
                format!("cannot be read: {e}"),
                "mend the file: a mapping from each model to where it came from",
            )
        })?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
        Err(e) => {
            return Err(InputError::new(
                &provenance,
                format!("cannot be read: {e}"),
                "check the permissions",
            ));
        }
    };
    let mut files = Vec::new();
    for (model, name, bytes) in configs {
        let file = format!("{model}.json");
        let entry = serde_json::json!({
            "file": file,
            "source": source.names[&name],
            "sha256": sha256(&bytes),
            "package": source.package,
            "version": source.version,
            "wheel_sha256": source.wheel_sha256,
            "package_licence": LICENCE,
        });
        known.insert(model, entry);
        files.push((directory.join(file), bytes));
    }
    let text = to_yaml(&provenance, &known)?;
    files.push((provenance, text.into_bytes()));
    Ok(files)
}

fn to_yaml<T: Serialize>(file: &Path, value: &T) -> Result<String, InputError> {
    serde_yaml::to_string(value).map_err(|e| {
        InputError::new(
            file,
            format!("cannot be written as YAML: {e}"),
            "report this as a bug",
        )
    })
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The package: names as `systems/...` and `model_configs/...`, and where their bytes are.
struct Source {
    place: PathBuf,
    /// Short name to the name within the package.
    names: BTreeMap<String, String>,
    /// None for a directory.
    archive: Option<ZipArchive<File>>,
    wheel_sha256: Option<String>,
    package: String,
    version: String,
}

impl Source {
    fn open(request: &ImportRequest) -> Result<Source, InputError> {
        if request.source.is_dir() {
            Source::open_directory(request)
        } else {
            Source::open_wheel(&request.source)
        }
    }

    fn open_wheel(wheel: &Path) -> Result<Source, InputError> {
        let unreadable = |e: &dyn fmt::Display| {
            InputError::new(
                wheel,
                format!("not a readable wheel: {e}"),
                "get it again: pip download --no-deps aiconfigurator-core==0.12.0",
            )
        };
        let mut file = File::open(wheel).map_err(|e| unreadable(&e))?;
        let wheel_sha256 = file_sha256(&mut file).map_err(|e| unreadable(&e))?;
        let archive = ZipArchive::new(file).map_err(|e| unreadable(&e))?;
        let mut names = BTreeMap::new();
        let mut metadata = None;
        for name in archive.file_names() {
            let name = name.map_err(|e| unreadable(&e))?.into_owned();
            if !is_plain(name.trim_end_matches('/')) {
                return Err(InputError::new(
                    wheel,
                    format!(
                        "the entry name {name:?} leads out of the archive or is not a plain path"
                    ),
                    "this is not the published package: get it again",
                ));
            }
            if let Some(short) = name.strip_prefix("aiconfigurator_core/") {
                names.insert(short.to_string(), name);
            } else if name.ends_with(".dist-info/METADATA") {
                metadata = Some(name);
            }
        }
        let mut source = Source {
            place: wheel.to_path_buf(),
            names,
            archive: Some(archive),
            wheel_sha256: Some(wheel_sha256),
            package: String::new(),
            version: String::new(),
        };
        let Some(metadata) = metadata else {
            return Err(unreadable(&"it has no METADATA"));
        };
        source.names.insert("METADATA".to_string(), metadata);
        let text = source.read("METADATA")?;
        let text = String::from_utf8_lossy(&text);
        let field = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.map(|value| value.trim().to_string())
                .ok_or_else(|| unreadable(&format!("METADATA has no `{key}`")))
        };
        source.package = field("Name:")?;
        source.version = field("Version:")?;
        Ok(source)
    }

    fn open_directory(request: &ImportRequest) -> Result<Source, InputError> {
        let root = &request.source;
        let configs = root.parent().unwrap_or(Path::new("")).join("model_configs");
        let mut names = BTreeMap::new();
        for (directory, prefix) in [(root, "systems"), (&configs, "model_configs")] {
            // Links are not followed, so nothing outside the directory is read.
            for entry in WalkDir::new(directory).sort_by_file_name() {
                let entry = match entry {
                    Ok(entry) => entry,
                    // Only an import of models needs the configs, and it reports their absence.
                    Err(_) if directory == &configs && !configs.exists() => break,
                    Err(e) => {
                        return Err(InputError::new(
                            directory,
                            format!("cannot list the directory: {e}"),
                            "check the permissions",
                        ));
                    }
                };
                let below = entry.path().strip_prefix(directory).ok();
                let Some(below) = below.and_then(Path::to_str) else {
                    continue;
                };
                if entry.file_type().is_file() {
                    let name = format!("{prefix}/{}", below.replace('\\', "/"));
                    names.insert(name.clone(), name);
                }
            }
        }
        Ok(Source {
            place: root.clone(),
            names,
            archive: None,
            wheel_sha256: None,
            package: "aiconfigurator-core".to_string(),
            version: request
                .package_version
                .clone()
                .unwrap_or_else(|| "unknown".to_string()),
        })
    }

    fn systems(&self) -> Vec<&str> {
        let names = self.names.keys();
        names
            .filter_map(|name| name.strip_prefix("systems/")?.strip_suffix(".yaml"))
            .filter(|name| {
                let data = format!("systems/data/{name}/");
                let next = self.names.range(data.clone()..).next();
                next.is_some_and(|(name, _)| name.starts_with(&data))
            })
            .collect()
    }

    /// The config whose file name is `<owner>--<model>_config.json`, in any case.
    fn config_of(&self, model: &str) -> Result<String, InputError> {
        let mut models = Vec::new();
        let mut found = Vec::new();
        for name in self.names.keys() {
            let stem = name
                .strip_prefix("model_configs/")
                .and_then(|name| name.strip_suffix("_config.json"))
                .filter(|stem| !stem.ends_with("_hf_quant"))
                .and_then(|stem| stem.split_once("--"));
            if let Some((_owner, stem)) = stem {
                models.push(stem.to_lowercase());
                if stem.eq_ignore_ascii_case(model) {
                    found.push(name.clone());
                }
            }
        }
        match &found[..] {
            [name] => Ok(name.clone()),
            [] => Err(InputError::new(
                &self.place,
                format!("the source has no config of the model `{model}`"),
                format!("use one of {}", models.join(", ")),
            )),
            several => Err(InputError::new(
                &self.place,
                format!(
                    "several configs are called `{model}`: {}",
                    several.join(", ")
                ),
                "give the rows to keep by hand",
            )),
        }
    }

    /// How errors name an entry.
    fn shown(&self, name: &str) -> PathBuf {
        match (&self.archive, self.names.get(name)) {
            (Some(_), Some(inner)) => self.place.join(inner),
            _ => self.on_disk(name),
        }
    }

    fn on_disk(&self, name: &str) -> PathBuf {
        match name.strip_prefix("systems/") {
            Some(below) => self.place.join(below),
            None => self.place.parent().unwrap_or(Path::new("")).join(name),
        }
    }

    fn read(&mut self, name: &str) -> Result<Vec<u8>, InputError> {
        let shown = self.shown(name);
        let fail = |e: &dyn fmt::Display| {
            InputError::new(
                &shown,
                format!("cannot be read: {e}"),
                "use an undamaged copy of the package",
            )
        };
        let on_disk = self.on_disk(name);
        let reader: Box<dyn Read> = match (&mut self.archive, self.names.get(name)) {
            (Some(archive), Some(inner)) => Box::new(archive.by_name(inner).map_err(|e| fail(&e))?),
            _ => Box::new(File::open(on_disk).map_err(|e| fail(&e))?),
        };
        let mut bytes = Vec::new();
        reader
            .take(ENTRY_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| fail(&e))?;
        if bytes.len() as u64 > ENTRY_BYTES_MAX {
            return Err(fail(&format!("it has more than {ENTRY_BYTES_MAX} bytes")));
        }
        Ok(bytes)
    }
}

fn file_sha256(file: &mut File) -> std::io::Result<String> {
    let mut digest = Sha256::new();
    let mut block = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut block)?;
        if read == 0 {
            break;
        }
        digest.update(&block[..read]);
    }
    file.rewind()?;
    Ok(digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// A relative path of ordinary names, with `/` only: output paths are built from these.
fn is_plain(name: &str) -> bool {
    !name.contains(['\\', ':', '\0'])
        && name
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;
    use zip::write::{SimpleFileOptions, ZipWriter};

    fn gemm() -> OpTable {
        // The grid n x k of {32, 64, 128} x {256, 512}, each cell twice.
        let mut columns: [Vec<i64>; 2] = [Vec::new(), Vec::new()];
        for n in [32, 64, 128] {
            for k in [256, 512] {
                for _ in 0..2 {
                    columns[0].push(n);
                    columns[1].push(k);
                }
            }
        }
        let rows = columns[0].len();
        let [n, k] = columns;
        OpTable {
            label: String::new(),
            file: "gemm_perf.parquet".into(),
            names: ["gemm_dtype", "n", "k", "latency"].map(String::from).into(),
            columns: vec![
                Column::Text(vec!["bfloat16".into(); rows]),
                Column::Int(n),
                Column::Int(k),
                Column::Float((0..rows).map(|row| 0.5 + row as f64).collect()),
            ]
            .into(),
            rows,
        }
    }

    fn model() -> serde_json::Value {
        serde_json::json!({
            "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "vocab_size": 201088, "num_local_experts": 128,
            "num_experts_per_tok": 4, "intermediate_size": 2880, "sliding_window": 128,
            "quantization_config": { "quant_method": "mxfp4" },
        })
    }

    /// A wheel with one system, one model and one GEMM table, and the entries `more`.
    fn wheel(dir: &Path, more: &[(&str, &[u8])]) -> PathBuf {
        let file = dir.join("package.whl");
        let mut zip = ZipWriter::new(File::create(&file).expect("create"));
        let table = gemm().encode().expect("encode");
        let model = model().to_string();
        let entries: [(&str, &[u8]); 6] = [
            ("p-1.dist-info/METADATA", b"Name: p\nVersion: 1.2\n"),
            ("aiconfigurator_core/systems/s1.yaml", b"gpu: {}\n"),
            ("aiconfigurator_core/systems/silicon_sample.csv", b"no\n"),
            (
                "aiconfigurator_core/systems/data/s1/gemm/trtllm/1.3.0rc20/gemm_perf.parquet",
                &table,
            ),
            (
                "aiconfigurator_core/systems/data/s1/gemm/trtllm/1.0/gemm_perf.parquet",
                &table,
            ),
            (
                "aiconfigurator_core/model_configs/owner--M1_config.json",
                model.as_bytes(),
            ),
        ];
        for (name, bytes) in entries.iter().chain(more) {
            zip.start_file(*name, SimpleFileOptions::default())
                .expect("start");
            zip.write_all(bytes).expect("write");
        }
        zip.finish().expect("finish");
        file
    }

    fn request(source: PathBuf, dir: &Path) -> ImportRequest {
        ImportRequest {
            source,
            package_version: None,
            systems: vec!["s1".to_string()],
            models: vec!["m1".to_string()],
            keep: Vec::new(),
            versions: default_versions(),
            out: dir.join("data/systems"),
        }
    }

    fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
        WalkDir::new(dir)
            .into_iter()
            .filter_map(Result::ok)
            .filter(|entry| entry.file_type().is_file())
            .map(|entry| {
                let below = entry.path().strip_prefix(dir).expect("below");
                (below.to_path_buf(), fs::read(entry.path()).expect("read"))
            })
            .collect()
    }

    #[test]
    fn an_import_keeps_layout_values_and_duplicates_and_repeats_byte_for_byte() {
        let dir = TempDir::new().expect("dir");
        let request = request(wheel(dir.path(), &[]), dir.path());
        let mut lines = Vec::new();
        let report = import(&request, &mut |line| lines.push(line.to_string())).expect("import");
        let [table] = &report.tables[..] else {
            panic!("one table of the wanted version: {:?}", report.tables);
        };
        assert_eq!(
            lines,
            ["gemm/trtllm/1.3.0rc20/gemm_perf.parquet: 2 of 12 rows"]
        );
        assert_eq!((table.source_rows, table.kept_rows), (12, 2));
        assert_eq!(table.duplicate_keys, 1);
        assert!(report.absent.contains(&"s1: moe_perf".to_string()));
        let file = table.file.as_deref().expect("file");
        assert_eq!(file, "data/s1/gemm/trtllm/1.3.0rc20/gemm_perf.parquet");
        let read = OpTable::read(&request.out.join(file)).expect("read");
        assert_eq!(read.names, gemm().names);
        // Every site of the model lies at or beyond the grid's last cell.
        assert_eq!(read.int("n").expect("n"), [128; 2]);
        assert_eq!(read.int("k").expect("k"), [512; 2]);

        let once = tree(&dir.path().join("data"));
        assert!(once.contains_key(Path::new("models/m1.json")));
        assert!(!once.keys().any(|path| path.ends_with("silicon_sample.csv")));
        let provenance = &once[Path::new("systems/PROVENANCE.yaml")];
        let provenance = String::from_utf8_lossy(provenance);
        for part in [
            "1.2",
            "Apache-2.0",
            "NVIDIA",
            "silicon_sample.csv",
            "1.3.0rc14",
        ] {
            assert!(provenance.contains(part), "{part} is not in {provenance}");
        }
        import(&request, &mut |_| {}).expect("import");
        assert_eq!(once, tree(&dir.path().join("data")));
    }

    #[test]
    fn a_wheel_whose_names_lead_out_is_refused_and_writes_nothing() {
        for name in [
            "aiconfigurator_core/systems/data/s1/../../../evil.parquet",
            "/etc/evil",
            "aiconfigurator_core\\systems\\evil",
            "../evil",
        ] {
            let dir = TempDir::new().expect("dir");
            let request = request(wheel(dir.path(), &[(name, b"x")]), dir.path());
            let error = import(&request, &mut |_| {}).expect_err(name);
            assert!(error.what.contains("evil"), "{error}");
            assert!(!dir.path().join("data").exists(), "{name}");
        }
    }

    #[test]
    fn a_damaged_table_or_wheel_writes_nothing() {
        let dir = TempDir::new().expect("dir");
        let bad = "aiconfigurator_core/systems/data/s1/moe/trtllm/1.3.0rc20/moe_perf.parquet";
        let request = request(wheel(dir.path(), &[(bad, b"PAR1 not")]), dir.path());
        let error = import(&request, &mut |_| {}).expect_err("damaged");
        assert!(error.place.file.ends_with(bad), "{error}");
        let bytes = fs::read(&request.source).expect("read");
        fs::write(&request.source, &bytes[..bytes.len() / 2]).expect("write");
        import(&request, &mut |_| {}).expect_err("half a wheel");
        assert!(!dir.path().join("data").exists());
    }

    #[test]
    fn an_unknown_system_or_model_lists_the_known_ones() {
        let dir = TempDir::new().expect("dir");
        let good = request(wheel(dir.path(), &[]), dir.path());
        let mut bad = good.clone();
        bad.systems = vec!["s2".to_string()];
        let error = import(&bad, &mut |_| {}).expect_err("system");
        assert!(error.help.contains("s1"), "{error}");
        let mut bad = good;
        bad.models = vec!["m2".to_string()];
        let error = import(&bad, &mut |_| {}).expect_err("model");
        assert!(error.help.contains("m1"), "{error}");
    }

    #[test]
    fn tables_of_an_earlier_import_are_not_orphaned() {
        let dir = TempDir::new().expect("dir");
        let request = request(wheel(dir.path(), &[]), dir.path());
        let other = request.out.join("data/s9/gemm/trtllm/1/gemm_perf.parquet");
        gemm().write(&other).expect("write");
        let error = import(&request, &mut |_| {}).expect_err("a stranger");
        assert_eq!(error.place.file, other);
        assert!(!request.out.join("PROVENANCE.yaml").exists());
    }

    #[test]
    fn a_directory_gives_the_same_tables_as_the_wheel() {
        let dir = TempDir::new().expect("dir");
        let from_wheel = request(wheel(dir.path(), &[]), dir.path());
        import(&from_wheel, &mut |_| {}).expect("import");
        let unpacked = dir.path().join("u");
        let archive = File::open(&from_wheel.source).expect("open");
        let mut archive = ZipArchive::new(archive).expect("zip");
        archive.extract(&unpacked).expect("extract");
        let mut from_directory = request(
            unpacked.join("aiconfigurator_core/systems"),
            &dir.path().join("second"),
        );
        from_directory.package_version = Some("1.2".to_string());
        import(&from_directory, &mut |_| {}).expect("import");
        assert_eq!(
            tree(&from_wheel.out.join("data")),
            tree(&from_directory.out.join("data"))
        );
    }

    #[test]
    fn an_id_names_the_copy_and_later_models_add_their_rows_behind() {
        let dir = TempDir::new().expect("dir");
        let mut second = model();
        // Of one table: the cell at the other end of the grid.
        for key in [
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "num_local_experts",
        ] {
            second[key] = serde_json::json!(8);
        }
        second["head_dim"] = serde_json::json!(1);
        let second = second.to_string();
        let name = "aiconfigurator_core/model_configs/owner--M2_config.json";
        let mut request = request(wheel(dir.path(), &[(name, second.as_bytes())]), dir.path());
        let latencies = |request: &ImportRequest| {
            let report = import(request, &mut |_| {}).expect("import");
            let file = report.tables[0].file.clone().expect("file");
            let read = OpTable::read(&request.out.join(file)).expect("read");
            read.float("latency").expect("latency").to_vec()
        };
        let alone = latencies(&request);
        request.models.push("other-id=m2".to_string());
        let both = latencies(&request);
        assert_eq!(both[..alone.len()], alone[..]);
        assert!(
            both.len() > alone.len() && both[alone.len()] < alone[0],
            "{both:?}"
        );
        assert!(dir.path().join("data/models/other-id.json").is_file());

        request.models[1] = "../m2=m2".to_string();
        let error = import(&request, &mut |_| {}).expect_err("an id that leads out");
        assert!(error.what.contains("../m2"), "{error}");
    }
}
