//! Export of the metrics to a collector, beside `/metrics`.
//!
//! One task collects the values of all metrics in each interval ([`metrics::MetricsSnapshot`]), converts them ([`convert`]) and sends them
//! ([`client`]). Values are totals since the start of the process, so nothing is queued: an export that fails is counted and not
//! repeated, and the next one has the current values. Nothing waits for the task, except a process that stops, for the last export
//! ([`LAST_EXPORT`]).
//!
//! The exporter of `opentelemetry-otlp` does not fit: it exports the instruments of its SDK only, and the types of its data cannot be
//! made from other values.

mod client;
mod convert;

use crate::config::MetricsConfig;
use crate::exporter::{self, ExportError, Process};
use crate::outcome::{OutcomeLog, RejectedItems};
use ::metrics::{Counter, MetricsSnapshot, build, metric_set};
use client::{MetricsClient, SendError};
use convert::{ExportTimes, corrected_start, requests};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::resource::v1::Resource;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};
use supervision::task::supervise_until_done;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

/// Time for the last export of a process that stops.
const LAST_EXPORT: Duration = Duration::from_secs(1);

/// Counters of the exports of this process, for [`MetricExports::read`]. A process exports its metrics once.
static COUNTS: OnceLock<Arc<ExportCounts>> = OnceLock::new();

#[derive(Debug, Default)]
struct ExportCounts {
    exported: Counter,
    failed: Counter,
}

metric_set! {
    /// Export of the metrics, if it is configured.
    pub struct MetricExports<'a> {
        /// Exports of the metrics that the collector accepted.
        pub exported: &'a Counter = "meridian_{role}_metric_exports_total",
        /// Exports of the metrics that failed, or that the collector rejected in part. The next one has the current values.
        pub failed: &'a Counter = "meridian_{role}_metric_export_failures_total",
    }
}

impl ExportCounts {
    fn metrics(&self) -> MetricExports<'_> {
        MetricExports { exported: &self.exported, failed: &self.failed }
    }
}

impl MetricExports<'_> {
    /// Returns the metrics of this process, if its metrics are exported.
    pub fn read() -> Option<MetricExports<'static>> {
        COUNTS.get().map(|counts| counts.metrics())
    }
}

/// Task that exports metrics; ended by [`MetricsExport::finish`], and aborted on drop.
pub struct MetricsExport {
    task: JoinHandle<()>,
    end: watch::Sender<bool>,
    counts: Arc<ExportCounts>,
}

impl MetricsExport {
    /// Returns the metrics of this export.
    pub fn metrics(&self) -> MetricExports<'_> {
        self.counts.metrics()
    }

    /// Exports the last values, for at most a second, and ends the task. An export in flight is dropped, because its values are
    /// older.
    pub async fn finish(mut self) {
        self.end.send_replace(true);
        if tokio::time::timeout(LAST_EXPORT, &mut self.task).await.is_err() {
            // The last values are lost. The task ends before what it reads does.
            self.task.abort();
            (&mut self.task).await.ok();
        }
    }
}

impl Drop for MetricsExport {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts the export of the metrics of a process, of which `snapshot` returns the current values; must be called in a runtime.
///
/// # Errors
///
/// When the client cannot be created. A collector that cannot be reached is no error.
pub fn start(
    config: &MetricsConfig,
    process: Process<'_>,
    snapshot: impl Fn() -> MetricsSnapshot + Send + Sync + 'static,
) -> Result<MetricsExport, ExportError> {
    let counts = Arc::new(ExportCounts::default());
    let source = Arc::new(MetricsSource {
        snapshot: Box::new(snapshot),
        resource: convert::resource(&exporter::resource(&config.collector, process)),
        client: MetricsClient::new(&config.collector)?,
        counts: counts.clone(),
    });
    // Only tests start several.
    let _ = COUNTS.set(counts.clone());
    let (end, ended) = watch::channel(false);
    let interval = config.interval;
    let task = tokio::spawn(supervise_until_done("metrics export", move || {
        run(source.clone(), interval, ended.clone())
    }));
    Ok(MetricsExport { task, end, counts })
}

/// Values that are exported, and the client that sends them.
struct MetricsSource {
    snapshot: Box<dyn Fn() -> MetricsSnapshot + Send + Sync>,
    resource: Resource,
    client: MetricsClient,
    counts: Arc<ExportCounts>,
}

/// State of the task between two exports.
struct ExportState {
    log: OutcomeLog,
    /// Start of the counters, by the setting of the clock at the last export.
    start: SystemTime,
}

async fn run(source: Arc<MetricsSource>, interval: Duration, mut ended: watch::Receiver<bool>) {
    let mut state = ExportState { log: OutcomeLog::default(), start: build::started() };
    tokio::select! {
        () = export_periodically(&source, interval, &mut state) => {}
        _ = ended.wait_for(|ended| *ended) => {}
    }
    export(&source, &mut state).await;
}

/// Exports the current values in each interval, and never returns.
async fn export_periodically(source: &MetricsSource, interval: Duration, state: &mut ExportState) {
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    // A slow export does not cause others in quick succession.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        export(source, state).await;
    }
}

/// Exports the current values once, and counts the outcome.
async fn export(source: &MetricsSource, state: &mut ExportState) {
    let MetricsSource { snapshot, resource, client, counts } = source;
    let now = SystemTime::now();
    state.start = corrected_start(state.start, build::elapsed(), now);
    let messages = requests(&snapshot(), resource, ExportTimes::new(state.start, now));
    let outcome = send(client, messages).await;
    record(outcome, counts, &mut state.log);
}

/// Outcome of an export; an accepted one has neither.
#[derive(Default)]
struct ExportOutcome {
    /// Error of the first message that failed.
    error: Option<String>,
    /// Samples that the collector rejected of other messages.
    rejected: Option<RejectedItems>,
}

/// Sends the messages of an export. One that the collector rejects does not stop the others: it may be rejected in each export.
async fn send(client: &MetricsClient, messages: Vec<ExportMetricsServiceRequest>) -> ExportOutcome {
    let mut outcome = ExportOutcome::default();
    for message in messages {
        match client.send(message).await {
            Ok(None) => {}
            Ok(Some(RejectedItems { count, reason })) => {
                let before = outcome.rejected.map_or(0, |before| before.count);
                outcome.rejected = Some(RejectedItems { count: before.saturating_add(count), reason });
            }
            Err(SendError::Rejected(error)) => outcome.error = outcome.error.or(Some(error)),
            Err(SendError::NoResponse(error)) => {
                outcome.error = outcome.error.or(Some(error));
                return outcome;
            }
        }
    }
    outcome
}

/// Counts and logs an export once, however many of its messages failed.
fn record(outcome: ExportOutcome, counts: &ExportCounts, log: &mut OutcomeLog) {
    let ExportOutcome { error, rejected } = outcome;
    if let Some(error) = error {
        counts.failed.add(1);
        if log.is_new_failure() {
            // The collector cannot be reached, or rejects metrics. Requests and `/metrics` are not affected; exports that fail
            // are counted, and the next one has the current values. Check the endpoint and the collector.
            // `OTEL_METRICS_EXPORTER=none` is for a collector that accepts no metrics.
            tracing::warn!(error, "export of metrics failed");
        }
        return;
    }
    if log.is_recovery() {
        // The collector accepts metrics again.
        tracing::info!("export of metrics recovered");
    }
    let Some(RejectedItems { count, reason }) = rejected else {
        counts.exported.add(1);
        return;
    };
    counts.failed.add(1);
    if log.is_new_rejection(Instant::now()) {
        // The collector rejected samples of an export, for the `reason` that it gives, and accepted the others. Requests and
        // `/metrics` are not affected. Logged again when there was no rejection for a minute. Check the limits of the collector.
        tracing::warn!(reason, samples = count, "collector rejected metrics");
    }
}
