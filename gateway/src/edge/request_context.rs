//! Context of a request in flight, and its recording when the request ends.
//!
//! A [`RequestContext`] is created with the head of the request and recorded when it is dropped. So a request leaves its log
//! line, its metrics and its receipts also when its client disconnects or the process stops in the middle of it (invariant 2,
//! One fate).

use super::explain::Explanations;
use super::request::Request;
use super::request_head::request_id;
use crate::config::EdgeConfig;
use crate::events::{FinishedRequest, RequestEnded, RequestTimes, ResolvedRequest, began_ms};
use crate::metrics::{ClientProtocol, EdgeMetrics, EndpointLabel, RequestOutcome};
use crate::receipts::{QueueSlot, Recorder, WriterMessage, now_ms};
use gateway_core::labels::AttemptResult;
use gateway_core::receipt::ReceiptId;
use gateway_core::tenant::Tenant;
use gateway_core::trail::{AttemptRecord, PolicyVersion, Trail};
use pingora::protocols::http::ServerSession;
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use replica_api::priority::Priority;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Records requests when they end: log, metrics, explanations and receipts.
pub(super) struct RequestRecorder {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) metrics: Arc<EdgeMetrics>,
    pub(super) explanations: Arc<Explanations>,
    pub(super) recorder: Option<Arc<Recorder>>,
}

/// Context of one request; recorded when it is dropped.
pub(super) struct RequestContext<'a> {
    request_recorder: &'a RequestRecorder,
    pub(super) id: String,
    pub(super) arrived: Instant,
    /// Arrival in milliseconds since 1970.
    pub(super) at_ms: u64,
    pub(super) tls_ended_here: bool,
    protocol: ClientProtocol,
    priority: Option<Priority>,
    pub(super) endpoint: EndpointLabel,
    pub(super) tenant: Option<Arc<Tenant>>,
    /// Deployment, cost and policy of the request; absent until they are resolved.
    resolved: Option<ResolvedRequest>,
    /// Receipt that was returned to the client, with the key of its attempt.
    returned_receipt: Option<(u64, ReceiptId)>,
    /// Reserved slot in the queue of the receipt writer, if the request needs receipts.
    pub(super) receipt_slot: Option<QueueSlot>,
    pub(super) trail: Trail,
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
        RequestContext {
            request_recorder,
            id: request_id(session),
            arrived,
            at_ms: now_ms(),
            tls_ended_here: digest.is_some_and(|digest| digest.ssl_digest.is_some()),
            protocol,
            priority: None,
            endpoint: EndpointLabel::OTHER,
            tenant: None,
            resolved: None,
            returned_receipt: None,
            receipt_slot: None,
            trail: Trail::default(),
            served_by: None,
            tokens: None,
            bytes_in: 0,
            bytes_out: 0,
            outcome: RequestOutcome::Shutdown,
        }
    }

    /// Stores the resolved properties of the admitted request.
    pub(super) fn set_resolved(&mut self, request: &Request) {
        let Request { deployment, cost, policy, priority, .. } = request;
        self.priority = Some(*priority);
        let (deployment, policy) = (deployment.clone(), policy.clone());
        self.resolved = Some(ResolvedRequest { deployment, cost: *cost, policy });
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
            served_by: self.served_by,
            tokens: self.tokens,
            total,
            resolved: self.resolved.take(),
            receipt: self.returned_receipt,
        }
    }
}

impl Drop for RequestContext<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        self.trail.close(now);
        self.request_recorder.metrics.in_flight.decrement();
        let total = now.saturating_duration_since(self.arrived);
        let resolved = self.resolved.as_ref();
        let ended = RequestEnded {
            id: &self.id,
            endpoint: self.endpoint,
            protocol: self.protocol,
            priority: self.priority,
            outcome: self.outcome,
            tenant: self.tenant.as_ref().map(|tenant| &tenant.id),
            deployment: resolved.map(|resolved| &resolved.deployment),
            region: self.served_by.map(|(region, _)| region),
            trail: &self.trail,
            catalogue: &self.request_recorder.config.catalogue,
            cost: resolved.map(|resolved| resolved.cost),
            tokens: self.tokens,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            total,
            times: self.served_by.map(|(_, times)| times),
        };
        ended.record(&self.request_recorder.metrics);
        let finished = Arc::new(self.finished(total));
        if let Some(recorder) = &self.request_recorder.recorder {
            recorder.record(WriterMessage::Finished(finished.clone()), self.receipt_slot.take());
        }
        self.request_recorder.explanations.record(finished);
    }
}
