//! How long a plan takes: `cargo bench -p scheduler-core --bench plan`.
//!
//! 64 regions, 1,000 deployments, 32 gateways, every gateway asking for every deployment: 32,000 rows. Timed is the whole
//! call, from the problem and the previous plan to the next plan with its floors, in four moments: the first plan, one in
//! calm, one in which regions are full and rows move, and one after a region was lost.

#![expect(clippy::disallowed_methods, reason = "a bench has a clock")]
#![expect(clippy::unwrap_used, reason = "what is not as expected ends the bench, there")]

use regions::latency::prior_rtt;
use regions::{Catalogue, DeploymentName, RegionIndex, RegionSet, ResidencyPolicy};
use scheduler_core::plan::{TrafficClass, ClassDemand, DeploymentCapacity, TrafficPlan, CapacityPool, PlanInput, Source, plan};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

const REGIONS: usize = 64;
const DEPLOYMENTS: usize = 1_000;
const GATEWAYS: usize = 32;
/// Each figure is that of so many calls.
const CALLS: usize = 25;
/// What one replica takes, in tokens per second.
const EACH: u64 = 7_500;

/// A fleet in which every gateway asks for so much of tokens_per_replica deployment, in tokens per second.
fn problem(catalogue: &Catalogue, asked: u64) -> PlanInput {
    let all: Vec<RegionIndex> = catalogue.iter().map(|(region, _)| region).collect();
    let routed: Vec<_> = all.iter().copied().step_by(all.len() / REGIONS).take(REGIONS).collect();
    assert_eq!(routed.len(), REGIONS);
    let policies: Vec<ResidencyPolicy> =
        ["eu", "us", "eu,us", "de,fr,nl,ie", "eea"].iter().map(|text| text.parse().unwrap()).collect();
    let set: RegionSet = routed.iter().copied().collect();
    let gateways: Vec<Source> = routed
        .iter()
        .step_by(REGIONS / GATEWAYS)
        .map(|place| Source { gateway: *place, origin: *place })
        .collect();
    let mut problem = PlanInput::default();
    for source in &gateways {
        for region in &routed {
            let (from, to) = (catalogue.region(source.origin).point, catalogue.region(*region).point);
            problem.rtt.insert((source.origin, *region), prior_rtt(from.distance_km(to)));
        }
    }
    for number in 0..DEPLOYMENTS {
        let name: DeploymentName = format!("team-{}-embed-{number}", number % 37).parse().unwrap();
        // Three quarters of the regions have it ready, tokens_per_replica with some replicas.
        let mut deployments = BTreeMap::new();
        for (at, region) in routed.iter().enumerate().filter(|(at, _)| (at + number) % 4 != 0) {
            let ready = 1 + ((at * 7 + number * 3) % 4) as u32;
            problem.pools.push(CapacityPool { region: *region, tokens_per_second: u64::from(ready) * EACH });
            deployments.insert(*region, DeploymentCapacity { pool: problem.pools.len() - 1, ready, max: 16, tokens_per_replica: EACH });
        }
        problem.deployments.insert(name.clone(), deployments);
        let residency = policies.get(number % 8).cloned().unwrap_or(ResidencyPolicy::Anywhere);
        let allowed = residency.permitted(catalogue).intersect(set);
        let uneven = |at: usize| asked / 2 + asked * ((at * 5 + number) % 11) as u64 / 10;
        let by_source: BTreeMap<_, _> =
            gateways.iter().enumerate().map(|(at, source)| (*source, uneven(at))).collect();
        let peak = by_source.values().sum();
        problem.demand.insert(TrafficClass { deployment: name, residency }, ClassDemand { allowed, peak, by_source });
    }
    for (at, region) in routed.iter().enumerate() {
        problem.cost.insert(*region, 1_000_000 + (at as u64 * 37 % 11) * 100_000);
    }
    problem
}

fn main() {
    let catalogue = Catalogue::builtin();
    let calm = problem(&catalogue, 2_000);
    let busy = problem(&catalogue, 9_000);
    let mut lost = busy.clone();
    for pool in lost.pools.iter_mut().filter(|pool| pool.region == busy.pools[1].region) {
        pool.tokens_per_second = 0;
    }
    println!("{REGIONS} regions x {DEPLOYMENTS} deployments x {GATEWAYS} gateways, {CALLS} calls tokens_per_replica");
    println!("{:<44}{:>10}{:>10}{:>10}{:>12}", "", "p50 ms", "p99 ms", "most ms", "shares");
    let at_rest = |problem: &PlanInput| (0..20).fold(TrafficPlan::default(), |before, _| plan(problem, &before));
    measure("the first", &calm, &TrafficPlan::default());
    let in_calm = at_rest(&calm);
    measure("in calm", &calm, &in_calm);
    measure("in a surge, when rows begin to move", &busy, &in_calm);
    let in_surge = at_rest(&busy);
    measure("in a surge, when they have moved", &busy, &in_surge);
    measure("when a region is lost in it", &lost, &in_surge);
}

fn measure(what: &str, problem: &PlanInput, before: &TrafficPlan) {
    let mut took: Vec<Duration> = Vec::with_capacity(CALLS);
    let mut shares = 0;
    for _ in 0..CALLS {
        let begun = Instant::now();
        let next = black_box(plan(black_box(problem), black_box(before)));
        took.push(begun.elapsed());
        shares = next.rows.values().flat_map(BTreeMap::values).map(Vec::len).sum();
    }
    took.sort_unstable();
    let ms = |at: usize| took[at].as_secs_f64() * 1e3;
    println!(
        "{what:<44}{:>10.2}{:>10.2}{:>10.2}{shares:>12}",
        ms(CALLS / 2),
        ms(CALLS * 99 / 100),
        ms(CALLS - 1)
    );
}
