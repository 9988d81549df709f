//! Follows the route table of the hub, and keeps serving without the hub.
//!
//! [`scheduler_client::table`] polls the hubs, accepts only newer tables, and writes each to disk before it is used here.
//! So a gateway that starts while the hub is down serves from the last good table.

use super::policy_clock::PolicyClock;
use super::tenants::Tenants;
use super::view::View;
use crate::config::EdgeConfig;
use crate::metrics::EdgeMetrics;
use backoff::Backoff;
use rand::Rng;
use regions::route::RouteTable;
use scheduler_api::reader::{Reader, Role};
use scheduler_api::route::RouteTableV1;
use scheduler_client::hub::ControlPlaneClient;
use scheduler_client::snapshot::{self, Snapshot};
use scheduler_client::table::{TablePoll, TableWatch};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Delay between polls while no hub responds.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(500), max: Duration::from_millis(500) };

/// View of the current route table; `None` before the first.
pub(crate) type Current = Option<Arc<View>>;

/// Loads the route table from disk, if there is a valid one.
pub(crate) fn restore(config: &EdgeConfig, tenants: &Tenants, metrics: &EdgeMetrics) -> Current {
    let rejected = || metrics.tables_refused.add(1);
    let table = snapshot::restore::<RouteTableV1>(&config.snapshot, rejected)?;
    metrics.deployments.adopt(table.deployments.keys());
    Some(Arc::new(View::new(&table, &config.catalogue, tenants.apply_table(&table))))
}

/// Identity of this process towards the hub.
pub(crate) fn reader(config: &EdgeConfig) -> Reader {
    Reader { role: Role::Gateway, region: config.region.clone(), boot_id: rand::rng().random() }
}

/// Watches the route table for ever.
pub(crate) async fn follow(
    config: Arc<EdgeConfig>,
    client: ControlPlaneClient,
    reader: Reader,
    views: watch::Sender<Current>,
    tenants: Arc<Tenants>,
    metrics: Arc<EdgeMetrics>,
    clock: Arc<PolicyClock>,
) {
    let generation = views.borrow().as_ref().map(|view| view.generation);
    let snapshot = Snapshot::new(Some(config.snapshot.clone()), generation);
    let mut watch = TableWatch::new(client, reader, snapshot, BACKOFF);
    loop {
        match watch.next(|table| keep_tenants(table, &tenants)).await {
            TablePoll::Failed { is_rejected } => {
                if is_rejected {
                    metrics.tables_refused.add(1);
                }
                continue;
            }
            TablePoll::Confirmed => {}
            // The key files may be reloaded concurrently, so the tenants are merged while the view is locked.
            TablePoll::Newer(table) => views.send_modify(|current| {
                let keys = tenants.apply_table(&table);
                metrics.deployments.adopt(table.deployments.keys());
                let (regions, tenants) = (table.regions.len(), keys.tenants().len());
                // A hub has published a newer route table, and the gateway routes by it.
                tracing::info!(generation = %table.generation, regions, tenants, "route table updated");
                *current = Some(Arc::new(View::new(&table, &config.catalogue, keys)));
            }),
        }
        clock.confirm().await;
    }
}

/// Adds the applied tenants to a table of an older hub, which does not support tenants.
fn keep_tenants(table: &mut RouteTable, tenants: &Tenants) {
    if table.tenants.is_none()
        && let Some(applied) = tenants.applied_tenants()
    {
        // The store of the hub lost the applied tenants. Apply them again.
        tracing::warn!(generation = %table.generation, "route table without tenants; keeping the current tenants");
        table.tenants = Some(applied);
    }
}
