//! Budgets of retries and hedged requests, so that a client does not multiply the load of an overloaded server.
//!
//! Successes pay for retries and hedges, with the gateway's own shares: 10 % and 2 %. A retry without budget is not
//! abandoned but delayed: the budget also grows with time, because otherwise no request would be left to probe a server
//! that returns after a minute without successes. A hedge without budget is skipped.

use std::time::{Duration, Instant};

/// Largest balance of the retry budget.
const RETRY_BALANCE_MAX: f64 = 100.0;
/// Initial balance of the retry budget, and the number of retries that time earns per second while the balance is
/// below it.
const RETRY_BALANCE_INITIAL: f64 = 10.0;
/// Largest balance of the hedge budget.
const HEDGE_BALANCE_MAX: f64 = 8.0;

/// Retry budget as a share of successes.
#[derive(Clone, Debug)]
pub struct ClientRetryBudget {
    per_success: f64,
    balance: f64,
    refilled_at: Instant,
}

impl ClientRetryBudget {
    /// Creates a budget into which each success pays `per_success` of a retry; 0 disables retries.
    pub fn new(per_success: f64, now: Instant) -> ClientRetryBudget {
        let balance = if per_success > 0.0 { RETRY_BALANCE_INITIAL } else { 0.0 };
        ClientRetryBudget { per_success, balance, refilled_at: now }
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        self.balance = (self.balance + self.per_success).min(RETRY_BALANCE_MAX);
    }

    /// Withdraws one retry, or returns the time until one is earned by time alone; `None` if the share is 0.
    pub fn withdraw(&mut self, now: Instant) -> Result<(), Option<Duration>> {
        if self.per_success <= 0.0 {
            return Err(None);
        }
        let earned = now.saturating_duration_since(self.refilled_at).as_secs_f64() * RETRY_BALANCE_INITIAL;
        self.refilled_at = self.refilled_at.max(now);
        if self.balance < RETRY_BALANCE_INITIAL {
            self.balance = (self.balance + earned).min(RETRY_BALANCE_INITIAL);
        }
        if self.balance >= 1.0 {
            self.balance -= 1.0;
            return Ok(());
        }
        // One millisecond of margin, so that rounding does not wake the caller too early.
        let wait = Duration::from_secs_f64((1.0 - self.balance) / RETRY_BALANCE_INITIAL);
        Err(Some(wait + Duration::from_millis(1)))
    }
}

/// Hedge budget as a share of successes.
#[derive(Clone, Debug)]
pub struct ClientHedgeBudget {
    per_success: f64,
    balance: f64,
}

impl ClientHedgeBudget {
    /// Creates a budget into which each success pays `per_success` of a hedge.
    pub fn new(per_success: f64) -> ClientHedgeBudget {
        ClientHedgeBudget { per_success, balance: 0.0 }
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        self.balance = (self.balance + self.per_success).min(HEDGE_BALANCE_MAX);
    }

    /// Withdraws one hedge; returns whether the balance sufficed.
    pub fn withdraw(&mut self) -> bool {
        // 50 × 0.02 is slightly less than 1 in binary.
        let enough = self.balance > 1.0 - 1e-9;
        if enough {
            self.balance = (self.balance - 1.0).max(0.0);
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_retry_without_budget_is_delayed_until_earned() {
        let now = Instant::now();
        let mut budget = ClientRetryBudget::new(0.1, now);
        (0..10).for_each(|number| assert_eq!(budget.withdraw(now), Ok(()), "{number}"));
        let wait = budget.withdraw(now).expect_err("ten are spent").expect("time earns one");
        assert!(wait <= Duration::from_millis(102), "{wait:?}");
        assert_eq!(budget.withdraw(now + wait), Ok(()));
        assert!(budget.withdraw(now + wait).is_err());
        (0..10).for_each(|_| budget.succeeded());
        assert_eq!(budget.withdraw(now + wait), Ok(()), "ten successes pay for one");
        (0..100_000).for_each(|_| budget.succeeded());
        let spent = (0..1000).take_while(|_| budget.withdraw(now + wait).is_ok()).count();
        assert_eq!(spent, 100, "no more than the largest balance");
    }

    #[test]
    fn a_share_of_zero_allows_no_retry() {
        let now = Instant::now();
        let mut budget = ClientRetryBudget::new(0.0, now);
        budget.succeeded();
        assert_eq!(budget.withdraw(now + Duration::from_secs(60)), Err(None));
        let mut budget = ClientHedgeBudget::new(0.0);
        (0..1000).for_each(|_| budget.succeeded());
        assert!(!budget.withdraw());
    }

    proptest! {
        #[test]
        fn hedges_never_exceed_their_share(requested in prop::collection::vec(any::<bool>(), 1..2000)) {
            let mut budget = ClientHedgeBudget::new(0.02);
            let mut hedges = 0;
            for (before, wants) in requested.iter().enumerate() {
                hedges += usize::from(*wants && budget.withdraw());
                prop_assert!(hedges * 50 <= before);
                budget.succeeded();
            }
        }
    }
}
