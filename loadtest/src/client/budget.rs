//! Budgets of retries and hedged requests, so that a client does not multiply the load of an overloaded server.
//!
//! Successes pay for retries and hedges, with the gateway's own shares: 10 % and 2 %. A retry without budget is not
//! abandoned but delayed: the budget also grows with time, because otherwise no request would be left to probe a server
//! that returns after a minute without successes. A hedge without budget is skipped.

use std::time::{Duration, Instant};

/// Largest balance of the retry budget.
const RETRIES_SAVED_MAX: f64 = 100.0;
/// Initial balance of the retry budget, and the number of retries that time earns per second while the balance is below it.
const RETRIES_IDLE: f64 = 10.0;
/// Largest balance of the hedge budget.
const HEDGES_SAVED_MAX: f64 = 8.0;

/// Retry budget as a share of successes.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    per_success: f64,
    saved: f64,
    topped_up: Instant,
}

impl RetryBudget {
    /// Creates a budget into which each success pays `per_success` of a retry; 0 disables retries.
    pub fn new(per_success: f64, now: Instant) -> RetryBudget {
        let saved = if per_success > 0.0 { RETRIES_IDLE } else { 0.0 };
        RetryBudget { per_success, saved, topped_up: now }
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        self.saved = (self.saved + self.per_success).min(RETRIES_SAVED_MAX);
    }

    /// Withdraws one retry, or returns the time until one is earned by time alone; `None` if the share is 0.
    pub fn withdraw(&mut self, now: Instant) -> Result<(), Option<Duration>> {
        if self.per_success <= 0.0 {
            return Err(None);
        }
        let earned = now.saturating_duration_since(self.topped_up).as_secs_f64() * RETRIES_IDLE;
        self.topped_up = self.topped_up.max(now);
        if self.saved < RETRIES_IDLE {
            self.saved = (self.saved + earned).min(RETRIES_IDLE);
        }
        if self.saved >= 1.0 {
            self.saved -= 1.0;
            return Ok(());
        }
        // One millisecond of margin, so that rounding does not wake the caller too early.
        let wait = Duration::from_secs_f64((1.0 - self.saved) / RETRIES_IDLE);
        Err(Some(wait + Duration::from_millis(1)))
    }
}

/// Hedge budget as a share of successes.
#[derive(Clone, Debug)]
pub struct HedgeBudget {
    per_success: f64,
    saved: f64,
}

impl HedgeBudget {
    /// Creates a budget into which each success pays `per_success` of a hedge.
    pub fn new(per_success: f64) -> HedgeBudget {
        HedgeBudget { per_success, saved: 0.0 }
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        self.saved = (self.saved + self.per_success).min(HEDGES_SAVED_MAX);
    }

    /// Withdraws one hedge; returns whether the balance sufficed.
    pub fn withdraw(&mut self) -> bool {
        // 50 × 0.02 is slightly less than 1 in binary.
        let enough = self.saved > 1.0 - 1e-9;
        if enough {
            self.saved = (self.saved - 1.0).max(0.0);
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_was_not_earned_waits_and_then_is_paid() {
        let now = Instant::now();
        let mut budget = RetryBudget::new(0.1, now);
        (0..10).for_each(|number| assert_eq!(budget.withdraw(now), Ok(()), "{number}"));
        let wait = budget.withdraw(now).expect_err("ten are spent").expect("time earns one");
        assert!(wait <= Duration::from_millis(102), "{wait:?}");
        assert_eq!(budget.withdraw(now + wait), Ok(()));
        assert!(budget.withdraw(now + wait).is_err());
        (0..10).for_each(|_| budget.succeeded());
        assert_eq!(budget.withdraw(now + wait), Ok(()), "ten successes pay for one");
        (0..100_000).for_each(|_| budget.succeeded());
        let spent = (0..1000).take_while(|_| budget.withdraw(now + wait).is_ok()).count();
        assert_eq!(spent, 100, "no more than may be saved up");
    }

    #[test]
    fn a_share_of_nothing_pays_for_nothing() {
        let now = Instant::now();
        let mut budget = RetryBudget::new(0.0, now);
        budget.succeeded();
        assert_eq!(budget.withdraw(now + Duration::from_secs(60)), Err(None));
        let mut budget = HedgeBudget::new(0.0);
        (0..1000).for_each(|_| budget.succeeded());
        assert!(!budget.withdraw());
    }

    proptest! {
        #[test]
        fn hedges_never_exceed_their_share(wanted in prop::collection::vec(any::<bool>(), 1..2000)) {
            let mut budget = HedgeBudget::new(0.02);
            let mut hedges = 0;
            for (before, wants) in wanted.iter().enumerate() {
                hedges += usize::from(*wants && budget.withdraw());
                prop_assert!(hedges * 50 <= before);
                budget.succeeded();
            }
        }
    }
}
