//! Exponentially weighted moving average with a half-life in time.
//!
//! Samples do not arrive at even intervals, so the weight of a new one follows from the time since the last, not from a
//! fixed factor: after one half-life without samples, the new sample counts as much as all earlier ones together. Time is
//! an argument, as in linkerd's `ewma`, so a test need not wait.

use std::time::{Duration, Instant};

/// Time-decayed average of positive quantities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ewma {
    half_life: Duration,
    average: f64,
    at: Instant,
}

impl Ewma {
    /// Creates the average of one sample.
    pub fn new(half_life: Duration, first: f64, now: Instant) -> Ewma {
        assert!(!half_life.is_zero(), "a half-life of zero would drop every sample at once");
        assert!(first.is_finite(), "an average of {first} would never recover");
        Ewma { half_life, average: first, at: now }
    }

    /// Adds a sample. One with the same timestamp as the last, or an older one, has no weight.
    pub fn add(&mut self, sample: f64, now: Instant) {
        assert!(sample.is_finite(), "an average over {sample} would never recover");
        let elapsed = now.saturating_duration_since(self.at);
        let decay = (-elapsed.as_secs_f64() / self.half_life.as_secs_f64()).exp2();
        self.average = sample + (self.average - sample) * decay;
        self.at = self.at.max(now);
    }

    /// Returns the average.
    pub fn get(&self) -> f64 {
        self.average
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const HALF_LIFE: Duration = Duration::from_secs(10);

    #[test]
    fn after_one_half_life_a_new_sample_counts_as_much_as_all_earlier_ones() {
        let start = some_instant();
        let mut ewma = Ewma::new(HALF_LIFE, 100.0, start);
        ewma.add(200.0, start + HALF_LIFE);
        assert!((ewma.get() - 150.0).abs() < 1e-9);
        ewma.add(250.0, start + 3 * HALF_LIFE);
        assert!((ewma.get() - 225.0).abs() < 1e-9);
    }

    #[test]
    fn samples_without_elapsed_time_have_no_weight() {
        let start = some_instant() + HALF_LIFE;
        let mut ewma = Ewma::new(HALF_LIFE, 1.0, start);
        ewma.add(1000.0, start);
        ewma.add(1000.0, start - HALF_LIFE);
        assert_eq!(ewma.get(), 1.0);
        ewma.add(1000.0, start);
        assert_eq!(ewma.get(), 1.0);
    }

    #[test]
    fn a_constant_input_keeps_the_average_and_a_step_is_approached_monotonically() {
        let start = some_instant();
        let mut ewma = Ewma::new(HALF_LIFE, 5.0, start);
        let mut last = 5.0;
        for second in 1..100 {
            ewma.add(5.0, start + Duration::from_secs(second));
            assert_eq!(ewma.get(), 5.0);
        }
        for second in 100..200 {
            ewma.add(9.0, start + Duration::from_secs(second));
            assert!(ewma.get() > last && ewma.get() <= 9.0);
            last = ewma.get();
        }
        assert!(last > 8.99);
    }
}
