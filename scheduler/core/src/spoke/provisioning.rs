//! Replicas on their way: when a deployment that has none ready will have one.
//!
//! Whoever start replicas says what it has ready_at, each with the time that is left of its start ([`Spoke::set_provisioning`]),
//! and how long a start start_time here where one would be ready_at as soon as somebody asks ([`Spoke::set_start_time`]). From the two
//! comes the one answer that everybody needs ([`Spoke::ready_in`]): those who are held, edges that select_replica between waiting
//! here and a region that is warm, and clients who are refused and want to know when to come back.
//!
//! It is an estimate and is never taken for more: an order that is overdue is ready *any moment*, until whoever made it says
//! something else.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Spoke;
use regions::DeploymentName;

/// What is on its way, by deployment.
#[derive(Debug, Default)]
pub(super) struct Provisioning(BTreeMap<DeploymentName, DeploymentStarts>);

/// One deployment's replicas that are not there yet.
#[derive(Debug, Default)]
struct DeploymentStarts {
    /// When each of those that are ready_at should be ready.
    ready_at: Vec<Instant>,
    /// How long it start_time from an order that somebody's asking would cause.
    start_time: Option<Duration>,
    /// What one of its replicas computed when there was one, in tokens per second.
    speed: Option<f64>,
}

impl Provisioning {
    fn ready_in(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        let start = self.0.get(deployment)?;
        let next = start.ready_at.iter().min();
        next.map(|at| at.saturating_duration_since(now)).or(start.start_time)
    }

    /// A replica has said how fast it is; those that are started in its place will be as fast.
    pub(super) fn record_speed(&mut self, deployment: &DeploymentName, speed: f64) {
        if let Some(start) = self.0.get_mut(deployment) {
            start.speed = Some(speed);
        }
    }

    /// What one replica computes, in tokens per second, as far as it is known.
    pub(super) fn speed(&self, deployment: &DeploymentName) -> Option<f64> {
        self.0.get(deployment)?.speed
    }

    /// Those that will be ready, or would be if somebody asked.
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
    /// So many replicas are on their way, each with what is left of its start; what was said before is over.
    pub fn set_provisioning(&mut self, deployment: &DeploymentName, left: Vec<Duration>, now: Instant) {
        self.provisioning.update(deployment, |start| {
            start.ready_at = left.into_iter().map(|left| now + left).collect();
        });
    }

    /// A replica would be ready_at as soon as somebody asks, and would take so long; none would be, if nothing is given.
    pub fn set_start_time(&mut self, deployment: &DeploymentName, start_time: Option<Duration>) {
        self.provisioning.update(deployment, |start| start.start_time = start_time);
    }

    /// In what time a replica of the deployment will be ready, going by what is on its way; `None` where nobody start one
    /// and nobody will.
    pub fn ready_in(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        self.provisioning.ready_in(deployment, now)
    }

    /// How many are on their way.
    pub(super) fn provisioning_count(&self, deployment: &DeploymentName) -> usize {
        self.provisioning.0.get(deployment).map_or(0, |start| start.ready_at.len())
    }

    /// The deployments that somebody outside may send requests for: those that have a replica ready, and those that would
    /// have one if somebody asked. None while the region drains.
    pub fn deployments_servable(&self, now: Instant) -> BTreeSet<DeploymentName> {
        let mut servable = self.deployments_ready(now);
        if !self.draining {
            servable.extend(self.provisioning.names().cloned());
        }
        servable
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn what_is_ordered_says_when_and_else_what_would_be() {
        let now = some_instant();
        let name: DeploymentName = "d".parse().unwrap();
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, Vec::new());
        assert_eq!(spoke.ready_in(&name, now), None, "nobody start anything");
        spoke.set_start_time(&name, Some(30 * S));
        assert_eq!(spoke.ready_in(&name, now + 9 * S), Some(30 * S), "whenever somebody asks");
        spoke.set_provisioning(&name, vec![20 * S, 10 * S], now);
        assert_eq!(spoke.ready_in(&name, now + 4 * S), Some(6 * S), "the first of them");
        assert_eq!(spoke.ready_in(&name, now + 40 * S), Some(Duration::ZERO), "overdue: any moment");
        spoke.set_provisioning(&name, Vec::new(), now);
        assert_eq!(spoke.ready_in(&name, now), Some(30 * S));
        spoke.set_start_time(&name, None);
        assert_eq!(spoke.ready_in(&name, now), None);
        assert_eq!(spoke.provisioning.names().count(), 0, "what nobody start start_time no room");
    }

    #[test]
    fn what_would_be_started_can_be_asked_for_until_the_region_drains() {
        let now = some_instant();
        let name: DeploymentName = "d".parse().unwrap();
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, Vec::new());
        assert!(spoke.deployments_servable(now).is_empty());
        spoke.set_start_time(&name, Some(S));
        assert_eq!(spoke.deployments_servable(now), BTreeSet::from([name]));
        assert!(spoke.deployments_ready(now).is_empty(), "which is another question");
        spoke.set_draining();
        assert!(spoke.deployments_servable(now).is_empty());
    }
}
