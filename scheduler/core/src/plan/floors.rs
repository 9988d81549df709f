//! Minimum numbers of replicas per region, so that the loss of one region does not overload the others.
//!
//! For each class, its largest region is assumed to be lost. The replicas in its other regions must then suffice for
//! the recent demand peak. These floors limit autoscaling, which by itself keeps only the replicas needed now. The
//! choice of regions is a matter of cost: with `k` regions that share evenly, `k / (k - 1)` times the demand must be
//! provisioned, so few regions cost more because of the redundancy, and many cost more because the cheap regions come
//! first. All `k` are tried, cheapest regions first, and the lowest total cost wins; of equally cheap ones the wider
//! spread.
//!
//! A deployment with an order of regions (active-passive) sends all of its requests to one region, so an even spread would
//! leave too few replicas in the next one. There the first regions of the order can each serve the whole peak, as many as are
//! needed to survive the loss of one: two, unless their limits are too low.
//!
//! Classes with few allowed regions come first. Their floors count for the classes with more regions, which must also
//! cover the demand of the narrower classes in the same regions. A class with too few regions, or with too low replica
//! limits, is reported as uncovered: no plan can change that.

use std::collections::{BTreeMap, BTreeSet};

use super::{DeploymentCapacity, PlanInput, Row, Source, TrafficClass};
use regions::weights::WHOLE_PERMILLE;
use regions::{DeploymentName, RegionIndex, RegionSet};

/// Maximum number of regions over which a floor is spread: beyond eight, one more region saves less than 2 %.
const MAX_SPREAD: usize = 8;

/// Minimum numbers of replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Floors {
    /// Floors by deployment and region; absent where there is none.
    pub replicas: BTreeMap<DeploymentName, BTreeMap<RegionIndex, Floor>>,
    /// Classes that cannot survive the loss of their largest region, even with all replicas that are allowed.
    pub uncovered_classes: BTreeSet<TrafficClass>,
}

/// Floor of one deployment in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floor {
    /// Minimum number of replicas.
    pub replicas: u32,
}

/// Region that could hold replicas of a deployment.
#[derive(Clone, Copy)]
struct FloorCandidate {
    region: RegionIndex,
    tokens_per_replica: u64,
    max: u32,
    /// Floor that narrower classes already require there.
    floor: u32,
    cost: u64,
    /// Demand that the plan sends there, in tokens per second. Of equally cheap regions, the one with more demand is
    /// preferred.
    load: u64,
}

impl FloorCandidate {
    /// Returns the replicas for `tokens` a second, within its limit, and at least its floor.
    fn count(&self, tokens: u64) -> u32 {
        let needed = u32::try_from(tokens.div_ceil(self.tokens_per_replica)).unwrap_or(u32::MAX);
        needed.min(self.max).max(self.floor)
    }

    /// Returns the tokens a second of this number of replicas.
    fn holds(&self, replicas: u32) -> u64 {
        self.tokens_per_replica.saturating_mul(u64::from(replicas))
    }
}

/// Returns the floors for the demand peaks of `input`. `rows` is the current distribution of the demand.
pub(super) fn floors(input: &PlanInput, rows: &BTreeMap<TrafficClass, BTreeMap<Source, Row>>) -> Floors {
    let mut floors = Floors::default();
    // A region without a price counts as the most expensive one.
    let highest_cost = input.cost.values().copied().max().unwrap_or(1);
    for (name, deployments) in &input.deployments {
        let of_this =
            TrafficClass { deployment: name.clone(), residency: regions::ResidencyPolicy::Anywhere };
        let mut classes: Vec<_> = input
            .demand
            .range(of_this..)
            .take_while(|(class, _)| class.deployment == *name)
            .filter(|(_, demand)| demand.peak > 0)
            .map(|(class, demand)| (eligible_regions(input, deployments, demand.allowed), demand, class))
            .collect();
        if classes.is_empty() {
            continue;
        }
        classes.sort_by_key(|(allowed, _, class)| (allowed.len(), *class));
        let loads = loads(input, rows, name);
        let mut floors_so_far: BTreeMap<RegionIndex, Floor> = BTreeMap::new();
        for (allowed, demand, class) in &classes {
            let within = classes.iter().filter(|(other, _, _)| other.is_subset(allowed));
            let peak = within.fold(0u64, |sum, (_, demand, _)| sum.saturating_add(demand.peak));
            let sites = allowed.iter().map(|region| {
                let DeploymentCapacity { tokens_per_replica, max, .. } = deployments[&region];
                let cost = input.cost.get(&region).copied().unwrap_or(highest_cost);
                let (floor, load) =
                    (floors_so_far.get(&region).map_or(0, |floor| floor.replicas), loads.get(&region));
                FloorCandidate {
                    region,
                    tokens_per_replica,
                    max,
                    floor,
                    cost,
                    load: load.copied().unwrap_or(0),
                }
            });
            let found = match demand.order.as_slice() {
                [] => cheapest_spread(sites.collect(), peak),
                order => standby_spread(sites.collect(), order, peak),
            };
            match found {
                Some(found) => floors_so_far.extend(found),
                None => drop(floors.uncovered_classes.insert((*class).clone())),
            }
        }
        floors_so_far.retain(|_, floor| floor.replicas > 0);
        if !floors_so_far.is_empty() {
            floors.replicas.insert(name.clone(), floors_so_far);
        }
    }
    floors
}

/// Returns the allowed regions that can run replicas and are not draining.
fn eligible_regions(
    input: &PlanInput,
    deployments: &BTreeMap<RegionIndex, DeploymentCapacity>,
    allowed: RegionSet,
) -> RegionSet {
    let capable =
        deployments.iter().filter(|(_, capacity)| capacity.max > 0 && capacity.tokens_per_replica > 0);
    let capable: RegionSet = capable.map(|(region, _)| *region).collect();
    capable.intersect(allowed).minus(input.draining)
}

/// Returns the demand that the plan sends to each region for a deployment, in tokens per second.
fn loads(
    input: &PlanInput,
    rows: &BTreeMap<TrafficClass, BTreeMap<Source, Row>>,
    name: &DeploymentName,
) -> BTreeMap<RegionIndex, u64> {
    let mut loads = BTreeMap::new();
    let first = TrafficClass { deployment: name.clone(), residency: regions::ResidencyPolicy::Anywhere };
    for (class, sources) in rows.range(first..).take_while(|(class, _)| class.deployment == *name) {
        let Some(demand) = input.demand.get(class) else { continue };
        for (source, row) in sources {
            let demanded = demand.by_source.get(source).copied().unwrap_or(0);
            for share in row {
                let part = u128::from(demanded) * u128::from(share.permille) / u128::from(WHOLE_PERMILLE);
                let load = loads.entry(share.region).or_insert(0u64);
                *load = load.saturating_add(u64::try_from(part).unwrap_or(u64::MAX));
            }
        }
    }
    loads
}

/// Returns the cheapest floors with which the remaining sites serve `demand` after the loss of any one of them, if
/// there are any.
fn cheapest_spread(mut sites: Vec<FloorCandidate>, demand: u64) -> Option<BTreeMap<RegionIndex, Floor>> {
    // Compares the cost per token, without a division.
    sites.sort_by(|a, b| {
        let cost_per_token = |this: &FloorCandidate, other: &FloorCandidate| {
            u128::from(this.cost) * u128::from(other.tokens_per_replica)
        };
        cost_per_token(a, b)
            .cmp(&cost_per_token(b, a))
            .then(b.load.cmp(&a.load))
            .then(a.region.cmp(&b.region))
    });
    let most = MAX_SPREAD.max(sites_needed(&sites, demand));
    // Sites beyond the maximum spread count only with the floors that they already have.
    let mut at = 0;
    sites.retain(|site| {
        at += 1;
        at <= most || site.floor > 0
    });
    let mut best: Option<(u128, Vec<u32>)> = None;
    for over in 2..=sites.len().min(most) {
        let Some(counts) = even_counts(&sites, over, demand) else { continue };
        let cost = sites.iter().zip(&counts).map(|(site, count)| u128::from(site.cost) * u128::from(*count));
        let cost: u128 = cost.sum();
        if best.as_ref().is_none_or(|(cheapest, _)| cost <= *cheapest) {
            best = Some((cost, counts));
        }
    }
    let (_, counts) = best?;
    Some(sites.iter().zip(counts).map(|(site, count)| (site.region, Floor { replicas: count })).collect())
}

/// Returns the floors with which the first sites of an order can each serve `demand`, as many of them as are needed to serve it
/// after the loss of any one, if that is possible.
fn standby_spread(
    mut sites: Vec<FloorCandidate>,
    order: &[RegionIndex],
    demand: u64,
) -> Option<BTreeMap<RegionIndex, Floor>> {
    let index = |site: &FloorCandidate| order.iter().position(|ordered| *ordered == site.region);
    sites.sort_by_key(|site| (index(site).unwrap_or(order.len()), site.region));
    (2..=sites.len()).find_map(|over| {
        let count =
            |(at, site): (usize, &FloorCandidate)| if at < over { site.count(demand) } else { site.floor };
        let counts: Vec<u32> = sites.iter().enumerate().map(count).collect();
        let each = || sites.iter().zip(&counts);
        survives_loss(each().map(|(site, count)| site.holds(*count)), demand)
            .then(|| each().map(|(site, count)| (site.region, Floor { replicas: *count })).collect())
    })
}

/// Returns whether sites that hold this much each serve `demand` after the loss of the largest.
fn survives_loss(sites: impl Iterator<Item = u64>, demand: u64) -> bool {
    let (mut sum, mut largest) = (0u64, 0u64);
    for holds in sites {
        sum = sum.saturating_add(holds);
        largest = largest.max(holds);
    }
    sum - largest >= demand
}

/// Returns how many sites, in this order and at their maximum size, survive the loss of one; all of them if none do.
fn sites_needed(sites: &[FloorCandidate], demand: u64) -> usize {
    let (mut sum, mut largest) = (0u64, 0u64);
    for (at, site) in sites.iter().enumerate() {
        let most = site.tokens_per_replica.saturating_mul(u64::from(site.max));
        sum = sum.saturating_add(most);
        largest = largest.max(most);
        if sum - largest >= demand {
            return at + 1;
        }
    }
    sites.len()
}

/// Returns the counts of all sites if the first `over` share evenly; `None` if they do not survive a loss.
fn even_counts(sites: &[FloorCandidate], over: usize, demand: u64) -> Option<Vec<u32>> {
    let count = |at: usize, level: u64| if at < over { sites[at].count(level) } else { sites[at].floor };
    let survives_loss = |level: u64| {
        survives_loss(sites.iter().enumerate().map(|(at, site)| site.holds(count(at, level))), demand)
    };
    // A level equal to the total demand suffices if any level does. Without existing floors and limits, the demand
    // divided by all but one site suffices, or a replica less.
    let (mut low, mut high) = (0, demand);
    let even = demand.div_ceil(over as u64 - 1);
    if survives_loss(even) {
        high = even;
    } else if survives_loss(high) {
        low = even + 1;
    } else {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if survives_loss(middle) { high = middle } else { low = middle + 1 }
    }
    Some((0..sites.len()).map(|at| count(at, low)).collect())
}
