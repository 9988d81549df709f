//! What happens to a region's replicas, one struct an event; each owns its line in the log.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use regions::DeploymentName;
use scheduler_core::scale::ScalingDecision;

/// Another number of replicas is wanted than before.
pub(crate) struct WantedChanged<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) before: u32,
    pub(crate) wanted: ScalingDecision,
    pub(crate) ready: u32,
    pub(crate) ordered: usize,
}

impl WantedChanged<'_> {
    pub(crate) fn emit(self) {
        let WantedChanged {
            deployment,
            before,
            wanted: ScalingDecision { replicas, reason },
            ready,
            ordered,
        } = self;
        let why = reason.name();
        tracing::info!(%deployment, before, wanted = replicas, why, ready, ordered, "another number of replicas is wanted");
    }
}

/// A replica is let go, and finishes what it has.
pub(crate) struct ReplicaLeaves<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) in_flight: u32,
}

impl ReplicaLeaves<'_> {
    pub(crate) fn emit(self) {
        let ReplicaLeaves { id, deployment, in_flight } = self;
        tracing::info!(replica = id, %deployment, in_flight, "a replica is let go");
    }
}

/// A replica that was let go did not finish in time what it had.
pub(crate) struct DrainCutShort<'a> {
    pub(crate) id: &'a str,
    pub(crate) in_flight: u32,
    pub(crate) after: Duration,
}

impl DrainCutShort<'_> {
    pub(crate) fn emit(self) {
        let DrainCutShort { id, in_flight, after } = self;
        tracing::warn!(
            replica = id,
            in_flight,
            ?after,
            "a replica that was let go is stopped with requests under way"
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
        tracing::info!(replica = id, %deployment, %endpoint, log = %log.display(), "a replica starts");
    }
}

/// A replica of the spoke before this one runs.
pub(crate) struct ReplicaFound<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
}

impl ReplicaFound<'_> {
    pub(crate) fn emit(self) {
        let ReplicaFound { id, deployment } = self;
        tracing::info!(replica = id, %deployment, "a replica of the spoke before this one runs, and goes on");
    }
}

/// A replica could not be started.
pub(crate) struct ReplicaNotStarted<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) error: &'a dyn Display,
}

impl ReplicaNotStarted<'_> {
    pub(crate) fn emit(self) {
        let ReplicaNotStarted { deployment, error } = self;
        tracing::error!(%deployment, %error, "a replica could not be started");
    }
}

/// A replica takes work.
pub(crate) struct ReplicaReady<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) took: Option<Duration>,
}

impl ReplicaReady<'_> {
    pub(crate) fn emit(self) {
        let ReplicaReady { id, deployment, took } = self;
        let took_ms = took.map(|took| took.as_millis() as u64);
        tracing::info!(replica = id, %deployment, took_ms, "a replica takes work");
    }
}

/// A replica has ended.
pub(crate) struct ReplicaEnded<'a> {
    pub(crate) id: &'a str,
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) told: bool,
    pub(crate) how: &'a str,
    pub(crate) log: &'a Path,
}

impl ReplicaEnded<'_> {
    pub(crate) fn emit(self) {
        let ReplicaEnded { id, deployment, told, how, log } = self;
        if told {
            tracing::info!(replica = id, %deployment, how, "a replica has ended");
        } else {
            tracing::error!(replica = id, %deployment, how, log = %log.display(), "a replica has died");
        }
    }
}

/// A replica was not ready after a time in which any is.
pub(crate) struct ReplicaNeverReady<'a> {
    pub(crate) id: &'a str,
    pub(crate) after: Duration,
}

impl ReplicaNeverReady<'_> {
    pub(crate) fn emit(self) {
        let ReplicaNeverReady { id, after } = self;
        tracing::error!(replica = id, ?after, "a replica did not become ready and is killed");
    }
}

/// A replica did not end when it was told to.
pub(crate) struct ReplicaKilled<'a> {
    pub(crate) id: &'a str,
    pub(crate) after: Duration,
}

impl ReplicaKilled<'_> {
    pub(crate) fn emit(self) {
        let ReplicaKilled { id, after } = self;
        tracing::warn!(replica = id, ?after, "a replica did not end when it was told to and is killed");
    }
}
