//! Budget of hedged requests.
//!
//! A second attempt hides a stall of one region, and doubles the work of a region that is merely slow. So hedges are
//! paid for by requests that were not hedged, two in a hundred under all conditions: where more than that stall, the
//! rest wait. Time adds nothing to the budget: a gateway without responses may not hedge.

/// Deposit of a request, in thousandths of a hedge: at most two of a hundred requests are hedged.
const DEPOSIT_PERMILLE: u32 = 20;
/// Largest balance, in hedges: enough for a stall of a region with a handful in flight, too few for a burst on the
/// others.
const BALANCE_MAX: u32 = 8;

/// Largest queueing time up to which a region counts as lightly loaded: at this wait queueing becomes noticeable beside
/// a response of the same length.
const LIGHT_LOAD_WAIT_MS: f64 = 20.0;

/// Returns whether a region with this queue and speed is lightly loaded. Beyond that a response is late because of the
/// load, and a hedge adds to it. A region whose speed is not known yet counts as lightly loaded.
pub fn is_lightly_loaded(pending_tokens: u64, tokens_per_second: f64) -> bool {
    pending_tokens as f64 * 1e3 <= tokens_per_second * LIGHT_LOAD_WAIT_MS || tokens_per_second <= 0.0
}

/// Hedge budget: hedges as a share of requests.
#[derive(Clone, Debug, Default)]
pub struct HedgeBudget {
    balance_permille: u32,
}

impl HedgeBudget {
    /// Records a request that could have been hedged.
    pub fn deposit(&mut self) {
        self.balance_permille = (self.balance_permille + DEPOSIT_PERMILLE).min(1000 * BALANCE_MAX);
    }

    /// Withdraws one hedge; returns whether there was one.
    pub fn withdraw(&mut self) -> bool {
        let enough = self.balance_permille >= 1000;
        if enough {
            self.balance_permille -= 1000;
        }
        enough
    }

    /// Returns the number of hedges that could be withdrawn now.
    pub fn left(&self) -> u32 {
        self.balance_permille / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn two_of_a_hundred_requests_are_hedged_and_no_more_than_the_balance() {
        let mut budget = HedgeBudget::default();
        assert!(!budget.withdraw());
        (0..49).for_each(|_| budget.deposit());
        assert!(!budget.withdraw());
        assert_eq!(budget.left(), 0);
        budget.deposit();
        assert_eq!(budget.left(), 1);
        assert!(budget.withdraw() && !budget.withdraw());
        (0..10_000).for_each(|_| budget.deposit());
        assert_eq!((0..100).filter(|_| budget.withdraw()).count(), 8);
    }

    #[test]
    fn a_region_is_lightly_loaded_up_to_twenty_milliseconds_of_queue() {
        for (pending, speed, expected) in
            [(0, 1000.0, true), (20, 1000.0, true), (21, 1000.0, false), (9, 0.0, true)]
        {
            assert_eq!(is_lightly_loaded(pending, speed), expected, "{pending} at {speed}");
        }
    }

    proptest! {
        #[test]
        fn hedges_never_exceed_their_share(hedged in prop::collection::vec(any::<bool>(), 1..2000)) {
            let mut budget = HedgeBudget::default();
            let mut hedges = 0;
            for (requests, hedge_is_due) in hedged.iter().enumerate() {
                budget.deposit();
                hedges += usize::from(*hedge_is_due && budget.withdraw());
                prop_assert!(hedges * 50 <= requests + 1);
            }
        }
    }
}
