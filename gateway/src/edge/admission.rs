//! Admission control: a request enters the pool of the region that it is sent to first, or is shed.
//!
//! `gateway_core::shed` decides; this module adds the lock. A request is checked twice: before its body is read, against the
//! pools of all deployments that its tenant may use (the deployment of most requests is named in the body), and again when its
//! size is known. A request that the pool of its primary rejects may spill over to a region that has granted credit; then it
//! enters the pool of that region.

use super::refusals::shed;
use super::region_monitor::{RegionMonitor, random_draws};
use super::region_states::RoutingContext;
use super::router::{RequestDemand, Routable, Route, Router, waits};
use super::view::{RoutedDeployment, View};
use crate::config::EdgeConfig;
use crate::metrics::EdgeMetrics;
use crate::respond::Rejection;
use gateway_core::endpoint::ForwardTarget;
use gateway_core::latency::SizeClass;
use gateway_core::request_options::RequestOptions;
use gateway_core::shed::{self, AdmissionPoolSet, PoolEntry, Shed};
use gateway_core::tenant::{Cost, Tenant};
use regions::id::DeploymentName;
use regions::set::RegionIndex;
use replica_api::priority::Priority;
use scheduler_api::report::Report;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

/// Deployments that are checked for a request whose body, which names one, was not read. A request of a tenant with more
/// is checked when its body has been read; and only while a pool sheds at all.
const DEPLOYMENTS_CHECKED_MAX: usize = 16;

/// Admission pools, by region and deployment.
#[derive(Default)]
pub(crate) struct AdmissionPools(Mutex<AdmissionPoolSet>);

/// Admission control of one gateway.
pub(super) struct AdmissionControl {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) pools: Arc<AdmissionPools>,
    pub(super) router: Arc<Router>,
    pub(super) region_monitor: Arc<RegionMonitor>,
    pub(super) metrics: Arc<EdgeMetrics>,
}

/// Admission of a request, released when this is dropped.
pub(super) struct AdmissionPermit {
    pools: Arc<AdmissionPools>,
    /// Held until this is dropped.
    entered: Option<PoolEntry>,
}

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        if let Some(entered) = self.entered.take() {
            self.pools.lock().leave(entered);
        }
    }
}

impl AdmissionPools {
    /// Applies the load that a region reports.
    pub(super) fn reported(&self, region: RegionIndex, report: &Report) {
        let waits = report.deployments.iter().map(|(name, load)| (name.clone(), waits(load)));
        self.lock().report(region, waits, Instant::now());
    }

    /// Returns whether no pool sheds.
    pub(super) fn are_calm(&self) -> bool {
        self.lock().are_unlimited()
    }

    fn lock(&self) -> MutexGuard<'_, AdmissionPoolSet> {
        self.0.lock()
    }
}

impl AdmissionControl {
    /// Sheds a request of which only the head was read, if it would be shed with any body.
    pub(super) fn check_head(
        &self,
        target: ForwardTarget<'_>,
        view: &View,
        tenant: &Tenant,
        ask: &RequestOptions,
        body_bytes: u64,
        arrived: Instant,
    ) -> Result<(), Rejection> {
        if self.pools.are_calm() {
            return Ok(());
        }
        let named = target.deployment.and_then(|name| view.deployment(name, tenant));
        let usable: Vec<&RoutedDeployment> = match named {
            Some(routed) => vec![routed],
            None => view.usable_by(tenant).take(DEPLOYMENTS_CHECKED_MAX + 1).collect(),
        };
        if usable.len() > DEPLOYMENTS_CHECKED_MAX {
            return Ok(());
        }
        let permitted = tenant.residency.narrow(&ask.residency).permitted(&self.config.catalogue);
        // With zero inputs, so that a request that may turn out to be bulk counts as interactive.
        let Ok(priority) = tenant.priorities.priority(ask.priority, 0) else { return Ok(()) };
        let tokens = Cost::at_least(body_bytes).tokens;
        let [target_draw, _, draw] = random_draws();
        let primary = |routed: &RoutedDeployment| {
            let deployment = &routed.deployment.name;
            let routing = RoutingContext {
                deployment,
                priority,
                size: SizeClass::of(tokens),
                target_draw,
                uses_engine: true,
            };
            let (allowed, registered) = (routed.allowed.intersect(permitted), routed.registered);
            let request = Routable { view, routing, allowed, registered, client: ask.client };
            self.router.preview(&request, draw).primary()
        };
        let pools = usable.iter().map(|routed| Some((primary(routed)?, &routed.deployment.name)));
        // If no region can serve it at all, a later rejection is more specific.
        let Some(pools) = pools.collect::<Option<Vec<_>>>() else { return Ok(()) };
        let (now, asked) =
            (Instant::now(), pool_request(tenant, priority, tokens, left(ask.timeout, arrived)));
        let checked = self.pools.lock().check_head(pools.iter().copied(), &asked, now);
        let Err(why) = checked else { return Ok(()) };
        let region_states = self.region_monitor.states();
        let has_credit = |(_, name): &(RegionIndex, &DeploymentName)| {
            region_states.spill.would_take(name, tokens, permitted.intersect(view.routed).iter(), now)
        };
        if self.config.spill && pools.iter().any(has_credit) {
            return Ok(());
        }
        self.metrics.shed.of(priority).count(why.reason);
        Err(shed(tenant, why))
    }

    /// Admits a request to the pool of the region that it is sent to first. The route then says which that is. Without a candidate
    /// there is no pool; the request is rejected when it is forwarded.
    pub(super) fn admit(
        &self,
        request: &Routable<'_>,
        demand: &RequestDemand<'_>,
        tenant: &Tenant,
        route: &mut Route,
    ) -> Result<Option<AdmissionPermit>, Rejection> {
        let Some(primary) = route.primary() else { return Ok(None) };
        let RoutingContext { deployment, priority, .. } = request.routing;
        let asked = pool_request(tenant, priority, demand.tokens, demand.left);
        let enter = |region| self.enter(region, deployment, &asked);
        // A pool that rejects what its region has granted credit for does not cause a rejection here.
        if let Some(permit) = route.spillover.and_then(|region| enter(region).ok()) {
            return Ok(Some(permit));
        }
        route.spillover = None;
        let why = match enter(primary) {
            Ok(permit) => return Ok(Some(permit)),
            Err(why) => why,
        };
        let other = self.router.spill_rejected(request, demand, route);
        if let Some((region, permit)) = other.and_then(|region| Some((region, enter(region).ok()?))) {
            route.spillover = Some(region);
            return Ok(Some(permit));
        }
        self.metrics.shed.of(priority).count(why.reason);
        Err(shed(tenant, why))
    }

    fn enter(
        &self,
        region: RegionIndex,
        deployment: &DeploymentName,
        asked: &shed::AdmissionRequest,
    ) -> Result<AdmissionPermit, Shed> {
        let entered = self.pools.lock().enter(region, deployment, asked, Instant::now())?;
        Ok(AdmissionPermit { pools: self.pools.clone(), entered: Some(entered) })
    }
}

fn pool_request(tenant: &Tenant, priority: Priority, tokens: u64, left: Duration) -> shed::AdmissionRequest {
    shed::AdmissionRequest {
        tenant: tenant.index,
        weight: tenant.weight.get().into(),
        priority,
        tokens,
        left,
    }
}

/// Remaining time of a request.
pub(super) fn left(timeout: Duration, arrived: Instant) -> Duration {
    timeout.saturating_sub(arrived.elapsed())
}
