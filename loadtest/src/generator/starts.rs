//! Starts of requests: those that the schedules of the tasks make due, and those of closed-loop callers.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::arrival::ArrivalSchedule;
use crate::options::Options;
use crate::pace::{IntendedStart, PaceDecision, Pacer};
use crate::task::Pacing;

/// Delay of a closed-loop caller after a failure. Without it, callers of an unreachable server would send requests in a
/// busy loop.
const CALLER_FAILURE_DELAY: Duration = Duration::from_millis(100);

/// Wait of a run whose remaining requests depend on responses.
const RESPONSE_WAIT: Duration = Duration::from_millis(10);

/// Request to start now.
#[derive(Clone, Copy, Debug)]
pub(super) struct DueRequest {
    pub(super) intended: IntendedStart,
    /// Whether the request belongs to a closed-loop caller.
    pub(super) by_caller: bool,
}

/// Decision about the next start.
#[derive(Clone, Copy, Debug)]
pub(super) enum StartDecision {
    /// Send this request now.
    Launch(DueRequest),
    /// No request is due for this time.
    Wait(Duration),
    /// No further request will be due.
    Finished,
}

/// Callers of a closed loop.
#[derive(Clone, Copy)]
struct ClosedLoopCallers {
    next: u64,
    duration: Duration,
}

/// Starts of the requests of a run.
pub(super) struct Starts {
    start: Instant,
    pacer: Pacer,
    /// By task; `None` for tasks with a schedule.
    callers: Vec<Option<ClosedLoopCallers>>,
    /// Callers that wait before their next request, and until when.
    waiting_callers: VecDeque<(Instant, usize)>,
}

impl Starts {
    /// Creates the starts of a run that begins at `start`.
    pub(super) fn new(options: &Options, start: Instant) -> Starts {
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
        let callers = callers.collect();
        Starts { start, pacer: Pacer::new(schedules, start), callers, waiting_callers }
    }

    /// Returns the decision at `now`. Each request is returned once. `has_in_flight`: whether a caller may send another
    /// request after a response.
    pub(super) fn next(&mut self, now: Instant, has_in_flight: bool) -> StartDecision {
        while let Some((until, task)) = self.waiting_callers.pop_front_if(|(until, _)| *until <= now) {
            if let Some(due) = self.of_caller(task, until) {
                return StartDecision::Launch(due);
            }
        }
        let caller = self.waiting_callers.front();
        let caller_wait = caller.map(|(until, _)| until.saturating_duration_since(now));
        match self.pacer.next(now) {
            PaceDecision::Start(intended) => StartDecision::Launch(DueRequest { intended, by_caller: false }),
            PaceDecision::Wait(span) => StartDecision::Wait(caller_wait.map_or(span, |wait| wait.min(span))),
            PaceDecision::Finished => match caller_wait {
                Some(wait) => StartDecision::Wait(wait),
                None if has_in_flight => StartDecision::Wait(RESPONSE_WAIT),
                None => StartDecision::Finished,
            },
        }
    }

    /// Returns the next request of a caller that is free since `at`.
    fn of_caller(&mut self, task: usize, at: Instant) -> Option<DueRequest> {
        let offset = at.saturating_duration_since(self.start);
        let callers = self.callers.get_mut(task)?.as_mut().filter(|callers| offset < callers.duration)?;
        let number = callers.next;
        callers.next += 1;
        Some(DueRequest { intended: IntendedStart { task, number, offset, at }, by_caller: true })
    }

    /// Makes the caller of a request free again, after a delay if the request failed or was not sent.
    pub(super) fn ended(&mut self, due: DueRequest, at: Instant, failed: bool) {
        match due {
            DueRequest { by_caller: false, .. } => {}
            DueRequest { intended, .. } if failed => {
                self.waiting_callers.push_back((at + CALLER_FAILURE_DELAY, intended.task));
            }
            DueRequest { intended, .. } => self.waiting_callers.push_front((at, intended.task)),
        }
    }
}
