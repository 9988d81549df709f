//! Pacer: maps the arrival schedules of a run to a clock that is passed in.
//!
//! Its decision does not depend on earlier responses. A pacer that was delayed (by the machine, or by too high a rate)
//! returns every overdue start at once and skips none; the delay is recorded with each request as the generator's lag.

use std::time::{Duration, Instant};

use crate::arrival::Timetable;

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
pub enum Next {
    /// Start this request now.
    Start(IntendedStart),
    /// No request is due for this time.
    Wait(Duration),
    /// All schedules are exhausted.
    Finished,
}

/// Arrival schedules of the tasks of a run, on one clock.
#[derive(Debug)]
pub struct Pace {
    start: Instant,
    lines: Vec<Line>,
}

/// Arrival schedule of one task.
#[derive(Debug)]
struct Line {
    task: usize,
    timetable: Timetable,
    number: u64,
    upcoming: Duration,
}

impl Pace {
    /// Creates a pacer for schedules with the index of their tasks; the run begins at `start`.
    pub fn new(timetables: impl IntoIterator<Item = (usize, Timetable)>, start: Instant) -> Pace {
        let lines = timetables.into_iter().filter_map(|(task, mut timetable)| {
            let upcoming = timetable.next()?;
            Some(Line { task, timetable, number: 0, upcoming })
        });
        Pace { start, lines: lines.collect() }
    }

    /// Returns the decision at `now`. Each start is returned once.
    pub fn next(&mut self, now: Instant) -> Next {
        // Among requests due at the same time, the task that comes first wins.
        let Some(place) = (0..self.lines.len()).min_by_key(|place| self.lines[*place].upcoming) else {
            return Next::Finished;
        };
        let line = &mut self.lines[place];
        let Line { task, number, upcoming: offset, .. } = *line;
        let at = self.start + offset;
        if at > now {
            return Next::Wait(at - now);
        }
        line.number += 1;
        match line.timetable.next() {
            Some(upcoming) => line.upcoming = upcoming,
            None => drop(self.lines.remove(place)),
        }
        Next::Start(IntendedStart { task, number, offset, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::ArrivalProcess;
    use crate::profile::tests::profile;

    fn ten_a_second_for_half_a_second(start: Instant) -> Pace {
        Pace::new([(0, timetable("10 for 500ms"))], start)
    }

    fn timetable(text: &str) -> Timetable {
        Timetable::new(ArrivalProcess::Constant, profile(text), 0)
    }

    #[test]
    fn tasks_are_started_in_the_order_of_their_times() {
        let start = Instant::now();
        let mut pace = Pace::new([(0, timetable("10 for 300ms")), (2, timetable("5 for 1s"))], start);
        let mut started = Vec::new();
        while let Next::Start(intended) = pace.next(start + Duration::from_secs(1)) {
            started.push((intended.offset.as_millis(), intended.task, intended.number));
        }
        let lookups = [(0, 0, 0), (100, 0, 1), (200, 0, 2)];
        let backfill = [(0, 2, 0), (200, 2, 1), (400, 2, 2), (600, 2, 3), (800, 2, 4)];
        let mut expected: Vec<_> = lookups.into_iter().chain(backfill).collect();
        expected.sort();
        assert_eq!(started, expected);
    }

    #[test]
    fn a_request_is_due_at_its_time_and_once() {
        let start = Instant::now();
        let mut pace = ten_a_second_for_half_a_second(start);
        assert_eq!(
            pace.next(start),
            Next::Start(IntendedStart { task: 0, number: 0, offset: Duration::ZERO, at: start })
        );
        assert_eq!(pace.next(start), Next::Wait(Duration::from_millis(100)));
        assert_eq!(pace.next(start + Duration::from_millis(60)), Next::Wait(Duration::from_millis(40)));
    }

    #[test]
    fn a_pacer_that_was_held_up_skips_nothing_and_keeps_the_intended_starts() {
        let start = Instant::now();
        let mut pace = ten_a_second_for_half_a_second(start);
        let late = start + Duration::from_secs(60);
        for number in 0..5 {
            let offset = Duration::from_millis(100 * number);
            assert_eq!(
                pace.next(late),
                Next::Start(IntendedStart { task: 0, number, offset, at: start + offset })
            );
        }
        assert_eq!(pace.next(late), Next::Finished);
    }
}
