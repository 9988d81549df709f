//! Latency of a routing decision: `cargo bench -p gateway-core --bench decision`.
//!
//! 64 regions, 1,000 deployments, each region with three quarters of them ready, some suspect, some down. The decision
//! is all that happens between the end of the body and the first byte to a region: the residency policy, the serving
//! regions, their health, their distance. Each decision is timed separately, because clients notice the slow ones; and
//! allocations are counted, because they cause the slow ones. There is none, except for requests that narrow their
//! residency by a header: that policy is resolved for each of them.

#![expect(clippy::disallowed_methods, reason = "a bench has a clock")]
#![expect(clippy::unwrap_used, reason = "an unexpected value ends the bench")]

use gateway_core::health::{HealthReport, RegionHealthTracker};
use gateway_core::weights::{GatewayWeights, ReceivedRow};
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::latency::LatencyModel;
use regions::residency::ResidencyPolicy;
use regions::route::Generation;
use regions::selection::{self, Candidate, Health, Query, Selection};
use regions::set::{RegionIndex, RegionSet};
use regions::weights::{Share, Why, draw};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const REGIONS: usize = 64;
const DEPLOYMENTS: usize = 1_000;
const DECISIONS: usize = 200_000;

/// System allocator that counts its calls.
struct CountingAllocator;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[expect(unsafe_code, reason = "an allocator is unsafe to implement; this one forwards every call")]
// SAFETY: every call is forwarded to the system allocator with the same arguments.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` was returned by `alloc` above, and so by the system allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Allowed regions of a deployment, as resolved once per route table and tenant.
struct BenchDeployment {
    deployment_only: RegionSet,
    tenant: RegionSet,
    registered: RegionSet,
}

/// Residency policy of a request.
#[derive(Clone, Copy)]
enum RequestPolicy<'a> {
    Deployment,
    /// A tenant with a residency policy.
    Tenant,
    /// A request that narrows the policy, resolved for that request.
    Narrowed(&'a ResidencyPolicy),
}

/// State of an edge: routes, policies, health, distances.
struct DecisionScenario {
    catalogue: Catalogue,
    routed: RegionSet,
    deployments: BTreeMap<DeploymentName, BenchDeployment>,
    /// Policy of the tenant that has one.
    residency: ResidencyPolicy,
    tracker: RegionHealthTracker,
    latency: LatencyModel,
    /// Plan for every deployment: shares of four regions.
    weights: GatewayWeights,
}

impl DecisionScenario {
    fn new(now: Instant) -> DecisionScenario {
        let catalogue = Catalogue::builtin();
        let all: Vec<RegionIndex> = catalogue.iter().map(|(region, _)| region).collect();
        assert!(all.len() >= REGIONS, "the catalogue has {} regions", all.len());
        let stride = all.len() / REGIONS;
        let routed: Vec<RegionIndex> = all.into_iter().step_by(stride).take(REGIONS).collect();
        let names: Vec<DeploymentName> = (0..DEPLOYMENTS)
            .map(|number| format!("team-{}-embed-{number}", number % 37).parse().unwrap())
            .collect();
        let policies =
            ["eu", "us", "eu,us", "de,fr,nl", "jp"].map(|text| text.parse::<ResidencyPolicy>().unwrap());
        let mut tracker = RegionHealthTracker::default();
        let mut latency = LatencyModel::new(catalogue.region(routed[0]).point, &catalogue);
        tracker.set_regions(routed.iter().copied());
        for (number, region) in routed.iter().enumerate() {
            let ready = names
                .iter()
                .skip(number % 4)
                .enumerate()
                .filter(|(at, _)| at % 4 != 0)
                .map(|(_, name)| name.clone());
            let report = HealthReport {
                round_trip: Duration::from_millis(10),
                ready: ready.collect(),
                draining: false,
            };
            tracker.reported(*region, report, now);
            for sample in 0..32 {
                latency.observe(
                    *region,
                    Duration::from_millis(5 + number as u64 * 3),
                    now + Duration::from_millis(sample * 200),
                );
            }
            if number % 9 == 8 {
                for _ in 0..3 {
                    tracker.failed(*region);
                }
            }
        }
        let set: RegionSet = routed.iter().copied().collect();
        let residency: ResidencyPolicy = "eu,us,jp,gb,ch".parse().unwrap();
        let tenant = residency.permitted(&catalogue);
        let permitted = |number: usize| match number % 8 {
            index @ 0..5 => policies[index].permitted(&catalogue),
            _ => catalogue.all(),
        };
        let regions_of = |number| {
            let deployment_only = permitted(number);
            BenchDeployment { deployment_only, tenant: deployment_only.intersect(tenant), registered: set }
        };
        let rows: Vec<ReceivedRow> = names
            .iter()
            .map(|name| {
                let share =
                    |region: &RegionIndex| Share { region: *region, permille: 250, why: Why::NearerFull };
                let shares = routed.iter().take(4).map(share).collect();
                (name.clone(), ResidencyPolicy::Anywhere, routed[0], shares)
            })
            .collect();
        let weights = GatewayWeights::new(Generation { epoch: 1, number: 1 }, rows, &catalogue);
        let deployments =
            names.into_iter().enumerate().map(|(number, name)| (name, regions_of(number))).collect();
        DecisionScenario { catalogue, routed: set, deployments, residency, tracker, latency, weights }
    }

    /// Decides with a plan: its row, the drawn region, and its shares.
    fn decide_with_a_plan(
        &self,
        name: &str,
        draw_value: u16,
        buffer: Vec<Candidate>,
        now: Instant,
    ) -> (Selection, Option<RegionIndex>) {
        let mut selection = self.decide(name, RequestPolicy::Deployment, None, buffer, now);
        let (name, BenchDeployment { deployment_only: allowed, .. }) =
            self.deployments.get_key_value(name).unwrap();
        let shares = self.weights.of(name, self.routed.iter().next().unwrap(), allowed);
        let usable =
            |region| allowed.contains(region) && self.tracker.health(region, name) == Health::Healthy;
        let drawn = draw(shares, usable, draw_value);
        for candidate in &mut selection.order {
            candidate.planned = shares.iter().find(|share| share.region == candidate.region).copied();
        }
        (selection, drawn)
    }

    /// Decides like the edge: deployment by name, residency policy, and selection, with a reused buffer.
    fn decide(
        &self,
        name: &str,
        policy: RequestPolicy<'_>,
        client: Option<GeoPoint>,
        buffer: Vec<Candidate>,
        now: Instant,
    ) -> Selection {
        let (name, BenchDeployment { deployment_only, tenant, registered }) =
            self.deployments.get_key_value(name).unwrap();
        let allowed = match policy {
            RequestPolicy::Deployment => *deployment_only,
            RequestPolicy::Tenant => *tenant,
            RequestPolicy::Narrowed(policy) => {
                deployment_only.intersect(self.residency.narrow(policy).permitted(&self.catalogue))
            }
        };
        let query = Query {
            considered: self.routed,
            allowed,
            routed: self.routed,
            serving: self.tracker.serving(name, *registered),
            draining: RegionSet::EMPTY,
            health: &|region| self.tracker.region_health(region),
            rtt: &|region| match client {
                Some(index) => self.latency.prior_from(index, region),
                None => self.latency.estimate(region, now),
            },
        };
        selection::select_in(&query, buffer)
    }
}

fn main() {
    let now = Instant::now();
    let world = DecisionScenario::new(now);
    let names: Vec<&str> = world.deployments.keys().map(DeploymentName::as_str).collect();
    let client = "48.86,2.35".parse::<GeoPoint>().unwrap();
    let header: ResidencyPolicy = "eu,ch".parse().unwrap();
    println!(
        "{REGIONS} regions, {DEPLOYMENTS} deployments, {DECISIONS} decisions; each figure includes the clock"
    );
    println!("{:<44}{:>10}{:>10}{:>10}{:>14}", "", "p50 µs", "p99 µs", "p99.9 µs", "allocations");
    report("clock only", &measure(&names, |_| ()));
    let buffer = Cell::new(Vec::new());
    let decide = |policy, client| {
        measure(&names, |name| {
            let Selection { order, refused } = world.decide(name, policy, client, buffer.take(), now);
            black_box((&order, refused));
            buffer.set(order);
        })
    };
    for (label, policy, client) in [
        ("policy of the deployment", RequestPolicy::Deployment, None),
        ("tenant with a residency policy", RequestPolicy::Tenant, None),
        ("the same, from a client with a known location", RequestPolicy::Tenant, Some(client)),
    ] {
        let measured = decide(policy, client);
        report(label, &measured);
        assert_eq!(measured.1, 0, "{label}: a decision allocates nothing");
    }
    let draws = Cell::new(0u16);
    let planned = measure(&names, |name| {
        draws.set((draws.get() + 7) % 1000);
        let (Selection { order, refused }, drawn) =
            world.decide_with_a_plan(name, draws.get(), buffer.take(), now);
        black_box((&order, refused, drawn));
        buffer.set(order);
    });
    report("policy of the deployment, with a traffic plan", &planned);
    assert_eq!(planned.1, 0, "with a plan: a decision allocates nothing");
    report("tenant, narrowed by a header", &decide(RequestPolicy::Narrowed(&header), Some(client)));
}

/// Returns the sorted nanoseconds of the decisions, and the allocations of all of them.
fn measure(names: &[&str], decide: impl Fn(&str)) -> (Vec<u64>, u64) {
    let mut nanos = Vec::with_capacity(DECISIONS);
    names.iter().for_each(|name| decide(name));
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for number in 0..DECISIONS {
        let name = names[number * 7919 % names.len()];
        let began = Instant::now();
        decide(black_box(name));
        nanos.push(began.elapsed().as_nanos() as u64);
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    nanos.sort_unstable();
    (nanos, allocations)
}

fn report(label: &str, (nanos, allocations): &(Vec<u64>, u64)) {
    let at = |share: f64| nanos[(nanos.len() as f64 * share) as usize] as f64 / 1e3;
    let each = *allocations as f64 / DECISIONS as f64;
    println!("{label:<44}{:>10.2}{:>10.2}{:>10.2}{each:>14.2}", at(0.5), at(0.99), at(0.999));
}
