//! Requests that the hub denied: counted, and logged once for each peer and reason, because a peer repeats its request.

use std::collections::BTreeSet;
use std::net::IpAddr;

use metrics::{Family, labels};
use supervision::Mutex;

use super::operators::rejection::TokenRejection;
use crate::events::{AccessDenied, NotAuthenticated};

/// Maximum number of peers and reasons whose first denial is logged.
const LOGGED_MAX: usize = 1024;

labels! {
    /// Reason for a denial.
    pub(super) enum DenialReason {
        /// The role of the peer may not use the path.
        Role = "role",
        /// The request names another region than the certificate of the peer.
        Region = "region",
    }
}

labels! {
    /// Reason for a rejected request to join.
    pub(super) enum JoinRejection {
        /// No such token is stored: it has expired, was deleted by a restoration, or is of another fleet.
        Unknown = "unknown",
        /// The token has expired.
        Expired = "expired",
        /// The token was used for another key.
        Used = "used",
        /// The certificate that was issued for the token is revoked.
        Revoked = "revoked",
        /// The request for a certificate is invalid, or its key is weak.
        InvalidRequest = "invalid_request",
        /// Too many attempts of this address failed.
        TooManyAttempts = "too_many_attempts",
    }
}

/// Counters of denied requests.
#[derive(Debug, Default)]
pub(super) struct Denials {
    pub(super) counts: Family<DenialReason>,
    /// Rejected requests to join.
    pub(super) joins: Family<JoinRejection>,
    /// Peers and reasons that were logged.
    logged: Mutex<BTreeSet<(String, &'static str)>>,
}

impl Denials {
    /// Counts a denial, and logs the first one of a peer for this reason.
    pub(super) fn record(&self, peer: &str, reason: DenialReason, path: &str, message: &str) {
        self.counts.count(reason);
        if self.is_first(peer, reason.as_str()) {
            AccessDenied { peer, path, reason: message }.emit();
        } else {
            // A request of a peer was denied again for the same reason. The first one is a warning.
            tracing::debug!(peer, path, reason = message, "request denied");
        }
    }

    /// Logs the first request of an address that is not authenticated for this reason. The token is not logged.
    pub(super) fn record_unauthenticated(&self, address: IpAddr, reason: TokenRejection, path: &str) {
        if self.is_first(&address.to_string(), reason.as_str()) {
            NotAuthenticated { address, path, reason: reason.as_str() }.emit();
        } else {
            // A request without a valid token came again from the same address for the same reason. The first one is a
            // warning.
            tracing::debug!(%address, path, reason = reason.as_str(), "request not authenticated");
        }
    }

    fn is_first(&self, peer: &str, reason: &'static str) -> bool {
        let mut logged = self.logged.lock();
        logged.len() < LOGGED_MAX && logged.insert((peer.to_owned(), reason))
    }
}
