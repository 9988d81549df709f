//! Log events of the Kubernetes actuator.

use super::api::ApiError;

crate::log::events! {
    /// Requests to the API server of Kubernetes fail, and replicas are neither started nor stopped. Check the API
    /// server and the permissions of the spoke.
    warn!(workload, %error, "API server unavailable; the known pods stay registered")
    ApiFailed<'a> { workload: &'a str, error: &'a ApiError }

    /// Requests to the API server of Kubernetes succeed again.
    info!(workload, "API server available again")
    ApiRecovered<'a> { workload: &'a str }

    /// The API server of Kubernetes no longer has the changes since the last one received, so the spoke lists all pods.
    /// Expected after an interruption.
    info!(workload, "watch expired, listing the pods again")
    WatchExpired<'a> { workload: &'a str }

    /// The spoke has set the replica count of a workload in Kubernetes.
    info!(workload, before, replicas, "workload scaled")
    ScaleWritten<'a> { workload: &'a str, before: u32, replicas: u32 }

    /// Two deployments have the same workload name in Kubernetes, and this one gets no replicas. Rename one of them.
    error!(workload, %deployment, "workload name already used by another deployment; deployment not scaled")
    WorkloadNameTaken<'a> { workload: &'a str, deployment: &'a regions::DeploymentName }
}
