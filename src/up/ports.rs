//! Ports for a world's processes.
//!
//! They are reserved by binding them, all at once, and released just before their process starts: so no two processes
//! are given the same one, and a process that is restarted finds its port again.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

/// Ports on loopback that are bound and not yet used.
#[derive(Default)]
pub(crate) struct Ports {
    held: BTreeMap<SocketAddr, TcpListener>,
}

impl Ports {
    /// Reserves a port; 0 takes any that is free.
    pub(crate) fn reserve(&mut self, port: u16) -> io::Result<SocketAddr> {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = socket.local_addr()?;
        self.held.insert(address, socket);
        Ok(address)
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
}
