//! Memory of the gateway for connections that are kept and wait for their next request. Every client can keep some, so
//! that a large one is an attack at little cost.

use std::net::TcpStream;

use crate::neighbours::send_request;
use crate::processes::Processes;

/// Kept connections of one measurement.
const CONNECTIONS: usize = 1_000;
/// Number of measurements; the smallest one counts, because the allocator requests memory in steps of 4 MiB, which may be in another
/// one.
const MEASUREMENTS: usize = 3;
/// Connections that are opened and closed before, so that caches and the pages of the allocator are not counted.
const WARM_UP: usize = 200;
/// Maximum resident memory of a kept connection. It is 4.2 kB; when the task of a connection had space for a request, it was
/// 48 kB (two cores of a virtual Zen 5, 2026-11-24).
pub(crate) const BYTES_MAX: u64 = 8 << 10;

/// Opens the connections, each with a request, and returns the growth of the gateway's memory for each of them.
///
/// # Errors
///
/// A request that failed, also the second one of a kept connection.
pub(crate) fn bytes_per_connection(processes: &Processes) -> Result<u64, String> {
    drop(open(processes, WARM_UP)?);
    let (mut kept, mut smallest) = (Vec::new(), u64::MAX);
    for _ in 0..MEASUREMENTS {
        let before = processes.gateway_memory();
        kept.extend(open(processes, CONNECTIONS)?);
        smallest = smallest.min(processes.gateway_memory().saturating_sub(before));
    }
    for (number, connection) in kept.iter_mut().enumerate() {
        send_request(processes.address, connection)
            .map_err(|problem| format!("kept connection {number}: {problem}"))?;
    }
    Ok(smallest / CONNECTIONS as u64)
}

fn open(processes: &Processes, count: usize) -> Result<Vec<Option<TcpStream>>, String> {
    let opened = (0..count).map(|_| {
        let mut connection = None;
        send_request(processes.address, &mut connection).map(|()| connection)
    });
    opened.collect()
}
