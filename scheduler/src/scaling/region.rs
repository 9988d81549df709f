//! One region's deployments and replicas, as the scaler sees them, and what is done about them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use regions::{Catalogue, Deployment, DeploymentName, RegionId};
use scheduler_core::scale::step::{OwnReplica, Step, step};
use scheduler_core::spoke::hold::HeldTotals;
use scheduler_core::spoke::{DeploymentDemand, MemberState, ReplicaMember, ScalingStatus, Spoke};
use tokio::sync::{Notify, watch};

use super::deployed::{Deployed, Id};
use super::events::{DrainCutShort, ReplicaLeaves, ReplicaReady, WantedChanged};
use crate::actuator::{Found, ReadyAt, ReplicaId, Running, Target, Targets};
use crate::agent::table::Followed;
use crate::config::SpokeConfig;

/// How long a replica that was let go may take to finish what it has: as long as a request may take that does not say.
const DRAIN_MAX: Duration = Duration::from_secs(30);
/// All that runs, or should, in one region.
pub(super) struct Region {
    here: RegionId,
    catalogue: Arc<Catalogue>,
    spoke: Arc<Mutex<Spoke>>,
    /// Told when replicas have come or gone.
    changed: Arc<Notify>,
    /// The numbers of those that the region's file names.
    others: Vec<usize>,
    hub: Followed,
    deployed: BTreeMap<DeploymentName, Deployed>,
    own: BTreeMap<ReplicaId, Replica>,
    targets: watch::Sender<Targets>,
}

/// One replica that was started here.
struct Replica {
    found: Found,
    /// By which the spoke knows it, from when it takes work.
    number: Option<usize>,
    /// Since when it is let go.
    leaving: Option<Instant>,
    /// Since when it is lost.
    lost: Option<Instant>,
    /// It has finished and may be stopped.
    stop: bool,
    /// It was heard of, at the last look.
    heard: bool,
    /// It has had the model that its deployment is served with, and took requests.
    served: bool,
}

impl Region {
    pub(super) fn new(
        config: &SpokeConfig,
        spoke: Arc<Mutex<Spoke>>,
        changed: Arc<Notify>,
        others: Vec<usize>,
        targets: watch::Sender<Targets>,
    ) -> Region {
        let (here, catalogue) = (config.region.clone(), config.catalogue.clone());
        let hub = Followed::default();
        let (deployed, own) = (BTreeMap::new(), BTreeMap::new());
        Region { here, catalogue, spoke, changed, others, hub, deployed, own, targets }
    }

    fn with_spoke<T>(&self, ask: impl FnOnce(&mut Spoke) -> T) -> T {
        ask(&mut self.spoke.lock())
    }

    /// Whether somebody of the region's file was not heard of yet.
    pub(super) fn others_are_unheard(&self, now: Instant) -> bool {
        let members = self.with_spoke(|spoke| spoke.members(self.others.iter().copied(), now));
        members.values().any(|member| member.state == MemberState::Pending)
    }

    /// The hub has said something; what should run here may be something else.
    pub(super) fn follow(&mut self, followed: &Followed) {
        let newer = |table: &Followed| table.table.as_ref().map(|table| table.generation);
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
            let deployed = deployed.or_insert_with(|| Deployed::new(shared.clone(), now));
            deployed.retired = false;
            if deployed.deployment != shared {
                deployed.scaler.set_config(shared.scaling.clone());
                deployed.deployment = shared;
            }
            let served = table.as_ref().and_then(|table| table.revision(&deployment.name));
            let next =
                served.and_then(|served| served.next.as_ref()).map(|next| deployment.with_model(&next.spec));
            // Replicas of another revision of the same spec are started by whoever restarts those that are there.
            let next = next.filter(|next| next.model_spec() != deployment.model_spec());
            deployed.set_next(next.map(Arc::new));
        }
        let counted = self.deployed.iter().filter(|(_, deployed)| !deployed.retired);
        let most: BTreeMap<_, _> =
            counted.map(|(name, deployed)| (name.clone(), deployed.deployment.scaling.max)).collect();
        let counted: BTreeSet<_> = most.keys().cloned().collect();
        self.with_spoke(|spoke| {
            spoke.track_demand(&counted);
            spoke.set_replicas_max(most);
        });
    }

    /// Whoever acts says who is there.
    pub(super) fn meet(&mut self, running: &Running, now: Instant) {
        let gone: Vec<_> = self.own.extract_if(.., |id, _| !running.replicas.contains_key(id)).collect();
        let mut changed = !gone.is_empty();
        for (_, replica) in gone {
            if let Some(number) = replica.number {
                self.with_spoke(|spoke| spoke.remove_replica(number));
            }
            // One that died on its way out needs nobody in its place.
            if replica.leaving.is_some() && !replica.stop {
                self.one_less(&replica.found.deployment);
            }
        }
        for (id, found) in &running.replicas {
            let new = || Replica {
                found: found.clone(),
                number: None,
                leaving: None,
                lost: None,
                stop: false,
                heard: false,
                served: false,
            };
            let mut replica = self.own.remove(id).unwrap_or_else(new);
            if let Some(ReadyAt { endpoint, took }) = found.ready
                && replica.number.is_none()
            {
                ReplicaReady { id, deployment: &found.deployment.name, took }.emit();
                replica.number = Some(self.with_spoke(|spoke| spoke.add_replica(endpoint)));
                if let (Some(deployed), Some(took)) = (self.deployed.get_mut(&found.deployment.name), took) {
                    deployed.starts.record(took);
                }
                changed = true;
            }
            replica.found = found.clone();
            self.own.insert(id.clone(), replica);
            // It was started by the spoke before this one, for what should not run here any longer.
            if self.hub.table.is_some() && !self.deployed.contains_key(&found.deployment.name) {
                let retired = Deployed { retired: true, ..Deployed::new(found.deployment.clone(), now) };
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
        // Some run that nobody here has ordered: the spoke before this one has.
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

    /// Looks at every deployment, decides, and acts.
    pub(super) fn look(&mut self, now: Instant) {
        let numbers: Vec<_> = self.own.values().filter_map(|replica| replica.number).collect();
        let names = self.deployed.keys();
        let (demand, members, floors) = self.with_spoke(|spoke| {
            let mut demand = spoke.demand(now);
            for (name, demand) in &mut demand {
                let HeldTotals { requests, tokens } = spoke.held(name);
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
            let All { served: mut own, next: mut coming } = own.remove(name).unwrap_or_default();
            let serving = own.iter().filter(|it| it.state == MemberState::Serving).count() as u32;
            own.extend(missing(deployed.target, own.len(), now));
            coming.extend(missing(deployed.next_target, coming.len(), now));
            let ordered = deployed.ordered(&own, now);
            let rolls_out = own.iter().any(|it| it.is_stale);
            let wanted = deployed.wants(&self.hub, demand, ordered.clone(), rolls_out, floors[name], now);
            let before = deployed.wanted.replace(wanted);
            let before = before.map_or(0, |before| before.replicas);
            if before != wanted.replicas {
                let (ready, ordered) = (demand.ready, ordered.len());
                WantedChanged { deployment: name, before, wanted, ready, ordered }.emit();
            }
            let next_wanted = deployed.next_wanted(wanted);
            // The rest of those that take work are of the region's file.
            let others = demand.ready.saturating_sub(serving);
            let steps = [
                (step(&own, others, wanted.replicas, now), &mut deployed.target),
                (step(&coming, 0, next_wanted, now), &mut deployed.next_target),
            ];
            for (Step { undrain, drain, start }, target) in steps {
                *target += start;
                for id in undrain {
                    if let Id::There(id) = id {
                        keep_it(&mut self.own, &self.spoke, &id);
                    }
                }
                for id in drain {
                    match id {
                        Id::Ordered(_) => *target -= 1,
                        Id::There(id) => let_it_go(&mut self.own, &self.spoke, &id, now),
                    }
                }
            }
        }
        self.settle(now);
        self.tell(&demand, now);
    }

    /// Those that were started here, as the step counts them. Who was told to stop is not counted any longer. One that takes
    /// work and has another model than its deployment is served with gets no requests: it counts as one that is not ready, or as
    /// one that is lost if it was served before, and nobody is let go because of it.
    fn by_deployment(
        &mut self,
        members: &BTreeMap<usize, ReplicaMember>,
        now: Instant,
    ) -> BTreeMap<DeploymentName, All> {
        let mut each: BTreeMap<_, All> = BTreeMap::new();
        let spoke = self.spoke.lock();
        for (id, replica) in self.own.iter_mut().filter(|(_, replica)| !replica.stop) {
            let member = replica.number.and_then(|number| members.get(&number));
            let standing = match (replica.leaving, member) {
                (Some(_), _) => MemberState::Draining,
                (None, Some(member)) => member.state,
                (None, None) => MemberState::Pending,
            };
            let name = &replica.found.deployment.name;
            let deployed = self.deployed.get(name);
            let is_next = deployed.is_some_and(|it| it.is_next(&replica.found.deployment));
            let stale = !is_next && deployed.is_some_and(|it| it.is_stale(&replica.found.deployment));
            let matches = replica.number.is_some_and(|it| spoke.replica_matches(it, name));
            replica.served |= matches && standing == MemberState::Serving;
            let standing = match standing {
                // The revision of its spec is another one now: one that is started anew has that.
                MemberState::Serving if !matches && !is_next && !stale && replica.served => MemberState::Lost,
                MemberState::Serving if !matches && !is_next && !stale => MemberState::Pending,
                standing => standing,
            };
            replica.heard = standing != MemberState::Pending;
            replica.lost = match standing {
                MemberState::Lost => Some(replica.lost.unwrap_or(now)),
                // One that goes because it is lost does not come back because it is warm.
                MemberState::Draining => replica.lost,
                MemberState::Pending | MemberState::Serving => None,
            };
            let all = each.entry(name.clone()).or_default();
            let all = if is_next { &mut all.next } else { &mut all.served };
            all.push(OwnReplica {
                id: Id::There(id.clone()),
                removal_rank: replica.found.rank,
                is_stale: stale,
                ordered_at: replica.found.since,
                state: standing,
                lost_since: replica.lost,
                in_flight: member.map_or(0, |member| member.in_flight),
            });
        }
        each
    }

    /// Whether somebody is on the way in or out.
    pub(super) fn is_unsettled(&self) -> bool {
        let leaving = |replica: &Replica| replica.leaving.is_some() && !replica.stop;
        self.own.values().any(|replica| leaving(replica) || replica.number.is_none())
    }

    /// Those who were let go and have finished may be stopped; then whoever acts is told what should be.
    pub(super) fn settle(&mut self, now: Instant) {
        let leaving = self.own.values().filter(|it| it.leaving.is_some() && !it.stop);
        let numbers: Vec<_> = leaving.filter_map(|it| it.number).collect();
        let members = self.with_spoke(|spoke| spoke.members(numbers, now));
        let mut finished = Vec::new();
        for (id, replica) in &mut self.own {
            let Some(since) = replica.leaving.filter(|_| !replica.stop) else { continue };
            let in_flight =
                replica.number.and_then(|number| members.get(&number)).map_or(0, |it| it.in_flight);
            let late = now.saturating_duration_since(since) >= DRAIN_MAX;
            if in_flight > 0 && !late {
                continue;
            }
            if in_flight > 0 {
                DrainCutShort { id, in_flight, after: DRAIN_MAX }.emit();
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
            targets.insert(name.clone(), Target { deployment, replicas, next, stop });
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

    /// Tells the spoke, and by it the region's door, what was decided and what is on its way.
    fn tell(&mut self, demand: &BTreeMap<DeploymentName, DeploymentDemand>, now: Instant) {
        let own = &self.own;
        let used = |name: &DeploymentName| own.values().any(|it| it.found.deployment.name == *name);
        let over: Vec<_> = self.deployed.extract_if(.., |name, it| it.retired && !used(name)).collect();
        let mut decided = BTreeMap::new();
        let mut coming = BTreeMap::new();
        for (name, deployed) in &self.deployed {
            let Some(wanted) = deployed.wanted else { continue };
            let of_it = |it: &&Replica| {
                let started = &it.found.deployment;
                started.name == *name && !it.stop && !deployed.is_next(started)
            };
            let there: Vec<_> = own.values().filter(of_it).collect();
            let missing = deployed.target.saturating_sub(there.len() as u32);
            let starting = there.iter().filter(|it| it.leaving.is_none() && !it.heard);
            let since = starting.map(|it| now.saturating_duration_since(it.found.since));
            let mut left: Vec<_> = since.map(|lasted| deployed.starts.remaining(lasted)).collect();
            left.extend((0..missing).map(|_| deployed.start_from(now)));
            let start = (!deployed.retired).then(|| deployed.start_from(now));
            let start_ms = deployed.starts.p90().as_millis();
            let one = ScalingStatus {
                decision: wanted,
                ready: demand.get(name).map_or(0, |demand| demand.ready),
                provisioning: left.len() as u32,
                draining: there.iter().filter(|it| it.leaving.is_some()).count() as u32,
                crashes: deployed.deaths.count,
                start_ms: u64::try_from(start_ms).unwrap_or(u64::MAX),
            };
            decided.insert(name.clone(), one);
            coming.insert(name, (left, start));
        }
        let changed = self.with_spoke(|spoke| {
            for (name, (left, start)) in coming {
                spoke.set_provisioning(name, left, now);
                spoke.set_start_time(name, start);
            }
            for (name, _) in over {
                spoke.set_provisioning(&name, Vec::new(), now);
                spoke.set_start_time(&name, None);
            }
            let changed = *spoke.scaling_status() != decided;
            spoke.set_scaling_status(decided);
            changed
        });
        if changed {
            self.changed.notify_one();
        }
    }
}

/// The replicas of one deployment that were started here.
#[derive(Default)]
struct All {
    /// Of the model that is served, or of one that was.
    served: Vec<OwnReplica<Id>>,
    /// Of the model that is to replace it.
    next: Vec<OwnReplica<Id>>,
}

/// Those that should run beside as many as there are.
fn missing(target: u32, there: usize, now: Instant) -> impl Iterator<Item = OwnReplica<Id>> {
    (0..target.saturating_sub(there as u32)).map(move |number| OwnReplica {
        id: Id::Ordered(number),
        removal_rank: u64::MAX,
        is_stale: false,
        ordered_at: now,
        state: MemberState::Pending,
        lost_since: None,
        in_flight: 0,
    })
}

fn keep_it(own: &mut BTreeMap<ReplicaId, Replica>, spoke: &Mutex<Spoke>, id: &ReplicaId) {
    let Some(replica) = own.get_mut(id) else { return };
    replica.leaving = None;
    if let Some(number) = replica.number {
        spoke.lock().undrain_replica(number);
    }
}

fn let_it_go(own: &mut BTreeMap<ReplicaId, Replica>, spoke: &Mutex<Spoke>, id: &ReplicaId, now: Instant) {
    let Some(replica) = own.get_mut(id) else { return };
    replica.leaving.get_or_insert(now);
    let mut in_flight = 0;
    if let Some(number) = replica.number {
        let mut spoke = spoke.lock();
        spoke.drain_replica(number);
        in_flight = spoke.members([number], now).get(&number).map_or(0, |member| member.in_flight);
    }
    ReplicaLeaves { id, deployment: &replica.found.deployment.name, in_flight }.emit();
}
