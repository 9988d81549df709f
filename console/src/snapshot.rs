//! State that the page shows at one moment.
//!
//! The values are for display: names are texts, rates and latencies are rounded. Lists are bounded; those with the most
//! traffic are kept, and the number of the others is stated.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use regions::catalogue::{Catalogue, Region};
use regions::{Deployment, DeploymentName, RegionId, RouteTable, TenantId, TenantRules};
use scheduler_api::apply::{RegionReplicasV1, RolloutV1};
use scheduler_api::plan::RegionCapacity;
use scheduler_api::start_failure::FailedModelV1;
use scheduler_api::traffic::LatencyHistogram;
use serde::Serialize;

use crate::events::ConsoleEvent;
use crate::traffic::{Rates, ReportingGateway, TenantRates, TrafficState, health_at};
use crate::{millis, rounded};

/// Maximum number of deployments and of tenants in a snapshot: more than a person reads, in some 200 KiB.
pub const ROWS_MAX: usize = 200;
/// Maximum number of arcs: 16 gateway regions to 32 regions.
pub const ARCS_MAX: usize = 512;
/// Maximum number of events in a snapshot.
const EVENTS_SHOWN: usize = 60;

/// Records of the hub that a snapshot shows.
#[derive(Clone, Copy, Debug)]
pub struct FleetView<'a> {
    /// Clouds and regions.
    pub catalogue: &'a Catalogue,
    /// Published route table.
    pub table: &'a RouteTable,
    /// Replicas, readers and pending changes.
    pub rollout: &'a RolloutV1,
    /// Capacity of the registered regions.
    pub capacity: &'a BTreeMap<RegionId, RegionCapacity>,
}

/// State of the fleet at one moment.
#[derive(Debug, Serialize)]
pub struct FleetSnapshot<'a> {
    at_ms: u64,
    generation: String,
    total: TrafficView,
    regions: Vec<RegionDetails>,
    gateways: Vec<GatewayView>,
    arcs: Vec<ArcView>,
    deployments: Vec<DeploymentView>,
    deployments_omitted: usize,
    tenants: Vec<TenantView>,
    tenants_omitted: usize,
    /// Whether tenants are applied to the hub; otherwise each gateway uses its own file.
    tenants_applied: bool,
    rollout: &'a RolloutV1,
    events: Vec<&'a ConsoleEvent>,
}

/// Rates and latencies.
#[derive(Clone, Debug, Default, Serialize)]
struct TrafficView {
    rate: f64,
    failed: f64,
    tokens: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_ms: Option<f64>,
}

/// Region.
#[derive(Debug, Serialize)]
struct RegionDetails {
    id: String,
    city: String,
    lat: f64,
    lon: f64,
    /// Residency zones: the jurisdictions that contain it, narrowest first.
    zones: Vec<String>,
    state: &'static str,
    draining: bool,
    registered: bool,
    spokes: Vec<(String, String)>,
    ready: u32,
    target: u32,
    capacity: u64,
    pending_tokens: u64,
    held_ms: Option<f64>,
    traffic: TrafficView,
    deployments: Vec<String>,
}

/// Gateway.
#[derive(Debug, Serialize)]
struct GatewayView {
    region: String,
    city: String,
    lat: f64,
    lon: f64,
    boot: String,
    age_ms: f64,
    lost: bool,
    generation: Option<String>,
    current: bool,
    in_flight: u64,
    traffic: TrafficView,
    regions: Vec<ObservedView>,
}

/// Region as one gateway observes it.
#[derive(Debug, Serialize)]
struct ObservedView {
    region: String,
    health: &'static str,
    rtt_ms: f64,
    report_age_ms: Option<f64>,
    in_flight: u32,
}

/// Traffic from the gateways of one region to another.
#[derive(Debug, Serialize)]
struct ArcView {
    from: String,
    to: String,
    health: &'static str,
    rtt_ms: f64,
    traffic: TrafficView,
}

/// Deployment.
#[derive(Debug, Serialize)]
struct DeploymentView {
    name: String,
    task: String,
    model: String,
    engine: String,
    residency: String,
    placement: Vec<String>,
    min: u32,
    max: u32,
    ready: u32,
    target: u32,
    pending_tokens: u64,
    held_ms: Option<f64>,
    traffic: TrafficView,
    regions: Vec<ServingView>,
    /// Outcomes of the requests without success in the last minute.
    failures: Vec<(String, u64)>,
}

/// Deployment in one region.
#[derive(Debug, Serialize)]
struct ServingView {
    region: String,
    ready: u32,
    target: Option<u32>,
    registered: bool,
    pending_tokens: u64,
    tokens_per_second: u64,
    held_ms: Option<f64>,
    rate: f64,
    /// Models of which no replica can start there.
    failed: Vec<FailedView>,
}

/// Model of which no replica can start in a region.
#[derive(Debug, Serialize)]
struct FailedView {
    model: String,
    reason: &'static str,
    message: String,
    /// Whether the model is to replace the served one, whose requests it does not affect.
    is_next: bool,
}

/// Tenant.
#[derive(Debug, Default, Serialize)]
struct TenantView {
    id: String,
    applied: bool,
    residency: String,
    deployments: Option<Vec<String>>,
    priority: Option<String>,
    weight: u32,
    requests_per_second: Option<u64>,
    inputs_per_second: Option<u64>,
    tokens_per_minute: Option<u64>,
    rate: f64,
    failed: f64,
    limited: f64,
    inputs: f64,
    tokens: f64,
}

/// Rates and latencies that are added up.
#[derive(Clone, Debug, Default)]
struct Sum {
    rates: Rates,
    latencies: LatencyHistogram,
}

impl Sum {
    fn add(&mut self, rates: &Rates) {
        self.rates.requests += rates.requests;
        self.rates.failed += rates.failed;
        self.rates.tokens += rates.tokens;
    }

    fn view(&self) -> TrafficView {
        let Rates { requests, failed, tokens } = self.rates;
        TrafficView {
            rate: rounded(requests),
            failed: rounded(failed),
            tokens: rounded(tokens),
            p50_ms: self.latencies.quantile(0.5).map(millis),
            p99_ms: self.latencies.quantile(0.99).map(millis),
        }
    }
}

/// Traffic added up by what the page shows. It is computed once for the charts and the snapshot of the same moment.
#[derive(Debug, Default)]
pub struct TrafficSums {
    total: Sum,
    gateways: BTreeMap<RegionId, Sum>,
    regions: BTreeMap<RegionId, Sum>,
    arcs: BTreeMap<(RegionId, RegionId), Sum>,
    deployments: BTreeMap<DeploymentName, Sum>,
    serving: BTreeMap<(DeploymentName, RegionId), f64>,
}

impl TrafficSums {
    /// Adds up the traffic at `now`.
    pub fn of(traffic: &TrafficState, now: Instant) -> TrafficSums {
        let mut sums = TrafficSums::default();
        for ((gateway, deployment, region), rates) in traffic.rates() {
            sums.each(&gateway, &deployment, region.as_ref(), |sum| sum.add(&rates));
            if let Some(region) = region {
                *sums.serving.entry((deployment, region)).or_default() += rates.requests;
            }
        }
        for ((gateway, deployment, region), latencies) in traffic.latencies(now) {
            sums.each(&gateway, &deployment, region.as_ref(), |sum| sum.latencies.add(&latencies));
        }
        sums
    }

    fn each(
        &mut self,
        gateway: &RegionId,
        deployment: &DeploymentName,
        region: Option<&RegionId>,
        add: impl Fn(&mut Sum),
    ) {
        add(&mut self.total);
        add(self.gateways.entry(gateway.clone()).or_default());
        add(self.deployments.entry(deployment.clone()).or_default());
        if let Some(region) = region {
            add(self.regions.entry(region.clone()).or_default());
            add(self.arcs.entry((gateway.clone(), region.clone())).or_default());
        }
    }
}

/// Rates and latencies for the charts.
#[derive(Debug, Default)]
pub struct ChartValues {
    /// All requests.
    pub total: [f64; 4],
    /// Requests per second by responding region.
    pub regions: BTreeMap<String, f64>,
    /// Rate, failures, p50 and p99 by deployment.
    pub deployments: BTreeMap<String, [f64; 4]>,
}

/// Returns the values of the charts.
pub fn chart_values(sums: &TrafficSums) -> ChartValues {
    let values = |sum: &Sum| {
        let view = sum.view();
        [view.rate, view.failed, view.p50_ms.unwrap_or(0.0), view.p99_ms.unwrap_or(0.0)]
    };
    ChartValues {
        total: values(&sums.total),
        regions: sums.regions.iter().map(|(id, sum)| (id.to_string(), rounded(sum.rates.requests))).collect(),
        deployments: sums.deployments.iter().map(|(name, sum)| (name.to_string(), values(sum))).collect(),
    }
}

impl<'a> FleetSnapshot<'a> {
    /// Returns the state of the fleet at `now`, which is `at_ms`. `sums` are those of `traffic`.
    pub fn new(
        fleet: FleetView<'a>,
        traffic: &'a TrafficState,
        sums: &TrafficSums,
        (now, at_ms): (Instant, u64),
    ) -> FleetSnapshot<'a> {
        let (deployments, deployments_omitted) = deployments(fleet, traffic, sums, now);
        let (tenants, tenants_omitted) = tenants(fleet, traffic);
        FleetSnapshot {
            at_ms,
            generation: fleet.table.generation.to_string(),
            total: sums.total.view(),
            regions: regions(fleet, traffic, sums),
            gateways: traffic.gateways(now).map(|gateway| gateway_view(fleet, &gateway, sums)).collect(),
            arcs: arcs(traffic, sums),
            deployments,
            deployments_omitted,
            tenants,
            tenants_omitted,
            tenants_applied: fleet.table.tenants.is_some(),
            rollout: fleet.rollout,
            events: traffic.events.latest().take(EVENTS_SHOWN).collect(),
        }
    }
}

/// Returns city and coordinates of a region; nothing for one that is not in the catalogue.
fn place(region: Option<&Region>) -> (String, f64, f64) {
    region
        .map_or_else(Default::default, |region| (region.city.clone(), region.point.lat(), region.point.lon()))
}

fn held_ms(held_for: Option<Duration>) -> Option<f64> {
    held_for.map(millis)
}

/// Returns ready and target replicas of the deployments of a region.
fn replicas(rollout: &RolloutV1, region: &str) -> (u32, u32) {
    let here = rollout.deployments.iter().flat_map(|deployment| &deployment.regions);
    here.filter(|replicas| replicas.region == region).fold((0, 0), |(ready, target), replicas| {
        let here = replicas.models.iter().map(|model| model.ready).fold(0, u32::saturating_add);
        (ready.saturating_add(here), target.saturating_add(replicas.target.unwrap_or(here)))
    })
}

fn regions(fleet: FleetView<'_>, traffic: &TrafficState, sums: &TrafficSums) -> Vec<RegionDetails> {
    let FleetView { catalogue, table, rollout, capacity } = fleet;
    let states = traffic.regions.states().map(|(region, _)| region);
    let known: BTreeSet<&RegionId> = table.regions.keys().chain(capacity.keys()).chain(states).collect();
    let view = |id: &RegionId| {
        let (route, region) = (table.regions.get(id), catalogue.get(id));
        let (city, lat, lon) = place(region);
        let (ready, target) = replicas(rollout, id.as_str());
        let here = || traffic.regions.loads(id).map(|(_, load)| load);
        RegionDetails {
            id: id.to_string(),
            city,
            lat,
            lon,
            zones: region.map(zones).unwrap_or_default(),
            state: traffic.regions.state(id).as_str(),
            draining: route.is_some_and(|route| route.draining),
            registered: capacity.contains_key(id),
            spokes: route
                .iter()
                .flat_map(|route| &route.instances)
                .map(|(name, address)| (name.to_string(), address.to_string()))
                .collect(),
            ready,
            target,
            capacity: capacity.get(id).map_or(0, |capacity| {
                capacity.pools.iter().map(|pool| pool.tokens_per_second).fold(0, u64::saturating_add)
            }),
            pending_tokens: here().map(|load| load.pending_tokens).fold(0, u64::saturating_add),
            held_ms: held_ms(here().filter_map(|load| load.held_for).max()),
            traffic: sums.regions.get(id).map(Sum::view).unwrap_or_default(),
            deployments: route
                .iter()
                .flat_map(|route| &route.deployments)
                .map(|name| name.to_string())
                .collect(),
        }
    };
    known.into_iter().map(view).collect()
}

/// Returns the jurisdictions of a region, the narrowest first: subdivision, country, unions.
fn zones(region: &Region) -> Vec<String> {
    let (narrowest, country) = (region.narrowest(), &region.country);
    let others = region.jurisdictions.iter().filter(|zone| *zone != narrowest && *zone != country);
    let own = [narrowest, country].into_iter().take(if narrowest == country { 1 } else { 2 });
    own.chain(others).map(ToString::to_string).collect()
}

fn gateway_view(fleet: FleetView<'_>, gateway: &ReportingGateway<'_>, sums: &TrafficSums) -> GatewayView {
    let ReportingGateway { state, age, is_lost } = *gateway;
    let id = &state.gateway.region;
    let (city, lat, lon) = place(fleet.catalogue.get(id));
    let regions = state.regions.iter().map(|(region, seen)| ObservedView {
        region: region.to_string(),
        health: health_at(state, region),
        rtt_ms: millis(seen.rtt),
        report_age_ms: seen.report_age.map(millis),
        in_flight: seen.in_flight,
    });
    GatewayView {
        region: id.to_string(),
        city,
        lat,
        lon,
        boot: format!("{:016x}", state.gateway.boot_id),
        age_ms: millis(age),
        lost: is_lost,
        generation: state.generation.map(|generation| generation.to_string()),
        current: state.generation == Some(fleet.table.generation),
        in_flight: state.in_flight,
        traffic: sums.gateways.get(id).map(Sum::view).unwrap_or_default(),
        regions: regions.collect(),
    }
}

/// Returns an arc from each region with gateways to each region that they know, those with the most traffic first.
fn arcs(traffic: &TrafficState, sums: &TrafficSums) -> Vec<ArcView> {
    let mut all: BTreeMap<(&RegionId, &RegionId), ArcView> = BTreeMap::new();
    for gateway in traffic.live() {
        let from = &gateway.gateway.region;
        for (to, seen) in &gateway.regions {
            let sum = sums.arcs.get(&(from.clone(), to.clone()));
            all.entry((from, to)).or_insert_with(|| ArcView {
                from: from.to_string(),
                to: to.to_string(),
                health: health_at(gateway, to),
                rtt_ms: millis(seen.rtt),
                traffic: sum.map(Sum::view).unwrap_or_default(),
            });
        }
    }
    let mut arcs: Vec<_> = all.into_values().collect();
    arcs.sort_by(|one, other| other.traffic.rate.total_cmp(&one.traffic.rate));
    arcs.truncate(ARCS_MAX);
    arcs
}

fn deployments(
    fleet: FleetView<'_>,
    traffic: &TrafficState,
    sums: &TrafficSums,
    now: Instant,
) -> (Vec<DeploymentView>, usize) {
    let failures = traffic.failures(now);
    let rate = |name: &DeploymentName| sums.deployments.get(name).map_or(0.0, |sum| sum.rates.requests);
    let mut names: Vec<_> = fleet.table.deployments.iter().collect();
    names.sort_by(|(one, _), (other, _)| rate(other).total_cmp(&rate(one)).then(one.cmp(other)));
    let omitted = names.len().saturating_sub(ROWS_MAX);
    names.truncate(ROWS_MAX);
    let view = |(name, deployment): (&DeploymentName, &Deployment)| {
        let regions = serving(fleet, name, traffic, sums);
        let sum = |count: fn(&ServingView) -> u64| regions.iter().map(count).fold(0, u64::saturating_add);
        let held = regions.iter().filter_map(|serving| serving.held_ms).max_by(f64::total_cmp);
        let mut failed: Vec<_> = failures
            .iter()
            .filter(|((failed, _), _)| failed == name)
            .map(|((_, outcome), requests)| (outcome.clone(), *requests))
            .collect();
        failed.sort_by_key(|(_, requests)| std::cmp::Reverse(*requests));
        DeploymentView {
            name: name.to_string(),
            task: deployment.task.to_string(),
            model: deployment.model.clone(),
            engine: format!("{} {}", deployment.engine.kind, deployment.engine.precision),
            residency: deployment.residency.to_string(),
            placement: deployment.regions.iter().map(ToString::to_string).collect(),
            min: deployment.scaling.min,
            max: deployment.scaling.max,
            ready: regions.iter().map(|serving| serving.ready).fold(0, u32::saturating_add),
            target: regions
                .iter()
                .map(|serving| serving.target.unwrap_or(serving.ready))
                .fold(0, u32::saturating_add),
            pending_tokens: sum(|serving| serving.pending_tokens),
            held_ms: held,
            traffic: sums.deployments.get(name).map(Sum::view).unwrap_or_default(),
            regions,
            failures: failed,
        }
    };
    (names.into_iter().map(view).collect(), omitted)
}

fn serving(
    fleet: FleetView<'_>,
    name: &DeploymentName,
    traffic: &TrafficState,
    sums: &TrafficSums,
) -> Vec<ServingView> {
    let replicas = fleet.rollout.deployments.iter().find(|deployment| deployment.name == name.as_str());
    let regions = replicas.iter().flat_map(|deployment| &deployment.regions);
    let view = regions.filter_map(|replicas| {
        let id: RegionId = replicas.region.parse().ok()?;
        let load = traffic.regions.load(&id, name).copied().unwrap_or_default();
        Some(ServingView {
            region: replicas.region.clone(),
            ready: replicas.models.iter().map(|model| model.ready).fold(0, u32::saturating_add),
            target: replicas.target,
            registered: fleet.table.regions.get(&id).is_some_and(|route| route.deployments.contains(name)),
            pending_tokens: load.pending_tokens,
            tokens_per_second: load.tokens_per_second,
            held_ms: held_ms(load.held_for),
            rate: rounded(sums.serving.get(&(name.clone(), id)).copied().unwrap_or(0.0)),
            failed: failed_models(replicas),
        })
    });
    view.collect()
}

fn failed_models(replicas: &RegionReplicasV1) -> Vec<FailedView> {
    let both = [(&replicas.failed, false), (&replicas.failed_next, true)];
    let each = both.into_iter().filter_map(|(failed, is_next)| {
        let FailedModelV1 { model, failure, .. } = failed.as_ref()?;
        let (reason, message) = (failure.reason.as_str(), failure.message.clone());
        Some(FailedView { model: model.clone(), reason, message, is_next })
    });
    each.collect()
}

fn tenants(fleet: FleetView<'_>, traffic: &TrafficState) -> (Vec<TenantView>, usize) {
    let rates = traffic.tenant_rates();
    let applied: BTreeMap<&TenantId, &TenantRules> =
        fleet.table.tenants.iter().flat_map(|tenants| &tenants.all).collect();
    let names: BTreeSet<&TenantId> = applied.keys().copied().chain(rates.keys()).collect();
    let mut all: Vec<_> = names
        .into_iter()
        .map(|id| {
            let TenantRates { requests, failed, limited, inputs, tokens } =
                rates.get(id).copied().unwrap_or_default();
            let view = applied.get(id).map(|rules| tenant_rules(rules)).unwrap_or_default();
            TenantView {
                id: id.to_string(),
                rate: rounded(requests),
                failed: rounded(failed),
                limited: rounded(limited),
                inputs: rounded(inputs),
                tokens: rounded(tokens),
                ..view
            }
        })
        .collect();
    all.sort_by(|one: &TenantView, other| {
        other.rate.partial_cmp(&one.rate).unwrap_or(Ordering::Equal).then_with(|| one.id.cmp(&other.id))
    });
    let omitted = all.len().saturating_sub(ROWS_MAX);
    all.truncate(ROWS_MAX);
    (all, omitted)
}

fn tenant_rules(rules: &TenantRules) -> TenantView {
    let limit = |limit: Option<std::num::NonZeroU64>| limit.map(std::num::NonZeroU64::get);
    TenantView {
        applied: true,
        residency: rules.residency.to_string(),
        deployments: rules.deployments.as_ref().map(|names| names.iter().map(ToString::to_string).collect()),
        priority: rules.priority.map(|priority| priority.as_str().to_owned()),
        weight: rules.weight,
        requests_per_second: limit(rules.limits.requests_per_second),
        inputs_per_second: limit(rules.limits.inputs_per_second),
        tokens_per_minute: limit(rules.limits.tokens_per_minute),
        ..TenantView::default()
    }
}

#[cfg(test)]
mod tests;
