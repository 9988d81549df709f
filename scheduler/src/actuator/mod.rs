//! Who starts and stops replicas.
//!
//! The scaling loop and an actuator tell each other *what should be* and *what is*, not what to do: [`Targets`] goes one
//! way and [`Running`] the other, each the newest only. So neither waits for the other, a word that got lost is said again by
//! the next, and an actuator that was away brings the world to what is wanted now, not to what was wanted then. An actuator
//! never lets a replica go that is not named in [`Target::stop`]: those are drained.
//!
//! * [`process`]: replicas are processes beside the spoke.
//! * [`kubernetes`]: replicas are pods of a cluster's workloads.

pub(crate) mod kubernetes;
pub(crate) mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Deployment, DeploymentName};
use tokio::sync::watch;

/// By which an actuator knows one replica; never given twice.
pub(crate) type ReplicaId = String;

/// What should be, by deployment. What is not named should not be.
pub(crate) type Targets = BTreeMap<DeploymentName, Target>;

/// What should be of one deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// What they serve and how.
    pub(crate) deployment: Arc<Deployment>,
    /// So many, beside those that stop and those of `next`.
    pub(crate) replicas: u32,
    /// The same deployment with the model that is to replace the one that is served, and how many replicas it should have.
    pub(crate) next: Option<(Arc<Deployment>, u32)>,
    /// These have finished what they had, or have had their time for it.
    pub(crate) stop: BTreeSet<ReplicaId>,
}

/// What is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Running {
    /// It was looked who is there already. Until then nothing here means anything.
    pub(crate) surveyed: bool,
    /// Every replica that was started and has not ended.
    pub(crate) replicas: BTreeMap<ReplicaId, Found>,
    /// How many have ended without being told to, by deployment, and the last of them.
    pub(crate) deaths: BTreeMap<DeploymentName, Deaths>,
}

/// Those of a deployment that ended without being told to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Deaths {
    /// Since the spoke started.
    pub(crate) count: u64,
    /// When the last of them may be replaced.
    pub(crate) restart_at: Option<Instant>,
}

/// One replica.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// What it serves, as it was when it was started.
    pub(crate) deployment: Arc<Deployment>,
    /// When it was started, or found.
    pub(crate) since: Instant,
    /// Where it can be reached, once it takes work.
    pub(crate) ready: Option<ReadyAt>,
    /// Where who goes first is not ours to choose: the highest.
    pub(crate) rank: u64,
}

/// A replica that takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadyAt {
    /// Where.
    pub(crate) endpoint: SocketAddr,
    /// How long it took to start, if that was seen.
    pub(crate) took: Option<Duration>,
}

/// Who starts and stops replicas.
pub(crate) trait Actuator: Send + 'static {
    /// Brings what is to what should be until `targets` ends. Then it stops those that nobody else looks after.
    fn run(
        self,
        targets: watch::Receiver<Targets>,
        running: watch::Sender<Running>,
    ) -> impl Future<Output = ()> + Send;
}
