//! What racing a late answer may cost.
//!
//! A second request beside the first hides a stall that hits one region and not the other, and doubles the work of
//! whoever is merely slow. So it is paid for by requests that were not hedged, two in a hundred, whatever happens: where
//! more than that stall, the rest wait. Nothing is earned by time: a gateway that answers nothing may not hedge.

/// What a request pays in, in thousandths of a hedge: two of a hundred requests are hedged, at most.
const PAID_IN_PERMILLE: u32 = 20;
/// What may be saved up, in hedges: a stall of a region with a handful in flight, not a burst on everybody else.
const SAVED_MAX: u32 = 8;

/// The work before a request, in the time that it takes, up to which a region is calm: the wait at which a queue
/// begins to be felt beside an answer of the same length.
const CALM_WAIT_MS: f64 = 20.0;

/// Whether a region that has so many tokens before it and computes so many a second is calm: beyond that an answer is
/// late because of the load, and a second request is more of it. Whose speed is not known yet is not loaded.
pub fn is_calm(pending_tokens: u64, tokens_per_second: f64) -> bool {
    pending_tokens as f64 * 1e3 <= tokens_per_second * CALM_WAIT_MS || tokens_per_second <= 0.0
}

/// Hedges, as a share of requests.
#[derive(Clone, Debug, Default)]
pub struct HedgeBudget {
    saved_permille: u32,
}

impl HedgeBudget {
    /// A request was sent that could have been hedged.
    pub fn pay_in(&mut self) {
        self.saved_permille = (self.saved_permille + PAID_IN_PERMILLE).min(1000 * SAVED_MAX);
    }

    /// Takes one hedge out, if there is one.
    pub fn withdraw(&mut self) -> bool {
        let enough = self.saved_permille >= 1000;
        if enough {
            self.saved_permille -= 1000;
        }
        enough
    }

    /// How many hedges could be taken out now.
    pub fn left(&self) -> u32 {
        self.saved_permille / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn two_of_a_hundred_and_no_more_than_was_saved() {
        let mut budget = HedgeBudget::default();
        assert!(!budget.withdraw());
        (0..49).for_each(|_| budget.pay_in());
        assert!(!budget.withdraw());
        assert_eq!(budget.left(), 0);
        budget.pay_in();
        assert_eq!(budget.left(), 1);
        assert!(budget.withdraw() && !budget.withdraw());
        (0..10_000).for_each(|_| budget.pay_in());
        assert_eq!((0..100).filter(|_| budget.withdraw()).count(), 8);
    }

    #[test]
    fn a_region_is_calm_up_to_a_lookups_wait() {
        for (pending, speed, calm) in
            [(0, 1000.0, true), (20, 1000.0, true), (21, 1000.0, false), (9, 0.0, true)]
        {
            assert_eq!(is_calm(pending, speed), calm, "{pending} at {speed}");
        }
    }

    proptest! {
        #[test]
        fn hedges_never_exceed_their_share(hedged in prop::collection::vec(any::<bool>(), 1..2000)) {
            let mut budget = HedgeBudget::default();
            let mut hedges = 0;
            for (requests, wants) in hedged.iter().enumerate() {
                budget.pay_in();
                hedges += usize::from(*wants && budget.withdraw());
                prop_assert!(hedges * 50 <= requests + 1);
            }
        }
    }
}
