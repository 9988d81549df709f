//! Operators that a token of an identity provider (OIDC) authenticates: verification, roles, and the times at which the
//! keys of the issuer are fetched.

use std::time::{Duration, Instant};

use jwt_core::{Algorithm, SignatureInput, Token, TokenProblem, TokenRules};
use regions::spiffe::Role;

/// Default of the claim with the roles of an operator.
pub const ROLES_CLAIM: &str = "roles";
/// Maximum number of claim values that give one role.
pub const ROLE_VALUES_MAX: usize = 64;
/// Time after which a fetched key set is fetched again. Issuers publish a key hours before they sign with it.
pub const FETCH_PERIOD: Duration = Duration::from_secs(10 * 60);
/// Time after which a file with a key set is read again.
pub const READ_PERIOD: Duration = Duration::from_secs(5);
/// Minimum time between two fetches, also after a failure and for tokens with an unknown key.
pub const FETCH_PAUSE: Duration = Duration::from_secs(60);
/// Maximum characters of a subject that are shown in messages and logs.
const SUBJECT_CHARS_MAX: usize = 128;

/// Rules for the tokens of operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorRules {
    /// Issuer, audience and times.
    pub token: TokenRules,
    /// Claim with the roles: a text or a list.
    pub roles_claim: String,
    /// Values that give the role `viewer`.
    pub viewers: Vec<String>,
    /// Values that give the role `operator`.
    pub operators: Vec<String>,
}

/// Operator or viewer with a valid token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenOperator {
    /// Claim `sub`, shortened, without control characters; empty if it is missing.
    pub subject: String,
    /// Highest role that the token gives: [`Role::Operator`], [`Role::Viewer`], or none.
    pub role: Option<Role>,
    /// Time since the epoch at which the token expires, with leeway.
    pub until: Duration,
}

/// Verifies a token at `now`, the time since the epoch. `verify` verifies its signature with the keys of the issuer.
///
/// # Errors
///
/// The first rule that the token violates.
pub fn authenticate(
    token: &[u8],
    rules: &OperatorRules,
    now: Duration,
    verify: impl FnOnce(&SignatureInput<'_>) -> Result<(), TokenProblem>,
) -> Result<TokenOperator, TokenProblem> {
    let token = Token::parse(token, Algorithm::PUBLIC)?;
    if token.issuer() != Some(&rules.token.issuer) {
        return Err(TokenProblem::Issuer);
    }
    let claims = token.verified(verify)?;
    let until = claims.check(&rules.token, now)?.until;
    let gives = |values: &[String]| {
        claims.texts(&rules.roles_claim).any(|role| values.iter().any(|value| value == role))
    };
    let role = match (gives(&rules.operators), gives(&rules.viewers)) {
        (true, _) => Some(Role::Operator),
        (false, true) => Some(Role::Viewer),
        (false, false) => None,
    };
    let subject = claims.text("sub").unwrap_or_default().chars().filter(|c| !c.is_control());
    Ok(TokenOperator { subject: subject.take(SUBJECT_CHARS_MAX).collect(), role, until })
}

/// Times at which the key set of an issuer is fetched: periodically, and for a token with an unknown key, but never twice
/// within a pause, so that no client determines how often the issuer is called.
#[derive(Clone, Copy, Debug)]
pub struct KeySetSchedule {
    period: Duration,
    pause: Duration,
    /// Time of the last attempt.
    attempted: Option<Instant>,
    has_failed: bool,
}

impl KeySetSchedule {
    /// Creates the schedule of a set that is fetched every `period`, and at most once within `pause`.
    pub fn new(period: Duration, pause: Duration) -> KeySetSchedule {
        KeySetSchedule { period, pause, attempted: None, has_failed: false }
    }

    /// Begins the periodic attempt if it is due; otherwise returns the time until it is.
    ///
    /// # Errors
    ///
    /// The remaining time.
    pub fn begin_periodic(&mut self, now: Instant) -> Result<(), Duration> {
        let period = if self.has_failed { self.pause.min(self.period) } else { self.period };
        self.begin_after(period, now)
    }

    /// Begins an attempt for a token with an unknown key. Returns false if the last attempt is too recent.
    pub fn begin_for_unknown_key(&mut self, now: Instant) -> bool {
        self.begin_after(self.pause, now).is_ok()
    }

    /// Records the result of an attempt.
    pub fn ended(&mut self, is_success: bool) {
        self.has_failed = !is_success;
    }

    fn begin_after(&mut self, wait: Duration, now: Instant) -> Result<(), Duration> {
        let since = self.attempted.map(|attempted| now.saturating_duration_since(attempted));
        match since.and_then(|since| wait.checked_sub(since)).filter(|left| !left.is_zero()) {
            Some(left) => Err(left),
            None => {
                self.attempted = Some(now);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use jwt::jwks::{NamedKey, PublicKey};
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
    use serde_json::{Value, json};

    const NOW: Duration = Duration::from_secs(1_800_000_000);
    const MINUTE: Duration = Duration::from_secs(60);

    fn rules() -> OperatorRules {
        OperatorRules {
            token: TokenRules {
                issuer: "https://login.example.com".to_owned(),
                audience: "meridian".to_owned(),
                leeway: 5 * MINUTE,
            },
            roles_claim: ROLES_CLAIM.to_owned(),
            viewers: vec!["fleet-readers".to_owned()],
            operators: vec!["fleet-admins".to_owned()],
        }
    }

    fn claims() -> Value {
        json!({"iss": "https://login.example.com", "aud": ["meridian"], "sub": "jane", "roles": ["fleet-admins"],
            "exp": NOW.as_secs() + 60})
    }

    fn signed(header: Value, claims: &Value, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", part(&header), part(claims));
        let signature = URL_SAFE_NO_PAD.encode(sign(text.as_bytes()));
        format!("{text}.{signature}")
    }

    /// Verifies a token with these keys.
    fn check_token(token: &str, keys: &[NamedKey], now: Duration) -> Result<TokenOperator, TokenProblem> {
        authenticate(token.as_bytes(), &rules(), now, |input| jwt::verify(keys, input))
    }

    /// Key made for a test, with its public half.
    fn ed25519(kid: &str) -> (Ed25519KeyPair, NamedKey) {
        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let pair = Ed25519KeyPair::from_pkcs8(made.as_ref()).unwrap();
        let public = PublicKey::Ed25519(pair.public_key().as_ref().to_vec());
        (pair, NamedKey { kid: Some(kid.to_owned()), key: public })
    }

    #[test]
    fn a_token_gives_the_highest_role_that_its_claim_names() {
        let (pair, key) = ed25519("1");
        let check = |roles: Value, role: Option<Role>| {
            let mut claims = claims();
            claims["roles"] = roles.clone();
            let token =
                signed(json!({"alg": "EdDSA", "kid": "1"}), &claims, |text| pair.sign(text).as_ref().into());
            let found = check_token(&token, std::slice::from_ref(&key), NOW);
            let until = NOW + MINUTE + 5 * MINUTE;
            assert_eq!(found, Ok(TokenOperator { subject: "jane".to_owned(), role, until }), "{roles}");
        };
        check(json!(["fleet-admins"]), Some(Role::Operator));
        check(json!(["fleet-readers", "fleet-admins"]), Some(Role::Operator));
        check(json!("fleet-readers"), Some(Role::Viewer));
        for none in
            [json!(["operator", "Fleet-Admins", 7]), json!([]), json!({"fleet-admins": true}), Value::Null]
        {
            check(none, None);
        }
    }

    #[test]
    fn a_token_of_each_curve_is_verified() {
        let random = SystemRandom::new();
        let made = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let ec = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, made.as_ref(), &random).unwrap();
        let point = PublicKey::P256(ec.public_key().as_ref().to_vec());
        let (ed, ed_key) = ed25519("ed");
        let keys = [ed_key, NamedKey { kid: Some("ec".to_owned()), key: point }];
        let es256 = |text: &[u8]| ec.sign(&random, text).unwrap().as_ref().to_vec();
        for token in [
            signed(json!({"alg": "EdDSA", "kid": "ed"}), &claims(), |text| ed.sign(text).as_ref().into()),
            signed(json!({"alg": "ES256", "kid": "ec"}), &claims(), es256),
        ] {
            assert!(check_token(&token, &keys, NOW).is_ok());
        }
    }

    #[test]
    fn an_invalid_token_is_rejected_with_the_reason() {
        let ((pair, key), (other, _)) = (ed25519("1"), ed25519("1"));
        let keys = [key];
        let sign = |text: &[u8]| -> Vec<u8> { pair.sign(text).as_ref().into() };
        let header = || json!({"alg": "EdDSA", "kid": "1"});
        let check = |token: &str, problem: TokenProblem| {
            let found = check_token(token, &keys, NOW);
            assert_eq!(found, Err(problem), "{token}");
        };
        let with = |claim: &str, value: Value| {
            let mut claims = claims();
            claims[claim] = value;
            signed(header(), &claims, sign)
        };
        let now = NOW.as_secs();
        check(&with("exp", json!(now - 300)), TokenProblem::Expired);
        check(&with("nbf", json!(now + 301)), TokenProblem::NotYet);
        check(&with("iss", json!("https://other.example.com")), TokenProblem::Issuer);
        check(&with("aud", json!("other")), TokenProblem::Audience);
        check(&with("exp", Value::Null), TokenProblem::Times);
        for algorithm in ["none", "HS256", "HS512", "RS512", "PS256", ""] {
            let header = json!({"alg": algorithm, "kid": "1"});
            check(&signed(header, &claims(), sign), TokenProblem::Algorithm);
        }
        // The public key as a shared secret.
        let public = pair.public_key().as_ref();
        let forged = |text: &[u8]| -> Vec<u8> {
            ring::hmac::sign(&ring::hmac::Key::new(ring::hmac::HMAC_SHA256, public), text).as_ref().into()
        };
        check(&signed(json!({"alg": "HS256", "kid": "1"}), &claims(), forged), TokenProblem::Algorithm);
        check(&signed(header(), &claims(), |text| other.sign(text).as_ref().into()), TokenProblem::Signature);
        check(&signed(json!({"alg": "EdDSA", "kid": "2"}), &claims(), sign), TokenProblem::Key);
        check(&signed(json!({"alg": "RS256", "kid": "1"}), &claims(), sign), TokenProblem::Key);
        check(&"a".repeat(jwt::TOKEN_BYTES_MAX + 1), TokenProblem::TooLong);
        check("key", TokenProblem::Malformed);
        let valid = signed(header(), &claims(), sign);
        assert!(check_token(&valid, &keys, NOW).is_ok());
        assert_eq!(check_token(&valid, &[], NOW), Err(TokenProblem::Key), "no keys yet");
    }

    #[test]
    fn clocks_may_differ_by_five_minutes() {
        let (pair, key) = ed25519("1");
        let mut claims = claims();
        (claims["nbf"], claims["iat"]) = (json!(NOW.as_secs()), json!(NOW.as_secs()));
        let token = signed(json!({"alg": "EdDSA"}), &claims, |text| pair.sign(text).as_ref().into());
        let at = |now: Duration| check_token(&token, std::slice::from_ref(&key), now).map(drop);
        let second = Duration::from_secs(1);
        assert_eq!(at(NOW - 5 * MINUTE), Ok(()));
        assert_eq!(at(NOW - 5 * MINUTE - second), Err(TokenProblem::NotYet));
        assert_eq!(at(NOW + 6 * MINUTE - second), Ok(()), "it expires in a minute");
        assert_eq!(at(NOW + 6 * MINUTE), Err(TokenProblem::Expired));
    }

    #[test]
    fn unknown_keys_cause_at_most_one_fetch_in_a_pause_and_failures_are_repeated_after_it() {
        let mut schedule = KeySetSchedule::new(10 * MINUTE, MINUTE);
        #[expect(clippy::disallowed_methods, reason = "any time")]
        let start = Instant::now();
        assert_eq!(schedule.begin_periodic(start), Ok(()));
        schedule.ended(false);
        assert!(!schedule.begin_for_unknown_key(start + MINUTE / 2));
        assert_eq!(schedule.begin_periodic(start + MINUTE / 2), Err(MINUTE / 2));
        assert_eq!(
            schedule.begin_periodic(start + MINUTE),
            Ok(()),
            "after a failure the pause is the period"
        );
        schedule.ended(true);
        assert_eq!(schedule.begin_periodic(start + 2 * MINUTE), Err(9 * MINUTE));
        assert!(schedule.begin_for_unknown_key(start + 2 * MINUTE));
        assert!(!schedule.begin_for_unknown_key(start + 3 * MINUTE - Duration::from_nanos(1)));
        assert!(schedule.begin_for_unknown_key(start + 3 * MINUTE));
        assert_eq!(schedule.begin_periodic(start + 13 * MINUTE), Ok(()));
    }
}
