//! Token bucket by the generic cell rate algorithm (GCRA; ITU-T I.371, annex A).
//!
//! The state is one instant, *paid until*: the time up to which past charges are paid for by waiting.
//!
//! ```text
//!   now            paid until                 now + burst
//!    │▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░░░░░░░░░░░░░░░░░░░░░░░░░│
//!    │ taken and owed  │ may still be taken        │
//! ```
//!
//! Taking `n` moves *paid until* by `n` times the time that one unit costs, and it may not pass `now + burst`. Time
//! does the refilling, so there is no timer, and concurrent callers share only this one number.
//!
//! More than one burst can never be taken at once, however long the wait, and such a request is rejected for good. The
//! obvious alternative, granting it from a full bucket and waiting off the debt, would undermine the limit: one request
//! of a day's worth would pass.
//!
//! The charge is an estimate; [`TokenBucket::settle`] moves *paid until* to where the real cost would have put it, which may
//! be beyond the burst: computed work is owed.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Units per period, with a burst of at most one period's worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateQuota {
    /// Number of units.
    pub units: NonZeroU64,
    /// Length of the period.
    pub period: Duration,
}

impl RateQuota {
    /// Returns the time in which `units` are refilled.
    fn time_for(self, units: u64) -> Duration {
        let nanos = self.period.as_nanos() * u128::from(units) / u128::from(self.units.get());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Token bucket.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    rate: RateQuota,
    paid_until: Instant,
}

/// Reason why units may not be taken now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortfall {
    /// They may be taken after `wait`, if there are no other charges.
    NotYet {
        /// Wait from now.
        wait: Duration,
    },
    /// They exceed the size of the bucket.
    Never,
}

impl TokenBucket {
    /// Makes a full bucket.
    pub fn new(rate: RateQuota, now: Instant) -> TokenBucket {
        TokenBucket { rate, paid_until: now }
    }

    /// Returns the configured rate.
    pub fn rate(&self) -> RateQuota {
        self.rate
    }

    /// Returns whether `units` may be taken now.
    pub fn check(&self, units: u64, now: Instant) -> Result<(), Shortfall> {
        if units > self.rate.units.get() {
            return Err(Shortfall::Never);
        }
        let wait = (self.owed(now) + self.rate.time_for(units)).saturating_sub(self.rate.period);
        if wait.is_zero() { Ok(()) } else { Err(Shortfall::NotYet { wait }) }
    }

    /// Takes `units`.
    pub fn take(&mut self, units: u64, now: Instant) {
        self.paid_until = now + self.owed(now) + self.rate.time_for(units);
    }

    /// Corrects a charge of `estimate` to `actual`.
    pub fn settle(&mut self, estimate: u64, actual: u64, now: Instant) {
        if actual >= estimate {
            self.take(actual - estimate, now);
        } else {
            let back = self.rate.time_for(estimate - actual);
            self.paid_until = now + self.owed(now).saturating_sub(back);
        }
    }

    /// Returns the units that may be taken now.
    pub fn left(&self, now: Instant) -> u64 {
        let free = self.rate.period.saturating_sub(self.owed(now));
        let units = free.as_nanos() * u128::from(self.rate.units.get()) / self.rate.period.as_nanos().max(1);
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    /// Returns the time until it is full again, without further charges.
    pub fn full_in(&self, now: Instant) -> Duration {
        self.owed(now)
    }

    fn owed(&self, now: Instant) -> Duration {
        self.paid_until.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn per_second(units: u64) -> RateQuota {
        RateQuota { units: NonZeroU64::new(units).unwrap(), period: SECOND }
    }

    #[test]
    fn a_second_s_worth_may_be_taken_at_once_and_one_more_must_wait() {
        let now = some_instant();
        let mut bucket = TokenBucket::new(per_second(10), now);
        for left in (0..10).rev() {
            assert_eq!(bucket.check(1, now), Ok(()));
            bucket.take(1, now);
            assert_eq!(bucket.left(now), left);
        }
        assert_eq!(bucket.check(1, now), Err(Shortfall::NotYet { wait: SECOND / 10 }));
        assert_eq!(bucket.check(1, now + SECOND / 10), Ok(()));
        assert_eq!(bucket.full_in(now), SECOND);
        assert_eq!(bucket.left(now + 60 * SECOND), 10, "the bucket has a maximum");
    }

    #[test]
    fn a_charge_larger_than_the_bucket_is_rejected_for_good_and_usage_is_owed() {
        let now = some_instant();
        let mut bucket = TokenBucket::new(per_second(10), now);
        assert_eq!(bucket.check(10, now), Ok(()), "at the limit");
        assert_eq!(bucket.check(11, now), Err(Shortfall::Never), "one past it");
        assert_eq!(bucket.check(11, now + 60 * SECOND), Err(Shortfall::Never), "waiting does not help");
        bucket.take(10, now);
        bucket.settle(10, 35, now);
        assert_eq!(bucket.check(1, now), Err(Shortfall::NotYet { wait: SECOND * 26 / 10 }));
        assert_eq!(bucket.check(10, now), Err(Shortfall::NotYet { wait: SECOND * 35 / 10 }));
    }

    #[test]
    fn an_estimate_is_settled_both_ways() {
        let now = some_instant();
        let mut bucket = TokenBucket::new(per_second(10), now);
        bucket.take(8, now);
        bucket.settle(8, 3, now);
        assert_eq!(bucket.left(now), 7);
        bucket.settle(3, 9, now);
        assert_eq!(bucket.left(now), 1);
        bucket.settle(9, 0, now + 60 * SECOND);
        assert_eq!(bucket.left(now + 60 * SECOND), 10, "units refilled by time are not returned twice");
    }

    proptest! {
        /// In any period, no more passes than the rate allows and one burst, whatever the requests.
        #[test]
        fn no_more_passes_than_the_rate_and_one_burst(
            rate in 1u64..200,
            steps in prop::collection::vec((1u64..20, 0u64..300), 1..200),
        ) {
            let start = some_instant();
            let (mut now, mut bucket, mut passed) = (start, TokenBucket::new(per_second(rate), start), 0);
            for (units, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                match bucket.check(units, now) {
                    Ok(()) => { bucket.take(units, now); passed += units; }
                    Err(Shortfall::Never) => prop_assert!(units > rate),
                    Err(Shortfall::NotYet { wait }) => {
                        prop_assert!(bucket.check(units, now + wait).is_ok(), "the returned wait is sufficient");
                        prop_assert!(bucket.check(units, now + wait - Duration::from_nanos(1)).is_err(), "and no longer than needed");
                    }
                }
            }
            let allowed = rate as f64 * ((now - start).as_secs_f64() + 1.0);
            prop_assert!(passed as f64 <= allowed + 1e-6, "{passed} of {allowed}");
        }
    }
}
