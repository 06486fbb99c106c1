//! Request lengths against what NumPy itself drew: 36 workloads, value for value.

use std::path::Path;

use approx::assert_relative_eq;
use serde_json::Value;
use sha2::{Digest, Sha256};
use stepgate::model::Workload;
use stepgate::replay::draw_lengths;

fn vectors() -> serde_json::Map<String, Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/points/length_vectors.json");
    let text = std::fs::read_to_string(file).expect("data/points/length_vectors.json");
    serde_json::from_str(&text).expect("length vectors are a JSON object")
}

fn workload(isl: u32, osl: u32, concurrency: u32, requests: u32) -> Workload {
    Workload {
        isl,
        osl,
        concurrency,
        requests,
        length_ratio: 0.8,
        seed: 0,
        chat_template: false,
    }
}

/// The first 16 hex digits of SHA-256 over `[[inputs...], [outputs...]]` with ", " separators.
fn digest(lengths: &[(u32, u32)]) -> String {
    let list = |of: &dyn Fn(&(u32, u32)) -> u32| {
        let numbers: Vec<String> = lengths.iter().map(|pair| of(pair).to_string()).collect();
        format!("[{}]", numbers.join(", "))
    };
    let text = format!("[{}, {}]", list(&|pair| pair.0), list(&|pair| pair.1));
    Sha256::digest(text.as_bytes())
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn pairs(of: &Value) -> Vec<(u32, u32)> {
    serde_json::from_value(of.clone()).expect("a list of pairs")
}

#[test]
fn thirty_six_workloads_are_drawn_as_numpy_drew_them() {
    let mut seen = 0;
    for (name, wanted) in vectors() {
        if name.starts_with('_') {
            continue;
        }
        let numbers: Vec<u32> = name
            .split('/')
            .map(|part| part.trim_start_matches('c').parse().expect("isl/osl/cN"))
            .collect();
        let &[isl, osl, concurrency] = numbers.as_slice() else {
            panic!("`{name}` is not isl/osl/cN");
        };
        let requests = wanted["n"].as_u64().expect("n") as u32;
        assert_eq!(requests, 10 * concurrency, "{name}");
        let drawn = draw_lengths(&workload(isl, osl, concurrency, requests));
        assert_eq!(drawn.len(), requests as usize, "{name}");
        assert_eq!(drawn[..10], pairs(&wanted["first10"])[..], "{name}");
        let sum = |of: &dyn Fn(&(u32, u32)) -> u32| -> u64 {
            drawn.iter().map(|pair| u64::from(of(pair))).sum()
        };
        for (total, sum_key, mean_key) in [
            (sum(&|pair| pair.0), "sum_in", "mean_in"),
            (sum(&|pair| pair.1), "sum_out", "mean_out"),
        ] {
            assert_eq!(Some(total), wanted[sum_key].as_u64(), "{name} {sum_key}");
            let mean = wanted[mean_key].as_f64().expect(mean_key);
            assert_relative_eq!(
                total as f64 / f64::from(requests),
                mean,
                max_relative = 1e-12
            );
        }
        assert_eq!(Some(&*digest(&drawn)), wanted["sha256"].as_str(), "{name}");
        seen += 1;
    }
    assert_eq!(seen, 36);
}

#[test]
fn forty_requests_of_1k_1k_are_listed_in_full() {
    let wanted = pairs(&vectors()["_n40_1k1k"]);
    assert_eq!(draw_lengths(&workload(1024, 1024, 4, 40)), wanted);
}

/// Prompts come first from the generator, so their number does not change them; outputs start
/// where the prompts end.
#[test]
fn prompts_do_not_depend_on_the_request_count_and_outputs_do() {
    let few = draw_lengths(&workload(1024, 1024, 1, 10));
    let many = draw_lengths(&workload(1024, 1024, 4, 40));
    let prompts = |of: &[(u32, u32)]| of.iter().take(10).map(|pair| pair.0).collect::<Vec<_>>();
    assert_eq!(prompts(&few), prompts(&many));
    assert_ne!(few[0].1, many[0].1);
}

/// `randint(0, 1)` has one value and draws nothing: the outputs then are the generator's first
/// draws.
#[test]
fn a_range_of_one_value_draws_nothing() {
    let without_prompts = draw_lengths(&workload(0, 1024, 1, 10));
    let with_prompts = draw_lengths(&workload(1024, 1024, 1, 10));
    for (without, with) in without_prompts.iter().zip(&with_prompts) {
        assert_eq!((0, with.0), *without);
    }
}
