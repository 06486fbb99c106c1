//! A grid of rows over the axes of one op, and the one blending rule.
//!
//! Axes are nested, outermost first. On each axis an exact hit is taken verbatim; between two
//! lines the answer is their linear blend; above the last line it is that line, scaled by the
//! ratio of work; below the first line it is held. So every answer is a sum of rows with
//! non-negative weights that sum to one, each row first scaled by a ratio of work.

use crate::timing::{Duplicates, RowId};

use super::kernel::OpKey;

/// One row's share in a lookup: `weight * work_ratio * row`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Term {
    pub row: RowId,
    pub weight: f64,
    pub work_ratio: f64,
}

impl Term {
    /// Coefficient of the row in the lookup.
    pub fn coefficient(self) -> f64 {
        self.weight * self.work_ratio
    }
}

/// How a lookup is anchored in the table; flags add up over blended terms and lookups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Anchor(u8);

impl Anchor {
    pub const BLENDED: Self = Self(1);
    pub const EXTENDED: Self = Self(2);
    pub const HELD: Self = Self(4);
    pub const HIT: Self = Self(8);
    pub const SCALED: Self = Self(16);

    pub fn add(&mut self, other: Self) {
        self.0 |= other.0;
    }

    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Names of the flags set, in a stable order.
    pub fn names(self) -> Vec<&'static str> {
        [
            (Self::HIT, "hit"),
            (Self::BLENDED, "blended"),
            (Self::EXTENDED, "extended"),
            (Self::HELD, "held"),
            (Self::SCALED, "scaled"),
        ]
        .into_iter()
        .filter(|(flag, _)| self.has(*flag))
        .map(|(_, name)| name)
        .collect()
    }
}

#[derive(Debug, Clone)]
pub(super) enum Level {
    Row(RowId),
    /// A row measured at one place: `share` of it, by the ratio of work wherever it is asked for.
    Scaled {
        row: RowId,
        at: [f64; 3],
        share: f64,
    },
    /// Lines of an axis, ascending, and what each holds.
    Axis(Vec<f64>, Vec<Level>),
}

#[derive(Debug, Clone)]
pub(super) struct Grid {
    pub key: OpKey,
    pub root: Level,
}

/// Where a lookup lay on each axis: the next one mostly lies between the same lines.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Near([usize; 3]);

impl Near {
    /// Position of the first line at or above `wanted`; the number of lines if there is none.
    fn above(&mut self, axis: usize, lines: &[f64], wanted: f64) -> usize {
        let guess = self.0[axis];
        let over = |at: usize| lines.get(at).is_none_or(|line| *line >= wanted);
        if guess <= lines.len() && over(guess) && (guess == 0 || !over(guess - 1)) {
            return guess;
        }
        self.0[axis] = lines.partition_point(|line| *line < wanted);
        self.0[axis]
    }
}

/// A table row on its way into a grid.
#[derive(Debug, Clone)]
pub(super) struct Site {
    pub at: [f64; 3],
    pub ms: f64,
    pub index: u32,
}

impl Grid {
    /// Nests sites, in the order of their coordinates, by their first `axes` ones. Sites with equal
    /// coordinates become one row: their mean, with count, min and max.
    pub fn build(
        key: OpKey,
        sites: &[Site],
        mut store: impl FnMut(f64, u32, Option<Duplicates>) -> RowId,
    ) -> Self {
        let axes = key.axes().len();
        let root = nest(sites, 0, axes, &mut store);
        Self { key, root }
    }

    /// Adds the terms of the answer at `query` (one value per axis), each with `share` of the
    /// weight, and says how it is anchored.
    pub fn price(
        &self,
        query: &[f64],
        share: f64,
        near: &mut Near,
        terms: &mut Vec<Term>,
    ) -> Anchor {
        let mut at = [0.0; 3];
        at[..query.len()].copy_from_slice(query);
        let mut walk = Walk {
            key: &self.key,
            query: at,
            near,
            terms,
            anchor: Anchor::default(),
        };
        walk.level(&self.root, &mut at, 0, query.len(), share, None);
        if walk.anchor == Anchor::default() {
            walk.anchor = Anchor::HIT;
        }
        walk.anchor
    }

    /// The cell around a query. `None`: it lies on a line or beyond them.
    pub fn cell(&self, query: [f64; 2], near: &mut Near) -> Option<Cell> {
        let Level::Axis(lines, levels) = &self.root else {
            return None;
        };
        let [outer, inner] = query;
        let above = near.above(0, lines, outer);
        let (low, high) = (*lines.get(above.checked_sub(1)?)?, *lines.get(above)?);
        let mut terms = Vec::new();
        let mut walk = Walk {
            key: &self.key,
            query: [outer, inner, 0.0],
            near,
            terms: &mut terms,
            anchor: Anchor::BLENDED,
        };
        walk.level(&levels[above - 1], &mut [low, inner, 0.0], 1, 2, 1.0, None);
        let of_low = walk.terms.len();
        walk.level(&levels[above], &mut [high, inner, 0.0], 1, 2, 1.0, None);
        let anchor = walk.anchor;
        (outer < high).then_some(Cell {
            inner,
            low,
            high,
            terms,
            of_low,
            anchor,
        })
    }
}

/// A query's surroundings on a grid of two axes: the lines around it on the outer one and what each
/// answers at its value on the inner one. While only the outer value moves, and stays between
/// these lines, so do the answers, to the bit.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    inner: f64,
    low: f64,
    high: f64,
    /// Terms of the low line, then those of the high one, each for a weight of one.
    terms: Vec<Term>,
    of_low: usize,
    anchor: Anchor,
}

impl Cell {
    pub fn holds(&self, [outer, inner]: [f64; 2]) -> bool {
        self.inner == inner && self.low < outer && outer < self.high
    }

    /// Adds the terms of the answer, as [`Grid::price`] does.
    pub fn price(&self, outer: f64, terms: &mut Vec<Term>) -> Anchor {
        let share = (outer - self.low) / (self.high - self.low);
        let (low, high) = self.terms.split_at(self.of_low);
        for (line, share) in [(low, 1.0 - share), (high, share)] {
            terms.extend(line.iter().map(|term| Term {
                weight: term.weight * share,
                ..*term
            }));
        }
        self.anchor
    }
}

fn nest(
    sites: &[Site],
    axis: usize,
    axes: usize,
    store: &mut impl FnMut(f64, u32, Option<Duplicates>) -> RowId,
) -> Level {
    if axis == axes {
        let count = sites.len() as u32;
        let (mut sum, mut min, mut max) = (0.0, f64::INFINITY, 0.0_f64);
        for site in sites {
            sum += site.ms;
            min = min.min(site.ms);
            max = max.max(site.ms);
        }
        let duplicates = (count > 1).then_some(Duplicates {
            count,
            min_ms: min,
            max_ms: max,
        });
        return Level::Row(store(sum / f64::from(count), sites[0].index, duplicates));
    }
    let (lines, levels) = sites
        .chunk_by(|a, b| a.at[axis] == b.at[axis])
        .map(|line| (line[0].at[axis], nest(line, axis + 1, axes, store)))
        .unzip();
    Level::Axis(lines, levels)
}

struct Walk<'a> {
    key: &'a OpKey,
    query: [f64; 3],
    near: &'a mut Near,
    terms: &'a mut Vec<Term>,
    anchor: Anchor,
}

impl Walk<'_> {
    fn level(
        &mut self,
        level: &Level,
        at: &mut [f64; 3],
        axis: usize,
        axes: usize,
        weight: f64,
        ratio: Option<f64>,
    ) {
        let (lines, levels) = match level {
            Level::Row(row) => {
                let served = self.key.row_ratio(&self.query[..axes], &at[..axes]);
                self.terms.push(Term {
                    row: *row,
                    weight,
                    work_ratio: ratio.unwrap_or(1.0) * served.unwrap_or(1.0),
                });
                return;
            }
            Level::Scaled {
                row,
                at: measured,
                share,
            } => {
                let work = |at: &[f64; 3]| self.key.work(&at[..axes]);
                let ratio = work(&self.query) / work(measured);
                if ratio != 1.0 {
                    self.anchor.add(Anchor::SCALED);
                }
                self.terms.push(Term {
                    row: *row,
                    weight,
                    work_ratio: share * ratio,
                });
                return;
            }
            Level::Axis(lines, levels) => (lines, levels),
        };
        let wanted = at[axis];
        let above = self.near.above(axis, lines, wanted);
        if above == lines.len() {
            // Beyond the last line: that line, scaled by work.
            let (line, next) = (&lines[above - 1], &levels[above - 1]);
            let wanted_work = self.key.work(&at[..axes]);
            at[axis] = *line;
            let line_work = self.key.work(&at[..axes]);
            let ratio = ratio.unwrap_or(1.0) * (wanted_work / line_work);
            self.anchor.add(Anchor::EXTENDED);
            self.level(next, at, axis + 1, axes, weight, Some(ratio));
        } else if lines[above] == wanted || above == 0 {
            // On a line; or below the first one, where a floor of latency holds it.
            let (line, next) = (&lines[above], &levels[above]);
            if *line != wanted {
                self.anchor.add(Anchor::HELD);
            }
            at[axis] = *line;
            self.level(next, at, axis + 1, axes, weight, ratio);
        } else {
            let (low, below) = (&lines[above - 1], &levels[above - 1]);
            let (high, over) = (&lines[above], &levels[above]);
            let share = (wanted - low) / (high - low);
            self.anchor.add(Anchor::BLENDED);
            at[axis] = *low;
            self.level(below, at, axis + 1, axes, weight * (1.0 - share), ratio);
            at[axis] = *high;
            self.level(over, at, axis + 1, axes, weight * share, ratio);
        }
        at[axis] = wanted;
    }
}
