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
//! A bucket may hold a [share](TokenBucket::set_share) of its rate: it refills with this share of the rate, and its burst is
//! this share of a period's worth. A charge within the whole burst but beyond that of the share passes when the bucket is
//! full, and is paid off by waiting: otherwise a gateway with a small share could serve no large request at all.
//!
//! The charge is an estimate; [`TokenBucket::settle`] moves *paid until* to where the real cost would have put it, which may
//! be beyond the burst: computed work is owed.

use regions::tenant::LimitShare;
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

/// Token bucket.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    rate: RateQuota,
    share: LimitShare,
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
        TokenBucket { rate, share: LimitShare::WHOLE, paid_until: now }
    }

    /// Makes a full bucket of a share of this rate.
    pub fn with_share(rate: RateQuota, share: LimitShare, now: Instant) -> TokenBucket {
        TokenBucket { share, ..TokenBucket::new(rate, now) }
    }

    /// Replaces the share. Units that may be taken now stay as they are, up to the new burst, and so do owed units: a larger
    /// share is not paid out at once, because another bucket has used it up to now.
    pub fn set_share(&mut self, share: LimitShare, now: Instant) {
        if share == self.share {
            return;
        }
        let rescaled = |time: Duration| {
            let nanos =
                time.as_nanos() * u128::from(self.share.millionths()) / u128::from(share.millionths());
            Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        };
        let (owed, period) = (self.owed(now), self.rate.period);
        self.paid_until = match owed.checked_sub(period) {
            Some(debt) => now + period + rescaled(debt),
            None => now + period.saturating_sub(rescaled(period - owed)),
        };
        self.share = share;
    }

    /// Returns the time in which `units` are refilled.
    fn time_for(&self, units: u64) -> Duration {
        let whole = self.rate.period.as_nanos() * u128::from(units) / u128::from(self.rate.units.get());
        let nanos = whole.saturating_mul(u128::from(LimitShare::WHOLE.millionths()))
            / u128::from(self.share.millionths());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
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
        let allowed = self.rate.period.saturating_sub(self.time_for(units));
        let wait = self.owed(now).saturating_sub(allowed);
        if wait.is_zero() { Ok(()) } else { Err(Shortfall::NotYet { wait }) }
    }

    /// Takes `units`.
    pub fn take(&mut self, units: u64, now: Instant) {
        self.paid_until = now + self.owed(now) + self.time_for(units);
    }

    /// Corrects a charge of `estimate` to `actual`.
    pub fn settle(&mut self, estimate: u64, actual: u64, now: Instant) {
        if actual >= estimate {
            self.take(actual - estimate, now);
        } else {
            let back = self.time_for(estimate - actual);
            self.paid_until = now + self.owed(now).saturating_sub(back);
        }
    }

    /// Returns the units that may be taken now.
    pub fn left(&self, now: Instant) -> u64 {
        let free = self.rate.period.saturating_sub(self.owed(now));
        let refilled = free.as_nanos() * u128::from(self.rate.units.get());
        let units = refilled.saturating_mul(self.share.millionths().into())
            / (self.rate.period.as_nanos().max(1) * u128::from(LimitShare::WHOLE.millionths()));
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

    fn share(millionths: u32) -> LimitShare {
        LimitShare::new(millionths).unwrap()
    }

    #[test]
    fn a_share_has_its_part_of_the_rate_and_of_the_burst() {
        let now = some_instant();
        let mut bucket = TokenBucket::with_share(per_second(100), share(250_000), now);
        assert_eq!(bucket.left(now), 25);
        bucket.take(25, now);
        assert_eq!(bucket.check(1, now), Err(Shortfall::NotYet { wait: SECOND / 25 }));
        assert_eq!(bucket.left(now + SECOND / 5), 5);
    }

    #[test]
    fn a_charge_beyond_the_burst_of_the_share_passes_a_full_bucket_and_is_paid_off() {
        let now = some_instant();
        let mut bucket = TokenBucket::with_share(per_second(100), share(10_000), now);
        assert_eq!(bucket.check(101, now), Err(Shortfall::Never), "the limit of the tenant stays");
        assert_eq!(bucket.check(50, now), Ok(()));
        bucket.take(50, now);
        assert_eq!(bucket.check(1, now), Err(Shortfall::NotYet { wait: 50 * SECOND }));
        bucket.set_share(share(500_000), now);
        assert_eq!(bucket.check(1, now), Err(Shortfall::NotYet { wait: SECOND }), "49 units are owed");
    }

    #[test]
    fn a_changed_share_pays_out_nothing_at_once() {
        let now = some_instant();
        let mut bucket = TokenBucket::with_share(per_second(100), share(100_000), now);
        bucket.take(4, now);
        bucket.set_share(share(800_000), now);
        assert_eq!(bucket.left(now), 6);
        assert!(bucket.left(now + SECOND / 8) >= 15, "it refills at 80 per second");
        bucket.set_share(share(20_000), now);
        assert_eq!(bucket.left(now), 2, "no more than the burst of the smaller share");
        for _ in 0..1000 {
            bucket.set_share(share(800_000), now);
            bucket.set_share(share(20_000), now);
        }
        assert!(bucket.left(now) <= 2, "flapping creates no units");
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
