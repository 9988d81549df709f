//! Request path of an ingress, from head to response:
//!
//! ```text
//! residency ─▶ reserve receipt ─▶ read ─▶ commit receipt ─▶ select replica ─▶ forward ─▶ relay ─▶ record
//!                                                              │     ▲
//!                                                              └─hold┘
//! ```
//!
//! [`ResidencyGuard`] checks what the region may see, [`ForwardedRequest`] is the request as read, [`ReplicaForwarder`]
//! selects and sends, and [`Arrival`] records the request when it ends. Beside requests, the listener serves the report
//! requests of gateways, the exchanges of other spokes, and operators.

use super::arrival::{Arrival, ArrivalRecorder};
use super::forwarder::{ReplicaForwarder, ReplicaResponse};
use super::jobs::{JobApi, JobQuery, TransferCall};
use super::operations::IngressOperations;
use super::peers::PeerExchange;
use super::refusals::no_receipt;
use super::reports::ReportExchange;
use super::request::{ForwardedRequest, deployment};
use super::residency::ResidencyGuard;
use crate::listener::{AfterResponse, PeerKind, RequestHandler, peer};
use crate::metrics::RequestOutcome;
use crate::receipts::CommitFailed;
use crate::relay;
use crate::request_body::BodyReader;
use crate::respond::{self, ForwardError, Rejection};
use gateway_core::endpoint;
use gateway_core::timing;
use http::Uri;
use pingora::protocols::http::ServerSession;
use regions::id::RegionId;
use replica_api::batches::BatchCall;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::jobs::JobKind;
use scheduler_api::paths;
use scheduler_core::spoke::Spoke;
use std::sync::Arc;
use std::time::Instant;
use supervision::Mutex;

/// Handler of the requests of gateways and other spokes.
pub(super) struct IngressPipeline {
    pub(super) region: RegionId,
    pub(super) spoke: Arc<Mutex<Spoke>>,
    pub(super) residency: Arc<ResidencyGuard>,
    pub(super) body_reader: Arc<BodyReader>,
    pub(super) forwarder: Arc<ReplicaForwarder>,
    pub(super) jobs: JobApi,
    pub(super) arrival_recorder: ArrivalRecorder,
    pub(super) reports: ReportExchange,
    pub(super) peers: Arc<PeerExchange>,
    pub(super) operations: Arc<IngressOperations>,
}

impl RequestHandler for IngressPipeline {
    async fn handle(&self, session: &mut ServerSession) -> AfterResponse {
        let arrived = Instant::now();
        let head = session.req_header();
        let (method, uri) = (head.method.clone(), head.uri.clone());
        let path = uri.path();
        if let Some(after) = self.operations.respond(session, method.as_str(), path).await {
            return after;
        }
        let mut arrival = None;
        let served = self.serve(session, method.as_str(), &uri, arrived, &mut arrival).await;
        let (after, outcome) = self.conclude(session, served).await;
        if let Some(mut arrival) = arrival {
            arrival.ended(session, outcome);
        }
        after
    }
}

impl IngressPipeline {
    /// Serves a request by its path and the kind of its peer; a request for a replica and a job have an `arrival`.
    async fn serve<'a>(
        &'a self,
        session: &mut ServerSession,
        method: &str,
        uri: &Uri,
        arrived: Instant,
        arrival: &mut Option<Arrival<'a>>,
    ) -> Result<AfterResponse, ForwardError> {
        let (is_gateway, is_spoke) = match peer(session) {
            Some(PeerKind::Spoke) => (false, true),
            Some(PeerKind::Unauthenticated) => (true, true),
            Some(PeerKind::Gateway(_) | PeerKind::Client) | None => (true, false),
        };
        let job_query = JobQuery::of(method, uri.path(), uri.query().unwrap_or_default());
        match (method, uri.path()) {
            ("POST", paths::EXCHANGE) if is_gateway => self.reports.respond(session).await,
            ("POST", paths::PEER_EXCHANGE) if is_spoke => self.peers.respond(session).await,
            (method, path) if is_gateway && let Some(call) = TransferCall::of(method, path) => {
                self.jobs.transfer_call(session, call).await
            }
            ("POST", path) if is_gateway && let Some(kind) = JobKind::at(path) => {
                let arrival = arrival.insert(self.arrival_recorder.open(session, kind.path(), arrived));
                self.jobs.submit(session, kind, arrival).await
            }
            _ if is_gateway && let Some(Ok(call)) = BatchCall::of(method, uri.path()) => {
                let query = uri.query().unwrap_or_default();
                // An upload is recorded like a request: it is the only one with inputs of a model.
                let arrival = (call == BatchCall::Upload)
                    .then(|| arrival.insert(self.arrival_recorder.open(session, call.path(), arrived)));
                self.jobs.batch_call(session, call, query, arrival).await
            }
            _ if is_gateway && let Some(query) = job_query => self.jobs.query(session, query).await,
            (method, path) => match endpoint::replica_endpoint(method, path).filter(|_| is_gateway) {
                Some(path) => {
                    let arrival = arrival.insert(self.arrival_recorder.open(session, path, arrived));
                    self.forward(session, path, arrival).await
                }
                None => Err(ForwardError::Rejected(Rejection::new(
                    ErrorCode::NotFound,
                    "The ingress has no such path.",
                ))),
            },
        }
    }

    /// Responds to a rejected request, and returns the outcome of any.
    async fn conclude(
        &self,
        session: &mut ServerSession,
        served: Result<AfterResponse, ForwardError>,
    ) -> (AfterResponse, RequestOutcome) {
        match served {
            Ok(AfterResponse::Reuse) => (AfterResponse::Reuse, RequestOutcome::of_session(session)),
            Ok(AfterResponse::Close) => {
                (AfterResponse::Close, RequestOutcome::of_session(session).truncated())
            }
            Err(ForwardError::ClientDisconnected) => {
                (AfterResponse::Close, RequestOutcome::ClientDisconnected)
            }
            Err(ForwardError::Rejected(rejection)) => {
                let region = [(headers::REGION, self.region.as_str())];
                (respond::reject(session, &rejection, &region).await, RequestOutcome::of_session(session))
            }
        }
    }

    /// Forwards a request to a replica, and relays the response.
    async fn forward(
        &self,
        session: &mut ServerSession,
        path: &'static str,
        arrival: &mut Arrival<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let policy = self.residency.allowed_here(session)?;
        let deployment = deployment(session)?;
        self.residency.check_deployment_policy(&deployment)?;
        if arrival.is_locked() {
            self.residency.check_policy_age()?;
        }
        if !arrival.reserve_receipt() {
            return Err(no_receipt(&self.region).into());
        }
        let arrived = arrival.arrived;
        let checked = (policy, deployment);
        let trace = arrival.stages.trace();
        let read = ForwardedRequest::read(session, &self.body_reader, path, checked, arrived, trace).await;
        arrival.stages.received(arrived);
        let request = read?;
        arrival.commit().await.map_err(|CommitFailed| no_receipt(&self.region))?;
        self.spoke.lock().arrived(&request.deployment, request.tokens, request.origin, Instant::now());
        let received = tokio::select! {
            biased;
            received = self.forwarder.forward(&request, &mut arrival.stages) => received?,
            () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
        };
        Ok(self.relay(session, received, arrived).await)
    }

    /// Relays the response of a replica. Its attempt is finished when the response was written.
    async fn relay(
        &self,
        session: &mut ServerSession,
        received: ReplicaResponse<'_>,
        arrived: Instant,
    ) -> AfterResponse {
        let ReplicaResponse { response, attempt, held } = received;
        let reported =
            response.head.headers.get(headers::SERVER_TIMING).and_then(|value| value.to_str().ok());
        let timing = timing::region_header(reported, arrived.elapsed());
        let held = held.headers();
        let mut extra =
            vec![(headers::REGION, self.region.as_str()), (headers::SERVER_TIMING, timing.as_str())];
        extra.extend(held.iter().map(|(name, value)| (*name, value.as_str())));
        let after = relay::forward_response(session, response, &self.forwarder.upstream, &extra).await;
        attempt.finish();
        after
    }
}
