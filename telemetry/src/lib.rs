//! Traces of a process: configuration, and export by the OpenTelemetry protocol (OTLP).
//!
//! `telemetry_core` decides which requests are exported and what a span is; this crate has the clock, the randomness, the
//! queue and the task that exports.
//!
//! - [`config`]: the section `[tracing]` of each role's file, and the standard variables `OTEL_*`.
//! - [`tracer`]: begins and ends the traces of requests; the queue of finished spans.
//! - [`export`]: the task that sends them to a collector; `connector`: its connections.
//!
//! A request never waits for an export: its spans are put into a bounded queue, or dropped and counted. A collector that
//! is slow or gone has no other effect.

pub mod config;
mod connector;
pub mod export;
pub mod tracer;

pub use config::{TracingConfig, TracingSection};
pub use export::{TraceExport, TracingError, start};
pub use telemetry_core::{context, request, sampling, span};
pub use tracer::{TraceMetrics, Tracer};
