//! What the door of a region counts.

use super::{Asked, Count, Ending, Histogram, Kind, NotHeldBy, Tally, Text};
use crate::events::HopFailures;
use gateway_core::endpoint::Endpoint;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Everything that an ingress counts.
pub(crate) struct IngressMetrics {
    requests: BTreeMap<&'static str, ByEnding>,
    pub(crate) in_flight: Count,
    seconds: Histogram,
    pub(crate) bytes_in: Count,
    pub(crate) bytes_out: Count,
    /// Questions of edges for a report.
    pub(crate) exchanges: Count,
    /// Who was not let in.
    pub(crate) refused: Arc<HopFailures>,
}

/// What became of requests that found no replica ready.
#[derive(Default)]
pub(crate) struct HoldMetrics {
    pub(crate) not_held: Tally<NotHeldBy>,
    /// How long those waited who were held, however that ended.
    pub(crate) seconds: Histogram,
    /// How often whoever starts replicas was told.
    pub(crate) wakes: Count,
}

impl HoldMetrics {
    pub(crate) fn render(&self, text: &mut Text) {
        let name = "meridian_ingress_not_held_total";
        self.not_held.render(
            text,
            name,
            "Requests that found no replica ready and were not held, by why.",
            "why",
        );
        let name = "meridian_ingress_held_seconds";
        text.head(name, Kind::Histogram, "How long requests were held for a replica, however that ended.");
        text.histogram(name, &[], &self.seconds);
        let name = "meridian_ingress_wakes_total";
        text.single(name, Kind::Counter, "First requests that found no replica ready.", self.wakes.get());
    }
}

struct ByEnding([Count; Ending::LEN]);

impl IngressMetrics {
    pub(crate) fn new() -> IngressMetrics {
        let by_ending = || ByEnding(std::array::from_fn(|_| Count::default()));
        IngressMetrics {
            requests: Endpoint::paths().map(|path| (path, by_ending())).collect(),
            in_flight: Count::default(),
            seconds: Histogram::default(),
            bytes_in: Count::default(),
            bytes_out: Count::default(),
            exchanges: Count::default(),
            refused: Arc::default(),
        }
    }

    /// A request for a replica ended so, after so long.
    pub(crate) fn ended(&self, asked: Asked, ending: Ending, took: Duration) {
        if let Some(by) = self.requests.get(asked.as_str()) {
            by.0[ending.at()].add(1);
        }
        self.seconds.observe(took);
    }

    pub(crate) fn render(&self, text: &mut Text) {
        let name = "meridian_ingress_requests_total";
        text.head(
            name,
            Kind::Counter,
            "Requests for a replica that ended, by endpoint and by how: ok, an error code, or unfinished.",
        );
        for (path, by) in &self.requests {
            for (at, n) in by.0.iter().map(Count::get).enumerate().filter(|(at, n)| *n > 0 || *at == 0) {
                text.sample(name, &[("endpoint", path), ("outcome", Ending::name(at))], n);
            }
        }
        let help = "Connections that were not let in at the door, by what was the matter.";
        self.refused.render(text, "meridian_ingress_connections_refused_total", help);
        let in_flight = self.in_flight.get();
        text.single(
            "meridian_ingress_requests_in_flight",
            Kind::Gauge,
            "Requests whose answer is not finished.",
            in_flight,
        );
        let name = "meridian_ingress_request_seconds";
        text.head(name, Kind::Histogram, "From a request's head to the last byte of its answer.");
        text.histogram(name, &[], &self.seconds);
        for (name, help, count) in [
            ("meridian_ingress_request_bytes_total", "Bytes of requests' bodies.", &self.bytes_in),
            ("meridian_ingress_response_bytes_total", "Bytes of answers' bodies.", &self.bytes_out),
            ("meridian_ingress_exchanges_total", "Reports given to edges.", &self.exchanges),
        ] {
            text.single(name, Kind::Counter, help, count.get());
        }
    }
}
