//! Passes a request on and its answer back, with the headers that may cross.
//!
//! What crosses is a list, in both directions: a header that nobody named (a key, a cookie, a hop's own) stays where it
//! is.

use crate::listener::AfterAnswer;
use crate::respond;
use crate::upstream::{Answer, AnswerBody, Upstream};
use bytes::Bytes;
use http::HeaderName;
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HOST, RETRY_AFTER};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::http::ServerSession;
use replica_core::wire::headers;

/// Headers of a request that cross to the next hop.
const INWARD: [HeaderName; 4] =
    [CONTENT_TYPE, ACCEPT, HeaderName::from_static("traceparent"), HeaderName::from_static(headers::LANE)];
/// Headers of an answer that cross back.
const OUTWARD: [HeaderName; 5] = [
    CONTENT_TYPE,
    CONTENT_LENGTH,
    RETRY_AFTER,
    HeaderName::from_static(headers::ERROR),
    HeaderName::from_static(headers::REGION),
];

/// The head for the next hop: the method of the request at hand and `path`, with `extra` headers.
pub(crate) fn inward(
    session: &ServerSession,
    path: &'static str,
    body: &Bytes,
    extra: &[(&'static str, &str)],
) -> RequestHeader {
    let came = session.req_header();
    let mut head = RequestHeader::build(came.method.clone(), path.as_bytes(), Some(10))
        .expect("a path of ours can be written");
    for name in INWARD {
        if let Some(value) = came.headers.get(&name) {
            head.insert_header(name, value.clone()).expect("a header that was parsed can be written");
        }
    }
    let length = body.len().to_string();
    for (name, value) in [(HOST.as_str(), "region"), (CONTENT_LENGTH.as_str(), &length)].iter().chain(extra) {
        head.insert_header(*name, *value).expect("our own headers are valid");
    }
    head
}

/// Passes `answer` back to the client with `extra` headers, and its connection back to the pool.
pub(crate) async fn outward(
    session: &mut ServerSession,
    answer: Answer,
    upstream: &Upstream,
    extra: &[(&'static str, &str)],
) -> AfterAnswer {
    let Answer { head: came, body } = answer;
    let head = outward_head(&came, extra);
    let mut coming = match body {
        AnswerBody::Whole(body) => return respond::whole(session, head, body).await,
        AnswerBody::Coming(coming) => coming,
    };
    let passed = async {
        session.write_response_header(Box::new(head)).await?;
        while let Some(chunk) = coming.chunk().await? {
            session.write_response_body(chunk, false).await?;
        }
        session.write_response_body(Bytes::new(), true).await
    };
    match passed.await {
        Ok(()) => {
            coming.finish(upstream).await;
            AfterAnswer::Reuse
        }
        Err(error) => {
            // The client has part of an answer: closing is the only honest end that HTTP/1.1 has.
            tracing::warn!(%error, "an answer broke off on its way to the client");
            AfterAnswer::Close
        }
    }
}

fn outward_head(came: &ResponseHeader, extra: &[(&'static str, &str)]) -> ResponseHeader {
    let mut head = respond::head(came.status.as_u16(), &[]);
    for name in OUTWARD {
        if let Some(value) = came.headers.get(&name) {
            head.insert_header(name, value.clone()).expect("a header that was parsed can be written");
        }
    }
    extra.iter().for_each(|(name, value)| respond::put(&mut head, name, value));
    head
}
