//! Tests of the pools with arbitrary events, and in simulated time with a replica of a given speed.

use super::*;
use crate::some_instant;
use crate::tenant::{Cost, RateLimiter, RateLimits};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::num::NonZeroU64;

const MS: Duration = Duration::from_millis(1);

fn region() -> RegionIndex {
    RegionIndex::new(0).expect("a small number")
}

fn name() -> DeploymentName {
    "m".parse().unwrap()
}

fn request(tenant: usize, priority: Priority, tokens: u64) -> AdmissionRequest {
    AdmissionRequest { tenant, weight: 1, priority, tokens, left: Duration::from_secs(30) }
}

fn waits(interactive_ms: u32, bulk_ms: u32) -> QueueWaits {
    QueueWaits { interactive: Some(interactive_ms * MS), bulk: Some(bulk_ms * MS) }
}

/// Returns a pool whose queueing delay was too long, with a limit of half of the tokens of tenant 0 in flight.
fn pressed(priority: Priority, tokens: u64, now: Instant) -> (AdmissionPoolSet, PoolEntry) {
    let mut pools = AdmissionPoolSet::default();
    let entered = pools.enter(region(), &name(), &request(0, priority, tokens), now).unwrap();
    for _ in 0..limit::TRIP_AFTER {
        let waits = match priority {
            Priority::Interactive => waits(4_000, 4_000),
            Priority::Bulk => waits(0, 25_000),
        };
        pools.report(region(), [(&name(), Some(waits))], now);
    }
    (pools, entered)
}

#[test]
fn a_tenant_above_its_share_is_shed_and_one_below_it_is_admitted() {
    let now = some_instant();
    let (pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let check = |requests: &[(usize, u64, Result<(), ShedReason>)]| {
        let mut pools = pools.clone();
        for (tenant, tokens, expected) in requests {
            let entered =
                pools.enter(region(), &name(), &request(*tenant, Priority::Interactive, *tokens), now);
            assert_eq!(entered.map(drop).map_err(|shed| shed.reason), *expected, "{tenant} in {requests:?}");
        }
    };
    let exceeds_limit = Err(ShedReason::OverShare);
    check(&[(0, 1, Err(ShedReason::NoCapacity))]); // no other tenant is active
    check(&[(1, 200, Ok(())), (1, 400, Ok(()))]); // half of the 1200 tokens in flight, whatever the limit
    check(&[(1, 200, Ok(())), (1, 401, exceeds_limit)]);
    check(&[(1, 200, Ok(())), (0, 1, exceeds_limit)]);
    check(&[(2, 5_000, Ok(())), (2, 1, exceeds_limit)]); // a tenant with no request in flight may have one, however large
}

#[test]
fn a_larger_weight_is_a_larger_share() {
    let now = some_instant();
    let (pools, _entered) = pressed(Priority::Bulk, 1_000, now);
    let heavy = |tokens| AdmissionRequest { weight: 4, ..request(1, Priority::Bulk, tokens) };
    let enters = |tokens| {
        let mut pools = pools.clone();
        let first = pools.enter(region(), &name(), &heavy(200), now);
        first.is_ok() && pools.enter(region(), &name(), &heavy(tokens), now).is_ok()
    };
    assert!(enters(760), "four fifths of the 1200 tokens in flight");
    assert!(!enters(761));
}

#[test]
fn an_interactive_request_is_shed_only_while_bulk_is_paused() {
    let now = some_instant();
    let (mut pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let mut enter = |priority, now| pools.enter(region(), &name(), &request(0, priority, 1), now).map(drop);
    assert_eq!(enter(Priority::Bulk, now), Ok(()));
    assert!(enter(Priority::Interactive, now).is_err());
    let shed = enter(Priority::Bulk, now + BULK_PAUSE - MS).expect_err("too soon");
    assert_eq!(shed.reason, ShedReason::BulkPaused);
    assert_eq!(enter(Priority::Bulk, now + BULK_PAUSE), Ok(()));
}

#[test]
fn a_request_that_would_miss_its_deadline_is_shed_with_a_retry_delay() {
    let now = some_instant();
    let mut pools = AdmissionPoolSet::default();
    pools.report(region(), [(&name(), Some(waits(700, 700)))], now);
    let mut check = |left_ms: u32, expected: Option<u32>| {
        let request = AdmissionRequest { left: left_ms * MS, ..request(0, Priority::Interactive, 1) };
        let shed = pools.enter(region(), &name(), &request, now).err();
        let shed = shed
            .inspect(|shed| assert_eq!((shed.reason, shed.wait), (ShedReason::DeadlineTooShort, 700 * MS)));
        assert_eq!(shed.map(|shed| shed.retry_after), expected.map(|ms| ms * MS), "{left_ms}");
    };
    check(700, None);
    check(699, Some(200));
    check(300, Some(400));
}

#[test]
fn the_retry_delay_is_the_time_to_reach_the_target_queue() {
    let now = some_instant();
    let (mut pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let shed =
        pools.enter(region(), &name(), &request(0, Priority::Interactive, 1), now).expect_err("no capacity");
    assert_eq!((shed.wait, shed.retry_after), (4_000 * MS, 3_000 * MS), "a second of it may stay");
    pools.report(region(), [(&name(), Some(waits(3_600_000, 3_600_000)))], now);
    let patient =
        AdmissionRequest { left: Duration::from_secs(7200), ..request(0, Priority::Interactive, 1) };
    let shed = pools.enter(region(), &name(), &patient, now).expect_err("no capacity");
    assert_eq!(shed.retry_after, Duration::from_secs(60), "the maximum retry delay");
}

#[test]
fn at_the_head_a_request_is_shed_only_if_all_pools_would_shed_it() {
    let now = some_instant();
    let (mut pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let (here, other) = (name(), "other".parse::<DeploymentName>().unwrap());
    let request = request(0, Priority::Interactive, 1);
    assert!(!pools.are_unlimited());
    assert_eq!(pools.check_head([(region(), &here), (region(), &other)], &request, now), Ok(()));
    assert_eq!(pools.check_head([], &request, now), Ok(()));
    let bulk = AdmissionRequest { priority: Priority::Bulk, ..request };
    assert_eq!(pools.check_head([(region(), &here)], &bulk, now), Ok(()), "no request was shed yet");
    assert!(pools.check_head([(region(), &here)], &request, now).is_err());
    assert!(pools.check_head([(region(), &here)], &bulk, now).is_err(), "and bulk with it");
}

#[test]
fn a_queueing_delay_is_tokens_over_speed_and_unknown_without_them() {
    let check = |interactive, total, speed, expected: (Option<u64>, Option<u64>)| {
        let QueueWaits { interactive, bulk } = QueueWaits::of(interactive, total, speed);
        let ms = |wait: Option<Duration>| wait.map(|wait| wait.as_millis() as u64);
        assert_eq!((ms(interactive), ms(bulk)), expected);
    };
    check(Some(100), 1_000, 1_000.0, (Some(100), Some(1_000)));
    check(None, 1_000, 1_000.0, (None, Some(1_000)));
    check(Some(0), 0, 0.0, (None, None));
    check(Some(u64::MAX), u64::MAX, 1e-300, (None, None));
}

#[derive(Clone, Copy, Debug)]
enum Event {
    AdmissionRequest { tenant: usize, bulk: bool, tokens: u64, left_ms: u32 },
    Leave(usize),
    Heard { interactive_ms: u32, bulk_ms: u32 },
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0usize..4, any::<bool>(), 1u64..500, 50u32..30_000)
            .prop_map(|(tenant, bulk, tokens, left_ms)| Event::AdmissionRequest { tenant, bulk, tokens, left_ms }),
        2 => (0usize..64).prop_map(Event::Leave),
        1 => (0u32..5_000, 0u32..30_000)
            .prop_map(|(interactive_ms, bulk_ms)| Event::Heard { interactive_ms, bulk_ms }),
    ]
}

proptest! {
    /// Invariant 8, Priorities: after any events, no bulk is admitted to a pool while an interactive request is shed there,
    /// nor within the pause after it. And a tenant with no request in flight is never shed for lack of capacity.
    #[test]
    fn no_events_shed_an_interactive_request_while_bulk_is_admitted(
        events in prop::collection::vec((event(), 0u32..300), 1..300),
    ) {
        let mut now = some_instant();
        let mut pools = AdmissionPoolSet::default();
        let mut in_flight: Vec<PoolEntry> = Vec::new();
        let mut interactive_shed: Option<Instant> = None;
        for (event, wait_ms) in events {
            now += wait_ms * MS;
            match event {
                Event::Heard { interactive_ms, bulk_ms } => {
                    pools.report(region(), [(&name(), Some(waits(interactive_ms, bulk_ms)))], now);
                }
                Event::Leave(which) if !in_flight.is_empty() => {
                    pools.leave(in_flight.swap_remove(which % in_flight.len()));
                }
                Event::Leave(_) => {}
                Event::AdmissionRequest { tenant, bulk, tokens, left_ms } => {
                    let priority = if bulk { Priority::Bulk } else { Priority::Interactive };
                    let request = AdmissionRequest { left: left_ms * MS, ..request(tenant, priority, tokens) };
                    let holds = in_flight.iter().any(|entered| entered.tenant == tenant && entered.priority == priority);
                    match pools.enter(region(), &name(), &request, now) {
                        Ok(entered) => {
                            let paused = interactive_shed.is_some_and(|shed| now < shed + BULK_PAUSE);
                            prop_assert!(!bulk || !paused, "bulk is admitted while interactive requests are shed");
                            in_flight.push(entered);
                        }
                        Err(shed) => {
                            let for_capacity = matches!(shed.reason, ShedReason::OverShare | ShedReason::NoCapacity);
                            prop_assert!(holds || !for_capacity, "{shed:?}");
                            prop_assert!(shed.retry_after >= 200 * MS);
                            if !bulk {
                                interactive_shed = Some(now);
                            }
                        }
                    }
                }
            }
        }
        in_flight.into_iter().for_each(|entered| pools.leave(entered));
        prop_assert!(pools.regions.values().flat_map(BTreeMap::values).all(AdmissionPool::is_empty));
    }
}

/// Simulation of a replica that computes one request after another, behind a gateway with the pools and an aggressor's
/// rate limits.
struct SheddingSimulation {
    now: Instant,
    pools: AdmissionPoolSet,
    queue: VecDeque<(PoolEntry, Instant)>,
    /// End of the current computation.
    busy_until: Instant,
    computed: u64,
    seed: u64,
}

/// Tokens a second.
const SPEED: u64 = 20_000;
/// Latency without queue and engine: round trip and tokenization.
const OVERHEAD: Duration = Duration::from_millis(20);
const TICK: Duration = Duration::from_micros(100);

impl SheddingSimulation {
    fn new() -> SheddingSimulation {
        let now = some_instant();
        let queue = VecDeque::new();
        SheddingSimulation {
            now,
            pools: AdmissionPoolSet::default(),
            queue,
            busy_until: now,
            computed: 0,
            seed: 42,
        }
    }

    /// Returns whether an event with this rate occurs in this tick.
    fn occurs(&mut self, per_second: u64) -> bool {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let ticks = Duration::from_secs(1).as_micros() / TICK.as_micros();
        u128::from(self.seed >> 33) * ticks < u128::from(per_second) << 31
    }

    fn sends(&mut self, tenant: usize, tokens: u64) -> bool {
        let entered =
            self.pools.enter(region(), &name(), &request(tenant, Priority::Interactive, tokens), self.now);
        entered.map(|entered| self.queue.push_back((entered, self.now))).is_ok()
    }

    /// Advances by a tick; returns the tenant and the latency of each request that finished in it.
    fn tick(&mut self, number: u64) -> Vec<(usize, Duration)> {
        self.now += TICK;
        let mut done = Vec::new();
        while self.busy_until <= self.now {
            let Some((entered, since)) = self.queue.pop_front() else { break };
            let takes = Duration::from_nanos(entered.tokens * 1_000_000_000 / SPEED);
            self.busy_until = self.busy_until.max(self.now) + takes;
            self.computed += entered.tokens;
            done.push((entered.tenant, self.busy_until - since + OVERHEAD));
            self.pools.leave(entered);
        }
        if number.is_multiple_of(2_000) {
            let waiting = self.queue.iter().map(|(entered, _)| entered.tokens).sum();
            let waits = QueueWaits::of(Some(waiting), waiting, SPEED as f64);
            self.pools.report(region(), [(&name(), Some(waits))], self.now);
        }
        done
    }
}

fn p99(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

const VICTIM: usize = 0;
const AGGRESSOR: usize = 1;
const TOKENS: u64 = 20;

/// Simulates a victim with 100 requests a second, and an aggressor with `offered` requests a second and a rate limit.
/// Returns the victim's p99 over two minutes, how many of its requests were shed, and the computed tokens. The first
/// seconds are excluded: in them the initial queue is not reported yet, and then drains.
fn two_tenants(offered: u64, limit: Option<u64>) -> (Duration, u64, u64) {
    let mut simulation = SheddingSimulation::new();
    let limits = RateLimits { requests_per_second: limit.and_then(NonZeroU64::new), ..RateLimits::default() };
    let mut limiter = RateLimiter::new(&limits, simulation.now);
    let (mut times, mut shed) = (Vec::new(), 0);
    let before = 3 * 10_000;
    for number in 0..before + 120 * 10_000 {
        if number == before {
            (times, shed, simulation.computed) = (Vec::new(), 0, 0);
        }
        if simulation.occurs(100) && !simulation.sends(VICTIM, TOKENS) {
            shed += 1;
        }
        let cost = Cost { inputs: 1, tokens: TOKENS };
        if simulation.occurs(offered) && limiter.enter(cost, simulation.now).is_ok() {
            simulation.sends(AGGRESSOR, TOKENS);
        }
        let done = simulation.tick(number);
        times.extend(done.into_iter().filter(|(tenant, _)| *tenant == VICTIM).map(|(_, took)| took));
    }
    (p99(times), shed, simulation.computed)
}

#[test]
fn an_aggressor_at_twenty_times_its_limit_does_not_raise_the_victims_p99_by_a_tenth() {
    let (uncontended, _, _) = two_tenants(0, None);
    let (beside, shed, _) = two_tenants(20 * 50, Some(50));
    assert_eq!(shed, 0);
    assert!(beside <= uncontended * 11 / 10, "{beside:?} with contention, {uncontended:?} without");
}

#[test]
fn an_aggressor_without_a_limit_is_shed_and_its_neighbour_is_not() {
    // Five times what the replica can do.
    let (beside, shed, computed) = two_tenants(5 * SPEED / TOKENS, None);
    assert_eq!(shed, 0, "the neighbour is within its share");
    // The queue of a shared priority may be 250 ms, and the limit repeatedly grows by a tenth.
    assert!(beside <= OVERHEAD + 300 * MS, "{beside:?}");
    assert!(computed >= 120 * SPEED * 97 / 100, "{computed}: the replica is kept busy");
}
