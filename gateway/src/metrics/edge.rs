//! Metrics of a gateway.

use super::bounds::{LabelCounter, PartOutcome, ShedMetrics, SplitAdmission};
use super::label::OutcomeClass;
use super::tenants::TenantMetrics;
use super::{
    ClientProtocol, EndpointLabel, Kind, LatencyHistogram, LatencyStage, LazyByIndex, MetricsText, Priority,
    RelaxedCounter, RequestOutcome,
};
use gateway_core::endpoint::Endpoint;
use gateway_core::keys::KeyRing;
use gateway_core::labels::AttemptResult;
use gateway_core::trail::{AttemptCause, AttemptRecord};
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use std::collections::BTreeMap;
use std::time::Duration;

/// Metrics of a gateway.
pub(crate) struct EdgeMetrics {
    requests: BTreeMap<&'static str, GatewayOutcomes>,
    others: GatewayOutcomes,
    protocols: [RelaxedCounter; ClientProtocol::ALL.len()],
    pub(crate) in_flight: RelaxedCounter,
    /// By tenant.
    pub(crate) tenants: TenantMetrics,
    regions: LazyByIndex<ByRegion>,
    seconds: [LatencyHistogram; Priority::ALL.len()],
    stages: [LatencyHistogram; LatencyStage::ALL.len()],
    /// Route tables that were unreadable, or not newer than the current one.
    pub(crate) tables_refused: RelaxedCounter,
    /// Reloads of the gateway's own tenants file that changed something, and those that failed.
    pub(crate) tenants_reloaded: RelaxedCounter,
    pub(crate) tenants_refused: RelaxedCounter,
    pub(crate) bytes_in: RelaxedCounter,
    pub(crate) bytes_out: RelaxedCounter,
    pub(crate) shed: ShedMetrics,
    /// Admissions of requests that were large enough to be split.
    pub(crate) split_admissions: LabelCounter<SplitAdmission>,
    pub(crate) parts: LabelCounter<PartOutcome>,
}

struct GatewayOutcomes([RelaxedCounter; RequestOutcome::LEN]);

impl Default for GatewayOutcomes {
    fn default() -> GatewayOutcomes {
        GatewayOutcomes(std::array::from_fn(|_| RelaxedCounter::default()))
    }
}

#[derive(Default)]
struct ByRegion {
    outcomes: [RelaxedCounter; OutcomeClass::ALL.len()],
    attempts: [[RelaxedCounter; AttemptResult::ALL.len()]; AttemptCause::ALL.len()],
    seconds: LatencyHistogram,
}

impl EdgeMetrics {
    /// Creates the metrics for these regions and tenants.
    pub(crate) fn new(catalogue: &Catalogue, keys: &KeyRing) -> EdgeMetrics {
        let known = Endpoint::paths().map(|path| (path, GatewayOutcomes::default()));
        EdgeMetrics {
            requests: known.collect(),
            others: GatewayOutcomes::default(),
            protocols: Default::default(),
            in_flight: RelaxedCounter::default(),
            tenants: TenantMetrics::of(keys),
            regions: LazyByIndex::new(catalogue.len()),
            seconds: Default::default(),
            stages: Default::default(),
            tables_refused: RelaxedCounter::default(),
            tenants_reloaded: RelaxedCounter::default(),
            tenants_refused: RelaxedCounter::default(),
            bytes_in: RelaxedCounter::default(),
            bytes_out: RelaxedCounter::default(),
            shed: ShedMetrics::default(),
            split_admissions: LabelCounter::default(),
            parts: LabelCounter::default(),
        }
    }

    /// Counts a finished request.
    pub(crate) fn ended(&self, endpoint: EndpointLabel, protocol: ClientProtocol, outcome: RequestOutcome) {
        self.requests.get(endpoint.as_str()).unwrap_or(&self.others).0[outcome.index()].add(1);
        self.protocols[protocol as usize].add(1);
    }

    /// Counts a request whose response came from this region.
    pub(crate) fn responded(&self, region: RegionIndex, outcome: RequestOutcome) {
        self.regions.of(region.as_usize()).outcomes[OutcomeClass::of(outcome) as usize].add(1);
    }

    pub(crate) fn attempted(&self, attempt: &AttemptRecord) {
        let by = self.regions.of(attempt.region.as_usize());
        by.attempts[attempt.cause as usize][AttemptResult::from(attempt.end) as usize].add(1);
        by.seconds.observe(attempt.took);
    }

    pub(crate) fn took(&self, priority: Priority, total: Duration) {
        self.seconds[priority as usize].observe(total);
    }

    pub(crate) fn stage(&self, stage: LatencyStage, took: Duration) {
        self.stages[stage as usize].observe(took);
    }

    /// Writes all metrics, with the region names of `catalogue`.
    pub(crate) fn render(&self, text: &mut MetricsText, catalogue: &Catalogue) {
        self.render_requests(text);
        self.tenants.render(text);
        self.render_regions(text, catalogue);
        let name = "meridian_gateway_request_seconds";
        text.head(name, Kind::Histogram, "Time from the head of a request to the last byte of its response.");
        for priority in Priority::ALL {
            text.histogram(name, &[("priority", priority.as_str())], &self.seconds[priority as usize]);
        }
        let name = "meridian_gateway_stage_seconds";
        text.head(name, Kind::Histogram, "Time of forwarded requests by stage.");
        for stage in LatencyStage::ALL {
            text.histogram(name, &[("stage", stage.as_str())], &self.stages[stage as usize]);
        }
        let name = "meridian_gateway_tables_refused_total";
        let help = "Route tables of a hub or of the disk that were rejected: unreadable, not newer, or \
                    of a generation that no hub can have published.";
        text.single(name, Kind::Counter, help, self.tables_refused.get());
        let name = "meridian_gateway_tenants_reloaded_total";
        let help = "Successful reloads of the gateway's own tenants file or its key files.";
        text.single(name, Kind::Counter, help, self.tenants_reloaded.get());
        let name = "meridian_gateway_tenants_reload_failures_total";
        let help = "Failed reloads; the current tenants and keys stayed in use.";
        text.single(name, Kind::Counter, help, self.tenants_refused.get());
        self.shed.render(text);
        let help = "Requests large enough to be split, by admission to split execution.";
        self.split_admissions.render(text, "meridian_gateway_split_requests_total", help, "admission");
        let help = "Parts of split requests that were sent, by outcome.";
        self.parts.render(text, "meridian_gateway_parts_total", help, "outcome");
    }

    fn render_requests(&self, text: &mut MetricsText) {
        let name = "meridian_gateway_requests_total";
        text.head(
            name,
            Kind::Counter,
            "Finished requests, by endpoint and outcome: ok, an error code, or an incomplete response.",
        );
        let endpoints = self.requests.iter().map(|(path, by)| (*path, by));
        for (path, by) in endpoints.chain([(EndpointLabel::OTHER.as_str(), &self.others)]) {
            let counts = by.0.iter().map(RelaxedCounter::get).enumerate();
            for (at, n) in counts.filter(|(at, n)| *n > 0 || *at == 0) {
                text.sample(name, &[("endpoint", path), ("outcome", RequestOutcome::name(at))], n);
            }
        }
        let name = "meridian_gateway_protocol_requests_total";
        text.head(name, Kind::Counter, "Finished requests, by protocol.");
        for protocol in ClientProtocol::ALL {
            let n = self.protocols[protocol as usize].get();
            text.sample(name, &[("protocol", protocol.as_str())], n);
        }
        let name = "meridian_gateway_requests_in_flight";
        text.single(name, Kind::Gauge, "Requests in flight.", self.in_flight.get());
        for (name, help, count) in [
            ("meridian_gateway_request_bytes_total", "Bytes of request bodies.", &self.bytes_in),
            ("meridian_gateway_response_bytes_total", "Bytes of response bodies.", &self.bytes_out),
        ] {
            text.single(name, Kind::Counter, help, count.get());
        }
    }

    fn render_regions(&self, text: &mut MetricsText, catalogue: &Catalogue) {
        let named = || {
            let index = |at| RegionIndex::new(at).expect("counted by the index of a region");
            self.regions.iter().map(move |(at, by)| (catalogue.region(index(at)).id.as_str(), by))
        };
        let name = "meridian_gateway_region_requests_total";
        text.head(
            name,
            Kind::Counter,
            "Requests by the region whose response was forwarded, and by outcome.",
        );
        for (region, by) in named() {
            for outcome in OutcomeClass::ALL {
                let labels = [("region", region), ("outcome", outcome.as_str())];
                text.sample(name, &labels, by.outcomes[outcome as usize].get());
            }
        }
        let name = "meridian_gateway_attempts_total";
        text.head(name, Kind::Counter, "Attempts, by region, cause and outcome.");
        for (region, by) in named() {
            for cause in AttemptCause::ALL {
                for end in AttemptResult::ALL {
                    let n = by.attempts[cause as usize][end as usize].get();
                    if n > 0 || (cause, end) == (AttemptCause::First, AttemptResult::Ok) {
                        let labels =
                            [("region", region), ("cause", cause.as_str()), ("outcome", end.as_str())];
                        text.sample(name, &labels, n);
                    }
                }
            }
        }
        let name = "meridian_gateway_attempt_seconds";
        text.head(name, Kind::Histogram, "Duration of attempts.");
        for (region, by) in named() {
            text.histogram(name, &[("region", region)], &by.seconds);
        }
    }
}
