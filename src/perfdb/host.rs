//! Host and boundary rows: read from `data/host`, looked up by exact scope, derived only on request.
//! Beside them kernel rows of a known execution mode, which hold in their own scope alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use crate::timing::{
    Boundary, CaptureOutcome, Execution, HostClass, HostFile, InputError, Policy, Provenance, Row,
    Scope, SourceCell, Topology, read_text,
};

/// Every host and boundary row of a data folder.
#[derive(Debug, Default)]
pub struct HostRows {
    rows: Vec<Arc<Row>>,
    diagnostic: Vec<Arc<Row>>,
}

/// What a step or request asks of the host rows.
#[derive(Debug, Clone, PartialEq)]
pub struct HostKey<'a> {
    pub boundary: Boundary,
    /// Execution of the step; `None` for boundaries of the request (ingress, egress, client).
    pub execution: Option<Execution>,
    pub runtime: &'a str,
    pub version: &'a str,
    pub system: &'a str,
    pub model: &'a str,
    pub topology: Topology,
    /// Host CPU of the case, where it records one.
    pub cpu: Option<&'a str>,
    /// Prompt length, for boundaries whose cost was measured at one.
    pub isl: u32,
}

/// The answer to a [`HostKey`]: rows per rank and how well they fit.
#[derive(Debug, Clone)]
pub struct HostTime {
    /// One entry per rank that has rows of its own, or a single entry for all ranks. Each entry
    /// is averaged with equal weights.
    pub per_rank: Vec<Vec<Arc<Row>>>,
    pub class: HostClass,
    /// For derived answers: how and from what.
    pub rule: Option<String>,
}

impl HostRows {
    /// Reads every `*.yaml` of `folder`; a missing folder holds no rows.
    pub fn load(folder: &Path) -> Result<Self, InputError> {
        let unreadable = |error: std::io::Error| {
            InputError::new(
                folder,
                format!("cannot list the host rows: {error}"),
                "check the folder and its permissions",
            )
        };
        let mut files = Vec::new();
        match std::fs::read_dir(folder) {
            Ok(entries) => {
                for entry in entries {
                    let path = entry.map_err(unreadable)?.path();
                    if path.extension().is_some_and(|end| end == "yaml") {
                        files.push(path);
                    }
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(unreadable(error)),
        }
        files.sort();
        let (mut rows, mut diagnostic) = (Vec::new(), Vec::new());
        let mut seen = BTreeSet::new();
        for file in files {
            let read = read_file(&file)?;
            for row in read.rows.iter().chain(&read.diagnostic) {
                if !seen.insert(row.id.clone()) {
                    return Err(InputError::new(
                        &file,
                        format!("row `{}` stands twice", row.id),
                        "give each host row an id of its own",
                    ));
                }
            }
            rows.extend(read.rows);
            diagnostic.extend(read.diagnostic);
            refuse_twins(&rows, &file)?;
        }
        Ok(Self { rows, diagnostic })
    }

    pub fn all(&self) -> &[Arc<Row>] {
        &self.rows
    }

    /// Rows of profilers and module timing: kept for reading, found by no lookup.
    pub fn diagnostic(&self) -> &[Arc<Row>] {
        &self.diagnostic
    }

    /// Looks up a boundary: in the scope that differs least from the case's, measured rows before
    /// derived ones. An exact scope answers as it is; under [`Policy::Estimate`] rows of another
    /// one are derived and say so. `None`: missing.
    pub fn find(&self, key: &HostKey<'_>, policy: Policy) -> Option<HostTime> {
        let usable: Vec<&Arc<Row>> = self
            .rows
            .iter()
            .filter(|row| row.boundary == key.boundary && row.composes())
            .filter(|row| match key.execution {
                Some(step) => row.execution.serves_host(step) && !fell_back(row),
                None => true,
            })
            .filter(|row| {
                policy == Policy::Estimate || matches!(row.provenance, Provenance::Measured { .. })
            })
            .collect();
        let derived = |row: &Row| matches!(row.provenance, Provenance::Derived { .. });
        let (first, scope, differs) = usable
            .iter()
            .filter_map(|row| {
                let scope = row.scope.as_ref()?;
                Some((row, scope, differences(scope, key, row)))
            })
            // An iteration's host work grows with its requests: such a row says nothing elsewhere.
            .filter(|(row, _, differs)| differs.is_empty() || !row.shape.contains_key(REQUESTS))
            .min_by_key(|(row, _, differs)| (differs.len(), derived(row)))?;
        // Ranks of one measurement; another observer, shape or kind of row is another one.
        let same_scope: Vec<Arc<Row>> = usable
            .iter()
            .filter(|row| {
                row.scope.as_ref() == Some(scope)
                    && row.samples.observer == first.samples.observer
                    && row.shape == first.shape
                    && derived(row) == derived(first)
            })
            .map(|row| Arc::clone(row))
            .collect();
        let derived_row = derived(first);
        if differs.is_empty() && !derived_row {
            return Some(HostTime {
                per_rank: by_rank(same_scope),
                class: if key.cpu.is_some() {
                    HostClass::Measured
                } else {
                    HostClass::MeasuredHostUnrecorded
                },
                rule: None,
            });
        }
        if policy == Policy::Strict {
            return None;
        }
        let mut rule = match &first.provenance {
            Provenance::Derived { rule, .. } => format!("{rule} ({})", first.id),
            _ => same_scope
                .iter()
                .map(|row| row.id.as_str())
                .collect::<Vec<_>>()
                .join(" + "),
        };
        let per_rank = if differs.is_empty() {
            by_rank(same_scope)
        } else {
            rule = format!("{rule} carried over from another {}", differs.join(", "));
            // Ranks of another topology have no counterpart: their mean stands for each rank.
            vec![same_scope]
        };
        Some(HostTime {
            per_rank,
            class: HostClass::Derived,
            rule: Some(rule),
        })
    }
}

/// Shape keys of a kernel row of decode attention; a host row may have the first.
const REQUESTS: &str = "requests";
const MEAN_KV: &str = "mean_kv";
const LAYERS: &str = "layers";

impl HostRows {
    /// Kernel rows of exactly this deployment. Under [`Policy::Strict`] measured ones only.
    pub fn kernels(&self, key: &HostKey<'_>, policy: Policy) -> Vec<Arc<Row>> {
        let here = |row: &&Arc<Row>| {
            let scope = row.scope.as_ref();
            // A kernel does not run on the host's CPU.
            let key = HostKey { cpu: None, ..*key };
            scope.is_some_and(|scope| differences(scope, &key, row).is_empty())
        };
        self.rows
            .iter()
            .filter(|row| row.boundary == Boundary::GpuKernel && !fell_back(row))
            .filter(|row| {
                policy == Policy::Estimate || matches!(row.provenance, Provenance::Measured { .. })
            })
            .filter(here)
            .cloned()
            .collect()
    }
}

/// Requests, mean KV length and layers of a kernel row.
pub fn kernel_shape(row: &Row) -> Option<[f64; 3]> {
    let of = |key| row.shape.get(key).map(|count| *count as f64);
    Some([of(REQUESTS)?, of(MEAN_KV)?, of(LAYERS)?])
}

/// Whether the row names a graph whose capture fell back: it ran eagerly and times no graph.
fn fell_back(row: &Row) -> bool {
    row.execution != Execution::Eager && matches!(row.capture, CaptureOutcome::FellBack { .. })
}

/// What of the row's scope is not the case's.
fn differences(scope: &Scope, key: &HostKey<'_>, row: &Row) -> Vec<String> {
    let mut differs = Vec::new();
    let mut note = |name: &str, row: &str, case: &str| {
        if row != case {
            differs.push(format!("{name} ({row})"));
        }
    };
    note("model", &scope.model, key.model);
    note("runtime", &scope.runtime, key.runtime);
    note("version", &scope.version, key.version);
    note("system", &scope.system, key.system);
    note(
        "topology",
        &scope.topology.to_string(),
        &key.topology.to_string(),
    );
    if let Some(cpu) = key.cpu {
        note("host CPU", &scope.cpu, cpu);
    }
    if let Some(isl) = row.shape.get("isl") {
        note(
            "prompt length",
            &isl.to_string(),
            &u64::from(key.isl).to_string(),
        );
    }
    differs
}

fn by_rank(rows: Vec<Arc<Row>>) -> Vec<Vec<Arc<Row>>> {
    let mut ranks: Vec<Option<u32>> = rows.iter().map(|row| row.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
        .into_iter()
        .map(|rank| {
            rows.iter()
                .filter(|row| row.rank == rank)
                .map(Arc::clone)
                .collect()
        })
        .collect()
}

fn read_file(file: &Path) -> Result<HostRows, InputError> {
    let text = read_text(file, "the host rows")?;
    let parsed: HostFile = serde_yaml::from_str(&text).map_err(|error| {
        let fault = InputError::new(
            file,
            error.to_string(),
            "see the host rows in data/host for the fields a row needs; evaluation data is no \
             timing row",
        );
        match error.location() {
            Some(at) => fault.at(at.line(), at.column()),
            None => fault,
        }
    })?;
    let topology = parsed.scope.topology;
    let sizes = [topology.tp, topology.dp, topology.moe_tp, topology.moe_ep];
    if sizes.iter().any(|size| !(1..=GPUS_MAX).contains(size)) {
        return Err(InputError::new(
            file,
            format!("the topology is {sizes:?} (tp, dp, moe_tp, moe_ep)"),
            format!("each size counts from 1 to {GPUS_MAX}"),
        )
        .field("scope.topology"));
    }
    let scope = Arc::new(parsed.scope);
    let checked = |rows: Vec<Row>, check: fn(&Row, Topology, &Path) -> Result<(), InputError>| {
        rows.into_iter()
            .map(|mut row| {
                check(&row, topology, file)?;
                row.scope = Some(Arc::clone(&scope));
                Ok(Arc::new(row))
            })
            .collect::<Result<Vec<_>, InputError>>()
    };
    let diagnostic = parsed.diagnostic.map(|diagnostic| diagnostic.rows);
    Ok(HostRows {
        rows: checked(parsed.rows, check_composed)?,
        diagnostic: checked(diagnostic.unwrap_or_default(), check_diagnostic)?,
    })
}

/// Refuses two rows that no lookup can tell apart: their mean would be nobody's measurement.
fn refuse_twins(rows: &[Arc<Row>], file: &Path) -> Result<(), InputError> {
    let asked = |row: &Row| {
        let derived = matches!(row.provenance, Provenance::Derived { .. });
        let kernel = row.boundary == Boundary::GpuKernel;
        (
            (row.boundary, row.execution.mode(), fell_back(row)),
            (row.rank, row.samples.observer, derived),
            // A kernel's one row is scaled to any shape.
            if kernel {
                (
                    Some((row.module.clone(), row.covers_decode())),
                    BTreeMap::new(),
                )
            } else {
                (None, row.shape.clone())
            },
            format!("{:?}", row.scope),
        )
    };
    let mut seen = BTreeMap::new();
    for row in rows {
        if let Some(twin) = seen.insert(asked(row), &row.id) {
            return Err(InputError::new(
                file,
                format!("rows `{twin}` and `{}` answer the same lookup", row.id),
                "keep one row per boundary, execution mode, rank, observer and shape",
            ));
        }
    }
    Ok(())
}

/// GPUs of one node.
const GPUS_MAX: u32 = 8;
/// Longest time that is taken for one: a day, in milliseconds.
const MS_MAX: f64 = 86_400_000.0;

/// What any row must be.
fn check(row: &Row, topology: Topology, file: &Path) -> Result<(), InputError> {
    if row.rank.is_some_and(|rank| rank >= topology.ranks()) {
        return Err(InputError::new(
            file,
            format!("row `{}` is of rank {:?}", row.id, row.rank),
            format!("the scope has ranks 0 to {}", topology.ranks() - 1),
        )
        .field("rank"));
    }
    let ms = row.samples.mean_ms;
    if !(ms > 0.0 && ms <= MS_MAX) {
        return Err(InputError::new(
            file,
            format!("row `{}` has a mean of {ms} ms", row.id),
            "give a finite time greater than zero",
        )
        .field("samples.mean_ms"));
    }
    Ok(())
}

/// What a row must be that predictions are composed of.
fn check_composed(row: &Row, topology: Topology, file: &Path) -> Result<(), InputError> {
    check(row, topology, file)?;
    if !row.composes() {
        return Err(InputError::new(
            file,
            format!(
                "row `{}` was observed by {}, which inflates what it times",
                row.id, row.samples.observer
            ),
            "keep diagnostic figures out of the composed rows",
        )
        .field("samples.observer"));
    }
    if row.boundary == Boundary::GpuKernel {
        let counts = [REQUESTS, MEAN_KV, LAYERS];
        let shape = kernel_shape(row).is_some_and(|shape| shape.iter().all(|count| *count >= 1.0));
        if !shape || row.execution == Execution::Unknown {
            return Err(InputError::new(
                file,
                format!("row `{}` does not say what its kernel worked on", row.id),
                format!(
                    "give its execution mode and the shape: {}",
                    counts.join(", ")
                ),
            )
            .field("shape"));
        }
    }
    if row.boundary.is_host() && row.execution == Execution::Unknown {
        return Err(InputError::new(
            file,
            format!("row `{}` is a host time of unknown execution mode", row.id),
            "say in which mode it was measured: eager, full_graph or piecewise",
        )
        .field("execution"));
    }
    Ok(())
}

/// A diagnostic list that held a composed observer's row would hide it from every prediction.
fn check_diagnostic(row: &Row, topology: Topology, file: &Path) -> Result<(), InputError> {
    check(row, topology, file)?;
    if !row.samples.observer.is_diagnostic() {
        return Err(InputError::new(
            file,
            format!(
                "row `{}` was observed by {}, which is no diagnostic observer",
                row.id, row.samples.observer
            ),
            "move the row to `rows`",
        )
        .field("samples.observer"));
    }
    Ok(())
}

/// Reads the cells of a source CSV (`table,row,column,value,...`) that rows and check values name.
pub fn read_source_cells(file: &Path) -> Result<Vec<(SourceCell, f64)>, InputError> {
    let text = read_text(file, "the source cells")?;
    let mut cells = Vec::new();
    for (number, line) in text.lines().enumerate().skip(1) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let value = fields.get(3).and_then(|value| value.parse::<f64>().ok());
        let (Some(value), [table, row, column, ..]) = (value, fields.as_slice()) else {
            return Err(InputError::new(
                file,
                "a source cell needs table, row, column and a numeric value",
                "write `table,row,column,value,unit,observer`",
            )
            .row(number as u64 + 1));
        };
        cells.push((
            SourceCell {
                table: (*table).to_owned(),
                row: (*row).to_owned(),
                column: (*column).to_owned(),
            },
            value,
        ));
    }
    Ok(cells)
}
