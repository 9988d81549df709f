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
//! Some servers respond to the request for a part with the whole file. The other parts of such a file are left, and once no
//! connection downloads one, the file is downloaded by one request without a range. So at most one response of each connection
//! is discarded, and not one of each part.
//!
//! Connections are threads, because hashing and writing block. The thread of the caller reports the progress.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use supervision::Mutex;

use super::error::PullError;
use super::manifest::ManifestFileV1;
use super::origin::{
    DownloadPolicy, FetchError, MODEL_FILES_MAX, ModelOrigin, PROGRESS_BYTES_MIN, PullControl, RemoteFile,
    RequestInFlight, Retrier, SLOW_BYTES_PER_SECOND,
};
use super::partial::{self, PartialScope, RangedPartial};
use super::progress::PullObserver;
use super::speed::SpeedWindow;
use super::staging::Staging;
use super::sums::ListedFile;
use super::web::truncated;

/// Interval of progress reports.
const REPORT_PERIOD: Duration = Duration::from_millis(100);
/// Maximum size of a file: the largest files on the hub have 50 GB.
const FILE_BYTES_MAX: u64 = 256 << 30;

/// Requests the sizes of files, by several connections.
pub(super) fn stat(
    origin: &dyn ModelOrigin,
    listed: &[ListedFile],
    policy: DownloadPolicy,
    progress: &mut dyn PullObserver,
) -> Result<Vec<RemoteFile>, PullError> {
    let (next, control) = (AtomicUsize::new(0), PullControl::new());
    let found = Mutex::independent(vec![None; listed.len()]);
    let failure = Mutex::independent(None);
    let retrier = Retrier { host: origin.host(), policy, control: &control };
    let work = || {
        while let Some((index, file)) = take(&next, listed).filter(|_| !control.is_stopped()) {
            let ListedFile { path, sha256 } = file;
            let what = origin.describe(path);
            let stat = retrier.run(&what, &mut || origin.stat(path, Some(sha256)));
            match stat.and_then(|file| within_limit(origin, &what, file)) {
                Ok(file) => found.lock()[index] = Some(file),
                Err(error) => fail(error, &failure, &control),
            }
        }
    };
    run(policy.connections.min(listed.len()), &work, &mut || {
        if control.report(progress) {
            fail(PullError::Cancelled, &failure, &control);
        }
    });
    control.report(progress);
    match failure.lock().take() {
        Some(error) => Err(error),
        None => Ok(found.lock().drain(..).flatten().collect()),
    }
}

/// Checks the number of files and their sizes, whichever host has stated them, before a file is created.
fn check_limits(origin: &dyn ModelOrigin, files: &[RemoteFile]) -> Result<(), PullError> {
    if files.len() > MODEL_FILES_MAX {
        let problem = format!("it has {} files; the limit is {MODEL_FILES_MAX}", files.len());
        return Err(PullError::InvalidFiles { host: origin.host(), problem });
    }
    match files.iter().find(|file| file.bytes > FILE_BYTES_MAX) {
        Some(file) => Err(too_large(origin, &origin.describe(&file.path), file.bytes)),
        None => Ok(()),
    }
}

fn too_large(origin: &dyn ModelOrigin, what: &str, bytes: u64) -> PullError {
    PullError::TooLarge { host: origin.host(), what: what.to_owned(), bytes, limit: FILE_BYTES_MAX }
}

fn within_limit(origin: &dyn ModelOrigin, what: &str, file: RemoteFile) -> Result<RemoteFile, PullError> {
    if file.bytes <= FILE_BYTES_MAX { Ok(file) } else { Err(too_large(origin, what, file.bytes)) }
}

/// Downloads files into the staging folder, and verifies them.
pub(super) fn download(
    origin: &dyn ModelOrigin,
    files: &[RemoteFile],
    staging: &Staging,
    policy: DownloadPolicy,
    progress: &mut dyn PullObserver,
) -> Result<Vec<ManifestFileV1>, PullError> {
    check_limits(origin, files)?;
    let (folder, part_bytes) = (staging.partials(), policy.part_bytes);
    let total: u64 = files.iter().map(|file| file.bytes).sum();
    let arrived: u64 = files.iter().map(|file| partial::arrived(folder, file, part_bytes)).sum();
    let partials: BTreeSet<PathBuf> =
        files.iter().map(|file| partial::path_of(folder, file, part_bytes)).collect();
    // Before the parts are planned and the files are created, which have their whole length from then on.
    staging.reserve(total.saturating_sub(arrived), &partials)?;
    let download = Download::open(origin, files, staging, policy)?;
    let connections = policy.connections.clamp(1, download.queue.lock().len().max(1));
    run(connections, &|| download.work(), &mut || {
        progress.bytes(download.done.load(Ordering::Relaxed), Some(total));
        if download.control.report(progress) {
            fail(PullError::Cancelled, &download.failure, &download.control);
        }
    });
    download.control.report(progress);
    if let Some(error) = download.failure.lock().take() {
        if let PullError::DiskFull { at, .. } = &error {
            // An incomplete file is deleted to free space.
            let failed = download.files.iter().filter(|file| file.partial.path() == at);
            failed.for_each(|file| file.partial.delete());
            staging.free_space(&partials);
        }
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
    /// Stopped by the first failure.
    control: PullControl,
}

/// Download of one file.
struct FileDownload<'a> {
    remote: &'a RemoteFile,
    partial: RangedPartial,
    /// Parts that are not complete.
    parts_left: AtomicUsize,
    /// Whether an earlier pull has begun the file; its bytes may be wrong.
    is_resumed: AtomicBool,
    requests: Mutex<PartRequests>,
    /// Digest of the verified file.
    digest: Mutex<Option<String>>,
}

/// Requests for parts of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartRequests {
    /// Parts that connections are downloading.
    in_flight: usize,
    /// Whether the origin sends the whole file instead of a part.
    are_ignored: bool,
}

impl PartRequests {
    /// Begins the download of a part, unless the file is to be downloaded as a whole.
    fn begin(&mut self) -> bool {
        self.in_flight += usize::from(!self.are_ignored);
        !self.are_ignored
    }

    /// Ends the download of a part; returns whether the file is to be downloaded as a whole now.
    fn end(&mut self, is_ignored: bool) -> bool {
        self.in_flight -= 1;
        self.are_ignored |= is_ignored;
        self.are_ignored && self.in_flight == 0
    }
}

/// Step of a connection.
#[derive(Clone, Copy, Debug)]
enum DownloadStep {
    /// Downloads the missing range of a part.
    Part { file: usize, part: usize },
    /// Downloads a file without ranges.
    Whole { file: usize },
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
            queue.extend(steps(file, missing.iter().copied(), remote.has_ranges));
            all_done += done;
            downloads.push(FileDownload {
                remote,
                partial,
                parts_left: AtomicUsize::new(missing.len()),
                is_resumed: AtomicBool::new(done > 0),
                requests: Mutex::independent(PartRequests { in_flight: 0, are_ignored: !remote.has_ranges }),
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
            control: PullControl::new(),
        })
    }

    /// Performs steps until there are none, or one has failed.
    fn work(&self) {
        while !self.control.is_stopped() {
            let Some(step) = self.queue.lock().pop_front() else { return };
            let done = match step {
                DownloadStep::Part { file, part } => self.complete_part(file, part),
                DownloadStep::Whole { file } => self.complete_whole(file),
                DownloadStep::Verify { file } => self.verify(file),
            };
            if let Err(error) = done {
                fail(error, &self.failure, &self.control);
            }
        }
    }

    /// Downloads a part, and verifies the file if it was the last one.
    fn complete_part(&self, file: usize, part: usize) -> Result<(), PullError> {
        let FileDownload { parts_left, requests, .. } = &self.files[file];
        if !requests.lock().begin() {
            return Ok(());
        }
        let is_complete = self.complete(file, PartialScope::Part(part))?;
        if requests.lock().end(!is_complete) {
            self.queue.lock().push_back(DownloadStep::Whole { file });
        }
        let is_last = is_complete && parts_left.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last { self.verify(file) } else { Ok(()) }
    }

    /// Downloads a file of an origin that sends no ranges, and verifies it. No other connection has a part of it.
    fn complete_whole(&self, file: usize) -> Result<(), PullError> {
        self.complete(file, PartialScope::Whole)?;
        self.verify(file)
    }

    /// Sends requests until nothing of the scope is missing; returns whether it is complete, and not whether the origin
    /// ignores the range.
    fn complete(&self, file: usize, scope: PartialScope) -> Result<bool, PullError> {
        let FileDownload { remote, partial, .. } = &self.files[file];
        let retrier = Retrier { host: self.origin.host(), policy: self.policy, control: &self.control };
        let (in_flight, mut failures) = (self.control.begin(), 0);
        loop {
            let (wanted, before) = (partial.wanted(scope), partial.done_in(scope));
            if wanted.is_empty() {
                in_flight.succeeded();
                return Ok(true);
            }
            let bytes = wanted.end - wanted.start;
            let read = self.read(file, wanted, &in_flight);
            let gained = partial.done_in(scope).saturating_sub(before);
            let reason = match read {
                Err(FetchError::Permanent(error)) => return Err(error),
                Err(FetchError::RangeIgnored) if scope != PartialScope::Whole => return Ok(false),
                _ if partial.wanted(scope).is_empty() => continue,
                Err(error) => error.cause(),
                Ok(()) => truncated(gained, bytes),
            };
            failures = if gained >= PROGRESS_BYTES_MIN { 0 } else { failures + 1 };
            let done = self.done.load(Ordering::Relaxed);
            retrier.pause(failures, &self.origin.describe(&remote.path), reason, done)?;
        }
    }

    /// Sends one request for a range.
    fn read(
        &self,
        file: usize,
        range: Range<u64>,
        in_flight: &RequestInFlight<'_>,
    ) -> Result<(), FetchError> {
        let FileDownload { remote, partial, .. } = &self.files[file];
        let files = partial.files()?;
        let (mut position, end) = (range.start, range.end);
        let mut window = SpeedWindow::new(self.policy.stall, Instant::now());
        self.origin.read_range(remote, range, &mut |bytes: &[u8]| {
            if self.control.is_stopped() {
                return Err(PullError::Cancelled.into());
            }
            // A server that sends more than was requested.
            let bytes = &bytes[..bytes.len().min(usize::try_from(end - position).unwrap_or(usize::MAX))];
            self.done.fetch_add(partial.write(&files, position, bytes)?, Ordering::Relaxed);
            in_flight.received(bytes.len() as u64);
            position += bytes.len() as u64;
            match window.record(bytes.len() as u64, Instant::now()) {
                Some(speed) if position < end => {
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
        let FileDownload { remote, partial, parts_left, is_resumed, requests, digest } = &self.files[file];
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
            let has_ranges = !requests.lock().are_ignored;
            self.queue.lock().extend(steps(file, 0..partial.parts(), has_ranges));
            return Ok(());
        }
        partial.delete();
        let (host, what) = (self.origin.host(), self.origin.describe(&remote.path));
        Err(PullError::Checksum { host, what, expected: expected.to_owned(), actual })
    }
}

/// Returns the steps that download the missing parts of a file.
fn steps(file: usize, missing: impl Iterator<Item = usize>, has_ranges: bool) -> Vec<DownloadStep> {
    let mut parts = missing.map(|part| DownloadStep::Part { file, part }).peekable();
    match parts.peek() {
        Some(_) if !has_ranges => vec![DownloadStep::Whole { file }],
        Some(_) | None => parts.collect(),
    }
}

/// Runs `work` on another thread, and reports its failed requests meanwhile.
pub(super) fn cancellable<T: Send>(
    progress: &mut dyn PullObserver,
    work: impl FnOnce(&PullControl) -> T + Send,
) -> T {
    let control = &PullControl::new();
    let (running, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let result = work(control);
            drop(running);
            result
        });
        while ended.recv_timeout(REPORT_PERIOD) == Err(RecvTimeoutError::Timeout) {
            control.report(progress);
        }
        control.report(progress);
        worker.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Sends one request on another thread, and reports meanwhile whether it has stalled.
pub(super) fn observed<T: Send>(
    progress: &mut dyn PullObserver,
    request: impl FnOnce() -> Result<T, PullError> + Send,
) -> Result<T, PullError> {
    cancellable(progress, |control| {
        let _in_flight = control.begin();
        request()
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
fn fail(error: PullError, failure: &Mutex<Option<PullError>>, control: &PullControl) {
    let mut first = failure.lock();
    // Connections that see the end return this error, possibly before the one with the cause.
    if matches!(*first, None | Some(PullError::Cancelled)) {
        *first = Some(error);
    }
    control.stop();
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
    fn a_file_is_downloaded_as_a_whole_once_no_connection_has_a_part_of_it() {
        let mut requests = PartRequests { in_flight: 0, are_ignored: false };
        assert!(requests.begin() && requests.begin() && requests.begin());
        assert!(!requests.end(true), "two parts are being downloaded");
        assert!(!requests.begin(), "no further part");
        assert!(!requests.end(false));
        assert!(requests.end(true), "the last one");
        assert_eq!(requests, PartRequests { in_flight: 0, are_ignored: true });
        let count = |missing: usize, has_ranges| steps(0, 0..missing, has_ranges).len();
        assert_eq!([count(3, true), count(3, false), count(0, true), count(0, false)], [3, 1, 0, 0]);
    }
}
