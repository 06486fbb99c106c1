//! Captured sizes, by arithmetic.

use crate::model::{Backend, BackendName, CudaGraph, Piecewise};

/// The graph that serves a decode batch. TensorRT-LLM captures 1, 2, 4, then every 8 to 128, then
/// every 64 (before 1.3.0rc14 powers of two); without padding 1 to 32, then powers of two. SGLang 1,
/// 2, 4, then every 4 to 16, every 8 to 256, every 16 to 512, every 32; without padding each. And
/// always the largest.
pub(super) fn graph_size(backend: &Backend, graph: &CudaGraph, batch: u32) -> Option<u32> {
    if let Some(sizes) = &graph.batch_sizes {
        let size = *sizes.iter().filter(|size| **size >= batch).min()?;
        return (graph.padding || size == batch).then_some(size);
    }
    if batch > graph.max_batch {
        return None;
    }
    let next = match (backend.name, graph.padding, batch) {
        (BackendName::Sglang, false, _) => batch,
        (BackendName::Trtllm, false, ..=32) => batch,
        (BackendName::Trtllm, false, _) => batch.next_power_of_two(),
        (_, true, ..=4) => batch.max(1).next_power_of_two(),
        (BackendName::Trtllm, true, ..=128) => batch.next_multiple_of(8),
        (BackendName::Trtllm, true, _) if before_rc14(&backend.version) => {
            batch.next_power_of_two()
        }
        (BackendName::Trtllm, true, _) => batch.next_multiple_of(64),
        (BackendName::Sglang, true, ..=16) => batch.next_multiple_of(4),
        (BackendName::Sglang, true, ..=256) => batch.next_multiple_of(8),
        (BackendName::Sglang, true, ..=512) => batch.next_multiple_of(16),
        (BackendName::Sglang, true, _) => batch.next_multiple_of(32),
    };
    let size = next.min(graph.max_batch);
    (graph.padding || size == batch).then_some(size)
}

/// Whether a version of TensorRT-LLM comes before 1.3.0rc14.
fn before_rc14(version: &str) -> bool {
    if let Some(candidate) = version.strip_prefix("1.3.0rc") {
        let digits = candidate.split('.').next().unwrap_or(candidate);
        return digits.parse().is_ok_and(|number: u32| number < 14);
    }
    let mut numbers = version.split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(0)), _) => true,
        (Some(Ok(1)), Some(Ok(minor))) => minor < 3,
        _ => false,
    }
}

/// The captured token count that serves a step: powers of two to 128, every 256, and the largest.
pub(super) fn piece_tokens(piecewise: &Piecewise, tokens: u32) -> Option<u32> {
    if let Some(counts) = &piecewise.capture_tokens {
        return counts
            .iter()
            .copied()
            .filter(|count| *count >= tokens)
            .min();
    }
    if tokens > piecewise.max_tokens {
        return None;
    }
    let next = if tokens <= 128 {
        tokens.max(1).next_power_of_two()
    } else {
        tokens.next_multiple_of(256)
    };
    Some(next.min(piecewise.max_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served_by(name: BackendName, version: &str, padding: bool, batch: u32) -> Option<u32> {
        let graph = CudaGraph {
            padding,
            max_batch: 300,
            batch_sizes: None,
        };
        let version = version.to_owned();
        graph_size(&Backend { name, version }, &graph, batch)
    }

    #[test]
    fn captured_sizes_by_arithmetic() {
        let trtllm = |batch| served_by(BackendName::Trtllm, "1.3.0rc14", true, batch);
        for (batch, size) in [(1, 1), (3, 4), (5, 8), (121, 128), (129, 192), (257, 300)] {
            assert_eq!(trtllm(batch), Some(size), "{batch}");
        }
        assert_eq!(trtllm(301), None);
        let older = |batch| served_by(BackendName::Trtllm, "1.2.1", true, batch);
        assert_eq!((older(128), older(129)), (Some(128), Some(256)));
        let exact = |batch| served_by(BackendName::Trtllm, "1.3.0rc14", false, batch);
        for (batch, size) in [(31, Some(31)), (33, None), (64, Some(64)), (192, None)] {
            assert_eq!(exact(batch), size, "{batch}");
        }
        let sglang = |batch| served_by(BackendName::Sglang, "0.5.14", true, batch);
        for (batch, size) in [
            (3, 4),
            (5, 8),
            (9, 12),
            (13, 16),
            (17, 24),
            (257, 272),
            (299, 300),
        ] {
            assert_eq!(sglang(batch), Some(size), "{batch}");
        }
        let every = served_by(BackendName::Sglang, "0.5.14", false, 299);
        assert_eq!(every, Some(299));
    }

    #[test]
    fn releases_before_and_after_the_change_of_steps() {
        for older in ["0.21.0", "1.2.1", "1.3.0rc5.post2", "1.3.0rc13"] {
            assert!(before_rc14(older), "{older}");
        }
        for newer in ["1.3.0rc14", "1.3.0rc22.post1", "1.3.0", "1.4.0rc0", "main"] {
            assert!(!before_rc14(newer), "{newer}");
        }
    }
}
