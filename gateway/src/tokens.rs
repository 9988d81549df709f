//! Verifies the tokens that others have signed, with keys from files that may change.
//!
//! `gateway_core::jwt` takes tokens apart and judges what they say; here is the arithmetic, which is `ring`'s (that of TLS),
//! and the reading of files. Each issuer's keys are in a local file: who fetches it (a sidecar, a cron job, a mounted
//! secret) can be restarted, rotated and firewalled without the request path knowing. A file is read again every few
//! seconds, as a whole: modification times lie (a mounted secret is a link that is swung, and two writes can share one
//! tick), and a few KiB cost less than being wrong. A file that cannot be used is told of once and changes nothing.

use gateway_core::jwt::cache::VerifiedTokens;
use gateway_core::jwt::jwks::{self, NamedKey, PublicKey};
use gateway_core::jwt::{Algorithm, IssuerRules, SignatureInput, Token, TokenProblem};
use gateway_core::keys::{Credential, Digest, KeyRing};
use gateway_core::tenant::Tenant;
use ring::{hmac, signature};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use supervision::{Mutex, RwLock};

/// How often the files are read: a key that was taken back is believed no longer than this.
const RELOAD_PERIOD: Duration = Duration::from_secs(5);
/// The least and the most bytes of a shared secret: the size of the hash (RFC 7518 §3.2), and a page.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 32..=4096;

/// Where an issuer's keys are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A JSON Web Key Set of public keys.
    Jwks(PathBuf),
    /// A secret that is shared with the issuer, for HS256.
    Secret(PathBuf),
}

/// An issuer, as configured, with the keys that its file had then.
#[derive(Clone)]
pub struct Issuer {
    pub(crate) rules: IssuerRules,
    pub(crate) source: Source,
    keys: Arc<Keys>,
    /// What the file held, so that a change is seen.
    digest: Digest,
}

/// What signatures of one issuer are verified with.
enum Keys {
    Public(Vec<NamedKey>),
    Secret(hmac::Key),
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Source::Jwks(path) | Source::Secret(path) => path,
        }
    }

    /// What the file holds, of which no more is read than may be used.
    fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        std::fs::File::open(self.path())?.take(jwks::JWKS_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn keys(&self, bytes: &[u8]) -> Result<Keys, String> {
        match self {
            Source::Jwks(_) => jwks::read(bytes).map(Keys::Public),
            Source::Secret(_) => {
                let secret = bytes.trim_ascii();
                if !SECRET_BYTES.contains(&secret.len()) {
                    return Err(format!(
                        "a secret must have {} to {} bytes",
                        SECRET_BYTES.start(),
                        SECRET_BYTES.end()
                    ));
                }
                Ok(Keys::Secret(hmac::Key::new(hmac::HMAC_SHA256, secret)))
            }
        }
    }
}

impl Issuer {
    /// Reads an issuer's keys for the first time.
    pub(crate) fn open(rules: IssuerRules, source: Source) -> Result<Issuer, String> {
        let problem = |problem: &dyn std::fmt::Display| format!("\"{}\": {problem}", source.path().display());
        let bytes = source.read().map_err(|error| problem(&format_args!("it cannot be read: {error}")))?;
        let keys = source.keys(&bytes).map_err(|error| problem(&error))?;
        Ok(Issuer { rules, source, keys: Arc::new(keys), digest: Digest::of(&bytes) })
    }
}

impl Issuer {
    /// Whether both are the same issuer with its keys in the same file. What the file holds is followed by itself.
    pub(crate) fn is_as_before(&self, other: &Issuer) -> bool {
        self.rules == other.rules && self.source == other.source
    }
}

impl Keys {
    /// Whether the signature is right. A key is used for its own algorithm only, whatever the token says.
    fn verify(&self, token: &SignatureInput<'_>) -> Result<(), TokenProblem> {
        let SignatureInput { algorithm, kid, signed, signature } = *token;
        match self {
            Keys::Secret(key) if algorithm == Algorithm::Hs256 => {
                hmac::verify(key, signed, signature).map_err(|_| TokenProblem::Signature)
            }
            Keys::Secret(_) => Err(TokenProblem::Key),
            Keys::Public(keys) => {
                let mut fitting = keys.iter().filter(|named| {
                    named.key.algorithm() == algorithm && (kid.is_none() || named.kid.as_deref() == kid)
                });
                let (Some(only), None) = (fitting.next(), fitting.next()) else {
                    return Err(TokenProblem::Key);
                };
                verify_public(&only.key, signed, signature)
            }
        }
    }
}

fn verify_public(key: &PublicKey, signed: &[u8], signature: &[u8]) -> Result<(), TokenProblem> {
    let plain = |algorithm: &'static dyn signature::VerificationAlgorithm, key: &[u8]| {
        signature::UnparsedPublicKey::new(algorithm, key).verify(signed, signature)
    };
    let verified = match key {
        PublicKey::Rsa { n, e } => signature::RsaPublicKeyComponents { n, e }.verify(
            &signature::RSA_PKCS1_2048_8192_SHA256,
            signed,
            signature,
        ),
        PublicKey::P256(point) => plain(&signature::ECDSA_P256_SHA256_FIXED, point),
        PublicKey::Ed25519(key) => plain(&signature::ED25519, key),
    };
    verified.map_err(|_| TokenProblem::Signature)
}

/// The issuers whose tokens are taken.
pub(crate) struct Tokens {
    issuers: Vec<(IssuerRules, Source)>,
    current: RwLock<Current>,
    seen: Mutex<VerifiedTokens>,
}

#[derive(Clone)]
struct Current {
    /// Rises when any keys change.
    generation: u64,
    /// In the order of the issuers.
    keys: Vec<Arc<Keys>>,
}

impl Tokens {
    pub(crate) fn new(issuers: &[Issuer]) -> Tokens {
        let keys = issuers.iter().map(|issuer| issuer.keys.clone()).collect();
        Tokens {
            issuers: issuers.iter().map(|issuer| (issuer.rules.clone(), issuer.source.clone())).collect(),
            current: RwLock::new(Current { generation: 1, keys }),
            seen: Mutex::default(),
        }
    }

    /// Whether any are taken.
    pub(crate) fn none(&self) -> bool {
        self.issuers.is_empty()
    }

    /// The tenant that a token speaks for.
    pub(crate) fn tenant(
        &self,
        credential: &Credential<'_>,
        ring: &KeyRing,
        now: SystemTime,
    ) -> Result<Arc<Tenant>, TokenProblem> {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let generation = self.current.read().generation;
        let seen = self.seen.lock();
        if let Some(tenant) = seen.tenant(&credential.digest, generation, now) {
            // Who it speaks for may have been changed or taken away since.
            return ring.current(tenant).cloned().ok_or(TokenProblem::Tenant);
        }
        drop(seen);
        let token = Token::parse(credential.secret)?;
        let place = self.issuers.iter().position(|(rules, _)| token.issuer() == Some(&rules.issuer));
        let place = place.ok_or(TokenProblem::Issuer)?;
        let Current { generation, keys } = self.current.read().clone();
        let rules = &self.issuers[place].0;
        let bearer = token.verified(|to_verify| keys[place].verify(to_verify))?.check(rules, now)?;
        let tenant = ring.tenant_of(&rules.issuer, &bearer.tenant).ok_or(TokenProblem::Tenant)?;
        let mut seen = self.seen.lock();
        seen.insert(credential.digest, generation, &bearer, tenant, now);
        Ok(tenant.clone())
    }

    /// Reads the files again and again, for ever.
    pub(crate) async fn follow(self: Arc<Tokens>, issuers: Vec<Issuer>) {
        let mut held: Vec<Held> = issuers.iter().map(|issuer| Held::Used(issuer.digest)).collect();
        let mut beat = tokio::time::interval(RELOAD_PERIOD);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.none() {
            beat.tick().await;
            let tokens = self.clone();
            let read = tokio::task::spawn_blocking(move || {
                for (place, held) in held.iter_mut().enumerate() {
                    tokens.reload(place, held);
                }
                held
            });
            held = read.await.expect("reading files does not panic");
        }
    }

    fn reload(&self, place: usize, held: &mut Held) {
        let (IssuerRules { issuer, .. }, source) = &self.issuers[place];
        let path = source.path().display();
        let bytes = match source.read() {
            Ok(bytes) => bytes,
            Err(error) => {
                if *held != Held::Unreadable {
                    tracing::warn!(issuer, %path, %error, "the keys of an issuer cannot be read; the last stay");
                    *held = Held::Unreadable;
                }
                return;
            }
        };
        let digest = Digest::of(&bytes);
        if *held == Held::Used(digest) || *held == Held::Refused(digest) {
            return;
        }
        match source.keys(&bytes) {
            Ok(keys) => {
                let mut current = self.current.write();
                current.generation += 1;
                current.keys[place] = Arc::new(keys);
                drop(current);
                *held = Held::Used(digest);
                tracing::info!(issuer, %path, "the keys of an issuer have changed");
            }
            Err(problem) => {
                *held = Held::Refused(digest);
                tracing::warn!(issuer, %path, problem, "the keys of an issuer cannot be used; the last stay");
            }
        }
    }
}

/// What a file held when it was last read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// The keys that are in use.
    Used(Digest),
    /// Something that cannot be used.
    Refused(Digest),
    /// Nothing, or nothing for us.
    Unreadable,
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};

    /// The modulus of a key whose other half nobody has kept (its exponent is 65537), and a token of it: `RS256`, `kid`
    /// rsa, for the tenant `tokens`, until the year 2100.
    const RSA_MODULUS: &str = "\
        u3dJVPT7sB0dSI4RfSr4stTSw2sygTQYVz4LL85Pvm8KNMA4NdrGB1TU4-vrMAvUZhf0C26bdNs8vKIB4ROKhD33GHC8LIU7\
        ej8eO40Tt2-Ugl2E5FlzTrVt_XYKEQ9Lt-YbuOui3pnhtGKAzEb3xZQtxhrzogiihNwDGl1xn3iTzS-8TPCnIp_stcRNdcFf\
        rRLv7_j4abDas0KIyaQas5-KoID2bGCwMAuM5yEcYqvZN_IbptXPANKO09mMw-Vvd2lh-qUBkw-DlINK4K2D8ja9AJDeHHDn\
        nAnapbp_-10nk2o_FxToOKuwyv8sSejOLRS1yDFNyIs3qDgaL1ksCw";
    const RSA_TOKEN: &str = "\
        eyJhbGciOiJSUzI1NiIsImtpZCI6InJzYSJ9.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUuY29tLyIsImF1ZCI6Im1\
        lcmlkaWFuIiwidGVuYW50IjoidG9rZW5zIiwiZXhwIjo0MTAyNDQ0ODAwfQ.Da1AZ-95-BLnyu8voYQR1RhFP92NtB-xzuw9\
        F6_eGGYj4ls_UM-3qOK0u_HrT3mTTuHvgv_umh4elu0bFZpsZQOj2GrJsXIOMZp6Yj9KwZcNp2bpgPOzo2fLgBrcPbiHJCHG\
        vGI0sP8CPML-PG5lh1dysy0a9jZ2a-iLnNjVx97XnrNWjCJ418ofvUS71Yh5bbDjNduiq3qnjgCRPQxRpbcKH2N9IUre85Ld\
        2B-W-_Xg50H8m_fpv1DaLGHIZgrat9vkeCY2rZEwNVWYOFjA4FMCUK1-xF-OaMvIkFyHIjCDQdG0QQW1jbX1EOTb7T5eWDo5\
        h0qa17G6UoKTZXRaxg";

    fn public(kid: &str, key: PublicKey) -> NamedKey {
        NamedKey { kid: Some(kid.to_owned()), key }
    }

    #[test]
    fn each_algorithm_is_verified_by_its_own_key_and_by_no_other() {
        let chance = SystemRandom::new();
        let message = b"header.claims";
        let ec = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &chance).unwrap();
        let ec = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, ec.as_ref(), &chance).unwrap();
        let ed = Ed25519KeyPair::generate_pkcs8(&chance).unwrap();
        let ed = Ed25519KeyPair::from_pkcs8(ed.as_ref()).unwrap();
        let point = ec.public_key().as_ref().to_vec();
        let keys = Keys::Public(vec![
            public("ec", PublicKey::P256(point.clone())),
            public("ed", PublicKey::Ed25519(ed.public_key().as_ref().to_vec())),
        ]);
        let es256 = ec.sign(&chance, message).unwrap();
        let ed25519 = ed.sign(message);
        let check = |keys: &Keys, algorithm, kid, signature: &[u8], expected| {
            let token = SignatureInput { algorithm, kid, signed: message, signature };
            assert_eq!(keys.verify(&token), expected, "{algorithm:?} {kid:?}");
        };
        check(&keys, Algorithm::Es256, Some("ec"), es256.as_ref(), Ok(()));
        check(&keys, Algorithm::EdDsa, Some("ed"), ed25519.as_ref(), Ok(()));
        check(&keys, Algorithm::Es256, None, es256.as_ref(), Ok(()));
        check(&keys, Algorithm::Es256, Some("ed"), es256.as_ref(), Err(TokenProblem::Key));
        check(&keys, Algorithm::EdDsa, Some("ed"), es256.as_ref(), Err(TokenProblem::Signature));
        check(&keys, Algorithm::Rs256, None, es256.as_ref(), Err(TokenProblem::Key));
        // The confusion: a public key is known to everybody, and would make a fine secret for who does not look.
        let forged = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &point), message);
        check(&keys, Algorithm::Hs256, Some("ec"), forged.as_ref(), Err(TokenProblem::Key));
        check(&keys, Algorithm::Hs256, None, forged.as_ref(), Err(TokenProblem::Key));

        let secret = hmac::Key::new(hmac::HMAC_SHA256, b"a secret of thirty-two bytes, yes");
        let hs256 = hmac::sign(&secret, message);
        let keys = Keys::Secret(secret);
        check(&keys, Algorithm::Hs256, None, hs256.as_ref(), Ok(()));
        check(&keys, Algorithm::Hs256, Some("any"), hs256.as_ref(), Ok(()));
        check(&keys, Algorithm::Hs256, None, forged.as_ref(), Err(TokenProblem::Signature));
        check(&keys, Algorithm::Es256, None, hs256.as_ref(), Err(TokenProblem::Key));
    }

    #[test]
    fn a_token_that_another_library_has_signed_is_verified() {
        let modulus = URL_SAFE_NO_PAD.decode(RSA_MODULUS).unwrap();
        let keys = Keys::Public(vec![public("rsa", PublicKey::Rsa { n: modulus, e: vec![1, 0, 1] })]);
        let asked = |text: &str| {
            let token = Token::parse(text.as_bytes())?;
            token.verified(|to_verify| keys.verify(to_verify)).map(drop)
        };
        assert_eq!(asked(RSA_TOKEN), Ok(()));
        let (signed, signature) = RSA_TOKEN.rsplit_once('.').unwrap();
        let (header, _) = signed.split_once('.').unwrap();
        assert_eq!(asked(&format!("{header}.e30.{signature}")), Err(TokenProblem::Signature));
    }

    #[test]
    fn of_two_keys_that_would_fit_none_is_guessed() {
        let keys = Keys::Public(vec![
            public("1", PublicKey::Ed25519(vec![1; 32])),
            public("2", PublicKey::Ed25519(vec![2; 32])),
        ]);
        let token =
            SignatureInput { algorithm: Algorithm::EdDsa, kid: None, signed: b"x", signature: &[0; 64] };
        assert_eq!(keys.verify(&token), Err(TokenProblem::Key));
        assert_eq!(keys.verify(&SignatureInput { kid: Some("2"), ..token }), Err(TokenProblem::Signature));
    }

    #[test]
    fn a_changed_file_is_taken_and_a_broken_one_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let secret = |letter: &str| letter.repeat(32);
        let source = Source::Secret(path.clone());
        let rules = IssuerRules {
            issuer: "i".to_owned(),
            audience: "a".to_owned(),
            tenant_claim: "t".to_owned(),
            leeway: Duration::ZERO,
        };
        assert!(Issuer::open(rules.clone(), source.clone()).err().unwrap().contains("cannot be read"));
        std::fs::write(&path, "a".repeat(31)).unwrap();
        assert!(Issuer::open(rules.clone(), source.clone()).err().unwrap().contains("32 to 4096"));
        std::fs::write(&path, secret("a")).unwrap();
        let issuer = Issuer::open(rules, source).map_err(|_| "32 bytes").unwrap();
        let tokens = Tokens::new(std::slice::from_ref(&issuer));
        let mut held = Held::Used(issuer.digest);
        let mut check = |expected: &str, generation: u64| {
            tokens.reload(0, &mut held);
            let current = tokens.current.read();
            let signed = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret(expected).as_bytes()), b"x");
            let token = SignatureInput {
                algorithm: Algorithm::Hs256,
                kid: None,
                signed: b"x",
                signature: signed.as_ref(),
            };
            assert_eq!(
                (current.keys[0].verify(&token), current.generation),
                (Ok(()), generation),
                "{expected}"
            );
        };
        check("a", 1);
        std::fs::write(&path, secret("b")).unwrap();
        check("b", 2);
        std::fs::write(&path, "short").unwrap();
        check("b", 2);
        std::fs::remove_file(&path).unwrap();
        check("b", 2);
        std::fs::write(&path, secret("c")).unwrap();
        check("c", 3);
    }
}
