//! Schedule, input and persistence of the traffic plan.
//!
//! A plan is computed once a second while at least one gateway reports demand. The hub hands out a [`PlanInput`] and
//! receives a [`TrafficPlan`], so that the computation can run in the background. Only those parts of a plan are
//! written that differ from the store: the rows of the gateways in one region, or the floors of one region. Each part
//! carries the number of the plan that changed it. Numbers only rise, also across hubs: they continue from the highest
//! number in the store, or, where a store was set back, in a higher epoch.
//!
//! An expired gateway is still planned for during [`DEMAND_RETENTION`], because its clients have moved to another gateway
//! that will report their demand a moment later. An expired region is not, unless so many expire at once that the store
//! is suspected.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::invariants;
use crate::plan::capacity::plannable_capacity;
use crate::plan::{ClassDemand, PlanInput, Source, TrafficPlan};
use crate::registry::Registry;
use regions::latency::prior_rtt;
use regions::{Catalogue, Deployment, DeploymentName, Generation, RegionId, RegionIndex, Share};
use scheduler_api::plan::{
    GatewayBoot, GatewayDemand, GatewayWeights, NamedShare, PLAN_PERIOD, RegionCapacity, RegionFloors,
    TenantShares, TrafficClass,
};

/// Time for which the demand of an expired gateway is still planned for: three leases.
pub const DEMAND_RETENTION: Duration = Duration::from_secs(15);
/// Time window of the demand peaks, and the number of its steps.
const PEAK_WINDOW: Duration = Duration::from_secs(3600);
const PEAK_STEPS: u32 = 12;

/// Part of a plan with its own key in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanPart {
    /// Rows of the gateways in one region.
    Weights(GatewayWeights),
    /// Floors of one region.
    Floors(RegionFloors),
    /// Shares of one gateway in the rate limits of tenants ([`crate::shares`]).
    Shares(TenantShares),
}

impl PlanPart {
    /// Generation of this part.
    pub fn generation(&self) -> Generation {
        match self {
            PlanPart::Weights(weights) => weights.generation,
            PlanPart::Floors(floors) => floors.generation,
            PlanPart::Shares(shares) => shares.generation,
        }
    }
}

/// Input and result of the planning.
#[derive(Debug)]
pub(super) struct Planner {
    catalogue: Arc<Catalogue>,
    epoch: u64,
    demand: BTreeMap<GatewayBoot, GatewayState>,
    peaks: BTreeMap<TrafficClass, Peak>,
    /// Reported capacities by region, kept for regions whose lease ended together with many others.
    capacities: BTreeMap<RegionId, RegionCapacity>,
    plan: Arc<TrafficPlan>,
    /// Parts that the store holds.
    weights: BTreeMap<RegionId, GatewayWeights>,
    floors: BTreeMap<RegionId, RegionFloors>,
    /// Highest number ever assigned.
    number: u64,
    due: Instant,
    busy: bool,
}

/// Last demand report of a gateway.
#[derive(Debug)]
struct GatewayState {
    classes: BTreeMap<(TrafficClass, RegionId), u64>,
    /// Time at which its report expired.
    expired_at: Option<Instant>,
}

/// Highest demand of each step of the last hour, newest last.
#[derive(Debug, Default)]
struct Peak(VecDeque<(Instant, u64)>);

impl Peak {
    fn record(&mut self, tokens_per_second: u64, now: Instant) -> u64 {
        let step = PEAK_WINDOW / PEAK_STEPS;
        match self.0.back_mut() {
            Some((since, most)) if now.saturating_duration_since(*since) < step => {
                *most = tokens_per_second.max(*most);
            }
            Some(_) | None => self.0.push_back((now, tokens_per_second)),
        }
        while self.0.front().is_some_and(|(since, _)| now.saturating_duration_since(*since) >= PEAK_WINDOW) {
            self.0.pop_front();
        }
        self.0.iter().map(|(_, most)| *most).max().unwrap_or(0)
    }
}

/// State of the hub that a plan depends on.
pub(super) struct HubView<'a> {
    pub(super) registry: &'a Registry,
    pub(super) deployments: &'a BTreeMap<DeploymentName, Deployment>,
    pub(super) drains: &'a BTreeSet<RegionId>,
}

impl Planner {
    /// Creates a planner that continues from the parts in the store.
    pub(super) fn new(catalogue: Arc<Catalogue>, epoch: u64, parts: Vec<PlanPart>, now: Instant) -> Planner {
        let number = parts.iter().map(|part| part.generation().number).max().unwrap_or(0);
        let mut planner = Planner {
            catalogue,
            epoch,
            demand: BTreeMap::new(),
            peaks: BTreeMap::new(),
            capacities: BTreeMap::new(),
            plan: Arc::default(),
            weights: BTreeMap::new(),
            floors: BTreeMap::new(),
            number,
            due: now + PLAN_PERIOD,
            busy: false,
        };
        parts.into_iter().for_each(|part| planner.record_part(part));
        planner.plan = Arc::new(planner.restored_plan());
        planner
    }

    /// Stores a gateway's demand report.
    pub(super) fn report_demand(&mut self, demand: GatewayDemand) {
        let GatewayDemand { gateway, classes, reachable_regions: _ } = demand;
        self.demand.insert(gateway, GatewayState { classes, expired_at: None });
    }

    /// Marks a gateway as expired.
    pub(super) fn gateway_expired(&mut self, gateway: &GatewayBoot, now: Instant) {
        if let Some(state) = self.demand.get_mut(gateway) {
            state.expired_at.get_or_insert(now);
        }
    }

    /// Replaces all demand reports.
    pub(super) fn replace(&mut self, all: Vec<GatewayDemand>, now: Instant) {
        let named: BTreeSet<_> = all.iter().map(|demand| demand.gateway.clone()).collect();
        let expired: Vec<_> =
            self.demand.keys().filter(|gateway| !named.contains(gateway)).cloned().collect();
        expired.iter().for_each(|gateway| self.gateway_expired(gateway, now));
        all.into_iter().for_each(|demand| self.report_demand(demand));
    }

    /// Returns the due time of the next plan; `None` without demand.
    pub(super) fn next_due(&self) -> Option<Instant> {
        (!self.busy && !self.demand.is_empty()).then_some(self.due)
    }

    /// Returns the input of the next plan and the previous plan, if a plan is due now.
    pub(super) fn begin(
        &mut self,
        view: &HubView<'_>,
        now: Instant,
    ) -> Option<(PlanInput, Arc<TrafficPlan>)> {
        if self.next_due().is_none_or(|due| due > now) {
            return None;
        }
        self.due = now + PLAN_PERIOD;
        self.demand.retain(|_, state| state.expired_at.is_none_or(|at| at + DEMAND_RETENTION > now));
        self.busy = true;
        let input = self.input(view, now);
        Some((input, self.plan.clone()))
    }

    /// Takes the computed plan. Returns the parts to write; empty if the store already holds all of them.
    pub(super) fn plan_computed(&mut self, plan: TrafficPlan) -> Vec<PlanPart> {
        self.busy = false;
        self.plan = Arc::new(plan);
        let generation = Generation { epoch: self.epoch, number: self.number + 1 };
        let changes = self.changes(generation);
        if !changes.is_empty() {
            // The number is used up even if the write fails: a reader may have observed it.
            self.number = generation.number;
            self.busy = true;
        }
        changes
    }

    /// Returns the classes that cannot survive the loss of their largest region, by the last plan.
    pub(super) fn uncovered_classes(&self) -> &BTreeSet<TrafficClass> {
        &self.plan.floors.uncovered_classes
    }

    /// Records that the store holds these parts now.
    pub(super) fn written(&mut self, parts: &[PlanPart]) {
        self.busy = false;
        parts.iter().cloned().for_each(|part| self.record_part(part));
    }

    /// Records a failed write; the next plan contains the missing parts.
    pub(super) fn write_failed(&mut self) {
        self.busy = false;
    }

    fn record_part(&mut self, part: PlanPart) {
        let generation = part.generation();
        let before = match &part {
            PlanPart::Weights(weights) => self.weights.get(&weights.gateway).map(|known| known.generation),
            PlanPart::Floors(floors) => self.floors.get(&floors.region).map(|known| known.generation),
            PlanPart::Shares(_) => None,
        };
        if let Some(before) = before {
            invariants::monotone(before, generation).expect("plan numbers only rise");
        }
        match part {
            PlanPart::Weights(weights) => drop(self.weights.insert(weights.gateway.clone(), weights)),
            PlanPart::Floors(floors) => drop(self.floors.insert(floors.region.clone(), floors)),
            // They have numbers of their own.
            PlanPart::Shares(_) => {}
        }
    }

    /// Returns the parts in which the plan differs from the store. A class without demand stays as an empty part, so
    /// that its number is not lost.
    fn changes(&self, generation: Generation) -> Vec<PlanPart> {
        let (mut rows, mut floors) = (self.rows(), self.floors());
        let mut changes = Vec::new();
        for gateway in self.weights.keys() {
            rows.entry(gateway.clone()).or_default();
        }
        for region in self.floors.keys() {
            floors.entry(region.clone()).or_default();
        }
        for (gateway, rows) in rows {
            let known = self.weights.get(&gateway);
            if known.is_none_or(|known| known.rows != rows || known.generation.epoch < self.epoch) {
                changes.push(PlanPart::Weights(GatewayWeights { generation, gateway, rows }));
            }
        }
        for (region, floors) in floors {
            let known = self.floors.get(&region);
            if known.is_none_or(|known| known.floors != floors || known.generation.epoch < self.epoch) {
                changes.push(PlanPart::Floors(RegionFloors { generation, region, floors }));
            }
        }
        changes
    }

    fn region_id(&self, region: RegionIndex) -> RegionId {
        self.catalogue.region(region).id.clone()
    }

    /// Returns the plan's rows by gateway.
    fn rows(&self) -> BTreeMap<RegionId, BTreeMap<(TrafficClass, RegionId), Vec<NamedShare>>> {
        let mut rows: BTreeMap<RegionId, BTreeMap<_, _>> = BTreeMap::new();
        for (class, sources) in &self.plan.rows {
            for (source, row) in sources {
                let shares = row.iter().map(|Share { region, permille, reason }| NamedShare {
                    region: self.region_id(*region),
                    permille: *permille,
                    reason: *reason,
                });
                let of = rows.entry(self.region_id(source.gateway)).or_default();
                of.insert((class.clone(), self.region_id(source.origin)), shares.collect());
            }
        }
        rows
    }

    /// Returns the plan's floors by region.
    fn floors(&self) -> BTreeMap<RegionId, BTreeMap<DeploymentName, u32>> {
        let mut floors: BTreeMap<RegionId, BTreeMap<DeploymentName, u32>> = BTreeMap::new();
        for (name, regions) in &self.plan.floors.replicas {
            for (region, floor) in regions {
                floors.entry(self.region_id(*region)).or_default().insert(name.clone(), floor.replicas);
            }
        }
        floors
    }

    /// Returns the plan in the store, restricted to the regions of this catalogue.
    fn restored_plan(&self) -> TrafficPlan {
        let mut plan = TrafficPlan::default();
        for GatewayWeights { generation: _, gateway, rows } in self.weights.values() {
            let Some(gateway) = self.catalogue.index_of(gateway) else { continue };
            for ((class, origin), shares) in rows {
                let Some(origin) = self.catalogue.index_of(origin) else { continue };
                let known = shares.iter().filter_map(|NamedShare { region, permille, reason }| {
                    Some(Share {
                        region: self.catalogue.index_of(region)?,
                        permille: *permille,
                        reason: *reason,
                    })
                });
                let mut row: Vec<Share> = known.collect();
                row.sort_unstable_by_key(|share| share.region);
                plan.rows.entry(class.clone()).or_default().insert(Source { gateway, origin }, row);
            }
        }
        plan
    }

    fn input(&mut self, view: &HubView<'_>, now: Instant) -> PlanInput {
        self.refresh_capacities(view.registry);
        let capacities = self
            .capacities
            .iter()
            .filter_map(|(region, capacity)| Some((self.catalogue.index_of(region)?, capacity)));
        let (pools, deployments) = plannable_capacity(capacities);
        let demand = self.classes(view.deployments, now);
        let mut rtt = BTreeMap::new();
        let origins: BTreeSet<_> =
            demand.values().flat_map(|demand| demand.by_source.keys()).map(|source| source.origin).collect();
        let regions: BTreeSet<_> = pools.iter().map(|pool| pool.region).collect();
        for origin in origins {
            for region in &regions {
                let (from, to) = (self.catalogue.region(origin).point, self.catalogue.region(*region).point);
                rtt.insert((origin, *region), prior_rtt(from.distance_km(to)));
            }
        }
        let cost = regions.iter().filter_map(|region| Some((*region, self.catalogue.region(*region).cost?)));
        let draining = view.drains.iter().filter_map(|region| self.catalogue.index_of(region)).collect();
        PlanInput { rtt, draining, cost: cost.collect(), pools, deployments, demand }
    }

    /// Updates the capacities from the registered spokes. While a mass loss is suspected, those of the lost regions
    /// stay.
    fn refresh_capacities(&mut self, registry: &Registry) {
        let newest = registry.representatives();
        if !registry.is_holding() {
            self.capacities.retain(|region, _| newest.contains_key(region));
        }
        for (region, spoke) in newest {
            self.capacities.insert(region.clone(), spoke.registration.capacity.clone());
        }
    }

    /// Returns the demand by class and source, with the peak of each class.
    fn classes(
        &mut self,
        deployments: &BTreeMap<DeploymentName, Deployment>,
        now: Instant,
    ) -> BTreeMap<TrafficClass, ClassDemand> {
        let mut classes: BTreeMap<TrafficClass, ClassDemand> = BTreeMap::new();
        for (gateway, state) in &self.demand {
            let Some(at) = self.catalogue.index_of(&gateway.region) else { continue };
            for ((class, origin), tokens) in &state.classes {
                let Some(origin) = self.catalogue.index_of(origin) else { continue };
                let demand = match classes.get_mut(class) {
                    Some(demand) => demand,
                    None => {
                        let Some(deployment) = deployments.get(&class.deployment) else { continue };
                        let policy = class.residency.narrow(&deployment.residency);
                        let placed = deployment.placement(&self.catalogue);
                        let allowed = policy.permitted(&self.catalogue).intersect(placed);
                        let order = deployment.ordered_regions(&self.catalogue);
                        let empty = ClassDemand { allowed, order, peak: 0, by_source: BTreeMap::new() };
                        classes.entry(class.clone()).or_insert(empty)
                    }
                };
                let source = Source { gateway: at, origin };
                let sum = demand.by_source.entry(source).or_default();
                *sum = sum.saturating_add(*tokens);
            }
        }
        self.peaks.retain(|class, _| classes.contains_key(class));
        for (class, demand) in &mut classes {
            let total = demand.by_source.values().fold(0u64, |sum, tokens| sum.saturating_add(*tokens));
            demand.peak = self.peaks.entry(class.clone()).or_default().record(total, now);
        }
        classes
    }
}

#[cfg(test)]
mod tests;
