//! How much of one priority this gateway may have in flight to one pool, when there is too much.
//!
//! As long as the wait that the region reports is short there is no limit. When it was too long in [`TRIP_AFTER`] reports
//! in a row (one long wait is a burst, and a queue that swallows bursts is a good queue: CoDel's lesson), the limit is
//! what would have made the wait right:
//!
//! ```text
//! limit = in flight · target / wait        at least half of what is in flight, report by report
//! ```
//!
//! The wait is the backlog over the speed, so with one gateway this is `target · speed` at once; with several each takes
//! back the same share of its own, and none needs to know of the others. Unlike a count of requests per second it follows
//! a replica that slows down, and unlike a fixed count in flight it needs nobody to find it out.
//!
//! It grows again by a tenth a report while it is used and the wait is short, and goes when for [`OPEN_AFTER`] reports it
//! was not needed.

use std::time::Duration;

/// Reports in a row that must find the wait too long: 400 ms.
pub(super) const TRIP_AFTER: u32 = 2;
/// Reports in a row after which a limit that nobody needs is given up: 2 s, longer than clients told to come back take.
const OPEN_AFTER: u32 = 10;
/// What a limit grows by at least, so that one of a few tokens is not one for ever: a lookup or two.
const GROWTH_MIN: u64 = 64;

/// The limit of one priority.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limit {
    tokens: Option<u64>,
    too_long: u32,
    unneeded: u32,
    wait: Option<Duration>,
}

impl Limit {
    /// The region has said how long a request of this priority waits there; nothing, if it does not know.
    pub(super) fn heard(&mut self, wait: Option<Duration>, target: Duration, in_flight: u64) {
        self.wait = wait;
        let Some(wait) = wait else {
            *self = Limit::default();
            return;
        };
        if wait > target {
            self.unneeded = 0;
            self.too_long = self.too_long.saturating_add(1);
            if self.too_long >= TRIP_AFTER {
                let right = u128::from(in_flight) * target.as_nanos() / wait.as_nanos();
                let right = u64::try_from(right).unwrap_or(u64::MAX).max(in_flight / 2).max(GROWTH_MIN);
                self.tokens = Some(self.tokens.map_or(right, |tokens| tokens.min(right)));
            }
            return;
        }
        self.too_long = 0;
        let Some(tokens) = self.tokens else { return };
        if in_flight >= tokens / 2 {
            self.unneeded = 0;
            self.tokens = Some(tokens.saturating_add((tokens / 10).max(GROWTH_MIN)));
        } else {
            self.unneeded += 1;
            if self.unneeded >= OPEN_AFTER {
                self.tokens = None;
            }
        }
    }

    /// The limit, if there is one.
    pub(super) fn tokens(&self) -> Option<u64> {
        self.tokens
    }

    /// How long a request of this priority waits, by the last report.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_secs(1);

    fn heard(limit: &mut Limit, wait_ms: u64, in_flight: u64) -> Option<u64> {
        limit.heard(Some(Duration::from_millis(wait_ms)), TARGET, in_flight);
        limit.tokens()
    }

    #[test]
    fn one_long_wait_is_a_burst_and_two_are_too_much() {
        let mut limit = Limit::default();
        assert_eq!(heard(&mut limit, 1250, 10_000), None);
        assert_eq!(heard(&mut limit, 1000, 10_000), None, "at the target");
        assert_eq!(heard(&mut limit, 1250, 10_000), None);
        assert_eq!(heard(&mut limit, 1250, 10_000), Some(8_000));
    }

    #[test]
    fn it_takes_back_no_more_than_half_at_once_and_grows_while_it_is_used() {
        let mut limit = Limit::default();
        heard(&mut limit, 9000, 10_000);
        assert_eq!(heard(&mut limit, 9000, 10_000), Some(5_000));
        assert_eq!(heard(&mut limit, 8000, 9_000), Some(4_500), "while what is too much flows off");
        assert_eq!(heard(&mut limit, 900, 2_250), Some(4_950));
        assert_eq!(heard(&mut limit, 2000, 5_000), Some(4_950), "one long wait is a burst again");
        assert_eq!(heard(&mut limit, 2000, 5_000), Some(2_500));
    }

    #[test]
    fn it_goes_when_it_was_not_needed_for_a_while() {
        let mut limit = Limit::default();
        heard(&mut limit, 2000, 10_000);
        heard(&mut limit, 2000, 10_000);
        for _ in 1..OPEN_AFTER {
            assert_eq!(heard(&mut limit, 0, 2_499), Some(5_000));
        }
        assert_eq!(heard(&mut limit, 0, 2_499), None);
        // And at once when the region no longer knows its speed.
        heard(&mut limit, 2000, 10_000);
        heard(&mut limit, 2000, 10_000);
        limit.heard(None, TARGET, 10_000);
        assert_eq!(limit.tokens(), None);
    }
}
