//! What becomes of those who find no replica, told as what happens to their region.

use super::*;
use crate::some_instant;
use crate::spoke::{ReplicaOutcome, RAMP_TOKENS, ReplicaStatus, PassiveHealth};
use proptest::prelude::*;
use std::collections::BTreeMap;

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

fn name(text: &str) -> DeploymentName {
    text.parse().unwrap()
}

/// A region with so many replicas, none of which was heard, in which a start takes a second.
struct Region {
    spoke: Spoke,
    now: Instant,
    d: DeploymentName,
}

impl Region {
    fn cold(replicas: u16) -> Region {
        let at = |port| std::net::SocketAddr::from(([10, 0, 0, 1], port));
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=replicas).map(at).collect());
        spoke.set_start_time(&name("d"), Some(S));
        Region { spoke, now: some_instant(), d: name("d") }
    }

    fn within(limits: HoldLimits) -> Region {
        let mut region = Region::cold(1);
        region.spoke.line = HoldQueue::within(limits);
        region
    }

    fn says(&mut self, index: usize, ready: bool, tokens_per_second: f64) {
        let observed = ReplicaStatus {
            model: None,
            names: [self.d.clone()].into(),
            ready,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: None,
            tokens_per_second,
        };
        self.spoke.observe_replica(index, observed, self.now);
    }

    fn comes(&mut self, ask: Ask) -> Result<HoldDecision, HoldRejection> {
        let Ask { tenant, priority, bytes, tokens, left, other_region_in } = ask;
        let (d, deadline) = (self.d.clone(), self.now + left);
        let comes = HoldRequest { deployment: &d, tenant, priority, bytes, tokens, deadline, other_region_in };
        self.spoke.comes(&comes, self.now)
    }

    fn held(&mut self, ask: Ask) -> HoldTicket {
        match self.comes(ask) {
            Ok(HoldDecision::Held { ticket, .. }) => ticket,
            other => panic!("{ask:?} is not held: {other:?}"),
        }
    }

    /// The numbers of those who are released now.
    fn released(&mut self) -> Vec<u64> {
        self.spoke.release(self.now).into_iter().map(|release| release.number).collect()
    }

    /// Whoever has this ticket, and was released, goes to a replica and is answered there.
    fn answered(&mut self, ticket: HoldTicket, tokens: u64) {
        let choice = self.spoke.select_replica(&self.d, tokens, |_| PassiveHealth::HEALTHY, self.now).expect("it was released");
        self.spoke.return_ticket(ticket);
        self.spoke.finished(&choice, ReplicaOutcome::Responded, self.now);
    }
}

/// A lookup of ten tokens.
#[derive(Clone, Copy, Debug)]
struct Ask {
    tenant: &'static str,
    priority: HoldPriority,
    bytes: u64,
    tokens: u64,
    left: Duration,
    other_region_in: Option<Duration>,
}

const LOOKUP: Ask = Ask {
    tenant: "t",
    priority: HoldPriority::Interactive,
    bytes: 40,
    tokens: 10,
    left: Duration::from_secs(30),
    other_region_in: None,
};

#[test]
fn whoever_finds_nobody_goes_elsewhere_if_that_is_sooner_waits_if_that_is_in_time_and_else_is_told_when() {
    let fate = |left: Duration, other_region_in: Option<Duration>| {
        let fate = Region::cold(1).comes(Ask { left, other_region_in, ..LOOKUP });
        fate.map(|fate| assert!(matches!(fate, HoldDecision::Held { needs_start: true, .. }), "{fate:?}"))
    };
    let other_region_in = Err(HoldRejection::OtherRegion { ready_in: S });
    let too_late = Err(HoldRejection::PastDeadline { ready_in: S });
    assert_eq!(fate(30 * S, None), Ok(()));
    assert_eq!(fate(30 * S, Some(S - MS)), other_region_in);
    assert_eq!(fate(30 * S, Some(S)), Ok(()), "no sooner there");
    assert_eq!(fate(S + MS, None), Ok(()));
    assert_eq!(fate(S, None), too_late);
    assert_eq!(fate(S, Some(999 * MS)), other_region_in);
    assert_eq!(fate(S, Some(S)), too_late, "nobody is in time");
    assert_eq!(fate(S, Some(2 * S)), too_late);
}

#[test]
fn where_a_replica_is_ready_nobody_waits_and_where_nobody_starts_one_neither() {
    let mut region = Region::cold(1);
    region.says(0, true, 1000.0);
    assert_eq!(region.comes(LOOKUP), Ok(HoldDecision::Forward));
    let mut region = Region::cold(1);
    region.spoke.set_start_time(&name("d"), None);
    assert_eq!(region.comes(LOOKUP), Err(HoldRejection::NotProvisioned));
}

#[test]
fn the_first_who_waits_wakes_whoever_starts_replicas_and_no_other() {
    let mut region = Region::cold(1);
    let needs_start = |region: &mut Region| match region.comes(LOOKUP) {
        Ok(HoldDecision::Held { ticket, needs_start }) => (ticket, needs_start),
        other => panic!("{other:?}"),
    };
    let (first, woke) = needs_start(&mut region);
    assert!(woke);
    assert!(!needs_start(&mut region).1 && !needs_start(&mut region).1);
    region.says(0, true, 0.0);
    assert_eq!(region.released(), [1, 2, 3]);
    region.answered(first, 10);
    region.spoke.replica_failed(0, region.now);
    assert!(needs_start(&mut region).1, "it has come and gone");
    let mut region = Region::cold(1);
    let (first, _) = needs_start(&mut region);
    region.spoke.left(first);
    assert!(needs_start(&mut region).1, "all had left");
}

#[test]
fn lookups_go_first_and_of_those_the_one_that_has_the_least_time() {
    let mut region = Region::cold(1);
    let mut enters = |priority, left| region.held(Ask { priority, left, tokens: RAMP_TOKENS, ..LOOKUP });
    let tickets = [
        enters(HoldPriority::Bulk, 2 * S),
        enters(HoldPriority::Interactive, 9 * S),
        enters(HoldPriority::Interactive, 3 * S),
        enters(HoldPriority::Bulk, 20 * S),
        enters(HoldPriority::Interactive, 3 * S),
    ];
    region.says(0, true, 0.0);
    let mut tickets: BTreeMap<u64, HoldTicket> =
        tickets.into_iter().map(|ticket| (ticket.number(), ticket)).collect();
    let mut order = Vec::new();
    while let [next] = region.released()[..] {
        order.push(next);
        let ticket = tickets.remove(&next).expect("it is released once");
        region.answered(ticket, RAMP_TOKENS);
        region.says(0, true, 1.0);
    }
    assert_eq!(order, [3, 5, 2, 1, 4]);
}

#[test]
fn a_replica_that_has_just_become_ready_is_given_a_little_and_then_twice_as_much() {
    let mut region = Region::cold(1);
    let mut tickets = BTreeMap::new();
    for _ in 0..1000 {
        let ticket = region.held(LOOKUP);
        tickets.insert(ticket.number(), ticket);
    }
    region.says(0, true, 0.0);
    let mut rounds = Vec::new();
    while !tickets.is_empty() {
        let released = region.released();
        rounds.push(released.len());
        assert!(region.released().is_empty(), "there is room for so many and no more");
        for number in released {
            let ticket = tickets.remove(&number).expect("it is released once");
            region.answered(ticket, 10);
        }
    }
    assert_eq!(rounds, [102, 204, 408, 286]);
}

#[test]
fn a_replica_is_given_what_it_does_in_half_a_second() {
    let releases = |replicas: u16, tokens_per_second: f64| {
        let mut region = Region::cold(replicas);
        let _tickets: Vec<_> = (0..1000).map(|_| region.held(LOOKUP)).collect();
        for index in 0..usize::from(replicas) {
            region.says(index, true, tokens_per_second);
            region.spoke.replicas.with(index, |replica| replica.answered(1 << 40));
        }
        region.released().len()
    };
    assert_eq!(releases(1, 4000.0), 200);
    assert_eq!(releases(2, 4000.0), 400);
    assert_eq!(releases(1, 1.0), 102, "a batch or two in any case");
    let mut region = Region::cold(1);
    let _large = [region.held(Ask { tokens: 1 << 30, ..LOOKUP }), region.held(LOOKUP)];
    region.says(0, true, 0.0);
    assert_eq!(region.released(), [1], "whoever has nothing to do takes the largest");
}

#[test]
fn nobody_who_comes_goes_before_those_who_wait() {
    let mut region = Region::cold(1);
    let first = region.held(Ask { tokens: RAMP_TOKENS, ..LOOKUP });
    let second = region.held(Ask { tokens: RAMP_TOKENS, left: 29 * S, ..LOOKUP });
    region.says(0, true, 0.0);
    assert_eq!(region.released(), [2]);
    assert!(region.spoke.has_held_requests(&region.d));
    let third = region.held(LOOKUP);
    region.answered(second, RAMP_TOKENS);
    assert_eq!(region.released(), [1, 3]);
    assert_eq!(region.comes(LOOKUP), Ok(HoldDecision::Forward), "the line is gone");
    region.spoke.left(first);
    region.spoke.left(third);
    assert_eq!(region.spoke.line.queues(), 0);
}

#[test]
fn a_line_counts_against_a_region_that_is_warm_and_is_no_reason_to_refuse() {
    let mut region = Region::cold(1);
    region.says(0, true, 1000.0);
    region.spoke.replica_failed(0, region.now);
    let ask = Ask { tokens: 2000, left: 10 * S, ..LOOKUP };
    let _first = region.held(ask);
    let ready_in = 3 * S;
    let there = |there: Duration| Ask { other_region_in: Some(there), ..ask };
    assert_eq!(region.comes(there(3 * S - MS)), Err(HoldRejection::OtherRegion { ready_in }));
    assert_eq!(region.comes(Ask { left: 2 * S, ..there(S + MS) }).map(drop), Ok(()), "it would be the first");
    let _second = region.held(Ask { left: 10 * S, ..there(5 * S) });
    let _third = region.held(Ask { left: S + MS, ..ask });
    assert_eq!(region.comes(Ask { left: S, ..ask }), Err(HoldRejection::PastDeadline { ready_in: S }));
}

#[test]
fn each_bound_holds_at_it_and_one_past_it() {
    let full = |region: &mut Region, ask: Ask, limit: HoldLimit| {
        let refused = region.comes(ask);
        assert_eq!(refused, Err(HoldRejection::Full { limit, ready_in: S }));
        let there = Ask { other_region_in: Some(2 * S), ..ask };
        assert_eq!(region.comes(there), Err(HoldRejection::OtherRegion { ready_in: S }), "late, and not refused");
    };
    const TENANTS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
    let mut region = Region::cold(1);
    let mut tickets = Vec::new();
    for tenant in TENANTS {
        let ask = Ask { tenant, bytes: 1, ..LOOKUP };
        tickets.extend((0..HELD_MAX / 10).map(|_| region.held(ask)));
        full(&mut region, ask, HoldLimit::TenantRequests);
    }
    assert_eq!(region.spoke.held_totals(), (HELD_MAX, HELD_MAX as u64));
    full(&mut region, Ask { tenant: "k", ..LOOKUP }, HoldLimit::Requests);
    region.spoke.return_ticket(tickets.pop().expect("ten thousand of them"));
    tickets.push(region.held(Ask { tenant: "k", ..LOOKUP }));
    full(&mut region, Ask { tenant: "j", ..LOOKUP }, HoldLimit::Requests);

    let mut region = Region::cold(1);
    let whole = Ask { bytes: LARGEST_BODY_BYTES, ..LOOKUP };
    let _tickets: Vec<_> = TENANTS[..8].iter().map(|tenant| region.held(Ask { tenant, ..whole })).collect();
    full(&mut region, Ask { tenant: "a", bytes: 1, ..LOOKUP }, HoldLimit::TenantBytes);
    assert_eq!(region.spoke.held_totals(), (8, HELD_BYTES_MAX));
    assert_eq!(region.comes(Ask { tenant: "i", bytes: 0, ..LOOKUP }).map(drop), Ok(()));
    full(&mut region, Ask { tenant: "i", bytes: 1, ..LOOKUP }, HoldLimit::Bytes);
}

#[test]
fn whoever_leaves_is_forgotten_at_once() {
    let mut region = Region::cold(1);
    let tickets = [region.held(LOOKUP), region.held(Ask { tenant: "u", ..LOOKUP }), region.held(LOOKUP)];
    assert_eq!(region.spoke.held(&region.d), HeldTotals { requests: 3, tokens: 30 });
    let [first, second, third] = tickets;
    region.spoke.left(second);
    assert_eq!(region.spoke.held(&region.d), HeldTotals { requests: 2, tokens: 20 });
    assert_eq!(region.spoke.held_totals(), (2, 80));
    region.says(0, true, 0.0);
    assert_eq!(region.released(), [1, 3]);
    region.spoke.left(first);
    region.spoke.left(third);
    assert_eq!((region.spoke.held(&region.d), region.spoke.held_totals()), (HeldTotals::default(), (0, 0)));
    assert_eq!(region.comes(LOOKUP), Ok(HoldDecision::Forward));
}

#[test]
fn those_for_whom_nobody_starts_a_replica_any_more_are_told() {
    let mut region = Region::cold(1);
    let tickets = [region.held(LOOKUP), region.held(LOOKUP)];
    assert!(region.spoke.release(region.now).is_empty());
    region.spoke.set_start_time(&name("d"), None);
    let nothing = |number| Release { number, to: ReleaseReason::Unservable };
    assert_eq!(region.spoke.release(region.now), [nothing(1), nothing(2)]);
    assert_eq!(region.spoke.held_totals(), (0, 0));
    tickets.into_iter().for_each(|ticket| region.spoke.return_ticket(ticket));
}

#[test]
fn whoever_is_called_knows_how_long_the_replica_took() {
    let mut region = Region::cold(1);
    let _first = region.held(LOOKUP);
    region.now += 700 * MS;
    let _second = region.held(LOOKUP);
    region.now += 100 * MS;
    region.says(0, true, 0.0);
    let to = ReleaseReason::Replica { cold_start: Some(800 * MS) };
    assert_eq!(region.spoke.release(region.now), [Release { number: 1, to }, Release { number: 2, to }]);
}

#[test]
fn a_report_says_when_a_replica_will_be_ready_until_one_is() {
    let mut region = Region::cold(1);
    let ready_in = |region: &Region| region.spoke.report(1, region.now).deployments[&region.d].ready_in;
    assert_eq!(ready_in(&region), Some(S));
    region.spoke.set_provisioning(&name("d"), vec![300 * MS], region.now);
    region.now += 100 * MS;
    region.says(0, false, 0.0);
    assert_eq!(ready_in(&region), Some(200 * MS));
    region.says(0, true, 0.0);
    assert_eq!(ready_in(&region), None);
}

#[test]
fn a_report_says_how_long_the_line_is_while_there_is_one() {
    let mut region = Region::cold(1);
    region.says(0, true, 1000.0);
    region.spoke.replica_failed(0, region.now);
    let waits = |region: &Region| region.spoke.report(1, region.now).deployments[&region.d].ready_in;
    let _tickets = [region.held(Ask { tokens: 2000, ..LOOKUP }), region.held(Ask { tokens: 3000, ..LOOKUP })];
    assert_eq!(has_waiting(&region), Some(6 * S), "a start, and what waits");
    region.says(0, true, 1000.0);
    assert_eq!(has_waiting(&region), Some(5 * S));
    assert_eq!(region.released(), [1]);
    assert_eq!(has_waiting(&region), Some(3 * S));
}

#[test]
fn ten_thousand_starts_from_nothing_lose_nobody() {
    let mut region = Region::cold(1);
    for start in 0..10_000u32 {
        let mut tickets = BTreeMap::new();
        for request in 0..start % 7 + 1 {
            let ticket = region.held(Ask { tokens: u64::from(1 + start * request % 900), ..LOOKUP });
            tickets.insert(ticket.number(), ticket);
            region.now += MS;
        }
        region.says(0, false, 0.0);
        assert!(region.released().is_empty(), "nobody is ready");
        region.says(0, true, 0.0);
        while let released = region.released()
            && !released.is_empty()
        {
            for number in released {
                region.answered(tickets.remove(&number).expect("it is released once"), 10);
            }
        }
        assert!(tickets.is_empty(), "everybody is released at start {start}");
        assert_eq!(region.comes(LOOKUP), Ok(HoldDecision::Forward));
        region.spoke.replica_failed(0, region.now);
    }
    assert_eq!((region.spoke.held_totals(), region.spoke.line.queues()), ((0, 0), 0));
}

/// What can happen to a region in which requests wait.
#[derive(Clone, Debug)]
enum Event {
    HoldRequest { tenant: usize, bulk: bool, bytes: u64, tokens: u64, left_ms: u64 },
    Leaves(usize),
    Ready(bool),
    Answers(usize),
    Passes(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..3usize, any::<bool>(), 0..60u64, 1..3000u64, 0..5000u64).prop_map(
            |(tenant, bulk, bytes, tokens, left_ms)| Event::HoldRequest { tenant, bulk, bytes, tokens, left_ms }
        ),
        1 => any::<usize>().prop_map(Event::Leaves),
        1 => any::<bool>().prop_map(Event::Ready),
        3 => any::<usize>().prop_map(Event::Answers),
        1 => (0..900u64).prop_map(Event::Passes),
    ]
}

proptest! {
    /// Invariants 2 and 6, and the order: whatever comes in whatever order, whoever is held is released once or leaves, all
    /// limits hold after every step, nobody is released before somebody more urgent, and in the end there is room for all.
    #[test]
    fn every_ticket_ends_once_within_the_bounds_and_in_its_order(
        events in prop::collection::vec(event(), 1..200)
    ) {
        let limits = HoldLimits { requests: 12, bytes: 200, tenant_requests: 6, tenant_bytes: 120 };
        let mut region = Region::within(limits);
        let mut waiting: BTreeMap<u64, (HoldTicket, usize, u64, u64)> = BTreeMap::new();
        let mut released: Vec<(HoldTicket, u64)> = Vec::new();
        for event in events {
            match event {
                Event::HoldRequest { tenant, bulk, bytes, tokens, left_ms } => {
                    let priority = if bulk { HoldPriority::Bulk } else { HoldPriority::Interactive };
                    let (names, left) = (["a", "b", "c"], Duration::from_millis(left_ms));
                    let ask = Ask { tenant: names[tenant], priority, bytes, tokens, left, other_region_in: None };
                    if let Ok(HoldDecision::Held { ticket, .. }) = region.comes(ask) {
                        waiting.insert(ticket.number(), (ticket, tenant, bytes, tokens));
                    }
                }
                Event::Leaves(which) => {
                    let number = waiting.keys().nth(which % waiting.len().max(1)).copied();
                    if let Some((ticket, ..)) = number.and_then(|number| waiting.remove(&number)) {
                        region.spoke.return_ticket(ticket);
                    }
                }
                Event::Ready(true) => region.says(0, true, 0.0),
                Event::Ready(false) => region.spoke.replica_failed(0, region.now),
                Event::Answers(which) if !released.is_empty() => {
                    let (ticket, tokens) = released.swap_remove(which % released.len());
                    match region.spoke.select_replica(&region.d, tokens, |_| PassiveHealth::HEALTHY, region.now) {
                        Ok(choice) => {
                            region.spoke.return_ticket(ticket);
                            region.spoke.finished(&choice, ReplicaOutcome::Responded, region.now);
                        }
                        Err(_) => region.spoke.return_ticket(ticket),
                    }
                }
                Event::Answers(_) => {}
                Event::Passes(ms) => region.now += Duration::from_millis(ms),
            }
            for release in region.spoke.release(region.now) {
                let (ticket, _, _, tokens) = waiting.remove(&release.number).expect("who is released waits, and is released once");
                let more_urgent = waiting.values().find(|(other, ..)| other.position < ticket.position);
                prop_assert!(more_urgent.is_none(), "{:?} goes before {more_urgent:?}", ticket);
                released.push((ticket, tokens));
            }
            let bytes = |whose: Option<usize>| {
                let of = waiting.values().filter(|(_, tenant, ..)| whose.is_none_or(|whose| whose == *tenant));
                of.fold((0, 0), |(requests, sum), (_, _, bytes, _)| (requests + 1, sum + bytes))
            };
            prop_assert_eq!(region.spoke.held_totals(), bytes(None));
            let tokens = waiting.values().map(|(.., tokens)| *tokens).sum();
            prop_assert_eq!(region.spoke.held(&region.d), HeldTotals { requests: waiting.len(), tokens });
            prop_assert!(bytes(None).0 <= limits.requests && bytes(None).1 <= limits.bytes);
            for tenant in 0..3 {
                let (requests, bytes) = bytes(Some(tenant));
                prop_assert!(requests <= limits.tenant_requests && bytes <= limits.tenant_bytes);
            }
        }
        waiting.into_values().for_each(|(ticket, ..)| region.spoke.return_ticket(ticket));
        released.into_iter().for_each(|(ticket, _)| region.spoke.return_ticket(ticket));
        prop_assert_eq!(region.spoke.held_totals(), (0, 0));
        prop_assert_eq!(region.spoke.line.released_tokens(), 0);
        prop_assert_eq!(region.spoke.line.queues(), 0);
    }
}
