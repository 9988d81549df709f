//! How long it takes to decide where a request goes: `cargo bench -p gateway-core --bench decision`.
//!
//! 64 regions, 1,000 deployments, every region with three quarters of them ready, some suspect, some down. The decision
//! is all that stands between a body that was read and the first byte to a region: which residency policy it is under, who has the
//! deployment ready, who of them is well, who is nearest. Each decision is timed alone, for it is the slow one that a
//! client sees; and the allocator counts, for an allocation is what makes the slow one slow. There is none, but for whoever
//! narrows its own residency by a header: that policy is worked out for it alone.

#![expect(clippy::disallowed_methods, reason = "a bench has a clock")]
#![expect(clippy::unwrap_used, reason = "what is not as expected ends the bench, there")]

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

/// The system's allocator, and how often it was asked.
struct Counted;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[expect(unsafe_code, reason = "an allocator is unsafe to write; this one hands everything on as it came")]
// SAFETY: every call is the system allocator's own, with the arguments that came.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `alloc` above, and so from the system.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

/// Where a deployment may be served, as an edge works it out once for a route table and once for each tenant.
struct RoutedDeployment {
    anybody: RegionSet,
    tenant: RegionSet,
    registered: RegionSet,
}

/// Under which residency policy a request comes.
#[derive(Clone, Copy)]
enum Who<'a> {
    Anybody,
    /// Somebody with a residency.
    Tenant,
    /// Somebody whose request narrows it, which is worked out for that request.
    Narrowed(&'a ResidencyPolicy),
}

/// What an edge holds: routes, policy, health, distance.
struct World {
    catalogue: Catalogue,
    routed: RegionSet,
    deployments: BTreeMap<DeploymentName, RoutedDeployment>,
    /// Of the tenant that has one.
    residency: ResidencyPolicy,
    fleet: RegionHealthTracker,
    latency: LatencyModel,
    /// What a plan says of every deployment: shares of four regions.
    weights: GatewayWeights,
}

impl World {
    fn new(now: Instant) -> World {
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
                .map(|(_, name)| name.clone());
            let heard = HealthReport {
                round_trip: Duration::from_millis(10),
                ready: ready.collect(),
                draining: false,
            };
            fleet.reported(*region, heard, now);
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
            let anybody = permitted(number);
            RoutedDeployment { anybody, tenant: anybody.intersect(tenant), registered: set }
        };
        let told: Vec<ReceivedRow> = names
            .iter()
            .map(|name| {
                let share =
                    |region: &RegionIndex| Share { region: *region, permille: 250, why: Why::NearerFull };
                let shares = routed.iter().take(4).map(share).collect();
                (name.clone(), ResidencyPolicy::Anywhere, routed[0], shares)
            })
            .collect();
        let weights = GatewayWeights::new(Generation { epoch: 1, number: 1 }, told, &catalogue);
        let deployments =
            names.into_iter().enumerate().map(|(number, name)| (name, regions_of(number))).collect();
        World { catalogue, routed: set, deployments, residency, fleet, latency, weights }
    }

    /// And with a plan: its row, the region that is drawn by it, and what it says of each.
    fn decide_with_a_plan(
        &self,
        name: &str,
        chance: u16,
        room: Vec<Candidate>,
        now: Instant,
    ) -> (Selection, Option<RegionIndex>) {
        let mut selection = self.decide(name, Who::Anybody, None, room, now);
        let (name, RoutedDeployment { anybody: allowed, .. }) = self.deployments.get_key_value(name).unwrap();
        let shares = self.weights.of(name, self.routed.iter().next().unwrap(), allowed);
        let usable = |region| allowed.contains(region) && self.fleet.health(region, name) == Health::Healthy;
        let drawn = draw(shares, usable, chance);
        for candidate in &mut selection.order {
            candidate.planned = shares.iter().find(|share| share.region == candidate.region).copied();
        }
        (selection, drawn)
    }

    /// As the edge decides: the deployment by its name, the residency policy that its request comes under, the choice, in the room of the
    /// one before.
    fn decide(
        &self,
        name: &str,
        who: Who<'_>,
        client: Option<GeoPoint>,
        room: Vec<Candidate>,
        now: Instant,
    ) -> Selection {
        let (name, RoutedDeployment { anybody, tenant, registered }) =
            self.deployments.get_key_value(name).unwrap();
        let allowed = match who {
            Who::Anybody => *anybody,
            Who::Tenant => *tenant,
            Who::Narrowed(policy) => {
                anybody.intersect(self.residency.narrow(policy).permitted(&self.catalogue))
            }
        };
        let query = Query {
            considered: self.routed,
            allowed,
            routed: self.routed,
            serving: self.fleet.serving(name, *registered),
            draining: RegionSet::EMPTY,
            health: &|region| self.fleet.region_health(region),
            rtt: &|region| match client {
                Some(place) => self.latency.prior_from(place, region),
                None => self.latency.estimate(region, now),
            },
        };
        selection::select_in(&query, room)
    }
}

fn main() {
    let now = Instant::now();
    let world = World::new(now);
    let names: Vec<&str> = world.deployments.keys().map(DeploymentName::as_str).collect();
    let client = "48.86,2.35".parse::<GeoPoint>().unwrap();
    let header: ResidencyPolicy = "eu,ch".parse().unwrap();
    println!(
        "{REGIONS} regions, {DEPLOYMENTS} deployments, {DECISIONS} decisions; the clock's own time is in each figure"
    );
    println!("{:<44}{:>10}{:>10}{:>10}{:>14}", "", "p50 µs", "p99 µs", "p99.9 µs", "allocations");
    report("the clock alone", &measure(&names, |_| ()));
    let room = Cell::new(Vec::new());
    let decide = |who, client| {
        measure(&names, |name| {
            let Selection { order, refused } = world.decide(name, who, client, room.take(), now);
            black_box((&order, refused));
            room.set(order);
        })
    };
    for (what, who, client) in [
        ("anyone's request", Who::Anybody, None),
        ("of a tenant with a residency", Who::Tenant, None),
        ("and from a client whose place is known", Who::Tenant, Some(client)),
    ] {
        let measured = decide(who, client);
        report(what, &measured);
        assert_eq!(measured.1, 0, "{what}: a decision allocates nothing");
    }
    let chances = Cell::new(0u16);
    let planned = measure(&names, |name| {
        chances.set((chances.get() + 7) % 1000);
        let (Selection { order, refused }, drawn) =
            world.decide_with_a_plan(name, chances.get(), room.take(), now);
        black_box((&order, refused, drawn));
        room.set(order);
    });
    report("anyone's, with a plan that has a row for it", &planned);
    assert_eq!(planned.1, 0, "with a plan: a decision allocates nothing");
    report("and whose header narrows it further", &decide(Who::Narrowed(&header), Some(client)));
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

fn report(what: &str, (nanos, allocations): &(Vec<u64>, u64)) {
    let at = |share: f64| nanos[(nanos.len() as f64 * share) as usize] as f64 / 1e3;
    let each = *allocations as f64 / DECISIONS as f64;
    println!("{what:<44}{:>10.2}{:>10.2}{:>10.2}{each:>14.2}", at(0.5), at(0.99), at(0.999));
}
