//! A tenant's pseudonym: HMAC-SHA-256 (RFC 2104) of its name, cut to 128 bits.
//!
//! A plain hash of a name is no pseudonym, since whoever has a list of names finds each in it. With a key, an auditor who
//! was given none can still tell one tenant's receipts from another's, and whoever holds the key can say whose they are.

use super::chain::hex;
use super::hmac::HmacKey;

/// Bytes of the code that are kept.
const KEPT: usize = 16;

/// The key of a fleet's pseudonyms.
#[derive(Clone)]
pub struct PseudonymKey(HmacKey);

impl PseudonymKey {
    /// The shortest secret that is taken, in bytes: one that can be guessed gives every name away.
    pub const SECRET_BYTES_MIN: usize = 16;

    /// The key made from a secret; `None` if that is shorter than [`PseudonymKey::SECRET_BYTES_MIN`].
    pub fn new(secret: &[u8]) -> Option<PseudonymKey> {
        (secret.len() >= PseudonymKey::SECRET_BYTES_MIN).then(|| PseudonymKey(HmacKey::of(secret)))
    }

    /// The pseudonym of a tenant.
    pub fn pseudonym(&self, tenant: &str) -> String {
        hex(&self.0.tag(tenant.as_bytes())[..KEPT])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_at_the_limit_is_taken_and_one_byte_less_is_not() {
        assert!(PseudonymKey::new(&[1; 16]).is_some());
        assert!(PseudonymKey::new(&[1; 15]).is_none());
        let key = PseudonymKey::new(b"0123456789abcdef").expect("long enough");
        let other = PseudonymKey::new(b"0123456789abcdeg").expect("long enough");
        assert_eq!(key.pseudonym("docs").len(), 2 * KEPT);
        assert_ne!(key.pseudonym("docs"), key.pseudonym("doc"));
        assert_ne!(key.pseudonym("docs"), other.pseudonym("docs"));
    }
}
