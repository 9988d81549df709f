//! Replicas are pods of a Deployment or a StatefulSet, one such workload for each deployment of ours.
//!
//! What a replica is (image, model, probes, resources) stands in the cluster's own manifests; here is only how many. Each
//! workload has a task of its own ([`workload`]) that watches its pods and writes its scale, so that one that is missing or
//! refused holds up no other. Pods that Kubernetes calls ready become replicas of the region; one that is to be deleted,
//! whoever wants that, gets nothing new from that moment on, and Kubernetes lets it finish within its grace period.
//!
//! The rights that it needs, in its namespace: `get` and `update` of `deployments/scale` or `statefulsets/scale`, `list` and
//! `watch` of `pods`, and `patch` of `pods` for Deployments. When the spoke stops, the pods stay as they are: Kubernetes looks
//! after them, and the next spoke goes on with them.
//!
//! It speaks the API itself ([`api`]) instead of by the `kube` crate. That would do it on rustls and ring as well; but for the
//! five calls that are made here it brings 33 crates that nothing else here has (kube 5.0 with `client`: among them a YAML
//! parser and a JSONPath engine for kubeconfig files, which a pod does not read, and assembly under a licence that `deny.toml`
//! does not allow), and the list, the watch and what is done about 409 and 410 would have to be written all the same.

mod api;
mod events;
mod objects;
mod workload;

use std::collections::BTreeMap;
use std::io;

use regions::DeploymentName;
use supervision::task::essential;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::{Actuator, Deaths, Running, Targets};
use crate::actuator::Target;
use crate::config::KubernetesConfig;
use api::Api;
use events::NameTaken;
use workload::{Pods, Workload};

/// Words of workloads that were not heard yet; whoever says the next one waits.
const TOLD_MAX: usize = 64;

/// Scales workloads of a cluster.
pub(crate) struct Kubernetes {
    api: Api,
    config: KubernetesConfig,
}

/// A workload that is scaled.
struct Scaled {
    deployment: DeploymentName,
    target: watch::Sender<Target>,
    pods: Pods,
}

impl Kubernetes {
    /// # Errors
    ///
    /// When the API server's authority cannot be read.
    pub(crate) fn new(config: KubernetesConfig) -> io::Result<Kubernetes> {
        Ok(Kubernetes { api: Api::new(&config)?, config })
    }

    /// Follows what should be: a task for each workload, and the newest target for each task.
    fn follow(
        &self,
        wanted: &Targets,
        scaled: &mut BTreeMap<String, Scaled>,
        tasks: &mut JoinSet<()>,
        told: &mpsc::Sender<(String, Pods)>,
    ) {
        // Whoever is not wanted any longer ends with its target.
        scaled.retain(|_, scaled| wanted.contains_key(&scaled.deployment));
        for (deployment, target) in wanted {
            let name = self.config.workload_of(deployment);
            match scaled.get(&name) {
                Some(scaled) if scaled.deployment == *deployment => {
                    scaled.target.send_if_modified(|before| {
                        let changed = before != target;
                        before.clone_from(target);
                        changed
                    });
                }
                Some(_) => NameTaken { workload: &name, deployment }.emit(),
                None => {
                    let (sender, receiver) = watch::channel(target.clone());
                    let (api, config) = (self.api.clone(), self.config.clone());
                    let workload =
                        Workload { api, config, name: name.clone(), target: receiver, told: told.clone() };
                    tasks.spawn(async {
                        essential("workload", workload.run()).await;
                    });
                    let (deployment, pods) = (deployment.clone(), Pods::default());
                    scaled.insert(name, Scaled { deployment, target: sender, pods });
                }
            }
        }
    }
}

impl Actuator for Kubernetes {
    async fn run(self, mut targets: watch::Receiver<Targets>, running: watch::Sender<Running>) {
        let (told, mut hears) = mpsc::channel(TOLD_MAX);
        let (mut scaled, mut tasks) = (BTreeMap::new(), JoinSet::new());
        loop {
            let wanted = targets.borrow_and_update().clone();
            self.follow(&wanted, &mut scaled, &mut tasks, &told);
            running.send_replace(all(&scaled));
            tokio::select! {
                changed = targets.changed() => if changed.is_err() { break },
                Some((name, pods)) = hears.recv() => {
                    // One that has just ended may have said something before.
                    if let Some(scaled) = scaled.get_mut(&name) {
                        scaled.pods = pods;
                    }
                }
                Some(_) = tasks.join_next() => {}
            }
        }
        drop((scaled, hears));
        while tasks.join_next().await.is_some() {}
    }
}

/// What is, over all workloads. It is always known who is there: a workload whose pods were not listed yet has none of them
/// let go, whatever is wanted.
fn all(scaled: &BTreeMap<String, Scaled>) -> Running {
    let mut running = Running { surveyed: true, ..Running::default() };
    for Scaled { deployment, pods: Pods { found, deaths }, .. } in scaled.values() {
        running.replicas.extend(found.clone());
        running.deaths.insert(deployment.clone(), Deaths { count: *deaths, restart_at: None });
    }
    running
}

#[cfg(test)]
mod tests;
