//! HTTP/1 connections: one request after the other.
//!
//! The head is read here and not by Pingora, which would take a megabyte of it, a byte a minute: within one time and one
//! size, and checked by [`gateway_core::head`] while it comes. What is whole and in order is handed to Pingora, which reads
//! it from memory. What is not is answered from here and the connection closed, because nobody can know where the next
//! request would begin.

use super::admission::Admitted;
use super::chunked::Chunked;
use super::{AfterAnswer, Door, Greeting, Shared, h2};
use crate::hop::HANDSHAKE_RECORD;
use crate::metrics::Closed;
use crate::respond;
use bytes::BytesMut;
use gateway_core::chunks;
use gateway_core::head::{HeadProblem, HeadScanner, ScannedHead, origin_form};
use pingora::protocols::Stream;
use pingora::protocols::http::ServerSession;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};

/// Room for a head at first: most fit, and an idle connection holds no more.
const HEAD_BUFFER_BYTES: usize = 2 << 10;
/// RFC 9113, 3.4.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How much of what a refused client still sends is read before the connection is closed: a close with bytes unread is
/// a reset, which can overtake the answer.
const LINGER_BYTES_MAX: usize = 1 << 20;
/// How long that may take.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// What came where a request could.
enum Came {
    /// A head, all of it, in order.
    Head(ScannedHead),
    /// The preface of HTTP/2.
    Preface,
    /// Nothing more: the client has gone, or was idle for too long, or its place was needed, or we are leaving.
    Nothing,
    /// Something that is no head.
    Nonsense(HeadProblem),
    /// Only a part of a head, in all the time that there was.
    TooSlow,
}

pub(super) async fn serve<D: Door>(shared: &Arc<Shared<D>>, mut stream: Stream, admitted: &mut Admitted) {
    let mut buffer = BytesMut::new();
    // Over TLS it is ALPN that says so.
    let mut may_be_h2 = matches!(*shared.greeting, Greeting::Clear);
    loop {
        let came = next(shared, &mut stream, &mut buffer, may_be_h2, admitted).await;
        match came {
            Came::Head(head) => stream = as_request(stream, &mut buffer, head),
            Came::Preface => return h2::serve(shared, stream, buffer.freeze(), admitted).await,
            Came::Nothing => return,
            Came::TooSlow => {
                shared.counts.closed.count(Closed::HeadSlow);
                return refuse(stream, &respond::slow_head(shared.timeouts.head)).await;
            }
            Came::Nonsense(problem) => {
                tracing::debug!(?problem, "a head is refused");
                shared.counts.closed.count(match problem {
                    HeadProblem::TooLong | HeadProblem::TargetTooLong | HeadProblem::TooManyFields => {
                        Closed::HeadTooLarge
                    }
                    HeadProblem::UnknownCoding | HeadProblem::Malformed(_) => Closed::HeadMalformed,
                });
                return refuse(stream, &respond::unreadable_head(problem)).await;
            }
        }
        may_be_h2 = false;
        match one(shared, stream, std::mem::take(&mut buffer)).await {
            Some((kept, over)) => (stream, buffer) = (kept, over),
            None => return,
        }
    }
}

/// Makes what came ready for the parser: its target in origin form, and its chunks looked at while they are read.
fn as_request(stream: Stream, buffer: &mut BytesMut, head: ScannedHead) -> Stream {
    let chunked = head.is_chunked.then(|| {
        let mut chunks = chunks::ChunkScanner::default();
        let problem = chunks.advance(&buffer[head.length..]).err();
        if problem.is_some() {
            // The parser is given none of it: who reads the body meets the problem.
            buffer.truncate(head.length);
        }
        (chunks, problem)
    });
    if head.is_absolute {
        let rewritten = origin_form(&buffer[..head.length]);
        *buffer = [rewritten.as_slice(), &buffer[head.length..]].concat().as_slice().into();
    }
    match chunked {
        Some((chunks, problem)) => Box::new(Chunked::new(stream, chunks, problem)),
        None => stream,
    }
}

/// Waits for a request and reads its head into `buffer`, which may hold the beginning of it.
async fn next<D: Door>(
    shared: &Shared<D>,
    stream: &mut Stream,
    buffer: &mut BytesMut,
    may_be_h2: bool,
    admitted: &mut Admitted,
) -> Came {
    if buffer.is_empty() {
        buffer.reserve(HEAD_BUFFER_BYTES);
        let came = tokio::select! {
            biased;
            came = timeout(shared.timeouts.idle, stream.read_buf(buffer)) => came,
            () = shared.closing() => return Came::Nothing,
            () = admitted.evicted() => {
                shared.counts.closed.count(Closed::HalfOpen);
                return Came::Nothing;
            }
            () = shared.crowded.notified() => {
                shared.counts.closed.count(Closed::Crowded);
                return Came::Nothing;
            }
        };
        if came.is_err() {
            shared.counts.closed.count(Closed::Idle);
        }
        if !matches!(came, Ok(Ok(1..))) {
            return Came::Nothing;
        }
    }
    if may_be_h2 && buffer.first() == Some(&HANDSHAKE_RECORD) {
        shared.met_tls();
        return Came::Nonsense(HeadProblem::Malformed("it is TLS, which is not spoken on this port"));
    }
    let mut scan = HeadScanner::default();
    let deadline = Instant::now() + shared.timeouts.head;
    loop {
        if may_be_h2 && H2_PREFACE.starts_with(&buffer[..buffer.len().min(H2_PREFACE.len())]) {
            if buffer.len() >= H2_PREFACE.len() {
                return Came::Preface;
            }
        } else {
            match scan.advance(buffer) {
                Ok(Some(head)) => {
                    admitted.mark(false);
                    return Came::Head(head);
                }
                Ok(None) => {}
                Err(problem) => return Came::Nonsense(problem),
            }
        }
        admitted.mark(true);
        tokio::select! {
            biased;
            read = timeout_at(deadline, stream.read_buf(buffer)) => match read {
                Ok(Ok(1..)) => {}
                Ok(Ok(0) | Err(_)) => return Came::Nothing,
                Err(_) => return Came::TooSlow,
            },
            () = admitted.evicted() => {
                shared.counts.closed.count(Closed::HalfOpen);
                return Came::Nothing;
            }
        }
    }
}

/// Answers the request whose head is in `buffer`; gives the connection back if it can carry another, with what was read
/// of that.
async fn one<D: Door>(shared: &Shared<D>, stream: Stream, buffer: BytesMut) -> Option<(Stream, BytesMut)> {
    let mut session = ServerSession::new_http1(stream);
    session.set_pipelined_prefix(buffer);
    session.set_pipelining_enabled(true);
    // The intake has a time for the whole of a body; one for each read would be a timer a piece.
    session.set_read_timeout(None);
    match session.read_request().await {
        Ok(true) => {}
        Ok(false) => return None,
        Err(error) => {
            tracing::debug!(%error, "a request head that cannot be read");
            respond::unreadable(&mut session).await;
            linger(session).await;
            return None;
        }
    }
    let closes = shared.answer(&mut session).await == AfterAnswer::Close;
    if closes || session.get_keepalive().is_none() && !session.is_body_done() {
        linger(session).await;
        return None;
    }
    let (stream, over) = session.finish().await.ok()??.into_parts();
    Some((Chunked::unwrap(stream), over.unwrap_or_default()))
}

/// Ends a connection whose response was the last, and lets a client read it that is still sending.
async fn linger(session: ServerSession) {
    if let ServerSession::H1(session) = session {
        refuse(Chunked::unwrap(session.into_inner()), &[]).await;
    }
}

/// Writes an answer, says that it was the last, and lets the client read it.
async fn refuse(mut stream: Stream, answer: &[u8]) {
    let said = async {
        stream.write_all(answer).await?;
        stream.flush().await?;
        AsyncWriteExt::shutdown(&mut stream).await?;
        let mut rest = stream.take(LINGER_BYTES_MAX as u64);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    // Whether it was read or not, the connection ends here.
    timeout(LINGER_TIMEOUT, said).await.ok();
}
