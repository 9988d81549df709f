//! Export of the log.

use crate::captured::CapturedLog;
use crate::collector::TestCollector;
use crate::{KEY, TIMEOUT, environment, wait_until};
use configuration::{ConfigFile, Files, section};
use opentelemetry_proto::tonic::collector::logs::v1::{
    ExportLogsPartialSuccess, ExportLogsServiceRequest, ExportLogsServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use prost::Message;
use std::path::Path;
use std::time::{Duration, Instant};
use telemetry::logs::{LogExport, LogLayer, QUEUED_BYTES_MAX};
use telemetry::tracer::DropReason;
use telemetry::{LogMetrics, LogsConfig, LogsSection, Process};
use tokio::net::TcpListener;
use tracing::Dispatch;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry;

section! {
    /// File of a role.
    partial struct RoleFile {
        /// Logs.
        logs: LogsSection;
    }
}

fn config(keys: &str, variable: Option<(&str, &str)>) -> LogsConfig {
    let variable = variable.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let environment = environment().into_iter().chain(variable).collect();
    let files = Files { base: Path::new("."), environment: Some(&environment) };
    let text = format!("[logs]\n{keys}\n");
    let read =
        ConfigFile::read(&text, |document| document.section::<RoleFile>()?.logs?.read(document, &files));
    read.unwrap().expect("an endpoint")
}

/// Starts an export, and returns the subscriber whose events it exports.
fn start(keys: &str) -> (Dispatch, LogExport) {
    let process = Process { role: "hub", region: None };
    let (layer, export): (LogLayer, _) = telemetry::logs::start(&config(keys, None), process).unwrap();
    (Dispatch::new(registry().with(layer)), export)
}

/// Ends the export, which blocks.
async fn finish(export: LogExport) {
    tokio::task::spawn_blocking(move || drop(export)).await.unwrap();
}

/// Returns all received records, each with the name of its scope.
fn records(collector: &TestCollector) -> Vec<(String, LogRecord)> {
    let decode = |body: Vec<u8>| ExportLogsServiceRequest::decode(&body[..]).unwrap();
    let resources = collector.exports().into_iter().flat_map(|export| decode(export.body).resource_logs);
    let scopes = resources.flat_map(|resource| resource.scope_logs);
    let records = scopes.flat_map(|scope| {
        let name = scope.scope.unwrap_or_default().name;
        scope.log_records.into_iter().map(move |record| (name.clone(), record))
    });
    records.collect()
}

fn body(record: &LogRecord) -> String {
    match record.body.clone().and_then(|body| body.value) {
        Some(Value::StringValue(text)) => text,
        other => panic!("the body is text: {other:?}"),
    }
}

#[tokio::test]
async fn events_are_exported_over_both_protocols() {
    for (is_grpc, protocol, path) in [
        (true, "grpc", "/opentelemetry.proto.collector.logs.v1.LogsService/Export"),
        (false, "http/protobuf", "/v1/logs"),
    ] {
        let collector = TestCollector::start(is_grpc, None).await;
        let (subscriber, export) = start(&format!(
            "endpoint = \"http://{}\"\nprotocol = \"{protocol}\"\nheaders_env = \"COLLECTOR\"",
            collector.address
        ));
        tracing::dispatcher::with_default(&subscriber, || {
            let (trace_id, span_id) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
            tracing::warn!(target: "scheduler::hub", region = "aws/us-east-1", beats = 3, "lease ended");
            tracing::info!(target: "access", id = "r-1", trace_id, span_id, status = 200);
        });
        // The last events are exported at the end.
        finish(export).await;
        let export = collector.exports().remove(0);
        assert_eq!((export.path.as_str(), export.key.as_str()), (path, KEY));
        let resource = format!("{:?}", ExportLogsServiceRequest::decode(&export.body[..]).unwrap());
        for part in ["service.name", "meridian-hub", "service.instance.id"] {
            assert!(resource.contains(part), "{part} in {resource}");
        }
        let mut records = records(&collector);
        records.sort_by_key(|(_, record)| record.time_unix_nano);
        let [(scope, warning), (access, request)] = records.as_slice() else { panic!("{records:?}") };
        assert_eq!((scope.as_str(), access.as_str()), ("scheduler::hub", "access"));
        assert_eq!((body(warning).as_str(), body(request).as_str()), ("lease ended", "access"));
        assert_eq!((warning.severity_number, warning.severity_text.as_str()), (13, "WARN"));
        assert_eq!((request.severity_number, request.severity_text.as_str()), (9, "INFO"));
        let attributes = format!("{:?}", warning.attributes);
        assert!(attributes.contains("region") && attributes.contains("aws/us-east-1"), "{attributes}");
        assert!(warning.trace_id.is_empty(), "it belongs to no request");
        let hexadecimal = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hexadecimal(&request.trace_id), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(hexadecimal(&request.span_id), "b7ad6b7169203331");
        assert!(!format!("{:?}", request.attributes).contains("trace_id"));
    }
}

/// Runs a test in a process of its own, whose subscriber is that of all threads. Returns `false` in that process.
fn has_run_alone(name: &str) -> bool {
    const ALONE: &str = "MERIDIAN_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return false;
    }
    let mut run = std::process::Command::new(std::env::current_exe().unwrap());
    let run = run.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let output = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && output.contains("1 passed"), "{output}");
    true
}

#[tokio::test]
async fn exports_are_compressed_if_the_variable_says_so() {
    for (value, encoding) in [("gzip", "gzip"), ("none", "")] {
        let collector = TestCollector::start(false, None).await;
        let keys = format!("endpoint = \"http://{}\"", collector.address);
        let config = config(&keys, Some(("OTEL_EXPORTER_OTLP_COMPRESSION", value)));
        let process = Process { role: "hub", region: None };
        let (layer, export) = telemetry::logs::start(&config, process).unwrap();
        let subscriber = Dispatch::new(registry().with(layer));
        tracing::dispatcher::with_default(&subscriber, || tracing::info!("event"));
        finish(export).await;
        assert_eq!(collector.exports().remove(0).encoding, encoding);
    }
}

#[test]
fn events_that_a_collector_rejects_and_failures_are_logged_with_their_cause() {
    // The log of the thread that exports is captured.
    if has_run_alone("logs::events_that_a_collector_rejects_and_failures_are_logged_with_their_cause") {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let collector = runtime.block_on(TestCollector::start(false, None));
    let partial_success =
        Some(ExportLogsPartialSuccess { rejected_log_records: 1, error_message: "too\nlarge".to_owned() });
    collector.respond_with(ExportLogsServiceResponse { partial_success }.encode_to_vec());
    let keys = format!("endpoint = \"http://{}\"\ntimeout = \"200ms\"", collector.address);
    let process = Process { role: "hub", region: None };
    let (layer, export) = telemetry::logs::start(&config(&keys, None), process).unwrap();
    let log = CapturedLog::default();
    let subscriber = registry().with(log.clone().layer()).with(layer);
    tracing::dispatcher::set_global_default(Dispatch::new(subscriber)).expect("the only test that sets one");
    runtime.block_on(async {
        for number in 1..=2 {
            tracing::info!("rejected");
            wait_until("the event is exported", || collector.exports().len() == number).await;
        }
        wait_until("the rejection is logged", || log.text().contains("collector rejected events")).await;
        // Its connections are closed with its runtime.
        drop(collector);
    });
    runtime.shutdown_timeout(TIMEOUT);
    tracing::info!("lost");
    drop(export);
    let log = log.text();
    assert_eq!(log.matches("collector rejected events of the log").count(), 1, "{log}");
    assert!(log.contains("too large"), "{log}");
    assert_eq!(log.matches("export of logs failed").count(), 1, "{log}");
    assert!(log.contains("cause="), "{log}");
    let metrics = LogMetrics::read().expect("the log is exported");
    let counted = |reason| metrics.dropped.of(reason).get();
    assert_eq!([DropReason::Rejected, DropReason::ExportFailed].map(counted), [2, 1]);
    assert_eq!(metrics.exported.get(), 0);
}

#[test]
fn an_export_causes_no_other_and_a_collector_that_returns_gets_the_events_since() {
    // Events of the clients of other tests would reach its subscriber.
    if has_run_alone("logs::an_export_causes_no_other_and_a_collector_that_returns_gets_the_events_since") {
        return;
    }
    // The subscriber is that of all threads, as in a process, and has all levels: events of the exporter reach the layer.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let (subscriber, export) = start(&format!("endpoint = \"http://{address}\"\ntimeout = \"200ms\""));
    tracing::dispatcher::set_global_default(subscriber).expect("the only test that sets one");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    tracing::info!(target: "test", "lost");
    // An export has failed by then, and its warning was logged.
    std::thread::sleep(Duration::from_millis(2500));
    runtime.block_on(async {
        let collector = TestCollector::serve(TcpListener::bind(address).await.unwrap(), false, None);
        tracing::info!(target: "test", "kept");
        wait_until("the event is exported", || !collector.exports().is_empty()).await;
        // Recovered, and idle: were the events of an export exported, exports would not end.
        tokio::time::sleep(Duration::from_millis(2500)).await;
        finish(export).await;
        let records = records(&collector);
        let of_test: Vec<_> =
            records.iter().filter(|(scope, _)| scope == "test").map(|(_, record)| body(record)).collect();
        assert_eq!(of_test, ["kept"]);
        let of_exporter = |(scope, _): &&(String, LogRecord)| {
            ["telemetry", "hyper", "tonic", "h2", "opentelemetry"].iter().any(|name| scope.starts_with(name))
        };
        let found: Vec<_> = records.iter().filter(of_exporter).collect();
        assert!(found.is_empty(), "{found:?}");
    });
}

#[tokio::test]
async fn a_collector_that_never_responds_delays_neither_events_nor_the_end_of_the_process() {
    // Accepts connections, because of its backlog, and reads nothing.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (subscriber, export) = start(&format!("endpoint = \"http://{address}\"\ntimeout = \"60s\""));
    let begun = Instant::now();
    tracing::dispatcher::with_default(&subscriber, || {
        let text = "x".repeat(4 << 10);
        for _ in 0..2 * QUEUED_BYTES_MAX / text.len() {
            tracing::info!(text, "large");
        }
    });
    assert!(begun.elapsed() < TIMEOUT, "an event waits for no export");
    let begun = Instant::now();
    finish(export).await;
    assert!(begun.elapsed() < TIMEOUT, "nor does the end of the process");
}
