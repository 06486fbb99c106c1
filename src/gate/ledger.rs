//! The ledger: every accepted change outside a band, one JSON Lines file per blessing, append-only.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::case::Date;
use crate::timing::{InputError, Policy, read_text};

use super::classify::{Class, Classified};
use super::effects::Effects;
use super::golden::error_pct;
use super::parsed::Judged;

/// Where the ledger lies in a project folder.
pub const LEDGER: &str = "goldens/ledger";
/// Metric of a row that records a changed measured value; its name follows.
pub const EVIDENCE: &str = "evidence: ";
/// How far a row's errors and effects may be from its times.
const ROUNDING_PCT: f64 = 0.01;
const ROUNDING_MS: f64 = 1e-6;

/// One accepted change of one metric.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LedgerRow {
    pub date: String,
    pub case: String,
    pub point: Option<u32>,
    /// `strict`, `estimate`, or `-` for a measured value.
    pub policy: String,
    /// `ttft`, `tpot`, `op`, `step`, or `evidence: ` and the measured value's name.
    pub metric: String,
    pub before_ms: Option<f64>,
    pub after_ms: Option<f64>,
    pub silicon_ms: Option<f64>,
    pub error_before_pct: Option<f64>,
    pub error_after_pct: Option<f64>,
    pub class: Class,
    pub code_effect_ms: Option<f64>,
    pub row_effect_ms: Option<f64>,
    pub schedule_effect_ms: Option<f64>,
    pub reason: String,
    /// What makes many points move alike, and the rows it rests on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mechanism: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<String>,
    pub fingerprint: String,
}

impl LedgerRow {
    /// Whether this row is of that metric.
    pub fn is_of(&self, case: &str, policy: &str, metric: &str) -> bool {
        self.case == case && self.policy == policy && self.metric == metric
    }

    /// Whether it names a mechanism and its rows, as a uniform shift needs.
    pub fn names_mechanism(&self) -> bool {
        let said = |text: &String| !text.trim().is_empty();
        self.mechanism.as_ref().is_some_and(said) && self.rows.iter().any(said)
    }

    /// What contradicts itself in this row.
    fn fault(&self) -> Option<String> {
        let say = |what: &str| Some(what.to_owned());
        if self.date.parse::<Date>().is_err() {
            return say("`date` is no day of the calendar");
        }
        if self.reason.trim().is_empty() || self.case.is_empty() {
            return say("`case` and `reason` say nothing");
        }
        let evidence = self.metric.starts_with(EVIDENCE);
        if evidence != (self.class == Class::Evidence) || evidence != (self.policy == "-") {
            return say("a measured value has the policy `-` and the class `evidence`");
        }
        let known = Policy::ALL.into_iter().any(|one| one.name() == self.policy)
            && Judged::of_name(&self.metric).is_some();
        if !(evidence || known) {
            return say("unknown `policy` or `metric`");
        }
        self.error_fault()
            .or_else(|| self.class_fault())
            .or_else(|| self.effect_fault())
    }

    fn error_fault(&self) -> Option<String> {
        for (name, ms, error) in [
            ("error_before_pct", self.before_ms, self.error_before_pct),
            ("error_after_pct", self.after_ms, self.error_after_pct),
        ] {
            let holds = match (ms.zip(self.silicon_ms), error) {
                (Some((ms, silicon)), Some(error)) => {
                    (error_pct(ms, silicon) - error).abs() <= ROUNDING_PCT
                }
                (None, None) => true,
                _ => false,
            };
            if !holds {
                return Some(format!(
                    "`{name}` is not that of its time and silicon value"
                ));
            }
        }
        None
    }

    fn class_fault(&self) -> Option<String> {
        let times = (self.before_ms, self.after_ms);
        let errors = self.error_before_pct.zip(self.error_after_pct);
        let grew = errors.map(|(before, after)| after.abs() - before.abs());
        let holds = match self.class {
            Class::Refused => matches!(times, (Some(_), None)),
            Class::Restored => matches!(times, (None, Some(_))),
            Class::Removed => times.1.is_none(),
            Class::Regression => grew.is_some_and(|grew| grew > 0.0),
            Class::Improvement => grew.is_some_and(|grew| grew < 0.0),
            Class::Moved => grew.is_none_or(|grew| grew == 0.0),
            Class::Reblessed => times.0.is_some() == times.1.is_some(),
            Class::CoverageLost | Class::CoverageGained | Class::Evidence => true,
            Class::New | Class::Tolerated | Class::Same => false,
        };
        (!holds).then(|| format!("the numbers are not those of class `{}`", self.class.name()))
    }

    fn effect_fault(&self) -> Option<String> {
        let (code, row, schedule) = match (
            self.code_effect_ms,
            self.row_effect_ms,
            self.schedule_effect_ms,
        ) {
            (None, None, None) => return None,
            (Some(code), Some(row), Some(schedule)) => (code, row, schedule),
            _ => return Some("some effects are there and others are not".to_owned()),
        };
        let Some((before, after)) = self.before_ms.zip(self.after_ms) else {
            return Some("effects of a move without both times".to_owned());
        };
        let apart = (code + row + schedule - (after - before)).abs();
        (apart > ROUNDING_MS).then(|| "the effects do not add up to the move".to_owned())
    }
}

/// Without what only the arithmetic brought in; well inside [`ROUNDING_MS`].
fn rounded(ms: f64) -> f64 {
    // Adding zero takes the sign from a negative one.
    (ms * 1e7).round() / 1e7 + 0.0
}

/// What every row of one blessing says.
#[derive(Debug, Clone)]
pub struct Blessing {
    pub date: Date,
    pub reason: String,
    pub mechanism: Option<String>,
    pub rows: Vec<String>,
    pub fingerprint: String,
}

impl Blessing {
    /// The row of a change.
    pub fn row(
        &self,
        case: &str,
        point: Option<u32>,
        classified: &Classified,
        effects: Option<&Effects>,
    ) -> LedgerRow {
        let change = &classified.change;
        LedgerRow {
            before_ms: change.before_ms,
            after_ms: change.after_ms,
            silicon_ms: change.silicon_ms,
            error_before_pct: change.error_before_pct,
            error_after_pct: change.error_after_pct,
            class: change.class,
            code_effect_ms: effects.map(|effects| rounded(effects.code_ms)),
            row_effect_ms: effects.map(|effects| rounded(effects.row_ms)),
            schedule_effect_ms: effects.map(|effects| rounded(effects.schedule_ms)),
            policy: classified.policy.name().to_owned(),
            metric: classified.metric.name().to_owned(),
            ..self.bare(case, point)
        }
    }

    /// The row of a measured value that changed.
    pub fn evidence(
        &self,
        case: &str,
        point: Option<u32>,
        (name, before_ms, after_ms): (&str, Option<f64>, Option<f64>),
    ) -> LedgerRow {
        LedgerRow {
            metric: format!("{EVIDENCE}{name}"),
            before_ms,
            after_ms,
            ..self.bare(case, point)
        }
    }

    fn bare(&self, case: &str, point: Option<u32>) -> LedgerRow {
        LedgerRow {
            date: self.date.to_string(),
            case: case.to_owned(),
            point,
            policy: "-".to_owned(),
            metric: String::new(),
            before_ms: None,
            after_ms: None,
            silicon_ms: None,
            error_before_pct: None,
            error_after_pct: None,
            class: Class::Evidence,
            code_effect_ms: None,
            row_effect_ms: None,
            schedule_effect_ms: None,
            reason: self.reason.clone(),
            mechanism: self.mechanism.clone(),
            rows: self.rows.clone(),
            fingerprint: self.fingerprint.clone(),
        }
    }
}

/// One file of the ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct LedgerFile {
    /// Path from the project folder, for example `goldens/ledger/2027-01-31-1.jsonl`.
    pub path: String,
    pub text: String,
    pub rows: Vec<LedgerRow>,
}

impl LedgerFile {
    /// Reads a file's text; `shown` is how messages name it.
    ///
    /// # Errors
    /// A line that is no row, or contradicts itself, with file and line.
    pub fn parse(path: &str, text: String, shown: &Path) -> Result<Self, InputError> {
        let help = "the ledger is written by `stepgate ledger record`; restore the file from git";
        let fault = |line: usize, column: usize, what: String| {
            InputError::new(shown, what, help).at(line as u64, column as u64)
        };
        let mut rows = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let row: LedgerRow = serde_json::from_str(line).map_err(|error| {
                fault(index + 1, error.column(), format!("no ledger row: {error}"))
            })?;
            if let Some(what) = row.fault() {
                return Err(fault(index + 1, 1, what));
            }
            rows.push(row);
        }
        if rows.is_empty() {
            return Err(fault(1, 1, "a ledger file without a row".to_owned()));
        }
        if !text.ends_with('\n') {
            let what = "the last line is cut off".to_owned();
            return Err(fault(rows.len(), 1, what));
        }
        let path = path.to_owned();
        Ok(Self { path, text, rows })
    }

    /// The first line that `now` does not have as this file has it, counted from one.
    pub fn first_changed_line(&self, now: &str) -> Option<usize> {
        let mut lines = now.split_inclusive('\n');
        let changed = self
            .text
            .split_inclusive('\n')
            .position(|line| lines.next() != Some(line));
        changed.map(|index| index + 1)
    }
}

/// Reads the whole ledger, oldest file first; an absent folder is an empty ledger.
///
/// # Errors
/// As [`LedgerFile::parse`], and a file whose name is not `<date>-<number>.jsonl`.
pub fn read_ledger(root: &Path) -> Result<Vec<LedgerFile>, InputError> {
    let folder = root.join(LEDGER);
    let mut named = Vec::new();
    let Ok(entries) = fs::read_dir(&folder) else {
        return Ok(Vec::new());
    };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name().to_string_lossy().into_owned();
        // What an interrupted write left behind was never in the ledger.
        if name.starts_with(UNFINISHED) {
            continue;
        }
        let place = place_of(&name).ok_or_else(|| {
            InputError::new(
                folder.join(&name),
                "not a ledger file: its name is not `<date>-<number>.jsonl`",
                "move it elsewhere",
            )
        })?;
        // A link could lead out of the project, to lines that git does not hold.
        if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            return Err(InputError::new(
                folder.join(&name),
                "a ledger file is a regular file, no folder, link or pipe",
                "restore it from git",
            ));
        }
        named.push((place, name));
    }
    named.sort();
    let read = |(_, name): (_, String)| {
        let file = folder.join(&name);
        let text = read_text(&file, "the ledger")?;
        LedgerFile::parse(&format!("{LEDGER}/{name}"), text, &file)
    };
    named.into_iter().map(read).collect()
}

/// Date and number of a file's name.
fn place_of(name: &str) -> Option<(Date, u32)> {
    let stem = name.strip_suffix(".jsonl")?;
    let (date, number) = (stem.get(..10)?, stem.get(10..)?.strip_prefix('-')?);
    let place: (Date, u32) = (date.parse().ok()?, number.parse().ok()?);
    // One spelling for each: `-01` or `-+1` would be the same place again.
    (format!("{}-{}", place.0, place.1) == stem).then_some(place)
}

/// How the names of unfinished files begin.
const UNFINISHED: &str = ".unfinished-";

/// The steps of writing a file whole: what a fault may interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteStep {
    Folder,
    Create,
    Write,
    Sync,
    Rename,
    SyncFolder,
}

impl WriteStep {
    pub const ALL: [Self; 6] = [
        Self::Folder,
        Self::Create,
        Self::Write,
        Self::Sync,
        Self::Rename,
        Self::SyncFolder,
    ];
}

/// Called before each step of a write; tests make it fail there.
pub type BeforeStep<'a> = &'a dyn Fn(WriteStep) -> std::io::Result<()>;

/// Writes rows as the day's next ledger file and returns its path. After a fault the ledger is as
/// it was, or holds the whole file.
///
/// # Errors
/// A write that failed.
pub fn write_ledger(
    root: &Path,
    date: Date,
    rows: &[LedgerRow],
    before: BeforeStep<'_>,
) -> Result<PathBuf, InputError> {
    let mut text = String::new();
    for row in rows {
        let line = serde_json::to_string(row).map_err(|error| {
            InputError::new(root, format!("cannot write a row: {error}"), "report this")
        })?;
        text.push_str(&line);
        text.push('\n');
    }
    let folder = root.join(LEDGER);
    for number in 1.. {
        let file = folder.join(format!("{date}-{number}.jsonl"));
        if !file.exists() {
            write_whole(&file, text.as_bytes(), false, before)?;
            return Ok(file);
        }
    }
    unreachable!("some number is free")
}

/// Writes a file beside its place, forces it to disk and renames it: whole or not at all.
///
/// # Errors
/// A write that failed, or a file that is there and may not be replaced.
pub fn write_whole(
    file: &Path,
    content: &[u8],
    replace: bool,
    before: BeforeStep<'_>,
) -> Result<(), InputError> {
    try_write(file, content, replace, before).map_err(|error| {
        InputError::new(
            file,
            format!("cannot write the file: {error}"),
            "nothing was written; make room or check the permissions, then run it again",
        )
    })
}

fn try_write(
    file: &Path,
    content: &[u8],
    replace: bool,
    before: BeforeStep<'_>,
) -> std::io::Result<()> {
    use std::io::Write;
    let folder = file.parent().unwrap_or(Path::new("."));
    before(WriteStep::Folder)?;
    fs::create_dir_all(folder)?;
    before(WriteStep::Create)?;
    let mut beside = tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempfile_in(folder)?;
    let half = content.len() / 2;
    beside.write_all(&content[..half])?;
    before(WriteStep::Write)?;
    beside.write_all(&content[half..])?;
    before(WriteStep::Sync)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let readable = fs::Permissions::from_mode(0o644);
        beside.as_file().set_permissions(readable)?;
    }
    beside.as_file().sync_all()?;
    before(WriteStep::Rename)?;
    if replace {
        beside.persist(file)?;
    } else {
        beside.persist_noclobber(file)?;
    }
    // From here on the file is there; that its name survives a power cut is all that is missing.
    if before(WriteStep::SyncFolder).is_ok()
        && let Ok(folder) = fs::File::open(folder)
    {
        let _ = folder.sync_all();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn row() -> LedgerRow {
        LedgerRow {
            date: "2027-01-31".to_owned(),
            case: "a/b".to_owned(),
            point: Some(28),
            policy: "strict".to_owned(),
            metric: "ttft".to_owned(),
            before_ms: Some(40.0),
            after_ms: Some(39.0),
            silicon_ms: Some(50.0),
            error_before_pct: Some(-20.0),
            error_after_pct: Some(-22.0),
            class: Class::Regression,
            code_effect_ms: Some(-1.0),
            row_effect_ms: Some(0.0),
            schedule_effect_ms: Some(0.0),
            reason: "a test".to_owned(),
            mechanism: None,
            rows: Vec::new(),
            fingerprint: "0123".to_owned(),
        }
    }

    fn day() -> Date {
        "2027-01-31".parse().expect("a day")
    }

    fn nothing(_: WriteStep) -> io::Result<()> {
        Ok(())
    }

    #[test]
    fn files_of_a_day_are_numbered_and_read_back_in_order() {
        let root = tempfile::tempdir().expect("a folder");
        for _ in 0..11 {
            write_ledger(root.path(), day(), &[row()], &nothing).expect("written");
        }
        let ledger = read_ledger(root.path()).expect("well-formed");
        assert_eq!(ledger.len(), 11);
        assert!(ledger[10].path.ends_with("2027-01-31-11.jsonl"));
        assert_eq!(ledger[0].rows, [row()]);
    }

    #[test]
    fn a_fault_at_any_step_leaves_the_old_ledger_or_the_whole_file() {
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::PermissionDenied] {
            for step in WriteStep::ALL {
                let root = tempfile::tempdir().expect("a folder");
                write_ledger(root.path(), day(), &[row()], &nothing).expect("written");
                let fault = |at: WriteStep| {
                    if at == step { Err(kind.into()) } else { Ok(()) }
                };
                let written = write_ledger(root.path(), day(), &[row(), row()], &fault);
                let ledger = read_ledger(root.path()).expect("still well-formed");
                match written {
                    Ok(_) => assert_eq!(ledger[1].rows.len(), 2, "{step:?}"),
                    Err(_) => assert_eq!(ledger.len(), 1, "{step:?}"),
                }
                assert_eq!(ledger[0].rows, [row()]);
                assert_eq!(written_is_error_before_rename(step), ledger.len() == 1);
            }
        }
    }

    fn written_is_error_before_rename(step: WriteStep) -> bool {
        step != WriteStep::SyncFolder
    }

    #[test]
    fn a_process_that_dies_before_the_rename_leaves_the_old_ledger() {
        let root = tempfile::tempdir().expect("a folder");
        write_ledger(root.path(), day(), &[row()], &nothing).expect("written");
        // What a killed process leaves: the file beside, half written.
        let left = root.path().join(LEDGER).join(format!("{UNFINISHED}x1"));
        fs::write(left, "{\"date\": ").expect("written");
        let died = catch_unwind(AssertUnwindSafe(|| {
            let die = |at: WriteStep| {
                if at == WriteStep::Rename {
                    panic!("killed")
                } else {
                    Ok(())
                }
            };
            write_ledger(root.path(), day(), &[row()], &die)
        }));
        assert!(died.is_err());
        assert_eq!(read_ledger(root.path()).expect("well-formed").len(), 1);
    }

    #[test]
    fn rows_that_contradict_themselves_are_faults_with_their_line() {
        let good = serde_json::to_string(&row()).expect("JSON");
        for (from, to, what) in [
            ("\"regression\"", "\"improvement\"", "class `improvement`"),
            ("\"regression\"", "\"same\"", "class `same`"),
            ("-22.0", "-12.0", "`error_after_pct`"),
            (
                "\"code_effect_ms\":-1.0",
                "\"code_effect_ms\":-2.0",
                "add up",
            ),
            ("39.0", "1e999", "no ledger row"),
            ("39.0", "NaN", "no ledger row"),
            ("\"a test\"", "\" \"", "reason"),
            ("2027-01-31", "2027-02-31", "date"),
            ("\"point\"", "\"pint\"", "pint"),
            ("\"ttft\"", "\"latency\"", "metric"),
        ] {
            assert!(good.contains(from), "{from}");
            let text = format!("{good}\n{}\n", good.replacen(from, to, 1));
            let error = LedgerFile::parse("x", text, Path::new("x.jsonl")).expect_err(to);
            let error = error.to_string();
            assert!(
                error.contains("x.jsonl:2") && error.contains(what),
                "{error}"
            );
        }
        let cut = format!("{good}\n{good}");
        let error = LedgerFile::parse("x", cut, Path::new("x.jsonl")).expect_err("cut off");
        assert!(error.to_string().contains("cut off"), "{error}");
    }
}
