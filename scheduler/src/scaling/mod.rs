//! Autoscaling of the deployments in a region.
//!
//! ```text
//!  hub's route table (snapshot on disk) ──▶ desired deployments and scaling settings ─┐
//!  Spoke, updated by the ingress ─────────▶ arrivals, queue, ready replicas ──────────┼─▶ Scaler ─▶ step ─▶ Actuator
//!  Actuator ──────────────────────────────▶ started, ready and crashed replicas ──────┘
//! ```
//!
//! The loop runs every [`TICK`], and at once when a request arrives for a deployment without a ready replica, when a
//! replica becomes ready or dies, and when there is a newer table. The decisions are in `scheduler_core::scale`;
//! [`region`] gathers their inputs and applies them. It scales up whether or not the hub is reachable, and down only
//! while it is ([`ScaleDownBlocker::HubUnreachable`](scheduler_core::scale::ScaleDownBlocker)).
//!
//! One spoke of a region scales, the one that holds the scaler lease; the loop of the others only stops the replicas that
//! the scaler has drained ([`shared`]).

pub(crate) mod events;
mod region;
mod scaler;
mod shared;
mod sharing;

use std::fs::File;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use futures_util::future::BoxFuture;
use resolver::Resolver;
use scheduler_client::hub::{ControlPlaneClient, HubClientError};
use scheduler_client::snapshot::lock_directory;
use scheduler_core::scale::TICK;
use scheduler_core::spoke::Spoke;
use supervision::task::{essential, supervise};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::actuator::kubernetes::KubernetesActuator;
use crate::actuator::process::ProcessActuator;
use crate::actuator::{Actuator, ActuatorStatus, DeploymentTargets};
use crate::agent::table::{FollowedTable, TableFollower};
use crate::config::{ActuatorConfig, ScalingConfig, SpokeConfig};
use region::RegionScaler;

/// File name of the route table's snapshot.
const SNAPSHOT: &str = "routes";
/// Time limit for the first status of the replicas in the file, before others are ordered in their place.
const FIRST_STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of checks whether draining replicas have finished, while there are any; the remaining start times are
/// updated at the same interval.
const SETTLE_PERIOD: Duration = Duration::from_millis(50);
/// Minimum delay between two iterations: hundreds of simultaneous requests need the same one replica.
const ITERATION_DELAY: Duration = Duration::from_millis(10);

/// Notifications between the scaler and the region's ingress.
#[derive(Clone, Debug, Default)]
pub struct ScalingSignals {
    /// Notified by the ingress and the agent: a request arrived for a deployment without a ready replica, another spoke
    /// has sent news, or the scaler lease has changed hands.
    pub wake: Arc<Notify>,
    /// Notified by the scaler: replicas were added or removed.
    pub changed: Arc<Notify>,
    /// Sequence number of the state to share with the other spokes, set by the scaler.
    pub shared: Arc<watch::Sender<u64>>,
}

/// Error that prevents autoscaling.
#[derive(Debug, thiserror::Error)]
pub enum ScalingError {
    /// The directory of the replicas' files cannot be created. The spoke does not start.
    #[error("scaling.dir = \"{dir}\" cannot be used: {error}", dir = dir.display())]
    Folder {
        /// The configured folder.
        dir: std::path::PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The actuator cannot be created; the text has the cause. The spoke does not start.
    #[error("replicas cannot be started: {0}")]
    Actuator(io::Error),
    /// A URL in `hub` or the identity cannot be used for requests to hubs. The spoke does not start.
    #[error("cannot create the HTTP client for the hub: {0}")]
    Client(#[from] HubClientError),
}

/// Autoscaler of a region.
pub struct Autoscaler {
    config: SpokeConfig,
    /// File of the route table's snapshot.
    snapshot: PathBuf,
    /// The directory has one user: two spokes would stop each other's replicas.
    lock: File,
    client: ControlPlaneClient,
    actuator: AnyActuator,
}

/// Actuator of the configured kind.
enum AnyActuator {
    Process(ProcessActuator),
    Kubernetes(KubernetesActuator),
}

impl AnyActuator {
    /// Returns the maximum number of replicas that it can run; `None` if there is no limit besides that of each deployment.
    fn replicas_max(&self) -> Option<u32> {
        match self {
            AnyActuator::Process(process) => process.replicas_max(),
            AnyActuator::Kubernetes(_) => None,
        }
    }
}

impl Autoscaler {
    /// Creates the autoscaler of the region; `None` if the file has no `[scaling]`.
    ///
    /// # Errors
    ///
    /// When it cannot run.
    pub fn prepare(config: &SpokeConfig, resolver: &Resolver) -> Result<Option<Autoscaler>, ScalingError> {
        let Some(ScalingConfig { dir, actuator }) = config.scaling.clone() else {
            return Ok(None);
        };
        let usable = std::fs::create_dir_all(&dir)
            .and_then(|()| dir.canonicalize())
            .and_then(|dir| Ok((lock_directory(&dir)?, dir)));
        let (lock, dir) = usable.map_err(|error| ScalingError::Folder { dir, error })?;
        let client = ControlPlaneClient::new(&config.hub, &config.transport, resolver.clone())?;
        let snapshot = dir.join(SNAPSHOT);
        let actuator = match actuator {
            ActuatorConfig::Process(process) => {
                ProcessActuator::new(process, dir, config.region.clone(), &config.transport)
                    .map(AnyActuator::Process)
            }
            ActuatorConfig::Kubernetes(cluster) => {
                KubernetesActuator::new(cluster, &config.transport).map(AnyActuator::Kubernetes)
            }
        };
        let actuator = actuator.map_err(ScalingError::Actuator)?;
        Ok(Some(Autoscaler { config: config.clone(), snapshot, lock, client, actuator }))
    }

    /// Scales until `shutdown`, and then stops the replicas that it has started.
    pub async fn run(
        self,
        spoke: Arc<Mutex<Spoke>>,
        signals: ScalingSignals,
        shutdown: impl Future<Output = ()> + Send,
    ) {
        self.boxed(spoke, signals, Box::pin(shutdown)).await;
    }

    /// [`run`](Autoscaler::run) without type parameters, so that scaling is compiled once, in this crate.
    fn boxed(
        self,
        spoke: Arc<Mutex<Spoke>>,
        signals: ScalingSignals,
        shutdown: BoxFuture<'_, ()>,
    ) -> BoxFuture<'_, ()> {
        Box::pin(self.run_until(spoke, signals, shutdown))
    }

    async fn run_until(self, spoke: Arc<Mutex<Spoke>>, signals: ScalingSignals, shutdown: BoxFuture<'_, ()>) {
        let Autoscaler { config, snapshot, lock: _lock, client, actuator } = self;
        let source = TableFollower {
            client,
            snapshot: Some(snapshot),
            catalogue: config.catalogue.clone(),
            spoke: spoke.clone(),
        };
        let followed = watch::Sender::new(source.restore());
        let tables = followed.subscribe();
        let (targets, desired) = watch::channel(DeploymentTargets::default());
        let (status, running) = watch::channel(ActuatorStatus::default());
        let mut follower_task = JoinSet::new();
        let follower = source.clone();
        follower_task.spawn(supervise("route table", move || {
            let (follower, followed) = (follower.clone(), followed.clone());
            async move { follower.follow(&followed).await }
        }));
        let replicas_max = actuator.replicas_max();
        let actuator_task = match actuator {
            AnyActuator::Process(process) => {
                tokio::spawn(essential("actuator", process.run(desired, status)))
            }
            AnyActuator::Kubernetes(cluster) => {
                tokio::spawn(essential("actuator", cluster.run(desired, status)))
            }
        };
        let static_replicas = {
            let mut spoke = spoke.lock();
            spoke.set_can_scale();
            let known = spoke.endpoints().into_iter();
            known
                .filter(|(_, endpoint)| config.replicas.contains(endpoint))
                .map(|(number, _)| number)
                .collect()
        };
        let region = RegionScaler::new(&config, spoke, &signals, static_replicas, replicas_max, targets);
        tokio::select! {
            () = run_loop(region, signals, tables, running) => {}
            () = shutdown => {}
        }
        // The sender of the targets is dropped: the actuator stops its replicas and ends.
        actuator_task.await.ok();
        follower_task.shutdown().await;
        source.deregister().await;
    }
}

/// Runs the scaling loop; returns only when the actuator has ended.
async fn run_loop(
    mut region: RegionScaler,
    signals: ScalingSignals,
    mut tables: watch::Receiver<FollowedTable>,
    mut running: watch::Receiver<ActuatorStatus>,
) {
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut settle = interval(SETTLE_PERIOD);
    settle.set_missed_tick_behavior(MissedTickBehavior::Delay);
    if running.wait_for(|running| running.is_initialized).await.is_err() {
        return;
    }
    first_status(&region).await;
    loop {
        let now = Instant::now();
        region.follow(&tables.borrow_and_update().clone());
        region.observe(&running.borrow_and_update().clone(), now);
        if region.update_role(now) {
            region.scale(now);
        } else {
            region.stand_by(now);
        }
        loop {
            tokio::select! {
                _ = tick.tick() => break,
                () = signals.wake.notified() => break,
                changed = tables.changed() => match changed {
                    Ok(()) => break,
                    // The follower is a task that is only aborted, together with this one.
                    Err(_) => return,
                },
                changed = running.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                _ = settle.tick(), if region.is_unsettled() => region.settle(Instant::now()),
            }
        }
        sleep(ITERATION_DELAY).await;
    }
}

/// Waits for the first status of the replicas in the file, whose state is unknown until then.
async fn first_status(region: &RegionScaler) {
    let all = async {
        while region.awaits_first_status(Instant::now()) {
            sleep(SETTLE_PERIOD).await;
        }
    };
    // Replicas without a status by then count as not running.
    tokio::time::timeout(FIRST_STATUS_TIMEOUT, all).await.ok();
}
