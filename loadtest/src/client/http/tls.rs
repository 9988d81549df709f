//! TLS with the system's root certificates and additional ones.

use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{AlertDescription, ClientConfig};
use rustls_platform_verifier::Verifier;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::HttpProtocol;

/// TLS connector of a client.
#[derive(Clone)]
pub(crate) struct ClientTls {
    connector: TlsConnector,
}

impl ClientTls {
    /// Creates the connector of a configuration.
    pub(crate) fn of(config: Arc<ClientConfig>) -> ClientTls {
        ClientTls { connector: TlsConnector::from(config) }
    }

    /// Trusts the system's roots and the certificates in `extra_pem`.
    pub(in crate::client) fn new(
        extra_pem: Option<&[u8]>,
        protocol: HttpProtocol,
    ) -> Result<ClientTls, String> {
        let extra = extra_pem.map_or(Ok(Vec::new()), |pem| {
            let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
            match certificates {
                Ok(certificates) if certificates.is_empty() => {
                    Err("roots_pem: contains no certificate".to_owned())
                }
                Ok(certificates) => Ok(certificates),
                Err(error) => Err(format!("roots_pem: invalid PEM: {error}")),
            }
        })?;
        let provider = Arc::new(default_provider());
        let verifier = Verifier::new_with_extra_roots(extra, Arc::clone(&provider))
            .map_err(|error| format!("roots_pem: {error}"))?;
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("TLS: {error}"))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        config.alpn_protocols = match protocol {
            HttpProtocol::Http1 => vec![b"http/1.1".to_vec()],
            HttpProtocol::Http2 => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        };
        Ok(ClientTls { connector: TlsConnector::from(Arc::new(config)) })
    }

    /// Performs the handshake; returns the stream and whether HTTP/2 was negotiated.
    pub(super) async fn secure(
        &self,
        tcp: TcpStream,
        host: &str,
    ) -> std::io::Result<(TlsStream<TcpStream>, bool)> {
        let name = ServerName::try_from(host.to_owned()).map_err(std::io::Error::other)?;
        let stream = self.connector.connect(name, tcp).await?;
        let agreed = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok((stream, agreed))
    }
}

/// Returns whether a server rejected the offered protocols, of which HTTP/2 is the only one that a server may lack.
pub(crate) fn is_alpn_rejection(error: &std::io::Error) -> bool {
    let source = error.get_ref().and_then(|source| source.downcast_ref::<rustls::Error>());
    matches!(source, Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)))
}
