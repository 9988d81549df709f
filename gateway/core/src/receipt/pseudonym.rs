//! Pseudonyms of tenants: HMAC-SHA-256 (RFC 2104) of the name, truncated to 128 bits.
//!
//! A plain hash of a name is no pseudonym, because it can be found with a list of names. With a key, an auditor without
//! the key can still distinguish the receipts of two tenants, and the holder of the key can identify the tenant.

use super::chain::hex;
use super::hmac::{self, HmacKey};

/// Bytes of the truncated code.
const PSEUDONYM_BYTES: usize = 16;

/// Key of a fleet's pseudonyms.
#[derive(Clone)]
pub struct PseudonymKey(HmacKey);

impl PseudonymKey {
    /// Minimum bytes of the secret: one that can be guessed reveals every name.
    pub const SECRET_BYTES_MIN: usize = hmac::SECRET_BYTES_MIN;

    /// Makes the key from a secret; `None` if it is shorter than [`PseudonymKey::SECRET_BYTES_MIN`].
    pub fn new(secret: &[u8]) -> Option<PseudonymKey> {
        (secret.len() >= PseudonymKey::SECRET_BYTES_MIN).then(|| PseudonymKey(HmacKey::of(secret)))
    }

    /// Returns the pseudonym of a tenant.
    pub fn pseudonym(&self, tenant: &str) -> String {
        hex(&self.0.tag(tenant.as_bytes())[..PSEUDONYM_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_at_the_minimum_is_accepted_and_one_byte_less_is_not() {
        assert!(PseudonymKey::new(&[1; 16]).is_some());
        assert!(PseudonymKey::new(&[1; 15]).is_none());
        let key = PseudonymKey::new(b"0123456789abcdef").expect("long enough");
        let other = PseudonymKey::new(b"0123456789abcdeg").expect("long enough");
        assert_eq!(key.pseudonym("docs").len(), 2 * PSEUDONYM_BYTES);
        assert_ne!(key.pseudonym("docs"), key.pseudonym("doc"));
        assert_ne!(key.pseudonym("docs"), other.pseudonym("docs"));
    }
}
