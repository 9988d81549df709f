//! Events of the log: their filter, and their way from the layer of the subscriber to the queue of the export.
//!
//! The log is on stderr in any case. [`LogLayer`] copies the same events, with the same fields, into a bounded queue, from which a
//! thread exports them ([`export`]). An event that the queue has no space for is dropped and counted.
//!
//! `opentelemetry-appender-tracing` does not fit: it takes the trace from a context of OpenTelemetry, where Meridian's events have
//! it in fields, and the queue of the SDK neither counts what it drops nor excludes the events of the exporter itself.

pub mod export;
mod filter;
pub mod http;
mod layer;

pub use export::{LogExport, start};
pub use filter::{LogControl, LogFilterLayer, start_filter};
pub use layer::LogLayer;

use crate::tracer::DropReason;
use metrics::{Counter, Family, metric_set};
use opentelemetry::logs::AnyValue;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;
use supervision::Mutex;
use telemetry_core::context::{SpanId, TraceId};
use tokio::sync::Notify;
use tracing::Level;

/// Maximum size of the events that wait for the export. The line of a request has some 2 KiB, so these are 4000 lines, a quarter of
/// what stderr may buffer as text.
pub const QUEUED_BYTES_MAX: usize = 8 << 20;
/// Longest text of a field or a message, in bytes; longer text is cut.
pub const TEXT_BYTES_MAX: usize = 4 << 10;
/// Number of waiting events at which an export begins before its period is over, and limit of an export.
const BATCH_EVENTS_MAX: usize = 512;
/// Maximum size of the events of an export. A collector accepts 4 MiB by default, and encoded events are smaller than in memory.
const BATCH_BYTES_MAX: usize = 2 << 20;

/// The log of this process, for [`LogMetrics::read`]. A process has one subscriber, and so one log.
static LOG: OnceLock<LogQueue> = OnceLock::new();

/// Event of the log.
#[derive(Debug)]
pub(crate) struct LogEvent {
    at: SystemTime,
    level: Level,
    target: &'static str,
    /// Message; absent for the line of a request.
    message: Option<String>,
    fields: Vec<(&'static str, AnyValue)>,
    trace: Option<TraceId>,
    span: Option<SpanId>,
    /// Memory of the event.
    bytes: usize,
}

metric_set! {
    /// Export of the log, if it is configured.
    pub struct LogMetrics<'a> {
        /// Events of the log that the collector accepted.
        pub exported: &'a Counter = "meridian_{role}_log_records_exported_total",
        /// Events of the log that were not exported, by reason. They are on stderr.
        pub dropped: &'a Family<DropReason> = "meridian_{role}_log_records_dropped_total" ["reason"],
        /// Events of the log that wait for the next export.
        queued: usize = "meridian_{role}_log_records_queued",
        /// Size of these events.
        queued_bytes: usize = "meridian_{role}_log_queue_bytes",
        /// Limit of that size.
        queued_bytes_max: usize = "meridian_{role}_log_queue_max_bytes",
    }
}

impl LogMetrics<'_> {
    /// Returns the metrics of this process, if its log is exported.
    pub fn read() -> Option<LogMetrics<'static>> {
        LOG.get().map(LogQueue::metrics)
    }
}

/// Queue of events; clones share it.
#[derive(Clone, Default)]
pub(crate) struct LogQueue(Arc<Shared>);

#[derive(Default)]
struct Shared {
    waiting: Mutex<QueuedEvents>,
    /// Signal that many events wait.
    wake: Notify,
    exported: Counter,
    dropped: Family<DropReason>,
}

#[derive(Default)]
struct QueuedEvents {
    events: VecDeque<LogEvent>,
    bytes: usize,
}

impl LogQueue {
    /// Appends an event; if the queue is full, the event is dropped and counted.
    fn push(&self, event: LogEvent) {
        let mut waiting = self.0.waiting.lock();
        if waiting.bytes + event.bytes > QUEUED_BYTES_MAX {
            drop(waiting);
            self.0.dropped.count(DropReason::QueueFull);
            return;
        }
        let before = waiting.bytes;
        waiting.bytes += event.bytes;
        waiting.events.push_back(event);
        let is_many = waiting.events.len() == BATCH_EVENTS_MAX
            || (before < BATCH_BYTES_MAX && waiting.bytes >= BATCH_BYTES_MAX);
        drop(waiting);
        if is_many {
            self.0.wake.notify_one();
        }
    }

    /// Takes the oldest events, as many as one export may have.
    fn take_batch(&self) -> Vec<LogEvent> {
        let mut waiting = self.0.waiting.lock();
        let mut bytes = 0;
        let fits = |event: &&LogEvent| {
            bytes += event.bytes;
            bytes <= BATCH_BYTES_MAX
        };
        let count = waiting.events.iter().take(BATCH_EVENTS_MAX).take_while(fits).count();
        // An event has far less than the limit; a larger one is taken by itself.
        let count = count.max(1).min(waiting.events.len());
        let batch: Vec<_> = waiting.events.drain(..count).collect();
        waiting.bytes -= batch.iter().map(|event| event.bytes).sum::<usize>();
        batch
    }

    fn metrics(&self) -> LogMetrics<'_> {
        let Shared { waiting, exported, dropped, .. } = &*self.0;
        let (queued, queued_bytes) = {
            let waiting = waiting.lock();
            (waiting.events.len(), waiting.bytes)
        };
        LogMetrics { exported, dropped, queued, queued_bytes, queued_bytes_max: QUEUED_BYTES_MAX }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(bytes: usize) -> LogEvent {
        let (at, level, target) = (SystemTime::UNIX_EPOCH, Level::INFO, "test");
        LogEvent { at, level, target, message: None, fields: Vec::new(), trace: None, span: None, bytes }
    }

    #[test]
    fn a_full_queue_drops_and_counts_events() {
        let queue = LogQueue::default();
        queue.push(event(QUEUED_BYTES_MAX - 100));
        queue.push(event(100));
        let state = || {
            let metrics = queue.metrics();
            (metrics.queued, metrics.queued_bytes, metrics.dropped.of(DropReason::QueueFull).get())
        };
        assert_eq!(state(), (2, QUEUED_BYTES_MAX, 0), "at the limit");
        queue.push(event(1));
        assert_eq!(state(), (2, QUEUED_BYTES_MAX, 1), "past it");
        assert_eq!(queue.take_batch().len(), 1, "larger than an export");
        assert_eq!(state(), (1, 100, 1));
        queue.push(event(1));
        assert_eq!(state(), (2, 101, 1), "there is space again");
    }

    #[test]
    fn an_export_has_a_limited_number_and_size_of_events() {
        let queue = LogQueue::default();
        assert!(queue.take_batch().is_empty());
        for _ in 0..BATCH_EVENTS_MAX + 2 {
            queue.push(event(100));
        }
        assert_eq!([queue.take_batch().len(), queue.take_batch().len()], [BATCH_EVENTS_MAX, 2]);
        for _ in 0..3 {
            queue.push(event(BATCH_BYTES_MAX / 2));
        }
        assert_eq!([queue.take_batch().len(), queue.take_batch().len()], [2, 1]);
        assert_eq!(queue.metrics().queued_bytes, 0);
    }

    #[tokio::test]
    async fn events_of_the_size_of_an_export_wake_it() {
        let queue = LogQueue::default();
        // A permit of an earlier event is used at once.
        let is_woken = async || {
            tokio::select! {
                biased;
                () = queue.0.wake.notified() => true,
                () = std::future::ready(()) => false,
            }
        };
        queue.push(event(BATCH_BYTES_MAX - 1));
        assert!(!is_woken().await);
        queue.push(event(1));
        assert!(is_woken().await, "at the limit");
        queue.push(event(1));
        assert!(!is_woken().await, "once");
    }
}
