//! Ports for the processes of a local fleet.
//!
//! All ports are reserved at once by binding them, and released just before their process starts, so that no two processes
//! get the same port, and a restarted process finds its port again: free ports are selected below those of outgoing connections.

use rand::Rng;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;

/// Reserved ports of one loopback address.
pub(crate) struct Ports {
    address: IpAddr,
    held: BTreeMap<SocketAddr, TcpListener>,
    /// Ranges that were assigned.
    ranges: Vec<RangeInclusive<u16>>,
}

/// Ports from which free ones are selected. Systems assign higher ones to outgoing connections (Linux from 32768, others from 49152), and
/// such a connection could take a released port before its process listens.
const SELECTED: RangeInclusive<u16> = 16_384..=32_767;
/// Attempts to find a free port, or a range of them.
const ATTEMPTS_MAX: usize = 100;

impl Ports {
    /// Creates the reservations of a loopback address.
    pub(crate) fn of(address: IpAddr) -> Ports {
        Ports { address, held: BTreeMap::new(), ranges: Vec::new() }
    }

    /// Reserves a port; 0 selects a free one.
    pub(crate) fn reserve(&mut self, port: u16) -> io::Result<SocketAddr> {
        let socket = if port == 0 { self.selected()? } else { TcpListener::bind((self.address, port))? };
        let address = socket.local_addr()?;
        self.held.insert(address, socket);
        Ok(address)
    }

    /// Binds a free port.
    fn selected(&self) -> io::Result<TcpListener> {
        let mut candidates = (0..ATTEMPTS_MAX).map(|_| rand::rng().random_range(SELECTED));
        match candidates.find_map(|port| TcpListener::bind((self.address, port)).ok()) {
            Some(socket) => Ok(socket),
            // Nearly all are in use, or the address cannot be bound, which the error says.
            None => TcpListener::bind((self.address, 0)),
        }
    }

    /// Assigns a range of `count` free ports, disjoint from all other ranges. The ports are not bound: their user must check
    /// each before use.
    pub(crate) fn range(&mut self, count: u16) -> io::Result<RangeInclusive<u16>> {
        let free = |port: u16| TcpListener::bind((self.address, port)).is_ok();
        for _ in 0..ATTEMPTS_MAX {
            let from = self.selected()?.local_addr()?.port();
            let Some(to) = from.checked_add(count.saturating_sub(1)) else { continue };
            let overlaps = self.ranges.iter().any(|range| *range.start() <= to && from <= *range.end());
            if !overlaps && (from..=to).all(free) {
                self.ranges.push(from..=to);
                return Ok(from..=to);
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no range of {count} free ports was found")))
    }

    /// Returns the bound socket of a reserved port and ends the reservation.
    pub(crate) fn take(&mut self, address: SocketAddr) -> Option<TcpListener> {
        self.held.remove(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn a_reserved_port_is_not_assigned_twice() {
        let mut ports = Ports::of(Ipv4Addr::LOCALHOST.into());
        let first = ports.reserve(0).unwrap();
        assert!(SELECTED.contains(&first.port()), "{first}");
        assert!(ports.reserve(first.port()).is_err());
        assert!(ports.take(first).is_some());
        assert!(ports.reserve(first.port()).is_ok());
    }

    #[test]
    fn ranges_of_ports_are_disjoint() {
        let mut ports = Ports::of(Ipv4Addr::LOCALHOST.into());
        let (one, other) = (ports.range(8).unwrap(), ports.range(8).unwrap());
        assert_eq!((one.len(), other.len()), (8, 8));
        assert!(one.end() < other.start() || other.end() < one.start(), "{one:?} {other:?}");
        assert!(ports.range(u16::MAX).is_err());
    }
}
