//! Requests that the hub denied: counted, and logged once for each peer and reason, because a peer repeats its request.

use std::collections::BTreeSet;

use identity::PeerIdentity;
use metrics::{Family, labels};
use supervision::Mutex;

use crate::events::AccessDenied;

/// Maximum number of peers and reasons whose first denial is logged.
const LOGGED_MAX: usize = 1024;

labels! {
    /// Reason for a denial.
    #[derive(PartialOrd, Ord)]
    pub(super) enum DenialReason {
        /// The role of the peer may not use the path.
        Role = "role",
        /// The request names another region than the certificate of the peer.
        Region = "region",
    }
}

/// Counters of denied requests.
#[derive(Debug, Default)]
pub(super) struct Denials {
    pub(super) counts: Family<DenialReason>,
    /// Peers and reasons that were logged.
    logged: Mutex<BTreeSet<(String, DenialReason)>>,
}

impl Denials {
    /// Counts a denial, and logs the first one of a peer for this reason.
    pub(super) fn record(&self, peer: &PeerIdentity, reason: DenialReason, path: &str, message: &str) {
        self.counts.count(reason);
        let name = peer.id.to_string();
        let is_first = {
            let mut logged = self.logged.lock();
            logged.len() < LOGGED_MAX && logged.insert((name.clone(), reason))
        };
        if is_first {
            AccessDenied { peer: &name, path, reason: message }.emit();
        } else {
            tracing::debug!(peer = name, path, reason = message, "request denied");
        }
    }
}
