//! What happens in the hub and in the agent, one struct an event; each owns its line in the log.
//!
//! What comes again and again while a state lasts is told when the state begins and when it ends, not in between:
//! whoever makes the event sees to that.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;

use crate::config::StoreConfig;
use crate::hub::NEW_EPOCH;
use regions::{DeploymentName, Generation, ModelRevision, RegionId};
use scheduler_core::access::Denied;
use scheduler_core::plan::TrafficClass;
use scheduler_store::EtcdConfig;

/// The hub takes requests.
pub(crate) struct HubStarted<'a> {
    pub(crate) address: SocketAddr,
    pub(crate) store: &'a StoreConfig,
}

impl HubStarted<'_> {
    pub(crate) fn emit(self) {
        let HubStarted { address, store } = self;
        match store {
            StoreConfig::Embedded { data } => {
                tracing::info!(%address, data = %data.display(), "the hub takes requests");
            }
            StoreConfig::Etcd(EtcdConfig { endpoints, prefix, .. }) => {
                tracing::info!(%address, ?endpoints, prefix, "the hub takes requests");
            }
        }
    }
}

/// An operator lets the next model of a deployment replace the one that is served.
pub(crate) struct Promoted<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) revision: ModelRevision,
}

impl Promoted<'_> {
    pub(crate) fn emit(self) {
        let Promoted { deployment, revision } = self;
        tracing::info!(%deployment, %revision, "model revision promoted");
    }
}

/// This hub leads from now on.
pub(crate) struct Leading<'a> {
    pub(crate) name: &'a str,
    pub(crate) created: u64,
}

impl Leading<'_> {
    pub(crate) fn emit(self) {
        let Leading { name, created } = self;
        tracing::info!(name, term = created, "this hub leads");
    }
}

/// Why a term is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deposed {
    /// A write was refused: the term is another's, or the table is.
    Refused,
    /// The lease has ended.
    LeaseGone,
    /// The store is older than it was.
    SetBack,
}

impl Deposed {
    pub(crate) fn emit(self) {
        let why = match self {
            Deposed::Refused => "a write was refused, since the term or the table is another's",
            Deposed::LeaseGone => "its lease has ended",
            Deposed::SetBack => "the store is older than it was",
        };
        tracing::warn!(why, "this hub is deposed; nothing of its term is written any more");
    }
}

/// This hub follows again.
pub(crate) struct StoppedLeading {
    pub(crate) created: u64,
}

impl StoppedLeading {
    pub(crate) fn emit(self) {
        tracing::info!(term = self.created, "this hub follows, and gives out what the leader publishes");
    }
}

/// The store knows less than it knew.
pub(crate) struct StoreWentBack {
    pub(crate) known: Option<Generation>,
    pub(crate) found: Option<Generation>,
    pub(crate) epoch: u64,
}

impl StoreWentBack {
    pub(crate) fn emit(self) {
        let StoreWentBack { known, found, epoch } = self;
        let text = |generation: Option<Generation>| generation.map_or("none".to_owned(), |it| it.to_string());
        tracing::error!(
            known = text(known),
            found = text(found),
            epoch,
            "the store holds an older table than was given out: it was set back; a new epoch begins"
        );
    }
}

/// So many leases ended in one moment that the store is suspected.
pub(crate) struct LeasesHeld;

impl LeasesHeld {
    pub(crate) fn emit(self) {
        tracing::error!(
            "too many leases ended at once for it to be the regions; they keep their routes until enough are back"
        );
    }
}

/// Enough leases are back.
pub(crate) struct LeasesLetGo;

impl LeasesLetGo {
    pub(crate) fn emit(self) {
        tracing::info!("enough leases are back; regions without one lose their routes in a while");
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

/// An operator has changed what there shall be.
pub(crate) struct Applied {
    pub(crate) changes: usize,
    pub(crate) deployments: usize,
}

impl Applied {
    pub(crate) fn emit(self) {
        let Applied { changes, deployments } = self;
        tracing::info!(changes, deployments, "an operator has applied deployments");
    }
}

/// The hub's file says something else than what an operator has applied.
pub(crate) struct FileOverruled;

impl FileOverruled {
    pub(crate) fn emit(self) {
        tracing::warn!(
            "the hub's file of deployments says something else than what was applied since, which stands;              `meridian get deployments` writes that down"
        );
    }
}

/// A request was denied, the first one since the hub started.
pub(crate) struct AccessDenied<'a> {
    pub(crate) path: &'a str,
    pub(crate) why: &'a Denied,
}

impl AccessDenied<'_> {
    pub(crate) fn emit(self) {
        let AccessDenied { path, why } = self;
        tracing::warn!(path, %why, "request denied; further ones are logged at debug level");
    }
}

/// The hub has no fleet token, and listens on loopback.
pub(crate) struct NoFleetTokenSet {
    pub(crate) listen: SocketAddr,
}

impl NoFleetTokenSet {
    pub(crate) fn emit(self) {
        let NoFleetTokenSet { listen } = self;
        tracing::warn!(
            %listen,
            "no fleet token is configured: every process on this machine can register regions and read tenants"
        );
    }
}

/// So many readers have said which table they run that no more are noted.
pub(crate) struct ReadersTooMany {
    pub(crate) most: usize,
}

impl ReadersTooMany {
    pub(crate) fn emit(self) {
        let ReadersTooMany { most } = self;
        tracing::error!(most, "more gateways and spokes than can be waited for; the rest are not");
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

/// Other classes than before could not bear the loss of a region.
pub(crate) struct LossNotBorne<'a> {
    pub(crate) classes: &'a BTreeSet<TrafficClass>,
}

/// Classes that one line of the log names.
const NAMED_MAX: usize = 8;

impl LossNotBorne<'_> {
    pub(crate) fn emit(self) {
        let LossNotBorne { classes } = self;
        if classes.is_empty() {
            tracing::info!("every class that is asked for could bear the loss of any region");
            return;
        }
        let named = classes.iter().take(NAMED_MAX);
        let named: Vec<_> = named
            .map(|TrafficClass { deployment, residency }| format!("{deployment} under {residency}"))
            .collect();
        tracing::warn!(
            classes = classes.len(),
            ?named,
            "these have too few regions, or too few replicas may be started, for the loss of their largest region"
        );
    }
}

/// Somebody wants a region emptied.
pub(crate) struct DrainAsked<'a> {
    pub(crate) region: &'a RegionId,
}

impl DrainAsked<'_> {
    pub(crate) fn emit(self) {
        let DrainAsked { region } = self;
        tracing::info!(%region, "a region is to be drained");
    }
}

/// Somebody wants it used again.
pub(crate) struct DrainUndone<'a> {
    pub(crate) region: &'a RegionId,
}

impl DrainUndone<'_> {
    pub(crate) fn emit(self) {
        let DrainUndone { region } = self;
        tracing::info!(%region, "a region is not to be drained any longer");
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
}

impl Registered<'_> {
    pub(crate) fn emit(self) {
        let Registered { region, hub } = self;
        tracing::info!(%region, hub, "registered with the hub");
    }
}

/// The hub has forgotten this region's lease.
pub(crate) struct LeaseLost<'a> {
    pub(crate) region: &'a RegionId,
}

impl LeaseLost<'_> {
    pub(crate) fn emit(self) {
        let LeaseLost { region } = self;
        tracing::info!(%region, "the lease has ended; registering again");
    }
}

/// One of several hubs cannot be asked, or refuses.
pub(crate) struct HubPassedOver<'a> {
    pub(crate) next: &'a str,
    pub(crate) error: &'a dyn Display,
}

impl HubPassedOver<'_> {
    pub(crate) fn emit(self) {
        let HubPassedOver { next, error } = self;
        tracing::info!(%error, next, "a hub does not answer; the next one is asked");
    }
}

/// The hub cannot be asked, or refuses, from now on; nor can any other that there is.
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

/// A spoke has a newer route table.
pub(crate) struct TableFollowed {
    pub(crate) generation: Generation,
    pub(crate) deployments: usize,
}

impl TableFollowed {
    pub(crate) fn emit(self) {
        let TableFollowed { generation, deployments } = self;
        tracing::info!(%generation, deployments, "a new route table");
    }
}

/// A spoke cannot follow the route table, or refuses it, from now on.
pub(crate) struct TableNotFollowed<'a> {
    pub(crate) hub: &'a str,
    pub(crate) error: &'a dyn Display,
}

impl TableNotFollowed<'_> {
    pub(crate) fn emit(self) {
        let TableNotFollowed { hub, error } = self;
        tracing::warn!(hub, %error, "the route table cannot be followed; the one in hand stays");
    }
}

/// A table could not be written.
pub(crate) struct TableNotKept<'a> {
    pub(crate) snapshot: &'a Path,
    pub(crate) error: &'a dyn Display,
}

impl TableNotKept<'_> {
    pub(crate) fn emit(self) {
        let TableNotKept { snapshot, error } = self;
        tracing::warn!(snapshot = %snapshot.display(), %error, "the route table cannot be kept on disk");
    }
}

/// The table on disk cannot be used.
pub(crate) struct TableUnusable<'a> {
    pub(crate) snapshot: &'a Path,
    pub(crate) error: &'a dyn Display,
}

impl TableUnusable<'_> {
    pub(crate) fn emit(self) {
        let TableUnusable { snapshot, error } = self;
        tracing::warn!(snapshot = %snapshot.display(), %error, "the route table on disk is of no use");
    }
}

/// What the hub wants kept cannot be read; what it wanted before stands.
pub(crate) struct FloorsRefused<'a> {
    pub(crate) error: &'a dyn Display,
}

impl FloorsRefused<'_> {
    pub(crate) fn emit(self) {
        tracing::error!(error = %self.error, "the hub's floors cannot be read; those before stand");
    }
}
