//! HTTP/2 connection to a region: its driver task, its health check, and its requests in flight.

use super::Http2Stream;
use crate::hop::{Connector, IDLE_TIMEOUT, PeerConnection, TransportStream, UpstreamKey};
use crate::metrics::{Family, HopEvent};
use bytes::Bytes;
use gateway_core::multiplex::{
    KEEPALIVE_INTERVAL, Keepalive, KeepaliveAction, REQUESTS_BEFORE_OPENING, REQUESTS_MAX,
};
use gateway_core::residency::Peer;
use h2::client::{Builder, SendRequest};
use h2::{Ping, Reason, RecvStream, SendStream};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::MissedTickBehavior;

/// Flow control window of one response: without stalls, 64 MiB take 2.6 s over a round trip of 80 ms. A response that
/// is buffered as a whole is smaller.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// Window of all responses on a connection: as many clients as a connection comfortably has may stop reading, and their
/// back-pressure delays no other.
const CONNECTION_WINDOW_BYTES: u32 = REQUESTS_BEFORE_OPENING as u32 * STREAM_WINDOW_BYTES;
/// Frames for large responses, larger than the minimum that every peer must accept.
const FRAME_BYTES_MAX: u32 = 64 << 10;
/// Time for which frames of a cancelled stream are still recognized: some round trips.
const RESET_STREAM_DURATION: Duration = Duration::from_secs(5);

/// Open connection.
pub(super) struct Connection {
    send: SendRequest<Bytes>,
    state: Arc<State>,
}

/// State shared by a connection's requests, its task and its socket.
struct State {
    key: UpstreamKey,
    peer: Peer,
    remote: IpAddr,
    started: Instant,
    /// Time of the last received byte, in milliseconds since `started`.
    last_received_ms: AtomicU64,
    /// Requests in flight.
    requests: AtomicUsize,
    /// Requests begun over the lifetime.
    served: AtomicU64,
    /// Whether a response was received.
    has_responded: AtomicBool,
    unresponsive: AtomicBool,
    /// Whether it takes no new requests because it is not needed.
    retiring: AtomicBool,
    connector: Arc<Connector>,
    counts: Arc<Family<HopEvent>>,
}

/// Slot of a request on a connection, released on drop.
pub(super) struct StreamPermit(Arc<State>);

/// Request that is being sent or waits for its response. Dropping it before the response has ended cancels the stream.
pub(super) struct SentRequest {
    stream: SendStream<Bytes>,
    permit: StreamPermit,
}

/// Response body that is being received.
pub(crate) struct Http2Body {
    body: RecvStream,
    _request: SentRequest,
}

impl Connection {
    /// Starts HTTP/2; also returns the driver, which completes when the connection ends.
    pub(super) async fn begin(
        key: UpstreamKey,
        connected: PeerConnection,
        connector: Arc<Connector>,
        counts: Arc<Family<HopEvent>>,
    ) -> Result<(Arc<Connection>, impl Future<Output = ()> + Send + use<>), h2::Error> {
        let PeerConnection { stream, peer, http2: _, remote } = connected;
        let state = Arc::new(State {
            key,
            peer,
            remote,
            started: Instant::now(),
            last_received_ms: AtomicU64::new(0),
            requests: AtomicUsize::new(0),
            served: AtomicU64::new(0),
            has_responded: AtomicBool::new(false),
            unresponsive: AtomicBool::new(false),
            retiring: AtomicBool::new(false),
            connector,
            counts,
        });
        let stream = ActivityStream { stream, state: state.clone() };
        let (send, connection) = options().handshake(stream).await?;
        Ok((Arc::new(Connection { send, state: state.clone() }), drive(connection, state)))
    }

    pub(super) fn requests(&self) -> usize {
        self.state.requests.load(Relaxed)
    }

    pub(super) fn is_unresponsive(&self) -> bool {
        self.state.unresponsive.load(Relaxed)
    }

    /// Reserves a slot for one more request; `None` if the peer drains the connection, it is not needed any more, it is
    /// older than `age_max`, or the upstream's name has other addresses now.
    pub(super) fn reserve(&self, now: Instant, age_max: Duration) -> Option<Http2Stream> {
        let state = &self.state;
        let is_too_old = now.saturating_duration_since(state.started) >= age_max;
        if state.retiring.load(Relaxed) || is_too_old || !state.connector.is_current(&state.key, state.remote)
        {
            return None;
        }
        let mut send = self.send.clone();
        // Never pending: only a handle that has sent a request may have to wait, and this one is new.
        let Poll::Ready(Ok(())) = send.poll_ready(&mut Context::from_waker(Waker::noop())) else {
            return None;
        };
        state.requests.fetch_add(1, Relaxed);
        state.served.fetch_add(1, Relaxed);
        Some(Http2Stream { send, permit: StreamPermit(state.clone()) })
    }
}

fn options() -> Builder {
    let mut options = Builder::new();
    options
        .enable_push(false)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(::http1::HEAD_BYTES_MAX as u32)
        .max_concurrent_reset_streams(REQUESTS_MAX)
        .reset_stream_duration(RESET_STREAM_DURATION);
    options
}

impl State {
    fn last_received(&self) -> Instant {
        self.started + Duration::from_millis(self.last_received_ms.load(Relaxed))
    }
}

/// Drives the connection and its health check until it ends or times out.
async fn drive(mut connection: h2::client::Connection<ActivityStream, Bytes>, state: Arc<State>) {
    let mut pings = connection.ping_pong().expect("it is taken only once");
    let (mut pulse, mut ping_in_flight) = (Keepalive::default(), false);
    let (mut served, mut used) = (0, state.started);
    let mut interval = tokio::time::interval(KEEPALIVE_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // Received bytes are read before the health check, because this process may have been the one that was
            // stalled.
            biased;
            ended = &mut connection => {
                if let Err(error) = ended {
                    // A connection ended with an error: of an upstream if the line has an `address`, otherwise of a
                    // client.
                    tracing::debug!(address = %state.key.address, %error, "HTTP/2 connection failed");
                }
                return;
            }
            _ = poll_fn(|context| pings.poll_pong(context)), if ping_in_flight => ping_in_flight = false,
            _ = interval.tick() => {
                let (now, requests) = (Instant::now(), state.requests.load(Relaxed));
                match pulse.check(state.last_received(), requests, now) {
                    KeepaliveAction::None => {}
                    KeepaliveAction::Ping => ping_in_flight |= pings.send_ping(Ping::opaque()).is_ok(),
                    KeepaliveAction::Close => {
                        state.counts.count(HopEvent::TimedOut);
                        let region = state.connector.region_name(state.key.region);
                        // A region or replica did not respond to a ping, and the connection was closed. The `requests`
                        // requests on it fail over.
                        tracing::info!(region, address = %state.key.address, requests, "HTTP/2 connection timed out");
                        return;
                    }
                }
                let unresponsive = pulse.is_unresponsive(now);
                if unresponsive && !state.unresponsive.load(Relaxed) {
                    state.counts.count(HopEvent::Unresponsive);
                }
                state.unresponsive.store(unresponsive, Relaxed);
                let served_now = state.served.load(Relaxed);
                if requests > 0 || served_now != served {
                    (served, used) = (served_now, now);
                } else if state.retiring.load(Relaxed) {
                    return;
                } else if now.saturating_duration_since(used) >= IDLE_TIMEOUT {
                    // A slot that was reserved a moment ago is seen at the next tick.
                    state.retiring.store(true, Relaxed);
                }
            }
        }
    }
}

impl StreamPermit {
    pub(super) fn peer(&self) -> Peer {
        self.0.peer
    }

    /// Returns whether the connection has received a response before.
    pub(super) fn has_answered(&self) -> bool {
        self.0.has_responded.load(Relaxed)
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Relaxed);
    }
}

impl SentRequest {
    pub(super) fn new(stream: SendStream<Bytes>, permit: StreamPermit) -> SentRequest {
        SentRequest { stream, permit }
    }

    /// Sends the complete body.
    pub(super) fn send(&mut self, body: Bytes) -> Result<(), h2::Error> {
        self.stream.send_data(body, true)
    }

    /// Records the response head, and returns the body.
    pub(super) fn into_body(self, body: RecvStream) -> Http2Body {
        let state = &self.permit.0;
        if !state.has_responded.swap(true, Relaxed) {
            state.connector.mark_healthy(&state.key);
        }
        Http2Body { body, _request: self }
    }
}

impl Drop for SentRequest {
    fn drop(&mut self) {
        // Sent immediately, instead of unsent frames; a no-op for a stream that has ended.
        self.stream.send_reset(Reason::CANCEL);
    }
}

impl Http2Body {
    /// Returns the next piece of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, h2::Error> {
        while let Some(chunk) = self.body.data().await {
            let chunk = chunk?;
            self.body.flow_control().release_capacity(chunk.len())?;
            if !chunk.is_empty() {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }
}

/// Stream that records the time of the last received byte, and its I/O errors, which `h2` returns only as text.
struct ActivityStream {
    stream: TransportStream,
    state: Arc<State>,
}

impl AsyncRead for ActivityStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        match &read {
            Poll::Ready(Ok(())) if into.filled().len() > before => {
                let state = &self.state;
                state.last_received_ms.store(state.started.elapsed().as_millis() as u64, Relaxed);
            }
            Poll::Ready(Err(error)) => self.state.connector.connection_failed(&self.state.key, error),
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        read
    }
}

impl AsyncWrite for ActivityStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
