//! The gate's answer on one page: for a terminal, a pull request or a program.

use std::fmt::Write;

use serde_json::json;

use crate::gate::{About, Analysis, CaseReport, Class, Effects, Finding, Kind, Left, MetricReport};

use super::text::Table;

/// Most moves, findings and regressions on the page; JSON holds them all.
const LISTED: usize = 40;
/// Most unrecorded changes named one by one.
const SINGLY: usize = 12;
/// Most parts and rows named per move.
const NAMED: usize = 4;
/// The beginning of the Markdown, by which a comment is found again.
pub const MARKER: &str = "<!-- stepgate gate -->";

/// What the exit code says, in words.
pub fn verdict(analysis: &Analysis) -> &'static str {
    match analysis.findings.iter().map(|finding| finding.kind).min() {
        None => "pass",
        Some(Kind::BadInput) => "bad input",
        Some(Kind::Proof) => "a proof failed",
        Some(Kind::CoverageLost) => "coverage lost",
        Some(Kind::Unrecorded) => "unrecorded change",
    }
}

/// A move as the page shows it.
struct Shown<'a> {
    case: &'a CaseReport,
    policy: &'static str,
    metric: &'a MetricReport,
}

/// Everything outside its band, worst first; what both policies share stands once.
fn outside(analysis: &Analysis) -> Vec<Shown<'_>> {
    let mut shown: Vec<Shown<'_>> = Vec::new();
    for (case, metric) in analysis.outside() {
        let is_twin = |other: &&mut Shown<'_>| {
            let (ours, theirs) = (&metric.classified, &other.metric.classified);
            other.case.case == case.case
                && theirs.metric == ours.metric
                && theirs.change == ours.change
                && other.metric.recorded == metric.recorded
        };
        if let Some(twin) = shown.iter_mut().find(is_twin) {
            twin.policy = "both";
            continue;
        }
        shown.push(Shown {
            case,
            policy: metric.classified.policy.name(),
            metric,
        });
    }
    shown
}

const HEAD: [&str; 8] = [
    "case",
    "policy",
    "metric",
    "class",
    "ms",
    "error against silicon",
    "code / row / schedule ms",
    "recorded",
];

impl Shown<'_> {
    fn cells(&self) -> Vec<String> {
        let change = &self.metric.classified.change;
        let metric = self.metric.classified.metric;
        let digits = metric.digits();
        let ms = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.digits$}"));
        let error = |pct: Option<f64>| pct.map_or("-".to_owned(), |pct| format!("{pct:+.2} %"));
        let effects = self.metric.effects.as_ref();
        vec![
            self.case.case.clone(),
            self.policy.to_owned(),
            metric.name().to_owned(),
            change.class.name().to_owned(),
            format!("{} -> {}", ms(change.before_ms), ms(change.after_ms)),
            format!(
                "{} -> {}",
                error(change.error_before_pct),
                error(change.error_after_pct)
            ),
            effects.map_or("-".to_owned(), |effects| split(effects, digits)),
            if self.metric.recorded.is_some() {
                "yes"
            } else {
                "NO"
            }
            .to_owned(),
        ]
    }

    /// What the table's columns have no room for.
    fn details(&self) -> Vec<String> {
        let mut details = Vec::new();
        let mut left: Vec<&Left> = self.metric.classified.change.left.iter().collect();
        // The parts say most, the times are in the columns.
        left.sort_by_key(|left| match left.path.split('.').next() {
            Some("ttft_parts_ms" | "tpot_parts_ms" | "path_ms" | "iteration_path_ms") => 0,
            Some("steps" | "coverage") => 1,
            _ => 2,
        });
        if !left.is_empty() {
            let named: Vec<String> = left.iter().take(NAMED).map(|left| part(left)).collect();
            details.push(format!(
                "left: {}{}",
                named.join(", "),
                more(left.len(), NAMED)
            ));
        }
        if let Some(effects) = &self.metric.effects {
            let rows = &effects.rows;
            let named: Vec<String> = rows
                .iter()
                .take(NAMED)
                .map(|(row, ms)| format!("{row} {ms:+.4} ms"))
                .collect();
            if !named.is_empty() {
                details.push(format!("rows: {}", named.join(", ")));
            }
            if let Some(parting) = &effects.parts_at {
                details.push(format!("schedule parts at {parting}"));
            }
        }
        if let Some(reason) = &self.metric.recorded {
            details.push(format!("reason: {reason}"));
        }
        details
    }
}

fn part(left: &Left) -> String {
    format!("{} {} -> {}", left.path, left.before, left.after)
}

fn split(effects: &Effects, digits: usize) -> String {
    // A rest of rounding is no minus zero.
    let shown = |ms: f64| {
        let text = format!("{ms:+.digits$}");
        let nothing = text.chars().all(|c| matches!(c, '+' | '-' | '0' | '.'));
        if nothing { "0".to_owned() } else { text }
    };
    let (code, row) = (shown(effects.code_ms), shown(effects.row_ms));
    format!("{code} / {row} / {}", shown(effects.schedule_ms))
}

fn more(count: usize, shown: usize) -> String {
    match count.saturating_sub(shown) {
        0 => String::new(),
        more => format!(" and {more} more"),
    }
}

/// The lines above the tables, the same in every format.
fn summary(analysis: &Analysis) -> Vec<String> {
    let before = analysis.fingerprint_before.as_deref().unwrap_or("unknown");
    let after = &analysis.fingerprint_after;
    let impact = if before == after.as_str() {
        format!("timing fingerprint {after} is the base's: only changed cases run")
    } else {
        format!("timing fingerprint {before} -> {after}: every case runs")
    };
    let mut lines = vec![
        format!("base {} ({}); {impact}", analysis.base, analysis.commit),
        format!(
            "{} cases expected, {} executed, {} untouched",
            analysis.expected, analysis.executed, analysis.untouched
        ),
        counts(analysis),
        proofs(analysis),
    ];
    let judges = &analysis.changed_judges;
    if !judges.is_empty() {
        let named: Vec<&str> = judges.iter().take(NAMED).map(String::as_str).collect();
        lines.push(format!(
            "changed, too, is what judges: {}{}; review it as such",
            named.join(", "),
            more(judges.len(), NAMED)
        ));
    }
    let renamed = |case: &CaseReport| {
        let (before, now) = case.renamed.as_ref()?;
        Some(format!("{}: {before} -> {now}", case.case))
    };
    let renamed: Vec<String> = analysis.cases.iter().filter_map(renamed).collect();
    if !renamed.is_empty() {
        lines.push(format!(
            "changed, too, is which measured run a case is of: {}{}; review it as such",
            renamed[..renamed.len().min(NAMED)].join("; "),
            more(renamed.len(), NAMED)
        ));
    }
    if analysis.left_out > 0 {
        let left_out = analysis.left_out;
        lines.push(format!(
            "{left_out} changed cases are left out by the names given: this says nothing of them"
        ));
    }
    if let Some(shards) = &analysis.shards {
        lines.push(format!(
            "shards: {} point tests expected, {} executed in {} files",
            shards.expected,
            shards.executed,
            shards.files.len()
        ));
    }
    lines
}

fn counts(analysis: &Analysis) -> String {
    let of_class = |class: &Class| {
        let count = analysis.counts.get(class.name())?;
        Some(format!("{count} {}", class.name()))
    };
    let counts: Vec<String> = Class::ALL.iter().filter_map(of_class).collect();
    if counts.is_empty() {
        return "metrics: none judged".to_owned();
    }
    format!("metrics: {}", counts.join(", "))
}

fn proofs(analysis: &Analysis) -> String {
    let proofs = &analysis.proofs;
    let names = "finite, null, homogeneity, audit, sums, blindness, no leak";
    match proofs.failures.len() {
        0 => format!("proofs ({names}) hold over {} cases", proofs.cases),
        failed => format!(
            "proofs ({names}): {failed} FAILED over {} cases",
            proofs.cases
        ),
    }
}

pub fn terminal(analysis: &Analysis) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "gate: {}, exit code {}",
        verdict(analysis),
        analysis.exit_code()
    );
    for line in summary(analysis) {
        let _ = writeln!(text, "{line}");
    }
    let outside = outside(analysis);
    if !outside.is_empty() {
        let _ = writeln!(text, "\noutside the band, or blessed anew:");
        for shown in outside.iter().take(LISTED) {
            let [case, policy, metric, class, ms, error, effects, recorded] = &shown.cells()[..]
            else {
                continue;
            };
            let _ = writeln!(text, "  {class}: {case} {policy} {metric}");
            let _ = writeln!(
                text,
                "    {ms} ms, error {error}; code / row / schedule {effects} ms; recorded: {recorded}"
            );
            for detail in shown.details() {
                let _ = writeln!(text, "    {detail}");
            }
        }
        let _ = write!(text, "{}", rest(outside.len()));
    }
    if !analysis.open.is_empty() {
        let _ = writeln!(text, "\nopen regressions, recorded and not back:");
        let mut table = Table::new(&["case", "policy", "metric", "since", "error", "reason"]);
        for cells in open(analysis) {
            table.row(cells);
        }
        let mut lines = Vec::new();
        let _ = table.write(&mut lines, 2);
        text.push_str(&String::from_utf8_lossy(&lines));
        let _ = write!(text, "{}", rest(analysis.open.len()));
    }
    if !analysis.wider_bands.is_empty() {
        let _ = writeln!(text, "\nwider bands in force:");
        for line in wider(analysis) {
            let _ = writeln!(text, "  {line}");
        }
    }
    let shut = shut(analysis);
    if !shut.is_empty() {
        let _ = writeln!(text, "\nwhat keeps the gate shut:");
        for line in shut.iter().take(LISTED) {
            let _ = writeln!(text, "  {line}");
        }
        let _ = write!(text, "{}", rest(shut.len()));
    }
    text
}

/// The findings, what concerns everything first. Metrics that are not recorded are counted, and
/// named one by one while they are few.
fn shut(analysis: &Analysis) -> Vec<String> {
    let mut findings: Vec<&Finding> = analysis.findings.iter().collect();
    findings.sort_by_key(|finding| (finding.kind, finding.about));
    let of_metric = |finding: &&&Finding| finding.about == About::Metric;
    let unrecorded = findings.iter().filter(of_metric).count();
    if unrecorded > SINGLY {
        findings.retain(|finding| finding.about != About::Metric);
    }
    let mut lines: Vec<String> = findings.iter().map(|one| one.what.clone()).collect();
    if unrecorded > SINGLY {
        let line = format!("{unrecorded} changes are not recorded in the ledger");
        lines.insert(0, line);
    }
    lines
}

fn rest(count: usize) -> String {
    match count.saturating_sub(LISTED) {
        0 => String::new(),
        more => format!("  and {more} more; --format json lists them\n"),
    }
}

fn open(analysis: &Analysis) -> impl Iterator<Item = Vec<String>> {
    analysis.open.iter().take(LISTED).map(|one| {
        let now = one
            .error_now_pct
            .map_or("-".to_owned(), |now| format!("{now:+.2}"));
        vec![
            one.case.clone(),
            one.policy.clone(),
            one.metric.clone(),
            one.since.clone(),
            format!("{:+.2} -> {now} %", one.error_before_pct),
            one.reason.clone(),
        ]
    })
}

pub fn markdown(analysis: &Analysis) -> String {
    let mut text = String::new();
    let code = analysis.exit_code();
    let _ = writeln!(
        text,
        "{MARKER}\n## stepgate: {} (exit code {code})\n",
        verdict(analysis)
    );
    for line in summary(analysis) {
        let _ = writeln!(text, "- {}", plain(&line));
    }
    let shut = shut(analysis);
    if !shut.is_empty() {
        let _ = writeln!(text, "\n### What keeps the gate shut\n");
        for line in shut.iter().take(LISTED) {
            let _ = writeln!(text, "- {}", plain(line));
        }
        let _ = write!(text, "{}", rest(shut.len()).trim_start());
    }
    let outside = outside(analysis);
    if !outside.is_empty() {
        let _ = writeln!(text, "\n### Outside the band, or blessed anew\n");
        let _ = writeln!(text, "| {} | details |", HEAD.join(" | "));
        let _ = writeln!(text, "|{}", "---|".repeat(HEAD.len() + 1));
        for shown in outside.iter().take(LISTED) {
            let cells: Vec<String> = shown.cells().iter().map(|cell| plain(cell)).collect();
            let details: Vec<String> = shown.details().iter().map(|line| plain(line)).collect();
            let _ = writeln!(text, "| {} | {} |", cells.join(" | "), details.join("<br>"));
        }
        let _ = write!(text, "\n{}", rest(outside.len()).trim_start());
    }
    if !analysis.open.is_empty() {
        let _ = writeln!(text, "\n### Open regressions\n");
        let _ = writeln!(text, "| case | policy | metric | since | error | reason |");
        let _ = writeln!(text, "|{}", "---|".repeat(6));
        for cells in open(analysis) {
            let cells: Vec<String> = cells.iter().map(|cell| plain(cell)).collect();
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        let _ = write!(text, "\n{}", rest(analysis.open.len()).trim_start());
    }
    if !analysis.wider_bands.is_empty() {
        let _ = writeln!(text, "\n### Wider bands in force\n");
        for line in wider(analysis) {
            let _ = writeln!(text, "- {}", plain(&line));
        }
    }
    text
}

/// Cases that widen their own bands, and what that lets through.
fn wider(analysis: &Analysis) -> impl Iterator<Item = String> {
    analysis.wider_bands.iter().map(|band| {
        let widths = [
            ("ttft", band.ttft_rel),
            ("tpot", band.tpot_rel),
            ("percentiles and parts", band.parts_rel),
        ];
        let widths = widths.into_iter().filter_map(|(what, rel)| {
            let pct = rel? * 100.0;
            Some(format!("{what} {pct} %"))
        });
        let widths: Vec<String> = widths.collect();
        let since = if band.is_new {
            "new, from the next change on; "
        } else {
            ""
        };
        let through = match &band.lets_through[..] {
            [] => String::new(),
            moves => format!("; lets through {}", moves.join(", ")),
        };
        format!(
            "{}: {since}{}, until {}: {}{through}",
            band.case,
            widths.join(", "),
            band.expires,
            band.reason
        )
    })
}

/// Text that Markdown takes for nothing but text.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => plain.push_str("&lt;"),
            '>' => plain.push_str("&gt;"),
            '&' => plain.push_str("&amp;"),
            '\n' | '\r' => plain.push(' '),
            // A mention would call somebody.
            '@' => plain.push_str("&#64;"),
            '|' | '*' | '_' | '`' | '[' | ']' | '#' | '~' | '\\' => {
                plain.push('\\');
                plain.push(c);
            }
            _ => plain.push(c),
        }
    }
    plain
}

pub fn json(analysis: &Analysis) -> Result<String, serde_json::Error> {
    let report = json!({
        "verdict": verdict(analysis),
        "exit_code": analysis.exit_code(),
        "report": analysis,
    });
    serde_json::to_string_pretty(&report).map(|text| text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_cannot_break_the_comment() {
        let text = plain("a | b <img> @team `x`\n# head");
        assert_eq!(text, "a \\| b &lt;img&gt; &#64;team \\`x\\` \\# head");
    }
}
