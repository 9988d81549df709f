//! Router and admission control.
//!
//! The router makes the routing decision of a request ([`gateway_core::route`]) from the route table, the observed state of the
//! regions, and the hub's traffic plan. The decision is made once for a request, when its size is known, and once for each part
//! of a split request. Before the body of a request is read a preliminary decision names the admission pool that would reject it.
//!
//! By admission control a request enters the pool of the region that it is sent to first, or is shed. `gateway_core::shed`
//! decides; this module adds the lock. A request is checked twice: before its body is read, against the pools of all
//! deployments that its tenant may use (the deployment of most requests is named in the body), and again with the routing
//! decision, when its size is known: a request that the pool of its primary rejects spills over to a region that has granted
//! credit and admits it.

use super::refusals::shed;
use super::region_monitor::{RegionMonitor, random_draws};
use super::region_states::{DeploymentBacklog, RegionStates, RoutingContext};
use super::view::{RoutedDeployment, View};
use super::weights::{CurrentWeights, DemandRecorder};
use crate::config::EdgeConfig;
use crate::metrics::EdgeMetrics;
use crate::respond::Rejection;
use gateway_core::candidate::Candidate;
use gateway_core::circuit::Permille;
use gateway_core::cold::ResponseEstimate;
use gateway_core::endpoint::{self, ForwardTarget};
use gateway_core::instances::RegionReport;
use gateway_core::job_region::SubmissionKey;
use gateway_core::latency::SizeClass;
use gateway_core::request_options::RequestOptions;
use gateway_core::residency::Residency;
use gateway_core::route::{self, Observations, PlanQuery, RouteDecision, RouteQuery, SpilloverQuery};
use gateway_core::shed::{AdmissionPoolSet, AdmissionRequest, PoolEntry, QueueWaits, Shed};
use gateway_core::spill::{self, SpilloverDecision};
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::trail::Trail;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use replica_api::priority::Priority;
use scheduler_api::report::DeploymentLoad;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::watch;

thread_local! {
    /// Candidate buffer of a finished decision, reused by the next decision of this thread: with many regions its allocation
    /// dominated the slowest decisions.
    static BUFFER: Cell<Vec<Candidate>> = const { Cell::new(Vec::new()) };
}

/// Router of one gateway.
pub(super) struct Router {
    /// Region of this gateway.
    pub(super) gateway: RegionIndex,
    pub(super) is_spillover_enabled: bool,
    pub(super) region_monitor: Arc<RegionMonitor>,
    pub(super) current_weights: watch::Receiver<CurrentWeights>,
    pub(super) demand_recorder: Arc<DemandRecorder>,
}

/// Request to route.
#[derive(Clone, Copy)]
pub(super) struct Routable<'a> {
    pub(super) view: &'a View,
    pub(super) routing: RoutingContext<'a>,
    /// Regions that residency allows.
    pub(super) allowed: RegionSet,
    /// Regions that had registered for the deployment when the route table was made.
    pub(super) registered: RegionSet,
    /// Location of the client, if it is known.
    pub(super) client: Option<GeoPoint>,
}

/// Demand of one request, and its random draws.
#[derive(Clone, Copy)]
pub(super) struct RequestDemand<'a> {
    pub(super) residency: &'a Residency,
    pub(super) tokens: u64,
    /// Remaining time of the request.
    pub(super) left: Duration,
    /// Draw from the shares of the traffic plan.
    pub(super) draw: Permille,
    /// Draw that decides whether the request leaves an overloaded primary.
    pub(super) leave_draw: Permille,
    /// Idempotency key that the client gave a job.
    pub(super) key: Option<SubmissionKey>,
}

/// Routing decision; its candidate buffer is reused when it is dropped.
pub(super) struct Route(RouteDecision);

impl Drop for Route {
    fn drop(&mut self) {
        BUFFER.set(std::mem::take(&mut self.0.candidates));
    }
}

impl Deref for Route {
    type Target = RouteDecision;

    fn deref(&self) -> &RouteDecision {
        &self.0
    }
}

impl Router {
    /// Routes a request, spends the credit of its spillover, and enters it into the admission pool of the region that it is sent
    /// to first. `None`: there is no region. The pools stay locked from the decision until the request is in one, so that a pool
    /// that the decision relies on cannot fill up in between.
    fn route(
        &self,
        request: &Routable<'_>,
        demand: &RequestDemand<'_>,
        pools: &AdmissionPools,
        admission: &AdmissionRequest,
    ) -> (Route, Option<Result<PoolEntry, Shed>>) {
        let (deployment, now) = (request.routing.deployment, Instant::now());
        let (route, entered) = {
            // Reports are applied in the same order of locks: first the states, then the pools.
            let states = &mut *self.region_monitor.states();
            let pools = &mut *pools.lock();
            let spillover = self.spillover(states, request, demand, now);
            let check = Some(PoolCheck { pools, request: admission });
            let route = self.decide(states, request, Some(demand.draw), None, spillover, check, now);
            if let Some(decision) = route.spillover {
                states.spill.commit(deployment, decision, now);
            }
            if let (Some(primary), Some(_), Some(_)) =
                (route.primary(), route.rejection, route.spillover_target())
            {
                pools.record_rejection(primary, deployment, admission, now);
            }
            let entered = route.admission_pool().map(|pool| pools.enter(pool, deployment, admission, now));
            (route, entered)
        };
        self.record_demand(request, demand, &route, now);
        (route, entered)
    }

    /// Routes a job to the region whose queue stores it. It enters no admission pool and does not spill over, since it waits
    /// until there is capacity. It has one target: two queues that have stored it would compute it twice. A repeated submission,
    /// by its idempotency key, goes to the region of the first one.
    fn route_job(&self, request: &Routable<'_>, demand: &RequestDemand<'_>) -> Route {
        let now = Instant::now();
        let draw = demand.key.map_or(demand.draw, |key| key.draw());
        let mut route = {
            let states = &mut *self.region_monitor.states();
            let earlier = demand.key.and_then(|key| states.keyed_submissions.region(&key));
            let route = self.decide(states, request, Some(draw), earlier, None, None, now);
            if let (Some(key), Some(region)) = (demand.key, route.primary()) {
                states.record_submission(key, region, now);
            }
            route
        };
        route.0.candidates.truncate(1);
        self.record_demand(request, demand, &route, now);
        route
    }

    /// Counts the demand of a request, unless no region can serve it: the hub could not distribute that.
    fn record_demand(&self, request: &Routable<'_>, demand: &RequestDemand<'_>, route: &Route, now: Instant) {
        if route.primary().is_some() {
            let (policy, tokens) =
                ((demand.residency, request.allowed), (request.routing.priority, demand.tokens));
            self.demand_recorder.record(request.routing.deployment, policy, route.origin, tokens, now);
        }
    }

    /// Routes a request of a job to the region that was selected for it ([`super::job_transfer`]), as spillover that spends the
    /// credit of that region. It enters no admission pool: those of the gateway are for clients, and the credit is the admission
    /// by the region. `request.allowed` has that region alone.
    pub(super) fn route_transfer(&self, request: &Routable<'_>, target: RegionIndex, tokens: u64) -> Route {
        let now = Instant::now();
        let states = &mut *self.region_monitor.states();
        let mut route = self.decide(states, request, None, Some(target), None, None, now);
        if route.primary().is_some() {
            let decision = SpilloverDecision { demand: tokens, tokens, to: Some(target) };
            states.spill.commit(request.routing.deployment, decision, now);
            route.0.spillover = Some(decision);
        }
        route
    }

    /// Routes a part of a split request, which was assigned to a region.
    pub(super) fn route_part(&self, part: &Routable<'_>, assigned: RegionIndex) -> Route {
        self.decide(&self.region_monitor.states(), part, None, Some(assigned), None, None, Instant::now())
    }

    /// Routes a request of which only the head is known. Spends no credit and counts no demand.
    pub(super) fn preview(&self, request: &Routable<'_>, draw: Permille) -> Route {
        self.decide(&self.region_monitor.states(), request, Some(draw), None, None, None, Instant::now())
    }

    #[expect(clippy::too_many_arguments, reason = "what differs between a request, a part and a preview")]
    fn decide(
        &self,
        states: &RegionStates,
        request: &Routable<'_>,
        draw: Option<Permille>,
        assigned: Option<RegionIndex>,
        spillover: Option<SpilloverQuery<'_>>,
        pools: Option<PoolCheck<'_>>,
        now: Instant,
    ) -> Route {
        let Routable { view, routing, allowed, registered, client } = *request;
        let RoutingContext { deployment, priority, .. } = routing;
        let mut serving = states.fleet.serving(deployment, registered);
        let stopping = states.fleet.draining();
        if routing.is_job {
            serving = states.job_regions(
                allowed.intersect(view.routed),
                serving,
                registered,
                view.draining.union(stopping),
                assigned,
            );
        }
        let current_weights = self.current_weights.borrow();
        let interactive_share = |origin| self.demand_recorder.interactive_share(deployment, allowed, origin);
        let query = RouteQuery {
            deployment,
            priority,
            allowed,
            order: view.order(deployment),
            routed: view.routed,
            // The reports of a region about its replicas are newer than its registration in the table.
            serving,
            draining: view.draining,
            stopping,
            gateway: self.gateway,
            is_client_located: client.is_some(),
            assigned,
            plan: current_weights.as_deref().map(|weights| PlanQuery {
                weights,
                draw,
                interactive_share: &interactive_share,
            }),
            spillover,
        };
        Route(route::route(&query, &Observed::new(states, request, pools, now), BUFFER.take()))
    }

    fn spillover<'a>(
        &self,
        states: &'a RegionStates,
        request: &Routable<'a>,
        demand: &RequestDemand<'_>,
        now: Instant,
    ) -> Option<SpilloverQuery<'a>> {
        let RoutingContext { deployment, priority, .. } = request.routing;
        let RequestDemand { tokens, left, leave_draw, .. } = *demand;
        let request = spill::SpillRequest { deployment, priority, tokens, left, is_shed: false, leave_draw };
        self.is_spillover_enabled.then_some(SpilloverQuery { credits: &states.spill, now, request })
    }
}

/// Admission pools, and the request that they are to admit.
#[derive(Clone, Copy)]
struct PoolCheck<'a> {
    pools: &'a AdmissionPoolSet,
    request: &'a AdmissionRequest,
}

/// State of the regions for one request.
struct Observed<'a> {
    states: &'a RegionStates,
    request: &'a Routable<'a>,
    /// Loads of the deployment, found once.
    loads: Option<&'a BTreeMap<RegionIndex, DeploymentBacklog>>,
    /// `None`: the request enters no pool.
    pools: Option<PoolCheck<'a>>,
    now: Instant,
}

impl<'a> Observed<'a> {
    fn new(
        states: &'a RegionStates,
        request: &'a Routable<'a>,
        pools: Option<PoolCheck<'a>>,
        now: Instant,
    ) -> Observed<'a> {
        Observed { states, request, loads: states.loads.of(request.routing.deployment), pools, now }
    }
}

impl Observations for Observed<'_> {
    fn health(&self, region: RegionIndex) -> Health {
        self.states.health(region, &self.request.routing, self.now)
    }

    fn rtt(&self, region: RegionIndex) -> Duration {
        match self.request.client {
            Some(point) => self.states.latency.prior_from(point, region),
            None => self.states.latency.estimate(region, self.now),
        }
    }

    fn is_any_cold(&self) -> bool {
        self.states.is_any_cold(self.request.routing.deployment)
    }

    fn held_for(&self, region: RegionIndex) -> Option<Duration> {
        self.states.held_for(region, self.request.routing.deployment)
    }

    fn response_estimate(&self, region: RegionIndex, rtt: Duration) -> ResponseEstimate {
        self.states.response_estimate(region, rtt, &self.request.routing)
    }

    fn fastest(&self, near: impl Iterator<Item = RegionIndex> + Clone) -> Option<RegionIndex> {
        let RoutingContext { deployment, size, target_draw, .. } = self.request.routing;
        self.states.targets.preferred(near, deployment, size, target_draw, self.now)
    }

    fn queue_wait(&self, region: RegionIndex) -> Option<Duration> {
        let QueueWaits { interactive, bulk } = waits(&self.loads?.get(&region)?.load);
        match self.request.routing.priority {
            // A region that does not report the priorities separately has one queue for both.
            Priority::Interactive => interactive.or(bulk),
            Priority::Bulk => bulk,
        }
    }

    fn rejection(&self, region: RegionIndex) -> Option<Shed> {
        let PoolCheck { pools, request } = self.pools?;
        pools.rejection(region, self.request.routing.deployment, request, self.now)
    }
}

/// Returns the time that a request would wait behind the reported load, by priority.
pub(super) fn waits(load: &DeploymentLoad) -> QueueWaits {
    QueueWaits::of(load.interactive_tokens, load.pending_tokens, load.tokens_per_second)
}

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
    pub(super) fn reported(&self, region: RegionIndex, report: &RegionReport<'_>) {
        let waits = report.touched.iter().map(|name| (name, report.deployments.get(name).map(waits)));
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
    /// Sheds a request of which only the head was read, if it would be shed with any body. Records the routing decision of a
    /// request that it sheds, if the deployment is known.
    #[expect(clippy::too_many_arguments, reason = "what is known from a head")]
    pub(super) fn check_head(
        &self,
        target: ForwardTarget<'_>,
        view: &View,
        tenant: &Tenant,
        options: &RequestOptions,
        body_bytes: u64,
        arrived: Instant,
        (trail, shed_deployment): (&mut Trail, &mut Option<(DeploymentName, Priority)>),
    ) -> Result<(), Rejection> {
        if self.pools.are_calm() || endpoint::is_job(target.path) {
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
        let permitted = tenant.residency.narrow(&options.residency).permitted(&self.config.catalogue);
        // With zero inputs, so that a request that may turn out to be bulk counts as interactive.
        let Ok(priority) = tenant.priorities.priority(options.priority, 0) else { return Ok(()) };
        let tokens = Cost::at_least(body_bytes).tokens;
        let [target_draw, _, draw] = random_draws();
        let decide = |routed: &&RoutedDeployment| {
            let deployment = &routed.deployment.name;
            let routing = RoutingContext {
                deployment,
                priority,
                size: SizeClass::of(tokens),
                target_draw,
                uses_engine: true,
                is_job: false,
            };
            let (allowed, registered) = (routed.allowed.intersect(permitted), routed.registered);
            let request = Routable { view, routing, allowed, registered, client: options.client };
            self.router.preview(&request, draw)
        };
        let pools = usable.iter().map(|routed| Some((decide(routed).primary()?, &routed.deployment.name)));
        // If no region can serve it at all, a later rejection is more specific.
        let Some(pools) = pools.collect::<Option<Vec<_>>>() else { return Ok(()) };
        let left = left(options.timeout, arrived);
        let (now, request) = (Instant::now(), pool_request(tenant, priority, tokens, left));
        let checked = self.pools.lock().check_head(pools.iter().copied(), &request, now);
        let Err(rejection) = checked else { return Ok(()) };
        let region_states = self.region_monitor.states();
        let has_credit = |(_, name): &(RegionIndex, &DeploymentName)| {
            region_states.spill.would_take(name, tokens, permitted.intersect(view.routed).iter(), now)
        };
        if self.config.spill && pools.iter().any(has_credit) {
            return Ok(());
        }
        drop(region_states);
        let mut known = None;
        if let [routed] = usable.as_slice() {
            trail.routed(RouteDecision { rejection: Some(rejection), ..(*decide(routed)).clone() });
            known = Some(&routed.deployment.name);
            *shed_deployment = Some((routed.deployment.name.clone(), priority));
        }
        self.metrics.shed.of(priority).count(rejection.reason);
        self.metrics.deployments.shed(known, priority);
        Err(shed(tenant, rejection))
    }

    /// Routes a request, and admits it to the pool of the region that it is sent to first, or sheds it. Without a candidate there
    /// is no pool; the request is rejected when it is forwarded.
    pub(super) fn route(
        &self,
        request: &Routable<'_>,
        demand: &RequestDemand<'_>,
        tenant: &Tenant,
    ) -> (Route, Result<Option<AdmissionPermit>, Rejection>) {
        if request.routing.is_job {
            return (self.router.route_job(request, demand), Ok(None));
        }
        let priority = request.routing.priority;
        let admission = pool_request(tenant, priority, demand.tokens, demand.left);
        let (route, entered) = self.router.route(request, demand, &self.pools, &admission);
        let admitted = entered.transpose().map_err(|rejection| {
            self.metrics.shed.of(priority).count(rejection.reason);
            self.metrics.deployments.shed(Some(request.routing.deployment), priority);
            shed(tenant, rejection)
        });
        let permit = |entry| AdmissionPermit { pools: self.pools.clone(), entered: Some(entry) };
        (route, admitted.map(|entry| entry.map(permit)))
    }
}

fn pool_request(tenant: &Tenant, priority: Priority, tokens: u64, left: Duration) -> AdmissionRequest {
    AdmissionRequest { tenant: tenant.index, weight: tenant.weight.get().into(), priority, tokens, left }
}

/// Remaining time of a request.
pub(super) fn left(timeout: Duration, arrived: Instant) -> Duration {
    timeout.saturating_sub(arrived.elapsed())
}
