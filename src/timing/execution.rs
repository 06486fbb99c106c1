//! Execution identity: which boundary a time was measured at, in which mode, by whom.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The boundary a timing row was measured at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Boundary {
    /// Server receives a request until the executor has it.
    Ingress,
    /// Fetch, schedule and build the inputs of one iteration.
    HostPrepare,
    /// Submit an op, a module or a whole forward.
    HostDispatch,
    /// Launch of a captured graph: a fixed time and a time per node.
    GraphLaunch,
    /// One GPU kernel or op.
    GpuKernel,
    /// One replay of a captured graph.
    GraphReplay,
    /// Payload time of a collective once every rank is present; never the wait.
    CollectiveTransfer,
    /// Sample sync, request update and response of one iteration.
    HostFinish,
    /// First token (or last token) until the server has responded.
    Egress,
    /// The client's share outside the server.
    ClientTransport,
}

impl Boundary {
    /// Host-side boundaries: never supplied by a row whose execution is unknown.
    pub fn is_host(self) -> bool {
        matches!(
            self,
            Self::HostPrepare | Self::HostDispatch | Self::GraphLaunch | Self::HostFinish
        )
    }
}

impl fmt::Display for Boundary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::HostPrepare => "host_prepare",
            Self::HostDispatch => "host_dispatch",
            Self::GraphLaunch => "graph_launch",
            Self::GpuKernel => "gpu_kernel",
            Self::GraphReplay => "graph_replay",
            Self::CollectiveTransfer => "collective_transfer",
            Self::HostFinish => "host_finish",
            Self::Egress => "egress",
            Self::ClientTransport => "client_transport",
        })
    }
}

/// How the runtime executed what was timed, or executes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Execution {
    /// The host submits op after op.
    Eager,
    /// One launch replays every node; the batch is padded to the captured one. 0: the source does
    /// not say which size was captured.
    FullGraph { captured_batch: u32 },
    /// Captured segments with eager ops between them; tokens are padded to the captured count.
    Piecewise { captured_tokens: u32 },
    /// The source does not say. Prices GPU time in any mode, never host time.
    Unknown,
}

/// What host work a step asks for. Rows of steps with prompts do not cover steps without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HostMode {
    /// Eager, with prompts.
    Eager,
    FullGraph,
    Piecewise,
    /// Eager, generation only.
    EagerDecode,
    /// The generation part of a split step: the step's preparation, then one graph launch.
    SplitDecode,
    /// The context part behind it: the eager submissions, and the end of the whole step.
    SplitContext,
}

impl HostMode {
    /// Number of modes.
    pub const COUNT: usize = 6;

    /// In the order of their discriminants.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Eager,
        Self::FullGraph,
        Self::Piecewise,
        Self::EagerDecode,
        Self::SplitDecode,
        Self::SplitContext,
    ];

    /// The modes that rows are looked up for. A split step takes its times from those of eager and
    /// graph steps.
    pub const WHOLE: [Self; 4] = [
        Self::Eager,
        Self::FullGraph,
        Self::Piecewise,
        Self::EagerDecode,
    ];

    /// The name that coverage gives.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::FullGraph => "full_graph",
            Self::Piecewise => "piecewise",
            Self::EagerDecode => "eager decode",
            Self::SplitDecode => "split decode",
            Self::SplitContext => "split context",
        }
    }

    /// A step's execution in this mode, at no size.
    pub fn execution(self) -> Execution {
        match self {
            Self::Eager | Self::EagerDecode | Self::SplitContext => Execution::Eager,
            Self::FullGraph | Self::SplitDecode => Execution::FullGraph { captured_batch: 0 },
            Self::Piecewise => Execution::Piecewise { captured_tokens: 0 },
        }
    }

    /// How decode attention runs in a step of this mode, and whether beside prompts. Between the
    /// captured segments of a piecewise step it runs eagerly.
    pub fn attention(self) -> (Execution, bool) {
        match self {
            Self::Eager | Self::Piecewise | Self::SplitContext => (Execution::Eager, true),
            Self::EagerDecode => (Execution::Eager, false),
            Self::FullGraph | Self::SplitDecode => {
                (Execution::FullGraph { captured_batch: 0 }, false)
            }
        }
    }
}

impl Execution {
    /// Which host rows a step takes that holds `prompts` or does not.
    pub fn host_mode(self, prompts: bool) -> HostMode {
        match self {
            Self::Eager | Self::Unknown if prompts => HostMode::Eager,
            Self::Eager | Self::Unknown => HostMode::EagerDecode,
            Self::FullGraph { .. } => HostMode::FullGraph,
            Self::Piecewise { .. } => HostMode::Piecewise,
        }
    }

    /// Whether a host row measured under `self` may price a step run under `step`.
    ///
    /// Modes must be the same kind: a graph or unknown row never stands for an eager one, and
    /// unknown is never relabelled.
    pub fn serves_host(self, step: Self) -> bool {
        matches!(
            (self, step),
            (Self::Eager, Self::Eager)
                | (Self::FullGraph { .. }, Self::FullGraph { .. })
                | (Self::Piecewise { .. }, Self::Piecewise { .. })
        )
    }

    /// The mode without its captured size: `eager`, `full_graph`, `piecewise` or `unknown`.
    pub fn mode(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::FullGraph { .. } => "full_graph",
            Self::Piecewise { .. } => "piecewise",
            Self::Unknown => "unknown",
        }
    }
}

/// Whether graph capture served the step, and why not where it fell back.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaptureOutcome {
    Succeeded,
    FellBack { why: String },
}

/// Who took a time. Rows of different observers are never averaged or swapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Observer {
    /// A run with nothing attached.
    Plain,
    /// The server's own request metrics.
    NativeMetrics,
    /// Host timers around modules. Diagnostic: not composed.
    ModuleTiming,
    /// A profiler. Diagnostic: not composed, except for a kernel's own time on the GPU's clock.
    Profiler,
    /// A benchmark of one op alone, as in the op tables.
    OpBenchmark,
    /// A published hardware figure (roofline rows).
    Datasheet,
    /// The source does not say.
    Unrecorded,
}

impl Observer {
    /// Diagnostic rows inflate the host time that they observe.
    pub fn is_diagnostic(self) -> bool {
        matches!(self, Self::ModuleTiming | Self::Profiler)
    }
}

impl fmt::Display for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::NativeMetrics => "native_metrics",
            Self::ModuleTiming => "module_timing",
            Self::Profiler => "profiler",
            Self::OpBenchmark => "op_benchmark",
            Self::Datasheet => "datasheet",
            Self::Unrecorded => "unrecorded",
        })
    }
}
