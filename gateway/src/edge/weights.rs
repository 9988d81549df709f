//! Reports the demand of this gateway to the hub and receives its traffic weights.
//!
//! One request per second does both ([`scheduler_client::plan`]): it reports the demand by traffic class and origin, and the
//! response carries this gateway's rows of the plan if they are newer than the current ones. Rows are accepted all of them or
//! none, and are on disk before they are used. An invalid plan is refused and counted, and the current rows stay. They also stay while the hub is unreachable or no hub plans: outdated rows are better than none, because reports show where they
//! no longer fit and spillover credits correct it. No request waits for this exchange.

use super::region_monitor::RegionMonitor;
use crate::config::EdgeConfig;
use crate::metrics::Counter;
use gateway_core::circuit::Permille;
use gateway_core::demand::{DemandMeter, MeasuredDemand};
use gateway_core::residency::Residency;
use gateway_core::weights::{PlanWeights, ReceivedRow};
use regions::catalogue::Catalogue;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::Share;
use replica_api::priority::Priority;
use scheduler_api::plan::{
    self as wire, DemandV1, GatewayBoot, GatewayDemand, NamedShare, PLAN_PERIOD, TrafficClass, WeightsV1,
};
use scheduler_client::hub::{ControlPlaneClient, HubFailure};
use scheduler_client::plan::PlanExchange;
use scheduler_client::snapshot::{self, Snapshot};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use supervision::{Mutex, MutexGuard};
use tokio::sync::watch;

/// Current weights; `None` before the first plan.
pub(crate) type CurrentWeights = Option<Arc<PlanWeights>>;

/// Demand meter shared by all requests and the task that reports it.
#[derive(Default)]
pub(crate) struct DemandRecorder(Mutex<DemandMeter>);

/// Counters of received plans.
#[derive(Default)]
pub(crate) struct PlanCounts {
    /// Plans that were invalid or not newer.
    pub(crate) refused: Counter,
}

impl DemandRecorder {
    fn meter(&self) -> MutexGuard<'_, DemandMeter> {
        self.0.lock()
    }

    /// Records a request with its priority and approximate number of tokens. Returns the interactive share of the demand.
    pub(crate) fn record(
        &self,
        deployment: &DeploymentName,
        policy: (&Residency, RegionSet),
        origin: RegionIndex,
        request: (Priority, u64),
        now: Instant,
    ) -> Option<Permille> {
        self.meter().record(deployment, policy, origin, request, now)
    }

    /// Returns the interactive share of the demand.
    pub(crate) fn interactive_share(
        &self,
        deployment: &DeploymentName,
        allowed: RegionSet,
        origin: RegionIndex,
    ) -> Option<Permille> {
        self.meter().interactive_share(deployment, allowed, origin)
    }

    /// Returns the number of requests that are not planned for because there are too many traffic classes.
    pub(crate) fn untracked(&self) -> u64 {
        self.meter().untracked()
    }
}

/// Returns the path of the rows on disk.
fn plan_path(config: &EdgeConfig) -> std::path::PathBuf {
    snapshot::with_suffix(&config.snapshot, ".plan")
}

/// Returns the rows on disk, if they are valid and belong to the region of this gateway.
pub(crate) fn restore(config: &EdgeConfig, counts: &PlanCounts) -> CurrentWeights {
    let weights = snapshot::restore::<WeightsV1>(&plan_path(config), || counts.refused.add(1))?;
    if weights.gateway != config.region {
        // The gateway was moved or its files were copied. It has no plan until a hub sends one. No action is needed.
        tracing::warn!(gateway = %weights.gateway, "plan on disk ignored because it is for another region");
        return None;
    }
    Some(Arc::new(resolve(&weights, &config.catalogue)))
}

/// Converts rows for use by requests. A region that is not in the catalogue gets no share.
fn resolve(weights: &wire::GatewayWeights, catalogue: &Catalogue) -> PlanWeights {
    let wire::GatewayWeights { generation, gateway: _, rows } = weights;
    let rows = rows.iter().filter_map(
        |((TrafficClass { deployment, residency }, origin), shares)| -> Option<ReceivedRow> {
            let shares = shares.iter().filter_map(|NamedShare { region, permille, reason }| {
                Some(Share { region: catalogue.index_of(region)?, permille: *permille, reason: *reason })
            });
            Some((deployment.clone(), residency.clone(), catalogue.index_of(origin)?, shares.collect()))
        },
    );
    PlanWeights::new(*generation, rows, catalogue)
}

/// Reports the demand and receives plans; never returns.
pub(crate) async fn follow(
    config: Arc<EdgeConfig>,
    client: ControlPlaneClient,
    demand_recorder: Arc<DemandRecorder>,
    region_monitor: Arc<RegionMonitor>,
    current_weights: watch::Sender<CurrentWeights>,
    counts: Arc<PlanCounts>,
) {
    let boot_id = rand::random();
    let mut interval = tokio::time::interval(PLAN_PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut reachable = true;
    let generation = current_weights.borrow().as_ref().map(|weights| weights.generation);
    let snapshot = Snapshot::new(Some(plan_path(&config)), generation);
    let mut plan = PlanExchange::new(client.clone(), config.region.clone(), snapshot);
    loop {
        interval.tick().await;
        let demand = demand_recorder.meter().report(Instant::now());
        let reachable_regions = region_monitor.states().fleet.reachable().collect();
        let demand = demand_message(&config, boot_id, demand, reachable_regions);
        let received = plan.exchange(&demand).await;
        match &received {
            Ok(_) => {
                if !std::mem::replace(&mut reachable, true) {
                    // A hub sends the traffic plan again.
                    tracing::info!(hub = client.hubs().current(), "plan updates resumed");
                }
            }
            Err(error) => {
                if matches!(error.failure, HubFailure::Invalid(_)) {
                    counts.refused.add(1);
                }
                if std::mem::replace(&mut reachable, false) {
                    // Requests continue with the last traffic shares. Check the hubs and the network.
                    tracing::warn!(%error, "plan updates failed; keeping the current plan");
                }
            }
        }
        if let Ok(Some(weights)) = received {
            // A newer traffic plan for this gateway is in use.
            tracing::debug!(generation = %weights.generation, rows = weights.rows.len(), "plan accepted");
            current_weights.send_replace(Some(Arc::new(resolve(&weights, &config.catalogue))));
        }
    }
}

/// Builds the report of the demand and the reachable regions. Different spellings of one policy are one traffic class.
fn demand_message(
    config: &EdgeConfig,
    boot_id: u64,
    demand: Vec<MeasuredDemand>,
    reachable: Vec<RegionIndex>,
) -> DemandV1 {
    let mut classes = BTreeMap::new();
    for MeasuredDemand { deployment, residency, origin, tokens_per_second } in demand {
        let residency = match residency.as_str().parse() {
            Ok(residency) => residency,
            Err(error) => {
                // A defect. The plan omits this demand. Report it.
                tracing::error!(%deployment, %error, "demand not reported because its residency is unreadable");
                continue;
            }
        };
        let origin = config.catalogue.region(origin).id.clone();
        let total: &mut u64 = classes.entry((TrafficClass { deployment, residency }, origin)).or_default();
        *total = total.saturating_add(tokens_per_second);
    }
    let gateway = GatewayBoot { region: config.region.clone(), boot_id };
    let reachable: BTreeSet<_> =
        reachable.into_iter().map(|region| config.catalogue.region(region).id.clone()).collect();
    // A gateway that reaches no region may be partitioned itself, so it reports nothing about the regions.
    let reachable_regions = (!reachable.is_empty()).then_some(reachable);
    DemandV1::from(&GatewayDemand { gateway, classes, reachable_regions })
}
