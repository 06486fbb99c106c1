//! A case from a runtime's own settings: a TensorRT-LLM options file, or an SGLang command line.
//!
//! Nothing is dropped in silence. What is not understood, what does not change a prediction and
//! what the runtime would choose on its own is listed at the top of the case, with its line.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::load::{self, CaseFile};
use super::schema::At;
use crate::model::{BackendName, GemmDtype, MoeDtype};
use crate::timing::InputError;

/// trtllm-serve's documented default of `max_num_tokens`.
const MAX_NUM_TOKENS: u32 = 8192;

/// Longest setting that is quoted in a note, in characters.
const SHOWN_MAX: usize = 160;

/// What the settings file does not say.
#[derive(Debug, Clone)]
pub struct ImportRequest {
    /// The runtime that takes the settings.
    pub runtime: BackendName,
    /// Its exact version.
    pub version: String,
    /// File stem in `data/models/`.
    pub model: String,
    /// System name of the op tables.
    pub system: String,
    pub isl: u32,
    pub osl: u32,
    pub concurrency: u32,
    /// GPUs as launched; `None`: from the settings, else 1.
    pub tp: Option<u32>,
    /// Expert parallelism; `None`: from the settings, else 1.
    pub ep: Option<u32>,
    /// Attention data parallelism; `None`: from the settings, else 1.
    pub dp: Option<u32>,
    /// Precision of the dense GEMMs, of the projections into attention and of the experts: a
    /// property of the checkpoint.
    pub gemm: Option<GemmDtype>,
    pub qkv_proj: Option<GemmDtype>,
    /// Options of trtllm-serve's own command line; what the file sets goes before them.
    pub max_batch_size: Option<u32>,
    pub max_num_tokens: Option<u32>,
    pub max_seq_len: Option<u32>,
    pub moe: Option<MoeDtype>,
}

/// Why a setting is listed rather than carried over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoteKind {
    /// Not understood, or not modelled: the case does not hold it.
    Unknown,
    /// Understood; the prediction does not depend on it.
    NoEffect,
    /// Not set; what the case says instead.
    Default,
}

impl NoteKind {
    const ALL: [Self; 3] = [Self::Unknown, Self::NoEffect, Self::Default];

    pub fn title(self) -> &'static str {
        match self {
            Self::Unknown => "Not understood, so not in the case",
            Self::NoEffect => "Without effect on the prediction",
            Self::Default => "Not set",
        }
    }
}

/// A setting that is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub kind: NoteKind,
    /// Line of the settings file; `None` where the file does not hold it.
    pub line: Option<u64>,
    pub setting: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.setting),
            None => f.write_str(&self.setting),
        }
    }
}

/// A case that the loader accepts, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    pub text: String,
    /// By kind, then in the file's order.
    pub notes: Vec<Note>,
}

/// Reads a settings file and makes a case of it.
pub fn import(path: impl AsRef<Path>, request: &ImportRequest) -> Result<Imported, InputError> {
    let path = path.as_ref();
    import_bytes(path, load::read(path, "settings file")?, request)
}

/// Makes a case of a settings file's content; `path` is for messages and the case's first line.
pub fn import_bytes(
    path: impl AsRef<Path>,
    bytes: Vec<u8>,
    request: &ImportRequest,
) -> Result<Imported, InputError> {
    let path = path.as_ref();
    let text = load::text(path, bytes, "settings file")?;
    let mut draft = Draft {
        path,
        given: BTreeMap::new(),
        notes: Vec::new(),
    };
    match request.runtime {
        BackendName::Trtllm => draft.trtllm(&text, request)?,
        BackendName::Sglang => draft.sglang(&text, request)?,
    }
    draft.finish(request)
}

/// How a setting's value is read.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Count,
    /// Sorted, as the runtimes do.
    Counts,
    Number,
    Flag,
    /// The runtime's names and the case's; an empty one leaves the choice to the runtime.
    Names(&'static [(&'static str, &'static str)]),
    NoEffect,
}

/// A setting of a runtime and the field of the case that it fills. Fields under `launch` are
/// worked into others.
struct Setting {
    name: &'static str,
    field: &'static str,
    kind: Kind,
}

const fn to(name: &'static str, field: &'static str, kind: Kind) -> Setting {
    Setting { name, field, kind }
}

const fn no_effect(name: &'static str) -> Setting {
    to(name, "", Kind::NoEffect)
}

const TRTLLM: &[Setting] = &[
    to("max_batch_size", "serving.max_batch_size", Kind::Count),
    to("max_num_tokens", "serving.max_num_tokens", Kind::Count),
    to("max_seq_len", "serving.max_seq_len", Kind::Count),
    to("stream_interval", "serving.stream_interval", Kind::Count),
    to("tensor_parallel_size", "launch.tp", Kind::Count),
    to("moe_expert_parallel_size", "launch.ep", Kind::Count),
    to("enable_attention_dp", "launch.attention_dp", Kind::Flag),
    to("disable_overlap_scheduler", "launch.no_overlap", Kind::Flag),
    to("cuda_graph_config", "launch.graph", Kind::NoEffect),
    to(
        "cuda_graph_config.enable_padding",
        "serving.cuda_graph.padding",
        Kind::Flag,
    ),
    to(
        "cuda_graph_config.max_batch_size",
        "serving.cuda_graph.max_batch",
        Kind::Count,
    ),
    to(
        "cuda_graph_config.batch_sizes",
        "serving.cuda_graph.batch_sizes",
        Kind::Counts,
    ),
    to(
        "torch_compile_config.enable_piecewise_cuda_graph",
        "launch.piecewise",
        Kind::Flag,
    ),
    to(
        "torch_compile_config.capture_num_tokens",
        "serving.piecewise.capture_tokens",
        Kind::Counts,
    ),
    to(
        "batch_wait_timeout_iters",
        "serving.batch_wait.timeout_iters",
        Kind::Count,
    ),
    to(
        "batch_wait_max_tokens_ratio",
        "serving.batch_wait.max_tokens_ratio",
        Kind::Number,
    ),
    to(
        "attention_dp_config.enable_balance",
        "launch.balance",
        Kind::Flag,
    ),
    to(
        "attention_dp_config.batching_wait_iters",
        "serving.attention_dp_balance.batching_wait_iters",
        Kind::Count,
    ),
    to(
        "attention_dp_config.timeout_iters",
        "serving.attention_dp_balance.timeout_iters",
        Kind::Count,
    ),
    to(
        "kv_cache_config.dtype",
        "precision.kv_cache",
        Kind::Names(&[("auto", ""), ("fp8", "fp8"), ("bfloat16", "bfloat16")]),
    ),
    to(
        "kv_cache_config.free_gpu_memory_fraction",
        "serving.memory_fraction",
        Kind::Number,
    ),
    to(
        "kv_cache_config.enable_block_reuse",
        "serving.block_reuse",
        Kind::Flag,
    ),
    to(
        "moe_config.backend",
        "kernels.moe",
        Kind::Names(&[
            ("AUTO", ""),
            ("TRTLLM", "trtllm_gen"),
            ("CUTLASS", "cutlass"),
            ("DEEPGEMM", "deepgemm"),
            ("TRITON", "triton"),
            ("CUTEDSL", "cutedsl"),
        ]),
    ),
    to(
        "attn_backend",
        "kernels.attention",
        Kind::Names(&[("TRTLLM", "trtllm"), ("FLASHINFER", "flashinfer")]),
    ),
    to(
        "scheduler_config.capacity_scheduler_policy",
        "serving.capacity",
        Kind::Names(&[
            ("GUARANTEED_NO_EVICT", "guaranteed_no_evict"),
            ("MAX_UTILIZATION", "max_utilization"),
        ]),
    ),
    to(
        "enable_chunked_prefill",
        "serving.chunked_prefill",
        Kind::Flag,
    ),
    no_effect("backend"),
    no_effect("trust_remote_code"),
    no_effect("print_iter_log"),
    no_effect("num_postprocess_workers"),
    no_effect("enable_iter_perf_stats"),
    no_effect("iter_stats_max_iterations"),
];

/// The default, and what is modelled.
const TRTLLM_DEFAULT: (&str, &str) = (
    "scheduler_config.context_chunking_policy",
    "FIRST_COME_FIRST_SERVED",
);

/// Of no matter while they are off.
const TRTLLM_OFF: [&str; 1] = ["enable_chunked_prefill"];

const SGLANG: &[Setting] = &[
    to("--tp", "launch.tp", Kind::Count),
    to("--tp-size", "launch.tp", Kind::Count),
    to("--tensor-parallel-size", "launch.tp", Kind::Count),
    to("--ep", "launch.ep", Kind::Count),
    to("--ep-size", "launch.ep", Kind::Count),
    to("--expert-parallel-size", "launch.ep", Kind::Count),
    to("--dp", "launch.dp", Kind::Count),
    to("--dp-size", "launch.dp", Kind::Count),
    to("--data-parallel-size", "launch.dp", Kind::Count),
    to("--enable-dp-attention", "launch.attention_dp", Kind::Flag),
    to(
        "--max-running-requests",
        "serving.max_batch_size",
        Kind::Count,
    ),
    to("--context-length", "serving.max_seq_len", Kind::Count),
    to(
        "--disable-overlap-schedule",
        "launch.no_overlap",
        Kind::Flag,
    ),
    to("--disable-cuda-graph", "launch.no_graph", Kind::Flag),
    to(
        "--disable-cuda-graph-padding",
        "launch.no_padding",
        Kind::Flag,
    ),
    to(
        "--cuda-graph-max-bs",
        "serving.cuda_graph.max_batch",
        Kind::Count,
    ),
    to(
        "--cuda-graph-bs",
        "serving.cuda_graph.batch_sizes",
        Kind::Counts,
    ),
    to(
        "--mem-fraction-static",
        "serving.memory_fraction",
        Kind::Number,
    ),
    to("--stream-interval", "serving.stream_interval", Kind::Count),
    to(
        "--max-prefill-tokens",
        "serving.max_prefill_tokens",
        Kind::Count,
    ),
    to(
        "--chunked-prefill-size",
        "serving.chunked_prefill_size",
        Kind::Count,
    ),
    to(
        "--scheduler-recv-interval",
        "serving.scheduler_recv_interval",
        Kind::Count,
    ),
    to("--disable-radix-cache", "launch.no_reuse", Kind::Flag),
    to(
        "--kv-cache-dtype",
        "precision.kv_cache",
        Kind::Names(&[
            ("auto", ""),
            ("fp8_e4m3", "fp8"),
            ("fp8_e5m2", "fp8"),
            ("bf16", "bfloat16"),
            ("bfloat16", "bfloat16"),
        ]),
    ),
    to(
        "--moe-runner-backend",
        "kernels.moe",
        Kind::Names(&[
            ("auto", ""),
            ("flashinfer_trtllm", "trtllm_gen"),
            ("flashinfer_cutlass", "cutlass"),
            ("cutlass", "cutlass"),
            ("deep_gemm", "deepgemm"),
        ]),
    ),
    to(
        "--fp4-gemm-backend",
        "kernels.gemm",
        Kind::Names(&[("auto", ""), ("flashinfer_cutlass", "flashinfer_cutlass")]),
    ),
    to(
        "--attention-backend",
        "kernels.attention",
        Kind::Names(&[("flashinfer", "flashinfer"), ("trtllm_mha", "trtllm_mha")]),
    ),
    to(
        "--enable-flashinfer-allreduce-fusion",
        "kernels.allreduce_fusion",
        Kind::Flag,
    ),
    no_effect("--model-path"),
    no_effect("--model"),
    no_effect("--tokenizer-path"),
    no_effect("--served-model-name"),
    no_effect("--host"),
    no_effect("--port"),
    no_effect("--tokenizer-worker-num"),
    no_effect("--trust-remote-code"),
    no_effect("--log-level"),
    no_effect("--decode-log-interval"),
    no_effect("--enable-metrics"),
    no_effect("--watchdog-timeout"),
    no_effect("--random-seed"),
    no_effect("--reasoning-parser"),
    no_effect("--tool-call-parser"),
];

/// Endings of flags whose value must not be repeated in a case.
const SECRET: [&str; 4] = ["-key", "-token", "-password", "-secret"];

/// Words that start a server and set nothing.
const LAUNCHERS: [&str; 7] = [
    "exec",
    "python",
    "python3",
    "-m",
    "sglang.launch_server",
    "sglang",
    "serve",
];

/// Where a field of the case was set.
#[derive(Debug, Clone, Copy)]
enum Origin {
    File { line: u64, column: u64 },
    Argument(&'static str),
    Runtime,
}

/// A field's YAML text and where it comes from.
#[derive(Debug, Clone)]
struct Given {
    text: String,
    origin: Origin,
    /// The setting as the file has it.
    shown: String,
}

/// Any YAML value.
#[derive(Debug)]
enum Value {
    Null,
    Flag(bool),
    Whole(u64),
    Real(f64),
    Text(String),
    List(Vec<At<Value>>),
    Map(Vec<(At<String>, At<Value>)>),
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_none<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Flag(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Whole(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(u64::try_from(value).map_or(Value::Real(value as f64), Value::Whole))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Real(value))
            }

            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(Value::Text(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(value) = seq.next_element()? {
                    list.push(value);
                }
                Ok(Value::List(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Value::Map(entries))
            }
        }

        deserializer.deserialize_any(Any)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Flag(value) => value.fmt(f),
            Self::Whole(value) => value.fmt(f),
            Self::Real(value) => value.fmt(f),
            Self::Text(text) => f.write_str(text),
            Self::List(list) => {
                f.write_str("[")?;
                for (at, value) in list.iter().enumerate() {
                    let comma = if at == 0 { "" } else { ", " };
                    write!(f, "{comma}{}", value.value)?;
                }
                f.write_str("]")
            }
            Self::Map(entries) => {
                f.write_str("{")?;
                for (at, (key, value)) in entries.iter().enumerate() {
                    let comma = if at == 0 { " " } else { ", " };
                    write!(f, "{comma}{}: {}", key.value, value.value)?;
                }
                f.write_str(if entries.is_empty() { "}" } else { " }" })
            }
        }
    }
}

/// One line of bounded length, whatever the setting holds: it becomes a comment.
fn shown(text: &str) -> String {
    let line: String = text.chars().take(SHOWN_MAX).collect();
    let cut = if line.len() < text.len() { "..." } else { "" };
    let plain: String = line
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    plain + cut
}

struct Draft<'a> {
    path: &'a Path,
    given: BTreeMap<&'static str, Given>,
    notes: Vec<Note>,
}

impl Draft<'_> {
    fn fault(
        &self,
        (line, column): (u64, u64),
        field: &str,
        what: impl Into<String>,
        help: impl Into<String>,
    ) -> InputError {
        InputError::new(self.path, what, help)
            .at(line, column)
            .field(shown(field))
    }

    fn note(&mut self, kind: NoteKind, line: Option<u64>, setting: &str) {
        self.notes.push(Note {
            kind,
            line,
            setting: shown(setting),
        });
    }

    fn unset(&mut self, text: &str) {
        self.note(NoteKind::Default, None, text);
    }

    /// Takes a field out of the case and lists its setting instead.
    fn demote(&mut self, field: &str, why: &str) {
        if let Some(given) = self.given.remove(field) {
            let line = match given.origin {
                Origin::File { line, .. } => Some(line),
                Origin::Argument(_) | Origin::Runtime => None,
            };
            self.note(NoteKind::NoEffect, line, &format!("{}{why}", given.shown));
        }
    }

    fn runtime(&mut self, field: &'static str, text: &str) {
        self.given.insert(
            field,
            Given {
                text: text.to_owned(),
                origin: Origin::Runtime,
                shown: String::new(),
            },
        );
    }

    fn is_on(&self, field: &str) -> bool {
        self.given
            .get(field)
            .is_some_and(|given| given.text == "true")
    }

    /// Where a field was set in the file; its start where it was not.
    fn place(&self, field: &str) -> (u64, u64) {
        match self.given.get(field).map(|given| given.origin) {
            Some(Origin::File { line, column }) => (line, column),
            _ => (1, 1),
        }
    }

    /// Reads one value by its kind.
    fn set(
        &mut self,
        setting: &Setting,
        value: &At<Value>,
        shown_as: String,
    ) -> Result<(), InputError> {
        let place = (value.line, value.column);
        let wrong = |draft: &Self, at: (u64, u64), found: &Value, expected: &str| {
            draft.fault(
                at,
                setting.name,
                format!("wrong value `{}`", shown(&found.to_string())),
                format!("expected {expected}"),
            )
        };
        let whole = |draft: &Self, at: &At<Value>| match &at.value {
            Value::Whole(count) if u32::try_from(*count).is_ok() => Ok(*count as u32),
            other => Err(wrong(
                draft,
                (at.line, at.column),
                other,
                "a whole number from 0 to 4294967295",
            )),
        };
        let text = match (setting.kind, &value.value) {
            (Kind::NoEffect, _) | (_, Value::Null) => {
                self.note(NoteKind::NoEffect, Some(value.line), &shown_as);
                return Ok(());
            }
            (Kind::Count, _) => whole(self, value)?.to_string(),
            (Kind::Counts, Value::List(list)) => {
                let mut counts = list
                    .iter()
                    .map(|at| whole(self, at))
                    .collect::<Result<Vec<u32>, _>>()?;
                counts.sort_unstable();
                counts.dedup();
                let counts: Vec<String> = counts.iter().map(u32::to_string).collect();
                format!("[{}]", counts.join(", "))
            }
            (Kind::Counts, other) => {
                return Err(wrong(self, place, other, "a list of whole numbers"));
            }
            (Kind::Number, Value::Whole(number)) => number.to_string(),
            (Kind::Number, Value::Real(number)) if number.is_finite() => number.to_string(),
            (Kind::Number, other) => return Err(wrong(self, place, other, "a number")),
            (Kind::Flag, Value::Flag(flag)) => flag.to_string(),
            (Kind::Flag, other) => return Err(wrong(self, place, other, "true or false")),
            (Kind::Names(names), Value::Text(name)) => {
                match names.iter().find(|(theirs, _)| theirs == name) {
                    Some((_, "")) => {
                        let why = format!("{shown_as} (the runtime's choice, not recorded)");
                        self.note(NoteKind::NoEffect, Some(value.line), &why);
                        return Ok(());
                    }
                    Some((_, ours)) => (*ours).to_owned(),
                    None => {
                        self.note(NoteKind::Unknown, Some(value.line), &shown_as);
                        return Ok(());
                    }
                }
            }
            (Kind::Names(_), other) => return Err(wrong(self, place, other, "a name")),
        };
        let given = Given {
            text,
            origin: Origin::File {
                line: value.line,
                column: value.column,
            },
            shown: shown_as,
        };
        if let Some(first) = self.given.insert(setting.field, given) {
            return Err(self.fault(
                place,
                setting.name,
                "the setting is given twice",
                format!(
                    "keep one of the two; the other is `{}`",
                    shown(&first.shown)
                ),
            ));
        }
        Ok(())
    }

    fn trtllm(&mut self, text: &str, request: &ImportRequest) -> Result<(), InputError> {
        let root: At<Value> = load::parse(self.path, text)?;
        let Value::Map(entries) = &root.value else {
            return Err(InputError::new(
                self.path,
                "the options are no mapping",
                "expected `setting: value` lines, as for --extra_llm_api_options",
            )
            .at(root.line, root.column));
        };
        let mut graphs = None;
        for (key, value) in entries {
            if key.value == "cuda_graph_config" {
                graphs = Some((value.line, value.column, matches!(value.value, Value::Null)));
            }
            self.options(&key.value, key.line, value)?;
        }
        match graphs {
            None => {
                return Err(InputError::new(
                    self.path,
                    "the decode graphs are not given",
                    "add cuda_graph_config with max_batch_size or batch_sizes, or null for none",
                )
                .field("cuda_graph_config"));
            }
            Some((.., true)) => {}
            Some((line, column, false)) => {
                let sized = [
                    "serving.cuda_graph.max_batch",
                    "serving.cuda_graph.batch_sizes",
                ];
                if !sized.iter().any(|field| self.given.contains_key(field)) {
                    return Err(self.fault(
                        (line, column),
                        "cuda_graph_config",
                        "the captured batch sizes are not given",
                        "add max_batch_size or batch_sizes: the server logs them at its start",
                    ));
                }
                if !self.given.contains_key("serving.cuda_graph.padding") {
                    self.runtime("serving.cuda_graph.padding", "false");
                    self.unset("cuda_graph_config.enable_padding: the case has false");
                }
            }
        }
        self.overlap();
        if !self.given.contains_key("serving.block_reuse") {
            self.runtime("serving.block_reuse", "true");
            self.unset("kv_cache_config.enable_block_reuse: the case has true");
        }
        if !self.given.contains_key("serving.max_batch_size") {
            self.unset("max_batch_size: the case has the default, 2048");
        }
        let dp_on = self.is_on("launch.attention_dp");
        let launched = self.launched(request)?;
        if dp_on && request.dp.is_some_and(|dp| dp != launched.gpus) {
            return Err(self.fault(
                self.place("launch.attention_dp"),
                "enable_attention_dp",
                format!(
                    "--dp {} with attention DP over {} GPUs",
                    request.dp.unwrap_or_default(),
                    launched.gpus
                ),
                "leave out --dp, or give the number of GPUs",
            ));
        }
        let dp = if dp_on {
            launched.gpus
        } else {
            request.dp.unwrap_or(1)
        };
        self.parallel(launched, dp)?;
        self.piecewise()?;
        self.waits(dp);
        Ok(())
    }

    /// One entry of the options, or those below it.
    fn options(&mut self, path: &str, line: u64, value: &At<Value>) -> Result<(), InputError> {
        let inside = format!("{path}.");
        let is_block = TRTLLM
            .iter()
            .any(|setting| setting.name.starts_with(&inside));
        if let (true, Value::Map(entries)) = (is_block, &value.value) {
            for (key, value) in entries {
                self.options(&format!("{inside}{}", key.value), key.line, value)?;
            }
            return Ok(());
        }
        let shown_as = format!("{path}: {}", value.value);
        if path == "cuda_graph_config" && matches!(value.value, Value::Null) {
            // The case says so by having no graphs.
            return Ok(());
        }
        let off = matches!(value.value, Value::Null | Value::Flag(false));
        let default = (path, value.value.to_string().as_str()) == TRTLLM_DEFAULT;
        if default || (is_block || TRTLLM_OFF.contains(&path)) && off {
            self.note(NoteKind::NoEffect, Some(line), &shown_as);
            return Ok(());
        }
        if let Some(setting) = TRTLLM.iter().find(|setting| setting.name == path) {
            return self.set(setting, value, shown_as);
        }
        self.note(NoteKind::Unknown, Some(line), &shown_as);
        Ok(())
    }

    fn sglang(&mut self, text: &str, request: &ImportRequest) -> Result<(), InputError> {
        let words = self.words(text)?;
        let mut words = words.iter().peekable();
        let mut uncut = false;
        let mut flags = false;
        while let Some(word) = words.next() {
            let Some(name) = word.value.strip_prefix("--") else {
                if flags || !LAUNCHERS.contains(&word.value.as_str()) {
                    self.note(NoteKind::Unknown, Some(word.line), &word.value);
                }
                continue;
            };
            flags = true;
            // `--name=value` or `--name value...`.
            let (name, inline) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (name, None),
            };
            let name = format!("--{name}");
            let mut values: Vec<At<String>> = Vec::new();
            if let Some(value) = inline {
                values.push(At {
                    value: value.to_owned(),
                    line: word.line,
                    column: word.column + name.chars().count() as u64 + 1,
                });
            }
            let setting = SGLANG.iter().find(|setting| setting.name == name);
            let takes = match setting.map(|setting| setting.kind) {
                Some(Kind::Flag) => 0,
                Some(Kind::Counts | Kind::NoEffect) | None => usize::MAX,
                Some(Kind::Count | Kind::Number | Kind::Names(_)) => 1,
            };
            while inline.is_none()
                && values.len() < takes
                && words
                    .peek()
                    .is_some_and(|word| !word.value.starts_with("--"))
            {
                values.extend(words.next().cloned());
            }
            let texts: Vec<&str> = values.iter().map(|value| value.value.as_str()).collect();
            let shown_as = if texts.is_empty() {
                name.clone()
            } else if SECRET.iter().any(|ending| name.ends_with(ending)) {
                format!("{name} ***")
            } else {
                format!("{name} {}", texts.join(" "))
            };
            let Some(setting) = setting else {
                self.note(NoteKind::Unknown, Some(word.line), &shown_as);
                continue;
            };
            if setting.field == "serving.chunked_prefill_size" && texts == ["-1"] {
                let why = format!("{shown_as} (prompts are never cut, as in the case)");
                self.note(NoteKind::NoEffect, Some(word.line), &why);
                uncut = true;
                continue;
            }
            let here = (word.line, word.column);
            let first = values
                .first()
                .map_or(here, |value| (value.line, value.column));
            let value = match (setting.kind, values.as_slice()) {
                (Kind::Flag, []) => Value::Flag(true),
                (Kind::Flag, _) => {
                    return Err(self.fault(
                        first,
                        &name,
                        "the flag takes no value",
                        "write the flag alone, or leave it out",
                    ));
                }
                (Kind::NoEffect, _) => Value::Null,
                (_, []) => {
                    return Err(self.fault(
                        here,
                        &name,
                        "the flag needs a value",
                        "write it behind the flag",
                    ));
                }
                (Kind::Counts, values) => Value::List(values.iter().map(scalar).collect()),
                (Kind::Names(_), [value, ..]) => Value::Text(value.value.clone()),
                (_, [value, ..]) => scalar(value).value,
            };
            let value = At {
                value,
                line: first.0,
                column: first.1,
            };
            self.set(setting, &value, shown_as)?;
        }
        if self.is_on("launch.no_graph") {
            for field in [
                "serving.cuda_graph.max_batch",
                "serving.cuda_graph.batch_sizes",
                "launch.no_padding",
            ] {
                self.demote(field, " (graphs are disabled)");
            }
        } else {
            let sized = [
                "serving.cuda_graph.max_batch",
                "serving.cuda_graph.batch_sizes",
            ];
            if !sized.iter().any(|field| self.given.contains_key(field)) {
                return Err(InputError::new(
                    self.path,
                    "the captured batch sizes are not given",
                    "add --cuda-graph-max-bs (the server logs it at its start) or \
                     --disable-cuda-graph",
                )
                .field("--cuda-graph-max-bs"));
            }
            let padding = !self.is_on("launch.no_padding");
            self.runtime("serving.cuda_graph.padding", &padding.to_string());
        }
        self.overlap();
        if self.is_on("launch.no_reuse") {
            self.runtime("serving.block_reuse", "false");
        } else {
            self.runtime("serving.block_reuse", "true");
            self.unset("--disable-radix-cache: the case has block_reuse true");
        }
        if !uncut && !self.given.contains_key("serving.chunked_prefill_size") {
            self.unset(
                "--chunked-prefill-size: its default depends on the GPU; in the case prompts are \
                 never cut",
            );
        }
        if !self.given.contains_key("serving.memory_fraction") {
            self.unset("--mem-fraction-static: the KV cache is bounded by all of the memory");
        }
        if !self.given.contains_key("serving.max_batch_size") {
            self.unset("--max-running-requests: the case has the default, 2048");
        }
        let launched = self.launched(request)?;
        let from_file = self.number("launch.dp");
        if from_file.is_some_and(|dp| dp > 1) && !self.is_on("launch.attention_dp") {
            return Err(self.fault(
                self.place("launch.dp"),
                "--dp",
                "data parallelism without --enable-dp-attention runs replicas",
                "a case is one replica: leave out --dp and give it its share of the requests",
            ));
        }
        let dp = self.agreed("launch.dp", "--dp", request.dp)?.unwrap_or(1);
        self.parallel(launched, dp)
    }

    /// Words of a command line: quotes, backslashes, comments, and newlines as spaces.
    fn words(&self, text: &str) -> Result<Vec<At<String>>, InputError> {
        let mut words: Vec<At<String>> = Vec::new();
        let (mut line, mut column) = (1, 0);
        let mut open: Option<At<String>> = None;
        let mut quote: Option<(char, u64, u64)> = None;
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            column += 1;
            let here = (line, column);
            if c == '\n' {
                (line, column) = (line + 1, 0);
            }
            let push = |open: &mut Option<At<String>>, c: Option<char>| {
                let word = open.get_or_insert(At {
                    value: String::new(),
                    line: here.0,
                    column: here.1,
                });
                word.value.extend(c);
            };
            match (quote, c) {
                (Some((mark, ..)), _) if mark == c => quote = None,
                (Some(('\'', ..)), _) => push(&mut open, Some(c)),
                (_, '\\') => match chars.next() {
                    Some('\n') => (line, column) = (line + 1, 0),
                    Some('\r') if chars.peek() == Some(&'\n') => {
                        chars.next();
                        (line, column) = (line + 1, 0);
                    }
                    Some(next) => {
                        column += 1;
                        push(&mut open, Some(next));
                    }
                    None => {}
                },
                (Some(_), _) => push(&mut open, Some(c)),
                (None, '\'' | '"') => {
                    quote = Some((c, here.0, here.1));
                    push(&mut open, None);
                }
                (None, '#') if open.is_none() => {
                    while chars.next_if(|c| *c != '\n').is_some() {
                        column += 1;
                    }
                }
                (None, _) if c.is_whitespace() => words.extend(open.take()),
                (None, _) => push(&mut open, Some(c)),
            }
        }
        if let Some((mark, line, column)) = quote {
            return Err(InputError::new(
                self.path,
                format!("the quote {mark} is never closed"),
                "close it",
            )
            .at(line, column));
        }
        words.extend(open);
        Ok(words)
    }

    fn number(&self, field: &str) -> Option<u32> {
        self.given
            .get(field)
            .and_then(|given| given.text.parse().ok())
    }

    /// A degree from the file or the command line; where both give one they must agree.
    fn agreed(
        &self,
        field: &str,
        argument: &str,
        value: Option<u32>,
    ) -> Result<Option<u32>, InputError> {
        let from_file = self.number(field);
        match (from_file, value) {
            (Some(file), Some(value)) if file != value => Err(self.fault(
                self.place(field),
                argument,
                format!("{file} in the file, {argument} {value} on the command line"),
                "leave one of them out, or make them agree",
            )),
            _ => Ok(from_file.or(value)),
        }
    }

    fn launched(&self, request: &ImportRequest) -> Result<Launched, InputError> {
        Ok(Launched {
            gpus: self.agreed("launch.tp", "--tp", request.tp)?.unwrap_or(1),
            ep: self.agreed("launch.ep", "--ep", request.ep)?.unwrap_or(1),
        })
    }

    fn overlap(&mut self) {
        if let Some(given) = self.given.get("launch.no_overlap").cloned() {
            let text = (given.text != "true").to_string();
            self.given
                .insert("serving.overlap", Given { text, ..given });
        }
    }

    fn parallel(&mut self, launched: Launched, dp: u32) -> Result<(), InputError> {
        let Launched { gpus, ep } = launched;
        let uneven = |what: &str, parts: u32, field: &str| {
            self.fault(
                self.place(field),
                what,
                format!("{what} {parts} does not divide {gpus} GPUs"),
                "attention and experts share the GPUs that --tp launches",
            )
        };
        if dp == 0 || !gpus.is_multiple_of(dp) {
            return Err(uneven("--dp", dp, "launch.dp"));
        }
        if ep == 0 || !gpus.is_multiple_of(ep) {
            return Err(uneven("--ep", ep, "launch.ep"));
        }
        let origin = |field, argument| {
            self.given
                .get(field)
                .map_or(Origin::Argument(argument), |given| given.origin)
        };
        let (tp_at, dp_at, ep_at) = (
            origin("launch.tp", "--tp"),
            origin("launch.dp", "--dp"),
            origin("launch.ep", "--ep"),
        );
        for (field, value, origin) in [
            ("parallel.tp", gpus / dp, tp_at),
            ("parallel.dp", dp, dp_at),
            ("parallel.moe_tp", gpus / ep, tp_at),
            ("parallel.moe_ep", ep, ep_at),
        ] {
            if value == 1 && matches!(field, "parallel.dp" | "parallel.moe_ep") {
                continue;
            }
            let given = Given {
                text: value.to_string(),
                origin,
                shown: String::new(),
            };
            self.given.insert(field, given);
        }
        Ok(())
    }

    fn piecewise(&mut self) -> Result<(), InputError> {
        let list = "serving.piecewise.capture_tokens";
        if !self.is_on("launch.piecewise") {
            self.demote(list, " (piecewise graphs are off)");
        } else if !self.given.contains_key(list) {
            return Err(self.fault(
                self.place("launch.piecewise"),
                "torch_compile_config.enable_piecewise_cuda_graph",
                "the captured token counts are not given",
                "add torch_compile_config.capture_num_tokens: the server logs them at its start",
            ));
        }
        Ok(())
    }

    /// The two mechanisms that hold context requests back: one with attention DP, one without.
    fn waits(&mut self, dp: u32) {
        let wait = [
            "serving.batch_wait.timeout_iters",
            "serving.batch_wait.max_tokens_ratio",
        ];
        let set = |draft: &Self, field: &str| {
            draft
                .given
                .get(field)
                .is_some_and(|given| given.text != "0")
        };
        let why = if dp > 1 {
            " (not with attention DP)"
        } else {
            " (needs a timeout and a ratio above 0)"
        };
        if dp > 1 || !wait.iter().all(|field| set(self, field)) {
            for field in wait {
                self.demote(field, why);
            }
        }
        let defaults = [
            ("serving.attention_dp_balance.batching_wait_iters", "10"),
            ("serving.attention_dp_balance.timeout_iters", "50"),
        ];
        if dp > 1 && self.is_on("launch.balance") {
            for (field, default) in defaults {
                if !self.given.contains_key(field) {
                    let name = field.rsplit('.').next().unwrap_or(field);
                    self.runtime(field, default);
                    self.unset(&format!(
                        "attention_dp_config.{name}: the case has the default, {default}"
                    ));
                }
            }
        } else {
            let why = if dp > 1 {
                " (the balance is off)"
            } else {
                " (only with attention DP)"
            };
            self.demote("launch.balance", why);
            for (field, _) in defaults {
                self.demote(field, why);
            }
        }
    }

    fn finish(mut self, request: &ImportRequest) -> Result<Imported, InputError> {
        let argument = |draft: &mut Self, field, text: String, name| {
            let given = Given {
                text,
                origin: Origin::Argument(name),
                shown: String::new(),
            };
            draft.given.insert(field, given);
        };
        let name = request.runtime.to_string();
        for (field, text, from) in [
            ("model", quoted(&request.model), "--model"),
            ("system", quoted(&request.system), "--system"),
            ("backend.name", name, "--runtime"),
            ("backend.version", quoted(&request.version), "--version"),
            ("workload.isl", request.isl.to_string(), "--isl"),
            ("workload.osl", request.osl.to_string(), "--osl"),
            (
                "workload.concurrency",
                request.concurrency.to_string(),
                "--concurrency",
            ),
        ] {
            argument(&mut self, field, text, from);
        }
        for (field, value, from) in [
            (
                "serving.max_batch_size",
                request.max_batch_size,
                "--max-batch-size",
            ),
            (
                "serving.max_num_tokens",
                request.max_num_tokens,
                "--max-num-tokens",
            ),
            ("serving.max_seq_len", request.max_seq_len, "--max-seq-len"),
        ] {
            match value {
                Some(value) if self.given.contains_key(field) => {
                    let text = format!("{from} {value}: the file sets it too, and goes first");
                    self.note(NoteKind::NoEffect, None, &text);
                }
                Some(value) => argument(&mut self, field, value.to_string(), from),
                None => {}
            }
        }
        if request.runtime == BackendName::Trtllm
            && !self.given.contains_key("serving.max_num_tokens")
        {
            let text = MAX_NUM_TOKENS.to_string();
            self.unset(&format!(
                "max_num_tokens: the case has trtllm-serve's default, {text}"
            ));
            let given = Given {
                text,
                origin: Origin::Runtime,
                shown: String::new(),
            };
            self.given.insert("serving.max_num_tokens", given);
        }
        if let Some(gemm) = request.gemm {
            argument(&mut self, "precision.gemm", gemm.to_string(), "--gemm");
        } else {
            self.unset("--gemm: the case has the default, bfloat16");
        }
        if let Some(qkv_proj) = request.qkv_proj {
            let text = qkv_proj.to_string();
            argument(&mut self, "precision.qkv_proj", text, "--qkv-proj");
        }
        if let Some(moe) = request.moe {
            argument(&mut self, "precision.moe", moe.to_string(), "--moe");
        } else {
            self.unset("--moe: a model with experts needs their precision");
        }
        if !self.given.contains_key("precision.kv_cache") {
            self.unset(
                "precision of the KV cache: the case has the default, bfloat16; a quantised \
                 checkpoint may choose fp8",
            );
        }
        let mut notes = std::mem::take(&mut self.notes);
        notes.sort_by_key(|note| note.kind);
        let text = self.write(&notes);
        match CaseFile::from_bytes(self.path, text.clone().into_bytes()) {
            Ok(_) => Ok(Imported { text, notes }),
            Err(fault) => Err(self.relocated(fault)),
        }
    }

    /// The loader's fault, at the place that set the field.
    fn relocated(&self, fault: InputError) -> InputError {
        let field = fault.place.field.clone().unwrap_or_default();
        let inside = format!("{field}.");
        let origin = self
            .given
            .iter()
            .find(|(name, _)| **name == field)
            .or_else(|| {
                self.given
                    .iter()
                    .find(|(name, _)| name.starts_with(&inside))
            })
            .map(|(_, given)| given.origin);
        match origin {
            Some(Origin::File { line, column }) => {
                self.fault((line, column), &field, fault.what, fault.help)
            }
            Some(Origin::Argument(name)) => {
                InputError::new(PathBuf::from(name), fault.what, fault.help)
            }
            Some(Origin::Runtime) | None => {
                InputError::new(self.path, fault.what, fault.help).field(field)
            }
        }
    }

    fn write(&self, notes: &[Note]) -> String {
        let mut out = String::new();
        let file = shown(&self.path.display().to_string());
        let _ = writeln!(out, "# Imported by `stepgate case import` from {file}.");
        for kind in NoteKind::ALL {
            let mut of_kind = notes.iter().filter(|note| note.kind == kind).peekable();
            if of_kind.peek().is_some() {
                let _ = writeln!(out, "# {}:", kind.title());
            }
            for note in of_kind {
                let _ = writeln!(out, "#   {note}");
            }
        }
        let flow = |block: &str, keys: &[&str]| {
            let entries: Vec<String> = keys
                .iter()
                .filter_map(|key| {
                    let given = self.given.get(format!("{block}.{key}").as_str())?;
                    Some(format!("{key}: {}", given.text))
                })
                .collect();
            (!entries.is_empty()).then(|| format!("{{ {} }}", entries.join(", ")))
        };
        for key in ["model", "system"] {
            if let Some(given) = self.given.get(key) {
                let _ = writeln!(out, "{key}: {}", given.text);
            }
        }
        for (block, keys) in [
            ("backend", &["name", "version"][..]),
            ("parallel", &["tp", "dp", "moe_tp", "moe_ep"]),
            ("precision", &["gemm", "qkv_proj", "moe", "kv_cache"]),
            ("kernels", &["moe", "gemm", "attention", "allreduce_fusion"]),
            ("workload", &["isl", "osl", "concurrency"]),
        ] {
            if let Some(entries) = flow(block, keys) {
                let _ = writeln!(out, "{block}: {entries}");
            }
        }
        let _ = writeln!(out, "serving:");
        for (key, keys) in [
            ("max_batch_size", &[][..]),
            ("max_num_tokens", &[]),
            ("max_seq_len", &[]),
            ("overlap", &[]),
            ("cuda_graph", &["padding", "max_batch", "batch_sizes"]),
            ("piecewise", &["capture_tokens"]),
            ("batch_wait", &["timeout_iters", "max_tokens_ratio"]),
            (
                "attention_dp_balance",
                &["batching_wait_iters", "timeout_iters"],
            ),
            ("capacity", &[]),
            ("memory_fraction", &[]),
            ("stream_interval", &[]),
            ("chunked_prefill", &[]),
            ("max_prefill_tokens", &[]),
            ("chunked_prefill_size", &[]),
            ("scheduler_recv_interval", &[]),
            ("block_reuse", &[]),
        ] {
            let field = format!("serving.{key}");
            let text = if keys.is_empty() {
                self.given
                    .get(field.as_str())
                    .map(|given| given.text.clone())
            } else {
                flow(&field, keys)
            };
            if let Some(text) = text {
                let _ = writeln!(out, "  {key}: {text}");
            }
        }
        out
    }
}

/// GPUs as launched, and the expert parallelism over them.
#[derive(Debug, Clone, Copy)]
struct Launched {
    gpus: u32,
    ep: u32,
}

/// A word of a command line as a value.
fn scalar(word: &At<String>) -> At<Value> {
    let text = word.value.as_str();
    let value = match (text.parse::<u64>(), text.parse::<f64>()) {
        (Ok(whole), _) => Value::Whole(whole),
        (_, Ok(real)) => Value::Real(real),
        _ => Value::Text(text.to_owned()),
    };
    At {
        value,
        line: word.line,
        column: word.column,
    }
}

/// Text as a YAML scalar that reads back as text.
fn quoted(text: &str) -> String {
    let plain = text
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    let word = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let special = word.contains(&text.to_ascii_lowercase().as_str());
    if plain && starts_well && !special && text.parse::<f64>().is_err() {
        text.to_owned()
    } else {
        serde_json::Value::from(text).to_string()
    }
}
