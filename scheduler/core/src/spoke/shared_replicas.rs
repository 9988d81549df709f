//! Replicas that the spokes of a region have started: those of this spoke's own actuator, and those of the others.
//!
//! A replica is known by its endpoint. With an actuator whose replicas every spoke observes (Kubernetes), the same
//! replica is one that this spoke has started and one that others report: it counts as started here.
//!
//! A replica of another spoke is removed when the scaler no longer lists it. At the scaler it is removed when the spoke
//! that started it no longer lists it. If that spoke is gone, nothing lists the replica, which runs on for a while: it
//! is removed when it has not responded for [`LOST_MAX`], or at once if it was drained.

use std::collections::BTreeMap;
use std::time::Instant;

use regions::{DeploymentName, HostPort, InstanceName};
use scheduler_api::peer::{ReplicaPhase, SharedReplica};

use super::{LOST_MAX, MemberState, Spoke};

/// Replicas of a region besides those in the configuration of the spoke.
#[derive(Debug, Default)]
pub(super) struct SharedReplicas {
    started: BTreeMap<HostPort, StartedReplica>,
    remote: BTreeMap<HostPort, OtherReplica>,
}

/// Ready replica that this spoke's actuator runs.
#[derive(Debug)]
struct StartedReplica {
    number: usize,
    deployment: DeploymentName,
    ends_with_spoke: bool,
}

/// Replica of another spoke.
#[derive(Debug)]
struct OtherReplica {
    number: usize,
    deployment: DeploymentName,
    /// Spoke that started it, once that has responded to this one.
    owner: Option<InstanceName>,
    phase: ReplicaPhase,
    failed_since: Option<Instant>,
}

/// View of a replica of another spoke, for the scaler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteReplica {
    /// Its endpoint.
    pub endpoint: HostPort,
    /// Deployment for which it was started.
    pub deployment: DeploymentName,
    /// Spoke that started it, if known.
    pub owner: Option<InstanceName>,
    /// Whether spokes may use it.
    pub phase: ReplicaPhase,
    /// Whether it accepts requests, with the served model of its deployment.
    pub is_serving: bool,
    /// This spoke's requests in flight to it.
    pub in_flight: u32,
}

impl SharedReplicas {
    /// Returns the ready replicas that this spoke has started.
    pub(super) fn started(&self) -> BTreeMap<HostPort, DeploymentName> {
        let each = self.started.iter();
        each.map(|(endpoint, started)| (endpoint.clone(), started.deployment.clone())).collect()
    }

    /// Returns the number of a replica.
    pub(super) fn number(&self, endpoint: &HostPort) -> Option<usize> {
        let started = self.started.get(endpoint).map(|started| started.number);
        started.or_else(|| self.remote.get(endpoint).map(|remote| remote.number))
    }

    /// Returns whether replicas run that end with this spoke.
    pub(super) fn any_ends_with_spoke(&self) -> bool {
        self.started.values().any(|started| started.ends_with_spoke)
    }
}

impl Spoke {
    /// Adds a ready replica that this spoke's actuator runs; `ends_with_spoke` if it is stopped with the spoke. Returns
    /// its number.
    pub fn add_started_replica(
        &mut self,
        endpoint: HostPort,
        deployment: DeploymentName,
        ends_with_spoke: bool,
    ) -> usize {
        let known = self.peers.replicas.remote.remove(&endpoint).map(|remote| remote.number);
        let number = known.unwrap_or_else(|| self.add_replica(endpoint.clone()));
        let started = StartedReplica { number, deployment, ends_with_spoke };
        self.peers.replicas.started.insert(endpoint, started);
        number
    }

    /// Removes a replica that this spoke's actuator ran.
    pub fn remove_started_replica(&mut self, number: usize) {
        self.peers.replicas.started.retain(|_, started| started.number != number);
        self.remove_replica(number);
    }

    /// Returns the replicas of other spokes.
    pub fn remote_replicas(&self, now: Instant) -> Vec<RemoteReplica> {
        let remote = &self.peers.replicas.remote;
        let members = self.members(remote.values().map(|remote| remote.number), now);
        let each = remote.iter().map(|(endpoint, remote)| {
            let member = members.get(&remote.number);
            let is_serving = member.is_some_and(|member| member.state == MemberState::Serving)
                && self.replica_matches(remote.number, &remote.deployment);
            RemoteReplica {
                endpoint: endpoint.clone(),
                deployment: remote.deployment.clone(),
                owner: remote.owner.clone(),
                phase: remote.phase,
                is_serving,
                in_flight: member.map_or(0, |member| member.in_flight),
            }
        });
        each.collect()
    }

    /// Sets the phase of a replica of another spoke, as its scaler. The phase only rises.
    pub fn set_remote_phase(&mut self, endpoint: &HostPort, phase: ReplicaPhase) {
        let Some(remote) = self.peers.replicas.remote.get_mut(endpoint) else { return };
        remote.phase = remote.phase.max(phase);
        let (number, is_draining) = (remote.number, remote.phase > ReplicaPhase::Serving);
        if is_draining {
            self.drain_replica(number);
        }
    }

    /// Removes the replicas of other spokes that are gone, as the scaler; returns whether there were any.
    pub fn remove_gone_replicas(&mut self, now: Instant) -> bool {
        let mut gone = Vec::new();
        for (endpoint, remote) in &mut self.peers.replicas.remote {
            let failed = self.replicas.get(remote.number).is_none_or(super::ReplicaState::has_failed);
            remote.failed_since = failed.then(|| remote.failed_since.unwrap_or(now));
            let max = |since: Instant| {
                remote.phase > ReplicaPhase::Serving || now.saturating_duration_since(since) >= LOST_MAX
            };
            if remote.failed_since.is_some_and(max) {
                gone.push(endpoint.clone());
            }
        }
        gone.iter().for_each(|endpoint| self.remove_remote(endpoint));
        !gone.is_empty()
    }

    /// Applies the list of the replicas that another spoke has started, as the scaler; returns whether replicas were
    /// added or removed.
    pub(super) fn started_elsewhere(
        &mut self,
        owner: &InstanceName,
        listed: &BTreeMap<HostPort, DeploymentName>,
    ) -> bool {
        let remote = &self.peers.replicas.remote;
        let gone = remote.iter().filter(|(endpoint, remote)| {
            remote.owner.as_ref() == Some(owner) && !listed.contains_key(*endpoint)
        });
        let gone: Vec<_> = gone.map(|(endpoint, _)| endpoint.clone()).collect();
        gone.iter().for_each(|endpoint| self.remove_remote(endpoint));
        let mut changed = !gone.is_empty();
        for (endpoint, deployment) in listed {
            if let Some(known) = self.peers.replicas.remote.get_mut(endpoint) {
                known.owner = Some(owner.clone());
            } else if !self.has_own(endpoint) {
                self.add_remote(endpoint, deployment.clone(), Some(owner.clone()), ReplicaPhase::Serving);
                changed = true;
            }
        }
        changed
    }

    /// Applies the list of all replicas of the region that the scaler has shared.
    pub(super) fn apply_shared_replicas(&mut self, listed: &BTreeMap<HostPort, SharedReplica>) {
        let remote = &self.peers.replicas.remote;
        let gone: Vec<_> =
            remote.keys().filter(|endpoint| !listed.contains_key(*endpoint)).cloned().collect();
        gone.iter().for_each(|endpoint| self.remove_remote(endpoint));
        for (endpoint, SharedReplica { deployment, phase }) in listed {
            if let Some(known) = self.peers.replicas.remote.get_mut(endpoint) {
                known.phase = *phase;
            } else if !self.has_own(endpoint) {
                self.add_remote(endpoint, deployment.clone(), None, *phase);
            }
            if let Some(number) = self.peers.replicas.number(endpoint) {
                let is_draining = *phase > ReplicaPhase::Serving;
                self.replicas.with(number, |replica| replica.set_draining(is_draining));
            }
        }
        self.update_chosen_revisions();
    }

    /// Returns whether a replica is one of this spoke's configuration or of its actuator.
    fn has_own(&self, endpoint: &HostPort) -> bool {
        let is_remote = self.peers.replicas.remote.contains_key(endpoint);
        !is_remote && self.replicas.each().any(|(_, replica)| replica.endpoint() == endpoint)
    }

    fn add_remote(
        &mut self,
        endpoint: &HostPort,
        deployment: DeploymentName,
        owner: Option<InstanceName>,
        phase: ReplicaPhase,
    ) {
        let number = self.add_replica(endpoint.clone());
        let remote = OtherReplica { number, deployment, owner, phase, failed_since: None };
        self.peers.replicas.remote.insert(endpoint.clone(), remote);
    }

    fn remove_remote(&mut self, endpoint: &HostPort) {
        if let Some(remote) = self.peers.replicas.remote.remove(endpoint) {
            self.remove_replica(remote.number);
        }
    }
}
