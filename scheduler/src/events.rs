//! What happens in the hub and in the agent, one struct an event; each owns its line in the log.
//!
//! What comes again and again while a state lasts is told when the state begins and when it ends, not in between:
//! whoever makes the event sees to that.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;

use crate::hub::NEW_EPOCH;
use regions::{DeploymentName, Generation, RegionId};

/// The hub has opened its store and takes requests.
pub(crate) struct HubStarted<'a> {
    pub(crate) address: SocketAddr,
    pub(crate) data: &'a Path,
    pub(crate) epoch: u64,
}

impl HubStarted<'_> {
    pub(crate) fn emit(self) {
        let HubStarted { address, data, epoch } = self;
        tracing::info!(%address, data = %data.display(), epoch, "the hub takes requests");
    }
}

/// A route table was published.
pub(crate) struct TablePublished {
    pub(crate) generation: Generation,
    pub(crate) regions: usize,
    pub(crate) deployments: usize,
}

impl TablePublished {
    pub(crate) fn emit(self) {
        let TablePublished { generation, regions, deployments } = self;
        tracing::info!(%generation, regions, deployments, "published a route table");
    }
}

/// A spoke registered.
pub(crate) struct SpokeRegistered<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) boot_id: u64,
    pub(crate) endpoint: SocketAddr,
    pub(crate) lease: u64,
}

impl SpokeRegistered<'_> {
    pub(crate) fn emit(self) {
        let SpokeRegistered { region, boot_id, endpoint, lease } = self;
        tracing::info!(%region, boot_id, %endpoint, lease, "a spoke registered");
    }
}

/// A spoke's lease ended.
pub(crate) struct SpokeGone<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) boot_id: u64,
}

impl SpokeGone<'_> {
    pub(crate) fn emit(self) {
        let SpokeGone { region, boot_id } = self;
        tracing::info!(%region, boot_id, "a spoke is gone; its region keeps its route for a while");
    }
}

/// Something in the store cannot be read, and is left out.
pub(crate) struct RecordRefused<'a> {
    pub(crate) error: &'a dyn Display,
}

impl RecordRefused<'_> {
    pub(crate) fn emit(self) {
        let RecordRefused { error } = self;
        tracing::error!(%error, "something in the store cannot be read and is left out");
    }
}

/// The hub may have missed changes of its store, and reads it anew.
pub(crate) struct Relisting<'a> {
    pub(crate) error: &'a dyn Display,
}

impl Relisting<'_> {
    pub(crate) fn emit(self) {
        let Relisting { error } = self;
        tracing::warn!(%error, "changes of the store may have been missed; it is read anew");
    }
}

/// The store has begun to fail.
pub(crate) struct StoreFailing<'a> {
    pub(crate) error: &'a dyn Display,
}

impl StoreFailing<'_> {
    pub(crate) fn emit(self) {
        let StoreFailing { error } = self;
        tracing::error!(%error, "the store fails; what was published last stands");
    }
}

/// The store does its part again.
pub(crate) struct StoreRecovered;

impl StoreRecovered {
    pub(crate) fn emit(self) {
        tracing::info!("the store works again");
    }
}

/// A gateway has a table that this hub has not made yet.
pub(crate) struct ReaderAhead {
    pub(crate) reader: Generation,
    pub(crate) ours: Generation,
}

impl ReaderAhead {
    pub(crate) fn emit(self) {
        let ReaderAhead { reader, ours } = self;
        tracing::error!(
            %reader, %ours, remedy = NEW_EPOCH,
            "a gateway has a newer table than this hub, whose store must be older than it was; gateways take nothing \
             from it"
        );
    }
}

/// The hub has this region's registration.
pub(crate) struct Registered<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) hub: &'a str,
    pub(crate) lease: u64,
}

impl Registered<'_> {
    pub(crate) fn emit(self) {
        let Registered { region, hub, lease } = self;
        tracing::info!(%region, hub, lease, "registered with the hub");
    }
}

/// The hub has forgotten this region's lease.
pub(crate) struct LeaseLost {
    pub(crate) lease: u64,
}

impl LeaseLost {
    pub(crate) fn emit(self) {
        let LeaseLost { lease } = self;
        tracing::info!(lease, "the lease has ended; registering again");
    }
}

/// The hub cannot be asked, or refuses, from now on.
pub(crate) struct HubLost<'a> {
    pub(crate) hub: &'a str,
    pub(crate) error: &'a dyn Display,
}

impl HubLost<'_> {
    pub(crate) fn emit(self) {
        let HubLost { hub, error } = self;
        tracing::warn!(hub, %error, "not in touch with the hub; the region goes on without it");
    }
}

/// The hub answers again.
pub(crate) struct HubBack<'a> {
    pub(crate) hub: &'a str,
}

impl HubBack<'_> {
    pub(crate) fn emit(self) {
        let HubBack { hub } = self;
        tracing::info!(hub, "in touch with the hub again");
    }
}

/// The hub does not know these deployments, which are ready here.
pub(crate) struct NotDeployed<'a> {
    pub(crate) names: &'a [DeploymentName],
}

impl NotDeployed<'_> {
    pub(crate) fn emit(self) {
        let names: Vec<_> = self.names.iter().map(DeploymentName::as_str).collect();
        tracing::warn!(?names, "ready here and not deployed: nobody will be sent here for these");
    }
}
