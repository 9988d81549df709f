//! Tests of the shares with gateways that apply them after a delay.

use super::*;
use crate::some_instant;
use regions::Catalogue;

/// Gateways, and a hub whose store accepts every change.
struct ShareTest {
    allocator: ShareAllocator,
    rules: BTreeMap<TenantId, TenantRules>,
    now: Instant,
    /// Shares that each gateway applies.
    applied: BTreeMap<u64, Option<TenantShares>>,
    published: BTreeMap<GatewayInstance, TenantShares>,
    generations: Vec<Generation>,
}

fn instance(id: u64) -> GatewayInstance {
    GatewayInstance { region: "aws/us-east-1".parse().unwrap(), id }
}

fn acme() -> TenantId {
    "acme".parse().unwrap()
}

fn rules(text: &str) -> BTreeMap<TenantId, TenantRules> {
    regions::parse_tenants(text, &Catalogue::builtin()).unwrap()
}

impl ShareTest {
    fn new(gateways: u64) -> ShareTest {
        let limits = "limits = { requests_per_second = 100, tokens_per_minute = 6000 }";
        let text = format!(
            "[[tenant]]\nname = \"acme\"\nissuer = \"i\"\n{limits}\n[[tenant]]\nname = \"free\"\nissuer = \"i\"\n"
        );
        ShareTest {
            allocator: ShareAllocator::new(1, [], some_instant()),
            rules: rules(&text),
            now: some_instant(),
            applied: (1..=gateways).map(|id| (id, None)).collect(),
            published: BTreeMap::new(),
            generations: Vec::new(),
        }
    }

    fn report(&mut self, id: u64, requests_per_second: u64) {
        let rate = requests_per_second * 60;
        let demand = PerLimit { requests: rate, inputs: rate, tokens: rate };
        let tenants = if rate == 0 { BTreeMap::new() } else { BTreeMap::from([(acme(), demand)]) };
        let running = self.applied[&id].as_ref().map(|shares| shares.generation);
        self.allocator.report(TenantDemand { gateway: instance(id), running, tenants }, self.now);
    }

    fn divide(&mut self) {
        if let Some(changes) = self.allocator.divide(&self.rules, self.now) {
            for gateway in &changes.removed {
                self.published.remove(gateway);
            }
            for shares in self.allocator.written() {
                self.generations.push(shares.generation);
                self.published.insert(shares.gateway.clone(), shares);
            }
        }
    }

    fn receive(&mut self, id: u64) {
        let current = self.applied[&id].clone();
        let published = self.published.get(&instance(id));
        let newer = published.and_then(|shares| shares.newer_than(current.as_ref().map(|it| it.generation)));
        if let Some(mut newer) = newer {
            newer.complete(current.as_ref()).unwrap();
            assert_eq!(Some(&newer), published, "changes lead to the published shares");
            self.applied.insert(id, Some(newer));
        }
    }

    /// Runs for some seconds, in which gateways report and receive one after the other.
    fn run(&mut self, seconds: u64, demand: &[(u64, u64)]) {
        for _ in 0..seconds {
            for (id, requests) in demand {
                self.now += Duration::from_millis(1000 / demand.len() as u64);
                self.report(*id, *requests);
                self.divide();
                self.receive(*id);
                let sum = self.sum();
                assert!(sum <= 1_000_000 + FLOORS_MAX as u32, "{sum}");
            }
        }
    }

    /// Returns the sum of the applied shares of the requests of `acme`.
    fn sum(&self) -> u32 {
        self.applied.values().flatten().map(|shares| shares.of(&acme()).requests.millionths()).sum()
    }

    fn share(&self, id: u64) -> u32 {
        self.applied[&id].as_ref().map_or(0, |shares| shares.of(&acme()).requests.millionths())
    }
}

#[test]
fn shares_follow_skewed_and_shifting_demand_within_seconds() {
    let mut test = ShareTest::new(4);
    test.run(6, &[(1, 0), (2, 0), (3, 0), (4, 0)]);
    assert_eq!([1, 2, 3, 4].map(|id| test.share(id)), [250_000; 4]);
    assert!(test.applied.values().flatten().all(|shares| shares.tenants.is_empty()), "nothing is listed");

    test.run(4, &[(1, 300), (2, 20), (3, 10), (4, 0)]);
    assert_eq!([1, 2, 3, 4].map(|id| test.share(id)), [660_000, 220_000, 110_000, 10_000]);
    test.run(5, &[(1, 0), (2, 20), (3, 10), (4, 300)]);
    assert_eq!([1, 2, 3, 4].map(|id| test.share(id)), [10_000, 220_000, 110_000, 660_000]);

    test.run(6, &[(1, 0), (2, 0), (3, 0), (4, 0)]);
    assert!(test.applied.values().flatten().all(|shares| shares.tenants.is_empty()), "equal shares again");
    let before = test.generations.len();
    test.run(20, &[(1, 0), (2, 0), (3, 0), (4, 0)]);
    assert_eq!(test.generations.len(), before, "without a change there is no new generation");
}

#[test]
fn steady_demand_with_noise_keeps_its_shares() {
    let mut test = ShareTest::new(4);
    test.run(6, &[(1, 200), (2, 100), (3, 20), (4, 5)]);
    let before = test.generations.len();
    for noise in [0, 1, 0, 1, 1, 0] {
        test.run(1, &[(1, 200 + 20 * noise), (2, 110 - 10 * noise), (3, 20 + noise), (4, 5)]);
    }
    assert_eq!(test.generations.len(), before);
}

#[test]
fn shares_move_while_demand_keeps_changing() {
    let mut test = ShareTest::new(4);
    test.run(6, &[(1, 100), (2, 100), (3, 100), (4, 100)]);
    for step in 0..8 {
        test.run(1, &[(1, 300), (2, 100 >> step), (3, 100 >> step), (4, 100 >> step)]);
    }
    test.run(2, &[(1, 300), (2, 0), (3, 0), (4, 0)]);
    assert!(test.share(1) > 900_000, "{}", test.share(1));
}

#[test]
fn the_shares_of_a_lost_gateway_are_reserved_and_then_given_to_others() {
    let mut test = ShareTest::new(2);
    test.run(5, &[(1, 300), (2, 300)]);
    assert_eq!([1, 2].map(|id| test.share(id)), [500_000; 2]);
    test.allocator.expired(&instance(2), test.now);
    test.run(2, &[(1, 300)]);
    assert_eq!(test.share(1), 500_000, "the other one may still be alive");
    test.applied.remove(&2);
    test.run(3, &[(1, 300)]);
    assert_eq!(test.share(1), 1_000_000);
    assert_eq!(test.published.len(), 1, "its record is deleted");
}

#[test]
fn a_new_gateway_receives_a_share_within_two_seconds() {
    let mut test = ShareTest::new(2);
    test.run(5, &[(1, 300), (2, 300)]);
    test.applied.insert(3, None);
    test.run(2, &[(1, 300), (2, 300), (3, 300)]);
    assert!(test.share(3) >= 10_000, "{}", test.share(3));
    test.run(3, &[(1, 300), (2, 300), (3, 300)]);
    assert!(test.share(3) >= 300_000, "{}", test.share(3));
}

#[test]
fn a_gateway_that_restarts_continues_with_its_shares() {
    let mut test = ShareTest::new(2);
    test.run(5, &[(1, 300), (2, 5)]);
    let before = test.share(1);
    test.allocator.expired(&instance(1), test.now);
    test.run(1, &[(2, 5)]);
    test.run(3, &[(1, 300), (2, 5)]);
    assert_eq!(test.share(1), before);
}

#[test]
fn shares_survive_a_new_leader_and_no_generation_is_assigned_twice() {
    let mut test = ShareTest::new(2);
    test.run(5, &[(1, 300), (2, 5)]);
    let shares = [1, 2].map(|id| test.share(id));
    test.allocator = ShareAllocator::new(1, test.published.values().cloned(), test.now);
    test.run(2, &[(1, 300), (2, 5)]);
    assert_eq!([1, 2].map(|id| test.share(id)), shares);

    // All gateways end; the record with the highest number stays.
    for id in [1, 2] {
        test.allocator.expired(&instance(id), test.now);
    }
    for _ in 0..10 {
        test.now += Duration::from_secs(1);
        test.divide();
    }
    assert_eq!((test.published.len(), test.allocator.next_due()), (1, None));
    let last = *test.generations.iter().max().unwrap();
    test.allocator = ShareAllocator::new(1, test.published.values().cloned(), test.now);
    test.applied = BTreeMap::from([(7, None)]);
    test.run(6, &[(7, 300)]);
    assert!(test.generations.last().is_some_and(|generation| *generation > last));
    assert_eq!((test.share(7), test.published.len()), (1_000_000, 1));
}

#[test]
fn a_failed_write_is_repeated_with_a_higher_number() {
    let mut test = ShareTest::new(1);
    test.report(1, 10);
    test.now += Duration::from_secs(1);
    let first = test.allocator.divide(&test.rules, test.now).unwrap();
    assert_eq!(test.allocator.next_due(), None, "one write at a time");
    test.allocator.write_failed();
    test.now += Duration::from_secs(1);
    let second = test.allocator.divide(&test.rules, test.now).unwrap();
    assert!(second.issued[0].generation > first.issued[0].generation);
    assert_eq!(second.issued[0].default, first.issued[0].default);
}

#[test]
fn demand_of_unknown_tenants_and_of_tenants_without_limits_is_ignored() {
    let mut test = ShareTest::new(1);
    let demand = PerLimit::each(|| u64::MAX);
    let tenants = ["free", "unknown"].map(|name| (name.parse().unwrap(), demand));
    for _ in 0..5 {
        let running = test.applied[&1].as_ref().map(|shares| shares.generation);
        let report = TenantDemand { gateway: instance(1), running, tenants: tenants.clone().into() };
        test.allocator.report(report, test.now);
        test.now += Duration::from_secs(1);
        test.divide();
        test.receive(1);
    }
    let shares = test.applied[&1].as_ref().unwrap();
    assert!(shares.tenants.keys().all(|name| name.as_str() == "free"), "{shares:?}");
    assert_eq!(shares.of(&acme()).requests, LimitShare::WHOLE);
}

#[test]
fn an_acknowledgement_of_shares_that_were_never_issued_frees_nothing() {
    let mut test = ShareTest::new(2);
    test.run(5, &[(1, 300), (2, 300)]);
    let forged = Generation { epoch: 9, number: u64::MAX };
    let gateway = instance(1);
    let report =
        |running| TenantDemand { gateway: gateway.clone(), running: Some(running), tenants: BTreeMap::new() };
    test.allocator.report(report(forged), test.now);
    test.now += Duration::from_secs(1);
    test.report(2, 300);
    test.divide();
    test.allocator.report(report(forged), test.now);
    test.now += Duration::from_secs(1);
    test.divide();
    test.receive(2);
    assert_eq!(test.share(2), 500_000, "the first has not acknowledged its smaller share");
    assert!(test.generations.iter().all(|generation| generation.number < 100), "numbers do not jump");
}

#[test]
fn a_clock_that_stops_or_jumps_has_no_effect() {
    let mut test = ShareTest::new(2);
    test.run(5, &[(1, 300), (2, 100)]);
    let (shares, before) = ([1, 2].map(|id| test.share(id)), test.now);
    test.now = before + Duration::from_secs(3600);
    test.run(2, &[(1, 300), (2, 100)]);
    test.allocator
        .report(TenantDemand { gateway: instance(1), running: None, tenants: BTreeMap::new() }, before);
    assert!(test.allocator.divide(&test.rules, before).is_none());
    test.run(3, &[(1, 300), (2, 100)]);
    assert_eq!([1, 2].map(|id| test.share(id)), shares);
}
