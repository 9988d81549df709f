//! Spillover capacity that a region offers to gateways whose own region is full.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use regions::DeploymentName;
use scheduler_api::report::{EXCHANGE_PERIOD, ExchangeRequest, SpokeReport};

use super::Spoke;
use super::grants::SparePool;
use super::replica::ReplicaState;

/// Share of a region's speed that it offers. The rest absorbs estimation errors and bursts of local traffic.
const OFFERED_SHARE: f64 = 0.9;
/// Share of that while the backlog exceeds the work of one period.
const OFFERED_BUSY_SHARE: f64 = 0.3;

impl Spoke {
    /// Returns the region's report for a gateway, with the spillover tokens granted to it and without the
    /// [loads](Spoke::loads).
    pub fn exchange(&mut self, request: &ExchangeRequest, now: Instant) -> SpokeReport {
        let serving: Vec<_> = self.serving_by_name(now).into_keys().cloned().collect();
        let pools = self.pools(&serving, now);
        SpokeReport {
            region: self.region.clone(),
            instance: self.instance.clone(),
            boot_id: self.boot_id,
            sequence: request.sequence,
            draining: self.draining,
            has_jobs: self.has_jobs,
            grants: self.grants.grant(&request.gateway, &request.requested, &pools, now),
        }
    }

    /// Returns the granted tokens that gateways may still send.
    pub fn granted(&self, deployment: &DeploymentName) -> u64 {
        self.grants.outstanding(deployment)
    }

    /// Returns the pools of these deployments that share replicas, with their spare capacity.
    fn pools<'a>(&self, deployments: &'a [DeploymentName], now: Instant) -> Vec<SparePool<'a>> {
        let pools = self.shared(deployments.iter(), now).into_iter().map(|(deployments, replicas)| {
            let spare = self.spare(&deployments, &replicas, now);
            SparePool { deployments, spare }
        });
        pools.collect()
    }

    /// Groups these deployments by shared replicas, in the order of the last deployment that joined each group. The names
    /// of a group are in the order in which they joined, the last one first.
    pub(super) fn shared<'a>(
        &self,
        names: impl Iterator<Item = &'a DeploymentName>,
        now: Instant,
    ) -> Vec<(Vec<&'a DeploymentName>, BTreeSet<usize>)> {
        let serving = self.serving_by_name(now);
        let mut groups: BTreeMap<usize, (Vec<&DeploymentName>, BTreeSet<usize>)> = BTreeMap::new();
        // Group of each replica. A deployment joins only the groups of its own replicas, so most are never looked at.
        let mut group_of: BTreeMap<usize, usize> = BTreeMap::new();
        for (position, name) in names.enumerate() {
            let mut names = vec![name];
            let mut replicas: BTreeSet<usize> = serving.get(name).into_iter().flatten().copied().collect();
            // A deployment may join two groups that were separate before.
            let joined: BTreeSet<usize> =
                replicas.iter().filter_map(|it| group_of.get(it)).copied().collect();
            for (others, on) in joined.iter().filter_map(|group| groups.remove(group)) {
                names.extend(others);
                replicas.extend(on);
            }
            group_of.extend(replicas.iter().map(|replica| (*replica, position)));
            groups.insert(position, (names, replicas));
        }
        groups.into_values().collect()
    }

    /// Returns the spare capacity of these replicas in one period, beyond the local traffic of their deployments, in
    /// tokens. It is this spoke's share: what the spokes of a region grant together is at most the spare capacity of
    /// their common replicas, since each subtracts the traffic that arrives at itself.
    fn spare(&self, deployments: &[&DeploymentName], replicas: &BTreeSet<usize>, now: Instant) -> u64 {
        if self.draining {
            return 0;
        }
        let speed: f64 = replicas.iter().filter_map(|index| self.replicas.get(*index)?.speed()).sum();
        let backlog = |index: &usize| self.replicas.get(*index).map_or(0, ReplicaState::backlog_tokens);
        let backlog: u64 = replicas.iter().map(backlog).sum();
        let per_period = speed * EXCHANGE_PERIOD.as_secs_f64();
        let local: u64 = deployments.iter().map(|name| self.arrivals.per_period(name, now)).sum();
        let share = per_period * OFFERED_SHARE / f64::from(self.instances);
        let spare = share - local as f64;
        // Negative if more arrives here than is offered; the conversion returns zero then.
        let is_busy = backlog as f64 > per_period;
        (if is_busy { spare * OFFERED_BUSY_SHARE } else { spare }) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReplicaStatus;
    use super::*;
    use crate::some_instant;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    /// Groups deployments by comparing each one with all groups so far.
    fn by_comparison<'a>(
        spoke: &Spoke,
        names: impl Iterator<Item = &'a DeploymentName>,
        now: Instant,
    ) -> Vec<(Vec<&'a DeploymentName>, BTreeSet<usize>)> {
        let mut groups: Vec<(Vec<&DeploymentName>, BTreeSet<usize>)> = Vec::new();
        for name in names {
            let mut names = vec![name];
            let mut replicas: BTreeSet<usize> = spoke.serving(name, now).map(|(index, _)| index).collect();
            for (others, on) in
                groups.extract_if(.., |(_, others)| !others.is_disjoint(&replicas)).collect::<Vec<_>>()
            {
                names.extend(others);
                replicas.extend(on);
            }
            groups.push((names, replicas));
        }
        groups
    }

    proptest! {
        #[test]
        fn groups_and_loads_are_those_of_a_comparison_of_all_deployments_with_all_replicas(
            replicas in vec((btree_set("[a-f]", 0..4), any::<bool>(), 0u64..3, 0u64..3000), 0..8),
            asleep in btree_set("[a-h]", 0..4),
        ) {
            let name = |text: &String| -> DeploymentName { text.parse().unwrap() };
            let now = some_instant();
            let addresses = (0..replicas.len()).map(|port| ([127, 0, 0, 1], port as u16 + 1).into());
            let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, addresses.collect());
            for (index, (names, ready, pending_tokens, age_ms)) in replicas.into_iter().enumerate() {
                let status = ReplicaStatus {
                    model: None,
                    failure: None,
                    names: names.iter().map(name).collect(),
                    ready,
                    draining: false,
                    pending_tokens,
                    interactive_tokens: (pending_tokens != 1).then_some(pending_tokens),
                    tokens_per_second: 0.1 * index as f64,
                };
                spoke.observe_replica(index, status, now + std::time::Duration::from_millis(age_ms));
            }
            for text in &asleep {
                spoke.set_start_time(&name(text), Some(std::time::Duration::from_secs(2)));
            }
            let now = now + std::time::Duration::from_millis(3000);
            let loads = spoke.loads(now);
            let expected = by_comparison(&spoke, loads.keys(), now);
            prop_assert_eq!(spoke.shared(loads.keys(), now), expected);
            for (name, load) in &loads {
                let serving: Vec<_> = spoke.serving(name, now).map(|(_, replica)| replica).collect();
                prop_assert_eq!(load.ready as usize, serving.len());
                prop_assert_eq!(load.pending_tokens, serving.iter().map(|it| it.backlog_tokens()).sum::<u64>());
                let speed = serving.iter().filter_map(|it| it.speed()).fold(0.0, |sum, speed| sum + speed);
                prop_assert_eq!(load.tokens_per_second, speed);
                let interactive = serving.iter().map(|it| it.interactive_tokens()).sum::<Option<u64>>();
                let interactive = if serving.is_empty() { None } else { interactive };
                prop_assert_eq!(load.interactive_tokens, interactive);
                prop_assert_eq!(load.ready_in, spoke.wait_estimate(name, serving.len(), now));
            }
        }
    }
}
