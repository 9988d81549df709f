//! Effect of hedging in simulated time, with a region that stalls for 200 ms in five of a hundred responses.
//!
//! One caller sends requests one after the other; every response takes 18 to 24 ms, and the plan, the targets and the
//! budgets are those of an edge. The random generator is seeded. The figures are printed: `cargo test -p gateway-core
//! hedging -- --nocapture`.
//!
//! Hedges of two in a hundred requests cannot hide five in a hundred stalls. Where a gateway's clients are spread over
//! regions, the stalls of one are less than two in a hundred of all requests, and are hidden; where all of them go to
//! the region that stalls, two fifths are.

use super::*;
use crate::latency::{FirstByteTimeout, SizeClass};
use crate::some_instant;
use crate::targets::{LatencyBaseline, TargetTracker};
use regions::id::DeploymentName;

const MS: Duration = Duration::from_millis(1);
const STALL: Duration = Duration::from_millis(200);
const REQUESTS: usize = 30_000;

/// SplitMix64 random generator.
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// Measures of an edge against slow responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remedies {
    /// Wait.
    None,
    /// Retry in another region after a first-byte timeout.
    Deadlines,
    /// Hedge the slowest requests as well.
    Hedges,
}

struct HedgingSimulation {
    remedies: Remedies,
    random: SplitMix,
    now: Instant,
    targets: TargetTracker<RegionIndex>,
    budgets: Budgets<RegionIndex>,
    deployment: DeploymentName,
    attempts: usize,
}

impl HedgingSimulation {
    fn new(seed: u64, remedies: Remedies) -> HedgingSimulation {
        let now = some_instant();
        let mut targets = TargetTracker::new(FirstByteTimeout::FOR_REGION, LatencyBaseline::Own, 1024);
        targets.set_targets((0..3).filter_map(RegionIndex::new));
        HedgingSimulation {
            remedies,
            random: SplitMix(seed),
            now,
            targets,
            budgets: Budgets::new(now),
            deployment: "d".parse().unwrap(),
            attempts: 0,
        }
    }

    /// Returns the latency of a response; region 0 is the one that stalls.
    fn latency(&mut self, region: RegionIndex) -> Duration {
        let usual = Duration::from_micros(18_000 + self.random.below(6_000));
        let stalls = region.as_usize() == 0 && self.random.below(100) < 5;
        if stalls { usual + STALL } else { usual }
    }

    fn decide(
        &mut self,
        decide: impl FnOnce(RegionView<'_>, &mut Budgets<RegionIndex>, Instant) -> Step,
    ) -> Step {
        let HedgingSimulation { targets, budgets, deployment, now, remedies, .. } = self;
        let (size, remedies) = (SizeClass::of(1), *remedies);
        let timeouts = |region| AttemptTimeouts {
            first_byte: targets
                .first_byte_timeout(region, deployment, size)
                .filter(|_| remedies != Remedies::None),
            hedge: targets.hedge_after(region, deployment, size),
        };
        let view = RegionView {
            health: &|_| Health::Healthy,
            load: &|_| RegionLoad::Light,
            timeouts: &timeouts,
            instance: &|_, _| None,
        };
        decide(view, budgets, *now)
    }

    /// Sends one request; returns its latency.
    fn send(&mut self, nearest: usize) -> Duration {
        let hedges = self.remedies == Remedies::Hedges;
        let begun = self.now;
        let order = (0..3).filter_map(|offset| RegionIndex::new((nearest + offset) % 3)).collect();
        let mut plan = RequestPlan::new(order, hedges, begun + Duration::from_secs(30));
        let mut step = self.decide(|view, budgets, now| plan.start(view, budgets, now));
        let mut running: Vec<(Instant, Instant, RegionIndex)> = Vec::new();
        loop {
            if let Step::Send { region, instead_of, .. } = step {
                self.attempts += 1;
                running.retain(|(_, _, running)| Some(*running) != instead_of);
                let done = self.now + self.latency(region);
                running.push((done, self.now, region));
            }
            let (done, sent, region) = *running.iter().min().expect("an attempt is in flight");
            if done <= plan.next_timer() {
                self.now = done;
                self.targets.record_latency(region, &self.deployment, SizeClass::of(1), done - sent, done);
                plan.responded(region);
                self.budgets.retry.succeeded();
                return done - begun;
            }
            self.now = plan.next_timer();
            let timer = plan.expired_timer(self.now).expect("a timer expires at the announced time");
            step = self.decide(|view, budgets, now| match timer {
                ExpiredTimer::Deadline => panic!("no response takes half a minute"),
                ExpiredTimer::FirstByte(region) => plan.first_byte_timed_out(region, view, budgets, now),
                ExpiredTimer::Hedge => plan.hedge(view, budgets, now),
            });
        }
    }
}

/// Returns the 99th percentile of the latency of the requests nearest to region 0, and the retries and hedges in
/// thousandths.
fn measured(seed: u64, spread: bool, remedies: Remedies) -> (Duration, usize) {
    let mut simulation = HedgingSimulation::new(seed, remedies);
    let mut latencies = Vec::new();
    for request in 0..REQUESTS {
        let nearest = if spread { request % 3 } else { 0 };
        let latency = simulation.send(nearest);
        if nearest == 0 {
            latencies.push(latency);
        }
    }
    latencies.sort_unstable();
    let p99 = latencies[latencies.len() * 99 / 100];
    let extra = (simulation.attempts - REQUESTS) * 1000 / REQUESTS;
    let kind = if spread { "a third" } else { "all" };
    println!(
        "seed {seed}, {kind} at the stalling region, {remedies:?}: p99 {p99:?}, {extra} extra attempts per 1000"
    );
    (p99, extra)
}

#[test]
fn hedging_hides_the_stalls_of_one_region_of_three_for_two_of_a_hundred_requests() {
    for seed in 1..=5 {
        let (without, extra_without) = measured(seed, true, Remedies::None);
        let (deadlines, _) = measured(seed, true, Remedies::Deadlines);
        let (hedges, extra) = measured(seed, true, Remedies::Hedges);
        assert!(without > STALL && extra_without == 0, "seed {seed}: {without:?}");
        assert!(deadlines < 140 * MS, "seed {seed}: {deadlines:?}");
        assert!(hedges < 60 * MS, "seed {seed}: {hedges:?}");
        assert!(extra <= 20, "seed {seed}: {extra} of 1000 more");
    }
}

#[test]
fn hedging_keeps_to_its_budget_when_all_requests_go_to_the_stalling_region() {
    for seed in 1..=5 {
        let (_, retries) = measured(seed, false, Remedies::Deadlines);
        let (_, both) = measured(seed, false, Remedies::Hedges);
        assert!(
            both <= retries + 20,
            "seed {seed}: {both} extra attempts per 1000, {retries} without hedging"
        );
    }
}
