//! Actuator with replicas as pods of a Deployment or a StatefulSet, one such workload per deployment of Meridian.
//!
//! The pods (image, model, probes, resources) are defined by the cluster's own manifests; this module sets only their
//! number. Each workload has a task ([`workload`]) that watches its pods and writes its scale, so that a missing or
//! rejected workload blocks no other. Ready pods become replicas of the region; a pod that is to be deleted, at any
//! client's request, gets no new requests from that moment on, and Kubernetes lets it finish within its grace period.
//!
//! Required permissions in the namespace: `get` and `update` of `deployments/scale` or `statefulsets/scale`, `list` and
//! `watch` of `pods`, and `patch` of `pods` for Deployments. When the spoke stops, the pods stay: Kubernetes runs them,
//! and the next spoke uses them.
//!
//! It implements the API calls itself ([`api`]) instead of using the `kube` crate. That crate works with rustls and
//! ring as well; but for the five calls made here it adds 33 crates to the workspace (kube 5.0 with `client`: among
//! them a YAML parser and a JSONPath engine for kubeconfig files, which a pod does not read, and assembly under a
//! licence that `deny.toml` does not allow), and the list, the watch and the handling of 409 and 410 would have to be
//! written anyway.

mod api;
mod events;
mod objects;
mod pods;
mod workload;

use std::collections::BTreeMap;
use std::io;

use identity::Transport;
use regions::DeploymentName;
use scheduler_client::readiness::ReadinessProber;
use supervision::task::essential;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::{Actuator, ActuatorStatus, Crashes, DeploymentTargets};
use crate::actuator::DeploymentTarget;
use crate::config::KubernetesConfig;
use api::Api;
use events::WorkloadNameTaken;
use pods::Pods;
use workload::WorkloadScaler;

/// Capacity of the queue of pod updates; further senders wait.
const UPDATES_MAX: usize = 64;

/// Actuator that scales workloads of a cluster.
pub(crate) struct KubernetesActuator {
    api: Api,
    config: KubernetesConfig,
    prober: ReadinessProber,
}

/// Workload with its task.
struct ScaledWorkload {
    deployment: DeploymentName,
    target: watch::Sender<DeploymentTarget>,
    pods: Pods,
}

impl KubernetesActuator {
    /// Creates the actuator of a cluster.
    ///
    /// # Errors
    ///
    /// When the CA file is unreadable, or TLS cannot be set up.
    pub(crate) fn new(config: KubernetesConfig, transport: &Transport) -> io::Result<KubernetesActuator> {
        let prober = ReadinessProber::new(transport).map_err(io::Error::other)?;
        Ok(KubernetesActuator { api: Api::new(&config)?, config, prober })
    }

    /// Starts a task for each workload, and sends each task its latest target.
    fn follow(
        &self,
        desired: &DeploymentTargets,
        workloads: &mut BTreeMap<String, ScaledWorkload>,
        tasks: &mut JoinSet<()>,
        updates: &mpsc::Sender<(String, Pods)>,
    ) {
        // The task of a workload without a target ends with its sender.
        workloads.retain(|_, workloads| desired.contains_key(&workloads.deployment));
        for (deployment, target) in desired {
            let name = self.config.workload_of(deployment);
            match workloads.get(&name) {
                Some(workloads) if workloads.deployment == *deployment => {
                    workloads.target.send_if_modified(|before| {
                        let changed = before != target;
                        before.clone_from(target);
                        changed
                    });
                }
                Some(_) => WorkloadNameTaken { workload: &name, deployment }.emit(),
                None => {
                    let (sender, receiver) = watch::channel(target.clone());
                    let (api, config) = (self.api.clone(), self.config.clone());
                    let workload = WorkloadScaler {
                        api,
                        config,
                        name: name.clone(),
                        target: receiver,
                        updates: updates.clone(),
                        prober: self.prober.clone(),
                    };
                    tasks.spawn(async {
                        essential("workload", workload.run()).await;
                    });
                    let (deployment, pods) = (deployment.clone(), Pods::default());
                    workloads.insert(name, ScaledWorkload { deployment, target: sender, pods });
                }
            }
        }
    }
}

impl Actuator for KubernetesActuator {
    async fn run(
        self,
        mut targets: watch::Receiver<DeploymentTargets>,
        running: watch::Sender<ActuatorStatus>,
    ) {
        let (updates, mut received) = mpsc::channel(UPDATES_MAX);
        let (mut workloads, mut tasks) = (BTreeMap::new(), JoinSet::new());
        loop {
            let desired = targets.borrow_and_update().clone();
            self.follow(&desired, &mut workloads, &mut tasks, &updates);
            running.send_replace(status(&workloads));
            tokio::select! {
                changed = targets.changed() => if changed.is_err() { break },
                Some((name, pods)) = received.recv() => {
                    // The sender may have ended since.
                    if let Some(workloads) = workloads.get_mut(&name) {
                        workloads.pods = pods;
                    }
                }
                Some(_) = tasks.join_next() => {}
            }
        }
        drop((workloads, received));
        while tasks.join_next().await.is_some() {}
    }
}

/// Returns the status over all workloads. It always counts as complete: a workload whose pods are not listed yet
/// deletes none of them, whatever its target.
fn status(workloads: &BTreeMap<String, ScaledWorkload>) -> ActuatorStatus {
    let mut status = ActuatorStatus { is_initialized: true, ..ActuatorStatus::default() };
    for ScaledWorkload { deployment, target: _, pods: Pods { replicas, crashes, ended } } in
        workloads.values()
    {
        status.replicas.extend(replicas.clone());
        status.ended_starts.extend(ended.clone());
        status.crashes.insert(deployment.clone(), Crashes { count: *crashes, restart_at: None });
    }
    status
}

#[cfg(test)]
mod tests;
