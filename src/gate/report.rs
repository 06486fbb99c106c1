//! What a failing case says: the parts that moved, then the lines that changed.

use std::fmt::Write;

use similar::{ChangeTag, TextDiff};

use super::band::Comparison;

/// Most breaches named in one message.
const NAMED: usize = 12;

/// The message of a case that left its golden.
pub fn failure_message(name: &str, golden: &str, fresh: &str, comparison: &Comparison) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(text, "{name} left its golden:");
    let mut breaches: Vec<_> = comparison.breaches.iter().collect();
    // Structure first, then the largest moves relative to their band.
    let excess = |breach: &super::band::Breach| match (
        breach.allowed,
        breach.before.parse::<f64>(),
        breach.after.parse::<f64>(),
    ) {
        (Some(allowed), Ok(before), Ok(after)) => (after - before).abs() / allowed,
        _ => f64::INFINITY,
    };
    breaches.sort_by(|a, b| excess(b).total_cmp(&excess(a)).then(a.path.cmp(&b.path)));
    for breach in breaches.iter().take(NAMED) {
        let _ = match (
            breach.allowed,
            breach.before.parse::<f64>(),
            breach.after.parse::<f64>(),
        ) {
            (Some(allowed), Ok(before), Ok(after)) => writeln!(
                text,
                "  {}: {before} -> {after} ({:+.4}, {:+.2} %; band +-{allowed:.4})",
                breach.path,
                after - before,
                (after / before - 1.0) * 100.0,
            ),
            _ => writeln!(
                text,
                "  {}: {} -> {}",
                breach.path, breach.before, breach.after
            ),
        };
    }
    if breaches.len() > NAMED {
        let _ = writeln!(text, "  and {} more", breaches.len() - NAMED);
    }
    let _ = writeln!(text, "\n--- golden\n+++ fresh");
    let (golden, fresh) = (golden.trim_end(), fresh.trim_end());
    let diff = TextDiff::from_lines(golden, fresh);
    for group in diff.grouped_ops(1) {
        for op in group {
            for change in diff.iter_changes(&op) {
                let sign = match change.tag() {
                    ChangeTag::Delete => '-',
                    ChangeTag::Insert => '+',
                    ChangeTag::Equal => ' ',
                };
                let _ = write!(text, "{sign}{change}");
            }
        }
        let _ = writeln!(text, "...");
    }
    let _ = write!(
        text,
        "review with `cargo insta review`; a golden changes only when its reason is understood"
    );
    text
}
