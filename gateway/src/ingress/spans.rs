//! Spans of a request at the ingress: its stages are recorded while it is in flight, and become spans when its trace is
//! exported. Without a trace nothing is recorded.

use crate::metrics::{EndpointLabel, RequestOutcome};
use crate::trace::{request_span, sent_to};
use gateway_core::labels::AttemptResult;
use gateway_core::outcome::AttemptFailure;
use gateway_core::trail::AttemptEnd;
use rand::Rng;
use regions::HostPort;
use regions::id::{DeploymentName, RegionId};
use std::time::{Duration, Instant};
use telemetry::Tracer;
use telemetry::context::{SpanId, TraceContext, TraceId};
use telemetry::request::RequestTrace;
use telemetry::sampling::{FailoverTrace, KeepReason};
use telemetry::span::{Attribute, SpanName, SpanRecord};

/// Maximum number of stages that are recorded: several holds and attempts of a request; further ones are not exported.
const STAGES_MAX: usize = 32;

/// Stages of a request.
#[derive(Default)]
pub(super) struct IngressStages {
    traced: Option<(RequestTrace, Tracer)>,
    stages: Vec<StageRecord>,
    attempts: u32,
    failover: FailoverTrace,
}

/// One stage; the last one may be in progress.
struct StageRecord {
    stage: Stage,
    began: Instant,
    ended: Option<Instant>,
}

enum Stage {
    Receive,
    Select,
    Hold { cold_start: Option<Duration> },
    Attempt { span: SpanId, number: u32, replica: HostPort, end: AttemptEnd },
}

impl IngressStages {
    /// Returns the stages of a request with this trace, and the tracer that keeps it.
    pub(super) fn of(traced: Option<(RequestTrace, Tracer)>) -> IngressStages {
        IngressStages { traced, ..IngressStages::default() }
    }

    pub(super) fn trace(&self) -> Option<&RequestTrace> {
        self.traced.as_ref().map(|(trace, _)| trace)
    }

    /// Returns the identifier of the trace if it was sampled at the start, so that its spans are exported however the request ends.
    pub(super) fn sampled_trace(&self) -> Option<TraceId> {
        self.trace().filter(|trace| trace.is_sampled).map(|trace| trace.trace)
    }

    /// Returns whether the request was sent to a second replica.
    pub(super) fn failover(&self) -> FailoverTrace {
        self.failover
    }

    /// Records the stage from `began` until now, in which the body was read.
    pub(super) fn received(&mut self, began: Instant) {
        self.begin(Stage::Receive, began);
        self.end();
    }

    /// Records that the selection of a replica begins.
    pub(super) fn selecting(&mut self) {
        self.begin_now(Stage::Select);
    }

    /// Records that a replica was selected, or that there was none.
    pub(super) fn selected(&mut self) {
        self.end();
    }

    /// Records that the request is held instead of being sent.
    pub(super) fn holding(&mut self) {
        self.end();
        self.begin_now(Stage::Hold { cold_start: None });
    }

    /// Records that the request is not held any more, and that the selection continues.
    pub(super) fn released(&mut self, cold_start: Option<Duration>) {
        if let Some(StageRecord { stage: Stage::Hold { cold_start: recorded }, .. }) = self.stages.last_mut()
        {
            *recorded = cold_start;
        }
        self.end();
        self.selecting();
    }

    /// Records an attempt, and returns the header with its span. The attempts after the first are sampled within the limit of
    /// kept traces, because their trace is kept.
    pub(super) fn attempting(&mut self, replica: &HostPort) -> Option<String> {
        let (trace, tracer) = self.traced.as_ref()?;
        self.attempts += 1;
        if self.attempts > 1 && self.failover != FailoverTrace::Exported {
            let is_exported = trace.is_sampled || tracer.admit_failover();
            self.failover = if is_exported { FailoverTrace::Exported } else { FailoverTrace::Limited };
        }
        let (trace, is_sampled) = (trace.trace, trace.is_sampled || self.failover == FailoverTrace::Exported);
        let span = SpanId::from_random(rand::rng().random());
        let (number, replica, end) = (self.attempts, replica.clone(), AttemptEnd::Cancelled);
        self.begin_now(Stage::Attempt { span, number, replica, end });
        Some(TraceContext { trace, span, is_sampled }.traceparent())
    }

    /// Records the end of the attempt.
    pub(super) fn attempted(&mut self, end: AttemptEnd) {
        if let Some(StageRecord { stage: Stage::Attempt { end: recorded, .. }, .. }) = self.stages.last_mut()
        {
            *recorded = end;
        }
        self.end();
    }

    /// Records that the attempt failed.
    pub(super) fn failed(&mut self, failure: AttemptFailure) {
        self.attempted(AttemptEnd::Failed(failure));
    }

    fn begin_now(&mut self, stage: Stage) {
        if self.traced.is_some() {
            self.begin(stage, Instant::now());
        }
    }

    fn begin(&mut self, stage: Stage, began: Instant) {
        if self.traced.is_some() && self.stages.len() < STAGES_MAX {
            self.stages.push(StageRecord { stage, began, ended: None });
        }
    }

    fn end(&mut self) {
        if let Some(StageRecord { ended: ended @ None, .. }) = self.stages.last_mut() {
            *ended = Some(Instant::now());
        }
    }
}

/// Record of a finished request, for its span.
pub(super) struct FinishedArrival<'a> {
    pub(super) id: &'a str,
    pub(super) attempt: u32,
    pub(super) method: &'static str,
    pub(super) endpoint: EndpointLabel,
    pub(super) outcome: RequestOutcome,
    pub(super) region: &'a RegionId,
    pub(super) tenant: Option<&'a str>,
    pub(super) deployment: Option<&'a DeploymentName>,
    pub(super) residency: Option<&'a str>,
    /// Job that the request has submitted: its identifier, and the root of its trace.
    pub(super) job: Option<&'a (String, TraceContext)>,
    pub(super) arrived: Instant,
    pub(super) total: Duration,
    pub(super) reason: KeepReason,
}

/// Returns the spans of a request: the request, and its stages.
pub(super) fn of_arrival(
    trace: &RequestTrace,
    arrival: &FinishedArrival<'_>,
    stages: &IngressStages,
) -> Vec<SpanRecord> {
    let FinishedArrival { id, attempt, method, endpoint, outcome, region, tenant, deployment, .. } = *arrival;
    let FinishedArrival { residency, job, arrived, total, reason, .. } = *arrival;
    let cloud = region.as_str().split_once('/').map(|(cloud, _)| cloud);
    let whole = request_span(trace, (method, endpoint), outcome, total)
        .with(Attribute::KeepReason, reason.as_str())
        .with_text(Attribute::RequestId, Some(id))
        .with_text(Attribute::Tenant, tenant)
        .with_text(Attribute::GenAiModel, deployment.map(DeploymentName::as_str))
        .with_text(Attribute::Residency, residency)
        .with_text(Attribute::CloudRegion, Some(region.as_str()))
        .with_text(Attribute::CloudProvider, cloud)
        .with(Attribute::AttemptNumber, u64::from(attempt))
        .with(Attribute::Attempts, u64::from(stages.attempts))
        .with_text(Attribute::JobId, job.map(|(id, _)| id.as_str()))
        .linked(job.map(|(_, root)| *root));
    let mut spans = vec![whole];
    spans.extend(stage_spans(trace, stages, arrived + total));
    spans
}

/// Returns the spans of a request of a job that ended at `ended`: the request, and its stages.
pub(super) fn of_job_request(stages: &IngressStages, ended: Instant) -> Vec<SpanRecord> {
    let Some(trace) = stages.trace() else { return Vec::new() };
    let mut spans = vec![trace.internal_span(SpanName::JobRequest, ended)];
    spans.extend(stage_spans(trace, stages, ended));
    spans
}

/// Returns the spans of the stages; one that is in progress ended at `ended`.
fn stage_spans(trace: &RequestTrace, stages: &IngressStages, ended: Instant) -> Vec<SpanRecord> {
    let stages = stages.stages.iter().zip(0..);
    let spans = stages.map(|(record, number)| {
        let times = (record.began, record.ended.unwrap_or(ended));
        stage_span(trace, &record.stage, trace.span.child(number), times)
    });
    spans.collect()
}

fn stage_span(trace: &RequestTrace, stage: &Stage, id: SpanId, times: (Instant, Instant)) -> SpanRecord {
    match stage {
        Stage::Receive => trace.child_span(id, SpanName::Receive, times),
        Stage::Select => trace.child_span(id, SpanName::Select, times),
        Stage::Hold { cold_start } => {
            let cold_start = cold_start.map(|cold_start| cold_start.as_millis() as u64);
            trace.child_span(id, SpanName::Hold, times).with_number(Attribute::ColdStartMs, cold_start)
        }
        Stage::Attempt { span, number, replica, end } => {
            let result = AttemptResult::from(*end).as_str();
            let (status, error) = match end {
                AttemptEnd::Responded { status } => (Some(*status), (*status >= 400).then_some(result)),
                AttemptEnd::Cancelled => (None, None),
                AttemptEnd::Failed(_) => (None, Some(result)),
            };
            sent_to(trace.child_span(*span, SpanName::Attempt, times), Some(replica))
                .with(Attribute::HttpMethod, "POST")
                .with(Attribute::AttemptNumber, u64::from(*number))
                .with(Attribute::AttemptEnd, result)
                .with_number(Attribute::HttpStatus, status.map(u64::from))
                .failed(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::request::TraceRandom;
    use telemetry::sampling::{HeadSampler, KeepPolicy};

    fn trace() -> RequestTrace {
        let caller =
            TraceContext { trace: TraceId::from_random(1), span: SpanId::from_random(2), is_sampled: false };
        let times = (Instant::now(), 1_000_000_000);
        let random = TraceRandom { trace: 0, span: 3 };
        RequestTrace::begin(Some(caller), &HeadSampler::new(0.0, true), random, times, || false)
    }

    fn stages(trace: RequestTrace, per_second: u32) -> IngressStages {
        let keep = KeepPolicy { slow: Duration::MAX, per_second };
        IngressStages::of(Some((trace, Tracer::new(HeadSampler::new(0.0, true), keep))))
    }

    fn spans(trace: &RequestTrace, stages: &IngressStages) -> Vec<SpanRecord> {
        let arrival = FinishedArrival {
            id: "r",
            attempt: 1,
            method: "POST",
            endpoint: EndpointLabel::at("/v1/embeddings"),
            outcome: RequestOutcome::Complete { status: 200, code: None },
            region: &"aws/us-east-1".parse().unwrap(),
            tenant: None,
            deployment: None,
            residency: None,
            job: None,
            arrived: Instant::now(),
            total: Duration::from_secs(1),
            reason: KeepReason::Slow,
        };
        of_arrival(trace, &arrival, stages)
    }

    #[test]
    fn a_held_request_that_is_sent_twice_has_a_span_for_each_stage() {
        let (trace, replica) = (trace(), "127.0.0.1:7200".parse().unwrap());
        let mut stages = self::stages(trace, 1);
        stages.received(Instant::now());
        stages.selecting();
        stages.holding();
        stages.released(Some(Duration::from_secs(4)));
        stages.selected();
        let first = stages.attempting(&replica).expect("a header");
        stages.failed(AttemptFailure::Unreachable);
        assert_eq!(stages.failover(), FailoverTrace::None);
        let second = stages.attempting(&replica).expect("a header");
        stages.attempted(AttemptEnd::Responded { status: 200 });
        assert_eq!(stages.failover(), FailoverTrace::Exported);
        let spans = spans(&trace, &stages);
        let names: Vec<_> = spans.iter().map(|span| span.name.text().into_owned()).collect();
        let expected = [
            "POST /v1/embeddings",
            "receive",
            "select replica",
            "hold",
            "select replica",
            "attempt",
            "attempt",
        ];
        assert_eq!(names, expected);
        assert!(
            spans[1..].iter().all(|span| span.parent == Some(trace.span) && span.end_ns >= span.start_ns)
        );
        let contexts =
            [first, second].map(|header| TraceContext::parse(header.as_bytes()).expect("a context"));
        assert_eq!(contexts.map(|context| context.span), [spans[5].id, spans[6].id]);
        assert_eq!(contexts.map(|context| context.is_sampled), [false, true], "the second replica exports");
        assert_eq!((spans[5].is_error, spans[6].is_error), (true, false));
    }

    #[test]
    fn a_second_replica_exports_within_the_limit_of_kept_traces() {
        let replica = "127.0.0.1:7200".parse().unwrap();
        let flags = |mut stages: IngressStages| {
            let header = |_| stages.attempting(&replica).expect("a header");
            let headers: Vec<_> = (0..3).map(header).collect();
            let flag = |header: String| TraceContext::parse(header.as_bytes()).expect("a context").is_sampled;
            (headers.into_iter().map(flag).collect::<Vec<_>>(), stages.failover())
        };
        assert_eq!(
            flags(stages(trace(), 1)),
            (vec![false, true, true], FailoverTrace::Exported),
            "one token"
        );
        assert_eq!(flags(stages(trace(), 0)), (vec![false; 3], FailoverTrace::Limited));
        let mut sampled = trace();
        sampled.is_sampled = true;
        assert_eq!(flags(stages(sampled, 0)), (vec![true; 3], FailoverTrace::Exported));
    }

    #[test]
    fn stages_beyond_the_limit_are_not_recorded() {
        let (trace, replica) = (trace(), "127.0.0.1:7200".parse().unwrap());
        let mut stages = self::stages(trace, 1);
        for _ in 0..STAGES_MAX + 1 {
            assert!(stages.attempting(&replica).is_some());
            stages.failed(AttemptFailure::Unreachable);
        }
        assert_eq!(spans(&trace, &stages).len(), 1 + STAGES_MAX);
    }

    #[test]
    fn a_request_without_a_trace_records_nothing() {
        let mut stages = IngressStages::default();
        stages.selecting();
        assert_eq!(stages.attempting(&"127.0.0.1:7200".parse().unwrap()), None);
        stages.attempted(AttemptEnd::Cancelled);
        assert!(stages.stages.is_empty());
    }
}
