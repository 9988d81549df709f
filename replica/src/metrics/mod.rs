//! Metrics of a replica, for `/metrics`, `/info` and `/status`.
//!
//! Events are counted by [`crate::events`] only, so that every logged event is counted and the reverse. State that is
//! not an event (queue, estimated cost of a batch) is copied here by the batcher whenever it changes, so that
//! [`Metrics::render`] only reads and never waits for a lock that the engine needs.
//!
//! Metrics that TEI defines as well are also exported under TEI's names, so that its dashboards work.

mod labels;

use std::sync::{Arc, OnceLock};

use identity::{CertificateMetrics, ConnectionFailureCause, ConnectionFailures, Transport};
use metrics::page::RoleMetrics;
use metrics::{
    BuildMetrics, Counter, Histogram, Info, MetricsSnapshot, Sizes, Sparse, TimeCounter, Total, metric_set,
};
use replica_api::api::Operation;
use replica_api::info::{CountersV1, EngineInfoV1};
use replica_api::priority::{PerPriority, Priority};
use replica_api::start_failure::StartFailure;
use replica_core::batch::PriorityLoad;
use replica_core::cost::BatchCost;
use replica_core::window::StartReason;
use supervision::Mutex;
use supervision::panics::PanicMetrics;
use telemetry::{LogMetrics, MetricExports, TraceMetrics, Tracer};

use crate::engine::Statistics;

use self::labels::InReplica;
pub(crate) use self::labels::{CodeLabel, RequestStage};

/// Role in the names of shared metrics.
const ROLE: &str = "replica";

type Family<L, M = Counter> = metrics::Family<L, M, InReplica>;

metric_set! {
    /// Counters and histograms.
    #[derive(Debug, Default)]
    pub(crate) struct ReplicaCounts {
        /// Requests that ended, by route and error code.
        pub(crate) outcomes: Sparse<Family<Operation, Family<CodeLabel>>, false> =
            "meridian_replica_requests_total" ["route", "code"],
        /// Inputs of successful requests.
        pub(crate) inputs: Counter = "meridian_replica_inputs_total",
        /// Tokens of successful requests.
        pub(crate) tokens: Counter = "meridian_replica_tokens_total",
        /// Inputs cancelled before they were computed.
        pub(crate) dropped_inputs: Counter = "meridian_replica_inputs_dropped_total",
        /// Inputs that shared the work of an equal input in the queue.
        pub(crate) deduplicated_inputs: Counter = "meridian_replica_inputs_deduplicated_total",
        /// Requests rejected because the queue was full.
        pub(crate) shed: Family<Priority> = "meridian_replica_requests_shed_total" ["priority"],
        /// Duration of the stages of successful requests.
        pub(crate) stages: Family<RequestStage, Family<Priority, Histogram>> =
            "meridian_replica_stage_seconds" ["stage", "priority"],
        /// Batches, by priority and by the reason why the batch was closed.
        pub(crate) batches: Sparse<Family<Priority, Family<StartReason>>, false> =
            "meridian_replica_batches_total" ["priority", "reason"],
        /// Inputs of a batch.
        pub(crate) batch_inputs: Family<Priority, Histogram<Sizes>> =
            "meridian_replica_batch_inputs" ["priority"],
        /// Tokens of a batch.
        pub(crate) batch_tokens: Family<Priority, Histogram<Sizes>> =
            "meridian_replica_batch_tokens" ["priority"],
        /// Compute time of a batch.
        pub(crate) batch_seconds: Family<Priority, Histogram> = "meridian_replica_batch_seconds" ["priority"],
        /// Tokens that padding each batch to its longest input would have added.
        pub(crate) padding_saved: Counter = "meridian_replica_padding_saved_tokens_total",
        /// Compute time of the engine.
        pub(crate) engine_busy: TimeCounter = "meridian_replica_engine_busy_seconds_total",
        /// Batches on which the engine failed.
        pub(crate) engine_failures: Counter = "meridian_replica_engine_failures_total",
        /// Batches delayed to collect inputs of clients whose previous requests had just completed.
        pub(crate) window_waits: Counter = "meridian_replica_window_waits_total",
        /// Total batching delay.
        pub(crate) window_waited: TimeCounter = "meridian_replica_window_wait_seconds_total",
        /// Inputs found in the cache of rows.
        pub(crate) cache_hits: Counter = "meridian_replica_cache_hits_total",
        /// Inputs not found in the cache of rows.
        pub(crate) cache_misses: Counter = "meridian_replica_cache_misses_total",
        /// Rows evicted from the cache.
        pub(crate) cache_evictions: Counter = "meridian_replica_cache_evictions_total",
        /// Failed attempts to download the model, or to load a downloaded model that is invalid or of an unsupported family, by reason.
        pub(crate) start_failures: Family<StartFailure> = "meridian_replica_start_failures_total" ["reason"],
        /// Requests.
        pub(crate) requests: Counter = "te_request_count",
    }
}

metric_set! {
    /// All metrics of a replica.
    struct ReplicaScrape<'a> {
        /// Counters.
        counts: &'a ReplicaCounts = set,
        /// Connections that were rejected, by cause.
        refused: &'a metrics::Family<ConnectionFailureCause> = "meridian_replica_connections_refused_total" ["cause"],
        /// Certificate of the replica.
        certificate: CertificateMetrics = set,
        /// Panics.
        panics: PanicMetrics = set,
        /// Build.
        build: BuildMetrics = set,
        /// Traces.
        traces: Option<TraceMetrics<'a>> = set,
        /// Export of the log.
        logs: Option<LogMetrics<'a>> = set,
        /// Export of the metrics.
        metric_exports: Option<MetricExports<'a>> = set,
        /// Requests with inputs in the queue.
        queue_requests: Family<Priority, u64> = "meridian_replica_queue_requests" ["priority"],
        /// Inputs in the queue, equal ones counted once.
        queue_inputs: Family<Priority, u64> = "meridian_replica_queue_inputs" ["priority"],
        /// Tokens of the inputs in the queue.
        queue_tokens: Family<Priority, u64> = "meridian_replica_queue_tokens" ["priority"],
        /// Measured speed of the engine.
        tokens_per_second: f64 = "meridian_replica_engine_tokens_per_second",
        /// Estimated fixed cost of a batch.
        batch_cost_fixed: f64 = "meridian_replica_batch_cost_fixed_seconds",
        /// Estimated cost of each token of a batch.
        batch_cost_token: f64 = "meridian_replica_batch_cost_token_seconds",
        /// Bytes of the cached rows.
        cache_bytes: u64 = "meridian_replica_cache_bytes",
        /// Cached inputs.
        cache_rows: u64 = "meridian_replica_cache_rows",
        /// Description of the engine; always 1.
        engine_info: Option<Info<6>> =
            "meridian_replica_engine_info" ["kind", "precision", "gpu", "tensorrt", "tensorrt_llm", "test_double"],
        /// Statistics of the engine, if it has any.
        engine: Option<EngineScrape> = set,
        /// Metrics under TEI's names.
        tei: TeiScrape = set,
    }
}

metric_set! {
    /// Statistics of the engine.
    struct EngineScrape {
        /// Iterations of the model, as counted by the runtime.
        iterations: Total = "meridian_replica_engine_iterations_total",
        /// Total time of the iterations.
        busy_ms: Total = "meridian_replica_engine_iteration_milliseconds_total",
        /// Inputs that the runtime computed.
        completed: Total = "meridian_replica_engine_completed_total",
        /// Batches that failed and were retried input by input.
        retried_batches: Total = "meridian_replica_engine_retried_batches_total",
        /// Inputs in the last iteration.
        active: u64 = "meridian_replica_engine_active",
        /// Inputs in the queue of the runtime.
        queued: u64 = "meridian_replica_engine_queued",
        /// GPU memory in use.
        gpu_bytes: u64 = "meridian_replica_engine_gpu_bytes",
    }
}

metric_set! {
    /// Metrics under TEI's names.
    struct TeiScrape {
        /// Successful requests.
        success: Total = "te_request_success",
        /// Duration of the stage, in seconds; see meridian_replica_stage_seconds.
        tokenize: Histogram = "te_request_tokenization_duration",
        /// Duration of the stage, in seconds; see meridian_replica_stage_seconds.
        queue: Histogram = "te_request_queue_duration",
        /// Duration of the stage, in seconds; see meridian_replica_stage_seconds.
        engine: Histogram = "te_request_inference_duration",
        /// Duration of the stage, in seconds; see meridian_replica_stage_seconds.
        total: Histogram = "te_request_duration",
        /// Size of each batch.
        batch_inputs: Histogram<Sizes> = "te_batch_next_size",
        /// Size of each batch.
        batch_tokens: Histogram<Sizes> = "te_batch_next_tokens",
        /// Inputs in the queue.
        queue_size: u64 = "te_queue_size",
    }
}

/// Returns the metrics of a replica.
pub fn metrics() -> RoleMetrics {
    RoleMetrics::of::<ReplicaScrape<'_>>(ROLE)
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
    pub(crate) counts: ReplicaCounts,
    /// Connections that were rejected.
    pub(crate) refused: Arc<ConnectionFailures>,
    gauges: Mutex<ReplicaGauges>,
    /// Description of the engine.
    described: OnceLock<EngineInfoV1>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            counts: ReplicaCounts::default(),
            refused: Arc::default(),
            gauges: Mutex::independent(ReplicaGauges::default()),
            described: OnceLock::new(),
        }
    }
}

impl Metrics {
    /// Returns the number of requests so far.
    pub fn requests_total(&self) -> u64 {
        self.counts.requests.get()
    }

    /// Returns the counters of `/info`.
    pub fn read(&self) -> CountersV1 {
        let ReplicaCounts { requests, inputs, tokens, batches, dropped_inputs, outcomes, .. } = &self.counts;
        let ended = outcomes.0.iter().flat_map(Family::iter).map(Counter::get).sum::<u64>();
        CountersV1 {
            requests_total: requests.get(),
            inputs_total: inputs.get(),
            tokens_total: tokens.get(),
            errors_total: ended - self.successful(),
            batches_total: batches.0.iter().flat_map(Family::iter).map(Counter::get).sum(),
            dropped_inputs_total: dropped_inputs.get(),
        }
    }

    fn successful(&self) -> u64 {
        self.counts.outcomes.0.iter().map(|route| route.of(CodeLabel::OK).get()).sum()
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

    /// Returns the values of all metrics of a replica with this transport.
    pub fn snapshot(&self, transport: &Transport, tracer: Option<&Tracer>) -> MetricsSnapshot {
        let ReplicaGauges { loads, cost, tokens_per_second, cached, engine } = self.gauges();
        let BatchCost { fixed, per_token } = cost.unwrap_or(BatchCost { fixed: 0.0, per_token: 0.0 });
        let (cache_bytes, cache_rows) = cached;
        let queue = |value: fn(&PriorityLoad) -> u64| {
            Priority::ALL.iter().map(|priority| value(loads.of(*priority))).collect()
        };
        let scrape = ReplicaScrape {
            counts: &self.counts,
            refused: &self.refused.counts,
            certificate: CertificateMetrics::read(transport),
            panics: PanicMetrics::read(),
            build: BuildMetrics::read(),
            traces: tracer.map(Tracer::metrics),
            logs: LogMetrics::read(),
            metric_exports: MetricExports::read(),
            queue_requests: queue(|load| load.requests),
            queue_inputs: queue(|load| load.queued.inputs),
            queue_tokens: queue(|load| load.queued.tokens),
            tokens_per_second,
            batch_cost_fixed: fixed,
            batch_cost_token: per_token,
            cache_bytes,
            cache_rows,
            engine_info: self.described.get().map(engine_info),
            engine: engine.map(engine_scrape),
            tei: self.tei(Priority::ALL.iter().map(|priority| loads.of(*priority).queued.inputs).sum()),
        };
        MetricsSnapshot::of(ROLE, &scrape)
    }

    fn tei(&self, queue_size: u64) -> TeiScrape {
        let ReplicaCounts { stages, batch_inputs, batch_tokens, .. } = &self.counts;
        TeiScrape {
            success: Total(self.successful()),
            tokenize: Histogram::sum(stages.of(RequestStage::Tokenize).iter()),
            queue: Histogram::sum(stages.of(RequestStage::Queue).iter()),
            engine: Histogram::sum(stages.of(RequestStage::Engine).iter()),
            total: Histogram::sum(stages.of(RequestStage::Total).iter()),
            batch_inputs: Histogram::sum(batch_inputs.iter()),
            batch_tokens: Histogram::sum(batch_tokens.iter()),
            queue_size,
        }
    }
}

fn engine_info(engine: &EngineInfoV1) -> Info<6> {
    let mut facts = vec![engine.kind.clone(), engine.precision.clone()];
    if let Some(accelerator) = &engine.accelerator {
        let (tensorrt, tensorrt_llm) = (accelerator.tensorrt.clone(), accelerator.tensorrt_llm.clone());
        facts.extend([accelerator.gpu.clone(), tensorrt, tensorrt_llm, accelerator.test_double.to_string()]);
    }
    Info(facts)
}

fn engine_scrape(statistics: Statistics) -> EngineScrape {
    let Statistics { iterations, busy_ms, completed, retried_batches, active, queued, gpu_bytes } =
        statistics;
    EngineScrape {
        iterations: Total(iterations),
        busy_ms: Total(busy_ms),
        completed: Total(completed),
        retried_batches: Total(retried_batches),
        active,
        queued,
        gpu_bytes,
    }
}
