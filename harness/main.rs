//! The `points` test target: one libtest-mimic trial per case file, held to its golden.
//!
//! Listing walks the folder and reads no file; with an exact name (how nextest runs each test)
//! neither the folder is walked nor any other case read.

use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

use insta::Settings;
use insta::comparator::Comparator;
use insta::internals::SnapshotContents;
use libtest_mimic::{Arguments, Failed, Trial};
use stepgate::gate::{Bands, Points, bands_of, compare, failure_message, render};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Opened by the first trial that runs and shared by the rest.
static POINTS: OnceLock<Points> = OnceLock::new();

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    // A failing trial carries its own message; a panic's backtrace would drown it.
    panic::set_hook(Box::new(|_| {}));
    let names = match &arguments.filter {
        Some(name) if arguments.exact => vec![name.clone()],
        _ => match Points::open(Path::new(ROOT), None).and_then(|points| points.names()) {
            Ok(names) => names,
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::from(5);
            }
        },
    };
    let trials = names
        .into_iter()
        .map(|name| Trial::test(name.clone(), move || hold(&name)))
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn points() -> Result<&'static Points, Failed> {
    if let Some(points) = POINTS.get() {
        return Ok(points);
    }
    let opened = Points::open(Path::new(ROOT), None)?;
    Ok(POINTS.get_or_init(|| opened))
}

/// Predicts one case and holds it to its golden.
fn hold(name: &str) -> Result<(), Failed> {
    let points = points()?;
    let case = points.case(name)?;
    let bands = bands_of(&case);
    let file = case.file().to_path_buf();
    let fresh = render(&points.predict(case)?);
    let golden = points.golden(name)?;
    let golden_path = points.golden_path(name);
    let (Some(folder), Some(stem)) = (golden_path.parent(), golden_path.file_stem()) else {
        return Err(format!("{name} has no place under goldens/").into());
    };
    let mut settings = Settings::new();
    settings.set_snapshot_path(folder);
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.set_input_file(file);
    settings.set_comparator(Box::new(Banded(bands)));
    let stem = stem.to_string_lossy().into_owned();
    let held = panic::catch_unwind(AssertUnwindSafe(|| {
        settings.bind(|| insta::assert_snapshot!(stem, fresh));
    }));
    let comparison = golden
        .as_ref()
        .map(|golden| compare(golden, &fresh, &bands));
    match (held, golden, comparison) {
        (Ok(()), _, comparison) => {
            for drift in comparison.map(|c| c.drift).unwrap_or_default() {
                println!(
                    "drift inside the band: {} {} -> {}",
                    drift.path, drift.before, drift.after
                );
            }
            Ok(())
        }
        (Err(_), Some(golden), Some(comparison)) => {
            Err(failure_message(name, &golden, &fresh, &comparison).into())
        }
        (Err(_), ..) => Err(format!(
            "{name} has no golden yet; review the new one with `cargo insta review`:\n{fresh}"
        )
        .into()),
    }
}

/// Holds numbers to their bands and everything else to equality.
struct Banded(Bands);

impl Comparator for Banded {
    fn matches(&self, reference: &insta::Snapshot, test: &insta::Snapshot) -> bool {
        match (reference.contents(), test.contents()) {
            (SnapshotContents::Text(golden), SnapshotContents::Text(fresh)) => {
                compare(&golden.to_string(), &fresh.to_string(), &self.0).holds()
            }
            _ => false,
        }
    }

    fn dyn_clone(&self) -> Box<dyn Comparator> {
        Box::new(Self(self.0))
    }
}
