//! Retry decision after a failed attempt.
//!
//! A `retry-after` of the server has precedence. It is extended by up to 10 % of random jitter, so that hundreds of
//! requests rejected at once do not return at once. Otherwise the backoff doubles with each attempt, half of it
//! random. A response with an invalid body is never retried: the next one would be invalid as well, and a retry would
//! hide the fault.

use std::time::{Duration, Instant};

use backoff::Backoff;

use super::http::HttpAttemptError;

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
pub enum RetryDecision {
    /// The request fails.
    GiveUp,
    /// The request may be retried from this time on.
    RetryAt(Instant),
}

/// Returns whether the failure is the endpoint's, so that it is ejected for a while.
pub fn is_endpoint_failure(failure: &HttpAttemptError) -> bool {
    match failure {
        HttpAttemptError::Unreachable(_)
        | HttpAttemptError::ConnectionClosed(_)
        | HttpAttemptError::Timeout
        | HttpAttemptError::Malformed(_)
        | HttpAttemptError::TooLarge
        | HttpAttemptError::Http2Declined => true,
        HttpAttemptError::ErrorStatus { status, .. } => *status == 429 || *status >= 500,
        HttpAttemptError::Redirected { .. } => false,
    }
}

/// Returns whether the server reports overload, which is neither its fault nor the request's.
pub fn is_overload(failure: &HttpAttemptError) -> bool {
    matches!(failure, HttpAttemptError::ErrorStatus { status: 429 | 503, .. })
}

/// Decides what follows `failure` after this number of attempts. `draw` is a random number in [0, 1).
pub fn decide(
    failure: &HttpAttemptError,
    attempts: u32,
    rules: &RetryRules,
    now: Instant,
    draw: f64,
) -> RetryDecision {
    let requested_wait = match failure {
        HttpAttemptError::Unreachable(_)
        | HttpAttemptError::ConnectionClosed(_)
        | HttpAttemptError::Timeout => None,
        // The peer's HTTP is invalid, and will be the next time.
        HttpAttemptError::Malformed(_) | HttpAttemptError::TooLarge | HttpAttemptError::Http2Declined => {
            return RetryDecision::GiveUp;
        }
        // The operation has followed it if it may.
        HttpAttemptError::Redirected { .. } => return RetryDecision::GiveUp,
        HttpAttemptError::ErrorStatus { status, retry_after, .. } => {
            let is_retryable = matches!(status, 408 | 409 | 425 | 429 | 500..=599);
            if !is_retryable || rules.final_statuses.contains(status) {
                return RetryDecision::GiveUp;
            }
            *retry_after
        }
    };
    if attempts > rules.retries_max || requested_wait.is_some_and(|wait| wait > RETRY_AFTER_MAX) {
        return RetryDecision::GiveUp;
    }
    let backoff = Backoff { first: rules.backoff_first, max: BACKOFF_MAX }.equal_jitter(attempts, draw);
    let server_wait = requested_wait.map_or(Duration::ZERO, |wait| wait.mul_f64(1.0 + 0.1 * draw));
    RetryDecision::RetryAt(now + backoff.max(server_wait))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> RetryRules {
        let backoff_first = Duration::from_millis(100);
        RetryRules { retries_max: 3, backoff_first, final_statuses: vec![529] }
    }

    fn error_status(status: u16, retry_after: Option<u64>) -> HttpAttemptError {
        HttpAttemptError::ErrorStatus {
            status,
            message: String::new(),
            retry_after: retry_after.map(Duration::from_secs),
        }
    }

    /// Checks the wait in milliseconds; `None` if there is no retry.
    fn check(failure: HttpAttemptError, attempts: u32, draw: f64, expected: Option<u64>) {
        let now = Instant::now();
        let expected = expected
            .map_or(RetryDecision::GiveUp, |ms| RetryDecision::RetryAt(now + Duration::from_millis(ms)));
        assert_eq!(
            decide(&failure, attempts, &rules(), now, draw),
            expected,
            "{failure:?} {attempts} {draw}"
        );
    }

    #[test]
    fn the_backoff_doubles_and_the_number_of_retries_is_limited() {
        check(HttpAttemptError::Timeout, 1, 0.0, Some(50));
        check(HttpAttemptError::Timeout, 1, 1.0, Some(100));
        check(HttpAttemptError::ConnectionClosed(String::new()), 2, 1.0, Some(200));
        check(HttpAttemptError::Unreachable(String::new()), 3, 1.0, Some(400));
        check(HttpAttemptError::Unreachable(String::new()), 4, 1.0, None);
    }

    #[test]
    fn retry_after_is_honoured_up_to_a_limit() {
        check(error_status(429, Some(2)), 1, 0.0, Some(2000));
        check(error_status(503, Some(2)), 1, 1.0, Some(2200));
        check(error_status(503, Some(0)), 1, 1.0, Some(100));
        check(error_status(503, Some(300)), 1, 0.0, Some(300_000));
        check(error_status(503, Some(301)), 1, 0.0, None);
    }

    #[test]
    fn permanent_failures_are_not_retried() {
        for status in [400, 401, 403, 404, 413, 422, 529] {
            check(error_status(status, None), 1, 0.0, None);
        }
        for status in [408, 409, 425, 429, 500, 502, 503, 504] {
            check(error_status(status, None), 1, 0.0, Some(50));
        }
        check(HttpAttemptError::Malformed("no HTTP".to_owned()), 1, 0.0, None);
        check(HttpAttemptError::TooLarge, 1, 0.0, None);
        check(HttpAttemptError::Http2Declined, 1, 0.0, None);
    }
}
