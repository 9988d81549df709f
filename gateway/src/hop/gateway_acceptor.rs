//! TLS acceptor of a region: accepts gateways only.
//!
//! Any host on the network can connect, so every failure is counted and at most one a second is logged.

use super::verify::Verifier;
use super::{Credentials, HTTP1, HTTP2, HopFailureCause};
use crate::events::{HopFailures, HopRefused};
use pingora::listeners::tls::Acceptor;
use pingora::protocols::l4::stream::Stream;
use pingora::protocols::tls::TlsStream;
use pingora::protocols::{Peek, Ssl};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ServerConfig;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

/// First byte of a TLS connection: a handshake record (RFC 8446, 5.1).
pub(crate) const HANDSHAKE_RECORD: u8 = 22;

/// Accepts the TLS connections of gateways.
pub(crate) struct GatewayAcceptor {
    acceptor: Acceptor,
    verifier: Verifier,
    failures: Arc<HopFailures>,
}

tokio::task_local! {
    /// Verification error of this task's handshake. The acceptor returns it only as text.
    static VERIFY_ERROR: RefCell<Option<Error>>;
}

/// Verifier that records why it rejects a certificate.
#[derive(Debug)]
struct RecordingVerifier(Verifier);

impl GatewayAcceptor {
    pub(crate) fn new(
        credentials: Arc<Credentials>,
        failures: Arc<HopFailures>,
    ) -> Result<GatewayAcceptor, rustls::Error> {
        let (provider, identity) = (credentials.anchors.provider().clone(), credentials.identity.clone());
        let verifier = Verifier(credentials);
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(RecordingVerifier(verifier.clone())))
            .with_cert_resolver(identity);
        // Either protocol that the gateway offers; HTTP/2 if it offers both.
        config.alpn_protocols = [HTTP2, HTTP1].map(<[u8]>::to_vec).into();
        config.ticketer = ring::Ticketer::new()?;
        Ok(GatewayAcceptor { acceptor: Acceptor::from_server_config(Arc::new(config)), verifier, failures })
    }

    /// Performs the handshake within `limit`; returns `None`, after logging, for a rejected connection.
    pub(crate) async fn accept(&self, stream: Stream, limit: Duration) -> Option<TlsStream<Stream>> {
        match tokio::time::timeout(limit, self.handshake(stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err((cause, reason))) => {
                HopRefused { cause, reason: &reason }.record(&self.failures);
                None
            }
            Err(elapsed) => {
                HopRefused { cause: HopFailureCause::TimedOut, reason: &elapsed.to_string() }
                    .record(&self.failures);
                None
            }
        }
    }

    async fn handshake(
        &self,
        mut stream: Stream,
    ) -> Result<Option<TlsStream<Stream>>, (HopFailureCause, String)> {
        let mut first = [0];
        if stream.try_peek(&mut first).await.is_err() {
            // Port check: the peer connected and disconnected.
            return Ok(None);
        }
        if first != [HANDSHAKE_RECORD] {
            return Err((
                HopFailureCause::NotTls,
                "the peer sends plaintext, and this port expects TLS".to_owned(),
            ));
        }
        let accepted = VERIFY_ERROR.scope(RefCell::default(), async {
            let handshake = self.acceptor.tls_handshake(stream).await;
            handshake.map_err(|error| match VERIFY_ERROR.with(RefCell::take) {
                Some(refused) => (HopFailureCause::of(&refused), refused.to_string()),
                None => (HopFailureCause::Other, error.to_string()),
            })
        });
        let stream = accepted.await?;
        // For a resumed session the library does not verify the certificate again: verify that it is still valid.
        let chain = stream.get_ssl().and_then(|session| session.peer_cert_chain_der()).unwrap_or_default();
        let (certificate, others) = chain
            .split_first()
            .ok_or_else(|| (HopFailureCause::Other, Error::NoCertificatesPresented.to_string()))?;
        self.verifier
            .gateway(certificate, others, UnixTime::now())
            .map_err(|error| (HopFailureCause::of(&error), error.to_string()))?;
        Ok(Some(stream))
    }
}

impl ClientCertVerifier for RecordingVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // No hints: a gateway has one certificate.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.0.gateway(certificate, others, now).inspect_err(|error| {
            // The task local is always set during a handshake.
            VERIFY_ERROR.try_with(|recorded| recorded.replace(Some(error.clone()))).ok();
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.tls12(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.tls13(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.schemes()
    }
}
