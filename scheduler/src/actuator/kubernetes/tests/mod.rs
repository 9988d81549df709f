//! A cluster's workload that is scaled, over real HTTP, and everything that an API server can say to that.

mod cluster;
mod tls;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Deployment, DeploymentName};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::*;
use crate::actuator::ReplicaId;
use crate::config::WorkloadKind;
use cluster::Cluster;

const PATIENCE: Duration = Duration::from_secs(20);

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

/// An actuator, and what it is told and says.
struct Scene {
    cluster: Cluster,
    targets: watch::Sender<Targets>,
    running: watch::Receiver<ActuatorStatus>,
    acts: JoinHandle<()>,
}

impl Scene {
    async fn of(kind: WorkloadKind, pods: u32) -> Scene {
        let cluster = Cluster::start(kind).await;
        cluster.has(pods);
        let (targets, wanted) = watch::channel(Targets::new());
        let (found, running) = watch::channel(ActuatorStatus::default());
        let kubernetes = KubernetesActuator::new(config(&cluster.url, kind)).unwrap();
        let scene = Scene { cluster, targets, running, acts: tokio::spawn(kubernetes.run(wanted, found)) };
        scene.wants(0, &[]);
        scene.until("the pods that are there are known", |scene| scene.known() == pods as usize).await;
        scene
    }

    /// So many should be beside those that stop.
    fn wants(&self, replicas: u32, stop: &[&str]) {
        let stop: BTreeSet<_> = stop.iter().map(|name| self.id(name)).collect();
        let target = DeploymentTarget { deployment: Arc::new(deployment()), replicas, next: None, stop };
        let name: DeploymentName = target.deployment.name.clone();
        self.targets.send_replace([(name, target)].into());
    }

    /// By which the actuator knows a pod.
    fn id(&self, name: &str) -> ReplicaId {
        self.cluster.uid(name)
    }

    fn known(&self) -> usize {
        self.running.borrow().replicas.len()
    }

    fn ready(&self) -> usize {
        self.running.borrow().replicas.values().filter(|found| found.ready.is_some()).count()
    }

    async fn until(&self, what: &str, mut holds: impl FnMut(&Scene) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < PATIENCE, "{what} did not come true: {:?}", self.running.borrow());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends in good order.
    async fn over(self) {
        drop(self.targets);
        self.acts.await.unwrap();
    }
}

#[tokio::test]
async fn pods_are_ordered_through_the_scale_and_become_replicas_when_they_are_ready() {
    let scene = Scene::of(WorkloadKind::Deployment, 0).await;
    // Others write at the same time.
    scene.cluster.conflicts(3);
    scene.wants(3, &[]);
    scene.until("three are ordered", |scene| scene.known() == 3).await;
    let puts = scene.cluster.asked().iter().filter(|asked| *asked == "PUT scale").count();
    assert_eq!((puts, scene.ready()), (4, 0), "read and written anew until nobody came before");
    let names = scene.cluster.names();
    scene.cluster.becomes_ready(&names[1]);
    scene.until("one is ready", |scene| scene.ready() == 1).await;
    {
        let running = scene.running.borrow();
        let found = &running.replicas[&scene.id(&names[1])];
        let at = found.ready.unwrap();
        assert_eq!(at.endpoint.to_string(), "10.0.0.9:7200");
        assert!(at.took.is_some(), "its start was seen");
        assert_eq!(found.deployment.name.as_str(), "a");
    }
    scene.over().await;
}

#[tokio::test]
async fn only_those_go_that_have_been_drained_whatever_is_wanted() {
    let scene = Scene::of(WorkloadKind::Deployment, 4).await;
    scene.cluster.asked();
    scene.wants(1, &[]);
    let names = scene.cluster.names();
    // None of them has been drained yet; the third and the last are the first.
    scene.wants(2, &[&names[2], &names[3]]);
    scene.until("two are gone", |scene| scene.known() == 2).await;
    assert_eq!(scene.cluster.names(), names[..2], "the others stay, which Kubernetes might have chosen");
    assert_eq!(scene.cluster.replicas(), 2);
    let asked = scene.cluster.asked();
    let marks: Vec<_> = asked.iter().filter(|asked| asked.starts_with("PATCH")).cloned().collect();
    assert_eq!(marks, [format!("PATCH {}", names[2]), format!("PATCH {}", names[3])]);
    let written = asked.iter().position(|asked| asked == "PUT scale").unwrap();
    assert!(asked[..written].iter().filter(|asked| asked.starts_with("PATCH")).count() == 2, "marked before");
    scene.over().await;
    // A spoke that stops leaves its pods to Kubernetes.
}

#[tokio::test]
async fn of_a_stateful_set_the_number_is_lowered_only_as_far_as_its_highest_are_drained() {
    let scene = Scene::of(WorkloadKind::StatefulSet, 3).await;
    let ranks: Vec<_> = scene.running.borrow().replicas.values().map(|found| found.rank).collect();
    assert_eq!(ranks, [0, 1, 2], "by which the highest are let go first");
    let names = scene.cluster.names();
    scene.wants(2, &[&names[1]]);
    // What is asked after this was asked with that target.
    scene.wants(1, &[&names[1], &names[2]]);
    scene.until("the two highest are gone", |scene| scene.known() == 1).await;
    assert_eq!(scene.cluster.names(), names[..1]);
    assert!(scene.cluster.asked().iter().all(|asked| !asked.starts_with("PATCH")), "which nobody looks at");
    scene.over().await;
}

#[tokio::test]
async fn a_stateful_set_whose_highest_is_busy_waits_for_it() {
    let scene = Scene::of(WorkloadKind::StatefulSet, 3).await;
    let names = scene.cluster.names();
    for replicas in [2, 1] {
        scene.until("it is watched", |scene| scene.cluster.has_asked("WATCH")).await;
        scene.cluster.asked();
        scene.wants(replicas, &[&names[0]]);
        scene.until("it was looked", |scene| scene.cluster.has_asked("GET scale")).await;
        // Only what was asked before a list is over once the list was asked.
        scene.cluster.cuts_watches();
    }
    scene.until("it is watched", |scene| scene.cluster.has_asked("WATCH")).await;
    assert!(!scene.cluster.has_asked("PUT"));
    assert_eq!((scene.cluster.replicas(), scene.cluster.names()), (3, names));
    scene.over().await;
}

#[tokio::test]
async fn a_watch_that_breaks_off_goes_on_where_it_was() {
    let scene = Scene::of(WorkloadKind::Deployment, 1).await;
    scene.until("it is watched", |scene| scene.cluster.has_asked("WATCH")).await;
    scene.cluster.asked();
    scene.cluster.cuts_watches();
    scene.until("it is watched again", |scene| scene.cluster.has_asked("WATCH")).await;
    scene.cluster.has(2);
    scene.until("what happens after that is seen", |scene| scene.ready() == 2).await;
    assert!(scene.cluster.asked().iter().all(|asked| asked != "LIST"), "nothing was missed");
    scene.over().await;
}

#[tokio::test]
async fn a_watch_that_has_expired_begins_with_a_list_and_misses_nothing() {
    let scene = Scene::of(WorkloadKind::Deployment, 2).await;
    scene.until("it is watched", |scene| scene.cluster.has_asked("WATCH")).await;
    scene.cluster.asked();
    let names = scene.cluster.names();
    let gone = scene.id(&names[0]);
    // A pod goes and another comes, and nobody can be told any longer.
    scene.cluster.quietly(|cluster| {
        cluster.evicts(&names[0]);
        cluster.forgets();
    });
    scene
        .until("who went is gone", |scene| {
            scene.known() == 2 && !scene.running.borrow().replicas.contains_key(&gone)
        })
        .await;
    assert!(scene.cluster.has_asked("LIST"));
    scene.over().await;
}

#[tokio::test]
async fn a_container_that_dies_counts_as_a_death() {
    let scene = Scene::of(WorkloadKind::Deployment, 1).await;
    scene.until("it is watched", |scene| scene.cluster.has_asked("WATCH")).await;
    scene.cluster.restarts(&scene.cluster.names()[0]);
    let crashes =
        |scene: &Scene| scene.running.borrow().crashes.values().map(|crashes| crashes.count).sum::<u64>();
    scene.until("it is counted", |scene| crashes(scene) == 1).await;
    scene.over().await;
}

#[tokio::test]
async fn two_deployments_never_share_a_workload() {
    let cluster = Cluster::start(WorkloadKind::Deployment).await;
    let kubernetes = KubernetesActuator::new(config(&cluster.url, WorkloadKind::Deployment)).unwrap();
    let named = |name: &str| Arc::new(Deployment { name: name.parse().unwrap(), ..deployment() });
    let target = |name: &str| {
        let deployment = named(name);
        (
            deployment.name.clone(),
            DeploymentTarget { deployment, replicas: 1, next: None, stop: BTreeSet::new() },
        )
    };
    let wanted: Targets = [target("A"), target("a")].into();
    let (mut scaled, mut tasks, (told, _hears)) = (BTreeMap::new(), JoinSet::new(), mpsc::channel(4));
    kubernetes.follow(&wanted, &mut scaled, &mut tasks, &told);
    kubernetes.follow(&wanted, &mut scaled, &mut tasks, &told);
    let named: Vec<_> =
        scaled.iter().map(|(name, scaled)| (name.as_str(), scaled.deployment.as_str())).collect();
    assert_eq!((named, tasks.len()), (vec![("replica-a", "A")], 1));
}
