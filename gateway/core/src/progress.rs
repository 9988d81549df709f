//! Timeouts of a request body: stall, minimum rate, and total time.
//!
//! A single timeout for the whole body is either too short for a large one over a slow line or long enough to hold
//! memory with one byte a minute. So a body has to keep arriving: without a pause longer than [`Limits::stall`], at an
//! average of at least [`Limits::bytes_per_second`] (after an initial grace time of one stall), and within
//! [`Limits::total`].

use std::time::{Duration, Instant};

/// Timeouts and minimum rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest time without a byte.
    pub stall: Duration,
    /// Minimum average rate.
    pub bytes_per_second: u64,
    /// Longest time in total.
    pub total: Duration,
}

/// Limit that a body exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooSlow {
    /// [`Limits::stall`].
    Stalled,
    /// [`Limits::bytes_per_second`].
    Rate,
    /// [`Limits::total`].
    Total,
}

/// Progress of one body.
#[derive(Clone, Copy, Debug)]
pub struct BodyProgress {
    limits: Limits,
    /// Whether it shares its connection with other bodies, and may have to wait for them before its first byte.
    is_multiplexed: bool,
    opened: Instant,
    began: Instant,
    last: Instant,
    received: u64,
}

impl BodyProgress {
    /// Starts without received bytes.
    pub fn new(limits: Limits, now: Instant) -> BodyProgress {
        BodyProgress { limits, is_multiplexed: false, opened: now, began: now, last: now, received: 0 }
    }

    /// Starts on a connection shared by many bodies: a client may send them one after the other, so until the first
    /// byte only the total time is limited.
    pub fn multiplexed(limits: Limits, now: Instant) -> BodyProgress {
        BodyProgress { is_multiplexed: true, ..BodyProgress::new(limits, now) }
    }

    /// Records received bytes.
    pub fn received(&mut self, bytes: usize, now: Instant) {
        if bytes > 0 {
            if self.is_multiplexed && self.received == 0 {
                self.began = now;
            }
            self.last = now;
            self.received = self.received.saturating_add(bytes as u64);
        }
    }

    /// Returns when it is too slow if no more bytes arrive, and by which limit.
    pub fn deadline(&self) -> (Instant, TooSlow) {
        let Limits { stall, bytes_per_second, total } = self.limits;
        let total_deadline = (self.opened + total, TooSlow::Total);
        if self.is_multiplexed && self.received == 0 {
            return total_deadline;
        }
        let granted_ms = self.received.saturating_mul(1000) / bytes_per_second.max(1);
        // Beyond the total time it makes no difference.
        let granted = Duration::from_millis(granted_ms).min(total);
        [(self.last + stall, TooSlow::Stalled), (self.began + stall + granted, TooSlow::Rate), total_deadline]
            .into_iter()
            .min_by_key(|(at, _)| *at)
            .expect("there are three")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const LIMITS: Limits =
        Limits { stall: Duration::from_secs(10), bytes_per_second: 1000, total: Duration::from_secs(60) };

    /// Checks when a body is too slow that arrives as given: bytes after seconds.
    #[track_caller]
    fn check(arrivals: &[(u64, usize)], seconds: u64, cause: TooSlow) {
        let start = some_instant();
        let mut progress = BodyProgress::new(LIMITS, start);
        for (after, bytes) in arrivals {
            let now = start + Duration::from_secs(*after);
            assert!(now < progress.deadline().0, "it is too slow before {after} s");
            progress.received(*bytes, now);
        }
        let (at, by) = progress.deadline();
        assert_eq!(((at - start).as_secs(), by), (seconds, cause), "{arrivals:?}");
    }

    #[test]
    fn a_body_is_too_slow_when_it_stalls_trickles_or_takes_too_long() {
        check(&[], 10, TooSlow::Stalled);
        check(&[(0, 1 << 20)], 10, TooSlow::Stalled);
        check(&[(9, 1 << 20)], 19, TooSlow::Stalled);
        // A byte now and then is not enough.
        check(&[(3, 1), (6, 1), (9, 1)], 10, TooSlow::Rate);
        // 5,000 bytes at once give five seconds more.
        check(&[(8, 5000)], 15, TooSlow::Rate);
        check(&[(0, 0)], 10, TooSlow::Stalled);
        let steady: Vec<_> = (0..12).map(|number| (5 * number, 1 << 20)).collect();
        check(&steady, 60, TooSlow::Total);
    }

    #[test]
    fn a_multiplexed_body_has_the_total_time_for_its_first_byte() {
        let start = some_instant();
        let mut progress = BodyProgress::multiplexed(LIMITS, start);
        let deadline =
            |progress: &BodyProgress| ((progress.deadline().0 - start).as_secs(), progress.deadline().1);
        assert_eq!(deadline(&progress), (60, TooSlow::Total));
        progress.received(1, start + Duration::from_secs(30));
        assert_eq!(deadline(&progress), (40, TooSlow::Stalled));
        progress.received(1, start + Duration::from_secs(39));
        assert_eq!(deadline(&progress), (40, TooSlow::Rate));
    }

    #[test]
    fn the_longest_body_does_not_overflow() {
        let mut progress = BodyProgress::new(Limits { bytes_per_second: 1, ..LIMITS }, some_instant());
        progress.received(usize::MAX, progress.began);
        assert_eq!(progress.deadline().1, TooSlow::Stalled);
    }
}
