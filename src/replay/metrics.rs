//! Means and percentiles of per-request times.

/// A percentile, with the request it is the time of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantile {
    pub ms: f64,
    pub request: u32,
}

/// A metric over requests, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    pub mean_ms: f64,
    pub p50: Quantile,
    pub p90: Quantile,
    pub p99: Quantile,
}

impl Metric {
    /// From (request, time) pairs; `None` without any. Percentiles are nearest-rank, so each is
    /// the time of one request.
    pub fn of(mut times: Vec<(u32, f64)>) -> Option<Self> {
        if times.is_empty() {
            return None;
        }
        let mean_ms = times.iter().map(|(_, ms)| ms).sum::<f64>() / times.len() as f64;
        times.sort_unstable_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        let at = |percent: usize| {
            let rank = (times.len() * percent).div_ceil(100).max(1);
            let (request, ms) = times[rank - 1];
            Quantile { ms, request }
        };
        Some(Self {
            mean_ms,
            p50: at(50),
            p90: at(90),
            p99: at(99),
        })
    }
}
