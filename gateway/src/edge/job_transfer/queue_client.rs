//! Messages between a gateway and the region of a queue ([`scheduler_api::job_transfer`]).

use crate::config::EdgeConfig;
use crate::hop::UpstreamKey;
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::Bytes;
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::AllowedRegions;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use replica_api::headers;
use replica_api::jobs::JobKind;
use scheduler_api::job_transfer::{
    self, JobGroupV1, LINE_BYTES_MAX, PULL_WAIT_MAX, PullRequestV1, PulledRequestV1, RenewalV1, WAITING_MAX,
    WaitingJobsV1,
};
use scheduler_api::{VERSION, paths};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Timeout of a message without a body, beyond the time for which the region holds it; and of a connection.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of a message with a body: the largest result over a slow link.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest message about waiting jobs: the maximum number of groups, each with names and a policy of the maximum length.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Longest message with a request.
const PULLED_BYTES_MAX: usize = LINE_BYTES_MAX + 1 + (4 << 20);
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

    /// Pulls a request; none if there is none.
    pub(super) async fn pull(&self, host: &UpstreamKey, message: &PullRequestV1) -> Option<PulledTransfer> {
        let body = serde_json::to_vec(message).expect("a message serialises to JSON");
        let limits = (PULLED_BYTES_MAX, PULL_WAIT_MAX + BODY_TIMEOUT);
        let message = self.send(host, paths::JOBS_PULL, body.into(), limits).await.ok()?;
        if message.is_empty() {
            return None;
        }
        let (line, at) = job_transfer::first_line::<PulledRequestV1>(&message).ok()?;
        let PulledRequestV1 { version: _, ticket, id, path, lease_ms } = line;
        let is_valid = id.len() <= ID_BYTES_MAX && id.bytes().all(|byte| byte.is_ascii_graphic());
        // Otherwise the region has a later version; the ticket expires.
        let path = JobKind::of_computed(&path).filter(|_| is_valid)?.computed_path();
        let lease = Duration::from_millis(lease_ms).max(LEASE_MIN);
        Some(PulledTransfer { ticket, id, path, lease, body: message.slice(at..) })
    }

    /// Renews a ticket until it has ended.
    pub(super) async fn renew_until_lost(&self, host: &UpstreamKey, pulled: &PulledTransfer) {
        let message = RenewalV1 { version: VERSION, ticket: pulled.ticket };
        let body = Bytes::from(serde_json::to_vec(&message).expect("a message serialises to JSON"));
        loop {
            sleep(pulled.lease / 3).await;
            let limits = (LINE_BYTES_MAX, MESSAGE_TIMEOUT);
            if let Ok((404, _)) = self.exchange(host, paths::JOBS_RENEW, body.clone(), limits).await {
                return;
            }
        }
    }

    /// Returns a result to the region of the queue, which must be one of the regions that may see it.
    pub(super) async fn return_result(
        &self,
        host: &UpstreamKey,
        permitted: &AllowedRegions,
        message: Bytes,
    ) -> Result<(), String> {
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
        match timeout(BODY_TIMEOUT, sent).await.map_err(|late| late.to_string())?? {
            // 404: the ticket had ended.
            200 | 404 => Ok(()),
            status => Err(format!("the region responded {status}")),
        }
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
