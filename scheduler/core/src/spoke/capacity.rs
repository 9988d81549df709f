//! Capacity that a region reports to the hub, and the floors that the hub sets.
//!
//! Both change slowly and travel with the lease. The report contains measurements: the number of ready replicas, and
//! their total speed; the hub's plan decides how that capacity is used. Floors stay in force until the hub sends
//! others, also while the hub is unreachable: a region does not remove replicas because of a lost connection.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Spoke;
use regions::DeploymentName;
use scheduler_api::plan::{RegionCapacity, ReplicaCount, ReplicaPool};

/// Floors by the hub, and the numbers of replicas that could be started.
#[derive(Debug, Default)]
pub(super) struct ReplicaTargets {
    floors: BTreeMap<DeploymentName, u32>,
    max: BTreeMap<DeploymentName, u32>,
}

impl Spoke {
    /// Returns the capacity of the region; empty while it drains.
    pub fn capacity(&self, now: Instant) -> RegionCapacity {
        if self.draining {
            return RegionCapacity::default();
        }
        let known = self.replicas.each().flat_map(|(_, replica)| replica.names());
        let known = known.chain(self.capacity.max.keys());
        let names: std::collections::BTreeSet<_> = known.collect();
        let pools = self.shared(names.into_iter(), now).into_iter().map(|(names, replicas)| {
            let count = |name: &DeploymentName| {
                let ready = u32::try_from(self.serving(name, now).count()).unwrap_or(u32::MAX);
                let max = self.capacity.max.get(name).copied().unwrap_or(ready).max(ready);
                // Of a failed deployment none can be started.
                let max = if self.start_failure(name, now).is_some() { ready } else { max };
                ReplicaCount { ready, max }
            };
            let deployments = names.into_iter().map(|name| (name.clone(), count(name))).collect();
            let speed: f64 = replicas.iter().filter_map(|number| self.replicas.get(*number)?.speed()).sum();
            ReplicaPool {
                ready: u32::try_from(replicas.len()).unwrap_or(u32::MAX),
                tokens_per_second: speed as u64,
                deployments,
            }
        });
        RegionCapacity { pools: pools.collect() }
    }

    /// Sets the maximum number of replicas by deployment; for a deployment that is not listed, the current number.
    pub fn set_replicas_max(&mut self, max: BTreeMap<DeploymentName, u32>) {
        self.capacity.max = max;
    }

    /// Sets the maximum number of replicas of one deployment.
    pub(super) fn set_replica_max(&mut self, deployment: &DeploymentName, max: u32) {
        self.capacity.max.insert(deployment.clone(), max);
    }

    /// Replaces the floors.
    pub fn set_floors(&mut self, floors: BTreeMap<DeploymentName, u32>) {
        self.capacity.floors = floors;
    }

    /// Returns the hub's floor for a deployment: the replicas to keep against the loss of another region.
    pub fn floor(&self, deployment: &DeploymentName) -> u32 {
        self.capacity.floors.get(deployment).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReplicaStatus;
    use super::*;
    use crate::some_instant;

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    fn status(names: &[&str], tokens_per_second: f64) -> ReplicaStatus {
        let names = names.iter().map(|text| name(text)).collect();
        let (pending_tokens, interactive_tokens) = (0, None);
        ReplicaStatus {
            model: None,
            failure: None,
            names,
            ready: true,
            draining: false,
            pending_tokens,
            interactive_tokens,
            tokens_per_second,
        }
    }

    /// A region with three replicas: two for `a` and `b`, one for `c`.
    fn region(now: Instant) -> Spoke {
        let replicas = [1, 2, 3].map(|port| ([127, 0, 0, 1], port).into());
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, replicas.to_vec());
        spoke.observe_replica(0, status(&["a", "b"], 1000.0), now);
        spoke.observe_replica(1, status(&["a", "b"], 500.0), now);
        spoke.observe_replica(2, status(&["c"], 0.0), now);
        spoke
    }

    #[test]
    fn a_region_reports_the_total_speed_of_its_replicas() {
        let now = some_instant();
        let mut spoke = region(now);
        let pools = spoke.capacity(now).pools;
        assert_eq!(pools.len(), 2);
        let summary = |pool: &ReplicaPool| (pool.ready, pool.tokens_per_second, pool.deployments.clone());
        let two = ReplicaCount { ready: 2, max: 2 };
        assert_eq!(summary(&pools[0]), (2, 1500, [(name("a"), two), (name("b"), two)].into()));
        assert_eq!(summary(&pools[1]), (1, 0, [(name("c"), ReplicaCount { ready: 1, max: 1 })].into()));
        spoke.replica_failed(1, now);
        assert_eq!(spoke.capacity(now).pools[0].tokens_per_second, 1000);
        spoke.set_draining();
        assert_eq!(spoke.capacity(now), RegionCapacity::default());
    }

    #[test]
    fn capacity_includes_deployments_that_could_be_started() {
        let now = some_instant();
        let mut spoke = region(now);
        spoke.set_replicas_max([(name("c"), 8), (name("d"), 4), (name("a"), 1)].into());
        let counts: BTreeMap<_, _> =
            spoke.capacity(now).pools.into_iter().flat_map(|pool| pool.deployments).collect();
        assert_eq!(counts[&name("c")], ReplicaCount { ready: 1, max: 8 });
        assert_eq!(counts[&name("d")], ReplicaCount { ready: 0, max: 4 });
        assert_eq!(counts[&name("a")], ReplicaCount { ready: 2, max: 2 }, "at least the current number");
    }

    #[test]
    fn floors_stay_until_they_are_replaced() {
        let mut spoke = region(some_instant());
        assert_eq!(spoke.floor(&name("a")), 0);
        spoke.set_floors([(name("a"), 3)].into());
        assert_eq!((spoke.floor(&name("a")), spoke.floor(&name("b"))), (3, 0));
        spoke.set_floors([(name("b"), 1)].into());
        assert_eq!((spoke.floor(&name("a")), spoke.floor(&name("b"))), (0, 1));
    }
}
