//! Tests of the instances of a region.

use super::*;
use crate::circuit::CONSECUTIVE_FAILURES_MAX;
use crate::latency::SLOWNESS_HALF_LIFE;
use crate::outlier::{DeadlineSetBy, UpstreamAction, evidence};
use crate::some_instant;
use proptest::prelude::*;
use scheduler_api::report::delta::{ReportDecoder, ReportEncoder};
use scheduler_api::report::{EXCHANGE_PERIOD, Gateway, Report, SpokeReport};

const MS: Duration = Duration::from_millis(1);

fn region(number: usize) -> RegionIndex {
    RegionIndex::new(number).unwrap()
}

fn name(text: &str) -> DeploymentName {
    text.parse().unwrap()
}

/// Instances of region 0, whose addresses are numbers.
struct InstanceTest {
    set: InstanceSet<u16>,
    now: Instant,
}

fn route(all: &[(&str, u16)]) -> Vec<(InstanceName, u16)> {
    all.iter().map(|(name, address)| (name.parse().unwrap(), *address)).collect()
}

impl InstanceTest {
    fn with_instances(all: &[(&str, u16)]) -> InstanceTest {
        let mut test = InstanceTest { set: InstanceSet::default(), now: some_instant() };
        test.set_instances(all);
        test
    }

    /// Creates two instances that report.
    fn with_two_instances() -> (InstanceTest, [InstanceIndex; 2]) {
        let mut test = InstanceTest::with_instances(&[("a", 1), ("b", 2)]);
        test.report_all();
        let both = ["a", "b"].map(|name| test_index(&test.set, name));
        (test, both)
    }

    fn set_instances(&mut self, all: &[(&str, u16)]) {
        let routed = route(all);
        self.set.set_instances(routed.iter().map(|(name, address)| (region(0), name, address)));
    }

    fn report(&mut self, index: InstanceIndex, draining: bool) {
        self.report_jobs(index, draining, false);
    }

    fn report_jobs(&mut self, index: InstanceIndex, draining: bool, has_jobs: bool) {
        let load = DeploymentLoad {
            ready: 1,
            tokens_per_second: 10.0,
            granted_tokens: 5,
            ..DeploymentLoad::default()
        };
        let report = Report {
            region: "aws/us-east-1".parse().unwrap(),
            instance: "a".parse().unwrap(),
            boot_id: 1,
            sequence: 1,
            deployments: BTreeMap::from([(name("d"), load)]),
            draining,
            has_jobs,
        };
        self.set.reported(index, &DecodedReport::of_all_loads(report), MS, self.now);
    }

    fn report_all(&mut self) {
        let all: Vec<_> = self.set.each().map(|(index, _, _)| index).collect();
        all.into_iter().for_each(|index| self.report(index, false));
    }

    /// Returns the instances that a thousand requests are sent to.
    fn selected(&self, tried: &[InstanceIndex]) -> BTreeMap<InstanceIndex, u32> {
        let mut counts = BTreeMap::new();
        for draw in 0..1000 {
            let selected =
                self.set.select(region(0), &name("d"), false, tried, Permille::new(draw), self.now).unwrap();
            *counts.entry(selected.instance).or_default() += 1;
        }
        counts
    }

    fn is_alternative(&self, tried: &[InstanceIndex]) -> bool {
        self.set
            .select(region(0), &name("d"), false, tried, Permille::new(1), self.now)
            .unwrap()
            .is_alternative
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }
}

fn test_index(set: &InstanceSet<u16>, wanted: &str) -> InstanceIndex {
    set.each().find(|(_, name, _)| name.as_str() == wanted).unwrap().0
}

#[test]
fn equal_instances_get_equal_shares_and_one_with_more_requests_in_flight_gets_fewer() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    assert_eq!(test.selected(&[]), BTreeMap::from([(a, 500), (b, 500)]));
    test.set.began(a, test.now);
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
    test.set.ended(a, false, test.now);
    assert_eq!(test.selected(&[]).len(), 2);
}

#[test]
fn an_instance_that_is_several_times_slower_gets_requests_again_after_a_while() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    test.set.responded(a, Some(40 * MS), test.now);
    test.set.responded(b, Some(10 * MS), test.now);
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
    for _ in 0..3 {
        test.set.began(b, test.now);
    }
    assert_eq!(test.selected(&[]).len(), 2, "four times as slow, with a quarter of the requests");
    for _ in 0..3 {
        test.set.ended(b, false, test.now);
    }
    test.pass(3 * SLOWNESS_HALF_LIFE);
    test.report_all();
    assert_eq!(test.selected(&[]).len(), 2);
}

#[test]
fn an_instance_that_drains_gets_nothing_while_another_one_is_up() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    test.report(a, true);
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
    assert!(!test.set.region_report(region(0), test.now).unwrap().draining);
    assert!(!test.is_alternative(&[b]), "a failed request is not moved to it");
    test.report(b, true);
    assert_eq!(test.selected(&[]).len(), 2, "the last ones stay selectable");
    assert!(test.set.region_report(region(0), test.now).unwrap().draining);
    test.report(a, false);
    assert_eq!(test.selected(&[]), BTreeMap::from([(a, 1000)]), "it has restarted");
}

#[test]
fn a_refused_connection_moves_an_instance_behind_the_others_until_it_reports() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    assert!(test.set.failed(a, test.now), "its health changed");
    assert!(!test.set.failed(a, test.now), "once");
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
    test.report(a, false);
    assert_eq!(test.selected(&[]).len(), 2);
}

#[test]
fn an_instance_that_was_down_is_readmitted_after_unbroken_reports() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    for _ in 0..FAILURES_MAX {
        test.set.failed(a, test.now);
    }
    assert_eq!(test.set.health(a, test.now), Health::Down);
    let periods = RECOVERY_TIME.as_millis() / EXCHANGE_PERIOD.as_millis();
    for _ in 0..periods {
        test.report_all();
        assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
        test.pass(EXCHANGE_PERIOD);
    }
    test.report_all();
    assert_eq!(test.selected(&[]).len(), 2);
}

#[test]
fn a_silent_instance_is_noticed_once_and_its_load_is_not_counted() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    assert_eq!(
        test.set.region_report(region(0), test.now).unwrap().deployments[&name("d")].granted_tokens,
        10
    );
    let mut noticed = Vec::new();
    for _ in 0..40 {
        test.pass(TICK_PERIOD_MAX);
        test.report(b, false);
        noticed.extend(test.set.tick(test.now));
    }
    assert_eq!(noticed, [a, a], "suspect, then down");
    let sum = test.set.region_report(region(0), test.now).unwrap().deployments[&name("d")];
    assert_eq!((sum.ready, sum.granted_tokens), (1, 5));
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
}

#[test]
fn a_pause_of_the_gateway_is_no_silence_of_an_instance() {
    let (mut test, _) = InstanceTest::with_two_instances();
    assert!(test.set.tick(test.now).is_empty());
    test.pass(60 * Duration::from_secs(1));
    assert!(test.set.tick(test.now).is_empty());
    assert_eq!(test.selected(&[]).len(), 2);
}

#[test]
fn failures_of_one_instance_eject_it_and_failures_of_all_are_those_of_the_region() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    let failure = evidence(DeadlineSetBy::Measurement, UpstreamAction::Unreachable).unwrap();
    for _ in 0..CONSECUTIVE_FAILURES_MAX - 1 {
        assert!(test.set.has_sound_alternative(a, test.now));
        assert!(!test.set.record(a, failure, Permille::ALL, test.now));
    }
    assert!(test.set.record(a, failure, Permille::ALL, test.now), "ejected");
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
    assert!(!test.set.has_sound_alternative(b, test.now));
    (0..10)
        .for_each(|_| assert!(!test.set.record(b, failure, Permille::ALL, test.now), "never the last one"));
}

#[test]
fn a_failed_request_moves_to_the_other_instance_and_to_none_after_that() {
    let (test, [a, b]) = InstanceTest::with_two_instances();
    assert_eq!(test.selected(&[a]), BTreeMap::from([(b, 1000)]));
    assert!(test.is_alternative(&[a]) && !test.is_alternative(&[a, b]));
    let mut silent = InstanceTest::with_two_instances().0;
    silent.pass(SUSPECT_AFTER + MS);
    silent.report(a, false);
    let selected = |test: &InstanceTest| {
        test.set.select(region(0), &name("d"), false, &[a], Permille::new(0), test.now).unwrap()
    };
    let both = [selected(&test), selected(&silent)];
    assert!(both.iter().all(|selected| selected.instance == b && selected.is_alternative));
    assert_eq!(both.map(|selected| selected.is_sound_alternative), [true, false], "b is silent");
    let alone = InstanceTest::with_instances(&[("a", 1)]);
    let only = test_index(&alone.set, "a");
    assert!(alone.is_alternative(&[]) && !alone.is_alternative(&[only]));
    assert_eq!(alone.set.select(region(1), &name("d"), false, &[], Permille::new(0), alone.now), None);
}

#[test]
fn an_instance_without_the_deployment_is_passed_over() {
    let mut test = InstanceTest::with_instances(&[("a", 1), ("b", 2)]);
    let [a, b] = ["a", "b"].map(|name| test_index(&test.set, name));
    test.report(b, false);
    let report = Report {
        region: "aws/us-east-1".parse().unwrap(),
        instance: "a".parse().unwrap(),
        boot_id: 1,
        sequence: 1,
        deployments: BTreeMap::new(),
        draining: false,
        has_jobs: false,
    };
    test.set.reported(a, &DecodedReport::of_all_loads(report), MS, test.now);
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]));
    // The other one has just started and does not know the replicas of the region yet.
    test.report(b, true);
    assert_eq!(test.selected(&[]), BTreeMap::from([(b, 1000)]), "it accepts requests while it drains");
    let sum = test.set.region_report(region(0), test.now).unwrap();
    assert!(!sum.draining && is_served(&sum.deployments[&name("d")]));
}

#[test]
fn a_job_is_sent_to_the_instance_with_a_queue() {
    let (mut test, [_, b]) = InstanceTest::with_two_instances();
    assert!(test.set.regions_with_jobs().is_empty());
    assert_eq!(test.set.job_host(region(0), test.now), None);
    test.report_jobs(b, false, true);
    assert_eq!(test.set.regions_with_jobs().iter().collect::<Vec<_>>(), [region(0)]);
    assert_eq!(test.set.job_host(region(0), test.now), Some(&2));
    for draw in 0..1000 {
        let select = |is_job, tried: &[_]| {
            test.set.select(region(0), &name("d"), is_job, tried, Permille::new(draw), test.now).unwrap()
        };
        assert_eq!(select(true, &[]).instance, b);
        let again = select(true, &[b]);
        assert_eq!((again.instance, again.is_alternative), (b, false), "the other one has no queue");
    }
    assert_eq!(test.selected(&[]).len(), 2, "other requests go to both");
}

#[test]
fn an_instance_with_another_address_is_another_one() {
    let (mut test, [a, b]) = InstanceTest::with_two_instances();
    test.set.began(a, test.now);
    test.set_instances(&[("a", 1), ("b", 3), ("c", 2)]);
    assert_eq!((test_index(&test.set, "a"), test.set.in_flight(a)), (a, 1));
    assert!(test_index(&test.set, "b") != b && test.set.get(b).is_none());
    // Late information about the former one changes nothing.
    test.set.failed(b, test.now);
    test.set.ended(b, true, test.now);
    test.report(b, false);
    assert_eq!(test.set.each().count(), 3);
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Report(usize, bool),
    Failure(usize),
    Ejection(usize),
    TimePasses(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0usize..4, any::<bool>()).prop_map(|(at, draining)| Event::Report(at, draining)),
        (0usize..4).prop_map(Event::Failure),
        (0usize..4).prop_map(Event::Ejection),
        (0u64..900).prop_map(Event::TimePasses),
    ]
}

proptest! {
    /// After any events an instance is selected, one that drains only if no other instance is up, and the sum of the
    /// requests in flight and of the credits is that of the instances.
    #[test]
    fn any_history_leaves_an_instance_and_prefers_those_that_are_up(
        count in 1usize..5,
        events in prop::collection::vec(event(), 0..60),
        draw in 0u16..1000,
    ) {
        let names = ["a", "b", "c", "d"];
        let all: Vec<_> = names[..count].iter().zip(1u16..).map(|(name, at)| (*name, at)).collect();
        let mut test = InstanceTest::with_instances(&all);
        let each: Vec<_> = test.set.each().map(|(index, _, _)| index).collect();
        let failure = evidence(DeadlineSetBy::Measurement, UpstreamAction::Unreachable).unwrap();
        for event in events {
            match event {
                Event::Report(at, draining) => test.report(each[at % count], draining),
                Event::Failure(at) => {
                    test.set.failed(each[at % count], test.now);
                }
                Event::Ejection(at) => {
                    test.set.record(each[at % count], failure, Permille::ALL, test.now);
                }
                Event::TimePasses(ms) => test.pass(Duration::from_millis(ms)),
            }
            let selected = test.set.select(region(0), &name("d"), false, &[], Permille::new(draw), test.now).unwrap();
            let status = test.set.status(region(0), test.now);
            let chosen = status.iter().find(|one| one.index == selected.instance).unwrap();
            let is_better = |one: &&InstanceStatus<'_, u16>| {
                one.health != Health::Down && !one.draining && (chosen.draining || chosen.health == Health::Down)
            };
            prop_assert!(status.iter().find(is_better).is_none(), "{:?} of {:?}", chosen, status);
            let sum = test.set.region_report(region(0), test.now).unwrap();
            let granted = sum.deployments.get("d").map_or(0, |load| load.granted_tokens);
            prop_assert!(granted <= 5 * count as u64 && granted.is_multiple_of(5));
        }
    }
}

/// Returns the sum of the reports of instances that are up, computed from all of their loads.
fn summed_loads(test: &InstanceTest) -> BTreeMap<DeploymentName, DeploymentLoad> {
    let all: Vec<_> = test.set.regions[&region(0)].each.values().collect();
    let is_up = |one: &&Instance<u16>| one.silence(test.now) <= SUSPECT_AFTER;
    let reported = || all.iter().copied().filter(|one| one.last_report.is_some());
    let any_up = reported().any(|one| is_up(&one));
    let current: Vec<_> = reported().filter(|one| !any_up || is_up(one)).collect();
    let names: BTreeSet<_> = current.iter().flat_map(|one| one.loads.keys()).collect();
    let sum = |name| {
        let lasts = |one: &&&Instance<u16>| !one.draining && one.serves(name);
        let any_lasts = current.iter().any(|one| lasts(&one));
        let counted = current.iter().filter(|one| !any_lasts || !one.draining);
        let loads = counted.filter_map(|one| one.loads.get(name).copied());
        loads.reduce(|sum, load| sum_of(&sum, &load)).unwrap()
    };
    names.into_iter().map(|name| (name.clone(), sum(name))).collect()
}

proptest! {
    /// The sum of a region is updated by what the reports change, and equals the sum of all loads after any reports, lost
    /// responses, drains, pauses and replaced instances. What is not touched has not changed and is asleep.
    #[test]
    fn the_updated_sum_of_a_region_is_that_of_all_loads(
        events in prop::collection::vec(
            (0usize..3, prop::collection::btree_map("[a-d]", (0u32..2, 0u64..2, 0u64..2), 0..4), 0u8..12), 1..60),
    ) {
        let names = ["x", "y", "z"];
        let mut test = InstanceTest::with_instances(&[("x", 1), ("y", 2), ("z", 3)]);
        let mut spokes: Vec<ReportEncoder> = (0..3).map(|_| ReportEncoder::default()).collect();
        let mut decoders: BTreeMap<InstanceIndex, ReportDecoder> = BTreeMap::new();
        let mut addresses = [1, 2, 3];
        let (mut before, mut sequence) = (BTreeMap::new(), 0);
        for (at, loads, kind) in events {
            sequence += 1;
            let index = test_index(&test.set, names[at]);
            match kind {
                0 => test.pass(Duration::from_millis(700)),
                1 => {
                    // Another address: another instance, whose reports begin again.
                    addresses[at] += 10;
                    let all: Vec<_> = names.into_iter().zip(addresses).collect();
                    test.set_instances(&all);
                    continue;
                }
                _ => {
                    test.pass(EXCHANGE_PERIOD);
                    let parse = |name: &String| name.parse::<DeploymentName>().unwrap();
                    let grants = loads.iter().map(|(name, (_, _, granted))| (parse(name), *granted)).collect();
                    let load = |ready: u32, pending_tokens: u64| DeploymentLoad {
                        ready,
                        pending_tokens,
                        ..DeploymentLoad::default()
                    };
                    let loads = loads.iter().map(|(name, (ready, pending, _))| (parse(name), load(*ready, *pending)));
                    spokes[at].update(loads.collect(), test.now);
                    let report = SpokeReport {
                        region: "aws/us-east-1".parse().unwrap(),
                        instance: names[at].parse().unwrap(),
                        boot_id: 1,
                        sequence,
                        draining: kind == 2,
                        has_jobs: false,
                        grants,
                    };
                    let gateway = Gateway { location: "aws/us-east-1".to_owned(), boot_id: 1 };
                    let decoder = decoders.entry(index).or_default();
                    let wire = spokes[at].encode(report, &gateway, decoder.known());
                    if kind == 3 {
                        // The response is lost.
                        continue;
                    }
                    let decoded = decoder.decode(wire).unwrap();
                    let touched = test.set.reported(index, decoded, MS, test.now);
                    let awake = decoded.report.deployments.iter().filter(|(_, load)| !load.is_asleep());
                    prop_assert!(awake.into_iter().all(|(name, _)| touched.contains(name)));
                }
            }
            let expected = summed_loads(&test);
            let RegionReport { deployments, touched, .. } = test.set.region_report(region(0), test.now).unwrap();
            prop_assert_eq!(deployments, &expected);
            for name in before.keys().chain(expected.keys()).filter(|name| !touched.contains(*name)) {
                prop_assert_eq!(before.get(name), expected.get(name));
                prop_assert!(expected[name].is_asleep());
            }
            before = expected;
        }
    }
}

#[test]
fn a_region_has_failed_only_if_no_instance_serves_the_deployment() {
    use replica_api::start_failure::StartFailure;
    let failed = DeploymentLoad { failed: Some(StartFailure::DiskFull), ..DeploymentLoad::default() };
    let unknown = DeploymentLoad::default();
    let ready = DeploymentLoad { ready: 1, ..unknown };
    let holds = DeploymentLoad { ready_in: Some(MS), ..unknown };
    for (other, expected) in [(failed, failed.failed), (unknown, failed.failed), (ready, None), (holds, None)]
    {
        assert_eq!(sum_of(&failed, &other).failed, expected, "{other:?}");
        assert_eq!(sum_of(&other, &failed).failed, expected, "{other:?}");
    }
    assert_eq!(sum_of(&sum_of(&failed, &ready), &failed).failed, None);
}
