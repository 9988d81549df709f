//! Write-ahead receipts: entries that are durable before a request is forwarded, where a receipt is required.

use gateway_core::receipt::AttemptKey;
use gateway_core::trail::{AttemptCause, PolicyVersion};
use regions::id::{DeploymentName, TenantId};
use regions::set::RegionIndex;
use std::sync::Arc;

/// Write-ahead receipt of a request that is about to be forwarded.
pub(crate) enum WriteAhead {
    /// From a gateway to a region.
    Sending(Sending),
    /// From a region to a replica.
    Receiving(Receiving),
}

impl WriteAhead {
    /// Returns the number that its outcome entry refers to.
    pub(super) fn number(&self) -> u64 {
        match self {
            WriteAhead::Sending(sending) => sending.number,
            WriteAhead::Receiving(receiving) => receiving.number,
        }
    }
}

/// Attempt that is about to be sent.
pub(crate) struct Sending {
    pub(crate) number: u64,
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) tenant: TenantId,
    pub(crate) deployment: DeploymentName,
    pub(crate) policy: Arc<PolicyVersion>,
    pub(crate) tls_ended_here: bool,
    pub(crate) region: RegionIndex,
    pub(crate) at_ms: u64,
    pub(crate) cause: AttemptCause,
}

/// Request that a region has accepted.
pub(crate) struct Receiving {
    pub(crate) number: u64,
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) tenant: Option<String>,
    pub(crate) deployment: Option<DeploymentName>,
    /// Residency header as received; absent where there is none.
    pub(crate) residency: Option<String>,
    pub(crate) at_ms: u64,
    pub(crate) key: Option<AttemptKey>,
}
