//! Router: makes the routing decision of a request ([`gateway_core::route`]) from the route table, the observed state of the
//! regions, and the hub's traffic plan.
//!
//! The decision is made once for a request, when its size is known, and once for each part of a split request. Before the body
//! of a request is read a preliminary decision names the admission pool that would reject it.

use super::known::{About, Known};
use super::view::View;
use super::watch::Watch;
use super::weights::{Demands, Planned};
use gateway_core::circuit::Permille;
use gateway_core::cold::ResponseEstimate;
use gateway_core::priority::Priority;
use gateway_core::residency::Residency;
use gateway_core::route::{
    self, Candidate, Observations, PlanQuery, RouteDecision, RouteQuery, SpilloverQuery,
};
use gateway_core::shed::QueueWaits;
use gateway_core::spill;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::set::{RegionIndex, RegionSet};
use scheduler_core::spoke::DeploymentLoad;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

thread_local! {
    /// Candidates of a decision that is no longer needed, whose memory the next decision of this thread uses: with many regions
    /// the allocation made the slowest decisions slow.
    static BUFFER: Cell<Vec<Candidate>> = const { Cell::new(Vec::new()) };
}

/// Router of one gateway.
pub(super) struct Router {
    /// Region of this gateway.
    pub(super) gateway: RegionIndex,
    pub(super) is_spillover_enabled: bool,
    pub(super) watch: Arc<Watch>,
    pub(super) planned: watch::Receiver<Planned>,
    pub(super) demands: Arc<Demands>,
}

/// Request to route.
#[derive(Clone, Copy)]
pub(super) struct Routable<'a> {
    pub(super) view: &'a View,
    pub(super) about: About<'a>,
    /// Regions that residency allows.
    pub(super) allowed: RegionSet,
    /// Regions that had registered for the deployment when the route table was made.
    pub(super) registered: RegionSet,
    /// Location of the client, if it is known.
    pub(super) client: Option<GeoPoint>,
}

/// Demand that a request stands for, and its draws.
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

/// A decision, whose memory is reused when it is dropped.
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
            let known = &mut *self.watch.known();
            let spillover = self.spillover(known, request, demand, now);
            let route = self.decide(known, request, Some(demand.draw), None, spillover, now);
            if let Some(departure) = route.departure {
                known.spill.commit(request.about.deployment, departure, now);
            }
            route
        };
        let (policy, tokens) = ((demand.residency, request.allowed), (request.about.priority, demand.tokens));
        self.demands.asked(request.about.deployment, policy, route.origin, tokens, now);
        route
    }

    /// Finds a region that takes a request which the admission pool of its primary has rejected, and spends its credit.
    pub(super) fn spill_rejected(
        &self,
        request: &Routable<'_>,
        demand: &RequestDemand<'_>,
        route: &Route,
    ) -> Option<RegionIndex> {
        let now = Instant::now();
        let known = &mut *self.watch.known();
        let spillover = self.spillover(known, request, demand, now)?;
        let observed = Observed { known, request, now };
        let departure = route::departure(&spillover, &observed, &route.candidates, true)?;
        known.spill.commit(request.about.deployment, departure, now);
        departure.to
    }

    /// Routes a part of a split request, which was assigned to a region.
    pub(super) fn route_part(&self, part: &Routable<'_>, assigned: RegionIndex) -> Route {
        self.decide(&self.watch.known(), part, None, Some(assigned), None, Instant::now())
    }

    /// Routes a request of which only the head is known. Spends and counts nothing.
    pub(super) fn preview(&self, request: &Routable<'_>, draw: Permille) -> Route {
        self.decide(&self.watch.known(), request, Some(draw), None, None, Instant::now())
    }

    fn decide(
        &self,
        known: &Known,
        request: &Routable<'_>,
        draw: Option<Permille>,
        assigned: Option<RegionIndex>,
        spillover: Option<SpilloverQuery<'_>>,
        now: Instant,
    ) -> Route {
        let Routable { view, about, allowed, registered, client } = *request;
        let About { deployment, priority, .. } = about;
        let planned = self.planned.borrow();
        let interactive_share = |origin| self.demands.lookups(deployment, allowed, origin);
        let query = RouteQuery {
            deployment,
            priority,
            allowed,
            routed: view.routed,
            // A region knows its replicas better than the table, for which it registered some time ago.
            serving: known.fleet.serving(deployment, registered),
            draining: view.draining,
            gateway: self.gateway,
            is_client_located: client.is_some(),
            assigned,
            plan: planned.as_deref().map(|weights| PlanQuery {
                weights,
                draw,
                interactive_share: &interactive_share,
            }),
            spillover,
        };
        Route(route::route(&query, &Observed { known, request, now }, BUFFER.take()))
    }

    fn spillover<'a>(
        &self,
        known: &'a Known,
        request: &Routable<'a>,
        demand: &RequestDemand<'_>,
        now: Instant,
    ) -> Option<SpilloverQuery<'a>> {
        let About { deployment, priority, .. } = request.about;
        let RequestDemand { tokens, left, leave_draw, .. } = *demand;
        let request = spill::SpillRequest {
            deployment,
            priority,
            tokens,
            left,
            turned_away: false,
            chance: leave_draw,
        };
        self.is_spillover_enabled.then_some(SpilloverQuery { credits: &known.spill, now, request })
    }
}

/// State of the regions as it concerns one request.
struct Observed<'a> {
    known: &'a Known,
    request: &'a Routable<'a>,
    now: Instant,
}

impl Observations for Observed<'_> {
    fn health(&self, region: RegionIndex) -> Health {
        self.known.health(region, &self.request.about, self.now)
    }

    fn rtt(&self, region: RegionIndex) -> Duration {
        match self.request.client {
            Some(point) => self.known.latency.prior_from(point, region),
            None => self.known.latency.estimate(region, self.now),
        }
    }

    fn is_any_cold(&self) -> bool {
        self.known.is_any_cold(self.request.about.deployment)
    }

    fn held_for(&self, region: RegionIndex) -> Option<Duration> {
        self.known.held_for(region, self.request.about.deployment)
    }

    fn response_estimate(&self, region: RegionIndex, rtt: Duration) -> ResponseEstimate {
        self.known.response_estimate(region, rtt, &self.request.about)
    }

    fn fastest(&self, near: impl Iterator<Item = RegionIndex> + Clone) -> Option<RegionIndex> {
        let About { deployment, size, chance, .. } = self.request.about;
        self.known.targets.preferred(near, deployment, size, chance, self.now)
    }

    fn queue_wait(&self, region: RegionIndex) -> Option<Duration> {
        let QueueWaits { interactive, bulk } = waits(&self.known.load(region, self.request.about.deployment));
        match self.request.about.priority {
            // A region that does not report the priorities separately has one queue for both.
            Priority::Interactive => interactive.or(bulk),
            Priority::Bulk => bulk,
        }
    }
}

/// RequestTimes that a request would wait behind the reported load, by priority.
pub(super) fn waits(load: &DeploymentLoad) -> QueueWaits {
    QueueWaits::of(load.interactive_tokens, load.pending_tokens, load.tokens_per_second)
}
