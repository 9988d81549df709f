//! The Kubernetes objects in use, with the fields in use; further fields are ignored.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;

/// `metadata`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ObjectMeta {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) resource_version: String,
    /// Set once deletion was requested.
    pub(super) deletion_timestamp: Option<String>,
    pub(super) annotations: BTreeMap<String, String>,
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
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ContainerStatus {
    pub(super) restart_count: u64,
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

    /// Returns the number of container restarts.
    pub(super) fn restarts(&self) -> u64 {
        self.status.container_statuses.iter().map(|container| container.restart_count).sum()
    }

    /// Returns the ordinal of a StatefulSet's pod.
    pub(super) fn ordinal(&self) -> Option<u32> {
        self.metadata.name.rsplit_once('-')?.1.parse().ok()
    }
}
