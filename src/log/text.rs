//! A line as text: as `tracing` has it, and the line of each request as cheaply as its fields allow.
//!
//! The library's own format goes through `core::fmt` for every field, its name, its quotes and the time; for the two dozen
//! fields of a request that was a seventh of all that the request cost (docs/benchmarks.md). Here the fields of such a line
//! are appended to one string. What is read is the same, but for milliseconds, which have their three decimals always.

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

/// Room for a request's line, so that it is allocated once.
const LINE_BYTES: usize = 768;

/// Writes lines as text.
#[derive(Default)]
pub(crate) struct Text {
    others: Format,
    second: Mutex<Second>,
}

/// A second since 1970, and the time up to it as it stands in a line. Lines come many to a second.
#[derive(Default)]
struct Second {
    number: u64,
    text: String,
}

impl<S, N> FormatEvent<S, N> for Text
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
        let about = event.metadata();
        if about.target() != gateway::ACCESS {
            return self.others.format_event(context, writer, event);
        }
        let mut line = String::with_capacity(LINE_BYTES);
        self.put_time(&mut line)?;
        write!(line, " {:>5} ", about.level().as_str())?;
        line.push_str(gateway::ACCESS);
        line.push(':');
        event.record(&mut Fields(&mut line));
        line.push('\n');
        writer.write_str(&line)
    }
}

impl Text {
    /// RFC 3339 with microseconds, as the library has it.
    fn put_time(&self, line: &mut String) -> fmt::Result {
        let mut second = self.second.lock();
        let mut now = since_1970();
        while second.number != now.as_secs() || second.text.is_empty() {
            let mut text = String::new();
            tracing_subscriber::fmt::time::SystemTime.format_time(&mut Writer::new(&mut text))?;
            text.truncate(text.find('.').unwrap_or(text.len()));
            *second = Second { number: now.as_secs(), text };
            // Asked once more: the library looks at the clock itself, and another second may have begun.
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

/// Appends ` name=value` for each field.
struct Fields<'a>(&'a mut String);

impl Fields<'_> {
    fn name(&mut self, field: &Field) {
        for part in [" ", field.name(), "="] {
            self.0.push_str(part);
        }
    }
}

impl Visit for Fields<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.name(field);
        decimal::push(self.0, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // Durations in milliseconds, made from microseconds; whatever else there may be some day.
        match Duration::try_from_secs_f64(value / 1e3) {
            Ok(duration) => {
                self.name(field);
                decimal::push_millis(self.0, duration);
            }
            Err(_) => self.record_debug(field, &value),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if value.bytes().any(|byte| !(b' '..=b'~').contains(&byte) || byte == b'"' || byte == b'\\') {
            return self.record_debug(field, &value);
        }
        self.name(field);
        for part in ["\"", value, "\""] {
            self.0.push_str(part);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.name(field);
        write!(self.0, "{value:?}").expect("a String takes every write");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Page {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is written of what `say` says, in our form or in the library's.
    fn written(ours: bool, say: impl Fn()) -> String {
        let (page, log) = (Page::default(), tracing_subscriber::fmt().with_ansi(false));
        let to = page.clone();
        let log = log.with_writer(move || to.clone());
        if ours {
            tracing::subscriber::with_default(log.event_format(Text::default()).finish(), say);
        } else {
            tracing::subscriber::with_default(log.finish(), say);
        }
        String::from_utf8(page.0.lock().clone()).unwrap()
    }

    #[test]
    fn a_request_is_told_as_the_library_would_tell_it() {
        let say = || {
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
            tracing::warn!(region = "a", "what is no request");
        };
        let (ours, theirs) = (written(true, say), written(false, say));
        let parts = |text: &str| -> Vec<(usize, String)> {
            let lines = text.lines().map(|line| line.split_once('Z').unwrap());
            lines.map(|(time, rest)| (time.len(), rest.to_owned())).collect()
        };
        assert_eq!(parts(&ours), parts(&theirs));
        assert_eq!(&ours[..11], &theirs[..11], "the day");
    }

    #[test]
    fn a_time_is_the_time() {
        let text = Text::default();
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
