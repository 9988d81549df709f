//! Collector of traces, logs and metrics: receives exports by HTTP and decodes them with the published protobuf definitions.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::TcpListener;

/// Running collector.
pub(super) struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Received>>,
    server: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Received {
    spans: Vec<ReceivedSpan>,
    logs: Vec<ReceivedLog>,
    metrics: Vec<ReceivedMetric>,
    bytes: Vec<u8>,
}

/// Received span, with its identifiers in hexadecimal digits.
#[derive(Clone, Debug)]
pub(super) struct ReceivedSpan {
    pub(super) service: String,
    /// Region of the process.
    pub(super) process_region: String,
    pub(super) trace: String,
    pub(super) id: String,
    /// Empty for a root.
    pub(super) parent: String,
    pub(super) name: String,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) is_error: bool,
    /// Trace and span of each link.
    pub(super) links: Vec<(String, String)>,
    attributes: BTreeMap<String, String>,
}

/// Received event of a log.
#[derive(Clone, Debug)]
pub(super) struct ReceivedLog {
    pub(super) service: String,
    pub(super) scope: String,
    pub(super) severity: String,
    pub(super) body: String,
    /// Empty without one.
    pub(super) trace: String,
    pub(super) span: String,
    pub(super) attributes: BTreeMap<String, String>,
}

/// Received sample of a counter or a gauge.
#[derive(Clone, Debug)]
pub(super) struct ReceivedMetric {
    pub(super) service: String,
    pub(super) name: String,
    pub(super) value: f64,
    pub(super) attributes: BTreeMap<String, String>,
}

impl ReceivedSpan {
    /// Returns an attribute as text; empty if absent.
    pub(super) fn text(&self, name: &str) -> &str {
        self.attributes.get(name).map(String::as_str).unwrap_or_default()
    }
}

impl Collector {
    pub(super) async fn start() -> Collector {
        let received: Arc<Mutex<Received>> = Arc::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let router = Router::new().route("/v1/traces", post(receive)).route("/v1/logs", post(receive_logs));
        let router = router.route("/v1/metrics", post(receive_metrics));
        let router = router.with_state(received.clone());
        let server = tokio::spawn(async move { axum::serve(listener, router).await.expect("it serves") });
        Collector { address, received, server }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns all spans.
    pub(super) fn spans(&self) -> Vec<ReceivedSpan> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).spans.clone()
    }

    /// Returns all events of logs.
    pub(super) fn logs(&self) -> Vec<ReceivedLog> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).logs.clone()
    }

    /// Returns all samples of counters and gauges.
    pub(super) fn metrics(&self) -> Vec<ReceivedMetric> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).metrics.clone()
    }

    /// Returns the spans of a trace in the order in which they began.
    pub(super) fn trace(&self, trace: &str) -> Vec<ReceivedSpan> {
        let mut spans: Vec<_> = self.spans().into_iter().filter(|span| span.trace == trace).collect();
        spans.sort_by_key(|span| span.start);
        spans
    }

    /// Returns the bodies of all exports.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).bytes.clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn receive(State(received): State<Arc<Mutex<Received>>>, body: Bytes) -> Vec<u8> {
    let export = ExportTraceServiceRequest::decode(body.clone()).expect("an export");
    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
    received.bytes.extend_from_slice(&body);
    for resource in export.resource_spans {
        let process = attributes(resource.resource.map(|resource| resource.attributes).unwrap_or_default());
        let service = process.get("service.name").cloned().unwrap_or_default();
        let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        let region = process.get("cloud.region").cloned().unwrap_or_default();
        received.spans.extend(spans.map(|span| read((&service, &region), span)));
    }
    ExportTraceServiceResponse::default().encode_to_vec()
}

async fn receive_logs(State(received): State<Arc<Mutex<Received>>>, body: Bytes) -> Vec<u8> {
    let export = ExportLogsServiceRequest::decode(body.clone()).expect("an export");
    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
    received.bytes.extend_from_slice(&body);
    for resource in export.resource_logs {
        let process = attributes(resource.resource.map(|resource| resource.attributes).unwrap_or_default());
        let service = process.get("service.name").cloned().unwrap_or_default();
        for scope in resource.scope_logs {
            let name = scope.scope.map(|scope| scope.name).unwrap_or_default();
            received.logs.extend(scope.log_records.into_iter().map(|record| ReceivedLog {
                service: service.clone(),
                scope: name.clone(),
                severity: record.severity_text,
                body: record.body.and_then(|body| body.value).map(text).unwrap_or_default(),
                trace: hexadecimal(&record.trace_id),
                span: hexadecimal(&record.span_id),
                attributes: attributes(record.attributes),
            }));
        }
    }
    ExportLogsServiceResponse::default().encode_to_vec()
}

async fn receive_metrics(State(received): State<Arc<Mutex<Received>>>, body: Bytes) -> Vec<u8> {
    let export = ExportMetricsServiceRequest::decode(body.clone()).expect("an export");
    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
    received.bytes.extend_from_slice(&body);
    for resource in export.resource_metrics {
        let process = attributes(resource.resource.map(|resource| resource.attributes).unwrap_or_default());
        let service = process.get("service.name").cloned().unwrap_or_default();
        for metric in resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics) {
            let points = match metric.data {
                Some(Data::Sum(sum)) => sum.data_points,
                Some(Data::Gauge(gauge)) => gauge.data_points,
                _ => Vec::new(),
            };
            received.metrics.extend(points.into_iter().map(|point| ReceivedMetric {
                service: service.clone(),
                name: metric.name.clone(),
                value: match point.value {
                    Some(number_data_point::Value::AsInt(value)) => value as f64,
                    Some(number_data_point::Value::AsDouble(value)) => value,
                    None => panic!("{} has a sample without a value", metric.name),
                },
                attributes: attributes(point.attributes),
            }));
        }
    }
    ExportMetricsServiceResponse::default().encode_to_vec()
}

fn read((service, region): (&str, &str), span: Span) -> ReceivedSpan {
    assert!(span.trace_state.is_empty(), "the state is text of a client");
    ReceivedSpan {
        service: service.to_owned(),
        process_region: region.to_owned(),
        trace: hexadecimal(&span.trace_id),
        id: hexadecimal(&span.span_id),
        parent: hexadecimal(&span.parent_span_id),
        name: span.name,
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        is_error: span.status.is_some_and(|status| status.code == StatusCode::Error as i32),
        links: span
            .links
            .iter()
            .map(|link| (hexadecimal(&link.trace_id), hexadecimal(&link.span_id)))
            .collect(),
        attributes: attributes(span.attributes),
    }
}

fn attributes(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let value =
        |attribute: KeyValue| (attribute.key, attribute.value.and_then(|value| value.value).map(text));
    attributes.into_iter().map(value).map(|(name, value)| (name, value.unwrap_or_default())).collect()
}

fn text(value: Value) -> String {
    match value {
        Value::StringValue(text) => text,
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        Value::BoolValue(value) => value.to_string(),
        other => panic!("a value is text, a number or a truth value: {other:?}"),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the spans of a trace as a tree with bars of their times.
pub(super) fn waterfall(spans: &[ReceivedSpan]) -> String {
    let begin = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let end = spans.iter().map(|span| span.end).max().unwrap_or_default();
    let is_root = |span: &&ReceivedSpan| spans.iter().all(|other| other.id != span.parent);
    let mut text = String::new();
    for root in spans.iter().filter(is_root) {
        put(&mut text, spans, root, 0, (begin, end.max(begin + 1)));
    }
    text
}

fn put(
    text: &mut String,
    spans: &[ReceivedSpan],
    span: &ReceivedSpan,
    depth: usize,
    (begin, end): (u64, u64),
) {
    const COLUMNS: u64 = 50;
    let column = |time: u64| ((time - begin) * COLUMNS / (end - begin)) as usize;
    let (from, to) = (column(span.start), column(span.end).max(column(span.start) + 1));
    let label =
        format!("{}{} {}", "  ".repeat(depth), span.service.trim_start_matches("meridian-"), span.name);
    let bar = format!("{}{}", " ".repeat(from), "█".repeat(to - from));
    let millis = (span.end - span.start) as f64 / 1e6;
    let error = if span.is_error { span.text("error.type") } else { "" };
    let region = span.text("cloud.region");
    writeln!(text, "{label:44} {bar:51} {millis:9.3} ms {region} {error}").expect("text");
    for child in spans.iter().filter(|child| child.parent == span.id) {
        put(text, spans, child, depth + 1, (begin, end));
    }
}
