//! Router: makes the routing decision of a request ([`gateway_core::route`]) from the route table, the observed state of the
//! regions, and the hub's traffic plan.
//!
//! The decision is made once for a request, when its size is known, and once for each part of a split request. Before the body
//! of a request is read a preliminary decision names the admission pool that would reject it.

use super::region_monitor::RegionMonitor;
use super::region_states::{RegionStates, RoutingContext};
use super::view::View;
use super::weights::{CurrentWeights, DemandRecorder};
use gateway_core::candidate::Candidate;
use gateway_core::circuit::Permille;
use gateway_core::cold::ResponseEstimate;
use gateway_core::residency::Residency;
use gateway_core::route::{self, Observations, PlanQuery, RouteDecision, RouteQuery, SpilloverQuery};
use gateway_core::shed::QueueWaits;
use gateway_core::spill;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::set::{RegionIndex, RegionSet};
use replica_api::priority::Priority;
use scheduler_api::report::DeploymentLoad;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};
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

impl DerefMut for Route {
    fn deref_mut(&mut self) -> &mut RouteDecision {
        &mut self.0
    }
}

impl Router {
    /// Routes a request, counts its demand, and spends the credit of its spillover.
    pub(super) fn route(&self, request: &Routable<'_>, demand: &RequestDemand<'_>) -> Route {
        let now = Instant::now();
        let route = {
            let states = &mut *self.region_monitor.states();
            let spillover = self.spillover(states, request, demand, now);
            let route = self.decide(states, request, Some(demand.draw), None, spillover, now);
            if let Some(departure) = route.departure {
                states.spill.commit(request.routing.deployment, departure, now);
            }
            route
        };
        // A request that no region can serve is no demand that the hub could distribute.
        if route.primary().is_some() {
            let (policy, tokens) =
                ((demand.residency, request.allowed), (request.routing.priority, demand.tokens));
            self.demand_recorder.record(request.routing.deployment, policy, route.origin, tokens, now);
        }
        route
    }

    /// Finds a spillover region for a request that the admission pool of its primary has rejected, and spends its credit.
    pub(super) fn spill_rejected(
        &self,
        request: &Routable<'_>,
        demand: &RequestDemand<'_>,
        route: &Route,
    ) -> Option<RegionIndex> {
        let now = Instant::now();
        let states = &mut *self.region_monitor.states();
        let spillover = self.spillover(states, request, demand, now)?;
        let observed = Observed { states, request, now };
        let departure = route::departure(&spillover, &observed, &route.candidates, true)?;
        states.spill.commit(request.routing.deployment, departure, now);
        departure.to
    }

    /// Routes a part of a split request, which was assigned to a region.
    pub(super) fn route_part(&self, part: &Routable<'_>, assigned: RegionIndex) -> Route {
        self.decide(&self.region_monitor.states(), part, None, Some(assigned), None, Instant::now())
    }

    /// Routes a request of which only the head is known. Spends no credit and counts no demand.
    pub(super) fn preview(&self, request: &Routable<'_>, draw: Permille) -> Route {
        self.decide(&self.region_monitor.states(), request, Some(draw), None, None, Instant::now())
    }

    fn decide(
        &self,
        states: &RegionStates,
        request: &Routable<'_>,
        draw: Option<Permille>,
        assigned: Option<RegionIndex>,
        spillover: Option<SpilloverQuery<'_>>,
        now: Instant,
    ) -> Route {
        let Routable { view, routing, allowed, registered, client } = *request;
        let RoutingContext { deployment, priority, .. } = routing;
        let current_weights = self.current_weights.borrow();
        let interactive_share = |origin| self.demand_recorder.interactive_share(deployment, allowed, origin);
        let query = RouteQuery {
            deployment,
            priority,
            allowed,
            routed: view.routed,
            // The reports of a region about its replicas are newer than its registration in the table.
            serving: states.fleet.serving(deployment, registered),
            draining: view.draining,
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
        Route(route::route(&query, &Observed { states, request, now }, BUFFER.take()))
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
        let request = spill::SpillRequest {
            deployment,
            priority,
            tokens,
            left,
            turned_away: false,
            chance: leave_draw,
        };
        self.is_spillover_enabled.then_some(SpilloverQuery { credits: &states.spill, now, request })
    }
}

/// State of the regions for one request.
struct Observed<'a> {
    states: &'a RegionStates,
    request: &'a Routable<'a>,
    now: Instant,
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
        let QueueWaits { interactive, bulk } =
            waits(&self.states.load(region, self.request.routing.deployment));
        match self.request.routing.priority {
            // A region that does not report the priorities separately has one queue for both.
            Priority::Interactive => interactive.or(bulk),
            Priority::Bulk => bulk,
        }
    }
}

/// Returns the time that a request would wait behind the reported load, by priority.
pub(super) fn waits(load: &DeploymentLoad) -> QueueWaits {
    QueueWaits::of(load.interactive_tokens, load.pending_tokens, load.tokens_per_second)
}
