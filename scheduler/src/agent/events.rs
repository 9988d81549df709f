//! Log events of the agent: one struct per event, which owns its log line.

use std::fmt::Display;
use std::path::Path;

use regions::{DeploymentName, Generation, RegionId};

crate::log::events! {
    /// The region is registered with the hub.
    info!(%region, hub, "region registered")
    RegionRegistered<'a> { region: &'a RegionId, hub: &'a str }

    /// The hub no longer knows the lease of this region.
    info!(%region, "region lease expired, registering again")
    LeaseExpired<'a> { region: &'a RegionId }

    /// One of several hubs is unreachable or rejects requests.
    info!(%error, next, "hub unreachable; trying the next one")
    HubFailover<'a> { next: &'a str, error: &'a dyn Display }

    /// All hubs are unreachable or reject requests. Requests of clients continue. Check the hubs and
    /// the network.
    warn!(hub, %error, "hub unreachable; the region continues without it")
    HubUnreachable<'a> { hub: &'a str, error: &'a dyn Display }

    /// A hub is reachable again.
    info!(hub, "hub reachable again")
    HubReachable<'a> { hub: &'a str }

    /// The hub does not know these deployments, which are ready in this region. Apply them, or correct their names.
    warn!(
        names = ?names.iter().map(DeploymentName::as_str).collect::<Vec<_>>(),
        "deployments are ready but not in the route table; they receive no requests"
    )
    ReadyNotDeployed<'a> { names: &'a [DeploymentName] }

    /// A spoke received a newer route table.
    info!(%generation, deployments, "route table updated")
    TableReceived { generation: Generation, deployments: usize }

    /// A spoke cannot fetch the route table, or rejects it (`error`). Requests continue, and changes of the
    /// configuration wait. Check the hubs and the network.
    warn!(hub, %error, "hub unreachable; keeping the current route table")
    TablePollFailed<'a> { hub: &'a str, error: &'a dyn Display }

    /// A route table could not be written to disk. A restart while no hub is reachable would use an older route table.
    /// Check the disk.
    warn!(snapshot = %snapshot.display(), %error, "failed to write the route table to disk")
    SnapshotWriteFailed<'a> { snapshot: &'a Path, error: &'a dyn Display }

    /// The route table on disk is unusable. The process has no route table until a hub responds.
    warn!(snapshot = %snapshot.display(), %error, "route table on disk rejected")
    SnapshotUnusable<'a> { snapshot: &'a Path, error: &'a dyn Display }

    /// The replica floors sent by the hub are unreadable. The hub runs another version; upgrade the older one.
    error!(%error, "replica floors of the hub rejected; keeping the previous ones")
    FloorsUnreadable<'a> { error: &'a dyn Display }
}
