//! Who is next within one priority: deadlines where they decide, rounds where they do not.
//!
//! **Rounds.** In each round every waiting request gives one input. Requests stand in the order of their *turns*: how many
//! they have had, then their age. Whoever is passed over (its input does not fit into what is left of the batch, or wants
//! another kind of output) keeps its turn and is therefore first in the next batch. A newcomer begins with the round that
//! is under way. So a request of one input waits for one round, however large its neighbours are.
//!
//! **Deadlines.** A deadline beyond the time in which everything that waits will be done is met in any order: there
//! fairness decides. One that lies within this *horizon* is pressing, and pressing requests go first, the earliest
//! before the others, with all their inputs: earliest deadline first, which misses none if none has to be missed. A
//! request that cannot make its deadline even if the engine did nothing else is not pressing; to press on with it would
//! only make others late as well.
//!
//! **Patience.** A request that has had no turn for its priority's patience has its next input pressing, as of the moment at
//! which its patience ended. So a stream of pressing newcomers overtakes nobody for ever, and a large request without a
//! deadline still cannot press with more than one input per patience.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use super::{Backlog, JobId, RequestId};

/// A place in the order of deadlines.
pub(super) type Due = (Instant, RequestId);
/// A place in the order of turns.
pub(super) type Turn = (u64, RequestId);

/// A request with inputs that wait.
pub(super) struct Waiting<C> {
    pub(super) class: C,
    pub(super) deadline: Option<Instant>,
    patience_ends: Instant,
    turn: u64,
    /// In order. Some may be begun already, for another owner.
    jobs: VecDeque<JobId>,
    /// What was asked for and is not begun.
    pub(super) left: Backlog,
}

/// Why a request is pressing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pressing {
    /// For its deadline.
    Deadline,
    /// For its patience.
    Patience,
}

/// The requests of one priority.
pub(super) struct FairQueue<C> {
    patience: Duration,
    waiting: BTreeMap<RequestId, Waiting<C>>,
    turns: BTreeSet<Turn>,
    deadlines: BTreeSet<Due>,
    patience_ends: BTreeSet<Due>,
}

impl<C: Copy> FairQueue<C> {
    pub(super) fn new(patience: Duration) -> FairQueue<C> {
        FairQueue {
            patience,
            waiting: BTreeMap::new(),
            turns: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            patience_ends: BTreeSet::new(),
        }
    }

    pub(super) fn push(
        &mut self,
        request: RequestId,
        class: C,
        deadline: Option<Instant>,
        (jobs, left): (VecDeque<JobId>, Backlog),
        now: Instant,
    ) {
        let turn = self.turns.first().map_or(0, |(turn, _)| *turn);
        let patience_ends = now + self.patience;
        self.turns.insert((turn, request));
        self.patience_ends.insert((patience_ends, request));
        self.deadlines.extend(deadline.map(|deadline| (deadline, request)));
        self.waiting.insert(request, Waiting { class, deadline, patience_ends, turn, jobs, left });
    }

    pub(super) fn remove(&mut self, request: RequestId) -> Option<Waiting<C>> {
        let waiting = self.waiting.remove(&request)?;
        self.turns.remove(&(waiting.turn, request));
        self.patience_ends.remove(&(waiting.patience_ends, request));
        if let Some(deadline) = waiting.deadline {
            self.deadlines.remove(&(deadline, request));
        }
        Some(waiting)
    }

    /// An input of `request` was begun, in its own turn or for another owner.
    pub(super) fn begun(&mut self, request: RequestId, tokens: u64) {
        let Some(waiting) = self.waiting.get_mut(&request) else { return };
        waiting.left.tokens -= tokens;
        waiting.left.inputs -= 1;
        if waiting.left.inputs == 0 {
            self.remove(request);
        }
    }

    /// `request` has had its turn.
    pub(super) fn had_turn(&mut self, request: RequestId, now: Instant) {
        let Some(waiting) = self.waiting.get_mut(&request) else { return };
        self.turns.remove(&(waiting.turn, request));
        self.patience_ends.remove(&(waiting.patience_ends, request));
        waiting.turn += 1;
        waiting.patience_ends = now + self.patience;
        self.turns.insert((waiting.turn, request));
        self.patience_ends.insert((waiting.patience_ends, request));
    }

    /// The first input of `request` for which `waits` holds; those before it are forgotten.
    pub(super) fn front(&mut self, request: RequestId, waits: impl Fn(JobId) -> bool) -> Option<(JobId, C)> {
        let waiting = self.waiting.get_mut(&request)?;
        while let Some(job) = waiting.jobs.front().copied() {
            if waits(job) {
                return Some((job, waiting.class));
            }
            waiting.jobs.pop_front();
        }
        None
    }

    /// The next in the order of turns.
    pub(super) fn next_turn(&self, after: Option<Turn>) -> Option<Turn> {
        self.turns.range((after.map_or(Unbounded, Excluded), Unbounded)).next().copied()
    }

    /// The next that is pressing: a deadline until `horizon` of a request that `makes` it, or a patience that has ended.
    pub(super) fn next_pressing(
        &self,
        after: Option<Due>,
        now: Instant,
        horizon: Option<Instant>,
        makes: impl Fn(Instant, Backlog) -> bool,
    ) -> Option<(Due, Pressing)> {
        let range = (after.map_or(Unbounded, Excluded), Unbounded);
        let pressing = |due: &&Due| horizon.is_none_or(|horizon| due.0 <= horizon);
        let deadline = self.deadlines.range(range).take_while(pressing);
        let deadline =
            deadline.copied().find(|(deadline, request)| makes(*deadline, self.waiting[request].left));
        let patience = self.patience_ends.range(range).next().copied().filter(|(ends, _)| *ends <= now);
        match (deadline, patience) {
            (Some(deadline), Some(patience)) if patience < deadline => Some((patience, Pressing::Patience)),
            (Some(deadline), _) => Some((deadline, Pressing::Deadline)),
            (None, patience) => Some((patience?, Pressing::Patience)),
        }
    }

    /// The earliest deadline.
    pub(super) fn first_deadline(&self) -> Option<Due> {
        self.deadlines.first().copied()
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Requests that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

impl<C> Waiting<C> {
    /// The inputs that it still asks for, by their jobs; some of these may be begun.
    pub(super) fn jobs(&self) -> impl Iterator<Item = JobId> + '_ {
        self.jobs.iter().copied()
    }
}
