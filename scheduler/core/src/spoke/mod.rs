//! What a region decides by itself: which replica takes a request, and what the region tells others about itself.
//!
//! The region's ingress and its agent share one [`Spoke`]. The ingress feeds it with what it hears from replicas (their
//! status, five times a second) and with what becomes of each request; it answers from that alone, so a region works for
//! ever without the hub.
//!
//! A replica is chosen by *estimated finish*: what it has before it, plus the new request, divided by its measured
//! speed. What it has before it is reckoned forward from its last word (see `replica`), so that a hundred requests
//! which arrive between two words do not all go to whoever was idle at the first.
//!
//! A replica's own word is not all: one that is frozen says nothing, and one origin machine is throttled says that it is
//! well. So the caller says what its own requests have seen of each ([`PassiveHealth`]): whether to ask it now, and how much slower
//! than the best of them it is, by which its estimated finish is multiplied.
//!
//! The obvious other way, fewest requests in flight, counts a request of one word like one of two thousand texts.
//!
//! What the region could take beyond what comes by itself it offers to gateways origin own region is full (see `grants`).
//! Where no replica is ready and one is on its way (see `provisioning`), requests wait for it (see [`hold`]).

mod arrivals;
mod capacity;
mod selection;
mod provisioning;
mod scaling_status;
mod demand;
mod fleet;
mod grants;
pub mod hold;
mod model;
mod offer;
mod replica;
mod report;
mod residency;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use arrivals::Arrivals;
pub use selection::{ReplicaOutcome, RETRY_AFTER, NoReplica, SelectedReplica, PassiveHealth, Eligibility};
use provisioning::Provisioning;
pub use scaling_status::ScalingStatus;
use demand::DemandCounters;
pub use demand::DeploymentDemand;
use fleet::ReplicaSet;
pub use fleet::{ReplicaMember, MemberState};
use grants::Grants;
pub use grants::{GATEWAYS_MAX, GRANT_TTL, GRANT_PERIOD, Gateway};
use hold::HoldQueue;
use model::ServedModels;
pub use model::{RevisionMismatch, RequestedRevision};
pub use offer::ExchangeRequest;
use regions::{Catalogue, DeploymentName, RegionId, ReportedModel, RouteTable};
use replica::Replica;
pub use replica::{AHEAD, RAMP_TOKENS, SILENCE_MAX, STATUS_AGE_MAX};
pub use report::{DeploymentLoad, Report};
use residency::ResidencyState;

/// What a replica says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaStatus {
    /// What it runs, if it reports that.
    pub model: Option<ReportedModel>,
    /// The deployments that it answers to.
    pub names: BTreeSet<DeploymentName>,
    /// It takes work.
    pub ready: bool,
    /// It finishes what it has and takes nothing new.
    pub draining: bool,
    /// Tokens that wait or are being computed.
    pub pending_tokens: u64,
    /// Of those, lookups that wait, if it says.
    pub interactive_tokens: Option<u64>,
    /// Its measured speed; 0 until it is known.
    pub tokens_per_second: f64,
}

/// TrafficOrigin request it is that comes to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficOrigin {
    /// It comes by itself: no region is nearer to it.
    Local,
    /// It is another region's overflow, and pays with what was granted.
    Spillover,
}

/// A region's view of itself.
#[derive(Debug)]
pub struct Spoke {
    region: RegionId,
    boot_id: u64,
    draining: bool,
    replicas: ReplicaSet,
    arrivals: Arrivals,
    demand_counters: DemandCounters,
    scaling_status: BTreeMap<DeploymentName, ScalingStatus>,
    grants: Grants,
    provisioning: Provisioning,
    held: HoldQueue,
    policy: ResidencyState,
    models: ServedModels,
    capacity: capacity::ReplicaTargets,
}

impl Spoke {
    /// A region origin replicas are reached at `replicas` and have not been heard yet.
    pub fn new(region: RegionId, boot_id: u64, replicas: Vec<SocketAddr>) -> Spoke {
        let replicas = ReplicaSet::of(replicas);
        let (arrivals, demand_counters, grants) = (Arrivals::default(), DemandCounters::default(), Grants::default());
        let (provisioning, held, scaling_status) = (Provisioning::default(), HoldQueue::default(), BTreeMap::new());
        let (policy, models, capacity) =
            (ResidencyState::default(), ServedModels::default(), capacity::ReplicaTargets::default());
        Spoke {
            region,
            boot_id,
            draining: false,
            replicas,
            arrivals,
            demand_counters,
            scaling_status,
            grants,
            provisioning,
            held,
            policy,
            models,
            capacity,
        }
    }

    /// TrafficOrigin spoke it is.
    pub fn region(&self) -> &RegionId {
        &self.region
    }

    /// Drawn anew whenever the spoke starts.
    pub fn boot_id(&self) -> u64 {
        self.boot_id
    }

    /// A replica said how it is. One that is not there any longer is not listened to, here and below. Returns the deployments
    /// of which it has begun to have another model than they are served with.
    pub fn observe_replica(
        &mut self,
        index: usize,
        observed: ReplicaStatus,
        now: Instant,
    ) -> Vec<RevisionMismatch> {
        self.replicas.with(index, |replica| {
            replica.observe(observed, now);
            if let Some(speed) = replica.speed() {
                replica.names().for_each(|name| self.provisioning.record_speed(name, speed));
            }
        });
        self.choose_revisions();
        self.note_mismatches(index)
    }

    /// A replica did not say how it is. It is left alone until it is heard again.
    pub fn replica_failed(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.fail(now));
        self.choose_revisions();
    }

    /// A replica has not said in time how it is. Others are preferred meanwhile; after [`SILENCE_MAX`] it is left alone
    /// until it is heard again.
    pub fn replica_late(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.late(now));
        self.choose_revisions();
    }

    /// A request of about so many tokens came for a deployment.
    pub fn arrived(&mut self, deployment: &DeploymentName, tokens: u64, origin: TrafficOrigin, now: Instant) {
        self.demand_counters.record(deployment, tokens, origin);
        match origin {
            // What a name that nobody here answers to asks for is refused, and takes no room in memory.
            TrafficOrigin::Local if self.replicas.each().any(|(_, replica)| replica.serves(deployment)) => {
                self.arrivals.record(deployment, tokens, now);
            }
            TrafficOrigin::Local | TrafficOrigin::Spillover => {}
        }
    }

    /// How many replicas there are.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// The deployments that somebody outside may count on: none while the region drains.
    pub fn deployments_ready(&self, now: Instant) -> BTreeSet<DeploymentName> {
        if self.draining {
            return BTreeSet::new();
        }
        let names = self.replicas.each().flat_map(|(_, replica)| replica.names());
        names.filter(|name| self.serving(name, now).next().is_some()).cloned().collect()
    }

    /// From now on this table says what may be seen here, and which model revision each deployment is served with.
    pub fn apply_route_table(&mut self, table: &RouteTable, catalogue: &Catalogue) {
        self.policy.apply_route_table(table, &self.region, catalogue);
        self.models.apply_route_table(table);
        self.choose_revisions();
    }

    /// From now on the residency policies of the table count as too old when no hub has confirmed it for longer than this.
    pub fn limit_policy_age(&mut self, max: Duration, now: Instant) {
        self.policy.confirmed = Some((now, max));
    }

    /// A hub has confirmed the table, or given a newer one.
    pub fn confirm_policy(&mut self, now: Instant) {
        if let Some((confirmed, _)) = &mut self.policy.confirmed {
            *confirmed = now;
        }
    }

    /// The time since a hub confirmed the table, or since the spoke started, and the most that it may be; absent where there
    /// is no limit.
    pub fn policy_age(&self, now: Instant) -> Option<(Duration, Duration)> {
        self.policy.confirmed.map(|(confirmed, max)| (now.saturating_duration_since(confirmed), max))
    }

    /// A table was not taken; the residency policy of the one before stays.
    pub fn count_rejected_table(&mut self) {
        self.policy.refused += 1;
    }

    /// How many were not.
    pub fn tables_rejected(&self) -> u64 {
        self.policy.refused
    }

    /// Whether requests for `deployment` must not be seen here, whatever they say of it themselves.
    pub fn forbids(&self, deployment: &DeploymentName) -> bool {
        self.policy.forbids(deployment)
    }

    /// From now on the region says that it takes nothing new. It still serves what comes, from gateways that have not
    /// heard it yet.
    pub fn set_draining(&mut self) {
        self.draining = true;
    }

    /// The replicas that take work for `deployment` and have the model that it is served with, in the order of their
    /// numbers.
    fn serving<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a Replica)> {
        self.serving_revision(deployment, self.revision(deployment), now)
    }

    /// The replicas that take work for `deployment`, whatever they run.
    fn taking<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a Replica)> {
        let all_silent = self.all_silent(now);
        self.replicas
            .each()
            .filter(move |(_, replica)| replica.serves(deployment) && (all_silent || replica.is_fresh(now)))
    }

    /// When nobody was heard lately the likelier cause is this process (stopped, starved): the last state stands.
    fn all_silent(&self, now: Instant) -> bool {
        !self.replicas.each().any(|(_, replica)| replica.is_fresh(now))
    }
}

#[cfg(test)]
mod tests;
