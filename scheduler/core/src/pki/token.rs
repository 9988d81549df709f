//! Join token.
//!
//! The text has all that a new process needs: addresses of hubs, the fingerprint of the authority, by which it
//! recognises a hub before it sends anything, and a secret. Its last bytes are a checksum, so that a typo or a truncated
//! copy is recognised as such, and is not taken for an expired token.
//!
//! ```text
//! meridian-join-1.BASE64URL       number of fingerprints, fingerprints, secret, addresses of hubs, checksum
//! ```

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use scheduler_api::VERSION;
use scheduler_api::WireError;
use scheduler_api::pki::{TokenRecordV1, UsedTokenV1};
use sha2::{Digest, Sha256};

use super::{from_hex, hex};
use crate::hubs::HUBS_MAX;
use regions::HostPort;
use regions::spiffe::SpiffeId;

/// Beginning of the text, with the version of the format.
const PREFIX: &str = "meridian-join-1.";
/// Maximum bytes of the text.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Bytes of a secret. It cannot be guessed, so a fast hash suffices to store it.
const SECRET_BYTES: usize = 20;
/// Bytes of the checksum.
const CHECKSUM_BYTES: usize = 4;
/// Maximum number of authorities that are trusted at a time.
pub const AUTHORITIES_MAX: usize = 2;
/// Minimum time in which a token can be used.
pub const TTL_MIN: Duration = Duration::from_secs(60);
/// Maximum time in which a token can be used.
pub const TTL_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Maximum number of tokens that are stored, used ones until they would have expired included.
pub const TOKENS_MAX: usize = 4096;

/// SHA-256 of a certificate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Returns the fingerprint of a certificate in DER.
    pub fn of(certificate: &[u8]) -> Fingerprint {
        Fingerprint(Sha256::digest(certificate).into())
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    fn from_str(text: &str) -> Result<Fingerprint, String> {
        let bytes = from_hex(text).ok_or("a fingerprint has 64 lower-case hexadecimal digits")?;
        Ok(Fingerprint(bytes))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Secret of a join token. It is never logged: its `Debug` output is a constant.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinSecret([u8; SECRET_BYTES]);

impl JoinSecret {
    /// Creates a secret from random bytes.
    pub fn from_random(bytes: [u8; SECRET_BYTES]) -> JoinSecret {
        JoinSecret(bytes)
    }

    /// Returns the text for the request to join.
    pub fn reveal(&self) -> String {
        hex(&self.0)
    }

    /// Returns the hash that the hub stores.
    pub fn hash(&self) -> String {
        hex(&Sha256::digest(self.0))
    }
}

impl FromStr for JoinSecret {
    type Err = String;

    fn from_str(text: &str) -> Result<JoinSecret, String> {
        let bytes = from_hex(text).ok_or("is not the secret of a join token")?;
        Ok(JoinSecret(bytes))
    }
}

impl fmt::Debug for JoinSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinSecret")
    }
}

/// Join token as a person copies it.
#[derive(Clone, Debug)]
pub struct JoinToken {
    addresses: Vec<String>,
    fingerprints: Vec<Fingerprint>,
    secret: JoinSecret,
}

/// Invalid text of a join token. The message does not contain the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenTextError {
    /// The text is not a join token.
    #[error(
        "the join token does not begin with `{PREFIX}`; copy the whole line that `meridian pki token` prints"
    )]
    Foreign,
    /// The checksum of the join token is wrong.
    #[error(
        "the join token has a typo or is incomplete; copy the whole line that `meridian pki token` prints"
    )]
    Typo,
    /// The text is longer than any join token.
    #[error(
        "the join token has more than {TEXT_BYTES_MAX} bytes; copy the line that `meridian pki token` prints"
    )]
    TooLong,
    /// The checksum of the join token is right, but its content is not valid.
    #[error("the join token is invalid; create another one with `meridian pki token`")]
    Invalid,
}

impl JoinToken {
    /// Creates a token for hubs at these addresses (`HOST:PORT`), whose certificates an authority with one of the
    /// fingerprints has signed.
    ///
    /// # Errors
    ///
    /// If the addresses or the number of fingerprints are invalid.
    pub fn new(
        addresses: Vec<String>,
        fingerprints: Vec<Fingerprint>,
        secret: JoinSecret,
    ) -> Result<JoinToken, TokenTextError> {
        let is_valid = (1..=AUTHORITIES_MAX).contains(&fingerprints.len())
            && (1..=HUBS_MAX).contains(&addresses.len())
            && addresses.iter().all(|address| is_address(address));
        let token = JoinToken { addresses, fingerprints, secret };
        if is_valid && token.text().len() <= TEXT_BYTES_MAX {
            Ok(token)
        } else {
            Err(TokenTextError::Invalid)
        }
    }

    /// Returns the addresses of the hubs.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Returns the fingerprints of the authorities, one of which has signed the certificate of a hub.
    pub fn fingerprints(&self) -> &[Fingerprint] {
        &self.fingerprints
    }

    /// Returns the secret.
    pub fn secret(&self) -> &JoinSecret {
        &self.secret
    }

    /// Returns the text, which contains the secret.
    pub fn text(&self) -> String {
        let JoinToken { addresses, fingerprints, secret } = self;
        let mut bytes = vec![u8::try_from(fingerprints.len()).unwrap_or(0)];
        fingerprints.iter().for_each(|Fingerprint(digest)| bytes.extend_from_slice(digest));
        bytes.extend_from_slice(&secret.0);
        bytes.extend_from_slice(addresses.join(",").as_bytes());
        let checksum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&checksum[..CHECKSUM_BYTES]);
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for JoinToken {
    type Err = TokenTextError;

    fn from_str(text: &str) -> Result<JoinToken, TokenTextError> {
        let text = text.trim();
        if text.len() > TEXT_BYTES_MAX {
            return Err(TokenTextError::TooLong);
        }
        let encoded = text.strip_prefix(PREFIX).ok_or(TokenTextError::Foreign)?;
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| TokenTextError::Typo)?;
        let at = bytes.len().checked_sub(CHECKSUM_BYTES).ok_or(TokenTextError::Typo)?;
        let (content, checksum) = bytes.split_at(at);
        if Sha256::digest(content)[..CHECKSUM_BYTES] != *checksum {
            return Err(TokenTextError::Typo);
        }
        let (count, rest) = content.split_first().ok_or(TokenTextError::Invalid)?;
        let (digests, rest) =
            rest.split_at_checked(32 * usize::from(*count)).ok_or(TokenTextError::Invalid)?;
        let (secret, addresses) = rest.split_first_chunk().ok_or(TokenTextError::Invalid)?;
        let addresses = std::str::from_utf8(addresses).map_err(|_| TokenTextError::Invalid)?;
        let fingerprints = digests.as_chunks::<32>().0.iter().map(|digest| Fingerprint(*digest)).collect();
        JoinToken::new(addresses.split(',').map(str::to_owned).collect(), fingerprints, JoinSecret(*secret))
    }
}

/// Returns whether a text is `HOST:PORT`, with a name, an IPv4 address, or an IPv6 address in brackets.
pub fn is_address(text: &str) -> bool {
    text.parse::<HostPort>().is_ok()
}

/// Join token as the hub stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRecord {
    /// Name in the certificate.
    pub subject: SpiffeId,
    /// End of the token.
    pub expires: Duration,
    /// Validity of the certificate.
    pub validity: Duration,
    /// Its use, of which there is at most one.
    pub used: Option<TokenUse>,
}

/// Use of a join token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenUse {
    /// SHA-256 of the certified public key.
    pub key_sha256: String,
    /// The certificate, followed by that of its authority.
    pub certificate: String,
}

/// Reason for not accepting a join token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRejected {
    /// The authority has no such join token.
    #[error(
        "the join token is unknown: it expired, or another fleet created it; create one with `meridian pki token`"
    )]
    Unknown,
    /// The lifetime of the join token has passed.
    #[error("the join token has expired; create another one with `meridian pki token`")]
    Expired,
    /// The join token was used with another key: by another process, or by this one before it lost its key.
    #[error(
        "the join token was used before, and a token is used once; if no process of yours has used it, revoke the \
         certificate of {0}; create another token with `meridian pki token`"
    )]
    Used(Box<SpiffeId>),
}

/// Effect of a request to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Join {
    /// A certificate is issued, and the token is used up with it.
    Issue,
    /// The certificate was issued before for the same key, and is sent again.
    Repeat(String),
}

impl TokenRecord {
    /// Decides on a request to join with this token and a public key with this hash.
    ///
    /// # Errors
    ///
    /// The reason why the token is not accepted.
    pub fn join(&self, key_sha256: &str, now: Duration) -> Result<Join, TokenRejected> {
        if now > self.expires {
            return Err(TokenRejected::Expired);
        }
        match &self.used {
            None => Ok(Join::Issue),
            Some(used) if used.key_sha256 == key_sha256 => Ok(Join::Repeat(used.certificate.clone())),
            Some(_) => Err(TokenRejected::Used(Box::new(self.subject.clone()))),
        }
    }
}

impl TryFrom<TokenRecordV1> for TokenRecord {
    type Error = WireError;

    fn try_from(wire: TokenRecordV1) -> Result<TokenRecord, WireError> {
        let TokenRecordV1 { version: _, subject, expires_s, validity_s, used } = wire;
        let used = used.map(|UsedTokenV1 { key_sha256, certificate }| TokenUse { key_sha256, certificate });
        Ok(TokenRecord {
            subject: scheduler_api::parsed("subject", &subject)?,
            expires: Duration::from_secs(expires_s),
            validity: Duration::from_secs(validity_s),
            used,
        })
    }
}

impl From<&TokenRecord> for TokenRecordV1 {
    fn from(record: &TokenRecord) -> TokenRecordV1 {
        let TokenRecord { subject, expires, validity, used } = record;
        let used = used.as_ref().map(|TokenUse { key_sha256, certificate }| UsedTokenV1 {
            key_sha256: key_sha256.clone(),
            certificate: certificate.clone(),
        });
        TokenRecordV1 {
            version: VERSION,
            subject: subject.to_string(),
            expires_s: expires.as_secs(),
            validity_s: validity.as_secs(),
            used,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token(
        hubs: &[&str],
        fingerprints: &[[u8; 32]],
        secret: [u8; 20],
    ) -> Result<JoinToken, TokenTextError> {
        let hubs = hubs.iter().map(|hub| (*hub).to_owned()).collect();
        JoinToken::new(hubs, fingerprints.iter().map(|it| Fingerprint(*it)).collect(), JoinSecret(secret))
    }

    proptest! {
        #[test]
        fn the_text_of_a_token_is_read_back(
            ports in proptest::collection::vec(1_u16.., 1..=HUBS_MAX), one: [u8; 32], other: Option<[u8; 32]>,
            secret: [u8; 20],
        ) {
            let hubs: Vec<_> = ports.iter().map(|port| format!("hub.m.example:{port}")).collect();
            let fingerprints: Vec<_> = [Some(one), other].into_iter().flatten().map(Fingerprint).collect();
            let token = JoinToken::new(hubs.clone(), fingerprints.clone(), JoinSecret(secret)).unwrap();
            let read: JoinToken = format!(" {}\n", token.text()).parse().unwrap();
            prop_assert_eq!((read.addresses, read.fingerprints), (hubs, fingerprints));
            prop_assert_eq!(read.secret.hash(), token.secret.hash());
        }

        #[test]
        fn a_changed_or_missing_character_is_recognised(secret: [u8; 20], at: prop::sample::Index, with in "[A-Za-z0-9_-]") {
            let text = token(&["hub:7000"], &[[7; 32]], secret).unwrap().text();
            let at = PREFIX.len() + at.index(text.len() - PREFIX.len());
            let mut changed = text.clone();
            changed.replace_range(at..=at, &with);
            if changed != text {
                prop_assert_eq!(changed.parse::<JoinToken>().err(), Some(TokenTextError::Typo));
            }
            prop_assert_eq!(text[..at].parse::<JoinToken>().err(), Some(TokenTextError::Typo));
        }

        #[test]
        fn any_text_is_read_or_rejected(text in "(meridian-join-1\\.)?[ -~]{0,200}") {
            text.parse::<JoinToken>().ok();
        }
    }

    #[test]
    fn a_token_has_hubs_and_one_or_two_fingerprints() {
        let hub = ["hub:7000"];
        assert!(token(&hub, &[[1; 32], [2; 32]], [0; 20]).is_ok());
        assert!(token(&hub, &[], [0; 20]).is_err());
        assert!(token(&hub, &[[1; 32]; 3], [0; 20]).is_err());
        assert!(token(&[], &[[1; 32]], [0; 20]).is_err());
        assert!(token(&["hub"], &[[1; 32]], [0; 20]).is_err());
        assert!(token(&["hub:7000"; HUBS_MAX + 1], &[[1; 32]], [0; 20]).is_err());
        for address in
            ["hub", "hub:", "hub:0", "hub:65536", ":1", "a,b:1", "http://hub:1", "::1:1", "[x]:1", "hub:+1"]
        {
            assert!(token(&[address], &[[1; 32]], [0; 20]).is_err(), "{address}");
        }
        assert!(token(&["[::1]:1", "10.0.0.1:2"], &[[1; 32]], [0; 20]).is_ok());
        assert_eq!("x".parse::<JoinToken>().err(), Some(TokenTextError::Foreign));
        let long = format!("{PREFIX}{}", "A".repeat(TEXT_BYTES_MAX));
        assert_eq!(long.parse::<JoinToken>().err(), Some(TokenTextError::TooLong));
    }

    #[test]
    fn debug_output_and_errors_have_no_secret() {
        let token = token(&["hub:7000"], &[[1; 32]], [0xab; 20]).unwrap();
        let shown = format!("{token:?}");
        assert!(
            !shown.contains("ab, ab") && !shown.contains("abab") && shown.contains("JoinSecret"),
            "{shown}"
        );
        assert!(token.secret().hash() != token.secret().reveal());
    }

    #[test]
    fn a_token_is_used_once_and_until_it_expires() {
        let subject: SpiffeId = "spiffe://m/operator/alice".parse().unwrap();
        let second = Duration::from_secs(1);
        let mut record =
            TokenRecord { subject: subject.clone(), expires: second * 100, validity: second, used: None };
        assert_eq!(record.join("a", second * 100), Ok(Join::Issue));
        assert_eq!(record.join("a", second * 101), Err(TokenRejected::Expired));
        record.used = Some(TokenUse { key_sha256: "a".into(), certificate: "pem".into() });
        assert_eq!(record.join("a", second), Ok(Join::Repeat("pem".into())), "the response was lost");
        assert_eq!(record.join("b", second), Err(TokenRejected::Used(Box::new(subject))));
        assert_eq!(record.join("a", second * 101), Err(TokenRejected::Expired));
        assert_eq!(TokenRecord::try_from(TokenRecordV1::from(&record)), Ok(record));
    }
}
