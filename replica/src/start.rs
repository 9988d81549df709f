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
use replica_api::start_failure::{StartFailure, StartFailureReport};

use crate::app::App;
use crate::cache::{CachedModel, ModelCache, ModelOrigins, ModelSource, Phase, PullObserver, ResolveError};
use crate::config::Config;
use crate::events::{ModelDownloadPhase, ModelDownloadProgress, ModelDownloaded};
use crate::serve_error::ServeError;

/// Delays between attempts. A minute is short compared with the time in which a person corrects a policy, and long for the
/// origin of a model that thousands of replicas request.
const RETRY: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Delays after a download whose files do not match their digests, or whose list is invalid. Another attempt downloads the
/// files again, and succeeds only once a person has uploaded the correct ones. Less than the start timeout of a process (ten
/// minutes), which begins after each failure.
const RETRY_CORRUPT: Backoff = Backoff { first: Duration::from_secs(60), max: Duration::from_secs(300) };
/// Interval of log lines about a download.
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// Failed attempts of a start.
#[derive(Debug, Default)]
pub(crate) struct StartAttempts {
    /// Reason of the last attempt, and the number of consecutive ones with it.
    last: Option<(StartFailure, u32)>,
    /// Failure of the cached model, which this program cannot load.
    unknown_family: Option<StartFailureReport>,
}

impl StartAttempts {
    /// Returns whether the next attempt sends requests to the origin although the cache may have a valid model: only if this program
    /// cannot load the cached one, which may have been corrected at its origin.
    pub(crate) fn bypass_cache(&self) -> bool {
        self.unknown_family.is_some()
    }

    /// Records a failure; returns the one to report, and the delay before the next attempt. While the cached model cannot be loaded, a
    /// failure of its origin is added to that failure.
    pub(crate) fn failed(
        &mut self,
        failure: StartFailureReport,
        draw: f64,
    ) -> (StartFailureReport, Duration) {
        let reason = failure.reason;
        let count = match self.last {
            Some((last, count)) if last == reason => count.saturating_add(1),
            Some(_) | None => 1,
        };
        self.last = Some((reason, count));
        let backoff = if reason == StartFailure::ModelCorrupt { RETRY_CORRUPT } else { RETRY };
        let report = match &self.unknown_family {
            Some(unknown) if reason != StartFailure::UnknownFamily => {
                let text = format!("{}; it was not pulled again: {}", unknown.message, failure.message);
                StartFailureReport::new(StartFailure::UnknownFamily, text)
            }
            Some(_) | None => failure,
        };
        if reason == StartFailure::UnknownFamily {
            self.unknown_family = Some(report.clone());
        }
        (report, backoff.equal_jitter(count, draw))
    }
}

/// Returns whether the replica downloads its model.
pub(crate) fn may_pull(config: &Config) -> bool {
    config.download.enabled && !matches!(config.model, ModelSource::Directory(_))
}

/// Finds the model in the cache, or downloads it. If the cache is bypassed, it is downloaded unless the cache has the version
/// that the origin has now.
pub(crate) fn find(
    app: &App,
    config: &Config,
    root: &Path,
    bypasses_cache: bool,
) -> Result<CachedModel, ServeError> {
    let source = &config.model;
    match ModelCache::new(root).resolve(source) {
        Ok(model) if !bypasses_cache || !may_pull(config) => return Ok(model),
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

    fn stalled(&mut self, stalled: Option<String>) {
        self.app.start.set_stalled(stalled);
    }

    fn is_cancelled(&self) -> bool {
        self.app.is_draining()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(reason: StartFailure) -> StartFailureReport {
        StartFailureReport::new(reason, reason.as_str())
    }

    #[test]
    fn only_a_model_of_an_unsupported_family_bypasses_the_cache_until_another_one_is_pulled() {
        let mut attempts = StartAttempts::default();
        attempts.failed(report(StartFailure::ModelUnavailable), 1.0);
        assert!(!attempts.bypass_cache());
        let unknown = attempts.failed(report(StartFailure::UnknownFamily), 1.0).0;
        assert_eq!(unknown, report(StartFailure::UnknownFamily));
        for _ in 0..2 {
            let down = attempts.failed(report(StartFailure::ModelUnavailable), 1.0).0;
            assert_eq!(down.reason, StartFailure::UnknownFamily, "an operator has to correct the model");
            assert_eq!(down.message, "unknown_family; it was not pulled again: model_unavailable");
            assert!(attempts.bypass_cache());
        }
    }

    #[test]
    fn delays_count_the_failures_with_one_reason_and_are_longer_for_a_corrupt_model() {
        let mut attempts = StartAttempts::default();
        let mut of = |reason| [(); 4].map(|()| attempts.failed(report(reason), 1.0).1.as_secs());
        assert_eq!(of(StartFailure::ModelUnavailable), [1, 2, 4, 8]);
        assert_eq!(of(StartFailure::ModelCorrupt), [60, 120, 240, 300]);
        assert_eq!(of(StartFailure::ModelUnavailable), [1, 2, 4, 8]);
    }
}
