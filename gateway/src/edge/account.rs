//! What is known of one request while it is under way, and told when it is over.
//!
//! An account is opened with the request's head and told when it is dropped: so a request leaves its line, its counts and
//! its receipts also when its client hangs up or when the process stops in the middle of it (invariant 2, One fate).

use super::explain::Explanations;
use super::request::Request;
use super::request_head::request_id;
use crate::config::EdgeConfig;
use crate::events::{FinishedRequest, RequestEnded, RequestTimes, ResolvedRequest, began_ms};
use crate::metrics::{ClientProtocol, EdgeMetrics, EndpointLabel, Priority, RequestOutcome};
use crate::receipts::{QueueSlot, Recorder, WriterMessage, now_ms};
use gateway_core::labels::AttemptResult;
use gateway_core::receipt::ReceiptId;
use gateway_core::tenant::Tenant;
use gateway_core::trail::{AttemptRecord, PolicyVersion, Trail};
use pingora::protocols::http::ServerSession;
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Records requests when they are over: log, metrics, explanations and receipts.
pub(super) struct Accounting {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) metrics: Arc<EdgeMetrics>,
    pub(super) explanations: Arc<Explanations>,
    pub(super) recorder: Option<Arc<Recorder>>,
}

/// Account of one request.
pub(super) struct Account<'a> {
    accounting: &'a Accounting,
    pub(super) id: String,
    pub(super) arrived: Instant,
    /// The same moment, in milliseconds since 1970.
    pub(super) at_ms: u64,
    pub(super) tls_ended_here: bool,
    protocol: ClientProtocol,
    priority: Priority,
    pub(super) endpoint: EndpointLabel,
    pub(super) tenant: Option<Arc<Tenant>>,
    /// What it is for, once that is resolved.
    resolved: Option<ResolvedRequest>,
    /// The receipt that its client was told of, and of which attempt it is.
    told: Option<(u64, ReceiptId)>,
    /// A place for its receipts, if it needs one.
    pub(super) promise: Option<QueueSlot>,
    pub(super) trail: Trail,
    /// Whose answer is given, where its time went, and the tokens that it counted.
    pub(super) answered: Option<(RegionIndex, RequestTimes)>,
    pub(super) tokens: Option<u64>,
    bytes_in: u64,
    bytes_out: u64,
    pub(super) outcome: RequestOutcome,
}

/// What the identifiers of a request's receipts are made of.
pub(super) struct Receipts<'a> {
    recorder: &'a Recorder,
    catalogue: &'a Catalogue,
    request: String,
    /// Of attempts that were sent under no newer one.
    policy: Arc<PolicyVersion>,
    arrived: Instant,
    at_ms: u64,
}

impl Receipts<'_> {
    /// That of one attempt.
    pub(super) fn of(&self, attempt: &AttemptRecord) -> ReceiptId {
        let region = self.catalogue.region(attempt.region).id.as_str();
        let at_ms = began_ms(attempt, self.arrived, self.at_ms);
        let residency = attempt.policy.as_ref().unwrap_or(&self.policy).residency.as_str();
        self.recorder.id(&self.request, attempt.number, region, residency, at_ms, attempt.key)
    }
}

impl<'a> Account<'a> {
    pub(super) fn open(accounting: &'a Accounting, session: &ServerSession, arrived: Instant) -> Account<'a> {
        accounting.metrics.in_flight.add(1);
        let protocol = if session.is_http2() { ClientProtocol::Http2 } else { ClientProtocol::Http1 };
        let digest = session.digest();
        Account {
            accounting,
            id: request_id(session),
            arrived,
            at_ms: now_ms(),
            tls_ended_here: digest.is_some_and(|digest| digest.ssl_digest.is_some()),
            protocol,
            priority: Priority::default(),
            endpoint: EndpointLabel::OTHER,
            tenant: None,
            resolved: None,
            told: None,
            promise: None,
            trail: Trail::default(),
            answered: None,
            tokens: None,
            bytes_in: 0,
            bytes_out: 0,
            outcome: RequestOutcome::Shutdown,
        }
    }

    /// The request is let in.
    pub(super) fn admitted(&mut self, request: &Request) {
        let Request { deployment, cost, policy, priority, .. } = request;
        self.priority = Priority::from(*priority);
        let (deployment, policy) = (deployment.clone(), policy.clone());
        self.resolved = Some(ResolvedRequest { deployment, cost: *cost, policy });
    }

    /// The identifier of the receipt that the client of a locked deployment is given: that of the attempt whose answer it
    /// gets, or of the last if there is none.
    pub(super) fn receipt(&mut self) -> Option<ReceiptId> {
        let receipts = self.receipts()?;
        let answered = |attempt: &&AttemptRecord| {
            self.answered.is_some_and(|(region, _)| region == attempt.region)
                && AttemptResult::from(attempt.end).has_response()
        };
        let attempt = self.trail.attempts().filter(answered).last().or(self.trail.attempts().last())?;
        let (key, id) = (attempt.key, receipts.of(attempt));
        self.told = Some((key, id));
        Some(id)
    }

    /// What the identifiers of its receipts are made of, if its client is given any.
    pub(super) fn receipts(&self) -> Option<Receipts<'a>> {
        let accounting = self.accounting;
        let recorder = accounting.recorder.as_ref()?;
        let ResolvedRequest { policy, .. } = self.resolved.as_ref()?;
        policy.residency.is_locked().then(|| Receipts {
            recorder,
            catalogue: &accounting.config.catalogue,
            request: self.id.clone(),
            policy: policy.clone(),
            arrived: self.arrived,
            at_ms: self.at_ms,
        })
    }

    /// What crossed the client's connection.
    pub(super) fn measure(&mut self, session: &ServerSession) {
        self.bytes_in = session.body_bytes_read() as u64;
        self.bytes_out = session.body_bytes_sent() as u64;
    }

    /// All of it, for whoever asks later.
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
            served_by: self.answered,
            tokens: self.tokens,
            total,
            resolved: self.resolved.take(),
            receipt: self.told,
        }
    }
}

impl Drop for Account<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        self.trail.close(now);
        self.accounting.metrics.in_flight.decrement();
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
            region: self.answered.map(|(region, _)| region),
            trail: &self.trail,
            catalogue: &self.accounting.config.catalogue,
            cost: resolved.map(|resolved| resolved.cost),
            tokens: self.tokens,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            total,
            times: self.answered.map(|(_, times)| times),
        };
        ended.record(&self.accounting.metrics);
        let finished = Arc::new(self.finished(total));
        if let Some(recorder) = &self.accounting.recorder {
            recorder.record(WriterMessage::Finished(finished.clone()), self.promise.take());
        }
        self.accounting.explanations.put(finished);
    }
}
