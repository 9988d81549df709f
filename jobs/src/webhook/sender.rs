//! Sends results to webhooks.
//!
//! Each attempt resolves the name, connects to one of the permitted addresses, and sends one request on this connection.
//! Redirects are not followed: a target could redirect to an address that is not permitted.

use super::signature::{WebhookSecret, sign};
use super::target::WebhookTarget;
use crate::queue_host::{QueueError, QueueHost, TakenJob};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, RETRY_AFTER, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use jobs_core::decide::{DeliveryEnd, JobWorker};
use jobs_core::delivery::{DeliveriesInFlight, DeliveryLimits};
use jobs_core::record::DeliveryOutcome;
use jobs_core::webhook::WebhookPolicy;
use resolver::Resolver;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use supervision::task::contained;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::{Id, JoinError, JoinSet};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use url::Url;

/// Timeout of an attempt, the time that the specification recommends (15 to 30 s).
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(15);
/// Results that are sent at the same time, together and to one host.
const LIMITS: DeliveryLimits = DeliveryLimits { total: 64, per_host: 16 };
/// Pause without a due result, and after an error of the queue.
const IDLE_PAUSE: Duration = Duration::from_millis(200);
/// Lease for a delivery: the timeout of an attempt, and time to store its end. After the end of the process its results are
/// sent again so much later.
const LEASE: Duration = Duration::from_secs(25);
/// Longest reason of a failed attempt that is stored, characters. A target selects a part of it.
const REASON_CHARS_MAX: usize = 300;

/// Message of a webhook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookMessage {
    /// Identifier, the same in every attempt.
    pub id: String,
    /// Body: JSON.
    pub body: Bytes,
}

/// Process that runs a [`WebhookSender`]: it knows how clients see a job, and the secrets of its tenants.
pub trait WebhookHost: Send + Sync {
    /// Returns the message about a job.
    fn message(&self, taken: &TakenJob) -> WebhookMessage;
    /// Returns the secrets of a tenant.
    fn secrets(&self, tenant: &str) -> Vec<WebhookSecret>;
    /// Whether the process stops soon, and takes no further results.
    fn is_draining(&self) -> bool;
    /// Records an attempt that began at `began` and has ended, and what follows it.
    fn ended(
        &self,
        taken: &TakenJob,
        began: Instant,
        end: &DeliveryEnd,
        follows: &Result<DeliveryOutcome, QueueError>,
    );
}

/// Client of webhook targets.
pub struct WebhookSender {
    policy: WebhookPolicy,
    resolver: Resolver,
    tls: TlsConnector,
    host: Arc<dyn WebhookHost>,
}

impl WebhookSender {
    /// Creates a client.
    pub fn new(
        policy: WebhookPolicy,
        resolver: Resolver,
        tls: Arc<ClientConfig>,
        host: Arc<dyn WebhookHost>,
    ) -> WebhookSender {
        WebhookSender { policy, resolver, tls: TlsConnector::from(tls), host }
    }

    /// Sends results of a queue until the task is dropped. `number` identifies the process.
    pub async fn run(self: Arc<WebhookSender>, queue: QueueHost, number: u64) {
        let worker = JobWorker { number, lease: LEASE };
        let mut sending = JoinSet::new();
        let mut in_flight = DeliveriesInFlight::default();
        // Tenant and URL of each task.
        let mut targets = HashMap::new();
        let ended = |in_flight: &mut DeliveriesInFlight, targets: &mut HashMap<Id, (String, String)>, id| {
            if let Some((tenant, url)) = targets.remove(&id) {
                in_flight.end(&tenant, &url);
            }
        };
        loop {
            while let Some(joined) = sending.try_join_next_with_id() {
                ended(&mut in_flight, &mut targets, task_id(&joined));
            }
            let taken = match self.host.is_draining() {
                true => Vec::new(),
                false => queue.take_deliveries(&in_flight, LIMITS, worker).await.unwrap_or_default(),
            };
            if taken.is_empty() {
                tokio::select! {
                    Some(joined) = sending.join_next_with_id() => {
                        ended(&mut in_flight, &mut targets, task_id(&joined));
                    }
                    () = tokio::time::sleep(IDLE_PAUSE) => {}
                }
            }
            for job in taken {
                let url = job.job.spec.webhook.clone().unwrap_or_default();
                let target = (job.job.spec.tenant.clone(), url);
                in_flight.begin(&target.0, &target.1);
                let (sender, queue) = (self.clone(), queue.clone());
                // After a panic, or if the end cannot be stored, the lease expires and the result is sent again.
                let task = sending.spawn(contained("webhook delivery", async move {
                    let began = Instant::now();
                    let end = sender.send(&job).await;
                    let follows = queue.end_delivery(job.id, job.token, end.clone()).await;
                    sender.host.ended(&job, began, &end, &follows);
                }));
                targets.insert(task.id(), target);
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
            Err(reason) => {
                let reason = reason.chars().take(REASON_CHARS_MAX).collect();
                DeliveryEnd::Failed { reason, retry_after: None }
            }
        }
    }

    async fn attempt(&self, taken: &TakenJob) -> Result<(StatusCode, Option<Duration>), String> {
        let url = taken.job.spec.webhook.as_deref().unwrap_or_default();
        let target = super::target::check(url, &self.policy).map_err(|error| error.to_string())?;
        let WebhookTarget { url, endpoint } = &target;
        let permitted = |address| self.policy.permits(address, target.is_plaintext());
        let tcp = self.resolver.connect(endpoint, ATTEMPT_TIMEOUT, permitted).await;
        let tcp = tcp.map_err(|error| error.to_string())?;
        if target.is_plaintext() {
            return self.exchange(tcp, url, taken).await;
        }
        let host = url.host_str().unwrap_or_default();
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare).map_err(|error| error.to_string())?;
        let stream = self.tls.connect(name, tcp).await.map_err(|error| format!("TLS: {error}"))?;
        self.exchange(stream, url, taken).await
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
        let secrets = self.host.secrets(&taken.job.spec.tenant);
        if secrets.is_empty() {
            // The operator has removed them since the submission. A message without a signature would be worthless.
            return Err("the tenant has no webhook secret; ask the operator to add one".to_owned());
        }
        let WebhookMessage { id, body } = self.host.message(taken);
        let signature = sign(&secrets, &id, seconds, &body);
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
        Ok((response.status(), retry_after(response.headers(), SystemTime::now())))
    }
}

fn task_id<T>(joined: &Result<(Id, T), JoinError>) -> Id {
    match joined {
        Ok((id, _)) => *id,
        Err(error) => error.id(),
    }
}

/// Returns the time of `retry-after`, which is a number of seconds or a date (RFC 9110, 10.2.3).
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    httpdate::parse_http_date(text).ok()?.duration_since(now).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_a_number_of_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777 - 60);
        for (text, expected) in [
            ("120", Some(120)),
            (" 0 ", Some(0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", None),
            ("soon", None),
            ("-1", None),
            ("", None),
        ] {
            let headers = [(RETRY_AFTER, text.parse().unwrap())].into_iter().collect();
            assert_eq!(retry_after(&headers, now), expected.map(Duration::from_secs), "{text}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }
}
