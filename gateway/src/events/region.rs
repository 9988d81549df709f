//! Events of a region and its spoke instances, as a gateway sees them.

use std::fmt::Display;

use gateway_core::outlier::OutlierEvidence;
use regions::health::Health;
use regions::id::{InstanceName, RegionId};

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

/// The connections to a spoke failed or its responses were slow, and it gets only probes until they succeed; the
/// other spokes of its region get its requests. See the log of that spoke.
pub(crate) struct InstanceEjected<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) instance: &'a InstanceName,
    pub(crate) evidence: OutlierEvidence,
}

impl InstanceEjected<'_> {
    pub(crate) fn record(self) {
        let InstanceEjected { region, instance, evidence } = self;
        tracing::warn!(%region, %instance, ?evidence, "spoke ejected");
    }
}

/// The reports of a spoke stopped or a connection to it failed, and its requests are sent to the other spokes of its
/// region. Expected while it restarts; otherwise check the spoke and the network.
pub(crate) struct InstanceHealthWorsened<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) instance: &'a InstanceName,
    /// Suspect or down.
    pub(crate) health: Health,
}

impl InstanceHealthWorsened<'_> {
    pub(crate) fn record(self) {
        let InstanceHealthWorsened { region, instance, health } = self;
        tracing::warn!(%region, %instance, ?health, "spoke health worsened");
    }
}

/// Another spoke runs at the address of this one than the route table says, and its reports are ignored. Expected
/// for a moment when spokes are replaced; otherwise check `advertise` and `instance` of both.
pub(crate) struct ForeignReport<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) instance: &'a InstanceName,
    pub(crate) address: &'a dyn Display,
    /// Region and name in the report.
    pub(crate) reported: (&'a RegionId, &'a InstanceName),
}

impl ForeignReport<'_> {
    pub(crate) fn record(self) {
        let ForeignReport { region, instance, address, reported: (other_region, other) } = self;
        tracing::warn!(%region, %instance, %address, %other_region, %other, "report of another spoke rejected");
    }
}
