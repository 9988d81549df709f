//! Generator: one thread that starts requests on time and reads their responses.
//!
//! A load generator that is slower than its target measures itself. So there is no task, no channel and no allocation
//! per request: one thread asks the pacer for due requests ([`Pacer`]), writes each to a kept connection, waits in
//! epoll until the next start or the next response, and reads. A small request costs one write, one read and a share
//! of one wait. Expensive work, the validation of large responses, runs on another thread ([`checker`]), so that bulk
//! responses do not delay the start of interactive requests.
//!
//! A request never waits for the response to another one: there are as many connections as requests in flight, up to a
//! limit above which a request is *not sent* and counts as failed.

mod checker;
mod connection;
mod http1;
pub(crate) mod requests;
mod shared;
pub(crate) mod transport;

pub(crate) use shared::{ConnectTarget, SharedState};

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::time::Timespec;

use crate::arrival::ArrivalSchedule;
use crate::exchange::{RequestFailure, Sample};
use crate::options::Options;
use crate::pace::{IntendedStart, PaceDecision, Pacer};
use crate::task::Pacing;
use checker::ResponseChecker;
use connection::{Completion, Connection, ConnectionProgress, LoadRequest};
use transport::SocketStream;

/// Longest wait: upper bound of the delay until a stop request or a timeout is noticed.
const WAIT_MAX: Duration = Duration::from_millis(10);

/// Maximum consecutive starts before responses are read.
const CONSECUTIVE_STARTS_MAX: usize = 64;

/// Maximum events per wait; others follow in the next one.
const EVENTS_MAX: usize = 256;

/// Size of one read.
const READ_BYTES: usize = 64 << 10;

/// Delay of a closed-loop caller after a failure. Without it, callers of an unreachable server would send requests in a
/// busy loop.
const CALLER_FAILURE_DELAY: Duration = Duration::from_millis(100);

/// Slot of a connection. epoll's user data is the slot's index with its generation, so that an event of a closed
/// connection is not attributed to its successor.
#[derive(Default)]
struct ConnectionSlot {
    generation: u32,
    connection: Option<Connection>,
}

/// Callers of a closed loop.
#[derive(Clone, Copy)]
struct ClosedLoopCallers {
    next: u64,
    duration: Duration,
}

pub(crate) struct Generator {
    shared: Arc<SharedState>,
    target: ConnectTarget,
    timeout: Duration,
    in_flight_max: usize,
    start: Instant,
    pacer: Pacer,
    /// By task; `None` for tasks with a schedule.
    callers: Vec<Option<ClosedLoopCallers>>,
    /// Callers that wait before their next request, and until when.
    waiting_callers: VecDeque<(Instant, usize)>,
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
        let schedules = options.tasks.iter().enumerate().filter_map(|(index, task)| {
            // With equal seeds, tasks would start their requests at the same moments.
            let seed = options.seed.wrapping_add(index as u64);
            let schedule = match (&task.pacing, &task.workload.trace) {
                (Pacing::Open { profile, arrival }, _) => {
                    ArrivalSchedule::new(*arrival, profile.clone(), seed)
                }
                (Pacing::Replay { .. }, Some(trace)) => ArrivalSchedule::recorded(trace.starts()),
                (Pacing::Replay { .. }, None) | (Pacing::Closed { .. }, _) => return None,
            };
            Some((index, schedule))
        });
        let mut waiting_callers = VecDeque::new();
        let callers = options.tasks.iter().enumerate().map(|(index, task)| match task.pacing {
            Pacing::Closed { callers, duration } => {
                waiting_callers.extend(std::iter::repeat_n((start, index), callers));
                Some(ClosedLoopCallers { next: 0, duration })
            }
            Pacing::Open { .. } | Pacing::Replay { .. } => None,
        });
        Ok(Generator {
            target,
            timeout: options.timeout,
            in_flight_max: options.in_flight_max,
            start,
            pacer: Pacer::new(schedules, start),
            callers: callers.collect(),
            waiting_callers,
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
            if self.waiting_callers.front().is_some_and(|(until, _)| *until <= now) {
                let (until, task) = self.waiting_callers.pop_front()?;
                self.start_caller_request(task, until);
                continue;
            }
            match self.pacer.next(now) {
                PaceDecision::Start(intended) => self.launch(intended, false),
                PaceDecision::Wait(span) => {
                    return Some(self.next_caller_wait(now).map_or(span, |rest| rest.min(span)));
                }
                PaceDecision::Finished => {
                    // A caller with a request in flight will send another one.
                    let rested = self.next_caller_wait(now);
                    return rested.or((self.in_flight > 0).then_some(WAIT_MAX));
                }
            }
        }
        Some(Duration::ZERO)
    }

    fn next_caller_wait(&self, now: Instant) -> Option<Duration> {
        self.waiting_callers.front().map(|(until, _)| until.saturating_duration_since(now))
    }

    /// Starts the next request of a caller that is free since `at`.
    fn start_caller_request(&mut self, task: usize, at: Instant) {
        let offset = at.saturating_duration_since(self.start);
        if let Some(Some(callers)) = self.callers.get_mut(task)
            && offset < callers.duration
            && !self.shared.stop.load(Ordering::Relaxed)
        {
            let number = callers.next;
            callers.next += 1;
            self.launch(IntendedStart { task, number, offset, at }, true);
        }
    }

    fn launch(&mut self, intended: IntendedStart, by_caller: bool) {
        let now = Instant::now();
        let requests = &self.shared.requests[intended.task];
        if self.in_flight >= self.in_flight_max {
            let sample = Sample::not_sent(intended, requests.priority(), now);
            self.shared.record().add(sample);
            if by_caller {
                self.waiting_callers.push_back((now + CALLER_FAILURE_DELAY, intended.task));
            }
            return;
        }
        let in_flight = LoadRequest {
            intended,
            by_caller,
            lag: now.saturating_duration_since(intended.at),
            deadline: intended.at + self.timeout,
        };
        requests.write(intended.number, &mut self.body, &mut self.request);
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
        let LoadRequest { intended, by_caller, .. } = in_flight;
        let (at, failed) = (Instant::now(), completion.is_failure());
        let priority = self.shared.requests[intended.task].priority();
        if let Some(sample) = completion.sample(in_flight, priority, at) {
            self.shared.record().add(sample);
        }
        if by_caller && failed {
            self.waiting_callers.push_back((at + CALLER_FAILURE_DELAY, intended.task));
        } else if by_caller {
            self.waiting_callers.push_front((at, intended.task));
        }
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
