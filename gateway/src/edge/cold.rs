//! Regions in cold start: regions that reported that they would hold a request because no replica is ready for it.
//! `gateway_core::cold` decides about requests; this module keeps the state that it reads.

use super::region_states::{RegionStates, RoutingContext};
use gateway_core::candidate::Candidate;
use gateway_core::cold::{self, ResponseEstimate};
use gateway_core::shed::QueueWaits;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use scheduler_api::report::Report;
use std::collections::BTreeMap;
use std::time::Duration;

/// Regions that would hold requests, by deployment. Most deployments have no entry, so a request whose regions are all warm
/// costs one map lookup.
#[derive(Default)]
pub(super) struct ColdRegions(BTreeMap<DeploymentName, RegionSet>);

impl ColdRegions {
    /// Applies the report of a region.
    pub(super) fn update(&mut self, region: RegionIndex, report: &Report) {
        self.0.values_mut().for_each(|regions| {
            regions.remove(region);
        });
        for (name, _) in report.deployments.iter().filter(|(_, load)| load.ready_in.is_some()) {
            self.0.entry(name.clone()).or_insert(RegionSet::EMPTY).insert(region);
        }
        self.0.retain(|_, regions| !regions.is_empty());
    }

    /// Removes all regions except these.
    pub(super) fn retain_regions(&mut self, retained: RegionSet) {
        self.0.values_mut().for_each(|regions| *regions = regions.intersect(retained));
        self.0.retain(|_, regions| !regions.is_empty());
    }

    /// Returns whether a region would hold a request for this deployment.
    pub(super) fn contains(&self, region: RegionIndex, deployment: &DeploymentName) -> bool {
        self.0.get(deployment).is_some_and(|regions| regions.contains(region))
    }

    fn has_any(&self, deployment: &DeploymentName) -> bool {
        self.0.contains_key(deployment)
    }
}

impl RegionStates {
    /// Returns how long a region would hold a request according to its last report; `None` if a replica accepts it at once.
    pub(super) fn held_for(&self, region: RegionIndex, deployment: &DeploymentName) -> Option<Duration> {
        if self.cold_regions.contains(region, deployment) {
            self.load(region, deployment).ready_in
        } else {
            None
        }
    }

    /// Returns the deployments whose requests a region would hold, and for how many milliseconds; for operators.
    pub(super) fn hold_times_ms(&self, region: RegionIndex) -> BTreeMap<String, u64> {
        let names = self.cold_regions.0.keys();
        let held = names
            .filter_map(|name| Some((name.to_string(), self.held_for(region, name)?.as_millis() as u64)));
        held.collect()
    }

    /// Returns whether any region would hold requests for a deployment.
    pub(super) fn is_any_cold(&self, deployment: &DeploymentName) -> bool {
        self.cold_regions.has_any(deployment)
    }

    /// Returns the time in which the fastest of the other regions would respond. It is sent to a region that would hold the
    /// request: the region keeps the request only if it responds sooner. A region that may have scaled to zero since its last
    /// report (`may_sleep`) gets it as well.
    pub(super) fn alternative_response_time<'a>(
        &self,
        routing: &RoutingContext<'_>,
        may_sleep: bool,
        order: impl Iterator<Item = &'a Candidate>,
        region: RegionIndex,
    ) -> Option<Duration> {
        if !may_sleep && !self.cold_regions.contains(region, routing.deployment) {
            return None;
        }
        cold::elsewhere(order, region, |candidate| {
            self.response_estimate(candidate.region, candidate.score.rtt, routing)
        })
    }

    /// Returns the expected response time of a region at this round trip.
    pub(super) fn response_estimate(
        &self,
        region: RegionIndex,
        rtt: Duration,
        routing: &RoutingContext<'_>,
    ) -> ResponseEstimate {
        let load = self.load(region, routing.deployment);
        let average = self.targets.average_latency(region, routing.deployment, routing.size);
        let queue = QueueWaits::of(None, load.pending_tokens, load.tokens_per_second).bulk;
        let without_queue = average.unwrap_or_default().max(rtt);
        ResponseEstimate { responds_in: without_queue + queue.unwrap_or_default(), held_for: load.ready_in }
    }
}
