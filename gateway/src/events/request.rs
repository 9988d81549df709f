//! A request at the edge is over, however it ended.

use super::{ACCESS, millis};
use crate::metrics::{Asked, EdgeMetrics, Ending, Priority, Protocol, Stage};
use gateway_core::decimal;
use gateway_core::labels::AttemptResult;
use gateway_core::tenant::Cost;
use gateway_core::timing::RegionTiming;
use gateway_core::trail::Trail;
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, TenantId};
use regions::set::RegionIndex;
use std::time::Duration;

/// A request is over.
pub(crate) struct RequestEnded<'a> {
    pub(crate) id: &'a str,
    pub(crate) asked: Asked,
    pub(crate) protocol: Protocol,
    pub(crate) priority: Priority,
    pub(crate) ending: Ending,
    /// Absent when nobody could be recognised.
    pub(crate) tenant: Option<&'a TenantId>,
    pub(crate) deployment: Option<&'a DeploymentName>,
    /// Whose answer was given.
    pub(crate) region: Option<RegionIndex>,
    pub(crate) trail: &'a Trail,
    pub(crate) catalogue: &'a Catalogue,
    /// By estimate; absent when the body was not read.
    pub(crate) cost: Option<Cost>,
    /// As the region counted.
    pub(crate) tokens: Option<u64>,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) total: Duration,
    /// Absent when no region answered.
    pub(crate) times: Option<Times>,
}

/// Where the time of an answered request went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// From the request's head to the answer's.
    pub(crate) to_head: Duration,
    /// Of that, for the attempt that was answered.
    pub(crate) waited: Duration,
    /// What the region said of itself.
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
        metrics.ended(self.asked, self.protocol, self.ending);
        if let Some(tenant) = self.tenant {
            let inputs = self.tokens.and(self.cost).map_or(0, |cost| cost.inputs);
            metrics.tenants.ended(tenant, self.ending, inputs, self.tokens.unwrap_or(0));
        }
        if let Some(region) = self.region {
            metrics.answered_by(region, self.ending);
        }
        self.trail.attempts().for_each(|attempt| metrics.attempted(attempt));
        metrics.took(self.priority, self.total);
        for stage in Stage::ALL {
            if let Some(took) = self.stage(stage) {
                metrics.stage(stage, took);
            }
        }
        metrics.bytes_in.add(self.bytes_in);
        metrics.bytes_out.add(self.bytes_out);
    }

    fn stage(&self, stage: Stage) -> Option<Duration> {
        let Times { to_head, waited, region } = self.times?;
        match stage {
            Stage::Gateway => Some(to_head.saturating_sub(waited)),
            Stage::Network => region.region.map(|region| waited.saturating_sub(region)),
            Stage::Queue => region.queue,
            Stage::Tokenize => region.tokenize,
            Stage::Engine => region.engine,
            Stage::Sending => Some(self.total.saturating_sub(to_head)),
        }
    }

    fn log(&self) {
        let RequestEnded { id, asked, protocol, priority, ending, tenant, deployment, region, .. } = *self;
        let RequestEnded { trail, catalogue, cost, tokens, bytes_in, bytes_out, total, .. } = *self;
        let stage_ms = |stage| self.stage(stage).map(millis);
        tracing::info!(
            target: ACCESS,
            id,
            protocol = protocol.as_str(),
            endpoint = asked.as_str(),
            tenant = tenant.map(TenantId::as_str),
            deployment = deployment.map(DeploymentName::as_str),
            priority = priority.as_str(),
            outcome = Ending::name(ending.at()),
            status = ending.status(),
            region = region.map(|region| catalogue.region(region).id.as_str()),
            attempts = trail.count(),
            trail = told(trail, catalogue),
            inputs = cost.map(|cost| cost.inputs),
            tokens_estimated = cost.map(|cost| cost.tokens),
            tokens,
            bytes_in,
            bytes_out,
            total_ms = millis(total),
            gateway_ms = stage_ms(Stage::Gateway),
            network_ms = stage_ms(Stage::Network),
            queue_ms = stage_ms(Stage::Queue),
            tokenize_ms = stage_ms(Stage::Tokenize),
            engine_ms = stage_ms(Stage::Engine),
            sending_ms = stage_ms(Stage::Sending),
        );
    }
}

/// The attempts, as `aws/us-east-1:first:unreachable:1.250 gcp/europe-west4:retry:ok:93.100`.
fn told(trail: &Trail, catalogue: &Catalogue) -> String {
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
