//! Rows: what the prediction was given, one entry per source whatever its number of row ids.

use std::collections::HashMap;
use std::sync::Arc;

use crate::timing::{Column, OpTable, Origin, Row, RowId, Rows};

use super::fault::{AuditFault, Check};

/// Position of a source in [`Sources`].
pub(super) type Known = usize;

/// The rows of a prediction by what they are, not by the order in which they were resolved.
pub(super) struct Sources {
    pub(super) ms: Vec<f64>,
    /// One of the ids of each.
    pub(super) ids: Vec<RowId>,
    pub(super) of_id: Vec<Known>,
    pub(super) of_table: HashMap<(*const OpTable, u32), Known>,
    pub(super) tables: Vec<Arc<OpTable>>,
    pub(super) hosts: Vec<(Known, Arc<Row>)>,
    pub(super) roofline: Option<Known>,
}

impl Sources {
    pub(super) fn new(rows: &Rows, faults: &mut Vec<AuditFault>) -> Self {
        let mut sources = Self {
            ms: Vec::new(),
            ids: Vec::new(),
            of_id: Vec::new(),
            of_table: HashMap::new(),
            tables: Vec::new(),
            hosts: Vec::new(),
            roofline: None,
        };
        for id in rows.ids() {
            let ms = rows.ms(id);
            let next = sources.ms.len();
            let known = match rows.origin(id) {
                Origin::Op { table, index, .. } => {
                    let address = Arc::as_ptr(table);
                    let seen = |table: &Arc<OpTable>| Arc::as_ptr(table) == address;
                    if !sources.tables.last().is_some_and(seen) && !sources.tables.iter().any(seen)
                    {
                        sources.tables.push(Arc::clone(table));
                    }
                    *sources.of_table.entry((address, *index)).or_insert(next)
                }
                Origin::Host(row) => {
                    let seen = sources.hosts.iter().find(|(_, known)| known.id == row.id);
                    match seen {
                        Some((known, _)) => *known,
                        None => {
                            if ms != row.samples.mean_ms {
                                faults.push(AuditFault {
                                    check: Check::Rows,
                                    what: format!(
                                        "host/{} is {ms} ms here and {} ms in its file",
                                        row.id, row.samples.mean_ms
                                    ),
                                });
                            }
                            sources.hosts.push((next, Arc::clone(row)));
                            next
                        }
                    }
                }
                Origin::Roofline { .. } => *sources.roofline.get_or_insert(next),
            };
            if known == next {
                sources.ms.push(ms);
                sources.ids.push(id);
            } else if sources.ms[known] != ms {
                faults.push(AuditFault {
                    check: Check::Rows,
                    what: format!(
                        "{} has two values, {} ms and {ms} ms",
                        rows.describe(id),
                        sources.ms[known]
                    ),
                });
            }
            sources.of_id.push(known);
        }
        sources
    }
}

pub(super) fn integers<'a>(table: &'a OpTable, name: &str) -> Option<&'a [i64]> {
    let at = table.names.iter().position(|known| known == name)?;
    match &table.columns[at] {
        Column::Int(values) => Some(values),
        _ => None,
    }
}

pub(super) fn texts<'a>(table: &'a OpTable, name: &str) -> Option<&'a [Arc<str>]> {
    let at = table.names.iter().position(|known| known == name)?;
    match &table.columns[at] {
        Column::Text(values) => Some(values),
        _ => None,
    }
}

pub(super) fn floats<'a>(table: &'a OpTable, name: &str) -> Option<&'a [f64]> {
    let at = table.names.iter().position(|known| known == name)?;
    match &table.columns[at] {
        Column::Float(values) => Some(values),
        _ => None,
    }
}
