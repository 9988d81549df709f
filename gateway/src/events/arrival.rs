//! Event of a finished request at the ingress of a region.

use super::{ACCESS, millis};
use crate::metrics::{EndpointLabel, IngressMetrics, RequestOutcome};
use metrics::Exemplar;
use regions::id::{DeploymentName, RegionId};
use std::time::Duration;
use telemetry::context::TraceContext;

/// A request that a gateway sent to this region has ended.
pub(crate) struct ArrivalEnded<'a> {
    pub(crate) id: &'a str,
    pub(crate) attempt: u32,
    pub(crate) region: &'a RegionId,
    pub(crate) endpoint: EndpointLabel,
    pub(crate) deployment: Option<&'a DeploymentName>,
    pub(crate) outcome: RequestOutcome,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) total: Duration,
    /// Trace of the request, if its spans are exported.
    pub(crate) exemplar: Option<Exemplar>,
    /// Span of the request; absent if the spoke records no traces.
    pub(crate) trace: Option<TraceContext>,
}

impl ArrivalEnded<'_> {
    pub(crate) fn record(self, metrics: &IngressMetrics) {
        let ArrivalEnded {
            id,
            attempt,
            region,
            endpoint,
            deployment,
            outcome,
            bytes_in,
            bytes_out,
            total,
            exemplar,
            ..
        } = self;
        metrics.ended(endpoint, outcome, total, exemplar);
        metrics.bytes_in.add(bytes_in);
        metrics.bytes_out.add(bytes_out);
        // A request has ended at the ingress. The line of the gateway with the same `id` has more; this one serves to
        // find a request in one region.
        tracing::debug!(
            target: ACCESS,
            id,
            trace_id = self.trace.map(|span| span.trace.text()),
            span_id = self.trace.map(|span| span.span.text()),
            attempt,
            region = region.as_str(),
            endpoint = endpoint.as_str(),
            deployment = deployment.map(DeploymentName::as_str),
            outcome = RequestOutcome::name(outcome.index()),
            status = outcome.status(),
            bytes_in,
            bytes_out,
            total_ms = millis(total),
        );
    }
}
