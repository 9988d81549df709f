//! What happens in a replica, one struct per event. Each owns its log line and what it counts.
//!
//! What strangers send (texts, tokens) is in none of them. Requests are logged at DEBUG, one line each: at INFO a busy
//! replica would write more lines than vectors.

use std::net::SocketAddr;
use std::time::Duration;

use replica_core::refusal::Refusal;
use replica_core::wire::error::Fault;
use tracing::{debug, error, info, warn};

use crate::counters::{Counters, add};
use crate::engine::cpu::WeightsPlace;

/// The process listens; the model is not there yet.
pub(crate) struct Listening {
    pub(crate) on: SocketAddr,
}

impl Listening {
    pub(crate) fn record(self) {
        info!(on = %self.on, "listening");
    }
}

/// The model is loaded and warm.
pub(crate) struct ModelReady<'a> {
    pub(crate) source: &'a str,
    pub(crate) digest: &'a str,
    pub(crate) instruction_set: &'a str,
    pub(crate) weights: &'a WeightsPlace,
    pub(crate) took: Duration,
}

impl ModelReady<'_> {
    pub(crate) fn record(self) {
        let ModelReady { source, digest, instruction_set, weights, took } = self;
        let took_ms = took.as_millis() as u64;
        match weights {
            WeightsPlace::SharedFile(file) => {
                info!(source, digest, instruction_set, weights = %file.display(), took_ms, "model ready");
            }
            WeightsPlace::OwnMemory { problem } => {
                let problem = problem.as_deref().unwrap_or("not wanted");
                warn!(
                    source,
                    digest, instruction_set, problem, took_ms, "model ready, without sharing its weights"
                );
            }
        }
    }
}

/// A request for vectors came in.
pub(crate) struct RequestReceived;

impl RequestReceived {
    pub(crate) fn record(self, counters: &Counters) {
        add(&counters.requests, 1);
    }
}

/// A request was answered with vectors.
pub(crate) struct RequestAnswered<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) inputs: u64,
    pub(crate) tokens: u64,
    pub(crate) queue: Duration,
    pub(crate) tokenize: Duration,
    pub(crate) engine: Duration,
}

impl RequestAnswered<'_> {
    pub(crate) fn record(self, counters: &Counters) {
        let RequestAnswered { request_id, inputs, tokens, queue, tokenize, engine } = self;
        add(&counters.inputs, inputs);
        add(&counters.tokens, tokens);
        let micros = |duration: Duration| duration.as_micros() as u64;
        let (queue_us, tokenize_us, engine_us) = (micros(queue), micros(tokenize), micros(engine));
        debug!(request_id, inputs, tokens, queue_us, tokenize_us, engine_us, "answered");
    }
}

/// A request was refused.
pub(crate) struct RequestRefused<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) refusal: &'a Refusal,
}

impl RequestRefused<'_> {
    pub(crate) fn record(self, counters: &Counters) {
        add(&counters.errors, 1);
        let RequestRefused { request_id, refusal: Refusal { code, message, .. } } = self;
        match code.fault() {
            Fault::Replica => error!(request_id, code = code.as_str(), "failed"),
            Fault::Caller | Fault::Quota | Fault::Policy | Fault::Capacity | Fault::Network => {
                debug!(request_id, code = code.as_str(), message, "refused");
            }
        }
    }
}

/// The engine computed a batch.
pub(crate) struct BatchComputed;

impl BatchComputed {
    pub(crate) fn record(self, counters: &Counters) {
        add(&counters.batches, 1);
    }
}

/// Nobody waits for these inputs any more, and they will not be computed.
pub(crate) struct InputsDropped {
    pub(crate) inputs: u64,
}

impl InputsDropped {
    pub(crate) fn record(self, counters: &Counters) {
        add(&counters.dropped_inputs, self.inputs);
    }
}

/// The engine failed on a batch; the requests in it get an error each.
pub(crate) struct EngineFailed<'a> {
    pub(crate) reason: &'a str,
    pub(crate) inputs: usize,
    pub(crate) tokens: u64,
}

impl EngineFailed<'_> {
    pub(crate) fn record(self) {
        let EngineFailed { reason, inputs, tokens } = self;
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
