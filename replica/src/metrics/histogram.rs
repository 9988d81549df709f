//! A distribution that many threads add to without waiting for each other, in fixed buckets.

use std::sync::atomic::{AtomicU64, Ordering};

/// Seconds, from a tenth of a millisecond (a lone query on a fast machine) to a minute, by factors of about 2.
pub(super) const SECONDS: &[f64] = &[
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0,
    60.0,
];
/// Tokens or inputs, by powers of 2.
pub(super) const SIZES: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// How often a value was in which bucket, and the sum of all.
#[derive(Debug)]
pub(super) struct Histogram {
    /// Upper ends, rising; a value belongs to the first bucket whose end it does not exceed.
    ends: &'static [f64],
    /// One more than there are ends, for what is above the last.
    counts: Vec<AtomicU64>,
    /// In millionths, so that it can be added to in one step.
    sum_millionths: AtomicU64,
}

impl Histogram {
    pub(super) fn new(ends: &'static [f64]) -> Histogram {
        let counts = (0..=ends.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { ends, counts, sum_millionths: AtomicU64::new(0) }
    }

    pub(super) fn observe(&self, value: f64) {
        let bucket = self.ends.partition_point(|end| *end < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_millionths.fetch_add((value * 1e6).round() as u64, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Reading {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        Reading { ends: self.ends, counts, sum: self.sum_millionths.load(Ordering::Relaxed) as f64 / 1e6 }
    }
}

/// A histogram at one moment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reading {
    pub(super) ends: &'static [f64],
    /// One more than there are ends.
    pub(super) counts: Vec<u64>,
    pub(super) sum: f64,
}

impl Reading {
    /// Both together; they have the same buckets.
    pub(super) fn plus(mut self, other: &Reading) -> Reading {
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
    fn a_value_is_in_the_first_bucket_that_holds_it() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.0, 1.0, 1.000_001, 2.0, 3.5] {
            histogram.observe(value);
        }
        let reading = histogram.read();
        assert_eq!(reading.counts, [2, 2, 1]);
        assert!((reading.sum - 7.500_001).abs() < 1e-9, "{}", reading.sum);
        assert_eq!(reading.clone().plus(&reading).counts, [4, 4, 2]);
    }
}
