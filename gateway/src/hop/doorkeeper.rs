//! The region's end: lets gateways in and nobody else.
//!
//! Anybody on the network can knock, so what goes wrong is counted every time and told once a second at most.

use super::verify::Verifier;
use super::{Cause, Credentials, HTTP1, HTTP2};
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

/// The first byte of whoever speaks TLS: a record of a handshake (RFC 8446, 5.1).
pub(crate) const HANDSHAKE_RECORD: u8 = 22;

/// Greets whoever comes to a region's door.
pub(crate) struct Doorkeeper {
    acceptor: Acceptor,
    verifier: Verifier,
    failures: Arc<HopFailures>,
}

tokio::task_local! {
    /// Why the certificate of this task's handshake was not taken. The library around the verifier makes words of it.
    static REFUSED: RefCell<Option<Error>>;
}

/// Notes why it takes a certificate not.
#[derive(Debug)]
struct Noting(Verifier);

impl Doorkeeper {
    pub(crate) fn with(
        credentials: Arc<Credentials>,
        failures: Arc<HopFailures>,
    ) -> Result<Doorkeeper, rustls::Error> {
        let (provider, identity) = (credentials.anchors.provider().clone(), credentials.identity.clone());
        let verifier = Verifier(credentials);
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(Noting(verifier.clone())))
            .with_cert_resolver(identity);
        // Whichever the edge offers; of both the first.
        config.alpn_protocols = [HTTP2, HTTP1].map(<[u8]>::to_vec).into();
        config.ticketer = ring::Ticketer::new()?;
        Ok(Doorkeeper { acceptor: Acceptor::from_server_config(Arc::new(config)), verifier, failures })
    }

    /// The handshake, which may take so long; nothing for whoever is not let in, of which is told here.
    pub(crate) async fn greet(&self, stream: Stream, limit: Duration) -> Option<TlsStream<Stream>> {
        match tokio::time::timeout(limit, self.handshake(stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err((cause, why))) => {
                HopRefused { cause, why: &why }.record(&self.failures);
                None
            }
            Err(late) => {
                HopRefused { cause: Cause::TimedOut, why: &late.to_string() }.record(&self.failures);
                None
            }
        }
    }

    async fn handshake(&self, mut stream: Stream) -> Result<Option<TlsStream<Stream>>, (Cause, String)> {
        let mut first = [0];
        if stream.try_peek(&mut first).await.is_err() {
            // Somebody only looked whether the port is open.
            return Ok(None);
        }
        if first != [HANDSHAKE_RECORD] {
            return Err((Cause::NotTls, "it speaks in the clear, and here TLS is spoken".to_owned()));
        }
        let greeted = REFUSED.scope(RefCell::default(), async {
            let greeted = self.acceptor.tls_handshake(stream).await;
            greeted.map_err(|error| match REFUSED.with(RefCell::take) {
                Some(refused) => (Cause::of(&refused), refused.to_string()),
                None => (Cause::Other, error.to_string()),
            })
        });
        let stream = greeted.await?;
        // In a resumed session the library takes the certificate as it was: whether it still holds is looked at here.
        let chain = stream.get_ssl().and_then(|shown| shown.peer_cert_chain_der()).unwrap_or_default();
        let (certificate, others) =
            chain.split_first().ok_or_else(|| (Cause::Other, Error::NoCertificatesPresented.to_string()))?;
        self.verifier
            .gateway(certificate, others, UnixTime::now())
            .map_err(|refused| (Cause::of(&refused), refused.to_string()))?;
        Ok(Some(stream))
    }
}

impl ClientCertVerifier for Noting {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // None: a gateway has one certificate.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.0.gateway(certificate, others, now).inspect_err(|refused| {
            // Always within a handshake; outside of one nobody would ask.
            REFUSED.try_with(|note| note.replace(Some(refused.clone()))).ok();
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
