//! Cache of DNS answers.
//!
//! A name that is in use is resolved again when its answer expires, in the background, so that a request waits for DNS
//! only for the first connection to a name. While the DNS servers fail, the last answer stays in use, up to
//! [`STALE_MAX`] (RFC 8767): an outage of DNS must not become an outage of Meridian. The statement that a name has no
//! addresses is different: it is believed after [`NEGATIVE_ANSWERS`] answers in a row, since a server that has just
//! restarted with an empty zone makes it too.
//!
//! Addresses are offered in the order of RFC 8305 (families alternate, IPv6 first), rotated by a random number so that
//! connections spread over all of them, and those that recently failed or were slower than another come last: otherwise
//! each connection would wait for the same unreachable address.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backoff::Backoff;
use regions::HostName;

/// Minimum validity of an answer. Load balancers of clouds use 60 s, Kubernetes 5 or 30 s.
pub const TTL_MIN: Duration = Duration::from_secs(1);
/// Maximum validity of an answer, and so the longest time until a change is noticed.
pub const TTL_MAX: Duration = Duration::from_secs(300);
/// Maximum validity of the statement that a name has no addresses: it may be created any moment.
pub const NEGATIVE_TTL_MAX: Duration = Duration::from_secs(10);
/// Time for which an expired answer is used while the DNS servers fail: that of RFC 8767, section 5.
pub const STALE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Consecutive statements that a name has no addresses, before its last addresses are given up.
pub const NEGATIVE_ANSWERS: u32 = 2;
/// Time after which a name that is not used is forgotten.
pub const UNUSED_KEEP: Duration = Duration::from_secs(600);
/// Time for which an address that failed or was slow is offered after the others.
pub const DEMOTED_FOR: Duration = Duration::from_secs(30);
/// Maximum number of names: the hubs, 64 regions with three spokes, and the replicas of a region, with a reserve.
/// The name that has not been used for longest is forgotten for a new one.
pub const NAMES_MAX: usize = 1024;
/// Maximum number of addresses of one name that are used.
pub const ADDRESSES_MAX: usize = 16;
/// Delays of the next query after failed ones. Without jitter: names are queried when they are first used, at different
/// times.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(30) };

/// Answer of the DNS servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Addresses of the name.
    pub addresses: Vec<IpAddr>,
    /// Validity: the smallest of the records.
    pub ttl: Duration,
}

/// Reason why a query returned no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryFailure {
    /// The servers state that the name does not exist or has no usable address; with the validity of the statement.
    NoAddresses(Option<Duration>),
    /// No server answered in time, or all of them reported an error.
    Unavailable,
}

/// Knowledge about a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameLookup {
    /// Its addresses, in ascending order.
    Known(Arc<[IpAddr]>),
    /// No answer has arrived yet. The caller sends a query if `query`, or else waits for the one that was sent.
    Unknown {
        /// Whether the caller must send a query and call [`NameCache::ended`].
        query: bool,
    },
    /// The last query failed, and the next one is not due.
    Failed(QueryFailure),
}

/// Consequence of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameChange {
    /// None.
    None,
    /// The name has other addresses than before.
    Changed {
        /// Current addresses.
        addresses: Arc<[IpAddr]>,
    },
    /// The first of several failed queries.
    Failing {
        /// Reason.
        failure: QueryFailure,
        /// Number of addresses that stay in use.
        kept: usize,
    },
    /// The addresses of the last answer are not used any more: it is too old, or the name has no addresses now.
    GivenUp,
    /// A query succeeded after failures.
    Restored,
}

/// Queries to send now, and the time of the next ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueQueries {
    /// Names to resolve; [`NameCache::ended`] must be called for each.
    pub names: Vec<HostName>,
    /// Time of the next call.
    pub next: Option<Instant>,
}

/// Answers by name.
#[derive(Debug, Default)]
pub struct NameCache {
    entries: BTreeMap<HostName, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Addresses of the last answer, ascending; `None` before the first answer and after they were given up.
    addresses: Option<Arc<[IpAddr]>>,
    /// Time at which the last answer expired.
    expires: Instant,
    /// Reason why the last query failed.
    failure: Option<QueryFailure>,
    /// Consecutive failed queries.
    failures: u32,
    /// Consecutive statements that there are no addresses.
    negative: u32,
    is_queried: bool,
    next_query: Instant,
    used: Instant,
    /// Addresses that come last, with the end of that.
    demoted: BTreeMap<IpAddr, Instant>,
}

impl NameCache {
    /// Returns the number of names.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether no name is known.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the number of names whose last query failed.
    pub fn failing(&self) -> usize {
        self.entries.values().filter(|entry| entry.failures > 0).count()
    }

    /// Returns what is known about a name, which counts as used.
    pub fn lookup(&mut self, name: &HostName, now: Instant) -> NameLookup {
        if let Some(entry) = self.entries.get_mut(name) {
            entry.used = now;
            return match (&entry.addresses, entry.failure) {
                (Some(addresses), _) => NameLookup::Known(addresses.clone()),
                (None, Some(failure)) if now < entry.next_query => NameLookup::Failed(failure),
                (None, _) => NameLookup::Unknown { query: !std::mem::replace(&mut entry.is_queried, true) },
            };
        }
        if self.entries.len() >= NAMES_MAX {
            let unused =
                self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(name, _)| name.clone());
            unused.map(|name| self.entries.remove(&name));
        }
        let entry = Entry {
            addresses: None,
            expires: now,
            failure: None,
            failures: 0,
            negative: 0,
            is_queried: true,
            next_query: now,
            used: now,
            demoted: BTreeMap::new(),
        };
        self.entries.insert(name.clone(), entry);
        NameLookup::Unknown { query: true }
    }

    /// Returns whether a connection to this address of a name may be used for new requests.
    pub fn is_current(&self, name: &HostName, address: IpAddr) -> bool {
        let addresses = self.entries.get(name).and_then(|entry| entry.addresses.as_ref());
        addresses.is_some_and(|addresses| addresses.binary_search(&address).is_ok())
    }

    /// Returns the addresses of a name in the order in which connections to them are attempted. `draw` is random.
    pub fn candidates(&self, name: &HostName, draw: usize, now: Instant) -> Vec<IpAddr> {
        let Some(entry) = self.entries.get(name) else { return Vec::new() };
        let ordered = interleaved(entry.addresses.as_deref().unwrap_or_default(), draw);
        let is_demoted = |ip: &IpAddr| entry.demoted.get(ip).is_some_and(|until| now < *until);
        let (last, mut first): (Vec<_>, Vec<_>) = ordered.into_iter().partition(is_demoted);
        first.extend(last);
        first
    }

    /// Records that a connection to this address failed, or was slower than one that was attempted later.
    pub fn demote(&mut self, name: &HostName, address: IpAddr, now: Instant) {
        if let Some(entry) = self.entries.get_mut(name)
            && entry.addresses.as_ref().is_some_and(|addresses| addresses.contains(&address))
        {
            entry.demoted.insert(address, now + DEMOTED_FOR);
        }
    }

    /// Records that a connection to this address succeeded.
    pub fn promote(&mut self, name: &HostName, address: IpAddr) {
        if let Some(entry) = self.entries.get_mut(name) {
            entry.demoted.remove(&address);
        }
    }

    /// Returns the queries that are due, and forgets names that are not used.
    pub fn due(&mut self, now: Instant) -> DueQueries {
        let is_used = |entry: &Entry| now.saturating_duration_since(entry.used) < UNUSED_KEEP;
        self.entries.retain(|_, entry| entry.is_queried || is_used(entry));
        let mut names = Vec::new();
        for (name, entry) in self.entries.iter_mut().filter(|(_, entry)| !entry.is_queried) {
            // A name without addresses is resolved when it is used.
            if entry.addresses.is_some() && entry.next_query <= now {
                entry.is_queried = true;
                names.push(name.clone());
            }
        }
        let waiting = self.entries.values().filter(|entry| !entry.is_queried);
        let next = waiting.map(|entry| match entry.addresses {
            Some(_) => entry.next_query.min(entry.used + UNUSED_KEEP),
            None => entry.used + UNUSED_KEEP,
        });
        DueQueries { names, next: next.min() }
    }

    /// Records the end of a query.
    pub fn ended(
        &mut self,
        name: &HostName,
        result: Result<Answer, QueryFailure>,
        now: Instant,
    ) -> NameChange {
        let Some(entry) = self.entries.get_mut(name) else { return NameChange::None };
        entry.is_queried = false;
        let usable = result.and_then(|answer| {
            let addresses = usable(answer.addresses);
            let ttl = answer.ttl.clamp(TTL_MIN, TTL_MAX);
            if addresses.is_empty() {
                Err(QueryFailure::NoAddresses(Some(ttl)))
            } else {
                Ok((addresses, ttl))
            }
        });
        match usable {
            Ok((addresses, ttl)) => entry.answered(addresses, ttl, now),
            Err(failure) => entry.failed(failure, now),
        }
    }
}

impl Entry {
    fn answered(&mut self, addresses: Vec<IpAddr>, ttl: Duration, now: Instant) -> NameChange {
        let was_failing = std::mem::take(&mut self.failures) > 0;
        (self.failure, self.negative) = (None, 0);
        (self.expires, self.next_query) = (now + ttl, now + ttl);
        let before = self.addresses.replace(addresses.into());
        let addresses = self.addresses.clone().unwrap_or_default();
        self.demoted.retain(|address, until| now < *until && addresses.contains(address));
        match before {
            Some(before) if before != addresses => NameChange::Changed { addresses },
            _ if was_failing => NameChange::Restored,
            _ => NameChange::None,
        }
    }

    fn failed(&mut self, failure: QueryFailure, now: Instant) -> NameChange {
        self.failure = Some(failure);
        self.failures = self.failures.saturating_add(1);
        let delay = match failure {
            QueryFailure::NoAddresses(ttl) => {
                self.negative += 1;
                let is_confirmed = self.negative >= NEGATIVE_ANSWERS || self.addresses.is_none();
                let ttl = ttl.filter(|_| is_confirmed).unwrap_or(BACKOFF.first);
                ttl.clamp(TTL_MIN, NEGATIVE_TTL_MAX)
            }
            QueryFailure::Unavailable => {
                self.negative = 0;
                BACKOFF.delay(self.failures)
            }
        };
        self.next_query = now + delay;
        let is_too_old = now >= self.expires + STALE_MAX;
        if self.addresses.is_some() && (is_too_old || self.negative >= NEGATIVE_ANSWERS) {
            self.addresses = None;
            self.demoted.clear();
            return NameChange::GivenUp;
        }
        match self.failures {
            1 => NameChange::Failing { failure, kept: self.addresses.as_ref().map_or(0, |kept| kept.len()) },
            _ => NameChange::None,
        }
    }
}

/// Returns the addresses that a connection may be opened to, ascending. `0.0.0.0` would be a connection to this host.
fn usable(mut addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    addresses.retain(|address| match address {
        IpAddr::V4(ip) => !ip.is_unspecified() && !ip.is_multicast() && !ip.is_broadcast(),
        // A link-local address is valid only with a zone, which DNS cannot state.
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_multicast() && !ip.is_unicast_link_local(),
    });
    addresses.sort_unstable();
    addresses.dedup();
    addresses.truncate(ADDRESSES_MAX);
    addresses
}

/// Alternates the families, beginning with IPv6 (RFC 8305, section 4); each is rotated by `draw`.
fn interleaved(addresses: &[IpAddr], draw: usize) -> Vec<IpAddr> {
    let (mut six, mut four): (Vec<IpAddr>, Vec<IpAddr>) = addresses.iter().partition(|ip| ip.is_ipv6());
    for family in [&mut six, &mut four] {
        let by = draw.checked_rem(family.len()).unwrap_or_default();
        family.rotate_left(by);
    }
    let mut ordered = Vec::with_capacity(addresses.len());
    for at in 0..six.len().max(four.len()) {
        ordered.extend(six.get(at));
        ordered.extend(four.get(at));
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn name(text: &str) -> HostName {
        text.parse().unwrap()
    }

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn answer(texts: &[&str], ttl: u64) -> Result<Answer, QueryFailure> {
        Ok(Answer { addresses: ips(texts), ttl: SECOND * ttl as u32 })
    }

    const FAILED: Result<Answer, QueryFailure> = Err(QueryFailure::Unavailable);
    const NO_ADDRESSES: Result<Answer, QueryFailure> = Err(QueryFailure::NoAddresses(None));

    /// Returns a cache that has received this answer.
    fn known(texts: &[&str], ttl: u64, now: Instant) -> (NameCache, HostName) {
        let (mut cache, name) = (NameCache::default(), name("a.example"));
        assert_eq!(cache.lookup(&name, now), NameLookup::Unknown { query: true });
        assert_eq!(cache.ended(&name, answer(texts, ttl), now), NameChange::None);
        (cache, name)
    }

    fn addresses(cache: &mut NameCache, name: &HostName, now: Instant) -> Vec<IpAddr> {
        match cache.lookup(name, now) {
            NameLookup::Known(addresses) => addresses.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_query_is_sent_for_many_callers() {
        let (mut cache, name, now) = (NameCache::default(), name("a.example"), some_instant());
        assert_eq!(cache.lookup(&name, now), NameLookup::Unknown { query: true });
        assert_eq!(cache.lookup(&name, now), NameLookup::Unknown { query: false });
        assert_eq!(cache.due(now + SECOND), DueQueries { names: Vec::new(), next: None });
        cache.ended(&name, answer(&["10.0.0.1"], 60), now);
        assert_eq!(addresses(&mut cache, &name, now), ips(&["10.0.0.1"]));
    }

    #[test]
    fn an_answer_is_refreshed_when_it_expires_within_the_bounds_of_its_validity() {
        for (ttl, after) in [(0, 1), (1, 1), (60, 60), (300, 300), (86_400, 300)] {
            let now = some_instant();
            let (mut cache, name) = known(&["10.0.0.1"], ttl, now);
            let due = now + SECOND * after;
            assert_eq!(cache.due(now), DueQueries { names: Vec::new(), next: Some(due) }, "{ttl}");
            assert_eq!(cache.due(due).names, std::slice::from_ref(&name), "{ttl}");
            assert!(cache.due(due).names.is_empty(), "the query is on its way");
            assert_eq!(addresses(&mut cache, &name, due), ips(&["10.0.0.1"]), "the answer is used meanwhile");
        }
    }

    #[test]
    fn changed_addresses_replace_the_former_ones() {
        let now = some_instant();
        let (mut cache, name) = known(&["10.0.0.1", "10.0.0.2"], 1, now);
        assert_eq!(cache.ended(&name, answer(&["10.0.0.2", "10.0.0.1"], 1), now), NameChange::None);
        let changed = cache.ended(&name, answer(&["10.0.0.3", "10.0.0.2"], 1), now);
        assert_eq!(changed, NameChange::Changed { addresses: ips(&["10.0.0.2", "10.0.0.3"]).into() });
        let is_current = |ip: &str| cache.is_current(&name, ip.parse().unwrap());
        assert_eq!(["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(is_current), [false, true, true]);
    }

    #[test]
    fn the_last_answer_is_used_while_the_servers_fail_up_to_its_limit() {
        let now = some_instant();
        let (mut cache, name) = known(&["10.0.0.1"], 60, now);
        let failing = NameChange::Failing { failure: QueryFailure::Unavailable, kept: 1 };
        assert_eq!(cache.ended(&name, FAILED, now + SECOND * 60), failing);
        let mut delays = Vec::new();
        let mut at = now + SECOND * 60;
        for _ in 0..7 {
            let next = cache.due(at).next.unwrap();
            delays.push((next - at).as_secs());
            at = next;
            assert_eq!(cache.due(at).names, std::slice::from_ref(&name));
            assert_eq!(cache.ended(&name, FAILED, at), NameChange::None, "logged once");
            addresses(&mut cache, &name, at);
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 30, 30]);
        let limit = now + SECOND * 60 + STALE_MAX;
        assert_eq!(cache.ended(&name, FAILED, limit - SECOND), NameChange::None);
        assert_eq!(cache.ended(&name, FAILED, limit), NameChange::GivenUp);
        assert_eq!(cache.lookup(&name, limit), NameLookup::Failed(QueryFailure::Unavailable));
        assert_eq!(cache.ended(&name, answer(&["10.0.0.1"], 60), limit), NameChange::Restored);
    }

    #[test]
    fn a_name_without_addresses_is_believed_at_the_second_answer() {
        let now = some_instant();
        let (mut cache, name) = known(&["10.0.0.1"], 60, now);
        let failing = NameChange::Failing { failure: QueryFailure::NoAddresses(None), kept: 1 };
        assert_eq!(cache.ended(&name, NO_ADDRESSES, now), failing);
        assert_eq!(addresses(&mut cache, &name, now), ips(&["10.0.0.1"]));
        assert_eq!(cache.due(now).next, Some(now + SECOND), "the next query follows soon");
        assert_eq!(cache.ended(&name, FAILED, now), NameChange::None);
        assert_eq!(cache.ended(&name, NO_ADDRESSES, now), NameChange::None, "not in a row");
        assert_eq!(cache.ended(&name, NO_ADDRESSES, now), NameChange::GivenUp);
        assert_eq!(cache.lookup(&name, now), NameLookup::Failed(QueryFailure::NoAddresses(None)));
        assert!(!cache.is_current(&name, "10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn a_negative_answer_is_valid_for_a_short_time() {
        for (ttl, valid) in [(None, 1), (Some(0), 1), (Some(5), 5), (Some(3600), 10)] {
            let (mut cache, name, now) = (NameCache::default(), name("none.example"), some_instant());
            cache.lookup(&name, now);
            let failure = QueryFailure::NoAddresses(ttl.map(|ttl| SECOND * ttl));
            cache.ended(&name, Err(failure), now);
            let end = now + SECOND * valid;
            assert_eq!(cache.lookup(&name, end - SECOND / 2), NameLookup::Failed(failure), "{ttl:?}");
            assert_eq!(cache.lookup(&name, end), NameLookup::Unknown { query: true }, "{ttl:?}");
        }
    }

    #[test]
    fn addresses_that_nothing_may_connect_to_are_no_addresses() {
        let (mut cache, name, now) = (NameCache::default(), name("rebound.example"), some_instant());
        cache.lookup(&name, now);
        let forged = ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "fe80::1", "255.255.255.255"];
        let change = cache.ended(&name, answer(&forged, 60), now);
        let failure = QueryFailure::NoAddresses(Some(SECOND * 60));
        assert_eq!(change, NameChange::Failing { failure, kept: 0 });
    }

    #[test]
    fn names_and_addresses_are_limited() {
        let now = some_instant();
        let many: Vec<String> = (0..=ADDRESSES_MAX).map(|n| format!("10.0.0.{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let (mut cache, oldest) = known(&many, 60, now);
        assert_eq!(addresses(&mut cache, &oldest, now).len(), ADDRESSES_MAX);
        for n in 1..NAMES_MAX as u64 {
            cache.lookup(&name(&format!("n{n}.example")), now + SECOND);
        }
        assert_eq!(cache.len(), NAMES_MAX);
        assert!(cache.is_current(&oldest, ips(&["10.0.0.1"])[0]), "at the limit");
        cache.lookup(&name("one-more.example"), now + SECOND);
        assert_eq!(cache.len(), NAMES_MAX);
        assert!(!cache.is_current(&oldest, ips(&["10.0.0.1"])[0]), "one past it");
    }

    #[test]
    fn a_name_that_is_not_used_is_forgotten() {
        let now = some_instant();
        let (mut cache, name) = known(&["10.0.0.1"], 300, now);
        addresses(&mut cache, &name, now + SECOND * 10);
        let end = now + SECOND * 10 + UNUSED_KEEP;
        assert_eq!(cache.due(now + SECOND * 300).names, std::slice::from_ref(&name));
        cache.ended(&name, answer(&["10.0.0.1"], 300), now + SECOND * 300);
        assert_eq!(cache.due(end - SECOND), DueQueries { names: vec![name.clone()], next: None });
        cache.ended(&name, answer(&["10.0.0.1"], 300), end - SECOND);
        assert_eq!(cache.due(end), DueQueries { names: Vec::new(), next: None });
        assert!(cache.is_empty());
    }

    #[test]
    fn families_alternate_and_connections_spread_over_all_addresses() {
        let now = some_instant();
        let (cache, name) =
            known(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "2001:db8::1", "2001:db8::2"], 60, now);
        let expected = [
            ["2001:db8::1", "10.0.0.1", "2001:db8::2", "10.0.0.2", "10.0.0.3"],
            ["2001:db8::2", "10.0.0.2", "2001:db8::1", "10.0.0.3", "10.0.0.1"],
        ];
        for (draw, expected) in expected.iter().enumerate() {
            assert_eq!(cache.candidates(&name, draw, now), ips(expected));
        }
    }

    #[test]
    fn an_address_that_failed_comes_last_for_a_time() {
        let now = some_instant();
        let (mut cache, name) = known(&["10.0.0.1", "2001:db8::1"], 60, now);
        let (six, four) = (ips(&["2001:db8::1"])[0], ips(&["10.0.0.1"])[0]);
        cache.demote(&name, six, now);
        cache.demote(&name, ips(&["10.9.9.9"])[0], now);
        assert_eq!(cache.candidates(&name, 0, now), [four, six]);
        assert_eq!(cache.candidates(&name, 0, now + DEMOTED_FOR), [six, four]);
        cache.promote(&name, six);
        assert_eq!(cache.candidates(&name, 0, now), [six, four]);
    }

    proptest! {
        #[test]
        fn every_address_is_a_candidate_once(octets in proptest::collection::btree_set(0_u8..200, 0..12), draw: usize) {
            let texts: Vec<String> = octets.iter().map(|n| match n % 2 {
                0 => format!("10.0.0.{n}"),
                _ => format!("2001:db8::{n:x}"),
            }).collect();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let mut found = interleaved(&ips(&texts), draw);
            found.sort_unstable();
            let mut all = ips(&texts);
            all.sort_unstable();
            prop_assert_eq!(found, all);
        }
    }
}
