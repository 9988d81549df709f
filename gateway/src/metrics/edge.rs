//! What an edge counts.

use super::bounds::{Piece, ShedMetrics, Tally, Turn};
use super::label::Outcome;
use super::tenants::TenantMetrics;
use super::{Asked, Count, Ending, Histogram, Kind, Lazily, Priority, Protocol, Stage, Text};
use gateway_core::endpoint::Endpoint;
use gateway_core::keys::KeyRing;
use gateway_core::labels::AttemptResult;
use gateway_core::trail::{AttemptCause, AttemptRecord};
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use std::collections::BTreeMap;
use std::time::Duration;

/// Everything that an edge counts.
pub(crate) struct EdgeMetrics {
    requests: BTreeMap<&'static str, ByEnding>,
    others: ByEnding,
    protocols: [Count; Protocol::ALL.len()],
    pub(crate) in_flight: Count,
    /// Of each tenant.
    pub(crate) tenants: TenantMetrics,
    regions: Lazily<ByRegion>,
    seconds: [Histogram; Priority::ALL.len()],
    stages: [Histogram; Stage::ALL.len()],
    /// Route tables that could not be read, or were no newer than the one in hand.
    pub(crate) tables_refused: Count,
    /// Readings of the gateway's own file of tenants that changed something, and those that could not be used.
    pub(crate) tenants_reloaded: Count,
    pub(crate) tenants_refused: Count,
    pub(crate) bytes_in: Count,
    pub(crate) bytes_out: Count,
    pub(crate) shed: ShedMetrics,
    /// Requests that were large enough to be computed in pieces.
    pub(crate) turns: Tally<Turn>,
    pub(crate) pieces: Tally<Piece>,
}

struct ByEnding([Count; Ending::LEN]);

impl Default for ByEnding {
    fn default() -> ByEnding {
        ByEnding(std::array::from_fn(|_| Count::default()))
    }
}

#[derive(Default)]
struct ByRegion {
    outcomes: [Count; Outcome::ALL.len()],
    attempts: [[Count; AttemptResult::ALL.len()]; AttemptCause::ALL.len()],
    seconds: Histogram,
}

impl EdgeMetrics {
    /// Metrics of an edge that knows these regions and these tenants.
    pub(crate) fn new(catalogue: &Catalogue, keys: &KeyRing) -> EdgeMetrics {
        let known = Endpoint::paths().map(|path| (path, ByEnding::default()));
        EdgeMetrics {
            requests: known.collect(),
            others: ByEnding::default(),
            protocols: Default::default(),
            in_flight: Count::default(),
            tenants: TenantMetrics::of(keys),
            regions: Lazily::new(catalogue.len()),
            seconds: Default::default(),
            stages: Default::default(),
            tables_refused: Count::default(),
            tenants_reloaded: Count::default(),
            tenants_refused: Count::default(),
            bytes_in: Count::default(),
            bytes_out: Count::default(),
            shed: ShedMetrics::default(),
            turns: Tally::default(),
            pieces: Tally::default(),
        }
    }

    /// A request ended so.
    pub(crate) fn ended(&self, asked: Asked, protocol: Protocol, ending: Ending) {
        self.requests.get(asked.as_str()).unwrap_or(&self.others).0[ending.at()].add(1);
        self.protocols[protocol as usize].add(1);
    }

    /// This region's answer was the one that counted.
    pub(crate) fn answered_by(&self, region: RegionIndex, ending: Ending) {
        self.regions.of(region.as_usize()).outcomes[Outcome::of(ending) as usize].add(1);
    }

    pub(crate) fn attempted(&self, attempt: &AttemptRecord) {
        let by = self.regions.of(attempt.region.as_usize());
        by.attempts[attempt.cause as usize][AttemptResult::from(attempt.end) as usize].add(1);
        by.seconds.observe(attempt.took);
    }

    pub(crate) fn took(&self, priority: Priority, total: Duration) {
        self.seconds[priority as usize].observe(total);
    }

    pub(crate) fn stage(&self, stage: Stage, took: Duration) {
        self.stages[stage as usize].observe(took);
    }

    /// All of it, with regions by the names that `catalogue` has for them.
    pub(crate) fn render(&self, text: &mut Text, catalogue: &Catalogue) {
        self.render_requests(text);
        self.tenants.render(text);
        self.render_regions(text, catalogue);
        let name = "meridian_gateway_request_seconds";
        text.head(name, Kind::Histogram, "From a request's head to the last byte of its answer.");
        for priority in Priority::ALL {
            text.histogram(name, &[("priority", priority.as_str())], &self.seconds[priority as usize]);
        }
        let name = "meridian_gateway_stage_seconds";
        text.head(name, Kind::Histogram, "Where forwarded requests spent their time.");
        for stage in Stage::ALL {
            text.histogram(name, &[("stage", stage.as_str())], &self.stages[stage as usize]);
        }
        let name = "meridian_gateway_tables_refused_total";
        let help = "Route tables of a hub or of the disk that were not taken: they could not be read, were no newer, or \
                    were of a generation that no hub can have published.";
        text.single(name, Kind::Counter, help, self.tables_refused.get());
        let name = "meridian_gateway_tenants_reloaded_total";
        let help = "Times that the gateway's own tenants file or its key files were read and taken.";
        text.single(name, Kind::Counter, help, self.tenants_reloaded.get());
        let name = "meridian_gateway_tenants_reload_failures_total";
        let help = "Times that they were rejected; the tenants and keys in use stayed.";
        text.single(name, Kind::Counter, help, self.tenants_refused.get());
        self.shed.render(text);
        let help = "Requests that could be computed in pieces, by when they had their turn.";
        self.turns.render(text, "meridian_gateway_scattered_requests_total", help, "turn");
        let help = "Pieces of requests that were sent, by what became of them.";
        self.pieces.render(text, "meridian_gateway_pieces_total", help, "end");
    }

    fn render_requests(&self, text: &mut Text) {
        let name = "meridian_gateway_requests_total";
        text.head(
            name,
            Kind::Counter,
            "Requests that ended, by endpoint and by how: ok, an error code, or unfinished.",
        );
        let endpoints = self.requests.iter().map(|(path, by)| (*path, by));
        for (path, by) in endpoints.chain([(Asked::OTHER.as_str(), &self.others)]) {
            let seen = by.0.iter().map(Count::get).enumerate();
            for (at, n) in seen.filter(|(at, n)| *n > 0 || *at == 0) {
                text.sample(name, &[("endpoint", path), ("outcome", Ending::name(at))], n);
            }
        }
        let name = "meridian_gateway_protocol_requests_total";
        text.head(name, Kind::Counter, "Requests that ended, by protocol.");
        for protocol in Protocol::ALL {
            let n = self.protocols[protocol as usize].get();
            text.sample(name, &[("protocol", protocol.as_str())], n);
        }
        let name = "meridian_gateway_requests_in_flight";
        text.single(name, Kind::Gauge, "Requests whose answer is not finished.", self.in_flight.get());
        for (name, help, count) in [
            ("meridian_gateway_request_bytes_total", "Bytes of requests' bodies.", &self.bytes_in),
            ("meridian_gateway_response_bytes_total", "Bytes of answers' bodies.", &self.bytes_out),
        ] {
            text.single(name, Kind::Counter, help, count.get());
        }
    }

    fn render_regions(&self, text: &mut Text, catalogue: &Catalogue) {
        let named = || {
            let index = |at| RegionIndex::new(at).expect("counted by the index of a region");
            self.regions.iter().map(move |(at, by)| (catalogue.region(index(at)).id.as_str(), by))
        };
        let name = "meridian_gateway_region_requests_total";
        text.head(name, Kind::Counter, "Requests by the region whose answer was given, and by outcome.");
        for (region, by) in named() {
            for outcome in Outcome::ALL {
                let labels = [("region", region), ("outcome", outcome.as_str())];
                text.sample(name, &labels, by.outcomes[outcome as usize].get());
            }
        }
        let name = "meridian_gateway_attempts_total";
        text.head(name, Kind::Counter, "Attempts, by region, by why they were made and by how they ended.");
        for (region, by) in named() {
            for cause in AttemptCause::ALL {
                for end in AttemptResult::ALL {
                    let n = by.attempts[cause as usize][end as usize].get();
                    if n > 0 || (cause, end) == (AttemptCause::First, AttemptResult::Ok) {
                        let labels = [("region", region), ("cause", cause.as_str()), ("end", end.as_str())];
                        text.sample(name, &labels, n);
                    }
                }
            }
        }
        let name = "meridian_gateway_attempt_seconds";
        text.head(name, Kind::Histogram, "How long attempts at a region took.");
        for (region, by) in named() {
            text.histogram(name, &[("region", region)], &by.seconds);
        }
    }
}
