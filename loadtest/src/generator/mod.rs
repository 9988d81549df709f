//! Generator: one thread that starts requests on time and reads their responses.
//!
//! A load generator that is slower than its target measures itself. So there is no task, no channel and no allocation
//! per request: one thread asks the pacer for due requests ([`crate::pace`]), writes each to a kept connection, waits in
//! epoll until the next start or the next response, and reads. A small request costs one write, one read and a share
//! of one wait. Expensive work, the validation of large responses, runs on another thread ([`checker`]), so that bulk
//! responses do not delay the start of interactive requests.
//!
//! A request never waits for the response to another one: there are as many connections as requests in flight, up to a
//! limit above which a request is *not sent* and counts as failed.
//!
//! This is the generator for HTTP/1.1. That for HTTP/2 ([`http2`]) has the same starts ([`starts`]) and the same validation,
//! and leaves the protocol to a library.

mod checker;
mod connection;
mod http1;
mod http2;
pub(crate) mod requests;
mod shared;
mod starts;
pub(crate) mod transport;

pub(crate) use http2::Http2Generator;
pub(crate) use shared::{ConnectTarget, SharedState};

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::time::Timespec;

use crate::exchange::{RequestFailure, Sample};
use crate::options::Options;
use checker::ResponseChecker;
use connection::{Completion, Connection, ConnectionProgress, LoadRequest};
use starts::{DueRequest, StartDecision, Starts};
use transport::SocketStream;

/// Longest wait: upper bound of the delay until a stop request or a timeout is noticed.
const WAIT_MAX: Duration = Duration::from_millis(10);

/// Maximum consecutive starts before responses are read.
const CONSECUTIVE_STARTS_MAX: usize = 64;

/// Maximum events per wait; others follow in the next one.
const EVENTS_MAX: usize = 256;

/// Size of one read.
const READ_BYTES: usize = 64 << 10;

/// Slot of a connection. epoll's user data is the slot's index with its generation, so that an event of a closed
/// connection is not attributed to its successor.
#[derive(Default)]
struct ConnectionSlot {
    generation: u32,
    connection: Option<Connection>,
}

/// Error that ends a generator early.
#[derive(Debug)]
pub(crate) enum GeneratorError {
    /// The system has no event queue or runtime.
    System(io::Error),
    /// The server declined HTTP/2 on a connection of the run.
    Http2Declined,
}

pub(crate) struct Generator {
    shared: Arc<SharedState>,
    target: ConnectTarget,
    timeout: Duration,
    in_flight_max: usize,
    start: Instant,
    starts: Starts,
    epoll: OwnedFd,
    slots: Vec<ConnectionSlot>,
    free_slots: Vec<usize>,
    idle: Vec<usize>,
    in_flight: usize,
    checker: ResponseChecker,
    read: Vec<u8>,
    body: Vec<u8>,
    request: Vec<u8>,
}

impl Generator {
    /// Creates the generator of a run that begins at `start`.
    pub(crate) fn new(
        options: &Options,
        target: ConnectTarget,
        shared: Arc<SharedState>,
        start: Instant,
    ) -> io::Result<Generator> {
        Ok(Generator {
            target,
            timeout: options.timeout,
            in_flight_max: options.in_flight_max,
            start,
            starts: Starts::new(options, start),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            slots: Vec::new(),
            free_slots: Vec::new(),
            idle: Vec::new(),
            in_flight: 0,
            checker: ResponseChecker::start(Arc::clone(&shared))?,
            read: vec![0; READ_BYTES],
            body: Vec::new(),
            request: Vec::new(),
            shared,
        })
    }

    /// Runs until all tasks end or a stop is requested, and awaits requests in flight. Returns whether all tasks ended.
    pub(crate) fn run(mut self) -> io::Result<bool> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut next_timeout_check = self.start;
        let (mut stopped, mut ended) = (false, false);
        while !ended {
            let now = Instant::now();
            stopped = stopped || self.shared.stop.load(Ordering::Relaxed);
            let wait = if stopped { None } else { self.start_due_requests(now) };
            ended = wait.is_none() && self.in_flight == 0;
            if now >= next_timeout_check {
                self.expire_timeouts(now);
                next_timeout_check = now + WAIT_MAX;
            }
            if !ended {
                self.wait_for_events(wait.unwrap_or(WAIT_MAX).min(WAIT_MAX), &mut events)?;
                for event in events.drain(..) {
                    self.handle_events(event);
                }
            }
            self.shared.in_flight.store(self.in_flight, Ordering::Relaxed);
        }
        self.checker.finish();
        Ok(!stopped)
    }

    /// Starts due requests; returns the time until the next start, or `None` if there is none.
    fn start_due_requests(&mut self, now: Instant) -> Option<Duration> {
        for _ in 0..CONSECUTIVE_STARTS_MAX {
            match self.starts.next(now, self.in_flight > 0) {
                StartDecision::Launch(due) => self.launch(due),
                StartDecision::Wait(span) => return Some(span),
                StartDecision::Finished => return None,
            }
        }
        Some(Duration::ZERO)
    }

    fn launch(&mut self, due: DueRequest) {
        let now = Instant::now();
        let requests = &self.shared.requests[due.intended.task];
        if self.in_flight >= self.in_flight_max {
            self.shared.record().add(Sample::not_sent(due.intended, requests.priority(), now));
            self.starts.ended(due, now, true);
            return;
        }
        let in_flight = LoadRequest::begin(due, now, self.timeout);
        requests.write(due.intended.number, &mut self.body, &mut self.request);
        self.in_flight += 1;
        while let Some(index) = self.idle.pop() {
            if let Some(mut connection) = self.slots[index].connection.take() {
                // A connection that was closed meanwhile accepts no byte; try the next one.
                if connection.begin(in_flight, &self.request) {
                    self.finish_event(index, connection, ConnectionProgress::Pending);
                    return;
                }
                self.free_slot(index);
            }
        }
        self.open(in_flight);
    }

    /// Sends the prepared request over a new connection.
    fn open(&mut self, in_flight: LoadRequest) {
        let index = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(ConnectionSlot::default());
            self.slots.len() - 1
        });
        let opened =
            SocketStream::connect(self.target.address, self.target.tls.as_ref()).and_then(|stream| {
                let connection = Connection::new(stream, in_flight, &self.request);
                let data = event_data(index, self.slots[index].generation);
                epoll::add(&self.epoll, connection.fd(), data, connection.interest())?;
                Ok(connection)
            });
        match opened {
            Ok(connection) => self.slots[index].connection = Some(connection),
            Err(_) => {
                self.free_slot(index);
                self.end(in_flight, Completion::failed(RequestFailure::Unreachable));
            }
        }
    }

    fn wait_for_events(&self, span: Duration, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let span = Timespec { tv_sec: span.as_secs() as i64, tv_nsec: span.subsec_nanos().into() };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&span)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Handles an epoll event.
    fn handle_events(&mut self, event: epoll::Event) {
        let (index, generation) = ((event.data.u64() & u64::from(u32::MAX)) as usize, event.data.u64() >> 32);
        let Some(slot) = self.slots.get_mut(index).filter(|slot| u64::from(slot.generation) == generation)
        else {
            return;
        };
        let Some(mut connection) = slot.connection.take() else { return };
        let shared = &self.shared;
        let checker = &self.checker;
        let progress = connection.handle_events(event.flags, &mut self.read, |in_flight, response| {
            let requests = &shared.requests[in_flight.intended.task];
            checker.check(requests, in_flight, response)
        });
        self.finish_event(index, connection, progress);
    }

    /// Returns a connection to its slot, or closes it, after its events were processed.
    fn finish_event(&mut self, index: usize, mut connection: Connection, progress: ConnectionProgress) {
        let (completion, reusable) = match progress {
            ConnectionProgress::Pending => (None, true),
            ConnectionProgress::Completed(completion, reusable) => (Some(completion), reusable),
        };
        let mut ended = completion.and_then(|completion| Some((connection.take_in_flight()?, completion)));
        let reusable = reusable
            && match connection.changed_interest() {
                None => true,
                Some(interest) => {
                    let data = event_data(index, self.slots[index].generation);
                    epoll::modify(&self.epoll, connection.fd(), data, interest).is_ok()
                }
            };
        if !reusable && let Some(in_flight) = connection.take_in_flight() {
            ended = Some((in_flight, Completion::failed(RequestFailure::ConnectionClosed)));
        }
        // An idle connection stays registered, so that its end is noticed.
        if reusable {
            if ended.is_some() {
                self.idle.push(index);
            }
            self.slots[index].connection = Some(connection);
        } else {
            self.idle.retain(|idle| *idle != index);
            drop(connection);
            self.free_slot(index);
        }
        if let Some((in_flight, completion)) = ended {
            self.end(in_flight, completion);
        }
    }

    /// Frees a slot. Closing the socket has already removed it from epoll.
    fn free_slot(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.generation = slot.generation.wrapping_add(1);
        slot.connection = None;
        self.free_slots.push(index);
    }

    /// Records the end of a request.
    fn end(&mut self, in_flight: LoadRequest, completion: Completion) {
        self.in_flight -= 1;
        let (at, failed) = (Instant::now(), completion.is_failure());
        self.shared.add(in_flight, completion, at);
        self.starts.ended(in_flight.due(), at, failed);
    }

    fn expire_timeouts(&mut self, now: Instant) {
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.connection.as_ref().is_some_and(|connection| connection.has_timed_out(now))
                && let Some(connection) = slot.connection.take()
            {
                self.finish_event(
                    index,
                    connection,
                    ConnectionProgress::Completed(Completion::failed(RequestFailure::Timeout), false),
                );
            }
        }
    }
}

fn event_data(index: usize, generation: u32) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(generation) << 32 | index as u64)
}
