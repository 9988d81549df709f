//! Export of the events of the log to a collector.
//!
//! A thread with a runtime of its own, so that every event of the exporter and of its connections is known by its thread and is not
//! exported, and so that the last lines of the process are exported after its other tasks have ended. It logs the first
//! failure and the recovery after it, to stderr only.

use super::{LOG, LogEvent, LogLayer, LogQueue, layer};
use crate::config::LogsConfig;
use crate::exporter::{self, CollectorExporter, ExportError, Process};
use crate::outcome::{OutcomeLog, RejectedItems};
use crate::tracer::DropReason;
use opentelemetry::InstrumentationScope;
use opentelemetry::logs::{LogRecord, Logger, LoggerProvider, Severity};
use opentelemetry::{SpanId as OtelSpanId, TraceId as OtelTraceId};
use opentelemetry_otlp::LogExporter as OtlpExporter;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::logs::{LogBatch, LogExporter, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use supervision::task::{self, supervise_until_done};
use tokio::sync::watch;
use tracing::Level;

/// Period of exports.
const PERIOD: Duration = Duration::from_secs(1);
/// Time for the export of the last events at the end of the process.
const LAST_EVENTS: Duration = Duration::from_secs(2);

/// Thread that exports the log; dropping it exports the events that wait, within two seconds.
pub struct LogExport {
    end: watch::Sender<bool>,
    /// Disconnected when the thread ends.
    ended: mpsc::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for LogExport {
    fn drop(&mut self) {
        self.end.send_replace(true);
        if self.ended.recv_timeout(LAST_EVENTS) == Err(RecvTimeoutError::Timeout) {
            // A collector that does not respond. The thread ends with the process.
            return;
        }
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Starts the export of the log of a process. The layer is for the subscriber of the process.
///
/// # Errors
///
/// When the exporter or its thread cannot be created. A collector that cannot be reached is no error.
pub fn start(config: &LogsConfig, process: Process<'_>) -> Result<(LogLayer, LogExport), ExportError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(layer::exclude_thread)
        .build()
        .map_err(ExportError::Thread)?;
    let exporter = {
        let _entered = runtime.enter();
        Arc::new(exporter::logs(&config.collector, process)?)
    };
    let queue = LogQueue::default();
    let (end, end_signal) = watch::channel(false);
    let (is_running, ended) = mpsc::channel();
    let events = queue.clone();
    let thread = task::thread("log export", move || {
        let _is_running: mpsc::Sender<()> = is_running;
        layer::exclude_thread();
        runtime.block_on(supervise_until_done("log export", move || {
            run(events.clone(), exporter.clone(), end_signal.clone())
        }));
    })
    .map_err(ExportError::Thread)?;
    // A process has one log; only tests start several.
    let _ = LOG.set(queue.clone());
    Ok((LogLayer::new(queue, config.level), LogExport { end, ended, thread: Some(thread) }))
}

async fn run(
    queue: LogQueue,
    exporter: Arc<CollectorExporter<OtlpExporter>>,
    mut ended: watch::Receiver<bool>,
) {
    // Records are made by a logger of the SDK only. This one exports nothing itself.
    let logger = SdkLoggerProvider::builder().build().logger("meridian");
    let scope = InstrumentationScope::builder("meridian").with_version(env!("CARGO_PKG_VERSION")).build();
    let mut log = OutcomeLog::default();
    loop {
        let is_last = tokio::select! {
            () = tokio::time::sleep(PERIOD) => false,
            () = queue.0.wake.notified() => false,
            _ = ended.wait_for(|ended| *ended) => true,
        };
        loop {
            let batch = queue.take_batch();
            if batch.is_empty() {
                break;
            }
            let records: Vec<_> = batch.into_iter().map(|event| record(event, &logger)).collect();
            send(&queue, &exporter, (&records, &scope), &mut log).await;
        }
        if is_last {
            return;
        }
    }
}

/// Sends events, and counts them.
async fn send(
    queue: &LogQueue,
    exporter: &CollectorExporter<OtlpExporter>,
    (records, scope): (&[SdkLogRecord], &InstrumentationScope),
    log: &mut OutcomeLog,
) {
    let CollectorExporter { otlp, timeout, last } = exporter;
    let count = records.len() as u64;
    let scoped: Vec<_> = records.iter().map(|record| (record, scope)).collect();
    let sent = tokio::time::timeout(*timeout, otlp.export(LogBatch::new(&scoped))).await;
    match sent.unwrap_or(Err(OTelSdkError::Timeout(*timeout))) {
        Ok(()) => {
            let rejected = last.take_rejected(count);
            let accepted = count - rejected.as_ref().map_or(0, |rejected| rejected.count);
            queue.0.exported.add(accepted);
            if accepted > 0 && log.is_recovery() {
                // The collector accepts events of the log again.
                tracing::info!("export of logs recovered");
            }
            if let Some(RejectedItems { count, reason }) = rejected {
                queue.0.dropped.of(DropReason::Rejected).add(count);
                if log.is_new_rejection(Instant::now()) {
                    // The collector rejected events of an export, for the `reason` that it gives, and accepted the others. The log
                    // on stderr is complete; rejected events are counted. Logged again when there was no rejection for a minute.
                    // Check the limits of the collector.
                    tracing::warn!(reason, events = count, "collector rejected events of the log");
                }
            }
        }
        Err(error) => {
            queue.0.dropped.of(DropReason::ExportFailed).add(count);
            let cause = last.take_cause();
            if log.is_new_failure() {
                // The collector cannot be reached, or rejects events. Requests are not affected, and the log on stderr is complete;
                // events are not exported, and are counted, until it recovers. Check the endpoint and the collector. `cause` has
                // the error of the connection, if the export was by HTTP and had no response.
                // `OTEL_LOGS_EXPORTER=none` is for a collector that accepts traces only.
                tracing::warn!(%error, cause, events = count, "export of logs failed");
            }
        }
    }
}

/// Converts an event to the type of the exporter.
fn record(event: LogEvent, logger: &SdkLogger) -> SdkLogRecord {
    let LogEvent { at, level, target, message, fields, trace, span, bytes: _ } = event;
    let mut record = logger.create_log_record();
    record.set_timestamp(at);
    record.set_observed_timestamp(at);
    record.set_severity_number(match level {
        Level::TRACE => Severity::Trace,
        Level::DEBUG => Severity::Debug,
        Level::INFO => Severity::Info,
        Level::WARN => Severity::Warn,
        Level::ERROR => Severity::Error,
    });
    record.set_severity_text(level.as_str());
    record.set_target(target);
    // The line of a request has no message.
    record.set_body(message.map_or_else(|| target.into(), Into::into));
    record.add_attributes(fields);
    if let Some(trace) = trace {
        let span = span.map_or(OtelSpanId::INVALID, |span| OtelSpanId::from_bytes(span.get().to_be_bytes()));
        record.set_trace_context(OtelTraceId::from_bytes(trace.get().to_be_bytes()), span, None);
    }
    record
}
