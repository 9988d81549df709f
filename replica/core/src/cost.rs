//! Cost model of a batch, learnt from finished batches: a fixed cost, and a cost per token.
//!
//! The fixed cost is the reason for batches: weights are streamed from memory and threads woken however few tokens
//! there are. With it follow how short a batch may be before throughput suffers ([`BatchCost::tokens_at`]), how many
//! tokens fit into a time ([`BatchCost::tokens_within`]), and what a batching delay can save ([`crate::window`]).
//!
//! The line is fitted by least squares over decaying sums, so that it follows an engine that becomes slower. Two rules
//! keep it stable on a shared machine. A batch that was preempted for a second counts as at most [`OUTLIER_FACTOR`]
//! times its expected time. And batches of one size carry no information about the fixed cost: while sizes do not
//! differ, the last known fixed cost stays and only the slope is updated; before sizes have ever differed, the cost is
//! unknown.

use std::time::Duration;

/// Decay per batch: about the last fifty batches count, a second or two of a busy replica.
const DECAY: f64 = 0.98;
/// A batch counts as at most this many times its expected time.
const OUTLIER_FACTOR: f64 = 4.0;
/// Batches before outliers can be detected.
const OUTLIER_MIN_BATCHES: f64 = 8.0;
/// Sizes differ if their standard deviation is at least this fraction of their mean. Below it the fixed cost would be
/// an extrapolation over more than five times the measured distance.
const MIN_RELATIVE_SPREAD: f64 = 0.2;

/// Fixed time and time per token of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchCost {
    /// Seconds of an empty batch.
    pub fixed: f64,
    /// Seconds that each token adds; above 0.
    pub per_token: f64,
}

impl BatchCost {
    /// Returns the time of a batch of `tokens`.
    pub fn time(&self, tokens: u64) -> Duration {
        duration(self.fixed + self.per_token * tokens as f64)
    }

    /// Returns the tokens of a batch that takes at most `time`; 0 if the fixed cost alone takes longer.
    pub fn tokens_within(&self, time: Duration) -> u64 {
        ((time.as_secs_f64() - self.fixed) / self.per_token).max(0.0) as u64
    }

    /// Returns the tokens of the shortest batch that has the fraction `speed` of the speed of an infinite batch: the
    /// one whose fixed cost is a fraction `1 - speed` of its time.
    pub fn tokens_at(&self, speed: f64) -> u64 {
        (self.fixed / self.per_token * speed / (1.0 - speed)).ceil() as u64
    }
}

/// Estimator of a [`BatchCost`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CostModel {
    count: f64,
    tokens: f64,
    tokens_squared: f64,
    seconds: f64,
    product: f64,
    /// Unknown until batch sizes have differed.
    fixed: Option<f64>,
}

impl CostModel {
    /// Records that a batch of `tokens` took `busy`.
    pub fn observe(&mut self, tokens: u64, busy: Duration) {
        let tokens = tokens as f64;
        let mut seconds = busy.as_secs_f64();
        if let Some(BatchCost { fixed, per_token }) = self.cost()
            && self.count >= OUTLIER_MIN_BATCHES
        {
            seconds = seconds.min(OUTLIER_FACTOR * (fixed + per_token * tokens));
        }
        self.count = self.count * DECAY + 1.0;
        self.tokens = self.tokens * DECAY + tokens;
        self.tokens_squared = self.tokens_squared * DECAY + tokens * tokens;
        self.seconds = self.seconds * DECAY + seconds;
        self.product = self.product * DECAY + tokens * seconds;
        let (mean_tokens, mean_seconds) = (self.tokens / self.count, self.seconds / self.count);
        let variance = self.tokens_squared / self.count - mean_tokens * mean_tokens;
        if variance >= (MIN_RELATIVE_SPREAD * mean_tokens).powi(2) && variance > 0.0 {
            let slope = (self.product / self.count - mean_tokens * mean_seconds) / variance;
            self.fixed = Some((mean_seconds - slope * mean_tokens).clamp(0.0, mean_seconds));
        } else {
            self.fixed = self.fixed.map(|fixed| fixed.min(mean_seconds));
        }
    }

    /// Returns the learnt cost; `None` until batches of different sizes are done.
    pub fn cost(&self) -> Option<BatchCost> {
        let fixed = self.fixed?;
        let per_token = (self.seconds - fixed * self.count) / self.tokens;
        // If the fixed cost explains the whole time, the cost per token would be 0; a billionth of a second is harmless.
        Some(BatchCost { fixed, per_token: per_token.max(1e-9) })
    }
}

/// Converts seconds to a duration; values that are not a valid time become the maximum.
pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learnt(batches: impl IntoIterator<Item = (u64, f64)>) -> BatchCost {
        let mut model = CostModel::default();
        for (tokens, seconds) in batches {
            model.observe(tokens, Duration::from_secs_f64(seconds));
        }
        model.cost().expect("batches were done")
    }

    #[track_caller]
    fn check(cost: BatchCost, fixed: f64, per_token: f64) {
        let near = |a: f64, b: f64| (a - b).abs() <= 0.05 * b + 1e-9;
        assert!(near(cost.fixed, fixed) && near(cost.per_token, per_token), "{cost:?}");
    }

    /// Returns sizes from 10 to 500 in pseudorandom order.
    fn sizes() -> impl Iterator<Item = u64> {
        (0..400).map(|n| 10 + n * 7919 % 491)
    }

    #[test]
    fn cost_is_unknown_before_batches_of_different_sizes() {
        let mut model = CostModel::default();
        assert_eq!(model.cost(), None);
        (0..100).for_each(|_| model.observe(256, Duration::from_millis(25)));
        assert_eq!(model.cost(), None);
        (0..10).for_each(|_| model.observe(10, Duration::from_millis(2)));
        assert!(model.cost().is_some());
    }

    #[test]
    fn fixed_cost_and_slope_are_learnt() {
        check(learnt(sizes().map(|n| (n, 2e-3 + 1e-4 * n as f64))), 2e-3, 1e-4);
        check(learnt(sizes().map(|n| (n, 1e-4 * n as f64))), 0.0, 1e-4);
    }

    #[test]
    fn batches_of_one_size_do_not_change_the_fixed_cost() {
        let before = sizes().map(|n| (n, 2e-3 + 1e-4 * n as f64));
        check(learnt(before.chain((0..1000).map(|_| (256, 2e-3 + 1e-4 * 256.0)))), 2e-3, 1e-4);
    }

    #[test]
    fn an_engine_that_becomes_slower_is_followed() {
        let before = sizes().map(|n| (n, 2e-3 + 1e-4 * n as f64));
        check(learnt(before.chain(sizes().map(|n| (n, 6e-3 + 3e-4 * n as f64)))), 6e-3, 3e-4);
    }

    #[test]
    fn a_preempted_batch_hardly_counts() {
        let slow = |n| if n % 50 == 49 { 1.0 } else { 0.0 };
        let cost = learnt(sizes().enumerate().map(|(i, n)| (n, 2e-3 + 1e-4 * n as f64 + slow(i))));
        let time = cost.time(200).as_secs_f64();
        assert!((0.022..0.027).contains(&time), "{time} instead of 0.022");
    }

    #[test]
    fn short_batches_have_the_requested_speed() {
        let cost = BatchCost { fixed: 2e-3, per_token: 1e-4 };
        assert_eq!(cost.tokens_at(0.95), 380);
        let speed = |tokens: u64| tokens as f64 * cost.per_token / cost.time(tokens).as_secs_f64();
        assert!((speed(380) - 0.95).abs() < 1e-3, "{}", speed(380));
        assert_eq!(cost.tokens_within(Duration::from_micros(22_050)), 200);
        assert_eq!(cost.tokens_within(Duration::from_millis(1)), 0, "less than the fixed part");
    }
}
