//! Connection limits: admission of client connections, and eviction of half-open ones.
//!
//! A connection without a complete request head costs its client a packet and the server a slot. So it is the first to
//! be evicted when all slots are in use, before any that has sent a request; and an address is limited in the number of
//! half-open connections and of all connections, so that it cannot take the slots of others. The limits target a single
//! attacker and are far above what a company behind one address opens; trusted proxies are exempt.
//!
//! The listener reports opening, closing and the first head of a connection. It does not report further requests, so
//! they cost nothing here.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};

/// Limits of connections for each source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Open at once.
    pub per_source: usize,
    /// Maximum half-open connections among them.
    pub half_open_per_source: usize,
}

/// Source of a connection: an IPv4 address, or the IPv6 network of 64 bits that one customer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source(IpAddr);

impl Source {
    /// Returns the source of a client's address.
    pub fn of(address: IpAddr) -> Source {
        Source(match address.to_canonical() {
            IpAddr::V4(address) => IpAddr::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
        })
    }
}

/// Identifier of a connection, in the order of opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// Decision about a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is admitted; `evicts`, which is half-open, is closed for it.
    Admitted {
        /// The new connection.
        id: ConnectionId,
        /// Evicted connection of the same source.
        evicts: Option<ConnectionId>,
    },
    /// Its source is at its limit.
    Rejected,
}

/// Open connections of all clients.
#[derive(Clone, Debug)]
pub struct ClientConnections {
    limits: Limits,
    next: u64,
    sources: BTreeMap<Source, SourceConnections>,
    /// Sources by their number of half-open connections, and by the age of the oldest of these.
    ranks: BTreeSet<EvictionRank>,
    half_open: usize,
}

/// Eviction order of sources: number of half-open connections, the oldest of them, and the source.
type EvictionRank = (usize, Reverse<ConnectionId>, Source);

/// Open connections of a source.
#[derive(Clone, Debug, Default)]
struct SourceConnections {
    connections: usize,
    half_open: BTreeSet<ConnectionId>,
}

impl SourceConnections {
    fn rank(&self, source: Source) -> Option<EvictionRank> {
        Some((self.half_open.len(), Reverse(*self.half_open.first()?), source))
    }
}

impl ClientConnections {
    /// Starts without connections.
    pub fn new(limits: Limits) -> ClientConnections {
        ClientConnections { limits, next: 0, sources: BTreeMap::new(), ranks: BTreeSet::new(), half_open: 0 }
    }

    /// Returns the number of half-open connections.
    pub fn half_open(&self) -> usize {
        self.half_open
    }

    /// Decides about a new connection. An `exempt` source has no limits.
    pub fn open(&mut self, source: Source, exempt: bool) -> Admission {
        let Limits { per_source, half_open_per_source } = self.limits;
        let open = self.sources.get(&source);
        let (connections, half_open) = open.map_or((0, 0), |open| (open.connections, open.half_open.len()));
        let full = !exempt && connections >= per_source;
        if full && half_open == 0 {
            return Admission::Rejected;
        }
        let evicts =
            if full || (!exempt && half_open >= half_open_per_source) { self.oldest(source) } else { None };
        let id = ConnectionId(self.next);
        self.next += 1;
        self.sources.entry(source).or_default().connections += 1;
        self.mark(source, id, true);
        Admission::Admitted { id, evicts }
    }

    /// Marks whether the head of a connection is incomplete.
    pub fn mark(&mut self, source: Source, id: ConnectionId, is_half_open: bool) {
        let Some(open) = self.sources.get_mut(&source) else { return };
        let before = (open.half_open.len(), open.rank(source));
        if is_half_open {
            open.half_open.insert(id);
        } else {
            open.half_open.remove(&id);
        }
        let after = (open.half_open.len(), open.rank(source));
        if before != after {
            self.half_open = self.half_open + after.0 - before.0;
            before.1.map(|rank| self.ranks.remove(&rank));
            self.ranks.extend(after.1);
        }
    }

    /// Removes a closed connection.
    pub fn close(&mut self, source: Source, id: ConnectionId) {
        self.mark(source, id, false);
        if let Some(open) = self.sources.get_mut(&source) {
            open.connections = open.connections.saturating_sub(1);
            if open.connections == 0 {
                self.sources.remove(&source);
            }
        }
    }

    /// Selects a connection to evict for the `newest` when all slots are in use: the oldest half-open connection of the
    /// source with the most of them. Each is returned once. `None` if no other connection is half-open.
    pub fn evict_half_open(&mut self, newest: ConnectionId) -> Option<ConnectionId> {
        let (.., source) = *self.ranks.iter().rev().find(|(_, Reverse(oldest), _)| *oldest != newest)?;
        self.oldest(source)
    }

    /// Takes the oldest half-open connection of a source, which no longer counts as half-open.
    fn oldest(&mut self, source: Source) -> Option<ConnectionId> {
        let id = *self.sources.get(&source)?.half_open.first()?;
        self.mark(source, id, false);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { per_source: 6, half_open_per_source: 3 };

    fn source(number: u8) -> Source {
        Source::of(IpAddr::from([10, 0, 0, number]))
    }

    fn admitted(connections: &mut ClientConnections, from: u8) -> (ConnectionId, Option<ConnectionId>) {
        match connections.open(source(from), false) {
            Admission::Admitted { id, evicts } => (id, evicts),
            Admission::Rejected => panic!("rejected from {from}"),
        }
    }

    #[test]
    fn a_source_loses_its_own_half_open_connections() {
        let mut connections = ClientConnections::new(LIMITS);
        let first: Vec<_> = (0..3).map(|_| admitted(&mut connections, 1)).collect();
        assert!(first.iter().all(|(_, evicts)| evicts.is_none()), "at the limit");
        let (fourth, evicts) = admitted(&mut connections, 1);
        assert_eq!(evicts, Some(first[0].0), "one past it, the oldest is evicted");
        assert_eq!(admitted(&mut connections, 2).1, None, "another source has its own");
        connections.close(source(1), first[0].0);
        for id in [first[1].0, first[2].0, fourth] {
            connections.mark(source(1), id, false);
        }
        for _ in 0..3 {
            let (id, evicts) = admitted(&mut connections, 1);
            assert_eq!(evicts, None);
            connections.mark(source(1), id, false);
        }
        assert_eq!(connections.open(source(1), false), Admission::Rejected, "six in use, and none to evict");
        assert!(matches!(connections.open(source(1), true), Admission::Admitted { evicts: None, .. }));
    }

    #[test]
    fn the_source_with_most_half_open_connections_loses_one() {
        let mut connections = ClientConnections::new(LIMITS);
        let (honest, _) = admitted(&mut connections, 1);
        let many: Vec<_> = (0..3).map(|_| admitted(&mut connections, 2).0).collect();
        assert_eq!(connections.half_open(), 4);
        let (newest, _) = admitted(&mut connections, 3);
        assert_eq!(connections.evict_half_open(newest), Some(many[0]));
        assert_eq!(connections.evict_half_open(newest), Some(many[1]));
        assert_eq!(connections.evict_half_open(newest), Some(honest), "the oldest among equals");
        assert_eq!(connections.evict_half_open(newest), Some(many[2]));
        assert_eq!(connections.evict_half_open(newest), None, "none is evicted for itself");
        connections.mark(source(1), honest, true);
        assert_eq!(connections.evict_half_open(newest), Some(honest), "it has begun another head");
    }

    #[test]
    fn a_customer_of_ipv6_is_one_source() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::2"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }

    proptest! {
        #[test]
        fn closed_connections_leave_no_state(steps in prop::collection::vec((0_u8..3, 0_u8..4), 0..200)) {
            let mut connections = ClientConnections::new(LIMITS);
            let mut open = Vec::new();
            for (from, action) in steps {
                match action {
                    0 | 1 => if let Admission::Admitted { id, .. } = connections.open(source(from), false) {
                        open.push((source(from), id));
                    },
                    2 => if let Some((source, id)) = open.first() {
                        connections.mark(*source, *id, false);
                    },
                    _ => { connections.evict_half_open(ConnectionId(0)); }
                }
                let half_open: usize = connections.sources.values().map(|open| open.half_open.len()).sum();
                prop_assert_eq!(connections.half_open(), half_open);
                let within = |open: &SourceConnections| open.half_open.len() <= LIMITS.half_open_per_source;
                prop_assert!(connections.sources.values().all(within));
            }
            for (source, id) in open {
                connections.close(source, id);
            }
            prop_assert!(connections.sources.is_empty() && connections.ranks.is_empty());
            prop_assert_eq!(connections.half_open(), 0);
        }
    }
}
