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
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use identity::client::ClientStream;
use identity::verify::ExpectedPeer;
use identity::{TlsClient, Transport};
use regions::spiffe::Role;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower_service::Service;

/// Timeout of a TCP connect and of a handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Offered protocols.
const PROTOCOLS: &[&[u8]] = &[b"http/1.1"];
/// Peer that a client expects.
const HUB: ExpectedPeer = ExpectedPeer { role: Role::Hub, region: None };

/// Connector to hubs.
#[derive(Clone, Debug)]
pub(crate) struct HubConnector {
    tcp: HttpConnector,
    tls: Option<Arc<TlsClient>>,
}

impl HubConnector {
    pub(crate) fn new(transport: &Transport) -> Result<HubConnector, rustls::Error> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let tls =
            transport.identity().map(|identity| TlsClient::new(identity.clone(), PROTOCOLS)).transpose()?;
        Ok(HubConnector { tcp, tls: tls.map(Arc::new) })
    }
}

impl Service<Uri> for HubConnector {
    type Response = TokioIo<HubStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<HubStream>>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.tcp.poll_ready(cx).map_err(io::Error::other)
    }

    fn call(&mut self, hub: Uri) -> Self::Future {
        let (is_tls, tls) = (hub.scheme() == Some(&Scheme::HTTPS), self.tls.clone());
        let tcp = self.tcp.call(hub);
        Box::pin(async move {
            let tcp = tcp.await.map_err(io::Error::other)?.into_inner();
            if !is_tls {
                return Ok(TokioIo::new(HubStream::Plaintext(tcp)));
            }
            let Some(tls) = tls else {
                return Err(io::Error::other(
                    "the hub uses TLS, and this process has no identity; configure [identity]",
                ));
            };
            // Connections are kept open, so handshakes are rare, and none resumes a session.
            let connected = timeout(CONNECT_TIMEOUT, tls.connect(HUB, tcp)).await??;
            Ok(TokioIo::new(HubStream::Tls(Box::new(connected.stream))))
        })
    }
}

/// Connection to a hub.
#[derive(Debug)]
pub(crate) enum HubStream {
    Plaintext(TcpStream),
    Tls(Box<ClientStream>),
}

impl Connection for HubStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for HubStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_read(cx, into),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for HubStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_write(cx, bytes),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_flush(cx),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HubStream::Plaintext(stream) => Pin::new(stream).poll_shutdown(cx),
            HubStream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}
