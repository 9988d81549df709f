//! HTTP/2 connection pool to one address: selection of a connection for a request, and keepalive.
//!
//! Over HTTP/1.1 a connection carries one request, and a connection that stalls stalls one. Over HTTP/2 it carries
//! many, which saves connections and shares failures: a lost packet, or a path that drops everything, holds up all
//! requests on it. So requests are spread over several connections once there are more than a few ([`select`]), and a
//! connection without incoming bytes gets no new requests long before it is closed ([`Keepalive`]). Requests in flight
//! stay on it: their own timeouts move them elsewhere, and a connection that was only slow continues.

use std::time::{Duration, Instant};

/// Connections to one address. With [`REQUESTS_BEFORE_OPENING`] on each that is 512 requests; further ones share.
pub const CONNECTIONS_MAX: usize = 16;
/// While one of the connections has fewer requests than this, no other is opened. The flow-control window of a stream
/// times this is the window of a connection, so that as many clients that do not read hold up no other request.
pub const REQUESTS_BEFORE_OPENING: usize = 32;
/// Requests on one connection. Times [`CONNECTIONS_MAX`] it is more than an edge sends to a region at once (8,192), so
/// that the limit of the region is reached first, which is reported to clients, and a status report still finds
/// capacity.
pub const REQUESTS_MAX: usize = 640;
/// Interval of the keepalive checks of a connection.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(250);
/// Time without an acknowledgement of a ping after which a connection is unresponsive: longer than a round trip around
/// the globe.
pub const UNRESPONSIVE_AFTER: Duration = Duration::from_millis(500);
/// Time without an acknowledgement after which it is closed: as long as until a silent region is down.
pub const CLOSE_AFTER: Duration = Duration::from_secs(3);

/// State of a connection, as used by [`select`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLoad {
    /// Requests in flight on it.
    pub requests: usize,
    /// Whether it is unresponsive.
    pub unresponsive: bool,
}

/// Selected connection of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selected {
    /// Send on this one.
    Use(usize),
    /// Send on this one, and open another for the next requests.
    UseAndOpen(usize),
    /// Open a connection and wait for it.
    OpenAndWait,
    /// Wait for the connection that is being opened.
    Wait,
    /// Reject: all connections are at their limit.
    Full,
}

/// Selects the connection of a request: the first below [`REQUESTS_BEFORE_OPENING`], so that connections left over from
/// a busier time become idle; then the one with the fewest requests.
pub fn select(connections: impl Iterator<Item = ConnectionLoad> + Clone, opening: bool) -> Selected {
    let responsive = connections.clone().enumerate().filter(|(_, load)| !load.unresponsive);
    if let Some((index, _)) = responsive.clone().find(|(_, load)| load.requests < REQUESTS_BEFORE_OPENING) {
        return Selected::Use(index);
    }
    let least =
        responsive.filter(|(_, load)| load.requests < REQUESTS_MAX).min_by_key(|(_, load)| load.requests);
    let may_open = !opening && connections.count() < CONNECTIONS_MAX;
    match (least, may_open) {
        (Some((index, _)), true) => Selected::UseAndOpen(index),
        (Some((index, _)), false) => Selected::Use(index),
        (None, true) => Selected::OpenAndWait,
        (None, false) if opening => Selected::Wait,
        (None, false) => Selected::Full,
    }
}

/// Action of a keepalive check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepaliveAction {
    /// None.
    None,
    /// Send a ping.
    Ping,
    /// Close the connection.
    Close,
}

/// Keepalive state of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keepalive {
    /// Time of the ping that is not acknowledged yet.
    unacknowledged_ping: Option<Instant>,
}

impl Keepalive {
    /// Checks a connection, to be called every [`KEEPALIVE_INTERVAL`]: the last byte came at `last_byte`, and
    /// `requests` are in flight. An idle connection is not pinged: its failure has no effect.
    pub fn check(&mut self, last_byte: Instant, requests: usize, now: Instant) -> KeepaliveAction {
        if self.unacknowledged_ping.is_some_and(|unacknowledged_ping| last_byte >= unacknowledged_ping) {
            self.unacknowledged_ping = None;
        }
        match self.unacknowledged_ping {
            Some(unacknowledged_ping)
                if now.saturating_duration_since(unacknowledged_ping) >= CLOSE_AFTER =>
            {
                KeepaliveAction::Close
            }
            Some(_) => KeepaliveAction::None,
            None if requests > 0 && now.saturating_duration_since(last_byte) >= KEEPALIVE_INTERVAL => {
                self.unacknowledged_ping = Some(now);
                KeepaliveAction::Ping
            }
            None => KeepaliveAction::None,
        }
    }

    /// Returns whether a ping is unacknowledged for so long that no more requests should use the connection.
    pub fn is_unresponsive(&self, now: Instant) -> bool {
        self.unacknowledged_ping.is_some_and(|unacknowledged_ping| {
            now.saturating_duration_since(unacknowledged_ping) >= UNRESPONSIVE_AFTER
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(requests: &[usize]) -> Vec<ConnectionLoad> {
        requests.iter().map(|requests| ConnectionLoad { requests: *requests, unresponsive: false }).collect()
    }

    fn check(connections: &[ConnectionLoad], opening: bool, expected: Selected) {
        assert_eq!(select(connections.iter().copied(), opening), expected, "{connections:?}, {opening}");
    }

    #[test]
    fn the_first_connection_with_few_requests_is_selected_and_another_is_opened_when_there_is_none() {
        const FULL: usize = REQUESTS_BEFORE_OPENING;
        check(&[], false, Selected::OpenAndWait);
        check(&[], true, Selected::Wait);
        check(&loads(&[FULL - 1, 0]), false, Selected::Use(0));
        check(&loads(&[FULL, 1]), false, Selected::Use(1));
        check(&loads(&[FULL + 1, FULL]), false, Selected::UseAndOpen(1));
        check(&loads(&[FULL + 1, FULL]), true, Selected::Use(1));
    }

    #[test]
    fn connections_and_requests_are_limited() {
        let many = |count: usize, requests| loads(&vec![requests; count]);
        check(&many(CONNECTIONS_MAX - 1, REQUESTS_MAX), false, Selected::OpenAndWait);
        check(&many(CONNECTIONS_MAX, REQUESTS_MAX - 1), false, Selected::Use(0));
        check(&many(CONNECTIONS_MAX, REQUESTS_MAX), false, Selected::Full);
        check(&many(CONNECTIONS_MAX - 1, REQUESTS_MAX), true, Selected::Wait);
    }

    #[test]
    fn an_unresponsive_connection_gets_no_requests_and_counts() {
        let mut connections = loads(&[0, REQUESTS_BEFORE_OPENING]);
        connections[0].unresponsive = true;
        check(&connections, false, Selected::UseAndOpen(1));
        connections.truncate(1);
        check(&connections, false, Selected::OpenAndWait);
        check(&connections, true, Selected::Wait);
        check(
            &vec![ConnectionLoad { requests: 1, unresponsive: true }; CONNECTIONS_MAX],
            false,
            Selected::Full,
        );
    }

    /// Checks a connection at every interval while a request is in flight; the last byte came at each of `received`, in
    /// intervals. Returns the action at each as a character.
    fn felt(beats: u32, last_byte: &[u32]) -> String {
        let (begin, mut keepalive) = (crate::some_instant(), Keepalive::default());
        let words = (1..=beats).map(|beat| {
            let now = begin + beat * KEEPALIVE_INTERVAL;
            let last = last_byte.iter().filter(|last_byte| **last_byte <= beat).max().copied().unwrap_or(0);
            match keepalive.check(begin + last * KEEPALIVE_INTERVAL, 1, now) {
                KeepaliveAction::None if keepalive.is_unresponsive(now) => 's',
                KeepaliveAction::None => '.',
                KeepaliveAction::Ping => '?',
                KeepaliveAction::Close => 'x',
            }
        });
        words.collect()
    }

    #[test]
    fn a_connection_without_bytes_is_pinged_then_unresponsive_then_closed() {
        assert_eq!(felt(13, &[]), "?.ssssssssssx");
        // Any received byte counts as an acknowledgement.
        assert_eq!(felt(6, &[1, 2, 4]), "..?.?.");
        // Slow, and responsive again.
        assert_eq!(felt(6, &[4]), "?.s.?.");
    }

    #[test]
    fn an_idle_connection_is_not_pinged() {
        let (begin, mut keepalive) = (crate::some_instant(), Keepalive::default());
        for beat in 1..100 {
            assert_eq!(keepalive.check(begin, 0, begin + beat * KEEPALIVE_INTERVAL), KeepaliveAction::None);
        }
    }
}
