//! Histogram of latencies that can be added to others.

use std::time::Duration;

use super::super::WireError;

/// Buckets per doubling: a quantile is at most 9 % off.
const PER_DOUBLING: f64 = 4.0;
/// Upper bound of the first bucket.
const FIRST_MS: f64 = 0.25;
/// Number of buckets; the last one begins at 58 s.
pub(super) const BUCKETS: usize = 72;

/// Histogram of latencies with logarithmic buckets, from 0.25 ms to 58 s.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyHistogram([u64; BUCKETS]);

impl Default for LatencyHistogram {
    fn default() -> LatencyHistogram {
        LatencyHistogram([0; BUCKETS])
    }
}

impl LatencyHistogram {
    /// Counts a latency.
    pub fn record(&mut self, latency: Duration) {
        let doublings = (latency.as_secs_f64() * 1e3 / FIRST_MS).log2();
        // The latency 0 gives minus infinity, which converts to 0.
        let bucket = ((doublings * PER_DOUBLING).ceil().max(0.0) as usize).min(BUCKETS - 1);
        self.0[bucket] += 1;
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &LatencyHistogram) {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count = count.saturating_add(more));
    }

    /// Multiplies the counts, of which only a part was recorded.
    pub fn scale(&mut self, factor: f64) {
        self.0.iter_mut().for_each(|count| *count = (*count as f64 * factor).round() as u64);
    }

    /// Returns a quantile, such as 0.99; `None` without a latency.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let total = self.0.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
        let rank = ((total as f64 * quantile).ceil() as u64).max(1);
        let mut below = 0_u64;
        let bucket = self.0.iter().position(|count| {
            below = below.saturating_add(*count);
            below >= rank
        })?;
        // The geometric middle of the bucket.
        let ms = FIRST_MS * ((bucket as f64 - 0.5) / PER_DOUBLING).exp2();
        Some(Duration::from_secs_f64(ms / 1e3))
    }

    pub(super) fn to_wire(&self) -> Vec<[u64; 2]> {
        let counts = self.0.iter().enumerate().filter(|(_, count)| **count > 0);
        counts.map(|(bucket, count)| [bucket as u64, *count]).collect()
    }

    pub(super) fn from_wire(field: &str, wire: &[[u64; 2]]) -> Result<LatencyHistogram, WireError> {
        let mut found = LatencyHistogram::default();
        for [bucket, count] in wire {
            let slot = usize::try_from(*bucket).ok().and_then(|bucket| found.0.get_mut(bucket));
            let Some(slot) = slot else {
                let problem = format!("bucket {bucket}; the buckets are 0 to {}", BUCKETS - 1);
                return Err(WireError::new(field, problem));
            };
            *slot = *count;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_within_a_tenth_of_the_latency() {
        for ms in [1_u64, 7, 20, 93, 350, 1_000, 9_999, 50_000] {
            let mut histogram = LatencyHistogram::default();
            histogram.record(Duration::from_millis(ms));
            let found = histogram.quantile(0.5).unwrap().as_secs_f64() * 1e3;
            assert!((found / ms as f64 - 1.0).abs() < 0.1, "{ms} ms: {found}");
        }
        assert_eq!(LatencyHistogram::default().quantile(0.5), None);
    }

    #[test]
    fn quantiles_are_those_of_all_recorded_latencies() {
        let (mut fast, mut slow) = (LatencyHistogram::default(), LatencyHistogram::default());
        (0..98).for_each(|_| fast.record(Duration::from_millis(10)));
        (0..2).for_each(|_| slow.record(Duration::from_secs(600)));
        slow.record(Duration::ZERO);
        fast.add(&slow);
        let ms = |quantile| fast.quantile(quantile).unwrap().as_millis();
        assert!(ms(0.5).abs_diff(10) <= 1, "{}", ms(0.5));
        assert!(ms(0.99) > 50_000, "the last bucket has no upper bound");
        assert_eq!(ms(0.001), 0);
    }

    #[test]
    fn the_last_bucket_is_accepted_and_the_next_is_not() {
        let last = (BUCKETS - 1) as u64;
        assert!(LatencyHistogram::from_wire("x", &[[last, 1]]).is_ok());
        assert_eq!(LatencyHistogram::from_wire("x", &[[last + 1, 1]]).unwrap_err().field, "x");
    }
}
