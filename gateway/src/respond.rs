//! Writes responses: the only module that renders errors to clients and that converts response heads.

use bytes::Bytes;
use gateway_core::endpoint;
use gateway_core::head::{FIELDS_MAX, HEAD_BYTES_MAX, HeadProblem, TARGET_BYTES_MAX};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, RETRY_AFTER, VARY};
use http::response::Parts as Head;
use http::{HeaderValue, Method, StatusCode};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::date::get_cached_date;
use replica_api::api::Dialect;
use replica_api::error::{ErrorBody, ErrorCode, Remedy};
use replica_api::headers;
use replica_api::limits::MAX_BODY_BYTES;
use std::time::Duration;

use crate::listener::notice::{AfterResponse, apply_drain_notice};
use crate::names;

/// Rejection of a request, before it is rendered as an HTTP response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) code: ErrorCode,
    /// One sentence: problem, limit, fix.
    pub(crate) message: String,
    /// Field or header at fault.
    pub(crate) param: Option<&'static str>,
    /// Time to wait before a retry, if known.
    pub(crate) retry_after: Option<Duration>,
    /// Additional response headers, such as the rate limits.
    pub(crate) headers: Vec<(&'static str, String)>,
    /// Bytes of the body that were processed before the rejection; they count against the tenant's rate limit.
    pub(crate) processed_bytes: u64,
}

impl Rejection {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Rejection {
        Rejection {
            code,
            message: message.into(),
            param: None,
            retry_after: None,
            headers: Vec::new(),
            processed_bytes: 0,
        }
    }

    pub(crate) fn of(mut self, param: &'static str) -> Rejection {
        self.param = Some(param);
        self
    }

    pub(crate) fn after(mut self, wait: Duration) -> Rejection {
        self.retry_after = Some(wait);
        self
    }

    pub(crate) fn with_processed(mut self, bytes: usize) -> Rejection {
        self.processed_bytes = bytes as u64;
        self
    }

    pub(crate) fn with(mut self, headers: Vec<(&'static str, String)>) -> Rejection {
        self.headers = headers;
        self
    }
}

/// Reason for which a request was not forwarded.
pub(crate) enum ForwardError {
    Rejected(Rejection),
    ClientDisconnected,
}

impl From<Rejection> for ForwardError {
    fn from(refusal: Rejection) -> ForwardError {
        ForwardError::Rejected(refusal)
    }
}

/// Default retry-after where waiting helps: twice the time after which an unresponsive region counts as lost.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(3);
/// Maximum bytes of a rejected body that are still read, so that the client receives the response: a client that is
/// writing when the connection closes gets a reset instead.
const DISCARD_MAX: usize = MAX_BODY_BYTES;
/// Maximum length of a body that is read after a rejection so that its connection can be reused: it arrived with its
/// head or arrives within a round trip, which is less than a new connection takes.
const KEPT_BODY_MAX: usize = 64 << 10;
/// Timeout for that.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);
/// Time by which it may delay the response.
const DISCARD_FIRST_TIMEOUT: Duration = Duration::from_secs(1);

/// Responds with a rejection.
pub(crate) async fn reject(
    session: &mut ServerSession,
    rejection: &Rejection,
    extra: &[(&'static str, &str)],
) -> AfterResponse {
    let dialect = Dialect::of_path(endpoint::replica_path(session.req_header().uri.path()));
    let body = dialect.body(rejection.code, &rejection.message, rejection.param);
    let mut head = head(dialect.status(rejection.code), extra);
    put(&mut head, headers::ERROR, rejection.code.as_str());
    rejection.headers.iter().for_each(|(name, value)| put(&mut head, name, value));
    if rejection.code.remedy() == Remedy::Wait || rejection.retry_after.is_some() {
        let wait = rejection.retry_after.unwrap_or(RETRY_AFTER_DEFAULT);
        put(&mut head, headers::RETRY_AFTER_MS, &wait.as_millis().max(1).to_string());
        put(&mut head, RETRY_AFTER.as_str(), &wait.as_millis().div_ceil(1000).max(1).to_string());
    }
    let keeps_alive = may_keep_alive(session);
    session.set_close_on_response_before_downstream_finish(!keeps_alive);
    // A client that has stopped sending gets no further timeout.
    let stalls = rejection.code == ErrorCode::BodyTimeout;
    if session.is_http2() && keeps_alive && !stalls {
        // Some clients (curl before 8) treat a response that arrives before they have sent their body as an error.
        tokio::time::timeout(DISCARD_FIRST_TIMEOUT, discard(session)).await.ok();
    }
    let after = json(session, head, body.into()).await;
    if stalls {
        return AfterResponse::Close;
    }
    // Over HTTP/2 the rest is discarded at the end of the request.
    if after == AfterResponse::Reuse && !session.is_http2() && !session.is_body_done() {
        let after = discard(session).await;
        return if keeps_alive { after } else { AfterResponse::Close };
    }
    after
}

/// Responds to a request that panicked, if no response was begun. The position in the request is unknown, so its
/// connection is closed.
pub(crate) async fn panicked(session: &mut ServerSession, extra: &[(&'static str, &str)]) -> AfterResponse {
    if session.response_written().is_none() {
        let message = "The request failed because of a defect of this server, which is in its log; other requests are \
                       not affected.";
        session.set_keepalive(None);
        reject(session, &Rejection::new(ErrorCode::Internal, message), extra).await;
    }
    AfterResponse::Close
}

/// Returns whether the connection may be kept although the rest of the body is not needed: if the rest is small and
/// certain to arrive. A client that sent `expect` and is rejected may send the body or not, so the start of its next
/// request is unknown.
fn may_keep_alive(session: &ServerSession) -> bool {
    let declared =
        session.get_header(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    declared.is_some_and(|length| length <= KEPT_BODY_MAX) && session.get_header(EXPECT).is_none()
}

/// Responds 200 with a JSON body.
pub(crate) async fn ok(
    session: &mut ServerSession,
    body: Vec<u8>,
    extra: &[(&'static str, &str)],
) -> AfterResponse {
    json(session, head(200, extra), body.into()).await
}

/// Responds with a status and a JSON body. If the body of the request was not read to its end, the rest is discarded and the connection
/// closes.
pub(crate) async fn json_body(session: &mut ServerSession, status: u16, body: Bytes) -> AfterResponse {
    let after = json(session, head(status, &[]), body).await;
    if after == AfterResponse::Close || session.is_body_done() {
        return after;
    }
    discard(session).await;
    AfterResponse::Close
}

/// Responds to a head that could not be parsed; the caller closes the connection.
pub(crate) async fn malformed_request(session: &mut ServerSession) {
    let code = ErrorCode::MalformedRequest;
    let body = ErrorBody::new(code, "The request is not valid HTTP/1.1.", None).to_json();
    let mut head = head(code.status(), &[]);
    session.set_keepalive(None);
    put(&mut head, headers::ERROR, code.as_str());
    put(&mut head, CONTENT_TYPE.as_str(), "application/json");
    put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
    write_all(session, head, body.into()).await;
}

/// Returns the bytes of the response to an invalid head; it is the last on its connection.
pub(crate) fn malformed_head(problem: HeadProblem) -> Vec<u8> {
    let (code, message) = match problem {
        HeadProblem::TooLong => (
            ErrorCode::HeadTooLarge,
            format!("The head of the request has more than {HEAD_BYTES_MAX} bytes."),
        ),
        HeadProblem::TargetTooLong => (
            ErrorCode::HeadTooLarge,
            format!("The target of the request has more than {TARGET_BYTES_MAX} bytes."),
        ),
        HeadProblem::TooManyFields => {
            (ErrorCode::HeadTooLarge, format!("The head of the request has more than {FIELDS_MAX} fields."))
        }
        HeadProblem::UnknownCoding => (
            ErrorCode::UnknownTransferCoding,
            "The transfer-encoding is not 'chunked' alone; use only chunked, or a content-length.".to_owned(),
        ),
        HeadProblem::Malformed(problem) => {
            (ErrorCode::MalformedRequest, format!("The request is malformed: {problem}."))
        }
    };
    last_response(code, &message)
}

/// Returns the bytes of the response to a head that was incomplete at its timeout.
pub(crate) fn head_timeout(limit: Duration) -> Vec<u8> {
    last_response(
        ErrorCode::HeadTimeout,
        &format!("The head of the request did not arrive within {} s.", limit.as_secs_f64()),
    )
}

fn last_response(code: ErrorCode, message: &str) -> Vec<u8> {
    let body = ErrorBody::new(code, message, None).to_json();
    let status = StatusCode::from_u16(code.status()).expect("an error has a valid status");
    let head = format!(
        "HTTP/1.1 {} {}\r\ndate: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{}: {}\r\nconnection: close\r\n\r\n",
        status.as_u16(),
        status.canonical_reason().unwrap_or_default(),
        get_cached_date().to_str().unwrap_or_default(),
        body.len(),
        headers::ERROR,
        code.as_str()
    );
    [head.into_bytes(), body].concat()
}

/// Headers of a usual response, including the two that Pingora adds: the map is allocated once.
const HEADERS_USUAL: usize = 20;

/// Returns a head with `extra` headers. It is converted to Pingora's type when it is written: Pingora's own looks up
/// and copies each header name three times, to preserve its case.
pub(crate) fn head(status: u16, extra: &[(&'static str, &str)]) -> Head {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    let (mut head, ()) = http::Response::new(()).into_parts();
    head.status = status;
    head.headers.reserve(HEADERS_USUAL);
    for (name, value) in extra {
        put(&mut head, name, value);
    }
    head
}

/// Sets a header; an invalid value is omitted. Values of `vary` are appended.
pub(crate) fn put(head: &mut Head, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        if name == VARY.as_str() {
            head.headers.append(VARY, value);
        } else {
            head.headers.insert(names::name(name), value);
        }
    }
}

async fn json(session: &mut ServerSession, mut head: Head, body: Bytes) -> AfterResponse {
    put(&mut head, CONTENT_TYPE.as_str(), "application/json");
    put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
    whole(session, head, body).await
}

/// Writes a complete response.
pub(crate) async fn whole(session: &mut ServerSession, head: Head, body: Bytes) -> AfterResponse {
    apply_drain_notice(session);
    // The response to HEAD has the content-length of the omitted body (RFC 9110, 9.3.2).
    let body = if session.req_header().method == Method::HEAD { Bytes::new() } else { body };
    write_all(session, head, body).await
}

/// Writes only the head of a response, because the request is a HEAD.
pub(crate) async fn head_alone(session: &mut ServerSession, head: Head) -> AfterResponse {
    write_all(session, head, Bytes::new()).await
}

/// Writes the head of a response.
pub(crate) async fn begin(session: &mut ServerSession, head: Head) -> pingora::Result<()> {
    session.write_response_header(Box::new(ResponseHeader::from(head))).await
}

async fn write_all(session: &mut ServerSession, head: Head, body: Bytes) -> AfterResponse {
    let write = async {
        begin(session, head).await?;
        session.write_response_body(body, true).await
    };
    match write.await {
        Ok(()) => AfterResponse::Reuse,
        Err(error) => {
            // A client closed its connection before its response was sent.
            tracing::debug!(%error, "client disconnected before its response");
            AfterResponse::Close
        }
    }
}

/// Reads and discards the rest of a rejected body, within limits. If all of it arrived, the connection can carry the
/// next request: a client rejected by load shedding will retry, and a handshake costs more than a rejection.
pub(crate) async fn discard(session: &mut ServerSession) -> AfterResponse {
    if session.is_body_done() {
        return AfterResponse::Reuse;
    }
    let mut read = 0;
    let all = async {
        loop {
            match session.read_request_body().await {
                Ok(Some(chunk)) => read += chunk.len(),
                Ok(None) => return AfterResponse::Reuse,
                Err(_) => return AfterResponse::Close,
            }
            if read > DISCARD_MAX {
                return AfterResponse::Close;
            }
        }
    };
    tokio::time::timeout(DISCARD_TIMEOUT, all).await.unwrap_or(AfterResponse::Close)
}
