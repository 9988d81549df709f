//! What a replica has done since it started and what it holds now: for `/metrics`, `/info` and `/status`.
//!
//! Only [`crate::events`] counts what happens: an event that is logged is counted, and the reverse. What is a state and not
//! an event (the queue, the learnt cost of a batch) is stored here by the batcher whenever it changes, so that to
//! [`Metrics::render`] is to read and never waits for a lock that the engine wants.
//!
//! Labels are closed sets: routes, error codes, priorities, stages, reasons. TEI's names stand beside ours where they mean
//! the same, so that its dashboards work.

mod histogram;
mod render;
mod route;
mod text;

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use supervision::{Mutex, MutexGuard};

use replica_core::batch::PriorityLoad;
use replica_core::cost::BatchCost;
use replica_core::priority::{PerPriority, Priority};
use replica_core::window::StartReason;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::info::{CountersV1, EngineInfoV1};

use crate::engine::Statistics;

use self::histogram::{Histogram, SECONDS, SIZES};

pub(crate) use route::Route;
pub(crate) use text::CONTENT_TYPE;

/// A total.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Counts `n` more. Totals are independent of each other, so no order among them is promised.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// For what is not counted but known.
    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
}

/// Totals by a closed set of labels.
#[derive(Debug)]
pub(crate) struct Family<K>(Mutex<BTreeMap<K, u64>>);

impl<K: Ord + Copy> Family<K> {
    fn new() -> Family<K> {
        Family(Mutex::independent(BTreeMap::new()))
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

/// Where a request spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Tokenize,
    Queue,
    Engine,
    Total,
}

impl Stage {
    const ALL: [Stage; 4] = [Stage::Tokenize, Stage::Queue, Stage::Engine, Stage::Total];

    fn as_str(self) -> &'static str {
        match self {
            Stage::Tokenize => "tokenize",
            Stage::Queue => "queue",
            Stage::Engine => "engine",
            Stage::Total => "total",
        }
    }

    /// TEI's name of it.
    fn tei(self) -> &'static str {
        match self {
            Stage::Tokenize => "te_request_tokenization_duration",
            Stage::Queue => "te_request_queue_duration",
            Stage::Engine => "te_request_inference_duration",
            Stage::Total => "te_request_duration",
        }
    }
}

/// The distributions of one priority.
#[derive(Debug)]
pub(crate) struct PriorityMetrics {
    stages: [Histogram; 4],
    pub(crate) batch_inputs: Distribution,
    pub(crate) batch_tokens: Distribution,
    pub(crate) batch_seconds: Distribution,
}

/// A [`Histogram`], for events to add to.
#[derive(Debug)]
pub(crate) struct Distribution(Histogram);

impl Distribution {
    pub(crate) fn observe(&self, value: f64) {
        self.0.observe(value);
    }
}

impl PriorityMetrics {
    fn new() -> PriorityMetrics {
        let sizes = || Distribution(Histogram::new(SIZES));
        PriorityMetrics {
            stages: Stage::ALL.map(|_| Histogram::new(SECONDS)),
            batch_inputs: sizes(),
            batch_tokens: sizes(),
            batch_seconds: Distribution(Histogram::new(SECONDS)),
        }
    }

    pub(crate) fn stage(&self, stage: Stage, took: Duration) {
        self.stages[stage as usize].observe(took.as_secs_f64());
    }
}

/// What is now.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Now {
    pub(crate) loads: PerPriority<PriorityLoad>,
    pub(crate) cost: Option<BatchCost>,
    pub(crate) tokens_per_second: f64,
    /// Bytes and rows in the cache of rows.
    pub(crate) cached: (u64, u64),
    /// What the engine counts itself, after its last batch.
    pub(crate) engine: Option<Statistics>,
}

/// Totals, distributions, and the state of the moment.
#[derive(Debug)]
pub struct Metrics {
    pub(crate) requests: Counter,
    pub(crate) errors: Counter,
    /// By route, and by code; none is an answer.
    pub(crate) outcomes: Family<(Route, Option<ErrorCode>)>,
    pub(crate) inputs: Counter,
    pub(crate) tokens: Counter,
    pub(crate) priorities: PerPriority<PriorityMetrics>,
    /// By priority, and why they were not made larger.
    pub(crate) batches: Family<(Priority, StartReason)>,
    pub(crate) padding_saved: Counter,
    pub(crate) engine_micros: Counter,
    pub(crate) engine_failures: Counter,
    pub(crate) dropped_inputs: Counter,
    /// Inputs that shared the work of equal ones.
    pub(crate) joined_inputs: Counter,
    pub(crate) shed: Family<Priority>,
    /// Times that the engine waited for peers.
    pub(crate) window_waits: Counter,
    pub(crate) window_micros: Counter,
    pub(crate) cache_hits: Counter,
    pub(crate) cache_misses: Counter,
    pub(crate) cache_evictions: Counter,
    now: Mutex<Now>,
    /// What the engine is.
    described: OnceLock<EngineInfoV1>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            requests: Counter::default(),
            errors: Counter::default(),
            outcomes: Family::new(),
            inputs: Counter::default(),
            tokens: Counter::default(),
            priorities: PerPriority { interactive: PriorityMetrics::new(), bulk: PriorityMetrics::new() },
            batches: Family::new(),
            padding_saved: Counter::default(),
            engine_micros: Counter::default(),
            engine_failures: Counter::default(),
            dropped_inputs: Counter::default(),
            joined_inputs: Counter::default(),
            shed: Family::new(),
            window_waits: Counter::default(),
            window_micros: Counter::default(),
            cache_hits: Counter::default(),
            cache_misses: Counter::default(),
            cache_evictions: Counter::default(),
            now: Mutex::independent(Now::default()),
            described: OnceLock::new(),
        }
    }
}

impl Metrics {
    /// Requests so far.
    pub fn requests_total(&self) -> u64 {
        self.requests.get()
    }

    /// The totals of `/info`.
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

    /// What the engine is, once there is one.
    pub(crate) fn describe(&self, engine: &EngineInfoV1) {
        // A replica has one engine; a second description would be the same.
        let _ = self.described.set(engine.clone());
    }

    /// What is now.
    pub(crate) fn set_now(&self, change: impl FnOnce(&mut Now)) {
        change(&mut self.now.lock());
    }

    pub(crate) fn now(&self) -> Now {
        *self.now.lock()
    }
}
