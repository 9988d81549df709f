//! Requests that are looked at together, by how they ended.

use std::collections::BTreeMap;
use std::time::Duration;

use super::latencies::Latencies;
use crate::exchange::Failure;

/// Requests that ended in one way.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// How long they took, those that were sent.
    pub latencies: Latencies,
}

/// Requests that are looked at together: of one region, of one stage, or all.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// By how they ended.
    pub outcomes: BTreeMap<Result<(), Failure>, Tally>,
    /// How many took more than one attempt.
    pub retried: u64,
}

impl Group {
    /// All of them.
    pub fn requests(&self) -> u64 {
        self.outcomes.values().map(|tally| tally.count).sum()
    }

    /// Those that were answered, and rightly.
    pub fn ok(&self) -> u64 {
        self.outcomes.get(&Ok(())).map_or(0, |tally| tally.count)
    }

    /// Those that were not.
    pub fn failed(&self) -> u64 {
        self.requests() - self.ok()
    }

    /// How long the answered ones took.
    pub fn latencies(&self) -> Latencies {
        self.outcomes.get(&Ok(())).map(|tally| tally.latencies.clone()).unwrap_or_default()
    }

    /// Those that were not answered, by cause.
    pub fn failures(&self) -> impl Iterator<Item = (Failure, &Tally)> {
        self.outcomes.iter().filter_map(|(outcome, tally)| Some((outcome.err()?, tally)))
    }

    pub(super) fn count(&mut self, outcome: Result<(), Failure>, latency: Option<Duration>, retried: bool) {
        self.retried += u64::from(retried);
        let tally = self.outcomes.entry(outcome).or_default();
        tally.count += 1;
        if let Some(latency) = latency {
            tally.latencies.record(latency);
        }
    }

    /// Takes in those of another group: of another region, or of another generator.
    pub fn add(&mut self, other: &Group) {
        self.retried += other.retried;
        for (outcome, tally) in &other.outcomes {
            let sum = self.outcomes.entry(*outcome).or_default();
            sum.count += tally.count;
            sum.latencies.add(&tally.latencies);
        }
    }
}
