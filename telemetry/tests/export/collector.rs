//! Collector of tests: accepts exports over each protocol, with and without TLS.

use bytes::Bytes;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Received export.
#[derive(Clone)]
pub(super) struct Export {
    /// Path of the URL, or of the method.
    pub(super) path: String,
    /// Header `api-key`.
    pub(super) key: String,
    /// Header `content-encoding`, by HTTP.
    pub(super) encoding: String,
    /// Message.
    pub(super) body: Vec<u8>,
}

/// State of a collector; clones share it.
#[derive(Clone, Default)]
struct State {
    exports: Arc<Mutex<Vec<Export>>>,
    /// Body of the next responses by HTTP.
    response: Arc<Mutex<Vec<u8>>>,
    /// Length of a message above which it is rejected, unless it is 0.
    bytes_max: Arc<AtomicUsize>,
    /// Whether it does not respond to what it receives.
    is_silent: Arc<AtomicBool>,
}

impl State {
    fn is_rejected(&self, body: &[u8]) -> bool {
        let max = self.bytes_max.load(Ordering::Relaxed);
        max > 0 && body.len() > max
    }
}

/// Collector that accepts connections with or without TLS.
pub(super) struct TestCollector {
    pub(super) address: SocketAddr,
    state: State,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for TestCollector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl TestCollector {
    pub(super) async fn start(is_grpc: bool, tls: Option<TlsAcceptor>) -> TestCollector {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        TestCollector::serve(listener, is_grpc, tls)
    }

    /// Serves on this listener.
    pub(super) fn serve(listener: TcpListener, is_grpc: bool, tls: Option<TlsAcceptor>) -> TestCollector {
        let address = listener.local_addr().unwrap();
        let state = State::default();
        let shared = state.clone();
        let server = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (state, tls) = (shared.clone(), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        Some(tls) => serve(is_grpc, tls.accept(stream).await.unwrap(), state).await,
                        None => serve(is_grpc, stream, state).await,
                    }
                });
            }
        });
        TestCollector { address, state, server }
    }

    /// Returns what it has received.
    pub(super) fn exports(&self) -> Vec<Export> {
        self.state.exports.lock().unwrap().clone()
    }

    /// Sets the body of the next responses by HTTP.
    pub(super) fn respond_with(&self, body: Vec<u8>) {
        *self.state.response.lock().unwrap() = body;
    }

    /// Rejects longer messages than this one.
    pub(super) fn limit(&self, bytes_max: usize) {
        self.state.bytes_max.store(bytes_max, Ordering::Relaxed);
    }

    /// Sets whether it does not respond to the next messages.
    pub(super) fn set_silent(&self, is_silent: bool) {
        self.state.is_silent.store(is_silent, Ordering::Relaxed);
    }
}

async fn serve(is_grpc: bool, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, state: State) {
    if is_grpc { serve_grpc(stream, state).await } else { serve_http(stream, state).await }
}

/// Serves the methods `Export` of the services of OTLP.
async fn serve_grpc(stream: impl AsyncRead + AsyncWrite + Unpin, state: State) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let state = state.clone();
        // Driven together: the body arrives while the connection is polled.
        tokio::spawn(async move {
            let path = request.uri().path().to_owned();
            let key = request.headers().get("api-key").map(|key| key.to_str().unwrap().to_owned());
            let (mut body, mut message) = (request.into_body(), Vec::new());
            while let Some(Ok(part)) = body.data().await {
                body.flow_control().release_capacity(part.len()).unwrap();
                message.extend_from_slice(&part);
            }
            assert_eq!(message[0], 0, "not compressed");
            let body = message.split_off(5);
            let (key, encoding) = (key.unwrap_or_default(), String::new());
            let is_rejected = state.is_rejected(&body);
            let is_silent = state.is_silent.load(Ordering::Relaxed);
            state.exports.lock().unwrap().push(Export { path, key, encoding, body });
            if is_silent {
                return std::future::pending().await;
            }
            let head = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            let mut stream = respond.send_response(head, false).unwrap();
            if !is_rejected {
                stream.send_data(Bytes::from_static(&[0; 5]), false).unwrap();
            }
            // Resource exhausted, or success.
            let status = if is_rejected { "8" } else { "0" };
            let trailers = [("grpc-status", status)].map(|(name, value)| {
                (http::HeaderName::from_static(name), http::HeaderValue::from_static(value))
            });
            stream.send_trailers(trailers.into_iter().collect()).unwrap();
        });
    }
}

/// Serves exports by HTTP.
async fn serve_http(mut stream: impl AsyncRead + AsyncWrite + Unpin, state: State) {
    let mut bytes = Vec::new();
    loop {
        let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") else {
            if stream.read_buf(&mut bytes).await.unwrap() == 0 {
                return;
            }
            continue;
        };
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let line = head.lines().next().unwrap();
        let path = line.strip_prefix("POST ").and_then(|line| line.strip_suffix(" HTTP/1.1")).unwrap();
        let header = |name: &str| {
            let line = head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
            line.unwrap_or_default().to_owned()
        };
        assert_eq!(header("content-type"), "application/x-protobuf");
        let length: usize = header("content-length").parse().unwrap();
        while bytes.len() < end + 4 + length {
            stream.read_buf(&mut bytes).await.unwrap();
        }
        let body = bytes[end + 4..end + 4 + length].to_vec();
        let (path, key, encoding) = (path.to_owned(), header("api-key"), header("content-encoding"));
        let status = if state.is_rejected(&body) { "413 Content Too Large" } else { "200 OK" };
        let is_silent = state.is_silent.load(Ordering::Relaxed);
        state.exports.lock().unwrap().push(Export { path, key, encoding, body });
        bytes.drain(..end + 4 + length);
        if is_silent {
            continue;
        }
        let body = state.response.lock().unwrap().clone();
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
    }
}
