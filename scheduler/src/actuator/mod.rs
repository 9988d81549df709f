//! Actuators, which start and stop replicas.
//!
//! The scaling loop and an actuator exchange *desired* and *observed* state, not commands: [`DeploymentTargets`] in one
//! direction and [`ActuatorStatus`] in the other, each the latest only. So neither waits for the other, a lost update
//! is repaired by the next, and an actuator that was delayed reconciles to the present targets, not to past ones. An
//! actuator terminates no replica that is not named in [`DeploymentTarget::stop`]; those named are drained.
//!
//! * [`process`]: replicas are processes on the spoke's machine.
//! * [`kubernetes`]: replicas are pods of a cluster's workloads.

pub(crate) mod kubernetes;
pub(crate) mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Deployment, DeploymentName};
use replica_api::start_failure::StartFailureReport;
use scheduler_core::scale::start_failures::EndedStart;
use tokio::sync::watch;

/// Identifier of a replica in an actuator; never reused.
pub(crate) type ReplicaId = String;

/// Desired state by deployment. A deployment that is not listed should have no replicas.
pub(crate) type DeploymentTargets = BTreeMap<DeploymentName, DeploymentTarget>;

/// Desired state of one deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeploymentTarget {
    /// The deployment that the replicas serve.
    pub(crate) deployment: Arc<Deployment>,
    /// Desired number of replicas, without those that are stopping and those of `next`.
    pub(crate) replicas: u32,
    /// The deployment with its next model, and the desired number of its replicas.
    pub(crate) next: Option<(Arc<Deployment>, u32)>,
    /// Replicas to terminate: they are drained, or their drain timed out.
    pub(crate) stop: BTreeSet<ReplicaId>,
    /// Whether this spoke scales the region. If not, the actuator starts no replicas and writes no counts.
    pub(crate) is_scaled_here: bool,
}

/// Observed state.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActuatorStatus {
    /// Existing replicas were looked for. Until then the other fields are meaningless.
    pub(crate) is_initialized: bool,
    /// All replicas that were started and have not ended.
    pub(crate) replicas: BTreeMap<ReplicaId, RunningReplica>,
    /// Crashes by deployment.
    pub(crate) crashes: BTreeMap<DeploymentName, Crashes>,
    /// Starts that ended before readiness, by deployment and model.
    pub(crate) ended_starts: BTreeMap<ModelKey, EndedStarts>,
    /// Reasons for which replicas are not started before other ones end, by deployment and model.
    pub(crate) waiting: BTreeMap<ModelKey, String>,
}

/// Deployment and model: a model that cannot be loaded says nothing about the served one.
pub(crate) type ModelKey = (DeploymentName, String);

/// Returns the key of a deployment's model.
pub(crate) fn model_key(deployment: &Deployment) -> ModelKey {
    (deployment.name.clone(), format!("{:?}", deployment.model_spec()))
}

/// Starts of one model that ended before readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndedStarts {
    /// Number since the first one.
    pub(crate) count: u64,
    /// The last one. If several have ended since an earlier status, they count as ended with it.
    pub(crate) last: EndedStart,
}

/// Crashes: exits of a deployment's replicas that were not requested.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Crashes {
    /// Number since the spoke started.
    pub(crate) count: u64,
    /// Earliest restart of the last one.
    pub(crate) restart_at: Option<Instant>,
}

/// Running replica.
#[derive(Clone, Debug)]
pub(crate) struct RunningReplica {
    /// Deployment that the replica serves, as of its start.
    pub(crate) deployment: Arc<Deployment>,
    /// Time of its start, or of its discovery.
    pub(crate) since: Instant,
    /// Its endpoint, once it is ready.
    pub(crate) ready: Option<ReadyEndpoint>,
    /// Expected end of the download of its model, if it reports one.
    pub(crate) download_ends_at: Option<Instant>,
    /// It waits for another process on its machine that pulls its model, as it reports.
    pub(crate) waits_for_pull: bool,
    /// Failure that it reports, or that its platform reports about it, while it is not ready.
    pub(crate) failure: Option<StartFailureReport>,
    /// It may run an earlier model than that of `deployment`, so the failure of its start says nothing about that model.
    pub(crate) is_outdated: bool,
    /// Order of termination where the actuator cannot choose: the highest first.
    pub(crate) rank: u64,
}

/// Endpoint of a ready replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadyEndpoint {
    /// Address.
    pub(crate) endpoint: SocketAddr,
    /// Duration of the start, if it was observed.
    pub(crate) took: Option<Duration>,
}

/// Starts and stops replicas.
pub(crate) trait Actuator: Send + 'static {
    /// Reconciles the replicas with `targets` until its sender is dropped. Then stops the replicas, unless another
    /// system runs them.
    fn run(
        self,
        targets: watch::Receiver<DeploymentTargets>,
        running: watch::Sender<ActuatorStatus>,
    ) -> impl Future<Output = ()> + Send;
}
