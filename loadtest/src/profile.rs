//! Request rate over the course of a run: one rate, or a sequence of stages.
//!
//! A surge is a step (`100 for 10s, 300 for 10s, 100 for 10s`), a daily increase is a ramp (`0 to 300 for 5m`), and a pause
//! is a stage at 0. The rate changes linearly within a stage, so at time `t` of a stage of length `T` from rate `a` to rate
//! `b` its cumulative count is `a·t + (b - a)·t²/2T`. The n-th request of the run is due when the count, summed over the
//! earlier stages, reaches n ([`RateProfile::when`]). All timing follows from inverting this function: the constant process
//! uses whole numbers as counts, the Poisson process exponential steps of mean 1, and neither loses a request at a stage
//! boundary, as one clock per stage would.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::options::{DURATION_MAX, span, span_at_most};

/// Maximum number of stages; each has a row in the report and a histogram in memory.
pub const STAGES_MAX: usize = 100;

/// Requests per second, from zero (a pause) to [`RequestRate::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Rate(f64);

impl Rate {
    /// Largest rate: far above the throughput of one generator, so a larger value is a typing error.
    pub const MAX: f64 = 1_000_000.0;

    /// Validates a rate.
    pub fn new(per_second: f64) -> Option<Rate> {
        // Adding zero turns -0 into 0.
        (0.0..=Rate::MAX).contains(&per_second).then_some(Rate(per_second + 0.0))
    }

    /// Returns requests per second.
    pub fn per_second(self) -> f64 {
        self.0
    }
}

impl FromStr for Rate {
    type Err = ();

    fn from_str(text: &str) -> Result<Rate, ()> {
        text.trim().parse().ok().and_then(Rate::new).ok_or(())
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Part of a run with a constant or linearly changing rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stage {
    /// Rate at the start.
    pub from: Rate,
    /// Rate at the end.
    pub to: Rate,
    /// Length of the stage.
    pub lasts: Duration,
}

impl Stage {
    /// Returns the expected number of requests, which need not be whole.
    fn requests(&self) -> f64 {
        (self.from.0 + self.to.0) / 2.0 * self.lasts.as_secs_f64()
    }

    /// Returns the seconds after which the cumulative count reaches `count`, which must not exceed the stage's total.
    fn after(&self, count: f64) -> f64 {
        if count <= 0.0 {
            return 0.0;
        }
        // This form of the quadratic's root is exact for equal rates, and for a first rate of zero.
        let slope = (self.to.0 - self.from.0) / self.lasts.as_secs_f64();
        let root = (self.from.0 * self.from.0 + 2.0 * slope * count).max(0.0).sqrt();
        2.0 * count / (self.from.0 + root)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stage { from, to, lasts } = self;
        if from == to { write!(f, "{from} for {lasts:?}") } else { write!(f, "{from} to {to} for {lasts:?}") }
    }
}

/// Stages of a run, in order; at least one stage and at least one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile(Vec<Stage>);

impl Profile {
    /// Validates the total length and count of stages of non-zero length; the caller checks [`STAGES_MAX`].
    fn of(stages: Vec<Stage>) -> Result<Profile, String> {
        let lasts =
            stages.iter().try_fold(Duration::ZERO, |sum: Duration, stage| sum.checked_add(stage.lasts));
        if lasts.is_none_or(|lasts| lasts > DURATION_MAX) {
            let max_h = DURATION_MAX.as_secs() / 3600;
            return Err(format!("takes longer than {max_h}h in all; write shorter stages"));
        }
        if stages.iter().all(|stage| stage.requests() <= 0.0) {
            return Err("asks for no request at all; write a rate above 0 somewhere".to_owned());
        }
        Ok(Profile(stages))
    }

    /// Parses a rate or a ramp that lasts for `duration`, or stages separated by commas that state their own length. Without a
    /// duration a single rate lasts for `default`.
    pub fn parse(text: &str, duration: Option<&str>, unless_said: Duration) -> Result<Profile, Vec<String>> {
        let mut problems = Vec::new();
        let given = duration.map(|given| span_at_most("--duration", given, DURATION_MAX)).transpose();
        let given = given.map_err(|problem| problems.push(problem)).ok().flatten();
        let pieces: Vec<&str> = text.split(',').map(str::trim).collect();
        if pieces.len() > STAGES_MAX {
            problems.push(format!("--rate: has {} stages; write at most {STAGES_MAX}", pieces.len()));
            return Err(problems);
        }
        let (mut stages, mut says_itself) = (Vec::new(), false);
        for (place, piece) in pieces.iter().enumerate() {
            let whole = match pieces.len() {
                1 => format!("--rate {text:?}"),
                _ => format!("--rate {text:?}: stage {} is {piece:?}", place + 1),
            };
            match Written::read(piece) {
                Err(wrong) => problems.push(format!("{whole}: {wrong}")),
                Ok(Written { from, to, lasts: Some(lasts) }) => {
                    says_itself = true;
                    stages.push(Stage { from, to, lasts });
                }
                Ok(Written { from, to, lasts: None }) if pieces.len() == 1 => {
                    stages.push(Stage { from, to, lasts: given.unwrap_or(unless_said) });
                }
                Ok(Written { lasts: None, .. }) => {
                    problems.push(format!("{whole}: say how long it takes, as in `{piece} for 10s`"));
                }
            }
        }
        if let Some(duration) = duration.filter(|_| says_itself) {
            problems.push(format!(
                "--duration {duration:?}: --rate says already how long each stage takes; leave one of the two out"
            ));
        }
        let whole = if stages.len() == pieces.len() { Some(Profile::of(stages)) } else { None };
        match whole {
            Some(Ok(profile)) if problems.is_empty() => return Ok(profile),
            Some(Err(wrong)) => problems.push(format!("--rate {text:?}: {wrong}")),
            Some(Ok(_)) | None => {}
        }
        Err(problems)
    }

    /// Creates a profile of one rate.
    pub(crate) fn constant(rate: Rate, lasts: Duration) -> Profile {
        Profile(vec![Stage { from: rate, to: rate, lasts }])
    }

    /// Iterates over the stages with their start times.
    pub fn stages(&self) -> impl Iterator<Item = (Duration, &Stage)> {
        self.0.iter().scan(Duration::ZERO, |next, stage| {
            let begins = *next;
            *next += stage.lasts;
            Some((begins, stage))
        })
    }

    /// Returns the end time of each stage.
    pub fn ends(&self) -> Vec<Duration> {
        self.stages().map(|(begins, stage)| begins + stage.lasts).collect()
    }

    /// Returns the total length of the stages.
    pub fn lasts(&self) -> Duration {
        self.0.iter().map(|stage| stage.lasts).sum()
    }

    /// Returns the mean rate over the run, in requests per second.
    pub fn mean_per_second(&self) -> f64 {
        match &*self.0 {
            // Avoids the rounding of a product.
            [Stage { from, to, .. }] if from == to => from.0,
            stages => stages.iter().map(Stage::requests).sum::<f64>() / self.lasts().as_secs_f64(),
        }
    }

    /// Returns the time at which the cumulative count reaches `count`, in seconds since the start; `None` if it never does.
    pub fn when(&self, count: f64) -> Option<f64> {
        let (mut left, mut began) = (count, 0.0);
        for stage in &self.0 {
            let requests = stage.requests();
            if left < requests {
                return Some(began + stage.after(left));
            }
            left -= requests;
            began += stage.lasts.as_secs_f64();
        }
        None
    }

    /// Returns the index of the stage that contains this intended start.
    pub fn stage_at(&self, intended: Duration) -> usize {
        let begun = self.stages().take_while(|(begins, _)| *begins <= intended).count();
        begun.saturating_sub(1)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, stage) in self.0.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            write!(f, "{comma}{stage}")?;
        }
        Ok(())
    }
}

/// Stage as parsed.
struct Written {
    from: Rate,
    to: Rate,
    lasts: Option<Duration>,
}

impl Written {
    fn read(piece: &str) -> Result<Written, String> {
        let wrong = || {
            format!(
                "write requests per second from 0 to {}, as `100`, `100 for 10s` or `100 to 300 for 10s`",
                Rate::MAX
            )
        };
        let words: Vec<&str> = piece.split_whitespace().collect();
        let (rates, lasts) = match words.iter().position(|word| *word == "for") {
            Some(at) => (&words[..at], Some(words[at + 1..].concat())),
            None => (&*words, None),
        };
        let (from, to) = match rates {
            [only] => (*only, *only),
            [from, "to", to] => (*from, *to),
            _ => return Err(wrong()),
        };
        let (Ok(from), Ok(to)) = (from.parse(), to.parse()) else { return Err(wrong()) };
        let lasts = lasts.map(|lasts| {
            span(&lasts)
                .ok_or_else(|| format!("{lasts:?} is no span of time; write one like 500ms, 30s or 2m"))
        });
        Ok(Written { from, to, lasts: lasts.transpose()? })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn profile(text: &str) -> Profile {
        Profile::parse(text, None, Duration::from_secs(10)).unwrap()
    }

    fn problems(text: &str, duration: Option<&str>) -> Vec<String> {
        Profile::parse(text, duration, Duration::from_secs(10)).unwrap_err()
    }

    #[test]
    fn a_rate_is_not_below_zero_and_finite() {
        for bad in [-1.0, f64::NAN, f64::INFINITY, Rate::MAX * 1.001] {
            assert_eq!(Rate::new(bad), None, "{bad}");
        }
        assert_eq!(Rate::new(Rate::MAX).map(Rate::per_second), Some(Rate::MAX));
        assert_eq!(Rate::new(-0.0).map(|rate| rate.to_string()), Some("0".to_owned()));
    }

    #[test]
    fn a_profile_is_a_rate_a_ramp_or_stages() {
        let check = |text: &str, duration: Option<&str>, expected: &str| {
            let got = Profile::parse(text, duration, Duration::from_secs(10)).unwrap();
            assert_eq!(got.to_string(), expected, "{text}");
        };
        check("100", None, "100 for 10s");
        check(" 0.5 ", Some("2m"), "0.5 for 120s");
        check("0 to 300", Some("1m"), "0 to 300 for 60s");
        check("100 for 10s, 300 for 10s, 100 for 10s", None, "100 for 10s, 300 for 10s, 100 for 10s");
        check("10 for 500 ms,10 to 20 for 1.5s", None, "10 for 500ms, 10 to 20 for 1.5s");
    }

    #[test]
    fn every_stage_that_is_wrong_is_named_at_once() {
        let problems = problems("x for 10s, 100, 5 for soon, 1 to for 1s, 7 for 1s", Some("1s"));
        assert_eq!(problems.len(), 5, "{problems:#?}");
        for (problem, part) in problems.iter().zip([
            "stage 1 is \"x for 10s\": write requests per second",
            "stage 2 is \"100\": say how long it takes, as in `100 for 10s`",
            "stage 3 is \"5 for soon\": \"soon\" is no span",
            "stage 4 is \"1 to for 1s\": write requests per second",
            "--duration \"1s\": --rate says already",
        ]) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    }

    #[test]
    fn what_is_no_run_is_refused_with_what_to_write() {
        let check = |text: &str, duration: Option<&str>, expected: &str| {
            let problems = problems(text, duration);
            assert!(problems.len() == 1 && problems[0].contains(expected), "{expected} in {problems:?}");
        };
        check("", None, "write requests per second");
        check("-1", None, "write requests per second");
        check("1000001", None, "write requests per second");
        check("5 for 1s, 1e999 for 1s", None, "stage 2");
        check("100 for 0s", None, "no span of time");
        check("0", Some("1s"), "no request at all");
        check("0 for 1s, 0 for 2s", None, "no request at all");
        check("1 for 12h, 1 for 13h", None, "longer than 24h");
        check("1", Some("25h"), "--duration");
        let stages = |count: usize| vec!["1 for 1s"; count].join(",");
        assert_eq!(profile(&stages(STAGES_MAX)).stages().count(), STAGES_MAX);
        check(&stages(STAGES_MAX + 1), None, "at most 100");
    }

    #[test]
    fn requests_are_due_where_the_rate_has_called_for_them() {
        let check = |text: &str, count: f64, expected: Option<f64>| {
            let got = profile(text).when(count);
            let close =
                got.zip(expected).map_or(got == expected, |(got, expected)| (got - expected).abs() < 1e-9);
            assert!(close, "{count} of {text}: {got:?} and not {expected:?}");
        };
        let surge = "100 for 10s, 300 for 10s, 100 for 10s";
        check(surge, 0.0, Some(0.0));
        check(surge, 999.0, Some(9.99));
        check(surge, 1000.0, Some(10.0));
        check(surge, 1300.0, Some(11.0));
        check(surge, 4999.0, Some(29.99));
        check(surge, 5000.0, None);
        // A ramp from zero has a quarter of its count at half of its time.
        check("0 to 100 for 10s", 125.0, Some(5.0));
        check("100 to 0 for 10s", 375.0, Some(5.0));
        check("100 to 0 for 10s", 500.0, None);
        // No request is due during a pause.
        check("10 for 1s, 0 for 60s, 10 for 1s", 10.0, Some(61.0));
    }

    #[test]
    fn a_request_belongs_to_the_stage_that_has_begun() {
        let surge = profile("100 for 10s, 300 for 10s, 100 for 10s");
        for (millis, expected) in [(0, 0), (9_999, 0), (10_000, 1), (19_999, 1), (20_000, 2), (30_000, 2)] {
            assert_eq!(surge.stage_at(Duration::from_millis(millis)), expected, "{millis}");
        }
        assert_eq!((surge.lasts(), surge.mean_per_second()), (Duration::from_secs(30), 5000.0 / 30.0));
    }

    pub(crate) fn profiles() -> impl Strategy<Value = Profile> {
        // At least one request, as a run requires.
        let stage = (0.1_f64..2000.0, 0.0_f64..2000.0, 1_u64..3000).prop_map(|(from, to, millis)| {
            let rate = |rate| Rate::new(rate).unwrap();
            Stage { from: rate(from), to: rate(to), lasts: Duration::from_millis(millis) }
        });
        prop::collection::vec(stage, 1..6).prop_map(|stages| Profile::of(stages).unwrap())
    }

    proptest! {
        /// The cumulative count at the returned time, computed forwards, equals the requested count.
        #[test]
        fn when_is_the_inverse_of_the_count(profile in profiles(), share in 0.0_f64..1.0) {
            let all: f64 = profile.stages().map(|(_, stage)| stage.requests()).sum();
            let asked = all * share;
            prop_assume!(asked < all);
            let when = profile.when(asked).unwrap();
            let counted: f64 = profile.stages().map(|(begins, stage)| {
                let inside = (when - begins.as_secs_f64()).clamp(0.0, stage.lasts.as_secs_f64());
                let slope = (stage.to.0 - stage.from.0) / stage.lasts.as_secs_f64();
                stage.from.0 * inside + slope * inside * inside / 2.0
            }).sum();
            // 12 digits of some thousands of requests.
            prop_assert!((counted - asked).abs() < 1e-6 * (1.0 + all), "{} instead of {}", counted, asked);
        }

        #[test]
        fn what_is_shown_is_read_again(profile in profiles()) {
            let shown = profile.to_string();
            prop_assert_eq!(Profile::parse(&shown, None, Duration::ZERO).unwrap().to_string(), shown);
        }
    }
}
