//! Record of a finished request at a gateway.
//!
//! It is built once and shared by its consumers, the ring buffer behind `GET /explain`, the writers of receipts and of explanations,
//! and the export of traces; each reads the fields it needs when it needs them. The ring usually keeps it longest, so its memory is
//! freed on the thread that allocated it.

use super::RequestTimes;
use crate::metrics::{EndpointLabel, RequestOutcome};
use gateway_core::receipt::ReceiptId;
use gateway_core::tenant::Cost;
use gateway_core::trail::{AttemptRecord, PolicyVersion, Trail};
use regions::id::{DeploymentName, TenantId};
use regions::set::RegionIndex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::request::RequestTrace;

/// Record of a finished request.
pub(crate) struct FinishedRequest {
    pub(crate) id: String,
    pub(crate) arrived: Instant,
    /// Arrival in milliseconds since 1970.
    pub(crate) at_ms: u64,
    pub(crate) tls_ended_here: bool,
    pub(crate) endpoint: EndpointLabel,
    pub(crate) outcome: RequestOutcome,
    pub(crate) tenant: Option<TenantId>,
    pub(crate) trail: Trail,
    /// Begin and end of the routing decision; absent if there was none, or if neither traces nor explanations on disk are configured.
    pub(crate) routed_at: Option<(Instant, Instant)>,
    /// Region whose response was forwarded, and the times of its stages.
    pub(crate) served_by: Option<(RegionIndex, RequestTimes)>,
    pub(crate) tokens: Option<u64>,
    pub(crate) total: Duration,
    /// Deployment, cost and policy; absent if the request was not parsed.
    pub(crate) resolved: Option<ResolvedRequest>,
    /// Receipt reported to the client, and the key of its attempt.
    pub(crate) receipt: Option<(u64, ReceiptId)>,
    /// Trace of the request, if the gateway records traces.
    pub(crate) trace: Option<RequestTrace>,
}

/// Deployment and cost of a parsed request, and its residency policy.
pub(crate) struct ResolvedRequest {
    pub(crate) deployment: DeploymentName,
    pub(crate) cost: Cost,
    /// Policy by which it was admitted.
    pub(crate) policy: Arc<PolicyVersion>,
}

/// Returns the start of an attempt in milliseconds since 1970, for a request that arrived at `arrived`, which is
/// `at_ms`.
pub(crate) fn began_ms(attempt: &AttemptRecord, arrived: Instant, at_ms: u64) -> u64 {
    at(attempt.began, arrived, at_ms)
}

/// Converts a time after `arrived`, which is `at_ms`, to milliseconds since 1970.
pub(crate) fn at(time: Instant, arrived: Instant, at_ms: u64) -> u64 {
    at_ms + time.saturating_duration_since(arrived).as_millis() as u64
}
