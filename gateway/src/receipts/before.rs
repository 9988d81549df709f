//! Entries that are durable before a request is forwarded, where its receipt is required.

use gateway_core::receipt::AttemptKey;
use gateway_core::trail::{AttemptCause, PolicyVersion};
use regions::id::{DeploymentName, TenantId};
use regions::set::RegionIndex;
use std::sync::Arc;

/// A request that is about to be forwarded.
pub(crate) enum Before {
    /// By a gateway to a region.
    Sending(Sending),
    /// By a region to a replica.
    Receiving(Receiving),
}

impl Before {
    /// The number that its outcome refers to.
    pub(super) fn number(&self) -> u64 {
        match self {
            Before::Sending(sending) => sending.number,
            Before::Receiving(receiving) => receiving.number,
        }
    }
}

/// An attempt that is about to be made.
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

/// A request that a region has accepted.
pub(crate) struct Receiving {
    pub(crate) number: u64,
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) tenant: Option<String>,
    pub(crate) deployment: Option<DeploymentName>,
    /// As it was written; absent where there is no condition.
    pub(crate) residency: Option<String>,
    pub(crate) at_ms: u64,
    pub(crate) key: Option<AttemptKey>,
}
