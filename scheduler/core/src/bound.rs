//! Limits on published generations: how fast a hub may raise them, and how large a step a reader accepts.
//!
//! A reader never goes back to a lower generation (invariant 5, Monotonic plans) and keeps the accepted one on disk. One
//! response with an absurdly high generation, from a broken hub or from a proxy between hub and reader, would therefore
//! shut out every later one. To prevent this, the hub limits how often it publishes ([`PublishRateLimiter`]), and a
//! reader accepts only generations that such a hub can have published since the last accepted one ([`accept`]). The
//! numbers of tables and of plans follow the same limit; a plan is computed once a second.
//!
//! The first epoch of a store is the time of its creation, and the epoch is raised by one when the store has been set
//! back ([`crate::hub`]). An epoch later than the reader's clock plus a margin therefore cannot come from a hub.

use std::time::{Duration, Instant};

use regions::Generation;

/// Long-term maximum of generations that a hub publishes per second. Each is a write of the whole table to the store
/// and a download by every gateway and spoke, so a higher rate has no benefit.
pub const PUBLISHED_PER_SECOND_MAX: u32 = 10;
/// Burst size: every region of a catalogue.
pub const PUBLISHED_BURST_MAX: u32 = 100;
/// Margin of a reader above the rate: ten bursts, because each new leader may start with one.
pub const STEP_MARGIN: u64 = 10 * PUBLISHED_BURST_MAX as u64;
/// Largest difference between the clocks of a hub and a reader.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(3600);

/// Generation that a reader accepted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedGeneration {
    /// The generation.
    pub generation: Generation,
    /// Time since it was accepted. For a generation read from disk, the age of the file.
    pub age: Duration,
}

/// Reason for rejecting a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectedGeneration {
    /// A process rejected a route table or a plan that is not newer than its own.
    #[error("generation {offered} is not higher than the current generation {held}")]
    NotHigher {
        /// Generation that was offered.
        offered: Generation,
        /// Generation that was accepted last.
        held: Generation,
    },
    /// A process rejected a route table or a plan because its epoch begins in the future.
    #[error(
        "epoch {offered} lies in the future: an epoch begins with the creation time of the hub's store, and by the \
         local clock the latest possible epoch is {latest}; correct the clock of this machine or of the hub, or look \
         for a proxy that alters responses"
    )]
    EpochAhead {
        /// Epoch that was offered.
        offered: u64,
        /// Highest accepted epoch.
        latest: u64,
    },
    /// A process rejected a route table or a plan that no hub can have published yet.
    #[error(
        "generation {offered} is higher than a hub can have published: the highest accepted number is now {highest}; \
         look for a proxy that alters responses, or delete the file of the last table if this persists"
    )]
    TooFarAhead {
        /// Generation that was offered.
        offered: Generation,
        /// Highest accepted number.
        highest: u64,
    },
}

/// Checks whether a hub can have published this generation by now. Used for the first generation of a process and for
/// one read from disk. `since_1970` is the local wall-clock time.
///
/// # Errors
///
/// The reason for the rejection.
pub fn plausible(offered: Generation, since_1970: Duration) -> Result<(), RejectedGeneration> {
    let latest = (since_1970 + CLOCK_SKEW_MAX).as_secs();
    if offered.epoch > latest {
        return Err(RejectedGeneration::EpochAhead { offered: offered.epoch, latest });
    }
    // Numbers continue across epochs, so they are bounded by the time since 1970.
    check_highest(offered, published_within(since_1970))
}

/// Checks whether a reader that holds `held` accepts `offered` as its successor. `since_1970` is the local wall-clock
/// time.
///
/// # Errors
///
/// The reason for the rejection.
pub fn accept(
    offered: Generation,
    held: Option<AcceptedGeneration>,
    since_1970: Duration,
) -> Result<(), RejectedGeneration> {
    if let Some(AcceptedGeneration { generation, age }) = held {
        if offered <= generation {
            return Err(RejectedGeneration::NotHigher { offered, held: generation });
        }
        // In a new epoch, numbers continue or restart at one, so the same limit applies.
        check_highest(offered, generation.number.saturating_add(published_within(age)))?;
    }
    plausible(offered, since_1970)
}

fn published_within(time: Duration) -> u64 {
    time.as_secs().saturating_mul(u64::from(PUBLISHED_PER_SECOND_MAX)).saturating_add(STEP_MARGIN)
}

fn check_highest(offered: Generation, highest: u64) -> Result<(), RejectedGeneration> {
    if offered.number > highest { Err(RejectedGeneration::TooFarAhead { offered, highest }) } else { Ok(()) }
}

/// Rate limiter of published generations (GCRA): [`PUBLISHED_BURST_MAX`] at once, [`PUBLISHED_PER_SECOND_MAX`] over
/// time.
#[derive(Clone, Copy, Debug)]
pub struct PublishRateLimiter {
    /// Theoretical arrival time of the next generation.
    due: Instant,
}

impl PublishRateLimiter {
    /// Creates a limiter with a full burst available.
    pub fn new(now: Instant) -> PublishRateLimiter {
        PublishRateLimiter { due: now }
    }

    /// Returns the time to wait before the next generation is published, and counts it as published.
    pub fn next(&mut self, now: Instant) -> Duration {
        let interval = Duration::from_secs(1) / PUBLISHED_PER_SECOND_MAX;
        let wait =
            self.due.saturating_duration_since(now).saturating_sub(interval * (PUBLISHED_BURST_MAX - 1));
        self.due = self.due.max(now) + interval;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn at(epoch: u64, number: u64) -> Generation {
        Generation { epoch, number }
    }

    fn held(generation: Generation, seconds: u64) -> Option<AcceptedGeneration> {
        Some(AcceptedGeneration { generation, age: Duration::from_secs(seconds) })
    }

    #[test]
    fn a_step_at_the_limit_is_accepted_and_one_past_it_is_not() {
        for (seconds, step) in [(0, STEP_MARGIN), (1, STEP_MARGIN + 10), (3600, STEP_MARGIN + 36_000)] {
            let (before, highest) = (at(7, 40), 40 + step);
            assert_eq!(accept(at(7, highest), held(before, seconds), NOW), Ok(()), "{seconds}");
            for epoch in [7, 8] {
                let past = at(epoch, highest + 1);
                let rejected = Err(RejectedGeneration::TooFarAhead { offered: past, highest });
                assert_eq!(accept(past, held(before, seconds), NOW), rejected, "{seconds}");
            }
        }
    }

    #[test]
    fn an_epoch_at_the_limit_is_accepted_and_one_past_it_is_not() {
        let latest = (NOW + CLOCK_SKEW_MAX).as_secs();
        for before in [None, held(at(7, 40), 1), held(at(latest - 1, 40), 1)] {
            assert_eq!(accept(at(latest, 1), before, NOW), Ok(()), "{before:?}");
            let rejected = Err(RejectedGeneration::EpochAhead { offered: latest + 1, latest });
            assert_eq!(accept(at(latest + 1, 1), before, NOW), rejected, "{before:?}");
        }
    }

    #[test]
    fn the_highest_numbers_are_never_accepted() {
        for offered in [at(u64::MAX, 1), at(7, u64::MAX), at(u64::MAX, u64::MAX)] {
            for before in [None, held(at(7, 40), 0), held(at(7, 40), u64::MAX)] {
                assert!(accept(offered, before, NOW).is_err(), "{offered} {before:?}");
            }
            assert!(plausible(offered, NOW).is_err(), "{offered}");
        }
    }

    #[test]
    fn a_generation_that_is_not_higher_is_rejected() {
        for offered in [at(7, 40), at(7, 39), at(6, 41)] {
            let rejected = Err(RejectedGeneration::NotHigher { offered, held: at(7, 40) });
            assert_eq!(accept(offered, held(at(7, 40), 9), NOW), rejected, "{offered}");
        }
        for offered in [at(7, 41), at(8, 1)] {
            assert_eq!(
                accept(offered, held(at(7, 40), 0), NOW),
                Ok(()),
                "{offered}: a new store begins at one"
            );
            assert_eq!(accept(offered, None, NOW), Ok(()), "{offered}: the first one");
        }
    }

    proptest! {
        /// A reader accepts every generation of a hub that respects its limiter, however many tables it has missed.
        #[test]
        fn a_reader_accepts_every_generation_of_a_rate_limited_hub(
            pauses in proptest::collection::vec(0..3000u64, 1..400), reads in proptest::collection::vec(any::<bool>(), 400)
        ) {
            let begun = some_instant();
            let (mut now, mut limiter, mut number) = (begun, PublishRateLimiter::new(begun), 0);
            let mut last: Option<(Generation, Instant)> = None;
            for (pause, reads) in pauses.into_iter().zip(reads) {
                // Half of them are published as fast as the limiter allows.
                now += Duration::from_millis(if pause < 1500 { 0 } else { pause });
                now += limiter.next(now);
                number += 1;
                if reads {
                    let held = last.map(|(generation, at)| AcceptedGeneration { generation, age: now - at });
                    prop_assert_eq!(accept(at(7, number), held, NOW), Ok(()));
                    last = Some((at(7, number), now));
                }
            }
        }
    }

    #[test]
    fn a_burst_is_published_at_once_and_later_generations_at_the_rate() {
        let now = some_instant();
        let mut limiter = PublishRateLimiter::new(now);
        assert!((0..PUBLISHED_BURST_MAX).all(|_| limiter.next(now) == Duration::ZERO));
        assert_eq!(limiter.next(now), Duration::from_millis(100));
        assert_eq!(limiter.next(now), Duration::from_millis(200));
        let later = now + Duration::from_secs(60);
        assert!((0..PUBLISHED_BURST_MAX).all(|_| limiter.next(later) == Duration::ZERO));
        assert!(limiter.next(later) > Duration::ZERO);
    }
}
