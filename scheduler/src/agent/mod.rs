//! The agent: client of the hub in each region.
//!
//! It registers the region, keeps the lease alive, reports at once when other deployments are ready, and registers
//! again when the hub no longer knows the lease. A keep-alive carries the region's capacity, and its response the
//! replica floors of the hub's plan. While the hub is unreachable, the agent retries with backoff without limit;
//! no request waits for it, and the failure is logged once, not at every attempt.
//!
//! The residency policies come from the route table, which the agent follows ([`table`]). In a region that starts
//! replicas, the scaling loop follows the table instead, since it also needs the desired deployments.
//!
//! The state is owned by the ingress of the same process: both use one [`Spoke`], which is locked for one operation at
//! a time and never across an await.

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
use scheduler_api::lease::{LeaseHolder, LeaseId};
use scheduler_api::plan::floors_from_wire;
use scheduler_api::registration::{KeepAliveV1, LeaseV1, RegionState, RegisterV1, Registration};
use scheduler_core::spoke::Spoke;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::config::SpokeConfig;
use crate::events::{
    FloorsUnreadable, HubFailover, HubReachable, HubUnreachable, LeaseExpired, ReadyNotDeployed,
    RegionRegistered,
};
use client::{CallError, Client};
use table::TableFollower;

/// Interval at which the agent checks for a change of the ready deployments. The next report tells gateways anyway;
/// this check tells the hub earlier.
const CHECK_PERIOD: Duration = Duration::from_millis(100);
/// Part of the lease time after which the lease is kept alive: every 1.5 s of the usual 5 s, so that two consecutive
/// attempts may fail.
const KEEP_ALIVE_PART: f64 = 0.3;
/// Lower bound of the keep-alive interval.
const KEEP_ALIVE_PERIOD_MIN: Duration = Duration::from_millis(10);
/// Time limit of deregistering. If the hub is unreachable, the lease expires.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(1);

/// Error that prevents the agent from running.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The HTTP client cannot be created.
    #[error("cannot create the HTTP client for the hub: {0}")]
    Client(#[from] reqwest::Error),
}

/// Runs the agent until `shutdown`, then ends the lease.
///
/// # Errors
///
/// When the agent cannot start. No later failure ends it.
pub async fn run(
    config: SpokeConfig,
    spoke: Arc<Mutex<Spoke>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let client = Client::new(&config.hub, config.fleet.as_ref())?;
    let policy = TableFollower {
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
    let mut agent =
        Agent { config, client, spoke, lease: None, unreachable: false, not_deployed: Vec::new() };
    tokio::select! {
        never = agent.run() => match never {},
        () = follow => {}
        () = shutdown => {}
    }
    if !followed_elsewhere {
        policy.deregister(&follower).await;
    }
    agent.deregister().await;
    Ok(())
}

/// Current registration.
struct ActiveRegistration {
    lease: LeaseId,
    /// Interval of keep-alives.
    period: Duration,
    /// Last reported state of the region.
    reported: RegionState,
}

struct Agent {
    config: SpokeConfig,
    client: Client,
    spoke: Arc<Mutex<Spoke>>,
    lease: Option<LeaseId>,
    /// All hubs were unreachable, or rejected the last request.
    unreachable: bool,
    /// Deployments that the hub did not know at its last response.
    not_deployed: Vec<DeploymentName>,
}

impl Agent {
    async fn run(&mut self) -> Infallible {
        loop {
            let registration = self.register().await;
            self.keep_alive(registration).await;
        }
    }

    /// Registers; retries without limit.
    async fn register(&mut self) -> ActiveRegistration {
        let mut failures = 0;
        loop {
            let registration = self.registration();
            let response = self.client.register(&RegisterV1::from(&registration)).await;
            match response.and_then(|response| Ok((response.lease.parse::<LeaseId>()?, response))) {
                Ok((lease, response)) => {
                    let (region, hub) = (&self.config.region, self.config.hub.current());
                    let Registration { deployments, capacity, models, .. } = registration.clone();
                    let reported = RegionState { deployments, capacity, models };
                    RegionRegistered { region, hub }.emit();
                    self.lease = Some(lease);
                    self.apply_response(&response, &reported.deployments);
                    let period = Duration::from_millis(response.ttl_ms).mul_f64(KEEP_ALIVE_PART);
                    return ActiveRegistration { lease, period: period.max(KEEP_ALIVE_PERIOD_MIN), reported };
                }
                Err(error) => self.pause(&mut failures, &error).await,
            }
        }
    }

    /// Keeps a lease alive until the hub no longer knows it.
    async fn keep_alive(&mut self, ActiveRegistration { lease, period, mut reported }: ActiveRegistration) {
        let mut failures = 0;
        loop {
            if failures == 0 {
                self.until_due(period, &reported).await;
            }
            let state = self.state();
            match self.client.keep_alive(lease, &self.holder(), &KeepAliveV1::new(&state)).await {
                Ok(response) => {
                    self.apply_response(&response, &state.deployments);
                    reported = state;
                    failures = 0;
                }
                Err(CallError::NotFound(_)) => {
                    self.lease = None;
                    return LeaseExpired { region: &self.config.region }.emit();
                }
                Err(error) => self.pause(&mut failures, &error).await,
            }
        }
    }

    /// Waits until the next keep-alive is due, or the ready deployments or running models have changed.
    async fn until_due(&self, period: Duration, reported: &RegionState) {
        let changed = async {
            let mut timer = interval(CHECK_PERIOD);
            timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                timer.tick().await;
                let RegionState { deployments, capacity: _, models } = self.state();
                if deployments != reported.deployments || models != reported.models {
                    return;
                }
            }
        };
        tokio::select! {
            () = changed => {}
            () = sleep(period) => {}
        }
    }

    /// Deregisters the region; waits for the hub for at most [`DEREGISTER_TIMEOUT`].
    async fn deregister(self) {
        if let Some(lease) = self.lease {
            // On failure, the lease expires.
            tokio::time::timeout(DEREGISTER_TIMEOUT, self.client.deregister(lease, &self.holder()))
                .await
                .ok();
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

    /// Returns the state of the region, as it is reported to the hub.
    fn state(&self) -> RegionState {
        let now = Instant::now();
        self.with_spoke(|spoke| RegionState {
            deployments: spoke.deployments_servable(now),
            capacity: spoke.capacity(now),
            models: spoke.models(now),
        })
    }

    fn with_spoke<T>(&self, operation: impl FnOnce(&mut Spoke) -> T) -> T {
        operation(&mut self.spoke.lock())
    }

    /// Applies a response of the hub.
    fn apply_response(&mut self, response: &LeaseV1, reported: &BTreeSet<DeploymentName>) {
        if std::mem::take(&mut self.unreachable) {
            HubReachable { hub: self.config.hub.current() }.emit();
        }
        match response.floors.as_deref().map(floors_from_wire).transpose() {
            Ok(None) => {}
            Ok(Some(floors)) => self.with_spoke(|spoke| spoke.set_floors(floors)),
            Err(error) => FloorsUnreadable { error: &error }.emit(),
        }
        let unknown =
            |name: &&DeploymentName| response.unknown.iter().any(|unknown| unknown == name.as_str());
        let unknown: Vec<_> = reported.iter().filter(unknown).cloned().collect();
        if unknown != self.not_deployed {
            if !unknown.is_empty() {
                ReadyNotDeployed { names: &unknown }.emit();
            }
            self.not_deployed = unknown;
        }
    }

    /// Handles a failed call. The next hub is tried at once; after all have failed, the agent waits for the backoff
    /// delay.
    async fn pause(&mut self, failures: &mut u32, error: &CallError) {
        *failures = failures.saturating_add(1);
        let hubs = u32::try_from(self.config.hub.count()).expect("the number of hubs is limited");
        if !failures.is_multiple_of(hubs) {
            return HubFailover { next: self.config.hub.current(), error }.emit();
        }
        if !std::mem::replace(&mut self.unreachable, true) {
            HubUnreachable { hub: self.config.hub.current(), error }.emit();
        }
        sleep(backoff::pause(*failures / hubs, rand::random())).await;
    }
}
