//! Streams of the report exchange with one spoke instance: when another one is opened, and which one is kept.
//!
//! All exchanges share one stream, and so one TCP connection. A lost segment delays all messages after it, and a middlebox
//! that has forgotten the connection stops them for good. So a stream is overdue when a response is missing for longer than
//! half an interval beyond the usual round trip, and then another one is opened beside it. The first of them to respond is
//! kept, and the others are closed: a stream that was only slow stays, and one that is stalled is replaced well before its
//! region is considered down. With half an interval, the request after the one that is missing is already sent on another
//! connection, as it was when each request had one; nearer regions are not even suspect (0.6 s).
//!
//! A response can be late without a stall, because one of the two processes gets no CPU time. Another stream does not help
//! then, and costs both a TLS handshake. So the permitted delay doubles with each replacement, up to eight times, until
//! responses were punctual for half a minute. It is shorter for a distant region: two streams in a row may be stalled, the one
//! in use and an idle connection, and the third has a new connection, which takes four round trips. Its first response must
//! arrive before the region is down, although the path has become twice as long.
//!
//! A spoke responds to the requests of a stream one after another. A response that is not the one to the oldest request in
//! flight was not requested, and its stream is closed. A stream that is refused, or closed before it has carried responses for
//! a second, is followed by another one after a backoff.
//!
//! ```text
//!  sent ── usual round trip + 100 ms ──▶ overdue: another stream ── 2 s without a response ──▶ closed
//! ```

use crate::health::DOWN_AFTER;
use backoff::Backoff;
use scheduler_api::report::EXCHANGE_PERIOD;
use scheduler_api::report::stream::STREAMS_MAX;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Timeout of a report; a region is considered down well before it. Independent of the timeouts of the exchanges with
/// hubs and between spokes: this one bounds the reports in flight.
pub const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit on exchanges in flight on one stream: as many as are started within the timeout.
pub const EXCHANGES_IN_FLIGHT_MAX: usize =
    (EXCHANGE_TIMEOUT.as_millis() / EXCHANGE_PERIOD.as_millis()) as usize;
/// Time beyond the usual round trip after which a response is overdue.
const OVERDUE_AFTER: Duration = EXCHANGE_PERIOD.checked_div(2).expect("2 is not 0");
/// Doublings of that time at most: 800 ms, well before the region is considered down.
const DOUBLINGS_MAX: u32 = 3;
/// Punctual responses in a row after which a late one counts as a stall again: half a minute.
const PUNCTUAL_RESPONSES: u32 = 150;
/// Round trip before the first one is measured: half of the longest between two regions.
const ROUND_TRIP_UNKNOWN: Duration = Duration::from_millis(150);
/// Longest round trip that counts as usual, so that a slow peer does not delay its own replacement: the longest between two
/// regions is some 300 ms.
const ROUND_TRIP_MAX: Duration = Duration::from_millis(400);
/// Round trips until the first response on a new connection: TCP, TLS, a second attempt if the session is not resumed, and
/// the exchange.
const OPENING_ROUND_TRIPS: u32 = 4;
/// Round trips until the first response on an idle connection.
const REUSED_ROUND_TRIPS: u32 = 1;
/// Responses after which a stream has worked, and the next one is opened without a delay: a second.
const WORKING_RESPONSES: u32 = 5;
/// Delays before a stream after others that have not worked. A spoke that starts is found within a second, which is less than
/// its start takes, and a region with an address that rejects streams costs a handshake a second.
const REOPEN: Backoff = Backoff { first: EXCHANGE_PERIOD, max: Duration::from_secs(1) };
/// Part of a shorter round trip by which the usual one decreases; a longer one counts at once.
const ROUND_TRIP_DECAY: u32 = 8;

/// Number of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(u64);

/// Streams to one spoke instance.
#[derive(Clone, Debug, Default)]
pub struct ExchangeStreams {
    open: BTreeMap<StreamId, ExchangeStream>,
    opened: u64,
    /// Usual round trip; `None` before the first response.
    round_trip: Option<Duration>,
    /// Doublings of the permitted delay, and the punctual responses since the last one.
    doublings: u32,
    punctual: u32,
    /// Streams in a row that have not worked, and the time before which no other one is opened.
    failures: u32,
    reopen_at: Option<Instant>,
}

/// Kind of a response on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeResponse {
    /// That to the oldest request in flight, which was sent at this time.
    Requested(Instant),
    /// Not that to the oldest request in flight. The stream must be closed.
    Unrequested,
    /// One on a stream that is closed.
    Closed,
}

/// One stream.
#[derive(Clone, Debug)]
struct ExchangeStream {
    opened_at: Instant,
    /// Round trips until its first response.
    opening: u32,
    /// Responses so far.
    responses: u32,
    /// Time of each request without a response, by sequence number.
    in_flight: BTreeMap<u64, Instant>,
}

impl ExchangeStream {
    /// Returns the time since which a response is missing.
    fn waits_since(&self) -> Option<Instant> {
        match self.responses {
            0 => Some(self.opened_at),
            _ => self.in_flight.first_key_value().map(|(_, sent_at)| *sent_at),
        }
    }

    /// Returns the round trips that its next response takes.
    fn round_trips(&self) -> u32 {
        if self.responses == 0 { self.opening } else { 1 }
    }
}

impl ExchangeStreams {
    /// Closes the streams that have timed out, and opens another one if all others are overdue. Called once per interval,
    /// and when a response is overdue.
    /// Returns the new stream, and the number of others.
    pub fn tick(&mut self, now: Instant) -> Option<(StreamId, usize)> {
        let usual = self.usual();
        self.open.retain(|_, stream| {
            // The opening of a connection may take longer than an exchange.
            let timeout = EXCHANGE_TIMEOUT.max(2 * usual * stream.round_trips());
            stream.waits_since().is_none_or(|since| now.saturating_duration_since(since) < timeout)
        });
        let others = self.open.len();
        let is_overdue = |stream: &ExchangeStream| self.due(stream).is_some_and(|due| now >= due);
        if others >= STREAMS_MAX || !self.open.values().all(is_overdue) {
            return None;
        }
        if self.reopen_at.is_some_and(|at| now < at) {
            return None;
        }
        if others > 0 {
            self.doublings = (self.doublings + 1).min(DOUBLINGS_MAX);
            self.punctual = 0;
        }
        self.opened += 1;
        let id = StreamId(self.opened);
        let in_flight = BTreeMap::new();
        let stream = ExchangeStream { opened_at: now, opening: OPENING_ROUND_TRIPS, responses: 0, in_flight };
        self.open.insert(id, stream);
        Some((id, others))
    }

    /// Records that a new stream uses an idle connection, so that its first response takes one round trip.
    pub fn reuses_connection(&mut self, id: StreamId) {
        if let Some(stream) = self.open.get_mut(&id) {
            stream.opening = REUSED_ROUND_TRIPS;
        }
    }

    /// Returns when a stream is overdue, unless it responds before.
    pub fn overdue_at(&self, id: StreamId) -> Option<Instant> {
        self.due(self.open.get(&id)?)
    }

    fn due(&self, stream: &ExchangeStream) -> Option<Instant> {
        Some(stream.waits_since()? + self.usual() * stream.round_trips() + self.permitted_delay())
    }

    /// Returns the usual round trip, as far as it counts.
    fn usual(&self) -> Duration {
        self.round_trip.unwrap_or(ROUND_TRIP_UNKNOWN).min(ROUND_TRIP_MAX)
    }

    /// Returns the time beyond the usual round trip after which a response is overdue.
    fn permitted_delay(&self) -> Duration {
        let usual = self.usual();
        let third_opens = 2 * usual * OPENING_ROUND_TRIPS;
        // From the last response to the one that is missing, and from the second stream to its response.
        let waits = EXCHANGE_PERIOD + usual;
        let delays = DOWN_AFTER.saturating_sub(third_opens + waits);
        (OVERDUE_AFTER * 2_u32.pow(self.doublings)).min((delays / 2).max(OVERDUE_AFTER))
    }

    /// Returns whether a stream is open.
    pub fn is_open(&self, id: StreamId) -> bool {
        self.open.contains_key(&id)
    }

    /// Returns whether a request may be sent on a stream: fewer than the limit are in flight.
    pub fn may_send(&self, id: StreamId) -> bool {
        self.open.get(&id).is_some_and(|stream| stream.in_flight.len() < EXCHANGES_IN_FLIGHT_MAX)
    }

    /// Records a request on a stream.
    pub fn sent(&mut self, id: StreamId, sequence: u64, now: Instant) {
        if let Some(stream) = self.open.get_mut(&id) {
            stream.in_flight.insert(sequence, now);
        }
    }

    /// Records a response on a stream.
    pub fn responded(&mut self, id: StreamId, sequence: u64, now: Instant) -> ExchangeResponse {
        let Some(stream) = self.open.get_mut(&id) else { return ExchangeResponse::Closed };
        let oldest = stream.in_flight.first_entry().filter(|oldest| *oldest.key() == sequence);
        let Some(oldest) = oldest else { return ExchangeResponse::Unrequested };
        let sent_at = oldest.remove();
        stream.responses = stream.responses.saturating_add(1);
        if stream.responses >= WORKING_RESPONSES {
            (self.failures, self.reopen_at) = (0, None);
        }
        let round_trip = now.saturating_duration_since(sent_at);
        self.count_punctual(round_trip);
        let usual = match self.round_trip {
            Some(usual) if usual > round_trip => usual - (usual - round_trip) / ROUND_TRIP_DECAY,
            _ => round_trip,
        };
        self.round_trip = Some(usual);
        ExchangeResponse::Requested(sent_at)
    }

    fn count_punctual(&mut self, round_trip: Duration) {
        self.punctual = if round_trip <= self.usual() + OVERDUE_AFTER { self.punctual + 1 } else { 0 };
        if self.punctual >= PUNCTUAL_RESPONSES {
            (self.doublings, self.punctual) = (0, 0);
        }
    }

    /// Closes all streams except this one.
    pub fn keep(&mut self, id: StreamId) {
        if self.open.len() > 1 && self.is_open(id) {
            self.open.retain(|other, _| *other == id);
        }
    }

    /// Records the end of a stream, unless it was closed before. If it has not worked, the next one is opened after a backoff;
    /// `draw` is uniform in [0, 1).
    pub fn ended(&mut self, id: StreamId, now: Instant, draw: f64) {
        let Some(stream) = self.open.remove(&id) else { return };
        if stream.responses < WORKING_RESPONSES {
            self.failures = self.failures.saturating_add(1);
            self.reopen_at = Some(now + REOPEN.equal_jitter(self.failures, draw));
        }
    }
}

#[cfg(test)]
mod tests;
