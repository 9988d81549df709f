//! Log events of the agent: one struct per event, which owns its log line.

use std::fmt::Display;
use std::path::Path;

use regions::{DeploymentName, Generation, RegionId};

/// The region is registered with the hub.
pub(crate) struct RegionRegistered<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) hub: &'a str,
}

impl RegionRegistered<'_> {
    pub(crate) fn emit(self) {
        let RegionRegistered { region, hub } = self;
        tracing::info!(%region, hub, "region registered");
    }
}

/// The hub no longer knows the lease of this region.
pub(crate) struct LeaseExpired<'a> {
    pub(crate) region: &'a RegionId,
}

impl LeaseExpired<'_> {
    pub(crate) fn emit(self) {
        let LeaseExpired { region } = self;
        tracing::info!(%region, "region lease expired, registering again");
    }
}

/// One of several hubs is unreachable or rejects requests.
pub(crate) struct HubFailover<'a> {
    pub(crate) next: &'a str,
    pub(crate) error: &'a dyn Display,
}

impl HubFailover<'_> {
    pub(crate) fn emit(self) {
        let HubFailover { next, error } = self;
        tracing::info!(%error, next, "hub unreachable; trying the next one");
    }
}

/// All hubs are unreachable or reject requests. Requests of clients continue. Check the hubs and the network
/// between.
pub(crate) struct HubUnreachable<'a> {
    pub(crate) hub: &'a str,
    pub(crate) error: &'a dyn Display,
}

impl HubUnreachable<'_> {
    pub(crate) fn emit(self) {
        let HubUnreachable { hub, error } = self;
        tracing::warn!(hub, %error, "hub unreachable; the region continues without it");
    }
}

/// A hub is reachable again.
pub(crate) struct HubReachable<'a> {
    pub(crate) hub: &'a str,
}

impl HubReachable<'_> {
    pub(crate) fn emit(self) {
        let HubReachable { hub } = self;
        tracing::info!(hub, "hub reachable again");
    }
}

/// The hub does not know these deployments, which are ready in this region. Apply them, or correct their names.
pub(crate) struct ReadyNotDeployed<'a> {
    pub(crate) names: &'a [DeploymentName],
}

impl ReadyNotDeployed<'_> {
    pub(crate) fn emit(self) {
        let names: Vec<_> = self.names.iter().map(DeploymentName::as_str).collect();
        tracing::warn!(?names, "deployments are ready but not in the route table; they receive no requests");
    }
}

/// A spoke received a newer route table.
pub(crate) struct TableReceived {
    pub(crate) generation: Generation,
    pub(crate) deployments: usize,
}

impl TableReceived {
    pub(crate) fn emit(self) {
        let TableReceived { generation, deployments } = self;
        tracing::info!(%generation, deployments, "route table updated");
    }
}

/// A spoke cannot fetch the route table, or rejects it (`error`). Requests continue, and changes of the
/// configuration wait. Check the hubs and the network.
pub(crate) struct TablePollFailed<'a> {
    pub(crate) hub: &'a str,
    pub(crate) error: &'a dyn Display,
}

impl TablePollFailed<'_> {
    pub(crate) fn emit(self) {
        let TablePollFailed { hub, error } = self;
        tracing::warn!(hub, %error, "hub unreachable; keeping the current route table");
    }
}

/// A route table could not be written to disk. A restart while no hub is reachable would use an older route table.
/// Check the disk.
pub(crate) struct SnapshotWriteFailed<'a> {
    pub(crate) snapshot: &'a Path,
    pub(crate) error: &'a dyn Display,
}

impl SnapshotWriteFailed<'_> {
    pub(crate) fn emit(self) {
        let SnapshotWriteFailed { snapshot, error } = self;
        tracing::warn!(snapshot = %snapshot.display(), %error, "failed to write the route table to disk");
    }
}

/// The route table on disk is unusable. The process has no route table until a hub responds.
pub(crate) struct SnapshotUnusable<'a> {
    pub(crate) snapshot: &'a Path,
    pub(crate) error: &'a dyn Display,
}

impl SnapshotUnusable<'_> {
    pub(crate) fn emit(self) {
        let SnapshotUnusable { snapshot, error } = self;
        tracing::warn!(snapshot = %snapshot.display(), %error, "route table on disk rejected");
    }
}

/// The replica floors sent by the hub are unreadable. The hub runs another version; upgrade the older one.
pub(crate) struct FloorsUnreadable<'a> {
    pub(crate) error: &'a dyn Display,
}

impl FloorsUnreadable<'_> {
    pub(crate) fn emit(self) {
        tracing::error!(error = %self.error, "replica floors of the hub rejected; keeping the previous ones");
    }
}
