//! Metrics of an ingress.

use super::{
    Counter, EndpointLabel, Family, Gauge, Histogram, NotHeldReason, ReportStreamLimit, RequestOutcome,
};
use metrics::{Exemplar, Sparse, metric_set};
use std::time::Duration;

metric_set! {
    /// Metrics of an ingress.
    #[derive(Default)]
    pub(crate) struct IngressMetrics {
        /// Finished requests for a replica, by endpoint and outcome: ok, an error code, or an incomplete response.
        requests: Family<EndpointLabel, Sparse<Family<RequestOutcome>>> =
            "meridian_ingress_requests_total" ["endpoint", "outcome"],
        /// Requests in flight.
        pub(crate) in_flight: Gauge = "meridian_ingress_requests_in_flight",
        /// Time from the head of a request to the last byte of its response.
        seconds: Histogram = "meridian_ingress_request_seconds",
        /// Bytes of request bodies.
        pub(crate) bytes_in: Counter = "meridian_ingress_request_bytes_total",
        /// Bytes of response bodies.
        pub(crate) bytes_out: Counter = "meridian_ingress_response_bytes_total",
        /// Reports sent to gateways.
        pub(crate) exchanges: Counter = "meridian_ingress_exchanges_total",
        /// Loads of deployments in the reports sent to gateways: those that had changed, or all.
        pub(crate) loads_sent: Counter = "meridian_ingress_report_loads_total",
        /// Streams of reports that were rejected or ended because of a limit, by limit.
        pub(crate) report_stream_limits: Family<ReportStreamLimit> =
            "meridian_ingress_report_stream_limits_total" ["limit"],
        /// Exchanges with the other spokes of the region, while this one scales it.
        pub(crate) peer_exchanges: Counter = "meridian_ingress_peer_exchanges_total",
        /// Those of them that failed.
        pub(crate) peer_failures: Counter = "meridian_ingress_peer_exchange_failures_total",
    }
}

metric_set! {
    /// Metrics of requests that found no ready replica.
    #[derive(Default)]
    pub(crate) struct HoldMetrics {
        /// Requests that found no ready replica and were not held, by reason.
        pub(crate) not_held: Family<NotHeldReason> = "meridian_ingress_not_held_total" ["reason"],
        /// Time that requests were held for a replica, with any outcome.
        pub(crate) seconds: Histogram = "meridian_ingress_held_seconds",
        /// Notifications of the scaler that a first request found no ready replica.
        pub(crate) wakes: Counter = "meridian_ingress_wakes_total",
    }
}

impl IngressMetrics {
    /// Counts a finished request for a replica.
    pub(crate) fn ended(
        &self,
        endpoint: EndpointLabel,
        outcome: RequestOutcome,
        took: Duration,
        exemplar: Option<Exemplar>,
    ) {
        self.requests.of(endpoint).0.count(outcome);
        self.seconds.observe_traced(took, exemplar);
    }
}
