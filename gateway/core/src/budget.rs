//! Retry budget and evacuation budget.
//!
//! Retries turn a small failure into a large one: a region that slows down gets twice the requests. So a retry is paid
//! for by successful requests (the retry budget of Finagle and linkerd: a share of traffic, not a count per request),
//! and one gateway can never add more than that share to the load of the regions.
//!
//! The loss of a whole region is different: everything in flight to it must move at once, and that is a single burst.
//! It has a budget of its own, so that an evacuation and ordinary retries do not starve each other.

use crate::hedge::HedgeBudget;
use crate::outcome::AttemptFailure;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Deposit of a success, as a share of one retry. Finagle and linkerd default to twice this.
const RETRIES_PER_SUCCESS: f64 = 0.10;
/// Largest balance: about one second of retries at 1,000 requests/s.
const RETRY_BALANCE_MAX: f64 = 100.0;
/// Retries that an idle gateway may spend at once and regains within a second: without them the first failures after an
/// idle period could not be retried at all.
const RETRIES_IDLE: f64 = 10.0;

/// Retry budget: retries as a share of successes.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    balance: f64,
    topped_up: Instant,
}

impl RetryBudget {
    /// Returns the budget of an idle gateway.
    pub fn new(now: Instant) -> RetryBudget {
        RetryBudget { balance: RETRIES_IDLE, topped_up: now }
    }

    /// Records a successful request.
    pub fn succeeded(&mut self) {
        self.balance = (self.balance + RETRIES_PER_SUCCESS).min(RETRY_BALANCE_MAX);
    }

    /// Withdraws one retry; returns whether there was one.
    pub fn withdraw(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.topped_up).as_secs_f64() * RETRIES_IDLE;
        if self.balance < RETRIES_IDLE {
            self.balance = (self.balance + earned).min(RETRIES_IDLE);
        }
        self.topped_up = self.topped_up.max(now);
        take_one(&mut self.balance)
    }

    /// Returns the number of retries that could be withdrawn now.
    pub fn left(&self, now: Instant) -> u32 {
        let mut copy = self.clone();
        (0..).take_while(|_| copy.withdraw(now)).count() as u32
    }
}

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

fn take_one(balance: &mut f64) -> bool {
    let enough = *balance >= 1.0;
    if enough {
        *balance -= 1.0;
    }
    debug_assert!(*balance >= 0.0);
    enough
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    fn drain(budget: &mut RetryBudget, now: Instant) -> u32 {
        (0..).take_while(|_| budget.withdraw(now)).count() as u32
    }

    #[test]
    fn an_idle_gateway_may_retry_ten_times_and_again_a_second_later() {
        let now = some_instant();
        let mut budget = RetryBudget::new(now);
        assert_eq!(budget.left(now), 10);
        assert_eq!(drain(&mut budget, now), 10);
        assert_eq!(drain(&mut budget, now), 0);
        assert_eq!(drain(&mut budget, now + Duration::from_millis(500)), 5);
        assert_eq!(drain(&mut budget, now + Duration::from_secs(60)), 10);
    }

    #[test]
    fn successes_deposit_a_tenth_of_a_retry_up_to_the_largest_balance() {
        let now = some_instant();
        let mut budget = RetryBudget::new(now);
        drain(&mut budget, now);
        (0..501).for_each(|_| budget.succeeded());
        assert_eq!(drain(&mut budget, now), 50);
        (0..1_000_000).for_each(|_| budget.succeeded());
        assert_eq!(drain(&mut budget, now), 100);
    }

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

    proptest! {
        #[test]
        fn retries_never_exceed_their_share(steps in prop::collection::vec((any::<bool>(), 0u64..50), 1..400)) {
            let start = some_instant();
            let (mut now, mut budget) = (start, RetryBudget::new(start));
            let (mut successes, mut retries) = (0.0, 0.0);
            for (succeed, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                if succeed {
                    budget.succeeded();
                    successes += 1.0;
                } else if budget.withdraw(now) {
                    retries += 1.0;
                }
                let idle = RETRIES_IDLE * (1.0 + (now - start).as_secs_f64());
                prop_assert!(retries <= successes * RETRIES_PER_SUCCESS + idle + 1e-6);
            }
        }
    }
}
