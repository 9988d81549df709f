//! Tests of the streams to a spoke instance, with a simulation of stalled connections.

use super::*;

const MS: Duration = Duration::from_millis(1);
const ROUND_TRIP: Duration = Duration::from_millis(80);

/// Streams after an exchange on the first one.
fn streams(begun: Instant) -> (ExchangeStreams, StreamId) {
    let mut streams = ExchangeStreams::default();
    let (id, others) = streams.tick(begun).unwrap();
    assert_eq!(others, 0);
    streams.sent(id, 1, begun);
    assert_eq!(streams.responded(id, 1, begun + ROUND_TRIP), ExchangeResponse::Requested(begun));
    (streams, id)
}

#[test]
fn a_stream_is_overdue_half_an_interval_after_the_usual_round_trip() {
    let begun = crate::some_instant();
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
    assert_eq!(streams.responded(second, 3, due + ROUND_TRIP), ExchangeResponse::Requested(due));
    streams.keep(second);
    assert_eq!([first, second, third].map(|id| streams.is_open(id)), [false, true, false]);
}

#[test]
fn the_stream_that_was_only_slow_is_kept_if_it_responds_first() {
    let begun = crate::some_instant();
    let (mut streams, first) = streams(begun);
    streams.sent(first, 2, begun);
    let (second, _) = streams.tick(begun + 2 * EXCHANGE_PERIOD).unwrap();
    let response = streams.responded(first, 2, begun + 3 * EXCHANGE_PERIOD);
    assert_eq!(response, ExchangeResponse::Requested(begun));
    streams.keep(first);
    assert_eq!([first, second].map(|id| streams.is_open(id)), [true, false]);
    assert_eq!(streams.responded(second, 2, begun), ExchangeResponse::Closed);
}

#[test]
fn a_stream_without_a_response_for_the_timeout_is_closed_and_replaced() {
    let begun = crate::some_instant();
    let (mut streams, first) = streams(begun);
    streams.sent(first, 2, begun);
    let (second, others) = streams.tick(begun + EXCHANGE_TIMEOUT).unwrap();
    assert_eq!((streams.is_open(first), streams.is_open(second), others), (false, true, 0));
}

#[test]
fn streams_that_do_not_work_are_repeated_with_a_backoff_and_others_at_once() {
    let mut now = crate::some_instant();
    let mut streams = ExchangeStreams::default();
    let mut delays = Vec::new();
    for _ in 0..6 {
        let (id, _) = streams.tick(now).unwrap();
        // Some are refused, and others end after a few responses.
        for sequence in 1..delays.len() as u64 {
            streams.sent(id, sequence, now);
            streams.responded(id, sequence, now);
        }
        streams.ended(id, now, 1.0);
        let failed_at = now;
        while streams.clone().tick(now).is_none() {
            now += 100 * MS;
        }
        delays.push((now - failed_at).as_millis());
    }
    assert_eq!(delays, [200, 400, 800, 1000, 1000, 1000]);
    let (id, _) = streams.tick(now).unwrap();
    for sequence in 1..=u64::from(WORKING_RESPONSES) {
        streams.sent(id, sequence, now);
        streams.responded(id, sequence, now);
    }
    streams.ended(id, now, 1.0);
    let (id, _) = streams.tick(now).expect("the spoke may have restarted");
    streams.ended(id, now, 0.0);
    assert_eq!(streams.tick(now + 99 * MS), None, "the first delay again");
    assert!(streams.tick(now + 100 * MS).is_some());
}

#[test]
fn a_refused_replacement_is_not_repeated_at_once_and_a_closed_stream_is_no_failure() {
    let begun = crate::some_instant();
    let (mut streams, first) = streams(begun);
    streams.sent(first, 2, begun);
    let (second, _) = streams.tick(begun + EXCHANGE_PERIOD).unwrap();
    streams.ended(second, begun + EXCHANGE_PERIOD, 1.0);
    assert_eq!(streams.tick(begun + EXCHANGE_PERIOD), None);
    let (third, _) = streams.tick(begun + 2 * EXCHANGE_PERIOD).unwrap();
    streams.responded(first, 2, begun + 2 * EXCHANGE_PERIOD);
    streams.keep(first);
    streams.ended(third, begun + 2 * EXCHANGE_PERIOD, 1.0);
    assert_eq!(streams.failures, 1);
}

#[test]
fn late_responses_without_a_stall_cause_fewer_and_fewer_replacements() {
    let mut now = crate::some_instant();
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
            assert_eq!(streams.responded(other, sequence, now + 500 * MS), ExchangeResponse::Requested(now));
            streams.keep(other);
            id = other;
        } else {
            assert_eq!(streams.responded(id, sequence, now + 500 * MS), ExchangeResponse::Requested(now));
        }
        now += EXCHANGE_PERIOD;
    }
    assert_eq!(replacements, [2, 3, 4], "100, 200 and 400 ms are exceeded, 800 ms are not");

    for sequence in 100..100 + u64::from(PUNCTUAL_RESPONSES) {
        streams.round_trip = Some(ROUND_TRIP);
        streams.sent(id, sequence, now);
        assert_eq!(streams.responded(id, sequence, now + ROUND_TRIP), ExchangeResponse::Requested(now));
    }
    streams.sent(id, 1000, now);
    assert_eq!(
        streams.overdue_at(id),
        Some(now + ROUND_TRIP + OVERDUE_AFTER),
        "a stall is detected at once again"
    );
}

#[test]
fn requests_in_flight_are_limited() {
    let begun = crate::some_instant();
    let (mut streams, id) = streams(begun);
    for sequence in 0..EXCHANGES_IN_FLIGHT_MAX as u64 {
        assert!(streams.may_send(id));
        streams.sent(id, 10 + sequence, begun);
    }
    assert!(!streams.may_send(id), "at the limit");
    assert_eq!(streams.responded(id, 10, begun), ExchangeResponse::Requested(begun));
    assert!(streams.may_send(id));
}

#[test]
fn a_response_that_is_not_the_one_to_the_oldest_request_was_not_requested() {
    let begun = crate::some_instant();
    let (mut streams, id) = streams(begun);
    assert_eq!(streams.responded(id, 1, begun), ExchangeResponse::Unrequested, "more than requests");
    for sequence in 10..13 {
        streams.sent(id, sequence, begun);
    }
    assert_eq!(streams.responded(id, 9, begun), ExchangeResponse::Unrequested);
    assert_eq!(streams.responded(id, 11, begun), ExchangeResponse::Unrequested, "10 is missing");
    assert_eq!(streams.responded(id, u64::MAX, begun), ExchangeResponse::Unrequested);
    assert_eq!(streams.responded(id, 10, begun), ExchangeResponse::Requested(begun));
    assert_eq!(streams.responded(id, 10, begun), ExchangeResponse::Unrequested, "repeated");
    assert_eq!(streams.responded(id, 11, begun), ExchangeResponse::Requested(begun));
}

#[test]
fn a_slow_peer_does_not_delay_its_replacement_further_than_the_longest_round_trip() {
    let begun = crate::some_instant();
    let (mut streams, id) = streams(begun);
    streams.sent(id, 2, begun);
    streams.responded(id, 2, begun + 5 * EXCHANGE_PERIOD);
    streams.sent(id, 3, begun);
    assert!(streams.tick(begun + ROUND_TRIP_MAX + OVERDUE_AFTER).is_some());
}

#[test]
fn the_first_response_on_an_idle_connection_takes_one_round_trip() {
    let begun = crate::some_instant();
    let (mut streams, first) = streams(begun);
    streams.sent(first, 2, begun);
    let (second, _) = streams.tick(begun + EXCHANGE_PERIOD).unwrap();
    let opened = begun + EXCHANGE_PERIOD + 2 * OVERDUE_AFTER;
    assert_eq!(streams.overdue_at(second), Some(opened + ROUND_TRIP * OPENING_ROUND_TRIPS));
    streams.reuses_connection(second);
    assert_eq!(streams.overdue_at(second), Some(opened + ROUND_TRIP));
}

#[test]
fn the_permitted_delay_doubles_less_often_for_a_distant_region() {
    let delay = |round_trip: u32, doublings| {
        let round_trip = Some(MS * round_trip);
        let streams = ExchangeStreams { round_trip, doublings, ..ExchangeStreams::default() };
        streams.permitted_delay().as_millis()
    };
    assert_eq!([0, 1, 2, 3].map(|doublings| delay(80, doublings)), [100, 200, 400, 800]);
    assert_eq!([0, 1, 2, 3].map(|doublings| delay(200, doublings)), [100, 200, 400, 500]);
    assert_eq!([0, 1, 2, 3].map(|doublings| delay(300, doublings)), [100; 4]);
    assert_eq!([0, 1, 2, 3].map(|doublings| delay(5_000, doublings)), [100; 4]);
}

/// Time that a simulation advances in one step.
const STEP: Duration = Duration::from_millis(5);
/// Time at which the path of a simulation changes.
const CHANGE: Duration = Duration::from_secs(3);

/// Path between a gateway and a spoke, of which the connections that are open at [`CHANGE`] stall.
struct Path {
    round_trip: Duration,
    /// Factor of the round trip after the change.
    factor: u32,
    /// Whether the gateway has an idle connection, which stalls as well.
    has_idle: bool,
    doublings: u32,
    /// Time from a request to the change, below the interval.
    phase: Duration,
}

/// Stream in a simulation.
struct Link {
    is_stalled: bool,
    next_request: Instant,
    /// Time at which each response arrives, in order.
    responses: Vec<(Instant, u64)>,
}

/// Simulates the streams as the gateway opens them, and returns the longest time between two responses.
fn longest_silence(path: &Path) -> Duration {
    let begun = crate::some_instant();
    let (mut streams, mut links) = (ExchangeStreams::default(), BTreeMap::<StreamId, Link>::new());
    let (mut sequence, mut last, mut longest) = (0, None::<Instant>, Duration::ZERO);
    let mut next_tick = begun + path.phase;
    let mut now = begun;
    while now < begun + CHANGE + 3 * DOWN_AFTER {
        let is_changed = now >= begun + CHANGE;
        if now == begun + CHANGE {
            streams.doublings = path.doublings;
            links.values_mut().for_each(|link| link.is_stalled = true);
        }
        let round_trip = path.round_trip * if is_changed { path.factor } else { 1 };
        for (id, link) in &mut links {
            let arrived = link.responses.partition_point(|(at, _)| *at <= now);
            for (_, sequence) in link.responses.drain(..arrived).filter(|_| !link.is_stalled) {
                if let ExchangeResponse::Requested(_) = streams.responded(*id, sequence, now) {
                    longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
                    last = Some(now);
                    streams.keep(*id);
                }
            }
        }
        links.retain(|id, _| streams.is_open(*id));
        // The task of a stream signals that it is overdue once its connection is open.
        let is_overdue = |(id, link): (&StreamId, &Link)| {
            link.next_request <= now + EXCHANGE_PERIOD
                && streams.overdue_at(*id).is_some_and(|due| due <= now && now < due + STEP)
        };
        let is_tick = now >= next_tick;
        if is_tick {
            next_tick += EXCHANGE_PERIOD;
        }
        if (is_tick || links.iter().any(is_overdue))
            && let Some((id, others)) = streams.tick(now)
        {
            let reuses = others == 1 && path.has_idle;
            if reuses {
                streams.reuses_connection(id);
            }
            let opening = if reuses { 0 } else { OPENING_ROUND_TRIPS - 1 };
            let next_request = now + round_trip * opening;
            links.insert(id, Link { is_stalled: reuses, next_request, responses: Vec::new() });
        }
        for (id, link) in links.iter_mut().filter(|(_, link)| now >= link.next_request) {
            link.next_request += EXCHANGE_PERIOD;
            if streams.may_send(*id) {
                sequence += 1;
                streams.sent(*id, sequence, now);
                link.responses.push((now + round_trip, sequence));
            }
        }
        now += STEP;
    }
    longest.max(now - last.expect("the region has responded"))
}

/// Half a round trip is subtracted from a silence, because the last report was that old when it came.
#[test]
fn a_region_is_not_down_when_its_connections_stall_and_its_round_trip_doubles() {
    let mut longest = Duration::ZERO;
    for round_trip in [1, 20, 80, 150, 200, 250, 300].map(|round_trip| MS * round_trip) {
        for (factor, has_idle) in [(1, false), (1, true), (2, false), (2, true)] {
            for (doublings, phase) in (0..=DOUBLINGS_MAX)
                .flat_map(|doublings| (0..4).map(move |quarter| (doublings, EXCHANGE_PERIOD / 4 * quarter)))
            {
                let path = Path { round_trip, factor, has_idle, doublings, phase };
                let silence = longest_silence(&path).saturating_sub(round_trip / 2);
                assert!(
                    silence <= DOWN_AFTER,
                    "{silence:?}: {round_trip:?} {factor} {has_idle} {doublings} {phase:?}"
                );
                longest = longest.max(silence);
            }
        }
    }
    assert!(longest > DOWN_AFTER * 3 / 4, "{longest:?}: the simulation has no stall");
}
