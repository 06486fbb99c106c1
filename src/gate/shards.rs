//! Results of test shards: whether together they ran every point test, each once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};
use serde::Serialize;

use crate::timing::{InputError, read_text};

/// The test target with one test per case.
const SUITE: &str = "stepgate::points";

/// What the shards ran.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Shards {
    pub files: Vec<PathBuf>,
    pub expected: usize,
    pub executed: usize,
    pub missing: Vec<String>,
    pub twice: Vec<String>,
    /// Run, but of no case.
    pub unknown: Vec<String>,
    pub failed: Vec<String>,
}

impl Shards {
    /// Reads nextest's JUnit files.
    ///
    /// # Errors
    /// A file that cannot be read or is no XML.
    pub fn read(files: &[PathBuf], names: &[String]) -> Result<Self, InputError> {
        let mut runs: BTreeMap<String, usize> = BTreeMap::new();
        let mut failed = Vec::new();
        for file in files {
            for (name, passed) in tests(file)? {
                if !passed {
                    failed.push(name.clone());
                }
                *runs.entry(name).or_insert(0) += 1;
            }
        }
        let missing = names.iter().filter(|name| !runs.contains_key(*name));
        let twice = runs.iter().filter(|(_, count)| **count > 1);
        let unknown = runs
            .keys()
            .filter(|name| names.binary_search(name).is_err());
        Ok(Self {
            files: files.to_vec(),
            expected: names.len(),
            executed: runs.values().sum(),
            missing: missing.cloned().collect(),
            twice: twice.map(|(name, _)| name.clone()).collect(),
            unknown: unknown.cloned().collect(),
            failed,
        })
    }

    /// Every point test, each once, and each passed.
    pub fn complete(&self) -> bool {
        [&self.missing, &self.twice, &self.unknown, &self.failed]
            .iter()
            .all(|list| list.is_empty())
    }
}

/// The point tests of one file and whether they passed.
fn tests(file: &Path) -> Result<Vec<(String, bool)>, InputError> {
    let text = read_text(file, "the test results")?;
    let mut reader = Reader::from_str(&text);
    let mut tests: Vec<(String, bool)> = Vec::new();
    let mut inside = false;
    let mut suites = 0;
    let mut open = 0;
    loop {
        let at = usize::try_from(reader.buffer_position()).unwrap_or(0);
        let fault = |what: String| {
            let line = text.get(..at).unwrap_or("").matches('\n').count() + 1;
            let help = "give the junit.xml that `cargo nextest run` wrote";
            InputError::new(file, what, help).at(line as u64, 1)
        };
        let event = reader
            .read_event()
            .map_err(|error| fault(format!("no XML: {error}")))?;
        match &event {
            Event::Start(_) => open += 1,
            Event::End(_) => open -= 1,
            _ => {}
        }
        match event {
            Event::Start(tag) | Event::Empty(tag) => {
                let name = |tag: &BytesStart<'_>| attribute(tag).map_err(&fault);
                match tag.name().as_ref() {
                    "testsuites" => suites += 1,
                    "testsuite" => inside = name(&tag)? == SUITE,
                    "testcase" if inside => tests.push((name(&tag)?, true)),
                    // A test that passed at the second try, or did not run, has not passed.
                    "failure" | "error" | "skipped" | "flakyFailure" | "flakyError"
                    | "rerunFailure" | "rerunError" => {
                        if let (true, Some(last)) = (inside, tests.last_mut()) {
                            last.1 = false;
                        }
                    }
                    _ => {}
                }
            }
            Event::Eof if open > 0 => return Err(fault("the file is cut off".to_owned())),
            Event::Eof if suites == 1 => return Ok(tests),
            Event::Eof => return Err(fault("no `testsuites` element".to_owned())),
            _ => {}
        }
    }
}

/// The `name` of an element.
fn attribute(tag: &BytesStart<'_>) -> Result<String, String> {
    let found = tag
        .try_get_attribute("name")
        .map_err(|error| error.to_string())?
        .ok_or("an element without a name")?;
    let value = found
        .normalized_value(XmlVersion::Implicit1_0)
        .map_err(|error| error.to_string())?;
    Ok(value.into_owned())
}

#[cfg(test)]
mod tests_of_shards {
    use super::*;

    fn junit(tests: &[&str]) -> String {
        let cases: String = tests
            .iter()
            .map(|name| format!("<testcase name=\"{name}\" classname=\"stepgate::points\"/>\n"))
            .collect();
        format!(
            "<?xml version=\"1.0\"?>\n<testsuites name=\"nextest-run\">\n<testsuite \
             name=\"stepgate::cli\"><testcase name=\"usage\"/></testsuite>\n<testsuite \
             name=\"stepgate::points\">\n{cases}</testsuite></testsuites>\n"
        )
    }

    #[test]
    fn the_union_is_the_set_each_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: String| {
            let file = folder.path().join(name);
            std::fs::write(&file, text).expect("written");
            file
        };
        let names: Vec<String> = ["a/1", "a/2", "b/1"].map(str::to_owned).into();
        let one = write("1.xml", junit(&["a/1"]));
        let two = write("2.xml", junit(&["a/2", "b/1"]));
        let whole = Shards::read(&[one.clone(), two.clone()], &names).expect("read");
        assert!(whole.complete() && whole.executed == 3, "{whole:?}");
        let half = Shards::read(std::slice::from_ref(&one), &names).expect("read");
        assert_eq!(half.missing, ["a/2", "b/1"]);
        let again = write("3.xml", junit(&["a/1", "c/9"]));
        let more = Shards::read(&[one, two, again], &names).expect("read");
        assert_eq!(
            (more.twice, more.unknown),
            (vec!["a/1".to_owned()], vec!["c/9".to_owned()])
        );
        let failed = junit(&["a/1"]).replace("points\"/>", "points\"><failure/></testcase>");
        let failed = write("4.xml", failed);
        let failed = Shards::read(&[failed], &names).expect("read");
        assert_eq!(failed.failed, ["a/1"]);
        for element in ["<skipped/>", "<flakyFailure/>"] {
            let text =
                junit(&["a/1"]).replace("points\"/>", &format!("points\">{element}</testcase>"));
            let file = write("6.xml", text);
            let odd = Shards::read(&[file], &names).expect("read");
            assert_eq!(odd.failed, ["a/1"], "{element}");
        }
        let text = junit(&["a/1"]).replace("points\"/>", "points\">");
        let cut = text
            .split("</testsuite>\n<testsuite")
            .next()
            .expect("a part");
        let cut = write("7.xml", cut.to_owned());
        let error = Shards::read(&[cut], &names).expect_err("cut off");
        assert!(error.to_string().contains("cut off"), "{error}");
        let broken = write("5.xml", "<testsuites>\n<a></b>".to_owned());
        let error = Shards::read(&[broken], &names)
            .expect_err("no XML")
            .to_string();
        assert!(error.contains("5.xml:"), "{error}");
    }
}
