//! One HTTP/2 connection to a region: the task that drives it, its pulse, and what is under way on it.

use super::Stream;
use crate::hop::{Greeted, Outward};
use crate::metrics::{HopEvent, Tally};
use crate::plain::{self, Way};
use bytes::Bytes;
use gateway_core::multiplex::{
    KEEPALIVE_INTERVAL, Keepalive, KeepaliveAction, REQUESTS_BEFORE_OPENING, REQUESTS_MAX,
};
use gateway_core::residency::Peer;
use h2::client::{Builder, SendRequest};
use h2::{Ping, Reason, RecvStream, SendStream};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::MissedTickBehavior;

/// What of one answer may be under way: without waiting for anybody, 64 MiB take 2.6 s over a round trip of 80 ms. An answer
/// that is read whole is smaller.
const ANSWER_WINDOW_BYTES: u32 = 2 << 20;
/// Of all answers on a connection: as many as a connection has easily may have clients that do not read.
const CONNECTION_WINDOW_BYTES: u32 = REQUESTS_BEFORE_OPENING as u32 * ANSWER_WINDOW_BYTES;
/// Larger frames than the least that everybody has to take, for large answers.
const FRAME_BYTES_MAX: u32 = 64 << 10;
/// The head of an answer, unpacked: as much as over HTTP/1.1.
const HEAD_BYTES_MAX: u32 = 64 << 10;
/// How long a connection is kept without a request, as over HTTP/1.1.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long what still comes for a request that was given up is known as such: some round trips.
const GIVEN_UP_FOR: Duration = Duration::from_secs(5);

/// A connection that is open.
pub(super) struct Connection {
    send: SendRequest<Bytes>,
    state: Arc<State>,
}

/// What its requests, its task and its socket know of a connection.
struct State {
    way: Way,
    peer: Peer,
    begun: Instant,
    /// When the last byte came, in milliseconds from when it was begun.
    heard_ms: AtomicU64,
    /// Under way.
    requests: AtomicUsize,
    /// Were begun, in all.
    served: AtomicU64,
    /// One was answered.
    answered: AtomicBool,
    silent: AtomicBool,
    /// It takes nothing new, because nobody needs it.
    retiring: AtomicBool,
    outward: Arc<Outward>,
    counts: Arc<Tally<HopEvent>>,
}

/// A request's place on a connection.
pub(super) struct Lease(Arc<State>);

/// A request that was sent, or is being sent. Whoever drops it before its answer has ended gives it up.
pub(super) struct Asked {
    stream: SendStream<Bytes>,
    lease: Lease,
}

/// A body that is still coming.
pub(crate) struct Rest {
    body: RecvStream,
    _asked: Asked,
}

impl Connection {
    /// Begins HTTP/2; with what drives it, which ends when the connection does.
    pub(super) async fn begin(
        way: Way,
        greeted: Greeted,
        outward: Arc<Outward>,
        counts: Arc<Tally<HopEvent>>,
    ) -> Result<(Arc<Connection>, impl Future<Output = ()> + Send + use<>), h2::Error> {
        let Greeted { stream, peer, http2: _ } = greeted;
        let state = Arc::new(State {
            way,
            peer,
            begun: Instant::now(),
            heard_ms: AtomicU64::new(0),
            requests: AtomicUsize::new(0),
            served: AtomicU64::new(0),
            answered: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            retiring: AtomicBool::new(false),
            outward,
            counts,
        });
        let heard = Heard { stream, state: state.clone() };
        let (send, connection) = options().handshake(heard).await?;
        Ok((Arc::new(Connection { send, state: state.clone() }), drive(connection, state)))
    }

    pub(super) fn requests(&self) -> usize {
        self.state.requests.load(Relaxed)
    }

    pub(super) fn is_silent(&self) -> bool {
        self.state.silent.load(Relaxed)
    }

    /// A place for one more; none on a connection that the other side is leaving, that nobody needs, or that is older than
    /// `age_max`.
    pub(super) fn stream(&self, now: Instant, age_max: Duration) -> Option<Stream> {
        let state = &self.state;
        if state.retiring.load(Relaxed) || now.saturating_duration_since(state.begun) >= age_max {
            return None;
        }
        let mut send = self.send.clone();
        // It waits for nothing: only whoever has sent a request may have to, and this one is new.
        let Poll::Ready(Ok(())) = send.poll_ready(&mut Context::from_waker(Waker::noop())) else {
            return None;
        };
        state.requests.fetch_add(1, Relaxed);
        state.served.fetch_add(1, Relaxed);
        Some(Stream { send, lease: Lease(state.clone()) })
    }
}

fn options() -> Builder {
    let mut options = Builder::new();
    options
        .enable_push(false)
        .initial_window_size(ANSWER_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEAD_BYTES_MAX)
        .max_concurrent_reset_streams(REQUESTS_MAX)
        .reset_stream_duration(GIVEN_UP_FOR);
    options
}

impl State {
    fn heard(&self) -> Instant {
        self.begun + Duration::from_millis(self.heard_ms.load(Relaxed))
    }
}

/// Moves bytes, and feels the pulse, until the connection ends or is dead.
async fn drive(mut connection: h2::client::Connection<Heard, Bytes>, state: Arc<State>) {
    let mut pings = connection.ping_pong().expect("nobody else takes it");
    let (mut pulse, mut under_way) = (Keepalive::default(), false);
    let (mut served, mut used) = (0, state.begun);
    let mut beat = tokio::time::interval(KEEPALIVE_INTERVAL);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // What has come is read before anybody is called dead: it may have been us who slept.
            biased;
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(address = %state.way.address, %error, "an HTTP/2 connection to a region ended");
                }
                return;
            }
            _ = poll_fn(|context| pings.poll_pong(context)), if under_way => under_way = false,
            _ = beat.tick() => {
                let (now, requests) = (Instant::now(), state.requests.load(Relaxed));
                match pulse.check(state.heard(), requests, now) {
                    KeepaliveAction::None => {}
                    KeepaliveAction::Ping => under_way |= pings.send_ping(Ping::opaque()).is_ok(),
                    KeepaliveAction::Close => {
                        state.counts.count(HopEvent::Dead);
                        tracing::info!(address = %state.way.address, requests, "a connection to a region is dead");
                        return;
                    }
                }
                let silent = pulse.is_unresponsive(now);
                if silent && !state.silent.load(Relaxed) {
                    state.counts.count(HopEvent::Silent);
                }
                state.silent.store(silent, Relaxed);
                let served_now = state.served.load(Relaxed);
                if requests > 0 || served_now != served {
                    (served, used) = (served_now, now);
                } else if state.retiring.load(Relaxed) {
                    return;
                } else if now.saturating_duration_since(used) >= IDLE_TIMEOUT {
                    // Whoever was given a place a moment ago is seen at the next beat.
                    state.retiring.store(true, Relaxed);
                }
            }
        }
    }
}

impl Lease {
    pub(super) fn peer(&self) -> Peer {
        self.0.peer
    }

    /// The connection has brought an answer before.
    pub(super) fn has_answered(&self) -> bool {
        self.0.answered.load(Relaxed)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Relaxed);
    }
}

impl Asked {
    pub(super) fn new(stream: SendStream<Bytes>, lease: Lease) -> Asked {
        Asked { stream, lease }
    }

    /// Sends all of a body.
    pub(super) fn send(&mut self, body: Bytes) -> Result<(), h2::Error> {
        self.stream.send_data(body, true)
    }

    /// The head of its answer has come.
    pub(super) fn answered(self, body: RecvStream) -> Rest {
        let state = &self.lease.0;
        if !state.answered.swap(true, Relaxed) {
            state.outward.is_well(state.way.region);
        }
        Rest { body, _asked: self }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        // Said at once and in the place of what was not sent yet; of a stream that has ended nothing is said.
        self.stream.send_reset(Reason::CANCEL);
    }
}

impl Rest {
    /// The next piece of the body; `None` at its end.
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

/// A stream that notes when something was heard, and why it broke, of which `h2` tells only the words.
struct Heard {
    stream: plain::Stream,
    state: Arc<State>,
}

impl AsyncRead for Heard {
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
                state.heard_ms.store(state.begun.elapsed().as_millis() as u64, Relaxed);
            }
            Poll::Ready(Err(error)) => self.state.outward.broke(self.state.way, error),
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        read
    }
}

impl AsyncWrite for Heard {
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
