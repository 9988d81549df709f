//! Pace of the polls of jobs. Pure: time and randomness are arguments.
//!
//! A job that has started is finished after some seconds at most, one that waits after the time that the server estimates.
//! The pause after a poll therefore doubles, and stays between an eighth of the estimate and the estimate. Each poll counts
//! as one request in the tenant's rate limits, so many jobs are polled less often, each.

use std::time::Duration;

use backoff::Backoff;

/// Pauses between polls of a job without an estimate.
const WAITING: Backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_secs(30) };
/// Longest pause between polls of a job that is computed.
const RUNNING_MAX: Duration = Duration::from_secs(2);
/// Polls per second of all jobs of one iteration, beyond which the pauses grow.
const POLLS_PER_SECOND: f64 = 100.0;

/// Returns the pause after this number of polls of a job. `estimate` is the time until it starts as the server estimates, if
/// it waits and there is one; `jobs` is the number of jobs that are polled; `draw` is uniform in [0, 1).
pub(super) fn pause(
    polls: u32,
    is_running: bool,
    estimate: Option<Duration>,
    jobs: usize,
    draw: f64,
) -> Duration {
    let pause = WAITING.equal_jitter(polls, draw);
    let pause = match estimate {
        _ if is_running => pause.min(RUNNING_MAX),
        None => pause,
        Some(estimate) => pause.max(estimate / 8).min(estimate.max(WAITING.first)).min(WAITING.max),
    };
    pause.max(Duration::from_secs_f64(jobs as f64 / POLLS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_pause_doubles_and_the_estimate_bounds_it() {
        let without = |polls| pause(polls, false, None, 1, 1.0);
        assert_eq!([1, 2, 3, 30].map(without), [MS(100), MS(200), MS(400), MS(30_000)]);
        let estimated = |polls, ms| pause(polls, false, Some(MS(ms)), 1, 1.0);
        assert_eq!(estimated(1, 8000), MS(1000), "not sooner than an eighth of the estimate");
        assert_eq!(estimated(30, 8000), MS(8000), "not later than the estimate");
        assert_eq!(estimated(30, 3_600_000), MS(30_000), "an estimate can be wrong");
        assert_eq!(estimated(30, 0), MS(100));
        assert_eq!(pause(30, true, None, 1, 1.0), MS(2000));
    }

    #[test]
    fn many_jobs_are_polled_at_a_limited_rate() {
        assert_eq!(pause(1, true, None, 1000, 0.0), MS(10_000));
        assert_eq!(pause(1, false, None, 1, 0.0), MS(50), "half of the pause is random");
    }
}
