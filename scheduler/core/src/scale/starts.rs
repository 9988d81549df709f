//! Start times of a deployment's replicas in a region, from the order to readiness.
//!
//! The scaler uses the 90th percentile: with the average it would order too late for every second replica. Starts of
//! the same model on the same machines take similar times, so a few dozen samples suffice. The default before the first
//! sample is long, because an overestimate orders replicas a little early, and an underestimate orders them too late.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of samples: large enough that three or four slow outliers do not decide.
const SAMPLES_MAX: usize = 32;
/// Start time until the first sample: a model of some gigabytes from a warm disk.
pub const DEFAULT_START_TIME: Duration = Duration::from_secs(10);

/// Most recent start times.
#[derive(Clone, Debug, Default)]
pub struct StartTimes(VecDeque<Duration>);

impl StartTimes {
    /// Records a start time.
    pub fn record(&mut self, start: Duration) {
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(start);
    }

    /// Returns the 90th percentile.
    pub fn p90(&self) -> Duration {
        let mut sorted: Vec<_> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        // Nearest rank: of one sample that sample, of ten the ninth.
        let rank = (sorted.len() * 9).div_ceil(10);
        rank.checked_sub(1).map_or(DEFAULT_START_TIME, |at| sorted[at])
    }

    /// Returns the remaining time of a start that has lasted this long. An overdue start gets a tenth of the whole
    /// time.
    pub fn remaining(&self, lasted: Duration) -> Duration {
        let whole = self.p90();
        whole.saturating_sub(lasted).max(whole / 10)
    }

    /// Returns the remaining time of a start that has lasted this long, and that reports the remaining time of the download
    /// of its model: the model is loaded after it, in a tenth of the usual time at least.
    pub fn remaining_with_download(&self, lasted: Duration, download_left: Option<Duration>) -> Duration {
        let after_download = download_left.map(|left| left.saturating_add(self.p90() / 10));
        self.remaining(lasted).max(after_download.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn nine_of_ten_starts_take_at_most_the_p90() {
        let mut starts = StartTimes::default();
        assert_eq!(starts.p90(), DEFAULT_START_TIME);
        starts.record(3 * S);
        assert_eq!(starts.p90(), 3 * S);
        (1..=9).for_each(|_| starts.record(S));
        assert_eq!(starts.p90(), S, "one of ten was slower");
        starts.record(4 * S);
        assert_eq!(starts.p90(), 3 * S, "two of eleven were");
        (0..SAMPLES_MAX).for_each(|_| starts.record(2 * S));
        assert_eq!((starts.p90(), starts.0.len()), (2 * S, SAMPLES_MAX), "older samples are dropped");
    }

    #[test]
    fn an_overdue_start_has_a_tenth_of_its_time_remaining() {
        let mut starts = StartTimes::default();
        starts.record(10 * S);
        assert_eq!(starts.remaining(Duration::ZERO), 10 * S);
        assert_eq!(starts.remaining(7 * S), 3 * S);
        assert_eq!([starts.remaining(10 * S), starts.remaining(99 * S)], [S, S]);
    }

    #[test]
    fn a_start_lasts_longer_than_the_download_of_its_model() {
        let mut starts = StartTimes::default();
        starts.record(10 * S);
        assert_eq!(starts.remaining_with_download(4 * S, None), 6 * S);
        assert_eq!(starts.remaining_with_download(4 * S, Some(2 * S)), 6 * S, "the usual time is longer");
        assert_eq!(starts.remaining_with_download(4 * S, Some(60 * S)), 61 * S);
        assert_eq!(starts.remaining_with_download(99 * S, Some(60 * S)), 61 * S);
        assert_eq!(starts.remaining_with_download(S, Some(Duration::MAX)), Duration::MAX);
    }
}
