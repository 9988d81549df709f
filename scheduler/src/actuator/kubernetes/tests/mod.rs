//! Tests of scaling a workload against a mock API server over real HTTP, with conflicts, closed watches and expired
//! versions.

mod cluster;
mod tls;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Deployment, DeploymentName};
use replica_api::start_failure::StartFailure;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::*;
use crate::actuator::ReplicaId;
use crate::config::WorkloadKind;
use cluster::Cluster;

const TIMEOUT: Duration = Duration::from_secs(20);

fn deployment() -> Deployment {
    let text = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"m\"\nengine = { kind = \"cpu\", precision = \"f32\" }\n";
    regions::parse_deployments(text, &regions::Catalogue::builtin()).unwrap().remove(0)
}

pub(super) fn config(api: &str, kind: WorkloadKind) -> KubernetesConfig {
    KubernetesConfig {
        namespace: "meridian".to_owned(),
        kind,
        name: "replica-{deployment}".to_owned(),
        port: 7200,
        api: api.parse().unwrap(),
        token_file: None,
        ca_file: None,
    }
}

/// Actuator with its targets and status.
struct ActuatorTest {
    cluster: Cluster,
    targets: watch::Sender<DeploymentTargets>,
    running: watch::Receiver<ActuatorStatus>,
    actuator: JoinHandle<()>,
}

impl ActuatorTest {
    async fn start(kind: WorkloadKind, pods: u32) -> ActuatorTest {
        let cluster = Cluster::start(kind).await;
        cluster.has(pods);
        let (targets, desired) = watch::channel(DeploymentTargets::new());
        let (found, running) = watch::channel(ActuatorStatus::default());
        let kubernetes = KubernetesActuator::new(config(&cluster.url, kind), &Transport::Loopback).unwrap();
        let test = ActuatorTest {
            cluster,
            targets,
            running,
            actuator: tokio::spawn(kubernetes.run(desired, found)),
        };
        test.set_target(0, &[]);
        test.wait_until("the pods that are there are known", |test| test.known() == pods as usize).await;
        test
    }

    /// Sets the desired number of replicas, without those in `stop`.
    fn set_target(&self, replicas: u32, stop: &[&str]) {
        self.set_target_as(true, replicas, stop);
    }

    fn set_target_as(&self, is_scaled_here: bool, replicas: u32, stop: &[&str]) {
        let stop: BTreeSet<_> = stop.iter().map(|name| self.id(name)).collect();
        let target = DeploymentTarget {
            deployment: Arc::new(deployment()),
            replicas,
            next: None,
            stop,
            is_scaled_here,
        };
        let name: DeploymentName = target.deployment.name.clone();
        self.targets.send_replace([(name, target)].into());
    }

    /// Returns the actuator's identifier of a pod.
    fn id(&self, name: &str) -> ReplicaId {
        self.cluster.uid(name)
    }

    fn known(&self) -> usize {
        self.running.borrow().replicas.len()
    }

    fn ready(&self) -> usize {
        self.running.borrow().replicas.values().filter(|found| found.ready.is_some()).count()
    }

    async fn wait_until(&self, description: &str, mut holds: impl FnMut(&ActuatorTest) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}: {:?}", self.running.borrow());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Stops the actuator gracefully.
    async fn stop(self) {
        drop(self.targets);
        self.actuator.await.unwrap();
    }
}

#[tokio::test]
async fn pods_are_ordered_through_the_scale_and_become_replicas_when_they_are_ready() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 0).await;
    // Other clients write at the same time.
    test.cluster.conflicts(3);
    test.set_target(3, &[]);
    test.wait_until("three are ordered", |test| test.known() == 3).await;
    let puts = test.cluster.take_requests().iter().filter(|request| *request == "PUT scale").count();
    assert_eq!((puts, test.ready()), (4, 0), "read and written again until there is no conflict");
    let names = test.cluster.names();
    test.cluster.becomes_ready(&names[1]);
    test.wait_until("one is ready", |test| test.ready() == 1).await;
    {
        let running = test.running.borrow();
        let found = &running.replicas[&test.id(&names[1])];
        let at = found.ready.unwrap();
        assert_eq!(at.endpoint.to_string(), "10.0.0.9:7200");
        assert!(at.took.is_some(), "its start was observed");
        assert_eq!(found.deployment.name.as_str(), "a");
    }
    test.stop().await;
}

#[tokio::test]
async fn a_spoke_that_does_not_scale_observes_the_pods_and_writes_no_count() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 2).await;
    test.cluster.take_requests();
    test.set_target_as(false, 0, &[]);
    test.cluster.has(3);
    test.wait_until("the pod of another client is known", |test| test.ready() == 3).await;
    assert!(test.cluster.take_requests().iter().all(|request| !request.starts_with("PUT")));
    test.set_target(4, &[]);
    test.wait_until("it scales now", |test| test.known() == 4).await;
    test.stop().await;
}

#[tokio::test]
async fn only_drained_pods_are_deleted() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 4).await;
    test.cluster.take_requests();
    test.set_target(1, &[]);
    let names = test.cluster.names();
    // No pod has been drained so far; these two are the first.
    test.set_target(2, &[&names[2], &names[3]]);
    test.wait_until("two are gone", |test| test.known() == 2).await;
    assert_eq!(
        test.cluster.names(),
        names[..2],
        "the undrained pods stay, which Kubernetes might have chosen"
    );
    assert_eq!(test.cluster.replicas(), 2);
    let request = test.cluster.take_requests();
    let marks: Vec<_> = request.iter().filter(|request| request.starts_with("PATCH")).cloned().collect();
    assert_eq!(marks, [format!("PATCH {}", names[2]), format!("PATCH {}", names[3])]);
    let written = request.iter().position(|request| request == "PUT scale").unwrap();
    assert!(
        request[..written].iter().filter(|request| request.starts_with("PATCH")).count() == 2,
        "marked before the scale is written"
    );
    test.stop().await;
    // When a spoke stops, its pods keep running.
}

#[tokio::test]
async fn a_stateful_set_is_scaled_down_only_as_far_as_its_highest_pods_are_drained() {
    let test = ActuatorTest::start(WorkloadKind::StatefulSet, 3).await;
    let ranks: Vec<_> = test.running.borrow().replicas.values().map(|found| found.rank).collect();
    assert_eq!(ranks, [0, 1, 2], "the highest are terminated first");
    let names = test.cluster.names();
    test.set_target(2, &[&names[1]]);
    // Requests after this use the new target.
    test.set_target(1, &[&names[1], &names[2]]);
    test.wait_until("the two highest are gone", |test| test.known() == 1).await;
    assert_eq!(test.cluster.names(), names[..1]);
    assert!(
        test.cluster.take_requests().iter().all(|request| !request.starts_with("PATCH")),
        "a StatefulSet ignores the deletion cost"
    );
    test.stop().await;
}

#[tokio::test]
async fn a_stateful_set_waits_until_its_highest_pod_is_drained() {
    let test = ActuatorTest::start(WorkloadKind::StatefulSet, 3).await;
    let names = test.cluster.names();
    for replicas in [2, 1] {
        test.wait_until("it is watched", |test| test.cluster.has_received("WATCH")).await;
        test.cluster.take_requests();
        test.set_target(replicas, &[&names[0]]);
        test.wait_until("the scale is read", |test| test.cluster.has_received("GET scale")).await;
        // A reconciliation has certainly ended once the pods are listed again.
        test.cluster.cuts_watches();
    }
    test.wait_until("it is watched", |test| test.cluster.has_received("WATCH")).await;
    assert!(!test.cluster.has_received("PUT"));
    assert_eq!((test.cluster.replicas(), test.cluster.names()), (3, names));
    test.stop().await;
}

#[tokio::test]
async fn a_closed_watch_continues_at_the_last_version() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 1).await;
    test.wait_until("it is watched", |test| test.cluster.has_received("WATCH")).await;
    test.cluster.take_requests();
    test.cluster.cuts_watches();
    test.wait_until("it is watched again", |test| test.cluster.has_received("WATCH")).await;
    test.cluster.has(2);
    test.wait_until("later changes are received", |test| test.ready() == 2).await;
    assert!(test.cluster.take_requests().iter().all(|request| request != "LIST"), "no list is needed");
    test.stop().await;
}

#[tokio::test]
async fn an_expired_watch_starts_with_a_list_and_misses_nothing() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 2).await;
    test.wait_until("it is watched", |test| test.cluster.has_received("WATCH")).await;
    test.cluster.take_requests();
    let names = test.cluster.names();
    let gone = test.id(&names[0]);
    // A pod is replaced by another one, and the events are compacted.
    test.cluster.batch(|cluster| {
        cluster.evict(&names[0]);
        cluster.compact();
    });
    test.wait_until("the deleted pod is gone", |test| {
        test.known() == 2 && !test.running.borrow().replicas.contains_key(&gone)
    })
    .await;
    assert!(test.cluster.has_received("LIST"));
    test.stop().await;
}

#[tokio::test]
async fn a_container_restart_counts_as_a_crash() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 1).await;
    test.wait_until("it is watched", |test| test.cluster.has_received("WATCH")).await;
    test.cluster.restarts(&test.cluster.names()[0]);
    let crashes = |test: &ActuatorTest| {
        test.running.borrow().crashes.values().map(|crashes| crashes.count).sum::<u64>()
    };
    test.wait_until("it is counted", |test| crashes(test) == 1).await;
    test.stop().await;
}

#[tokio::test]
async fn a_pod_that_cannot_start_has_the_reason_and_its_restarts_count_until_another_model_is_deployed() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 1).await;
    test.wait_until("it is watched", |test| test.cluster.has_received("WATCH")).await;
    // One more, which is never ready.
    let ready = test.cluster.names();
    test.set_target(2, &[]);
    test.wait_until("it is known", |test| test.known() == 2).await;
    let new = test.cluster.names().into_iter().find(|name| !ready.contains(name)).unwrap();
    let failure = |test: &ActuatorTest| test.running.borrow().replicas[&test.id(&new)].failure.clone();
    let ended = |test: &ActuatorTest| {
        test.running.borrow().ended_starts.values().map(|ended| ended.count).sum::<u64>()
    };
    assert_eq!(failure(&test), None);
    test.cluster.waits(&new, "ImagePullBackOff", 0);
    test.wait_until("its failure is known", |test| failure(test).is_some()).await;
    let message = failure(&test).unwrap().message;
    assert!(message.contains("ImagePullBackOff") && message.contains("text of the kubelet"), "{message}");
    assert_eq!(ended(&test), 0);
    test.cluster.waits(&new, "CrashLoopBackOff", 3);
    test.wait_until("its restarts are counted", |test| ended(test) == 3).await;
    assert_eq!(failure(&test).unwrap().reason, StartFailure::CrashLoop);
    let is_outdated = |test: &ActuatorTest| test.running.borrow().replicas[&test.id(&new)].is_outdated;
    assert!(!is_outdated(&test));
    test.cluster.becomes_ready(&new);
    test.wait_until("it is ready", |test| failure(test).is_none()).await;

    let name: DeploymentName = deployment().name;
    test.targets.send_modify(|targets| {
        let target = targets.get_mut(&name).unwrap();
        target.deployment = Arc::new(Deployment { model: "other".to_owned(), ..deployment() });
    });
    test.cluster.restarts(&ready[0]);
    test.wait_until("the starts of the other model count", |test| ended(test) == 0).await;
    test.wait_until("the pods of before are outdated", is_outdated).await;
    test.stop().await;
}

#[tokio::test]
async fn two_deployments_never_share_a_workload() {
    let cluster = Cluster::start(WorkloadKind::Deployment).await;
    let kubernetes =
        KubernetesActuator::new(config(&cluster.url, WorkloadKind::Deployment), &Transport::Loopback)
            .unwrap();
    let named = |name: &str| Arc::new(Deployment { name: name.parse().unwrap(), ..deployment() });
    let target = |name: &str| {
        let deployment = named(name);
        (
            deployment.name.clone(),
            DeploymentTarget {
                deployment,
                replicas: 1,
                next: None,
                stop: BTreeSet::new(),
                is_scaled_here: true,
            },
        )
    };
    let desired: DeploymentTargets = [target("A"), target("a")].into();
    let (mut scaled, mut tasks, (updates, _received)) = (BTreeMap::new(), JoinSet::new(), mpsc::channel(4));
    kubernetes.follow(&desired, &mut scaled, &mut tasks, &updates);
    kubernetes.follow(&desired, &mut scaled, &mut tasks, &updates);
    let named: Vec<_> =
        scaled.iter().map(|(name, scaled)| (name.as_str(), scaled.deployment.as_str())).collect();
    assert_eq!((named, tasks.len()), (vec![("replica-a", "A")], 1));
}

/// Requests of every kind, which the tests of the Helm chart compare with the permissions of the spoke and with the schemas of
/// Kubernetes (`tests/deploy/chart.py` of the workspace).
const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/deploy/actuator_requests.json");

#[tokio::test]
async fn the_file_of_requests_has_those_that_the_actuator_sends() {
    let test = ActuatorTest::start(WorkloadKind::Deployment, 2).await;
    test.set_target(3, &[]);
    test.wait_until("one more is ordered", |test| test.known() == 3).await;
    let names = test.cluster.names();
    test.set_target(2, &[&names[2]]);
    test.wait_until("the drained one is gone", |test| test.known() == 2).await;
    test.wait_until("it is watched", |test| test.cluster.has_received("WATCH")).await;
    let lines: Vec<String> = test.cluster.recorded().iter().map(|request| format!("  {request}")).collect();
    let text = format!("[\n{}\n]\n", lines.join(",\n"));
    test.stop().await;
    if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
        std::fs::write(RECORDED, &text).unwrap();
    }
    let expected = std::fs::read_to_string(RECORDED).unwrap();
    assert_eq!(
        text, expected,
        "write it with MERIDIAN_WRITE_DOCS=1 cargo test -p scheduler the_file_of_requests"
    );
}
