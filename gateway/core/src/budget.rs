//! Evacuation budget, beside the [`RetryBudget`].
//!
//! The loss of a whole region is different from other failures: everything in flight to it must move at once, and that is
//! a single burst. It has a budget of its own, so that an evacuation and ordinary retries do not starve each other.

pub use replica_api::retry::RetryBudget;

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
