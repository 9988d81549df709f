//! Context of a request at the ingress: its log record and receipt, which are written when it ends.

use super::spans::{self, FinishedArrival, IngressStages};
use crate::events::ArrivalEnded;
use crate::metrics::{EndpointLabel, IngressMetrics, RequestOutcome};
use crate::receipts::{
    CommitFailed, QueueSlot, Received, Receiving, Recorder, WriteAhead, WriterMessage, now_ms,
};
use crate::trace::{is_trace_error, method_name};
use gateway_core::receipt::AttemptKey;
use pingora::protocols::http::ServerSession;
use regions::id::{DeploymentName, RegionId};
use replica_api::headers;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::Tracer;
use telemetry::context::{TraceContext, TraceId};
use telemetry::request::RequestTrace;
use telemetry::sampling::FinishedTrace;

/// Records requests: metrics, log records and receipts.
pub(super) struct ArrivalRecorder {
    pub(super) region: RegionId,
    pub(super) metrics: Arc<IngressMetrics>,
    /// Recorder of receipts, if they are configured.
    pub(super) receipts: Option<Recorder>,
    /// Tracer, if traces are configured.
    pub(super) tracer: Option<Tracer>,
}

/// Context of a request at its region; the gateway's counterpart is `edge::request::RequestContext`.
pub(super) struct Arrival<'a> {
    recorder: &'a ArrivalRecorder,
    pub(super) arrived: Instant,
    method: &'static str,
    endpoint: EndpointLabel,
    /// Stages of a request with a trace.
    pub(super) stages: IngressStages,
    /// `arrived` in milliseconds since 1970.
    at_ms: u64,
    id: String,
    /// 0 if the gateway does not send it.
    attempt: u32,
    tenant: Option<String>,
    deployment: Option<DeploymentName>,
    /// Residency header as received.
    residency: Option<String>,
    /// Job that the request has submitted, if it has a trace: its identifier, and the root of its trace.
    pub(super) job: Option<(String, TraceContext)>,
    /// Key of the attempt, if its gateway sent one.
    key: Option<AttemptKey>,
    /// Reserved queue slot for its receipt, if it needs one.
    receipt_slot: Option<QueueSlot>,
    /// Number of its write-ahead receipt.
    number: Option<u64>,
    bytes_in: u64,
    bytes_out: u64,
    outcome: RequestOutcome,
}

impl ArrivalRecorder {
    /// Creates the context of a request for the replica endpoint `path`.
    pub(super) fn open(&self, session: &ServerSession, path: &'static str, arrived: Instant) -> Arrival<'_> {
        self.metrics.in_flight.add(1);
        let text = |name: &str| session.get_header(name).and_then(|value| value.to_str().ok());
        let head = session.req_header();
        let traceparent = head.headers.get_all(headers::TRACEPARENT).iter().map(|line| line.as_bytes());
        Arrival {
            recorder: self,
            arrived,
            method: method_name(&head.method),
            stages: IngressStages::of(
                self.tracer.as_ref().map(|tracer| (tracer.begin(traceparent, arrived), tracer.clone())),
            ),
            endpoint: EndpointLabel::at(path),
            at_ms: now_ms(),
            id: text(headers::REQUEST_ID).unwrap_or_default().to_owned(),
            attempt: text(headers::ATTEMPT).and_then(|attempt| attempt.parse().ok()).unwrap_or(0),
            tenant: text(headers::TENANT).map(str::to_owned),
            deployment: text(headers::DEPLOYMENT).and_then(|name| name.parse().ok()),
            residency: text(headers::RESIDENCY).map(str::to_owned),
            job: None,
            key: text(headers::ATTEMPT_KEY).and_then(|key| key.parse().ok()),
            receipt_slot: None,
            number: None,
            bytes_in: 0,
            bytes_out: 0,
            outcome: RequestOutcome::Shutdown,
        }
    }
}

impl Arrival<'_> {
    /// Reserves a queue slot for the receipt of a request that requires one; returns false if there is none.
    pub(super) fn reserve_receipt(&mut self) -> bool {
        let locked = self.is_locked();
        match self.recorder.receipts.as_ref().filter(|receipts| locked && receipts.required()) {
            Some(receipts) => {
                self.receipt_slot = receipts.reserve();
                self.receipt_slot.is_some()
            }
            None => true,
        }
    }

    /// Returns whether the request has a residency policy.
    pub(super) fn is_locked(&self) -> bool {
        self.residency.is_some()
    }

    /// Makes the write-ahead receipt durable if the request requires one.
    pub(super) async fn commit(&mut self) -> Result<(), CommitFailed> {
        let Some(receipts) = self.recorder.receipts.as_ref().filter(|_| self.receipt_slot.is_some()) else {
            return Ok(());
        };
        let number = receipts.number();
        self.number = Some(number);
        let receiving = Receiving {
            number,
            request: self.id.clone(),
            attempt: self.attempt,
            tenant: self.tenant.clone(),
            deployment: self.deployment.clone(),
            residency: self.residency.clone(),
            at_ms: self.at_ms,
            key: self.key,
        };
        receipts.commit(WriteAhead::Receiving(receiving)).await
    }

    /// Records the outcome of the request.
    pub(super) fn ended(&mut self, session: &ServerSession, outcome: RequestOutcome) {
        self.bytes_in = session.body_bytes_read() as u64;
        self.bytes_out = session.body_bytes_sent() as u64;
        self.outcome = outcome;
    }

    /// Exports the trace of the request, if it was sampled or is kept, and returns its identifier then.
    fn export_trace(&self, total: Duration) -> Option<TraceId> {
        let (tracer, trace) = (self.recorder.tracer.as_ref()?, self.stages.trace()?);
        let ended = FinishedTrace {
            is_sampled: trace.is_sampled,
            is_error: is_trace_error(self.outcome),
            is_disconnected: self.outcome == RequestOutcome::ClientDisconnected,
            failover: self.stages.failover(),
            total,
        };
        let reason = tracer.keep(&ended)?;
        let finished = FinishedArrival {
            id: &self.id,
            attempt: self.attempt,
            method: self.method,
            endpoint: self.endpoint,
            outcome: self.outcome,
            region: &self.recorder.region,
            tenant: self.tenant.as_deref(),
            deployment: self.deployment.as_ref(),
            residency: self.residency.as_deref(),
            job: self.job.as_ref(),
            arrived: self.arrived,
            total,
            reason,
        };
        tracer.export(spans::of_arrival(trace, &finished, &self.stages));
        Some(trace.trace)
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.recorder.metrics.in_flight.decrement();
        let total = self.arrived.elapsed();
        let exported = self.export_trace(total);
        let ended = ArrivalEnded {
            id: &self.id,
            attempt: self.attempt,
            region: &self.recorder.region,
            endpoint: self.endpoint,
            deployment: self.deployment.as_ref(),
            outcome: self.outcome,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            total,
            exemplar: exported.map(|trace| telemetry::exemplar(trace, self.arrived + total)),
            trace: self.stages.trace().map(RequestTrace::context),
        };
        ended.record(&self.recorder.metrics);
        if let Some(receipts) = &self.recorder.receipts {
            let received = Received {
                request: std::mem::take(&mut self.id),
                attempt: self.attempt,
                tenant: self.tenant.take(),
                deployment: self.deployment.take(),
                residency: self.residency.take(),
                at_ms: self.at_ms,
                took: total,
                outcome: RequestOutcome::name(self.outcome.index()),
                key: self.key,
                number: self.number,
            };
            receipts.record(WriterMessage::Received(Box::new(received)), self.receipt_slot.take());
        }
    }
}
