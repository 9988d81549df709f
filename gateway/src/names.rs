//! Names of headers, made ready once.
//!
//! Our own headers are named by texts, which all roles share ([`headers`]). What a map of headers takes is a checked name,
//! and to check some twenty of them anew was 4,200 of the 117,000 instructions of a request (docs/benchmarks.md). Those that
//! are met with every request are checked by the compiler.

use http::HeaderName;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use replica_core::wire::headers;

/// The name that is written so.
///
/// # Panics
///
/// When it is no name of a header, or one in capitals.
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
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_what_is_written_whether_it_was_ready_or_not() {
        for text in ["content-length", headers::REQUEST_ID, "x-ratelimit-reset-tokens", "x-another"] {
            assert_eq!(name(text), HeaderName::from_static(text));
        }
    }
}
