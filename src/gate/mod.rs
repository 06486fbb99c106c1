//! Goldens and what holds them: text, bands, comparison, proofs.

mod band;
mod golden;
mod points;
mod report;

pub use band::{Band, Bands, Breach, Comparison, Drift, compare};
pub use golden::{differs, error_pct, render};
pub use points::{Points, Predicted, Verdict, bands_of};
pub use report::failure_message;
