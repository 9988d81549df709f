//! Keeps an eye on one replica. Whoever waits for one hears at once what was seen.

use super::hold::Hold;
use crate::events::ReplicaMismatch;
use replica_core::wire::status::{StateV1, StatusV1};
use scheduler_core::spoke::{ReplicaStatus, Spoke};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

/// How often a replica is asked for its status: as often as the region reports.
const PERIOD: Duration = Duration::from_millis(200);
/// How long it may take to say. A replica that computes on every core answers late, not never.
const TIMEOUT: Duration = Duration::from_millis(900);

/// Asks the replica at `address` for its status, for ever.
pub(super) async fn watch(
    number: usize,
    address: SocketAddr,
    client: reqwest::Client,
    spoke: Arc<Mutex<Spoke>>,
    hold: Arc<Hold>,
) {
    let url = format!("http://{address}/status");
    let region = spoke.lock().region().clone();
    let mut beat = tokio::time::interval(PERIOD);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        beat.tick().await;
        match ask(&client, &url).await {
            Ok(observed) => {
                let mismatches = spoke.lock().observe_replica(number, observed, Instant::now());
                mismatches
                    .into_iter()
                    .for_each(|mismatch| ReplicaMismatch { region: &region, mismatch }.record());
            }
            Err(ProbeError::Http(error)) if error.is_timeout() => {
                tracing::debug!(url, "a replica is slow to say how it is");
                spoke.lock().replica_late(number, Instant::now());
            }
            Err(error) => {
                tracing::debug!(url, %error, "a replica does not say how it is");
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
    #[error("its status cannot be read: {0}")]
    Status(String),
}

async fn ask(client: &reqwest::Client, url: &str) -> Result<ReplicaStatus, ProbeError> {
    let answer = client.get(url).timeout(TIMEOUT).send().await?.error_for_status()?;
    observed(answer.json().await?).map_err(ProbeError::Status)
}

/// What the region makes of a replica's own words.
fn observed(status: StatusV1) -> Result<ReplicaStatus, String> {
    let StatusV1 {
        version,
        names,
        model: source,
        identity,
        state,
        pending_tokens,
        interactive_tokens,
        pending_inputs: _, // tokens say more
        requests_total: _, // for people
        tokens_per_second,
    } = status;
    if version != 1 {
        return Err(format!("version {version} is not spoken here, only 1"));
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
