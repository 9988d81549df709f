//! Lock-free histogram of durations with fixed buckets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets in microseconds, from a tenth of a millisecond (a gateway's own share) to a minute (a
/// large request of a backfill) by factors of about 2.
const ENDS_US: [u64; 18] = [
    100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
    2_000_000, 5_000_000, 10_000_000, 20_000_000, 60_000_000,
];

/// Number of durations by bucket, and their sum.
#[derive(Debug, Default)]
pub(crate) struct LatencyHistogram {
    /// One more bucket than there are bounds, for durations above the last. A duration is in the first bucket whose
    /// bound it does not exceed.
    counts: [AtomicU64; ENDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl LatencyHistogram {
    pub(crate) fn observe(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = ENDS_US.partition_point(|end| *end < us);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Returns each bucket's upper bound in seconds with the number of durations up to it; the last bound is infinite.
    pub(super) fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let ends = ENDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
        let mut below = 0;
        ends.zip(&self.counts).map(move |(end, count)| {
            below += count.load(Ordering::Relaxed);
            (end, below)
        })
    }

    pub(super) fn sum_seconds(&self) -> f64 {
        self.sum_us.load(Ordering::Relaxed) as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_first_bucket_that_holds_it() {
        let histogram = LatencyHistogram::default();
        for us in [0, 100, 101, 60_000_000, 60_000_001] {
            histogram.observe(Duration::from_micros(us));
        }
        let buckets: Vec<_> = histogram.cumulative().collect();
        assert_eq!((buckets[0], buckets[1]), ((0.000_1, 2), (0.000_2, 3)));
        assert_eq!(buckets[ENDS_US.len() - 1], (60.0, 4));
        assert_eq!(buckets[ENDS_US.len()], (f64::INFINITY, 5));
        assert!((histogram.sum_seconds() - 120.000_202).abs() < 1e-9, "{}", histogram.sum_seconds());
    }
}
