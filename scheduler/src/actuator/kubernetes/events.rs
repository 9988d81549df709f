//! Log events of the Kubernetes actuator.

use super::api::ApiError;

crate::log::events! {
    /// Requests to the API server fail: replicas are neither started nor stopped. Check the API server and the
    /// permissions of the spoke.
    warn!(workload, %error, "API server unavailable; the known pods stay registered")
    ApiFailed<'a> { workload: &'a str, error: &'a ApiError }

    /// Requests to the API server succeed again.
    info!(workload, "API server available again")
    ApiRecovered<'a> { workload: &'a str }

    /// The resource version of the watch is too old.
    info!(workload, "watch expired, listing the pods again")
    WatchExpired<'a> { workload: &'a str }

    /// The replica count of a workload was written.
    info!(workload, before, replicas, "workload scaled")
    ScaleWritten<'a> { workload: &'a str, before: u32, replicas: u32 }

    /// Two deployments map to the same workload name. Rename one of them.
    error!(workload, %deployment, "workload name already used by another deployment; deployment not scaled")
    WorkloadNameTaken<'a> { workload: &'a str, deployment: &'a regions::DeploymentName }
}
