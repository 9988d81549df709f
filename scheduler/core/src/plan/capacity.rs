//! Capacity that regions report, and the capacity that a plan may use.
//!
//! Replicas that serve the same deployments form one *pool*: capacity used by one deployment is not available to the
//! others. A pool without a measured speed is assumed to be as fast per replica as the slowest known replica of its
//! deployments, so that it gets work and its speed becomes known. If no speed is known anywhere, the capacity is
//! unlimited, and everything goes to the nearest region, as without a plan.

use std::collections::BTreeMap;

use super::{CapacityPool, DeploymentCapacity, TARGET_UTILIZATION_PERCENT};
use regions::{DeploymentName, RegionIndex};
use scheduler_api::plan::{RegionCapacity, ReplicaCount, ReplicaPool};

/// Highest accepted speed of a replica: a hundred times the fastest replica observed.
pub const REPLICA_TOKENS_PER_SECOND_MAX: u64 = 100_000_000;

/// A speed change is significant above a tenth of the previous speed.
const CHANGE_THRESHOLD_DIVISOR: u64 = 10;

/// Speed of a pool without limit, in tokens per second: more than all gateways together send.
const UNLIMITED: u64 = 1 << 50;

/// Returns whether two capacities differ too little to change a plan.
pub fn are_similar(now: &RegionCapacity, before: &RegionCapacity) -> bool {
    let similar = |now: &ReplicaPool, before: &ReplicaPool| {
        let difference = now.tokens_per_second.abs_diff(before.tokens_per_second);
        now.ready == before.ready
            && now.deployments == before.deployments
            && (now.tokens_per_second == 0) == (before.tokens_per_second == 0)
            && difference <= before.tokens_per_second / CHANGE_THRESHOLD_DIVISOR
    };
    now.pools.len() == before.pools.len()
        && now.pools.iter().zip(&before.pools).all(|(now, before)| similar(now, before))
}

/// All pools, and the capacity of each deployment by region.
pub type PlannableCapacity =
    (Vec<CapacityPool>, BTreeMap<DeploymentName, BTreeMap<RegionIndex, DeploymentCapacity>>);

/// Returns the capacity that a plan may use, from the reports of the regions.
pub fn plannable_capacity<'a>(
    capacities: impl Iterator<Item = (RegionIndex, &'a RegionCapacity)> + Clone,
) -> PlannableCapacity {
    let slowest = slowest(capacities.clone().flat_map(|(_, capacity)| &capacity.pools));
    let mut pools = Vec::new();
    let mut deployments: BTreeMap<DeploymentName, BTreeMap<RegionIndex, DeploymentCapacity>> =
        BTreeMap::new();
    for (region, capacity) in capacities {
        for replicas in &capacity.pools {
            let guess = || replicas.deployments.keys().filter_map(|name| slowest.get(name)).min().copied();
            let tokens_per_replica = tokens_per_replica(replicas).or_else(guess);
            let speed = tokens_per_replica.map_or(UNLIMITED, |tokens_per_replica| {
                tokens_per_replica.saturating_mul(u64::from(replicas.ready))
            });
            pools.push(CapacityPool { region, tokens_per_second: at_target_utilization(speed) });
            for (name, ReplicaCount { ready, max }) in &replicas.deployments {
                let tokens_per_replica = at_target_utilization(tokens_per_replica.unwrap_or(0));
                let entry = DeploymentCapacity {
                    pool: pools.len() - 1,
                    ready: *ready,
                    max: *max,
                    tokens_per_replica,
                };
                deployments.entry(name.clone()).or_default().insert(region, entry);
            }
        }
    }
    (pools, deployments)
}

/// Returns the speed of one of these replicas, if known.
fn tokens_per_replica(replicas: &ReplicaPool) -> Option<u64> {
    let tokens_per_replica = replicas.tokens_per_second.checked_div(u64::from(replicas.ready))?;
    (tokens_per_replica > 0).then_some(tokens_per_replica.min(REPLICA_TOKENS_PER_SECOND_MAX))
}

/// Returns the speed of the slowest replica of each deployment.
fn slowest<'a>(pools: impl Iterator<Item = &'a ReplicaPool>) -> BTreeMap<&'a DeploymentName, u64> {
    let mut slowest = BTreeMap::new();
    for replicas in pools {
        for (name, tokens_per_replica) in
            replicas.deployments.keys().zip(std::iter::repeat(tokens_per_replica(replicas)))
        {
            if let Some(tokens_per_replica) = tokens_per_replica {
                slowest
                    .entry(name)
                    .and_modify(|known: &mut u64| *known = tokens_per_replica.min(*known))
                    .or_insert(tokens_per_replica);
            }
        }
    }
    slowest
}

fn at_target_utilization(speed: u64) -> u64 {
    speed / 100 * TARGET_UTILIZATION_PERCENT + speed % 100 * TARGET_UTILIZATION_PERCENT / 100
}

#[cfg(test)]
mod tests {
    use super::super::tests::at;
    use super::*;

    fn pool(ready: u32, tokens_per_second: u64, names: &[&str]) -> ReplicaPool {
        let count = ReplicaCount { ready, max: ready };
        let deployments = names.iter().map(|name| (name.parse().unwrap(), count)).collect();
        ReplicaPool { ready, tokens_per_second, deployments }
    }

    fn plannable(regions: &[RegionCapacity]) -> PlannableCapacity {
        plannable_capacity(regions.iter().enumerate().map(|(number, capacity)| (at(number), capacity)))
    }

    #[test]
    fn a_pool_is_counted_once_for_all_its_deployments() {
        let (pools, deployments) = plannable(&[RegionCapacity { pools: vec![pool(2, 2000, &["d", "e"])] }]);
        assert_eq!(pools, [CapacityPool { region: at(0), tokens_per_second: 1500 }]);
        for name in ["d", "e"] {
            assert_eq!(
                deployments[name][&at(0)],
                DeploymentCapacity { pool: 0, ready: 2, max: 2, tokens_per_replica: 750 }
            );
        }
    }

    #[test]
    fn an_unknown_speed_is_assumed_to_be_the_slowest_known_one_or_unlimited() {
        let capacity =
            |tokens_per_second, name| RegionCapacity { pools: vec![pool(2, tokens_per_second, &[name])] };
        let (pools, _) =
            plannable(&[capacity(2000, "d"), capacity(800, "d"), capacity(0, "d"), capacity(0, "e")]);
        let tokens_per_replica: Vec<u64> = pools.iter().map(|pool| pool.tokens_per_second).collect();
        assert_eq!(tokens_per_replica[..3], [1500, 600, 600]);
        assert!(tokens_per_replica[3] > 1 << 49);
    }

    #[test]
    fn a_reported_speed_is_capped() {
        let check = |claimed: u64, counted_on: u64| {
            let (pools, _) = plannable(&[RegionCapacity { pools: vec![pool(1, claimed, &["d"])] }]);
            assert_eq!(pools[0].tokens_per_second, counted_on, "{claimed}");
        };
        check(REPLICA_TOKENS_PER_SECOND_MAX, 75_000_000);
        check(REPLICA_TOKENS_PER_SECOND_MAX + 1, 75_000_000);
        check(u64::MAX, 75_000_000);
    }

    #[test]
    fn a_tenth_more_or_less_is_similar_and_a_replica_more_is_not() {
        let one = |ready, speed| RegionCapacity { pools: vec![pool(ready, speed, &["d"])] };
        let check = |now: RegionCapacity, similar: bool| {
            assert_eq!(are_similar(&now, &one(2, 1000)), similar, "{now:?}")
        };
        check(one(2, 1100), true);
        check(one(2, 1101), false);
        check(one(2, 900), true);
        check(one(2, 899), false);
        check(one(3, 1000), false);
        check(one(2, 0), false);
        check(RegionCapacity::default(), false);
    }
}
