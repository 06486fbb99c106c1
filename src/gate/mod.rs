//! Goldens and what holds them: text, bands, comparison, proofs.

mod band;
mod golden;

pub use band::{Band, Bands, Breach, Comparison, Drift, compare};
pub use golden::{Points, Predicted, Verdict, failure_message};
