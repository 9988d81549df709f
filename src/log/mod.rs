//! Log output to stderr: many lines per write, by a separate thread.
//!
//! Every request has a log line. A write per line costs a system call and a thread wakeup each; together they cost as much
//! as the routing decision. So lines are appended to a buffer, and the thread writes the whole buffer every
//! [`WRITE_PERIOD`]. A slow disk must not block requests: when more than [`BUFFERED_BYTES_MAX`] are waiting, lines are dropped
//! and counted. The format of a line is in [`text`]; [`settings`] has the variables that configure the log,
//! and [`start`](mod@start) puts it together.

mod settings;
mod start;
mod text;

pub(crate) use settings::{LogFormat, LogSettings};
pub(crate) use start::{log_to_stderr, start};
pub(crate) use text::TextFormat;

use std::io::{self, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use supervision::{Condvar, Mutex, MutexGuard};
use tracing_subscriber::fmt::MakeWriter;

/// Maximum delay of a line; not noticeable to a person who watches the log.
const WRITE_PERIOD: Duration = Duration::from_millis(20);
/// Maximum bytes in the buffer: about 20,000 lines, one second of a busy gateway.
const BUFFERED_BYTES_MAX: usize = 4 << 20;

/// Writer that appends lines to the buffer.
#[derive(Clone)]
pub(crate) struct LogWriter(Arc<Shared>);

struct Shared {
    buffer: Mutex<LogBuffer>,
    changed: Condvar,
}

#[derive(Default)]
struct LogBuffer {
    text: Vec<u8>,
    dropped: u64,
    ended: bool,
}

/// Handle of the writer thread; dropping it writes the rest of the buffer and joins the thread.
pub(crate) struct LogWriterThread {
    lines: LogWriter,
    thread: Option<JoinHandle<()>>,
}

/// Starts the thread that writes to `sink`.
pub(crate) fn write_to(sink: impl Write + Send + 'static) -> io::Result<(LogWriter, LogWriterThread)> {
    let lines = LogWriter(Arc::new(Shared {
        buffer: Mutex::independent(LogBuffer::default()),
        changed: Condvar::new(),
    }));
    let for_thread = lines.clone();
    let thread = std::thread::Builder::new().name("log".to_owned()).spawn(move || for_thread.write(sink))?;
    Ok((lines.clone(), LogWriterThread { lines, thread: Some(thread) }))
}

impl LogWriter {
    fn buffer(&self) -> MutexGuard<'_, LogBuffer> {
        self.0.buffer.lock()
    }

    fn write(&self, mut sink: impl Write) {
        let mut text = Vec::new();
        loop {
            let mut buffer = self.buffer();
            while buffer.text.is_empty() && !buffer.ended {
                buffer = self.0.changed.wait(buffer);
            }
            if !buffer.ended {
                // Wait for further lines, unless the log ends.
                let is_open = |buffer: &mut LogBuffer| !buffer.ended;
                buffer = self.0.changed.wait_timeout_while(buffer, WRITE_PERIOD, is_open);
            }
            text.clear();
            std::mem::swap(&mut text, &mut buffer.text);
            let (dropped, ended) = (std::mem::take(&mut buffer.dropped), buffer.ended);
            drop(buffer);
            if dropped > 0 {
                // Writing to a Vec cannot fail.
                writeln!(text, "{dropped} log lines dropped: stderr is too slow").ok();
            }
            // A failure of stderr cannot be reported anywhere.
            sink.write_all(&text).and_then(|()| sink.flush()).ok();
            if ended {
                return;
            }
        }
    }
}

impl Drop for LogWriterThread {
    fn drop(&mut self) {
        self.lines.buffer().ended = true;
        self.lines.0.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// `tracing` writes each line with one call.
impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut buffer = self.buffer();
        if buffer.text.len() + line.len() > BUFFERED_BYTES_MAX {
            buffer.dropped += 1;
            return Ok(line.len());
        }
        let first = buffer.text.is_empty();
        buffer.text.extend_from_slice(line);
        drop(buffer);
        if first {
            self.0.changed.notify_all();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = LogWriter;

    fn make_writer(&'a self) -> LogWriter {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    type Writes = Arc<Mutex<Vec<Vec<u8>>>>;

    /// Sink that blocks each write until it is allowed, and records all writes.
    struct BlockingSink {
        allowed: mpsc::Receiver<()>,
        written: Writes,
    }

    impl Write for BlockingSink {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.allowed.recv().ok();
            self.written.lock().push(text.to_vec());
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn sink() -> (BlockingSink, mpsc::Sender<()>, Writes) {
        let (allow, allowed) = mpsc::channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        (BlockingSink { allowed, written: written.clone() }, allow, written)
    }

    #[test]
    fn all_lines_are_written_in_order_and_in_few_writes() {
        let (sink, allow, written) = sink();
        drop(allow); // Without a sender, writes do not block.
        let (mut lines, thread) = write_to(sink).unwrap();
        let all: Vec<String> = (0..1_000).map(|number| format!("line {number}\n")).collect();
        for line in &all {
            lines.write_all(line.as_bytes()).unwrap();
        }
        drop(thread);
        let written = written.lock();
        assert_eq!(String::from_utf8(written.concat()).unwrap(), all.concat());
        assert!(written.len() < 500, "{} writes for {} lines", written.len(), all.len());
    }

    #[test]
    fn a_blocked_sink_drops_and_counts_lines_beyond_the_limit() {
        let (sink, allow, written) = sink();
        let (mut lines, thread) = write_to(sink).unwrap();
        lines.write_all(b"stalls\n").unwrap();
        while !lines.buffer().text.is_empty() {
            std::thread::yield_now(); // until the sink blocks on it
        }
        let line = vec![b'x'; 1 << 10];
        for _ in 0..BUFFERED_BYTES_MAX / line.len() {
            lines.write_all(&line).unwrap();
        }
        assert_eq!(lines.buffer().dropped, 0, "at the limit");
        lines.write_all(b"one more\n").unwrap();
        assert_eq!(lines.buffer().dropped, 1, "one past it");
        drop(allow);
        drop(thread);
        let text = String::from_utf8(written.lock().concat()).unwrap();
        assert!(text.ends_with("1 log lines dropped: stderr is too slow\n"));
        assert_eq!(text.matches("one more").count(), 0);
    }
}
