//! Client end: the handshake with an expected peer.

use crate::process::ProcessIdentity;
use crate::stream::GuardedStream;
use crate::verify::{ExpectedPeer, PeerIdentity, Verifier};
use rustls::client::Resumption;
use rustls::pki_types::UnixTime;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, HandshakeKind, RootCertStore};
use std::io;
use std::sync::Arc;
use supervision::RwLock;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Maximum number of resumable sessions, over all peers: eight for each of a hundred.
const SESSIONS_MAX: usize = 800;

/// Stream of a client.
pub type ClientStream = GuardedStream<TlsStream<TcpStream>>;

/// Established connection with a verified peer.
#[derive(Debug)]
pub struct ConnectedPeer {
    /// Connection.
    pub stream: ClientStream,
    /// Peer.
    pub peer: PeerIdentity,
}

impl ConnectedPeer {
    /// Returns the negotiated protocol.
    pub fn protocol(&self) -> Option<&[u8]> {
        self.stream.get_ref().get_ref().1.alpn_protocol()
    }
}

/// TLS of a client.
#[derive(Debug)]
pub struct TlsClient {
    verifier: Verifier,
    protocols: &'static [&'static [u8]],
    connectors: RwLock<Arc<TlsConnectors>>,
}

/// TLS connectors for one set of own certificate and trusted authorities: the sessions are cached with them, because a
/// session continues with the certificate with which it began.
struct TlsConnectors {
    certificate: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
    resuming: TlsConnector,
    /// Connector without session resumption.
    fresh: TlsConnector,
}

impl std::fmt::Debug for TlsConnectors {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("TlsConnectors")
    }
}

impl TlsClient {
    /// Creates the TLS of a client that offers these protocols.
    ///
    /// # Errors
    ///
    /// If the library rejects the configuration.
    pub fn new(
        identity: Arc<ProcessIdentity>,
        protocols: &'static [&'static [u8]],
    ) -> Result<TlsClient, Error> {
        let verifier = Verifier::new(identity);
        let connectors = TlsConnectors::of(&verifier, protocols)?;
        Ok(TlsClient { verifier, protocols, connectors: RwLock::independent(Arc::new(connectors)) })
    }

    /// Returns the identity of this process.
    pub fn identity(&self) -> &Arc<ProcessIdentity> {
        &self.verifier.0
    }

    /// Returns connectors for the current certificate and authorities.
    fn connectors(&self) -> Arc<TlsConnectors> {
        let current = self.connectors.read().clone();
        if current.are_current(&self.verifier) {
            return current;
        }
        let renewed = TlsConnectors::of(&self.verifier, self.protocols)
            .expect("the same configuration was valid before");
        let renewed = Arc::new(renewed);
        *self.connectors.write() = renewed.clone();
        renewed
    }

    /// Performs the handshake and verifies the peer, with a resumed session if there is one. For such a session the
    /// library does not verify the certificate again; if it is no longer valid, the peer may have a newer one: `None`.
    /// The caller limits the time.
    ///
    /// # Errors
    ///
    /// If the handshake fails, or the peer is not the expected one.
    pub async fn resume(&self, expected: ExpectedPeer, tcp: TcpStream) -> io::Result<Option<ConnectedPeer>> {
        let connectors = self.connectors();
        self.handshake(&connectors.resuming, expected, tcp).await
    }

    /// Performs a full handshake and verifies the peer. The caller limits the time.
    ///
    /// # Errors
    ///
    /// If the handshake fails, or the peer is not the expected one.
    pub async fn connect(&self, expected: ExpectedPeer, tcp: TcpStream) -> io::Result<ConnectedPeer> {
        let connectors = self.connectors();
        let connected = self.handshake(&connectors.fresh, expected, tcp).await?;
        connected.ok_or_else(|| io::Error::other("a full handshake resumed a session"))
    }

    async fn handshake(
        &self,
        connector: &TlsConnector,
        expected: ExpectedPeer,
        tcp: TcpStream,
    ) -> io::Result<Option<ConnectedPeer>> {
        let stream = connector.connect(expected.server_name(), tcp).await?;
        let (_, session) = stream.get_ref();
        let chain = session.peer_certificates().unwrap_or_default();
        let Some((certificate, others)) = chain.split_first() else {
            return Err(io::Error::other(Error::NoCertificatesPresented));
        };
        let peer = match session.handshake_kind() {
            Some(HandshakeKind::Resumed) => {
                match self.verifier.server(certificate, others, expected, UnixTime::now()) {
                    Ok(peer) => peer,
                    Err(_) => return Ok(None),
                }
            }
            // The handshake verified the chain.
            _ => self
                .verifier
                .named(certificate, &[expected.role], expected.region)
                .map_err(io::Error::other)?,
        };
        let guard = self.verifier.admit(&peer).map_err(io::Error::other)?;
        Ok(Some(ConnectedPeer { stream: GuardedStream::new(stream, guard), peer }))
    }
}

impl TlsConnectors {
    fn of(verifier: &Verifier, protocols: &[&[u8]]) -> Result<TlsConnectors, Error> {
        let ProcessIdentity { certificate, anchors, .. } = &*verifier.0;
        let (certificate, roots) = (certificate.certified_key(), anchors.current().roots);
        let connector = |resumption| {
            let mut config = ClientConfig::builder_with_provider(anchors.provider().clone())
                .with_protocol_versions(&[&TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier.clone()))
                .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certificate.clone())));
            config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            config.resumption = resumption;
            config.enable_sni = false;
            Ok::<_, Error>(TlsConnector::from(Arc::new(config)))
        };
        let resuming = connector(Resumption::in_memory_sessions(SESSIONS_MAX))?;
        let fresh = connector(Resumption::disabled())?;
        Ok(TlsConnectors { certificate, roots, resuming, fresh })
    }

    fn are_current(&self, verifier: &Verifier) -> bool {
        let ProcessIdentity { certificate, anchors, .. } = &*verifier.0;
        Arc::ptr_eq(&self.certificate, &certificate.certified_key())
            && Arc::ptr_eq(&self.roots, &anchors.current().roots)
    }
}
