//! Statistics of a part of a run, by intended start.

use std::collections::BTreeMap;
use std::time::Duration;

use super::ServingRegions;
use super::latencies::CompactLatencies;

/// Requests with an intended start within one second or several, of one region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecondStats {
    /// Ok requests.
    pub ok: u64,
    /// Failed requests.
    pub failed: u64,
    /// Latencies of ok requests.
    pub latencies: CompactLatencies,
}

impl SecondStats {
    pub(crate) fn add(&mut self, other: &SecondStats) {
        self.ok += other.ok;
        self.failed += other.failed;
        self.latencies.add(&other.latencies);
    }
}

/// Requests with an intended start within a part of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimeWindow {
    /// Ok requests.
    pub ok: u64,
    /// Failed requests.
    pub failed: u64,
    /// Statistics by region.
    pub by_region: BTreeMap<ServingRegions, SecondStats>,
    latencies: CompactLatencies,
}

impl TimeWindow {
    pub(super) fn add(&mut self, served: &ServingRegions, second: &SecondStats) {
        self.ok += second.ok;
        self.failed += second.failed;
        self.latencies.add(&second.latencies);
        self.by_region.entry(served.clone()).or_default().add(second);
    }

    /// Returns the latency at `quantile` (0 to 1) of ok requests, with an error of 0.8 % and rounded up; `None`
    /// without ok requests.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        self.latencies.quantile(quantile)
    }
}
