//! All that is known of a request at the edge that is over.
//!
//! It is put together once and shared by those who keep it, the ring that `GET /explain` looks into and the writer of
//! receipts, each of whom takes from it what it needs when it needs it. The ring keeps it for longer than the writer needs
//! it, so that its memory is given back on the thread that took it.

use super::Times;
use crate::metrics::{Asked, Ending};
use gateway_core::receipt::ReceiptId;
use gateway_core::tenant::Cost;
use gateway_core::trail::{AttemptRecord, PolicyVersion, Trail};
use regions::id::{DeploymentName, TenantId};
use regions::set::RegionIndex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request that is over.
pub(crate) struct Finished {
    pub(crate) id: String,
    pub(crate) arrived: Instant,
    /// The same moment, in milliseconds since 1970.
    pub(crate) at_ms: u64,
    pub(crate) tls_ended_here: bool,
    pub(crate) asked: Asked,
    pub(crate) ending: Ending,
    pub(crate) tenant: Option<TenantId>,
    pub(crate) trail: Trail,
    /// Whose answer was given, and where its time went.
    pub(crate) answered: Option<(RegionIndex, Times)>,
    pub(crate) tokens: Option<u64>,
    pub(crate) total: Duration,
    /// What it was for, if that was understood.
    pub(crate) understood: Option<Understood>,
    /// The receipt that its client was told of, and the key of the attempt that it is of.
    pub(crate) receipt: Option<(u64, ReceiptId)>,
}

/// What a request was for, and the residency policy that it travelled under.
pub(crate) struct Understood {
    pub(crate) deployment: DeploymentName,
    pub(crate) cost: Cost,
    /// The policy by which it was admitted.
    pub(crate) policy: Arc<PolicyVersion>,
}

/// When an attempt at a request began that had `arrived` at `at_ms`, in milliseconds since 1970.
pub(crate) fn began_ms(attempt: &AttemptRecord, arrived: Instant, at_ms: u64) -> u64 {
    at(attempt.began, arrived, at_ms)
}

/// A time after `arrived`, which was at `at_ms`, in milliseconds since 1970.
pub(crate) fn at(time: Instant, arrived: Instant, at_ms: u64) -> u64 {
    at_ms + time.saturating_duration_since(arrived).as_millis() as u64
}
