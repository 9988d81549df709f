//! Log events of the agent: one struct per event, which owns its log line.

use std::fmt::Display;

use regions::{DeploymentName, Generation, InstanceName, RegionId};

crate::log::events! {
    /// The spoke has registered its region at a hub.
    info!(%region, %instance, hub, "region registered")
    RegionRegistered<'a> { region: &'a RegionId, instance: &'a InstanceName, hub: &'a str }

    /// The hub no longer has the lease of this spoke, for example after a loss of the network. The spoke registers
    /// again; requests continue.
    info!(%region, %instance, "region lease expired, registering again")
    LeaseExpired<'a> { region: &'a RegionId, instance: &'a InstanceName }

    /// The hub does not know these deployments, which are ready in this region. Apply them, or correct their names.
    warn!(
        names = ?names.iter().map(DeploymentName::as_str).collect::<Vec<_>>(),
        "deployments are ready but not in the route table; they receive no requests"
    )
    ReadyNotDeployed<'a> { names: &'a [DeploymentName] }

    /// A hub has published a newer route table, and the spoke uses it.
    info!(%generation, deployments, "route table updated")
    TableReceived { generation: Generation, deployments: usize }

    /// The replica floors sent by the hub are unreadable. The hub runs another version; upgrade the older one.
    error!(%error, "replica floors of the hub rejected; keeping the previous ones")
    FloorsUnreadable<'a> { error: &'a dyn Display }
}
