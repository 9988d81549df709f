//! Request rate over the course of a run: one rate, or a sequence of stages.
//!
//! A surge is a step (`100 for 10s, 300 for 10s, 100 for 10s`), a daily increase is a ramp (`0 to 300 for 5m`), and a
//! pause is a stage at 0. The rate changes linearly within a stage, so at time `t` of a stage of length `T` from rate
//! `a` to rate `b` its cumulative count is `a·t + (b - a)·t²/2T`. The n-th request of the run is due when the count,
//! summed over the earlier stages, reaches n ([`RateProfile::when`]). All timing follows from inverting this function:
//! the constant process uses whole numbers as counts, the Poisson process exponential steps of mean 1, and neither
//! loses a request at a stage boundary, as one clock per stage would.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::limits::{DURATION_MAX, span, span_at_most};

/// Maximum number of stages; each has a row in the report and a histogram in memory.
pub const STAGES_MAX: usize = 100;

/// Requests per second, from zero (a pause) to [`RequestRate::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct RequestRate(f64);

impl RequestRate {
    /// Largest rate: far above the throughput of one generator, so a larger value is a typing error.
    pub const MAX: f64 = 1_000_000.0;

    /// Validates a rate.
    pub fn new(per_second: f64) -> Option<RequestRate> {
        // Adding zero turns -0 into 0.
        (0.0..=RequestRate::MAX).contains(&per_second).then_some(RequestRate(per_second + 0.0))
    }

    /// Returns requests per second.
    pub fn per_second(self) -> f64 {
        self.0
    }
}

impl FromStr for RequestRate {
    type Err = ();

    fn from_str(text: &str) -> Result<RequestRate, ()> {
        text.trim().parse().ok().and_then(RequestRate::new).ok_or(())
    }
}

impl fmt::Display for RequestRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Part of a run with a constant or linearly changing rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateStage {
    /// Rate at the start.
    pub from: RequestRate,
    /// Rate at the end.
    pub to: RequestRate,
    /// Length of the stage.
    pub duration: Duration,
}

impl RateStage {
    /// Returns the expected number of requests, which need not be whole.
    fn requests(&self) -> f64 {
        (self.from.0 + self.to.0) / 2.0 * self.duration.as_secs_f64()
    }

    /// Returns the seconds after which the cumulative count reaches `count`, which must not exceed the stage's total.
    fn after(&self, count: f64) -> f64 {
        if count <= 0.0 {
            return 0.0;
        }
        // This form of the quadratic's root is exact for equal rates, and for a first rate of zero.
        let slope = (self.to.0 - self.from.0) / self.duration.as_secs_f64();
        let root = (self.from.0 * self.from.0 + 2.0 * slope * count).max(0.0).sqrt();
        2.0 * count / (self.from.0 + root)
    }
}

impl fmt::Display for RateStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RateStage { from, to, duration } = self;
        if from == to {
            write!(f, "{from} for {duration:?}")
        } else {
            write!(f, "{from} to {to} for {duration:?}")
        }
    }
}

/// Stages of a run, in order; at least one stage and at least one request.
#[derive(Clone, Debug, PartialEq)]
pub struct RateProfile(Vec<RateStage>);

impl RateProfile {
    /// Validates the total length and count of stages of non-zero length; the caller checks [`STAGES_MAX`].
    fn of(stages: Vec<RateStage>) -> Result<RateProfile, String> {
        let duration =
            stages.iter().try_fold(Duration::ZERO, |sum: Duration, stage| sum.checked_add(stage.duration));
        if duration.is_none_or(|duration| duration > DURATION_MAX) {
            let max_h = DURATION_MAX.as_secs() / 3600;
            return Err(format!("lasts longer than {max_h}h in total; write shorter stages"));
        }
        if stages.iter().all(|stage| stage.requests() <= 0.0) {
            return Err("contains no request; write a rate above 0 in at least one stage".to_owned());
        }
        Ok(RateProfile(stages))
    }

    /// Parses a rate or a ramp that lasts for `duration`, or stages separated by commas that state their own length.
    /// Without a duration a single rate lasts for `default`.
    pub fn parse(text: &str, duration: Option<&str>, default: Duration) -> Result<RateProfile, Vec<String>> {
        let mut problems = Vec::new();
        let given = duration.map(|given| span_at_most("--duration", given, DURATION_MAX)).transpose();
        let given = given.map_err(|problem| problems.push(problem)).ok().flatten();
        let pieces: Vec<&str> = text.split(',').map(str::trim).collect();
        if pieces.len() > STAGES_MAX {
            problems.push(format!("--rate: has {} stages; write at most {STAGES_MAX}", pieces.len()));
            return Err(problems);
        }
        let (mut stages, mut has_duration) = (Vec::new(), false);
        for (index, piece) in pieces.iter().enumerate() {
            let whole = match pieces.len() {
                1 => format!("--rate {text:?}"),
                _ => format!("--rate {text:?}: stage {} is {piece:?}", index + 1),
            };
            match ParsedStage::read(piece) {
                Err(error) => problems.push(format!("{whole}: {error}")),
                Ok(ParsedStage { from, to, duration: Some(duration) }) => {
                    has_duration = true;
                    stages.push(RateStage { from, to, duration });
                }
                Ok(ParsedStage { from, to, duration: None }) if pieces.len() == 1 => {
                    stages.push(RateStage { from, to, duration: given.unwrap_or(default) });
                }
                Ok(ParsedStage { duration: None, .. }) => {
                    problems.push(format!("{whole}: has no duration; write for example `{piece} for 10s`"));
                }
            }
        }
        if let Some(duration) = duration.filter(|_| has_duration) {
            problems.push(format!(
                "--duration {duration:?}: --rate already defines the duration of each stage; remove one of the two"
            ));
        }
        let whole = if stages.len() == pieces.len() { Some(RateProfile::of(stages)) } else { None };
        match whole {
            Some(Ok(profile)) if problems.is_empty() => return Ok(profile),
            Some(Err(error)) => problems.push(format!("--rate {text:?}: {error}")),
            Some(Ok(_)) | None => {}
        }
        Err(problems)
    }

    /// Creates a profile of one rate.
    pub(crate) fn constant(rate: RequestRate, duration: Duration) -> RateProfile {
        RateProfile(vec![RateStage { from: rate, to: rate, duration }])
    }

    /// Iterates over the stages with their start times.
    pub fn stages(&self) -> impl Iterator<Item = (Duration, &RateStage)> {
        self.0.iter().scan(Duration::ZERO, |next, stage| {
            let begins = *next;
            *next += stage.duration;
            Some((begins, stage))
        })
    }

    /// Returns the end time of each stage.
    pub fn ends(&self) -> Vec<Duration> {
        self.stages().map(|(begins, stage)| begins + stage.duration).collect()
    }

    /// Returns the total length of the stages.
    pub fn duration(&self) -> Duration {
        self.0.iter().map(|stage| stage.duration).sum()
    }

    /// Returns the mean rate over the run, in requests per second.
    pub fn mean_per_second(&self) -> f64 {
        match &*self.0 {
            // Avoids the rounding of a product.
            [RateStage { from, to, .. }] if from == to => from.0,
            stages => stages.iter().map(RateStage::requests).sum::<f64>() / self.duration().as_secs_f64(),
        }
    }

    /// Returns the time at which the cumulative count reaches `count`, in seconds since the start; `None` if it never
    /// does.
    pub fn when(&self, count: f64) -> Option<f64> {
        let (mut left, mut began) = (count, 0.0);
        for stage in &self.0 {
            let requests = stage.requests();
            if left < requests {
                return Some(began + stage.after(left));
            }
            left -= requests;
            began += stage.duration.as_secs_f64();
        }
        None
    }
}

impl fmt::Display for RateProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, stage) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{stage}")?;
        }
        Ok(())
    }
}

/// Stage as parsed.
struct ParsedStage {
    from: RequestRate,
    to: RequestRate,
    duration: Option<Duration>,
}

impl ParsedStage {
    fn read(piece: &str) -> Result<ParsedStage, String> {
        let error = || {
            format!(
                "write requests per second from 0 to {}, such as `100`, `100 for 10s` or `100 to 300 for 10s`",
                RequestRate::MAX
            )
        };
        let words: Vec<&str> = piece.split_whitespace().collect();
        let (rates, duration) = match words.iter().position(|word| *word == "for") {
            Some(at) => (&words[..at], Some(words[at + 1..].concat())),
            None => (&*words, None),
        };
        let (from, to) = match rates {
            [only] => (*only, *only),
            [from, "to", to] => (*from, *to),
            _ => return Err(error()),
        };
        let (Ok(from), Ok(to)) = (from.parse(), to.parse()) else { return Err(error()) };
        let duration = duration.map(|duration| {
            span(&duration)
                .ok_or_else(|| format!("{duration:?} is not a duration; write one such as 500ms, 30s or 2m"))
        });
        Ok(ParsedStage { from, to, duration: duration.transpose()? })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn profile(text: &str) -> RateProfile {
        RateProfile::parse(text, None, Duration::from_secs(10)).unwrap()
    }

    fn problems(text: &str, duration: Option<&str>) -> Vec<String> {
        RateProfile::parse(text, duration, Duration::from_secs(10)).unwrap_err()
    }

    #[test]
    fn a_rate_is_finite_and_not_negative() {
        for bad in [-1.0, f64::NAN, f64::INFINITY, RequestRate::MAX * 1.001] {
            assert_eq!(RequestRate::new(bad), None, "{bad}");
        }
        assert_eq!(RequestRate::new(RequestRate::MAX).map(RequestRate::per_second), Some(RequestRate::MAX));
        assert_eq!(RequestRate::new(-0.0).map(|rate| rate.to_string()), Some("0".to_owned()));
    }

    #[test]
    fn a_profile_is_a_rate_a_ramp_or_stages() {
        let check = |text: &str, duration: Option<&str>, expected: &str| {
            let got = RateProfile::parse(text, duration, Duration::from_secs(10)).unwrap();
            assert_eq!(got.to_string(), expected, "{text}");
        };
        check("100", None, "100 for 10s");
        check(" 0.5 ", Some("2m"), "0.5 for 120s");
        check("0 to 300", Some("1m"), "0 to 300 for 60s");
        check("100 for 10s, 300 for 10s, 100 for 10s", None, "100 for 10s, 300 for 10s, 100 for 10s");
        check("10 for 500 ms,10 to 20 for 1.5s", None, "10 for 500ms, 10 to 20 for 1.5s");
    }

    #[test]
    fn all_invalid_stages_are_reported_at_once() {
        let problems = problems("x for 10s, 100, 5 for soon, 1 to for 1s, 7 for 1s", Some("1s"));
        assert_eq!(problems.len(), 5, "{problems:#?}");
        for (problem, part) in problems.iter().zip([
            "stage 1 is \"x for 10s\": write requests per second",
            "stage 2 is \"100\": has no duration; write for example `100 for 10s`",
            "stage 3 is \"5 for soon\": \"soon\" is not a duration",
            "stage 4 is \"1 to for 1s\": write requests per second",
            "--duration \"1s\": --rate already defines",
        ]) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    }

    #[test]
    fn invalid_profiles_are_rejected_with_the_valid_syntax() {
        let check = |text: &str, duration: Option<&str>, expected: &str| {
            let problems = problems(text, duration);
            assert!(problems.len() == 1 && problems[0].contains(expected), "{expected} in {problems:?}");
        };
        check("", None, "write requests per second");
        check("-1", None, "write requests per second");
        check("1000001", None, "write requests per second");
        check("5 for 1s, 1e999 for 1s", None, "stage 2");
        check("100 for 0s", None, "not a duration");
        check("0", Some("1s"), "contains no request");
        check("0 for 1s, 0 for 2s", None, "contains no request");
        check("1 for 12h, 1 for 13h", None, "longer than 24h");
        check("1", Some("25h"), "--duration");
        let stages = |count: usize| vec!["1 for 1s"; count].join(",");
        assert_eq!(profile(&stages(STAGES_MAX)).stages().count(), STAGES_MAX);
        check(&stages(STAGES_MAX + 1), None, "at most 100");
    }

    #[test]
    fn requests_are_due_when_the_cumulative_count_reaches_them() {
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
    fn a_profile_has_a_duration_and_a_mean_rate() {
        let surge = profile("100 for 10s, 300 for 10s, 100 for 10s");
        assert_eq!((surge.duration(), surge.mean_per_second()), (Duration::from_secs(30), 5000.0 / 30.0));
    }

    pub(crate) fn profiles() -> impl Strategy<Value = RateProfile> {
        // At least one request, as a run requires.
        let stage = (0.1_f64..2000.0, 0.0_f64..2000.0, 1_u64..3000).prop_map(|(from, to, millis)| {
            let rate = |rate| RequestRate::new(rate).unwrap();
            RateStage { from: rate(from), to: rate(to), duration: Duration::from_millis(millis) }
        });
        prop::collection::vec(stage, 1..6).prop_map(|stages| RateProfile::of(stages).unwrap())
    }

    proptest! {
        /// The cumulative count at the returned time, computed forwards, equals the requested count.
        #[test]
        fn when_is_the_inverse_of_the_count(profile in profiles(), share in 0.0_f64..1.0) {
            let all: f64 = profile.stages().map(|(_, stage)| stage.requests()).sum();
            let requested = all * share;
            prop_assume!(requested < all);
            let when = profile.when(requested).unwrap();
            let counted: f64 = profile.stages().map(|(begins, stage)| {
                let inside = (when - begins.as_secs_f64()).clamp(0.0, stage.duration.as_secs_f64());
                let slope = (stage.to.0 - stage.from.0) / stage.duration.as_secs_f64();
                stage.from.0 * inside + slope * inside * inside / 2.0
            }).sum();
            // 12 digits of some thousands of requests.
            prop_assert!((counted - requested).abs() < 1e-6 * (1.0 + all), "{} instead of {}", counted, requested);
        }

        #[test]
        fn display_and_parse_round_trip(profile in profiles()) {
            let shown = profile.to_string();
            prop_assert_eq!(RateProfile::parse(&shown, None, Duration::ZERO).unwrap().to_string(), shown);
        }
    }
}
