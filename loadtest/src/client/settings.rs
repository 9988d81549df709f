//! Settings of a client ([`ClientSettings`]) and of an operation ([`Preference`]), with their limits.
//!
//! Both are validated before anything is sent; all problems are reported together, each with its field, its limit and a
//! valid value.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use replica_api::retry::{HEDGES_PER_REQUEST, RETRIES_PER_SUCCESS};

use super::http::{HttpProtocol, is_settable};
use super::retry::RetryRules;
use super::split::RequestLimits;

/// Maximum texts per request, the limit of OpenAI's API.
pub const REQUEST_TEXTS_MAX: usize = 2048;

/// Maximum requests in flight; with HTTP/1.1 each holds a connection.
pub const IN_FLIGHT_MAX: usize = 1024;

/// Maximum number of retries.
pub const RETRIES_MAX: u32 = 10;

/// Largest budget share; three retries per success is already a flood.
pub const SHARE_MAX: f64 = 3.0;

/// Settings of a client.
#[derive(Clone, Debug, Default)]
pub struct ClientSettings {
    /// Interchangeable endpoints; at least one.
    pub endpoints: Vec<EndpointSettings>,
    /// HTTP version.
    pub protocol: HttpProtocol,
    /// PEM certificates that are trusted in addition to the system's.
    pub roots_pem: Option<Vec<u8>>,
}

/// Settings of one endpoint.
#[derive(Clone, Default)]
pub struct EndpointSettings {
    /// Base URL such as `http://host:port`, with or without `/v1`, as for an OpenAI client.
    pub url: String,
    /// API key; `None` sends no `authorization` header.
    pub key: Option<String>,
    /// Relative share of the requests; 0 makes the endpoint a standby.
    pub weight: f64,
}

impl EndpointSettings {
    /// Creates an endpoint with weight 1.
    pub fn new(url: impl Into<String>, key: Option<&str>) -> EndpointSettings {
        EndpointSettings { url: url.into(), key: key.map(str::to_owned), weight: 1.0 }
    }
}

impl std::fmt::Debug for EndpointSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let EndpointSettings { url, key: _, weight } = self;
        f.debug_struct("EndpointSettings").field("url", url).field("weight", weight).finish_non_exhaustive()
    }
}

/// Settings of an operation.
#[derive(Clone, Debug)]
pub struct Preference {
    /// Size limits of a request.
    pub request: RequestLimits,
    /// Maximum requests in flight.
    pub in_flight_max: usize,
    /// Timeout of one attempt.
    pub attempt_timeout: Duration,
    /// Timeout of the whole operation.
    pub total_timeout: Option<Duration>,
    /// Delay after which a request is hedged, if the budget allows.
    pub hedge_after: Option<Duration>,
    /// Share of a retry that each success pays for.
    pub retry_share: f64,
    /// Share of a hedge that each success pays for.
    pub hedge_share: f64,
    /// Retryable failures, number of retries and backoff.
    pub retries: RetryRules,
    /// Additional request headers; they replace the client's own of the same name.
    pub headers: Vec<(String, String)>,
}

impl Default for Preference {
    fn default() -> Preference {
        Preference {
            request: RequestLimits { texts: 64, chars: 256_000, tokens: None },
            in_flight_max: 256,
            attempt_timeout: Duration::from_secs(600),
            total_timeout: None,
            hedge_after: None,
            retry_share: RETRIES_PER_SUCCESS,
            hedge_share: HEDGES_PER_REQUEST,
            retries: RetryRules {
                retries_max: 5,
                backoff_first: Duration::from_millis(125),
                final_statuses: Vec::new(),
            },
            headers: Vec::new(),
        }
    }
}

impl Preference {
    /// Validates the settings. Returns the headers as sent, or all problems.
    pub(super) fn check(&self) -> Result<HeaderMap, Vec<String>> {
        let Preference {
            request: RequestLimits { texts, chars, tokens },
            in_flight_max,
            attempt_timeout,
            total_timeout,
            hedge_after,
            retry_share,
            hedge_share,
            retries: RetryRules { retries_max, backoff_first: _, final_statuses: _ },
            headers,
        } = self;
        let mut problems = Vec::new();
        let mut within = |field: &str, value: usize, most: usize| {
            if !(1..=most).contains(&value) {
                problems.push(format!("{field} {value}: write a number from 1 to {most}"));
            }
        };
        within("texts of a request (batch_size)", *texts, REQUEST_TEXTS_MAX);
        within("max_chars_per_request", *chars, usize::MAX);
        within("max_tokens_per_request", tokens.unwrap_or(1), usize::MAX);
        within("max_concurrent_requests", *in_flight_max, IN_FLIGHT_MAX);
        if *retries_max > RETRIES_MAX {
            problems.push(format!("max_retries {retries_max}: write a number from 0 to {RETRIES_MAX}"));
        }
        for (field, span) in [
            ("timeout_s", Some(*attempt_timeout)),
            ("total_timeout_s", *total_timeout),
            ("hedge_delay", *hedge_after),
        ] {
            if span.is_some_and(|span| span.is_zero()) {
                problems.push(format!("{field} 0: write a time above 0"));
            }
        }
        for (field, share) in [("retry_budget_pct", *retry_share), ("hedge_budget_pct", *hedge_share)] {
            if !(0.0..=SHARE_MAX).contains(&share) {
                problems.push(format!("{field} {share}: write a share from 0 to {SHARE_MAX}"));
            }
        }
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            match (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                (Ok(name), Ok(value)) if is_settable(&name) => drop(map.insert(name, value)),
                (Ok(name), Ok(_)) => {
                    problems.push(format!("header {name}: is reserved for the client; leave it out"))
                }
                _ => problems.push(format!("header {name:?}: invalid name or value (value not shown)")),
            }
        }
        if problems.is_empty() { Ok(map) } else { Err(problems) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::authorization;

    #[test]
    fn values_at_the_limits_are_accepted_and_one_past_them_rejected() {
        let check = |change: fn(&mut Preference, usize), most: usize| {
            for (value, good) in [(1, true), (most, true), (0, false), (most + 1, false)] {
                let mut preference = Preference::default();
                change(&mut preference, value);
                assert_eq!(preference.check().is_ok(), good, "{value} of {most}");
            }
        };
        check(|preference, value| preference.request.texts = value, REQUEST_TEXTS_MAX);
        check(|preference, value| preference.in_flight_max = value, IN_FLIGHT_MAX);
        let retries = |retries_max| {
            let mut preference = Preference::default();
            preference.retries.retries_max = retries_max;
            preference.check().is_ok()
        };
        assert!(retries(0) && retries(RETRIES_MAX) && !retries(RETRIES_MAX + 1));
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let headers = [("content-length", "1"), ("a b", "c"), ("x", "secret\n"), ("fine", "x")];
        let preference = Preference {
            request: RequestLimits { texts: 0, chars: 0, tokens: Some(0) },
            in_flight_max: 0,
            attempt_timeout: Duration::ZERO,
            total_timeout: Some(Duration::ZERO),
            hedge_after: Some(Duration::ZERO),
            retry_share: -0.1,
            hedge_share: f64::NAN,
            headers: headers.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
            ..Preference::default()
        };
        let problems = preference.check().unwrap_err();
        assert_eq!(problems.len(), 12, "{problems:#?}");
        assert!(!problems.concat().contains("secret"));
    }

    #[test]
    fn a_key_is_not_printed() {
        let endpoint = EndpointSettings::new("http://a", Some("secret"));
        assert!(!format!("{endpoint:?}{:?}", authorization("key", "secret").unwrap()).contains("secret"));
        assert!(
            authorization("key", " ").is_err()
                && !authorization("key", "se\ncret").unwrap_err().contains("cret\"")
        );
    }
}
