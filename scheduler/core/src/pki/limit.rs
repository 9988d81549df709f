//! Limit on failed attempts to join, by the address of the caller.
//!
//! A secret cannot be guessed; the limit protects the store and the log from a caller that tries. A successful attempt
//! is not counted, so a fleet that starts at once behind one address is not delayed.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use regions::network::client_network;

/// Maximum number of failed attempts of an address within [`WINDOW`].
pub const FAILURES_MAX: u32 = 10;
/// Time after which the failures of an address are forgotten.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of addresses with failures. Of more, the one whose window began first is forgotten.
pub const ADDRESSES_MAX: usize = 1024;

/// Failed attempts to join.
#[derive(Debug, Default)]
pub struct FailedJoins {
    by_address: BTreeMap<IpAddr, Window>,
}

#[derive(Debug)]
struct Window {
    began: Instant,
    failures: u32,
}

impl FailedJoins {
    /// Returns the time for which this address must wait before its next attempt, if it has failed too often.
    pub fn delay(&self, address: IpAddr, now: Instant) -> Option<Duration> {
        let Window { began, failures } = self.by_address.get(&client_network(address))?;
        let left =
            WINDOW.checked_sub(now.saturating_duration_since(*began)).filter(|left| !left.is_zero())?;
        (*failures >= FAILURES_MAX).then_some(left)
    }

    /// Records a failed attempt.
    pub fn failed(&mut self, address: IpAddr, now: Instant) {
        self.by_address.retain(|_, window| now.saturating_duration_since(window.began) < WINDOW);
        let address = client_network(address);
        if !self.by_address.contains_key(&address) && self.by_address.len() >= ADDRESSES_MAX {
            let oldest = self.by_address.iter().min_by_key(|(address, window)| (window.began, **address));
            if let Some(oldest) = oldest.map(|(address, _)| *address) {
                self.by_address.remove(&oldest);
            }
        }
        let window = self.by_address.entry(address).or_insert(Window { began: now, failures: 0 });
        window.failures = window.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    #[test]
    fn an_address_waits_after_the_maximum_of_failures_and_others_do_not() {
        let (mut joins, now) = (FailedJoins::default(), some_instant());
        let address: IpAddr = "2001:db8::1".parse().unwrap();
        let neighbour: IpAddr = "2001:db8::2".parse().unwrap();
        let other: IpAddr = "2001:db8:0:1::1".parse().unwrap();
        for _ in 0..FAILURES_MAX {
            assert_eq!(joins.delay(address, now), None);
            joins.failed(address, now);
        }
        assert_eq!(joins.delay(address, now), Some(WINDOW));
        assert_eq!(joins.delay(neighbour, now), Some(WINDOW), "it is in the same network");
        assert_eq!(joins.delay(other, now), None);
        assert_eq!(joins.delay(address, now + WINDOW), None);
    }

    #[test]
    fn the_number_of_addresses_is_limited() {
        let (mut joins, now) = (FailedJoins::default(), some_instant());
        let address = |n: usize| IpAddr::from(u32::try_from(n).unwrap().to_be_bytes());
        for n in 0..=ADDRESSES_MAX {
            for _ in 0..FAILURES_MAX {
                joins.failed(address(n), now + Duration::from_millis(n as u64));
            }
        }
        assert_eq!(joins.by_address.len(), ADDRESSES_MAX);
        assert_eq!(joins.delay(address(0), now), None, "the oldest is forgotten");
        assert!(joins.delay(address(ADDRESSES_MAX), now).is_some());
        joins.failed(address(0), now + 2 * WINDOW);
        assert_eq!(joins.by_address.len(), 1, "old windows are removed");
    }
}
