//! Export to collectors that accept spans over each protocol, that are gone, and that never respond.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

use bytes::Bytes;
use configuration::{ConfigFile, Files, section};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use telemetry::span::{Attribute, SpanName, SpanRecord};
use telemetry::tracer::{DropReason, QUEUED_SPANS_MAX, Tracer};
use telemetry::{TracingConfig, TracingSection};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

section! {
    /// File of a role.
    partial struct RoleFile {
        /// Traces.
        tracing: TracingSection;
    }
}

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(30);

fn config(keys: &str, dir: &Path) -> TracingConfig {
    let environment = BTreeMap::from([("COLLECTOR".to_owned(), "api-key=key-of-the-collector".to_owned())]);
    let files = Files { base: dir, environment: Some(&environment) };
    let text = format!("[tracing]\n{keys}\n");
    let read =
        ConfigFile::read(&text, |document| document.section::<RoleFile>()?.tracing?.read(document, &files));
    read.unwrap().expect("an endpoint")
}

fn span(tracer: &Tracer) -> Vec<SpanRecord> {
    let trace = tracer.begin([], Instant::now());
    let name = SpanName::Request { method: "POST", route: "/v1/embeddings" };
    vec![trace.request_span(name, Duration::from_millis(3)).with_text(Attribute::Tenant, Some("docs"))]
}

async fn wait_until(description: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Exports that a collector received, each with the key of its request.
type Exports = Arc<Mutex<Vec<(String, ExportTraceServiceRequest)>>>;

/// Collector that accepts connections with or without TLS.
struct TestCollector {
    address: SocketAddr,
    exports: Exports,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for TestCollector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl TestCollector {
    async fn start(is_grpc: bool, tls: Option<TlsAcceptor>) -> TestCollector {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let exports = Exports::default();
        let received = exports.clone();
        let server = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (received, tls) = (received.clone(), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        Some(tls) => serve(is_grpc, tls.accept(stream).await.unwrap(), received).await,
                        None => serve(is_grpc, stream, received).await,
                    }
                });
            }
        });
        TestCollector { address, exports, server }
    }
}

async fn serve(
    is_grpc: bool,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    received: Exports,
) {
    if is_grpc { serve_grpc(stream, received).await } else { serve_http(stream, received).await }
}

/// Serves the method `Export` of the service of OTLP.
async fn serve_grpc(stream: impl AsyncRead + AsyncWrite + Unpin, received: Exports) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let received = received.clone();
        // Driven together: the body arrives while the connection is polled.
        tokio::spawn(async move {
            let method = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
            assert_eq!(request.uri().path(), method);
            let key = request.headers()["api-key"].to_str().unwrap().to_owned();
            let (mut body, mut message) = (request.into_body(), Vec::new());
            while let Some(Ok(part)) = body.data().await {
                body.flow_control().release_capacity(part.len()).unwrap();
                message.extend_from_slice(&part);
            }
            assert_eq!(message[0], 0, "not compressed");
            received.lock().unwrap().push((key, ExportTraceServiceRequest::decode(&message[5..]).unwrap()));
            let head = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            let mut stream = respond.send_response(head, false).unwrap();
            stream.send_data(Bytes::from_static(&[0; 5]), false).unwrap();
            let trailers = [("grpc-status", "0")].map(|(name, value)| {
                (http::HeaderName::from_static(name), http::HeaderValue::from_static(value))
            });
            stream.send_trailers(trailers.into_iter().collect()).unwrap();
        });
    }
}

/// Serves `POST /v1/traces`.
async fn serve_http(mut stream: impl AsyncRead + AsyncWrite + Unpin, received: Exports) {
    let mut bytes = Vec::new();
    loop {
        let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") else {
            if stream.read_buf(&mut bytes).await.unwrap() == 0 {
                return;
            }
            continue;
        };
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        assert!(head.starts_with("POST /v1/traces HTTP/1.1"), "{head}");
        let header = |name: &str| {
            let line = head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
            line.unwrap_or_default().to_owned()
        };
        assert_eq!(header("content-type"), "application/x-protobuf");
        let length: usize = header("content-length").parse().unwrap();
        while bytes.len() < end + 4 + length {
            stream.read_buf(&mut bytes).await.unwrap();
        }
        let export = ExportTraceServiceRequest::decode(&bytes[end + 4..end + 4 + length]).unwrap();
        received.lock().unwrap().push((header("api-key"), export));
        bytes.drain(..end + 4 + length);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    }
}

/// Exports a span, and checks what the collector received.
async fn check_export(collector: &TestCollector, config: &TracingConfig) {
    let (tracer, export) = telemetry::start(config, "gateway", Some("aws/us-east-1")).unwrap();
    let spans = span(&tracer);
    let trace = spans[0].trace;
    tracer.export(spans);
    wait_until("the collector has accepted the span", || tracer.metrics().exported.get() == 1).await;
    tracer.export(span(&tracer));
    export.finish(TIMEOUT).await;
    let exports = collector.exports.lock().unwrap();
    assert_eq!(exports.len(), 2, "the last spans are exported at the end");
    let (key, export) = &exports[0];
    assert_eq!(key, "key-of-the-collector");
    let resource = &export.resource_spans[0];
    let attributes = format!("{:?}", resource.resource);
    for part in ["service.name", "meridian-gateway", "aws/us-east-1", "service.version"] {
        assert!(attributes.contains(part), "{part} in {attributes}");
    }
    let received = &resource.scope_spans[0].spans[0];
    assert_eq!(received.name, "POST /v1/embeddings");
    assert_eq!(received.trace_id, trace.get().to_be_bytes());
    assert_eq!(received.end_time_unix_nano - received.start_time_unix_nano, 3_000_000);
    assert!(format!("{:?}", received.attributes).contains("docs"));
}

#[tokio::test]
async fn spans_are_exported_over_both_protocols() {
    for (is_grpc, protocol) in [(true, "grpc"), (false, "http/protobuf")] {
        let collector = TestCollector::start(is_grpc, None).await;
        let keys = format!(
            "endpoint = \"http://{}\"\nprotocol = \"{protocol}\"\nheaders_env = \"COLLECTOR\"",
            collector.address
        );
        check_export(&collector, &config(&keys, Path::new("."))).await;
    }
}

/// Returns the acceptor of a collector at localhost, and its authority in PEM.
fn tls(protocol: &[u8]) -> (TlsAcceptor, String) {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let mut server = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into()))
        .unwrap();
    server.alpn_protocols = vec![protocol.to_vec()];
    (TlsAcceptor::from(Arc::new(server)), issuer.pem())
}

#[tokio::test]
async fn a_collector_with_tls_is_verified_with_the_configured_authority() {
    let dir = tempfile::tempdir().unwrap();
    for (is_grpc, protocol, alpn) in [(true, "grpc", &b"h2"[..]), (false, "http/protobuf", b"http/1.1")] {
        let (acceptor, authority) = tls(alpn);
        std::fs::write(dir.path().join("ca.pem"), authority).unwrap();
        let collector = TestCollector::start(is_grpc, Some(acceptor)).await;
        let keys = format!(
            "endpoint = \"https://localhost:{}\"\nprotocol = \"{protocol}\"\nheaders_env = \"COLLECTOR\"\nca = \"ca.pem\"",
            collector.address.port()
        );
        check_export(&collector, &config(&keys, dir.path())).await;
    }
}

#[tokio::test]
async fn a_collector_that_is_gone_loses_spans_and_counts_them() {
    for protocol in ["grpc", "http/protobuf"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let keys = format!("endpoint = \"http://{address}\"\nprotocol = \"{protocol}\"\ntimeout = \"200ms\"");
        let (tracer, export) = telemetry::start(&config(&keys, Path::new(".")), "gateway", None).unwrap();
        tracer.export(span(&tracer));
        let dropped = || tracer.metrics().dropped.of(DropReason::ExportFailed).get();
        wait_until("the span is dropped", || dropped() == 1).await;
        assert_eq!((tracer.metrics().queued, tracer.metrics().exported.get()), (0, 0));
        export.finish(TIMEOUT).await;
    }
}

#[tokio::test]
async fn a_collector_that_never_responds_delays_nothing_and_spans_beyond_the_limit_are_dropped() {
    // Accepts connections, because of its backlog, and reads nothing.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let keys = format!("endpoint = \"http://{}\"\ntimeout = \"60s\"", listener.local_addr().unwrap());
    let (tracer, export) = telemetry::start(&config(&keys, Path::new(".")), "gateway", None).unwrap();
    tracer.export(span(&tracer));
    wait_until("the first export has begun", || tracer.metrics().queued == 0).await;
    for _ in 0..QUEUED_SPANS_MAX + 7 {
        tracer.export(span(&tracer));
    }
    let metrics = tracer.metrics();
    assert_eq!((metrics.queued, metrics.dropped.of(DropReason::QueueFull).get()), (QUEUED_SPANS_MAX, 7));
    let begun = Instant::now();
    export.finish(Duration::from_millis(50)).await;
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "the end of the process does not wait for the collector"
    );
}
