//! Properties of every plan, for arbitrary inputs.

use super::tests::{at, class, set, source};
use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use regions::weights::ShareReason;

const REGIONS: usize = 5;
const DEPLOYMENTS: [&str; 2] = ["d", "e"];
const POLICIES: [&str; 3] = ["anywhere", "de", "eu"];

prop_compose! {
    /// Inputs with the same regions and classes, so that one can follow another.
    fn any_input()(
        capacities in vec(prop_oneof![Just(0u64), 1..400u64], REGIONS * DEPLOYMENTS.len()),
        shared in vec(any::<bool>(), REGIONS),
        ready in vec(0..3u32, REGIONS * DEPLOYMENTS.len()),
        rtt in vec(1..300u64, REGIONS * REGIONS),
        draining in vec(prop::bool::weighted(0.2), REGIONS),
        allowed in vec(vec(prop::bool::weighted(0.6), REGIONS), DEPLOYMENTS.len() * POLICIES.len()),
        demanded in vec(vec(prop::option::of(0..400u64), REGIONS), DEPLOYMENTS.len() * POLICIES.len()),
        cost in vec(1..9u64, REGIONS),
        max in 1..9u32,
    ) -> PlanInput {
        let selected = |which: &[bool]| set(&(0..REGIONS).filter(|region| which[*region]).collect::<Vec<_>>());
        let mut input = PlanInput { draining: selected(&draining), ..PlanInput::default() };
        input.cost = cost.into_iter().enumerate().map(|(region, cost)| (at(region), cost)).collect();
        for (region, shared) in shared.into_iter().enumerate() {
            for (origin, rtt) in rtt.iter().skip(region * REGIONS).take(REGIONS).enumerate() {
                input.rtt.insert((at(origin), at(region)), Duration::from_millis(*rtt));
            }
            for (number, name) in DEPLOYMENTS.iter().enumerate() {
                let one = region * DEPLOYMENTS.len() + number;
                if number == 0 || !shared {
                    input.pools.push(CapacityPool { region: at(region), tokens_per_second: capacities[one] });
                }
                let capacity = DeploymentCapacity {
                    pool: input.pools.len() - 1, ready: ready[one], max, tokens_per_replica: capacities[one],
                };
                input.deployments.entry(name.parse().unwrap()).or_default().insert(at(region), capacity);
            }
        }
        for (number, (allowed, demanded)) in allowed.iter().zip(&demanded).enumerate() {
            let class = class(DEPLOYMENTS[number % DEPLOYMENTS.len()], POLICIES[number / DEPLOYMENTS.len()]);
            let by_source: BTreeMap<_, _> = demanded.iter().enumerate()
                .filter_map(|(gateway, tokens)| Some((source(gateway), (*tokens)?)))
                .collect();
            let peak = by_source.values().sum();
            input.demand.insert(class, ClassDemand { allowed: selected(allowed), order: Vec::new(), peak, by_source });
        }
        input
    }
}

/// Returns the allowed regions that serve a class.
fn serving_regions(input: &PlanInput, class: &TrafficClass) -> RegionSet {
    let deployments = &input.deployments[&class.deployment];
    let serving = deployments.iter().filter(|(region, entry)| {
        let capacity = input.pools[entry.pool].tokens_per_second;
        entry.ready > 0 && capacity > 0 && input.demand[class].allowed.contains(**region)
    });
    serving.map(|(region, _)| *region).collect()
}

fn preferred_regions(input: &PlanInput, class: &TrafficClass) -> RegionSet {
    let (all, rest) = (serving_regions(input, class), serving_regions(input, class).minus(input.draining));
    if rest.is_empty() { all } else { rest }
}

/// Iterates over the rows with their class, source and demand.
fn each_row<'a>(
    input: &'a PlanInput,
    plan: &'a TrafficPlan,
) -> impl Iterator<Item = (&'a TrafficClass, &'a Source, u64, &'a Row)> {
    plan.rows.iter().flat_map(move |(class, rows)| {
        rows.iter().map(move |(source, row)| (class, source, input.demand[class].by_source[source], row))
    })
}

/// Returns the demand placed on each pool.
fn loads(input: &PlanInput, plan: &TrafficPlan) -> Vec<f64> {
    let mut loads = vec![0.0; input.pools.len()];
    for (class, _, demand, row) in each_row(input, plan) {
        for share in row {
            let pool = input.deployments[&class.deployment][&share.region].pool;
            loads[pool] += demand as f64 * f64::from(share.permille) / 1000.0;
        }
    }
    loads
}

/// Returns the plan to which the plans converge.
fn rest(input: &PlanInput, mut plan: TrafficPlan) -> TrafficPlan {
    for _ in 0..40 {
        let next = super::plan(input, &plan);
        if next == plan {
            return plan;
        }
        plan = next;
    }
    panic!("the plans do not converge");
}

proptest! {
    /// Residency and completeness: whatever the previous plan, every request has regions, and all of them are allowed.
    #[test]
    fn every_row_is_divided_among_allowed_regions_that_serve_it(first in any_input(), then in any_input()) {
        let plan = super::plan(&then, &super::plan(&first, &TrafficPlan::default()));
        for (class, _, _, row) in each_row(&then, &plan) {
            prop_assert_eq!(row.iter().map(|share| share.permille).sum::<u16>(), 1000);
            let allowed = serving_regions(&then, class);
            prop_assert!(row.iter().all(|share| share.permille > 0 && allowed.contains(share.region)), "{row:?}");
            prop_assert!(row.is_sorted_by(|a, b| a.region < b.region));
        }
        for (class, demand) in &then.demand {
            let rows = plan.rows.get(class).map_or(0, BTreeMap::len);
            prop_assert_eq!(rows, if serving_regions(&then, class).is_empty() { 0 } else { demand.by_source.len() });
        }
    }

    /// A pool is overloaded only by classes whose regions are all full.
    #[test]
    fn no_pool_is_overloaded_unless_all_regions_of_a_class_are_full(input in any_input()) {
        let plan = rest(&input, TrafficPlan::default());
        let loads = loads(&input, &plan);
        let total: u64 = each_row(&input, &plan).map(|(_, _, demand, _)| demand).sum();
        // Shares are whole permille, and shifts of up to two percent are not made while the shares fit.
        let (rounding, tolerance) = (total as f64 / 1000.0 + 1.0, total as f64 * 0.021 + 1.0);
        let mut overloaded = RegionSet::EMPTY;
        for (class, _, _, row) in each_row(&input, &plan) {
            if row.iter().any(|share| matches!(share.reason, ShareReason::AllFull)) {
                for region in preferred_regions(&input, class) {
                    let pool = input.deployments[&class.deployment][&region].pool;
                    let capacity = input.pools[pool].tokens_per_second as f64;
                    prop_assert!(loads[pool] >= capacity - tolerance, "{} of {capacity}, but reported as full", loads[pool]);
                }
            }
            let overload = row.iter().filter(|share| matches!(share.reason, ShareReason::AllFull | ShareReason::OnlyHere));
            overload.for_each(|share| overloaded.insert(share.region));
        }
        for (pool, load) in input.pools.iter().zip(&loads) {
            let capacity = pool.tokens_per_second as f64;
            prop_assert!(*load <= capacity + rounding || overloaded.contains(pool.region), "{load} of {capacity}");
        }
    }

    /// From one plan to the next, a row gives up at most one step of its shares in regions that still serve it.
    #[test]
    fn a_plan_moves_no_more_than_a_step(first in any_input(), then in any_input()) {
        let before = rest(&first, TrafficPlan::default());
        let after = super::plan(&then, &before);
        for (class, source, _, row) in each_row(&then, &after) {
            let Some(previous) = before.rows.get(class).and_then(|rows| rows.get(source)) else { continue };
            let allowed = serving_regions(&then, class);
            let now = |region| row.iter().find(|share| share.region == region).map_or(0, |share| share.permille);
            let moved = previous.iter().filter(|share| allowed.contains(share.region));
            let moved: u16 = moved.map(|share| share.permille.saturating_sub(now(share.region))).sum();
            prop_assert!(moved <= MAX_SHIFT_PERMILLE, "{moved}: {previous:?} to {row:?}");
        }
    }

    /// With a constant input the plans converge, from any start to the same plan within the minimum shift.
    #[test]
    fn plans_converge_for_a_constant_input(first in any_input(), then in any_input()) {
        let from_nothing = rest(&then, TrafficPlan::default());
        let from_another = rest(&then, rest(&first, TrafficPlan::default()));
        for (class, source, _, row) in each_row(&then, &from_nothing) {
            let other = &from_another.rows[class][source];
            let in_other = |region| other.iter().find(|share| share.region == region).map_or(0, |share| share.permille);
            let difference: u16 = row.iter().map(|share| share.permille.saturating_sub(in_other(share.region))).sum();
            prop_assert!(difference < 2 * MIN_SHIFT_PERMILLE, "{row:?} and {other:?}");
        }
    }

    /// A region without capacity has no share in the next plan.
    #[test]
    fn the_shares_of_a_region_without_capacity_move_at_once(mut input in any_input(), lost in 0..REGIONS) {
        let before = rest(&input, TrafficPlan::default());
        for pool in input.pools.iter_mut().filter(|pool| pool.region == at(lost)) {
            pool.tokens_per_second = 0;
        }
        let after = super::plan(&input, &before);
        let mut rows = after.rows.values().flat_map(BTreeMap::values).flatten();
        prop_assert!(rows.all(|share| share.region != at(lost)));
    }

    /// After the loss of any region, the floors of the others serve the peaks of all classes that are not reported as
    /// uncovered.
    #[test]
    fn floors_survive_the_loss_of_any_region(input in any_input()) {
        let floors = super::plan(&input, &TrafficPlan::default()).floors;
        for (class, demand) in &input.demand {
            let deployments = &input.deployments[&class.deployment];
            let none = BTreeMap::new();
            let placed = floors.replicas.get(&class.deployment).unwrap_or(&none);
            for (region, floor) in placed {
                prop_assert!(floor.replicas <= deployments[region].max);
                prop_assert!(!input.draining.contains(*region));
            }
            if floors.uncovered_classes.contains(class) {
                continue;
            }
            for lost in 0..REGIONS {
                let remaining = placed.iter().filter(|(region, _)| **region != at(lost) && demand.allowed.contains(**region));
                let remaining: u64 = remaining.map(|(region, floor)| deployments[region].tokens_per_replica * u64::from(floor.replicas)).sum();
                prop_assert!(remaining >= demand.peak, "{remaining} is remaining of {placed:?} for {}", demand.peak);
            }
        }
    }
}
