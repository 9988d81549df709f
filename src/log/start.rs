//! Subscriber of the process: the lines on stderr, the filter, and the export.

use super::{LogFormat, LogSettings, LogWriterThread, TextFormat, write_to};
use telemetry::log_filter::FilterLevel;
use telemetry::logs::{self, LogFilterLayer, LogLayer};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{fmt, registry};

/// Logs to stderr at `level`, or as `MERIDIAN_LOG` says ([`LogFilter`](telemetry::log_filter::LogFilter)), until the returned value is
/// dropped. `MERIDIAN_LOG_FORMAT=json` writes a JSON object per line.
///
/// # Errors
///
/// When a variable is invalid.
pub(crate) fn log_to_stderr(level: FilterLevel) -> Result<Option<LogWriterThread>, Vec<String>> {
    Ok(start(LogSettings::of_process(level)?, None))
}

/// Logs to stderr, and copies the same events to the export if there is one.
pub(crate) fn start(settings: LogSettings, export: Option<LogLayer>) -> Option<LogWriterThread> {
    let LogSettings { filter, format } = settings;
    let filter = logs::start_filter(filter);
    let log = fmt::layer().with_ansi(false);
    // Without a writer thread, each line is written synchronously.
    match (write_to(std::io::stderr()), format) {
        (Ok((lines, writing)), LogFormat::Json) => {
            install(registry().with(log.json().flatten_event(true).with_writer(lines)), filter, export);
            Some(writing)
        }
        (Ok((lines, writing)), LogFormat::Text) => {
            let log = log.event_format(TextFormat::default()).with_writer(lines);
            install(registry().with(log), filter, export);
            Some(writing)
        }
        (Err(_), LogFormat::Json) => {
            let log = log.json().flatten_event(true).with_writer(std::io::stderr);
            install(registry().with(log), filter, export);
            None
        }
        (Err(_), LogFormat::Text) => {
            let log = log.event_format(TextFormat::default()).with_writer(std::io::stderr);
            install(registry().with(log), filter, export);
            None
        }
    }
}

/// Makes this subscriber, with the filter and with the layer of the export if there is one, that of the process.
fn install<S>(subscriber: S, filter: LogFilterLayer, export: Option<LogLayer>)
where
    S: tracing::Subscriber + Send + Sync + 'static,
{
    match export {
        Some(export) => subscriber.with(filter).with(export).init(),
        None => subscriber.with(filter).init(),
    }
}
