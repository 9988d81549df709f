//! Failed connections of a gateway to a region.

use identity::{ConnectionFailureCause, ConnectionFailures};
use regions::HostPort;

/// Connecting to a region failed. Logged when the cause changes. `docs/identities.md` has the fix for each `cause`.
pub(crate) struct HopFailed<'a> {
    pub(crate) region: Option<&'a str>,
    pub(crate) address: &'a HostPort,
    pub(crate) cause: ConnectionFailureCause,
    pub(crate) error: &'a dyn std::fmt::Display,
    /// Whether the cause differs from that of the previous failure.
    pub(crate) is_new: bool,
}

impl HopFailed<'_> {
    pub(crate) fn record(self, failures: &ConnectionFailures) {
        let HopFailed { region, address, cause, error, is_new } = self;
        failures.counts.count(cause);
        if is_new {
            let cause = cause.as_str();
            tracing::error!(region, %address, cause, %error, "failed to connect to a region");
        }
    }
}
