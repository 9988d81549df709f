//! Probe of one replica. Each result may release held requests at once.

use super::hold::Hold;
use super::replicas::Replicas;
use crate::events::{DeploymentFailureChanged, ReplicaMismatch};
use crate::hop::UpstreamKey;
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::upstream::{ResponseBody, Upstream};
use bytes::Bytes;
use gateway_core::outcome::AttemptFailure;
use gateway_core::restarts::ProcessObserver;
use regions::HostPort;
use regions::id::RegionId;
use regions::set::RegionIndex;
use replica_api::paths::STATUS;
use replica_api::status::{DownloadV1, StateV1, StatusV1};
use scheduler_api::start_failure::FailedModel;
use scheduler_core::spoke::{ReplicaStatus, Spoke};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::time::timeout;

/// Interval of the status requests: the report period of the region.
const PERIOD: Duration = Duration::from_millis(200);
/// Timeout of a status request. A replica that computes on all cores responds late, but it responds.
const TIMEOUT: Duration = Duration::from_millis(900);
/// Maximum size of a status: that of one with the names of all its deployments is some kilobytes.
const STATUS_BYTES_MAX: usize = 64 << 10;

/// State that the probes of all replicas share.
pub(super) struct ReplicaProber {
    pub(super) region: RegionId,
    pub(super) here: RegionIndex,
    pub(super) spoke: Arc<Mutex<Spoke>>,
    pub(super) replicas: Arc<Replicas>,
    pub(super) hold: Arc<Hold>,
    pub(super) upstream: Arc<Upstream>,
}

impl ReplicaProber {
    /// Logs the deployments that have failed or recovered.
    pub(super) fn log_failures(&self) {
        let changes = self.spoke.lock().failure_changes(Instant::now());
        changes
            .into_iter()
            .for_each(|change| DeploymentFailureChanged { region: &self.region, change }.record());
    }
}

/// Polls the status of the replica at `address`.
pub(super) async fn watch(number: usize, address: HostPort, prober: Arc<ReplicaProber>) {
    let (spoke, key) = (&prober.spoke, UpstreamKey { region: prober.here, address });
    let mut interval = tokio::time::interval(PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut process = ProcessObserver::default();
    loop {
        interval.tick().await;
        match timeout(TIMEOUT, probe(&prober.upstream, &key)).await {
            Ok(Ok(ProbeResponse { boot_id, download_left, waits_for_pull, observed })) => {
                if process.observed(boot_id, observed.ready && !observed.draining) {
                    prober.replicas.restarted(number);
                }
                let mismatches = {
                    let (mut spoke, now) = (spoke.lock(), Instant::now());
                    spoke.observe_download(number, download_left, now);
                    spoke.observe_pull_wait(number, waits_for_pull);
                    spoke.observe_replica(number, observed, now)
                };
                mismatches
                    .into_iter()
                    .for_each(|mismatch| ReplicaMismatch { region: &prober.region, mismatch }.record());
            }
            Ok(Err(error)) => {
                // The status request to a replica failed (`error`). Repeated failures take the replica out of use.
                tracing::debug!(address = %key.address, %error, "replica status request failed");
                process.failed();
                spoke.lock().replica_failed(number, Instant::now());
            }
            Err(_) => {
                // A replica did not respond to a status request in time. Repeated failures take the replica out of use.
                tracing::debug!(address = %key.address, "replica status request timed out");
                spoke.lock().replica_late(number, Instant::now());
            }
        }
        prober.log_failures();
        if spoke.lock().any_request_held() {
            prober.hold.call();
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error("{0:?}")]
    NoResponse(AttemptFailure),
    /// A replica responded to a status request with this status instead of 200.
    #[error("status code {0}")]
    Code(http::StatusCode),
    /// The status of a replica cannot be read: it has another version, or another server has its address.
    #[error("invalid status: {0}")]
    Status(String),
}

/// Status of a replica, with what the process reports about itself.
struct ProbeResponse {
    boot_id: Option<u64>,
    /// Remaining time of the download of its model.
    download_left: Option<Duration>,
    /// It waits for another process on its machine that pulls its model.
    waits_for_pull: bool,
    observed: ReplicaStatus,
}

/// Requests the status of a replica.
async fn probe(upstream: &Upstream, key: &UpstreamKey) -> Result<ProbeResponse, ProbeError> {
    let mut head = RequestHead::new(UpstreamMethod::Get).for_path(STATUS);
    head.put("host", AUTHORITY);
    let sent = upstream.send_own(key, &head, &Bytes::new(), STATUS_BYTES_MAX).await;
    let (response, _) = sent.map_err(ProbeError::NoResponse)?;
    if !response.head.status.is_success() {
        return Err(ProbeError::Code(response.head.status));
    }
    let ResponseBody::Buffered(body) = response.body else {
        return Err(ProbeError::Status(format!("it has no length, or more than {STATUS_BYTES_MAX} bytes")));
    };
    let status: StatusV1 =
        serde_json::from_slice(&body).map_err(|error| ProbeError::Status(error.to_string()))?;
    let boot_id = status.boot_id;
    let left_ms = status.download.as_ref().and_then(|download| download.left_ms);
    let download_left = left_ms.map(Duration::from_millis);
    let waits_for_pull = status.download.as_ref().is_some_and(DownloadV1::waits_for_pull);
    let observed = observed(status).map_err(ProbeError::Status)?;
    Ok(ProbeResponse { boot_id, download_left, waits_for_pull, observed })
}

/// Converts a replica's status to the region's observation.
fn observed(status: StatusV1) -> Result<ReplicaStatus, String> {
    let StatusV1 {
        version,
        boot_id: _, // for the caller
        names,
        model: source,
        identity,
        state,
        pending_tokens,
        interactive_tokens,
        pending_inputs: _, // tokens are more precise
        requests_total: _, // for operators
        tokens_per_second,
        download: _, // for the caller
        failure,
    } = status;
    if version != 1 {
        return Err(format!("status version {version} is not supported; the supported version is 1"));
    }
    let names = names.iter().map(|name| name.parse()).collect::<Result<_, _>>();
    let failure = failure.filter(|_| state == StateV1::Starting);
    // Without an identity its task and engine are unknown.
    let failure =
        failure.map(|failure| FailedModel { model: source.clone(), task: None, engine: None, failure });
    let model = identity.map(|identity| identity.reported(&source)).transpose()?;
    Ok(ReplicaStatus {
        model,
        failure,
        names: names.map_err(|error| format!("names: {error}"))?,
        ready: state == StateV1::Ready,
        draining: state == StateV1::Draining,
        pending_tokens,
        interactive_tokens,
        tokens_per_second,
    })
}
