//! Metrics of the process, for `/metrics`.
//!
//! Only [`crate::events`] counts events: every logged event is counted and vice versa. Each metric family is an array
//! of atomics, one for each combination of its labels, so counting is one lock-free addition; that is possible because
//! labels are closed sets: endpoints, error codes, causes and outcomes of attempts, the regions of the catalogue, the
//! tenants of the newest table. Reached limits are counted where they apply ([`bounds`]), since often there is no
//! request to report them. States (budgets, health, capacity) are read from their owners at scrape time.

mod bounds;
mod edge;
mod histogram;
mod ingress;
mod label;
mod panics;
mod tenants;
mod text;

pub(crate) use bounds::{
    BodyRejection, CloseReason, HopEvent, LabelCounter, ListenerMetricNames, ListenerMetrics, NotHeldReason,
    PartOutcome, SplitAdmission,
};
pub(crate) use edge::EdgeMetrics;
pub(crate) use histogram::LatencyHistogram;
pub(crate) use ingress::{HoldMetrics, IngressMetrics};
pub(crate) use label::{ClientProtocol, EndpointLabel, LatencyStage, Priority, RequestOutcome};
pub(crate) use panics::render as render_panics;
pub(crate) use text::{CONTENT_TYPE, Kind, MetricsText};

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counter or gauge.
#[derive(Debug, Default)]
pub(crate) struct RelaxedCounter(AtomicU64);

impl RelaxedCounter {
    /// Adds `n`. Counters are independent of each other; no order among them is guaranteed.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Subtracts one, for a gauge.
    pub(crate) fn decrement(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sets a gauge.
    pub(crate) fn set(&self, n: usize) {
        self.0.store(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One `T` per index, allocated on first use: a catalogue has hundreds of regions, of which a fleet uses a few.
struct LazyByIndex<T>(Box<[OnceLock<Box<T>>]>);

impl<T: Default> LazyByIndex<T> {
    fn new(len: usize) -> LazyByIndex<T> {
        LazyByIndex((0..len).map(|_| OnceLock::new()).collect())
    }

    fn of(&self, at: usize) -> &T {
        self.0[at].get_or_init(Box::default)
    }

    /// Returns the allocated items.
    fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.0.iter().enumerate().filter_map(|(at, cell)| Some((at, &**cell.get()?)))
    }
}
