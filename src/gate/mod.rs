//! Goldens and what holds them: text, bands, comparison, proofs.

mod audit;
mod band;
mod check;
mod golden;
mod points;
mod proof;
mod report;

pub use audit::{AuditFault, AuditReport, Check, audit, check_weights};
pub use band::{Band, Bands, Breach, Comparison, Drift, compare};
pub use check::{all_checks, checks_of, own_ms};
pub use golden::{differs, error_pct, render};
pub use points::{Points, Predicted, Verdict, bands_of};
pub use proof::{
    Proof, ProofFailure, blindness, homogeneity, measured_cells, no_leak, null, sees_no_answer,
    sums,
};
pub use report::failure_message;
