//! Log events of the hub: one struct per event, which owns its log line.
//!
//! Conditions that last are logged when they begin and when they end, not in between; the caller that emits the event
//! tracks the condition.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use crate::config::StoreConfig;
use regions::spiffe::SpiffeId;
use regions::{DeploymentName, Generation, HostPort, InstanceName, ModelRevision, RegionId, TenantId};
use scheduler_api::plan::TrafficClass;
use scheduler_api::scaler::ScalerEpoch;
use scheduler_core::pki::rotation::CertificateRecord;
use scheduler_core::pki::token::Fingerprint;
use scheduler_core::placement::Infeasible;
use scheduler_store::{EtcdConfig, StoreError};

/// Remedy for an unusable store.
pub(crate) const NEW_EPOCH: &str = "start the hub on a new store (an empty data folder, or another etcd prefix): this begins a new epoch, and regions register again by themselves";

crate::log::events! {
    /// Old records of usage were not deleted. The next report of usage tries again. If it persists, check the store.
    warn!(%error, "cannot delete old usage")
    UsagePruneFailed<'a> { error: &'a StoreError }

    /// The oldest records of usage are not in the backup, because the usage of tenants exceeds its limit. Export it
    /// (`meridian get usage --csv`).
    warn!(records = left_out, "backup without the oldest usage")
    BackupWithoutOldUsage { left_out: usize }

    /// An operator promoted the next model of a deployment.
    info!(%deployment, %revision, "model revision promoted")
    Promoted<'a> { deployment: &'a DeploymentName, revision: ModelRevision }

    /// This hub is the leader: it publishes the route table and the traffic plan.
    info!(name, term = created, "leadership acquired")
    LeadershipAcquired<'a> { name: &'a str, created: u64 }

    /// This hub is a follower: it serves the route table and accepts registrations.
    info!(term = created, "following the leader")
    BecameFollower { created: u64 }

    /// The store holds an older route table than this hub has published: it was restored or lost writes. Readers accept
    /// the tables of the new epoch. Apply changes again that the store lost.
    error!(published = text(published), stored = text(stored), epoch, "store rolled back, new epoch started")
    StoreRolledBack { published: Option<Generation>, stored: Option<Generation>, epoch: u64 }

    /// The hub and its etcd were restored from a backup and a snapshot, so the hub has begun a new epoch, whose tables
    /// gateways accept. Apply the changes again that were made after the snapshot.
    info!(epoch, "new epoch started after a restoration")
    RestoredEpochBegun { epoch: u64 }

    /// The hub has published a route table with a higher generation.
    info!(%generation, regions, deployments, "route table published")
    TablePublished { generation: Generation, regions: usize, deployments: usize }

    /// An operator changed deployments or tenants; `changes` is their number.
    info!(changes, deployments, "configuration applied")
    ConfigurationApplied { changes: usize, deployments: usize }

    /// Other regions were chosen for a deployment that states a placement, or a region has left after the new ones were ready.
    /// `meridian get plan` shows why.
    info!(%deployment, ?regions, "placement changed")
    PlacementChanged<'a> { deployment: &'a DeploymentName, regions: &'a [RegionId] }

    /// An operator created an API key.
    info!(id, %tenant, "API key created")
    ApiKeyCreated<'a> { id: &'a str, tenant: &'a TenantId }

    /// An operator revoked an API key.
    info!(id, %tenant, "API key revoked")
    ApiKeyRevoked<'a> { id: &'a str, tenant: &'a TenantId }

    /// A request of this peer was denied, for the first time for this reason. Its role or its region may not send it:
    /// check that the process uses its own identity and its own region.
    warn!(peer, path, reason, "request denied; further ones are logged at debug level")
    AccessDenied<'a> { peer: &'a str, path: &'a str, reason: &'a str }

    /// A request without a certificate has no valid token, for the first time from this address for this reason. The log has
    /// no part of the token. Get a new token, or correct `[operators]`; the metric counts all of them.
    warn!(%address, path, reason, "request not authenticated; further ones are logged at debug level")
    NotAuthenticated<'a> { address: IpAddr, path: &'a str, reason: &'a str }

    /// The issuer of operators' tokens has changed its keys, and tokens are verified with the new ones.
    info!(issuer, keys, "keys of the issuer replaced")
    IssuerKeysReplaced<'a> { issuer: &'a str, keys: usize }

    /// The keys of the issuer of operators' tokens cannot be fetched or are invalid; the last valid ones stay in use. Check
    /// the issuer, the network, or the file.
    warn!(issuer, problem, "keys of the issuer rejected; keeping the last ones")
    IssuerKeysRejected<'a> { issuer: &'a str, problem: &'a str }

    /// The hub has no identity, so every process that can connect may do everything. Configure `[identity]`, unless all
    /// of them are trusted.
    warn!(%listen, "no identity is configured; every process that can connect can register regions and change tenants")
    HubWithoutIdentity { listen: SocketAddr }

    /// Members of the etcd are on other machines, and the hub uses plaintext or has no client certificate, because of
    /// `store.insecure`. Every process that reaches the members can change the routes. Configure `store.ca`,
    /// `store.certificate` and `store.key` unless the network is trusted.
    warn!(?endpoints, "connections to etcd are not protected by mutual TLS because of store.insecure")
    EtcdUnprotected<'a> { endpoints: &'a [String] }

    /// The hub records no further gateways and spokes, and changes of residency do not wait for their acknowledgement.
    /// Stop gateways and spokes that are not needed.
    error!(limit, "reader limit reached; rollouts do not wait for further gateways and spokes")
    ReaderLimitReached { limit: usize }

    /// A spoke has registered with the hub.
    info!(%region, %instance, boot_id, %endpoint, lease, "spoke registered")
    SpokeRegistered<'a> { region: &'a RegionId, instance: &'a InstanceName, boot_id: u64, endpoint: &'a HostPort, lease: u64 }

    /// A spoke got the scaler lease of its region: it starts and stops the replicas from now on.
    info!(%region, boot_id = format!("{boot_id:x}"), %epoch, "scaler lease granted")
    ScalerLeaseGranted<'a> { region: &'a RegionId, boot_id: u64, epoch: ScalerEpoch }

    /// An operator requested that a region is drained.
    info!(%region, "drain requested")
    DrainRequested<'a> { region: &'a RegionId }

    /// An operator cancelled the drain of a region.
    info!(%region, "drain cancelled")
    DrainCancelled<'a> { region: &'a RegionId }

    /// The lease of a spoke expired or was revoked: the spoke has stopped, or has lost its connection to all hubs.
    info!(%region, boot_id, "spoke lease ended; unless it drained or is replaced, it keeps its route for the grace period")
    SpokeLeaseEnded<'a> { region: &'a RegionId, boot_id: u64 }

    /// A record in the store is unreadable and ignored. Another version wrote it, or it was changed by hand: upgrade
    /// this hub, or delete the record.
    error!(%error, "unreadable record of the store ignored")
    RecordUnreadable<'a> { error: &'a dyn Display }

    /// The hub may have missed changes of its store, and lists it again. Check the store if it happens often.
    warn!(%error, "store watch interrupted, listing the store again")
    StoreRelisted<'a> { error: &'a dyn Display }

    /// Requests to the store fail. Requests of clients continue; changes of the configuration fail. Check the disk of
    /// the hub, or etcd.
    error!(%error, "store unavailable; the published route table stays in force")
    StoreFailed<'a> { error: &'a dyn Display }

    /// The built-in authority accepts requests.
    info!(%address, "authority started")
    AuthorityStarted { address: SocketAddr }

    /// An operator created a join token. The log has no secret.
    info!(%subject, ttl_s = ttl.as_secs(), "join token created")
    JoinTokenCreated<'a> { subject: &'a SpiffeId, ttl: Duration }

    /// A request to join was rejected; `reason` says whether the token is unknown, expired or used. If it was used, and
    /// by none of your processes, revoke the certificate that was issued for it.
    warn!(%address, %reason, "join rejected")
    JoinRejected<'a> { address: IpAddr, reason: &'a dyn Display }

    /// The list of the join tokens that were used or revoked cannot be read or written. It protects against the reuse of a token
    /// after the store was restored from a backup. Check the identity folder and the disk.
    error!(file = %file.display(), %error, "list of closed join tokens not available")
    ClosedTokensFailed<'a> { file: &'a Path, error: &'a dyn Display }

    /// All join tokens were deleted, because the store was restored and they may have been used since the backup. Create the
    /// ones that are needed again.
    warn!(tokens, "join tokens deleted after a restoration")
    JoinTokensDeleted { tokens: usize }

    /// An operator revoked certificates and unused join tokens, and their owners are disconnected. No action if this
    /// was intended.
    warn!(certificates, tokens, "certificates revoked")
    CertificatesRevoked { certificates: usize, tokens: usize }

    /// An operator took a step of the rotation of the authority; `signer` signs from now on. No action if this was
    /// intended.
    warn!(phase, %signer, authorities, "rotation of the authority continued")
    RotationStep<'a> { phase: &'static str, signer: &'a Fingerprint, authorities: usize }

    /// The hub could not renew its own certificate, or not write its identity folder. It tries again; the present certificate
    /// stays in use until it expires. Check the folder and the signer.
    error!(%error, "own certificate not renewed")
    OwnCertificateFailed<'a> { error: &'a dyn Display }

    /// The hub has renewed its own certificate, which expires at `expires_s` (Unix time).
    info!(serial, expires_s, "own certificate renewed")
    OwnCertificateRenewed<'a> { serial: &'a str, expires_s: u64 }

    /// The store was rolled back, and a gateway has a newer route table than this hub. Follow the steps in `remedy`.
    error!(
        %reader, %ours, remedy = NEW_EPOCH,
        "gateway has a newer route table than this hub because the store was rolled back; gateways reject the \
         tables of this hub"
    )
    ReaderAhead { reader: Generation, ours: Generation }
}

/// The authority has issued a certificate, for a join token or for the renewal of a certificate; it expires at
/// `expires_s` (Unix time).
pub(crate) struct CertificateIssued;

impl CertificateIssued {
    pub(crate) fn emit(record: &CertificateRecord, cause: &'static str) {
        let CertificateRecord { serial, subject, not_after, .. } = record;
        tracing::info!(%serial, %subject, cause, expires_s = not_after.as_secs(), "certificate issued");
    }
}

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

/// Reason why the hub is no longer the leader. Another hub takes over; check the store if none logs `leadership
/// acquired`.
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

fn text(generation: Option<Generation>) -> String {
    generation.map_or("none".to_owned(), |it| it.to_string())
}

/// So many leases expired at the same time that the store is suspected rather than the regions. Check the store and
/// the network.
pub(crate) struct MassLeaseExpiry;

impl MassLeaseExpiry {
    pub(crate) fn emit(self) {
        tracing::error!("mass lease expiry; regions keep their routes until enough leases are renewed");
    }
}

/// Enough leases are renewed. Regions without one lose their routes after the grace period.
pub(crate) struct MassLeaseExpiryOver;

impl MassLeaseExpiryOver {
    pub(crate) fn emit(self) {
        tracing::info!(
            "mass lease expiry over; regions without a lease lose their routes after the grace period"
        );
    }
}

/// The deployments file of the hub differs from the deployments that an operator applied. The applied deployments
/// are in force. `remedy` has the command that writes them to the file.
pub(crate) struct DeploymentsFileIgnored;

impl DeploymentsFileIgnored {
    pub(crate) fn emit(self) {
        tracing::warn!(
            remedy = "write the applied deployments to the file with `meridian get deployments`",
            "deployments file ignored because it differs from the applied deployments"
        );
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
            // Since the last change, the remaining regions can serve all requests if any one region is lost.
            tracing::info!("capacity suffices for the loss of any region");
            return;
        }
        let named = classes.iter().take(LOGGED_CLASSES_MAX);
        let named: Vec<_> = named
            .map(|TrafficClass { deployment, residency }| format!("{deployment} under {residency}"))
            .collect();
        // If the largest region is lost, the others cannot serve all requests. `named` has up to eight of the traffic
        // classes that lack regions or replicas. Add regions, or raise `scaling.max`.
        tracing::warn!(
            classes = classes.len(),
            ?named,
            "capacity does not suffice for the loss of the largest region; add regions or raise scaling.max"
        );
    }
}

/// The set of deployments with an infeasible placement changed, or the constraint of one of them.
pub(crate) struct InfeasiblePlacementsChanged<'a> {
    pub(crate) deployments: &'a BTreeMap<DeploymentName, Infeasible>,
}

/// Maximum number of deployments named in one log line.
const LOGGED_DEPLOYMENTS_MAX: usize = 8;

impl InfeasiblePlacementsChanged<'_> {
    pub(crate) fn emit(self) {
        let InfeasiblePlacementsChanged { deployments } = self;
        if deployments.is_empty() {
            // Since the last change, a set of regions meets the placement of each deployment.
            tracing::info!("all placements are feasible");
            return;
        }
        let named = deployments.iter().take(LOGGED_DEPLOYMENTS_MAX);
        let named: Vec<_> = named.map(|(name, why)| format!("{name}: {}: {why}", why.key())).collect();
        // These deployments stay in their current regions; one without regions is not served. `named` has up to eight of
        // them with the constraint and its fix. `meridian get plan` shows the regions that were rejected.
        tracing::warn!(
            deployments = deployments.len(),
            ?named,
            "no set of regions meets the placement of deployments"
        );
    }
}

/// The set of regions with several queues of jobs changed.
pub(crate) struct SeveralJobQueuesChanged<'a> {
    pub(crate) regions: &'a BTreeSet<RegionId>,
}

/// Maximum number of regions named in one log line.
const LOGGED_REGIONS_MAX: usize = 8;

impl SeveralJobQueuesChanged<'_> {
    pub(crate) fn emit(self) {
        let SeveralJobQueuesChanged { regions } = self;
        if regions.is_empty() {
            // Since the last change, the spokes of each region share one queue.
            tracing::info!("each region has at most one queue of jobs");
            return;
        }
        let named: Vec<_> = regions.iter().take(LOGGED_REGIONS_MAX).map(ToString::to_string).collect();
        // Spokes of these regions have queues of their own, and gateways look for a job at one spoke, so accepted jobs
        // are not found. `named` has up to eight of the regions.
        tracing::warn!(
            regions = regions.len(),
            ?named,
            "regions have several queues of jobs; remove [jobs] from all of its spokes but one, or set jobs.nats of all to the same servers"
        );
    }
}

/// Requests to the store succeed again.
pub(crate) struct StoreRecovered;

impl StoreRecovered {
    pub(crate) fn emit(self) {
        tracing::info!("store available again");
    }
}
