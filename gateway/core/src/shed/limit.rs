//! Limit of the tokens of one priority that this gateway may have in flight to one pool under overload.
//!
//! While the reported queueing delay is short there is no limit. When it was too long in [`TRIP_AFTER`] consecutive
//! reports (one long delay is a burst, and a queue that absorbs bursts is a good queue, as in CoDel), the limit is the
//! value that would have met the target delay:
//!
//! ```text
//! limit = in flight · target / delay       at least half of what is in flight, report by report
//! ```
//!
//! The delay is the backlog over the speed, so with one gateway this is `target · speed` at once; with several each
//! reduces its own load by the same factor, without knowing of the others. Unlike a limit of requests per second it
//! follows a replica that slows down, and unlike a fixed limit in flight it needs no tuning.
//!
//! It grows by a tenth per report while it is used and the delay is short, and is removed when it was not needed for
//! [`OPEN_AFTER`] reports.

use std::time::Duration;

/// Consecutive reports that must exceed the target delay: 400 ms.
pub(super) const TRIP_AFTER: u32 = 2;
/// Consecutive reports after which an unused limit is removed: 2 s, longer than the retry delay of shed clients.
const OPEN_AFTER: u32 = 10;
/// Minimum growth, so that a limit of a few tokens does not stay there: an interactive request or two.
const GROWTH_MIN: u64 = 64;

/// Limit of one priority.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limit {
    tokens: Option<u64>,
    consecutive_long: u32,
    unused: u32,
    wait: Option<Duration>,
}

impl Limit {
    /// Updates the limit with the reported queueing delay of this priority; `None` if the region does not know it.
    pub(super) fn report(&mut self, wait: Option<Duration>, target: Duration, in_flight: u64) {
        self.wait = wait;
        let Some(wait) = wait else {
            *self = Limit::default();
            return;
        };
        if wait > target {
            self.unused = 0;
            self.consecutive_long = self.consecutive_long.saturating_add(1);
            if self.consecutive_long >= TRIP_AFTER {
                let desired = u128::from(in_flight) * target.as_nanos() / wait.as_nanos();
                let desired = u64::try_from(desired).unwrap_or(u64::MAX).max(in_flight / 2).max(GROWTH_MIN);
                self.tokens = Some(self.tokens.map_or(desired, |tokens| tokens.min(desired)));
            }
            return;
        }
        self.consecutive_long = 0;
        let Some(tokens) = self.tokens else { return };
        if in_flight >= tokens / 2 {
            self.unused = 0;
            self.tokens = Some(tokens.saturating_add((tokens / 10).max(GROWTH_MIN)));
        } else {
            self.unused += 1;
            if self.unused >= OPEN_AFTER {
                self.tokens = None;
            }
        }
    }

    /// Returns whether there is no limit and no delay that could lead to one.
    pub(super) fn is_idle(&self) -> bool {
        self.tokens.is_none() && self.wait.unwrap_or_default().is_zero()
    }

    /// Returns the limit, if there is one.
    pub(super) fn tokens(&self) -> Option<u64> {
        self.tokens
    }

    /// Returns the queueing delay of this priority by the last report.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_secs(1);

    fn report(limit: &mut Limit, wait_ms: u64, in_flight: u64) -> Option<u64> {
        limit.report(Some(Duration::from_millis(wait_ms)), TARGET, in_flight);
        limit.tokens()
    }

    #[test]
    fn one_long_delay_is_a_burst_and_two_set_a_limit() {
        let mut limit = Limit::default();
        assert_eq!(report(&mut limit, 1250, 10_000), None);
        assert_eq!(report(&mut limit, 1000, 10_000), None, "at the target");
        assert_eq!(report(&mut limit, 1250, 10_000), None);
        assert_eq!(report(&mut limit, 1250, 10_000), Some(8_000));
    }

    #[test]
    fn the_limit_is_at_least_half_of_the_load_and_grows_while_it_is_used() {
        let mut limit = Limit::default();
        report(&mut limit, 9000, 10_000);
        assert_eq!(report(&mut limit, 9000, 10_000), Some(5_000));
        assert_eq!(report(&mut limit, 8000, 9_000), Some(4_500), "while the excess drains");
        assert_eq!(report(&mut limit, 900, 2_250), Some(4_950));
        assert_eq!(report(&mut limit, 2000, 5_000), Some(4_950), "one long delay is a burst again");
        assert_eq!(report(&mut limit, 2000, 5_000), Some(2_500));
    }

    #[test]
    fn the_limit_is_removed_after_a_time_without_need() {
        let mut limit = Limit::default();
        report(&mut limit, 2000, 10_000);
        report(&mut limit, 2000, 10_000);
        for _ in 1..OPEN_AFTER {
            assert_eq!(report(&mut limit, 0, 2_499), Some(5_000));
        }
        assert_eq!(report(&mut limit, 0, 2_499), None);
        // And at once when the region no longer knows its speed.
        report(&mut limit, 2000, 10_000);
        report(&mut limit, 2000, 10_000);
        limit.report(None, TARGET, 10_000);
        assert_eq!(limit.tokens(), None);
    }
}
