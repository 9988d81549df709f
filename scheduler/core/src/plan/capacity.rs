//! What a region says that it can do, and from that what a plan may count on.
//!
//! Replicas that answer to the same deployments are one *pool*: what one deployment takes of it the others cannot have. A
//! pool of which nobody has measured the speed yet is taken for as fast, a replica, as the slowest that is known for its
//! deployments: given work, it will be known. Where none is known anywhere it is without limit, and everything goes to the
//! nearest, as without a plan.

use std::collections::BTreeMap;

use super::{OBJECTIVE_PERCENT, Place, Pool};
use regions::{DeploymentName, RegionIndex};

/// A replica that says that it does more is not believed: a hundred times the fastest that we have seen.
pub const REPLICA_TOKENS_PER_SECOND_MAX: u64 = 100_000_000;

/// A speed is news when it differs by more than a tenth of the one before it.
const NEWS_PART: u64 = 10;

/// A pool without limit, in tokens per second: more than all gateways together send.
const UNLIMITED: u64 = 1 << 50;

/// What a region can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Its pools.
    pub pools: Vec<Replicas>,
}

/// Replicas that work for the same deployments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replicas {
    /// How many take work.
    pub ready: u32,
    /// What they compute together; 0 until it is known.
    pub tokens_per_second: u64,
    /// What they answer to.
    pub deployments: BTreeMap<DeploymentName, Count>,
}

/// The replicas of one deployment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Those that take its work.
    pub ready: u32,
    /// As many as there may be: those that there are, where nobody starts any.
    pub max: u32,
}

impl Capacity {
    /// Whether a plan would hardly be another with this in the place of `other`.
    pub fn is_like(&self, other: &Capacity) -> bool {
        let like = |one: &Replicas, other: &Replicas| {
            let more = one.tokens_per_second.abs_diff(other.tokens_per_second);
            one.ready == other.ready
                && one.deployments == other.deployments
                && (one.tokens_per_second == 0) == (other.tokens_per_second == 0)
                && more <= other.tokens_per_second / NEWS_PART
        };
        self.pools.len() == other.pools.len()
            && self.pools.iter().zip(&other.pools).all(|(one, other)| like(one, other))
    }
}

/// All pools, and where each deployment runs.
pub type Counted = (Vec<Pool>, BTreeMap<DeploymentName, BTreeMap<RegionIndex, Place>>);

/// What can be counted on, of what the regions say.
pub fn count<'a>(capacities: impl Iterator<Item = (RegionIndex, &'a Capacity)> + Clone) -> Counted {
    let slowest = slowest(capacities.clone().flat_map(|(_, capacity)| &capacity.pools));
    let mut pools = Vec::new();
    let mut places: BTreeMap<DeploymentName, BTreeMap<RegionIndex, Place>> = BTreeMap::new();
    for (region, capacity) in capacities {
        for replicas in &capacity.pools {
            let guess = || replicas.deployments.keys().filter_map(|name| slowest.get(name)).min().copied();
            let each = each(replicas).or_else(guess);
            let speed = each.map_or(UNLIMITED, |each| each.saturating_mul(u64::from(replicas.ready)));
            pools.push(Pool { region, tokens_per_second: at_the_objective(speed) });
            for (name, Count { ready, max }) in &replicas.deployments {
                let each = at_the_objective(each.unwrap_or(0));
                let place = Place { pool: pools.len() - 1, ready: *ready, max: *max, each };
                places.entry(name.clone()).or_default().insert(region, place);
            }
        }
    }
    (pools, places)
}

/// What one of these replicas computes, if that is known.
fn each(replicas: &Replicas) -> Option<u64> {
    let each = replicas.tokens_per_second.checked_div(u64::from(replicas.ready))?;
    (each > 0).then_some(each.min(REPLICA_TOKENS_PER_SECOND_MAX))
}

/// What the slowest replica of each deployment computes.
fn slowest<'a>(pools: impl Iterator<Item = &'a Replicas>) -> BTreeMap<&'a DeploymentName, u64> {
    let mut slowest = BTreeMap::new();
    for replicas in pools {
        for (name, each) in replicas.deployments.keys().zip(std::iter::repeat(each(replicas))) {
            if let Some(each) = each {
                slowest.entry(name).and_modify(|known: &mut u64| *known = each.min(*known)).or_insert(each);
            }
        }
    }
    slowest
}

fn at_the_objective(speed: u64) -> u64 {
    speed / 100 * OBJECTIVE_PERCENT + speed % 100 * OBJECTIVE_PERCENT / 100
}

#[cfg(test)]
mod tests {
    use super::super::tests::at;
    use super::*;

    fn pool(ready: u32, tokens_per_second: u64, names: &[&str]) -> Replicas {
        let count = Count { ready, max: ready };
        let deployments = names.iter().map(|name| (name.parse().unwrap(), count)).collect();
        Replicas { ready, tokens_per_second, deployments }
    }

    fn counted(regions: &[Capacity]) -> Counted {
        count(regions.iter().enumerate().map(|(number, capacity)| (at(number), capacity)))
    }

    #[test]
    fn a_pool_counts_once_whatever_it_answers_to() {
        let (pools, places) = counted(&[Capacity { pools: vec![pool(2, 2000, &["d", "e"])] }]);
        assert_eq!(pools, [Pool { region: at(0), tokens_per_second: 1500 }]);
        for name in ["d", "e"] {
            assert_eq!(places[name][&at(0)], Place { pool: 0, ready: 2, max: 2, each: 750 });
        }
    }

    #[test]
    fn a_speed_that_nobody_has_measured_is_that_of_the_slowest_that_was_and_without_limit_where_none_was() {
        let capacity =
            |tokens_per_second, name| Capacity { pools: vec![pool(2, tokens_per_second, &[name])] };
        let (pools, _) =
            counted(&[capacity(2000, "d"), capacity(800, "d"), capacity(0, "d"), capacity(0, "e")]);
        let each: Vec<u64> = pools.iter().map(|pool| pool.tokens_per_second).collect();
        assert_eq!(each[..3], [1500, 600, 600]);
        assert!(each[3] > 1 << 49);
    }

    #[test]
    fn nobody_is_believed_to_be_faster_than_anybody_is() {
        let check = |claimed: u64, counted_on: u64| {
            let (pools, _) = counted(&[Capacity { pools: vec![pool(1, claimed, &["d"])] }]);
            assert_eq!(pools[0].tokens_per_second, counted_on, "{claimed}");
        };
        check(REPLICA_TOKENS_PER_SECOND_MAX, 75_000_000);
        check(REPLICA_TOKENS_PER_SECOND_MAX + 1, 75_000_000);
        check(u64::MAX, 75_000_000);
    }

    #[test]
    fn a_tenth_more_or_less_is_no_news_and_a_replica_more_is() {
        let one = |ready, speed| Capacity { pools: vec![pool(ready, speed, &["d"])] };
        let check = |now: Capacity, like: bool| assert_eq!(now.is_like(&one(2, 1000)), like, "{now:?}");
        check(one(2, 1100), true);
        check(one(2, 1101), false);
        check(one(2, 900), true);
        check(one(2, 899), false);
        check(one(3, 1000), false);
        check(one(2, 0), false);
        check(Capacity::default(), false);
    }
}
