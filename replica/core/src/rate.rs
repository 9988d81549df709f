//! Speed of the engine, measured on its latest batches.
//!
//! The speed is tokens over *busy* time, so an idle replica does not look slow. It is a ratio of two decayed sums, not
//! an average of ratios, so a batch counts by its size.

use std::time::Duration;

/// Decay per batch: 0.9 remembers about the last ten batches, which is long enough to smooth a scheduling delay and
/// short enough to follow a noisy neighbour within a second or two.
const DECAY: f64 = 0.9;

/// Tokens per second of busy time.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenRate {
    tokens: f64,
    busy_seconds: f64,
}

impl TokenRate {
    /// Records that a batch of `tokens` took `busy`.
    pub fn observe(&mut self, tokens: u64, busy: Duration) {
        self.tokens = self.tokens * DECAY + tokens as f64;
        self.busy_seconds = self.busy_seconds * DECAY + busy.as_secs_f64();
    }

    /// Returns tokens per second; 0 until a batch was measured.
    pub fn tokens_per_second(&self) -> f64 {
        if self.busy_seconds > 0.0 { self.tokens / self.busy_seconds } else { 0.0 }
    }

    /// Returns the time for `tokens` at this speed; `None` until a batch was measured.
    pub fn time_for(&self, tokens: u64) -> Option<Duration> {
        let rate = self.tokens_per_second();
        (rate > 0.0).then(|| Duration::try_from_secs_f64(tokens as f64 / rate).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_unknown_before_the_first_batch() {
        let rate = TokenRate::default();
        assert_eq!(rate.tokens_per_second(), 0.0);
        assert_eq!(rate.time_for(1), None);
    }

    #[test]
    fn a_batch_counts_by_its_size() {
        let mut rate = TokenRate::default();
        rate.observe(10, Duration::from_millis(10)); // 1 000 tokens/s, little weight
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
