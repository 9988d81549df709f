//! Log events of a region's replicas: one struct per event, which owns its log line.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use regions::DeploymentName;
use scheduler_core::scale::ScalingDecision;

/// The desired number of replicas of a deployment changed.
pub(crate) struct DesiredChanged<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) before: u32,
    pub(crate) desired: ScalingDecision,
    pub(crate) ready: u32,
    pub(crate) provisioning: usize,
}

impl DesiredChanged<'_> {
    pub(crate) fn emit(self) {
        let DesiredChanged {
            deployment,
            before,
            desired: ScalingDecision { replicas, reason },
            ready,
            provisioning,
        } = self;
        let reason = reason.name();
        tracing::info!(%deployment, before, desired = replicas, reason, ready, provisioning, "desired replica count changed");
    }
}

/// A replica was selected for termination and finishes its requests.
pub(crate) struct ReplicaDraining<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) in_flight: u32,
}

impl ReplicaDraining<'_> {
    pub(crate) fn emit(self) {
        let ReplicaDraining { id, deployment, in_flight } = self;
        tracing::info!(replica = id, %deployment, in_flight, "replica draining");
    }
}

/// A draining replica did not finish its requests in time, and gateways retry them. Raise the drain timeout if
/// requests take that long.
pub(crate) struct DrainTimedOut<'a> {
    pub(crate) id: &'a str,
    pub(crate) in_flight: u32,
    pub(crate) after: Duration,
}

impl DrainTimedOut<'_> {
    pub(crate) fn emit(self) {
        let DrainTimedOut { id, in_flight, after } = self;
        tracing::warn!(
            replica = id,
            in_flight,
            ?after,
            "drain timeout; replica terminated with requests in flight"
        );
    }
}

/// A replica was started.
pub(crate) struct ReplicaStarted<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) endpoint: SocketAddr,
    pub(crate) log: &'a Path,
}

impl ReplicaStarted<'_> {
    pub(crate) fn emit(self) {
        let ReplicaStarted { id, deployment, endpoint, log } = self;
        tracing::info!(replica = id, %deployment, %endpoint, log = %log.display(), "replica started");
    }
}

/// A replica that an earlier spoke process started is running.
pub(crate) struct ReplicaAdopted<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
}

impl ReplicaAdopted<'_> {
    pub(crate) fn emit(self) {
        let ReplicaAdopted { id, deployment } = self;
        tracing::info!(replica = id, %deployment, "running replica of an earlier spoke process adopted");
    }
}

/// A replica could not be started (`error`). The start is tried again.
pub(crate) struct ReplicaStartFailed<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) error: &'a dyn Display,
}

impl ReplicaStartFailed<'_> {
    pub(crate) fn emit(self) {
        let ReplicaStartFailed { deployment, error } = self;
        tracing::error!(%deployment, %error, "failed to start a replica");
    }
}

/// A replica became ready.
pub(crate) struct ReplicaReady<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) took: Option<Duration>,
}

impl ReplicaReady<'_> {
    pub(crate) fn emit(self) {
        let ReplicaReady { id, deployment, took } = self;
        let took_ms = took.map(|took| took.as_millis() as u64);
        tracing::info!(replica = id, %deployment, took_ms, "replica ready");
    }
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
            tracing::info!(replica = id, %deployment, status, "replica stopped");
        } else {
            // Another one is started. `log` is the path of its log.
            tracing::error!(replica = id, %deployment, status, log = %log.display(), "replica crashed");
        }
    }
}

/// A replica did not become ready within the start timeout. See its log; raise the timeout if the model takes
/// longer to load.
pub(crate) struct ReplicaStartTimedOut<'a> {
    pub(crate) id: &'a str,
    pub(crate) after: Duration,
}

impl ReplicaStartTimedOut<'_> {
    pub(crate) fn emit(self) {
        let ReplicaStartTimedOut { id, after } = self;
        tracing::error!(replica = id, ?after, "start timeout; replica killed");
    }
}

/// A replica did not end within the stop timeout.
pub(crate) struct ReplicaStopTimedOut<'a> {
    pub(crate) id: &'a str,
    pub(crate) after: Duration,
}

impl ReplicaStopTimedOut<'_> {
    pub(crate) fn emit(self) {
        let ReplicaStopTimedOut { id, after } = self;
        tracing::warn!(replica = id, ?after, "stop timeout; replica killed");
    }
}
