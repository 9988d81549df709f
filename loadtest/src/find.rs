//! Looks for the highest rate that keeps a promise: runs at one rate after the other, as the search in [`capacity`](crate::capacity) says.
//!
//! The first task is tried at different rates and the others go on as they were asked for: so one finds out how many lookups a
//! second an endpoint takes beside a backfill.

use std::time::Duration;

use serde::Serialize;

use crate::capacity::{PRECISION, Search, Step};
use crate::options::Options;
use crate::profile::{Profile, Rate};
use crate::record::Snapshot;
use crate::run::{CannotStart, run};
use crate::task::Pacing;

/// The lowest rate that is tried, in requests per second.
const RATE_MIN: f64 = 0.5;

/// What a search needs, checked.
#[derive(Clone, Debug)]
pub struct Wanted {
    options: Options,
    from: f64,
    lasts: Duration,
}

/// One rate that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// Requests per second.
    pub rate_per_s: f64,
    /// Whether the promise held.
    pub held: bool,
    /// Answered in time, a second.
    pub goodput_per_s: f64,
    /// What the promised share stayed within, of the answered ones.
    pub quantile_ms: Option<f64>,
    /// Failed.
    pub failed: u64,
    /// Whether the generator itself was late.
    pub lag_notable: bool,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// The promise.
    pub objective: String,
    /// The highest rate that kept it, twice.
    pub held_per_s: Option<f64>,
    /// The lowest that did not, twice.
    pub failed_per_s: Option<f64>,
    /// All that was tried, in order.
    pub tried: Vec<Tried>,
}

impl Wanted {
    /// A search that `options` describe: an objective, and a first task at one rate, with which it begins.
    pub fn check(options: Options) -> Result<Wanted, Vec<String>> {
        let mut problems = Vec::new();
        if options.slo.is_none() {
            problems.push("--find-capacity: needs what is to be kept; write --slo p99=50ms".to_owned());
        }
        let begins = match &options.tasks[0].pacing {
            Pacing::Open { profile, .. } if profile.stages().count() == 1 => {
                Some((profile.mean_per_second(), profile.lasts()))
            }
            Pacing::Open { .. } | Pacing::Closed { .. } | Pacing::Replayed { .. } => None,
        };
        match begins {
            Some((from, lasts)) if problems.is_empty() => Ok(Wanted { options, from, lasts }),
            Some(_) => Err(problems),
            None => {
                problems.push("--find-capacity: tries one rate after the other; give the first task one, like --rate 100".to_owned());
                Err(problems)
            }
        }
    }

    /// How long each try takes.
    pub fn lasts(&self) -> Duration {
        self.lasts
    }
}

/// Searches. `told` is called after each try and `progress` during it.
pub async fn find(
    wanted: Wanted,
    mut told: impl FnMut(&Tried),
    mut progress: impl FnMut(&Snapshot),
) -> Result<Found, CannotStart> {
    let Wanted { options, from, lasts } = wanted;
    let mut search = Search::new(from, RATE_MIN.min(from), Rate::MAX, PRECISION);
    let mut tried = Vec::new();
    let slo = options.slo.expect("checked: there is an objective");
    loop {
        let rate = match search.next() {
            Step::Try(rate) => rate,
            Step::Done(capacity) => {
                return Ok(Found {
                    objective: slo.to_string(),
                    held_per_s: capacity.held,
                    failed_per_s: capacity.failed,
                    tried,
                });
            }
        };
        let mut options = options.clone();
        if let (Pacing::Open { profile, .. }, Some(rate)) = (&mut options.tasks[0].pacing, Rate::new(rate)) {
            *profile = Profile::constant(rate, lasts);
        }
        // Each try draws arrivals of its own, so that one is not told twice of the same luck.
        options.seed = options.seed.wrapping_add(tried.len() as u64);
        let report = run(options, &mut progress, std::future::pending()).await?;
        let quantile = report.promised().latencies().quantile(slo.quantile);
        let one = Tried {
            rate_per_s: rate,
            held: report.holds(),
            goodput_per_s: report.goodput_per_s().unwrap_or_default(),
            quantile_ms: quantile.map(|span| span.as_secs_f64() * 1e3),
            failed: report.failed(),
            lag_notable: report.lag_is_notable(),
        };
        told(&one);
        search.observe(rate, one.held);
        tried.push(one);
    }
}

impl Tried {
    /// A line for a person.
    pub fn line(&self) -> String {
        let Tried { rate_per_s, held, goodput_per_s, quantile_ms, failed, lag_notable } = self;
        let quantile = quantile_ms.map_or("-".to_owned(), |ms| format!("{ms:.1} ms"));
        let held = if *held { "held" } else { "did not hold" };
        let lag = if *lag_notable { ", the generator was late" } else { "" };
        format!(
            "{rate_per_s:>10.1}/s  {held:<12}  {quantile:>10}  goodput {goodput_per_s:.1}/s, {failed} failed{lag}"
        )
    }
}

impl Found {
    /// The answer as a sentence.
    pub fn sentence(&self) -> String {
        let late = self.tried.iter().any(|tried| tried.lag_notable && !tried.held);
        let late = if late {
            " The generator itself was late where it did not hold: the server may take more than this."
        } else {
            ""
        };
        match (self.held_per_s, self.failed_per_s) {
            (Some(held), Some(failed)) => {
                format!(
                    "{} holds at {held:.1} requests per second, and not at {failed:.1}.{late}",
                    self.objective
                )
            }
            (Some(held), None) => {
                format!(
                    "{} holds at {held:.1} requests per second, the most that was tried.{late}",
                    self.objective
                )
            }
            (None, _) => format!("{} holds at no rate that was tried.{late}", self.objective),
        }
    }

    /// For machines.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers, strings and lists serialise to JSON")
    }
}
