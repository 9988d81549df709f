//! A tenant's pseudonym: HMAC-SHA-256 (RFC 2104) of its name, cut to 128 bits.
//!
//! A plain hash of a name is no pseudonym, since whoever has a list of names finds each in it. With a key, an auditor who
//! was given none can still tell one tenant's receipts from another's, and whoever holds the key can say whose they are.

use super::chain::hex;
use sha2::{Digest, Sha256};

/// What SHA-256 takes at once.
const BLOCK: usize = 64;
/// Bytes of the code that are kept.
const KEPT: usize = 16;

/// The key of a fleet's pseudonyms.
#[derive(Clone)]
pub struct PseudonymKey {
    inner: [u8; BLOCK],
    outer: [u8; BLOCK],
}

impl PseudonymKey {
    /// The shortest secret that is taken, in bytes: one that can be guessed gives every name away.
    pub const SECRET_BYTES_MIN: usize = 16;

    /// The key made from a secret; `None` if that is shorter than [`PseudonymKey::SECRET_BYTES_MIN`].
    pub fn new(secret: &[u8]) -> Option<PseudonymKey> {
        (secret.len() >= PseudonymKey::SECRET_BYTES_MIN).then(|| PseudonymKey::of(secret))
    }

    fn of(secret: &[u8]) -> PseudonymKey {
        let mut block = [0; BLOCK];
        if secret.len() > BLOCK {
            block[..32].copy_from_slice(&Sha256::digest(secret));
        } else {
            block[..secret.len()].copy_from_slice(secret);
        }
        PseudonymKey { inner: block.map(|byte| byte ^ 0x36), outer: block.map(|byte| byte ^ 0x5c) }
    }

    /// The pseudonym of a tenant.
    pub fn pseudonym(&self, tenant: &str) -> String {
        hex(&self.code(tenant.as_bytes())[..KEPT])
    }

    fn code(&self, text: &[u8]) -> [u8; 32] {
        let inner = Sha256::new().chain_update(self.inner).chain_update(text).finalize();
        Sha256::new().chain_update(self.outer).chain_update(inner).finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_that_of_the_standard() {
        // RFC 4231, cases 1, 2 and 6.
        let check = |secret: &[u8], text: &[u8], expected: &str| {
            assert_eq!(hex(&PseudonymKey::of(secret).code(text)), expected);
        };
        let code = "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7";
        check(&[0x0b; 20], b"Hi There", code);
        let code = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        check(b"Jefe", b"what do ya want for nothing?", code);
        let code = "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54";
        check(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First", code);
    }

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
