//! Duration of a plan: `cargo bench -p scheduler-core --bench plan`.
//!
//! 64 regions, 1,000 deployments, 32 gateways, with demand of every gateway for every deployment: 32,000 rows. The
//! benchmark times the whole call, from the input and the previous plan to the next plan with its floors, in four
//! situations: the first plan, one under steady load, one in which regions are full and rows move, and one after the
//! loss of a region.

#![expect(clippy::disallowed_methods, reason = "a bench has a clock")]
#![expect(clippy::unwrap_used, reason = "an unexpected value ends the bench there")]

use regions::latency::prior_rtt;
use regions::{Catalogue, DeploymentName, RegionIndex, RegionSet, ResidencyPolicy};
use scheduler_api::plan::TrafficClass;
use scheduler_core::plan::{
    CapacityPool, ClassDemand, DeploymentCapacity, PlanInput, Source, TrafficPlan, plan,
};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

const REGIONS: usize = 64;
const DEPLOYMENTS: usize = 1_000;
const GATEWAYS: usize = 32;
/// Number of calls per figure.
const CALLS: usize = 25;
/// Capacity of one replica, in tokens per second.
const TOKENS_PER_REPLICA: u64 = 7_500;

/// Creates a fleet in which every gateway has about this demand for each deployment, in tokens per second.
fn input(catalogue: &Catalogue, demand: u64) -> PlanInput {
    let all: Vec<RegionIndex> = catalogue.iter().map(|(region, _)| region).collect();
    let routed: Vec<_> = all.iter().copied().step_by(all.len() / REGIONS).take(REGIONS).collect();
    assert_eq!(routed.len(), REGIONS);
    let policies: Vec<ResidencyPolicy> =
        ["eu", "us", "eu,us", "de,fr,nl,ie", "eea"].iter().map(|text| text.parse().unwrap()).collect();
    let set: RegionSet = routed.iter().copied().collect();
    let gateways: Vec<Source> = routed
        .iter()
        .step_by(REGIONS / GATEWAYS)
        .map(|region| Source { gateway: *region, origin: *region })
        .collect();
    let mut input = PlanInput::default();
    for source in &gateways {
        for region in &routed {
            let (from, to) = (catalogue.region(source.origin).point, catalogue.region(*region).point);
            input.rtt.insert((source.origin, *region), prior_rtt(from.distance_km(to)));
        }
    }
    for number in 0..DEPLOYMENTS {
        let name: DeploymentName = format!("team-{}-embed-{number}", number % 37).parse().unwrap();
        // Three quarters of the regions have ready replicas of it.
        let mut deployments = BTreeMap::new();
        for (at, region) in routed.iter().enumerate().filter(|(at, _)| (at + number) % 4 != 0) {
            let ready = 1 + ((at * 7 + number * 3) % 4) as u32;
            input.pools.push(CapacityPool {
                region: *region,
                tokens_per_second: u64::from(ready) * TOKENS_PER_REPLICA,
            });
            deployments.insert(
                *region,
                DeploymentCapacity {
                    pool: input.pools.len() - 1,
                    ready,
                    max: 16,
                    tokens_per_replica: TOKENS_PER_REPLICA,
                },
            );
        }
        input.deployments.insert(name.clone(), deployments);
        let residency = policies.get(number % 8).cloned().unwrap_or(ResidencyPolicy::Anywhere);
        let allowed = residency.permitted(catalogue).intersect(set);
        let uneven = |at: usize| demand / 2 + demand * ((at * 5 + number) % 11) as u64 / 10;
        let by_source: BTreeMap<_, _> =
            gateways.iter().enumerate().map(|(at, source)| (*source, uneven(at))).collect();
        let peak = by_source.values().sum();
        input.demand.insert(
            TrafficClass { deployment: name, residency },
            ClassDemand { allowed, order: Vec::new(), peak, by_source },
        );
    }
    for (at, region) in routed.iter().enumerate() {
        input.cost.insert(*region, 1_000_000 + (at as u64 * 37 % 11) * 100_000);
    }
    input
}

fn main() {
    let catalogue = Catalogue::builtin();
    let steady_input = input(&catalogue, 2_000);
    let busy = input(&catalogue, 9_000);
    let mut lost = busy.clone();
    for pool in lost.pools.iter_mut().filter(|pool| pool.region == busy.pools[1].region) {
        pool.tokens_per_second = 0;
    }
    println!("{REGIONS} regions x {DEPLOYMENTS} deployments x {GATEWAYS} gateways, {CALLS} calls each");
    println!("{:<44}{:>10}{:>10}{:>10}{:>12}", "", "p50 ms", "p99 ms", "max ms", "shares");
    let at_rest =
        |input: &PlanInput| (0..20).fold(TrafficPlan::default(), |previous, _| plan(input, &previous));
    measure("first plan", &steady_input, &TrafficPlan::default());
    let steady = at_rest(&steady_input);
    measure("steady load", &steady_input, &steady);
    measure("surge, rows begin to move", &busy, &steady);
    let in_surge = at_rest(&busy);
    measure("surge, rows have moved", &busy, &in_surge);
    measure("loss of a region in the surge", &lost, &in_surge);
}

fn measure(name: &str, input: &PlanInput, previous: &TrafficPlan) {
    let mut durations: Vec<Duration> = Vec::with_capacity(CALLS);
    let mut shares = 0;
    for _ in 0..CALLS {
        let begun = Instant::now();
        let next = black_box(plan(black_box(input), black_box(previous)));
        durations.push(begun.elapsed());
        shares = next.rows.values().flat_map(BTreeMap::values).map(Vec::len).sum();
    }
    durations.sort_unstable();
    let ms = |at: usize| durations[at].as_secs_f64() * 1e3;
    println!(
        "{name:<44}{:>10.2}{:>10.2}{:>10.2}{shares:>12}",
        ms(CALLS / 2),
        ms(CALLS * 99 / 100),
        ms(CALLS - 1)
    );
}
