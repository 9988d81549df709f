//! Export of metrics.

use crate::captured::CapturedLog;
use crate::collector::TestCollector;
use crate::{KEY, PROCESS, TIMEOUT, environment, wait_until};
use ::metrics::{ByName, Counter, MetricsSnapshot, metric_set};
use configuration::{ConfigFile, Files, section};
use flate2::read::GzDecoder;
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use prost::Message;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::{MetricsConfig, MetricsExport, MetricsSection};
use tokio::net::TcpListener;

section! {
    /// File of a role.
    partial struct RoleFile {
        /// Metrics.
        metrics: MetricsSection;
    }
}

metric_set! {
    /// Metrics under test.
    #[derive(Default)]
    struct TestMetrics {
        /// Requests.
        requests: Counter = "meridian_{role}_requests_total",
    }
}

metric_set! {
    /// Metrics that need two messages, of which the first is long.
    struct ManyMetrics {
        /// Many.
        many: ByName<u64> = "many" ["name"],
        /// The last one.
        last: Counter = "last_total",
    }
}

fn config(keys: &str, variable: Option<(&str, &str)>) -> MetricsConfig {
    let variable = variable.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let environment = environment().into_iter().chain(variable).collect();
    let files = Files { base: Path::new("."), environment: Some(&environment) };
    let text = format!("[metrics]\n{keys}\n");
    let read =
        ConfigFile::read(&text, |document| document.section::<RoleFile>()?.metrics?.read(document, &files));
    // Shorter than a file may have it.
    MetricsConfig { interval: Duration::from_millis(50), ..read.unwrap().expect("an endpoint") }
}

/// Starts an export, and returns the metrics that it exports.
fn start(config: &MetricsConfig) -> (Arc<TestMetrics>, MetricsExport) {
    let metrics = Arc::<TestMetrics>::default();
    let exported = metrics.clone();
    let export =
        telemetry::metrics::start(config, PROCESS, move || MetricsSnapshot::of("gateway", &*exported));
    (metrics, export.unwrap())
}

/// Returns the exported number of requests.
fn requests(body: &[u8]) -> i64 {
    let export = ExportMetricsServiceRequest::decode(body).unwrap();
    let metric = &export.resource_metrics[0].scope_metrics[0].metrics[0];
    assert_eq!(metric.name, "meridian_gateway_requests_total");
    let Some(Data::Sum(sum)) = &metric.data else { panic!("{metric:?}") };
    let point = &sum.data_points[0];
    assert!(point.start_time_unix_nano > 0 && point.start_time_unix_nano <= point.time_unix_nano);
    let Some(Value::AsInt(value)) = point.value else { panic!("{point:?}") };
    value
}

#[tokio::test]
async fn metrics_are_exported_over_both_protocols_and_at_the_end() {
    for (is_grpc, protocol, path) in [
        (true, "grpc", "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"),
        (false, "http/protobuf", "/v1/metrics"),
    ] {
        let collector = TestCollector::start(is_grpc, None).await;
        let config = config(
            &format!(
                "endpoint = \"http://{}\"\nprotocol = \"{protocol}\"\nheaders_env = \"COLLECTOR\"",
                collector.address
            ),
            None,
        );
        let (metrics, export) = start(&config);
        metrics.requests.add(3);
        wait_until("the collector has accepted two exports", || export.metrics().exported.get() >= 2).await;
        let received = collector.exports().remove(1);
        assert_eq!((received.path.as_str(), received.key.as_str()), (path, KEY));
        assert_eq!(requests(&received.body), 3);
        let resource = ExportMetricsServiceRequest::decode(&received.body[..]).unwrap();
        let resource = format!("{:?}", resource.resource_metrics[0].resource);
        for part in ["service.name", "meridian-gateway", "aws/us-east-1", "service.instance.id"] {
            assert!(resource.contains(part), "{part} in {resource}");
        }
        assert_eq!(export.metrics().failed.get(), 0);
        metrics.requests.add(4);
        export.finish().await;
        let last = collector.exports().pop().unwrap();
        assert_eq!(requests(&last.body), 7, "the last values are exported at the end");
    }
}

#[tokio::test]
async fn an_export_is_compressed_if_that_is_configured() {
    let collector = TestCollector::start(false, None).await;
    let keys = format!("endpoint = \"http://{}\"", collector.address);
    let (metrics, export) = start(&config(&keys, Some(("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"))));
    metrics.requests.add(5);
    export.finish().await;
    let received = collector.exports().pop().unwrap();
    assert_eq!(received.encoding, "gzip");
    let mut body = Vec::new();
    GzDecoder::new(&received.body[..]).read_to_end(&mut body).unwrap();
    assert_eq!(requests(&body), 5);
}

#[tokio::test]
async fn a_collector_that_returns_gets_the_current_values_and_an_outage_is_logged_once() {
    for protocol in ["grpc", "http/protobuf"] {
        let (log, _capturing) = CapturedLog::start();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let keys = format!("endpoint = \"http://{address}\"\nprotocol = \"{protocol}\"");
        let (metrics, export) = start(&config(&keys, None));
        metrics.requests.add(1);
        wait_until("exports fail", || export.metrics().failed.get() >= 3).await;
        assert_eq!(log.text().matches("export of metrics failed").count(), 1, "{}", log.text());
        assert_eq!(export.metrics().exported.get(), 0);
        metrics.requests.add(1);
        let is_grpc = protocol == "grpc";
        let collector = TestCollector::serve(TcpListener::bind(address).await.unwrap(), is_grpc, None);
        wait_until("an export is accepted", || export.metrics().exported.get() >= 1).await;
        assert_eq!(requests(&collector.exports()[0].body), 2, "nothing is missing");
        assert_eq!(log.text().matches("export of metrics recovered").count(), 1, "{}", log.text());
        export.finish().await;
    }
}

#[tokio::test]
async fn a_partial_rejection_is_counted_as_a_failure_with_its_reason() {
    let (log, _capturing) = CapturedLog::start();
    let collector = TestCollector::start(false, None).await;
    let partial_success =
        Some(ExportMetricsPartialSuccess { rejected_data_points: 1, error_message: "too old".to_owned() });
    collector.respond_with(ExportMetricsServiceResponse { partial_success }.encode_to_vec());
    let (_metrics, export) = start(&config(&format!("endpoint = \"http://{}\"", collector.address), None));
    wait_until("exports are rejected", || export.metrics().failed.get() >= 2).await;
    assert_eq!(export.metrics().exported.get(), 0);
    assert_eq!(log.text().matches("collector rejected metrics").count(), 1, "{}", log.text());
    assert!(log.text().contains("too old"), "{}", log.text());
    export.finish().await;
}

#[tokio::test]
async fn a_collector_that_never_responds_does_not_delay_the_end_of_the_process() {
    // Accepts connections, because of its backlog, and reads nothing.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let keys = format!("endpoint = \"http://{}\"\ntimeout = \"60s\"", listener.local_addr().unwrap());
    let (_metrics, export) = start(&config(&keys, None));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let begun = Instant::now();
    export.finish().await;
    assert!(begun.elapsed() < TIMEOUT, "the end waits for a second");
}

/// Regression: a message that was always rejected stopped all later ones of each export.
#[tokio::test]
async fn a_rejected_message_does_not_stop_the_others_of_its_export() {
    for (is_grpc, protocol) in [(true, "grpc"), (false, "http/protobuf")] {
        let (log, _capturing) = CapturedLog::start();
        let collector = TestCollector::start(is_grpc, None).await;
        let limit = 4096;
        collector.limit(limit);
        let keys = format!("endpoint = \"http://{}\"\nprotocol = \"{protocol}\"", collector.address);
        let many = ManyMetrics { many: (0..2048).map(|name| (name, 1)).collect(), last: Counter::default() };
        let snapshot = move || MetricsSnapshot::of("gateway", &many);
        let export = telemetry::metrics::start(&config(&keys, None), PROCESS, snapshot).unwrap();
        wait_until("two exports fail", || export.metrics().failed.get() >= 2).await;
        assert_eq!(export.metrics().exported.get(), 0);
        let are_long: Vec<_> =
            collector.exports().iter().take(4).map(|export| export.body.len() > limit).collect();
        assert_eq!(are_long, [true, false, true, false], "each export has both messages");
        assert_eq!(log.text().matches("export of metrics failed").count(), 1, "{}", log.text());
        export.finish().await;
    }
}

/// Regression: the last values were lost if an export was in flight.
#[tokio::test]
async fn the_last_values_are_exported_although_an_export_is_in_flight() {
    for (is_grpc, protocol) in [(true, "grpc"), (false, "http/protobuf")] {
        let collector = TestCollector::start(is_grpc, None).await;
        collector.set_silent(true);
        let keys = format!("endpoint = \"http://{}\"\nprotocol = \"{protocol}\"", collector.address);
        let (metrics, export) = start(&config(&keys, None));
        wait_until("an export is in flight", || collector.exports().len() == 1).await;
        collector.set_silent(false);
        metrics.requests.add(7);
        export.finish().await;
        let values: Vec<_> = collector.exports().iter().map(|export| requests(&export.body)).collect();
        assert_eq!(values, [0, 7], "{protocol}");
    }
}
