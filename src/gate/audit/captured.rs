//! Captured sizes, by arithmetic.

use crate::model::{BackendName, CudaGraph, Piecewise};

/// The graph that serves a decode batch. TensorRT-LLM captures 1, 2, 4, then every 8 to 128, then
/// powers of two; SGLang 1, 2, 4, then every 4 to 16, every 8 to 256, every 16 to 512, every 32;
/// and both the largest.
pub(super) fn graph_size(runtime: BackendName, graph: &CudaGraph, batch: u32) -> Option<u32> {
    if let Some(sizes) = &graph.batch_sizes {
        let size = *sizes.iter().filter(|size| **size >= batch).min()?;
        return (graph.padding || size == batch).then_some(size);
    }
    if batch > graph.max_batch {
        return None;
    }
    let next = match (runtime, batch) {
        (_, ..=4) => batch.max(1).next_power_of_two(),
        (BackendName::Trtllm, ..=128) => batch.next_multiple_of(8),
        (BackendName::Trtllm, _) => batch.next_power_of_two(),
        (BackendName::Sglang, ..=16) => batch.next_multiple_of(4),
        (BackendName::Sglang, ..=256) => batch.next_multiple_of(8),
        (BackendName::Sglang, ..=512) => batch.next_multiple_of(16),
        (BackendName::Sglang, _) => batch.next_multiple_of(32),
    };
    let size = next.min(graph.max_batch);
    (graph.padding || size == batch).then_some(size)
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

    #[test]
    fn captured_sizes_by_arithmetic() {
        let graph = CudaGraph {
            padding: true,
            max_batch: 300,
            batch_sizes: None,
        };
        for (batch, size) in [(1, 1), (3, 4), (5, 8), (121, 128), (129, 256), (257, 300)] {
            assert_eq!(
                graph_size(BackendName::Trtllm, &graph, batch),
                Some(size),
                "{batch}"
            );
        }
        assert_eq!(graph_size(BackendName::Trtllm, &graph, 301), None);
        for (batch, size) in [
            (3, 4),
            (5, 8),
            (9, 12),
            (13, 16),
            (17, 24),
            (257, 272),
            (299, 300),
        ] {
            assert_eq!(
                graph_size(BackendName::Sglang, &graph, batch),
                Some(size),
                "{batch}"
            );
        }
    }
}
