use super::*;
use ::metrics::{
    ByName, Counter, Exemplar as TraceExemplar, Family, Histogram as Times, Info, Sparse, TimeCounter,
    labels, metric_set,
};
use std::time::Duration;

labels! {
    /// Outcome.
    enum Outcome {
        /// Successful.
        Ok = "ok",
        /// Failed.
        Failed = "failed",
    }
}

metric_set! {
    /// Metrics under test.
    #[derive(Default)]
    struct TestMetrics {
        /// Requests, by outcome.
        requests: Family<Outcome> = "meridian_{role}_requests_total" ["outcome"],
        /// Failures, if there are any.
        failures: Sparse<Family<Outcome>, false> = "failures_total" ["outcome"],
        /// Time of the engine.
        busy: TimeCounter = "busy_seconds_total",
        /// Requests in flight, by region.
        in_flight: Option<ByName<u64>> = "in_flight" ["region"],
        /// Share of a cache.
        share: f64 = "share",
        /// Durations.
        seconds: Times = "seconds",
        /// Build.
        build: Option<Info<3>> = "build_info" ["version", "commit", "rust"],
    }
}

const TIMES: ExportTimes = ExportTimes { start_ns: 5, now_ns: 9 };

/// Returns the metrics of the only message.
fn export(set: &TestMetrics) -> Vec<Metric> {
    let requests = requests(&MetricsSnapshot::of("gateway", set), &Resource::default(), TIMES);
    let [request] = requests.as_slice() else { panic!("one message: {requests:?}") };
    request.resource_metrics[0].scope_metrics[0].metrics.clone()
}

fn find(metrics: &[Metric], name: &str) -> Data {
    let found = metrics.iter().find(|metric| metric.name == name);
    found.unwrap_or_else(|| panic!("{name} in {metrics:?}")).data.clone().unwrap()
}

/// Returns the labels of a point as text.
fn text(attributes: &[KeyValue]) -> String {
    let pair = |attribute: &KeyValue| match attribute.value.clone().and_then(|value| value.value) {
        Some(Value::StringValue(value)) => format!("{}={value}", attribute.key),
        other => panic!("a label is text: {other:?}"),
    };
    attributes.iter().map(pair).collect::<Vec<_>>().join(",")
}

#[test]
fn a_counter_is_a_monotonic_cumulative_sum_since_the_start_of_the_process() {
    let set = TestMetrics::default();
    set.requests.of(Outcome::Failed).add(7);
    set.busy.add(Duration::from_millis(1500));
    let metrics = export(&set);
    let name = "meridian_gateway_requests_total";
    let metric = metrics.iter().find(|metric| metric.name == name).unwrap();
    assert_eq!((metric.description.as_str(), metric.unit.as_str()), ("Requests, by outcome.", ""));
    let Data::Sum(sum) = find(&metrics, name) else { panic!("{metric:?}") };
    assert!(sum.is_monotonic);
    assert_eq!(sum.aggregation_temporality, i32::from(AggregationTemporality::Cumulative));
    let points: Vec<_> = sum
        .data_points
        .iter()
        .map(|point| (text(&point.attributes), point.value, point.start_time_unix_nano, point.time_unix_nano))
        .collect();
    let int = |number| Some(number_data_point::Value::AsInt(number));
    assert_eq!(
        points,
        [("outcome=ok".to_owned(), int(0), 5, 9), ("outcome=failed".to_owned(), int(7), 5, 9)]
    );
    let Data::Sum(busy) = find(&metrics, "busy_seconds_total") else { panic!("a counter") };
    assert_eq!(busy.data_points[0].value, Some(number_data_point::Value::AsDouble(1.5)));
}

#[test]
fn a_gauge_has_no_start_and_a_metric_without_a_sample_is_omitted() {
    let set = TestMetrics {
        in_flight: Some([("aws/us-east-1", 3)].into_iter().collect()),
        share: 0.25,
        build: Some(Info(vec!["0.1.0".to_owned(), "abc".to_owned()])),
        ..TestMetrics::default()
    };
    let metrics = export(&set);
    let gauge = |name: &str| {
        let Data::Gauge(gauge) = find(&metrics, name) else { panic!("{name} is a gauge") };
        let [point] = gauge.data_points.as_slice() else { panic!("{gauge:?}") };
        assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (0, 9));
        (text(&point.attributes), point.value)
    };
    let int = |number| Some(number_data_point::Value::AsInt(number));
    assert_eq!(gauge("in_flight"), ("region=aws/us-east-1".to_owned(), int(3)));
    assert_eq!(gauge("share"), (String::new(), Some(number_data_point::Value::AsDouble(0.25))));
    assert_eq!(gauge("build_info"), ("version=0.1.0,commit=abc".to_owned(), int(1)), "one label is missing");
    let names: Vec<_> = export(&TestMetrics::default()).into_iter().map(|metric| metric.name).collect();
    assert_eq!(names, ["meridian_gateway_requests_total", "busy_seconds_total", "share", "seconds"]);
}

#[test]
fn a_histogram_has_the_count_of_each_bucket_and_the_traces_of_its_values() {
    let set = TestMetrics::default();
    let exemplar = TraceExemplar { trace_id: [7; 16], at_ms: 1_700_000_000_250 };
    set.seconds.observe_traced(Duration::from_millis(3), Some(exemplar));
    set.seconds.observe(Duration::from_millis(4));
    set.seconds.observe(Duration::from_secs(90));
    let Data::Histogram(histogram) = find(&export(&set), "seconds") else { panic!("a histogram") };
    assert_eq!(histogram.aggregation_temporality, i32::from(AggregationTemporality::Cumulative));
    let [point] = histogram.data_points.as_slice() else { panic!("{histogram:?}") };
    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
    let at = point.explicit_bounds.iter().position(|bound| *bound == 0.005).unwrap();
    assert_eq!(
        (point.bucket_counts[at], point.bucket_counts.last()),
        (2, Some(&1)),
        "counts of one bucket each"
    );
    assert_eq!((point.count, point.sum), (3, Some(90.007)));
    assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (5, 9));
    let [exemplar] = point.exemplars.as_slice() else { panic!("{point:?}") };
    assert_eq!(
        (exemplar.trace_id.as_slice(), exemplar.value),
        (&[7; 16][..], Some(exemplar::Value::AsDouble(0.003)))
    );
    assert_eq!(exemplar.time_unix_nano, 1_700_000_000_250_000_000);
}

#[test]
fn a_message_has_a_limited_number_of_samples() {
    metric_set! {
        /// Many samples.
        struct ManyMetrics {
            /// One.
            one: Counter = "one_total",
            /// Many.
            many: ByName<u64> = "many" ["name"],
            /// Another.
            another: Counter = "another_total",
        }
    }
    let counts = |many: usize| -> Vec<usize> {
        let many = (0..many).map(|name| (name, 1)).collect();
        let set = ManyMetrics { one: Counter::default(), many, another: Counter::default() };
        let points = |metric: &Metric| match metric.data.as_ref() {
            Some(Data::Sum(sum)) => sum.data_points.len(),
            Some(Data::Gauge(gauge)) => gauge.data_points.len(),
            other => panic!("{other:?}"),
        };
        let requests = requests(&MetricsSnapshot::of("hub", &set), &Resource::default(), TIMES);
        let metrics = |request: &ExportMetricsServiceRequest| {
            request.resource_metrics[0].scope_metrics[0].metrics.iter().map(points).sum()
        };
        requests.iter().map(metrics).collect()
    };
    assert_eq!(counts(SAMPLES_MAX - 2), [SAMPLES_MAX], "at the limit");
    assert_eq!(counts(SAMPLES_MAX - 1), [SAMPLES_MAX, 1], "past it");
    assert_eq!(counts(2 * SAMPLES_MAX + 1), [1, SAMPLES_MAX, SAMPLES_MAX, 2]);
}

#[test]
fn the_start_of_an_export_is_not_after_its_time() {
    let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    assert_eq!(
        ExportTimes::new(at(2), at(3)),
        ExportTimes { start_ns: 2_000_000_000, now_ns: 3_000_000_000 }
    );
    assert_eq!(
        ExportTimes::new(at(2), at(1)),
        ExportTimes { start_ns: 1_000_000_000, now_ns: 1_000_000_000 }
    );
}

/// Regression: all exports had the time of the start until the corrected clock had reached it.
#[test]
fn the_start_moves_with_a_clock_that_is_corrected_backwards() {
    let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    let elapsed = Duration::from_secs;
    assert_eq!(corrected_start(at(1000), elapsed(50), at(1050)), at(1000));
    assert_eq!(corrected_start(at(1000), elapsed(50), at(450)), at(400), "backwards by 600 s");
    assert_eq!(corrected_start(at(400), elapsed(60), at(460)), at(400), "it stays");
    assert_eq!(corrected_start(at(400), elapsed(70), at(1070)), at(400), "forwards");
    let almost = Duration::from_millis(999);
    assert_eq!(corrected_start(at(1000), elapsed(50), at(1050) - almost), at(1000), "below the limit");
    assert_eq!(corrected_start(at(1000), elapsed(50), at(1049)), at(999), "at the limit");
}

#[test]
fn the_attributes_of_the_process_are_in_order() {
    let pairs = [("service.name", "meridian-hub"), ("a", "b")];
    let pairs = pairs.map(|(name, value)| opentelemetry::KeyValue::new(name, value));
    let converted = resource(&opentelemetry_sdk::Resource::builder_empty().with_attributes(pairs).build());
    assert_eq!(text(&converted.attributes), "a=b,service.name=meridian-hub");
}
