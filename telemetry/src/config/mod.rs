//! Configuration of the exports: the sections `[tracing]`, `[logs]` and `[metrics]`, and the standard variables of OpenTelemetry.
//!
//! A key of the file takes precedence over its variable. Without an endpoint in either, nothing is exported.

mod environment;
mod metrics;
mod values;

pub use self::metrics::{MetricsConfig, MetricsSection};

use configuration::{ConfigFile, Files, section, words};
use environment::{CollectorKeys, CollectorVariables};
use http::{HeaderName, HeaderValue, Uri};
use rustls::RootCertStore;
use std::path::PathBuf;
use std::time::Duration;
use telemetry_core::sampling::{HeadSampler, KeepPolicy};

/// Share of the traces that is sampled by default: the usual one for services with thousands of requests a second.
const SAMPLE_RATIO: f64 = 0.01;
/// Duration from which a request is slow by default.
const SLOW: Duration = Duration::from_secs(1);
/// Limit of kept traces in a second by default: some 500 spans, of which the queue has sixteen times as many.
const KEPT_PER_SECOND: u32 = 100;

words! {
    /// Level of an event.
    pub enum LogLevel {
        /// Errors.
        Error = "error",
        /// Warnings and errors.
        Warn = "warn",
        /// The line of each request, and all above.
        Info = "info",
        /// Details, and all above.
        Debug = "debug",
        /// All events.
        Trace = "trace",
    }
}

words! {
    /// Protocol of exports.
    pub enum ExportProtocol {
        /// gRPC.
        Grpc = "grpc",
        /// HTTP with protobuf bodies.
        Http = "http/protobuf",
    }
}

words! {
    /// Compression of exports.
    pub enum ExportCompression {
        /// The bodies of exports are compressed.
        Gzip = "gzip",
        /// They are not.
        None = "none",
    }
}

words! {
    /// Sampler, with the names of OpenTelemetry.
    pub enum SamplerName {
        /// All traces.
        AlwaysOn = "always_on",
        /// None but errors, failovers and slow requests.
        AlwaysOff = "always_off",
        /// A share of the traces; the flag of a caller is ignored.
        Ratio = "traceidratio",
        /// The flag of the caller decides; all of the traces without a caller.
        ParentAlwaysOn = "parentbased_always_on",
        /// The flag of the caller decides; none of the traces without a caller.
        ParentAlwaysOff = "parentbased_always_off",
        /// The flag of the caller decides; a share of the traces without a caller.
        ParentRatio = "parentbased_traceidratio",
    }
}

section! {
    /// Traces, exported with the OpenTelemetry protocol (OTLP). A key that is absent has the value of the standard variable
    /// that its description names; without an endpoint, no traces are recorded.
    pub partial struct TracingSection {
        /// URL of the collector. For `http/protobuf`, a URL without a path is that of `/v1/traces`. Or
        /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`.
        pub endpoint: Option<String>, like "\"http://127.0.0.1:4318\"";
        /// Protocol; `http/protobuf` by default. Or `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, `OTEL_EXPORTER_OTLP_PROTOCOL`.
        pub protocol: Option<ExportProtocol>;
        /// File with headers of each export, such as a key of the collector: `name=value,name=value`. In addition to
        /// `OTEL_EXPORTER_OTLP_TRACES_HEADERS` or `OTEL_EXPORTER_OTLP_HEADERS`.
        pub headers_file: Option<PathBuf>;
        /// Environment variable with the headers, instead of the file.
        pub headers_env: Option<String>;
        /// File with the certificate authorities of the collector, PEM; those of the system if absent. Or
        /// `OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE`, `OTEL_EXPORTER_OTLP_CERTIFICATE`.
        pub ca: Option<PathBuf>;
        /// Sampler; `parentbased_traceidratio` by default. Or `OTEL_TRACES_SAMPLER`.
        pub sampler: Option<SamplerName>;
        /// Share of the traces that is sampled; 0.01 by default. Or `OTEL_TRACES_SAMPLER_ARG`.
        pub sample_ratio: Option<f64>, in 0.0..=1.0;
        /// Duration from which the trace of a request is exported although it was not sampled, like those of errors and
        /// failovers.
        pub slow: Duration = SLOW, in Duration::from_millis(1)..;
        /// Limit of the traces that are exported in a second although they were not sampled. Those of disconnected callers have the
        /// same limit for themselves, and so have, at gateways, those that are sampled because of the flag of a client.
        pub kept_per_second: u32 = KEPT_PER_SECOND;
        /// Timeout of an export; 10 s by default. Or `OTEL_EXPORTER_OTLP_TRACES_TIMEOUT`, `OTEL_EXPORTER_OTLP_TIMEOUT`, in
        /// milliseconds.
        pub timeout: Option<Duration>, in Duration::from_millis(1)..=Duration::from_secs(60);
    }
}

section! {
    /// Events of the log, exported with the OpenTelemetry protocol (OTLP) beside stderr. A key that is absent has the value of
    /// the standard variable that its description names; without an endpoint, the log is on stderr only.
    pub partial struct LogsSection {
        /// URL of the collector. For `http/protobuf`, a URL without a path is that of `/v1/logs`. Or
        /// `OTEL_EXPORTER_OTLP_LOGS_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`.
        pub endpoint: Option<String>, like "\"http://127.0.0.1:4318\"";
        /// Protocol; `http/protobuf` by default. Or `OTEL_EXPORTER_OTLP_LOGS_PROTOCOL`, `OTEL_EXPORTER_OTLP_PROTOCOL`.
        pub protocol: Option<ExportProtocol>;
        /// File with headers of each export, such as a key of the collector: `name=value,name=value`. In addition to
        /// `OTEL_EXPORTER_OTLP_LOGS_HEADERS` or `OTEL_EXPORTER_OTLP_HEADERS`.
        pub headers_file: Option<PathBuf>;
        /// Environment variable with the headers, instead of the file.
        pub headers_env: Option<String>;
        /// File with the certificate authorities of the collector, PEM; those of the system if absent. Or
        /// `OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE`, `OTEL_EXPORTER_OTLP_CERTIFICATE`.
        pub ca: Option<PathBuf>;
        /// Lowest level of the events that are exported. An event that `MERIDIAN_LOG` or `/log` excludes is not exported either.
        pub level: LogLevel = LogLevel::Trace;
        /// Timeout of an export; 10 s by default. Or `OTEL_EXPORTER_OTLP_LOGS_TIMEOUT`, `OTEL_EXPORTER_OTLP_TIMEOUT`, in
        /// milliseconds.
        pub timeout: Option<Duration>, in Duration::from_millis(1)..=Duration::from_secs(60);
    }
}

/// Signal of OpenTelemetry that is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Traces.
    Traces,
    /// Logs.
    Logs,
    /// Metrics.
    Metrics,
}

impl Signal {
    /// Returns its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Signal::Traces => "traces",
            Signal::Logs => "logs",
            Signal::Metrics => "metrics",
        }
    }

    /// Returns the name of its table in a file.
    pub fn table(self) -> &'static str {
        match self {
            Signal::Traces => "tracing",
            Signal::Logs => "logs",
            Signal::Metrics => "metrics",
        }
    }
}

/// Collector of one signal.
#[derive(Clone, Debug)]
pub struct CollectorConfig {
    /// Signal that is exported to it.
    pub signal: Signal,
    /// URL of the exports.
    pub endpoint: Uri,
    /// Protocol.
    pub protocol: ExportProtocol,
    /// Compression.
    pub compression: ExportCompression,
    /// Certificate authorities of the collector; those of the system if absent.
    pub roots: Option<RootCertStore>,
    /// Timeout of an export.
    pub timeout: Duration,
    /// Name of the service, instead of `meridian-ROLE`.
    pub service_name: Option<String>,
    /// Further attributes of the process.
    pub resource: Vec<(String, String)>,
    /// Headers of the file.
    pub(crate) headers: Headers,
}

/// Headers of an export; they may be secret.
#[derive(Clone, Default)]
pub(crate) struct Headers(pub(crate) Vec<(HeaderName, HeaderValue)>);

impl std::fmt::Debug for Headers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} headers", self.0.len())
    }
}

/// Configuration of traces.
#[derive(Clone, Debug)]
pub struct TracingConfig {
    /// Collector.
    pub collector: CollectorConfig,
    /// Sampler at the start of a request.
    pub sampler: HeadSampler,
    /// Decision at its end.
    pub keep: KeepPolicy,
}

impl TracingConfig {
    /// Returns the configuration of a process whose callers are processes of the fleet: their flag decides whatever the
    /// sampler is, so that a trace that a gateway samples, or keeps because of a failover, has the spans of all processes.
    #[must_use]
    pub fn behind_gateway(&self) -> TracingConfig {
        TracingConfig { sampler: self.sampler.following_parent(), ..self.clone() }
    }
}

/// Configuration of the export of logs.
#[derive(Clone, Debug)]
pub struct LogsConfig {
    /// Collector.
    pub collector: CollectorConfig,
    /// Lowest level that is exported.
    pub level: LogLevel,
}

impl TracingSection {
    /// Reads the files and the environment variables of the section; `Some(None)` without an endpoint, and `None` after a
    /// problem.
    pub fn read(self, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<Option<TracingConfig>> {
        let TracingSection { endpoint, protocol, headers_file, headers_env, ca, timeout, .. } = self;
        let environment = CollectorVariables::new(document, files, Signal::Traces, endpoint.as_ref());
        let sampler = environment.sampler(self.sampler, self.sample_ratio);
        let keys = CollectorKeys { endpoint, protocol, headers_file, headers_env, ca, timeout };
        let collector = environment.collector(keys)?;
        let keep = KeepPolicy { slow: self.slow?, per_second: self.kept_per_second? };
        let sampler = sampler?;
        Some(collector.map(|collector| TracingConfig { collector, sampler, keep }))
    }
}

impl LogsSection {
    /// Reads the files and the environment variables of the section; `Some(None)` without an endpoint, and `None` after a
    /// problem.
    pub fn read(self, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<Option<LogsConfig>> {
        let LogsSection { endpoint, protocol, headers_file, headers_env, ca, level, timeout } = self;
        let environment = CollectorVariables::new(document, files, Signal::Logs, endpoint.as_ref());
        let keys = CollectorKeys { endpoint, protocol, headers_file, headers_env, ca, timeout };
        let collector = environment.collector(keys)?;
        let level = level?;
        Some(collector.map(|collector| LogsConfig { collector, level }))
    }
}

#[cfg(test)]
mod tests;
