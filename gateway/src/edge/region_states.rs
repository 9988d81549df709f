//! State of the regions as an edge sees them: their reports, the outcomes of its own requests, and its retry and hedge budgets.
//! Time and random draws are arguments; [`region_monitor`](super::region_monitor) has the clock, the random numbers and the
//! lock.
//!
//! A region without a ready replica reports how long it would hold a request ([`gateway_core::cold`]). Most deployments have no
//! such region, so a request whose regions are all warm costs one map lookup.

use super::view::View;
use crate::events::{InstanceEjected, RegionEjected};
use gateway_core::budget::Budgets;
use gateway_core::by_deployment::ByDeployment;
use gateway_core::candidate::Candidate;
use gateway_core::circuit::Permille;
use gateway_core::cold::{self, ResponseEstimate};
use gateway_core::health::{HealthReport, RegionHealthTracker};
use gateway_core::hedge::is_lightly_loaded;
use gateway_core::instances::{InstanceIndex, InstanceSet, RegionReport, is_served};
use gateway_core::job_region::{JobRegions, KeyedSubmissions, SubmissionKey};
use gateway_core::latency::{FirstByteTimeout, SizeClass};
use gateway_core::outlier::OutlierEvidence;
use gateway_core::plan::{AttemptTimeouts, RegionLoad, RegionView};
use gateway_core::queue::RegionQueue;
use gateway_core::shed::QueueWaits;
use gateway_core::spill::Spill;
use gateway_core::targets::{LatencyBaseline, TargetTracker};
use regions::HostPort;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::id::{DeploymentName, InstanceName};
use regions::latency::LatencyModel;
use regions::set::{RegionIndex, RegionSet};
use replica_api::priority::Priority;
use scheduler_api::report::DeploymentLoad;
use scheduler_api::report::delta::DecodedReport;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum requests of one edge in flight to one region. At 20 ms each that is 400,000 requests per second, more than an edge
/// forwards. Requests beyond it would wait for a region that does not respond and take the capacity of all other regions.
pub(crate) const REGION_IN_FLIGHT_MAX: u32 = 8192;

/// State of all regions, updated by their reports and responses.
pub(crate) struct RegionStates {
    pub(super) catalogue: Arc<Catalogue>,
    pub(crate) fleet: RegionHealthTracker,
    pub(crate) latency: LatencyModel,
    pub(crate) targets: TargetTracker<RegionIndex>,
    /// Spoke instances of the regions.
    pub(crate) instances: InstanceSet<HostPort>,
    /// Last reported load of each region.
    pub(super) loads: ByDeployment<DeploymentBacklog>,
    /// Regions that would hold a request until a replica is ready, and for how long.
    cold: ByDeployment<Duration>,
    pub(crate) budgets: Budgets<RegionIndex>,
    /// Spillover credits that regions have granted.
    pub(crate) spill: Spill,
    /// Regions of recent submissions with an idempotency key.
    pub(super) keyed_submissions: KeyedSubmissions,
}

/// Reported load and queue of one deployment in one region.
#[derive(Clone, Copy)]
pub(super) struct DeploymentBacklog {
    pub(super) load: DeploymentLoad,
    /// All queued tokens.
    total: RegionQueue,
    /// Queued tokens ahead of an interactive request: other interactive requests, if the region reports them separately.
    interactive: RegionQueue,
}

impl DeploymentBacklog {
    /// Updates the `previous` backlog with a reported load.
    fn updated(
        previous: Option<&DeploymentBacklog>,
        load: &DeploymentLoad,
        now: Instant,
    ) -> DeploymentBacklog {
        let updated = |previous, tokens| RegionQueue::updated(previous, tokens, load.tokens_per_second, now);
        DeploymentBacklog {
            load: *load,
            total: updated(previous.map(|backlog| backlog.total), load.pending_tokens),
            interactive: updated(
                previous.map(|backlog| backlog.interactive),
                load.interactive_tokens.unwrap_or(load.pending_tokens),
            ),
        }
    }

    /// Returns the time until the queued work ahead of a request of this priority is done.
    fn wait(&self, priority: Priority) -> Duration {
        match priority {
            Priority::Interactive => self.interactive.wait(),
            Priority::Bulk => self.total.wait(),
        }
    }
}

/// Properties of a request that routing decisions depend on.
#[derive(Clone, Copy)]
pub(crate) struct RoutingContext<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) priority: Priority,
    pub(crate) size: SizeClass,
    /// Random draw of the request, made once, so that decisions about it agree.
    pub(crate) target_draw: Permille,
    /// The request is computed by the engine, so its latency is compared with that of others.
    pub(crate) uses_engine: bool,
    /// The request becomes a job, so it needs a region and an instance with a queue of jobs.
    pub(crate) is_job: bool,
}

impl RegionStates {
    pub(super) fn new(location: GeoPoint, catalogue: &Arc<Catalogue>, now: Instant) -> RegionStates {
        RegionStates {
            catalogue: catalogue.clone(),
            fleet: RegionHealthTracker::default(),
            latency: LatencyModel::new(location, catalogue),
            targets: TargetTracker::new(
                FirstByteTimeout::FOR_REGION,
                LatencyBaseline::Own,
                REGION_IN_FLIGHT_MAX,
            ),
            instances: InstanceSet::default(),
            loads: ByDeployment::default(),
            cold: ByDeployment::default(),
            budgets: Budgets::new(now),
            spill: Spill::default(),
            keyed_submissions: KeyedSubmissions::default(),
        }
    }

    /// Returns the nearest of these regions that is not down.
    pub(super) fn nearest(&self, regions: RegionSet, now: Instant) -> Option<RegionIndex> {
        let rank = |region: &RegionIndex| {
            let is_down = self.fleet.region_health(*region) == Health::Down;
            (is_down, self.latency.estimate(*region, now), *region)
        };
        regions.iter().min_by_key(rank)
    }

    /// Records the region to which a submission or an upload with an idempotency key is sent.
    pub(super) fn record_submission(&mut self, key: SubmissionKey, region: RegionIndex, now: Instant) {
        let with_queue = self.instances.regions_with_jobs();
        let with_queue = with_queue.minus(self.down(with_queue));
        self.keyed_submissions.record(key, region, with_queue, now);
    }

    /// Returns those of these regions that are down.
    fn down(&self, regions: RegionSet) -> RegionSet {
        regions.iter().filter(|region| self.fleet.region_health(*region) == Health::Down).collect()
    }

    /// Returns the regions of which the nearest stores a job or a file. `allowed` are those of the route table that residency
    /// allows, and `serving` those with a ready replica. `earlier` is the region of an earlier request with the same idempotency key.
    pub(super) fn job_regions(
        &self,
        allowed: RegionSet,
        serving: RegionSet,
        registered: RegionSet,
        draining: RegionSet,
        earlier: Option<RegionIndex>,
    ) -> RegionSet {
        let with_queue = self.instances.regions_with_jobs().intersect(allowed);
        let down = self.down(with_queue);
        JobRegions { with_queue, serving, registered, draining, down, earlier }.eligible()
    }

    /// Replaces the set of regions and of their instances. Returns all instances.
    pub(super) fn set_routes(&mut self, view: &View) -> Vec<(InstanceIndex, InstanceName, HostPort)> {
        self.set_regions(view.regions().collect::<Vec<_>>());
        self.instances.set_instances(view.instances());
        let instances = &self.instances;
        self.spill.retain_instances(|instance| instances.get(instance).is_some());
        self.instances.each().map(|(index, name, address)| (index, name.clone(), address.clone())).collect()
    }

    fn set_regions(&mut self, regions: impl IntoIterator<Item = RegionIndex> + Clone) {
        self.fleet.set_regions(regions.clone());
        self.targets.set_targets(regions.clone());
        let regions: RegionSet = regions.into_iter().collect();
        self.loads.retain_regions(|region| regions.contains(region));
        self.cold.retain_regions(|region| regions.contains(region));
    }

    /// Applies the report of an instance and its spillover credits; `requested_at` is when the exchange was sent.
    /// Returns the sum of the reports of its region; `None` if the instance is no longer routed. The cost is that of the
    /// deployments that have changed or are awake.
    pub(super) fn reported(
        &mut self,
        instance: InstanceIndex,
        decoded: &DecodedReport,
        round_trip: Duration,
        requested_at: Instant,
        now: Instant,
    ) -> Option<RegionReport<'_>> {
        let region = instance.region();
        self.latency.observe(region, round_trip, now);
        let touched = self.instances.reported(instance, decoded, round_trip, now);
        let granted = |name| {
            let load = decoded.report.deployments.get(name).filter(|load| !load.is_asleep());
            (name, load.map(|load| load.granted_tokens))
        };
        self.spill.set_credits(instance, touched.iter().map(granted), requested_at);
        let combined = self.instances.region_report(region, now)?;
        let mut serves = Vec::with_capacity(combined.touched.len());
        for name in &combined.touched {
            let load = combined.deployments.get(name);
            self.cold.set(region, name, load.and_then(|load| load.ready_in));
            let backlog =
                load.map(|load| DeploymentBacklog::updated(self.loads.get(region, name), load, now));
            self.loads.set(region, name, backlog);
            serves.push((name.clone(), load.is_some_and(is_served)));
        }
        let report = HealthReport { round_trip, serves, draining: combined.draining };
        self.fleet.reported(region, report, now);
        Some(combined)
    }

    /// Returns the spillover demand of the last period in tokens, for each deployment with demand that the region of an
    /// instance serves. Each of its instances receives the whole demand and grants its share.
    pub(super) fn spillover_demand(
        &self,
        instance: InstanceIndex,
        now: Instant,
    ) -> BTreeMap<DeploymentName, u64> {
        let is_served = |name: &DeploymentName| self.loads.get(instance.region(), name).is_some();
        let demands = self.spill.demands(now).filter(|(name, _)| is_served(name));
        demands.map(|(name, tokens)| (name.clone(), tokens)).collect()
    }

    /// Returns the last reported load of a deployment in `region`; the default without a report.
    pub(crate) fn load(&self, region: RegionIndex, deployment: &DeploymentName) -> DeploymentLoad {
        self.loads.get(region, deployment).map(|backlog| backlog.load).unwrap_or_default()
    }

    /// Returns the last reported load of a deployment in `region`; `None` if the region does not report the deployment.
    pub(super) fn reported_load(
        &self,
        region: RegionIndex,
        deployment: &DeploymentName,
    ) -> Option<DeploymentLoad> {
        self.loads.get(region, deployment).map(|backlog| backlog.load)
    }

    /// Returns the health of a region that serves the deployment, for a request: an ejected region is `Suspect`.
    pub(crate) fn health(&self, region: RegionIndex, routing: &RoutingContext<'_>, now: Instant) -> Health {
        suspect_if_ejected(self.fleet.region_health(region), &self.targets, region, routing, now)
    }

    /// Calls `decide` with a view of the regions for this request, and with the budgets.
    pub(super) fn decide<T>(
        &mut self,
        routing: &RoutingContext<'_>,
        now: Instant,
        decide: impl FnOnce(RegionView<'_>, &mut Budgets<RegionIndex>) -> T,
    ) -> T {
        let RegionStates { fleet, targets, instances, loads, cold, budgets, .. } = self;
        let backlog = |region| loads.get(region, routing.deployment);
        let is_light = |region| {
            backlog(region).is_none_or(|backlog| {
                is_lightly_loaded(backlog.load.pending_tokens, backlog.load.tokens_per_second)
            }) && targets.is_lightly_loaded(region)
        };
        let load = |region| match region {
            region if targets.is_full(region) => RegionLoad::Full,
            region if is_light(region) => RegionLoad::Light,
            _ => RegionLoad::Busy,
        };
        let held_for = |region| cold.get(region, routing.deployment).copied();
        let timeouts = |region| {
            let first_byte = targets.first_byte_timeout(region, routing.deployment, routing.size);
            let queue = backlog(region).map(|backlog| backlog.wait(routing.priority)).unwrap_or_default();
            let warm = AttemptTimeouts {
                first_byte: first_byte.map(|first_byte| first_byte + queue),
                hedge: targets.hedge_after(region, routing.deployment, routing.size),
            };
            warm.while_held(held_for(region))
        };
        // After a timeout, a request must not be retried or hedged in a region that would only hold it.
        let health = |region| {
            // A job waits in the queue until a replica is ready.
            let health = match routing.is_job {
                true => fleet.region_health(region),
                false => fleet.health(region, routing.deployment),
            };
            match suspect_if_ejected(health, targets, region, routing, now) {
                Health::Healthy if !routing.is_job && held_for(region).is_some() => Health::Suspect,
                health => health,
            }
        };
        let instance = |region, failed: &[InstanceIndex]| {
            instances.select(region, routing.deployment, routing.is_job, failed, routing.target_draw, now)
        };
        let view = RegionView { health: &health, load: &load, timeouts: &timeouts, instance: &instance };
        decide(view, budgets)
    }

    /// Returns the first-byte deadline of an attempt sent at `sent_at`, computed from the current state of the region; `None` if
    /// it has passed.
    pub(super) fn first_byte_deadline(
        &self,
        region: RegionIndex,
        routing: &RoutingContext<'_>,
        sent_at: Option<Instant>,
        now: Instant,
    ) -> Option<Instant> {
        let timeout =
            self.targets.first_byte_timeout(region, routing.deployment, routing.size).unwrap_or_default();
        if let Some(held_for) = self.held_for(region, routing.deployment) {
            let warm = AttemptTimeouts { first_byte: Some(timeout), hedge: None };
            return warm.while_held(Some(held_for)).first_byte.map(|timeout| now + timeout);
        }
        let deadline = sent_at? + timeout + self.queue_wait(region, routing);
        (now < deadline).then_some(deadline)
    }

    /// Returns the expected wait of a request in the queue of `region`.
    pub(super) fn queue_wait(&self, region: RegionIndex, routing: &RoutingContext<'_>) -> Duration {
        self.loads
            .get(region, routing.deployment)
            .map(|backlog| backlog.wait(routing.priority))
            .unwrap_or_default()
    }

    /// Returns how long a region would hold a request according to its last report; `None` if a replica accepts it at once.
    pub(super) fn held_for(&self, region: RegionIndex, deployment: &DeploymentName) -> Option<Duration> {
        self.cold.get(region, deployment).copied()
    }

    /// Returns the deployments whose requests a region would hold, and for how many milliseconds; for operators.
    pub(super) fn hold_times_ms(&self, region: RegionIndex) -> BTreeMap<String, u64> {
        let held = self.cold.in_region(region);
        held.map(|(name, held_for)| (name.to_string(), held_for.as_millis() as u64)).collect()
    }

    /// Returns the deployments that have failed in a region, with the reasons; for operators.
    pub(super) fn failed_deployments(&self, region: RegionIndex) -> BTreeMap<String, &'static str> {
        let failed = self.loads.in_region(region);
        failed.filter_map(|(name, backlog)| Some((name.to_string(), backlog.load.failed?.as_str()))).collect()
    }

    /// Returns whether any region would hold requests for a deployment.
    pub(super) fn is_any_cold(&self, deployment: &DeploymentName) -> bool {
        self.cold.of(deployment).is_some()
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
        if !may_sleep && self.held_for(region, routing.deployment).is_none() {
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

    /// Records the evidence of an attempt; if that ejects the region, its requests in flight get an evacuation
    /// budget. A failure of an instance beside a sound one is no evidence about the region.
    pub(super) fn record_evidence(
        &mut self,
        region: RegionIndex,
        instance: Option<InstanceIndex>,
        evidence: Option<OutlierEvidence>,
        draw: Permille,
        now: Instant,
    ) {
        let Some(evidence) = evidence else { return };
        let is_of_instance = evidence.is_adverse() && self.is_fault_of_instance(instance, now);
        if let Some(instance) = instance
            && self.instances.record(instance, evidence, draw, now)
            && let Some((name, _)) = self.instances.get(instance)
        {
            let region = &self.catalogue.region(region).id;
            InstanceEjected { region, instance: name, evidence }.record();
        }
        if !is_of_instance && self.targets.record(region, evidence, draw, now) {
            RegionEjected { region: &self.catalogue.region(region).id, evidence }.record();
            self.budgets.evacuate(region, self.targets.in_flight(region), now);
        }
    }

    /// Returns whether a failure at this instance is its own and not that of its region.
    pub(super) fn is_fault_of_instance(&self, instance: Option<InstanceIndex>, now: Instant) -> bool {
        instance.is_some_and(|instance| self.instances.has_sound_alternative(instance, now))
    }
}

fn suspect_if_ejected(
    health: Health,
    targets: &TargetTracker<RegionIndex>,
    region: RegionIndex,
    routing: &RoutingContext<'_>,
    now: Instant,
) -> Health {
    let is_ejected = || !targets.state(region, now).admits(routing.target_draw);
    if health == Health::Healthy && is_ejected() { Health::Suspect } else { health }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interactive_requests_wait_only_for_interactive_ones_if_the_region_reports_them_separately() {
        let catalogue = Arc::new(Catalogue::builtin());
        let id = "aws/us-east-1".parse().unwrap();
        let region = catalogue.index_of(&id).unwrap();
        let now = Instant::now();
        let mut states = RegionStates::new(GeoPoint::new(40.0, -74.0).unwrap(), &catalogue, now);
        let deployment: DeploymentName = "d".parse().unwrap();
        let (name, address) = ("a".parse::<InstanceName>().unwrap(), HostPort::from(([10, 0, 0, 1], 1)));
        states.set_regions([region]);
        states.instances.set_instances([(region, &name, &address)]);
        let index = states.instances.each().next().unwrap().0;
        let mut waits = |interactive_tokens| {
            let load = DeploymentLoad {
                ready: 1,
                pending_tokens: 1500,
                interactive_tokens,
                tokens_per_second: 1000.0,
                ..DeploymentLoad::default()
            };
            let deployments = BTreeMap::from([(deployment.clone(), load)]);
            let instance = name.clone();
            let report = scheduler_api::report::Report {
                region: id.clone(),
                instance,
                boot_id: 1,
                sequence: 1,
                deployments,
                draining: false,
                has_jobs: false,
            };
            let decoded = DecodedReport::of_all_loads(report);
            states.reported(index, &decoded, Duration::ZERO, now, now).unwrap();
            [Priority::Interactive, Priority::Bulk].map(|priority| {
                let routing = RoutingContext {
                    deployment: &deployment,
                    priority,
                    size: SizeClass::of(10),
                    target_draw: Permille::ALL,
                    uses_engine: true,
                    is_job: false,
                };
                states.queue_wait(region, &routing).as_millis()
            })
        };
        assert_eq!(waits(Some(100)), [100, 1500]);
        assert_eq!(waits(Some(0)), [0, 1500]);
        assert_eq!(waits(None), [1500, 1500]);
    }
}
