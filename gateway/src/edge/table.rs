//! Watches the route table of the hub, and keeps serving without the hub. With several hubs any of them may be polled:
//! the table with the higher generation is the newer one.
//!
//! A table is accepted only if its generation is higher than the current one, so a hub restored from an old backup
//! cannot send traffic to removed regions. An accepted table is written to disk before it is used
//! ([`super::snapshot`]), so a gateway that starts while the hub is down serves from the last good table.

use super::policy_clock::PolicyClock;
use super::snapshot::{self, AcceptanceTime, unix_time};
use super::tenants::Tenants;
use super::view::View;
use crate::config::EdgeConfig;
use crate::metrics::EdgeMetrics;
use http::StatusCode;
use rand::Rng;
use scheduler_api::reader::{Reader, Role};
use scheduler_api::route::RouteTableV1;
use scheduler_core::table_watch;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Duration of a long poll while the table does not change.
const LONG_POLL: Duration = Duration::from_secs(20);
/// Shorter long poll where there is another hub, so that a hub that hangs is detected sooner.
const LONG_POLL_WITH_ALTERNATIVE: Duration = Duration::from_secs(4);
/// Long poll before the first table, without which no request can be served.
const FIRST_POLL_WITH_ALTERNATIVE: Duration = Duration::from_millis(500);
/// Time by which the request timeout exceeds the long poll.
const GRACE: Duration = Duration::from_secs(5);
const GRACE_WITH_ALTERNATIVE: Duration = Duration::from_secs(1);
/// Pause between polls while no hub responds; half of it is random, so that gateways do not retry in step.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// View of the current route table; `None` before the first.
pub(crate) type Current = Option<Arc<View>>;

/// Loads the route table from disk, if there is a valid one.
pub(crate) fn restore(config: &EdgeConfig, tenants: &Tenants, metrics: &EdgeMetrics) -> Current {
    match snapshot::load::<RouteTableV1>(&config.snapshot) {
        Ok(table) => {
            tracing::info!(generation = %table.generation, "route table restored from disk");
            Some(Arc::new(View::new(&table, &config.catalogue, tenants.apply_table(&table))))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            metrics.tables_refused.add(1);
            tracing::warn!(snapshot = %config.snapshot.display(), %error, "route table on disk rejected");
            None
        }
    }
}

/// Identity of this process towards the hub.
pub(crate) fn reader(config: &EdgeConfig) -> Reader {
    Reader { role: Role::Gateway, region: config.region.clone(), boot_id: rand::rng().random() }
}

/// Deregisters this process as a reader of the route table.
pub(crate) async fn deregister(config: &EdgeConfig, client: &reqwest::Client, reader: &Reader) {
    let request = client.delete(format!("{}{}", config.hub.current(), table_watch::deregister_path(reader)));
    let request = config.fleet.iter().fold(request, |request, token| request.bearer_auth(token.secret()));
    // An error is ignored: the hub drops a silent reader later.
    request.timeout(table_watch::DEREGISTER_TIMEOUT).send().await.ok();
}

/// Watches the route table for ever.
pub(crate) async fn follow(
    config: Arc<EdgeConfig>,
    client: reqwest::Client,
    reader: Reader,
    views: watch::Sender<Current>,
    tenants: Arc<Tenants>,
    metrics: Arc<EdgeMetrics>,
    clock: Arc<PolicyClock>,
) {
    let hubs = &config.hub;
    let (mut reachable, mut failures) = (true, 0_usize);
    let mut accepted_at = AcceptanceTime::of_file(&config.snapshot);
    loop {
        let hub = hubs.current();
        let Err(error) = poll(&config, hub, &client, &reader, &views, &mut accepted_at, &tenants).await
        else {
            // The hub has the same table, or sent a newer one, which is current now.
            clock.confirm().await;
            failures = 0;
            if !std::mem::replace(&mut reachable, true) {
                tracing::info!(hub, "hub reachable again");
            }
            continue;
        };
        if matches!(error, HubPollError::Table(_)) {
            metrics.tables_refused.add(1);
        }
        hubs.failed(hub);
        failures = failures.wrapping_add(1);
        if !failures.is_multiple_of(hubs.count()) {
            tracing::info!(hub, %error, next = %hubs, "hub poll failed; trying the next hub");
            continue;
        }
        if std::mem::replace(&mut reachable, false) {
            tracing::warn!(hub, %error, "hub unreachable; keeping the current route table");
        }
        let pause = RETRY_PAUSE.mul_f64(rand::rng().random_range(0.5..1.0));
        tokio::time::sleep(pause).await;
    }
}

/// Error of a poll of a hub.
#[derive(Debug, thiserror::Error)]
enum HubPollError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error(
        "the hub responded {0}: it requires the fleet token; set fleet_token_file or fleet_token_env to the \
         token of the hub"
    )]
    Denied(StatusCode),
    #[error("the hub has no route table yet")]
    NoTable,
    #[error("route table rejected: {0}")]
    Table(String),
}

async fn poll(
    config: &EdgeConfig,
    hub: &str,
    client: &reqwest::Client,
    reader: &Reader,
    views: &watch::Sender<Current>,
    accepted_at: &mut AcceptanceTime,
    tenants: &Tenants,
) -> Result<(), HubPollError> {
    let after = views.borrow().as_ref().map(|view| view.generation);
    let (wait, grace) = match (config.hub.count(), after) {
        (1, _) => (LONG_POLL, GRACE),
        (_, Some(_)) => (LONG_POLL_WITH_ALTERNATIVE, GRACE_WITH_ALTERNATIVE),
        (_, None) => (FIRST_POLL_WITH_ALTERNATIVE, GRACE_WITH_ALTERNATIVE),
    };
    let url = format!("{hub}{}", table_watch::watch_path(after, reader, wait));
    let request = client.get(url).timeout(wait + grace);
    let request = config.fleet.iter().fold(request, |request, token| request.bearer_auth(token.secret()));
    let response = request.send().await?;
    if matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        return Err(HubPollError::Denied(response.status()));
    }
    let response = response.error_for_status()?;
    if response.status() == StatusCode::NO_CONTENT {
        let another_may_have_one = after.is_none() && config.hub.count() > 1;
        return if another_may_have_one { Err(HubPollError::NoTable) } else { Ok(()) };
    }
    let body = response.bytes().await?;
    let wire = serde_json::from_slice::<RouteTableV1>(&body);
    let mut wire = wire.map_err(|error| HubPollError::Table(error.to_string()))?;
    let taken = table_watch::accept_table(wire.clone(), accepted_at.accepted(after), unix_time());
    let mut table = taken.map_err(|error| HubPollError::Table(error.to_string()))?;
    if table.tenants.is_none()
        && let Some(applied) = tenants.applied_tenants()
    {
        tracing::warn!(generation = %table.generation, "route table without tenants; keeping the current tenants");
        table.tenants = Some(applied);
        wire = RouteTableV1::from(&table);
    }
    let (path, generation) = (config.snapshot.clone(), table.generation);
    let saved = tokio::task::spawn_blocking(move || snapshot::save(&path, &wire, generation)).await;
    if let Err(error) = saved.map_err(io::Error::other).flatten() {
        tracing::warn!(snapshot = %config.snapshot.display(), %error, "cannot write the route table to disk");
    }
    *accepted_at = AcceptanceTime::now();
    // The key files may be reloaded concurrently, so the tenants are merged while the view is locked.
    views.send_modify(|current| {
        let keys = tenants.apply_table(&table);
        let (regions, tenants) = (table.regions.len(), keys.tenants().len());
        tracing::info!(generation = %table.generation, regions, tenants, "route table updated");
        *current = Some(Arc::new(View::new(&table, &config.catalogue, keys)));
    });
    Ok(())
}
