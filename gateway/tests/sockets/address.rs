//! Addresses for those who have to be told where to listen.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below those that a kernel gives whoever asks for any (Linux: from 32768 on). Of these one that is free now can be the near
/// end of somebody's connection in a moment, and with all scenes in one process sometimes is.
const FIRST: u16 = 20_000;
const PORTS: u16 = 12_000;

/// An address on loopback that nobody has and nobody else is told.
pub(crate) fn free_address() -> SocketAddr {
    static GIVEN: AtomicU16 = AtomicU16::new(0);
    // Another process that does the same begins elsewhere.
    let begin = (std::process::id() % u32::from(PORTS)) as u16;
    loop {
        let port = FIRST + (begin + GIVEN.fetch_add(1, Ordering::Relaxed) % PORTS) % PORTS;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
