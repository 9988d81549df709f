//! State that the routes share: the components of the replica, its lifecycle state, and what it reports about itself.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use supervision::health::HealthCheck;

use axum::http::HeaderValue;
use identity::Transport;
use metrics::MetricsSnapshot;
use replica_api::identity::IdentityV1;
use replica_api::info::{BatchV1, EngineInfoV1, InfoV1, ModelInfoV1, QueueV1, TeiInfo};
use replica_api::input::Readable;
use replica_api::limits::Limits;
use replica_api::status::{StateV1, StatusV1};
use replica_core::batch::Backlog;
use telemetry::Tracer;

use crate::batcher::Batcher;
use crate::body::BodyBudget;
use crate::config::{Config, EmbeddingDefaults};
use crate::metrics::Metrics;
use crate::purpose::Purpose;
use crate::start_state::StartState;
use crate::tokenize::{MAX_JOBS, TokenizerPool};

/// Lifecycle state of the replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    /// The model is being downloaded or loaded.
    Starting,
    /// Requests are accepted.
    Ready,
    /// Requests in flight are finished; new ones are rejected.
    Draining,
}

impl From<Lifecycle> for StateV1 {
    fn from(state: Lifecycle) -> StateV1 {
        match state {
            Lifecycle::Starting => StateV1::Starting,
            Lifecycle::Ready => StateV1::Ready,
            Lifecycle::Draining => StateV1::Draining,
        }
    }
}

/// Shared state of a replica.
pub(crate) struct App {
    /// Names of the deployments that it serves.
    pub(crate) names: Vec<String>,
    /// Source of the model, as configured.
    pub(crate) source: String,
    pub(crate) limits: Limits,
    pub(crate) embeddings: EmbeddingDefaults,
    /// Whether token ids are accepted from clients that do not name their tokenizer.
    pub(crate) token_inputs: bool,
    pub(crate) metrics: Arc<Metrics>,
    /// Transport of the replica, whose certificate has metrics.
    pub(crate) transport: Transport,
    pub(crate) bodies: BodyBudget,
    /// Unix time in seconds.
    pub(crate) started_at: u64,
    /// [`StatusV1::boot_id`].
    boot_id: u64,
    /// Health check of the shared state; runs one check at a time.
    pub(crate) health: HealthCheck,
    /// Tracer, if traces are configured.
    pub(crate) tracer: Option<Tracer>,
    /// Progress of the start.
    pub(crate) start: StartState,
    service: OnceLock<Service>,
    draining: AtomicBool,
}

/// Components that exist once the model is loaded.
pub(crate) struct Service {
    pub(crate) tokenizer: TokenizerPool,
    pub(crate) batcher: Batcher,
    pub(crate) readable: Readable,
    pub(crate) purpose: Purpose,
    pub(crate) model: ModelInfoV1,
    pub(crate) identity: IdentityV1,
    /// Revision of `identity`, as a header value.
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
            transport: config.transport.clone(),
            bodies: BodyBudget::new(config.limits),
            started_at: now.as_secs(),
            boot_id: rand::random(),
            health: HealthCheck::default(),
            tracer: None,
            start: StartState::default(),
            service: OnceLock::new(),
            draining: AtomicBool::new(false),
        }
    }

    /// Returns the state of a replica that records traces.
    pub(crate) fn with_tracer(self, tracer: Option<Tracer>) -> App {
        App { tracer, ..self }
    }

    /// Returns the values of all metrics.
    pub(crate) fn snapshot(&self) -> MetricsSnapshot {
        self.metrics.snapshot(&self.transport, self.tracer.as_ref())
    }

    /// Publishes the loaded model; requests are accepted from now on.
    pub(crate) fn publish(&self, service: Service) {
        self.metrics.describe(&service.engine);
        assert!(self.service.set(service).is_ok(), "a replica loads its model once");
        self.start.finish();
    }

    /// Starts draining: new requests are rejected from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Returns whether the replica is draining.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn lifecycle(&self) -> Lifecycle {
        match (self.is_draining(), self.service.get()) {
            (true, _) => Lifecycle::Draining,
            (false, Some(_)) => Lifecycle::Ready,
            (false, None) => Lifecycle::Starting,
        }
    }

    /// Acquires every lock that requests share (queues of tokenizer and engine, metrics), as a health check.
    pub(crate) fn check_locks(&self) -> Result<(), String> {
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
            state: self.lifecycle().into(),
            model: service.map(|service| service.model.clone()),
            identity: service.map(|service| service.identity.clone()),
            engine: service.map(|service| self.engine(service)),
            batch: service.map(|service| service.batch.clone()),
            limits: self.limits,
            counters: self.metrics.read(),
            queue: self.queue(),
            tei: service.map(|service| self.tei(service)),
        }
    }

    fn engine(&self, service: &Service) -> EngineInfoV1 {
        let mut engine = service.engine.clone();
        if let (Some(accelerator), Some(statistics)) = (&mut engine.accelerator, self.metrics.gauges().engine)
        {
            accelerator.statistics = statistics;
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
        let (download, failure) = self.start.report();
        StatusV1 {
            version: 1,
            boot_id: Some(self.boot_id),
            names: self.names.clone(),
            model: self.source.clone(),
            identity: self.service.get().map(|service| service.identity.clone()),
            state: self.lifecycle().into(),
            pending_tokens,
            interactive_tokens: Some(batcher.map_or(0, Batcher::interactive_tokens)),
            pending_inputs,
            requests_total: self.metrics.requests_total(),
            tokens_per_second,
            download,
            failure,
        }
    }

    fn queue(&self) -> QueueV1 {
        let batcher = self.service.get().map(|service| &service.batcher);
        let Backlog { tokens, inputs } = batcher.map(Batcher::backlog).unwrap_or_default();
        let tokens_per_second = batcher.map_or(0.0, Batcher::tokens_per_second);
        QueueV1 { pending_tokens: tokens, pending_inputs: inputs, tokens_per_second }
    }
}
