//! Traces of requests: what the spans of both roles share.

use crate::metrics::{EndpointLabel, RequestOutcome};
use http::Method;
use regions::{Host, HostPort};
use replica_api::api::Operation;
use std::time::Duration;
use telemetry::request::RequestTrace;
use telemetry::span::{Attribute, SpanKind, SpanName, SpanRecord};

/// Returns whether the trace of a request with this outcome is kept as an error: one of a server, or no complete response although
/// the client waited for it.
pub(crate) fn is_trace_error(outcome: RequestOutcome) -> bool {
    match outcome {
        RequestOutcome::Complete { status, .. } => status >= 500,
        RequestOutcome::Truncated { .. } | RequestOutcome::Shutdown => true,
        RequestOutcome::ClientDisconnected => false,
    }
}

/// Returns the span of a request at an endpoint.
pub(crate) fn request_span(
    trace: &RequestTrace,
    (method, endpoint): (&'static str, EndpointLabel),
    outcome: RequestOutcome,
    total: Duration,
) -> SpanRecord {
    let path = endpoint.as_str();
    let is_ok = matches!(outcome, RequestOutcome::Complete { status: ..400, .. });
    let error = (!is_ok).then(|| RequestOutcome::name(outcome.index()));
    let mut span = trace
        .request_span(SpanName::Request { method, route: path }, total)
        .with(Attribute::HttpMethod, method)
        .with(Attribute::HttpRoute, path)
        .with(Attribute::UrlPath, path)
        .with_number(Attribute::HttpStatus, outcome.status().map(u64::from))
        .with_word(Attribute::GenAiOperation, Operation::at(path).and_then(Operation::gen_ai_name))
        .with(Attribute::Outcome, RequestOutcome::name(outcome.index()))
        .with_word(Attribute::ErrorType, error);
    // By the semantic conventions, an error of a client is no error of the server's span.
    span.is_error = is_trace_error(outcome);
    span
}

/// Adds the address that an attempt was sent to.
pub(crate) fn sent_to(span: SpanRecord, address: Option<&HostPort>) -> SpanRecord {
    let span = span.of_kind(SpanKind::Client);
    let Some(address) = address else { return span };
    let span = match address.host() {
        Host::Ip(ip) => span.with_text(Attribute::ServerAddress, Some(&ip.to_string())),
        Host::Name(name) => span.with_text(Attribute::ServerAddress, Some(name.as_str())),
    };
    span.with(Attribute::ServerPort, u64::from(address.port()))
}

/// Returns the name of a method as the semantic conventions define it: clients can send any word.
pub(crate) fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        _ => "_OTHER",
    }
}
