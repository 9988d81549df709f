//! Polls of the trusted state, at every hub at the same time.
//!
//! A revocation reaches a process within 2 s while any hub is reachable, and up to one of these seconds passes until a
//! process reads its changed files. A hub that is frozen (accepts connections and never responds) or that is cut off
//! from the store keeps a poll open, and so does a hub without news. A timeout that separates them within the other
//! second would need a request per process and second. A poll at every hub of the list needs no timeout: the first hub
//! with a newer state suffices. It costs one connection per hub, and a request in [`WAIT`].
//!
//! A name may be that of several hubs, so each address to which it resolves is polled: otherwise the connection may be
//! one to the frozen hub. They are resolved again in [`RESOLVE_PERIOD`]. A DNS server may return other addresses of a
//! name each time, so one that is missing in an answer is polled for another [`UNLISTED_KEEP`]: its open poll, its delay
//! after failures and its part in [`PollChange::AllFailed`] continue. A failed lookup changes nothing: the addresses of
//! the one before are polled. A name is polled itself only until its first lookup that succeeds. Hubs behind one address
//! of a load balancer cannot be distinguished, and count as one.
//!
//! A failed poll is repeated within [`BACKOFF`], however long the hub was down: a hub that is back counts as reachable.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use backoff::Backoff;

/// Time for which a hub holds a poll.
pub const WAIT: Duration = Duration::from_secs(20);
/// Additional time for the response.
pub const GRACE: Duration = Duration::from_secs(5);
/// Delay after a failure. With its maximum, a hub is polled within 1.5 s after it is back.
pub const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_millis(1500) };
/// Delay after a rejection, such as that of a revoked certificate, which has a cause that does not pass by itself.
pub const REJECTED_BACKOFF: Backoff = Backoff { first: Duration::from_secs(5), max: Duration::from_secs(60) };
/// Minimum time between the beginnings of two polls of one hub, so that a hub that responds at once, as one that stops
/// does, is not called in a loop.
pub const PERIOD_MIN: Duration = Duration::from_millis(100);

/// Interval at which the names of hubs are looked up in the resolver's cache, which observes their TTL.
pub const RESOLVE_PERIOD: Duration = Duration::from_secs(5);

/// Time for which an address is polled after the last lookup that had it: five times the usual TTL of 60 s.
pub const UNLISTED_KEEP: Duration = Duration::from_secs(300);
/// Maximum number of polled addresses that the last lookup did not have, so that a DNS server with ever new addresses
/// causes no more polls; those that were seen last stay.
pub const UNLISTED_MAX: usize = 16;

/// Cause of a failed poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollFailure {
    /// No connection, or no valid response in time.
    Unreachable,
    /// The hub rejected the request or the certificate, or is not a hub of this fleet.
    Rejected,
}

/// Next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PollStep {
    /// Start a poll of the hub at this address, and call [`TrustPolls::ended`] when it has ended.
    Start(String),
    /// Wait until a poll has ended, or until this time.
    Wait(Option<Instant>),
}

/// Consequence of an ended poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollChange {
    /// None.
    None,
    /// The first failure of this hub. Another one is polled.
    HubFailed,
    /// Every hub has failed.
    AllFailed,
    /// A hub responded after every hub had failed.
    Restored,
}

/// Polls of the hubs of one process, by their addresses.
#[derive(Debug, Default)]
pub struct TrustPolls {
    hubs: BTreeMap<String, HubPoll>,
    /// Addresses of each configured one in its last lookup that succeeded.
    resolved: BTreeMap<String, BTreeSet<String>>,
    /// Whether every hub has failed since the last response.
    is_unreachable: bool,
}

#[derive(Debug)]
struct HubPoll {
    /// Time of the last lookup that had the address.
    listed: Instant,
    /// Beginning of the poll in progress.
    started: Option<Instant>,
    /// Time of the next poll.
    due: Instant,
    /// Consecutive failures.
    failures: u32,
    /// Those of them that were rejections.
    rejections: u32,
}

impl TrustPolls {
    /// Records the lookups of all configured addresses; the result of one that failed is empty.
    pub fn set_lookups(&mut self, lookups: BTreeMap<String, BTreeSet<String>>, now: Instant) {
        let mut addresses = BTreeSet::new();
        for (configured, found) in lookups {
            if !found.is_empty() {
                if !found.contains(&configured) {
                    self.hubs.remove(&configured);
                }
                self.resolved.insert(configured.clone(), found);
            }
            match self.resolved.get(&configured) {
                Some(found) => addresses.extend(found.iter().cloned()),
                // Its poll fails with the cause.
                None => _ = addresses.insert(configured),
            }
        }
        self.set_addresses(&addresses, now);
    }

    /// Records the addresses of all lookups. The polls of new ones are due; those of others continue, until an address was
    /// in no lookup for [`UNLISTED_KEEP`] or is one of more than [`UNLISTED_MAX`].
    fn set_addresses(&mut self, addresses: &BTreeSet<String>, now: Instant) {
        for address in addresses {
            let due = || HubPoll { listed: now, started: None, due: now, failures: 0, rejections: 0 };
            self.hubs.entry(address.clone()).or_insert_with(due).listed = now;
        }
        self.hubs.retain(|_, hub| now.saturating_duration_since(hub.listed) <= UNLISTED_KEEP);
        let unlisted = self.hubs.iter().filter(|(address, _)| !addresses.contains(*address));
        let mut unlisted: Vec<_> = unlisted.map(|(address, hub)| (hub.listed, address.clone())).collect();
        unlisted.sort_unstable();
        let surplus = unlisted.len().saturating_sub(UNLISTED_MAX);
        for (_, address) in &unlisted[..surplus] {
            self.hubs.remove(address);
        }
    }

    /// Returns whether the hub at this address is polled.
    pub fn has(&self, address: &str) -> bool {
        self.hubs.contains_key(address)
    }

    /// Returns the next action.
    pub fn step(&mut self, now: Instant) -> PollStep {
        let mut idle = self.hubs.iter_mut().filter(|(_, hub)| hub.started.is_none());
        if let Some((address, hub)) = idle.find(|(_, hub)| hub.due <= now) {
            hub.started = Some(now);
            return PollStep::Start(address.clone());
        }
        let idle = self.hubs.values().filter(|hub| hub.started.is_none());
        PollStep::Wait(idle.map(|hub| hub.due).min())
    }

    /// Records the end of a poll. `chance` (0 to 1) is the jitter of the delay after a failure.
    pub fn ended(
        &mut self,
        address: &str,
        result: Result<(), PollFailure>,
        now: Instant,
        chance: f64,
    ) -> PollChange {
        let Some(hub) = self.hubs.get_mut(address) else { return PollChange::None };
        let started = hub.started.take().unwrap_or(now);
        let Err(failure) = result else {
            (hub.failures, hub.rejections) = (0, 0);
            hub.due = now.max(started + PERIOD_MIN);
            let was_unreachable = std::mem::take(&mut self.is_unreachable);
            return if was_unreachable { PollChange::Restored } else { PollChange::None };
        };
        hub.failures = hub.failures.saturating_add(1);
        hub.due = now
            + match failure {
                PollFailure::Unreachable => BACKOFF.equal_jitter(hub.failures, chance),
                PollFailure::Rejected => {
                    hub.rejections = hub.rejections.saturating_add(1);
                    REJECTED_BACKOFF.equal_jitter(hub.rejections, chance)
                }
            };
        let is_first = hub.failures == 1;
        if self.is_unreachable {
            PollChange::None
        } else if self.hubs.values().all(|hub| hub.failures > 0) {
            self.is_unreachable = true;
            PollChange::AllFailed
        } else if is_first {
            PollChange::HubFailed
        } else {
            PollChange::None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    fn polls_of<const N: usize>(addresses: [&str; N], now: Instant) -> TrustPolls {
        let mut polls = TrustPolls::default();
        polls.set_addresses(&set(addresses), now);
        polls
    }

    fn set<const N: usize>(addresses: [&str; N]) -> BTreeSet<String> {
        addresses.map(str::to_owned).into()
    }

    fn start(address: &str) -> PollStep {
        PollStep::Start(address.to_owned())
    }

    #[test]
    fn addresses_that_stay_continue_and_new_ones_are_polled_at_once() {
        let now = some_instant();
        let mut polls = polls_of(["a", "b"], now);
        assert_eq!([polls.step(now), polls.step(now)], [start("a"), start("b")]);
        let later = now + UNLISTED_KEEP;
        polls.set_addresses(&set(["b"]), later);
        let now = later + RESOLVE_PERIOD;
        polls.set_addresses(&set(["b", "c"]), now);
        assert_eq!([polls.step(now), polls.step(now)], [start("c"), PollStep::Wait(None)]);
        assert_eq!(polls.ended("a", Err(PollFailure::Unreachable), now, 0.0), PollChange::None, "it is gone");
        let failed = Err(PollFailure::Unreachable);
        assert_eq!(polls.ended("b", failed, now, 0.0), PollChange::HubFailed);
        assert_eq!(polls.ended("c", failed, now, 0.0), PollChange::AllFailed);
        polls.set_addresses(&set(["d"]), now);
        assert_eq!(polls.step(now), start("d"));
        assert_eq!(polls.ended("d", Ok(()), now, 0.0), PollChange::Restored, "by another hub than those");
    }

    #[test]
    fn answers_of_dns_that_rotate_keep_the_state_of_each_address() {
        let mut now = some_instant();
        let addresses = ["a", "b", "c"];
        let mut polls = TrustPolls::default();
        let mut polled = std::collections::BTreeMap::<String, u32>::new();
        // Two of three hubs in each answer. The poll of `a` stays open, `b` rejects, and `c` is unreachable.
        for lookup in 0..60 {
            let answer = [addresses[lookup % 3], addresses[(lookup + 1) % 3]];
            polls.set_addresses(&set(answer), now);
            let next = now + RESOLVE_PERIOD;
            loop {
                match polls.step(now) {
                    PollStep::Start(address) => {
                        *polled.entry(address.clone()).or_default() += 1;
                        let failure = match address.as_str() {
                            "a" => continue,
                            "b" => PollFailure::Rejected,
                            _ => PollFailure::Unreachable,
                        };
                        let change = polls.ended(&address, Err(failure), now, 1.0);
                        assert_eq!(
                            change == PollChange::HubFailed,
                            polled[&address] == 1,
                            "{address} {now:?}"
                        );
                    }
                    PollStep::Wait(due) => match due.filter(|due| *due < next) {
                        Some(due) => now = due,
                        None => break,
                    },
                }
            }
            now = next;
        }
        assert_eq!(polled["a"], 1, "its poll is open");
        // Five minutes with a delay of 5 s, 10 s, … 60 s.
        assert!((5..=10).contains(&polled["b"]), "{polled:?}");
        // From the second lookup on.
        let least = 59 * RESOLVE_PERIOD.as_millis() / BACKOFF.max.as_millis();
        assert!(u128::from(polled["c"]) >= least, "it is polled while no answer has it: {polled:?}");
        assert_eq!(polls.ended("a", Err(PollFailure::Unreachable), now, 0.0), PollChange::AllFailed);
        assert_eq!(polls.ended("c", Ok(()), now, 0.0), PollChange::Restored);
    }

    #[test]
    fn an_address_that_is_in_no_answer_is_polled_for_a_limited_time_and_few_of_them_are() {
        let now = some_instant();
        let mut polls = polls_of(["a"], now);
        polls.set_addresses(&set([]), now + UNLISTED_KEEP);
        assert!(polls.has("a"));
        polls.set_addresses(&set([]), now + UNLISTED_KEEP + Duration::from_millis(1));
        assert!(!polls.has("a"));
        // One new address in each answer.
        for number in 0..=UNLISTED_MAX {
            polls.set_addresses(
                &BTreeSet::from([format!("{number:02}")]),
                now + number as u32 * RESOLVE_PERIOD,
            );
        }
        assert!(polls.has("00"), "at the limit");
        let one_more = now + UNLISTED_MAX as u32 * RESOLVE_PERIOD + RESOLVE_PERIOD;
        polls.set_addresses(&BTreeSet::from(["next".to_owned()]), one_more);
        assert!(
            !polls.has("00") && polls.has("01") && polls.has("next"),
            "past the limit the oldest is gone"
        );
    }

    #[test]
    fn a_failed_lookup_keeps_the_polls_of_the_one_before_and_adds_none() {
        let now = some_instant();
        let lookup = |found: &[&str]| {
            let found = found.iter().map(|address| (*address).to_owned()).collect();
            BTreeMap::from([("hub:1".to_owned(), found), ("10.0.0.9:1".to_owned(), set(["10.0.0.9:1"]))])
        };
        let mut polls = TrustPolls::default();
        polls.set_lookups(lookup(&[]), now);
        assert_eq!([polls.step(now), polls.step(now)], [start("10.0.0.9:1"), start("hub:1")]);
        polls.set_lookups(lookup(&["10.0.0.1:1", "10.0.0.2:1"]), now);
        assert_eq!([polls.step(now), polls.step(now)], [start("10.0.0.1:1"), start("10.0.0.2:1")]);
        assert!(!polls.has("hub:1"), "its addresses are known");
        for lookups in 1..=3 {
            let now = now + lookups * UNLISTED_KEEP;
            polls.set_lookups(lookup(&[]), now);
            assert_eq!(polls.step(now), PollStep::Wait(None), "no poll is added");
            assert!(polls.has("10.0.0.1:1") && polls.has("10.0.0.2:1"));
        }
    }

    #[test]
    fn every_hub_is_polled_while_one_of_them_never_responds() {
        let now = some_instant();
        let mut polls = polls_of(["0", "1"], now);
        assert_eq!([polls.step(now), polls.step(now)], [start("0"), start("1")]);
        assert_eq!(polls.step(now), PollStep::Wait(None));
        let mut later = now;
        for _ in 0..5 {
            later += WAIT;
            assert_eq!(polls.ended("1", Ok(()), later, 0.5), PollChange::None);
            assert_eq!(polls.step(later), start("1"), "the first poll is still open");
        }
        assert_eq!(polls.ended("0", Err(PollFailure::Unreachable), later, 0.5), PollChange::HubFailed);
        assert_eq!(polls.ended("0", Ok(()), later, 0.5), PollChange::None, "another hub has responded");
    }

    #[test]
    fn a_hub_that_is_back_is_polled_within_the_longest_delay_however_long_it_was_down() {
        let mut now = some_instant();
        let mut polls = polls_of(["0"], now);
        for failures in 0..100 {
            assert_eq!(polls.step(now), start("0"));
            let change = polls.ended("0", Err(PollFailure::Unreachable), now, 1.0);
            assert_eq!(change, if failures == 0 { PollChange::AllFailed } else { PollChange::None });
            let PollStep::Wait(Some(due)) = polls.step(now) else {
                panic!("a failed poll is not repeated at once")
            };
            assert!(due - now <= BACKOFF.max, "{:?}", due - now);
            now = due;
        }
        assert_eq!(polls.step(now), start("0"));
        assert_eq!(polls.ended("0", Ok(()), now, 1.0), PollChange::Restored);
    }

    #[test]
    fn a_rejection_is_repeated_less_often_and_a_hub_that_responds_at_once_is_not_called_in_a_loop() {
        let now = some_instant();
        let mut polls = polls_of(["0"], now);
        polls.step(now);
        polls.ended("0", Err(PollFailure::Rejected), now, 1.0);
        assert_eq!(polls.step(now), PollStep::Wait(Some(now + REJECTED_BACKOFF.first)));
        let later = now + REJECTED_BACKOFF.first;
        assert_eq!(polls.step(later), start("0"));
        polls.ended("0", Ok(()), later, 1.0);
        assert_eq!(polls.step(later), PollStep::Wait(Some(later + PERIOD_MIN)));
    }

    #[test]
    fn only_the_failure_of_every_hub_is_that_of_the_authority() {
        let now = some_instant();
        let mut polls = polls_of(["0", "1"], now);
        for _ in 0..2 {
            polls.step(now);
        }
        let failed = Err(PollFailure::Unreachable);
        assert_eq!(polls.ended("0", failed, now, 0.0), PollChange::HubFailed);
        assert_eq!(polls.ended("1", failed, now, 0.0), PollChange::AllFailed);
        let later = now + BACKOFF.max;
        for _ in 0..2 {
            polls.step(later);
        }
        assert_eq!(polls.ended("1", failed, later, 0.0), PollChange::None);
        assert_eq!(polls.ended("0", Ok(()), later, 0.0), PollChange::Restored);
        assert_eq!(polls_of([], now).step(now), PollStep::Wait(None));
    }
}
