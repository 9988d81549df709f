//! Sends results to webhooks.
//!
//! Each attempt resolves the name, connects to one of the permitted addresses, and sends one request on this connection.
//! Redirects are not followed: a target could redirect to an address that is not permitted.

use super::signature::{WebhookSecret, sign};
use crate::queue_host::{QueueHost, TakenJob};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, RETRY_AFTER, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use jobs_core::decide::{DeliveryEnd, JobWorker};
use jobs_core::job::{DurableJob, DurableJobId, JobOutcome, JobPhase, JobStatus};
use jobs_core::webhook::WebhookPolicy;
use regions::HostPort;
use resolver::Resolver;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use supervision::task::contained;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use url::Url;

/// Timeout of an attempt, the time that the specification recommends (15 to 30 s).
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(15);
/// Results that are sent at the same time.
const IN_FLIGHT_MAX: usize = 64;
/// Pause without a due result, and after an error of the queue.
const IDLE_PAUSE: Duration = Duration::from_millis(200);
/// Lease for a delivery: the timeout of an attempt, and time to store its end.
const LEASE: Duration = Duration::from_secs(60);

/// Returns the secrets of a tenant.
pub type TenantSecrets = dyn Fn(&str) -> Vec<WebhookSecret> + Send + Sync;

/// Client of webhook targets.
pub struct WebhookSender {
    policy: WebhookPolicy,
    resolver: Resolver,
    tls: TlsConnector,
    secrets: Box<TenantSecrets>,
}

impl WebhookSender {
    /// Creates a client.
    pub fn new(
        policy: WebhookPolicy,
        resolver: Resolver,
        tls: Arc<ClientConfig>,
        secrets: Box<TenantSecrets>,
    ) -> WebhookSender {
        WebhookSender { policy, resolver, tls: TlsConnector::from(tls), secrets }
    }

    /// Sends results of a queue until the task is dropped. `number` identifies the process.
    pub async fn run(self: Arc<WebhookSender>, queue: QueueHost, number: u64) {
        let worker = JobWorker { number, lease: LEASE };
        let mut sending = JoinSet::new();
        loop {
            while sending.try_join_next().is_some() {}
            let free = IN_FLIGHT_MAX - sending.len();
            let taken = match free {
                0 => Vec::new(),
                free => queue.take_deliveries(free, worker).await.unwrap_or_default(),
            };
            if taken.is_empty() {
                tokio::select! {
                    Some(_) = sending.join_next() => {}
                    () = tokio::time::sleep(IDLE_PAUSE) => {}
                }
            }
            for job in taken {
                let (sender, queue) = (self.clone(), queue.clone());
                // After a panic, or if the end cannot be stored, the lease expires and the result is sent again.
                sending.spawn(contained("webhook delivery", async move {
                    let end = sender.send(&job).await;
                    queue.end_delivery(job.id, job.token, end).await.ok();
                }));
            }
        }
    }

    /// Makes one attempt.
    pub async fn send(&self, taken: &TakenJob) -> DeliveryEnd {
        let attempt = tokio::time::timeout(ATTEMPT_TIMEOUT, self.attempt(taken));
        let outcome =
            attempt.await.unwrap_or_else(|_| Err(format!("no response within {ATTEMPT_TIMEOUT:?}")));
        match outcome {
            Ok((status, _)) if status.is_success() => DeliveryEnd::Accepted,
            Ok((StatusCode::GONE, _)) => DeliveryEnd::Gone,
            Ok((status, retry_after)) => {
                let note = if status.is_redirection() { "; redirects are not followed" } else { "" };
                DeliveryEnd::Failed {
                    reason: format!("the target responded {}{note}", status.as_u16()),
                    retry_after,
                }
            }
            Err(reason) => DeliveryEnd::Failed { reason, retry_after: None },
        }
    }

    async fn attempt(&self, taken: &TakenJob) -> Result<(StatusCode, Option<Duration>), String> {
        let url = taken.job.spec.webhook.as_deref().unwrap_or_default();
        let url = super::target::check(url, &self.policy).map_err(|error| error.to_string())?;
        let host = url.host_str().unwrap_or_default();
        let port = url.port_or_known_default().unwrap_or(443);
        let endpoint: HostPort =
            format!("{host}:{port}").parse().map_err(|error| format!("the URL: {error}"))?;
        let connect =
            self.resolver.connect(&endpoint, ATTEMPT_TIMEOUT, |address| self.policy.permits(address));
        let tcp = connect.await.map_err(|error| error.to_string())?;
        if url.scheme() == "http" {
            return self.exchange(tcp, &url, taken).await;
        }
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare).map_err(|error| error.to_string())?;
        let stream = self.tls.connect(name, tcp).await.map_err(|error| format!("TLS: {error}"))?;
        self.exchange(stream, &url, taken).await
    }

    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        url: &Url,
        taken: &TakenJob,
    ) -> Result<(StatusCode, Option<Duration>), String> {
        let failed = |error: hyper::Error| format!("the connection failed: {error}");
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(failed)?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Its failure is that of the request.
            contained("webhook connection", connection).await.map(Result::ok);
        });
        let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let (id, body) = (taken.id.to_string(), message(taken.id, &taken.job, &taken.body));
        let signature = sign(&(self.secrets)(&taken.job.spec.tenant), &id, seconds, &body);
        let request = Request::post(&url[url::Position::BeforePath..url::Position::AfterQuery])
            .header(HOST, &url[url::Position::BeforeHost..url::Position::AfterPort])
            .header(USER_AGENT, "meridian")
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", seconds)
            .header("webhook-signature", signature)
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await.map_err(failed)?;
        Ok((response.status(), retry_after(response.headers())))
    }
}

/// Returns the time of `retry-after` in seconds; a date is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

/// Returns the body of a message: an event with the job and its result, which is JSON.
pub fn message(id: DurableJobId, job: &DurableJob, result: &[u8]) -> Bytes {
    let status = match JobPhase::of(job) {
        JobPhase::Succeeded => "succeeded",
        JobPhase::Cancelled => "cancelled",
        JobPhase::Expired => "expired",
        JobPhase::Queued | JobPhase::Running | JobPhase::Failed => "failed",
    };
    let (at, error) = match &job.status {
        JobStatus::Finished { at, outcome: JobOutcome::Failed { reason }, .. } => (*at, Some(reason)),
        JobStatus::Finished { at, .. } => (*at, None),
        _ => (id.submitted(), None),
    };
    let time = humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + Duration::from_millis(at.0));
    let mut body =
        format!(r#"{{"type":"job.{status}","timestamp":"{time}","data":{{"id":"{id}","status":"{status}""#)
            .into_bytes();
    if let Some(reason) = error {
        body.extend_from_slice(format!(r#","error":{{"message":{}}}"#, serde_json::json!(reason)).as_bytes());
    }
    if !result.is_empty() {
        body.extend_from_slice(br#","result":"#);
        body.extend_from_slice(result);
    }
    body.extend_from_slice(b"}}");
    body.into()
}
