//! Listener of a process for its peers: plaintext, or mutual TLS with the handshakes in tasks of their own.
//!
//! A peer that connects and sends nothing occupies one of a limited number of slots for a limited time
//! ([`crate::handshakes`]), and no other peer waits for it. Connections beyond a limit are closed at once. A client
//! without a certificate, which only a hub and its authority accept, keeps its slot as long as it is connected.
//!
//! A peer that completes the handshake, or connects without TLS, and sends no byte is closed and counted after a while,
//! too. Later, only a lost peer ([`crate::lost_peers`]) ends a connection: the server may hold a request for any time, and
//! this module does not know where one ends. So a peer that sends a part of a request keeps its connection, which counts
//! against the maximum number. It has a certificate, or connects without TLS where the configuration allows that.
//!
//! The log has the addresses of rejected peers, except of those that may be persons.

use crate::cause::{ConnectionFailureCause, reason, tls_error};
use crate::events::{ConnectionFailures, ConnectionRejected};
use crate::handshakes::{HandshakeSlots, NoSlot};
use crate::lost_peers::end_when_lost;
use crate::server::{AcceptedClient, ServerTls};
use crate::stream::GuardedStream;
use crate::verify::PeerIdentity;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use supervision::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_rustls::server::TlsStream;

/// Timeout of a handshake, after which the peer connects again.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time of a connection without a certificate, which has one request.
const ANONYMOUS_TIME_MAX: Duration = Duration::from_secs(10);
/// Maximum time from the handshake, or from the connection without TLS, to the first byte of a request. It is longer than the
/// time for which a client keeps an idle connection, which it may have opened and not used: 30 s to a replica, and 60 s to a
/// hub. Both assert it.
pub const FIRST_REQUEST_MAX: Duration = Duration::from_secs(75);
/// Number of accepted connections that wait for the server.
const QUEUE: usize = 64;
/// Pause after a failure to accept, such as a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Other end of a connection.
#[derive(Clone, Debug)]
pub struct ConnectedClient {
    /// Address.
    pub address: SocketAddr,
    /// Proof of its identity.
    pub identity: ClientIdentity,
}

/// Proof of a client's identity that a connection gives.
#[derive(Clone, Debug)]
pub enum ClientIdentity {
    /// Nothing: the connection is plaintext.
    Plaintext,
    /// Nothing: TLS without a certificate of the client.
    Anonymous,
    /// Its certificate.
    Verified(PeerIdentity),
}

impl ClientIdentity {
    /// Returns the address of a client for the log. That of a person is left out: a certificate may be that of an operator or
    /// a viewer, and clients without one are, beside processes that join, operators with a token.
    fn logged(&self, address: IpAddr) -> Option<IpAddr> {
        match self {
            ClientIdentity::Plaintext => Some(address),
            ClientIdentity::Anonymous => None,
            ClientIdentity::Verified(identity) => identity.role().is_process().then_some(address),
        }
    }
}

/// Time limits of a connection until its first request.
#[derive(Clone, Copy, Debug)]
struct OpeningLimits {
    handshake: Duration,
    /// From the handshake, or the connection without TLS, to the first byte of a request.
    first_request: Duration,
    /// Of a connection without a certificate, as a whole.
    anonymous: Duration,
}

impl OpeningLimits {
    const DEFAULT: OpeningLimits = OpeningLimits {
        handshake: HANDSHAKE_TIMEOUT,
        first_request: FIRST_REQUEST_MAX,
        anonymous: ANONYMOUS_TIME_MAX,
    };
}

/// Open connection.
#[derive(Debug)]
pub struct AcceptedStream {
    transport: AcceptedTransport,
    /// Until the first byte of a request.
    silent: Option<SilentPeer>,
    _permit: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum AcceptedTransport {
    Plaintext(TcpStream),
    Tls(Box<GuardedStream<TlsStream<TcpStream>>>),
    /// Without a certificate, until `end`.
    Anonymous {
        stream: Box<TlsStream<TcpStream>>,
        end: Pin<Box<Sleep>>,
        _slot: HandshakeSlot,
    },
}

/// Deadline of the first byte of a request.
#[derive(Debug)]
struct SilentPeer {
    /// Address for the log.
    address: Option<IpAddr>,
    end: Pin<Box<Sleep>>,
    limit: Duration,
    failures: Arc<ConnectionFailures>,
}

impl SilentPeer {
    fn new(address: Option<IpAddr>, limit: Duration, failures: &Arc<ConnectionFailures>) -> SilentPeer {
        SilentPeer { address, end: Box::pin(sleep(limit)), limit, failures: failures.clone() }
    }

    /// Returns whether the deadline has passed, and counts that.
    fn poll_expired(&mut self, cx: &mut Context<'_>) -> bool {
        let SilentPeer { address, end, limit, failures } = self;
        if end.as_mut().poll(cx).is_pending() && end.deadline() > Instant::now() {
            return false;
        }
        let (cause, reason) = (ConnectionFailureCause::TimedOut, format!("no request within {limit:?}"));
        ConnectionRejected { cause, peer: *address, reason: &reason }.record(failures);
        true
    }
}

/// Slot of a connection whose peer is not authenticated yet; released when dropped.
#[derive(Debug)]
struct HandshakeSlot {
    slots: Arc<Mutex<HandshakeSlots>>,
    address: SocketAddr,
}

impl HandshakeSlot {
    fn take(slots: &Arc<Mutex<HandshakeSlots>>, address: SocketAddr) -> Result<HandshakeSlot, NoSlot> {
        slots.lock().take(address.ip())?;
        Ok(HandshakeSlot { slots: slots.clone(), address })
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        self.slots.lock().release(self.address.ip());
    }
}

/// Accepted connections, for the server.
#[derive(Debug)]
pub struct PeerListener {
    address: SocketAddr,
    accepted: mpsc::Receiver<(AcceptedStream, ConnectedClient)>,
}

/// Accepts connections; runs until the server ends.
pub struct PeerAcceptor {
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    accepted: mpsc::Sender<(AcceptedStream, ConnectedClient)>,
    connections: Arc<Semaphore>,
    handshakes: Arc<Mutex<HandshakeSlots>>,
    limits: OpeningLimits,
    /// Whether the peers are persons, whose addresses are personal data.
    has_persons_only: bool,
    failures: Arc<ConnectionFailures>,
}

/// Creates the listener of a server, and the acceptor that feeds it: plaintext without `tls`. At most `connections_max`
/// connections are open.
///
/// # Errors
///
/// If the socket has no address.
pub fn listen(
    listener: TcpListener,
    tls: Option<ServerTls>,
    connections_max: usize,
    failures: Arc<ConnectionFailures>,
) -> io::Result<(PeerListener, PeerAcceptor)> {
    let address = listener.local_addr()?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let acceptor = PeerAcceptor {
        listener,
        tls: tls.map(Arc::new),
        accepted: sender,
        connections: Arc::new(Semaphore::new(connections_max)),
        handshakes: Arc::default(),
        limits: OpeningLimits::DEFAULT,
        has_persons_only: false,
        failures,
    };
    Ok((PeerListener { address, accepted: receiver }, acceptor))
}

impl PeerAcceptor {
    /// Leaves the addresses of all peers out of the log, because they are persons.
    #[must_use]
    pub fn of_persons(self) -> PeerAcceptor {
        PeerAcceptor { has_persons_only: true, ..self }
    }

    /// Accepts connections until the server ends.
    pub async fn run(self) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = self.accepted.closed() => return,
            };
            match accepted {
                Ok((tcp, address)) => self.admit(tcp, address).await,
                Err(error) => {
                    // The process has too few file descriptors, or the network failed. Raise the limit of open files.
                    tracing::warn!(%error, "failed to accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn admit(&self, tcp: TcpStream, address: SocketAddr) {
        let logged = (!self.has_persons_only).then(|| address.ip());
        let failures = self.failures.clone();
        let reject = move |cause, reason: &str| {
            ConnectionRejected { cause, peer: logged, reason }.record(&failures);
        };
        let Ok(permit) = self.connections.clone().try_acquire_owned() else {
            return reject(ConnectionFailureCause::Overloaded, "the maximum number of connections is open");
        };
        tcp.set_nodelay(true).ok();
        // Without the options only the detection of a lost peer is slower.
        end_when_lost(&tcp).ok();
        let Some(tls) = self.tls.clone() else {
            let transport = AcceptedTransport::Plaintext(tcp);
            let identity = ClientIdentity::Plaintext;
            let peer = logged.and_then(|ip| identity.logged(ip));
            let silent = Some(SilentPeer::new(peer, self.limits.first_request, &self.failures));
            let stream = AcceptedStream { transport, silent, _permit: permit };
            self.accepted.send((stream, ConnectedClient { address, identity })).await.ok();
            return;
        };
        let slot = match HandshakeSlot::take(&self.handshakes, address) {
            Ok(slot) => slot,
            Err(full) => return reject(ConnectionFailureCause::Overloaded, &full.to_string()),
        };
        let (accepted, failures, limits) = (self.accepted.clone(), self.failures.clone(), self.limits);
        let shaking = async move {
            match timeout(limits.handshake, tls.accept(tcp)).await {
                Ok(Ok(client)) => {
                    let (transport, identity, first_request) = match client {
                        AcceptedClient::Verified(stream, identity) => {
                            drop(slot);
                            let identity = ClientIdentity::Verified(identity);
                            (AcceptedTransport::Tls(stream), identity, limits.first_request)
                        }
                        AcceptedClient::Anonymous(stream) => {
                            let end = Box::pin(sleep(limits.anonymous));
                            let transport = AcceptedTransport::Anonymous { stream, end, _slot: slot };
                            (transport, ClientIdentity::Anonymous, limits.anonymous)
                        }
                    };
                    let peer = logged.and_then(|ip| identity.logged(ip));
                    let silent = Some(SilentPeer::new(peer, first_request, &failures));
                    let stream = AcceptedStream { transport, silent, _permit: permit };
                    accepted.send((stream, ConnectedClient { address, identity })).await.ok();
                }
                Ok(Err(error)) => {
                    // A peer that disconnects during the handshake is a port check.
                    if let Some(error) = tls_error(&error) {
                        reject(ConnectionFailureCause::of(error), &reason(error));
                    }
                }
                Err(_) => {
                    let reason = format!("no complete handshake within {:?}", limits.handshake);
                    reject(ConnectionFailureCause::TimedOut, &reason);
                }
            }
        };
        tokio::spawn(supervision::task::contained("handshake", shaking));
    }
}

impl PeerListener {
    /// Returns the next connection; never returns once the acceptor has ended.
    pub async fn accept(&mut self) -> (AcceptedStream, ConnectedClient) {
        match self.accepted.recv().await {
            Some(accepted) => accepted,
            // The acceptor has ended, so the process stops.
            None => std::future::pending().await,
        }
    }

    /// Returns the address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(feature = "axum")]
impl axum::serve::Listener for PeerListener {
    type Io = AcceptedStream;
    type Addr = ConnectedClient;

    async fn accept(&mut self) -> (AcceptedStream, ConnectedClient) {
        PeerListener::accept(self).await
    }

    fn local_addr(&self) -> io::Result<ConnectedClient> {
        Ok(ConnectedClient { address: self.address, identity: ClientIdentity::Plaintext })
    }
}

#[cfg(feature = "axum")]
impl axum::extract::connect_info::Connected<axum::serve::IncomingStream<'_, PeerListener>>
    for ConnectedClient
{
    fn connect_info(stream: axum::serve::IncomingStream<'_, PeerListener>) -> ConnectedClient {
        stream.remote_addr().clone()
    }
}

impl std::fmt::Display for ConnectedClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.identity {
            ClientIdentity::Verified(identity) => write!(f, "{} at {}", identity.id, self.address),
            ClientIdentity::Plaintext | ClientIdentity::Anonymous => write!(f, "{}", self.address),
        }
    }
}

impl AsyncRead for AcceptedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let AcceptedStream { transport, silent, _permit: _ } = self.get_mut();
        let before = into.filled().len();
        let read = transport.poll_read(cx, into);
        if into.filled().len() > before {
            *silent = None;
        }
        // A connection without a certificate may reach its own limit at the same time.
        let has_expired = is_without_data(&read) && silent.as_mut().is_some_and(|peer| peer.poll_expired(cx));
        if has_expired {
            *silent = None;
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

/// Returns whether a read waits, or has failed.
fn is_without_data(read: &Poll<io::Result<()>>) -> bool {
    matches!(read, Poll::Pending | Poll::Ready(Err(_)))
}

impl AcceptedTransport {
    fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            AcceptedTransport::Plaintext(stream) => Pin::new(stream).poll_read(cx, into),
            AcceptedTransport::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, into),
            AcceptedTransport::Anonymous { stream, end, .. } => {
                let read = Pin::new(stream.as_mut()).poll_read(cx, into);
                let is_over = end.as_mut().poll(cx).is_ready() || end.deadline() <= Instant::now();
                if is_over { Poll::Ready(Err(io::ErrorKind::TimedOut.into())) } else { read }
            }
        }
    }
}

impl AsyncWrite for AcceptedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().transport {
            AcceptedTransport::Plaintext(stream) => Pin::new(stream).poll_write(cx, bytes),
            AcceptedTransport::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
            AcceptedTransport::Anonymous { stream, .. } => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().transport {
            AcceptedTransport::Plaintext(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            AcceptedTransport::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, slices),
            AcceptedTransport::Anonymous { stream, .. } => {
                Pin::new(stream.as_mut()).poll_write_vectored(cx, slices)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            AcceptedTransport::Plaintext(stream) => stream.is_write_vectored(),
            AcceptedTransport::Tls(stream) => stream.is_write_vectored(),
            AcceptedTransport::Anonymous { stream, .. } => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            AcceptedTransport::Plaintext(stream) => Pin::new(stream).poll_flush(cx),
            AcceptedTransport::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            AcceptedTransport::Anonymous { stream, .. } => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            AcceptedTransport::Plaintext(stream) => Pin::new(stream).poll_shutdown(cx),
            AcceptedTransport::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            AcceptedTransport::Anonymous { stream, .. } => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests;
