//! Moments: points in time that carry the whole path to them.

use std::rc::Rc;

use smallvec::SmallVec;

use crate::compose::Part;

use super::sources::Known;

/// Position of a [`Lot`] in a path.
pub(super) type Slot = usize;

/// What a path counts.
#[derive(Debug, Clone)]
pub(super) enum Lot {
    /// A row in a part.
    Row(Part, Known),
    /// So much of several lots, all known before.
    Bundle(Amounts),
}

/// So much of some lots: most lookups blend four rows.
pub(super) type Amounts = SmallVec<[(Slot, f64); 4]>;

/// A priced occurrence: its time and how much of which lots it is.
#[derive(Debug, Clone, Default)]
pub(super) struct Cost {
    pub(super) ms: f64,
    pub(super) of: Amounts,
}

/// Slots that are copied together when one of them changes.
const BLOCK: usize = 32;

/// How much of each slot lies on a path. Paths share the blocks in which they agree.
#[derive(Debug, Clone, Default)]
struct Path(Vec<Rc<[f64; BLOCK]>>);

impl PartialEq for Path {
    fn eq(&self, other: &Self) -> bool {
        let mut blocks = self.0.iter().zip(&other.0);
        self.0.len() == other.0.len() && blocks.all(|(a, b)| Rc::ptr_eq(a, b) || a == b)
    }
}

impl Path {
    fn add(&mut self, slot: Slot, times: f64) {
        let block = slot / BLOCK;
        while self.0.len() <= block {
            self.0.push(Rc::new([0.0; BLOCK]));
        }
        Rc::make_mut(&mut self.0[block])[slot % BLOCK] += times;
    }
}

/// A point in time and the whole path to it: how much of each lot lies before it.
#[derive(Debug, Clone)]
pub(super) struct Moment {
    pub(super) ms: f64,
    path: Rc<Path>,
}

impl Moment {
    pub(super) fn zero() -> Self {
        Self {
            ms: 0.0,
            path: Rc::new(Path::default()),
        }
    }

    pub(super) fn after(&self, cost: &Cost) -> Self {
        self.reach(self.ms + cost.ms, cost.of.iter().copied())
    }

    pub(super) fn reach(&self, ms: f64, of: impl IntoIterator<Item = (Slot, f64)>) -> Self {
        let mut of = of.into_iter().peekable();
        if of.peek().is_none() {
            return Self {
                ms,
                path: Rc::clone(&self.path),
            };
        }
        let mut path = Path::clone(&self.path);
        for (slot, times) in of {
            path.add(slot, times);
        }
        Self {
            ms,
            path: Rc::new(path),
        }
    }

    /// Whether the same way leads to both.
    pub(super) fn same_way(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.path, &other.path) || self.path == other.path
    }
}

/// A sum of differences of paths.
#[derive(Debug, Clone, Default)]
pub(super) struct Sum(pub(super) Vec<f64>);

impl Sum {
    pub(super) fn add(&mut self, weight: f64, from: &Moment, to: &Moment) {
        let blocks = from.path.0.len().max(to.path.0.len());
        if self.0.len() < blocks * BLOCK {
            self.0.resize(blocks * BLOCK, 0.0);
        }
        for (block, sums) in self.0.chunks_mut(BLOCK).enumerate().take(blocks) {
            let (from, to) = (from.path.0.get(block), to.path.0.get(block));
            match (from, to) {
                (Some(from), Some(to)) if Rc::ptr_eq(from, to) => {}
                (Some(from), Some(to)) => {
                    for ((sum, to), from) in sums.iter_mut().zip(&**to).zip(&**from) {
                        *sum += weight * (to - from);
                    }
                }
                (None, Some(to)) => {
                    for (sum, to) in sums.iter_mut().zip(&**to) {
                        *sum += weight * to;
                    }
                }
                (Some(from), None) => {
                    for (sum, from) in sums.iter_mut().zip(&**from) {
                        *sum -= weight * from;
                    }
                }
                (None, None) => {}
            }
        }
    }
}
