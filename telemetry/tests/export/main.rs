//! Export to collectors that accept spans over each protocol, that are gone, and that never respond.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod captured;
mod collector;
mod logs;
mod metrics;

use captured::CapturedLog;
use collector::TestCollector;
use configuration::{ConfigFile, Files, section};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::config::ExportProtocol;
use telemetry::span::{Attribute, SpanName, SpanRecord};
use telemetry::tracer::{DropReason, QUEUED_SPANS_MAX, Tracer};
use telemetry::{Process, TracingConfig, TracingSection};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

section! {
    /// File of a role.
    partial struct RoleFile {
        /// Traces.
        tracing: TracingSection;
    }
}

/// Key of the collector. It has a percent sign, which `%25` in a value of a header stands for.
const KEY: &str = "key%41-of-the-collector";

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(30);

const PROCESS: Process<'_> = Process { role: "gateway", region: Some("aws/us-east-1") };

/// Returns the environment of a process, with the headers of exports.
fn environment() -> [(String, String); 1] {
    [("COLLECTOR".to_owned(), "api-key=key%2541-of-the-collector".to_owned())]
}

fn config(keys: &str, dir: &Path) -> TracingConfig {
    let environment = environment().into_iter().collect();
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

/// Exports a span, and checks what the collector received.
async fn check_export(collector: &TestCollector, config: &TracingConfig) {
    let path = match config.collector.protocol {
        ExportProtocol::Grpc => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
        ExportProtocol::Http => "/v1/traces",
    };
    let (tracer, export) = telemetry::start(config, PROCESS).unwrap();
    let spans = span(&tracer);
    let trace = spans[0].trace;
    tracer.export(spans);
    wait_until("the collector has accepted the span", || tracer.metrics().exported.get() == 1).await;
    tracer.export(span(&tracer));
    export.finish(TIMEOUT).await;
    let exports = collector.exports();
    assert_eq!(exports.len(), 2, "the last spans are exported at the end");
    assert_eq!((exports[0].path.as_str(), exports[0].key.as_str()), (path, KEY));
    let export = ExportTraceServiceRequest::decode(&exports[0].body[..]).unwrap();
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
        let (log, _capturing) = CapturedLog::start();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let keys = format!("endpoint = \"http://{address}\"\nprotocol = \"{protocol}\"\ntimeout = \"200ms\"");
        let (tracer, export) = telemetry::start(&config(&keys, Path::new(".")), PROCESS).unwrap();
        tracer.export(span(&tracer));
        let dropped = || tracer.metrics().dropped.of(DropReason::ExportFailed).get();
        wait_until("the span is dropped", || dropped() == 1).await;
        assert_eq!((tracer.metrics().queued, tracer.metrics().exported.get()), (0, 0));
        export.finish(TIMEOUT).await;
        let log = log.text();
        assert_eq!(log.matches("export of traces failed").count(), 1, "{log}");
        // By HTTP, the exporter returns only that there was a problem of the network.
        let has_cause = log.contains("cause=") && log.to_lowercase().contains("connection refused");
        assert!(has_cause || protocol == "grpc", "{log}");
    }
}

#[tokio::test]
async fn spans_that_a_collector_rejects_are_dropped_for_that_reason() {
    let (log, _capturing) = CapturedLog::start();
    let collector = TestCollector::start(false, None).await;
    let keys = format!("endpoint = \"http://{}\"", collector.address);
    let partial_success =
        Some(ExportTracePartialSuccess { rejected_spans: 2, error_message: "too\nlarge".to_owned() });
    collector.respond_with(ExportTraceServiceResponse { partial_success }.encode_to_vec());
    let (tracer, export) = telemetry::start(&config(&keys, Path::new(".")), PROCESS).unwrap();
    let counts = || {
        let metrics = tracer.metrics();
        [metrics.exported.get(), metrics.dropped.of(DropReason::Rejected).get()]
    };
    tracer.export((0..3).flat_map(|_| span(&tracer)).collect());
    wait_until("two spans are rejected", || counts() == [1, 2]).await;
    tracer.export((0..3).flat_map(|_| span(&tracer)).collect());
    wait_until("two more are", || counts() == [2, 4]).await;
    tracer.export(span(&tracer));
    wait_until("no more are rejected than were sent", || counts() == [2, 5]).await;
    collector.respond_with(Vec::new());
    tracer.export(span(&tracer));
    wait_until("the next span is accepted", || counts() == [3, 5]).await;
    assert_eq!(tracer.metrics().dropped.of(DropReason::ExportFailed).get(), 0);
    export.finish(TIMEOUT).await;
    let log = log.text();
    assert_eq!(log.matches("collector rejected spans").count(), 1, "{log}");
    assert!(log.contains("too large"), "{log}");
}

#[tokio::test]
async fn a_collector_that_never_responds_delays_nothing_and_spans_beyond_the_limit_are_dropped() {
    // Accepts connections, because of its backlog, and reads nothing.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let keys = format!("endpoint = \"http://{}\"\ntimeout = \"60s\"", listener.local_addr().unwrap());
    let (tracer, export) = telemetry::start(&config(&keys, Path::new(".")), PROCESS).unwrap();
    tracer.export(span(&tracer));
    wait_until("the first export has begun", || tracer.metrics().queued == 0).await;
    let request = || (0..8).flat_map(|_| span(&tracer)).collect();
    for _ in 0..QUEUED_SPANS_MAX / 8 + 7 {
        tracer.export(request());
    }
    let metrics = tracer.metrics();
    assert_eq!((metrics.queued, metrics.dropped.of(DropReason::QueueFull).get()), (QUEUED_SPANS_MAX, 7 * 8));
    let begun = Instant::now();
    export.finish(Duration::from_millis(50)).await;
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "the end of the process does not wait for the collector"
    );
}
