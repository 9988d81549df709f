//! Failed connections of a gateway to a region, or of a spoke to a replica.

use identity::{ConnectionFailureCause, ConnectionFailures};
use regions::HostPort;
use regions::spiffe::Role;

/// Connecting to a region (`peer` = `spoke`) or to a replica failed. Logged when the cause changes. `docs/identities.md`
/// has the fix for each `cause`.
pub(crate) struct HopFailed<'a> {
    pub(crate) role: Role,
    pub(crate) region: &'a str,
    pub(crate) address: &'a HostPort,
    pub(crate) cause: ConnectionFailureCause,
    pub(crate) error: &'a dyn std::fmt::Display,
    /// Whether the cause differs from that of the previous failure.
    pub(crate) is_new: bool,
}

impl HopFailed<'_> {
    pub(crate) fn record(self, failures: &ConnectionFailures) {
        let HopFailed { role, region, address, cause, error, is_new } = self;
        failures.counts.count(cause);
        if is_new {
            let cause = cause.as_str();
            let peer = role.as_str();
            tracing::error!(peer, region, %address, cause, %error, "failed to connect");
        }
    }
}
