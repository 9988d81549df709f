//! Events of replicas whose model differs from the one their deployment specifies.

use regions::{HostPort, ModelRevision, RegionId};
use scheduler_core::spoke::RevisionMismatch;

/// A replica reports a model other than that of its deployment, and receives no requests. Start it with that model,
/// or promote its revision.
pub(crate) struct ReplicaMismatch<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) mismatch: RevisionMismatch,
}

impl ReplicaMismatch<'_> {
    pub(crate) fn record(self) {
        let ReplicaMismatch { region, mismatch } = self;
        let RevisionMismatch { replica: _, endpoint, deployment, expected, found } = mismatch;
        match found {
            Some(found) => tracing::warn!(
                %region, replica = %endpoint, %deployment, %expected,
                found = %found.revision, model = found.source, engine = %found.engine.kind,
                precision = %found.engine.precision, "replica identity mismatch"
            ),
            None => tracing::warn!(
                %region, replica = %endpoint, %deployment, %expected, found = "none reported",
                "replica identity mismatch"
            ),
        }
    }
}

/// A replica responded with a model other than the one it reported when it was selected. The request is
/// sent again. Expected once after a replica was restarted with another model.
pub(crate) struct RevisionChanged<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) replica: &'a HostPort,
    pub(crate) expected: ModelRevision,
    pub(crate) found: &'a str,
}

impl RevisionChanged<'_> {
    pub(crate) fn record(self) {
        let RevisionChanged { region, replica, expected, found } = self;
        tracing::warn!(%region, %replica, %expected, found, "replica changed its model; response discarded");
    }
}
