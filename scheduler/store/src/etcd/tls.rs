//! TLS 1.3 with etcd.
//!
//! etcd-client cannot limit the version: the TLS of its transport (tonic) also accepts 1.2. So a connection does its own
//! handshake here, and the transport, whose URL is `http://`, sends over it. The requests say `https`, since etcd reads the
//! name in a client certificate only then.
//!
//! etcd offers TLS 1.3 since it is built with Go 1.13 (`etcd --version`); 3.4.23 of Debian is built with Go 1.19.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use etcd_client::{Channel, Error};
use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::Endpoint;
use tower_service::Service;

use super::{CONNECT_LIMIT, KEEP_ALIVE_LIMIT};

/// Protocol of gRPC.
const HTTP2: &[u8] = b"h2";

/// TLS settings of an etcd.
#[derive(Clone)]
pub struct EtcdTls {
    config: Arc<ClientConfig>,
    has_certificate: bool,
}

impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdTls").field("has_certificate", &self.has_certificate).finish_non_exhaustive()
    }
}

/// The files for TLS with etcd cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdTlsError {
    /// The certificates of the authority.
    #[error("{0}")]
    Authority(String),
    /// The client certificate.
    #[error("{0}")]
    Certificate(String),
    /// The key of the client certificate.
    #[error("{0}")]
    Key(String),
}

impl EtcdTls {
    /// Creates the settings from the certificates of the authority that signs those of the members, and the client
    /// certificate with its key; all in PEM.
    ///
    /// # Errors
    ///
    /// When one of them cannot be used.
    pub fn new(authority: &[u8], identity: Option<(&[u8], &[u8])>) -> Result<EtcdTls, EtcdTlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(authority).map_err(EtcdTlsError::Authority)? {
            let added = roots.add(certificate);
            added.map_err(|error| {
                EtcdTlsError::Authority(format!("has a certificate that is not an authority: {error}"))
            })?;
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| EtcdTlsError::Authority(error.to_string()))?
            .with_root_certificates(roots);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(certificate).map_err(EtcdTlsError::Certificate)?;
                let key = PrivateKeyDer::from_pem_slice(key)
                    .map_err(|error| EtcdTlsError::Key(format!("has no private key in PEM: {error}")))?;
                let built = builder.with_client_auth_cert(chain, key);
                built.map_err(|error| {
                    EtcdTlsError::Key(format!("cannot be used with the certificate: {error}"))
                })?
            }
        };
        config.alpn_protocols = vec![HTTP2.to_vec()];
        Ok(EtcdTls { config: Arc::new(config), has_certificate: identity.is_some() })
    }

    /// Returns whether the hub has a client certificate.
    pub fn is_mutual(&self) -> bool {
        self.has_certificate
    }

    /// Returns a channel to the member at `endpoint`, `https://HOST:PORT`. It connects with its first request.
    pub(super) fn channel(&self, endpoint: &str, keep_alive: Duration) -> Result<Channel, Error> {
        let origin: Uri = endpoint.parse()?;
        let authority = origin.authority().map_or("", |authority| authority.as_str());
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        let connector = TlsService { http, tls: TlsConnector::from(self.config.clone()) };
        let endpoint = Endpoint::from_shared(format!("http://{authority}"))?
            .origin(origin)
            .connect_timeout(CONNECT_LIMIT)
            .http2_keep_alive_interval(keep_alive)
            .keep_alive_timeout(KEEP_ALIVE_LIMIT)
            .keep_alive_while_idle(true);
        Ok(Channel::Tonic(endpoint.connect_with_connector_lazy(connector)))
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let read = read.map_err(|error| format!("has an invalid certificate: {error}"))?;
    if read.is_empty() { Err("has no certificate in PEM".to_owned()) } else { Ok(read) }
}

/// Connector with a handshake.
#[derive(Clone)]
struct TlsService {
    http: HttpConnector,
    tls: TlsConnector,
}

impl Service<Uri> for TlsService {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.http.poll_ready(context).map_err(io::Error::other)
    }

    fn call(&mut self, member: Uri) -> Self::Future {
        let host = member.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other);
        let (connecting, tls) = (self.http.call(member), self.tls.clone());
        Box::pin(async move {
            let tcp = connecting.await.map_err(io::Error::other)?.into_inner();
            let stream = tls.connect(name?, tcp).await?;
            if stream.get_ref().1.alpn_protocol() != Some(HTTP2) {
                return Err(io::Error::other("the member does not offer HTTP/2"));
            }
            Ok(TokioIo::new(stream))
        })
    }
}
