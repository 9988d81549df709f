//! Latency of one target by request size, and the timeouts derived from it.
//!
//! A process that is frozen still accepts connections, passes every TCP check and rejects nothing: the only sign is
//! that no response comes. How long is too long depends on the work, so latencies are kept by [`SizeClass`], the power
//! of two below a request's tokens: a request for one word does not inherit the latency of two thousand texts.
//!
//! * The *average* gives the first-byte timeout: [`FirstByteTimeout::multiple`] times the average, at least a floor.
//!   There is none until [`SAMPLES_MIN`] responses were observed: a timeout that starts from a guess rejects a target
//!   that is slower than the guess for ever, because its responses are never observed.
//! * The *histogram* gives the hedging delay: its 95th percentile.
//!
//! The obvious alternative, one configured timeout for all, is either longer than the outage that it should cut short
//! or shorter than the largest request that the limits permit.

use std::time::{Duration, Instant};

/// Responses of one size before their latencies are used: the first ones pay for connections and cold caches.
pub const SAMPLES_MIN: u32 = 16;
/// Number of size classes, as powers of two: the last holds all sizes from four million tokens up, more than a body can
/// carry.
const SIZE_CLASSES: usize = 24;
/// Largest latency that is recorded; a request has ten minutes at most.
const LATENCY_MAX: Duration = Duration::from_secs(3600);
/// Inverse of the weight of one response in the average. Counted in responses and not in seconds, so that the timeout
/// of a busy target follows a surge within milliseconds and that of a quiet one does not depend on its last response
/// alone.
const AVERAGE_WEIGHT_INVERSE: u64 = 16;
/// Inverse of the weight in the long-term average: a few dozen responses of a target that has become slow, or that were
/// abandoned, hardly move it, and the detection of a slow target takes no longer than that.
const LONG_TERM_WEIGHT_INVERSE: u64 = 128;
/// Histogram buckets for each doubling of the latency: none is wider than a fifth of its value. The histogram is not that of
/// `metrics`, because it forgets old responses, and there are thousands, of 128 bytes each.
const BUCKETS_PER_DOUBLING: u32 = 4;
/// Histogram buckets in total: from one millisecond to a minute.
const BUCKETS: usize = 64;
/// Number of responses in a histogram at which all counts are halved, so that old responses do not outvote current
/// ones.
const HISTOGRAM_RESPONSES_MAX: u32 = 512;
/// Half-life of a slowness, of a region, a replica or a spoke: without requests its excess over the fastest one halves in
/// this time. Then the slow one gets one request, and its latency is updated.
pub(crate) const SLOWNESS_HALF_LIFE: Duration = Duration::from_secs(5);
/// Percentile of the hedging delay.
const HEDGE_PERCENTILE_PERMILLE: u32 = 950;

/// Size class of a request: the power of two below its number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SizeClass(u8);

impl SizeClass {
    /// Returns the class of a request with an estimated number of tokens.
    pub fn of(tokens: u64) -> SizeClass {
        let doublings = tokens.max(1).ilog2() as usize;
        SizeClass(doublings.min(SIZE_CLASSES - 1) as u8)
    }

    /// Returns the fewest tokens of this class.
    pub fn tokens(self) -> u64 {
        1 << self.0
    }
}

/// Policy that derives a first-byte timeout from the average latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstByteTimeout {
    /// Multiple of the average.
    pub multiple: u32,
    /// Minimum of the timeout.
    pub floor: Duration,
}

impl FirstByteTimeout {
    /// For a replica: four times the average of the fastest one. Below 50 ms, a delay is caused by scheduling rather
    /// than a fault.
    pub const FOR_REPLICA: FirstByteTimeout =
        FirstByteTimeout { multiple: 4, floor: Duration::from_millis(50) };
    /// For a region: one more multiple, and twice the floor, so that its ingress has the time to retry a frozen
    /// replica's request at another one before the region itself times out.
    pub const FOR_REGION: FirstByteTimeout =
        FirstByteTimeout { multiple: 5, floor: Duration::from_millis(100) };

    /// Returns the timeout for a target with this average latency.
    pub fn for_average(self, average: Duration) -> Duration {
        average.saturating_mul(self.multiple).max(self.floor)
    }
}

/// Latency statistics of one target, by size class.
#[derive(Clone, Debug, Default)]
pub struct LatencyStats {
    sizes: [Option<Box<ClassLatency>>; SIZE_CLASSES],
}

#[derive(Clone, Debug)]
struct ClassLatency {
    average_us: u64,
    long_term_us: u64,
    responses: u32,
    histogram: [u16; BUCKETS],
    histogram_responses: u32,
    last: Instant,
}

impl LatencyStats {
    /// Records the latency of a response to a request of this size.
    pub fn record(&mut self, size: SizeClass, latency: Duration, now: Instant) {
        let latency_us = latency.min(LATENCY_MAX).as_micros() as u64;
        let class = self.sizes[usize::from(size.0)]
            .get_or_insert_with(|| Box::new(ClassLatency::new(latency_us, now)));
        class.last = now;
        class.responses = class.responses.saturating_add(1);
        // The plain mean until there are enough responses for the fixed weight.
        let weight = u64::from(class.responses).min(AVERAGE_WEIGHT_INVERSE);
        class.average_us = (class.average_us * (weight - 1) + latency_us) / weight;
        let weight = u64::from(class.responses).min(LONG_TERM_WEIGHT_INVERSE);
        class.long_term_us = (class.long_term_us * (weight - 1) + latency_us) / weight;
        class.histogram[bucket(latency_us)] += 1;
        class.histogram_responses += 1;
        if class.histogram_responses == HISTOGRAM_RESPONSES_MAX {
            class.histogram.iter_mut().for_each(|count| *count /= 2);
            class.histogram_responses = class.histogram.iter().map(|count| u32::from(*count)).sum();
        }
    }

    /// Records that a request of this size was abandoned after `waited`. Its latency is only known to be more; so it
    /// counts where it is more than the average, and otherwise only as a sign that the average still holds.
    pub fn record_abandoned(&mut self, size: SizeClass, waited: Duration, now: Instant) {
        match &mut self.sizes[usize::from(size.0)] {
            Some(class) if Duration::from_micros(class.average_us) >= waited => class.last = now,
            Some(_) | None => self.record(size, waited, now),
        }
    }

    /// Returns the average latency of this size and the time of the last response, from the first response on.
    pub fn hint(&self, size: SizeClass) -> Option<(Duration, Instant)> {
        self.class(size).map(|class| (Duration::from_micros(class.average_us), class.last))
    }

    /// Returns the sizes with enough responses, and the average latency of each.
    pub fn averages(&self) -> impl Iterator<Item = (SizeClass, Duration)> {
        let sizes = (0..SIZE_CLASSES as u8).map(SizeClass);
        sizes.filter_map(|size| self.average(size).map(|average| (size, average)))
    }

    /// Returns the average latency of this size, once there are enough responses.
    pub fn average(&self, size: SizeClass) -> Option<Duration> {
        let class = self.class(size).filter(|class| class.responses >= SAMPLES_MIN);
        class.map(|class| Duration::from_micros(class.average_us))
    }

    /// Returns the long-term average latency of this size, once there are enough responses.
    pub fn long_term_average(&self, size: SizeClass) -> Option<Duration> {
        let class = self.class(size).filter(|class| class.responses >= SAMPLES_MIN);
        class.map(|class| Duration::from_micros(class.long_term_us))
    }

    /// Returns the 95th percentile of the latency of this size, once there are enough responses.
    pub fn p95(&self, size: SizeClass) -> Option<Duration> {
        let class = self.class(size).filter(|class| class.responses >= SAMPLES_MIN)?;
        let rank = (class.histogram_responses * HEDGE_PERCENTILE_PERMILLE).div_ceil(1000);
        let mut below = 0;
        let reached = class.histogram.iter().position(|count| {
            below += u32::from(*count);
            below >= rank
        });
        reached.map(upper_bound)
    }

    fn class(&self, size: SizeClass) -> Option<&ClassLatency> {
        self.sizes[usize::from(size.0)].as_deref()
    }
}

impl ClassLatency {
    fn new(first_us: u64, now: Instant) -> ClassLatency {
        ClassLatency {
            average_us: first_us,
            long_term_us: first_us,
            responses: 0,
            histogram: [0; BUCKETS],
            histogram_responses: 0,
            last: now,
        }
    }
}

/// Returns the remaining excess of a slowness over the fastest one, this long after the last response.
pub(crate) fn decayed_slowness(excess: u64, since: Duration) -> u64 {
    let halvings = since.as_millis() / SLOWNESS_HALF_LIFE.as_millis();
    excess.checked_shr(u32::try_from(halvings).unwrap_or(u32::MAX)).unwrap_or(0)
}

/// Returns the bucket of a latency: its doublings of a millisecond, and its quarter between two of them.
fn bucket(latency_us: u64) -> usize {
    let Some(doublings) = (latency_us / 1000).checked_ilog2() else { return 0 };
    let quarter = (latency_us - (1000 << doublings)) * u64::from(BUCKETS_PER_DOUBLING) / (1000 << doublings);
    ((doublings * BUCKETS_PER_DOUBLING) as usize + quarter as usize + 1).min(BUCKETS - 1)
}

/// Returns the upper bound of a bucket.
fn upper_bound(bucket: usize) -> Duration {
    let quarters = u32::try_from(bucket).expect("there are few buckets");
    let (doublings, quarter) = (quarters / BUCKETS_PER_DOUBLING, quarters % BUCKETS_PER_DOUBLING);
    let base_us = 1000u64 << doublings;
    Duration::from_micros(base_us + base_us * u64::from(quarter) / u64::from(BUCKETS_PER_DOUBLING))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn stats_of(responses: impl IntoIterator<Item = u32>) -> LatencyStats {
        let mut stats = LatencyStats::default();
        responses.into_iter().for_each(|millis| stats.record(SizeClass::of(1), millis * MS, some_instant()));
        stats
    }

    #[test]
    fn sizes_are_powers_of_two_of_tokens() {
        let same = |a, b| assert_eq!(SizeClass::of(a), SizeClass::of(b), "{a} and {b}");
        let apart = |a, b| assert!(SizeClass::of(a) < SizeClass::of(b), "{a} and {b}");
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
    fn there_is_no_average_before_enough_samples() {
        let few = stats_of((1..SAMPLES_MIN).map(|_| 20));
        assert_eq!((few.average(SizeClass::of(1)), few.p95(SizeClass::of(1))), (None, None));
        assert_eq!(few.hint(SizeClass::of(1)).map(|(average, _)| average), Some(20 * MS));
        let enough = stats_of((0..SAMPLES_MIN).map(|_| 20));
        assert_eq!(enough.average(SizeClass::of(1)), Some(20 * MS));
        assert_eq!(enough.average(SizeClass::of(2)), None, "another size has an average of its own");
    }

    #[test]
    fn the_first_byte_timeout_is_a_multiple_of_the_average_and_at_least_the_floor() {
        assert_eq!(FirstByteTimeout::FOR_REPLICA.for_average(20 * MS), 80 * MS);
        assert_eq!(FirstByteTimeout::FOR_REPLICA.for_average(2 * MS), 50 * MS);
        assert_eq!(FirstByteTimeout::FOR_REGION.for_average(22 * MS), 110 * MS);
        assert_eq!(FirstByteTimeout::FOR_REGION.for_average(Duration::MAX), Duration::MAX);
    }

    /// The edge's timeout has to cover the ingress's own first-byte timeout and the response of another replica.
    #[test]
    fn the_timeout_of_an_edge_covers_a_retry_of_the_ingress() {
        for average in [1, 5, 12, 20, 50, 400].map(|millis| millis * MS) {
            let needed = FirstByteTimeout::FOR_REPLICA.for_average(average) + average;
            assert!(FirstByteTimeout::FOR_REGION.for_average(average) >= needed, "{average:?}");
        }
    }

    #[test]
    fn the_average_follows_a_surge_within_a_few_dozen_responses() {
        let surge = stats_of((0..100).map(|_| 20).chain((0..48).map(|_| 200)));
        let average = surge.average(SizeClass::of(1)).unwrap();
        assert!(average > 180 * MS && average <= 200 * MS, "{average:?}");
    }

    #[test]
    fn the_long_term_average_is_not_moved_by_the_few_responses_that_reveal_a_slow_target() {
        let slow = stats_of((0..500).map(|_| 25).chain((0..20).map(|_| 125)));
        let (average, long_term_average) =
            (slow.average(SizeClass::of(1)).unwrap(), slow.long_term_average(SizeClass::of(1)).unwrap());
        assert!(average > 90 * MS && long_term_average < 42 * MS, "{average:?} {long_term_average:?}");
        assert_eq!(stats_of((1..SAMPLES_MIN).map(|_| 25)).long_term_average(SizeClass::of(1)), None);
    }

    #[test]
    fn an_abandoned_request_counts_only_above_the_average() {
        let mut stats = stats_of((0..100).map(|_| 400));
        stats.record_abandoned(SizeClass::of(1), 84 * MS, some_instant());
        assert_eq!(stats.average(SizeClass::of(1)), Some(400 * MS));
        let mut stats = stats_of((0..100).map(|_| 20));
        stats.record_abandoned(SizeClass::of(1), 84 * MS, some_instant());
        assert_eq!(stats.average(SizeClass::of(1)), Some(24 * MS));
    }

    #[test]
    fn the_hedging_delay_is_the_95th_percentile() {
        let at = |slow_of_100: u32| {
            stats_of((0..400).map(|n| if n % 100 < slow_of_100 { 200 } else { 20 }))
                .p95(SizeClass::of(1))
                .unwrap()
        };
        for (slow, least, most) in [(0, 20, 24), (4, 20, 24), (6, 200, 230), (50, 200, 230)] {
            let hedge = at(slow);
            assert!(least * MS <= hedge && hedge <= most * MS, "{slow} of 100: {hedge:?}");
        }
    }

    #[test]
    fn current_responses_outvote_old_ones() {
        let changed = stats_of((0..5000).map(|_| 200).chain((0..2000).map(|_| 20)));
        assert!(changed.p95(SizeClass::of(1)).unwrap() < 30 * MS);
    }

    proptest! {
        #[test]
        fn a_latency_lies_in_its_bucket_and_a_bucket_is_narrow(latency_us in 0u64..60_000_000) {
            let bucket = bucket(latency_us);
            let latency = Duration::from_micros(latency_us);
            prop_assert!(latency < upper_bound(bucket) || bucket == BUCKETS - 1);
            prop_assert!(bucket == 0 || upper_bound(bucket - 1) <= latency);
            prop_assert!(upper_bound(bucket) <= (latency + latency / 4 + MS));
        }

        #[test]
        fn no_latency_overflows(latency_us: u64, class in 1usize..40) {
            let mut stats = LatencyStats::default();
            (0..class).for_each(|_| stats.record(SizeClass::of(1), Duration::from_micros(latency_us), some_instant()));
            stats.p95(SizeClass::of(1));
        }
    }
}
