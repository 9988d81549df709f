//! Connections to the server of a bucket.
//!
//! `object_store` can use `reqwest` instead, whose TLS needs a second provider of cryptography or one that is installed for
//! the whole process (deny.toml: rustls uses ring everywhere). This is hyper's pooled client with our TLS.

use async_trait::async_trait;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};
use rustls_platform_verifier::BuilderVerifierExt as _;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tower_service::Service;

/// Timeout of a connection attempt, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a request: an object of the largest size over a slow link.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest body of a response: the largest result, or a page of a list.
const BODY_BYTES_MAX: usize = 512 << 20;
/// Time for which an unused connection is kept; less than the servers do.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);

/// Opens connections with TLS, or without for `http`.
#[derive(Clone)]
pub(super) struct BucketConnector {
    tls: TlsConnector,
}

impl std::fmt::Debug for BucketConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BucketConnector").finish_non_exhaustive()
    }
}

impl BucketConnector {
    /// Verifies servers with these authorities, or those of the system.
    pub(super) fn new(authorities: Option<RootCertStore>) -> Result<BucketConnector, String> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let tls = match authorities {
            Some(roots) => builder.with_root_certificates(roots),
            None => {
                let verified = builder.with_platform_verifier();
                verified.map_err(|error| {
                    format!("the certificates of the system: {error}; set objects_ca_file")
                })?
            }
        };
        Ok(BucketConnector { tls: TlsConnector::from(Arc::new(tls.with_no_client_auth())) })
    }

    async fn open(self, uri: Uri) -> io::Result<BucketStream> {
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let is_tls = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let tcp = TcpStream::connect((host.as_str(), port)).await?;
        tcp.set_nodelay(true)?;
        if !is_tls {
            return Ok(BucketStream(TokioIo::new(Box::new(tcp))));
        }
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let stream = self.tls.connect(name, tcp).await?;
        Ok(BucketStream(TokioIo::new(Box::new(stream))))
    }
}

impl HttpConnector for BucketConnector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut builder = Client::builder(TokioExecutor::new());
        let builder = builder
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .timer(hyper_util::rt::TokioTimer::new());
        Ok(HttpClient::new(BucketHttp { client: builder.build(self.clone()) }))
    }
}

impl Service<Uri> for BucketConnector {
    type Response = BucketStream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<BucketStream>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let open = tokio::time::timeout(CONNECT_TIMEOUT, self.clone().open(uri));
        Box::pin(async move { open.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) })
    }
}

trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Connection to a server.
pub(super) struct BucketStream(TokioIo<Box<dyn ByteStream>>);

impl Connection for BucketStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for BucketStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl Write for BucketStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Pooled client.
#[derive(Debug)]
struct BucketHttp {
    client: Client<BucketConnector, HttpRequestBody>,
}

#[async_trait]
impl HttpService for BucketHttp {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let exchange = async {
            let response = self.client.request(request).await.map_err(|error| {
                let kind =
                    if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Interrupted };
                HttpError::new(kind, error)
            })?;
            let (head, body) = response.into_parts();
            // Read here, so that the timeout includes the body.
            let body = Limited::new(body, BODY_BYTES_MAX).collect().await;
            let body = body.map_err(|error| HttpError::new_boxed(HttpErrorKind::Interrupted, error))?;
            let never = |error: std::convert::Infallible| match error {};
            let body = HttpResponseBody::new(Full::new(body.to_bytes()).map_err(never));
            Ok(HttpResponse::from_parts(head, body))
        };
        let timed_out = |_| HttpError::new(HttpErrorKind::Timeout, io::Error::from(io::ErrorKind::TimedOut));
        tokio::time::timeout(REQUEST_TIMEOUT, exchange).await.map_err(timed_out)?
    }
}
