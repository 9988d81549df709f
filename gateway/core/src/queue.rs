//! Queueing delay of one region, estimated at its former speed.
//!
//! Under a surge a response is slow because of the queue. That is no fault of its region, and a retry elsewhere would
//! waste its capacity when all of it is needed: requests that move on overload the next region, and both are half empty
//! in turn. So an edge adds the queueing delay that the region reports to the first-byte timeout from the latency
//! ([`latency`](crate::latency)).
//!
//! A region that has become ten times slower has a queue too, which must not extend its timeout. So the reported queue
//! length is used as it is, and the reported speed only if it has risen: a fall in speed is adopted slowly. A queue
//! that grows because the region computes less is short at its former speed; one that grows because of more demand is
//! not.
//!
//! The obvious alternative, no timeout while a queue is long, detects a grey failure only at times of low load.

use std::time::{Duration, Instant};

/// Longest queueing delay that extends a timeout: a region that reports an endless queue is not waited for without end.
/// Two seconds are more than the wait at which a gateway sheds interactive requests.
pub const WAIT_MAX: Duration = Duration::from_secs(2);
/// Half-life of a fall in speed: the causes are removed replicas, or other texts than before.
const SPEED_DROP_HALF_LIFE: Duration = Duration::from_secs(10);

/// Queue of one deployment in one region.
#[derive(Clone, Copy, Debug)]
pub struct RegionQueue {
    pending_tokens: u64,
    /// Speed of the region in tokens a second, smoothed for falls; 0 while it is not known.
    speed: f64,
    updated: Instant,
}

impl RegionQueue {
    /// Updates `before` with a report of the region.
    pub fn updated(
        before: Option<RegionQueue>,
        pending_tokens: u64,
        tokens_per_second: f64,
        now: Instant,
    ) -> RegionQueue {
        let remaining_drop = before.map_or(0.0, |before| {
            let halvings =
                now.saturating_duration_since(before.updated).div_duration_f64(SPEED_DROP_HALF_LIFE);
            (before.speed - tokens_per_second) * 0.5f64.powf(halvings)
        });
        RegionQueue { pending_tokens, speed: tokens_per_second + remaining_drop.max(0.0), updated: now }
    }

    /// Returns the queueing delay.
    pub fn wait(self) -> Duration {
        if self.speed <= 0.0 {
            return Duration::ZERO;
        }
        Duration::from_secs_f64((self.pending_tokens as f64 / self.speed).min(WAIT_MAX.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_queueing_delay_is_the_queue_over_the_speed_up_to_the_maximum() {
        for (pending, speed, millis) in
            [(0, 1000.0, 0), (100, 1000.0, 100), (2000, 1000.0, 2000), (2001, 1000.0, 2000), (500, 0.0, 0)]
        {
            let queue = RegionQueue::updated(None, pending, speed, some_instant());
            assert_eq!(queue.wait(), millis * MS, "{pending} at {speed}");
        }
    }

    #[test]
    fn the_queue_of_a_slowed_region_is_short_at_its_former_speed_and_that_of_a_surge_is_not() {
        let now = some_instant();
        let before = RegionQueue::updated(None, 10, 1000.0, now);
        let report = 200 * MS;
        // A tenth of its speed, at half of its former load: the queue is a fifth of a second of unfinished work.
        let slow = RegionQueue::updated(Some(before), 80, 100.0, now + report);
        assert!(slow.wait() < 85 * MS, "{slow:?}; eight hundred at the reported speed");
        let surge = RegionQueue::updated(Some(before), 300, 1000.0, now + report);
        assert_eq!(surge.wait(), 300 * MS);
    }

    #[test]
    fn a_risen_speed_is_adopted_at_once_and_a_fallen_one_slowly() {
        let now = some_instant();
        let before = RegionQueue::updated(None, 100, 1000.0, now);
        assert_eq!(RegionQueue::updated(Some(before), 100, 2000.0, now).wait(), 50 * MS);
        let halved = RegionQueue::updated(Some(before), 600, 200.0, now + SPEED_DROP_HALF_LIFE);
        assert_eq!(halved.wait(), 1000 * MS, "600 of a thousand and two hundred");
        let long_ago = RegionQueue::updated(Some(before), 100, 200.0, now + 20 * SPEED_DROP_HALF_LIFE);
        assert!(long_ago.wait().abs_diff(500 * MS) < MS, "{long_ago:?}");
    }

    proptest! {
        #[test]
        fn no_report_extends_a_timeout_beyond_the_maximum(reports in prop::collection::vec((any::<u64>(), 0.0f64..1e18, 0u64..1_000_000), 1..20)) {
            let mut now = some_instant();
            let mut queue = None;
            for (pending, speed, millis) in reports {
                now += Duration::from_millis(millis);
                let updated = RegionQueue::updated(queue, pending, speed, now);
                prop_assert!(updated.wait() <= WAIT_MAX);
                queue = Some(updated);
            }
        }
    }
}
