//! Bound on published generations: how fast a hub may raise them, and how far a reader lets them rise.
//!
//! A reader never goes back to a lower generation (invariant 5, Monotone plans) and keeps on disk what it has accepted. So
//! one response with an absurdly high generation, from a broken hub or from somebody between hub and reader, would shut out
//! every later one. The hub therefore limits how often it publishes ([`Pace`]), and a reader accepts only what such a hub
//! can have published since the reader last accepted something ([`accept`]). The numbers of tables and of plans follow the
//! same limit; a plan is made once a second.
//!
//! An epoch begins with the time at which its store was created, and is raised by one when the store was set back
//! ([`crate::hub`]). So an epoch beyond the reader's own clock, and a bit, is none that a hub has begun.

use std::time::{Duration, Instant};

use regions::Generation;

/// Generations that a hub publishes per second at most, over a long time. Each is a write of the whole table to the store
/// and a download by every gateway and spoke, so more often would help nobody.
pub const PUBLISHED_PER_SECOND_MAX: u32 = 10;
/// Generations that it publishes at once after it has published none for a while: every region of a catalogue.
pub const PUBLISHED_BURST_MAX: u32 = 100;
/// Margin of a reader beyond the rate: ten bursts, because each new leader may begin with one.
pub const STEP_MARGIN: u64 = 10 * PUBLISHED_BURST_MAX as u64;
/// Largest difference between the clocks of a hub and a reader.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(3600);

/// Generation that a reader accepted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its generation.
    pub generation: Generation,
    /// Time since then. A generation read from disk is as old as its file.
    pub age: Duration,
}

/// Why a generation is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// It is not newer.
    #[error("generation {offered} is not higher than {held}, which is in hand")]
    NotHigher {
        /// Generation that was offered.
        offered: Generation,
        /// Generation that was accepted last.
        held: Generation,
    },
    /// The epoch lies in the future.
    #[error(
        "epoch {offered} lies in the future: an epoch begins with the time of its hub's store, and by the clock here the \
         latest possible one is {latest}; correct the clock of this machine or of the hub, or look for a proxy that alters \
         responses"
    )]
    EpochAhead {
        /// Generation that was offered.
        offered: u64,
        /// The highest that is accepted.
        latest: u64,
    },
    /// No hub has published so often.
    #[error(
        "generation {offered} is more than a hub can have published: at most number {highest} is accepted now; look for a \
         proxy that alters responses, or delete the file of the last table if this goes on"
    )]
    TooFarAhead {
        /// Generation that was offered.
        offered: Generation,
        /// The highest number that is accepted.
        highest: u64,
    },
}

/// Whether some hub can have published this generation by now. For what was read from disk, and for a first one.
///
/// # Errors
///
/// Why not. `since_1970` is the time by the clock here.
pub fn plausible(offered: Generation, since_1970: Duration) -> Result<(), Rejected> {
    let latest = (since_1970 + CLOCK_SKEW_MAX).as_secs();
    if offered.epoch > latest {
        return Err(Rejected::EpochAhead { offered: offered.epoch, latest });
    }
    // Numbers go on across epochs, so only the age of all computing bounds them.
    at_most(offered, published_within(since_1970))
}

/// Whether a reader that holds `held` takes `offered` in its place.
///
/// # Errors
///
/// Why not. `since_1970` is the time by the clock here.
pub fn accept(offered: Generation, held: Option<Held>, since_1970: Duration) -> Result<(), Rejected> {
    if let Some(Held { generation, age }) = held {
        if offered <= generation {
            return Err(Rejected::NotHigher { offered, held: generation });
        }
        // In a new epoch numbers go on or begin again at one, so they are below the same bound.
        at_most(offered, generation.number.saturating_add(published_within(age)))?;
    }
    plausible(offered, since_1970)
}

fn published_within(time: Duration) -> u64 {
    time.as_secs().saturating_mul(u64::from(PUBLISHED_PER_SECOND_MAX)).saturating_add(STEP_MARGIN)
}

fn at_most(offered: Generation, highest: u64) -> Result<(), Rejected> {
    if offered.number > highest { Err(Rejected::TooFarAhead { offered, highest }) } else { Ok(()) }
}

/// Limits how often a hub publishes (GCRA): [`PUBLISHED_BURST_MAX`] at once, [`PUBLISHED_PER_SECOND_MAX`] over time.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// When the next one would be due, were they spread evenly.
    due: Instant,
}

impl Pace {
    /// A pace with a whole burst left.
    pub fn new(now: Instant) -> Pace {
        Pace { due: now }
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

    fn held(generation: Generation, seconds: u64) -> Option<Held> {
        Some(Held { generation, age: Duration::from_secs(seconds) })
    }

    #[test]
    fn a_step_at_the_limit_is_accepted_and_one_past_it_is_not() {
        for (seconds, step) in [(0, STEP_MARGIN), (1, STEP_MARGIN + 10), (3600, STEP_MARGIN + 36_000)] {
            let (before, highest) = (at(7, 40), 40 + step);
            assert_eq!(accept(at(7, highest), held(before, seconds), NOW), Ok(()), "{seconds}");
            for epoch in [7, 8] {
                let past = at(epoch, highest + 1);
                let rejected = Err(Rejected::TooFarAhead { offered: past, highest });
                assert_eq!(accept(past, held(before, seconds), NOW), rejected, "{seconds}");
            }
        }
    }

    #[test]
    fn an_epoch_at_the_limit_is_accepted_and_one_past_it_is_not() {
        let latest = (NOW + CLOCK_SKEW_MAX).as_secs();
        for before in [None, held(at(7, 40), 1), held(at(latest - 1, 40), 1)] {
            assert_eq!(accept(at(latest, 1), before, NOW), Ok(()), "{before:?}");
            let rejected = Err(Rejected::EpochAhead { offered: latest + 1, latest });
            assert_eq!(accept(at(latest + 1, 1), before, NOW), rejected, "{before:?}");
        }
    }

    #[test]
    fn the_highest_numbers_are_never_accepted_whatever_is_held() {
        for offered in [at(u64::MAX, 1), at(7, u64::MAX), at(u64::MAX, u64::MAX)] {
            for before in [None, held(at(7, 40), 0), held(at(7, 40), u64::MAX)] {
                assert!(accept(offered, before, NOW).is_err(), "{offered} {before:?}");
            }
            assert!(plausible(offered, NOW).is_err(), "{offered}");
        }
    }

    #[test]
    fn what_is_not_higher_is_rejected() {
        for offered in [at(7, 40), at(7, 39), at(6, 41)] {
            let rejected = Err(Rejected::NotHigher { offered, held: at(7, 40) });
            assert_eq!(accept(offered, held(at(7, 40), 9), NOW), rejected, "{offered}");
        }
        assert_eq!(accept(at(8, 1), held(at(7, 40), 0), NOW), Ok(()), "a new store begins at one");
    }

    proptest! {
        /// Whatever a hub publishes at its own pace, a reader accepts, however many tables it has missed in between.
        #[test]
        fn a_reader_accepts_all_that_a_hub_publishes_at_its_pace(
            pauses in proptest::collection::vec(0..3000u64, 1..400), reads in proptest::collection::vec(any::<bool>(), 400)
        ) {
            let begun = some_instant();
            let (mut now, mut pace, mut number) = (begun, Pace::new(begun), 0);
            let mut last: Option<(Generation, Instant)> = None;
            for (pause, reads) in pauses.into_iter().zip(reads) {
                // Half of them come as fast as the pace lets them.
                now += Duration::from_millis(if pause < 1500 { 0 } else { pause });
                now += pace.next(now);
                number += 1;
                if reads {
                    let held = last.map(|(generation, at)| Held { generation, age: now - at });
                    prop_assert_eq!(accept(at(7, number), held, NOW), Ok(()));
                    last = Some((at(7, number), now));
                }
            }
        }
    }

    #[test]
    fn a_burst_is_published_at_once_and_what_follows_at_the_rate() {
        let now = some_instant();
        let mut pace = Pace::new(now);
        assert!((0..PUBLISHED_BURST_MAX).all(|_| pace.next(now) == Duration::ZERO));
        assert_eq!(pace.next(now), Duration::from_millis(100));
        assert_eq!(pace.next(now), Duration::from_millis(200));
        let later = now + Duration::from_secs(60);
        assert!((0..PUBLISHED_BURST_MAX).all(|_| pace.next(later) == Duration::ZERO));
        assert!(pace.next(later) > Duration::ZERO);
    }
}
