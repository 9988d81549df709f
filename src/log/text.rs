//! Text format of log lines: the default of `tracing`, with a faster implementation for the line of each request.
//!
//! The library's own format uses `core::fmt` for every field, its name, its quotes and the time; for the two dozen fields of
//! a request that was a seventh of the request's total cost (docs/benchmarks.md). This implementation appends the fields of
//! such a line to one string. The output is the same, except that milliseconds always have three decimals.

use gateway_core::decimal;
use std::fmt::{self, Debug, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use supervision::Mutex;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Initial capacity of a request's line, enough to allocate it once.
const LINE_BYTES: usize = 768;

/// Formatter of log lines as text.
#[derive(Default)]
pub(crate) struct TextFormat {
    default_format: Format,
    second: Mutex<CachedSecond>,
}

/// A second since 1970 and its text form. Many lines share a second.
#[derive(Default)]
struct CachedSecond {
    number: u64,
    text: String,
}

impl<S, N> FormatEvent<S, N> for TextFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        if metadata.target() != gateway::ACCESS {
            return self.default_format.format_event(context, writer, event);
        }
        let mut line = String::with_capacity(LINE_BYTES);
        self.put_time(&mut line)?;
        write!(line, " {:>5} ", metadata.level().as_str())?;
        line.push_str(gateway::ACCESS);
        line.push(':');
        event.record(&mut FieldWriter(&mut line));
        line.push('\n');
        writer.write_str(&line)
    }
}

impl TextFormat {
    /// Appends the time in RFC 3339 with microseconds, like the library.
    fn put_time(&self, line: &mut String) -> fmt::Result {
        let mut second = self.second.lock();
        let mut now = since_1970();
        while second.number != now.as_secs() || second.text.is_empty() {
            let mut text = String::new();
            tracing_subscriber::fmt::time::SystemTime.format_time(&mut Writer::new(&mut text))?;
            text.truncate(text.find('.').unwrap_or(text.len()));
            *second = CachedSecond { number: now.as_secs(), text };
            // Read again: the library reads the clock itself, and the next second may have begun.
            now = since_1970();
        }
        line.push_str(&second.text);
        drop(second);
        line.push('.');
        decimal::push_padded(line, now.subsec_micros().into(), 6);
        line.push('Z');
        Ok(())
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Visitor that appends ` name=value` for each field.
struct FieldWriter<'a>(&'a mut String);

impl FieldWriter<'_> {
    fn name(&mut self, field: &Field) {
        for part in [" ", field.name(), "="] {
            self.0.push_str(part);
        }
    }
}

impl Visit for FieldWriter<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.name(field);
        decimal::push(self.0, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // Durations in milliseconds, computed from microseconds; other values use the default format.
        match Duration::try_from_secs_f64(value / 1e3) {
            Ok(duration) => {
                self.name(field);
                decimal::push_millis(self.0, duration);
            }
            Err(_) => self.record_debug(field, &value),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        // Every byte is read, so that several are compared at once.
        let must_escape = value.bytes().fold(false, |found, byte| found | !is_plain(byte));
        if must_escape {
            return self.record_debug(field, &value);
        }
        self.name(field);
        for part in ["\"", value, "\""] {
            self.0.push_str(part);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.name(field);
        write!(self.0, "{value:?}").expect("writing to a String cannot fail");
    }
}

/// Returns whether a byte is written as it is between quotes.
fn is_plain(byte: u8) -> bool {
    (b' '..=b'~').contains(&byte) & (byte != b'"') & (byte != b'\\')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct MemoryWriter(Arc<Mutex<Vec<u8>>>);

    impl io::Write for MemoryWriter {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the output of the events that `emit` creates, in our format or the library's.
    fn written(ours: bool, emit: impl Fn()) -> String {
        let (output, log) = (MemoryWriter::default(), tracing_subscriber::fmt().with_ansi(false));
        let to = output.clone();
        let log = log.with_writer(move || to.clone());
        if ours {
            tracing::subscriber::with_default(log.event_format(TextFormat::default()).finish(), emit);
        } else {
            tracing::subscriber::with_default(log.finish(), emit);
        }
        String::from_utf8(output.0.lock().clone()).unwrap()
    }

    #[test]
    fn a_request_line_is_formatted_like_by_the_library() {
        let emit = || {
            let (none, some): (Option<u64>, Option<u64>) = (None, Some(u64::MAX));
            tracing::info!(
                target: gateway::ACCESS,
                id = "req-1",
                odd = "a \"b\" \\ c\td",
                trail = "aws/us-east-1:first:ok:1.250",
                status = 200_u16,
                none,
                some,
                less = -3,
                shown = %"no quotes",
                total_ms = 1.125,
                strange = f64::NAN,
            );
            tracing::warn!(region = "a", "an event other than a request");
        };
        let (ours, theirs) = (written(true, emit), written(false, emit));
        let parts = |text: &str| -> Vec<(usize, String)> {
            let lines = text.lines().map(|line| line.split_once('Z').unwrap());
            lines.map(|(time, rest)| (time.len(), rest.to_owned())).collect()
        };
        assert_eq!(parts(&ours), parts(&theirs));
        assert_eq!(&ours[..11], &theirs[..11], "the day");
    }

    #[test]
    fn the_time_never_goes_back() {
        let text = TextFormat::default();
        let mut before = String::new();
        for _ in 0..20_000 {
            let mut line = String::new();
            text.put_time(&mut line).unwrap();
            assert!(
                line >= before && line.len() == "2026-11-21T20:00:00.000000Z".len(),
                "{line} after {before}"
            );
            before = line;
            std::hint::spin_loop();
        }
    }
}
