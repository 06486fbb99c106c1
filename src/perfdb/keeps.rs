//! Which table rows predicting a model looks at, from its Hugging Face `config.json`.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::Value;

use crate::timing::{InputError, OpTable};

/// Tensor-parallel sizes of one node, the only ones that the measured points use.
const TP_SIZES: [i64; 4] = [1, 2, 4, 8];

/// Rows of one table to keep. Several keeps of a table are alternatives; within one, every column
/// must match, and so must one of the sites where there are any. A keep with neither wants all
/// rows. A table that no keep names is not imported.
#[derive(Debug, Clone, PartialEq)]
pub struct Keep {
    /// File stem, such as `moe_perf`.
    pub table: String,
    /// Column names with the values wanted in them.
    pub wants: Vec<(String, Wanted)>,
    /// Columns in which no exact value is needed, of integers.
    pub near: Vec<String>,
    /// Points of a grid over the columns of `near`. Of each point and column, the value itself is
    /// kept where the table has it; otherwise its nearest neighbours below and above, or the last
    /// value on that side. What the table has is judged among the rows that match `wants`.
    pub sites: BTreeSet<Vec<i64>>,
}

/// Values wanted in one column.
#[derive(Debug, Clone, PartialEq)]
pub enum Wanted {
    Text(Vec<String>),
    Int(Vec<i64>),
}

impl Keep {
    fn exact(table: &str, wants: Vec<(&str, Wanted)>) -> Self {
        Self::near(table, wants, &[], BTreeSet::new())
    }

    fn near(
        table: &str,
        wants: Vec<(&str, Wanted)>,
        near: &[&str],
        sites: BTreeSet<Vec<i64>>,
    ) -> Self {
        Self {
            table: table.to_string(),
            wants: wants
                .into_iter()
                .map(|(column, wanted)| (column.to_string(), wanted))
                .collect(),
            near: near.iter().map(ToString::to_string).collect(),
            sites,
        }
    }

    /// Which rows of `table` the keep wants, one flag per row.
    ///
    /// # Errors
    /// The table lacks a column that the keep names, or holds another type in it.
    pub fn matching_rows(&self, table: &OpTable) -> Result<Vec<bool>, InputError> {
        let mut rows = vec![true; table.rows];
        for (column, wanted) in &self.wants {
            match wanted {
                Wanted::Text(values) => {
                    for (row, value) in rows.iter_mut().zip(table.text(column)?) {
                        *row &= values.iter().any(|v| **v == **value);
                    }
                }
                Wanted::Int(values) => {
                    for (row, value) in rows.iter_mut().zip(table.int(column)?) {
                        *row &= values.contains(value);
                    }
                }
            }
        }
        if self.near.is_empty() {
            return Ok(rows);
        }
        let mut columns = Vec::new();
        for column in &self.near {
            columns.push(table.int(column)?);
        }
        let present: Vec<BTreeSet<i64>> = columns
            .iter()
            .map(|values| {
                let values = values.iter().zip(&rows);
                values
                    .filter_map(|(v, exact)| exact.then_some(*v))
                    .collect()
            })
            .collect();
        let mut cells: BTreeSet<Vec<i64>> = BTreeSet::new();
        for site in &self.sites {
            let mut around = vec![Vec::new()];
            for (wanted, present) in site.iter().zip(&present) {
                let values = bracket(present, *wanted);
                around = around
                    .iter()
                    .flat_map(|cell| values.iter().map(move |v| [&cell[..], &[*v]].concat()))
                    .collect();
            }
            cells.extend(around);
        }
        let mut cell = Vec::new();
        for (at, row) in rows.iter_mut().enumerate() {
            if *row {
                cell.clear();
                cell.extend(columns.iter().map(|values| values[at]));
                *row = cells.contains(&cell);
            }
        }
        Ok(rows)
    }
}

/// `wanted` where it exists; else its neighbours below and above, as far as there are any.
fn bracket(existing: &BTreeSet<i64>, wanted: i64) -> Vec<i64> {
    if existing.contains(&wanted) {
        return vec![wanted];
    }
    let below = existing.range(..wanted).next_back();
    let above = existing.range(wanted..).next();
    below.into_iter().chain(above).copied().collect()
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = self
            .wants
            .iter()
            .map(|(column, wanted)| match wanted {
                Wanted::Text(values) => format!("{column} in {}", values.join("|")),
                Wanted::Int(values) => format!("{column} in {}", joined(values, "|")),
            })
            .collect();
        if !self.near.is_empty() {
            let sites: Vec<String> = self.sites.iter().map(|site| joined(site, "x")).collect();
            parts.push(format!(
                "{} near {}",
                self.near.join(" x "),
                sites.join(" ")
            ));
        }
        if parts.is_empty() {
            parts.push("all rows".to_string());
        }
        f.write_str(&parts.join(" and "))
    }
}

fn joined(values: &[i64], separator: &str) -> String {
    let texts: Vec<String> = values.iter().map(i64::to_string).collect();
    texts.join(separator)
}

/// The rows that predicting a model looks at, at tensor-parallel sizes 1, 2, 4 and 8 (size 1 is
/// also that of attention data parallelism).
///
/// GEMM sites: the projections of each attention kind (grouped-query, latent, gated delta rule),
/// router, LM head and the dense or shared feed-forward, in bf16 and in every dtype a checkpoint of
/// the model may be quantised to. Attention of the heads of one rank, full and sliding. Experts and
/// their all-to-all at every split of 8 ranks or fewer. All-reduce and NCCL rows: all.
///
/// # Errors
/// A field is missing or no size, or the quantisation is unknown. Errors name the file
/// `config.json`.
pub fn keeps_for_model(config: &Value) -> Result<Vec<Keep>, InputError> {
    // Multimodal configs nest the decoder's; the quantisation stays outside.
    let decoder = config.get("text_config").filter(|v| !v.is_null());
    let decoder = decoder.unwrap_or(config);
    let quantised = [decoder, config]
        .into_iter()
        .find_map(|c| c.get("quantization_config").filter(|v| !v.is_null()));
    let mut wanted = Rows {
        hidden: size(decoder, &["hidden_size"])?,
        sites: BTreeSet::new(),
        keeps: Vec::new(),
    };
    let heads = size(decoder, &["num_attention_heads"])?;
    let latent = optional_size(decoder, &["kv_lora_rank"])?;
    let linear_heads = optional_size(decoder, &["linear_num_key_heads"])?;
    for tp in TP_SIZES.into_iter().filter(|tp| heads % tp == 0) {
        match latent {
            Some(rank) => wanted.latent_attention(decoder, heads, rank, tp)?,
            None => wanted.grouped_attention(decoder, heads, tp)?,
        }
        if let Some(heads) = linear_heads.filter(|heads| heads % tp == 0) {
            wanted.delta_rule(decoder, heads, tp)?;
        }
        wanted.feed_forward(decoder, tp)?;
    }
    wanted.experts(decoder)?;

    let Rows {
        sites, mut keeps, ..
    } = wanted;
    for dtype in gemm_dtypes(quantised)? {
        keeps.push(Keep::near(
            "gemm_perf",
            vec![("gemm_dtype", Wanted::Text(vec![dtype.to_string()]))],
            &["n", "k"],
            sites.clone(),
        ));
    }
    keeps.push(Keep::exact("custom_allreduce_perf", Vec::new()));
    keeps.push(Keep::exact("nccl_perf", Vec::new()));
    Ok(keeps)
}

/// Rows of one model, as they are gathered.
struct Rows {
    hidden: i64,
    /// n and k of GEMMs.
    sites: BTreeSet<Vec<i64>>,
    keeps: Vec<Keep>,
}

impl Rows {
    fn gemm(&mut self, n: i64, k: i64) {
        self.sites.insert(vec![n, k]);
    }

    fn keep(&mut self, table: &str, wants: &[(&str, i64)]) {
        let wants = wants.iter().map(|&(c, v)| (c, Wanted::Int(vec![v])));
        self.keeps.push(Keep::exact(table, wants.collect()));
    }

    fn grouped_attention(&mut self, config: &Value, heads: i64, tp: i64) -> Result<(), InputError> {
        let kv_heads = (size(config, &["num_key_value_heads"])? / tp).max(1);
        let head_dim = optional_size(config, &["head_dim"])?.unwrap_or(self.hidden / heads);
        let heads = heads / tp;
        // A gate on the output comes from the same projection as the queries.
        let gated = config.get("attn_output_gate") == Some(&Value::Bool(true));
        let queries = if gated { 2 * heads } else { heads };
        self.gemm((queries + 2 * kv_heads) * head_dim, self.hidden);
        self.gemm(self.hidden, heads * head_dim);

        let mut windows = vec![0];
        let sliding = config.get("use_sliding_window") != Some(&Value::Bool(false));
        if sliding && let Some(window) = optional_size(config, &["sliding_window"])? {
            windows.push(window);
        }
        for table in ["context_attention_perf", "generation_attention_perf"] {
            let wants = vec![
                ("num_heads", Wanted::Int(vec![heads])),
                ("num_key_value_heads", Wanted::Int(vec![kv_heads])),
                ("head_dim", Wanted::Int(vec![head_dim])),
                ("window_size", Wanted::Int(windows.clone())),
            ];
            self.keeps.push(Keep::exact(table, wants));
        }
        Ok(())
    }

    /// Latent attention: queries (through their own low rank where there is one) and the latent KV,
    /// whose down-projections are one GEMM and not split over ranks.
    fn latent_attention(
        &mut self,
        config: &Value,
        heads: i64,
        kv_rank: i64,
        tp: i64,
    ) -> Result<(), InputError> {
        let nope = size(config, &["qk_nope_head_dim"])?;
        let rope = size(config, &["qk_rope_head_dim"])?;
        let value = size(config, &["v_head_dim"])?;
        let heads = heads / tp;
        match optional_size(config, &["q_lora_rank"])? {
            Some(q_rank) => {
                self.gemm(q_rank + kv_rank + rope, self.hidden);
                self.gemm(heads * (nope + rope), q_rank);
            }
            None => {
                self.gemm(kv_rank + rope, self.hidden);
                self.gemm(heads * (nope + rope), self.hidden);
            }
        }
        self.gemm(heads * (nope + value), kv_rank);
        self.gemm(self.hidden, heads * value);
        for table in ["context_mla_perf", "generation_mla_perf"] {
            self.keep(table, &[("num_heads", heads)]);
        }
        self.keep("mla_bmm_perf", &[("num_heads", heads)]);
        Ok(())
    }

    /// Gated delta rule: queries, keys, values and the output gate in one projection, the two
    /// scalars per value head in another.
    fn delta_rule(&mut self, config: &Value, key_heads: i64, tp: i64) -> Result<(), InputError> {
        let key_dim = size(config, &["linear_key_head_dim"])?;
        let value_dim = size(config, &["linear_value_head_dim"])?;
        let conv = size(config, &["linear_conv_kernel_dim"])?;
        let key_heads = key_heads / tp;
        let value_heads = size(config, &["linear_num_value_heads"])? / tp;
        self.gemm(
            2 * key_heads * key_dim + 2 * value_heads * value_dim,
            self.hidden,
        );
        self.gemm(2 * value_heads, self.hidden);
        self.gemm(self.hidden, value_heads * value_dim);
        self.keep(
            "gdn_perf",
            &[
                ("d_model", self.hidden),
                ("d_conv", conv),
                ("num_k_heads", key_heads),
                ("head_k_dim", key_dim),
                ("num_v_heads", value_heads),
                ("head_v_dim", value_dim),
            ],
        );
        Ok(())
    }

    /// The layers, or parts of layers, that are not routed experts, and the LM head.
    fn feed_forward(&mut self, config: &Value, tp: i64) -> Result<(), InputError> {
        for width in dense_widths(config)? {
            self.gemm(2 * width / tp, self.hidden);
            self.gemm(self.hidden, width / tp);
        }
        let vocab = size(config, &["vocab_size"])?;
        self.gemm((vocab + tp - 1) / tp, self.hidden);
        Ok(())
    }

    fn experts(&mut self, config: &Value) -> Result<(), InputError> {
        let Some(experts) = optional_size(config, &EXPERTS)? else {
            return Ok(());
        };
        self.gemm(experts, self.hidden);
        let inter = size(config, &["moe_intermediate_size", "intermediate_size"])?;
        let topk = size(config, &["num_experts_per_tok", "experts_per_token"])?;
        for tp in TP_SIZES {
            let eps = TP_SIZES.into_iter().filter(|ep| tp * ep <= 8).collect();
            let wants = vec![
                ("hidden_size", Wanted::Int(vec![self.hidden])),
                ("inter_size", Wanted::Int(vec![inter])),
                ("topk", Wanted::Int(vec![topk])),
                ("num_experts", Wanted::Int(vec![experts])),
                ("moe_tp_size", Wanted::Int(vec![tp])),
                ("moe_ep_size", Wanted::Int(eps)),
            ];
            self.keeps.push(Keep::exact("moe_perf", wants));
        }
        Ok(())
    }
}

/// What configs call the number of routed experts.
const EXPERTS: [&str; 3] = ["num_local_experts", "num_experts", "n_routed_experts"];

/// Feed-forward widths of the layers (or parts of layers) that are not routed experts.
fn dense_widths(config: &Value) -> Result<Vec<i64>, InputError> {
    if optional_size(config, &EXPERTS)?.is_none() {
        return Ok(vec![size(config, &["intermediate_size"])?]);
    }
    let mut widths = Vec::new();
    widths.extend(optional_size(config, &["shared_expert_intermediate_size"])?);
    // Zero shared experts or dense layers are written out in some configs.
    let count = |key: &str| config.get(key).and_then(Value::as_i64).unwrap_or(0);
    if count("n_shared_experts") > 0 {
        let shared = size(config, &["n_shared_experts"])?;
        widths.push(shared * size(config, &["moe_intermediate_size"])?);
    }
    let dense_layers = config
        .get("mlp_only_layers")
        .and_then(Value::as_array)
        .is_some_and(|layers| !layers.is_empty());
    if dense_layers || count("first_k_dense_replace") > 0 {
        widths.push(size(config, &["intermediate_size"])?);
    }
    Ok(widths)
}

/// The GEMM dtypes of the tables that a checkpoint's linear layers can run in. The config is that of
/// the released checkpoint; the served one may be quantised otherwise.
fn gemm_dtypes(quantised: Option<&Value>) -> Result<&'static [&'static str], InputError> {
    const ALL: &[&str] = &["bfloat16", "fp8", "fp8_block", "nvfp4"];
    let Some(quantised) = quantised else {
        return Ok(ALL);
    };
    let text = |key: &str| quantised.get(key).and_then(Value::as_str);
    match (text("quant_method"), text("quant_algo")) {
        // Only the experts are MXFP4; every GEMM stays bf16.
        (Some("mxfp4"), _) => Ok(&["bfloat16"]),
        (Some("fp8"), _) | (_, Some("FP8" | "NVFP4")) => Ok(ALL),
        (method, _) => Err(bad_config(
            "quantization_config",
            format!(
                "unknown quantisation {}",
                method.unwrap_or("without a name")
            ),
            "give the rows to keep by hand; mxfp4, fp8 and NVFP4 are known",
        )),
    }
}

fn optional_size(config: &Value, keys: &[&str]) -> Result<Option<i64>, InputError> {
    for key in keys {
        let Some(value) = config.get(key).filter(|v| !v.is_null()) else {
            continue;
        };
        return match value.as_i64() {
            // The bound keeps products of two sizes far from overflow.
            Some(size) if (1..=1 << 30).contains(&size) => Ok(Some(size)),
            _ => Err(bad_config(
                key,
                format!("{value} is not a size"),
                "give a whole number from 1 to 2^30",
            )),
        };
    }
    Ok(None)
}

fn size(config: &Value, keys: &[&str]) -> Result<i64, InputError> {
    optional_size(config, keys)?.ok_or_else(|| {
        bad_config(
            keys[0],
            "the model config has no such field",
            "add the field or use the model's original config.json",
        )
    })
}

fn bad_config(field: &str, what: impl Into<String>, help: &str) -> InputError {
    InputError::new("config.json", what, help).field(field)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::Column;

    /// The grid n x k of {32, 64, 128} x {256, 512}, in two dtypes of which one lacks n = 32.
    fn gemm() -> OpTable {
        let mut dtypes = Vec::new();
        let mut columns: [Vec<i64>; 2] = [Vec::new(), Vec::new()];
        for (dtype, sizes) in [("fp8", &[64, 128][..]), ("bfloat16", &[32, 64, 128])] {
            for n in sizes {
                for k in [256, 512] {
                    dtypes.push(dtype.into());
                    columns[0].push(*n);
                    columns[1].push(k);
                }
            }
        }
        let [n, k] = columns;
        OpTable {
            label: String::new(),
            file: "gemm_perf.parquet".into(),
            names: ["gemm_dtype", "n", "k"].map(String::from).into(),
            rows: n.len(),
            columns: vec![Column::Text(dtypes), Column::Int(n), Column::Int(k)].into(),
        }
    }

    fn near(dtype: &str, sites: &[[i64; 2]]) -> Keep {
        let wants = vec![("gemm_dtype", Wanted::Text(vec![dtype.to_string()]))];
        let sites = sites.iter().map(|site| site.to_vec()).collect();
        Keep::near("gemm_perf", wants, &["n", "k"], sites)
    }

    fn kept(dtype: &str, sites: &[[i64; 2]]) -> BTreeSet<(i64, i64)> {
        let table = gemm();
        let rows = near(dtype, sites).matching_rows(&table).expect("rows");
        let (n, k) = (table.int("n").expect("n"), table.int("k").expect("k"));
        let kept = (0..table.rows).filter(|&row| rows[row]);
        kept.map(|row| (n[row], k[row])).collect()
    }

    fn gpt_oss() -> Value {
        serde_json::json!({
            "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "vocab_size": 201088, "num_local_experts": 128,
            "num_experts_per_tok": 4, "intermediate_size": 2880, "sliding_window": 128,
            "quantization_config": { "quant_method": "mxfp4" },
        })
    }

    fn latent() -> Value {
        serde_json::json!({
            "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "num_experts_per_tok": 8,
            "quantization_config": { "quant_method": "fp8", "weight_block_size": [128, 128] },
        })
    }

    fn hybrid() -> Value {
        serde_json::json!({ "text_config": {
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2,
            "head_dim": 256, "attn_output_gate": true, "vocab_size": 248320,
            "linear_num_key_heads": 16, "linear_num_value_heads": 64,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
            "mlp_only_layers": [],
        } })
    }

    fn of(config: &Value, table: &str) -> Vec<String> {
        let keeps = keeps_for_model(config).expect("keeps");
        let keeps = keeps.iter().filter(|k| k.table == table);
        keeps.map(ToString::to_string).collect()
    }

    fn gemm_sites(config: &Value, dtype: &str) -> BTreeSet<Vec<i64>> {
        let keeps = keeps_for_model(config).expect("keeps");
        let dtype = format!("gemm_dtype in {dtype} ");
        let keep = keeps.iter().find(|k| k.to_string().starts_with(&dtype));
        keep.map(|k| k.sites.clone()).unwrap_or_default()
    }

    fn assert_sites(config: &Value, dtype: &str, wanted: &[[i64; 2]]) {
        let sites = gemm_sites(config, dtype);
        for site in wanted {
            assert!(sites.contains(&site[..]), "{site:?} is not among {sites:?}");
        }
    }

    #[test]
    fn a_value_the_table_has_is_kept_alone() {
        assert_eq!(kept("bfloat16", &[[64, 256]]), BTreeSet::from([(64, 256)]));
    }

    #[test]
    fn a_value_between_keeps_its_neighbours() {
        assert_eq!(
            kept("bfloat16", &[[100, 300]]),
            BTreeSet::from([(64, 256), (64, 512), (128, 256), (128, 512)])
        );
    }

    #[test]
    fn a_value_outside_keeps_the_last_on_that_side() {
        assert_eq!(kept("bfloat16", &[[9999, 1]]), BTreeSet::from([(128, 256)]));
    }

    #[test]
    fn two_sites_keep_their_own_cells_and_not_the_grid_they_span() {
        assert_eq!(
            kept("bfloat16", &[[32, 256], [128, 512]]),
            BTreeSet::from([(32, 256), (128, 512)])
        );
    }

    #[test]
    fn neighbours_are_sought_among_the_rows_of_the_other_columns() {
        // In fp8 there is no n below 64, though the table as a whole has 32.
        assert_eq!(kept("fp8", &[[40, 256]]), BTreeSet::from([(64, 256)]));
    }

    #[test]
    fn a_column_the_table_lacks_is_an_error() {
        let wanted = Keep::exact("gemm_perf", vec![("shape_n", Wanted::Int(vec![1]))]);
        let error = wanted.matching_rows(&gemm()).expect_err("no such column");
        assert_eq!(error.place.field.as_deref(), Some("shape_n"));
    }

    #[test]
    fn gpt_oss_keeps_its_ops_at_every_tp() {
        let config = gpt_oss();
        assert_sites(
            &config,
            "bfloat16",
            &[
                [5120, 2880],
                [640, 2880],
                [2880, 4096],
                [2880, 512],
                [128, 2880],
                [201_088, 2880],
                [25_136, 2880],
            ],
        );
        // Four sizes of QKV, output and LM head, and one router; no dense feed-forward.
        assert_eq!(gemm_sites(&config, "bfloat16").len(), 13);
        // The experts alone are quantised.
        assert_eq!(of(&config, "gemm_perf").len(), 1);
        let moe = of(&config, "moe_perf");
        assert_eq!(moe.len(), 4);
        assert!(moe[1].ends_with("moe_tp_size in 2 and moe_ep_size in 1|2|4"));
        let context = of(&config, "context_attention_perf");
        assert_eq!(context, of(&config, "generation_attention_perf"));
        assert!(context[3].contains("num_key_value_heads in 1 "));
        assert!(context[3].ends_with("window_size in 0|128"));
        assert_eq!(of(&config, "nccl_perf"), ["all rows"]);
    }

    #[test]
    fn a_dense_model_has_its_feed_forward_in_every_dtype() {
        let config = serde_json::json!({
            "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
            "vocab_size": 128_256, "intermediate_size": 28672,
        });
        for dtype in ["bfloat16", "fp8", "fp8_block", "nvfp4"] {
            // At tensor-parallel size 4.
            let sites = [[14336, 8192], [8192, 7168], [2560, 8192], [8192, 2048]];
            assert_sites(&config, dtype, &sites);
        }
        assert!(of(&config, "moe_perf").is_empty());
    }

    #[test]
    fn latent_attention_has_its_projections_and_no_grouped_rows() {
        let config = latent();
        assert_sites(
            &config,
            "fp8_block",
            &[
                // Both down-projections at once, whole on every rank.
                [2112, 7168],
                [24576, 1536],
                [3072, 1536],
                [4096, 512],
                [7168, 2048],
                // Dense layers, shared expert and router.
                [36864, 7168],
                [7168, 2304],
                [512, 7168],
                [7168, 256],
                [256, 7168],
                [16160, 7168],
            ],
        );
        for table in ["context_mla_perf", "generation_mla_perf"] {
            let keeps = of(&config, table);
            assert_eq!(keeps.len(), 4);
            assert_eq!(keeps[3], "num_heads in 16");
        }
        assert_eq!(of(&config, "mla_bmm_perf")[0], "num_heads in 128");
        assert!(of(&config, "context_attention_perf").is_empty());
        let mut direct = config;
        direct["q_lora_rank"] = Value::Null;
        assert_sites(&direct, "bfloat16", &[[576, 7168], [24576, 7168]]);
    }

    #[test]
    fn a_nested_hybrid_has_both_kinds_of_attention() {
        let config = hybrid();
        assert_sites(
            &config,
            "nvfp4",
            &[
                // The gate doubles the queries; one KV head is left at sizes 2 to 8.
                [17408, 4096],
                [2560, 4096],
                [4096, 1024],
                // Delta rule: queries to gate, the scalars, output.
                [20480, 4096],
                [2560, 4096],
                [128, 4096],
                [16, 4096],
                [4096, 8192],
                // Shared expert and router.
                [256, 4096],
                [4096, 128],
                [512, 4096],
            ],
        );
        let gdn = of(&config, "gdn_perf");
        assert_eq!(gdn.len(), 4);
        assert_eq!(
            gdn[2],
            "d_model in 4096 and d_conv in 4 and num_k_heads in 4 and head_k_dim in 128 \
             and num_v_heads in 16 and head_v_dim in 128"
        );
        assert!(
            of(&config, "context_attention_perf")[3]
                .starts_with("num_heads in 4 and num_key_value_heads in 1 and head_dim in 256")
        );
    }

    #[test]
    fn a_config_that_does_not_fit_names_the_field() {
        for (base, key, value) in [
            (gpt_oss(), "hidden_size", serde_json::json!("wide")),
            (gpt_oss(), "num_attention_heads", serde_json::json!(0)),
            (gpt_oss(), "vocab_size", Value::Null),
            (
                gpt_oss(),
                "quantization_config",
                serde_json::json!({ "quant_method": "odd" }),
            ),
            (latent(), "qk_rope_head_dim", Value::Null),
            (latent(), "moe_intermediate_size", serde_json::json!(-1)),
            (
                hybrid()["text_config"].clone(),
                "linear_conv_kernel_dim",
                Value::Null,
            ),
        ] {
            let mut config = base;
            config[key] = value;
            let error = keeps_for_model(&config).expect_err(key);
            assert_eq!(error.place.field.as_deref(), Some(key), "{error}");
        }
    }
}
