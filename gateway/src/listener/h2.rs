//! HTTP/2 connections: requests side by side, each answered in a task of its own.
//!
//! Framing and flow control are those of the `h2` crate, under Pingora's session. What is decided here is how much of
//! each a client gets, that a client which only keeps us busy is told to calm down ([`gateway_core::flood`]), and how the
//! connection ends: GOAWAY first, then everything that was begun, then the close.

use super::admission::Admitted;
use super::meter::Metered;
use super::{AfterAnswer, Carries, Door, Shared, Stage};
use crate::metrics::Closed;
use crate::respond;
use bytes::Bytes;
use gateway_core::flood::Flood;
use gateway_core::multiplex::REQUESTS_MAX;
use h2::Reason;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::v2::server::{self, H2Accept, H2Options, HttpSession};
use pingora::protocols::{Digest, Stream};
use std::sync::Arc;
use std::time::Duration;
use supervision::task::contained;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Requests under way at once on one connection; a client that has more waits, or opens another.
const STREAMS_MAX: u32 = 128;
/// Bytes that the headers of one request may have, unpacked (RFC 9113, 6.5.2): as many as an HTTP/1 head.
const HEADER_LIST_BYTES_MAX: u32 = gateway_core::head::HEAD_BYTES_MAX as u32;
/// What may be under way to us for one request. The default of 64 KiB would let a client 80 ms away upload 0.8 MiB/s; this
/// lets it upload 12.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// What may be under way to us on one connection, and so what one may make us hold that no request has taken yet.
const CONNECTION_WINDOW_BYTES: u32 = 2 << 20;
/// The same of what a gateway sends, which many clients stand behind, and which is read as it comes.
const GATEWAY_STREAM_WINDOW_BYTES: u32 = 4 << 20;
const GATEWAY_CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// Larger frames than the least that everybody has to take.
const GATEWAY_FRAME_BYTES_MAX: u32 = 64 << 10;
/// What one answer may hold that the client has not taken yet.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Requests that make no sense which a connection may send in all.
const MALFORMED_MAX: usize = 32;
/// How long the last words (GOAWAY, its acknowledgement) may take once nothing is in flight.
const GOODBYE: Duration = Duration::from_millis(500);
/// How long requests may take to notice that their connection is gone.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(5);

type Connection = h2::server::Connection<Stream, Bytes>;

/// Of what comes over `stream`, `read_before` was read already.
pub(super) async fn serve<D: Door>(
    shared: &Arc<Shared<D>>,
    stream: Stream,
    read_before: Bytes,
    admitted: &mut Admitted,
) {
    let digest = Arc::new(Digest {
        ssl_digest: stream.get_ssl_digest(),
        timing_digest: stream.get_timing_digest(),
        proxy_digest: stream.get_proxy_digest(),
        socket_digest: stream.get_socket_digest(),
    });
    let (stream, mut flooded) = Metered::new(stream, read_before);
    let handshake = server::handshake(Box::new(stream), Some(options(shared.carries)));
    let handshake = async {
        tokio::select! {
            handshake = timeout(shared.timeouts.head, handshake) => Some(handshake),
            () = admitted.evicted() => None,
        }
    };
    let Some(handshake) = handshake.await else { return shared.counts.closed.count(Closed::HalfOpen) };
    let mut connection = match handshake {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(%error, "no HTTP/2 handshake"),
        Err(_) => return shared.counts.closed.count(Closed::HandshakeSlow),
    };
    let mut requests = JoinSet::new();
    let mut stage = shared.stage.clone();
    let mut malformed = 0;
    // Whoever comes while we are leaving is served once: a GOAWAY before the first request would only send him round.
    let mut asked = *stage.borrow() == Stage::Serving;
    loop {
        let now = *stage.borrow_and_update();
        if now == Stage::Closing || (now == Stage::LameDuck && asked) {
            connection.graceful_shutdown();
        }
        // An idle connection is kept for a while, unless we are leaving: then only for its last words.
        let patience = if now == Stage::Closing { GOODBYE } else { shared.timeouts.idle };
        let unused = async {
            tokio::select! {
                () = tokio::time::sleep(patience) => Closed::Idle,
                () = shared.crowded.notified() => Closed::Crowded,
                () = admitted.evicted() => Closed::HalfOpen,
            }
        };
        let accepted = tokio::select! {
            biased;
            Ok(Flood(idle)) = &mut flooded => {
                tracing::info!(frame = idle.as_str(), "an HTTP/2 client sends frames that bring nothing, and is left");
                shared.counts.floods.count(idle);
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                timeout(GOODBYE, drive(&mut connection)).await.ok();
                break;
            }
            Ok(()) = stage.changed() => continue,
            Some(_) = requests.join_next() => continue,
            accepted = HttpSession::from_h2_conn(&mut connection, digest.clone()) => accepted,
            why = unused, if requests.is_empty() => {
                if now != Stage::Closing {
                    shared.counts.closed.count(why);
                }
                connection.abrupt_shutdown(Reason::NO_ERROR);
                timeout(GOODBYE, drive(&mut connection)).await.ok();
                break;
            }
        };
        match accepted {
            Ok(Some(H2Accept::Session(session))) => {
                asked = true;
                admitted.mark(false);
                let shared = shared.clone();
                requests.spawn(async move {
                    contained("HTTP/2 stream", shared.one(session)).await;
                });
            }
            Ok(Some(H2Accept::Rejected)) => {
                malformed += 1;
                if malformed > MALFORMED_MAX {
                    shared.counts.closed.count(Closed::Malformed);
                    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                    timeout(GOODBYE, drive(&mut connection)).await.ok();
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "an HTTP/2 connection broke");
                break;
            }
        }
    }
    // Those whose client has gone see it by themselves, and end as such.
    drop(connection);
    if timeout(NOTICE_TIMEOUT, async { while requests.join_next().await.is_some() {} }).await.is_err() {
        requests.shutdown().await;
    }
}

fn options(carries: Carries) -> H2Options {
    let mut options = H2Options::new();
    options.max_header_list_size(HEADER_LIST_BYTES_MAX).max_send_buffer_size(SEND_BUFFER_BYTES);
    match carries {
        Carries::OneClients => options
            .max_concurrent_streams(STREAMS_MAX)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES),
        Carries::AGateways => options
            .max_concurrent_streams(REQUESTS_MAX as u32)
            .initial_window_size(GATEWAY_STREAM_WINDOW_BYTES)
            .initial_connection_window_size(GATEWAY_CONNECTION_WINDOW_BYTES)
            .max_frame_size(GATEWAY_FRAME_BYTES_MAX)
            // All of its clients may leave at the same moment.
            .max_pending_accept_reset_streams(REQUESTS_MAX),
    };
    options
}

/// Sends what is left to be sent.
async fn drive(connection: &mut Connection) {
    std::future::poll_fn(|context| connection.poll_closed(context)).await.ok();
}

impl<D: Door> Shared<D> {
    async fn one(&self, session: HttpSession) {
        let mut session = ServerSession::new_http2(session);
        match self.answer(&mut session).await {
            AfterAnswer::Close => session.shutdown().await,
            // An answer that is not whole ends in a reset when the session is dropped.
            AfterAnswer::Reuse => {
                // A reset while the client is still sending can hide the response from it.
                respond::discard(&mut session).await;
                drop(session.finish().await);
            }
        }
    }
}
