//! Who keeps its route, and for how long.

use super::*;
use crate::some_instant;

const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

/// The spoke of `region` that is reached at `port`, which is its boot identifier too.
fn spoke(region: &str, port: u16, created: u64) -> RegisteredSpoke {
    let registration = Registration {
        region: region.parse().unwrap(),
        endpoint: ([10, 0, 0, 1], port).into(),
        boot_id: port.into(),
        deployments: BTreeSet::new(),
        capacity: RegionCapacity::default(),
        models: BTreeMap::new(),
    };
    RegisteredSpoke { registration, created }
}

fn empty(now: Instant) -> Registry {
    Registry::new(&BTreeMap::new(), LAPSED_KEEP, now)
}

/// The ports that are routed to, in the order of their regions.
fn routed(registry: &Registry) -> Vec<(String, u16)> {
    let routes = registry.routes().into_iter();
    routes.map(|(region, route)| (region.to_string(), route.endpoint.port())).collect()
}

fn of(region: &str, port: u16) -> (String, u16) {
    (region.to_owned(), port)
}

#[test]
fn a_region_is_reached_at_the_spoke_that_registered_last_and_falls_back_on_the_other() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 9, 1), now);
    registry.put(spoke(EUROPE, 3, 2), now);
    assert_eq!(routed(&registry), [of(EUROPE, 3)]);
    registry.put(spoke(EUROPE, 9, 1), now);
    assert_eq!(routed(&registry), [of(EUROPE, 3)], "the old one said again what is ready");
    registry.remove(&EUROPE.parse().unwrap(), 3, now);
    assert_eq!(routed(&registry), [of(EUROPE, 9)]);
}

#[test]
fn a_region_without_a_spoke_keeps_its_route_for_a_while_and_not_for_longer() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.put(spoke(AMERICA, 2, 2), now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now + LAPSED_KEEP);
    assert_eq!(registry.next_expiry(), Some(now + LAPSED_KEEP), "gone once is gone");

    registry.expire(now + LAPSED_KEEP - Duration::from_nanos(1));
    assert_eq!(routed(&registry), [of(AMERICA, 2), of(EUROPE, 1)]);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!((routed(&registry), registry.next_expiry()), (vec![of(AMERICA, 2)], None));
}

#[test]
fn a_region_that_comes_back_has_not_lapsed() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.remove(&EUROPE.parse().unwrap(), 1, now);
    registry.put(spoke(EUROPE, 2, 5), now);
    registry.expire(now + 2 * LAPSED_KEEP);
    assert_eq!(routed(&registry), [of(EUROPE, 2)]);
}

#[test]
fn a_hub_that_starts_gives_every_published_region_time_to_come_forward() {
    let now = some_instant();
    let mut before = empty(now);
    before.put(spoke(EUROPE, 1, 1), now);
    before.put(spoke(AMERICA, 2, 2), now);
    let mut registry = Registry::new(&before.routes(), LAPSED_KEEP, now);
    registry.put(spoke(AMERICA, 3, 9), now);
    assert_eq!(routed(&registry), [of(AMERICA, 3), of(EUROPE, 1)]);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!(routed(&registry), [of(AMERICA, 3)]);
}

#[test]
fn a_list_of_all_spokes_takes_away_those_that_it_does_not_name() {
    let now = some_instant();
    let mut registry = empty(now);
    registry.put(spoke(EUROPE, 1, 1), now);
    registry.put(spoke(EUROPE, 2, 2), now);
    registry.put(spoke(AMERICA, 3, 3), now);
    registry.replace(vec![spoke(EUROPE, 1, 1), spoke(EUROPE, 4, 4)], now);
    assert_eq!(routed(&registry), [of(AMERICA, 3), of(EUROPE, 4)]);
    registry.expire(now + LAPSED_KEEP);
    assert_eq!(routed(&registry), [of(EUROPE, 4)]);
}

/// Ten regions with a spoke each, of which `lost` lose their leases one after another, `apart`.
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
    for (region, region) in CLOUD.iter().enumerate() {
        let region = u16::try_from(region).unwrap();
        registry.put(spoke(region, region + 1, u64::from(region)), now);
    }
    for (region, region) in CLOUD.iter().take(lost).enumerate() {
        if region > 0 {
            now += apart;
        }
        registry.remove(&region.parse().unwrap(), region as u64 + 1, now);
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
        assert_eq!((registry.routes().len(), registry.is_holding()), (10 - lost, false), "not for ever");
    };
    check(3, 0, false);
    check(4, 0, true);
    check(10, 0, true);
    check(4, 666, true);
    check(4, 1001, false);
}

#[test]
fn what_gateways_hear_is_weighed_and_who_hears_nobody_is_no_witness() {
    let check = |gateways: &[Option<&[&str]>], expected: Reachability| {
        let named = |gateway_reported: &&[&str]| gateway_reported.iter().map(|region| region.parse().unwrap()).collect();
        let all: Vec<Option<BTreeSet<RegionId>>> =
            gateways.iter().map(|gateway_reported| gateway_reported.as_ref().map(named)).collect();
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
fn of_regions_whose_leases_ended_those_that_gateways_hear_stay_and_those_that_none_hears_go() {
    let some: BTreeSet<RegionId> = ["aws/us-east-1", "aws/us-west-2"].map(|it| it.parse().unwrap()).into();
    for lost in [2, 10] {
        let (mut registry, now) = ten_lose(lost, Duration::ZERO);
        registry.gateway_reported(gateway(1), Some(some.clone()), now);
        let dead = lost - registry.lapsed.keys().filter(|region| some.contains(*region)).count();
        registry.expire(now + LAPSED_KEEP - Duration::from_nanos(1));
        assert_eq!(registry.routes().len(), 10, "{lost}: each has its time");
        registry.expire(now + LAPSED_KEEP);
        assert_eq!(registry.routes().len(), 10 - dead, "{lost}: hold or not");
        assert_eq!(registry.next_expiry(), None);
        let far = now + 10 * HOLD_MAX;
        registry.expire(far);
        assert_eq!(registry.routes().len(), 10 - dead, "{lost}: for as long as somebody hears it");
        // Then that gateway hears one of them no longer.
        registry.gateway_reported(gateway(1), Some(["aws/us-west-2".parse().unwrap()].into()), far);
        let there = |registry: &Registry| registry.routes().contains_key("aws/us-east-1");
        registry.expire(far + LAPSED_KEEP - Duration::from_nanos(1));
        assert!(there(&registry), "{lost}: it has its time again");
        registry.expire(far + LAPSED_KEEP);
        assert!(!there(&registry), "{lost}");
    }
}

#[test]
fn the_word_of_a_gateway_that_is_gone_or_does_not_say_changes_nothing() {
    for said in [None, Some(BTreeSet::new())] {
        let (mut registry, now) = ten_lose(10, Duration::ZERO);
        registry.gateway_reported(gateway(1), Some([EUROPE.parse().unwrap()].into()), now);
        registry.gateway_reported(gateway(2), said, now);
        registry.expire(now + 2 * LAPSED_KEEP);
        assert_eq!(registry.routes().len(), 10, "hold, as without any");
        registry.gateway_expired(&gateway(2), now + 2 * LAPSED_KEEP);
        registry.expire(now + 2 * LAPSED_KEEP);
        assert_eq!(registry.routes().len(), 0, "all who speak hear none of them");
    }
    let (mut registry, now) = ten_lose(10, Duration::ZERO);
    registry.gateway_reported(gateway(1), Some([EUROPE.parse().unwrap()].into()), now);
    registry.replace_gateways([], now);
    registry.expire(now + 2 * LAPSED_KEEP);
    assert_eq!(registry.routes().len(), 10, "their leases end with those of the regions");
}

#[test]
fn of_few_regions_one_or_two_that_die_are_no_fault_of_the_store() {
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
fn held_regions_are_let_go_when_so_many_are_back_that_the_rest_is_believed() {
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
