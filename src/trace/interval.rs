//! Unions and overlaps of intervals.

use super::event::Span;

/// The union of `spans`, which are sorted by start: disjoint, in order.
pub(super) fn union(spans: impl IntoIterator<Item = Span>) -> Vec<Span> {
    let mut union: Vec<Span> = Vec::new();
    for span in spans {
        match union.last_mut() {
            Some(last) if span.start_ns <= last.end_ns => {
                last.end_ns = last.end_ns.max(span.end_ns);
            }
            _ => union.push(span),
        }
    }
    union
}

/// Length of disjoint spans.
pub(super) fn total_ns(spans: &[Span]) -> i64 {
    spans.iter().map(|span| span.ns()).sum()
}

/// Sum of times that may overlap each other: of a hostile file it could be beyond any clock.
pub(super) fn sum_ns(times_ns: impl IntoIterator<Item = i64>) -> i64 {
    times_ns.into_iter().fold(0, i64::saturating_add)
}

/// How much of `window` the disjoint, sorted `spans` cover.
pub(super) fn covered_ns(spans: &[Span], window: Span) -> i64 {
    let first = spans.partition_point(|span| span.end_ns <= window.start_ns);
    spans[first..]
        .iter()
        .take_while(|span| span.start_ns < window.end_ns)
        .map(|span| span.end_ns.min(window.end_ns) - span.start_ns.max(window.start_ns))
        .sum()
}

/// What the disjoint, sorted `spans` leave of `window`: disjoint, in order.
pub(super) fn uncovered(spans: &[Span], window: Span) -> Vec<Span> {
    let mut left = Vec::new();
    let mut start_ns = window.start_ns;
    let first = spans.partition_point(|span| span.end_ns <= window.start_ns);
    for span in &spans[first..] {
        if span.start_ns >= window.end_ns {
            break;
        }
        if span.start_ns > start_ns {
            left.push(Span {
                start_ns,
                end_ns: span.start_ns,
            });
        }
        start_ns = span.end_ns;
    }
    if start_ns < window.end_ns {
        left.push(Span {
            start_ns,
            end_ns: window.end_ns,
        });
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(pairs: &[(i64, i64)]) -> Vec<Span> {
        pairs
            .iter()
            .map(|&(start_ns, end_ns)| Span { start_ns, end_ns })
            .collect()
    }

    #[test]
    fn overlapping_nested_and_touching_spans_are_one() {
        let union = union(spans(&[(0, 10), (2, 4), (10, 12), (20, 21), (20, 25)]));
        assert_eq!(union, spans(&[(0, 12), (20, 25)]));
        assert_eq!(total_ns(&union), 17);
    }

    #[test]
    fn a_window_cuts_what_it_covers() {
        let union = spans(&[(0, 12), (20, 25), (30, 40)]);
        for ((start_ns, end_ns), ns) in [((5, 22), 9), ((12, 20), 0), ((21, 24), 3), ((0, 99), 27)]
        {
            let window = Span { start_ns, end_ns };
            assert_eq!(covered_ns(&union, window), ns);
            let left = uncovered(&union, window);
            assert_eq!(total_ns(&left), window.ns() - ns);
        }
        let window = Span {
            start_ns: 5,
            end_ns: 28,
        };
        assert_eq!(uncovered(&union, window), spans(&[(12, 20), (25, 28)]));
    }
}
