//! Trace of one request in one process.

use crate::context::{SpanId, TraceContext, TraceId};
use crate::sampling::HeadSampler;
use crate::span::{SpanKind, SpanName, SpanRecord};
use std::time::{Duration, Instant};

/// Room for the attributes of a request's span, so that it is allocated once.
const REQUEST_ATTRIBUTES: usize = 24;

/// Random bits of a request: for its trace, and for its span.
#[derive(Clone, Copy, Debug)]
pub struct TraceRandom {
    /// Bits of a new trace's identifier.
    pub trace: u128,
    /// Bits of the identifier of the request's span.
    pub span: u64,
}

/// Trace of one request: the span of the request in this process, and the times to which the others refer.
#[derive(Clone, Copy, Debug)]
pub struct RequestTrace {
    /// Trace.
    pub trace: TraceId,
    /// Span of the request in this process.
    pub span: SpanId,
    /// Span of the caller, in another process.
    pub parent: Option<SpanId>,
    /// Whether it was sampled at the start.
    pub is_sampled: bool,
    arrived: Instant,
    /// `arrived` in nanoseconds since 1970.
    arrived_ns: u64,
}

impl RequestTrace {
    /// Begins the trace of a request with the context of its caller, if it is valid, or a new one. The request arrived at
    /// `arrived`, which is `arrived_ns` nanoseconds since 1970. `admit` takes a token of the limit of the traces that clients sample.
    pub fn begin(
        caller: Option<TraceContext>,
        sampler: &HeadSampler,
        random: TraceRandom,
        (arrived, arrived_ns): (Instant, u64),
        admit: impl FnOnce() -> bool,
    ) -> RequestTrace {
        let trace = caller.map_or_else(|| TraceId::from_random(random.trace), |caller| caller.trace);
        RequestTrace {
            trace,
            span: SpanId::from_random(random.span),
            parent: caller.map(|caller| caller.span),
            is_sampled: sampler.is_sampled(caller.as_ref(), trace, admit),
            arrived,
            arrived_ns,
        }
    }

    /// Continues a trace with a span that began at `began`, which is `began_ns` nanoseconds since 1970: work that no request waits for,
    /// such as an attempt at a job.
    pub fn continued(
        span: TraceContext,
        parent: Option<SpanId>,
        (began, began_ns): (Instant, u64),
    ) -> RequestTrace {
        let TraceContext { trace, span, is_sampled } = span;
        RequestTrace { trace, span, parent, is_sampled, arrived: began, arrived_ns: began_ns }
    }

    /// Returns the span of the request as its context.
    pub fn context(&self) -> TraceContext {
        TraceContext { trace: self.trace, span: self.span, is_sampled: self.is_sampled }
    }

    /// Returns a time in nanoseconds since 1970.
    pub fn since_1970_ns(&self, time: Instant) -> u64 {
        let after =
            u64::try_from(time.saturating_duration_since(self.arrived).as_nanos()).unwrap_or(u64::MAX);
        let before =
            u64::try_from(self.arrived.saturating_duration_since(time).as_nanos()).unwrap_or(u64::MAX);
        self.arrived_ns.saturating_add(after).saturating_sub(before)
    }

    /// Returns the span of the request, which took `total`.
    pub fn request_span(&self, name: SpanName, total: Duration) -> SpanRecord {
        let end = u64::try_from(total.as_nanos()).unwrap_or(u64::MAX);
        SpanRecord {
            trace: self.trace,
            id: self.span,
            parent: self.parent,
            is_parent_remote: self.parent.is_some(),
            name,
            kind: SpanKind::Server,
            start_ns: self.arrived_ns,
            end_ns: self.arrived_ns.saturating_add(end),
            is_error: false,
            attributes: Vec::with_capacity(REQUEST_ATTRIBUTES),
            links: Vec::new(),
        }
    }

    /// Returns the span as one within the process, which ended at `ended`.
    pub fn internal_span(&self, name: SpanName, ended: Instant) -> SpanRecord {
        let times = (self.arrived_ns, self.since_1970_ns(ended));
        SpanRecord::new(self.trace, (self.span, self.parent), name, times)
    }

    /// Returns a span of the request with this identifier.
    pub fn child_span(&self, id: SpanId, name: SpanName, (began, ended): (Instant, Instant)) -> SpanRecord {
        let times = (self.since_1970_ns(began), self.since_1970_ns(ended));
        SpanRecord::new(self.trace, (id, Some(self.span)), name, times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "an instant is needed, any one")]
    fn a_request_continues_the_trace_of_its_caller_or_begins_one() {
        let now = (Instant::now(), 1_700_000_000_000_000_000);
        let random = TraceRandom { trace: 3, span: 4 };
        let never = HeadSampler::new(0.0, true);
        let own = RequestTrace::begin(None, &never, random, now, || false);
        assert_eq!((own.trace.get(), own.span.get(), own.parent, own.is_sampled), (3, 4, None, false));
        let caller =
            TraceContext { trace: TraceId::from_random(8), span: SpanId::from_random(9), is_sampled: true };
        let continued = RequestTrace::begin(Some(caller), &never, random, now, || true);
        assert_eq!((continued.trace.get(), continued.span.get()), (8, 4));
        assert_eq!((continued.parent, continued.is_sampled), (Some(caller.span), true));
        let later = now.0 + Duration::from_nanos(1500);
        let (route, request) = (
            continued.child_span(continued.span.child(0), SpanName::Route, (now.0, later)),
            continued.request_span(SpanName::Route, Duration::from_micros(2)),
        );
        assert_eq!((route.start_ns, route.end_ns), (now.1, now.1 + 1500));
        assert_eq!((request.start_ns, request.end_ns), (now.1, now.1 + 2000));
        assert_eq!((route.parent, request.parent), (Some(continued.span), Some(caller.span)));
        assert!(request.is_parent_remote && !route.is_parent_remote);
        let own = TraceContext { span: SpanId::from_random(11), ..caller };
        let work = RequestTrace::continued(own, Some(caller.span), now);
        assert_eq!((work.context(), work.parent), (own, Some(caller.span)));
        let span = work.internal_span(SpanName::Queue, later);
        assert_eq!((span.id, span.parent, span.is_parent_remote), (own.span, Some(caller.span), false));
        assert_eq!((span.start_ns, span.end_ns), (now.1, now.1 + 1500));
        assert_eq!(continued.since_1970_ns(now.0 - Duration::from_nanos(5)), now.1 - 5, "before the arrival");
    }
}
