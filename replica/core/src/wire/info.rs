//! `GET /info`: what a replica is and what it has done, for people and for tests.

use serde::{Deserialize, Serialize};

use super::status::StateV1;

/// The answer of `GET /info`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InfoV1 {
    /// 1.
    pub version: u32,
    /// The deployments that this replica answers to.
    pub names: Vec<String>,
    /// Where it stands in its life.
    pub state: StateV1,
    /// What is loaded; absent while it is being loaded.
    pub model: Option<ModelInfoV1>,
    /// What computes it; absent while the model is being loaded.
    pub engine: Option<EngineInfoV1>,
    /// What it refuses.
    pub limits: LimitsV1,
    /// What it has done since the start.
    pub counters: CountersV1,
    /// What waits now.
    pub queue: QueueV1,
}

/// The model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelInfoV1 {
    /// Where it came from, as configured.
    pub source: String,
    /// SHA-256 over the names and digests of its files: equal digests mean equal vectors.
    pub digest: String,
    /// The family that it belongs to.
    pub architecture: String,
    /// Numbers in a vector.
    pub dimensions: usize,
    /// Tokens of the longest input, special tokens included.
    pub max_input_tokens: usize,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
}

/// The engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfoV1 {
    /// `cpu`.
    pub kind: String,
    /// `f32`.
    pub precision: String,
    /// The instructions that it found on this processor.
    pub instruction_set: String,
    /// Threads that compute.
    pub threads: usize,
    /// Threads that tokenise.
    pub tokenizer_threads: usize,
}

/// The limits, by the names that `replica.toml` gives them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsV1 {
    /// Inputs of one request.
    pub max_inputs: usize,
    /// Bytes of one body.
    pub max_body_bytes: usize,
    /// Bytes of all bodies at once.
    pub max_buffered_bytes: usize,
    /// Tokens that wait for the engine.
    pub max_queue_tokens: u64,
    /// Tokens of one engine call.
    pub batch_tokens: u64,
    /// Milliseconds that a body may take to arrive.
    pub body_timeout_ms: u64,
}

impl From<crate::limits::Limits> for LimitsV1 {
    fn from(limits: crate::limits::Limits) -> LimitsV1 {
        let crate::limits::Limits {
            max_inputs,
            max_body_bytes,
            max_buffered_bytes,
            max_queue_tokens,
            batch_tokens,
            body_timeout_ms,
        } = limits;
        LimitsV1 {
            max_inputs,
            max_body_bytes,
            max_buffered_bytes,
            max_queue_tokens,
            batch_tokens,
            body_timeout_ms,
        }
    }
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountersV1 {
    /// Requests for vectors, refused ones included.
    pub requests_total: u64,
    /// Inputs answered.
    pub inputs_total: u64,
    /// Tokens answered.
    pub tokens_total: u64,
    /// Requests refused or failed.
    pub errors_total: u64,
    /// Engine calls.
    pub batches_total: u64,
    /// Inputs whose caller went away, or whose deadline passed, before they were computed.
    pub dropped_inputs_total: u64,
}

/// The queue.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueueV1 {
    /// Tokens that wait or are being computed.
    pub pending_tokens: u64,
    /// Inputs that wait or are being computed.
    pub pending_inputs: u64,
    /// Measured speed of the engine; 0 until it is known.
    pub tokens_per_second: f64,
}
