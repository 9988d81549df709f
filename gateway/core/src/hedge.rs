//! What racing a late answer may cost.
//!
//! A second request beside the first hides a stall that hits one region and not the other, and doubles the work of
//! whoever is merely slow. So it is paid for by requests that were not hedged, two in a hundred, whatever happens: where
//! more than that stall, the rest wait. Nothing is earned by time: a gateway that answers nothing may not hedge.

/// What a request pays in, in thousandths of a hedge: two of a hundred requests are hedged, at most.
const PAID_IN_PERMILLE: u32 = 20;
/// What may be saved up, in hedges: a stall of a region with a handful in flight, not a burst on everybody else.
const SAVED_MAX: u32 = 8;

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
        budget.pay_in();
        assert!(budget.withdraw() && !budget.withdraw());
        (0..10_000).for_each(|_| budget.pay_in());
        assert_eq!((0..100).filter(|_| budget.withdraw()).count(), 8);
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
