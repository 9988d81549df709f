//! Lock-free histogram with fixed buckets.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bucket bounds in seconds, from 0.1 ms (a lone query on a fast machine) to a minute, by factors of about 2.
pub(super) const SECONDS: &[f64] = &[
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0,
    60.0,
];
/// Bucket bounds for tokens and inputs: powers of 2.
pub(super) const SIZES: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// Histogram: a count for each bucket, and the sum of all values.
#[derive(Debug)]
pub(super) struct AtomicHistogram {
    /// Upper bounds, ascending; a value belongs to the first bucket whose bound it does not exceed.
    bounds: &'static [f64],
    /// One count for each bound, and one for values above the last.
    counts: Vec<AtomicU64>,
    /// In millionths, so that it is a single atomic addition.
    sum_millionths: AtomicU64,
}

impl AtomicHistogram {
    pub(super) fn new(bounds: &'static [f64]) -> AtomicHistogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        AtomicHistogram { bounds, counts, sum_millionths: AtomicU64::new(0) }
    }

    pub(super) fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|end| *end < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_millionths.fetch_add((value * 1e6).round() as u64, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> HistogramSnapshot {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        HistogramSnapshot {
            bounds: self.bounds,
            counts,
            sum: self.sum_millionths.load(Ordering::Relaxed) as f64 / 1e6,
        }
    }
}

/// Values of a histogram at one moment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HistogramSnapshot {
    pub(super) bounds: &'static [f64],
    /// One count more than there are bounds.
    pub(super) counts: Vec<u64>,
    pub(super) sum: f64,
}

impl HistogramSnapshot {
    /// Returns the sum of both, which have the same buckets.
    pub(super) fn plus(mut self, other: &HistogramSnapshot) -> HistogramSnapshot {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.sum += other.sum;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_counted_in_the_first_bucket_that_contains_it() {
        let histogram = AtomicHistogram::new(&[1.0, 2.0]);
        for value in [0.0, 1.0, 1.000_001, 2.0, 3.5] {
            histogram.observe(value);
        }
        let snapshot = histogram.read();
        assert_eq!(snapshot.counts, [2, 2, 1]);
        assert!((snapshot.sum - 7.500_001).abs() < 1e-9, "{}", snapshot.sum);
        assert_eq!(snapshot.clone().plus(&snapshot).counts, [4, 4, 2]);
    }
}
