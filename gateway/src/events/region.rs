//! Events of a region and its spoke instances, as a gateway sees them.

use std::fmt::Display;

use crate::metrics::{EdgeMetrics, ReportRejection};
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

/// A report at the address of a spoke was rejected and has no effect. Logged when the reason changes; the metric counts all.
/// `other_region`, `other_instance`: another spoke runs at this address than the route table says, as for a moment when
/// spokes are replaced; otherwise check `advertise` and `instance` of both. Else the spoke runs another version, or has a
/// defect: upgrade the older one.
pub(crate) struct ReportRejected<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) instance: &'a InstanceName,
    pub(crate) address: &'a dyn Display,
    pub(crate) reason: ReportRejection,
    pub(crate) problem: &'a dyn Display,
    /// Whether the report before was rejected for the same reason.
    pub(crate) is_repeated: bool,
}

impl ReportRejected<'_> {
    pub(crate) fn record(self, metrics: &EdgeMetrics) {
        let ReportRejected { region, instance, address, reason, problem, is_repeated } = self;
        metrics.reports_rejected.count(reason);
        let reason = reason.as_str();
        if is_repeated {
            tracing::debug!(%region, %instance, %address, reason, %problem, "further report of a spoke rejected");
        } else {
            tracing::warn!(%region, %instance, %address, reason, %problem, "report of a spoke rejected");
        }
    }
}
