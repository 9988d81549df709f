//! Pacer: maps the arrival schedules of a run to a clock that is passed in.
//!
//! Its decision does not depend on earlier responses. A pacer that was delayed (by the machine, or by too high a rate)
//! returns every overdue start at once and skips none; the delay is recorded with each request as the generator's lag.

use std::time::{Duration, Instant};

use crate::arrival::ArrivalSchedule;

/// Request to start, with its intended start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntendedStart {
    /// Index of its task.
    pub task: usize,
    /// Index of the request within the task.
    pub number: u64,
    /// Intended start since the start of the run.
    pub offset: Duration,
    /// Intended start on the clock; the latency counts from here.
    pub at: Instant,
}

/// Decision of the pacer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaceDecision {
    /// Start this request now.
    Start(IntendedStart),
    /// No request is due for this time.
    Wait(Duration),
    /// All schedules are exhausted.
    Finished,
}

/// Arrival schedules of the tasks of a run, on one clock.
#[derive(Debug)]
pub struct Pacer {
    start: Instant,
    schedules: Vec<TaskSchedule>,
}

/// Arrival schedule of one task.
#[derive(Debug)]
struct TaskSchedule {
    task: usize,
    arrivals: ArrivalSchedule,
    number: u64,
    upcoming: Duration,
}

impl Pacer {
    /// Creates a pacer for schedules with the index of their tasks; the run begins at `start`.
    pub fn new(schedules: impl IntoIterator<Item = (usize, ArrivalSchedule)>, start: Instant) -> Pacer {
        let schedules = schedules.into_iter().filter_map(|(task, mut arrivals)| {
            let upcoming = arrivals.next()?;
            Some(TaskSchedule { task, arrivals, number: 0, upcoming })
        });
        Pacer { start, schedules: schedules.collect() }
    }

    /// Returns the decision at `now`. Each start is returned once.
    pub fn next(&mut self, now: Instant) -> PaceDecision {
        // Among requests due at the same time, the task that comes first wins.
        let Some(index) = (0..self.schedules.len()).min_by_key(|index| self.schedules[*index].upcoming)
        else {
            return PaceDecision::Finished;
        };
        let schedule = &mut self.schedules[index];
        let TaskSchedule { task, number, upcoming: offset, .. } = *schedule;
        let at = self.start + offset;
        if at > now {
            return PaceDecision::Wait(at - now);
        }
        schedule.number += 1;
        match schedule.arrivals.next() {
            Some(upcoming) => schedule.upcoming = upcoming,
            None => drop(self.schedules.remove(index)),
        }
        PaceDecision::Start(IntendedStart { task, number, offset, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::ArrivalProcess;
    use crate::profile::tests::profile;

    fn ten_a_second_for_half_a_second(start: Instant) -> Pacer {
        Pacer::new([(0, arrivals("10 for 500ms"))], start)
    }

    fn arrivals(text: &str) -> ArrivalSchedule {
        ArrivalSchedule::new(ArrivalProcess::Constant, profile(text), 0)
    }

    #[test]
    fn tasks_are_started_in_the_order_of_their_times() {
        let start = Instant::now();
        let mut pace = Pacer::new([(0, arrivals("10 for 300ms")), (2, arrivals("5 for 1s"))], start);
        let mut started = Vec::new();
        while let PaceDecision::Start(intended) = pace.next(start + Duration::from_secs(1)) {
            started.push((intended.offset.as_millis(), intended.task, intended.number));
        }
        let queries = [(0, 0, 0), (100, 0, 1), (200, 0, 2)];
        let backfill = [(0, 2, 0), (200, 2, 1), (400, 2, 2), (600, 2, 3), (800, 2, 4)];
        let mut expected: Vec<_> = queries.into_iter().chain(backfill).collect();
        expected.sort();
        assert_eq!(started, expected);
    }

    #[test]
    fn a_request_is_due_at_its_time_and_once() {
        let start = Instant::now();
        let mut pace = ten_a_second_for_half_a_second(start);
        assert_eq!(
            pace.next(start),
            PaceDecision::Start(IntendedStart { task: 0, number: 0, offset: Duration::ZERO, at: start })
        );
        assert_eq!(pace.next(start), PaceDecision::Wait(Duration::from_millis(100)));
        assert_eq!(
            pace.next(start + Duration::from_millis(60)),
            PaceDecision::Wait(Duration::from_millis(40))
        );
    }

    #[test]
    fn a_delayed_pacer_skips_no_request_and_keeps_the_intended_starts() {
        let start = Instant::now();
        let mut pace = ten_a_second_for_half_a_second(start);
        let late = start + Duration::from_secs(60);
        for number in 0..5 {
            let offset = Duration::from_millis(100 * number);
            assert_eq!(
                pace.next(late),
                PaceDecision::Start(IntendedStart { task: 0, number, offset, at: start + offset })
            );
        }
        assert_eq!(pace.next(late), PaceDecision::Finished);
    }
}
