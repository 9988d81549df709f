//! Log events of the Kubernetes actuator.

use super::api::ApiError;

/// Requests to the API server fail: replicas are neither started nor stopped. Check the API server and the
/// permissions of the spoke.
pub(super) struct ApiFailed<'a> {
    pub(super) workload: &'a str,
    pub(super) error: &'a ApiError,
}

impl ApiFailed<'_> {
    pub(super) fn emit(self) {
        let ApiFailed { workload, error } = self;
        tracing::warn!(workload, %error, "API server unavailable; the known pods stay registered");
    }
}

/// Requests to the API server succeed again.
pub(super) struct ApiRecovered<'a> {
    pub(super) workload: &'a str,
}

impl ApiRecovered<'_> {
    pub(super) fn emit(self) {
        tracing::info!(workload = self.workload, "API server available again");
    }
}

/// The resource version of the watch is too old.
pub(super) struct WatchExpired<'a> {
    pub(super) workload: &'a str,
}

impl WatchExpired<'_> {
    pub(super) fn emit(self) {
        tracing::info!(workload = self.workload, "watch expired, listing the pods again");
    }
}

/// The replica count of a workload was written.
pub(super) struct ScaleWritten<'a> {
    pub(super) workload: &'a str,
    pub(super) before: u32,
    pub(super) replicas: u32,
}

impl ScaleWritten<'_> {
    pub(super) fn emit(self) {
        let ScaleWritten { workload, before, replicas } = self;
        tracing::info!(workload, before, replicas, "workload scaled");
    }
}

/// Two deployments map to the same workload name. Rename one of them.
pub(super) struct WorkloadNameTaken<'a> {
    pub(super) workload: &'a str,
    pub(super) deployment: &'a regions::DeploymentName,
}

impl WorkloadNameTaken<'_> {
    pub(super) fn emit(self) {
        let WorkloadNameTaken { workload, deployment } = self;
        tracing::error!(workload, %deployment, "workload name already used by another deployment; deployment not scaled");
    }
}
