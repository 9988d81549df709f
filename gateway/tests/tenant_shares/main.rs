//! Limits of a tenant at simulated gateways with the real limiters and the real division of the hub, in simulated time.

#![expect(clippy::unwrap_used, reason = "names that do not parse fail the test")]

use gateway_core::tenant::{Cost, GatewayShares, RateLimiter, RateLimits};
use regions::Catalogue;
use regions::id::TenantId;
use scheduler_api::plan::{GatewayInstance, TenantDemand, TenantShares};
use scheduler_core::shares::ShareAllocator;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

const LIMIT: u64 = 200;
const STEP: Duration = Duration::from_millis(5);
const STEPS_PER_SECOND: u64 = 200;

/// Gateway of the simulation.
struct SimulatedGateway {
    instance: GatewayInstance,
    limiter: RateLimiter,
    shares: Option<TenantShares>,
    admitted: u64,
    /// Requests that are due, in thousandths.
    due_permille: u64,
    /// Steps until it acknowledges new shares.
    acknowledges_in: Option<u64>,
}

/// Gateways and a hub.
struct SimulatedFleet {
    tenant: TenantId,
    rules: BTreeMap<TenantId, regions::TenantRules>,
    hub: Option<ShareAllocator>,
    published: BTreeMap<GatewayInstance, TenantShares>,
    gateways: Vec<SimulatedGateway>,
    now: Instant,
    random: u64,
}

impl SimulatedFleet {
    fn new(gateways: u64) -> SimulatedFleet {
        let now = Instant::now();
        let text = format!(
            "[[tenant]]\nname = \"acme\"\nissuer = \"i\"\nlimits = {{ requests_per_second = {LIMIT} }}\n"
        );
        let limits = RateLimits { requests_per_second: NonZeroU64::new(LIMIT), ..RateLimits::default() };
        let gateway = |id| SimulatedGateway {
            instance: GatewayInstance { region: "aws/us-east-1".parse().unwrap(), id },
            limiter: RateLimiter::new(&limits, now),
            shares: None,
            admitted: 0,
            due_permille: 0,
            acknowledges_in: None,
        };
        SimulatedFleet {
            tenant: "acme".parse().unwrap(),
            rules: regions::parse_tenants(&text, &Catalogue::builtin()).unwrap(),
            hub: Some(ShareAllocator::new(1, [], now)),
            published: BTreeMap::new(),
            gateways: (0..gateways).map(gateway).collect(),
            now,
            random: 7,
        }
    }

    /// Returns a pseudo-random number below `limit` (xorshift).
    fn draw(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Runs one second; returns the number of admitted requests of each gateway.
    fn second(&mut self, demand: &[u64]) -> Vec<u64> {
        self.gateways.iter_mut().for_each(|gateway| gateway.admitted = 0);
        for step in 0..STEPS_PER_SECOND {
            self.now += STEP;
            for (at, requests) in demand.iter().enumerate() {
                // Arrivals are irregular: up to twice the mean in each step.
                let arrived = self.draw(2 * 1000 * requests / STEPS_PER_SECOND + 1);
                let now = self.now;
                let gateway = &mut self.gateways[at];
                gateway.due_permille += arrived;
                while gateway.due_permille >= 1000 {
                    gateway.due_permille -= 1000;
                    let cost = Cost { inputs: 1, tokens: 1 };
                    let entered = gateway.limiter.enter(cost, now);
                    if entered.and_then(|()| gateway.limiter.charge(cost, now)).is_ok() {
                        gateway.admitted += 1;
                    }
                }
                let count = demand.len() as u64;
                let acknowledges_in = gateway.acknowledges_in.map(|steps| steps - 1);
                gateway.acknowledges_in = acknowledges_in.filter(|steps| *steps > 0);
                if step == at as u64 * STEPS_PER_SECOND / count || acknowledges_in == Some(0) {
                    self.exchange(at);
                }
            }
        }
        self.gateways.iter().map(|gateway| gateway.admitted).collect()
    }

    /// Reports the demand of a gateway, lets the hub divide, and delivers newer shares.
    fn exchange(&mut self, at: usize) {
        let Some(hub) = &mut self.hub else { return };
        let gateway = &mut self.gateways[at];
        let running = gateway.shares.as_ref().map(|shares| shares.generation);
        let demand = gateway.limiter.demand(self.now);
        let tenants = demand.map(|demand| (self.tenant.clone(), demand)).into_iter().collect();
        hub.report(TenantDemand { gateway: gateway.instance.clone(), running, tenants }, self.now);
        if hub.divide(&self.rules, self.now).is_some() {
            for shares in hub.written() {
                self.published.insert(shares.gateway.clone(), shares);
            }
        }
        let newer = self.published.get(&gateway.instance).and_then(|shares| shares.newer_than(running));
        let shares = newer.map(|mut newer| {
            newer.complete(gateway.shares.as_ref()).expect("changes to the current shares");
            newer
        });
        match shares {
            Some(shares) => {
                gateway.limiter.set_shares(shares.of(&self.tenant), self.now);
                gateway.shares = Some(shares);
                gateway.acknowledges_in = Some(10);
            }
            None if gateway.shares.is_none() => {
                let known = u32::try_from(self.published.len()).expect("few") + 1;
                gateway.limiter.set_shares(GatewayShares::equal(known).of(&self.tenant), self.now);
            }
            None => {}
        }
    }
}

#[test]
fn the_limit_holds_for_all_gateways_together_under_skewed_shifting_and_bursty_traffic() {
    let mut fleet = SimulatedFleet::new(4);
    println!("limit {LIMIT} requests/s; admitted/limit in each second of the phase");
    let phase =
        |fleet: &mut SimulatedFleet, name: &str, seconds: u64, settle: usize, demand: fn(u64) -> [u64; 4]| {
            let ratios: Vec<f64> = (0..seconds)
                .map(|second| fleet.second(&demand(second)).iter().sum::<u64>() as f64 / LIMIT as f64)
                .collect();
            let shown: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
            println!("{name:<34} {}", shown.join(" "));
            ratios[settle..].to_vec()
        };
    let check = |ratios: &[f64], least: f64| {
        assert!(ratios.iter().all(|ratio| (least..=1.1).contains(ratio)), "{ratios:?}");
    };
    check(&phase(&mut fleet, "even", 8, 4, |_| [100; 4]), 0.9);
    check(&phase(&mut fleet, "skewed", 8, 4, |_| [600, 20, 10, 0]), 0.9);
    check(&phase(&mut fleet, "shifted", 8, 4, |_| [0, 20, 10, 600]), 0.9);
    let rotating = |second: u64| {
        let mut demand = [10; 4];
        demand[(second / 10 % 4) as usize] = 500;
        demand
    };
    let ratios = phase(&mut fleet, "shifting every 10 s", 40, 0, rotating);
    ratios.chunks(10).for_each(|ratios| check(&ratios[4..], 0.9));
    assert!(ratios.iter().all(|ratio| *ratio <= 1.25), "also while traffic shifts: {ratios:?}");
    let ratios = phase(&mut fleet, "bursts of 1 s every 4 s", 24, 0, |second| match second % 4 {
        0 => [400; 4],
        _ => [5; 4],
    });
    assert!(ratios.iter().all(|ratio| *ratio <= 2.0), "a second's worth may be saved: {ratios:?}");
    let sum: f64 = ratios.iter().sum();
    assert!(sum <= 1.1 * ratios.len() as f64, "{sum}");

    check(&phase(&mut fleet, "skewed", 8, 4, |_| [600, 20, 10, 0]), 0.9);
    fleet.hub = None;
    check(&phase(&mut fleet, "skewed, hub dead", 10, 1, |_| [600, 20, 10, 0]), 0.9);
    check(&phase(&mut fleet, "shifted, hub dead", 10, 1, |_| [0, 20, 10, 600]), 0.0);
    let stored: Vec<_> = fleet.published.values().cloned().collect();
    fleet.hub = Some(ShareAllocator::new(1, stored, fleet.now));
    check(&phase(&mut fleet, "shifted, hub back", 12, 6, |_| [0, 20, 10, 600]), 0.9);
}

#[test]
fn thirty_two_gateways_use_the_whole_limit() {
    let mut fleet = SimulatedFleet::new(32);
    let demand: Vec<u64> = (0..32).map(|gateway| if gateway % 8 == 0 { 150 } else { 1 }).collect();
    let ratios: Vec<f64> =
        (0..12).map(|_| fleet.second(&demand).iter().sum::<u64>() as f64 / LIMIT as f64).collect();
    assert!(ratios[6..].iter().all(|ratio| (0.9..=1.1).contains(ratio)), "{ratios:?}");
}
