//! Time of a routing decision: `cargo bench -p gateway-core --bench decision`.
//!
//! 64 regions, 1,000 deployments, each region with three quarters of them ready, some regions suspect, some down. The
//! decision is all that stands between a body that was read and the first byte to a region: residency, readiness,
//! health, measured response times, the traffic plan, spillover credits and distance. Each decision is timed alone,
//! because a client notices the slow ones; and allocations are counted, because they make the slow ones slow. There are
//! none, except for a request whose header narrows its residency: its allowed regions are computed for it alone.

#![expect(clippy::disallowed_methods, reason = "a bench has a clock")]
#![expect(clippy::unwrap_used, reason = "an unexpected value ends the bench")]

use gateway_core::candidate::Candidate;
use gateway_core::circuit::Permille;
use gateway_core::cold::ResponseEstimate;
use gateway_core::health::{HealthReport, RegionHealthTracker};
use gateway_core::instances::InstanceIndex;
use gateway_core::latency::{FirstByteTimeout, SizeClass};
use gateway_core::route::{Observations, PlanQuery, RouteDecision, RouteQuery, SpilloverQuery, route};
use gateway_core::shed::{AdmissionPoolSet, AdmissionRequest, QueueWaits, Shed};
use gateway_core::spill::{Spill, SpillRequest};
use gateway_core::targets::{LatencyBaseline, TargetTracker};
use gateway_core::weights::{PlanWeights, ReceivedRow};
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::id::DeploymentName;
use regions::latency::LatencyModel;
use regions::residency::ResidencyPolicy;
use regions::route::Generation;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::{Share, ShareReason};
use replica_api::priority::Priority;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
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
    fleet: RegionHealthTracker,
    latency: LatencyModel,
    /// Response times that were measured for every eighth deployment.
    targets: TargetTracker<RegionIndex>,
    /// Shares of four regions for every deployment.
    weights: PlanWeights,
    /// Credits for every deployment.
    credits: Spill,
    /// Every deployment has a pool with a queue in every region.
    pools: AdmissionPoolSet,
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
        let mut fleet = RegionHealthTracker::default();
        let mut latency = LatencyModel::new(catalogue.region(routed[0]).point, &catalogue);
        fleet.set_regions(routed.iter().copied());
        for (number, region) in routed.iter().enumerate() {
            let ready = names
                .iter()
                .skip(number % 4)
                .enumerate()
                .filter(|(at, _)| at % 4 != 0)
                .map(|(_, name)| (name.clone(), true));
            let report = HealthReport {
                round_trip: Duration::from_millis(10),
                serves: ready.collect(),
                draining: false,
            };
            fleet.reported(*region, report, now);
            for sample in 0..32 {
                latency.observe(
                    *region,
                    Duration::from_millis(5 + number as u64 * 3),
                    now + Duration::from_millis(sample * 200),
                );
            }
            if number % 9 == 8 {
                for _ in 0..3 {
                    fleet.failed(*region);
                }
            }
        }
        let set: RegionSet = routed.iter().copied().collect();
        let residency: ResidencyPolicy = "eu,us,jp,gb,ch".parse().unwrap();
        let tenant = residency.permitted(&catalogue);
        let permitted = |number: usize| match number % 8 {
            place @ 0..5 => policies[place].permitted(&catalogue),
            _ => catalogue.all(),
        };
        let regions_of = |number| {
            let deployment_only = permitted(number);
            BenchDeployment { deployment_only, tenant: deployment_only.intersect(tenant), registered: set }
        };
        let rows: Vec<ReceivedRow> = names
            .iter()
            .map(|name| {
                let share = |region: &RegionIndex| Share {
                    region: *region,
                    permille: 250,
                    reason: ShareReason::NearerFull,
                };
                let shares = routed.iter().take(4).map(share).collect();
                (name.clone(), ResidencyPolicy::Anywhere, routed[0], shares)
            })
            .collect();
        let weights = PlanWeights::new(Generation { epoch: 1, number: 1 }, rows, &catalogue);
        let mut targets = TargetTracker::new(FirstByteTimeout::FOR_REGION, LatencyBaseline::Own, 8192);
        targets.set_targets(routed.iter().copied());
        for (number, region) in routed.iter().enumerate() {
            for name in names.iter().step_by(8) {
                let took = Duration::from_millis(20 + number as u64);
                targets.record_latency(*region, name, SizeClass::of(100), took, now);
            }
        }
        let sorted: BTreeSet<DeploymentName> = names.iter().cloned().collect();
        let waits = QueueWaits { interactive: Some(Duration::from_millis(10)), bulk: None };
        let mut pools = AdmissionPoolSet::default();
        for region in &routed {
            pools.report(*region, names.iter().map(|name| (name, Some(waits))), now);
        }
        let mut credits = Spill::default();
        for region in &routed {
            credits.set_credits(
                InstanceIndex::new(*region, 0),
                sorted.iter().map(|name| (name, Some(1000))),
                now,
            );
        }
        let deployments =
            names.into_iter().enumerate().map(|(number, name)| (name, regions_of(number))).collect();
        DecisionScenario {
            catalogue,
            routed: set,
            deployments,
            residency,
            fleet,
            latency,
            targets,
            weights,
            credits,
            pools,
        }
    }

    /// Decides as the gateway does: deployment by name, allowed regions, decision, in the memory of the decision
    /// before.
    fn decide(
        &self,
        name: &str,
        who: RequestPolicy<'_>,
        request: Request,
        buffer: Vec<Candidate>,
    ) -> RouteDecision {
        let (deployment, BenchDeployment { deployment_only, tenant, registered }) =
            self.deployments.get_key_value(name).unwrap();
        let allowed = match who {
            RequestPolicy::Deployment => *deployment_only,
            RequestPolicy::Tenant => *tenant,
            RequestPolicy::Narrowed(policy) => {
                deployment_only.intersect(self.residency.narrow(policy).permitted(&self.catalogue))
            }
        };
        let Request { client, draw, queue, now } = request;
        let interactive_share = |_| Some(Permille::new(600));
        let query = RouteQuery {
            deployment,
            priority: Priority::Interactive,
            allowed,
            order: None,
            routed: self.routed,
            serving: self.fleet.serving(deployment, *registered),
            draining: RegionSet::EMPTY,
            stopping: RegionSet::EMPTY,
            gateway: self.routed.iter().next().unwrap(),
            is_client_located: client.is_some(),
            assigned: None,
            plan: draw.map(|draw| PlanQuery {
                weights: &self.weights,
                draw: Some(draw),
                interactive_share: &interactive_share,
            }),
            spillover: Some(SpilloverQuery {
                credits: &self.credits,
                now,
                request: SpillRequest {
                    deployment,
                    priority: Priority::Interactive,
                    tokens: 100,
                    left: Duration::from_secs(30),
                    is_shed: false,
                    leave_draw: Permille::new(0),
                },
            }),
        };
        route(&query, &Observed { world: self, deployment, client, queue, now }, buffer)
    }
}

/// Differences between requests for one deployment.
#[derive(Clone, Copy)]
struct Request {
    client: Option<GeoPoint>,
    draw: Option<Permille>,
    queue: Duration,
    now: Instant,
}

struct Observed<'a> {
    world: &'a DecisionScenario,
    deployment: &'a DeploymentName,
    client: Option<GeoPoint>,
    queue: Duration,
    now: Instant,
}

impl Observations for Observed<'_> {
    fn health(&self, region: RegionIndex) -> Health {
        let health = self.world.fleet.region_health(region);
        let ejected = || !self.world.targets.state(region, self.now).admits(Permille::new(500));
        if health == Health::Healthy && ejected() { Health::Suspect } else { health }
    }

    fn rtt(&self, region: RegionIndex) -> Duration {
        match self.client {
            Some(point) => self.world.latency.prior_from(point, region),
            None => self.world.latency.estimate(region, self.now),
        }
    }

    fn is_any_cold(&self) -> bool {
        false
    }

    fn held_for(&self, _: RegionIndex) -> Option<Duration> {
        None
    }

    fn response_estimate(&self, _: RegionIndex, rtt: Duration) -> ResponseEstimate {
        ResponseEstimate { responds_in: rtt, held_for: None }
    }

    fn fastest(&self, near: impl Iterator<Item = RegionIndex> + Clone) -> Option<RegionIndex> {
        self.world.targets.preferred(near, self.deployment, SizeClass::of(100), Permille::new(500), self.now)
    }

    fn queue_wait(&self, _: RegionIndex) -> Option<Duration> {
        Some(self.queue)
    }

    fn rejection(&self, region: RegionIndex) -> Option<Shed> {
        let (priority, left) = (Priority::Interactive, Duration::from_secs(30));
        let request = AdmissionRequest { tenant: 0, weight: 1, priority, tokens: 100, left };
        self.world.pools.rejection(region, self.deployment, &request, self.now)
    }
}

fn main() {
    let now = Instant::now();
    let world = DecisionScenario::new(now);
    let names: Vec<&str> = world.deployments.keys().map(DeploymentName::as_str).collect();
    let client = "48.86,2.35".parse::<GeoPoint>().unwrap();
    let header: ResidencyPolicy = "eu,ch".parse().unwrap();
    println!(
        "{REGIONS} regions, {DEPLOYMENTS} deployments, {DECISIONS} decisions; the clock's own time is in each figure"
    );
    println!("{:<44}{:>10}{:>10}{:>10}{:>14}", "", "p50 µs", "p99 µs", "p99.9 µs", "allocations");
    report("the clock alone", &measure(&names, |_| ()));
    let buffer = Cell::new(Vec::new());
    let draws = Cell::new(0u16);
    let decide = |who, request: Request| {
        measure(&names, |name| {
            draws.set((draws.get() + 7) % 1000);
            let draw = request.draw.map(|_| Permille::new(draws.get()));
            let decision = world.decide(name, who, Request { draw, ..request }, buffer.take());
            black_box(&decision);
            buffer.set(decision.candidates);
        })
    };
    let plain = Request { client: None, draw: None, queue: Duration::ZERO, now };
    let located = Request { client: Some(client), ..plain };
    let planned = Request { draw: Some(Permille::new(0)), ..plain };
    let overloaded = Request { queue: Duration::from_millis(400), ..planned };
    for (description, who, request) in [
        ("any tenant's request", RequestPolicy::Deployment, plain),
        ("of a tenant with a residency", RequestPolicy::Tenant, plain),
        ("and from a client whose location is known", RequestPolicy::Tenant, located),
        ("any tenant's, with a traffic plan", RequestPolicy::Deployment, planned),
        ("and with an overloaded primary (spillover)", RequestPolicy::Deployment, overloaded),
    ] {
        let measured = decide(who, request);
        report(description, &measured);
        assert_eq!(measured.1, 0, "{description}: a decision allocates nothing");
    }
    report(
        "a tenant's, whose header narrows its residency",
        &decide(RequestPolicy::Narrowed(&header), located),
    );
}

/// Nanoseconds of each decision, sorted, and allocations of all.
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

fn report(description: &str, (nanos, allocations): &(Vec<u64>, u64)) {
    let at = |share: f64| nanos[(nanos.len() as f64 * share) as usize] as f64 / 1e3;
    let each = *allocations as f64 / DECISIONS as f64;
    println!("{description:<44}{:>10.2}{:>10.2}{:>10.2}{each:>14.2}", at(0.5), at(0.99), at(0.999));
}
