//! Metrics of an ingress.

use super::{Asked, Count, Ending, Histogram, Kind, NotHeldBy, Tally, Text};
use crate::events::HopFailures;
use gateway_core::endpoint::Endpoint;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Metrics of an ingress.
pub(crate) struct IngressMetrics {
    requests: BTreeMap<&'static str, ByEnding>,
    pub(crate) in_flight: Count,
    seconds: Histogram,
    pub(crate) bytes_in: Count,
    pub(crate) bytes_out: Count,
    /// Requests of gateways for a report.
    pub(crate) exchanges: Count,
    /// Rejected connections by cause.
    pub(crate) refused: Arc<HopFailures>,
}

/// Metrics of requests that found no ready replica.
#[derive(Default)]
pub(crate) struct HoldMetrics {
    pub(crate) not_held: Tally<NotHeldBy>,
    /// Time that requests were held, with any outcome.
    pub(crate) seconds: Histogram,
    /// Notifications of the scaler.
    pub(crate) wakes: Count,
}

impl HoldMetrics {
    pub(crate) fn render(&self, text: &mut Text) {
        let name = "meridian_ingress_not_held_total";
        self.not_held.render(
            text,
            name,
            "Requests that found no ready replica and were not held, by reason.",
            "reason",
        );
        let name = "meridian_ingress_held_seconds";
        text.head(name, Kind::Histogram, "Time that requests were held for a replica, with any outcome.");
        text.histogram(name, &[], &self.seconds);
        let name = "meridian_ingress_wakes_total";
        text.single(name, Kind::Counter, "Notifications of the scaler that a first request found no ready replica.", self.wakes.get());
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

    /// Counts a finished request for a replica.
    pub(crate) fn ended(&self, endpoint: Asked, ending: Ending, took: Duration) {
        if let Some(by) = self.requests.get(endpoint.as_str()) {
            by.0[ending.index()].add(1);
        }
        self.seconds.observe(took);
    }

    pub(crate) fn render(&self, text: &mut Text) {
        let name = "meridian_ingress_requests_total";
        text.head(
            name,
            Kind::Counter,
            "Finished requests for a replica, by endpoint and outcome: ok, an error code, or an incomplete response.",
        );
        for (path, by) in &self.requests {
            for (at, n) in by.0.iter().map(Count::get).enumerate().filter(|(at, n)| *n > 0 || *at == 0) {
                text.sample(name, &[("endpoint", path), ("outcome", Ending::name(at))], n);
            }
        }
        let help = "Connections that the ingress rejected, by cause.";
        self.refused.render(text, "meridian_ingress_connections_refused_total", help);
        let in_flight = self.in_flight.get();
        text.single(
            "meridian_ingress_requests_in_flight",
            Kind::Gauge,
            "Requests in flight.",
            in_flight,
        );
        let name = "meridian_ingress_request_seconds";
        text.head(name, Kind::Histogram, "Time from the head of a request to the last byte of its response.");
        text.histogram(name, &[], &self.seconds);
        for (name, help, count) in [
            ("meridian_ingress_request_bytes_total", "Bytes of request bodies.", &self.bytes_in),
            ("meridian_ingress_response_bytes_total", "Bytes of response bodies.", &self.bytes_out),
            ("meridian_ingress_exchanges_total", "Reports sent to gateways.", &self.exchanges),
        ] {
            text.single(name, Kind::Counter, help, count.get());
        }
    }
}
