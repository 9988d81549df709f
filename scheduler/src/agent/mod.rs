//! The agent: client of the hub in each region.
//!
//! It registers this spoke, keeps the lease alive, reports at once when other deployments are ready, and registers
//! again when the hub no longer knows the lease. A keep-alive carries the region's capacity, and its response the
//! replica floors of the hub's plan and the scaler lease of the region, which the hub gives to this spoke if it is free.
//! When its holder has released it, the next keep-alive is sent at once. While the hub is unreachable, the agent retries
//! with backoff without limit; no request waits for it, and the failure is logged once, not at every attempt.
//!
//! The residency policies come from the route table, which the agent follows ([`table`]). In a spoke that can start
//! replicas, the scaling loop follows the table instead, since it also needs the desired deployments.
//!
//! The state is owned by the ingress of the same process: both use one [`Spoke`], which is locked for one operation at
//! a time and never across an await.

mod events;
pub(crate) mod table;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use futures_util::future::BoxFuture;
use regions::DeploymentName;
use reqwest::Method;
use resolver::Resolver;
use scheduler_api::VERSION;
use scheduler_api::lease::{LeaseHolder, LeaseId, LeaseIdError};
use scheduler_api::paths;
use scheduler_api::plan::floors_from_wire;
use scheduler_api::registration::{KeepAliveV1, LeaseV1, RegionState, RegisterV1, Registration};
use scheduler_api::scaler::ScalerLease;
use scheduler_client::hub::{ControlPlaneClient, HubClientError, HubConnection, HubFailure, HubRequest};
use scheduler_core::spoke::Spoke;
use scheduler_core::table_watch::DEREGISTER_TIMEOUT;
use serde::de::IgnoredAny;
use tokio::sync::{Notify, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::config::SpokeConfig;
use events::{FloorsUnreadable, LeaseExpired, ReadyNotDeployed, RegionRegistered};
use table::{BACKOFF, TableFollower};

/// Timeout of a call; less than half a lease, so that a lost call can be repeated.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval at which the agent checks for a change of the ready deployments. The next report tells gateways anyway;
/// this check tells the hub earlier.
const CHECK_PERIOD: Duration = Duration::from_millis(100);
/// Part of the lease time after which the lease is kept alive: every 1.5 s of the usual 5 s, so that two consecutive
/// attempts may fail.
const KEEP_ALIVE_PART: f64 = 0.3;
/// Lower bound of the keep-alive interval.
const KEEP_ALIVE_PERIOD_MIN: Duration = Duration::from_millis(10);

/// Error that prevents the agent from running.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A URL in `hub` or the identity cannot be used for requests to hubs. The spoke does not start.
    #[error("cannot create the HTTP client for the hub: {0}")]
    Client(#[from] HubClientError),
}

/// Runs the agent until `shutdown`, then ends the lease. `wake` is notified when this spoke gets or loses the scaler
/// lease.
///
/// # Errors
///
/// When the agent cannot start. No later failure ends it.
pub async fn run(
    config: SpokeConfig,
    spoke: Arc<Mutex<Spoke>>,
    resolver: Resolver,
    wake: Arc<Notify>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), AgentError> {
    boxed(config, spoke, resolver, wake, Box::pin(shutdown)).await
}

/// [`run`] without type parameters, so that the agent is compiled once, in this crate, and not in every program that runs it.
fn boxed<'a>(
    config: SpokeConfig,
    spoke: Arc<Mutex<Spoke>>,
    resolver: Resolver,
    wake: Arc<Notify>,
    shutdown: BoxFuture<'a, ()>,
) -> BoxFuture<'a, Result<(), AgentError>> {
    Box::pin(run_until(config, spoke, resolver, wake, shutdown))
}

async fn run_until(
    config: SpokeConfig,
    spoke: Arc<Mutex<Spoke>>,
    resolver: Resolver,
    wake: Arc<Notify>,
    shutdown: BoxFuture<'_, ()>,
) -> Result<(), AgentError> {
    let client = ControlPlaneClient::new(&config.hub, &config.transport, resolver)?;
    let policy = TableFollower {
        client: client.clone(),
        snapshot: None,
        catalogue: config.catalogue.clone(),
        spoke: spoke.clone(),
    };
    let followed_elsewhere = config.scaling.is_some();
    let follow = async {
        if followed_elsewhere {
            std::future::pending::<()>().await;
        }
        policy.follow(&watch::Sender::default()).await;
    };
    let hub = HubConnection::new(client, "registration", BACKOFF);
    let mut agent = Agent { config, hub, spoke, wake, lease: None, not_deployed: Vec::new() };
    tokio::select! {
        never = agent.run() => match never {},
        () = follow => {}
        () = shutdown => {}
    }
    if !followed_elsewhere {
        policy.deregister().await;
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
    hub: HubConnection,
    spoke: Arc<Mutex<Spoke>>,
    /// Notified when this spoke gets or loses the scaler lease.
    wake: Arc<Notify>,
    lease: Option<LeaseId>,
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
        loop {
            self.hub.ready().await;
            let registration = self.registration();
            let request = HubRequest::post(paths::SPOKES, &RegisterV1::from(&registration), CALL_TIMEOUT);
            let registered = self.hub.call(&request, async |response: LeaseV1| {
                let lease = response.lease.parse();
                Ok((lease.map_err(|error: LeaseIdError| HubFailure::Invalid(error.to_string()))?, response))
            });
            let Ok((lease, response)) = registered.await else { continue };
            let Registration { instance, deployments, capacity, models, failures, draining, .. } =
                registration;
            let reported = RegionState { deployments, capacity, models, failures, draining };
            RegionRegistered {
                region: &self.config.region,
                instance: &instance,
                hub: self.config.hub.current(),
            }
            .emit();
            self.lease = Some(lease);
            self.apply_response(&response, &reported.deployments);
            let period = Duration::from_millis(response.ttl_ms).mul_f64(KEEP_ALIVE_PART);
            return ActiveRegistration { lease, period: period.max(KEEP_ALIVE_PERIOD_MIN), reported };
        }
    }

    /// Keeps a lease alive until the hub no longer knows it.
    async fn keep_alive(&mut self, ActiveRegistration { lease, period, mut reported }: ActiveRegistration) {
        // Whether the hub has confirmed `reported`. After a failed call it may have another state.
        let mut is_confirmed = true;
        loop {
            if self.hub.is_failing() {
                self.hub.ready().await;
            } else {
                self.until_due(period, &reported).await;
            }
            let state = self.state();
            let path = paths::keep_alive(lease, &self.holder());
            let changed = (!is_confirmed || state != reported).then(|| (&state).into());
            let keep_alive = KeepAliveV1 { version: VERSION, state: changed };
            let request = HubRequest::post(path, &keep_alive, CALL_TIMEOUT).optional();
            match self.hub.call(&request, async |response: Option<LeaseV1>| Ok(response)).await {
                Ok(Some(response)) => {
                    self.apply_response(&response, &state.deployments);
                    (reported, is_confirmed) = (state, true);
                }
                Ok(None) => {
                    self.lease = None;
                    return LeaseExpired { region: &self.config.region, instance: &self.config.instance }
                        .emit();
                }
                // Logged by the connection.
                Err(_) => is_confirmed = false,
            }
        }
    }

    /// Waits until the next keep-alive is due, the ready deployments, running models or failures have changed, or another spoke has
    /// given up the scaler lease.
    async fn until_due(&self, period: Duration, reported: &RegionState) {
        let changed = async {
            let mut timer = interval(CHECK_PERIOD);
            timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                timer.tick().await;
                let RegionState { deployments, capacity: _, models, failures, draining } = self.state();
                if deployments != reported.deployments
                    || models != reported.models
                    || failures != reported.failures
                    || draining != reported.draining
                {
                    return;
                }
                // Not before the next check, because the holder may still have the lease at the hub.
                if self.with_spoke(|spoke| spoke.should_acquire_lease(Instant::now())) {
                    timer.tick().await;
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
            let path = paths::lease(lease, &self.holder());
            // On failure, the lease expires.
            let request = HubRequest::new(Method::DELETE, path, DEREGISTER_TIMEOUT);
            self.hub.client().send::<IgnoredAny>(&request).await.ok();
        }
    }

    fn registration(&self) -> Registration {
        let boot_id = self.with_spoke(|spoke| spoke.boot_id());
        let RegionState { deployments, capacity, models, failures, draining } = self.state();
        Registration {
            region: self.config.region.clone(),
            instance: self.config.instance.clone(),
            endpoint: self.config.advertise.clone(),
            boot_id,
            deployments,
            capacity,
            models,
            failures,
            engines: self.config.engines.clone(),
            draining,
            scales: self.config.scaling.is_some(),
            job_log: self.config.job_log,
            accelerators: self.config.accelerators.clone(),
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
            failures: spoke.start_failures(now),
            draining: spoke.is_draining(),
        })
    }

    fn with_spoke<T>(&self, operation: impl FnOnce(&mut Spoke) -> T) -> T {
        operation(&mut self.spoke.lock())
    }

    /// Applies a response of the hub.
    fn apply_response(&mut self, response: &LeaseV1, reported: &BTreeSet<DeploymentName>) {
        let scaler = response.scaler.map(ScalerLease::from);
        let changed = self.with_spoke(|spoke| {
            let before = spoke.holds_scaler_lease();
            spoke.scaler_lease_reported(scaler, Instant::now());
            spoke.holds_scaler_lease() != before
        });
        if changed {
            self.wake.notify_one();
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
}
