//! Listener: accepts connections, serves them, and drains them.
//!
//! Pingora's `Server` owns the process: its own runtimes, its own signal handling, a fixed wait before it exits. Ours
//! is one role among others in a process that the CLI owns, so the accept loop is here (bound before the port is
//! announced, joined before it returns) and Pingora is used from the request on: parsing, bodies, framing.
//!
//! The protocol of a connection is detected: TLS where a certificate is configured, and in it the protocol that ALPN
//! selected; else HTTP/2 if the first bytes are its preface; else HTTP/1. [`h1`] and [`h2`] serve it from there.
//!
//! Draining is the same for all. A listener that is stopped first only announces it: responses carry `connection:
//! close`, HTTP/2 sends GOAWAY, and new requests are still served, so that a load balancer has time to react (lame
//! duck). Then it stops accepting, closes idle connections, and waits for the requests in flight, within a bound.

mod admission;
mod chunked;
#[cfg(test)]
mod contained;
mod h1;
mod h2;
mod meter;

use crate::config::Timeouts;
use crate::events::{HopFailures, HopRefused};
use crate::gathered::Gathered;
use crate::hop::{Cause, Doorkeeper};
use crate::metrics::{Closed, ListenerMetrics};
use crate::respond;
pub use admission::AddressLimits;
pub(crate) use admission::{CONNECTIONS_PER_ADDRESS_MAX, HALF_OPEN_PER_ADDRESS_MAX};
use bytes::Bytes;
pub(crate) use chunked::refused as chunks_refused;
use pingora::listeners::tls::Acceptor;
use pingora::protocols::http::ServerSession;
use pingora::protocols::l4::listener::Listener as Socket;
use pingora::protocols::{GetSocketDigest, Stream};
use replica_core::wire::headers;

use admission::{Admitted, Open};
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use supervision::request::{Panicked, contain};
use tokio::net::TcpListener;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Default maximum of open connections. At about 20 KiB each that is 200 MiB; the next one waits in the kernel's queue,
/// and the connection that has been idle for longest is closed for it.
pub(crate) const CONNECTIONS_MAX: usize = 10_000;
/// Connections that the kernel queues until they are accepted; the kernel limits this further by `net.core.somaxconn`.
/// A SYN beyond it is dropped, and the client retries a second later: with the 128 of `std`, a burst of 10,000
/// connections blocked all new ones for a second 28 times.
const ACCEPT_QUEUE_MAX: i32 = 4096;
/// Pause of the accept loop when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Handler of the requests of a listener.
pub(crate) trait Door: Send + Sync + 'static {
    /// Handles the request whose head `session` has read.
    fn handle(&self, session: &mut ServerSession) -> impl Future<Output = AfterAnswer> + Send;
}

/// Fate of the connection after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterAnswer {
    /// The connection can carry the next request.
    Reuse,
    /// The response was truncated, or the client disconnected.
    Close,
}

/// Reason why a listener stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The process shuts down: new requests are served during the lame duck period.
    Stopping,
    /// Another process accepts from the same socket now.
    HandedOver,
}

/// Stage of draining.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Serving,
    /// Responses announce that the connection should not be reused.
    LameDuck,
    /// Idle connections are closed.
    Closing,
}

/// Bound socket that is not served yet.
pub(crate) struct Listener {
    socket: Socket,
    address: SocketAddr,
    greeting: Arc<Greeting>,
    room: Arc<Semaphore>,
    counts: Arc<ListenerMetrics>,
    refused: Arc<HopFailures>,
    carries: Carries,
    limits: AddressLimits,
}

/// Kind of peer that a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carries {
    /// A client.
    OneClients,
    /// A gateway, which carries the requests of many clients.
    AGateways,
}

/// Transport security of a listener.
enum Greeting {
    /// None.
    Clear,
    /// TLS without client certificates.
    Clients(Acceptor),
    /// Mutual TLS with gateways.
    Gateways(Doorkeeper),
}

/// State shared by the connections of a listener.
struct Shared<D> {
    handler: Arc<D>,
    timeouts: Timeouts,
    greeting: Arc<Greeting>,
    refused: Arc<HopFailures>,
    carries: Carries,
    stage: watch::Receiver<Stage>,
    /// Wakes the connection that has been idle for longest, to be closed.
    crowded: Notify,
    open: Arc<Open>,
    counts: Arc<ListenerMetrics>,
}

impl Listener {
    /// Binds `address`; port 0 selects a free port.
    pub(crate) async fn bind(address: SocketAddr) -> io::Result<Listener> {
        Listener::on(TcpListener::bind(address).await?)
    }

    /// Creates a listener on a socket that is bound already.
    pub(crate) fn on(socket: TcpListener) -> io::Result<Listener> {
        let address = socket.local_addr()?;
        // For a socket that listens already this changes only the queue length.
        rustix::net::listen(&socket, ACCEPT_QUEUE_MAX)?;
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let (counts, refused) = (Arc::default(), Arc::default());
        Ok(Listener {
            socket: socket.into(),
            address,
            greeting: Arc::new(Greeting::Clear),
            room,
            counts,
            refused,
            carries: Carries::OneClients,
            limits: AddressLimits::NONE,
        })
    }

    /// Accepts only TLS, if there is an acceptor.
    pub(crate) fn over_tls(self, acceptor: Option<Acceptor>) -> Listener {
        let greeting = acceptor.map_or(Greeting::Clear, Greeting::Clients);
        Listener { greeting: Arc::new(greeting), ..self }
    }

    /// Accepts connections of gateways; only of those with a valid certificate if there is an acceptor.
    pub(crate) fn kept_by(self, doorkeeper: Option<Doorkeeper>) -> Listener {
        let greeting = doorkeeper.map_or(Greeting::Clear, Greeting::Gateways);
        Listener { greeting: Arc::new(greeting), carries: Carries::AGateways, ..self }
    }

    /// Sets the counters of rejected connections.
    pub(crate) fn refusing(self, refused: Arc<HopFailures>) -> Listener {
        Listener { refused, ..self }
    }

    /// Sets the maximum number of open connections.
    pub(crate) fn holding(self, connections_max: usize) -> Listener {
        Listener { room: Arc::new(Semaphore::new(connections_max)), ..self }
    }

    /// Sets the limits per client address.
    pub(crate) fn limited_by(self, limits: AddressLimits) -> Listener {
        Listener { limits, ..self }
    }

    /// Returns the semaphore that has one permit for each connection that can still be opened.
    pub(crate) fn room(&self) -> Arc<Semaphore> {
        self.room.clone()
    }

    /// Returns the metrics.
    pub(crate) fn counts(&self) -> Arc<ListenerMetrics> {
        self.counts.clone()
    }

    /// Returns the bound address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` completes, then drains as the module comment describes.
    pub(crate) async fn serve<D: Door>(
        self,
        handler: Arc<D>,
        stop: impl Future<Output = Leave>,
        timeouts: Timeouts,
    ) {
        let (stage, stage_receiver) = watch::channel(Stage::Serving);
        let Listener { socket, address: _, greeting, room, counts, refused, carries, limits } = self;
        let open = Arc::new(Open::new(limits, counts.clone()));
        let crowded = Notify::new();
        let shared = Arc::new(Shared {
            handler,
            timeouts,
            greeting,
            counts,
            refused,
            carries,
            stage: stage_receiver,
            crowded,
            open,
        });
        let mut connections = JoinSet::new();
        let reason = accept_until(&socket, &shared, &room, &mut connections, stop).await;
        stage.send_replace(Stage::LameDuck);
        match reason {
            Leave::Stopping => {
                let time = tokio::time::sleep(timeouts.lame_duck);
                accept_until(&socket, &shared, &room, &mut connections, time).await;
                drop(socket);
            }
            Leave::HandedOver => {
                drop(socket);
                timeout(timeouts.lame_duck, all(&mut connections)).await.ok();
            }
        }
        stage.send_replace(Stage::Closing);
        if timeout(timeouts.drain, all(&mut connections)).await.is_err() {
            (0..connections.len()).for_each(|_| shared.counts.closed.count(Closed::CutOff));
            tracing::warn!(drain = ?timeouts.drain, "drain timeout expired, requests in flight aborted");
            connections.shutdown().await;
        }
    }
}

async fn all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

/// Accepts connections, each in its own task, until `until` completes.
async fn accept_until<D: Door, T>(
    socket: &Socket,
    shared: &Arc<Shared<D>>,
    room: &Arc<Semaphore>,
    connections: &mut JoinSet<()>,
    until: impl Future<Output = T>,
) -> T {
    tokio::pin!(until);
    let mut pending = None;
    loop {
        let accepted = tokio::select! {
            biased;
            done = &mut until => return done,
            Some(_) = connections.join_next() => continue,
            accepted = accept(socket, &mut pending, room, shared) => accepted,
        };
        match accepted {
            Ok(Accepted { stream, admitted, place }) => {
                let shared = shared.clone();
                connections.spawn(async move {
                    // Requests are contained one by one; this contains panics of the connection between them.
                    if let Err(Panicked(reason)) = contain(shared.serve(stream, admitted)).await {
                        tracing::error!(reason, "connection panicked and was closed");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Accepted and admitted connection.
struct Accepted {
    stream: pingora::protocols::l4::stream::Stream,
    admitted: Admitted,
    place: OwnedSemaphorePermit,
}

/// Accepted connection that waits for a permit.
struct Waiting {
    stream: pingora::protocols::l4::stream::Stream,
    admitted: Admitted,
    /// Whether another connection was closed for this one; one is enough, however often the wait restarts.
    has_evicted: bool,
}

/// Accepts a connection with Pingora's accept, which records the peer address for the session. A connection is evicted
/// only when another one waits for its permit: a half-open one, or else the one that has been idle for longest. The
/// waiting connection stays in `pending` if this future is dropped.
async fn accept<D: Door>(
    socket: &Socket,
    pending: &mut Option<Waiting>,
    room: &Arc<Semaphore>,
    shared: &Shared<D>,
) -> io::Result<Accepted> {
    while pending.is_none() {
        let stream = socket.accept().await?;
        match shared.open.admit(address(&stream)) {
            Some(admitted) => *pending = Some(Waiting { stream, admitted, has_evicted: false }),
            None => shared.counts.closed.count(Closed::AddressFull),
        }
    }
    let place = match room.clone().try_acquire_owned() {
        Ok(place) => place,
        Err(_) => {
            if let Some(waiting) = pending.as_mut().filter(|waiting| !waiting.has_evicted) {
                waiting.has_evicted = true;
                if !shared.open.evict_half_open(&waiting.admitted) {
                    shared.crowded.notify_one();
                }
            }
            room.clone().acquire_owned().await.expect("the semaphore is never closed")
        }
    };
    let Waiting { mut stream, admitted, .. } = pending.take().expect("a connection is pending");
    stream.set_nodelay().map_err(io::Error::other)?;
    Ok(Accepted { stream, admitted, place })
}

/// Returns the peer address; connections of unknown origin share one set of limits.
fn address(stream: &pingora::protocols::l4::stream::Stream) -> IpAddr {
    let digest = stream.get_socket_digest();
    let peer = digest.as_ref().and_then(|digest| digest.peer_addr()?.as_inet().map(SocketAddr::ip));
    peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
}

impl<D: Door> Shared<D> {
    /// Serves one connection from its first byte to its last.
    async fn serve(self: &Arc<Self>, stream: pingora::protocols::l4::stream::Stream, mut admitted: Admitted) {
        let stream = match &*self.greeting {
            Greeting::Clear => {
                return h1::serve(self, Box::new(self.gathered(stream)), &mut admitted).await;
            }
            Greeting::Gateways(doorkeeper) => doorkeeper.greet(stream, self.timeouts.head).await,
            Greeting::Clients(tls) => tokio::select! {
                handshake = timeout(self.timeouts.head, tls.tls_handshake(stream)) => match handshake {
                    Ok(Ok(stream)) => Some(stream),
                    Ok(Err(error)) => {
                        self.counts.closed.count(Closed::Handshake);
                        tracing::debug!(%error, "a TLS handshake failed");
                        None
                    }
                    Err(_) => {
                        self.counts.closed.count(Closed::HandshakeSlow);
                        tracing::debug!("a TLS handshake took too long");
                        None
                    }
                },
                () = admitted.evicted() => {
                    self.counts.closed.count(Closed::HalfOpen);
                    None
                }
            },
        };
        let Some(stream) = stream else { return };
        let stream: Stream = Box::new(self.gathered(stream));
        match stream.selected_alpn_proto() {
            Some(pingora::protocols::ALPN::H2) => h2::serve(self, stream, Bytes::new(), &mut admitted).await,
            _ => h1::serve(self, stream, &mut admitted).await,
        }
    }

    fn gathered<S>(&self, stream: S) -> Gathered<S> {
        Gathered::new(stream, self.timeouts.write, self.counts.clone())
    }

    /// Handles one request; returns whether its connection can be reused.
    async fn handle(&self, session: &mut ServerSession) -> AfterAnswer {
        session.set_write_timeout(Some(self.timeouts.write));
        let notice = Notice { stage: self.stage.clone(), carries: self.carries };
        session.req_header_mut().extensions_mut().insert(notice);
        match contain(self.handler.handle(session)).await {
            Ok(after) => after,
            Err(Panicked(reason)) => {
                let id = session.get_header(headers::REQUEST_ID).and_then(|id| id.to_str().ok());
                let id = id.unwrap_or_default().to_owned();
                tracing::error!(request = id, reason, "request panicked");
                respond::panicked(session, &[(headers::REQUEST_ID, &id)]).await
            }
        }
    }

    /// Counts a TLS handshake on a plaintext port.
    fn reject_tls(&self) {
        let reason = "the peer sends TLS, and this port expects plaintext";
        HopRefused { cause: Cause::UnexpectedTls, reason }.record(&self.refused);
    }

    /// Completes when idle connections must be closed.
    async fn closing(&self) {
        // The sender outlives every connection.
        self.stage.clone().wait_for(|stage| *stage == Stage::Closing).await.ok();
    }
}

/// Request extension that tells whether the connection may be reused, evaluated when the response is written, not when
/// the request arrives.
#[derive(Clone)]
struct Notice {
    stage: watch::Receiver<Stage>,
    carries: Carries,
}

/// Returns whether a client that has closed its side of the connection may still wait for the response (RFC 9112, 9.6).
/// A gateway never does: its requests end with their connection.
pub(crate) fn may_half_close(session: &ServerSession) -> bool {
    let carries = session.req_header().extensions.get::<Notice>().map(|notice| notice.carries);
    !session.is_http2() && carries == Some(Carries::OneClients)
}

/// Disables keep-alive during draining. Must be called before the head of a response is written, because HTTP/1
/// announces it there.
pub(crate) fn heed_notice(session: &mut ServerSession) {
    let draining = session
        .req_header()
        .extensions
        .get::<Notice>()
        .is_some_and(|notice| *notice.stage.borrow() != Stage::Serving);
    if draining {
        session.set_keepalive(None);
    }
}
