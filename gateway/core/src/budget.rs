//! What a second attempt may cost.
//!
//! Retries turn a small failure into a large one: a region that slows down is asked twice as often. So a retry is
//! paid for from what successes have paid in (the retry budget of Finagle and linkerd: a share of traffic, not a count
//! per request), and one gateway can never add more than that share to the load of the rest.
//!
//! Losing a whole region is different: everything in flight to it must move at once, and that is a burst, once, not a
//! storm. It has a budget of its own, so that an evacuation does not starve ordinary retries nor they it.

use std::time::{Duration, Instant};

/// What a success pays in, as a share of one retry. Finagle and linkerd default to twice this.
const RETRIES_PER_SUCCESS: f64 = 0.10;
/// What may be saved up: about one second of retries at 1,000 requests/s.
const RETRIES_SAVED_MAX: f64 = 100.0;
/// What an idle gateway may spend at once and earns back within a second: without it the first failures after a quiet
/// night could not be retried at all.
const RETRIES_IDLE: f64 = 10.0;

/// Retries, as a share of successes.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    saved: f64,
    topped_up: Instant,
}

impl RetryBudget {
    /// A budget with what an idle gateway has.
    pub fn new(now: Instant) -> RetryBudget {
        RetryBudget { saved: RETRIES_IDLE, topped_up: now }
    }

    /// A request was answered.
    pub fn succeeded(&mut self) {
        self.saved = (self.saved + RETRIES_PER_SUCCESS).min(RETRIES_SAVED_MAX);
    }

    /// Takes one retry out, if there is one.
    pub fn withdraw(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.topped_up).as_secs_f64() * RETRIES_IDLE;
        if self.saved < RETRIES_IDLE {
            self.saved = (self.saved + earned).min(RETRIES_IDLE);
        }
        self.topped_up = self.topped_up.max(now);
        take_one(&mut self.saved)
    }

    /// How many retries could be taken out now.
    pub fn left(&self, now: Instant) -> u32 {
        let mut copy = self.clone();
        (0..).take_while(|_| copy.withdraw(now)).count() as u32
    }
}

/// How long after a loss its evacuation may go on.
const EVACUATION_LASTS: Duration = Duration::from_secs(3);
/// What may be moved beside what was in flight: requests that were on their way to the region when it was lost.
const EVACUATION_MARGIN: u32 = 16;

/// Requests that may move out of one lost region.
///
/// As many as were in flight there. A rate would not do: how many are in flight is the rate times the time that each
/// takes, and a region is slowest just before it is lost.
#[derive(Clone, Debug)]
pub struct EvacuationBudget {
    left: u32,
    until: Instant,
}

impl EvacuationBudget {
    /// The budget for a region that is lost at `now` with `in_flight` requests waiting for it.
    pub fn opened(in_flight: u32, now: Instant) -> EvacuationBudget {
        EvacuationBudget { left: in_flight.saturating_add(EVACUATION_MARGIN), until: now + EVACUATION_LASTS }
    }

    /// Takes one evacuation out, if there is one.
    pub fn withdraw(&mut self, now: Instant) -> bool {
        if now > self.until || self.left == 0 {
            return false;
        }
        self.left -= 1;
        true
    }

    /// How many evacuations could be taken out now.
    pub fn left(&self, now: Instant) -> u32 {
        if now > self.until { 0 } else { self.left }
    }
}

fn take_one(saved: &mut f64) -> bool {
    let enough = *saved >= 1.0;
    if enough {
        *saved -= 1.0;
    }
    debug_assert!(*saved >= 0.0);
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
    fn an_idle_gateway_may_retry_a_little_and_again_a_second_later() {
        let now = some_instant();
        let mut budget = RetryBudget::new(now);
        assert_eq!(budget.left(now), 10);
        assert_eq!(drain(&mut budget, now), 10);
        assert_eq!(drain(&mut budget, now), 0);
        assert_eq!(drain(&mut budget, now + Duration::from_millis(500)), 5);
        assert_eq!(drain(&mut budget, now + Duration::from_secs(60)), 10);
    }

    #[test]
    fn successes_pay_for_a_tenth_of_themselves_and_saving_has_an_end() {
        let now = some_instant();
        let mut budget = RetryBudget::new(now);
        drain(&mut budget, now);
        (0..501).for_each(|_| budget.succeeded());
        assert_eq!(drain(&mut budget, now), 50);
        (0..1_000_000).for_each(|_| budget.succeeded());
        assert_eq!(drain(&mut budget, now), 100);
    }

    #[test]
    fn an_evacuation_moves_what_was_in_flight_and_then_ends() {
        let now = some_instant();
        let moved = |mut budget: EvacuationBudget| (0..500).filter(|_| budget.withdraw(now)).count();
        assert_eq!(moved(EvacuationBudget::opened(100, now)), 116);
        assert_eq!(moved(EvacuationBudget::opened(0, now)), 16);
        let mut late = EvacuationBudget::opened(100, now);
        assert_eq!((late.left(now), late.left(now + 2 * EVACUATION_LASTS)), (116, 0));
        assert!(late.withdraw(now + EVACUATION_LASTS));
        assert!(!late.withdraw(now + EVACUATION_LASTS + Duration::from_millis(1)));
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
