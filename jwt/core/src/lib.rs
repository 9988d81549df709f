//! Verification of signed tokens of an external issuer (JWT, RFC 7519, in the compact form of RFC 7515). Gateways verify
//! the tokens of tenants with it, and hubs those of operators.
//!
//! A token passes three checks, in an order that the types enforce:
//!
//! ```text
//!  Token::parse ──▶ Token ──verified──▶ Claims ──check──▶ validity period; the caller reads the other claims
//!   (shape only)     │ (issuer: only to find the keys)      (issuer, audience, times)
//! ```
//!
//! No claim is trusted before the signature is verified; before that only the issuer is read, to select the keys, and
//! those keys then decide. The crate is pure: the time is an argument, and so is the verification of signatures, because a
//! cryptography library needs randomness; the crate `jwt` has it. [`jwks`] parses the keys of an issuer.
//!
//! Known attacks on such tokens are ruled out by construction (RFC 8725): a key has one algorithm and a token that
//! names another is rejected, so no public key is ever used as a shared secret; `none` is no algorithm; a secret comes
//! only from a file of its own; `crit` extensions are not supported and so rejected; a token that never expires is
//! rejected, because it would be an API key that cannot be revoked.

pub mod jwks;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};
use std::time::Duration;

/// Longest token that is parsed. Those of the large identity providers have 1 to 3 KiB, with many groups in them.
pub const TOKEN_BYTES_MAX: usize = 8 << 10;
/// Maximum of the tolerated difference between the clocks of the issuer and of the verifier: a token lives that much longer than its issuer intended.
pub const LEEWAY_MAX: Duration = Duration::from_secs(300);

/// Supported signature algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256.
    Rs256,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// Ed25519.
    EdDsa,
    /// HMAC with SHA-256.
    Hs256,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: &'static [Algorithm] =
        &[Algorithm::Rs256, Algorithm::Es256, Algorithm::EdDsa, Algorithm::Hs256];
    /// Algorithms with a public key.
    pub const PUBLIC: &'static [Algorithm] = &[Algorithm::Rs256, Algorithm::Es256, Algorithm::EdDsa];

    fn parse(name: &str) -> Option<Algorithm> {
        match name {
            "RS256" => Some(Algorithm::Rs256),
            "ES256" => Some(Algorithm::Es256),
            "EdDSA" => Some(Algorithm::EdDsa),
            "HS256" => Some(Algorithm::Hs256),
            _ => None,
        }
    }
}

/// Rules for the tokens of one issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRules {
    /// Required value of the claim `iss`, exactly.
    pub issuer: String,
    /// Value that the claim `aud` must contain.
    pub audience: String,
    /// Tolerated difference between the two clocks.
    pub leeway: Duration,
}

/// Reason why a token is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenProblem {
    /// More than [`TOKEN_BYTES_MAX`].
    TooLong,
    /// It is not three parts in base64url without padding, of which the first two are JSON objects.
    Malformed,
    /// The header has extensions that must be understood, or is not that of a JWT.
    Header,
    /// `alg` is missing, `none`, or no algorithm that the verifier accepts.
    Algorithm,
    /// `iss` names no configured issuer.
    Issuer,
    /// No key of the issuer has this `kid` and this algorithm; or there is no `kid`, and several have the algorithm.
    Key,
    /// The signature is not that of the key.
    Signature,
    /// `aud` does not name this verifier.
    Audience,
    /// There is no `exp`, or a time is malformed.
    Times,
    /// `exp` is past.
    Expired,
    /// `nbf` or `iat` is in the future.
    NotYet,
    /// A claim that the verifier needs is missing or has an unknown value.
    Claim,
}

/// Token that is not verified yet.
pub struct Token<'a> {
    algorithm: Algorithm,
    kid: Option<String>,
    claims: Map<String, Value>,
    /// Signed bytes: the first two parts as received.
    signed: &'a [u8],
    signature: Vec<u8>,
}

/// Input of the signature verification.
pub struct SignatureInput<'a> {
    /// Algorithm that the token states; the key must have the same.
    pub algorithm: Algorithm,
    /// Identifier of the key, if the token has it.
    pub kid: Option<&'a str>,
    /// Signed bytes.
    pub signed: &'a [u8],
    /// Signature.
    pub signature: &'a [u8],
}

/// Claims of a token with a verified signature.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims(Map<String, Value>);

/// Validity period of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPeriod {
    /// Start of the validity since the epoch, with leeway.
    pub from: Duration,
    /// End of the validity since the epoch, exclusive, with leeway.
    pub until: Duration,
}

/// Returns whether these bytes have the shape of a token rather than a key.
pub fn has_token_shape(bearer: &[u8]) -> bool {
    bearer.iter().filter(|byte| **byte == b'.').count() == 2
}

impl<'a> Token<'a> {
    /// Parses a token; `accepted` are the algorithms that it may have.
    ///
    /// # Errors
    ///
    /// If it is malformed, or no key could make it valid.
    pub fn parse(token: &'a [u8], accepted: &[Algorithm]) -> Result<Token<'a>, TokenProblem> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenProblem::TooLong);
        }
        let dot = |bytes: &[u8]| bytes.iter().rposition(|byte| *byte == b'.').ok_or(TokenProblem::Malformed);
        let signed_end = dot(token)?;
        let (signed, signature) = (&token[..signed_end], &token[signed_end + 1..]);
        let header_end = dot(signed)?;
        let mut header = object(&signed[..header_end])?;
        let claims = object(&signed[header_end + 1..])?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenProblem::Malformed)?;
        let algorithm = header.get("alg").and_then(Value::as_str).and_then(Algorithm::parse);
        let is_plain =
            !header.contains_key("crit") && header.get("b64").is_none_or(|b64| *b64 == Value::Bool(true));
        let kid = match header.remove("kid") {
            None => None,
            Some(Value::String(kid)) => Some(kid),
            Some(_) => return Err(TokenProblem::Header),
        };
        let algorithm = algorithm.filter(|given| accepted.contains(given)).ok_or(TokenProblem::Algorithm)?;
        if !is_plain || !is_a_jwt(&header) {
            return Err(TokenProblem::Header);
        }
        Ok(Token { algorithm, kid, claims, signed, signature })
    }

    /// Returns the unverified issuer, to select the keys.
    pub fn issuer(&self) -> Option<&str> {
        self.claims.get("iss").and_then(Value::as_str)
    }

    /// Returns the claims if `verify` accepts the signature.
    ///
    /// # Errors
    ///
    /// Those of `verify`.
    pub fn verified(
        self,
        verify: impl FnOnce(&SignatureInput<'_>) -> Result<(), TokenProblem>,
    ) -> Result<Claims, TokenProblem> {
        let Token { algorithm, kid, claims, signed, signature } = self;
        verify(&SignatureInput { algorithm, kid: kid.as_deref(), signed, signature: &signature })?;
        Ok(Claims(claims))
    }
}

/// Returns whether `typ`, if present, names a JWT (RFC 7519 §5.1) or an access token (RFC 9068 §2.1), so that a token
/// that the same issuer signed for another purpose is rejected.
fn is_a_jwt(header: &Map<String, Value>) -> bool {
    let names = ["jwt", "at+jwt", "application/at+jwt"];
    header.get("typ").is_none_or(|typ| {
        typ.as_str().is_some_and(|typ| names.iter().any(|name| name.eq_ignore_ascii_case(typ)))
    })
}

fn object(part: &[u8]) -> Result<Map<String, Value>, TokenProblem> {
    let json = URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenProblem::Malformed)?;
    serde_json::from_slice(&json).map_err(|_| TokenProblem::Malformed)
}

impl Claims {
    /// Checks the claims against the rules of their issuer at `now`, the time since the epoch.
    ///
    /// # Errors
    ///
    /// The first rule that is violated.
    pub fn check(&self, rules: &TokenRules, now: Duration) -> Result<TokenPeriod, TokenProblem> {
        let TokenRules { issuer, audience, leeway } = rules;
        if self.text("iss") != Some(issuer) {
            return Err(TokenProblem::Issuer);
        }
        if !self.texts("aud").any(|one| one == audience) {
            return Err(TokenProblem::Audience);
        }
        let until = self.time("exp")?.ok_or(TokenProblem::Times)?.saturating_add(*leeway);
        let from = self.time("nbf")?.max(self.time("iat")?).unwrap_or_default().saturating_sub(*leeway);
        if now >= until {
            return Err(TokenProblem::Expired);
        }
        if now < from {
            return Err(TokenProblem::NotYet);
        }
        Ok(TokenPeriod { from, until })
    }

    /// Returns a claim that is a text.
    pub fn text(&self, claim: &str) -> Option<&str> {
        self.0.get(claim).and_then(Value::as_str)
    }

    /// Returns the texts of a claim that is one or a list.
    pub fn texts(&self, claim: &str) -> impl Iterator<Item = &str> {
        let value = self.0.get(claim);
        let list = value.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        value.and_then(Value::as_str).into_iter().chain(list.iter().filter_map(Value::as_str))
    }

    /// Returns a NumericDate (RFC 7519 §2): seconds since the epoch, with an optional fraction.
    fn time(&self, claim: &str) -> Result<Option<Duration>, TokenProblem> {
        let Some(value) = self.0.get(claim) else { return Ok(None) };
        let seconds = value.as_f64().ok_or(TokenProblem::Times)?;
        Duration::try_from_secs_f64(seconds).map(Some).map_err(|_| TokenProblem::Times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn rules() -> TokenRules {
        TokenRules {
            issuer: "https://login.example.com/".to_owned(),
            audience: "meridian".to_owned(),
            leeway: Duration::from_secs(30),
        }
    }

    fn compact(header: &Value, claims: &Value, signature: &[u8]) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        format!("{}.{}.{}", part(header), part(claims), URL_SAFE_NO_PAD.encode(signature))
    }

    fn good_claims() -> Value {
        json!({"iss": "https://login.example.com/", "aud": "meridian", "tenant": "docs", "exp": 1_800_000_060})
    }

    /// Checks a token; its signature is valid here if it is `right`.
    fn check_token(token: &str) -> Result<TokenPeriod, TokenProblem> {
        let token = Token::parse(token.as_bytes(), Algorithm::ALL)?;
        let right = |input: &SignatureInput<'_>| {
            if input.signature == b"right" { Ok(()) } else { Err(TokenProblem::Signature) }
        };
        token.verified(right)?.check(&rules(), NOW)
    }

    #[test]
    fn only_tokens_with_a_supported_header_are_accepted() {
        let check = |header: Value, expected: Result<(), TokenProblem>| {
            let result = check_token(&compact(&header, &good_claims(), b"right"));
            assert_eq!(result.map(drop), expected, "{header}");
        };
        for algorithm in ["RS256", "ES256", "EdDSA", "HS256"] {
            check(json!({"alg": algorithm}), Ok(()));
        }
        check(json!({"alg": "RS256", "typ": "JWT", "kid": "1"}), Ok(()));
        check(json!({"alg": "RS256", "typ": "at+jwt"}), Ok(()));
        let (unsupported, unaccepted) = (Err(TokenProblem::Header), Err(TokenProblem::Algorithm));
        for algorithm in ["none", "None", "NONE", "", "RS384", "PS256", "rs256", "HS512"] {
            check(json!({"alg": algorithm}), unaccepted);
        }
        check(json!({}), unaccepted);
        check(json!({"alg": 1}), unaccepted);
        let secret = compact(&json!({"alg": "HS256"}), &good_claims(), b"right");
        let parsed = Token::parse(secret.as_bytes(), Algorithm::PUBLIC);
        assert_eq!(parsed.map(drop), unaccepted, "a shared secret where only public keys are accepted");
        check(json!({"alg": "RS256", "crit": ["exp"]}), unsupported);
        check(json!({"alg": "RS256", "b64": false}), unsupported);
        check(json!({"alg": "RS256", "kid": 7}), unsupported);
        check(json!({"alg": "RS256", "typ": "logout+jwt"}), unsupported);
    }

    #[test]
    fn malformed_tokens_are_distinguished_from_invalid_ones() {
        let check =
            |token: &str, expected| assert_eq!(check_token(token).map(drop), Err(expected), "{token}");
        let good = compact(&json!({"alg": "RS256"}), &good_claims(), b"right");
        let (signed, _) = good.rsplit_once('.').unwrap();
        check(&format!("{signed}."), TokenProblem::Signature);
        check(&compact(&json!({"alg": "RS256"}), &good_claims(), b"wrong"), TokenProblem::Signature);
        for malformed in ["", ".", "..", "a.b.c", signed, &format!("{good}."), &format!("{good}=")] {
            check(malformed, TokenProblem::Malformed);
        }
        check(&compact(&json!([]), &good_claims(), b"right"), TokenProblem::Malformed);
        let padded = |bytes: usize| format!("{good}{}", "A".repeat(bytes - good.len()));
        check(&padded(TOKEN_BYTES_MAX), TokenProblem::Signature);
        check(&padded(TOKEN_BYTES_MAX + 1), TokenProblem::TooLong);
    }

    #[test]
    fn every_rule_holds_at_its_limit_and_past_it() {
        let check = |claim: &str, value: Value, expected: Result<(), TokenProblem>| {
            let mut claims = good_claims();
            claims[claim] = value.clone();
            let result = check_token(&compact(&json!({"alg": "ES256"}), &claims, b"right"));
            assert_eq!(result.map(drop), expected, "{claim}: {value}");
        };
        let now = NOW.as_secs();
        check("exp", json!(now - 29), Ok(()));
        check("exp", json!(now - 30), Err(TokenProblem::Expired));
        check("exp", json!((now - 30) as f64 + 0.5), Ok(()));
        check("exp", json!("soon"), Err(TokenProblem::Times));
        check("exp", json!(-1), Err(TokenProblem::Times));
        check("exp", json!(1e300), Err(TokenProblem::Times));
        check("exp", Value::Null, Err(TokenProblem::Times));
        check("nbf", json!(now + 30), Ok(()));
        check("nbf", json!(now + 31), Err(TokenProblem::NotYet));
        check("iat", json!(now + 30), Ok(()));
        check("iat", json!(now + 31), Err(TokenProblem::NotYet));
        check("aud", json!(["other", "meridian"]), Ok(()));
        check("aud", json!(["other"]), Err(TokenProblem::Audience));
        check("aud", json!("meridian2"), Err(TokenProblem::Audience));
        check("aud", Value::Null, Err(TokenProblem::Audience));
        check("iss", json!("https://login.example.com"), Err(TokenProblem::Issuer));
        let mut endless = good_claims();
        endless.as_object_mut().unwrap().remove("exp");
        assert_eq!(
            check_token(&compact(&json!({"alg": "ES256"}), &endless, b"right")),
            Err(TokenProblem::Times)
        );
    }

    #[test]
    fn a_valid_token_yields_its_validity_period() {
        let found = check_token(&compact(&json!({"alg": "EdDSA"}), &good_claims(), b"right")).unwrap();
        let until = Duration::from_secs(1_800_000_090);
        assert_eq!(found, TokenPeriod { from: Duration::ZERO, until });
    }

    proptest! {
        /// Without a valid signature no token is accepted, whatever its bytes.
        #[test]
        fn no_bytes_pass_without_a_signature(bytes in "[A-Za-z0-9_.=-]{0,80}") {
            prop_assert!(check_token(&bytes).is_err());
            let token = compact(&json!({"alg": "HS256"}), &good_claims(), bytes.as_bytes());
            prop_assert_eq!(check_token(&token), Err(TokenProblem::Signature));
        }
    }
}
