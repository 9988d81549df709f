//! Replicas that are being provisioned: the time until a deployment without ready replicas will have one.
//!
//! The scaler reports the replicas that it has ordered, each with its remaining start time
//! ([`Spoke::set_provisioning`]), and the start time of a replica that would be ordered on demand
//! ([`Spoke::set_start_time`]). A replica that downloads its model reports the remaining time of the download itself
//! ([`Spoke::observe_download`]). From these follows the expected time to readiness ([`Spoke::ready_in`]). It is used for
//! held requests, by gateways that decide between waiting here and a warm region, and for the retry delay of rejected
//! requests.
//!
//! It is only an estimate: an overdue order counts as ready *at any moment*, until the scaler updates it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Spoke;
use regions::DeploymentName;

/// Replicas that are being provisioned, by deployment.
#[derive(Debug, Default)]
pub(super) struct Provisioning(BTreeMap<DeploymentName, DeploymentStarts>);

/// Pending and possible starts of one deployment's replicas.
#[derive(Debug, Default)]
struct DeploymentStarts {
    /// Expected time of readiness of each ordered replica.
    ready_at: Vec<Instant>,
    /// Start time of a replica that would be ordered on demand.
    start_time: Option<Duration>,
    /// Last known speed of one of its replicas, in tokens per second.
    speed: Option<f64>,
}

impl Provisioning {
    fn ready_in(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        let start = self.0.get(deployment)?;
        let next = start.ready_at.iter().min();
        next.map(|at| at.saturating_duration_since(now)).or(start.start_time)
    }

    /// Records the speed of a replica; replacements are assumed to be as fast.
    pub(super) fn record_speed(&mut self, deployment: &DeploymentName, speed: f64) {
        if let Some(start) = self.0.get_mut(deployment) {
            start.speed = Some(speed);
        }
    }

    /// Returns the speed of one replica, in tokens per second, if known.
    pub(super) fn speed(&self, deployment: &DeploymentName) -> Option<f64> {
        self.0.get(deployment)?.speed
    }

    /// Returns the deployments with ordered or on-demand replicas.
    pub(super) fn names(&self) -> impl Iterator<Item = &DeploymentName> {
        self.0.keys()
    }

    fn update(&mut self, deployment: &DeploymentName, update: impl FnOnce(&mut DeploymentStarts)) {
        let start = self.0.entry(deployment.clone()).or_default();
        update(start);
        if start.ready_at.is_empty() && start.start_time.is_none() {
            self.0.remove(deployment);
        }
    }
}

impl Spoke {
    /// Replaces the ordered replicas; `left` is the remaining start time of each.
    pub fn set_provisioning(&mut self, deployment: &DeploymentName, left: Vec<Duration>, now: Instant) {
        self.provisioning.update(deployment, |start| {
            start.ready_at = left.into_iter().map(|left| now + left).collect();
        });
    }

    /// Sets the start time of a replica that would be ordered on demand; `None` if none would be ordered.
    pub fn set_start_time(&mut self, deployment: &DeploymentName, start_time: Option<Duration>) {
        self.provisioning.update(deployment, |start| start.start_time = start_time);
    }

    /// Removes the ordered replicas and start times of deployments other than these.
    pub(super) fn retain_provisioning(&mut self, deployments: &BTreeSet<DeploymentName>, now: Instant) {
        let others = self.provisioning.names().filter(|name| !deployments.contains(*name));
        for name in others.cloned().collect::<Vec<_>>() {
            self.set_provisioning(&name, Vec::new(), now);
            self.set_start_time(&name, None);
        }
    }

    /// Returns the expected time until a replica of the deployment is ready; `None` if nothing starts one.
    pub fn ready_in(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        let downloads =
            self.replicas.each().filter_map(|(_, replica)| replica.download_left(deployment, now));
        downloads.chain(self.provisioning.ready_in(deployment, now)).min()
    }

    /// Returns the number of replicas that are being provisioned.
    pub(super) fn provisioning_count(&self, deployment: &DeploymentName) -> usize {
        self.provisioning.0.get(deployment).map_or(0, |start| start.ready_at.len())
    }

    /// Returns the deployments that this region can serve: those with a ready replica, and those that would start one
    /// on demand. None while the region drains.
    pub fn deployments_servable(&self, now: Instant) -> BTreeSet<DeploymentName> {
        let mut servable = self.deployments_ready(now);
        if !self.draining {
            servable.extend(self.provisioning.names().cloned());
            let names = self.replicas.each().flat_map(|(_, replica)| {
                replica.names().filter(move |name| replica.download_left(name, now).is_some())
            });
            servable.extend(names.cloned());
        }
        servable
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReplicaStatus;
    use super::*;
    use crate::some_instant;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn an_ordered_replica_determines_the_time_or_else_the_start_time() {
        let now = some_instant();
        let name: DeploymentName = "d".parse().unwrap();
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, Vec::new());
        assert_eq!(spoke.ready_in(&name, now), None, "nothing starts replicas");
        spoke.set_start_time(&name, Some(30 * S));
        assert_eq!(spoke.ready_in(&name, now + 9 * S), Some(30 * S), "on demand");
        spoke.set_provisioning(&name, vec![20 * S, 10 * S], now);
        assert_eq!(spoke.ready_in(&name, now + 4 * S), Some(6 * S), "the first ordered one");
        assert_eq!(spoke.ready_in(&name, now + 40 * S), Some(Duration::ZERO), "overdue: at any moment");
        spoke.set_provisioning(&name, Vec::new(), now);
        assert_eq!(spoke.ready_in(&name, now), Some(30 * S));
        spoke.set_start_time(&name, None);
        assert_eq!(spoke.ready_in(&name, now), None);
        assert_eq!(spoke.provisioning.names().count(), 0, "the entry is removed");
    }

    #[test]
    fn a_replica_that_downloads_its_model_determines_the_time_until_it_fails_or_is_ready() {
        let now = some_instant();
        let name: DeploymentName = "d".parse().unwrap();
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, vec![([10, 0, 0, 1], 1).into()]);
        let status = |ready| ReplicaStatus {
            model: None,
            names: BTreeSet::from([name.clone()]),
            ready,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: None,
            tokens_per_second: 0.0,
            failure: None,
        };
        spoke.observe_replica(0, status(false), now);
        assert_eq!(spoke.ready_in(&name, now), None, "it reports no time");
        spoke.observe_download(0, Some(60 * S), now);
        assert_eq!(spoke.ready_in(&name, now + 20 * S), Some(40 * S));
        assert_eq!(spoke.ready_in(&"other".parse().unwrap(), now), None);
        assert_eq!(spoke.deployments_servable(now), BTreeSet::from([name.clone()]));
        spoke.set_start_time(&name, Some(30 * S));
        assert_eq!(spoke.ready_in(&name, now), Some(30 * S), "another replica is ready sooner");
        spoke.set_start_time(&name, None);
        spoke.observe_download(0, None, now);
        assert_eq!(spoke.ready_in(&name, now), None, "the download has failed");
        spoke.observe_download(0, Some(60 * S), now);
        spoke.observe_replica(0, status(true), now);
        assert_eq!(spoke.ready_in(&name, now), None, "it is ready");
        spoke.observe_replica(0, status(false), now);
        spoke.replica_failed(0, now);
        assert_eq!(spoke.ready_in(&name, now), None, "it is gone");
    }

    #[test]
    fn a_deployment_that_starts_on_demand_is_servable_until_the_region_drains() {
        let now = some_instant();
        let name: DeploymentName = "d".parse().unwrap();
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, Vec::new());
        assert!(spoke.deployments_servable(now).is_empty());
        spoke.set_start_time(&name, Some(S));
        assert_eq!(spoke.deployments_servable(now), BTreeSet::from([name]));
        assert!(spoke.deployments_ready(now).is_empty(), "ready is different from servable");
        spoke.set_draining();
        assert!(spoke.deployments_servable(now).is_empty());
    }
}
