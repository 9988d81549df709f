//! Decisions of one region: replica selection, admission of held requests, and the reports about itself.
//!
//! The region's ingress and its agent share one [`Spoke`]. The ingress passes in the status of the replicas (five times
//! a second) and the outcome of each request. The spoke decides from these inputs alone, so a region works indefinitely
//! without the hub.
//!
//! A replica is selected by *estimated finish time*: its backlog plus the new request, divided by its measured speed.
//! The backlog is extrapolated from the last status (see `replica`), so that a hundred requests that arrive between two
//! status polls do not all go to the replica that was idle at the first.
//!
//! A replica's status is not sufficient: a frozen replica reports nothing, and one on a throttled machine reports that
//! it is healthy. The caller therefore passes in the evidence of its own requests ([`PassiveHealth`]): whether to use
//! the replica now, and how much slower it is than the best one, a factor that multiplies its estimated finish time.
//!
//! The obvious alternative, least requests in flight, counts a request of one word like one of two thousand texts.
//!
//! Spare capacity is offered to gateways whose own region is full (see `grants`). If no replica is ready but one is
//! being provisioned (see `provisioning`), requests are held for it (see [`hold`]). If none can start (see `failures`), they
//! are rejected at once.
//!
//! One of the spokes of a region scales it (see `scaler_role`), and shares the replicas with the others (see `peers`).

mod arrivals;
mod capacity;
mod demand;
mod failures;
mod fleet;
mod grants;
pub mod hold;
mod model;
mod offer;
mod peer_demand;
mod peers;
mod provisioning;
mod replica;
mod report;
mod residency;
mod scaler_role;
mod scaling_status;
mod selection;
mod shared_replicas;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use arrivals::Arrivals;
use demand::DemandCounters;
pub use demand::DeploymentDemand;
use failures::FailedDeployments;
pub use failures::FailureChange;
use fleet::ReplicaFleet;
pub use fleet::{LOST_MAX, MemberState, ReplicaMember};
pub use grants::GRANT_TTL;
use grants::Grants;
use hold::HoldQueue;
use model::ServedModels;
pub use model::{MISMATCHED_DEPLOYMENTS_MAX, MismatchCounts, RequestedRevision, RevisionMismatch};
use peers::Peers;
pub use peers::{ForeignPeer, PeerChanges, PeerReceipt};
use provisioning::Provisioning;
use regions::{
    Catalogue, DeploymentName, HostPort, InstanceName, RegionId, ReportedModel, ResidencyPolicy, RouteTable,
};
use replica::ReplicaState;
pub use replica::{RAMP_TOKENS, SILENCE_MAX, STATUS_AGE_MAX};
use residency::ResidencyState;
pub use scaler_role::SCALER_SILENCE_MAX;
pub use scaling_status::ScalingStatus;
use scheduler_api::start_failure::FailedModel;
pub use selection::{Eligibility, NoReplica, PassiveHealth, RETRY_AFTER, ReplicaOutcome, SelectedReplica};
pub use shared_replicas::RemoteReplica;

/// Status that a replica reports.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaStatus {
    /// Model that it runs, if it reports one.
    pub model: Option<ReportedModel>,
    /// Model that it cannot load, and why, if it reports that.
    pub failure: Option<FailedModel>,
    /// Deployments that it serves.
    pub names: BTreeSet<DeploymentName>,
    /// Whether it accepts requests.
    pub ready: bool,
    /// Whether it finishes its requests and accepts no new ones.
    pub draining: bool,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Queued tokens of interactive requests, if it reports them.
    pub interactive_tokens: Option<u64>,
    /// Measured speed; 0 while unknown.
    pub tokens_per_second: f64,
}

/// Origin of a request that arrives at a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficOrigin {
    /// Local traffic: no region is nearer to it.
    Local,
    /// Spillover of another region, within the granted credits.
    Spillover,
}

/// State of one region, at one of its spokes.
#[derive(Debug)]
pub struct Spoke {
    region: RegionId,
    /// Name of this spoke among those of its region.
    instance: InstanceName,
    /// Spokes of this region in the newest route table. All of them serve the same replicas, and each reports and
    /// grants its share.
    instances: u32,
    boot_id: u64,
    draining: bool,
    /// Whether it has a queue of jobs.
    has_jobs: bool,
    replicas: ReplicaFleet,
    arrivals: Arrivals,
    demand_counters: DemandCounters,
    scaling_status: BTreeMap<DeploymentName, ScalingStatus>,
    grants: Grants,
    provisioning: Provisioning,
    failed: FailedDeployments,
    hold_queue: HoldQueue,
    policy: ResidencyState,
    models: ServedModels,
    capacity: capacity::ReplicaTargets,
    peers: Peers,
}

impl Spoke {
    /// Creates a region with replicas at these endpoints, without any status yet. Its name is derived from the boot
    /// id until [`Spoke::with_instance`].
    pub fn new(region: RegionId, boot_id: u64, replicas: Vec<HostPort>) -> Spoke {
        let replicas = ReplicaFleet::of(replicas);
        let (arrivals, demand_counters, grants) =
            (Arrivals::default(), DemandCounters::default(), Grants::default());
        let (provisioning, hold_queue, scaling_status) =
            (Provisioning::default(), HoldQueue::default(), BTreeMap::new());
        let (policy, models, capacity) =
            (ResidencyState::default(), ServedModels::default(), capacity::ReplicaTargets::default());
        let instance = format!("spoke-{boot_id:016x}").parse().expect("letters, digits and a hyphen");
        Spoke {
            region,
            instance,
            instances: 1,
            boot_id,
            draining: false,
            has_jobs: false,
            replicas,
            arrivals,
            demand_counters,
            scaling_status,
            grants,
            provisioning,
            failed: FailedDeployments::default(),
            hold_queue,
            policy,
            models,
            capacity,
            peers: Peers::default(),
        }
    }

    /// Returns the region of this spoke.
    pub fn region(&self) -> &RegionId {
        &self.region
    }

    /// Returns the name of this spoke among those of its region.
    pub fn instance(&self) -> &InstanceName {
        &self.instance
    }

    /// Sets the name of this spoke among those of its region.
    #[must_use]
    pub fn with_instance(self, instance: InstanceName) -> Spoke {
        Spoke { instance, ..self }
    }

    /// Returns the number of spokes of this region in the newest route table, with this one.
    pub fn instances(&self) -> u32 {
        self.instances
    }

    /// Returns the random number drawn at the start of the spoke.
    pub fn boot_id(&self) -> u64 {
        self.boot_id
    }

    /// Records the status of a replica. Here and below, a replica that has been removed is ignored. Returns the
    /// deployments for which the replica has started to run another model than the served one.
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
        self.update_chosen_revisions();
        self.update_listed_failures(index, now);
        self.record_mismatches(index)
    }

    /// Records the remaining time of the download of a replica's model, as it reports it with its status; `None` if it
    /// downloads none.
    pub fn observe_download(&mut self, index: usize, left: Option<Duration>, now: Instant) {
        self.replicas.with(index, |replica| replica.set_download(left, now));
    }

    /// Records a failed status poll. The replica is not used until the next successful one.
    pub fn replica_failed(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.failed(now));
        self.update_chosen_revisions();
        self.update_listed_failures(index, now);
    }

    /// Records a status poll that timed out. Other replicas are preferred from now on; after [`SILENCE_MAX`] the
    /// replica is not used until the next successful poll.
    pub fn replica_late(&mut self, index: usize, now: Instant) {
        self.replicas.with(index, |replica| replica.timed_out(now));
        self.update_chosen_revisions();
        self.update_listed_failures(index, now);
    }

    /// Records the arrival of a request of about this many tokens.
    pub fn arrived(&mut self, deployment: &DeploymentName, tokens: u64, origin: TrafficOrigin, now: Instant) {
        self.demand_counters.record(deployment, tokens, origin);
        match origin {
            // Requests for unknown names are rejected and must not use memory.
            TrafficOrigin::Local if self.replicas.each().any(|(_, replica)| replica.serves(deployment)) => {
                self.arrivals.record(deployment, tokens, now);
            }
            TrafficOrigin::Local | TrafficOrigin::Spillover => {}
        }
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Returns the deployments with a ready replica; none while the region drains.
    pub fn deployments_ready(&self, now: Instant) -> BTreeSet<DeploymentName> {
        if self.draining {
            return BTreeSet::new();
        }
        let names = self.replicas.each().flat_map(|(_, replica)| replica.names());
        names.filter(|name| self.serving(name, now).next().is_some()).cloned().collect()
    }

    /// Applies a route table: the residency policies, and the model revision that each deployment is served with.
    pub fn apply_route_table(&mut self, table: &RouteTable, catalogue: &Catalogue) {
        self.policy.apply_route_table(table, &self.region, catalogue);
        self.models.apply_route_table(table);
        let routed = table.regions.get(&self.region).into_iter().flat_map(|route| &route.instances);
        let others = routed.filter(|(name, _)| **name != self.instance);
        let others: BTreeMap<_, _> = others.map(|(name, at)| (name.clone(), at.clone())).collect();
        self.instances = u32::try_from(others.len()).unwrap_or(u32::MAX).saturating_add(1);
        self.peers.set_others(others);
        self.update_chosen_revisions();
    }

    /// Limits the age of the residency policies: the time since a hub last confirmed the table.
    pub fn limit_policy_age(&mut self, max: Duration, now: Instant) {
        self.policy.confirmed = Some((now, max));
    }

    /// Records that a hub has confirmed the table or sent a newer one.
    pub fn confirm_policy(&mut self, now: Instant) {
        if let Some((confirmed, _)) = &mut self.policy.confirmed {
            *confirmed = now;
        }
    }

    /// Returns the time since a hub confirmed the table, or since the start of the spoke, and its limit; `None` without
    /// a limit.
    pub fn policy_age(&self, now: Instant) -> Option<(Duration, Duration)> {
        self.policy.confirmed.map(|(confirmed, max)| (now.saturating_duration_since(confirmed), max))
    }

    /// Counts a rejected table; the residency policies of the current one stay.
    pub fn count_rejected_table(&mut self) {
        self.policy.rejected += 1;
    }

    /// Returns the number of rejected tables.
    pub fn tables_rejected(&self) -> u64 {
        self.policy.rejected
    }

    /// Returns whether the current table forbids requests for `deployment` in this region, whatever their own residency
    /// header says.
    pub fn forbids(&self, deployment: &DeploymentName) -> bool {
        self.policy.forbids(deployment)
    }

    /// Returns the residency policy of `deployment` in the current table, if it has a condition.
    pub fn residency_policy(&self, deployment: &DeploymentName) -> Option<&ResidencyPolicy> {
        self.policy.policy(deployment)
    }

    /// Sets that it has a queue of jobs, which its reports say.
    pub fn set_has_jobs(&mut self) {
        self.has_jobs = true;
    }

    /// Returns whether this spoke drains.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Starts to drain this spoke: it reports that it accepts nothing new, but still serves requests of gateways that
    /// do not know yet.
    pub fn set_draining(&mut self) {
        self.draining = true;
    }

    /// Returns the ready replicas that serve `deployment` with its served model revision, ordered by number.
    fn serving<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a ReplicaState)> {
        self.serving_revision(deployment, self.revision(deployment), now)
    }

    /// Returns the numbers of the [serving](Spoke::serving) replicas of all deployments. A deployment without one is
    /// omitted. The cost is that of the replicas, whatever the number of deployments without one.
    fn serving_by_name(&self, now: Instant) -> BTreeMap<&DeploymentName, Vec<usize>> {
        let all_silent = self.all_silent(now);
        let mut serving: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (index, replica) in self.replicas.each() {
            if replica.accepts_requests() && (all_silent || replica.is_fresh(now)) {
                for name in replica.names().filter(|name| self.matches(replica, name)) {
                    serving.entry(name).or_default().push(index);
                }
            }
        }
        serving
    }

    /// Returns the ready replicas that serve `deployment`, with any model revision.
    fn accepting<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a ReplicaState)> {
        let all_silent = self.all_silent(now);
        self.replicas
            .each()
            .filter(move |(_, replica)| replica.serves(deployment) && (all_silent || replica.is_fresh(now)))
    }

    /// Returns whether all replicas are silent. The likely cause is this process (suspended or starved), so the last
    /// state stays valid.
    fn all_silent(&self, now: Instant) -> bool {
        !self.replicas.each().any(|(_, replica)| replica.is_fresh(now))
    }
}

#[cfg(test)]
mod tests;
