use super::*;
use crate::some_instant;
use crate::spoke::hold::{HoldDecision, HoldRequest};
use crate::spoke::{PassiveHealth, RemoteReplica, ReplicaOutcome, ReplicaStatus, TrafficOrigin};
use regions::priority::Priority;
use regions::{Catalogue, RegionRoute, RouteTable};
use replica_api::start_failure::{StartFailure, StartFailureReport};
use scheduler_api::peer::{PeerRequestV1, PeerResponseV1, SharedDeployment, SharedReplica};
use scheduler_api::start_failure::{DeploymentFailures, FailedModel};

const S: Duration = Duration::from_secs(1);
const REGION: &str = "aws/us-east-1";

fn name() -> DeploymentName {
    "minilm".parse().unwrap()
}

fn at(port: u16) -> HostPort {
    ([10, 0, 0, 1], port).into()
}

fn instance(text: &str) -> InstanceName {
    text.parse().unwrap()
}

fn epoch(revision: u64) -> ScalerEpoch {
    ScalerEpoch { store: 1, revision }
}

/// Spokes `a`, `b`, … of a region, in each other's route table, all of which can start replicas.
fn spokes<const COUNT: usize>() -> [Spoke; COUNT] {
    let names: Vec<_> =
        (0..COUNT).map(|index| instance(&char::from(b'a' + index as u8).to_string())).collect();
    let instances = names.iter().zip(7100..).map(|(name, port)| (name.clone(), at(port))).collect();
    let mut table = RouteTable::empty();
    let route = RegionRoute { instances, deployments: BTreeSet::new(), draining: false };
    table.regions.insert(REGION.parse().unwrap(), route);
    std::array::from_fn(|index| {
        let mut spoke = Spoke::new(REGION.parse().unwrap(), index as u64, Vec::new());
        spoke = spoke.with_instance(names[index].clone());
        spoke.set_can_scale();
        spoke.apply_route_table(&table, &Catalogue::builtin());
        spoke.track_demand(&BTreeSet::from([name()]));
        spoke
    })
}

/// Gives the lease of this epoch to a spoke.
fn elect(spoke: &mut Spoke, revision: u64, now: Instant) {
    let lease = ScalerLease { boot_id: spoke.boot_id(), epoch: epoch(revision) };
    spoke.scaler_lease_reported(Some(lease), now);
    assert!(spoke.is_scaler(now));
}

/// Returns a state with these replicas, in which a start takes ten seconds.
fn state(replicas: &[(u16, ReplicaPhase)]) -> SharedRegionState {
    let deployment = SharedDeployment {
        desired: 1,
        max: 4,
        provisioning: Vec::new(),
        start_time: Some(10 * S),
        failures: DeploymentFailures::default(),
    };
    let replicas =
        replicas.iter().map(|(port, phase)| (at(*port), SharedReplica { deployment: name(), phase: *phase }));
    SharedRegionState { deployments: BTreeMap::from([(name(), deployment)]), replicas: replicas.collect() }
}

/// One exchange, as on the wire. Returns its effect at both ends.
fn exchange(scaler: &mut Spoke, other: &mut Spoke, now: Instant) -> (PeerChanges, PeerReceipt) {
    let peer = other.instance().clone();
    let request = PeerRequestV1::from(&scaler.peer_request(&peer, now).expect("the scaler has an epoch"));
    let receipt = other.peer_requested(&request.try_into().unwrap(), now).unwrap();
    let response = PeerResponseV1::from(&other.peer_response(now).unwrap());
    (scaler.peer_responded(&peer, response.try_into().unwrap(), now).unwrap(), receipt)
}

fn observe(spoke: &mut Spoke, endpoint: &HostPort, now: Instant) {
    let status = ReplicaStatus {
        model: None,
        failure: None,
        names: BTreeSet::from([name()]),
        ready: true,
        draining: false,
        pending_tokens: 0,
        interactive_tokens: None,
        tokens_per_second: 1000.0,
    };
    let numbers = spoke.endpoints().into_iter().filter(|(_, at)| at == endpoint);
    for (number, _) in numbers.collect::<Vec<_>>() {
        spoke.observe_replica(number, status.clone(), now);
    }
}

fn endpoints(spoke: &Spoke) -> Vec<HostPort> {
    spoke.endpoints().into_values().collect()
}

#[test]
fn a_request_held_at_another_spoke_reaches_the_scaler() {
    let ([mut a, mut b], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    assert!(a.peers().is_empty(), "there is no state yet");
    a.share(state(&[]));
    assert_eq!(a.peers(), BTreeMap::from([(instance("b"), at(7101))]));
    assert_eq!(b.ready_in(&name(), now), None);
    assert!(exchange(&mut a, &mut b, now).1.is_changed);
    assert!(!b.is_scaler(now));
    assert_eq!(b.ready_in(&name(), now), Some(10 * S), "the peer's scale-up is known");
    a.region_demand(now);

    b.arrived(&name(), 25, TrafficOrigin::Local, now);
    let request = HoldRequest {
        deployment: &name(),
        tenant: "t",
        priority: Priority::Interactive,
        bytes: 100,
        tokens: 25,
        deadline: now + 30 * S,
        other_region_in: None,
    };
    let Ok(HoldDecision::Held { ticket, needs_start: true }) = b.hold_or_forward(&request, now) else {
        panic!("the request is not held");
    };
    let (news, receipt) = exchange(&mut a, &mut b, now);
    assert!(news.has_woken && receipt.wait > Duration::ZERO && b.wakes() == 1);
    let demand = a.region_demand(now)[&name()];
    assert_eq!((demand.arrived, demand.pending, demand.in_flight), (25, 25, 1));
    assert!(!exchange(&mut a, &mut b, now).0.has_woken, "it is known");
    assert_eq!(a.region_demand(now)[&name()].arrived, 0);
    b.return_ticket(ticket);
}

#[test]
fn a_failed_deployment_of_the_scaler_is_failed_at_every_spoke() {
    let ([mut a, mut b], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    let failure = StartFailureReport::new(StartFailure::ModelMissing, "404");
    let failed = FailedModel { model: "hf://m".to_owned(), task: None, engine: None, failure };
    let mut shared = state(&[]);
    let deployment = shared.deployments.get_mut(&name()).unwrap();
    deployment.failures =
        DeploymentFailures { served: Some(failed.clone()), next: Some(failed.clone()), waiting: None };
    let failures = deployment.failures.clone();
    a.share(shared);
    exchange(&mut a, &mut b, now);
    assert_eq!(b.start_failure(&name(), now), Some(&failed));
    assert_eq!(b.start_failures(now), [(name(), failures)].into(), "the hub may learn it from this spoke");
    a.share(state(&[]));
    exchange(&mut a, &mut b, now);
    assert_eq!(b.start_failure(&name(), now), None);
    a.share(state(&[(7300, ReplicaPhase::Serving)]));
    exchange(&mut a, &mut b, now);
    elect(&mut b, 5, now);
    b.begin_scaling(&BTreeSet::from([name()]), now);
    assert!(b.start_failures(now).is_empty(), "a new scaler decides itself");
}

#[test]
fn a_spoke_that_no_longer_scales_reports_the_failures_of_the_next_scaler_and_not_its_own() {
    let ([mut a, mut b], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    a.share(state(&[]));
    exchange(&mut a, &mut b, now);
    let failures = |reason| {
        let failure = StartFailureReport::new(reason, "text");
        let failed = FailedModel { model: "hf://m".to_owned(), task: None, engine: None, failure };
        DeploymentFailures { served: Some(failed), ..DeploymentFailures::default() }
    };
    let reason = |spoke: &Spoke| spoke.start_failure(&name(), now).map(|failed| failed.failure.reason);
    a.set_start_failures([(name(), failures(StartFailure::ModelMissing))].into());
    assert_eq!(reason(&a), Some(StartFailure::ModelMissing));
    elect(&mut b, 5, now);
    a.end_scaling();
    assert_eq!(reason(&a), None, "the next scaler has shared nothing yet");

    // It shares its own decision before this spoke has taken notice of it.
    a.set_start_failures([(name(), failures(StartFailure::ModelMissing))].into());
    b.begin_scaling(&BTreeSet::from([name()]), now);
    let mut shared = state(&[]);
    shared.deployments.get_mut(&name()).unwrap().failures = failures(StartFailure::DiskFull);
    b.share(shared);
    exchange(&mut b, &mut a, now);
    a.set_start_failures([(name(), failures(StartFailure::ModelMissing))].into());
    a.end_scaling();
    assert_eq!(reason(&a), Some(StartFailure::DiskFull));
}

#[test]
fn a_replica_is_known_to_all_spokes_and_stopped_when_none_uses_it() {
    let ([mut a, mut b, mut c], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    a.add_started_replica(at(1), name(), true);
    let first = a.share(state(&[(1, ReplicaPhase::Serving)]));
    assert!(first.is_some() && a.share(state(&[(1, ReplicaPhase::Serving)])).is_none(), "it is unchanged");
    for spoke in [&mut b, &mut c] {
        exchange(&mut a, spoke, now);
        assert_eq!(endpoints(spoke), [at(1)]);
        observe(spoke, &at(1), now);
    }
    let selected = b.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).unwrap();
    a.share(state(&[(1, ReplicaPhase::Draining)]));
    assert!(!a.is_clear_elsewhere(&at(1), None, now), "no other spoke has reported it");
    exchange(&mut a, &mut c, now);
    exchange(&mut a, &mut b, now);
    assert!(b.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).is_err(), "it drains");
    assert!(!a.is_clear_elsewhere(&at(1), None, now), "a request of b is in flight");
    b.finished(&selected, ReplicaOutcome::Responded, now);
    exchange(&mut a, &mut b, now);
    assert!(a.is_clear_elsewhere(&at(1), None, now));
    a.share(state(&[]));
    exchange(&mut a, &mut b, now);
    assert!(endpoints(&b).is_empty());
}

#[test]
fn a_silent_spoke_delays_a_drain_for_a_limited_time() {
    let ([mut a, mut b], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    a.share(state(&[(1, ReplicaPhase::Serving)]));
    exchange(&mut a, &mut b, now);
    a.share(state(&[(1, ReplicaPhase::Draining)]));
    a.peer_request(&instance("b"), now + S);
    assert!(!a.is_clear_elsewhere(&at(1), None, now + SILENCE_MAX));
    assert!(a.is_clear_elsewhere(&at(1), None, now + SILENCE_MAX + Duration::from_millis(1)));
}

#[test]
fn the_replicas_of_a_former_scaler_serve_until_the_new_one_drains_them() {
    let ([mut a, mut b, mut c], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    a.add_started_replica(at(1), name(), true);
    a.share(state(&[(1, ReplicaPhase::Serving)]));
    exchange(&mut a, &mut b, now);
    exchange(&mut a, &mut c, now);
    observe(&mut b, &at(1), now);

    elect(&mut b, 5, now);
    b.begin_scaling(&BTreeSet::from([name()]), now);
    assert_eq!(b.ready_in(&name(), now), Some(10 * S), "requests are held meanwhile");
    let remote = RemoteReplica {
        endpoint: at(1),
        deployment: name(),
        owner: None,
        phase: ReplicaPhase::Serving,
        is_serving: true,
        in_flight: 0,
    };
    assert_eq!(b.remote_replicas(now), std::slice::from_ref(&remote));
    b.share(state(&[(1, ReplicaPhase::Serving)]));
    exchange(&mut b, &mut a, now);
    exchange(&mut b, &mut c, now);
    assert!(!a.is_scaler(now) && !c.is_scaler(now));
    assert!(a.awaits_handover(now) && !c.awaits_handover(now));
    assert_eq!(b.remote_replicas(now), [RemoteReplica { owner: Some(instance("a")), ..remote }]);
    assert_eq!(endpoints(&c), [at(1)]);

    b.set_remote_phase(&at(1), ReplicaPhase::Draining);
    b.share(state(&[(1, ReplicaPhase::Draining)]));
    assert!(!b.is_clear_elsewhere(&at(1), Some(&instance("a")), now));
    exchange(&mut b, &mut c, now);
    assert!(b.is_clear_elsewhere(&at(1), Some(&instance("a")), now), "its owner checks itself");
    exchange(&mut b, &mut a, now);
    assert_eq!(a.shared_phase(&at(1)), Some(ReplicaPhase::Draining));
    b.set_remote_phase(&at(1), ReplicaPhase::Drained);
    b.share(state(&[(1, ReplicaPhase::Drained)]));
    exchange(&mut b, &mut a, now);
    assert_eq!(a.shared_phase(&at(1)), Some(ReplicaPhase::Drained));
    let number = *a.endpoints().first_key_value().unwrap().0;
    a.remove_started_replica(number);
    assert!(exchange(&mut b, &mut a, now).0.replicas_changed);
    assert!(b.remote_replicas(now).is_empty() && !a.awaits_handover(now));
}

#[test]
fn a_former_scaler_has_no_effect_and_learns_of_its_successor() {
    let ([mut a, mut b, mut c], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    elect(&mut b, 5, now);
    a.share(state(&[(1, ReplicaPhase::Serving)]));
    b.share(state(&[(2, ReplicaPhase::Serving)]));
    exchange(&mut b, &mut c, now);
    let (news, receipt) = exchange(&mut a, &mut c, now);
    assert!(!receipt.is_changed && news == PeerChanges::default());
    assert_eq!(endpoints(&c), [at(2)]);
    assert!(!a.is_scaler(now) && b.is_scaler(now), "it learned the epoch from c");
    assert!(a.peer_request(&instance("c"), now).is_none());
}

#[test]
fn a_replica_that_all_spokes_observe_counts_once() {
    let ([mut a, mut b], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    a.add_started_replica(at(1), name(), false);
    a.share(state(&[(1, ReplicaPhase::Serving)]));
    exchange(&mut a, &mut b, now);
    let number = b.add_started_replica(at(1), name(), false);
    assert_eq!(b.endpoints(), BTreeMap::from([(number, at(1))]));
    assert!(!exchange(&mut a, &mut b, now).0.replicas_changed);
    assert!(a.remote_replicas(now).is_empty() && !b.awaits_handover(now), "it does not end with b");
}

#[test]
fn a_replica_whose_spoke_is_gone_is_removed_when_it_has_failed() {
    let ([mut a, mut b], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    a.share(state(&[(1, ReplicaPhase::Serving), (2, ReplicaPhase::Serving)]));
    exchange(&mut a, &mut b, now);
    elect(&mut b, 5, now);
    for (number, endpoint) in b.endpoints() {
        observe(&mut b, &endpoint, now);
        b.replica_failed(number, now);
    }
    b.set_remote_phase(&at(2), ReplicaPhase::Draining);
    assert!(b.remove_gone_replicas(now));
    assert_eq!(endpoints(&b), [at(1)], "the other one may recover");
    assert!(!b.remove_gone_replicas(now + 29 * S));
    observe(&mut b, &at(1), now + 29 * S);
    assert!(!b.remove_gone_replicas(now + 30 * S));
    let number = *b.endpoints().first_key_value().unwrap().0;
    b.replica_failed(number, now + 31 * S);
    assert!(!b.remove_gone_replicas(now + 31 * S) && b.remove_gone_replicas(now + 61 * S));
}

#[test]
fn a_restarted_spoke_gets_the_state_again_and_messages_of_others_are_rejected() {
    let ([mut a, mut b], now) = (spokes(), some_instant());
    elect(&mut a, 4, now);
    a.share(state(&[(1, ReplicaPhase::Serving)]));
    exchange(&mut a, &mut b, now);
    assert!(a.peer_request(&instance("b"), now).unwrap().state.is_none(), "it has the state");
    let [_, mut restarted] = spokes();
    let (_, receipt) = exchange(&mut a, &mut restarted, now);
    assert!(!receipt.is_changed && receipt.wait.is_zero(), "it responds at once that it has no state");
    exchange(&mut a, &mut restarted, now);
    assert_eq!(endpoints(&restarted), [at(1)]);

    let request = a.peer_request(&instance("b"), now).unwrap();
    let elsewhere = PeerRequest { region: "aws/eu-central-1".parse().unwrap(), ..request.clone() };
    let itself = PeerRequest { instance: instance("b"), ..request };
    for wrong in [elsewhere, itself] {
        assert!(b.peer_requested(&wrong, now).is_err());
    }
    let response = PeerResponse { instance: instance("c"), ..b.peer_response(now).unwrap() };
    let error = a.peer_responded(&instance("b"), response, now).unwrap_err();
    assert!(error.to_string().contains("aws/us-east-1 c"), "{error}");
}
