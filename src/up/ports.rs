//! Ports for a world's processes.
//!
//! They are reserved by binding them, all at once, and released just before their process starts: so no two processes
//! are given the same one, and a process that is restarted finds its port again.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;

/// Ports on loopback that are bound and not yet used.
#[derive(Default)]
pub(crate) struct Ports {
    held: BTreeMap<SocketAddr, TcpListener>,
    /// Those that were given in a row.
    ranges: Vec<RangeInclusive<u16>>,
}

/// Places at which a row of ports is looked for.
const RANGE_TRIES: usize = 100;

impl Ports {
    /// Reserves a port; 0 takes any that is free.
    pub(crate) fn reserve(&mut self, port: u16) -> io::Result<SocketAddr> {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = socket.local_addr()?;
        self.held.insert(address, socket);
        Ok(address)
    }

    /// So many ports in a row that nobody has now and that are given nobody else, for somebody who looks before each start.
    /// They are not held.
    pub(crate) fn range(&mut self, count: u16) -> io::Result<RangeInclusive<u16>> {
        let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        for _ in 0..RANGE_TRIES {
            let from = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
            let Some(to) = from.checked_add(count.saturating_sub(1)) else { continue };
            let given = self.ranges.iter().any(|range| *range.start() <= to && from <= *range.end());
            if !given && (from..=to).all(free) {
                self.ranges.push(from..=to);
                return Ok(from..=to);
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no {count} ports in a row are free")))
    }

    /// Takes the bound socket of a reserved port.
    pub(crate) fn take(&mut self, address: SocketAddr) -> Option<TcpListener> {
        self.held.remove(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_nobody_elses() {
        let mut ports = Ports::default();
        let first = ports.reserve(0).unwrap();
        assert!(ports.reserve(first.port()).is_err());
        assert!(ports.take(first).is_some());
        assert!(ports.reserve(first.port()).is_ok());
    }

    #[test]
    fn ports_in_a_row_are_given_once() {
        let mut ports = Ports::default();
        let (one, other) = (ports.range(8).unwrap(), ports.range(8).unwrap());
        assert_eq!((one.len(), other.len()), (8, 8));
        assert!(one.end() < other.start() || other.end() < one.start(), "{one:?} {other:?}");
        assert!(ports.range(u16::MAX).is_err());
    }
}
