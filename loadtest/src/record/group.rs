//! Statistics of a group of requests, by outcome.

use std::collections::BTreeMap;
use std::time::Duration;

use super::latencies::Latencies;
use crate::exchange::RequestFailure;

/// Statistics of the requests with one outcome.
#[derive(Clone, Debug, Default)]
pub struct OutcomeStats {
    /// Number of requests.
    pub count: u64,
    /// Latencies of the requests that were sent.
    pub latencies: Latencies,
}

/// Statistics of a group of requests, such as those of a region, of a stage, or all.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// By outcome.
    pub outcomes: BTreeMap<Result<(), RequestFailure>, OutcomeStats>,
    /// Number of requests with more than one attempt.
    pub retried: u64,
}

impl Group {
    /// Returns the number of requests.
    pub fn requests(&self) -> u64 {
        self.outcomes.values().map(|tally| tally.count).sum()
    }

    /// Returns the number of requests with a valid response.
    pub fn ok(&self) -> u64 {
        self.outcomes.get(&Ok(())).map_or(0, |tally| tally.count)
    }

    /// Returns the number of failed requests.
    pub fn failed(&self) -> u64 {
        self.requests() - self.ok()
    }

    /// Returns the latencies of ok requests.
    pub fn latencies(&self) -> Latencies {
        self.outcomes.get(&Ok(())).map(|tally| tally.latencies.clone()).unwrap_or_default()
    }

    /// Iterates over the failed requests, by cause.
    pub fn failures(&self) -> impl Iterator<Item = (RequestFailure, &OutcomeStats)> {
        self.outcomes.iter().filter_map(|(outcome, tally)| Some((outcome.err()?, tally)))
    }

    pub(super) fn count(
        &mut self,
        outcome: Result<(), RequestFailure>,
        latency: Option<Duration>,
        retried: bool,
    ) {
        self.retried += u64::from(retried);
        let tally = self.outcomes.entry(outcome).or_default();
        tally.count += 1;
        if let Some(latency) = latency {
            tally.latencies.record(latency);
        }
    }

    /// Adds another group, for example of another region or generator.
    pub fn add(&mut self, other: &Group) {
        self.retried += other.retried;
        for (outcome, tally) in &other.outcomes {
            let sum = self.outcomes.entry(*outcome).or_default();
            sum.count += tally.count;
            sum.latencies.add(&tally.latencies);
        }
    }
}
