//! HTTP/2 client for regions: many concurrent requests on one connection.
//!
//! HTTP/1.1 ([`crate::http1`]) needs a connection for each request in flight, and cancelling a request costs its
//! connection, with a handshake across an ocean for the next one. Here a request is a stream of an open connection:
//! cancelling it is one frame (RST_STREAM), and the region learns of it at once. The protocol is the gateway's
//! configuration (`region_http`); the region accepts it in the TLS handshake (ALPN), or HTTP/1.1 is used. In plaintext
//! there is no negotiation: the region must support it. `benches/hop.rs` compares the two.
//!
//! [`gateway_core::multiplex`] decides which connection takes a request and when a connection has timed out;
//! [`connection`] contains one connection and its driver task; this module opens them, one at a time for each upstream,
//! keeps and drains them.
//!
//! The `h2` crate implements framing and flow control. A connection that a region drains (GOAWAY) takes no new requests
//! and finishes those in flight; requests that the region reports as unprocessed, and requests in flight on a
//! connection that failed and had worked before, are [`AttemptFailure::StaleConnection`], which costs no retry budget.

mod connection;
#[cfg(test)]
mod tests;

use crate::hop::{Connector, PeerConnection, UpstreamKey};
use crate::http1::Http1Client;
use crate::metrics::{Family, HopEvent};
use crate::request_head::RequestHead;
use bytes::{Bytes, BytesMut};
pub(crate) use connection::Http2Body;
use connection::{Connection, StreamPermit};
use gateway_core::multiplex::{self, ConnectionLoad, Selected};
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::Peer;
use h2::client::SendRequest;
use http::response::Parts;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::task::contained;
use supervision::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Maximum age of a connection: its certificates, and the authorities that verified them, may have changed since.
const AGE_MAX: Duration = Duration::from_secs(600);

/// HTTP/2 client for regions.
pub(crate) struct Http2Client {
    connector: Arc<Connector>,
    upstreams: Mutex<BTreeMap<UpstreamKey, Arc<UpstreamConnections>>>,
    /// Tasks that open and drive connections; they end when this is dropped.
    tasks: Mutex<JoinSet<()>>,
    counts: Arc<Family<HopEvent>>,
}

/// Connections to one upstream.
struct UpstreamConnections {
    inner: Mutex<Inner>,
    /// Number of attempts to open a connection that have ended, and the outcome of the last.
    opened: watch::Sender<(u64, Result<(), AttemptFailure>)>,
    counts: Arc<Family<HopEvent>>,
}

#[derive(Default)]
struct Inner {
    /// In the order in which they were opened.
    open: Vec<Arc<Connection>>,
    opening: bool,
    /// Whether the peer chose HTTP/1.1 when the last connection was opened.
    is_http1: bool,
}

/// Result of reserving a slot for a request.
pub(crate) enum Http2Slot {
    /// As a stream of a connection.
    Stream(Http2Stream),
    /// Over HTTP/1.1, because the region does not support HTTP/2.
    Http1,
}

/// Slot on a connection, for one request.
pub(crate) struct Http2Stream {
    send: SendRequest<Bytes>,
    permit: StreamPermit,
}

impl Http2Client {
    pub(crate) fn over(connector: Arc<Connector>) -> Http2Client {
        Http2Client {
            connector,
            upstreams: Mutex::default(),
            tasks: Mutex::independent(JoinSet::new()),
            counts: Arc::default(),
        }
    }

    /// Returns the counters of connection events.
    pub(crate) fn counts(&self) -> &Family<HopEvent> {
        &self.counts
    }

    /// Returns the number of open connections and of requests in flight on them.
    pub(crate) fn size(&self) -> (usize, usize) {
        let upstreams = self.upstreams.lock();
        let sizes = upstreams.values().map(|connections| {
            let inner = connections.lock();
            (inner.open.len(), inner.open.iter().map(|one| one.requests()).sum::<usize>())
        });
        sizes.fold((0, 0), |(open, requests), (more, of_those)| (open + more, requests + of_those))
    }

    /// Reserves a slot on a connection to `key`; opening a connection may take `connect_timeout`.
    pub(crate) async fn open(
        &self,
        key: &UpstreamKey,
        connect_timeout: Duration,
        http1: &Arc<Http1Client>,
    ) -> Result<Http2Slot, AttemptFailure> {
        let connections = self.connections_to(key);
        loop {
            // Subscribed before the check, so that no notification is lost in between.
            let mut opened = connections.opened.subscribe();
            let (slot, open_one) = connections.acquire();
            if open_one {
                let opening = open_connection(
                    connections.clone(),
                    self.connector.clone(),
                    http1.clone(),
                    key.clone(),
                    connect_timeout,
                );
                self.spawn(opening);
            }
            match slot {
                Acquisition::Ready(opened) => return Ok(opened),
                Acquisition::Full => {
                    self.counts.count(HopEvent::Full);
                    return Err(AttemptFailure::Unreachable);
                }
                Acquisition::Pending => {
                    // The sender is in `connections`, which is held here.
                    opened.changed().await.ok();
                    opened.borrow().1?;
                }
            }
        }
    }

    /// Adds a connection that was opened for HTTP/1.1 to a region that turned out to support HTTP/2.
    pub(crate) async fn adopt(
        &self,
        key: &UpstreamKey,
        connected: PeerConnection,
    ) -> Result<(), AttemptFailure> {
        let connections = self.connections_to(key);
        let driver = connections.take(key.clone(), connected, &self.connector).await?;
        self.spawn(driver);
        Ok(())
    }

    fn connections_to(&self, key: &UpstreamKey) -> Arc<UpstreamConnections> {
        let mut upstreams = self.upstreams.lock();
        if let Some(connections) = upstreams.get(key) {
            return connections.clone();
        }
        // Unused upstreams are removed when a new one is added.
        upstreams.retain(|_, connections| {
            Arc::strong_count(connections) > 1 || !connections.lock().open.is_empty()
        });
        let (opened, _) = watch::channel((0, Ok(())));
        let connections =
            UpstreamConnections { inner: Mutex::default(), opened, counts: self.counts.clone() };
        upstreams.entry(key.clone()).or_insert(Arc::new(connections)).clone()
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async {
            contained("region connection", task).await;
        });
    }
}

/// Result of looking for a slot.
enum Acquisition {
    Ready(Http2Slot),
    Pending,
    Full,
}

impl UpstreamConnections {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Returns a slot for one more request, and whether another connection is to be opened.
    fn acquire(&self) -> (Acquisition, bool) {
        let now = Instant::now();
        let mut inner = self.lock();
        if inner.is_http1 {
            return (Acquisition::Ready(Http2Slot::Http1), false);
        }
        loop {
            let loads = inner
                .open
                .iter()
                .map(|one| ConnectionLoad { requests: one.requests(), unresponsive: one.is_unresponsive() });
            let (at, open_one) = match multiplex::select(loads, inner.opening) {
                Selected::Use(at) => (at, false),
                Selected::UseAndOpen(at) => (at, true),
                Selected::OpenAndWait => {
                    inner.opening = true;
                    return (Acquisition::Pending, true);
                }
                Selected::Wait => return (Acquisition::Pending, false),
                Selected::Full => return (Acquisition::Full, false),
            };
            // A connection that is too old, or that the region drains, finishes its requests.
            let Some(stream) = inner.open[at].reserve(now, AGE_MAX) else {
                inner.open.remove(at);
                self.counts.count(HopEvent::Retired);
                continue;
            };
            inner.opening |= open_one;
            return (Acquisition::Ready(Http2Slot::Stream(stream)), open_one);
        }
    }

    /// Starts HTTP/2 on a connection; the caller must run the returned driver.
    async fn take(
        self: &Arc<UpstreamConnections>,
        key: UpstreamKey,
        connected: PeerConnection,
        connector: &Arc<Connector>,
    ) -> Result<impl Future<Output = ()> + Send + use<>, AttemptFailure> {
        let started = Connection::begin(key.clone(), connected, connector.clone(), self.counts.clone()).await;
        let (connection, driven) = started.map_err(|error| {
            // A connection did not start with a valid HTTP/2 preface: of an upstream if the line has an `address`,
            // otherwise of a client.
            tracing::debug!(address = %key.address, %error, "HTTP/2 handshake failed");
            AttemptFailure::Unreachable
        })?;
        self.counts.count(HopEvent::Opened);
        let mut inner = self.lock();
        inner.is_http1 = false;
        inner.open.push(connection.clone());
        drop(inner);
        // A weak reference: the connection ends when no request can use it any more.
        let (connections, this) = (self.clone(), Arc::downgrade(&connection));
        Ok(async move {
            contained("region connection", driven).await;
            connections.lock().open.retain(|one| !std::ptr::eq(Arc::as_ptr(one), this.as_ptr()));
        })
    }

    fn report(&self, outcome: Result<(), AttemptFailure>) {
        self.lock().opening = false;
        self.opened.send_modify(|(count, last)| (*count, *last) = (*count + 1, outcome));
    }
}

/// Opens a connection and drives it until it ends. It is not owned by a request: the first one may have been cancelled.
async fn open_connection(
    connections: Arc<UpstreamConnections>,
    connector: Arc<Connector>,
    http1: Arc<Http1Client>,
    key: UpstreamKey,
    connect_timeout: Duration,
) {
    let opened = async {
        let connected = connector.connect(&key, connect_timeout).await?;
        if connected.http2 {
            return connections.take(key, connected, &connector).await.map(Some);
        }
        connections.counts.count(HopEvent::Http1);
        connections.lock().is_http1 = true;
        http1.put_idle(&key, connected);
        Ok(None)
    };
    // Other requests wait for the outcome, even a panic.
    let opened = contained("region connection", opened).await.unwrap_or(Err(AttemptFailure::Unreachable));
    connections.report(opened.as_ref().map(|_| ()).map_err(|failure| *failure));
    if let Ok(Some(driver)) = opened {
        driver.await;
    }
}

impl Http2Stream {
    /// Returns the identity of the peer.
    pub(crate) fn peer(&self) -> Peer {
        self.permit.peer()
    }

    /// Sends a request and waits for the head of its response; the caller bounds the time by dropping the future, which
    /// cancels the stream.
    pub(crate) async fn send(
        self,
        head: &RequestHead,
        body: Bytes,
    ) -> Result<(Parts, Http2Body), AttemptFailure> {
        let Http2Stream { mut send, permit } = self;
        let used_before = permit.has_answered();
        let exchange = async {
            let bodiless = body.is_empty();
            let (response, stream) = send.send_request(head.to_http2(), bodiless)?;
            let mut request = connection::SentRequest::new(stream, permit);
            if !bodiless {
                // The bytes are shared, not copied, and are sent as flow control allows.
                request.send(body)?;
            }
            let (head, body) = response.await?.into_parts();
            Ok::<_, h2::Error>((head, request.into_body(body)))
        };
        exchange.await.map_err(|error| {
            // A request over HTTP/2 ended before its response. `used_before`: the connection had served other requests.
            tracing::debug!(%error, used_before, "exchange failed before a response");
            // Requests that the region reports as unprocessed, and requests in flight on a failed connection.
            let unprocessed = error.is_remote()
                && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM));
            if used_before && (unprocessed || error.is_io()) {
                AttemptFailure::StaleConnection
            } else {
                AttemptFailure::Unreachable
            }
        })
    }
}

impl Http2Body {
    /// Returns a complete body of this length, without a copy if it arrived in one piece. Also reads the end of the
    /// stream, which may be a frame of its own: dropping the body before it would cancel a complete response.
    pub(crate) async fn whole(&mut self, length: usize) -> Result<Bytes, h2::Error> {
        let Some(first) = self.chunk().await? else { return Ok(Bytes::new()) };
        if first.len() == length {
            // A body longer than its content-length is a connection error.
            self.chunk().await?;
            return Ok(first);
        }
        let mut whole = BytesMut::with_capacity(length);
        whole.extend_from_slice(&first);
        while let Some(chunk) = self.chunk().await? {
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    }
}
