//! Metrics of an ingress.

use super::{
    EndpointLabel, Kind, LabelCounter, LatencyHistogram, MetricsText, NotHeldReason, RelaxedCounter,
    RequestOutcome,
};
use crate::events::HopFailures;
use gateway_core::endpoint::Endpoint;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Metrics of an ingress.
pub(crate) struct IngressMetrics {
    requests: BTreeMap<&'static str, IngressOutcomes>,
    pub(crate) in_flight: RelaxedCounter,
    seconds: LatencyHistogram,
    pub(crate) bytes_in: RelaxedCounter,
    pub(crate) bytes_out: RelaxedCounter,
    /// Requests of gateways for a report.
    pub(crate) exchanges: RelaxedCounter,
    /// Rejected connections by cause.
    pub(crate) refused: Arc<HopFailures>,
}

/// Metrics of requests that found no ready replica.
#[derive(Default)]
pub(crate) struct HoldMetrics {
    pub(crate) not_held: LabelCounter<NotHeldReason>,
    /// Time that requests were held, with any outcome.
    pub(crate) seconds: LatencyHistogram,
    /// Notifications of the scaler.
    pub(crate) wakes: RelaxedCounter,
}

impl HoldMetrics {
    pub(crate) fn render(&self, text: &mut MetricsText) {
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
        text.single(
            name,
            Kind::Counter,
            "Notifications of the scaler that a first request found no ready replica.",
            self.wakes.get(),
        );
    }
}

struct IngressOutcomes([RelaxedCounter; RequestOutcome::LEN]);

impl IngressMetrics {
    pub(crate) fn new() -> IngressMetrics {
        let outcomes = || IngressOutcomes(std::array::from_fn(|_| RelaxedCounter::default()));
        IngressMetrics {
            requests: Endpoint::paths().map(|path| (path, outcomes())).collect(),
            in_flight: RelaxedCounter::default(),
            seconds: LatencyHistogram::default(),
            bytes_in: RelaxedCounter::default(),
            bytes_out: RelaxedCounter::default(),
            exchanges: RelaxedCounter::default(),
            refused: Arc::default(),
        }
    }

    /// Counts a finished request for a replica.
    pub(crate) fn ended(&self, endpoint: EndpointLabel, outcome: RequestOutcome, took: Duration) {
        if let Some(by) = self.requests.get(endpoint.as_str()) {
            by.0[outcome.index()].add(1);
        }
        self.seconds.observe(took);
    }

    pub(crate) fn render(&self, text: &mut MetricsText) {
        let name = "meridian_ingress_requests_total";
        text.head(
            name,
            Kind::Counter,
            "Finished requests for a replica, by endpoint and outcome: ok, an error code, or an incomplete response.",
        );
        for (path, by) in &self.requests {
            for (at, n) in
                by.0.iter().map(RelaxedCounter::get).enumerate().filter(|(at, n)| *n > 0 || *at == 0)
            {
                text.sample(name, &[("endpoint", path), ("outcome", RequestOutcome::name(at))], n);
            }
        }
        let help = "Connections that the ingress rejected, by cause.";
        self.refused.render(text, "meridian_ingress_connections_refused_total", help);
        let in_flight = self.in_flight.get();
        text.single("meridian_ingress_requests_in_flight", Kind::Gauge, "Requests in flight.", in_flight);
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
