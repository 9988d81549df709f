//! Traces of requests, from their begin to the queue of finished spans.

use metrics::{Counter, Exemplar, Family, labels, metric_set};
use rand::Rng;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use supervision::Mutex;
use telemetry_core::context::{SpanId, TraceContext, TraceId};
use telemetry_core::request::{RequestTrace, TraceRandom};
use telemetry_core::sampling::{FinishedTrace, HeadSampler, KeepLimiter, KeepPolicy, KeepReason};
use telemetry_core::span::SpanRecord;
use tokio::sync::Notify;

/// Maximum number of spans that wait for the export. Computed from the sizes of the types, the span of a request has 1.3 KiB with its
/// attributes, that of an attempt 0.75 KiB, and the others less, so the spans of a request have 0.5 KiB on average, and the queue 4 MiB.
/// It has at most 32 MiB more, if all spans are those of batches with the maximum of links.
pub const QUEUED_SPANS_MAX: usize = 8192;
/// Maximum number of requests whose spans wait: at a gateway, each keeps the record of its request, which grows with the number of
/// regions. Most of these records are also those of `GET /explain`, which keeps twice as many.
pub const QUEUED_REQUESTS_MAX: usize = 2048;
/// Number of waiting spans at which an export begins before its period is over.
pub(crate) const WAKE_SPANS: usize = 512;

labels! {
    /// Reason why spans or events of the log were dropped.
    pub enum DropReason {
        /// The queue was full: the collector is slow or gone.
        QueueFull = "queue_full",
        /// The collector rejected a whole export with an error, or did not accept it in time.
        ExportFailed = "export_failed",
        /// The collector accepted an export without these. Known by HTTP only: by gRPC the exporter hides the response, and
        /// rejected spans and events count as exported.
        Rejected = "rejected",
    }
}

labels! {
    /// Reason why the trace of a request was exported; the names are those of [`KeepReason`].
    pub enum KeptLabel {
        /// It was sampled at the start.
        Sampled = "sampled",
        /// The request failed.
        Error = "error",
        /// It was sent again.
        FailedOver = "failed_over",
        /// Its caller disconnected.
        Disconnected = "disconnected",
        /// It took long.
        Slow = "slow",
        /// None: more traces than the limit would have been kept, or sampled by clients, in a second.
        Limited = "limited",
    }
}

impl From<KeepReason> for KeptLabel {
    fn from(reason: KeepReason) -> KeptLabel {
        match reason {
            KeepReason::Sampled => KeptLabel::Sampled,
            KeepReason::Error => KeptLabel::Error,
            KeepReason::FailedOver => KeptLabel::FailedOver,
            KeepReason::Disconnected => KeptLabel::Disconnected,
            KeepReason::Slow => KeptLabel::Slow,
        }
    }
}

/// Counters of traces.
#[derive(Debug, Default)]
pub(crate) struct TraceCounts {
    kept: Family<KeptLabel>,
    pub(crate) exported: Counter,
    pub(crate) dropped: Family<DropReason>,
}

metric_set! {
    /// Traces of a process, if they are configured.
    pub struct TraceMetrics<'a> {
        /// Requests, and steps of jobs, whose spans were exported, by reason; `limited`: they were not, because of `tracing.kept_per_second`.
        pub kept: &'a Family<KeptLabel> = "meridian_{role}_traces_total" ["reason"],
        /// Spans that the collector accepted.
        pub exported: &'a Counter = "meridian_{role}_trace_spans_exported_total",
        /// Spans that were dropped, by reason. Requests are not affected.
        pub dropped: &'a Family<DropReason> = "meridian_{role}_trace_spans_dropped_total" ["reason"],
        /// Spans that wait for the next export.
        pub queued: usize = "meridian_{role}_trace_spans_queued",
        /// Limit of these spans.
        pub queued_max: usize = "meridian_{role}_trace_spans_queued_max",
    }
}

/// Tracer of a process; clones share its queue.
#[derive(Clone)]
pub struct Tracer {
    shared: Arc<Shared>,
    /// Limit of the traces that are kept without having been sampled.
    limiter: Arc<Mutex<KeepLimiter>>,
}

pub(crate) struct Shared {
    sampler: HeadSampler,
    keep: KeepPolicy,
    /// The same limit of those whose caller disconnected.
    disconnected_limiter: Mutex<KeepLimiter>,
    /// Limit of the traces that are sampled because of the flag of a client. Clients do not use the other one.
    client_limiter: Mutex<KeepLimiter>,
    queue: Mutex<SpanQueue>,
    /// Signal that many spans wait.
    pub(crate) wake: Notify,
    pub(crate) counts: TraceCounts,
}

/// Spans that wait for the export, by request.
#[derive(Default)]
struct SpanQueue {
    requests: Vec<WaitingSpans>,
    spans: usize,
}

/// Spans of one request, or the function that makes them from its record.
enum WaitingSpans {
    Made(Vec<SpanRecord>),
    Deferred(Box<dyn FnOnce() -> Vec<SpanRecord> + Send>),
}

impl Tracer {
    /// Creates a tracer; [`crate::start`] also starts the export of its spans.
    pub fn new(sampler: HeadSampler, keep: KeepPolicy) -> Tracer {
        let now = Instant::now();
        let limiter = || Mutex::independent(KeepLimiter::new(keep.per_second, now));
        let shared = Shared {
            sampler,
            keep,
            disconnected_limiter: limiter(),
            client_limiter: limiter(),
            queue: Mutex::new(SpanQueue::default()),
            wake: Notify::new(),
            counts: TraceCounts::default(),
        };
        Tracer { shared: Arc::new(shared), limiter: Arc::new(limiter()) }
    }

    /// Returns a tracer with the same queue and a limit of its own of the traces that are kept without having been sampled. So
    /// another kind of work, such as jobs, does not use the limit of requests.
    pub fn with_own_limit(&self) -> Tracer {
        let limiter = Mutex::independent(KeepLimiter::new(self.shared.keep.per_second, Instant::now()));
        Tracer { shared: self.shared.clone(), limiter: Arc::new(limiter) }
    }

    /// Returns whether the request has a trace: always, except in a build that measures the cost of traces. Called once for each request.
    pub fn records(&self) -> bool {
        #[cfg(feature = "alternate-traces")]
        return crate::alternation::is_on();
        #[cfg(not(feature = "alternate-traces"))]
        true
    }

    /// Begins the trace of a request that arrived at `arrived`, with the `traceparent` of its caller. A header that is
    /// invalid, or that is there more than once, begins a new trace.
    pub fn begin<'h>(
        &self,
        traceparent: impl IntoIterator<Item = &'h [u8]>,
        arrived: Instant,
    ) -> RequestTrace {
        let mut lines = traceparent.into_iter();
        let caller = match (lines.next(), lines.next()) {
            (Some(line), None) => TraceContext::parse(line),
            (Some(_), Some(_)) | (None, _) => None,
        };
        let mut rng = rand::rng();
        let random = TraceRandom {
            // A trace that is continued has an identifier.
            trace: if caller.is_none() { rng.random() } else { 0 },
            span: rng.random(),
        };
        let times = (arrived, since_1970_ns(arrived));
        RequestTrace::begin(caller, &self.shared.sampler, random, times, || {
            self.admit(&self.shared.client_limiter)
        })
    }

    /// Returns whether a trace without a caller is sampled. Every process with the same ratio decides the same.
    pub fn is_sampled(&self, trace: TraceId) -> bool {
        self.shared.sampler.is_sampled(None, trace, || false)
    }

    /// Continues a trace with a span that began at `began`, without a decision about it.
    pub fn continued(&self, span: TraceContext, parent: Option<SpanId>, began: Instant) -> RequestTrace {
        RequestTrace::continued(span, parent, (began, since_1970_ns(began)))
    }

    /// Decides about the trace of a finished request, and returns the reason to export it, if there is one.
    pub fn keep(&self, finished: &FinishedTrace) -> Option<KeepReason> {
        // A sampled trace needs no token: its number is bounded by the ratio, or by the limit of clients, or by its caller.
        let admit = |reason| match reason {
            KeepReason::Disconnected => self.admit(&self.shared.disconnected_limiter),
            KeepReason::Sampled | KeepReason::Error | KeepReason::FailedOver | KeepReason::Slow => {
                self.admit(&self.limiter)
            }
        };
        let reason = self.shared.keep.decide(finished, admit)?;
        self.shared.counts.kept.count(reason.into());
        Some(reason)
    }

    /// Decides whether the trace of a request is exported that is about to be sent again, so that the attempt has the flag.
    pub fn admit_failover(&self) -> bool {
        self.admit(&self.limiter)
    }

    /// Takes a token; counts the trace if there is none.
    fn admit(&self, limiter: &Mutex<KeepLimiter>) -> bool {
        let is_admitted = limiter.lock().admit(Instant::now());
        if !is_admitted {
            self.shared.counts.kept.count(KeptLabel::Limited);
        }
        is_admitted
    }

    /// Puts the spans of a finished request into the queue. If it is full, they are dropped and counted.
    pub fn export(&self, spans: Vec<SpanRecord>) {
        self.enqueue(spans.len(), WaitingSpans::Made(spans));
    }

    /// Puts the `count` spans that `spans` returns into the queue, in the same way. It is called by the task that exports them: that
    /// task makes the spans of many requests one after another, which needs less CPU time than to make them between requests.
    pub fn export_deferred(&self, count: usize, spans: impl FnOnce() -> Vec<SpanRecord> + Send + 'static) {
        self.enqueue(count, WaitingSpans::Deferred(Box::new(spans)));
    }

    fn enqueue(&self, count: usize, spans: WaitingSpans) {
        let mut queue = self.shared.queue.lock();
        if queue.spans + count > QUEUED_SPANS_MAX || queue.requests.len() >= QUEUED_REQUESTS_MAX {
            drop(queue);
            self.shared.counts.dropped.of(DropReason::QueueFull).add(count as u64);
            return;
        }
        queue.requests.push(spans);
        queue.spans += count;
        let is_many = queue.spans >= WAKE_SPANS;
        drop(queue);
        if is_many {
            self.shared.wake.notify_one();
        }
    }

    /// Takes all spans that wait, by request.
    pub fn take(&self) -> impl Iterator<Item = Vec<SpanRecord>> {
        let waiting = std::mem::take(&mut *self.shared.queue.lock()).requests;
        waiting.into_iter().map(|spans| match spans {
            WaitingSpans::Made(spans) => spans,
            WaitingSpans::Deferred(spans) => spans(),
        })
    }

    /// Returns the metrics.
    pub fn metrics(&self) -> TraceMetrics<'_> {
        let counts = &self.shared.counts;
        TraceMetrics {
            kept: &counts.kept,
            exported: &counts.exported,
            dropped: &counts.dropped,
            queued: self.shared.queue.lock().spans,
            queued_max: QUEUED_SPANS_MAX,
        }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }
}

/// Returns the exemplar of a value that was observed at `at`, a time of the past, in a request with this trace. Its spans must be
/// exported: an exemplar names a trace that a collector has, unless the export fails.
pub fn exemplar(trace: TraceId, at: Instant) -> Exemplar {
    Exemplar { trace_id: trace.get().to_be_bytes(), at_ms: since_1970_ns(at) / 1_000_000 }
}

/// Returns a time of the past in nanoseconds since 1970.
fn since_1970_ns(time: Instant) -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ns = u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX);
    let passed = u64::try_from(time.elapsed().as_nanos()).unwrap_or(u64::MAX);
    now_ns.saturating_sub(passed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use telemetry_core::sampling::FailoverTrace;
    use telemetry_core::span::SpanName;

    fn tracer(per_second: u32) -> Tracer {
        Tracer::new(HeadSampler::new(0.0, true), KeepPolicy { slow: Duration::from_secs(1), per_second })
    }

    fn spans(tracer: &Tracer, count: usize) -> Vec<SpanRecord> {
        let trace = tracer.begin([], Instant::now());
        (0..count).map(|_| trace.request_span(SpanName::Route, Duration::ZERO)).collect()
    }

    #[test]
    fn a_full_queue_drops_and_counts_spans() {
        let tracer = tracer(1);
        tracer.export(spans(&tracer, QUEUED_SPANS_MAX - 3));
        tracer.export(spans(&tracer, 3));
        let dropped = || tracer.metrics().dropped.of(DropReason::QueueFull).get();
        assert_eq!((tracer.metrics().queued, dropped()), (QUEUED_SPANS_MAX, 0), "at the limit");
        tracer.export(spans(&tracer, 2));
        tracer.export_deferred(3, || panic!("spans without room are not made"));
        assert_eq!((tracer.metrics().queued, dropped()), (QUEUED_SPANS_MAX, 5), "past it");
        assert_eq!(tracer.take().map(|spans| spans.len()).sum::<usize>(), QUEUED_SPANS_MAX);
        tracer.export(spans(&tracer, 1));
        assert_eq!((tracer.metrics().queued, dropped()), (1, 5));
    }

    #[test]
    fn the_number_of_waiting_requests_is_limited() {
        let tracer = tracer(1);
        (0..QUEUED_REQUESTS_MAX).for_each(|_| tracer.export_deferred(1, Vec::new));
        assert_eq!(tracer.metrics().dropped.of(DropReason::QueueFull).get(), 0, "at the limit");
        tracer.export_deferred(1, Vec::new);
        assert_eq!(tracer.metrics().dropped.of(DropReason::QueueFull).get(), 1, "past it");
        assert_eq!(tracer.take().count(), QUEUED_REQUESTS_MAX);
    }

    #[test]
    fn deferred_spans_are_made_when_they_are_taken() {
        let tracer = tracer(1);
        let later = tracer.clone();
        tracer.export_deferred(2, move || spans(&later, 2));
        tracer.export(spans(&tracer, 1));
        assert_eq!(tracer.metrics().queued, 3);
        assert_eq!(tracer.take().map(|spans| spans.len()).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(tracer.metrics().queued, 0);
    }

    #[test]
    fn failed_requests_are_kept_within_their_limit_and_sampled_ones_without() {
        let tracer = tracer(2);
        let finished = |is_sampled| FinishedTrace {
            is_sampled,
            is_error: true,
            is_disconnected: false,
            failover: FailoverTrace::None,
            total: Duration::ZERO,
        };
        let kept: Vec<_> = (0..3).map(|_| tracer.keep(&finished(false))).collect();
        assert_eq!(kept, [Some(KeepReason::Error), Some(KeepReason::Error), None]);
        assert_eq!(tracer.keep(&finished(true)), Some(KeepReason::Sampled));
        let counted = |label| tracer.metrics().kept.of(label).get();
        assert_eq!(KeptLabel::ALL.map(counted), [1, 2, 0, 0, 0, 1]);
    }

    #[test]
    fn flags_of_clients_failovers_and_disconnected_callers_are_limited() {
        let tracer = tracer(2);
        let client = &b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"[..];
        let sampled: Vec<_> = (0..3).map(|_| tracer.begin([client], Instant::now()).is_sampled).collect();
        assert_eq!(sampled, [true, true, false]);
        // The flag of an attempt after a failed one uses the limit of kept traces, and the end of the request does not again.
        let failovers: Vec<_> = (0..3).map(|_| tracer.admit_failover()).collect();
        assert_eq!(failovers, [true, true, false]);
        let kept = |failover, is_disconnected| {
            let (is_sampled, is_error, total) = (false, false, Duration::ZERO);
            tracer.keep(&FinishedTrace { is_sampled, is_error, is_disconnected, failover, total })
        };
        assert_eq!(kept(FailoverTrace::Exported, false), Some(KeepReason::FailedOver));
        assert_eq!(kept(FailoverTrace::Limited, false), None);
        assert_eq!(
            kept(FailoverTrace::None, true),
            Some(KeepReason::Disconnected),
            "that limit is another one"
        );
        let limited = tracer.metrics().kept.of(KeptLabel::Limited).get();
        assert_eq!(limited, 2, "one of a client and one failover");
    }

    #[test]
    fn another_limit_is_not_that_of_requests() {
        let tracer = tracer(1);
        let jobs = tracer.with_own_limit();
        assert_eq!([jobs.admit_failover(), jobs.admit_failover()], [true, false]);
        assert!(tracer.admit_failover(), "no job has used it");
        jobs.export(spans(&tracer, 1));
        assert_eq!(tracer.metrics().queued, 1, "one queue");
    }

    #[test]
    fn a_trace_is_continued_only_from_one_valid_header() {
        let tracer = tracer(1);
        let valid = &b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"[..];
        let of = |lines: &[&[u8]]| tracer.begin(lines.iter().copied(), Instant::now());
        let continued = of(&[valid]);
        assert_eq!(continued.trace.to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert!(continued.is_sampled && continued.parent.is_some());
        for lines in [vec![], vec![valid, valid], vec![&valid[..54]], vec![&b"\xff"[..]]] {
            let begun = of(&lines);
            assert!(begun.parent.is_none() && !begun.is_sampled);
            assert_ne!(begun.trace, continued.trace);
        }
        assert_ne!(of(&[]).trace, of(&[]).trace);
    }
}
