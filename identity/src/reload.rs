//! Interval at which the files of an identity are reloaded.

use std::time::Duration;
use tokio::time::{Interval, MissedTickBehavior};

/// Reload interval of the files of an identity: the certificate with its key, the authorities, the revoked certificates.
const RELOAD_PERIOD: Duration = Duration::from_secs(1);

/// Returns the ticks of one file's reloads; the first is immediate.
pub(crate) fn interval() -> Interval {
    let mut interval = tokio::time::interval(RELOAD_PERIOD);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}
