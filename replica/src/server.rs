//! Lifecycle of a replica.
//!
//! The replica listens before it has a model, so that its region receives "starting" instead of a refused connection,
//! and so that a port in use is reported before time is spent on weights. A model that is not on this machine is
//! downloaded ([`crate::start`]). The replica is ready when the model is loaded and has computed a first sequence. On
//! shutdown it accepts no more connections, finishes requests in flight within [`DRAIN_LIMIT`], and returns.

use std::fmt::Display;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::HeaderValue;
use futures_util::future::BoxFuture;
use identity::operations::{self, OperationsLimits};
use identity::{AcceptedPeers, ProcessIdentity, ServerTls, Transport, listener};
use regions::spiffe::Role;
use replica_api::identity::IdentityV1;
use replica_api::info::{AcceleratorV1, BatchV1, EngineInfoV1, ModelInfoV1};
use replica_api::input::Readable;
use replica_core::batch::BatchSettings;
use replica_core::{EngineKind, UnknownName};
use supervision::task::{essential, supervise};
use telemetry::Process;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::app::{App, Service};
use crate::batcher::{Batcher, Options};
use crate::cache::{CachedModel, default_root};
use crate::config::Config;
use crate::engine::cpu::{CpuEngine, CpuLoadError, CpuOptions, Isa, PackedCache};
use crate::engine::{Accelerator, BatchBuffer, Engine, EngineError, Output, Statistics, tensorrt};
use crate::events::{
    DrainLimitReached, Draining, Listening, ModelReady, StartAttemptFailed, TunedSettings,
    TunedSettingsIgnored,
};
use crate::http;
use crate::model::ModelDir;
use crate::model_identity;
use crate::purpose::Purpose;
use crate::serve_error::{InvalidModel, LoadErrors, ServeError};
use crate::start::{self, FoundModel, StartAttempts};
use crate::tokenize::{TextTokenizer, TokenizerPool};
use crate::tune;
use crate::tune::effective::{EffectiveSettings, effective_settings};
use crate::tune::file::Hardware;
use crate::vectors::RowCache;

/// Time for requests in flight to finish on shutdown. The longest request consists of two batches, which take less; ten
/// seconds fit into the default grace period of common orchestrators.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Timeout for the export of the last spans after that.
const LAST_SPANS: Duration = Duration::from_secs(1);

/// Maximum number of open connections: more than the requests in flight of the spokes of a region. The replicas of
/// a drill have it too; that of the hub counts gateways and spokes.
pub const CONNECTIONS_MAX: usize = 8192;

/// Serves until `shutdown`, and calls `ready` with the address once requests are accepted.
pub async fn run(
    config: Config,
    shutdown: impl Future<Output = ()> + Send,
    ready: impl FnOnce(SocketAddr) + Send,
) -> Result<(), ServeError> {
    boxed(config, Box::pin(shutdown), Box::new(ready)).await
}

/// [`run`] without type parameters, so that the role is compiled once, in this crate, and not in every program that runs it.
fn boxed<'a>(
    config: Config,
    shutdown: BoxFuture<'a, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + 'a>,
) -> BoxFuture<'a, Result<(), ServeError>> {
    Box::pin(run_until(config, shutdown, ready))
}

async fn run_until(
    config: Config,
    shutdown: BoxFuture<'_, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + '_>,
) -> Result<(), ServeError> {
    let Config { listen, operations, ref transport, .. } = config;
    let listener = bind(listen).await?;
    let operations = match operations {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    let address = listener.local_addr().map_err(|reason| ServeError::Listen { address: listen, reason })?;
    Listening { on: address }.record();
    if matches!(transport, Transport::Plaintext) {
        // Every process that reaches the port can send requests. Configure certificates unless the network is trusted.
        tracing::warn!(on = %address, "replica accepts plaintext connections because of [identity]");
    }

    let tracing = config.tracing.as_ref();
    let process = Process { role: "replica", region: config.region.as_deref() };
    let started = tracing.map(|tracing| telemetry::start(&tracing.behind_gateway(), process));
    let (tracer, trace_export) = started.transpose()?.unzip();
    let app = Arc::new(App::new(&config).with_tracer(tracer));
    let source = Arc::clone(&app);
    let metrics = config.metrics.as_ref();
    let metrics_export =
        metrics.map(|metrics| telemetry::metrics::start(metrics, process, move || source.snapshot()));
    let metrics_export = metrics_export.transpose()?;
    let mut server = Server::start(listener, operations, transport, &app)?;
    tokio::select! {
        () = shutdown => {}
        Err(error) = serve(&app, config, &mut server, || ready(address)) => return Err(error),
    }
    app.drain();
    Draining.record();
    server.drain().await;
    if let Some(trace_export) = trace_export {
        trace_export.finish(LAST_SPANS).await;
    }
    if let Some(metrics_export) = metrics_export {
        metrics_export.finish().await;
    }
    Ok(())
}

async fn bind(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|reason| ServeError::Listen { address, reason })
}

/// Starts the model, then serves until the listener ends.
async fn serve(
    app: &Arc<App>,
    config: Config,
    server: &mut Server,
    ready: impl FnOnce(),
) -> Result<(), ServeError> {
    app.publish(start_model(app, config).await?);
    ready();
    server.ended().await.map_err(ServeError::Serve)
}

/// Attempts to start the model until it succeeds, or fails for a reason that another attempt cannot change.
async fn start_model(app: &Arc<App>, config: Config) -> Result<Service, ServeError> {
    let config = Arc::new(config);
    let mut attempts = StartAttempts::default();
    loop {
        let attempt = spawn_blocking({
            let (app, config, invalid_model) =
                (Arc::clone(app), Arc::clone(&config), attempts.invalid_model().cloned());
            move || attempt(&app, &config, invalid_model.as_ref())
        });
        let died = |died: JoinError| ServeError::Load { model: app.source.clone(), reason: died.to_string() };
        let error = match attempt.await.map_err(died)? {
            Ok(service) => return Ok(service),
            Err(error) => error,
        };
        let Some(failure) = error.failure().filter(|_| start::may_pull(&config)) else {
            return Err(error);
        };
        let (failure, retry_in) = attempts.failed(failure, rand::random());
        StartAttemptFailed { failure: &failure, retry_in }.record(&app.metrics);
        app.start.fail(failure);
        sleep(retry_in).await;
    }
}

/// Finds or downloads the model, loads it and starts its threads.
fn attempt(app: &App, config: &Config, invalid_model: Option<&InvalidModel>) -> Result<Service, ServeError> {
    let root = config.cache.clone().or_else(default_root).ok_or(ServeError::NoCache)?;
    let found = start::find(app, config, &root, invalid_model)?;
    app.start.load();
    load(config, &root, found, app)
}

/// Listeners and their connections.
struct Server {
    /// A single task; aborted on drop.
    task: JoinSet<io::Result<()>>,
    /// Acceptor of connections, listener for operators and reload of the identity; aborted on drop.
    _others: JoinSet<()>,
    end: watch::Sender<bool>,
}

impl Server {
    fn start(
        listener: TcpListener,
        operations: Option<TcpListener>,
        transport: &Transport,
        app: &Arc<App>,
    ) -> Result<Server, ServeError> {
        let mut others = JoinSet::new();
        if let Some(identity) = transport.identity().cloned() {
            others.spawn(supervise("identity", move || identity.clone().follow()));
        }
        let tls = transport.identity().map(server_tls).transpose()?;
        let (listener, acceptor) =
            listener::listen(listener, tls, CONNECTIONS_MAX, Arc::clone(&app.metrics.refused))
                .map_err(ServeError::Serve)?;
        others.spawn(async {
            essential("connections", acceptor.run()).await;
        });
        if let Some(operations) = operations {
            let (router, refused) =
                (http::operations_router(Arc::clone(app)), Arc::clone(&app.metrics.refused));
            let server = operations::serve(operations, router, OperationsLimits::DEFAULT, refused);
            others.spawn(async {
                essential("operations", async { drop(server.await) }).await;
            });
        }
        let (end, mut ended) = watch::channel(false);
        let server =
            axum::serve(listener, http::router(Arc::clone(app))).with_graceful_shutdown(async move {
                // An error means that the sender was dropped, which ends the server as well.
                let _ = ended.wait_for(|ended| *ended).await;
            });
        let mut task = JoinSet::new();
        task.spawn(server.into_future());
        Ok(Server { task, _others: others, end })
    }

    /// Waits until the server has ended.
    async fn ended(&mut self) -> io::Result<()> {
        match self.task.join_next().await {
            Some(Ok(ended)) => ended,
            Some(Err(died)) => Err(io::Error::other(died)),
            None => Ok(()),
        }
    }

    /// Stops accepting connections, and waits for requests in flight up to the drain limit.
    async fn drain(mut self) {
        self.end.send_replace(true);
        if timeout(DRAIN_LIMIT, self.ended()).await.is_err() {
            DrainLimitReached { after: DRAIN_LIMIT }.record();
        }
    }
}

/// Returns the TLS of the listener, which accepts the spokes of the replica's region.
fn server_tls(identity: &Arc<ProcessIdentity>) -> Result<ServerTls, ServeError> {
    let accepted = AcceptedPeers { roles: &[], same_region: &[Role::Spoke] };
    ServerTls::new(identity, accepted, &[b"http/1.1"]).map_err(|error| ServeError::Tls(error.to_string()))
}

/// Loads a model of the cache at `root`, and starts its threads.
fn load(config: &Config, root: &Path, found: FoundModel, app: &App) -> Result<Service, ServeError> {
    let FoundModel { model: cached, is_verified } = found;
    let started = Instant::now();
    let (metrics, is_traced) = (Arc::clone(&app.metrics), app.tracer.is_some());
    let errors = LoadErrors { source: &config.model, digest: &cached.digest, is_verified };
    let failed = |error: &dyn Display| errors.of_machine(error);
    let model = ModelDir::open_for(&cached.path, config.task).map_err(|error| errors.of_model(&error))?;
    let (effective, tuned) = settings(config, root, &cached);
    let EffectiveSettings { precision, threads, batch } = effective;
    let (engine, weights): (Arc<dyn Engine>, _) = match config.engine.kind {
        EngineKind::Cpu => {
            let packed = PackedCache::below(root, &cached.digest);
            let options = CpuOptions { threads, precision, packed: Some(packed), isa: None };
            let engine = CpuEngine::load(&model, options).map_err(|error| match error {
                CpuLoadError::Model(error) => errors.of_model(&error),
                error => failed(&error),
            })?;
            let weights = engine.weights_location().clone();
            (Arc::new(engine), Some(weights))
        }
        EngineKind::TensorrtLlm => {
            let engine = tensorrt::open(root, &cached.digest, precision, &model);
            (engine.map_err(|error| failed(&error))?, None)
        }
    };
    if let Some(problem) = warm_up(&*engine).map_err(|error| failed(&error))? {
        // The configuration selects the precision.
        return Err(failed(&problem));
    }
    let description = engine.describe().clone();
    let batch = within(batch, description.accelerator.as_ref());
    let readable = Readable { max_input_tokens: description.max_tokens, vocabulary: description.vocabulary };
    let tokenizer = TextTokenizer::load(&model, readable, description.token_types);
    let tokenizer = tokenizer.map_err(|error| errors.of_tokenizer(&error))?;
    let tokenizer_threads = config.threads.tokenizer.get();
    ModelReady {
        source: &cached.source,
        digest: &cached.digest,
        instruction_set: &description.instruction_set,
        weights: weights.as_ref(),
        took: started.elapsed(),
    }
    .record();
    let options = Options {
        batch,
        max_queue_tokens: config.limits.max_queue_tokens,
        cache: RowCache::new(config.embedding_cache_bytes, &cached.digest, precision.as_str()),
        metrics,
    };
    let purpose = Purpose::of(&model, &description);
    let prompts = purpose.prompts().cloned();
    let task = purpose.task().parse().map_err(|error: UnknownName| failed(&error))?;
    let info = ModelInfoV1 {
        source: cached.source,
        digest: cached.digest,
        architecture: description.architecture,
        task: purpose.task().to_owned(),
        rerank: purpose.rerank().to_owned(),
        pooling: purpose.pooling().map(str::to_owned),
        normalized: config.embeddings.normalize || model.sentence.is_normalized(description.width),
        labels: purpose.label_names().to_vec(),
        prompts: prompts.iter().flat_map(|prompts| prompts.by_name.keys().cloned()).collect(),
        default_prompt: prompts.and_then(|prompts| prompts.default.clone()),
        dimensions: purpose.dimensions().unwrap_or(description.width),
        max_input_tokens: description.max_tokens,
        vocabulary: description.vocabulary,
    };
    let identity = IdentityV1::from(&model_identity::of(&info, task, description.engine, &model.prompts));
    let revision = HeaderValue::from_str(&identity.revision).expect("hexadecimal digits are a header value");
    Ok(Service {
        tokenizer: TokenizerPool::start(tokenizer, tokenizer_threads).map_err(ServeError::Thread)?,
        batcher: Batcher::start_traced(engine, options, is_traced).map_err(ServeError::Thread)?,
        readable,
        model: info,
        identity,
        revision,
        purpose,
        engine: EngineInfoV1 {
            kind: description.engine.kind.to_string(),
            precision: description.engine.precision.to_string(),
            instruction_set: description.instruction_set,
            threads: description.threads,
            tokenizer_threads,
            accelerator: description.accelerator.map(accelerator),
        },
        batch: batch_info(batch, tuned),
    })
}

/// Combines configuration, tuned settings and defaults for this model; returns the path of the tuned settings, if used.
fn settings(config: &Config, root: &Path, cached: &CachedModel) -> (EffectiveSettings, Option<PathBuf>) {
    if config.engine.kind != EngineKind::Cpu {
        // Settings tuned on this CPU do not apply to a GPU.
        return (effective_settings(config, None), None);
    }
    let hardware = Hardware::here(Isa::best().name());
    match tune::file::find(root, config.tuned.as_deref(), &cached.digest, &hardware) {
        Ok(Some((path, tuned))) => {
            TunedSettings { file: &path }.record();
            (effective_settings(config, Some(&tuned)), Some(path))
        }
        Ok(None) => (effective_settings(config, None), None),
        Err(mismatch) => {
            TunedSettingsIgnored { mismatch: &mismatch }.record();
            (effective_settings(config, None), None)
        }
    }
}

/// Limits batches to the maximum of the engine.
fn within(settings: BatchSettings, accelerator: Option<&Accelerator>) -> BatchSettings {
    let most = accelerator.map_or(u64::MAX, |accelerator| accelerator.max_batch_tokens);
    BatchSettings {
        batch_tokens: settings.batch_tokens.min(most),
        interactive_batch_tokens: settings.interactive_batch_tokens.min(most),
        ..settings
    }
}

/// Converts the description of the device; its counters are read on request.
fn accelerator(accelerator: Accelerator) -> AcceleratorV1 {
    let Accelerator { gpu, tensorrt, tensorrt_llm, test_double, max_batch_tokens: _ } = accelerator;
    AcceleratorV1 { gpu, tensorrt, tensorrt_llm, test_double, statistics: Statistics::default() }
}

fn batch_info(settings: BatchSettings, tuned: Option<PathBuf>) -> BatchV1 {
    let BatchSettings { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max } = settings;
    BatchV1 {
        batch_tokens,
        interactive_batch_tokens,
        bulk_share_percent,
        window_max_ms: window_max.as_micros() as f64 / 1e3,
        tuned: tuned.map(|path| path.display().to_string()),
    }
}

/// Computes one short sequence, which touches pages of weights and buffers for the first time; returns the problem of a model
/// whose outputs are not finite.
fn warm_up(engine: &dyn Engine) -> Result<Option<String>, EngineError> {
    let description = engine.describe();
    let sequence = vec![0; description.max_tokens.min(16)];
    let batch: BatchBuffer = [sequence].into_iter().collect();
    let mut row = vec![0.0; description.width];
    engine.compute(&batch.batch(), Output::Pooled, &mut row)?;
    Ok(row.iter().find(|number| !number.is_finite()).map(|number| {
        format!(
            "the model computes {number} for {} tokens of id 0: its weights overflow in {}; choose another precision or \
             another revision of the model",
            batch.batch().token_ids().len(),
            description.engine.precision
        )
    }))
}
