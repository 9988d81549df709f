//! What happens between an actuator and its API server.

use super::api::ApiError;

/// The API server cannot be asked, or refuses, from now on.
pub(super) struct ApiFailing<'a> {
    pub(super) workload: &'a str,
    pub(super) error: &'a ApiError,
}

impl ApiFailing<'_> {
    pub(super) fn emit(self) {
        let ApiFailing { workload, error } = self;
        tracing::warn!(workload, %error, "the API server fails; the pods that are known stand");
    }
}

/// It answers again.
pub(super) struct ApiBack<'a> {
    pub(super) workload: &'a str,
}

impl ApiBack<'_> {
    pub(super) fn emit(self) {
        tracing::info!(workload = self.workload, "the API server answers again");
    }
}

/// It does not know any longer what happened since the last word.
pub(super) struct WatchExpired<'a> {
    pub(super) workload: &'a str,
}

impl WatchExpired<'_> {
    pub(super) fn emit(self) {
        tracing::info!(workload = self.workload, "the watch has expired; the pods are listed again");
    }
}

/// Another number of pods was written.
pub(super) struct ScaleWritten<'a> {
    pub(super) workload: &'a str,
    pub(super) before: u32,
    pub(super) replicas: u32,
}

impl ScaleWritten<'_> {
    pub(super) fn emit(self) {
        let ScaleWritten { workload, before, replicas } = self;
        tracing::info!(workload, before, replicas, "another number of pods is written");
    }
}

/// Two deployments would have the same workload.
pub(super) struct NameTaken<'a> {
    pub(super) workload: &'a str,
    pub(super) deployment: &'a regions::DeploymentName,
}

impl NameTaken<'_> {
    pub(super) fn emit(self) {
        let NameTaken { workload, deployment } = self;
        tracing::error!(workload, %deployment, "another deployment has this workload already; this one is not scaled");
    }
}
