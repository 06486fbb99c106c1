//! Model dimensions from a Hugging Face `config.json`.

use std::path::Path;

use serde::Deserialize;

use crate::timing::{InputError, read_text};

/// More layers than any known decoder has.
const LAYERS_MAX: u32 = 1024;

/// Wider than any known model, all heads together too: sizes made of two widths stay in 32 bits.
const WIDTH_MAX: u32 = 1 << 19;

/// A decoder: grouped-query or latent attention or gated deltanet per layer, and a dense or a
/// mixture-of-experts MLP.
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
    /// Layers whose MLP is dense although the model has experts: the first ones.
    pub dense_layers: u32,
    /// Width of those layers' MLP.
    pub dense_ffn: u32,
    /// Width of the shared experts together; 0: none.
    pub shared_ffn: u32,
    /// The attention output is gated: the query projection is twice as wide.
    pub gated_attention: bool,
    /// Queries and keys are normed.
    pub qk_norm: Option<QkNorm>,
    pub latent: Option<Latent>,
    /// Gated-deltanet layers, where the model has some.
    pub deltanet: Option<Deltanet>,
}

/// Multi-head latent attention: ranks of the query and key-value projections and head widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    pub q_rank: u32,
    pub kv_rank: u32,
    pub nope_dim: u32,
    pub rope_dim: u32,
    pub v_dim: u32,
}

/// Gated deltanet: heads and widths, and which layers have it instead of attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deltanet {
    pub k_heads: u32,
    pub v_heads: u32,
    pub k_dim: u32,
    pub v_dim: u32,
    pub conv: u32,
    pub layers: Vec<bool>,
}

impl ModelConfig {
    /// Whether the model is of the plain family: grouped-query attention in every layer, a dense
    /// MLP or routed experts alone.
    pub fn is_plain(&self) -> bool {
        self.latent.is_none()
            && self.deltanet.is_none()
            && self.shared_ffn == 0
            && self.dense_layers == 0
            && !self.gated_attention
            && self.qk_norm.is_none()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    pub count: u32,
    pub topk: u32,
}

/// What a norm of queries and keys runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself: ranks norm their own heads.
    PerHead,
    /// All heads of the layer together: tensor-parallel ranks must exchange first.
    PerLayer,
}

#[derive(Deserialize)]
struct HfConfig {
    num_hidden_layers: u32,
    hidden_size: u32,
    num_attention_heads: u32,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    intermediate_size: Option<u32>,
    moe_intermediate_size: Option<u32>,
    #[serde(alias = "num_experts", alias = "n_routed_experts")]
    num_local_experts: Option<u32>,
    num_experts_per_tok: Option<u32>,
    vocab_size: u32,
    sliding_window: Option<u32>,
    layer_types: Option<Vec<String>>,
    first_k_dense_replace: Option<u32>,
    n_shared_experts: Option<u32>,
    shared_expert_intermediate_size: Option<u32>,
    attn_output_gate: Option<bool>,
    use_qk_norm: Option<bool>,
    qk_norm_type: Option<String>,
    model_type: Option<String>,
    q_lora_rank: Option<u32>,
    kv_lora_rank: Option<u32>,
    qk_nope_head_dim: Option<u32>,
    qk_rope_head_dim: Option<u32>,
    v_head_dim: Option<u32>,
    linear_num_key_heads: Option<u32>,
    linear_num_value_heads: Option<u32>,
    linear_key_head_dim: Option<u32>,
    linear_value_head_dim: Option<u32>,
    linear_conv_kernel_dim: Option<u32>,
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
        let unreadable = |error: serde_json::Error| {
            InputError::new(
                file,
                error.to_string(),
                "give a decoder's Hugging Face config.json",
            )
            .at(error.line() as u64, error.column() as u64)
        };
        let whole: serde_json::Value = serde_json::from_str(text).map_err(unreadable)?;
        // Multimodal configs hold the decoder's one inside.
        let hf: HfConfig = match whole.get("text_config") {
            Some(inner) => serde_json::from_value(inner.clone()).map_err(unreadable)?,
            None => serde_json::from_str(text).map_err(unreadable)?,
        };
        let wrong = |what: String| InputError::new(file, what, "check the model's config.json");
        let heads = hf.num_attention_heads;
        if heads == 0 || hf.num_hidden_layers == 0 || hf.hidden_size == 0 || hf.vocab_size == 0 {
            return Err(wrong("a dimension is zero".to_owned()));
        }
        if hf.num_hidden_layers > LAYERS_MAX || hf.head_dim == Some(0) {
            return Err(wrong(format!(
                "{} layers of head_dim {:?}",
                hf.num_hidden_layers, hf.head_dim
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
                    "full_attention" | "linear_attention" => Ok(0),
                    other => Err(wrong(format!("layer type `{other}` is not known"))),
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
        let whole = |name: &str, value: Option<u32>| match value {
            Some(value) if (1..=WIDTH_MAX).contains(&value) => Ok(value),
            Some(value) => Err(wrong(format!("`{name}` is {value}"))),
            None => Err(wrong(format!("`{name}` is missing"))),
        };
        for (name, value) in [
            ("hidden_size", hf.hidden_size),
            ("num_attention_heads", hf.num_attention_heads),
            (
                "num_key_value_heads",
                hf.num_key_value_heads.unwrap_or(heads),
            ),
            ("head_dim", hf.head_dim.unwrap_or(1)),
            ("intermediate_size", hf.intermediate_size.unwrap_or(1)),
            (
                "moe_intermediate_size",
                hf.moe_intermediate_size.unwrap_or(1),
            ),
            ("n_shared_experts", hf.n_shared_experts.unwrap_or(1).max(1)),
            ("vocab_size", hf.vocab_size),
        ] {
            whole(name, Some(value))?;
        }
        let latent = match hf.kv_lora_rank {
            Some(_) => Some(Latent {
                q_rank: whole("q_lora_rank", hf.q_lora_rank)?,
                kv_rank: whole("kv_lora_rank", hf.kv_lora_rank)?,
                nope_dim: whole("qk_nope_head_dim", hf.qk_nope_head_dim)?,
                rope_dim: whole("qk_rope_head_dim", hf.qk_rope_head_dim)?,
                v_dim: whole("v_head_dim", hf.v_head_dim)?,
            }),
            None => None,
        };
        let per_head = latent.map_or(hf.head_dim.unwrap_or(1), |latent| {
            latent.v_dim.max(latent.nope_dim + latent.rope_dim)
        });
        if u64::from(heads) * u64::from(per_head) > u64::from(WIDTH_MAX) {
            return Err(wrong(format!("{heads} heads of {per_head}")));
        }
        if hf
            .first_k_dense_replace
            .is_some_and(|dense| dense > hf.num_hidden_layers)
        {
            return Err(wrong(
                "`first_k_dense_replace` exceeds the layers".to_owned(),
            ));
        }
        let linear: Vec<bool> = hf
            .layer_types
            .iter()
            .flatten()
            .map(|kind| kind == "linear_attention")
            .collect();
        let given = hf.linear_num_key_heads.is_some() || hf.linear_num_value_heads.is_some();
        let deltanet = if given || linear.contains(&true) {
            if linear.is_empty() {
                return Err(wrong(
                    "linear attention heads without `layer_types`".to_owned(),
                ));
            }
            Some(Deltanet {
                k_heads: whole("linear_num_key_heads", hf.linear_num_key_heads)?,
                v_heads: whole("linear_num_value_heads", hf.linear_num_value_heads)?,
                k_dim: whole("linear_key_head_dim", hf.linear_key_head_dim)?,
                v_dim: whole("linear_value_head_dim", hf.linear_value_head_dim)?,
                conv: whole("linear_conv_kernel_dim", hf.linear_conv_kernel_dim)?,
                layers: linear,
            })
        } else {
            None
        };
        // Qwen3 norms queries and keys without a switch in its config.
        let qwen3 = hf
            .model_type
            .as_deref()
            .is_some_and(|name| name.starts_with("qwen3"));
        let per_layer = hf.qk_norm_type.as_deref() == Some("per_layer");
        let qk_norm = (qwen3 || hf.use_qk_norm.unwrap_or(false)).then_some(if per_layer {
            QkNorm::PerLayer
        } else {
            QkNorm::PerHead
        });
        let dense = hf.intermediate_size.unwrap_or(0);
        let expert = hf.moe_intermediate_size.unwrap_or(dense);
        let ffn = if experts.is_some() { expert } else { dense };
        if ffn == 0 {
            return Err(wrong("the MLP has no width".to_owned()));
        }
        let shared = hf
            .shared_expert_intermediate_size
            .unwrap_or_else(|| hf.n_shared_experts.unwrap_or(0).saturating_mul(expert));
        Ok(Self {
            dense_layers: hf.first_k_dense_replace.unwrap_or(0),
            dense_ffn: dense,
            shared_ffn: shared,
            gated_attention: hf.attn_output_gate.unwrap_or(false),
            qk_norm,
            latent,
            deltanet,
            layers: hf.num_hidden_layers,
            hidden: hf.hidden_size,
            heads,
            kv_heads: hf.num_key_value_heads.unwrap_or(heads),
            head_dim: hf.head_dim.unwrap_or(hf.hidden_size / heads),
            ffn,
            experts,
            vocab: hf.vocab_size,
            windows,
        })
    }
}
