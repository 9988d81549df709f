//! Exchange with the other spokes of the region ([`scheduler_api::peer`]): what the spoke that scales shares, and what
//! the others make of it.
//!
//! The scaler shares one state, the replicas and start times of the region, with a sequence number. The others forward
//! to these replicas and hold requests for those that start, as if they had started them; they acknowledge the number,
//! and return their demand and the replicas that their own actuators run. Those run on when a spoke loses the lease, so
//! every spoke keeps using them until the new scaler drains them ([`super::shared_replicas`]).
//!
//! A replica is drained by all spokes: the scaler marks it, and it may be stopped when every other spoke has
//! acknowledged a state with the mark and has no request in flight to it. A spoke that does not respond for
//! [`SILENCE_MAX`] is not waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use regions::{DeploymentName, HostPort, InstanceName, RegionId};
use scheduler_api::peer::{PEER_WAIT_MAX, PeerRequest, PeerResponse, ReplicaPhase, SharedRegionState};
use scheduler_api::scaler::{ScalerEpoch, ScalerLease};

use super::Spoke;
use super::peer_demand::{PeerDemands, SILENCE_MAX};
use super::scaler_role::ScalerRole;
use super::shared_replicas::SharedReplicas;

/// Time for which another spoke holds a request while it has not acknowledged the state, or a replica drains.
const DRAINING_WAIT: Duration = Duration::from_millis(50);

/// Other spokes of the region, and this spoke's part in the exchange with them.
#[derive(Debug, Default)]
pub(super) struct Peers {
    role: ScalerRole,
    /// This spoke can start replicas.
    can_scale: bool,
    /// Other spokes in the newest route table.
    others: BTreeMap<InstanceName, OtherSpoke>,
    pub(super) demands: PeerDemands,
    /// State that this spoke shares as the scaler, and its sequence number; 0 before the first one.
    shared: SharedRegionState,
    sequence: u64,
    /// Sequence number of the first state in which each draining replica was marked.
    marked_at: BTreeMap<HostPort, u64>,
    /// State that the scaler has shared with this spoke.
    received: Option<ReceivedState>,
    pub(super) replicas: SharedReplicas,
    /// Number of times that a request found no replica and none was being started.
    pub(super) wakes: u64,
}

/// Another spoke of the region, as the scaler knows it.
#[derive(Debug)]
struct OtherSpoke {
    address: HostPort,
    /// Last acknowledged state.
    acknowledged: Option<(ScalerEpoch, u64)>,
    /// Time of its last response, or of the first request to it.
    heard: Option<Instant>,
    in_flight: BTreeMap<HostPort, u32>,
    can_scale: bool,
    wakes: u64,
}

/// State that the scaler has shared.
#[derive(Debug)]
struct ReceivedState {
    scaler: InstanceName,
    epoch: ScalerEpoch,
    sequence: u64,
    state: SharedRegionState,
}

/// Effect of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerChanges {
    /// Replicas were added or removed.
    pub replicas_changed: bool,
    /// A request at the other spoke waits for a replica that nothing starts.
    pub has_woken: bool,
}

/// Effect of a request of the scaler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerReceipt {
    /// Replicas or start times have changed.
    pub is_changed: bool,
    /// Time for which to hold the request, unless there are more wakes than the scaler knows.
    pub wait: Duration,
}

/// Error of an exchange between the spokes of a region: the spoke at the address is not the expected one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message is of {region} {instance}; check `advertise` and `region` of both spokes")]
pub struct ForeignPeer {
    region: RegionId,
    instance: InstanceName,
}

impl OtherSpoke {
    fn new(address: HostPort) -> OtherSpoke {
        let (acknowledged, heard, in_flight) = (None, None, BTreeMap::new());
        OtherSpoke { address, acknowledged, heard, in_flight, can_scale: false, wakes: 0 }
    }

    /// Returns whether it has not responded for so long that it is not waited for.
    fn is_silent(&self, now: Instant) -> bool {
        self.heard.is_some_and(|heard| now.saturating_duration_since(heard) > SILENCE_MAX)
    }
}

impl Peers {
    /// Replaces the other spokes.
    pub(super) fn set_others(&mut self, addresses: BTreeMap<InstanceName, HostPort>) {
        let mut before = std::mem::take(&mut self.others);
        self.demands.retain(|name| addresses.contains_key(name));
        let kept = addresses.into_iter().map(|(name, address)| {
            let known = before.remove(&name).filter(|known| known.address == address);
            (name, known.unwrap_or_else(|| OtherSpoke::new(address)))
        });
        self.others = kept.collect();
    }

    /// Returns the desired number of replicas, if another spoke scales.
    pub(super) fn desired(&self, deployment: &DeploymentName) -> Option<u32> {
        Some(self.received.as_ref()?.state.deployments.get(deployment)?.desired)
    }
}

impl Spoke {
    /// Sets that this spoke can start replicas.
    pub fn set_can_scale(&mut self) {
        self.peers.can_scale = true;
    }

    /// Records the scaler lease in a response of the hub.
    pub fn scaler_lease_reported(&mut self, lease: Option<ScalerLease>, now: Instant) {
        self.peers.role.hub_responded(lease, self.boot_id, now);
    }

    /// Returns whether this spoke scales the region now.
    pub fn is_scaler(&mut self, now: Instant) -> bool {
        self.peers.can_scale && self.peers.role.is_scaler(now)
    }

    /// Returns whether this spoke holds the scaler lease, as far as it knows.
    pub fn holds_scaler_lease(&self) -> bool {
        self.peers.role.held().is_some()
    }

    /// Returns the highest epoch of a scaler lease that this spoke has seen.
    pub fn scaler_epoch(&self) -> Option<ScalerEpoch> {
        self.peers.role.highest()
    }

    /// Returns whether to ask the hub for the scaler lease now, because its holder has given it up.
    pub fn should_acquire_lease(&self, now: Instant) -> bool {
        self.peers.can_scale && !self.draining && self.peers.role.is_released(now)
    }

    /// Returns the number of times that a request found no replica and none was being started.
    pub fn wakes(&self) -> u64 {
        self.peers.wakes
    }

    /// Starts to scale the region: forgets the start times of deployments other than these.
    pub fn begin_scaling(&mut self, deployments: &BTreeSet<DeploymentName>, now: Instant) {
        self.peers.received = None;
        self.failed.set_scaled([]);
        self.retain_provisioning(deployments, now);
        // They arrived before this spoke decided about replicas.
        self.region_demand(now);
    }

    /// Stops scaling the region: this spoke's decisions are replaced by those that the next scaler has shared so far.
    pub fn end_scaling(&mut self) {
        self.scaling_status.clear();
        let shared = self.peers.received.iter().flat_map(|received| &received.state.deployments);
        self.failed.set_scaled(shared.map(|(name, deployment)| (name.clone(), deployment.failures.clone())));
    }

    /// Replaces the state that is shared with the other spokes. Returns its sequence number if it differs from the last
    /// one.
    pub fn share(&mut self, state: SharedRegionState) -> Option<u64> {
        let Peers { shared, sequence, marked_at, .. } = &mut self.peers;
        if *shared == state && *sequence > 0 {
            return None;
        }
        *sequence += 1;
        let is_marked = |endpoint: &HostPort| {
            state.replicas.get(endpoint).is_some_and(|replica| replica.phase > ReplicaPhase::Serving)
        };
        marked_at.retain(|endpoint, _| is_marked(endpoint));
        for endpoint in state.replicas.keys().filter(|endpoint| is_marked(endpoint)) {
            marked_at.entry(endpoint.clone()).or_insert(*sequence);
        }
        *shared = state;
        Some(*sequence)
    }

    /// Returns whether all other spokes have stopped sending to a draining replica and have nothing in flight to it,
    /// except for `owner`, which started it.
    pub fn is_clear_elsewhere(
        &self,
        endpoint: &HostPort,
        owner: Option<&InstanceName>,
        now: Instant,
    ) -> bool {
        let Peers { role, others, sequence, marked_at, .. } = &self.peers;
        // Without an epoch or a state, no other spoke knows the replicas.
        let Some(epoch) = role.held().filter(|_| *sequence > 0) else { return true };
        let is_clear = |peer: &OtherSpoke| {
            let marked = marked_at.get(endpoint);
            let acknowledged = peer.acknowledged.filter(|(of, _)| *of == epoch).map(|(_, sequence)| sequence);
            marked.is_some_and(|marked| acknowledged >= Some(*marked))
                && !peer.in_flight.contains_key(endpoint)
        };
        let mut waited_for =
            others.iter().filter(|(name, peer)| Some(*name) != owner && !peer.is_silent(now));
        waited_for.all(|(_, peer)| is_clear(peer))
    }

    /// Returns the addresses of the spokes with which to exchange; none unless this spoke holds the scaler lease.
    pub fn peers(&self) -> BTreeMap<InstanceName, HostPort> {
        let Peers { role, others, sequence, .. } = &self.peers;
        if role.held().is_none() || *sequence == 0 {
            return BTreeMap::new();
        }
        others.iter().map(|(name, peer)| (name.clone(), peer.address.clone())).collect()
    }

    /// Returns the next request to another spoke; `None` if there is none to send.
    pub fn peer_request(&mut self, peer: &InstanceName, now: Instant) -> Option<PeerRequest> {
        let Peers { role, others, shared, sequence, marked_at, .. } = &mut self.peers;
        let (epoch, other) = (role.held()?, others.get_mut(peer)?);
        other.heard.get_or_insert(now);
        let is_known = other.acknowledged == Some((epoch, *sequence));
        let is_settled = is_known && marked_at.is_empty();
        Some(PeerRequest {
            region: self.region.clone(),
            instance: self.instance.clone(),
            epoch,
            sequence: *sequence,
            state: (!is_known).then(|| shared.clone()),
            releases: self.draining,
            wakes: other.wakes,
            wait: if is_settled { PEER_WAIT_MAX } else { DRAINING_WAIT },
        })
    }

    /// Records the response of another spoke.
    ///
    /// # Errors
    ///
    /// If another spoke than `peer` has responded.
    pub fn peer_responded(
        &mut self,
        peer: &InstanceName,
        response: PeerResponse,
        now: Instant,
    ) -> Result<PeerChanges, ForeignPeer> {
        let PeerResponse {
            region,
            instance,
            boot_id,
            epoch,
            sequence,
            wakes,
            scales,
            demand,
            replicas,
            in_flight,
        } = response;
        if region != self.region || instance != *peer {
            return Err(ForeignPeer { region, instance });
        }
        let Peers { role, others, demands, .. } = &mut self.peers;
        role.epoch_seen(epoch, now);
        let Some(other) = others.get_mut(peer).filter(|_| role.held() == Some(epoch)) else {
            return Ok(PeerChanges::default());
        };
        let has_woken = wakes != other.wakes;
        let (acknowledged, heard) = (Some((epoch, sequence)), Some(now));
        *other = OtherSpoke {
            address: other.address.clone(),
            acknowledged,
            heard,
            in_flight,
            can_scale: scales,
            wakes,
        };
        demands.record(peer, boot_id, demand, now);
        let replicas_changed = self.started_elsewhere(peer, &replicas);
        Ok(PeerChanges { replicas_changed, has_woken })
    }

    /// Applies a request of the spoke that scales the region. One with a lower epoch than the highest that this spoke
    /// has seen has no effect.
    ///
    /// # Errors
    ///
    /// If the request is of another region, or of this spoke itself.
    pub fn peer_requested(
        &mut self,
        request: &PeerRequest,
        now: Instant,
    ) -> Result<PeerReceipt, ForeignPeer> {
        let PeerRequest { region, instance, epoch, sequence, state, releases, wakes: _, wait } = request;
        if *region != self.region || *instance == self.instance {
            return Err(ForeignPeer { region: region.clone(), instance: instance.clone() });
        }
        let at_once = PeerReceipt { is_changed: false, wait: Duration::ZERO };
        if !self.peers.role.scaler_contacted(*epoch, *releases, now) {
            return Ok(at_once);
        }
        let known = self.peers.received.as_ref();
        let known = known.filter(|known| known.epoch == *epoch && known.scaler == *instance);
        let known = known.map(|known| known.sequence);
        match state {
            _ if known == Some(*sequence) => Ok(PeerReceipt { is_changed: false, wait: *wait }),
            // A request that was overtaken by a later one.
            _ if known > Some(*sequence) => Ok(at_once),
            // The scaler sends it when it learns that this spoke does not have it.
            None => Ok(at_once),
            Some(state) => {
                self.apply_shared(state, now);
                let (scaler, state) = (instance.clone(), state.clone());
                self.peers.received =
                    Some(ReceivedState { scaler, epoch: *epoch, sequence: *sequence, state });
                Ok(PeerReceipt { is_changed: true, wait: Duration::ZERO })
            }
        }
    }

    /// Returns the response to the last request of the spoke that scales; `None` before the first one.
    pub fn peer_response(&self, now: Instant) -> Option<PeerResponse> {
        let Peers { role, can_scale, received, replicas, wakes, .. } = &self.peers;
        let epoch = role.highest()?;
        let received = received.as_ref().filter(|received| received.epoch == epoch);
        Some(PeerResponse {
            region: self.region.clone(),
            instance: self.instance.clone(),
            boot_id: self.boot_id,
            epoch,
            sequence: received.map_or(0, |received| received.sequence),
            wakes: *wakes,
            scales: *can_scale && !self.draining,
            demand: self.spoke_demand(now),
            replicas: replicas.started(),
            in_flight: received.map(|received| self.in_flight_to(&received.state)).unwrap_or_default(),
        })
    }

    /// Returns the phase of a replica in the state that the scaler has shared.
    pub fn shared_phase(&self, endpoint: &HostPort) -> Option<ReplicaPhase> {
        let received = self.peers.received.as_ref()?;
        Some(received.state.replicas.get(endpoint)?.phase)
    }

    /// Returns whether another spoke is to drain the replicas of this one before it stops, because they end with it.
    pub fn awaits_handover(&self, now: Instant) -> bool {
        let Peers { role, others, replicas, .. } = &self.peers;
        let successor = |peer: &OtherSpoke| peer.can_scale && !peer.is_silent(now);
        let has_successor = role.hears_scaler(now) || role.held().is_some() && others.values().any(successor);
        replicas.any_ends_with_spoke() && has_successor
    }

    /// Returns the requests in flight to the draining replicas of a state.
    fn in_flight_to(&self, state: &SharedRegionState) -> BTreeMap<HostPort, u32> {
        let draining = state.replicas.iter().filter(|(_, replica)| replica.phase > ReplicaPhase::Serving);
        let counted = draining.filter_map(|(endpoint, _)| {
            let number = self.peers.replicas.number(endpoint)?;
            let in_flight = self.replicas.get(number)?.in_flight();
            (in_flight > 0).then(|| (endpoint.clone(), in_flight))
        });
        counted.collect()
    }

    /// Applies the replicas and start times of the region.
    fn apply_shared(&mut self, state: &SharedRegionState, now: Instant) {
        let names: BTreeSet<_> = state.deployments.keys().cloned().collect();
        self.retain_provisioning(&names, now);
        self.track_further_demand(&names);
        for (name, deployment) in &state.deployments {
            self.set_provisioning(name, deployment.provisioning.clone(), now);
            self.set_start_time(name, deployment.start_time);
            self.set_replica_max(name, deployment.max);
        }
        let failures = state.deployments.iter();
        self.failed
            .set_scaled(failures.map(|(name, deployment)| (name.clone(), deployment.failures.clone())));
        self.apply_shared_replicas(&state.replicas);
    }
}

#[cfg(test)]
mod tests;
