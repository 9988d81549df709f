//! `/metrics` of a gateway: its counters, and gauges read from the components at the time of the scrape.

use super::explanation_archive::ArchiveScrape;
use super::job_transfer::{RESULTS_BYTES_MAX, TRANSFERS_MAX};
use super::operator_state::Operations;
use super::scatter::{PART_BODIES_BYTES_MAX, SPLIT_REQUESTS_MAX};
use crate::metrics::{EdgeMetrics, Family, HopEvent, InGateway, ListenerScrape};
use crate::receipts::ReceiptScrape;
use crate::usage::LedgerState;
use gateway_core::circuit::BreakerState;
use identity::{CertificateMetrics, ConnectionFailureCause};
use metrics::page::RoleMetrics;
use metrics::{BuildMetrics, ByName, Label, MetricsSnapshot, OneOf, Total, metric_set};
use regions::Generation;
use regions::health::Health;
use regions::set::RegionIndex;
use resolver::ResolverMetrics;
use scheduler_api::usage::ROWS_MAX;
use std::time::{Duration, Instant};
use supervision::panics::PanicMetrics;
use telemetry::{ExportError, LogMetrics, MetricExports, MetricsExport, Process, TraceMetrics, Tracer};

/// Role in the names of shared metrics.
const ROLE: &str = "gateway";

impl Label<InGateway> for Health {
    fn values() -> Vec<&'static str> {
        Health::ALL.map(Health::as_str).to_vec()
    }

    fn index(self) -> usize {
        self as usize
    }
}

metric_set! {
    /// All metrics of a gateway.
    pub(super) struct GatewayScrape<'a> {
        /// Counters.
        counted: &'a EdgeMetrics = set,
        /// Epoch of the current route table; 0 before the first.
        route_epoch: u64 = "meridian_gateway_route_epoch",
        /// Generation of the current route table within its epoch.
        route_generation: u64 = "meridian_gateway_route_generation",
        /// Epoch of the current traffic plan; 0 before the first.
        plan_epoch: u64 = "meridian_gateway_plan_epoch",
        /// Generation of the current traffic plan within its epoch.
        plan_generation: u64 = "meridian_gateway_plan_generation",
        /// Rows of the current traffic plan, one for each class and origin.
        plan_rows: usize = "meridian_gateway_plan_rows",
        /// Traffic plans of the hub that were rejected because they were invalid or not newer.
        plans_refused: Total = "meridian_gateway_plans_refused_total",
        /// Requests missing from the reported demand because the limit on classes was reached.
        demand_missed: Total = "meridian_gateway_demand_missed_total",
        /// Time since a hub last confirmed the current route table.
        policy_age: Duration = "meridian_gateway_policy_age_seconds",
        /// Age of the route table above which requests of locked deployments are rejected.
        policy_max_age: Duration = "meridian_gateway_policy_max_age_seconds",
        /// Connections of clients.
        listener: ListenerScrape<'a> = set,
        /// Memory reserved for the request bodies of the tenant with the largest reservation.
        bodies_tenant_bytes: usize = "meridian_gateway_bodies_tenant_bytes",
        /// Limit on the memory reserved for the request bodies of one tenant.
        bodies_tenant_bytes_max: usize = "meridian_gateway_bodies_tenant_bytes_max",
        /// Limit on the memory reserved for the request bodies of one connection.
        bodies_connection_bytes_max: usize = "meridian_gateway_bodies_connection_bytes_max",
        /// Split requests in flight.
        split_requests: usize = "meridian_gateway_split_requests",
        /// Limit on split requests in flight.
        split_requests_max: usize = "meridian_gateway_split_requests_max",
        /// Memory reserved for the bodies of parts.
        parts_bytes: usize = "meridian_gateway_pieces_bytes",
        /// Limit on the memory reserved for the bodies of parts.
        parts_bytes_max: usize = "meridian_gateway_pieces_bytes_max",
        /// Requests of jobs that this gateway takes to another region.
        job_transfers: usize = "meridian_gateway_job_transfers",
        /// Limit on them.
        job_transfers_max: usize = "meridian_gateway_job_transfers_max",
        /// Memory reserved for their large results.
        job_transfers_bytes: usize = "meridian_gateway_job_transfers_bytes",
        /// Limit on the memory reserved for the large results of transfers.
        job_transfers_bytes_max: usize = "meridian_gateway_job_transfers_bytes_max",
        /// Failed TLS connections to regions, by cause.
        hop_failures: &'a metrics::Family<ConnectionFailureCause> = "meridian_gateway_hop_failures_total" ["cause"],
        /// HTTP/2 connections to regions, by event.
        hop_events: Option<&'a Family<HopEvent>> = "meridian_gateway_region_connections_total" ["event"],
        /// Open HTTP/2 connections to regions.
        hop_connections: Option<usize> = "meridian_gateway_region_connections",
        /// Requests in flight on HTTP/2 connections to regions.
        hop_requests: Option<usize> = "meridian_gateway_region_connections_requests",
        /// Resolution of the names of regions and hubs.
        names: ResolverMetrics<'a> = set,
        /// Regions.
        regions: RegionScrape = set,
        /// State of the circuit breakers.
        circuits: CircuitScrape = set,
        /// Certificate of the gateway for the other processes.
        certificate: CertificateMetrics = set,
        /// End of the validity of the certificate for clients, in seconds since 1970; absent without TLS.
        tls_not_after: Option<u64> = "meridian_gateway_tls_certificate_not_after_seconds",
        /// Usage of tenants.
        usage: UsageScrape = set,
        /// Panics.
        panics: PanicMetrics = set,
        /// Build.
        build: BuildMetrics = set,
        /// Receipts.
        receipts: Option<ReceiptScrape<'a>> = set,
        /// Explanations on disk.
        explanations: Option<ArchiveScrape<'a>> = set,
        /// Traces.
        traces: Option<TraceMetrics<'a>> = set,
        /// Export of the log.
        logs: Option<LogMetrics<'a>> = set,
        /// Export of the metrics.
        metric_exports: Option<MetricExports<'a>> = set,
    }
}

metric_set! {
    /// State of the regions of the route table as this gateway observes them, and its budgets.
    struct RegionScrape {
        /// Retries that the retry budget allows now.
        retries_left: u32 = "meridian_gateway_retry_budget",
        /// Hedged requests that the hedge budget allows now.
        hedges_left: u32 = "meridian_gateway_hedge_budget",
        /// 1 for the current health state of a region as observed by this gateway.
        health: ByName<OneOf<Health, InGateway>> = "meridian_gateway_region_health" ["region", "state"],
        /// Time since the last report of a region; absent before the first.
        report_age: ByName<Option<Duration>> = "meridian_gateway_region_report_age_seconds" ["region"],
        /// Estimated round-trip time to a region.
        round_trip: ByName<Duration> = "meridian_gateway_region_rtt_seconds" ["region"],
        /// Requests that may still fail over from a lost region.
        evacuations_left: ByName<u32> = "meridian_gateway_evacuation_budget" ["region"],
    }
}

metric_set! {
    /// Circuit breakers of the regions.
    struct CircuitScrape {
        /// 1 for the current state of the circuit breaker of a region.
        state: ByName<OneOf<BreakerState, InGateway>> = "meridian_gateway_region_circuit" ["region", "state"],
        /// Attempts in flight to a region.
        in_flight: ByName<u32> = "meridian_gateway_region_in_flight" ["region"],
        /// Limit on attempts in flight to a region.
        in_flight_max: ByName<u32> = "meridian_gateway_region_in_flight_max" ["region"],
    }
}

/// Returns the metrics of a gateway.
pub fn metrics() -> RoleMetrics {
    RoleMetrics::of::<GatewayScrape<'_>>(ROLE)
}

metric_set! {
    /// Metrics of the usage of tenants.
    struct UsageScrape {
        /// Writes of the usage of tenants to disk that failed.
        write_failures: Total = "meridian_gateway_usage_write_failures_total",
        /// Reports of the usage of tenants to a hub that failed.
        report_failures: Total = "meridian_gateway_usage_report_failures_total",
        /// Rows of the usage of today: tenants, deployments and regions.
        rows: usize = "meridian_gateway_usage_rows",
        /// Limit of these rows.
        rows_max: usize = "meridian_gateway_usage_rows_max",
        /// Requests that are missing in the usage because the limit of rows was reached.
        uncounted: Total = "meridian_gateway_usage_uncounted_total",
        /// Days of usage that were deleted because no hub has stored them for weeks.
        lost_days: Total = "meridian_gateway_usage_lost_days_total",
    }
}

impl UsageScrape {
    fn of(usage: LedgerState) -> UsageScrape {
        let LedgerState { write_failures, report_failures, rows, uncounted, lost_days } = usage;
        UsageScrape {
            write_failures: Total(write_failures),
            report_failures: Total(report_failures),
            rows,
            rows_max: ROWS_MAX,
            uncounted: Total(uncounted),
            lost_days: Total(lost_days),
        }
    }
}

/// Starts the export of the metrics, if it is configured.
pub(super) fn start_export(operations: &Operations) -> Result<Option<MetricsExport>, ExportError> {
    let Some(config) = &operations.config.metrics else { return Ok(None) };
    let process = Process { role: ROLE, region: Some(operations.config.region.as_str()) };
    let operations = operations.clone();
    telemetry::metrics::start(config, process, move || snapshot(&operations)).map(Some)
}

/// Returns the values of all metrics.
pub(super) fn snapshot(operations: &Operations) -> MetricsSnapshot {
    let Operations { views, router, policy_clock, body_reader, split_capacity, upstream, .. } = operations;
    let before_first = Generation { epoch: 0, number: 0 };
    let table = views.borrow().as_ref().map_or(before_first, |view| view.generation);
    let plan = router.current_weights.borrow().clone();
    let plan_generation = plan.as_ref().map_or(before_first, |plan| plan.generation);
    let (bodies_bytes, bodies_tenant_bytes, bodies_max) = body_reader.used();
    let hop_connections = upstream.connections();
    let scrape = GatewayScrape {
        counted: &operations.metrics,
        route_epoch: table.epoch,
        route_generation: table.number,
        plan_epoch: plan_generation.epoch,
        plan_generation: plan_generation.number,
        plan_rows: plan.map_or(0, |plan| plan.rows()),
        plans_refused: Total(operations.plan_counts.refused.get()),
        demand_missed: Total(router.demand_recorder.untracked()),
        policy_age: policy_clock.age(),
        policy_max_age: policy_clock.max(),
        listener: ListenerScrape {
            listener: &operations.listener,
            connections: operations.connections_max - operations.connections.available_permits(),
            connections_max: operations.connections_max,
            refused: &operations.refused.counts,
            bodies: &body_reader.rejections,
            bodies_bytes,
            bodies_bytes_max: bodies_max.total,
        },
        bodies_tenant_bytes,
        bodies_tenant_bytes_max: bodies_max.per_tenant,
        bodies_connection_bytes_max: bodies_max.per_connection,
        split_requests: split_capacity.requests(),
        split_requests_max: SPLIT_REQUESTS_MAX,
        parts_bytes: split_capacity.bytes(),
        parts_bytes_max: PART_BODIES_BYTES_MAX,
        job_transfers: TRANSFERS_MAX - operations.transfer_slots.available_permits(),
        job_transfers_max: TRANSFERS_MAX,
        job_transfers_bytes: operations.transfer_memory.used(),
        job_transfers_bytes_max: RESULTS_BYTES_MAX,
        hop_failures: &upstream.hop_failures().counts,
        names: upstream.names(),
        hop_events: hop_connections.map(|(events, _)| events),
        hop_connections: hop_connections.map(|(_, (open, _))| open),
        hop_requests: hop_connections.map(|(_, (_, requests))| requests),
        regions: regions(operations),
        circuits: circuits(operations),
        certificate: CertificateMetrics::read(&operations.config.transport),
        tls_not_after: operations.config.tls.as_ref().and_then(|tls| Some(tls.validity()?.not_after)),
        usage: UsageScrape::of(operations.usage.state()),
        panics: PanicMetrics::read(),
        build: BuildMetrics::read(),
        receipts: operations.receipts.as_ref().map(|receipts| receipts.scrape()),
        explanations: operations.archive.as_ref().map(|archive| archive.scrape()),
        traces: operations.tracer.as_ref().map(Tracer::metrics),
        logs: LogMetrics::read(),
        metric_exports: MetricExports::read(),
    };
    MetricsSnapshot::of(ROLE, &scrape)
}

/// Copies the state of the regions, so that the lock is not held while the metrics are collected.
fn regions(operations: &Operations) -> RegionScrape {
    let Operations { config, views, region_monitor, .. } = operations;
    let view = views.borrow().clone();
    let now = Instant::now();
    let states = region_monitor.states();
    let evacuations: Vec<_> = states.budgets.evacuations_left(now).collect();
    let regions: Vec<RegionIndex> = view.iter().flat_map(|view| view.regions()).collect();
    let id = |region: RegionIndex| &config.catalogue.region(region).id;
    let evacuations_left =
        |region| evacuations.iter().find(|(lost, _)| *lost == region).map_or(0, |(_, left)| *left);
    let each = || regions.iter().map(|region| (*region, id(*region)));
    RegionScrape {
        retries_left: states.budgets.retry.left(now),
        hedges_left: states.budgets.hedge.left(),
        health: each().map(|(region, id)| (id, OneOf::new(states.fleet.state(region, now).0))).collect(),
        report_age: each().map(|(region, id)| (id, states.fleet.state(region, now).1)).collect(),
        round_trip: each().map(|(region, id)| (id, states.latency.estimate(region, now))).collect(),
        evacuations_left: each().map(|(region, id)| (id, evacuations_left(region))).collect(),
    }
}

fn circuits(operations: &Operations) -> CircuitScrape {
    let states = operations.region_monitor.circuit_states();
    let each = || states.iter().map(|state| (&operations.config.catalogue.region(state.target).id, state));
    CircuitScrape {
        state: each().map(|(id, state)| (id, OneOf::new(state.state))).collect(),
        in_flight: each().map(|(id, state)| (id, state.in_flight)).collect(),
        in_flight_max: each().map(|(id, state)| (id, state.in_flight_max)).collect(),
    }
}
