//! A small copy of the project in a git repository of its own, for tests of the gate.

#![allow(dead_code, reason = "each test target uses its own share")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use git2::{IndexAddOption, Repository, Signature};
use serde_json::Value;
use stepgate::gate::{COMPILER, Points, render};
use tempfile::TempDir;

const SOURCE: &str = env!("CARGO_MANIFEST_DIR");
pub const SERVING: [&str; 4] = [
    "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4",
    "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c8",
    "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c16",
    "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c32",
];
pub const CASE: &str = SERVING[0];
pub const OP: &str = "ops/b200-trtllm/gpt-oss-120b-tp2/moe-889";
pub const STEP: &str = "steps/b200-trtllm/gpt-oss-120b-tp2/decode-4";
pub const HOST: &str = "data/host/gpt-oss-120b-trtllm-1.3.0rc14-b200-tp2.yaml";
pub const CELLS: &str = "data/host/sources/gpt-oss-120b-b200-tp2.csv";
pub const MOE: &str = "data/systems/data/b200_sxm/moe/sglang/0.5.14/moe_perf.parquet";
/// A source file whose text the fingerprint holds.
pub const TIMING: &str = "src/timing/mod.rs";
/// Another base: its sources differ, so everything runs.
pub const OTHER_CODE: (&str, &str, &str) = (TIMING, "//!", "//! Once more:");

/// A project folder that is a git repository.
pub struct Project {
    pub folder: TempDir,
    pub repository: Repository,
}

impl Project {
    /// The project with six cases and their goldens, as one commit.
    pub fn new() -> Self {
        let project = Self::without_cases();
        for name in SERVING.into_iter().chain([OP, STEP]) {
            copy(&format!("cases/{name}.yaml"), project.folder.path());
        }
        project.begin();
        project
    }

    /// Sources and data, nothing committed.
    pub fn without_cases() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        for inner in [
            "src",
            "Cargo.lock",
            "data/host",
            "data/models",
            "data/systems/PROVENANCE.yaml",
            "data/systems/b200_sxm.yaml",
            "data/systems/data/b200_sxm",
        ] {
            copy(inner, folder.path());
        }
        let repository = Repository::init(folder.path()).expect("a repository");
        Self { folder, repository }
    }

    /// Accepts every golden and commits.
    pub fn begin(&self) {
        self.write("goldens/compiler.txt", &format!("{COMPILER}\n"));
        self.accept();
        self.commit();
    }

    pub fn path(&self, inner: &str) -> PathBuf {
        self.folder.path().join(inner)
    }

    pub fn write(&self, inner: &str, text: &str) {
        let file = self.path(inner);
        fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        fs::write(file, text).expect("written");
    }

    pub fn read(&self, inner: &str) -> String {
        fs::read_to_string(self.path(inner)).expect("text")
    }

    pub fn edit(&self, inner: &str, from: &str, to: &str) {
        let text = self.read(inner);
        assert!(text.contains(from), "{inner} holds {from:?}:\n{text}");
        self.write(inner, &text.replacen(from, to, 1));
    }

    /// Writes every golden as it is predicted now: what a review that accepts all does.
    pub fn accept(&self) {
        self.accept_by(&Points::open(self.folder.path(), None).expect("the project opens"));
    }

    pub fn accept_by(&self, points: &Points) {
        for name in points.names().expect("the cases") {
            let case = points.case(&name).expect("a valid case");
            let text = render(&points.predict(case).expect("sound data"));
            let head =
                format!("---\nsource: harness/main.rs\ninput_file: cases/{name}.yaml\n---\n");
            self.write(&golden(&name), &(head + &text));
        }
    }

    pub fn commit(&self) {
        let mut index = self.repository.index().expect("an index");
        index
            .add_all(["*"], IndexAddOption::DEFAULT, None)
            .expect("added");
        index.update_all(["*"], None).expect("updated");
        index.write().expect("written");
        let tree = index.write_tree().expect("a tree");
        let tree = self.repository.find_tree(tree).expect("the tree");
        let someone = Signature::now("Someone", "someone@example.com").expect("a name");
        let parent = self
            .repository
            .head()
            .and_then(|head| head.peel_to_commit())
            .ok();
        let parents: Vec<_> = parent.iter().collect();
        self.repository
            .commit(
                Some("HEAD"),
                &someone,
                &someone,
                "A change",
                &tree,
                &parents,
            )
            .expect("a commit");
    }

    /// Commits a base with an edited file and takes the edit back: what this code does against
    /// another base.
    pub fn commit_with(&self, edits: &[(&str, &str, &str)]) {
        let before: Vec<String> = edits.iter().map(|(file, ..)| self.read(file)).collect();
        for (file, from, to) in edits {
            self.edit(file, from, to);
        }
        self.commit();
        for ((file, ..), text) in edits.iter().zip(&before).rev() {
            self.write(file, text);
        }
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_stepgate"))
            .arg("--root")
            .arg(self.folder.path())
            .args(arguments)
            .output()
            .expect("the binary runs")
    }

    /// Runs and checks the exit code and that the output says each of `parts`.
    #[track_caller]
    pub fn says(&self, arguments: &[&str], code: i32, parts: &[&str]) -> String {
        let output = self.run(arguments);
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text += &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        for part in parts {
            assert!(text.contains(part), "{part:?} is said in:\n{text}");
        }
        text
    }

    #[track_caller]
    pub fn gate(&self, code: i32, parts: &[&str]) -> String {
        self.says(&["gate", "--base", "HEAD"], code, parts)
    }

    #[track_caller]
    pub fn record(&self, code: i32, parts: &[&str]) -> String {
        self.says(
            &["ledger", "record", "--reason", "a reviewed change"],
            code,
            parts,
        )
    }

    /// Records a move of many points by its mechanism and rows.
    #[track_caller]
    pub fn record_for(&self, mechanism: &str, rows: &str, parts: &[&str]) {
        let record = [
            "ledger",
            "record",
            "--reason",
            "measured anew",
            "--mechanism",
            mechanism,
            "--rows",
            rows,
        ];
        self.says(&record, 0, parts);
    }

    /// The JSON report of a gate that ends with `code`.
    #[track_caller]
    pub fn json(&self, code: i32) -> Value {
        let text = self.says(&["gate", "--base", "HEAD", "--format", "json"], code, &[]);
        serde_json::from_str(&text).expect("JSON")
    }

    /// A host row measured anew: the row and its source cell.
    pub fn measure(&self, from: &str, to: &str) {
        self.edit(HOST, &format!("mean_ms: {from}"), &format!("mean_ms: {to}"));
        self.edit(CELLS, &format!(",{from},"), &format!(",{to},"));
    }

    /// A JUnit file as nextest writes it for a shard that ran these point tests; its path.
    pub fn shard(&self, file: &str, names: &[&str]) -> String {
        let cases: String = names
            .iter()
            .map(|name| format!("<testcase name=\"{name}\" classname=\"stepgate::points\"/>"))
            .collect();
        let suite = format!("<testsuite name=\"stepgate::points\">{cases}</testsuite>");
        self.write(file, &format!("<testsuites>{suite}</testsuites>"));
        self.path(file).to_str().expect("UTF-8").to_owned()
    }

    pub fn ledger_files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(self.path("goldens/ledger"))
            .map(|entries| {
                entries
                    .map(|entry| entry.expect("an entry").path())
                    .collect()
            })
            .unwrap_or_default();
        files.sort();
        files
    }
}

pub fn copy(inner: &str, into: &Path) {
    let source = Path::new(SOURCE);
    for entry in walkdir::WalkDir::new(source.join(inner)) {
        let entry = entry.expect("walk");
        let to = into.join(entry.path().strip_prefix(source).expect("inside"));
        if entry.file_type().is_file() {
            fs::create_dir_all(to.parent().expect("a folder")).expect("made");
            fs::copy(entry.path(), to).expect("copied");
        }
    }
}

pub fn golden(name: &str) -> String {
    format!("goldens/{name}.snap")
}
