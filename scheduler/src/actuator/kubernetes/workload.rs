//! Scale and pods of one deployment's workload in the cluster.
//!
//! Every spoke of a region watches the pods; only the one that scales writes.
//!
//! *Pods* are listed once and then watched. A watch that ends continues at the last received version; if the API server
//! has forgotten that version (410), the pods are listed again, and the list replaces everything known, so that changes
//! in between are not missed.
//!
//! The *replica count* is written through the scale subresource, with the version that was read: if another client has
//! written meanwhile (409), it is read and decided again. The count is never lowered below the number of pods that have
//! not been drained, whatever the target: Kubernetes would choose among them by itself. Before it is lowered, drained
//! pods are marked as the cheapest to delete (`controller.kubernetes.io/pod-deletion-cost`), so that a Deployment's
//! ReplicaSet deletes them. A StatefulSet deletes its highest ordinals regardless of the mark, so its count is lowered
//! only as far as its highest pods have all been drained.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use backoff::Backoff;
use futures_util::future::join_all;
use hyper::{Method, StatusCode};
use scheduler_client::readiness::ReadinessProber;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::api::{Api, ApiError, RequestBody};
use super::events::{ApiFailed, ApiRecovered, ScaleWritten, WatchExpired};
use super::objects::{PodList, ScaleObject, WatchEvent};
use super::pods::{Pods, State};
use crate::actuator::{DeploymentTarget, ReadyEndpoint, RunningReplica, model_key};
use crate::config::{KubernetesConfig, WorkloadKind};

/// Annotation by which a ReplicaSet chooses the pods to delete: the lowest cost first; 0 without the annotation.
pub(super) const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Deletion cost of a drained pod.
const DRAINED_COST: &str = "-1000";
/// Maximum attempts of a write that conflicts with other clients, until the next change of the pods.
const CONFLICTS_MAX: u32 = 8;
/// Interval at which pods that run and are not ready are polled for the failure of their start.
const PROBE_PERIOD: Duration = Duration::from_secs(2);
/// Maximum number of pods that are polled at a time; the next ones follow at the next interval.
const PROBED_MAX: usize = 64;
/// Delays between attempts while the API server fails.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(200), max: Duration::from_secs(5) };

/// Scaler of one workload.
pub(super) struct WorkloadScaler {
    pub(super) api: Api,
    pub(super) config: KubernetesConfig,
    /// Name of the workload in the cluster.
    pub(super) name: String,
    pub(super) target: watch::Receiver<DeploymentTarget>,
    pub(super) updates: mpsc::Sender<(String, Pods)>,
    pub(super) prober: ReadinessProber,
}

impl WorkloadScaler {
    /// Watches the pods and writes their number, until the target's sender is dropped.
    pub(super) async fn run(mut self) {
        let mut failures = 0u32;
        let mut state = State::default();
        loop {
            match self.follow(&mut state, &mut failures).await {
                Ok(()) => return,
                Err(error) if error.is_expired() => WatchExpired { workload: &self.name }.emit(),
                Err(error) => {
                    if failures == 0 {
                        ApiFailed { workload: &self.name, error: &error }.emit();
                    }
                    failures = failures.saturating_add(1);
                    tokio::select! {
                        () = sleep(BACKOFF.equal_jitter(failures, rand::random())) => {}
                        () = target_dropped(&mut self.target) => return,
                    }
                }
            }
        }
    }

    /// Lists the pods and watches them until an error; `Ok` when the target's sender is dropped.
    async fn follow(&mut self, state: &mut State, failures: &mut u32) -> Result<(), ApiError> {
        let scale = self.scale().await?;
        let selector: String =
            url::form_urlencoded::byte_serialize(scale.status.selector.as_bytes()).collect();
        let pods = format!("/api/v1/namespaces/{}/pods?labelSelector={selector}", self.config.namespace);
        let list: PodList = self.api.request(Method::GET, &pods, RequestBody::Empty).await?;
        let mut version = list.metadata.resource_version;
        state.replace(list.items);
        if std::mem::take(failures) > 0 {
            ApiRecovered { workload: &self.name }.emit();
        }
        self.report(state).await;
        self.target.mark_changed();
        let mut probes = interval(PROBE_PERIOD);
        probes.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let path = format!(
                "{pods}&watch=1&allowWatchBookmarks=true&timeoutSeconds=300&resourceVersion={version}"
            );
            let mut watch = self.api.watch(&path).await?;
            loop {
                tokio::select! {
                    event = watch.next::<WatchEvent>() => match event? {
                        Some(event) => {
                            version = state.apply(event)?;
                            self.report(state).await;
                            self.reconcile(state).await?;
                        }
                        None => break,
                    },
                    changed = self.target.changed() => {
                        if changed.is_err() {
                            return Ok(());
                        }
                        let model = model_key(&self.target.borrow().deployment);
                        if state.model() != Some(&model) {
                            self.report(state).await;
                        }
                        self.reconcile(state).await?;
                    }
                    _ = probes.tick(), if state.starting().next().is_some() => {
                        self.probe(state).await;
                        self.report(state).await;
                    }
                }
            }
        }
    }

    /// Reads the failures of the pods that run and are not ready.
    async fn probe(&self, state: &mut State) {
        let probed = state.next_probed(PROBED_MAX);
        let probes = probed.into_iter().map(|(id, ip)| async move {
            (id, self.prober.start_report(SocketAddr::from((ip, self.config.port))).await)
        });
        for (id, reported) in join_all(probes).await {
            if let Some(observed) = state.observed.get_mut(&id) {
                observed.reported = reported.failure;
                observed.waits_for_pull = reported.waits_for_pull;
            }
        }
    }

    async fn report(&self, state: &mut State) {
        let deployment = self.target.borrow().deployment.clone();
        let now = Instant::now();
        state.set_model(model_key(&deployment), now);
        let newest = state.newest_template();
        let replicas =
            state.observed.iter().filter(|(_, observed)| observed.pod.is_active()).map(|(id, observed)| {
                let at = observed.pod.ready_at().map(|ip| SocketAddr::from((ip, self.config.port)));
                let ready = at.map(|endpoint| ReadyEndpoint { endpoint, took: observed.ready.flatten() });
                let rank = match self.config.kind {
                    WorkloadKind::Deployment => 0,
                    WorkloadKind::StatefulSet => observed.pod.ordinal().map_or(0, u64::from),
                };
                let (deployment, since) = (deployment.clone(), observed.began);
                // The pod's address gets no requests before it is ready, so its download is not observed.
                let (failure, download_ends_at) = (observed.start_failure(), None);
                let is_outdated = state.is_outdated(observed, newest, now);
                let running = RunningReplica {
                    deployment,
                    since,
                    ready,
                    download_ends_at,
                    waits_for_pull: observed.waits_for_pull,
                    failure,
                    is_outdated,
                    rank,
                };
                (id.clone(), running)
            });
        let replicas = replicas.collect();
        let pods = Pods { replicas, crashes: state.crashes, ended: state.ended_starts() };
        // On failure the receiver is gone, and the target's sender as well.
        self.updates.send((self.name.clone(), pods)).await.ok();
    }

    fn scale_path(&self) -> String {
        let KubernetesConfig { namespace, kind, .. } = &self.config;
        format!("/apis/apps/v1/namespaces/{namespace}/{}/{}/scale", kind.plural(), self.name)
    }

    async fn scale(&self) -> Result<ScaleObject, ApiError> {
        self.api.request(Method::GET, &self.scale_path(), RequestBody::Empty).await
    }

    /// Writes the desired number of pods, if it differs.
    async fn reconcile(&mut self, state: &State) -> Result<(), ApiError> {
        let target = self.target.borrow_and_update().clone();
        if !target.is_scaled_here {
            return Ok(());
        }
        let desired = state.replica_count(&target, self.config.kind);
        for _ in 0..CONFLICTS_MAX {
            let ScaleObject { metadata, spec, .. } = self.scale().await?;
            if spec.replicas == desired {
                return Ok(());
            }
            if desired < spec.replicas && self.config.kind == WorkloadKind::Deployment {
                self.mark_drained(state, &target).await?;
            }
            let (namespace, version) = (&self.config.namespace, metadata.resource_version);
            let body = json!({"apiVersion": "autoscaling/v1", "kind": "Scale",
                "metadata": {"name": self.name, "namespace": namespace, "resourceVersion": version},
                "spec": {"replicas": desired}});
            let written: Result<Value, _> =
                self.api.request(Method::PUT, &self.scale_path(), RequestBody::Replace(body)).await;
            match written {
                Ok(_) => {
                    ScaleWritten { workload: &self.name, before: spec.replicas, replicas: desired }.emit();
                    return Ok(());
                }
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        Err(ApiError::Rejected {
            status: StatusCode::CONFLICT,
            reason: format!("{CONFLICTS_MAX} conflicting writes of the scale by other clients"),
        })
    }

    /// Marks drained pods as the cheapest to delete.
    async fn mark_drained(&self, state: &State, target: &DeploymentTarget) -> Result<(), ApiError> {
        for (_, observed) in state
            .observed
            .iter()
            .filter(|(id, observed)| target.stop.contains(*id) && observed.pod.is_active())
        {
            let meta = &observed.pod.metadata;
            if meta.annotations.get(COST).is_some_and(|cost| cost == DRAINED_COST) {
                continue;
            }
            let path = format!("/api/v1/namespaces/{}/pods/{}", self.config.namespace, meta.name);
            let patch = json!({"metadata": {"uid": meta.uid, "annotations": {COST: DRAINED_COST}}});
            match self.api.request::<Value>(Method::PATCH, &path, RequestBody::MergePatch(patch)).await {
                Ok(_) => {}
                // The pod was deleted, or another one has its name now.
                Err(ApiError::Rejected { status: StatusCode::NOT_FOUND | StatusCode::CONFLICT, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Returns when the target's sender is dropped.
async fn target_dropped(target: &mut watch::Receiver<DeploymentTarget>) {
    while target.changed().await.is_ok() {}
}
