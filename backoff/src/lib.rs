//! Exponential backoff: the delay after a number of consecutive failures, with or without jitter.
//!
//! Every retry, restart and ejection of the workspace that doubles its delay uses [`Backoff`]; each place has its own
//! numbers, with their reasons. Randomness is an argument, and the caller waits. The names of the two kinds of jitter are
//! those of <https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/>: [`Backoff::equal_jitter`] where a
//! lower bound of the delay protects the peer, [`Backoff::full_jitter`] where only the spread matters, and
//! [`Backoff::delay`] where nothing else fails at the same time.

use std::time::Duration;

/// Delays between attempts, doubled after each consecutive failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Delay after the first failure; with jitter its upper bound.
    pub first: Duration,
    /// Upper bound of every delay.
    pub max: Duration,
}

impl Backoff {
    /// Returns the delay after this number of consecutive failures, the first of which is 1.
    pub fn delay(self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.max)
    }

    /// Returns the delay of which one half is random, so that processes that failed at the same time do not try again at
    /// the same time. `draw` is uniform in [0, 1).
    pub fn equal_jitter(self, failures: u32, draw: f64) -> Duration {
        self.delay(failures).mul_f64(0.5 + draw.clamp(0.0, 1.0) / 2.0)
    }

    /// Returns the delay all of which is random. `draw` is uniform in [0, 1).
    pub fn full_jitter(self, failures: u32, draw: f64) -> Duration {
        self.delay(failures).mul_f64(draw.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_secs(5) };

    fn ms(delay: Duration) -> u128 {
        delay.as_millis()
    }

    #[test]
    fn delays_double_up_to_the_maximum() {
        assert_eq!([1, 2, 3, 4, 5].map(|failures| ms(BACKOFF.delay(failures))), [250, 500, 1000, 2000, 4000]);
        assert_eq!([6, 7, 32, 33, u32::MAX].map(|failures| ms(BACKOFF.delay(failures))), [5000; 5]);
        assert_eq!(ms(BACKOFF.delay(0)), 250);
    }

    #[test]
    fn no_number_of_failures_overflows() {
        let unlimited = Backoff { first: Duration::from_secs(u64::MAX / 2), max: Duration::MAX };
        assert_eq!(unlimited.delay(u32::MAX), Duration::MAX);
        let constant = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(1) };
        assert_eq!([1, 9, u32::MAX].map(|failures| constant.delay(failures).as_secs()), [1; 3]);
    }

    #[test]
    fn equal_jitter_is_spread_over_the_upper_half() {
        for (failures, draw, expected) in [(1, 0.0, 125), (1, 1.0, 250), (2, 0.5, 375), (6, 0.0, 2500)] {
            assert_eq!(ms(BACKOFF.equal_jitter(failures, draw)), expected, "{failures} {draw}");
        }
    }

    #[test]
    fn full_jitter_is_spread_over_all_of_it() {
        for (failures, draw, expected) in [(1, 0.0, 0), (1, 1.0, 250), (2, 0.5, 250), (6, 0.5, 2500)] {
            assert_eq!(ms(BACKOFF.full_jitter(failures, draw)), expected, "{failures} {draw}");
        }
    }

    #[test]
    fn a_draw_out_of_range_counts_as_its_bound() {
        assert_eq!(ms(BACKOFF.equal_jitter(1, -1.0)), 125);
        assert_eq!(ms(BACKOFF.full_jitter(1, 2.0)), 250);
    }
}
