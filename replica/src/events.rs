//! What happens in a replica, one struct per event. Each owns its log line and what it counts.
//!
//! What strangers send (texts, tokens) is in none of them. Requests are logged at DEBUG, one line each: at INFO a busy
//! replica would write more lines than vectors.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use replica_core::batch::Backlog;
use replica_core::priority::Priority;
use replica_core::refusal::Refusal;
use replica_core::window::StartReason;
use replica_core::wire::error::Fault;
use tracing::{debug, error, info, warn};

use crate::engine::cpu::WeightsLocation;
use crate::metrics::{Metrics, Route, Stage};
use crate::tune::file::Unfit;

/// The process listens; the model is not there yet.
pub(crate) struct Listening {
    pub(crate) on: SocketAddr,
}

impl Listening {
    pub(crate) fn record(self) {
        info!(on = %self.on, "listening");
    }
}

/// A request met a defect of ours; it was answered with an error, and nothing else is affected.
pub(crate) struct RequestPanicked<'a> {
    pub(crate) id: &'a str,
    pub(crate) reason: &'a str,
}

impl RequestPanicked<'_> {
    pub(crate) fn record(self) {
        error!(request = self.id, reason = self.reason, "request panicked");
    }
}

/// Batches are made as `meridian tune` found it for this model on this machine.
pub(crate) struct TunedSettings<'a> {
    pub(crate) file: &'a Path,
}

impl TunedSettings<'_> {
    pub(crate) fn record(self) {
        info!(file = %self.file.display(), "tuned settings");
    }
}

/// There are tuned settings, and they do not hold here.
pub(crate) struct TunedSettingsUnfit<'a> {
    pub(crate) unfit: &'a Unfit,
}

impl TunedSettingsUnfit<'_> {
    pub(crate) fn record(self) {
        let Unfit { path, reason } = self.unfit;
        warn!(file = %path.display(), reason, "tuned settings are ignored; `meridian tune` makes new ones");
    }
}

/// The model is loaded and warm.
pub(crate) struct ModelReady<'a> {
    pub(crate) source: &'a str,
    pub(crate) digest: &'a str,
    pub(crate) instruction_set: &'a str,
    /// Of an engine that packs them.
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
                let problem = problem.as_deref().unwrap_or("not wanted");
                warn!(
                    source,
                    digest, instruction_set, problem, took_ms, "model ready, without sharing its weights"
                );
            }
        }
    }
}

/// A request that is to be computed came in.
pub(crate) struct RequestReceived;

impl RequestReceived {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.requests.add(1);
    }
}

/// A request was answered.
pub(crate) struct RequestAnswered<'a> {
    pub(crate) route: Route,
    pub(crate) priority: Priority,
    pub(crate) request_id: &'a str,
    pub(crate) inputs: u64,
    pub(crate) tokens: u64,
    pub(crate) tokenize: Duration,
    pub(crate) queue: Duration,
    pub(crate) engine: Duration,
    pub(crate) total: Duration,
}

impl RequestAnswered<'_> {
    pub(crate) fn record(self, metrics: &Metrics) {
        let RequestAnswered { route, priority, request_id, inputs, tokens, tokenize, queue, engine, total } =
            self;
        metrics.outcomes.add((route, None), 1);
        metrics.inputs.add(inputs);
        metrics.tokens.add(tokens);
        let stages = metrics.priorities.of(priority);
        stages.stage(Stage::Tokenize, tokenize);
        stages.stage(Stage::Queue, queue);
        stages.stage(Stage::Engine, engine);
        stages.stage(Stage::Total, total);
        let micros = |duration: Duration| duration.as_micros() as u64;
        let (queue_us, tokenize_us, engine_us) = (micros(queue), micros(tokenize), micros(engine));
        let (route, priority, total_us) = (route.as_str(), priority.as_str(), micros(total));
        debug!(
            request_id,
            route, priority, inputs, tokens, queue_us, tokenize_us, engine_us, total_us, "answered"
        );
    }
}

/// A request was refused.
pub(crate) struct RequestRefused<'a> {
    pub(crate) route: Route,
    pub(crate) request_id: &'a str,
    pub(crate) refusal: &'a Refusal,
}

impl RequestRefused<'_> {
    pub(crate) fn record(self, metrics: &Metrics) {
        let RequestRefused { route, request_id, refusal: Refusal { code, message, .. } } = self;
        metrics.errors.add(1);
        metrics.outcomes.add((route, Some(*code)), 1);
        match code.fault() {
            Fault::Replica => error!(request_id, code = code.as_str(), "failed"),
            Fault::Caller | Fault::Quota | Fault::Policy | Fault::Capacity | Fault::Network => {
                debug!(request_id, code = code.as_str(), message, "refused");
            }
        }
    }
}

/// The queue had no room for a request. Its answer has an event of its own, with the request's name.
pub(crate) struct RequestShed {
    pub(crate) priority: Priority,
}

impl RequestShed {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.shed.add(self.priority, 1);
    }
}

/// The inputs of a request were looked up among the rows of the past.
pub(crate) struct RowsLookedUp {
    pub(crate) found: u64,
    pub(crate) missing: u64,
}

impl RowsLookedUp {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.cache_hits.add(self.found);
        metrics.cache_misses.add(self.missing);
    }
}

/// Inputs came that wait or are computed already, and share that work.
pub(crate) struct InputsJoined {
    pub(crate) inputs: u64,
}

impl InputsJoined {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.joined_inputs.add(self.inputs);
    }
}

/// The engine waits a moment for company before it computes.
pub(crate) struct EngineWaits;

impl EngineWaits {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.window_waits.add(1);
    }
}

/// The engine computed a batch.
pub(crate) struct BatchComputed {
    pub(crate) size: Backlog,
    /// Tokens of its longest input.
    pub(crate) longest: u64,
    pub(crate) priority: Priority,
    pub(crate) reason: StartReason,
    pub(crate) waited: Duration,
    pub(crate) busy: Duration,
}

impl BatchComputed {
    pub(crate) fn record(self, metrics: &Metrics) {
        let BatchComputed { size: Backlog { tokens, inputs }, longest, priority, reason, waited, busy } =
            self;
        let of_priority = metrics.priorities.of(priority);
        of_priority.batch_inputs.observe(inputs as f64);
        of_priority.batch_tokens.observe(tokens as f64);
        of_priority.batch_seconds.observe(busy.as_secs_f64());
        metrics.batches.add((priority, reason), 1);
        metrics.padding_saved.add(longest * inputs - tokens);
        metrics.engine_micros.add(busy.as_micros() as u64);
        metrics.window_micros.add(waited.as_micros() as u64);
    }
}

/// Nobody waits for these inputs any more, and they will not be computed.
pub(crate) struct InputsDropped {
    pub(crate) inputs: u64,
}

impl InputsDropped {
    pub(crate) fn record(self, metrics: &Metrics) {
        metrics.dropped_inputs.add(self.inputs);
    }
}

/// The engine failed on a batch; the requests in it get an error each.
pub(crate) struct EngineFailed<'a> {
    pub(crate) reason: &'a str,
    pub(crate) inputs: u64,
    pub(crate) tokens: u64,
}

impl EngineFailed<'_> {
    pub(crate) fn record(self, metrics: &Metrics) {
        let EngineFailed { reason, inputs, tokens } = self;
        metrics.engine_failures.add(1);
        error!(reason, inputs, tokens, "the engine failed");
    }
}

/// The tokenizer failed on a request.
pub(crate) struct TokenizerFailed<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) reason: &'a str,
}

impl TokenizerFailed<'_> {
    pub(crate) fn record(self) {
        let TokenizerFailed { request_id, reason } = self;
        error!(request_id, reason, "the tokenizer failed");
    }
}

/// The process was told to end, and finishes what it has.
pub(crate) struct Draining;

impl Draining {
    pub(crate) fn record(self) {
        info!("draining");
    }
}

/// Requests were still under way when the time for them was over.
pub(crate) struct DrainCutShort {
    pub(crate) after: Duration,
}

impl DrainCutShort {
    pub(crate) fn record(self) {
        warn!(after_ms = self.after.as_millis() as u64, "ended with requests under way");
    }
}
