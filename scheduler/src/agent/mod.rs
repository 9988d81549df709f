//! The agent: a region's voice at the hub.
//!
//! It registers, keeps the lease alive, says at once when something else is ready, and registers again when the hub has
//! forgotten it. With the lease goes what the region can do, and back comes how many replicas the hub wants kept. While the
//! hub is away it tries again, with growing pauses, for ever; nothing in the region waits for it, and it says so in the log
//! once and not at every attempt.
//!
//! What must not be seen in the region it learns by following the route table ([`table`]). Where somebody is there to start
//! replicas, that one follows it, to know as well what should run.
//!
//! The ingress of the same process owns the truth: both look at one [`Spoke`], which is locked for one question at a
//! time and never across an await.

mod backoff;
mod client;
pub(crate) mod table;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use regions::DeploymentName;
use scheduler_core::lease::{LeaseHolder, LeaseId};
use scheduler_core::registry::Registration;
use scheduler_core::spoke::Spoke;
use scheduler_core::wire::plan::floors_from_wire;
use scheduler_core::wire::registry::{KeepAliveV1, LeaseV1, RegionState, RegisterV1};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::config::SpokeConfig;
use crate::events::{FloorsRefused, HubBack, HubLost, HubPassedOver, LeaseLost, NotDeployed, Registered};
use client::{Client, NoAnswer};
use table::Source;

/// How often the agent looks whether something else is ready. A gateway hears of it in the next report anyway; the hub
/// hears of it before that.
const LOOK_PERIOD: Duration = Duration::from_millis(100);
/// What part of its time a lease is let run before it is kept alive: of the usual 5 s every 1.5 s, so that two attempts
/// in a row may fail.
const KEEP_ALIVE_PART: f64 = 0.3;
/// However short a lease is.
const KEEP_ALIVE_PERIOD_MIN: Duration = Duration::from_millis(10);
/// How long leaving may take. If the hub is away, the lease runs out by itself.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why an agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The client that asks the hub cannot be made.
    #[error("the HTTP client for the hub cannot be made: {0}")]
    Client(#[from] reqwest::Error),
}

/// Speaks for a region until `shutdown`, then ends its lease.
///
/// # Errors
///
/// Before it starts. Nothing that happens later ends it.
pub async fn run(
    config: SpokeConfig,
    spoke: Arc<Mutex<Spoke>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let client = Client::new(&config.hub, config.fleet.as_ref())?;
    let policy = Source {
        hub: config.hub.clone(),
        fleet: config.fleet.clone(),
        snapshot: None,
        catalogue: config.catalogue.clone(),
        spoke: spoke.clone(),
    };
    let follower = reqwest::Client::builder().no_proxy().build()?;
    let followed_elsewhere = config.scaling.is_some();
    let follow = async {
        if followed_elsewhere {
            std::future::pending::<()>().await;
        }
        policy.follow(&follower, &watch::Sender::default()).await;
    };
    let mut agent = Agent { config, client, spoke, lease: None, lost: false, not_deployed: Vec::new() };
    tokio::select! {
        never = agent.speak() => match never {},
        () = follow => {}
        () = shutdown => {}
    }
    if !followed_elsewhere {
        policy.farewell(&follower).await;
    }
    agent.leave().await;
    Ok(())
}

/// A registration that stands.
struct Standing {
    lease: LeaseId,
    /// How often it is kept alive.
    period: Duration,
    /// What the hub was told of the region.
    told: RegionState,
}

struct Agent {
    config: SpokeConfig,
    client: Client,
    spoke: Arc<Mutex<Spoke>>,
    lease: Option<LeaseId>,
    /// The hub did not answer, or refused, when it was last asked.
    lost: bool,
    /// What the hub did not know when it last answered.
    not_deployed: Vec<DeploymentName>,
}

impl Agent {
    async fn speak(&mut self) -> Infallible {
        loop {
            let standing = self.register().await;
            self.keep_alive(standing).await;
        }
    }

    /// Registers, however long it takes.
    async fn register(&mut self) -> Standing {
        let mut failures = 0;
        loop {
            let registration = self.registration();
            let answer = self.client.register(&RegisterV1::from(&registration)).await;
            match answer.and_then(|answer| Ok((answer.lease.parse::<LeaseId>()?, answer))) {
                Ok((lease, answer)) => {
                    let (region, hub) = (&self.config.region, self.config.hub.current());
                    let Registration { deployments, capacity, models, .. } = registration.clone();
                    let told = RegionState { deployments, capacity, models };
                    Registered { region, hub }.emit();
                    self.lease = Some(lease);
                    self.heard(&answer, &told.deployments);
                    let period = Duration::from_millis(answer.ttl_ms).mul_f64(KEEP_ALIVE_PART);
                    return Standing { lease, period: period.max(KEEP_ALIVE_PERIOD_MIN), told };
                }
                Err(error) => self.pause(&mut failures, &error).await,
            }
        }
    }

    /// Keeps a lease alive until the hub does not know it any longer.
    async fn keep_alive(&mut self, Standing { lease, period, mut told }: Standing) {
        let mut failures = 0;
        loop {
            if failures == 0 {
                self.until_due(period, &told).await;
            }
            let state = self.state();
            match self.client.keep_alive(lease, &self.holder(), &KeepAliveV1::new(&state)).await {
                Ok(answer) => {
                    self.heard(&answer, &state.deployments);
                    told = state;
                    failures = 0;
                }
                Err(NoAnswer::NotFound(_)) => {
                    self.lease = None;
                    return LeaseLost { region: &self.config.region }.emit();
                }
                Err(error) => self.pause(&mut failures, &error).await,
            }
        }
    }

    /// Waits until the lease is to be kept alive, or something else is ready than what was told, or runs something else.
    async fn until_due(&self, period: Duration, told: &RegionState) {
        let changed = async {
            let mut look = interval(LOOK_PERIOD);
            look.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                look.tick().await;
                let RegionState { deployments, capacity: _, models } = self.state();
                if deployments != told.deployments || models != told.models {
                    return;
                }
            }
        };
        tokio::select! {
            () = changed => {}
            () = sleep(period) => {}
        }
    }

    /// Tells the hub that the region leaves. It does not wait for the hub for long.
    async fn leave(self) {
        if let Some(lease) = self.lease {
            // Nobody to tell; the lease runs out.
            tokio::time::timeout(LEAVE_TIMEOUT, self.client.leave(lease, &self.holder())).await.ok();
        }
    }

    fn registration(&self) -> Registration {
        let boot_id = self.with_spoke(|spoke| spoke.boot_id());
        let RegionState { deployments, capacity, models } = self.state();
        Registration {
            region: self.config.region.clone(),
            endpoint: self.config.advertise,
            boot_id,
            deployments,
            capacity,
            models,
        }
    }

    fn holder(&self) -> LeaseHolder {
        LeaseHolder { region: self.config.region.clone(), boot_id: self.with_spoke(|spoke| spoke.boot_id()) }
    }

    /// What the hub is told of the region.
    fn state(&self) -> RegionState {
        let now = Instant::now();
        self.with_spoke(|spoke| RegionState {
            deployments: spoke.deployments_servable(now),
            capacity: spoke.capacity(now),
            models: spoke.models(now),
        })
    }

    fn with_spoke<T>(&self, ask: impl FnOnce(&mut Spoke) -> T) -> T {
        ask(&mut self.spoke.lock())
    }

    /// The hub answered.
    fn heard(&mut self, answer: &LeaseV1, told: &BTreeSet<DeploymentName>) {
        if std::mem::take(&mut self.lost) {
            HubBack { hub: self.config.hub.current() }.emit();
        }
        match answer.floors.as_deref().map(floors_from_wire).transpose() {
            Ok(None) => {}
            Ok(Some(floors)) => self.with_spoke(|spoke| spoke.set_floors(floors)),
            Err(error) => FloorsRefused { error: &error }.emit(),
        }
        let unknown = |name: &&DeploymentName| answer.unknown.iter().any(|unknown| unknown == name.as_str());
        let unknown: Vec<_> = told.iter().filter(unknown).cloned().collect();
        if unknown != self.not_deployed {
            if !unknown.is_empty() {
                NotDeployed { names: &unknown }.emit();
            }
            self.not_deployed = unknown;
        }
    }

    /// A hub did not answer, or refused. The next is asked at once; when all have been, it waits before it begins again.
    async fn pause(&mut self, failures: &mut u32, error: &NoAnswer) {
        *failures = failures.saturating_add(1);
        let hubs = u32::try_from(self.config.hub.count()).expect("there are few hubs");
        if !failures.is_multiple_of(hubs) {
            return HubPassedOver { next: self.config.hub.current(), error }.emit();
        }
        if !std::mem::replace(&mut self.lost, true) {
            HubLost { hub: self.config.hub.current(), error }.emit();
        }
        sleep(backoff::pause(*failures / hubs, rand::random())).await;
    }
}
