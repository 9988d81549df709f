//! Outcomes of exports, for the counters and the log lines of the tasks that export.
//!
//! `opentelemetry-otlp` returns neither the cause of a failed request by HTTP nor a partial rejection: its error is "network
//! error", and a response that rejects spans is a success. So the HTTP client stores both in [`LastOutcome`], from which the
//! task takes them after the export. By gRPC the library has the client itself: its errors have their causes, and it discards
//! a partial rejection, so that rejected spans and log records count as exported.

use crate::config::Signal;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceResponse;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Maximum length of a text of a collector, or of an error, in characters.
const TEXT_CHARS_MAX: usize = 300;
/// Time without a rejection after which another one is logged. A collector may reject single spans every few seconds.
const REJECTIONS_QUIET: Duration = Duration::from_secs(60);

/// Outcome of a request by HTTP that the exporter does not return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HttpOutcome {
    /// The request failed without a response, for this reason.
    Failed(String),
    /// The collector accepted the export in part, or none of it.
    Rejected(RejectedItems),
}

/// Spans, log records or samples of one export that a collector rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RejectedItems {
    /// Number of them, as the collector counts them.
    pub(crate) count: u64,
    /// Message of the collector, without control characters.
    pub(crate) reason: String,
}

impl RejectedItems {
    /// Reads the body of a response by HTTP; `None` if the collector accepted everything.
    pub(crate) fn read(signal: Signal, body: &[u8]) -> Option<RejectedItems> {
        let (count, message) = match signal {
            Signal::Traces => {
                let partial = ExportTraceServiceResponse::decode(body).ok()?.partial_success?;
                (partial.rejected_spans, partial.error_message)
            }
            Signal::Logs => {
                let partial = ExportLogsServiceResponse::decode(body).ok()?.partial_success?;
                (partial.rejected_log_records, partial.error_message)
            }
            Signal::Metrics => return Self::of_metrics(ExportMetricsServiceResponse::decode(body).ok()?),
        };
        Self::of(count, &message)
    }

    /// Reads a response to an export of metrics.
    pub(crate) fn of_metrics(response: ExportMetricsServiceResponse) -> Option<RejectedItems> {
        let partial = response.partial_success?;
        Self::of(partial.rejected_data_points, &partial.error_message)
    }

    fn of(count: i64, message: &str) -> Option<RejectedItems> {
        let count = u64::try_from(count).ok().filter(|count| *count > 0)?;
        let reason = if message.is_empty() { "no reason given".to_owned() } else { printable(message) };
        Some(RejectedItems { count, reason })
    }
}

/// Outcome of the last request of one exporter; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct LastOutcome(Arc<Mutex<Option<HttpOutcome>>>);

impl Default for LastOutcome {
    fn default() -> LastOutcome {
        LastOutcome(Arc::new(Mutex::independent(None)))
    }
}

impl LastOutcome {
    /// Replaces the outcome; `None` after a response that has nothing to add.
    pub(crate) fn set(&self, outcome: Option<HttpOutcome>) {
        *self.0.lock() = outcome;
    }

    /// Takes the cause of a failed export.
    pub(crate) fn take_cause(&self) -> Option<String> {
        match self.0.lock().take()? {
            HttpOutcome::Failed(cause) => Some(cause),
            HttpOutcome::Rejected(_) => None,
        }
    }

    /// Takes the rejection of an export of `items` spans or log records that succeeded.
    pub(crate) fn take_rejected(&self, items: u64) -> Option<RejectedItems> {
        match self.0.lock().take()? {
            HttpOutcome::Failed(_) => None,
            // The number is that of a peer.
            HttpOutcome::Rejected(rejected) => {
                Some(RejectedItems { count: rejected.count.min(items), ..rejected })
            }
        }
    }
}

/// Decides which outcomes are logged: the begin and the end of a failure, and the begin of a time of rejections.
#[derive(Debug, Default)]
pub(crate) struct OutcomeLog {
    is_failing: bool,
    last_rejection: Option<Instant>,
}

impl OutcomeLog {
    /// Records an export of which a collector accepted a part; returns whether a failure has ended.
    pub(crate) fn is_recovery(&mut self) -> bool {
        std::mem::take(&mut self.is_failing)
    }

    /// Records a failed export; returns whether a failure has begun.
    pub(crate) fn is_new_failure(&mut self) -> bool {
        !std::mem::replace(&mut self.is_failing, true)
    }

    /// Records a rejection; returns whether there was none for a minute.
    pub(crate) fn is_new_rejection(&mut self, now: Instant) -> bool {
        let last = self.last_rejection.replace(now);
        last.is_none_or(|last| now.saturating_duration_since(last) >= REJECTIONS_QUIET)
    }
}

/// Returns the text of an error with its sources, in one line of limited length.
pub(crate) fn error_text(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source.filter(|_| text.len() < TEXT_CHARS_MAX) {
        let cause_text = cause.to_string();
        // Some errors have the text of their source.
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    printable(&text)
}

/// Returns the begin of a text of a peer, without control characters.
fn printable(text: &str) -> String {
    text.chars().take(TEXT_CHARS_MAX).map(|sign| if sign.is_control() { ' ' } else { sign }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsPartialSuccess;
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTracePartialSuccess;
    use std::io;

    fn of_traces(rejected_spans: i64, error_message: &str) -> Vec<u8> {
        let partial_success =
            Some(ExportTracePartialSuccess { rejected_spans, error_message: error_message.to_owned() });
        ExportTraceServiceResponse { partial_success }.encode_to_vec()
    }

    #[test]
    fn a_partial_rejection_is_read_with_its_reason() {
        let read = |body: &[u8]| RejectedItems::read(Signal::Traces, body);
        let rejected = |count, reason: &str| Some(RejectedItems { count, reason: reason.to_owned() });
        assert_eq!(read(&of_traces(3, "too\nlarge\u{1b}[31m")), rejected(3, "too large [31m"));
        assert_eq!(read(&of_traces(1, "")), rejected(1, "no reason given"));
        let long = "é".repeat(TEXT_CHARS_MAX + 1);
        assert_eq!(read(&of_traces(1, &long)), rejected(1, &"é".repeat(TEXT_CHARS_MAX)));
        let partial_success =
            Some(ExportLogsPartialSuccess { rejected_log_records: 2, error_message: "old".to_owned() });
        let body = ExportLogsServiceResponse { partial_success }.encode_to_vec();
        assert_eq!(RejectedItems::read(Signal::Logs, &body), rejected(2, "old"));
    }

    #[test]
    fn a_response_without_a_rejection_and_an_unreadable_one_reject_nothing() {
        for body in [vec![], of_traces(0, ""), of_traces(0, "a warning"), of_traces(-1, "negative")] {
            assert_eq!(RejectedItems::read(Signal::Traces, &body), None, "{body:?}");
        }
        for body in [&b"{}"[..], b"\xff\xff\xff\xff", &of_traces(3, "cut")[..4]] {
            assert_eq!(RejectedItems::read(Signal::Traces, body), None, "{body:?}");
        }
    }

    #[test]
    fn an_outcome_is_taken_once_and_counts_no_more_than_was_sent() {
        let last = LastOutcome::default();
        let rejected = |count| RejectedItems { count, reason: "full".to_owned() };
        last.set(Some(HttpOutcome::Rejected(rejected(9))));
        assert_eq!(last.take_rejected(5), Some(rejected(5)), "the number is limited");
        assert_eq!(last.take_rejected(5), None);
        last.set(Some(HttpOutcome::Failed("refused".to_owned())));
        assert_eq!(last.clone().take_cause().as_deref(), Some("refused"));
        assert_eq!(last.take_cause(), None);
        last.set(Some(HttpOutcome::Failed("refused".to_owned())));
        last.set(None);
        assert_eq!(last.take_cause(), None, "a later request had a response");
    }

    #[test]
    fn failures_are_logged_once_and_rejections_once_until_there_is_none_for_a_minute() {
        let mut log = OutcomeLog::default();
        assert!(!log.is_recovery());
        assert_eq!([log.is_new_failure(), log.is_new_failure()], [true, false]);
        assert_eq!([log.is_recovery(), log.is_recovery()], [true, false]);
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        let mut at = |millis| log.is_new_rejection(after(millis));
        assert_eq!([at(0), at(1000), at(60_999)], [true, false, false]);
        assert!(at(60_999 + 60_000), "after a minute");
    }

    #[test]
    fn the_text_of_an_error_has_its_sources() {
        #[derive(Debug, thiserror::Error)]
        #[error("no connection")]
        struct Outer(#[source] io::Error);
        let text = error_text(&Outer(io::Error::other("certificate\nis invalid")));
        assert_eq!(text, "no connection: certificate is invalid");
        let long = io::Error::other("x".repeat(2 * TEXT_CHARS_MAX));
        assert_eq!(error_text(&long).len(), TEXT_CHARS_MAX);
    }
}
