//! Request: its headers, the admitted request that is the immutable input of all later steps, and its context.
//!
//! A [`RequestContext`] is created with the head of the request and recorded when it is dropped. So a request leaves its log
//! line, its metrics and its receipts also when its client disconnects or the process stops in the middle of it (invariant 2,
//! One outcome).

use super::explain::Explanations;
use super::explanation_archive::ExplanationArchive;
use super::region_states::RoutingContext;
use super::router::{AdmissionPermit, Route};
use super::spans::{self, TraceDetails};
use crate::body_memory::BufferedBody;
use crate::config::EdgeConfig;
use crate::events::{FinishedRequest, RequestEnded, RequestTimes, ResolvedRequest, began_ms};
use crate::metrics::{ClientProtocol, EdgeMetrics, EndpointLabel, RequestOutcome};
use crate::names;
use crate::receipts::{QueueSlot, Recorder, WriterMessage, now_ms};
use crate::relay::ForwardedHeaders;
use crate::respond::Rejection;
use crate::trace::{is_trace_error, method_name};
use crate::usage::UsageRecorder;
use gateway_core::circuit::Permille;
use gateway_core::endpoint;
use gateway_core::keys::Digest;
use gateway_core::labels::AttemptResult;
use gateway_core::latency::SizeClass;
use gateway_core::receipt::ReceiptId;
use gateway_core::residency::{AllowedRegions, Residency};
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::trail::{AttemptRecord, PolicyVersion, Trail};
use http::header::CONTENT_LENGTH;
use pingora::protocols::http::ServerSession;
use rand::Rng;
use regions::ModelRevision;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::priority::Priority;
use scheduler_api::traffic::REQUEST_ID_BYTES_MAX;
use scheduler_api::usage::{UsageCounts, UsageDay};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::Tracer;
use telemetry::context::{TraceContext, TraceId};
use telemetry::request::RequestTrace;
use telemetry::sampling::{FinishedTrace, KeepReason};

/// Admitted, resolved and routed request.
pub(super) struct Request {
    pub(super) id: String,
    pub(super) arrived: Instant,
    pub(super) timeout: Duration,
    pub(super) client: Option<GeoPoint>,
    pub(super) tenant: Arc<Tenant>,
    pub(super) deployment: DeploymentName,
    /// Effective priority.
    pub(super) priority: Priority,
    /// The client requested another priority.
    pub(super) priority_changed: bool,
    pub(super) cost: Cost,
    /// Effective residency policy: that of the deployment, narrowed by that of the tenant and by the header of the request.
    pub(super) residency: Residency,
    /// Allowed regions. The request is sent to no other region.
    pub(super) allowed: AllowedRegions,
    /// Policy and allowed regions with the generation of their route table, as of admission.
    pub(super) policy: Arc<PolicyVersion>,
    /// Residency of the request's own header, applied to newer tables as well.
    pub(super) requested_residency: ResidencyPolicy,
    /// API key of the request; `None` if it was authenticated with a token.
    pub(super) key: Option<Digest>,
    /// Arrival in milliseconds since 1970; like `tls_ended_here` (TLS was terminated by this gateway), for its receipts.
    pub(super) at_ms: u64,
    pub(super) tls_ended_here: bool,
    /// Regions that had registered for its deployment when the route table was published.
    pub(super) registered: RegionSet,
    /// Model revision of the deployment according to the table.
    pub(super) revision: Option<ModelRevision>,
    /// Required model revision of the response, because other parts of the request were computed with it.
    pub(super) required: Option<ModelRevision>,
    /// Its deployment may be scaled to zero.
    pub(super) may_sleep: bool,
    /// Path of the endpoint at a replica.
    pub(super) path: &'static str,
    pub(super) headers: ForwardedHeaders,
    /// Trace of the request, if the gateway records traces.
    pub(super) trace: Option<RequestTrace>,
    pub(super) body: BufferedBody,
    /// Draw of the request, made once, so that decisions about it agree.
    pub(super) target_draw: Permille,
    /// Routing decision.
    pub(super) route: Route,
    /// Admission to the pool of the region that it is sent to first, for as long as it is in flight.
    pub(super) _admission: Option<AdmissionPermit>,
}

impl Request {
    /// Returns a request for a part of the inputs of this one, with its own body, cost, draw and route. Everything else is the
    /// same, above all the allowed regions. Its response must be of the model revision `required`, if one is given.
    pub(super) fn part(
        &self,
        body: BufferedBody,
        cost: Cost,
        (target_draw, route): (Permille, Route),
        required: Option<ModelRevision>,
    ) -> Request {
        let is_allowed = route.targets().all(|target| self.allowed.contains(target.region));
        assert!(is_allowed, "a part is sent where the whole may be sent (invariant 1, Residency)");
        Request {
            id: self.id.clone(),
            arrived: self.arrived,
            timeout: self.timeout,
            client: self.client,
            tenant: self.tenant.clone(),
            deployment: self.deployment.clone(),
            priority: self.priority,
            priority_changed: self.priority_changed,
            cost,
            residency: self.residency.clone(),
            allowed: self.allowed,
            policy: self.policy.clone(),
            requested_residency: self.requested_residency.clone(),
            key: self.key,
            at_ms: self.at_ms,
            tls_ended_here: self.tls_ended_here,
            registered: self.registered,
            revision: self.revision,
            required,
            may_sleep: self.may_sleep,
            path: self.path,
            headers: self.headers.clone(),
            trace: self.trace,
            body,
            target_draw,
            route,
            // The whole request was admitted for all of its parts.
            _admission: None,
        }
    }

    /// Returns whether the request spills over to `region`.
    pub(super) fn spills_over_to(&self, region: RegionIndex) -> bool {
        self.route.spillover_target() == Some(region)
    }

    /// Returns the properties of the request that routing decisions use.
    pub(super) fn routing_context(&self) -> RoutingContext<'_> {
        self.part_routing_context(self.cost, self.target_draw)
    }

    /// Returns the same properties for a part of the request.
    pub(super) fn part_routing_context(&self, cost: Cost, target_draw: Permille) -> RoutingContext<'_> {
        RoutingContext {
            deployment: &self.deployment,
            priority: self.priority,
            size: SizeClass::of(cost.tokens),
            target_draw,
            uses_engine: endpoint::uses_engine(self.path),
            is_job: endpoint::is_job(self.path),
        }
    }
}

/// Records requests when they end: log, metrics, explanations and receipts.
pub(super) struct RequestRecorder {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) metrics: Arc<EdgeMetrics>,
    pub(super) explanations: Arc<Explanations>,
    /// Explanations on disk, if they are configured.
    pub(super) archive: Option<Arc<ExplanationArchive>>,
    pub(super) usage: Arc<UsageRecorder>,
    pub(super) recorder: Option<Arc<Recorder>>,
    /// Tracer, if traces are configured.
    pub(super) tracer: Option<Tracer>,
}

/// Context of one request; recorded when it is dropped.
pub(super) struct RequestContext<'a> {
    request_recorder: &'a RequestRecorder,
    pub(super) id: String,
    pub(super) arrived: Instant,
    /// Arrival in milliseconds since 1970.
    pub(super) at_ms: u64,
    pub(super) tls_ended_here: bool,
    /// Identifier of the trace of a client that samples it, if the gateway records no traces.
    client_trace: Option<TraceId>,
    protocol: ClientProtocol,
    method: &'static str,
    priority: Option<Priority>,
    pub(super) endpoint: EndpointLabel,
    pub(super) tenant: Option<Arc<Tenant>>,
    /// Deployment of a request that was shed before it was resolved.
    pub(super) shed_deployment: Option<(DeploymentName, Priority)>,
    /// Deployment, cost and policy of the request; absent until they are resolved.
    resolved: Option<ResolvedRequest>,
    /// Receipt that was returned to the client, with the key of its attempt.
    returned_receipt: Option<(u64, ReceiptId)>,
    /// Reserved slot in the queue of the receipt writer, if the request needs receipts.
    pub(super) receipt_slot: Option<QueueSlot>,
    pub(super) trail: Trail,
    /// Trace of the request, if the gateway records traces.
    pub(super) trace: Option<RequestTrace>,
    /// Begin and end of the routing decision, if [stages](RequestContext::has_stages) are recorded.
    pub(super) routed_at: Option<(Instant, Instant)>,
    /// Region whose response is relayed, with the breakdown of its time.
    pub(super) served_by: Option<(RegionIndex, RequestTimes)>,
    /// Tokens of the request as the region counted them.
    pub(super) tokens: Option<u64>,
    bytes_in: u64,
    bytes_out: u64,
    pub(super) outcome: RequestOutcome,
}

/// Inputs of the identifiers of a request's receipts.
pub(super) struct ReceiptIds<'a> {
    recorder: &'a Recorder,
    catalogue: &'a Catalogue,
    request: String,
    /// Policy of the attempts that were not sent under a newer one.
    policy: Arc<PolicyVersion>,
    arrived: Instant,
    at_ms: u64,
}

impl ReceiptIds<'_> {
    /// Returns the receipt identifier of one attempt.
    pub(super) fn of(&self, attempt: &AttemptRecord) -> ReceiptId {
        let region = self.catalogue.region(attempt.region).id.as_str();
        let at_ms = began_ms(attempt, self.arrived, self.at_ms);
        let residency = attempt.policy.as_ref().unwrap_or(&self.policy).residency.as_str();
        self.recorder.id(&self.request, attempt.number, region, residency, at_ms, attempt.key)
    }
}

impl<'a> RequestContext<'a> {
    pub(super) fn new(
        request_recorder: &'a RequestRecorder,
        session: &ServerSession,
        arrived: Instant,
    ) -> RequestContext<'a> {
        request_recorder.metrics.in_flight.add(1);
        let protocol = if session.is_http2() { ClientProtocol::Http2 } else { ClientProtocol::Http1 };
        let digest = session.digest();
        let traceparent = || session.req_header().headers.get_all(headers::TRACEPARENT);
        let begin = |tracer: &Tracer| tracer.begin(traceparent().iter().map(|line| line.as_bytes()), arrived);
        let trace = request_recorder.tracer.as_ref().filter(|tracer| tracer.records()).map(begin);
        let of_client = || header(session, headers::TRACEPARENT).and_then(TraceContext::parse);
        let client_trace = if trace.is_some() { None } else { of_client() };
        let client_trace = client_trace.filter(|context| context.is_sampled).map(|context| context.trace);
        RequestContext {
            request_recorder,
            id: request_id(session),
            arrived,
            at_ms: now_ms(),
            tls_ended_here: digest.is_some_and(|digest| digest.ssl_digest.is_some()),
            client_trace,
            protocol,
            method: method_name(&session.req_header().method),
            priority: None,
            endpoint: EndpointLabel::OTHER,
            tenant: None,
            shed_deployment: None,
            resolved: None,
            returned_receipt: None,
            receipt_slot: None,
            trail: Trail::default(),
            trace,
            routed_at: None,
            served_by: None,
            tokens: None,
            bytes_in: 0,
            bytes_out: 0,
            outcome: RequestOutcome::Shutdown,
        }
    }

    /// Returns whether a trace or an explanation on disk may have the stages of the request. Otherwise the clock is not read for them.
    pub(super) fn has_stages(&self) -> bool {
        self.trace.is_some() || self.request_recorder.archive.is_some()
    }

    /// Stores the resolved properties of the request, which may be shed afterwards.
    pub(super) fn set_resolved(
        &mut self,
        deployment: &DeploymentName,
        cost: Cost,
        policy: &Arc<PolicyVersion>,
        priority: Priority,
    ) {
        self.priority = Some(priority);
        let (deployment, policy) = (deployment.clone(), policy.clone());
        self.resolved = Some(ResolvedRequest { deployment, cost, policy });
    }

    /// Returns the receipt identifier for the response to the client of a locked deployment: that of the attempt whose response
    /// is relayed, or of the last attempt if no response is relayed.
    pub(super) fn receipt(&mut self) -> Option<ReceiptId> {
        let receipts = self.receipts()?;
        let responded = |attempt: &&AttemptRecord| {
            self.served_by.is_some_and(|(region, _)| region == attempt.region)
                && AttemptResult::from(attempt.end).has_response()
        };
        let attempt = self.trail.attempts().filter(responded).last().or(self.trail.attempts().last())?;
        let (key, id) = (attempt.key, receipts.of(attempt));
        self.returned_receipt = Some((key, id));
        Some(id)
    }

    /// Returns the inputs of the receipt identifiers, if the deployment is locked and receipts are written.
    pub(super) fn receipts(&self) -> Option<ReceiptIds<'a>> {
        let request_recorder = self.request_recorder;
        let recorder = request_recorder.recorder.as_ref()?;
        let ResolvedRequest { policy, .. } = self.resolved.as_ref()?;
        policy.residency.is_locked().then(|| ReceiptIds {
            recorder,
            catalogue: &request_recorder.config.catalogue,
            request: self.id.clone(),
            policy: policy.clone(),
            arrived: self.arrived,
            at_ms: self.at_ms,
        })
    }

    /// Stores the number of body bytes received from and sent to the client.
    pub(super) fn record_bytes(&mut self, session: &ServerSession) {
        self.bytes_in = session.body_bytes_read() as u64;
        self.bytes_out = session.body_bytes_sent() as u64;
    }

    /// Counts a request that a replica has computed, and whose response was sent.
    fn count_usage(&self) {
        let (Some(tenant), Some(resolved), Some((region, _)), Some(tokens)) =
            (&self.tenant, &self.resolved, self.served_by, self.tokens)
        else {
            return;
        };
        if matches!(self.outcome, RequestOutcome::Complete { status: 200..300, code: None }) {
            let counts = UsageCounts { requests: 1, inputs: resolved.cost.inputs, tokens };
            let day = UsageDay::at(Duration::from_millis(self.at_ms));
            self.request_recorder.usage.count(day, &tenant.id, &resolved.deployment, region, counts);
        }
    }

    /// Moves the content into the record for explanations and receipts.
    fn finished(&mut self, total: Duration) -> FinishedRequest {
        FinishedRequest {
            id: std::mem::take(&mut self.id),
            arrived: self.arrived,
            at_ms: self.at_ms,
            tls_ended_here: self.tls_ended_here,
            endpoint: self.endpoint,
            outcome: self.outcome,
            tenant: self.tenant.as_ref().map(|tenant| tenant.id.clone()),
            trail: std::mem::take(&mut self.trail),
            routed_at: self.routed_at,
            served_by: self.served_by,
            tokens: self.tokens,
            total,
            resolved: self.resolved.take(),
            receipt: self.returned_receipt,
            trace: self.trace,
        }
    }

    /// Returns the trace of the request and the reason to export it, if it was sampled or is kept.
    fn kept_trace(&self, total: Duration) -> Option<(&'a Tracer, RequestTrace, KeepReason)> {
        let (tracer, trace) = (self.request_recorder.tracer.as_ref()?, self.trace?);
        let ended = FinishedTrace {
            is_sampled: trace.is_sampled,
            is_error: is_trace_error(self.outcome),
            is_disconnected: self.outcome == RequestOutcome::ClientDisconnected,
            failover: self.trail.failover(),
            total,
        };
        Some((tracer, trace, tracer.keep(&ended)?))
    }
}

impl Drop for RequestContext<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        self.trail.close(now);
        self.request_recorder.metrics.in_flight.decrement();
        let total = now.saturating_duration_since(self.arrived);
        let resolved = self.resolved.as_ref();
        let shed = self.shed_deployment.as_ref();
        let kept = self.kept_trace(total);
        // A collector has the trace that an exemplar names, unless the export of its spans fails.
        let trace_id = kept.map_or(self.client_trace, |(_, trace, _)| Some(trace.trace));
        let exemplar = trace_id.map(|trace| telemetry::exemplar(trace, now));
        let ended = RequestEnded {
            id: &self.id,
            endpoint: self.endpoint,
            protocol: self.protocol,
            priority: self.priority.or(shed.map(|(_, priority)| *priority)),
            outcome: self.outcome,
            tenant: self.tenant.as_ref().map(|tenant| &tenant.id),
            deployment: resolved
                .map(|resolved| &resolved.deployment)
                .or(shed.map(|(deployment, _)| deployment)),
            region: self.served_by.map(|(region, _)| region),
            trail: &self.trail,
            catalogue: &self.request_recorder.config.catalogue,
            cost: resolved.map(|resolved| resolved.cost),
            tokens: self.tokens,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            total,
            exemplar,
            times: self.served_by.map(|(_, times)| times),
            trace: self.trace.map(|trace| trace.context()),
        };
        ended.record(&self.request_recorder.metrics);
        self.count_usage();
        let finished = Arc::new(self.finished(total));
        if let Some((tracer, trace, reason)) = kept {
            let RequestContext { method, protocol, priority, .. } = *self;
            let details = TraceDetails { method, protocol, priority, reason };
            let (config, request) = (self.request_recorder.config.clone(), finished.clone());
            tracer.export_deferred(spans::count(&request), move || {
                spans::of_request(&trace, &request, &details, &config.catalogue)
            });
        }
        if let Some(recorder) = &self.request_recorder.recorder {
            recorder.record(WriterMessage::Finished(finished.clone()), self.receipt_slot.take());
        }
        if let Some(archive) = &self.request_recorder.archive {
            archive.record(&finished);
        }
        self.request_recorder.explanations.record(finished);
    }
}

/// Returns the client's identifier if it is valid in a header and a log line, else a new one.
pub(super) fn request_id(session: &ServerSession) -> String {
    let given = header(session, headers::REQUEST_ID).and_then(|value| std::str::from_utf8(value).ok());
    let usable = |id: &&str| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
    };
    match given.filter(usable) {
        Some(id) => id.to_owned(),
        None => format!("req-{:032x}", rand::rng().random::<u128>()),
    }
}

/// Returns the declared length of the body; 0 if none is declared.
pub(super) fn declared_length(session: &ServerSession) -> u64 {
    let declared = session
        .get_header(CONTENT_LENGTH)
        .map(http::HeaderValue::as_bytes)
        .and_then(|value| std::str::from_utf8(value).ok());
    declared.and_then(|length| length.parse().ok()).unwrap_or(0)
}

fn header<'a>(session: &'a ServerSession, name: &'static str) -> Option<&'a [u8]> {
    session.get_header(names::name(name)).map(|value| value.as_bytes())
}

/// Headers that identify the tenant or describe the body: of two values, two readers could use different ones.
const ONCE: [&str; 6] =
    ["authorization", headers::API_KEY, headers::X_API_KEY, "content-type", "expect", "idempotency-key"];

/// Rejects a request that has one of them more than once.
pub(super) fn none_repeated(session: &ServerSession) -> Result<(), Rejection> {
    let headers = &session.req_header().headers;
    match ONCE.iter().find(|name| headers.get_all(**name).iter().nth(1).is_some()) {
        Some(name) => Err(repeated(name)),
        None => Ok(()),
    }
}

fn repeated(name: &'static str) -> Rejection {
    let message = format!("The header '{name}' is there more than once; send it once.");
    Rejection::new(ErrorCode::InvalidHeader, message).of(name)
}

/// Returns a header that may be sent once. Of two, either could be meant, and of two residencies the narrower would be lost.
pub(super) fn single<'a>(
    session: &'a ServerSession,
    name: &'static str,
) -> Result<Option<&'a [u8]>, Rejection> {
    let given = header(session, name);
    if given.is_some() && session.req_header().headers.get_all(name).iter().count() > 1 {
        return Err(repeated(name));
    }
    Ok(given)
}

/// Address of the client, or of the proxy in front of it.
pub(super) fn peer(session: &ServerSession) -> Option<SocketAddr> {
    session.client_addr().and_then(|address| address.as_inet()).copied()
}
