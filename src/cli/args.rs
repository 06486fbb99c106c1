//! Arguments.

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::RangedI64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use serde::de::DeserializeOwned;

use crate::case::{Date, ImportRequest};
use crate::model::{BackendName, GemmDtype, MoeDtype};
use crate::replay::StepKind;
use crate::timing::{Policy, Scope, Topology};

use super::compare::Setting;

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
        #[command(flatten)]
        timeline: TimelineArguments,
    },
    /// Two serving cases side by side, or one before and after a change of its keys: throughput,
    /// TTFT, TPOT, their parts and the steps
    Compare {
        /// Case name or path of a case file
        #[arg(value_name = "CASE_A")]
        a: String,
        /// The other case
        #[arg(value_name = "CASE_B", required_unless_present = "set")]
        b: Option<String>,
        /// Compare with CASE_A under another value of a key, such as
        /// serving.mixed_execution=split; null takes the key out; may be given again
        #[arg(long, value_name = "KEY=VALUE", conflicts_with = "b", value_parser = Setting::parse)]
        set: Vec<Setting>,
        /// JSON instead of text
        #[arg(long)]
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
    /// Rows that carry the most of TTFT and TPOT, and what they are worth: what to measure next
    Sensitivity {
        /// Case names or folders of cases [default: all]
        #[arg(value_name = "CASE")]
        cases: Vec<String>,
        #[arg(long, value_enum, default_value_t = PolicyName::Estimate)]
        policy: PolicyName,
        /// Rows to list per metric
        #[arg(long, default_value_t = 20)]
        top: usize,
        /// Every row as one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Predict with a mechanism and without it, and compare the errors by group
    Ablation {
        #[arg(value_enum)]
        mechanism: Mechanism,
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
    /// Hold the working tree to a base revision: every change outside its band must be recorded
    Gate(GateArguments),
    /// The ledger of accepted changes
    Ledger {
        #[command(subcommand)]
        command: LedgerCommand,
    },
    /// Print the JSON Schema of a case
    Schema,
    /// Work with cases
    Case {
        #[command(subcommand)]
        command: CaseCommand,
    },
    /// Work with op tables
    Tables {
        #[command(subcommand)]
        command: TablesCommand,
    },
    /// Work with profiles: Nsight Systems SQLite exports, PyTorch profiler traces (.json, .json.gz)
    Trace {
        #[command(subcommand)]
        command: TraceCommand,
    },
    /// Print a shell's completion script
    Completions { shell: Shell },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum PolicyName {
    Strict,
    Estimate,
}

impl PolicyName {
    pub fn policy(self) -> Policy {
        match self {
            Self::Strict => Policy::Strict,
            Self::Estimate => Policy::Estimate,
        }
    }
}

/// A picture of a prediction in time.
#[derive(Debug, Args)]
pub struct TimelineArguments {
    /// Write the estimate of one serving case as Chrome-trace JSON for ui.perfetto.dev, or, where
    /// FILE ends in .svg, as a picture; `-` is standard output
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// Iteration to show op by op: its number, or slowest, slowest-prefill, slowest-mixed or
    /// slowest-decode [default: slowest-mixed, else slowest]
    #[arg(long, value_name = "STEP", requires = "timeline")]
    pub step: Option<StepPick>,
    /// Iterations to show op by op, A and B among them
    #[arg(
        long,
        value_name = "A..B",
        requires = "timeline",
        conflicts_with = "step"
    )]
    pub steps: Option<StepRange>,
    /// Show the iterations of a request's first token op by op
    #[arg(long, value_name = "R", requires = "timeline", conflicts_with_all = ["step", "steps"])]
    pub request: Option<u32>,
}

/// An iteration by number or by what it is.
#[derive(Debug, Clone, Copy)]
pub enum StepPick {
    Number(usize),
    /// The longest, of a kind where one is named.
    Slowest(Option<StepKind>),
}

impl FromStr for StepPick {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "slowest" => Self::Slowest(None),
            "slowest-prefill" => Self::Slowest(Some(StepKind::Prefill)),
            "slowest-mixed" => Self::Slowest(Some(StepKind::Mixed)),
            "slowest-decode" => Self::Slowest(Some(StepKind::Decode)),
            number => Self::Number(number.parse().map_err(
                |_| "expected a number, slowest, slowest-prefill, slowest-mixed or slowest-decode",
            )?),
        })
    }
}

/// Iterations from `first` to `last`.
#[derive(Debug, Clone, Copy)]
pub struct StepRange {
    pub first: usize,
    pub last: usize,
}

impl FromStr for StepRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = |(first, last): (&str, &str)| {
            let range = Self {
                first: first.parse().ok()?,
                last: last.parse().ok()?,
            };
            (range.first <= range.last).then_some(range)
        };
        (text.split_once("..").and_then(parse))
            .ok_or_else(|| "expected two numbers in order, such as 10..12".to_owned())
    }
}

/// What an ablation takes away.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Mechanism {
    /// Expert rows of the recipe's kernel family, against the kernel that the serving framework's
    /// own tables hold by default
    Kernels,
    /// Batch wait, attention-DP balance and receive interval, in the cases that have one
    Waits,
}

#[derive(Debug, Args)]
pub struct GateArguments {
    /// Case names or folders of cases, where not everything must run [default: what changed]
    #[arg(value_name = "CASE")]
    pub cases: Vec<String>,
    /// Revision to compare with: a commit, branch or tag
    #[arg(long, value_name = "REV")]
    pub base: String,
    #[arg(long, value_enum, default_value_t = Format::Terminal)]
    pub format: Format,
    /// Write the report there, the terminal still gets its own; may be given again. A name that ends
    /// in .md, .json or .xml decides the format
    #[arg(long, value_name = "FILE")]
    pub out: Vec<PathBuf>,
    /// JUnit files of test shards: together they must have run every point test, each once
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub results: Vec<PathBuf>,
    /// The day that tolerances are held to [default: today]
    #[arg(long, value_name = "DATE", hide = true)]
    pub today: Option<Date>,
}

/// How a report is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Terminal,
    /// For a pull request's comment
    Markdown,
    Json,
    Junit,
}

#[derive(Debug, Subcommand)]
pub enum LedgerCommand {
    /// Record every move between the base's goldens and the reviewed ones of the working tree
    Record {
        /// Why the change is right
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Only cases of this name; `*` stands for anything
        #[arg(long, value_name = "GLOB")]
        case: Option<String>,
        /// What makes many points move alike
        #[arg(long, value_name = "TEXT", requires = "rows")]
        mechanism: Option<String>,
        /// The rows that the mechanism rests on
        #[arg(
            long,
            value_name = "ROW",
            value_delimiter = ',',
            requires = "mechanism"
        )]
        rows: Vec<String>,
        /// Revision whose goldens the move began at
        #[arg(long, value_name = "REV", default_value = "HEAD")]
        base: String,
        /// The day of the rows [default: today]
        #[arg(long, value_name = "DATE", hide = true)]
        today: Option<Date>,
    },
    /// Check that every line is well-formed and agrees with itself
    Verify,
    /// History of a case or point
    Show {
        /// A point's number or a case's name
        #[arg(value_name = "POINT|CASE")]
        of: String,
        /// JSON Lines instead of text
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum TablesCommand {
    /// Copy what the models need out of an aiconfigurator-core wheel or systems folder
    Import {
        /// The wheel, or an unpacked `systems` folder
        source: PathBuf,
        /// Models, by the name behind the owner in the package's config files, for example
        /// gpt-oss-120b; ID=NAME gives one another id, ID=FILE.json takes a config of your own,
        /// and @SYSTEM or @SYSTEM/BACKEND behind it limits where its rows come from
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

#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// What devices and hosts did: busy and idle time by cause, launches, graphs, synchronisations,
    /// iterations, collectives. A file that is cut off is summarised as far as it goes, and the
    /// exit code is 5
    Summary {
        /// One file per rank of one run
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Names of the marks that stand for iterations; `*` stands for anything [default: profiler
        /// steps, else numbered annotations that speak of a step or iteration]
        #[arg(long, value_name = "PATTERN")]
        iteration: Option<String>,
        /// One JSON object, times in integer nanoseconds
        #[arg(long)]
        json: bool,
    },
    /// Rebuild each traced step on the lanes from its own host times, kernels and dependencies, and
    /// compare its composed span with the traced one
    Replay {
        /// One file per rank of one run
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Names of the marks that stand for steps; `*` stands for anything [default: profiler
        /// steps, else numbered annotations that speak of a step or iteration, else all as one]
        #[arg(long, value_name = "PATTERN")]
        iteration: Option<String>,
        /// Write the traced and the composed run side by side as Chrome-trace JSON for
        /// ui.perfetto.dev
        #[arg(long, value_name = "FILE")]
        timeline: Option<PathBuf>,
        /// One JSON object, times in integer nanoseconds
        #[arg(long)]
        json: bool,
    },
    /// Turn the profiles of a run into timing rows of a host file: diagnostic ones, of which no
    /// prediction is composed
    Import(TraceImport),
}

/// A size of a topology on one node, as the loader of host rows allows it.
fn size() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=8)
}

#[derive(Debug, Args)]
pub struct TraceImport {
    /// One file per rank of one run
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    #[arg(long)]
    pub runtime: Runtime,
    /// Exact version of the runtime
    #[arg(long)]
    pub version: String,
    /// System, for example b200_sxm
    #[arg(long)]
    pub system: String,
    /// File stem in data/models
    #[arg(long)]
    pub model: String,
    /// Attention tensor parallelism
    #[arg(long, value_parser = size())]
    pub tp: u32,
    /// Attention data parallelism
    #[arg(long, default_value_t = 1, value_parser = size())]
    pub dp: u32,
    /// Expert parallelism
    #[arg(long, default_value_t = 1, value_parser = size())]
    pub moe_ep: u32,
    /// Tensor parallelism of the experts [default: the ranks that --moe-ep leaves]
    #[arg(long, value_parser = size())]
    pub moe_tp: Option<u32>,
    /// Host CPU model
    #[arg(long)]
    pub cpu: String,
    /// Logical CPUs that the process was allowed to run on
    #[arg(long)]
    pub logical_cpus: Option<u32>,
    /// Names of the marks that stand for iterations; `*` stands for anything [default: profiler
    /// steps, else numbered annotations that speak of a step or iteration]
    #[arg(long, value_name = "PATTERN")]
    pub iteration: Option<String>,
    /// The host file to write, for example data/host/NAME.yaml; its rows are named after it
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Replace the file of --out
    #[arg(long)]
    pub force: bool,
}

impl TraceImport {
    pub fn scope(&self) -> Scope {
        let left = self.tp * self.dp / self.moe_ep;
        Scope {
            runtime: self.runtime.backend().as_str().to_owned(),
            version: self.version.clone(),
            system: self.system.clone(),
            model: self.model.clone(),
            topology: Topology {
                tp: self.tp,
                dp: self.dp,
                moe_tp: self.moe_tp.unwrap_or(left.max(1)),
                moe_ep: self.moe_ep,
            },
            cpu: self.cpu.clone(),
            logical_cpus: self.logical_cpus,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum CaseCommand {
    /// Turn a TensorRT-LLM options file or an SGLang command line into a case
    Import(CaseImport),
}

#[derive(Debug, Args)]
pub struct CaseImport {
    /// The file given to trtllm-serve as --extra_llm_api_options, or a file with SGLang's arguments
    pub settings: PathBuf,
    #[arg(long)]
    pub runtime: Runtime,
    /// Exact version of the runtime
    #[arg(long)]
    pub version: String,
    /// File stem in data/models
    #[arg(long)]
    pub model: String,
    /// System, for example b200_sxm
    #[arg(long)]
    pub system: String,
    /// Longest prompt, in tokens
    #[arg(long)]
    pub isl: u32,
    /// Longest output, in tokens
    #[arg(long)]
    pub osl: u32,
    #[arg(long)]
    pub concurrency: u32,
    /// GPUs as launched [default: from the settings, else 1]
    #[arg(long)]
    pub tp: Option<u32>,
    /// Expert parallelism [default: from the settings, else 1]
    #[arg(long)]
    pub ep: Option<u32>,
    /// Attention data parallelism [default: from the settings, else 1]
    #[arg(long)]
    pub dp: Option<u32>,
    /// Precision of the dense GEMMs, as a case names it [default: bfloat16]
    #[arg(long, value_parser = named::<GemmDtype>)]
    pub gemm: Option<GemmDtype>,
    /// Precision of the projections into attention, as a case names it [default: that of --gemm]
    #[arg(long, value_parser = named::<GemmDtype>)]
    pub qkv_proj: Option<GemmDtype>,
    /// Precision of the experts, as a case names it
    #[arg(long, value_parser = named::<MoeDtype>)]
    pub moe: Option<MoeDtype>,
    /// trtllm-serve's option: requests per rank in one iteration
    #[arg(long)]
    pub max_batch_size: Option<u32>,
    /// trtllm-serve's option: tokens per rank in one iteration
    #[arg(long)]
    pub max_num_tokens: Option<u32>,
    /// trtllm-serve's option: longest prompt and output together
    #[arg(long)]
    pub max_seq_len: Option<u32>,
    /// Write the case there instead of to standard output
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Replace the file of --out
    #[arg(long, requires = "out")]
    pub force: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Runtime {
    Trtllm,
    Sglang,
}

impl Runtime {
    fn backend(self) -> BackendName {
        match self {
            Self::Trtllm => BackendName::Trtllm,
            Self::Sglang => BackendName::Sglang,
        }
    }
}

impl CaseImport {
    pub fn request(&self) -> ImportRequest {
        ImportRequest {
            runtime: self.runtime.backend(),
            version: self.version.clone(),
            model: self.model.clone(),
            system: self.system.clone(),
            isl: self.isl,
            osl: self.osl,
            concurrency: self.concurrency,
            tp: self.tp,
            ep: self.ep,
            dp: self.dp,
            gemm: self.gemm,
            qkv_proj: self.qkv_proj,
            max_batch_size: self.max_batch_size,
            max_num_tokens: self.max_num_tokens,
            max_seq_len: self.max_seq_len,
            moe: self.moe,
        }
    }
}

/// A value by the name that a case gives it.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}
