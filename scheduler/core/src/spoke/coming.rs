//! Replicas on their way: when a deployment that has none ready will have one.
//!
//! Whoever starts replicas says what it has ordered, each with the time that is left of its start ([`Spoke::set_ordered`]),
//! and how long a start takes here where one would be ordered as soon as somebody asks ([`Spoke::set_start`]). From the two
//! comes the one answer that everybody needs ([`Spoke::ready_in`]): those who are held, edges that choose between waiting
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
pub(super) struct Coming(BTreeMap<DeploymentName, Starts>);

/// One deployment's replicas that are not there yet.
#[derive(Debug, Default)]
struct Starts {
    /// When each of those that are ordered should be ready.
    ordered: Vec<Instant>,
    /// How long it takes from an order that somebody's asking would cause.
    takes: Option<Duration>,
    /// What one of its replicas computed when there was one, in tokens per second.
    speed: Option<f64>,
}

impl Coming {
    fn ready_in(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        let starts = self.0.get(deployment)?;
        let next = starts.ordered.iter().min();
        next.map(|at| at.saturating_duration_since(now)).or(starts.takes)
    }

    /// A replica has said how fast it is; those that are started in its place will be as fast.
    pub(super) fn saw(&mut self, deployment: &DeploymentName, speed: f64) {
        if let Some(starts) = self.0.get_mut(deployment) {
            starts.speed = Some(speed);
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

    fn change(&mut self, deployment: &DeploymentName, change: impl FnOnce(&mut Starts)) {
        let starts = self.0.entry(deployment.clone()).or_default();
        change(starts);
        if starts.ordered.is_empty() && starts.takes.is_none() {
            self.0.remove(deployment);
        }
    }
}

impl Spoke {
    /// So many replicas are on their way, each with what is left of its start; what was said before is over.
    pub fn set_ordered(&mut self, deployment: &DeploymentName, left: Vec<Duration>, now: Instant) {
        self.coming.change(deployment, |starts| {
            starts.ordered = left.into_iter().map(|left| now + left).collect();
        });
    }

    /// A replica would be ordered as soon as somebody asks, and would take so long; none would be, if nothing is given.
    pub fn set_start(&mut self, deployment: &DeploymentName, takes: Option<Duration>) {
        self.coming.change(deployment, |starts| starts.takes = takes);
    }

    /// In what time a replica of the deployment will be ready, going by what is on its way; `None` where nobody starts one
    /// and nobody will.
    pub fn ready_in(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        self.coming.ready_in(deployment, now)
    }

    /// How many are on their way.
    pub(super) fn ordered(&self, deployment: &DeploymentName) -> usize {
        self.coming.0.get(deployment).map_or(0, |starts| starts.ordered.len())
    }

    /// The deployments that somebody outside may send requests for: those that have a replica ready, and those that would
    /// have one if somebody asked. None while the region drains.
    pub fn deployments_servable(&self, now: Instant) -> BTreeSet<DeploymentName> {
        let mut servable = self.deployments_ready(now);
        if !self.draining {
            servable.extend(self.coming.names().cloned());
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
        assert_eq!(spoke.ready_in(&name, now), None, "nobody starts anything");
        spoke.set_start(&name, Some(30 * S));
        assert_eq!(spoke.ready_in(&name, now + 9 * S), Some(30 * S), "whenever somebody asks");
        spoke.set_ordered(&name, vec![20 * S, 10 * S], now);
        assert_eq!(spoke.ready_in(&name, now + 4 * S), Some(6 * S), "the first of them");
        assert_eq!(spoke.ready_in(&name, now + 40 * S), Some(Duration::ZERO), "overdue: any moment");
        spoke.set_ordered(&name, Vec::new(), now);
        assert_eq!(spoke.ready_in(&name, now), Some(30 * S));
        spoke.set_start(&name, None);
        assert_eq!(spoke.ready_in(&name, now), None);
        assert_eq!(spoke.coming.names().count(), 0, "what nobody starts takes no room");
    }

    #[test]
    fn what_would_be_started_can_be_asked_for_until_the_region_drains() {
        let now = some_instant();
        let name: DeploymentName = "d".parse().unwrap();
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, Vec::new());
        assert!(spoke.deployments_servable(now).is_empty());
        spoke.set_start(&name, Some(S));
        assert_eq!(spoke.deployments_servable(now), BTreeSet::from([name]));
        assert!(spoke.deployments_ready(now).is_empty(), "which is another question");
        spoke.set_draining();
        assert!(spoke.deployments_servable(now).is_empty());
    }
}
