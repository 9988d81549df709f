//! Metrics of a gateway.

use super::bounds::{PartOutcome, ReportRejection, SplitAdmission};
use super::deployments::DeploymentMetrics;
use super::label::OutcomeClass;
use super::tenants::TenantMetrics;
use super::{ClientProtocol, Counter, EndpointLabel, Family, Gauge, Histogram, LatencyStage, RequestOutcome};
use gateway_core::keys::KeyRing;
use gateway_core::labels::AttemptResult;
use gateway_core::shed::ShedReason;
use gateway_core::trail::{AttemptCause, AttemptRecord};
use metrics::{ByIndex, Exemplar, Sparse, metric_set};
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use replica_api::priority::Priority;
use std::sync::Arc;

metric_set! {
    /// Metrics of a gateway.
    #[derive(Default)]
    pub(crate) struct EdgeMetrics {
        /// Finished requests, by endpoint and outcome: ok, an error code, or an incomplete response.
        requests: Family<EndpointLabel, Sparse<Family<RequestOutcome>>> =
            "meridian_gateway_requests_total" ["endpoint", "outcome"],
        /// Finished requests, by protocol.
        protocols: Family<ClientProtocol> = "meridian_gateway_protocol_requests_total" ["protocol"],
        /// Requests in flight.
        pub(crate) in_flight: Gauge = "meridian_gateway_requests_in_flight",
        /// Bytes of request bodies.
        pub(crate) bytes_in: Counter = "meridian_gateway_request_bytes_total",
        /// Bytes of response bodies.
        pub(crate) bytes_out: Counter = "meridian_gateway_response_bytes_total",
        /// Metrics by tenant.
        pub(crate) tenants: TenantMetrics = set,
        /// Metrics by deployment.
        pub(crate) deployments: DeploymentMetrics = set,
        /// Requests that spilled over, by the region that they would have been sent to.
        spillovers: ByIndex<Counter> = "meridian_gateway_spillovers_total" ["region"],
        /// Requests by the region whose response was forwarded, and by outcome.
        responses: ByIndex<Family<OutcomeClass>> =
            "meridian_gateway_region_requests_total" ["region", "outcome"],
        /// Attempts, by region, cause and outcome.
        attempts: ByIndex<Sparse<Family<AttemptCause, Family<AttemptResult>>>> =
            "meridian_gateway_attempts_total" ["region", "cause", "outcome"],
        /// Duration of attempts.
        attempt_seconds: ByIndex<Histogram> = "meridian_gateway_attempt_seconds" ["region"],
        /// Time from the head of a request to the last byte of its response.
        pub(crate) seconds: Family<Option<Priority>, Histogram> =
            "meridian_gateway_request_seconds" ["priority"],
        /// Time of forwarded requests by stage.
        pub(crate) stages: Family<LatencyStage, Histogram> = "meridian_gateway_stage_seconds" ["stage"],
        /// Route tables of a hub or of the disk that were rejected: unreadable, not newer, changes that do not result in
        /// the table of the hub, or of a generation that no hub can have published.
        pub(crate) tables_refused: Counter = "meridian_gateway_tables_refused_total",
        /// Reports of spokes that were rejected, by reason.
        pub(crate) reports_rejected: Family<ReportRejection> =
            "meridian_gateway_reports_rejected_total" ["reason"],
        /// Successful reloads of the gateway's own tenants file or its key files.
        pub(crate) tenants_reloaded: Counter = "meridian_gateway_tenants_reloaded_total",
        /// Failed reloads; the current tenants and keys stayed in use.
        pub(crate) tenants_refused: Counter = "meridian_gateway_tenants_reload_failures_total",
        /// Requests that load shedding rejected, by priority and reason.
        pub(crate) shed: Family<Priority, Family<ShedReason>> =
            "meridian_gateway_shed_total" ["priority", "reason"],
        /// Requests large enough to be split, by admission to split execution.
        pub(crate) split_admissions: Family<SplitAdmission> =
            "meridian_gateway_split_requests_total" ["admission"],
        /// Parts of split requests that were sent, by outcome.
        pub(crate) parts: Family<PartOutcome> = "meridian_gateway_parts_total" ["outcome"],
    }
}

impl EdgeMetrics {
    /// Creates the metrics for these regions and tenants.
    pub(crate) fn new(catalogue: &Catalogue, keys: &KeyRing) -> EdgeMetrics {
        let regions = catalogue.iter().map(|(_, region)| region.id.to_string()).collect::<Arc<[_]>>();
        EdgeMetrics {
            tenants: TenantMetrics::of(keys),
            responses: ByIndex::new(&regions),
            spillovers: ByIndex::new(&regions),
            attempts: ByIndex::new(&regions),
            attempt_seconds: ByIndex::new(&regions),
            ..EdgeMetrics::default()
        }
    }

    /// Counts a finished request.
    pub(crate) fn ended(&self, endpoint: EndpointLabel, protocol: ClientProtocol, outcome: RequestOutcome) {
        self.requests.of(endpoint).0.count(outcome);
        self.protocols.count(protocol);
    }

    /// Counts a request whose response came from this region.
    pub(crate) fn responded(&self, region: RegionIndex, outcome: RequestOutcome) {
        self.responses.of(region.as_usize()).count(OutcomeClass::of(outcome));
    }

    /// Counts a request that was sent past this region, its primary.
    pub(crate) fn spilled(&self, primary: RegionIndex) {
        self.spillovers.of(primary.as_usize()).add(1);
    }

    /// Counts an attempt of a request that has ended; the exemplar is that of the request.
    pub(crate) fn attempted(&self, attempt: &AttemptRecord, exemplar: Option<Exemplar>) {
        let region = attempt.region.as_usize();
        self.attempts.of(region).0.of(attempt.cause).count(AttemptResult::from(attempt.end));
        self.attempt_seconds.of(region).observe_traced(attempt.took, exemplar);
    }
}
