//! One attempt: a request to an address, and its answer.
//!
//! Pingora's proxy replays a body of 64 KiB at most and gives an attempt one peer and no way out; an edge that moves a
//! request of 32 MiB from a region that is being lost to another needs both. So the exchange is our own over Pingora's
//! connection pool and HTTP sessions: the body is held whole and shared between attempts, and dropping the future of an
//! attempt ends it.
//!
//! A small answer is read whole before the client sees any of it. Then a region that dies in the middle of it has given
//! the client nothing yet, and another region can. Only a large answer is streamed, and is final once it has begun.

use bytes::{Bytes, BytesMut};
use gateway_core::lawful::{self, Conn};
use gateway_core::outcome::Failure;
use http::header::CONTENT_LENGTH;
use pingora::connectors::ConnectorOptions;
use pingora::connectors::http::Connector;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::prelude::HttpPeer;
use pingora::protocols::http::client::HttpSession;
use std::net::SocketAddr;
use std::time::Duration;

/// Connections kept idle, over all addresses.
const IDLE_MAX: usize = 1024;
/// How long a connection is kept idle. Shorter than the other side keeps it, so that the race in which a request meets
/// a closing connection is rare.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Answers up to this size are read whole before any of it is passed on: some 200 vectors of 384 numbers, as text.
pub(crate) const WHOLE_ANSWER_MAX: usize = 1 << 20;

/// The pool of connections to the next hop.
pub(crate) struct Upstream {
    connector: Connector,
}

/// An answer whose head has come.
pub(crate) struct Answer {
    pub(crate) head: ResponseHeader,
    pub(crate) body: AnswerBody,
}

/// The body of an answer.
pub(crate) enum AnswerBody {
    /// All of it.
    Whole(Bytes),
    /// Still coming.
    Coming(Box<Coming>),
}

/// A body that is still coming.
pub(crate) struct Coming {
    session: HttpSession,
    peer: HttpPeer,
}

impl Upstream {
    pub(crate) fn new() -> Upstream {
        let mut options = ConnectorOptions::new(IDLE_MAX);
        options.keepalive_pool_size = IDLE_MAX;
        Upstream { connector: Connector::new(Some(options)) }
    }

    /// Sends `head` and `body` where the law of the body permits and waits for an answer, which is read whole if it
    /// declares no more than `whole_max` bytes; the caller bounds the time by dropping this.
    pub(crate) async fn ask(
        &self,
        to: Conn<SocketAddr>,
        connect_timeout: Duration,
        head: RequestHeader,
        body: lawful::Body<Bytes>,
        whole_max: usize,
    ) -> Result<Answer, Failure> {
        let (body, address) = lawful::send(body, to);
        let mut peer = HttpPeer::new(address, false, String::new());
        peer.options.connection_timeout = Some(connect_timeout);
        peer.options.idle_timeout = Some(IDLE_TIMEOUT);
        let (mut session, reused) =
            self.connector.get_http_session(&peer).await.map_err(|error| unreachable(address, &error))?;
        if let Err(error) = exchange(&mut session, head, body).await {
            tracing::debug!(%address, reused, %error, "an attempt broke off before an answer");
            return Err(if reused { Failure::StaleConnection } else { Failure::Unreachable });
        }
        let head = session.response_header().expect("exchange returns once the head is read").clone();
        let mut coming = Coming { session, peer };
        if declared_length(&head).is_none_or(|length| length > whole_max) {
            return Ok(Answer { head, body: AnswerBody::Coming(Box::new(coming)) });
        }
        let mut whole = BytesMut::new();
        while let Some(chunk) = coming.chunk().await.map_err(|error| unreachable(address, &error))? {
            whole.extend_from_slice(&chunk);
        }
        coming.finish(self).await;
        Ok(Answer { head, body: AnswerBody::Whole(whole.freeze()) })
    }
}

impl Coming {
    /// The next piece of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> pingora::Result<Option<Bytes>> {
        self.session.read_response_body().await
    }

    /// Gives the connection back once the body has ended.
    pub(crate) async fn finish(self, upstream: &Upstream) {
        upstream.connector.release_http_session(self.session, &self.peer, Some(IDLE_TIMEOUT)).await;
    }
}

/// Writes the request and reads the head of the answer. Whoever refuses a body early answers before it has read all of
/// it and closes; so a failed write does not end the exchange, the answer does.
async fn exchange(session: &mut HttpSession, head: RequestHeader, body: Bytes) -> pingora::Result<()> {
    let sent = async {
        session.write_request_header(Box::new(head)).await?;
        session.write_request_body(body, true).await?;
        session.finish_request_body().await
    }
    .await;
    loop {
        if let Err(unread) = session.read_response_header().await {
            return Err(sent.err().unwrap_or(unread));
        }
        let status = session.response_header().map(|head| head.status);
        if status.is_none_or(|status| !status.is_informational()) {
            return Ok(());
        }
    }
}

fn declared_length(head: &ResponseHeader) -> Option<usize> {
    head.headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn unreachable(address: SocketAddr, error: &pingora::Error) -> Failure {
    tracing::debug!(%address, %error, "the next hop cannot be reached");
    Failure::Unreachable
}
