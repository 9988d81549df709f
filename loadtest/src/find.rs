//! Capacity test: runs load at a series of rates, chosen by the search in [`capacity`](crate::capacity).
//!
//! The rate of the first task varies and the others keep theirs. This measures, for example, the rate of interactive
//! queries that an endpoint sustains during a backfill.

use std::time::Duration;

use serde::Serialize;

use crate::capacity::{PRECISION, Search, Step};
use crate::options::Options;
use crate::profile::{Profile, Rate};
use crate::record::Snapshot;
use crate::run::{CannotStart, run};
use crate::task::Pacing;

/// Lowest rate of a trial, in requests per second.
const RATE_MIN: f64 = 0.5;

/// Validated options of a capacity test.
#[derive(Clone, Debug)]
pub struct Wanted {
    options: Options,
    from: f64,
    lasts: Duration,
}

/// Result of one trial.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// Requests per second.
    pub rate_per_s: f64,
    /// Whether the objective held.
    pub held: bool,
    /// Responses within the objective's latency, per second.
    pub goodput_per_s: f64,
    /// Latency at the objective's quantile, of ok responses.
    pub quantile_ms: Option<f64>,
    /// Failed requests.
    pub failed: u64,
    /// Whether the generator's lag was a significant part of the latency.
    pub lag_notable: bool,
}

/// Result of a capacity test.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// The objective.
    pub objective: String,
    /// Highest rate at which it held, twice.
    pub held_per_s: Option<f64>,
    /// Lowest rate at which it failed, twice.
    pub failed_per_s: Option<f64>,
    /// All trials, in order.
    pub tried: Vec<Tried>,
}

impl Wanted {
    /// Validates `options`: requires an objective, and a single rate of the first task, which is the initial rate.
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

    /// Returns the duration of each trial.
    pub fn lasts(&self) -> Duration {
        self.lasts
    }
}

/// Runs the test. Calls `on_trial` after each trial and `progress` during it.
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
        // Each trial has its own arrivals, so that trials are independent.
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
    /// Formats the trial as a line of text.
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
    /// Formats the result as a sentence.
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

    /// Formats the result as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers, strings and lists serialise to JSON")
    }
}
