//! Arrival schedule: intended starts of requests, determined by a seed before the first request is sent.
//!
//! A schedule is an iterator of intended starts, as time since the start of the run. It has no clock and no feedback
//! from the run; this makes the loop open.
//!
//! The schedule follows a [`RateProfile`] by count: the i-th request of the constant process is due when the profile's
//! cumulative count reaches i, instead of one interval after the previous request, so that rounding errors do not
//! accumulate over a day. The Poisson process draws exponential steps between counts, as independent clients arrive:
//! the same rate at every moment, with bursts that a constant rate never shows.

use std::fmt;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::profile::RateProfile;

configuration::words! {
    /// Arrival process: distribution of the intervals between requests.
    pub enum ArrivalProcess {
        /// Equal intervals.
        Constant = "constant",
        /// Exponential intervals, as of independent clients.
        Poisson = "poisson",
    }
}

/// Intended starts of one task, in order, as time since the start of the run.
pub struct ArrivalSchedule(Box<dyn Iterator<Item = Duration> + Send>);

impl ArrivalSchedule {
    /// Creates the schedule of `process` along `profile`. Equal arguments give equal schedules.
    pub fn new(process: ArrivalProcess, profile: RateProfile, seed: u64) -> ArrivalSchedule {
        let rng = SmallRng::seed_from_u64(seed);
        ArrivalSchedule(Box::new(ProfileSchedule { process, profile, number: 0, poisson_count: 0.0, rng }))
    }

    /// Creates a schedule from recorded starts, in order.
    pub fn recorded(starts: impl Iterator<Item = Duration> + Send + 'static) -> ArrivalSchedule {
        ArrivalSchedule(Box::new(starts))
    }
}

impl Iterator for ArrivalSchedule {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

impl fmt::Debug for ArrivalSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ArrivalSchedule")
    }
}

/// Schedule along a rate profile.
struct ProfileSchedule {
    process: ArrivalProcess,
    profile: RateProfile,
    number: u64,
    poisson_count: f64,
    rng: SmallRng,
}

impl Iterator for ProfileSchedule {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let count = match self.process {
            ArrivalProcess::Constant => self.number as f64,
            ArrivalProcess::Poisson => {
                // 1 - u is in (0, 1], where the logarithm is finite.
                let u: f64 = self.rng.random();
                self.poisson_count += -(1.0 - u).ln();
                self.poisson_count
            }
        };
        self.number += 1;
        let start = Duration::from_secs_f64(self.profile.when(count)?);
        // After rounding to nanoseconds, the last start can coincide with the end.
        (start < self.profile.duration()).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::tests::{profile, profiles};
    use proptest::prelude::*;

    fn starts(process: ArrivalProcess, rate: f64, duration_ms: u64, seed: u64) -> Vec<Duration> {
        through(process, &format!("{rate} for {duration_ms}ms"), seed)
    }

    fn through(process: ArrivalProcess, text: &str, seed: u64) -> Vec<Duration> {
        ArrivalSchedule::new(process, profile(text), seed).collect()
    }

    #[test]
    fn a_constant_rate_has_equal_gaps() {
        let starts = starts(ArrivalProcess::Constant, 100.0, 30_000, 1);
        assert_eq!(starts.len(), 3000);
        assert_eq!(starts[0], Duration::ZERO);
        assert_eq!(starts[2999], Duration::from_millis(29_990));
    }

    #[test]
    fn poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() {
        let starts = starts(ArrivalProcess::Poisson, 1000.0, 20_000, 7);
        let gaps: Vec<f64> = starts.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // 20 000 gaps: the standard error of the mean is 0.7 %, that of the deviation 1 %; four standard errors are
        // allowed.
        assert!((mean * 1000.0 - 1.0).abs() < 0.03, "mean gap {mean}");
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.04, "spread {} of mean {mean}", variance.sqrt());
    }

    /// Counts the starts of each stage: the surge is present and on time, and no request is lost at a boundary.
    #[test]
    fn each_stage_has_its_requests() {
        let text = "100 for 10s, 300 for 10s, 0 for 5s, 0 to 100 for 10s";
        let counts = |process, seed| {
            let mut counts = [0; 4];
            for start in through(process, text, seed) {
                counts[profile(text).ends().partition_point(|end| *end <= start)] += 1;
            }
            counts
        };
        assert_eq!(counts(ArrivalProcess::Constant, 0), [1000, 3000, 0, 500]);
        let drawn = counts(ArrivalProcess::Poisson, 3);
        for (count, expected) in drawn.into_iter().zip([1000.0_f64, 3000.0, 0.0, 500.0]) {
            // Four standard deviations of a Poisson count.
            assert!((f64::from(count) - expected).abs() <= 4.0 * expected.sqrt(), "{drawn:?}");
        }
    }

    proptest! {
        #[test]
        fn starts_go_forward_through_any_profile(poisson: bool, profile in profiles(), seed: u64) {
            let process = if poisson { ArrivalProcess::Poisson } else { ArrivalProcess::Constant };
            let starts: Vec<Duration> = ArrivalSchedule::new(process, profile.clone(), seed).collect();
            prop_assert!(starts.is_sorted());
            prop_assert!(starts.iter().all(|start| *start < profile.duration()));
        }

        #[test]
        fn starts_never_go_back_and_stay_within_the_run(
            poisson: bool, rate in 0.1_f64..5000.0, duration_ms in 1_u64..2000, seed: u64,
        ) {
            let process = if poisson { ArrivalProcess::Poisson } else { ArrivalProcess::Constant };
            let starts = starts(process, rate, duration_ms, seed);
            prop_assert!(starts.is_sorted());
            prop_assert!(starts.iter().all(|start| *start < Duration::from_millis(duration_ms)));
        }

        #[test]
        fn a_constant_rate_sends_rate_times_duration(rate in 0.1_f64..5000.0, duration_ms in 1_u64..2000) {
            let expected = (rate * duration_ms as f64 / 1000.0).ceil();
            let sent = starts(ArrivalProcess::Constant, rate, duration_ms, 0).len() as f64;
            // A tolerance of one, for a product that is a whole number only after rounding.
            prop_assert!((sent - expected).abs() <= 1.0, "{sent} instead of {expected}");
        }

        #[test]
        fn the_seed_determines_the_schedule(seed: u64) {
            let first = starts(ArrivalProcess::Poisson, 100.0, 1000, seed);
            prop_assert_eq!(&first, &starts(ArrivalProcess::Poisson, 100.0, 1000, seed));
            prop_assert_ne!(first, starts(ArrivalProcess::Poisson, 100.0, 1000, seed.wrapping_add(1)));
        }
    }
}
