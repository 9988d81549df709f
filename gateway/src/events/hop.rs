//! Failures between gateway and region before a request is sent: at the gateway when connecting to a region, and at the
//! ingress when accepting a connection of any peer.

use crate::hop::HopFailureCause;
use crate::metrics::Family;
use regions::HostPort;
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Minimum interval between log lines of rejected connections, for each cause.
const LOG_PERIOD: Duration = Duration::from_secs(1);

/// Counters of connection failures by cause.
#[derive(Debug, Default)]
pub(crate) struct HopFailures {
    pub(crate) counts: Family<HopFailureCause>,
    /// Time of the last log line, and failures since then that were not logged.
    last_logged: [Mutex<Option<(Instant, u64)>>; HopFailureCause::ALL.len()],
}

impl HopFailures {
    /// Counts a failure. If it is time to log, returns the number of failures since the last log line.
    fn count(&self, cause: HopFailureCause, now: Instant) -> Option<u64> {
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

/// Connecting to a region failed. Logged when the cause changes. `docs/identities.md` has the fix for each `cause`.
pub(crate) struct HopFailed<'a> {
    pub(crate) region: Option<&'a str>,
    pub(crate) address: &'a HostPort,
    pub(crate) cause: HopFailureCause,
    pub(crate) error: &'a dyn std::fmt::Display,
    /// Whether the cause differs from that of the previous failure.
    pub(crate) is_new: bool,
}

impl HopFailed<'_> {
    pub(crate) fn record(self, failures: &HopFailures) {
        let HopFailed { region, address, cause, error, is_new } = self;
        failures.counts.count(cause);
        if is_new {
            let cause = cause.as_str();
            tracing::error!(region, %address, cause, %error, "failed to connect to a region");
        }
    }
}

/// A connection was rejected. Logged at most once a second for each cause. `docs/identities.md` has the fix for
/// each `cause`.
pub(crate) struct HopRefused<'a> {
    pub(crate) cause: HopFailureCause,
    pub(crate) reason: &'a str,
}

impl HopRefused<'_> {
    pub(crate) fn record(self, failures: &HopFailures) {
        let HopRefused { cause, reason } = self;
        if let Some(suppressed) = failures.count(cause, Instant::now()) {
            tracing::warn!(cause = cause.as_str(), reason, suppressed, "connection rejected");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rejection_is_counted_and_one_a_second_is_logged_for_each_cause() {
        let (failures, begin) = (HopFailures::default(), Instant::now());
        let count = |cause, millis| failures.count(cause, begin + Duration::from_millis(millis));
        assert_eq!(count(HopFailureCause::NotTls, 0), Some(0));
        assert_eq!(count(HopFailureCause::NotTls, 999), None);
        assert_eq!(count(HopFailureCause::Untrusted, 999), Some(0));
        assert_eq!(count(HopFailureCause::NotTls, 1000), Some(1));
        assert_eq!(failures.counts.of(HopFailureCause::NotTls).get(), 3);
    }
}
