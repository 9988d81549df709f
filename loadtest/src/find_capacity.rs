//! Capacity test: runs load at a series of rates, chosen by the search in [`capacity`](crate::capacity).
//!
//! The rate of the first task varies and the others keep theirs. This measures, for example, the rate of interactive
//! queries that an endpoint sustains during a backfill.

use std::time::Duration;

use serde::Serialize;

use crate::capacity::{PRECISION, Search, SearchStep};
use crate::options::Options;
use crate::profile::{RateProfile, RequestRate};
use crate::record::RunSnapshot;
use crate::run::{RunError, run};
use crate::task::Pacing;

/// Lowest rate of a trial, in requests per second.
const RATE_MIN: f64 = 0.5;

/// Validated options of a capacity test.
#[derive(Clone, Debug)]
pub struct CapacitySearchOptions {
    options: Options,
    from: f64,
    duration: Duration,
}

/// Result of one trial.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
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
pub struct CapacityReport {
    /// The objective.
    pub objective: String,
    /// Highest rate at which it held, twice.
    pub held_per_s: Option<f64>,
    /// Lowest rate at which it failed, twice.
    pub failed_per_s: Option<f64>,
    /// All trials, in order.
    pub trials: Vec<Trial>,
}

impl CapacitySearchOptions {
    /// Validates `options`: requires an objective, and a single rate of the first task, which is the initial rate.
    pub fn check(options: Options) -> Result<CapacitySearchOptions, Vec<String>> {
        let mut problems = Vec::new();
        if options.slo.is_none() {
            problems.push("--find-capacity: needs an objective; add --slo such as p99=50ms".to_owned());
        }
        let begins = match &options.tasks[0].pacing {
            Pacing::Open { profile, .. } if profile.stages().count() == 1 => {
                Some((profile.mean_per_second(), profile.duration()))
            }
            Pacing::Open { .. } | Pacing::Closed { .. } | Pacing::Replay { .. } => None,
        };
        match begins {
            Some((from, duration)) if problems.is_empty() => {
                Ok(CapacitySearchOptions { options, from, duration })
            }
            Some(_) => Err(problems),
            None => {
                problems.push("--find-capacity: needs a single initial rate of the first task; write one such as --rate 100".to_owned());
                Err(problems)
            }
        }
    }

    /// Returns the duration of each trial.
    pub fn duration(&self) -> Duration {
        self.duration
    }
}

/// Runs the test. Calls `on_trial` after each trial and `progress` during it.
pub async fn find_capacity(
    search_options: CapacitySearchOptions,
    mut on_trial: impl FnMut(&Trial),
    mut progress: impl FnMut(&RunSnapshot),
) -> Result<CapacityReport, RunError> {
    let CapacitySearchOptions { options, from, duration } = search_options;
    let mut search = Search::new(from, RATE_MIN.min(from), RequestRate::MAX, PRECISION);
    let mut trials = Vec::new();
    let slo = options.slo.expect("checked: there is an objective");
    loop {
        let rate = match search.next() {
            SearchStep::Try(rate) => rate,
            SearchStep::Done(capacity) => {
                return Ok(CapacityReport {
                    objective: slo.to_string(),
                    held_per_s: capacity.held,
                    failed_per_s: capacity.failed,
                    trials,
                });
            }
        };
        let mut options = options.clone();
        if let (Pacing::Open { profile, .. }, Some(rate)) =
            (&mut options.tasks[0].pacing, RequestRate::new(rate))
        {
            *profile = RateProfile::constant(rate, duration);
        }
        // Each trial has its own arrivals, so that trials are independent.
        options.seed = options.seed.wrapping_add(trials.len() as u64);
        let report = run(options, &mut progress, std::future::pending()).await?;
        let quantile = report.slo_requests().latencies().quantile(slo.quantile);
        let trial = Trial {
            rate_per_s: rate,
            held: report.holds(),
            goodput_per_s: report.goodput_per_s().unwrap_or_default(),
            quantile_ms: quantile.map(|span| span.as_secs_f64() * 1e3),
            failed: report.failed(),
            lag_notable: report.lag_is_notable(),
        };
        on_trial(&trial);
        search.observe(rate, trial.held);
        trials.push(trial);
    }
}

impl Trial {
    /// Formats the trial as a line of text.
    pub fn line(&self) -> String {
        let Trial { rate_per_s, held, goodput_per_s, quantile_ms, failed, lag_notable } = self;
        let quantile = quantile_ms.map_or("-".to_owned(), |ms| format!("{ms:.1} ms"));
        let held = if *held { "held" } else { "did not hold" };
        let lag = if *lag_notable { ", the generator lagged" } else { "" };
        format!(
            "{rate_per_s:>10.1}/s  {held:<12}  {quantile:>10}  goodput {goodput_per_s:.1}/s, {failed} failed{lag}"
        )
    }
}

impl CapacityReport {
    /// Formats the result as a sentence.
    pub fn sentence(&self) -> String {
        let late = self.trials.iter().any(|trial| trial.lag_notable && !trial.held);
        let late = if late {
            " The generator lagged in trials that failed: the server may sustain a higher rate."
        } else {
            ""
        };
        match (self.held_per_s, self.failed_per_s) {
            (Some(held), Some(failed)) => {
                format!(
                    "{} holds at {held:.1} requests per second, and fails at {failed:.1}.{late}",
                    self.objective
                )
            }
            (Some(held), None) => {
                format!(
                    "{} holds at {held:.1} requests per second, the highest rate tried.{late}",
                    self.objective
                )
            }
            (None, _) => format!("{} holds at none of the rates tried.{late}", self.objective),
        }
    }

    /// Formats the result as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers, strings and lists serialise to JSON")
    }
}
