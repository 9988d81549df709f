//! Start of a replica: the model is found in the cache or downloaded, and then loaded.
//!
//! ```text
//!            not in the cache                                            loaded
//!  resolve ────────────────────▶ download ────────▶ load ─────────────────────────▶ ready
//!     │                             │ ▲               │ ▲
//!     └── in the cache ─────────────│─│───────────────│─┘
//!                                   ▼ │ backoff       ▼ invalid files, family not supported
//!                                  failed ◀───────────┘
//! ```
//!
//! A download that fails, and a downloaded model that is invalid or of an unsupported family, do not end the process: the
//! cause is at the origin of the model (a policy, a missing object, an outage, a broken file), and the replica is ready as
//! soon as that is corrected. Meanwhile it reports the cause. Every other failure of a start ends it, as does a failure of a
//! model in a directory, whose cause is on this machine.
//!
//! After a model could not be loaded, each attempt requests the version that the origin has now, and compares the files in
//! the cache with their digests. An unchanged version is not downloaded again, and is loaded once more only if its files were
//! not compared before the first time: a file that was damaged on this disk has been replaced then. Files that were compared
//! once are not read again: then only the version, or the digests, that the origin lists are compared.

use std::path::Path;
use std::time::{Duration, Instant};

use backoff::Backoff;
use replica_api::start_failure::{StartFailure, StartFailureReport};

use crate::app::App;
use crate::cache::{
    CachedModel, ModelCache, ModelOrigins, ModelSource, Phase, PullObserver, PullResult, ResolveError,
};
use crate::config::Config;
use crate::events::{ModelDownloadPhase, ModelDownloadProgress, ModelDownloaded};
use crate::serve_error::{FailedStart, InvalidModel, ServeError};

/// Delays between attempts. A minute is short compared with the time in which a person corrects a policy, and long for the
/// origin of a model that thousands of replicas request.
const RETRY: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Delays after a download whose files do not match their digests, or whose list is invalid. Each attempt downloads the
/// files again, and succeeds only once a person has uploaded the correct ones. Less than the start timeout of a process (ten
/// minutes), which begins after each failure.
const RETRY_CORRUPT: Backoff = Backoff { first: Duration::from_secs(60), max: Duration::from_secs(300) };
/// Delays after a model whose files are those of its origin is invalid. The first ones are short, because each attempt requests
/// only the list of the files; the last ones are as long as those of wrong files.
const RETRY_INVALID: Backoff = Backoff { first: RETRY.first, max: RETRY_CORRUPT.max };
/// Interval of log lines about a download.
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// Failed attempts of a start.
#[derive(Debug, Default)]
pub(crate) struct StartAttempts {
    /// Cause of the last failure, and the number of consecutive failures with it.
    last: Option<(FailureCause, u32)>,
    /// Cached model that this program cannot load, and the report of it.
    invalid_model: Option<(InvalidModel, StartFailureReport)>,
}

/// Failures with one cause are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureCause {
    /// The model could not be pulled, for this reason.
    Pull(StartFailure),
    /// It could not be loaded.
    Load {
        /// Whether its files are those of its origin.
        is_verified: bool,
    },
}

impl StartAttempts {
    /// Returns the cached model that this program cannot load. Then the next attempt sends requests to the origin although it is
    /// in the cache: it may have been corrected there.
    pub(crate) fn invalid_model(&self) -> Option<&InvalidModel> {
        self.invalid_model.as_ref().map(|(model, _)| model)
    }

    /// Records a failure; returns the one to report, and the delay before the next attempt. While the cached model cannot be loaded, a
    /// failure of its origin is added to that failure.
    pub(crate) fn failed(&mut self, failure: FailedStart, draw: f64) -> (StartFailureReport, Duration) {
        let FailedStart { report, invalid_model } = failure;
        let cause = match &invalid_model {
            Some(model) => FailureCause::Load { is_verified: model.is_verified },
            None => FailureCause::Pull(report.reason),
        };
        let count = match self.last {
            Some((last, count)) if last == cause => count.saturating_add(1),
            Some(_) | None => 1,
        };
        self.last = Some((cause, count));
        let backoff = match cause {
            FailureCause::Pull(StartFailure::ModelCorrupt) => RETRY_CORRUPT,
            FailureCause::Load { is_verified: true } => RETRY_INVALID,
            FailureCause::Load { is_verified: false } | FailureCause::Pull(_) => RETRY,
        };
        let report = match (invalid_model, &self.invalid_model) {
            (Some(model), _) => {
                self.invalid_model = Some((model, report.clone()));
                report
            }
            (None, Some((_, invalid))) => {
                let text = format!("{}; it was not pulled again: {}", invalid.message, report.message);
                StartFailureReport::new(invalid.reason, text)
            }
            (None, None) => report,
        };
        (report, backoff.equal_jitter(count, draw))
    }
}

/// Returns whether the replica downloads its model.
pub(crate) fn may_pull(config: &Config) -> bool {
    config.download.enabled && !matches!(config.model, ModelSource::Directory(_))
}

/// Model on this machine.
#[derive(Debug)]
pub(crate) struct FoundModel {
    pub(crate) model: CachedModel,
    /// Whether its files were found to be those of its origin; otherwise only their sizes were compared.
    pub(crate) is_verified: bool,
}

/// Finds the model in the cache, or downloads it. If the cached model is invalid, a model is downloaded unless the cache has the
/// version that the origin has now.
///
/// # Errors
///
/// If that is the invalid model still, its error is returned again.
pub(crate) fn find(
    app: &App,
    config: &Config,
    root: &Path,
    invalid_model: Option<&InvalidModel>,
) -> Result<FoundModel, ServeError> {
    let source = &config.model;
    match ModelCache::new(root).resolve(source) {
        Ok(model) if invalid_model.is_none() || !may_pull(config) => {
            return Ok(FoundModel { model, is_verified: false });
        }
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
    let verified = invalid_model.filter(|invalid| invalid.is_verified).map(|invalid| invalid.digest.clone());
    let cache =
        ModelCache::with_origins(root, origins).with_policy(config.download.policy).with_verified(verified);
    let began = Instant::now();
    let mut observer = StartObserver { app, logged_at: began };
    let pulled = cache.pull(source, &mut observer)?;
    if pulled.downloaded {
        ModelDownloaded { source: &pulled.model.source, bytes: pulled.model.bytes, took: began.elapsed() }
            .record();
    }
    if let Some(invalid) = invalid_model.filter(|invalid| is_still(invalid, &pulled)) {
        return Err(ServeError::InvalidModel(invalid.clone()));
    }
    // As at every start: the permissions of the model are checked.
    Ok(FoundModel { model: cache.resolve_at(source, pulled.model.path)?, is_verified: true })
}

/// Returns whether a pull has found the same files as those of a model that could not be loaded.
fn is_still(invalid: &InvalidModel, pulled: &PullResult) -> bool {
    invalid.is_verified && !pulled.downloaded && invalid.digest == pulled.model.digest
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

    fn pull_failure(reason: StartFailure) -> FailedStart {
        FailedStart { report: StartFailureReport::new(reason, reason.as_str()), invalid_model: None }
    }

    fn load_failure(is_unknown_family: bool) -> FailedStart {
        let (model, digest, reason) = ("s3://m".to_owned(), "digest".to_owned(), "config.json".to_owned());
        let model = InvalidModel { model, digest, is_verified: true, is_unknown_family, reason };
        ServeError::InvalidModel(model).failure().expect("another attempt")
    }

    #[test]
    fn only_a_model_that_cannot_be_loaded_bypasses_the_cache_until_another_one_is_pulled() {
        for (is_unknown_family, reason) in
            [(true, StartFailure::UnknownFamily), (false, StartFailure::ModelCorrupt)]
        {
            let mut attempts = StartAttempts::default();
            attempts.failed(pull_failure(StartFailure::ModelUnavailable), 1.0);
            assert_eq!(attempts.invalid_model(), None);
            let report = attempts.failed(load_failure(is_unknown_family), 1.0).0;
            let text = match is_unknown_family {
                true => "cannot load s3://m: config.json",
                false => "cannot load s3://m: a file of its origin is invalid: config.json",
            };
            assert_eq!(report, StartFailureReport::new(reason, text));
            for _ in 0..2 {
                let down = attempts.failed(pull_failure(StartFailure::ModelUnavailable), 1.0).0;
                assert_eq!(down.reason, reason, "an operator has to correct the model");
                assert_eq!(down.message, format!("{text}; it was not pulled again: model_unavailable"));
                assert!(attempts.invalid_model().is_some());
            }
        }
    }

    #[test]
    fn delays_count_the_failures_with_one_cause_and_are_longer_if_files_are_downloaded_again() {
        let mut attempts = StartAttempts::default();
        let mut of =
            |failure: FailedStart| [(); 4].map(|()| attempts.failed(failure.clone(), 1.0).1.as_secs());
        assert_eq!(of(pull_failure(StartFailure::ModelUnavailable)), [1, 2, 4, 8]);
        assert_eq!(of(pull_failure(StartFailure::ModelCorrupt)), [60, 120, 240, 300]);
        assert_eq!(of(load_failure(false)), [1, 2, 4, 8], "an unchanged version is not downloaded");
        assert_eq!(of(pull_failure(StartFailure::ModelCorrupt)), [60, 120, 240, 300]);
    }

    #[test]
    fn the_delays_of_an_invalid_model_grow_to_minutes_once_its_files_are_verified() {
        let failure = |is_verified: bool| {
            let model = load_failure(false).invalid_model.expect("a model");
            ServeError::InvalidModel(InvalidModel { is_verified, ..model })
                .failure()
                .expect("another attempt")
        };
        let last_of = |attempts: &mut StartAttempts, is_verified: bool| {
            let delays = [(); 10].map(|()| attempts.failed(failure(is_verified), 1.0).1.as_secs());
            (delays[0], delays[9])
        };
        let mut attempts = StartAttempts::default();
        assert_eq!(last_of(&mut attempts, false), (1, 60));
        assert_eq!(last_of(&mut attempts, true), (1, 300));
    }

    #[test]
    fn an_invalid_model_is_loaded_again_only_if_its_files_may_be_other_ones() {
        let invalid = load_failure(false).invalid_model.expect("a model");
        let pulled = |digest: &str, downloaded| {
            let (source, path) = ("s3://m".to_owned(), "/cache/m".into());
            PullResult {
                model: CachedModel { source, path, bytes: 1, digest: digest.to_owned() },
                downloaded,
            }
        };
        assert!(is_still(&invalid, &pulled("digest", false)));
        assert!(!is_still(&invalid, &pulled("other", false)), "another process has pulled it");
        assert!(!is_still(&invalid, &pulled("digest", true)), "a file was damaged on this disk");
        let unverified = InvalidModel { is_verified: false, ..invalid };
        assert!(!is_still(&unverified, &pulled("digest", false)), "another process has replaced it");
    }
}
