//! Follows the hub's route table, and does without the hub. Of several hubs any may be asked: whichever has a table with a
//! higher generation has the newer one.
//!
//! A new table is taken when its generation is higher than the one in hand, never otherwise: a hub restored from an old
//! backup cannot take traffic back to regions that are gone. What is taken is written to disk before it is used
//! ([`super::snapshot`]), so that a gateway which starts while the hub is dead serves from the last good table.

use super::policy_clock::PolicyClock;
use super::snapshot::{self, Since, since_1970};
use super::tenants::Tenants;
use super::view::View;
use crate::config::EdgeConfig;
use crate::metrics::EdgeMetrics;
use http::StatusCode;
use rand::Rng;
use scheduler_core::rollout::{Reader, Role};
use scheduler_core::table_watch;
use scheduler_core::wire::route::RouteTableV1;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long the hub may hold a question while nothing changes.
const LONG_POLL: Duration = Duration::from_secs(20);
/// The same where there is another hub to ask: one that hangs is silent as long, and so is found out sooner.
const LONG_POLL_OF_SEVERAL: Duration = Duration::from_secs(4);
/// And before the first table, for which somebody waits.
const FIRST_POLL_OF_SEVERAL: Duration = Duration::from_millis(500);
/// How much longer than that the answer may take.
const GRACE: Duration = Duration::from_secs(5);
const GRACE_OF_SEVERAL: Duration = Duration::from_secs(1);
/// Between questions to a hub that does not answer; half of it is chance, so that gateways do not return in step.
const PAUSE: Duration = Duration::from_millis(500);

/// What is in hand: nothing before the first table.
pub(crate) type Current = Option<Arc<View>>;

/// The table on disk, if there is a good one.
pub(crate) fn restore(config: &EdgeConfig, tenants: &Tenants, metrics: &EdgeMetrics) -> Current {
    match snapshot::load::<RouteTableV1>(&config.snapshot) {
        Ok(table) => {
            tracing::info!(generation = %table.generation, "serving from the route table on disk");
            Some(Arc::new(View::new(&table, &config.catalogue, tenants.under(&table))))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            metrics.tables_refused.add(1);
            tracing::warn!(snapshot = %config.snapshot.display(), %error, "the route table on disk is of no use");
            None
        }
    }
}

/// How this process calls itself before the hub.
pub(crate) fn reader(config: &EdgeConfig) -> Reader {
    Reader { role: Role::Gateway, region: config.region.clone(), boot_id: rand::rng().random() }
}

/// Takes leave of the hub: this process reads no table any longer.
pub(crate) async fn farewell(config: &EdgeConfig, client: &reqwest::Client, reader: &Reader) {
    let word = client.delete(format!("{}{}", config.hub.current(), table_watch::deregister_path(reader)));
    let word = config.fleet.iter().fold(word, |word, token| word.bearer_auth(token.secret()));
    // Nobody to tell; silence says the same later.
    word.timeout(table_watch::DEREGISTER_TIMEOUT).send().await.ok();
}

/// Follows the hub for ever.
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
    let mut since = Since::written(&config.snapshot);
    loop {
        let hub = hubs.current();
        let Err(error) = ask(&config, hub, &client, &reader, &views, &mut since, &tenants).await else {
            // It has the same table, or gave a newer one, which is in hand now.
            clock.confirm().await;
            failures = 0;
            if !std::mem::replace(&mut reachable, true) {
                tracing::info!(hub, "the hub is back");
            }
            continue;
        };
        if matches!(error, AskError::Table(_)) {
            metrics.tables_refused.add(1);
        }
        hubs.failed(hub);
        failures = failures.wrapping_add(1);
        if !failures.is_multiple_of(hubs.count()) {
            tracing::info!(hub, %error, next = %hubs, "a hub cannot be asked; the next one is");
            continue;
        }
        if std::mem::replace(&mut reachable, false) {
            tracing::warn!(hub, %error, "the hub cannot be asked; the table in hand stays");
        }
        let pause = PAUSE.mul_f64(rand::rng().random_range(0.5..1.0));
        tokio::time::sleep(pause).await;
    }
}

#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error(
        "it answers {0}: it needs the fleet token; set fleet_token_file or fleet_token_env to that of the hub"
    )]
    Denied(StatusCode),
    #[error("it has no table yet")]
    NoTable,
    #[error("its table is refused: {0}")]
    Table(String),
}

async fn ask(
    config: &EdgeConfig,
    hub: &str,
    client: &reqwest::Client,
    reader: &Reader,
    views: &watch::Sender<Current>,
    since: &mut Since,
    tenants: &Tenants,
) -> Result<(), AskError> {
    let after = views.borrow().as_ref().map(|view| view.generation);
    let (wait, grace) = match (config.hub.count(), after) {
        (1, _) => (LONG_POLL, GRACE),
        (_, Some(_)) => (LONG_POLL_OF_SEVERAL, GRACE_OF_SEVERAL),
        (_, None) => (FIRST_POLL_OF_SEVERAL, GRACE_OF_SEVERAL),
    };
    let url = format!("{hub}{}", table_watch::watch_path(after, reader, wait));
    let question = client.get(url).timeout(wait + grace);
    let question = config.fleet.iter().fold(question, |question, token| question.bearer_auth(token.secret()));
    let answer = question.send().await?;
    if matches!(answer.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        return Err(AskError::Denied(answer.status()));
    }
    let answer = answer.error_for_status()?;
    if answer.status() == StatusCode::NO_CONTENT {
        let another_may_have_one = after.is_none() && config.hub.count() > 1;
        return if another_may_have_one { Err(AskError::NoTable) } else { Ok(()) };
    }
    let body = answer.bytes().await?;
    let wire = serde_json::from_slice::<RouteTableV1>(&body);
    let mut wire = wire.map_err(|error| AskError::Table(error.to_string()))?;
    let taken = table_watch::accept_table(wire.clone(), since.held(after), since_1970());
    let mut table = taken.map_err(|error| AskError::Table(error.to_string()))?;
    if table.tenants.is_none()
        && let Some(applied) = tenants.applied()
    {
        tracing::warn!(generation = %table.generation, "a route table without tenants; those that were known stay");
        table.tenants = Some(applied);
        wire = RouteTableV1::from(&table);
    }
    let (path, generation) = (config.snapshot.clone(), table.generation);
    let saved = tokio::task::spawn_blocking(move || snapshot::save(&path, &wire, generation)).await;
    if let Err(error) = saved.map_err(io::Error::other).flatten() {
        tracing::warn!(snapshot = %config.snapshot.display(), %error, "the route table cannot be kept on disk");
    }
    *since = Since::now();
    // Key files may be read anew in this moment: which tenants there are is decided while nobody else replaces the view.
    views.send_modify(|current| {
        let keys = tenants.under(&table);
        let (regions, known) = (table.regions.len(), keys.tenants().len());
        tracing::info!(generation = %table.generation, regions, tenants = known, "a new route table");
        *current = Some(Arc::new(View::new(&table, &config.catalogue, keys)));
    });
    Ok(())
}
