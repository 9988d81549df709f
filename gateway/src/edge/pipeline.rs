//! Request path of the gateway, from head to response:
//!
//! ```text
//! authenticate ─▶ rate limit ─▶ read, route, admit ─▶ charge ─┬▶ forward ─▶ relay ─▶ record
//!                                                             └▶ split ───▶ join ──┘
//! ```
//!
//! [`Authenticator`] identifies the tenant by an API key, or by a signed token of its issuer. [`RequestReader`] reads headers and
//! body, and determines deployment, cost, priority and allowed regions; then it routes and admits the request.

use super::batch_caller::BatchCaller;
use super::forwarder::{Forwarder, Permit};
use super::jobs::{self, JobForwarder, PAGE_DEFAULT};
use super::models;
use super::refusals::{
    bulk_not_permitted, invalid_api_key, invalid_body, invalid_option, invalid_token, no_model_field,
    no_model_named, no_receipt, no_region_permitted, no_route_table, not_served, residency_too_long,
    unknown_model,
};
use super::region_monitor::random_draws;
use super::region_states::RoutingContext;
use super::request::{
    Request, RequestContext, RequestRecorder, declared_length, none_repeated, peer, single,
};
use super::responder::{Responder, preflight_response};
use super::router::{AdmissionControl, RequestDemand, Routable, left};
use super::scatter::Splitter;
use super::table::Current;
use super::tenants::Tenants;
use super::view::{RoutedDeployment, Terms, View};
use crate::body_memory::BufferedBody;
use crate::config::EdgeConfig;
use crate::listener::{AfterResponse, RequestHandler};
use crate::metrics::{EndpointLabel, RequestOutcome};
use crate::receipts::{QueueSlot, Recorder};
use crate::request_body::BodyReader;
use crate::request_head::UpstreamMethod;
use crate::respond::{self, ForwardError, Rejection};
use crate::tokens::TokenVerifier;
use crate::{openapi, relay};
use gateway_core::body::{self, BodySummary};
use gateway_core::endpoint::{self, Endpoint, ForwardTarget, ModelField};
use gateway_core::keys::{Credential, Digest, KeyRing};
use gateway_core::latency::SizeClass;
use gateway_core::memory::BodyOwner;
use gateway_core::priority::NoBulk;
use gateway_core::request_options::{OptionHeaders, RequestOptions};
use gateway_core::tenant::{Cost, Tenant};
use http::header::{AUTHORIZATION, CONTENT_ENCODING};
use pingora::protocols::http::ServerSession;
use regions::residency::ResidencyPolicy;
use replica_api::error::Fault;
use replica_api::headers;
use replica_api::jobs::JOBS;
use std::sync::Arc;
use std::time::{Instant, SystemTime};
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
    pub(super) jobs: JobForwarder,
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
        if matches!(
            endpoint,
            Endpoint::Job(_)
                | Endpoint::CancelJob(_)
                | Endpoint::ResendWebhook(_)
                | Endpoint::Jobs
                | Endpoint::Batch(_)
        ) {
            // It is sent to regions, so it counts as a request of the tenant.
            self.tenants.limiters.charge_head(&tenant, 0)?;
        }
        let body = match endpoint {
            Endpoint::Computed(target) => {
                let target = self.jobs.preferred(session, target);
                context.endpoint = EndpointLabel::at(target.path);
                return self.compute(session, target, &view, authenticated, context).await;
            }
            Endpoint::Job(id) => {
                return self.jobs.forward(session, UpstreamMethod::Get, id, &tenant, &view, context).await;
            }
            Endpoint::CancelJob(id) => {
                return self.jobs.forward(session, UpstreamMethod::Delete, id, &tenant, &view, context).await;
            }
            Endpoint::ResendWebhook(id) => {
                // A client may send a body; it has no meaning.
                let owner = BodyOwner { tenant: Some(tenant.index), connection: None };
                self.reader.body_reader.body(session, owner).await?;
                return self.jobs.forward(session, UpstreamMethod::Post, id, &tenant, &view, context).await;
            }
            Endpoint::Batch(call) => {
                let requested = self.reader.options(session)?.residency;
                let caller = self.batch_caller(&tenant, &view, &requested);
                return self.jobs.batch_call(session, call, caller, context).await;
            }
            Endpoint::Jobs => {
                let requested = self.reader.options(session)?.residency;
                let caller = self.batch_caller(&tenant, &view, &requested);
                return self.jobs.page(session, (JOBS, PAGE_DEFAULT), caller, context).await;
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

    fn batch_caller<'a>(
        &'a self,
        tenant: &'a Arc<Tenant>,
        view: &'a View,
        requested: &'a ResidencyPolicy,
    ) -> BatchCaller<'a> {
        let owner = BodyOwner { tenant: Some(tenant.index), connection: None };
        BatchCaller { tenant, view, requested, body_reader: &self.reader.body_reader, owner }
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

/// Authenticator of client requests.
pub(super) struct Authenticator {
    pub(super) tokens: Arc<TokenVerifier>,
}

/// Authenticated tenant, and its key unless it was authenticated by a token.
pub(super) struct Authenticated {
    pub(super) tenant: Arc<Tenant>,
    pub(super) key: Option<Digest>,
}

impl Authenticator {
    /// Authenticates the request: the tenant, and its key unless it was a token.
    pub(super) fn tenant(&self, session: &ServerSession, ring: &KeyRing) -> Result<Authenticated, Rejection> {
        let authorization = session.get_header(AUTHORIZATION).map(http::HeaderValue::as_bytes);
        let keys = [single(session, headers::API_KEY)?, single(session, headers::X_API_KEY)?];
        let credential = Credential::of_request(authorization, keys).map_err(invalid_api_key)?;
        let since_1970 = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        match ring.tenant(&credential, since_1970) {
            Ok(tenant) => Ok(Authenticated { tenant: tenant.clone(), key: Some(credential.digest) }),
            Err(_) if !self.tokens.is_empty() && jwt::has_token_shape(credential.secret) => {
                let tenant =
                    self.tokens.tenant(&credential, ring, SystemTime::now()).map_err(invalid_token)?;
                Ok(Authenticated { tenant, key: None })
            }
            Err(problem) => Err(invalid_api_key(problem)),
        }
    }
}

/// Limit on the bytes of a body that is parsed on the thread of its connection: less than a millisecond at 0.3 to 2
/// GB/s.
const INLINE_READ_BYTES_MAX: usize = 256 << 10;
/// Bytes of a body that are not charged as tokens.
const FREE_BODY_BYTES: usize = 4 << 10;

/// Reader of client requests: from head and body to an admitted [`Request`].
pub(super) struct RequestReader {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) body_reader: Arc<BodyReader>,
    pub(super) admission: Arc<AdmissionControl>,
}

impl RequestReader {
    /// Reads a request, makes its routing decision and admits it.
    pub(super) async fn read(
        &self,
        session: &mut ServerSession,
        target: ForwardTarget<'_>,
        view: &View,
        authenticated: Authenticated,
        context: &mut RequestContext<'_>,
    ) -> Result<Request, ForwardError> {
        let Authenticated { tenant, key } = authenticated;
        let arrived = context.arrived;
        let options = self.options(session)?;
        let declared = declared_length(session);
        let recorded = (&mut context.trail, &mut context.shed_deployment);
        self.admission.check_head(target, view, &tenant, &options, declared, arrived, recorded)?;
        let body = self.body_reader.body(session, self.owner(session, &tenant)).await?;
        let summary = self.body_of(target, &body, &tenant).await;
        let summary = summary.map_err(|refusal| refusal.with_processed(body.bytes.len()))?;
        let is_job = endpoint::is_job(target.path);
        if !is_job {
            jobs::check_no_webhook(session, summary.has_webhook)?;
        }
        let cost = Cost { inputs: summary.inputs, tokens: summary.tokens.max(min_tokens(&body)) };
        let priority = tenant
            .priorities
            .priority(options.priority, cost.inputs)
            .map_err(|NoBulk| bulk_not_permitted(&tenant))?;
        let routed = requested_deployment(target, summary.model, view, &tenant)?;
        let RoutedDeployment { deployment, revision, registered, .. } = routed;
        let terms = routed.terms(&tenant, &options.residency, &self.config.catalogue);
        let terms = terms.map_err(|error| residency_too_long(&deployment.name, &tenant, &error))?;
        let Terms { policy, allowed } = &terms;
        let residency = &policy.residency;
        if allowed.is_empty() {
            let of_deployment = *routed.allowed;
            return Err(no_region_permitted(
                &tenant,
                deployment,
                of_deployment,
                &options.residency,
                &self.config.catalogue,
            )
            .into());
        }
        let ([target_draw, leave_draw, draw], left) = (random_draws(), left(options.timeout, arrived));
        let (size, uses_engine) = (SizeClass::of(cost.tokens), endpoint::uses_engine(target.path));
        let routing =
            RoutingContext { deployment: &deployment.name, priority, size, target_draw, uses_engine, is_job };
        let (client, registered) = (options.client, *registered);
        let routable = Routable { view, routing, allowed: **allowed, registered, client };
        // A region has one set of keys for the jobs of all endpoints.
        let key_of_job = if is_job { jobs::submission_key(session, &tenant, JOBS)? } else { None };
        let demand =
            RequestDemand { residency, tokens: cost.tokens, left, draw, leave_draw, key: key_of_job };
        if is_job {
            jobs::check_queue(
                &self.admission.region_monitor,
                &self.config.catalogue,
                view.routed,
                **allowed,
                &deployment.name,
            )?;
        }
        let routing_began = context.has_stages().then(Instant::now);
        let (route, admitted) = self.admission.route(&routable, &demand, &tenant);
        context.routed_at = routing_began.map(|began| (began, Instant::now()));
        // Before the rejection of a request that is shed, so that it can be explained as well.
        context.set_resolved(&deployment.name, cost, policy, priority);
        context.trail.routed((*route).clone());
        let admission = admitted?;
        let Terms { policy, allowed } = terms;
        Ok(Request {
            id: context.id.clone(),
            arrived,
            timeout: options.timeout,
            client: options.client,
            tenant,
            deployment: deployment.name.clone(),
            priority,
            priority_changed: options.priority.is_some_and(|requested| requested != priority),
            cost,
            residency: policy.residency.clone(),
            allowed,
            policy,
            requested_residency: options.residency,
            key,
            at_ms: context.at_ms,
            tls_ended_here: context.tls_ended_here,
            registered,
            revision: *revision,
            required: None,
            may_sleep: deployment.scaling.min == 0,
            path: target.path,
            headers: jobs::forwarded_headers(session, target.path, priority, context.trace.as_ref())?,
            trace: context.trace,
            body,
            target_draw,
            route,
            _admission: admission,
        })
    }

    /// Owner of the memory of the body. It excludes the connection of a trusted peer, which carries requests of many
    /// clients.
    fn owner(&self, session: &ServerSession, tenant: &Tenant) -> BodyOwner {
        let connection = peer(session).filter(|peer| !self.config.trusted_peers.contains(&peer.ip()));
        BodyOwner { tenant: Some(tenant.index), connection }
    }

    /// Reads model and cost from the body; the default for a request without one.
    async fn body_of(
        &self,
        target: ForwardTarget<'_>,
        body: &BufferedBody,
        tenant: &Tenant,
    ) -> Result<BodySummary, Rejection> {
        if target.model == ModelField::Bodiless {
            return Ok(BodySummary::default());
        }
        let summary = if body.bytes.len() <= INLINE_READ_BYTES_MAX {
            body::read(&body.bytes)
        } else {
            let bytes = body.bytes.clone();
            self.body_reader.cpu.run(Some(tenant.index), move || body::read(&bytes)).await
        };
        summary.map_err(invalid_body)
    }

    /// Parses the request headers that set options.
    fn options(&self, session: &ServerSession) -> Result<RequestOptions, Rejection> {
        let trusted = peer(session).is_some_and(|peer| self.config.trusted_peers.contains(&peer.ip()));
        let option_headers = OptionHeaders {
            timeout_ms: single(session, headers::TIMEOUT_MS)?,
            residency: single(session, headers::RESIDENCY)?,
            priority: single(session, headers::PRIORITY)?,
            client_geo: single(session, headers::CLIENT_GEO)?.filter(|_| trusted),
        };
        RequestOptions::read(option_headers, &self.config.catalogue).map_err(invalid_option)
    }
}

/// Minimum cost of a body in tokens by its size, so that a large body without model input is charged for its parsing.
fn min_tokens(body: &BufferedBody) -> u64 {
    Cost::at_least(body.bytes.len().saturating_sub(FREE_BODY_BYTES) as u64).tokens
}

/// Deployment of a request: the one named by its path or its body or, where the API of its ecosystem has no model
/// field, the only deployment that the tenant may use.
fn requested_deployment<'a>(
    target: ForwardTarget<'_>,
    model_in_body: Option<String>,
    view: &'a View,
    tenant: &Tenant,
) -> Result<&'a RoutedDeployment, Rejection> {
    let named = target.deployment.map(str::to_owned).or(model_in_body);
    match (named, target.model) {
        (Some(name), _) => view.deployment(&name, tenant).ok_or_else(|| unknown_model(&name, view, tenant)),
        (None, ModelField::Required) => Err(no_model_field()),
        (None, ModelField::Optional | ModelField::Bodiless) => {
            view.only_deployment(tenant).ok_or_else(|| no_model_named(target.path, view, tenant))
        }
    }
}
