//! Check values: boundaries that runs of a workload showed, beside those of its prediction.

use std::path::Path;

use serde::Deserialize;

use crate::compose::Part;
use crate::model::Scenario;
use crate::replay::Prediction;
use crate::timing::{Evaluation, InputError, Topology, read_text};

/// A `data/checks/*.yaml` file: one workload and what runs of it showed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckFile {
    model: String,
    system: String,
    runtime: String,
    version: String,
    topology: Topology,
    isl: u32,
    osl: u32,
    concurrency: u32,
    values: Vec<Evaluation>,
}

impl CheckFile {
    fn is_of(&self, scenario: &Scenario) -> bool {
        let deployment = &scenario.deployment;
        let workload = &scenario.workload;
        self.model == deployment.model
            && self.system == deployment.system
            && self.runtime == deployment.backend.name.as_str()
            && self.version == deployment.backend.version
            && self.topology == deployment.parallel
            && (self.isl, self.osl, self.concurrency)
                == (workload.isl, workload.osl, workload.concurrency)
    }
}

/// All check values of a data folder, in the order of the files' names.
///
/// # Errors
/// A file that cannot be read or parsed.
pub fn all_checks(data: &Path) -> Result<Vec<Evaluation>, InputError> {
    let files = read(data)?;
    Ok(files.into_iter().flat_map(|file| file.values).collect())
}

/// The check values of a scenario's workload; none for most.
///
/// # Errors
/// A file that cannot be read or parsed.
pub fn checks_of(data: &Path, scenario: &Scenario) -> Result<Vec<Evaluation>, InputError> {
    let files = read(data)?;
    Ok(files
        .into_iter()
        .filter(|file| file.is_of(scenario))
        .flat_map(|file| file.values)
        .collect())
}

fn read(data: &Path) -> Result<Vec<CheckFile>, InputError> {
    let folder = data.join("checks");
    let mut paths = Vec::new();
    if let Ok(entries) = std::fs::read_dir(&folder) {
        paths.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    paths.retain(|path| path.extension().is_some_and(|end| end == "yaml"));
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let text = read_text(path, "the check values")?;
            serde_yaml::from_str(&text).map_err(|error| {
                let fault = InputError::new(path, error.to_string(), "restore the file from git");
                match error.location() {
                    Some(at) => fault.at(at.line(), at.column()),
                    None => fault,
                }
            })
        })
        .collect()
}

/// The prediction's own value of a boundary: sums of the parts of mean TTFT, in milliseconds.
pub fn own_ms(name: &str, prediction: &Prediction) -> Option<f64> {
    let parts: &[Part] = match name {
        "ingress" => &[Part::Ingress],
        "executor queue" => &[
            Part::QueueIteration,
            Part::QueueBatchWait,
            Part::QueueBalance,
            Part::QueueCapacity,
        ],
        "schedule to first token" => &[
            Part::HostPrepare,
            Part::HostDispatch,
            Part::GraphLaunch,
            Part::Kernel,
            Part::Transfer,
            Part::HostFinish,
        ],
        "egress" => &[Part::Egress],
        "client minus server" => &[Part::ClientTransport],
        "client ttft" => &Part::ALL,
        _ => return None,
    };
    let receipt = &prediction.ttft_receipt;
    Some(parts.iter().map(|part| receipt.part_ms(*part)).sum())
}
