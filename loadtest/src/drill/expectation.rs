//! Expectations of a drill, in the syntax of the drill file, and the time spans over which they are evaluated.
//!
//! | syntax | holds if |
//! |---|---|
//! | `failed == 0`, `failed <= 5` | at most this many requests failed |
//! | `failures only CODE` | at least one request failed, and all failures have this error code |
//! | `p99 < 250ms`, also `p50`, `p90`, `p99.9`, `max`, also `<=` | the latency quantile is within the bound |
//! | `p99 <= 1.2x before` | the latency quantile is at most this multiple of its value before the first step |
//! | `served_in eu only`, `served_in eu,aws/us-east-1 only` | there were responses, and all came from these regions |
//! | `served_by R` | at least one response came from R |
//! | `evacuated`, `evacuated R` | no response came from R, and no gateway that responds uses R |
//! | `generation never falls` | no reader saw an older table after a newer one, nor two tables of one generation |
//! | `generation rises` | at least one reader has a newer table than the newest at the step |
//! | `hubs agree` | all hubs publish the same table |
//!
//! Each may be followed by `for NAME` (only requests of that load) and, under a step, by `within 5s`.
//!
//! The position in the file determines the span. `before`: from the end of the warm-up to the first step. `expect` at
//! the top level: the whole run. `expect` under a step: from the step (plus the time of `within`, if given) to the
//! next step at another time, or to the end. `within 5s` therefore means that the condition holds after 5 s at the
//! latest and continues to hold. Statistics are kept per second, so fractions of seconds at both ends of a span are
//! left out, except for `failed`, which includes them.

use std::fmt;
use std::time::Duration;

use regions::{Catalogue, RegionId, ResidencyPolicy};
use replica_api::error::ErrorCode;

use super::DrillFleet;
use super::action::{parse_load, parse_region, time};

/// Expectation of a drill.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    /// Text of the expectation as written in the file.
    pub text: String,
    /// Quantity and condition.
    pub kind: ExpectationKind,
    /// Load whose requests count; `None` for all loads.
    pub load: Option<String>,
    /// Time span of the evaluation.
    pub span: Span,
}

/// Time span of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Time of the step, or zero for expectations outside a step.
    pub anchor: Duration,
    /// Start of the span.
    pub from: Duration,
    /// End of the span.
    pub to: Duration,
}

/// Quantity and condition of an expectation.
#[derive(Clone, Debug, PartialEq)]
pub enum ExpectationKind {
    /// At most this many requests failed.
    FailedAtMost(u64),
    /// Requests failed, and all with this error code.
    FailuresOnly(ErrorCode),
    /// Latency quantile within a bound.
    Latency {
        /// Quantile of the latency.
        quantile: Quantile,
        /// Whether the bound is exclusive.
        below: bool,
        /// Largest allowed latency.
        bound: LatencyBound,
    },
    /// All responses came from regions that this policy allows.
    ServedInOnly(ResidencyPolicy),
    /// At least one response came from this region.
    ServedBy(RegionId),
    /// No response came from this region, and the gateway does not use it.
    Evacuated(RegionId),
    /// No reader's table went back.
    GenerationNeverFalls,
    /// A reader's table is newer than at the step.
    GenerationRises,
    /// All hubs publish the same table.
    HubsAgree,
}

/// Bound of a latency.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LatencyBound {
    /// Absolute bound.
    Time(Duration),
    /// Multiple of the latency before the first step.
    TimesBefore(f64),
}

/// Latency quantile that reports show.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantile {
    /// Name in the syntax of drills.
    pub name: &'static str,
    /// Share of responses that are at least as fast.
    pub share: f64,
    /// Minimum number of requests for a meaningful value.
    pub requests_min: u64,
}

/// Supported quantiles. With `requests_min` requests, one request lies beyond the quantile.
const QUANTILES: [Quantile; 5] = [
    Quantile { name: "p50", share: 0.5, requests_min: 2 },
    Quantile { name: "p90", share: 0.9, requests_min: 10 },
    Quantile { name: "p99", share: 0.99, requests_min: 100 },
    Quantile { name: "p99.9", share: 0.999, requests_min: 1000 },
    Quantile { name: "max", share: 1.0, requests_min: 1 },
];

/// Syntax summary for error messages.
const SYNTAX: &str = "`failed == 0`, `failures only no_capacity_in_allowed_regions`, `p99 < 250ms`, `p99 <= 1.2x before`, \
    `served_in eu only`, `served_by R`, `evacuated`, `generation never falls`, `generation rises` or `hubs agree`; optionally followed by \
    `for NAME` of a load and, under a step, `within 5s`";

/// Expectation as parsed, before its span is known.
pub(super) struct ParsedExpectation {
    pub(super) kind: ExpectationKind,
    pub(super) load: Option<String>,
    pub(super) within: Option<Duration>,
}

impl ParsedExpectation {
    /// Parses `text`. `region` is the region of the step that it stands under, if any.
    pub(super) fn read(
        text: &str,
        fleet: &DrillFleet,
        loads: &[&str],
        region: Option<&RegionId>,
        catalogue: &Catalogue,
    ) -> Result<ParsedExpectation, String> {
        let mut words: Vec<&str> = text.split_whitespace().collect();
        let (mut load, mut within) = (None, None);
        while let [rest @ .., word, value] = words.as_slice() {
            match *word {
                "within" if within.is_none() => within = Some(time(value)?),
                "for" if load.is_none() => load = Some(parse_load(value, loads)?),
                _ => break,
            }
            words = rest.to_vec();
        }
        let kind = ExpectationKind::read(&words, text, fleet, region, catalogue)?;
        if load.is_some() && !kind.concerns_requests() {
            return Err(format!("`{text}`: does not concern requests; leave out `for`"));
        }
        Ok(ParsedExpectation { kind, load, within })
    }
}

impl ExpectationKind {
    fn read(
        words: &[&str],
        text: &str,
        fleet: &DrillFleet,
        region: Option<&RegionId>,
        catalogue: &Catalogue,
    ) -> Result<ExpectationKind, String> {
        match words {
            ["failed", "==", "0"] => Ok(ExpectationKind::FailedAtMost(0)),
            ["failed", "<=", count] => count
                .parse()
                .map(ExpectationKind::FailedAtMost)
                .map_err(|_| format!("`{text}`: `{count}` is not a whole number")),
            ["failures", "only", code] => ErrorCode::parse(code)
                .map(ExpectationKind::FailuresOnly)
                .ok_or_else(|| format!("`{text}`: unknown error code `{code}`; docs/errors.md lists them")),
            ["served_in", areas, "only"] => {
                let policy: ResidencyPolicy = areas.parse().map_err(|error| format!("`{text}`: {error}"))?;
                match policy.check(catalogue).as_slice() {
                    [] => Ok(ExpectationKind::ServedInOnly(policy)),
                    problems => Err(format!("`{text}`: {}", problems.join("; "))),
                }
            }
            ["served_by", region] => parse_region(region, fleet).map(ExpectationKind::ServedBy),
            ["evacuated", region] => parse_region(region, fleet).map(ExpectationKind::Evacuated),
            ["evacuated"] => region
                .cloned()
                .map(ExpectationKind::Evacuated)
                .ok_or_else(|| format!("`{text}`: the step names no region; write evacuated R")),
            ["generation", "never", "falls"] => Ok(ExpectationKind::GenerationNeverFalls),
            ["generation", "rises"] => Ok(ExpectationKind::GenerationRises),
            ["hubs", "agree"] if fleet.hubs == 1 => {
                Err(format!("`{text}`: the fleet has one hub; set hubs = 2 under [fleet], or remove this"))
            }
            ["hubs", "agree"] => Ok(ExpectationKind::HubsAgree),
            [quantile, compare @ ("<" | "<="), bound @ ..] => {
                let quantile = QUANTILES.into_iter().find(|known| known.name == *quantile);
                let quantile = quantile.ok_or_else(|| unknown(text))?;
                let bound = match bound {
                    [times, "before"] => LatencyBound::TimesBefore(times_before(times)?),
                    [bound] => LatencyBound::Time(time(bound)?),
                    _ => return Err(unknown(text)),
                };
                Ok(ExpectationKind::Latency { quantile, below: *compare == "<", bound })
            }
            _ => Err(unknown(text)),
        }
    }

    /// Returns whether the condition concerns requests, as opposed to route tables.
    pub fn concerns_requests(&self) -> bool {
        match self {
            ExpectationKind::FailedAtMost(_)
            | ExpectationKind::FailuresOnly(_)
            | ExpectationKind::Latency { .. }
            | ExpectationKind::ServedInOnly(_)
            | ExpectationKind::ServedBy(_)
            | ExpectationKind::Evacuated(_) => true,
            ExpectationKind::GenerationNeverFalls
            | ExpectationKind::GenerationRises
            | ExpectationKind::HubsAgree => false,
        }
    }
}

fn unknown(text: &str) -> String {
    format!("unknown expectation `{text}`; write {SYNTAX}")
}

fn times_before(text: &str) -> Result<f64, String> {
    let times = text.strip_suffix('x').and_then(|number| number.parse().ok());
    times
        .filter(|times: &f64| *times > 0.0 && times.is_finite())
        .ok_or_else(|| format!("`{text}`: write a factor such as 1.2x"))
}

impl Span {
    /// Returns the first and last whole second that lie within the span.
    pub fn seconds(self) -> (Duration, Duration) {
        let from = self.from.as_secs() + u64::from(self.from.subsec_nanos() > 0);
        (Duration::from_secs(from), Duration::from_secs(self.to.as_secs().max(from)))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0}–{:.0} s", self.from.as_secs_f64(), self.to.as_secs_f64())
    }
}
