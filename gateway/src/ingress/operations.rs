//! Operator endpoints of an ingress: liveness, readiness, status of replicas, metrics, filter of the log.
//!
//! With mutual TLS only gateways and spokes can connect to the ingress port, and operators have neither certificate; so
//! operators have a separate port that forwards no requests. Without one they use the ingress port, which does not have the filter of
//! the log: gateways must not change it.

use super::hold::Hold;
use super::jobs::RegionalJobQueue;
use super::replicas::Replicas;
use crate::listener::{AfterResponse, Listener, RequestHandler};
use crate::metrics::{IngressMetrics, ListenerMetrics};
use crate::receipts::ReceiptMetrics;
use crate::request_body::BodyReader;
use crate::respond::{self, Rejection};
use crate::upstream::Upstream;
use identity::{ConnectionFailures, Transport};
use pingora::protocols::http::ServerSession;
use regions::id::{DeploymentName, RegionId};
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::start_failure::StartFailure;
use scheduler_api::paths;
use scheduler_api::report::DeploymentLoad;
use scheduler_core::spoke::Spoke;
use scheduler_core::spoke::hold::HeldTotals;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use supervision::Mutex;
use supervision::health::HealthCheck;
use telemetry::Tracer;
use telemetry::logs::{self, http::LogResponse};
use tokio::sync::Semaphore;

/// Handler of the operations port.
pub(super) struct IngressOperations {
    pub(super) region: RegionId,
    pub(super) transport: Transport,
    pub(super) spoke: Arc<Mutex<Spoke>>,
    pub(super) replicas: Arc<Replicas>,
    pub(super) hold: Arc<Hold>,
    /// Runs health checks, one at a time.
    pub(super) health: HealthCheck,
    pub(super) body_reader: Arc<BodyReader>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) metrics: Arc<IngressMetrics>,
    pub(super) listener: ListenerUsage,
    /// Metrics of the receipts, if they are configured.
    pub(super) receipts: Option<ReceiptMetrics>,
    /// Tracer, if traces are configured.
    pub(super) tracer: Option<Tracer>,
    /// Queue of jobs, if the region has one.
    pub(super) jobs: Option<Arc<RegionalJobQueue>>,
}

/// Metrics of the listener for gateways.
pub(super) struct ListenerUsage {
    pub(super) metrics: Arc<ListenerMetrics>,
    /// One permit for each connection that can still be opened.
    pub(super) connections: Arc<Semaphore>,
    /// Rejected connections.
    pub(super) refused: Arc<ConnectionFailures>,
}

impl ListenerUsage {
    pub(super) fn of(listener: &Listener, refused: Arc<ConnectionFailures>) -> ListenerUsage {
        ListenerUsage { metrics: listener.metrics(), connections: listener.permits(), refused }
    }
}

impl RequestHandler for IngressOperations {
    async fn handle(&self, session: &mut ServerSession) -> AfterResponse {
        let head = session.req_header();
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        if path == logs::http::PATH
            && let Some(response) = log_filter(session, method.as_str()).await
        {
            return respond::json_body(session, response.status, response.body.into()).await;
        }
        match self.respond(session, method.as_str(), &path).await {
            Some(after) => after,
            None => {
                let none = Rejection::new(
                    ErrorCode::NotFound,
                    "The operations port of the ingress has no such path.",
                );
                respond::reject(session, &none, &[]).await
            }
        }
    }
}

/// Reads or changes the filter of the log; `None` for all other methods.
async fn log_filter(session: &mut ServerSession, method: &str) -> Option<LogResponse> {
    match method {
        "GET" => Some(logs::http::get(Instant::now())),
        "PUT" => {
            let body = tokio::time::timeout(logs::http::BODY_TIMEOUT, change(session)).await.ok().flatten();
            Some(body.map_or_else(LogResponse::unreadable, |body| logs::http::put(&body, Instant::now())))
        }
        _ => None,
    }
}

/// Reads the body of a change; `None` if it is too large or incomplete.
async fn change(session: &mut ServerSession) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(piece) = session.read_request_body().await.ok()? {
        body.extend_from_slice(&piece);
        if body.len() > logs::http::BODY_BYTES_MAX {
            return None;
        }
    }
    Some(body)
}

impl IngressOperations {
    /// Responds to an operator request; `None` for all other paths.
    pub(super) async fn respond(
        &self,
        session: &mut ServerSession,
        method: &str,
        path: &str,
    ) -> Option<AfterResponse> {
        let body = match (method, path) {
            ("GET", paths::LIVEZ | paths::READYZ) => {
                let ready = path == paths::READYZ;
                if let Err(problem) = self.check(ready).await {
                    let none = Rejection::new(ErrorCode::NotReady, problem);
                    let region = [(headers::REGION, self.region.as_str())];
                    return Some(respond::reject(session, &none, &region).await);
                }
                let status = if ready { "ready" } else { "alive" };
                json!({"status": status}).to_string().into_bytes()
            }
            ("GET", "/status") => {
                let (replicas, deployments) = (self.replicas.status(), self.deployments());
                let (is_scaler, epoch) = {
                    let mut spoke = self.spoke.lock();
                    (spoke.is_scaler(Instant::now()), spoke.scaler_epoch())
                };
                let status = json!({
                    "region": self.region.as_str(), "replicas": replicas, "deployments": deployments,
                    "is_scaler": is_scaler, "scaler_epoch": epoch.map(|epoch| epoch.to_string()),
                });
                status.to_string().into_bytes()
            }
            ("GET", paths::METRICS) => return Some(self.scrape(session).await),
            _ => return None,
        };
        Some(respond::ok(session, body, &[]).await)
    }

    /// Takes the locks that requests take, on a separate thread and with a timeout; with `ready`, also checks that a
    /// request would find a replica.
    async fn check(&self, ready: bool) -> Result<(), String> {
        let (spoke, replicas, hold) = (self.spoke.clone(), self.replicas.clone(), self.hold.clone());
        let check = move || {
            replicas.limits();
            drop(hold.waiting());
            // A deployment whose replica would be started counts as well: its requests are held.
            let serves = !spoke.lock().deployments_servable(Instant::now()).is_empty();
            if ready && !serves { Err("No replica of this region is ready yet.".to_owned()) } else { Ok(()) }
        };
        self.health.probe(check).await
    }

    /// Returns the state and the held requests of each deployment.
    fn deployments(&self) -> Vec<Value> {
        let spoke = self.spoke.lock();
        let shown = |(name, load): (&DeploymentName, &DeploymentLoad)| {
            let HeldTotals { requests, tokens } = spoke.held(name);
            json!({
                "name": name.as_str(),
                "ready": load.ready,
                "ready_in_ms": load.ready_in.map(|left| left.as_millis() as u64),
                "failed": load.failed.map(StartFailure::as_str),
                "held": requests,
                "held_tokens": tokens,
            })
        };
        spoke.loads(Instant::now()).iter().map(shown).collect()
    }
}
