//! Tests of plans for small fleets: regions on a line, gateways in some of them, one or two deployments.

use super::*;
use regions::weights::ShareReason;

pub(super) fn at(number: usize) -> RegionIndex {
    RegionIndex::new(number).unwrap()
}

pub(super) fn set(numbers: &[usize]) -> RegionSet {
    numbers.iter().map(|number| at(*number)).collect()
}

pub(super) fn source(region: usize) -> Source {
    Source { gateway: at(region), origin: at(region) }
}

/// Returns a class of a deployment; `policy` distinguishes the classes of one deployment.
pub(super) fn class(deployment: &str, policy: &str) -> TrafficClass {
    TrafficClass { deployment: deployment.parse().unwrap(), residency: policy.parse().unwrap() }
}

/// Builder of a plan input. Regions `a` and `b` are `10 |a - b| + 10` ms apart.
#[derive(Clone, Default)]
struct FleetInput(PlanInput);

impl FleetInput {
    /// Region `n` has one replica of `d` with a capacity of `capacities[n]` tokens a second.
    fn of(capacities: &[u64]) -> FleetInput {
        FleetInput::default().serving("d", capacities)
    }

    fn serving(mut self, deployment: &str, capacities: &[u64]) -> FleetInput {
        for (region, tokens) in capacities.iter().enumerate() {
            self.0.pools.push(CapacityPool { region: at(region), tokens_per_second: *tokens });
            let capacity = DeploymentCapacity {
                pool: self.0.pools.len() - 1,
                ready: 1,
                max: 8,
                tokens_per_replica: *tokens,
            };
            self.0.deployments.entry(deployment.parse().unwrap()).or_default().insert(at(region), capacity);
            for other in 0..capacities.len() {
                let rtt = Duration::from_millis(10 * region.abs_diff(other) as u64 + 10);
                self.0.rtt.insert((at(other), at(region)), rtt);
            }
        }
        self
    }

    /// Adds a demand of this many tokens a second from the gateway in region `at`.
    fn demand(mut self, class: TrafficClass, allowed: &[usize], gateway: usize, tokens: u64) -> FleetInput {
        let empty =
            ClassDemand { allowed: set(allowed), order: Vec::new(), peak: 0, by_source: BTreeMap::new() };
        let demand = self.0.demand.entry(class).or_insert(empty);
        demand.peak += tokens;
        demand.by_source.insert(source(gateway), tokens);
        self
    }

    /// Gives all classes this order of regions.
    fn ordered(mut self, order: &[usize]) -> FleetInput {
        self.0
            .demand
            .values_mut()
            .for_each(|demand| demand.order = order.iter().map(|region| at(*region)).collect());
        self
    }

    fn draining(mut self, regions: &[usize]) -> FleetInput {
        self.0.draining = set(regions);
        self
    }

    fn costing(mut self, costs: &[u64]) -> FleetInput {
        self.0.cost = costs.iter().enumerate().map(|(region, cost)| (at(region), *cost)).collect();
        self
    }

    fn max(mut self, max: u32) -> FleetInput {
        self.0
            .deployments
            .values_mut()
            .flat_map(BTreeMap::values_mut)
            .for_each(|capacity| capacity.max = max);
        self
    }

    fn after(&self, previous: &TrafficPlan) -> TrafficPlan {
        plan(&self.0, previous)
    }

    fn first(&self) -> TrafficPlan {
        self.after(&TrafficPlan::default())
    }

    /// Returns the plan to which the plans converge.
    fn rest(&self) -> TrafficPlan {
        (0..40).fold(self.first(), |plan, _| self.after(&plan))
    }

    fn floors(&self) -> Vec<(usize, u32)> {
        let floors = self.rest().floors.replicas;
        let floors = floors.get("d").into_iter().flatten();
        floors.map(|(region, floor)| (region.as_usize(), floor.replicas)).collect()
    }
}

/// Returns the shares of a row, by region.
fn row(plan: &TrafficPlan, class: &TrafficClass, gateway: usize) -> Vec<(usize, u16, ShareReason)> {
    let row = &plan.rows[class][&source(gateway)];
    row.iter().map(|share| (share.region.as_usize(), share.permille, share.reason)).collect()
}

use ShareReason::{AllFull, Kept, Leaving, NearerFull, Nearest, OnlyHere};

#[test]
fn demand_within_the_capacity_of_the_nearest_region_stays_there() {
    let d = class("d", "anywhere");
    let fleet = FleetInput::of(&[100, 100, 100]).demand(d.clone(), &[0, 1, 2], 1, 100);
    assert_eq!(row(&fleet.first(), &d, 1), [(1, 1000, Nearest)]);
    let idle = FleetInput::of(&[100, 100]).demand(d.clone(), &[0, 1], 1, 0);
    assert_eq!(row(&idle.first(), &d, 1), [(1, 1000, Nearest)], "a class without demand is planned too");
}

#[test]
fn demand_above_the_capacity_spills_to_the_next_region_and_the_overload_is_divided() {
    let d = class("d", "anywhere");
    let fleet = |tokens| FleetInput::of(&[100, 100, 200]).demand(d.clone(), &[0, 1, 2], 0, tokens);
    assert_eq!(row(&fleet(200).rest(), &d, 0), [(0, 500, Nearest), (1, 500, NearerFull)]);
    assert_eq!(row(&fleet(800).rest(), &d, 0), [(0, 250, AllFull), (1, 250, AllFull), (2, 500, AllFull)]);
}

#[test]
fn the_source_nearest_to_a_region_is_placed_there_first() {
    let d = class("d", "anywhere");
    let fleet = FleetInput::of(&[100, 100, 100]).demand(d.clone(), &[0, 1, 2], 0, 150);
    let fleet = fleet.demand(d.clone(), &[0, 1, 2], 1, 100);
    assert_eq!(row(&fleet.rest(), &d, 1), [(1, 1000, Nearest)]);
    assert_eq!(row(&fleet.rest(), &d, 0), [(0, 667, Nearest), (2, 333, NearerFull)]);
}

#[test]
fn a_class_without_alternatives_is_placed_first() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let fleet = FleetInput::of(&[100, 100]).demand(free.clone(), &[0, 1], 0, 100);
    let fleet = fleet.demand(locked.clone(), &[0], 0, 80);
    assert_eq!(row(&fleet.rest(), &locked, 0), [(0, 1000, Nearest)]);
    assert_eq!(row(&fleet.rest(), &free, 0), [(0, 200, Nearest), (1, 800, NearerFull)]);
}

#[test]
fn deployments_on_the_same_replicas_share_their_capacity() {
    let (d, e) = (class("d", "anywhere"), class("e", "anywhere"));
    let mut fleet = FleetInput::of(&[100, 100]).demand(d.clone(), &[0, 1], 0, 60);
    fleet = fleet.demand(e.clone(), &[0, 1], 0, 60);
    let shared = fleet.0.deployments["d"].clone();
    fleet.0.deployments.insert("e".parse().unwrap(), shared);
    assert_eq!(row(&fleet.rest(), &d, 0), [(0, 1000, Nearest)]);
    assert_eq!(row(&fleet.rest(), &e, 0), [(0, 667, Nearest), (1, 333, NearerFull)]);
}

#[test]
fn a_row_moves_in_steps_with_the_reason_leaving() {
    let d = class("d", "anywhere");
    let calm = FleetInput::of(&[100, 100]).demand(d.clone(), &[0, 1], 0, 100);
    let surge = FleetInput::of(&[100, 100]).demand(d.clone(), &[0, 1], 0, 200);
    let mut plan = calm.rest();
    for current in [900, 800, 700, 600] {
        plan = surge.after(&plan);
        assert_eq!(row(&plan, &d, 0), [(0, current, Leaving), (1, 1000 - current, NearerFull)]);
    }
    plan = surge.after(&plan);
    assert_eq!(row(&plan, &d, 0), [(0, 500, Nearest), (1, 500, NearerFull)]);
    assert_eq!(surge.after(&plan), plan);
    plan = calm.after(&plan);
    assert_eq!(row(&plan, &d, 0), [(0, 600, Nearest), (1, 400, Leaving)], "back at the same rate");
}

#[test]
fn a_shift_below_the_minimum_is_not_made_while_the_shares_fit() {
    let d = class("d", "anywhere");
    let fleet = |tokens| FleetInput::of(&[100, 100, 100]).demand(d.clone(), &[0, 1, 2], 0, tokens);
    let plan = fleet(200).rest();
    // 100 of 197 would be 508 permille in the nearest region.
    assert_eq!(row(&fleet(197).after(&plan), &d, 0), [(0, 500, Kept), (1, 500, Kept)]);
    assert_eq!(row(&fleet(190).after(&plan), &d, 0), [(0, 526, Nearest), (1, 474, NearerFull)]);
    // Here the nearest region would be given 101 with a capacity of 100.
    let moved = [(0, 495, Nearest), (1, 495, NearerFull), (2, 10, NearerFull)];
    assert_eq!(row(&fleet(202).after(&plan), &d, 0), moved);
}

#[test]
fn the_shares_of_a_lost_region_move_at_once() {
    let d = class("d", "anywhere");
    let fleet = |capacities: &[u64]| FleetInput::of(capacities).demand(d.clone(), &[0, 1, 2], 0, 150);
    let plan = fleet(&[100, 100, 100]).rest();
    assert_eq!(row(&plan, &d, 0), [(0, 667, Nearest), (1, 333, NearerFull)]);
    let plan = fleet(&[0, 100, 100]).after(&plan);
    assert_eq!(row(&plan, &d, 0), [(1, 667, Nearest), (2, 333, NearerFull)]);
}

#[test]
fn a_drained_region_loses_its_shares_in_steps_except_classes_without_alternatives() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let fleet =
        FleetInput::of(&[100, 100]).demand(free.clone(), &[0, 1], 0, 50).demand(locked.clone(), &[0], 0, 50);
    let before = fleet.rest();
    let drained = fleet.draining(&[0]);
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
fn the_first_region_of_an_order_receives_all_demand_and_another_one_only_while_it_does_not_serve() {
    let d = class("d", "anywhere");
    let fleet = |capacities: &[u64], tokens| {
        FleetInput::of(capacities).demand(d.clone(), &[0, 1, 2], 0, tokens).ordered(&[2, 1])
    };
    let calm = fleet(&[100, 100, 100], 50);
    assert_eq!(row(&calm.first(), &d, 0), [(2, 1000, Nearest)]);
    let surge = fleet(&[100, 100, 100], 900);
    assert_eq!(
        row(&surge.rest(), &d, 0),
        [(2, 1000, AllFull)],
        "no part of the overload is planned elsewhere"
    );
    let lost = fleet(&[100, 100, 0], 50).after(&calm.rest());
    assert_eq!(row(&lost, &d, 0), [(1, 1000, Nearest)]);
    assert_eq!(row(&calm.after(&lost), &d, 0), [(2, 1000, Nearest)], "it returns at once, not in steps");
    let drained = calm.clone().draining(&[2]).after(&calm.rest());
    assert_eq!(row(&drained, &d, 0), [(1, 1000, Nearest)]);
    let both_drained = calm.clone().draining(&[1, 2]).rest();
    assert_eq!(row(&both_drained, &d, 0), [(0, 1000, Nearest)], "the rest is routed by distance");
    let all_drained = calm.draining(&[0, 1, 2]).rest();
    assert_eq!(row(&all_drained, &d, 0), [(2, 1000, OnlyHere)]);
    // Residency binds: a class that the first region may not serve goes to the next one.
    let narrow = FleetInput::of(&[100, 100, 100]).demand(d.clone(), &[0, 1], 0, 50).ordered(&[2, 1]);
    assert_eq!(row(&narrow.first(), &d, 0), [(1, 1000, Nearest)]);
}

#[test]
fn the_next_region_of_an_order_has_replicas_for_the_whole_peak() {
    let d = class("d", "anywhere");
    let fleet = FleetInput::of(&[100, 100, 200]).demand(d.clone(), &[0, 1, 2], 0, 400).costing(&[1, 1, 9]);
    assert_eq!(fleet.floors(), [(0, 4), (1, 4)], "without an order, where it is cheap");
    let fleet = fleet.ordered(&[2, 1]);
    assert_eq!(fleet.floors(), [(1, 4), (2, 2)]);
    // Their limits are too low for the whole peak, so a third region is needed.
    assert_eq!(fleet.clone().max(2).floors(), [(0, 2), (1, 2), (2, 2)]);
    assert_eq!(fleet.max(1).rest().floors.uncovered_classes, [d].into());
}

#[test]
fn a_class_that_is_not_served_has_no_row() {
    let d = class("d", "anywhere");
    for fleet in [FleetInput::of(&[0, 0]), FleetInput::of(&[])] {
        assert_eq!(fleet.demand(d.clone(), &[0, 1], 0, 5).first().rows, BTreeMap::new());
    }
    let forbidden = FleetInput::of(&[100, 100]).demand(d.clone(), &[], 0, 5);
    assert_eq!(forbidden.first().rows, BTreeMap::new());
}

#[test]
fn floors_are_placed_in_the_cheapest_regions() {
    let d = class("d", "anywhere");
    let fleet =
        |costs: &[u64]| FleetInput::of(&[100, 100, 100]).costing(costs).demand(d.clone(), &[0, 1, 2], 0, 400);
    // With two regions, twice the demand is required; with three regions, one and a half times.
    assert_eq!(fleet(&[1, 1, 1]).floors(), [(0, 2), (1, 2), (2, 2)]);
    assert_eq!(fleet(&[10, 10, 19]).floors(), [(0, 2), (1, 2), (2, 2)]);
    assert_eq!(fleet(&[10, 10, 21]).floors(), [(0, 4), (1, 4)]);
    assert_eq!(fleet(&[30, 10, 10]).floors(), [(1, 4), (2, 4)]);
    let unpriced = FleetInput::of(&[100, 100, 100]).costing(&[5, 1]).demand(d.clone(), &[0, 1, 2], 0, 100);
    assert_eq!(unpriced.floors(), [(0, 1), (1, 1)], "an unknown price counts as the highest");
}

#[test]
fn the_floors_of_a_narrow_class_count_for_a_wide_one() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let fleet = FleetInput::of(&[100, 100, 100]).costing(&[5, 5, 1]);
    let fleet = fleet.demand(locked.clone(), &[0, 1], 0, 200);
    assert_eq!(fleet.floors(), [(0, 2), (1, 2)]);
    // Two and two serve 200 after the loss of one; the other 100 require one replica more, and the third region is the
    // cheapest.
    let fleet = fleet.demand(free.clone(), &[0, 1, 2], 0, 100);
    assert_eq!(fleet.floors(), [(0, 2), (1, 2), (2, 1)]);
}

#[test]
fn a_class_that_cannot_survive_a_loss_is_reported() {
    let (free, locked) = (class("d", "anywhere"), class("d", "eu"));
    let fleet =
        FleetInput::of(&[100, 100]).demand(free.clone(), &[0, 1], 0, 100).demand(locked.clone(), &[0], 0, 1);
    assert_eq!(fleet.rest().floors.uncovered_classes, [locked.clone()].into());
    assert_eq!(
        fleet.clone().max(1).rest().floors.uncovered_classes,
        [free, locked].into(),
        "101 exceeds the capacity of one of them"
    );
    assert_eq!(fleet.draining(&[1]).rest().floors.replicas, BTreeMap::new());
}
