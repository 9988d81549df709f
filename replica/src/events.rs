//! Events of a replica, one struct each, which owns its log line and its metrics.
//!
//! No event contains request payloads (texts, tokens). Requests are logged at DEBUG, one line each: at INFO a busy
//! replica would write more lines than vectors.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use metrics::Exemplar;
use replica_api::api::Operation;
use replica_api::error::Fault;
use replica_api::priority::Priority;
use replica_api::refusal::Refusal;
use replica_api::start_failure::StartFailureReport;
use replica_core::batch::Backlog;
use replica_core::window::StartReason;
use telemetry::context::TraceContext;
use tracing::{debug, error, info, warn};

use crate::engine::cpu::WeightsLocation;
use crate::metrics::{CodeLabel, Metrics, RequestStage};
use crate::tune::file::TunedSettingsMismatch;

/// The process listens; the model is not loaded yet.
pub(crate) struct Listening {
    pub(crate) on: SocketAddr,
}

impl Listening {
    pub(crate) fn record(self) {
        info!(on = %self.on, "listening");
    }
}

/// A request handler panicked: a defect. The client received an error, and no other request is affected. Report it
/// with the line `panicked`.
pub(crate) struct RequestPanicked<'a> {
    pub(crate) id: &'a str,
    pub(crate) reason: &'a str,
}

impl RequestPanicked<'_> {
    pub(crate) fn record(self) {
        error!(request = self.id, reason = self.reason, "request panicked");
    }
}

/// The settings of `meridian tune` for this model and machine are in use.
pub(crate) struct TunedSettings<'a> {
    pub(crate) file: &'a Path,
}

impl TunedSettings<'_> {
    pub(crate) fn record(self) {
        info!(file = %self.file.display(), "tuned settings loaded");
    }
}

/// Tuned settings exist, but do not apply to this model or machine (`reason`). Run `meridian tune` to create new
/// ones.
pub(crate) struct TunedSettingsIgnored<'a> {
    pub(crate) mismatch: &'a TunedSettingsMismatch,
}

impl TunedSettingsIgnored<'_> {
    pub(crate) fn record(self) {
        let TunedSettingsMismatch { path, reason } = self.mismatch;
        warn!(file = %path.display(), reason, "tuned settings ignored");
    }
}

/// The model is not in the cache, and its download has begun, or waits for that of another process of this machine
/// (`phase`).
pub(crate) struct ModelDownloadPhase<'a> {
    pub(crate) source: &'a str,
    pub(crate) phase: &'a str,
}

impl ModelDownloadPhase<'_> {
    pub(crate) fn record(self) {
        let ModelDownloadPhase { source, phase } = self;
        info!(source, phase, "model download");
    }
}

/// The model is being downloaded.
pub(crate) struct ModelDownloadProgress<'a> {
    pub(crate) source: &'a str,
    pub(crate) done_bytes: u64,
    pub(crate) total_bytes: Option<u64>,
    pub(crate) left: Option<Duration>,
}

impl ModelDownloadProgress<'_> {
    pub(crate) fn record(self) {
        let ModelDownloadProgress { source, done_bytes, total_bytes, left } = self;
        let left_s = left.map(|left| left.as_secs());
        info!(source, done_bytes, total_bytes, left_s, "model download progress");
    }
}

/// The model was downloaded, or another process of this machine has downloaded it.
pub(crate) struct ModelDownloaded<'a> {
    pub(crate) source: &'a str,
    pub(crate) bytes: u64,
    pub(crate) took: Duration,
}

impl ModelDownloaded<'_> {
    pub(crate) fn record(self) {
        let ModelDownloaded { source, bytes, took } = self;
        info!(source, bytes, took_ms = took.as_millis() as u64, "model downloaded");
    }
}

/// The model cannot be downloaded, or its family is not supported. The replica is not ready, reports `reason` in its
/// status, and tries again; bytes that have arrived are not downloaded again. The problem has the fix.
pub(crate) struct StartAttemptFailed<'a> {
    pub(crate) failure: &'a StartFailureReport,
    pub(crate) retry_in: Duration,
}

impl StartAttemptFailed<'_> {
    pub(crate) fn record(self, metrics: &Metrics) {
        let StartAttemptFailed { failure: StartFailureReport { reason, message }, retry_in } = self;
        metrics.counts.start_failures.count(*reason);
        let (reason, retry_in_ms) = (reason.as_str(), retry_in.as_millis() as u64);
        error!(reason, problem = message, retry_in_ms, "start failed; trying again");
    }
}

/// The model is loaded and warm.
pub(crate) struct ModelReady<'a> {
    pub(crate) source: &'a str,
    pub(crate) digest: &'a str,
    pub(crate) instruction_set: &'a str,
    /// Location of the packed weights, for an engine that packs them.
    pub(crate) weights: Option<&'a WeightsLocation>,
    pub(crate) took: Duration,
}

impl ModelReady<'_> {
    pub(crate) fn record(self) {
        let ModelReady { source, digest, instruction_set, weights, took } = self;
        let took_ms = took.as_millis() as u64;
        match weights {
            None => info!(source, digest, instruction_set, took_ms, "model ready"),
            Some(WeightsLocation::SharedFile(file)) => {
                info!(source, digest, instruction_set, weights = %file.display(), took_ms, "model ready");
            }
            Some(WeightsLocation::PrivateMemory { problem }) => {
                let problem = problem.as_deref().unwrap_or("sharing disabled");
                // Each replica on this machine needs memory of its own for the weights, because of `problem`. Make the
                // model cache writable by its user alone.
                warn!(
                    source,
                    digest,
                    instruction_set,
                    problem,
                    took_ms,
                    "model ready; weights not shared between processes"
                );
            }
        }
    }
}

/// A request that needs the engine was received.
pub(crate) struct RequestReceived;

impl RequestReceived {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.counts.requests.add(1);
    }
}

/// A request was completed; the fields have its times in microseconds.
pub(crate) struct RequestCompleted<'a> {
    pub(crate) operation: Operation,
    pub(crate) priority: Priority,
    pub(crate) request_id: &'a str,
    /// Span of the request; absent if the replica records no traces.
    pub(crate) trace: Option<TraceContext>,
    pub(crate) inputs: u64,
    pub(crate) tokens: u64,
    pub(crate) tokenize: Duration,
    pub(crate) queue: Duration,
    pub(crate) engine: Duration,
    pub(crate) total: Duration,
    /// Trace of the request, if its spans are exported.
    pub(crate) exemplar: Option<Exemplar>,
}

impl RequestCompleted<'_> {
    pub(crate) fn record(self, metrics: &Metrics) {
        let RequestCompleted {
            operation,
            priority,
            request_id,
            trace,
            inputs,
            tokens,
            tokenize,
            queue,
            engine,
            total,
            exemplar,
        } = self;
        metrics.counts.outcomes.0.of(operation).count(CodeLabel::OK);
        metrics.counts.inputs.add(inputs);
        metrics.counts.tokens.add(tokens);
        for (stage, took) in [
            (RequestStage::Tokenize, tokenize),
            (RequestStage::Queue, queue),
            (RequestStage::Engine, engine),
            (RequestStage::Total, total),
        ] {
            metrics.counts.stages.of(stage).of(priority).observe_traced(took, exemplar);
        }
        let micros = |duration: Duration| duration.as_micros() as u64;
        let (queue_us, tokenize_us, engine_us) = (micros(queue), micros(tokenize), micros(engine));
        let (route, priority, total_us) = (operation.definition().path, priority.as_str(), micros(total));
        debug!(
            request_id,
            trace_id = trace.map(|span| tracing::field::display(span.trace)),
            span_id = trace.map(|span| tracing::field::display(span.span)),
            route,
            priority,
            inputs,
            tokens,
            queue_us,
            tokenize_us,
            engine_us,
            total_us,
            "request completed"
        );
    }
}

/// A request was rejected with this code and message.
pub(crate) struct RequestRejected<'a> {
    pub(crate) operation: Operation,
    pub(crate) request_id: &'a str,
    /// Span of the request; absent if the replica records no traces.
    pub(crate) trace: Option<TraceContext>,
    pub(crate) refusal: &'a Refusal,
}

impl RequestRejected<'_> {
    pub(crate) fn record(self, metrics: &Metrics) {
        let RequestRejected { operation, request_id, trace, refusal: Refusal { code, message, .. } } = self;
        let trace_id = trace.map(|span| tracing::field::display(span.trace));
        let span_id = trace.map(|span| tracing::field::display(span.span));
        metrics.counts.outcomes.0.of(operation).count(CodeLabel(Some(*code)));
        match code.fault() {
            // The engine or the tokenizer failed on a request, whose client received an error. The line `engine failed`
            // or `tokenizer failed` before it has the reason.
            Fault::Replica => error!(request_id, trace_id, span_id, code = code.as_str(), "request failed"),
            Fault::Caller | Fault::Quota | Fault::Policy | Fault::Capacity | Fault::Network => {
                debug!(request_id, trace_id, span_id, code = code.as_str(), message, "request rejected");
            }
        }
    }
}

/// The queue was full. The error response has an event of its own, with the request id.
pub(crate) struct RequestShed {
    pub(crate) priority: Priority,
}

impl RequestShed {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.counts.shed.count(self.priority);
    }
}

/// The inputs of a request were looked up in the cache of rows.
pub(crate) struct CacheLookup {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

impl CacheLookup {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.counts.cache_hits.add(self.hits);
        metrics.counts.cache_misses.add(self.misses);
    }
}

/// Inputs of a request are already queued or being computed, and share that work.
pub(crate) struct InputsDeduplicated {
    pub(crate) inputs: u64,
}

impl InputsDeduplicated {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.counts.deduplicated_inputs.add(self.inputs);
    }
}

/// The engine delays a batch to collect more inputs.
pub(crate) struct BatchDelayed;

impl BatchDelayed {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.counts.window_waits.add(1);
    }
}

/// The engine computed a batch.
pub(crate) struct BatchComputed {
    pub(crate) size: Backlog,
    /// Tokens of the longest input.
    pub(crate) longest: u64,
    pub(crate) priority: Priority,
    pub(crate) reason: StartReason,
    pub(crate) waited: Duration,
    pub(crate) busy: Duration,
    /// Trace of a request with inputs in the batch that was sampled, if there is one.
    pub(crate) exemplar: Option<Exemplar>,
}

impl BatchComputed {
    pub(crate) fn record(self, metrics: &Metrics) {
        let BatchComputed { size, longest, priority, reason, waited, busy, exemplar } = self;
        let Backlog { tokens, inputs } = size;
        metrics.counts.batch_inputs.of(priority).observe(inputs);
        metrics.counts.batch_tokens.of(priority).observe(tokens);
        metrics.counts.batch_seconds.of(priority).observe_traced(busy, exemplar);
        metrics.counts.batches.0.of(priority).count(reason);
        metrics.counts.padding_saved.add(longest * inputs - tokens);
        metrics.counts.engine_busy.add(busy);
        metrics.counts.window_waited.add(waited);
    }
}

/// Inputs were cancelled and will not be computed.
pub(crate) struct InputsDropped {
    pub(crate) inputs: u64,
}

impl InputsDropped {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.counts.dropped_inputs.add(self.inputs);
    }
}

/// The engine failed on a batch, and every request in it gets an error response. If it repeats, restart the replica
/// and check the model with `meridian model verify`.
pub(crate) struct EngineFailed<'a> {
    pub(crate) reason: &'a str,
    pub(crate) inputs: u64,
    pub(crate) tokens: u64,
}

impl EngineFailed<'_> {
    pub(crate) fn record(self, metrics: &Metrics) {
        let EngineFailed { reason, inputs, tokens } = self;
        metrics.counts.engine_failures.add(1);
        error!(reason, inputs, tokens, "engine failed");
    }
}

/// The tokenizer failed on a request, and its client received an error. If it repeats, run `meridian model pull` again.
pub(crate) struct TokenizerFailed<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) reason: &'a str,
}

impl TokenizerFailed<'_> {
    pub(crate) fn record(self) {
        let TokenizerFailed { request_id, reason } = self;
        error!(request_id, reason, "tokenizer failed");
    }
}

/// Shutdown was requested; requests in flight are being finished.
pub(crate) struct Draining;

impl Draining {
    pub(crate) fn record(self) {
        info!("draining requests in flight");
    }
}

/// The drain timeout passed while requests were in flight. Their clients received an error. Raise it if requests
/// take that long.
pub(crate) struct DrainLimitReached {
    pub(crate) after: Duration,
}

impl DrainLimitReached {
    pub(crate) fn record(self) {
        warn!(after_ms = self.after.as_millis() as u64, "drain timeout; requests in flight aborted");
    }
}
