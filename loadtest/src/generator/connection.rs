//! Connection of the generator: connects, sends a request, reads the response, and is kept for the next request.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use http1::ResponseError;
use rustix::event::epoll::EventFlags;

use super::http1::{CompleteResponse, ResponseReader};
use super::starts::DueRequest;
use super::transport::SocketStream;
use crate::exchange::{RequestFailure, Sample};
use crate::pace::IntendedStart;
use crate::record::ServingRegions;
use crate::response::ResponseDefect;
use replica_api::priority::Priority;

/// Maximum consecutive reads of one connection before the others are served; epoll reports the remaining data again.
const CONSECUTIVE_READS_MAX: usize = 8;

/// Request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadRequest {
    pub(super) intended: IntendedStart,
    /// Whether the request belongs to a closed-loop caller.
    pub(super) by_caller: bool,
    pub(super) lag: Duration,
    pub(super) deadline: Instant,
}

/// End of a request.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) served: ServingRegions,
    pub(super) retried: bool,
    /// Time of the last byte of the response; `None` without a response.
    pub(super) at: Option<Instant>,
    /// `None` if the response is validated by another thread, which also records it.
    pub(super) outcome: Option<Result<(), RequestFailure>>,
}

impl LoadRequest {
    /// Starts a due request at `now`.
    pub(super) fn begin(due: DueRequest, now: Instant, timeout: Duration) -> LoadRequest {
        let DueRequest { intended, by_caller } = due;
        let lag = now.saturating_duration_since(intended.at);
        LoadRequest { intended, by_caller, lag, deadline: intended.at + timeout }
    }

    /// Returns the request as it was when it was due.
    pub(super) fn due(self) -> DueRequest {
        DueRequest { intended: self.intended, by_caller: self.by_caller }
    }
}

impl Completion {
    pub(super) fn failed(failure: RequestFailure) -> Completion {
        Completion { served: ServingRegions::Unknown, retried: false, at: None, outcome: Some(Err(failure)) }
    }

    pub(super) fn is_failure(&self) -> bool {
        self.outcome.is_some_and(|outcome| outcome.is_err())
    }

    /// Returns the sample of the request that ended at `now`; `None` if another thread records it.
    pub(super) fn sample(self, in_flight: LoadRequest, priority: Priority, now: Instant) -> Option<Sample> {
        let Completion { served, retried, at, outcome } = self;
        let LoadRequest { intended, lag, .. } = in_flight;
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

/// Result of processing a connection's events.
pub(super) enum ConnectionProgress {
    /// The request, if any, is still in flight.
    Pending,
    /// The request has ended, or there was none; the flag tells whether the connection can be reused.
    Completed(Completion, bool),
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Connecting,
    Open,
}

pub(super) struct Connection {
    stream: SocketStream,
    state: State,
    out: Vec<u8>,
    sent: usize,
    reader: ResponseReader,
    in_flight: Option<LoadRequest>,
    /// Registered epoll interest.
    interest: EventFlags,
}

impl Connection {
    /// Creates a connection that is being opened for a request.
    pub(super) fn new(stream: SocketStream, in_flight: LoadRequest, request: &[u8]) -> Connection {
        Connection {
            stream,
            state: State::Connecting,
            out: request.to_vec(),
            sent: 0,
            reader: ResponseReader::default(),
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

    /// Returns the epoll interest if it has changed since the last call.
    pub(super) fn changed_interest(&mut self) -> Option<EventFlags> {
        let mut interest = EventFlags::IN | EventFlags::RDHUP;
        if self.state == State::Connecting || self.sent < self.out.len() || self.stream.wants_write() {
            interest |= EventFlags::OUT;
        }
        (std::mem::replace(&mut self.interest, interest) != interest).then_some(interest)
    }

    pub(super) fn has_timed_out(&self, now: Instant) -> bool {
        self.in_flight.is_some_and(|in_flight| in_flight.deadline <= now)
    }

    pub(super) fn take_in_flight(&mut self) -> Option<LoadRequest> {
        self.in_flight.take()
    }

    /// Sends a request over a kept connection. Returns false if the connection was closed before accepting a byte.
    pub(super) fn begin(&mut self, in_flight: LoadRequest, request: &[u8]) -> bool {
        // A small request is written at once and not buffered.
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

    /// Processes epoll events. `check` is called with each complete response.
    pub(super) fn handle_events(
        &mut self,
        flags: EventFlags,
        read: &mut [u8],
        mut check: impl FnMut(LoadRequest, CompleteResponse<'_>) -> Completion,
    ) -> ConnectionProgress {
        if self.state == State::Connecting {
            if !flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP) {
                return ConnectionProgress::Pending;
            }
            if self.stream.connected().is_err() {
                return ConnectionProgress::Completed(Completion::failed(RequestFailure::Unreachable), false);
            }
            self.state = State::Open;
        }
        if self.flush().is_err() {
            return self.broken();
        }
        if !flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            return ConnectionProgress::Pending;
        }
        // epoll does not report data that TLS has already decrypted, so with TLS everything is read.
        let reads =
            if matches!(self.stream, SocketStream::Clear(_)) { CONSECUTIVE_READS_MAX } else { usize::MAX };
        for _ in 0..reads {
            let fresh = match self.stream.read(read) {
                Ok(0) => return self.ended(&mut check),
                Ok(count) => &read[..count],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return self.broken(),
            };
            // Unsolicited bytes are not a response.
            let Some(in_flight) = self.in_flight else { return self.broken() };
            let short = fresh.len() < read.len();
            let defect = match self.reader.take(fresh, |response| check(in_flight, response)) {
                Ok(Some((completion, reusable))) => {
                    let reusable = reusable && self.sent == self.out.len();
                    return ConnectionProgress::Completed(completion, reusable);
                }
                Ok(None) if short && reads == CONSECUTIVE_READS_MAX => break,
                Ok(None) => continue,
                Err(ResponseError::Malformed(_)) => ResponseDefect::NotHttp,
                Err(ResponseError::TooLarge) => ResponseDefect::TooLarge,
            };
            let failure = RequestFailure::InvalidResponse(defect);
            return ConnectionProgress::Completed(Completion::failed(failure), false);
        }
        // Reading may have produced bytes to write, as in a TLS handshake.
        if self.flush().is_err() { self.broken() } else { ConnectionProgress::Pending }
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

    fn ended(
        &mut self,
        check: &mut impl FnMut(LoadRequest, CompleteResponse<'_>) -> Completion,
    ) -> ConnectionProgress {
        let completion =
            self.in_flight.and_then(|in_flight| self.reader.end(|response| check(in_flight, response)));
        completion
            .map_or_else(|| self.broken(), |completion| ConnectionProgress::Completed(completion, false))
    }

    /// The connection ended before the response: a failed connection attempt if it was never established.
    fn broken(&self) -> ConnectionProgress {
        let failure = if self.stream.is_established() {
            RequestFailure::ConnectionClosed
        } else {
            RequestFailure::Unreachable
        };
        ConnectionProgress::Completed(Completion::failed(failure), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The generator's lag counts towards the latency and the timeout.
    #[test]
    fn the_lag_counts_towards_the_latency() {
        let (late, took) = (Duration::from_secs(5), Duration::from_millis(3));
        let at = Instant::now();
        let intended = IntendedStart { task: 0, number: 0, offset: Duration::ZERO, at };
        let in_flight =
            LoadRequest { intended, by_caller: false, lag: late, deadline: at + Duration::from_secs(5) };
        let completion = Completion {
            served: ServingRegions::Unknown,
            retried: false,
            at: Some(at + late + took),
            outcome: Some(Ok(())),
        };
        let sample = completion
            .sample(in_flight, Priority::Interactive, at + late + 2 * took)
            .expect("it has an outcome");
        assert_eq!((sample.latency, sample.lag, sample.outcome), (Some(late + took), late, Ok(())));
    }
}
