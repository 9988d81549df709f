//! How many replicas there should be, and where, so that the loss of a region is not the loss of anything else.
//!
//! For each class the largest of its regions is taken to be lost. What the others hold must then be enough for the most
//! that was asked for lately; that is the floor under autoscaling, which by itself keeps what is needed now and would let
//! the rest go. Which regions hold it is a matter of cost: over `k` regions that share evenly, `k / (k - 1)` times the
//! demand has to be held, so few regions are dear because of what must be held twice, and many because the cheap ones come
//! first. All `k` are tried, cheapest regions first, and the cheapest sum is taken; of equally cheap ones the one that is
//! spread further.
//!
//! Narrow classes come first and what is held for them counts for the wider ones, which also have to bear what the narrow
//! ones ask for in the same regions. A class for which there are not enough regions, or not enough replicas may be
//! started, is named: nothing that a plan does can help it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Class, Place, Problem, Row, Source};
use regions::weights::WHOLE_PERMILLE;
use regions::{DeploymentName, RegionIndex, RegionSet};

/// Over more regions than this a floor is not spread: beyond eight, one more saves less than a fiftieth.
const SPREAD_MAX: usize = 8;

/// How many replicas there should be at least.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Floors {
    /// By deployment and region; where none is named, none.
    pub replicas: BTreeMap<DeploymentName, BTreeMap<RegionIndex, Floor>>,
    /// Classes that could not bear the loss of their largest region, however many replicas were started.
    pub short: BTreeSet<Class>,
}

/// One deployment's floor in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floor {
    /// Never fewer.
    pub replicas: u32,
}

/// One region that could hold something.
#[derive(Clone, Copy)]
struct Holder {
    region: RegionIndex,
    each: u64,
    max: u32,
    /// What is held there already.
    held: u32,
    cost: u64,
    /// What the plan sends there, in tokens per second: of equally dear regions the nearer to the demand is better.
    load: u64,
}

/// The floors for the peaks of `problem`, given where the plan sends what is asked for now.
pub(super) fn floors(problem: &Problem, rows: &BTreeMap<Class, BTreeMap<Source, Row>>) -> Floors {
    let mut floors = Floors::default();
    // A region without a price is as dear as the dearest: what is not known is no bargain.
    let dearest = problem.cost.values().copied().max().unwrap_or(1);
    for (name, places) in &problem.places {
        let of_this = Class { deployment: name.clone(), residency: regions::ResidencyPolicy::Anywhere };
        let mut classes: Vec<_> = problem
            .demand
            .range(of_this..)
            .take_while(|(class, _)| class.deployment == *name)
            .map(|(class, demand)| (could_hold(problem, places, demand.allowed), demand.peak, class))
            .filter(|(_, peak, _)| *peak > 0)
            .collect();
        if classes.is_empty() {
            continue;
        }
        classes.sort_by_key(|(allowed, _, class)| (allowed.len(), *class));
        let loads = loads(problem, rows, name);
        let mut held: BTreeMap<RegionIndex, Floor> = BTreeMap::new();
        for (allowed, _, class) in &classes {
            let within = classes.iter().filter(|(other, _, _)| other.is_subset(allowed));
            let demand = within.fold(0u64, |sum, (_, peak, _)| sum.saturating_add(*peak));
            let holders = allowed.iter().map(|region| {
                let Place { each, max, .. } = places[&region];
                let cost = problem.cost.get(&region).copied().unwrap_or(dearest);
                let (held, load) = (held.get(&region).map_or(0, |floor| floor.replicas), loads.get(&region));
                Holder { region, each, max, held, cost, load: load.copied().unwrap_or(0) }
            });
            match spread(holders.collect(), demand) {
                Some(found) => held.extend(found),
                None => drop(floors.short.insert((*class).clone())),
            }
        }
        held.retain(|_, floor| floor.replicas > 0);
        if !held.is_empty() {
            floors.replicas.insert(name.clone(), held);
        }
    }
    floors
}

/// The regions of these in which a replica could stand: not in one that is emptied.
fn could_hold(problem: &Problem, places: &BTreeMap<RegionIndex, Place>, allowed: RegionSet) -> RegionSet {
    let could = places.iter().filter(|(_, place)| place.max > 0 && place.each > 0);
    let could: RegionSet = could.map(|(region, _)| *region).collect();
    could.intersect(allowed).minus(problem.draining)
}

/// What the plan sends to each region for a deployment, in tokens per second.
fn loads(
    problem: &Problem,
    rows: &BTreeMap<Class, BTreeMap<Source, Row>>,
    name: &DeploymentName,
) -> BTreeMap<RegionIndex, u64> {
    let mut loads = BTreeMap::new();
    let first = Class { deployment: name.clone(), residency: regions::ResidencyPolicy::Anywhere };
    for (class, sources) in rows.range(first..).take_while(|(class, _)| class.deployment == *name) {
        let Some(demand) = problem.demand.get(class) else { continue };
        for (source, row) in sources {
            let asked = demand.by_source.get(source).copied().unwrap_or(0);
            for share in row {
                let part = u128::from(asked) * u128::from(share.permille) / u128::from(WHOLE_PERMILLE);
                let load = loads.entry(share.region).or_insert(0u64);
                *load = load.saturating_add(u64::try_from(part).unwrap_or(u64::MAX));
            }
        }
    }
    loads
}

/// The cheapest floors under which what is left bears `demand` whichever of these regions is lost; nothing if none do.
fn spread(mut holders: Vec<Holder>, demand: u64) -> Option<BTreeMap<RegionIndex, Floor>> {
    // The cost of a token, without dividing.
    holders.sort_by(|a, b| {
        let dear = |this: &Holder, other: &Holder| u128::from(this.cost) * u128::from(other.each);
        dear(a, b).cmp(&dear(b, a)).then(b.load.cmp(&a.load)).then(a.region.cmp(&b.region))
    });
    let most = SPREAD_MAX.max(first_enough(&holders, demand));
    // Those behind count only with what they hold already.
    let mut at = 0;
    holders.retain(|holder| {
        at += 1;
        at <= most || holder.held > 0
    });
    let mut best: Option<(u128, Vec<u32>)> = None;
    for over in 2..=holders.len().min(most) {
        let Some(counts) = evenly(&holders, over, demand) else { continue };
        let cost =
            holders.iter().zip(&counts).map(|(holder, count)| u128::from(holder.cost) * u128::from(*count));
        let cost: u128 = cost.sum();
        if best.as_ref().is_none_or(|(cheapest, _)| cost <= *cheapest) {
            best = Some((cost, counts));
        }
    }
    let (_, counts) = best?;
    Some(
        holders
            .iter()
            .zip(counts)
            .map(|(holder, count)| (holder.region, Floor { replicas: count }))
            .collect(),
    )
}

/// How many of these, in this order, can bear it at all when each has all that it may have; all of them, if none can.
fn first_enough(holders: &[Holder], demand: u64) -> usize {
    let (mut sum, mut largest) = (0u64, 0u64);
    for (at, holder) in holders.iter().enumerate() {
        let most = holder.each.saturating_mul(u64::from(holder.max));
        sum = sum.saturating_add(most);
        largest = largest.max(most);
        if sum - largest >= demand {
            return at + 1;
        }
    }
    holders.len()
}

/// The counts of all with the first `over` sharing evenly; nothing if that does not bear it.
fn evenly(holders: &[Holder], over: usize, demand: u64) -> Option<Vec<u32>> {
    let count = |at: usize, level: u64| {
        let Holder { each, max, held, .. } = holders[at];
        let needed = u32::try_from(level.div_ceil(each)).unwrap_or(u32::MAX);
        if at < over { needed.min(max).max(held) } else { held }
    };
    let bears = |level: u64| {
        let (mut sum, mut largest) = (0u64, 0u64);
        for (at, holder) in holders.iter().enumerate() {
            let holds = holder.each.saturating_mul(u64::from(count(at, level)));
            sum = sum.saturating_add(holds);
            largest = largest.max(holds);
        }
        sum - largest >= demand
    };
    // As much in each as is asked for in all is enough, if anything is. Where nothing is held and nobody is bounded, what
    // is asked for divided over all but one is, or a replica less.
    let (mut low, mut high) = (0, demand);
    let even = demand.div_ceil(over as u64 - 1);
    if bears(even) {
        high = even;
    } else if bears(high) {
        low = even + 1;
    } else {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if bears(middle) { high = middle } else { low = middle + 1 }
    }
    Some((0..holders.len()).map(|at| count(at, low)).collect())
}
