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

use super::{Backlog, BatchRequestId, JobId};

/// Key in the order of deadlines.
pub(super) type DeadlineKey = (Instant, BatchRequestId);
/// Key in the order of rounds.
pub(super) type RoundKey = (u64, BatchRequestId);

/// Request with queued inputs.
pub(super) struct FairQueueEntry<C> {
    pub(super) class: C,
    pub(super) deadline: Option<Instant>,
    urgent_at: Instant,
    turn: u64,
    /// In order. Some may have been started already for another owner.
    jobs: VecDeque<JobId>,
    /// Requested work that has not started.
    pub(super) left: Backlog,
}

/// Why a request is urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// Its deadline is near.
    Deadline,
    /// It has had no turn for the starvation limit.
    Starvation,
}

/// Queued requests of one priority.
pub(super) struct FairQueue<C> {
    starvation_limit: Duration,
    waiting: BTreeMap<BatchRequestId, FairQueueEntry<C>>,
    turns: BTreeSet<RoundKey>,
    deadlines: BTreeSet<DeadlineKey>,
    urgent_at: BTreeSet<DeadlineKey>,
}

impl<C: Copy> FairQueue<C> {
    pub(super) fn new(starvation_limit: Duration) -> FairQueue<C> {
        FairQueue {
            starvation_limit,
            waiting: BTreeMap::new(),
            turns: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            urgent_at: BTreeSet::new(),
        }
    }

    pub(super) fn push(
        &mut self,
        request: BatchRequestId,
        class: C,
        deadline: Option<Instant>,
        (jobs, left): (VecDeque<JobId>, Backlog),
        now: Instant,
    ) {
        let turn = self.turns.first().map_or(0, |(turn, _)| *turn);
        let urgent_at = now + self.starvation_limit;
        self.turns.insert((turn, request));
        self.urgent_at.insert((urgent_at, request));
        self.deadlines.extend(deadline.map(|deadline| (deadline, request)));
        self.waiting.insert(request, FairQueueEntry { class, deadline, urgent_at, turn, jobs, left });
    }

    pub(super) fn remove(&mut self, request: BatchRequestId) -> Option<FairQueueEntry<C>> {
        let waiting = self.waiting.remove(&request)?;
        self.turns.remove(&(waiting.turn, request));
        self.urgent_at.remove(&(waiting.urgent_at, request));
        if let Some(deadline) = waiting.deadline {
            self.deadlines.remove(&(deadline, request));
        }
        Some(waiting)
    }

    /// Accounts for an input of `request` that has started, in its own turn or for another owner.
    pub(super) fn started(&mut self, request: BatchRequestId, tokens: u64) {
        let Some(waiting) = self.waiting.get_mut(&request) else { return };
        waiting.left.tokens -= tokens;
        waiting.left.inputs -= 1;
        if waiting.left.inputs == 0 {
            self.remove(request);
        }
    }

    /// Moves `request` to the next round.
    pub(super) fn finish_turn(&mut self, request: BatchRequestId, now: Instant) {
        let Some(waiting) = self.waiting.get_mut(&request) else { return };
        self.turns.remove(&(waiting.turn, request));
        self.urgent_at.remove(&(waiting.urgent_at, request));
        waiting.turn += 1;
        waiting.urgent_at = now + self.starvation_limit;
        self.turns.insert((waiting.turn, request));
        self.urgent_at.insert((waiting.urgent_at, request));
    }

    /// Returns the first input of `request` that `is_queued` accepts, and drops those before it.
    pub(super) fn front(
        &mut self,
        request: BatchRequestId,
        waits: impl Fn(JobId) -> bool,
    ) -> Option<(JobId, C)> {
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
    pub(super) fn next_turn(&self, after: Option<RoundKey>) -> Option<RoundKey> {
        self.turns.range((after.map_or(Unbounded, Excluded), Unbounded)).next().copied()
    }

    /// Returns the next urgent request: one with a deadline up to `horizon` that `can_meet` accepts, or one past its
    /// starvation limit.
    pub(super) fn next_urgent(
        &self,
        after: Option<DeadlineKey>,
        now: Instant,
        horizon: Option<Instant>,
        can_meet: impl Fn(Instant, Backlog) -> bool,
    ) -> Option<(DeadlineKey, Urgency)> {
        let range = (after.map_or(Unbounded, Excluded), Unbounded);
        let urgent = |due: &&DeadlineKey| horizon.is_none_or(|horizon| due.0 <= horizon);
        let deadline = self.deadlines.range(range).take_while(urgent);
        let deadline =
            deadline.copied().find(|(deadline, request)| can_meet(*deadline, self.waiting[request].left));
        let starved = self.urgent_at.range(range).next().copied().filter(|(ends, _)| *ends <= now);
        match (deadline, starved) {
            (Some(deadline), Some(starved)) if starved < deadline => Some((starved, Urgency::Starvation)),
            (Some(deadline), _) => Some((deadline, Urgency::Deadline)),
            (None, starved) => Some((starved?, Urgency::Starvation)),
        }
    }

    /// Returns the earliest deadline.
    pub(super) fn first_deadline(&self) -> Option<DeadlineKey> {
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

impl<C> FairQueueEntry<C> {
    /// Returns the jobs of its outstanding inputs; some of them may have started.
    pub(super) fn jobs(&self) -> impl Iterator<Item = JobId> + '_ {
        self.jobs.iter().copied()
    }
}
