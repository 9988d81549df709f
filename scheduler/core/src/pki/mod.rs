//! Decisions of the built-in certificate authority. Signing, files and the store belong to the shells.
//!
//! A process gets its first certificate for a join token, which an operator creates for one role and one region, and
//! each further one for its current certificate. Names in certificates come from the token or from the current
//! certificate, never from the request for a certificate, so a process cannot choose its name.
//!
//! ```text
//! operator ──create token──▶ hub        the store has the hash of the secret
//! process ──join: secret, CSR──▶ hub ──certificate──▶ process        the token is used up
//! process ──renew: certificate, CSR──▶ hub ──certificate──▶ process        at half of the life
//! ```
//!
//! In reading order:
//!
//! - [`subject`]: name in a certificate (SPIFFE ID).
//! - [`token`]: join token, as text and as a record.
//! - [`closed`]: tokens that were used or revoked, as a hub remembers them outside of the store.
//! - [`issue`]: which key may be certified, for how long, and when a certificate is renewed.
//! - [`trust`]: trusted authorities and revoked certificates, with a generation that only rises.
//! - [`polls`]: when a process polls which hub for the trusted state.
//! - [`rotation`]: replacement of the authority in three steps.
//! - [`limit`]: limit on failed attempts to join.
//!
//! Times are durations since 1970, in whole seconds where they are stored.

pub mod closed;
pub mod issue;
pub mod limit;
pub mod polls;
pub mod rotation;
pub mod subject;
pub mod token;
pub mod trust;

use std::fmt::Write;
use std::time::Duration;

/// Clock skew that is tolerated between two processes of a fleet.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(5 * 60);

/// Returns bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String accepts every write");
        text
    })
}

/// Parses `N` bytes in lower-case hexadecimal digits.
pub fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N || !digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).ok()?;
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hexadecimal_digits_are_read_back_as_they_were_written(bytes: [u8; 20]) {
            prop_assert_eq!(from_hex::<20>(&hex(&bytes)), Some(bytes));
            prop_assert_eq!(from_hex::<19>(&hex(&bytes)), None);
        }
    }

    #[test]
    fn other_digits_are_rejected() {
        for text in ["", "0", "0G", "0A", "+f", "é"] {
            assert_eq!(from_hex::<1>(text), None, "{text}");
        }
    }
}
