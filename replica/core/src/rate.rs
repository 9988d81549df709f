//! How fast the engine is, as measured on its latest batches.
//!
//! The figure is tokens over *busy* time, so an idle replica does not look slow; and it is a ratio of two decayed
//! sums, not an average of ratios, so a batch counts by its size.

use std::time::Duration;

/// What one more batch leaves of the older ones: 0.9 remembers about the last ten, which is long enough to smooth a
/// scheduler's hiccup and short enough to follow a noisy neighbour within a second or two.
const KEPT: f64 = 0.9;

/// Tokens per second of busy time.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenRate {
    tokens: f64,
    busy_seconds: f64,
}

impl TokenRate {
    /// A batch of `tokens` took `busy`.
    pub fn observe(&mut self, tokens: u64, busy: Duration) {
        self.tokens = self.tokens * KEPT + tokens as f64;
        self.busy_seconds = self.busy_seconds * KEPT + busy.as_secs_f64();
    }

    /// Tokens per second; 0 until something was measured.
    pub fn tokens_per_second(&self) -> f64 {
        if self.busy_seconds > 0.0 { self.tokens / self.busy_seconds } else { 0.0 }
    }

    /// How long `tokens` take at this rate; `None` until something was measured.
    pub fn time_for(&self, tokens: u64) -> Option<Duration> {
        let rate = self.tokens_per_second();
        (rate > 0.0).then(|| Duration::try_from_secs_f64(tokens as f64 / rate).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_claimed_before_something_was_measured() {
        let rate = TokenRate::default();
        assert_eq!(rate.tokens_per_second(), 0.0);
        assert_eq!(rate.time_for(1), None);
    }

    #[test]
    fn a_batch_counts_by_its_size() {
        let mut rate = TokenRate::default();
        rate.observe(10, Duration::from_millis(10)); // 1 000 tokens/s, hardly anything
        rate.observe(10_000, Duration::from_secs(1)); // 10 000 tokens/s
        let measured = rate.tokens_per_second();
        assert!((9_800.0..10_000.0).contains(&measured), "{measured}");
    }

    #[test]
    fn the_rate_follows_an_engine_that_became_slower() {
        let mut rate = TokenRate::default();
        (0..50).for_each(|_| rate.observe(1_000, Duration::from_millis(100)));
        (0..50).for_each(|_| rate.observe(1_000, Duration::from_millis(400)));
        assert!((rate.tokens_per_second() - 2_500.0).abs() < 50.0, "{}", rate.tokens_per_second());
        assert_eq!(rate.time_for(0), Some(Duration::ZERO));
    }
}
