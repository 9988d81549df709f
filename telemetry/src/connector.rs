//! Connections to a collector, with our TLS.
//!
//! The exporter's own clients would need a second provider of cryptography, or one that is installed for the whole process
//! (deny.toml: rustls uses ring everywhere).

use crate::config::{ExportProtocol, Signal};
use crate::outcome::{HttpOutcome, LastOutcome, RejectedItems, error_text};
use async_trait::async_trait;
use bytes::Bytes;
use http::Uri;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower_service::Service;

/// Longest body of a response that is read: the message of an error.
const RESPONSE_BYTES_MAX: usize = 64 << 10;

/// Connector to one collector.
#[derive(Clone)]
pub(crate) struct CollectorConnector {
    http: HttpConnector,
    /// TLS, if the URL of the collector says `https`.
    tls: Option<TlsConnector>,
    timeout: Duration,
}

impl CollectorConnector {
    /// Creates a connector that verifies the collector with these authorities, or with those of the system.
    pub(crate) fn new(
        endpoint: &Uri,
        protocol: ExportProtocol,
        roots: Option<&RootCertStore>,
        timeout: Duration,
    ) -> Result<CollectorConnector, rustls::Error> {
        let is_tls = endpoint.scheme_str() == Some("https");
        let tls = is_tls.then(|| tls(protocol, roots)).transpose()?;
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.enforce_http(false);
        Ok(CollectorConnector { http, tls, timeout })
    }
}

fn tls(protocol: ExportProtocol, roots: Option<&RootCertStore>) -> Result<TlsConnector, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?;
    let verified = match roots {
        Some(roots) => builder.with_root_certificates(roots.clone()),
        None => builder.with_platform_verifier()?,
    };
    let mut config = verified.with_no_client_auth();
    config.alpn_protocols = match protocol {
        ExportProtocol::Grpc => vec![b"h2".to_vec()],
        ExportProtocol::Http => vec![b"http/1.1".to_vec()],
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

impl Service<Uri> for CollectorConnector {
    type Response = TokioIo<CollectorStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.http.poll_ready(context).map_err(io::Error::other)
    }

    fn call(&mut self, collector: Uri) -> Self::Future {
        let host = collector.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let (connecting, tls, timeout) = (self.http.call(collector), self.tls.clone(), self.timeout);
        Box::pin(async move {
            let connected = tokio::time::timeout(timeout, async move {
                let tcp = connecting.await.map_err(io::Error::other)?.into_inner();
                let Some(tls) = tls else { return Ok(CollectorStream::Plaintext(tcp)) };
                let name = ServerName::try_from(host).map_err(io::Error::other)?;
                Ok(CollectorStream::Tls(Box::new(tls.connect(name, tcp).await?)))
            });
            let stream = connected.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            stream.map(TokioIo::new)
        })
    }
}

/// Connection to a collector.
#[derive(Debug)]
pub(crate) enum CollectorStream {
    Plaintext(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connection for CollectorStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for CollectorStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            CollectorStream::Plaintext(stream) => Pin::new(stream).poll_read(cx, into),
            CollectorStream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for CollectorStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            CollectorStream::Plaintext(stream) => Pin::new(stream).poll_write(cx, bytes),
            CollectorStream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            CollectorStream::Plaintext(stream) => Pin::new(stream).poll_flush(cx),
            CollectorStream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            CollectorStream::Plaintext(stream) => Pin::new(stream).poll_shutdown(cx),
            CollectorStream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}

/// Client of exports by HTTP. It stores what the exporter does not return of a request.
pub(crate) struct HttpExportClient {
    client: Client<CollectorConnector, Full<Bytes>>,
    timeout: Duration,
    signal: Signal,
    last: LastOutcome,
}

impl HttpExportClient {
    pub(crate) fn new(
        connector: CollectorConnector,
        timeout: Duration,
        signal: Signal,
        last: LastOutcome,
    ) -> HttpExportClient {
        let client = Client::builder(TokioExecutor::new()).build(connector);
        HttpExportClient { client, timeout, signal, last }
    }

    /// Sends a request, and returns the response whatever its status is.
    pub(crate) async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let exchange = async {
            let response = self.client.request(request.map(Full::new)).await?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, RESPONSE_BYTES_MAX).collect().await?;
            Ok(Response::from_parts(head, body.to_bytes()))
        };
        let timed_out = |_| Err(format!("no response within {:?}", self.timeout).into());
        tokio::time::timeout(self.timeout, exchange).await.unwrap_or_else(timed_out)
    }
}

impl fmt::Debug for HttpExportClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpExportClient").finish_non_exhaustive()
    }
}

#[async_trait]
impl HttpClient for HttpExportClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = self.send(request).await;
        self.last.set(match &sent {
            Ok(response) if response.status().is_success() => {
                RejectedItems::read(self.signal, response.body()).map(HttpOutcome::Rejected)
            }
            // The exporter returns the status.
            Ok(_) => None,
            Err(error) => Some(HttpOutcome::Failed(error_text(error.as_ref()))),
        });
        sent
    }
}
