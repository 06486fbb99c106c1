//! Critical paths as a tree of nodes, and the receipt that falls out of walking it backwards.
//!
//! A time is a [`Stamp`]: its value and the node it was reached by. A node adds terms (lookups with
//! multiplicities, each in a part) to its parent. A metric that is a weighted sum of stamps is then
//! a linear form over lookups: weights enter at stamps and flow to the root once, in one sweep.
//!
//! Most nodes repeat the terms of earlier ones, except that decode attention is priced anew in
//! each step. So terms are stored once and shared, and those of decode attention are counted from
//! the first lookup of the node's own step.

use serde::Serialize;

use crate::perfdb::{LookupId, Pricer};
use crate::timing::RowId;

/// Where a microsecond of TTFT or TPOT goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    ClientTransport,
    Ingress,
    /// Waiting for the running iteration to let the host look for requests.
    QueueIteration,
    /// Held back by batch wait.
    QueueBatchWait,
    /// Held back by attention-DP balance.
    QueueBalance,
    /// No room: tokens, batch slots or KV blocks.
    QueueCapacity,
    HostPrepare,
    HostDispatch,
    GraphLaunch,
    Kernel,
    Transfer,
    HostFinish,
    Egress,
}

impl Part {
    pub const ALL: [Self; 13] = [
        Self::ClientTransport,
        Self::Ingress,
        Self::QueueIteration,
        Self::QueueBatchWait,
        Self::QueueBalance,
        Self::QueueCapacity,
        Self::HostPrepare,
        Self::HostDispatch,
        Self::GraphLaunch,
        Self::Kernel,
        Self::Transfer,
        Self::HostFinish,
        Self::Egress,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::ClientTransport => "client_transport",
            Self::Ingress => "ingress",
            Self::QueueIteration => "queue_iteration",
            Self::QueueBatchWait => "queue_batch_wait",
            Self::QueueBalance => "queue_balance",
            Self::QueueCapacity => "queue_capacity",
            Self::HostPrepare => "host_prepare",
            Self::HostDispatch => "host_dispatch",
            Self::GraphLaunch => "graph_launch",
            Self::Kernel => "kernel",
            Self::Transfer => "transfer",
            Self::HostFinish => "host_finish",
            Self::Egress => "egress",
        }
    }
}

/// `times` occurrences of a lookup on a path, in a part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathTerm {
    pub part: Part,
    pub lookup: LookupId,
    pub times: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

/// A range of stored terms in [`Paths`], shared by any number of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TermRange {
    first: u32,
    end: u32,
}

/// A term as it is stored: its lookup by itself, or counted from a node's first one.
#[derive(Debug, Clone, Copy)]
struct StoredTerm {
    part: Part,
    counted: bool,
    /// A range begins here.
    begins: bool,
    lookup: u32,
    times: f64,
}

impl StoredTerm {
    fn of(self, node: &Node) -> PathTerm {
        let from = if self.counted { node.first.0 } else { 0 };
        PathTerm {
            part: self.part,
            lookup: LookupId(from + self.lookup),
            times: self.times,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Node {
    parent: NodeId,
    terms: TermRange,
    /// The lookup that counted terms are counted from.
    first: LookupId,
}

/// A time in milliseconds and the node it was reached by.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    pub ms: f64,
    pub node: NodeId,
}

impl Stamp {
    /// The later of two stamps; on equal times the first.
    pub fn latest(self, other: Self) -> Self {
        if other.ms > self.ms { other } else { self }
    }
}

/// A stretch of time that many paths have in common: no time where it has no row.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stretch {
    pub ms: f64,
    pub terms: TermRange,
}

/// Channels of weight: the time outside queues, each queue reason, and TPOT.
const CHANNELS: usize = 6;
const SERVICE: usize = 0;
const TPOT: usize = 5;

fn channel(part: Part) -> usize {
    match part {
        Part::QueueIteration => 1,
        Part::QueueBatchWait => 2,
        Part::QueueBalance => 3,
        Part::QueueCapacity => 4,
        _ => SERVICE,
    }
}

const QUEUES: [Part; 4] = [
    Part::QueueIteration,
    Part::QueueBatchWait,
    Part::QueueBalance,
    Part::QueueCapacity,
];

/// The node tree of one replay, with the weights that TTFT and TPOT put on it.
#[derive(Debug)]
pub struct Paths {
    /// Every time hangs on its path; else times stand alone, and nothing is kept.
    kept: bool,
    nodes: Vec<Node>,
    terms: Vec<StoredTerm>,
    weights: Vec<Weight>,
}

/// Weight that a metric puts on a node.
#[derive(Debug, Clone, Copy)]
struct Weight {
    node: NodeId,
    channel: usize,
    weight: f64,
}

impl Default for Paths {
    fn default() -> Self {
        Self::new()
    }
}

impl Paths {
    pub fn new() -> Self {
        let root = Node {
            parent: NodeId(0),
            terms: TermRange::default(),
            first: LookupId(0),
        };
        Self {
            kept: true,
            nodes: vec![root],
            terms: Vec::new(),
            weights: Vec::new(),
        }
    }

    /// Times alone: every stamp hangs on the root, and receipts are empty.
    pub fn not_kept() -> Self {
        Self {
            kept: false,
            ..Self::new()
        }
    }

    pub fn kept(&self) -> bool {
        self.kept
    }

    /// Makes room for so many stamps.
    pub fn expect(&mut self, stamps: usize) {
        if self.kept {
            self.nodes.reserve(stamps);
        }
    }

    /// Time zero.
    pub fn origin(&self) -> Stamp {
        Stamp {
            ms: 0.0,
            node: NodeId(0),
        }
    }

    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Stores terms for any number of nodes.
    pub fn store(&mut self, terms: &[PathTerm]) -> TermRange {
        self.store_counted(terms, LookupId(u32::MAX))
    }

    /// Stores terms, those of lookups from `first` on as counted from there.
    pub fn store_counted(&mut self, terms: &[PathTerm], first: LookupId) -> TermRange {
        if !self.kept {
            return TermRange::default();
        }
        let begin = self.terms.len() as u32;
        self.terms
            .extend(terms.iter().enumerate().map(|(at, term)| {
                let counted = term.lookup >= first;
                StoredTerm {
                    part: term.part,
                    counted,
                    begins: at == 0,
                    lookup: term.lookup.0 - if counted { first.0 } else { 0 },
                    times: term.times,
                }
            }));
        TermRange {
            first: begin,
            end: self.terms.len() as u32,
        }
    }

    /// A stamp at `ms`, reached from `parent` over stored terms, the counted ones from `first` on.
    pub fn reach(&mut self, parent: NodeId, ms: f64, terms: TermRange, first: LookupId) -> Stamp {
        if terms.first == terms.end {
            return Stamp { ms, node: parent };
        }
        self.nodes.push(Node {
            parent,
            terms,
            first,
        });
        Stamp {
            ms,
            node: NodeId(self.nodes.len() as u32 - 1),
        }
    }

    /// `from` later by a stretch that is always the same.
    pub fn after(&mut self, from: Stamp, stretch: Stretch) -> Stamp {
        self.reach(from.node, from.ms + stretch.ms, stretch.terms, LookupId(0))
    }

    /// One occurrence of a lookup as a stretch; of none, nothing.
    pub fn stretch(&mut self, part: Part, lookup: Option<LookupId>, pricer: &Pricer) -> Stretch {
        lookup.map_or_else(Stretch::default, |lookup| Stretch {
            ms: pricer.ms(lookup),
            terms: self.store(&[PathTerm {
                part,
                lookup,
                times: 1.0,
            }]),
        })
    }

    /// Adds `weight * (to - from)` to mean TTFT: in the parts of the path between, or, for time
    /// in a queue, in the queue's part. Both paths are kept and subtracted.
    pub fn weigh_ttft(&mut self, from: Stamp, to: Stamp, queue: Option<Part>, weight: f64) {
        self.weigh(from, to, queue.map_or(SERVICE, channel), weight);
    }

    /// Adds `weight * (to - from)` to mean TPOT.
    pub fn weigh_tpot(&mut self, from: Stamp, to: Stamp, weight: f64) {
        self.weigh(from, to, TPOT, weight);
    }

    fn weigh(&mut self, from: Stamp, to: Stamp, channel: usize, weight: f64) {
        if !self.kept {
            return;
        }
        for (node, weight) in [(to.node, weight), (from.node, -weight)] {
            self.weights.push(Weight {
                node,
                channel,
                weight,
            });
        }
    }

    /// The way to `to` since it parted from the way to `from`, in order of time. Terms that only
    /// the way to `from` has come first, negative: the difference of two paths.
    pub fn between(&self, from: Stamp, to: Stamp) -> Vec<PathTerm> {
        let (mut a, mut b) = (from.node, to.node);
        let (mut back, mut forth) = (Vec::new(), Vec::new());
        // Parents have smaller ids, so the larger of two different nodes is no common ancestor.
        while a != b {
            let (at, terms) = if a > b {
                (&mut a, &mut back)
            } else {
                (&mut b, &mut forth)
            };
            let node = self.nodes[at.0 as usize];
            terms.extend(self.terms_of(&node).rev());
            *at = node.parent;
        }
        back.into_iter()
            .map(|term: PathTerm| PathTerm {
                times: -term.times,
                ..term
            })
            .chain(forth.into_iter().rev())
            .collect()
    }

    fn terms_of(&self, node: &Node) -> impl DoubleEndedIterator<Item = PathTerm> + use<'_> {
        let node = *node;
        self.terms[node.terms.first as usize..node.terms.end as usize]
            .iter()
            .map(move |term| term.of(&node))
    }

    /// Sweeps the weights to the root and returns the receipts of TTFT and TPOT.
    pub fn receipts(self, pricer: &Pricer) -> (Receipt, Receipt) {
        // Weights lie between -1 and 1; what sums to less than their rounding is zero.
        let noise = f64::EPSILON * self.nodes.len() as f64;
        let mut sums = Sums::new(pricer);
        // Nodes share their terms, so their weights are added up where a range begins. Only the
        // counted terms stand for another lookup in each node: a list of them, and how many of it
        // lie before a term.
        let mut by_range = weights(self.terms.len());
        let mut counted: Vec<StoredTerm> = Vec::new();
        let mut before = Vec::with_capacity(self.terms.len() + 1);
        for term in &self.terms {
            before.push(counted.len());
            counted.extend(term.counted.then_some(*term));
        }
        before.push(counted.len());
        let mut by_node = weights(self.nodes.len());
        for one in &self.weights {
            by_node[one.node.0 as usize][one.channel] += one.weight;
        }
        for (at, node) in self.nodes.iter().enumerate().skip(1).rev() {
            let weight = by_node[at];
            if weight == [0.0; CHANNELS] {
                continue;
            }
            let (first, end) = (node.terms.first as usize, node.terms.end as usize);
            add(&mut by_range[first], weight, 1.0);
            for term in &counted[before[first]..before[end]] {
                sums.add(term.of(node), weight, noise);
            }
            add(&mut by_node[node.parent.0 as usize], weight, 1.0);
        }
        let mut weight = [0.0; CHANNELS];
        for (term, begun) in self.terms.iter().zip(by_range) {
            if term.begins {
                weight = begun;
            }
            if !term.counted {
                sums.add(term.of(&self.nodes[0]), weight, noise);
            }
        }
        let [ttft, tpot] = sums.by_part;
        (Receipt::new(&ttft, pricer), Receipt::new(&tpot, pricer))
    }
}

fn weights(count: usize) -> Vec<[f64; CHANNELS]> {
    vec![[0.0; CHANNELS]; count]
}

fn add(sums: &mut [f64; CHANNELS], weight: [f64; CHANNELS], times: f64) {
    for (sum, weight) in sums.iter_mut().zip(weight) {
        *sum += weight * times;
    }
}

/// Coefficients of the rows in each part, as they add up.
struct Sums<'a> {
    pricer: &'a Pricer,
    /// Of TTFT and of TPOT, by part, then row. Empty: nothing yet.
    by_part: [Vec<Vec<f64>>; 2],
}

impl<'a> Sums<'a> {
    fn new(pricer: &'a Pricer) -> Self {
        Self {
            pricer,
            by_part: [(); 2].map(|()| vec![Vec::new(); Part::ALL.len()]),
        }
    }

    /// Adds a term that lies on paths of this weight in each channel.
    fn add(&mut self, term: PathTerm, weight: [f64; CHANNELS], noise: f64) {
        for (channel, weight) in weight.into_iter().enumerate() {
            let times = weight * term.times;
            if times.abs() <= noise {
                continue;
            }
            let (metric, part) = match channel {
                TPOT => (1, term.part),
                SERVICE => (0, term.part),
                queue => (0, QUEUES[queue - 1]),
            };
            let sums = &mut self.by_part[metric][part as usize];
            sums.resize(self.pricer.rows().len(), 0.0);
            for one in self.pricer.terms(term.lookup) {
                sums[one.row.0 as usize] += times * one.coefficient();
            }
        }
    }
}

/// One line of a receipt: `coefficient * row` milliseconds in a part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReceiptLine {
    pub part: Part,
    pub row: RowId,
    pub coefficient: f64,
}

/// A mean as a linear form over rows, grouped into parts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Receipt {
    /// Sorted by part, then row; no zero coefficients.
    pub lines: Vec<ReceiptLine>,
    /// Value of each part, in milliseconds, in the order of [`Part::ALL`].
    pub parts_ms: Vec<f64>,
}

impl Receipt {
    /// From the coefficients of the rows in each part.
    fn new(by_part: &[Vec<f64>], pricer: &Pricer) -> Self {
        let rows = pricer.rows();
        let mut lines = Vec::new();
        let mut parts_ms = Vec::new();
        for (part, by_row) in Part::ALL.into_iter().zip(by_part) {
            let mut part_ms = 0.0;
            for (row, coefficient) in rows.ids().zip(by_row) {
                if *coefficient != 0.0 {
                    part_ms += coefficient * rows.ms(row);
                    lines.push(ReceiptLine {
                        part,
                        row,
                        coefficient: *coefficient,
                    });
                }
            }
            parts_ms.push(part_ms);
        }
        Self { lines, parts_ms }
    }

    pub fn part_ms(&self, part: Part) -> f64 {
        self.parts_ms[part as usize]
    }

    /// Sum over the parts, in milliseconds.
    pub fn total_ms(&self) -> f64 {
        self.parts_ms.iter().sum()
    }
}
