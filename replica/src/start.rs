//! Start of a replica: the model is found in the cache or downloaded, and then loaded.
//!
//! ```text
//!            not in the cache                                            loaded
//!  resolve ────────────────────▶ download ────────▶ load ─────────────────────────▶ ready
//!     │                             │ ▲               │ ▲
//!     └── in the cache ─────────────│─│───────────────│─┘
//!                                   ▼ │ backoff       ▼ family not supported
//!                                  failed ◀───────────┘
//! ```
//!
//! A download that fails, and a model of an unsupported family, do not end the process: the cause is at the origin of the
//! model (a policy, a missing object, an outage), and the replica is ready as soon as that is corrected. Meanwhile it
//! reports the cause. Every other failure of a start ends it, as does a failure of a model in a directory, whose cause is on
//! this machine.

use std::path::Path;
use std::time::{Duration, Instant};

use backoff::Backoff;
use replica_api::start_failure::StartFailureReport;
use replica_api::status::DownloadV1;
use replica_core::download::DownloadEstimate;
use supervision::Mutex;

use crate::app::{App, Service};
use crate::cache::{
    CachedModel, ModelCache, ModelOrigins, ModelSource, Phase, PullObserver, ResolveError, default_root,
};
use crate::config::Config;
use crate::events::{ModelDownloadPhase, ModelDownloadProgress, ModelDownloaded};
use crate::server::{ServeError, load};

/// Delays between attempts. A minute is short compared with the time in which a person corrects a policy, and long for the
/// origin of a model that thousands of replicas request.
pub(crate) const RETRY: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Interval of log lines about a download.
const LOG_PERIOD: Duration = Duration::from_secs(10);
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
}

impl Default for StartState {
    fn default() -> StartState {
        StartState(Mutex::independent(StartProgress::default()))
    }
}

impl StartState {
    /// Begins a phase of the download.
    fn begin(&self, phase: &'static str) {
        self.0.lock().download = Some(DownloadState { phase, estimate: DownloadEstimate::default() });
    }

    /// Records the bytes that have arrived; returns the remaining time.
    fn record(&self, done: u64, total: Option<u64>, now: Instant) -> Option<Duration> {
        let mut progress = self.0.lock();
        let DownloadState { estimate, .. } = progress.download.as_mut()?;
        estimate.record(done, total, now);
        estimate.left()
    }

    /// Ends the download, if there was one; the model is being loaded.
    fn load(&self) {
        if let Some(download) = &mut self.0.lock().download {
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

    /// Returns the download, if there is one, and the failure of the last attempt.
    pub(crate) fn report(&self) -> (Option<DownloadV1>, Option<StartFailureReport>) {
        let progress = self.0.lock();
        let download = progress.download.as_ref().map(|DownloadState { phase, estimate }| {
            let left = if *phase == LOADING { Some(Duration::ZERO) } else { estimate.left() };
            DownloadV1 {
                phase: (*phase).to_owned(),
                done_bytes: estimate.done(),
                total_bytes: estimate.total(),
                left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            }
        });
        (download, progress.failure.clone())
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
    let failed = failure.map(|failure| format!("the last attempt failed: {}", failure.message));
    match (progress, failed) {
        (Some(progress), Some(failed)) => Some(format!("{progress}; {failed}")),
        (progress, failed) => progress.or(failed),
    }
}

/// Returns whether the replica downloads its model.
pub(crate) fn may_pull(config: &Config) -> bool {
    config.download.enabled && !matches!(config.model, ModelSource::Directory(_))
}

/// Finds or downloads the model, loads it and starts its threads. A retry looks for another version of the model first.
pub(crate) fn attempt(app: &App, config: &Config, is_retry: bool) -> Result<Service, ServeError> {
    let root = config.cache.clone().or_else(default_root).ok_or(ServeError::NoCache)?;
    let cached = find(app, config, &root, is_retry)?;
    app.start.load();
    load(config, &root, cached, app)
}

fn find(app: &App, config: &Config, root: &Path, is_retry: bool) -> Result<CachedModel, ServeError> {
    let source = &config.model;
    match ModelCache::new(root).resolve(source) {
        Ok(model) if !is_retry || !may_pull(config) => return Ok(model),
        Ok(_) => {}
        Err(ResolveError::NotCached { .. } | ResolveError::Damaged { .. }) if may_pull(config) => {}
        Err(error) => return Err(error.into()),
    }
    let mut origins = ModelOrigins::from_env()?;
    let settings =
        [("AWS_ENDPOINT_URL_S3", &config.download.s3_endpoint), ("AWS_REGION", &config.download.s3_region)];
    for (name, value) in settings {
        if let Some(value) = value {
            origins.buckets.set(name, value);
        }
    }
    let cache = ModelCache::with_origins(root, origins).with_policy(config.download.policy);
    let began = Instant::now();
    let mut observer = StartObserver { app, logged_at: began };
    let pulled = cache.pull(source, &mut observer)?;
    if pulled.downloaded {
        ModelDownloaded { source: &pulled.model.source, bytes: pulled.model.bytes, took: began.elapsed() }
            .record();
    }
    // As at every start: the permissions of the model are checked.
    Ok(cache.resolve(source)?)
}

/// Publishes the progress of a pull.
struct StartObserver<'a> {
    app: &'a App,
    logged_at: Instant,
}

impl PullObserver for StartObserver<'_> {
    fn phase(&mut self, phase: Phase) {
        self.app.start.begin(phase.as_str());
        ModelDownloadPhase { source: &self.app.source, phase: phase.as_str() }.record();
    }

    fn bytes(&mut self, done: u64, total: Option<u64>) {
        let now = Instant::now();
        let left = self.app.start.record(done, total, now);
        if now.saturating_duration_since(self.logged_at) >= LOG_PERIOD {
            self.logged_at = now;
            ModelDownloadProgress { source: &self.app.source, done_bytes: done, total_bytes: total, left }
                .record();
        }
    }

    fn is_cancelled(&self) -> bool {
        self.app.is_draining()
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
        assert_eq!(text().as_deref(), Some("the last attempt failed: no access"));
        state.begin("resolving");
        assert_eq!(text().as_deref(), Some("resolving s3://m; the last attempt failed: no access"));
        state.load();
        assert_eq!(state.report().0.and_then(|download| download.left_ms), Some(0));
        state.finish();
        assert_eq!(state.report(), (None, None));
    }
}
