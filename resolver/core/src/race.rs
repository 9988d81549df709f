//! Connection attempts to several addresses (Happy Eyeballs, RFC 8305, section 5).
//!
//! An attempt starts when the previous one has failed or has taken [`ATTEMPT_DELAY`]. The first that succeeds wins, and
//! the caller closes the others. So an unreachable address costs a quarter of a second, and not a connect timeout.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Time after which the next address is tried too: the recommendation of RFC 8305, section 8.
pub const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Connection attempts to the addresses of one endpoint.
#[derive(Clone, Debug)]
pub struct ConnectRace {
    waiting: VecDeque<SocketAddr>,
    /// Attempts in progress, in the order in which they began.
    pending: Vec<SocketAddr>,
    next: Option<Instant>,
}

/// Next action of a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaceStep {
    /// Start an attempt to this address, and ask again.
    Start(SocketAddr),
    /// Wait for the attempts in progress, and until this time if there is one.
    Wait(Option<Instant>),
    /// Every attempt has failed.
    Failed,
}

impl ConnectRace {
    /// Creates a race between these addresses, in this order.
    pub fn new(addresses: impl IntoIterator<Item = SocketAddr>) -> ConnectRace {
        ConnectRace { waiting: addresses.into_iter().collect(), pending: Vec::new(), next: None }
    }

    /// Returns the next action.
    pub fn step(&mut self, now: Instant) -> RaceStep {
        let is_due = self.pending.is_empty() || self.next.is_none_or(|next| next <= now);
        if is_due && let Some(address) = self.waiting.pop_front() {
            self.pending.push(address);
            self.next = Some(now + ATTEMPT_DELAY);
            return RaceStep::Start(address);
        }
        if self.pending.is_empty() {
            return RaceStep::Failed;
        }
        RaceStep::Wait(self.next.filter(|_| !self.waiting.is_empty()))
    }

    /// Records that an attempt failed: the next one starts at once.
    pub fn failed(&mut self, address: SocketAddr) {
        self.pending.retain(|pending| *pending != address);
        self.next = None;
    }

    /// Returns the addresses that lost against `winner` although they were tried before it.
    pub fn slower_than(&self, winner: SocketAddr) -> impl Iterator<Item = SocketAddr> + '_ {
        self.pending.iter().copied().take_while(move |pending| *pending != winner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    fn addresses<const N: usize>() -> [SocketAddr; N] {
        std::array::from_fn(|n| SocketAddr::from(([10, 0, 0, n as u8 + 1], 7100)))
    }

    #[test]
    fn the_next_address_is_tried_after_the_delay_while_the_first_is_still_pending() {
        let (now, [first, second]) = (some_instant(), addresses());
        let mut race = ConnectRace::new([first, second]);
        assert_eq!(race.step(now), RaceStep::Start(first));
        assert_eq!(race.step(now), RaceStep::Wait(Some(now + ATTEMPT_DELAY)));
        let almost = now + ATTEMPT_DELAY - Duration::from_millis(1);
        assert_eq!(race.step(almost), RaceStep::Wait(Some(now + ATTEMPT_DELAY)));
        assert_eq!(race.step(now + ATTEMPT_DELAY), RaceStep::Start(second));
        assert_eq!(race.step(now + ATTEMPT_DELAY), RaceStep::Wait(None), "no address is left");
        assert_eq!(race.slower_than(second).collect::<Vec<_>>(), [first]);
        assert_eq!(race.slower_than(first).count(), 0);
    }

    #[test]
    fn a_failed_attempt_starts_the_next_one_at_once() {
        let (now, [first, second, third]) = (some_instant(), addresses());
        let mut race = ConnectRace::new([first, second, third]);
        assert_eq!(race.step(now), RaceStep::Start(first));
        race.failed(first);
        assert_eq!(race.step(now), RaceStep::Start(second));
        assert_eq!(race.step(now), RaceStep::Wait(Some(now + ATTEMPT_DELAY)), "one at a time");
        race.failed(second);
        assert_eq!(race.step(now), RaceStep::Start(third));
        assert_eq!(race.slower_than(third).count(), 0, "a failed attempt is not a slow one");
        race.failed(third);
        assert_eq!(race.step(now), RaceStep::Failed);
    }

    #[test]
    fn a_race_without_addresses_fails() {
        assert_eq!(ConnectRace::new([]).step(some_instant()), RaceStep::Failed);
    }

    #[test]
    fn a_failure_of_a_slow_attempt_starts_the_next_although_a_later_one_is_pending() {
        let (now, [first, second, third]) = (some_instant(), addresses());
        let mut race = ConnectRace::new([first, second, third]);
        race.step(now);
        let later = now + ATTEMPT_DELAY;
        assert_eq!(race.step(later), RaceStep::Start(second));
        race.failed(first);
        assert_eq!(race.step(later), RaceStep::Start(third));
    }
}
