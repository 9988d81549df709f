//! Log events of a region's replicas: one struct per event, which owns its log line.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use regions::{DeploymentName, RegionId};
use scheduler_api::scaler::ScalerEpoch;
use scheduler_core::scale::ScalingDecision;
use scheduler_core::scale::devices::Device;

crate::log::events! {
    /// This spoke starts and stops the replicas of its region from now on. Without an `epoch` it does so because neither a
    /// hub nor the scaler of the region responds.
    info!(%region, epoch = epoch.map(tracing::field::display), "scaling of the region begun")
    ScalingBegun<'a> { region: &'a RegionId, epoch: Option<ScalerEpoch> }

    /// Another spoke scales the region from now on. The replicas of this one serve until that spoke drains them.
    info!(%region, epoch = epoch.map(tracing::field::display), replicas, "scaling of the region ended")
    ScalingEnded<'a> { region: &'a RegionId, epoch: Option<ScalerEpoch>, replicas: usize }

    /// The replicas of this spoke listen on loopback, where other spokes of the region cannot reach them, so these serve
    /// only their own. Set `scaling.address` to an address of this machine.
    error!(%region, "replicas are on loopback and not shared with the other spokes of the region")
    ReplicasNotShared<'a> { region: &'a RegionId }

    /// A replica that another spoke has started is replaced by one of this spoke, and gets no new requests.
    info!(%endpoint, %deployment, "replica of another spoke draining")
    RemoteReplicaDraining<'a> { endpoint: &'a dyn Display, deployment: &'a DeploymentName }

    /// The desired number of replicas of a deployment changed from `before` to `desired`, for `reason`.
    info!(
        %deployment, before, desired = desired.replicas, reason = desired.reason.name(), ready, provisioning,
        "desired replica count changed"
    )
    DesiredChanged<'a> {
        deployment: &'a DeploymentName,
        before: u32,
        desired: ScalingDecision,
        ready: u32,
        provisioning: usize,
    }

    /// A replica was selected for termination and finishes its requests.
    info!(replica = id, %deployment, in_flight, "replica draining")
    ReplicaDraining<'a> { id: &'a str, deployment: &'a DeploymentName, in_flight: u32 }

    /// A draining replica did not finish its requests in time, and gateways retry them. Raise the drain timeout if
    /// requests take that long.
    warn!(replica = id, in_flight, ?after, "drain timeout; replica terminated with requests in flight")
    DrainTimedOut<'a> { id: &'a str, in_flight: u32, after: Duration }

    /// The process of a replica was started; `replica ready` follows when its model is loaded.
    info!(
        replica = id, %deployment, %endpoint, device = device.map(tracing::field::display), log = %log.display(),
        "replica started"
    )
    ReplicaStarted<'a> {
        id: &'a str,
        deployment: &'a DeploymentName,
        endpoint: SocketAddr,
        device: Option<&'a Device>,
        log: &'a Path,
    }

    /// A replica that an earlier spoke process has started is running, and is used instead of a new one.
    info!(replica = id, %deployment, "running replica of an earlier spoke process adopted")
    ReplicaAdopted<'a> { id: &'a str, deployment: &'a DeploymentName }

    /// A replica could not be started, and the start is tried again. Correct the cause in `error`.
    error!(%deployment, %error, "failed to start a replica")
    ReplicaStartFailed<'a> { deployment: &'a DeploymentName, error: &'a dyn Display }

    /// A replica has loaded its model and gets requests.
    info!(replica = id, %deployment, took_ms = took.map(|took| took.as_millis() as u64), "replica ready")
    ReplicaReady<'a> { id: &'a str, deployment: &'a DeploymentName, took: Option<Duration> }

    /// A replica did not become ready within the start timeout. Read its log; raise the timeout if the model takes
    /// longer to load.
    error!(replica = id, ?after, "start timeout; replica killed")
    ReplicaStartTimedOut<'a> { id: &'a str, after: Duration }

    /// The process of a replica did not end within the stop timeout, and was killed. Read its log if this happens
    /// repeatedly.
    warn!(replica = id, ?after, "stop timeout; replica killed")
    ReplicaStopTimedOut<'a> { id: &'a str, after: Duration }
}

/// The process of a replica ended.
pub(crate) struct ReplicaExited<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) requested: bool,
    pub(crate) status: &'a str,
    pub(crate) log: &'a Path,
}

impl ReplicaExited<'_> {
    pub(crate) fn emit(self) {
        let ReplicaExited { id, deployment, requested, status, log } = self;
        if requested {
            // The process of a replica has ended, as the spoke requested.
            tracing::info!(replica = id, %deployment, status, "replica stopped");
        } else {
            // The process of a replica ended although the spoke had not stopped it, and another one is started. Read
            // its log at the path `log`.
            tracing::error!(replica = id, %deployment, status, log = %log.display(), "replica crashed");
        }
    }
}
