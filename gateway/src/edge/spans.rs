//! Spans of a finished request. They are made from its record by the task that exports them: until then, a request has no
//! spans, only the identifiers that were sent to regions.

use crate::events::{FinishedRequest, RequestTimes};
use crate::metrics::ClientProtocol;
use crate::trace::{request_span, sent_to};
use gateway_core::labels::AttemptResult;
use gateway_core::trail::{AttemptEnd, AttemptRecord};
use regions::catalogue::Catalogue;
use regions::id::{InstanceName, TenantId};
use regions::set::RegionIndex;
use replica_api::api::Operation;
use replica_api::priority::Priority;
use std::time::Instant;
use telemetry::request::RequestTrace;
use telemetry::sampling::KeepReason;
use telemetry::span::{Attribute, SpanName, SpanRecord};

/// Facts about a request that only its trace has.
pub(super) struct TraceDetails {
    pub(super) method: &'static str,
    pub(super) protocol: ClientProtocol,
    pub(super) priority: Option<Priority>,
    pub(super) reason: KeepReason,
}

/// Value of `gen_ai.provider.name`.
const GEN_AI_PROVIDER: &str = "meridian";

/// Numbers of the spans that no other process refers to.
const ADMISSION: u64 = 0;
const ROUTE: u64 = 1;
const RESPOND: u64 = 2;

/// Returns the number of spans of a request.
pub(super) fn count(request: &FinishedRequest) -> usize {
    let attempts = request.trail.attempts().filter(|attempt| attempt.trace.is_some()).count();
    1 + 2 * usize::from(request.routed_at.is_some()) + attempts + usize::from(request.served_by.is_some())
}

/// Returns the spans of a request: the request, admission, route, each attempt, and the sending of the response.
pub(super) fn of_request(
    trace: &RequestTrace,
    request: &FinishedRequest,
    details: &TraceDetails,
    catalogue: &Catalogue,
) -> Vec<SpanRecord> {
    let mut spans = Vec::with_capacity(count(request));
    spans.push(whole_span(trace, request, details, catalogue));
    if let Some((began, ended)) = request.routed_at {
        let admission = trace.span.child(ADMISSION);
        spans.push(trace.child_span(admission, SpanName::Admission, (request.arrived, began)));
        spans.push(route_span(trace, request, (began, ended), catalogue));
    }
    spans.extend(request.trail.attempts().filter_map(|attempt| attempt_span(trace, attempt, catalogue)));
    if let Some((_, RequestTimes { to_head, .. })) = request.served_by {
        let sent = (request.arrived + to_head, request.arrived + request.total);
        spans.push(trace.child_span(trace.span.child(RESPOND), SpanName::Respond, sent));
    }
    spans
}

fn whole_span(
    trace: &RequestTrace,
    request: &FinishedRequest,
    details: &TraceDetails,
    catalogue: &Catalogue,
) -> SpanRecord {
    let FinishedRequest { id, endpoint, outcome, tenant, trail, served_by, tokens, total, resolved, .. } =
        request;
    let resolved = resolved.as_ref();
    let version = match details.protocol {
        ClientProtocol::Http1 => "1.1",
        ClientProtocol::Http2 => "2",
    };
    let scheme = if request.tls_ended_here { "https" } else { "http" };
    let operation = Operation::at(endpoint.as_str()).and_then(Operation::gen_ai_name);
    let span = request_span(trace, (details.method, *endpoint), *outcome, *total)
        .with(Attribute::UrlScheme, scheme)
        .with_word(Attribute::GenAiProvider, operation.map(|_| GEN_AI_PROVIDER))
        .with(Attribute::NetworkProtocolVersion, version)
        .with(Attribute::KeepReason, details.reason.as_str())
        .with_text(Attribute::RequestId, Some(id))
        .with_text(Attribute::Tenant, tenant.as_ref().map(TenantId::as_str))
        .with_word(Attribute::Priority, details.priority.map(Priority::as_str))
        .with_text(Attribute::GenAiModel, resolved.map(|resolved| resolved.deployment.as_str()))
        .with_text(Attribute::Residency, resolved.map(|resolved| resolved.policy.residency.as_str()))
        .with_number(Attribute::Inputs, resolved.map(|resolved| resolved.cost.inputs))
        .with_number(Attribute::TokensEstimated, resolved.map(|resolved| resolved.cost.tokens))
        .with_number(Attribute::GenAiInputTokens, *tokens)
        .with(Attribute::Attempts, trail.count() as u64)
        .with_number(Attribute::Parts, Some(trail.parts() as u64).filter(|parts| *parts > 1));
    in_region(span, served_by.map(|(region, _)| region), catalogue)
}

fn route_span(
    trace: &RequestTrace,
    request: &FinishedRequest,
    times: (Instant, Instant),
    catalogue: &Catalogue,
) -> SpanRecord {
    let span = trace.child_span(trace.span.child(ROUTE), SpanName::Route, times);
    let Some(route) = request.trail.route() else { return span };
    let named = |region: RegionIndex| catalogue.region(region).id.as_str();
    let spillover = route.spillover.as_ref().and_then(|spillover| spillover.to);
    span.with(Attribute::Candidates, route.candidates.len() as u64)
        .with(Attribute::RejectedRegions, route.rejected.iter().count() as u64)
        .with_text(
            Attribute::PrimaryRegion,
            route.candidates.first().map(|candidate| named(candidate.region)),
        )
        .with_text(Attribute::SpilloverRegion, spillover.map(named))
        .with_word(Attribute::ErrorType, route.rejection.map(|rejection| rejection.reason.as_str()))
}

/// Returns the span of an attempt; `None` for one that was sent without a trace.
fn attempt_span(trace: &RequestTrace, attempt: &AttemptRecord, catalogue: &Catalogue) -> Option<SpanRecord> {
    let sent = attempt.trace.as_ref()?;
    let times = (attempt.began, attempt.began + attempt.took);
    let result = AttemptResult::from(attempt.end).as_str();
    let (status, error) = match attempt.end {
        AttemptEnd::Responded { status } => (Some(status), (status >= 400).then_some(result)),
        // The other attempt of a hedged request was faster, or the client has disconnected.
        AttemptEnd::Cancelled => (None, None),
        AttemptEnd::Failed(_) => (None, Some(result)),
    };
    let resent = u64::from(attempt.number).saturating_sub(1);
    let span = trace.child_span(sent.span, SpanName::Attempt, times);
    let span = sent_to(in_region(span, Some(attempt.region), catalogue), sent.address.as_ref())
        .with(Attribute::HttpMethod, "POST")
        .with(Attribute::AttemptNumber, u64::from(attempt.number))
        .with_number(Attribute::HttpResendCount, Some(resent).filter(|count| *count > 0))
        .with(Attribute::AttemptCause, attempt.cause.as_str())
        .with(Attribute::AttemptEnd, result)
        .with_text(Attribute::Spoke, attempt.instance.as_ref().map(InstanceName::as_str))
        .with_number(Attribute::HttpStatus, status.map(u64::from))
        .failed(error);
    Some(span)
}

fn in_region(span: SpanRecord, region: Option<RegionIndex>, catalogue: &Catalogue) -> SpanRecord {
    let Some(region) = region.map(|region| catalogue.region(region).id.as_str()) else { return span };
    let cloud = region.split_once('/').map(|(cloud, _)| cloud);
    span.with_text(Attribute::CloudRegion, Some(region)).with_text(Attribute::CloudProvider, cloud)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{EndpointLabel, RequestOutcome};
    use gateway_core::outcome::AttemptFailure;
    use gateway_core::timing::RegionTiming;
    use gateway_core::trail::{AttemptCause, AttemptTrace, Trail};
    use std::time::Duration;
    use telemetry::context::{SpanId, TraceContext, TraceId};
    use telemetry::request::TraceRandom;
    use telemetry::sampling::{FailoverTrace, HeadSampler};
    use telemetry::span::{AttributeValue, SpanKind};

    fn value(span: &SpanRecord, attribute: Attribute) -> Option<AttributeValue> {
        span.attributes.iter().find(|(name, _)| *name == attribute).map(|(_, value)| value.clone())
    }

    #[test]
    fn a_failed_over_request_has_a_span_for_each_attempt_below_its_own() {
        let catalogue = Catalogue::builtin();
        let region = |id: &str| catalogue.index_of(&id.parse().unwrap()).unwrap();
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let attempt = |number| AttemptTrace {
            span: SpanId::from_random(number),
            is_exported: number == 12,
            address: Some("spoke.example.com:7100".parse().unwrap()),
        };
        let mut trail = Trail::default();
        let first = trail.began(region("aws/us-east-1"), None, AttemptCause::First, 0, began);
        trail.set_trace(first, attempt(11));
        trail.ended(first, AttemptEnd::Failed(AttemptFailure::Unreachable), began + second);
        let retry = trail.began(region("gcp/europe-west4"), None, AttemptCause::Retry, 0, began + second);
        trail.set_trace(retry, attempt(12));
        trail.ended(retry, AttemptEnd::Responded { status: 200 }, began + 2 * second);
        assert_eq!(trail.failover(), FailoverTrace::Exported);
        let served_by = RequestTimes { to_head: 2 * second, waited: second, region: RegionTiming::default() };
        let request = FinishedRequest {
            id: "r".to_owned(),
            arrived: began,
            at_ms: 0,
            tls_ended_here: false,
            endpoint: EndpointLabel::at("/v1/embeddings"),
            outcome: RequestOutcome::Complete { status: 200, code: None },
            tenant: Some("docs".parse().unwrap()),
            trail,
            routed_at: Some((began, began)),
            served_by: Some((region("gcp/europe-west4"), served_by)),
            tokens: Some(7),
            total: 3 * second,
            resolved: None,
            receipt: None,
            trace: None,
        };
        let caller =
            TraceContext { trace: TraceId::from_random(1), span: SpanId::from_random(2), is_sampled: false };
        let random = TraceRandom { trace: 0, span: 3 };
        let trace = RequestTrace::begin(
            Some(caller),
            &HeadSampler::new(0.0, true),
            random,
            (began, 1_000_000_000),
            || false,
        );
        let details = TraceDetails {
            method: "POST",
            protocol: ClientProtocol::Http2,
            priority: Some(Priority::Interactive),
            reason: KeepReason::FailedOver,
        };
        let spans = of_request(&trace, &request, &details, &catalogue);
        assert_eq!(spans.len(), count(&request));
        let names: Vec<_> = spans.iter().map(|span| span.name.text().into_owned()).collect();
        assert_eq!(names, ["POST /v1/embeddings", "admission", "route", "attempt", "attempt", "respond"]);
        let [whole, parts @ ..] = spans.as_slice() else { panic!("{spans:#?}") };
        assert_eq!((whole.id, whole.parent), (trace.span, Some(caller.span)));
        assert!(spans.iter().all(|span| span.trace == caller.trace));
        assert!(parts.iter().all(|span| span.parent == Some(whole.id)), "{parts:#?}");
        assert_eq!(value(whole, Attribute::CloudRegion), Some(AttributeValue::text("gcp/europe-west4")));
        assert_eq!(value(whole, Attribute::GenAiInputTokens), Some(7.into()));
        assert_eq!(value(whole, Attribute::UrlScheme), Some("http".into()));
        assert_eq!(value(whole, Attribute::GenAiProvider), Some("meridian".into()));
        assert_eq!(value(whole, Attribute::KeepReason), Some("failed_over".into()));
        let (failed, responded) = (&parts[2], &parts[3]);
        assert_eq!((failed.id.get(), failed.is_error, failed.kind), (11, true, SpanKind::Client));
        assert_eq!(value(failed, Attribute::ErrorType), Some("unreachable".into()));
        assert_eq!(value(failed, Attribute::ServerAddress), Some(AttributeValue::text("spoke.example.com")));
        assert_eq!((responded.id.get(), responded.is_error), (12, false));
        assert_eq!((responded.start_ns, responded.end_ns), (2_000_000_000, 3_000_000_000));
        assert_eq!(value(responded, Attribute::HttpResendCount), Some(1.into()));
    }
}
