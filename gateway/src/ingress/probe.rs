//! Keeps an eye on one replica. Whoever waits for one hears at once what was seen.

use super::hold::Hold;
use super::lock;
use replica_core::wire::status::{StateV1, StatusV1};
use scheduler_core::spoke::{ReplicaObserved, Spoke};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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
    let mut beat = tokio::time::interval(PERIOD);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        beat.tick().await;
        match ask(&client, &url).await {
            Ok(observed) => lock(&spoke).observe_replica(number, observed, Instant::now()),
            Err(ProbeError::Http(error)) if error.is_timeout() => {
                tracing::debug!(url, "a replica is slow to say how it is");
                lock(&spoke).replica_late(number, Instant::now());
            }
            Err(error) => {
                tracing::debug!(url, %error, "a replica does not say how it is");
                lock(&spoke).replica_failed(number, Instant::now());
            }
        }
        if lock(&spoke).somebody_waits() {
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

async fn ask(client: &reqwest::Client, url: &str) -> Result<ReplicaObserved, ProbeError> {
    let answer = client.get(url).timeout(TIMEOUT).send().await?.error_for_status()?;
    observed(answer.json().await?).map_err(ProbeError::Status)
}

/// What the region makes of a replica's own words.
fn observed(status: StatusV1) -> Result<ReplicaObserved, String> {
    let StatusV1 {
        version,
        names,
        model: _, // the region chooses by deployment
        state,
        pending_tokens,
        lookup_tokens,
        pending_inputs: _, // tokens say more
        requests_total: _, // for people
        tokens_per_second,
    } = status;
    if version != 1 {
        return Err(format!("version {version} is not spoken here, only 1"));
    }
    let names = names.iter().map(|name| name.parse()).collect::<Result<_, _>>();
    Ok(ReplicaObserved {
        names: names.map_err(|error| format!("names: {error}"))?,
        ready: state == StateV1::Ready,
        draining: state == StateV1::Draining,
        pending_tokens,
        lookup_tokens,
        tokens_per_second,
    })
}
