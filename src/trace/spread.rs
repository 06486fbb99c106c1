//! How times are spread.

use serde::Serialize;

use super::interval::sum_ns;

/// Count, sum and nearest-rank percentiles of times, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Spread {
    pub count: usize,
    pub sum_ns: i64,
    pub min_ns: i64,
    pub p50_ns: i64,
    pub p90_ns: i64,
    pub max_ns: i64,
}

impl Spread {
    /// `None` without times.
    pub fn of(mut times_ns: Vec<i64>) -> Option<Self> {
        times_ns.sort_unstable();
        let at = |percent: usize| {
            let rank = (times_ns.len() * percent).div_ceil(100).max(1);
            times_ns[rank - 1]
        };
        Some(Self {
            min_ns: *times_ns.first()?,
            max_ns: *times_ns.last()?,
            count: times_ns.len(),
            sum_ns: sum_ns(times_ns.iter().copied()),
            p50_ns: at(50),
            p90_ns: at(90),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_taken() {
        let spread = Spread::of(vec![40, 10, 30, 20]).expect("times");
        let expected = Spread {
            count: 4,
            sum_ns: 100,
            min_ns: 10,
            p50_ns: 20,
            p90_ns: 40,
            max_ns: 40,
        };
        assert_eq!(spread, expected);
        assert_eq!(Spread::of(vec![]), None);
    }
}
