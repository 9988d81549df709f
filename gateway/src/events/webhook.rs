//! Events of the webhooks of a region.

use std::fmt::Display;
use std::path::Path;

use jobs_core::job::DurableJobId;
use regions::RegionId;

use crate::metrics::{JobMetrics, WebhookAttemptOutcome};

/// An attempt to deliver a result has ended.
pub(crate) struct WebhookAttemptEnded<'a> {
    pub(crate) id: DurableJobId,
    pub(crate) outcome: WebhookAttemptOutcome,
    /// Reason, if it failed.
    pub(crate) reason: Option<&'a str>,
}

impl WebhookAttemptEnded<'_> {
    pub(crate) fn record(self, metrics: &JobMetrics) {
        let WebhookAttemptEnded { id, outcome, reason } = self;
        metrics.webhook_attempts.count(outcome);
        // DEBUG only: targets are those of clients, and the job has the reason.
        tracing::debug!(%id, outcome = outcome.as_str(), reason, "attempt to deliver a result ended");
    }
}

/// The file with the webhook secrets has changed, and its secrets are in use.
pub(crate) struct WebhookSecretsReloaded<'a> {
    pub(crate) path: &'a Path,
    pub(crate) tenants: usize,
}

impl WebhookSecretsReloaded<'_> {
    pub(crate) fn record(self) {
        tracing::info!(path = %self.path.display(), tenants = self.tenants, "webhook secrets reloaded");
    }
}

/// The file with the webhook secrets is invalid or cannot be read, and the secrets before stay in use. Correct the problems;
/// the file is read again when it changes.
pub(crate) struct WebhookSecretsRejected<'a> {
    pub(crate) path: &'a Path,
    pub(crate) problems: &'a [String],
}

impl WebhookSecretsRejected<'_> {
    pub(crate) fn record(self, metrics: &JobMetrics) {
        let WebhookSecretsRejected { path, problems } = self;
        metrics.webhook_secrets_rejected.add(1);
        tracing::warn!(path = %path.display(), ?problems, "webhook secrets rejected; keeping the current ones");
    }
}

/// The certificate authorities of the system cannot be read, so deliveries to `https` targets fail. Install them, or set
/// `webhook_ca` of `[jobs]`, and restart the spoke.
pub(crate) struct WebhookAuthoritiesMissing<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) error: &'a dyn Display,
}

impl WebhookAuthoritiesMissing<'_> {
    pub(crate) fn record(self) {
        let WebhookAuthoritiesMissing { region, error } = self;
        tracing::warn!(%region, %error, "certificate authorities cannot be read, so webhooks over TLS fail");
    }
}
