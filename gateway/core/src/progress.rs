//! Timeouts of a request body: stall, minimum rate, and total time.
//!
//! One time for the whole of a body is either too short for a large one over a slow line or long enough to hold memory with
//! one byte a minute. So a body has to go on arriving: no pause longer than [`Limits::stall`], on the average no slower than
//! [`Limits::bytes_per_second`] (from the first pause's length on, so that a start is nobody's fault), and not longer than
//! [`Limits::total`] in all.

use std::time::{Duration, Instant};

/// Timeouts and minimum rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest time without a byte.
    pub stall: Duration,
    /// The lowest average rate.
    pub bytes_per_second: u64,
    /// The longest time in all.
    pub total: Duration,
}

/// Which limit a body did not keep to.
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
pub struct Progress {
    limits: Limits,
    /// It shares its connection with others, and waits for its turn before its first byte.
    is_multiplexed: bool,
    opened: Instant,
    began: Instant,
    last: Instant,
    received: u64,
}

impl Progress {
    /// Nothing has arrived yet.
    pub fn new(limits: Limits, now: Instant) -> Progress {
        Progress { limits, is_multiplexed: false, opened: now, began: now, last: now, received: 0 }
    }

    /// The same where many bodies share a connection: a client may send one after the other, so until the first byte there is
    /// only the time in all.
    pub fn multiplexed(limits: Limits, now: Instant) -> Progress {
        Progress { is_multiplexed: true, ..Progress::new(limits, now) }
    }

    /// More has arrived.
    pub fn received(&mut self, bytes: usize, now: Instant) {
        if bytes > 0 {
            if self.is_multiplexed && self.received == 0 {
                self.began = now;
            }
            self.last = now;
            self.received = self.received.saturating_add(bytes as u64);
        }
    }

    /// When it is too slow if nothing more arrives, and by which limit.
    pub fn deadline(&self) -> (Instant, TooSlow) {
        let Limits { stall, bytes_per_second, total } = self.limits;
        let in_all = (self.opened + total, TooSlow::Total);
        if self.is_multiplexed && self.received == 0 {
            return in_all;
        }
        let earned_ms = self.received.saturating_mul(1000) / bytes_per_second.max(1);
        // Beyond the time in all it makes no difference.
        let earned = Duration::from_millis(earned_ms).min(total);
        [(self.last + stall, TooSlow::Stalled), (self.began + stall + earned, TooSlow::Rate), in_all]
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

    /// When a body is too slow that arrived as told: so many bytes after so many seconds.
    #[track_caller]
    fn check(arrivals: &[(u64, usize)], seconds: u64, why: TooSlow) {
        let start = some_instant();
        let mut progress = Progress::new(LIMITS, start);
        for (after, bytes) in arrivals {
            let now = start + Duration::from_secs(*after);
            assert!(now < progress.deadline().0, "it is too slow before {after} s");
            progress.received(*bytes, now);
        }
        let (at, by) = progress.deadline();
        assert_eq!(((at - start).as_secs(), by), (seconds, why), "{arrivals:?}");
    }

    #[test]
    fn a_body_is_too_slow_when_it_stops_or_trickles_or_takes_too_long_in_all() {
        check(&[], 10, TooSlow::Stalled);
        check(&[(0, 1 << 20)], 10, TooSlow::Stalled);
        check(&[(9, 1 << 20)], 19, TooSlow::Stalled);
        // A byte now and then is no progress.
        check(&[(3, 1), (6, 1), (9, 1)], 10, TooSlow::Rate);
        // 5,000 bytes at once earn five seconds more.
        check(&[(8, 5000)], 15, TooSlow::Rate);
        check(&[(0, 0)], 10, TooSlow::Stalled);
        let steady: Vec<_> = (0..12).map(|number| (5 * number, 1 << 20)).collect();
        check(&steady, 60, TooSlow::Total);
    }

    #[test]
    fn a_body_that_waits_for_others_on_its_connection_has_all_of_the_time_for_its_first_byte() {
        let start = some_instant();
        let mut progress = Progress::multiplexed(LIMITS, start);
        let deadline =
            |progress: &Progress| ((progress.deadline().0 - start).as_secs(), progress.deadline().1);
        assert_eq!(deadline(&progress), (60, TooSlow::Total));
        progress.received(1, start + Duration::from_secs(30));
        assert_eq!(deadline(&progress), (40, TooSlow::Stalled));
        progress.received(1, start + Duration::from_secs(39));
        assert_eq!(deadline(&progress), (40, TooSlow::Rate));
    }

    #[test]
    fn the_longest_body_does_not_overflow() {
        let mut progress = Progress::new(Limits { bytes_per_second: 1, ..LIMITS }, some_instant());
        progress.received(usize::MAX, progress.began);
        assert_eq!(progress.deadline().1, TooSlow::Stalled);
    }
}
