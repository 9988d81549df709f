//! Messages between a gateway and the region of a queue ([`scheduler_api::job_transfer`]).

use crate::config::EdgeConfig;
use crate::hop::UpstreamKey;
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::Bytes;
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::AllowedRegions;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use jobs_core::transfer::TRANSFER_BYTES_MAX;
use replica_api::headers;
use replica_api::jobs::JobKind;
use scheduler_api::job_transfer::{
    self, JobGroupV1, LINE_BYTES_MAX, PULL_WAIT_MAX, PullRequestV1, PulledRequestV1, RenewalV1, WAITING_MAX,
    WaitingJobsV1,
};
use scheduler_api::{VERSION, paths};
use std::sync::Arc;
use std::time::Duration;
use telemetry::context::TraceContext;
use tokio::time::{Instant, sleep, timeout};

/// Timeout of a message without a body, beyond the time for which the region holds it; and of a connection.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of a message with a body: the largest result over a slow link.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest message about waiting jobs: the maximum number of groups, each with names and a policy of the maximum length.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Longest message with a request.
const PULLED_BYTES_MAX: usize = LINE_BYTES_MAX + 1 + TRANSFER_BYTES_MAX as usize;
/// Longest identifier of a request.
const ID_BYTES_MAX: usize = 128;
/// Shortest lease of a ticket that is accepted: a renewal is a message over the longest distance.
const LEASE_MIN: Duration = Duration::from_secs(1);

/// Client of the regions with a queue.
pub(in crate::edge) struct QueueClient {
    pub(in crate::edge) config: Arc<EdgeConfig>,
    pub(in crate::edge) upstream: Arc<Upstream>,
}

/// Request that was pulled.
pub(super) struct PulledTransfer {
    pub(super) ticket: u64,
    pub(super) id: String,
    /// Path at the replica.
    pub(super) path: &'static str,
    /// Span of the request at the region of the queue, for the region that computes it.
    pub(super) traceparent: Option<String>,
    lease: Duration,
    pub(super) body: Bytes,
}

impl QueueClient {
    /// Returns the groups of jobs that wait for too long.
    pub(super) async fn waiting(&self, host: &UpstreamKey) -> Result<Vec<JobGroupV1>, String> {
        let limits = (WAITING_BYTES_MAX, WAITING_MAX + MESSAGE_TIMEOUT);
        let body = self.send(host, paths::JOBS_WAITING, Bytes::new(), limits).await?;
        let message: WaitingJobsV1 = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        let groups = message.into_groups().map_err(|error| error.to_string())?;
        Ok(groups.into_iter().map(|waiting| waiting.group).collect())
    }

    /// Pulls a request; none if there is none for the target.
    pub(super) async fn pull(
        &self,
        host: &UpstreamKey,
        message: &PullRequestV1,
    ) -> Result<Option<PulledTransfer>, String> {
        let body = serde_json::to_vec(message).expect("a message serialises to JSON");
        let limits = (PULLED_BYTES_MAX, PULL_WAIT_MAX + BODY_TIMEOUT);
        let message = self.send(host, paths::JOBS_PULL, body.into(), limits).await?;
        if message.is_empty() {
            return Ok(None);
        }
        let line = job_transfer::first_line::<PulledRequestV1>(&message);
        let (line, at) = line.map_err(|error| error.to_string())?;
        let PulledRequestV1 { version: _, ticket, id, path, lease_ms, traceparent } = line;
        let is_valid = id.len() <= ID_BYTES_MAX && id.bytes().all(|byte| byte.is_ascii_graphic());
        // Otherwise the region has a later version; the ticket expires.
        let kind = JobKind::of_computed(&path).filter(|_| is_valid);
        let path = kind.ok_or("the message has an unknown path or an invalid identifier")?.computed_path();
        let lease = Duration::from_millis(lease_ms).max(LEASE_MIN);
        let span = traceparent.and_then(|span| TraceContext::parse(span.as_bytes()));
        let traceparent = span.map(|span| span.traceparent());
        Ok(Some(PulledTransfer { ticket, id, path, traceparent, lease, body: message.slice(at..) }))
    }

    /// Renews a ticket until it has ended, or must have expired because no renewal succeeded.
    pub(super) async fn renew_until_lost(&self, host: &UpstreamKey, pulled: &PulledTransfer) {
        let message = RenewalV1 { version: VERSION, ticket: pulled.ticket };
        let body = Bytes::from(serde_json::to_vec(&message).expect("a message serialises to JSON"));
        let mut renewed_at = Instant::now();
        loop {
            sleep(pulled.lease / 3).await;
            let limits = (LINE_BYTES_MAX, MESSAGE_TIMEOUT);
            match self.exchange(host, paths::JOBS_RENEW, body.clone(), limits).await {
                Ok((404, _)) => return,
                Ok((200..300, _)) => renewed_at = Instant::now(),
                Ok(_) | Err(_) if renewed_at.elapsed() >= pulled.lease => return,
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Returns a result to the region of the queue, which must be one of the regions that may see it. Returns the status.
    pub(super) async fn return_result(
        &self,
        host: &UpstreamKey,
        permitted: &AllowedRegions,
        message: Bytes,
    ) -> Result<u16, String> {
        let sent = async {
            loop {
                let to = permitted.open(host.region, host.address.clone());
                let to = to.map_err(|_| "the residency policy does not allow the region")?;
                let head = self.head(paths::JOBS_RESULT, message.len());
                let body = permitted.seal(message.clone());
                match self.upstream.send(to, MESSAGE_TIMEOUT, head, body, LINE_BYTES_MAX).await {
                    // Another idle connection or a new one: the number of idle ones is finite.
                    Err(AttemptFailure::StaleConnection) => {}
                    Err(failure) => return Err(format!("{failure:?}")),
                    Ok(response) => return Ok(response.head.status.as_u16()),
                }
            }
        };
        timeout(BODY_TIMEOUT, sent).await.map_err(|late| late.to_string())?
    }

    /// Sends a message without the content of a job, and returns the body of a successful response.
    async fn send(
        &self,
        host: &UpstreamKey,
        path: &'static str,
        body: Bytes,
        limits: (usize, Duration),
    ) -> Result<Bytes, String> {
        match self.exchange(host, path, body, limits).await? {
            (200, body) => Ok(body),
            (status, _) => Err(format!("the region responded {status}")),
        }
    }

    async fn exchange(
        &self,
        host: &UpstreamKey,
        path: &'static str,
        body: Bytes,
        (bytes_max, limit): (usize, Duration),
    ) -> Result<(u16, Bytes), String> {
        let head = self.head(path, body.len());
        let sent = self.upstream.send_own(host, &head, &body, bytes_max);
        let sent = timeout(limit, sent).await.map_err(|late| late.to_string())?;
        let (UpstreamResponse { head, body }, _) = sent.map_err(|failure| format!("{failure:?}"))?;
        match body {
            ResponseBody::Buffered(body) => Ok((head.status.as_u16(), body)),
            ResponseBody::Streamed(_) => Err(format!("the response is longer than {bytes_max} bytes")),
        }
    }

    fn head(&self, path: &'static str, bytes: usize) -> RequestHead {
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path(path);
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_TYPE.as_str(), "application/octet-stream");
        head.put(CONTENT_LENGTH.as_str(), bytes.to_string());
        head.put(headers::GATEWAY_REGION, self.config.region.as_str());
        head
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;
    use axum::response::IntoResponse;
    use resolver::Resolver;
    use std::future::IntoFuture;

    /// Starts a region that responds to each pull with this status and body, and returns its client and address.
    async fn region(status: u16, body: String) -> (QueueClient, UpstreamKey) {
        let response = move || async move { (StatusCode::from_u16(status).unwrap(), body).into_response() };
        let router = axum::Router::new().route(paths::JOBS_PULL, axum::routing::post(response));
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(axum::serve(socket, router).into_future());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tenants.toml"), "[[tenant]]\nname = 'a'\nkey_env = 'KEY'\n").unwrap();
        let text = "listen = '127.0.0.1:0'\noperations = '127.0.0.1:0'\nregion = 'aws/us-east-1'\n\
                    hub = 'http://127.0.0.1:1'\nsnapshot = 'routes'\ntenants = 'tenants.toml'\n";
        let environment = [("KEY".to_owned(), "KEY".to_owned())].into();
        let config = Arc::new(EdgeConfig::parse(text, dir.path(), &environment).unwrap());
        let resolver = Resolver::new(&config.dns);
        let upstream = Upstream::to_regions(&config.transport, false, &config.catalogue, resolver).unwrap();
        let region = config.catalogue.all().iter().next().unwrap();
        let key = UpstreamKey { region, address: address.to_string().parse().unwrap() };
        (QueueClient { config, upstream: Arc::new(upstream) }, key)
    }

    async fn pull(status: u16, body: String) -> Result<Option<PulledTransfer>, String> {
        let (client, key) = region(status, body).await;
        let names = ["m", "a", "anywhere"].map(str::to_owned);
        let [deployment, tenant, residency] = names;
        let message = PullRequestV1 {
            version: VERSION,
            group: JobGroupV1 { deployment, tenant, residency },
            target: "aws/eu-central-1".to_owned(),
            ready: 1,
            pending_tokens: 0,
            tokens_per_second: 1000.0,
        };
        client.pull(&key, &message).await
    }

    #[tokio::test]
    async fn a_pull_that_fails_is_not_one_without_a_request() {
        assert!(pull(200, String::new()).await.is_ok_and(|pulled| pulled.is_none()));
        for status in [429, 503] {
            assert!(pull(status, String::new()).await.is_err(), "{status}");
        }
        assert!(pull(200, "no line".to_owned()).await.is_err());
    }

    #[tokio::test]
    async fn a_request_is_pulled_with_its_span_unless_it_is_invalid_or_absent() {
        let span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let pulled = async |traceparent: Option<&str>| {
            let line = PulledRequestV1 {
                version: VERSION,
                ticket: 1,
                id: "id".to_owned(),
                path: "/v1/embeddings".to_owned(),
                lease_ms: 15_000,
                traceparent: traceparent.map(str::to_owned),
            };
            let message = format!("{}\n{{}}", serde_json::to_string(&line).unwrap());
            pull(200, message).await.unwrap().expect("a request").traceparent
        };
        assert_eq!(pulled(Some(span)).await.as_deref(), Some(span));
        assert_eq!(pulled(Some("a\r\nb: c")).await, None);
        assert_eq!(pulled(None).await, None);
    }

    #[tokio::test]
    async fn the_largest_request_is_pulled_and_a_longer_one_is_an_error() {
        let line = PulledRequestV1 {
            version: VERSION,
            ticket: 1,
            id: "id".to_owned(),
            path: "/v1/embeddings".to_owned(),
            lease_ms: 15_000,
            traceparent: None,
        };
        let mut line = serde_json::to_string(&line).unwrap();
        line.push_str(&" ".repeat(LINE_BYTES_MAX - line.len()));
        let message = |bytes: u64| format!("{line}\n{}", "x".repeat(bytes as usize));
        let pulled = pull(200, message(TRANSFER_BYTES_MAX)).await.unwrap().expect("a request");
        assert_eq!(pulled.body.len() as u64, TRANSFER_BYTES_MAX);
        assert!(pull(200, message(TRANSFER_BYTES_MAX + 1)).await.is_err());
    }
}
