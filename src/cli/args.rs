//! Arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use clap_complete::Shell;

/// Predicts TTFT and TPOT of LLM serving from measured host and GPU times, and holds every case to
/// its golden.
#[derive(Debug, Parser)]
#[command(name = "stepgate", version, max_term_width = 100)]
pub struct Arguments {
    /// Project folder with cases/ and data/ [default: found upwards from here]
    #[arg(long, global = true, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Op tables to use instead of data/systems: a folder in the aiconfigurator layout
    #[arg(long, global = true, value_name = "DIR")]
    pub systems_dir: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Predict TTFT and TPOT of cases, with their parts and what they rest on
    Predict {
        /// Case names, folders of cases, or paths of case files
        #[arg(required = true, value_name = "CASE")]
        cases: Vec<String>,
        /// Parts, critical paths, step counts, coverage and the rows behind each part
        #[arg(long)]
        explain: bool,
        /// TTFT and TPOT as linear forms over timing rows
        #[arg(long)]
        receipt: bool,
        /// One JSON object per case, one per line
        #[arg(long, conflicts_with_all = ["explain", "receipt"])]
        json: bool,
    },
    /// What predictions rest on: host classes, missing and derived boundaries, transferred rows
    Coverage {
        /// Case names or folders of cases [default: all]
        #[arg(value_name = "CASE")]
        cases: Vec<String>,
        /// JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Signed error against silicon per point, group and coverage class, beside the peer's
    Accuracy {
        /// Case names or folders of cases [default: all]
        #[arg(value_name = "CASE")]
        cases: Vec<String>,
        /// JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Compare fresh predictions with the goldens: what drifted inside its band, what left it
    Drift {
        /// Case names or folders of cases [default: all]
        #[arg(value_name = "CASE")]
        cases: Vec<String>,
        /// JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Print the JSON Schema of a case
    Schema,
    /// Work with op tables
    Tables {
        #[command(subcommand)]
        command: TablesCommand,
    },
    /// Print a shell's completion script
    Completions { shell: Shell },
}

#[derive(Debug, Subcommand)]
pub enum TablesCommand {
    /// Copy what the models need out of an aiconfigurator-core wheel or systems folder
    Import {
        /// The wheel, or an unpacked `systems` folder
        source: PathBuf,
        /// Models, by the name behind the owner in the package's config files, for example gpt-oss-120b
        #[arg(long, value_delimiter = ',', required = true)]
        models: Vec<String>,
        /// Systems, for example b200_sxm
        #[arg(long, value_delimiter = ',', required = true)]
        systems: Vec<String>,
        /// Where the tables go; the model configs go to `models` beside it
        #[arg(long)]
        out: PathBuf,
        /// Package version for the provenance, where the source is a folder
        #[arg(long)]
        package_version: Option<String>,
    },
}
