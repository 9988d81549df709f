//! HTTP/2 connections: concurrent requests, each handled in its own task.
//!
//! The `h2` crate, under Pingora's session, implements framing and flow control. This module sets their limits, closes
//! the connection of a client that floods it with frames without effect ([`gateway_core::flood`]), and implements
//! graceful shutdown: GOAWAY, then completion of all requests, then close.

use super::admission::AdmittedConnection;
use super::{AfterResponse, DrainStage, PeerKind, RequestHandler, Shared, meter};
use crate::metrics::CloseReason;
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

/// Maximum number of concurrent requests on one connection; a client with more waits, or opens another connection.
const STREAMS_MAX: u32 = 128;
/// Maximum decoded header bytes of one request (RFC 9113, 6.5.2): as many as an HTTP/1 head.
const HEADER_LIST_BYTES_MAX: u32 = gateway_core::head::HEAD_BYTES_MAX as u32;
/// Receive window of one stream. The default of 64 KiB would limit a client 80 ms away to uploading 0.8 MiB/s; this
/// allows 12.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// Receive window of one connection, and so the maximum that a connection can make us buffer for requests that do not
/// read yet.
const CONNECTION_WINDOW_BYTES: u32 = 2 << 20;
/// Stream window of a gateway's connection, which carries many clients and is read as data arrives.
const GATEWAY_STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// Connection window of a gateway's connection.
const GATEWAY_CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// Larger frames than the minimum that every peer must accept.
const GATEWAY_FRAME_BYTES_MAX: u32 = 64 << 10;
/// Maximum bytes of one response that are buffered because the client has not read them.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Maximum number of malformed requests on one connection over its lifetime.
const MALFORMED_MAX: usize = 32;
/// Timeout for the last frames (GOAWAY, its acknowledgement) once no request is in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout for requests to notice that their connection has closed.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(5);

type Connection = h2::server::Connection<Stream, Bytes>;

/// Serves a connection; `read_before` are its bytes that were read already.
pub(super) async fn serve<D: RequestHandler>(
    shared: &Arc<Shared<D>>,
    stream: Stream,
    read_before: Bytes,
    peer: PeerKind,
    admitted: &mut AdmittedConnection,
) {
    let digest = Arc::new(Digest {
        ssl_digest: stream.get_ssl_digest(),
        timing_digest: stream.get_timing_digest(),
        proxy_digest: stream.get_proxy_digest(),
        socket_digest: stream.get_socket_digest(),
    });
    let (stream, mut flooded) = meter::wrap(stream, read_before);
    let handshake = server::handshake(stream, Some(options(peer)));
    let handshake = async {
        tokio::select! {
            handshake = timeout(shared.timeouts.head, handshake) => Some(handshake),
            () = admitted.evicted() => None,
        }
    };
    let Some(handshake) = handshake.await else { return shared.counts.closed.count(CloseReason::HalfOpen) };
    let mut connection = match handshake {
        Ok(Ok(connection)) => connection,
        // A connection did not start with a valid HTTP/2 preface: of an upstream if the line has an `address`,
        // otherwise of a client.
        Ok(Err(error)) => return tracing::debug!(%error, "HTTP/2 handshake failed"),
        Err(_) => return shared.counts.closed.count(CloseReason::HandshakeTimeout),
    };
    let mut requests = JoinSet::new();
    let mut stage = shared.stage.clone();
    let mut malformed = 0;
    // A client that connects during draining is served once: a GOAWAY before its first request would only make it
    // reconnect.
    let mut has_request = *stage.borrow() == DrainStage::Serving;
    loop {
        let now = *stage.borrow_and_update();
        if now == DrainStage::Closing || (now == DrainStage::LameDuck && has_request) {
            connection.graceful_shutdown();
        }
        // An idle connection is kept for the idle timeout; during draining only for its last frames.
        let idle_timeout = if now == DrainStage::Closing { CLOSE_TIMEOUT } else { shared.timeouts.idle };
        let unused = async {
            tokio::select! {
                () = tokio::time::sleep(idle_timeout) => CloseReason::Idle,
                () = shared.evict_idle.notified() => CloseReason::ConnectionLimit,
                () = admitted.evicted() => CloseReason::HalfOpen,
            }
        };
        let accepted = tokio::select! {
            biased;
            Ok(Flood(idle)) = &mut flooded => {
                // A client sent too many frames without effect (`frame`), and its connection was closed.
                tracing::info!(frame = idle.as_str(), "HTTP/2 connection closed for flooding");
                shared.counts.floods.count(idle);
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                timeout(CLOSE_TIMEOUT, drive(&mut connection)).await.ok();
                break;
            }
            Ok(()) = stage.changed() => continue,
            Some(_) = requests.join_next() => continue,
            accepted = HttpSession::from_h2_conn(&mut connection, digest.clone()) => accepted,
            reason = unused, if requests.is_empty() => {
                if now != DrainStage::Closing {
                    shared.counts.closed.count(reason);
                }
                connection.abrupt_shutdown(Reason::NO_ERROR);
                timeout(CLOSE_TIMEOUT, drive(&mut connection)).await.ok();
                break;
            }
        };
        match accepted {
            Ok(Some(H2Accept::Session(session))) => {
                has_request = true;
                admitted.mark(false);
                let shared = shared.clone();
                requests.spawn(async move {
                    contained("HTTP/2 stream", shared.handle_stream(session, peer)).await;
                });
            }
            Ok(Some(H2Accept::Rejected)) => {
                malformed += 1;
                if malformed > MALFORMED_MAX {
                    shared.counts.closed.count(CloseReason::MalformedRequests);
                    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                    timeout(CLOSE_TIMEOUT, drive(&mut connection)).await.ok();
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                // A connection ended with an error: of an upstream if the line has an `address`, otherwise of a client.
                tracing::debug!(%error, "HTTP/2 connection failed");
                break;
            }
        }
    }
    // Requests of a disconnected client notice it themselves, and end accordingly.
    drop(connection);
    if timeout(NOTICE_TIMEOUT, async { while requests.join_next().await.is_some() {} }).await.is_err() {
        requests.shutdown().await;
    }
}

fn options(peer: PeerKind) -> H2Options {
    let mut options = H2Options::new();
    options.max_header_list_size(HEADER_LIST_BYTES_MAX).max_send_buffer_size(SEND_BUFFER_BYTES);
    match peer {
        PeerKind::Client => options
            .max_concurrent_streams(STREAMS_MAX)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES),
        PeerKind::Gateway(_) | PeerKind::Spoke | PeerKind::Unauthenticated => options
            .max_concurrent_streams(REQUESTS_MAX as u32)
            .initial_window_size(GATEWAY_STREAM_WINDOW_BYTES)
            .initial_connection_window_size(GATEWAY_CONNECTION_WINDOW_BYTES)
            .max_frame_size(GATEWAY_FRAME_BYTES_MAX)
            // All clients of a gateway may cancel at the same moment.
            .max_pending_accept_reset_streams(REQUESTS_MAX),
    };
    options
}

/// Drives the connection until it is closed, sending the remaining frames.
async fn drive(connection: &mut Connection) {
    std::future::poll_fn(|context| connection.poll_closed(context)).await.ok();
}

impl<D: RequestHandler> Shared<D> {
    async fn handle_stream(&self, session: HttpSession, peer: PeerKind) {
        let mut session = ServerSession::new_http2(session);
        match self.handle(&mut session, peer).await {
            AfterResponse::Close => session.shutdown().await,
            // An incomplete response ends in a reset when the session is dropped.
            AfterResponse::Reuse => {
                // A reset while the client is still sending can hide the response from it.
                respond::discard(&mut session).await;
                drop(session.finish().await);
            }
        }
    }
}
