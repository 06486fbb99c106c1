//! Goldens and what holds them: text, bands, comparison, proofs.

mod analysis;
mod audit;
mod band;
mod base;
mod check;
mod checks;
mod classify;
mod cores;
mod effects;
mod filed;
mod fingerprint;
mod golden;
mod impact;
mod judge;
mod ledger;
mod named;
mod open;
mod parsed;
mod pattern;
mod points;
mod proof;
mod prove;
mod report;
mod shards;
mod uniform;
mod wider;

#[doc(hidden)]
pub use analysis::analyse_by;
pub use analysis::{
    About, Analysis, COMPILER, CaseReport, EvidenceReport, Finding, Kind, MetricReport, NoVerdict,
    OpenRegression, ProofReport, Question, analyse, compiler_file,
};
pub use audit::{AuditFault, AuditReport, Check, audit, check_weights};
pub use band::{Band, Bands, Breach, Comparison, Drift, compare};
pub use check::{all_checks, checks_of, own_ms};
pub use classify::{Change, Class, Classified, Left, classify};
pub use effects::Effects;
pub use filed::{FiledRows, as_filed, tables_as_imported};
pub use golden::{differs, error_pct, render};
pub use ledger::{
    BeforeStep, Blessing, EVIDENCE, LedgerFile, LedgerRow, WriteStep, read_ledger, write_ledger,
    write_whole,
};
pub use named::RowNames;
pub use parsed::{Golden, GoldenCoverage, Judged};
pub use pattern::matches;
#[doc(hidden)]
pub use points::Mutation;
pub use points::{Points, Predicted, Verdict, bands_of};
pub use proof::{
    Proof, ProofFailure, blindness, homogeneity, measured_cells, no_leak, null, sees_no_answer,
    sums,
};
pub use report::failure_message;
pub use shards::Shards;
pub use wider::WiderBand;
