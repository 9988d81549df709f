//! Reports the demand of tenants at this gateway to the hub and receives the gateway's shares of their rate limits.
//!
//! One request per second does both ([`scheduler_client::shares`]), while tenants of the route table have limits. Shares are on
//! disk before they are used, so a gateway that restarts while no hub responds continues with its last ones. They stay while the
//! hub is unreachable, whatever the reason: the shares of all gateways together are still the limit. A gateway that was never
//! given shares applies an equal share among the gateways that the hub knows.
//!
//! A process that drains does not report: another one may have taken over with the same shares.

use super::tenants::Tenants;
use super::weights::PlanCounts;
use crate::config::EdgeConfig;
use gateway_core::tenant::GatewayShares;
use scheduler_api::plan::{GatewayInstance, PLAN_PERIOD, TenantDemand, TenantShares, TenantSharesV1};
use scheduler_client::hub::{ControlPlaneClient, HubFailure};
use scheduler_client::shares::ShareExchange;
use scheduler_client::snapshot::{self, Snapshot};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Delay of the report that acknowledges new shares, so that other gateways can use what this one no longer does.
const ACKNOWLEDGE_DELAY: Duration = Duration::from_millis(50);

/// Returns the path of the shares on disk.
fn shares_path(config: &EdgeConfig) -> std::path::PathBuf {
    snapshot::with_suffix(&config.snapshot, ".shares")
}

/// Returns the shares on disk, if they are valid and belong to the region of this gateway.
pub(super) fn restore(config: &EdgeConfig, counts: &PlanCounts) -> Option<TenantShares> {
    let shares = snapshot::restore::<TenantSharesV1>(&shares_path(config), || counts.refused.add(1))?;
    // Otherwise the gateway was moved or its files were copied.
    (shares.gateway.region == config.region).then_some(shares)
}

/// Returns shares as the limiters use them.
pub(super) fn applied(shares: &TenantShares) -> GatewayShares {
    let tenants = shares.tenants.iter().map(|(tenant, share)| (tenant.clone(), share.limits));
    GatewayShares { default: shares.default, tenants: tenants.collect() }
}

/// Reports the demand and receives shares until the gateway drains.
pub(super) async fn follow(
    config: Arc<EdgeConfig>,
    client: ControlPlaneClient,
    tenants: Arc<Tenants>,
    counts: Arc<PlanCounts>,
    mut draining: watch::Receiver<bool>,
) {
    let reports = report(config, client, tenants, counts);
    // The sender outlives its receivers.
    let drains = async { drop(draining.wait_for(|draining| *draining).await) };
    tokio::select! {
        () = reports => {}
        () = drains => std::future::pending().await,
    }
}

async fn report(
    config: Arc<EdgeConfig>,
    client: ControlPlaneClient,
    tenants: Arc<Tenants>,
    counts: Arc<PlanCounts>,
) {
    let current = restore(&config, &counts);
    let id = current.as_ref().map_or_else(rand::random, |shares| shares.gateway.id);
    let gateway = GatewayInstance { region: config.region.clone(), id };
    let snapshot =
        Snapshot::new(Some(shares_path(&config)), current.as_ref().map(|shares| shares.generation));
    let mut exchange = ShareExchange::new(client.clone(), snapshot, current);
    let mut interval = tokio::time::interval(PLAN_PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut reachable = true;
    loop {
        interval.tick().await;
        let Some(demand) = tenants.limiters.demand(Instant::now()) else { continue };
        let demand = TenantDemand { gateway: gateway.clone(), running: exchange.running(), tenants: demand };
        match exchange.exchange(&demand).await {
            Ok(received) => {
                if !std::mem::replace(&mut reachable, true) {
                    // A hub sends the shares of the tenants' limits again.
                    tracing::info!(hub = client.hubs().current(), "updates of tenant shares resumed");
                }
                if let Some(shares) = received.shares {
                    // A newer division of the tenants' limits is in use.
                    tracing::debug!(generation = %shares.generation, tenants = shares.tenants.len(), "tenant shares accepted");
                    tenants.limiters.set_shares(applied(&shares), Instant::now());
                    interval.reset_after(ACKNOWLEDGE_DELAY);
                } else if exchange.running().is_none() {
                    tenants.limiters.set_shares(GatewayShares::equal(received.gateways), Instant::now());
                }
            }
            Err(error) => {
                if matches!(error.failure, HubFailure::Invalid(_)) {
                    counts.refused.add(1);
                }
                if std::mem::replace(&mut reachable, false) {
                    // The limits of tenants hold with the last shares. Check the hubs and the network.
                    tracing::warn!(%error, "updates of tenant shares failed; keeping the current shares");
                }
            }
        }
    }
}
