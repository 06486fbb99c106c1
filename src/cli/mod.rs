//! The binary's subcommands.

mod ablation;
mod accuracy;
mod args;
mod case;
mod compare;
mod coverage;
mod drift;
mod gate;
mod gate_junit;
mod gate_report;
mod ledger;
mod output;
mod predict;
mod progress;
mod run;
mod select;
mod sensitivity;
mod tables;
mod text;
mod timeline;
mod today;
mod trace;
mod trace_replay;

pub use run::run;
