//! Opened data: op tables loaded once and lazily, host rows, system figures.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;

use crate::timing::{InputError, OpTable, Rows, read_text};

use super::grid::{Grid, Site};
use super::host::HostRows;
use super::kernel::{Candidate, OpKey, Refusal, Want};

/// The data directory: `systems/` (op tables in the aiconfigurator layout), `host/` (host and
/// boundary rows) and `models/`. Tables are read on first use and shared by every prediction.
#[derive(Debug)]
pub struct Database {
    systems_dir: PathBuf,
    host: HostRows,
    tables: Mutex<HashMap<PathBuf, Arc<OpTable>>>,
    figures: Mutex<HashMap<String, Arc<SystemFile>>>,
    /// Rows selected so far.
    selected: Mutex<HashMap<Selection, Arc<[Site]>>>,
}

/// What a table was asked for: its file, the kernels that count, and the op.
type Selection = (PathBuf, &'static [&'static str], OpKey);

/// Slowest memory that is taken for one, in bytes per second: a guard against other units.
const MEM_BW_MIN: f64 = 1e6;

/// `<system>.yaml`: the published figures this crate uses.
#[derive(Debug, Deserialize)]
struct SystemFile {
    gpu: GpuFigures,
    #[serde(default)]
    misc: MiscFigures,
}

#[derive(Debug, Deserialize)]
struct GpuFigures {
    /// Memory bandwidth, bytes per second.
    mem_bw: f64,
    /// Memory size, bytes.
    mem_capacity: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
struct MiscFigures {
    /// Bytes that NCCL takes, by number of GPUs.
    #[serde(default)]
    nccl_mem: BTreeMap<u32, u64>,
    /// Bytes that context, libraries and runtime take.
    #[serde(default)]
    other_mem: u64,
}

/// Memory of one GPU of a system, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuMemory {
    capacity: u64,
    other: u64,
    nccl: BTreeMap<u32, u64>,
}

impl GpuMemory {
    /// What is free on each of `gpus` GPUs before weights are loaded. Between the numbers of GPUs
    /// that the file names, the next larger one counts.
    pub fn bytes_free(&self, gpus: u32) -> u64 {
        let nccl = self
            .nccl
            .range(gpus..)
            .next()
            .map_or(0, |(_, bytes)| *bytes);
        self.capacity.saturating_sub(self.other + nccl)
    }
}

impl Database {
    /// Opens `data`, with the op tables of `systems_dir` where one is given.
    pub fn open(data: &Path, systems_dir: Option<&Path>) -> Result<Self, InputError> {
        let systems_dir = systems_dir.map_or_else(|| data.join("systems"), Path::to_path_buf);
        if !systems_dir.is_dir() {
            return Err(InputError::new(
                &systems_dir,
                "no such folder of op tables",
                "give the folder that holds `<system>.yaml` and `data/` with --systems-dir",
            ));
        }
        Ok(Self {
            systems_dir,
            host: HostRows::load(&data.join("host"))?,
            tables: Mutex::new(HashMap::new()),
            figures: Mutex::new(HashMap::new()),
            selected: Mutex::new(HashMap::new()),
        })
    }

    pub fn host(&self) -> &HostRows {
        &self.host
    }

    /// Memory of a system's GPU; `None` where its file gives no size.
    pub fn gpu_memory(&self, system: &str) -> Result<Option<GpuMemory>, InputError> {
        let (figures, _) = self.figures(system)?;
        Ok(figures.gpu.mem_capacity.map(|capacity| GpuMemory {
            capacity,
            other: figures.misc.other_mem,
            nccl: figures.misc.nccl_mem.clone(),
        }))
    }

    fn figures(&self, system: &str) -> Result<(Arc<SystemFile>, PathBuf), InputError> {
        let file = self.systems_dir.join(format!("{system}.yaml"));
        let mut known = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(figures) = known.get(system) {
            return Ok((Arc::clone(figures), file));
        }
        let text = read_text(&file, "the system's figures")?;
        let figures: SystemFile = serde_yaml::from_str(&text).map_err(|error| {
            let at = error.location();
            let fault = InputError::new(&file, error.to_string(), "");
            at.map_or(fault.clone(), |at| fault.at(at.line(), at.column()))
        })?;
        let figures = Arc::new(figures);
        known.insert(system.to_owned(), Arc::clone(&figures));
        Ok((figures, file))
    }

    /// Memory bandwidth of a system in bytes per millisecond.
    pub(super) fn memory_bytes_per_ms(&self, system: &str) -> Result<f64, InputError> {
        let (figures, file) = self.figures(system)?;
        let bandwidth = figures.gpu.mem_bw;
        if !(bandwidth.is_finite() && bandwidth >= MEM_BW_MIN) {
            return Err(InputError::new(
                &file,
                format!("memory bandwidth is {bandwidth}"),
                format!("give bytes per second, at least {MEM_BW_MIN:e}"),
            )
            .field("gpu.mem_bw"));
        }
        Ok(bandwidth / 1e3)
    }

    fn table(&self, file: &Path) -> Result<Arc<OpTable>, InputError> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = tables.get(file) {
            return Ok(Arc::clone(table));
        }
        let mut table = OpTable::read(file)?;
        table.label = label_of(&self.systems_dir, file);
        let table = Arc::new(table);
        tables.insert(file.to_path_buf(), Arc::clone(&table));
        Ok(table)
    }

    /// The rows that answer `key`, selected once.
    fn select(
        &self,
        file: PathBuf,
        table: &OpTable,
        key: &OpKey,
        candidate: &Candidate,
    ) -> Result<Arc<[Site]>, InputError> {
        let mut selected = self.selected.lock().unwrap_or_else(PoisonError::into_inner);
        let selection = (file, candidate.kernel_sources, key.clone());
        if let Some(sites) = selected.get(&selection) {
            return Ok(Arc::clone(sites));
        }
        let sites: Arc<[Site]> = select(table, key, candidate)?.into();
        selected.insert(selection, Arc::clone(&sites));
        Ok(sites)
    }

    fn file_of(&self, system: &str, candidate: &Candidate) -> PathBuf {
        self.systems_dir
            .join("data")
            .join(system)
            .join(candidate.family)
            .join(candidate.backend)
            .join(candidate.version)
            .join(format!("{}.parquet", candidate.table))
    }

    /// The grid that answers `key` on `system` for a case served by `framework` at `version`,
    /// with what its use must flag; its rows are added to `rows`.
    pub(super) fn grid(
        &self,
        system: &str,
        framework: &str,
        version: &str,
        key: &OpKey,
        rows: &mut Rows,
    ) -> Result<Result<(Grid, Vec<String>), Refusal>, InputError> {
        let mut absent = Vec::new();
        for candidate in key.candidates(framework) {
            let file = self.file_of(system, &candidate);
            // Only a file that is not there is absent; anything else in its place is a fault.
            if matches!(std::fs::symlink_metadata(&file), Err(error)
                if error.kind() == std::io::ErrorKind::NotFound)
            {
                absent.push(file);
                continue;
            }
            let table = self.table(&file)?;
            let sites = self.select(file, &table, key, &candidate)?;
            if sites.is_empty() {
                continue;
            }
            let flags = transfer_flags(key, &candidate, framework, version, &sites);
            let grid = Grid::build(key.clone(), &sites, |ms, index, duplicates| {
                rows.op_row(&table, index, ms, duplicates)
            });
            return Ok(Ok((grid, flags)));
        }
        let mut missing = format!("{key} on {system}");
        if let Some(file) = absent.first() {
            missing = format!("{missing} (no table {})", label_of(&self.systems_dir, file));
        }
        Ok(Err(Refusal { missing }))
    }
}

fn label_of(systems_dir: &Path, file: &Path) -> String {
    let inner = file.strip_prefix(systems_dir.join("data")).unwrap_or(file);
    inner
        .with_extension("")
        .to_string_lossy()
        .replace('\\', "/")
}

/// Flags of a grid that another framework, version, kernel or shape stands in for.
fn transfer_flags(
    key: &OpKey,
    candidate: &Candidate,
    framework: &str,
    version: &str,
    sites: &[Site],
) -> Vec<String> {
    let mut flags = Vec::new();
    if candidate.other_kernel {
        flags.push(format!(
            "ANOTHER KERNEL {}",
            candidate.kernel_sources.join("+")
        ));
    }
    if candidate.backend == "nccl" {
        flags.push(format!("transferred: nccl {}", candidate.version));
    } else if candidate.backend != framework {
        flags.push(format!(
            "transferred: framework {} {} kernel {}",
            candidate.backend,
            candidate.version,
            candidate.kernel_sources.join("+")
        ));
    } else if candidate.version != version {
        flags.push(format!("transferred: version {}", candidate.version));
    }
    if let OpKey::Gemm { n, k, .. } = key {
        let (n, k) = (f64::from(*n), f64::from(*k));
        if !sites.iter().any(|site| site.at[0] == n && site.at[1] == k) {
            flags.push("transferred: shape".to_owned());
        }
    }
    flags
}

/// The rows of `table` that answer `key`, at their grid coordinates and in their order.
fn select(table: &OpTable, key: &OpKey, candidate: &Candidate) -> Result<Vec<Site>, InputError> {
    let mut kept: Vec<u32> = keep(
        table,
        (0..table.rows as u32).collect(),
        "kernel_source",
        |value| candidate.kernel_sources.is_empty() || candidate.kernel_sources.contains(&value),
    )?;
    let mut brackets = Vec::new();
    for (column, want) in key.filter() {
        match want {
            Want::Text(wanted) => kept = keep(table, kept, column, |value| value == wanted)?,
            Want::Int(wanted) => {
                let values = table.int(column)?;
                kept.retain(|&row| values[row as usize] == wanted);
            }
            Want::Bracket(wanted) => brackets.push((column, wanted)),
        }
    }
    let mut bracketed: Vec<&[i64]> = Vec::new();
    for (column, wanted) in brackets {
        let values = table.int(column)?;
        let at = |row: &u32| values[*row as usize];
        // The lines around the wanted one, on each line of the axes before: tables need not hold
        // the same values on all of them.
        let outer = bracketed.clone();
        let line = |row: &u32| {
            outer
                .iter()
                .map(|axis| axis[*row as usize])
                .collect::<Vec<_>>()
        };
        let mut around: BTreeMap<Vec<i64>, [Option<i64>; 2]> = BTreeMap::new();
        for row in &kept {
            let [below, above] = around.entry(line(row)).or_default();
            let value = at(row);
            if value <= wanted {
                *below = Some(below.map_or(value, |known: i64| known.max(value)));
            }
            if value >= wanted {
                *above = Some(above.map_or(value, |known: i64| known.min(value)));
            }
        }
        kept.retain(|row| {
            let [below, above] = around[&line(row)];
            let value = Some(at(row));
            // A line that is hit needs no neighbour.
            if below == Some(wanted) {
                value == below
            } else {
                value == below || value == above
            }
        });
        bracketed.push(values);
    }
    let latency = table.float("latency")?;
    let mut coordinates = Vec::new();
    for axis in key.axes() {
        coordinates.push(match *axis {
            "kv" => Axis::Sum(table.int("isl")?, table.int("step")?),
            name => Axis::Column(table.int(name)?),
        });
    }
    let mut sites = kept
        .into_iter()
        .map(|row| {
            let mut at = [0.0; 3];
            for ((slot, axis), name) in at.iter_mut().zip(&coordinates).zip(key.axes()) {
                *slot = axis.at(row as usize);
                if *slot < 1.0 {
                    return Err(InputError::new(
                        &table.file,
                        format!("the axis is {slot}"),
                        "shapes count from 1; restore the table from git",
                    )
                    .row(u64::from(row) + 1)
                    .field(*name));
                }
            }
            Ok(Site {
                at,
                ms: latency[row as usize],
                index: row,
            })
        })
        .collect::<Result<Vec<Site>, _>>()?;
    sites.sort_unstable_by(|a, b| {
        a.at.partial_cmp(&b.at)
            .unwrap_or(std::cmp::Ordering::Equal)
            .then(a.index.cmp(&b.index))
    });
    Ok(sites)
}

/// A grid axis: a column, or the sum of two (decode KV length = isl + step).
enum Axis<'a> {
    Column(&'a [i64]),
    Sum(&'a [i64], &'a [i64]),
}

impl Axis<'_> {
    fn at(&self, row: usize) -> f64 {
        match self {
            Self::Column(values) => values[row] as f64,
            Self::Sum(a, b) => a[row] as f64 + b[row] as f64,
        }
    }
}

/// Rows of `from` whose text column satisfies `wanted`. Interned values are compared once each.
fn keep(
    table: &OpTable,
    mut from: Vec<u32>,
    column: &str,
    wanted: impl Fn(&str) -> bool,
) -> Result<Vec<u32>, InputError> {
    let values = table.text(column)?;
    let mut known: Vec<(*const u8, bool)> = Vec::new();
    from.retain(|&row| {
        let value = &values[row as usize];
        let seen = value.as_ptr();
        match known.iter().find(|(pointer, _)| *pointer == seen) {
            Some((_, answer)) => *answer,
            None => {
                let answer = wanted(value);
                known.push((seen, answer));
                answer
            }
        }
    });
    Ok(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_leave_out_the_folder() {
        let label = label_of(
            Path::new("/x/systems"),
            Path::new("/x/systems/data/b200_sxm/moe/sglang/0.5.14/moe_perf.parquet"),
        );
        assert_eq!(label, "b200_sxm/moe/sglang/0.5.14/moe_perf");
    }
}
