//! The regions that say they would hold a request, because no replica is ready for it, and what follows from that for a
//! request. `gateway_core::cold` decides; here is what it is asked with.

use super::known::{About, Known};
use gateway_core::cold::{self, ResponseEstimate};
use gateway_core::route::Candidate;
use gateway_core::shed::QueueWaits;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use scheduler_core::spoke::Report;
use std::collections::BTreeMap;
use std::time::Duration;

/// By deployment, the regions that would hold its requests; nothing for most. So that a request which finds all regions warm
/// pays one look for it.
#[derive(Default)]
pub(super) struct Holding(BTreeMap<DeploymentName, RegionSet>);

impl Holding {
    /// A region has reported.
    pub(super) fn heard(&mut self, region: RegionIndex, report: &Report) {
        self.0.values_mut().for_each(|regions| {
            regions.remove(region);
        });
        for (name, _) in report.deployments.iter().filter(|(_, load)| load.ready_in.is_some()) {
            self.0.entry(name.clone()).or_insert(RegionSet::EMPTY).insert(region);
        }
        self.0.retain(|_, regions| !regions.is_empty());
    }

    /// Keeps what these have said.
    pub(super) fn watch(&mut self, wanted: RegionSet) {
        self.0.values_mut().for_each(|regions| *regions = regions.intersect(wanted));
        self.0.retain(|_, regions| !regions.is_empty());
    }

    /// Whether a region would hold a request for this deployment.
    pub(super) fn has(&self, region: RegionIndex, deployment: &DeploymentName) -> bool {
        self.0.get(deployment).is_some_and(|regions| regions.contains(region))
    }

    fn is_for(&self, deployment: &DeploymentName) -> bool {
        self.0.contains_key(deployment)
    }
}

impl Known {
    /// For how long a region would hold a request, by its last word; nothing where a replica takes it at once.
    pub(super) fn held_for(&self, region: RegionIndex, deployment: &DeploymentName) -> Option<Duration> {
        if self.holding.has(region, deployment) { self.load(region, deployment).ready_in } else { None }
    }

    /// The deployments whose requests a region would hold, and for how many milliseconds; for operators.
    pub(super) fn holds(&self, region: RegionIndex) -> BTreeMap<String, u64> {
        let names = self.holding.0.keys();
        let held = names
            .filter_map(|name| Some((name.to_string(), self.held_for(region, name)?.as_millis() as u64)));
        held.collect()
    }

    /// Whether any region would hold requests for a deployment.
    pub(super) fn is_any_cold(&self, deployment: &DeploymentName) -> bool {
        self.holding.is_for(deployment)
    }

    /// Time in which the best of the other regions would respond, for a region that would hold the request: it keeps the request
    /// only if it responds sooner. A region that may have scaled to zero since its last report gets it as well.
    pub(super) fn elsewhere<'a>(
        &self,
        about: &About<'_>,
        may_sleep: bool,
        order: impl Iterator<Item = &'a Candidate>,
        than: RegionIndex,
    ) -> Option<Duration> {
        if !may_sleep && !self.holding.has(than, about.deployment) {
            return None;
        }
        cold::elsewhere(order, than, |candidate| {
            self.response_estimate(candidate.region, candidate.score.rtt, about)
        })
    }

    /// Expected response of a region at this round trip.
    pub(super) fn response_estimate(
        &self,
        region: RegionIndex,
        rtt: Duration,
        about: &About<'_>,
    ) -> ResponseEstimate {
        let load = self.load(region, about.deployment);
        let usually = self.targets.average_latency(region, about.deployment, about.size);
        let queue = QueueWaits::of(None, load.pending_tokens, load.tokens_per_second).bulk;
        let there = usually.unwrap_or_default().max(rtt);
        ResponseEstimate { responds_in: there + queue.unwrap_or_default(), held_for: load.ready_in }
    }
}
