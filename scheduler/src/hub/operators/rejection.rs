//! Reasons for which a token is rejected, their messages, and their counters.

use jwt::TokenProblem;
use metrics::{Counter, Family, labels, metric_set};

labels! {
    /// Reason why a request without a certificate is not authenticated.
    pub(in crate::hub) enum TokenRejection {
        /// There is no token, or no single one in `authorization: Bearer`.
        Missing = "missing",
        /// The token exceeds the limit of bytes.
        TooLong = "too_long",
        /// The token is not a JWT.
        Malformed = "malformed",
        /// The algorithm is not accepted.
        Algorithm = "algorithm",
        /// The issuer is another one.
        Issuer = "issuer",
        /// The issuer has no such key.
        Key = "key",
        /// The signature is invalid.
        Signature = "signature",
        /// The token is for another audience.
        Audience = "audience",
        /// The token has expired, or has no expiry.
        Expired = "expired",
        /// The token is not valid yet.
        NotYet = "not_yet",
    }
}

impl From<TokenProblem> for TokenRejection {
    fn from(problem: TokenProblem) -> TokenRejection {
        match problem {
            TokenProblem::TooLong => TokenRejection::TooLong,
            // The hub requires no other claim.
            TokenProblem::Malformed | TokenProblem::Header | TokenProblem::Claim => TokenRejection::Malformed,
            TokenProblem::Algorithm => TokenRejection::Algorithm,
            TokenProblem::Issuer => TokenRejection::Issuer,
            TokenProblem::Key => TokenRejection::Key,
            TokenProblem::Signature => TokenRejection::Signature,
            TokenProblem::Audience => TokenRejection::Audience,
            TokenProblem::Times | TokenProblem::Expired => TokenRejection::Expired,
            TokenProblem::NotYet => TokenRejection::NotYet,
        }
    }
}

impl TokenRejection {
    /// Returns the reason and the fix, for the caller.
    pub(in crate::hub) fn message(self) -> &'static str {
        match self {
            TokenRejection::Missing => {
                "This hub needs a client certificate of the fleet, or one token in 'authorization: Bearer TOKEN'"
            }
            TokenRejection::TooLong => "The token is longer than 8192 bytes; remove claims from it",
            TokenRejection::Malformed => {
                "The token is not a JWT of type JWT or at+jwt; send an access token or an identity token"
            }
            TokenRejection::Algorithm => {
                "The algorithm of the token is not accepted: 'alg' must be RS256, ES256 or EdDSA, never none or HS256"
            }
            TokenRejection::Issuer => "The token is of another issuer than operators.issuer of the hub",
            TokenRejection::Key => {
                "The issuer has no key with the 'kid' and 'alg' of the token; if its keys have just changed, try again \
                 in a minute"
            }
            TokenRejection::Signature => "The signature of the token is invalid",
            TokenRejection::Audience => {
                "The token is for another audience than operators.audience of the hub"
            }
            TokenRejection::Expired => "The token has expired, or has no claim 'exp'; get a new one",
            TokenRejection::NotYet => {
                "The token is not valid yet ('nbf', 'iat'); compare the clocks of the issuer and the hub"
            }
        }
    }
}

metric_set! {
    /// Counters of operators with tokens.
    #[derive(Debug, Default)]
    pub(in crate::hub) struct OperatorMetrics {
        /// Rejected requests without a certificate, by reason.
        pub(in crate::hub) rejections: Family<TokenRejection> = "meridian_hub_token_rejections_total" ["reason"],
        /// Successful fetches of the issuer's keys.
        pub(in crate::hub) key_fetches: Counter = "meridian_hub_issuer_key_fetches_total",
        /// Failed fetches of the issuer's keys; the last valid set stays in use.
        pub(in crate::hub) key_fetch_failures: Counter = "meridian_hub_issuer_key_fetch_failures_total",
    }
}
