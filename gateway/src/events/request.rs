//! Event of a finished request at a gateway.

use super::{ACCESS, millis};
use crate::metrics::{ClientProtocol, EdgeMetrics, EndpointLabel, LatencyStage, RequestOutcome};
use gateway_core::decimal;
use gateway_core::labels::AttemptResult;
use gateway_core::route::RouteDecision;
use gateway_core::tenant::Cost;
use gateway_core::timing::RegionTiming;
use gateway_core::trail::{AttemptCause, Trail};
use metrics::Exemplar;
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, TenantId};
use regions::set::RegionIndex;
use replica_api::priority::Priority;
use std::time::Duration;
use telemetry::context::TraceContext;

/// A request has ended; one line for each request. `MERIDIAN_LOG=info,access=off` disables these lines.
pub(crate) struct RequestEnded<'a> {
    pub(crate) id: &'a str,
    pub(crate) endpoint: EndpointLabel,
    pub(crate) protocol: ClientProtocol,
    /// Absent if the request was answered or rejected before its priority was known.
    pub(crate) priority: Option<Priority>,
    pub(crate) outcome: RequestOutcome,
    /// Absent if the request was not authenticated.
    pub(crate) tenant: Option<&'a TenantId>,
    pub(crate) deployment: Option<&'a DeploymentName>,
    /// Region whose response was forwarded.
    pub(crate) region: Option<RegionIndex>,
    pub(crate) trail: &'a Trail,
    pub(crate) catalogue: &'a Catalogue,
    /// Estimated cost; absent if the body was not read.
    pub(crate) cost: Option<Cost>,
    /// Tokens as counted by the region.
    pub(crate) tokens: Option<u64>,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) total: Duration,
    /// Trace of the request, if its spans are exported, or if the gateway records no traces and the client samples it.
    pub(crate) exemplar: Option<Exemplar>,
    /// Absent if no region responded.
    pub(crate) times: Option<RequestTimes>,
    /// Span of the request; absent if the gateway records no traces.
    pub(crate) trace: Option<TraceContext>,
}

/// Times of the stages of a request with a response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestTimes {
    /// From the head of the request to the head of the response.
    pub(crate) to_head: Duration,
    /// Part of `to_head` spent waiting for the successful attempt.
    pub(crate) waited: Duration,
    /// Times that the region reported.
    pub(crate) region: RegionTiming,
}

impl RequestEnded<'_> {
    pub(crate) fn record(self, metrics: &EdgeMetrics) {
        self.count(metrics);
        if tracing::enabled!(target: ACCESS, tracing::Level::INFO) {
            self.log();
        }
    }

    fn count(&self, metrics: &EdgeMetrics) {
        metrics.ended(self.endpoint, self.protocol, self.outcome);
        if let Some(tenant) = self.tenant {
            let inputs = self.tokens.and(self.cost).map_or(0, |cost| cost.inputs);
            metrics.tenants.ended(tenant, self.outcome, inputs, self.tokens.unwrap_or(0));
        }
        if let Some(region) = self.region {
            metrics.responded(region, self.outcome);
        }
        if let (Some(deployment), Some(priority)) = (self.deployment, self.priority) {
            metrics.deployments.ended(deployment, priority, self.outcome, self.total, self.exemplar);
        }
        self.trail.attempts().for_each(|attempt| metrics.attempted(attempt, self.exemplar));
        let spilled = self.trail.attempts().any(|attempt| attempt.cause == AttemptCause::Spillover);
        if let Some(primary) = self.trail.route().filter(|_| spilled).and_then(RouteDecision::primary) {
            metrics.spilled(primary);
        }
        metrics.seconds.of(self.priority).observe_traced(self.total, self.exemplar);
        for stage in LatencyStage::ALL {
            if let Some(took) = self.stage(stage) {
                metrics.stages.of(stage).observe_traced(took, self.exemplar);
            }
        }
        metrics.bytes_in.add(self.bytes_in);
        metrics.bytes_out.add(self.bytes_out);
    }

    fn stage(&self, stage: LatencyStage) -> Option<Duration> {
        let RequestTimes { to_head, waited, region } = self.times?;
        match stage {
            LatencyStage::Gateway => Some(to_head.saturating_sub(waited)),
            LatencyStage::Network => region.region.map(|region| waited.saturating_sub(region)),
            LatencyStage::Queue => region.queue,
            LatencyStage::Tokenize => region.tokenize,
            LatencyStage::Engine => region.engine,
            LatencyStage::Sending => Some(self.total.saturating_sub(to_head)),
        }
    }

    fn log(&self) {
        let RequestEnded { id, endpoint, protocol, priority, outcome, tenant, deployment, region, .. } =
            *self;
        let RequestEnded { trail, catalogue, cost, tokens, bytes_in, bytes_out, total, trace, .. } = *self;
        let stage_ms = |stage| self.stage(stage).map(millis);
        tracing::info!(
            target: ACCESS,
            id,
            trace_id = trace.map(|span| span.trace.text()),
            span_id = trace.map(|span| span.span.text()),
            protocol = protocol.as_str(),
            endpoint = endpoint.as_str(),
            tenant = tenant.map(TenantId::as_str),
            deployment = deployment.map(DeploymentName::as_str),
            priority = priority.map_or("unknown", Priority::as_str),
            outcome = RequestOutcome::name(outcome.index()),
            status = outcome.status(),
            region = region.map(|region| catalogue.region(region).id.as_str()),
            attempts = trail.count(),
            trail = format_trail(trail, catalogue),
            inputs = cost.map(|cost| cost.inputs),
            tokens_estimated = cost.map(|cost| cost.tokens),
            tokens,
            bytes_in,
            bytes_out,
            total_ms = millis(total),
            gateway_ms = stage_ms(LatencyStage::Gateway),
            network_ms = stage_ms(LatencyStage::Network),
            queue_ms = stage_ms(LatencyStage::Queue),
            tokenize_ms = stage_ms(LatencyStage::Tokenize),
            engine_ms = stage_ms(LatencyStage::Engine),
            sending_ms = stage_ms(LatencyStage::Sending),
        );
    }
}

/// Formats the attempts, such as `aws/us-east-1:first:unreachable:1.250 gcp/europe-west4:retry:ok:93.100`.
fn format_trail(trail: &Trail, catalogue: &Catalogue) -> String {
    let mut text = String::with_capacity(64 * trail.count());
    for attempt in trail.attempts() {
        let region = catalogue.region(attempt.region).id.as_str();
        let space = if text.is_empty() { "" } else { " " };
        for part in
            [space, region, ":", attempt.cause.as_str(), ":", AttemptResult::from(attempt.end).as_str(), ":"]
        {
            text.push_str(part);
        }
        decimal::push_millis(&mut text, attempt.took);
    }
    text
}
