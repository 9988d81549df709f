//! Token of an operator, and TLS without a client certificate: the hub is verified by the authorities of the fleet, or by
//! their fingerprints in a join token, and only then a secret is sent.

use std::io;
use std::path::Path;
use std::sync::Arc;

use http::HeaderValue;
use identity::authorities::read_roots;
use regions::spiffe::{Role, SpiffeId};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use scheduler_core::pki::token::Fingerprint;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Token of an operator, with the authorities of the hubs to which it is sent.
#[derive(Clone)]
pub struct OperatorToken {
    /// Value of `authorization`, which is marked as sensitive.
    pub(crate) header: HeaderValue,
    pub(crate) connector: TlsConnector,
}

impl std::fmt::Debug for OperatorToken {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("OperatorToken")
    }
}

impl OperatorToken {
    /// Creates a token that is sent to hubs with a certificate of the authorities in this PEM file.
    ///
    /// # Errors
    ///
    /// When the token is empty or has invalid characters, or the file cannot be used.
    pub fn new(token: &str, authorities: &Path) -> Result<OperatorToken, String> {
        let token = token.trim();
        if token.is_empty() {
            return Err("the token is empty".to_owned());
        }
        let header = HeaderValue::try_from(format!("Bearer {token}"));
        let mut header =
            header.map_err(|_| "the token has characters that a header cannot have".to_owned())?;
        header.set_sensitive(true);
        let trusted = TrustedAuthorities::Roots(Arc::new(read_roots(authorities)?));
        let connector = connector(trusted, &[b"http/1.1"]).map_err(|error| error.to_string())?;
        Ok(OperatorToken { header, connector })
    }

    /// Performs the handshake with a hub, and verifies it. The caller limits the time.
    ///
    /// # Errors
    ///
    /// When the handshake fails, or the peer is not a hub of these authorities.
    pub async fn connect(&self, tcp: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        // The name is not sent and never resolved: the one in the certificate is verified.
        let name = ServerName::try_from("hub.identity.invalid").map_err(io::Error::other)?;
        self.connector.connect(name, tcp).await
    }
}

/// Authorities that a hub's certificate may have.
#[derive(Clone, Debug)]
pub(crate) enum TrustedAuthorities {
    /// Those with these fingerprints, whose certificate is part of the chain that the hub presents.
    Fingerprints(Vec<Fingerprint>),
    /// These.
    Roots(Arc<RootCertStore>),
}

/// Creates a connector to hubs of these authorities, without a client certificate.
pub(crate) fn connector(trusted: TrustedAuthorities, protocols: &[&[u8]]) -> Result<TlsConnector, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = HubVerifier { trusted, provider: provider.clone() };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Verifier of a hub's certificate.
#[derive(Debug)]
struct HubVerifier {
    trusted: TrustedAuthorities,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for HubVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let algorithms = self.provider.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(certificate)?;
        match &self.trusted {
            TrustedAuthorities::Fingerprints(fingerprints) => {
                let other_authority = || Error::InvalidCertificate(CertificateError::UnknownIssuer);
                let authority = others.iter().find(|other| fingerprints.contains(&Fingerprint::of(other)));
                let mut roots = RootCertStore::empty();
                roots.add(authority.ok_or_else(other_authority)?.clone().into_owned())?;
                verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &[], now, algorithms)?;
            }
            TrustedAuthorities::Roots(roots) => {
                verify_server_cert_signed_by_trust_anchor(&parsed, roots, others, now, algorithms)?;
            }
        }
        let name = webpki::EndEntityCert::try_from(certificate)
            .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let name = SpiffeId::of(name.valid_uri_names());
        if name.is_ok_and(|name| name.role() == Role::Hub) {
            Ok(ServerCertVerified::assertion())
        } else {
            // Any process of the fleet has a certificate of the authority; only a hub may receive the secret.
            Err(Error::InvalidCertificate(CertificateError::NotValidForName))
        }
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
