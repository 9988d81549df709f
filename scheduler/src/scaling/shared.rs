//! Part of a spoke in scaling a region together with others: takeover, standby, and the replicas that it shares.
//!
//! A spoke that begins to scale finds replicas that another spoke has started. They serve until it has as many ready
//! replicas of its own as are desired; then it drains them, and their spoke stops each one when no other spoke uses it.
//! So replicas are replaced like those of an old revision, there are never fewer than before, and a spoke needs no
//! knowledge of how another one stops its replicas. With an actuator whose replicas every spoke observes, there are
//! no replicas of other spokes, and nothing is replaced.
//!
//! The decisions are those of [`scheduler_core::spoke`]; this module connects them with the actuator.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use regions::{DeploymentName, HostPort};
use scheduler_api::peer::{ReplicaPhase, SharedRegionState, SharedReplica};
use scheduler_core::scale::Scaler;
use scheduler_core::spoke::{RemoteReplica, Spoke};

use super::events::{RemoteReplicaDraining, ReplicasNotShared, ScalingBegun, ScalingEnded};
use super::region::{RegionScaler, cancel_drain, drain};
use super::scaler::DeploymentScaler;

impl RegionScaler {
    /// Returns whether this spoke scales the region now. When that begins, earlier decisions about its replicas are
    /// dropped: they were those of another spoke, or are outdated.
    pub(super) fn update_role(&mut self, now: Instant) -> bool {
        let (is_scaler, epoch) = self.with_spoke(|spoke| {
            let epoch = spoke.scaler_epoch().filter(|_| spoke.holds_scaler_lease());
            (spoke.is_scaler(now), epoch)
        });
        if is_scaler == self.is_scaler {
            return is_scaler;
        }
        self.is_scaler = is_scaler;
        let region = &self.region;
        if !is_scaler {
            let epoch = self.with_spoke(|spoke| {
                spoke.end_scaling();
                spoke.scaler_epoch()
            });
            // Another spoke starts the replicas now: when this one scales again, its starts begin anew.
            self.scalers.values_mut().for_each(DeploymentScaler::forget_failures);
            self.sharing.deployments.clear();
            ScalingEnded { region, epoch, replicas: self.own.len() }.emit();
            return is_scaler;
        }
        ScalingBegun { region, epoch }.emit();
        let names: BTreeSet<_> = self.scalers.keys().cloned().collect();
        self.with_spoke(|spoke| spoke.begin_scaling(&names, now));
        for scaler in self.scalers.values_mut() {
            scaler.scaler = Scaler::new(scaler.deployment.scaling.clone(), now);
        }
        let kept = self.own.iter().filter(|(_, replica)| !replica.may_stop);
        for id in kept.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            cancel_drain(&mut self.own, &self.spoke, &id);
        }
        is_scaler
    }

    /// Stops the replicas of this spoke that the scaler has drained, and decides nothing else.
    pub(super) fn stand_by(&mut self, now: Instant) {
        let phase = |endpoint: &HostPort| self.with_spoke(|spoke| spoke.shared_phase(endpoint));
        let ends_with_spoke = self.ends_with_spoke;
        let own = self.own.iter().filter(|(_, replica)| ends_with_spoke && !replica.may_stop);
        let phases = own.filter_map(|(id, replica)| {
            let phase = phase(&replica.running.ready?.endpoint.into())?;
            (replica.draining_since.is_some() != (phase > ReplicaPhase::Serving)).then(|| (id.clone(), phase))
        });
        for (id, phase) in phases.collect::<Vec<_>>() {
            if phase > ReplicaPhase::Serving {
                drain(&mut self.own, &self.spoke, &id, now);
            } else {
                cancel_drain(&mut self.own, &self.spoke, &id);
            }
        }
        let own = &self.own;
        let used = |name: &DeploymentName| own.values().any(|it| it.running.deployment.name == *name);
        self.scalers.retain(|name, scaler| !scaler.retired || used(name));
        // When this spoke scales again, what runs counts as ordered, and nothing else.
        for scaler in self.scalers.values_mut() {
            (scaler.target, scaler.next_target, scaler.desired) = (0, 0, None);
        }
        self.finish_drains(now);
    }

    /// Returns whether no other spoke uses a draining replica of this one.
    pub(super) fn is_unused_elsewhere(&self, spoke: &Spoke, endpoint: &HostPort, now: Instant) -> bool {
        if self.is_scaler {
            spoke.is_clear_elsewhere(endpoint, None, now)
        } else {
            spoke.shared_phase(endpoint) == Some(ReplicaPhase::Drained)
        }
    }

    /// Drains the replicas of other spokes for deployments that have enough ready ones without them (`replaced`), or
    /// that do not run in this region.
    pub(super) fn drain_remote(&mut self, remote: &[RemoteReplica], replaced: &BTreeSet<DeploymentName>) {
        let (scalers, has_table) = (&self.scalers, self.hub.table.is_some());
        let unneeded =
            |name: &DeploymentName| replaced.contains(name) || has_table && !scalers.contains_key(name);
        let serving = remote.iter().filter(|replica| replica.phase == ReplicaPhase::Serving);
        for RemoteReplica { endpoint, deployment, .. } in serving.filter(|it| unneeded(&it.deployment)) {
            RemoteReplicaDraining { endpoint, deployment }.emit();
            self.with_spoke(|spoke| spoke.set_remote_phase(endpoint, ReplicaPhase::Draining));
        }
    }

    /// Shares the replicas of the region with the other spokes, as its scaler.
    pub(super) fn share(&mut self, now: Instant) {
        self.sharing.drains_remote = false;
        if !self.is_scaler {
            return;
        }
        let ready = self.own.values().filter_map(|replica| {
            let ready = replica.running.ready.filter(|_| replica.index.is_some())?;
            let phase = match replica.draining_since {
                Some(_) => ReplicaPhase::Draining,
                None => ReplicaPhase::Serving,
            };
            let deployment = replica.running.deployment.name.clone();
            Some((HostPort::from(ready.endpoint), SharedReplica { deployment, phase }))
        });
        let mut replicas: BTreeMap<_, _> = ready.collect();
        let mut spoke = self.spoke.lock();
        let is_changed = spoke.remove_gone_replicas(now);
        for replica in spoke.remote_replicas(now) {
            let RemoteReplica { endpoint, deployment, owner, mut phase, is_serving: _, in_flight } = replica;
            self.sharing.drains_remote |= phase == ReplicaPhase::Draining;
            if phase == ReplicaPhase::Draining
                && in_flight == 0
                && spoke.is_clear_elsewhere(&endpoint, owner.as_ref(), now)
            {
                phase = ReplicaPhase::Drained;
                spoke.set_remote_phase(&endpoint, phase);
            }
            replicas.insert(endpoint, SharedReplica { deployment, phase });
        }
        let others = spoke.instances() - 1;
        let state = SharedRegionState { deployments: self.sharing.deployments.clone(), replicas };
        let sequence = if self.sharing.is_reachable { spoke.share(state) } else { None };
        drop(spoke);
        if let Some(sequence) = sequence {
            self.sharing.sequence.send_replace(sequence);
        }
        if is_changed {
            self.changed.notify_one();
        }
        if !self.sharing.is_reachable && others > 0 && !self.sharing.is_logged {
            self.sharing.is_logged = true;
            ReplicasNotShared { region: &self.region }.emit();
        }
    }
}
