//! One connection: connects, sends a request, reads its answer, and is kept for the next.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::http1::{Reader, Unreadable, Whole};
use super::stream::Stream;
use crate::answer::Rubbish;
use crate::exchange::{Failure, Sample};
use crate::pace::IntendedStart;
use crate::priority::Priority;
use crate::record::Served;

/// How often one connection is read before the others get their turn. What is left is told again by the kernel.
const READS_IN_A_ROW_MAX: usize = 8;

/// A request on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) intended: IntendedStart,
    /// Whether somebody in a closed loop waits for the answer.
    pub(super) by_caller: bool,
    pub(super) lag: Duration,
    pub(super) deadline: Instant,
}

/// What became of a request.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) served: Served,
    pub(super) retried: bool,
    /// When its last byte was here; none for one that has none.
    pub(super) at: Option<Instant>,
    /// None where somebody else is looking at the answer, and keeps the record of it.
    pub(super) outcome: Option<Result<(), Failure>>,
}

impl Answered {
    pub(super) fn not(failure: Failure) -> Answered {
        Answered { served: Served::Unnamed, retried: false, at: None, outcome: Some(Err(failure)) }
    }

    pub(super) fn is_failure(&self) -> bool {
        self.outcome.is_some_and(|outcome| outcome.is_err())
    }

    /// How the request went that ended at `now`, unless somebody else will say.
    pub(super) fn sample(self, in_flight: InFlight, priority: Priority, now: Instant) -> Option<Sample> {
        let Answered { served, retried, at, outcome } = self;
        let InFlight { intended, lag, .. } = in_flight;
        let latency = Some(at.unwrap_or(now).saturating_duration_since(intended.at));
        Some(Sample {
            task: intended.task,
            priority,
            intended: intended.offset,
            lag,
            latency,
            served,
            retried,
            outcome: outcome?,
        })
    }
}

/// What a connection's turn came to.
pub(super) enum Turn {
    /// Nothing has ended.
    GoesOn,
    /// Its request has, or it had none; and whether it can be used again.
    Answered(Answered, bool),
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Connecting,
    Open,
}

pub(super) struct Connection {
    stream: Stream,
    state: State,
    out: Vec<u8>,
    sent: usize,
    reader: Reader,
    in_flight: Option<InFlight>,
    /// What the kernel was asked to tell.
    interest: EventFlags,
}

impl Connection {
    /// One that is being opened for a request.
    pub(super) fn new(stream: Stream, in_flight: InFlight, request: &[u8]) -> Connection {
        Connection {
            stream,
            state: State::Connecting,
            out: request.to_vec(),
            sent: 0,
            reader: Reader::default(),
            in_flight: Some(in_flight),
            interest: EventFlags::IN | EventFlags::RDHUP | EventFlags::OUT,
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.fd()
    }

    pub(super) fn interest(&self) -> EventFlags {
        self.interest
    }

    /// What the kernel is to tell from now on, where that is something else than before.
    pub(super) fn changed_interest(&mut self) -> Option<EventFlags> {
        let mut interest = EventFlags::IN | EventFlags::RDHUP;
        if self.state == State::Connecting || self.sent < self.out.len() || self.stream.wants_write() {
            interest |= EventFlags::OUT;
        }
        (std::mem::replace(&mut self.interest, interest) != interest).then_some(interest)
    }

    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.in_flight.is_some_and(|in_flight| in_flight.deadline <= now)
    }

    pub(super) fn take_in_flight(&mut self) -> Option<InFlight> {
        self.in_flight.take()
    }

    /// Sends a request over a connection that was kept. False if it takes not a byte because it has ended.
    pub(super) fn begin(&mut self, in_flight: InFlight, request: &[u8]) -> bool {
        // All of a small one is taken at once, and nothing need be kept of it.
        let taken = match self.stream.write(request) {
            Ok(taken) => taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(_) => return false,
        };
        self.out.clear();
        self.out.extend_from_slice(&request[taken..]);
        self.sent = 0;
        self.in_flight = Some(in_flight);
        true
    }

    /// Goes on, now that the kernel says that something is possible. `look` is given a whole answer.
    pub(super) fn attend(
        &mut self,
        flags: EventFlags,
        read: &mut [u8],
        mut look: impl FnMut(InFlight, Whole<'_>) -> Answered,
    ) -> Turn {
        if self.state == State::Connecting {
            if !flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP) {
                return Turn::GoesOn;
            }
            if self.stream.connected().is_err() {
                return Turn::Answered(Answered::not(Failure::Unreachable), false);
            }
            self.state = State::Open;
        }
        if self.flush().is_err() {
            return self.broken();
        }
        if !flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            return Turn::GoesOn;
        }
        // What TLS has decrypted the kernel does not tell again, so there all of it is read.
        let reads = if matches!(self.stream, Stream::Clear(_)) { READS_IN_A_ROW_MAX } else { usize::MAX };
        for _ in 0..reads {
            let fresh = match self.stream.read(read) {
                Ok(0) => return self.ended(&mut look),
                Ok(count) => &read[..count],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return self.broken(),
            };
            // What comes unasked is no answer.
            let Some(in_flight) = self.in_flight else { return self.broken() };
            let short = fresh.len() < read.len();
            let mut answered = None;
            let whole = self.reader.take(fresh, |whole| {
                let kept = whole.head.kept;
                answered = Some((look(in_flight, whole), kept));
            });
            match (whole, answered) {
                (_, Some((answered, kept))) => {
                    return Turn::Answered(answered, kept && self.sent == self.out.len());
                }
                (Err(Unreadable::NotHttp), None) => {
                    return Turn::Answered(Answered::not(Failure::Rubbish(Rubbish::NotHttp)), false);
                }
                (Err(Unreadable::TooLarge), None) => {
                    return Turn::Answered(Answered::not(Failure::Rubbish(Rubbish::TooLarge)), false);
                }
                (Ok(_), None) if short && reads == READS_IN_A_ROW_MAX => break,
                (Ok(_), None) => {}
            }
        }
        // What was read may have made something to say, as a handshake does.
        if self.flush().is_err() { self.broken() } else { Turn::GoesOn }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() || self.stream.wants_write() {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(taken) => {
                    self.sent += taken;
                    if taken == 0 {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn ended(&mut self, look: &mut impl FnMut(InFlight, Whole<'_>) -> Answered) -> Turn {
        let mut answered = None;
        if let Some(in_flight) = self.in_flight {
            self.reader.end(|whole| answered = Some(look(in_flight, whole)));
        }
        answered.map_or_else(|| self.broken(), |answered| Turn::Answered(answered, false))
    }

    /// It has ended before the answer did; before it was a connection at all, nobody was reached.
    fn broken(&self) -> Turn {
        let failure = if self.stream.is_established() { Failure::BrokenOff } else { Failure::Unreachable };
        Turn::Answered(Answered::not(failure), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a late generator costs counts: as latency, and against the time-out.
    #[test]
    fn a_request_that_was_started_late_took_as_much_longer() {
        let (late, took) = (Duration::from_secs(5), Duration::from_millis(3));
        let at = Instant::now();
        let intended = IntendedStart { task: 0, number: 0, offset: Duration::ZERO, at };
        let in_flight =
            InFlight { intended, by_caller: false, lag: late, deadline: at + Duration::from_secs(5) };
        let answered = Answered {
            served: Served::Unnamed,
            retried: false,
            at: Some(at + late + took),
            outcome: Some(Ok(())),
        };
        let sample = answered
            .sample(in_flight, Priority::Interactive, at + late + 2 * took)
            .expect("it has an outcome");
        assert_eq!((sample.latency, sample.lag, sample.outcome), (Some(late + took), late, Ok(())));
    }
}
