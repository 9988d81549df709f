//! Metrics of a replica, for `/metrics`, `/info` and `/status`.
//!
//! Events are counted by [`crate::events`] only, so that every logged event is counted and the reverse. State that is
//! not an event (queue, estimated cost of a batch) is copied here by the batcher whenever it changes, so that
//! [`Metrics::render`] only reads and never waits for a lock that the engine needs.
//!
//! Labels are closed sets: routes, error codes, priorities, stages, reasons. Metrics that TEI defines as well are also
//! exported under TEI's names, so that its dashboards work.

mod histogram;
mod render;
mod route;
mod text;

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use supervision::{Mutex, MutexGuard};

use replica_api::error::ErrorCode;
use replica_api::info::{CountersV1, EngineInfoV1};
use replica_api::priority::{PerPriority, Priority};
use replica_core::batch::PriorityLoad;
use replica_core::cost::BatchCost;
use replica_core::window::StartReason;

use crate::engine::Statistics;

use self::histogram::{AtomicHistogram, SECONDS, SIZES};

pub(crate) use route::RouteLabel;
pub(crate) use text::CONTENT_TYPE;

/// Monotonic counter.
#[derive(Debug, Default)]
pub(crate) struct AtomicCounter(AtomicU64);

impl AtomicCounter {
    /// Adds `n`. Counters are independent: their relative order is not guaranteed.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Overwrites the value, for totals that are maintained elsewhere.
    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
}

/// Counters by a closed set of labels.
#[derive(Debug)]
pub(crate) struct CounterFamily<K>(Mutex<BTreeMap<K, u64>>);

impl<K: Ord + Copy> CounterFamily<K> {
    fn new() -> CounterFamily<K> {
        CounterFamily(Mutex::independent(BTreeMap::new()))
    }

    pub(crate) fn add(&self, key: K, n: u64) {
        *self.lock().entry(key).or_default() += n;
    }

    fn read(&self) -> Vec<(K, u64)> {
        self.lock().iter().map(|(key, n)| (*key, *n)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, u64>> {
        self.0.lock()
    }
}

/// Stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestStage {
    Tokenize,
    Queue,
    Engine,
    Total,
}

impl RequestStage {
    const ALL: [RequestStage; 4] =
        [RequestStage::Tokenize, RequestStage::Queue, RequestStage::Engine, RequestStage::Total];

    fn as_str(self) -> &'static str {
        match self {
            RequestStage::Tokenize => "tokenize",
            RequestStage::Queue => "queue",
            RequestStage::Engine => "engine",
            RequestStage::Total => "total",
        }
    }

    /// Metric name in TEI.
    fn tei(self) -> &'static str {
        match self {
            RequestStage::Tokenize => "te_request_tokenization_duration",
            RequestStage::Queue => "te_request_queue_duration",
            RequestStage::Engine => "te_request_inference_duration",
            RequestStage::Total => "te_request_duration",
        }
    }
}

/// Histograms of one priority.
#[derive(Debug)]
pub(crate) struct PriorityMetrics {
    stages: [AtomicHistogram; 4],
    pub(crate) batch_inputs: Distribution,
    pub(crate) batch_tokens: Distribution,
    pub(crate) batch_seconds: Distribution,
}

/// [`AtomicHistogram`] that events can add to.
#[derive(Debug)]
pub(crate) struct Distribution(AtomicHistogram);

impl Distribution {
    pub(crate) fn observe(&self, value: f64) {
        self.0.observe(value);
    }
}

impl PriorityMetrics {
    fn new() -> PriorityMetrics {
        let sizes = || Distribution(AtomicHistogram::new(SIZES));
        PriorityMetrics {
            stages: RequestStage::ALL.map(|_| AtomicHistogram::new(SECONDS)),
            batch_inputs: sizes(),
            batch_tokens: sizes(),
            batch_seconds: Distribution(AtomicHistogram::new(SECONDS)),
        }
    }

    pub(crate) fn stage(&self, stage: RequestStage, took: Duration) {
        self.stages[stage as usize].observe(took.as_secs_f64());
    }
}

/// Current state of the replica.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplicaGauges {
    pub(crate) loads: PerPriority<PriorityLoad>,
    pub(crate) cost: Option<BatchCost>,
    pub(crate) tokens_per_second: f64,
    /// Bytes and rows in the cache of rows.
    pub(crate) cached: (u64, u64),
    /// Statistics of the engine after its last batch.
    pub(crate) engine: Option<Statistics>,
}

/// Counters, histograms and current state.
#[derive(Debug)]
pub struct Metrics {
    pub(crate) requests: AtomicCounter,
    pub(crate) errors: AtomicCounter,
    /// By route and error code; no code means success.
    pub(crate) outcomes: CounterFamily<(RouteLabel, Option<ErrorCode>)>,
    pub(crate) inputs: AtomicCounter,
    pub(crate) tokens: AtomicCounter,
    pub(crate) priorities: PerPriority<PriorityMetrics>,
    /// By priority, and by the reason why the batch was closed.
    pub(crate) batches: CounterFamily<(Priority, StartReason)>,
    pub(crate) padding_saved: AtomicCounter,
    pub(crate) engine_micros: AtomicCounter,
    pub(crate) engine_failures: AtomicCounter,
    pub(crate) dropped_inputs: AtomicCounter,
    /// Inputs that shared the work of equal ones.
    pub(crate) deduplicated_inputs: AtomicCounter,
    pub(crate) shed: CounterFamily<Priority>,
    /// Batches that the engine delayed to collect more inputs.
    pub(crate) window_waits: AtomicCounter,
    pub(crate) window_micros: AtomicCounter,
    pub(crate) cache_hits: AtomicCounter,
    pub(crate) cache_misses: AtomicCounter,
    pub(crate) cache_evictions: AtomicCounter,
    gauges: Mutex<ReplicaGauges>,
    /// Description of the engine.
    described: OnceLock<EngineInfoV1>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            requests: AtomicCounter::default(),
            errors: AtomicCounter::default(),
            outcomes: CounterFamily::new(),
            inputs: AtomicCounter::default(),
            tokens: AtomicCounter::default(),
            priorities: PerPriority { interactive: PriorityMetrics::new(), bulk: PriorityMetrics::new() },
            batches: CounterFamily::new(),
            padding_saved: AtomicCounter::default(),
            engine_micros: AtomicCounter::default(),
            engine_failures: AtomicCounter::default(),
            dropped_inputs: AtomicCounter::default(),
            deduplicated_inputs: AtomicCounter::default(),
            shed: CounterFamily::new(),
            window_waits: AtomicCounter::default(),
            window_micros: AtomicCounter::default(),
            cache_hits: AtomicCounter::default(),
            cache_misses: AtomicCounter::default(),
            cache_evictions: AtomicCounter::default(),
            gauges: Mutex::independent(ReplicaGauges::default()),
            described: OnceLock::new(),
        }
    }
}

impl Metrics {
    /// Returns the number of requests so far.
    pub fn requests_total(&self) -> u64 {
        self.requests.get()
    }

    /// Returns the counters of `/info`.
    pub fn read(&self) -> CountersV1 {
        let batches = self.batches.read().iter().map(|(_, n)| n).sum();
        CountersV1 {
            requests_total: self.requests.get(),
            inputs_total: self.inputs.get(),
            tokens_total: self.tokens.get(),
            errors_total: self.errors.get(),
            batches_total: batches,
            dropped_inputs_total: self.dropped_inputs.get(),
        }
    }

    /// Sets the description of the engine, once it is loaded.
    pub(crate) fn describe(&self, engine: &EngineInfoV1) {
        // A replica has one engine; a second description would be equal.
        let _ = self.described.set(engine.clone());
    }

    /// Changes the current state.
    pub(crate) fn update_gauges(&self, change: impl FnOnce(&mut ReplicaGauges)) {
        change(&mut self.gauges.lock());
    }

    pub(crate) fn gauges(&self) -> ReplicaGauges {
        *self.gauges.lock()
    }
}
