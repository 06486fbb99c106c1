//! The step log: what the scheduler decided, iteration by iteration.

use smallvec::SmallVec;

use crate::compose::Part;
use crate::timing::{Execution, HostMode};

/// What a step holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StepKind {
    Prefill,
    Mixed,
    Decode,
}

impl StepKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
            Self::Decode => "decode",
        }
    }
}

/// One attention rank group's share of a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankRecord {
    /// Requests whose prompt runs in this step.
    pub context: Vec<u32>,
    /// Tokens computed before and in this step, per context request, where a prompt is cut; empty:
    /// every prompt runs as a whole.
    pub chunks: Vec<(u32, u32)>,
    pub generation: u32,
    /// Generation requests with padding and dummies.
    pub padded: u32,
    /// Sum of KV lengths, padding and dummies included.
    pub kv_sum: u64,
}

impl RankRecord {
    fn same(&self, other: &Self) -> bool {
        self.generation == other.generation
            && self.padded == other.padded
            && self.kv_sum == other.kv_sum
            && self.context.iter().eq(&other.context)
            && self.chunks.iter().eq(&other.chunks)
    }
}

/// One per rank group. Most logs are of one, and as long as their steps: it lies in place.
pub type RankRecords = SmallVec<[RankRecord; 1]>;

/// One iteration of the executor.
#[derive(Debug, Clone, PartialEq)]
pub struct IterationRecord {
    pub start_ms: f64,
    /// Requests taken from the queue at the iteration's start, in order.
    pub fetched: Vec<u32>,
    /// Why context requests that were there did not run, and how many.
    pub held: Option<(Part, u32)>,
    /// Requests whose KV was freed before this step, in order: they compute it again later.
    pub paused: Vec<u32>,
    /// The step, if anything was scheduled: execution and one record per rank group.
    pub step: Option<(Execution, RankRecords)>,
    /// Captured batch of a split step's generation part, which runs first, in a forward of its own;
    /// the step's execution is then that of its context. `None`: one forward.
    pub decode_graph: Option<u32>,
}

impl IterationRecord {
    /// The execution mode, `split` where the step is two forwards.
    pub fn mode(&self) -> Option<&'static str> {
        let (execution, _) = self.step.as_ref()?;
        Some(match self.decode_graph {
            Some(_) => "split",
            None => execution.mode(),
        })
    }

    /// Modes whose rows the host work of the step rests on. A split step takes those of an eager
    /// one, and the launch of a graph.
    pub fn host_modes(&self) -> impl Iterator<Item = HostMode> + use<> {
        let prompts = self.kind() != Some(StepKind::Decode);
        let of = |(execution, _): &(Execution, RankRecords)| execution.host_mode(prompts);
        let graph = self.decode_graph.map(|_| HostMode::SplitDecode);
        self.step.as_ref().map(of).into_iter().chain(graph)
    }

    /// Whether the scheduler decided the same, at whatever time.
    pub fn decides_as(&self, other: &Self) -> bool {
        // Element by element: most lists are empty, and comparing no memory is not free.
        self.held == other.held
            && self.decode_graph == other.decode_graph
            && self.fetched.iter().eq(&other.fetched)
            && self.paused.iter().eq(&other.paused)
            && match (&self.step, &other.step) {
                (Some((old, old_ranks)), Some((new, new_ranks))) => {
                    old == new
                        && old_ranks.len() == new_ranks.len()
                        && old_ranks.iter().zip(new_ranks).all(|(a, b)| a.same(b))
                }
                (None, None) => true,
                _ => false,
            }
    }

    pub fn kind(&self) -> Option<StepKind> {
        let (_, ranks) = self.step.as_ref()?;
        let context = ranks.iter().any(|rank| !rank.context.is_empty());
        let generation = ranks.iter().any(|rank| rank.generation > 0);
        Some(match (context, generation) {
            (true, true) => StepKind::Mixed,
            (true, false) => StepKind::Prefill,
            (false, _) => StepKind::Decode,
        })
    }
}

/// One request's way through the server. Times in milliseconds since the first POST.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestRecord {
    pub prompt: u32,
    pub output: u32,
    pub rank: u32,
    pub post_ms: f64,
    pub arrival_ms: f64,
    pub scheduled_ms: f64,
    /// Iteration whose step ran the prompt.
    pub iteration: u32,
    pub first_token_ms: f64,
    pub last_token_ms: f64,
}

impl RequestRecord {
    pub fn ttft_ms(&self) -> f64 {
        self.first_token_ms - self.post_ms
    }

    /// `None` for a request of a single token.
    pub fn tpot_ms(&self) -> Option<f64> {
        (self.output > 1)
            .then(|| (self.last_token_ms - self.first_token_ms) / f64::from(self.output - 1))
    }
}

/// What a replay keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Every iteration, and the path to every time.
    All,
    /// The times of requests alone.
    Times,
}

/// The iterations of a log under way.
#[derive(Debug)]
pub(super) struct Iterations {
    keep: Keep,
    count: usize,
    kept: Vec<IterationRecord>,
}

impl Iterations {
    /// Room for about so many iterations.
    pub fn new(keep: Keep, iterations: usize) -> Self {
        let room = if keep == Keep::All { iterations } else { 0 };
        Self {
            keep,
            count: 0,
            kept: Vec::with_capacity(room),
        }
    }

    /// Iterations so far.
    pub fn count(&self) -> usize {
        self.count
    }

    pub fn add(&mut self, iteration: impl FnOnce() -> IterationRecord) {
        self.count += 1;
        if self.keep == Keep::All {
            self.kept.push(iteration());
        }
    }

    pub fn close(self) -> Vec<IterationRecord> {
        self.kept
    }
}

/// Everything a replay decided and the times that came out.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepLog {
    pub iterations: Vec<IterationRecord>,
    pub requests: Vec<RequestRecord>,
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn iterations_decide_alike_whenever_they_start_and_in_nothing_else() {
        let rank = RankRecord {
            context: vec![1],
            chunks: vec![(0, 8)],
            generation: 2,
            padded: 4,
            kv_sum: 30,
        };
        let one = IterationRecord {
            start_ms: 1.0,
            fetched: vec![1, 2],
            held: Some((Part::QueueCapacity, 1)),
            paused: vec![3],
            step: Some((Execution::Eager, smallvec![rank.clone(), rank])),
            decode_graph: Some(4),
        };
        let with = |change: fn(&mut IterationRecord)| {
            let mut other = one.clone();
            change(&mut other);
            other.decides_as(&one) && one.decides_as(&other)
        };
        let ranks = |one: &mut IterationRecord, change: fn(&mut RankRecords)| {
            change(&mut one.step.as_mut().expect("a step").1);
        };
        assert!(with(|other| other.start_ms = 2.0));
        let changes: [fn(&mut IterationRecord); 8] = [
            |other| other.fetched = vec![2, 1],
            |other| other.fetched.truncate(1),
            |other| other.held = Some((Part::QueueCapacity, 2)),
            |other| other.paused.clear(),
            |other| other.decode_graph = None,
            |other| other.step = None,
            |other| other.step.as_mut().expect("a step").0 = Execution::Unknown,
            |other| other.step.as_mut().expect("a step").1.truncate(1),
        ];
        for (at, change) in changes.into_iter().enumerate() {
            assert!(!with(change), "change {at}");
        }
        let of_rank: [fn(&mut RankRecords); 6] = [
            |ranks| ranks[1].context[0] = 4,
            |ranks| ranks[1].context.push(4),
            |ranks| ranks[1].chunks[0].1 = 7,
            |ranks| ranks[1].generation = 1,
            |ranks| ranks[1].padded = 8,
            |ranks| ranks[1].kv_sum = 31,
        ];
        for (at, change) in of_rank.into_iter().enumerate() {
            let mut other = one.clone();
            ranks(&mut other, change);
            assert!(!other.decides_as(&one), "change {at} of a rank");
        }
    }
}
