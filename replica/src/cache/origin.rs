//! Origin of a model's files, which are read by ranges, and the retries of its requests.
//!
//! [`ModelOrigin`] has an implementation for buckets and one for web servers (and the hub, which is one); the download is the
//! same for both ([`super::download`]). A request fails for a moment (connection, 5xx, timeout, truncated body) or
//! permanently (403, 404): only the former is repeated, with backoff, and only as long as no progress is made.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

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

/// Time without [progress](PROGRESS_BYTES_MIN) after which the requests of a pull have stalled. An object store responds within a
/// second; if it is overloaded, it responds with errors, and the first repeated requests are within this time.
const STALLED_AFTER: Duration = Duration::from_secs(3);

/// State of a pull that the threads which send its requests share with the thread that reports its progress.
#[derive(Debug)]
pub(super) struct PullControl {
    /// Ends all requests and retries.
    stop: AtomicBool,
    requests: Mutex<RequestProgress>,
}

/// Progress of the requests in flight, with their repetitions. Work on this machine, such as hashing, is none of them.
#[derive(Debug, Default)]
struct RequestProgress {
    in_flight: usize,
    /// Time at which the first one began, one succeeded, or [`PROGRESS_BYTES_MIN`] had arrived.
    progress_at: Option<Instant>,
    /// Bytes that have arrived since then.
    bytes: u64,
    /// Cause of the last failed attempt since then.
    failure: Option<String>,
}

impl RequestProgress {
    fn progress(&mut self, now: Instant) {
        *self = RequestProgress {
            in_flight: self.in_flight,
            progress_at: Some(now),
            ..RequestProgress::default()
        };
    }

    fn begin(&mut self, now: Instant) {
        if self.in_flight == 0 {
            self.progress(now);
        }
        self.in_flight += 1;
    }

    fn received(&mut self, bytes: u64, now: Instant) {
        self.bytes += bytes;
        if self.bytes >= PROGRESS_BYTES_MIN {
            self.progress(now);
        }
    }

    /// Returns a description if the requests make no progress.
    fn stalled(&self, now: Instant) -> Option<String> {
        let waited = now.saturating_duration_since(self.progress_at.filter(|_| self.in_flight > 0)?);
        if waited < STALLED_AFTER {
            return None;
        }
        let cause = match &self.failure {
            Some(failure) => failure.as_str(),
            None if self.bytes == 0 => "there is no response yet",
            None => "the responses are slow",
        };
        Some(format!("{} bytes have arrived in the last {} s: {cause}", self.bytes, waited.as_secs()))
    }
}

/// Request in flight, until it is dropped.
pub(super) struct RequestInFlight<'a>(&'a PullControl);

impl RequestInFlight<'_> {
    pub(super) fn received(&self, bytes: u64) {
        self.0.requests.lock().received(bytes, Instant::now());
    }

    pub(super) fn succeeded(self) {
        self.0.requests.lock().progress(Instant::now());
    }
}

impl Drop for RequestInFlight<'_> {
    fn drop(&mut self) {
        self.0.requests.lock().in_flight -= 1;
    }
}

impl PullControl {
    pub(super) fn new() -> PullControl {
        PullControl { stop: AtomicBool::new(false), requests: Mutex::independent(RequestProgress::default()) }
    }

    /// Begins a request.
    pub(super) fn begin(&self) -> RequestInFlight<'_> {
        self.requests.lock().begin(Instant::now());
        RequestInFlight(self)
    }

    /// Ends all requests.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Reports whether the requests have stalled; ends all requests if the pull is cancelled, and returns whether it is.
    pub(super) fn report(&self, progress: &mut dyn PullObserver) -> bool {
        let stalled = self.requests.lock().stalled(Instant::now());
        progress.stalled(stalled);
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
        let (in_flight, mut failures) = (self.control.begin(), 0);
        loop {
            match request() {
                Ok(value) => {
                    in_flight.succeeded();
                    return Ok(value);
                }
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
        self.control.requests.lock().failure = Some(format!("{}: {what}: {reason}", self.host));
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
    fn requests_have_stalled_if_none_succeeds_and_few_bytes_arrive() {
        let (mut requests, start) = (RequestProgress::default(), Instant::now());
        let time = |second: u32| start + Duration::from_secs(1) * second;
        assert_eq!(requests.stalled(time(9)), None, "there is none");
        requests.begin(time(10));
        requests.begin(time(12));
        assert_eq!(requests.stalled(time(12)), None);
        let expected = "0 bytes have arrived in the last 3 s: there is no response yet";
        assert_eq!(requests.stalled(time(13)).as_deref(), Some(expected));
        requests.received(4, time(14));
        let expected = "4 bytes have arrived in the last 4 s: the responses are slow";
        assert_eq!(requests.stalled(time(14)).as_deref(), Some(expected));
        requests.failure = Some("status 503".to_owned());
        requests.received(6, time(14));
        let expected = "10 bytes have arrived in the last 5 s: status 503";
        assert_eq!(requests.stalled(time(15)).as_deref(), Some(expected), "each response is truncated");
        requests.received(PROGRESS_BYTES_MIN - 10, time(15));
        assert_eq!(requests.stalled(time(17)), None);
        let expected = "0 bytes have arrived in the last 3 s: there is no response yet";
        assert_eq!(requests.stalled(time(18)).as_deref(), Some(expected));
        requests.progress(time(18));
        assert_eq!(requests.stalled(time(20)), None, "one has succeeded");
        requests.in_flight = 0;
        assert_eq!(requests.stalled(time(90)), None, "the files are verified");
    }

    #[test]
    fn a_stalled_pull_is_reported_until_its_requests_end_and_stops_when_it_is_cancelled() {
        #[derive(Default)]
        struct Reports(Vec<Option<String>>);
        impl PullObserver for Reports {
            fn phase(&mut self, _: Phase) {}
            fn bytes(&mut self, _: u64, _: Option<u64>) {}
            fn stalled(&mut self, stalled: Option<String>) {
                self.0.push(stalled);
            }
            fn is_cancelled(&self) -> bool {
                self.0.len() == 3
            }
        }
        let (control, mut reports) = (PullControl::new(), Reports::default());
        let in_flight = control.begin();
        retrier(&control).pause(1, "x", "status 503".to_owned(), 0).unwrap();
        control.requests.lock().progress_at = Instant::now().checked_sub(STALLED_AFTER);
        assert!(!control.report(&mut reports));
        drop(in_flight);
        assert!(!control.report(&mut reports) && !control.is_stopped());
        let expected = "0 bytes have arrived in the last 3 s: host: x: status 503";
        assert_eq!(reports.0, [Some(expected.to_owned()), None]);
        assert!(control.report(&mut reports) && control.is_stopped());
        let repeated = retrier(&control).pause(1, "x", "timeout".to_owned(), 0);
        assert!(matches!(repeated, Err(PullError::Cancelled)));
    }

    #[test]
    fn a_permanent_failure_is_not_repeated() {
        let missing = || PullError::NotFound { host: "host".to_owned(), what: "x".to_owned() };
        let (result, requests) = run(false, |_| Err(missing().into()));
        assert!(matches!(result, Err(PullError::NotFound { .. })));
        assert_eq!(requests, 1);
    }
}
