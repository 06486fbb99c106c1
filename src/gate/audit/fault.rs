//! What an audit finds.

use std::fmt;

/// How far the two reckonings may lie apart, relative: both round each of some ten thousand steps.
pub(super) const SUM_REL: f64 = 1e-9;
/// Two paths this close, relative, are equally long; and what moves a mean by less than this is
/// rounding.
pub(super) const TIE_REL: f64 = 1e-12;
/// Most faults that one audit lists.
pub(super) const FAULTS_MAX: usize = 20;

/// What an audit looked at when it found a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Check {
    /// A row's value is not what its origin says, or the policy forbids it.
    Rows,
    /// A lookup's weights are negative or do not sum to one, or nothing answers it.
    Lookup,
    /// A decision of the step log contradicts the lengths or the scenario.
    Decisions,
    /// A time is not what the rows and decisions give.
    Times,
    /// A receipt line does not have the recounted coefficient.
    Receipt,
    /// A mean, a percentile or a receipt's sum is not that of the recomputed times.
    Totals,
}

/// One thing that the second reckoning does not confirm.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditFault {
    pub check: Check,
    pub what: String,
}

impl fmt::Display for AuditFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.check, self.what)
    }
}

/// A confirmed prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditReport {
    pub ttft_mean_ms: f64,
    pub tpot_mean_ms: f64,
    pub iterations: usize,
    /// Lookups made again.
    pub lookups: usize,
    /// Receipt lines confirmed, rows that stand for the same table row taken together.
    pub lines: usize,
    /// Lines that differ because another of two equally long paths was taken.
    pub tied_lines: usize,
}

/// The rule of every lookup: weights are not negative and sum to one.
pub fn check_weights(weights: impl IntoIterator<Item = f64>) -> Result<(), String> {
    let mut sum = 0.0;
    for weight in weights {
        if weight.is_nan() || weight < 0.0 {
            return Err(format!("a weight of {weight}"));
        }
        sum += weight;
    }
    if (sum - 1.0).abs() <= 1e-12 {
        Ok(())
    } else {
        Err(format!("weights sum to {sum}"))
    }
}

pub(super) fn close(a: f64, b: f64, rel: f64) -> bool {
    (a - b).abs() <= rel * a.abs().max(b.abs())
}

#[cfg(test)]
mod tests {
    use super::check_weights;

    #[test]
    fn weights_must_share_out_one() {
        assert!(check_weights([0.25, 0.75]).is_ok());
        assert!(check_weights([1.0]).is_ok());
        assert!(check_weights([0.25, 0.76]).is_err());
        assert!(check_weights([-0.25, 1.25]).is_err());
        assert!(check_weights([f64::NAN, 1.0]).is_err());
        assert!(check_weights([]).is_err());
    }
}
