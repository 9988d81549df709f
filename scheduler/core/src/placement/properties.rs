//! Placement against an exhaustive search over all sets of regions, and as properties of random fleets.

use std::collections::BTreeMap;

use super::*;
use proptest::prelude::*;

/// Region of a random fleet.
#[derive(Clone, Debug)]
struct TestRegion {
    is_permitted: bool,
    spokes: SpokeState,
    offered: Accelerators,
}

fn gpu(count: Option<u32>, price: Option<u64>) -> Accelerators {
    BTreeMap::from([("l4".parse().unwrap(), Offering { count, price })])
}

fn at(ordinal: usize) -> RegionIndex {
    RegionIndex::new(ordinal).unwrap()
}

fn candidates(fleet: &[TestRegion]) -> Vec<PlacementCandidate<'_>> {
    let each = fleet.iter().enumerate().map(|(ordinal, region)| PlacementCandidate {
        region: at(ordinal),
        is_permitted: region.is_permitted,
        has_engine: true,
        spokes: region.spokes,
        accelerators: &region.offered,
        cost: None,
    });
    each.collect()
}

fn placement(min_regions: u32, min_replicas: u32, max_cost: Option<u64>) -> PlacementSpec {
    PlacementSpec { accelerators: vec!["l4".parse().unwrap()], min_regions, min_replicas, max_cost }
}

fn eligible(decision: &PlacementDecision) -> Vec<&Eligible> {
    let each = decision.verdicts.iter().filter_map(|(_, verdict)| match verdict {
        PlacementVerdict::Chosen(eligible) | PlacementVerdict::NotNeeded(eligible) => Some(eligible),
        PlacementVerdict::Kept | PlacementVerdict::Rejected(_) => None,
    });
    each.collect()
}

/// Returns whether a set has enough regions and enough capacity without any one of them.
fn survives(set: &[&Eligible], requirement: &Requirement<'_>) -> bool {
    let PlacementSpec { min_regions, min_replicas, .. } = *requirement.placement;
    let holds = |lost: usize| {
        let rest = set.iter().enumerate().filter(|(index, _)| *index != lost);
        rest.map(|(_, region)| u64::from(region.capacity)).sum::<u64>() >= u64::from(min_replicas)
    };
    !set.is_empty() && set.len() >= min_regions as usize && (0..set.len()).all(holds)
}

/// Returns the cost of the cheapest feasible set of these regions, found by trying all sets.
fn exhaustive(regions: &[&Eligible], requirement: &Requirement<'_>) -> Option<PlacementCost> {
    assert!(regions.len() <= 12, "4096 sets at most");
    let sets = (1u32..1 << regions.len()).map(|mask| {
        let within = regions.iter().enumerate().filter(|(bit, _)| mask & (1 << bit) != 0);
        within.map(|(_, region)| *region).collect::<Vec<_>>()
    });
    let feasible = sets.filter(|set| survives(set, requirement)).map(|set| {
        set.iter()
            .map(|region| region_cost(region, requirement))
            .fold(PlacementCost::default(), PlacementCost::plus)
    });
    let max_cost = requirement.placement.max_cost;
    feasible.filter(|cost| max_cost.is_none_or(|max| cost.millionths <= max)).min()
}

/// Returns the cost of a greedy choice: the region that costs least per replica it can hold, until the set is feasible, then
/// without those that are not needed.
fn greedy(regions: &[&Eligible], requirement: &Requirement<'_>) -> Option<PlacementCost> {
    let mut order = regions.to_vec();
    order.sort_by_key(|region| {
        let cost = region_cost(region, requirement);
        (cost.unpriced, cost.millionths / u64::from(region.capacity), region.region)
    });
    let mut set: Vec<&Eligible> = Vec::new();
    for region in order {
        if !survives(&set, requirement) {
            set.push(region);
        }
    }
    if !survives(&set, requirement) {
        return None;
    }
    for region in set.clone().into_iter().rev() {
        let rest: Vec<_> = set.iter().copied().filter(|other| other.region != region.region).collect();
        if survives(&rest, requirement) {
            set = rest;
        }
    }
    Some(
        set.iter()
            .map(|region| region_cost(region, requirement))
            .fold(PlacementCost::default(), PlacementCost::plus),
    )
}

/// Pseudo-random numbers: splitmix64.
struct FleetRandom(u64);

impl FleetRandom {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

/// Number of random fleets.
const FLEETS: u64 = 200;
/// Maximum ratio of the cost of the chosen set to that of the cheapest one: the choice is exact.
const COST_RATIO_MAX: f64 = 1.0;

#[test]
fn in_200_random_fleets_the_chosen_set_costs_as_much_as_the_cheapest_of_all_sets() {
    let (mut ratios, mut greedy_ratios, mut infeasible) = (Vec::new(), Vec::new(), 0);
    for seed in 0..FLEETS {
        let mut random = FleetRandom(seed);
        let fleet: Vec<TestRegion> = (0..3 + random.below(10))
            .map(|_| TestRegion {
                is_permitted: random.below(8) > 0,
                spokes: SpokeState::Available,
                offered: gpu(
                    (random.below(4) > 0).then(|| 1 + random.below(12) as u32),
                    (random.below(10) > 0).then(|| 200_000 + random.below(5_000_000)),
                ),
            })
            .collect();
        let max_cost = (random.below(3) == 0).then(|| 1_000_000 + random.below(20_000_000));
        let placement = placement(1 + random.below(4) as u32, random.below(20) as u32, max_cost);
        let requirement = Requirement {
            placement: &placement,
            min: 1 + random.below(2) as u32,
            max: 4 + random.below(12) as u32,
        };
        let decision = choose(&candidates(&fleet), &requirement, RegionSet::EMPTY);
        let all: Vec<Eligible> = fleet
            .iter()
            .zip(candidates(&fleet))
            .filter_map(|(_, candidate)| filter(&candidate, &requirement, false).ok())
            .collect();
        let all: Vec<&Eligible> = all.iter().collect();
        let best = exhaustive(&all, &requirement);
        assert_eq!(decision.cost.is_some(), best.is_some(), "seed {seed}: {:?}", decision.infeasible);
        let Some((cost, best)) = decision.cost.zip(best) else {
            infeasible += 1;
            continue;
        };
        assert_eq!(cost.unpriced, best.unpriced, "seed {seed}");
        let ratio = |cost: PlacementCost| cost.millionths as f64 / best.millionths.max(1) as f64;
        ratios.push(ratio(cost));
        greedy_ratios
            .extend(greedy(&all, &requirement).filter(|found| found.unpriced == best.unpriced).map(ratio));
    }
    let summary = |ratios: &[f64]| {
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        (mean, ratios.iter().copied().fold(0.0, f64::max))
    };
    let ((mean, max), (greedy_mean, greedy_max)) = (summary(&ratios), summary(&greedy_ratios));
    println!(
        "{} feasible fleets, {infeasible} infeasible: cost ratio mean {mean:.4}, max {max:.4}; greedy mean {greedy_mean:.3}, max {greedy_max:.3}",
        ratios.len()
    );
    assert!(max <= COST_RATIO_MAX && mean <= COST_RATIO_MAX, "mean {mean}, max {max}");
    assert!(
        ratios.len() >= 100 && infeasible >= 10,
        "both kinds of fleets: {} and {infeasible}",
        ratios.len()
    );
}

fn region() -> impl Strategy<Value = TestRegion> {
    let spokes = prop_oneof![
        6 => Just(SpokeState::Available),
        1 => Just(SpokeState::StartsNone),
        1 => Just(SpokeState::Lapsed),
        1 => Just(SpokeState::Draining),
        1 => Just(SpokeState::Unregistered),
    ];
    let (count, price) =
        (proptest::option::of(1u32..9), proptest::option::of(prop_oneof![1u64..50, 10_000u64..5_000_000]));
    (proptest::bool::weighted(0.8), spokes, count, price).prop_map(|(is_permitted, spokes, count, price)| {
        TestRegion { is_permitted, spokes, offered: gpu(count, price) }
    })
}

fn fleet() -> impl Strategy<Value = Vec<TestRegion>> {
    proptest::collection::vec(region(), 0..40)
}

fn any_placement() -> impl Strategy<Value = PlacementSpec> {
    (1u32..5, 0u32..20, proptest::option::of(0u64..20_000_000))
        .prop_map(|(min_regions, min_replicas, max_cost)| placement(min_regions, min_replicas, max_cost))
}

fn regions_of(bits: u64) -> RegionSet {
    (0..40).filter(|bit| bits & (1 << bit) != 0).map(at).collect()
}

proptest! {
    /// Residency, survival of a loss, and cost hold for each chosen set, or the decision names the constraint. It does not
    /// depend on where the deployment runs now.
    #[test]
    fn a_chosen_set_is_feasible_or_the_decision_names_the_constraint(
        fleet in fleet(), placement in any_placement(), min in 1u32..3, current: u64,
    ) {
        let requirement = Requirement { placement: &placement, min, max: 8 };
        let decision = choose(&candidates(&fleet), &requirement, regions_of(current));
        for (index, region) in fleet.iter().enumerate() {
            let chosen = decision.regions.contains(at(index));
            prop_assert!(region.is_permitted || !chosen, "residency forbids {index}");
            let verdict = &decision.verdicts[index].1;
            prop_assert_eq!(chosen, matches!(verdict, PlacementVerdict::Chosen(_) | PlacementVerdict::Kept));
        }
        prop_assert_eq!(decision.verdicts.len(), fleet.len());
        match &decision.infeasible {
            None => {
                let eligible = eligible(&decision);
                let chosen: Vec<_> =
                    eligible.into_iter().filter(|region| decision.regions.contains(region.region)).collect();
                prop_assert!(survives(&chosen, &requirement));
                let cost = decision.cost.unwrap();
                prop_assert!(placement.max_cost.is_none_or(|max| cost.unpriced == 0 && cost.millionths <= max));
                prop_assert!(chosen.iter().all(|region| region.capacity >= min));
            }
            Some(constraint) => {
                prop_assert!(decision.regions.is_subset(&regions_of(current)), "nothing new is chosen");
                prop_assert!(!constraint.to_string().is_empty() && decision.cost.is_none());
            }
        }
    }

    /// An infeasible decision agrees with the exhaustive search, whatever the current set is.
    #[test]
    fn a_placement_is_infeasible_only_if_no_set_is_feasible(
        fleet in proptest::collection::vec(region(), 0..9), placement in any_placement(), current: u64,
    ) {
        let requirement = Requirement { placement: &placement, min: 1, max: 8 };
        let current = regions_of(current);
        let decision = choose(&candidates(&fleet), &requirement, current);
        let all: Vec<Eligible> = candidates(&fleet)
            .iter()
            .filter_map(|candidate| filter(candidate, &requirement, current.contains(candidate.region)).ok())
            .collect();
        let best = exhaustive(&all.iter().collect::<Vec<_>>(), &requirement);
        prop_assert_eq!(best.is_none(), decision.infeasible.is_some(), "{:?}", best);
    }

    /// Each table is computed from the last one, so a choice that changed when repeated would never end.
    #[test]
    fn a_chosen_set_stays_when_the_choice_is_repeated(
        fleet in fleet(), placement in any_placement(), current: u64,
    ) {
        let requirement = Requirement { placement: &placement, min: 1, max: 8 };
        let first = choose(&candidates(&fleet), &requirement, regions_of(current));
        prop_assume!(first.infeasible.is_none());
        let again = choose(&candidates(&fleet), &requirement, first.regions);
        prop_assert_eq!(first.regions, again.regions);
    }

    /// Prices that move by 4 % either way stay within the hysteresis of 10 %: 0.96 of the others is more than
    /// 0.9 × 1.04 of the current ones.
    #[test]
    fn prices_that_fluctuate_within_the_margin_move_nothing(
        fleet in fleet(), min_regions in 1u32..5, min_replicas in 0u32..20,
        factors in proptest::collection::vec(96u64..=104, 40),
    ) {
        let placement = placement(min_regions, min_replicas, None);
        let requirement = Requirement { placement: &placement, min: 1, max: 8 };
        let at_prices = |percent: &dyn Fn(usize) -> u64| {
            let mut fleet = fleet.clone();
            for (ordinal, region) in fleet.iter_mut().enumerate() {
                for offering in region.offered.values_mut() {
                    offering.price = offering.price.map(|price| price * percent(ordinal));
                }
            }
            fleet
        };
        let (before, after) = (at_prices(&|_| 100), at_prices(&|ordinal| factors[ordinal]));
        let first = choose(&candidates(&before), &requirement, RegionSet::EMPTY);
        let again = choose(&candidates(&after), &requirement, first.regions);
        prop_assert_eq!(first.regions, again.regions);
    }
}
