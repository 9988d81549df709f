//! Aggregation of the traffic that gateways report.
//!
//! Rates are those of the last reports of each gateway, whose intervals are exact, so they are at most a second old.
//! Latencies and failures are added up in slots of one second, over all gateways, so that the memory does not depend on the
//! number of gateways.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use regions::health::Health;
use regions::{DeploymentName, RegionId, RouteTable, TenantId};
use scheduler_api::plan::GatewayBoot;
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_api::traffic::{
    GatewayTraffic, LatencyHistogram, Move, MoveCause, ObservedLoad, ObservedRegion, ServedTraffic,
    TenantTraffic, health_name,
};

use crate::events::{EventKind, Events};

/// Number of reports of a gateway whose counts give its rates: few, so that a change shows at once.
const RATE_REPORTS: usize = 3;
/// Seconds over which latencies are added up.
const LATENCY_SLOTS: usize = 10;
/// Seconds over which failures are added up.
const FAILURE_SLOTS: usize = 60;
/// Maximum number of rows of a slot: a thousand deployments in eight regions, or seen by eight gateways.
pub const SLOT_ROWS_MAX: usize = 8192;
/// Time without a report after which a gateway is lost: three reports, and a slow network.
pub const GATEWAY_LOST_AFTER: Duration = Duration::from_secs(5);
/// Time without a report after which a gateway is forgotten.
const GATEWAY_EXPIRY: Duration = Duration::from_secs(60);

/// Key of served requests: region of the gateway, deployment, and region that responded.
type ServedKey = (RegionId, DeploymentName, Option<RegionId>);

/// Traffic of all gateways.
#[derive(Debug, Default)]
pub struct TrafficState {
    gateways: BTreeMap<GatewayBoot, GatewayRecord>,
    slots: VecDeque<Slot>,
    /// Events.
    pub events: Events,
    states: BTreeMap<RegionId, RegionStatus>,
    draining: Option<BTreeSet<RegionId>>,
    revisions: BTreeMap<DeploymentName, String>,
}

#[derive(Debug)]
struct GatewayRecord {
    last: GatewayTraffic,
    at: Instant,
    recent: VecDeque<RecentCounts>,
    is_lost: bool,
}

/// Counts of one report.
#[derive(Debug)]
struct RecentCounts {
    interval: Duration,
    served: BTreeMap<(DeploymentName, Option<RegionId>), Rates>,
    tenants: BTreeMap<TenantId, TenantTraffic>,
}

/// Sums of one second.
#[derive(Debug)]
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

/// State of a region according to all gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionStatus {
    /// All gateways that know it receive its reports.
    Healthy,
    /// Some gateways miss its reports.
    Degraded,
    /// No gateway uses it.
    Down,
    /// No gateway has a report of it yet.
    Unknown,
}

impl RegionStatus {
    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            RegionStatus::Healthy => "healthy",
            RegionStatus::Degraded => "degraded",
            RegionStatus::Down => "down",
            RegionStatus::Unknown => "unknown",
        }
    }

    /// Returns the state of a region with these observations.
    pub fn of(observed: impl IntoIterator<Item = Health>) -> RegionStatus {
        let mut seen = BTreeSet::new();
        seen.extend(observed.into_iter().filter(|health| *health != Health::Unknown));
        let has = |health| seen.contains(&health);
        match (has(Health::Healthy), has(Health::Suspect), has(Health::Down)) {
            (true, false, false) => RegionStatus::Healthy,
            (false, false, true) => RegionStatus::Down,
            (false, false, false) => RegionStatus::Unknown,
            _ => RegionStatus::Degraded,
        }
    }
}

/// Gateway as its reports show it.
#[derive(Clone, Copy, Debug)]
pub struct ReportingGateway<'a> {
    /// Its last report.
    pub last: &'a GatewayTraffic,
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
    /// The health of a region has changed, or requests have moved to another region.
    Urgent,
}

impl TrafficState {
    /// Adds a report. Beyond [`GATEWAYS_MAX`] gateways it is ignored.
    pub fn record(&mut self, report: GatewayTraffic, now: Instant, now_ms: u64) -> ReportUrgency {
        let gateway = report.gateway.clone();
        if !self.gateways.contains_key(&gateway) {
            if self.gateways.len() >= GATEWAYS_MAX {
                return ReportUrgency::Routine;
            }
            // A restarted gateway has another boot id, and reports for the same region.
            self.gateways.retain(|known, record| known.region != gateway.region || !record.is_lost);
        }
        if self.gateways.get(&gateway).is_none_or(|record| record.is_lost) {
            self.events.record(
                EventKind::Gateway,
                (gateway.region.as_str(), "reporting", ""),
                (0, ""),
                now_ms,
            );
        }
        self.add_to_slot(&report, now);
        let had_moves = !report.moves.is_empty();
        report.moves.iter().for_each(|moved| self.moved(moved, now_ms));
        self.keep(gateway, report, now);
        if self.update_states(now_ms) || had_moves { ReportUrgency::Urgent } else { ReportUrgency::Routine }
    }

    fn keep(&mut self, gateway: GatewayBoot, mut report: GatewayTraffic, now: Instant) {
        let seconds = report.interval.as_secs_f64().max(0.05);
        let rates = |served: &ServedTraffic| Rates {
            requests: served.requests as f64 / seconds,
            failed: served.failed as f64 / seconds,
            tokens: served.tokens as f64 / seconds,
        };
        let counts = RecentCounts {
            interval: report.interval,
            served: std::mem::take(&mut report.served)
                .into_iter()
                .map(|(key, served)| (key, rates(&served)))
                .collect(),
            tenants: std::mem::take(&mut report.tenants),
        };
        let recent = self.gateways.remove(&gateway).map(|record| record.recent);
        let mut recent = recent.unwrap_or_default();
        if recent.len() >= RATE_REPORTS {
            recent.pop_front();
        }
        recent.push_back(counts);
        self.gateways.insert(gateway, GatewayRecord { last: report, at: now, recent, is_lost: false });
    }

    fn add_to_slot(&mut self, report: &GatewayTraffic, now: Instant) {
        let is_current =
            |slot: &&mut Slot| now.saturating_duration_since(slot.begun) < Duration::from_secs(1);
        if self.slots.back_mut().filter(is_current).is_none() {
            self.slots.push_back(Slot { begun: now, latencies: BTreeMap::new(), failures: BTreeMap::new() });
            while self.slots.len() > FAILURE_SLOTS {
                self.slots.pop_front();
            }
            let old = self.slots.len().saturating_sub(LATENCY_SLOTS);
            self.slots.iter_mut().take(old).for_each(|slot| slot.latencies.clear());
        }
        let Some(slot) = self.slots.back_mut() else { return };
        for ((deployment, region), served) in &report.served {
            let key = (report.gateway.region.clone(), deployment.clone(), region.clone());
            if slot.latencies.len() < SLOT_ROWS_MAX || slot.latencies.contains_key(&key) {
                slot.latencies.entry(key).or_default().add(&served.latencies);
            }
        }
        for (key, requests) in &report.failures {
            if slot.failures.len() < SLOT_ROWS_MAX || slot.failures.contains_key(key) {
                *slot.failures.entry(key.clone()).or_default() += requests;
            }
        }
    }

    fn moved(&mut self, moved: &Move, now_ms: u64) {
        let Move { from, to, cause, requests, example } = moved;
        let kind = match cause {
            MoveCause::Spillover => EventKind::Spillover,
            // A hedged request costs little and means little.
            MoveCause::Hedge => return,
            MoveCause::Retry | MoveCause::FirstByteTimeout | MoveCause::Evacuation => EventKind::Failover,
        };
        let parts = (from.as_str(), to.as_str(), cause.as_str());
        self.events.record(kind, parts, (*requests, example), now_ms);
    }

    /// Records the changes of the regions' states; returns whether there is one.
    fn update_states(&mut self, now_ms: u64) -> bool {
        let states = self.region_states();
        let mut changed = false;
        for (region, state) in &states {
            let before = self.states.get(region).copied().unwrap_or(RegionStatus::Unknown);
            if before != *state && !matches!((before, state), (RegionStatus::Unknown, RegionStatus::Healthy))
            {
                changed = true;
                let parts = (region.as_str(), state.as_str(), before.as_str());
                self.events.record(EventKind::Health, parts, (0, ""), now_ms);
            }
        }
        self.states = states;
        changed
    }

    /// Marks gateways that have not reported for a while as lost, and forgets old ones.
    pub fn expire(&mut self, now: Instant, now_ms: u64) {
        let age = |record: &GatewayRecord| now.saturating_duration_since(record.at);
        self.gateways.retain(|_, record| age(record) <= GATEWAY_EXPIRY);
        for (gateway, record) in &mut self.gateways {
            if !record.is_lost && now.saturating_duration_since(record.at) > GATEWAY_LOST_AFTER {
                record.is_lost = true;
                let parts = (gateway.region.as_str(), "lost", "no report");
                self.events.record(EventKind::Gateway, parts, (0, ""), now_ms);
            }
        }
        self.update_states(now_ms);
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
            last: &record.last,
            age: now.saturating_duration_since(record.at),
            is_lost: record.is_lost,
        })
    }

    /// Returns the gateways that report.
    pub fn live(&self) -> impl Iterator<Item = &GatewayTraffic> {
        self.gateways.values().filter(|record| !record.is_lost).map(|record| &record.last)
    }

    fn observations(&self) -> impl Iterator<Item = (&RegionId, &ObservedRegion)> {
        self.live().flat_map(|traffic| &traffic.regions)
    }

    /// Returns the states of the regions that gateways know.
    pub fn region_states(&self) -> BTreeMap<RegionId, RegionStatus> {
        let mut observed: BTreeMap<&RegionId, Vec<Health>> = BTreeMap::new();
        self.observations().for_each(|(region, seen)| observed.entry(region).or_default().push(seen.health));
        observed.into_iter().map(|(region, seen)| (region.clone(), RegionStatus::of(seen))).collect()
    }

    /// Returns the loads of the deployments by region. A region reports the same load to every gateway; the largest is taken.
    pub fn loads(&self) -> BTreeMap<(RegionId, DeploymentName), ObservedLoad> {
        let mut loads: BTreeMap<(RegionId, DeploymentName), ObservedLoad> = BTreeMap::new();
        for (region, observed) in
            self.observations().filter(|(_, observed)| observed.health == Health::Healthy)
        {
            for (deployment, load) in &observed.loads {
                let known = loads.entry((region.clone(), deployment.clone())).or_default();
                known.ready = known.ready.max(load.ready);
                known.pending_tokens = known.pending_tokens.max(load.pending_tokens);
                known.tokens_per_second = known.tokens_per_second.max(load.tokens_per_second);
                known.held_for = known.held_for.max(load.held_for);
            }
        }
        loads
    }

    /// Returns the rates by gateway region, deployment and responding region, of the gateways that report.
    pub fn rates(&self) -> BTreeMap<ServedKey, Rates> {
        let mut all: BTreeMap<ServedKey, Rates> = BTreeMap::new();
        for record in self.gateways.values().filter(|record| !record.is_lost) {
            let total: f64 = record.recent.iter().map(|counts| counts.interval.as_secs_f64()).sum();
            for counts in &record.recent {
                let part = counts.interval.as_secs_f64() / total.max(f64::EPSILON);
                for ((deployment, region), rates) in &counts.served {
                    let key = (record.last.gateway.region.clone(), deployment.clone(), region.clone());
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
                *all.entry(key.clone()).or_default() += requests;
            }
        }
        all
    }
}

/// Returns how one gateway sees the health of a region.
pub fn health_at(traffic: &GatewayTraffic, region: &RegionId) -> &'static str {
    traffic.regions.get(region).map_or("unknown", |observed| health_name(observed.health))
}

#[cfg(test)]
mod tests;
