//! Settings of an operation, extracted from a Python `RequestProcessingPreference`.

use std::time::Duration;

use loadtest::client::Preference;
use loadtest::client::retry::RetryRules;
use loadtest::client::split::RequestLimits;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[derive(FromPyObject)]
pub(crate) struct RawPreference {
    batch_size: usize,
    max_chars_per_request: usize,
    max_tokens_per_request: Option<usize>,
    max_concurrent_requests: usize,
    timeout_s: f64,
    total_timeout_s: Option<f64>,
    hedge_delay: Option<f64>,
    retry_budget_pct: f64,
    hedge_budget_pct: f64,
    max_retries: u32,
    initial_backoff_ms: u64,
    non_retryable_status_codes: Vec<u16>,
    headers: Vec<(String, String)>,
}

impl RawPreference {
    /// Converts the types. The values are validated when the operation starts.
    pub(crate) fn checked(self) -> PyResult<Preference> {
        let RawPreference {
            batch_size,
            max_chars_per_request,
            max_tokens_per_request,
            max_concurrent_requests,
            timeout_s,
            total_timeout_s,
            hedge_delay,
            retry_budget_pct,
            hedge_budget_pct,
            max_retries,
            initial_backoff_ms,
            non_retryable_status_codes,
            headers,
        } = self;
        Ok(Preference {
            request: RequestLimits {
                texts: batch_size,
                chars: max_chars_per_request,
                tokens: max_tokens_per_request,
            },
            in_flight_max: max_concurrent_requests,
            attempt_timeout: seconds("timeout_s", timeout_s)?,
            total_timeout: total_timeout_s.map(|span| seconds("total_timeout_s", span)).transpose()?,
            hedge_after: hedge_delay.map(|span| seconds("hedge_delay", span)).transpose()?,
            retry_share: retry_budget_pct,
            hedge_share: hedge_budget_pct,
            retries: RetryRules {
                retries_max: max_retries,
                backoff_first: Duration::from_millis(initial_backoff_ms),
                final_statuses: non_retryable_status_codes,
            },
            headers,
        })
    }
}

/// Longest accepted time: larger values could overflow an `Instant`.
const SPAN_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

pub(crate) fn seconds(field: &str, span: f64) -> PyResult<Duration> {
    let span = Duration::try_from_secs_f64(span).ok().filter(|span| *span <= SPAN_MAX);
    span.ok_or_else(|| PyValueError::new_err(format!("{field}: write a number of seconds above 0")))
}
