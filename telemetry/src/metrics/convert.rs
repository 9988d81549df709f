//! Conversion of the values of metrics to messages of OTLP.
//!
//! Names, help texts and labels are those of `/metrics`. The unit stays empty, because the name has it: collectors that write to
//! Prometheus append the unit of a metric to its name.

use ::metrics::snapshot::{CollectedMetric, HistogramValue, MetricSample, Number, SampleValue};
use ::metrics::{MetricKind, MetricsSnapshot};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum, exemplar, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum number of samples of a message. A histogram with all exemplars has some 1.5 KiB, so that is less than the 4 MiB that a collector
/// accepts by default.
const SAMPLES_MAX: usize = 2048;
/// Shortest backward step of the clock that moves the start. Two clocks are not read at the same instant, and a collector takes
/// another start for a reset of the counters.
const STEP_MIN: Duration = Duration::from_secs(1);

/// Times of an export, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportTimes {
    /// Start of the counters; not after the time of the values, whatever the clock was set to.
    start_ns: u64,
    /// Time of the values.
    now_ns: u64,
}

impl ExportTimes {
    pub(super) fn new(start: SystemTime, now: SystemTime) -> ExportTimes {
        let since_1970 = |time: SystemTime| {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
        };
        let now_ns = since_1970(now);
        ExportTimes { start_ns: since_1970(start).min(now_ns), now_ns }
    }
}

/// Returns the start of the counters by the current setting of the clock, which shows `now`: an earlier one than `start` if the
/// clock was corrected backwards since then. `elapsed` is the time since the start by a clock that is never corrected.
pub(super) fn corrected_start(start: SystemTime, elapsed: Duration, now: SystemTime) -> SystemTime {
    let by_now = now.checked_sub(elapsed).unwrap_or(UNIX_EPOCH);
    let is_corrected = start.duration_since(by_now).is_ok_and(|step| step >= STEP_MIN);
    if is_corrected { by_now } else { start }
}

/// Converts the attributes of a process, ordered by name.
pub(super) fn resource(resource: &opentelemetry_sdk::Resource) -> Resource {
    let mut attributes: Vec<_> =
        resource.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    attributes.sort();
    let attributes = attributes.into_iter().map(|(name, value)| attribute(name, &value));
    Resource { attributes: attributes.collect(), ..Resource::default() }
}

/// Converts the values of all metrics to messages with at most [`SAMPLES_MAX`] samples each. A metric without a sample is omitted.
pub(super) fn requests(
    snapshot: &MetricsSnapshot,
    resource: &Resource,
    times: ExportTimes,
) -> Vec<ExportMetricsServiceRequest> {
    let mut requests = Vec::new();
    let (mut metrics, mut count) = (Vec::new(), 0);
    for metric in &snapshot.metrics {
        for samples in metric.samples.chunks(SAMPLES_MAX) {
            if count + samples.len() > SAMPLES_MAX {
                requests.push(request(std::mem::take(&mut metrics), resource));
                count = 0;
            }
            count += samples.len();
            metrics.push(converted(metric, samples, times));
        }
    }
    if !metrics.is_empty() {
        requests.push(request(metrics, resource));
    }
    requests
}

fn request(metrics: Vec<Metric>, resource: &Resource) -> ExportMetricsServiceRequest {
    let scope = InstrumentationScope {
        name: "meridian".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let scope_metrics = ScopeMetrics { scope: Some(scope), metrics, schema_url: String::new() };
    let resource = ResourceMetrics {
        resource: Some(resource.clone()),
        scope_metrics: vec![scope_metrics],
        schema_url: String::new(),
    };
    ExportMetricsServiceRequest { resource_metrics: vec![resource] }
}

/// Converts a metric with some of its samples.
fn converted(metric: &CollectedMetric, samples: &[MetricSample], times: ExportTimes) -> Metric {
    let CollectedMetric { name, help, kind, label_names, samples: _ } = metric;
    let labelled = |sample: &MetricSample| -> Vec<KeyValue> {
        label_names.iter().zip(&sample.labels).map(|(label, value)| attribute(label, value)).collect()
    };
    let numbers = |start_ns| -> Vec<NumberDataPoint> {
        let numbers = samples.iter().filter_map(|sample| match &sample.value {
            SampleValue::Number(value) => Some(number(*value, labelled(sample), start_ns, times.now_ns)),
            SampleValue::Histogram(_) => None,
        });
        numbers.collect()
    };
    let cumulative = i32::from(AggregationTemporality::Cumulative);
    let data = match kind {
        MetricKind::Counter => Data::Sum(Sum {
            data_points: numbers(times.start_ns),
            aggregation_temporality: cumulative,
            is_monotonic: true,
        }),
        // The current value has no start.
        MetricKind::Gauge => Data::Gauge(Gauge { data_points: numbers(0) }),
        MetricKind::Histogram => {
            let histograms = samples.iter().filter_map(|sample| match &sample.value {
                SampleValue::Histogram(value) => Some(histogram(value, labelled(sample), times)),
                SampleValue::Number(_) => None,
            });
            Data::Histogram(Histogram {
                data_points: histograms.collect(),
                aggregation_temporality: cumulative,
            })
        }
    };
    Metric {
        name: name.clone(),
        description: (*help).to_owned(),
        unit: String::new(),
        metadata: Vec::new(),
        data: Some(data),
    }
}

fn number(value: Number, attributes: Vec<KeyValue>, start_ns: u64, now_ns: u64) -> NumberDataPoint {
    let value = match value {
        // A count is far below this limit.
        Number::Integer(number) => number_data_point::Value::AsInt(i64::try_from(number).unwrap_or(i64::MAX)),
        Number::Float(number) => number_data_point::Value::AsDouble(number),
    };
    NumberDataPoint {
        attributes,
        start_time_unix_nano: start_ns,
        time_unix_nano: now_ns,
        exemplars: Vec::new(),
        flags: 0,
        value: Some(value),
    }
}

fn histogram(value: &HistogramValue, attributes: Vec<KeyValue>, times: ExportTimes) -> HistogramDataPoint {
    let HistogramValue { bounds, counts, sum, exemplars } = value;
    let exemplars = exemplars.iter().flatten().map(|(value, exemplar)| Exemplar {
        filtered_attributes: Vec::new(),
        time_unix_nano: exemplar.at_ms.saturating_mul(1_000_000),
        // Only the trace is known.
        span_id: Vec::new(),
        trace_id: exemplar.trace_id.to_vec(),
        value: Some(exemplar::Value::AsDouble(*value)),
    });
    HistogramDataPoint {
        attributes,
        start_time_unix_nano: times.start_ns,
        time_unix_nano: times.now_ns,
        count: counts.iter().sum(),
        sum: Some(*sum),
        bucket_counts: counts.clone(),
        explicit_bounds: bounds.to_vec(),
        exemplars: exemplars.collect(),
        flags: 0,
        min: None,
        max: None,
    }
}

fn attribute(name: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
    KeyValue { key: name.to_owned(), value: Some(value), ..KeyValue::default() }
}

#[cfg(test)]
mod tests;
