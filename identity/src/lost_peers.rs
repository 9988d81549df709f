//! Detection of peers whose machine or network has failed: their connections stay open without an end, and only the
//! kernel can tell them from quiet ones.
//!
//! The HTTP server of a replica and of a hub has no idle timeout, and none could tell a lost peer from a long poll or a
//! long computation. So the kernel probes an idle connection (keepalive, RFC 9293, 3.8.4), and limits the time for which
//! sent data is unacknowledged, which is about 15 minutes by default (`tcp_retries2`).
//!
//! The limit (`TCP_USER_TIMEOUT`) also ends a connection whose peer is alive and does not read: Linux counts the time
//! for which the receive window has less space than the next segment, although the peer acknowledges each probe of it
//! (`tcp_probe_timer`). So a response to such a peer is truncated after [`LOST_AFTER`]. Without the limit it would occupy
//! a connection and the memory of the response without an end. A peer that reads slowly, and opens its window meanwhile,
//! is not affected.

use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_user_timeout,
};
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Time without a packet of the peer before the first probe: longer than a long poll is held, so that most connections
/// need none.
const PROBE_AFTER: Duration = Duration::from_secs(30);
/// Interval of probes.
const PROBE_PERIOD: Duration = Duration::from_secs(10);
/// Probes without a response after which the connection ends.
const PROBES: u32 = 6;
/// Time after which a connection to a lost peer has ended, whether it was idle or data was sent. It is longer than the
/// minute for which a spoke waits for a gateway that does not read (a test of the spoke compares them): the spoke, which
/// stops reading the response of the replica meanwhile, ends it first, and counts and logs the cause.
pub const LOST_AFTER: Duration = PROBE_AFTER.saturating_add(PROBE_PERIOD.saturating_mul(PROBES));

/// Makes the kernel end a connection whose peer has not responded for [`LOST_AFTER`].
///
/// # Errors
///
/// When the kernel rejects an option, as for a socket that is not a TCP one.
pub(crate) fn end_when_lost(socket: &impl AsFd) -> io::Result<()> {
    set_tcp_keepidle(socket, PROBE_AFTER)?;
    set_tcp_keepintvl(socket, PROBE_PERIOD)?;
    set_tcp_keepcnt(socket, PROBES)?;
    limit_unacknowledged(socket, LOST_AFTER)?;
    set_socket_keepalive(socket, true)?;
    Ok(())
}

/// Limits the time for which sent data is unacknowledged, or for which the peer does not read.
fn limit_unacknowledged(socket: &impl AsFd, limit: Duration) -> io::Result<()> {
    let millis = u32::try_from(limit.as_millis()).map_err(io::Error::other)?;
    Ok(set_tcp_user_timeout(socket, millis)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{
        socket_keepalive, tcp_keepcnt, tcp_keepidle, tcp_keepintvl, tcp_user_timeout,
    };
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    /// Returns both ends of a connection.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (socket, listener.accept().unwrap().0)
    }

    #[test]
    fn an_idle_and_a_sending_connection_end_90_seconds_after_the_peer_is_lost() {
        let (socket, _peer) = connection();
        end_when_lost(&socket).unwrap();
        assert_eq!(LOST_AFTER, Duration::from_secs(90));
        assert!(socket_keepalive(&socket).unwrap());
        assert_eq!(tcp_keepidle(&socket).unwrap(), PROBE_AFTER);
        assert_eq!(tcp_keepintvl(&socket).unwrap(), PROBE_PERIOD);
        assert_eq!(tcp_keepcnt(&socket).unwrap(), PROBES);
        assert_eq!(tcp_user_timeout(&socket).unwrap(), 90_000);
    }

    /// A peer on this machine, whose kernel acknowledges every probe of its window.
    #[test]
    fn a_connection_also_ends_if_its_peer_is_alive_and_does_not_read() {
        const LIMIT: Duration = Duration::from_millis(500);
        let (mut socket, _peer) = connection();
        limit_unacknowledged(&socket, LIMIT).unwrap();
        let begun = Instant::now();
        let error = loop {
            // The last write waits until the limit, after the buffers are full.
            match socket.write_all(&[0; 1 << 16]) {
                Ok(()) => assert!(begun.elapsed() < Duration::from_secs(60), "it is open"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= LIMIT, "{:?}", begun.elapsed());
    }
}
