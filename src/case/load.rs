//! From a file to a checked case.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_yaml::{
    Error as YamlError, MergeKeyPolicy, MessageFormatter, NonFiniteFloatPolicy,
    UserMessageFormatter, budget::BudgetBreach,
};

use super::date::Date;
use super::measured::{OpMeasured, StepMeasured};
use super::schema::{KindProbe, OpFile, ServingFile, StepFile};
use super::validate::{self, ModelDims, Places};
use crate::model::{Deployment, OpScenario, Scenario, StepScenario};
use crate::timing::InputError;

/// A case file is a page of text; anything near this limit is not one.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// What silicon measured for a serving case: evaluation data.
#[derive(Debug, Clone, PartialEq)]
pub struct Silicon {
    /// Mean time to first token.
    pub ttft_ms: f64,
    /// Mean time per output token.
    pub tpot_ms: f64,
    /// The run it comes from.
    pub run: String,
    pub date: Date,
}

/// A wider band for one case; shares in (0, 1], `None`: the usual band.
#[derive(Debug, Clone, PartialEq)]
pub struct Tolerance {
    pub ttft_rel: Option<f64>,
    pub tpot_rel: Option<f64>,
    pub parts_rel: Option<f64>,
    pub reason: String,
    /// Last day it holds.
    pub expires: Date,
}

/// A serving case, valid but for what needs the model's dimensions ([`Case::validate`]).
#[derive(Debug, Clone)]
pub struct Case {
    pub file: PathBuf,
    pub point: Option<u32>,
    pub silicon: Option<Silicon>,
    pub tolerance: Option<Tolerance>,
    /// Line and column of `point`.
    pub(super) point_at: Option<(u64, u64)>,
    pub(super) scenario: Scenario,
    pub(super) places: Places,
}

impl Case {
    /// What the prediction may see: no silicon, point, path or tolerance.
    pub fn scenario(&self) -> Scenario {
        self.scenario.clone()
    }

    /// Checks the topology and precision against the model.
    pub fn validate(&self, dims: &ModelDims) -> Result<(), InputError> {
        validate::against_model(&self.file, &self.scenario.deployment, &self.places, dims)
    }
}

/// An op case, valid but for what needs the model's dimensions ([`OpCase::validate`]).
#[derive(Debug, Clone)]
pub struct OpCase {
    pub file: PathBuf,
    pub measured: Vec<OpMeasured>,
    pub(super) scenario: OpScenario,
    pub(super) places: Places,
}

impl OpCase {
    /// What the prediction may see: no measured value, no path.
    pub fn scenario(&self) -> OpScenario {
        self.scenario.clone()
    }

    /// Checks the topology and precision against the model.
    pub fn validate(&self, dims: &ModelDims) -> Result<(), InputError> {
        validate::against_model(&self.file, &self.scenario.deployment, &self.places, dims)
    }
}

/// A step case, valid but for what needs the model's dimensions ([`StepCase::validate`]).
#[derive(Debug, Clone)]
pub struct StepCase {
    pub file: PathBuf,
    pub measured: Vec<StepMeasured>,
    pub(super) scenario: StepScenario,
    pub(super) places: Places,
}

impl StepCase {
    /// What the prediction may see: no measured value, no path.
    pub fn scenario(&self) -> StepScenario {
        self.scenario.clone()
    }

    /// Checks the topology and precision against the model.
    pub fn validate(&self, dims: &ModelDims) -> Result<(), InputError> {
        validate::against_model(&self.file, &self.scenario.deployment, &self.places, dims)
    }
}

/// Any case file. One without `kind` is a serving case.
#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "a few hundred of them, taken apart at once"
)]
pub enum CaseFile {
    Serving(Case),
    Op(OpCase),
    Step(StepCase),
}

impl CaseFile {
    /// Reads and checks one file; refuses more than [`FILE_BYTES_MAX`] without reading it all.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, InputError> {
        let path = path.as_ref();
        Self::from_bytes(path, read(path, "case")?)
    }

    /// Checks the content of a file; `path` is for messages only.
    pub fn from_bytes(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self, InputError> {
        let path = path.as_ref();
        let text = text(path, bytes, "case")?;
        let probe: KindProbe = parse(path, &text)?;
        let Some(kind) = probe.kind else {
            let file: ServingFile = parse(path, &text)?;
            return validate::serving(path, &file).map(Self::Serving);
        };
        match kind.value.as_str() {
            "op" => {
                let file: OpFile = parse(path, &text)?;
                validate::op(path, &file).map(Self::Op)
            }
            "step" => {
                let file: StepFile = parse(path, &text)?;
                validate::step(path, &file).map(Self::Step)
            }
            other => Err(InputError::new(
                path,
                format!("unknown kind `{}`", other.escape_debug()),
                "write `op` or `step`; a serving case has no `kind`",
            )
            .at(kind.line, kind.column)
            .field("kind")),
        }
    }

    /// The file the case was read from.
    pub fn file(&self) -> &Path {
        match self {
            Self::Serving(case) => &case.file,
            Self::Op(case) => &case.file,
            Self::Step(case) => &case.file,
        }
    }

    /// Checks the topology and precision against the model.
    pub fn validate(&self, dims: &ModelDims) -> Result<(), InputError> {
        match self {
            Self::Serving(case) => case.validate(dims),
            Self::Op(case) => case.validate(dims),
            Self::Step(case) => case.validate(dims),
        }
    }

    /// What runs where, whichever kind the case is.
    pub fn deployment(&self) -> &Deployment {
        match self {
            Self::Serving(case) => &case.scenario.deployment,
            Self::Op(case) => &case.scenario.deployment,
            Self::Step(case) => &case.scenario.deployment,
        }
    }
}

/// Reads a file of at most [`FILE_BYTES_MAX`]; `noun` is for messages.
pub(super) fn read(path: &Path, noun: &str) -> Result<Vec<u8>, InputError> {
    let unreadable = |error: std::io::Error| {
        InputError::new(
            path,
            format!("cannot read the {noun}: {error}"),
            "check the path and its permissions",
        )
    };
    let oversized = || {
        InputError::new(
            path,
            format!("the {noun} is larger than {FILE_BYTES_MAX} bytes"),
            "expected a page of text; check that this is the right file",
        )
        .at(1, 1)
    };
    // Looked at before opening: opening a pipe would wait for its writer.
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(InputError::new(
            path,
            format!("the {noun} is not a file"),
            "give the path of a file",
        ));
    }
    if metadata.len() > FILE_BYTES_MAX {
        return Err(oversized());
    }
    // The file may grow after the look at its size.
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(oversized());
    }
    Ok(bytes)
}

/// The text of a file's bytes; refuses what holds no content.
pub(super) fn text(path: &Path, bytes: Vec<u8>, noun: &str) -> Result<String, InputError> {
    let not_text = |before: &[u8], what: &str| {
        let line = before.iter().filter(|byte| **byte == b'\n').count() as u64 + 1;
        let line_start = before
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        let column = String::from_utf8_lossy(&before[line_start..])
            .chars()
            .count() as u64
            + 1;
        InputError::new(
            path,
            format!("the {noun} is not text: {what}"),
            "save it as UTF-8 text",
        )
        .at(line, column)
    };
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(not_text(&[], "it is too large"));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        not_text(&error.as_bytes()[..valid], "invalid UTF-8")
    })?;
    if let Some(at) = text.find('\0') {
        return Err(not_text(&text.as_bytes()[..at], "a zero byte"));
    }
    let holds_content = text.lines().any(|line| {
        let line = line.trim();
        !line.is_empty() && !line.starts_with('#') && line != "---" && line != "..."
    });
    if !holds_content {
        return Err(InputError::new(
            path,
            format!("the {noun} is empty"),
            match noun {
                "case" => {
                    "write at least `model`, `system`, `backend`, `parallel`, `workload` and `serving`"
                }
                _ => "check that this is the right file",
            },
        )
        .at(1, 1));
    }
    Ok(text)
}

/// Anchors, aliases and merge keys are refused: a case says each thing once and a reader sees it
/// where it applies. That also leaves nothing for an alias bomb to expand.
pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, InputError> {
    let options = serde_yaml::options! {
        budget: serde_yaml::budget! {
            max_events: 20_000,
            max_nodes: 20_000,
            max_depth: 16,
            flow_nesting_limit: 16,
            max_documents: 2,
            max_anchors: 0,
            max_aliases: 0,
        },
        merge_keys: MergeKeyPolicy::Error,
        non_finite_float_policy: NonFiniteFloatPolicy::Reject,
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
    };
    serde_yaml::from_str_with_options(text, options).map_err(|error| located(path, &error))
}

fn located(path: &Path, error: &YamlError) -> InputError {
    let error = error.without_snippet();
    let (line, column) = error
        .location()
        .map_or((1, 1), |at| (at.line().max(1), at.column().max(1)));
    let one_of = |expected: &[&str]| match expected {
        [] => "no key is expected here".to_owned(),
        [one] => format!("expected `{one}`"),
        more => format!("expected one of `{}`", more.join("`, `")),
    };
    let (what, help, field) = match error {
        YamlError::SerdeUnknownField {
            field, expected, ..
        } => {
            let help = one_of(expected);
            (
                format!("unknown key `{}`", field.escape_debug()),
                help,
                Some(field.clone()),
            )
        }
        YamlError::SerdeUnknownVariant {
            variant, expected, ..
        } => (
            format!("unknown value `{}`", variant.escape_debug()),
            one_of(expected),
            None,
        ),
        YamlError::SerdeMissingField { field, .. } => (
            format!("missing key `{field}`"),
            "add it to the block of this line; schema/case.schema.json says what it holds"
                .to_owned(),
            Some((*field).to_owned()),
        ),
        YamlError::SerdeInvalidType {
            unexpected,
            expected,
            ..
        }
        | YamlError::SerdeInvalidValue {
            unexpected,
            expected,
            ..
        } => (
            format!("wrong type: {}", unexpected.escape_debug()),
            format!("expected {expected}"),
            None,
        ),
        // From `TryFrom` of the scalar types.
        YamlError::Message { msg, .. } => ("wrong type".to_owned(), msg.clone(), None),
        YamlError::Unexpected { expected, .. } => {
            let expected = match *expected {
                "mapping start" => "a mapping of keys to values",
                "sequence start" => "a list",
                "string scalar" => "text",
                other => other,
            };
            (
                "wrong type".to_owned(),
                format!("expected {expected}"),
                None,
            )
        }
        YamlError::NonFiniteFloat { value, .. } => (
            format!("`{}` is not a finite number", value.escape_debug()),
            "give a finite number".to_owned(),
            None,
        ),
        YamlError::DuplicateMappingKey { key, .. } => {
            let name = key.as_deref().unwrap_or("?");
            (
                format!("duplicate key `{}`", name.escape_debug()),
                "keep one of them".to_owned(),
                key.clone(),
            )
        }
        YamlError::Budget { breach, .. } => {
            let (what, help) = match breach {
                BudgetBreach::Anchors { .. } | BudgetBreach::Aliases { .. } => (
                    "anchors and aliases are refused",
                    "write each value where it applies",
                ),
                BudgetBreach::Depth { .. } => (
                    "the YAML is nested too deep",
                    "a case has fewer than 16 levels",
                ),
                _ => (
                    "the YAML holds too much",
                    "a case is a page of YAML; check that this is the right file",
                ),
            };
            (what.to_owned(), help.to_owned(), None)
        }
        YamlError::MergeKeyNotAllowed { .. } => (
            "merge keys are refused".to_owned(),
            "write each key where it applies".to_owned(),
            None,
        ),
        other => {
            let message = UserMessageFormatter.format_message(other);
            (
                format!("invalid YAML: {}", fragment(&message)),
                "correct the YAML here".to_owned(),
                None,
            )
        }
    };
    let fault = InputError::new(path, what, help).at(line, column);
    match field {
        Some(field) => fault.field(field.escape_debug().to_string()),
        None => fault,
    }
}

/// The parser's sentence as a fragment of ours: lowercase, on one line.
fn fragment(message: &str) -> String {
    let mut chars = message
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c });
    let first = chars.next().into_iter().flat_map(char::to_lowercase);
    first.chain(chars).collect()
}
