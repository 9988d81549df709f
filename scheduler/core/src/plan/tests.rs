//! Plans, told as small worlds: regions on a line, a gateway beside tokens_per_replica that is named, one or two deployments.

use super::*;
use regions::weights::Why;

pub(super) fn at(number: usize) -> RegionIndex {
    RegionIndex::new(number).unwrap()
}

pub(super) fn set(numbers: &[usize]) -> RegionSet {
    numbers.iter().map(|number| at(*number)).collect()
}

pub(super) fn source(place: usize) -> Source {
    Source { gateway: at(place), origin: at(place) }
}

/// A class of a deployment; `policy` tells those of one deployment apart.
pub(super) fn class(deployment: &str, policy: &str) -> TrafficClass {
    TrafficClass { deployment: deployment.parse().unwrap(), residency: policy.parse().unwrap() }
}

/// A world in the making. Regions `a` and `b` are `10 |a - b| + 10` ms apart.
#[derive(Clone, Default)]
struct World(PlanInput);

impl World {
    /// Region `n` has replicas of `d` that take `capacities[n]` tokens a second, in one replica tokens_per_replica.
    fn of(capacities: &[u64]) -> World {
        World::default().serving("d", capacities)
    }

    fn serving(mut self, deployment: &str, capacities: &[u64]) -> World {
        for (region, capacity) in capacities.iter().enumerate() {
            self.0.pools.push(CapacityPool { region: at(region), tokens_per_second: *capacity });
            let place = DeploymentCapacity { pool: self.0.pools.len() - 1, ready: 1, max: 8, tokens_per_replica: *capacity };
            self.0.deployments.entry(deployment.parse().unwrap()).or_default().insert(at(region), place);
            for other in 0..capacities.len() {
                let rtt = Duration::from_millis(10 * region.abs_diff(other) as u64 + 10);
                self.0.rtt.insert((at(other), at(region)), rtt);
            }
        }
        self
    }

    /// So much is asked for at `place`.
    fn asked(mut self, class: TrafficClass, allowed: &[usize], place: usize, tokens: u64) -> World {
        let empty = ClassDemand { allowed: set(allowed), peak: 0, by_source: BTreeMap::new() };
        let demand = self.0.demand.entry(class).or_insert(empty);
        demand.peak += tokens;
        demand.by_source.insert(source(place), tokens);
        self
    }

    fn draining(mut self, regions: &[usize]) -> World {
        self.0.draining = set(regions);
        self
    }

    fn costing(mut self, costs: &[u64]) -> World {
        self.0.cost = costs.iter().enumerate().map(|(region, cost)| (at(region), *cost)).collect();
        self
    }

    fn max(mut self, max: u32) -> World {
        self.0.deployments.values_mut().flat_map(BTreeMap::values_mut).for_each(|place| place.max = max);
        self
    }

    fn after(&self, previous: &TrafficPlan) -> TrafficPlan {
        plan(&self.0, previous)
    }

    fn first(&self) -> TrafficPlan {
        self.after(&TrafficPlan::default())
    }

    /// The plan at which it comes to rest.
    fn rest(&self) -> TrafficPlan {
        (0..40).fold(self.first(), |plan, _| self.after(&plan))
    }

    fn floors(&self) -> Vec<(usize, u32)> {
        let floors = self.rest().floors.replicas;
        let tokens_per_replica = floors.get("d").into_iter().flatten();
        tokens_per_replica.map(|(region, floor)| (region.as_usize(), floor.replicas)).collect()
    }
}

/// The shares of a row, by region.
fn row(plan: &TrafficPlan, class: &TrafficClass, place: usize) -> Vec<(usize, u16, Why)> {
    let row = &plan.rows[class][&source(place)];
    row.iter().map(|share| (share.region.as_usize(), share.permille, share.why)).collect()
}

use Why::{AllFull, Kept, Leaving, NearerFull, Nearest, OnlyHere};

#[test]
fn what_fits_into_the_nearest_region_goes_there() {
    let d = class("d", "anywhere");
    let world = World::of(&[100, 100, 100]).asked(d.clone(), &[0, 1, 2], 1, 100);
    assert_eq!(row(&world.first(), &d, 1), [(1, 1000, Nearest)]);
    let nobody = World::of(&[100, 100]).asked(d.clone(), &[0, 1], 1, 0);
    assert_eq!(row(&nobody.first(), &d, 1), [(1, 1000, Nearest)], "who asks for nothing will ask");
}

#[test]
fn what_does_not_fit_goes_to_the_next_nearest_and_what_fits_nowhere_is_divided() {
    let d = class("d", "anywhere");
    let world = |tokens| World::of(&[100, 100, 200]).asked(d.clone(), &[0, 1, 2], 0, tokens);
    assert_eq!(row(&world(200).rest(), &d, 0), [(0, 500, Nearest), (1, 500, NearerFull)]);
    assert_eq!(row(&world(800).rest(), &d, 0), [(0, 250, AllFull), (1, 250, AllFull), (2, 500, AllFull)]);
}

#[test]
fn whoever_is_nearest_to_a_region_has_it_first() {
    let d = class("d", "anywhere");
    let world = World::of(&[100, 100, 100]).asked(d.clone(), &[0, 1, 2], 0, 150);
    let world = world.asked(d.clone(), &[0, 1, 2], 1, 100);
    assert_eq!(row(&world.rest(), &d, 1), [(1, 1000, Nearest)]);
    assert_eq!(row(&world.rest(), &d, 0), [(0, 667, Nearest), (2, 333, NearerFull)]);
}

#[test]
fn a_class_that_may_go_nowhere_else_has_the_room_first() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let world = World::of(&[100, 100]).asked(free.clone(), &[0, 1], 0, 100);
    let world = world.asked(locked.clone(), &[0], 0, 80);
    assert_eq!(row(&world.rest(), &locked, 0), [(0, 1000, Nearest)]);
    assert_eq!(row(&world.rest(), &free, 0), [(0, 200, Nearest), (1, 800, NearerFull)]);
}

#[test]
fn deployments_on_the_same_replicas_share_their_room() {
    let (d, e) = (class("d", "anywhere"), class("e", "anywhere"));
    let mut world = World::of(&[100, 100]).asked(d.clone(), &[0, 1], 0, 60);
    world = world.asked(e.clone(), &[0, 1], 0, 60);
    let shared = world.0.deployments["d"].clone();
    world.0.deployments.insert("e".parse().unwrap(), shared);
    assert_eq!(row(&world.rest(), &d, 0), [(0, 1000, Nearest)]);
    assert_eq!(row(&world.rest(), &e, 0), [(0, 667, Nearest), (1, 333, NearerFull)]);
}

#[test]
fn a_row_moves_by_steps_and_says_so() {
    let d = class("d", "anywhere");
    let calm = World::of(&[100, 100]).asked(d.clone(), &[0, 1], 0, 100);
    let surge = World::of(&[100, 100]).asked(d.clone(), &[0, 1], 0, 200);
    let mut plan = calm.rest();
    for stays in [900, 800, 700, 600] {
        plan = surge.after(&plan);
        assert_eq!(row(&plan, &d, 0), [(0, stays, Leaving), (1, 1000 - stays, NearerFull)]);
    }
    plan = surge.after(&plan);
    assert_eq!(row(&plan, &d, 0), [(0, 500, Nearest), (1, 500, NearerFull)]);
    assert_eq!(surge.after(&plan), plan);
    plan = calm.after(&plan);
    assert_eq!(row(&plan, &d, 0), [(0, 600, Nearest), (1, 400, Leaving)], "and back as slowly");
}

#[test]
fn what_is_not_worth_a_change_is_kept_while_it_fits() {
    let d = class("d", "anywhere");
    let world = |tokens| World::of(&[100, 100, 100]).asked(d.clone(), &[0, 1, 2], 0, tokens);
    let plan = world(200).rest();
    // 100 of 197 would be 508 thousandths at home.
    assert_eq!(row(&world(197).after(&plan), &d, 0), [(0, 500, Kept), (1, 500, Kept)]);
    assert_eq!(row(&world(190).after(&plan), &d, 0), [(0, 526, Nearest), (1, 474, NearerFull)]);
    // And here home would be given 101 where it can take 100.
    let moved = [(0, 495, Nearest), (1, 495, NearerFull), (2, 10, NearerFull)];
    assert_eq!(row(&world(202).after(&plan), &d, 0), moved);
}

#[test]
fn what_a_lost_region_had_moves_at_once() {
    let d = class("d", "anywhere");
    let world = |capacities: &[u64]| World::of(capacities).asked(d.clone(), &[0, 1, 2], 0, 150);
    let plan = world(&[100, 100, 100]).rest();
    assert_eq!(row(&plan, &d, 0), [(0, 667, Nearest), (1, 333, NearerFull)]);
    let plan = world(&[0, 100, 100]).after(&plan);
    assert_eq!(row(&plan, &d, 0), [(1, 667, Nearest), (2, 333, NearerFull)]);
}

#[test]
fn a_drained_region_is_left_by_steps_and_keeps_what_may_go_nowhere_else() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let world = World::of(&[100, 100]).asked(free.clone(), &[0, 1], 0, 50).asked(locked.clone(), &[0], 0, 50);
    let before = world.rest();
    let drained = world.draining(&[0]);
    let plan = drained.after(&before);
    assert_eq!(row(&plan, &free, 0), [(0, 900, Leaving), (1, 100, Nearest)]);
    assert_eq!(row(&plan, &locked, 0), [(0, 1000, OnlyHere)]);
    let plan = (0..9).fold(plan, |plan, _| drained.after(&plan));
    assert_eq!(row(&plan, &free, 0), [(1, 1000, Nearest)]);
    let mut undone = drained;
    undone.0.draining = RegionSet::EMPTY;
    assert_eq!(row(&undone.after(&plan), &free, 0), [(0, 100, Nearest), (1, 900, Leaving)]);
}

#[test]
fn a_class_that_is_served_nowhere_has_no_row() {
    let d = class("d", "anywhere");
    for world in [World::of(&[0, 0]), World::of(&[])] {
        assert_eq!(world.asked(d.clone(), &[0, 1], 0, 5).first().rows, BTreeMap::new());
    }
    let forbidden = World::of(&[100, 100]).asked(d.clone(), &[], 0, 5);
    assert_eq!(forbidden.first().rows, BTreeMap::new());
}

#[test]
fn what_must_be_held_against_a_loss_is_held_where_that_is_cheapest() {
    let d = class("d", "anywhere");
    let world =
        |costs: &[u64]| World::of(&[100, 100, 100]).costing(costs).asked(d.clone(), &[0, 1, 2], 0, 400);
    // Over two regions twice the demand has to be held, over three half as much again.
    assert_eq!(world(&[1, 1, 1]).floors(), [(0, 2), (1, 2), (2, 2)]);
    assert_eq!(world(&[10, 10, 19]).floors(), [(0, 2), (1, 2), (2, 2)]);
    assert_eq!(world(&[10, 10, 21]).floors(), [(0, 4), (1, 4)]);
    assert_eq!(world(&[30, 10, 10]).floors(), [(1, 4), (2, 4)]);
    let unpriced = World::of(&[100, 100, 100]).costing(&[5, 1]).asked(d.clone(), &[0, 1, 2], 0, 100);
    assert_eq!(unpriced.floors(), [(0, 1), (1, 1)], "no price is no bargain");
}

#[test]
fn what_is_held_for_a_narrow_class_counts_for_a_wide_one() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let world = World::of(&[100, 100, 100]).costing(&[5, 5, 1]);
    let world = world.asked(locked.clone(), &[0, 1], 0, 200);
    assert_eq!(world.floors(), [(0, 2), (1, 2)]);
    // Two and two bear 200 in all when one of them is lost; a hundred more has to be held, and the third is cheapest.
    let world = world.asked(free.clone(), &[0, 1, 2], 0, 100);
    assert_eq!(world.floors(), [(0, 2), (1, 2), (2, 1)]);
}

#[test]
fn a_class_that_cannot_bear_a_loss_is_named() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let world = World::of(&[100, 100]).asked(free.clone(), &[0, 1], 0, 100).asked(locked.clone(), &[0], 0, 1);
    assert_eq!(world.rest().floors.short, [locked.clone()].into());
    assert_eq!(
        world.clone().max(1).rest().floors.short,
        [free, locked].into(),
        "101 is more than one of them does"
    );
    assert_eq!(world.draining(&[1]).rest().floors.replicas, BTreeMap::new());
}
