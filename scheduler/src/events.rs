//! Log events of the hub and the agent: one struct per event, which owns its log line.
//!
//! Conditions that last are logged when they begin and when they end, not in between; the caller that emits the event
//! tracks the condition.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;

use crate::config::StoreConfig;
use crate::hub::NEW_EPOCH;
use regions::{DeploymentName, Generation, ModelRevision, RegionId};
use scheduler_api::plan::TrafficClass;
use scheduler_core::access::Denied;
use scheduler_store::EtcdConfig;

/// The hub accepts requests.
pub(crate) struct HubStarted<'a> {
    pub(crate) address: SocketAddr,
    pub(crate) store: &'a StoreConfig,
}

impl HubStarted<'_> {
    pub(crate) fn emit(self) {
        let HubStarted { address, store } = self;
        match store {
            StoreConfig::Embedded { data } => {
                tracing::info!(%address, data = %data.display(), "hub started");
            }
            StoreConfig::Etcd(EtcdConfig { endpoints, prefix, .. }) => {
                tracing::info!(%address, ?endpoints, prefix, "hub started");
            }
        }
    }
}

/// An operator promoted the next model of a deployment.
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

/// This hub became the leader.
pub(crate) struct LeadershipAcquired<'a> {
    pub(crate) name: &'a str,
    pub(crate) created: u64,
}

impl LeadershipAcquired<'_> {
    pub(crate) fn emit(self) {
        let LeadershipAcquired { name, created } = self;
        tracing::info!(name, term = created, "leadership acquired");
    }
}

/// Reason for the end of a term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeadershipLost {
    /// A write was refused: another hub holds the term, or has changed the table.
    WriteRejected,
    /// The leader's lease expired.
    LeaseExpired,
    /// The store's revision is lower than before.
    StoreRolledBack,
}

impl LeadershipLost {
    pub(crate) fn emit(self) {
        let reason = match self {
            LeadershipLost::WriteRejected => "write refused: term or table changed",
            LeadershipLost::LeaseExpired => "lease expired",
            LeadershipLost::StoreRolledBack => "store rolled back",
        };
        tracing::warn!(reason, "leadership lost");
    }
}

/// This hub became a follower.
pub(crate) struct BecameFollower {
    pub(crate) created: u64,
}

impl BecameFollower {
    pub(crate) fn emit(self) {
        tracing::info!(term = self.created, "following the leader");
    }
}

/// The store holds an older route table than this hub has published.
pub(crate) struct StoreRolledBack {
    pub(crate) published: Option<Generation>,
    pub(crate) stored: Option<Generation>,
    pub(crate) epoch: u64,
}

impl StoreRolledBack {
    pub(crate) fn emit(self) {
        let StoreRolledBack { published, stored, epoch } = self;
        let text = |generation: Option<Generation>| generation.map_or("none".to_owned(), |it| it.to_string());
        tracing::error!(
            published = text(published),
            stored = text(stored),
            epoch,
            "store rolled back, new epoch started"
        );
    }
}

/// So many leases expired at the same time that the store is suspected rather than the regions.
pub(crate) struct MassLeaseExpiry;

impl MassLeaseExpiry {
    pub(crate) fn emit(self) {
        tracing::error!("mass lease expiry; regions keep their routes until enough leases are renewed");
    }
}

/// Enough leases are renewed again.
pub(crate) struct MassLeaseExpiryOver;

impl MassLeaseExpiryOver {
    pub(crate) fn emit(self) {
        tracing::info!(
            "mass lease expiry over; regions without a lease lose their routes after the grace period"
        );
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
        tracing::info!(%generation, regions, deployments, "route table published");
    }
}

/// An operator applied deployments or tenants.
pub(crate) struct ConfigurationApplied {
    pub(crate) changes: usize,
    pub(crate) deployments: usize,
}

impl ConfigurationApplied {
    pub(crate) fn emit(self) {
        let ConfigurationApplied { changes, deployments } = self;
        tracing::info!(changes, deployments, "configuration applied");
    }
}

/// The deployments file of the hub differs from the deployments that an operator applied.
pub(crate) struct DeploymentsFileIgnored;

impl DeploymentsFileIgnored {
    pub(crate) fn emit(self) {
        tracing::warn!(
            remedy = "write the applied deployments to the file with `meridian get deployments`",
            "deployments file ignored, it differs from the applied deployments"
        );
    }
}

/// A request was denied, for the first time since the hub started.
pub(crate) struct AccessDenied<'a> {
    pub(crate) path: &'a str,
    pub(crate) reason: &'a Denied,
}

impl AccessDenied<'_> {
    pub(crate) fn emit(self) {
        let AccessDenied { path, reason } = self;
        tracing::warn!(path, %reason, "request denied; further ones are logged at debug level");
    }
}

/// The hub has no fleet token and listens on a loopback address.
pub(crate) struct FleetTokenMissing {
    pub(crate) listen: SocketAddr,
}

impl FleetTokenMissing {
    pub(crate) fn emit(self) {
        let FleetTokenMissing { listen } = self;
        tracing::warn!(
            %listen,
            "no fleet token is configured: every process on this machine can register regions and read tenants"
        );
    }
}

/// The limit of tracked readers is reached; further readers are not recorded.
pub(crate) struct ReaderLimitReached {
    pub(crate) limit: usize,
}

impl ReaderLimitReached {
    pub(crate) fn emit(self) {
        let ReaderLimitReached { limit } = self;
        tracing::error!(limit, "reader limit reached; rollouts do not wait for further gateways and spokes");
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
        tracing::info!(%region, boot_id, %endpoint, lease, "spoke registered");
    }
}

/// The set of classes that would not survive the loss of a region changed.
pub(crate) struct FailoverCapacityChanged<'a> {
    pub(crate) classes: &'a BTreeSet<TrafficClass>,
}

/// Maximum number of classes named in one log line.
const LOGGED_CLASSES_MAX: usize = 8;

impl FailoverCapacityChanged<'_> {
    pub(crate) fn emit(self) {
        let FailoverCapacityChanged { classes } = self;
        if classes.is_empty() {
            tracing::info!("capacity suffices for the loss of any region");
            return;
        }
        let named = classes.iter().take(LOGGED_CLASSES_MAX);
        let named: Vec<_> = named
            .map(|TrafficClass { deployment, residency }| format!("{deployment} under {residency}"))
            .collect();
        tracing::warn!(
            classes = classes.len(),
            ?named,
            "capacity does not suffice for the loss of the largest region; add regions or raise scaling.max"
        );
    }
}

/// An operator requested that a region is drained.
pub(crate) struct DrainRequested<'a> {
    pub(crate) region: &'a RegionId,
}

impl DrainRequested<'_> {
    pub(crate) fn emit(self) {
        let DrainRequested { region } = self;
        tracing::info!(%region, "drain requested");
    }
}

/// An operator cancelled the drain of a region.
pub(crate) struct DrainCancelled<'a> {
    pub(crate) region: &'a RegionId,
}

impl DrainCancelled<'_> {
    pub(crate) fn emit(self) {
        let DrainCancelled { region } = self;
        tracing::info!(%region, "drain cancelled");
    }
}

/// The lease of a spoke expired or was revoked.
pub(crate) struct SpokeLeaseEnded<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) boot_id: u64,
}

impl SpokeLeaseEnded<'_> {
    pub(crate) fn emit(self) {
        let SpokeLeaseEnded { region, boot_id } = self;
        tracing::info!(%region, boot_id, "spoke lease ended; region keeps its route for the grace period");
    }
}

/// A record in the store is unreadable and ignored.
pub(crate) struct RecordUnreadable<'a> {
    pub(crate) error: &'a dyn Display,
}

impl RecordUnreadable<'_> {
    pub(crate) fn emit(self) {
        let RecordUnreadable { error } = self;
        tracing::error!(%error, "unreadable record in the store ignored");
    }
}

/// The hub may have missed changes of its store, and lists it again.
pub(crate) struct StoreRelisted<'a> {
    pub(crate) error: &'a dyn Display,
}

impl StoreRelisted<'_> {
    pub(crate) fn emit(self) {
        let StoreRelisted { error } = self;
        tracing::warn!(%error, "store watch interrupted, listing the store again");
    }
}

/// Requests to the store fail.
pub(crate) struct StoreFailed<'a> {
    pub(crate) error: &'a dyn Display,
}

impl StoreFailed<'_> {
    pub(crate) fn emit(self) {
        let StoreFailed { error } = self;
        tracing::error!(%error, "store unavailable; the published route table stays in force");
    }
}

/// Requests to the store succeed again.
pub(crate) struct StoreRecovered;

impl StoreRecovered {
    pub(crate) fn emit(self) {
        tracing::info!("store available again");
    }
}

/// A gateway has a newer table than this hub.
pub(crate) struct ReaderAhead {
    pub(crate) reader: Generation,
    pub(crate) ours: Generation,
}

impl ReaderAhead {
    pub(crate) fn emit(self) {
        let ReaderAhead { reader, ours } = self;
        tracing::error!(
            %reader, %ours, remedy = NEW_EPOCH,
            "gateway has a newer route table than this hub: the store was rolled back, and gateways reject this hub's \
             tables"
        );
    }
}

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
        tracing::info!(%region, "lease expired, registering again");
    }
}

/// The hub does not know these deployments, which are ready in this region.
pub(crate) struct ReadyNotDeployed<'a> {
    pub(crate) names: &'a [DeploymentName],
}

impl ReadyNotDeployed<'_> {
    pub(crate) fn emit(self) {
        let names: Vec<_> = self.names.iter().map(DeploymentName::as_str).collect();
        tracing::warn!(?names, "deployments ready but not in the route table: they receive no requests");
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
        tracing::info!(%generation, deployments, "route table received");
    }
}

/// The replica floors sent by the hub are unreadable; the previous ones stay in force.
pub(crate) struct FloorsUnreadable<'a> {
    pub(crate) error: &'a dyn Display,
}

impl FloorsUnreadable<'_> {
    pub(crate) fn emit(self) {
        tracing::error!(error = %self.error, "cannot read the hub's replica floors; the previous ones stay in force");
    }
}
