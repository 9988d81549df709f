//! Remaining time of a download.
//!
//! The speed is the ratio of two decayed sums, bytes over time, which are updated once a second: a shorter interval measures
//! the bursts of single connections. Bytes that an earlier download left on disk have no influence on the speed.

use std::time::{Duration, Instant};

/// Interval of measurements.
const INTERVAL: Duration = Duration::from_secs(1);
/// Decay per measurement: 0.9 remembers about the last ten seconds.
const DECAY: f64 = 0.9;

/// Progress and speed of a download.
#[derive(Clone, Debug, Default)]
pub struct DownloadEstimate {
    done: u64,
    total: Option<u64>,
    /// Time and bytes at the last measurement.
    measured: Option<(Instant, u64)>,
    bytes: f64,
    seconds: f64,
}

impl DownloadEstimate {
    /// Records the bytes on disk, and the total if it is known.
    pub fn record(&mut self, done: u64, total: Option<u64>, now: Instant) {
        (self.done, self.total) = (done, total);
        let Some((since, before)) = self.measured else {
            self.measured = Some((now, done));
            return;
        };
        let lasted = now.saturating_duration_since(since);
        if lasted < INTERVAL {
            return;
        }
        // It is less after a file with a wrong digest.
        self.bytes = self.bytes * DECAY + done.saturating_sub(before) as f64;
        self.seconds = self.seconds * DECAY + lasted.as_secs_f64();
        self.measured = Some((now, done));
    }

    /// Returns the bytes on disk.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Returns the bytes of the whole download, if known.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// Returns the remaining time; `None` until a speed was measured, and while nothing arrives.
    pub fn left(&self) -> Option<Duration> {
        let left = self.total?.saturating_sub(self.done);
        if left == 0 {
            return Some(Duration::ZERO);
        }
        let speed = if self.seconds > 0.0 { self.bytes / self.seconds } else { 0.0 };
        (speed > 0.0).then(|| Duration::try_from_secs_f64(left as f64 / speed).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn some_instant() -> Instant {
        Instant::now()
    }

    fn estimate(seconds: &[(u32, u64)], total: u64) -> Option<Duration> {
        let start = some_instant();
        let mut estimate = DownloadEstimate::default();
        seconds.iter().for_each(|(at, done)| estimate.record(*done, Some(total), start + *at * S));
        estimate.left()
    }

    #[test]
    fn the_remaining_time_follows_from_the_bytes_of_this_download() {
        assert_eq!(estimate(&[(0, 500)], 1_000), None, "no speed was measured");
        assert_eq!(estimate(&[(0, 500), (10, 600)], 1_000), Some(40 * S));
        assert_eq!(estimate(&[(0, 500), (10, 500)], 1_000), None, "nothing arrives");
        assert_eq!(estimate(&[(0, 0), (1, 1_000)], 1_000), Some(Duration::ZERO));
    }

    #[test]
    fn a_new_speed_replaces_the_old_one_within_seconds() {
        let mut seconds: Vec<(u32, u64)> = (0..=10).map(|at| (at, u64::from(at) * 1_000)).collect();
        seconds.extend((1..=30).map(|at| (10 + at, 10_000 + u64::from(at) * 100)));
        let left = estimate(&seconds, 14_000).expect("a speed");
        assert!((7 * S..=10 * S).contains(&left), "1000 bytes at 100 per second: {left:?}");
    }

    #[test]
    fn a_file_that_begins_again_does_not_make_the_speed_negative() {
        assert_eq!(estimate(&[(0, 0), (10, 1_000), (20, 0)], 1_000).map(|left| left > 10 * S), Some(true));
    }

    #[test]
    fn an_unknown_total_has_no_remaining_time() {
        let mut estimate = DownloadEstimate::default();
        let now = some_instant();
        estimate.record(0, None, now);
        estimate.record(10, None, now + S);
        assert_eq!((estimate.left(), estimate.done(), estimate.total()), (None, 10, None));
    }
}
