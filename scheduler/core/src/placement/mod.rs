//! Placement: the regions in which a deployment runs, chosen from the requirement that it states.
//!
//! ```text
//!  candidates ──▶ filter ──────────▶ solve ───────────────────▶ decision
//!  regions with   residency, engine, cheapest set with enough    chosen regions, their cost,
//!  a spoke        accelerators,      regions and enough          and a verdict with the reason
//!                 price              capacity after a loss       for every candidate
//! ```
//!
//! A set of regions is *feasible* if
//!
//! 1. the deployment's residency permits each of its regions, which has the engine, a spoke that can run the deployment,
//!    and enough accelerators of one of the stated types for the minimum number of replicas;
//! 2. it has at least `min_regions` regions, so that `min_regions - 1` are left after the loss of any of them;
//! 3. without its largest region, the others can hold `min_replicas` replicas. A region can hold as many as `scaling.max`
//!    and the number of its accelerators permit, and never fewer than the minimum;
//! 4. it costs at most `max_cost` per hour. The cost is that of the minimum number of replicas in each region: the highest
//!    `min` of the week, at least one. Replicas that autoscaling adds cost more; `scaling.max` limits them.
//!
//! The hub chooses the cheapest feasible set. A region without a price counts as more expensive than any number of regions
//! with one, and is not chosen where `max_cost` is stated, because the limit could not be kept. Of equally cheap sets, the
//! one with fewer regions, then the one with fewer new regions, then the one with the first names is chosen.
//!
//! **Hysteresis.** A region of the current set counts with [`KEPT_PRICE_PERCENT`] of its price. So regions are replaced only
//! by others that together are cheaper by more than the difference, and prices that fluctuate below it move nothing. A
//! region that became infeasible is replaced at once, and the others stay.
//!
//! **Dwell time.** After a move, a deployment stays in its regions for [`MIN_DWELL`], as long as they are a feasible set. A region
//! that is lost, or that residency no longer permits, is replaced at once, and a changed deployment is placed anew.
//!
//! **No feasible set.** The current regions that residency permits stay, because a deployment that cost too much yesterday
//! still serves requests, and the decision names the constraint. A deployment without current regions is not served
//! until a set is feasible.
//!
//! The choice is exact for any number of regions, by dynamic programming: at most regions × `min_regions` ×
//! (`min_replicas` + 1) steps, of which the file limits the product. It is repeated only when its input changes
//! ([`Placements`]), and a budget limits the decisions of one table. A greedy choice, cheapest capacity first, costs 7.5 % more on average and up to 2.75 times as
//! much in the 200 random fleets of the tests.

mod facts;
mod fleet;
mod offline;
mod placements;
mod reasons;
mod report;
mod solve;

pub use fleet::Fleet;
pub use offline::{
    RegisteredAccelerators, check_feasible, notes, parse_deployments, read_deployments,
    registered_accelerators,
};
pub use placements::{MIN_DWELL, Placements};
pub use reasons::{Infeasible, PlacementRejection};
pub use report::report;

use regions::{AcceleratorType, Accelerators, Offering, PlacementSpec, RegionIndex, RegionSet};

/// Percentage of its price with which a region of the current set counts: others must be cheaper by more than 10 %. List
/// prices change by less than that only with currencies, and spot prices change by more.
pub const KEPT_PRICE_PERCENT: u64 = 90;

/// Region that may be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementCandidate<'a> {
    /// The region.
    pub region: RegionIndex,
    /// Whether the deployment's residency permits it.
    pub is_permitted: bool,
    /// Whether it has the deployment's engine.
    pub has_engine: bool,
    /// Ability of its spokes to run the deployment.
    pub spokes: SpokeState,
    /// Accelerators that it offers.
    pub accelerators: &'a Accelerators,
    /// Cost of a replica without an accelerator per hour, in millionths of the operator's currency unit.
    pub cost: Option<u64>,
}

/// Ability of a region's spokes to run a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpokeState {
    /// A spoke has a replica, or can start one.
    Available,
    /// The spokes have no replica and start none.
    StartsNone,
    /// The spokes are gone, and the region keeps its route for a while.
    Lapsed,
    /// An operator drains the region, or its last spoke stops.
    Draining,
    /// No spoke is registered.
    Unregistered,
}

/// Requirement of one deployment.
#[derive(Clone, Copy, Debug)]
pub struct Requirement<'a> {
    /// The stated requirement.
    pub placement: &'a PlacementSpec,
    /// Minimum number of replicas in each region, at least 1.
    pub min: u32,
    /// Maximum number of replicas in each region.
    pub max: u32,
}

/// Cost of replicas per hour. Field order is the preference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlacementCost {
    /// Number of regions whose price is unknown.
    pub unpriced: u32,
    /// Sum of the known costs, in millionths of the operator's currency unit.
    pub millionths: u64,
}

/// Region that fulfils the conditions that concern it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Eligible {
    /// The region.
    pub region: RegionIndex,
    /// Type of its accelerators that costs least; `None` if none is needed.
    pub accelerator: Option<AcceleratorType>,
    /// Cost of one replica per hour, in millionths.
    pub price: Option<u64>,
    /// Replicas that it can hold.
    pub capacity: u32,
}

/// Result for a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementVerdict {
    /// It is in the cheapest feasible set.
    Chosen(Eligible),
    /// It is in the current set, which stays because no set is feasible, or because the accelerators of a region are unknown while
    /// its spokes have lapsed.
    Kept,
    /// It could run the deployment, and a set without it is cheaper, or no set is feasible.
    NotNeeded(Eligible),
    /// It cannot run the deployment.
    Rejected(PlacementRejection),
}

/// Regions of a deployment, with the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementDecision {
    /// The regions.
    pub regions: RegionSet,
    /// Cost of the minimum numbers of replicas in these regions, if they were chosen.
    pub cost: Option<PlacementCost>,
    /// Why no set of regions is feasible, if none is.
    pub infeasible: Option<Infeasible>,
    /// Result for each candidate, in order of the regions' names.
    pub verdicts: Vec<(RegionIndex, PlacementVerdict)>,
}

/// Returns the regions of a deployment. `current` are those in which it runs now; `candidates` are in order of their names.
pub fn choose(
    candidates: &[PlacementCandidate<'_>],
    requirement: &Requirement<'_>,
    current: RegionSet,
) -> PlacementDecision {
    debug_assert!(candidates.is_sorted_by(|a, b| a.region < b.region), "each region is one candidate");
    let filtered = filter_all(candidates, requirement, current);
    let eligible = eligible(&filtered);
    let is_unpriced =
        |(_, filtered): &&FilteredCandidate<'_, '_>| matches!(filtered, Err(PlacementRejection::Price));
    let counts =
        CandidateCounts { all: candidates.len(), unpriced: filtered.iter().filter(is_unpriced).count() };
    let (regions, infeasible) = match cheapest_feasible(&eligible, counts, requirement, current) {
        Ok(regions) => (regions, None),
        Err(infeasible) => (kept(candidates, current), Some(infeasible)),
    };
    decided(&filtered, regions, infeasible, requirement)
}

/// Returns the decision to stay in `regions`, a part of `current`; `None` if they are not a feasible set.
fn stay(
    candidates: &[PlacementCandidate<'_>],
    requirement: &Requirement<'_>,
    current: RegionSet,
    regions: RegionSet,
) -> Option<PlacementDecision> {
    let filtered = filter_all(candidates, requirement, current);
    let eligible = eligible(&filtered);
    let capacities =
        || eligible.iter().filter(|it| regions.contains(it.region)).map(|it| u64::from(it.capacity));
    let PlacementSpec { min_regions, min_replicas, max_cost, .. } = *requirement.placement;
    let largest = capacities().max()?;
    let is_feasible = regions.is_subset(&current)
        && capacities().count() == regions.len()
        && regions.len() >= min_regions as usize
        && capacities().sum::<u64>() - largest >= u64::from(min_replicas)
        && max_cost.is_none_or(|max| cost_of(&eligible, regions, requirement).millionths <= max);
    is_feasible.then(|| decided(&filtered, regions, None, requirement))
}

/// Candidate with the result of its filter.
type FilteredCandidate<'a, 'b> = (&'a PlacementCandidate<'b>, Result<Eligible, PlacementRejection>);

fn filter_all<'a, 'b>(
    candidates: &'a [PlacementCandidate<'b>],
    requirement: &Requirement<'_>,
    current: RegionSet,
) -> Vec<FilteredCandidate<'a, 'b>> {
    let each = candidates.iter();
    let filtered =
        each.map(|candidate| (candidate, filter(candidate, requirement, current.contains(candidate.region))));
    filtered.collect()
}

fn eligible<'a>(filtered: &'a [FilteredCandidate<'_, '_>]) -> Vec<&'a Eligible> {
    filtered.iter().filter_map(|(_, filtered)| filtered.as_ref().ok()).collect()
}

/// Returns the decision for these regions, with the result for each candidate.
fn decided(
    filtered: &[FilteredCandidate<'_, '_>],
    regions: RegionSet,
    infeasible: Option<Infeasible>,
    requirement: &Requirement<'_>,
) -> PlacementDecision {
    let cost = infeasible.is_none().then(|| cost_of(&eligible(filtered), regions, requirement));
    let verdicts = filtered.iter().map(|(candidate, filtered)| {
        let is_listed = regions.contains(candidate.region);
        let verdict = match filtered {
            _ if is_listed && infeasible.is_some() => PlacementVerdict::Kept,
            Ok(eligible) if is_listed => PlacementVerdict::Chosen(eligible.clone()),
            Ok(eligible) => PlacementVerdict::NotNeeded(eligible.clone()),
            Err(rejection) => PlacementVerdict::Rejected(rejection.clone()),
        };
        (candidate.region, verdict)
    });
    PlacementDecision { regions, cost, verdicts: verdicts.collect(), infeasible }
}

/// Checks the conditions that concern a region alone. A region of the current set may be drained, or without a spoke for
/// a moment: both end, and a move would not.
fn filter(
    candidate: &PlacementCandidate<'_>,
    requirement: &Requirement<'_>,
    is_current: bool,
) -> Result<Eligible, PlacementRejection> {
    let Requirement { placement, min, max } = *requirement;
    if !candidate.is_permitted {
        return Err(PlacementRejection::Residency);
    }
    match candidate.spokes {
        SpokeState::Available => {}
        SpokeState::Unregistered => return Err(PlacementRejection::Unregistered),
        SpokeState::StartsNone | SpokeState::Lapsed | SpokeState::Draining if is_current => {}
        SpokeState::StartsNone => return Err(PlacementRejection::StartsNone),
        SpokeState::Lapsed => return Err(PlacementRejection::Lapsed),
        SpokeState::Draining => return Err(PlacementRejection::Draining),
    }
    if !candidate.has_engine {
        return Err(PlacementRejection::Engine);
    }
    let (accelerator, Offering { count, price }) = match placement.accelerators.is_empty() {
        true => (None, Offering { count: None, price: candidate.cost }),
        false => {
            let (accelerator, offering) = cheapest_offering(candidate.accelerators, placement, min)?;
            (Some(accelerator), offering)
        }
    };
    if placement.max_cost.is_some() && price.is_none() {
        return Err(PlacementRejection::Price);
    }
    // A maximum below the minimum is rejected with the deployment's file.
    let capacity = count.unwrap_or(u32::MAX).min(max).max(min);
    Ok(Eligible { region: candidate.region, accelerator, price, capacity })
}

/// Returns the stated accelerator that costs least, of those that suffice for `min` replicas; one without a price after
/// all others, and of equal ones the one stated first.
fn cheapest_offering(
    offered: &Accelerators,
    placement: &PlacementSpec,
    min: u32,
) -> Result<(AcceleratorType, Offering), PlacementRejection> {
    let stated =
        || placement.accelerators.iter().filter_map(|kind| Some((kind.clone(), *offered.get(kind)?)));
    let suffices = |offering: &Offering| offering.count.is_none_or(|count| count >= min);
    let price = |(_, offering): &(AcceleratorType, Offering)| (offering.price.is_none(), offering.price);
    if let Some(found) = stated().filter(|(_, offering)| suffices(offering)).min_by_key(price) {
        return Ok(found);
    }
    let most = stated().max_by_key(|(_, offering)| offering.count);
    Err(most.map_or(PlacementRejection::Accelerator, |(accelerator, offering)| {
        PlacementRejection::AcceleratorCount { accelerator, count: offering.count.unwrap_or(0), min }
    }))
}

/// Numbers of candidates.
#[derive(Clone, Copy)]
struct CandidateCounts {
    all: usize,
    /// Those that only the missing price excludes.
    unpriced: usize,
}

/// Returns the cheapest feasible set, or the constraint that no set meets.
fn cheapest_feasible(
    eligible: &[&Eligible],
    CandidateCounts { all: candidates, unpriced }: CandidateCounts,
    requirement: &Requirement<'_>,
    current: RegionSet,
) -> Result<RegionSet, Infeasible> {
    let PlacementSpec { min_regions, min_replicas, max_cost, .. } = *requirement.placement;
    if eligible.len() < min_regions as usize {
        if unpriced > 0 && eligible.len() + unpriced >= min_regions as usize {
            return Err(Infeasible::Prices { eligible: eligible.len(), unpriced, min_regions });
        }
        return Err(Infeasible::Regions { eligible: eligible.len(), candidates, min_regions });
    }
    let solve = |kept_percent: u64| {
        let priced = eligible.iter().map(|region| {
            let is_current = current.contains(region.region);
            let percent = if is_current { kept_percent } else { 100 };
            let PlacementCost { unpriced, millionths } = region_cost(region, requirement);
            // In percent of a millionth: rounded costs could prefer another set each time.
            let cost = PlacementCost { unpriced, millionths: millionths.saturating_mul(percent) };
            solve::Priced { region: region.region, capacity: region.capacity, cost, is_current }
        });
        solve::cheapest(priced.collect(), min_regions, min_replicas)
    };
    let Some(stable) = solve(KEPT_PRICE_PERCENT) else {
        let largest = eligible.iter().map(|region| u64::from(region.capacity)).max().unwrap_or(0);
        let all: u64 = eligible.iter().map(|region| u64::from(region.capacity)).sum();
        return Err(Infeasible::Replicas { after_loss: all - largest, min_replicas });
    };
    let Some(max_cost) = max_cost else { return Ok(stable) };
    let fits = |regions: RegionSet| cost_of(eligible, regions, requirement).millionths <= max_cost;
    if fits(stable) {
        return Ok(stable);
    }
    // The hysteresis may cost up to the difference that it bridges; the limit comes first.
    let Some(cheapest) = solve(100) else { return Ok(stable) };
    let cost = cost_of(eligible, cheapest, requirement).millionths;
    if fits(cheapest) { Ok(cheapest) } else { Err(Infeasible::Cost { cheapest: cost, max_cost }) }
}

/// Returns the cost of the minimum number of replicas in a region.
fn region_cost(region: &Eligible, requirement: &Requirement<'_>) -> PlacementCost {
    match region.price {
        Some(price) => {
            PlacementCost { unpriced: 0, millionths: price.saturating_mul(u64::from(requirement.min)) }
        }
        None => PlacementCost { unpriced: 1, millionths: 0 },
    }
}

/// Returns the cost of the minimum numbers of replicas in these regions.
fn cost_of(eligible: &[&Eligible], regions: RegionSet, requirement: &Requirement<'_>) -> PlacementCost {
    let within = eligible.iter().filter(|region| regions.contains(region.region));
    within.map(|region| region_cost(region, requirement)).fold(PlacementCost::default(), PlacementCost::plus)
}

/// Returns the current regions that stay while no set is feasible: those that residency permits.
fn kept(candidates: &[PlacementCandidate<'_>], current: RegionSet) -> RegionSet {
    let permitted = candidates.iter().filter(|candidate| candidate.is_permitted);
    current.intersect(permitted.map(|candidate| candidate.region).collect())
}

impl PlacementCost {
    fn plus(self, other: PlacementCost) -> PlacementCost {
        PlacementCost {
            unpriced: self.unpriced + other.unpriced,
            millionths: self.millionths.saturating_add(other.millionths),
        }
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
