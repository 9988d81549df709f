//! Exchange between the spokes of one region.
//!
//! The spoke that holds the scaler lease ([`crate::scaler`]) sends its epoch and the replicas of the region to every
//! other spoke, which responds with its demand and the replicas that it has started itself. The receiver holds the
//! request for up to [`PeerRequest::wait`] unless it has news, so a request that waits for a replica reaches the scaler
//! at once, and a new state reaches the receiver at once, because the sender then sends the next request without
//! waiting for the response.
//!
//! Every message may be lost or repeated. Arrivals are therefore totals since the start of a spoke, and a state has a
//! sequence number that the receiver returns.

use std::collections::BTreeMap;
use std::time::Duration;

use regions::deployment::MAX_DEPLOYMENTS;
use regions::deployment::scaling::REPLICAS_MAX;
use regions::route::MAX_INSTANCES;
use regions::{DeploymentName, HostPort, InstanceName, RegionId};
use serde::{Deserialize, Serialize};

use super::scaler::{ScalerEpoch, ScalerEpochV1};
use super::start_failure::{
    DeploymentFailures, FailedModel, FailedModelV1, bounded_waiting, read_failed_model,
};
use super::{MessageVersion, VERSION, WireError, entries, parsed, reject_too_many};

/// Maximum time for which a receiver holds a request.
pub const PEER_WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum number of replicas of one spoke, all of which may be of one deployment.
pub const SPOKE_REPLICAS_MAX: usize = REPLICAS_MAX as usize;
/// Maximum number of replicas of a region in a message: those of all of its spokes.
pub const REGION_REPLICAS_MAX: usize = SPOKE_REPLICAS_MAX * MAX_INSTANCES;

/// Maximum bytes of the texts of failures in a state; each has up to 512 bytes. Texts of further failures are empty.
const FAILURE_TEXTS_BYTES_MAX: usize = 256 << 10;
/// Maximum bytes of the references, tasks and engines of failed models in a state: 400 bytes for both models of each of ten
/// thousand deployments, and a quarter of the 32 MiB that a spoke reads. Those of further failures are empty: their deployments have
/// failed, too, but the receiver does not know of which model.
const FAILED_MODELS_BYTES_MAX: usize = 8 << 20;

/// Request of the spoke that scales the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRequest {
    /// Region of the sender.
    pub region: RegionId,
    /// Name of the sender within the region.
    pub instance: InstanceName,
    /// Epoch of its scaler lease.
    pub epoch: ScalerEpoch,
    /// Sequence number of its state, which rises with each change within the epoch. The first is 1.
    pub sequence: u64,
    /// The state; absent if the receiver has it.
    pub state: Option<SharedRegionState>,
    /// Whether the sender gives up the lease, so that another spoke should ask the hub for it now.
    pub releases: bool,
    /// The receiver's last known [`PeerResponse::wakes`]; the receiver responds at once if there are more.
    pub wakes: u64,
    /// Time for which to hold the request.
    pub wait: Duration,
}

/// Replicas and start times of a region, as its scaler knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedRegionState {
    /// Deployments that the region scales.
    pub deployments: BTreeMap<DeploymentName, SharedDeployment>,
    /// Ready and draining replicas.
    pub replicas: BTreeMap<HostPort, SharedReplica>,
}

/// Scaling of one deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedDeployment {
    /// Desired number of replicas.
    pub desired: u32,
    /// Maximum number of replicas.
    pub max: u32,
    /// Remaining start time of each replica that is being provisioned.
    pub provisioning: Vec<Duration>,
    /// Start time of a replica that would be ordered on demand; `None` if none would be.
    pub start_time: Option<Duration>,
    /// Models of which no replica can start, or the reason for which replicas wait.
    pub failures: DeploymentFailures,
}

/// Replica that a spoke has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedReplica {
    /// Deployment for which it was started. What it runs is in its own status.
    pub deployment: DeploymentName,
    /// Whether spokes may use it.
    pub phase: ReplicaPhase,
}

/// Phase of a replica, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplicaPhase {
    /// It gets requests.
    Serving,
    /// It gets no new requests.
    Draining,
    /// No other spoke has a request in flight to it, so the spoke that started it may stop it.
    Drained,
}

impl ReplicaPhase {
    const ALL: [ReplicaPhase; 3] = [ReplicaPhase::Serving, ReplicaPhase::Draining, ReplicaPhase::Drained];

    /// Returns the text of the messages.
    fn as_str(self) -> &'static str {
        match self {
            ReplicaPhase::Serving => "serving",
            ReplicaPhase::Draining => "draining",
            ReplicaPhase::Drained => "drained",
        }
    }

    /// Returns the phase with this text. In a phase that only a later version knows a replica gets no new requests and is not
    /// stopped, so that the other replicas of the state are used.
    fn of_text(text: &str) -> ReplicaPhase {
        ReplicaPhase::ALL.into_iter().find(|phase| phase.as_str() == text).unwrap_or(ReplicaPhase::Draining)
    }
}

/// Response of another spoke of the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerResponse {
    /// Region of the responder.
    pub region: RegionId,
    /// Name of the responder within the region.
    pub instance: InstanceName,
    /// Random number drawn at its start; its totals begin again with another one.
    pub boot_id: u64,
    /// Highest epoch that it has seen. If it is higher than that of the request, the request had no effect.
    pub epoch: ScalerEpoch,
    /// Sequence number of the state that it uses; 0 if it has none of this epoch.
    pub sequence: u64,
    /// Number of times that a request found no replica and none was being started.
    pub wakes: u64,
    /// Whether it can start replicas.
    pub scales: bool,
    /// Demand by deployment; deployments without any are omitted.
    pub demand: BTreeMap<DeploymentName, SpokeDemand>,
    /// Ready replicas that it has started itself.
    pub replicas: BTreeMap<HostPort, DeploymentName>,
    /// Its requests in flight to replicas that drain; replicas without any are omitted.
    pub in_flight: BTreeMap<HostPort, u32>,
}

/// Demand for one deployment at one spoke.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpokeDemand {
    /// Tokens that have arrived since the start of the spoke.
    pub arrived_total: u64,
    /// Those of them that were spillover of another region.
    pub spillover_total: u64,
    /// Tokens that are queued or being computed at the replicas, for all spokes.
    pub pending: u64,
    /// Requests that were sent to a replica and have not ended.
    pub in_flight: u32,
    /// Requests that are held for a replica.
    pub held: u32,
    /// Their tokens.
    pub held_tokens: u64,
}

/// `POST /spoke/v1/peers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerRequestV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the sender.
    pub region: String,
    /// Name of the sender within the region.
    pub instance: String,
    /// Epoch of its scaler lease.
    pub epoch: ScalerEpochV1,
    /// Sequence number of its state.
    pub sequence: u64,
    /// The state. Absent if the receiver has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<SharedStateV1>,
    /// Whether the sender gives up the lease. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub releases: bool,
    /// The receiver's last known number of wakes.
    pub wakes: u64,
    /// Time for which to hold the request, in milliseconds.
    pub wait_ms: u64,
}

/// State of a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedStateV1 {
    /// Deployments that the region scales.
    pub deployments: Vec<SharedDeploymentV1>,
    /// Ready and draining replicas.
    pub replicas: Vec<SharedReplicaV1>,
}

/// Scaling of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDeploymentV1 {
    /// Name of the deployment.
    pub name: String,
    /// Desired number of replicas.
    pub desired: u32,
    /// Maximum number of replicas.
    pub max: u32,
    /// Remaining start times, in milliseconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub provisioning_ms: Vec<u64>,
    /// Start time of a replica ordered on demand, in milliseconds. Absent if none would be ordered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_ms: Option<u64>,
    /// The served model, if no replica of it can start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailedModelV1>,
    /// The next model, if no replica of it can start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_next: Option<FailedModelV1>,
    /// Reason for which replicas are not started now. Absent if none waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
}

/// Replica that a spoke has started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedReplicaV1 {
    /// Its address.
    pub endpoint: String,
    /// Deployment for which it was started.
    pub deployment: String,
    /// `serving`, `draining` or `drained`. Spokes of later versions may send other ones.
    pub phase: String,
}

/// Response to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerResponseV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the responder.
    pub region: String,
    /// Name of the responder within the region.
    pub instance: String,
    /// Random number drawn at its start.
    pub boot_id: u64,
    /// Highest epoch that it has seen.
    pub epoch: ScalerEpochV1,
    /// Sequence number of the state that it uses.
    pub sequence: u64,
    /// Number of times that a request found no replica.
    pub wakes: u64,
    /// Whether it can start replicas.
    pub scales: bool,
    /// Demand by deployment.
    pub demand: Vec<SpokeDemandV1>,
    /// Ready replicas that it has started itself.
    pub replicas: Vec<StartedReplicaV1>,
    /// Its requests in flight to replicas that drain.
    pub in_flight: Vec<ReplicaInFlightV1>,
}

/// Demand for one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpokeDemandV1 {
    /// Name of the deployment.
    pub name: String,
    /// Tokens that have arrived since the start of the spoke.
    pub arrived_total: u64,
    /// Those of them that were spillover.
    pub spillover_total: u64,
    /// Tokens that are queued or being computed at the replicas.
    pub pending: u64,
    /// Requests that were sent to a replica and have not ended.
    pub in_flight: u32,
    /// Requests that are held for a replica.
    pub held: u32,
    /// Their tokens.
    pub held_tokens: u64,
}

/// Ready replica of the responder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedReplicaV1 {
    /// Its address.
    pub endpoint: String,
    /// Deployment for which it was started.
    pub deployment: String,
}

/// Requests in flight to one replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaInFlightV1 {
    /// Address of the replica.
    pub endpoint: String,
    /// Number of requests.
    pub in_flight: u32,
}

/// Returns a duration in whole milliseconds.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl From<&PeerRequest> for PeerRequestV1 {
    fn from(request: &PeerRequest) -> PeerRequestV1 {
        let PeerRequest { region, instance, epoch, sequence, state, releases, wakes, wait } = request;
        PeerRequestV1 {
            version: VERSION,
            region: region.to_string(),
            instance: instance.to_string(),
            epoch: (*epoch).into(),
            sequence: *sequence,
            state: state.as_ref().map(SharedStateV1::from),
            releases: *releases,
            wakes: *wakes,
            wait_ms: millis(*wait),
        }
    }
}

impl TryFrom<PeerRequestV1> for PeerRequest {
    type Error = WireError;

    fn try_from(wire: PeerRequestV1) -> Result<PeerRequest, WireError> {
        let PeerRequestV1 { version: _, region, instance, epoch, sequence, state, releases, wakes, wait_ms } =
            wire;
        if sequence == 0 {
            return Err(WireError::new("sequence", "is 0; the first state has 1"));
        }
        Ok(PeerRequest {
            region: parsed("region", &region)?,
            instance: parsed("instance", &instance)?,
            epoch: epoch.into(),
            sequence,
            state: state.map(SharedRegionState::try_from).transpose()?,
            releases,
            wakes,
            wait: Duration::from_millis(wait_ms).min(PEER_WAIT_MAX),
        })
    }
}

/// Remaining bytes of the failures in a state. Each failure has its reason, because a spoke that does not know it would hold
/// requests that no replica will serve.
struct FailureBudget {
    texts: usize,
    models: usize,
}

impl FailureBudget {
    /// Converts a failure to its wire form, with what the remaining bytes allow besides its reason.
    fn failed_model(&mut self, failed: &FailedModel) -> FailedModelV1 {
        let mut wire = FailedModelV1::from(failed);
        if !take_bytes(&mut self.texts, &wire.failure.message) {
            wire.failure.message.clear();
        }
        if !take_bytes(&mut self.models, &(&wire.model, &wire.task, &wire.engine)) {
            wire.model.clear();
            (wire.task, wire.engine) = (None, None);
        }
        wire
    }
}

/// Takes the bytes of a value in a message; returns whether there were as many left.
fn take_bytes(left: &mut usize, value: &impl Serialize) -> bool {
    let rest = serde_json::to_vec(value).ok().and_then(|text| left.checked_sub(text.len()));
    *left = rest.unwrap_or(*left);
    rest.is_some()
}

impl From<&SharedRegionState> for SharedStateV1 {
    fn from(state: &SharedRegionState) -> SharedStateV1 {
        let SharedRegionState { deployments, replicas } = state;
        let mut budget = FailureBudget { texts: FAILURE_TEXTS_BYTES_MAX, models: FAILED_MODELS_BYTES_MAX };
        let deployments = deployments.iter().map(|(name, deployment)| {
            let SharedDeployment { desired, max, provisioning, start_time, failures } = deployment;
            let DeploymentFailures { served, next, waiting } = failures;
            let failed = served.as_ref().map(|failed| budget.failed_model(failed));
            let failed_next = next.as_ref().map(|failed| budget.failed_model(failed));
            let waiting = waiting.clone().map(bounded_waiting);
            SharedDeploymentV1 {
                name: name.to_string(),
                desired: *desired,
                max: *max,
                provisioning_ms: provisioning.iter().copied().map(millis).collect(),
                start_ms: start_time.map(millis),
                failed,
                failed_next,
                waiting,
            }
        });
        let replicas =
            replicas.iter().map(|(endpoint, SharedReplica { deployment, phase })| SharedReplicaV1 {
                endpoint: endpoint.to_string(),
                deployment: deployment.to_string(),
                phase: phase.as_str().to_owned(),
            });
        SharedStateV1 { deployments: deployments.collect(), replicas: replicas.collect() }
    }
}

impl TryFrom<SharedStateV1> for SharedRegionState {
    type Error = WireError;

    fn try_from(
        SharedStateV1 { deployments, replicas }: SharedStateV1,
    ) -> Result<SharedRegionState, WireError> {
        let deployments =
            entries("state.deployments", ".name", deployments, MAX_DEPLOYMENTS, |at, deployment| {
                let SharedDeploymentV1 {
                    name,
                    desired,
                    max,
                    provisioning_ms,
                    start_ms,
                    failed,
                    failed_next,
                    waiting,
                } = deployment;
                let read = |what: &str, wire: Option<FailedModelV1>| {
                    wire.map(|wire| read_failed_model(&format!("{at}.{what}"), wire)).transpose()
                };
                let failures = DeploymentFailures {
                    served: read("failed", failed)?,
                    next: read("failed_next", failed_next)?,
                    waiting: waiting.map(bounded_waiting),
                };
                let provisioning = format!("{at}.provisioning_ms");
                reject_too_many(&provisioning, provisioning_ms.len(), REGION_REPLICAS_MAX)?;
                let deployment = SharedDeployment {
                    desired,
                    max,
                    provisioning: provisioning_ms.into_iter().map(Duration::from_millis).collect(),
                    start_time: start_ms.map(Duration::from_millis),
                    failures,
                };
                Ok((parsed(format!("{at}.name"), &name)?, deployment))
            })?;
        let replicas =
            entries("state.replicas", ".endpoint", replicas, REGION_REPLICAS_MAX, |at, replica| {
                let SharedReplicaV1 { endpoint, deployment, phase } = replica;
                let deployment = parsed(format!("{at}.deployment"), &deployment)?;
                let phase = ReplicaPhase::of_text(&phase);
                Ok((parsed(format!("{at}.endpoint"), &endpoint)?, SharedReplica { deployment, phase }))
            })?;
        Ok(SharedRegionState { deployments, replicas })
    }
}

impl From<&PeerResponse> for PeerResponseV1 {
    fn from(response: &PeerResponse) -> PeerResponseV1 {
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
        let demand = demand.iter().map(|(name, demand)| {
            let SpokeDemand { arrived_total, spillover_total, pending, in_flight, held, held_tokens } =
                *demand;
            SpokeDemandV1 {
                name: name.to_string(),
                arrived_total,
                spillover_total,
                pending,
                in_flight,
                held,
                held_tokens,
            }
        });
        let replicas = replicas.iter().map(|(endpoint, deployment)| StartedReplicaV1 {
            endpoint: endpoint.to_string(),
            deployment: deployment.to_string(),
        });
        let in_flight = in_flight.iter().map(|(endpoint, in_flight)| ReplicaInFlightV1 {
            endpoint: endpoint.to_string(),
            in_flight: *in_flight,
        });
        PeerResponseV1 {
            version: VERSION,
            region: region.to_string(),
            instance: instance.to_string(),
            boot_id: *boot_id,
            epoch: (*epoch).into(),
            sequence: *sequence,
            wakes: *wakes,
            scales: *scales,
            demand: demand.collect(),
            replicas: replicas.collect(),
            in_flight: in_flight.collect(),
        }
    }
}

impl TryFrom<PeerResponseV1> for PeerResponse {
    type Error = WireError;

    fn try_from(wire: PeerResponseV1) -> Result<PeerResponse, WireError> {
        let PeerResponseV1 {
            version: _,
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
        } = wire;
        let demand = entries("demand", ".name", demand, MAX_DEPLOYMENTS, |at, demand| {
            let SpokeDemandV1 { name, arrived_total, spillover_total, pending, in_flight, held, held_tokens } =
                demand;
            let demand =
                SpokeDemand { arrived_total, spillover_total, pending, in_flight, held, held_tokens };
            Ok((parsed(format!("{at}.name"), &name)?, demand))
        })?;
        let replicas = entries("replicas", ".endpoint", replicas, SPOKE_REPLICAS_MAX, |at, replica| {
            let StartedReplicaV1 { endpoint, deployment } = replica;
            let deployment: DeploymentName = parsed(format!("{at}.deployment"), &deployment)?;
            Ok((parsed(format!("{at}.endpoint"), &endpoint)?, deployment))
        })?;
        let in_flight = entries("in_flight", ".endpoint", in_flight, REGION_REPLICAS_MAX, |at, replica| {
            let ReplicaInFlightV1 { endpoint, in_flight } = replica;
            Ok((parsed(format!("{at}.endpoint"), &endpoint)?, in_flight))
        })?;
        Ok(PeerResponse {
            region: parsed("region", &region)?,
            instance: parsed("instance", &instance)?,
            boot_id,
            epoch: epoch.into(),
            sequence,
            wakes,
            scales,
            demand,
            replicas,
            in_flight,
        })
    }
}

#[cfg(test)]
mod tests;
