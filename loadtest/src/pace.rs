//! What is due now: a timetable laid onto a clock that is handed in.
//!
//! The answer to "what now?" is one of three, and none of them looks at earlier answers. A pacer that was held up
//! (by the machine, by too high a rate) gets every overdue start at once and skips none; how late it was is recorded
//! with each request as the generator's lag.

use std::time::{Duration, Instant};

use crate::arrival::Timetable;

/// One request that is to start, and when it should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntendedStart {
    /// The task that it belongs to, by its place.
    pub task: usize,
    /// Its place in the task, from 0.
    pub number: u64,
    /// The intended start since the start of the run.
    pub offset: Duration,
    /// The same on the clock; latency counts from here.
    pub at: Instant,
}

/// What the pacer does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Start this request now.
    Start(IntendedStart),
    /// Nothing is due for so long.
    Wait(Duration),
    /// The timetable is at its end.
    Finished,
}

/// The timetables of a run's tasks, on one clock.
#[derive(Debug)]
pub struct Pace {
    start: Instant,
    lines: Vec<Line>,
}

/// The timetable of one task.
#[derive(Debug)]
struct Line {
    task: usize,
    timetable: Timetable,
    number: u64,
    upcoming: Duration,
}

impl Pace {
    /// The run of these timetables, each with the place of its task, that begins at `start`.
    pub fn new(timetables: impl IntoIterator<Item = (usize, Timetable)>, start: Instant) -> Pace {
        let lines = timetables.into_iter().filter_map(|(task, mut timetable)| {
            let upcoming = timetable.next()?;
            Some(Line { task, timetable, number: 0, upcoming })
        });
        Pace { start, lines: lines.collect() }
    }

    /// What to do at `now`. A start is handed out once.
    pub fn next(&mut self, now: Instant) -> Next {
        // The first of those that are due at the same time is the first that was asked for.
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
