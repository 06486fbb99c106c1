//! Writes that are killed: what is on disk afterwards is the old file or the new one, whole.
//!
//! The ledger and the other files of the gate are written beside their place, forced to disk and
//! renamed. Snapshots are written by insta, straight into their place: half a golden may be left,
//! and is no golden.

mod project;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use stepgate::gate::{Bands, WriteStep, compare, read_ledger, write_whole};
use tempfile::TempDir;

use project::{CASE, Project, golden};

/// Names the folder in which this very test, started again, writes until it is killed.
const FOLDER: &str = "STEPGATE_TEST_FOLDER";
/// And the step before which it waits for that.
const STEP: &str = "STEPGATE_TEST_STEP";
const OLD: &str = "the old file\n";
const NEW: &str = "the new file, which is longer\n";

#[test]
fn a_kill_before_any_step_of_a_write_leaves_the_old_file_or_the_new_one() {
    if let (Some(folder), Ok(step)) = (env::var_os(FOLDER), env::var(STEP)) {
        write_and_wait(Path::new(&folder), &step);
    }
    for step in WriteStep::ALL {
        let folder = TempDir::new().expect("a folder");
        let (kept, added) = (folder.path().join("kept"), folder.path().join("new/added"));
        fs::write(&kept, OLD).expect("written");
        let name = "a_kill_before_any_step_of_a_write_leaves_the_old_file_or_the_new_one";
        let mut child = Command::new(env::current_exe().expect("this test"))
            .args(["--exact", name, "--nocapture"])
            .env(FOLDER, folder.path())
            .env(STEP, format!("{step:?}"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test runs again");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let arrived = lines
            .map(|line| line.expect("text"))
            .filter(|line| line.ends_with(&format!("before {step:?}")));
        assert_eq!(arrived.take(1).count(), 1, "it comes to {step:?}");
        kill(&mut child);
        let renamed = step == WriteStep::SyncFolder;
        let expected = if renamed { NEW } else { OLD };
        let read = fs::read_to_string(&kept).expect("the file is there");
        assert_eq!(read, expected, "before {step:?}");
        // The first of the two writes was not interrupted.
        assert_eq!(fs::read_to_string(added).expect("whole"), NEW);
    }
}

/// Writes a new file, then begins to replace another one and waits before `step`.
fn write_and_wait(folder: &Path, step: &str) {
    let added = folder.join("new/added");
    write_whole(&added, NEW.as_bytes(), false, &|_| Ok(())).expect("written");
    let wait = |at: WriteStep| {
        if format!("{at:?}") == step {
            println!("\nbefore {step}");
            loop {
                thread::park();
            }
        }
        Ok(())
    };
    let _ = write_whole(&folder.join("kept"), NEW.as_bytes(), true, &wait);
    unreachable!("every write comes to {step}");
}

fn kill(child: &mut Child) {
    // SIGKILL on Unix: nothing of the process runs any more.
    child.kill().expect("killed");
    child.wait().expect("it ended");
}

/// Every file below `goldens/` that is part of the project.
fn goldens(project: &Project) -> BTreeMap<String, String> {
    let files = walkdir::WalkDir::new(project.path("goldens")).into_iter();
    files
        .map(|entry| entry.expect("the folder lists"))
        .filter(|entry| entry.file_type().is_file())
        .filter(|entry| {
            !entry
                .file_name()
                .to_string_lossy()
                .starts_with(".unfinished")
        })
        .map(|entry| {
            let path = entry.path();
            let text = fs::read_to_string(path).expect("text");
            (path.display().to_string(), text)
        })
        .collect()
}

/// `ledger record` is killed after no time and then after longer and longer, until it ends by
/// itself: the ledger is the old one or the whole new one each time.
#[test]
fn a_killed_blessing_leaves_the_old_ledger_or_the_new_one() {
    let project = Project::new();
    project.edit(
        &format!("cases/{CASE}.yaml"),
        "ttft_ms: 48.3129",
        "ttft_ms: 40.0",
    );
    project.accept();
    let before = goldens(&project);
    let mut killed = 0;
    for tries in 0.. {
        let mut child = Command::new(env!("CARGO_BIN_EXE_stepgate"))
            .arg("--root")
            .arg(project.folder.path())
            .args(["ledger", "record", "--reason", "measured again"])
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary runs");
        thread::sleep(Duration::from_millis(tries * tries));
        let ended = child.try_wait().expect("its state");
        kill(&mut child);
        let ledger = read_ledger(project.folder.path()).expect("a whole ledger");
        let after = goldens(&project);
        if ledger.is_empty() {
            assert_eq!(after, before);
            assert_eq!(ended, None, "who ends has recorded");
            killed += 1;
            continue;
        }
        assert_eq!(ledger[0].rows.len(), 1, "one value changed");
        assert_eq!(after.len(), before.len() + 1);
        assert!(
            before
                .iter()
                .all(|(file, text)| after.get(file) == Some(text))
        );
        break;
    }
    assert!(killed > 0);
}

/// insta writes a snapshot straight into its place, so a kill may leave its beginning. None is
/// taken for the golden.
#[test]
fn half_a_golden_is_no_golden() {
    let project = Project::new();
    let whole = project.read(&golden(CASE));
    let header = whole.find("silicon:").expect("the body");
    let body = whole[header..].trim_end();
    assert!(compare(body, body, &Bands::default()).holds());
    let line_ends = body.match_indices('\n').flat_map(|(at, _)| [at, at + 1]);
    for end in (0..body.len()).step_by(7).chain(line_ends) {
        let cut = body.get(..end).unwrap_or("");
        let held = compare(cut, body, &Bands::default()).holds();
        assert!(!held, "cut off at byte {end}: {cut}");
    }
    // The gate says which one it is, where the half still parses and where it does not.
    project.write(
        &golden(CASE),
        &whole[..=whole.find("coverage").expect("a block")],
    );
    project.gate(5, &[&format!("{CASE}.snap")]);
    project.write(
        &golden(CASE),
        &whole[..whole.find("estimate:").expect("a block")],
    );
    project.gate(1, &[&format!("{CASE}: the golden is not reproduced")]);
}
