use super::*;
use crate::observed::RegionStatus;
use crate::some_instant;
use scheduler_api::traffic::ObservedLoad;

const SECOND: Duration = Duration::from_secs(1);
const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

fn id(region: &str) -> RegionId {
    region.parse().unwrap()
}

fn name() -> DeploymentName {
    "minilm".parse().unwrap()
}

fn observed(health: Health) -> ObservedRegion {
    let load = ObservedLoad { ready: 1, pending_tokens: 10, tokens_per_second: 900, held_for: None };
    ObservedRegion {
        health,
        report_age: Some(Duration::from_millis(100)),
        rtt: Duration::from_millis(90),
        in_flight: 1,
        loads: BTreeMap::from([(name(), load)]),
    }
}

/// Returns the report of a gateway in America with this many requests to Europe in a second.
fn report(boot_id: u64, requests: u64, health: Health) -> GatewayTraffic {
    let mut latencies = LatencyHistogram::default();
    (0..requests).for_each(|_| latencies.record(Duration::from_millis(100)));
    let served = ServedTraffic { requests, failed: 0, tokens: requests * 8, latencies };
    let tenant = TenantTraffic { requests, failed: 0, limited: 1, inputs: requests, tokens: requests * 8 };
    GatewayTraffic {
        gateway: GatewayBoot { region: id(AMERICA), boot_id },
        generation: Some(Generation { epoch: 1, number: 1 }),
        interval: SECOND,
        in_flight: 1,
        regions: BTreeMap::from([(id(EUROPE), observed(health))]),
        served: BTreeMap::from([((name(), Some(id(EUROPE))), served)]),
        failures: BTreeMap::from([((name(), "overloaded".to_owned()), 2)]),
        tenants: BTreeMap::from([("acme".parse().unwrap(), tenant)]),
        moves: Vec::new(),
        explained: BTreeMap::new(),
        searched: BTreeMap::new(),
    }
}

fn rate(state: &TrafficState) -> f64 {
    state.rates().values().map(|rates| rates.requests).sum()
}

fn close(one: f64, other: f64) -> bool {
    (one - other).abs() < 1e-9
}

#[test]
fn rates_are_those_of_the_last_reports_over_their_own_intervals() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    for (second, requests) in [(0, 100), (1, 10), (2, 20), (3, 30)] {
        state.record(report(1, requests, Health::Healthy), now + SECOND * second, 0).unwrap();
    }
    assert!(close(rate(&state), 20.0), "the first of four reports does not count: {}", rate(&state));
    let urgent = GatewayTraffic { interval: SECOND / 2, ..report(1, 30, Health::Healthy) };
    state.record(urgent, now + SECOND * 4, 0).unwrap();
    assert!(close(rate(&state), 80.0 / 2.5), "a shorter report weighs less: {}", rate(&state));
    state.record(report(2, 10, Health::Healthy), now + SECOND * 4, 0).unwrap();
    assert!(close(rate(&state), 42.0), "gateways of a region are added up: {}", rate(&state));
    let tenants: Vec<_> = state.tenant_rates().into_values().map(|rates| rates.requests).collect();
    assert!(tenants.len() == 1 && close(tenants[0], 42.0), "{tenants:?}");
}

#[test]
fn latencies_are_those_of_ten_seconds_and_failures_those_of_a_minute() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    state.record(report(1, 5, Health::Healthy), now, 0).unwrap();
    state.record(report(1, 7, Health::Healthy), now + SECOND * 9, 0).unwrap();
    let latency = |state: &TrafficState, at| {
        let found = state.latencies(at);
        found.values().next().and_then(|latencies| latencies.quantile(0.5))
    };
    let p50 = latency(&state, now + SECOND * 9).unwrap();
    assert!((90..=110).contains(&p50.as_millis()), "{p50:?}");
    assert_eq!(latency(&state, now + SECOND * 20), None);
    let failures = |at| state.failures(at).values().sum::<u64>();
    assert_eq!((failures(now + SECOND * 9), failures(now + SECOND * 61)), (4, 2));
}

#[test]
fn a_gateway_that_is_silent_is_lost_and_later_forgotten() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    state.record(report(1, 5, Health::Healthy), now, 0).unwrap();
    state.expire(now + GATEWAY_LOST_AFTER, 0);
    assert!(close(rate(&state), 5.0));
    state.expire(now + GATEWAY_LOST_AFTER + SECOND, 0);
    assert!(close(rate(&state), 0.0) && state.live().next().is_none());
    assert!(state.gateways(now).next().is_some_and(|gateway| gateway.is_lost));
    let last = |state: &TrafficState| state.events.latest().next().map(|event| event.to.clone());
    assert_eq!(last(&state).as_deref(), Some("lost"));
    state.record(report(1, 5, Health::Healthy), now + SECOND * 7, 7_000).unwrap();
    assert_eq!(last(&state).as_deref(), Some("reporting"), "it has returned");
    state.expire(now + SECOND * 68, 0);
    assert_eq!(state.gateways(now).count(), 0);
}

#[test]
fn limit_of_gateways_is_enforced() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    let of = |region: usize| {
        let full = report(0, 1, Health::Healthy);
        GatewayTraffic { gateway: GatewayBoot { region: id(&format!("aws/r-{region}")), boot_id: 0 }, ..full }
    };
    for region in 0..GATEWAYS_MAX {
        state.record(of(region), now, 0).unwrap();
    }
    assert_eq!(state.record(of(GATEWAYS_MAX), now, 0), Err(TooManyGateways));
    assert_eq!(state.record(of(0), now, 0), Ok(ReportUrgency::Routine), "it is one of them");
    assert_eq!(state.gateways(now).count(), GATEWAYS_MAX);
}

#[test]
fn a_region_cannot_use_up_the_limit_of_gateways() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    let other = GatewayBoot { region: id(EUROPE), boot_id: 1 };
    state.record(GatewayTraffic { gateway: other.clone(), ..report(1, 1, Health::Down) }, now, 0).unwrap();
    let later = |number: u64| now + Duration::from_millis(number);
    for boot_id in 0..REGION_GATEWAYS_MAX as u64 {
        state.record(report(boot_id, 1, Health::Healthy), later(boot_id), 0).unwrap();
    }
    assert_eq!((state.gateway_count(), state.evicted), (REGION_GATEWAYS_MAX + 1, 0));
    // It reports again, so another one is the oldest.
    state.record(report(0, 1, Health::Healthy), later(100), 0).unwrap();
    state.record(report(1_000, 1, Health::Healthy), later(101), 0).unwrap();
    assert_eq!((state.gateway_count(), state.evicted), (REGION_GATEWAYS_MAX + 1, 1));
    let known: BTreeSet<_> = state.live().map(|gateway| gateway.gateway.clone()).collect();
    let boot = |boot_id| GatewayBoot { region: id(AMERICA), boot_id };
    assert!(known.contains(&other) && known.contains(&boot(0)) && !known.contains(&boot(1)));
    state.expire(later(101) + GATEWAY_LOST_AFTER, 0);
    assert_eq!(
        state.regions.state(&id(EUROPE)),
        RegionStatus::Healthy,
        "the gateway that sees it down is lost"
    );
}

#[test]
fn the_loads_of_a_region_are_kept_once_for_all_gateways() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    for (boot_id, pending_tokens) in [(1, 10), (2, 20)] {
        let mut full = report(boot_id, 1, Health::Healthy);
        let load = ObservedLoad { pending_tokens, ..ObservedLoad::default() };
        full.regions.get_mut(&id(EUROPE)).unwrap().loads = BTreeMap::from([(name(), load)]);
        state.record(full, now, 0).unwrap();
    }
    let europe = id(EUROPE);
    let loads: Vec<_> = state.regions.loads(&europe).map(|(_, load)| load.pending_tokens).collect();
    assert_eq!(loads, [20], "those of the newest report");
}

#[test]
fn limit_of_moves_that_become_events_is_enforced() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    let to = |number: usize| Move {
        from: id(EUROPE),
        to: id(&format!("aws/r-{number}")),
        cause: MoveCause::Retry,
        requests: 1,
        example: String::new(),
    };
    let moves = (0..=MOVES_MAX).map(to).collect();
    state.record(GatewayTraffic { moves, ..report(1, 1, Health::Healthy) }, now, 0).unwrap();
    let failovers = state.events.latest().filter(|event| event.kind == EventKind::Failover);
    assert_eq!(failovers.count(), MOVES_MAX);
}

#[test]
fn limit_of_rows_of_a_slot_is_enforced() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    for part in 0..9_u64 {
        let mut full = report(part, 1, Health::Healthy);
        full.served = (0..1024)
            .map(|number| {
                let name: DeploymentName = format!("d{part}-{number}").parse().unwrap();
                ((name, None), ServedTraffic { requests: 1, ..ServedTraffic::default() })
            })
            .collect();
        state.record(full, now, 0).unwrap();
    }
    assert_eq!(state.latencies(now).len(), SLOT_ROWS_MAX);
}

#[test]
fn a_change_of_health_is_an_urgent_event_and_a_first_report_is_not() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    assert_eq!(state.record(report(1, 1, Health::Healthy), now, 0), Ok(ReportUrgency::Routine));
    assert_eq!(state.record(report(1, 1, Health::Down), now + SECOND, 1_000), Ok(ReportUrgency::Urgent));
    let event = state.events.latest().next().unwrap();
    assert_eq!((event.kind, event.subject.as_str(), event.to.as_str()), (EventKind::Health, EUROPE, "down"));
    assert_eq!(state.regions.state(&id(EUROPE)), RegionStatus::Down);
    assert_eq!(state.regions.loads(&id(EUROPE)).count(), 0, "the last load of a lost region is not shown");
}

#[test]
fn moves_are_urgent_when_they_begin_and_hedges_never() {
    let (mut state, now) = (TrafficState::default(), some_instant());
    let with = |cause| {
        let moved = Move { from: id(EUROPE), to: id(AMERICA), cause, requests: 3, example: "r".to_owned() };
        GatewayTraffic { moves: vec![moved], ..report(1, 1, Health::Healthy) }
    };
    let kinds = |state: &TrafficState| state.events.latest().map(|event| event.kind).collect::<Vec<_>>();
    for (cause, expected) in [
        (MoveCause::Evacuation, ReportUrgency::Urgent),
        (MoveCause::Evacuation, ReportUrgency::Routine),
        (MoveCause::Spillover, ReportUrgency::Urgent),
        (MoveCause::Hedge, ReportUrgency::Routine),
    ] {
        assert_eq!(state.record(with(cause), now, 0), Ok(expected), "{cause:?}");
    }
    assert_eq!(kinds(&state), [EventKind::Spillover, EventKind::Failover, EventKind::Gateway]);
}

#[test]
fn the_begin_and_the_end_of_a_drain_are_events() {
    let mut state = TrafficState::default();
    let mut table = RouteTable::empty();
    let route = |draining| regions::RegionRoute {
        instances: BTreeMap::new(),
        deployments: BTreeSet::new(),
        draining,
    };
    for draining in [true, false, true, true] {
        table.regions.insert(id(EUROPE), route(draining));
        state.observe_table(&table, 0);
    }
    let found: Vec<_> = state.events.latest().map(|event| event.to.as_str()).collect();
    assert_eq!(found, ["draining", "in service"], "the first table is no change");
}
