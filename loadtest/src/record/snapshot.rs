//! A run while it runs, for who watches it.

use std::time::Duration;

use super::{Record, Served};
use crate::exchange::Failure;

/// A run while it runs.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Since the start of the run.
    pub elapsed: Duration,
    /// How long requests are started.
    pub duration: Duration,
    /// How many are on their way.
    pub in_flight: u64,
    /// How many have been answered, and rightly.
    pub ok: u64,
    /// How many have failed, also those that were not sent.
    pub failed: u64,
    /// How many could not be sent.
    pub not_sent: u64,
    /// Half of the answered ones took no longer.
    pub p50: Option<Duration>,
    /// Of a hundred answered ones 99 took no longer.
    pub p99: Option<Duration>,
    /// How late the generator was at worst.
    pub lag_max: Option<Duration>,
    /// Answered ones by region.
    pub regions: Vec<(Served, u64)>,
}

impl Snapshot {
    /// What `record` says after `elapsed` of `duration`.
    pub fn of(record: &Record, in_flight: u64, elapsed: Duration, duration: Duration) -> Snapshot {
        let total = record.total();
        let latencies = total.latencies();
        Snapshot {
            elapsed,
            duration,
            in_flight,
            ok: total.ok(),
            failed: total.failed(),
            not_sent: total.outcomes.get(&Err(Failure::NotSent)).map_or(0, |tally| tally.count),
            p50: latencies.quantile(0.5),
            p99: latencies.quantile(0.99),
            lag_max: record.lag.max(),
            regions: record.regions().into_iter().map(|(served, region)| (served, region.ok())).collect(),
        }
    }
}
