//! Detection of peers whose machine or network has failed: their connections stay open without an end, and only the
//! kernel can tell them from quiet ones.
//!
//! The HTTP server of a replica and of a hub has no idle timeout, and none could tell a lost peer from a long poll or a
//! long computation. So the kernel probes an idle connection (keepalive, RFC 9293, 3.8.4), and limits the time for which
//! sent data is unacknowledged, which is about 15 minutes by default (`tcp_retries2`).

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
const PROBES: u32 = 3;
/// Time after which a connection to a lost peer has ended, whether it was idle or data was sent.
pub(crate) const LOST_AFTER: Duration = PROBE_AFTER.saturating_add(PROBE_PERIOD.saturating_mul(PROBES));

/// Makes the kernel end a connection whose peer has not responded for [`LOST_AFTER`].
///
/// # Errors
///
/// When the kernel rejects an option, as for a socket that is not a TCP one.
pub(crate) fn end_when_lost(socket: &impl AsFd) -> io::Result<()> {
    set_tcp_keepidle(socket, PROBE_AFTER)?;
    set_tcp_keepintvl(socket, PROBE_PERIOD)?;
    set_tcp_keepcnt(socket, PROBES)?;
    let millis = u32::try_from(LOST_AFTER.as_millis()).expect("a minute of milliseconds fits");
    set_tcp_user_timeout(socket, millis)?;
    set_socket_keepalive(socket, true)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{socket_keepalive, tcp_keepidle, tcp_user_timeout};

    #[test]
    fn an_idle_and_a_sending_connection_end_a_minute_after_the_peer_is_lost() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        end_when_lost(&socket).unwrap();
        assert_eq!(LOST_AFTER, Duration::from_secs(60));
        assert!(socket_keepalive(&socket).unwrap());
        assert_eq!(tcp_keepidle(&socket).unwrap(), PROBE_AFTER);
        assert_eq!(tcp_user_timeout(&socket).unwrap(), 60_000);
    }
}
