//! HTTP/1 connections: one request after another.
//!
//! The head is read here and not by Pingora, which would accept a megabyte of it at a byte a minute: here it is limited
//! in time and size, and [`gateway_core::head`] checks it while it arrives. A complete and valid head is passed to
//! Pingora, which parses it from memory. An invalid one gets an error response and the connection is closed, because
//! the start of the next request is unknown.

use super::admission::AdmittedConnection;
use super::{AfterResponse, PeerKind, RequestHandler, Shared, TransportSecurity, chunked, h2};
use crate::metrics::CloseReason;
use crate::respond;
use bytes::BytesMut;
use gateway_core::head::{HeadProblem, HeadScanner, ScannedHead, origin_form};
use http1::ChunkDecoder;
use identity::server::HANDSHAKE_RECORD;
use pingora::protocols::Stream;
use pingora::protocols::http::ServerSession;
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, timeout, timeout_at};

/// Maximum number of bytes of the first read of a request: most heads fit.
const FIRST_READ_BYTES: usize = 2 << 10;
/// HTTP/2 connection preface (RFC 9113, 3.4).
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Maximum number of bytes read from a rejected client before the connection is closed: closing with unread bytes sends
/// a reset, which can overtake the response.
const LINGER_BYTES_MAX: usize = 1 << 20;
/// Timeout for that.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// Result of waiting for a request head.
enum HeadRead {
    /// Complete and valid head.
    Head(ScannedHead),
    /// HTTP/2 connection preface.
    Http2Preface,
    /// No request: the client disconnected, the idle timeout expired, the connection was evicted, or the listener is
    /// draining.
    Ended,
    /// Invalid head.
    Invalid(HeadProblem),
    /// The head was incomplete at its deadline.
    TimedOut,
}

pub(super) async fn serve<D: RequestHandler>(
    shared: &Arc<Shared<D>>,
    mut stream: Stream,
    peer: PeerKind,
    admitted: &mut AdmittedConnection,
) {
    let mut buffer = BytesMut::new();
    // Over TLS, ALPN decides the protocol.
    let mut may_be_h2 = matches!(*shared.security, TransportSecurity::Plaintext);
    loop {
        let read = next(shared, &mut stream, &mut buffer, may_be_h2, admitted).await;
        match read {
            HeadRead::Head(head) => stream = prepare(stream, &mut buffer, head),
            HeadRead::Http2Preface => {
                return Box::pin(h2::serve(shared, stream, buffer.freeze(), peer, admitted)).await;
            }
            HeadRead::Ended => return,
            HeadRead::TimedOut => {
                shared.counts.closed.count(CloseReason::HeadTimeout);
                return write_last(stream, &respond::head_timeout(shared.timeouts.head)).await;
            }
            HeadRead::Invalid(problem) => {
                // A request head is ambiguous or exceeds a limit (`problem`). The client gets an error, and its
                // connection is closed.
                tracing::debug!(?problem, "request head rejected");
                shared.counts.closed.count(match problem {
                    HeadProblem::TooLong | HeadProblem::TargetTooLong | HeadProblem::TooManyFields => {
                        CloseReason::HeadTooLarge
                    }
                    HeadProblem::UnknownCoding | HeadProblem::Malformed(_) => CloseReason::HeadMalformed,
                });
                return write_last(stream, &respond::malformed_head(problem)).await;
            }
        }
        may_be_h2 = false;
        // In its own allocation, so that the connection's task has no space for it between requests.
        match Box::pin(handle_one(shared, stream, peer, std::mem::take(&mut buffer))).await {
            Some((reusable, unread)) => (stream, buffer) = (reusable, unread),
            None => return,
        }
    }
}

/// Prepares a request for the parser: rewrites its target to origin form, and wraps the stream so that chunks are
/// checked while they are read.
fn prepare(stream: Stream, buffer: &mut BytesMut, head: ScannedHead) -> Stream {
    let chunked = head.is_chunked.then(|| {
        let mut chunks = ChunkDecoder::default();
        let problem = chunks.scan(&buffer[head.length..]).err();
        if problem.is_some() {
            // The parser gets no byte of the body: the reader of the body gets the error.
            buffer.truncate(head.length);
        }
        (chunks, problem)
    });
    if head.is_absolute {
        let rewritten = origin_form(&buffer[..head.length]);
        *buffer = [rewritten.as_slice(), &buffer[head.length..]].concat().as_slice().into();
    }
    match chunked {
        Some((chunks, problem)) => chunked::wrap(stream, chunks, problem),
        None => stream,
    }
}

/// Waits for a request and reads its head into `buffer`, which may contain the start of it.
async fn next<D: RequestHandler>(
    shared: &Shared<D>,
    stream: &mut Stream,
    buffer: &mut BytesMut,
    may_be_h2: bool,
    admitted: &mut AdmittedConnection,
) -> HeadRead {
    if buffer.is_empty() {
        let read = tokio::select! {
            biased;
            read = timeout(shared.timeouts.idle, first_read(stream, buffer)) => read,
            () = shared.closing() => return HeadRead::Ended,
            () = admitted.evicted() => {
                shared.counts.closed.count(CloseReason::HalfOpen);
                return HeadRead::Ended;
            }
            () = shared.evict_idle.notified() => {
                shared.counts.closed.count(CloseReason::ConnectionLimit);
                return HeadRead::Ended;
            }
        };
        if read.is_err() {
            shared.counts.closed.count(CloseReason::Idle);
        }
        if !matches!(read, Ok(Ok(1..))) {
            return HeadRead::Ended;
        }
    }
    if may_be_h2 && buffer.first() == Some(&HANDSHAKE_RECORD) {
        shared.reject_tls();
        return HeadRead::Invalid(HeadProblem::Malformed("it is TLS, and this port expects plaintext"));
    }
    let mut scan = HeadScanner::default();
    let deadline = Instant::now() + shared.timeouts.head;
    loop {
        if may_be_h2 && H2_PREFACE.starts_with(&buffer[..buffer.len().min(H2_PREFACE.len())]) {
            if buffer.len() >= H2_PREFACE.len() {
                return HeadRead::Http2Preface;
            }
        } else {
            match scan.advance(buffer) {
                Ok(Some(head)) => {
                    admitted.mark(false);
                    return HeadRead::Head(head);
                }
                Ok(None) => {}
                Err(problem) => return HeadRead::Invalid(problem),
            }
        }
        admitted.mark(true);
        tokio::select! {
            biased;
            read = timeout_at(deadline, stream.read_buf(buffer)) => match read {
                Ok(Ok(1..)) => {}
                Ok(Ok(0) | Err(_)) => return HeadRead::Ended,
                Err(_) => return HeadRead::TimedOut,
            },
            () = admitted.evicted() => {
                shared.counts.closed.count(CloseReason::HalfOpen);
                return HeadRead::Ended;
            }
        }
    }
}

/// Waits for the first bytes of a request and moves them to `buffer`. They are read into the stack, so that an idle
/// connection has no buffer.
async fn first_read(stream: &mut Stream, buffer: &mut BytesMut) -> io::Result<usize> {
    poll_fn(|context| {
        let mut bytes = [MaybeUninit::uninit(); FIRST_READ_BYTES];
        let mut read = ReadBuf::uninit(&mut bytes);
        ready!(Pin::new(&mut *stream).poll_read(context, &mut read))?;
        buffer.extend_from_slice(read.filled());
        Poll::Ready(Ok(read.filled().len()))
    })
    .await
}

/// Handles the request whose head is in `buffer`; returns the connection if it can carry another request, with the
/// bytes of that already read.
async fn handle_one<D: RequestHandler>(
    shared: &Shared<D>,
    stream: Stream,
    peer: PeerKind,
    buffer: BytesMut,
) -> Option<(Stream, BytesMut)> {
    let mut session = ServerSession::new_http1(stream);
    session.set_pipelined_prefix(buffer);
    session.set_pipelining_enabled(true);
    // The body reader has a timeout for the whole body; one for each read would be a timer per chunk.
    session.set_read_timeout(None);
    match session.read_request().await {
        Ok(true) => {}
        Ok(false) => return None,
        Err(error) => {
            // A client sent an invalid request head, and its connection was closed.
            tracing::debug!(%error, "reading a request head failed");
            respond::malformed_request(&mut session).await;
            linger(session).await;
            return None;
        }
    }
    let closes = shared.handle(&mut session, peer).await == AfterResponse::Close;
    if closes || session.get_keepalive().is_none() && !session.is_body_done() {
        linger(session).await;
        return None;
    }
    let (stream, over) = session.finish().await.ok()??.into_parts();
    // An empty rest would keep the buffer of this request.
    let over = over.filter(|over| !over.is_empty());
    Some((chunked::unwrap(stream), over.unwrap_or_default()))
}

/// Closes a connection after its last response, and lets a client that is still sending read that response.
async fn linger(session: ServerSession) {
    if let ServerSession::H1(session) = session {
        write_last(chunked::unwrap(session.into_inner()), &[]).await;
    }
}

/// Writes a response, closes the write side, and lets the client read the response.
async fn write_last(mut stream: Stream, response: &[u8]) {
    let write = async {
        stream.write_all(response).await?;
        stream.flush().await?;
        AsyncWriteExt::shutdown(&mut stream).await?;
        let mut rest = stream.take(LINGER_BYTES_MAX as u64);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    // The connection ends here whether the response was read or not.
    timeout(LINGER_TIMEOUT, write).await.ok();
}
