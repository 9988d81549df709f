//! A request at the door of a region is over, however it ended.

use super::{ACCESS, millis};
use crate::metrics::{Asked, Ending, IngressMetrics};
use regions::id::{DeploymentName, RegionId};
use std::time::Duration;

/// A request that an edge sent here is over.
pub(crate) struct ArrivalEnded<'a> {
    pub(crate) id: &'a str,
    pub(crate) attempt: u32,
    pub(crate) region: &'a RegionId,
    pub(crate) asked: Asked,
    pub(crate) deployment: Option<&'a DeploymentName>,
    pub(crate) ending: Ending,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) total: Duration,
}

impl ArrivalEnded<'_> {
    pub(crate) fn record(self, metrics: &IngressMetrics) {
        let ArrivalEnded { id, attempt, region, asked, deployment, ending, bytes_in, bytes_out, total } =
            self;
        metrics.ended(asked, ending, total);
        metrics.bytes_in.add(bytes_in);
        metrics.bytes_out.add(bytes_out);
        // The edge's line says the same and more; here it is for whoever looks for one request at one region.
        tracing::debug!(
            target: ACCESS,
            id,
            attempt,
            region = region.as_str(),
            endpoint = asked.as_str(),
            deployment = deployment.map(DeploymentName::as_str),
            outcome = Ending::name(ending.at()),
            status = ending.status(),
            bytes_in,
            bytes_out,
            total_ms = millis(total),
        );
    }
}
