//! Deployments and replicas of one region: inputs of the scaling decisions, and their application.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use regions::{Catalogue, Deployment, DeploymentName, HostPort, RegionId};
use scheduler_api::peer::SharedDeployment;
use scheduler_core::scale::start_failures::ReplicaStartState;
use scheduler_core::scale::step::{ORDERED_RANK, OwnReplica, Step, step};
use scheduler_core::spoke::{DeploymentDemand, MemberState, ReplicaMember, ScalingStatus, Spoke};
use tokio::sync::{Notify, watch};

use super::ScalingSignals;
use super::events::{DesiredChanged, DrainTimedOut, ReplicaDraining, ReplicaReady};
use super::scaler::{DeploymentScaler, ReplicaSlot};
use super::sharing::{Sharing, ends_with_spoke};
use crate::actuator::{
    ActuatorStatus, DeploymentTarget, DeploymentTargets, ReadyEndpoint, ReplicaId, RunningReplica,
};
use crate::agent::table::FollowedTable;
use crate::config::SpokeConfig;

/// Drain timeout of a replica: the default timeout of a request.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Scaler of one region.
pub(super) struct RegionScaler {
    pub(super) region: RegionId,
    catalogue: Arc<Catalogue>,
    pub(super) spoke: Arc<Mutex<Spoke>>,
    /// Notified when replicas were added or removed.
    pub(super) changed: Arc<Notify>,
    /// Indexes of the replicas in the region's file.
    static_replicas: Vec<usize>,
    /// Maximum number of replicas of the region, including those of its file; `None` if there is no limit besides that of each
    /// deployment.
    replicas_max: Option<u32>,
    pub(super) hub: FollowedTable,
    pub(super) scalers: BTreeMap<DeploymentName, DeploymentScaler>,
    pub(super) own: BTreeMap<ReplicaId, LocalReplica>,
    targets: watch::Sender<DeploymentTargets>,
    /// Whether this spoke scales the region, as of the last iteration.
    pub(super) is_scaler: bool,
    /// Whether the actuator stops its replicas with the spoke.
    pub(super) ends_with_spoke: bool,
    pub(super) sharing: Sharing,
}

/// Replica that the actuator has started.
pub(super) struct LocalReplica {
    pub(super) running: RunningReplica,
    /// Index of the replica in the spoke, once it is ready.
    pub(super) index: Option<usize>,
    /// Start of its drain.
    pub(super) draining_since: Option<Instant>,
    /// Time since which it is lost.
    lost_since: Option<Instant>,
    /// Time since which it is not yet ready.
    pending_since: Option<Instant>,
    /// Its drain has ended and it may be terminated.
    pub(super) may_stop: bool,
    /// It had reported its status at the last iteration.
    has_reported: bool,
    /// It has served requests with its deployment's served model.
    has_served: bool,
}

impl RegionScaler {
    pub(super) fn new(
        config: &SpokeConfig,
        spoke: Arc<Mutex<Spoke>>,
        signals: &ScalingSignals,
        static_replicas: Vec<usize>,
        started_max: Option<u32>,
        targets: watch::Sender<DeploymentTargets>,
    ) -> RegionScaler {
        let fixed = u32::try_from(static_replicas.len()).unwrap_or(u32::MAX);
        RegionScaler {
            replicas_max: started_max.map(|started| started.saturating_add(fixed)),
            region: config.region.clone(),
            catalogue: config.catalogue.clone(),
            spoke,
            changed: signals.changed.clone(),
            static_replicas,
            hub: FollowedTable::default(),
            scalers: BTreeMap::new(),
            own: BTreeMap::new(),
            targets,
            is_scaler: false,
            ends_with_spoke: ends_with_spoke(config),
            sharing: Sharing::new(config, signals),
        }
    }

    pub(super) fn with_spoke<T>(&self, operation: impl FnOnce(&mut Spoke) -> T) -> T {
        operation(&mut self.spoke.lock())
    }

    /// Returns whether a replica in the region's file has not reported its status yet.
    pub(super) fn awaits_first_status(&self, now: Instant) -> bool {
        let members = self.with_spoke(|spoke| spoke.members(self.static_replicas.iter().copied(), now));
        members.values().any(|member| member.state == MemberState::Pending)
    }

    /// Applies the latest route table.
    pub(super) fn follow(&mut self, followed: &FollowedTable) {
        let newer = |table: &FollowedTable| table.table.as_ref().map(|table| table.generation);
        let same = newer(followed) == newer(&self.hub);
        self.hub = followed.clone();
        if same {
            return;
        }
        let now = Instant::now();
        let Some(index) = self.catalogue.index_of(&self.region) else { return };
        let table = self.hub.table.clone();
        let all = table.iter().flat_map(|table| table.deployments.values());
        let is_local = |deployment: &&Deployment| {
            let allowed = deployment.residency.permitted(&self.catalogue);
            allowed.intersect(deployment.placement(&self.catalogue)).contains(index)
        };
        self.scalers.values_mut().for_each(|scaler| scaler.retired = true);
        for deployment in all.filter(is_local) {
            // A deployment is not planned for with more replicas than the region can run.
            let scaling = &deployment.scaling;
            let scaling = self.replicas_max.map_or_else(|| scaling.clone(), |max| scaling.limited_to(max));
            let shared = Arc::new(Deployment { scaling, ..deployment.clone() });
            let scaler = self.scalers.entry(deployment.name.clone());
            let scaler = scaler.or_insert_with(|| DeploymentScaler::new(shared.clone(), now));
            scaler.retired = false;
            if scaler.deployment != shared {
                scaler.scaler.set_config(shared.scaling.clone());
                scaler.set_deployment(shared);
            }
            let served = table.as_ref().and_then(|table| table.revision(&deployment.name));
            let next =
                served.and_then(|served| served.next.as_ref()).map(|next| deployment.with_model(&next.spec));
            // Replicas of another revision of the same spec replace the present ones at a restart of those.
            let next = next.filter(|next| next.model_spec() != deployment.model_spec());
            scaler.set_next(next.map(Arc::new));
        }
        let counted = self.scalers.iter().filter(|(_, scaler)| !scaler.retired);
        let max_replicas: BTreeMap<_, _> =
            counted.map(|(name, scaler)| (name.clone(), scaler.deployment.scaling.max)).collect();
        let counted: BTreeSet<_> = max_replicas.keys().cloned().collect();
        self.with_spoke(|spoke| {
            spoke.track_demand(&counted);
            spoke.set_replicas_max(max_replicas);
        });
    }

    /// Applies the actuator's observed state.
    pub(super) fn observe(&mut self, status: &ActuatorStatus, now: Instant) {
        let gone: Vec<_> = self.own.extract_if(.., |id, _| !status.replicas.contains_key(id)).collect();
        let mut changed = !gone.is_empty();
        for (_, replica) in gone {
            if let Some(index) = replica.index {
                self.with_spoke(|spoke| spoke.remove_started_replica(index));
            }
            // A replica that crashed while draining needs no replacement.
            if replica.draining_since.is_some() && !replica.may_stop {
                self.decrement_target(&replica.running.deployment);
            }
        }
        for (id, running) in &status.replicas {
            let new = || LocalReplica {
                running: running.clone(),
                index: None,
                draining_since: None,
                lost_since: None,
                pending_since: None,
                may_stop: false,
                has_reported: false,
                has_served: false,
            };
            let mut replica = self.own.remove(id).unwrap_or_else(new);
            if let Some(ReadyEndpoint { endpoint, took }) = running.ready
                && replica.index.is_none()
            {
                ReplicaReady { id, deployment: &running.deployment.name, took }.emit();
                let (name, ends_with_spoke) = (running.deployment.name.clone(), self.ends_with_spoke);
                let add =
                    |spoke: &mut Spoke| spoke.add_started_replica(endpoint.into(), name, ends_with_spoke);
                replica.index = Some(self.with_spoke(add));
                if let (Some(scaler), Some(took)) = (self.scalers.get_mut(&running.deployment.name), took) {
                    scaler.starts.record(took);
                }
                changed = true;
            }
            replica.running = running.clone();
            self.own.insert(id.clone(), replica);
            // Started by an earlier spoke process, for a deployment that no longer runs here.
            if self.hub.table.is_some() && !self.scalers.contains_key(&running.deployment.name) {
                let retired = DeploymentScaler {
                    retired: true,
                    ..DeploymentScaler::new(running.deployment.clone(), now)
                };
                self.scalers.insert(running.deployment.name.clone(), retired);
            }
        }
        for (name, crashes) in &status.crashes {
            let Some(scaler) = self.scalers.get_mut(name) else { continue };
            if crashes.count > scaler.crashes.count {
                scaler.crashed_at = Some(now);
            }
            scaler.crashes = *crashes;
        }
        for scaler in self.scalers.values_mut() {
            scaler.record_ended_starts(&status.ended_starts);
            scaler.record_waiting(&status.waiting);
        }
        // Replicas that an earlier spoke process has ordered count as ordered.
        for (name, scaler) in &mut self.scalers {
            let existing = self.own.values().filter(|it| it.running.deployment.name == *name && !it.may_stop);
            let (next, existing): (Vec<_>, Vec<_>) =
                existing.partition(|it| scaler.is_next(&it.running.deployment));
            scaler.target = scaler.target.max(existing.len() as u32);
            scaler.next_target = scaler.next_target.max(next.len() as u32);
        }
        if changed {
            self.changed.notify_one();
        }
    }

    /// Decides and applies the replica counts of all deployments.
    pub(super) fn scale(&mut self, now: Instant) {
        let indexes: Vec<_> = self.own.values().filter_map(|replica| replica.index).collect();
        let names = self.scalers.keys();
        let (demand, members, floors, remote) = self.with_spoke(|spoke| {
            let demand = spoke.region_demand(now);
            let floors: BTreeMap<_, _> = names.map(|name| (name.clone(), spoke.floor(name))).collect();
            (demand, spoke.members(indexes, now), floors, spoke.remote_replicas(now))
        });
        let mut own = self.by_deployment(&members, now);
        // Deployments whose replicas of other spokes are no longer needed.
        let mut replaced = BTreeSet::new();
        for (name, scaler) in &mut self.scalers {
            let demand = demand.get(name).copied().unwrap_or_default();
            let LocalReplicas { served: mut own, next: mut next_own } = own.remove(name).unwrap_or_default();
            let serving = own.iter().filter(|it| it.state == MemberState::Serving).count() as u32;
            observe_starts(scaler, demand.ready > 0, &own, &next_own, &self.own, now);
            own.extend(missing(scaler.target, own.len(), now));
            next_own.extend(missing(scaler.next_target, next_own.len(), now));
            let provisioning = scaler.provisioning(&own, now);
            // Replicas of other spokes serve until this spoke has as many itself, like those of an old revision.
            let remote = remote.iter().filter(|it| it.deployment == *name && it.is_serving).count() as u32;
            let rolls_out = remote > 0 || own.iter().any(|it| it.is_stale);
            let desired =
                scaler.decide(&self.hub, demand, provisioning.clone(), rolls_out, floors[name], now);
            let before = scaler.desired.replace(desired);
            let before = before.map_or(0, |before| before.replicas);
            if before != desired.replicas {
                let (ready, provisioning) = (demand.ready, provisioning.len());
                DesiredChanged { deployment: name, before, desired, ready, provisioning }.emit();
            }
            let next_desired = scaler.next_desired(desired);
            // The other ready replicas are those of the region's file.
            let others = demand.ready.saturating_sub(serving).saturating_sub(remote);
            if serving.saturating_add(others) >= desired.replicas {
                replaced.insert(name.clone());
            }
            let steps = [
                (step(&own, others, desired.replicas, now), &mut scaler.target),
                (step(&next_own, 0, next_desired, now), &mut scaler.next_target),
            ];
            for (Step { undrain, drain: drained, start }, target) in steps {
                *target += start;
                for id in undrain {
                    if let ReplicaSlot::Existing(id) = id {
                        cancel_drain(&mut self.own, &self.spoke, &id);
                    }
                }
                for id in drained {
                    match id {
                        ReplicaSlot::Ordered(_) => *target -= 1,
                        ReplicaSlot::Existing(id) => drain(&mut self.own, &self.spoke, &id, now),
                    }
                }
            }
        }
        self.drain_remote(&remote, &replaced);
        self.finish_drains(now);
        self.report(&demand, now);
        self.share(now);
    }

    /// Groups the actuator's replicas by deployment, without those that are being terminated. A ready replica whose
    /// model differs from the served one gets no requests: it counts as not ready, or as lost if it has served before,
    /// and no other replica is terminated because of it.
    fn by_deployment(
        &mut self,
        members: &BTreeMap<usize, ReplicaMember>,
        now: Instant,
    ) -> BTreeMap<DeploymentName, LocalReplicas> {
        let mut each: BTreeMap<_, LocalReplicas> = BTreeMap::new();
        let spoke = self.spoke.lock();
        for (id, replica) in self.own.iter_mut().filter(|(_, replica)| !replica.may_stop) {
            let member = replica.index.and_then(|index| members.get(&index));
            let standing = match (replica.draining_since, member) {
                (Some(_), _) => MemberState::Draining,
                (None, Some(member)) => member.state,
                (None, None) => MemberState::Pending,
            };
            let name = &replica.running.deployment.name;
            let scaler = self.scalers.get(name);
            let is_next = scaler.is_some_and(|it| it.is_next(&replica.running.deployment));
            let stale = !is_next && scaler.is_some_and(|it| it.is_stale(&replica.running.deployment));
            let matches = replica.index.is_some_and(|it| spoke.replica_matches(it, name));
            replica.has_served |= matches && standing == MemberState::Serving;
            let standing = match standing {
                // The revision of its spec has changed; a restarted replica has the new one.
                MemberState::Serving if !matches && !is_next && !stale && replica.has_served => {
                    MemberState::Lost
                }
                MemberState::Serving if !matches && !is_next && !stale => MemberState::Pending,
                standing => standing,
            };
            replica.has_reported = standing != MemberState::Pending;
            replica.lost_since = match standing {
                MemberState::Lost => Some(replica.lost_since.unwrap_or(now)),
                // A replica that is drained because it is lost is not kept for being warm.
                MemberState::Draining => replica.lost_since,
                MemberState::Pending | MemberState::Serving => None,
            };
            replica.pending_since =
                (standing == MemberState::Pending).then(|| replica.pending_since.unwrap_or(now));
            let all = each.entry(name.clone()).or_default();
            let all = if is_next { &mut all.next } else { &mut all.served };
            all.push(OwnReplica {
                id: ReplicaSlot::Existing(id.clone()),
                removal_rank: replica.running.rank,
                is_stale: stale,
                ordered_at: replica.running.since,
                state: standing,
                lost_since: replica.lost_since,
                pending_since: replica.pending_since,
                in_flight: member.map_or(0, |member| member.in_flight),
            });
        }
        each
    }

    /// Returns whether replicas are starting or draining.
    pub(super) fn is_unsettled(&self) -> bool {
        let draining = |replica: &LocalReplica| replica.draining_since.is_some() && !replica.may_stop;
        let unsettled = |replica: &LocalReplica| draining(replica) || replica.index.is_none();
        self.own.values().any(unsettled) || self.sharing.drains_remote
    }

    /// Terminates replicas whose drain has ended, and shares the replicas with the other spokes.
    pub(super) fn settle(&mut self, now: Instant) {
        self.finish_drains(now);
        self.share(now);
    }

    /// Terminates replicas whose drain has ended, and publishes the targets.
    pub(super) fn finish_drains(&mut self, now: Instant) {
        let draining = self.own.values().filter(|it| it.draining_since.is_some() && !it.may_stop);
        let indexes: Vec<_> = draining.clone().filter_map(|it| it.index).collect();
        let endpoints: Vec<_> =
            draining.filter_map(|it| Some(HostPort::from(it.running.ready?.endpoint))).collect();
        let (members, used_elsewhere) = self.with_spoke(|spoke| {
            let used =
                endpoints.into_iter().filter(|endpoint| !self.is_unused_elsewhere(spoke, endpoint, now));
            (spoke.members(indexes, now), used.collect::<BTreeSet<_>>())
        });
        let mut finished = Vec::new();
        for (id, replica) in &mut self.own {
            let Some(since) = replica.draining_since.filter(|_| !replica.may_stop) else { continue };
            let in_flight = replica.index.and_then(|index| members.get(&index)).map_or(0, |it| it.in_flight);
            let timed_out = now.saturating_duration_since(since) >= DRAIN_TIMEOUT;
            let endpoint = replica.running.ready.map(|ready| HostPort::from(ready.endpoint));
            let is_used =
                in_flight > 0 || endpoint.is_some_and(|endpoint| used_elsewhere.contains(&endpoint));
            if is_used && !timed_out {
                continue;
            }
            if in_flight > 0 {
                DrainTimedOut { id, in_flight, after: DRAIN_TIMEOUT }.emit();
            }
            replica.may_stop = true;
            finished.push(replica.running.deployment.clone());
        }
        finished.iter().for_each(|started| self.decrement_target(started));
        self.publish_targets();
    }

    /// Publishes the targets that have changed.
    fn publish_targets(&self) {
        let mut stops: BTreeMap<&DeploymentName, BTreeSet<_>> = BTreeMap::new();
        for (id, replica) in self.own.iter().filter(|(_, replica)| replica.may_stop) {
            stops.entry(&replica.running.deployment.name).or_default().insert(id.clone());
        }
        let is_scaled_here = self.is_scaler;
        self.targets.send_if_modified(|targets| {
            let before = targets.len();
            targets.retain(|name, _| self.scalers.contains_key(name));
            let mut has_changed = targets.len() != before;
            for (name, scaler) in &self.scalers {
                let stop = stops.remove(name).unwrap_or_default();
                let is_published = |target: &DeploymentTarget| {
                    let next = target.next.as_ref().map(|(next, count)| (next, *count));
                    target.deployment == scaler.deployment
                        && target.replicas == scaler.target
                        && next == scaler.next.as_ref().map(|next| (next, scaler.next_target))
                        && target.stop == stop
                        && target.is_scaled_here == is_scaled_here
                };
                if targets.get(name).is_some_and(is_published) {
                    continue;
                }
                let (deployment, replicas) = (scaler.deployment.clone(), scaler.target);
                let next = scaler.next.clone().map(|next| (next, scaler.next_target));
                let target = DeploymentTarget { deployment, replicas, next, stop, is_scaled_here };
                targets.insert(name.clone(), target);
                has_changed = true;
            }
            has_changed
        });
    }

    fn decrement_target(&mut self, started: &Deployment) {
        if let Some(scaler) = self.scalers.get_mut(&started.name) {
            scaler.decrement_target(started);
        }
    }

    /// Reports decisions and provisioning replicas to the spoke, which uses them for its ingress.
    fn report(&mut self, demand: &BTreeMap<DeploymentName, DeploymentDemand>, now: Instant) {
        let own = &self.own;
        let used = |name: &DeploymentName| own.values().any(|it| it.running.deployment.name == *name);
        let retired: Vec<_> = self.scalers.extract_if(.., |name, it| it.retired && !used(name)).collect();
        let mut shared = BTreeMap::new();
        let mut decided = BTreeMap::new();
        let mut start_times = BTreeMap::new();
        let mut failures = BTreeMap::new();
        for (name, scaler) in &self.scalers {
            let Some(desired) = scaler.desired else { continue };
            let is_current = |it: &&LocalReplica| {
                let started = &it.running.deployment;
                started.name == *name && !it.may_stop && !scaler.is_next(started)
            };
            let existing: Vec<_> = own.values().filter(is_current).collect();
            let missing = scaler.target.saturating_sub(existing.len() as u32);
            let starting = existing.iter().filter(|it| it.draining_since.is_none() && !it.has_reported);
            let mut left: Vec<_> = starting
                .map(|it| {
                    let lasted = now.saturating_duration_since(it.running.since);
                    let ends_at = it.running.download_ends_at;
                    let download_left = ends_at.map(|at| at.saturating_duration_since(now));
                    scaler.starts.remaining_with_download(lasted, download_left)
                })
                .collect();
            left.extend((0..missing).map(|_| scaler.start_from(now)));
            let start = (!scaler.retired).then(|| scaler.start_from(now));
            let start_ms = scaler.starts.p90().as_millis();
            let one = ScalingStatus {
                decision: desired,
                ready: demand.get(name).map_or(0, |demand| demand.ready),
                provisioning: left.len() as u32,
                draining: existing.iter().filter(|it| it.draining_since.is_some()).count() as u32,
                crashes: scaler.crashes.count,
                start_ms: u64::try_from(start_ms).unwrap_or(u64::MAX),
            };
            decided.insert(name.clone(), one);
            let deployment = SharedDeployment {
                desired: desired.replicas,
                max: scaler.deployment.scaling.max,
                provisioning: left.clone(),
                start_time: start,
                failures: scaler.failures(),
            };
            failures.insert(name.clone(), deployment.failures.clone());
            shared.insert(name.clone(), deployment);
            start_times.insert(name, (left, start));
        }
        let changed = self.with_spoke(|spoke| {
            for (name, (left, start)) in start_times {
                spoke.set_provisioning(name, left, now);
                spoke.set_start_time(name, start);
            }
            for (name, _) in retired {
                spoke.set_provisioning(&name, Vec::new(), now);
                spoke.set_start_time(&name, None);
            }
            let failed = spoke.start_failures(now);
            spoke.set_start_failures(failures);
            let changed = *spoke.scaling_status() != decided || spoke.start_failures(now) != failed;
            spoke.set_scaling_status(decided);
            changed
        });
        self.sharing.deployments = shared;
        if changed {
            self.changed.notify_one();
        }
    }
}

/// Replicas of one deployment that the actuator has started.
#[derive(Default)]
struct LocalReplicas {
    /// With the served model, or an earlier one.
    served: Vec<OwnReplica<ReplicaSlot>>,
    /// With the next model.
    next: Vec<OwnReplica<ReplicaSlot>>,
}

/// Evaluates the starts of a deployment's served and next model. `is_ready`: the region has a ready replica of the deployment.
fn observe_starts(
    scaler: &mut DeploymentScaler,
    is_ready: bool,
    served: &[OwnReplica<ReplicaSlot>],
    next: &[OwnReplica<ReplicaSlot>],
    own: &BTreeMap<ReplicaId, LocalReplica>,
    now: Instant,
) {
    let state = |replica: &OwnReplica<ReplicaSlot>| {
        let ReplicaSlot::Existing(id) = &replica.id else { return None };
        let running = &own.get(id)?.running;
        match (replica.state, &running.failure) {
            (MemberState::Serving, _) => Some(ReplicaStartState::Ready),
            (MemberState::Draining, _) => None,
            (MemberState::Pending | MemberState::Lost, _) if running.is_outdated => None,
            (MemberState::Pending | MemberState::Lost, Some(failure)) => {
                Some(ReplicaStartState::Failing(failure))
            }
            (MemberState::Pending | MemberState::Lost, None) if running.waits_for_pull => {
                Some(ReplicaStartState::Waiting { since: running.since })
            }
            (MemberState::Pending | MemberState::Lost, None) => {
                Some(ReplicaStartState::Starting { since: running.since })
            }
        }
    };
    // Replicas of an earlier model say nothing about the start of this one.
    let served = served.iter().filter(|replica| !replica.is_stale).filter_map(state);
    let served = served.chain(is_ready.then_some(ReplicaStartState::Ready));
    scaler.served_starts.failures.observe(served, now);
    scaler.next_starts.failures.observe(next.iter().filter_map(state), now);
}

/// Returns entries for replicas that are missing to the target.
fn missing(target: u32, existing: usize, now: Instant) -> impl Iterator<Item = OwnReplica<ReplicaSlot>> {
    (0..target.saturating_sub(existing as u32)).map(move |index| OwnReplica {
        id: ReplicaSlot::Ordered(index),
        removal_rank: ORDERED_RANK,
        is_stale: false,
        ordered_at: now,
        state: MemberState::Pending,
        lost_since: None,
        pending_since: None,
        in_flight: 0,
    })
}

pub(super) fn cancel_drain(
    own: &mut BTreeMap<ReplicaId, LocalReplica>,
    spoke: &Mutex<Spoke>,
    id: &ReplicaId,
) {
    let Some(replica) = own.get_mut(id) else { return };
    replica.draining_since = None;
    if let Some(index) = replica.index {
        spoke.lock().undrain_replica(index);
    }
}

pub(super) fn drain(
    own: &mut BTreeMap<ReplicaId, LocalReplica>,
    spoke: &Mutex<Spoke>,
    id: &ReplicaId,
    now: Instant,
) {
    let Some(replica) = own.get_mut(id) else { return };
    replica.draining_since.get_or_insert(now);
    let mut in_flight = 0;
    if let Some(index) = replica.index {
        let mut spoke = spoke.lock();
        spoke.drain_replica(index);
        in_flight = spoke.members([index], now).get(&index).map_or(0, |member| member.in_flight);
    }
    ReplicaDraining { id, deployment: &replica.running.deployment.name, in_flight }.emit();
}
