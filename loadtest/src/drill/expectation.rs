//! What must hold, as a person writes it, and over which part of the run.
//!
//! | words | hold when |
//! |---|---|
//! | `failed == 0`, `failed <= 5` | so many requests failed |
//! | `failures only CODE` | every failure was this refusal, and there was one |
//! | `p99 < 250ms`, also `p50`, `p90`, `p99.9`, `max`, also `<=` | answers took so long |
//! | `p99 <= 1.2x before` | answers took at most so many times as long as before the first step |
//! | `served_in eu only`, `served_in eu,aws/us-east-1 only` | no answer came from elsewhere, and some came |
//! | `served_by R` | some answer came from R |
//! | `evacuated`, `evacuated R` | no answer comes from R any more, and the gateway has taken it out of use |
//! | `generation never falls` | no reader saw an older table after a newer one, nor two tables of one number |
//! | `generation rises` | somebody has a newer table than anybody had at the step |
//! | `hubs agree` | all hubs give out the same table |
//!
//! Behind each may stand `for NAME` (of the requests of that load alone) and, under a step, `within 5s`.
//!
//! Where it stands says over what it is measured. In `before`: from the end of the warm-up to the first step. In `expect` at the top:
//! over the whole run. Under a step: from the step (or, with `within`, from so long after it) to the next step at another
//! moment, or to the end. `within 5s` so means: at the latest then it holds, and goes on holding. Parts of seconds at both
//! ends of a span are left out, since a run is kept by seconds; but for `failed`, which takes them in.

use std::fmt;
use std::time::Duration;

use regions::{Catalogue, RegionId, ResidencyPolicy};
use replica_core::wire::error::ErrorCode;

use super::World;
use super::action::{known, named, time};

/// Something that must hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    /// As it was written.
    pub text: String,
    /// What is looked at.
    pub what: What,
    /// The load whose requests count; all if none is named.
    pub load: Option<String>,
    /// Over what.
    pub span: Span,
}

/// A part of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// When what it stands under happened: the step, or the begin.
    pub anchor: Duration,
    /// Its begin.
    pub from: Duration,
    /// Its end.
    pub to: Duration,
}

/// What is looked at.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// How many requests failed: at most so many.
    FailedAtMost(u64),
    /// Failures were all of this code.
    FailuresOnly(ErrorCode),
    /// How long answers took.
    Latency {
        /// Which of them.
        quantile: Quantile,
        /// Whether the bound itself is too much.
        below: bool,
        /// How long they may take.
        bound: Bound,
    },
    /// Answers came from there and from nowhere else.
    ServedInOnly(ResidencyPolicy),
    /// Some came from there.
    ServedBy(RegionId),
    /// None come from there any more.
    Evacuated(RegionId),
    /// No reader went back.
    GenerationNeverFalls,
    /// Readers went on.
    GenerationRises,
    /// Hubs give out the same.
    HubsAgree,
}

/// A bound for a latency.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// This long.
    Time(Duration),
    /// So many times as long as before.
    TimesBefore(f64),
}

/// One of the quantiles that are shown everywhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantile {
    /// As it is written.
    pub name: &'static str,
    /// The share of answers that take no longer.
    pub share: f64,
    /// From how many requests it can be told.
    pub requests_min: u64,
}

/// With so many there is one beyond the quantile.
const QUANTILES: [Quantile; 5] = [
    Quantile { name: "p50", share: 0.5, requests_min: 2 },
    Quantile { name: "p90", share: 0.9, requests_min: 10 },
    Quantile { name: "p99", share: 0.99, requests_min: 100 },
    Quantile { name: "p99.9", share: 0.999, requests_min: 1000 },
    Quantile { name: "max", share: 1.0, requests_min: 1 },
];

/// What is told where nothing fits.
const FORMS: &str = "`failed == 0`, `failures only no_capacity_in_allowed_regions`, `p99 < 250ms`, `p99 <= 1.2x before`, \
    `served_in eu only`, `served_by R`, `evacuated`, `generation never falls`, `generation rises` or `hubs agree`, and behind it \
    `for NAME` of a load and, under a step, `within 5s`";

/// An expectation as it was written, before it is known when.
pub(super) struct Written {
    pub(super) what: What,
    pub(super) load: Option<String>,
    pub(super) within: Option<Duration>,
}

impl Written {
    /// Reads `text`, which stands under a step that is about `region`, or under none.
    pub(super) fn read(
        text: &str,
        world: &World,
        loads: &[&str],
        region: Option<&RegionId>,
        catalogue: &Catalogue,
    ) -> Result<Written, String> {
        let mut words: Vec<&str> = text.split_whitespace().collect();
        let (mut load, mut within) = (None, None);
        while let [rest @ .., word, value] = words.as_slice() {
            match *word {
                "within" if within.is_none() => within = Some(time(value)?),
                "for" if load.is_none() => load = Some(named(value, loads)?),
                _ => break,
            }
            words = rest.to_vec();
        }
        let what = What::read(&words, text, world, region, catalogue)?;
        if load.is_some() && !what.is_of_requests() {
            return Err(format!("`{text}`: tables are nobody's load; leave out `for`"));
        }
        Ok(Written { what, load, within })
    }
}

impl What {
    fn read(
        words: &[&str],
        text: &str,
        world: &World,
        region: Option<&RegionId>,
        catalogue: &Catalogue,
    ) -> Result<What, String> {
        match words {
            ["failed", "==", "0"] => Ok(What::FailedAtMost(0)),
            ["failed", "<=", count] => count
                .parse()
                .map(What::FailedAtMost)
                .map_err(|_| format!("`{text}`: `{count}` is no whole number")),
            ["failures", "only", code] => ErrorCode::parse(code).map(What::FailuresOnly).ok_or_else(|| {
                format!(
                    "`{text}`: `{code}` is no code of an error; docs/errors.md lists those that there are"
                )
            }),
            ["served_in", areas, "only"] => {
                let policy: ResidencyPolicy = areas.parse().map_err(|error| format!("`{text}`: {error}"))?;
                match policy.check(catalogue).as_slice() {
                    [] => Ok(What::ServedInOnly(policy)),
                    problems => Err(format!("`{text}`: {}", problems.join("; "))),
                }
            }
            ["served_by", region] => known(region, world).map(What::ServedBy),
            ["evacuated", region] => known(region, world).map(What::Evacuated),
            ["evacuated"] => region.cloned().map(What::Evacuated).ok_or_else(|| {
                format!("`{text}`: which region? what it stands under is about none; write evacuated R")
            }),
            ["generation", "never", "falls"] => Ok(What::GenerationNeverFalls),
            ["generation", "rises"] => Ok(What::GenerationRises),
            ["hubs", "agree"] if world.hubs == 1 => {
                Err(format!("`{text}`: there is one hub; write hubs = 2 under [world], or leave it out"))
            }
            ["hubs", "agree"] => Ok(What::HubsAgree),
            [quantile, compare @ ("<" | "<="), bound @ ..] => {
                let known = QUANTILES.into_iter().find(|known| known.name == *quantile);
                let quantile = known.ok_or_else(|| unknown(text))?;
                let bound = match bound {
                    [times, "before"] => Bound::TimesBefore(times_before(times)?),
                    [bound] => Bound::Time(time(bound)?),
                    _ => return Err(unknown(text)),
                };
                Ok(What::Latency { quantile, below: *compare == "<", bound })
            }
            _ => Err(unknown(text)),
        }
    }

    /// Whether it is about requests, and not about tables.
    pub fn is_of_requests(&self) -> bool {
        match self {
            What::FailedAtMost(_)
            | What::FailuresOnly(_)
            | What::Latency { .. }
            | What::ServedInOnly(_)
            | What::ServedBy(_)
            | What::Evacuated(_) => true,
            What::GenerationNeverFalls | What::GenerationRises | What::HubsAgree => false,
        }
    }
}

fn unknown(text: &str) -> String {
    format!("`{text}` is nothing that a drill can measure; write {FORMS}")
}

fn times_before(text: &str) -> Result<f64, String> {
    let times = text.strip_suffix('x').and_then(|number| number.parse().ok());
    times
        .filter(|times: &f64| *times > 0.0 && times.is_finite())
        .ok_or_else(|| format!("`{text}`: write how many times as long as before, such as 1.2x"))
}

impl Span {
    /// The whole seconds of it: from the first that lies in it to the end of the last.
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
