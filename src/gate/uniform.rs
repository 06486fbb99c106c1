//! Uniform shifts: moves of many points that are too equal to be a mechanism's.

/// Fewest points that make a shift.
const POINTS_MIN: usize = 3;
/// How close the moves are, relative to their middle.
const AGREE_REL: f64 = 0.01;
/// Share of a group's moves that agree.
const SHARE_MIN: f64 = 0.75;

/// One point's move, in milliseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Move {
    pub case: String,
    pub before_ms: f64,
    pub after_ms: f64,
}

/// Moves that agree.
#[derive(Debug, Clone, PartialEq)]
pub struct Shift {
    /// What they agree in, for example `+5.0000 ms` or `times 1.0300`.
    pub by: String,
    pub cases: Vec<String>,
}

/// The shift of one group of moves: at least three, and three quarters of the group, agree to 1 %
/// in milliseconds or in ratio.
pub fn uniform(moves: &[Move]) -> Option<Shift> {
    let in_ms = |one: &Move| one.after_ms - one.before_ms;
    let in_ratio = |one: &Move| one.after_ms / one.before_ms - 1.0;
    if let Some((middle, cases)) = agreeing(moves, in_ms) {
        let by = format!("{middle:+.4} ms");
        return Some(Shift { by, cases });
    }
    let (middle, cases) = agreeing(moves, in_ratio)?;
    let by = format!("times {:.4}", 1.0 + middle);
    Some(Shift { by, cases })
}

/// The largest set of moves within 1 % of their middle.
fn agreeing(moves: &[Move], size: impl Fn(&Move) -> f64) -> Option<(f64, Vec<String>)> {
    let mut sorted: Vec<(f64, &Move)> = moves.iter().map(|one| (size(one), one)).collect();
    // A mean that stayed where it was has moved in its parts only.
    sorted.retain(|(size, _)| size.is_finite() && *size != 0.0);
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut best: &[(f64, &Move)] = &[];
    for first in 0..sorted.len() {
        for end in (first + best.len() + 1)..=sorted.len() {
            let some = &sorted[first..end];
            let (low, high) = (some[0].0, some[some.len() - 1].0);
            let middle = (low + high) / 2.0;
            if high - low > AGREE_REL * middle.abs() {
                break;
            }
            best = some;
        }
    }
    let enough = best.len() >= POINTS_MIN && best.len() as f64 >= SHARE_MIN * moves.len() as f64;
    enough.then(|| {
        let middle = best.iter().map(|(size, _)| size).sum::<f64>() / best.len() as f64;
        let cases = best.iter().map(|(_, one)| one.case.clone()).collect();
        (middle, cases)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moves(of: &[(f64, f64)]) -> Vec<Move> {
        let one = |(at, (before_ms, after_ms)): (usize, &(f64, f64))| Move {
            case: format!("case {at}"),
            before_ms: *before_ms,
            after_ms: *after_ms,
        };
        of.iter().enumerate().map(one).collect()
    }

    #[test]
    fn an_equal_addend_or_factor_is_a_shift() {
        let addend = moves(&[(10.0, 15.0), (20.0, 25.01), (90.0, 95.0), (70.0, 70.5)]);
        let shift = uniform(&addend).expect("an addend");
        assert_eq!((shift.by.as_str(), shift.cases.len()), ("+5.0033 ms", 3));
        let factor = moves(&[(10.0, 10.3), (20.0, 20.6), (90.0, 92.7)]);
        assert_eq!(uniform(&factor).expect("a factor").by, "times 1.0300");
    }

    #[test]
    fn few_or_different_moves_are_none() {
        assert_eq!(uniform(&moves(&[(10.0, 15.0), (20.0, 25.0)])), None);
        assert_eq!(
            uniform(&moves(&[(10.0, 15.0), (20.0, 27.0), (90.0, 91.0)])),
            None
        );
    }
}
