//! Runs a subcommand and turns its end into an exit code.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::case;
use crate::gate::{NoVerdict, Points};
use crate::timing::InputError;

use super::args::{Arguments, CaseCommand, Command, TablesCommand, TraceCommand};
use super::{
    ablation, accuracy, case as case_command, compare, coverage, drift, gate, ledger, predict,
    sensitivity, tables, timeline, trace, trace_replay,
};

/// Why a subcommand ended early.
#[derive(Debug)]
pub enum Stop {
    Input(InputError),
    /// Standard output went away, or another write failed.
    Output(io::Error),
    /// Arguments that do not go together with what was found.
    Usage(String),
}

impl From<NoVerdict> for Stop {
    fn from(why: NoVerdict) -> Self {
        match why {
            NoVerdict::Input(error) => Self::Input(error),
            NoVerdict::Usage(what) => Self::Usage(what),
        }
    }
}

impl From<InputError> for Stop {
    fn from(error: InputError) -> Self {
        Self::Input(error)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Unrecorded change.
const CHANGED: u8 = 1;
/// Wrong arguments; clap's own code too.
const USAGE: u8 = 2;
/// Bad input.
const BAD_INPUT: u8 = 5;

/// Parses the arguments and runs the subcommand they name.
///
/// Exit codes: 0 done, 1 a golden was left or a change is not recorded, 2 usage, 3 coverage lost,
/// 4 a proof failed, 5 bad input.
pub fn run() -> ExitCode {
    let arguments = Arguments::parse();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let ended = execute(arguments, &mut out).and_then(|code| Ok(out.flush().map(|()| code)?));
    match ended {
        Ok(code) => code,
        Err(Stop::Input(error)) => {
            // What was printed before the error stays.
            let _ = out.flush();
            say(&format!("error: {error}"));
            ExitCode::from(BAD_INPUT)
        }
        Err(Stop::Usage(what)) => {
            let _ = out.flush();
            say(&format!("error: {what}"));
            ExitCode::from(USAGE)
        }
        // A reader that has seen enough, such as `head`.
        Err(Stop::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Stop::Output(error)) => {
            say(&format!("error: cannot write the output: {error}"));
            ExitCode::from(BAD_INPUT)
        }
    }
}

/// Prints a line on standard error; one that is closed or full is no reason to fail differently.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn execute(arguments: Arguments, out: &mut dyn Write) -> Result<ExitCode, Stop> {
    let root = || match &arguments.root {
        Some(root) => Ok(root.clone()),
        None => find_root(),
    };
    let open = || -> Result<Points, Stop> {
        Ok(Points::open(&root()?, arguments.systems_dir.as_deref())?)
    };
    match arguments.command {
        Command::Predict {
            cases,
            explain,
            receipt,
            json,
            timeline: asked,
        } => {
            let style = predict::Style {
                explain,
                receipt,
                json,
            };
            let points = open()?;
            let to_stdout = (asked.timeline.as_deref()).is_some_and(|file| file == Path::new("-"));
            if !to_stdout {
                predict::run(&points, &cases, style, out)?;
            }
            timeline::run(&points, &cases, &asked, out)?;
        }
        Command::Compare { a, b, set, json } => {
            compare::run(&open()?, &a, b.as_deref(), &set, json, out)?;
        }
        Command::Coverage { cases, json } => coverage::run(&open()?, &cases, json, out)?,
        Command::Accuracy { cases, json } => accuracy::run(&open()?, &cases, json, out)?,
        Command::Sensitivity {
            cases,
            policy,
            top,
            json,
        } => sensitivity::run(&open()?, &cases, policy.policy(), top, json, out)?,
        Command::Ablation {
            mechanism,
            cases,
            json,
        } => ablation::run(&open()?, mechanism, &cases, json, out)?,
        Command::Drift { cases, json } => {
            // The verdict stands even if nobody reads the listing to its end.
            let mut listing = Vec::new();
            let left = drift::run(&open()?, &cases, json, &mut listing)?;
            match out.write_all(&listing).and_then(|()| out.flush()) {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error.into()),
                _ if left => return Ok(ExitCode::from(CHANGED)),
                _ => {}
            }
        }
        Command::Gate(asked) => {
            if arguments.systems_dir.is_some() {
                let what = "the gate judges data/ as it is in git: leave --systems-dir out";
                return Err(Stop::Usage(what.to_owned()));
            }
            return Ok(ExitCode::from(gate::run(&root()?, &asked, out)?));
        }
        Command::Ledger { command } => {
            return Ok(ExitCode::from(ledger::run(&root()?, command, out)?));
        }
        Command::Schema => {
            let schema = serde_json::to_string_pretty(&case::json_schema())
                .map_err(|error| Stop::Output(error.into()))?;
            writeln!(out, "{schema}")?;
        }
        Command::Case {
            command: CaseCommand::Import(import),
        } => {
            let request = import.request();
            let target = case_command::Target {
                file: import.out,
                force: import.force,
            };
            // Outside a project there is no model to check the case against.
            let inside = arguments.root.is_some() || find_root().is_ok();
            let points = if inside { Some(open()?) } else { None };
            case_command::import(&import.settings, &request, points.as_ref(), &target, out)?;
        }
        Command::Tables {
            command:
                TablesCommand::Import {
                    source,
                    models,
                    systems,
                    out: folder,
                    package_version,
                },
        } => tables::import(source, models, systems, folder, package_version, out)?,
        Command::Trace { command } => match command {
            TraceCommand::Summary {
                files,
                iteration,
                json,
            } => trace::summary(&files, iteration.as_deref(), json, out)?,
            TraceCommand::Replay {
                files,
                iteration,
                timeline,
                json,
            } => {
                let (pattern, file) = (iteration.as_deref(), timeline.as_deref());
                trace_replay::run(&files, pattern, file, json, out)?;
            }
            TraceCommand::Import(asked) => {
                let import = trace::Import {
                    files: &asked.files,
                    scope: asked.scope(),
                    iteration: asked.iteration.as_deref(),
                    out: &asked.out,
                    force: asked.force,
                };
                trace::import(import, out)?;
            }
        },
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "stepgate", &mut script);
            out.write_all(&script)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The nearest folder upwards that holds `cases/` and `data/`.
fn find_root() -> Result<PathBuf, InputError> {
    let here = std::env::current_dir().map_err(|error| {
        InputError::new(".", format!("cannot tell the current folder: {error}"), "")
    })?;
    here.ancestors()
        .find(|folder| folder.join("cases").is_dir() && folder.join("data").is_dir())
        .map(Path::to_path_buf)
        .ok_or_else(|| {
            InputError::new(
                &here,
                "no folder from here upwards holds cases/ and data/",
                "change into the project, or name it with --root",
            )
        })
}
