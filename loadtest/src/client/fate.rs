//! Retry decision after a failed attempt.
//!
//! A `retry-after` of the server has precedence. It is extended by up to 10 % of random jitter, so that hundreds of
//! requests rejected at once do not return at once. Otherwise the backoff doubles with each attempt, half of it random. A
//! response with an invalid body is never retried: the next one would be invalid as well, and a retry would hide the fault.

use std::time::{Duration, Instant};

use super::http::Failure;

/// Longest backoff without a `retry-after`.
pub const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Longest accepted `retry-after`; a longer outage is reported as an error instead.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// Retryable failures and limits.
#[derive(Clone, Debug)]
pub struct RetryRules {
    /// Maximum number of retries.
    pub retries_max: u32,
    /// Backoff before the second attempt.
    pub backoff_first: Duration,
    /// Statuses that are not retried although they are retryable by default.
    pub final_statuses: Vec<u16>,
}

/// Decision after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The request fails.
    GiveUp,
    /// The request may be retried from this time on.
    RetryAt(Instant),
}

/// Returns whether the failure is the endpoint's, so that it is ejected for a while.
pub fn shuns(failure: &Failure) -> bool {
    match failure {
        Failure::Unreachable(_) | Failure::BrokenOff(_) | Failure::TimedOut | Failure::Malformed(_) => true,
        Failure::Refused { status, .. } => *status == 429 || *status >= 500,
    }
}

/// Returns whether the server reports overload, which is neither its fault nor the request's.
pub fn is_busy(failure: &Failure) -> bool {
    matches!(failure, Failure::Refused { status: 429 | 503, .. })
}

/// Decides what follows `failure` after this number of attempts. `draw` is a random number in [0, 1).
pub fn after(failure: &Failure, attempts: u32, rules: &RetryRules, now: Instant, chance: f64) -> Fate {
    let asked_for = match failure {
        Failure::Unreachable(_) | Failure::BrokenOff(_) | Failure::TimedOut => None,
        // The peer's HTTP is invalid, and will be the next time.
        Failure::Malformed(_) => return Fate::GiveUp,
        Failure::Refused { status, retry_after, .. } => {
            let passes = matches!(status, 408 | 409 | 425 | 429 | 500..=599);
            if !passes || rules.final_statuses.contains(status) {
                return Fate::GiveUp;
            }
            *retry_after
        }
    };
    if attempts > rules.retries_max || asked_for.is_some_and(|wait| wait > RETRY_AFTER_MAX) {
        return Fate::GiveUp;
    }
    let doubled = rules.backoff_first.saturating_mul(2u32.saturating_pow(attempts.saturating_sub(1)));
    let ours = doubled.min(BACKOFF_MAX).mul_f64(0.5 + 0.5 * chance);
    let theirs = asked_for.map_or(Duration::ZERO, |wait| wait.mul_f64(1.0 + 0.1 * chance));
    Fate::RetryAt(now + ours.max(theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> RetryRules {
        let backoff_first = Duration::from_millis(100);
        RetryRules { retries_max: 3, backoff_first, final_statuses: vec![529] }
    }

    fn refused(status: u16, retry_after: Option<u64>) -> Failure {
        Failure::Refused { status, message: String::new(), retry_after: retry_after.map(Duration::from_secs) }
    }

    /// Checks the wait in milliseconds; `None` if there is no retry.
    fn check(failure: Failure, attempts: u32, chance: f64, expected: Option<u64>) {
        let now = Instant::now();
        let expected = expected.map_or(Fate::GiveUp, |ms| Fate::RetryAt(now + Duration::from_millis(ms)));
        assert_eq!(
            after(&failure, attempts, &rules(), now, chance),
            expected,
            "{failure:?} {attempts} {chance}"
        );
    }

    #[test]
    fn each_attempt_waits_twice_as_long_and_the_last_is_the_last() {
        check(Failure::TimedOut, 1, 0.0, Some(50));
        check(Failure::TimedOut, 1, 1.0, Some(100));
        check(Failure::BrokenOff(String::new()), 2, 1.0, Some(200));
        check(Failure::Unreachable(String::new()), 3, 1.0, Some(400));
        check(Failure::Unreachable(String::new()), 4, 1.0, None);
    }

    #[test]
    fn a_wish_to_wait_is_kept_up_to_a_limit() {
        check(refused(429, Some(2)), 1, 0.0, Some(2000));
        check(refused(503, Some(2)), 1, 1.0, Some(2200));
        check(refused(503, Some(0)), 1, 1.0, Some(100));
        check(refused(503, Some(300)), 1, 0.0, Some(300_000));
        check(refused(503, Some(301)), 1, 0.0, None);
    }

    #[test]
    fn what_would_be_the_same_again_is_final() {
        for status in [400, 401, 403, 404, 413, 422, 529] {
            check(refused(status, None), 1, 0.0, None);
        }
        for status in [408, 409, 425, 429, 500, 502, 503, 504] {
            check(refused(status, None), 1, 0.0, Some(50));
        }
        check(Failure::Malformed("no HTTP".to_owned()), 1, 0.0, None);
    }
}
