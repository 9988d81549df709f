//! Verification of signed tokens (JWT), with keys from files that are reloaded.
//!
//! The crate `jwt` verifies tokens; this module has the keys and reads their files. Each issuer's keys are in a local
//! file: the process that fetches it (a sidecar, a cron job, a mounted secret) can be restarted, rotated and firewalled
//! independently of the request path. The complete file is read every few seconds: modification times are unreliable (a mounted secret is a symlink that is replaced,
//! and two writes can share one timestamp), and reading a few KiB is cheap. An invalid file is logged once and changes
//! nothing.

use gateway_core::keys::{Credential, Digest, KeyRing};
use gateway_core::tenant::Tenant;
use gateway_core::token_cache::VerifiedTokens;
use jwt::jwks::{self, NamedKey};
use jwt::{Algorithm, SignatureInput, Token, TokenProblem, TokenRules};
use ring::hmac;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use supervision::task::blocking;
use supervision::{Mutex, RwLock};

/// Reload interval: a revoked key is accepted no longer than this.
const RELOAD_PERIOD: Duration = Duration::from_secs(5);
/// Allowed length of a shared secret in bytes: at least the size of the hash (RFC 7518 §3.2), at most a page.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 32..=4096;

/// Rules for the tokens of one issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IssuerRules {
    pub(crate) token: TokenRules,
    /// Claim whose value is the name of a tenant.
    pub(crate) tenant_claim: String,
}

/// Source of an issuer's keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// JSON Web Key Set with public keys.
    Jwks(PathBuf),
    /// Secret shared with the issuer, for HS256.
    Secret(PathBuf),
}

/// Configured issuer, with the keys of its file at that time.
#[derive(Clone)]
pub struct Issuer {
    pub(crate) rules: IssuerRules,
    pub(crate) source: Source,
    keys: Arc<VerificationKeys>,
    /// Digest of the file, to detect changes.
    digest: Digest,
}

/// Keys that verify the signatures of one issuer.
enum VerificationKeys {
    Public(Vec<NamedKey>),
    Secret(hmac::Key),
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Source::Jwks(path) | Source::Secret(path) => path,
        }
    }

    /// Reads the file, up to one byte more than the maximum size.
    fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        std::fs::File::open(self.path())?.take(jwks::JWKS_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn keys(&self, bytes: &[u8]) -> Result<VerificationKeys, String> {
        match self {
            Source::Jwks(_) => jwks::read(bytes).map(VerificationKeys::Public),
            Source::Secret(_) => {
                let secret = bytes.trim_ascii();
                if !SECRET_BYTES.contains(&secret.len()) {
                    return Err(format!(
                        "a secret must have {} to {} bytes",
                        SECRET_BYTES.start(),
                        SECRET_BYTES.end()
                    ));
                }
                Ok(VerificationKeys::Secret(hmac::Key::new(hmac::HMAC_SHA256, secret)))
            }
        }
    }
}

impl Issuer {
    /// Creates an issuer and reads its keys for the first time.
    pub(crate) fn open(rules: IssuerRules, source: Source) -> Result<Issuer, String> {
        let problem = |problem: &dyn std::fmt::Display| format!("\"{}\": {problem}", source.path().display());
        let bytes = source.read().map_err(|error| problem(&format_args!("cannot be read: {error}")))?;
        let keys = source.keys(&bytes).map_err(|error| problem(&error))?;
        Ok(Issuer { rules, source, keys: Arc::new(keys), digest: Digest::of(&bytes) })
    }
}

impl Issuer {
    /// Returns whether both have the same rules and key file. Changes of the file's content are tracked separately.
    pub(crate) fn has_same_configuration(&self, other: &Issuer) -> bool {
        self.rules == other.rules && self.source == other.source
    }
}

impl VerificationKeys {
    /// Verifies a signature. A key is only used with its own algorithm, independent of the token.
    fn verify(&self, token: &SignatureInput<'_>) -> Result<(), TokenProblem> {
        let SignatureInput { algorithm, kid: _, signed, signature } = *token;
        match self {
            VerificationKeys::Secret(key) if algorithm == Algorithm::Hs256 => {
                hmac::verify(key, signed, signature).map_err(|_| TokenProblem::Signature)
            }
            VerificationKeys::Secret(_) => Err(TokenProblem::Key),
            VerificationKeys::Public(keys) => jwt::verify(keys, token),
        }
    }
}

/// Verifier of the tokens of all issuers.
pub(crate) struct TokenVerifier {
    issuers: Vec<(IssuerRules, Source)>,
    current: RwLock<CurrentKeys>,
    verified: Mutex<VerifiedTokens>,
}

/// Current keys of all issuers.
#[derive(Clone)]
struct CurrentKeys {
    /// Incremented when any keys change.
    generation: u64,
    /// In the order of the issuers.
    keys: Vec<Arc<VerificationKeys>>,
}

impl TokenVerifier {
    pub(crate) fn new(issuers: &[Issuer]) -> TokenVerifier {
        let keys = issuers.iter().map(|issuer| issuer.keys.clone()).collect();
        TokenVerifier {
            issuers: issuers.iter().map(|issuer| (issuer.rules.clone(), issuer.source.clone())).collect(),
            current: RwLock::new(CurrentKeys { generation: 1, keys }),
            verified: Mutex::default(),
        }
    }

    /// Returns whether there are no issuers.
    pub(crate) fn is_empty(&self) -> bool {
        self.issuers.is_empty()
    }

    /// Returns the tenant of a token.
    pub(crate) fn tenant(
        &self,
        credential: &Credential<'_>,
        ring: &KeyRing,
        now: SystemTime,
    ) -> Result<Arc<Tenant>, TokenProblem> {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let generation = self.current.read().generation;
        let verified = self.verified.lock();
        if let Some(tenant) = verified.tenant(&credential.digest, generation, now) {
            // The tenant may have been changed or removed since.
            return ring.current(tenant).cloned().ok_or(TokenProblem::Claim);
        }
        drop(verified);
        let token = Token::parse(credential.secret, Algorithm::ALL)?;
        let index = self.issuers.iter().position(|(rules, _)| token.issuer() == Some(&rules.token.issuer));
        let index = index.ok_or(TokenProblem::Issuer)?;
        let CurrentKeys { generation, keys } = self.current.read().clone();
        let IssuerRules { token: rules, tenant_claim } = &self.issuers[index].0;
        let claims = token.verified(|to_verify| keys[index].verify(to_verify))?;
        let period = claims.check(rules, now)?;
        let tenant = claims.text(tenant_claim).and_then(|tenant| ring.tenant_of(&rules.issuer, tenant));
        let tenant = tenant.ok_or(TokenProblem::Claim)?;
        let mut verified = self.verified.lock();
        verified.insert(credential.digest, generation, period, tenant, now);
        Ok(tenant.clone())
    }

    /// Reloads the files periodically; returns only if there are no issuers.
    pub(crate) async fn follow(self: Arc<TokenVerifier>, issuers: Vec<Issuer>) {
        let mut states: Vec<KeyFileState> =
            issuers.iter().map(|issuer| KeyFileState::Used(issuer.digest)).collect();
        let mut interval = tokio::time::interval(RELOAD_PERIOD);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.is_empty() {
            interval.tick().await;
            let tokens = self.clone();
            states = blocking(move || {
                for (index, state) in states.iter_mut().enumerate() {
                    tokens.reload(index, state);
                }
                states
            })
            .await;
        }
    }

    fn reload(&self, index: usize, state: &mut KeyFileState) {
        let (IssuerRules { token: TokenRules { issuer, .. }, .. }, source) = &self.issuers[index];
        let path = source.path().display();
        let bytes = match source.read() {
            Ok(bytes) => bytes,
            Err(error) => {
                if *state != KeyFileState::Unreadable {
                    // Tokens are verified with the previous keys. Make the file readable; it is read again.
                    tracing::warn!(issuer, %path, %error, "failed to read issuer keys; keeping the previous ones");
                    *state = KeyFileState::Unreadable;
                }
                return;
            }
        };
        let digest = Digest::of(&bytes);
        if *state == KeyFileState::Used(digest) || *state == KeyFileState::Rejected(digest) {
            return;
        }
        match source.keys(&bytes) {
            Ok(keys) => {
                let mut current = self.current.write();
                current.generation += 1;
                current.keys[index] = Arc::new(keys);
                drop(current);
                *state = KeyFileState::Used(digest);
                // The file with the keys of an issuer has changed, and tokens are verified with the new keys.
                tracing::info!(issuer, %path, "issuer keys reloaded");
            }
            Err(problem) => {
                *state = KeyFileState::Rejected(digest);
                // Tokens are verified with the previous keys. Correct the file; it is read again when it changes.
                tracing::warn!(issuer, %path, problem, "issuer keys rejected; keeping the previous ones");
            }
        }
    }
}

/// State of a key file at the last reload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KeyFileState {
    /// It contained the keys in use.
    Used(Digest),
    /// Its content is invalid.
    Rejected(Digest),
    /// It could not be read.
    Unreadable,
}

#[cfg(test)]
mod tests {
    use super::*;
    use jwt::jwks::PublicKey;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};

    fn public(kid: &str, key: PublicKey) -> NamedKey {
        NamedKey { kid: Some(kid.to_owned()), key }
    }

    #[test]
    fn each_algorithm_is_verified_only_with_its_own_key() {
        let random = SystemRandom::new();
        let message = b"header.claims";
        let ec = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let ec = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, ec.as_ref(), &random).unwrap();
        let ed = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
        let ed = Ed25519KeyPair::from_pkcs8(ed.as_ref()).unwrap();
        let point = ec.public_key().as_ref().to_vec();
        let keys = VerificationKeys::Public(vec![
            public("ec", PublicKey::P256(point.clone())),
            public("ed", PublicKey::Ed25519(ed.public_key().as_ref().to_vec())),
        ]);
        let es256 = ec.sign(&random, message).unwrap();
        let ed25519 = ed.sign(message);
        let check = |keys: &VerificationKeys, algorithm, kid, signature: &[u8], expected| {
            let token = SignatureInput { algorithm, kid, signed: message, signature };
            assert_eq!(keys.verify(&token), expected, "{algorithm:?} {kid:?}");
        };
        check(&keys, Algorithm::Es256, Some("ec"), es256.as_ref(), Ok(()));
        check(&keys, Algorithm::EdDsa, Some("ed"), ed25519.as_ref(), Ok(()));
        check(&keys, Algorithm::Es256, None, es256.as_ref(), Ok(()));
        check(&keys, Algorithm::Es256, Some("ed"), es256.as_ref(), Err(TokenProblem::Key));
        check(&keys, Algorithm::EdDsa, Some("ed"), es256.as_ref(), Err(TokenProblem::Signature));
        check(&keys, Algorithm::Rs256, None, es256.as_ref(), Err(TokenProblem::Key));
        // Algorithm confusion: a public key is known to attackers, and must not be accepted as an HMAC secret.
        let forged = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &point), message);
        check(&keys, Algorithm::Hs256, Some("ec"), forged.as_ref(), Err(TokenProblem::Key));
        check(&keys, Algorithm::Hs256, None, forged.as_ref(), Err(TokenProblem::Key));

        let secret = hmac::Key::new(hmac::HMAC_SHA256, b"a secret of thirty-two bytes, yes");
        let hs256 = hmac::sign(&secret, message);
        let keys = VerificationKeys::Secret(secret);
        check(&keys, Algorithm::Hs256, None, hs256.as_ref(), Ok(()));
        check(&keys, Algorithm::Hs256, Some("any"), hs256.as_ref(), Ok(()));
        check(&keys, Algorithm::Hs256, None, forged.as_ref(), Err(TokenProblem::Signature));
        check(&keys, Algorithm::Es256, None, hs256.as_ref(), Err(TokenProblem::Key));
    }

    #[test]
    fn a_changed_file_is_reloaded_and_an_invalid_one_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let secret = |letter: &str| letter.repeat(32);
        let source = Source::Secret(path.clone());
        let token = TokenRules { issuer: "i".to_owned(), audience: "a".to_owned(), leeway: Duration::ZERO };
        let rules = IssuerRules { token, tenant_claim: "t".to_owned() };
        assert!(Issuer::open(rules.clone(), source.clone()).err().unwrap().contains("cannot be read"));
        std::fs::write(&path, "a".repeat(31)).unwrap();
        assert!(Issuer::open(rules.clone(), source.clone()).err().unwrap().contains("32 to 4096"));
        std::fs::write(&path, secret("a")).unwrap();
        let issuer = Issuer::open(rules, source).map_err(|_| "32 bytes").unwrap();
        let tokens = TokenVerifier::new(std::slice::from_ref(&issuer));
        let mut state = KeyFileState::Used(issuer.digest);
        let mut check = |expected: &str, generation: u64| {
            tokens.reload(0, &mut state);
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
