//! Generator: one thread that starts requests on time and reads their responses.
//!
//! A load generator that is slower than its target measures itself. So there is no task, no channel and no allocation per
//! request: one thread asks the pacer for due requests ([`Pacer`]), writes each to a kept connection, waits in epoll until
//! the next start or the next response, and reads. A small request costs one write, one read and a share of one wait.
//! Expensive work, the validation of large responses, runs on another thread ([`inspector`]), so that bulk responses do not
//! delay the start of interactive requests.
//!
//! A request never waits for the response to another one: there are as many connections as requests in flight, up to a limit
//! above which a request is *not sent* and counts as failed.

mod connection;
mod http1;
mod inspector;
pub(crate) mod requests;
mod shared;
pub(crate) mod stream;

pub(crate) use shared::{Shared, Target};

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::time::Timespec;

use crate::arrival::Timetable;
use crate::exchange::{Failure, Sample};
use crate::options::Options;
use crate::pace::{IntendedStart, Next, Pace};
use crate::task::Pacing;
use connection::{Answered, Connection, InFlight, Turn};
use inspector::Inspector;
use stream::Stream;

/// Longest wait: upper bound of the delay until a stop request or a timeout is noticed.
const SLEEP_MAX: Duration = Duration::from_millis(10);

/// Maximum consecutive starts before responses are read.
const STARTS_IN_A_ROW_MAX: usize = 64;

/// Maximum events per wait; others follow in the next one.
const EVENTS_MAX: usize = 256;

/// Size of one read.
const READ_BYTES: usize = 64 << 10;

/// Delay of a closed-loop caller after a failure. Without it, callers of an unreachable server would send requests in a
/// busy loop.
const CALLER_RESTS: Duration = Duration::from_millis(100);

/// Slot of a connection. epoll's user data is the slot's index with its generation, so that an event of a closed connection
/// is not attributed to its successor.
#[derive(Default)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

/// Callers of a closed loop.
#[derive(Clone, Copy)]
struct Callers {
    next: u64,
    lasts: Duration,
}

pub(crate) struct Engine {
    shared: Arc<Shared>,
    target: Target,
    timeout: Duration,
    in_flight_max: usize,
    start: Instant,
    pace: Pace,
    /// By task; `None` for tasks with a schedule.
    callers: Vec<Option<Callers>>,
    /// Callers that wait before their next request, and until when.
    resting: VecDeque<(Instant, usize)>,
    epoll: OwnedFd,
    slots: Vec<Slot>,
    vacant: Vec<usize>,
    idle: Vec<usize>,
    in_flight: usize,
    inspector: Inspector,
    read: Vec<u8>,
    body: Vec<u8>,
    request: Vec<u8>,
}

impl Engine {
    /// Creates the generator of a run that begins at `start`.
    pub(crate) fn new(
        options: &Options,
        target: Target,
        shared: Arc<Shared>,
        start: Instant,
    ) -> io::Result<Engine> {
        let timetables = options.tasks.iter().enumerate().filter_map(|(place, task)| {
            // With equal seeds, tasks would start their requests at the same moments.
            let seed = options.seed.wrapping_add(place as u64);
            let timetable = match (&task.pacing, &task.workload.trace) {
                (Pacing::Open { profile, arrival }, _) => Timetable::new(*arrival, profile.clone(), seed),
                (Pacing::Replayed { .. }, Some(trace)) => Timetable::recorded(trace.starts()),
                (Pacing::Replayed { .. }, None) | (Pacing::Closed { .. }, _) => return None,
            };
            Some((place, timetable))
        });
        let mut resting = VecDeque::new();
        let callers = options.tasks.iter().enumerate().map(|(place, task)| match task.pacing {
            Pacing::Closed { callers, lasts } => {
                resting.extend(std::iter::repeat_n((start, place), callers));
                Some(Callers { next: 0, lasts })
            }
            Pacing::Open { .. } | Pacing::Replayed { .. } => None,
        });
        Ok(Engine {
            target,
            timeout: options.timeout,
            in_flight_max: options.in_flight_max,
            start,
            pace: Pace::new(timetables, start),
            callers: callers.collect(),
            resting,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            slots: Vec::new(),
            vacant: Vec::new(),
            idle: Vec::new(),
            in_flight: 0,
            inspector: Inspector::start(Arc::clone(&shared))?,
            read: vec![0; READ_BYTES],
            body: Vec::new(),
            request: Vec::new(),
            shared,
        })
    }

    /// Runs until all tasks end or a stop is requested, and awaits requests in flight. Returns whether all tasks ended.
    pub(crate) fn run(mut self) -> io::Result<bool> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut overdue_at = self.start;
        let (mut stopped, mut ended) = (false, false);
        while !ended {
            let now = Instant::now();
            stopped = stopped || self.shared.stop.load(Ordering::Relaxed);
            let wait = if stopped { None } else { self.start_what_is_due(now) };
            ended = wait.is_none() && self.in_flight == 0;
            if now >= overdue_at {
                self.give_up_on_the_overdue(now);
                overdue_at = now + SLEEP_MAX;
            }
            if !ended {
                self.sleep(wait.unwrap_or(SLEEP_MAX).min(SLEEP_MAX), &mut events)?;
                for event in events.drain(..) {
                    self.attend(event);
                }
            }
            self.shared.in_flight.store(self.in_flight, Ordering::Relaxed);
        }
        self.inspector.finish();
        Ok(!stopped)
    }

    /// Starts due requests; returns the time until the next start, or `None` if there is none.
    fn start_what_is_due(&mut self, now: Instant) -> Option<Duration> {
        for _ in 0..STARTS_IN_A_ROW_MAX {
            if self.resting.front().is_some_and(|(until, _)| *until <= now) {
                let (until, task) = self.resting.pop_front()?;
                self.ask_again(task, until);
                continue;
            }
            match self.pace.next(now) {
                Next::Start(intended) => self.launch(intended, false),
                Next::Wait(span) => {
                    return Some(self.until_a_caller_is_rested(now).map_or(span, |rest| rest.min(span)));
                }
                Next::Finished => {
                    // A caller with a request in flight will send another one.
                    let rested = self.until_a_caller_is_rested(now);
                    return rested.or((self.in_flight > 0).then_some(SLEEP_MAX));
                }
            }
        }
        Some(Duration::ZERO)
    }

    fn until_a_caller_is_rested(&self, now: Instant) -> Option<Duration> {
        self.resting.front().map(|(until, _)| until.saturating_duration_since(now))
    }

    /// Starts the next request of a caller that is free since `at`.
    fn ask_again(&mut self, task: usize, at: Instant) {
        let offset = at.saturating_duration_since(self.start);
        if let Some(Some(callers)) = self.callers.get_mut(task)
            && offset < callers.lasts
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
                self.resting.push_back((now + CALLER_RESTS, intended.task));
            }
            return;
        }
        let in_flight = InFlight {
            intended,
            by_caller,
            lag: now.saturating_duration_since(intended.at),
            deadline: intended.at + self.timeout,
        };
        requests.write(intended.number, &mut self.body, &mut self.request);
        self.in_flight += 1;
        while let Some(place) = self.idle.pop() {
            if let Some(mut connection) = self.slots[place].connection.take() {
                // A connection that was closed meanwhile accepts no byte; try the next one.
                if connection.begin(in_flight, &self.request) {
                    self.settle(place, connection, Turn::GoesOn);
                    return;
                }
                self.vacate(place);
            }
        }
        self.open(in_flight);
    }

    /// Sends the prepared request over a new connection.
    fn open(&mut self, in_flight: InFlight) {
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        let opened = Stream::connect(self.target.address, self.target.tls.as_ref()).and_then(|stream| {
            let connection = Connection::new(stream, in_flight, &self.request);
            let data = word(place, self.slots[place].generation);
            epoll::add(&self.epoll, connection.fd(), data, connection.interest())?;
            Ok(connection)
        });
        match opened {
            Ok(connection) => self.slots[place].connection = Some(connection),
            Err(_) => {
                self.vacate(place);
                self.end(in_flight, Answered::not(Failure::Unreachable));
            }
        }
    }

    fn sleep(&self, span: Duration, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let span = Timespec { tv_sec: span.as_secs() as i64, tv_nsec: span.subsec_nanos().into() };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&span)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Handles an epoll event.
    fn attend(&mut self, event: epoll::Event) {
        let (place, generation) = ((event.data.u64() & u64::from(u32::MAX)) as usize, event.data.u64() >> 32);
        let Some(slot) = self.slots.get_mut(place).filter(|slot| u64::from(slot.generation) == generation)
        else {
            return;
        };
        let Some(mut connection) = slot.connection.take() else { return };
        let shared = &self.shared;
        let inspector = &self.inspector;
        let turn = connection.attend(event.flags, &mut self.read, |in_flight, whole| {
            let requests = &shared.requests[in_flight.intended.task];
            inspector.look(requests, in_flight, whole)
        });
        self.settle(place, connection, turn);
    }

    /// Returns a connection to its slot, or closes it, after its events were processed.
    fn settle(&mut self, place: usize, mut connection: Connection, turn: Turn) {
        let (answered, kept) = match turn {
            Turn::GoesOn => (None, true),
            Turn::Answered(answered, kept) => (Some(answered), kept),
        };
        let mut ended = answered.and_then(|answered| Some((connection.take_in_flight()?, answered)));
        let kept = kept
            && match connection.changed_interest() {
                None => true,
                Some(interest) => {
                    let data = word(place, self.slots[place].generation);
                    epoll::modify(&self.epoll, connection.fd(), data, interest).is_ok()
                }
            };
        if !kept && let Some(in_flight) = connection.take_in_flight() {
            ended = Some((in_flight, Answered::not(Failure::BrokenOff)));
        }
        // An idle connection stays registered, so that its end is noticed.
        if kept {
            if ended.is_some() {
                self.idle.push(place);
            }
            self.slots[place].connection = Some(connection);
        } else {
            self.idle.retain(|idle| *idle != place);
            drop(connection);
            self.vacate(place);
        }
        if let Some((in_flight, answered)) = ended {
            self.end(in_flight, answered);
        }
    }

    /// Frees a slot. Closing the socket has already removed it from epoll.
    fn vacate(&mut self, place: usize) {
        let slot = &mut self.slots[place];
        slot.generation = slot.generation.wrapping_add(1);
        slot.connection = None;
        self.vacant.push(place);
    }

    /// Records the end of a request.
    fn end(&mut self, in_flight: InFlight, answered: Answered) {
        self.in_flight -= 1;
        let InFlight { intended, by_caller, .. } = in_flight;
        let (at, failed) = (Instant::now(), answered.is_failure());
        let priority = self.shared.requests[intended.task].priority();
        if let Some(sample) = answered.sample(in_flight, priority, at) {
            self.shared.record().add(sample);
        }
        if by_caller && failed {
            self.resting.push_back((at + CALLER_RESTS, intended.task));
        } else if by_caller {
            self.resting.push_front((at, intended.task));
        }
    }

    fn give_up_on_the_overdue(&mut self, now: Instant) {
        for place in 0..self.slots.len() {
            let slot = &mut self.slots[place];
            if slot.connection.as_ref().is_some_and(|connection| connection.is_overdue(now))
                && let Some(connection) = slot.connection.take()
            {
                self.settle(place, connection, Turn::Answered(Answered::not(Failure::Timeout), false));
            }
        }
    }
}

fn word(place: usize, generation: u32) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(generation) << 32 | place as u64)
}
