//! Tests of the choice of regions, each with one story.

use std::collections::BTreeMap;

use super::*;

/// Regions `0, 1, …` with a number of accelerators and a price each, all permitted and with a spoke.
struct World(Vec<(Accelerators, SpokeState)>);

impl World {
    fn new(regions: &[(u32, u64)]) -> World {
        let offered = |(count, price): &(u32, u64)| offers(&[("l4", Some(*count), Some(*price))]);
        World(regions.iter().map(|region| (offered(region), SpokeState::Available)).collect())
    }

    fn choose(&self, placement: &PlacementSpec, max: u32, current: &[usize]) -> PlacementDecision {
        self.choose_within(placement, (1, max), current, |_| true)
    }

    fn choose_within(
        &self,
        placement: &PlacementSpec,
        (min, max): (u32, u32),
        current: &[usize],
        is_permitted: impl Fn(usize) -> bool,
    ) -> PlacementDecision {
        let candidates =
            self.0.iter().enumerate().map(|(ordinal, (accelerators, spokes))| PlacementCandidate {
                region: at(ordinal),
                is_permitted: is_permitted(ordinal),
                has_engine: true,
                spokes: *spokes,
                accelerators,
                cost: None,
            });
        let current = current.iter().map(|ordinal| at(*ordinal)).collect();
        choose(&candidates.collect::<Vec<_>>(), &Requirement { placement, min, max }, current)
    }
}

fn offers(each: &[(&str, Option<u32>, Option<u64>)]) -> Accelerators {
    let offering = |(kind, count, price): &(&str, _, _)| {
        (kind.parse().unwrap(), Offering { count: *count, price: *price })
    };
    BTreeMap::from_iter(each.iter().map(offering))
}

fn at(ordinal: usize) -> RegionIndex {
    RegionIndex::new(ordinal).unwrap()
}

fn l4(min_regions: u32, min_replicas: u32, max_cost: Option<u64>) -> PlacementSpec {
    PlacementSpec { accelerators: vec!["l4".parse().unwrap()], min_regions, min_replicas, max_cost }
}

fn chosen(decision: &PlacementDecision) -> Vec<usize> {
    decision.regions.iter().map(RegionIndex::as_usize).collect()
}

#[test]
fn the_cheapest_regions_are_chosen_and_of_equal_ones_the_first_by_name() {
    let world = World::new(&[(8, 90), (8, 70), (8, 50), (8, 70)]);
    let decision = world.choose(&l4(2, 0, None), 4, &[]);
    assert_eq!(chosen(&decision), [1, 2]);
    assert_eq!(decision.cost, Some(PlacementCost { unpriced: 0, millionths: 120 }));
    assert!(
        matches!(&decision.verdicts[0].1, PlacementVerdict::NotNeeded(region) if region.price == Some(90))
    );
}

#[test]
fn the_regions_that_are_left_after_the_largest_is_lost_hold_the_replicas() {
    // The two cheapest hold 8 and 2: without the first, 2 are left.
    let world = World::new(&[(8, 10), (2, 10), (4, 25), (4, 26)]);
    assert_eq!(chosen(&world.choose(&l4(2, 2, None), 8, &[])), [0, 1]);
    assert_eq!(chosen(&world.choose(&l4(2, 4, None), 8, &[])), [0, 2]);
    assert_eq!(chosen(&world.choose(&l4(2, 6, None), 8, &[])), [0, 1, 2]);
    // With at most 4 replicas in a region the large one is no larger than the others.
    assert_eq!(chosen(&world.choose(&l4(2, 6, None), 4, &[])), [0, 1, 2]);
    let all = world.choose(&l4(2, 11, None), 8, &[]);
    assert_eq!(all.infeasible, Some(Infeasible::Replicas { after_loss: 10, min_replicas: 11 }));
}

#[test]
fn one_region_is_enough_if_none_needs_to_survive() {
    let world = World::new(&[(8, 90), (8, 70)]);
    assert_eq!(chosen(&world.choose(&l4(1, 0, None), 4, &[])), [1]);
    assert_eq!(chosen(&world.choose(&l4(1, 1, None), 4, &[])), [0, 1], "a replica that survives needs two");
}

#[test]
fn a_region_is_replaced_only_by_one_that_is_cheaper_by_more_than_the_margin() {
    let world = |price: u64| World::new(&[(8, 1000), (8, 1000), (8, price)]);
    let requirement = l4(2, 0, None);
    for (price, expected) in [(950, [0, 1]), (900, [0, 1]), (899, [0, 2])] {
        assert_eq!(chosen(&world(price).choose(&requirement, 4, &[0, 1])), expected, "{price}");
    }
    assert_eq!(chosen(&world(950).choose(&requirement, 4, &[])), [0, 2], "without current regions");
    assert_eq!(chosen(&world(890).choose(&requirement, 4, &[1, 2])), [1, 2]);
}

#[test]
fn the_loss_of_a_region_replaces_that_region_only() {
    let mut world = World::new(&[(8, 1000), (8, 1000), (8, 980), (8, 970)]);
    world.0[0].1 = SpokeState::Lapsed;
    assert_eq!(chosen(&world.choose(&l4(2, 0, None), 4, &[0, 1])), [0, 1], "its spokes may come back");
    world.0[0].1 = SpokeState::Unregistered;
    assert_eq!(chosen(&world.choose(&l4(2, 0, None), 4, &[0, 1])), [1, 3]);
}

#[test]
fn a_region_that_is_drained_stays_and_is_not_chosen_anew() {
    let mut world = World::new(&[(8, 10), (8, 20)]);
    world.0[0].1 = SpokeState::Draining;
    assert_eq!(chosen(&world.choose(&l4(1, 0, None), 4, &[0])), [0]);
    let decision = world.choose(&l4(1, 0, None), 4, &[]);
    assert_eq!(
        (chosen(&decision), &decision.verdicts[0].1),
        (vec![1], &PlacementVerdict::Rejected(PlacementRejection::Draining))
    );
}

#[test]
fn residency_binds_also_for_the_current_regions_of_an_infeasible_placement() {
    let world = World::new(&[(8, 10), (8, 20), (8, 30)]);
    let decision = world.choose_within(&l4(3, 0, None), (1, 4), &[0, 1], |ordinal| ordinal != 0);
    let expected = Infeasible::Regions { eligible: 2, candidates: 3, min_regions: 3 };
    assert_eq!((chosen(&decision), decision.infeasible), (vec![1], Some(expected)));
    let verdicts: Vec<_> = decision.verdicts.into_iter().map(|(_, verdict)| verdict).collect();
    assert_eq!(
        verdicts[..2],
        [PlacementVerdict::Rejected(PlacementRejection::Residency), PlacementVerdict::Kept]
    );
    assert!(matches!(verdicts[2], PlacementVerdict::NotNeeded(_)));
}

#[test]
fn the_cost_counts_the_minimum_replicas_and_its_limit_comes_before_the_hysteresis() {
    let world = World::new(&[(8, 100), (8, 100), (8, 95)]);
    let decide = |max_cost: u64| world.choose_within(&l4(2, 0, Some(max_cost)), (3, 8), &[0, 1], |_| true);
    assert_eq!((chosen(&decide(600)), decide(600).cost.unwrap().millionths), (vec![0, 1], 600));
    assert_eq!(chosen(&decide(599)), [0, 2], "585");
    let expensive = decide(584);
    assert_eq!(expensive.infeasible, Some(Infeasible::Cost { cheapest: 585, max_cost: 584 }));
    assert_eq!(chosen(&expensive), [0, 1], "they still serve requests");
}

#[test]
fn an_unknown_price_is_the_highest_and_excludes_a_region_from_a_limited_cost() {
    let mut world = World::new(&[(8, 10), (8, 900), (8, 900)]);
    world.0[0].0 = offers(&[("l4", Some(8), None)]);
    assert_eq!(chosen(&world.choose(&l4(2, 0, None), 4, &[])), [1, 2]);
    let three = world.choose(&l4(3, 0, None), 4, &[]);
    assert_eq!(three.cost, Some(PlacementCost { unpriced: 1, millionths: 1800 }));
    let limited = world.choose(&l4(3, 0, Some(1 << 40)), 4, &[]);
    assert_eq!(limited.infeasible, Some(Infeasible::Prices { eligible: 2, unpriced: 1, min_regions: 3 }));
    let four = world.choose(&l4(4, 0, Some(1 << 40)), 4, &[]);
    let regions = Infeasible::Regions { eligible: 2, candidates: 3, min_regions: 4 };
    assert_eq!(four.infeasible, Some(regions), "prices would not suffice");
    assert_eq!(limited.verdicts[0].1, PlacementVerdict::Rejected(PlacementRejection::Price));
}

#[test]
fn the_cheapest_of_the_stated_accelerators_that_suffices_counts() {
    let mut world = World::new(&[(1, 1)]);
    let check = |world: &World, types: &[&str], min: u32| {
        let accelerators = types.iter().map(|kind| kind.parse().unwrap()).collect();
        let placement = PlacementSpec { accelerators, ..l4(1, 0, None) };
        let decision = world.choose_within(&placement, (min, 8), &[], |_| true);
        match decision.verdicts.into_iter().next().unwrap().1 {
            PlacementVerdict::Chosen(region) => {
                Ok((region.accelerator.unwrap().to_string(), region.capacity))
            }
            PlacementVerdict::Rejected(reason) => Err(reason),
            other => panic!("{other:?}"),
        }
    };
    world.0[0].0 = offers(&[("h100", Some(4), Some(900)), ("l4", Some(2), Some(50)), ("t4", None, None)]);
    let ok = |kind: &str, capacity| Ok((kind.to_owned(), capacity));
    assert_eq!(check(&world, &["h100", "l4", "t4"], 1), ok("l4", 2));
    assert_eq!(check(&world, &["h100", "l4", "t4"], 3), ok("h100", 4));
    assert_eq!(check(&world, &["t4", "l4"], 3), ok("t4", 8), "an unknown number limits nothing");
    let (accelerator, count) = ("l4".parse().unwrap(), 2);
    assert_eq!(
        check(&world, &["l4"], 3),
        Err(PlacementRejection::AcceleratorCount { accelerator, count, min: 3 })
    );
    assert_eq!(check(&world, &["v100"], 1), Err(PlacementRejection::Accelerator));
}

#[test]
fn a_deployment_without_accelerators_is_placed_by_the_cost_of_a_replica() {
    let none = Accelerators::new();
    let candidate = |ordinal: usize, cost: Option<u64>| PlacementCandidate {
        region: at(ordinal),
        is_permitted: true,
        has_engine: ordinal != 3,
        spokes: SpokeState::Available,
        accelerators: &none,
        cost,
    };
    let candidates =
        [candidate(0, Some(30)), candidate(1, None), candidate(2, Some(20)), candidate(3, Some(1))];
    let placement = PlacementSpec { accelerators: Vec::new(), ..l4(2, 0, None) };
    let requirement = Requirement { placement: &placement, min: 1, max: 1 };
    let decision = choose(&candidates, &requirement, RegionSet::EMPTY);
    assert_eq!(chosen(&decision), [0, 2]);
    assert_eq!(decision.verdicts[3].1, PlacementVerdict::Rejected(PlacementRejection::Engine));
}

#[test]
fn the_largest_fleet_with_the_largest_requirement_is_placed() {
    use regions::deployment::placement::{MIN_REGIONS_MAX, REGIONS_TIMES_REPLICAS_MAX};
    let regions: Vec<_> =
        (0..regions::set::MAX_REGIONS as u64).map(|n| (256, 1000 + n * 7919 % 512)).collect();
    let world = World::new(&regions);
    let decision =
        world.choose(&l4(MIN_REGIONS_MAX, REGIONS_TIMES_REPLICAS_MAX / MIN_REGIONS_MAX, None), 256, &[]);
    let mut prices: Vec<u64> = regions.iter().map(|(_, price)| *price).collect();
    prices.sort_unstable();
    let cheapest = prices[..MIN_REGIONS_MAX as usize].iter().sum();
    assert_eq!(decision.cost, Some(PlacementCost { unpriced: 0, millionths: cheapest }));
}
