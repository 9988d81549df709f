//! State of a start: the progress of the download, and the failure of the last attempt.
//!
//! The failure is reported until a further attempt makes progress: until bytes of the model arrive, or all of them are there.
//! A region counts a failure that lasts as the failure of the deployment, so a long download after it must not repeat it.
//!
//! An attempt repeats its requests for minutes before it fails. So one that has made no progress for some seconds is
//! reported as a failure as well, until it makes progress: its host does not respond, or responds with errors.

use std::time::{Duration, Instant};

use replica_api::start_failure::{StartFailure, StartFailureReport};
use replica_api::status::DownloadV1;
use replica_core::download::DownloadEstimate;
use supervision::Mutex;

use crate::cache::{PROGRESS_BYTES_MIN, Phase};

/// Phase after the download.
const LOADING: &str = "loading";
/// Time without [progress](PROGRESS_BYTES_MIN) after which an attempt is reported as failing. An object store responds within a
/// second; if it is overloaded, it responds with errors, and the first repeated requests are within this time.
const NO_PROGRESS_AFTER: Duration = Duration::from_secs(3);

/// Progress of a start.
#[derive(Debug)]
pub(crate) struct StartState(Mutex<StartProgress>);

#[derive(Debug, Default)]
struct StartProgress {
    download: Option<DownloadState>,
    failure: Option<StartFailureReport>,
}

/// Download of the model, in this attempt.
#[derive(Debug)]
struct DownloadState {
    phase: &'static str,
    estimate: DownloadEstimate,
    /// Bytes at the last progress. The first record of a phase has the bytes of earlier attempts.
    progress_bytes: Option<u64>,
    /// Time of the last progress, or of the begin of the phase; absent if the phase does not wait for bytes.
    progress_at: Option<Instant>,
    /// Cause of the last failed request since then.
    request_failure: Option<String>,
}

impl DownloadState {
    /// Returns the failure of an attempt without progress.
    fn no_progress(&self, now: Instant) -> Option<StartFailureReport> {
        let is_complete = self.estimate.total().is_some_and(|total| self.estimate.done() >= total);
        let waited = now.saturating_duration_since(self.progress_at.filter(|_| !is_complete)?);
        if waited < NO_PROGRESS_AFTER {
            return None;
        }
        let cause = self.request_failure.as_deref().unwrap_or("there is no response yet");
        let arrived = self.estimate.done().saturating_sub(self.progress_bytes.unwrap_or(0));
        let waited = waited.as_secs();
        let message = format!("{arrived} bytes of the model have arrived in the last {waited} s: {cause}");
        Some(StartFailureReport::new(StartFailure::ModelUnavailable, message))
    }
}

impl Default for StartState {
    fn default() -> StartState {
        StartState(Mutex::independent(StartProgress::default()))
    }
}

impl StartState {
    /// Begins a phase of the download.
    pub(crate) fn begin(&self, phase: Phase, now: Instant) {
        let waits_for_bytes = match phase {
            Phase::Waiting | Phase::Resolving | Phase::Downloading => true,
            Phase::Unpacking => false,
        };
        let mut progress = self.0.lock();
        // A list that arrives does not end the failure of its files.
        let earlier = progress.download.take().and_then(|download| download.request_failure);
        progress.download = Some(DownloadState {
            phase: phase.as_str(),
            estimate: DownloadEstimate::default(),
            progress_bytes: None,
            progress_at: waits_for_bytes.then_some(now),
            request_failure: earlier.filter(|_| waits_for_bytes),
        });
    }

    /// Records the cause of a failed request, which is repeated.
    pub(crate) fn request_failed(&self, cause: String) {
        if let Some(download) = &mut self.0.lock().download {
            download.request_failure = Some(cause);
        }
    }

    /// Records the bytes on disk; returns the remaining time. Progress ends the failure of the last attempt.
    pub(crate) fn record(&self, done: u64, total: Option<u64>, now: Instant) -> Option<Duration> {
        let mut progress = self.0.lock();
        let StartProgress { download, failure } = &mut *progress;
        let DownloadState { estimate, progress_bytes, progress_at, request_failure, .. } =
            download.as_mut()?;
        estimate.record(done, total, now);
        // A file that is downloaded again begins from zero.
        let before = progress_bytes.map_or(done, |before| before.min(done));
        let arrived = done - before;
        let has_progress = arrived >= PROGRESS_BYTES_MIN || (arrived > 0 && total == Some(done));
        *progress_bytes = Some(if has_progress { done } else { before });
        if has_progress {
            *failure = None;
            *request_failure = None;
            *progress_at = progress_at.map(|_| now);
        }
        estimate.left()
    }

    /// Ends the download, if there was one, and the failure of the last attempt; the model is being loaded.
    pub(crate) fn load(&self) {
        let StartProgress { download, failure } = &mut *self.0.lock();
        *failure = None;
        if let Some(download) = download {
            download.phase = LOADING;
            download.progress_at = None;
        }
    }

    /// Ends an attempt.
    pub(crate) fn fail(&self, failure: StartFailureReport) {
        *self.0.lock() = StartProgress { download: None, failure: Some(failure) };
    }

    /// Ends the start.
    pub(crate) fn finish(&self) {
        *self.0.lock() = StartProgress::default();
    }

    /// Returns the download, if there is one, and the failure of this attempt or of the last one.
    pub(crate) fn report(&self, now: Instant) -> (Option<DownloadV1>, Option<StartFailureReport>) {
        let progress = self.0.lock();
        let download = progress.download.as_ref().map(|DownloadState { phase, estimate, .. }| {
            let left = if *phase == LOADING { Some(Duration::ZERO) } else { estimate.left() };
            DownloadV1 {
                phase: (*phase).to_owned(),
                done_bytes: estimate.done(),
                total_bytes: estimate.total(),
                left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            }
        });
        let no_progress = progress.download.as_ref().and_then(|download| download.no_progress(now));
        (download, no_progress.or_else(|| progress.failure.clone()))
    }
}

/// Returns the state of a start as a sentence; `None` for one without download and failure.
pub(crate) fn describe(
    source: &str,
    download: Option<&DownloadV1>,
    failure: Option<&StartFailureReport>,
) -> Option<String> {
    let progress = download.map(|DownloadV1 { phase, done_bytes, total_bytes, left_ms }| {
        let mut text = format!("{phase} {source}");
        if let Some(total) = total_bytes {
            text += &format!(", {done_bytes} of {total} bytes");
        }
        if let Some(left) = left_ms.filter(|left| *left > 0) {
            text += &format!(", {} s left", left.div_ceil(1000));
        }
        text
    });
    let failed = failure.map(|failure| format!("failure: {}", failure.message));
    match (progress, failed) {
        (Some(progress), Some(failed)) => Some(format!("{progress}; {failed}")),
        (progress, failed) => progress.or(failed),
    }
}

#[cfg(test)]
mod tests {
    use replica_api::start_failure::StartFailure;

    use super::*;

    #[test]
    fn a_start_reports_its_download_and_the_last_failure() {
        let (state, now) = (StartState::default(), Instant::now());
        let text = || {
            let (download, failure) = state.report(now);
            describe("s3://m", download.as_ref(), failure.as_ref())
        };
        assert_eq!(text(), None, "a model in the cache");
        state.begin(Phase::Downloading, now);
        state.record(0, Some(1_000), now);
        assert_eq!(text().as_deref(), Some("downloading s3://m, 0 of 1000 bytes"));
        let left = state.record(500, Some(1_000), now + Duration::from_secs(5));
        assert_eq!(left, Some(Duration::from_secs(5)));
        assert_eq!(text().as_deref(), Some("downloading s3://m, 500 of 1000 bytes, 5 s left"));
        state.fail(StartFailureReport::new(StartFailure::ModelForbidden, "no access"));
        assert_eq!(text().as_deref(), Some("failure: no access"));
        state.begin(Phase::Resolving, now);
        assert_eq!(text().as_deref(), Some("resolving s3://m; failure: no access"));
        state.load();
        assert_eq!(state.report(now).0.and_then(|download| download.left_ms), Some(0));
        state.finish();
        assert_eq!(state.report(now), (None, None));
    }

    #[test]
    fn the_last_failure_is_reported_until_bytes_arrive_or_the_model_is_loaded() {
        let (state, now) = (StartState::default(), Instant::now());
        let failure = || state.report(now).1.map(|failure| failure.reason);
        let fails = || state.fail(StartFailureReport::new(StartFailure::DiskFull, "full"));
        fails();
        state.begin(Phase::Downloading, now);
        let (before, total) = (700, Some(1 << 30));
        state.record(before, total, now);
        state.record(before + PROGRESS_BYTES_MIN - 1, total, now);
        assert_eq!(failure(), Some(StartFailure::DiskFull), "700 bytes are those of earlier attempts");
        state.record(before + PROGRESS_BYTES_MIN, total, now);
        assert_eq!(failure(), None, "the attempt makes progress");
        fails();
        assert_eq!(failure(), Some(StartFailure::DiskFull));
        state.load();
        assert_eq!(failure(), None, "another process has downloaded the model");
    }

    #[test]
    fn an_attempt_without_progress_for_some_seconds_is_reported_until_it_makes_progress() {
        let (state, start) = (StartState::default(), Instant::now());
        let time = |second: u32| start + Duration::from_secs(1) * second;
        let failure = |second| state.report(time(second)).1;
        let text = |second| failure(second).map(|failure| failure.message);
        state.begin(Phase::Resolving, start);
        assert_eq!(failure(2), None, "it may respond");
        let expected = "0 bytes of the model have arrived in the last 3 s: there is no response yet";
        assert_eq!(text(3).as_deref(), Some(expected));
        assert_eq!(failure(3).map(|failure| failure.reason), Some(StartFailure::ModelUnavailable));
        state.request_failed("status 503".to_owned());
        assert_eq!(text(9).as_deref(), Some("0 bytes of the model have arrived in the last 9 s: status 503"));
        state.begin(Phase::Downloading, time(10));
        let total = Some(1 << 30);
        state.record(700, total, time(10));
        assert_eq!(failure(12), None, "the list has arrived");
        state.record(710, total, time(12));
        let expected = "10 bytes of the model have arrived in the last 3 s: status 503";
        assert_eq!(text(13).as_deref(), Some(expected), "each response is truncated");
        state.record(700 + PROGRESS_BYTES_MIN, total, time(14));
        assert_eq!(failure(16), None);
        state.record(0, total, time(16));
        state.record(PROGRESS_BYTES_MIN, total, time(16));
        assert_eq!(failure(18), None, "a file is downloaded again");
        let expected = "0 bytes of the model have arrived in the last 3 s: there is no response yet";
        assert_eq!(text(19).as_deref(), Some(expected));
        state.record(1 << 30, total, time(20));
        assert_eq!(failure(90), None, "the files are verified");
        state.begin(Phase::Unpacking, time(90));
        assert_eq!(failure(180), None, "the disk has the bytes");
        state.load();
        assert_eq!(failure(180), None);
    }
}
