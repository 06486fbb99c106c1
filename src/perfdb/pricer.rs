//! Prices ops: from a key and the quantities of a step to a time and the rows it rests on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::timing::{InputError, NumberMap, Origin, Row, RowId, Rows};

use super::database::Database;
use super::grid::{Anchor, Cell, Grid, Level, Near, Term};
use super::kernel::{OpKey, Refusal};

/// Index of a resolved op within one [`Pricer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u16);

/// Index of a lookup within one [`Pricer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LookupId(pub u32);

/// The quantities of a step that an op's time depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantity<'a> {
    /// GEMM rows, tokens, elements or bytes.
    Count(f64),
    /// One prompt length per context request: the mean over the prompts of the row at
    /// (batch, length).
    Prompts(&'a [u32]),
    /// The same for pieces of prompts, each behind so many tokens that are in the KV cache already
    /// (none where `prefixes` is empty): the row at the piece's own length, scaled by the ratio of
    /// attended pairs.
    Pieces {
        lengths: &'a [u32],
        prefixes: &'a [u32],
    },
    /// A decode batch and its mean KV length.
    Decode { batch: f64, mean_kv: f64 },
}

/// A priced op: its time and the terms it is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lookup {
    pub ms: f64,
    first: u32,
    count: u32,
}

/// Resolved ops of one scenario, the rows they may use, and every lookup made so far.
#[derive(Debug, Clone)]
pub struct Pricer {
    rows: Rows,
    ops: Vec<ResolvedOp>,
    lookups: Vec<Lookup>,
    terms: Vec<Term>,
}

#[derive(Debug, Clone)]
struct ResolvedOp {
    name: String,
    grid: Arc<Grid>,
    flags: Vec<String>,
    anchor: Anchor,
    /// Lookups made so far, by the bits of their count.
    known: NumberMap<u64, LookupId>,
    /// Where its last lookup lay on the axes.
    near: Near,
    /// The same for decode attention.
    cell: Option<Cell>,
}

impl Pricer {
    pub fn new() -> Self {
        Self {
            rows: Rows::default(),
            ops: Vec::new(),
            lookups: Vec::new(),
            terms: Vec::new(),
        }
    }

    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    pub fn into_rows(self) -> Rows {
        self.rows
    }

    /// Scales the rows that `pick` selects, and with them the lookups made so far.
    pub fn scale_rows(&mut self, factor: f64, pick: impl Fn(&Origin) -> bool) {
        self.rows.scale(factor, pick);
        for lookup in &mut self.lookups {
            lookup.ms = self.terms[lookup.first as usize..(lookup.first + lookup.count) as usize]
                .iter()
                .map(|term| term.coefficient() * self.rows.ms(term.row))
                .sum();
        }
    }

    /// Finds the rows that price `key` and returns the op's handle, or the refusal that names
    /// what is missing.
    pub fn resolve(
        &mut self,
        database: &Database,
        system: &str,
        framework: &str,
        version: &str,
        name: &str,
        key: &OpKey,
    ) -> Result<Result<OpId, Refusal>, InputError> {
        let id = OpId(self.ops.len() as u16);
        let known = self.ops.iter().find(|op| op.grid.key == *key);
        let (grid, flags) = if let Some(known) = known {
            (Arc::clone(&known.grid), known.flags.clone())
        } else if matches!(key, OpKey::Memory) {
            let bytes_per_ms = database.memory_bytes_per_ms(system)?;
            let row = self.rows.push(
                1.0 / bytes_per_ms,
                Origin::Roofline {
                    system: system.into(),
                    peak: "mem_bw",
                },
            );
            let grid = Grid {
                key: key.clone(),
                root: Level::Axis(vec![1.0], vec![Level::Row(row)]),
            };
            (Arc::new(grid), vec!["roofline".to_owned()])
        } else {
            match database.grid(system, framework, version, key, &mut self.rows)? {
                Ok((grid, flags)) => (Arc::new(grid), flags),
                Err(refusal) => return Ok(Err(refusal)),
            }
        };
        self.ops.push(ResolvedOp {
            name: name.to_owned(),
            grid,
            flags,
            anchor: Anchor::default(),
            known: NumberMap::default(),
            near: Near::default(),
            cell: None,
        });
        Ok(Ok(id))
    }

    /// Resolves decode attention that was measured in a known execution mode: one row, taken over
    /// all of the op's `layers` at `requests` requests of `mean_kv` tokens each.
    pub fn resolve_measured(
        &mut self,
        name: &str,
        key: &OpKey,
        row: &Arc<Row>,
        [requests, mean_kv, layers]: [f64; 3],
    ) -> OpId {
        let id = OpId(self.ops.len() as u16);
        let root = Level::Scaled {
            row: self.host_row(row),
            at: [mean_kv, requests, 0.0],
            share: 1.0 / layers,
        };
        let key = key.clone();
        self.ops.push(ResolvedOp {
            name: name.to_owned(),
            grid: Arc::new(Grid { key, root }),
            flags: vec![format!("measured ({})", row.execution.mode())],
            anchor: Anchor::default(),
            known: NumberMap::default(),
            near: Near::default(),
            cell: None,
        });
        id
    }

    fn host_row(&mut self, row: &Arc<Row>) -> RowId {
        let same =
            |id: &RowId| matches!(self.rows.origin(*id), Origin::Host(known) if known.id == row.id);
        let known = self.rows.ids().find(same);
        known.unwrap_or_else(|| {
            self.rows
                .push(row.samples.mean_ms, Origin::Host(Arc::clone(row)))
        })
    }

    /// Stores a host or boundary time: the mean of `rows`, each scaled by a ratio of work.
    pub fn host(&mut self, rows: &[Arc<Row>], work_ratio: f64) -> LookupId {
        let first = self.terms.len();
        for row in rows {
            let row = self.host_row(row);
            self.terms.push(Term {
                row,
                weight: 1.0 / rows.len() as f64,
                work_ratio,
            });
        }
        self.finish(first)
    }

    /// Makes room for so many lookups of decode attention.
    pub fn expect(&mut self, lookups: usize) {
        self.lookups.reserve(lookups);
        // Blended on both axes.
        self.terms.reserve(4 * lookups);
    }

    /// A lookup of no rows: work that a rank does not have.
    pub fn nothing(&mut self) -> LookupId {
        self.finish(self.terms.len())
    }

    /// Prices `op` at `quantity`. Equal counts are priced once; where a decode op depends on its
    /// batch alone, each step has a lookup of its own on the same terms.
    pub fn price(&mut self, op: OpId, quantity: Quantity<'_>) -> LookupId {
        let resolved = &self.ops[usize::from(op.0)];
        let (count, per_step) = match quantity {
            Quantity::Count(count) => (count, false),
            Quantity::Decode { batch, .. }
                if matches!(resolved.grid.key, OpKey::Deltanet { .. }) =>
            {
                (batch, true)
            }
            _ => return self.price_anew(op, quantity),
        };
        match resolved.known.get(&count.to_bits()) {
            Some(known) if per_step => self.again(*known),
            Some(known) => *known,
            None => {
                let id = self.price_anew(op, quantity);
                self.ops[usize::from(op.0)]
                    .known
                    .insert(count.to_bits(), id);
                id
            }
        }
    }

    fn price_anew(&mut self, op: OpId, quantity: Quantity<'_>) -> LookupId {
        let first = self.terms.len();
        let resolved = &mut self.ops[usize::from(op.0)];
        let grid = &resolved.grid;
        let (terms, near) = (&mut self.terms, &mut resolved.near);
        let anchor = match (&grid.key, quantity) {
            (OpKey::Gemm { n, k, .. }, Quantity::Count(m)) => {
                grid.price(&[f64::from(*n), f64::from(*k), m], 1.0, near, terms)
            }
            (_, Quantity::Count(count)) => grid.price(&[count], 1.0, near, terms),
            (OpKey::Deltanet { .. }, Quantity::Decode { batch, .. }) => {
                grid.price(&[batch], 1.0, near, terms)
            }
            (_, Quantity::Decode { batch, mean_kv }) => {
                let at = [mean_kv, batch];
                if !resolved.cell.as_ref().is_some_and(|cell| cell.holds(at)) {
                    resolved.cell = grid.cell(at, near);
                }
                match &resolved.cell {
                    Some(cell) => cell.price(mean_kv, terms),
                    None => grid.price(&at, 1.0, near, terms),
                }
            }
            (_, Quantity::Prompts(lengths)) => pieces(grid, lengths, &[], near, terms),
            (_, Quantity::Pieces { lengths, prefixes }) => {
                pieces(grid, lengths, prefixes, near, terms)
            }
        };
        resolved.anchor.add(anchor);
        self.finish(first)
    }

    /// A lookup on the terms of another.
    fn again(&mut self, known: LookupId) -> LookupId {
        self.lookups.push(self.lookups[known.0 as usize]);
        LookupId(self.lookups.len() as u32 - 1)
    }

    fn finish(&mut self, first: usize) -> LookupId {
        let ms = self.terms[first..]
            .iter()
            .map(|term| term.coefficient() * self.rows.ms(term.row))
            .sum();
        self.lookups.push(Lookup {
            ms,
            first: first as u32,
            count: (self.terms.len() - first) as u32,
        });
        LookupId(self.lookups.len() as u32 - 1)
    }

    pub fn ms(&self, id: LookupId) -> f64 {
        self.lookups[id.0 as usize].ms
    }

    pub fn terms(&self, id: LookupId) -> &[Term] {
        let lookup = &self.lookups[id.0 as usize];
        &self.terms[lookup.first as usize..(lookup.first + lookup.count) as usize]
    }

    /// The lookup that will be made next.
    pub fn next(&self) -> LookupId {
        LookupId(self.lookups.len() as u32)
    }

    pub fn lookup_count(&self) -> usize {
        self.lookups.len()
    }

    /// Per op priced so far: how its lookups are anchored, transfers included.
    pub fn anchors(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut named: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for op in &self.ops {
            if op.anchor == Anchor::default() {
                continue;
            }
            let flags = named.entry(op.name.clone()).or_default();
            let roofline = op.flags.iter().any(|flag| flag == "roofline");
            flags.extend(op.flags.iter().cloned());
            if !roofline {
                flags.extend(op.anchor.names().into_iter().map(str::to_owned));
            }
        }
        named
    }

    /// Rows that some lookup made so far uses.
    pub fn used_rows(&self) -> BTreeSet<RowId> {
        let mut used = vec![false; self.rows.len()];
        for term in &self.terms {
            used[term.row.0 as usize] = true;
        }
        let ids = self.rows.ids();
        ids.filter(|id| used[id.0 as usize]).collect()
    }
}

fn pieces(
    grid: &Grid,
    lengths: &[u32],
    prefixes: &[u32],
    near: &mut Near,
    terms: &mut Vec<Term>,
) -> Anchor {
    let batch = lengths.len() as f64;
    let mut anchor = Anchor::default();
    for (index, length) in lengths.iter().enumerate() {
        let length = f64::from(*length);
        let alone = match prefixes.get(index).copied().unwrap_or(0) {
            0 => length,
            prefix => grid.key.length_alone(length, f64::from(prefix)),
        };
        anchor.add(grid.price(&[alone, batch], 1.0 / batch, near, terms));
    }
    anchor
}

impl Default for Pricer {
    fn default() -> Self {
        Self::new()
    }
}
