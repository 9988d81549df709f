//! Layer of the subscriber that copies events into the queue.

use super::{LogEvent, LogQueue, TEXT_BYTES_MAX};
use crate::config::LogLevel;
use opentelemetry::logs::AnyValue;
use std::cell::Cell;
use std::fmt::Debug;
use std::time::SystemTime;
use telemetry_core::context::{SpanId, TraceId};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

thread_local! {
    /// Whether this thread exports the log.
    static IS_EXPORTER: Cell<bool> = const { Cell::new(false) };
}

/// Excludes the events of this thread: with `MERIDIAN_LOG=trace` each export would cause the next one.
pub(super) fn exclude_thread() {
    IS_EXPORTER.set(true);
}

/// Layer that copies the events of the log into the queue of the export.
pub struct LogLayer {
    queue: LogQueue,
    level: LevelFilter,
}

impl LogLayer {
    pub(super) fn new(queue: LogQueue, level: LogLevel) -> LogLayer {
        let level = match level {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        };
        LogLayer { queue, level }
    }
}

impl<S: Subscriber> Layer<S> for LogLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        if *metadata.level() > self.level || IS_EXPORTER.get() {
            return;
        }
        let mut copied = LogEvent {
            at: SystemTime::now(),
            level: *metadata.level(),
            target: metadata.target(),
            message: None,
            fields: Vec::with_capacity(metadata.fields().len()),
            trace: None,
            span: None,
            bytes: size_of::<LogEvent>(),
        };
        event.record(&mut FieldCopier(&mut copied));
        copied.bytes += copied.fields.capacity() * size_of::<(&str, AnyValue)>();
        self.queue.push(copied);
    }
}

/// Visitor that copies the fields of an event.
struct FieldCopier<'a>(&'a mut LogEvent);

impl FieldCopier<'_> {
    fn put(&mut self, field: &Field, value: impl Into<AnyValue>) {
        self.0.fields.push((field.name(), value.into()));
    }

    fn text(&mut self, field: &Field, mut text: String) {
        match field.name() {
            "trace_id" if TraceId::parse(&text).is_some() => self.0.trace = TraceId::parse(&text),
            "span_id" if SpanId::parse(&text).is_some() => self.0.span = SpanId::parse(&text),
            // Also an identifier of another form.
            name => {
                if text.len() > TEXT_BYTES_MAX {
                    text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
                    text.shrink_to_fit();
                }
                self.0.bytes += text.capacity();
                if name == "message" {
                    self.0.message = Some(text);
                } else {
                    self.put(field, text);
                }
            }
        }
    }
}

impl Visit for FieldCopier<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.put(field, value),
            // OTLP has signed numbers only.
            Err(_) => self.text(field, value.to_string()),
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.text(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry::logs::AnyValue::{Boolean, Double, Int};
    use tracing::Level;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::registry;

    fn recorded(level: LogLevel, emit: impl FnOnce()) -> Vec<LogEvent> {
        let queue = LogQueue::default();
        tracing::subscriber::with_default(registry().with(LogLayer::new(queue.clone(), level)), emit);
        queue.take_batch()
    }

    fn only(level: LogLevel, emit: impl FnOnce()) -> LogEvent {
        let mut events = recorded(level, emit);
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    #[test]
    fn an_event_is_copied_with_its_fields_and_its_trace() {
        let (none, error): (Option<u64>, _) = (None, std::io::Error::other("no space"));
        let event = only(LogLevel::Trace, || {
            tracing::warn!(
                target: "test",
                id = "r-1",
                trace_id = "0af7651916cd43dd8448eb211c80319c",
                span_id = %"b7ad6b7169203331",
                status = 200_u16,
                less = -3,
                share = 0.5,
                large = u64::MAX,
                is_last = true,
                none,
                %error,
                "disk {}", "full"
            );
        });
        let message = event.message.as_deref();
        assert_eq!((event.level, event.target, message), (Level::WARN, "test", Some("disk full")));
        assert_eq!(event.trace.map(TraceId::text).as_deref(), Some("0af7651916cd43dd8448eb211c80319c"));
        assert_eq!(event.span.map(SpanId::text).as_deref(), Some("b7ad6b7169203331"));
        let text = |text: &'static str| AnyValue::from(text);
        let expected = [
            ("id", text("r-1")),
            ("status", Int(200)),
            ("less", Int(-3)),
            ("share", Double(0.5)),
            ("large", text("18446744073709551615")),
            ("is_last", Boolean(true)),
            ("error", text("no space")),
        ];
        assert_eq!(event.fields, expected);
        assert!(event.bytes > size_of::<LogEvent>() + 7 * size_of::<(&str, AnyValue)>());
    }

    #[test]
    fn a_long_text_is_cut_at_its_limit() {
        let length = |length: usize| {
            let event = only(LogLevel::Trace, || tracing::info!(value = "é".repeat(length / 2), "text"));
            assert!(event.bytes >= length.min(TEXT_BYTES_MAX));
            match &event.fields[0].1 {
                AnyValue::String(text) => text.as_str().len(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!([length(TEXT_BYTES_MAX), length(TEXT_BYTES_MAX + 2)], [TEXT_BYTES_MAX; 2]);
    }

    #[test]
    fn events_below_the_level_and_those_of_the_exporter_are_not_copied() {
        fn emit() {
            tracing::debug!("below");
            tracing::info!("at");
            tracing::error!("above");
        }
        let events = recorded(LogLevel::Info, emit);
        let messages: Vec<_> = events.into_iter().filter_map(|event| event.message).collect();
        assert_eq!(messages, ["at", "above"]);
        let of_exporter = std::thread::spawn(|| {
            exclude_thread();
            recorded(LogLevel::Trace, emit).len()
        });
        assert_eq!(of_exporter.join().expect("no panic"), 0);
    }
}
