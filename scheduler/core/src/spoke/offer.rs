//! Spillover capacity that a region offers to gateways whose own region is full.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use regions::DeploymentName;
use scheduler_api::report::{DeploymentLoad, EXCHANGE_PERIOD, ExchangeRequest, Report};

use super::Spoke;
use super::grants::SparePool;
use super::replica::ReplicaState;

/// Share of a region's speed that it offers. The rest absorbs estimation errors and bursts of local traffic.
const OFFERED_PERCENT: u64 = 90;
/// Share of that while the backlog exceeds the work of one period.
const OFFERED_BUSY_PERCENT: u64 = 30;

impl Spoke {
    /// Returns the region's report for a gateway, with the spillover tokens granted to it.
    pub fn exchange(&mut self, request: &ExchangeRequest, now: Instant) -> Report {
        let mut report = self.report(request.sequence, now);
        let pools = self.pools(&report.deployments, now);
        let granted = self.grants.grant(&request.gateway, &request.requested, &pools, now);
        for (name, tokens) in granted {
            report.deployments.entry(name).or_default().granted_tokens = tokens;
        }
        report
    }

    /// Returns the granted tokens that gateways may still send.
    pub fn granted(&self, deployment: &DeploymentName) -> u64 {
        self.grants.outstanding(deployment)
    }

    /// Returns the pools of deployments that share replicas, with their spare capacity.
    fn pools<'a>(
        &self,
        loads: &'a BTreeMap<DeploymentName, DeploymentLoad>,
        now: Instant,
    ) -> Vec<SparePool<'a>> {
        let pools = self.shared(loads.keys(), now).into_iter().map(|(deployments, replicas)| {
            let spare = self.spare(&deployments, &replicas, now);
            SparePool { deployments, spare }
        });
        pools.collect()
    }

    /// Groups these deployments by shared replicas.
    pub(super) fn shared<'a>(
        &self,
        names: impl Iterator<Item = &'a DeploymentName>,
        now: Instant,
    ) -> Vec<(Vec<&'a DeploymentName>, BTreeSet<usize>)> {
        let mut shared: Vec<(Vec<&DeploymentName>, BTreeSet<usize>)> = Vec::new();
        for name in names {
            let mut names = vec![name];
            let mut replicas: BTreeSet<usize> = self.serving(name, now).map(|(index, _)| index).collect();
            // A deployment may join two pools that were separate before.
            let joined: Vec<_> =
                shared.extract_if(.., |(_, others)| !others.is_disjoint(&replicas)).collect();
            for (others, on) in joined {
                names.extend(others);
                replicas.extend(on);
            }
            shared.push((names, replicas));
        }
        shared
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
        let per_period = (speed * EXCHANGE_PERIOD.as_secs_f64()) as u64;
        let local: u64 = deployments.iter().map(|name| self.arrivals.per_period(name, now)).sum();
        let share = per_period / u64::from(self.instances) / 100 * OFFERED_PERCENT;
        let spare = share.saturating_sub(local);
        if backlog > per_period { spare / 100 * OFFERED_BUSY_PERCENT } else { spare }
    }
}
