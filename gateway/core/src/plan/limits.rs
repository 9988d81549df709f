//! Limits of all attempts of one request, at the edge and at the ingress: the deadline, one retry of each kind, and the maximum
//! number of attempts.

use crate::budget::Budgets;
use crate::instances::InstanceIndex;
use crate::outcome::AttemptFailure;
use std::time::{Duration, Instant};

/// Deadline, attempts and retries of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetryLimits {
    pub(super) deadline: Instant,
    attempts: u32,
    attempts_max: u32,
    /// Kinds of retries that are allowed once and were used.
    retry: bool,
    first_byte: bool,
    evacuation: bool,
    /// The attempt at another instance of the same region.
    instance: bool,
}

/// Attempt in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningAttempt<K> {
    pub(super) target: K,
    /// Instance of the region; `None` for a replica.
    pub(super) instance: Option<InstanceIndex>,
    pub(super) sent: Instant,
    pub(super) first_byte_deadline: Option<Instant>,
    pub(super) timed_out: bool,
}

impl<K> RunningAttempt<K> {
    /// Returns whether the first-byte timeout has expired at `now`; true once.
    pub(super) fn times_out(&mut self, now: Instant) -> bool {
        let is_expired = self.timer().is_some_and(|at| now >= at);
        self.timed_out |= is_expired;
        is_expired
    }

    /// Returns the first-byte deadline, until it has expired.
    pub(super) fn timer(&self) -> Option<Instant> {
        self.first_byte_deadline.filter(|_| !self.timed_out)
    }
}

impl RetryLimits {
    pub(super) fn new(deadline: Instant, attempts_max: u32) -> RetryLimits {
        RetryLimits {
            deadline,
            attempts: 0,
            attempts_max,
            retry: false,
            first_byte: false,
            evacuation: false,
            instance: false,
        }
    }

    pub(super) fn is_past_deadline(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    /// Returns the time until the deadline.
    pub(super) fn time_left(&self, now: Instant) -> Duration {
        self.deadline.saturating_duration_since(now)
    }

    /// Returns the number of attempts so far.
    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Returns whether the retry after a lost target was used.
    pub(super) fn has_evacuated(&self) -> bool {
        self.evacuation
    }

    /// Counts the next attempt and returns its number, from 1.
    pub(super) fn count_attempt(&mut self) -> u32 {
        self.attempts += 1;
        assert!(
            self.attempts <= self.attempts_max,
            "each kind of retry has a maximum (invariant 6, Bounded)"
        );
        self.attempts
    }

    /// Returns whether a retry after `failure` is still allowed.
    pub(super) fn allows(&self, failure: AttemptFailure) -> bool {
        let mut copy = *self;
        !*copy.used(failure)
    }

    /// Uses the retry after `failure` without payment; returns whether it was allowed.
    pub(super) fn use_once(&mut self, failure: AttemptFailure) -> bool {
        !std::mem::replace(self.used(failure), true)
    }

    /// Pays for the retry after `failure` at `target`; returns whether it was allowed and paid.
    pub(super) fn withdraw<K: Copy + Ord>(
        &mut self,
        failure: AttemptFailure,
        target: K,
        budgets: &mut Budgets<K>,
        now: Instant,
    ) -> bool {
        let used = self.used(failure);
        let is_paid = !*used && budgets.pay(failure, target, now);
        *used |= is_paid;
        is_paid
    }

    /// Returns whether the attempt at another instance was not used.
    pub(super) fn allows_instance(&self) -> bool {
        !self.instance
    }

    /// Pays for the attempt at another instance of `target`; returns whether it was allowed and paid.
    pub(super) fn withdraw_instance<K: Copy + Ord>(
        &mut self,
        target: K,
        budgets: &mut Budgets<K>,
        now: Instant,
    ) -> bool {
        let is_paid = !self.instance && budgets.pay(AttemptFailure::FirstByteTimeout, target, now);
        self.instance |= is_paid;
        is_paid
    }

    fn used(&mut self, failure: AttemptFailure) -> &mut bool {
        match failure {
            AttemptFailure::RegionDown => &mut self.evacuation,
            AttemptFailure::FirstByteTimeout => &mut self.first_byte,
            AttemptFailure::StaleConnection
            | AttemptFailure::Unreachable
            | AttemptFailure::WrongPeer
            | AttemptFailure::Declined
            | AttemptFailure::DeadlineExceeded
            | AttemptFailure::ReceiptUnavailable => &mut self.retry,
        }
    }
}
