//! Backoff for restarts of crashed replicas.
//!
//! A replica that has worked and crashes is replaced at once: most such crashes come from a machine or a signal, and
//! requests are waiting. A replica that crashes repeatedly without having been stable indicates a wrong model, a full
//! disk or a bug: the delay doubles each time, so that restarts do not take resources from running replicas. During
//! this time scaling down is blocked ([`ReplicaCrashed`](super::ScaleDownBlocker::ReplicaCrashed)), because further
//! replicas may crash.

use std::time::{Duration, Instant};

use backoff::Backoff;

/// Delays after the second consecutive crash and further ones. At most a minute: a repaired machine is used again within
/// it. Without jitter: one spoke restarts the replicas of its machine.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Ready time after which the next crash counts as the first one again.
const STABLE_AFTER: Duration = Duration::from_secs(60);
/// Time after a crash in which scaling down is blocked.
pub const SCALE_DOWN_BLOCK: Duration = Duration::from_secs(60);

/// Crashes of one deployment's replicas in a region.
#[derive(Clone, Copy, Debug, Default)]
pub struct RestartBackoff {
    consecutive: u32,
    last: Option<Instant>,
}

impl RestartBackoff {
    /// Records a crash of a replica that was ready for this long; `None` if it never was.
    pub fn record_crash(&mut self, ready_for: Option<Duration>, now: Instant) {
        if ready_for.is_some_and(|time| time >= STABLE_AFTER) {
            self.consecutive = 0;
        }
        self.consecutive = self.consecutive.saturating_add(1);
        self.last = Some(now);
    }

    /// Returns the remaining delay before the next start.
    pub fn delay(&self, now: Instant) -> Duration {
        let Some(last) = self.last else { return Duration::ZERO };
        let delay = match self.consecutive {
            0 | 1 => Duration::ZERO,
            crashes => BACKOFF.delay(crashes - 1),
        };
        (last + delay).saturating_duration_since(now)
    }

    /// Returns whether a crash was recent enough to block scaling down.
    pub fn is_recent(&self, now: Instant) -> bool {
        self.last.is_some_and(|last| now.saturating_duration_since(last) < SCALE_DOWN_BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_first_crash_is_restarted_at_once_and_each_further_one_after_a_doubled_delay() {
        let (mut restarts, now) = (RestartBackoff::default(), some_instant());
        assert_eq!((restarts.delay(now), restarts.is_recent(now)), (Duration::ZERO, false));
        let mut delays = Vec::new();
        for _ in 0..9 {
            restarts.record_crash(None, now);
            delays.push(restarts.delay(now).as_secs());
        }
        assert_eq!(delays, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(restarts.delay(now + 45 * S), 15 * S);
        restarts.record_crash(Some(STABLE_AFTER - S), now);
        assert_eq!(restarts.delay(now), BACKOFF.max, "it was not stable");
        restarts.record_crash(Some(STABLE_AFTER), now);
        assert_eq!(restarts.delay(now), Duration::ZERO);
    }

    #[test]
    fn a_crash_is_recent_for_a_minute() {
        let (mut restarts, now) = (RestartBackoff::default(), some_instant());
        restarts.record_crash(Some(STABLE_AFTER), now);
        assert!(restarts.is_recent(now + SCALE_DOWN_BLOCK - S));
        assert!(!restarts.is_recent(now + SCALE_DOWN_BLOCK));
    }
}
