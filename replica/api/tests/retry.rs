//! Retry and hedge budgets.

use proptest::prelude::*;
use replica_api::retry::{HedgeBudget, RETRIES_PER_SUCCESS, RetryBudget};
use std::time::{Duration, Instant};

#[expect(clippy::disallowed_methods, reason = "the start of a test's time")]
fn some_instant() -> Instant {
    Instant::now()
}

fn drain(budget: &mut RetryBudget, now: Instant) -> u32 {
    (0..).take_while(|_| budget.withdraw(now)).count() as u32
}

#[test]
fn an_idle_client_may_retry_ten_times_and_again_a_second_later() {
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
fn a_retry_without_budget_is_earned_by_time() {
    let now = some_instant();
    let mut budget = RetryBudget::new(now);
    drain(&mut budget, now);
    let wait = budget.time_to_next();
    assert!(wait <= Duration::from_millis(102), "{wait:?}");
    assert!(budget.withdraw(now + wait) && !budget.withdraw(now + wait));
    (0..10).for_each(|_| budget.succeeded());
    assert!(budget.withdraw(now + wait), "ten successes pay for one");
}

#[test]
fn a_share_of_zero_allows_no_retry_and_no_hedge() {
    let now = some_instant();
    let mut retries = RetryBudget::with_share(0.0, now);
    retries.succeeded();
    assert!(!retries.withdraw(now + Duration::from_secs(60)));
    let mut hedges = HedgeBudget::with_share(0.0);
    (0..1000).for_each(|_| hedges.deposit());
    assert!(!hedges.withdraw());
}

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
            let idle = 10.0 * (1.0 + (now - start).as_secs_f64());
            prop_assert!(retries <= successes * RETRIES_PER_SUCCESS + idle + 1e-6);
        }
    }

    #[test]
    fn hedges_never_exceed_their_share(hedge_is_due in prop::collection::vec(any::<bool>(), 1..2000)) {
        let mut budget = HedgeBudget::default();
        let mut hedges = 0;
        for (requests, is_due) in hedge_is_due.iter().enumerate() {
            hedges += usize::from(*is_due && budget.withdraw());
            prop_assert!(hedges * 50 <= requests);
            budget.deposit();
        }
    }
}
