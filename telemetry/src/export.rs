//! Export of spans to a collector.
//!
//! One task takes the waiting spans once a second, or earlier if there are many, and sends them in batches. An export that
//! fails is repeated by the exporter within its timeout; then its spans are dropped and counted. The task logs a failure
//! and the recovery after it, not every failed export.

use crate::config::TracingConfig;
use crate::exporter::{self, CollectorExporter, ExportError, Process};
use crate::outcome::{OutcomeLog, RejectedItems};
use crate::tracer::{DropReason, Tracer, WAKE_SPANS};
use opentelemetry::trace::{Link, SpanContext, SpanKind as OtelKind, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, SpanId as OtelSpanId, TraceId as OtelTraceId, Value};
use opentelemetry_otlp::SpanExporter as OtlpExporter;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::trace::{SpanData, SpanExporter, SpanLinks};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use supervision::task::supervise_until_done;
use telemetry_core::context::{SpanId, TraceContext};
use telemetry_core::span::{AttributeValue, SpanKind, SpanRecord};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Period of exports.
const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of spans of an export: some 200 KiB, which a collector accepts (4 MiB by default).
const BATCH_SPANS_MAX: usize = WAKE_SPANS;

/// Task that exports spans; ended by [`TraceExport::finish`], and aborted on drop.
pub struct TraceExport {
    task: JoinHandle<()>,
    end: watch::Sender<bool>,
}

impl TraceExport {
    /// Exports the spans that wait, for at most `limit`, and ends the task.
    pub async fn finish(mut self, limit: Duration) {
        self.end.send_replace(true);
        // After that, the spans are lost. Requests had their responses before.
        tokio::time::timeout(limit, &mut self.task).await.ok();
    }
}

impl Drop for TraceExport {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts the export of the traces of a process; must be called in a runtime.
///
/// # Errors
///
/// When the exporter cannot be created. A collector that cannot be reached is no error.
pub fn start(config: &TracingConfig, process: Process<'_>) -> Result<(Tracer, TraceExport), ExportError> {
    #[cfg(feature = "alternate-traces")]
    crate::alternation::start();
    let tracer = Tracer::new(config.sampler, config.keep);
    let exporter = Arc::new(exporter::spans(&config.collector, process)?);
    let (end, ended) = watch::channel(false);
    let spans = tracer.clone();
    let task = tokio::spawn(supervise_until_done("trace export", move || {
        run(spans.clone(), exporter.clone(), ended.clone())
    }));
    Ok((tracer, TraceExport { task, end }))
}

async fn run(
    tracer: Tracer,
    exporter: Arc<CollectorExporter<OtlpExporter>>,
    mut ended: watch::Receiver<bool>,
) {
    let scope = InstrumentationScope::builder("meridian").with_version(env!("CARGO_PKG_VERSION")).build();
    let mut log = OutcomeLog::default();
    loop {
        let is_last = tokio::select! {
            () = tokio::time::sleep(PERIOD) => false,
            () = tracer.shared().wake.notified() => false,
            _ = ended.wait_for(|ended| *ended) => true,
        };
        let mut batch = Vec::new();
        for request in tracer.take() {
            batch.extend(request.into_iter().map(|span| span_data(span, &scope)));
            if batch.len() >= BATCH_SPANS_MAX {
                send(&tracer, &exporter, std::mem::take(&mut batch), &mut log).await;
            }
        }
        if !batch.is_empty() {
            send(&tracer, &exporter, batch, &mut log).await;
        }
        if is_last {
            return;
        }
    }
}

/// Sends a batch, and counts its spans.
async fn send(
    tracer: &Tracer,
    exporter: &CollectorExporter<OtlpExporter>,
    batch: Vec<SpanData>,
    log: &mut OutcomeLog,
) {
    let CollectorExporter { otlp, timeout, last } = exporter;
    let count = batch.len() as u64;
    let counts = &tracer.shared().counts;
    let sent = tokio::time::timeout(*timeout, otlp.export(batch)).await;
    match sent.unwrap_or(Err(OTelSdkError::Timeout(*timeout))) {
        Ok(()) => {
            let rejected = last.take_rejected(count);
            let accepted = count - rejected.as_ref().map_or(0, |rejected| rejected.count);
            counts.exported.add(accepted);
            if accepted > 0 && log.is_recovery() {
                // The collector accepts spans again.
                tracing::info!("export of traces recovered");
            }
            if let Some(RejectedItems { count, reason }) = rejected {
                counts.dropped.of(DropReason::Rejected).add(count);
                if log.is_new_rejection(Instant::now()) {
                    // The collector rejected spans of an export, for the `reason` that it gives, and accepted the others. Requests
                    // are not affected; rejected spans are counted. Logged again when there was no rejection for a minute. Check
                    // the limits of the collector.
                    tracing::warn!(reason, spans = count, "collector rejected spans");
                }
            }
        }
        Err(error) => {
            counts.dropped.of(DropReason::ExportFailed).add(count);
            let cause = last.take_cause();
            if log.is_new_failure() {
                // The collector cannot be reached, or rejects spans. Requests are not affected; spans are dropped and
                // counted until it recovers. Check the endpoint and the collector. `cause` has the error of the connection, if
                // the export was by HTTP and had no response.
                tracing::warn!(%error, cause, spans = count, "export of traces failed");
            }
        }
    }
}

/// Converts a span to the type of the exporter.
fn span_data(span: SpanRecord, scope: &InstrumentationScope) -> SpanData {
    let SpanRecord { trace, id, parent, is_parent_remote, name, kind, .. } = span;
    let SpanRecord { start_ns, end_ns, is_error, attributes, links, .. } = span;
    let attributes = attributes.into_iter().map(|(attribute, value)| {
        let value: Value = match value {
            // A number of bytes, tokens or milliseconds is far below this limit.
            AttributeValue::Number(number) => i64::try_from(number).unwrap_or(i64::MAX).into(),
            AttributeValue::Word(word) => word.into(),
            AttributeValue::Text(text) => String::from(text).into(),
        };
        KeyValue::new(attribute.as_str(), value)
    });
    let mut span_links = SpanLinks::default();
    span_links.links = links.into_iter().map(|to| Link::new(context(to, true), Vec::new(), 0)).collect();
    SpanData {
        span_context: context(TraceContext { trace, span: id, is_sampled: true }, false),
        parent_span_id: parent.map_or(OtelSpanId::INVALID, span_id),
        parent_span_is_remote: is_parent_remote,
        span_kind: match kind {
            SpanKind::Internal => OtelKind::Internal,
            SpanKind::Server => OtelKind::Server,
            SpanKind::Client => OtelKind::Client,
        },
        name: name.text(),
        start_time: time(start_ns),
        end_time: time(end_ns),
        attributes: attributes.collect(),
        dropped_attributes_count: 0,
        events: Default::default(),
        links: span_links,
        status: if is_error { Status::error("") } else { Status::Unset },
        instrumentation_scope: scope.clone(),
    }
}

fn time(ns: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(ns)
}

fn span_id(id: SpanId) -> OtelSpanId {
    OtelSpanId::from_bytes(id.get().to_be_bytes())
}

/// The state of a client is not exported: it is text of the client.
fn context(context: TraceContext, is_remote: bool) -> SpanContext {
    let trace = OtelTraceId::from_bytes(context.trace.get().to_be_bytes());
    let flags = if context.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    SpanContext::new(trace, span_id(context.span), flags, is_remote, TraceState::NONE)
}
