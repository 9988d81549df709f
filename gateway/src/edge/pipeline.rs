//! Request path of the gateway, from head to response:
//!
//! ```text
//! authenticate ─▶ rate limit ─▶ read, route, admit ─▶ charge ─┬▶ forward ─▶ relay ─▶ record
//!                                                             └▶ split ───▶ join ──┘
//! ```

use super::auth::{Authenticated, Authenticator};
use super::forwarder::Forwarder;
use super::models;
use super::policy::Permit;
use super::reader::RequestReader;
use super::refusals::{no_receipt, no_route_table, not_served, unknown_model};
use super::request::{ForwardError, Request};
use super::request_context::{RequestContext, RequestRecorder};
use super::request_head::{declared_length, none_repeated};
use super::responder::{Responder, preflight_response};
use super::scatter::Splitter;
use super::table::Current;
use super::tenants::Tenants;
use super::view::View;
use crate::listener::{AfterResponse, RequestHandler};
use crate::metrics::{EndpointLabel, RequestOutcome};
use crate::openapi;
use crate::receipts::{QueueSlot, Recorder};
use crate::relay;
use crate::respond::{self, Rejection};
use gateway_core::endpoint::{Endpoint, ForwardTarget};
use http::header::CONTENT_ENCODING;
use pingora::protocols::http::ServerSession;
use replica_api::error::Fault;
use replica_api::headers;
use std::sync::Arc;
use std::time::Instant;
use supervision::request::{Panicked, contain};
use tokio::sync::watch;

/// Handler of client requests.
pub(super) struct Pipeline {
    pub(super) tenants: Arc<Tenants>,
    pub(super) views: watch::Receiver<Current>,
    pub(super) authenticator: Authenticator,
    pub(super) reader: RequestReader,
    pub(super) forwarder: Arc<Forwarder>,
    pub(super) splitter: Splitter,
    pub(super) responder: Arc<Responder>,
    pub(super) request_recorder: RequestRecorder,
    pub(super) recorder: Option<Arc<Recorder>>,
}

impl RequestHandler for Pipeline {
    async fn handle(&self, session: &mut ServerSession) -> AfterResponse {
        let arrived = Instant::now();
        let mut context = RequestContext::new(&self.request_recorder, session, arrived);
        let after = match contain(self.serve(session, &mut context)).await {
            Err(Panicked(reason)) => self.panicked(session, &mut context, &reason).await,
            Ok(Ok(after)) => after,
            Ok(Err(ForwardError::ClientDisconnected)) => {
                context.outcome = RequestOutcome::ClientDisconnected;
                AfterResponse::Close
            }
            Ok(Err(ForwardError::Rejected(refusal))) => {
                self.responder.refuse(session, &refusal, &mut context).await
            }
        };
        context.record_bytes(session);
        after
    }
}

impl Pipeline {
    async fn serve(
        &self,
        session: &mut ServerSession,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let path = session.req_header().uri.path().to_owned();
        if let Some(preflight) = self.responder.preflight(session, &path) {
            let after = preflight_response(session, &preflight, &context.id).await;
            context.outcome = RequestOutcome::of_session(session);
            return Ok(after);
        }
        let head = session.req_header();
        let endpoint = Endpoint::of(head.method.as_str(), &path).map_err(not_served)?;
        context.endpoint = EndpointLabel::of(&endpoint);
        none_repeated(session)?;
        if endpoint == Endpoint::OpenApi {
            // The description of the API has no tenant's data and needs no key.
            return Ok(self.respond(session, openapi::document().to_vec(), context).await);
        }
        let view = self.views.borrow().clone();
        let keys = view.as_ref().map_or_else(|| self.tenants.file_key_ring(), |view| view.keys.clone());
        let authenticated = self.authenticator.tenant(session, &keys)?;
        let tenant = authenticated.tenant.clone();
        context.tenant = Some(tenant.clone());
        let view = view.ok_or_else(no_route_table)?;
        let body = match endpoint {
            Endpoint::Computed(target) => {
                return self.compute(session, target, &view, authenticated, context).await;
            }
            Endpoint::OpenApi => openapi::document().to_vec(),
            Endpoint::Models => models::list(&view, &tenant),
            Endpoint::InfinityModels => models::list_for_infinity(&view, &tenant),
            Endpoint::Model(id) => {
                let routed = view.deployment(id, &tenant).ok_or_else(|| unknown_model(id, &view, &tenant))?;
                models::one(&routed.deployment)
            }
        };
        Ok(self.respond(session, body, context).await)
    }

    /// Serves a request for the engine: read, route, admit, charge, then forward it whole or in parts.
    async fn compute(
        &self,
        session: &mut ServerSession,
        target: ForwardTarget<'_>,
        view: &Arc<View>,
        authenticated: Authenticated,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        // A tenant over its limits is rejected before the body is read.
        let head_charge =
            self.tenants.limiters.charge_head(&authenticated.tenant, declared_length(session))?;
        let read = self.reader.read(session, target, view, authenticated, context).await;
        let request = match read {
            Err(ForwardError::Rejected(refusal)) if refusal.code.fault() == Fault::Capacity => {
                head_charge.refund();
                return Err(refusal.into());
            }
            Err(ForwardError::Rejected(refusal)) => {
                head_charge.settle_rejected(&refusal);
                return Err(refusal.into());
            }
            read => read?,
        };
        context.set_resolved(&request);
        context.receipt_slot = self.reserve_receipt_slot(&request)?;
        // The size of a compressed body was unknown when it was sent, so its rejection is charged.
        let is_packed = session.get_header(CONTENT_ENCODING).is_some();
        let mut reservation = head_charge.charge_body(&request.tenant, request.cost, is_packed)?;
        if let Some(cut) = self.splitter.split(&request).await? {
            return self.splitter.scatter(session, &request, view, cut, &mut reservation, context).await;
        }
        let permit = Permit::of(&request, view);
        let received = tokio::select! {
            biased;
            received = self.forwarder.forward(&request, permit, &mut context.trail) => received?,
            () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
        };
        Ok(self.responder.relay(session, &request, &mut reservation, received, context).await)
    }

    /// Responds with a body that the gateway makes itself.
    async fn respond(
        &self,
        session: &mut ServerSession,
        body: Vec<u8>,
        context: &mut RequestContext<'_>,
    ) -> AfterResponse {
        let after = self.responder.local(session, body, &context.id).await;
        context.outcome = RequestOutcome::of_session(session);
        after
    }

    async fn panicked(
        &self,
        session: &mut ServerSession,
        context: &mut RequestContext<'_>,
        reason: &str,
    ) -> AfterResponse {
        // A defect. The request received an error and no other one is affected. Report it with the line `panicked`.
        tracing::error!(request = context.id, reason, "request panicked");
        let begun = session.response_written().is_some();
        let after = respond::panicked(session, &[(headers::REQUEST_ID, context.id.as_str())]).await;
        let outcome = RequestOutcome::of_session(session);
        context.outcome = if begun { outcome.truncated() } else { outcome };
        after
    }

    /// Reserves memory for the receipts of a request that must not be sent without them.
    fn reserve_receipt_slot(&self, request: &Request) -> Result<Option<QueueSlot>, Rejection> {
        let locked = request.residency.is_locked();
        match self.recorder.as_ref().filter(|recorder| locked && recorder.required()) {
            Some(recorder) => recorder.reserve().map(Some).ok_or_else(no_receipt),
            None => Ok(None),
        }
    }
}
