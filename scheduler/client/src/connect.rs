//! Connections to hubs: TCP, and mutual TLS where the URL of the hub says `https`.
//!
//! The name in the certificate of a hub is verified, not the DNS name: a name service cannot direct a process to another
//! hub. Renewed certificates are used for new connections, and a revoked hub loses its open ones.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::Scheme;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use identity::client::ClientStream;
use identity::verify::ExpectedPeer;
use identity::{TlsClient, Transport};
use regions::HostPort;
use regions::spiffe::Role;
use resolver::Resolver;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tower_service::Service;

use crate::operator_token::OperatorToken;

/// Timeout of a TCP connect and of a handshake, with a hub; with its authority, of both together.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Offered protocols. With HTTP/2 the requests to a hub share one connection, also those that wait for a change.
const PROTOCOLS: &[&[u8]] = &[HTTP2, b"http/1.1"];
const HTTP2: &[u8] = b"h2";
/// Peer that a client expects.
const HUB: ExpectedPeer = ExpectedPeer { role: Role::Hub, region: None };

/// Connector to hubs.
#[derive(Clone)]
pub(crate) struct HubConnector {
    resolver: Resolver,
    tls: Option<HubTls>,
}

/// TLS with hubs.
#[derive(Clone)]
enum HubTls {
    /// With the certificate of this process.
    Mutual(Arc<TlsClient>),
    /// Without a certificate: requests have a token.
    Token(OperatorToken),
}

impl HubConnector {
    pub(crate) fn new(transport: &Transport, resolver: Resolver) -> Result<HubConnector, rustls::Error> {
        let tls =
            transport.identity().map(|identity| TlsClient::new(identity.clone(), PROTOCOLS)).transpose()?;
        Ok(HubConnector { resolver, tls: tls.map(|tls| HubTls::Mutual(Arc::new(tls))) })
    }

    pub(crate) fn with_token(token: &OperatorToken, resolver: Resolver) -> HubConnector {
        HubConnector { resolver, tls: Some(HubTls::Token(token.clone())) }
    }
}

impl Service<Uri> for HubConnector {
    type Response = TokioIo<HubStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<HubStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, hub: Uri) -> Self::Future {
        let HubConnector { resolver, tls } = self.clone();
        Box::pin(async move {
            let is_tls = hub.scheme() == Some(&Scheme::HTTPS);
            let endpoint = endpoint(&hub, is_tls)?;
            let connected = resolver.connect(&endpoint, CONNECT_TIMEOUT, |_| true).await;
            let tcp = connected.map_err(io::Error::other)?;
            if !is_tls {
                return Ok(TokioIo::new(HubStream::Plaintext(tcp)));
            }
            let Some(tls) = tls else {
                return Err(io::Error::other(
                    "the hub uses TLS, and this process has no identity; configure [identity]",
                ));
            };
            // Connections are kept open, so handshakes are rare, and none resumes a session.
            let stream = match tls {
                HubTls::Mutual(tls) => {
                    let connected = timeout(CONNECT_TIMEOUT, tls.connect(HUB, tcp)).await??;
                    HubStream::Tls(Box::new(connected.stream))
                }
                HubTls::Token(token) => {
                    let connected = timeout(CONNECT_TIMEOUT, token.connect(tcp)).await??;
                    HubStream::WithToken(Box::new(connected))
                }
            };
            Ok(TokioIo::new(stream))
        })
    }
}

/// Returns the host and port of a URL.
fn endpoint(hub: &Uri, is_tls: bool) -> io::Result<HostPort> {
    let port = hub.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let endpoint = format!("{}:{port}", hub.host().unwrap_or_default());
    endpoint.parse().map_err(io::Error::other)
}

/// Connection to a hub.
#[derive(Debug)]
pub(crate) enum HubStream {
    Plaintext(TcpStream),
    Tls(Box<ClientStream>),
    WithToken(Box<TlsStream<TcpStream>>),
}

impl Connection for HubStream {
    fn connected(&self) -> Connected {
        let protocol = match self {
            HubStream::Plaintext(_) => None,
            HubStream::Tls(stream) => stream.get_ref().get_ref().1.alpn_protocol(),
            HubStream::WithToken(stream) => stream.get_ref().1.alpn_protocol(),
        };
        if protocol == Some(HTTP2) { Connected::new().negotiated_h2() } else { Connected::new() }
    }
}

impl AsyncRead for HubStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_read(cx, into),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, into),
            HubStream::WithToken(stream) => Pin::new(stream.as_mut()).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for HubStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_write(cx, bytes),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
            HubStream::WithToken(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_flush(cx),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            HubStream::WithToken(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_shutdown(cx),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            HubStream::WithToken(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}
