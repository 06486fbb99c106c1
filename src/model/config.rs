//! Model dimensions from a Hugging Face `config.json`.

use std::path::Path;

use serde::Deserialize;

use crate::timing::{InputError, read_text};

/// More layers than any known decoder has.
const LAYERS_MAX: u32 = 1024;

/// A decoder with grouped-query attention and a dense or a mixture-of-experts MLP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    pub layers: u32,
    pub hidden: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Width of the dense MLP, or of one expert.
    pub ffn: u32,
    pub experts: Option<Experts>,
    pub vocab: u32,
    /// Sliding window of each layer; 0: full attention.
    pub windows: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    pub count: u32,
    pub topk: u32,
}

#[derive(Deserialize)]
struct HfConfig {
    num_hidden_layers: u32,
    hidden_size: u32,
    num_attention_heads: u32,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    intermediate_size: u32,
    moe_intermediate_size: Option<u32>,
    #[serde(alias = "num_experts")]
    num_local_experts: Option<u32>,
    num_experts_per_tok: Option<u32>,
    vocab_size: u32,
    sliding_window: Option<u32>,
    layer_types: Option<Vec<String>>,
}

impl ModelConfig {
    /// Reads `<models>/<id>.json`.
    pub fn load(models: &Path, id: &str) -> Result<Self, InputError> {
        let file = models.join(format!("{id}.json"));
        let known = id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
        if !known {
            return Err(InputError::new(
                &file,
                "a model id holds letters, digits, `-`, `.` and `_` only",
                "put the model's config.json into data/models under its id",
            ));
        }
        let text = read_text(&file, "the model config")?;
        Self::parse(&text, &file)
    }

    fn parse(text: &str, file: &Path) -> Result<Self, InputError> {
        let hf: HfConfig = serde_json::from_str(text).map_err(|error| {
            InputError::new(
                file,
                error.to_string(),
                "the GQA family needs a Hugging Face config.json with these fields",
            )
            .at(error.line() as u64, error.column() as u64)
        })?;
        let wrong = |what: String| InputError::new(file, what, "check the model's config.json");
        let heads = hf.num_attention_heads;
        if heads == 0 || hf.num_hidden_layers == 0 || hf.hidden_size == 0 || hf.vocab_size == 0 {
            return Err(wrong("a dimension is zero".to_owned()));
        }
        if hf.num_hidden_layers > LAYERS_MAX || hf.head_dim == Some(0) || hf.intermediate_size == 0
        {
            return Err(wrong(format!(
                "{} layers of head_dim {:?} and intermediate_size {}",
                hf.num_hidden_layers, hf.head_dim, hf.intermediate_size
            )));
        }
        let window = hf.sliding_window.unwrap_or(0);
        let windows: Vec<u32> = match &hf.layer_types {
            Some(types) => types
                .iter()
                .map(|kind| match kind.as_str() {
                    "sliding_attention" if window == 0 => {
                        Err(wrong("sliding layers without a sliding_window".to_owned()))
                    }
                    "sliding_attention" => Ok(window),
                    "full_attention" => Ok(0),
                    other => Err(wrong(format!(
                        "layer type `{other}` is not of the GQA family"
                    ))),
                })
                .collect::<Result<_, _>>()?,
            None => vec![0; hf.num_hidden_layers as usize],
        };
        if windows.len() != hf.num_hidden_layers as usize {
            return Err(wrong(format!(
                "{} layer types for {} layers",
                windows.len(),
                hf.num_hidden_layers
            )));
        }
        let experts = match (hf.num_local_experts, hf.num_experts_per_tok) {
            (Some(count), Some(topk)) if topk > 0 && topk <= count => Some(Experts { count, topk }),
            (None, None) => None,
            (count, topk) => {
                let said = |value: Option<u32>| value.map_or("no".to_owned(), |v| v.to_string());
                return Err(wrong(format!(
                    "{} experts per token of {} experts",
                    said(topk),
                    said(count)
                )));
            }
        };
        Ok(Self {
            layers: hf.num_hidden_layers,
            hidden: hf.hidden_size,
            heads,
            kv_heads: hf.num_key_value_heads.unwrap_or(heads),
            head_dim: hf.head_dim.unwrap_or(hf.hidden_size / heads),
            ffn: match experts {
                Some(_) => hf.moe_intermediate_size.unwrap_or(hf.intermediate_size),
                None => hf.intermediate_size,
            },
            experts,
            vocab: hf.vocab_size,
            windows,
        })
    }
}
