//! The Kubernetes objects in use, with the fields in use; further fields are ignored.

use std::collections::BTreeMap;
use std::net::IpAddr;

use replica_api::start_failure::{StartFailure, StartFailureReport};
use serde::Deserialize;

/// Labels of a pod with the hash of its template, of a ReplicaSet and of a StatefulSet.
const TEMPLATE_LABELS: [&str; 2] = ["pod-template-hash", "controller-revision-hash"];

/// `metadata`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ObjectMeta {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) resource_version: String,
    /// Set once deletion was requested.
    pub(super) deletion_timestamp: Option<String>,
    /// RFC 3339 in UTC, with seconds.
    pub(super) creation_timestamp: Option<String>,
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) labels: BTreeMap<String, String>,
}

/// The scale subresource, `autoscaling/v1`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ScaleObject {
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) spec: ScaleSpec,
    #[serde(default)]
    pub(super) status: ScaleStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ScaleSpec {
    pub(super) replicas: u32,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ScaleStatus {
    /// Label selector of its pods, in the form of a query.
    pub(super) selector: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct PodList {
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) items: Vec<Pod>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Pod {
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) status: PodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodStatus {
    pub(super) phase: String,
    #[serde(rename = "podIP")]
    pub(super) pod_ip: Option<IpAddr>,
    pub(super) conditions: Vec<Condition>,
    pub(super) container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    #[serde(default)]
    pub(super) reason: String,
    #[serde(default)]
    pub(super) message: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ContainerStatus {
    pub(super) restart_count: u64,
    pub(super) state: ContainerState,
    pub(super) last_state: ContainerState,
}

/// State of a container: at most one field is set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ContainerState {
    pub(super) waiting: Option<WaitingState>,
    pub(super) terminated: Option<TerminatedState>,
}

/// Reason for which a container does not run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WaitingState {
    pub(super) reason: String,
    pub(super) message: String,
}

/// End of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct TerminatedState {
    pub(super) exit_code: i32,
    pub(super) reason: String,
}

/// One line of a watch.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub(super) enum WatchEvent {
    Added(Pod),
    Modified(Pod),
    Deleted(Pod),
    /// All changes up to this version have been sent.
    Bookmark(Bookmark),
    Error(Status),
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Bookmark {
    pub(super) metadata: ObjectMeta,
}

/// Reason why a watch cannot continue.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) code: u16,
    pub(super) message: String,
}

impl Pod {
    /// Returns whether the pod is neither being deleted nor completed.
    pub(super) fn is_active(&self) -> bool {
        self.metadata.deletion_timestamp.is_none()
            && !matches!(self.status.phase.as_str(), "Failed" | "Succeeded")
    }

    /// Returns the address of a ready pod.
    pub(super) fn ready_at(&self) -> Option<IpAddr> {
        let ready = |condition: &Condition| condition.kind == "Ready" && condition.status == "True";
        self.status.pod_ip.filter(|_| self.is_active() && self.status.conditions.iter().any(ready))
    }

    /// Returns the address of a pod that runs and is not ready.
    pub(super) fn starting_at(&self) -> Option<IpAddr> {
        self.status.pod_ip.filter(|_| self.is_active() && self.ready_at().is_none())
    }

    /// Returns the failure of a pod that is not ready, as Kubernetes reports it. A pod that no node has capacity for counts only
    /// if `has_waited`: a cluster autoscaler needs some minutes to add a node.
    pub(super) fn start_failure(&self, has_waited: bool) -> Option<StartFailureReport> {
        if self.ready_at().is_some() {
            return None;
        }
        let waiting = self.status.container_statuses.iter().find_map(|container| {
            let WaitingState { reason, message } = container.state.waiting.as_ref()?;
            match reason.as_str() {
                "CrashLoopBackOff" => Some(container.crash()),
                "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" => {
                    let message = format!("the image cannot be pulled ({reason}): {message}");
                    Some(StartFailureReport::new(StartFailure::Other, message))
                }
                "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
                    let message = format!("the container cannot be created ({reason}): {message}");
                    Some(StartFailureReport::new(StartFailure::Other, message))
                }
                _ => None,
            }
        });
        let unschedulable = || {
            let conditions = self.status.conditions.iter().filter(|_| has_waited);
            let is_false = |it: &&Condition| {
                it.kind == "PodScheduled" && it.status == "False" && it.reason == "Unschedulable"
            };
            let Condition { message, .. } = conditions.into_iter().find(is_false)?;
            let message = format!("no node can run the pod: {message}");
            Some(StartFailureReport::new(StartFailure::Other, message))
        };
        waiting.or_else(unschedulable)
    }

    /// Returns the reason of the last end of its container.
    pub(super) fn crash(&self) -> StartFailureReport {
        let last = self.status.container_statuses.iter().max_by_key(|container| container.restart_count);
        last.map_or_else(|| ContainerStatus::default().crash(), ContainerStatus::crash)
    }

    /// Returns the template from which its workload's controller has created it.
    pub(super) fn template(&self) -> Option<&str> {
        TEMPLATE_LABELS.iter().find_map(|label| self.metadata.labels.get(*label)).map(String::as_str)
    }

    /// Returns the time of its creation, to order pods by it. The name decides within a second.
    pub(super) fn creation(&self) -> (Option<&str>, &str) {
        (self.metadata.creation_timestamp.as_deref(), &self.metadata.name)
    }

    /// Returns the number of container restarts.
    pub(super) fn restarts(&self) -> u64 {
        self.status.container_statuses.iter().map(|container| container.restart_count).sum()
    }

    /// Returns the ordinal of a StatefulSet's pod.
    pub(super) fn ordinal(&self) -> Option<u32> {
        self.metadata.name.rsplit_once('-')?.1.parse().ok()
    }
}

impl ContainerStatus {
    fn crash(&self) -> StartFailureReport {
        let ended = self.last_state.terminated.as_ref().or(self.state.terminated.as_ref());
        let ended = ended.map_or_else(String::new, |TerminatedState { exit_code, reason }| {
            format!(" with exit code {exit_code} ({reason})")
        });
        let message = format!(
            "the container of the replica ends before it is ready{ended}; `kubectl logs --previous` has its log"
        );
        StartFailureReport::new(StartFailure::CrashLoop, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(status: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
    }

    fn waiting(reason: &str) -> Value {
        let terminated = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
        json!({"phase": "Pending", "containerStatuses": [
            {"restartCount": 2, "state": {"waiting": {"reason": reason, "message": "text"}}, "lastState": terminated}]})
    }

    #[test]
    fn the_failure_of_a_pod_is_that_of_its_container_or_of_its_scheduling() {
        let failure = |status: Value, has_waited| {
            let failure = pod(status).start_failure(has_waited);
            failure.map(|failure| (failure.reason, failure.message))
        };
        let (reason, message) = failure(waiting("CrashLoopBackOff"), false).unwrap();
        assert!(
            reason == StartFailure::CrashLoop && message.contains("exit code 137 (OOMKilled)"),
            "{message}"
        );
        for reason in ["ErrImagePull", "ImagePullBackOff"] {
            let (found, message) = failure(waiting(reason), false).unwrap();
            assert!(
                found == StartFailure::Other && message.contains(reason) && message.contains("text"),
                "{message}"
            );
        }
        assert_eq!(failure(waiting("ContainerCreating"), true), None);

        let unschedulable = json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]});
        assert_eq!(failure(unschedulable.clone(), false), None, "a node may be added");
        assert!(failure(unschedulable, true).unwrap().1.contains("0/3 nodes"));
        let ready = json!({"phase": "Running", "podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": "True"}],
                           "containerStatuses": [{"restartCount": 2}]});
        assert_eq!(failure(ready, true), None);
    }
}
