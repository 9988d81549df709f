//! Traces, logs and metrics of a process: configuration, and export by the OpenTelemetry protocol (OTLP).
//!
//! `telemetry_core` decides which requests are exported and what a span is; this crate has the clock, the randomness, the
//! queues, and the task and the thread that export.
//!
//! - [`config`]: the sections `[tracing]`, `[logs]` and `[metrics]` of each role's file, and the standard variables `OTEL_*`.
//! - [`tracer`]: begins and ends the traces of requests; the queue of finished spans.
//! - [`export`]: the task that sends them to a collector.
//! - [`logs`]: the layer that copies the events of the log into a queue, and the thread that sends them.
//! - [`metrics`]: the task that sends the values of the metrics in each interval.
//! - `alternation`: traces that are off and on in turns, only in a build that measures their cost.
//! - [`exporter`]: the exporters of traces and logs; `connector`: their connections; `outcome`: outcomes of exports.
//!
//! Neither a request nor a line of the log waits for an export: it is put into a bounded queue, or dropped and counted. A collector
//! that is slow or gone has no other effect.

#[cfg(feature = "alternate-traces")]
mod alternation;
pub mod config;
mod connector;
pub mod export;
pub mod exporter;
pub mod logs;
pub mod metrics;
mod outcome;
pub mod tracer;

pub use self::metrics::{MetricExports, MetricsExport};
pub use config::{LogsConfig, LogsSection, MetricsConfig, MetricsSection, TracingConfig, TracingSection};
pub use export::{TraceExport, start};
pub use exporter::{ExportError, Process};
pub use logs::LogMetrics;
pub use telemetry_core::{context, log_filter, request, sampling, span};
pub use tracer::{TraceMetrics, Tracer, exemplar};
