//! A limit on a rate, with room for bursts: the generic cell rate algorithm (ITU-T I.371, annex A).
//!
//! The state is one instant, *paid until*: the time up to which what was taken has been paid for by waiting.
//!
//! ```text
//!   now            paid until                 now + burst
//!    │▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░░░░░░░░░░░░░░░░░░░░░░░░░│
//!    │ taken and owed  │ may still be taken        │
//! ```
//!
//! To take `n` is to move *paid until* by `n` times the time that one costs, and it may not pass `now + burst`. Time does
//! the refilling, so there is nothing to tick, and two callers need no more than this one number between them.
//!
//! More than one burst can never be taken at once, however long somebody waits, and whoever asks for it is told so. The
//! obvious kindness, to give it out of a full bucket and to let the debt be waited off, makes of a limit a suggestion:
//! one request of a day's worth would pass.
//!
//! What is taken is an estimate; [`Bucket::settle`] moves *paid until* to where the real cost would have put it, which may
//! be beyond the burst: what was computed is owed.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// So much per period, and at most one period's worth at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units.
    pub units: NonZeroU64,
    /// Within this time.
    pub period: Duration,
}

impl Rate {
    /// How long `units` take to earn.
    fn time_for(self, units: u64) -> Duration {
        let nanos = self.period.as_nanos() * u128::from(units) / u128::from(self.units.get());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// What is left of a rate.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    rate: Rate,
    paid_until: Instant,
}

/// Why it may not be taken now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Short {
    /// After this it may, if nobody else takes any.
    NotYet {
        /// From now.
        wait: Duration,
    },
    /// It is more than there can ever be at once.
    Never,
}

impl Bucket {
    /// A full one.
    pub fn new(rate: Rate, now: Instant) -> Bucket {
        Bucket { rate, paid_until: now }
    }

    /// The rate that it keeps.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Whether `units` may be taken now.
    pub fn check(&self, units: u64, now: Instant) -> Result<(), Short> {
        if units > self.rate.units.get() {
            return Err(Short::Never);
        }
        let wait = (self.owed(now) + self.rate.time_for(units)).saturating_sub(self.rate.period);
        if wait.is_zero() { Ok(()) } else { Err(Short::NotYet { wait }) }
    }

    /// Takes `units`.
    pub fn take(&mut self, units: u64, now: Instant) {
        self.paid_until = now + self.owed(now) + self.rate.time_for(units);
    }

    /// What was taken as `estimate` cost `actual`.
    pub fn settle(&mut self, estimate: u64, actual: u64, now: Instant) {
        if actual >= estimate {
            self.take(actual - estimate, now);
        } else {
            let back = self.rate.time_for(estimate - actual);
            self.paid_until = now + self.owed(now).saturating_sub(back);
        }
    }

    /// Units that may be taken now.
    pub fn left(&self, now: Instant) -> u64 {
        let free = self.rate.period.saturating_sub(self.owed(now));
        let units = free.as_nanos() * u128::from(self.rate.units.get()) / self.rate.period.as_nanos().max(1);
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    /// When it is full again, if nobody takes any.
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

    fn per_second(units: u64) -> Rate {
        Rate { units: NonZeroU64::new(units).unwrap(), period: SECOND }
    }

    #[test]
    fn a_second_s_worth_may_be_taken_at_once_and_one_more_must_wait() {
        let now = some_instant();
        let mut bucket = Bucket::new(per_second(10), now);
        for left in (0..10).rev() {
            assert_eq!(bucket.check(1, now), Ok(()));
            bucket.take(1, now);
            assert_eq!(bucket.left(now), left);
        }
        assert_eq!(bucket.check(1, now), Err(Short::NotYet { wait: SECOND / 10 }));
        assert_eq!(bucket.check(1, now + SECOND / 10), Ok(()));
        assert_eq!(bucket.full_in(now), SECOND);
        assert_eq!(bucket.left(now + 60 * SECOND), 10, "saving has an end");
    }

    #[test]
    fn what_is_larger_than_the_bucket_is_never_given_and_what_was_used_is_owed() {
        let now = some_instant();
        let mut bucket = Bucket::new(per_second(10), now);
        assert_eq!(bucket.check(10, now), Ok(()), "at the limit");
        assert_eq!(bucket.check(11, now), Err(Short::Never), "one past it");
        assert_eq!(bucket.check(11, now + 60 * SECOND), Err(Short::Never), "waiting does not help");
        bucket.take(10, now);
        bucket.settle(10, 35, now);
        assert_eq!(bucket.check(1, now), Err(Short::NotYet { wait: SECOND * 26 / 10 }));
        assert_eq!(bucket.check(10, now), Err(Short::NotYet { wait: SECOND * 35 / 10 }));
    }

    #[test]
    fn an_estimate_is_settled_both_ways() {
        let now = some_instant();
        let mut bucket = Bucket::new(per_second(10), now);
        bucket.take(8, now);
        bucket.settle(8, 3, now);
        assert_eq!(bucket.left(now), 7);
        bucket.settle(3, 9, now);
        assert_eq!(bucket.left(now), 1);
        bucket.settle(9, 0, now + 60 * SECOND);
        assert_eq!(bucket.left(now + 60 * SECOND), 10, "what time has paid for is not given back");
    }

    proptest! {
        /// Whatever is asked for, and whenever: in any stretch of time no more is let through than the rate allows and
        /// one bucket beside it.
        #[test]
        fn no_more_passes_than_the_rate_and_one_burst(
            rate in 1u64..200,
            steps in prop::collection::vec((1u64..20, 0u64..300), 1..200),
        ) {
            let start = some_instant();
            let (mut now, mut bucket, mut passed) = (start, Bucket::new(per_second(rate), start), 0);
            for (units, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                match bucket.check(units, now) {
                    Ok(()) => { bucket.take(units, now); passed += units; }
                    Err(Short::Never) => prop_assert!(units > rate),
                    Err(Short::NotYet { wait }) => {
                        prop_assert!(bucket.check(units, now + wait).is_ok(), "the wait that is told is enough");
                        prop_assert!(bucket.check(units, now + wait - Duration::from_nanos(1)).is_err(), "and no longer than needed");
                    }
                }
            }
            let allowed = rate as f64 * ((now - start).as_secs_f64() + 1.0);
            prop_assert!(passed as f64 <= allowed + 1e-6, "{passed} of {allowed}");
        }
    }
}
