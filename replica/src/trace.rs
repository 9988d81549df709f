//! Trace of a request at the replica: its stages, and the batches that computed its inputs.
//!
//! Stages are recorded while the request is in flight, and become spans when its trace is exported. Without a tracer nothing
//! is recorded.
//!
//! A batch has inputs of several requests, so it is no part of the trace of one. It is a trace of its own, with links to
//! its requests; the span `engine` of each request links to its batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use replica_api::api::Operation;
use replica_api::error::ErrorCode;
use replica_api::priority::Priority;
use replica_core::batch::Backlog;
use supervision::Mutex;
use telemetry::Tracer;
use telemetry::context::{SpanId, TraceContext, TraceId};
use telemetry::request::RequestTrace;
use telemetry::sampling::{FailoverTrace, FinishedTrace, KeepReason};
use telemetry::span::{Attribute, LINKS_MAX, SpanName, SpanRecord};

use crate::engine::EngineStep;

/// Maximum number of batches of a request that are recorded; a request of more inputs has the first ones.
const BATCHES_MAX: usize = 64;

/// Stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TraceStage {
    Parse,
    Tokenize,
    /// From the queue until the rows are complete.
    Compute,
    Write,
}

/// Batch with inputs of requests that have a trace.
#[derive(Debug)]
pub(crate) struct BatchTrace {
    context: TraceContext,
    priority: Priority,
    size: Backlog,
    requests: usize,
    times: BatchTimes,
    links: Vec<TraceContext>,
    /// Set by the first request that exports the batch.
    is_exported: AtomicBool,
}

/// Times of a batch.
#[derive(Debug)]
pub(crate) struct BatchTimes {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    /// Steps of the engine, each with its begin, in their order; none if the engine does not report them.
    pub(crate) steps: Vec<(EngineStep, Instant)>,
}

impl BatchTrace {
    /// Records a batch that the engine computed at these times, with inputs of these requests, some of which have a trace.
    pub(crate) fn new(
        priority: Priority,
        size: Backlog,
        times: BatchTimes,
        requests: usize,
        mut links: Vec<TraceContext>,
    ) -> BatchTrace {
        links.truncate(LINKS_MAX);
        let (trace, span) = (TraceId::from_random(rand::random()), SpanId::from_random(rand::random()));
        BatchTrace {
            context: TraceContext { trace, span, is_sampled: true },
            priority,
            size,
            requests,
            times,
            links,
            is_exported: AtomicBool::new(false),
        }
    }

    /// Returns the spans of the batch and its steps, unless another of its requests has exported them.
    fn spans(&self, exporting: &RequestTrace) -> Vec<SpanRecord> {
        if self.is_exported.swap(true, Ordering::Relaxed) {
            return Vec::new();
        }
        let mut spans = vec![self.span(exporting)];
        let steps = self.times.steps.iter().map(|(step, began)| match step {
            EngineStep::Forward => (SpanName::Forward, *began),
            EngineStep::Pool => (SpanName::Pool, *began),
        });
        let mut steps: Vec<_> = steps.collect();
        if !steps.is_empty() {
            steps.insert(0, (SpanName::Pack, self.times.began));
        }
        let ends = steps.iter().skip(1).map(|(_, began)| *began).chain([self.times.ended]);
        let TraceContext { trace, span, .. } = self.context;
        spans.extend(steps.iter().zip(ends).zip(0..).map(|(((name, began), ended), number)| {
            let times = [*began, ended].map(|time| exporting.since_1970_ns(time));
            SpanRecord::new(trace, (span.child(number), Some(span)), *name, times.into())
        }));
        spans
    }

    /// Returns the span of the batch. It links to its sampled requests and to that of `exporting`; the others have no span to link to.
    fn span(&self, exporting: &RequestTrace) -> SpanRecord {
        let own = exporting.context();
        let is_linked = |link: &&TraceContext| link.is_sampled || link.span == own.span;
        let TraceContext { trace, span, .. } = self.context;
        let times = [self.times.began, self.times.ended].map(|time| exporting.since_1970_ns(time));
        let mut whole = SpanRecord::new(trace, (span, None), SpanName::Batch, times.into());
        whole.links = self.links.iter().filter(is_linked).copied().collect();
        whole
            .with(Attribute::Priority, self.priority.as_str())
            .with(Attribute::BatchInputs, self.size.inputs)
            .with(Attribute::BatchTokens, self.size.tokens)
            .with(Attribute::BatchRequests, self.requests as u64)
    }
}

/// Trace of a request in flight. It ends when this is dropped, unless it has [ended](TracedRequest::ended) before: the client
/// disconnected.
pub(crate) struct TracedRequest {
    tracer: Tracer,
    stages: Arc<RequestStages>,
    operation: Operation,
    request_id: String,
    received: Instant,
    is_ended: bool,
}

/// End of a request, for its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestEnd {
    /// A response with the rows.
    Completed { inputs: u64, tokens: u64, priority: Priority },
    /// An error response.
    Rejected(ErrorCode),
    /// No response: the client disconnected.
    Abandoned,
}

/// Stages of a request in flight.
pub(crate) struct RequestStages {
    trace: RequestTrace,
    record: Mutex<RecordedStages>,
}

#[derive(Default)]
struct RecordedStages {
    times: Vec<(TraceStage, Instant, Instant)>,
    batches: Vec<Arc<BatchTrace>>,
    cached_inputs: u64,
    deployment: Option<String>,
}

impl RequestStages {
    /// Returns the span of the request, to which its batches link, and which its log lines name.
    pub(crate) fn context(&self) -> TraceContext {
        self.trace.context()
    }

    /// Records a stage that ends now. The times of several of the same kind, such as the lists of a request that are tokenized
    /// separately, are one.
    pub(crate) fn ended(&self, stage: TraceStage, began: Instant) {
        let now = Instant::now();
        let mut record = self.record.lock();
        match record.times.iter_mut().find(|(of, ..)| *of == stage) {
            Some((_, first, last)) => (*first, *last) = (began.min(*first), now),
            None => record.times.push((stage, began, now)),
        }
    }

    /// Records the batches that computed the rows.
    pub(crate) fn computed(&self, batches: Vec<Arc<BatchTrace>>, cached_inputs: u64) {
        let mut record = self.record.lock();
        record.batches.extend(batches);
        record.cached_inputs += cached_inputs;
    }

    /// Records the deployment.
    pub(crate) fn named(&self, deployment: &str) {
        self.record.lock().deployment = Some(deployment.to_owned());
    }
}

impl TracedRequest {
    /// Begins the trace of a request that was received at `received`.
    pub(crate) fn begin<'h>(
        tracer: &Tracer,
        traceparent: impl IntoIterator<Item = &'h [u8]>,
        (operation, request_id): (Operation, &str),
        received: Instant,
    ) -> TracedRequest {
        let trace = tracer.begin(traceparent, received);
        let stages = RequestStages { trace, record: Mutex::independent(RecordedStages::default()) };
        TracedRequest {
            tracer: tracer.clone(),
            stages: Arc::new(stages),
            operation,
            request_id: request_id.to_owned(),
            received,
            is_ended: false,
        }
    }

    /// Returns the stages, for those who record them.
    pub(crate) fn stages(&self) -> &Arc<RequestStages> {
        &self.stages
    }

    /// Exports the spans of the request, which has ended after `total`, if it was sampled or is kept, and returns its trace then.
    pub(crate) fn ended(&mut self, end: RequestEnd, total: Duration) -> Option<TraceId> {
        self.is_ended = true;
        let is_error = match end {
            RequestEnd::Completed { .. } => false,
            RequestEnd::Rejected(code) => code.status() >= 500,
            RequestEnd::Abandoned => false,
        };
        let is_disconnected = matches!(end, RequestEnd::Abandoned);
        let is_sampled = self.stages.trace.is_sampled;
        let ended =
            FinishedTrace { is_sampled, is_error, is_disconnected, failover: FailoverTrace::None, total };
        let reason = self.tracer.keep(&ended)?;
        let record = std::mem::take(&mut *self.stages.record.lock());
        let request = (self.operation, self.request_id.as_str(), end);
        self.tracer.export(spans(&self.stages.trace, request, &record, total, reason));
        Some(self.stages.trace.trace)
    }
}

impl Drop for TracedRequest {
    fn drop(&mut self) {
        if !self.is_ended {
            self.ended(RequestEnd::Abandoned, self.received.elapsed());
        }
    }
}

/// Returns the spans of a request: the request, its stages, and its batches.
fn spans(
    trace: &RequestTrace,
    (operation, request_id, end): (Operation, &str, RequestEnd),
    record: &RecordedStages,
    total: Duration,
    reason: KeepReason,
) -> Vec<SpanRecord> {
    let mut spans = vec![
        request_span(trace, operation, end, total)
            .with(Attribute::KeepReason, reason.as_str())
            .with_text(Attribute::RequestId, Some(request_id))
            .with_text(Attribute::GenAiModel, record.deployment.as_deref()),
    ];
    let child = |spans: &[SpanRecord]| trace.span.child(spans.len() as u64);
    for (stage, began, ended) in &record.times {
        let name = match stage {
            TraceStage::Parse => SpanName::Parse,
            TraceStage::Tokenize => SpanName::Tokenize,
            TraceStage::Write => SpanName::Write,
            TraceStage::Compute => {
                // In the queue until the first batch. Without a batch, no input was computed.
                let first = record.batches.iter().map(|batch| batch.times.began).min();
                let begun = first.unwrap_or(*ended).clamp(*began, *ended);
                spans.push(
                    trace.child_span(child(&spans), SpanName::Queue, (*began, begun)).with_number(
                        Attribute::CachedInputs,
                        Some(record.cached_inputs).filter(|it| *it > 0),
                    ),
                );
                if first.is_some() {
                    spans.push(engine_span(trace, child(&spans), record, (begun, *ended)));
                }
                continue;
            }
        };
        spans.push(trace.child_span(child(&spans), name, (*began, *ended)));
    }
    spans.extend(record.batches.iter().flat_map(|batch| batch.spans(trace)));
    spans
}

fn request_span(trace: &RequestTrace, operation: Operation, end: RequestEnd, total: Duration) -> SpanRecord {
    let definition = operation.definition();
    let span = trace
        .request_span(SpanName::Request { method: definition.method, route: definition.path }, total)
        .with(Attribute::HttpMethod, definition.method)
        .with(Attribute::HttpRoute, definition.path)
        .with(Attribute::UrlPath, definition.path)
        .with_word(Attribute::GenAiOperation, operation.gen_ai_name());
    match end {
        RequestEnd::Completed { inputs, tokens, priority } => span
            .with(Attribute::HttpStatus, 200_u64)
            .with(Attribute::Priority, priority.as_str())
            .with(Attribute::Inputs, inputs)
            .with(Attribute::GenAiInputTokens, tokens),
        RequestEnd::Rejected(code) => {
            let mut span = span
                .with(Attribute::HttpStatus, u64::from(code.status()))
                .with(Attribute::ErrorType, code.as_str());
            span.is_error = code.status() >= 500;
            span
        }
        RequestEnd::Abandoned => span.failed(Some("client_disconnected")),
    }
}

fn engine_span(
    trace: &RequestTrace,
    id: SpanId,
    record: &RecordedStages,
    (began, ended): (Instant, Instant),
) -> SpanRecord {
    let last = record.batches.iter().map(|batch| batch.times.ended).max().unwrap_or(ended);
    let mut span = trace.child_span(id, SpanName::Engine, (began, last.clamp(began, ended)));
    span.links = record.batches.iter().map(|batch| batch.context).take(BATCHES_MAX).collect();
    span.with(Attribute::Batches, record.batches.len() as u64)
}

/// Adds a batch to those of a request, within the limit.
pub(crate) fn push_batch(batches: &mut Vec<Arc<BatchTrace>>, batch: &Arc<BatchTrace>) {
    if batches.len() < BATCHES_MAX {
        batches.push(Arc::clone(batch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::sampling::{HeadSampler, KeepPolicy};

    const SAMPLED: &[u8] = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const OTHER: &[u8] = b"00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn tracer() -> Tracer {
        Tracer::new(HeadSampler::new(0.0, true), KeepPolicy { slow: Duration::from_secs(9), per_second: 9 })
    }

    fn begin(tracer: &Tracer, header: Option<&'static [u8]>) -> TracedRequest {
        TracedRequest::begin(tracer, header, (Operation::Embeddings, "r"), Instant::now())
    }

    const COMPLETED: RequestEnd =
        RequestEnd::Completed { inputs: 2, tokens: 9, priority: Priority::Interactive };

    fn batch(links: Vec<TraceContext>) -> Arc<BatchTrace> {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let steps = vec![(EngineStep::Forward, at(1)), (EngineStep::Pool, at(7))];
        let times = BatchTimes { began, ended: at(8), steps };
        let size = Backlog { tokens: 9, inputs: 2 };
        Arc::new(BatchTrace::new(Priority::Interactive, size, times, links.len(), links))
    }

    #[test]
    fn a_batch_is_exported_once_and_links_to_its_sampled_requests() {
        let tracer = tracer();
        let mut requests = [Some(SAMPLED), Some(OTHER), None].map(|header| begin(&tracer, header));
        let links: Vec<_> = requests.iter().map(|request| request.stages().context()).collect();
        let batch = batch(links.clone());
        for request in &mut requests {
            let stages = request.stages();
            stages.computed(vec![Arc::clone(&batch)], 0);
            stages.ended(TraceStage::Compute, Instant::now());
            request.ended(COMPLETED, Duration::from_millis(9));
        }
        drop(requests);
        let exported: Vec<_> = tracer.take().collect();
        assert_eq!(exported.len(), 2, "the third request is not sampled");
        let batches: Vec<_> = exported.iter().flatten().filter(|span| span.name == SpanName::Batch).collect();
        let [whole] = batches.as_slice() else { panic!("{batches:#?}") };
        assert_eq!(whole.links, links[..2]);
        assert!(whole.parent.is_none() && links.iter().all(|link| link.trace != whole.trace));
        let steps = exported.iter().flatten().filter(|span| span.parent == Some(whole.id));
        let steps: Vec<_> = steps
            .map(|span| (span.name.text().into_owned(), (span.end_ns - span.start_ns) / 1_000_000))
            .collect();
        let expected = [("pack", 1), ("forward", 6), ("pool", 1)].map(|(name, took)| (name.to_owned(), took));
        assert_eq!(steps, expected, "each step begins when the one before ends");
        for (spans, link) in exported.iter().zip(&links) {
            assert_eq!(spans[0].id, link.span);
            let engine = spans.iter().find(|span| span.name == SpanName::Engine).expect("it was computed");
            assert_eq!((engine.parent, engine.links[0].span), (Some(link.span), whole.id));
        }
    }

    #[test]
    fn an_unsampled_request_is_exported_if_it_failed_or_its_client_disconnected() {
        let tracer = tracer();
        for end in [
            COMPLETED,
            RequestEnd::Rejected(ErrorCode::InvalidValue),
            RequestEnd::Rejected(ErrorCode::Internal),
            RequestEnd::Abandoned,
        ] {
            let mut request = begin(&tracer, None);
            request.stages().ended(TraceStage::Parse, Instant::now());
            let trace = request.stages().context().trace;
            let is_failed = end == RequestEnd::Rejected(ErrorCode::Internal);
            if end != RequestEnd::Abandoned {
                let exported = request.ended(end, Duration::ZERO);
                assert_eq!(exported, is_failed.then_some(trace), "{end:?}");
            }
            drop(request);
            let exported: Vec<_> = tracer.take().collect();
            let is_kept = is_failed || end == RequestEnd::Abandoned;
            assert_eq!(exported.len(), usize::from(is_kept), "{end:?}");
            assert!(exported.iter().flatten().take(1).all(|span| span.is_error), "{end:?}");
        }
    }

    #[test]
    fn the_links_of_a_batch_and_the_batches_of_a_request_are_limited() {
        let tracer = tracer();
        let link = begin(&tracer, None).stages().context();
        assert_eq!(batch(vec![link; LINKS_MAX]).links.len(), LINKS_MAX, "at the limit");
        assert_eq!(batch(vec![link; LINKS_MAX + 1]).links.len(), LINKS_MAX, "past it");
        let (mut batches, one) = (Vec::new(), batch(Vec::new()));
        (0..=BATCHES_MAX).for_each(|_| push_batch(&mut batches, &one));
        assert_eq!(batches.len(), BATCHES_MAX);
    }
}
