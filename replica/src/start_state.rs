//! State of a start: the progress of the download, and the failure of the last attempt.
//!
//! The failure is reported until a further attempt makes progress: until bytes of the model arrive, or all of them are there.
//! A region counts a failure that lasts as the failure of the deployment, so a long download after it must not repeat it.
//!
//! An attempt repeats its requests for minutes before it fails. So one whose requests make no progress for some seconds is
//! reported as a failure as well, until they do: its host does not respond, or responds with errors.

use std::time::{Duration, Instant};

use replica_api::start_failure::{StartFailure, StartFailureReport};
use replica_api::status::DownloadV1;
use replica_core::download::DownloadEstimate;
use supervision::Mutex;

use crate::cache::PROGRESS_BYTES_MIN;

/// Phase after the download.
const LOADING: &str = "loading";

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
    /// Description of the requests, if they make no progress.
    stalled: Option<String>,
}

impl Default for StartState {
    fn default() -> StartState {
        StartState(Mutex::independent(StartProgress::default()))
    }
}

impl StartState {
    /// Begins a phase of the download.
    pub(crate) fn begin(&self, phase: &'static str) {
        let (estimate, progress_bytes, stalled) = (DownloadEstimate::default(), None, None);
        self.0.lock().download = Some(DownloadState { phase, estimate, progress_bytes, stalled });
    }

    /// Sets the description of requests that make no progress.
    pub(crate) fn set_stalled(&self, stalled: Option<String>) {
        if let Some(download) = &mut self.0.lock().download {
            download.stalled = stalled;
        }
    }

    /// Records the bytes on disk; returns the remaining time. Progress ends the failure of the last attempt.
    pub(crate) fn record(&self, done: u64, total: Option<u64>, now: Instant) -> Option<Duration> {
        let mut progress = self.0.lock();
        let StartProgress { download, failure } = &mut *progress;
        let DownloadState { estimate, progress_bytes, .. } = download.as_mut()?;
        estimate.record(done, total, now);
        // A file that is downloaded again begins from zero.
        let before = progress_bytes.map_or(done, |before| before.min(done));
        let arrived = done - before;
        let has_progress = arrived >= PROGRESS_BYTES_MIN || (arrived > 0 && total == Some(done));
        *progress_bytes = Some(if has_progress { done } else { before });
        if has_progress {
            *failure = None;
        }
        estimate.left()
    }

    /// Ends the download, if there was one, and the failure of the last attempt; the model is being loaded.
    pub(crate) fn load(&self) {
        let StartProgress { download, failure } = &mut *self.0.lock();
        *failure = None;
        if let Some(download) = download {
            download.phase = LOADING;
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
    pub(crate) fn report(&self) -> (Option<DownloadV1>, Option<StartFailureReport>) {
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
        let stalled = progress.download.as_ref().and_then(|download| download.stalled.as_ref());
        let stalled = stalled.map(|text| StartFailureReport::new(StartFailure::ModelUnavailable, text));
        // A failure of another kind says what an operator has to correct.
        let failure = progress.failure.clone();
        let failure =
            failure.filter(|failure| failure.reason != StartFailure::ModelUnavailable || stalled.is_none());
        (download, failure.or(stalled))
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
            let (download, failure) = state.report();
            describe("s3://m", download.as_ref(), failure.as_ref())
        };
        assert_eq!(text(), None, "a model in the cache");
        state.begin("downloading");
        state.record(0, Some(1_000), now);
        assert_eq!(text().as_deref(), Some("downloading s3://m, 0 of 1000 bytes"));
        let left = state.record(500, Some(1_000), now + Duration::from_secs(5));
        assert_eq!(left, Some(Duration::from_secs(5)));
        assert_eq!(text().as_deref(), Some("downloading s3://m, 500 of 1000 bytes, 5 s left"));
        state.fail(StartFailureReport::new(StartFailure::ModelForbidden, "no access"));
        assert_eq!(text().as_deref(), Some("failure: no access"));
        state.begin("resolving");
        assert_eq!(text().as_deref(), Some("resolving s3://m; failure: no access"));
        state.load();
        assert_eq!(state.report().0.and_then(|download| download.left_ms), Some(0));
        state.finish();
        assert_eq!(state.report(), (None, None));
    }

    #[test]
    fn the_last_failure_is_reported_until_bytes_arrive_or_the_model_is_loaded() {
        let (state, now) = (StartState::default(), Instant::now());
        let failure = || state.report().1.map(|failure| failure.reason);
        let fails = || state.fail(StartFailureReport::new(StartFailure::DiskFull, "full"));
        fails();
        state.begin("downloading");
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
    fn an_attempt_whose_requests_have_stalled_is_reported_until_they_make_progress() {
        let state = StartState::default();
        let failure = || state.report().1.map(|failure| (failure.reason, failure.message));
        let stalls = || state.set_stalled(Some("no response".to_owned()));
        let stalled = Some((StartFailure::ModelUnavailable, "no response".to_owned()));
        state.begin("resolving");
        assert_eq!(failure(), None);
        stalls();
        assert_eq!(failure(), stalled);
        state.set_stalled(None);
        assert_eq!(failure(), None, "they make progress");
        stalls();
        state.begin("unpacking");
        assert_eq!(failure(), None, "there are no requests");
        state.fail(StartFailureReport::new(StartFailure::ModelUnavailable, "503"));
        state.begin("resolving");
        stalls();
        assert_eq!(failure(), stalled, "the present cause");
        state.fail(StartFailureReport::new(StartFailure::UnknownFamily, "t5"));
        state.begin("resolving");
        stalls();
        assert_eq!(
            failure(),
            Some((StartFailure::UnknownFamily, "t5".to_owned())),
            "it says what to correct"
        );
    }
}
