//! Tests of the messages between the spokes of a region.

use super::super::any;
use super::*;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use regions::{EngineKind, EngineSpec, Precision, Task};
use replica_api::start_failure::{StartFailure, StartFailureReport};
use serde_json::{Value, json};

prop_compose! {
    fn epoch()(store: u64, revision: u64) -> ScalerEpoch {
        ScalerEpoch { store, revision }
    }
}

fn phase() -> impl Strategy<Value = ReplicaPhase> {
    prop_oneof![Just(ReplicaPhase::Serving), Just(ReplicaPhase::Draining), Just(ReplicaPhase::Drained)]
}

fn duration() -> impl Strategy<Value = Duration> {
    (0..1_000_000u64).prop_map(Duration::from_millis)
}

prop_compose! {
    fn deployment()(
        desired: u32, max: u32, provisioning in vec(duration(), 0..3), start in duration(), is_started: bool,
    ) -> SharedDeployment {
        let failures = DeploymentFailures::default();
        SharedDeployment { desired, max, provisioning, start_time: is_started.then_some(start), failures }
    }
}

prop_compose! {
    fn state()(
        deployments in btree_map(any::name(), deployment(), 0..4),
        replicas in btree_map(any::endpoint(), (any::name(), phase()), 0..4),
    ) -> SharedRegionState {
        let replicas = replicas.into_iter();
        let replicas = replicas.map(|(at, (deployment, phase))| (at, SharedReplica { deployment, phase }));
        SharedRegionState { deployments, replicas: replicas.collect() }
    }
}

prop_compose! {
    fn demand()(
        arrived_total: u64, spillover_total: u64, pending: u64, in_flight: u32, held: u32, held_tokens: u64,
    ) -> SpokeDemand {
        SpokeDemand { arrived_total, spillover_total, pending, in_flight, held, held_tokens }
    }
}

proptest! {
    #[test]
    fn a_request_survives_a_round_trip(
        region in any::region(), instance in any::instance(), epoch in epoch(), sequence in 1u64..,
        state in state(), has_state: bool, releases: bool, wakes: u64, wait_ms in 0u64..1000,
    ) {
        let (state, wait) = (has_state.then_some(state), Duration::from_millis(wait_ms));
        let request = PeerRequest { region, instance, epoch, sequence, state, releases, wakes, wait };
        let text = serde_json::to_string(&PeerRequestV1::from(&request)).unwrap();
        let wire: PeerRequestV1 = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(PeerRequest::try_from(wire), Ok(request));
    }

    #[test]
    fn a_response_survives_a_round_trip(
        region in any::region(), instance in any::instance(), boot_id: u64, epoch in epoch(), sequence: u64,
        wakes: u64, scales: bool, demand in btree_map(any::name(), demand(), 0..4),
        replicas in btree_map(any::endpoint(), any::name(), 0..4),
        in_flight in btree_map(any::endpoint(), 0u32.., 0..4),
    ) {
        let response = PeerResponse {
            region, instance, boot_id, epoch, sequence, wakes, scales, demand, replicas, in_flight,
        };
        let text = serde_json::to_string(&PeerResponseV1::from(&response)).unwrap();
        let wire: PeerResponseV1 = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(PeerResponse::try_from(wire), Ok(response));
    }
}

fn message() -> Value {
    json!({"version": 1, "region": "aws/us-east-1", "instance": "a", "epoch": {"store": 1, "revision": 2},
           "sequence": 3, "state": {"deployments": [], "replicas": []}, "wakes": 0, "wait_ms": 10_000})
}

#[test]
fn a_request_is_held_for_at_most_a_second() {
    let wire: PeerRequestV1 = serde_json::from_value(message()).unwrap();
    assert_eq!(PeerRequest::try_from(wire).unwrap().wait, PEER_WAIT_MAX);
}

#[test]
fn a_replica_in_a_phase_of_a_later_version_gets_no_new_requests_and_is_not_stopped() {
    let mut later = message();
    let replica = |port: u16, phase: &str| {
        let endpoint = format!("10.0.0.1:{port}");
        json!({"endpoint": endpoint, "deployment": "a", "phase": phase, "since_ms": 7})
    };
    later["state"]["replicas"] = json!([replica(1, "serving"), replica(2, "warming")]);
    let wire: PeerRequestV1 = serde_json::from_value(later).unwrap();
    let state = PeerRequest::try_from(wire).unwrap().state.unwrap();
    let phases: Vec<_> = state.replicas.values().map(|replica| replica.phase).collect();
    assert_eq!(phases, [ReplicaPhase::Serving, ReplicaPhase::Draining]);
}

/// Returns the state in which the served and the next model of each of ten thousand deployments have failed.
fn all_failed(model: &str) -> SharedRegionState {
    // Each control character has six bytes in a message.
    let failure = StartFailureReport::new(StartFailure::ModelUnavailable, "\u{1}".repeat(512));
    let engine = EngineSpec { kind: EngineKind::TensorrtLlm, precision: Precision::Bf16 };
    let failed =
        FailedModel { model: model.to_owned(), task: Some(Task::Embed), engine: Some(engine), failure };
    let waiting = Some("é".repeat(100));
    let failures = DeploymentFailures { served: Some(failed.clone()), next: Some(failed), waiting };
    let named = |number: usize| {
        let deployment = SharedDeployment { failures: failures.clone(), ..SharedDeployment::default() };
        (format!("deployment-{number:05}").parse().unwrap(), deployment)
    };
    let deployments = (0..MAX_DEPLOYMENTS).map(named).collect();
    SharedRegionState { deployments, replicas: BTreeMap::new() }
}

/// Sends a state and reads it; returns the bytes of the message as well.
fn shared(state: &SharedRegionState) -> (SharedRegionState, usize) {
    let text = serde_json::to_vec(&SharedStateV1::from(state)).unwrap();
    let wire: SharedStateV1 = serde_json::from_slice(&text).unwrap();
    (SharedRegionState::try_from(wire).unwrap(), text.len())
}

#[test]
fn the_failures_of_ten_thousand_deployments_are_shared_with_their_models_and_some_texts() {
    let sent = all_failed("hf://organisation/model-with-a-usual-name");
    let (received, bytes) = shared(&sent);
    assert!(bytes < FAILED_MODELS_BYTES_MAX, "{bytes}");
    let both = |it: &SharedDeployment| [it.failures.served.clone(), it.failures.next.clone()];
    let mut texts = 0;
    for (name, deployment) in &sent.deployments {
        for (sent, received) in both(deployment).into_iter().zip(both(&received.deployments[name])) {
            let (sent, mut received) = (sent.unwrap(), received.unwrap());
            texts += usize::from(!received.failure.message.is_empty());
            assert!([&sent.failure.message, ""].contains(&received.failure.message.as_str()));
            received.failure.message.clone_from(&sent.failure.message);
            assert_eq!(received, sent, "{name}");
        }
    }
    assert!((10..100).contains(&texts), "{texts}");
}

#[test]
fn the_failures_of_models_with_long_references_are_shared_within_the_limit_of_a_message() {
    let (received, bytes) = shared(&all_failed(&"m".repeat(4096)));
    assert!(bytes < 16 << 20, "{bytes}");
    let served: Vec<_> = received.deployments.values().filter_map(|it| it.failures.served.clone()).collect();
    assert_eq!(served.len(), MAX_DEPLOYMENTS);
    assert!(served.iter().all(|it| it.failure.reason == StartFailure::ModelUnavailable));
    let known = served.iter().filter(|it| !it.model.is_empty()).count();
    assert!((500..2_000).contains(&known), "{known}");
}

#[test]
fn an_invalid_request_is_rejected_with_its_field() {
    let replicas = |count: usize| {
        let of =
            |port| json!({"endpoint": format!("10.0.0.1:{port}"), "deployment": "a", "phase": "serving"});
        json!((1..=count).map(of).collect::<Vec<_>>())
    };
    let check = |change: &dyn Fn(&mut Value), field: &str| {
        let mut message = message();
        change(&mut message);
        let wire: PeerRequestV1 = serde_json::from_value(message).unwrap();
        assert_eq!(PeerRequest::try_from(wire).unwrap_err().field, field);
    };
    check(&|it| it["sequence"] = json!(0), "sequence");
    check(&|it| it["region"] = json!("nowhere"), "region");
    check(
        &|it| it["state"]["replicas"] = json!([{"endpoint": "x", "deployment": "a", "phase": "serving"}]),
        "state.replicas[0].endpoint",
    );
    check(&|it| it["state"]["replicas"] = replicas(REGION_REPLICAS_MAX + 1), "state.replicas");
    let mut most = message();
    most["state"]["replicas"] = replicas(REGION_REPLICAS_MAX);
    let wire: PeerRequestV1 = serde_json::from_value(most).unwrap();
    assert!(PeerRequest::try_from(wire).is_ok());
    let error = serde_json::from_value::<PeerRequestV1>(json!({"version": 7})).unwrap_err();
    assert!(error.to_string().starts_with("version 7 is not supported"), "{error}");
}
