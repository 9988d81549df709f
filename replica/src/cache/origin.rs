//! Origin of a model's files, which are read by ranges, and the retries of its requests.
//!
//! [`ModelOrigin`] has an implementation for buckets and one for web servers (and the hub, which is one); the download is the
//! same for both ([`super::download`]). A request fails for a moment (connection, 5xx, timeout, truncated body) or
//! permanently (403, 404): only the former is repeated, with backoff, and only as long as no progress is made.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use backoff::Backoff;
use supervision::Mutex;

use super::error::PullError;
use super::progress::PullObserver;

/// Settings of downloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownloadPolicy {
    /// Concurrent requests. One connection to an object store is limited to some 50 to 100 MB/s.
    pub connections: usize,
    /// Bytes of a request. Large enough that the time to the first byte, some 50 ms, is a small part of a request.
    pub part_bytes: u64,
    /// Consecutive attempts without progress before a pull fails.
    pub attempts: u32,
    /// Delay between two attempts.
    pub backoff: Backoff,
    /// Time without response, and time without a byte of a response, after which a request is repeated. So is one with less
    /// than [`SLOW_BYTES_PER_SECOND`] over this time.
    pub stall: Duration,
}

impl DownloadPolicy {
    /// Returns the deadline of a small file, such as the list of files: the timeouts of reads do not limit a server that
    /// sends a byte now and then. The longest list has 4 MiB.
    pub(super) fn list_deadline(&self) -> Duration {
        self.stall.saturating_mul(2)
    }
}

/// Bytes that count as progress. A failure after fewer bytes of a request is a consecutive one, and a start in which fewer bytes
/// arrive is reported as failing.
pub(crate) const PROGRESS_BYTES_MIN: u64 = 64 << 10;
/// Speed of a connection below which its request is repeated on another one.
pub const SLOW_BYTES_PER_SECOND: u64 = 1024;

impl Default for DownloadPolicy {
    fn default() -> DownloadPolicy {
        DownloadPolicy {
            connections: 8,
            part_bytes: 16 << 20,
            attempts: 5,
            backoff: Backoff { first: Duration::from_millis(500), max: Duration::from_secs(8) },
            stall: Duration::from_secs(30),
        }
    }
}

/// Maximum number of files of a model: the largest ones have some 200.
pub(super) const MODEL_FILES_MAX: usize = 400;

/// File at its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// Path below the folder of the model.
    pub(super) path: String,
    /// Where the origin has it: a URL, or the name of an object.
    pub(super) location: String,
    /// Size.
    pub(super) bytes: u64,
    /// Expected SHA-256, if the origin lists it.
    pub(super) sha256: Option<String>,
    /// Entity tag, with which ranges of different versions are not mixed.
    pub(super) etag: Option<String>,
    /// Whether the origin can send a part of it.
    pub(super) has_ranges: bool,
}

/// Failure of a request.
#[derive(Debug)]
pub(super) enum FetchError {
    /// Another attempt may succeed; the text has the cause.
    Transient(String),
    /// The origin responded to the request for a range with the whole file, which was not read.
    RangeIgnored,
    /// Further attempts would fail as well.
    Permanent(PullError),
}

impl FetchError {
    /// Returns the cause, for a message.
    pub(super) fn cause(self) -> String {
        match self {
            FetchError::Transient(reason) => reason,
            FetchError::RangeIgnored => "the server ignores the requested range".to_owned(),
            FetchError::Permanent(error) => error.to_string(),
        }
    }
}

impl From<PullError> for FetchError {
    fn from(error: PullError) -> FetchError {
        FetchError::Permanent(error)
    }
}

/// Receiver of the bytes of a range, in order.
pub(super) type RangeSink<'a> = dyn FnMut(&[u8]) -> Result<(), FetchError> + Send + 'a;

/// Host with the files of a model. Requests block their thread, and several threads send requests.
pub(super) trait ModelOrigin: Sync {
    /// Returns the host, for messages.
    fn host(&self) -> String;

    /// Returns the name of a file, for messages.
    fn describe(&self, path: &str) -> String;

    /// Reads a whole small file.
    fn read_small(&self, path: &str, bytes_max: u64) -> Result<Vec<u8>, FetchError>;

    /// Requests the size and the version of a file.
    fn stat(&self, path: &str, sha256: Option<&str>) -> Result<RemoteFile, FetchError>;

    /// Reads a range of a file. The origin may send less than the range, which the caller notices. The whole file is
    /// requested without a range.
    fn read_range(
        &self,
        file: &RemoteFile,
        range: Range<u64>,
        sink: &mut RangeSink<'_>,
    ) -> Result<(), FetchError>;
}

/// State of a pull that the threads which send its requests share with the thread that reports its progress.
#[derive(Debug)]
pub(super) struct PullControl {
    /// Ends all requests and retries.
    stop: AtomicBool,
    /// Cause of the last failed request that is repeated, until it is reported.
    request_failure: Mutex<Option<String>>,
}

impl PullControl {
    pub(super) fn new() -> PullControl {
        PullControl { stop: AtomicBool::new(false), request_failure: Mutex::independent(None) }
    }

    /// Ends all requests.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Reports the failed requests; ends all requests if the pull is cancelled, and returns whether it is.
    pub(super) fn report(&self, progress: &mut dyn PullObserver) -> bool {
        if let Some(cause) = self.request_failure.lock().take() {
            progress.request_failed(cause);
        }
        let is_cancelled = progress.is_cancelled();
        if is_cancelled {
            self.stop();
        }
        is_cancelled
    }
}

/// Repeats requests.
pub(super) struct Retrier<'a> {
    pub(super) host: String,
    pub(super) policy: DownloadPolicy,
    pub(super) control: &'a PullControl,
}

impl Retrier<'_> {
    /// Sends a request until it succeeds, fails permanently, or has failed too often.
    pub(super) fn run<T>(
        &self,
        what: &str,
        request: &mut dyn FnMut() -> Result<T, FetchError>,
    ) -> Result<T, PullError> {
        let mut failures = 0;
        loop {
            match request() {
                Ok(value) => return Ok(value),
                Err(FetchError::Permanent(error)) => return Err(error),
                Err(error @ (FetchError::Transient(_) | FetchError::RangeIgnored)) => {
                    failures += 1;
                    self.pause(failures, what, error.cause(), 0)?;
                }
            }
        }
    }

    /// Waits before the next attempt, after this number of failures without progress.
    ///
    /// # Errors
    ///
    /// When there is no further attempt; `done` bytes have arrived.
    pub(super) fn pause(
        &self,
        failures: u32,
        what: &str,
        reason: String,
        done: u64,
    ) -> Result<(), PullError> {
        if self.control.is_stopped() {
            return Err(PullError::Cancelled);
        }
        let DownloadPolicy { attempts, backoff, .. } = self.policy;
        if failures >= attempts {
            let (host, what) = (self.host.clone(), what.to_owned());
            return Err(PullError::Unavailable { host, what, attempts: failures, reason, done });
        }
        *self.control.request_failure.lock() = Some(format!("{}: {what}: {reason}", self.host));
        thread::sleep(backoff.equal_jitter(failures.max(1), rand::random()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::progress::Phase;

    fn retrier(control: &PullControl) -> Retrier<'_> {
        let backoff = Backoff { first: Duration::ZERO, max: Duration::ZERO };
        let policy = DownloadPolicy { attempts: 3, backoff, ..DownloadPolicy::default() };
        Retrier { host: "host".to_owned(), policy, control }
    }

    /// Returns the result and the number of requests.
    fn run(
        stop: bool,
        mut request: impl FnMut(u32) -> Result<(), FetchError>,
    ) -> (Result<(), PullError>, u32) {
        let (control, mut requests) = (PullControl::new(), 0);
        if stop {
            control.stop();
        }
        let result = retrier(&control).run("x", &mut || {
            requests += 1;
            request(requests)
        });
        (result, requests)
    }

    #[test]
    fn a_request_is_repeated_up_to_the_limit() {
        let failed = || Err(FetchError::Transient("status 503".to_owned()));
        let (result, requests) = run(false, |request| if request < 3 { failed() } else { Ok(()) });
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(requests, 3);
        let (result, requests) = run(false, |_| failed());
        let error = result.unwrap_err().to_string();
        assert!(error.contains("host failed to deliver x in 3 attempts (status 503)"), "{error}");
        assert_eq!(requests, 3);
        let (result, requests) = run(true, |_| failed());
        assert!(matches!(result, Err(PullError::Cancelled)));
        assert_eq!(requests, 1);
    }

    #[test]
    fn the_cause_of_a_repeated_request_is_reported_once() {
        #[derive(Default)]
        struct Causes(Vec<String>);
        impl PullObserver for Causes {
            fn phase(&mut self, _: Phase) {}
            fn bytes(&mut self, _: u64, _: Option<u64>) {}
            fn request_failed(&mut self, cause: String) {
                self.0.push(cause);
            }
            fn is_cancelled(&self) -> bool {
                self.0.len() == 2
            }
        }
        let (control, mut causes) = (PullControl::new(), Causes::default());
        let fail = |reason: &str| retrier(&control).pause(1, "x", reason.to_owned(), 0);
        fail("status 503").unwrap();
        assert!(!control.report(&mut causes) && !control.report(&mut causes) && !control.is_stopped());
        fail("timeout").unwrap();
        assert!(control.report(&mut causes) && control.is_stopped(), "cancelled");
        assert_eq!(causes.0, ["host: x: status 503", "host: x: timeout"]);
        assert!(matches!(fail("timeout"), Err(PullError::Cancelled)));
    }

    #[test]
    fn a_permanent_failure_is_not_repeated() {
        let missing = || PullError::NotFound { host: "host".to_owned(), what: "x".to_owned() };
        let (result, requests) = run(false, |_| Err(missing().into()));
        assert!(matches!(result, Err(PullError::NotFound { .. })));
        assert_eq!(requests, 1);
    }
}
