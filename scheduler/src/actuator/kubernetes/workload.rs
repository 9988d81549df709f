//! One deployment's workload in the cluster: how many pods it should have, and which it has.
//!
//! *Pods* are listed once and then watched. A watch that ends goes on at the version that was seen last; one whose version
//! the API server has forgotten (410) begins with a new list, which stands in the place of all that was known, so that what
//! happened in between is not missed.
//!
//! *How many* is written through the scale subresource, with the version that was read: if somebody else has written
//! meanwhile (409), it is read and decided anew. The number is never lowered below the pods that have not been drained,
//! whatever is wanted: Kubernetes would choose among them by itself. Before it is lowered, those that have been drained are
//! marked as the cheapest to delete (`controller.kubernetes.io/pod-deletion-cost`), so that a Deployment's ReplicaSet takes
//! them. A StatefulSet takes its highest ordinals whatever is marked, so for one it is lowered only as far as its highest
//! pods have all been drained.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use super::api::{Api, ApiError, Sent};
use super::events::{ApiBack, ApiFailing, ScaleWritten, WatchExpired};
use super::objects::{Pod, PodList, Scale, Status, WatchEvent};
use crate::actuator::{Found, ReadyAt, ReplicaId, Target};
use crate::config::{KubernetesConfig, WorkloadKind};

/// By this a ReplicaSet chooses whom it deletes: the least first; 0 for who is not marked.
pub(super) const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// That of a pod that has been drained.
const DRAINED_COST: &str = "-1000";
/// How often a write is tried again that somebody else came before, until the pods are looked at again.
const CONFLICTS_MAX: u32 = 8;
/// Between attempts at an API server that fails: doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What is known of a workload's pods.
#[derive(Clone, Debug, Default)]
pub(super) struct Pods {
    pub(super) found: BTreeMap<ReplicaId, Found>,
    /// Containers that were started again, and pods that failed, since it is watched.
    pub(super) deaths: u64,
}

/// One deployment's workload.
pub(super) struct Workload {
    pub(super) api: Api,
    pub(super) config: KubernetesConfig,
    /// The workload's name in the cluster.
    pub(super) name: String,
    pub(super) target: watch::Receiver<Target>,
    pub(super) told: mpsc::Sender<(String, Pods)>,
}

/// A pod that is there.
struct Seen {
    pod: Pod,
    since: Instant,
    /// When it was first seen ready, and how long that took if it was seen not to be before.
    ready: Option<Option<Duration>>,
}

impl Workload {
    /// Follows the pods and brings their number to what it should be, until the target is gone.
    pub(super) async fn run(mut self) {
        let mut failures = 0u32;
        let mut state = State::default();
        loop {
            match self.follow(&mut state, &mut failures).await {
                Ok(()) => return,
                Err(error) if error.is_expired() => WatchExpired { workload: &self.name }.emit(),
                Err(error) => {
                    if failures == 0 {
                        ApiFailing { workload: &self.name, error: &error }.emit();
                    }
                    failures = failures.saturating_add(1);
                    let pause = PAUSE_MIN.saturating_mul(1 << failures.min(16)).min(PAUSE_MAX);
                    tokio::select! {
                        () = sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)) => {}
                        gone = gone(&mut self.target) => return gone,
                    }
                }
            }
        }
    }

    /// From a list to the end of what can be followed from it; `Ok` when nobody wants it any longer.
    async fn follow(&mut self, state: &mut State, failures: &mut u32) -> Result<(), ApiError> {
        let scale = self.scale().await?;
        let selector: String =
            url::form_urlencoded::byte_serialize(scale.status.selector.as_bytes()).collect();
        let pods = format!("/api/v1/namespaces/{}/pods?labelSelector={selector}", self.config.namespace);
        let list: PodList = self.api.ask(Method::GET, &pods, Sent::Nothing).await?;
        let mut version = list.metadata.resource_version;
        state.replace(list.items);
        if std::mem::take(failures) > 0 {
            ApiBack { workload: &self.name }.emit();
        }
        self.tell(state).await;
        self.target.mark_changed();
        loop {
            let path = format!(
                "{pods}&watch=1&allowWatchBookmarks=true&timeoutSeconds=300&resourceVersion={version}"
            );
            let mut watch = self.api.watch(&path).await?;
            loop {
                tokio::select! {
                    event = watch.next::<WatchEvent>() => match event? {
                        Some(event) => {
                            version = state.take(event)?;
                            self.tell(state).await;
                            self.bring(state).await?;
                        }
                        None => break,
                    },
                    changed = self.target.changed() => {
                        if changed.is_err() {
                            return Ok(());
                        }
                        self.bring(state).await?;
                    }
                }
            }
        }
    }

    async fn tell(&self, state: &State) {
        let found = state.seen.iter().filter(|(_, seen)| seen.pod.stays()).map(|(id, seen)| {
            let at = seen.pod.ready_at().map(|ip| SocketAddr::from((ip, self.config.port)));
            let ready = at.map(|endpoint| ReadyAt { endpoint, took: seen.ready.flatten() });
            let rank = match self.config.kind {
                WorkloadKind::Deployment => 0,
                WorkloadKind::StatefulSet => seen.pod.ordinal().map_or(0, u64::from),
            };
            let deployment = self.target.borrow().deployment.clone();
            (id.clone(), Found { deployment, since: seen.since, ready, rank })
        });
        let pods = Pods { found: found.collect(), deaths: state.deaths };
        // Nobody who listened any longer would have let this go on.
        self.told.send((self.name.clone(), pods)).await.ok();
    }

    fn scale_path(&self) -> String {
        let KubernetesConfig { namespace, kind, .. } = &self.config;
        format!("/apis/apps/v1/namespaces/{namespace}/{}/{}/scale", kind.plural(), self.name)
    }

    async fn scale(&self) -> Result<Scale, ApiError> {
        self.api.ask(Method::GET, &self.scale_path(), Sent::Nothing).await
    }

    /// Brings the number of pods to what it should be.
    async fn bring(&mut self, state: &State) -> Result<(), ApiError> {
        let target = self.target.borrow_and_update().clone();
        let wanted = state.replica_count(&target, self.config.kind);
        for _ in 0..CONFLICTS_MAX {
            let Scale { metadata, spec, .. } = self.scale().await?;
            if spec.replicas == wanted {
                return Ok(());
            }
            if wanted < spec.replicas && self.config.kind == WorkloadKind::Deployment {
                self.mark(state, &target).await?;
            }
            let (namespace, version) = (&self.config.namespace, metadata.resource_version);
            let body = json!({"apiVersion": "autoscaling/v1", "kind": "Scale",
                "metadata": {"name": self.name, "namespace": namespace, "resourceVersion": version},
                "spec": {"replicas": wanted}});
            let written: Result<Value, _> =
                self.api.ask(Method::PUT, &self.scale_path(), Sent::Whole(body)).await;
            match written {
                Ok(_) => {
                    ScaleWritten { workload: &self.name, before: spec.replicas, replicas: wanted }.emit();
                    return Ok(());
                }
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        Err(ApiError::Refused {
            status: StatusCode::CONFLICT,
            reason: "somebody else writes all the time".to_owned(),
        })
    }

    /// Those that have been drained are the cheapest to delete.
    async fn mark(&self, state: &State, target: &Target) -> Result<(), ApiError> {
        for (_, seen) in state.seen.iter().filter(|(id, seen)| target.stop.contains(*id) && seen.pod.stays())
        {
            let meta = &seen.pod.metadata;
            if meta.annotations.get(COST).is_some_and(|cost| cost == DRAINED_COST) {
                continue;
            }
            let path = format!("/api/v1/namespaces/{}/pods/{}", self.config.namespace, meta.name);
            let patch = json!({"metadata": {"uid": meta.uid, "annotations": {COST: DRAINED_COST}}});
            match self.api.ask::<Value>(Method::PATCH, &path, Sent::Merge(patch)).await {
                Ok(_) => {}
                // It has gone by itself, or another has its name now.
                Err(ApiError::Refused { status: StatusCode::NOT_FOUND | StatusCode::CONFLICT, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Comes back when nobody wants anything any longer.
async fn gone(target: &mut watch::Receiver<Target>) {
    while target.changed().await.is_ok() {}
}

/// The pods of a workload.
#[derive(Default)]
struct State {
    seen: BTreeMap<ReplicaId, Seen>,
    deaths: u64,
}

impl State {
    /// These are all there are.
    fn replace(&mut self, pods: Vec<Pod>) {
        let mut before = std::mem::take(&mut self.seen);
        for pod in pods {
            let known = before.remove(&pod.metadata.uid);
            self.put(pod, known);
        }
    }

    /// What a watch says; the version up to which everything is known now.
    fn take(&mut self, event: WatchEvent) -> Result<String, ApiError> {
        match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                let version = pod.metadata.resource_version.clone();
                let known = self.seen.remove(&pod.metadata.uid);
                self.put(pod, known);
                Ok(version)
            }
            WatchEvent::Deleted(pod) => {
                self.seen.remove(&pod.metadata.uid);
                Ok(pod.metadata.resource_version)
            }
            WatchEvent::Bookmark(bookmark) => Ok(bookmark.metadata.resource_version),
            WatchEvent::Error(Status { code, message }) => {
                let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                Err(ApiError::Refused { status, reason: message.chars().take(256).collect() })
            }
        }
    }

    fn put(&mut self, pod: Pod, known: Option<Seen>) {
        let id = pod.metadata.uid.clone();
        let seen = match known {
            Some(Seen { pod: before, since, ready }) => {
                let failed = pod.status.phase == "Failed" && before.status.phase != "Failed";
                self.deaths += pod.restarts().saturating_sub(before.restarts()) + u64::from(failed);
                let ready = ready.or_else(|| pod.ready_at().map(|_| Some(since.elapsed())));
                Seen { pod, since, ready }
            }
            // One that was ready before it was seen says nothing of how long that took.
            None => Seen { ready: pod.ready_at().map(|_| None), since: Instant::now(), pod },
        };
        self.seen.insert(id, seen);
    }

    /// As many as should be, but none less than those that have not been drained.
    fn replica_count(&self, target: &Target, kind: WorkloadKind) -> u32 {
        let kept = self.seen.iter().filter(|(id, seen)| seen.pod.stays() && !target.stop.contains(*id));
        let least = match kind {
            WorkloadKind::Deployment => kept.count() as u32,
            WorkloadKind::StatefulSet => {
                kept.filter_map(|(_, seen)| seen.pod.ordinal()).map(|ordinal| ordinal + 1).max().unwrap_or(0)
            }
        };
        target.replicas.max(least)
    }
}
