//! A part of a run, by when requests should have started: what was answered, what failed, and by whom.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Served;
use super::latencies::Spans;

/// The requests that should have started within one second, or within several, in one region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Second {
    /// Answered.
    pub ok: u64,
    /// Not answered.
    pub failed: u64,
    /// How long the answered ones took.
    pub latencies: Spans,
}

impl Second {
    pub(crate) fn add(&mut self, other: &Second) {
        self.ok += other.ok;
        self.failed += other.failed;
        self.latencies.add(&other.latencies);
    }
}

/// The requests that should have started within a part of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Answered.
    pub ok: u64,
    /// Not answered.
    pub failed: u64,
    /// The same by region.
    pub by_region: BTreeMap<Served, Second>,
    latencies: Spans,
}

impl Window {
    pub(super) fn add(&mut self, served: &Served, second: &Second) {
        self.ok += second.ok;
        self.failed += second.failed;
        self.latencies.add(&second.latencies);
        self.by_region.entry(served.clone()).or_default().add(second);
    }

    /// The span that a share `quantile` (0 to 1) of the answered ones stays within, to 0.8 % and rounded up; none where
    /// nothing was answered.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        self.latencies.quantile(quantile)
    }
}
