//! What the region offers to gateways whose own region is full: of what it could take beyond what comes by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use regions::DeploymentName;

use super::grants::{GRANT_PERIOD, Gateway, SparePool};
use super::replica::Replica;
use super::{DeploymentLoad, Report, Spoke};

/// What a gateway asks a region, five times a second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeRequest {
    /// Who asks.
    pub gateway: Gateway,
    /// Counts the questions of this gateway to this region.
    pub sequence: u64,
    /// What it would have liked to send elsewhere in the last period, in tokens; what is not named it does not want.
    pub requested: BTreeMap<DeploymentName, u64>,
}

/// Of a region's speed so much is offered: the rest is for what nobody can foresee (an estimate of tokens that is off, the
/// next beat of its own traffic).
const OFFERED_PERCENT: u64 = 90;
/// And of that so much while more than a period's work waits already.
const OFFERED_BUSY_PERCENT: u64 = 30;

impl Spoke {
    /// What the region says of itself to a gateway, and how much of others' overflow that one may send it.
    pub fn exchange(&mut self, request: &ExchangeRequest, now: Instant) -> Report {
        let mut report = self.report(request.sequence, now);
        let pools = self.pools(&report.deployments, now);
        let granted = self.grants.grant(&request.gateway, &request.requested, &pools, now);
        for (name, tokens) in granted {
            report.deployments.entry(name).or_default().granted_tokens = tokens;
        }
        report
    }

    /// What gateways may still send of others' overflow, in tokens.
    pub fn granted(&self, deployment: &DeploymentName) -> u64 {
        self.grants.outstanding(deployment)
    }

    /// Deployments that share replicas, with their spare room.
    fn pools<'a>(&self, loads: &'a BTreeMap<DeploymentName, DeploymentLoad>, now: Instant) -> Vec<SparePool<'a>> {
        let pools = self.shared(loads.keys(), now).into_iter().map(|(deployments, replicas)| {
            let spare = self.spare(&deployments, &replicas, now);
            SparePool { deployments, spare }
        });
        pools.collect()
    }

    /// Which of these deployments share replicas, and which replicas.
    pub(super) fn shared<'a>(
        &self,
        names: impl Iterator<Item = &'a DeploymentName>,
        now: Instant,
    ) -> Vec<(Vec<&'a DeploymentName>, BTreeSet<usize>)> {
        let mut shared: Vec<(Vec<&DeploymentName>, BTreeSet<usize>)> = Vec::new();
        for name in names {
            let mut names = vec![name];
            let mut replicas: BTreeSet<usize> = self.serving(name, now).map(|(index, _)| index).collect();
            // One deployment can be what joins two pools that had nothing in common.
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

    /// What these replicas can take in a period beyond what comes by itself for their deployments, in tokens.
    fn spare(&self, deployments: &[&DeploymentName], replicas: &BTreeSet<usize>, now: Instant) -> u64 {
        if self.draining {
            return 0;
        }
        let speed: f64 = replicas.iter().filter_map(|index| self.replicas.get(*index)?.speed()).sum();
        let backlog = |index: &usize| self.replicas.get(*index).map_or(0, Replica::backlog_tokens);
        let backlog: u64 = replicas.iter().map(backlog).sum();
        let per_period = (speed * GRANT_PERIOD.as_secs_f64()) as u64;
        let own: u64 = deployments.iter().map(|name| self.arrivals.per_period(name, now)).sum();
        let spare = (per_period / 100 * OFFERED_PERCENT).saturating_sub(own);
        if backlog > per_period { spare / 100 * OFFERED_BUSY_PERCENT } else { spare }
    }
}
