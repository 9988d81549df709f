//! Forwarding of a request to the next hop and of its response to the client, with the headers that may be forwarded.
//!
//! Both directions have an allowlist: other headers (an API key, a cookie, hop-by-hop headers) are not forwarded.

use crate::listener::notice::{AfterResponse, apply_drain_notice, may_half_close};
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod, is_valid_header_value};
use crate::respond;
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::Bytes;
use http::header::{
    ACCEPT, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, LOCATION, RETRY_AFTER, VARY,
};
use http::response::Parts as Head;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version};
use pingora::http::ResponseHeader;
use pingora::prelude::{ErrorType, OrErr};
use pingora::protocols::http::ServerSession;
use replica_api::headers;
use std::time::Duration;
use telemetry::context::{TraceContext, tracestate};
use telemetry::request::RequestTrace;

/// Headers of a request that are forwarded to the next hop; beside them the context of its trace. `baggage` is not: it is
/// text of a client, which may be meant for another region.
static REQUEST_HEADERS: [HeaderName; 3] = [CONTENT_TYPE, ACCEPT, HeaderName::from_static(headers::PRIORITY)];
/// Headers of a response that are forwarded to the client.
static RESPONSE_HEADERS: [HeaderName; 13] = [
    CONTENT_TYPE,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    VARY,
    RETRY_AFTER,
    LOCATION,
    HeaderName::from_static(headers::PREFERENCE_APPLIED),
    HeaderName::from_static(headers::ERROR),
    HeaderName::from_static(headers::REGION),
    HeaderName::from_static(headers::TOKENS),
    HeaderName::from_static(headers::MODEL_REVISION),
    HeaderName::from_static(headers::HELD_MS),
    HeaderName::from_static(headers::COLD_START_MS),
];

/// Headers of a request that are forwarded to the next hop.
#[derive(Clone)]
pub(crate) struct ForwardedHeaders(RequestHead);

impl ForwardedHeaders {
    /// Copies the headers from the request, so that the session can be watched for a disconnect. A header in `decided`
    /// replaces the client's: of two, the next hop would read the first. The context of `trace` is sent with each attempt;
    /// without one, that of the client is forwarded.
    pub(crate) fn of(
        session: &ServerSession,
        decided: &[(&'static str, &str)],
        trace: Option<&RequestTrace>,
    ) -> ForwardedHeaders {
        let request = session.req_header();
        let mut head = RequestHead::new(UpstreamMethod::for_client(&request.method));
        head.put(HOST.as_str(), AUTHORITY);
        for (name, value) in decided {
            head.put(name, value);
        }
        for name in &REQUEST_HEADERS {
            if decided.iter().all(|(decided, _)| name != decided)
                && let Some(value) = request.headers.get(name)
                && is_valid_header_value(value.as_bytes())
            {
                head.put(name.as_str(), value);
            }
        }
        put_trace_context(&mut head, &request.headers, trace);
        ForwardedHeaders(head)
    }

    /// Returns the headers of a request that this process itself sends for a job, with a JSON body.
    pub(crate) fn of_job(decided: &[(&'static str, &str)]) -> ForwardedHeaders {
        let mut head = RequestHead::new(UpstreamMethod::Post);
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_TYPE.as_str(), "application/json");
        for (name, value) in decided {
            head.put(name, value);
        }
        ForwardedHeaders(head)
    }

    /// Builds the head for the next hop, for `path` and with `extra` headers.
    pub(crate) fn head(
        &self,
        path: &'static str,
        body: &Bytes,
        extra: &[(&'static str, &str)],
    ) -> RequestHead {
        let mut head = self.0.for_path(path);
        head.put(CONTENT_LENGTH.as_str(), body.len().to_string());
        for (name, value) in extra {
            head.put(name, value);
        }
        head
    }
}

/// Adds the context of the client's trace, within its limits. The state is valid only with the parent to which it belongs.
fn put_trace_context(head: &mut RequestHead, received: &HeaderMap, trace: Option<&RequestTrace>) {
    let lines = |name: &str| received.get_all(name).iter().map(HeaderValue::as_bytes);
    let is_continued = match trace {
        Some(trace) => trace.parent.is_some(),
        None => {
            let mut parents = lines(headers::TRACEPARENT);
            let parent = parents.next().filter(|_| parents.next().is_none());
            let parent = parent.filter(|parent| TraceContext::parse(parent).is_some());
            if let Some(parent) = parent {
                head.put(headers::TRACEPARENT, parent);
            }
            parent.is_some()
        }
    };
    if is_continued && let Some(state) = tracestate(lines(headers::TRACESTATE)) {
        head.put(headers::TRACESTATE, state.as_bytes());
    }
}

/// Completes when the client has disconnected. A client that sends bytes while it should wait violates the protocol and
/// is treated the same.
///
/// A client that has closed only its write side still reads the response, and on the wire it looks like one that has
/// disconnected. An interim response tells them apart: a waiting client ignores it, and a closed socket answers it with
/// a reset.
pub(crate) async fn client_disconnected(session: &mut ServerSession) {
    let error = loop {
        match session.read_body_or_idle(true).await {
            // The rest of the request body.
            Ok(None) => {}
            Ok(Some(_)) => return,
            Err(error) => break error,
        }
    };
    if !matches!(error.etype(), ErrorType::ConnectionClosed) || !may_half_close(session) {
        return;
    }
    if session.req_header().version == Version::HTTP_11 {
        for pause in HALF_CLOSED_PROBES {
            tokio::time::sleep(pause).await;
            // Not `write_continue_response`, which writes only the first one.
            let interim = ResponseHeader::build(100, Some(0)).expect("100 is a status");
            if session.write_response_header(Box::new(interim)).await.is_err() {
                return;
            }
        }
    }
    std::future::pending().await
}

/// Pauses between probes of a client that has closed its write side. Most responses are ready before the first probe.
/// The second detects the reset that the first one causes; each is one interim response, of which clients accept five
/// (Go's net/http).
const HALF_CLOSED_PROBES: [Duration; 4] =
    [Duration::from_millis(500), Duration::from_millis(250), Duration::from_secs(1), Duration::from_secs(4)];

/// Forwards `response` to the client with `extra` headers, and returns its connection to the pool.
pub(crate) async fn forward_response(
    session: &mut ServerSession,
    response: UpstreamResponse,
    upstream: &Upstream,
    extra: &[(&'static str, &str)],
) -> AfterResponse {
    let UpstreamResponse { head, body } = response;
    let head = forwarded_head(&head, extra, session.is_http2());
    let mut body = match body {
        ResponseBody::Buffered(body) => return respond::whole(session, head, body).await,
        ResponseBody::Streamed(body) => body,
    };
    apply_drain_notice(session);
    if session.req_header().method == Method::HEAD {
        // A HEAD request has no response body; dropping it closes its connection.
        drop(body);
        return respond::head_alone(session, head).await;
    }
    let forward = async {
        respond::begin(session, head).await?;
        while let Some(chunk) = body.chunk().await.or_err(ErrorType::ReadError, "reading a response")? {
            session.write_response_body(chunk, false).await?;
        }
        session.write_response_body(Bytes::new(), true).await
    };
    match forward.await {
        Ok(()) => {
            body.finish(upstream);
            AfterResponse::Reuse
        }
        Err(error) => {
            // The client or the region disconnected during a response. The client has a part of the response; closing
            // the connection is the only way to signal truncation in HTTP/1.1. Check the region if this happens often.
            tracing::warn!(%error, "failed to forward a response; connection closed");
            AfterResponse::Close
        }
    }
}

/// Builds the head for the client. The values of a received head share the buffer that it was read into. HTTP/2 keeps
/// values in the header table of its connection, and with them that buffer, so it gets copies.
fn forwarded_head(received: &Head, extra: &[(&'static str, &str)], is_http2: bool) -> Head {
    let mut head = respond::head(received.status.as_u16(), &[]);
    // Iterates over the received headers, which are fewer than the forwarded ones.
    for name in received.headers.keys().filter(|name| RESPONSE_HEADERS.contains(name)) {
        if let Some(value) = received.headers.get(name) {
            let copied = if is_http2 { HeaderValue::from_bytes(value.as_bytes()).ok() } else { None };
            head.headers.insert(name.clone(), copied.unwrap_or_else(|| value.clone()));
        }
    }
    extra.iter().for_each(|(name, value)| respond::put(&mut head, name, value));
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of the trace context that are forwarded for received ones.
    fn forwarded(received: &[(&'static str, &str)], trace: Option<&RequestTrace>) -> String {
        let mut map = HeaderMap::new();
        for (name, value) in received {
            map.append(*name, HeaderValue::from_bytes(value.as_bytes()).expect("a value"));
        }
        let mut head = RequestHead::new(UpstreamMethod::Get);
        put_trace_context(&mut head, &map, trace);
        let text = String::from_utf8(head.to_http1()).expect("text");
        text.lines().skip(1).filter(|line| !line.is_empty()).map(|line| format!("{line};")).collect()
    }

    #[test]
    fn a_trace_context_is_forwarded_if_it_is_valid_and_short() {
        let valid = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let (parent, state) = (("traceparent", valid), ("tracestate", "a=1"));
        let both = format!("traceparent: {valid};tracestate: a=1;");
        assert_eq!(forwarded(&[parent, state, ("baggage", "a=b")], None), both);
        assert_eq!(forwarded(&[state], None), "", "a state without its parent");
        for hostile in ["", "00", &valid[..54], &format!("{valid}-"), &"f".repeat(9000), "00-é"] {
            assert_eq!(forwarded(&[("traceparent", hostile), state], None), "", "{hostile}");
        }
        assert_eq!(forwarded(&[parent, parent, state], None), "", "of two, each could be meant");
        let long = format!("a={}", "x".repeat(600));
        assert_eq!(forwarded(&[parent, ("tracestate", &long)], None), format!("traceparent: {valid};"));
    }

    #[test]
    fn a_process_that_records_traces_forwards_the_state_and_not_the_parent() {
        let tracer = telemetry::Tracer::new(
            telemetry::sampling::HeadSampler::new(0.0, true),
            telemetry::sampling::KeepPolicy { slow: Duration::MAX, per_second: 0 },
        );
        let valid = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let begin = |header: &'static str| tracer.begin([header.as_bytes()], std::time::Instant::now());
        let received = [("traceparent", valid), ("tracestate", "a=1")];
        assert_eq!(forwarded(&received, Some(&begin(valid))), "tracestate: a=1;");
        assert_eq!(forwarded(&received, Some(&begin("00"))), "", "the state of another trace");
    }

    #[test]
    fn a_head_for_http2_does_not_keep_the_buffer_of_the_received_one() {
        for is_http2 in [false, true] {
            let buffer = Bytes::from(b"application/json, and the rest of the response".to_vec());
            let mut received = respond::head(200, &[]);
            let value = HeaderValue::from_maybe_shared(buffer.slice(..16)).expect("a valid value");
            received.headers.insert(CONTENT_TYPE, value);
            let head = forwarded_head(&received, &[], is_http2);
            drop(received);
            assert_eq!(head.headers[CONTENT_TYPE], "application/json");
            assert_eq!(buffer.is_unique(), is_http2);
        }
    }
}
