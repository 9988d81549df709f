//! TLS listener of the authority. It accepts connections with a certificate of the fleet, and connections without one,
//! which can only join.
//!
//! It has its own port, so that the other listeners of a hub require a certificate, and a firewall can limit who may
//! join.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use identity::{AcceptedPeers, GuardedStream, PeerIdentity, ProcessIdentity, Verifier};
use regions::spiffe::Role;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ServerConfig};
use rustls::version::TLS13;
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use supervision::task::contained;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Maximum number of connections: one for each process of a large fleet.
pub(super) const CONNECTIONS_MAX: usize = 8192;
/// Maximum number of connections without a certificate, handshakes included.
pub(super) const ANONYMOUS_MAX: usize = 256;
/// Maximum time of a handshake, and of a connection without a certificate, which has one request.
const ANONYMOUS_TIME_MAX: Duration = Duration::from_secs(10);
/// Delay after a failure to accept, such as the limit of open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Sender of a request.
#[derive(Clone, Debug)]
pub(super) struct AuthorityCaller {
    pub(super) address: SocketAddr,
    /// Identity, with a certificate.
    pub(super) peer: Option<PeerIdentity>,
}

/// Listener with TLS.
pub(super) struct AuthorityListener {
    tcp: TcpListener,
    tls: TlsAcceptor,
    verifier: Verifier,
    anonymous: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    handshakes: JoinSet<Option<(AuthorityStream, AuthorityCaller)>>,
}

impl AuthorityListener {
    pub(super) fn new(tcp: TcpListener, identity: &Arc<ProcessIdentity>) -> Result<AuthorityListener, Error> {
        let provider = Arc::new(ring::default_provider());
        let verifier =
            OptionalClient { verifier: Verifier::new(identity.clone()), provider: provider.clone() };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(identity.certificate().clone());
        // Sessions are not resumed, so that every connection is verified.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(AuthorityListener {
            tcp,
            tls: TlsAcceptor::from(Arc::new(config)),
            verifier: Verifier::new(identity.clone()),
            anonymous: Arc::new(Semaphore::new(ANONYMOUS_MAX)),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            handshakes: JoinSet::new(),
        })
    }

    fn begin(&mut self, tcp: TcpStream, address: SocketAddr) {
        let (tls, verifier, connections) =
            (self.tls.clone(), self.verifier.clone(), self.connections.clone());
        let Ok(permit) = self.anonymous.clone().try_acquire_owned() else {
            tracing::debug!(%address, limit = ANONYMOUS_MAX, "connection limit of the authority reached");
            return;
        };
        self.handshakes.spawn(async move {
            let accepted = handshake(tls, &verifier, &connections, permit, tcp, address);
            match contained("handshake", timeout(ANONYMOUS_TIME_MAX, accepted)).await? {
                Ok(Ok(accepted)) => Some(accepted),
                Ok(Err(error)) => {
                    // A peer without a valid certificate, or one that is no TLS client. It received a TLS alert.
                    tracing::info!(%address, %error, "connection to the authority rejected");
                    None
                }
                Err(_) => None,
            }
        });
    }
}

async fn handshake(
    tls: TlsAcceptor,
    verifier: &Verifier,
    connections: &Arc<Semaphore>,
    anonymous: OwnedSemaphorePermit,
    tcp: TcpStream,
    address: SocketAddr,
) -> io::Result<(AuthorityStream, AuthorityCaller)> {
    tcp.set_nodelay(true)?;
    let stream = tls.accept(tcp).await?;
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let Some((certificate, others)) = chain.split_first() else {
        let end = Box::pin(sleep(ANONYMOUS_TIME_MAX));
        let stream = AuthorityStream { stream: Encrypted::Anonymous(stream, end), _permit: anonymous };
        return Ok((stream, AuthorityCaller { address, peer: None }));
    };
    let peer = verifier.client(certificate, others, ACCEPTED, UnixTime::now()).map_err(io::Error::other)?;
    let guard = verifier.admit(&peer).map_err(io::Error::other)?;
    let full = |_| io::Error::other("too many connections to the authority are open");
    let permit = connections.clone().try_acquire_owned().map_err(full)?;
    let stream = Encrypted::Known(GuardedStream::new(stream, guard));
    Ok((AuthorityStream { stream, _permit: permit }, AuthorityCaller { address, peer: Some(peer) }))
}

/// All roles may call the authority; the paths limit them further.
const ACCEPTED: AcceptedPeers = AcceptedPeers { roles: &Role::ALL, region: None };

impl Listener for AuthorityListener {
    type Io = AuthorityStream;
    type Addr = AuthorityCaller;

    async fn accept(&mut self) -> (AuthorityStream, AuthorityCaller) {
        loop {
            tokio::select! {
                accepted = self.tcp.accept() => match accepted {
                    Ok((tcp, address)) => self.begin(tcp, address),
                    Err(_) => sleep(ACCEPT_PAUSE).await,
                },
                Some(done) = self.handshakes.join_next() => {
                    if let Ok(Some(accepted)) = done {
                        return accepted;
                    }
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<AuthorityCaller> {
        self.tcp.local_addr().map(|address| AuthorityCaller { address, peer: None })
    }
}

impl Connected<IncomingStream<'_, AuthorityListener>> for AuthorityCaller {
    fn connect_info(stream: IncomingStream<'_, AuthorityListener>) -> AuthorityCaller {
        stream.remote_addr().clone()
    }
}

/// Open connection.
pub(super) struct AuthorityStream {
    stream: Encrypted,
    _permit: OwnedSemaphorePermit,
}

enum Encrypted {
    /// Without a certificate, until the given time.
    Anonymous(TlsStream<TcpStream>, Pin<Box<Sleep>>),
    Known(GuardedStream<TlsStream<TcpStream>>),
}

impl AsyncRead for AuthorityStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Encrypted::Anonymous(stream, end) => {
                if end.as_mut().poll(cx).is_ready() || end.deadline() <= Instant::now() {
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                Pin::new(stream).poll_read(cx, into)
            }
            Encrypted::Known(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for AuthorityStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            Encrypted::Anonymous(stream, _) => Pin::new(stream).poll_write(cx, bytes),
            Encrypted::Known(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Encrypted::Anonymous(stream, _) => Pin::new(stream).poll_flush(cx),
            Encrypted::Known(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Encrypted::Anonymous(stream, _) => Pin::new(stream).poll_shutdown(cx),
            Encrypted::Known(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// Verifier of client certificates that does not require one.
#[derive(Debug)]
struct OptionalClient {
    verifier: Verifier,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for OptionalClient {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verifier.client(certificate, others, ACCEPTED, now).map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
