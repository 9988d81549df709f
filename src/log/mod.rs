//! Where log lines go: to stderr, many in one write, by a thread of their own.
//!
//! Every request leaves a line. Written one at a time that is a system call for each, and a thread that is woken for
//! each; together they cost as much as deciding where the request goes. So a line is appended to what is waiting, and
//! the thread takes all of it every [`WRITE_PERIOD`]. A disk that stalls must not stall whoever has something to say:
//! when more waits than [`WAITING_BYTES_MAX`], lines are lost rather than requests, and how many is said. What a line
//! looks like is in [`text`].

mod text;

pub(crate) use text::Text;

use std::io::{self, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use supervision::{Condvar, Mutex, MutexGuard};
use tracing_subscriber::fmt::MakeWriter;

/// How long a line may wait for others: what a person who watches does not notice.
const WRITE_PERIOD: Duration = Duration::from_millis(20);
/// What may wait: about 20,000 lines, one second of a busy gateway.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// Where lines are left.
#[derive(Clone)]
pub(crate) struct Lines(Arc<Shared>);

struct Shared {
    waiting: Mutex<Waiting>,
    something: Condvar,
}

#[derive(Default)]
struct Waiting {
    text: Vec<u8>,
    lost: u64,
    ended: bool,
}

/// Writes until it is dropped; then everything that waits is written.
pub(crate) struct Writing {
    lines: Lines,
    thread: Option<JoinHandle<()>>,
}

/// Starts the thread that writes to `sink`.
pub(crate) fn write_to(sink: impl Write + Send + 'static) -> io::Result<(Lines, Writing)> {
    let lines = Lines(Arc::new(Shared {
        waiting: Mutex::independent(Waiting::default()),
        something: Condvar::new(),
    }));
    let for_thread = lines.clone();
    let thread = std::thread::Builder::new().name("log".to_owned()).spawn(move || for_thread.write(sink))?;
    Ok((lines.clone(), Writing { lines, thread: Some(thread) }))
}

impl Lines {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock()
    }

    fn write(&self, mut sink: impl Write) {
        let mut text = Vec::new();
        loop {
            let mut waiting = self.waiting();
            while waiting.text.is_empty() && !waiting.ended {
                waiting = self.0.something.wait(waiting);
            }
            if !waiting.ended {
                // Others may come; only the end hurries.
                let go_on = |waiting: &mut Waiting| !waiting.ended;
                waiting = self.0.something.wait_timeout_while(waiting, WRITE_PERIOD, go_on);
            }
            text.clear();
            std::mem::swap(&mut text, &mut waiting.text);
            let (lost, ended) = (std::mem::take(&mut waiting.lost), waiting.ended);
            drop(waiting);
            if lost > 0 {
                // A Vec takes every write.
                writeln!(text, "{lost} log lines are lost: they came faster than stderr took them").ok();
            }
            // There is nowhere else to say that stderr is gone.
            sink.write_all(&text).and_then(|()| sink.flush()).ok();
            if ended {
                return;
            }
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.lines.waiting().ended = true;
        self.lines.0.something.notify_all();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// One line: `tracing` writes it at once.
impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut waiting = self.waiting();
        if waiting.text.len() + line.len() > WAITING_BYTES_MAX {
            waiting.lost += 1;
            return Ok(line.len());
        }
        let first = waiting.text.is_empty();
        waiting.text.extend_from_slice(line);
        drop(waiting);
        if first {
            self.0.something.notify_all();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Lines;

    fn make_writer(&'a self) -> Lines {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    type Writes = Arc<Mutex<Vec<Vec<u8>>>>;

    /// Takes a write when it is allowed one, and remembers all.
    struct Disk {
        allowed: mpsc::Receiver<()>,
        written: Writes,
    }

    impl Write for Disk {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.allowed.recv().ok();
            self.written.lock().push(text.to_vec());
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn disk() -> (Disk, mpsc::Sender<()>, Writes) {
        let (allow, allowed) = mpsc::channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        (Disk { allowed, written: written.clone() }, allow, written)
    }

    #[test]
    fn every_line_is_written_in_order_before_the_end_and_many_at_once() {
        let (disk, allow, written) = disk();
        drop(allow); // Of a sender that is gone nobody waits for permission.
        let (mut lines, writing) = write_to(disk).unwrap();
        let all: Vec<String> = (0..1_000).map(|number| format!("line {number}\n")).collect();
        for line in &all {
            lines.write_all(line.as_bytes()).unwrap();
        }
        drop(writing);
        let written = written.lock();
        assert_eq!(String::from_utf8(written.concat()).unwrap(), all.concat());
        assert!(written.len() < 500, "{} writes for {} lines", written.len(), all.len());
    }

    #[test]
    fn a_disk_that_stalls_loses_lines_beyond_the_bound_and_says_how_many() {
        let (disk, allow, written) = disk();
        let (mut lines, writing) = write_to(disk).unwrap();
        lines.write_all(b"stalls\n").unwrap();
        while !lines.waiting().text.is_empty() {
            std::thread::yield_now(); // until the disk has it and waits
        }
        let line = vec![b'x'; 1 << 10];
        for _ in 0..WAITING_BYTES_MAX / line.len() {
            lines.write_all(&line).unwrap();
        }
        assert_eq!(lines.waiting().lost, 0, "at the bound");
        lines.write_all(b"one more\n").unwrap();
        assert_eq!(lines.waiting().lost, 1, "one past it");
        drop(allow);
        drop(writing);
        let text = String::from_utf8(written.lock().concat()).unwrap();
        assert!(text.ends_with("1 log lines are lost: they came faster than stderr took them\n"));
        assert_eq!(text.matches("one more").count(), 0);
    }
}
