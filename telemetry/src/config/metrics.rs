//! Configuration of the export of metrics: the section `[metrics]`.

use super::environment::{CollectorKeys, CollectorVariables};
use super::{CollectorConfig, ExportProtocol, Signal};
use configuration::{ConfigFile, Files, section};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Time between two exports by default, as OpenTelemetry specifies.
const INTERVAL: Duration = Duration::from_secs(60);
/// Shortest time between two exports.
const INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Longest time between two exports.
const INTERVAL_MAX: Duration = Duration::from_secs(3600);

section! {
    /// Metrics, exported with the OpenTelemetry protocol (OTLP) beside `/metrics`. A key that is absent has the value of the
    /// standard variable that its description names; without an endpoint, the metrics are on `/metrics` only.
    pub partial struct MetricsSection {
        /// URL of the collector. For `http/protobuf`, a URL without a path is that of `/v1/metrics`. Or
        /// `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`.
        pub endpoint: Option<String>, like "\"http://127.0.0.1:4318\"";
        /// Protocol; `http/protobuf` by default. Or `OTEL_EXPORTER_OTLP_METRICS_PROTOCOL`, `OTEL_EXPORTER_OTLP_PROTOCOL`.
        pub protocol: Option<ExportProtocol>;
        /// File with headers of each export, such as a key of the collector: `name=value,name=value`. In addition to
        /// `OTEL_EXPORTER_OTLP_METRICS_HEADERS` or `OTEL_EXPORTER_OTLP_HEADERS`.
        pub headers_file: Option<PathBuf>;
        /// Environment variable with the headers, instead of the file.
        pub headers_env: Option<String>;
        /// File with the certificate authorities of the collector, PEM; those of the system if absent. Or
        /// `OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE`, `OTEL_EXPORTER_OTLP_CERTIFICATE`.
        pub ca: Option<PathBuf>;
        /// Time between two exports; 1 minute by default. Or `OTEL_METRIC_EXPORT_INTERVAL`, in milliseconds.
        pub interval: Option<Duration>, in INTERVAL_MIN..=INTERVAL_MAX;
        /// Timeout of an export; 10 s by default. Or `OTEL_EXPORTER_OTLP_METRICS_TIMEOUT`, `OTEL_EXPORTER_OTLP_TIMEOUT`, in
        /// milliseconds.
        pub timeout: Option<Duration>, in Duration::from_millis(1)..=Duration::from_secs(60);
    }
}

/// Configuration of the export of metrics.
#[derive(Clone, Debug)]
pub struct MetricsConfig {
    /// Collector.
    pub collector: CollectorConfig,
    /// Time between two exports.
    pub interval: Duration,
}

/// Time between two exports in milliseconds, as the variable has it.
struct IntervalMillis(Duration);

impl FromStr for IntervalMillis {
    type Err = String;

    fn from_str(text: &str) -> Result<IntervalMillis, String> {
        let interval = text.parse().ok().map(Duration::from_millis);
        let interval = interval.filter(|interval| (INTERVAL_MIN..=INTERVAL_MAX).contains(interval));
        interval
            .map(IntervalMillis)
            .ok_or_else(|| format!("{text:?} is not an interval; write milliseconds, 1000 to 3600000"))
    }
}

/// Preference of a temporality that the export has.
struct Cumulative;

impl FromStr for Cumulative {
    type Err = String;

    fn from_str(text: &str) -> Result<Cumulative, String> {
        let is_cumulative = text.eq_ignore_ascii_case("cumulative");
        is_cumulative.then_some(Cumulative).ok_or_else(|| {
            format!(
                "{text:?} is not supported; write \"cumulative\", or unset it, and convert the values in the collector"
            )
        })
    }
}

impl MetricsSection {
    /// Reads the files and the environment variables of the section; `Some(None)` without an endpoint, and `None` after a
    /// problem.
    pub fn read(self, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<Option<MetricsConfig>> {
        let MetricsSection { endpoint, protocol, headers_file, headers_env, ca, interval, timeout } = self;
        let environment = CollectorVariables::new(document, files, Signal::Metrics, endpoint.as_ref());
        let interval = interval.and_then(|key| match key {
            Some(interval) => Some(interval),
            None => {
                let variable = environment.parsed_one::<IntervalMillis>("OTEL_METRIC_EXPORT_INTERVAL");
                variable.map(|set| set.map_or(INTERVAL, |IntervalMillis(interval)| interval))
            }
        });
        let temporality =
            environment.parsed_one::<Cumulative>("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE");
        let keys = CollectorKeys { endpoint, protocol, headers_file, headers_env, ca, timeout };
        let collector = environment.collector(keys)?;
        let (interval, _) = (interval?, temporality?);
        let headers = environment.exporter_headers()?;
        Some(collector.map(|mut collector| {
            // Those of the variables take precedence, as the exporter of the other signals has it.
            collector.headers.0.extend(headers);
            MetricsConfig { collector, interval }
        }))
    }
}

#[cfg(test)]
mod tests;
