//! Routing decision of one request: the regions that may serve it, in order of preference, and why the others may not.
//!
//! ```text
//!  filter ──▶ score ──▶ order ──▶ primary ──▶ spillover            ──▶ admission pool
//!  residency   Score     sort      first       another region, only      that of the region
//!  route table           once      candidate   with a credit of it       the request is sent to
//!  readiness
//! ```
//!
//! *Filter* is set algebra: the allowed regions come first and everything later works on what they leave, so no health,
//! distance or load can bring a forbidden region back (invariant 1, Residency). *Score* is a struct whose field order is the
//! policy; nothing re-orders the candidates afterwards. The *primary* is the first candidate. *Spillover* replaces
//! it where its queue is too long or its admission pool rejects the request, and another allowed region has granted credit and
//! admits it ([`crate::spill`]). The request enters the *admission pool* of the region that it is sent to first.
//!
//! A deployment with an *order* of regions (active-passive) sends all of its requests to the first region of the order among
//! the most healthy ones: the order comes before distance, response times and the plan, and after residency and health
//! ([`OrderPosition`]). Nothing here remembers which region was active; the hysteresis is that of health ([`crate::health`],
//! [`crate::circuit`]). A draining region, and one that would hold the request during a cold start, hand over to the next one.
//! Retries and hedged requests follow the candidates, so they go to the next region of the order, and so does spillover.
//!
//! The decision is pure: state is read through [`Observations`], draws are arguments. It is made once for a request and once
//! for each part of a split request, and `explain` prints it.
//!
//! The alternative, one weighted sum with a large penalty for forbidden regions, makes residency a matter of arithmetic.

use crate::candidate::{Candidate, OrderPosition, Score};
use crate::circuit::Permille;
use crate::cold::{self, ResponseEstimate};
use crate::shed::Shed;
use crate::spill::{self, Spill, SpillRank, SpilloverDecision};
use crate::weights::{PlanWeights, throw};
use regions::health::Health;
use regions::id::DeploymentName;
use regions::invariants;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::draw;
use replica_api::priority::Priority;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Round trips that differ by no more than this count as equal: a client does not notice which of the regions responds, but
/// notices a slow one.
const EQUALLY_NEAR: Duration = Duration::from_millis(25);

/// Input of a routing decision: the request and the route table.
#[derive(Clone, Copy)]
pub struct RouteQuery<'a> {
    /// Deployment that the request is for.
    pub deployment: &'a DeploymentName,
    /// Priority of the request.
    pub priority: Priority,
    /// Regions that residency allows: the intersection of all policies.
    pub allowed: RegionSet,
    /// Order of the deployment's regions; `None` for routing to the nearest one.
    pub order: Option<&'a Arc<[RegionIndex]>>,
    /// Regions in the route table.
    pub routed: RegionSet,
    /// Regions with a ready replica of the deployment, or which would start one.
    pub serving: RegionSet,
    /// Regions that are being drained. They rank last among the equally healthy.
    pub draining: RegionSet,
    /// Regions whose spokes all drain because they stop. They still accept requests, and are candidates only if no other region is
    /// one.
    pub stopping: RegionSet,
    /// Region of this gateway: the origin of requests whose client's location is unknown.
    pub gateway: RegionIndex,
    /// Whether the client's location is known. Then the nearest healthy region is the origin.
    pub is_client_located: bool,
    /// Region that a part of a split request was assigned to. It ranks first, unless the deployment has an order and another
    /// region is healthier.
    pub assigned: Option<RegionIndex>,
    /// The hub's traffic plan, if there is one.
    pub plan: Option<PlanQuery<'a>>,
    /// Spillover, if it is enabled.
    pub spillover: Option<SpilloverQuery<'a>>,
}

/// Traffic plan of the hub, and this request's draw from it.
#[derive(Clone, Copy)]
pub struct PlanQuery<'a> {
    /// Shares of the regions.
    pub weights: &'a PlanWeights,
    /// Draw of this request. `None`: the plan is reported with the candidates and not drawn from (parts of a split request).
    pub draw: Option<Permille>,
    /// Interactive part of the demand from an origin.
    pub interactive_share: &'a dyn Fn(RegionIndex) -> Option<Permille>,
}

/// Credits that regions have granted, and the request that may use them.
#[derive(Clone, Copy)]
pub struct SpilloverQuery<'a> {
    /// Granted credits.
    pub credits: &'a Spill,
    /// Time of the decision; credits expire.
    pub now: Instant,
    /// The request.
    pub request: spill::SpillRequest<'a>,
}

/// Observed state of the regions, as it concerns one request.
pub trait Observations {
    /// Health of a region that serves the deployment; an ejected one is suspect.
    fn health(&self, region: RegionIndex) -> Health;
    /// Expected round trip: from the client if its location is known, else from the gateway.
    fn rtt(&self, region: RegionIndex) -> Duration;
    /// Whether any region would hold requests for this deployment until a replica is ready.
    fn is_any_cold(&self) -> bool;
    /// Time for which a region would hold the request; `None` where a replica is ready.
    fn held_for(&self, region: RegionIndex) -> Option<Duration>;
    /// Expected response of a region with this round trip.
    fn response_estimate(&self, region: RegionIndex, rtt: Duration) -> ResponseEstimate;
    /// Region that should be preferred among equally near ones, by measured response times.
    fn fastest(&self, near: impl Iterator<Item = RegionIndex> + Clone) -> Option<RegionIndex>;
    /// Time that the request would wait in a region's queue; `None` where the region has not reported it.
    fn queue_wait(&self, region: RegionIndex) -> Option<Duration>;
    /// Rejection by a region's admission pool; `None` where it admits the request, and for parts and previews, which enter none.
    fn rejection(&self, region: RegionIndex) -> Option<Shed>;
}

/// Reason for which a region may not serve a request, in the order in which they are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RejectReason {
    /// Residency forbids it.
    ForbiddenByResidency,
    /// It has no ready replica of the deployment and would not start one.
    NotServing,
    /// It is down.
    Down,
}

/// Reason for which a region of the order does not take a request, which goes to a later region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassedOver {
    /// It is not in the route table.
    NotRouted,
    /// It may not serve the request.
    Rejected(RejectReason),
    /// It is less healthy than the region that takes the request.
    Unhealthy(Health),
    /// It is being drained.
    Draining,
    /// It would hold the request until a replica is ready, and the other region has one.
    ColdStart,
}

/// Regions of the route table that may not serve the request, by reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    forbidden: RegionSet,
    not_serving: RegionSet,
    down: RegionSet,
}

/// Result of a routing decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteDecision {
    /// Regions that may serve the request, best first.
    pub candidates: Vec<Candidate>,
    /// The other regions of the route table, with reasons.
    pub rejected: Rejected,
    /// Order of the deployment's regions, if it has one.
    pub order: Option<Arc<[RegionIndex]>>,
    /// Origin of the request in the traffic plan.
    pub origin: RegionIndex,
    /// Rejection by the primary's admission pool. The request is shed unless another region takes it as spillover.
    pub rejection: Option<Shed>,
    /// Spillover demand, and the region that takes the request, whose credit the caller spends with [`Spill::commit`].
    /// `None`: the primary is neither overloaded nor does its pool reject the request.
    pub spillover: Option<SpilloverDecision>,
}

impl Rejected {
    /// Rejected regions with their reasons, in the order of the catalogue.
    pub fn iter(&self) -> impl Iterator<Item = (RegionIndex, RejectReason)> {
        let Rejected { forbidden, not_serving, down } = *self;
        forbidden.union(not_serving).union(down).iter().map(move |region| {
            let reason = if forbidden.contains(region) {
                RejectReason::ForbiddenByResidency
            } else if not_serving.contains(region) {
                RejectReason::NotServing
            } else {
                RejectReason::Down
            };
            (region, reason)
        })
    }

    /// Reason for which a region was rejected; `None` if it was not, or is not in the route table.
    pub fn reason(&self, region: RegionIndex) -> Option<RejectReason> {
        self.iter().find(|(rejected, _)| *rejected == region).map(|(_, reason)| reason)
    }
}

impl RejectReason {
    /// Text of the reason in explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            RejectReason::ForbiddenByResidency => "forbidden by residency",
            RejectReason::NotServing => "no ready replica of the deployment",
            RejectReason::Down => "down",
        }
    }
}

impl PassedOver {
    /// Text of the reason in explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            PassedOver::NotRouted => "not in the route table",
            PassedOver::Rejected(reason) => reason.as_str(),
            PassedOver::Unhealthy(Health::Unknown) => "no report yet",
            PassedOver::Unhealthy(Health::Healthy | Health::Suspect | Health::Down) => "unhealthy",
            PassedOver::Draining => "draining",
            PassedOver::ColdStart => "no ready replica, in a cold start",
        }
    }
}

impl RouteDecision {
    /// Position of the primary in the order, from 0; `None` without an order, and for a primary outside it.
    pub fn order_index(&self) -> Option<usize> {
        let primary = self.primary()?;
        self.order.as_ref()?.iter().position(|region| *region == primary)
    }

    /// Regions of the order before the primary, with the reasons for which they do not take the request. Without a primary these
    /// are all of the order; without an order, and for a part that was assigned to its region, there are none.
    pub fn passed_over(&self) -> impl Iterator<Item = (RegionIndex, PassedOver)> {
        let primary = self.candidates.first();
        let order = self.order.as_deref().filter(|_| primary.is_none_or(|primary| !primary.score.assigned.0));
        let before = order.unwrap_or_default().iter().copied();
        let before = before.take_while(move |region| primary.is_none_or(|primary| primary.region != *region));
        before.map(move |region| (region, self.reason_to_pass_over(region)))
    }

    fn reason_to_pass_over(&self, region: RegionIndex) -> PassedOver {
        let candidate = self.candidates.iter().find(|candidate| candidate.region == region);
        match (candidate, self.rejected.reason(region)) {
            (Some(Candidate { score, .. }), _) => {
                let is_as_healthy =
                    self.candidates.first().is_some_and(|first| first.score.health == score.health);
                match score.order {
                    _ if !is_as_healthy => PassedOver::Unhealthy(score.health),
                    OrderPosition { draining: true, .. } => PassedOver::Draining,
                    OrderPosition { draining: false, .. } => PassedOver::ColdStart,
                }
            }
            (None, Some(reason)) => PassedOver::Rejected(reason),
            (None, None) => PassedOver::NotRouted,
        }
    }

    /// First candidate.
    pub fn primary(&self) -> Option<RegionIndex> {
        self.candidates.first().map(|candidate| candidate.region)
    }

    /// Region that takes the request as spillover. It is the first target, before all candidates.
    pub fn spillover_target(&self) -> Option<RegionIndex> {
        self.spillover?.to
    }

    /// Region whose admission pool the request enters, or which sheds it: the one that it is sent to first.
    pub fn admission_pool(&self) -> Option<RegionIndex> {
        self.spillover_target().or_else(|| self.primary())
    }

    /// Targets in the order in which attempts use them: the region that accepted the spillover, then the candidates.
    pub fn targets(&self) -> impl Iterator<Item = &Candidate> + Clone {
        let target = self.spillover_target();
        let spills = move |candidate: &&Candidate| Some(candidate.region) == target;
        let rest = self.candidates.iter().filter(move |candidate| Some(candidate.region) != target);
        self.candidates.iter().filter(spills).chain(rest)
    }
}

/// Decides. `buffer` holds the candidates of an earlier decision, or is empty: nothing is allocated where it is large enough.
///
/// # Panics
///
/// When a candidate is not allowed (invariant 1, Residency): a defect of the filter.
pub fn route(query: &RouteQuery<'_>, observed: &impl Observations, buffer: Vec<Candidate>) -> RouteDecision {
    let (eligible, mut rejected) = filter(query);
    let is_any_cold = observed.is_any_cold();
    let mut candidates = buffer;
    candidates.clear();
    candidates.reserve_exact(eligible.len());
    let mut add = |regions: RegionSet, candidates: &mut Vec<Candidate>| {
        for region in regions.iter() {
            match observed.health(region) {
                Health::Down => rejected.down.insert(region),
                health => candidates.push(score(query, observed, is_any_cold, region, health)),
            }
        }
    };
    let stopping = eligible.intersect(query.stopping);
    add(eligible.minus(stopping), &mut candidates);
    if candidates.is_empty() {
        add(stopping, &mut candidates);
    } else {
        rejected.not_serving = rejected.not_serving.union(stopping);
    }
    let origin = origin(query, &candidates);
    mark_drawn(query, observed, is_any_cold, origin, &mut candidates);
    order(query, observed, is_any_cold, &mut candidates);
    invariants::check_residency(&query.allowed, candidates.iter().map(|candidate| candidate.region))
        .expect("the filter removes forbidden regions first");
    let rejection = candidates.first().and_then(|primary| observed.rejection(primary.region));
    let spillover = query
        .spillover
        .as_ref()
        .and_then(|query| spillover(query, observed, &candidates, rejection.is_some()));
    RouteDecision { candidates, rejected, order: query.order.cloned(), origin, rejection, spillover }
}

/// Eligible regions, of which some may be down, and the others with reasons.
fn filter(query: &RouteQuery<'_>) -> (RegionSet, Rejected) {
    let allowed = query.routed.intersect(query.allowed);
    let rejected = Rejected {
        forbidden: query.routed.minus(query.allowed),
        not_serving: allowed.minus(query.serving),
        down: RegionSet::EMPTY,
    };
    (allowed.intersect(query.serving), rejected)
}

/// Score of an eligible region, before the comparisons with other regions.
fn score(
    query: &RouteQuery<'_>,
    observed: &impl Observations,
    is_any_cold: bool,
    region: RegionIndex,
    health: Health,
) -> Candidate {
    let draining = query.draining.contains(region);
    let mut score = Score::new(region, health, draining, observed.rtt(region));
    if let Some(order) = query.order {
        let index = order.iter().position(|ordered| *ordered == region).unwrap_or(order.len());
        score.order = OrderPosition {
            draining,
            holds: is_any_cold && observed.held_for(region).is_some(),
            index: u16::try_from(index).unwrap_or(u16::MAX),
        };
    }
    Candidate { region, score, planned: None }
}

/// Origin of the request in the traffic plan: the region nearest to the client, or that of the gateway. A region that is being
/// drained can be an origin.
fn origin(query: &RouteQuery<'_>, candidates: &[Candidate]) -> RegionIndex {
    if !query.is_client_located {
        return query.gateway;
    }
    let by_distance = |score: Score| Score { draining: false, order: OrderPosition::default(), ..score };
    let undrained = candidates.iter().map(|candidate| by_distance(candidate.score));
    undrained.min().map_or(query.gateway, |nearest| nearest.region)
}

/// Draws a region by the shares of the traffic plan, among those that are as healthy as the best. A region that would hold the
/// request is drawn only where all nearer ones would.
fn mark_drawn(
    query: &RouteQuery<'_>,
    observed: &impl Observations,
    is_any_cold: bool,
    origin: RegionIndex,
    candidates: &mut [Candidate],
) {
    let Some(PlanQuery { weights, draw: random, interactive_share }) = query.plan else { return };
    let shares = weights.of(query.deployment, origin, &query.allowed);
    if shares.is_empty() {
        return;
    }
    // The candidates are still in the order of the catalogue.
    let position = |candidates: &[Candidate], region| {
        candidates.binary_search_by_key(&region, |candidate| candidate.region).ok()
    };
    for share in shares {
        if let Some(at) = position(candidates, share.region) {
            candidates[at].planned = Some(*share);
        }
    }
    let Some(random) = random else { return };
    let held_for = |region| if is_any_cold { observed.held_for(region) } else { None };
    let ready = candidates.iter().map(|&Candidate { region, score, .. }| Score {
        rtt: score.rtt + held_for(region).unwrap_or_default(),
        ..score
    });
    let Some(first) = ready.min() else { return };
    let is_as_good = |at: usize| candidates[at].score.tier() == first.tier();
    let usable = |region: RegionIndex| {
        position(candidates, region).is_some_and(is_as_good)
            && (region == first.region || held_for(region).is_none())
    };
    let drawn = draw(shares, usable, throw(query.priority, interactive_share(origin), random));
    if let Some(at) = drawn.and_then(|drawn| position(candidates, drawn)) {
        candidates[at].score.drawn = Reverse(true);
    }
}

/// Completes the scores with what depends on other regions, and sorts by them.
fn order(
    query: &RouteQuery<'_>,
    observed: &impl Observations,
    is_any_cold: bool,
    candidates: &mut [Candidate],
) {
    candidates.sort_unstable_by_key(|candidate| candidate.score);
    if mark_fastest(observed, candidates) {
        move_up(candidates);
    }
    if is_any_cold {
        cold::mark_response_times(candidates, |candidate| {
            observed.response_estimate(candidate.region, candidate.score.rtt)
        });
        candidates.sort_unstable_by_key(|candidate| candidate.score);
    }
    if let Some(assigned) = query.assigned.filter(|assigned| is_assignable(query, *assigned, candidates)) {
        for candidate in &mut *candidates {
            candidate.score.assigned = Reverse(candidate.region == assigned);
        }
        move_up(candidates);
    }
}

/// Returns whether a part is sent to the region that it was assigned to. With an order, all parts are assigned to the region of
/// the whole request, and go on to the next one if that has become unhealthy since.
fn is_assignable(query: &RouteQuery<'_>, assigned: RegionIndex, candidates: &[Candidate]) -> bool {
    let healths = || candidates.iter().map(|candidate| (candidate.score.health, candidate.region));
    let best = healths().min().map(|(health, _)| health);
    query.order.is_none() || healths().any(|(health, region)| region == assigned && Some(health) == best)
}

/// Restores the order after the score of one candidate became better.
fn move_up(candidates: &mut [Candidate]) {
    let Some(moved) = (1..candidates.len()).find(|at| candidates[*at].score < candidates[at - 1].score)
    else {
        return;
    };
    let better = candidates[moved].score;
    let to = candidates[..moved].partition_point(|candidate| candidate.score < better);
    candidates[to..=moved].rotate_right(1);
}

/// Marks the fastest of the regions that are about as near as the first. Returns whether one is marked.
fn mark_fastest(observed: &impl Observations, candidates: &mut [Candidate]) -> bool {
    let [Candidate { score: first, .. }, _, ..] = *candidates else { return false };
    let is_near = |candidate: &&Candidate| {
        candidate.score.rtt.abs_diff(first.rtt) <= EQUALLY_NEAR
            && candidate.score.is_equal_but_for_distance(&first)
    };
    let near = candidates.iter().filter(is_near).map(|candidate| candidate.region);
    let fastest = observed.fastest(near);
    let fastest = candidates.iter_mut().find(|candidate| Some(candidate.region) == fastest);
    fastest.map(|fastest| fastest.score.fastest = Reverse(true)).is_some()
}

/// Decides whether a request spills over from its primary, and to which region. `is_shed`: the primary's admission pool
/// rejects it. `None`: there is no primary, or it is not overloaded.
fn spillover(
    query: &SpilloverQuery<'_>,
    observed: &impl Observations,
    candidates: &[Candidate],
    is_shed: bool,
) -> Option<SpilloverDecision> {
    let SpilloverQuery { credits, now, request } = *query;
    let request = spill::SpillRequest { is_shed, ..request };
    let (&Candidate { region, score, .. }, rest) = candidates.split_first()?;
    let primary = spill::SpillCandidate { region, rtt: score.rtt, wait: observed.queue_wait(region) };
    if request.is_calm_at(primary) {
        return None;
    }
    let others = rest.iter().filter(|other| other.score.health == Health::Healthy && !other.score.draining);
    let others = others.map(|&Candidate { region, score: Score { order, rtt, .. }, .. }| SpillRank {
        order,
        rtt,
        region,
    });
    let queue_wait = |region| observed.queue_wait(region);
    credits.decide(&request, primary, others, queue_wait, |region| observed.rejection(region).is_none(), now)
}
