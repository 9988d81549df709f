//! Server end: the configuration of TLS, and the handshake with an accepted peer.

use crate::process::ProcessIdentity;
use crate::stream::GuardedStream;
use crate::verify::{AcceptedPeers, PeerIdentity, Verifier};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ServerConfig;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// First byte of a TLS connection: a handshake record (RFC 8446, 5.1).
pub const HANDSHAKE_RECORD: u8 = 22;

tokio::task_local! {
    /// Verification error of this task's handshake, for acceptors that return it only as text.
    static VERIFY_ERROR: RefCell<Option<Error>>;
}

/// Runs a handshake and returns, beside its result, why the certificate of the peer was rejected.
pub async fn recording<T>(handshake: impl Future<Output = T>) -> (T, Option<Error>) {
    VERIFY_ERROR
        .scope(RefCell::default(), async {
            let done = handshake.await;
            (done, VERIFY_ERROR.with(RefCell::take))
        })
        .await
}

/// Returns the TLS configuration of a listener: TLS 1.3, a client certificate of an accepted peer, and tickets, since a
/// resumed handshake costs a tenth of a full one. The certificate of a resumed session must be verified again
/// ([`Verifier::client`]).
///
/// # Errors
///
/// If the library rejects the configuration.
pub fn server_config(
    identity: &Arc<ProcessIdentity>,
    accepted: AcceptedPeers,
    protocols: &[&[u8]],
) -> Result<ServerConfig, Error> {
    configure(identity, accepted, true, protocols)
}

fn configure(
    identity: &Arc<ProcessIdentity>,
    accepted: AcceptedPeers,
    is_required: bool,
    protocols: &[&[u8]],
) -> Result<ServerConfig, Error> {
    let verifier = ClientVerifier { verifier: Verifier::new(identity.clone()), accepted, is_required };
    let mut config = ServerConfig::builder_with_provider(identity.anchors.provider().clone())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(identity.certificate.clone());
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.ticketer = ring::Ticketer::new()?;
    Ok(config)
}

/// TLS of a listener.
pub struct ServerTls {
    acceptor: TlsAcceptor,
    verifier: Verifier,
    accepted: AcceptedPeers,
    is_required: bool,
}

/// Client of a connection, after the handshake.
pub enum AcceptedClient {
    /// Verified peer.
    Verified(Box<GuardedStream<TlsStream<TcpStream>>>, PeerIdentity),
    /// Client without a certificate, where none is required.
    Anonymous(Box<TlsStream<TcpStream>>),
}

impl ServerTls {
    /// Creates the TLS of a listener that accepts these peers.
    ///
    /// # Errors
    ///
    /// If the library rejects the configuration.
    pub fn new(
        identity: &Arc<ProcessIdentity>,
        accepted: AcceptedPeers,
        protocols: &[&[u8]],
    ) -> Result<ServerTls, Error> {
        ServerTls::of(identity, accepted, true, protocols)
    }

    /// Creates the TLS of a listener that accepts these peers, and clients without a certificate.
    ///
    /// # Errors
    ///
    /// If the library rejects the configuration.
    pub fn with_optional_client(
        identity: &Arc<ProcessIdentity>,
        accepted: AcceptedPeers,
        protocols: &[&[u8]],
    ) -> Result<ServerTls, Error> {
        ServerTls::of(identity, accepted, false, protocols)
    }

    fn of(
        identity: &Arc<ProcessIdentity>,
        accepted: AcceptedPeers,
        is_required: bool,
        protocols: &[&[u8]],
    ) -> Result<ServerTls, Error> {
        let acceptor = TlsAcceptor::from(Arc::new(configure(identity, accepted, is_required, protocols)?));
        Ok(ServerTls { acceptor, verifier: Verifier::new(identity.clone()), accepted, is_required })
    }

    /// Performs the handshake. The caller limits its time.
    ///
    /// # Errors
    ///
    /// If the handshake fails or the peer is not accepted.
    pub async fn accept(&self, tcp: TcpStream) -> io::Result<AcceptedClient> {
        let mut first = [0];
        if tcp.peek(&mut first).await? == 1 && first != [HANDSHAKE_RECORD] {
            return Err(io::Error::other(Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)));
        }
        let stream = self.acceptor.accept(tcp).await?;
        // For a resumed session the library does not verify the certificate again: verify that it is still valid.
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let Some((certificate, others)) = chain.split_first() else {
            return match self.is_required {
                true => Err(io::Error::other(Error::NoCertificatesPresented)),
                false => Ok(AcceptedClient::Anonymous(Box::new(stream))),
            };
        };
        let verified = self.verifier.client(certificate, others, self.accepted, UnixTime::now());
        let peer = verified.map_err(io::Error::other)?;
        let guard = self.verifier.admit(&peer).map_err(io::Error::other)?;
        Ok(AcceptedClient::Verified(Box::new(GuardedStream::new(stream, guard)), peer))
    }
}

/// Verifier of client certificates, which records why it rejects one.
#[derive(Debug)]
struct ClientVerifier {
    verifier: Verifier,
    accepted: AcceptedPeers,
    is_required: bool,
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.is_required
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // No hints: a process has one certificate.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.client(certificate, others, self.accepted, now);
        verified.map(|_| ClientCertVerified::assertion()).inspect_err(|error| {
            // The task local is set only where the acceptor does not return the error.
            VERIFY_ERROR.try_with(|recorded| recorded.replace(Some(error.clone()))).ok();
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.tls12(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.tls13(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.schemes()
    }
}
