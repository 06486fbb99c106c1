//! The gate's answer as JUnit: a test per judged case, and one for what belongs to none.

use std::fmt::Write;

use quick_xml::escape::escape;

use crate::gate::{Analysis, Finding};

pub fn junit(analysis: &Analysis) -> String {
    let is_of = |finding: &&Finding, case: &str| {
        let rest = finding.what.strip_prefix(case);
        rest.is_some_and(|rest| rest.starts_with([':', ' ']))
    };
    let mut tests = Vec::new();
    let mut claimed = Vec::new();
    for case in &analysis.cases {
        let ours: Vec<&Finding> = analysis
            .findings
            .iter()
            .filter(|finding| is_of(finding, &case.case))
            .collect();
        claimed.extend(ours.iter().copied());
        tests.push((case.case.as_str(), ours));
    }
    let others = analysis
        .findings
        .iter()
        .filter(|finding| !claimed.contains(finding));
    tests.push(("the whole", others.collect()));
    let failures = tests
        .iter()
        .filter(|(_, findings)| !findings.is_empty())
        .count();
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let counts = format!(
        "tests=\"{}\" failures=\"{failures}\" errors=\"0\"",
        tests.len()
    );
    // Writing to a String does not fail.
    let _ = writeln!(text, "<testsuites name=\"stepgate gate\" {counts}>");
    let _ = writeln!(text, "  <testsuite name=\"stepgate::gate\" {counts}>");
    for (name, findings) in tests {
        let name = escape(name);
        let _ = write!(
            text,
            "    <testcase name=\"{name}\" classname=\"stepgate::gate\""
        );
        if findings.is_empty() {
            let _ = writeln!(text, "/>");
            continue;
        }
        let _ = writeln!(text, ">");
        for finding in findings {
            let what = escape(clean(&finding.what));
            let _ = writeln!(text, "      <failure message=\"{what}\"/>");
        }
        let _ = writeln!(text, "    </testcase>");
    }
    text.push_str("  </testsuite>\n</testsuites>\n");
    text
}

/// Characters that XML has no way to write become blanks.
fn clean(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}
