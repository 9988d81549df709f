//! Connections to the server of a bucket.
//!
//! `object_store` can use `reqwest` instead, whose TLS needs a second provider of cryptography or one that is installed for
//! the whole process (deny.toml: rustls uses ring everywhere). This is hyper's pooled client with our TLS.

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::{Response, Uri};
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
use tokio::time::{Instant, Sleep, sleep};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tower_service::Service;

/// Timeout of a connection attempt, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which an unused connection is kept; less than the servers do.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);

/// Reading of the bodies of responses, with its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseMode {
    /// A body is read before its response is returned, within one timeout: small objects.
    Buffered {
        /// Timeout of a request, from its connection to the end of the body.
        timeout: Duration,
        /// Longest body.
        bytes_max: usize,
    },
    /// A body is passed on while it arrives: large objects.
    Streamed {
        /// Timeout from the request to the head of the response.
        first_byte: Duration,
        /// Maximum time without a byte of the body.
        stall: Duration,
    },
}

impl ResponseMode {
    /// Mode of downloads: ample for a server that works, since the object has no influence on either time.
    pub const DOWNLOAD: ResponseMode =
        ResponseMode::Streamed { first_byte: Duration::from_secs(30), stall: Duration::from_secs(30) };
}

/// Opens connections with TLS, or without for `http`.
#[derive(Clone)]
pub struct BucketConnector {
    tls: TlsConnector,
    mode: ResponseMode,
}

impl std::fmt::Debug for BucketConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BucketConnector").finish_non_exhaustive()
    }
}

impl BucketConnector {
    /// Verifies servers with these authorities, or those of the system.
    ///
    /// # Errors
    ///
    /// When the certificates of the system cannot be read.
    pub fn new(authorities: Option<RootCertStore>, mode: ResponseMode) -> Result<BucketConnector, String> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let tls = match authorities {
            Some(roots) => builder.with_root_certificates(roots),
            None => {
                let verified = builder.with_platform_verifier();
                verified.map_err(|error| {
                    format!("the certificates of the system cannot be read ({error}); install them")
                })?
            }
        };
        Ok(BucketConnector { tls: TlsConnector::from(Arc::new(tls.with_no_client_auth())), mode })
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
        Ok(HttpClient::new(BucketHttp { client: builder.build(self.clone()), mode: self.mode }))
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
pub struct BucketStream(TokioIo<Box<dyn ByteStream>>);

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
    mode: ResponseMode,
}

impl BucketHttp {
    async fn send(&self, request: HttpRequest) -> Result<Response<Incoming>, HttpError> {
        self.client.request(request).await.map_err(|error| {
            let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Interrupted };
            HttpError::new(kind, error)
        })
    }
}

#[async_trait]
impl HttpService for BucketHttp {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        match self.mode {
            ResponseMode::Buffered { timeout, bytes_max } => {
                let exchange = async {
                    let (head, body) = self.send(request).await?.into_parts();
                    // Read here, so that the timeout includes the body.
                    let body = Limited::new(body, bytes_max).collect().await;
                    let body =
                        body.map_err(|error| HttpError::new_boxed(HttpErrorKind::Interrupted, error))?;
                    let never = |error: std::convert::Infallible| match error {};
                    let body = HttpResponseBody::new(Full::new(body.to_bytes()).map_err(never));
                    Ok(HttpResponse::from_parts(head, body))
                };
                tokio::time::timeout(timeout, exchange).await.map_err(|_| timed_out())?
            }
            ResponseMode::Streamed { first_byte, stall } => {
                let response = tokio::time::timeout(first_byte, self.send(request)).await;
                let (head, body) = response.map_err(|_| timed_out())??.into_parts();
                let body = StallLimited { body, stall, timer: Box::pin(sleep(stall)) };
                Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
            }
        }
    }
}

fn timed_out() -> HttpError {
    HttpError::new(HttpErrorKind::Timeout, io::Error::from(io::ErrorKind::TimedOut))
}

/// Body that fails when no byte arrives for some time.
struct StallLimited {
    body: Incoming,
    stall: Duration,
    timer: Pin<Box<Sleep>>,
}

impl Body for StallLimited {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            let deadline = Instant::now() + self.stall;
            self.timer.as_mut().reset(deadline);
            let interrupted = |error| HttpError::new(HttpErrorKind::Interrupted, error);
            return Poll::Ready(frame.map(|frame| frame.map_err(interrupted)));
        }
        self.timer.as_mut().poll(cx).map(|()| Some(Err(timed_out())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
