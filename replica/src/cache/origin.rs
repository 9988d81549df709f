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

use super::error::PullError;

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

/// Repeats requests.
pub(super) struct Retrier<'a> {
    pub(super) host: String,
    pub(super) policy: DownloadPolicy,
    /// Ends all retries.
    pub(super) stop: &'a AtomicBool,
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
        if self.stop.load(Ordering::Relaxed) {
            return Err(PullError::Cancelled);
        }
        let DownloadPolicy { attempts, backoff, .. } = self.policy;
        if failures >= attempts {
            let (host, what) = (self.host.clone(), what.to_owned());
            return Err(PullError::Unavailable { host, what, attempts: failures, reason, done });
        }
        thread::sleep(backoff.equal_jitter(failures.max(1), rand::random()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retrier(stop: &AtomicBool) -> Retrier<'_> {
        let backoff = Backoff { first: Duration::ZERO, max: Duration::ZERO };
        let policy = DownloadPolicy { attempts: 3, backoff, ..DownloadPolicy::default() };
        Retrier { host: "host".to_owned(), policy, stop }
    }

    /// Returns the result and the number of requests.
    fn run(
        stop: bool,
        mut request: impl FnMut(u32) -> Result<(), FetchError>,
    ) -> (Result<(), PullError>, u32) {
        let (stop, mut requests) = (AtomicBool::new(stop), 0);
        let result = retrier(&stop).run("x", &mut || {
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
    fn a_permanent_failure_is_not_repeated() {
        let missing = || PullError::NotFound { host: "host".to_owned(), what: "x".to_owned() };
        let (result, requests) = run(false, |_| Err(missing().into()));
        assert!(matches!(result, Err(PullError::NotFound { .. })));
        assert_eq!(requests, 1);
    }
}
