//! Connections that failed before a request was sent.

use crate::cause::ConnectionFailureCause;
use metrics::Family;
use std::net::IpAddr;
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Minimum interval between log lines of rejected connections, for each cause.
const LOG_PERIOD: Duration = Duration::from_secs(1);

/// Counters of connection failures by cause.
#[derive(Debug, Default)]
pub struct ConnectionFailures {
    /// Counters.
    pub counts: Family<ConnectionFailureCause>,
    /// Time of the last log line, and failures since then that were not logged.
    last_logged: [Mutex<Option<(Instant, u64)>>; ConnectionFailureCause::ALL.len()],
}

impl ConnectionFailures {
    /// Counts a failure. If it is time to log, returns the number of failures since the last log line.
    fn count(&self, cause: ConnectionFailureCause, now: Instant) -> Option<u64> {
        self.counts.count(cause);
        let mut last_logged = self.last_logged[cause as usize].lock();
        match &mut *last_logged {
            Some((at, suppressed)) if now.saturating_duration_since(*at) < LOG_PERIOD => {
                *suppressed += 1;
                None
            }
            entry => entry.replace((now, 0)).map_or(Some(0), |(_, suppressed)| Some(suppressed)),
        }
    }
}

/// A connection was rejected. Logged at most once a second for each cause, with the address of the `peer`, which is left
/// out for a peer that may be a person. `docs/identities.md` has the fix for each `cause`.
pub struct ConnectionRejected<'a> {
    /// Cause.
    pub cause: ConnectionFailureCause,
    /// Address of the other end; none for a person, such as a client of a gateway or an operator, whose address is personal
    /// data.
    pub peer: Option<IpAddr>,
    /// Reason, from the library or the verification of the name.
    pub reason: &'a str,
}

impl ConnectionRejected<'_> {
    /// Counts the failure, and logs it if it is time to.
    pub fn record(self, failures: &ConnectionFailures) {
        let ConnectionRejected { cause, peer, reason } = self;
        if let Some(suppressed) = failures.count(cause, Instant::now()) {
            let peer = peer.map(tracing::field::display);
            tracing::warn!(cause = cause.as_str(), peer, reason, suppressed, "connection rejected");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rejection_is_counted_and_one_a_second_is_logged_for_each_cause() {
        let (failures, begin) = (ConnectionFailures::default(), Instant::now());
        let count = |cause, millis| failures.count(cause, begin + Duration::from_millis(millis));
        assert_eq!(count(ConnectionFailureCause::NotTls, 0), Some(0));
        assert_eq!(count(ConnectionFailureCause::NotTls, 999), None);
        assert_eq!(count(ConnectionFailureCause::Untrusted, 999), Some(0));
        assert_eq!(count(ConnectionFailureCause::NotTls, 1000), Some(1));
        assert_eq!(failures.counts.of(ConnectionFailureCause::NotTls).get(), 3);
    }
}
