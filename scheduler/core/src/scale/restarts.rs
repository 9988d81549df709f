//! When a replica that died may be started again.
//!
//! One that has worked and dies is replaced at once: most such deaths are a machine's or a signal's, and somebody waits.
//! One that dies again and again without having lived is a wrong model, a full disk, a bug: each time the pause doubles, so
//! that it does not take the machine from those that live. Meanwhile nobody is let go ([`Brake::Crashed`](super::Brake)):
//! who knows who dies next.

use std::time::{Duration, Instant};

/// The pause after the second death in a row.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest: a mended machine is found within it.
pub const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Who has lived so long dies for the first time.
const LIVED: Duration = Duration::from_secs(60);
/// For so long after a death nobody is let go.
pub const BRAKE: Duration = Duration::from_secs(60);

/// The deaths of one deployment's replicas in a region.
#[derive(Clone, Copy, Debug, Default)]
pub struct Restarts {
    in_a_row: u32,
    last: Option<Instant>,
}

impl Restarts {
    /// One has died, which was ready for so long; not at all, if it never was.
    pub fn died(&mut self, ready_for: Option<Duration>, now: Instant) {
        if ready_for.is_some_and(|time| time >= LIVED) {
            self.in_a_row = 0;
        }
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.last = Some(now);
    }

    /// How long to wait yet before the next is started.
    pub fn pause(&self, now: Instant) -> Duration {
        let Some(last) = self.last else { return Duration::ZERO };
        let pause = match self.in_a_row.checked_sub(2) {
            None => Duration::ZERO,
            Some(doublings) => PAUSE_MIN.saturating_mul(1 << doublings.min(16)).min(PAUSE_MAX),
        };
        (last + pause).saturating_duration_since(now)
    }

    /// Whether one has died of late.
    pub fn of_late(&self, now: Instant) -> bool {
        self.last.is_some_and(|last| now.saturating_duration_since(last) < BRAKE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_first_death_is_mended_at_once_and_each_that_follows_twice_as_late() {
        let (mut restarts, now) = (Restarts::default(), some_instant());
        assert_eq!((restarts.pause(now), restarts.of_late(now)), (Duration::ZERO, false));
        let mut pauses = Vec::new();
        for _ in 0..9 {
            restarts.died(None, now);
            pauses.push(restarts.pause(now).as_secs());
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(restarts.pause(now + 45 * S), 15 * S);
        restarts.died(Some(LIVED - S), now);
        assert_eq!(restarts.pause(now), PAUSE_MAX, "it did not live");
        restarts.died(Some(LIVED), now);
        assert_eq!(restarts.pause(now), Duration::ZERO);
    }

    #[test]
    fn a_death_is_of_late_for_a_minute() {
        let (mut restarts, now) = (Restarts::default(), some_instant());
        restarts.died(Some(LIVED), now);
        assert!(restarts.of_late(now + BRAKE - S));
        assert!(!restarts.of_late(now + BRAKE));
    }
}
