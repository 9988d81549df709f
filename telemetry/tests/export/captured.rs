//! Log of a test.

use std::io;
use std::sync::{Arc, Mutex};
use tracing::subscriber::DefaultGuard;
use tracing::{Level, Subscriber};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, fmt};

/// Lines of a log; clones share them.
#[derive(Clone, Default)]
pub(super) struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    /// Captures the log of this thread, and so of a test with a runtime of one thread, until the guard is dropped.
    pub(super) fn start() -> (CapturedLog, DefaultGuard) {
        let log = CapturedLog::default();
        let subscriber = fmt().with_ansi(false).with_max_level(Level::INFO).with_writer(log.clone()).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    /// Returns a layer that captures the log of a subscriber.
    pub(super) fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(self) -> impl Layer<S> {
        fmt::layer().with_ansi(false).with_writer(self)
    }

    /// Returns the lines.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl io::Write for CapturedLog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for CapturedLog {
    type Writer = CapturedLog;

    fn make_writer(&'a self) -> CapturedLog {
        self.clone()
    }
}
