//! Tests of the hold queue, as sequences of events in one region.

use super::*;
use crate::some_instant;
use crate::spoke::{PassiveHealth, RAMP_TOKENS, ReplicaOutcome, ReplicaStatus};
use proptest::prelude::*;
use std::collections::BTreeMap;

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

fn name(text: &str) -> DeploymentName {
    text.parse().unwrap()
}

/// Region with this many replicas, none of which has reported a status, and a start time of one second.
struct HoldTest {
    spoke: Spoke,
    now: Instant,
    d: DeploymentName,
}

impl HoldTest {
    fn cold(replicas: u16) -> HoldTest {
        let at = |port| regions::HostPort::from(([10, 0, 0, 1], port));
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=replicas).map(at).collect());
        spoke.set_start_time(&name("d"), Some(S));
        HoldTest { spoke, now: some_instant(), d: name("d") }
    }

    fn within(limits: HoldLimits) -> HoldTest {
        let mut region = HoldTest::cold(1);
        region.spoke.hold_queue = HoldQueue::within(limits);
        region
    }

    fn report_status(&mut self, index: usize, ready: bool, tokens_per_second: f64) {
        let observed = ReplicaStatus {
            model: None,
            failure: None,
            names: [self.d.clone()].into(),
            ready,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: None,
            tokens_per_second,
        };
        self.spoke.observe_replica(index, observed, self.now);
    }

    fn request(&mut self, params: RequestParams) -> Result<HoldDecision, HoldRejection> {
        let RequestParams { tenant, priority, bytes, tokens, left, other_region_in } = params;
        let (d, deadline) = (self.d.clone(), self.now + left);
        let request =
            HoldRequest { deployment: &d, tenant, priority, bytes, tokens, deadline, other_region_in };
        self.spoke.hold_or_forward(&request, self.now)
    }

    fn held(&mut self, params: RequestParams) -> HoldTicket {
        match self.request(params) {
            Ok(HoldDecision::Held { ticket, .. }) => ticket,
            other => panic!("{params:?} is not held: {other:?}"),
        }
    }

    /// Releases held requests and returns their numbers.
    fn released(&mut self) -> Vec<u64> {
        self.spoke.release(self.now).into_iter().map(|release| release.number).collect()
    }

    /// Sends a released request to a replica, which responds.
    fn respond(&mut self, ticket: HoldTicket, tokens: u64) {
        let selected = self
            .spoke
            .select_replica(&self.d, tokens, |_| PassiveHealth::HEALTHY, self.now)
            .expect("a replica is ready");
        self.spoke.return_ticket(ticket);
        self.spoke.finished(&selected, ReplicaOutcome::Responded, self.now);
    }
}

/// Parameters of a request.
#[derive(Clone, Copy, Debug)]
struct RequestParams {
    tenant: &'static str,
    priority: Priority,
    bytes: u64,
    tokens: u64,
    left: Duration,
    other_region_in: Option<Duration>,
}

const INTERACTIVE: RequestParams = RequestParams {
    tenant: "t",
    priority: Priority::Interactive,
    bytes: 40,
    tokens: 10,
    left: Duration::from_secs(30),
    other_region_in: None,
};

#[test]
fn a_request_without_a_replica_goes_to_a_faster_region_or_waits_or_is_rejected_with_a_retry_time() {
    let decision = |left: Duration, other_region_in: Option<Duration>| {
        let decision = HoldTest::cold(1).request(RequestParams { left, other_region_in, ..INTERACTIVE });
        decision.map(|decision| {
            assert!(matches!(decision, HoldDecision::Held { needs_start: true, .. }), "{decision:?}")
        })
    };
    let other_region = Err(HoldRejection::OtherRegion { ready_in: S });
    let too_late = Err(HoldRejection::PastDeadline { ready_in: S });
    assert_eq!(decision(30 * S, None), Ok(()));
    assert_eq!(decision(30 * S, Some(S - MS)), other_region);
    assert_eq!(decision(30 * S, Some(S)), Ok(()), "not sooner there");
    assert_eq!(decision(S + MS, None), Ok(()));
    assert_eq!(decision(S, None), too_late);
    assert_eq!(decision(S, Some(999 * MS)), other_region);
    assert_eq!(decision(S, Some(S)), too_late, "both time out");
    assert_eq!(decision(S, Some(2 * S)), too_late);
}

#[test]
fn a_request_is_not_held_if_a_replica_is_ready_or_none_will_start() {
    let mut region = HoldTest::cold(1);
    region.report_status(0, true, 1000.0);
    assert_eq!(region.request(INTERACTIVE), Ok(HoldDecision::Forward));
    let mut region = HoldTest::cold(1);
    region.spoke.set_start_time(&name("d"), None);
    assert_eq!(region.request(INTERACTIVE), Err(HoldRejection::NotProvisioned));
}

#[test]
fn only_the_first_held_request_triggers_a_start() {
    let mut region = HoldTest::cold(1);
    let needs_start = |region: &mut HoldTest| match region.request(INTERACTIVE) {
        Ok(HoldDecision::Held { ticket, needs_start }) => (ticket, needs_start),
        other => panic!("{other:?}"),
    };
    let (first, triggered) = needs_start(&mut region);
    assert!(triggered);
    assert!(!needs_start(&mut region).1 && !needs_start(&mut region).1);
    region.report_status(0, true, 0.0);
    assert_eq!(region.released(), [1, 2, 3]);
    region.respond(first, 10);
    region.spoke.replica_failed(0, region.now);
    assert!(needs_start(&mut region).1, "the replica has failed");
    let mut region = HoldTest::cold(1);
    let (first, _) = needs_start(&mut region);
    region.spoke.return_ticket(first);
    assert!(needs_start(&mut region).1, "the queue was empty");
}

#[test]
fn interactive_requests_are_released_first_and_the_earliest_deadline_first() {
    let mut region = HoldTest::cold(1);
    let mut hold =
        |priority, left| region.held(RequestParams { priority, left, tokens: RAMP_TOKENS, ..INTERACTIVE });
    let tickets = [
        hold(Priority::Bulk, 2 * S),
        hold(Priority::Interactive, 9 * S),
        hold(Priority::Interactive, 3 * S),
        hold(Priority::Bulk, 20 * S),
        hold(Priority::Interactive, 3 * S),
    ];
    region.report_status(0, true, 0.0);
    let mut tickets: BTreeMap<u64, HoldTicket> =
        tickets.into_iter().map(|ticket| (ticket.number(), ticket)).collect();
    let mut order = Vec::new();
    while let [next] = region.released()[..] {
        order.push(next);
        let ticket = tickets.remove(&next).expect("it is released once");
        region.respond(ticket, RAMP_TOKENS);
        region.report_status(0, true, 1.0);
    }
    assert_eq!(order, [3, 5, 2, 1, 4]);
}

#[test]
fn a_new_replica_is_given_a_little_and_then_twice_as_much() {
    let mut region = HoldTest::cold(1);
    let mut tickets = BTreeMap::new();
    for _ in 0..1000 {
        let ticket = region.held(INTERACTIVE);
        tickets.insert(ticket.number(), ticket);
    }
    region.report_status(0, true, 0.0);
    let mut rounds = Vec::new();
    while !tickets.is_empty() {
        let released = region.released();
        rounds.push(released.len());
        assert!(region.released().is_empty(), "there is no more capacity");
        for number in released {
            let ticket = tickets.remove(&number).expect("it is released once");
            region.respond(ticket, 10);
        }
    }
    assert_eq!(rounds, [102, 204, 408, 286]);
}

#[test]
fn a_replica_is_given_the_work_of_half_a_second() {
    let releases = |replicas: u16, tokens_per_second: f64| {
        let mut region = HoldTest::cold(replicas);
        let _tickets: Vec<_> = (0..1000).map(|_| region.held(INTERACTIVE)).collect();
        for index in 0..usize::from(replicas) {
            region.report_status(index, true, tokens_per_second);
            region.spoke.replicas.with(index, |replica| replica.responded(1 << 40));
        }
        region.released().len()
    };
    assert_eq!(releases(1, 4000.0), 200);
    assert_eq!(releases(2, 4000.0), 400);
    assert_eq!(releases(1, 1.0), 102, "a batch or two in any case");
    let mut region = HoldTest::cold(1);
    let _large = [region.held(RequestParams { tokens: 1 << 30, ..INTERACTIVE }), region.held(INTERACTIVE)];
    region.report_status(0, true, 0.0);
    assert_eq!(region.released(), [1], "an idle replica takes a request of any size");
}

#[test]
fn a_new_request_does_not_overtake_held_ones() {
    let mut region = HoldTest::cold(1);
    let first = region.held(RequestParams { tokens: RAMP_TOKENS, ..INTERACTIVE });
    let second = region.held(RequestParams { tokens: RAMP_TOKENS, left: 29 * S, ..INTERACTIVE });
    region.report_status(0, true, 0.0);
    assert_eq!(region.released(), [2]);
    assert!(region.spoke.has_held_requests(&region.d));
    let third = region.held(INTERACTIVE);
    region.respond(second, RAMP_TOKENS);
    assert_eq!(region.released(), [1, 3]);
    assert_eq!(region.request(INTERACTIVE), Ok(HoldDecision::Forward), "the queue is empty");
    region.spoke.return_ticket(first);
    region.spoke.return_ticket(third);
    assert_eq!(region.spoke.hold_queue.queues(), 0);
}

#[test]
fn the_queue_counts_in_the_comparison_with_a_warm_region_and_is_no_reason_to_reject() {
    let mut region = HoldTest::cold(1);
    region.report_status(0, true, 1000.0);
    region.spoke.replica_failed(0, region.now);
    let params = RequestParams { tokens: 2000, left: 10 * S, ..INTERACTIVE };
    let _first = region.held(params);
    let ready_in = 3 * S;
    let elsewhere = |other: Duration| RequestParams { other_region_in: Some(other), ..params };
    assert_eq!(region.request(elsewhere(3 * S - MS)), Err(HoldRejection::OtherRegion { ready_in }));
    assert_eq!(
        region.request(RequestParams { left: 2 * S, ..elsewhere(S + MS) }).map(drop),
        Ok(()),
        "it would be the first"
    );
    let _second = region.held(RequestParams { left: 10 * S, ..elsewhere(5 * S) });
    let _third = region.held(RequestParams { left: S + MS, ..params });
    assert_eq!(
        region.request(RequestParams { left: S, ..params }),
        Err(HoldRejection::PastDeadline { ready_in: S })
    );
}

#[test]
fn each_limit_is_enforced_exactly() {
    let full = |region: &mut HoldTest, params: RequestParams, limit: HoldLimit| {
        let rejected = region.request(params);
        assert_eq!(rejected, Err(HoldRejection::Full { limit, ready_in: S }));
        let elsewhere = RequestParams { other_region_in: Some(2 * S), ..params };
        assert_eq!(
            region.request(elsewhere),
            Err(HoldRejection::OtherRegion { ready_in: S }),
            "a slower region instead of a rejection"
        );
    };
    const TENANTS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
    let mut region = HoldTest::cold(1);
    let mut tickets = Vec::new();
    for tenant in TENANTS {
        let params = RequestParams { tenant, bytes: 1, ..INTERACTIVE };
        tickets.extend((0..HELD_MAX / 10).map(|_| region.held(params)));
        full(&mut region, params, HoldLimit::TenantRequests);
    }
    assert_eq!(region.spoke.held_totals(), (HELD_MAX, HELD_MAX as u64));
    full(&mut region, RequestParams { tenant: "k", ..INTERACTIVE }, HoldLimit::Requests);
    region.spoke.return_ticket(tickets.pop().expect("there are ten thousand"));
    tickets.push(region.held(RequestParams { tenant: "k", ..INTERACTIVE }));
    full(&mut region, RequestParams { tenant: "j", ..INTERACTIVE }, HoldLimit::Requests);

    let mut region = HoldTest::cold(1);
    let whole = RequestParams { bytes: LARGEST_BODY_BYTES, ..INTERACTIVE };
    let _tickets: Vec<_> =
        TENANTS[..8].iter().map(|tenant| region.held(RequestParams { tenant, ..whole })).collect();
    full(&mut region, RequestParams { tenant: "a", bytes: 1, ..INTERACTIVE }, HoldLimit::TenantBytes);
    assert_eq!(region.spoke.held_totals(), (8, HELD_BYTES_MAX));
    assert_eq!(region.request(RequestParams { tenant: "i", bytes: 0, ..INTERACTIVE }).map(drop), Ok(()));
    full(&mut region, RequestParams { tenant: "i", bytes: 1, ..INTERACTIVE }, HoldLimit::Bytes);
}

#[test]
fn a_returned_ticket_is_removed_at_once() {
    let mut region = HoldTest::cold(1);
    let tickets = [
        region.held(INTERACTIVE),
        region.held(RequestParams { tenant: "u", ..INTERACTIVE }),
        region.held(INTERACTIVE),
    ];
    assert_eq!(region.spoke.held(&region.d), HeldTotals { requests: 3, tokens: 30 });
    let [first, second, third] = tickets;
    region.spoke.return_ticket(second);
    assert_eq!(region.spoke.held(&region.d), HeldTotals { requests: 2, tokens: 20 });
    assert_eq!(region.spoke.held_totals(), (2, 80));
    region.report_status(0, true, 0.0);
    assert_eq!(region.released(), [1, 3]);
    region.spoke.return_ticket(first);
    region.spoke.return_ticket(third);
    assert_eq!((region.spoke.held(&region.d), region.spoke.held_totals()), (HeldTotals::default(), (0, 0)));
    assert_eq!(region.request(INTERACTIVE), Ok(HoldDecision::Forward));
}

#[test]
fn held_requests_are_released_when_no_replica_will_start() {
    let mut region = HoldTest::cold(1);
    let tickets = [region.held(INTERACTIVE), region.held(INTERACTIVE)];
    assert!(region.spoke.release(region.now).is_empty());
    region.spoke.set_start_time(&name("d"), None);
    let unservable = |number| Release { number, reason: ReleaseReason::Unservable };
    assert_eq!(region.spoke.release(region.now), [unservable(1), unservable(2)]);
    assert_eq!(region.spoke.held_totals(), (0, 0));
    tickets.into_iter().for_each(|ticket| region.spoke.return_ticket(ticket));
}

#[test]
fn a_release_contains_the_cold_start_time() {
    let mut region = HoldTest::cold(1);
    let _first = region.held(INTERACTIVE);
    region.now += 700 * MS;
    let _second = region.held(INTERACTIVE);
    region.now += 100 * MS;
    region.report_status(0, true, 0.0);
    let reason = ReleaseReason::ReplicaReady { cold_start: Some(800 * MS) };
    assert_eq!(
        region.spoke.release(region.now),
        [Release { number: 1, reason }, Release { number: 2, reason }]
    );
}

#[test]
fn a_report_contains_the_time_until_a_replica_is_ready() {
    let mut region = HoldTest::cold(1);
    let ready_in = |region: &HoldTest| region.spoke.loads(region.now)[&region.d].ready_in;
    assert_eq!(ready_in(&region), Some(S));
    region.spoke.set_provisioning(&name("d"), vec![300 * MS], region.now);
    region.now += 100 * MS;
    region.report_status(0, false, 0.0);
    assert_eq!(ready_in(&region), Some(200 * MS));
    region.report_status(0, true, 0.0);
    assert_eq!(ready_in(&region), None);
}

#[test]
fn a_report_contains_the_waiting_time_of_the_queue() {
    let mut region = HoldTest::cold(1);
    region.report_status(0, true, 1000.0);
    region.spoke.replica_failed(0, region.now);
    let ready_in = |region: &HoldTest| region.spoke.loads(region.now)[&region.d].ready_in;
    let _tickets = [
        region.held(RequestParams { tokens: 2000, ..INTERACTIVE }),
        region.held(RequestParams { tokens: 3000, ..INTERACTIVE }),
    ];
    assert_eq!(ready_in(&region), Some(6 * S), "the start time and the queue");
    region.report_status(0, true, 1000.0);
    assert_eq!(ready_in(&region), Some(5 * S));
    assert_eq!(region.released(), [1]);
    assert_eq!(ready_in(&region), Some(3 * S));
}

#[test]
fn ten_thousand_cold_starts_lose_no_request() {
    let mut region = HoldTest::cold(1);
    for start in 0..10_000u32 {
        let mut tickets = BTreeMap::new();
        for request in 0..start % 7 + 1 {
            let ticket =
                region.held(RequestParams { tokens: u64::from(1 + start * request % 900), ..INTERACTIVE });
            tickets.insert(ticket.number(), ticket);
            region.now += MS;
        }
        region.report_status(0, false, 0.0);
        assert!(region.released().is_empty(), "no replica is ready");
        region.report_status(0, true, 0.0);
        while let released = region.released()
            && !released.is_empty()
        {
            for number in released {
                region.respond(tickets.remove(&number).expect("it is released once"), 10);
            }
        }
        assert!(tickets.is_empty(), "all requests are released at start {start}");
        assert_eq!(region.request(INTERACTIVE), Ok(HoldDecision::Forward));
        region.spoke.replica_failed(0, region.now);
    }
    assert_eq!((region.spoke.held_totals(), region.spoke.hold_queue.queues()), ((0, 0), 0));
}

/// Event of a region with held requests.
#[derive(Clone, Debug)]
enum Event {
    Arrival { tenant: usize, bulk: bool, bytes: u64, tokens: u64, left_ms: u64 },
    Leave(usize),
    Ready(bool),
    Respond(usize),
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..3usize, any::<bool>(), 0..60u64, 1..3000u64, 0..5000u64).prop_map(
            |(tenant, bulk, bytes, tokens, left_ms)| Event::Arrival { tenant, bulk, bytes, tokens, left_ms }
        ),
        1 => any::<usize>().prop_map(Event::Leave),
        1 => any::<bool>().prop_map(Event::Ready),
        3 => any::<usize>().prop_map(Event::Respond),
        1 => (0..900u64).prop_map(Event::Wait),
    ]
}

proptest! {
    /// Invariants 2 and 6, and the order: for any sequence of events, every held request is released exactly once or
    /// leaves, all limits hold after every step, no request is released before a more urgent one, and in the end the
    /// queue is empty.
    #[test]
    fn every_ticket_ends_once_within_the_limits_and_in_order(
        events in prop::collection::vec(event(), 1..200)
    ) {
        let limits = HoldLimits { requests: 12, bytes: 200, tenant_requests: 6, tenant_bytes: 120 };
        let mut region = HoldTest::within(limits);
        let mut waiting: BTreeMap<u64, (HoldTicket, usize, u64, u64)> = BTreeMap::new();
        let mut released: Vec<(HoldTicket, u64)> = Vec::new();
        for event in events {
            match event {
                Event::Arrival { tenant, bulk, bytes, tokens, left_ms } => {
                    let priority = if bulk { Priority::Bulk } else { Priority::Interactive };
                    let (names, left) = (["a", "b", "c"], Duration::from_millis(left_ms));
                    let params = RequestParams { tenant: names[tenant], priority, bytes, tokens, left, other_region_in: None };
                    if let Ok(HoldDecision::Held { ticket, .. }) = region.request(params) {
                        waiting.insert(ticket.number(), (ticket, tenant, bytes, tokens));
                    }
                }
                Event::Leave(which) => {
                    let number = waiting.keys().nth(which % waiting.len().max(1)).copied();
                    if let Some((ticket, ..)) = number.and_then(|number| waiting.remove(&number)) {
                        region.spoke.return_ticket(ticket);
                    }
                }
                Event::Ready(true) => region.report_status(0, true, 0.0),
                Event::Ready(false) => region.spoke.replica_failed(0, region.now),
                Event::Respond(which) if !released.is_empty() => {
                    let (ticket, tokens) = released.swap_remove(which % released.len());
                    match region.spoke.select_replica(&region.d, tokens, |_| PassiveHealth::HEALTHY, region.now) {
                        Ok(selected) => {
                            region.spoke.return_ticket(ticket);
                            region.spoke.finished(&selected, ReplicaOutcome::Responded, region.now);
                        }
                        Err(_) => region.spoke.return_ticket(ticket),
                    }
                }
                Event::Respond(_) => {}
                Event::Wait(ms) => region.now += Duration::from_millis(ms),
            }
            for release in region.spoke.release(region.now) {
                let (ticket, _, _, tokens) = waiting.remove(&release.number).expect("a released request was held, and is released once");
                let more_urgent = waiting.values().find(|(other, ..)| other.position < ticket.position);
                prop_assert!(more_urgent.is_none(), "{:?} is released before {more_urgent:?}", ticket);
                released.push((ticket, tokens));
            }
            let usage = |tenant: Option<usize>| {
                let of = waiting.values().filter(|(_, owner, ..)| tenant.is_none_or(|tenant| tenant == *owner));
                of.fold((0, 0), |(requests, sum), (_, _, bytes, _)| (requests + 1, sum + bytes))
            };
            prop_assert_eq!(region.spoke.held_totals(), usage(None));
            let tokens = waiting.values().map(|(.., tokens)| *tokens).sum();
            prop_assert_eq!(region.spoke.held(&region.d), HeldTotals { requests: waiting.len(), tokens });
            prop_assert!(usage(None).0 <= limits.requests && usage(None).1 <= limits.bytes);
            for tenant in 0..3 {
                let (requests, bytes) = usage(Some(tenant));
                prop_assert!(requests <= limits.tenant_requests && bytes <= limits.tenant_bytes);
            }
        }
        waiting.into_values().for_each(|(ticket, ..)| region.spoke.return_ticket(ticket));
        released.into_iter().for_each(|(ticket, _)| region.spoke.return_ticket(ticket));
        prop_assert_eq!(region.spoke.held_totals(), (0, 0));
        prop_assert_eq!(region.spoke.hold_queue.released_tokens(), 0);
        prop_assert_eq!(region.spoke.hold_queue.queues(), 0);
    }
}
