//! Metrics of a hub, and its `/metrics`.

use axum::http::StatusCode;
use identity::{CertificateMetrics, ConnectionFailureCause, Transport};
use metrics::page::RoleMetrics;
use metrics::{
    BuildMetrics, Counter, Family, Gauge, Histogram, Label, MetricsSnapshot, Sparse, Total, labels,
    metric_set,
};
use regions::{Generation, RouteTable};
use scheduler_api::paths;
use scheduler_api::usage::RECORDS_MAX;

use super::denials::{DenialReason, Denials, JoinRejection};
use super::operators::rejection::OperatorMetrics;
use super::usage_records::UsageMetrics;
use supervision::panics::PanicMetrics;
use telemetry::{LogMetrics, MetricExports};

/// Role in the names of shared metrics.
const ROLE: &str = "hub";

labels! {
    /// Path of the hub, as its router has it.
    pub(super) enum HubPath {
        Livez = paths::LIVEZ,
        Readyz = paths::READYZ,
        Metrics = paths::METRICS,
        Log = telemetry::logs::http::PATH,
        Spokes = paths::SPOKES,
        KeepAlive = paths::KEEP_ALIVE,
        Lease = paths::LEASE,
        Routes = paths::ROUTES,
        Reader = paths::READER,
        Deployments = paths::DEPLOYMENTS,
        Tenants = paths::TENANTS,
        Rollout = paths::ROLLOUT,
        Plan = paths::PLAN,
        Demand = paths::DEMAND,
        TenantDemand = paths::TENANT_DEMAND,
        TenantShares = paths::TENANT_SHARES,
        Usage = paths::USAGE,
        Traffic = paths::TRAFFIC,
        ConsoleLogins = paths::CONSOLE_LOGINS,
        Apply = paths::APPLY,
        Keys = paths::KEYS,
        Key = paths::KEY,
        Promote = paths::PROMOTE,
        Drain = paths::DRAIN,
        /// Path that is not served.
        Other = "other",
    }
}

impl HubPath {
    /// Returns the path with this text in the router; `None` stands for a path that is not served.
    pub(super) fn matched(path: Option<&str>) -> HubPath {
        HubPath::ALL.into_iter().find(|known| path == Some(known.as_str())).unwrap_or(HubPath::Other)
    }
}

/// Status codes that the hub sends; the last stands for all others.
const STATUSES: [&str; 15] = [
    "200", "202", "204", "400", "401", "403", "404", "405", "409", "413", "422", "429", "500", "503", "other",
];

/// Status code of a response.
#[derive(Clone, Copy, Debug)]
pub(super) struct StatusLabel(usize);

impl From<StatusCode> for StatusLabel {
    fn from(status: StatusCode) -> StatusLabel {
        let known = STATUSES.iter().position(|known| *known == status.as_str());
        StatusLabel(known.unwrap_or(STATUSES.len() - 1))
    }
}

impl<In> Label<In> for StatusLabel {
    fn values() -> Vec<&'static str> {
        STATUSES.to_vec()
    }

    fn index(self) -> usize {
        self.0
    }
}

metric_set! {
    /// Counters of a hub.
    #[derive(Debug, Default)]
    pub(super) struct HubMetrics {
        /// 1 while this hub is the leader.
        pub(super) leader: Gauge = "meridian_hub_leader",
        /// Terms for which this hub was elected.
        pub(super) terms: Counter = "meridian_hub_terms_total",
        /// Registered spokes; 0 at a hub that is not the leader.
        pub(super) spokes: Gauge = "meridian_hub_spokes",
        /// Regions whose spokes have several queues of jobs, of which gateways find the jobs of one; 0 at a hub that is not the leader.
        pub(super) several_job_queues: Gauge = "meridian_hub_regions_with_several_job_queues",
        /// Leases of spokes that ended, as the leader saw them.
        pub(super) leases_ended: Counter = "meridian_hub_spoke_leases_ended_total",
        /// 1 while so many leases have expired at the same time that the store is suspected rather than the regions.
        pub(super) mass_expiry: Gauge = "meridian_hub_mass_lease_expiry",
        /// Route tables that this hub published, its own or those of the leader.
        pub(super) tables_published: Counter = "meridian_hub_tables_published_total",
        /// Time to compute a traffic plan.
        pub(super) plan_seconds: Histogram = "meridian_hub_plan_seconds",
        /// Traffic classes that would not survive the loss of a region.
        pub(super) uncovered_classes: Gauge = "meridian_hub_uncovered_classes",
        /// Deployments whose placement no set of regions meets; 0 at a hub that is not the leader.
        pub(super) infeasible_placements: Gauge = "meridian_hub_infeasible_placements",
        /// Failed requests to the store by the election, the controller and the followers of the table.
        pub(super) store_errors: Counter = "meridian_hub_store_errors_total",
        /// Requests, by path and status.
        pub(super) requests: Sparse<Family<HubPath, Family<StatusLabel>>, false> =
            "meridian_hub_requests_total" ["path", "status"],
        /// Usage of tenants.
        pub(super) usage: UsageMetrics = set,
        /// Operators with tokens.
        pub(super) operators: OperatorMetrics = set,
    }
}

metric_set! {
    /// Metrics of the console.
    #[derive(Debug)]
    pub(super) struct ConsoleMetrics {
        /// Open pages of the console.
        pub(super) pages: usize = "meridian_hub_console_pages",
        /// Limit on open pages of the console; 0 at a hub without a console.
        pub(super) pages_max: usize = "meridian_hub_console_pages_max",
        /// Gateways whose traffic the console shows.
        pub(super) gateways: usize = "meridian_hub_console_gateways",
        /// Limit on these gateways, beyond which reports are rejected with 429; 0 at a hub without a console.
        pub(super) gateways_max: usize = "meridian_hub_console_gateways_max",
        /// Gateways that the console forgot because too many others of their region report.
        pub(super) gateways_evicted: Total = "meridian_hub_console_gateways_evicted_total",
    }
}

impl ConsoleMetrics {
    /// Metrics of a hub without a console.
    pub(super) const NONE: ConsoleMetrics =
        ConsoleMetrics { pages: 0, pages_max: 0, gateways: 0, gateways_max: 0, gateways_evicted: Total(0) };
}

metric_set! {
    /// All metrics of a hub.
    struct HubScrape<'a> {
        /// Counters.
        counted: &'a HubMetrics = set,
        /// Epoch of the published route table; 0 before the first.
        route_epoch: u64 = "meridian_hub_route_epoch",
        /// Generation of the published route table within its epoch.
        route_generation: u64 = "meridian_hub_route_generation",
        /// Regions in the published route table.
        route_regions: usize = "meridian_hub_route_regions",
        /// Deployments in the published route table.
        route_deployments: usize = "meridian_hub_route_deployments",
        /// Regions with gateways that have rows in the published traffic plan.
        plan_origins: usize = "meridian_hub_plan_origins",
        /// Gateways with shares in the rate limits of tenants.
        sharing_gateways: usize = "meridian_hub_sharing_gateways",
        /// Limit of the records of usage.
        usage_records_max: usize = "meridian_hub_usage_records_max",
        /// Open long polls for the route table.
        polls: usize = "meridian_hub_polls",
        /// Limit on open long polls.
        polls_max: usize = "meridian_hub_polls_max",
        /// Console.
        console: ConsoleMetrics = set,
        /// Requests that were denied, by reason.
        denied: &'a Family<DenialReason> = "meridian_hub_requests_denied_total" ["reason"],
        /// Requests to join that the authority rejected, by reason.
        joins_rejected: &'a Family<JoinRejection> = "meridian_hub_joins_rejected_total" ["reason"],
        /// Connections that were rejected, by cause.
        refused: &'a Family<ConnectionFailureCause> = "meridian_hub_connections_refused_total" ["cause"],
        /// Certificate of the hub.
        certificate: CertificateMetrics = set,
        /// Panics.
        panics: PanicMetrics = set,
        /// Build.
        build: BuildMetrics = set,
        /// Export of the log.
        logs: Option<LogMetrics<'a>> = set,
        /// Export of the metrics.
        metric_exports: Option<MetricExports<'a>> = set,
    }
}

/// Returns the metrics of a hub.
pub fn metrics() -> RoleMetrics {
    RoleMetrics::of::<HubScrape<'_>>(ROLE)
}

impl HubMetrics {
    /// Returns the values of these metrics and the state of the hub: the published table, the origins and the sharing gateways of
    /// the published plan, open long polls with their limit, the console, and rejected requests and connections.
    pub(super) fn snapshot(
        &self,
        table: Option<&RouteTable>,
        (plan_origins, sharing_gateways): (usize, usize),
        ((polls, polls_max), console): ((usize, usize), ConsoleMetrics),
        (denials, refused): (&Denials, &Family<ConnectionFailureCause>),
        transport: &Transport,
    ) -> MetricsSnapshot {
        let generation = table.map_or(Generation { epoch: 0, number: 0 }, |table| table.generation);
        let scrape = HubScrape {
            counted: self,
            route_epoch: generation.epoch,
            route_generation: generation.number,
            route_regions: table.map_or(0, |table| table.regions.len()),
            route_deployments: table.map_or(0, |table| table.deployments.len()),
            plan_origins,
            sharing_gateways,
            usage_records_max: RECORDS_MAX,
            polls,
            polls_max,
            console,
            denied: &denials.counts,
            joins_rejected: &denials.joins,
            refused,
            certificate: CertificateMetrics::read(transport),
            panics: PanicMetrics::read(),
            build: BuildMetrics::read(),
            logs: LogMetrics::read(),
            metric_exports: MetricExports::read(),
        };
        MetricsSnapshot::of(ROLE, &scrape)
    }
}
