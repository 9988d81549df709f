//! Events of a region as a gateway sees it.

use gateway_core::outlier::OutlierEvidence;
use regions::health::Health;
use regions::id::RegionId;

/// The attempts at a region failed or were slow, and it gets only probes until they succeed. See the log of its spoke.
pub(crate) struct RegionEjected<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) evidence: OutlierEvidence,
}

impl RegionEjected<'_> {
    pub(crate) fn record(self) {
        let RegionEjected { region, evidence } = self;
        tracing::warn!(%region, ?evidence, "region ejected");
    }
}

/// The reports of a region stopped or report no capacity, and its requests are sent to other allowed regions. Check the spoke
/// and the network.
pub(crate) struct RegionHealthWorsened<'a> {
    pub(crate) region: &'a RegionId,
    /// Suspect or down.
    pub(crate) health: Health,
}

impl RegionHealthWorsened<'_> {
    pub(crate) fn record(self) {
        let RegionHealthWorsened { region, health } = self;
        tracing::warn!(%region, ?health, "region health worsened");
    }
}
