//! When the hub plans, from what, and what of a plan has to be written.
//!
//! Once a second, for as long as some gateway is asked for something. The work itself is a [`Problem`] that is handed out
//! and a [`Plan`] that is handed back, so that it can be done beside whatever else the hub does. Of a plan only those
//! parts are written that say something else than what stands in the store: the rows of the gateways at one place, the
//! floors of one region. Each is given the number of the plan that changed it, and numbers only rise, also over hubs: they
//! go on from the highest that stands in the store, and where a store was set back, in a higher epoch.
//!
//! A gateway that falls silent is planned for a little longer, since its clients have gone to another that will say so a
//! moment later; a region that falls silent is not, unless so many do that the store is suspected.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::invariants;
use crate::plan::capacity::{Capacity, count};
use crate::plan::{Class, Demand, Plan, Problem, Source};
use crate::registry::Registry;
use crate::wire::plan::{GatewayBoot, GatewayDemand, NamedShare, RegionFloors, Weights};
use regions::latency::prior_rtt;
use regions::{Catalogue, Deployment, DeploymentName, Generation, RegionId, RegionIndex, Share};

/// How often there is a plan.
pub const PLAN_PERIOD: Duration = Duration::from_secs(1);
/// How long a gateway that has fallen silent is planned for: three leases.
pub const DEMAND_KEPT: Duration = Duration::from_secs(15);
/// For how long the most that was asked for is remembered, in so many steps.
const PEAK_KEPT: Duration = Duration::from_secs(3600);
const PEAK_STEPS: u32 = 12;

/// A part of a plan that is written by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The rows of the gateways at one place.
    Weights(Weights),
    /// The floors of one region.
    Floors(RegionFloors),
}

impl Part {
    /// How new it is.
    pub fn generation(&self) -> Generation {
        match self {
            Part::Weights(weights) => weights.generation,
            Part::Floors(floors) => floors.generation,
        }
    }
}

/// What is planned from and what came of it.
#[derive(Debug)]
pub(super) struct Planner {
    catalogue: Arc<Catalogue>,
    epoch: u64,
    demand: BTreeMap<GatewayBoot, Held>,
    peaks: BTreeMap<Class, Peak>,
    /// Of the last plan, by region: what a region could do whose lease ended with many others.
    capacities: BTreeMap<RegionId, Capacity>,
    plan: Arc<Plan>,
    /// What stands in the store.
    weights: BTreeMap<RegionId, Weights>,
    floors: BTreeMap<RegionId, RegionFloors>,
    /// The highest number that was ever given out.
    number: u64,
    due: Instant,
    busy: bool,
}

/// What a gateway is asked for.
#[derive(Debug)]
struct Held {
    classes: BTreeMap<(Class, RegionId), u64>,
    /// When it fell silent.
    gone: Option<Instant>,
}

/// The most that was asked for in each step of the last hour, the newest last.
#[derive(Debug, Default)]
struct Peak(VecDeque<(Instant, u64)>);

impl Peak {
    fn saw(&mut self, tokens_per_second: u64, now: Instant) -> u64 {
        let step = PEAK_KEPT / PEAK_STEPS;
        match self.0.back_mut() {
            Some((since, most)) if now.saturating_duration_since(*since) < step => {
                *most = tokens_per_second.max(*most);
            }
            Some(_) | None => self.0.push_back((now, tokens_per_second)),
        }
        while self.0.front().is_some_and(|(since, _)| now.saturating_duration_since(*since) >= PEAK_KEPT) {
            self.0.pop_front();
        }
        self.0.iter().map(|(_, most)| *most).max().unwrap_or(0)
    }
}

/// What of the rest of the hub a plan hangs on.
pub(super) struct Around<'a> {
    pub(super) registry: &'a Registry,
    pub(super) deployments: &'a BTreeMap<DeploymentName, Deployment>,
    pub(super) drains: &'a BTreeSet<RegionId>,
}

impl Planner {
    /// Goes on from the parts that stand in the store.
    pub(super) fn new(catalogue: Arc<Catalogue>, epoch: u64, parts: Vec<Part>, now: Instant) -> Planner {
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
        parts.into_iter().for_each(|part| planner.stands(part));
        planner.plan = Arc::new(planner.recalled());
        planner
    }

    /// This is what a gateway is asked for.
    pub(super) fn asked(&mut self, demand: GatewayDemand) {
        let GatewayDemand { gateway, classes, reaches: _ } = demand;
        self.demand.insert(gateway, Held { classes, gone: None });
    }

    /// A gateway has fallen silent.
    pub(super) fn silent(&mut self, gateway: &GatewayBoot, now: Instant) {
        if let Some(held) = self.demand.get_mut(gateway) {
            held.gone.get_or_insert(now);
        }
    }

    /// These are all that are asked for anything.
    pub(super) fn replace(&mut self, all: Vec<GatewayDemand>, now: Instant) {
        let named: BTreeSet<_> = all.iter().map(|demand| demand.gateway.clone()).collect();
        let gone: Vec<_> = self.demand.keys().filter(|gateway| !named.contains(gateway)).cloned().collect();
        gone.iter().for_each(|gateway| self.silent(gateway, now));
        all.into_iter().for_each(|demand| self.asked(demand));
    }

    /// When the next plan is due; never, while nobody is asked for anything.
    pub(super) fn next_due(&self) -> Option<Instant> {
        (!self.busy && !self.demand.is_empty()).then_some(self.due)
    }

    /// The problem that is to be solved now, if one is due, and the plan that its solution follows.
    pub(super) fn begin(&mut self, around: &Around<'_>, now: Instant) -> Option<(Problem, Arc<Plan>)> {
        if self.next_due().is_none_or(|due| due > now) {
            return None;
        }
        self.due = now + PLAN_PERIOD;
        self.demand.retain(|_, held| held.gone.is_none_or(|gone| gone + DEMAND_KEPT > now));
        self.busy = true;
        let problem = self.problem(around, now);
        Some((problem, self.plan.clone()))
    }

    /// The plan that was made. What of it has to be written; nothing, if it says what stands there already.
    pub(super) fn solved(&mut self, plan: Plan) -> Vec<Part> {
        self.busy = false;
        self.plan = Arc::new(plan);
        let generation = Generation { epoch: self.epoch, number: self.number + 1 };
        let news = self.news(generation);
        if !news.is_empty() {
            // Also when it is not written after all: somebody may have seen it.
            self.number = generation.number;
            self.busy = true;
        }
        news
    }

    /// Classes that could not bear the loss of their largest region, by the last plan.
    pub(super) fn short(&self) -> &BTreeSet<Class> {
        &self.plan.floors.short
    }

    /// These parts stand in the store now.
    pub(super) fn written(&mut self, parts: &[Part]) {
        self.busy = false;
        parts.iter().cloned().for_each(|part| self.stands(part));
    }

    /// They may not: the next plan says what is missing.
    pub(super) fn not_written(&mut self) {
        self.busy = false;
    }

    fn stands(&mut self, part: Part) {
        let generation = part.generation();
        let before = match &part {
            Part::Weights(weights) => self.weights.get(&weights.gateway).map(|known| known.generation),
            Part::Floors(floors) => self.floors.get(&floors.region).map(|known| known.generation),
        };
        if let Some(before) = before {
            invariants::monotone(before, generation).expect("numbers of plans are counted upwards");
        }
        match part {
            Part::Weights(weights) => drop(self.weights.insert(weights.gateway.clone(), weights)),
            Part::Floors(floors) => drop(self.floors.insert(floors.region.clone(), floors)),
        }
    }

    /// What the plan says and the store does not. What nobody asks for any longer stays as an empty part, so that its
    /// number is not forgotten.
    fn news(&self, generation: Generation) -> Vec<Part> {
        let (mut rows, mut floors) = (self.rows(), self.kept());
        let mut news = Vec::new();
        for gateway in self.weights.keys() {
            rows.entry(gateway.clone()).or_default();
        }
        for region in self.floors.keys() {
            floors.entry(region.clone()).or_default();
        }
        for (gateway, rows) in rows {
            let known = self.weights.get(&gateway);
            if known.is_none_or(|known| known.rows != rows || known.generation.epoch < self.epoch) {
                news.push(Part::Weights(Weights { generation, gateway, rows }));
            }
        }
        for (region, floors) in floors {
            let known = self.floors.get(&region);
            if known.is_none_or(|known| known.floors != floors || known.generation.epoch < self.epoch) {
                news.push(Part::Floors(RegionFloors { generation, region, floors }));
            }
        }
        news
    }

    fn named(&self, region: RegionIndex) -> RegionId {
        self.catalogue.region(region).id.clone()
    }

    /// The plan's rows by gateway.
    fn rows(&self) -> BTreeMap<RegionId, BTreeMap<(Class, RegionId), Vec<NamedShare>>> {
        let mut rows: BTreeMap<RegionId, BTreeMap<_, _>> = BTreeMap::new();
        for (class, sources) in &self.plan.rows {
            for (source, row) in sources {
                let shares = row.iter().map(|Share { region, permille, why }| NamedShare {
                    region: self.named(*region),
                    permille: *permille,
                    why: *why,
                });
                let of = rows.entry(self.named(source.gateway)).or_default();
                of.insert((class.clone(), self.named(source.origin)), shares.collect());
            }
        }
        rows
    }

    /// The plan's floors by region.
    fn kept(&self) -> BTreeMap<RegionId, BTreeMap<DeploymentName, u32>> {
        let mut kept: BTreeMap<RegionId, BTreeMap<DeploymentName, u32>> = BTreeMap::new();
        for (name, regions) in &self.plan.floors.replicas {
            for (region, floor) in regions {
                kept.entry(self.named(*region)).or_default().insert(name.clone(), floor.replicas);
            }
        }
        kept
    }

    /// The plan that stands in the store, as far as this catalogue knows its regions.
    fn recalled(&self) -> Plan {
        let mut plan = Plan::default();
        for Weights { generation: _, gateway, rows } in self.weights.values() {
            let Some(gateway) = self.catalogue.index_of(gateway) else { continue };
            for ((class, origin), shares) in rows {
                let Some(origin) = self.catalogue.index_of(origin) else { continue };
                let known = shares.iter().filter_map(|NamedShare { region, permille, why }| {
                    Some(Share { region: self.catalogue.index_of(region)?, permille: *permille, why: *why })
                });
                let mut row: Vec<Share> = known.collect();
                row.sort_unstable_by_key(|share| share.region);
                plan.rows.entry(class.clone()).or_default().insert(Source { gateway, origin }, row);
            }
        }
        plan
    }

    fn problem(&mut self, around: &Around<'_>, now: Instant) -> Problem {
        self.look_at_capacities(around.registry);
        let capacities = self
            .capacities
            .iter()
            .filter_map(|(region, capacity)| Some((self.catalogue.index_of(region)?, capacity)));
        let (pools, places) = count(capacities);
        let demand = self.classes(around.deployments, now);
        let mut away = BTreeMap::new();
        let origins: BTreeSet<_> =
            demand.values().flat_map(|demand| demand.by_source.keys()).map(|source| source.origin).collect();
        let regions: BTreeSet<_> = pools.iter().map(|pool| pool.region).collect();
        for origin in origins {
            for region in &regions {
                let (from, to) = (self.catalogue.region(origin).point, self.catalogue.region(*region).point);
                away.insert((origin, *region), prior_rtt(from.distance_km(to)));
            }
        }
        let cost = regions.iter().filter_map(|region| Some((*region, self.catalogue.region(*region).cost?)));
        let draining = around.drains.iter().filter_map(|region| self.catalogue.index_of(region)).collect();
        Problem { away, draining, cost: cost.collect(), pools, places, demand }
    }

    /// What the regions that are registered can do; and those whose leases have ended with too many others.
    fn look_at_capacities(&mut self, registry: &Registry) {
        let newest = registry.newest();
        if !registry.holds() {
            self.capacities.retain(|region, _| newest.contains_key(region));
        }
        for (region, standing) in newest {
            self.capacities.insert(region.clone(), standing.registration.capacity.clone());
        }
    }

    /// What is asked for, by class and source, with the peak of each class.
    fn classes(
        &mut self,
        deployments: &BTreeMap<DeploymentName, Deployment>,
        now: Instant,
    ) -> BTreeMap<Class, Demand> {
        let mut classes: BTreeMap<Class, Demand> = BTreeMap::new();
        for (gateway, held) in &self.demand {
            let Some(at) = self.catalogue.index_of(&gateway.place) else { continue };
            for ((class, origin), tokens) in &held.classes {
                let Some(origin) = self.catalogue.index_of(origin) else { continue };
                let demand = match classes.get_mut(class) {
                    Some(demand) => demand,
                    None => {
                        let Some(deployment) = deployments.get(&class.deployment) else { continue };
                        let policy = class.residency.narrow(&deployment.residency);
                        let placed = deployment.placement(&self.catalogue);
                        let allowed = policy.permitted(&self.catalogue).intersect(placed);
                        let empty = Demand { allowed, peak: 0, by_source: BTreeMap::new() };
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
            let now_asked = demand.by_source.values().fold(0u64, |sum, tokens| sum.saturating_add(*tokens));
            demand.peak = self.peaks.entry(class.clone()).or_default().saw(now_asked, now);
        }
        classes
    }
}

#[cfg(test)]
mod tests;
