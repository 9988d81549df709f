//! Deployments and replicas of one region: inputs of the scaling decisions, and their application.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use regions::{Catalogue, Deployment, DeploymentName, RegionId};
use scheduler_core::scale::step::{Own, Step, step};
use scheduler_core::spoke::hold::Held;
use scheduler_core::spoke::{Decided, Demand, Member, Spoke, Standing};
use tokio::sync::{Notify, watch};

use super::deployed::{DeploymentScaler, ReplicaSlot};
use super::events::{DesiredChanged, DrainTimedOut, ReplicaDraining, ReplicaReady};
use crate::actuator::{ActuatorStatus, DeploymentTarget, ReadyEndpoint, ReplicaId, RunningReplica, Targets};
use crate::agent::table::FollowedTable;
use crate::config::SpokeConfig;

/// Drain timeout of a replica: the default timeout of a request.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Scaler of one region.
pub(super) struct RegionScaler {
    here: RegionId,
    catalogue: Arc<Catalogue>,
    spoke: Arc<Mutex<Spoke>>,
    /// Notified when replicas were added or removed.
    changed: Arc<Notify>,
    /// Indexes of the replicas in the region's file.
    others: Vec<usize>,
    hub: FollowedTable,
    deployed: BTreeMap<DeploymentName, DeploymentScaler>,
    own: BTreeMap<ReplicaId, OwnReplica>,
    targets: watch::Sender<Targets>,
}

/// Replica that the actuator has started.
struct OwnReplica {
    found: RunningReplica,
    /// Index of the replica in the spoke, once it is ready.
    number: Option<usize>,
    /// Start of its drain.
    leaving: Option<Instant>,
    /// Time since which it is lost.
    lost: Option<Instant>,
    /// Its drain has ended and it may be terminated.
    stop: bool,
    /// It had reported its status at the last iteration.
    heard: bool,
    /// It has served requests with its deployment's served model.
    served: bool,
}

impl RegionScaler {
    pub(super) fn new(
        config: &SpokeConfig,
        spoke: Arc<Mutex<Spoke>>,
        changed: Arc<Notify>,
        others: Vec<usize>,
        targets: watch::Sender<Targets>,
    ) -> RegionScaler {
        let (here, catalogue) = (config.region.clone(), config.catalogue.clone());
        let hub = FollowedTable::default();
        let (deployed, own) = (BTreeMap::new(), BTreeMap::new());
        RegionScaler { here, catalogue, spoke, changed, others, hub, deployed, own, targets }
    }

    fn with_spoke<T>(&self, ask: impl FnOnce(&mut Spoke) -> T) -> T {
        ask(&mut self.spoke.lock())
    }

    /// Returns whether a replica in the region's file has not reported its status yet.
    pub(super) fn others_are_unheard(&self, now: Instant) -> bool {
        let members = self.with_spoke(|spoke| spoke.members(self.others.iter().copied(), now));
        members.values().any(|member| member.standing == Standing::Unheard)
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
        let Some(index) = self.catalogue.index_of(&self.here) else { return };
        let table = self.hub.table.clone();
        let all = table.iter().flat_map(|table| table.deployments.values());
        let here = |deployment: &&Deployment| {
            let allowed = deployment.residency.permitted(&self.catalogue);
            allowed.intersect(deployment.placed(&self.catalogue)).contains(index)
        };
        self.deployed.values_mut().for_each(|deployed| deployed.retired = true);
        for deployment in all.filter(here) {
            let shared = Arc::new(deployment.clone());
            let deployed = self.deployed.entry(deployment.name.clone());
            let deployed = deployed.or_insert_with(|| DeploymentScaler::new(shared.clone(), now));
            deployed.retired = false;
            if deployed.deployment != shared {
                deployed.scaler.set_knobs(shared.scaling.clone());
                deployed.deployment = shared;
            }
            let served = table.as_ref().and_then(|table| table.revision(&deployment.name));
            let next =
                served.and_then(|served| served.next.as_ref()).map(|next| deployment.with_model(&next.spec));
            // Replicas of another revision of the same spec replace the present ones at a restart of those.
            let next = next.filter(|next| next.model_spec() != deployment.model_spec());
            deployed.set_next(next.map(Arc::new));
        }
        let counted = self.deployed.iter().filter(|(_, deployed)| !deployed.retired);
        let most: BTreeMap<_, _> =
            counted.map(|(name, deployed)| (name.clone(), deployed.deployment.scaling.max)).collect();
        let counted: BTreeSet<_> = most.keys().cloned().collect();
        self.with_spoke(|spoke| {
            spoke.count_for(&counted);
            spoke.set_replicas_max(most);
        });
    }

    /// Applies the actuator's observed state.
    pub(super) fn observe(&mut self, running: &ActuatorStatus, now: Instant) {
        let gone: Vec<_> = self.own.extract_if(.., |id, _| !running.replicas.contains_key(id)).collect();
        let mut changed = !gone.is_empty();
        for (_, replica) in gone {
            if let Some(number) = replica.number {
                self.with_spoke(|spoke| spoke.remove_replica(number));
            }
            // A replica that crashed while draining needs no replacement.
            if replica.leaving.is_some() && !replica.stop {
                self.one_less(&replica.found.deployment);
            }
        }
        for (id, found) in &running.replicas {
            let new = || OwnReplica {
                found: found.clone(),
                number: None,
                leaving: None,
                lost: None,
                stop: false,
                heard: false,
                served: false,
            };
            let mut replica = self.own.remove(id).unwrap_or_else(new);
            if let Some(ReadyEndpoint { endpoint, took }) = found.ready
                && replica.number.is_none()
            {
                ReplicaReady { id, deployment: &found.deployment.name, took }.emit();
                replica.number = Some(self.with_spoke(|spoke| spoke.add_replica(endpoint)));
                if let (Some(deployed), Some(took)) = (self.deployed.get_mut(&found.deployment.name), took) {
                    deployed.starts.took(took);
                }
                changed = true;
            }
            replica.found = found.clone();
            self.own.insert(id.clone(), replica);
            // Started by an earlier spoke process, for a deployment that no longer runs here.
            if self.hub.table.is_some() && !self.deployed.contains_key(&found.deployment.name) {
                let retired = DeploymentScaler {
                    retired: true,
                    ..DeploymentScaler::new(found.deployment.clone(), now)
                };
                self.deployed.insert(found.deployment.name.clone(), retired);
            }
        }
        for (name, deaths) in &running.deaths {
            let Some(deployed) = self.deployed.get_mut(name) else { continue };
            if deaths.count > deployed.deaths.count {
                deployed.died = Some(now);
            }
            deployed.deaths = *deaths;
        }
        // Replicas that an earlier spoke process has ordered count as ordered.
        for (name, deployed) in &mut self.deployed {
            let there = self.own.values().filter(|it| it.found.deployment.name == *name && !it.stop);
            let (next, there): (Vec<_>, Vec<_>) =
                there.partition(|it| deployed.is_next(&it.found.deployment));
            deployed.target = deployed.target.max(there.len() as u32);
            deployed.next_target = deployed.next_target.max(next.len() as u32);
        }
        if changed {
            self.changed.notify_one();
        }
    }

    /// Decides and applies the replica counts of all deployments.
    pub(super) fn scale(&mut self, now: Instant) {
        let numbers: Vec<_> = self.own.values().filter_map(|replica| replica.number).collect();
        let names = self.deployed.keys();
        let (demand, members, floors) = self.with_spoke(|spoke| {
            let mut demand = spoke.demand(now);
            for (name, demand) in &mut demand {
                let Held { requests, tokens } = spoke.held(name);
                demand.pending = demand.pending.saturating_add(tokens);
                demand.in_flight =
                    demand.in_flight.saturating_add(u32::try_from(requests).unwrap_or(u32::MAX));
            }
            let floors: BTreeMap<_, _> = names.map(|name| (name.clone(), spoke.floor(name))).collect();
            (demand, spoke.members(numbers, now), floors)
        });
        let mut own = self.by_deployment(&members, now);
        for (name, deployed) in &mut self.deployed {
            let demand = demand.get(name).copied().unwrap_or_default();
            let OwnReplicas { served: mut own, next: mut coming } = own.remove(name).unwrap_or_default();
            let serving = own.iter().filter(|it| it.standing == Standing::Serving).count() as u32;
            own.extend(missing(deployed.target, own.len(), now));
            coming.extend(missing(deployed.next_target, coming.len(), now));
            let ordered = deployed.ordered(&own, now);
            let rolls_out = own.iter().any(|it| it.stale);
            let wanted = deployed.wants(&self.hub, demand, ordered.clone(), rolls_out, floors[name], now);
            let before = deployed.wanted.replace(wanted);
            let before = before.map_or(0, |before| before.replicas);
            if before != wanted.replicas {
                let (ready, ordered) = (demand.ready, ordered.len());
                DesiredChanged { deployment: name, before, wanted, ready, ordered }.emit();
            }
            let next_wanted = deployed.next_wanted(wanted);
            // The other ready replicas are those of the region's file.
            let others = demand.ready.saturating_sub(serving);
            let steps = [
                (step(&own, others, wanted.replicas, now), &mut deployed.target),
                (step(&coming, 0, next_wanted, now), &mut deployed.next_target),
            ];
            for (Step { keep, let_go, order }, target) in steps {
                *target += order;
                for id in keep {
                    if let ReplicaSlot::Existing(id) = id {
                        cancel_drain(&mut self.own, &self.spoke, &id);
                    }
                }
                for id in let_go {
                    match id {
                        ReplicaSlot::Ordered(_) => *target -= 1,
                        ReplicaSlot::Existing(id) => drain(&mut self.own, &self.spoke, &id, now),
                    }
                }
            }
        }
        self.settle(now);
        self.report(&demand, now);
    }

    /// Groups the actuator's replicas by deployment, without those that are being terminated. A ready replica whose model differs
    /// from the served one gets no requests: it counts as not ready, or as lost if it has served before, and no other replica is
    /// terminated because of it.
    fn by_deployment(
        &mut self,
        members: &BTreeMap<usize, Member>,
        now: Instant,
    ) -> BTreeMap<DeploymentName, OwnReplicas> {
        let mut each: BTreeMap<_, OwnReplicas> = BTreeMap::new();
        let spoke = self.spoke.lock();
        for (id, replica) in self.own.iter_mut().filter(|(_, replica)| !replica.stop) {
            let member = replica.number.and_then(|number| members.get(&number));
            let standing = match (replica.leaving, member) {
                (Some(_), _) => Standing::Leaving,
                (None, Some(member)) => member.standing,
                (None, None) => Standing::Unheard,
            };
            let name = &replica.found.deployment.name;
            let deployed = self.deployed.get(name);
            let is_next = deployed.is_some_and(|it| it.is_next(&replica.found.deployment));
            let stale = !is_next && deployed.is_some_and(|it| it.is_stale(&replica.found.deployment));
            let matches = replica.number.is_some_and(|it| spoke.replica_matches(it, name));
            replica.served |= matches && standing == Standing::Serving;
            let standing = match standing {
                // The revision of its spec has changed; a restarted replica has the new one.
                Standing::Serving if !matches && !is_next && !stale && replica.served => Standing::Lost,
                Standing::Serving if !matches && !is_next && !stale => Standing::Unheard,
                standing => standing,
            };
            replica.heard = standing != Standing::Unheard;
            replica.lost = match standing {
                Standing::Lost => Some(replica.lost.unwrap_or(now)),
                // A replica that is drained because it is lost is not kept for being warm.
                Standing::Leaving => replica.lost,
                Standing::Unheard | Standing::Serving => None,
            };
            let all = each.entry(name.clone()).or_default();
            let all = if is_next { &mut all.next } else { &mut all.served };
            all.push(Own {
                id: ReplicaSlot::Existing(id.clone()),
                rank: replica.found.rank,
                stale,
                since: replica.found.since,
                standing,
                lost: replica.lost,
                in_flight: member.map_or(0, |member| member.in_flight),
            });
        }
        each
    }

    /// Returns whether replicas are starting or draining.
    pub(super) fn is_unsettled(&self) -> bool {
        let leaving = |replica: &OwnReplica| replica.leaving.is_some() && !replica.stop;
        self.own.values().any(|replica| leaving(replica) || replica.number.is_none())
    }

    /// Terminates replicas whose drain has ended, and publishes the targets.
    pub(super) fn settle(&mut self, now: Instant) {
        let leaving = self.own.values().filter(|it| it.leaving.is_some() && !it.stop);
        let numbers: Vec<_> = leaving.filter_map(|it| it.number).collect();
        let members = self.with_spoke(|spoke| spoke.members(numbers, now));
        let mut finished = Vec::new();
        for (id, replica) in &mut self.own {
            let Some(since) = replica.leaving.filter(|_| !replica.stop) else { continue };
            let in_flight =
                replica.number.and_then(|number| members.get(&number)).map_or(0, |it| it.in_flight);
            let late = now.saturating_duration_since(since) >= DRAIN_TIMEOUT;
            if in_flight > 0 && !late {
                continue;
            }
            if in_flight > 0 {
                DrainTimedOut { id, in_flight, after: DRAIN_TIMEOUT }.emit();
            }
            replica.stop = true;
            finished.push(replica.found.deployment.clone());
        }
        finished.iter().for_each(|started| self.one_less(started));
        let mut targets = Targets::new();
        for (name, deployed) in &self.deployed {
            let stop = self.own.iter().filter(|(_, it)| it.stop && it.found.deployment.name == *name);
            let stop = stop.map(|(id, _)| id.clone()).collect();
            let (deployment, replicas) = (deployed.deployment.clone(), deployed.target);
            let next = deployed.next.clone().map(|next| (next, deployed.next_target));
            targets.insert(name.clone(), DeploymentTarget { deployment, replicas, next, stop });
        }
        self.targets.send_if_modified(|before| {
            let changed = *before != targets;
            *before = targets;
            changed
        });
    }

    fn one_less(&mut self, started: &Deployment) {
        if let Some(deployed) = self.deployed.get_mut(&started.name) {
            deployed.one_less(started);
        }
    }

    /// Reports decisions and provisioning replicas to the spoke, which uses them for its ingress.
    fn report(&mut self, demand: &BTreeMap<DeploymentName, Demand>, now: Instant) {
        let own = &self.own;
        let used = |name: &DeploymentName| own.values().any(|it| it.found.deployment.name == *name);
        let over: Vec<_> = self.deployed.extract_if(.., |name, it| it.retired && !used(name)).collect();
        let mut decided = BTreeMap::new();
        let mut coming = BTreeMap::new();
        for (name, deployed) in &self.deployed {
            let Some(wanted) = deployed.wanted else { continue };
            let of_it = |it: &&OwnReplica| {
                let started = &it.found.deployment;
                started.name == *name && !it.stop && !deployed.is_next(started)
            };
            let there: Vec<_> = own.values().filter(of_it).collect();
            let missing = deployed.target.saturating_sub(there.len() as u32);
            let starting = there.iter().filter(|it| it.leaving.is_none() && !it.heard);
            let since = starting.map(|it| now.saturating_duration_since(it.found.since));
            let mut left: Vec<_> = since.map(|lasted| deployed.starts.left(lasted)).collect();
            left.extend((0..missing).map(|_| deployed.start_from(now)));
            let start = (!deployed.retired).then(|| deployed.start_from(now));
            let start_ms = deployed.starts.nearly_all().as_millis();
            let one = Decided {
                wanted,
                ready: demand.get(name).map_or(0, |demand| demand.ready),
                ordered: left.len() as u32,
                leaving: there.iter().filter(|it| it.leaving.is_some()).count() as u32,
                deaths: deployed.deaths.count,
                start_ms: u64::try_from(start_ms).unwrap_or(u64::MAX),
            };
            decided.insert(name.clone(), one);
            coming.insert(name, (left, start));
        }
        let changed = self.with_spoke(|spoke| {
            for (name, (left, start)) in coming {
                spoke.set_ordered(name, left, now);
                spoke.set_start(name, start);
            }
            for (name, _) in over {
                spoke.set_ordered(&name, Vec::new(), now);
                spoke.set_start(&name, None);
            }
            let changed = *spoke.decided() != decided;
            spoke.set_decided(decided);
            changed
        });
        if changed {
            self.changed.notify_one();
        }
    }
}

/// Replicas of one deployment that the actuator has started.
#[derive(Default)]
struct OwnReplicas {
    /// With the served model, or an earlier one.
    served: Vec<Own<ReplicaSlot>>,
    /// With the next model.
    next: Vec<Own<ReplicaSlot>>,
}

/// Returns entries for replicas that are missing to the target.
fn missing(target: u32, there: usize, now: Instant) -> impl Iterator<Item = Own<ReplicaSlot>> {
    (0..target.saturating_sub(there as u32)).map(move |number| Own {
        id: ReplicaSlot::Ordered(number),
        rank: u64::MAX,
        stale: false,
        since: now,
        standing: Standing::Unheard,
        lost: None,
        in_flight: 0,
    })
}

fn cancel_drain(own: &mut BTreeMap<ReplicaId, OwnReplica>, spoke: &Mutex<Spoke>, id: &ReplicaId) {
    let Some(replica) = own.get_mut(id) else { return };
    replica.leaving = None;
    if let Some(number) = replica.number {
        spoke.lock().keep(number);
    }
}

fn drain(own: &mut BTreeMap<ReplicaId, OwnReplica>, spoke: &Mutex<Spoke>, id: &ReplicaId, now: Instant) {
    let Some(replica) = own.get_mut(id) else { return };
    replica.leaving.get_or_insert(now);
    let mut in_flight = 0;
    if let Some(number) = replica.number {
        let mut spoke = spoke.lock();
        spoke.let_go(number);
        in_flight = spoke.members([number], now).get(&number).map_or(0, |member| member.in_flight);
    }
    ReplicaDraining { id, deployment: &replica.found.deployment.name, in_flight }.emit();
}
