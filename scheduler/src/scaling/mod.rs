//! Scales the deployments that should run in a region, for as long as its spoke lives.
//!
//! ```text
//!  hub's route table (on disk as well) ──▶ what should run here, with its knobs ─┐
//!  the Spoke that the ingress feeds ─────▶ what arrives, waits, is ready ────────┼─▶ Scaler ─▶ step ─▶ Actuator
//!  the Actuator ─────────────────────────▶ who was started, is ready, has died ──┘
//! ```
//!
//! It looks every [`TICK`], and at once when somebody asks for what has no replica, when a replica has become ready or has
//! died, and when there is a newer table. What is decided is in `scheduler_core::scale`; [`region`] puts together what is
//! seen and carries out what is decided. Up it goes whether or not anybody outside is to be reached; down only while the hub
//! is ([`ScaleDownBlocker::HubUnreachable`](scheduler_core::scale::ScaleDownBlocker)).

mod deployed;
pub(crate) mod events;
mod region;

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use scheduler_core::scale::TICK;
use scheduler_core::spoke::Spoke;
use supervision::task::{essential, supervise};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::actuator::kubernetes::Kubernetes;
use crate::actuator::process::Process;
use crate::actuator::{Actuator, Running, Targets};
use crate::agent::table::{Followed, Source};
use crate::config::{ActuatorConfig, ScalingConfig, SpokeConfig};
use region::Region;

/// The file of the route table.
const SNAPSHOT: &str = "routes";
/// How long the replicas of the region's file may take to say something before any is ordered in their place.
const FIRST_WORDS: Duration = Duration::from_secs(2);
/// How often it is looked whether somebody who was let go has finished, while there is somebody; what is left of starts is
/// reckoned as often.
const SETTLE_PERIOD: Duration = Duration::from_millis(50);
/// Between two looks that somebody asked for: hundreds who ask at once want the same one replica.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// How the scaler and the region's ingress reach each other at once.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    /// Told by the ingress: somebody asks for a deployment that has no replica ready.
    pub wake: Arc<Notify>,
    /// Told by the scaler: replicas have come or gone.
    pub changed: Arc<Notify>,
}

/// Why a region cannot be scaled.
#[derive(Debug, thiserror::Error)]
pub enum ScalingError {
    /// The folder cannot be made.
    #[error("scaling.dir = \"{dir}\" cannot be used: {error}", dir = dir.display())]
    Folder {
        /// Which.
        dir: std::path::PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Nobody can start replicas.
    #[error("replicas cannot be started: {0}")]
    Actuator(io::Error),
    /// The client that asks the hub cannot be made.
    #[error("the HTTP client for the hub cannot be made: {0}")]
    Client(#[from] reqwest::Error),
}

/// What scales a region.
pub struct Scaling {
    config: SpokeConfig,
    /// Where the route table is kept.
    snapshot: PathBuf,
    client: reqwest::Client,
    actuator: Acts,
}

/// Whoever starts and stops replicas here.
enum Acts {
    Process(Process),
    Kubernetes(Kubernetes),
}

impl Scaling {
    /// What scales the region of this file; nothing where nobody said who starts replicas.
    ///
    /// # Errors
    ///
    /// When it could not run.
    pub fn prepare(config: &SpokeConfig) -> Result<Option<Scaling>, ScalingError> {
        let Some(ScalingConfig { dir, actuator }) = config.scaling.clone() else {
            return Ok(None);
        };
        let usable = std::fs::create_dir_all(&dir).and_then(|()| dir.canonicalize());
        let dir = usable.map_err(|error| ScalingError::Folder { dir, error })?;
        let client = reqwest::Client::builder().no_proxy().build()?;
        let snapshot = dir.join(SNAPSHOT);
        let actuator = match actuator {
            ActuatorConfig::Process(process) => {
                Process::new(process, dir, config.region.clone()).map(Acts::Process)
            }
            ActuatorConfig::Kubernetes(cluster) => Kubernetes::new(cluster).map(Acts::Kubernetes),
        };
        let actuator = actuator.map_err(ScalingError::Actuator)?;
        Ok(Some(Scaling { config: config.clone(), snapshot, client, actuator }))
    }

    /// Scales until `shutdown`, and then stops the replicas that it has started.
    pub async fn run(self, spoke: Arc<Mutex<Spoke>>, signals: Signals, shutdown: impl Future<Output = ()>) {
        let Scaling { config, snapshot, client, actuator } = self;
        let source = Source {
            hub: config.hub.clone(),
            fleet: config.fleet.clone(),
            snapshot: Some(snapshot),
            catalogue: config.catalogue.clone(),
            spoke: spoke.clone(),
        };
        let followed = watch::Sender::new(source.restore());
        let tables = followed.subscribe();
        let (targets, wanted) = watch::channel(Targets::default());
        let (found, running) = watch::channel(Running::default());
        let mut following = JoinSet::new();
        let (follower, followers_client) = (Arc::new(source.clone()), client.clone());
        following.spawn(supervise("route table", move || {
            let (follower, client, followed) = (follower.clone(), followers_client.clone(), followed.clone());
            async move { follower.follow(&client, &followed).await }
        }));
        let acting = match actuator {
            Acts::Process(process) => tokio::spawn(essential("actuator", process.run(wanted, found))),
            Acts::Kubernetes(cluster) => tokio::spawn(essential("actuator", cluster.run(wanted, found))),
        };
        let others = spoke.lock().endpoints();
        let others = others.into_keys().collect();
        let region = Region::new(&config, spoke, signals.changed.clone(), others, targets);
        tokio::select! {
            () = watch_over(region, signals, tables, running) => {}
            () = shutdown => {}
        }
        // The region, and with it the word of what should be, is gone: whoever acts stops what it has started, and ends.
        acting.await.ok();
        following.shutdown().await;
        source.farewell(&client).await;
    }
}

/// Looks and acts for ever; ends only when whoever acts has.
async fn watch_over(
    mut region: Region,
    signals: Signals,
    mut tables: watch::Receiver<Followed>,
    mut running: watch::Receiver<Running>,
) {
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut settle = interval(SETTLE_PERIOD);
    settle.set_missed_tick_behavior(MissedTickBehavior::Delay);
    if running.wait_for(|running| running.surveyed).await.is_err() {
        return;
    }
    first_words(&region).await;
    loop {
        let now = Instant::now();
        region.follow(&tables.borrow_and_update().clone());
        region.meet(&running.borrow_and_update().clone(), now);
        region.look(now);
        loop {
            tokio::select! {
                _ = tick.tick() => break,
                () = signals.wake.notified() => break,
                changed = tables.changed() => match changed {
                    Ok(()) => break,
                    // Whoever follows is a task that is only ever aborted, with this one.
                    Err(_) => return,
                },
                changed = running.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                _ = settle.tick(), if region.is_unsettled() => region.settle(Instant::now()),
            }
        }
        sleep(LOOK_PAUSE).await;
    }
}

/// Until those whom somebody else started have said something, nobody knows whether they are there.
async fn first_words(region: &Region) {
    let all = async {
        while region.others_are_unheard(Instant::now()) {
            sleep(SETTLE_PERIOD).await;
        }
    };
    // Who has said nothing by then is not there.
    tokio::time::timeout(FIRST_WORDS, all).await.ok();
}
