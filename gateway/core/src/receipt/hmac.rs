//! HMAC-SHA-256 (RFC 2104), for pseudonyms and for the signature of checkpoints.
//!
//! Implemented here because a core uses no crate with a random number generator, and the algorithm is two hashes.

use sha2::{Digest, Sha256};

/// Block size of SHA-256, in bytes.
const BLOCK_BYTES: usize = 64;

/// Minimum bytes of a secret: 128 bits cannot be guessed.
pub(super) const SECRET_BYTES_MIN: usize = 16;

/// Key of an HMAC, padded for both hashes.
#[derive(Clone)]
pub(super) struct HmacKey {
    inner: [u8; BLOCK_BYTES],
    outer: [u8; BLOCK_BYTES],
}

impl HmacKey {
    /// Makes the key from a secret of any length.
    pub(super) fn of(secret: &[u8]) -> HmacKey {
        let mut block = [0; BLOCK_BYTES];
        if secret.len() > BLOCK_BYTES {
            block[..32].copy_from_slice(&Sha256::digest(secret));
        } else {
            block[..secret.len()].copy_from_slice(secret);
        }
        HmacKey { inner: block.map(|byte| byte ^ 0x36), outer: block.map(|byte| byte ^ 0x5c) }
    }

    /// Returns the authentication code of `text`.
    pub(super) fn tag(&self, text: &[u8]) -> [u8; 32] {
        let inner = Sha256::new().chain_update(self.inner).chain_update(text).finalize();
        Sha256::new().chain_update(self.outer).chain_update(inner).finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain::hex;
    use super::*;

    #[test]
    fn the_code_matches_the_standard() {
        // RFC 4231, cases 1, 2 and 6.
        let check = |secret: &[u8], text: &[u8], expected: &str| {
            assert_eq!(hex(&HmacKey::of(secret).tag(text)), expected);
        };
        let code = "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7";
        check(&[0x0b; 20], b"Hi There", code);
        let code = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        check(b"Jefe", b"what do ya want for nothing?", code);
        let code = "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54";
        check(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First", code);
    }
}
