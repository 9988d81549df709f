//! `GET /info`: configuration and counters of a replica, for people and for tests.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::identity::IdentityV1;
use super::limits::Limits;
use super::status::StateV1;

/// Response of `GET /info`. It contains the members of TEI's response, except for `version`, which is Meridian's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InfoV1 {
    /// Version of the format: 1.
    pub version: u32,
    /// Deployments that this replica serves.
    pub names: Vec<String>,
    /// Lifecycle state.
    pub state: StateV1,
    /// The loaded model; absent while it is being loaded.
    pub model: Option<ModelInfoV1>,
    /// Identity of the loaded model; absent while it is being loaded.
    #[serde(default)]
    pub identity: Option<IdentityV1>,
    /// The engine; absent while the model is being loaded.
    pub engine: Option<EngineInfoV1>,
    /// Batching settings; absent while the model is being loaded.
    pub batch: Option<BatchV1>,
    /// Limits of requests.
    pub limits: Limits,
    /// Totals since the start.
    pub counters: CountersV1,
    /// State of the queue.
    pub queue: QueueV1,
    /// Members of TEI's response; absent while the model is being loaded.
    #[serde(flatten)]
    pub tei: Option<TeiInfo>,
}

/// The members of TEI's `GET /info`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeiInfo {
    /// [`ModelInfoV1::source`].
    pub model_id: String,
    /// [`ModelInfoV1::digest`].
    pub model_sha: String,
    /// [`EngineInfoV1::precision`].
    pub model_dtype: String,
    /// The first of [`InfoV1::names`].
    pub served_model_name: String,
    /// Task of the model.
    pub model_type: TeiModelType,
    /// Maximum concurrent requests. Meridian limits requests by bytes and tokens, so this is the limit of the jobs that
    /// are queued for a tokenizer.
    pub max_concurrent_requests: usize,
    /// [`ModelInfoV1::max_input_tokens`].
    pub max_input_length: usize,
    /// [`BatchV1::batch_tokens`].
    pub max_batch_tokens: u64,
    /// Unlimited, so always absent.
    pub max_batch_requests: Option<usize>,
    /// [`Limits::max_inputs`].
    pub max_client_batch_size: usize,
    /// Whether inputs that are too long are truncated by default.
    pub auto_truncate: bool,
    /// [`EngineInfoV1::tokenizer_threads`].
    pub tokenization_workers: usize,
}

/// Task of a model in TEI's terms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TeiModelType {
    /// Embedding model.
    Embedding {
        /// Pooling of the token vectors.
        pooling: String,
    },
    /// Reranker of pairs.
    Reranker(TeiLabels),
    /// Classifier.
    Classifier(TeiLabels),
}

/// Labels of a classifier head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeiLabels {
    /// Names of the labels by index, which is a string in JSON.
    pub id2label: BTreeMap<String, String>,
    /// The inverse map.
    pub label2id: BTreeMap<String, usize>,
}

impl TeiLabels {
    /// Creates the maps of `labels`, in the order of their indices.
    pub fn new(labels: &[String]) -> TeiLabels {
        let by_id = labels.iter().enumerate();
        TeiLabels {
            id2label: by_id.clone().map(|(id, label)| (id.to_string(), label.clone())).collect(),
            label2id: by_id.map(|(id, label)| (label.clone(), id)).collect(),
        }
    }
}

/// The model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelInfoV1 {
    /// Source of the model, as configured.
    pub source: String,
    /// SHA-256 over the names and digests of the model's files: equal digests mean equal vectors.
    pub digest: String,
    /// Model architecture.
    pub architecture: String,
    /// `embed`, `rerank` (one label) or `classify`.
    pub task: String,
    /// Rerank method: a `cross-encoder`, the `similarity` of two vectors (then a score is (1 + cosine) / 2), or `none`
    /// if unsupported.
    pub rerank: String,
    /// Pooling of the token vectors; absent for a model with a classifier head.
    pub pooling: Option<String>,
    /// Whether vectors are scaled to length one by default.
    pub normalized: bool,
    /// Labels of the classifier head, in the order of their indices.
    pub labels: Vec<String>,
    /// Valid values of `prompt_name`.
    pub prompts: Vec<String>,
    /// Prompt that is used by default.
    pub default_prompt: Option<String>,
    /// Dimensions of a vector, or number of labels.
    pub dimensions: usize,
    /// Tokens of the longest input, special tokens included.
    pub max_input_tokens: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
}

/// The engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfoV1 {
    /// `cpu` or `tensorrt-llm`.
    pub kind: String,
    /// `f32`.
    pub precision: String,
    /// Instruction set in use.
    pub instruction_set: String,
    /// Compute threads.
    pub threads: usize,
    /// Tokenizer threads.
    pub tokenizer_threads: usize,
    /// Accelerator; absent for the CPU engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<AcceleratorV1>,
}

/// Accelerator and its counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorV1 {
    /// The GPU.
    pub gpu: String,
    /// The version of TensorRT.
    pub tensorrt: String,
    /// The version of TensorRT-LLM.
    pub tensorrt_llm: String,
    /// Whether the runtime is a test double, whose results are meaningless.
    pub test_double: bool,
    /// Its counters.
    #[serde(flatten)]
    pub statistics: Statistics,
}

/// Counters of an engine since its start, and its current load; 0 if the engine does not report a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Runs of the model.
    pub iterations: u64,
    /// Time of the runs in milliseconds.
    pub busy_ms: u64,
    /// Computed sequences.
    pub completed: u64,
    /// Batches that failed and were retried, one sequence at a time.
    pub retried_batches: u64,
    /// Sequences in the last run.
    pub active: u64,
    /// Sequences that are queued in the engine.
    pub queued: u64,
    /// GPU memory in use, in bytes.
    pub gpu_bytes: u64,
}

/// Batching settings, with the keys of `replica.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchV1 {
    /// Maximum tokens of a batch while there are no interactive requests.
    pub batch_tokens: u64,
    /// Maximum tokens of a batch while there are interactive requests.
    pub interactive_batch_tokens: u64,
    /// Percentage of the tokens that bulk gets while both priorities have queued requests.
    pub bulk_share_percent: u8,
    /// Maximum batching delay, in milliseconds.
    pub window_max_ms: f64,
    /// File of `meridian tune` with these settings; absent if they come from defaults and the configuration.
    pub tuned: Option<String>,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountersV1 {
    /// Inference requests, rejected ones included.
    pub requests_total: u64,
    /// Computed inputs of successful requests.
    pub inputs_total: u64,
    /// Computed tokens of successful requests.
    pub tokens_total: u64,
    /// Requests that were rejected or failed.
    pub errors_total: u64,
    /// Engine calls.
    pub batches_total: u64,
    /// Inputs that were cancelled or whose deadline passed before they were computed.
    pub dropped_inputs_total: u64,
}

/// The queue.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueueV1 {
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Inputs that are queued or being computed.
    pub pending_inputs: u64,
    /// Measured speed of the engine; 0 until it is known.
    pub tokens_per_second: f64,
}
