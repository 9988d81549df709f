//! When requests start: a timetable that is fixed by its seed before the first request is sent.
//!
//! A timetable is an iterator of intended starts, as time since the start of the run. It knows no clock and does not
//! learn how the run goes, which is what makes the loop open.
//!
//! The constant timetable computes its i-th start as `i / rate` rather than by adding intervals, so that rounding does
//! not accumulate over a day. The Poisson timetable draws exponential gaps, which is how independent callers arrive:
//! the same mean rate, with the bursts that a constant rate never shows.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Requests per second: above zero and at most [`Rate::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Rate(f64);

impl Rate {
    /// Far above what one generator reaches; a rate beyond it is a slip of the keyboard.
    pub const MAX: f64 = 1_000_000.0;

    /// `per_second`, if a run can be paced by it.
    pub fn new(per_second: f64) -> Option<Rate> {
        (per_second > 0.0 && per_second <= Rate::MAX).then_some(Rate(per_second))
    }

    /// Requests per second.
    pub fn per_second(self) -> f64 {
        self.0
    }
}

/// How the gaps between requests are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalProcess {
    /// Equal gaps.
    Constant,
    /// Exponential gaps: callers that know nothing of each other.
    Poisson,
}

impl FromStr for ArrivalProcess {
    type Err = ();

    fn from_str(text: &str) -> Result<ArrivalProcess, ()> {
        match text {
            "constant" => Ok(ArrivalProcess::Constant),
            "poisson" => Ok(ArrivalProcess::Poisson),
            _ => Err(()),
        }
    }
}

impl fmt::Display for ArrivalProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ArrivalProcess::Constant => "constant",
            ArrivalProcess::Poisson => "poisson",
        })
    }
}

/// The intended starts of one run, in order, each as time since the start of the run.
#[derive(Clone, Debug)]
pub struct Timetable {
    process: ArrivalProcess,
    rate: Rate,
    duration: Duration,
    number: u64,
    poisson_clock_s: f64,
    rng: SmallRng,
}

impl Timetable {
    /// The timetable of `process` at `rate` over `duration`. Equal arguments give equal timetables.
    pub fn new(process: ArrivalProcess, rate: Rate, duration: Duration, seed: u64) -> Timetable {
        Timetable {
            process,
            rate,
            duration,
            number: 0,
            poisson_clock_s: 0.0,
            rng: SmallRng::seed_from_u64(seed),
        }
    }
}

impl Iterator for Timetable {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let start_s = match self.process {
            ArrivalProcess::Constant => self.number as f64 / self.rate.0,
            ArrivalProcess::Poisson => {
                // 1 - u lies in (0, 1], where the logarithm is finite.
                let u: f64 = self.rng.random();
                self.poisson_clock_s += -(1.0 - u).ln() / self.rate.0;
                self.poisson_clock_s
            }
        };
        self.number += 1;
        (start_s < self.duration.as_secs_f64()).then(|| Duration::from_secs_f64(start_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn starts(process: ArrivalProcess, rate: f64, duration_ms: u64, seed: u64) -> Vec<Duration> {
        let rate = Rate::new(rate).unwrap();
        Timetable::new(process, rate, Duration::from_millis(duration_ms), seed).collect()
    }

    #[test]
    fn a_rate_is_above_zero_and_finite() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, Rate::MAX * 1.001] {
            assert_eq!(Rate::new(bad), None, "{bad}");
        }
        assert_eq!(Rate::new(Rate::MAX).map(Rate::per_second), Some(Rate::MAX));
    }

    #[test]
    fn a_hundred_a_second_for_thirty_seconds_are_three_thousand_ten_milliseconds_apart() {
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
        // 20 000 gaps: the mean's standard error is 0.7 %, that of the spread 1 %; four of each are allowed.
        assert!((mean * 1000.0 - 1.0).abs() < 0.03, "mean gap {mean}");
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.04, "spread {} of mean {mean}", variance.sqrt());
    }

    proptest! {
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
            // One either way, for a product that falls onto a whole number only after rounding.
            prop_assert!((sent - expected).abs() <= 1.0, "{sent} instead of {expected}");
        }

        #[test]
        fn a_seed_decides_the_timetable(seed: u64) {
            let first = starts(ArrivalProcess::Poisson, 100.0, 1000, seed);
            prop_assert_eq!(&first, &starts(ArrivalProcess::Poisson, 100.0, 1000, seed));
            prop_assert_ne!(first, starts(ArrivalProcess::Poisson, 100.0, 1000, seed.wrapping_add(1)));
        }
    }
}
