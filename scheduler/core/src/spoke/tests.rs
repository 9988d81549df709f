//! Tests of a region's decisions, as sequences of events.

use super::*;
use crate::some_instant;
use regions::RegionRoute;
use scheduler_api::report::{DeploymentLoad, EXCHANGE_PERIOD, ExchangeRequest, Gateway};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

/// Region with a clock that the test controls.
struct SpokeTest {
    spoke: Spoke,
    now: Instant,
}

fn name(text: &str) -> DeploymentName {
    text.parse().unwrap()
}

fn status(pending_tokens: u64, tokens_per_second: f64) -> ReplicaStatus {
    let names = BTreeSet::from([name("minilm")]);
    ReplicaStatus {
        model: None,
        failure: None,
        names,
        ready: true,
        draining: false,
        pending_tokens,
        interactive_tokens: None,
        tokens_per_second,
    }
}

impl SpokeTest {
    fn of(replicas: u16) -> SpokeTest {
        let at = |port| HostPort::from(([10, 0, 0, 1], port));
        let spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=replicas).map(at).collect());
        SpokeTest { spoke, now: some_instant() }
    }

    /// Creates one replica for each pair of pending tokens and tokens per second.
    fn with(replicas: &[(u64, f64)]) -> SpokeTest {
        let mut region = SpokeTest::of(replicas.len() as u16);
        for (index, (pending, speed)) in replicas.iter().enumerate() {
            region.report_status(index, status(*pending, *speed));
        }
        region
    }

    fn report_status(&mut self, index: usize, observed: ReplicaStatus) {
        self.spoke.observe_replica(index, observed, self.now);
    }

    fn select_replica(&mut self, tokens: u64) -> Result<SelectedReplica, NoReplica> {
        self.select_with_health(tokens, &[])
    }

    /// Selects a replica; those without an entry in `health` are healthy.
    fn select_with_health(
        &mut self,
        tokens: u64,
        health: &[(Eligibility, u64)],
    ) -> Result<SelectedReplica, NoReplica> {
        let of = |index| {
            let health = health.get(index).copied();
            health.map_or(PassiveHealth::HEALTHY, |(eligibility, slowness_permille)| PassiveHealth {
                eligibility,
                slowness_permille,
            })
        };
        self.spoke.select_replica(&name("minilm"), tokens, of, self.now)
    }

    fn chosen(&mut self, tokens: u64) -> usize {
        self.select_replica(tokens).expect("a replica is ready").index
    }

    fn finished(&mut self, selected: &SelectedReplica, outcome: ReplicaOutcome) {
        self.spoke.finished(selected, outcome, self.now);
    }

    fn ready(&self) -> u32 {
        self.spoke.loads(self.now)[&name("minilm")].ready
    }
}

const NONE_READY: NoReplica = NoReplica::NoneReady { retry_after: RETRY_AFTER };

#[test]
fn a_request_goes_to_the_replica_with_the_earliest_finish_time() {
    let check = |replicas: &[(u64, f64)], tokens: u64, expected: usize| {
        assert_eq!(SpokeTest::with(replicas).chosen(tokens), expected, "{replicas:?}, {tokens} tokens");
    };
    check(&[(500, 1000.0), (400, 1000.0)], 100, 1); // smaller backlog
    check(&[(500, 2000.0), (400, 1000.0)], 100, 0); // larger backlog, and faster
    check(&[(0, 1000.0), (150, 2000.0)], 100, 0); // a short request: the idle one
    check(&[(0, 1000.0), (150, 2000.0)], 1000, 1); // a long one: the fast one
    check(&[(7, 1000.0), (7, 1000.0)], 100, 0); // a tie is broken by the number
    check(&[(200, 1000.0), (100, 0.0)], 100, 1); // of unknown speed: as fast as the fastest
    check(&[(200, 0.0), (100, 0.0)], 100, 1); // no speed is known: fewest tokens
    check(&[(200, f64::NAN), (100, -1.0)], 100, 1); // an invalid speed is unknown
    check(&[(u64::MAX, 1000.0), (u64::MAX - 1, 1e-300)], u64::MAX, 0); // no overflow
}

#[test]
fn the_evidence_of_requests_outweighs_a_replicas_status() {
    use Eligibility::*;
    let full = Err(NoReplica::Full { retry_after: RETRY_AFTER });
    let check = |health: [(Eligibility, u64); 2], expected: Result<usize, NoReplica>| {
        let mut region = SpokeTest::with(&[(0, 1000.0), (1900, 1000.0)]);
        let chosen = region.select_with_health(100, &health).map(|selected| selected.index);
        assert_eq!(chosen, expected, "{health:?}");
    };
    check([(Normal, 1000), (Normal, 1000)], Ok(0));
    check([(Normal, 20_000), (Normal, 1000)], Ok(0)); // 2 s each, and a tie
    check([(Normal, 20_001), (Normal, 1000)], Ok(1)); // it reports that it is idle, and is twenty times slower
    check([(LastResort, 1000), (Normal, 1000)], Ok(1));
    check([(LastResort, 1000), (LastResort, 1000)], Ok(0));
    check([(LastResort, 1000), (Full, 1000)], Ok(0));
    check([(Full, 1000), (Normal, 1000)], Ok(1));
    check([(Full, 1000), (Full, 1000)], full);
    check([(AlreadyTried, 1000), (Full, 1000)], full);
    check([(AlreadyTried, 1000), (Normal, 9000)], Ok(1));
    check([(AlreadyTried, 1000), (AlreadyTried, 1000)], Err(NONE_READY));
    check([(Normal, u64::MAX), (Normal, u64::MAX)], Ok(0));
}

#[test]
fn a_timeout_does_not_make_a_replica_unready() {
    let mut region = SpokeTest::with(&[(0, 1000.0)]);
    let selected = region.select_replica(100).unwrap();
    region.finished(&selected, ReplicaOutcome::TimedOut);
    assert_eq!((region.chosen(1), region.ready()), (0, 1));
}

#[test]
fn a_burst_between_two_statuses_is_spread() {
    let mut region = SpokeTest::with(&[(0, 1000.0), (0, 1000.0), (0, 2000.0)]);
    let mut sent = [0; 3];
    for _ in 0..40 {
        sent[region.chosen(100)] += 1;
    }
    assert_eq!(sent, [10, 10, 20]);
}

#[test]
fn a_request_that_has_ended_no_longer_counts() {
    let mut region = SpokeTest::with(&[(0, 1000.0), (50, 1000.0)]);
    let first = region.select_replica(100).unwrap();
    assert_eq!((first.index, region.select_replica(100).unwrap().index), (0, 1));
    region.finished(&first, ReplicaOutcome::Responded);
    assert_eq!(region.chosen(100), 0);
}

#[test]
fn a_request_without_a_reported_end_is_forgotten_at_the_next_status() {
    let mut region = SpokeTest::with(&[(0, 1000.0), (50, 1000.0)]);
    drop(region.select_replica(1_000_000));
    assert_eq!(region.chosen(1), 1);
    region.report_status(0, status(0, 1000.0));
    assert_eq!(region.chosen(1), 0);
}

#[test]
fn a_replicas_status_and_the_local_count_are_not_added() {
    let mut region = SpokeTest::with(&[(0, 1000.0)]);
    let ours = region.select_replica(100).unwrap();
    region.report_status(0, status(120, 1000.0)); // the same request, in real tokens
    let pending = |region: &SpokeTest| region.spoke.loads(region.now)[&name("minilm")].pending_tokens;
    assert_eq!(pending(&region), 120);
    region.finished(&ours, ReplicaOutcome::Responded);
    assert_eq!(pending(&region), 20, "extrapolated from 120, by the estimate");
    region.report_status(0, status(0, 1000.0));
    assert_eq!(pending(&region), 0);
}

#[test]
fn a_failed_replica_is_not_used_until_its_next_status() {
    let mut region = SpokeTest::with(&[(0, 1000.0), (500, 1000.0)]);
    let first = region.select_replica(100).unwrap();
    region.finished(&first, ReplicaOutcome::Failed);
    assert_eq!((region.chosen(1), region.ready()), (1, 1));
    region.spoke.replica_failed(1, region.now);
    assert_eq!((region.select_replica(1), region.ready()), (Err(NONE_READY), 0));
    region.report_status(0, status(0, 1000.0));
    assert_eq!((region.chosen(1), region.ready()), (0, 1));
}

#[test]
fn a_canceled_request_does_not_make_the_replica_unready() {
    let mut region = SpokeTest::with(&[(0, 1000.0)]);
    let selected = region.select_replica(100).unwrap();
    region.finished(&selected, ReplicaOutcome::Canceled);
    assert_eq!((region.chosen(1), region.ready()), (0, 1));
}

#[test]
fn a_replica_without_a_recent_status_is_not_ready() {
    for (silence, ready) in [(STATUS_AGE_MAX, 2), (STATUS_AGE_MAX + MS, 1)] {
        let mut region = SpokeTest::with(&[(0, 1000.0), (500, 1000.0)]);
        region.now += silence;
        region.report_status(1, status(500, 1000.0));
        assert_eq!(region.ready(), ready, "{silence:?}");
        assert_eq!(region.chosen(1), 2 - ready as usize);
    }
}

#[test]
fn if_all_replicas_are_silent_the_last_state_stays() {
    let mut region = SpokeTest::with(&[(0, 1000.0), (500, 1000.0)]);
    region.spoke.replica_failed(0, region.now);
    region.now += 3600 * 1000 * MS;
    assert_eq!((region.chosen(1), region.ready()), (1, 1));
    // A failed poll is contact too, so this process is not isolated.
    region.spoke.replica_failed(0, region.now);
    assert_eq!((region.select_replica(1), region.ready()), (Err(NONE_READY), 0));
}

#[test]
fn only_a_replica_that_accepts_requests_is_ready() {
    let starting = ReplicaStatus { ready: false, ..status(0, 0.0) };
    let draining = ReplicaStatus { draining: true, ..status(0, 1000.0) };
    let other = ReplicaStatus { names: BTreeSet::from([name("other")]), ..status(0, 1000.0) };
    for (observed, expected) in
        [(starting, NONE_READY), (draining, NONE_READY), (other, NoReplica::UnknownDeployment)]
    {
        let mut region = SpokeTest::of(1);
        region.report_status(0, observed.clone());
        assert_eq!(region.select_replica(1), Err(expected), "{observed:?}");
    }
    let mut pending = SpokeTest::of(1);
    assert_eq!(pending.select_replica(1), Err(NONE_READY), "its deployments are not known yet");
    assert_eq!(SpokeTest::of(0).select_replica(1), Err(NoReplica::UnknownDeployment));
}

#[test]
fn a_report_contains_every_deployment_of_the_region() {
    let mut region = SpokeTest::with(&[(30, 1000.0), (12, 500.0), (0, 0.0)]);
    let both = BTreeSet::from([name("minilm"), name("minilm-eu")]);
    region.report_status(1, ReplicaStatus { names: both, interactive_tokens: Some(5), ..status(12, 500.0) });
    let starting = ReplicaStatus { names: BTreeSet::from([name("later")]), ready: false, ..status(0, 0.0) };
    region.report_status(2, starting);

    let load = |ready, pending_tokens, interactive_tokens, tokens_per_second| DeploymentLoad {
        ready,
        ready_in: None,
        pending_tokens,
        interactive_tokens,
        tokens_per_second,
        granted_tokens: 0,
        failed: None,
    };
    let deployments = BTreeMap::from([
        (name("later"), load(0, 0, None, 0.0)),
        (name("minilm"), load(2, 42, None, 1500.0)),
        (name("minilm-eu"), load(1, 12, Some(5), 500.0)),
    ]);
    assert_eq!(region.spoke.loads(region.now), deployments);
    let report = region.spoke.exchange(&request(1, 3, BTreeMap::new()), region.now);
    assert_eq!(
        (report.region.to_string().as_str(), report.boot_id, report.sequence),
        ("aws/us-east-1", 7, 3)
    );
    assert_eq!((report.instance, report.draining), (region.spoke.instance().clone(), false));
    let ready = BTreeSet::from([name("minilm"), name("minilm-eu")]);
    assert_eq!(region.spoke.deployments_ready(region.now), ready);
}

#[test]
fn a_draining_region_reports_it_and_still_serves_requests() {
    let mut region = SpokeTest::with(&[(0, 1000.0)]);
    region.spoke.set_draining();
    assert!(region.spoke.exchange(&request(1, 1, BTreeMap::new()), region.now).draining);
    assert!(region.spoke.deployments_ready(region.now).is_empty());
    assert_eq!(region.chosen(1), 0);
}

/// The only replica of a starved machine reported nothing for 2 s; its region rejected 13 requests that it would have
/// served.
#[test]
fn a_late_replica_is_only_avoided_in_favour_of_others_until_it_counts_as_frozen() {
    let late = |silence: Duration, replicas: &[(u64, f64)]| {
        let mut region = SpokeTest::with(replicas);
        region.now += silence;
        for index in 1..replicas.len() {
            region.report_status(index, status(1_000_000, 1000.0));
        }
        region.spoke.replica_late(0, region.now);
        region.select_replica(1).map(|selected| selected.index)
    };
    assert_eq!(late(SILENCE_MAX, &[(0, 1000.0)]), Ok(0));
    assert_eq!(late(SILENCE_MAX + MS, &[(0, 1000.0)]), Err(NONE_READY));
    assert_eq!(late(STATUS_AGE_MAX, &[(0, 1000.0), (0, 1000.0)]), Ok(0));
    assert_eq!(late(STATUS_AGE_MAX + MS, &[(0, 1000.0), (0, 1000.0)]), Ok(1));
    let mut never = SpokeTest::of(1);
    never.spoke.replica_late(0, never.now);
    assert_eq!(never.select_replica(1), Err(NONE_READY));
}

/// Returns a request of the gateway with this boot id.
fn request(gateway: u64, sequence: u64, requested: BTreeMap<DeploymentName, u64>) -> ExchangeRequest {
    let gateway = Gateway { location: "50.1,8.7".to_owned(), boot_id: gateway };
    ExchangeRequest { gateway, sequence, known: None, requested }
}

/// Returns the tokens of `deployment` granted to a gateway that requests the maximum, with `local` tokens of local
/// traffic a period.
fn granted(region: &mut SpokeTest, local: u64, deployment: &str) -> u64 {
    for _ in 0..5 {
        region.spoke.arrived(&name(deployment), local, TrafficOrigin::Local, region.now);
        region.spoke.arrived(&name(deployment), 1_000_000, TrafficOrigin::Spillover, region.now);
        region.now += EXCHANGE_PERIOD;
    }
    let names = region.spoke.deployments_ready(region.now);
    let requested = names.into_iter().map(|name| (name, 1_000_000)).collect();
    let report = region.spoke.exchange(&request(1, 1, requested), region.now);
    let granted = report.grants[&name(deployment)];
    assert_eq!(region.spoke.granted(&name(deployment)), granted);
    granted
}

#[test]
fn a_region_offers_its_capacity_beyond_the_local_traffic() {
    // A period is a fifth of a second.
    let check = |replicas: &[(u64, f64)], local: u64, expected: u64| {
        assert_eq!(
            granted(&mut SpokeTest::with(replicas), local, "minilm"),
            expected,
            "{replicas:?}, {local} a period"
        );
    };
    check(&[(0, 10_000.0)], 0, 1800);
    check(&[(0, 10_000.0), (0, 5_000.0)], 0, 2700);
    check(&[(0, 10_000.0)], 1000, 800); // spillover is not local traffic
    check(&[(0, 10_000.0)], 1801, 0);
    check(&[(2000, 10_000.0)], 1000, 800); // the backlog is one period
    check(&[(2001, 10_000.0)], 1000, 240);
    // Slow replicas: a share of less than a hundred tokens is not rounded away.
    check(&[(0, 490.0)], 0, 88);
    check(&[(0, 700.0)], 64, 62);
    check(&[(150, 700.0)], 64, 18);
    check(&[(0, 0.0)], 0, 0); // its speed is unknown
    check(&[(0, f64::INFINITY)], 0, 0);
    let mut draining = SpokeTest::with(&[(0, 10_000.0)]);
    draining.spoke.set_draining();
    assert_eq!(granted(&mut draining, 0, "minilm"), 0);
}

#[test]
fn deployments_on_the_same_replicas_share_their_spare_capacity() {
    let mut region = SpokeTest::with(&[(0, 10_000.0), (0, 10_000.0)]);
    let both = BTreeSet::from([name("minilm"), name("minilm-eu")]);
    region.report_status(1, ReplicaStatus { names: both.clone(), ..status(0, 10_000.0) });
    assert_eq!(granted(&mut region, 0, "minilm-eu"), 1800, "half of the spare capacity of both replicas");
    let mut region = SpokeTest::with(&[(0, 10_000.0)]);
    region.report_status(0, ReplicaStatus { names: both, ..status(0, 10_000.0) });
    assert_eq!(
        granted(&mut region, 1000, "minilm-eu"),
        400,
        "traffic of one deployment reduces the spare capacity of the other"
    );
}

/// Returns a table with these instances in the region of the tests.
fn routed(instances: &[&str]) -> RouteTable {
    let at = |name: &&str| (name.parse().unwrap(), ([10, 0, 0, 9], 7100).into());
    let route = RegionRoute {
        instances: instances.iter().map(at).collect(),
        deployments: BTreeSet::new(),
        draining: false,
    };
    RouteTable { regions: [("aws/us-east-1".parse().unwrap(), route)].into(), ..RouteTable::empty() }
}

/// Invariant 7 (Rationed spillover) with several spokes on the same replicas.
#[test]
fn the_spokes_of_a_region_together_report_its_load_and_grant_at_most_its_spare_capacity() {
    let (catalogue, names) = (Catalogue::builtin(), ["a", "b", "c"]);
    let exchange = |region: &mut SpokeTest, gateway: u64| {
        let requested = BTreeMap::from([(name("minilm"), 1_000_000)]);
        let report = region.spoke.exchange(&request(gateway, 1, requested), region.now);
        let granted_tokens = report.grants[&name("minilm")];
        DeploymentLoad { granted_tokens, ..region.spoke.loads(region.now)[&name("minilm")] }
    };
    let mut alone = SpokeTest::with(&[(900, 3000.0), (0, 3000.0)]);
    let whole = exchange(&mut alone, 1);
    let (mut granted, mut pending, mut speed) = (0, 0, 0.0);
    for instance in names {
        let mut region = SpokeTest::with(&[(900, 3000.0), (0, 3000.0)]);
        region.spoke = region.spoke.with_instance(instance.parse().unwrap());
        region.spoke.apply_route_table(&routed(&names), &catalogue);
        assert_eq!(region.spoke.instances(), 3);
        for gateway in 1..=4 {
            let load = exchange(&mut region, gateway);
            granted += load.granted_tokens;
            if gateway == 1 {
                (pending, speed) = (pending + load.pending_tokens, speed + load.tokens_per_second);
            }
        }
    }
    assert!(granted > whole.granted_tokens / 2 && granted <= whole.granted_tokens, "{granted} of {whole:?}");
    assert_eq!((pending, speed.round()), (whole.pending_tokens, whole.tokens_per_second));
}

#[test]
fn a_spoke_counts_itself_before_the_table_does() {
    let mut region = SpokeTest::of(1);
    region.spoke = region.spoke.with_instance("c".parse().unwrap());
    region.spoke.apply_route_table(&routed(&["a", "b"]), &Catalogue::builtin());
    assert_eq!(region.spoke.instances(), 3);
    region.spoke.apply_route_table(&routed(&["c"]), &Catalogue::builtin());
    assert_eq!(region.spoke.instances(), 1);
}
