//! Queue of one priority: earliest deadline first where deadlines decide, round robin otherwise.
//!
//! **Rounds.** In each round every queued request contributes one input. Requests are ordered by the number of turns
//! they have had, then by age. A skipped request (its input does not fit into the rest of the batch, or is of another
//! class) keeps its turn and is therefore first in the next batch. A new request starts in the current round. So a
//! request of one input waits for one round, however large the other requests are.
//!
//! **Deadlines.** A deadline beyond the time in which the whole backlog will be done is met in any order: there
//! fairness decides. A deadline within this *horizon* is urgent. Urgent requests go first, the earliest deadline before
//! the others, with all their inputs: earliest deadline first meets all deadlines if that is possible. A request that
//! could not meet its deadline even if the engine did nothing else is not urgent; preferring it would only delay others
//! as well.
//!
//! **Starvation.** A request that has had no turn for the starvation limit of its priority has one urgent input, as of
//! the moment at which the limit passed. So a stream of urgent new requests cannot starve another request, and a large
//! request without a deadline cannot make more than one input per starvation limit urgent.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use super::{Backlog, JobId, RequestId};

/// Key in the order of deadlines.
pub(super) type Due = (Instant, RequestId);
/// Key in the order of rounds.
pub(super) type Turn = (u64, RequestId);

/// Request with queued inputs.
pub(super) struct Waiting<C> {
    pub(super) class: C,
    pub(super) deadline: Option<Instant>,
    patience_ends: Instant,
    turn: u64,
    /// In order. Some may have been started already for another owner.
    jobs: VecDeque<JobId>,
    /// Requested work that has not started.
    pub(super) left: Backlog,
}

/// Why a request is urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pressing {
    /// Its deadline is near.
    Deadline,
    /// It has had no turn for the starvation limit.
    Patience,
}

/// Queued requests of one priority.
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

    /// Accounts for an input of `request` that has started, in its own turn or for another owner.
    pub(super) fn begun(&mut self, request: RequestId, tokens: u64) {
        let Some(waiting) = self.waiting.get_mut(&request) else { return };
        waiting.left.tokens -= tokens;
        waiting.left.inputs -= 1;
        if waiting.left.inputs == 0 {
            self.remove(request);
        }
    }

    /// Moves `request` to the next round.
    pub(super) fn had_turn(&mut self, request: RequestId, now: Instant) {
        let Some(waiting) = self.waiting.get_mut(&request) else { return };
        self.turns.remove(&(waiting.turn, request));
        self.patience_ends.remove(&(waiting.patience_ends, request));
        waiting.turn += 1;
        waiting.patience_ends = now + self.patience;
        self.turns.insert((waiting.turn, request));
        self.patience_ends.insert((waiting.patience_ends, request));
    }

    /// Returns the first input of `request` that `is_queued` accepts, and drops those before it.
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

    /// Returns the next request in the order of rounds.
    pub(super) fn next_turn(&self, after: Option<Turn>) -> Option<Turn> {
        self.turns.range((after.map_or(Unbounded, Excluded), Unbounded)).next().copied()
    }

    /// Returns the next urgent request: one with a deadline up to `horizon` that `can_meet` accepts, or one past its
    /// starvation limit.
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

    /// Returns the earliest deadline.
    pub(super) fn first_deadline(&self) -> Option<Due> {
        self.deadlines.first().copied()
    }

    /// Returns whether no request is queued.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the number of queued requests.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

impl<C> Waiting<C> {
    /// Returns the jobs of its outstanding inputs; some of them may have started.
    pub(super) fn jobs(&self) -> impl Iterator<Item = JobId> + '_ {
        self.jobs.iter().copied()
    }
}
