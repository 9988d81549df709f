//! Free addresses for processes that must be configured with a port.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// First port, below the ephemeral range of the kernel (Linux: from 32768 on). A free port in that range can become the
/// local end of a connection at any moment, and with all fixtures in one process sometimes does.
const FIRST: u16 = 20_000;
const PORTS: u16 = 12_000;

/// Returns a loopback address that is free and returned to no other caller.
pub(crate) fn free_address() -> SocketAddr {
    static GIVEN: AtomicU16 = AtomicU16::new(0);
    // Another process that does the same starts at another port.
    let begin = (std::process::id() % u32::from(PORTS)) as u16;
    loop {
        let port = FIRST + (begin + GIVEN.fetch_add(1, Ordering::Relaxed) % PORTS) % PORTS;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
