//! Predicts the time to first token (TTFT) and time per output token (TPOT) of LLM serving by
//! composing measured host and GPU times along their real dependencies.
//!
//! The main path: `case` -> scenario -> plan -> rows -> lanes -> `replay` -> prediction -> golden.

pub mod case;
pub mod cli;
pub mod compose;
pub mod gate;
pub mod model;
pub mod perfdb;
pub mod replay;
pub mod timing;
pub mod trace;
