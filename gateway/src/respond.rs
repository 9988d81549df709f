//! The only place that tells a client what went wrong, and that copies an answer's head.

use bytes::Bytes;
use gateway_core::endpoint;
use gateway_core::head::{FIELDS_MAX, HEAD_BYTES_MAX, HeadProblem, TARGET_BYTES_MAX};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, RETRY_AFTER, VARY};
use http::response::Parts as Head;
use http::{HeaderValue, Method, StatusCode};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::date::get_cached_date;
use replica_core::wire::error::{Dialect, ErrorBody, ErrorCode, Remedy};
use replica_core::wire::headers;
use std::time::Duration;

use crate::intake::BODY_BYTES_MAX;
use crate::listener::{self, AfterAnswer};
use crate::names;

/// A refusal, before it is an HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: ErrorCode,
    /// One sentence: what is wrong, the limit, what to do.
    pub(crate) message: String,
    /// The field or header at fault.
    pub(crate) param: Option<&'static str>,
    /// How long to wait, where that is known.
    pub(crate) retry_after: Option<Duration>,
    /// What else the client is told in headers: what is left of its limits.
    pub(crate) headers: Vec<(&'static str, String)>,
    /// Bytes of the body that were processed before it was refused; its tenant pays for them.
    pub(crate) processed_bytes: u64,
}

impl Refusal {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Refusal {
        Refusal {
            code,
            message: message.into(),
            param: None,
            retry_after: None,
            headers: Vec::new(),
            processed_bytes: 0,
        }
    }

    pub(crate) fn of(mut self, param: &'static str) -> Refusal {
        self.param = Some(param);
        self
    }

    pub(crate) fn after(mut self, wait: Duration) -> Refusal {
        self.retry_after = Some(wait);
        self
    }

    pub(crate) fn having_processed(mut self, bytes: usize) -> Refusal {
        self.processed_bytes = bytes as u64;
        self
    }

    pub(crate) fn with(mut self, headers: Vec<(&'static str, String)>) -> Refusal {
        self.headers = headers;
        self
    }
}

/// How long to wait where waiting helps and nothing better is known: as long as a lost region is watched before it is
/// given up, and once more.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(3);
/// `retry-after` knows whole seconds; OpenAI's clients read this one first.
pub(crate) const RETRY_AFTER_MS: &str = "retry-after-ms";
/// How much of a body that was refused is still read, so that the client gets to see the answer: a client that is
/// still writing when the connection closes sees a reset instead.
const DISCARD_MAX: usize = BODY_BYTES_MAX;
/// A body up to this is waited for, so that its connection can carry the next request: it came with its head or will
/// have come in a round trip, which is less than a new connection takes.
const KEPT_BODY_MAX: usize = 64 << 10;
/// How long that may take.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may hold up the response.
const DISCARD_FIRST_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers with a refusal.
pub(crate) async fn refuse(
    session: &mut ServerSession,
    refusal: &Refusal,
    extra: &[(&'static str, &str)],
) -> AfterAnswer {
    let dialect = Dialect::of_path(endpoint::replica_path(session.req_header().uri.path()));
    let body = dialect.body(refusal.code, &refusal.message, refusal.param);
    let mut head = head(dialect.status(refusal.code), extra);
    put(&mut head, headers::ERROR, refusal.code.as_str());
    refusal.headers.iter().for_each(|(name, value)| put(&mut head, name, value));
    if refusal.code.remedy() == Remedy::Wait || refusal.retry_after.is_some() {
        let wait = refusal.retry_after.unwrap_or(RETRY_AFTER_DEFAULT);
        put(&mut head, RETRY_AFTER_MS, &wait.as_millis().max(1).to_string());
        put(&mut head, RETRY_AFTER.as_str(), &wait.as_millis().div_ceil(1000).max(1).to_string());
    }
    let keeps = keeps_its_connection(session);
    session.set_close_on_response_before_downstream_finish(!keeps);
    // Whoever has stopped sending is not waited for once more.
    let stalls = refusal.code == ErrorCode::BodyTimeout;
    if session.is_http2() && keeps && !stalls {
        // There are clients (curl before 8) that take a response which comes before they have sent their body for an error.
        tokio::time::timeout(DISCARD_FIRST_TIMEOUT, discard(session)).await.ok();
    }
    let after = json(session, head, body.into()).await;
    if stalls {
        return AfterAnswer::Close;
    }
    // Of HTTP/2 what is left is discarded when the request is over.
    if after == AfterAnswer::Reuse && !session.is_http2() && !session.is_body_done() {
        let after = discard(session).await;
        return if keeps { after } else { AfterAnswer::Close };
    }
    after
}

/// Answers a request that panicked, if nothing of its answer was written yet. Nobody knows what was read of it, so its
/// connection ends.
pub(crate) async fn panicked(session: &mut ServerSession, extra: &[(&'static str, &str)]) -> AfterAnswer {
    if session.response_written().is_none() {
        let message =
            "The request met a defect of this server, which is in its log; other requests are not affected.";
        session.set_keepalive(None);
        refuse(session, &Refusal::new(ErrorCode::Internal, message), extra).await;
    }
    AfterAnswer::Close
}

/// Whether the client may keep its connection though what is left of its body was not wanted: when that is little and
/// certain to come. Who asked whether to send it (`expect`) and is refused may send it or not, and then nobody knows where
/// the next request begins.
fn keeps_its_connection(session: &ServerSession) -> bool {
    let declared =
        session.get_header(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    declared.is_some_and(|length| length <= KEPT_BODY_MAX) && session.get_header(EXPECT).is_none()
}

/// Answers 200 with a JSON body.
pub(crate) async fn ok(
    session: &mut ServerSession,
    body: Vec<u8>,
    extra: &[(&'static str, &str)],
) -> AfterAnswer {
    json(session, head(200, extra), body.into()).await
}

/// Answers a head that could not be parsed; the connection is closed by the caller.
pub(crate) async fn unreadable(session: &mut ServerSession) {
    let code = ErrorCode::MalformedRequest;
    let body = ErrorBody::new(code, "The request is not HTTP/1.1 that can be read.", None).to_json();
    let mut head = head(code.status(), &[]);
    session.set_keepalive(None);
    put(&mut head, headers::ERROR, code.as_str());
    put(&mut head, CONTENT_TYPE.as_str(), "application/json");
    put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
    written(session, head, body.into()).await;
}

/// The answer, as it is written, to a head that no parser has seen; it is the last on its connection.
pub(crate) fn unreadable_head(problem: HeadProblem) -> Vec<u8> {
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
            "The transfer-encoding is not 'chunked' alone; send the body so, or with a content-length."
                .to_owned(),
        ),
        HeadProblem::Malformed(problem) => {
            (ErrorCode::MalformedRequest, format!("The request cannot be read: {problem}."))
        }
    };
    last(code, &message)
}

/// The answer, as it is written, to a head that does not come to an end.
pub(crate) fn slow_head(limit: Duration) -> Vec<u8> {
    last(
        ErrorCode::HeadTimeout,
        &format!("The head of the request did not arrive within {} s.", limit.as_secs_f64()),
    )
}

fn last(code: ErrorCode, message: &str) -> Vec<u8> {
    let body = ErrorBody::new(code, message, None).to_json();
    let status = StatusCode::from_u16(code.status()).expect("an error's status is one");
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

/// Headers of a usual answer, with the two that Pingora adds: room for them is made once.
const HEADERS_USUAL: usize = 20;

/// A head with `extra` headers. It becomes Pingora's when it is written: Pingora's own looks up and copies the name of
/// each header three times over, to keep the case in which it was written.
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

/// Sets a header; a value that no header can have is left out. What a response varies by is added to what it varies by
/// already.
pub(crate) fn put(head: &mut Head, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        if name == VARY.as_str() {
            head.headers.append(VARY, value);
        } else {
            head.headers.insert(names::name(name), value);
        }
    }
}

async fn json(session: &mut ServerSession, mut head: Head, body: Bytes) -> AfterAnswer {
    put(&mut head, CONTENT_TYPE.as_str(), "application/json");
    put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
    whole(session, head, body).await
}

/// Writes an answer that is whole.
pub(crate) async fn whole(session: &mut ServerSession, head: Head, body: Bytes) -> AfterAnswer {
    listener::heed_notice(session);
    // Whoever asks for the head alone gets it, with the length of the body that is not there (RFC 9110, 9.3.2).
    let body = if session.req_header().method == Method::HEAD { Bytes::new() } else { body };
    written(session, head, body).await
}

/// Writes the head of a response whose body does not follow, because the request is a HEAD.
pub(crate) async fn head_alone(session: &mut ServerSession, head: Head) -> AfterAnswer {
    written(session, head, Bytes::new()).await
}

/// Writes the head of an answer.
pub(crate) async fn begin(session: &mut ServerSession, head: Head) -> pingora::Result<()> {
    session.write_response_header(Box::new(ResponseHeader::from(head))).await
}

async fn written(session: &mut ServerSession, head: Head, body: Bytes) -> AfterAnswer {
    let written = async {
        begin(session, head).await?;
        session.write_response_body(body, true).await
    };
    match written.await {
        Ok(()) => AfterAnswer::Reuse,
        Err(error) => {
            tracing::debug!(%error, "the client left before its answer");
            AfterAnswer::Close
        }
    }
}

/// Reads what is left of a refused body and throws it away, within bounds. When all of it came, the connection can carry
/// the next request: whoever is refused for want of room will be back, and a handshake costs more than a refusal.
pub(crate) async fn discard(session: &mut ServerSession) -> AfterAnswer {
    if session.is_body_done() {
        return AfterAnswer::Reuse;
    }
    let mut read = 0;
    let all = async {
        loop {
            match session.read_request_body().await {
                Ok(Some(chunk)) => read += chunk.len(),
                Ok(None) => return AfterAnswer::Reuse,
                Err(_) => return AfterAnswer::Close,
            }
            if read > DISCARD_MAX {
                return AfterAnswer::Close;
            }
        }
    };
    tokio::time::timeout(DISCARD_TIMEOUT, all).await.unwrap_or(AfterAnswer::Close)
}
