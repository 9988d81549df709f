//! Probe of one replica. Each result may release held requests at once.

use super::hold::Hold;
use crate::events::ReplicaMismatch;
use regions::HostPort;
use replica_api::status::{StateV1, StatusV1};
use scheduler_core::spoke::{ReplicaStatus, Spoke};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Interval of the status requests: the report period of the region.
const PERIOD: Duration = Duration::from_millis(200);
/// Timeout of a status request. A replica that computes on all cores responds late, but it responds.
const TIMEOUT: Duration = Duration::from_millis(900);

/// Polls the status of the replica at `address`.
pub(super) async fn watch(
    number: usize,
    address: HostPort,
    client: reqwest::Client,
    spoke: Arc<Mutex<Spoke>>,
    hold: Arc<Hold>,
) {
    let url = format!("http://{address}/status");
    let region = spoke.lock().region().clone();
    let mut interval = tokio::time::interval(PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        match probe(&client, &url).await {
            Ok(observed) => {
                let mismatches = spoke.lock().observe_replica(number, observed, Instant::now());
                mismatches
                    .into_iter()
                    .for_each(|mismatch| ReplicaMismatch { region: &region, mismatch }.record());
            }
            Err(ProbeError::Http(error)) if error.is_timeout() => {
                tracing::debug!(url, "replica status request timed out");
                spoke.lock().replica_late(number, Instant::now());
            }
            Err(error) => {
                tracing::debug!(url, %error, "replica status request failed");
                spoke.lock().replica_failed(number, Instant::now());
            }
        }
        if spoke.lock().any_request_held() {
            hold.call();
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("invalid status: {0}")]
    Status(String),
}

async fn probe(client: &reqwest::Client, url: &str) -> Result<ReplicaStatus, ProbeError> {
    let response = client.get(url).timeout(TIMEOUT).send().await?.error_for_status()?;
    observed(response.json().await?).map_err(ProbeError::Status)
}

/// Converts a replica's status to the region's observation.
fn observed(status: StatusV1) -> Result<ReplicaStatus, String> {
    let StatusV1 {
        version,
        names,
        model: source,
        identity,
        state,
        pending_tokens,
        interactive_tokens,
        pending_inputs: _, // tokens are more precise
        requests_total: _, // for operators
        tokens_per_second,
    } = status;
    if version != 1 {
        return Err(format!("status version {version} is not supported; the supported version is 1"));
    }
    let names = names.iter().map(|name| name.parse()).collect::<Result<_, _>>();
    let model = identity.map(|identity| identity.reported(&source)).transpose()?;
    Ok(ReplicaStatus {
        model,
        names: names.map_err(|error| format!("names: {error}"))?,
        ready: state == StateV1::Ready,
        draining: state == StateV1::Draining,
        pending_tokens,
        interactive_tokens,
        tokens_per_second,
    })
}
