//! Download of the files of a model: in parts, by several connections at once, resumed and verified.
//!
//! ```text
//! files ─▶ parts ─▶ queue ─▶ connections ─▶ partial files ─▶ digests
//! ```
//!
//! Files are divided into parts ([`DownloadPolicy::part_bytes`]), which wait in one queue in the order of the files; each
//! connection takes the next part. So a large file uses all connections, and many small ones do as well. The connection that
//! completes a file verifies its digest while the others go on. A wrong digest of a file that an earlier pull began causes
//! one download from the start, since the earlier bytes may be the wrong ones; any other wrong digest fails the pull.
//!
//! Connections are threads, because hashing and writing block. The thread of the caller reports the progress.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use supervision::Mutex;

use super::error::PullError;
use super::manifest::ManifestFileV1;
use super::origin::{DownloadPolicy, FetchError, ModelOrigin, RemoteFile, Retrier, SLOW_BYTES_PER_SECOND};
use super::partial::RangedPartial;
use super::progress::PullObserver;
use super::space;
use super::staging::Staging;
use super::sums::ListedFile;
use super::web::truncated;

/// Interval of progress reports.
const REPORT_PERIOD: Duration = Duration::from_millis(100);
/// Bytes of a failed request that count as progress: after less the next failure is a consecutive one.
const PROGRESS_BYTES_MIN: u64 = 64 << 10;
/// Maximum size of a file: the largest files on the hub have 50 GB.
const FILE_BYTES_MAX: u64 = 256 << 30;

/// Requests the sizes of files, by several connections.
pub(super) fn stat(
    origin: &dyn ModelOrigin,
    listed: &[ListedFile],
    policy: DownloadPolicy,
    progress: &mut dyn PullObserver,
) -> Result<Vec<RemoteFile>, PullError> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let found = Mutex::independent(vec![None; listed.len()]);
    let failure = Mutex::independent(None);
    let retrier = Retrier { host: origin.host(), policy, stop: &stop };
    let work = || {
        while let Some((index, file)) = take(&next, listed).filter(|_| !stop.load(Ordering::Relaxed)) {
            let ListedFile { path, sha256 } = file;
            let what = origin.describe(path);
            let stat = retrier.run(&what, &mut || origin.stat(path, Some(sha256)));
            match stat.and_then(|file| within_limit(origin, &what, file)) {
                Ok(file) => found.lock()[index] = Some(file),
                Err(error) => fail(error, &failure, &stop),
            }
        }
    };
    run(policy.connections.min(listed.len()), &work, &mut || {
        if progress.is_cancelled() {
            fail(PullError::Cancelled, &failure, &stop);
        }
    });
    match failure.lock().take() {
        Some(error) => Err(error),
        None => Ok(found.lock().drain(..).flatten().collect()),
    }
}

fn within_limit(origin: &dyn ModelOrigin, what: &str, file: RemoteFile) -> Result<RemoteFile, PullError> {
    if file.bytes <= FILE_BYTES_MAX {
        return Ok(file);
    }
    let (host, what, bytes) = (origin.host(), what.to_owned(), file.bytes);
    Err(PullError::TooLarge { host, what, bytes, limit: FILE_BYTES_MAX })
}

/// Downloads files into the staging folder, and verifies them.
pub(super) fn download(
    origin: &dyn ModelOrigin,
    files: &[RemoteFile],
    staging: &Staging,
    policy: DownloadPolicy,
    progress: &mut dyn PullObserver,
) -> Result<Vec<ManifestFileV1>, PullError> {
    let download = Download::open(origin, files, staging, policy)?;
    let total: u64 = files.iter().map(|file| file.bytes).sum();
    space::check(staging.partials(), total - download.done.load(Ordering::Relaxed))?;
    let connections = policy.connections.clamp(1, download.queue.lock().len().max(1));
    run(connections, &|| download.work(), &mut || {
        progress.bytes(download.done.load(Ordering::Relaxed), Some(total));
        if progress.is_cancelled() {
            fail(PullError::Cancelled, &download.failure, &download.stop);
        }
    });
    if let Some(error) = download.failure.lock().take() {
        return Err(error);
    }
    progress.bytes(total, Some(total));
    let mut described = Vec::new();
    let digests = download.files.iter().map(|file| file.digest.lock().take());
    for ((remote, file), digest) in files.iter().zip(&download.files).zip(digests) {
        staging.adopt(file.partial.path(), &remote.path)?;
        let sha256 = digest.expect("a download without failure has verified each file");
        described.push(ManifestFileV1 { path: remote.path.clone(), bytes: remote.bytes, sha256 });
    }
    Ok(described)
}

/// Download of several files.
struct Download<'a> {
    origin: &'a dyn ModelOrigin,
    policy: DownloadPolicy,
    files: Vec<FileDownload<'a>>,
    /// Parts and files that no connection has taken.
    queue: Mutex<VecDeque<DownloadStep>>,
    /// Bytes of all files that have arrived.
    done: AtomicU64,
    /// First failure.
    failure: Mutex<Option<PullError>>,
    /// Set by the first failure.
    stop: AtomicBool,
}

/// Download of one file.
struct FileDownload<'a> {
    remote: &'a RemoteFile,
    partial: RangedPartial,
    /// Parts that are not complete.
    parts_left: AtomicUsize,
    /// Whether an earlier pull has begun the file.
    is_resumed: AtomicBool,
    /// Digest of the verified file.
    digest: Mutex<Option<String>>,
}

/// Step of a connection.
#[derive(Clone, Copy, Debug)]
enum DownloadStep {
    /// Downloads the missing range of a part.
    Part { file: usize, part: usize },
    /// Verifies a complete file.
    Verify { file: usize },
}

impl<'a> Download<'a> {
    fn open(
        origin: &'a dyn ModelOrigin,
        files: &'a [RemoteFile],
        staging: &Staging,
        policy: DownloadPolicy,
    ) -> Result<Download<'a>, PullError> {
        let (mut downloads, mut queue, mut all_done) = (Vec::new(), VecDeque::new(), 0);
        for (file, remote) in files.iter().enumerate() {
            let partial = RangedPartial::open(staging.partials(), remote, policy.part_bytes);
            let partial =
                partial.map_err(|error| PullError::disk(staging.partials(), remote.bytes, error))?;
            let done = partial.done();
            let missing: Vec<usize> =
                (0..partial.parts()).filter(|part| !partial.missing(*part).is_empty()).collect();
            if missing.is_empty() {
                queue.push_back(DownloadStep::Verify { file });
            }
            queue.extend(missing.iter().map(|part| DownloadStep::Part { file, part: *part }));
            all_done += done;
            downloads.push(FileDownload {
                remote,
                partial,
                parts_left: AtomicUsize::new(missing.len()),
                is_resumed: AtomicBool::new(done > 0),
                digest: Mutex::independent(None),
            });
        }
        Ok(Download {
            origin,
            policy,
            files: downloads,
            queue: Mutex::independent(queue),
            done: AtomicU64::new(all_done),
            failure: Mutex::independent(None),
            stop: AtomicBool::new(false),
        })
    }

    /// Performs steps until there are none, or one has failed.
    fn work(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some(step) = self.queue.lock().pop_front() else { return };
            let done = match step {
                DownloadStep::Part { file, part } => self.complete(file, part),
                DownloadStep::Verify { file } => self.verify(file),
            };
            if let Err(error) = done {
                fail(error, &self.failure, &self.stop);
            }
        }
    }

    /// Downloads a part, and verifies the file if it was the last one.
    fn complete(&self, file: usize, part: usize) -> Result<(), PullError> {
        let FileDownload { remote, partial, parts_left, .. } = &self.files[file];
        let retrier = Retrier { host: self.origin.host(), policy: self.policy, stop: &self.stop };
        let mut failures = 0;
        loop {
            let missing = partial.missing(part);
            if missing.is_empty() {
                break;
            }
            let read = self.read(file, part);
            let after = partial.missing(part);
            match read {
                Err(FetchError::Permanent(error)) => return Err(error),
                _ if after.is_empty() => {}
                read => {
                    // It is less after a request that began again from the start.
                    let gained = after.start.saturating_sub(missing.start);
                    let reason = match read {
                        Err(FetchError::Transient(reason)) => reason,
                        Ok(()) | Err(FetchError::Permanent(_)) => {
                            truncated(gained, missing.end - missing.start)
                        }
                    };
                    failures = if gained >= PROGRESS_BYTES_MIN { 0 } else { failures + 1 };
                    let done = self.done.load(Ordering::Relaxed);
                    retrier.pause(failures, &self.origin.describe(&remote.path), reason, done)?;
                }
            }
        }
        if parts_left.fetch_sub(1, Ordering::AcqRel) == 1 { self.verify(file) } else { Ok(()) }
    }

    /// Sends one request for the missing range of a part.
    fn read(&self, file: usize, part: usize) -> Result<(), FetchError> {
        let FileDownload { remote, partial, .. } = &self.files[file];
        if !remote.has_ranges {
            self.done.fetch_sub(partial.missing(part).start, Ordering::Relaxed);
            partial.restart_part(part)?;
        }
        let missing = partial.missing(part);
        let mut left = missing.end - missing.start;
        let mut window = SpeedWindow::new(self.policy.stall, Instant::now());
        self.origin.read_range(remote, missing, &mut |bytes: &[u8]| {
            if self.stop.load(Ordering::Relaxed) {
                return Err(PullError::Cancelled.into());
            }
            // A server that sends more than was requested.
            let bytes = &bytes[..bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX))];
            left -= bytes.len() as u64;
            partial.write(part, bytes)?;
            self.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            match window.record(bytes.len() as u64, Instant::now()) {
                Some(speed) if left > 0 => {
                    let limit = SLOW_BYTES_PER_SECOND;
                    let reason = format!("the server sent {speed} bytes per second; the minimum is {limit}");
                    Err(FetchError::Transient(reason))
                }
                Some(_) | None => Ok(()),
            }
        })
    }

    /// Verifies a complete file.
    fn verify(&self, file: usize) -> Result<(), PullError> {
        let FileDownload { remote, partial, parts_left, is_resumed, digest } = &self.files[file];
        let actual = partial.digest()?;
        let expected = remote.sha256.as_deref().unwrap_or(&actual);
        if expected == actual {
            *digest.lock() = Some(actual);
            return Ok(());
        }
        if is_resumed.swap(false, Ordering::Relaxed) {
            self.done.fetch_sub(partial.done(), Ordering::Relaxed);
            partial.restart()?;
            parts_left.store(partial.parts(), Ordering::Release);
            self.queue.lock().extend((0..partial.parts()).map(|part| DownloadStep::Part { file, part }));
            return Ok(());
        }
        partial.delete();
        let (host, what) = (self.origin.host(), self.origin.describe(&remote.path));
        Err(PullError::Checksum { host, what, expected: expected.to_owned(), actual })
    }
}

/// Measures the speed of a request over windows of a fixed time.
struct SpeedWindow {
    length: Duration,
    since: Instant,
    bytes: u64,
}

impl SpeedWindow {
    fn new(length: Duration, now: Instant) -> SpeedWindow {
        SpeedWindow { length, since: now, bytes: 0 }
    }

    /// Records bytes; at the end of a window returns its speed if that is below the minimum.
    fn record(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        self.bytes += bytes;
        let lasted = now.saturating_duration_since(self.since);
        if lasted < self.length {
            return None;
        }
        let speed = (self.bytes as f64 / lasted.as_secs_f64().max(f64::MIN_POSITIVE)) as u64;
        *self = SpeedWindow::new(self.length, now);
        (speed < SLOW_BYTES_PER_SECOND).then_some(speed)
    }
}

/// Runs `work` on another thread, and sets its argument when the pull is cancelled meanwhile.
pub(super) fn cancellable<T: Send>(
    progress: &mut dyn PullObserver,
    work: impl FnOnce(&AtomicBool) -> T + Send,
) -> T {
    let stop = &AtomicBool::new(false);
    let (running, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let result = work(stop);
            drop(running);
            result
        });
        while ended.recv_timeout(REPORT_PERIOD) == Err(RecvTimeoutError::Timeout) {
            stop.fetch_or(progress.is_cancelled(), Ordering::Relaxed);
        }
        worker.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Runs `work` on this number of threads; calls `report` on this one meanwhile.
fn run(threads: usize, work: &(dyn Fn() + Sync), report: &mut dyn FnMut()) {
    let (running, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        for _ in 0..threads {
            let running = running.clone();
            scope.spawn(move || {
                work();
                drop(running);
            });
        }
        drop(running);
        while ended.recv_timeout(REPORT_PERIOD) == Err(RecvTimeoutError::Timeout) {
            report();
        }
    });
}

/// Records the first failure, and ends the other connections.
fn fail(error: PullError, failure: &Mutex<Option<PullError>>, stop: &AtomicBool) {
    stop.store(true, Ordering::Relaxed);
    failure.lock().get_or_insert(error);
}

/// Takes the next item of a list that several threads process.
fn take<'a, T>(next: &AtomicUsize, list: &'a [T]) -> Option<(usize, &'a T)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    list.get(index).map(|item| (index, item))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_below_the_minimum_speed_is_slow() {
        let (second, start) = (Duration::from_secs(1), Instant::now());
        let window = || SpeedWindow::new(10 * second, start);
        assert_eq!(window().record(0, start + 9 * second), None, "the window has not ended");
        assert_eq!(window().record(10 * SLOW_BYTES_PER_SECOND, start + 10 * second), None);
        assert_eq!(
            window().record(10 * SLOW_BYTES_PER_SECOND - 1, start + 10 * second),
            Some(SLOW_BYTES_PER_SECOND - 1)
        );
        let mut window = window();
        window.record(1 << 20, start + 10 * second);
        assert_eq!(window.record(1, start + 20 * second), Some(0), "each window counts for itself");
    }
}
