//! Routes of regions whose leases end.

use super::*;
use crate::fixtures::some_registration;
use crate::some_instant;
use scheduler_api::plan::{RegionCapacity, ReplicaPool};

const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

/// Returns the spoke of `region` at `port`, which is also its boot id and its name.
fn spoke(region: &str, port: u16, created: u64) -> RegisteredSpoke {
    let registration = Registration {
        instance: port.to_string().parse().unwrap(),
        endpoint: ([10, 0, 0, 1], port).into(),
        boot_id: port.into(),
        scales: false,
        ..some_registration(region)
    };
    RegisteredSpoke { registration, created }
}

fn empty(now: Instant) -> Registry {
    Registry::new(&BTreeMap::new(), LAPSED_KEEP, now)
}

/// Returns the routed ports, ordered by region and instance.
fn routed(registry: &Registry) -> Vec<(String, u16)> {
    let routes = registry.routes().into_iter();
    let ports = routes.flat_map(|(region, route)| {
        route.instances.into_values().map(move |endpoint| (region.to_string(), endpoint.port()))
    });
    ports.collect()
}

/// Returns the same spoke, draining.
fn draining(mut spoke: RegisteredSpoke) -> RegisteredSpoke {
    spoke.registration.draining = true;
    spoke
}

fn of(region: &str, port: u16) -> (String, u16) {
    (region.to_owned(), port)
}

#[test]
fn a_region_whose_spokes_have_several_queues_of_jobs_is_named() {
    const FILE: Option<JobLogKind> = Some(JobLogKind::File);
    const NATS: Option<JobLogKind> = Some(JobLogKind::Nats);
    let several = |logs: &[Option<JobLogKind>]| {
        let now = some_instant();
        let mut registry = empty(now);
        let with_log = |region, port, log| {
            let mut spoke = spoke(region, port, 1);
            spoke.registration.job_log = log;
            spoke
        };
        registry.put(with_log(AMERICA, 1, FILE), now);
        (2..).zip(logs).for_each(|(port, log)| registry.put(with_log(EUROPE, port, *log), now));
        let several = registry.regions_with_several_job_queues();
        several.into_iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    for one in [&[None, FILE][..], &[FILE, None, None], &[NATS, None, NATS], &[None, None], &[FILE]] {
        assert!(several(one).is_empty(), "{one:?}");
    }
    for two in
        [&[FILE, FILE][..], &[FILE, None, FILE], &[NATS, FILE], &[FILE, NATS, NATS], &[NATS, NATS, FILE]]
    {
        assert_eq!(several(two), [EUROPE], "{two:?}");
    }
}

#[test]
fn all_spokes_of_a_region_are_routed_to() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 9, 1), now);
    registry.put(spoke(EUROPE, 3, 2), now);
    assert_eq!(routed(&registry), [of(EUROPE, 3), of(EUROPE, 9)]);
    registry.put(spoke(EUROPE, 9, 1), now);
    assert_eq!(routed(&registry), [of(EUROPE, 3), of(EUROPE, 9)], "one updated its registration");
}

#[test]
fn a_spoke_that_drains_stays_in_the_table_until_it_deregisters_and_then_leaves_at_once() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.put(spoke(EUROPE, 2, 2), now);
    registry.put(draining(spoke(EUROPE, 1, 1)), now);
    assert_eq!(routed(&registry), [of(EUROPE, 1), of(EUROPE, 2)], "its replicas are not replaced yet");
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    assert_eq!((routed(&registry), registry.next_expiry()), (vec![of(EUROPE, 2)], None));
    registry.put(draining(spoke(EUROPE, 2, 2)), now);
    assert_eq!(routed(&registry), [of(EUROPE, 2)]);
    registry.remove(&EUROPE.parse().unwrap(), 2, now);
    assert_eq!(routed(&registry), [of(EUROPE, 2)], "a region keeps its route for a while");
    assert!(!registry.is_holding());
}

#[test]
fn a_spoke_that_is_lost_beside_another_keeps_its_route_for_a_while_whatever_gateways_reach() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.put(spoke(EUROPE, 2, 2), now);
    registry.gateway_reported(gateway(1), Some([EUROPE.parse().unwrap()].into()), now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    assert_eq!(registry.next_expiry(), Some(now + LAPSED_KEEP));
    registry.expire(now + LAPSED_KEEP - Duration::from_nanos(1));
    assert_eq!(routed(&registry), [of(EUROPE, 1), of(EUROPE, 2)]);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!(routed(&registry), [of(EUROPE, 2)]);
}

#[test]
fn a_spoke_that_restarts_under_its_name_replaces_the_former() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    let mut restarted = spoke(EUROPE, 5, 7);
    restarted.registration.instance = "1".parse().unwrap();
    registry.put(restarted, now);
    assert_eq!(routed(&registry), [of(EUROPE, 5)]);
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    assert_eq!((routed(&registry), registry.next_expiry()), (vec![of(EUROPE, 5)], None));
}

#[test]
fn more_lapsed_spokes_than_a_region_may_have_instances_are_left_out() {
    let now = some_instant();
    let mut registry = empty(now);
    for port in 1..=u16::try_from(2 * MAX_INSTANCES).unwrap() {
        registry.put(spoke(EUROPE, port, port.into()), now);
        if usize::from(port) < 2 * MAX_INSTANCES {
            registry.remove(&EUROPE.parse().unwrap(), port.into(), now);
        }
    }
    let last = of(EUROPE, u16::try_from(2 * MAX_INSTANCES).unwrap());
    let routed = routed(&registry);
    assert!(routed.len() == MAX_INSTANCES && routed.contains(&last), "{routed:?}");
}

#[test]
fn the_spoke_with_most_known_replicas_reports_for_its_region() {
    let ready = |mut spoke: RegisteredSpoke, ready| {
        let pool = ReplicaPool { ready, ..ReplicaPool::default() };
        spoke.registration.capacity = RegionCapacity { pools: vec![pool] };
        spoke
    };
    let check = |spokes: &[RegisteredSpoke], expected: u64| {
        let found: Vec<_> = representatives(spokes).into_values().map(|it| it.registration.boot_id).collect();
        assert_eq!(found, [expected]);
    };
    check(&[ready(spoke(EUROPE, 1, 1), 2), ready(spoke(EUROPE, 2, 2), 0)], 1);
    check(&[ready(spoke(EUROPE, 1, 1), 2), ready(spoke(EUROPE, 2, 2), 2)], 2);
    check(&[draining(ready(spoke(EUROPE, 1, 1), 2)), ready(spoke(EUROPE, 2, 2), 1)], 2);
}

#[test]
fn a_region_without_a_spoke_keeps_its_route_for_a_while_and_not_for_longer() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.put(spoke(AMERICA, 2, 2), now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now + LAPSED_KEEP);
    assert_eq!(registry.next_expiry(), Some(now + LAPSED_KEEP), "removed once");

    registry.expire(now + LAPSED_KEEP - Duration::from_nanos(1));
    assert_eq!(routed(&registry), [of(AMERICA, 2), of(EUROPE, 1)]);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!((routed(&registry), registry.next_expiry()), (vec![of(AMERICA, 2)], None));
}

#[test]
fn a_region_that_returns_has_not_lapsed() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    registry.put(spoke(EUROPE, 1, 5), now);
    registry.expire(now + 2 * LAPSED_KEEP);
    assert_eq!(routed(&registry), [of(EUROPE, 1)]);
}

#[test]
fn a_hub_that_starts_gives_every_published_region_time_to_register() {
    let now = some_instant();
    let mut before = empty(now);
    before.put(spoke(EUROPE, 1, 1), now);
    before.put(spoke(AMERICA, 2, 2), now);
    let mut registry = Registry::new(&before.routes(), LAPSED_KEEP, now);
    registry.put(spoke(AMERICA, 2, 9), now);
    assert_eq!(routed(&registry), [of(AMERICA, 2), of(EUROPE, 1)]);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!(routed(&registry), [of(AMERICA, 2)]);
}

#[test]
fn a_list_of_all_spokes_removes_the_others() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.put(spoke(EUROPE, 2, 2), now);
    registry.put(spoke(AMERICA, 3, 3), now);
    registry.replace(vec![spoke(EUROPE, 1, 1), spoke(EUROPE, 4, 4)], now);
    let lapsed = vec![of(AMERICA, 3), of(EUROPE, 1), of(EUROPE, 2), of(EUROPE, 4)];
    assert_eq!(routed(&registry), lapsed);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!(routed(&registry), [of(EUROPE, 1), of(EUROPE, 4)]);
}

/// Creates ten regions with a spoke each, of which `lost` lose their leases one after another, `apart`.
fn ten_lose(lost: usize, apart: Duration) -> (Registry, Instant) {
    const CLOUD: [&str; 10] = [
        "aws/us-east-1",
        "aws/us-east-2",
        "aws/us-west-1",
        "aws/us-west-2",
        "aws/eu-west-1",
        "aws/eu-west-2",
        "aws/eu-west-3",
        "aws/eu-north-1",
        "aws/sa-east-1",
        "aws/ca-central-1",
    ];
    let mut now = some_instant();
    let mut registry = empty(now);
    for (index, region) in CLOUD.iter().enumerate() {
        let index = u16::try_from(index).unwrap();
        registry.put(spoke(region, index + 1, u64::from(index)), now);
    }
    for (index, region) in CLOUD.iter().take(lost).enumerate() {
        if index > 0 {
            now += apart;
        }
        registry.remove(&region.parse().unwrap(), index as u64 + 1, now);
    }
    (registry, now)
}

#[test]
fn when_more_than_three_of_ten_leases_end_within_two_seconds_their_regions_are_held() {
    let check = |lost: usize, apart_ms: u64, hold: bool| {
        let (mut registry, now) = ten_lose(lost, Duration::from_millis(apart_ms));
        assert_eq!(registry.is_holding(), hold, "{lost} lost, {apart_ms} ms apart");
        registry.expire(now + LAPSED_KEEP);
        let routed = registry.routes().len();
        assert_eq!(routed, if hold { 10 } else { 10 - lost }, "{lost} lost, {apart_ms} ms apart");
        registry.expire(now + HOLD_MAX);
        assert_eq!((registry.routes().len(), registry.is_holding()), (10 - lost, false), "not forever");
    };
    check(3, 0, false);
    check(4, 0, true);
    check(10, 0, true);
    check(4, 666, true);
    check(4, 1001, false);
}

#[test]
fn reachability_follows_the_gateways_and_one_that_reaches_no_region_does_not_count() {
    let check = |gateways: &[Option<&[&str]>], expected: Reachability| {
        let named = |reached: &&[&str]| reached.iter().map(|region| region.parse().unwrap()).collect();
        let all: Vec<Option<BTreeSet<RegionId>>> =
            gateways.iter().map(|reached| reached.as_ref().map(named)).collect();
        assert_eq!(reachability(&all, &EUROPE.parse().unwrap()), expected, "{gateways:?}");
    };
    check(&[], Reachability::Unknown);
    check(&[None], Reachability::Unknown);
    check(&[Some(&[])], Reachability::Unknown);
    check(&[Some(&[AMERICA])], Reachability::Unreachable);
    check(&[Some(&[AMERICA]), None], Reachability::Unknown);
    check(&[Some(&[AMERICA]), Some(&[])], Reachability::Unknown);
    check(&[Some(&[AMERICA]), Some(&[AMERICA, EUROPE])], Reachability::Reachable);
    check(&[None, Some(&[EUROPE])], Reachability::Reachable);
}

fn gateway(boot_id: u64) -> GatewayBoot {
    GatewayBoot { region: AMERICA.parse().unwrap(), boot_id }
}

#[test]
fn lapsed_regions_keep_their_routes_while_a_gateway_reaches_them() {
    let some: BTreeSet<RegionId> = ["aws/us-east-1", "aws/us-west-2"].map(|it| it.parse().unwrap()).into();
    for lost in [2, 10] {
        let (mut registry, now) = ten_lose(lost, Duration::ZERO);
        registry.gateway_reported(gateway(1), Some(some.clone()), now);
        let dead = lost - registry.lapsed.keys().filter(|(region, _)| some.contains(region)).count();
        registry.expire(now + LAPSED_KEEP - Duration::from_nanos(1));
        assert_eq!(registry.routes().len(), 10, "{lost}: each is kept for a while");
        registry.expire(now + LAPSED_KEEP);
        assert_eq!(registry.routes().len(), 10 - dead, "{lost}: held or not");
        assert_eq!(registry.next_expiry(), None);
        let far = now + 10 * HOLD_MAX;
        registry.expire(far);
        assert_eq!(registry.routes().len(), 10 - dead, "{lost}: as long as a gateway reaches it");
        // From now on the gateway reaches only one of them.
        registry.gateway_reported(gateway(1), Some(["aws/us-west-2".parse().unwrap()].into()), far);
        let is_routed = |registry: &Registry| registry.routes().contains_key("aws/us-east-1");
        registry.expire(far + LAPSED_KEEP - Duration::from_nanos(1));
        assert!(is_routed(&registry), "{lost}: it is kept for a while again");
        registry.expire(far + LAPSED_KEEP);
        assert!(!is_routed(&registry), "{lost}");
    }
}

#[test]
fn an_expired_gateway_or_one_without_a_report_changes_nothing() {
    for reported in [None, Some(BTreeSet::new())] {
        let (mut registry, now) = ten_lose(10, Duration::ZERO);
        registry.gateway_reported(gateway(1), Some([EUROPE.parse().unwrap()].into()), now);
        registry.gateway_reported(gateway(2), reported, now);
        registry.expire(now + 2 * LAPSED_KEEP);
        assert_eq!(registry.routes().len(), 10, "held, as without gateways");
        registry.gateway_expired(&gateway(2), now + 2 * LAPSED_KEEP);
        registry.expire(now + 2 * LAPSED_KEEP);
        assert_eq!(registry.routes().len(), 0, "all reporting gateways reach none of them");
    }
    let (mut registry, now) = ten_lose(10, Duration::ZERO);
    registry.gateway_reported(gateway(1), Some([EUROPE.parse().unwrap()].into()), now);
    registry.replace_gateways([], now);
    registry.expire(now + 2 * LAPSED_KEEP);
    assert_eq!(registry.routes().len(), 10, "the gateways' leases end with those of the regions");
}

#[test]
fn the_loss_of_one_or_two_of_few_regions_is_not_blamed_on_the_store() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.put(spoke(AMERICA, 2, 2), now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    registry.remove(&AMERICA.parse().unwrap(), 2, now);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!((routed(&registry), registry.is_holding()), (vec![], false));
}

#[test]
fn held_regions_are_released_when_enough_spokes_are_back() {
    let (mut registry, now) = ten_lose(10, Duration::ZERO);
    let later = now + 2 * LAPSED_KEEP;
    let back: Vec<_> = registry.routes().into_keys().collect();
    for region in &back[..6] {
        registry.put(spoke(region.as_str(), 99, 99), later);
    }
    assert!(registry.is_holding(), "four of ten are still missing");
    registry.put(spoke(back[6].as_str(), 99, 99), later);
    assert!(!registry.is_holding(), "three of ten may be");
    registry.expire(later + LAPSED_KEEP - Duration::from_nanos(1));
    assert_eq!(registry.routes().len(), 10);
    registry.expire(later + LAPSED_KEEP);
    assert_eq!(registry.routes().len(), 7);
}
