//! How long somebody takes to answer, by the size of what was asked, and how long it is worth to wait for them.
//!
//! A process that is frozen still takes connections, passes every TCP check and refuses nothing: the only sign is that
//! answers stay out. How long is too long depends on the work, so times are kept by [`Size`], the power of two below a
//! request's tokens: one word is not late because two thousand texts take a second.
//!
//! * The *average* gives the deadline for the first byte: [`Patience::times`] the average, not less than a floor. It is
//!   unbounded until [`SAMPLES_MIN`] answers were seen: a deadline that starts from a guess refuses whoever is slower than
//!   the guess, for ever, because it never sees their answer.
//! * The *spread* gives the moment to hedge: nineteen of twenty answers have come by then.
//!
//! The obvious other way, one limit for everybody from a file, is either longer than the outage that it should cut short
//! or shorter than the largest request that the limits permit.

use std::time::{Duration, Instant};

/// Answers of one size before their times mean something: the first ones pay for connections and cold caches.
pub const SAMPLES_MIN: u32 = 16;
/// Sizes, as powers of two: the last holds everything from four million tokens up, more than a body can carry.
const SIZES: usize = 24;
/// No answer is taken to be slower than this: a request is given ten minutes at most.
const TOOK_MAX: Duration = Duration::from_secs(3600);
/// The weight of one answer in the average, as its inverse. Counted in answers and not in seconds, so that a busy
/// target's deadline follows a surge within milliseconds and a quiet one's does not hang on its last answer alone.
const AVERAGE_OVER: u64 = 16;
/// The same of what is usual: a few dozen answers of somebody who has become slow, or that were not waited for, hardly move
/// it, and that is how long it takes to find out.
const USUAL_OVER: u64 = 128;
/// Classes of the spread for each doubling of the time: none is wider than a fifth of its value.
const CLASSES_PER_DOUBLING: u32 = 4;
/// Classes in all: from one millisecond to a minute.
const CLASSES: usize = 64;
/// When so many answers are in a spread, all counts are halved: what was an hour ago should not outvote now.
const SPREAD_MAX: u32 = 512;
/// Where the spread is read for a hedge.
const HEDGE_AT_PERMILLE: u32 = 950;

/// The power of two below a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u8);

impl Size {
    /// That of a request of so many tokens, by estimate.
    pub fn of(tokens: u64) -> Size {
        let doublings = tokens.max(1).ilog2() as usize;
        Size(doublings.min(SIZES - 1) as u8)
    }

    /// The fewest tokens of this size.
    pub fn tokens(self) -> u64 {
        1 << self.0
    }
}

/// How long to wait for a first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// So many times the average.
    pub times: u32,
    /// And never less than this.
    pub floor: Duration,
}

impl Patience {
    /// Towards a replica: four times what the best of them takes. Below 50 ms, what looks like a fault is a scheduler.
    pub const WITH_A_REPLICA: Patience = Patience { times: 4, floor: Duration::from_millis(50) };
    /// Towards a region: once more, and twice the floor, so that its ingress has the time to leave a frozen replica for
    /// another before the region is held to be late itself.
    pub const WITH_A_REGION: Patience = Patience { times: 5, floor: Duration::from_millis(100) };

    /// How long to wait for whoever takes `average`.
    pub fn after(self, average: Duration) -> Duration {
        average.saturating_mul(self.times).max(self.floor)
    }
}

/// How long one target takes.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    sizes: [Option<Box<Times>>; SIZES],
}

#[derive(Clone, Debug)]
struct Times {
    average_us: u64,
    usual_us: u64,
    answers: u32,
    spread: [u16; CLASSES],
    in_spread: u32,
    last: Instant,
}

impl Pace {
    /// An answer to a request of this size took so long.
    pub fn saw(&mut self, size: Size, took: Duration, now: Instant) {
        let took_us = took.min(TOOK_MAX).as_micros() as u64;
        let times = self.sizes[usize::from(size.0)].get_or_insert_with(|| Box::new(Times::new(took_us, now)));
        times.last = now;
        times.answers = times.answers.saturating_add(1);
        // The mean of all until there are enough for the weight that they keep.
        let over = u64::from(times.answers).min(AVERAGE_OVER);
        times.average_us = (times.average_us * (over - 1) + took_us) / over;
        let over = u64::from(times.answers).min(USUAL_OVER);
        times.usual_us = (times.usual_us * (over - 1) + took_us) / over;
        times.spread[class(took_us)] += 1;
        times.in_spread += 1;
        if times.in_spread == SPREAD_MAX {
            times.spread.iter_mut().for_each(|count| *count /= 2);
            times.in_spread = times.spread.iter().map(|count| u32::from(*count)).sum();
        }
    }

    /// An answer to a request of this size was given up after so long. What it would have taken is not known, only that
    /// it is more; so it counts where it is more than the average, and otherwise says that nothing has changed.
    pub fn gave_up(&mut self, size: Size, waited: Duration, now: Instant) {
        match &mut self.sizes[usize::from(size.0)] {
            Some(times) if Duration::from_micros(times.average_us) >= waited => times.last = now,
            Some(_) | None => self.saw(size, waited, now),
        }
    }

    /// What a request of this size takes on the average, as soon as one was seen, and when the last one was.
    pub fn hint(&self, size: Size) -> Option<(Duration, Instant)> {
        self.times(size).map(|times| (Duration::from_micros(times.average_us), times.last))
    }

    /// The sizes of which enough were seen, and what each takes on the average.
    pub fn averages(&self) -> impl Iterator<Item = (Size, Duration)> {
        let sizes = (0..SIZES as u8).map(Size);
        sizes.filter_map(|size| self.average(size).map(|average| (size, average)))
    }

    /// What a request of this size takes on the average, once enough were seen to rely on it.
    pub fn average(&self, size: Size) -> Option<Duration> {
        let times = self.times(size).filter(|times| times.answers >= SAMPLES_MIN);
        times.map(|times| Duration::from_micros(times.average_us))
    }

    /// What a request of this size usually takes, once enough were seen to rely on it: the average of a longer time.
    pub fn usual(&self, size: Size) -> Option<Duration> {
        let times = self.times(size).filter(|times| times.answers >= SAMPLES_MIN);
        times.map(|times| Duration::from_micros(times.usual_us))
    }

    /// By when nineteen of twenty answers to requests of this size have come, once enough were seen.
    pub fn nearly_all(&self, size: Size) -> Option<Duration> {
        let times = self.times(size).filter(|times| times.answers >= SAMPLES_MIN)?;
        let rank = (times.in_spread * HEDGE_AT_PERMILLE).div_ceil(1000);
        let mut below = 0;
        let reached = times.spread.iter().position(|count| {
            below += u32::from(*count);
            below >= rank
        });
        reached.map(upper_end)
    }

    fn times(&self, size: Size) -> Option<&Times> {
        self.sizes[usize::from(size.0)].as_deref()
    }
}

impl Times {
    fn new(first_us: u64, now: Instant) -> Times {
        Times {
            average_us: first_us,
            usual_us: first_us,
            answers: 0,
            spread: [0; CLASSES],
            in_spread: 0,
            last: now,
        }
    }
}

/// The class of a time: its doublings of a millisecond, and its quarter between two of them.
fn class(took_us: u64) -> usize {
    let Some(doublings) = (took_us / 1000).checked_ilog2() else { return 0 };
    let quarter = (took_us - (1000 << doublings)) * u64::from(CLASSES_PER_DOUBLING) / (1000 << doublings);
    ((doublings * CLASSES_PER_DOUBLING) as usize + quarter as usize + 1).min(CLASSES - 1)
}

/// The end of a class: no time in it was longer.
fn upper_end(class: usize) -> Duration {
    let quarters = u32::try_from(class).expect("there are few classes");
    let (doublings, quarter) = (quarters / CLASSES_PER_DOUBLING, quarters % CLASSES_PER_DOUBLING);
    let base_us = 1000u64 << doublings;
    Duration::from_micros(base_us + base_us * u64::from(quarter) / u64::from(CLASSES_PER_DOUBLING))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn of(answers: impl IntoIterator<Item = u32>) -> Pace {
        let mut pace = Pace::default();
        answers.into_iter().for_each(|millis| pace.saw(Size::of(1), millis * MS, some_instant()));
        pace
    }

    #[test]
    fn sizes_are_powers_of_two_of_tokens() {
        let same = |a, b| assert_eq!(Size::of(a), Size::of(b), "{a} and {b}");
        let apart = |a, b| assert!(Size::of(a) < Size::of(b), "{a} and {b}");
        same(0, 1);
        apart(1, 2);
        same(2, 3);
        apart(3, 4);
        same(4096, 8191);
        apart(8191, 8192);
        same(1 << 23, u64::MAX);
        apart((1 << 23) - 1, 1 << 23);
    }

    #[test]
    fn nothing_is_late_before_enough_was_seen() {
        let few = of((1..SAMPLES_MIN).map(|_| 20));
        assert_eq!((few.average(Size::of(1)), few.nearly_all(Size::of(1))), (None, None));
        assert_eq!(few.hint(Size::of(1)).map(|(average, _)| average), Some(20 * MS));
        let enough = of((0..SAMPLES_MIN).map(|_| 20));
        assert_eq!(enough.average(Size::of(1)), Some(20 * MS));
        assert_eq!(enough.average(Size::of(2)), None, "another size has a time of its own");
    }

    #[test]
    fn patience_is_some_averages_and_never_less_than_its_floor() {
        assert_eq!(Patience::WITH_A_REPLICA.after(20 * MS), 80 * MS);
        assert_eq!(Patience::WITH_A_REPLICA.after(2 * MS), 50 * MS);
        assert_eq!(Patience::WITH_A_REGION.after(22 * MS), 110 * MS);
        assert_eq!(Patience::WITH_A_REGION.after(Duration::MAX), Duration::MAX);
    }

    /// A region has to wait out its own replica and be answered by another one before its edge calls it late.
    #[test]
    fn an_edge_waits_longer_than_an_ingress_needs_to_go_to_another_replica() {
        for average in [1, 5, 12, 20, 50, 400].map(|millis| millis * MS) {
            let needed = Patience::WITH_A_REPLICA.after(average) + average;
            assert!(Patience::WITH_A_REGION.after(average) >= needed, "{average:?}");
        }
    }

    #[test]
    fn the_average_follows_a_surge_within_a_few_dozen_answers() {
        let surge = of((0..100).map(|_| 20).chain((0..48).map(|_| 200)));
        let average = surge.average(Size::of(1)).unwrap();
        assert!(average > 180 * MS && average <= 200 * MS, "{average:?}");
    }

    #[test]
    fn what_is_usual_is_not_moved_by_the_few_answers_in_which_somebody_is_found_out() {
        let slow = of((0..500).map(|_| 25).chain((0..20).map(|_| 125)));
        let (average, usual) = (slow.average(Size::of(1)).unwrap(), slow.usual(Size::of(1)).unwrap());
        assert!(average > 90 * MS && usual < 42 * MS, "{average:?} {usual:?}");
        assert_eq!(of((1..SAMPLES_MIN).map(|_| 25)).usual(Size::of(1)), None);
    }

    #[test]
    fn an_answer_that_was_not_waited_for_counts_only_where_it_says_more() {
        let mut pace = of((0..100).map(|_| 400));
        pace.gave_up(Size::of(1), 84 * MS, some_instant());
        assert_eq!(pace.average(Size::of(1)), Some(400 * MS));
        let mut pace = of((0..100).map(|_| 20));
        pace.gave_up(Size::of(1), 84 * MS, some_instant());
        assert_eq!(pace.average(Size::of(1)), Some(24 * MS));
    }

    #[test]
    fn a_hedge_waits_for_nineteen_of_twenty() {
        let at = |slow_of_100: u32| {
            of((0..400).map(|n| if n % 100 < slow_of_100 { 200 } else { 20 }))
                .nearly_all(Size::of(1))
                .unwrap()
        };
        for (slow, least, most) in [(0, 20, 24), (4, 20, 24), (6, 200, 230), (50, 200, 230)] {
            let hedge = at(slow);
            assert!(least * MS <= hedge && hedge <= most * MS, "{slow} of 100: {hedge:?}");
        }
    }

    #[test]
    fn what_was_long_ago_is_outvoted_by_what_is() {
        let changed = of((0..5000).map(|_| 200).chain((0..2000).map(|_| 20)));
        assert!(changed.nearly_all(Size::of(1)).unwrap() < 30 * MS);
    }

    proptest! {
        #[test]
        fn a_time_lies_in_its_class_and_a_class_is_narrow(took_us in 0u64..60_000_000) {
            let class = class(took_us);
            let took = Duration::from_micros(took_us);
            prop_assert!(took < upper_end(class) || class == CLASSES - 1);
            prop_assert!(class == 0 || upper_end(class - 1) <= took);
            prop_assert!(upper_end(class) <= (took + took / 4 + MS));
        }

        #[test]
        fn no_time_overflows(took_us: u64, times in 1usize..40) {
            let mut pace = Pace::default();
            (0..times).for_each(|_| pace.saw(Size::of(1), Duration::from_micros(took_us), some_instant()));
            pace.nearly_all(Size::of(1));
        }
    }
}
