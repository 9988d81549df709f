//! Events of the exchange between the spokes of a region.

use std::fmt::Display;

use regions::HostPort;
use regions::id::InstanceName;

use crate::metrics::Counter;

/// An exchange with another spoke of the region failed: that spoke does not learn of new replicas, and its demand does
/// not count after a few seconds. Logged when exchanges begin to fail. Expected while the spoke restarts; otherwise
/// check the network, and `advertise` of that spoke.
pub(crate) struct PeerExchangeFailed<'a> {
    pub(crate) instance: &'a InstanceName,
    pub(crate) address: &'a HostPort,
    pub(crate) error: &'a dyn Display,
    /// Whether the exchange before did not fail.
    pub(crate) is_new: bool,
}

impl PeerExchangeFailed<'_> {
    pub(crate) fn record(self, failures: &Counter) {
        let PeerExchangeFailed { instance, address, error, is_new } = self;
        failures.add(1);
        if is_new {
            tracing::warn!(%instance, %address, %error, "exchange with another spoke failed");
        }
    }
}
