//! State of a run in progress.

use std::time::Duration;

use super::{Record, ServingRegions};
use crate::exchange::RequestFailure;

/// State of a run in progress.
#[derive(Clone, Debug)]
pub struct RunSnapshot {
    /// Time since the start of the run.
    pub elapsed: Duration,
    /// Time during which requests are started.
    pub duration: Duration,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests with a valid response.
    pub ok: u64,
    /// Failed requests, including those not sent.
    pub failed: u64,
    /// Requests not sent.
    pub not_sent: u64,
    /// Median latency of ok requests.
    pub p50: Option<Duration>,
    /// 99th percentile of the latency of ok requests.
    pub p99: Option<Duration>,
    /// Largest lag of the generator.
    pub lag_max: Option<Duration>,
    /// Ok requests by region.
    pub regions: Vec<(ServingRegions, u64)>,
}

impl RunSnapshot {
    /// Creates a snapshot of `record` after `elapsed` of `duration`.
    pub fn of(record: &Record, in_flight: u64, elapsed: Duration, duration: Duration) -> RunSnapshot {
        let total = record.total();
        let latencies = total.latencies();
        RunSnapshot {
            elapsed,
            duration,
            in_flight,
            ok: total.ok(),
            failed: total.failed(),
            not_sent: total.outcomes.get(&Err(RequestFailure::NotSent)).map_or(0, |tally| tally.count),
            p50: latencies.quantile(0.5),
            p99: latencies.quantile(0.99),
            lag_max: record.lag.max(),
            regions: record.regions().into_iter().map(|(served, region)| (served, region.ok())).collect(),
        }
    }
}
