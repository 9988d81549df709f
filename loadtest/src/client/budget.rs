//! What a second attempt may cost, so that a client in trouble does not double the trouble of its server.
//!
//! A retry is paid for by successes, a hedge too: the shares that the gateway uses for itself, one in ten and one in
//! fifty. A retry that cannot be paid for is not given up but waits: a little is earned by time as well, or a server that is
//! back after a minute of nothing would find nobody left to ask it. A hedge that cannot be paid for is not made.

use std::time::{Duration, Instant};

/// What may be saved up in retries.
const RETRIES_SAVED_MAX: f64 = 100.0;
/// What a client that has had no success yet may retry at once, and earns back within a second.
const RETRIES_IDLE: f64 = 10.0;
/// What may be saved up in hedges.
const HEDGES_SAVED_MAX: f64 = 8.0;

/// Retries, as a share of successes.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    per_success: f64,
    saved: f64,
    topped_up: Instant,
}

impl RetryBudget {
    /// A budget into which each success pays `per_success` of a retry; 0 pays for none at all.
    pub fn new(per_success: f64, now: Instant) -> RetryBudget {
        let saved = if per_success > 0.0 { RETRIES_IDLE } else { 0.0 };
        RetryBudget { per_success, saved, topped_up: now }
    }

    /// A request was answered.
    pub fn succeeded(&mut self) {
        self.saved = (self.saved + self.per_success).min(RETRIES_SAVED_MAX);
    }

    /// Takes one retry out; or says how long it takes until time alone has earned one. `None` if it never will.
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
        // One millisecond more than exact, so that rounding does not make it come back in vain.
        let wait = Duration::from_secs_f64((1.0 - self.saved) / RETRIES_IDLE);
        Err(Some(wait + Duration::from_millis(1)))
    }
}

/// Hedges, as a share of successes.
#[derive(Clone, Debug)]
pub struct HedgeBudget {
    per_success: f64,
    saved: f64,
}

impl HedgeBudget {
    /// A budget into which each success pays `per_success` of a hedge.
    pub fn new(per_success: f64) -> HedgeBudget {
        HedgeBudget { per_success, saved: 0.0 }
    }

    /// A request was answered.
    pub fn succeeded(&mut self) {
        self.saved = (self.saved + self.per_success).min(HEDGES_SAVED_MAX);
    }

    /// Takes one hedge out, if there is one.
    pub fn withdraw(&mut self) -> bool {
        // Fifty times a fiftieth is a little less than one in binary.
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
