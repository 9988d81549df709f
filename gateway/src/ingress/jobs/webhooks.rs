//! Webhooks of jobs: which are accepted at a submission, the state of a delivery, and the secrets of tenants.
//!
//! The secrets are in a file of the spoke, so that no gateway has them: a gateway is reachable from outside, and a region
//! sends the messages of its jobs itself. The file is read every two seconds, for the reasons of the gateway's tenants file.
//! An invalid file changes nothing: the secrets in use stay, and the problems are logged once.

use super::{RegionalJobQueue, seconds};
use crate::events::{WebhookAuthoritiesMissing, WebhookSecretsRejected, WebhookSecretsReloaded};
use crate::respond::Rejection;
use bytes::Bytes;
use configuration::{ConfigFile, Files};
use identity::authorities::read_roots;
use jobs::webhook::secrets::WebhookSecrets;
use jobs::webhook::sender::{WebhookHost, WebhookSender};
use jobs::webhook::signature::WebhookSecret;
use jobs::webhook::target;
use jobs_core::job::{DurableJob, JobDelivery, JobOutcome, JobStatus};
use jobs_core::webhook::WebhookPolicy;
use regions::{IpNetwork, RegionId};
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::jobs::{BodyWebhook, JobKind, take_webhook};
use replica_api::refusal::Refusal;
use resolver::Resolver;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Interval at which the file with the secrets is read: a removed secret is used no longer than this.
const RELOAD_PERIOD: Duration = Duration::from_secs(2);
/// Time for which a submission waits for the addresses of a name.
const RESOLUTION_TIMEOUT: Duration = Duration::from_secs(2);
/// Configuration key of the file.
const SECRETS_KEY: &str = "jobs.webhook_secrets_file";

/// Configuration of webhooks.
#[derive(Clone, Debug)]
pub(super) struct WebhookConfig {
    policy: WebhookPolicy,
    /// File with the secrets, and its content; without it the region accepts no webhooks.
    secrets: Option<(PathBuf, WebhookSecrets)>,
    /// Certificate authorities of targets; those of the system if absent.
    roots: Option<RootCertStore>,
}

impl WebhookConfig {
    /// Reads the files of the section.
    pub(super) fn read(
        (secrets_file, ca, private_targets): (Option<PathBuf>, Option<PathBuf>, Vec<IpNetwork>),
        document: &ConfigFile<'_>,
        files: &Files<'_>,
    ) -> Option<WebhookConfig> {
        let secrets = secrets_file.as_deref().map(|path| {
            let text = files.text(document, SECRETS_KEY, path)?;
            let report = |problems: Vec<String>| {
                for problem in problems {
                    document.problem(SECRETS_KEY, format!("\"{}\" {problem}", path.display()));
                }
            };
            WebhookSecrets::parse(&text).map_err(report).ok().map(|secrets| (files.path(path), secrets))
        });
        let roots = ca.as_deref().map(|path| {
            let report = |problem| document.problem("jobs.webhook_ca", problem);
            read_roots(&files.path(path)).map_err(report).ok()
        });
        let (secrets, roots) = (transposed(secrets)?, transposed(roots)?);
        Some(WebhookConfig { policy: WebhookPolicy { private_targets }, secrets, roots })
    }
}

/// Turns an invalid value inside an optional one outside.
fn transposed<T>(value: Option<Option<T>>) -> Option<Option<T>> {
    match value {
        Some(None) => None,
        Some(Some(value)) => Some(Some(value)),
        None => Some(None),
    }
}

/// Webhooks of a region.
pub(super) struct Webhooks {
    policy: WebhookPolicy,
    resolver: Resolver,
    tls: Arc<ClientConfig>,
    secrets: Option<LiveSecrets>,
}

/// File with the secrets, and its last valid content.
struct LiveSecrets {
    file: PathBuf,
    current: watch::Sender<Arc<WebhookSecrets>>,
}

impl Webhooks {
    /// Creates the webhooks of a region. Names are resolved by the servers of `resolver`, and cached separately.
    pub(super) fn new(
        config: &WebhookConfig,
        region: &RegionId,
        resolver: &Resolver,
    ) -> Result<Webhooks, rustls::Error> {
        let WebhookConfig { policy, secrets, roots } = config.clone();
        let tls = tls_config(roots, region, secrets.is_some())?;
        let secrets = secrets.map(|(file, secrets)| {
            let current = watch::Sender::new(Arc::new(secrets));
            LiveSecrets { file, current }
        });
        Ok(Webhooks { policy, resolver: resolver.with_own_cache(), tls: Arc::new(tls), secrets })
    }

    /// Checks the webhook of a submission; returns its URL in normal form.
    pub(super) async fn accept(
        &self,
        region: &RegionId,
        tenant: &str,
        url: &str,
    ) -> Result<String, Rejection> {
        let rejected = |error: target::WebhookUrlError| {
            let code = match error.is_forbidden_target() {
                true => ErrorCode::WebhookNotPermitted,
                false => ErrorCode::InvalidValue,
            };
            Rejection::new(code, format!("The job is rejected: {error}.")).of("webhook")
        };
        let target = target::check(url, &self.policy).map_err(rejected)?;
        self.check_secret(region, tenant)?;
        target.check_name(&self.policy, &self.resolver, RESOLUTION_TIMEOUT).await.map_err(rejected)?;
        Ok(target.url.into())
    }

    /// Rejects a tenant without a secret.
    pub(super) fn check_secret(&self, region: &RegionId, tenant: &str) -> Result<(), Rejection> {
        let message = match &self.secrets {
            None => format!(
                "Region {region} sends no webhook messages, because [jobs] of its spoke has no webhook_secrets_file; fetch \
                 the result with GET /v1/async/ID instead."
            ),
            Some(secrets) if secrets.current.borrow().of(tenant).is_empty() => format!(
                "The tenant '{tenant}' has no webhook secret in region {region}, so its messages cannot be signed; ask the \
                 operator to add one to webhook_secrets_file of [jobs], or fetch the result with GET /v1/async/ID."
            ),
            Some(_) => return Ok(()),
        };
        Err(Rejection::new(ErrorCode::NoWebhookSecret, message).of("webhook"))
    }

    /// Returns the client of targets; none if the region sends no messages.
    pub(super) fn sender(&self, host: Arc<dyn WebhookHost>) -> Option<WebhookSender> {
        let Webhooks { policy, resolver, tls, secrets } = self;
        secrets.as_ref()?;
        Some(WebhookSender::new(policy.clone(), resolver.clone(), tls.clone(), host))
    }

    /// Returns the secrets of a tenant.
    pub(super) fn secrets_of(&self, tenant: &str) -> Vec<WebhookSecret> {
        let secrets = self.secrets.as_ref();
        secrets.map(|secrets| secrets.current.borrow().of(tenant).to_vec()).unwrap_or_default()
    }
}

/// Returns the settings of TLS to targets.
fn tls_config(
    roots: Option<RootCertStore>,
    region: &RegionId,
    is_used: bool,
) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        || ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
    let with_roots = |roots| Ok(builder()?.with_root_certificates(roots).with_no_client_auth());
    // Without secrets nothing is sent.
    match roots.or_else(|| (!is_used).then(RootCertStore::empty)) {
        Some(roots) => with_roots(roots),
        None => match builder()?.with_platform_verifier() {
            Ok(builder) => Ok(builder.with_no_client_auth()),
            Err(error) => {
                WebhookAuthoritiesMissing { region, error: &error }.record();
                with_roots(RootCertStore::empty())
            }
        },
    }
}

/// Parsed body of a submission.
pub(super) struct SubmittedBody {
    /// Number of inputs.
    pub(super) inputs: u64,
    /// Body of the ordinary request.
    pub(super) payload: Bytes,
    /// URL of the webhook.
    pub(super) webhook: Option<String>,
}

impl SubmittedBody {
    /// Parses a body as a replica does, without the webhook.
    pub(super) fn parse(kind: JobKind, body: Bytes) -> Result<SubmittedBody, Refusal> {
        let (payload, webhook) = match take_webhook(&body)? {
            Some(BodyWebhook { url, body }) => (body.into(), Some(url)),
            None => (body, None),
        };
        Ok(SubmittedBody { inputs: kind.inputs(&payload)?, payload, webhook })
    }
}

/// Returns the URL of a submission's webhook, from its header and its body.
pub(super) fn named(header: Option<&str>, body: Option<String>) -> Result<Option<String>, Rejection> {
    match (header, body) {
        (Some(header), Some(body)) if header != body => {
            let message = format!(
                "The header {} and the field 'webhook.url' of the body are different; send one of them.",
                headers::WEBHOOK_URL
            );
            Err(Rejection::new(ErrorCode::InvalidHeader, message).of(headers::WEBHOOK_URL))
        }
        (header, body) => Ok(body.or(header.map(str::to_owned))),
    }
}

/// Checks that the result of a job can be sent again.
pub(super) fn check_resend(job: &DurableJob) -> Result<(), Rejection> {
    let reason = match &job.status {
        _ if job.spec.webhook.is_none() => "it has no webhook",
        JobStatus::Queued { .. } | JobStatus::Running { .. } => {
            "it is not finished; its result is sent when it is"
        }
        JobStatus::Finished { outcome: JobOutcome::Cancelled, .. } => "it was cancelled",
        JobStatus::Finished { .. } => return Ok(()),
    };
    Err(Rejection::new(ErrorCode::NothingToSend, format!("The job has nothing to send: {reason}.")))
}

/// Renders the delivery of a job's result; none without a webhook.
pub(super) fn shown(job: &DurableJob) -> Option<Value> {
    let url = job.spec.webhook.as_deref()?;
    let (status, attempts, last_error, next) = match &job.status {
        JobStatus::Queued { .. } | JobStatus::Running { .. } => ("pending", 0, None, None),
        JobStatus::Finished { delivery, .. } => match delivery {
            // It was cancelled.
            JobDelivery::None => ("stopped", 0, None, None),
            JobDelivery::Pending { progress, not_before } => {
                ("pending", progress.attempts, progress.last_error.as_deref(), Some(seconds(*not_before)))
            }
            JobDelivery::Sending { progress, .. } => {
                ("pending", progress.attempts, progress.last_error.as_deref(), None)
            }
            JobDelivery::Delivered { attempts, .. } => ("delivered", *attempts, None, None),
            JobDelivery::Abandoned { reason, attempts } => ("failed", *attempts, Some(reason.as_str()), None),
            JobDelivery::Stopped { reason, attempts } => ("stopped", *attempts, Some(reason.as_str()), None),
        },
    };
    Some(json!({
        "url": url,
        "status": status,
        "attempts": attempts,
        "last_error": last_error,
        "next_attempt_at": next,
    }))
}

/// Reads the secrets again when their file changes; forever.
pub(in crate::ingress) async fn follow_secrets(queue: Arc<RegionalJobQueue>) {
    let Some(LiveSecrets { file, current }) = &queue.webhooks.secrets else {
        return std::future::pending().await;
    };
    let mut last: Option<Result<Vec<u8>, Vec<String>>> = None;
    let mut interval = tokio::time::interval(RELOAD_PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let path = file.clone();
        let Ok((digest, read)) = tokio::task::spawn_blocking(move || read(&path)).await else { continue };
        let now = match &read {
            Ok(_) => Ok(digest),
            Err(problems) => Err(problems.clone()),
        };
        if last.as_ref() == Some(&now) {
            continue;
        }
        let is_first = last.replace(now).is_none();
        match read {
            Ok(secrets) => {
                let tenants = secrets.tenants();
                current.send_replace(Arc::new(secrets));
                // The first read finds the content of the start, or a change since then.
                if !is_first {
                    WebhookSecretsReloaded { path: file, tenants }.record();
                }
            }
            Err(problems) => {
                WebhookSecretsRejected { path: file, problems: &problems }.record(&queue.metrics);
            }
        }
    }
}

/// Reads the file; returns the digest of its content as well.
fn read(path: &Path) -> (Vec<u8>, Result<WebhookSecrets, Vec<String>>) {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
            (digest.as_ref().to_vec(), WebhookSecrets::parse(&text))
        }
        Err(error) => (Vec::new(), Err(vec![format!("cannot be read: {error}")])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jobs_core::job::{JobOperation, JobSpec, StoredRange, UnixMillis};
    use replica_api::priority::Priority;

    fn job(webhook: Option<&str>, status: JobStatus) -> DurableJob {
        let spec = JobSpec {
            tenant: "a".to_owned(),
            deployment: "m".to_owned(),
            operation: JobOperation::Embeddings,
            priority: Priority::Bulk,
            inputs: 1,
            payload: StoredRange { object: 0, offset: 0, length: 0 },
            deadline: None,
            start_by: None,
            idempotency: None,
            webhook: webhook.map(str::to_owned),
            chunk: None,
            residency: None,
            trace: None,
        };
        DurableJob { spec, sequence: 1, attempts: 0, last_error: None, status }
    }

    fn finished(outcome: JobOutcome, delivery: JobDelivery) -> JobStatus {
        JobStatus::Finished { outcome, result: None, at: UnixMillis(0), delivery }
    }

    #[test]
    fn header_and_body_name_one_webhook() {
        let both = |header, body: Option<&str>| named(header, body.map(str::to_owned)).ok();
        assert_eq!(both(None, None), Some(None));
        for (header, body) in [(Some("u"), None), (None, Some("u")), (Some("u"), Some("u"))] {
            assert_eq!(both(header, body), Some(Some("u".to_owned())));
        }
        assert_eq!(both(Some("u"), Some("v")), None);
    }

    #[test]
    fn the_state_of_a_delivery_is_shown() {
        assert_eq!(shown(&job(None, JobStatus::Queued { not_before: UnixMillis(0) })), None);
        let reason = "refused".to_owned();
        for (status, expected) in [
            (JobStatus::Queued { not_before: UnixMillis(0) }, json!(["pending", 0, null])),
            (finished(JobOutcome::Cancelled, JobDelivery::None), json!(["stopped", 0, null])),
            (
                finished(JobOutcome::Succeeded, JobDelivery::Delivered { at: UnixMillis(0), attempts: 2 }),
                json!(["delivered", 2, null]),
            ),
            (
                finished(JobOutcome::Succeeded, JobDelivery::Abandoned { reason, attempts: 3 }),
                json!(["failed", 3, "refused"]),
            ),
        ] {
            let shown = shown(&job(Some("https://e.com/"), status)).expect("a webhook");
            assert_eq!(json!([shown["status"], shown["attempts"], shown["last_error"]]), expected);
            assert_eq!(shown["url"], "https://e.com/");
        }
    }

    #[test]
    fn only_a_finished_job_with_a_webhook_is_sent_again() {
        let delivered = JobDelivery::Delivered { at: UnixMillis(0), attempts: 1 };
        assert!(check_resend(&job(Some("u"), finished(JobOutcome::Succeeded, delivered))).is_ok());
        for (webhook, status, reason) in [
            (None, finished(JobOutcome::Succeeded, JobDelivery::None), "it has no webhook"),
            (Some("u"), JobStatus::Queued { not_before: UnixMillis(0) }, "it is not finished"),
            (Some("u"), finished(JobOutcome::Cancelled, JobDelivery::None), "it was cancelled"),
        ] {
            let rejection = check_resend(&job(webhook, status)).expect_err(reason);
            assert_eq!(rejection.code, ErrorCode::NothingToSend);
            assert!(rejection.message.contains(reason), "{}", rejection.message);
        }
    }
}
