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
    /// Its place in the run, from 0.
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

/// A timetable on a clock.
#[derive(Debug)]
pub struct Pace {
    timetable: Timetable,
    start: Instant,
    number: u64,
    upcoming: Option<Duration>,
}

impl Pace {
    /// The run of `timetable` that begins at `start`.
    pub fn new(mut timetable: Timetable, start: Instant) -> Pace {
        let upcoming = timetable.next();
        Pace { timetable, start, number: 0, upcoming }
    }

    /// What to do at `now`. A start is handed out once.
    pub fn next(&mut self, now: Instant) -> Next {
        let Some(offset) = self.upcoming else {
            return Next::Finished;
        };
        let at = self.start + offset;
        if at > now {
            return Next::Wait(at - now);
        }
        let number = self.number;
        self.number += 1;
        self.upcoming = self.timetable.next();
        Next::Start(IntendedStart { number, offset, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::ArrivalProcess;
    use crate::profile::tests::profile;

    fn ten_a_second_for_half_a_second(start: Instant) -> Pace {
        Pace::new(Timetable::new(ArrivalProcess::Constant, profile("10 for 500ms"), 0), start)
    }

    #[test]
    fn a_request_is_due_at_its_time_and_once() {
        let start = Instant::now();
        let mut pace = ten_a_second_for_half_a_second(start);
        assert_eq!(
            pace.next(start),
            Next::Start(IntendedStart { number: 0, offset: Duration::ZERO, at: start })
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
            assert_eq!(pace.next(late), Next::Start(IntendedStart { number, offset, at: start + offset }));
        }
        assert_eq!(pace.next(late), Next::Finished);
    }
}
