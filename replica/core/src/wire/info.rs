//! `GET /info`: what a replica is and what it has done, for people and for tests.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::identity::IdentityV1;
use super::status::StateV1;

/// The answer of `GET /info`. TEI's clients find their own members in it, but for `version`, which is ours.
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
    /// The identity of what is loaded; absent while it is being loaded.
    #[serde(default)]
    pub identity: Option<IdentityV1>,
    /// What computes it; absent while the model is being loaded.
    pub engine: Option<EngineInfoV1>,
    /// How it makes batches; absent while the model is being loaded.
    pub batch: Option<BatchV1>,
    /// What it refuses.
    pub limits: LimitsV1,
    /// What it has done since the start.
    pub counters: CountersV1,
    /// What waits now.
    pub queue: QueueV1,
    /// What TEI says of itself; absent while the model is being loaded.
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
    /// What it does.
    pub model_type: TeiModelType,
    /// Requests that may be under way; here they are bounded by bytes and tokens, so this is the bound on the jobs that
    /// wait for a tokenizer.
    pub max_concurrent_requests: usize,
    /// [`ModelInfoV1::max_input_tokens`].
    pub max_input_length: usize,
    /// [`BatchV1::batch_tokens`].
    pub max_batch_tokens: u64,
    /// Never bounded.
    pub max_batch_requests: Option<usize>,
    /// [`LimitsV1::max_inputs`].
    pub max_client_batch_size: usize,
    /// Whether inputs that are too long are cut where a request does not say what becomes of them.
    pub auto_truncate: bool,
    /// [`EngineInfoV1::tokenizer_threads`].
    pub tokenization_workers: usize,
}

/// What a model does, as TEI says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TeiModelType {
    /// It makes vectors.
    Embedding {
        /// How tokens become one vector.
        pooling: String,
    },
    /// It ranks pairs.
    Reranker(TeiLabels),
    /// It labels.
    Classifier(TeiLabels),
}

/// The labels of a head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeiLabels {
    /// Their names by their index, which JSON makes a string.
    pub id2label: BTreeMap<String, String>,
    /// The reverse.
    pub label2id: BTreeMap<String, usize>,
}

impl TeiLabels {
    /// Of `labels`, in the order of their indices.
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
    /// Where it came from, as configured.
    pub source: String,
    /// SHA-256 over the names and digests of its files: equal digests mean equal vectors.
    pub digest: String,
    /// The family that it belongs to.
    pub architecture: String,
    /// `embed`, `rerank` (one label) or `classify`.
    pub task: String,
    /// How a rerank is answered: by a `cross-encoder`, by the `similarity` of two vectors (then a score is (1 + cosine)
    /// / 2), or not at all (`none`).
    pub rerank: String,
    /// How tokens become one vector; absent of a model with a head.
    pub pooling: Option<String>,
    /// Whether vectors have length one where a request does not say otherwise.
    pub normalized: bool,
    /// The labels of a head, in the order of their indices.
    pub labels: Vec<String>,
    /// The names that `prompt_name` may have.
    pub prompts: Vec<String>,
    /// The one of them that is used without a name.
    pub default_prompt: Option<String>,
    /// Numbers in a vector, or labels of a head.
    pub dimensions: usize,
    /// Tokens of the longest input, special tokens included.
    pub max_input_tokens: usize,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
}

/// The engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfoV1 {
    /// `cpu` or `tensorrt-llm`.
    pub kind: String,
    /// `f32`.
    pub precision: String,
    /// The instructions that it found on this processor.
    pub instruction_set: String,
    /// Threads that compute.
    pub threads: usize,
    /// Threads that tokenise.
    pub tokenizer_threads: usize,
    /// What computes beside the processor; absent where nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<AcceleratorV1>,
}

/// What computes beside the processor, and what it has done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorV1 {
    /// The GPU.
    pub gpu: String,
    /// The version of TensorRT.
    pub tensorrt: String,
    /// The version of TensorRT-LLM.
    pub tensorrt_llm: String,
    /// Whether all of it is a stand-in for tests, whose numbers mean nothing.
    pub stand_in: bool,
    /// Runs of the model since the start.
    pub iterations: u64,
    /// Milliseconds that they took; 0 where the runtime does not say.
    pub busy_ms: u64,
    /// Inputs that it computed.
    pub completed: u64,
    /// Batches that failed and were computed again, input by input.
    pub taken_apart: u64,
    /// Inputs in the last run; 0 where the runtime does not say.
    pub active: u64,
    /// Inputs that waited for it in the runtime; 0 where it does not say.
    pub queued: u64,
    /// Bytes of the GPU's memory in use; 0 where the runtime does not say.
    pub gpu_bytes: u64,
}

/// How batches are made, by the names that `replica.toml` gives it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchV1 {
    /// Tokens of a batch while there are no lookups.
    pub batch_tokens: u64,
    /// Tokens of a batch while there are.
    pub interactive_batch_tokens: u64,
    /// The part of the tokens that bulk has while both priorities wait.
    pub bulk_share_percent: u8,
    /// The longest wait for company, in milliseconds.
    pub window_max_ms: f64,
    /// The file of `meridian tune` that it comes from; absent where defaults and the configuration decide.
    pub tuned: Option<String>,
}

/// The limits, by the names that `replica.toml` gives them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsV1 {
    /// Inputs of one request.
    pub max_inputs: usize,
    /// Documents of one rerank.
    pub max_documents: usize,
    /// Texts and pairs of one classification.
    pub max_pairs: usize,
    /// Sentences of one similarity request.
    pub max_sentences: usize,
    /// Tokens of one request.
    pub max_request_tokens: u64,
    /// Bytes of one body.
    pub max_body_bytes: usize,
    /// Bytes of all bodies at once.
    pub max_buffered_bytes: usize,
    /// Tokens that wait for the engine.
    pub max_queue_tokens: u64,
    /// Milliseconds that a body may take to arrive.
    pub body_timeout_ms: u64,
}

impl From<crate::limits::Limits> for LimitsV1 {
    fn from(limits: crate::limits::Limits) -> LimitsV1 {
        let crate::limits::Limits {
            max_inputs,
            max_documents,
            max_pairs,
            max_sentences,
            max_request_tokens,
            max_body_bytes,
            max_buffered_bytes,
            max_queue_tokens,
            body_timeout_ms,
        } = limits;
        LimitsV1 {
            max_inputs,
            max_documents,
            max_pairs,
            max_sentences,
            max_request_tokens,
            max_body_bytes,
            max_buffered_bytes,
            max_queue_tokens,
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
