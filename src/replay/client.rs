//! The closed-loop client: posts, arrivals, the stamps of each request and their weights.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::compose::{Part, Paths, Stamp};
use crate::perfdb::Refusal;

use super::lanes::Lanes;
use super::log::{IterationRecord, RequestRecord, StepLog};
use super::record::Detail;

/// A point in time that orders: by time, then request.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Due {
    ms: f64,
    request: u32,
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.ms
            .total_cmp(&other.ms)
            .then(self.request.cmp(&other.request))
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub prompt: u32,
    pub output: u32,
    pub rank: u32,
    pub iteration: u32,
    /// Tokens generated before its KV was last freed: a resumed request recomputes them.
    pub recompute: u32,
    /// Step whose tokens ended its context, by the scheduler's own count.
    pub joined: u64,
    pub post: Stamp,
    pub arrival: Stamp,
    pub scheduled: Stamp,
    pub first: Stamp,
    pub last: Stamp,
}

impl Request {
    /// Tokens that its context computes.
    pub fn context(&self) -> u32 {
        self.prompt + self.recompute
    }
}

/// What an iteration of a scheduler came to.
pub(super) enum Turn {
    Ran,
    /// Nothing is left to do.
    Done,
    /// Requests wait that nothing which runs or arrives will ever let in.
    Stuck,
}

impl Turn {
    pub fn refusal() -> Refusal {
        Refusal {
            missing: "requests wait that the KV cache and the token limits never let in".to_owned(),
        }
    }
}

/// A finished replay.
pub(super) struct Replayed {
    pub log: StepLog,
    pub paths: Paths,
    /// POST, arrival, schedule and first token of each request.
    pub stamps: Vec<[Stamp; 4]>,
    /// Iterations in detail, where they were asked for.
    pub detail: Option<Detail>,
}

pub(super) struct Client {
    pub requests: Vec<Request>,
    posted: usize,
    arrivals: BinaryHeap<Reverse<Due>>,
    ttft_weight: f64,
    tpot_weight: f64,
}

impl Client {
    /// Posts the opening burst of `concurrency` requests.
    pub fn open(lengths: &[(u32, u32)], concurrency: u32, lanes: &mut Lanes<'_>) -> Self {
        let origin = lanes.paths.origin();
        let requests = lengths
            .iter()
            .map(|&(prompt, output)| Request {
                prompt,
                output,
                rank: 0,
                iteration: 0,
                recompute: 0,
                joined: 0,
                post: origin,
                arrival: origin,
                scheduled: origin,
                first: origin,
                last: origin,
            })
            .collect();
        let streaming = lengths.iter().filter(|(_, output)| *output > 1).count();
        let mut client = Self {
            requests,
            posted: 0,
            arrivals: BinaryHeap::new(),
            ttft_weight: 1.0 / lengths.len() as f64,
            tpot_weight: 1.0 / streaming.max(1) as f64,
        };
        for _ in 0..concurrency {
            client.post(lanes, origin);
        }
        client
    }

    /// The client posts its next request, if it has one left.
    fn post(&mut self, lanes: &mut Lanes<'_>, at: Stamp) {
        let Some(request) = self.requests.get_mut(self.posted) else {
            return;
        };
        let arrival = lanes.arrival(at);
        request.post = at;
        request.arrival = arrival;
        lanes.paths.weigh_ttft(at, arrival, None, self.ttft_weight);
        self.arrivals.push(Reverse(Due {
            ms: arrival.ms,
            request: self.posted as u32,
        }));
        self.posted += 1;
    }

    /// Arrival of the next request on its way.
    pub fn next_arrival(&self) -> Option<Stamp> {
        let Reverse(due) = self.arrivals.peek()?;
        Some(self.requests[due.request as usize].arrival)
    }

    /// Takes the first arrival alone.
    pub fn take_first(&mut self) -> Option<u32> {
        self.arrivals.pop().map(|Reverse(due)| due.request)
    }

    /// Takes everything that has arrived at `start`.
    pub fn take_arrived(&mut self, start: Stamp) -> Vec<u32> {
        let mut taken = Vec::new();
        while let Some(Reverse(due)) = self.arrivals.peek() {
            if due.ms > start.ms {
                break;
            }
            taken.push(due.request);
            self.arrivals.pop();
        }
        taken
    }

    /// Takes the requests that a recorded iteration took. From an `idle` server's `ready` the
    /// iteration starts when they are there.
    pub fn take_recorded(&mut self, fetched: &[u32], idle: bool, ready: Stamp) -> Stamp {
        let mut start = ready;
        for &request in fetched {
            if idle {
                start = start.latest(self.requests[request as usize].arrival);
            }
            self.arrivals.retain(|Reverse(due)| due.request != request);
        }
        start
    }

    /// The time of `fetched` requests from their arrival to the iteration that took them.
    pub fn weigh_fetched(&self, lanes: &mut Lanes<'_>, fetched: &[u32], start: Stamp) {
        for &request in fetched {
            let arrival = self.requests[request as usize].arrival;
            let part = Some(Part::QueueIteration);
            lanes
                .paths
                .weigh_ttft(arrival, start, part, self.ttft_weight);
        }
    }

    /// The time of `count` requests held back between two iterations.
    pub fn weigh_held(
        &self,
        lanes: &mut Lanes<'_>,
        (part, count): (Part, u32),
        from: Stamp,
        to: Stamp,
    ) {
        let weight = self.ttft_weight * f64::from(count);
        lanes.paths.weigh_ttft(from, to, Some(part), weight);
    }

    /// A request's first chunk reaches the client.
    pub fn first_token(&mut self, lanes: &mut Lanes<'_>, request: u32, at: Stamp) {
        let request = &mut self.requests[request as usize];
        request.first = at;
        lanes
            .paths
            .weigh_ttft(request.scheduled, at, None, self.ttft_weight);
    }

    /// A request's last chunk reaches the client, which posts the next request.
    pub fn last_token(&mut self, lanes: &mut Lanes<'_>, request: u32, at: Stamp) {
        let request = &mut self.requests[request as usize];
        request.last = at;
        if request.output > 1 {
            let weight = self.tpot_weight / f64::from(request.output - 1);
            lanes.paths.weigh_tpot(request.first, at, weight);
        }
        self.post(lanes, at);
    }

    /// Closes the books.
    pub fn close(self, mut lanes: Lanes<'_>, iterations: Vec<IterationRecord>) -> Replayed {
        let requests = self
            .requests
            .iter()
            .map(|request| RequestRecord {
                prompt: request.prompt,
                output: request.output,
                rank: request.rank,
                post_ms: request.post.ms,
                arrival_ms: request.arrival.ms,
                scheduled_ms: request.scheduled.ms,
                iteration: request.iteration,
                first_token_ms: request.first.ms,
                last_token_ms: request.last.ms,
            })
            .collect();
        let stamps = self
            .requests
            .iter()
            .map(|request| {
                [
                    request.post,
                    request.arrival,
                    request.scheduled,
                    request.first,
                ]
            })
            .collect();
        let log = StepLog {
            iterations,
            requests,
        };
        Replayed {
            detail: lanes.detail(&log),
            log,
            paths: lanes.paths,
            stamps,
        }
    }
}
