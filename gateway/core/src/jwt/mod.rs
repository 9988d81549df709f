//! Who asks: tokens that somebody else has signed (JWT, RFC 7519, in the compact form of RFC 7515).
//!
//! A token passes three doors, and the types hold the order:
//!
//! ```text
//!  Token::parse ──▶ Token ──verified──▶ Claims ──check──▶ the tenant's name, and until when
//!   (shape only)     │ (issuer: only to find the keys)      (issuer, audience, times)
//! ```
//!
//! Nothing that a token says is believed before its signature was; what is asked of it earlier is which issuer's keys to
//! try, and those keys then decide. The signature itself is the shell's (`ring`), given as a function, because a
//! library of cryptography brings chance with it.
//!
//! What has gone wrong with such tokens elsewhere is refused by construction (RFC 8725): a key has one algorithm and a
//! token that names another is refused, so no public key is ever used as a shared secret; `none` is no algorithm; a secret
//! comes only from a file of its own; `crit` extensions are not understood and so refused; a token that never expires is
//! refused, for that is an API key that nobody can take back.

pub mod jwks;
pub mod seen;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};
use std::time::Duration;

/// The longest token that is looked at. Those of the large identity providers have 1 to 3 KiB, with many groups in them.
pub const TOKEN_BYTES_MAX: usize = 8 << 10;
/// The claim that names the tenant where the configuration does not say.
pub const TENANT_CLAIM_DEFAULT: &str = "tenant";
/// How far the clocks of issuer and gateway may differ where the configuration does not say.
pub const LEEWAY_DEFAULT: Duration = Duration::from_secs(30);
/// The most that it may say: a token lives that much longer than its issuer meant it to.
pub const LEEWAY_MAX: Duration = Duration::from_secs(300);

/// How a token may be signed. There is no other.
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

/// What a gateway asks of the tokens of one issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The claim `iss`, letter by letter.
    pub issuer: String,
    /// Must be among the claim `aud`.
    pub audience: String,
    /// The claim whose value is the name of a tenant.
    pub tenant_claim: String,
    /// How far the two clocks may differ.
    pub leeway: Duration,
}

/// Why a token does not let its bearer in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenProblem {
    /// More than [`TOKEN_BYTES_MAX`].
    TooLong,
    /// Not three parts, of which the first two are JSON objects, in base64url without padding.
    Malformed,
    /// `alg` is not one of ours, or the header has extensions that must be understood.
    Header,
    /// `iss` names nobody who is known here.
    Issuer,
    /// No key of the issuer has this `kid` and this algorithm; or there is no `kid`, and several have the algorithm.
    Key,
    /// The signature is not that of the key.
    Signature,
    /// `aud` does not name this gateway.
    Audience,
    /// There is no `exp`, or a time is no time.
    Times,
    /// `exp` is past.
    Expired,
    /// `nbf` or `iat` is yet to come.
    NotYet,
    /// The claim that names the tenant is missing, or names none that this issuer speaks for.
    Tenant,
}

/// A token of which nothing is believed yet.
pub struct Token<'a> {
    algorithm: Algorithm,
    kid: Option<String>,
    claims: Map<String, Value>,
    /// What was signed: the first two parts as they came.
    signed: &'a [u8],
    signature: Vec<u8>,
}

/// What to find the key by and what to verify with it.
pub struct ToVerify<'a> {
    /// The token's word for it; the key must be one of this algorithm.
    pub algorithm: Algorithm,
    /// The key's name, if the token says it.
    pub kid: Option<&'a str>,
    /// What was signed.
    pub signed: &'a [u8],
    /// With what result.
    pub signature: &'a [u8],
}

/// What a token says, once its signature is known to be its issuer's.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims(Map<String, Value>);

/// Whom a token lets in, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bearer {
    /// The tenant's name.
    pub tenant: String,
    /// From when on, since the epoch; the leeway is in it.
    pub from: Duration,
    /// Until before when, since the epoch; the leeway is in it.
    pub until: Duration,
}

/// Whether these bytes look like a token at all, and not like a key.
pub fn looks_like_one(bearer: &[u8]) -> bool {
    bearer.iter().filter(|byte| **byte == b'.').count() == 2
}

impl<'a> Token<'a> {
    /// Takes a token apart.
    ///
    /// # Errors
    ///
    /// When it is none, or one that no key could make valid.
    pub fn parse(token: &'a [u8]) -> Result<Token<'a>, TokenProblem> {
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
        let plain =
            !header.contains_key("crit") && header.get("b64").is_none_or(|b64| *b64 == Value::Bool(true));
        let kid = match header.remove("kid") {
            None => None,
            Some(Value::String(kid)) => Some(kid),
            Some(_) => return Err(TokenProblem::Header),
        };
        let algorithm = algorithm.filter(|_| plain && is_a_jwt(&header)).ok_or(TokenProblem::Header)?;
        Ok(Token { algorithm, kid, claims, signed, signature })
    }

    /// Whose it says it is: to find the keys that will tell.
    pub fn issuer(&self) -> Option<&str> {
        self.claims.get("iss").and_then(Value::as_str)
    }

    /// What it says, if `verify` finds its signature right.
    ///
    /// # Errors
    ///
    /// Those of `verify`.
    pub fn verified(
        self,
        verify: impl FnOnce(&ToVerify<'_>) -> Result<(), TokenProblem>,
    ) -> Result<Claims, TokenProblem> {
        let Token { algorithm, kid, claims, signed, signature } = self;
        verify(&ToVerify { algorithm, kid: kid.as_deref(), signed, signature: &signature })?;
        Ok(Claims(claims))
    }
}

/// `typ`, if it is there, must say that this is a JWT (RFC 7519 §5.1) or an access token (RFC 9068 §2.1), so that a token
/// which the same issuer signed for something else does not open this door.
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
    /// Holds the claims against the rules of their issuer at `now`, the time since the epoch.
    ///
    /// # Errors
    ///
    /// The first rule that they break.
    pub fn check(&self, rules: &Rules, now: Duration) -> Result<Bearer, TokenProblem> {
        let Rules { issuer, audience, tenant_claim, leeway } = rules;
        let text = |name: &str| self.0.get(name).and_then(Value::as_str);
        if text("iss") != Some(issuer) {
            return Err(TokenProblem::Issuer);
        }
        let named = match self.0.get("aud") {
            Some(Value::String(one)) => one == audience,
            Some(Value::Array(several)) => several.iter().any(|one| one.as_str() == Some(audience)),
            _ => false,
        };
        if !named {
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
        let tenant = text(tenant_claim).ok_or(TokenProblem::Tenant)?.to_owned();
        Ok(Bearer { tenant, from, until })
    }

    /// A NumericDate (RFC 7519 §2): seconds since the epoch, perhaps with a fraction.
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

    fn rules() -> Rules {
        Rules {
            issuer: "https://login.example.com/".to_owned(),
            audience: "meridian".to_owned(),
            tenant_claim: "tenant".to_owned(),
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

    /// A signature is right here when it says so.
    fn ask(token: &str) -> Result<Bearer, TokenProblem> {
        let token = Token::parse(token.as_bytes())?;
        let right = |to_verify: &ToVerify<'_>| {
            if to_verify.signature == b"right" { Ok(()) } else { Err(TokenProblem::Signature) }
        };
        token.verified(right)?.check(&rules(), NOW)
    }

    #[test]
    fn a_token_is_believed_only_in_the_shape_that_ours_have() {
        let check = |header: Value, expected: Result<(), TokenProblem>| {
            let asked = ask(&compact(&header, &good_claims(), b"right"));
            assert_eq!(asked.map(drop), expected, "{header}");
        };
        for algorithm in ["RS256", "ES256", "EdDSA", "HS256"] {
            check(json!({"alg": algorithm}), Ok(()));
        }
        check(json!({"alg": "RS256", "typ": "JWT", "kid": "1"}), Ok(()));
        check(json!({"alg": "RS256", "typ": "at+jwt"}), Ok(()));
        let not_ours = Err(TokenProblem::Header);
        for algorithm in ["none", "None", "NONE", "", "RS384", "PS256", "rs256", "HS512"] {
            check(json!({"alg": algorithm}), not_ours);
        }
        check(json!({}), not_ours);
        check(json!({"alg": 1}), not_ours);
        check(json!({"alg": "RS256", "crit": ["exp"]}), not_ours);
        check(json!({"alg": "RS256", "b64": false}), not_ours);
        check(json!({"alg": "RS256", "kid": 7}), not_ours);
        check(json!({"alg": "RS256", "typ": "logout+jwt"}), not_ours);
    }

    #[test]
    fn what_is_no_token_is_told_from_one_that_is_wrong() {
        let check = |token: &str, expected| assert_eq!(ask(token).map(drop), Err(expected), "{token}");
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
    fn every_rule_is_held_at_its_limit_and_past_it() {
        let check = |claim: &str, value: Value, expected: Result<(), TokenProblem>| {
            let mut claims = good_claims();
            claims[claim] = value.clone();
            let asked = ask(&compact(&json!({"alg": "ES256"}), &claims, b"right"));
            assert_eq!(asked.map(drop), expected, "{claim}: {value}");
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
        check("tenant", json!(["docs"]), Err(TokenProblem::Tenant));
        let mut endless = good_claims();
        endless.as_object_mut().unwrap().remove("exp");
        assert_eq!(ask(&compact(&json!({"alg": "ES256"}), &endless, b"right")), Err(TokenProblem::Times));
    }

    #[test]
    fn whom_it_lets_in_and_until_when() {
        let bearer = ask(&compact(&json!({"alg": "EdDSA"}), &good_claims(), b"right")).unwrap();
        let until = Duration::from_secs(1_800_000_090);
        assert_eq!(bearer, Bearer { tenant: "docs".to_owned(), from: Duration::ZERO, until });
    }

    proptest! {
        /// Without the right signature nobody is let in, whatever the bytes are.
        #[test]
        fn no_bytes_pass_without_a_signature(bytes in "[A-Za-z0-9_.=-]{0,80}") {
            prop_assert!(ask(&bytes).is_err());
            let token = compact(&json!({"alg": "HS256"}), &good_claims(), bytes.as_bytes());
            prop_assert_eq!(ask(&token), Err(TokenProblem::Signature));
        }
    }
}
