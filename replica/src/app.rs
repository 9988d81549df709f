//! What the routes share: the parts of the replica, where it stands in its life, and what it says of itself.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use supervision::health::HealthCheck;

use axum::http::HeaderValue;
use replica_core::batch::Backlog;
use replica_core::input::Readable;
use replica_core::limits::Limits;
use replica_core::wire::identity::IdentityV1;
use replica_core::wire::info::{AcceleratorV1, BatchV1, EngineInfoV1, InfoV1, ModelInfoV1, QueueV1, TeiInfo};
use replica_core::wire::status::{StateV1, StatusV1};

use crate::batcher::Batcher;
use crate::body::BodyRoom;
use crate::config::{Config, Embeddings};
use crate::engine::Statistics;
use crate::metrics::Metrics;
use crate::purpose::Purpose;
use crate::tokenize::{MAX_JOBS, TokenizerPool};

/// Where the replica stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The model is being loaded.
    Starting,
    /// It takes work.
    Ready,
    /// It finishes what it has.
    Draining,
}

impl From<State> for StateV1 {
    fn from(state: State) -> StateV1 {
        match state {
            State::Starting => StateV1::Starting,
            State::Ready => StateV1::Ready,
            State::Draining => StateV1::Draining,
        }
    }
}

/// The replica.
pub(crate) struct App {
    /// The deployments that it answers to.
    pub(crate) names: Vec<String>,
    /// The model behind them, as configured.
    pub(crate) source: String,
    pub(crate) limits: Limits,
    pub(crate) embeddings: Embeddings,
    /// Whether token ids are accepted from clients that do not name their tokenizer.
    pub(crate) token_inputs: bool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) bodies: BodyRoom,
    /// Seconds since 1970.
    pub(crate) started_at: u64,
    /// Checks of its own state, one at a time.
    pub(crate) health: HealthCheck,
    service: OnceLock<Service>,
    draining: AtomicBool,
}

/// What serves, once the model is loaded.
pub(crate) struct Service {
    pub(crate) tokenizer: TokenizerPool,
    pub(crate) batcher: Batcher,
    pub(crate) readable: Readable,
    pub(crate) purpose: Purpose,
    pub(crate) model: ModelInfoV1,
    pub(crate) identity: IdentityV1,
    /// The revision of `identity`, as a header.
    pub(crate) revision: HeaderValue,
    pub(crate) engine: EngineInfoV1,
    pub(crate) batch: BatchV1,
}

impl App {
    pub(crate) fn new(config: &Config) -> App {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        App {
            names: config.names.iter().map(ToString::to_string).collect(),
            source: config.model.to_string(),
            limits: config.limits,
            embeddings: config.embeddings,
            token_inputs: config.token_inputs,
            metrics: Arc::default(),
            bodies: BodyRoom::new(config.limits),
            started_at: now.as_secs(),
            health: HealthCheck::default(),
            service: OnceLock::new(),
            draining: AtomicBool::new(false),
        }
    }

    /// The model is loaded; from now on it takes work.
    pub(crate) fn begin(&self, service: Service) {
        self.metrics.describe(&service.engine);
        assert!(self.service.set(service).is_ok(), "a replica begins once");
    }

    /// From now on it finishes what it has.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn life(&self) -> State {
        match (self.draining.load(Ordering::Relaxed), self.service.get()) {
            (true, _) => State::Draining,
            (false, Some(_)) => State::Ready,
            (false, None) => State::Starting,
        }
    }

    /// Takes what requests share: the queues of tokenizer and engine, and what is counted.
    pub(crate) fn locks(&self) -> Result<(), String> {
        self.status();
        if let Some(service) = self.service.get() {
            service.tokenizer.open_jobs();
        }
        Ok(())
    }

    pub(crate) fn service(&self) -> Option<&Service> {
        self.service.get()
    }

    pub(crate) fn info(&self) -> InfoV1 {
        let service = self.service.get();
        InfoV1 {
            version: 1,
            names: self.names.clone(),
            state: self.life().into(),
            model: service.map(|service| service.model.clone()),
            identity: service.map(|service| service.identity.clone()),
            engine: service.map(|service| self.engine(service)),
            batch: service.map(|service| service.batch.clone()),
            limits: self.limits.into(),
            counters: self.metrics.read(),
            queue: self.queue(),
            tei: service.map(|service| self.tei(service)),
        }
    }

    fn engine(&self, service: &Service) -> EngineInfoV1 {
        let mut engine = service.engine.clone();
        if let (Some(accelerator), Some(statistics)) = (&mut engine.accelerator, self.metrics.now().engine) {
            let Statistics { iterations, busy_ms, completed, retried_batches, active, queued, gpu_bytes } =
                statistics;
            let AcceleratorV1 { gpu, tensorrt, tensorrt_llm, test_double, .. } = accelerator.clone();
            *accelerator = AcceleratorV1 {
                gpu,
                tensorrt,
                tensorrt_llm,
                test_double,
                iterations,
                busy_ms,
                completed,
                retried_batches,
                active,
                queued,
                gpu_bytes,
            };
        }
        engine
    }

    fn tei(&self, service: &Service) -> TeiInfo {
        let Service { model, engine, purpose, batch, .. } = service;
        TeiInfo {
            model_id: model.source.clone(),
            model_sha: model.digest.clone(),
            model_dtype: engine.precision.clone(),
            served_model_name: self.names.first().cloned().unwrap_or_default(),
            model_type: purpose.tei_model_type(),
            max_concurrent_requests: MAX_JOBS,
            max_input_length: model.max_input_tokens,
            max_batch_tokens: batch.batch_tokens,
            max_batch_requests: None,
            max_client_batch_size: self.limits.max_inputs,
            auto_truncate: self.embeddings.auto_truncate,
            tokenization_workers: engine.tokenizer_threads,
        }
    }

    pub(crate) fn status(&self) -> StatusV1 {
        let QueueV1 { pending_tokens, pending_inputs, tokens_per_second } = self.queue();
        let batcher = self.service.get().map(|service| &service.batcher);
        StatusV1 {
            version: 1,
            names: self.names.clone(),
            model: self.source.clone(),
            identity: self.service.get().map(|service| service.identity.clone()),
            state: self.life().into(),
            pending_tokens,
            interactive_tokens: Some(batcher.map_or(0, Batcher::lookup_tokens)),
            pending_inputs,
            requests_total: self.metrics.requests_total(),
            tokens_per_second,
        }
    }

    fn queue(&self) -> QueueV1 {
        let batcher = self.service.get().map(|service| &service.batcher);
        let Backlog { tokens, inputs } = batcher.map(Batcher::backlog).unwrap_or_default();
        let tokens_per_second = batcher.map_or(0.0, Batcher::tokens_per_second);
        QueueV1 { pending_tokens: tokens, pending_inputs: inputs, tokens_per_second }
    }
}
