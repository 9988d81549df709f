//! Passes a request on and its answer back, with the headers that may cross.
//!
//! What crosses is a list, in both directions: a header that nobody named (a key, a cookie, a hop's own) stays where it
//! is.

use crate::listener::{self, AfterAnswer};
use crate::respond;
use crate::upstream::{
    AUTHORITY, Answer, AnswerBody, RequestHead, Upstream, UpstreamMethod, can_stand_in_a_header,
};
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, RETRY_AFTER, VARY};
use http::response::Parts as Head;
use http::{HeaderName, Method, Version};
use pingora::http::ResponseHeader;
use pingora::prelude::{ErrorType, OrErr};
use pingora::protocols::http::ServerSession;
use replica_core::wire::headers;
use std::time::Duration;

/// Headers of a request that cross to the next hop.
static INWARD: [HeaderName; 4] = [
    CONTENT_TYPE,
    ACCEPT,
    HeaderName::from_static("traceparent"),
    HeaderName::from_static(headers::PRIORITY),
];
/// Headers of an answer that cross back.
static OUTWARD: [HeaderName; 11] = [
    CONTENT_TYPE,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    VARY,
    RETRY_AFTER,
    HeaderName::from_static(headers::ERROR),
    HeaderName::from_static(headers::REGION),
    HeaderName::from_static(headers::TOKENS),
    HeaderName::from_static(headers::MODEL_REVISION),
    HeaderName::from_static(headers::HELD_MS),
    HeaderName::from_static(headers::COLD_START_MS),
];

/// What of a request's head crosses to the next hop.
#[derive(Clone)]
pub(crate) struct Crossing(RequestHead);

impl Crossing {
    /// Taken from the request at hand, which is then free to be watched for its client hanging up. What was `decided` of a
    /// header crosses in the place of what came: of two the next hop would read the first.
    pub(crate) fn of(session: &ServerSession, decided: &[(&'static str, &str)]) -> Crossing {
        let came = session.req_header();
        let mut head = RequestHead::new(UpstreamMethod::for_client(&came.method));
        head.put(HOST.as_str(), AUTHORITY);
        for (name, value) in decided {
            head.put(name, value);
        }
        for name in &INWARD {
            if decided.iter().all(|(decided, _)| name != decided)
                && let Some(value) = came.headers.get(name)
                && can_stand_in_a_header(value.as_bytes())
            {
                head.put(name.as_str(), value);
            }
        }
        Crossing(head)
    }

    /// The head for the next hop, which serves the request at `path`, with `extra` headers.
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

/// Comes back when the client has hung up, and with it the last reason to go on. A client that sends something where it
/// should wait does not speak HTTP as we do, and is left as well.
///
/// A client that has closed its side alone still reads the response, and on the wire it looks the same as one that is gone. An
/// interim response tells them apart: it is nothing to a client that waits, and is answered with a reset where nobody does.
pub(crate) async fn client_gone(session: &mut ServerSession) {
    let error = loop {
        match session.read_body_or_idle(true).await {
            // Only what was left of a body.
            Ok(None) => {}
            Ok(Some(_)) => return,
            Err(error) => break error,
        }
    };
    if !matches!(error.etype(), ErrorType::ConnectionClosed) || !listener::may_half_close(session) {
        return;
    }
    if session.req_header().version == Version::HTTP_11 {
        for pause in HALF_CLOSED_PROBES {
            tokio::time::sleep(pause).await;
            // Not `write_continue_response`, which writes the first alone.
            let interim = ResponseHeader::build(100, Some(0)).expect("100 is a status");
            if session.write_response_header(Box::new(interim)).await.is_err() {
                return;
            }
        }
    }
    std::future::pending().await
}

/// When a client that has closed its side is looked for. Most responses are there before the first time. The second finds what
/// the first has met; each is one interim response, of which clients take five (Go's net/http).
const HALF_CLOSED_PROBES: [Duration; 4] =
    [Duration::from_millis(500), Duration::from_millis(250), Duration::from_secs(1), Duration::from_secs(4)];

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
    listener::heed_notice(session);
    if session.req_header().method == Method::HEAD {
        // The body is not the client's to read; with its connection it ends here.
        drop(coming);
        return respond::head_alone(session, head).await;
    }
    let passed = async {
        respond::begin(session, head).await?;
        while let Some(chunk) = coming.chunk().await.or_err(ErrorType::ReadError, "reading an answer")? {
            session.write_response_body(chunk, false).await?;
        }
        session.write_response_body(Bytes::new(), true).await
    };
    match passed.await {
        Ok(()) => {
            coming.finish(upstream);
            AfterAnswer::Reuse
        }
        Err(error) => {
            // The client has part of an answer: closing is the only honest end that HTTP/1.1 has.
            tracing::warn!(%error, "an answer broke off on its way to the client");
            AfterAnswer::Close
        }
    }
}

fn outward_head(came: &Head, extra: &[(&'static str, &str)]) -> Head {
    let mut head = respond::head(came.status.as_u16(), &[]);
    // An answer has fewer headers than may cross.
    for name in came.headers.keys().filter(|name| OUTWARD.contains(name)) {
        if let Some(value) = came.headers.get(name) {
            head.headers.insert(name.clone(), value.clone());
        }
    }
    extra.iter().for_each(|(name, value)| respond::put(&mut head, name, value));
    head
}
