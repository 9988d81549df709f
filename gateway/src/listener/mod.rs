//! Accepts connections, and lets go of them in order.
//!
//! Pingora's `Server` owns the process: its own runtimes, its own signal handling, a fixed wait before it exits. Ours is
//! one role among others in a process that the front door owns, so the accept loop is here (bound before it is
//! announced, joined before it returns) and Pingora begins where a request does: parsing, bodies, framing.
//!
//! A connection is one of three kinds, and which one is found out by itself: TLS, where there is a certificate, and in it
//! what ALPN agreed on; else HTTP/2, if the first bytes are its preface; else HTTP/1. [`h1`] and [`h2`] go on from there.
//!
//! How it ends is the same for all. A listener that is told to leave first only says so: answers carry `connection:
//! close`, HTTP/2 gets GOAWAY, and whoever asks is still served, so that a load balancer has time to look elsewhere. Then
//! it accepts nobody, closes what is idle, and waits for what is in flight, within a bound.

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

/// Connections open at once, unless the configuration says otherwise. At about 20 KiB each that is 200 MiB; the next one
/// waits in the kernel's queue, and the one that was idle for longest is closed for it.
pub(crate) const CONNECTIONS_MAX: usize = 10_000;
/// Connections that the kernel keeps until they are accepted; it limits this further by `net.core.somaxconn`. A SYN beyond it
/// is dropped, and its client tries again a second later: with the 128 of `std`, a burst of 10,000 connections stopped all
/// new ones for a second 28 times.
const ACCEPT_QUEUE_MAX: i32 = 4096;
/// How long accepting pauses when the machine has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What stands behind a listener: it answers one request after another.
pub(crate) trait Door: Send + Sync + 'static {
    /// Answers the request whose head `session` has read.
    fn answer(&self, session: &mut ServerSession) -> impl Future<Output = AfterAnswer> + Send;
}

/// What becomes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterAnswer {
    /// It can carry the next request.
    Reuse,
    /// The answer broke off, or the client is gone.
    Close,
}

/// Why a listener leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The process ends: whoever still comes for a while is served.
    Stopping,
    /// Another process accepts from the same socket now.
    HandedOver,
}

/// How far it has got with leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Serving,
    /// Answers say that this connection should not be used again.
    LameDuck,
    /// Whatever is idle is closed.
    Closing,
}

/// A bound socket that is not served yet.
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

/// Whose requests a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carries {
    /// One client's.
    OneClients,
    /// Those of a gateway, and so of many clients.
    AGateways,
}

/// How a connection begins.
enum Greeting {
    /// With a request.
    Clear,
    /// With TLS, for anybody.
    Clients(Acceptor),
    /// With TLS, for gateways.
    Gateways(Doorkeeper),
}

/// What every connection of a listener shares.
struct Shared<D> {
    door: Arc<D>,
    timeouts: Timeouts,
    greeting: Arc<Greeting>,
    refused: Arc<HopFailures>,
    carries: Carries,
    stage: watch::Receiver<Stage>,
    /// Wakes the connection that is idle for longest.
    crowded: Notify,
    open: Arc<Open>,
    counts: Arc<ListenerMetrics>,
}

impl Listener {
    /// Binds `address`; port 0 takes any that is free.
    pub(crate) async fn bind(address: SocketAddr) -> io::Result<Listener> {
        Listener::on(TcpListener::bind(address).await?)
    }

    /// On a socket that somebody else has bound.
    pub(crate) fn on(socket: TcpListener) -> io::Result<Listener> {
        let address = socket.local_addr()?;
        // Of a socket that listens already this changes the queue only.
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

    /// Speaks TLS, and nothing else.
    pub(crate) fn over_tls(self, acceptor: Option<Acceptor>) -> Listener {
        let greeting = acceptor.map_or(Greeting::Clear, Greeting::Clients);
        Listener { greeting: Arc::new(greeting), ..self }
    }

    /// For gateways; lets in nobody else where there is a doorkeeper.
    pub(crate) fn kept_by(self, doorkeeper: Option<Doorkeeper>) -> Listener {
        let greeting = doorkeeper.map_or(Greeting::Clear, Greeting::Gateways);
        Listener { greeting: Arc::new(greeting), carries: Carries::AGateways, ..self }
    }

    /// Who did not find the greeting that he came with, counted there.
    pub(crate) fn refusing(self, refused: Arc<HopFailures>) -> Listener {
        Listener { refused, ..self }
    }

    /// Holds so many connections at once.
    pub(crate) fn holding(self, connections_max: usize) -> Listener {
        Listener { room: Arc::new(Semaphore::new(connections_max)), ..self }
    }

    /// Lets in so many connections of each address.
    pub(crate) fn limited_by(self, limits: AddressLimits) -> Listener {
        Listener { limits, ..self }
    }

    /// A permit for each connection that could be opened now.
    pub(crate) fn room(&self) -> Arc<Semaphore> {
        self.room.clone()
    }

    /// What it has ended.
    pub(crate) fn counts(&self) -> Arc<ListenerMetrics> {
        self.counts.clone()
    }

    /// Where it is bound.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until it is to `leave`; then as the head of this file has it.
    pub(crate) async fn serve<D: Door>(
        self,
        door: Arc<D>,
        leave: impl Future<Output = Leave>,
        timeouts: Timeouts,
    ) {
        let (stage, seen) = watch::channel(Stage::Serving);
        let Listener { socket, address: _, greeting, room, counts, refused, carries, limits } = self;
        let open = Arc::new(Open::new(limits, counts.clone()));
        let crowded = Notify::new();
        let shared = Arc::new(Shared {
            door,
            timeouts,
            greeting,
            counts,
            refused,
            carries,
            stage: seen,
            crowded,
            open,
        });
        let mut connections = JoinSet::new();
        let left = accept_until(&socket, &shared, &room, &mut connections, leave).await;
        stage.send_replace(Stage::LameDuck);
        match left {
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
            tracing::warn!(drain = ?timeouts.drain, "requests still in flight after the drain are cut off");
            connections.shutdown().await;
        }
    }
}

async fn all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

/// Takes connections, each in a task of its own, until `until`.
async fn accept_until<D: Door, T>(
    socket: &Socket,
    shared: &Arc<Shared<D>>,
    room: &Arc<Semaphore>,
    connections: &mut JoinSet<()>,
    until: impl Future<Output = T>,
) -> T {
    tokio::pin!(until);
    let mut at_the_door = None;
    loop {
        let accepted = tokio::select! {
            biased;
            done = &mut until => return done,
            Some(_) = connections.join_next() => continue,
            accepted = accept(socket, &mut at_the_door, room, shared) => accepted,
        };
        match accepted {
            Ok(Accepted { stream, admitted, place }) => {
                let shared = shared.clone();
                connections.spawn(async move {
                    // Requests are contained one by one; this is for what a connection does between them.
                    if let Err(Panicked(reason)) = contain(shared.serve(stream, admitted)).await {
                        tracing::error!(reason, "connection panicked, it is closed");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// A connection that was accepted and let in.
struct Accepted {
    stream: pingora::protocols::l4::stream::Stream,
    admitted: Admitted,
    place: OwnedSemaphorePermit,
}

/// A connection that waits for a place.
struct Waiting {
    stream: pingora::protocols::l4::stream::Stream,
    admitted: Admitted,
    /// Another connection was asked to close for this one; one is enough, however often the wait is begun anew.
    has_made_room: bool,
}

/// Pingora's own accept, because it notes who the peer is: nobody else tells a session. A place is looked for when somebody
/// is there who needs it: whoever is half-open, or else idle, makes room for that one, and not for nobody. Who waits for a
/// place stays `at_the_door` when this is given up.
async fn accept<D: Door>(
    socket: &Socket,
    at_the_door: &mut Option<Waiting>,
    room: &Arc<Semaphore>,
    shared: &Shared<D>,
) -> io::Result<Accepted> {
    while at_the_door.is_none() {
        let stream = socket.accept().await?;
        match shared.open.admit(address(&stream)) {
            Some(admitted) => *at_the_door = Some(Waiting { stream, admitted, has_made_room: false }),
            None => shared.counts.closed.count(Closed::AddressFull),
        }
    }
    let place = match room.clone().try_acquire_owned() {
        Ok(place) => place,
        Err(_) => {
            if let Some(waiting) = at_the_door.as_mut().filter(|waiting| !waiting.has_made_room) {
                waiting.has_made_room = true;
                if !shared.open.evict_half_open(&waiting.admitted) {
                    shared.crowded.notify_one();
                }
            }
            room.clone().acquire_owned().await.expect("the semaphore is never closed")
        }
    };
    let Waiting { mut stream, admitted, .. } = at_the_door.take().expect("somebody came");
    stream.set_nodelay().map_err(io::Error::other)?;
    Ok(Accepted { stream, admitted, place })
}

/// Where a connection comes from; one of unknown origin shares the limits of all such.
fn address(stream: &pingora::protocols::l4::stream::Stream) -> IpAddr {
    let digest = stream.get_socket_digest();
    let peer = digest.as_ref().and_then(|digest| digest.peer_addr()?.as_inet().map(SocketAddr::ip));
    peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
}

impl<D: Door> Shared<D> {
    /// One connection, from its first byte to its last.
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

    /// Answers one request; says whether its connection may go on.
    async fn answer(&self, session: &mut ServerSession) -> AfterAnswer {
        session.set_write_timeout(Some(self.timeouts.write));
        let notice = Notice { stage: self.stage.clone(), carries: self.carries };
        session.req_header_mut().extensions_mut().insert(notice);
        match contain(self.door.answer(session)).await {
            Ok(after) => after,
            Err(Panicked(reason)) => {
                let id = session.get_header(headers::REQUEST_ID).and_then(|id| id.to_str().ok());
                let id = id.unwrap_or_default().to_owned();
                tracing::error!(request = id, reason, "request panicked");
                respond::panicked(session, &[(headers::REQUEST_ID, &id)]).await
            }
        }
    }

    /// Somebody speaks TLS on a port that is in the clear.
    fn met_tls(&self) {
        let why = "it speaks TLS, and this port is in the clear";
        HopRefused { cause: Cause::UnexpectedTls, why }.record(&self.refused);
    }

    /// Comes back when idle connections are to be closed.
    async fn closing(&self) {
        // The sender outlives every connection.
        self.stage.clone().wait_for(|stage| *stage == Stage::Closing).await.ok();
    }
}

/// Travels with a request, so that its answer can say whether the connection may be used again: what is known of that
/// when the answer is written, not when the request came.
#[derive(Clone)]
struct Notice {
    stage: watch::Receiver<Stage>,
    carries: Carries,
}

/// Whether a client that has closed its side of the connection may still wait for the response (RFC 9112, 9.6). A gateway
/// never does: its requests end with their connection.
pub(crate) fn may_half_close(session: &ServerSession) -> bool {
    let carries = session.req_header().extensions.get::<Notice>().map(|notice| notice.carries);
    !session.is_http2() && carries == Some(Carries::OneClients)
}

/// To be called before the head of an answer is written: HTTP/1 says in it that the connection ends.
pub(crate) fn heed_notice(session: &mut ServerSession) {
    let leaving = session
        .req_header()
        .extensions
        .get::<Notice>()
        .is_some_and(|notice| *notice.stage.borrow() != Stage::Serving);
    if leaving {
        session.set_keepalive(None);
    }
}
