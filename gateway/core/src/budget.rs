//! Evacuation budget, beside the [`RetryBudget`].
//!
//! The loss of a whole region is different from other failures: everything in flight to it must move at once, and that is
//! a single burst. It has a budget of its own, so that an evacuation and ordinary retries do not starve each other.

pub use replica_api::retry::RetryBudget;

use crate::hedge::HedgeBudget;
use crate::outcome::AttemptFailure;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Duration of an evacuation after the loss of a region.
const EVACUATION_DURATION: Duration = Duration::from_secs(3);
/// Evacuations in addition to the requests in flight: for those that were just being sent when the region was lost.
const EVACUATION_MARGIN: u32 = 16;

/// Evacuation budget: requests that may move out of one lost region, as many as were in flight there.
///
/// A rate would not do: the number in flight is the rate times the latency, and a region is slowest just before it is
/// lost.
#[derive(Clone, Debug)]
pub struct EvacuationBudget {
    left: u32,
    until: Instant,
}

impl EvacuationBudget {
    /// Returns the budget of a region that is lost at `now` with `in_flight` requests in flight.
    pub fn open(in_flight: u32, now: Instant) -> EvacuationBudget {
        EvacuationBudget {
            left: in_flight.saturating_add(EVACUATION_MARGIN),
            until: now + EVACUATION_DURATION,
        }
    }

    /// Withdraws one evacuation; returns whether there was one.
    pub fn withdraw(&mut self, now: Instant) -> bool {
        if now > self.until || self.left == 0 {
            return false;
        }
        self.left -= 1;
        true
    }

    /// Returns the number of evacuations that could be withdrawn now.
    pub fn left(&self, now: Instant) -> u32 {
        if now > self.until { 0 } else { self.left }
    }
}

/// Budgets of one process: of an edge for its regions, or of an ingress for its replicas.
#[derive(Clone, Debug)]
pub struct Budgets<K> {
    /// Pays for retries.
    pub retry: RetryBudget,
    /// Pays for hedges. An ingress does not hedge.
    pub hedge: HedgeBudget,
    /// Pays for evacuations; one for each target that was recently lost.
    evacuation: BTreeMap<K, EvacuationBudget>,
}

impl<K: Copy + Ord> Budgets<K> {
    /// Returns the budgets of a process that starts.
    pub fn new(now: Instant) -> Budgets<K> {
        Budgets { retry: RetryBudget::new(now), hedge: HedgeBudget::default(), evacuation: BTreeMap::new() }
    }

    /// Opens an evacuation budget for `target`, whose health got worse: its requests in flight may move. Requests that
    /// have moved already no longer count, so a target that is first suspect and then down, or recovers and fails
    /// again, pays for each once.
    pub fn evacuate(&mut self, target: K, in_flight: u32, now: Instant) {
        self.evacuation.insert(target, EvacuationBudget::open(in_flight, now));
    }

    /// Drops the evacuation budgets of other targets.
    pub fn retain_targets(&mut self, is_retained: impl Fn(K) -> bool) {
        self.evacuation.retain(|target, _| is_retained(*target));
    }

    /// Returns the evacuations left of each recently lost target.
    pub fn evacuations_left(&self, now: Instant) -> impl Iterator<Item = (K, u32)> {
        self.evacuation.iter().map(move |(target, budget)| (*target, budget.left(now)))
    }

    /// Pays for a retry after `failure` at `target`; returns whether there was a balance.
    pub(crate) fn pay(&mut self, failure: AttemptFailure, target: K, now: Instant) -> bool {
        let mut evacuation = || self.evacuation.get_mut(&target).is_some_and(|budget| budget.withdraw(now));
        match failure {
            AttemptFailure::StaleConnection => true,
            AttemptFailure::RegionDown => evacuation(),
            AttemptFailure::FirstByteTimeout => evacuation() || self.retry.withdraw(now),
            AttemptFailure::Unreachable | AttemptFailure::WrongPeer | AttemptFailure::Declined => {
                self.retry.withdraw(now)
            }
            AttemptFailure::DeadlineExceeded | AttemptFailure::ReceiptUnavailable => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    #[test]
    fn an_evacuation_moves_the_requests_in_flight_and_then_ends() {
        let now = some_instant();
        let moved = |mut budget: EvacuationBudget| (0..500).filter(|_| budget.withdraw(now)).count();
        assert_eq!(moved(EvacuationBudget::open(100, now)), 116);
        assert_eq!(moved(EvacuationBudget::open(0, now)), 16);
        let mut late = EvacuationBudget::open(100, now);
        assert_eq!((late.left(now), late.left(now + 2 * EVACUATION_DURATION)), (116, 0));
        assert!(late.withdraw(now + EVACUATION_DURATION));
        assert!(!late.withdraw(now + EVACUATION_DURATION + Duration::from_millis(1)));
    }
}
