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

use crate::app::App;
use crate::cache::{CachedModel, ModelCache, ModelOrigins, ModelSource, Phase, PullObserver, ResolveError};
use crate::config::Config;
use crate::events::{ModelDownloadPhase, ModelDownloadProgress, ModelDownloaded};
use crate::serve_error::ServeError;

/// Delays between attempts. A minute is short compared with the time in which a person corrects a policy, and long for the
/// origin of a model that thousands of replicas request.
pub(crate) const RETRY: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Interval of log lines about a download.
const LOG_PERIOD: Duration = Duration::from_secs(10);
/// Returns whether the replica downloads its model.
pub(crate) fn may_pull(config: &Config) -> bool {
    config.download.enabled && !matches!(config.model, ModelSource::Directory(_))
}

/// Finds the model in the cache, or downloads it. A retry looks for another version of the model first.
pub(crate) fn find(
    app: &App,
    config: &Config,
    root: &Path,
    is_retry: bool,
) -> Result<CachedModel, ServeError> {
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
