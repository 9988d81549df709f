//! Listener of a process for its peers: plaintext, or mutual TLS with the handshakes in tasks of their own.
//!
//! A peer that connects and sends nothing occupies one of a limited number of slots for a limited time
//! ([`crate::handshakes`]), and no other peer waits for it. Connections beyond a limit are closed at once. A client
//! without a certificate, which only a hub and its authority accept, keeps its slot as long as it is connected.

use crate::cause::ConnectionFailureCause;
use crate::events::{ConnectionFailures, ConnectionRejected};
use crate::handshakes::{HandshakeSlots, NoSlot};
use crate::server::{AcceptedClient, ServerTls};
use crate::stream::GuardedStream;
use crate::verify::PeerIdentity;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
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

/// Open connection.
#[derive(Debug)]
pub struct AcceptedStream {
    transport: AcceptedTransport,
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
        failures,
    };
    Ok((PeerListener { address, accepted: receiver }, acceptor))
}

impl PeerAcceptor {
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
        let Ok(permit) = self.connections.clone().try_acquire_owned() else {
            let reason = "the maximum number of connections is open";
            ConnectionRejected { cause: ConnectionFailureCause::Overloaded, reason }.record(&self.failures);
            return;
        };
        tcp.set_nodelay(true).ok();
        let Some(tls) = self.tls.clone() else {
            let stream = AcceptedStream { transport: AcceptedTransport::Plaintext(tcp), _permit: permit };
            self.accepted
                .send((stream, ConnectedClient { address, identity: ClientIdentity::Plaintext }))
                .await
                .ok();
            return;
        };
        let slot = match HandshakeSlot::take(&self.handshakes, address) {
            Ok(slot) => slot,
            Err(full) => {
                let cause = ConnectionFailureCause::Overloaded;
                return ConnectionRejected { cause, reason: &full.to_string() }.record(&self.failures);
            }
        };
        let (accepted, failures) = (self.accepted.clone(), self.failures.clone());
        let shaking = async move {
            match timeout(HANDSHAKE_TIMEOUT, tls.accept(tcp)).await {
                Ok(Ok(client)) => {
                    let (transport, identity) = match client {
                        AcceptedClient::Verified(stream, identity) => {
                            drop(slot);
                            (AcceptedTransport::Tls(stream), ClientIdentity::Verified(identity))
                        }
                        AcceptedClient::Anonymous(stream) => {
                            let end = Box::pin(sleep(ANONYMOUS_TIME_MAX));
                            (
                                AcceptedTransport::Anonymous { stream, end, _slot: slot },
                                ClientIdentity::Anonymous,
                            )
                        }
                    };
                    let stream = AcceptedStream { transport, _permit: permit };
                    accepted.send((stream, ConnectedClient { address, identity })).await.ok();
                }
                Ok(Err(error)) => {
                    // A peer that disconnects during the handshake is a port check.
                    if let Some(cause) = ConnectionFailureCause::of_io(&error) {
                        ConnectionRejected { cause, reason: &error.to_string() }.record(&failures);
                    }
                }
                Err(elapsed) => {
                    let cause = ConnectionFailureCause::TimedOut;
                    ConnectionRejected { cause, reason: &elapsed.to_string() }.record(&failures);
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
        match &mut self.get_mut().transport {
            AcceptedTransport::Plaintext(stream) => Pin::new(stream).poll_read(cx, into),
            AcceptedTransport::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, into),
            AcceptedTransport::Anonymous { stream, end, .. } => {
                if end.as_mut().poll(cx).is_ready() || end.deadline() <= Instant::now() {
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                Pin::new(stream.as_mut()).poll_read(cx, into)
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
