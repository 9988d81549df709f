//! Retry state machine of one request at an ingress: its attempts at replicas, until there is a response or an error.
//!
//! The rules are those of the edge's plan ([`super`]) where the two agree: one deadline, each kind of retry once, a first-byte
//! timeout that is no failure, and evacuations and timeouts paid from [`Budgets`]. An ingress differs in three respects. Its
//! targets have no order of preference: the spoke selects a replica for each attempt, by the load at that time. A replica
//! that cannot be reached costs no other replica work, so the one retry that follows is free. And where no replica is ready the
//! request may be held, after which every replica may be selected again.
//!
//! | event | next step | paid from |
//! |---|---|---|
//! | stale connection | the same replica, once for each attempt | free: the replica has not seen the request |
//! | unreachable | another replica, once | free |
//! | first-byte timeout | another replica that is not ejected, once | its evacuation budget if there is one, else the retry budget |
//! | response of another model than reported | another replica | free, at most [`REVISION_CHANGES_MAX`] times |
//! | no replica | hold the request, if one may become ready | |
//! | released | any replica, also one that was attempted | |
//! | deadline exceeded | none: error | |

use super::limits::{RetryLimits, RunningAttempt};
use crate::budget::Budgets;
use crate::outcome::AttemptFailure;
use std::time::{Duration, Instant};

/// Maximum number of responses of one request that are discarded because the replica runs another model than it reported: all
/// replicas of a large region were restarted since their last status.
pub const REVISION_CHANGES_MAX: u32 = 16;
/// Maximum attempts of one request: the first, one retry of each kind, and the discarded ones.
pub const ATTEMPTS_MAX: u32 = 3 + REVISION_CHANGES_MAX;

/// Next action for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaStep {
    /// Select a replica that was not [attempted](ReplicaPlan::attempted).
    Select,
    /// Hold the request until a replica is ready.
    Hold,
    /// Send the request to the selected replica, or to the same one again.
    Send,
    /// Wait for the attempt in flight.
    Wait,
    /// Respond that there is no replica for the request.
    NoReplica,
    /// Respond that the replica did not respond.
    Failed(AttemptFailure),
}

/// Retry state of one request.
#[derive(Clone, Debug)]
pub struct ReplicaPlan<K> {
    attempted: Vec<K>,
    running: Option<RunningAttempt<K>>,
    /// Whether the attempt in flight was replayed after a stale connection.
    is_replayed: bool,
    /// Whether the request was held, and released for the next selection.
    is_released: bool,
    revision_changes: u32,
    limits: RetryLimits,
}

impl<K: Copy + Ord> ReplicaPlan<K> {
    /// Makes a plan until `deadline`. Its first step is [`ReplicaStep::Select`].
    pub fn new(deadline: Instant) -> ReplicaPlan<K> {
        ReplicaPlan {
            attempted: Vec::new(),
            running: None,
            is_replayed: false,
            is_released: false,
            revision_changes: 0,
            limits: RetryLimits::new(deadline, ATTEMPTS_MAX),
        }
    }

    /// Returns the replicas that are not selected again.
    pub fn attempted(&self) -> &[K] {
        &self.attempted
    }

    /// Returns whether the request was sent to a replica or released to one before, so that it need not queue behind held
    /// requests.
    pub fn has_waited(&self) -> bool {
        self.is_released || !self.attempted.is_empty()
    }

    /// Returns the deadline of the request.
    pub fn deadline(&self) -> Instant {
        self.limits.deadline
    }

    /// Records the selected replica, and its first-byte timeout if it has one.
    pub fn selected(&mut self, replica: K, first_byte: Option<Duration>, now: Instant) {
        self.limits.count_attempt();
        self.attempted.push(replica);
        (self.is_replayed, self.is_released) = (false, false);
        let first_byte_deadline = first_byte.map(|after| now + after);
        self.running = Some(RunningAttempt {
            target: replica,
            instance: None,
            sent: now,
            first_byte_deadline,
            timed_out: false,
        });
    }

    /// Returns the step after no replica was selected; `may_become_ready`: one may be, so that the request can be held.
    pub fn not_selected(&mut self, may_become_ready: bool) -> ReplicaStep {
        self.is_released = false;
        if may_become_ready { ReplicaStep::Hold } else { ReplicaStep::NoReplica }
    }

    /// Returns the step after the request was not held because a replica is ready: it became ready at this moment, unless it is
    /// one that was attempted.
    pub fn not_held(&self) -> ReplicaStep {
        if self.attempted.is_empty() { ReplicaStep::Select } else { ReplicaStep::NoReplica }
    }

    /// Returns the step after the hold. The replicas that are ready now are different ones, or have recovered.
    pub fn released(&mut self) -> ReplicaStep {
        self.attempted.clear();
        self.is_released = true;
        ReplicaStep::Select
    }

    /// Returns when the first-byte timeout of the attempt in flight expires.
    pub fn next_timer(&self) -> Option<Instant> {
        self.running.as_ref().and_then(RunningAttempt::timer)
    }

    /// Records that the first-byte timeout has expired. Returns whether another replica may take over.
    pub fn first_byte_timed_out(&mut self, now: Instant) -> bool {
        let expired = self.running.as_mut().is_some_and(|running| running.times_out(now));
        expired && self.limits.allows(AttemptFailure::FirstByteTimeout)
    }

    /// Returns the step after a replica was found that could take over: send the request there, with the attempt in flight
    /// cancelled, or wait, if the budgets do not allow it. The caller records the replica with [`ReplicaPlan::selected`].
    pub fn take_over(&mut self, budgets: &mut Budgets<K>, now: Instant) -> ReplicaStep {
        let silent = self.running.as_ref().map(|running| running.target);
        let is_paid = silent.is_some_and(|silent| {
            self.limits.withdraw(AttemptFailure::FirstByteTimeout, silent, budgets, now)
        });
        if is_paid { ReplicaStep::Send } else { ReplicaStep::Wait }
    }

    /// Returns the step after the attempt in flight failed, and the failure to record about the replica; none after a stale
    /// connection, which says nothing about it.
    pub fn failed(&mut self, failure: AttemptFailure, now: Instant) -> (ReplicaStep, Option<AttemptFailure>) {
        if failure == AttemptFailure::StaleConnection
            && !self.limits.is_past_deadline(now)
            && !std::mem::replace(&mut self.is_replayed, true)
        {
            return (ReplicaStep::Send, None);
        }
        self.running = None;
        // A second stale connection in a row: the replica closes every connection.
        let failure = match failure {
            AttemptFailure::StaleConnection => AttemptFailure::Unreachable,
            failure => failure,
        };
        let step = if failure == AttemptFailure::DeadlineExceeded || self.limits.is_past_deadline(now) {
            ReplicaStep::Failed(AttemptFailure::DeadlineExceeded)
        } else if self.limits.use_once(failure) {
            ReplicaStep::Select
        } else {
            ReplicaStep::Failed(failure)
        };
        (step, Some(failure))
    }

    /// Returns the step after a response of another model than the replica had reported; the response is discarded.
    pub fn revision_changed(&mut self) -> ReplicaStep {
        self.running = None;
        self.revision_changes += 1;
        if self.revision_changes > REVISION_CHANGES_MAX {
            ReplicaStep::NoReplica
        } else {
            ReplicaStep::Select
        }
    }

    /// Records the response; returns whether it met the first-byte timeout.
    pub fn responded(&mut self) -> bool {
        self.running.take().is_some_and(|running| !running.timed_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use AttemptFailure::{DeadlineExceeded, FirstByteTimeout, StaleConnection, Unreachable};
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn plan() -> (ReplicaPlan<usize>, Budgets<usize>, Instant) {
        let now = some_instant();
        (ReplicaPlan::new(now + 1000 * MS), Budgets::new(now), now)
    }

    /// Plan whose request was sent to replica 0, with a first-byte timeout of 100 ms.
    fn sent() -> (ReplicaPlan<usize>, Budgets<usize>, Instant) {
        let (mut plan, budgets, now) = plan();
        plan.selected(0, Some(100 * MS), now);
        (plan, budgets, now)
    }

    #[test]
    fn a_replica_that_cannot_be_reached_is_replaced_once_without_payment() {
        let (mut plan, _, now) = sent();
        assert_eq!(plan.failed(Unreachable, now), (ReplicaStep::Select, Some(Unreachable)));
        assert!(plan.has_waited() && plan.attempted() == [0]);
        plan.selected(1, None, now);
        assert_eq!(plan.failed(Unreachable, now), (ReplicaStep::Failed(Unreachable), Some(Unreachable)));
    }

    #[test]
    fn a_stale_connection_is_replayed_once_for_each_attempt_and_keeps_the_first_byte_timeout() {
        let (mut plan, _, now) = sent();
        assert_eq!(plan.failed(StaleConnection, now), (ReplicaStep::Send, None));
        assert_eq!(plan.next_timer(), Some(now + 100 * MS));
        assert_eq!(plan.failed(StaleConnection, now), (ReplicaStep::Select, Some(Unreachable)));
        plan.selected(1, None, now);
        assert_eq!(plan.failed(StaleConnection, now), (ReplicaStep::Send, None));
        assert!(plan.responded());
    }

    #[test]
    fn a_replica_takes_over_once_after_a_first_byte_timeout_if_the_budget_allows_it() {
        let (mut plan, mut budgets, now) = sent();
        assert!(!plan.first_byte_timed_out(now + 99 * MS));
        let late = now + 100 * MS;
        assert!(plan.first_byte_timed_out(late));
        assert_eq!(plan.next_timer(), None, "a timeout expires once");
        assert_eq!(plan.take_over(&mut budgets, late), ReplicaStep::Send);
        plan.selected(1, Some(100 * MS), late);
        assert!(!plan.first_byte_timed_out(late + 100 * MS), "the second one waits");
        assert!(!plan.responded(), "the response came after the timeout");

        let (mut plan, mut budgets, now) = sent();
        while budgets.retry.withdraw(now + 1000 * MS) {}
        assert!(plan.first_byte_timed_out(now + 100 * MS));
        assert_eq!(plan.take_over(&mut budgets, now + 100 * MS), ReplicaStep::Wait);
        budgets.evacuate(0, 0, now);
        assert_eq!(plan.take_over(&mut budgets, now + 100 * MS), ReplicaStep::Send, "an evacuation");
    }

    #[test]
    fn a_failure_after_a_take_over_is_retried_as_well() {
        let (mut plan, mut budgets, now) = sent();
        assert!(plan.first_byte_timed_out(now + 100 * MS));
        assert_eq!(plan.take_over(&mut budgets, now + 100 * MS), ReplicaStep::Send);
        plan.selected(1, None, now + 100 * MS);
        assert_eq!(plan.failed(Unreachable, now + 100 * MS).0, ReplicaStep::Select);
    }

    #[test]
    fn nothing_is_retried_after_the_deadline() {
        for failure in [Unreachable, StaleConnection, DeadlineExceeded] {
            let (mut plan, _, now) = sent();
            assert_eq!(plan.failed(failure, now + 1000 * MS).0, ReplicaStep::Failed(DeadlineExceeded));
        }
        let (mut plan, _, now) = sent();
        assert_eq!(plan.failed(DeadlineExceeded, now).0, ReplicaStep::Failed(DeadlineExceeded));
    }

    #[test]
    fn a_released_request_may_be_sent_to_a_replica_that_failed_before() {
        let (mut plan, _, now) = sent();
        assert_eq!(plan.failed(Unreachable, now).0, ReplicaStep::Select);
        assert_eq!(plan.not_selected(true), ReplicaStep::Hold);
        assert_eq!(plan.not_held(), ReplicaStep::NoReplica, "the ready one is the one that failed");
        assert_eq!(plan.released(), ReplicaStep::Select);
        assert!(plan.attempted().is_empty() && plan.has_waited());
        assert_eq!(plan.not_selected(false), ReplicaStep::NoReplica);
    }

    #[test]
    fn a_request_that_was_never_sent_waits_behind_held_ones() {
        let (mut plan, ..) = plan();
        assert!(!plan.has_waited());
        assert_eq!(plan.not_selected(true), ReplicaStep::Hold);
        assert_eq!(plan.not_held(), ReplicaStep::Select, "a replica became ready at this moment");
        assert_eq!(plan.released(), ReplicaStep::Select);
        assert!(plan.has_waited());
        assert_eq!(plan.not_selected(true), ReplicaStep::Hold);
        assert!(!plan.has_waited(), "it gave up its position");
    }

    #[test]
    fn responses_of_another_model_are_discarded_up_to_the_limit_and_not_once_more() {
        let (mut plan, _, now) = plan();
        for number in 0..REVISION_CHANGES_MAX as usize {
            plan.selected(number, None, now);
            assert_eq!(plan.revision_changed(), ReplicaStep::Select);
        }
        plan.selected(99, None, now);
        assert_eq!(plan.revision_changed(), ReplicaStep::NoReplica);
    }

    proptest! {
        /// A request ends after any events: attempts are bounded, no replica is attempted twice without a hold between, and
        /// each first-byte retry is paid for.
        #[test]
        fn every_request_ends_within_its_attempts(
            events in prop::collection::vec((0u8..6, 0u32..200), 0..200),
            balance in 0usize..12,
        ) {
            let (mut plan, mut budgets, mut now) = plan();
            let spare = (0..).take_while(|_| budgets.retry.withdraw(now)).count();
            (0..10 * balance.min(spare)).for_each(|_| budgets.retry.succeeded());
            let (mut attempts, mut paid, mut replica) = (0u32, 0, 0);
            let mut step = ReplicaStep::Select;
            for (event, millis) in events {
                now += millis * MS;
                let left = budgets.retry.left(now);
                step = match step {
                    ReplicaStep::Select if event == 5 => plan.not_selected(true),
                    ReplicaStep::Select => {
                        prop_assert!(!plan.attempted().contains(&replica));
                        plan.selected(replica, Some(50 * MS), now);
                        (attempts, replica) = (attempts + 1, replica + 1);
                        ReplicaStep::Send
                    }
                    ReplicaStep::Hold if event == 0 => plan.not_held(),
                    ReplicaStep::Hold => {
                        replica = 0;
                        plan.released()
                    }
                    ReplicaStep::Send | ReplicaStep::Wait => match event {
                        0 => plan.failed(Unreachable, now).0,
                        1 => plan.failed(StaleConnection, now).0,
                        2 => plan.revision_changed(),
                        3 if plan.first_byte_timed_out(now) => match plan.take_over(&mut budgets, now) {
                            ReplicaStep::Send => {
                                prop_assert_eq!(budgets.retry.left(now) + 1, left);
                                plan.selected(replica, Some(50 * MS), now);
                                (attempts, replica, paid) = (attempts + 1, replica + 1, paid + 1);
                                ReplicaStep::Send
                            }
                            step => step,
                        },
                        4 => {
                            plan.responded();
                            break;
                        }
                        _ => ReplicaStep::Wait,
                    },
                    ReplicaStep::NoReplica | ReplicaStep::Failed(_) => break,
                };
                prop_assert!(attempts <= ATTEMPTS_MAX && paid <= 1);
            }
            prop_assert_ne!(step, ReplicaStep::Failed(FirstByteTimeout), "a timeout is no failure");
        }
    }
}
