//! The pools over arbitrary histories, and over simulated time before a replica that computes so many tokens a second.

use super::*;
use crate::some_instant;
use crate::tenant::{Allowance, Cost, Limits};
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

fn ask(tenant: usize, priority: Priority, tokens: u64) -> Ask {
    Ask { tenant, weight: 1, priority, tokens, left: Duration::from_secs(30) }
}

fn waits(interactive_ms: u32, bulk_ms: u32) -> Waits {
    Waits { interactive: Some(interactive_ms * MS), bulk: Some(bulk_ms * MS) }
}

/// A pool in which the priority was found too slow, with a limit of half of what tenant 0 has in flight.
fn pressed(priority: Priority, tokens: u64, now: Instant) -> (Pools, Entered) {
    let mut pools = Pools::default();
    let entered = pools.enter(region(), &name(), &ask(0, priority, tokens), now).unwrap();
    for _ in 0..limit::TRIP_AFTER {
        let waits = match priority {
            Priority::Interactive => waits(4_000, 4_000),
            Priority::Bulk => waits(0, 25_000),
        };
        pools.heard(region(), [(name(), waits)], now);
    }
    (pools, entered)
}

#[test]
fn whoever_has_its_share_is_turned_away_and_whoever_has_not_is_let_in() {
    let now = some_instant();
    let (pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let check = |asked: &[(usize, u64, Result<(), Reason>)]| {
        let mut pools = pools.clone();
        for (tenant, tokens, expected) in asked {
            let entered = pools.enter(region(), &name(), &ask(*tenant, Priority::Interactive, *tokens), now);
            assert_eq!(entered.map(drop).map_err(|shed| shed.reason), *expected, "{tenant} in {asked:?}");
        }
    };
    let over = Err(Reason::OverShare);
    check(&[(0, 1, Err(Reason::NoRoom))]); // alone, it shares with nobody
    check(&[(1, 200, Ok(())), (1, 400, Ok(()))]); // half of the 1200 that are in flight, whatever the limit
    check(&[(1, 200, Ok(())), (1, 401, over)]);
    check(&[(1, 200, Ok(())), (0, 1, over)]);
    check(&[(2, 5_000, Ok(())), (2, 1, over)]); // whoever has nothing may have one request, however large
}

#[test]
fn a_weight_is_a_larger_share() {
    let now = some_instant();
    let (pools, _entered) = pressed(Priority::Bulk, 1_000, now);
    let heavy = |tokens| Ask { weight: 4, ..ask(1, Priority::Bulk, tokens) };
    let enters = |tokens| {
        let mut pools = pools.clone();
        let first = pools.enter(region(), &name(), &heavy(200), now);
        first.is_ok() && pools.enter(region(), &name(), &heavy(tokens), now).is_ok()
    };
    assert!(enters(760), "four fifths of the 1200 that are in flight");
    assert!(!enters(761));
}

#[test]
fn a_lookup_is_shed_only_while_bulk_is_out() {
    let now = some_instant();
    let (mut pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let mut enter = |priority, now| pools.enter(region(), &name(), &ask(0, priority, 1), now).map(drop);
    assert_eq!(enter(Priority::Bulk, now), Ok(()));
    assert!(enter(Priority::Interactive, now).is_err());
    let shed = enter(Priority::Bulk, now + BULK_PAUSE - MS).expect_err("too soon");
    assert_eq!(shed.reason, Reason::LookupsFirst);
    assert_eq!(enter(Priority::Bulk, now + BULK_PAUSE), Ok(()));
}

#[test]
fn what_would_come_too_late_is_told_so_and_when_it_would_not() {
    let now = some_instant();
    let mut pools = Pools::default();
    pools.heard(region(), [(name(), waits(700, 700))], now);
    let mut check = |left_ms: u32, expected: Option<u32>| {
        let ask = Ask { left: left_ms * MS, ..ask(0, Priority::Interactive, 1) };
        let shed = pools.enter(region(), &name(), &ask, now).err();
        let shed = shed.inspect(|shed| assert_eq!((shed.reason, shed.wait), (Reason::TooLate, 700 * MS)));
        assert_eq!(shed.map(|shed| shed.retry_after), expected.map(|ms| ms * MS), "{left_ms}");
    };
    check(700, None);
    check(699, Some(200));
    check(300, Some(400));
}

#[test]
fn the_wait_that_is_told_is_what_has_to_flow_off() {
    let now = some_instant();
    let (mut pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let shed = pools.enter(region(), &name(), &ask(0, Priority::Interactive, 1), now).expect_err("no room");
    assert_eq!((shed.wait, shed.retry_after), (4_000 * MS, 3_000 * MS), "a second of it may stay");
    pools.heard(region(), [(name(), waits(3_600_000, 3_600_000))], now);
    let patient = Ask { left: Duration::from_secs(7200), ..ask(0, Priority::Interactive, 1) };
    let shed = pools.enter(region(), &name(), &patient, now).expect_err("no room");
    assert_eq!(shed.retry_after, Duration::from_secs(60), "nobody is told to wait for longer");
}

#[test]
fn at_the_head_only_what_no_pool_would_take_is_turned_away() {
    let now = some_instant();
    let (mut pools, _entered) = pressed(Priority::Interactive, 1_000, now);
    let (here, other) = (name(), "other".parse::<DeploymentName>().unwrap());
    let ask = ask(0, Priority::Interactive, 1);
    assert!(!pools.are_calm());
    assert_eq!(pools.at_the_head([(region(), &here), (region(), &other)], &ask, now), Ok(()));
    assert_eq!(pools.at_the_head([], &ask, now), Ok(()));
    let bulk = Ask { priority: Priority::Bulk, ..ask };
    assert_eq!(pools.at_the_head([(region(), &here)], &bulk, now), Ok(()), "nobody was shed yet");
    assert!(pools.at_the_head([(region(), &here)], &ask, now).is_err());
    assert!(pools.at_the_head([(region(), &here)], &bulk, now).is_err(), "and bulk with it");
}

#[test]
fn a_wait_is_reckoned_from_tokens_and_speed_and_unknown_without() {
    let check = |lookups, all, speed, expected: (Option<u64>, Option<u64>)| {
        let Waits { interactive, bulk } = Waits::of(lookups, all, speed);
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
    Ask { tenant: usize, bulk: bool, tokens: u64, left_ms: u32 },
    Leave(usize),
    Heard { interactive_ms: u32, bulk_ms: u32 },
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0usize..4, any::<bool>(), 1u64..500, 50u32..30_000)
            .prop_map(|(tenant, bulk, tokens, left_ms)| Event::Ask { tenant, bulk, tokens, left_ms }),
        2 => (0usize..64).prop_map(Event::Leave),
        1 => (0u32..5_000, 0u32..30_000)
            .prop_map(|(interactive_ms, bulk_ms)| Event::Heard { interactive_ms, bulk_ms }),
    ]
}

proptest! {
    /// Invariant 8, Bands: whatever happens, no bulk enters a pool while a lookup is shed there, nor within the pause
    /// after. And whoever has nothing in flight is never shed for want of room.
    #[test]
    fn no_history_sheds_a_lookup_while_bulk_is_let_in(
        events in prop::collection::vec((event(), 0u32..300), 1..300),
    ) {
        let mut now = some_instant();
        let mut pools = Pools::default();
        let mut under_way: Vec<Entered> = Vec::new();
        let mut lookup_shed: Option<Instant> = None;
        for (event, wait_ms) in events {
            now += wait_ms * MS;
            match event {
                Event::Heard { interactive_ms, bulk_ms } => {
                    pools.heard(region(), [(name(), waits(interactive_ms, bulk_ms))], now);
                }
                Event::Leave(which) if !under_way.is_empty() => {
                    pools.leave(under_way.swap_remove(which % under_way.len()));
                }
                Event::Leave(_) => {}
                Event::Ask { tenant, bulk, tokens, left_ms } => {
                    let priority = if bulk { Priority::Bulk } else { Priority::Interactive };
                    let ask = Ask { left: left_ms * MS, ..ask(tenant, priority, tokens) };
                    let holds = under_way.iter().any(|entered| entered.tenant == tenant && entered.priority == priority);
                    match pools.enter(region(), &name(), &ask, now) {
                        Ok(entered) => {
                            let paused = lookup_shed.is_some_and(|shed| now < shed + BULK_PAUSE);
                            prop_assert!(!bulk || !paused, "bulk enters while lookups are shed");
                            under_way.push(entered);
                        }
                        Err(shed) => {
                            let for_room = matches!(shed.reason, Reason::OverShare | Reason::NoRoom);
                            prop_assert!(holds || !for_room, "{shed:?}");
                            prop_assert!(shed.retry_after >= 200 * MS);
                            if !bulk {
                                lookup_shed = Some(now);
                            }
                        }
                    }
                }
            }
        }
        under_way.into_iter().for_each(|entered| pools.leave(entered));
        prop_assert!(pools.regions.values().flat_map(BTreeMap::values).all(Pool::is_empty));
    }
}

/// A replica that computes one request after another, behind a gateway with the pools and an aggressor's allowance.
struct World {
    now: Instant,
    pools: Pools,
    queue: VecDeque<(Entered, Instant)>,
    /// When what is being computed is done.
    busy_until: Instant,
    computed: u64,
    seed: u64,
}

/// Tokens a second.
const SPEED: u64 = 20_000;
/// Everything but queue and engine: the way there and back, tokenizing.
const AROUND: Duration = Duration::from_millis(20);
const TICK: Duration = Duration::from_micros(100);

impl World {
    fn new() -> World {
        let now = some_instant();
        let queue = VecDeque::new();
        World { now, pools: Pools::default(), queue, busy_until: now, computed: 0, seed: 42 }
    }

    /// Whether something that happens so often in a second happens in this tick.
    fn happens(&mut self, per_second: u64) -> bool {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let ticks = Duration::from_secs(1).as_micros() / TICK.as_micros();
        u128::from(self.seed >> 33) * ticks < u128::from(per_second) << 31
    }

    fn sends(&mut self, tenant: usize, tokens: u64) -> bool {
        let entered =
            self.pools.enter(region(), &name(), &ask(tenant, Priority::Interactive, tokens), self.now);
        entered.map(|entered| self.queue.push_back((entered, self.now))).is_ok()
    }

    /// A tick passes; returns the tenant and the time of what was finished in it.
    fn tick(&mut self, number: u64) -> Vec<(usize, Duration)> {
        self.now += TICK;
        let mut done = Vec::new();
        while self.busy_until <= self.now {
            let Some((entered, since)) = self.queue.pop_front() else { break };
            let takes = Duration::from_nanos(entered.tokens * 1_000_000_000 / SPEED);
            self.busy_until = self.busy_until.max(self.now) + takes;
            self.computed += entered.tokens;
            done.push((entered.tenant, self.busy_until - since + AROUND));
            self.pools.leave(entered);
        }
        if number.is_multiple_of(2_000) {
            let waiting = self.queue.iter().map(|(entered, _)| entered.tokens).sum();
            let waits = Waits::of(Some(waiting), waiting, SPEED as f64);
            self.pools.heard(region(), [(name(), waits)], self.now);
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

/// Somebody sends 100 requests a second; the other so many, of which its limit lets so many through. Returns the first
/// one's p99 over two minutes, how many of its requests were shed, and the tokens that were computed in them. The seconds
/// before are those in which the reports have yet to tell of a queue that is there at once, and in which it flows off.
fn two_tenants(offered: u64, limit: Option<u64>) -> (Duration, u64, u64) {
    let mut world = World::new();
    let limits = Limits { requests_per_second: limit.and_then(NonZeroU64::new), ..Limits::default() };
    let mut allowance = Allowance::new(&limits, world.now);
    let (mut times, mut shed) = (Vec::new(), 0);
    let before = 3 * 10_000;
    for number in 0..before + 120 * 10_000 {
        if number == before {
            (times, shed, world.computed) = (Vec::new(), 0, 0);
        }
        if world.happens(100) && !world.sends(VICTIM, TOKENS) {
            shed += 1;
        }
        let cost = Cost { inputs: 1, tokens: TOKENS };
        if world.happens(offered) && allowance.enter(cost, world.now).is_ok() {
            world.sends(AGGRESSOR, TOKENS);
        }
        let done = world.tick(number);
        times.extend(done.into_iter().filter(|(tenant, _)| *tenant == VICTIM).map(|(_, took)| took));
    }
    (p99(times), shed, world.computed)
}

#[test]
fn an_aggressor_at_twenty_times_its_limit_does_not_move_anothers_p99_by_a_tenth() {
    let (alone, _, _) = two_tenants(0, None);
    let (beside, shed, _) = two_tenants(20 * 50, Some(50));
    assert_eq!(shed, 0);
    assert!(beside <= alone * 11 / 10, "{beside:?} beside it, {alone:?} alone");
}

#[test]
fn an_aggressor_without_a_limit_sheds_itself_and_not_its_neighbour() {
    // Five times what the replica can do.
    let (beside, shed, computed) = two_tenants(5 * SPEED / TOKENS, None);
    assert_eq!(shed, 0, "the neighbour is within its share");
    // The queue of a priority that is shared may be 250 ms, and a tenth more is tried again and again.
    assert!(beside <= AROUND + 300 * MS, "{beside:?}");
    assert!(computed >= 120 * SPEED * 97 / 100, "{computed}: and the replica is kept busy");
}
