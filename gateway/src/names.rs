//! Header names that are parsed at compile time.
//!
//! All roles share our own header names as strings ([`headers`]). A header map takes a checked `HeaderName`, and
//! checking some twenty of them per request took 4,200 of its 117,000 instructions (docs/benchmarks.md). The compiler
//! checks the ones that every request uses.

use http::HeaderName;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use replica_api::headers;

/// Returns the header name for `text`.
///
/// # Panics
///
/// Panics if `text` is not a valid header name or contains capitals.
pub(crate) fn name(text: &'static str) -> HeaderName {
    macro_rules! ready {
        ($($ready:expr),+ $(,)?) => {
            match text {
                "content-length" => CONTENT_LENGTH,
                "content-type" => CONTENT_TYPE,
                $(text if text == $ready => const { HeaderName::from_static($ready) },)+
                other => HeaderName::from_static(other),
            }
        };
    }
    ready!(
        headers::REQUEST_ID,
        headers::TIMEOUT_MS,
        headers::PRIORITY,
        headers::RESIDENCY,
        headers::CLIENT_GEO,
        headers::REGION,
        headers::ATTEMPTS,
        headers::PARTS,
        headers::ERROR,
        headers::DEPLOYMENT,
        headers::TENANT,
        headers::ATTEMPT,
        headers::ATTEMPT_KEY,
        headers::SPILLOVER,
        headers::ALTERNATIVE_MS,
        headers::HELD_MS,
        headers::TOKENS,
        headers::RECEIPT,
        headers::SERVER_TIMING,
        headers::RATELIMIT_LIMIT_REQUESTS,
        headers::RATELIMIT_REMAINING_REQUESTS,
        headers::RATELIMIT_RESET_REQUESTS,
        headers::RATELIMIT_LIMIT_TOKENS,
        headers::RATELIMIT_REMAINING_TOKENS,
        headers::RATELIMIT_RESET_TOKENS,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_equals_its_text_whether_precomputed_or_not() {
        for text in ["content-length", headers::REQUEST_ID, "x-ratelimit-reset-tokens", "x-another"] {
            assert_eq!(name(text), HeaderName::from_static(text));
        }
    }
}
