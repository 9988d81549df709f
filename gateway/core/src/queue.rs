//! How long those who wait in a region already will take it, if it is as quick as it was.
//!
//! Under a surge an answer is late because of those before it. That is no fault of its region, and to leave it for that
//! throws its room away when everybody needs it: whoever goes on to the next makes that one late, and both stand half empty
//! in turn. So an edge is patient with a region for as long as the work takes ([`pace`](crate::pace)), and for the queue that
//! the region reports beside.
//!
//! A region that has become ten times slower has a queue too, and must not be excused by it. So a region is believed how
//! much waits in it, and how quick it is only where it says that it is quicker: a speed that has fallen is forgotten slowly.
//! A queue that grows because the region computes less is short at the speed that it had; one that grows because more is
//! asked is not.
//!
//! The obvious other way, that nobody is late where many wait, finds a grey region only at night.

use std::time::{Duration, Instant};

/// The longest queue that excuses anybody: a region that claims an endless one is not waited for without end. Two seconds
/// are more than a gateway lets wait anywhere before it turns lookups away.
pub const WAIT_MAX: Duration = Duration::from_secs(2);
/// A fall in speed is half believed after this: replicas that have gone, or other texts than before.
const BELIEVED_BY_HALF: Duration = Duration::from_secs(10);

/// What waits in one region for one deployment.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    pending_tokens: u64,
    /// The speed that the region had, in tokens a second; 0 while it is not known.
    speed: f64,
    heard: Instant,
}

impl Queue {
    /// What a region says now, after what it said `before`.
    pub fn heard(before: Option<Queue>, pending_tokens: u64, tokens_per_second: f64, now: Instant) -> Queue {
        let fallen = before.map_or(0.0, |before| {
            let halvings = now.saturating_duration_since(before.heard).div_duration_f64(BELIEVED_BY_HALF);
            (before.speed - tokens_per_second) * 0.5f64.powf(halvings)
        });
        Queue { pending_tokens, speed: tokens_per_second + fallen.max(0.0), heard: now }
    }

    /// How long it takes.
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
    fn a_queue_takes_what_is_in_it_at_the_speed_of_its_region_and_excuses_no_more_than_it_may() {
        for (pending, speed, millis) in
            [(0, 1000.0, 0), (100, 1000.0, 100), (2000, 1000.0, 2000), (2001, 1000.0, 2000), (500, 0.0, 0)]
        {
            let queue = Queue::heard(None, pending, speed, some_instant());
            assert_eq!(queue.wait(), millis * MS, "{pending} at {speed}");
        }
    }

    #[test]
    fn who_becomes_slow_is_not_excused_by_its_queue_and_who_is_asked_more_is() {
        let now = some_instant();
        let before = Queue::heard(None, 10, 1000.0, now);
        let report = 200 * MS;
        // A tenth of its speed, half of which was asked: what waits is what it has not done of a fifth of a second.
        let slow = Queue::heard(Some(before), 80, 100.0, now + report);
        assert!(slow.wait() < 85 * MS, "{slow:?}, and really eight hundred");
        let surge = Queue::heard(Some(before), 300, 1000.0, now + report);
        assert_eq!(surge.wait(), 300 * MS);
    }

    #[test]
    fn a_speed_that_has_risen_is_believed_at_once_and_one_that_has_fallen_in_time() {
        let now = some_instant();
        let before = Queue::heard(None, 100, 1000.0, now);
        assert_eq!(Queue::heard(Some(before), 100, 2000.0, now).wait(), 50 * MS);
        let halved = Queue::heard(Some(before), 600, 200.0, now + BELIEVED_BY_HALF);
        assert_eq!(halved.wait(), 1000 * MS, "600 of a thousand and two hundred");
        let long_ago = Queue::heard(Some(before), 100, 200.0, now + 20 * BELIEVED_BY_HALF);
        assert!(long_ago.wait().abs_diff(500 * MS) < MS, "{long_ago:?}");
    }

    proptest! {
        #[test]
        fn no_word_of_a_region_excuses_it_for_ever(said in prop::collection::vec((any::<u64>(), 0.0f64..1e18, 0u64..1_000_000), 1..20)) {
            let mut now = some_instant();
            let mut queue = None;
            for (pending, speed, millis) in said {
                now += Duration::from_millis(millis);
                let heard = Queue::heard(queue, pending, speed, now);
                prop_assert!(heard.wait() <= WAIT_MAX);
                queue = Some(heard);
            }
        }
    }
}
