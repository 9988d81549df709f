//! Traces of jobs: one for each job of a client, and one for each batch of a file with the attempts at all its chunks.
//!
//! A job waits for hours, and several spokes may compute it, so no process keeps its trace. The identifiers of the trace and of its root
//! follow from the identifier of the job, or of the batch. Each step exports its own spans when it ends, below that root: the
//! acceptance, each attempt with its requests, and each delivery; and the spoke that ends the job exports the root, with a link to
//! the request that submitted it.
//!
//! A trace is sampled if its submission was, or by its identifier, so all spokes with the same ratio agree. Of the others, an attempt
//! or a delivery that failed is exported within the limit of kept traces, and so is a job that failed or was attempted again. A job
//! that took long is not: it waits because that is what a queue is for.
//!
//! These spans are exported by spokes of the region of the queue only, and only while the policies of the job allow that region.
//! Another region that computes a request of a job exports the spans of that request, as of any request.

use super::attempt::ReplicaAttemptEnd;
use super::names::{batch_phase_text, kind, phase_text};
use super::{ClientJobId, RegionalJobQueue};
use crate::ingress::arrival::Arrival;
use crate::ingress::residency::ResidencyGuard;
use crate::ingress::spans::{self, IngressStages};
use crate::metrics::{JobAttemptOutcome, WebhookAttemptOutcome};
use jobs::queue_host::{EndedWork, TakenJob};
use jobs_core::batch::id::BatchId;
use jobs_core::batch::state::{Batch, BatchPhase, BatchProgress};
use jobs_core::job::{
    DurableJob, DurableJobId, JobDelivery, JobOperation, JobPhase, JobSpec, JobStatus, UnixMillis,
};
use rand::Rng;
use regions::id::RegionId;
use replica_api::api::Operation;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use telemetry::Tracer;
use telemetry::context::{SpanId, TraceContext, TraceId};
use telemetry::request::RequestTrace;
use telemetry::sampling::{FailoverTrace, FinishedTrace};
use telemetry::span::{Attribute, SpanKind, SpanName, SpanRecord};
use tokio::sync::broadcast::error::RecvError;

/// Maximum number of spans of the requests of an attempt: a chunk has up to thousands of requests.
const REQUEST_SPANS_MAX: usize = 256;
/// Number of the acceptance among the children of the root. Those of deliveries are the tokens of their leases, which count from 1.
const ACCEPT: u64 = 0;

/// Tracer of the jobs of a region.
pub(in crate::ingress) struct JobTraces {
    pub(in crate::ingress) tracer: Tracer,
    pub(in crate::ingress) region: RegionId,
    pub(in crate::ingress) residency: Arc<ResidencyGuard>,
}

/// Returns the span of the request that submitted a job, as the job has it.
fn submission_span(trace: Option<&str>) -> Option<TraceContext> {
    TraceContext::parse(trace?.as_bytes())
}

/// Returns the root of the trace of a job or a batch. `is_sampled` decides about a trace whose submission was not sampled.
fn root(number: DurableJobId, trace: Option<&str>, is_sampled: impl FnOnce(TraceId) -> bool) -> TraceContext {
    let id = TraceId::from_random(number.get());
    // The lower bits are random.
    let span = SpanId::from_random(number.get() as u64);
    let is_sampled = submission_span(trace).is_some_and(|submission| submission.is_sampled) || is_sampled(id);
    TraceContext { trace: id, span, is_sampled }
}

/// Returns the number of the job or the batch to whose trace a job belongs.
fn owner(id: DurableJobId, spec: &JobSpec) -> DurableJobId {
    spec.chunk.map_or(id, |chunk| chunk.batch)
}

fn nanoseconds(time: UnixMillis) -> u64 {
    time.0.saturating_mul(1_000_000)
}

impl JobTraces {
    fn root(&self, number: DurableJobId, trace: Option<&str>) -> TraceContext {
        root(number, trace, |trace| self.tracer.is_sampled(trace))
    }

    fn permits(&self, spec: &JobSpec) -> bool {
        self.residency.permits_trace(spec.residency.as_deref(), [spec.deployment.as_str()])
    }

    /// Adds what all spans of a job have.
    fn described(
        &self,
        span: SpanRecord,
        queue: &RegionalJobQueue,
        id: DurableJobId,
        spec: &JobSpec,
    ) -> SpanRecord {
        let id = match spec.chunk {
            None => ClientJobId { id, region: &queue.region }.to_string(),
            Some(chunk) => queue.client_id(&BatchId(chunk.batch)),
        };
        self.located(span)
            .with_text(Attribute::JobId, Some(&id))
            .with_number(Attribute::JobChunk, spec.chunk.map(|chunk| chunk.chunk.into()))
            .with_text(Attribute::Tenant, Some(&spec.tenant))
            .with_text(Attribute::GenAiModel, Some(&spec.deployment))
            .with_word(Attribute::GenAiOperation, operation(spec.operation))
            .with_text(Attribute::Residency, spec.residency.as_deref())
            .with(Attribute::Priority, spec.priority.as_str())
            .with(Attribute::Inputs, spec.inputs)
    }

    fn located(&self, span: SpanRecord) -> SpanRecord {
        let cloud = self.region.as_str().split_once('/').map(|(cloud, _)| cloud);
        span.with_text(Attribute::CloudRegion, Some(self.region.as_str()))
            .with_text(Attribute::CloudProvider, cloud)
    }

    /// Records that a submission was accepted. A repeated one has added no job, and its job has the span of the first one.
    pub(super) fn accepted(
        &self,
        arrival: &mut Arrival<'_>,
        queue: &RegionalJobQueue,
        (id, job): (DurableJobId, &DurableJob),
    ) {
        let Some(request) = arrival.stages.trace() else { return };
        let submission = request.context();
        if job.spec.trace != Some(submission.traceparent()) || !self.permits(&job.spec) {
            return;
        }
        let root = self.root(id, job.spec.trace.as_deref());
        if root.is_sampled {
            let times = [arrival.arrived, Instant::now()].map(|time| request.since_1970_ns(time));
            let id_and_parent = (root.span.child(ACCEPT), Some(root.span));
            let span = SpanRecord::new(root.trace, id_and_parent, SpanName::Accept, times.into());
            let span = self.described(span, queue, id, &job.spec).linked(Some(submission));
            self.tracer.export(vec![span]);
        }
        arrival.job = Some((ClientJobId { id, region: &queue.region }.to_string(), root));
    }

    /// Begins an attempt.
    pub(super) fn attempt(self: &Arc<Self>, taken: &TakenJob) -> Arc<JobAttemptTrace> {
        let spec = &taken.job.spec;
        let root = self.root(owner(taken.id, spec), spec.trace.as_deref());
        let failover = match (taken.job.attempts > 1, root.is_sampled) {
            (false, _) => FailoverTrace::None,
            (true, true) => FailoverTrace::Exported,
            (true, false) if self.permits(spec) && self.tracer.admit_failover() => FailoverTrace::Exported,
            (true, false) => FailoverTrace::Limited,
        };
        let is_sampled = root.is_sampled || failover == FailoverTrace::Exported;
        // Chunks of a batch that are taken together have one token.
        let span = root.span.child(taken.token).child(taken.id.get() as u64);
        let span = TraceContext { span, is_sampled, ..root };
        Arc::new(JobAttemptTrace {
            traces: self.clone(),
            id: taken.id,
            spec: spec.clone(),
            attempts: taken.job.attempts,
            trace: self.tracer.continued(span, Some(root.span), Instant::now()),
            is_sampled: root.is_sampled,
            record: Mutex::new(SentRequests { requests: Vec::new(), failover }),
        })
    }

    /// Exports the end of a delivery that began at `began`.
    pub(super) fn delivered(
        &self,
        queue: &RegionalJobQueue,
        taken: &TakenJob,
        began: Instant,
        outcome: WebhookAttemptOutcome,
    ) {
        let spec = &taken.job.spec;
        let root = self.root(taken.id, spec.trace.as_deref());
        let error = (outcome != WebhookAttemptOutcome::Delivered).then_some(outcome.as_str());
        let ended = finished(root.is_sampled, error.is_some(), FailoverTrace::None);
        if !self.permits(spec) {
            return;
        }
        let Some(reason) = self.tracer.keep(&ended) else { return };
        let number = match &taken.job.status {
            JobStatus::Finished { delivery: JobDelivery::Sending { progress, .. }, .. } => {
                Some(u64::from(progress.attempts) + 1)
            }
            _ => None,
        };
        let clock = self.tracer.continued(root, None, began);
        let times = (began, Instant::now());
        let span = clock.child_span(root.span.child(taken.token), SpanName::Webhook, times);
        let span = self.described(span, queue, taken.id, spec).of_kind(SpanKind::Client).failed(error);
        self.tracer.export(vec![
            span.with(Attribute::KeepReason, reason.as_str())
                .with_number(Attribute::AttemptNumber, number)
                .with(Attribute::AttemptEnd, outcome.as_str()),
        ]);
    }

    /// Exports the root of a job that has ended.
    fn job_ended(&self, queue: &RegionalJobQueue, id: DurableJobId) {
        let Some(job) = queue.host.job_of_any_tenant(id) else { return };
        let JobStatus::Finished { at, .. } = &job.status else { return };
        let (spec, phase) = (&job.spec, JobPhase::of(&job));
        let is_error = matches!(phase, JobPhase::Failed | JobPhase::Expired);
        let root = self.root(id, spec.trace.as_deref());
        if spec.chunk.is_some() || !self.permits(spec) {
            return;
        }
        let failover = match job.attempts > 1 && !root.is_sampled && !is_error {
            true if self.tracer.admit_failover() => FailoverTrace::Exported,
            true => FailoverTrace::Limited,
            false => FailoverTrace::None,
        };
        let ended = finished(root.is_sampled, is_error, failover);
        let Some(reason) = self.tracer.keep(&ended) else { return };
        let times = (nanoseconds(id.submitted()), nanoseconds(*at));
        let span = SpanRecord::new(root.trace, (root.span, None), SpanName::Job, times);
        let span = self.described(span, queue, id, spec).linked(submission_span(spec.trace.as_deref()));
        self.tracer.export(vec![
            span.with(Attribute::KeepReason, reason.as_str())
                .with(Attribute::Attempts, u64::from(job.attempts))
                .with(Attribute::Outcome, phase_text(phase))
                .failed(is_error.then_some(phase_text(phase))),
        ]);
    }

    /// Exports the root of a batch that has ended.
    fn batch_ended(&self, queue: &RegionalJobQueue, id: BatchId) {
        let Some(batch) = queue.host.batch_of_any_tenant(id) else { return };
        let Batch { spec, progress: BatchProgress { ended: Some(at), .. }, chunks, .. } = &*batch else {
            return;
        };
        let phase = batch.phase();
        // A line that failed is in the error file, and is often a mistake of the client.
        let is_error = matches!(phase, BatchPhase::Failed | BatchPhase::Expired);
        let root = self.root(id.0, spec.trace.as_deref());
        let deployments = chunks.iter().map(|chunk| chunk.deployment.as_str());
        let deployments = deployments.chain(spec.models.iter().map(String::as_str));
        if !self.residency.permits_trace(spec.residency.as_deref(), deployments) {
            return;
        }
        let ended = finished(root.is_sampled, is_error, FailoverTrace::None);
        let Some(reason) = self.tracer.keep(&ended) else { return };
        let times = (nanoseconds(id.created()), nanoseconds(*at));
        let span = SpanRecord::new(root.trace, (root.span, None), SpanName::FileBatch, times);
        let outcome = batch_phase_text(phase);
        let span = self.located(span).linked(submission_span(spec.trace.as_deref()));
        self.tracer.export(vec![
            span.with(Attribute::KeepReason, reason.as_str())
                .with_text(Attribute::JobId, Some(&queue.client_id(&id)))
                .with_text(Attribute::Tenant, Some(&spec.tenant))
                .with_word(Attribute::GenAiOperation, operation(spec.operation))
                .with_text(Attribute::Residency, spec.residency.as_deref())
                .with(Attribute::Inputs, u64::from(spec.total))
                .with(Attribute::Outcome, outcome)
                .failed(is_error.then_some(outcome)),
        ]);
    }
}

/// Facts about an ended step, of which the time has no effect on the decision to keep it.
fn finished(is_sampled: bool, is_error: bool, failover: FailoverTrace) -> FinishedTrace {
    FinishedTrace { is_sampled, is_error, is_disconnected: false, failover, total: Duration::ZERO }
}

fn operation(operation: JobOperation) -> Option<&'static str> {
    Operation::at(kind(operation).computed_path()).and_then(Operation::gen_ai_name)
}

/// Exports the roots of the jobs and batches that this process ends; forever.
pub(in crate::ingress) async fn export_ended(queue: Arc<RegionalJobQueue>, traces: Arc<JobTraces>) {
    let mut ended = queue.host.subscribe_ended();
    loop {
        match ended.recv().await {
            Ok(EndedWork::Job(id)) => traces.job_ended(&queue, id),
            Ok(EndedWork::Batch(id)) => traces.batch_ended(&queue, id),
            // More than thousands have ended at once. The roots of the oldest are not exported.
            Err(RecvError::Lagged(_)) => {}
            // The queue is closed: the process ends.
            Err(RecvError::Closed) => return std::future::pending().await,
        }
    }
}

/// Trace of an attempt at a job.
pub(super) struct JobAttemptTrace {
    traces: Arc<JobTraces>,
    id: DurableJobId,
    spec: JobSpec,
    attempts: u32,
    /// Span of the attempt. Its flag is that of its requests.
    trace: RequestTrace,
    /// Whether the trace of the job is sampled.
    is_sampled: bool,
    record: Mutex<SentRequests>,
}

struct SentRequests {
    /// Spans of its requests.
    requests: Vec<SpanRecord>,
    failover: FailoverTrace,
}

impl JobAttemptTrace {
    /// Begins a request of the attempt.
    pub(super) fn request(&self) -> IngressStages {
        let span = TraceContext { span: SpanId::from_random(rand::rng().random()), ..self.trace.context() };
        let tracer = &self.traces.tracer;
        IngressStages::of(Some((
            tracer.continued(span, Some(self.trace.span), Instant::now()),
            tracer.clone(),
        )))
    }

    /// Records the end of a request, that another region may have computed.
    pub(super) fn request_ended(
        &self,
        stages: &IngressStages,
        target: Option<&RegionId>,
        end: &ReplicaAttemptEnd,
    ) {
        let (end, is_error) = match end {
            ReplicaAttemptEnd::Computed { .. } => (JobAttemptOutcome::Succeeded, false),
            ReplicaAttemptEnd::Rejected(_) => (JobAttemptOutcome::Rejected, true),
            ReplicaAttemptEnd::Failed(_) => (JobAttemptOutcome::Failed, true),
            ReplicaAttemptEnd::NoCapacity { .. } => (JobAttemptOutcome::NoCapacity, false),
        };
        let mut record = self.record.lock();
        if record.failover == FailoverTrace::None {
            record.failover = stages.failover();
        }
        let is_exported = self.trace.is_sampled || is_error || record.failover == FailoverTrace::Exported;
        if !is_exported || record.requests.len() >= REQUEST_SPANS_MAX {
            return;
        }
        let region = target.unwrap_or(&self.traces.region);
        let mut spans = spans::of_job_request(stages, Instant::now());
        if let Some(request) = spans.first_mut() {
            let span = request.clone().with(Attribute::AttemptEnd, end.as_str());
            *request = span
                .with_text(Attribute::CloudRegion, Some(region.as_str()))
                .failed(is_error.then_some(end.as_str()));
        }
        record.requests.extend(spans);
    }

    /// Exports the attempt when it has ended, if its trace is sampled or is kept. It has no outcome if it was cancelled.
    pub(super) fn ended(
        &self,
        queue: &RegionalJobQueue,
        target: Option<&RegionId>,
        outcome: Option<JobAttemptOutcome>,
    ) {
        let SentRequests { requests, failover } = {
            let mut record = self.record.lock();
            SentRequests { requests: std::mem::take(&mut record.requests), failover: record.failover }
        };
        let is_error = matches!(outcome, Some(JobAttemptOutcome::Failed | JobAttemptOutcome::Rejected));
        let JobAttemptTrace { traces, id, spec, attempts, trace, is_sampled, .. } = self;
        if !traces.permits(spec) {
            return;
        }
        let Some(reason) = traces.tracer.keep(&finished(*is_sampled, is_error, failover)) else { return };
        let word = outcome.map_or("cancelled", JobAttemptOutcome::as_str);
        let span = trace.internal_span(SpanName::JobAttempt, Instant::now());
        let start_ns = span.start_ns;
        let region = target.map(RegionId::as_str);
        let span = traces.described(span, queue, *id, spec);
        let mut spans = vec![
            span.with(Attribute::KeepReason, reason.as_str())
                .with(Attribute::AttemptNumber, u64::from(*attempts))
                .with(Attribute::AttemptEnd, word)
                .with_text(Attribute::TargetRegion, region)
                .failed(is_error.then_some(word)),
        ];
        // An attempt without capacity does not count, and the next one is the first again.
        let is_first = *attempts == 1 && outcome.is_some_and(|end| end != JobAttemptOutcome::NoCapacity);
        if is_first {
            let id = (trace.span.child(0), trace.parent);
            let times = (nanoseconds(self.id.submitted()).min(start_ns), start_ns);
            spans.push(SpanRecord::new(trace.trace, id, SpanName::Queue, times));
        }
        spans.extend(requests);
        traces.tracer.export(spans);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trace_of_a_job_follows_from_its_identifier() {
        let id = DurableJobId::new(UnixMillis(1), 7);
        let roots = [0, 1].map(|_| root(id, None, |_| false));
        assert_eq!(roots[0], roots[1], "every spoke");
        assert_eq!(roots[0].trace.get(), id.get());
        let other = root(DurableJobId::new(UnixMillis(1), 8), None, |_| false);
        assert!(other.trace != roots[0].trace && other.span != roots[0].span);
    }

    #[test]
    fn a_trace_is_sampled_by_its_identifier_or_if_its_submission_was() {
        let id = DurableJobId::new(UnixMillis(1), 7);
        let header = |flag: u8| format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0{flag}");
        for (trace, by_identifier, expected) in [
            (None, false, false),
            (None, true, true),
            (Some(header(0)), false, false),
            (Some(header(0)), true, true),
            (Some(header(1)), false, true),
            (Some("unreadable".to_owned()), false, false),
        ] {
            let root = root(id, trace.as_deref(), |_| by_identifier);
            assert_eq!(root.is_sampled, expected, "{trace:?} {by_identifier}");
        }
        let linked = submission_span(Some(&header(1))).map(|submission| submission.span.text());
        assert_eq!(linked.as_deref(), Some("b7ad6b7169203331"));
    }
}
