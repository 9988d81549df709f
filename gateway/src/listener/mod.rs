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

pub(crate) mod admission;
pub(crate) mod chunked;
#[cfg(test)]
mod contained;
mod filtered;
mod h1;
mod h2;
#[cfg(test)]
mod idle;
mod meter;
pub(crate) mod notice;
mod proxied;

use crate::coalesce::CoalescingStream;
use crate::config::Timeouts;
use crate::hop::{AcceptedPeer, GatewayAcceptor};
use crate::metrics::{CloseReason, ListenerMetrics};
use crate::respond;
use admission::AddressLimits;
use bytes::Bytes;
use gateway_core::proxy_header::ProxiedPeer;
use identity::{ConnectionFailureCause, ConnectionFailures, ConnectionRejected};
pub(crate) use notice::AfterResponse;
use notice::{ConnectionNotice, DrainStage};
pub(crate) use notice::{PeerKind, peer};
use pingora::listeners::tls::Acceptor;
use pingora::protocols::http::ServerSession;
use pingora::protocols::l4::listener::Listener as Socket;
use pingora::protocols::{GetSocketDigest, IO, Stream};
use regions::IpNetwork;
use regions::spiffe::Role;
use replica_api::headers;

use admission::{AdmittedConnection, CONNECTIONS_MAX, OpenConnections};
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

/// Connections that the kernel queues until they are accepted; the kernel limits this further by `net.core.somaxconn`.
/// A SYN beyond it is dropped, and the client retries a second later: with the 128 of `std`, a burst of 10,000
/// connections blocked all new ones for a second 28 times.
const ACCEPT_QUEUE_MAX: i32 = 4096;
/// Pause of the accept loop when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Handler of the requests of a listener.
pub(crate) trait RequestHandler: Send + Sync + 'static {
    /// Handles the request whose head `session` has read.
    fn handle(&self, session: &mut ServerSession) -> impl Future<Output = AfterResponse> + Send;
}

/// Reason why a listener stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// The process shuts down: new requests are served during the lame duck period.
    Shutdown,
    /// Another process accepts from the same socket now.
    HandedOver,
}

/// Bound socket that is not served yet.
pub(crate) struct Listener {
    socket: Socket,
    address: SocketAddr,
    security: Arc<TransportSecurity>,
    permits: Arc<Semaphore>,
    counts: Arc<ListenerMetrics>,
    refused: Arc<ConnectionFailures>,
    peer: PeerKind,
    limits: AddressLimits,
    load_balancers: Arc<[IpNetwork]>,
}

/// Transport security of a listener.
enum TransportSecurity {
    /// None.
    Plaintext,
    /// TLS without client certificates.
    Clients(Acceptor),
    /// Mutual TLS with gateways and other spokes of the region.
    Gateways(GatewayAcceptor),
}

/// State shared by the connections of a listener.
struct Shared<D> {
    handler: Arc<D>,
    timeouts: Timeouts,
    security: Arc<TransportSecurity>,
    refused: Arc<ConnectionFailures>,
    peer: PeerKind,
    /// If there are any, only they connect, with a PROXY protocol header.
    load_balancers: Arc<[IpNetwork]>,
    stage: watch::Receiver<DrainStage>,
    /// Wakes the connection that has been idle for longest, to be closed.
    evict_idle: Notify,
    open: Arc<OpenConnections>,
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
        let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let (counts, refused) = (Arc::default(), Arc::default());
        Ok(Listener {
            socket: socket.into(),
            address,
            security: Arc::new(TransportSecurity::Plaintext),
            permits,
            counts,
            refused,
            peer: PeerKind::Client,
            limits: AddressLimits::NONE,
            load_balancers: Arc::default(),
        })
    }

    /// Accepts only TLS, if there is an acceptor.
    pub(crate) fn with_tls(self, acceptor: Option<Acceptor>) -> Listener {
        let security = acceptor.map_or(TransportSecurity::Plaintext, TransportSecurity::Clients);
        Listener { security: Arc::new(security), ..self }
    }

    /// Accepts connections of gateways and other spokes; only of those with a valid certificate if there is an acceptor.
    pub(crate) fn for_gateways(self, acceptor: Option<GatewayAcceptor>) -> Listener {
        let security = acceptor.map_or(TransportSecurity::Plaintext, TransportSecurity::Gateways);
        Listener { security: Arc::new(security), peer: PeerKind::Unauthenticated, ..self }
    }

    /// Sets the counters of rejected connections.
    pub(crate) fn with_failure_counters(self, refused: Arc<ConnectionFailures>) -> Listener {
        Listener { refused, ..self }
    }

    /// Sets the maximum number of open connections.
    pub(crate) fn with_connections_max(self, connections_max: usize) -> Listener {
        Listener { permits: Arc::new(Semaphore::new(connections_max)), ..self }
    }

    /// Sets the limits per client address.
    pub(crate) fn with_address_limits(self, limits: AddressLimits) -> Listener {
        Listener { limits, ..self }
    }

    /// Accepts only connections of these load balancers, which begin with a PROXY protocol header, unless there are none.
    pub(crate) fn with_proxy_protocol(self, from: Vec<IpNetwork>) -> Listener {
        Listener { load_balancers: from.into(), ..self }
    }

    /// Returns the semaphore that has one permit for each connection that can still be opened.
    pub(crate) fn permits(&self) -> Arc<Semaphore> {
        self.permits.clone()
    }

    /// Returns the metrics.
    pub(crate) fn metrics(&self) -> Arc<ListenerMetrics> {
        self.counts.clone()
    }

    /// Returns the bound address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` completes, then drains as the module comment describes.
    pub(crate) async fn serve<D: RequestHandler>(
        self,
        handler: Arc<D>,
        stop: impl Future<Output = StopReason>,
        timeouts: Timeouts,
    ) {
        let (stage, stage_receiver) = watch::channel(DrainStage::Serving);
        let Listener { socket, address: _, security, permits, counts, refused, peer, limits, load_balancers } =
            self;
        let open = Arc::new(OpenConnections::new(limits, counts.clone()));
        let evict_idle = Notify::new();
        let shared = Arc::new(Shared {
            handler,
            timeouts,
            security,
            counts,
            refused,
            peer,
            load_balancers,
            stage: stage_receiver,
            evict_idle,
            open,
        });
        let mut connections = JoinSet::new();
        let reason = accept_until(&socket, &shared, &permits, &mut connections, stop).await;
        stage.send_replace(DrainStage::LameDuck);
        match reason {
            StopReason::Shutdown => {
                let time = tokio::time::sleep(timeouts.lame_duck);
                accept_until(&socket, &shared, &permits, &mut connections, time).await;
                drop(socket);
            }
            StopReason::HandedOver => {
                drop(socket);
                timeout(timeouts.lame_duck, all(&mut connections)).await.ok();
            }
        }
        stage.send_replace(DrainStage::Closing);
        if timeout(timeouts.drain, all(&mut connections)).await.is_err() {
            (0..connections.len()).for_each(|_| shared.counts.closed.count(CloseReason::DrainTimeout));
            // Their clients received an error. Raise the drain timeout if requests take that long.
            tracing::warn!(drain = ?timeouts.drain, "drain timeout; requests in flight aborted");
            connections.shutdown().await;
        }
    }
}

async fn all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

/// Accepts connections, each in its own task, until `until` completes.
async fn accept_until<D: RequestHandler, T>(
    socket: &Socket,
    shared: &Arc<Shared<D>>,
    permits: &Arc<Semaphore>,
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
            accepted = accept(socket, &mut pending, permits, shared) => accepted,
        };
        match accepted {
            Ok(AcceptedConnection { stream, admitted, permit }) => {
                let shared = shared.clone();
                connections.spawn(async move {
                    // Requests are contained one by one; this contains panics of the connection between them.
                    if let Err(Panicked(reason)) = contain(shared.serve(stream, admitted)).await {
                        // A defect. No other connection is affected. Report it with the line `panicked`.
                        tracing::error!(reason, "connection panicked and was closed");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                // A listener could not accept a connection, and accepts again after a pause. Check the limit of open
                // files.
                tracing::warn!(%error, "failed to accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Accepted and admitted connection.
struct AcceptedConnection {
    stream: pingora::protocols::l4::stream::Stream,
    admitted: AdmittedConnection,
    permit: OwnedSemaphorePermit,
}

/// Accepted connection that waits for a permit.
struct PendingConnection {
    stream: pingora::protocols::l4::stream::Stream,
    admitted: AdmittedConnection,
    /// Whether another connection was closed for this one; one is enough, however often the wait restarts.
    has_evicted: bool,
}

/// Accepts a connection with Pingora's accept, which records the peer address for the session. A connection is evicted
/// only when another one waits for its permit: a half-open one, or else the one that has been idle for longest. The
/// waiting connection stays in `pending` if this future is dropped.
async fn accept<D: RequestHandler>(
    socket: &Socket,
    pending: &mut Option<PendingConnection>,
    permits: &Arc<Semaphore>,
    shared: &Shared<D>,
) -> io::Result<AcceptedConnection> {
    while pending.is_none() {
        let stream = socket.accept().await?;
        let address = address(&stream);
        let admitted = match shared.is_load_balancer(address) {
            None => shared.open.admit(address),
            Some(true) => Some(shared.open.admit_load_balancer(address)),
            Some(false) => {
                shared.reject_untrusted(address);
                continue;
            }
        };
        match admitted {
            Some(admitted) => *pending = Some(PendingConnection { stream, admitted, has_evicted: false }),
            None => shared.counts.closed.count(CloseReason::AddressLimit),
        }
    }
    let permit = match permits.clone().try_acquire_owned() {
        Ok(permit) => permit,
        Err(_) => {
            if let Some(waiting) = pending.as_mut().filter(|waiting| !waiting.has_evicted) {
                waiting.has_evicted = true;
                if !shared.open.evict_half_open(&waiting.admitted) {
                    shared.evict_idle.notify_one();
                }
            }
            permits.clone().acquire_owned().await.expect("the semaphore is never closed")
        }
    };
    let PendingConnection { mut stream, admitted, .. } = pending.take().expect("a connection is pending");
    stream.set_nodelay().map_err(io::Error::other)?;
    Ok(AcceptedConnection { stream, admitted, permit })
}

/// Returns the peer address; connections of unknown origin share one set of limits.
fn address(stream: &pingora::protocols::l4::stream::Stream) -> IpAddr {
    let digest = stream.get_socket_digest();
    let peer = digest.as_ref().and_then(|digest| digest.peer_addr()?.as_inet().map(SocketAddr::ip));
    peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
}

impl<D: RequestHandler> Shared<D> {
    /// Serves one connection from its first byte to its last. Its task exists as long as the connection, so what is
    /// needed only for a while (handshake, request, HTTP/2) has its own allocation.
    async fn serve(
        self: &Arc<Self>,
        stream: pingora::protocols::l4::stream::Stream,
        mut admitted: AdmittedConnection,
    ) {
        let stream = match self.load_balancers.is_empty() {
            true => stream,
            false => match Box::pin(self.identify(stream, &mut admitted)).await {
                Some(stream) => stream,
                None => return,
            },
        };
        let stream = match &*self.security {
            TransportSecurity::Plaintext => Some(self.coalescing(stream)),
            TransportSecurity::Gateways(acceptor) => {
                return Box::pin(self.serve_gateway(acceptor, stream, &mut admitted)).await;
            }
            TransportSecurity::Clients(acceptor) => {
                Box::pin(self.handshake(acceptor, stream, &admitted)).await
            }
        };
        let Some(stream) = stream else { return };
        self.serve_tls(stream, self.peer, &mut admitted).await;
    }

    /// Serves a connection of a gateway or another spoke until its certificate is revoked.
    async fn serve_gateway(
        self: &Arc<Self>,
        acceptor: &GatewayAcceptor,
        stream: pingora::protocols::l4::stream::Stream,
        admitted: &mut AdmittedConnection,
    ) {
        let address = address(&stream);
        let accepted = Box::pin(acceptor.accept(stream, address, self.timeouts.head)).await;
        let Some(AcceptedPeer { stream, role, region, guard }) = accepted else { return };
        let kind = if role == Role::Spoke { PeerKind::Spoke } else { PeerKind::Gateway(region) };
        // Dropping the connection also ends its requests, as when the gateway disconnects.
        tokio::select! {
            () = self.serve_tls(self.coalescing(stream), kind, admitted) => {}
            () = guard.revoked() => {}
        }
    }

    /// Serves a connection with the negotiated protocol.
    async fn serve_tls(self: &Arc<Self>, stream: Stream, peer: PeerKind, admitted: &mut AdmittedConnection) {
        match stream.selected_alpn_proto() {
            Some(pingora::protocols::ALPN::H2) => {
                Box::pin(h2::serve(self, stream, Bytes::new(), peer, admitted)).await;
            }
            _ => h1::serve(self, stream, peer, admitted).await,
        }
    }

    /// Performs the TLS handshake with a client.
    async fn handshake(
        &self,
        acceptor: &Acceptor,
        stream: pingora::protocols::l4::stream::Stream,
        admitted: &AdmittedConnection,
    ) -> Option<Stream> {
        tokio::select! {
            handshake = timeout(self.timeouts.head, acceptor.tls_handshake(stream)) => match handshake {
                Ok(Ok(stream)) => Some(self.coalescing(stream)),
                Ok(Err(error)) => {
                    self.counts.closed.count(CloseReason::HandshakeFailed);
                    // A client and the listener did not agree on TLS, or the client does not trust the certificate.
                    tracing::debug!(%error, "TLS handshake failed");
                    None
                }
                Err(_) => {
                    self.counts.closed.count(CloseReason::HandshakeTimeout);
                    // A client did not complete its TLS handshake in time, and was disconnected.
                    tracing::debug!("TLS handshake timed out");
                    None
                }
            },
            () = admitted.evicted() => {
                self.counts.closed.count(CloseReason::HalfOpen);
                None
            }
        }
    }

    /// Returns whether an address is one of the load balancers; `None` if clients connect directly.
    fn is_load_balancer(&self, address: IpAddr) -> Option<bool> {
        let is_known = |network: &IpNetwork| network.contains(address);
        (!self.load_balancers.is_empty()).then(|| self.load_balancers.iter().any(is_known))
    }

    /// Reads the header of a load balancer and makes the client in it the peer of the connection, whose limits it counts
    /// against from now on. Returns `None` if the connection is rejected.
    async fn identify(
        self: &Arc<Self>,
        mut stream: pingora::protocols::l4::stream::Stream,
        admitted: &mut AdmittedConnection,
    ) -> Option<pingora::protocols::l4::stream::Stream> {
        let peer = Some(address(&stream));
        let cause = ConnectionFailureCause::ProxyHeader;
        let read = tokio::select! {
            read = timeout(self.timeouts.head, proxied::read_origin(&mut stream)) => read,
            () = admitted.evicted() => {
                self.counts.closed.count(CloseReason::HalfOpen);
                return None;
            }
        };
        match read {
            Ok(Ok(Some(ProxiedPeer::LoadBalancer))) => Some(stream),
            Ok(Ok(Some(ProxiedPeer::Client(client)))) => {
                let Some(of_client) = self.open.admit(client.ip()) else {
                    self.counts.closed.count(CloseReason::AddressLimit);
                    return None;
                };
                *admitted = of_client;
                proxied::set_peer(&mut stream, client);
                Some(stream)
            }
            Ok(Ok(None)) => None,
            Ok(Err(error)) => {
                ConnectionRejected { cause, peer, reason: &error.to_string() }.record(&self.refused);
                None
            }
            Err(_) => {
                let reason = "the PROXY protocol header timed out";
                ConnectionRejected { cause, peer, reason }.record(&self.refused);
                None
            }
        }
    }

    /// Counts a connection of a peer that is no load balancer.
    fn reject_untrusted(&self, peer: IpAddr) {
        let (cause, reason) =
            (ConnectionFailureCause::ProxyUntrusted, "the peer is not in proxy_protocol_from");
        ConnectionRejected { cause, peer: Some(peer), reason }.record(&self.refused);
    }

    fn coalescing(&self, stream: impl IO + 'static) -> Stream {
        Box::new(CoalescingStream::new(stream, self.timeouts.write, self.counts.clone()))
    }

    /// Handles one request; returns whether its connection can be reused.
    async fn handle(&self, session: &mut ServerSession, peer: PeerKind) -> AfterResponse {
        session.set_write_timeout(Some(self.timeouts.write));
        let notice = ConnectionNotice { stage: self.stage.clone(), peer };
        session.req_header_mut().extensions_mut().insert(notice);
        match contain(self.handler.handle(session)).await {
            Ok(after) => after,
            Err(Panicked(reason)) => {
                let id = session.get_header(headers::REQUEST_ID).and_then(|id| id.to_str().ok());
                let id = id.unwrap_or_default().to_owned();
                // A defect. The request received an error and no other one is affected. Report it with the line `panicked`.
                tracing::error!(request = id, reason, "request panicked");
                respond::panicked(session, &[(headers::REQUEST_ID, &id)]).await
            }
        }
    }

    /// Counts a TLS handshake on a plaintext port.
    fn reject_tls(&self) {
        let reason = "the peer sends TLS, and this port expects plaintext";
        let cause = ConnectionFailureCause::UnexpectedTls;
        ConnectionRejected { cause, peer: None, reason }.record(&self.refused);
    }

    /// Completes when idle connections must be closed.
    async fn closing(&self) {
        // The sender outlives every connection.
        self.stage.clone().wait_for(|stage| *stage == DrainStage::Closing).await.ok();
    }
}
