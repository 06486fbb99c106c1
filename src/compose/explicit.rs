//! Work on lanes with its dependencies written out, in integer nanoseconds: the rules of the
//! reference ([`super::Composer::step_ops`]) for work that no plan describes, such as a profile's.
//!
//! A piece of work begins when the last thing it comes after has begun or ended, and some lag has
//! passed. Works that meet (a collective) begin together when the last of them could, and end
//! together after the transfer: the shortest of their durations, since every longer one holds a
//! wait. A wait is an outcome.

/// Times and distances stay within this, 146 years, so that differences of times are times too.
const FAR_NS: i64 = (1 << 62) - 1;

/// A piece of work of a [`Schedule`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkId(pub usize);

/// A bound on a beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// So long after the work begins.
    Begin(WorkId, i64),
    /// So long after the work ends.
    End(WorkId, i64),
    /// At this time: the state that lanes start from.
    Time(i64),
}

impl After {
    /// The work it names.
    pub fn work(self) -> Option<WorkId> {
        match self {
            Self::Begin(work, _) | Self::End(work, _) => Some(work),
            Self::Time(_) => None,
        }
    }

    /// The time it asks for, where the work it names has run.
    fn ns(self, ran: &[Option<Ran>]) -> Option<i64> {
        match self {
            Self::Begin(work, lag) => Some(later(ran[work.0]?.begin_ns, lag)),
            Self::End(work, lag) => Some(later(ran[work.0]?.end_ns, lag)),
            Self::Time(ns) => Some(later(ns, 0)),
        }
    }
}

fn later(ns: i64, by_ns: i64) -> i64 {
    ns.saturating_add(by_ns).clamp(-FAR_NS, FAR_NS)
}

/// How a piece of work ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    /// When its lane let it begin.
    pub arrival_ns: i64,
    /// When it began: later than its arrival only where it waited for others to meet.
    pub begin_ns: i64,
    pub end_ns: i64,
    /// The work whose arrival it began on: itself, or the last one to a meeting.
    pub begun_by: WorkId,
    /// What that work came after; the first of equals.
    pub held_by: After,
}

impl Ran {
    pub fn wait_ns(&self) -> i64 {
        self.begin_ns - self.arrival_ns
    }
}

#[derive(Debug, Clone)]
struct Work {
    ns: i64,
    after: Vec<After>,
    meeting: Option<usize>,
}

/// Work and what it comes after.
#[derive(Debug, Clone, Default)]
pub struct Schedule {
    works: Vec<Work>,
    meetings: Vec<Vec<WorkId>>,
}

/// Works that wait for one another: how many never ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlock {
    pub works: usize,
}

impl Schedule {
    /// Adds work of a duration. Without bounds it begins at zero.
    pub fn add(&mut self, ns: i64) -> WorkId {
        self.works.push(Work {
            ns,
            after: Vec::new(),
            meeting: None,
        });
        WorkId(self.works.len() - 1)
    }

    /// Lets work begin after something.
    pub fn bound(&mut self, work: WorkId, after: After) {
        self.works[work.0].after.push(after);
    }

    /// Lets works of different lanes meet. A work meets once.
    pub fn meet(&mut self, works: Vec<WorkId>) {
        for work in &works {
            self.works[work.0].meeting = Some(self.meetings.len());
        }
        self.meetings.push(works);
    }

    /// Runs everything.
    ///
    /// # Errors
    /// Works wait for one another, as collectives do that two ranks enter in different orders.
    pub fn run(&self) -> Result<Vec<Ran>, Deadlock> {
        let mut ran: Vec<Option<Ran>> = vec![None; self.works.len()];
        let mut arrived: Vec<Option<(i64, After)>> = vec![None; self.works.len()];
        let mut missing: Vec<usize> = Vec::with_capacity(self.works.len());
        let mut followers: Vec<Vec<WorkId>> = vec![Vec::new(); self.works.len()];
        let mut absent: Vec<usize> = self.meetings.iter().map(Vec::len).collect();
        for (id, work) in self.works.iter().enumerate() {
            let before = || work.after.iter().filter_map(|after| after.work());
            before().for_each(|first| followers[first.0].push(WorkId(id)));
            missing.push(before().count());
        }
        let free = (0..self.works.len()).filter(|id| missing[*id] == 0);
        let mut ready: Vec<WorkId> = free.map(WorkId).collect();
        let mut left = self.works.len();
        while let Some(id) = ready.pop() {
            let work = &self.works[id.0];
            let mut held = (0, After::Time(0));
            for (at, after) in work.after.iter().enumerate() {
                if let Some(ns) = after.ns(&ran)
                    && (at == 0 || ns > held.0)
                {
                    held = (ns, *after);
                }
            }
            arrived[id.0] = Some(held);
            let alone = [id];
            let together = match work.meeting {
                Some(meeting) => {
                    absent[meeting] -= 1;
                    if absent[meeting] > 0 {
                        continue;
                    }
                    &self.meetings[meeting][..]
                }
                None => &alone,
            };
            for (id, run) in self.begin(together, &arrived) {
                ran[id.0] = Some(run);
                left -= 1;
                for follower in &followers[id.0] {
                    missing[follower.0] -= 1;
                    if missing[follower.0] == 0 {
                        ready.push(*follower);
                    }
                }
            }
        }
        let ran: Vec<Ran> = ran.into_iter().flatten().collect();
        if left > 0 {
            return Err(Deadlock { works: left });
        }
        Ok(ran)
    }

    /// Begins works that have all arrived, together; the last arrival decides, the first of equals.
    fn begin(&self, together: &[WorkId], arrived: &[Option<(i64, After)>]) -> Vec<(WorkId, Ran)> {
        let arrival = |id: &WorkId| arrived[id.0].unwrap_or((0, After::Time(0)));
        let mut late = together[0];
        for id in together {
            if arrival(id).0 > arrival(&late).0 {
                late = *id;
            }
        }
        let (begin_ns, held_by) = arrival(&late);
        let transfer = together.iter().map(|id| self.works[id.0].ns).min();
        let end_ns = later(begin_ns, transfer.unwrap_or(0));
        (together.iter())
            .map(|id| {
                let run = Ran {
                    arrival_ns: arrival(id).0,
                    begin_ns,
                    end_ns,
                    begun_by: late,
                    held_by,
                };
                (*id, run)
            })
            .collect()
    }
}
