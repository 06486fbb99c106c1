//! The binary's subcommands.

mod ablation;
mod accuracy;
mod args;
mod case;
mod coverage;
mod drift;
mod predict;
mod run;
mod select;
mod sensitivity;
mod tables;
mod text;

pub use run::run;
