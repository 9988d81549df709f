//! Aggregation of the traffic that gateways report.
//!
//! Rates are those of the last reports of each gateway, whose intervals are exact, so they are at most a second old.
//! Latencies and failures are added up in slots of one second, over all gateways, so that the memory does not depend on the
//! number of gateways.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::health::Health;
use regions::{DeploymentName, Generation, RegionId, RouteTable, TenantId};
use scheduler_api::plan::GatewayBoot;
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_api::traffic::{
    GatewayTraffic, LatencyHistogram, Move, MoveCause, ObservedRegion, ServedTraffic, TenantTraffic,
};

use crate::events::{EventKind, Events};
use crate::observed::{ObservedRegions, StatusChange};

/// Number of reports of a gateway whose counts give its rates: few, so that a change shows at once.
const RATE_REPORTS: usize = 3;
/// Seconds over which latencies are added up.
const LATENCY_SLOTS: usize = 10;
/// Seconds over which failures are added up.
const FAILURE_SLOTS: usize = 60;
/// Maximum number of rows of a slot: a thousand deployments in eight regions, or seen by eight gateways.
pub const SLOT_ROWS_MAX: usize = 8192;
/// Maximum number of gateways of one region; beyond it the one that has not reported for longest is forgotten. A certificate
/// is for one region, and its owner chooses the boot ids, so it must not use up [`GATEWAYS_MAX`] alone.
pub const REGION_GATEWAYS_MAX: usize = 64;
/// Maximum number of moves of a report that become events: those of a gateway to all regions that a person reads about.
pub const MOVES_MAX: usize = 64;
/// Time without a report after which a gateway is lost: three reports, and a slow network.
pub const GATEWAY_LOST_AFTER: Duration = Duration::from_secs(5);
/// Time without a report after which a gateway is forgotten.
const GATEWAY_EXPIRY: Duration = Duration::from_secs(60);

/// Key of served requests: region of the gateway, deployment, and region that responded.
type ServedKey = (RegionId, DeploymentName, Option<RegionId>);

/// Traffic of all gateways.
///
/// A clone is cheap, because the large parts are shared: the hub clones the state under its lock, and computes sums and
/// snapshots from the clone.
#[derive(Clone, Debug, Default)]
pub struct TrafficState {
    gateways: BTreeMap<GatewayBoot, GatewayRecord>,
    slots: VecDeque<Arc<Slot>>,
    /// Regions as the gateways observe them.
    pub regions: ObservedRegions,
    /// Events.
    pub events: Events,
    /// Number of gateways that were forgotten because of [`REGION_GATEWAYS_MAX`].
    pub evicted: u64,
    draining: Option<BTreeSet<RegionId>>,
    revisions: BTreeMap<DeploymentName, String>,
}

#[derive(Clone, Debug)]
struct GatewayRecord {
    state: Arc<LastReport>,
    at: Instant,
    recent: VecDeque<Arc<RecentCounts>>,
    is_lost: bool,
}

/// Last report of a gateway: its state, without the counts.
#[derive(Debug)]
pub struct LastReport {
    /// The gateway.
    pub gateway: GatewayBoot,
    /// Generation of its route table.
    pub generation: Option<Generation>,
    /// Attempts in flight.
    pub in_flight: u64,
    /// Regions as it observes them.
    pub regions: BTreeMap<RegionId, SeenRegion>,
}

/// Region as one gateway observes it.
#[derive(Clone, Copy, Debug)]
pub struct SeenRegion {
    /// Health.
    pub health: Health,
    /// Time since its last report.
    pub report_age: Option<Duration>,
    /// Estimated round trip.
    pub rtt: Duration,
    /// Attempts of the gateway in flight to it.
    pub in_flight: u32,
}

/// Counts of one report.
#[derive(Debug)]
struct RecentCounts {
    interval: Duration,
    served: BTreeMap<(DeploymentName, Option<RegionId>), Rates>,
    tenants: BTreeMap<TenantId, TenantTraffic>,
}

/// Sums of one second.
#[derive(Clone, Debug)]
struct Slot {
    begun: Instant,
    latencies: BTreeMap<ServedKey, LatencyHistogram>,
    failures: BTreeMap<(DeploymentName, String), u64>,
}

/// Rates per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Requests.
    pub requests: f64,
    /// Requests that failed by no fault of the client.
    pub failed: f64,
    /// Computed tokens.
    pub tokens: f64,
}

/// Rates per second of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TenantRates {
    /// Requests.
    pub requests: f64,
    /// Requests that failed by no fault of the client.
    pub failed: f64,
    /// Requests that its limits rejected.
    pub limited: f64,
    /// Inputs.
    pub inputs: f64,
    /// Computed tokens.
    pub tokens: f64,
}

/// Gateway as its reports show it.
#[derive(Clone, Copy, Debug)]
pub struct ReportingGateway<'a> {
    /// State, according to its last report.
    pub state: &'a LastReport,
    /// Time since then.
    pub age: Duration,
    /// Whether it has not reported for [`GATEWAY_LOST_AFTER`].
    pub is_lost: bool,
}

/// Whether a report is worth showing at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportUrgency {
    /// With the next update.
    Routine,
    /// There is an event: the health of a region has changed, or requests have begun to move to another region.
    Urgent,
}

/// [`GATEWAYS_MAX`] gateways report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyGateways;

impl TrafficState {
    /// Adds a report.
    ///
    /// # Errors
    ///
    /// When it is of a further gateway, and [`GATEWAYS_MAX`] report.
    pub fn record(
        &mut self,
        report: GatewayTraffic,
        now: Instant,
        now_ms: u64,
    ) -> Result<ReportUrgency, TooManyGateways> {
        let is_reporting = self.gateways.get(&report.gateway).map(|record| !record.is_lost);
        if is_reporting.is_none() {
            self.make_room(&report.gateway.region, now_ms)?;
        }
        if is_reporting != Some(true) {
            let parts = (report.gateway.region.as_str(), "reporting", "");
            self.events.record(EventKind::Gateway, parts, (0, ""), now_ms);
        }
        self.add_to_slot(&report, now);
        let mut has_moved = false;
        for moved in report.moves.iter().take(MOVES_MAX) {
            has_moved |= self.moved(moved, now_ms);
        }
        let has_changed = self.keep(report, now, now_ms);
        Ok(if has_changed || has_moved { ReportUrgency::Urgent } else { ReportUrgency::Routine })
    }

    /// Forgets gateways of a region, so that another one has room.
    fn make_room(&mut self, region: &RegionId, now_ms: u64) -> Result<(), TooManyGateways> {
        let boot = |boot_id| GatewayBoot { region: region.clone(), boot_id };
        let own = self.gateways.range(boot(0)..=boot(u64::MAX));
        let own: Vec<_> = own.map(|(gateway, record)| (record.at, gateway.clone(), record.is_lost)).collect();
        // A restarted gateway has another boot id, and reports for the same region.
        for (_, lost, _) in own.iter().filter(|(_, _, is_lost)| *is_lost) {
            self.gateways.remove(lost);
        }
        let reporting = || own.iter().filter(|(_, _, is_lost)| !is_lost);
        if reporting().count() >= REGION_GATEWAYS_MAX {
            let oldest = reporting().min_by_key(|(at, _, _)| *at).map(|(_, gateway, _)| gateway);
            if let Some(record) = oldest.and_then(|oldest| self.gateways.remove(oldest)) {
                self.forget_observations(&record.state, now_ms);
            }
            self.evicted = self.evicted.saturating_add(1);
        }
        if self.gateways.len() >= GATEWAYS_MAX { Err(TooManyGateways) } else { Ok(()) }
    }

    /// Keeps what a report says of its gateway and the regions. Returns whether the state of a region has changed.
    fn keep(&mut self, report: GatewayTraffic, now: Instant, now_ms: u64) -> bool {
        let GatewayTraffic { gateway, generation, interval, in_flight, regions, served, tenants, .. } =
            report;
        let seconds = interval.as_secs_f64().max(0.05);
        let rates = |served: &ServedTraffic| Rates {
            requests: served.requests as f64 / seconds,
            failed: served.failed as f64 / seconds,
            tokens: served.tokens as f64 / seconds,
        };
        let served = served.into_iter().map(|(key, served)| (key, rates(&served))).collect();
        let (before, mut recent) = match self.gateways.remove(&gateway) {
            Some(GatewayRecord { state, recent, is_lost, .. }) => ((!is_lost).then_some(state), recent),
            None => (None, VecDeque::new()),
        };
        if recent.len() >= RATE_REPORTS {
            recent.pop_front();
        }
        recent.push_back(Arc::new(RecentCounts { interval, served, tenants }));
        let (seen, has_changed) = self.observe(regions, before.as_deref(), now_ms);
        let state = Arc::new(LastReport { gateway: gateway.clone(), generation, in_flight, regions: seen });
        self.gateways.insert(gateway, GatewayRecord { state, at: now, recent, is_lost: false });
        has_changed
    }

    /// Replaces what a gateway has observed of the regions in its last report, `before`. Returns the regions without their
    /// loads, and whether the state of one has changed.
    fn observe(
        &mut self,
        regions: BTreeMap<RegionId, ObservedRegion>,
        before: Option<&LastReport>,
        now_ms: u64,
    ) -> (BTreeMap<RegionId, SeenRegion>, bool) {
        let known = |region: &RegionId| Some(before?.regions.get(region)?.health);
        let (mut seen, mut has_changed) = (BTreeMap::new(), false);
        for (region, observed) in regions {
            let ObservedRegion { health, report_age, rtt, in_flight, loads } = observed;
            has_changed |= self.replace(&region, known(&region), Some(health), now_ms);
            if health == Health::Healthy {
                self.regions.replace_loads(&region, loads);
            }
            seen.insert(region, SeenRegion { health, report_age, rtt, in_flight });
        }
        let gone = before.iter().flat_map(|before| &before.regions);
        for (region, gone) in gone.filter(|(region, _)| !seen.contains_key(*region)) {
            has_changed |= self.replace(region, Some(gone.health), None, now_ms);
        }
        (seen, has_changed)
    }

    /// Removes the observations of a gateway that does not report any more.
    fn forget_observations(&mut self, gateway: &LastReport, now_ms: u64) {
        for (region, seen) in &gateway.regions {
            self.replace(region, Some(seen.health), None, now_ms);
        }
    }

    /// Replaces one observation, and records the change of the region's state. Returns whether there is one.
    fn replace(
        &mut self,
        region: &RegionId,
        before: Option<Health>,
        after: Option<Health>,
        now_ms: u64,
    ) -> bool {
        let Some(StatusChange { from, to }) = self.regions.replace(region, before, after) else {
            return false;
        };
        let parts = (region.as_str(), to.as_str(), from.as_str());
        self.events.record(EventKind::Health, parts, (0, ""), now_ms);
        true
    }

    fn add_to_slot(&mut self, report: &GatewayTraffic, now: Instant) {
        let is_current =
            |slot: &&Arc<Slot>| now.saturating_duration_since(slot.begun) < Duration::from_secs(1);
        if self.slots.back().filter(is_current).is_none() {
            let slot = Slot { begun: now, latencies: BTreeMap::new(), failures: BTreeMap::new() };
            self.slots.push_back(Arc::new(slot));
            while self.slots.len() > FAILURE_SLOTS {
                self.slots.pop_front();
            }
            let old = self.slots.len().saturating_sub(LATENCY_SLOTS);
            for slot in self.slots.iter_mut().take(old).filter(|slot| !slot.latencies.is_empty()) {
                let failures = slot.failures.clone();
                *slot = Arc::new(Slot { begun: slot.begun, latencies: BTreeMap::new(), failures });
            }
        }
        // Copied if a snapshot is being computed from it.
        let Some(slot) = self.slots.back_mut().map(Arc::make_mut) else { return };
        for ((deployment, region), served) in &report.served {
            let key = (report.gateway.region.clone(), deployment.clone(), region.clone());
            if slot.latencies.len() < SLOT_ROWS_MAX || slot.latencies.contains_key(&key) {
                slot.latencies.entry(key).or_default().add(&served.latencies);
            }
        }
        for (key, requests) in &report.failures {
            if slot.failures.len() < SLOT_ROWS_MAX || slot.failures.contains_key(key) {
                let sum = slot.failures.entry(key.clone()).or_default();
                *sum = sum.saturating_add(*requests);
            }
        }
    }

    /// Records a move; returns whether it is a new event.
    fn moved(&mut self, moved: &Move, now_ms: u64) -> bool {
        let Move { from, to, cause, requests, example } = moved;
        let kind = match cause {
            MoveCause::Spillover => EventKind::Spillover,
            // A hedged request costs little and means little.
            MoveCause::Hedge => return false,
            // A cause that only the gateway knows moved a request as well.
            MoveCause::Retry | MoveCause::FirstByteTimeout | MoveCause::Evacuation | MoveCause::Other => {
                EventKind::Failover
            }
        };
        let parts = (from.as_str(), to.as_str(), cause.as_str());
        self.events.record(kind, parts, (*requests, example), now_ms)
    }

    /// Marks gateways that have not reported for a while as lost, and forgets old ones.
    pub fn expire(&mut self, now: Instant, now_ms: u64) {
        let age = |record: &GatewayRecord| now.saturating_duration_since(record.at);
        let is_silent = |record: &&mut GatewayRecord| !record.is_lost && age(record) > GATEWAY_LOST_AFTER;
        let mut lost = Vec::new();
        for record in self.gateways.values_mut().filter(is_silent) {
            record.is_lost = true;
            lost.push(record.state.clone());
        }
        self.gateways.retain(|_, record| age(record) <= GATEWAY_EXPIRY);
        for state in lost {
            let parts = (state.gateway.region.as_str(), "lost", "no report");
            self.events.record(EventKind::Gateway, parts, (0, ""), now_ms);
            self.forget_observations(&state, now_ms);
        }
    }

    /// Records drains and switches of models since the last table.
    pub fn observe_table(&mut self, table: &RouteTable, now_ms: u64) {
        let draining: BTreeSet<RegionId> =
            table.regions.iter().filter(|(_, route)| route.draining).map(|(id, _)| id.clone()).collect();
        if let Some(before) = &self.draining {
            let mut record = |region: &RegionId, state: &str| {
                self.events.record(EventKind::Drain, (region.as_str(), state, ""), (0, ""), now_ms);
            };
            draining.difference(before).for_each(|region| record(region, "draining"));
            before.difference(&draining).for_each(|region| record(region, "in service"));
        }
        self.draining = Some(draining);
        let mut revisions = BTreeMap::new();
        for (name, served) in table.revisions.iter().flatten() {
            let current = served.current.to_string();
            if self.revisions.get(name).is_some_and(|before| *before != current) {
                self.events.record(EventKind::Rollout, (name.as_str(), &current, ""), (0, ""), now_ms);
            }
            revisions.insert(name.clone(), current);
        }
        self.revisions = revisions;
    }

    /// Returns the gateways.
    pub fn gateways(&self, now: Instant) -> impl Iterator<Item = ReportingGateway<'_>> {
        self.gateways.values().map(move |record| ReportingGateway {
            state: &record.state,
            age: now.saturating_duration_since(record.at),
            is_lost: record.is_lost,
        })
    }

    /// Returns the gateways that report.
    pub fn live(&self) -> impl Iterator<Item = &LastReport> {
        self.gateways.values().filter(|record| !record.is_lost).map(|record| &*record.state)
    }

    /// Returns the number of known gateways.
    pub fn gateway_count(&self) -> usize {
        self.gateways.len()
    }

    /// Returns the rates by gateway region, deployment and responding region, of the gateways that report.
    pub fn rates(&self) -> BTreeMap<ServedKey, Rates> {
        let mut all: BTreeMap<ServedKey, Rates> = BTreeMap::new();
        for record in self.gateways.values().filter(|record| !record.is_lost) {
            let total: f64 = record.recent.iter().map(|counts| counts.interval.as_secs_f64()).sum();
            for counts in &record.recent {
                let part = counts.interval.as_secs_f64() / total.max(f64::EPSILON);
                for ((deployment, region), rates) in &counts.served {
                    let key = (record.state.gateway.region.clone(), deployment.clone(), region.clone());
                    let sum = all.entry(key).or_default();
                    sum.requests += rates.requests * part;
                    sum.failed += rates.failed * part;
                    sum.tokens += rates.tokens * part;
                }
            }
        }
        all
    }

    /// Returns the rates of the tenants.
    pub fn tenant_rates(&self) -> BTreeMap<TenantId, TenantRates> {
        let mut all: BTreeMap<TenantId, TenantRates> = BTreeMap::new();
        for record in self.gateways.values().filter(|record| !record.is_lost) {
            let total: f64 = record.recent.iter().map(|counts| counts.interval.as_secs_f64()).sum();
            let per_second = |count: u64| count as f64 / total.max(0.05);
            for (tenant, traffic) in record.recent.iter().flat_map(|counts| &counts.tenants) {
                let sum = all.entry(tenant.clone()).or_default();
                sum.requests += per_second(traffic.requests);
                sum.failed += per_second(traffic.failed);
                sum.limited += per_second(traffic.limited);
                sum.inputs += per_second(traffic.inputs);
                sum.tokens += per_second(traffic.tokens);
            }
        }
        all
    }

    /// Returns the latencies of the last ten seconds.
    pub fn latencies(&self, now: Instant) -> BTreeMap<ServedKey, LatencyHistogram> {
        let window = Duration::from_secs(LATENCY_SLOTS as u64);
        let mut all: BTreeMap<ServedKey, LatencyHistogram> = BTreeMap::new();
        for slot in self.slots.iter().filter(|slot| now.saturating_duration_since(slot.begun) <= window) {
            for (key, latencies) in &slot.latencies {
                all.entry(key.clone()).or_default().add(latencies);
            }
        }
        all
    }

    /// Returns the failures of the last minute by deployment and outcome.
    pub fn failures(&self, now: Instant) -> BTreeMap<(DeploymentName, String), u64> {
        let window = Duration::from_secs(FAILURE_SLOTS as u64);
        let mut all: BTreeMap<(DeploymentName, String), u64> = BTreeMap::new();
        for slot in self.slots.iter().filter(|slot| now.saturating_duration_since(slot.begun) <= window) {
            for (key, requests) in &slot.failures {
                let sum = all.entry(key.clone()).or_default();
                *sum = u64::saturating_add(*sum, *requests);
            }
        }
        all
    }
}

/// Returns how one gateway sees the health of a region.
pub fn health_at(gateway: &LastReport, region: &RegionId) -> &'static str {
    gateway.regions.get(region).map_or(Health::Unknown, |seen| seen.health).as_str()
}

#[cfg(test)]
mod tests;
