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
//! responses were punctual for half a minute.
//!
//! ```text
//!  sent ── usual round trip + 100 ms ──▶ overdue: another stream ── 2 s without a response ──▶ closed
//! ```

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
/// Part of a shorter round trip by which the usual one decreases; a longer one counts at once.
const ROUND_TRIP_DECAY: u32 = 8;

/// Number of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(u64);

/// Streams to one spoke instance.
#[derive(Debug, Default)]
pub struct ExchangeStreams {
    open: BTreeMap<StreamId, ExchangeStream>,
    opened: u64,
    /// Usual round trip; `None` before the first response.
    round_trip: Option<Duration>,
    /// Doublings of the permitted delay, and the punctual responses since the last one.
    doublings: u32,
    punctual: u32,
}

/// One stream.
#[derive(Debug)]
struct ExchangeStream {
    opened_at: Instant,
    has_responded: bool,
    /// Time of each request without a response, by sequence number.
    in_flight: BTreeMap<u64, Instant>,
}

impl ExchangeStream {
    /// Returns the time since which a response is missing.
    fn waits_since(&self) -> Option<Instant> {
        match self.has_responded {
            true => self.in_flight.first_key_value().map(|(_, sent_at)| *sent_at),
            false => Some(self.opened_at),
        }
    }
}

impl ExchangeStreams {
    /// Closes the streams that have timed out, and opens another one if all others are overdue. Called once per interval,
    /// and when a response is overdue.
    /// Returns the new stream, and the number of others.
    pub fn tick(&mut self, now: Instant) -> Option<(StreamId, usize)> {
        let waits = |stream: &ExchangeStream| {
            stream.waits_since().map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
        };
        self.open.retain(|_, stream| waits(stream) < EXCHANGE_TIMEOUT);
        let others = self.open.len();
        let is_overdue = |stream: &ExchangeStream| self.due(stream).is_some_and(|due| now >= due);
        if others >= STREAMS_MAX || !self.open.values().all(is_overdue) {
            return None;
        }
        if others > 0 {
            self.doublings = (self.doublings + 1).min(DOUBLINGS_MAX);
            self.punctual = 0;
        }
        self.opened += 1;
        let id = StreamId(self.opened);
        let stream = ExchangeStream { opened_at: now, has_responded: false, in_flight: BTreeMap::new() };
        self.open.insert(id, stream);
        Some((id, others))
    }

    /// Returns when a stream is overdue, unless it responds before.
    pub fn overdue_at(&self, id: StreamId) -> Option<Instant> {
        self.due(self.open.get(&id)?)
    }

    fn due(&self, stream: &ExchangeStream) -> Option<Instant> {
        let usual = self.round_trip.unwrap_or(ROUND_TRIP_UNKNOWN).min(ROUND_TRIP_MAX);
        let round_trips = if stream.has_responded { 1 } else { OPENING_ROUND_TRIPS };
        Some(stream.waits_since()? + usual * round_trips + OVERDUE_AFTER * 2_u32.pow(self.doublings))
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

    /// Records a response on a stream; those to earlier requests will not come any more, because a stream is in order.
    /// Returns the time of the request; `None` if none with this number is in flight.
    pub fn responded(&mut self, id: StreamId, sequence: u64, now: Instant) -> Option<Instant> {
        let stream = self.open.get_mut(&id)?;
        let sent_at = stream.in_flight.remove(&sequence)?;
        stream.in_flight = stream.in_flight.split_off(&sequence);
        stream.has_responded = true;
        let round_trip = now.saturating_duration_since(sent_at);
        self.count_punctual(round_trip);
        let usual = match self.round_trip {
            Some(usual) if usual > round_trip => usual - (usual - round_trip) / ROUND_TRIP_DECAY,
            _ => round_trip,
        };
        self.round_trip = Some(usual);
        Some(sent_at)
    }

    fn count_punctual(&mut self, round_trip: Duration) {
        let usual = self.round_trip.unwrap_or(ROUND_TRIP_UNKNOWN).min(ROUND_TRIP_MAX);
        self.punctual = if round_trip <= usual + OVERDUE_AFTER { self.punctual + 1 } else { 0 };
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

    /// Closes a stream.
    pub fn close(&mut self, id: StreamId) {
        self.open.remove(&id);
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "an Instant has no constant constructor")]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const ROUND_TRIP: Duration = Duration::from_millis(80);

    /// Streams after an exchange on the first one.
    fn streams(begun: Instant) -> (ExchangeStreams, StreamId) {
        let mut streams = ExchangeStreams::default();
        let (id, others) = streams.tick(begun).unwrap();
        assert_eq!(others, 0);
        streams.sent(id, 1, begun);
        assert_eq!(streams.responded(id, 1, begun + ROUND_TRIP), Some(begun));
        (streams, id)
    }

    #[test]
    fn a_stream_is_overdue_half_an_interval_after_the_usual_round_trip() {
        let begun = Instant::now();
        let (mut streams, first) = streams(begun);
        assert_eq!(streams.tick(begun + 10 * EXCHANGE_PERIOD), None, "nothing is in flight");
        let sent_at = begun + 10 * EXCHANGE_PERIOD;
        streams.sent(first, 2, sent_at);
        let due = sent_at + ROUND_TRIP + OVERDUE_AFTER;
        assert_eq!(streams.overdue_at(first), Some(due));
        assert_eq!(streams.tick(due - MS), None);
        let (second, others) = streams.tick(due).unwrap();
        assert_eq!(others, 1);
        assert_eq!(streams.tick(due + MS), None, "the second is not overdue");
        let opened = due + ROUND_TRIP * OPENING_ROUND_TRIPS + 2 * OVERDUE_AFTER;
        assert_eq!(streams.tick(opened - MS), None);
        let (third, others) = streams.tick(opened).unwrap();
        assert_eq!(others, 2);
        assert_eq!(streams.tick(sent_at + EXCHANGE_TIMEOUT - MS), None, "at the limit");
        assert!(streams.is_open(first));
        streams.sent(second, 3, due);
        assert_eq!(streams.responded(second, 3, due + ROUND_TRIP), Some(due));
        streams.keep(second);
        assert_eq!([first, second, third].map(|id| streams.is_open(id)), [false, true, false]);
    }

    #[test]
    fn the_stream_that_was_only_slow_is_kept_if_it_responds_first() {
        let begun = Instant::now();
        let (mut streams, first) = streams(begun);
        streams.sent(first, 2, begun);
        let (second, _) = streams.tick(begun + 2 * EXCHANGE_PERIOD).unwrap();
        assert!(streams.responded(first, 2, begun + 3 * EXCHANGE_PERIOD).is_some());
        streams.keep(first);
        assert_eq!([first, second].map(|id| streams.is_open(id)), [true, false]);
        assert_eq!(streams.responded(second, 2, begun), None, "it is closed");
    }

    #[test]
    fn a_stream_without_a_response_for_the_timeout_is_closed_and_replaced() {
        let begun = Instant::now();
        let (mut streams, first) = streams(begun);
        streams.sent(first, 2, begun);
        let (second, others) = streams.tick(begun + EXCHANGE_TIMEOUT).unwrap();
        assert_eq!((streams.is_open(first), streams.is_open(second), others), (false, true, 0));
        streams.close(second);
        assert!(
            streams.tick(begun + EXCHANGE_TIMEOUT).is_some(),
            "a refused connection is repeated at the next interval"
        );
    }

    #[test]
    fn late_responses_without_a_stall_cause_fewer_and_fewer_replacements() {
        let mut now = Instant::now();
        let (mut streams, mut id) = streams(now);
        // Every response takes half a second, as between two processes without CPU time.
        let mut replacements = Vec::new();
        for sequence in 2..100 {
            streams.sent(id, sequence, now);
            // The usual round trip is that of a time with CPU.
            streams.round_trip = Some(ROUND_TRIP);
            if let Some((other, _)) = streams.tick(now + 500 * MS) {
                replacements.push(sequence);
                streams.sent(other, sequence, now);
                assert!(streams.responded(other, sequence, now + 500 * MS).is_some());
                streams.keep(other);
                id = other;
            } else {
                assert!(streams.responded(id, sequence, now + 500 * MS).is_some());
            }
            now += EXCHANGE_PERIOD;
        }
        assert_eq!(replacements, [2, 3, 4], "100, 200 and 400 ms are exceeded, 800 ms are not");

        for sequence in 100..100 + u64::from(PUNCTUAL_RESPONSES) {
            streams.round_trip = Some(ROUND_TRIP);
            streams.sent(id, sequence, now);
            assert!(streams.responded(id, sequence, now + ROUND_TRIP).is_some());
        }
        streams.sent(id, 1000, now);
        assert_eq!(
            streams.overdue_at(id),
            Some(now + ROUND_TRIP + OVERDUE_AFTER),
            "a stall is detected at once again"
        );
    }

    #[test]
    fn requests_in_flight_are_limited_and_a_response_ends_those_before_it() {
        let begun = Instant::now();
        let (mut streams, id) = streams(begun);
        for sequence in 0..EXCHANGES_IN_FLIGHT_MAX as u64 {
            assert!(streams.may_send(id));
            streams.sent(id, 10 + sequence, begun);
        }
        assert!(!streams.may_send(id), "at the limit");
        assert_eq!(streams.responded(id, 9, begun), None, "it was not requested");
        assert!(streams.responded(id, 12, begun).is_some());
        assert_eq!(streams.responded(id, 12, begun), None, "repeated");
        assert_eq!(streams.responded(id, 11, begun), None, "late");
        assert!(streams.responded(id, 13, begun).is_some());
    }

    #[test]
    fn a_slow_peer_does_not_delay_its_replacement_further_than_the_longest_round_trip() {
        let begun = Instant::now();
        let (mut streams, id) = streams(begun);
        streams.sent(id, 2, begun);
        assert!(streams.responded(id, 2, begun + 5 * EXCHANGE_PERIOD).is_some());
        streams.sent(id, 3, begun);
        assert!(streams.tick(begun + ROUND_TRIP_MAX + OVERDUE_AFTER).is_some());
    }
}
